//! Which factor of each node is the sequence.
//!
//! Where a rank has one sample in a microbatch there is nothing to cut but its tokens. The second dimension of the
//! inputs is followed through the factor rules. Attention sees all keys at once, so it is not cut, unless ranks divide its
//! queries, as they do those of each chunk: then nothing is joined that would lie in other parts on the ranks, and under a
//! causal mask, where the last of a sequence see the most keys, each rank has queries of every chunk, and in every second one
//! those of the other end ([`query_parts`]). What has no such factor is not cut either.

use shardc_ir::ops::{Attention, Op};
use shardc_ir::{FactorKind, Graph, NodeId, SecondaryMap, ValueId};
use std::collections::HashMap;

/// The dimension of an input along which its tokens lie.
const TOKENS: usize = 1;

/// Per node, the factor that is the sequence of `length` tokens, if it can be cut along it; `is_divided` says whether ranks
/// divide a factor of a node.
pub fn sequence_factors(
    graph: &Graph,
    length: u64,
    is_divided: &dyn Fn(NodeId, usize) -> bool,
) -> SecondaryMap<NodeId, Option<usize>> {
    let mut factors: SecondaryMap<NodeId, Option<usize>> = SecondaryMap::new();
    let mut dims: HashMap<ValueId, usize> = HashMap::new();
    for (id, node) in graph.nodes() {
        let is_long = |value: &ValueId, dim: usize| graph.ty(*value).shape.get(dim) == Some(&length);
        if node.operands.is_empty() {
            let is_input = matches!(node.op, Op::Input(_)) && is_long(&node.results[0], TOKENS);
            dims.extend(is_input.then_some((node.results[0], TOKENS)));
            continue;
        }
        let Some((index, dim)) = node.operands.iter().enumerate().find_map(|(at, of)| Some((at, *dims.get(of)?)))
        else {
            continue;
        };
        let rule = graph.rule(id);
        let factor = rule.operands[index].get(dim).and_then(|factors| factors.first()).copied();
        let is_attention = matches!(node.op, Op::Attention(_) | Op::AttentionGrad(_));
        let is_cut = |factor: &usize| !is_attention || is_divided(id, *factor);
        let factor = factor.filter(|factor| rule.factors[*factor].kind == FactorKind::Parallel && is_cut(factor));
        factors[id] = factor;
        for (result, held) in node.results.iter().zip(&rule.results) {
            let of_factor = held.iter().position(|held| factor.is_some() && held.first() == factor.as_ref());
            let kept = of_factor.or(Some(dim).filter(|dim| factor.is_none() && is_long(result, *dim)));
            dims.extend(kept.map(|dim| (*result, dim)));
        }
    }
    factors
}

/// Into how many parts ranks divide the queries of each causal attention along these factors; 1 if they do not, or not
/// alike. `extent` is into how many they divide a factor of a node.
pub fn query_parts(
    graph: &Graph,
    factors: &SecondaryMap<NodeId, Option<usize>>,
    extent: &dyn Fn(NodeId, usize) -> u64,
) -> u64 {
    let is_causal = |op: &Op| matches!(op, Op::Attention(Attention { causal: true, .. }));
    let attention = graph.nodes().filter(|(_, node)| is_causal(&node.op));
    let mut parts = attention.map(|(id, _)| factors[id].map_or(1, |factor| extent(id, factor)));
    let first = parts.next().unwrap_or(1);
    if parts.all(|other| other == first) { first } else { 1 }
}
