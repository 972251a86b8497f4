//! Kernels that move elements: strided copies (transposes, slices, broadcasts, concatenations),
//! table lookups, gathers and their transposes.

use crate::cuda::kernel::{Elem, Lanes, Pack};
use cubecl::prelude::*;

/// A walk over a box of vectors: where each is read and where it is written.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Walk {
    /// The sizes of the box, outermost first.
    pub shape: Vec<u32>,
    /// Per dimension, the distance between elements that are read.
    pub read: Vec<u32>,
    /// Where the first is read.
    pub read_start: u32,
    /// Per dimension, the distance between elements that are written.
    pub write: Vec<u32>,
    /// Where the first is written.
    pub write_start: u32,
}

/// Copies along a [`Walk`]; `n` is the number of vectors of its box.
#[cube]
pub fn strided(x: &Array<Pack<0>>, y: &mut Array<Pack<0>>, n: u32, #[comptime] walk: Walk) {
    let at = ABSOLUTE_POS as u32;
    if at < n {
        let rest = RuntimeCell::<u32>::new(at);
        let from = RuntimeCell::<u32>::new(u32::cast_from(comptime!(walk.read_start)));
        let to = RuntimeCell::<u32>::new(u32::cast_from(comptime!(walk.write_start)));
        #[unroll]
        for back in 0..comptime!(walk.shape.len()) {
            let dim = comptime!(walk.shape.len() - 1 - back);
            let size = comptime!(walk.shape[dim]);
            let read = comptime!(walk.read[dim]);
            let write = comptime!(walk.write[dim]);
            let index = rest.read() % size;
            rest.store(rest.read() / size);
            from.store(from.read() + index * read);
            to.store(to.read() + index * write);
        }
        y[to.read() as usize] = x[from.read() as usize];
    }
}

/// Rows of a table: block `b` copies row `ids[b] - first`, or zeros if there is none. `columns`
/// counts vectors.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn embedding(
    table: &Array<Pack<0>>,
    ids: &Array<Elem<1>>,
    y: &mut Array<Pack<0>>,
    rows: u32,
    columns: u32,
    first: u32,
    #[comptime] threads: u32,
) {
    let columns = columns as usize;
    let block = CUBE_POS as usize;
    let id = u32::cast_from(ids[block]) - first;
    let at = RuntimeCell::<usize>::new(UNIT_POS as usize);
    while at.read() < columns {
        if id < rows {
            y[block * columns + at.read()] = table[id as usize * columns + at.read()];
        } else {
            y[block * columns + at.read()] = Pack::<0>::cast_from(0.0f32);
        }
        at.store(at.read() + comptime!(threads as usize));
    }
}

/// The transpose of `embedding`: adds row `b` of `dy` to row `ids[b] - first` of the table's
/// gradient, which starts at zero. Sums of rows that share an id are in no fixed order.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn embedding_grad(
    dy: &Array<Pack<0>>,
    ids: &Array<Elem<1>>,
    table: &mut Array<Atomic<f32>>,
    rows: u32,
    columns: u32,
    first: u32,
    #[comptime] threads: u32,
) {
    let columns = columns as usize;
    let block = CUBE_POS as usize;
    let id = u32::cast_from(ids[block]) - first;
    if id < rows {
        let at = RuntimeCell::<usize>::new(UNIT_POS as usize);
        while at.read() < columns {
            let d = dy[block * columns + at.read()];
            #[unroll]
            for lane in 0..Lanes::value() {
                let to = (id as usize * columns + at.read()) * Lanes::value() + lane;
                table[to].fetch_add(f32::cast_from(d[lane]));
            }
            at.store(at.read() + comptime!(threads as usize));
        }
    }
}

/// `y[o, j, i] = x[o, index[o, j, i], i]`, with `size` elements of `x` and `count` of `y` along the
/// middle dimension.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn gather(
    x: &Array<Elem<0>>,
    index: &Array<Elem<1>>,
    y: &mut Array<Elem<0>>,
    n: u32,
    size: u32,
    count: u32,
    inner: u32,
) {
    let at = ABSOLUTE_POS as u32;
    if at < n {
        let outer = at / (count * inner);
        let chosen = u32::cast_from(index[at as usize]);
        y[at as usize] = x[((outer * size + chosen) * inner + at % inner) as usize];
    }
}

/// The transpose of `gather`: adds to `x`, which starts at zero.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn scatter_add(
    dy: &Array<Elem<0>>,
    index: &Array<Elem<1>>,
    dx: &mut Array<Atomic<f32>>,
    n: u32,
    size: u32,
    count: u32,
    inner: u32,
) {
    let at = ABSOLUTE_POS as u32;
    if at < n {
        let outer = at / (count * inner);
        let chosen = u32::cast_from(index[at as usize]);
        dx[((outer * size + chosen) * inner + at % inner) as usize].fetch_add(f32::cast_from(dy[at as usize]));
    }
}
