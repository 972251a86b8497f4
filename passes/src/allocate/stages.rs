//! The memory of a pipeline's stage: several microbatches are in flight at a time.
//!
//! What one pass of a chunk leaves for another, or receives for it, has as many *copies* as there are microbatches
//! between the two passes at a time, by the stage's own order of steps. Microbatch `m` takes copy `m` modulo their
//! number. Sections are instantiated accordingly: a section of a pass for each of the copies, and with the messages
//! that are sent beside it. What a pass makes and uses up alone has one copy, since a section runs when the one before
//! it is done.

use super::{Abridged, Bytes, Life, find_waits};
use crate::divisors::at_least;
use crate::lower::draft::{Draft, Handover, Item, SPACE, StageDraft};
use crate::pipeline::order::{Pass, Step};
use crate::pipeline::timeline::{Event, Message, PARTS};
use rustc_hash::FxHashMap;
use shardc_ir::program::ALIGNMENT;
use shardc_ir::program::{Action, Buffer, Instruction, Run, Section, Stream};
use shardc_ir::{BufferId, Program, SectionId};
use std::collections::{BTreeMap, BTreeSet};

/// How many copies a storage has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Kind {
    /// One, which lives in a single section.
    #[default]
    Local,
    /// One, which lives through the whole step or loop.
    Whole,
    /// So many, for as many microbatches.
    Slots(u64),
}

/// The copies of every storage; those of a draft without stages are one each.
#[derive(Clone, Debug, Default)]
pub(crate) struct Copies {
    kinds: Vec<Kind>,
    /// Per part, how often its section is instantiated.
    variants: Vec<u64>,
}

/// Where in the loop a storage is touched.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Touches {
    parts: BTreeSet<usize>,
    /// Links, and whether it is sent.
    links: BTreeSet<(usize, bool)>,
    /// Whether something outside of the loop touches it.
    is_outside: bool,
}

impl Copies {
    /// Counts the copies that the stage's order of steps needs.
    pub fn of(draft: &Draft) -> Self {
        let Some(stage) = &draft.stage else { return Self::default() };
        let mut touches = vec![Touches::default(); draft.storages as usize];
        let count = draft.sections.len();
        for (section, items) in draft.sections.iter().enumerate() {
            for buffer in items.iter().flat_map(|item| item.instruction.buffers()) {
                let touches = &mut touches[draft.storage[buffer].0 as usize];
                match section {
                    0 => touches.is_outside = true,
                    _ if section + 1 == count => touches.is_outside = true,
                    _ => drop(touches.parts.insert(section - 1)),
                }
            }
        }
        for message in &stage.messages {
            let touches = &mut touches[draft.storage[message.buffer].0 as usize];
            touches.links.insert((message.link, message.is_send));
        }
        let outside = draft.slots.iter().map(|slot| slot.buffer).chain(draft.staging());
        for buffer in outside.chain(draft.readings.iter().map(|reading| reading.buffer)) {
            touches[draft.storage[buffer].0 as usize].is_outside = true;
        }
        let times = Times::of(&stage.events, &stage.parts);
        let mut known: BTreeMap<Touches, Kind> = BTreeMap::new();
        for touches in &touches {
            known.entry(touches.clone()).or_insert_with(|| match touches.parts.len() + touches.links.len() {
                _ if touches.is_outside => Kind::Whole,
                0 | 1 => Kind::Local,
                _ => Kind::Slots(times.under_way(touches, draft.microbatches)),
            });
        }
        let mut bytes: BTreeMap<&Touches, u64> = BTreeMap::new();
        for (touches, size) in touches.iter().zip(draft.storage_bytes()) {
            *bytes.entry(touches).or_default() += size;
        }
        let variants = round(&mut known, &bytes, stage.parts.len());
        Self { kinds: touches.iter().map(|touches| known[touches]).collect(), variants }
    }

    fn kind(&self, storage: usize) -> Kind {
        self.kinds.get(storage).copied().unwrap_or_default()
    }

    /// What has several copies, or crosses a border of sections, lives through the whole loop.
    pub fn keep(&self, lives: &mut [Option<Life>], (first, last): (usize, usize)) {
        for (life, kind) in lives.iter_mut().zip(&self.kinds) {
            let Some(life) = life else { continue };
            let copies = match kind {
                Kind::Local => continue,
                Kind::Whole if life.end < first || life.start > last => continue,
                Kind::Whole => 1,
                Kind::Slots(copies) => *copies,
            };
            let each = life.bytes.next_multiple_of(ALIGNMENT);
            let bytes = if copies > 1 { copies * each } else { life.bytes };
            *life = Life { start: life.start.min(first), end: life.end.max(last), bytes };
        }
    }
}

/// Fewer sections are worth so many times the bytes.
const SPARE: f64 = 1.005;

/// Makes the numbers of copies of what one section touches divide one [number](common), so that few sections are
/// needed; gives it for each part.
fn round(known: &mut BTreeMap<Touches, Kind>, bytes: &BTreeMap<&Touches, u64>, parts: usize) -> Vec<u64> {
    // Parts that touch the same copies, by their first.
    let mut of: Vec<usize> = (0..parts).collect();
    for touches in known.iter().filter(|(_, kind)| matches!(kind, Kind::Slots(2..))).map(|(touches, _)| touches) {
        let Some(least) = touches.parts.iter().map(|part| of[*part]).min() else { continue };
        let joined: Vec<usize> = touches.parts.iter().map(|part| of[*part]).collect();
        of.iter_mut().filter(|other| joined.contains(other)).for_each(|other| *other = least);
    }
    let mut held: BTreeMap<usize, Vec<(&mut u64, u64)>> = BTreeMap::new();
    for (touches, kind) in known.iter_mut() {
        if let (Kind::Slots(copies), Some(part)) = (kind, touches.parts.first()) {
            let each = bytes.get(touches).copied().unwrap_or(0);
            held.entry(of[*part]).or_default().push((copies, each));
        }
    }
    let mut all = BTreeMap::new();
    for (part, held) in &mut held {
        let taken: Vec<(u64, u64)> = held.iter().map(|(copies, each)| (**copies, *each)).collect();
        let number = common(&taken);
        held.iter_mut().for_each(|(copies, _)| **copies = at_least(**copies, number));
        all.insert(*part, number);
    }
    of.iter().map(|first| all.get(first).copied().unwrap_or(1)).collect()
}

/// The number that numbers of copies are made divisors of, each with the bytes of one: of those up to twice the most
/// copies, the least that takes hardly more bytes than any.
pub(crate) fn common(held: &[(u64, u64)]) -> u64 {
    let mut bytes: BTreeMap<u64, u64> = BTreeMap::new();
    for (copies, each) in held {
        *bytes.entry(*copies).or_default() += each;
    }
    let most = bytes.last_key_value().map_or(1, |(copies, _)| *copies);
    let taken = |all: u64| bytes.iter().map(|(least, each)| at_least(*least, all) * each).sum::<u64>();
    let all: Vec<(u64, u64)> = (most..=2 * most).map(|all| (all, taken(all))).collect();
    let fewest = all.iter().map(|(_, bytes)| *bytes).min().unwrap_or(0) as f64;
    all.into_iter().find(|(_, bytes)| *bytes as f64 <= SPARE * fewest).map_or(most, |(all, _)| all)
}

/// When the stage touches what, as indices of its events.
struct Times {
    steps: FxHashMap<(usize, u64), usize>,
    messages: FxHashMap<(usize, bool, u64), usize>,
}

impl Times {
    fn of(events: &[Event], parts: &[(u32, Pass)]) -> Self {
        let mut times = Self { steps: FxHashMap::default(), messages: FxHashMap::default() };
        for (at, event) in events.iter().enumerate() {
            let mut note = |message: &Message| {
                times.messages.insert((message.link, message.is_send, message.microbatch), at);
            };
            match event {
                Event::Exchange(messages) => messages.iter().for_each(&mut note),
                Event::Step(step, beside) => {
                    beside.iter().for_each(|beside| note(&beside.message));
                    if let Some(part) = part_of(parts, *step) {
                        times.steps.insert((part, step.microbatch), at);
                    }
                }
            }
        }
        times
    }

    /// How many microbatches are between the first and the last touch at a time, at most.
    fn under_way(&self, touches: &Touches, microbatches: u64) -> u64 {
        let span = |microbatch: u64| {
            let steps = touches.parts.iter().filter_map(|part| self.steps.get(&(*part, microbatch)));
            let messages =
                touches.links.iter().filter_map(|(link, sent)| self.messages.get(&(*link, *sent, microbatch)));
            let at: Vec<usize> = steps.chain(messages).copied().collect();
            Some((*at.iter().min()?, *at.iter().max()?))
        };
        under_way(&(0..microbatches).filter_map(span).collect::<Vec<_>>())
    }
}

/// How many microbatches there are at a time at most, each from its first to its last touch.
pub(crate) fn under_way(spans: &[(usize, usize)]) -> u64 {
    let fits = |copies: &usize| spans.iter().zip(spans.iter().skip(*copies)).all(|(a, b)| a.1 < b.0);
    (1..=spans.len().max(1)).find(fits).unwrap_or(1) as u64
}

fn part_of(parts: &[(u32, Pass)], step: Step) -> Option<usize> {
    parts.iter().position(|part| *part == (step.chunk, step.pass))
}

/// A program in the making.
struct Assembly<'a> {
    draft: &'a Draft,
    copies: &'a Copies,
    program: Program,
    /// Buffers of the program, by those of the draft and the copy.
    made: FxHashMap<(BufferId, u64), BufferId>,
    /// Bytes of one copy of each storage.
    sizes: Vec<u64>,
    /// What a message of each link hands over, by whether it is sent, in the order of the values.
    handovers: BTreeMap<(usize, bool), Vec<&'a Handover>>,
    /// A section of each [likeness](Assembly::likeness): what waits for what is the same in all.
    alike: BTreeMap<Variant, SectionId>,
}

/// What tells the sections of one part from each other: the copy, and the messages beside: where, which and of
/// which copies.
type Variant = (Option<(usize, u64)>, Vec<(u32, usize, bool, Vec<u64>)>);

/// Sections, runs and waits of a stage; if they are abridged, sections that are alike stand once.
pub(super) fn assemble(
    draft: &Draft,
    stage: &StageDraft,
    arena: Bytes,
    copies: &Copies,
    is_abridged: bool,
) -> Abridged {
    let program = Program { rank: draft.rank, ranks: draft.mesh.ranks(), ..Program::default() };
    let sizes = draft.storage_bytes().into_iter().map(|bytes| bytes.next_multiple_of(ALIGNMENT)).collect();
    let mut handovers: BTreeMap<(usize, bool), Vec<&Handover>> = BTreeMap::new();
    for handover in &stage.messages {
        handovers.entry((handover.link, handover.is_send)).or_default().push(handover);
    }
    let (made, alike) = (FxHashMap::default(), BTreeMap::new());
    let mut assembly = Assembly { draft, copies, program, made, sizes, handovers, alike };
    let last = draft.sections.len() - 1;
    assembly.whole("prologue", &draft.sections[0]);
    let mut sections: BTreeMap<Variant, SectionId> = BTreeMap::new();
    for event in &stage.events {
        let variant = assembly.variant(event);
        let microbatch = if let Event::Step(step, _) = event { step.microbatch } else { 0 };
        let key = if is_abridged { assembly.likeness(event, &variant) } else { variant.clone() };
        let known = sections.get(&key).copied();
        let section = known.or_else(|| {
            let instructions = assembly.instructions(event);
            (!instructions.is_empty()).then(|| assembly.named(event, &variant, instructions, sections.len()))
        });
        let Some(section) = section else { continue };
        sections.insert(key, section);
        assembly.program.order.push(Run { section, microbatch });
    }
    assembly.whole("epilogue", &draft.sections[last]);
    let slots = draft.slots.iter().cloned();
    assembly.program.slots =
        slots.map(|slot| shardc_ir::program::Slot { buffer: assembly.buffer(slot.buffer, 0), ..slot }).collect();
    let readings = draft.readings.iter().cloned();
    assembly.program.readings = readings
        .map(|reading| shardc_ir::program::Reading { buffer: assembly.buffer(reading.buffer, 0), ..reading })
        .collect();
    let held = if is_abridged { assembly.held() } else { Vec::new() };
    let mut program = assembly.program;
    program.arenas = vec![(SPACE, arena)];
    program.groups = draft.groups.clone();
    program.inputs = draft.inputs.clone();
    Abridged { program, held }
}

impl<'a> Assembly<'a> {
    /// The buffer of a copy.
    fn buffer(&mut self, id: BufferId, copy: u64) -> BufferId {
        if let Some(known) = self.made.get(&(id, copy)) {
            return *known;
        }
        let storage = self.draft.storage[id].0 as usize;
        let of = &self.draft.buffers[id];
        let offset = match self.copies.kind(storage) {
            // All buffers of a storage are of one size, but for those that are parts of it.
            Kind::Slots(_) => of.offset + copy * self.sizes[storage],
            _ => of.offset,
        };
        let made = self.program.buffers.push(Buffer { offset, ..of.clone() });
        self.made.insert((id, copy), made);
        made
    }

    /// All copies that microbatches take of what has several.
    fn held(&mut self) -> Vec<BufferId> {
        let known: BTreeSet<BufferId> = self.made.keys().map(|(id, _)| *id).collect();
        let mut held = Vec::new();
        for id in known {
            if let Kind::Slots(copies) = self.copies.kind(self.draft.storage[id].0 as usize) {
                let taken = copies.min(self.draft.microbatches);
                held.extend((0..taken).map(|copy| self.buffer(id, copy)));
            }
        }
        held
    }

    /// Which copy of a buffer a microbatch takes, in a part or outside of all.
    fn copy(&self, id: BufferId, part: Option<usize>, microbatch: u64) -> u64 {
        match self.copies.kind(self.draft.storage[id].0 as usize) {
            Kind::Slots(copies) => microbatch % copies,
            // Sections of one pass share these bytes, but each has buffers of its own.
            Kind::Local => part.map_or(0, |_| self.program.sections.len() as u64),
            Kind::Whole => 0,
        }
    }

    fn instruction(&mut self, instruction: &Instruction, part: Option<usize>, microbatch: u64) -> Instruction {
        let mut own = instruction.clone();
        for id in own.operands.iter_mut().chain(&mut own.results).chain(&mut own.scratch) {
            let copy = self.copy(*id, part, microbatch);
            *id = self.buffer(*id, copy);
        }
        own
    }

    fn message(&mut self, message: &Handover, microbatch: u64) -> Instruction {
        let copy = self.copy(message.buffer, None, microbatch);
        let buffer = self.buffer(message.buffer, copy);
        let (peer, stream) = (message.peer, Stream::Messages);
        match message.is_send {
            true => Instruction::new(Action::Send { peer }, vec![buffer], vec![], stream),
            false => Instruction::new(Action::Receive { peer }, vec![], vec![buffer], stream),
        }
    }

    fn handovers(&self, message: &Message) -> &[&'a Handover] {
        self.handovers.get(&(message.link, message.is_send)).map_or(&[], Vec::as_slice)
    }

    fn variant(&self, event: &Event) -> Variant {
        let parts = self.draft.stage.as_ref().map_or(&[][..], |stage| &stage.parts);
        let of = |at: u32, message: &Message| {
            let handovers = self.handovers(message).iter();
            let copies = handovers.map(|other| self.copy(other.buffer, None, message.microbatch)).collect();
            (at, message.link, message.is_send, copies)
        };
        match event {
            Event::Exchange(messages) => (None, messages.iter().map(|message| of(0, message)).collect()),
            Event::Step(step, beside) => {
                let part = part_of(parts, *step).unwrap_or_default();
                let copy = step.microbatch % self.copies.variants[part];
                (Some((part, copy)), beside.iter().map(|beside| of(beside.at, &beside.message)).collect())
            }
        }
    }

    /// What tells sections from each other in which other instructions wait for each other: as [`Assembly::variant`], but of
    /// the copies only which are the same. For copies lie apart from each other and from all else of the loop.
    fn likeness(&self, event: &Event, (part, messages): &Variant) -> Variant {
        let mut seen: BTreeMap<u32, Vec<u64>> = BTreeMap::new();
        let (part, own) = match (part, event) {
            (Some((part, _)), Event::Step(step, _)) => (Some((*part, 0)), Some(step.microbatch)),
            _ => (None, None),
        };
        let mut renamed = |handover: &Handover, copy: u64| {
            let storage = self.draft.storage[handover.buffer];
            let own = || own.map(|microbatch| self.copy(handover.buffer, None, microbatch));
            let seen = seen.entry(storage.0).or_insert_with(|| own().into_iter().collect());
            let at = seen.iter().position(|known| *known == copy).unwrap_or_else(|| {
                seen.push(copy);
                seen.len() - 1
            });
            at as u64
        };
        let messages = messages.iter().map(|(at, link, is_send, copies)| {
            let handovers = self.handovers.get(&(*link, *is_send)).into_iter().flatten();
            let copies = handovers.zip(copies).map(|(handover, copy)| renamed(handover, *copy)).collect();
            (*at, *link, *is_send, copies)
        });
        (part, messages.collect())
    }

    /// The instructions of an event: those of the part, with the messages among them.
    fn instructions(&mut self, event: &Event) -> Vec<Instruction> {
        let draft = self.draft;
        let parts = draft.stage.as_ref().map_or(&[][..], |stage| &stage.parts);
        let mut all = Vec::new();
        let pass_on = |own: &mut Self, all: &mut Vec<Instruction>, message: &Message| {
            for index in 0..own.handovers(message).len() {
                let handover = own.handovers(message)[index];
                all.push(own.message(handover, message.microbatch));
            }
        };
        match event {
            Event::Exchange(messages) => messages.iter().for_each(|message| pass_on(self, &mut all, message)),
            Event::Step(step, beside) => {
                let Some(part) = part_of(parts, *step) else { return all };
                let items: &[Item] = &draft.sections[1 + part];
                all.reserve_exact(items.len() + beside.len());
                let mut beside = beside.iter().peekable();
                for (index, item) in items.iter().enumerate() {
                    let is_here = |at: u32| items.len() * at as usize <= index * PARTS as usize;
                    while let Some(beside) = beside.next_if(|beside| is_here(beside.at)) {
                        pass_on(self, &mut all, &beside.message);
                    }
                    all.push(self.instruction(&item.instruction, Some(part), step.microbatch));
                }
                beside.for_each(|beside| pass_on(self, &mut all, &beside.message));
            }
        }
        all
    }

    /// Adds a section; `number` tells sections of one pass and copy apart.
    fn named(
        &mut self,
        event: &Event,
        variant: &Variant,
        mut instructions: Vec<Instruction>,
        number: usize,
    ) -> SectionId {
        let name = match event {
            Event::Exchange(_) => format!("exchange.{number}"),
            Event::Step(step, beside) => {
                let pass = match step.pass {
                    Pass::Forward => "forward",
                    Pass::Backward => "backward",
                    Pass::Weight => "weight",
                };
                let copy = variant.0.map_or(0, |(_, copy)| copy);
                let sends = if beside.is_empty() { String::new() } else { format!(".{number}") };
                format!("{pass}.{}.{copy}{sends}", step.chunk)
            }
        };
        let likeness = self.likeness(event, variant);
        match self.alike.get(&likeness) {
            Some(other) => {
                let waits = self.program.sections[*other].instructions.iter().map(|other| &other.after);
                instructions.iter_mut().zip(waits).for_each(|(own, after)| own.after.clone_from(after));
            }
            None => find_waits(&self.program.buffers, &mut instructions),
        }
        let section = self.program.sections.push(Section { name, instructions });
        self.alike.entry(likeness).or_insert(section);
        section
    }

    /// Adds a section that runs once, unless it is empty.
    fn whole(&mut self, name: &str, items: &[Item]) {
        let mut instructions: Vec<_> = items.iter().map(|item| self.instruction(&item.instruction, None, 0)).collect();
        if !instructions.is_empty() {
            find_waits(&self.program.buffers, &mut instructions);
            let section = self.program.sections.push(Section { name: name.to_string(), instructions });
            self.program.order.push(Run { section, microbatch: 0 });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_small_is_copied_once_more_rather_than_what_is_large() {
        let copies = |held: &[(u64, u64)]| {
            let number = common(held);
            held.iter().map(|of| at_least(of.0, number)).collect::<Vec<_>>()
        };
        assert_eq!(copies(&[(3, 1000), (4, 1)]), [3, 6]);
        assert_eq!(copies(&[(3, 1000), (4, 1000)]), [4, 4]);
        // Fewer sections are worth a little.
        assert_eq!(copies(&[(4, 1000), (3, 1)]), [4, 4]);
        assert_eq!(copies(&[(2, 1), (0, 1)]), [2, 0]);
        assert!(copies(&[]).is_empty());
    }
}
