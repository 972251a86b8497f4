//! Recovers composite operations from what a trace decomposed, and simplifies.
//!
//! Four steps, each with few and named rules, none of which makes a graph worse: a rule either
//! replaces several nodes by one with a kernel of its own, or removes nodes.
//!
//! 1. [`structure`]: rotary embedding and attention (with what is added to its scores or hides some of them), found
//!    by their shape from slices, masks and contractions. Their parts differ in layout, not in algebra, so a matcher that follows layouts
//!    is shorter than the rewrites that would normalize them.
//! 2. [`algebra`]: normalizations and gated activations, found by equality saturation (egg): the
//!    same formula is written in many ways (`x / sqrt(v)`, `x * rsqrt(v)`, factors in any order).
//!    One small e-graph per candidate holds only the dozen nodes around it, not the whole graph:
//!    commuting and associating thousands of nodes at once would not end, and nothing far away
//!    matters. The report carries egg's explanation of each.
//! 3. [`layout`]: transposes past what can be done in any order of dimensions, if fewer elements are moved then.
//! 4. [`simplify`]: transposes into the contractions that read or make them (with or without a bias), pairs of transposes
//!    and of reshapes, affine functions of affine functions, products with one.
//!
//! Composite operations compute the same function; rounding may differ in the last digits.

pub mod algebra;
pub mod layout;
pub mod simplify;
pub mod structure;
pub(crate) use structure::LEAST;
#[cfg(test)]
mod tests;

use crate::error::PassError;
use serde::{Deserialize, Serialize};
use shardc_ir::ops::{
    Affine, Attention, Binary, BinaryKind, Broadcast, Constant, LayerNorm, OpError, Reshape, RmsNorm, Rotary, Select,
    Slice, Swiglu, Transpose,
};
use shardc_ir::{DType, Graph, NodeId, Op, TensorType, ValueId};
use std::collections::{BTreeMap, HashMap};

/// Which rules fired where.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// In the order of the graph.
    pub fired: Vec<Fired>,
}

/// A rule that fired.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fired {
    /// The rule's name.
    pub rule: String,
    /// The module path of the node it replaced.
    pub path: String,
    /// The steps of the proof, where the rule was found by equality saturation.
    pub explanation: Vec<String>,
}

impl Report {
    /// How often each rule fired.
    pub fn counts(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for fired in &self.fired {
            *counts.entry(fired.rule.clone()).or_default() += 1;
        }
        counts
    }
}

/// Raises a graph; see the [module](self).
pub fn raise(graph: &Graph) -> Result<(Graph, Report), PassError> {
    let bug = PassError::ill_formed("raise");
    let mut report = Report::default();
    let found = structure::find(graph);
    let graph = replace(graph, &found, &mut report).map_err(&bug)?;
    let found = algebra::find(&graph);
    let graph = replace(&graph, &found, &mut report).map_err(&bug)?;
    let mut with_moved = report.clone();
    let simple = simplify::simplify(&graph, &mut report).map_err(&bug)?;
    // Moving transposes pays where they meet; elsewhere they stay.
    let moved = layout::moved(&simple);
    if moved > 0 {
        let settled = layout::settle(&graph).map_err(&bug)?;
        let settled = simplify::simplify(&settled, &mut with_moved).map_err(&bug)?;
        if layout::moved(&settled) < moved {
            return Ok((settled, with_moved));
        }
    }
    Ok((simple, report))
}

/// A composite operation found, and the values it reads.
#[derive(Clone, Debug, PartialEq)]
pub enum Composite {
    /// Root-mean-square normalization over the last dimension.
    RmsNorm {
        /// The operand.
        x: ValueId,
        /// The weight, of the size of the last dimension.
        gamma: ValueId,
        /// The number added to the mean square.
        eps: f64,
    },
    /// Layer normalization over the last dimension.
    LayerNorm {
        /// The operand.
        x: ValueId,
        /// The weight.
        gamma: ValueId,
        /// The bias.
        beta: ValueId,
        /// The number added to the variance.
        eps: f64,
    },
    /// `silu(gate) * up`
    Swiglu {
        /// The operand of silu.
        gate: ValueId,
        /// The other factor.
        up: ValueId,
    },
    /// Rotary position embedding.
    Rotary {
        /// The operand, `[b, s, h, d]` or `[b, h, s, d]`.
        x: ValueId,
        /// Cosines: the first `d / 2` columns are the table.
        cos: ValueId,
        /// Sines: the first `d / 2` columns are the table.
        sin: ValueId,
        /// Whether the operand is `[b, h, s, d]`.
        heads_first: bool,
    },
    /// Scaled dot-product attention.
    Attention {
        /// Queries, keys and values, with the permutation to `[b, s, h, d]` of each; they may be taken in another shape
        /// first, where batch and heads are one dimension, or each head of keys and values was repeated for its group.
        read: Box<[Heads; 3]>,
        /// The permutation of the result from `[b, s, h, e]`, before batch and heads are joined.
        made: Vec<usize>,
        /// Whether a query sees no later keys.
        causal: bool,
        /// The factor of the scores.
        scale: f64,
        /// What is added to the scaled scores.
        bias: Vec<Bias>,
    },
}

impl Composite {
    /// The same of other values, of which `moved` says which takes whose place.
    fn moved(self, moved: impl Fn(ValueId) -> ValueId) -> Self {
        match self {
            Self::RmsNorm { x, gamma, eps } => Self::RmsNorm { x: moved(x), gamma: moved(gamma), eps },
            Self::LayerNorm { x, gamma, beta, eps } => {
                Self::LayerNorm { x: moved(x), gamma: moved(gamma), beta: moved(beta), eps }
            }
            Self::Swiglu { gate, up } => Self::Swiglu { gate: moved(gate), up: moved(up) },
            Self::Rotary { x, cos, sin, heads_first } => {
                Self::Rotary { x: moved(x), cos: moved(cos), sin: moved(sin), heads_first }
            }
            Self::Attention { read, made, causal, scale, bias } => {
                let read = Box::new(read.map(|heads| Heads { value: moved(heads.value), ..heads }));
                let bias = bias.into_iter().map(|term| Bias { value: moved(term.value), ..term }).collect();
                Self::Attention { read, made, causal, scale, bias }
            }
        }
    }
}

/// A tensor of heads.
#[derive(Clone, Debug, PartialEq)]
pub struct Heads {
    /// The value.
    pub value: ValueId,
    /// The shape to take it in.
    pub shape: Vec<u64>,
    /// The permutation of that shape to `[b, s, h, d]`.
    pub permutation: Vec<usize>,
}

/// What is added to scaled scores `[b, h, s, t]`, or hides some of them.
#[derive(Clone, Debug, PartialEq)]
pub struct Bias {
    /// The value, before it is copied to all scores.
    pub value: ValueId,
    /// The shape to take it in: as the scores, with 1 where it is copied.
    pub shape: [u64; 4],
    /// What it does to them.
    pub effect: Effect,
}

/// What a value does to scaled scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Effect {
    /// It is added, times this.
    Times(f64),
    /// A mask hides what it is `when` of, by adding a number.
    Hides {
        /// Its value where it hides.
        when: bool,
        /// The number.
        by: f64,
    },
}

/// A composite operation, the name of the rule that found it, and the proof.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// The rule.
    pub rule: &'static str,
    /// What takes the node's place.
    pub composite: Composite,
    /// The steps of the proof.
    pub explanation: Vec<String>,
}

/// The graph with composites in the place of nodes; what they made useless is dropped.
fn replace(graph: &Graph, found: &BTreeMap<NodeId, Found>, report: &mut Report) -> Result<Graph, OpError> {
    for (id, found) in found {
        report.fired.push(Fired {
            rule: found.rule.to_string(),
            path: graph.node(*id).path.clone(),
            explanation: found.explanation.clone(),
        });
    }
    let mut biases = Vec::new();
    let replaced = graph.rebuild(|to, id, map| {
        let Some(found) = found.get(&id) else { return Ok(false) };
        let mut site = Site { to, from: graph, id, map, biases: &mut biases };
        let value = site.build(&found.composite)?;
        map.insert(graph.result(id), value);
        Ok(true)
    })?;
    replaced.rebuild(|_, _, _| Ok(false))
}

/// Where a composite is built.
struct Site<'a> {
    to: &'a mut Graph,
    from: &'a Graph,
    id: NodeId,
    map: &'a HashMap<ValueId, ValueId>,
    /// The terms of biases that are there.
    biases: &'a mut Vec<(Bias, ValueId)>,
}

impl Site<'_> {
    fn add(&mut self, op: impl Into<Op>, operands: &[ValueId], shape: Option<&[u64]>) -> Result<ValueId, OpError> {
        let node = self.from.node(self.id);
        let declared: Vec<_> = shape.iter().map(|shape| self.to.ty(operands[0]).with_shape(*shape)).collect();
        let added = self.to.add_as(op.into(), operands, &declared, node.path.clone(), node.role)?;
        Ok(self.to.result(added))
    }

    fn transpose(&mut self, x: ValueId, permutation: &[usize]) -> Result<ValueId, OpError> {
        self.add(Transpose { permutation: permutation.to_vec() }, &[x], None)
    }

    /// `[s, d / 2]` of a table of any shape whose last two proper dimensions are `s` and at least
    /// `d / 2`.
    fn table(&mut self, x: ValueId, rows: u64, half: u64) -> Result<ValueId, OpError> {
        let width = self.to.ty(x).elements() / rows;
        let table = self.add(Reshape {}, &[x], Some(&[rows, width]))?;
        if width == half {
            Ok(table)
        } else {
            self.add(Slice { start: vec![0, 0], limit: vec![rows, half] }, &[table], None)
        }
    }

    /// The sum of what is added to scores, in the least shape that holds it; each term is made once in a graph.
    fn bias(&mut self, terms: &[Bias]) -> Result<Option<ValueId>, OpError> {
        let mut sum: Option<ValueId> = None;
        for term in terms {
            let term = self.bias_term(term)?;
            sum = Some(match sum {
                None => term,
                Some(other) => {
                    let shapes = [other, term].map(|value| self.to.ty(value).shape.clone());
                    let shape: Vec<u64> = shapes[0].iter().zip(&shapes[1]).map(|(a, b)| *a.max(b)).collect();
                    let mut copied = Vec::new();
                    for (value, from) in [other, term].into_iter().zip(shapes) {
                        let copy = Broadcast { dims: vec![0, 1, 2, 3] };
                        copied.push(if from == shape { value } else { self.add(copy, &[value], Some(&shape))? });
                    }
                    self.add(Binary { kind: BinaryKind::Add }, &copied, None)?
                }
            });
        }
        Ok(sum)
    }

    /// One term, where its value is made, so that all blocks that read it are alike.
    fn bias_term(&mut self, term: &Bias) -> Result<ValueId, OpError> {
        if let Some((_, made)) = self.biases.iter().find(|(known, _)| known == term) {
            return Ok(*made);
        }
        let (value, path) = (self.map[&term.value], self.from.def(term.value).path.clone());
        let role = self.from.node(self.id).role;
        let mut add = |op: Op, operands: &[ValueId], ty: TensorType| -> Result<ValueId, OpError> {
            let added = self.to.add_as(op, operands, &[ty], path.clone(), role)?;
            Ok(self.to.result(added))
        };
        let ty = self.from.ty(term.value).with_shape(term.shape);
        let shaped = add(Reshape {}.into(), &[value], ty.clone())?;
        let made = match term.effect {
            Effect::Times(1.0) => shaped,
            Effect::Times(scale) => add(Affine { scale, offset: 0.0 }.into(), &[shaped], ty)?,
            Effect::Hides { when, by } => {
                let ty = ty.with_dtype(DType::F32);
                let hidden = add(Constant { value: by }.into(), &[], ty.clone())?;
                let seen = add(Constant { value: 0.0 }.into(), &[], ty.clone())?;
                let (a, b) = if when { (hidden, seen) } else { (seen, hidden) };
                add(Select {}.into(), &[shaped, a, b], ty)?
            }
        };
        self.biases.push((term.clone(), made));
        Ok(made)
    }

    fn build(&mut self, composite: &Composite) -> Result<ValueId, OpError> {
        let map = self.map;
        match composite {
            Composite::RmsNorm { x, gamma, eps } => self.add(RmsNorm { eps: *eps }, &[map[x], map[gamma]], None),
            Composite::LayerNorm { x, gamma, beta, eps } => {
                self.add(LayerNorm { eps: *eps }, &[map[x], map[gamma], map[beta]], None)
            }
            Composite::Swiglu { gate, up } => self.add(Swiglu {}, &[map[gate], map[up]], None),
            Composite::Rotary { x, cos, sin, heads_first } => {
                let swap = [0, 2, 1, 3];
                let x = if *heads_first { self.transpose(map[x], &swap)? } else { map[x] };
                let (rows, half) = (self.to.ty(x).shape[1], self.to.ty(x).shape[3] / 2);
                let (cos, sin) = (self.table(map[cos], rows, half)?, self.table(map[sin], rows, half)?);
                let y = self.add(Rotary { inverse: false }, &[x, cos, sin], None)?;
                if *heads_first { self.transpose(y, &swap) } else { Ok(y) }
            }
            Composite::Attention { read, made, causal, scale, bias } => {
                let mut operands = Vec::new();
                for heads in read.iter() {
                    let shaped = self.add(Reshape {}, &[map[&heads.value]], Some(&heads.shape))?;
                    operands.push(self.transpose(shaped, &heads.permutation)?);
                }
                operands.extend(self.bias(bias)?);
                let o = self.add(
                    Attention { causal: *causal, scale: *scale, lead: None, reversed: None },
                    &operands,
                    None,
                )?;
                let o = self.transpose(o, made)?;
                let shape = self.from.ty(self.from.result(self.id)).shape.clone();
                if self.to.ty(o).shape == shape { Ok(o) } else { self.add(Reshape {}, &[o], Some(&shape)) }
            }
        }
    }
}
