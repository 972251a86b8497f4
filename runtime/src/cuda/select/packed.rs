//! Collectives of many small tensors as one: what ranks send is packed side by side, and what comes is unpacked.
//!
//! NCCL takes some microseconds for each tensor of a group of calls, so gradients of hundreds of small tensors take several
//! times as long as their bytes (`bench/HISTORY.md`). Each tensor's part begins at a multiple of 16 bytes; what
//! lies between two is reduced or sent as well, and read by nobody.

use super::many::{cast_row, cast_table};
use super::{Arg, OP, RES, Selection, Step, lanes};
use crate::cuda::table::Row;
use shardc_ir::program::Action;
use shardc_ir::{DType, TensorType};
use std::collections::BTreeMap;

/// From how many tensors on, of at most so many bytes on average, they are packed: fewer or larger ones are read and written
/// twice more for too little (NCCL takes 3 to 4 us for each of a group on two H200s).
const LEAST: usize = 16;
const MOST_OF_EACH: u64 = 1 << 20;

/// Parts that are copied, of all tensors and ranks together, at the most.
const MOST_PARTS: u64 = 1024;

/// Bytes at which parts begin.
const ALIGNMENT: u64 = 16;

/// Where a tensor's parts begin, of which each rank has one, or all have the whole.
struct Parts {
    /// The bytes of one.
    bytes: Vec<u64>,
    /// Where it begins among those of a rank.
    at: Vec<u64>,
    /// The bytes of a rank.
    stride: u64,
}

impl Parts {
    fn of(types: &[TensorType]) -> Self {
        let bytes: Vec<u64> = types.iter().map(|ty| ty.bytes().0).collect();
        let (mut at, mut stride) = (Vec::with_capacity(bytes.len()), 0);
        for bytes in &bytes {
            at.push(stride);
            stride += bytes.next_multiple_of(ALIGNMENT);
        }
        Self { bytes, at, stride }
    }

    /// The parts of `ranks`: where they lie in the tensors, and where packed.
    fn rows(&self, ranks: u64, tensor: impl Fn(usize) -> Arg, packed: u64) -> Vec<(Arg, Arg, u64)> {
        let part = |index: usize, rank: u64| {
            let bytes = self.bytes[index];
            let to = Arg::Scratch(packed + rank * self.stride + self.at[index]);
            (tensor(index).offset(rank * bytes), to, bytes)
        };
        (0..self.bytes.len()).flat_map(|index| (0..ranks).map(move |rank| part(index, rank))).collect()
    }
}

/// The steps of a collective of many small tensors of one type; `None` for any other.
pub fn select_packed(action: &Action, operands: &[TensorType], results: &[TensorType]) -> Option<Selection> {
    let (first, last) = (operands.first()?, results.first()?);
    let (whole, part) = match action {
        Action::AllReduce { .. } => (operands, operands),
        Action::ReduceScatter { .. } => (operands, results),
        Action::AllGather { .. } => (results, operands),
        _ => return None,
    };
    let (count, dtype) = (operands.len(), first.dtype);
    let elements = |types: &[TensorType]| types.iter().map(TensorType::elements).sum::<u64>();
    let ranks = elements(whole).checked_div(elements(part))?;
    let is_plain = |ty: &TensorType| ty.dtype == dtype && ty.elements() > 0 && ty.bytes().0 < 1 << 31;
    let bytes: u64 = whole.iter().map(|ty| ty.bytes().0).sum();
    if count < LEAST
        || results.len() != count
        || !operands.iter().chain(results).all(is_plain)
        || bytes > count as u64 * MOST_OF_EACH
        || count as u64 * ranks > MOST_PARTS
        || !whole.iter().zip(part).all(|(whole, part)| whole.elements() == ranks * part.elements())
    {
        return None;
    }
    let (parts, packed) = (Parts::of(part), Arg::Scratch(0));
    let (stride, all) = (parts.stride, ranks * parts.stride);
    // Where what comes lies, and its bytes and those of what is sent.
    let (came, [sent, received], [before, behind]) = match action {
        Action::AllReduce { .. } => (0, [stride, stride], [1, 1]),
        Action::ReduceScatter { .. } => (all, [all, stride], [ranks, 1]),
        _ => (stride, [stride, all], [1, ranks]),
    };
    let mut steps = copies(parts.rows(before, OP, 0), dtype);
    let size = dtype.size();
    let (to, sent, received) = (Arg::Scratch(came), sent / size, received / size);
    steps.push(Step::Meet { from: packed, to, elements: [sent, received], dtype });
    let back = parts.rows(behind, RES, came).into_iter().map(|(tensor, packed, bytes)| (packed, tensor, bytes));
    steps.extend(copies(back.collect(), last.dtype));
    let scratch = if came == 0 { all } else { all + stride };
    Some(Selection { steps, scratch, ..Selection::default() })
}

/// Copies from places to others, a table for each width of vectors.
fn copies(rows: Vec<(Arg, Arg, u64)>, dtype: DType) -> Vec<Step> {
    let mut tables: BTreeMap<usize, Vec<Row>> = BTreeMap::new();
    for (from, to, bytes) in rows {
        let elements = bytes / dtype.size();
        let width = lanes(&[dtype], &[elements]);
        tables.entry(width).or_default().push(cast_row(from, to, (elements / width as u64) as u32));
    }
    let table = |(width, rows)| Step::Table(Box::new(cast_table([dtype; 2], width, rows)));
    tables.into_iter().map(table).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::sharding::ReduceKind;

    fn types(sizes: &[u64]) -> Vec<TensorType> {
        sizes.iter().map(|size| TensorType::new(DType::F32, [*size])).collect()
    }

    #[test]
    fn only_many_small_tensors_of_one_type_are_packed() {
        let action = Action::AllReduce { reduce: ReduceKind::Sum, group: 0 };
        let packed = |types: &[TensorType]| select_packed(&action, types, types).map(|selection| selection.scratch);
        // Parts begin at multiples of four elements.
        assert_eq!(packed(&types(&[&[1, 3][..], &[64; 14]].concat())), Some(4 * (14 * 64 + 2 * 4)));
        assert_eq!(packed(&types(&[64; 15])), None, "few");
        assert_eq!(packed(&types(&[1 << 19; 16])), None, "large");
        let mut mixed = types(&[64; 16]);
        mixed[3] = TensorType::new(DType::Bf16, [64]);
        assert_eq!(packed(&mixed), None, "of two types");
        let gather = Action::AllGather { group: 0 };
        let gathered = |ranks: u64| select_packed(&gather, &types(&[64; 16]), &types(&[64 * ranks; 16]));
        assert_eq!(gathered(4).map(|selection| selection.scratch), Some(5 * 16 * 256));
        assert!(gathered(256).is_none(), "too many parts");
        assert!(select_packed(&Action::AllToAll { group: 0 }, &types(&[64; 16]), &types(&[64; 16])).is_none());
    }
}
