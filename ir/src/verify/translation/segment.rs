//! Sections cut where stages meet, and what is known of each *segment* from its earlier runs.
//!
//! Between runs every fact names its microbatch. A run looks at what it reads as of its own microbatch, so
//! that of another is stale to it. If a segment, or one that is the same but for the names of its buffers (the
//! sections of a stage for the microbatches in flight are), has found the same before, so many microbatches
//! earlier, it leaves what that one left, so many later: it need not be interpreted again. The first and the
//! last microbatch are apart from the others, since sums begin and are complete there.

use super::interpret::Interpreter;
use super::state::{Content, Fact};
use super::stored::Stored;
use crate::entity::{BufferId, EntityRef, SectionId};
use crate::program::{Action, Instruction, Program, Run};
use crate::view::is_view;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

/// Instructions of a section that run without meeting another stage.
#[derive(Clone, Debug)]
pub(super) struct Segment {
    pub section: SectionId,
    pub range: Range<usize>,
    /// The buffers that it touches, in the order in which it first does.
    buffers: Vec<BufferId>,
    /// Of them, by their index, those whose contents it reads, and whether it leaves those as they are.
    reads: Vec<(usize, bool)>,
    /// Those that it writes, by their index.
    writes: Vec<usize>,
    /// Those of the written that are views of slots, and whether it writes over bytes of a slot.
    views: Vec<BufferId>,
    is_update: bool,
    /// Which of the known kinds it is.
    kind: usize,
}

/// Segments that are the same but for the names of their buffers.
#[derive(Clone, Debug, Default)]
pub(super) struct Kind {
    known: Vec<Known>,
    /// Of its instructions, the kernels and the changes of layout, once it was interpreted.
    counts: Option<[usize; 2]>,
    /// The segments of the kind that are counted.
    counted: BTreeSet<(SectionId, usize)>,
}

/// How many runs of a kind are remembered.
const REMEMBERED: usize = 8;

/// One run that was interpreted.
#[derive(Clone, Debug)]
struct Known {
    microbatch: u64,
    /// Whether it was the first, the second or one behind them; and whether it was the last.
    is_end: (u64, bool),
    found: Vec<Content>,
    left: Vec<Content>,
}

/// What tells kinds apart quickly: the number of instructions, and of the buffers touched.
type Size = (usize, usize, usize, usize);

/// The segments of every section of a stage, in order, and the number of kinds. `meets` says which
/// instructions stages meet at; they are in no segment.
pub(super) fn segments(
    programs: &[Program],
    meets: impl Fn(&Instruction) -> bool,
) -> (BTreeMap<SectionId, Vec<Segment>>, usize) {
    let mut all: BTreeMap<SectionId, Vec<Segment>> = BTreeMap::new();
    let Some(first) = programs.first() else { return (all, 0) };
    let mut kinds: Vec<Segment> = Vec::new();
    let mut by_size: HashMap<Size, Vec<usize>> = HashMap::new();
    for (section, body) in &first.sections {
        let own = all.entry(section).or_default();
        let mut from = 0;
        let ends = body.instructions.iter().enumerate().filter(|(_, instruction)| meets(instruction));
        for to in ends.map(|(at, _)| at).chain([body.instructions.len()]) {
            if from < to {
                let mut segment = Segment::new(first, section, from..to);
                let size = (to - from, segment.buffers.len(), segment.reads.len(), segment.writes.len());
                let alike = by_size.entry(size).or_default();
                let known = alike.iter().find(|kind| segment.is_like(&kinds[**kind], programs)).copied();
                segment.kind = known.unwrap_or(kinds.len());
                if known.is_none() {
                    alike.push(kinds.len());
                    kinds.push(segment.clone());
                }
                own.push(segment);
            }
            from = to + 1;
        }
    }
    let count = kinds.len();
    (all, count)
}

impl Segment {
    fn new(program: &Program, section: SectionId, range: Range<usize>) -> Self {
        let slots = Stored::of(program);
        let mut index: HashMap<BufferId, usize> = HashMap::new();
        let (buffers, reads, writes, views) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut all = Self { section, range, buffers, reads, writes, views, is_update: false, kind: 0 };
        let (mut is_read, mut is_written): (Vec<bool>, Vec<bool>) = (Vec::new(), Vec::new());
        for instruction in &program.sections[section].instructions[all.range.clone()] {
            for buffer in instruction.operands.iter().chain(&instruction.results) {
                index.entry(*buffer).or_insert_with(|| {
                    all.buffers.push(*buffer);
                    all.buffers.len() - 1
                });
            }
            is_read.resize(all.buffers.len(), false);
            is_written.resize(all.buffers.len(), false);
            let added = instruction.results.iter().filter(|_| instruction.action == Action::Accumulate);
            for at in instruction.operands.iter().chain(added).map(|buffer| index[buffer]) {
                if !is_written[at] && !is_read[at] {
                    is_read[at] = true;
                    all.reads.push((at, true));
                }
            }
            let is_view = is_view(&program.buffers, instruction);
            for buffer in &instruction.results {
                let (at, home) = (index[buffer], &program.buffers[*buffer]);
                if !is_written[at] {
                    is_written[at] = true;
                    all.writes.push(at);
                }
                all.is_update |= !is_view && slots.touches(home);
                if slots.is_home(home) {
                    all.views.push(*buffer);
                }
            }
            let mut scratch = instruction.scratch.iter();
            all.is_update |= scratch.any(|scratch| slots.touches(&program.buffers[*scratch]));
        }
        all.reads.iter_mut().for_each(|(at, is_kept)| *is_kept = !is_written[*at]);
        all
    }

    /// Whether it does the same on every rank, with other buffers of the same types.
    fn is_like(&self, other: &Self, programs: &[Program]) -> bool {
        let body = |segment: &Self, program: usize| {
            &programs[program].sections[segment.section].instructions[segment.range.clone()]
        };
        let name = |segment: &Self| {
            let buffers = segment.buffers.iter().enumerate();
            buffers.map(|(index, buffer)| (*buffer, index)).collect::<HashMap<_, _>>()
        };
        let (ours, theirs) = (name(self), name(other));
        let is_same = |(a, b): (&BufferId, &BufferId)| ours.get(a) == theirs.get(b);
        let all_same = |a: &[BufferId], b: &[BufferId]| a.len() == b.len() && a.iter().zip(b).all(is_same);
        let first = &programs[0];
        let is_like = |(a, b): (&Instruction, &Instruction)| {
            a.source == b.source && all_same(&a.operands, &b.operands) && all_same(&a.results, &b.results)
        };
        let mut types = self.buffers.iter().zip(&other.buffers);
        body(self, 0).iter().zip(body(other, 0)).all(is_like)
            && types.all(|(a, b)| first.buffers[*a].ty == first.buffers[*b].ty)
            && (0..programs.len())
                .all(|program| body(self, program).iter().zip(body(other, program)).all(|(a, b)| a.action == b.action))
    }
}

impl Interpreter<'_> {
    /// Runs a segment, or takes over what is known of it.
    pub fn run_segment(&mut self, run: Run, segment: &Segment) {
        let kind = &mut self.kinds[segment.kind];
        let (is_new, counts) = (kind.counted.insert((segment.section, segment.range.start)), kind.counts);
        if let Some([kernels, conversions]) = counts.filter(|_| is_new) {
            self.facts.kernels += kernels;
            self.facts.conversions += conversions;
        }
        let at = |index: usize| segment.buffers[index].index();
        let found: Vec<Content> = segment.reads.iter().map(|(index, _)| self.contents[at(*index)].clone()).collect();
        let now = run.microbatch;
        // Sums begin in the first two microbatches.
        let is_end = (now.min(2), now + 1 == self.plan.mesh.microbatches());
        let by = |known: &Known| now as i64 - known.microbatch as i64;
        let is_known = |known: &&Known| {
            known.is_end == is_end && found.iter().zip(&known.found).all(|(a, b)| a.is_later(by(known), b))
        };
        let known = self.kinds[segment.kind].known.iter().find(is_known).filter(|_| !segment.is_update);
        if let Some(known) = known {
            let left: Vec<Content> = known.left.iter().map(|content| content.later(by(known))).collect();
            for (index, content) in segment.writes.iter().zip(left) {
                self.contents[at(*index)] = content;
            }
            segment.views.iter().for_each(|view| self.note_stored(*view, true));
            return;
        }
        for ((index, _), content) in segment.reads.iter().zip(&found) {
            self.contents[at(*index)] = content.seen_in(now);
        }
        let before = [self.facts.kernels, self.facts.conversions];
        for index in segment.range.clone() {
            let of = (segment.kind, index - segment.range.start);
            self.step(run, (segment.section, index), of, counts.is_some());
        }
        let counts = counts.unwrap_or([self.facts.kernels - before[0], self.facts.conversions - before[1]]);
        for ((index, _), content) in segment.reads.iter().zip(&found).filter(|((_, is_kept), _)| *is_kept) {
            self.contents[at(*index)] = content.clone();
        }
        let time = self.time;
        let varies = |fact: &Fact| fact.arrangement.axes().any(|axis| time.contains(axis));
        let mut left = Vec::with_capacity(segment.writes.len());
        for index in &segment.writes {
            let content = &mut self.contents[at(*index)];
            *content = content.left_by(now, varies);
            left.push(content.clone());
        }
        let kind = &mut self.kinds[segment.kind];
        kind.counts = Some(counts);
        if kind.known.len() == REMEMBERED {
            kind.known.remove(0);
        }
        kind.known.push(Known { microbatch: now, is_end, found, left });
    }
}
