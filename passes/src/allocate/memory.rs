//! What the memory of a program is for, from change to change.

use crate::lower::draft::{Place, SPACE};
use shardc_ir::plan::{Category, Memory};
use shardc_ir::program::Action;
use shardc_ir::{BufferId, Bytes, Program, SectionId};
use std::collections::BTreeMap;

/// What the device memory of a rank is for at its peak. The total is the arena: what it has beyond the
/// bytes that live at the peak is reserved.
pub fn memory(program: &Program) -> Memory {
    memory_beside(program, &[])
}

/// As [`memory`], of a program of which all else is there that was left out as it was [abridged](super::Abridged).
pub(crate) fn memory_beside(program: &Program, held: &[BufferId]) -> Memory {
    let mut peak = Memory::default();
    follow(program, held, &mut |_, now| {
        if now.total() > peak.total() {
            peak = *now;
        }
    });
    peak.reserved = Bytes(program.arena(SPACE).0.saturating_sub(peak.total().0));
    peak
}

/// What the device memory of a rank holds: where it changes, the instruction (counted through all
/// sections) from which on it is so. Gaps between buffers do not count.
pub fn memory_over_time(program: &Program) -> Vec<(usize, Memory)> {
    let mut curve = Vec::new();
    follow(program, &[], &mut |at, now| curve.push((at, *now)));
    curve
}

/// Follows what the device memory of a rank holds from change to change, some of it through the whole loop.
fn follow(program: &Program, held: &[BufferId], each: &mut dyn FnMut(usize, &Memory)) {
    let mut lives: Vec<Option<(usize, usize)>> = vec![None; program.buffers.len()];
    let mut touch = |id: BufferId, at: usize| {
        let life = &mut lives[id.as_u32() as usize];
        *life = Some(life.map_or((at, at), |(start, end)| (start.min(at), end.max(at))));
    };
    let mut first = 0;
    // The sections of the loop, and whether a buffer is touched in more than one section.
    let mut repeated: Option<(usize, usize)> = None;
    let mut section_of: Vec<Option<SectionId>> = vec![None; program.buffers.len()];
    let mut crosses = vec![false; program.buffers.len()];
    for (id, section) in &program.sections {
        for (index, instruction) in section.instructions.iter().enumerate() {
            for buffer in instruction.buffers() {
                touch(buffer, first + index);
                let known = section_of[buffer.as_u32() as usize].replace(id);
                crosses[buffer.as_u32() as usize] |= known.is_some_and(|known| known != id);
            }
        }
        let last = (first + section.instructions.len()).saturating_sub(1);
        if ![Place::Prologue, Place::Epilogue].map(Place::name).contains(&section.name.as_str()) {
            repeated = Some((repeated.map_or(first, |(from, _)| from), last));
        }
        first += section.instructions.len();
    }
    let staging = program.staging().into_iter().map(|(_, buffer)| buffer);
    for id in program.slots.iter().map(|slot| slot.buffer).chain(staging) {
        touch(id, 0);
        touch(id, first);
    }
    program.readings.iter().for_each(|reading| touch(reading.buffer, first));
    if let Some((from, to)) = repeated {
        let accumulators = program.instructions().filter(|i| i.action == Action::Accumulate);
        for id in accumulators.flat_map(|i| &i.results).chain(held) {
            touch(*id, from);
            touch(*id, to);
        }
        for (life, crosses) in lives.iter_mut().zip(crosses) {
            let Some((start, end)) = life.as_mut() else { continue };
            if *start <= to && *end >= from && (crosses || *start < from || *end > to) {
                (*start, *end) = ((*start).min(from), (*end).max(to));
            }
        }
    }
    by_category(program, &lives, first + 2, each);
}

/// Follows the live buffers through the program, of which no time is later than the last; those that overlap are views of
/// each other.
fn by_category(
    program: &Program,
    lives: &[Option<(usize, usize)>],
    times: usize,
    each: &mut dyn FnMut(usize, &Memory),
) {
    let begin = ByTime::new(times, lives, |(start, _)| start);
    let end = ByTime::new(times, lives, |(_, end)| end + 1);
    let mut views = Views { program, live: BTreeMap::new(), now: Memory::default() };
    for time in 0..times {
        let (ends, begins) = (end.at(time), begin.at(time));
        ends.iter().for_each(|id| views.end(*id));
        begins.iter().for_each(|id| views.begin(*id));
        if !ends.is_empty() || !begins.is_empty() {
            each(time, &views.now);
        }
    }
}

/// Buffers by a time, those of one time in their order.
struct ByTime {
    /// Where those of each time begin.
    first: Vec<u32>,
    ids: Vec<BufferId>,
}

impl ByTime {
    fn new(times: usize, lives: &[Option<(usize, usize)>], time: impl Fn((usize, usize)) -> usize) -> Self {
        let all = || (0..).zip(lives).filter_map(|(id, life)| Some((BufferId::from_u32(id), time((*life)?))));
        let mut first = vec![0u32; times + 1];
        all().for_each(|(_, time)| first[time + 1] += 1);
        (0..times).for_each(|time| first[time + 1] += first[time]);
        let mut ids = vec![BufferId::from_u32(0); first[times] as usize];
        let mut next = first.clone();
        for (id, time) in all() {
            ids[next[time] as usize] = id;
            next[time] += 1;
        }
        Self { first, ids }
    }

    fn at(&self, time: usize) -> &[BufferId] {
        &self.ids[self.first[time] as usize..self.first[time + 1] as usize]
    }
}

/// The live buffers of a program, those that overlap together, by where they begin: each with where they end.
struct Views<'a> {
    program: &'a Program,
    live: BTreeMap<u64, (u64, Vec<BufferId>)>,
    /// What they are for.
    now: Memory,
}

impl Views<'_> {
    fn range(&self, id: BufferId) -> (u64, u64) {
        let buffer = &self.program.buffers[id];
        (buffer.offset, buffer.offset + buffer.ty.bytes().0.max(1))
    }

    fn begin(&mut self, id: BufferId) {
        let (start, end) = self.range(id);
        let below = self.live.range(..end).next_back();
        if below.is_none_or(|(_, (last, _))| *last <= start) {
            return self.add(start, end, vec![id]);
        }
        let mut ids = self.take(start, end);
        ids.push(id);
        self.put(ids);
    }

    fn end(&mut self, id: BufferId) {
        let (start, end) = self.range(id);
        let mut ids = self.take(start, end);
        ids.retain(|known| *known != id);
        self.put(ids);
    }

    /// Takes out all that overlap with a range.
    fn take(&mut self, start: u64, end: u64) -> Vec<BufferId> {
        let mut ids = Vec::new();
        while let Some((first, (last, _))) = self.live.range(..end).next_back()
            && *last > start
        {
            let first = *first;
            let Some((last, together)) = self.live.remove(&first) else { break };
            if let Some((category, bytes)) = self.counts(first, last, &together) {
                let held = self.now.category(category);
                *held = Bytes(held.0 - bytes);
            }
            match ids.is_empty() {
                true => ids = together,
                false => ids.extend(together),
            }
        }
        ids
    }

    /// Puts buffers back, those that overlap together.
    fn put(&mut self, mut ids: Vec<BufferId>) {
        ids.sort_unstable_by_key(|id| self.range(*id));
        let mut ids = ids.into_iter().peekable();
        while let Some(id) = ids.next() {
            let ((start, mut end), mut together) = (self.range(id), vec![id]);
            while let Some(next) = ids.next_if(|next| self.range(*next).0 < end) {
                end = end.max(self.range(next).1);
                together.push(next);
            }
            self.add(start, end, together);
        }
    }

    /// Adds some that overlap.
    fn add(&mut self, start: u64, end: u64, together: Vec<BufferId>) {
        if let Some((category, bytes)) = self.counts(start, end, &together) {
            *self.now.category(category) += Bytes(bytes);
        }
        self.live.insert(start, (end, together));
    }

    /// The bytes of some that overlap: for what the largest of them is.
    fn counts(&self, start: u64, end: u64, together: &[BufferId]) -> Option<(Category, u64)> {
        let buffers = together.iter().map(|id| &self.program.buffers[*id]);
        let largest = buffers.max_by_key(|buffer| buffer.ty.bytes())?;
        (largest.ty.bytes().0 > 0).then_some((largest.category, end - start))
    }
}
