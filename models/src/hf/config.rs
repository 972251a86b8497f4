//! `config.json`, of transformers 5 (`rope_parameters`) and before (`rope_theta`, `rope_scaling`).

use super::{HfError, io};
use crate::zoo::{self, Config, Gpt2Config, LlamaConfig, RopeScaling};
use serde_json::{Map, Value, json};
use std::ops::RangeInclusive;
use std::path::Path;

/// No size of a model is beyond this.
const SIZE_LIMIT: u64 = 1 << 28;

/// No model has this many layers.
const LAYER_LIMIT: u64 = (1 << 16) - 1;

/// An object of the file, with where it is for errors.
struct Fields<'a> {
    path: &'a Path,
    prefix: &'a str,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    fn get(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    fn missing(&self, field: &str) -> HfError {
        HfError::MissingField { path: self.path.to_path_buf(), field: format!("{}{field}", self.prefix) }
    }

    fn wrong(&self, field: &str, expect: impl Into<String>) -> HfError {
        let (path, field, value) = (self.path.to_path_buf(), format!("{}{field}", self.prefix), &self.map[field]);
        HfError::Field { path, field, value: value.to_string(), expect: expect.into() }
    }

    fn unsupported(&self, message: String) -> HfError {
        HfError::Unsupported { path: self.path.to_path_buf(), message }
    }

    fn optional_size_in(&self, field: &str, range: RangeInclusive<u64>) -> Result<Option<usize>, HfError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let size = value.as_u64().filter(|size| range.contains(size)).map(|size| size as usize);
        let expect = || format!("a whole number from {} to {}", range.start(), range.end());
        size.map(Some).ok_or_else(|| self.wrong(field, expect()))
    }

    fn optional_size(&self, field: &str) -> Result<Option<usize>, HfError> {
        self.optional_size_in(field, 1..=SIZE_LIMIT)
    }

    fn size_in(&self, field: &str, range: RangeInclusive<u64>) -> Result<usize, HfError> {
        self.optional_size_in(field, range)?.ok_or_else(|| self.missing(field))
    }

    fn size(&self, field: &str) -> Result<usize, HfError> {
        self.size_in(field, 1..=SIZE_LIMIT)
    }

    /// A number of layers, of which a mistaken one would fill the memory with names.
    fn layers(&self, field: &str) -> Result<usize, HfError> {
        self.size_in(field, 1..=LAYER_LIMIT)
    }

    /// A number of tokens; of one alone there is nothing to tell apart.
    fn vocabulary(&self, field: &str) -> Result<usize, HfError> {
        self.size_in(field, 2..=SIZE_LIMIT)
    }

    /// Heads among which a width divides.
    fn heads(&self, field: &str, width: (&str, usize)) -> Result<usize, HfError> {
        let heads = self.size(field)?;
        let expect = || format!("a divisor of `{}`, which is {}", width.0, width.1);
        if width.1.is_multiple_of(heads) { Ok(heads) } else { Err(self.wrong(field, expect())) }
    }

    fn optional_number(&self, field: &str) -> Result<Option<f64>, HfError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value.as_f64().map(Some).ok_or_else(|| self.wrong(field, "a number"))
    }

    /// A number above 0: what others are divided by, or the deviation of initial weights.
    fn optional_positive(&self, field: &str) -> Result<Option<f64>, HfError> {
        let number = self.optional_number(field)?;
        match number.is_none_or(|number| number.is_finite() && number > 0.0) {
            true => Ok(number),
            false => Err(self.wrong(field, "a number above 0")),
        }
    }

    fn positive(&self, field: &str) -> Result<f64, HfError> {
        self.optional_positive(field)?.ok_or_else(|| self.missing(field))
    }

    /// Says of probabilities to drop something that nothing is dropped.
    fn no_dropout(&self, fields: &[&str]) -> Result<(), HfError> {
        for field in fields {
            let probability = self.optional_number(field)?.unwrap_or(0.0);
            if !(0.0..=1.0).contains(&probability) {
                return Err(self.wrong(field, "a probability, from 0 to 1"));
            }
            if probability > 0.0 {
                tracing::warn!("`{field}` is {probability}; the model is trained without dropout");
            }
        }
        Ok(())
    }

    fn flag(&self, field: &str, fallback: bool) -> Result<bool, HfError> {
        let Some(value) = self.get(field) else { return Ok(fallback) };
        value.as_bool().ok_or_else(|| self.wrong(field, "true or false"))
    }

    /// Refuses an option that is set to anything but what we do.
    fn only(&self, field: &str, allowed: &[Value]) -> Result<(), HfError> {
        match self.get(field) {
            Some(value) if !allowed.contains(value) => {
                let known: Vec<String> = allowed.iter().map(ToString::to_string).collect();
                Err(self.unsupported(format!("`{field}` is {value}; supported: {}", known.join(", "))))
            }
            _ => Ok(()),
        }
    }
}

/// The fields of a `config.json`.
pub(super) fn read_map(path: &Path) -> Result<Map<String, Value>, HfError> {
    let text = std::fs::read_to_string(path).map_err(io(path))?;
    let malformed = |message: String| HfError::Malformed { path: path.to_path_buf(), message };
    let value: Value = serde_json::from_str(&text).map_err(|error| malformed(format!("not JSON: {error}")))?;
    match value {
        Value::Object(map) => Ok(map),
        _ => Err(malformed("not a JSON object".to_string())),
    }
}

pub(super) fn read(path: &Path) -> Result<Config, HfError> {
    let map = read_map(path)?;
    let fields = Fields { path, prefix: "", map: &map };
    let model_type = fields.get("model_type").ok_or_else(|| fields.missing("model_type"))?;
    match model_type.as_str() {
        Some("gpt2") => gpt2(&fields).map(Config::Gpt2),
        Some("llama") => llama(&fields).map(Config::Llama),
        Some(other) => {
            // Those of its family that are built in can be trained, if not from these weights.
            let built_in = zoo::list().into_iter().filter(|entry| entry.name.starts_with(&format!("{other}-")));
            let names: Vec<String> = built_in.map(|entry| format!("`{}`", entry.name)).collect();
            let instead = match names[..] {
                [] => String::new(),
                _ => format!("; built in, with random weights: {}", names.join(", ")),
            };
            Err(fields.unsupported(format!("architecture `{other}`; supported: gpt2, llama{instead}")))
        }
        None => Err(fields.wrong("model_type", "the name of an architecture")),
    }
}

fn gpt2(fields: &Fields<'_>) -> Result<Gpt2Config, HfError> {
    fields.only("activation_function", &[json!("gelu_new"), json!("gelu_pytorch_tanh")])?;
    fields.only("add_cross_attention", &[json!(false)])?;
    fields.only("scale_attn_weights", &[json!(true)])?;
    fields.only("scale_attn_by_inverse_layer_idx", &[json!(false)])?;
    fields.only("tie_word_embeddings", &[json!(true)])?;
    fields.no_dropout(&["attn_pdrop", "embd_pdrop", "resid_pdrop"])?;
    let width = fields.size("n_embd")?;
    Ok(Gpt2Config {
        layers: fields.layers("n_layer")?,
        width,
        heads: fields.heads("n_head", ("n_embd", width))?,
        hidden: fields.optional_size("n_inner")?.unwrap_or(4 * width),
        vocabulary: fields.vocabulary("vocab_size")?,
        positions: fields.size("n_positions")?,
        eps: fields.optional_positive("layer_norm_epsilon")?.unwrap_or(1e-5),
        init_std: fields.optional_positive("initializer_range")?.unwrap_or(0.02),
    })
}

fn llama(fields: &Fields<'_>) -> Result<LlamaConfig, HfError> {
    fields.only("hidden_act", &[json!("silu")])?;
    fields.only("attention_bias", &[json!(false)])?;
    fields.only("mlp_bias", &[json!(false)])?;
    fields.no_dropout(&["attention_dropout"])?;
    if let Some(token) = fields.get("pad_token_id").filter(|token| token.as_i64().is_none_or(|token| token >= 0)) {
        tracing::warn!("`pad_token_id` is {token}: transformers gives its embedding no gradient, here it has one");
    }
    let width = fields.size("hidden_size")?;
    // Where heads have a width of their own, theirs need not be the model's.
    let (heads, head_width) = match fields.optional_size("head_dim")? {
        Some(head_width) => (fields.size("num_attention_heads")?, head_width),
        None => {
            let heads = fields.heads("num_attention_heads", ("hidden_size", width))?;
            (heads, width / heads)
        }
    };
    if !head_width.is_multiple_of(2) {
        let even = "the rotary embedding turns the numbers of a head in pairs";
        return Err(match fields.get("head_dim") {
            Some(_) => fields.wrong("head_dim", format!("even: {even}")),
            None => fields.wrong("num_attention_heads", format!("of even width, not {width} / {heads}: {even}")),
        });
    }
    let kv_heads = match fields.get("num_key_value_heads") {
        Some(_) => fields.heads("num_key_value_heads", ("num_attention_heads", heads))?,
        None => heads,
    };
    let (rope_theta, rope_scaling) = rope(fields)?;
    Ok(LlamaConfig {
        layers: fields.layers("num_hidden_layers")?,
        width,
        heads,
        kv_heads,
        head_width,
        hidden: fields.size("intermediate_size")?,
        vocabulary: fields.vocabulary("vocab_size")?,
        positions: fields.optional_size("max_position_embeddings")?.unwrap_or(2048),
        rope_theta,
        rope_scaling,
        eps: fields.optional_positive("rms_norm_eps")?.unwrap_or(1e-6),
        tied: fields.flag("tie_word_embeddings", false)?,
        init_std: fields.optional_positive("initializer_range")?.unwrap_or(0.02),
    })
}

/// The base of the rotary frequencies and their scaling.
fn rope(fields: &Fields<'_>) -> Result<(f64, Option<RopeScaling>), HfError> {
    let outer = fields.optional_positive("rope_theta")?;
    // Where both are given, transformers 5 takes the older.
    let mut found = None;
    for field in ["rope_parameters", "rope_scaling"] {
        let Some(value) = fields.get(field) else { continue };
        let map = value.as_object().ok_or_else(|| fields.wrong(field, "an object"))?;
        found = Some((field, map)).filter(|_| !map.is_empty()).or(found);
    }
    let Some((field, map)) = found else {
        return Ok((outer.unwrap_or(10_000.0), None));
    };
    let prefix = format!("{field}.");
    let rope = Fields { path: fields.path, prefix: &prefix, map };
    let theta = rope.optional_positive("rope_theta")?.or(outer).unwrap_or(10_000.0);
    let kind = match ["rope_type", "type"].into_iter().find(|field| rope.get(field).is_some()) {
        Some(field) => map[field].as_str().ok_or_else(|| rope.wrong(field, "the name of a rotary type"))?,
        None => "default",
    };
    let scaling = match kind {
        "default" => None,
        "llama3" => {
            let (factor, low) = (rope.positive("factor")?, rope.positive("low_freq_factor")?);
            let high = rope.positive("high_freq_factor")?;
            if high <= low {
                return Err(rope.wrong("high_freq_factor", format!("more than `low_freq_factor`, which is {low}")));
            }
            Some(RopeScaling { factor, low, high, original: rope.positive("original_max_position_embeddings")? })
        }
        other => return Err(fields.unsupported(format!("rotary type `{other}`; supported: default, llama3"))),
    };
    Ok((theta, scaling))
}

/// The fields of a `config.json` that say what a model is.
pub(super) fn write(config: &Config) -> Map<String, Value> {
    let value = match config {
        Config::Gpt2(c) => json!({
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": 0.0,
            "dtype": "float32",
            "embd_pdrop": 0.0,
            "initializer_range": c.init_std,
            "layer_norm_epsilon": c.eps,
            "model_type": "gpt2",
            "n_ctx": c.positions,
            "n_embd": c.width,
            "n_head": c.heads,
            "n_inner": c.hidden,
            "n_layer": c.layers,
            "n_positions": c.positions,
            "resid_pdrop": 0.0,
            "tie_word_embeddings": true,
            "vocab_size": c.vocabulary,
        }),
        Config::Llama(c) => {
            let rope = match &c.rope_scaling {
                None => json!({ "rope_theta": c.rope_theta, "rope_type": "default" }),
                Some(scaling) => json!({
                    "factor": scaling.factor,
                    "high_freq_factor": scaling.high,
                    "low_freq_factor": scaling.low,
                    "original_max_position_embeddings": scaling.original as u64,
                    "rope_theta": c.rope_theta,
                    "rope_type": "llama3",
                }),
            };
            let mut fields = json!({
                "architectures": ["LlamaForCausalLM"],
                "attention_bias": false,
                "attention_dropout": 0.0,
                "dtype": "float32",
                "head_dim": c.head_width,
                "hidden_act": "silu",
                "hidden_size": c.width,
                "initializer_range": c.init_std,
                "intermediate_size": c.hidden,
                "max_position_embeddings": c.positions,
                "mlp_bias": false,
                "model_type": "llama",
                "num_attention_heads": c.heads,
                "num_hidden_layers": c.layers,
                "num_key_value_heads": c.kv_heads,
                "rms_norm_eps": c.eps,
                "rope_parameters": rope,
                "rope_theta": c.rope_theta,
                "tie_word_embeddings": c.tied,
                "vocab_size": c.vocabulary,
            });
            if c.rope_scaling.is_some() {
                // What transformers before 5 reads.
                fields["rope_scaling"] = fields["rope_parameters"].clone();
            }
            fields
        }
        _ => Value::Null,
    };
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}
