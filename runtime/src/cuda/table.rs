//! Launches over many small tensors.
//!
//! A kernel sees whole buffers and cannot follow addresses that it is told. But tensors of one arena lie
//! within reach of each other: of what one position of all rows (say, every parameter) is given, the kernel
//! gets the one with the lowest address, and per row how far from there its own begins. These numbers are
//! arguments of the launch, so no memory holds them and nothing is copied in a step.
//!
//! The kernel's unsigned scalars are first, for every slot, the first block of its row; then per column, for
//! every slot, the distance; then the rows' own numbers, column by column; and last how many rows there are
//! and how many launches of the table came before.

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
    /// How many rows a launch takes.
    pub slots: usize,
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
    /// The addresses of the kernel's buffers.
    pub buffers: Vec<u64>,
    /// Its unsigned scalars.
    pub numbers: Vec<u32>,
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
            let count = (1..=rest.len().min(self.slots)).take_while(|count| self.reaches(&rest[..*count])).count();
            // A single row is in reach of itself.
            let (now, later) = rest.split_at(count.max(1));
            launches.push(self.launch(now, launches.len() as u32, &resolve));
            rest = later;
        }
        launches
    }

    /// Where the tensors of each column begin, at what any device takes for the beginning of a buffer: they may be parts
    /// of others.
    fn bases(&self, rows: &[(&Row, Vec<u64>)]) -> Vec<u64> {
        let first = |column: usize| rows.iter().map(|(_, tensors)| tensors[column]).min().unwrap_or(0);
        let lowest = |column: usize| first(column) / ALIGNMENT * ALIGNMENT;
        (0..self.units.len()).map(lowest).collect()
    }

    /// Whether 32 bits count the distance from the lowest address to every element: a tensor of a row is
    /// smaller than half of what they count.
    fn reaches(&self, rows: &[(&Row, Vec<u64>)]) -> bool {
        let bases = self.bases(rows);
        let near = |tensors: &Vec<u64>| {
            let distances = tensors.iter().zip(&bases).zip(&self.units).map(|((at, base), unit)| (at - base) / unit);
            distances.into_iter().all(|distance| distance < 1 << 31)
        };
        rows.iter().all(|(_, tensors)| near(tensors))
    }

    fn launch(&self, rows: &[(&Row, Vec<u64>)], earlier: u32, resolve: &impl Fn(Arg) -> u64) -> TableLaunch {
        let bases = self.bases(rows);
        let mut first = 0;
        let mut numbers: Vec<u32> = Vec::new();
        // No block is as late as the rows that are not there.
        numbers.resize(self.slots, u32::MAX);
        for (slot, (row, _)) in rows.iter().enumerate() {
            numbers[slot] = first;
            first += row.blocks;
        }
        let slots = (0..self.slots).map(|slot| rows.get(slot));
        for (index, (base, unit)) in bases.iter().zip(&self.units).enumerate() {
            let distance = |(_, tensors): &(&Row, Vec<u64>)| ((tensors[index] - base) / unit) as u32;
            numbers.extend(slots.clone().map(|row| row.map_or(0, distance)));
        }
        for index in 0..rows.first().map_or(0, |(row, _)| row.numbers.len()) {
            numbers.extend(slots.clone().map(|row| row.map_or(0, |(row, _)| row.numbers[index])));
        }
        numbers.extend([rows.len() as u32, earlier]);
        let buffers = bases.into_iter().chain(self.buffers.iter().map(|arg| resolve(*arg))).collect();
        TableLaunch { buffers, numbers, blocks: self.blocks.unwrap_or(first) }
    }
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
            slots: 3,
            units: vec![16, 4],
            rows: vec![row(0, 2), row(1, 1), row(2, 5), row(3, 1)],
            buffers: vec![Arg::Scratch(8)],
            reals: Vec::new(),
            blocks: None,
        };
        let at = |far: u64| {
            table.launches(|arg| match arg {
                Arg::Operand(index, _) => 4096 - 256 * index as u64,
                Arg::Result(1, _) => 1024 + far,
                Arg::Result(index, _) => 1024 + 256 * index as u64,
                Arg::Scratch(at) => 64 + at,
            })
        };
        let near = at(256);
        assert_eq!(near.len(), 2);
        assert_eq!((&near[0].buffers[..], near[0].blocks), (&[4096 - 512, 1024, 72][..], 8));
        assert_eq!(near[0].numbers, [0, 2, 3, 32, 16, 0, 0, 64, 128, 100, 101, 102, 3, 0]);
        assert_eq!(near[1].numbers, [0, u32::MAX, u32::MAX, 0, 0, 0, 0, 0, 0, 103, 0, 0, 1, 1]);
        // The second lies 16 GiB away.
        let far = at(1 << 34);
        assert_eq!(far.iter().map(|launch| launch.blocks).collect::<Vec<_>>(), [2, 1, 6]);
    }
}
