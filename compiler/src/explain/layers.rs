//! Layouts by module, with equal blocks folded.

use super::names::{folded_path, layout, local, name_of, role};
use serde::Serialize;
use shardc_ir::plan::Space;
use shardc_ir::{Bytes, Op, OpDef, Plan, Role, ValueId};
use shardc_passes::cost::is_view;
use shardc_passes::fold::{block_of, fold};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

/// One kind of value of a plan: the same in all equal blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Row {
    /// The blocks it is of (`blocks.*`), empty outside of them.
    pub block: String,
    /// The module path, or the leaf's name.
    pub name: String,
    /// The operation.
    pub op: String,
    /// `forward`, `backward`, `recomputed`, `optimizer`.
    pub role: &'static str,
    /// The first value of them.
    pub value: String,
    /// Its layout: `bf16[8@dp,4096@tp]`.
    pub layout: String,
    /// What its node does with each axis: `m=dp n=tp`.
    pub strategy: String,
    /// Where it lies while nothing reads it.
    pub space: Space,
    /// Whether copies in another layout are made at each use and dropped after it.
    pub transient: bool,
    /// What one rank holds of it.
    pub bytes: Bytes,
    /// How many there are.
    pub count: usize,
}

/// Rows that say the same: those of equal blocks, and of chunks of the head or of a microbatch.
#[derive(Clone, Debug)]
pub struct Alike {
    /// The first of them, with the count of all; where there are several of some blocks, its name is that of all.
    pub row: Row,
    /// The family of its block (`blocks.*`) and how many blocks there are, if there are several.
    pub family: Option<(String, usize)>,
}

/// The rows of a plan, each that says the same as others once, those of a family of blocks together.
pub fn alike(plan: &Plan) -> Vec<Alike> {
    let blocks: BTreeSet<&str> = plan.graph.nodes().filter_map(|(_, node)| block_of(&plan.graph, node)).collect();
    let mut families: BTreeMap<String, usize> = BTreeMap::new();
    blocks.into_iter().for_each(|block| *families.entry(folded_path(block)).or_default() += 1);
    let family = |row: &Row| {
        let folded = folded_path(&row.name);
        let end = folded.find('*').map(|at| at + 1)?;
        let blocks = families.get(&folded[..end]).copied().filter(|blocks| *blocks > 1)?;
        Some((folded[..end].to_string(), blocks))
    };
    let (mut known, mut all): (BTreeMap<_, usize>, Vec<Alike>) = Default::default();
    for row in rows(plan) {
        let (family, folded) = (family(&row), folded_path(&row.name));
        let said = (row.op.clone(), row.role, row.layout.clone(), row.strategy.clone());
        let place = (row.space, row.transient);
        match known.entry((if family.is_some() { folded.clone() } else { row.name.clone() }, said, place)) {
            Entry::Occupied(at) => {
                let before = &mut all[*at.get()].row;
                before.count += row.count;
                before.name = if family.is_some() { folded } else { row.name };
            }
            Entry::Vacant(free) => {
                free.insert(all.len());
                all.push(Alike { family, row });
            }
        }
    }
    together(all, |of| of.family.as_ref())
}

/// In the same order, but those of one group together, where its first one stands.
fn together<T, G: PartialEq>(all: Vec<T>, group: impl for<'a> Fn(&'a T) -> Option<&'a G>) -> Vec<T> {
    let first = |of: &T| all.iter().position(|other| group(of).is_some() && group(other) == group(of));
    let places: Vec<usize> = all.iter().enumerate().map(|(at, of)| first(of).unwrap_or(at)).collect();
    let mut placed: Vec<(usize, T)> = places.into_iter().zip(all).collect();
    placed.sort_by_key(|(place, _)| *place);
    placed.into_iter().map(|(_, of)| of).collect()
}

/// Every kind of value of the forward pass, and every stored one, in the order of the graph. What moves
/// no byte (views, constants) is left out.
pub fn rows(plan: &Plan) -> Vec<Row> {
    let graph = &plan.graph;
    let folded = fold(graph).split(|id| {
        let lies = |value: &ValueId| (plan.spaces[*value], plan.transient[*value]);
        let node = graph.node(id);
        (plan.strategies[id].clone(), role(node.role), node.results.iter().map(lies).collect::<Vec<_>>())
    });
    let mut rows = Vec::new();
    for class in &folded.classes {
        let node = graph.node(class.node);
        if node.role != Role::Forward || (is_view(&node.op) && !node.op.is_leaf()) {
            continue;
        }
        let is_stored = matches!(node.op, Op::Parameter(_) | Op::State(_));
        let block = block_of(graph, node).map(folded_path).unwrap_or_default();
        for value in &node.results {
            rows.push(Row {
                block: if class.members.len() > 1 { block.clone() } else { String::new() },
                name: if class.members.len() > 1 { folded_path(name_of(node)) } else { name_of(node).to_string() },
                op: node.op.name().to_string(),
                role: if is_stored { "stored" } else { role(node.role) },
                value: value.to_string(),
                layout: layout(plan, *value),
                strategy: plan.rule(class.node).strategy_text(&plan.strategies[class.node], &plan.mesh),
                space: plan.spaces[*value],
                transient: plan.transient[*value],
                bytes: local(plan, *value).bytes(),
                count: class.members.len(),
            });
        }
    }
    together(rows, |row| Some(&row.block).filter(|block| !block.is_empty()))
}
