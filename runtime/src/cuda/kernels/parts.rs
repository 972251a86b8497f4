//! The sum of the parts that ranks have of a tensor.

use crate::cuda::kernel::{Elem, Lanes, Pack, PackF32};
use cubecl::prelude::*;

/// `y = own + slots`: what `ranks` ranks have, this one's at `own` and the others' in `slots`, each `stride` vectors
/// behind the one before; added in f32, in the order of the ranks, of which this one is number `index`.
#[cube]
pub fn sum_parts(
    own: &Array<Pack<0>>,
    slots: &Array<Pack<0>>,
    y: &mut Array<Pack<0>>,
    n: u32,
    stride: u32,
    #[comptime] ranks: usize,
    #[comptime] index: usize,
) {
    let at = ABSOLUTE_POS;
    if at < n as usize {
        let mut sum = PackF32::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            sum[lane] = 0.0f32;
        }
        #[unroll]
        for rank in 0..ranks {
            if comptime!(rank == index) {
                let a = own[at];
                #[unroll]
                for lane in 0..Lanes::value() {
                    sum[lane] += f32::cast_from(a[lane]);
                }
            } else {
                let place = comptime!(if rank < index { rank } else { rank - 1 });
                let a = slots[at + place * stride as usize];
                #[unroll]
                for lane in 0..Lanes::value() {
                    sum[lane] += f32::cast_from(a[lane]);
                }
            }
        }
        let mut out = Pack::<0>::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            out[lane] = Elem::<0>::cast_from(sum[lane]);
        }
        y[at] = out;
    }
}
