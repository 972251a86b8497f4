//! What the samples of a batch have to do with each other: statistics over all of them, products of each with every
//! other.
//!
//! Such values are exchanged between the ranks that divide the batch, in the middle of the forward and the backward
//! pass. A microbatch alone cannot make them, so samples that depend on each other are one microbatch
//! ([`needed_whole`]). Most models have none: their samples meet in the loss and in the gradients only.
//!
//! Sums of small values that one region makes are priced as one collective, as the [schedule](crate::schedule) merges
//! them.

use super::family::batch_axes;
use super::layout::{Along, Extent, convert};
use super::tensor::{Conversion, Flow, Placed, Prepared};
use crate::cluster::Cluster;
use crate::cost::collective::Group;
use crate::part::part_of;
use shardc_ir::{AxisId, Choice, DType, FactorKind, NodeId, OpDef, ReduceKind, Role, Strategy};
use std::collections::BTreeSet;

/// What stands against dividing the batch over an axis of time: the first node whose result another would need as it is
/// for all samples. A value that is summed over microbatches exists only after the last of them, and so does what is made
/// of it; one that is divided over them is never whole; and no operation is another one in every microbatch.
pub fn needed_whole(prepared: &Prepared<'_>, strategies: &[Strategy], axis: AxisId) -> Option<NodeId> {
    let made = |flow: &Flow| {
        let sharding = prepared.rules[flow.maker].result_sharding(flow.result, &strategies[flow.maker]);
        Along::of(&sharding, axis)
    };
    let flows: Vec<(&Flow, Along)> = prepared.flows.iter().map(|flow| (flow, made(flow))).collect();
    let node = |class: usize| prepared.folded.classes[class].node;
    let counts = |class: usize, dim: usize| {
        let node = prepared.graph.node(node(class));
        node.op.counts(dim, node.operands.len())
    };
    if let Some((flow, _)) =
        flows.iter().find(|(flow, from)| matches!(from, Along::Dim(dim) if counts(flow.maker, *dim)))
    {
        return Some(node(flow.maker));
    }
    // Accumulators add, and floats alone; and what a term is of may be told by where its elements begin.
    let is_accumulated = |flow: &Flow, from: &Along| match from {
        Along::Partial(kind) => {
            let value = prepared.graph.node(node(flow.maker)).results[flow.result];
            *kind == ReduceKind::Sum
                && prepared.graph.ty(value).dtype.is_float()
                && is_alike(prepared, flow.maker, &strategies[flow.maker], axis)
        }
        _ => true,
    };
    if let Some((flow, _)) = flows.iter().find(|(flow, from)| !is_accumulated(flow, from)) {
        return Some(node(flow.maker));
    }
    let is_looped = |class: usize| prepared.in_loop(class);
    let mut late = vec![false; prepared.rules.len()];
    loop {
        let mut is_settled = true;
        for (flow, from) in &flows {
            if !late[flow.maker] && !matches!(from, Along::Partial(_)) {
                continue;
            }
            for (reader, _, _) in flow.readers.iter().filter(|(reader, _, _)| !is_looped(*reader)) {
                is_settled &= std::mem::replace(&mut late[*reader], true);
            }
        }
        if is_settled {
            break;
        }
    }
    let reads = |(reader, operand, _): &(usize, usize, usize)| {
        Along::of(&prepared.rules[*reader].operand_sharding(*operand, &strategies[*reader]), axis)
    };
    // What is whole is divided where it is made again from nothing, which given numbers, inputs and results are not.
    let is_made_again = |flow: &Flow, read: &Along| {
        let (node, rule) = (prepared.graph.node(node(flow.maker)), prepared.rules[flow.maker]);
        let Along::Dim(dim) = read else { return *read == Along::Whole };
        let is_divisible = |factor: &usize| rule.factors[*factor].kind == FactorKind::Parallel;
        node.operands.is_empty()
            && !node.op.is_leaf()
            && rule.results[flow.result].get(*dim).and_then(|factors| factors.first()).is_none_or(is_divisible)
    };
    let is_met = |(flow, from): &&(&Flow, Along)| {
        flow.readers.iter().all(|read| match from {
            Along::Whole => (!late[flow.maker] || !is_looped(read.0)) && is_made_again(flow, &reads(read)),
            Along::Partial(_) => reads(read) == *from || !is_looped(read.0),
            Along::Dim(_) => reads(read) == *from,
        })
    };
    flows.iter().find(|flow| !is_met(flow)).map(|(flow, _)| node(flow.maker))
}

/// Whether a node is the same operation for the first elements and the last ones of the factor that an axis divides.
fn is_alike(prepared: &Prepared<'_>, class: usize, strategy: &Strategy, axis: AxisId) -> bool {
    let (id, rule) = (prepared.folded.classes[class].node, prepared.rules[class]);
    let mut divided = strategy.factors.iter().filter(|(_, axes)| axes.contains(&axis)).map(|(factor, _)| *factor);
    divided.all(|factor| {
        let size = rule.factors[factor].size;
        let part = |start: u64| part_of(prepared.graph, id, factor, (start, size / 2));
        part(0) == part(size - size / 2)
    })
}

/// The conversions along the axes that divide the batch over ranks, between nodes that run once per
/// microbatch, or are of the forward and the backward pass all the same: what is made of statistics of the batch
/// alone is whole on every rank. Gradients that updates read are priced by how the data ranks share them.
/// They take what they take on the ranks of a cluster.
pub fn coupled(prepared: &Prepared<'_>, placed: &Placed<'_>, cluster: &Cluster) -> Vec<Conversion> {
    let mut conversions: Vec<Conversion> = Vec::new();
    // Of those that add what a region of small values makes, its class, the axis and the element type.
    let mut sums: Vec<(usize, (usize, AxisId, DType))> = Vec::new();
    let is_read = |flow: &Flow, reader: usize| {
        let is_whole = prepared.batch[reader] == Choice::Replicate;
        let is_statistic = is_whole && prepared.role(reader) != Role::Optimizer && !prepared.is_gradient[flow.maker];
        matches!(prepared.batch[reader], Choice::Factor(_)) || is_statistic
    };
    for axis in batch_axes(placed.mesh).into_iter().filter(|axis| !placed.mesh.is_time(*axis)) {
        let group = Group::new(placed.mesh, &[axis], placed.cluster);
        for flow in &prepared.flows {
            let rule = &prepared.rules[flow.maker];
            let made = rule.result_sharding(flow.result, &placed.strategies[flow.maker]);
            let from = Along::of(&made, axis);
            if from == Along::Whole {
                continue;
            }
            let class = &prepared.folded.classes[flow.maker];
            let value = prepared.graph.node(class.node).results[flow.result];
            let ty = Prepared::local(prepared.graph.ty(value), &made, placed.mesh);
            let parts = if matches!(from, Along::Dim(_)) { group.size() as f64 } else { 1.0 };
            let whole = ty.bytes().0 as f64 * parts;
            let mut known = Vec::new();
            for (reader, operand, _) in flow.readers.iter().filter(|(reader, _, _)| is_read(flow, *reader)) {
                let read = prepared.rules[*reader].operand_sharding(*operand, &placed.strategies[*reader]);
                let to = Along::of(&read, axis);
                if to == from || known.contains(&to) {
                    continue;
                }
                known.push(to);
                let region = prepared.emitted[flow.maker].together;
                if let (Some(region), Along::Partial(_), Along::Whole) = (region, from, to) {
                    sums.push((conversions.len(), (region, axis, ty.dtype)));
                }
                let extent = Extent { bytes: whole, shape: &ty.shape };
                conversions.push(Conversion {
                    maker: flow.maker,
                    result: flow.result,
                    reader: *reader,
                    turn: convert(from, to, extent, group, cluster),
                    start: convert(from, to, Extent { bytes: 0.0, ..extent }, group, cluster).wire,
                    count: class.members.len(),
                    bytes: if matches!(to, Along::Dim(_)) { whole / group.size() as f64 } else { whole },
                    is_shared: flow.readers.len() > 1,
                    is_early: matches!(from, Along::Partial(_)),
                    is_local: false,
                });
            }
        }
    }
    start_together(prepared, &mut conversions, &sums);
    conversions
}

/// Sums over the same ranks of what one region of small values makes are one collective, but for those of what is made of
/// another one's result: they start once.
fn start_together<K: PartialEq>(prepared: &Prepared<'_>, conversions: &mut [Conversion], sums: &[(usize, K)]) {
    let mut leaders: Vec<(&K, usize)> = Vec::new();
    for (at, key) in sums {
        let own = &mut conversions[*at];
        let is_beside = |(other, leader): &(&K, usize)| *other == key && !depends(prepared, own.maker, *leader);
        if leaders.iter().any(is_beside) {
            own.turn.wire -= own.start;
            own.start = 0.0;
        } else {
            leaders.push((key, own.maker));
        }
    }
}

/// Whether what a class makes in a region depends on what another one makes there.
fn depends(prepared: &Prepared<'_>, class: usize, on: usize) -> bool {
    let region = prepared.emitted[class].together;
    let mut open = vec![class];
    let mut seen = BTreeSet::new();
    while let Some(class) = open.pop() {
        let operands = prepared.graph.node(prepared.folded.classes[class].node).operands.iter();
        for maker in operands.map(|value| prepared.folded.class[prepared.graph.value(*value).def]) {
            if maker == on {
                return true;
            }
            if prepared.emitted[maker].together == region && seen.insert(maker) {
                open.push(maker);
            }
        }
    }
    false
}
