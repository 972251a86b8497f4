//! Launches over many small tensors.
//!
//! A kernel sees whole buffers and cannot follow addresses that it is told. But tensors of one arena lie
//! within reach of each other: of what one position of all rows (say, every parameter) is given, the kernel
//! gets the one with the lowest address, and per row how far from there its own begins. A table in device memory
//! says so, which is written once, when the program is loaded: however many rows there are, they are one launch,
//! and nothing is copied in a step.
//!
//! The table has a number for each block, where in the table its row is, and then the rows: the row's first block,
//! its distances and its own numbers. Where blocks do not belong to rows, it has the rows alone. It is the last
//! of the kernel's buffers; the kernel's unsigned scalars are how many rows there are and how many launches of the
//! table came before.

use super::kernel::{Arg, Kernel};
use shardc_ir::program::ALIGNMENT;
use std::sync::Arc;

/// One row: some tensors of an item, and what the kernel is to know of it.
#[derive(Clone, Debug)]
pub struct Row {
    /// A tensor per column.
    pub tensors: Vec<Arg>,
    /// The row's own numbers.
    pub numbers: Vec<u32>,
    /// How many blocks work on it.
    pub blocks: u32,
}

/// Launches of one kernel over rows.
#[derive(Clone, Debug)]
pub struct Table {
    /// The kernel.
    pub kernel: Arc<Kernel>,
    /// Per column, the bytes in which distances are counted.
    pub units: Vec<u64>,
    /// The rows.
    pub rows: Vec<Row>,
    /// The kernel's buffers beside the columns, which follow them.
    pub buffers: Vec<Arg>,
    /// Its f32 scalars.
    pub reals: Vec<f32>,
    /// The blocks of a launch, if they are not those of its rows one after the other.
    pub blocks: Option<u32>,
}

/// One launch of a table, at known addresses.
#[derive(Debug, PartialEq)]
pub struct TableLaunch {
    /// The addresses of the kernel's buffers but for the table, which is the last.
    pub buffers: Vec<u64>,
    /// The table.
    pub words: Vec<u32>,
    /// The kernel's unsigned scalars.
    pub numbers: [u32; 2],
    /// How many blocks.
    pub blocks: u32,
}

impl Table {
    /// The launches; `resolve` gives addresses. Rows that lie too far from each other are launched apart.
    pub fn launches(&self, resolve: impl Fn(Arg) -> u64) -> Vec<TableLaunch> {
        let addresses = |row: &Row| row.tensors.iter().map(|arg| resolve(*arg)).collect::<Vec<u64>>();
        let rows: Vec<(&Row, Vec<u64>)> = self.rows.iter().map(|row| (row, addresses(row))).collect();
        let mut launches: Vec<TableLaunch> = Vec::new();
        let mut rest = rows.as_slice();
        while !rest.is_empty() {
            let (now, later) = rest.split_at(self.reach(rest));
            launches.push(self.launch(now, launches.len() as u32, &resolve));
            rest = later;
        }
        launches
    }

    /// How many of the first rows one launch takes: 32 bits count the distance from the lowest address to every
    /// element, for a tensor of a row is smaller than half of what they count. A single row is in reach of itself.
    fn reach(&self, rows: &[(&Row, Vec<u64>)]) -> usize {
        let mut spans: Vec<(u64, u64)> = rows[0].1.iter().map(|at| (*at, *at)).collect();
        let near = |(_, tensors): &&(&Row, Vec<u64>)| {
            for ((low, high), at) in spans.iter_mut().zip(tensors) {
                (*low, *high) = ((*low).min(*at), (*high).max(*at));
            }
            spans.iter().zip(&self.units).all(|((low, high), unit)| (high - base(*low)) / unit < 1 << 31)
        };
        rows.iter().take_while(near).count().max(1)
    }

    fn launch(&self, rows: &[(&Row, Vec<u64>)], earlier: u32, resolve: &impl Fn(Arg) -> u64) -> TableLaunch {
        let lowest = |column: usize| rows.iter().map(|(_, tensors)| tensors[column]).min().map_or(0, base);
        let bases: Vec<u64> = (0..self.units.len()).map(lowest).collect();
        let all: u32 = rows.iter().map(|(row, _)| row.blocks).sum();
        let (mut map, mut words, mut first) = (Vec::new(), Vec::new(), 0);
        for (row, tensors) in rows {
            if self.blocks.is_none() {
                map.extend(std::iter::repeat_n(all + words.len() as u32, row.blocks as usize));
            }
            words.push(first);
            let distances = tensors.iter().zip(&bases).zip(&self.units).map(|((at, base), unit)| (at - base) / unit);
            words.extend(distances.map(|distance| distance as u32));
            words.extend(&row.numbers);
            first += row.blocks;
        }
        let buffers = bases.into_iter().chain(self.buffers.iter().map(|arg| resolve(*arg))).collect();
        let (words, blocks) = ([map, words].concat(), self.blocks.unwrap_or(all));
        TableLaunch { buffers, words, numbers: [rows.len() as u32, earlier], blocks }
    }
}

/// Where a column begins whose lowest tensor is here, at what any device takes for the beginning of a buffer: tensors may
/// be parts of others.
fn base(lowest: u64) -> u64 {
    lowest / ALIGNMENT * ALIGNMENT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_launched_together_within_reach_of_each_other() {
        let row = |tensor: usize, blocks: u32| Row {
            tensors: vec![Arg::Operand(tensor, 0), Arg::Result(tensor, 0)],
            numbers: vec![100 + tensor as u32],
            blocks,
        };
        let table = Table {
            kernel: Arc::new(Kernel::new("none", &[], 1, 32, &(), |_| {})),
            units: vec![16, 4],
            rows: vec![row(0, 2), row(1, 1), row(2, 5), row(3, 1)],
            buffers: vec![Arg::Scratch(8)],
            reals: Vec::new(),
            blocks: None,
        };
        let place = |arg: Arg, far: u64| match arg {
            Arg::Operand(index, _) => 4096 - 256 * index as u64,
            Arg::Result(1, _) => 1024 + far,
            Arg::Result(index, _) => 1024 + 256 * index as u64,
            Arg::Scratch(at) => 64 + at,
        };
        let at = |far: u64| table.launches(|arg| place(arg, far));
        let near = at(256);
        assert_eq!(near.len(), 1);
        assert_eq!((&near[0].buffers[..], near[0].blocks), (&[4096 - 768, 1024, 72][..], 9));
        // For nine blocks the row of each, and then four rows of four.
        let rows = [9, 9, 13, 17, 17, 17, 17, 17, 21];
        let of_rows = [[0, 48, 0, 100], [2, 32, 64, 101], [3, 16, 128, 102], [8, 0, 192, 103]];
        assert_eq!(near[0].words, [&rows[..], &of_rows.concat()].concat());
        assert_eq!(near[0].numbers, [4, 0]);
        // The second lies 16 GiB away.
        let far = at(1 << 34);
        assert_eq!(far.iter().map(|launch| launch.blocks).collect::<Vec<_>>(), [2, 1, 6]);
        assert_eq!(far.iter().map(|launch| launch.numbers).collect::<Vec<_>>(), [[1, 0], [1, 1], [2, 2]]);
        // Blocks that belong to no rows.
        let apart = Table { blocks: Some(5), ..table.clone() }.launches(|arg| place(arg, 256));
        assert_eq!((apart.len(), apart[0].blocks, &apart[0].words), (1, 5, &of_rows.concat()));
    }
}
