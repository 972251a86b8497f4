//! The models by name.

use super::{Gpt2Config, LlamaConfig, RopeScaling};
use crate::trace::{Model, TraceError, trace};
use serde::{Deserialize, Serialize};
use shardc_ir::names::edit_distance;

/// The sizes of a model of one of the families.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Config {
    /// GPT-2 and GPT-3.
    Gpt2(Gpt2Config),
    /// Llama.
    Llama(LlamaConfig),
}

impl Config {
    /// The number of parameters.
    pub fn parameters(&self) -> u64 {
        match self {
            Self::Gpt2(config) => config.parameters(),
            Self::Llama(config) => config.parameters(),
        }
    }

    /// The number of tokens.
    pub fn vocabulary(&self) -> usize {
        match self {
            Self::Gpt2(config) => config.vocabulary,
            Self::Llama(config) => config.vocabulary,
        }
    }
}

/// A model of the zoo.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Its name.
    pub name: &'static str,
    /// Its sizes.
    pub config: Config,
    /// The number of parameters.
    pub parameters: u64,
    /// Where the sizes come from.
    pub source: &'static str,
}

/// Why a model of the zoo cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum ZooError {
    /// There is no such model.
    #[error("no model is called `{name}`; the nearest are {}", .nearest.join(", "))]
    Unknown {
        /// The name that was asked for.
        name: String,
        /// The names that differ least.
        nearest: Vec<String>,
    },
    /// A size that makes no sense.
    #[error("{0}")]
    Size(String),
    /// The trace failed.
    #[error(transparent)]
    Trace(#[from] TraceError),
}

const GPT2: &str = "Radford et al., \"Language models are unsupervised multitask learners\", 2019, table 2";
const GPT3: &str = "Brown et al., \"Language models are few-shot learners\", 2020, table 2.1";
const LLAMA1: &str = "Touvron et al., \"LLaMA\", 2023, table 2";
const LLAMA3: &str = "Grattafiori et al., \"The Llama 3 herd of models\", 2024, table 3";
const LLAMA32: &str = "Meta, Llama 3.2 1B, config.json";
const SMALL: &str = "the Llama 3 block in a small shape";

/// Every model of the zoo, small ones first in each family.
pub fn list() -> Vec<Entry> {
    let gpt = |name, layers, width, heads, positions, source| {
        let config = Gpt2Config::new(layers, width, heads, positions);
        Entry { name, parameters: config.parameters(), config: Config::Gpt2(config), source }
    };
    let llama = |name, config: LlamaConfig, source| Entry {
        name,
        parameters: config.parameters(),
        config: Config::Llama(config),
        source,
    };
    let scaling = |factor| Some(RopeScaling { factor, low: 1.0, high: 4.0, original: 8192.0 });
    let new = LlamaConfig::new;
    let long = |sizes, factor| LlamaConfig { rope_scaling: scaling(factor), positions: 131_072, ..new(sizes) };
    let first = |sizes| LlamaConfig { rope_theta: 10_000.0, positions: 2048, ..new(sizes) };
    vec![
        gpt("gpt2-124m", 12, 768, 12, 1024, GPT2),
        gpt("gpt2-355m", 24, 1024, 16, 1024, GPT2),
        gpt("gpt2-774m", 36, 1280, 20, 1024, GPT2),
        gpt("gpt2-1.5b", 48, 1600, 25, 1024, GPT2),
        gpt("gpt3-125m", 12, 768, 12, 2048, GPT3),
        gpt("gpt3-350m", 24, 1024, 16, 2048, GPT3),
        gpt("gpt3-760m", 24, 1536, 16, 2048, GPT3),
        // The table gives 24 heads of 128, which do not make 2048; 16 do.
        gpt("gpt3-1.3b", 24, 2048, 16, 2048, GPT3),
        gpt("gpt3-2.7b", 32, 2560, 32, 2048, GPT3),
        gpt("gpt3-6.7b", 32, 4096, 32, 2048, GPT3),
        // The table gives a width of 5140, which 40 heads of 128 do not make; 5120 they do.
        gpt("gpt3-13b", 40, 5120, 40, 2048, GPT3),
        gpt("gpt3-175b", 96, 12288, 96, 2048, GPT3),
        llama("llama-tiny", new([2, 256, 4, 4, 688, 1024]), SMALL),
        llama("llama-160m", new([12, 768, 12, 12, 2048, 32000]), SMALL),
        llama("llama-1b", new([16, 2048, 32, 8, 8192, 128_256]), "Llama 3.2 1B with a head of its own"),
        llama("llama-3.2-1b", LlamaConfig { tied: true, ..long([16, 2048, 32, 8, 8192, 128_256], 32.0) }, LLAMA32),
        llama("llama-3b", new([28, 3072, 24, 8, 8192, 128_256]), "Llama 3.2 3B with a head of its own"),
        llama("llama-8b", new([32, 4096, 32, 8, 14336, 128_256]), LLAMA3),
        llama("llama-65b", first([80, 8192, 64, 64, 22016, 32000]), LLAMA1),
        llama("llama-70b", new([80, 8192, 64, 8, 28672, 128_256]), LLAMA3),
        llama("llama-405b", long([126, 16384, 128, 8, 53248, 128_256], 8.0), LLAMA3),
    ]
}

/// The model of a name, for a batch of `batch` sequences of `seq` tokens.
///
/// # Errors
///
/// An unknown name, with the nearest ones; a size that makes no sense.
pub fn build(name: &str, batch: usize, seq: usize) -> Result<Model, ZooError> {
    let mut entries = list();
    if let Some(entry) = entries.iter().find(|entry| entry.name == name) {
        return build_config(name, &entry.config, batch, seq);
    }
    entries.sort_by_key(|entry| edit_distance(name, entry.name));
    let nearest = entries.iter().take(3).map(|entry| entry.name.to_string()).collect();
    Err(ZooError::Unknown { name: name.to_string(), nearest })
}

/// A model of any sizes.
///
/// # Errors
///
/// A size that makes no sense.
pub fn build_config(name: &str, config: &Config, batch: usize, seq: usize) -> Result<Model, ZooError> {
    check(config, batch, seq)?;
    Ok(match config {
        Config::Gpt2(config) => {
            trace(name, |device| config.init(device), |model, inputs| model.loss(inputs, batch, seq))?
        }
        Config::Llama(config) => {
            trace(name, |device| config.init(device), |model, inputs| model.loss(inputs, batch, seq))?
        }
    })
}

/// The longest sequence that is traced: the table of its positions is made in memory.
const LONGEST: usize = 1 << 26;

fn check(config: &Config, batch: usize, seq: usize) -> Result<(), ZooError> {
    let fail = |message: String| Err(ZooError::Size(message));
    let tokens = (batch as u64).checked_mul(seq as u64).and_then(|tokens| tokens.checked_mul(1 << 24));
    if tokens.is_none() {
        return fail(format!("a batch of {batch} sequences of {seq} tokens is too large to count"));
    }
    if seq > LONGEST {
        return fail(format!("sequences of {seq} tokens; {LONGEST} tokens are the most"));
    }
    if batch == 0 {
        return fail("the batch is empty".to_string());
    }
    if seq < 2 {
        return fail(format!("sequences of {seq} tokens have nothing to predict"));
    }
    match config {
        Config::Gpt2(c) => {
            let sizes = [
                ("layers", c.layers),
                ("width", c.width),
                ("heads", c.heads),
                ("hidden width", c.hidden),
                ("vocabulary", c.vocabulary),
                ("positions", c.positions),
            ];
            no_zeros(&sizes)?;
            if c.width % c.heads != 0 {
                return fail(format!("{} heads do not divide a width of {}", c.heads, c.width));
            }
            if seq > c.positions {
                return fail(format!("sequences of {seq} tokens; the model has {} positions", c.positions));
            }
        }
        Config::Llama(c) => {
            let sizes = [
                ("layers", c.layers),
                ("width", c.width),
                ("heads", c.heads),
                ("key/value heads", c.kv_heads),
                ("width of a head", c.head_width),
                ("hidden width", c.hidden),
                ("vocabulary", c.vocabulary),
            ];
            no_zeros(&sizes)?;
            if c.head_width % 2 != 0 {
                let message = "the rotary embedding turns its numbers in pairs";
                return fail(format!("the width of a head is {}, which is odd; {message}", c.head_width));
            }
            if c.heads % c.kv_heads != 0 {
                return fail(format!("{} key/value heads do not divide {} heads", c.kv_heads, c.heads));
            }
        }
    }
    Ok(())
}

fn no_zeros(sizes: &[(&str, usize)]) -> Result<(), ZooError> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        Some((name, _)) => Err(ZooError::Size(format!("the model's size `{name}` is 0"))),
        None => Ok(()),
    }
}
