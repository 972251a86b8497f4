//! One step of a conversion as instructions.
//!
//! Collectives are flat: an all-gather stacks the parts of the ranks, a reduce-scatter cuts its
//! operand into equal contiguous parts. Seen as a tensor `[before, dim, after]`, a dimension that is
//! not the outermost (`before > 1`) must be brought to the front, or back, by a transpose of rank 3;
//! everything else is a view.
//!
//! Where the parts of an axis are uneven, the zeros behind the last one are cut off once it is gathered, which is a view
//! of an outermost dimension, and put there before a value is cut into parts.

use super::Lowering;
use super::draft::{Draft, Hint, Place};
use crate::reshard::Step;
use shardc_ir::ops::{Affine, Binary, BinaryKind, Cast, Concat, Constant, Op, Pad, Slice, Transpose, Unary, UnaryKind};
use shardc_ir::plan::Category;
use shardc_ir::program::{Action, Stream};
use shardc_ir::view::is_outermost;
use shardc_ir::{AxisId, BufferId, DType, NodeId, ReduceKind, TensorType};

/// Where instructions go and what they are marked with.
#[derive(Clone, Copy)]
pub(super) struct Site {
    pub place: Place,
    pub source: Option<NodeId>,
    pub hint: Hint,
    pub category: Category,
}

impl Lowering<'_> {
    /// Emits one step, of which a coordinate holds so much afterwards; gives the buffer that holds its result.
    pub(super) fn emit(&mut self, step: &Step, operand: BufferId, shape: &[u64], site: Site) -> BufferId {
        let draft = &mut self.draft;
        match step {
            Step::AllGather { dim, axes } => {
                let whole = all_gather(draft, operand, *dim, axes, site);
                trim(draft, whole, *dim, shape[*dim], site)
            }
            Step::ReduceScatter { dim, axes, reduce } => {
                let operand = fill(draft, operand, *dim, shape[*dim] * extent(draft, axes), site);
                reduce_scatter(draft, operand, *dim, axes, *reduce, site)
            }
            Step::AllToAll { from, to, axes } => all_to_all(draft, operand, *from, *to, axes, site),
            Step::AllReduce { axes, reduce: ReduceKind::LogSumExp } => log_sum_exp(draft, operand, axes, site),
            Step::AllReduce { axes, reduce } => all_reduce(draft, operand, axes, *reduce, site),
            Step::Slice { dim, axes } => {
                let (count, at) = (extent(draft, axes), self.mesh.index(axes, &self.coordinates));
                let operand = fill(draft, operand, *dim, shape[*dim] * count, site);
                slice(draft, operand, *dim, count, at, site)
            }
            Step::Isolate { axis } => {
                let scale = if self.coordinates[axis.0 as usize] == 0 { 1.0 } else { 0.0 };
                compute(&mut self.draft, Affine { scale, offset: 0.0 }, &[operand], site)
            }
        }
    }

    /// The same elements in another type.
    pub(super) fn cast(&mut self, operand: BufferId, dtype: DType, site: Site) -> BufferId {
        let draft = &mut self.draft;
        let result = draft.buffer(ty(draft, operand).with_dtype(dtype), site.category);
        push(draft, Action::Compute(Cast {}.into()), &[operand], result, site);
        result
    }
}

fn ty(draft: &Draft, buffer: BufferId) -> TensorType {
    draft.buffers[buffer].ty.clone()
}

fn extent(draft: &Draft, axes: &[AxisId]) -> u64 {
    draft.mesh.extent(axes.iter().copied())
}

/// Adds a local operation that keeps the type of its first operand.
fn compute(draft: &mut Draft, op: impl Into<Op>, operands: &[BufferId], site: Site) -> BufferId {
    let result = draft.buffer(ty(draft, operands[0]), site.category);
    push(draft, Action::Compute(op.into()), operands, result, site);
    result
}

fn push(draft: &mut Draft, action: Action, operands: &[BufferId], result: BufferId, site: Site) {
    let local = matches!(action, Action::Compute(_));
    let (stream, hint) = if local { (Stream::Compute, Hint::None) } else { (Stream::Communication, site.hint) };
    draft.push(site.place, action, operands.to_vec(), vec![result], stream, site.source, hint);
}

fn slice(draft: &mut Draft, operand: BufferId, dim: usize, count: u64, at: u64, site: Site) -> BufferId {
    let whole = ty(draft, operand);
    let (mut shape, mut start, mut limit) = (whole.shape.clone(), vec![0; whole.rank()], whole.shape.clone());
    shape[dim] /= count;
    start[dim] = at * shape[dim];
    limit[dim] = start[dim] + shape[dim];
    let result = draft.buffer(whole.with_shape(shape), site.category);
    push(draft, Action::Compute(Slice { start, limit }.into()), &[operand], result, site);
    result
}

/// The first `size` of a dimension, of which what is behind them is zero.
fn trim(draft: &mut Draft, operand: BufferId, dim: usize, size: u64, site: Site) -> BufferId {
    let whole = ty(draft, operand);
    if whole.shape[dim] == size {
        return operand;
    }
    let mut limit = whole.shape.clone();
    limit[dim] = size;
    let part = whole.with_shape(limit.clone());
    let action = Action::Compute(Slice { start: vec![0; whole.rank()], limit }.into());
    if is_outermost(&whole.shape, dim) {
        return draft.named(operand, part, action, (site.place, site.source));
    }
    let result = draft.buffer(part, site.category);
    push(draft, action, &[operand], result, site);
    result
}

/// A dimension with zeros behind it, until it is so long. What is outermost and made by this section is then made where
/// it lies before the zeros ([`views`](super::views)).
fn fill(draft: &mut Draft, operand: BufferId, dim: usize, size: u64, site: Site) -> BufferId {
    let part = ty(draft, operand);
    let more = size - part.shape[dim];
    if more == 0 {
        return operand;
    }
    let with = |rows: u64| {
        let mut shape = part.shape.clone();
        shape[dim] = rows;
        part.with_shape(shape)
    };
    let result = draft.buffer(with(size), Category::Buffer);
    if is_outermost(&part.shape, dim) {
        let zeros = draft.buffer(with(more), Category::Buffer);
        push(draft, Action::Compute(Constant { value: 0.0 }.into()), &[], zeros, site);
        push(draft, Action::Compute(Concat { dim }.into()), &[operand, zeros], result, site);
        return result;
    }
    let (low, mut high) = (vec![0; part.rank()], vec![0; part.rank()]);
    high[dim] = more;
    push(draft, Action::Compute(Pad { low, high, value: 0.0 }.into()), &[operand], result, site);
    result
}

/// Exchanges the first two dimensions of a view `[first, second, rest]`.
fn exchange(draft: &mut Draft, operand: BufferId, first: u64, second: u64, site: Site) -> BufferId {
    let whole = ty(draft, operand);
    let rest = whole.elements() / (first * second).max(1);
    let view = draft.view(operand, whole.with_shape([first, second, rest]), site.place, site.source);
    let result = draft.buffer(whole.with_shape([second, first, rest]), site.category);
    let op = Transpose { permutation: vec![1, 0, 2] };
    push(draft, Action::Compute(op.into()), &[view], result, site);
    result
}

fn before(shape: &[u64], dim: usize) -> u64 {
    shape[..dim].iter().product()
}

fn all_gather(draft: &mut Draft, operand: BufferId, dim: usize, axes: &[AxisId], site: Site) -> BufferId {
    let (part, n, group) = (ty(draft, operand), extent(draft, axes), draft.group(axes));
    let mut shape = part.shape.clone();
    shape[dim] *= n;
    let whole = part.with_shape(shape);
    let before = before(&part.shape, dim);
    let action = Action::AllGather { group };
    if before == 1 {
        let result = draft.buffer(whole, site.category);
        push(draft, action, &[operand], result, site);
        return result;
    }
    let stacked = draft.buffer(part.with_shape([n, before, part.elements() / before]), Category::Buffer);
    push(draft, action, &[operand], stacked, site);
    let result = exchange(draft, stacked, n, before, site);
    draft.view(result, whole, site.place, site.source)
}

fn reduce_scatter(
    draft: &mut Draft,
    operand: BufferId,
    dim: usize,
    axes: &[AxisId],
    reduce: ReduceKind,
    site: Site,
) -> BufferId {
    let (whole, n, group) = (ty(draft, operand), extent(draft, axes), draft.group(axes));
    let mut shape = whole.shape.clone();
    shape[dim] /= n;
    let before = before(&whole.shape, dim);
    let inner = Site { category: Category::Buffer, ..site };
    let operand = if before == 1 { operand } else { exchange(draft, operand, before, n, inner) };
    let result = draft.buffer(whole.with_shape(shape), site.category);
    push(draft, Action::ReduceScatter { reduce, group }, &[operand], result, site);
    result
}

fn all_to_all(draft: &mut Draft, operand: BufferId, from: usize, to: usize, axes: &[AxisId], site: Site) -> BufferId {
    let (source, n, group) = (ty(draft, operand), extent(draft, axes), draft.group(axes));
    let inner = Site { category: Category::Buffer, ..site };
    let lead = before(&source.shape, to);
    let operand = if lead == 1 { operand } else { exchange(draft, operand, lead, n, inner) };
    let mut shape = source.shape.clone();
    shape[to] /= n;
    let lead = before(&shape, from);
    shape[from] *= n;
    let result = draft.buffer(source.with_shape(shape), site.category);
    push(draft, Action::AllToAll { group }, &[operand], result, site);
    if lead == 1 {
        return result;
    }
    let target = ty(draft, result);
    let result = exchange(draft, result, n, lead, site);
    draft.view(result, target, site.place, site.source)
}

fn all_reduce(draft: &mut Draft, operand: BufferId, axes: &[AxisId], reduce: ReduceKind, site: Site) -> BufferId {
    let group = draft.group(axes);
    let result = draft.buffer(ty(draft, operand), site.category);
    push(draft, Action::AllReduce { reduce, group }, &[operand], result, site);
    result
}

/// `log(sum(exp(x - m))) + m` with the maximum `m`, so that no exponential overflows.
fn log_sum_exp(draft: &mut Draft, operand: BufferId, axes: &[AxisId], site: Site) -> BufferId {
    let site = Site { hint: Hint::None, ..site };
    let max = all_reduce(draft, operand, axes, ReduceKind::Max, site);
    let shifted = compute(draft, Binary { kind: BinaryKind::Sub }, &[operand, max], site);
    let exp = compute(draft, Unary { kind: UnaryKind::Exp }, &[shifted], site);
    let sum = all_reduce(draft, exp, axes, ReduceKind::Sum, site);
    let log = compute(draft, Unary { kind: UnaryKind::Log }, &[sum], site);
    compute(draft, Binary { kind: BinaryKind::Add }, &[log, max], site)
}
