//! A decoder from published sizes: the operations of one layer and of its ends, on one rank.
//!
//! The sources give a table's worth of numbers, not a program, so the operations of a GPT or Llama
//! layer are listed here, with the shapes that one rank sees. What each takes is the cost model's
//! business ([`Machine::seconds`]).

use shardc_ir::ops::{
    Attention, AttentionGrad, Binary, BinaryKind, LayerNorm, LayerNormGrad, Matmul, Op, Swiglu, SwigluGrad, Unary,
    UnaryGrad, UnaryKind,
};
use shardc_ir::{DType, TensorType};
use shardc_passes::cluster::Cluster;
use shardc_passes::cost::collective::{self, Collective, Group};
use shardc_passes::cost::step::Layer;
use shardc_passes::cost::{Library, Machine, Pass, overlap};

/// The sizes of a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Decoder {
    /// Layers.
    pub layers: u64,
    /// Width.
    pub hidden: u64,
    /// Query heads.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
    /// Width inside the feed-forward network, of one expert where there are several.
    pub ffn: u64,
    /// Vocabulary entries.
    pub vocab: u64,
    /// Tokens of a sequence.
    pub seq: u64,
    /// Whether the feed-forward network has a gate (SwiGLU), and the head its own matrix.
    pub is_gated: bool,
    /// Experts of a layer; 1 if it is dense.
    pub experts: u64,
    /// Experts that each token visits.
    pub visited: u64,
}

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
struct Bench<'a> {
    machine: Machine<'a>,
    cluster: &'a Cluster,
    decoder: Decoder,
    shape: Shape,
    is_sequence_parallel: bool,
}

/// The element type of activations: what is neither f32 nor 8 bits.
const HALF: DType = DType::F16;

impl Decoder {
    /// Parameters of a layer on one rank: those every data rank holds, and those of experts.
    pub fn layer_parameters(&self, shape: Shape) -> (f64, f64) {
        let [h, d, t] = [self.hidden, self.hidden / self.heads, shape.tensor].map(|size| size as f64);
        let attention = h * d * (2 * self.heads + 2 * self.kv_heads) as f64 / t;
        let matrices = if self.is_gated { 3.0 } else { 2.0 };
        let network = matrices * h * self.ffn as f64 / t;
        if self.experts <= 1 {
            return (attention + network, 0.0);
        }
        (attention, network * self.experts as f64 / shape.expert as f64)
    }

    /// Parameters of the token table on one rank.
    pub fn table_parameters(&self, tensor: u64) -> f64 {
        (self.vocab * self.hidden) as f64 / tensor as f64
    }

    /// One layer and the ends, on one rank.
    pub fn block(&self, shape: Shape, cluster: &Cluster, library: &Library) -> Block {
        let machine = Machine { device: &cluster.device, library };
        let is_sequence_parallel = library.is_sequence_parallel || shape.again == Again::Attention;
        Bench { machine, cluster, decoder: *self, shape, is_sequence_parallel }.block()
    }
}

impl Bench<'_> {
    fn tokens(&self) -> u64 {
        self.shape.microbatch * self.decoder.seq / self.shape.context
    }

    fn seconds(&self, op: impl Into<Op>, operands: &[TensorType], results: &[TensorType], pass: Pass) -> f64 {
        self.machine.seconds(&op.into(), operands, results, pass).0.0
    }

    /// A product `[m, k] x [k, n]`, `batch` of them side by side.
    fn product(&self, batch: u64, m: u64, n: u64, k: u64, dtype: DType) -> f64 {
        let ty = |dtype, a, b| TensorType::new(dtype, [batch, a, b]);
        let operands = [ty(dtype, m, k), ty(dtype, k, n)];
        self.seconds(Matmul::new("bmk,bkn->bmn"), &operands, &[ty(HALF, m, n)], Pass::Forward)
    }

    /// A linear layer over `rows` tokens: forward, gradient of its operand, gradient of its weight.
    fn linear(&self, batch: u64, rows: u64, from: u64, to: u64) -> [f64; 3] {
        let dtype = if self.shape.is_f8 { DType::F8e4m3 } else { HALF };
        let product = |m, n, k| self.product(batch, m, n, k, dtype);
        [product(rows, to, from), product(rows, from, to), product(from, to, rows)]
    }

    fn block(&self) -> Block {
        let Self { decoder, shape, .. } = self;
        let (tensor, heads, kv) = (shape.tensor, decoder.heads / shape.tensor, decoder.kv_heads.div_ceil(shape.tensor));
        let (h, width, tokens) = (decoder.hidden, decoder.hidden / decoder.heads, self.tokens());
        let mut products = [0.0; 3];
        let mut add = |times: [f64; 3]| {
            for (sum, time) in products.iter_mut().zip(times) {
                *sum += time;
            }
        };
        add(self.linear(1, tokens, h, (heads + 2 * kv) * width));
        add(self.linear(1, tokens, h / tensor, h));
        let (experts, rows) = self.expert_rows();
        let up = decoder.ffn / tensor * if decoder.is_gated { 2 } else { 1 };
        add(self.linear(experts, rows, h, up));
        add(self.linear(experts, rows, decoder.ffn / tensor, h));
        let attention = self.attention(heads, kv, width);
        let memory = self.memory(heads, kv, width, experts * rows);
        let collectives = self.collectives();
        let ring = self.ring(kv, heads, width, attention);
        let forward = products[0] + attention[0] + memory[0] + collectives + ring[0];
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
            backward: products[1] + products[2] + attention[1] + memory[1] + collectives + ring[1],
            weight: products[2],
            again,
            restarts: shape.again == Again::Everything,
            tensor,
            parameters: dense + expert,
            experts: expert,
        };
        let parts = if self.machine.library.sends_parts { tensor } else { 1 };
        Block { layer, ends: self.ends(), stream: (2 * tokens * h / parts) as f64 }
    }

    /// Experts of this rank, and the tokens that each is given; the feed-forward network of a dense
    /// layer is one expert that is given all.
    fn expert_rows(&self) -> (u64, u64) {
        let (decoder, shape) = (&self.decoder, &self.shape);
        if decoder.experts <= 1 {
            return (1, self.tokens());
        }
        let here = (decoder.experts / shape.expert).max(1);
        let busiest = self.machine.library.expert_imbalance * (self.tokens() * decoder.visited) as f64;
        (here, (busiest as u64 / here).max(1))
    }

    /// Attention, forward and backward.
    fn attention(&self, heads: u64, kv: u64, width: u64) -> [f64; 2] {
        let (batch, seq) = (self.shape.microbatch, self.decoder.seq);
        let own = seq / self.shape.context;
        let ty = |seq, heads| TensorType::new(HALF, [batch, seq, heads, width]);
        let (query, key) = (ty(own, heads), ty(seq, kv));
        let row = TensorType::new(DType::F32, [batch, heads, own]);
        let (causal, scale) = (true, 1.0);
        let operands = [query.clone(), key.clone(), key.clone()];
        let forward =
            self.seconds(Attention { causal, scale }, &operands, &[query.clone(), row.clone()], Pass::Forward);
        let operands = [query.clone(), query.clone(), key.clone(), key.clone(), query.clone(), row];
        let results = [query, key.clone(), key];
        [forward, self.seconds(AttentionGrad { causal, scale }, &operands, &results, Pass::Backward)]
    }

    /// Everything that is bound by memory: norms, residual sums, activation, rotary embedding, casts.
    fn memory(&self, heads: u64, kv: u64, width: u64, rows: u64) -> [f64; 2] {
        let (decoder, shape) = (&self.decoder, &self.shape);
        let parts = if self.is_sequence_parallel { shape.tensor } else { 1 };
        let stream = TensorType::new(HALF, [(self.tokens() / parts).max(1), decoder.hidden]);
        let vector = TensorType::new(DType::F32, [decoder.hidden]);
        let column = TensorType::new(DType::F32, [stream.shape[0]]);
        let inner = TensorType::new(HALF, [rows, (decoder.ffn / shape.tensor).max(1)]);
        let sum = Binary { kind: BinaryKind::Add };
        let pair = [stream.clone(), stream.clone()];
        let normed = [stream.clone(), column.clone(), column.clone()];
        let weights = [stream.clone(), vector.clone(), vector.clone()];
        let read = [stream.clone(), stream.clone(), vector.clone(), column.clone(), column.clone()];
        let one = std::slice::from_ref;
        let mut times = [0.0; 2];
        times[0] += 2.0 * self.seconds(LayerNorm { eps: 1e-5 }, &weights, &normed, Pass::Forward);
        times[0] += 2.0 * self.seconds(sum.clone(), &pair, one(&stream), Pass::Forward);
        times[1] += 2.0 * self.seconds(LayerNormGrad {}, &read, &weights, Pass::Backward);
        times[1] += 2.0 * self.seconds(sum, &pair, one(&stream), Pass::Backward);
        if decoder.is_gated {
            let halves = [inner.clone(), inner.clone()];
            times[0] += self.seconds(Swiglu {}, &halves, one(&inner), Pass::Forward);
            let read = [inner.clone(), inner.clone(), inner.clone()];
            times[1] += self.seconds(SwigluGrad {}, &read, &halves, Pass::Backward);
            // Queries and keys are turned in place: a product with a table, forward and back.
            let turned = TensorType::new(HALF, [self.tokens(), heads + kv, width]);
            let turn = Unary { kind: UnaryKind::Neg };
            times[0] += self.seconds(turn.clone(), one(&turned), one(&turned), Pass::Forward);
            times[1] += self.seconds(turn, one(&turned), one(&turned), Pass::Backward);
        } else {
            let kind = UnaryKind::GeluTanh;
            times[0] += self.seconds(Unary { kind }, one(&inner), one(&inner), Pass::Forward);
            let read = [inner.clone(), inner.clone()];
            times[1] += self.seconds(UnaryGrad { kind }, &read, one(&inner), Pass::Backward);
        }
        if decoder.experts > 1 {
            // Tokens are sorted by expert, and back: the stream is read, its copies are written.
            let copies = TensorType::new(HALF, [stream.shape[0] * decoder.visited, decoder.hidden]);
            let sort = Unary { kind: UnaryKind::Neg };
            for (time, pass) in times.iter_mut().zip([Pass::Forward, Pass::Backward]) {
                *time += 2.0 * self.seconds(sort.clone(), one(&stream), one(&copies), pass);
            }
        }
        if shape.is_f8 {
            let width = decoder.ffn / shape.tensor * if decoder.is_gated { 2 } else { 1 };
            let elements = (self.tokens() * 2 * decoder.hidden + rows * width) as f64;
            let casts = elements * self.machine.library.f8_cast_bytes / self.machine.bandwidth();
            times[0] += casts;
            times[1] += 2.0 * casts;
        }
        times
    }

    /// What shows, in one pass, of reducing the two products' results over the tensor ranks (or of
    /// gathering and scattering the sequence: the same bytes), and of moving tokens to experts.
    fn collectives(&self) -> f64 {
        let (shape, library) = (&self.shape, self.machine.library);
        let bytes = (2 * self.tokens() * self.decoder.hidden) as f64;
        let group = group(self.cluster, shape.tensor, 1);
        let run = |kind, bytes, group| collective::seconds(kind, bytes, group, self.cluster).0;
        let mut shown = 2.0 * library.tensor_exposed * run(Collective::AllReduce, bytes, group);
        if self.decoder.experts > 1 && shape.expert > 1 {
            let parts = if self.is_sequence_parallel { shape.tensor } else { 1 };
            let sent = bytes * self.decoder.visited as f64 / parts as f64;
            let experts = self::group(self.cluster, shape.expert, shape.tensor);
            shown += 2.0 * run(Collective::AllToAll, sent * shape.expert as f64, experts);
        }
        shown
    }

    /// What ring attention adds: transfers of keys and values that attention does not hide, and
    /// merging the parts. Forward and backward.
    fn ring(&self, kv: u64, heads: u64, width: u64, attention: [f64; 2]) -> [f64; 2] {
        let (shape, library) = (&self.shape, self.machine.library);
        if shape.context <= 1 {
            return [0.0; 2];
        }
        let steps = (shape.context - 1) as f64;
        let bytes = (4 * self.tokens() * kv * width) as f64;
        let away = shape.tensor * shape.context > self.cluster.per_node;
        let all = steps * collective::send_seconds(bytes, away, self.cluster).0;
        let merged = steps * (self.tokens() * heads * width) as f64 * library.context_merge_bytes;
        let merge = merged / self.machine.bandwidth();
        let shown = |all: f64, beside: f64| overlap::shown(all, 0.0, beside, library.context_loss);
        [shown(all, attention[0]) + merge, shown(2.0 * all, attention[1]) + 2.0 * merge]
    }

    /// Embedding, head and loss.
    fn ends(&self) -> f64 {
        let (decoder, shape) = (&self.decoder, &self.shape);
        let (tokens, h, vocab) = (self.tokens(), decoder.hidden, decoder.vocab.div_ceil(shape.tensor));
        let product = |m, n, k| self.product(1, m, n, k, HALF);
        let products = product(tokens, vocab, h) + product(tokens, h, vocab) + product(h, vocab, tokens);
        // The table's rows are read, written and their gradients added up, with the last norm: 40 bytes
        // per element of the stream.
        let bytes = (tokens * vocab) as f64 * self.machine.library.logit_bytes + (40 * tokens * h) as f64;
        let group = group(self.cluster, shape.tensor, 1);
        let reduce = collective::seconds(Collective::AllReduce, (2 * tokens * h) as f64, group, self.cluster).0;
        products + bytes / self.machine.bandwidth() + 2.0 * reduce
    }
}

/// The group of `size` ranks that are `stride` apart.
pub fn group(cluster: &Cluster, size: u64, stride: u64) -> Group {
    let within = (cluster.per_node / stride.max(1)).clamp(1, size.max(1));
    Group { within, across: size.div_ceil(within).max(1) }
}
