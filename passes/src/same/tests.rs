//! Graphs that compute the same, and some that do not.

use super::*;
use crate::chunk::chunk;
use crate::rematerialize::rematerialize;
use crate::search_tests::{Sizes, llama, plan};
use shardc_ir::ops::{Attention, BinaryKind, Slice};
use shardc_ir::{DType, NodeId};

const SMALL: Sizes = Sizes { layers: 2, batch: 4, seq: 64, hidden: 64, heads: 4, kv: 4, ffn: 128, vocab: 256 };

/// What is computed again is the same; a head in chunks is the same as itself alone.
#[test]
fn what_is_computed_again_is_the_same() {
    let graph = llama(SMALL, DType::Bf16);
    let again = rematerialize(&graph, &|_| true).unwrap();
    assert!(again.node_count() > graph.node_count());
    assert_eq!([difference(&graph, &again), difference(&again, &graph)], [None, None]);
    let cut = |graph: &Graph| chunk(graph, 2).unwrap().0;
    assert_eq!(difference(&cut(&again), &cut(&graph)), None);
    assert!(difference(&cut(&graph), &graph).is_some());
}

/// The graph with a node that does something else, or with other operands.
fn with(graph: &Graph, id: NodeId, op: &Op, operands: &[ValueId]) -> Option<Graph> {
    let node = graph.node(id);
    let other = graph.rebuild(|to, at, map| {
        if at != id {
            return Ok(false);
        }
        let operands: Vec<ValueId> = operands.iter().map(|value| map[value]).collect();
        let added = to.add_as(op.clone(), &operands, &graph.result_types(id), node.path.clone(), node.role)?;
        map.extend(node.results.iter().copied().zip(to.node(added).results.clone()));
        Ok(true)
    });
    other.ok()
}

/// Each operand of a node, the last value before of its type, and the graph with that in its place.
fn exchanged(graph: &Graph, id: NodeId) -> Vec<(ValueId, ValueId, Graph)> {
    let node = graph.node(id);
    let exchange = |(place, operand): (usize, &ValueId)| {
        let before = graph.values().take_while(|(value, _)| *value != node.results[0]).map(|of| of.0);
        let alike = before.filter(|value| value != operand && graph.ty(*value) == graph.ty(*operand)).last()?;
        let mut operands = node.operands.clone();
        operands[place] = alike;
        Some((*operand, alike, with(graph, id, &node.op, &operands)?))
    };
    node.operands.iter().enumerate().filter_map(exchange).collect()
}

/// Every operand that is another one of its type, and every output that is left out or of another value, is told.
#[test]
fn what_is_another_is_told() {
    let graph = llama(SMALL, DType::Bf16);
    let mut changed = 0;
    for (id, _) in graph.nodes() {
        for (operand, alike, other) in exchanged(&graph, id) {
            assert_ne!(difference(&other, &graph), None, "{operand} of {id} is {alike}");
            changed += 1;
        }
    }
    assert!(changed > 100, "{changed}");
    for index in 0..graph.outputs.len() {
        let mut less = graph.clone();
        let name = less.outputs.remove(index).name;
        for difference in [difference, chunks::difference] {
            assert_eq!(difference(&less, &graph), Some(Difference::Missing(name.clone())));
            assert_eq!(difference(&graph, &less), Some(Difference::Output(name.clone())));
        }
    }
}

/// What is joined to more than there is, is nothing that a step computes.
#[test]
fn more_than_there_is_is_told() {
    let graph = |size: u64, lines: &str| -> Graph {
        format!("graph @g {{\n  %x: f32[{size}] = input \"x\"\n{lines}  return y %y\n}}").parse().unwrap()
    };
    let whole = graph(4, "  %y: f32[4] = neg %x\n");
    let twice = graph(4, "  %d: f32[8] = concat %x, %x {dim=0}\n  %y: f32[8] = neg %d\n");
    assert!(chunks::difference(&twice, &whole).is_some());
    assert_eq!(chunks::difference(&whole, &whole), None);
}

const CUT: Sizes = Sizes { layers: 1, batch: 16, seq: 8, hidden: 64, heads: 8, kv: 4, ffn: 128, vocab: 64 };

/// What is in chunks is the same, however they lie; whatever is changed of it is told: other chunks of a value, in another
/// order, from elsewhere on, one term twice, a mask that begins elsewhere.
#[test]
fn chunks_are_the_same_and_others_are_told() {
    let whole = llama(CUT, DType::F32);
    let mut told = HashMap::<&str, usize>::new();
    for (cluster, pins) in [
        ("cpu:2", "tp=2,microbatch=16,overlap_chunks=2"),
        ("cpu:4", "dp=2,tp=2,microbatch=4,overlap_chunks=4,zero=3,recompute=selective"),
        ("cpu:2", "tp=2,microbatch=1,overlap_chunks=2"),
        ("cpu:4", "cp=2,tp=2,microbatch=1,overlap_chunks=2,recompute=block"),
        ("cpu:4", "cp=2x2,microbatch=1,overlap_chunks=2,zero=1"),
    ] {
        let graph = plan(CUT, DType::F32, cluster, 1, pins).unwrap().graph;
        assert_eq!(chunks::difference(&graph, &whole), None, "{pins}");
        assert_ne!(difference(&graph, &whole), None, "{pins}");
        let is_told = |id: NodeId, op: &Op, operands: &[ValueId]| {
            with(&graph, id, op, operands).map(|other| chunks::difference(&other, &whole).is_some())
        };
        for (id, node) in graph.nodes() {
            for (operand, alike, other) in exchanged(&graph, id) {
                let is_told = chunks::difference(&other, &whole).is_some();
                assert!(
                    is_told || chunks::are_same(&graph, &whole, [operand, alike]),
                    "{pins}: {operand} of {id} is {alike}"
                );
                *told.entry("operand").or_default() += usize::from(is_told);
            }
            let (op, operands): (Op, Vec<ValueId>) = match &node.op {
                Op::Slice(op) => {
                    let by = |start: u64, limit: u64| if start > 0 { start.min(limit - start) } else { 0 };
                    let moved = |(start, limit): (&u64, &u64)| start - by(*start, *limit);
                    let back = |(start, limit): (&u64, &u64)| limit - by(*start, *limit);
                    let start: Vec<u64> = op.start.iter().zip(&op.limit).map(moved).collect();
                    let limit = op.start.iter().zip(&op.limit).map(back).collect();
                    (Slice { start, limit }.into(), node.operands.clone())
                }
                Op::Concat(_) => (node.op.clone(), node.operands.iter().rev().copied().collect()),
                Op::Attention(op) => {
                    let (lead, reversed) = (Some(op.lead.unwrap_or(0) - 1), op.reversed);
                    (Attention { lead, reversed, ..op.clone() }.into(), node.operands.clone())
                }
                Op::Binary(op) if op.kind == BinaryKind::Add => (node.op.clone(), vec![node.operands[0]; 2]),
                _ => continue,
            };
            if (&op, &operands) == (&node.op, &node.operands) {
                continue;
            }
            let is_told = is_told(id, &op, &operands);
            assert_ne!(is_told, Some(false), "{pins}: {id} is {op:?} of {operands:?}");
            *told.entry(op.name()).or_default() += usize::from(is_told.is_some());
        }
    }
    let few = ["operand", "slice", "concat", "attention", "add"].map(|what| told.get(what).copied().unwrap_or(0));
    assert!(few.iter().all(|count| *count > 4), "{told:?}");
}
