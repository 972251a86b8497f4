//! The sum of the parts that ranks have of a tensor.

use super::{THREADS, lanes};
use crate::cuda::kernel::{Arg, Kernel, Launch, Pack};
use crate::cuda::kernels::parts as kernels;
use shardc_ir::DType;
use std::sync::Arc;

/// The launch that adds so many elements of the rank at place `index` of `ranks` and of the others, each of which has a
/// slot of so many bytes. Its buffers are operands: the rank's own, those of the first slot, and the sums; they begin
/// at these bytes.
pub fn sum_parts(dtype: DType, elements: u64, slot: u64, places: [u64; 3], (ranks, index): (usize, usize)) -> Launch {
    let [own, slots, sums] = places.map(|at| at / dtype.size());
    let width = lanes(&[dtype], &[elements, own, slots, sums]);
    let (n, stride) = ((elements / width as u64) as u32, (slot / (dtype.size() * width as u64)) as u32);
    let kernel = Kernel::new("sum_parts", &[dtype], width, THREADS, &(ranks, index), move |d| {
        let (own, slots, y) = (d.input::<Pack<0>>(), d.input::<Pack<0>>(), d.output::<Pack<0>>());
        let (n, stride) = (d.number(), d.number());
        kernels::sum_parts::expand(d.scope(), own, slots, y, n, stride, ranks, index);
    });
    let buffers = (0..3).map(|index| Arg::Operand(index, 0)).collect();
    let grid = [n.div_ceil(THREADS), 1, 1];
    Launch { kernel: Arc::new(kernel), buffers, numbers: vec![n, stride], reals: Vec::new(), grid }
}
