//! Llama (Touvron et al., 2023; Grattafiori et al., "The Llama 3 herd of models", 2024).

use super::loss::causal_loss;
use crate::trace::Batch;
use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, Initializer, Linear, RmsNorm, RmsNormConfig};
use burn::tensor::activation::silu;
use burn::tensor::module::{attention, linear};
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Device, Int, Tensor, TensorData};
use serde::{Deserialize, Serialize};

/// How Llama 3.1 stretches its rotary frequencies to longer sequences.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RopeScaling {
    /// By how much low frequencies are divided.
    pub factor: f64,
    /// Wavelengths above `original / low` are divided.
    pub low: f64,
    /// Wavelengths below `original / high` stay.
    pub high: f64,
    /// The length of the sequences before.
    pub original: f64,
}

/// The sizes of a Llama.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LlamaConfig {
    /// The number of blocks.
    pub layers: usize,
    /// The width.
    pub width: usize,
    /// The number of query heads.
    pub heads: usize,
    /// The number of key/value heads, which divides that of the query heads.
    pub kv_heads: usize,
    /// The width of a head.
    pub head_width: usize,
    /// The width inside the feed-forward network.
    pub hidden: usize,
    /// The number of tokens.
    pub vocabulary: usize,
    /// The longest sequence the model was made for; nothing depends on it.
    pub positions: usize,
    /// The base of the rotary frequencies.
    pub rope_theta: f64,
    /// How the frequencies are scaled, if they are.
    pub rope_scaling: Option<RopeScaling>,
    /// The number added to mean squares.
    pub eps: f64,
    /// Whether the head is the token table.
    pub tied: bool,
    /// The standard deviation of initial weights.
    pub init_std: f64,
}

impl LlamaConfig {
    /// The sizes that differ between published models: layers, width, heads, key/value heads,
    /// inner width, vocabulary.
    pub fn new(sizes: [usize; 6]) -> Self {
        let [layers, width, heads, kv_heads, hidden, vocabulary] = sizes;
        Self {
            layers,
            width,
            heads,
            kv_heads,
            head_width: width / heads,
            hidden,
            vocabulary,
            positions: 8192,
            rope_theta: 500_000.0,
            rope_scaling: None,
            eps: 1e-5,
            tied: false,
            init_std: 0.02,
        }
    }

    /// The number of parameters, a tied head once.
    pub fn parameters(&self) -> u64 {
        let [l, d, h, kv, e, f, v] =
            [self.layers, self.width, self.heads, self.kv_heads, self.head_width, self.hidden, self.vocabulary]
                .map(|size| size as u64);
        let block = 2 * d * h * e + 2 * d * kv * e + 3 * d * f + 2 * d;
        l * block + d + v * d * if self.tied { 1 } else { 2 }
    }

    /// The rotary frequencies, one per pair of a head, in f32 as they are trained with.
    pub fn frequencies(&self) -> Vec<f32> {
        let frequency = |pair: usize| {
            let exponent = (2 * pair) as f64 / self.head_width as f64;
            let frequency = 1.0 / self.rope_theta.powf(exponent);
            let Some(scaling) = &self.rope_scaling else { return frequency };
            let turns = scaling.original * frequency / (2.0 * std::f64::consts::PI);
            let smooth = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0.0, 1.0);
            frequency * ((1.0 - smooth) / scaling.factor + smooth)
        };
        (0..self.head_width / 2).map(|pair| frequency(pair) as f32).collect()
    }

    /// The model on a device.
    pub fn init(&self, device: &Device) -> Llama {
        let normal = || Initializer::Normal { mean: 0.0, std: self.init_std };
        let head = || Linear { weight: normal().init([self.width, self.vocabulary], device), bias: None };
        Llama {
            token: EmbeddingConfig::new(self.vocabulary, self.width).with_initializer(normal()).init(device),
            blocks: (0..self.layers).map(|_| self.block(device)).collect(),
            norm: self.norm(device),
            head: (!self.tied).then(head),
            frequencies: self.frequencies(),
        }
    }

    fn block(&self, device: &Device) -> Block {
        let project = |from, to| self.project(from, to, device);
        Block {
            attention_norm: self.norm(device),
            attention: SelfAttention::new(self, device),
            mlp_norm: self.norm(device),
            mlp: Mlp {
                gate: project(self.width, self.hidden),
                up: project(self.width, self.hidden),
                down: project(self.hidden, self.width),
            },
        }
    }

    fn project(&self, from: usize, to: usize, device: &Device) -> Linear {
        let weight = Initializer::Normal { mean: 0.0, std: self.init_std }.init([from, to], device);
        Linear { weight, bias: None }
    }

    fn norm(&self, device: &Device) -> RmsNorm {
        RmsNormConfig::new(self.width).with_epsilon(self.eps).init(device)
    }
}

/// A Llama.
#[derive(Module, Debug)]
pub struct Llama {
    token: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    head: Option<Linear>,
    #[module(skip)]
    frequencies: Vec<f32>,
}

#[derive(Module, Debug)]
struct Block {
    attention_norm: RmsNorm,
    attention: SelfAttention,
    mlp_norm: RmsNorm,
    mlp: Mlp,
}

/// Causal attention with grouped queries and rotary positions.
#[derive(Module, Debug)]
pub(super) struct SelfAttention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    heads: usize,
    kv_heads: usize,
}

#[derive(Module, Debug)]
struct Mlp {
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Llama {
    /// The logits `[b, s, v]` of `ids` `[b, s]`.
    pub fn forward(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let [_, seq] = ids.dims();
        let (cos, sin) = angles(&self.frequencies, seq, &ids.device());
        let mut x = self.token.forward(ids);
        for block in &self.blocks {
            let y = block.attention_norm.forward(x.clone());
            x = x + block.attention.forward(y, &cos, &sin);
            let y = block.mlp_norm.forward(x.clone());
            x = x + block.mlp.forward(y);
        }
        let x = self.norm.forward(x);
        match &self.head {
            Some(head) => head.forward(x),
            None => linear(x, self.token.weight.val().transpose(), None),
        }
    }

    /// The loss of a batch of `input_ids` and `labels`; the logits are a result.
    pub fn loss(&self, batch: &mut Batch, size: usize, seq: usize) -> Tensor<1> {
        let ids = batch.int("input_ids", [size, seq]);
        let labels = batch.int("labels", [size, seq]);
        let logits = self.forward(ids);
        batch.result("logits", logits.clone());
        causal_loss(logits, labels)
    }
}

/// Cosines and sines `[1, s, 1, d/2]` of the angles of every position.
pub(super) fn angles(frequencies: &[f32], seq: usize, device: &Device) -> (Tensor<4>, Tensor<4>) {
    let half = frequencies.len();
    let frequencies = Tensor::<2>::from_data(TensorData::new(frequencies.to_vec(), [1, half]), device);
    let positions = Tensor::<1, Int>::arange(0..seq as i64, device).float().reshape([seq, 1]);
    let angles = (positions * frequencies).reshape([1, seq, 1, half]);
    (angles.clone().cos(), angles.sin())
}

/// Turns the two halves of each head of `x` `[b, s, h, d]` by angles given as `[1, s, 1, d/2]`.
fn rotary(x: Tensor<4>, cos: &Tensor<4>, sin: &Tensor<4>) -> Tensor<4> {
    let [batch, seq, heads, width] = x.dims();
    let left = x.clone().slice([0..batch, 0..seq, 0..heads, 0..width / 2]);
    let right = x.slice([0..batch, 0..seq, 0..heads, width / 2..width]);
    let turned_left = left.clone() * cos.clone() - right.clone() * sin.clone();
    let turned_right = right * cos.clone() + left * sin.clone();
    Tensor::cat(vec![turned_left, turned_right], 3)
}

/// Each key or value head `[b, kv, t, d]` once for every query head of its group.
fn repeat_heads(x: Tensor<4>, groups: usize) -> Tensor<4> {
    let [batch, heads, seq, width] = x.dims();
    if groups == 1 {
        return x;
    }
    let wide: Tensor<5> = x.reshape([batch, heads, 1, seq, width]).expand([batch, heads, groups, seq, width]);
    wide.reshape([batch, heads * groups, seq, width])
}

impl SelfAttention {
    pub(super) fn new(config: &LlamaConfig, device: &Device) -> Self {
        let (queries, keys) = (config.heads * config.head_width, config.kv_heads * config.head_width);
        Self {
            query: config.project(config.width, queries, device),
            key: config.project(config.width, keys, device),
            value: config.project(config.width, keys, device),
            output: config.project(queries, config.width, device),
            heads: config.heads,
            kv_heads: config.kv_heads,
        }
    }

    /// What tokens `[b, s, d]` read of those before them.
    pub(super) fn forward(&self, x: Tensor<3>, cos: &Tensor<4>, sin: &Tensor<4>) -> Tensor<3> {
        let [batch, seq, _] = x.dims();
        let split = |x: Tensor<3>, heads: usize| {
            let [_, _, width] = x.dims();
            x.reshape([batch, seq, heads, width / heads])
        };
        let q = rotary(split(self.query.forward(x.clone()), self.heads), cos, sin);
        let k = rotary(split(self.key.forward(x.clone()), self.kv_heads), cos, sin);
        let v = split(self.value.forward(x), self.kv_heads);
        let groups = self.heads / self.kv_heads;
        let k = repeat_heads(k.swap_dims(1, 2), groups);
        let v = repeat_heads(v.swap_dims(1, 2), groups);
        let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
        let o = attention(q.swap_dims(1, 2), k, v, None, None, options).swap_dims(1, 2);
        let [_, _, heads, width] = o.dims();
        self.output.forward(o.reshape([batch, seq, heads * width]))
    }
}

impl Mlp {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.down.forward(silu(self.gate.forward(x.clone())) * self.up.forward(x))
    }
}
