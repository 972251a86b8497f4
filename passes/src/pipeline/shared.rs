//! Gradients of parameters that several chunks read, such as an embedding that is also the head.
//!
//! Such a parameter passes between stages once in a step, before the loop over the microbatches
//! ([`messages`](crate::lower)). Each chunk adds its own gradient up over the microbatches. The sum over the chunks is
//! made behind the loop, where the parameter is updated, in the layout in which it is read there. So gradients also
//! pass between stages once in a step. Where ranks store parts of the parameter, parts are sent if the sum can be
//! divided so. (Megatron-LM exchanges them once in a step as well, in `_allreduce_word_embedding_grads`.)

use crate::chunk::strategy_for;
use shardc_ir::{Family, Graph, Mesh, NodeId, Pipeline, Role, SecondaryMap, Strategy};
use std::collections::BTreeSet;

/// The nodes of the loop over the microbatches that add gradients up (they pass sums over time on), and that nothing in
/// the loop reads but such.
pub fn last_sums(graph: &Graph, passes_on: impl Fn(NodeId) -> bool) -> SecondaryMap<NodeId, bool> {
    let users = graph.users();
    let mut is_last: SecondaryMap<NodeId, bool> = SecondaryMap::new();
    for (id, node) in graph.nodes().rev().filter(|(id, _)| passes_on(*id)) {
        let mut readers = node.results.iter().flat_map(|value| users.get(value).into_iter().flatten());
        let is_behind = |reader: NodeId| is_last[reader] || graph.node(reader).role == Role::Optimizer;
        is_last[id] = matches!(node.role, Role::Backward(_)) && readers.all(|(reader, _)| is_behind(*reader));
    }
    is_last
}

/// Puts sums of gradients of several chunks behind the loop over the microbatches, in the chunk of the update: what is
/// made there does not leave its chunk, and of three chunks' gradients the first sum is an operand of the second. Where
/// all of them are made on one stage, they are added before ranks add theirs; what comes from another is added by ranks
/// first, which may then send parts.
pub fn sum_behind_loop(
    graph: &Graph,
    mesh: &Mesh,
    pipeline: &mut Pipeline,
    strategies: &mut SecondaryMap<NodeId, Strategy>,
) {
    let (users, stages) = (graph.users(), mesh.degree(Family::Pipeline));
    let is_last = last_sums(graph, |id| strategies[id].pass.keys().any(|axis| mesh.is_time(*axis)));
    let mut is_shared: SecondaryMap<NodeId, bool> = SecondaryMap::new();
    // The stages whose chunks make what is summed.
    let mut makers: SecondaryMap<NodeId, BTreeSet<u64>> = SecondaryMap::new();
    for (id, node) in graph.nodes().filter(|(id, _)| is_last[*id]) {
        for def in node.operands.iter().map(|value| graph.value(*value).def) {
            let chunk = pipeline.chunks[def];
            is_shared[id] |= is_shared[def] || (chunk.is_some() && chunk != pipeline.chunks[id]);
            let own = chunk.filter(|_| !is_shared[def]).map(|chunk| pipeline.stage_of(chunk, stages));
            let of: Vec<u64> = makers[def].iter().copied().chain(own).collect();
            makers[id].extend(of);
        }
    }
    // Who reads them is at its place already.
    for (id, node) in graph.nodes().rev().filter(|(id, _)| is_shared[*id]) {
        let reader = node.results.first().and_then(|value| users.get(value)?.first());
        if let Some(chunk) = reader.and_then(|(reader, _)| pipeline.chunks[*reader]) {
            pipeline.chunks[id] = Some(chunk);
        }
        let layout = reader.map(|(reader, index)| graph.rule(*reader).operand_sharding(*index, &strategies[*reader]));
        let strategy = layout.map(|layout| strategy_for(graph.rule(id), &layout));
        let is_legal = |strategy: &Strategy| graph.rule(id).check(strategy, mesh).is_ok();
        let time = mesh.ids().filter(|axis| mesh.is_time(*axis));
        let as_before = || time.fold(strategies[id].clone(), |strategy, axis| strategy.without(axis));
        let stage = pipeline.chunks[id].map(|chunk| pipeline.stage_of(chunk, stages));
        let is_of_one = makers[id].iter().all(|maker| Some(*maker) == stage);
        strategies[id] = strategy.filter(|strategy| !is_of_one && is_legal(strategy)).unwrap_or_else(as_before);
    }
}
