//! Kernels that move elements: strided copies (transposes, slices, broadcasts, concatenations),
//! table lookups, gathers and their transposes; and the indices themselves.

use crate::cuda::kernel::{Elem, Lanes, Pack, PackF32};
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

/// Where vector `at` of the box is read, and where it is written.
#[cube]
fn places(at: u32, #[comptime] walk: Walk) -> (usize, usize) {
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
    (from.read() as usize, to.read() as usize)
}

/// Copies along a [`Walk`]; `n` is the number of vectors of its box.
#[cube]
pub fn strided(x: &Array<Pack<0>>, y: &mut Array<Pack<0>>, n: u32, #[comptime] walk: Walk) {
    let at = ABSOLUTE_POS as u32;
    if at < n {
        let (from, to) = places(at, walk);
        y[to] = x[from];
    }
}

/// A plane that is transposed: elements beside each other where they are read lie in a column where they are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Plane {
    /// The size along which elements lie together where they are read, and that along which they do where written.
    pub sizes: [u32; 2],
    /// The distance of elements along the second size where they are read, of those along the first where written.
    pub distances: [u32; 2],
    /// The sizes of the tile that a block moves.
    pub tile: [u32; 2],
    /// Elements by which a row of a tile is longer in shared memory, so that those of a column lie in different banks.
    pub padding: u32,
    /// Units of a block.
    pub units: u32,
}

impl Plane {
    fn pitch(&self) -> u32 {
        self.tile[0] + self.padding
    }

    /// Tiles along one of the sizes.
    pub fn tiles(&self, along: usize) -> u32 {
        self.sizes[along].div_ceil(self.tile[along])
    }

    fn steps(&self) -> u32 {
        self.tile[0] * self.tile[1] / self.units
    }
}

/// Copies planes along a [`Walk`] over them, each transposed, by tiles in shared memory.
#[cube]
pub fn transposed(x: &Array<Elem<0>>, y: &mut Array<Elem<0>>, #[comptime] walk: Walk, #[comptime] plane: Plane) {
    let mut tile = SharedMemory::<Elem<0>>::new(comptime!((plane.pitch() * plane.tile[1]) as usize));
    let block = CUBE_POS as u32;
    let (across, rest) = (block % comptime!(plane.tiles(0)), block / comptime!(plane.tiles(0)));
    let (down, rest) = (rest % comptime!(plane.tiles(1)), rest / comptime!(plane.tiles(1)));
    let (from, to) = places(rest, walk);
    let (first, second) = (across * comptime!(plane.tile[0]), down * comptime!(plane.tile[1]));
    #[unroll]
    for step in 0..comptime!(plane.steps()) {
        let at = UNIT_POS as u32 + comptime!(step * plane.units);
        let (a, b) = (at % comptime!(plane.tile[0]), at / comptime!(plane.tile[0]));
        let (i, j) = (first + a, second + b);
        if i < comptime!(plane.sizes[0]) && j < comptime!(plane.sizes[1]) {
            tile[(b * comptime!(plane.pitch()) + a) as usize] =
                x[from + (j * comptime!(plane.distances[0]) + i) as usize];
        }
    }
    sync_cube();
    #[unroll]
    for step in 0..comptime!(plane.steps()) {
        let at = UNIT_POS as u32 + comptime!(step * plane.units);
        let (b, a) = (at % comptime!(plane.tile[1]), at / comptime!(plane.tile[1]));
        let (i, j) = (first + a, second + b);
        if i < comptime!(plane.sizes[0]) && j < comptime!(plane.sizes[1]) {
            y[to + (i * comptime!(plane.distances[1]) + j) as usize] =
                tile[(b * comptime!(plane.pitch()) + a) as usize];
        }
    }
}

/// The same where a vector is one element that is read, as often as it has places.
#[cube]
pub fn spread(x: &Array<Elem<0>>, y: &mut Array<Pack<0>>, n: u32, #[comptime] walk: Walk) {
    let at = ABSOLUTE_POS as u32;
    if at < n {
        let (from, to) = places(at, walk);
        let value = x[from];
        let mut vector = Pack::<0>::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            vector[lane] = value;
        }
        y[to] = vector;
    }
}

/// Rows of `columns` elements as rows of so many vectors, which a number fills up.
#[cube]
pub fn lengthen(x: &Array<Elem<0>>, y: &mut Array<Pack<0>>, n: u32, columns: u32, vectors: u32, fill: f32) {
    let at = ABSOLUTE_POS as u32;
    if at < n {
        let (row, place) = (at / vectors, at % vectors * Lanes::value() as u32);
        let mut vector = Pack::<0>::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            let column = place + lane as u32;
            let from = row * columns + select(column < columns, column, 0u32);
            vector[lane] = select(column < columns, x[from as usize], Elem::<0>::cast_from(fill));
        }
        y[at as usize] = vector;
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

/// The row of a table that begins at `first` which a token names; `rows` if the table has no such row.
#[cube]
fn row_of(id: Elem<0>, rows: u32, first: u32) -> u32 {
    min(u32::cast_from(id) - first, rows)
}

/// Counts the tokens of `n` that name each row. `slots` is a number for each token that no other of its row has, below
/// their count: which one depends on timing.
#[cube]
pub fn count_tokens(
    ids: &Array<Elem<0>>,
    counts: &mut Array<Atomic<u32>>,
    slots: &mut Array<u32>,
    n: u32,
    rows: u32,
    first: u32,
) {
    let at = ABSOLUTE_POS as u32;
    if at < n {
        let row = row_of(ids[at as usize], rows, first);
        if row < rows {
            slots[at as usize] = counts[row as usize].fetch_add(1u32);
        }
    }
}

/// Gives every row as many places as it has tokens, from `starts[row]` on. The rows of a block lie behind each other, blocks
/// in the order in which they come: `cursor` starts at zero.
#[cube]
pub fn place_rows(
    counts: &Array<u32>,
    cursor: &mut Array<Atomic<u32>>,
    starts: &mut Array<u32>,
    rows: u32,
    #[comptime] threads: u32,
) {
    let mut sums = SharedMemory::<u32>::new(comptime!(threads as usize));
    let mut base = SharedMemory::<u32>::new(1usize);
    let (unit, row) = (UNIT_POS, ABSOLUTE_POS as u32);
    let own = select(row < rows, counts[min(row, rows - 1u32) as usize], 0u32);
    sums[unit as usize] = own;
    sync_cube();
    #[unroll]
    for step in 0..comptime!(threads.ilog2()) {
        let distance = comptime!(1u32 << step);
        let before = select(unit >= distance, sums[(max(unit, distance) - distance) as usize], 0u32);
        sync_cube();
        sums[unit as usize] += before;
        sync_cube();
    }
    if unit == comptime!(threads - 1) {
        base[0usize] = cursor[0usize].fetch_add(sums[unit as usize]);
    }
    sync_cube();
    if row < rows {
        starts[row as usize] = base[0usize] + sums[unit as usize] - own;
    }
}

/// Puts every token at the places of its row.
#[cube]
pub fn place_tokens(
    ids: &Array<Elem<0>>,
    slots: &Array<u32>,
    starts: &Array<u32>,
    placed: &mut Array<u32>,
    n: u32,
    rows: u32,
    first: u32,
) {
    let at = ABSOLUTE_POS as u32;
    if at < n {
        let row = row_of(ids[at as usize], rows, first);
        if row < rows {
            let place = starts[row as usize] + slots[at as usize];
            placed[place as usize] = at;
        }
    }
}

/// Puts the tokens of each row in their own order, whatever that is in which they were `placed`: a token's place is
/// the number of those before it.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn order_tokens(
    ids: &Array<Elem<0>>,
    counts: &Array<u32>,
    starts: &Array<u32>,
    placed: &Array<u32>,
    order: &mut Array<u32>,
    n: u32,
    rows: u32,
    first: u32,
) {
    let at = ABSOLUTE_POS as u32;
    if at < n {
        let row = row_of(ids[at as usize], rows, first);
        if row < rows {
            let start = starts[row as usize];
            let place = RuntimeCell::<u32>::new(start);
            for other in start..start + counts[row as usize] {
                if placed[other as usize] < at {
                    place.store(place.read() + 1u32);
                }
            }
            order[place.read() as usize] = at;
        }
    }
}

/// The transpose of `embedding`: a row of the table's gradient is the sum, in f32 and in their order, of the rows of `dy`
/// of the tokens that name it; or it is added to what is there, so that rows without a token are not touched. Block `b`
/// makes `each` of the `rows` rows from row `b * each` on; `columns` counts vectors.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn embedding_grad(
    dy: &Array<Pack<0>>,
    order: &Array<u32>,
    starts: &Array<u32>,
    counts: &Array<u32>,
    table: &mut Array<PackF32>,
    rows: u32,
    columns: u32,
    #[comptime] each: usize,
    #[comptime] threads: u32,
    #[comptime] adds: bool,
) {
    let (rows, columns) = (rows as usize, columns as usize);
    let first = CUBE_POS_X as usize * each;
    let column = CUBE_POS_Y as usize * comptime!(threads as usize) + UNIT_POS as usize;
    let mut froms = Sequence::<u32>::new();
    let mut sizes = Sequence::<u32>::new();
    #[unroll]
    for index in 0..each {
        let row = min(first + index, rows - 1);
        froms.push(starts[row]);
        sizes.push(counts[row]);
    }
    // The first token's row of every row is on its way before the first one is made.
    let mut heads = Sequence::<Pack<0>>::new();
    #[unroll]
    for index in 0..each {
        let from = *froms.index(index);
        let token = RuntimeCell::<u32>::new(u32::new(0));
        if *sizes.index(index) > 0u32 {
            token.store(order[from as usize]);
        }
        heads.push(dy[token.read() as usize * columns + min(column, columns - 1)]);
    }
    #[unroll]
    for index in 0..each {
        let row = first + index;
        if column < columns && row < rows {
            let (size, at) = (*sizes.index(index), row * columns + column);
            let from = *froms.index(index);
            if size > 0u32 {
                let mut total = PackF32::empty();
                if comptime!(adds) {
                    let before = table[at];
                    let sum = sum_of_tokens(dy, order, *heads.index(index), from + 1u32, from + size, columns, column);
                    #[unroll]
                    for lane in 0..Lanes::value() {
                        total[lane] = before[lane] + sum[lane];
                    }
                    table[at] = total;
                } else {
                    table[at] =
                        sum_of_tokens(dy, order, *heads.index(index), from + 1u32, from + size, columns, column);
                }
            } else if comptime!(!adds) {
                let mut zeros = PackF32::empty();
                #[unroll]
                for lane in 0..Lanes::value() {
                    zeros[lane] = 0.0f32;
                }
                table[at] = zeros;
            }
        }
    }
}

/// The sum of a vector of `dy` and those of the tokens `order[first .. end]`, in this order.
#[cube]
fn sum_of_tokens(
    dy: &Array<Pack<0>>,
    order: &Array<u32>,
    head: Pack<0>,
    first: u32,
    end: u32,
    columns: usize,
    column: usize,
) -> PackF32 {
    let mut sum = PackF32::empty();
    #[unroll]
    for lane in 0..Lanes::value() {
        sum[lane] = 0.0f32 + f32::cast_from(head[lane]);
    }
    let at = RuntimeCell::<u32>::new(first);
    // Eight rows are on their way while one is added.
    while at.read() + 8u32 <= end {
        #[unroll]
        for ahead in 0..8u32 {
            let d = dy[order[(at.read() + ahead) as usize] as usize * columns + column];
            #[unroll]
            for lane in 0..Lanes::value() {
                sum[lane] += f32::cast_from(d[lane]);
            }
        }
        at.store(at.read() + 8u32);
    }
    while at.read() < end {
        // Behind the last it is the last again, and is not added.
        #[unroll]
        for ahead in 0..4u32 {
            let token = at.read() + ahead;
            let d = dy[order[min(token, end - 1u32) as usize] as usize * columns + column];
            #[unroll]
            for lane in 0..Lanes::value() {
                sum[lane] += select(token < end, f32::cast_from(d[lane]), 0.0f32);
            }
        }
        at.store(at.read() + 4u32);
    }
    sum
}

/// `y[o, j, i] = x[o, index[o, j, i], i]`, with `size` elements of `x` and `count` of `y` along the
/// middle dimension. An index that `x` does not have gives 0.
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
        if chosen < size {
            y[at as usize] = x[((outer * size + chosen) * inner + at % inner) as usize];
        } else {
            y[at as usize] = Elem::<0>::cast_from(0u32);
        }
    }
}

/// The transpose of `gather`: adds to `dx`, which starts at zero. A thread adds all that goes to one of the
/// `n` lines along the middle dimension, in order.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn scatter_add(
    dy: &Array<Elem<0>>,
    index: &Array<Elem<1>>,
    dx: &mut Array<Elem<2>>,
    n: u32,
    size: u32,
    count: u32,
    inner: u32,
) {
    let at = ABSOLUTE_POS as u32;
    if at < n {
        let from = (at / inner) * count * inner + at % inner;
        let to = (at / inner) * size * inner + at % inner;
        for step in 0..count {
            let next = (from + step * inner) as usize;
            let chosen = u32::cast_from(index[next]);
            if chosen < size {
                dx[(to + chosen * inner) as usize] += Elem::<2>::cast_from(dy[next]);
            }
        }
    }
}

/// `y[i] = (i / inner) % size + start`
#[cube]
pub fn iota(y: &mut Array<Elem<0>>, n: u32, inner: u32, size: u32, start: u32) {
    let at = ABSOLUTE_POS;
    if at < n as usize {
        y[at] = Elem::<0>::cast_from((at as u32 / inner) % size + start);
    }
}
