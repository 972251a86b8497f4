//! Operations that move elements: reshapes, slices, joins, lookups.

use super::build::Built;
use super::convert::Converter;
use burn::backend::ir::{
    BaseOperationIr, CatOpIr, GatherOpIr, ReduceDimOpIr, RepeatDimOpIr, ScatterOpIr, SelectOpIr, SliceAssignOpIr,
    TensorIr,
};
use burn::tensor::{IndexingUpdateOp, Slice};
use shardc_ir::ops::{
    BinaryKind, Broadcast, CompareKind, Concat, CrossEntropy, Gather, ReduceOp, ScatterAdd, UnaryKind,
};
use shardc_ir::{DType, ValueId};

/// Where a slice of a dimension begins and ends, whatever its step; the end may be before the beginning.
pub(super) fn ends(slice: &Slice, size: u64) -> (u64, u64) {
    let size = size as isize;
    let place = |index: isize| if index < 0 { (index + size).max(0) } else { index.min(size) };
    (place(slice.start) as u64, place(slice.end.unwrap_or(size)) as u64)
}

/// The range of a slice of a dimension, if it is contiguous.
fn range(slice: &Slice, size: u64) -> Option<(u64, u64)> {
    let (start, end) = ends(slice, size);
    (slice.step == 1 && start <= end).then_some((start, end))
}

impl Converter<'_> {
    /// Converts an operation that exists for every kind of tensor; `None` if we have nothing for it.
    pub(super) fn base(&mut self, op: &BaseOperationIr) -> Option<Built> {
        use BaseOperationIr as Base;
        Some(match op {
            Base::Reshape(op) => self.unary_shape(&op.input, &op.out, |c, x, shape| c.b.reshape(x, shape)),
            Base::Expand(op) => self.unary_shape(&op.input, &op.out, |c, x, shape| c.b.broadcast(x, shape)),
            Base::SwapDims(op) => {
                let mut permutation: Vec<usize> = (0..op.input.shape.len()).collect();
                permutation.swap(op.dim1, op.dim2);
                self.value(&op.input).and_then(|x| self.b.transpose(x, &permutation))
            }
            Base::Permute(op) => self.value(&op.input).and_then(|x| self.b.transpose(x, &op.axes)),
            Base::Slice(op) => self.value(&op.tensor).and_then(|x| self.strided_slice(x, &op.ranges)),
            Base::SliceAssign(op) => return self.slice_assign(op),
            Base::Select(op) => self.index_select(op),
            Base::SelectAssign(op) => return self.select_assign(op),
            Base::Flip(op) => self.flip(op),
            Base::Unfold(op) => self.unfold(op),
            Base::MaskWhere(op) => self.mask_where(&op.tensor, &op.mask, &op.value, &op.out),
            Base::MaskFill(op) => self.mask_fill(&op.tensor, &op.mask, op.value.elem(), &op.out),
            Base::Gather(op) => self.gather(op),
            Base::Scatter(op) => return self.scatter(op),
            Base::Equal(op) => self.comparison(CompareKind::Eq, op),
            Base::NotEqual(op) => self.comparison(CompareKind::Ne, op),
            Base::EqualElem(op) => self.comparison_with(CompareKind::Eq, op),
            Base::NotEqualElem(op) => self.comparison_with(CompareKind::Ne, op),
            Base::RepeatDim(op) => self.repeat(op),
            Base::Cat(op) => self.cat(op),
            Base::Cast(op) => self.cast(&op.input, &op.out),
            Base::Empty(op) | Base::Zeros(op) => self.filled(0.0, &op.out),
            Base::Ones(op) => self.filled(1.0, &op.out),
            Base::Any(op) => self.any(&op.input, None, &op.out, false),
            Base::All(op) => self.any(&op.input, None, &op.out, true),
            Base::AnyDim(op) => self.any_dim(op, false),
            Base::AllDim(op) => self.any_dim(op, true),
            _ => return None,
        })
    }

    fn unary_shape(
        &mut self,
        input: &TensorIr,
        out: &TensorIr,
        apply: impl FnOnce(&mut Self, ValueId, &[u64]) -> Built,
    ) -> Built {
        let (x, shape) = (self.value(input)?, self.sizes(out));
        apply(self, x, &shape)
    }

    /// A contiguous part. Of one number everywhere it is that number; where parts were joined, it is taken of those that
    /// it meets: so what is written into a tensor step by step is joined once.
    pub(super) fn slice(&mut self, x: ValueId, ranges: &[(u64, u64)]) -> Built {
        let sizes = self.b.shape(x);
        let cut = |(dim, (start, end)): &(usize, &(u64, u64))| *start != 0 || *end != sizes[*dim];
        let cuts: Vec<usize> = ranges.iter().enumerate().filter(cut).map(|(dim, _)| dim).collect();
        if cuts.is_empty() {
            return Ok(x);
        }
        if let Some(number) = self.b.number(x) {
            let shape: Vec<u64> = ranges.iter().map(|(start, end)| end - start).collect();
            let ty = self.b.ty(x).with_shape(shape);
            return self.b.constant(number, ty);
        }
        if let shardc_ir::Op::Concat(op) = self.b.op(x)
            && cuts == [op.dim]
        {
            let (dim, mut at, mut pieces) = (op.dim, 0, Vec::new());
            let (start, end) = ranges[dim];
            for piece in self.b.graph.def(x).operands.clone() {
                let size = self.b.shape(piece)[dim];
                let (from, to) = (start.max(at), end.min(at + size));
                if from < to {
                    let mut part = ranges.to_vec();
                    part[dim] = (from - at, to - at);
                    pieces.push(self.slice(piece, &part)?);
                }
                at += size;
            }
            if !pieces.is_empty() {
                return self.concat(dim, &pieces);
            }
        }
        let (start, limit) = ranges.iter().copied().unzip();
        self.b.emit(shardc_ir::ops::Slice { start, limit }, &[x], &[])
    }

    /// A contiguous part of one dimension.
    pub(super) fn part(&mut self, x: ValueId, dim: usize, range: (u64, u64)) -> Built {
        let mut ranges: Vec<(u64, u64)> = self.b.shape(x).into_iter().map(|size| (0, size)).collect();
        ranges[dim] = range;
        self.slice(x, &ranges)
    }

    /// Parts beside each other along a dimension, those of parts that were joined along it themselves.
    pub(super) fn concat(&mut self, dim: usize, parts: &[ValueId]) -> Built {
        let of = |part: &ValueId| match self.b.op(*part) {
            shardc_ir::Op::Concat(op) if op.dim == dim => self.b.graph.def(*part).operands.clone(),
            _ => vec![*part],
        };
        let parts: Vec<ValueId> = parts.iter().flat_map(of).collect();
        if let [only] = parts[..] { Ok(only) } else { self.b.emit(Concat { dim }, &parts, &[]) }
    }

    fn slice_assign(&mut self, op: &SliceAssignOpIr) -> Option<Built> {
        let sizes = self.sizes(&op.tensor);
        let ranges: Option<Vec<_>> = whole_or(&op.ranges, &sizes).collect();
        let ranges = ranges?;
        let run = |c: &mut Self| {
            let (x, value) = (c.value(&op.tensor)?, c.value(&op.value)?);
            let inner: Vec<u64> = ranges.iter().map(|(start, end)| end - start).collect();
            let value = c.b.broadcast(value, &inner)?;
            c.assign(x, &ranges, value, 0)
        };
        Some(run(self))
    }

    /// `x` with a part replaced: along each dimension what is before, the part, what is after.
    fn assign(&mut self, x: ValueId, ranges: &[(u64, u64)], value: ValueId, dim: usize) -> Built {
        let Some(&(start, end)) = ranges.get(dim) else { return Ok(value) };
        let size = self.b.shape(x)[dim];
        let part = self.part(x, dim, (start, end))?;
        let mut pieces = vec![self.assign(part, ranges, value, dim + 1)?];
        if start > 0 {
            pieces.insert(0, self.part(x, dim, (0, start))?);
        }
        if end < size {
            pieces.push(self.part(x, dim, (end, size))?);
        }
        self.concat(dim, &pieces)
    }

    fn index_select(&mut self, op: &SelectOpIr) -> Built {
        let (x, ids) = (self.value(&op.tensor)?, self.value(&op.indices)?);
        self.rows(x, op.dim, ids)
    }

    fn mask_where(&mut self, x: &TensorIr, mask: &TensorIr, value: &TensorIr, out: &TensorIr) -> Built {
        let (x, mask, value) = (self.value(x)?, self.value(mask)?, self.value(value)?);
        self.b.select(mask, value, x, &self.sizes(out))
    }

    fn mask_fill(&mut self, x: &TensorIr, mask: &TensorIr, number: f64, out: &TensorIr) -> Built {
        let (x, mask) = (self.value(x)?, self.value(mask)?);
        let ty = self.b.ty(x).with_shape(self.sizes(out));
        let value = self.b.constant(number, ty.clone())?;
        self.b.select(mask, value, x, &ty.shape)
    }

    /// A gather; of the logarithm of a softmax, by labels, it is a cross-entropy.
    fn gather(&mut self, op: &GatherOpIr) -> Built {
        let (x, index) = (self.value(&op.tensor)?, self.value(&op.indices)?);
        let shape = self.b.shape(index);
        let logits = self.log_softmax.get(&x).copied();
        if let Some(logits) = logits.filter(|_| op.dim + 1 == shape.len() && shape.last() == Some(&1)) {
            let logits = self.split_rows(logits);
            let rows = self.b.shape(logits);
            let labels = self.b.reshape(index, &rows[..rows.len() - 1])?;
            let loss = self.cross_entropy(logits, labels)?;
            return self.b.reshape(loss, &shape);
        }
        self.b.emit(Gather { dim: op.dim }, &[x, index], &[])
    }

    /// Logits before their samples and tokens were merged, as Burn's cross-entropy wants them: apart, each can be divided,
    /// and the head cut along the tokens.
    fn split_rows(&self, logits: ValueId) -> ValueId {
        if !matches!(self.b.op(logits), shardc_ir::Op::Reshape(_)) {
            return logits;
        }
        let source = self.b.operand(logits, 0);
        let (split, flat) = (self.b.shape(source), self.b.shape(logits));
        if split.len() > flat.len() && split.last() == flat.last() { source } else { logits }
    }

    /// The logarithm of each label's probability. Where a few rows of logits were left out, as the last token's that has
    /// no successor, they are computed with the others for a label that is ignored: a part of the logits would be
    /// another copy of them, and its rows divide by little.
    fn cross_entropy(&mut self, logits: ValueId, labels: ValueId) -> Built {
        let part = match self.b.op(logits) {
            shardc_ir::Op::Slice(part) => Some(part.clone()),
            _ => None,
        };
        let rows = self.b.shape(labels);
        let all = part.as_ref().map(|_| self.b.operand(logits, 0));
        let mut whole = self.b.shape(all.unwrap_or(logits));
        let entries = whole.pop();
        let is_most = rows.iter().product::<u64>() * 2 >= whole.iter().product();
        let is_whole = |dim: usize, size: Option<&u64>| {
            part.as_ref().is_none_or(|part| size == part.limit.get(dim) && part.start[dim] == 0)
        };
        let is_open = is_most && is_whole(0, whole.first()) && is_whole(whole.len(), entries.as_ref());
        let part = part.filter(|_| is_open);
        let (Some(mut part), Some(all)) = (part, all) else { return self.log_probability(logits, labels) };
        part.start.truncate(whole.len());
        part.limit.truncate(whole.len());
        let mut labels = labels;
        for (dim, size) in whole.iter().enumerate() {
            let ignored = |c: &mut Self, count: u64| {
                let mut ty = c.b.ty(labels);
                ty.shape[dim] = count;
                let value = (count > 0).then(|| c.b.constant(-1.0, ty));
                value.transpose()
            };
            let before = ignored(self, part.start[dim])?;
            let after = ignored(self, size - part.limit[dim])?;
            let parts: Vec<ValueId> = before.into_iter().chain([labels]).chain(after).collect();
            if parts.len() > 1 {
                labels = self.b.emit(Concat { dim }, &parts, &[])?;
            }
        }
        let all = self.log_probability(all, labels)?;
        self.b.emit(part, &[all], &[])
    }

    fn log_probability(&mut self, logits: ValueId, labels: ValueId) -> Built {
        let halves = self.b.emit_all(CrossEntropy { start: 0, classes: None }, &[logits, labels], &[])?;
        self.b.binary(BinaryKind::Sub, halves[1], halves[0])
    }

    fn scatter(&mut self, op: &ScatterOpIr) -> Option<Built> {
        if op.update != IndexingUpdateOp::Add {
            return None;
        }
        let run = |c: &mut Self| {
            let (x, index, value) = (c.value(&op.tensor)?, c.value(&op.indices)?, c.value(&op.value)?);
            let ty = c.b.ty(x);
            let added = c.b.emit(ScatterAdd { dim: op.dim }, &[value, index], &[ty])?;
            c.b.binary(BinaryKind::Add, x, added)
        };
        Some(run(self))
    }

    /// A dimension repeated: a new dimension in front of it, copied, then merged.
    fn repeat(&mut self, op: &RepeatDimOpIr) -> Built {
        let x = self.value(&op.tensor)?;
        let (shape, times) = (self.b.shape(x), op.times as u64);
        if shape[op.dim] == 1 {
            return self.b.broadcast(x, &self.sizes(&op.out));
        }
        let mut wide = shape.clone();
        wide.insert(op.dim, times);
        let dims = (0..wide.len()).filter(|dim| *dim != op.dim).collect();
        let ty = self.b.ty(x).with_shape(wide);
        let copies = self.b.emit(Broadcast { dims }, &[x], &[ty])?;
        self.b.reshape(copies, &self.sizes(&op.out))
    }

    fn cat(&mut self, op: &CatOpIr) -> Built {
        let parts: Result<Vec<ValueId>, _> = op.tensors.iter().map(|tensor| self.value(tensor)).collect();
        let parts = parts?;
        if let [only] = parts[..] {
            return Ok(only);
        }
        self.b.emit(Concat { dim: op.dim }, &parts, &[])
    }

    fn any_dim(&mut self, op: &ReduceDimOpIr, all: bool) -> Built {
        self.any(&op.input, Some(op.axis), &op.out, all)
    }

    /// Whether any (or all) elements are not zero.
    fn any(&mut self, input: &TensorIr, dim: Option<usize>, out: &TensorIr, all: bool) -> Built {
        let x = self.value(input)?;
        let mut mask = self.b.cast(x, DType::Bool)?;
        if all {
            mask = self.b.unary(UnaryKind::Not, mask)?;
        }
        // A float: GPUs have no reductions of integers.
        let count = self.b.cast(mask, DType::F32)?;
        let most = match dim {
            Some(dim) => self.b.reduce(ReduceOp::Max, count, &[dim])?,
            None => self.b.reduce_all(ReduceOp::Max, count, &self.sizes(out))?,
        };
        self.b.compare_number(if all { CompareKind::Eq } else { CompareKind::Gt }, most, 0.0)
    }
}

/// The ranges of a slice, whole where none is given.
fn whole_or<'a>(ranges: &'a [Slice], sizes: &'a [u64]) -> impl Iterator<Item = Option<(u64, u64)>> + 'a {
    sizes.iter().enumerate().map(|(dim, size)| ranges.get(dim).map_or(Some((0, *size)), |slice| range(slice, *size)))
}
