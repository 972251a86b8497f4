//! Which part of which tensor of a file each parameter is.
//!
//! A linear weight of ours is `[in, out]`; Llama's files have it `[out, in]`, GPT-2's `[in, out]`
//! with query, key and value side by side.

use super::HfError;
use crate::zoo::{Config, Gpt2Config, LlamaConfig};
use shardc_ir::{DType, TensorType};

/// The head where it is a tensor of its own.
pub(super) const HEAD: &str = "lm_head.weight";

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FileTensor {
    /// Its name.
    pub name: String,
    /// Its name in files of the bare inner model, which have no prefix.
    pub bare: Option<String>,
    /// Its type; parameters have the same element type.
    pub ty: TensorType,
    /// Whether it holds the transposes of its parameters.
    pub transposed: bool,
    /// The parameters side by side along the last dimension.
    pub parameters: Vec<String>,
}

/// The tensors of a model's files, in the order of the model.
///
/// # Errors
///
/// A family of which Hugging Face has no directories of ours.
pub(super) fn tensors(config: &Config) -> Result<Vec<FileTensor>, HfError> {
    let (prefix, mut all) = match config {
        Config::Gpt2(config) => ("transformer.", gpt2(config)),
        Config::Llama(config) => ("model.", llama(config)),
        _ => return Err(HfError::NoFormat),
    };
    for tensor in &mut all {
        if let Some(bare) = &tensor.bare {
            tensor.name = format!("{prefix}{bare}");
        }
    }
    Ok(all)
}

/// The tensors of a model of no family: its parameters as they are, under their own names.
pub(super) fn plain(parameters: &[(String, TensorType)]) -> Vec<FileTensor> {
    let tensor = |(name, ty): &(String, TensorType)| FileTensor {
        name: name.clone(),
        bare: None,
        ty: ty.clone(),
        transposed: false,
        parameters: vec![name.clone()],
    };
    parameters.iter().map(tensor).collect()
}

fn tensor(name: String, shape: &[usize], parameters: &[String]) -> FileTensor {
    let shape: Vec<u64> = shape.iter().map(|size| *size as u64).collect();
    let (bare, ty) = (Some(name.clone()), TensorType::new(DType::F32, shape));
    FileTensor { name, bare, ty, transposed: false, parameters: parameters.to_vec() }
}

fn gpt2(c: &Gpt2Config) -> Vec<FileTensor> {
    let d = c.width;
    let one = |name: &str, shape: &[usize], parameter: &str| tensor(name.to_string(), shape, &[parameter.to_string()]);
    let mut all =
        vec![one("wte.weight", &[c.vocabulary, d], "token.weight"), one("wpe.weight", &[c.positions, d], "position")];
    for layer in 0..c.layers {
        let mut add = |name: &str, shape: &[usize], parameters: &[&str]| {
            let parameters: Vec<String> = parameters.iter().map(|p| format!("blocks.{layer}.{p}")).collect();
            all.push(tensor(format!("h.{layer}.{name}"), shape, &parameters));
        };
        let mut pair = |name: &str, from: usize, to: usize, modules: &[&str]| {
            for (kind, shape) in [("weight", vec![from, to]), ("bias", vec![to])] {
                let parameters: Vec<String> = modules.iter().map(|module| format!("{module}.{kind}")).collect();
                let parameters: Vec<&str> = parameters.iter().map(String::as_str).collect();
                add(&format!("{name}.{kind}"), &shape, &parameters);
            }
        };
        pair("attn.c_attn", d, 3 * d, &["attention.query", "attention.key", "attention.value"]);
        pair("attn.c_proj", d, d, &["attention.output"]);
        pair("mlp.c_fc", d, c.hidden, &["mlp.up"]);
        pair("mlp.c_proj", c.hidden, d, &["mlp.down"]);
        for (name, module) in [("ln_1", "attention_norm"), ("ln_2", "mlp_norm")] {
            add(&format!("{name}.weight"), &[d], &[&format!("{module}.gamma")]);
            add(&format!("{name}.bias"), &[d], &[&format!("{module}.beta")]);
        }
    }
    all.push(one("ln_f.weight", &[d], "norm.gamma"));
    all.push(one("ln_f.bias", &[d], "norm.beta"));
    all
}

fn llama(c: &LlamaConfig) -> Vec<FileTensor> {
    let d = c.width;
    let one = |name: &str, shape: &[usize], parameter: &str| tensor(name.to_string(), shape, &[parameter.to_string()]);
    let mut all = vec![one("embed_tokens.weight", &[c.vocabulary, d], "token.weight")];
    let (queries, keys) = (c.heads * c.head_width, c.kv_heads * c.head_width);
    for layer in 0..c.layers {
        let mut add = |name: &str, parameter: &str, shape: &[usize]| {
            let parameter = format!("blocks.{layer}.{parameter}");
            let mut tensor = tensor(format!("layers.{layer}.{name}.weight"), shape, &[parameter]);
            tensor.transposed = shape.len() == 2;
            all.push(tensor);
        };
        add("input_layernorm", "attention_norm.gamma", &[d]);
        add("self_attn.q_proj", "attention.query.weight", &[queries, d]);
        add("self_attn.k_proj", "attention.key.weight", &[keys, d]);
        add("self_attn.v_proj", "attention.value.weight", &[keys, d]);
        add("self_attn.o_proj", "attention.output.weight", &[d, queries]);
        add("post_attention_layernorm", "mlp_norm.gamma", &[d]);
        add("mlp.gate_proj", "mlp.gate.weight", &[c.hidden, d]);
        add("mlp.up_proj", "mlp.up.weight", &[c.hidden, d]);
        add("mlp.down_proj", "mlp.down.weight", &[d, c.hidden]);
    }
    all.push(one("norm.weight", &[d], "norm.gamma"));
    if !c.tied {
        let head = one(HEAD, &[c.vocabulary, d], "head.weight");
        // It is beside the inner model.
        all.push(FileTensor { transposed: true, bare: None, ..head });
    }
    all
}
