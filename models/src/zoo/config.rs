//! The families of the zoo: what a model of each is given, and how it is built from its sizes.

use super::loss::IGNORED;
use super::{Gpt2Config, LlamaConfig, MixerConfig, MoeConfig, ResNetConfig, TwoTowerConfig, UNetConfig};
use crate::trace::{Model, TraceError, trace};
use serde::{Deserialize, Serialize};
use shardc_ir::units::counted;

/// The sizes of a model of one of the families.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Config {
    /// GPT-2 and GPT-3.
    Gpt2(Gpt2Config),
    /// Llama.
    Llama(LlamaConfig),
    /// Llama with experts.
    Moe(MoeConfig),
    /// ResNet.
    ResNet(ResNetConfig),
    /// U-Net.
    UNet(UNetConfig),
    /// MLP-Mixer.
    Mixer(MixerConfig),
    /// Two towers.
    TwoTower(TwoTowerConfig),
}

/// What the integers of an input may be: at least 0 and below a number, or the one that does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The number.
    pub below: u64,
    /// What does not count, if there is such a thing.
    pub ignored: Option<i64>,
}

impl Range {
    /// Whether an integer is one of them.
    pub fn holds(self, value: i64) -> bool {
        Some(value) == self.ignored || u64::try_from(value).is_ok_and(|value| value < self.below)
    }
}

impl std::fmt::Display for Range {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "at least 0 and below {}", self.below)?;
        self.ignored.map_or(Ok(()), |ignored| write!(f, ", or {ignored}, which does not count"))
    }
}

impl Config {
    /// The number of parameters.
    pub fn parameters(&self) -> u64 {
        match self {
            Self::Gpt2(config) => config.parameters(),
            Self::Llama(config) => config.parameters(),
            Self::Moe(config) => config.parameters(),
            Self::ResNet(config) => config.parameters(),
            Self::UNet(config) => config.parameters(),
            Self::Mixer(config) => config.parameters(),
            Self::TwoTower(config) => config.parameters(),
        }
    }

    /// The number of tokens, of a language model.
    pub fn vocabulary(&self) -> Option<usize> {
        match self {
            Self::Gpt2(config) => Some(config.vocabulary),
            Self::Llama(config) => Some(config.vocabulary),
            Self::Moe(config) => Some(config.base.vocabulary),
            _ => None,
        }
    }

    /// The longest sequence, where positions are learned.
    pub fn positions(&self) -> Option<usize> {
        match self {
            Self::Gpt2(config) => Some(config.positions),
            _ => None,
        }
    }

    /// The longest sequence that the model was made for, where positions are turned and longer ones can be computed.
    pub fn rotary_positions(&self) -> Option<u64> {
        match self {
            Self::Llama(config) => Some(config.positions as u64),
            Self::Moe(config) => Some(config.base.positions as u64),
            _ => None,
        }
    }

    /// What the integers of an input may be.
    pub fn range(&self, input: &str) -> Option<Range> {
        let mut ignored = None;
        let below = match (self, input) {
            (_, "input_ids") => self.vocabulary()?,
            (Self::ResNet(config), "labels") => config.classes,
            (Self::Mixer(config), "labels") => config.classes,
            (Self::UNet(config), "masks") => config.classes,
            (Self::TwoTower(config), "users") => config.users,
            (Self::TwoTower(config), "items") => config.items,
            (_, "labels") => {
                ignored = Some(IGNORED);
                self.vocabulary()?
            }
            _ => return None,
        };
        Some(Range { below: below as u64, ignored })
    }

    /// The number of layers; `None` where they are not alike.
    pub fn layers(&mut self) -> Option<&mut usize> {
        match self {
            Self::Gpt2(config) => Some(&mut config.layers),
            Self::Llama(config) => Some(&mut config.layers),
            Self::Moe(config) => Some(&mut config.base.layers),
            Self::Mixer(config) => Some(&mut config.layers),
            Self::ResNet(_) | Self::UNet(_) | Self::TwoTower(_) => None,
        }
    }
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

/// A model of any sizes, for a batch of `batch` samples; of `seq` tokens each, if it is a language model.
///
/// # Errors
///
/// A size that makes no sense.
pub fn build_config(name: &str, config: &Config, batch: usize, seq: usize) -> Result<Model, ZooError> {
    check(config, batch, seq)?;
    Ok(match config {
        Config::Gpt2(c) => trace(name, |device| c.init(device), |model, inputs| model.loss(inputs, batch, seq))?,
        Config::Llama(c) => trace(name, |device| c.init(device), |model, inputs| model.loss(inputs, batch, seq))?,
        Config::Moe(c) => trace(name, |device| c.init(device), |model, inputs| model.loss(inputs, batch, seq))?,
        Config::ResNet(c) => trace(name, |device| c.init(device), |model, inputs| model.loss(inputs, c, batch))?,
        Config::UNet(c) => trace(name, |device| c.init(device), |model, inputs| model.loss(inputs, c, batch))?,
        Config::Mixer(c) => trace(name, |device| c.init(device), |model, inputs| model.loss(inputs, c, batch))?,
        Config::TwoTower(c) => trace(name, |device| c.init(device), |model, inputs| model.loss(inputs, batch))?,
    })
}

/// The longest sequence that is traced: the table of its positions is made in memory.
const LONGEST: usize = 1 << 26;

/// Numbers beyond which sizes are not counted.
const MOST: u64 = 1 << 40;

fn check(config: &Config, batch: usize, seq: usize) -> Result<(), ZooError> {
    if batch == 0 {
        return fail("the batch is empty".to_string());
    }
    match config {
        Config::Gpt2(c) => {
            tokens(batch, seq)?;
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
                let most = c.positions;
                return fail(format!(
                    "sequences of {seq} tokens; the model has {most} positions: use {most} tokens or less"
                ));
            }
            Ok(())
        }
        Config::Llama(c) => tokens(batch, seq).and_then(|()| check_llama(c)),
        Config::Moe(c) => {
            tokens(batch, seq)?;
            check_llama(&c.base)?;
            no_zeros(&[("experts", c.experts), ("chosen experts", c.chosen), ("group", c.group)])?;
            if c.chosen > c.experts || !(c.capacity.is_finite() && c.capacity > 0.0) {
                let (chosen, experts, capacity) = (c.chosen, c.experts, c.capacity);
                return fail(format!("{chosen} of {experts} experts with a capacity of {capacity} cannot be chosen"));
            }
            Ok(())
        }
        Config::ResNet(c) => {
            let blocks = c.stages.iter().sum();
            no_zeros(&[("blocks", blocks), ("width", c.width), ("classes", c.classes)])?;
            pictures(batch, c.size, 1 << (c.stages.len() + 1).min(32))
        }
        Config::UNet(c) => {
            let sizes = [("width", c.width), ("groups", c.groups), ("channels", c.channels), ("classes", c.classes)];
            no_zeros(&sizes)?;
            if c.width % c.groups != 0 {
                return fail(format!("{} groups do not divide a width of {}", c.groups, c.width));
            }
            pictures(batch, c.size, 1 << c.depth.min(32))
        }
        Config::Mixer(c) => {
            let sizes = [
                ("layers", c.layers),
                ("width", c.width),
                ("width over patches", c.token_hidden),
                ("width over channels", c.channel_hidden),
                ("patch", c.patch),
                ("classes", c.classes),
            ];
            no_zeros(&sizes)?;
            pictures(batch, c.size, c.patch)
        }
        Config::TwoTower(c) => {
            let last = c.hidden.iter().copied().min().unwrap_or(0);
            no_zeros(&[("users", c.users), ("items", c.items), ("width", c.width), ("hidden width", last)])?;
            if batch as u64 >= MOST.isqrt() {
                return fail(format!("a batch of {batch} pairs is too large to compare"));
            }
            if !(c.temperature.is_finite() && c.temperature > 0.0) {
                return fail(format!("a temperature of {} scales nothing", c.temperature));
            }
            Ok(())
        }
    }
}

fn fail(message: String) -> Result<(), ZooError> {
    Err(ZooError::Size(message))
}

/// Checks a batch of sequences.
fn tokens(batch: usize, seq: usize) -> Result<(), ZooError> {
    let tokens = (batch as u64).checked_mul(seq as u64).and_then(|tokens| tokens.checked_mul(1 << 24));
    if tokens.is_none() {
        return fail(format!("a batch of {batch} sequences of {seq} tokens is too large to count"));
    }
    if seq > LONGEST {
        return fail(format!("sequences of {seq} tokens; {LONGEST} tokens are the most"));
    }
    if seq < 2 {
        let tokens = counted(seq as u64, "token");
        return fail(format!("sequences of {tokens} have nothing to predict: use 2 tokens or more"));
    }
    Ok(())
}

/// Checks a batch of pictures whose height and width some number must divide.
fn pictures(batch: usize, size: usize, divisor: usize) -> Result<(), ZooError> {
    let pixels = (size as u64).checked_mul(size as u64).and_then(|pixels| pixels.checked_mul(batch as u64));
    if pixels.is_none_or(|pixels| pixels > MOST) {
        return fail(format!("a batch of {batch} pictures of {size} x {size} is too large to count"));
    }
    if size == 0 || !size.is_multiple_of(divisor) {
        return fail(format!("pictures of {size} x {size}; the model halves or cuts them in parts of {divisor}"));
    }
    Ok(())
}

fn check_llama(c: &LlamaConfig) -> Result<(), ZooError> {
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
    if !c.head_width.is_multiple_of(2) {
        let message = "the rotary embedding turns its numbers in pairs";
        return fail(format!("the width of a head is {}, which is odd; {message}", c.head_width));
    }
    if !c.heads.is_multiple_of(c.kv_heads) {
        return fail(format!("{} key/value heads do not divide {} heads", c.kv_heads, c.heads));
    }
    Ok(())
}

fn no_zeros(sizes: &[(&str, usize)]) -> Result<(), ZooError> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        Some((name, _)) => Err(ZooError::Size(format!("the model's size `{name}` is 0"))),
        None => Ok(()),
    }
}
