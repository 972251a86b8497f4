//! Which factor of each node is the sequence.
//!
//! Where a rank has one sample in a microbatch there is nothing to cut but its tokens. The second dimension of the
//! inputs is followed through the factor rules. Attention alone sees all tokens at once, so it is not cut;
//! neither is what has no such factor.

use shardc_ir::ops::Op;
use shardc_ir::{FactorKind, Graph, NodeId, SecondaryMap, ValueId};
use std::collections::HashMap;

/// The dimension of an input along which its tokens lie.
const TOKENS: usize = 1;

/// Per node, the factor that is the sequence of `length` tokens, if it can be cut along it.
pub fn sequence_factors(graph: &Graph, length: u64) -> SecondaryMap<NodeId, Option<usize>> {
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
        let is_apart = matches!(node.op, Op::Attention(_) | Op::AttentionGrad(_));
        let factor = factor.filter(|factor| rule.factors[*factor].kind == FactorKind::Parallel && !is_apart);
        factors[id] = factor;
        for (result, held) in node.results.iter().zip(&rule.results) {
            let of_factor = held.iter().position(|held| factor.is_some() && held.first() == factor.as_ref());
            let kept = of_factor.or(Some(dim).filter(|dim| factor.is_none() && is_long(result, *dim)));
            dims.extend(kept.map(|dim| (*result, dim)));
        }
    }
    factors
}
