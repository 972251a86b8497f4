//! Recomputation: forward values that are made again for the backward pass instead of kept.
//!
//! A block is what a module path names up to and including its first numeric component
//! (`blocks.3`). For a selected block, the forward nodes that its backward nodes read are added a
//! second time, just before the first of those (Chen et al., "Training deep nets with sublinear
//! memory cost", 2016). They read what enters the block, which stays, and parameters. Of a block that the forward pass
//! comes through more than once, each time is recomputed by itself.
//!
//! Invariants: the graph computes the same; the copies have the role
//! [`Role::Recompute`] of what they copy; nothing that no output needs
//! is left.

use crate::error::PassError;
use crate::fold::module;
use shardc_ir::ops::OpError;
use shardc_ir::{Graph, Node, NodeId, Op, OpDef, PrimaryMap, Role, SecondaryMap, ValueId};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Recomputes the blocks that `blocks` selects by their path, all of each.
///
/// # Errors
/// None but a bug: a node that cannot be added a second time.
pub fn rematerialize(graph: &Graph, blocks: &dyn Fn(&str) -> bool) -> Result<Graph, PassError> {
    rematerialize_keeping(graph, blocks, &|_| false)
}

/// [`rematerialize`], but the results of forward nodes that `keep` selects are kept: matrix products
/// and attention, say, so that only what is cheap is computed again (Korthikanti et al., "Reducing
/// activation recomputation", 2022).
///
/// # Errors
/// As [`rematerialize`].
pub fn rematerialize_keeping(
    graph: &Graph,
    blocks: &dyn Fn(&str) -> bool,
    keep: &dyn Fn(&Node) -> bool,
) -> Result<Graph, PassError> {
    Ok(rematerialize_from(graph, blocks, &|id| keep(graph.node(id)))?.0)
}

/// [`rematerialize_keeping`], and for each node of the new graph the node of the old one that it is,
/// or copies.
///
/// # Errors
/// As [`rematerialize`].
pub fn rematerialize_from(
    graph: &Graph,
    blocks: &dyn Fn(&str) -> bool,
    keep: &dyn Fn(NodeId) -> bool,
) -> Result<(Graph, PrimaryMap<NodeId, NodeId>), PassError> {
    let chosen = Chosen::new(graph, blocks, keep);
    let mut copies: HashMap<ValueId, ValueId> = HashMap::new();
    // Every step adds the nodes that are recorded in it, in this order.
    let mut from: PrimaryMap<NodeId, NodeId> = PrimaryMap::new();
    let rebuilt = graph.rebuild(|new, id, map| {
        let Some(block) = chosen.reader[id] else {
            from.push(id);
            return Ok(false);
        };
        if chosen.first[&block] == id {
            for node in &chosen.needed[&block] {
                copy_again(graph, new, *node, map, &mut copies)?;
                from.push(*node);
            }
        }
        read_copies(graph, new, id, map, &copies)?;
        from.push(id);
        Ok(true)
    });
    // What only the backward pass read is dead now.
    let mut kept: PrimaryMap<NodeId, NodeId> = PrimaryMap::new();
    let rebuilt = rebuilt.and_then(|graph| {
        graph.rebuild(|_, id, _| {
            kept.push(from[id]);
            Ok(false)
        })
    });
    Ok((rebuilt.map_err(PassError::ill_formed("rematerialize"))?, kept))
}

/// The graph without what is computed again, and where each of its nodes stood in `graph`: what
/// [`rematerialize`] made it from.
///
/// # Errors
/// None but a bug: a node that cannot be added.
pub fn without_recomputation(graph: &Graph) -> Result<(Graph, PrimaryMap<NodeId, NodeId>), PassError> {
    let mut from: PrimaryMap<NodeId, NodeId> = PrimaryMap::new();
    let rebuilt = graph.rebuild(|_, id, map| {
        let Role::Recompute(of) = graph.node(id).role else {
            from.push(id);
            return Ok(false);
        };
        for (again, first) in graph.node(id).results.iter().zip(&graph.node(of).results) {
            map.insert(*again, map[first]);
        }
        Ok(true)
    });
    Ok((rebuilt.map_err(PassError::ill_formed("without_recomputation"))?, from))
}

/// The block of a node, if it lies in one.
fn block(node: &Node) -> Option<&str> {
    let block = module(&node.path);
    let last = block.rsplit('.').next()?;
    (!last.is_empty() && last.bytes().all(|byte| byte.is_ascii_digit())).then_some(block)
}

/// Per node, whether it is never computed again: what depends on parameters alone is the same at any time, a cast weight
/// or a table. Copies of it along other dimensions are not, since they are larger than what they are made of.
pub fn fixed(graph: &Graph) -> SecondaryMap<NodeId, bool> {
    let mut fixed: SecondaryMap<NodeId, bool> = SecondaryMap::new();
    for (id, node) in graph.nodes() {
        let is_fixed = |value: &ValueId| fixed[graph.value(*value).def];
        fixed[id] = !matches!(node.op, Op::Input(_) | Op::Broadcast(_)) && node.operands.iter().all(is_fixed);
    }
    fixed
}

/// Of the nodes of chosen blocks, the number of the time in a block that each belongs to: from a node of the forward pass
/// that comes behind one of another block, up to the next such; and those of the backward pass that of their own.
fn times(
    graph: &Graph,
    fixed: &SecondaryMap<NodeId, bool>,
    blocks: &dyn Fn(&str) -> bool,
) -> SecondaryMap<NodeId, Option<u32>> {
    let mut times: SecondaryMap<NodeId, Option<u32>> = SecondaryMap::new();
    let (mut count, mut last) = (0, None);
    for (id, node) in graph.nodes() {
        let Some(own) = block(node) else { continue };
        times[id] = match node.role {
            Role::Forward if fixed[id] => None,
            Role::Forward => {
                count += u32::from(last.is_some_and(|last| last != own));
                last = Some(own);
                blocks(own).then_some(count)
            }
            Role::Backward(of) | Role::Recompute(of) => times[of],
            Role::Optimizer => None,
        };
    }
    times
}

/// What is to be made again, and who reads it.
struct Chosen {
    /// Per backward node of a chosen block, which time in that it belongs to.
    reader: SecondaryMap<NodeId, Option<u32>>,
    /// Per time in a block, its first backward node.
    first: BTreeMap<u32, NodeId>,
    /// Per time in a block, the forward nodes to copy, in order.
    needed: BTreeMap<u32, BTreeSet<NodeId>>,
}

impl Chosen {
    fn new(graph: &Graph, blocks: &dyn Fn(&str) -> bool, keep: &dyn Fn(NodeId) -> bool) -> Self {
        let fixed = fixed(graph);
        let home = times(graph, &fixed, blocks);
        let again = |id: NodeId, number: u32| {
            let node = graph.node(id);
            home[id] == Some(number) && node.role == Role::Forward && !node.op.is_leaf() && !fixed[id] && !keep(id)
        };
        let mut chosen = Self { reader: SecondaryMap::new(), first: BTreeMap::new(), needed: BTreeMap::new() };
        for (id, node) in graph.nodes() {
            let (Role::Backward(_), Some(number)) = (node.role, home[id]) else { continue };
            let needed = chosen.needed.entry(number).or_default();
            let mut open: Vec<NodeId> = node.operands.iter().map(|value| graph.value(*value).def).collect();
            while let Some(def) = open.pop() {
                if again(def, number) && needed.insert(def) {
                    open.extend(graph.node(def).operands.iter().map(|value| graph.value(*value).def));
                }
            }
            chosen.first.entry(number).or_insert(id);
            chosen.reader[id] = Some(number);
        }
        chosen
    }
}

/// Adds a forward node a second time; it reads the copies of what was copied before.
fn copy_again(
    graph: &Graph,
    new: &mut Graph,
    id: NodeId,
    map: &HashMap<ValueId, ValueId>,
    copies: &mut HashMap<ValueId, ValueId>,
) -> Result<(), OpError> {
    let node = graph.node(id);
    let operands: Vec<ValueId> = node.operands.iter().map(|value| *copies.get(value).unwrap_or(&map[value])).collect();
    let declared = graph.result_types(id);
    let copy = new.add_as(node.op.clone(), &operands, &declared, node.path.clone(), Role::Recompute(id))?;
    copies.extend(node.results.iter().copied().zip(new.node(copy).results.clone()));
    Ok(())
}

/// Adds a backward node, which reads the copies where there are any.
fn read_copies(
    graph: &Graph,
    new: &mut Graph,
    id: NodeId,
    map: &mut HashMap<ValueId, ValueId>,
    copies: &HashMap<ValueId, ValueId>,
) -> Result<(), OpError> {
    let node = graph.node(id);
    let operands: Vec<ValueId> = node.operands.iter().map(|value| *copies.get(value).unwrap_or(&map[value])).collect();
    let copy = new.add_as(node.op.clone(), &operands, &graph.result_types(id), node.path.clone(), node.role)?;
    map.extend(node.results.iter().copied().zip(new.node(copy).results.clone()));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::differentiate::differentiate;
    use crate::optimizer::{OptimizerConfig, add_optimizer};

    const MLP: &str = r#"graph @mlp {
  %x: f32[8,4] = input "x"
  %w1: f32[4,8] = parameter "blocks.0.weight"
  %w2: f32[8,4] = parameter "blocks.1.weight"
  %h: f32[8,8] = matmul %x, %w1 at "blocks.0"
  %a: f32[8,8] = gelu %h at "blocks.0"
  %o: f32[8,4] = matmul %a, %w2 at "blocks.1"
  %e: f32[8,4] = gelu %o at "blocks.1"
  %s: f32[] = reduce_sum %e {dims=[0,1]} at "loss"
  return loss %s
}"#;

    #[track_caller]
    fn check(blocks: &[&str], keep_matmuls: bool, expect: &[&str]) {
        let graph: Graph = MLP.parse().expect("a graph");
        let step = differentiate(&graph, "loss").expect("a gradient");
        let step = add_optimizer(step, &OptimizerConfig::default()).expect("a step");
        let keep = |node: &Node| keep_matmuls && matches!(node.op, Op::Matmul(_));
        let made = rematerialize_keeping(&step, &|block| blocks.contains(&block), &keep).expect("a graph");
        let again = made.nodes().filter(|(_, node)| matches!(node.role, Role::Recompute(_)));
        let names: Vec<String> = again.map(|(_, node)| format!("{} {}", node.op.name(), node.path)).collect();
        assert_eq!(names, expect);
        for (id, node) in made.nodes() {
            if let Role::Recompute(of) | Role::Backward(of) = node.role {
                assert!(of < id && made.node(of).role == Role::Forward);
                assert_eq!(made.node(of).path, node.path);
            }
        }
        assert_eq!(made.outputs.len(), step.outputs.len());
        let (back, from) = without_recomputation(&made).expect("a graph");
        let text = |graph: &Graph| graph.nodes().map(|(_, node)| format!("{} {}", node.op.name(), node.path)).collect();
        let (before, after): (Vec<String>, Vec<String>) = (text(&step), text(&back));
        assert_eq!(after, before);
        assert!(from.iter().all(|(id, of)| back.node(id).op == made.node(*of).op));
    }

    #[test]
    fn blocks_are_computed_again() {
        check(&[], false, &[]);
        check(&["blocks.1"], false, &["matmul blocks.1"]);
        check(&["blocks.0", "blocks.1"], false, &["matmul blocks.1", "matmul blocks.0"]);
        check(&["blocks.0", "blocks.1"], true, &[]);
    }

    #[test]
    fn a_cast_weight_is_kept_and_its_copies_are_not() {
        let text = r#"graph @bias {
  %x: f32[8,4] = input "x"
  %b: f32[4] = parameter "blocks.0.bias"
  %c: bf16[4] = cast %b at "blocks.0"
  %w: f32[4] = cast %c at "blocks.0"
  %r: f32[8,4] = broadcast %w {dims=[1]} at "blocks.0"
  %y: f32[8,4] = add %x, %r at "blocks.0"
  return y %y
}"#;
        let graph: Graph = text.parse().expect("a graph");
        let fixed = fixed(&graph);
        let kept = graph.nodes().filter(|(id, node)| fixed[*id] && !node.op.is_leaf());
        assert_eq!(kept.map(|(_, node)| node.op.name()).collect::<Vec<_>>(), ["cast", "cast"]);
    }
}
