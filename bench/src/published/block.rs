//! The operations of a decoder's layer and of its ends, on one rank, from its published sizes.
//!
//! The sources give a table's worth of numbers, not a program, so the operations of a layer's parts
//! (attention, dense network, experts, state-space scan) are listed here and in `parts`, with the
//! shapes that one rank sees. What each takes is the cost model's business ([`Machine::seconds`]).

use super::decoder::Decoder;
use super::parts::Times;
use super::step::Layer;
use shardc_ir::ops::{Matmul, Op};
use shardc_ir::{DType, TensorType};
use shardc_passes::cluster::Cluster;
use shardc_passes::cost::collective::{self, Collective, Group};
use shardc_passes::cost::{Library, Machine, Pass};

/// What of a layer's forward pass is computed again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Again {
    /// Nothing.
    Nothing,
    /// Attention between its projections (Korthikanti et al., 2022).
    Attention,
    /// Every second product and everything elementwise (torchtitan's `selective-op`).
    Operations,
    /// Every second layer.
    HalfTheLayers,
    /// Everything.
    Everything,
}

/// The degrees on which one layer's time depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Shape {
    /// Sequences of a microbatch.
    pub microbatch: u64,
    /// Tensor ranks.
    pub tensor: u64,
    /// Ranks of a sequence.
    pub context: u64,
    /// Ranks of the experts.
    pub expert: u64,
    /// Tensor ranks of one expert.
    pub expert_tensor: u64,
    /// Recomputation.
    pub again: Again,
    /// Whether products run in 8 bits.
    pub is_f8: bool,
}

/// One layer and the ends of a decoder, on one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Block {
    /// A layer.
    pub layer: Layer,
    /// Seconds of embedding, head and loss for a microbatch.
    pub ends: f64,
    /// Bytes of a stage's output.
    pub stream: f64,
}

/// What is at hand while one rank's work is summed.
pub(super) struct Bench<'a> {
    pub(super) machine: Machine<'a>,
    pub(super) cluster: &'a Cluster,
    pub(super) decoder: Decoder,
    pub(super) shape: Shape,
    pub(super) is_sequence_parallel: bool,
}

/// The element type of activations: what is neither f32 nor 8 bits.
pub(super) const HALF: DType = DType::F16;

impl Decoder {
    /// A layer, the mean of all, and the ends, on one rank.
    pub fn block(&self, shape: Shape, cluster: &Cluster, library: &Library) -> Block {
        let machine = Machine { device: &cluster.device, library };
        let is_sequence_parallel = library.is_sequence_parallel || shape.again == Again::Attention;
        Bench { machine, cluster, decoder: *self, shape, is_sequence_parallel }.block()
    }
}

impl Bench<'_> {
    /// Tokens of a microbatch on one rank.
    pub(super) fn tokens(&self) -> u64 {
        self.shape.microbatch * self.decoder.seq / self.shape.context
    }

    pub(super) fn seconds(
        &self,
        op: impl Into<Op>,
        operands: &[TensorType],
        results: &[TensorType],
        pass: Pass,
    ) -> f64 {
        self.machine.seconds(&op.into(), operands, results, pass).0.0
    }

    /// A product `[m, k] x [k, n]`, `batch` of them side by side.
    fn product(&self, batch: u64, m: u64, n: u64, k: u64, dtype: DType) -> f64 {
        let ty = |dtype, a, b| TensorType::new(dtype, [batch, a, b]);
        let operands = [ty(dtype, m, k), ty(dtype, k, n)];
        self.seconds(Matmul::new("bmk,bkn->bmn"), &operands, &[ty(HALF, m, n)], Pass::Forward)
    }

    /// A linear layer over `rows` tokens: forward, gradient of its operand, gradient of its weight.
    pub(super) fn linear(&self, batch: u64, rows: u64, from: u64, to: u64) -> [f64; 3] {
        let dtype = if self.shape.is_f8 { DType::F8e4m3 } else { HALF };
        let product = |m, n, k| self.product(batch, m, n, k, dtype);
        let weight = (batch * from * to) as f64;
        let accumulated = weight * self.machine.library.accumulated_bytes / self.machine.bandwidth();
        [product(rows, to, from), product(rows, from, to), product(from, to, rows) + accumulated]
    }

    fn block(&self) -> Block {
        let Self { decoder, shape, .. } = self;
        let layers = decoder.layers as f64;
        let mut mean = Times::default();
        for (count, part) in [
            (decoder.attentions, Self::attention_part as fn(&Self) -> Times),
            (decoder.networks, Self::network_part),
            (decoder.routed, Self::routed_part),
            (decoder.scans, Self::scan_part),
        ] {
            if count > 0 {
                mean.add(&part(self), count as f64 / layers);
            }
        }
        let Times { products, attention, memory, shown } = mean;
        let forward = products[0] + attention[0] + memory[0] + shown[0];
        let again = match shape.again {
            Again::Nothing => 0.0,
            Again::Attention => attention[0],
            Again::Operations => memory[0] + 0.5 * products[0],
            Again::HalfTheLayers => 0.5 * forward,
            Again::Everything => forward,
        };
        let (dense, expert) = decoder.layer_parameters(*shape);
        let layer = Layer {
            forward,
            backward: products[1] + products[2] + attention[1] + memory[1] + shown[1],
            weight: products[2],
            again,
            restarts: shape.again == Again::Everything,
            tensor: shape.tensor,
            parameters: dense + expert,
            experts: expert,
        };
        let parts = if self.machine.library.sends_parts { shape.tensor } else { 1 };
        Block { layer, ends: self.ends(), stream: (2 * self.tokens() * decoder.hidden / parts) as f64 }
    }

    /// Embedding, head and loss.
    fn ends(&self) -> f64 {
        let (decoder, shape) = (&self.decoder, &self.shape);
        let (tokens, h, vocab) = (self.tokens(), decoder.hidden, decoder.vocab.div_ceil(shape.tensor));
        let product = |m, n, k| self.product(1, m, n, k, HALF);
        let products = product(tokens, vocab, h) + product(tokens, h, vocab) + product(h, vocab, tokens);
        // The table's rows are read, written and their gradients added up, with the last norm: 40 bytes
        // per element of the stream.
        let library = self.machine.library;
        let logit = library.logit_bytes * if shape.tensor > 1 { library.divided_logits } else { 1.0 };
        let bytes = (tokens * vocab) as f64 * logit + (40 * tokens * h) as f64;
        let group = group(self.cluster, shape.tensor, 1);
        let reduce = collective::alone(Collective::AllReduce, (2 * tokens * h) as f64, group, self.cluster).0;
        products + bytes / self.machine.bandwidth() + 2.0 * reduce
    }
}

/// The group of `size` ranks that are `stride` apart.
pub fn group(cluster: &Cluster, size: u64, stride: u64) -> Group {
    let within = (cluster.per_node / stride.max(1)).clamp(1, size.max(1));
    Group::of_nodes(within, size.div_ceil(within).max(1))
}
