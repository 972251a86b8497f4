//! Storages that lie at even distances, so that products beside each other are one launch.
//!
//! A library multiplies a batch of matrices whose first bytes are equally far apart. So the storages that the
//! products of one instruction read, or make, at the same place are packed as one block, which lives as
//! long as any of them. A storage is in one block at most, that of the first instruction that asks; and those
//! of which one would live much longer than it needs to are in none: their products are launched one by one.

use crate::lower::draft::Draft;
use crate::pack::{Life, pack};
use shardc_ir::BufferId;
use shardc_ir::ops::Op;
use shardc_ir::program::{Action, Instruction};

/// The offset of every storage that has a life, and the bytes that all take together.
pub(super) fn place(draft: &Draft, lives: &[Option<Life>]) -> (Vec<u64>, u64) {
    let blocks = blocks(draft, lives);
    let life = |storage: &usize| lives[*storage];
    let whole = |block: &Vec<usize>| {
        let members = block.iter().filter_map(life);
        let distance = distance(block, lives);
        members.reduce(|a, b| Life { start: a.start.min(b.start), end: a.end.max(b.end), ..a }).map(
            |life| match block[..] {
                [_] => life,
                _ => Life { bytes: distance * block.len() as u64, ..life },
            },
        )
    };
    let placed: Vec<Life> = blocks.iter().filter_map(whole).collect();
    let (offsets, arena) = pack(&placed);
    let mut of_storage = vec![0; lives.len()];
    for (block, offset) in blocks.iter().zip(offsets) {
        let distance = distance(block, lives);
        for (index, storage) in block.iter().enumerate() {
            of_storage[*storage] = offset + index as u64 * distance;
        }
    }
    (of_storage, arena)
}

/// From one storage of a block to the next.
fn distance(block: &[usize], lives: &[Option<Life>]) -> u64 {
    block.iter().filter_map(|storage| lives[*storage]).map(|life| life.size()).max().unwrap_or(0)
}

/// The storages that have a life, each in one block, by their first storage.
fn blocks(draft: &Draft, lives: &[Option<Life>]) -> Vec<Vec<usize>> {
    let mut blocks: Vec<Vec<usize>> = Vec::new();
    let mut taken = vec![false; lives.len()];
    // A stage of a pipeline holds several copies of some.
    if draft.stage.is_none() {
        for item in draft.sections.iter().flatten() {
            for row in rows(&item.instruction) {
                let storages: Vec<usize> = row.iter().map(|id| draft.storage[*id].0 as usize).collect();
                let is_known = |storage: &usize| lives[*storage].is_some() && !taken[*storage];
                let mut apart = storages.clone();
                apart.sort_unstable();
                apart.dedup();
                if apart.len() == storages.len() && storages.iter().all(is_known) && live_alike(&storages, lives) {
                    storages.iter().for_each(|storage| taken[*storage] = true);
                    blocks.push(storages);
                }
            }
        }
    }
    let single = (0..lives.len()).filter(|storage| lives[*storage].is_some() && !taken[*storage]);
    blocks.extend(single.map(|storage| vec![storage]));
    blocks.sort_by_key(|block| block.iter().copied().min());
    blocks
}

/// Whether no storage lives for less than half of the time from the first to the last use of any.
fn live_alike(storages: &[usize], lives: &[Option<Life>]) -> bool {
    let known = || storages.iter().filter_map(|storage| lives[*storage]);
    let start = known().map(|life| life.start).min().unwrap_or(0);
    let end = known().map(|life| life.end).max().unwrap_or(0);
    known().all(|life| 2 * (life.end - life.start + 1) > end - start)
}

/// What an instruction reads and makes at the same place of each of its products.
fn rows(instruction: &Instruction) -> Vec<Vec<BufferId>> {
    let Action::Compute(Op::Fused(region)) = &instruction.action else { return Vec::new() };
    if !region.is_products() {
        return Vec::new();
    }
    let takes = region.steps[0].operands.len();
    let operand = |at: usize| region.steps.iter().map(|step| instruction.operands[step.operands[at]]).collect();
    let makes = region.steps[0].results.len();
    let result = |at: usize| instruction.results.iter().skip(at).step_by(makes.max(1)).copied().collect();
    (0..takes).map(operand).chain((0..makes).map(result)).collect()
}
