//! The ways to divide the ranks of a cluster that the pins allow, before the batch is cut into microbatches.
//!
//! Some ways are left out unless they are pinned, since others do the same with less to exchange:
//!
//! * in clusters of many devices ([`FEW`]) tensor ranks that span more than two nodes, or more than one in a pipeline,
//!   unless samples are few;
//! * context ranks, unless samples are few beside the ranks, or long, or data ranks and tensor ranks of one node cannot
//!   be all; in clusters of many devices also beside tensor ranks of several nodes;
//! * context ranks that have several sequences at a time, and so could be data ranks ([`Way::is_better_as_data`]).

use super::choice::degrees::Degrees;
use super::choice::pins::Pins;
use super::error::PlanError;
use crate::cluster::Cluster;
use crate::divisors::divisors;
use crate::shard::tensor::Prepared;
use shardc_ir::plan::{Request, Scope};
use shardc_ir::units::gcd;
use shardc_ir::{Choice, FactorKind, Family, Feature, Op};
use std::collections::BTreeSet;
use std::ops::RangeInclusive;

/// One way to divide the ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Way {
    /// Pipeline stages.
    pub pp: u64,
    /// Ranks among which the batch is divided: those of `dp`, `fsdp` and `ep`.
    pub data: u64,
    /// Of them, those of experts.
    pub ep: u64,
    /// How many ranks store the parts of what the data ranks hold copies of: all of `data / ep`, or fewer,
    /// so that there are replicas of the parts.
    pub stored: Vec<u64>,
    /// Whether that is pinned, so that it is an axis of its own even where there is one replica.
    pub is_pinned: bool,
    /// The families that divide the sequence, and the sizes of their axes.
    pub context: Vec<(Family, Vec<u64>)>,
    /// The sizes of the tensor axes, in the ways to choose them.
    pub tp: Vec<Vec<u64>>,
}

impl Way {
    /// The degrees with these tensor axes, all data ranks being one axis.
    pub fn placed(&self, microbatch: u64, tp: &[u64]) -> Degrees {
        let degrees = Degrees::new(microbatch).with(Family::Pipeline, &[self.pp]);
        let degrees = degrees.with(Family::Data, &[self.data / self.ep]).with(Family::Expert, &[self.ep]);
        self.context
            .iter()
            .fold(degrees, |degrees, (family, sizes)| degrees.with(*family, sizes))
            .with(Family::Tensor, tp)
    }

    /// Whether context ranks would rather be data ranks: those that have several sequences at a time. With some of them
    /// each has as many tokens at a time, of fewer sequences, and exchanges less in attention.
    pub fn is_better_as_data(&self, microbatch: u64, pins: &Pins) -> bool {
        let context: u64 = self.context.iter().flat_map(|(_, sizes)| sizes).product();
        let is_pinned =
            pins.microbatch.is_some() || pins.fixes(&[Family::Data, Family::Fsdp]) || pins.fixes(&Family::CONTEXT);
        !is_pinned && gcd(microbatch, context) > 1
    }

    /// The same for each way to store parameters.
    pub fn degrees(&self, microbatch: u64, tp: &[u64]) -> Vec<Degrees> {
        let copies = self.data / self.ep;
        let of = |stored: &u64| match (copies / stored, self.is_pinned) {
            (1, false) => self.placed(microbatch, tp),
            (replicas, _) => self.placed(microbatch, tp).with(Family::Data, &[replicas]).with(Family::Fsdp, &[*stored]),
        };
        self.stored.iter().map(of).collect()
    }
}

/// Fewer tokens than this on a rank are not worth a division of the sequence that nobody asked for.
const LEAST_TOKENS: u64 = 512;

/// Sequences from which one may be too long for a rank.
const LONG: u64 = 1 << 15;

/// Parameters may be stored in parts within a node, or within so many times as many nodes, so many times as many
/// again, and so on.
const MORE_NODES: u64 = 2;

/// The same in a pipeline, which gathers what is updated once in a step: the number hardly matters.
const MORE_IN_STAGES: u64 = 4;

/// Degrees from which two axes are tried beside one: what a product over two of `n` ranks in all
/// moves falls with the root of `n`, but it moves operands and results.
const LEAST_SQUARE: u64 = 16;

/// The most axes of which a tensor degree is made that nobody asked for: each is solved for anew, and a class takes few.
const MOST_PIECES: usize = 4;

/// In clusters of at most so many devices every tensor degree is tried; in larger ones those of up to two nodes, or of one
/// in a pipeline, or up to [`SPARE`] times the ranks that there are for each sample.
const FEW: u64 = 32;

/// See [`FEW`].
const SPARE: u64 = 2;

/// Every way, in a fixed order, with so many pipeline stages, or as many as are pinned.
///
/// # Errors
/// A pin that the model or its sequence cannot keep.
pub fn ways(
    prepared: &Prepared<'_>,
    stages: RangeInclusive<u64>,
    cluster: &Cluster,
    request: &Request,
    pins: &Pins,
) -> Result<Vec<Way>, PlanError> {
    check(prepared, request, pins)?;
    let is_wanted = |pp: &u64| pins.degree(Family::Pipeline).map_or(stages.contains(pp), |pin| pin == *pp);
    let wanted = divisors(cluster.ranks()).into_iter().filter(is_wanted);
    Ok(wanted.flat_map(|pp| ways_of_stage(prepared, pp, cluster, request, pins)).collect())
}

/// The ways to divide the ranks of each of so many stages.
fn ways_of_stage(prepared: &Prepared<'_>, pp: u64, cluster: &Cluster, request: &Request, pins: &Pins) -> Vec<Way> {
    let (ranks, batch) = (cluster.ranks() / pp, request.batch);
    let is_few = cluster.ranks() <= FEW;
    // Stages do over nodes what tensor ranks would, with less to exchange.
    let nodes = if pp > 1 { 1 } else { 2 };
    let widest = if is_few { ranks } else { (nodes * cluster.per_node).max(SPARE * ranks / batch.max(1)) };
    let all = request.scope == Scope::All;
    let seq = request.seq.max(1);
    let is_long = |cp: u64| cp == 1 || seq / cp >= LEAST_TOKENS;
    // Where data ranks, and tensor ranks of one node, cannot be all, something else has to be divided.
    let mut widths = divisors(ranks).into_iter().filter(|tp| *tp <= cluster.per_node);
    let needs_context = seq > 1 && !widths.any(|tp| batch.is_multiple_of(ranks / tp));
    // With a sample or more for each rank, data ranks do what context ranks would, with less to exchange; where there
    // are many nodes, so do tensor ranks within them.
    let is_scarce = batch.saturating_mul(if is_few { 1 } else { cluster.per_node }) < ranks || seq >= LONG;
    let opens_context = |cp: u64| cp == 1 || ((all || is_scarce) && is_long(cp)) || needs_context;
    let [ring, ulysses] = [Family::Ring, Family::Ulysses].map(|family| pins.product(&[family]));
    let stores_parts = pins.product(&[Family::Fsdp]) > 1;
    let [pinned_tp, pinned_cp, pinned_ep] =
        [Family::Tensor, Family::Context, Family::Expert].map(|family| pins.degree(family));
    let in_attention = attention_sizes(prepared);
    let has_rings = Feature::Ring.is_open(false, request.scope, prepared.target);
    let mut ways = Vec::new();
    for tp in divisors(ranks) {
        let is_pinned = pinned_tp == Some(tp) || (pinned_tp.is_none() && pins.fixes(&[Family::Data]));
        if pinned_tp.is_some_and(|pin| pin != tp) || (!is_pinned && tp > widest) {
            continue;
        }
        let splits = splits(prepared, tp, pins);
        // Tensor ranks of several nodes exchange far more than context ranks that are as many.
        let is_near = all || is_few || tp <= cluster.per_node;
        for cp in divisors(ranks / tp) {
            let context = cp * ring * ulysses;
            let is_kept = (ranks / tp).is_multiple_of(context) && seq.is_multiple_of(if seq > 1 { context } else { 1 });
            let opens = cp == 1 || (is_near && opens_context(cp));
            if !pinned_cp.map_or(opens, |pin| pin == cp) || !is_kept {
                continue;
            }
            let data = ranks / (tp * context);
            for ep in divisors(data) {
                let has = ep == 1 || divides_experts(prepared, ep);
                if !has || pinned_ep.is_some_and(|pin| pin != ep) || !batch.is_multiple_of(data) {
                    continue;
                }
                let stored = stored(cluster, data / ep, tp * context * ep, (pp > 1, pins));
                if stored.is_empty() {
                    continue;
                }
                let way = |context| {
                    let (stored, tp) = (stored.clone(), splits.clone());
                    Way { pp, data, ep, stored, is_pinned: stores_parts, context, tp }
                };
                for cp in contexts(&in_attention, cp, pins) {
                    let pinned = |family: Family| pins.axes.get(&family).cloned().unwrap_or_default();
                    let around = [Family::Ring, Family::Ulysses].map(|family| (family, pinned(family)));
                    ways.push(way([around.to_vec(), vec![(Family::Context, cp)]].concat()));
                }
                if has_rings {
                    let heads = ringed_heads(&in_attention, cp, pins).into_iter();
                    let around = |heads: u64| vec![(Family::Ring, vec![cp / heads]), (Family::Ulysses, vec![heads])];
                    ways.extend(heads.map(|heads| way(around(heads))));
                }
            }
        }
    }
    ways
}

/// Whether the model and its sequence can be divided as is pinned.
fn check(prepared: &Prepared<'_>, request: &Request, pins: &Pins) -> Result<(), PlanError> {
    let fail = |pin: String, message: String| Err(PlanError::Pin { pin, message });
    for family in Family::CONTEXT {
        let does_not_divide = |degree: &u64| request.seq > 0 && !request.seq.is_multiple_of(*degree);
        if let Some(degree) = pins.degree(family).filter(does_not_divide) {
            let seq = request.seq;
            let message = format!("{degree} does not divide the sequence of {seq}; use a divisor of it");
            return fail(pins.pin(family), message);
        }
    }
    if let Some(ep) = pins.degree(Family::Expert).filter(|ep| *ep > 1 && !divides_experts(prepared, *ep)) {
        let sizes = expert_sizes(prepared);
        let message = match sizes.first() {
            None => "the model has no experts; leave it out".to_string(),
            Some(count) => format!("{ep} does not divide its {count} experts"),
        };
        return fail(format!("ep={ep}"), message);
    }
    Ok(())
}

/// The numbers of experts of the model's layers.
fn expert_sizes(prepared: &Prepared<'_>) -> Vec<u64> {
    let of = |(factors, rule): (&std::collections::BTreeSet<usize>, &&shardc_ir::FactorRule)| {
        factors.iter().map(|factor| rule.factors[*factor].size).collect::<Vec<_>>()
    };
    prepared.experts.iter().zip(&prepared.rules).flat_map(of).filter(|size| *size > 1).collect()
}

fn divides_experts(prepared: &Prepared<'_>, ep: u64) -> bool {
    expert_sizes(prepared).iter().any(|size| size.is_multiple_of(ep))
}

/// Over how many of `copies` ranks, `stride` apart, parameters may be stored: over all, and where there are
/// several nodes over those of one or of a few, so that gathers stay inside (HSDP).
fn stored(cluster: &Cluster, copies: u64, stride: u64, (is_staged, pins): (bool, &Pins)) -> Vec<u64> {
    let [dp, fsdp] = [Family::Data, Family::Fsdp].map(|family| pins.degree(family));
    if let Some(inner) = fsdp {
        let inner = if inner == 1 { copies } else { inner };
        let is_kept = dp.is_none_or(|dp| fsdp == Some(1) && dp == copies || dp * inner == copies);
        return if copies.is_multiple_of(inner) && is_kept { vec![inner] } else { Vec::new() };
    }
    if let Some(dp) = dp {
        return if dp == copies { vec![copies] } else { Vec::new() };
    }
    // Without ZeRO every rank stores all: there are no parts to have replicas of.
    if pins.zero == Some(0) {
        return vec![copies];
    }
    // Among the ranks of a node, and of a few nodes: a ring of all has as many hops as there are nodes.
    let within = (cluster.per_node / stride).max(1);
    let largest = |limit: u64| divisors(copies).into_iter().filter(|size| *size <= limit).max().unwrap_or(1);
    let more = if is_staged { MORE_IN_STAGES } else { MORE_NODES };
    let limits = std::iter::successors(Some(within), |limit| limit.checked_mul(more));
    let mut inner: Vec<u64> = limits.take_while(|limit| *limit < copies).map(largest).collect();
    inner.retain(|inner| *inner > 1 && cluster.nodes > 1);
    inner.push(copies);
    inner.dedup();
    inner.reverse();
    inner
}

/// The sizes that attention may divide, its heads among them.
fn attention_sizes(prepared: &Prepared<'_>) -> Vec<u64> {
    let classes = prepared.folded.classes.iter().zip(&prepared.rules);
    let attention = classes.filter(|(class, _)| matches!(prepared.graph.node(class.node).op, Op::Attention(_)));
    let factors = attention.flat_map(|(_, rule)| &rule.factors);
    factors.filter(|factor| factor.kind == FactorKind::Parallel).map(|factor| factor.size).collect()
}

/// The ways to make a context degree of axes: as pinned; else one axis, and two where attention can divide its heads by
/// the second alone: as many as heads take, or near-equal ones where the degree is large.
fn contexts(sizes: &[u64], cp: u64, pins: &Pins) -> Vec<Vec<u64>> {
    if let Some(axes) = pins.several(Family::Context) {
        return vec![axes.clone()];
    }
    let mut all = vec![vec![cp]];
    let common = sizes.iter().map(|size| gcd(*size, cp)).filter(|common| *common > 1 && *common < cp);
    for axes in common.map(|common| vec![cp / common, common]).chain(square(cp)) {
        if !all.contains(&axes) {
            all.push(axes);
        }
    }
    all
}

/// The heads that attention may divide over a part of a context degree whose rest goes round a ring, where ranks outnumber
/// them. Axes that may be either are found one by one, and what is good for the one may leave too few heads for the other.
fn ringed_heads(sizes: &[u64], cp: u64, pins: &Pins) -> Vec<u64> {
    let is_free = !pins.fixes(&Family::CONTEXT);
    let outnumbered = |size: &&u64| is_free && **size > 1 && **size < cp && cp.is_multiple_of(**size);
    let heads: BTreeSet<u64> = sizes.iter().filter(outnumbered).copied().collect();
    heads.into_iter().collect()
}

/// Two near-equal axes of a degree, where it is large.
fn square(degree: u64) -> Option<Vec<u64>> {
    let low = divisors(degree).into_iter().filter(|size| size * size <= degree).max().unwrap_or(1);
    (degree >= LEAST_SQUARE && low > 1).then(|| vec![degree / low, low])
}

/// The ways to make a tensor degree of axes: as pinned; else one axis, and its prime pieces where some
/// factor divides only in part (two key/value heads over four ranks), so that it can take one of them
/// ([`joined`] to a few), and two near-equal axes where the degree is large.
fn splits(prepared: &Prepared<'_>, tp: u64, pins: &Pins) -> Vec<Vec<u64>> {
    if let Some(axes) = pins.several(Family::Tensor) {
        return vec![axes.clone()];
    }
    let mut pieces = Vec::new();
    let (mut rest, mut prime) = (tp, 2);
    while rest > 1 {
        while rest.is_multiple_of(prime) {
            pieces.push(prime);
            rest /= prime;
        }
        prime += 1;
    }
    let takes_a_part = |size: u64| !size.is_multiple_of(tp) && pieces.iter().any(|piece| size.is_multiple_of(*piece));
    let is_divided_in_part = prepared.rules.iter().zip(&prepared.batch).any(|(rule, batch)| {
        let factors = rule.factors.iter().enumerate();
        let mut others = factors.filter(|(index, factor)| {
            *batch != Choice::Factor(*index) && factor.kind == FactorKind::Parallel && factor.size > 1
        });
        others.any(|(_, factor)| takes_a_part(factor.size))
    });
    let mut splits = vec![vec![tp]];
    if pieces.len() > 1 && is_divided_in_part {
        splits.push(joined(pieces));
    }
    splits.extend(square(tp).filter(|square| !splits.contains(square)));
    splits
}

/// Of the pieces of a degree, from the smallest, [`MOST_PIECES`] at the most: the smallest two are one
/// until there are as few.
fn joined(mut pieces: Vec<u64>) -> Vec<u64> {
    while pieces.len() > MOST_PIECES {
        let both = pieces.drain(..2).product();
        let place = pieces.partition_point(|piece| *piece < both);
        pieces.insert(place, both);
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_degrees_are_made_of_few_axes() {
        assert_eq!(joined(vec![2, 2, 2, 3]), [2, 2, 2, 3]);
        assert_eq!(joined(vec![2, 2, 2, 2, 3]), [2, 2, 3, 4]);
        assert_eq!(joined(vec![2; 12]), [4, 4, 16, 16]);
    }

    /// Within a node, and over twice as many ranks each time: any of them may be the fastest that fits.
    #[test]
    fn parts_lie_over_nodes_of_any_number() {
        let over = |cluster: &str, copies: u64, stride: u64| {
            stored(&Cluster::parse(cluster, "h200").unwrap(), copies, stride, (false, &Pins::default()))
        };
        assert_eq!(over("h100:8x16", 128, 1), [128, 64, 32, 16, 8]);
        assert_eq!(over("h100:8x16", 64, 2), [64, 32, 16, 8, 4]);
        assert_eq!(over("h100:8x6", 48, 1), [48, 24, 16, 8]);
        assert_eq!(over("h100:8", 8, 1), [8]);
        assert_eq!(over("h100:4x3", 3, 4), [3]);
        let cluster = Cluster::parse("h100:8x16", "h200").unwrap();
        assert_eq!(stored(&cluster, 64, 2, (true, &Pins::default())), [64, 16, 4]);
    }

    /// Replicas of parts without ZeRO would be one plan under many names, none of which is a pin.
    #[test]
    fn without_zero_there_are_no_parts() {
        let cluster = Cluster::parse("h100:8x16", "h200").unwrap();
        let over = |pins: &str| stored(&cluster, 128, 1, (false, &Pins::parse(pins).unwrap()));
        assert_eq!((over("zero=0"), over("zero=0,fsdp=1")), (vec![128], vec![128]));
        assert_eq!((over("zero=1").len(), over("zero=1,fsdp=8")), (5, vec![8]));
    }

    #[test]
    fn context_ranks_have_a_sequence_at_a_time() {
        let way = |context: &[u64]| Way {
            pp: 1,
            data: 4,
            ep: 1,
            stored: vec![4],
            is_pinned: false,
            context: vec![(Family::Context, context.to_vec())],
            tp: vec![vec![1]],
        };
        let of = |context: &[u64], pins: &str| {
            [1, 2, 3, 6].map(|size| way(context).is_better_as_data(size, &Pins::parse(pins).unwrap()))
        };
        assert_eq!(of(&[4, 2], ""), [false, true, false, true]);
        assert_eq!(of(&[3], "tp=1"), [false, false, true, true]);
        assert_eq!(of(&[1], ""), [false; 4]);
        // What takes its place is not what is asked for.
        assert_eq!(of(&[4, 2], "cp=8"), [false; 4]);
        assert_eq!(of(&[4, 2], "microbatch=2"), [false; 4]);
    }

    #[test]
    fn rings_are_of_heads_that_ranks_outnumber() {
        let of = |sizes: &[u64], cp: u64, pins: &str| ringed_heads(sizes, cp, &Pins::parse(pins).unwrap());
        assert_eq!(of(&[1, 8, 4], 32, ""), [4, 8]);
        assert_eq!(of(&[12], 32, ""), [0; 0]);
        // There are heads enough, or something is asked for.
        assert_eq!(of(&[32], 8, ""), [0; 0]);
        assert_eq!(of(&[8], 32, "cp=32"), [0; 0]);
    }
}
