//! GPT-2 (Radford et al., 2019) and GPT-3 in its dense form (Brown et al., 2020).
//!
//! Query, key and value are separate projections, so that heads can be divided.

use super::loss::causal_loss;
use crate::trace::Batch;
use burn::module::{Module, Param};
use burn::nn::{Embedding, EmbeddingConfig, Initializer, LayerNorm, LayerNormConfig, Linear};
use burn::tensor::activation::gelu_approximate;
use burn::tensor::module::{attention, linear};
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Device, Int, Tensor};
use serde::{Deserialize, Serialize};

/// The sizes of a GPT-2.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gpt2Config {
    /// The number of blocks.
    pub layers: usize,
    /// The width.
    pub width: usize,
    /// The number of heads, which divides the width.
    pub heads: usize,
    /// The width inside the feed-forward network, four times the width as a rule.
    pub hidden: usize,
    /// The number of tokens.
    pub vocabulary: usize,
    /// The longest sequence.
    pub positions: usize,
    /// The number added to variances.
    pub eps: f64,
    /// The standard deviation of initial weights.
    pub init_std: f64,
}

impl Gpt2Config {
    /// The sizes that differ between published models.
    pub fn new(layers: usize, width: usize, heads: usize, positions: usize) -> Self {
        let (vocabulary, hidden) = (50257, 4 * width);
        Self { layers, width, heads, hidden, vocabulary, positions, eps: 1e-5, init_std: 0.02 }
    }

    /// The number of parameters; the head is the token table.
    pub fn parameters(&self) -> u64 {
        let [l, d, f, v, p] =
            [self.layers, self.width, self.hidden, self.vocabulary, self.positions].map(|size| size as u64);
        let block = 4 * (d * d + d) + (d * f + f) + (f * d + d) + 4 * d;
        v * d + p * d + l * block + 2 * d
    }

    /// The model on a device.
    pub fn init(&self, device: &Device) -> Gpt2 {
        let normal = |std: f64| Initializer::Normal { mean: 0.0, std };
        Gpt2 {
            token: EmbeddingConfig::new(self.vocabulary, self.width)
                .with_initializer(normal(self.init_std))
                .init(device),
            position: normal(self.init_std).init([self.positions, self.width], device),
            blocks: (0..self.layers).map(|_| self.block(device)).collect(),
            norm: self.norm(device),
        }
    }

    fn block(&self, device: &Device) -> Block {
        let std = self.init_std;
        // Radford et al.: weights on the residual path are scaled by the number of residual layers.
        let residual = std / (2.0 * self.layers as f64).sqrt();
        let project = |from, to, std| Linear {
            weight: Initializer::Normal { mean: 0.0, std }.init([from, to], device),
            bias: Some(Initializer::Zeros.init([to], device)),
        };
        Block {
            attention_norm: self.norm(device),
            attention: SelfAttention {
                query: project(self.width, self.width, std),
                key: project(self.width, self.width, std),
                value: project(self.width, self.width, std),
                output: project(self.width, self.width, residual),
                heads: self.heads,
            },
            mlp_norm: self.norm(device),
            mlp: Mlp { up: project(self.width, self.hidden, std), down: project(self.hidden, self.width, residual) },
        }
    }

    fn norm(&self, device: &Device) -> LayerNorm {
        LayerNormConfig::new(self.width).with_epsilon(self.eps).init(device)
    }
}

/// A GPT-2.
#[derive(Module, Debug)]
pub struct Gpt2 {
    token: Embedding,
    position: Param<Tensor<2>>,
    blocks: Vec<Block>,
    norm: LayerNorm,
}

#[derive(Module, Debug)]
struct Block {
    attention_norm: LayerNorm,
    attention: SelfAttention,
    mlp_norm: LayerNorm,
    mlp: Mlp,
}

#[derive(Module, Debug)]
struct SelfAttention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    heads: usize,
}

#[derive(Module, Debug)]
struct Mlp {
    up: Linear,
    down: Linear,
}

impl Gpt2 {
    /// The logits `[b, s, v]` of `ids` `[b, s]`.
    pub fn forward(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let [_, seq] = ids.dims();
        let [positions, width] = self.position.val().dims();
        let position = self.position.val().slice([0..seq.min(positions), 0..width]);
        let mut x = self.token.forward(ids) + position.unsqueeze();
        for block in &self.blocks {
            x = x.clone() + block.attention.forward(block.attention_norm.forward(x));
            x = x.clone() + block.mlp.forward(block.mlp_norm.forward(x));
        }
        linear(self.norm.forward(x), self.token.weight.val().transpose(), None)
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

impl SelfAttention {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [batch, seq, width] = x.dims();
        let split = |x: Tensor<3>| x.reshape([batch, seq, self.heads, width / self.heads]).swap_dims(1, 2);
        let q = split(self.query.forward(x.clone()));
        let k = split(self.key.forward(x.clone()));
        let v = split(self.value.forward(x));
        let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
        let o = attention(q, k, v, None, None, options);
        self.output.forward(o.swap_dims(1, 2).reshape([batch, seq, width]))
    }
}

impl Mlp {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.down.forward(gelu_approximate(self.up.forward(x)))
    }
}
