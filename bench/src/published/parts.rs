//! The parts of a layer: attention, a dense network, experts, a state-space scan.
//!
//! Each has a norm before it and a residual sum behind it, and ends in one reduction over the tensor
//! ranks.

use super::block::{Bench, HALF, group};
use super::decoder::Latent;
use shardc_ir::ops::{
    Attention, AttentionGrad, Binary, BinaryKind, LayerNorm, LayerNormGrad, Swiglu, SwigluGrad, Unary, UnaryGrad,
    UnaryKind,
};
use shardc_ir::{DType, TensorType};
use shardc_passes::cost::Pass;
use shardc_passes::cost::collective::{self, Collective, Group};
use shardc_passes::cost::ring::Ring;
use std::slice::from_ref as one;

/// Seconds of one part for one microbatch.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Times {
    /// Products: forward, gradients of operands, gradients of weights.
    pub products: [f64; 3],
    /// The attention kernel, forward and backward.
    pub attention: [f64; 2],
    /// What is bound by memory.
    pub memory: [f64; 2],
    /// Communication that shows.
    pub shown: [f64; 2],
}

impl Times {
    /// Adds `times` as much of another.
    pub fn add(&mut self, other: &Self, times: f64) {
        let pairs = self.products.iter_mut().zip(other.products);
        let pairs = pairs.chain(self.attention.iter_mut().zip(other.attention));
        let pairs = pairs.chain(self.memory.iter_mut().zip(other.memory));
        for (sum, value) in pairs.chain(self.shown.iter_mut().zip(other.shown)) {
            *sum += times * value;
        }
    }

    fn linear(&mut self, times: [f64; 3]) {
        for (sum, time) in self.products.iter_mut().zip(times) {
            *sum += time;
        }
    }

    fn moved(&mut self, times: [f64; 2]) {
        for (sum, time) in self.memory.iter_mut().zip(times) {
            *sum += time;
        }
    }
}

/// Passes over a scan's channels in memory, forward: convolution, gate, norm and the chunked scan read
/// and write them (Dao and Gu, "Transformers are SSMs", 2024, section 6, counted by kernel).
const SCAN_PASSES: f64 = 10.0;
/// The share of the memory bandwidth that these kernels reach; fitted to the published runs of hybrids.
const SCAN_EFFICIENCY: f64 = 0.27;
/// Tokens of a chunk of the scan, whose states pass through memory in f32.
const SCAN_CHUNK: f64 = 128.0;

impl Bench<'_> {
    /// Attention with its projections.
    pub(super) fn attention_part(&self) -> Times {
        let Self { decoder, shape, .. } = self;
        let (tensor, heads, kv) = (shape.tensor, decoder.heads / shape.tensor, decoder.kv_heads.div_ceil(shape.tensor));
        let (h, width, tokens) = (decoder.hidden, decoder.head_width(), self.tokens());
        let mut times = self.frame();
        if decoder.is_latent {
            times.linear(self.linear(1, tokens, h, Latent::QUERY + Latent::KEY + Latent::ROTARY));
            times.linear(self.linear(1, tokens, Latent::QUERY, heads * (Latent::HEAD + Latent::ROTARY)));
            times.linear(self.linear(1, tokens, Latent::KEY, heads * 2 * Latent::HEAD));
            times.linear(self.linear(1, tokens, heads * Latent::HEAD, h));
        } else {
            times.linear(self.linear(1, tokens, h, (heads + 2 * kv) * width));
            times.linear(self.linear(1, tokens, h / tensor, h));
        }
        times.attention = self.attention(heads, kv, width);
        if decoder.is_gated {
            // Queries and keys are turned in place: a product with a table, forward and back.
            let turned = TensorType::new(HALF, [tokens, heads + kv, width]);
            times.moved(self.copied(&turned, &turned));
        }
        times.moved(self.casts((2 * tokens * h) as f64));
        let ring = self.ring(kv, heads, width, times.attention);
        times.shown = [times.shown[0] + ring[0], times.shown[1] + ring[1]];
        times
    }

    /// A dense feed-forward network.
    pub(super) fn network_part(&self) -> Times {
        let mut times = self.frame();
        self.network(&mut times, 1, self.tokens(), self.decoder.ffn / self.shape.tensor);
        times
    }

    /// Experts, with those that every token visits.
    pub(super) fn routed_part(&self) -> Times {
        let Self { decoder, shape, .. } = self;
        let mut times = self.frame();
        let (experts, rows) = self.expert_rows();
        let width = decoder.expert_ffn / shape.expert_tensor;
        self.network(&mut times, experts, rows, width);
        for _ in 0..decoder.shared {
            self.network(&mut times, 1, self.tokens(), decoder.expert_ffn / shape.tensor);
        }
        // Tokens are sorted by expert, and back: the stream is read, its copies are written.
        let stream = self.stream();
        let copies = TensorType::new(HALF, [stream.shape[0] * decoder.visited, decoder.hidden]);
        let sorted = self.copied(&stream, &copies);
        times.moved(sorted.map(|time| 2.0 * self.machine.library.expert_sorts * time));
        // An expert's rows are cast by themselves, after they are sorted.
        let library = self.machine.library;
        let again = (library.expert_casts - 1.0) * (experts * rows) as f64;
        times.moved(self.casts(again * (decoder.hidden + self.inner(width)) as f64));
        let run = |kind, bytes: u64, ranks, apart| {
            collective::alone(kind, bytes as f64, group(self.cluster, ranks, apart), self.cluster).0
        };
        // Copies go to their experts' ranks and back; the tensor ranks of an expert gather them, and sum what
        // each made of them. Nothing overlaps these with products. Of the whole stream, only the experts that
        // every token visits need it gathered.
        let copies = copies.shape.iter().product::<u64>() * 2;
        let sent = run(Collective::AllToAll, copies * shape.expert, shape.expert, shape.expert_tensor);
        let gathered = run(Collective::AllReduce, copies * shape.expert_tensor, shape.expert_tensor, 1);
        let whole = if decoder.shared > 0 { times.shown[0] } else { 0.0 };
        times.shown = [whole + library.experts_exposed * (2.0 * sent + gathered); 2];
        times
    }

    /// A state-space scan with its projections.
    pub(super) fn scan_part(&self) -> Times {
        let Self { decoder, shape, .. } = self;
        let (h, tokens, width) = (decoder.hidden, self.tokens(), decoder.scan_width() / shape.tensor);
        let mut times = self.frame();
        times.linear(self.linear(1, tokens, h, decoder.scan_input() / shape.tensor));
        times.linear(self.linear(1, tokens, width, h));
        let states = 3.0 * 4.0 * (width * decoder.state) as f64 / SCAN_CHUNK;
        let bytes = tokens as f64 * (SCAN_PASSES * 2.0 * width as f64 + states);
        let forward = bytes / (SCAN_EFFICIENCY * self.machine.bandwidth());
        times.moved([forward, 2.5 * forward]);
        times.moved(self.casts((2 * tokens * h) as f64));
        times
    }

    /// Experts of this rank, and the tokens that each is given.
    fn expert_rows(&self) -> (u64, u64) {
        let (decoder, shape) = (&self.decoder, &self.shape);
        let here = (decoder.experts / shape.expert).max(1);
        // Each rank brings its own tokens, which the tensor ranks of an expert gather.
        let given = self.tokens() * decoder.visited * shape.expert_tensor / shape.tensor;
        let busiest = self.machine.library.expert_imbalance * given as f64;
        (here, (busiest as u64 / here).max(1))
    }

    /// What every part has: a norm, a residual sum, and a reduction over the tensor ranks (or a gather
    /// and a scatter of the sequence: the same bytes).
    fn frame(&self) -> Times {
        let stream = self.stream();
        let vector = TensorType::new(DType::F32, [self.decoder.hidden]);
        let column = TensorType::new(DType::F32, [stream.shape[0]]);
        let sum = Binary { kind: BinaryKind::Add };
        let pair = [stream.clone(), stream.clone()];
        let normed = [stream.clone(), column.clone(), column.clone()];
        let weights = [stream.clone(), vector.clone(), vector.clone()];
        let read = [stream.clone(), stream.clone(), vector, column.clone(), column];
        let forward = self.seconds(LayerNorm { eps: 1e-5 }, &weights, &normed, Pass::Forward)
            + self.seconds(sum.clone(), &pair, one(&stream), Pass::Forward);
        let backward = self.seconds(LayerNormGrad {}, &read, &weights, Pass::Backward)
            + self.seconds(sum, &pair, one(&stream), Pass::Backward);
        let bytes = (2 * self.tokens() * self.decoder.hidden) as f64;
        let tensor = group(self.cluster, self.shape.tensor, 1);
        let reduce = collective::alone(Collective::AllReduce, bytes, tensor, self.cluster).0;
        let shown = self.machine.library.tensor_exposed * reduce;
        Times { memory: [forward, backward], shown: [shown; 2], ..Times::default() }
    }

    fn stream(&self) -> TensorType {
        let parts = if self.is_sequence_parallel { self.shape.tensor } else { 1 };
        TensorType::new(HALF, [(self.tokens() / parts).max(1), self.decoder.hidden])
    }

    /// What enters an activation of this width, per token.
    fn inner(&self, width: u64) -> u64 {
        width * (self.decoder.matrices() - 1)
    }

    /// Products and activation of feed-forward networks of this width on one rank, side by side.
    fn network(&self, times: &mut Times, experts: u64, rows: u64, narrow: u64) {
        let h = self.decoder.hidden;
        let (rounds, at_once) = if self.machine.library.groups_experts { (1, experts) } else { (experts, 1) };
        for (from, to) in [(h, self.inner(narrow)), (narrow, h)] {
            times.linear(self.linear(at_once, rows, from, to).map(|time| rounds as f64 * time));
        }
        let inner = TensorType::new(HALF, [experts * rows, narrow.max(1)]);
        let read = [inner.clone(), inner.clone(), inner.clone()];
        if self.decoder.is_gated {
            times.moved([
                self.seconds(Swiglu {}, &read[..2], one(&inner), Pass::Forward),
                self.seconds(SwigluGrad {}, &read, &read[..2], Pass::Backward),
            ]);
        } else {
            let kind = UnaryKind::GeluTanh;
            times.moved([
                self.seconds(Unary { kind }, one(&inner), one(&inner), Pass::Forward),
                self.seconds(UnaryGrad { kind }, &read[..2], one(&inner), Pass::Backward),
            ]);
        }
        times.moved(self.casts((experts * rows * self.inner(narrow)) as f64));
    }

    /// One operand read and one result written, forward and backward.
    fn copied(&self, from: &TensorType, to: &TensorType) -> [f64; 2] {
        let kind = UnaryKind::Neg;
        [Pass::Forward, Pass::Backward].map(|pass| self.seconds(Unary { kind }, one(from), one(to), pass))
    }

    /// Casts of so many elements to 8 bits, if products run in them.
    fn casts(&self, elements: f64) -> [f64; 2] {
        if !self.shape.is_f8 {
            return [0.0; 2];
        }
        let casts = elements * self.machine.library.f8_cast_bytes / self.machine.bandwidth();
        [casts, 2.0 * casts]
    }

    /// The attention kernel, forward and backward.
    fn attention(&self, heads: u64, kv: u64, width: u64) -> [f64; 2] {
        let (batch, seq) = (self.shape.microbatch, self.decoder.seq);
        let own = seq / self.shape.context;
        let ty = |seq, heads| TensorType::new(HALF, [batch, seq, heads, width]);
        let (query, key) = (ty(own, heads), ty(seq, kv));
        let row = TensorType::new(DType::F32, [batch, heads, own]);
        let (causal, scale) = (true, 1.0);
        let operands = [query.clone(), key.clone(), key.clone()];
        let forward = self.seconds(
            Attention { causal, scale, lead: None, reversed: None },
            &operands,
            &[query.clone(), row.clone()],
            Pass::Forward,
        );
        let operands = [query.clone(), query.clone(), key.clone(), key.clone(), query.clone(), row];
        let results = [query, key.clone(), key];
        [
            forward,
            self.seconds(
                AttentionGrad { causal, scale, lead: None, reversed: None, deterministic: false },
                &operands,
                &results,
                Pass::Backward,
            ),
        ]
    }

    /// What ring attention adds: transfers of keys and values that attention does not hide, and
    /// merging the parts. Forward and backward.
    fn ring(&self, kv: u64, heads: u64, width: u64, attention: [f64; 2]) -> [f64; 2] {
        let shape = &self.shape;
        if shape.context <= 1 {
            return [0.0; 2];
        }
        let across = if shape.tensor * shape.context > self.cluster.per_node { shape.context } else { 1 };
        let group = Group::of_nodes(shape.context / across, across);
        let (sent, merged) = ((4 * self.tokens() * kv * width) as f64, (self.tokens() * heads * width) as f64);
        let ring = |attention, pass| Ring { group, sent, merged, attention }.seconds(pass, self.machine, self.cluster);
        [ring(attention[0], Pass::Forward), ring(attention[1], Pass::Backward)]
    }
}
