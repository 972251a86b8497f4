//! Launches over tensors that are too large for one.
//!
//! Kernels count in 32 bits. What a launch works on falls into *units* (a vector, a row, a chunk of
//! rows), each of which reads and writes its own bytes of some buffers and perhaps the whole of others.
//! A launch over more bytes than [`LIMIT`] becomes several over ranges of units: the same kernel, with
//! the buffers' addresses moved on and the counts of the range. No kernel knows of it. One unit is always one launch's, so
//! one that is too large for that is refused.

use super::{Arg, Select};
use crate::cuda::kernel::{Kernel, Launch};
use std::sync::Arc;

/// The bytes of any one buffer that a launch may work on: fewer elements than 32 bits count.
pub const LIMIT: u64 = 1 << 31;

/// Ranges begin at multiples of this many units where that is possible, so that what is aligned stays so.
const STEP: u64 = 64;

/// The largest grid along its second and third dimension (CUDA C++ programming guide, technical
/// specifications per compute capability).
pub const MOST_BLOCKS: u64 = 65_535;

/// How a launch is divided.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    /// The grid; its size along `axis` is found out.
    pub grid: [u32; 3],
    /// The dimension of the grid along which the units lie.
    pub axis: usize,
    /// What is counted in all: vectors, rows.
    pub count: u64,
    /// How many of these a unit has.
    pub per_unit: u64,
    /// How many of these a block takes.
    pub per_block: u64,
    /// The scalar of the kernel that says how many there are, if it has one.
    pub number: Option<usize>,
}

impl Cut {
    /// One thread per vector, `threads` a block; the kernel's first scalar is their number.
    pub fn vectors(count: u64, threads: u32) -> Self {
        Self { grid: [1; 3], axis: 0, count, per_unit: 1, per_block: u64::from(threads), number: Some(0) }
    }

    /// One block per row.
    pub fn rows(count: u64) -> Self {
        Self { grid: [1; 3], axis: 0, count, per_unit: 1, per_block: 1, number: None }
    }

    /// The ranges, if a unit has at most `bytes` bytes of any buffer: first unit and count.
    fn ranges(&self, bytes: u64, limit: u64) -> Vec<(u64, u64)> {
        let units = self.count.div_ceil(self.per_unit);
        let blocks = if self.axis == 0 { u64::MAX } else { (MOST_BLOCKS * self.per_block / self.per_unit).max(1) };
        let most = (limit / bytes.max(1)).min(blocks).clamp(1, units.max(1));
        let step = (self.per_block / self.per_unit).max(STEP);
        let part = if most < step || most == units { most } else { most / step * step };
        let range = |first: u64| (first, (part * self.per_unit).min(self.count - first * self.per_unit));
        (0..units).step_by(part as usize).map(range).collect()
    }
}

impl Select<'_> {
    /// Launches a kernel over units. Each buffer comes with the bytes of one unit, or 0 if every unit
    /// sees the whole of it.
    pub(super) fn launch_cut(
        &mut self,
        kernel: Kernel,
        buffers: &[(Arg, u64)],
        numbers: Vec<u32>,
        reals: Vec<f32>,
        cut: Cut,
    ) {
        let kernel = Arc::new(kernel);
        let widest = buffers.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0);
        buffers.iter().for_each(|(arg, bytes)| self.expect_small(*arg, *bytes));
        for (first, count) in cut.ranges(widest, self.limit) {
            let (mut grid, mut numbers) = (cut.grid, numbers.clone());
            grid[cut.axis] = count.div_ceil(cut.per_block) as u32;
            if let Some(number) = cut.number {
                numbers[number] = count as u32;
            }
            let buffers = buffers.iter().map(|(arg, bytes)| arg.offset(first * bytes)).collect();
            self.push(Launch { kernel: kernel.clone(), buffers, numbers, reals: reals.clone(), grid });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Selection, Step, select, select_accumulate};
    use super::*;
    use shardc_ir::ops::Softmax;
    use shardc_ir::{DType, TensorType};

    /// Additions over several launches are all there, and so is all that the first microbatch does in their place.
    #[test]
    fn what_accumulates_more_than_a_launch_does_all_of_it() {
        let steps = |operand: DType, elements: u64| {
            let ty = |dtype: DType| TensorType::new(dtype, [elements]);
            let Selection { steps, first, .. } = select_accumulate(&ty(operand), &ty(DType::F32));
            let (rest, first) = steps.split_at(steps.len() - first);
            let launches = |steps: &[Step]| steps.iter().filter(|step| matches!(step, Step::Launch(_))).count();
            let copied = first.iter().map(|step| if let Step::Copy { bytes, .. } = step { *bytes } else { 0 }).sum();
            (launches(rest), launches(first), copied)
        };
        assert_eq!([steps(DType::F32, 64), steps(DType::F32, (1 << 29) + 4)], [(1, 0, 256), (2, 0, (1u64 << 31) + 16)]);
        assert_eq!([steps(DType::Bf16, 64), steps(DType::Bf16, (1 << 29) + 4)], [(1, 1, 0), (2, 2, 0)]);
    }

    #[test]
    fn a_unit_that_is_too_large_for_a_launch_is_refused() {
        let rows = |dtype: DType, columns: u64| {
            let ty = [TensorType::new(dtype, [3, columns])];
            select(&Softmax {}.into(), &ty, &ty)
                .map(|selection| selection.steps.len())
                .map_err(|error| error.to_string())
        };
        for dtype in [DType::Bf16, DType::F32] {
            assert_eq!(rows(dtype, (1 << 32) - 1), Ok(3));
            let error = rows(dtype, 1 << 32).unwrap_err();
            let words = format!("a kernel cannot see a part of {dtype}[3,4294967296], which has 2^32 elements or more");
            assert!(error.contains(&words), "{error}");
        }
    }

    /// Every unit once, in order; the count complete; beginnings aligned.
    fn check(cut: Cut, bytes: u64, limit: u64, expect: usize) {
        let ranges = cut.ranges(bytes, limit);
        assert_eq!(ranges.len(), expect, "{cut:?} {bytes} {limit}: {ranges:?}");
        let mut next = 0;
        for (first, count) in &ranges {
            assert_eq!(first * cut.per_unit, next, "{ranges:?}");
            assert!(*count > 0 && (*count).div_ceil(cut.per_unit) * bytes <= limit.max(bytes), "{ranges:?}");
            let step = (cut.per_block / cut.per_unit).max(STEP);
            let is_aligned = first.is_multiple_of(step) || bytes * step > limit || cut.axis > 0;
            assert!(is_aligned, "{ranges:?}");
            next += count;
        }
        assert_eq!(next, cut.count);
    }

    #[test]
    fn ranges_cover_every_unit_once() {
        check(Cut::vectors(1000, 256), 16, 1 << 31, 1);
        check(Cut::vectors(1000, 256), 16, 4096, 4);
        check(Cut::vectors(1000, 256), 16, 8191, 4);
        check(Cut::vectors(1000, 256), 16, 8192, 2);
        check(Cut::vectors(1025, 256), 0, 4096, 1);
        check(Cut::rows(160), 256, 64 * 256, 3);
        check(Cut::rows(160), 256, 100 * 256, 3);
        check(Cut::rows(5), 4096, 4096, 5);
        check(Cut::rows(5), 4096, 1, 5);
        // 49152 rows of 128256 bf16.
        check(Cut::rows(49_152), 2 * 128_256, LIMIT, 6);
        let chunks = Cut { per_unit: 16, per_block: 16, number: Some(0), axis: 1, ..Cut::rows(100) };
        check(chunks, 1024, 2048, 4);
        let grid = Cut { axis: 2, ..Cut::rows(200_000) };
        check(grid, 4, LIMIT, 4);
        let period = Cut { per_unit: 300, per_block: 256, number: Some(0), ..Cut::rows(3000) };
        check(period, 4800, 4800 * 64, 1);
        check(period, 4800, 4800 * 4, 3);
    }
}
