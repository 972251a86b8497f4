//! The peak of activations and gradients: which values of a microbatch live at the same time.
//!
//! Nodes run in the order of the graph. A value lives from its node to its last reader, through
//! views of it. Where a block is computed again, its values live once in the forward pass, up to
//! their last reader there, and again from the start of the block's backward pass. A gradient lives
//! from its node to the end; with several microbatches its accumulator lives through all of them.

use crate::cost::is_view;
use crate::fold::block_of;
use crate::shard::tensor::{Conversion, Placed, Prepared};
use shardc_ir::{EntityRef, NodeId, Role, ValueId};
use std::collections::BTreeMap;

/// When a value lives. Positions are node indices.
#[derive(Clone, Copy, Debug)]
struct Life {
    bytes: u64,
    made: usize,
    /// Its last reader.
    last: usize,
    /// Its last reader in the forward pass.
    last_forward: usize,
    /// Its block, if recomputation drops it in between.
    block: Option<u64>,
}

/// The lives of all values of a microbatch.
#[derive(Debug)]
pub struct Liveness {
    lives: Vec<Life>,
    /// Where each gradient is made, and its bytes.
    gradients: Vec<(usize, u64)>,
    /// Per block, where its backward pass starts.
    backward: Vec<usize>,
    positions: usize,
}

impl Prepared<'_> {
    /// The number of blocks; at least 1.
    pub fn block_count(&self) -> u64 {
        let blocks = self.graph.nodes().filter_map(|(_, node)| block_of(self.graph, node));
        blocks.collect::<std::collections::BTreeSet<_>>().len().max(1) as u64
    }
}

/// The blocks in the order in which the forward pass meets them.
pub fn block_order<'a>(graph: &'a shardc_ir::Graph) -> BTreeMap<&'a str, u64> {
    let mut order: BTreeMap<&'a str, u64> = BTreeMap::new();
    for (_, node) in graph.nodes().filter(|(_, node)| node.role == Role::Forward && !node.operands.is_empty()) {
        if let Some(block) = crate::fold::block(&node.path) {
            let next = order.len() as u64;
            order.entry(block).or_insert(next);
        }
    }
    order
}

impl Liveness {
    /// Follows every value through the graph.
    pub fn new(prepared: &Prepared<'_>, placed: &Placed<'_>, conversions: &[Conversion]) -> Self {
        let graph = prepared.graph;
        let order = block_order(graph);
        let block = |id: NodeId| crate::fold::block(&graph.node(id).path).and_then(|block| order.get(block).copied());
        let sizes = local_sizes(prepared, placed, conversions);
        let mut lives: Vec<Life> = Vec::new();
        let mut life: BTreeMap<ValueId, usize> = BTreeMap::new();
        let mut backward = vec![usize::MAX; order.len()];
        let mut gradients = Vec::new();
        for (id, node) in graph.nodes() {
            let (class, position) = (prepared.folded.class[id], id.index());
            if let (Role::Backward(_), Some(block)) = (node.role, block(id)) {
                let start = &mut backward[block as usize];
                *start = (*start).min(position);
            }
            for value in &node.operands {
                let Some(index) = life.get(value).copied() else { continue };
                let life = &mut lives[index];
                life.last = position;
                if node.role == Role::Forward {
                    life.last_forward = position;
                    // What another block reads is kept.
                    if block(id) != life.block {
                        life.block = None;
                    }
                }
            }
            if prepared.in_loop(class) && prepared.is_gradient[class] && !is_view(&node.op) {
                gradients.push((position, sizes[class].iter().sum()));
            }
            if !prepared.in_loop(class) || prepared.is_gradient[class] || prepared.is_parameter[class] {
                continue;
            }
            if is_view(&node.op)
                && let Some(of) = node.operands.first()
            {
                if let Some(index) = life.get(of).copied() {
                    life.insert(node.results[0], index);
                }
                continue;
            }
            let block = if node.role == Role::Forward { block(id) } else { None };
            for (index, value) in node.results.iter().enumerate() {
                life.insert(*value, lives.len());
                let bytes = sizes[class][index];
                lives.push(Life { bytes, made: position, last: position, last_forward: position, block });
            }
        }
        Self { lives, gradients, backward, positions: graph.node_count() }
    }

    /// The most bytes of activations and of gradients at one time, if the first `recomputed` blocks
    /// are computed again. Of each gradient, `kept` stays from the moment it is made.
    pub fn peak(&self, recomputed: u64, kept: f64) -> (u64, u64) {
        // Per position, the change of activations and of gradients.
        let mut change = vec![(0i64, 0i64); self.positions + 2];
        let mut add = |bytes: u64, from: usize, to: usize| {
            change[from].0 += bytes as i64;
            change[to + 1].0 -= bytes as i64;
        };
        for life in &self.lives {
            let start = life.block.filter(|block| *block < recomputed).map(|block| self.backward[block as usize]);
            match start.filter(|start| *start <= life.last && *start > life.last_forward) {
                Some(start) => {
                    add(life.bytes, life.made, life.last_forward);
                    add(life.bytes, start, life.last);
                }
                None => add(life.bytes, life.made, life.last),
            }
        }
        for (made, bytes) in &self.gradients {
            change[*made].1 += (*bytes as f64 * kept) as i64;
        }
        let mut now = (0i64, 0i64);
        let mut most = (0i64, 0i64);
        for (activations, gradients) in change {
            now = (now.0 + activations, now.1 + gradients);
            if now.0 + now.1 > most.0 + most.1 {
                most = now;
            }
        }
        (most.0.max(0) as u64, most.1.max(0) as u64)
    }

    /// The bytes of the largest gradient.
    pub fn largest_gradient(&self) -> u64 {
        self.gradients.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0)
    }
}

/// Bytes of each result of each class on one rank; of a copy that all its readers share, where there is one.
fn local_sizes(prepared: &Prepared<'_>, placed: &Placed<'_>, conversions: &[Conversion]) -> Vec<Vec<u64>> {
    let mut sizes: Vec<Vec<u64>> = (0..prepared.rules.len())
        .map(|class| {
            let (_, results) = prepared.local_types(class, &placed.strategies[class], placed.mesh);
            results.iter().map(|ty| ty.bytes().0).collect()
        })
        .collect();
    for conversion in conversions.iter().filter(|conversion| conversion.is_shared) {
        let size = &mut sizes[conversion.maker][conversion.result];
        *size = (*size).max(conversion.bytes as u64);
    }
    sizes
}
