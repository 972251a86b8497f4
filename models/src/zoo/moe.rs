//! A mixture of experts: a Llama whose feed-forward networks are many, of which each token takes a few (Jiang et al.,
//! "Mixtral of experts", 2024).
//!
//! Tokens are dispatched as in GShard (Lepikhin et al., 2020, algorithm 1): in groups of a few hundred, each expert
//! takes so many tokens of a group and no more, first choices before second ones. What an expert takes lies in slots,
//! so dispatching, the experts and combining are products. An expert is an index that a product shares with its
//! parameter and keeps in its result. A token for which there is no slot passes the layer by.
//!
//! The loads are balanced within each group, so no plan changes what is computed. A group counts in the loss by its
//! tokens that count there. So the loss is one sum over samples that is divided once, and mixtures of experts take
//! microbatches and pipeline stages like other models.

use super::llama::{LlamaConfig, SelfAttention, angles};
use super::loss::causal_terms;
use crate::trace::Batch;
use burn::module::{Module, Param};
use burn::nn::{Embedding, EmbeddingConfig, Initializer, Linear, RmsNorm, RmsNormConfig};
use burn::tensor::activation::{silu, softmax};
use burn::tensor::{Device, Int, Tensor};
use serde::{Deserialize, Serialize};

/// The share of the balance of loads in the loss (Fedus et al., "Switch transformers", 2021, section 2.2).
const BALANCE: f64 = 0.01;

/// The sizes of a mixture of experts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MoeConfig {
    /// All but the experts; `hidden` is the width inside one.
    pub base: LlamaConfig,
    /// The number of experts.
    pub experts: usize,
    /// How many of them a token takes.
    pub chosen: usize,
    /// How many times more tokens an expert takes than its share.
    pub capacity: f64,
    /// The most tokens of a group; a group divides the sequence.
    pub group: usize,
}

impl MoeConfig {
    /// Of `experts` a token takes `chosen`.
    pub fn new(base: LlamaConfig, experts: usize, chosen: usize) -> Self {
        Self { base, experts, chosen, capacity: 1.25, group: 512 }
    }

    /// The number of parameters.
    pub fn parameters(&self) -> u64 {
        let [l, d, f, e] = [self.base.layers, self.base.width, self.base.hidden, self.experts].map(|size| size as u64);
        self.base.parameters() + l * (d * e + 3 * (e - 1) * d * f)
    }

    /// The model on a device.
    pub fn init(&self, device: &Device) -> Moe {
        let base = &self.base;
        let normal = || Initializer::Normal { mean: 0.0, std: base.init_std };
        let norm = || RmsNormConfig::new(base.width).with_epsilon(base.eps).init(device);
        let linear = |from, to| Linear { weight: normal().init([from, to], device), bias: None };
        let stack = |from, to| normal().init([self.experts, from, to], device);
        Moe {
            token: EmbeddingConfig::new(base.vocabulary, base.width).with_initializer(normal()).init(device),
            blocks: (0..base.layers)
                .map(|_| Block {
                    attention_norm: norm(),
                    attention: SelfAttention::new(base, device),
                    mlp_norm: norm(),
                    router: linear(base.width, self.experts),
                    experts: Experts {
                        gate: stack(base.width, base.hidden),
                        up: stack(base.width, base.hidden),
                        down: stack(base.hidden, base.width),
                    },
                })
                .collect(),
            norm: norm(),
            head: linear(base.width, base.vocabulary),
            frequencies: base.frequencies(),
            chosen: self.chosen,
            capacity: self.capacity,
            group: self.group,
        }
    }
}

/// A mixture of experts.
#[derive(Module, Debug)]
pub struct Moe {
    token: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    head: Linear,
    #[module(skip)]
    frequencies: Vec<f32>,
    chosen: usize,
    capacity: f64,
    group: usize,
}

#[derive(Module, Debug)]
struct Block {
    attention_norm: RmsNorm,
    attention: SelfAttention,
    mlp_norm: RmsNorm,
    router: Linear,
    experts: Experts,
}

/// The weights of all experts, one after the other.
#[derive(Module, Debug)]
struct Experts {
    gate: Param<Tensor<3>>,
    up: Param<Tensor<3>>,
    down: Param<Tensor<3>>,
}

impl Experts {
    /// Each expert on its slots `[e, g, c, d]`: those of all groups lie one behind the other, so an expert is one product.
    fn forward(&self, slots: Tensor<4>) -> Tensor<4> {
        let weight = |weight: &Param<Tensor<3>>| weight.val().unsqueeze_dim::<4>(1);
        let hidden = silu(slots.clone().matmul(weight(&self.gate))) * slots.matmul(weight(&self.up));
        hidden.matmul(weight(&self.down))
    }
}

/// Where the tokens of every group go.
struct Routes {
    /// What each slot adds to each token, `[g, s, e, c]`.
    combine: Tensor<4>,
    /// How uneven the loads of each group are, at least 1, `[g]`.
    uneven: Tensor<1>,
}

/// Gives tokens with probabilities `[g, s, e]` to their `chosen` likeliest experts, of which each has
/// `slots` slots per group.
fn route(probabilities: Tensor<3>, chosen: usize, slots: usize) -> Routes {
    let [groups, seq, experts] = probabilities.dims();
    let device = probabilities.device();
    let (weights, index) = probabilities.clone().topk_with_indices(chosen, 2);
    let weights = weights.clone() / weights.sum_dim(2);
    let numbers = Tensor::<1, Int>::arange(0..experts as i64, &device).reshape([1, 1, 1, experts]);
    let index = index.reshape([groups, seq, chosen, 1]).expand([groups, seq, chosen, experts]);
    let taken = index.equal(numbers.expand([groups, seq, chosen, experts])).float();
    // First choices of all tokens come before second ones.
    let queue = taken.clone().swap_dims(1, 2).reshape([groups, chosen * seq, experts]);
    let places = (queue.clone().cumsum(1) * queue).sum_dim(2).int();
    let slot = Tensor::<1, Int>::arange(1..slots as i64 + 1, &device).reshape([1, 1, slots]);
    let places = places.expand([groups, chosen * seq, slots]).equal(slot.expand([groups, chosen * seq, slots]));
    let places = places.float().reshape([groups, chosen, seq, slots]).swap_dims(1, 2);
    let weighted = taken.clone() * weights.reshape([groups, seq, chosen, 1]);
    let load = taken.sum_dim(2).reshape([groups, seq, experts]).mean_dim(1) * (experts as f64 / chosen as f64);
    let uneven = (load * probabilities.mean_dim(1)).sum_dim(2).reshape([groups]);
    Routes { combine: weighted.swap_dims(2, 3).matmul(places), uneven }
}

impl Moe {
    /// The logits `[b, s, v]` of `ids` `[b, s]`, and of every group of tokens how uneven the loads of the experts are,
    /// summed over the blocks.
    pub fn forward(&self, ids: Tensor<2, Int>) -> (Tensor<3>, Tensor<1>) {
        let [_, seq] = ids.dims();
        let [groups, _] = self.groups(ids.dims());
        let (cos, sin) = angles(&self.frequencies, seq, &ids.device());
        let mut uneven = Tensor::zeros([groups], &ids.device());
        let mut x = self.token.forward(ids);
        for block in &self.blocks {
            let y = block.attention_norm.forward(x.clone());
            x = x + block.attention.forward(y, &cos, &sin);
            let (y, of_block) = self.mix(block, block.mlp_norm.forward(x.clone()));
            x = x + y;
            uneven = uneven + of_block;
        }
        (self.head.forward(self.norm.forward(x)), uneven)
    }

    /// The groups of so many sequences of so many tokens, and the tokens of each: the most that divide a sequence.
    fn groups(&self, [batch, seq]: [usize; 2]) -> [usize; 2] {
        let size = (1..=seq.min(self.group)).rev().find(|size| seq.is_multiple_of(*size)).unwrap_or(1);
        [batch * seq / size, size]
    }

    /// What the experts make of tokens `[b, s, d]`.
    fn mix(&self, block: &Block, x: Tensor<3>) -> (Tensor<3>, Tensor<1>) {
        let [batch, seq, width] = x.dims();
        let [groups, group] = self.groups([batch, seq]);
        let x = x.reshape([groups, group, width]);
        let probabilities = softmax(block.router.forward(x.clone()), 2);
        let [_, _, experts] = probabilities.dims();
        let slots = (self.capacity * (self.chosen * group) as f64 / experts as f64).ceil() as usize;
        let slots = slots.clamp(1, group);
        let Routes { combine, uneven } = route(probabilities, self.chosen, slots);
        let combine = combine.reshape([groups, group, experts * slots]);
        let dispatch = combine.clone().greater_elem(0.0).float();
        let taken = dispatch.swap_dims(1, 2).matmul(x).reshape([groups, experts, slots, width]);
        let made =
            block.experts.forward(taken.swap_dims(0, 1)).swap_dims(0, 1).reshape([groups, experts * slots, width]);
        (combine.matmul(made).reshape([batch, seq, width]), uneven)
    }

    /// The mean cross-entropy of the logits, and the balance of loads: of a group by its tokens that count.
    pub fn objective(&self, (logits, uneven): (Tensor<3>, Tensor<1>), labels: Tensor<2, Int>) -> Tensor<1> {
        let groups = self.groups(labels.dims());
        let (sum, counted) = causal_terms(logits, labels);
        let tokens = counted.clone().reshape(groups).sum_dim(1).reshape([groups[0]]);
        let balance = (uneven * tokens).sum() * (BALANCE / self.blocks.len().max(1) as f64);
        (sum + balance) / counted.sum()
    }

    /// The loss of a batch of `input_ids` and `labels`, the balance of loads included; the logits are a
    /// result.
    pub fn loss(&self, batch: &mut Batch, size: usize, seq: usize) -> Tensor<1> {
        let ids = batch.int("input_ids", [size, seq]);
        let labels = batch.int("labels", [size, seq]);
        let (logits, uneven) = self.forward(ids);
        batch.result("logits", logits.clone());
        self.objective((logits, uneven), labels)
    }
}
