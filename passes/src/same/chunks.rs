//! Whether a graph in chunks that overlap ([`split_batch`](crate::split_batch)) computes the values of a whole one.
//!
//! Of a value of the graph in chunks is known what it is of one of the whole graph: that value, some of its elements along
//! one dimension, or what some of the elements of a factor add to it. It follows from the factor rules: what a node makes
//! of elements of a parallel factor is those elements of what it makes of all, or the terms that they add to a sum over it.
//! Slices, joins and reshapes of a dimension keep count of which elements they are.

use super::{Difference, Number, Numbers, given, given_as};
use crate::part::part_of;
use shardc_ir::ops::{Attention, AttentionGrad, BinaryKind, OpDef};
use shardc_ir::{FactorKind, Graph, Node, NodeId, Op, ReduceKind, TensorType, ValueId};
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

/// Indices along a dimension or a factor in order: runs of so many from one on. Neighbours are one run.
type Runs = Rc<[(u64, u64)]>;

/// What a value is of the whole graph's.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Is {
    /// One of them.
    Whole(Number),
    /// Some elements of one along a dimension, in whose place it has some dimensions; any if they are all alike.
    Elements { of: Number, dim: usize, dims: Vec<u64>, runs: Option<Runs> },
    /// What some elements of a factor, which has so many, add to one.
    Terms { of: Number, factor: (usize, u64), runs: Runs },
}

/// The first of what a graph in chunks computes or gives that the whole one does not; else of what it does not give.
pub fn difference(graph: &Graph, whole: &Graph) -> Option<Difference> {
    let known = Known::of(whole);
    let all = match known.all(graph) {
        Ok(all) => all,
        Err(value) => return Some(Difference::Value(value)),
    };
    let others = given(whole, &known.values);
    let mut own = HashSet::new();
    for output in &graph.outputs {
        let key = given_as(graph, output);
        if !others.get(&key).is_some_and(|number| all[&output.value].contains(&Is::Whole(*number))) {
            return Some(Difference::Output(output.name.clone()));
        }
        own.insert(key);
    }
    let missing = others.keys().find(|key| !own.contains(*key))?;
    Some(Difference::Missing(missing.0.to_string()))
}

/// Whether two values of a graph in chunks are known to be the same.
#[cfg(test)]
pub(super) fn are_same(graph: &Graph, whole: &Graph, [value, other]: [ValueId; 2]) -> bool {
    let all = Known::of(whole).all(graph);
    all.is_ok_and(|all| all[&value].iter().any(|is| all[&other].contains(is)))
}

/// The values of a whole graph.
struct Known<'a> {
    graph: &'a Graph,
    numbers: Numbers,
    values: HashMap<ValueId, Number>,
    /// The nodes that read some values, one of each number.
    readers: HashMap<Vec<Number>, Vec<NodeId>>,
    /// The types of numbers.
    types: HashMap<Number, &'a TensorType>,
}

impl<'a> Known<'a> {
    fn of(graph: &'a Graph) -> Self {
        let mut numbers = Numbers::default();
        let values = numbers.of(graph);
        let mut readers: HashMap<Vec<Number>, Vec<NodeId>> = HashMap::new();
        let mut types = HashMap::new();
        for (id, node) in graph.nodes() {
            let is_known = node.results.first().is_none_or(|result| types.contains_key(&values[result]));
            types.extend(node.results.iter().map(|value| (values[value], graph.ty(*value))));
            if !is_known {
                readers.entry(node.operands.iter().map(|value| values[value]).collect()).or_default().push(id);
            }
        }
        Self { graph, numbers, values, readers, types }
    }

    /// All that each value of a graph is known to be; the first of which nothing is.
    fn all(&self, graph: &Graph) -> Result<HashMap<ValueId, Vec<Is>>, ValueId> {
        let mut all: HashMap<ValueId, Vec<Is>> = HashMap::new();
        for (id, node) in graph.nodes() {
            for (value, is) in node.results.iter().zip(self.results(graph, id, &all)) {
                if is.is_empty() {
                    return Err(*value);
                }
                all.insert(*value, is);
            }
        }
        Ok(all)
    }

    /// All that each result of a node is known to be.
    fn results(&self, graph: &Graph, id: NodeId, all: &HashMap<ValueId, Vec<Is>>) -> Vec<Vec<Is>> {
        let node = graph.node(id);
        let operands: Vec<&[Is]> = node.operands.iter().map(|value| &all[value][..]).collect();
        let types = graph.result_types(id);
        let mut results = vec![Vec::new(); node.results.len()];
        for chosen in choices(&operands) {
            let whole: Option<Vec<Number>> = chosen.iter().map(|is| is.whole()).collect();
            let number = whole.and_then(|whole| self.numbers.known(&node.op, whole, &types));
            let found = match number {
                Some(number) => Some((0..types.len()).map(|index| Is::Whole((number, index))).collect()),
                None => self.sum(node, &chosen, &types).or_else(|| self.cut(node, &chosen, &types)),
            };
            for (result, is) in results.iter_mut().zip(found.into_iter().flatten()) {
                add(result, is);
            }
        }
        if let [result] = &mut results[..] {
            self.seen(node, &operands, &types[0]).into_iter().for_each(|is| add(result, self.settled(is)));
        }
        results
    }

    /// What a node makes of some elements of a factor: those of what one of the whole graph makes of all.
    fn cut(&self, node: &Node, operands: &[&Is], types: &[TensorType]) -> Option<Vec<Is>> {
        let of = |is: &&Is| match is {
            Is::Whole(of) | Is::Elements { of, .. } => Some(*of),
            Is::Terms { .. } => None,
        };
        let numbers: Vec<Number> = operands.iter().map(of).collect::<Option<_>>()?;
        let readers = self.readers.get(&numbers)?;
        readers.iter().find_map(|whole| self.cut_of(*whole, node, operands, types))
    }

    fn cut_of(&self, whole: NodeId, node: &Node, operands: &[&Is], types: &[TensorType]) -> Option<Vec<Is>> {
        let (graph, rule) = (self.graph, self.graph.rule(whole));
        if graph.node(whole).op.name() != node.op.name() || graph.node(whole).results.len() != types.len() {
            return None;
        }
        let (takes, makes) = (graph.operand_types(whole), graph.result_types(whole));
        let (factor, runs, count) = self.factor(whole, operands, types)?;
        let declared = &rule.factors[factor];
        let inner = |ty: &TensorType, dim: usize| ty.shape[dim] / declared.size;
        let is_alike = |((is, ty), held): ((&&Is, &TensorType), &Vec<Vec<usize>>)| match is {
            Is::Elements { dim, dims, runs: own, .. } => {
                let inner = inner(ty, *dim);
                let is_same = |own: &Runs| runs.is_some() && runs == divided(own, inner);
                held[*dim].first() == Some(&factor)
                    && once(held, factor)
                    && dims[..] == [count * inner]
                    && own.as_ref().is_none_or(is_same)
            }
            _ => !held.iter().flatten().any(|other| *other == factor),
        };
        if declared.kind != FactorKind::Parallel || !operands.iter().zip(&takes).zip(&rule.operands).all(is_alike) {
            return None;
        }
        let mut made = Vec::with_capacity(makes.len());
        for (index, (ty, held)) in makes.iter().zip(&rule.results).enumerate() {
            let of = self.values[&graph.node(whole).results[index]];
            let dim = held.iter().position(|factors| factors.first() == Some(&factor));
            let is_sum = declared.reduce.contains(&(index, ReduceKind::Sum));
            made.push(match (dim, &runs) {
                (Some(dim), _) if once(held, factor) => {
                    let inner = inner(ty, dim);
                    let runs = runs.as_ref().map(|runs| multiplied(runs, inner));
                    Is::Elements { of, dim, dims: vec![count * inner], runs }
                }
                (None, Some(runs)) if is_sum && once(held, factor) => {
                    Is::Terms { of, factor: (factor, declared.size), runs: runs.clone() }
                }
                _ => return None,
            });
        }
        let is_type = |(is, own): (&Is, &TensorType)| self.ty(is) == *own;
        let is_same = made.iter().zip(types).all(is_type) && self.is_part(whole, node, factor, (&runs, count));
        is_same.then(|| made.into_iter().map(|is| self.settled(is)).collect())
    }

    /// Of which factor of a node of the whole graph a node has some elements, which, and how many.
    fn factor(&self, whole: NodeId, operands: &[&Is], types: &[TensorType]) -> Option<(usize, Option<Runs>, u64)> {
        let (graph, rule) = (self.graph, self.graph.rule(whole));
        let of = |ty: &TensorType, held: &[Vec<usize>], dim: usize, length: u64| {
            let factor = *held.get(dim)?.first()?;
            let inner = ty.shape[dim].checked_div(rule.factors[factor].size)?;
            let count = length.checked_div(inner)?;
            (length == count * inner && count <= rule.factors[factor].size).then_some((factor, inner, count))
        };
        let takes = graph.operand_types(whole);
        let mut found = None;
        for ((is, ty), held) in operands.iter().zip(&takes).zip(&rule.operands) {
            let Is::Elements { dim, dims, runs, .. } = is else { continue };
            let (factor, inner, count) = of(ty, held, *dim, dims[0])?;
            if let Some(runs) = runs {
                return Some((factor, Some(divided(runs, inner)?), count));
            }
            found = Some((factor, None, count));
        }
        let (ty, held) = (graph.result_types(whole).into_iter().next()?, rule.results.first()?);
        found.or_else(|| {
            let dim = (0..ty.rank()).find(|dim| types[0].shape.get(*dim) != Some(&ty.shape[*dim]))?;
            let (factor, _, count) = of(&ty, held, dim, *types[0].shape.get(dim)?)?;
            Some((factor, None, count))
        })
    }

    /// Whether an operation is what one of the whole graph is for some elements of a factor.
    fn is_part(&self, whole: NodeId, node: &Node, factor: usize, (runs, count): (&Option<Runs>, u64)) -> bool {
        let (graph, rule, op) = (self.graph, self.graph.rule(whole), &self.graph.node(whole).op);
        let size = rule.factors[factor].size;
        let part = |start: u64, count: u64| part_of(graph, whole, factor, (start, count));
        if let Some([(start, count)]) = runs.as_deref() {
            return node.op == part(*start, *count);
        }
        // Where elements lie does not matter, or they are some in order whose parts lie the last first.
        let counts = |held: &Vec<usize>| held.first() == Some(&factor);
        let counted = rule.results.first().and_then(|held| held.iter().position(counts));
        if counted.is_some_and(|dim| op.counts(dim, node.operands.len())) {
            return false;
        }
        let first = part(0, count);
        if first == part(size - count, count) {
            return node.op == first;
        }
        let Some(runs) = runs else { return false };
        let is_reversed = runs.windows(2).all(|pair| pair[0].0 == pair[1].0 + pair[1].1 && pair[0].1 == pair[1].1);
        let reversed = Some(runs.len() as u64);
        is_reversed
            && match part(runs[runs.len() - 1].0, count) {
                Op::Attention(op) => node.op == Attention { reversed, ..op }.into(),
                Op::AttentionGrad(op) => node.op == AttentionGrad { reversed, ..op }.into(),
                _ => false,
            }
    }

    /// The sum of terms of the same value.
    fn sum(&self, node: &Node, operands: &[&Is], types: &[TensorType]) -> Option<Vec<Is>> {
        let (Op::Binary(op), [Is::Terms { of, factor, runs }, Is::Terms { of: with, factor: along, runs: more }]) =
            (&node.op, operands)
        else {
            return None;
        };
        if op.kind != BinaryKind::Add || (of, factor) != (with, along) || *self.types[of] != types[0] {
            return None;
        }
        let mut all: Vec<(u64, u64)> = runs.iter().chain(more.iter()).copied().collect();
        all.sort_unstable();
        let is_once = all.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0);
        is_once.then(|| vec![self.settled(Is::Terms { of: *of, factor: *factor, runs: joined(all) })])
    }

    /// What slices, joins and reshapes along one dimension make.
    fn seen(&self, node: &Node, operands: &[&[Is]], ty: &TensorType) -> Vec<Is> {
        match &node.op {
            Op::Reshape(_) => {
                let same = |is: &Is| (self.ty(is) == *ty).then(|| is.clone());
                let seen = self.elements(operands[0]).into_iter().filter_map(|is| self.reshaped(is, ty));
                operands[0].iter().filter_map(same).chain(seen).collect()
            }
            Op::Slice(op) => {
                let all = self.elements(operands[0]).into_iter();
                all.filter_map(|is| self.sliced(is, &op.start, &op.limit)).collect()
            }
            Op::Concat(op) => self
                .elements(operands[0])
                .into_iter()
                .filter_map(|first| {
                    let (of, at) = (first.whole_of()?, first.dim()?);
                    let like = |other: &Is| other.whole_of() == Some(of) && other.dim() == Some(at);
                    let rest = operands[1..].iter().map(|is| self.elements(is).into_iter().find(like));
                    let all: Vec<Is> = std::iter::once(Some(first.clone())).chain(rest).collect::<Option<_>>()?;
                    concatenated(&all, op.dim)
                })
                .collect(),
            _ => Vec::new(),
        }
    }

    /// All that a value is as elements along some dimension.
    fn elements(&self, is: &[Is]) -> Vec<Is> {
        let all = |is: &Is| match is {
            Is::Whole(of) => {
                let along = |(dim, size): (usize, &u64)| Is::Elements {
                    of: *of,
                    dim,
                    dims: vec![*size],
                    runs: Some([(0, *size)].into()),
                };
                self.types[of].shape.iter().enumerate().map(along).collect()
            }
            Is::Elements { .. } => vec![is.clone()],
            Is::Terms { .. } => Vec::new(),
        };
        is.iter().flat_map(all).collect()
    }

    fn reshaped(&self, is: Is, ty: &TensorType) -> Option<Is> {
        let Is::Elements { of, dim, dims, runs } = is else { return None };
        let whole = self.types[&of];
        let (before, behind) = (&whole.shape[..dim], &whole.shape[dim + 1..]);
        let seen = ty.shape.strip_prefix(before)?.strip_suffix(behind)?;
        let is_seen = seen.iter().product::<u64>() == dims.iter().product::<u64>() && ty.dtype == whole.dtype;
        is_seen.then(|| Is::Elements { of, dim, dims: seen.to_vec(), runs })
    }

    fn sliced(&self, is: Is, start: &[u64], limit: &[u64]) -> Option<Is> {
        let Is::Elements { of, dim, mut dims, mut runs } = is else { return None };
        let shape = &self.types[&of].shape;
        let place = |at: usize| at.checked_sub(dim).filter(|at| *at < dims.len());
        let size = |at: usize| match place(at) {
            Some(own) => dims[own],
            None => shape[if at < dim { at } else { at + 1 - dims.len() }],
        };
        let cut: Vec<usize> = (0..start.len()).filter(|at| (start[*at], limit[*at]) != (0, size(*at))).collect();
        let own: Vec<usize> = cut.iter().map(|at| place(*at)).collect::<Option<_>>()?;
        for (at, own) in cut.into_iter().zip(own) {
            let inner: u64 = dims[own + 1..].iter().product();
            let row = dims[own] * inner;
            let outer: u64 = dims[..own].iter().product();
            let length = (limit[at] - start[at]) * inner;
            runs = runs.map(|runs| {
                let (mut cursor, mut left) = (Cursor { runs: &runs, before: 0 }, Vec::new());
                (0..outer).for_each(|index| cursor.take(index * row + start[at] * inner, length, &mut left));
                joined(left)
            });
            dims[own] = limit[at] - start[at];
        }
        Some(Is::Elements { of, dim, dims, runs })
    }

    /// The whole value, if these are all of its elements in order, or all of its terms.
    fn settled(&self, is: Is) -> Is {
        match &is {
            Is::Elements { of, dim, dims, runs } => {
                let size = self.types[of].shape[*dim];
                if dims[..] == [size] && runs.as_deref() == Some(&[(0, size)]) { Is::Whole(*of) } else { is }
            }
            Is::Terms { of, factor, runs } if runs[..] == [(0, factor.1)] => Is::Whole(*of),
            _ => is,
        }
    }

    fn ty(&self, is: &Is) -> TensorType {
        match is {
            Is::Whole(of) | Is::Terms { of, .. } => self.types[of].clone(),
            Is::Elements { of, dim, dims, .. } => {
                let whole = self.types[of];
                let mut shape = whole.shape.clone();
                shape.splice(*dim..=*dim, dims.iter().copied());
                whole.with_shape(shape)
            }
        }
    }
}

impl Is {
    fn whole(&self) -> Option<Number> {
        match self {
            Self::Whole(number) => Some(*number),
            _ => None,
        }
    }

    /// The value whose elements these are.
    fn whole_of(&self) -> Option<Number> {
        match self {
            Self::Elements { of, .. } => Some(*of),
            _ => None,
        }
    }

    fn dim(&self) -> Option<usize> {
        match self {
            Self::Elements { dim, .. } => Some(*dim),
            _ => None,
        }
    }

    /// Whether it has the dimensions that its value has.
    fn is_settled(&self) -> bool {
        !matches!(self, Self::Elements { dims, .. } if dims.len() != 1)
    }
}

fn add(all: &mut Vec<Is>, is: Is) {
    if !all.contains(&is) {
        all.push(is);
    }
}

/// Each choice of what operands are, of those that have the dimensions of their values.
fn choices<'a>(operands: &[&'a [Is]]) -> Vec<Vec<&'a Is>> {
    let mut all = vec![Vec::with_capacity(operands.len())];
    for operand in operands {
        let next = |chosen: Vec<&'a Is>| {
            let with = move |is: &'a Is| chosen.iter().copied().chain([is]).collect::<Vec<_>>();
            operand.iter().filter(|is| is.is_settled()).map(with)
        };
        all = all.into_iter().flat_map(next).collect();
    }
    all
}

/// Whether dimensions have a factor once at the most, and outermost.
fn once(held: &[Vec<usize>], factor: usize) -> bool {
    let of = |factors: &Vec<usize>| factors.iter().filter(|other| **other == factor).count();
    let count: usize = held.iter().map(of).sum();
    count == 0 || (count == 1 && held.iter().any(|factors| factors.first() == Some(&factor)))
}

/// Runs of which neighbours are one.
fn joined(runs: impl IntoIterator<Item = (u64, u64)>) -> Runs {
    let mut all: Vec<(u64, u64)> = Vec::new();
    for (start, count) in runs {
        match all.last_mut() {
            Some(last) if last.0 + last.1 == start => last.1 += count,
            _ => all.push((start, count)),
        }
    }
    all.into()
}

fn multiplied(runs: &Runs, by: u64) -> Runs {
    if by == 1 {
        return runs.clone();
    }
    runs.iter().map(|(start, count)| (start * by, count * by)).collect()
}

fn divided(runs: &Runs, by: u64) -> Option<Runs> {
    if by == 1 {
        return Some(runs.clone());
    }
    let is_whole = |run: &(u64, u64)| run.0.is_multiple_of(by) && run.1.is_multiple_of(by);
    runs.iter().all(is_whole).then(|| runs.iter().map(|(start, count)| (start / by, count / by)).collect())
}

/// A place in runs, which goes forward only.
struct Cursor<'a> {
    runs: &'a [(u64, u64)],
    /// How many indices come before the first of the runs that are left.
    before: u64,
}

impl Cursor<'_> {
    /// So many of the indices in order, from a place on.
    fn take(&mut self, place: u64, count: u64, into: &mut Vec<(u64, u64)>) {
        let (mut place, end) = (place, place + count);
        while let Some((start, length)) = self.runs.first().copied().filter(|_| place < end) {
            if self.before + length <= place {
                (self.runs, self.before) = (&self.runs[1..], self.before + length);
                continue;
            }
            let more = (self.before + length).min(end) - place;
            into.push((start + place - self.before, more));
            place += more;
        }
    }
}

/// Elements of one value along a dimension, beside each other along one of those that they have.
fn concatenated(all: &[Is], along: usize) -> Option<Is> {
    let Is::Elements { of, dim, dims, .. } = &all[0] else { return None };
    let is_any = |is: &&Is| matches!(is, Is::Elements { runs: None, .. });
    let own = along.checked_sub(*dim).filter(|own| *own < dims.len())?;
    let outer: u64 = dims[..own].iter().product();
    let (mut size, mut parts) = (0, Vec::with_capacity(all.len()));
    for is in all {
        let Is::Elements { dims: others, runs, .. } = is else { return None };
        if others.len() != dims.len() || (0..dims.len()).any(|at| at != own && others[at] != dims[at]) {
            return None;
        }
        size += others[own];
        parts.push((
            Cursor { runs: runs.as_deref().unwrap_or_default(), before: 0 },
            others[own..].iter().product::<u64>(),
        ));
    }
    let mut beside = Vec::new();
    for row in 0..outer {
        parts.iter_mut().for_each(|(cursor, length)| cursor.take(row * *length, *length, &mut beside));
    }
    let mut dims = dims.clone();
    dims[own] = size;
    let runs = match all.iter().filter(is_any).count() {
        0 => Some(joined(beside)),
        count if count == all.len() => None,
        _ => return None,
    };
    Some(Is::Elements { of: *of, dim: *dim, dims, runs })
}
