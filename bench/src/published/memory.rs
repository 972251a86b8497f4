//! Peak memory of one rank of a published run.
//!
//! Weights, gradients and optimizer state as the system stores them, divided by its ZeRO stage; the
//! activations that the backward pass reads, per layer as Korthikanti et al. ("Reducing activation
//! recomputation in large transformer models", 2022, section 4) count them, for as many microbatches
//! as the schedule keeps; and the largest thing that lives for a moment: the logits, or the layers
//! that ZeRO-3 gathers.

use super::block::Again;
use super::decoder::Decoder;
use super::pipeline;
use super::predict::{Degrees, Evaluator};
use super::system::System;
use shardc_passes::cost::library::Attention;

/// Bytes per key of the whole sequence, and per value beside it, where each rank gathers both in 16 bits.
const KEYS_FORWARD: f64 = 4.0;
/// The same of their gradients, which go round in f32, a part per step (`_templated_ring_attention_backward` of PyTorch):
/// what a step sends and receives is not free before the transfer is over, which the host does not wait for.
const KEYS_BACKWARD: f64 = 16.0;

/// Bytes of one rank at the peak.
pub fn bytes(evaluator: &Evaluator, degrees: &Degrees) -> f64 {
    let decoder = &evaluator.decoder;
    let shape = degrees.shape(evaluator.is_f8);
    let (dense, experts) = decoder.layer_parameters(shape);
    let layers = decoder.layers.div_ceil(degrees.stages) as f64;
    let table = decoder.table_parameters(degrees.tensor);
    let tables = decoder.tables(degrees.stages);
    let [data, expert_data] = degrees.data_ranks().map(|ranks| ranks as f64);
    let parts = |stage: u64, ranks: f64| if degrees.zero >= stage { ranks } else { 1.0 };
    let mut stored = 0.0;
    for (bytes, stage) in evaluator.system.stored.into_iter().zip([3, 2, 1]) {
        stored += bytes * (layers * dense + tables * table) / parts(stage, data);
        stored += bytes * layers * experts / parts(stage, expert_data);
    }
    let layer = activations(evaluator, degrees);
    let kept = match degrees.again {
        Again::Everything => stream(evaluator, degrees),
        Again::HalfTheLayers => 0.5 * (layer + stream(evaluator, degrees)),
        Again::Operations => every_second_product(evaluator, degrees),
        Again::Nothing | Again::Attention => layer,
    };
    let working = if matches!(degrees.again, Again::Nothing | Again::Attention) { 0.0 } else { layer };
    let in_flight = pipeline::in_flight(degrees.stages, degrees.microbatches(), degrees.schedule());
    let tokens = (degrees.microbatch * decoder.seq / degrees.context) as f64;
    let system = &evaluator.system;
    let logit = if degrees.tensor > 1 { system.logit_stored_divided } else { system.logit_stored };
    let logits = tokens * decoder.vocab as f64 / degrees.tensor as f64 * logit;
    let head = if degrees.stages == 1 { logits } else { 0.0 };
    let gathered = match (degrees.zero, degrees.stages) {
        (0..=2, _) => 0.0,
        // Two layers' weights, and a gradient before it is scattered.
        (_, 1) => 3.0 * 2.0 * dense.max(table),
        // A stage's weights in 16 bits and its gradients in 32, through the step, with a layer's gradient in 16
        // bits before it is added to them.
        _ => 6.0 * (layers * dense + table) + 2.0 * dense,
    };
    // Buffers that pipelines in PyTorch keep for every microbatch: what arrives from either side, and the output.
    let arriving = match degrees.stages {
        2.. if system.buffers_microbatches => 3.0 * degrees.microbatches() as f64 * stream(evaluator, degrees),
        _ => 0.0,
    };
    // Elements of the keys of the whole sequence, of as many heads as there are queries.
    let keys = match degrees.context {
        2.. if system.gathers_keys => (degrees.microbatch * decoder.seq * decoder.hidden / degrees.tensor) as f64,
        _ => 0.0,
    };
    let head = head + KEYS_FORWARD * keys;
    let working = working + gradients(evaluator, degrees) + (KEYS_FORWARD + KEYS_BACKWARD) * keys;
    let is_inside = (2..=evaluator.cluster.per_node).contains(&degrees.tensor);
    let buffers = if is_inside { system.overlap_buffers[usize::from(evaluator.is_f8)] } else { 0.0 };
    let buffers = buffers * tokens * decoder.hidden as f64;
    let used = stored + in_flight * layers * kept + working.max(head) + gathered + arriving + buffers;
    used * (1.0 + system.slack)
}

/// Bytes of what lives for a moment in the backward pass of one layer: gradients on both sides of the activation, of the
/// whole sequence where tensor ranks gather it, and the input that they gather again for the gradient of the weight.
fn gradients(evaluator: &Evaluator, degrees: &Degrees) -> f64 {
    let decoder = &evaluator.decoder;
    let [h, t] = [decoder.hidden, degrees.tensor].map(|size| size as f64);
    let tokens = (degrees.microbatch * decoder.seq / degrees.context) as f64;
    let inner = decoder.matrices() as f64 * Mean::of(decoder).ffn / t;
    let gathered = if sequence_parts(evaluator, degrees) > 1.0 { h } else { 0.0 };
    2.0 * tokens * (inner + h + gathered)
}

/// Bytes of the input of a layer.
fn stream(evaluator: &Evaluator, degrees: &Degrees) -> f64 {
    let decoder = &evaluator.decoder;
    let tokens = (degrees.microbatch * decoder.seq / degrees.context) as f64;
    2.0 * tokens * decoder.hidden as f64 / sequence_parts(evaluator, degrees)
}

fn sequence_parts(evaluator: &Evaluator, degrees: &Degrees) -> f64 {
    let is_divided = evaluator.system.library.is_sequence_parallel || degrees.again == Again::Attention;
    if is_divided { degrees.tensor as f64 } else { 1.0 }
}

/// What of each part a mean layer has.
struct Mean {
    /// Parts, each with a norm and a residual sum.
    parts: f64,
    /// Attention.
    attention: f64,
    /// Width inside the feed-forward networks that a token visits.
    ffn: f64,
    /// Scans.
    scans: f64,
    /// Copies of a token that are sent to experts.
    copies: f64,
}

impl Mean {
    fn of(decoder: &Decoder) -> Self {
        let Decoder { attentions, networks, routed, scans, visited, shared, ffn, expert_ffn, .. } = *decoder;
        let mean = |count: u64| count as f64 / decoder.layers as f64;
        Self {
            parts: mean(attentions + networks + routed + scans),
            attention: mean(attentions),
            ffn: mean(networks * ffn + routed * (visited + shared) * expert_ffn),
            scans: mean(scans),
            copies: mean(routed * visited),
        }
    }
}

/// Bytes of a layer of which every second product's result is kept, from the first on, with the result of
/// attention and the layer's input.
fn every_second_product(evaluator: &Evaluator, degrees: &Degrees) -> f64 {
    let decoder = &evaluator.decoder;
    let [h, t] = [decoder.hidden, degrees.tensor].map(|size| size as f64);
    let tokens = (degrees.microbatch * decoder.seq / degrees.context) as f64;
    let mean = Mean::of(decoder);
    let values = (decoder.head_width() * decoder.kv_heads) as f64;
    // Queries, values and attention's result are divided over the tensor ranks, the second sum over them is not.
    let attention = mean.attention * ((2.0 * h + values) / t + h);
    let scan = mean.scans * decoder.scan_input() as f64 / t;
    let attention = attention + mean.copies * h / sequence_parts(evaluator, degrees);
    2.0 * tokens * (attention + mean.ffn / t + scan) + stream(evaluator, degrees)
}

/// Bytes of one layer that the backward pass reads, for one microbatch.
fn activations(evaluator: &Evaluator, degrees: &Degrees) -> f64 {
    let decoder = &evaluator.decoder;
    let Decoder { hidden, heads, kv_heads, seq, is_gated, .. } = *decoder;
    let [h, t] = [hidden, degrees.tensor].map(|size| size as f64);
    let tokens = (degrees.microbatch * seq / degrees.context) as f64;
    let mean = Mean::of(decoder);
    let unfused = matches!(evaluator.system.library.attention, Attention::Unfused { .. });
    let input = if evaluator.is_f8 && evaluator.system.keeps_f8 { 1.0 } else { 2.0 };
    let System { is_compiled, keeps_gathered, .. } = evaluator.system;
    let parts = sequence_parts(evaluator, degrees);
    // Inputs of the norms, dropout masks; then the inputs of the first products.
    let divided = 2.0 * h + if unfused { h } else { 0.0 };
    let normed = match (is_compiled, keeps_gathered) {
        (true, _) => 0.0,
        (false, true) => input * h,
        (false, false) => input * h / parts,
    };
    // The kernel's result is read in 16 bits, the projection's operand may be a copy in 8.
    let result = if input < 2.0 { 2.0 + input } else { 2.0 };
    let attention = 2.0 * (decoder.head_width() * (heads + 2 * kv_heads)) as f64 + result * h;
    // What enters the activation (both halves of a gate; where they are not one kernel, the gate's own, too)
    // and what leaves it.
    let entering = match is_gated {
        false => 2.0,
        true if evaluator.system.fuses_gates => 4.0,
        true => 6.0,
    };
    let leaving = if is_compiled { 0.0 } else { input };
    let network = mean.ffn * (entering + leaving);
    let scores = if unfused && degrees.again != Again::Attention { 5.0 * (heads * seq) as f64 } else { 0.0 };
    let scan = 2.0 * (decoder.scan_input() + 2 * decoder.scan_width()) as f64;
    let inner = mean.attention * (attention + scores) + network + mean.scans * scan;
    // What experts are given, and what they give back before it is weighed.
    let copies = mean.copies * (input + 2.0) * h / parts;
    tokens * (mean.parts * (divided / parts + normed) + inner / t + copies)
}
