//! Changes of layout: what each collective and each local rearrangement makes of a fact.

use super::arrangement::Arrangement;
use super::state::{Fact, LogSumExp, Stage};
use crate::graph::Graph;
use crate::mesh::{AxisId, Mesh};
use crate::ops::{BinaryKind, Op, Slice, UnaryKind};
use crate::program::Program;
use crate::sharding::ReduceKind;

/// The axes along which a group of every program runs, outermost first.
pub(super) fn group_axes(programs: &[Program], index: usize, mesh: &Mesh) -> Result<Vec<AxisId>, String> {
    let Some(first) = programs.first() else { return Ok(Vec::new()) };
    let members = &first.groups[index];
    let mut axes: Vec<AxisId> = Vec::new();
    let mut next = 1;
    while next < members.len() {
        let (from, to) = (mesh.coordinates(members[0], 0), mesh.coordinates(members[next], 0));
        let mut moved = mesh.ids().filter(|axis| from[axis.0 as usize] != to[axis.0 as usize]);
        let (Some(axis), None) = (moved.next(), moved.next()) else { break };
        axes.insert(0, axis);
        next *= mesh.size(axis) as usize;
    }
    for program in programs {
        if mesh.group(program.rank, &axes) != program.groups[index] {
            let (group, rank) = (&program.groups[index], program.rank);
            return Err(format!("the ranks {group:?} of rank {rank}'s group do not lie along axes of the mesh {mesh}"));
        }
    }
    Ok(axes)
}

fn expect_ready(fact: &Fact) -> Result<&Arrangement, String> {
    match fact.stage {
        Stage::Ready => Ok(&fact.arrangement),
        _ => Err("it is not the value itself".to_string()),
    }
}

fn same_axes(a: &[AxisId], b: &[AxisId]) -> bool {
    a.len() == b.len() && a.iter().all(|axis| b.contains(axis))
}

/// After an all-reduce: of the terms of a reduction, or within a log-sum-exp.
pub(super) fn all_reduce(fact: &Fact, axes: &[AxisId], kind: ReduceKind, mesh: &Mesh) -> Result<Fact, String> {
    let with = |stage| Ok(Fact { stage, ..fact.clone() });
    match (&fact.stage, kind) {
        (Stage::LogSumExp(LogSumExp::Exp, over), ReduceKind::Sum) if same_axes(over, axes) => {
            with(Stage::LogSumExp(LogSumExp::Total, over.clone()))
        }
        (Stage::Ready, ReduceKind::Max)
            if axes.iter().all(|axis| fact.arrangement.partial_over(*axis) == Some(ReduceKind::LogSumExp)) =>
        {
            with(Stage::LogSumExp(LogSumExp::Max, axes.to_vec()))
        }
        _ => Ok(Fact::ready(fact.value, expect_ready(fact)?.reduced(axes, kind, mesh)?)),
    }
}

/// After an all-gather.
pub(super) fn all_gather(fact: &Fact, axes: &[AxisId], mesh: &Mesh) -> Result<Fact, String> {
    Ok(Fact::ready(fact.value, expect_ready(fact)?.gathered(axes, mesh)?))
}

/// After a reduce-scatter.
pub(super) fn reduce_scatter(fact: &Fact, axes: &[AxisId], kind: ReduceKind, mesh: &Mesh) -> Result<Fact, String> {
    Ok(Fact::ready(fact.value, expect_ready(fact)?.scattered(axes, kind, mesh)?))
}

/// After an all-to-all.
pub(super) fn all_to_all(fact: &Fact, axes: &[AxisId], mesh: &Mesh) -> Result<Fact, String> {
    Ok(Fact::ready(fact.value, expect_ready(fact)?.exchanged(axes, mesh)?))
}

/// A local operation of all ranks that may be part of a conversion.
pub(super) struct Local<'a> {
    /// The operation on each rank.
    pub ops: Vec<&'a Op>,
    /// The coordinates of each rank.
    pub coordinates: &'a [Vec<u64>],
    /// The shape of the first operand.
    pub shape: &'a [u64],
    /// The shape of the result.
    pub result: &'a [u64],
    pub mesh: &'a Mesh,
    /// What the facts are about.
    pub graph: &'a Graph,
}

impl Local<'_> {
    /// What it makes of each combination of facts about its operands.
    pub fn apply(&self, operands: &[&[Fact]]) -> Result<Vec<Fact>, String> {
        let mut why = None;
        let mut made = Vec::new();
        for fact in operands.first().copied().unwrap_or_default() {
            let facts = match operands {
                [_] => self.unary(fact),
                [_, zeros] if matches!(self.ops[0], Op::Concat(_)) => self.join(fact, zeros),
                [_, others] => self.log_sum_exp(fact, others).map(|fact| vec![fact]),
                _ => Err("it takes more than a conversion does".to_string()),
            };
            match facts {
                Ok(facts) => made.extend(facts),
                Err(message) => why = why.or(Some(message)),
            }
        }
        if made.is_empty() {
            Err(why.unwrap_or_else(|| "nothing is known of its operand".to_string()))
        } else {
            Ok(made)
        }
    }

    fn unary(&self, fact: &Fact) -> Result<Vec<Fact>, String> {
        let next = |stage| Ok(vec![Fact { stage, ..fact.clone() }]);
        match (self.ops[0], &fact.stage) {
            (Op::Reshape(_), _) => Ok(vec![fact.clone()]),
            (Op::Transpose(op), Stage::Ready) if self.is_alike() => {
                Ok(vec![Fact::ready(fact.value, fact.arrangement.transposed(self.shape, &op.permutation)?)])
            }
            (Op::Slice(op), Stage::Ready) => {
                let end = self.is_alike().then(|| self.trim(op)).flatten();
                let trimmed =
                    |end| self.at_end(fact, |arrangement, whole| arrangement.trimmed(self.shape, end, whole)).ok();
                end.and_then(trimmed).map_or_else(|| self.slice(fact), Ok)
            }
            (Op::Pad(op), Stage::Ready) => {
                let is_end = self.is_alike() && op.low.iter().all(|low| *low == 0) && op.value == 0.0;
                let mut more = (0..self.shape.len()).filter(|dim| op.high[*dim] > 0);
                match (more.next().filter(|_| is_end), more.next()) {
                    (Some(dim), None) => self.fill(fact, dim),
                    _ => Err("it does not put zeros behind one dimension".to_string()),
                }
            }
            (Op::Affine(_), Stage::Ready) => self.isolate(fact),
            (Op::Unary(op), Stage::LogSumExp(LogSumExp::Shifted, axes)) if op.kind == UnaryKind::Exp => {
                next(Stage::LogSumExp(LogSumExp::Exp, axes.clone()))
            }
            (Op::Unary(op), Stage::LogSumExp(LogSumExp::Total, axes)) if op.kind == UnaryKind::Log => {
                next(Stage::LogSumExp(LogSumExp::Log, axes.clone()))
            }
            _ => Err("it is no step of a conversion".to_string()),
        }
    }

    fn is_alike(&self) -> bool {
        self.ops.iter().all(|op| *op == self.ops[0])
    }

    fn at_end(
        &self,
        fact: &Fact,
        next: impl Fn(&Arrangement, &[u64]) -> Result<Arrangement, String>,
    ) -> Result<Vec<Fact>, String> {
        let whole = &self.graph.ty(fact.value).shape;
        Ok(vec![Fact::ready(fact.value, next(&fact.arrangement, whole)?)])
    }

    /// The dimension of which the end is cut off, and what is left.
    fn trim(&self, op: &Slice) -> Option<(usize, u64)> {
        let mut cut = (0..self.shape.len()).filter(|dim| op.limit[*dim] < self.shape[*dim]);
        let (Some(dim), None) = (cut.next(), cut.next()) else { return None };
        op.start.iter().all(|start| *start == 0).then(|| (dim, op.limit[dim]))
    }

    /// A value, and zeros behind it.
    fn join(&self, fact: &Fact, zeros: &[Fact]) -> Result<Vec<Fact>, String> {
        match self.ops[0] {
            Op::Concat(op) if self.is_alike() && zeros.iter().any(|fact| fact.stage == Stage::Empty) => {
                expect_ready(fact)?;
                self.fill(fact, op.dim)
            }
            _ => Err("it joins more than a value and zeros".to_string()),
        }
    }

    fn fill(&self, fact: &Fact, dim: usize) -> Result<Vec<Fact>, String> {
        self.at_end(fact, |arrangement, whole| arrangement.filled(self.shape, (dim, self.result[dim]), whole))
    }

    /// `x - m`, and `log(…) + m`.
    fn log_sum_exp(&self, fact: &Fact, others: &[Fact]) -> Result<Fact, String> {
        let Op::Binary(op) = self.ops[0] else { return Err("it is no step of a conversion".to_string()) };
        for other in others.iter().filter(|other| (other.value, &other.arrangement) == (fact.value, &fact.arrangement))
        {
            let Stage::LogSumExp(LogSumExp::Max, axes) = &other.stage else { continue };
            match (&fact.stage, op.kind) {
                (Stage::Ready, BinaryKind::Sub) => {
                    let stage = Stage::LogSumExp(LogSumExp::Shifted, axes.clone());
                    return Ok(Fact { stage, ..fact.clone() });
                }
                (Stage::LogSumExp(LogSumExp::Log, over), BinaryKind::Add) if same_axes(over, axes) => {
                    return Ok(Fact::ready(fact.value, fact.arrangement.without_partial(axes)));
                }
                _ => {}
            }
        }
        Err("it is no step of a log-sum-exp".to_string())
    }

    /// The axes whose coordinate on every rank is this number.
    fn axes_at(&self, size: u64, at: impl Fn(usize, u64) -> bool) -> Vec<AxisId> {
        let fits = |axis: &AxisId| {
            let mut ranks = self.coordinates.iter().enumerate();
            self.mesh.size(*axis) == size && ranks.all(|(rank, coordinates)| at(rank, coordinates[axis.0 as usize]))
        };
        self.mesh.ids().filter(|axis| !self.mesh.is_time(*axis) && self.mesh.size(*axis) > 1).filter(fits).collect()
    }

    /// The axes, one or several in their order, among the coordinates on which every rank has this place of so many.
    fn axes_of(&self, count: u64, at: impl Fn(usize) -> u64) -> Vec<Vec<AxisId>> {
        let mut open: Vec<Vec<AxisId>> = vec![Vec::new()];
        for axis in self.mesh.ids().filter(|axis| !self.mesh.is_time(*axis) && self.mesh.size(*axis) > 1) {
            let longer: Vec<Vec<AxisId>> = open.iter().map(|axes| [&axes[..], &[axis]].concat()).collect();
            open.extend(longer.into_iter().filter(|axes| self.mesh.extent(axes.iter().copied()) <= count));
        }
        let fits = |axes: &Vec<AxisId>| {
            let mut ranks = self.coordinates.iter().enumerate();
            self.mesh.extent(axes.iter().copied()) == count
                && ranks.all(|(rank, coordinates)| at(rank) == self.mesh.index(axes, coordinates))
        };
        open.into_iter().filter(fits).collect()
    }

    /// Every rank keeps its part: which axes say which part that is?
    fn slice(&self, fact: &Fact) -> Result<Vec<Fact>, String> {
        let mut at = Vec::with_capacity(self.ops.len());
        for op in &self.ops {
            let Op::Slice(op) = op else { return Err("it is another operation on other ranks".to_string()) };
            at.push(part_of(op, self.shape).ok_or("it does not keep one of equal parts")?);
        }
        let (dim, count, _) = at[0];
        if at.iter().any(|part| (part.0, part.1) != (dim, count)) {
            return Err("the ranks cut other parts".to_string());
        }
        let axes = self.axes_of(count, |rank| at[rank].2);
        let next = |axes: Vec<AxisId>| {
            Ok(Fact::ready(fact.value, fact.arrangement.sliced(self.shape, dim, &axes, self.mesh)?))
        };
        let none = format!("its part of {count} is not the rank's coordinate on an axis of the mesh {}", self.mesh);
        first_error(axes.into_iter().map(next), none)
    }

    /// One coordinate of an axis keeps a value, the others hold zeros.
    fn isolate(&self, fact: &Fact) -> Result<Vec<Fact>, String> {
        let mut keeps = Vec::with_capacity(self.ops.len());
        for op in &self.ops {
            match op {
                Op::Affine(op) if op.offset == 0.0 && op.scale == 1.0 => keeps.push(true),
                Op::Affine(op) if op.offset == 0.0 && op.scale == 0.0 => keeps.push(false),
                _ => return Err("it neither keeps nor clears the value".to_string()),
            }
        }
        let sizes: Vec<u64> = self.mesh.axes.iter().map(|axis| axis.size).collect();
        let mut axes: Vec<AxisId> = Vec::new();
        for size in sizes {
            let more = self.axes_at(size, |rank, coordinate| keeps[rank] == (coordinate == 0));
            axes.extend(more.into_iter().filter(|axis| !axes.contains(axis)).collect::<Vec<_>>());
        }
        let next = |axis| Ok(Fact::ready(fact.value, fact.arrangement.isolated(axis, self.mesh)?));
        first_error(
            axes.into_iter().map(next),
            "it keeps the value on other ranks than the first of an axis".to_string(),
        )
    }
}

/// All that succeed; the first error, or `none`, if none does.
fn first_error(results: impl Iterator<Item = Result<Fact, String>>, none: String) -> Result<Vec<Fact>, String> {
    let (facts, errors): (Vec<_>, Vec<_>) = results.partition(Result::is_ok);
    match errors.into_iter().find_map(Result::err) {
        Some(error) if facts.is_empty() => Err(error),
        None if facts.is_empty() => Err(none),
        _ => Ok(facts.into_iter().flatten().collect()),
    }
}

/// The dimension, into how many parts it is cut, and which part is kept.
fn part_of(op: &Slice, shape: &[u64]) -> Option<(usize, u64, u64)> {
    let length = |dim: usize| op.limit[dim].saturating_sub(op.start[dim]);
    let mut cut = (0..shape.len()).filter(|dim| length(*dim) != shape[*dim]);
    let (dim, None) = (cut.next()?, cut.next()) else { return None };
    let (length, start) = (length(dim), op.start[dim]);
    let exact = length > 0 && shape[dim].is_multiple_of(length) && start.is_multiple_of(length);
    exact.then(|| (dim, shape[dim] / length, start / length))
}
