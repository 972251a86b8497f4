//! Sums of the backward pass that others tell.
//!
//! What is summed is taken apart: a sum of terms, each with factors that are the same for all of its elements. The sum
//! of a term is known where another node makes it; that of differences from their own mean is zero. So the derivative
//! of a mean, the sum of all that reaches the differences, is told by the gradient of the bias, which is made anyway and
//! earlier; what waited for it no longer does.

use super::{before_casts, copied, copies, is_mean};
use shardc_ir::ops::{Affine, Binary, BinaryKind, Cast, Constant, Op, OpError, Reduce, ReduceOp};
use shardc_ir::{DType, Graph, NodeId, Role, TensorType, ValueId};
use std::collections::{BTreeSet, HashMap};

/// How far a sum is taken apart.
const DEPTH: usize = 8;

/// The sums that are there, by what they are the sums of.
type Known = HashMap<(ValueId, Vec<usize>), ValueId>;

/// The graph without sums that others tell.
pub(super) fn told(graph: &Graph) -> Result<Graph, OpError> {
    let (mut known, shared) = (Known::new(), shared(graph));
    let rebuilt = graph.rebuild(|new, id, map| {
        let node = graph.node(id);
        let Op::Reduce(Reduce { kind: ReduceOp::Sum, dims }) = &node.op else { return Ok(false) };
        let (operand, result) = (node.operands[0], node.results[0]);
        let key = (operand, dims.clone());
        let taken = Taken { graph, dims, known: &known, shared: &shared };
        if let (Role::Backward(_), Some(terms)) = (node.role, taken.simpler(operand)) {
            let mut site = Site { from: graph, to: new, id, map, known: &mut known };
            let sum = site.sum(&terms, dims)?;
            map.insert(result, sum);
        } else {
            let declared = graph.result_types(id);
            let copy = new.add_as(node.op.clone(), &[map[&operand]], &declared, node.path.clone(), node.role)?;
            map.insert(result, new.result(copy));
        }
        known.entry(key).or_insert(map[&result]);
        Ok(true)
    })?;
    // What only those sums read is dropped.
    rebuilt.rebuild(|_, _, _| Ok(false))
}

/// Parameters that several operations of the forward pass read, perhaps in several stages of a pipeline, and what is made of
/// one alone.
fn shared(graph: &Graph) -> BTreeSet<ValueId> {
    let (users, mut shared) = (graph.users(), BTreeSet::new());
    let is_forward = |(id, _): &&(NodeId, usize)| graph.node(*id).role == Role::Forward;
    let readers = |value: &ValueId| users.get(value).map_or(0, |users| users.iter().filter(is_forward).count());
    let mut own = BTreeSet::new();
    for (_, node) in graph.nodes().filter(|(_, node)| node.role == Role::Forward) {
        let is_own = matches!(node.op, Op::Parameter(_))
            || !node.operands.is_empty() && node.operands.iter().all(|operand| own.contains(operand));
        for result in node.results.iter().filter(|_| is_own) {
            own.insert(*result);
            if readers(result) > 1 || node.operands.iter().any(|operand| shared.contains(operand)) {
                shared.insert(*result);
            }
        }
    }
    shared
}

/// A term of a sum: a number and factors of the sum's shape, times what is summed.
#[derive(Clone, Debug)]
struct Term {
    scale: f64,
    factors: Vec<ValueId>,
    of: Summed,
}

#[derive(Clone, Copy, Debug)]
enum Summed {
    /// The elements of a value.
    Elements(ValueId),
    /// So many copies of a value.
    Copies(ValueId, f64),
}

/// A sum over some dimensions, taken apart.
struct Taken<'a> {
    graph: &'a Graph,
    dims: &'a [usize],
    known: &'a Known,
    shared: &'a BTreeSet<ValueId>,
}

impl Taken<'_> {
    /// The terms of the sum of a value's elements, if it is simpler to add them up: where each is known, or what is
    /// summed has factors that need not be multiplied element by element.
    fn simpler(&self, value: ValueId) -> Option<Vec<Term>> {
        if self.is_known(value) {
            return None;
        }
        let terms = self.terms(value, DEPTH);
        let has_factors = matches!(&terms[..], [Term { factors, .. }] if !factors.is_empty());
        (terms.iter().all(|term| self.is_told(term)) || has_factors).then_some(terms)
    }

    /// Whether nothing has to be added up for a term.
    fn is_told(&self, term: &Term) -> bool {
        !matches!(term.of, Summed::Elements(value) if !self.is_known(value))
    }

    fn is_known(&self, value: ValueId) -> bool {
        self.known.contains_key(&(value, self.dims.to_vec()))
    }

    fn terms(&self, value: ValueId, depth: usize) -> Vec<Term> {
        let whole = || vec![Term { scale: 1.0, factors: Vec::new(), of: Summed::Elements(value) }];
        if depth == 0 || self.is_known(value) {
            return whole();
        }
        if let Some(source) = copied(self.graph, value, self.dims) {
            let of = Summed::Copies(source, copies(self.graph.ty(value), self.dims));
            return vec![Term { scale: 1.0, factors: Vec::new(), of }];
        }
        let scaled = |mut terms: Vec<Term>, by: f64| {
            terms.iter_mut().for_each(|term| term.scale *= by);
            terms
        };
        let node = self.graph.def(value);
        match (&node.op, &node.operands[..]) {
            (Op::Affine(Affine { scale, offset: 0.0 }), [a]) => scaled(self.terms(*a, depth - 1), *scale),
            // What is cast is not read instead: that would have to be kept.
            (Op::Cast(_), _) if before_casts(self.graph, value) != value => {
                let terms = self.terms(before_casts(self.graph, value), depth - 1);
                if terms.iter().all(|term| self.is_told(term)) { terms } else { whole() }
            }
            (Op::Binary(op), [a, b]) if self.graph.ty(*a) == self.graph.ty(*b) => match op.kind {
                BinaryKind::Sub if self.is_centred(*a, *b) => Vec::new(),
                BinaryKind::Add | BinaryKind::Sub => {
                    let sign = if op.kind == BinaryKind::Sub { -1.0 } else { 1.0 };
                    let mut terms = self.terms(*a, depth - 1);
                    terms.extend(scaled(self.terms(*b, depth - 1), sign));
                    terms
                }
                BinaryKind::Mul => {
                    // The stage of a pipeline that adds up what is summed may have no such parameter behind its loop.
                    let factor = |of: ValueId| copied(self.graph, of, self.dims).filter(|of| !self.shared.contains(of));
                    let (factor, other) = match (factor(*a), factor(*b)) {
                        (_, Some(factor)) => (factor, *a),
                        (Some(factor), None) => (factor, *b),
                        (None, None) => return whole(),
                    };
                    let mut terms = self.terms(other, depth - 1);
                    terms.iter_mut().for_each(|term| term.factors.push(factor));
                    terms
                }
                _ => whole(),
            },
            _ => whole(),
        }
    }

    /// Whether `b` is copies of the mean of `a`: then nothing is left of the sum of their differences.
    fn is_centred(&self, a: ValueId, b: ValueId) -> bool {
        copied(self.graph, b, self.dims).is_some_and(|mean| is_mean(self.graph, mean, a, self.dims))
    }
}

/// Where a sum of terms is built.
struct Site<'a> {
    from: &'a Graph,
    to: &'a mut Graph,
    id: NodeId,
    map: &'a HashMap<ValueId, ValueId>,
    known: &'a mut Known,
}

impl Site<'_> {
    fn add(&mut self, op: impl Into<Op>, operands: &[ValueId], declared: &[TensorType]) -> Result<ValueId, OpError> {
        let node = self.from.node(self.id);
        let added = self.to.add_as(op.into(), operands, declared, node.path.clone(), node.role)?;
        Ok(self.to.result(added))
    }

    /// A value of the new graph in another element type.
    fn cast(&mut self, value: ValueId, dtype: DType) -> Result<ValueId, OpError> {
        let ty = self.to.ty(value).with_dtype(dtype);
        if *self.to.ty(value) == ty { Ok(value) } else { self.add(Cast {}, &[value], &[ty]) }
    }

    /// A value of the graph in f32, before it was rounded if it was.
    fn wide(&mut self, value: ValueId) -> Result<ValueId, OpError> {
        let whole = before_casts(self.from, value);
        let is_wide = self.from.ty(whole).dtype == DType::F32;
        self.cast(self.map[if is_wide { &whole } else { &value }], DType::F32)
    }

    fn binary(&mut self, kind: BinaryKind, a: ValueId, b: ValueId) -> Result<ValueId, OpError> {
        self.add(Binary { kind }, &[a, b], &[])
    }

    /// The sum of terms, added up in f32, in the type of the node's result.
    fn sum(&mut self, terms: &[Term], dims: &[usize]) -> Result<ValueId, OpError> {
        let ty = self.from.ty(self.from.result(self.id)).clone();
        let mut sum = None;
        for term in terms {
            let (of, count) = match term.of {
                Summed::Copies(source, count) => (self.wide(source)?, count),
                Summed::Elements(value) => (self.elements(value, dims, &ty)?, 1.0),
            };
            let mut made = of;
            for factor in &term.factors {
                let factor = self.wide(*factor)?;
                made = self.binary(BinaryKind::Mul, made, factor)?;
            }
            let scale = term.scale * count;
            if scale != 1.0 {
                made = self.add(Affine { scale, offset: 0.0 }, &[made], &[])?;
            }
            sum = Some(match sum {
                Some(before) => self.binary(BinaryKind::Add, before, made)?,
                None => made,
            });
        }
        match sum {
            Some(sum) => self.cast(sum, ty.dtype),
            None => self.add(Constant { value: 0.0 }, &[], &[ty]),
        }
    }

    /// The sum of a value's elements: the one that is there, or a new one.
    fn elements(&mut self, value: ValueId, dims: &[usize], like: &TensorType) -> Result<ValueId, OpError> {
        let key = (value, dims.to_vec());
        let sum = match self.known.get(&key) {
            Some(known) => *known,
            None => {
                let op = Reduce { kind: ReduceOp::Sum, dims: dims.to_vec() };
                self.add(op, &[self.map[&value]], &[like.with_dtype(DType::F32)])?
            }
        };
        self.known.insert(key, sum);
        self.cast(sum, DType::F32)
    }
}
