//! Kernels that move elements: strided copies (transposes, slices, broadcasts, concatenations),
//! table lookups, gathers and their transposes.

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

/// Sorts each `part` tokens of `n` by the rows that they name, those of one row in their own order: a token's
/// place is the number of tokens of its part before it. `keys` are the rows in that order, `order` the tokens.
/// All tokens of a part are compared with all, a tile of `threads` at a time; `part` is a multiple of it.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn token_order(
    ids: &Array<Elem<0>>,
    keys: &mut Array<u32>,
    order: &mut Array<u32>,
    n: u32,
    rows: u32,
    first: u32,
    #[comptime] part: u32,
    #[comptime] threads: u32,
) {
    let mut tile = SharedMemory::<u32>::new(comptime!(threads as usize));
    let unit = UNIT_POS;
    let block = CUBE_POS as u32;
    let own = block * comptime!(threads) + unit;
    let key = row_of(ids[min(own, n - 1u32) as usize], rows, first);
    let place = RuntimeCell::<u32>::new(u32::new(0));
    let start = own / comptime!(part) * comptime!(part);
    let begin = start / comptime!(threads);
    let end = (min(start + comptime!(part), n) + comptime!(threads - 1)) / comptime!(threads);
    for index in begin..end {
        let at = index * comptime!(threads) + unit;
        let other = row_of(ids[min(at, n - 1u32) as usize], rows, first);
        // Behind the last token stands a row that comes after all.
        tile[unit as usize] = select(at < n, other, 0xFFFF_FFFFu32);
        sync_cube();
        if index == block {
            for other in 0..comptime!(threads) {
                let row = tile[other as usize];
                if row < key || (row == key && other < unit) {
                    place.store(place.read() + 1u32);
                }
            }
        } else {
            // Tokens of an earlier tile come first where the rows are equal.
            let bound = key + select(index < block, 1u32, 0u32);
            for other in 0..comptime!(threads) {
                if tile[other as usize] < bound {
                    place.store(place.read() + 1u32);
                }
            }
        }
        sync_cube();
    }
    if own < n {
        keys[(start + place.read()) as usize] = key;
        order[(start + place.read()) as usize] = own;
    }
}

/// How many of the ascending `keys[first .. last]` are below `bound`.
#[cube]
fn count_below(keys: &Array<u32>, first: u32, last: u32, bound: u32) -> u32 {
    let low = RuntimeCell::<u32>::new(first);
    let high = RuntimeCell::<u32>::new(last);
    while low.read() < high.read() {
        let middle = (low.read() + high.read()) / 2u32;
        if keys[middle as usize] < bound {
            low.store(middle + 1u32);
        } else {
            high.store(middle);
        }
    }
    low.read() - first
}

/// Merges what [`token_order()`] made of each `part` tokens: a token's place is the sum of those in all parts, of which
/// earlier ones come first where the rows are equal.
#[cube]
pub fn merge_order(
    sorted_keys: &Array<u32>,
    sorted: &Array<u32>,
    keys: &mut Array<u32>,
    order: &mut Array<u32>,
    n: u32,
    #[comptime] part: u32,
) {
    let at = ABSOLUTE_POS as u32;
    if at < n {
        let key = sorted_keys[at as usize];
        let own = at / comptime!(part);
        let place = RuntimeCell::<u32>::new(at - own * comptime!(part));
        for other in 0..(n + comptime!(part - 1)) / comptime!(part) {
            if other != own {
                let first = other * comptime!(part);
                let bound = key + select(other < own, 1u32, 0u32);
                place.store(place.read() + count_below(sorted_keys, first, min(first + comptime!(part), n), bound));
            }
        }
        keys[place.read() as usize] = key;
        order[place.read() as usize] = sorted[at as usize];
    }
}

/// `starts[row]` is where the first of `n` ascending keys lies that is not below `row`, for each row up to
/// and with `rows`.
#[cube]
pub fn first_of_each(keys: &Array<u32>, starts: &mut Array<u32>, n: u32, rows: u32) {
    let row = ABSOLUTE_POS as u32;
    if row <= rows {
        starts[row as usize] = count_below(keys, 0u32, n, row);
    }
}

/// The transpose of `embedding`: a row of the table's gradient is the sum, in f32 and in their order, of the rows of `dy`
/// of the tokens that name it; or it is added to what is there, so that rows without a token are not touched. Block `b`
/// makes `each` of the `rows` rows from row `b * each` on; `columns` counts vectors.
#[cube]
pub fn embedding_grad(
    dy: &Array<Pack<0>>,
    order: &Array<u32>,
    starts: &Array<u32>,
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
    let mut bounds = Array::<u32>::new(comptime!(each + 1));
    #[unroll]
    for index in 0..comptime!(each + 1) {
        bounds[index] = starts[min(first + index, rows)];
    }
    #[unroll]
    for index in 0..each {
        let row = first + index;
        if column < columns && row < rows {
            let (from, to, at) = (bounds[index], bounds[index + 1], row * columns + column);
            if comptime!(adds) {
                if from < to {
                    let sum = sum_of_tokens(dy, order, from, to, columns, column);
                    let before = table[at];
                    let mut total = PackF32::empty();
                    #[unroll]
                    for lane in 0..Lanes::value() {
                        total[lane] = before[lane] + sum[lane];
                    }
                    table[at] = total;
                }
            } else {
                table[at] = sum_of_tokens(dy, order, from, to, columns, column);
            }
        }
    }
}

/// The sum of the rows of `dy` of the tokens `order[first .. end]`, a vector of it.
#[cube]
fn sum_of_tokens(
    dy: &Array<Pack<0>>,
    order: &Array<u32>,
    first: u32,
    end: u32,
    columns: usize,
    column: usize,
) -> PackF32 {
    let mut sum = PackF32::empty();
    #[unroll]
    for lane in 0..Lanes::value() {
        sum[lane] = 0.0f32;
    }
    let at = RuntimeCell::<u32>::new(first);
    // Four rows are on their way while one is added.
    while at.read() + 4u32 <= end {
        #[unroll]
        for ahead in 0..4u32 {
            let d = dy[order[(at.read() + ahead) as usize] as usize * columns + column];
            #[unroll]
            for lane in 0..Lanes::value() {
                sum[lane] += f32::cast_from(d[lane]);
            }
        }
        at.store(at.read() + 4u32);
    }
    while at.read() < end {
        let d = dy[order[at.read() as usize] as usize * columns + column];
        #[unroll]
        for lane in 0..Lanes::value() {
            sum[lane] += f32::cast_from(d[lane]);
        }
        at.store(at.read() + 1u32);
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
    dx: &mut Array<f32>,
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
                dx[(to + chosen * inner) as usize] += f32::cast_from(dy[next]);
            }
        }
    }
}
