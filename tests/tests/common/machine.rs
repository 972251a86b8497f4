//! Executes the programs of all ranks in one thread, over real arenas, with nothing taken on trust: what a program
//! may not rely on is spoilt, so that a program that does gives other results.
//!
//! * Streams are interleaved in any order that `after` allows, so a wait that is missing shows.
//! * Arenas hold garbage, and after each step again, but for slots.
//! * Scratch memory is garbage before and after its instruction. So is what an instruction reads where it writes, but
//!   where it is made for that.
//! * Collectives and messages wait for all who take part; who waits in vain is an error.

use shardc_ir::ops::{Binary, BinaryKind, Cast};
use shardc_ir::plan::Space;
use shardc_ir::program::{Action, Buffer, Instruction, Slot};
use shardc_ir::view::is_view;
use shardc_ir::{BufferId, Bytes, DType, HostTensor, Op, OpDef, Program, ReduceKind, SectionId, TensorType};
use shardc_runtime::cpu::interpret::compute_op;
use std::collections::{BTreeMap, BTreeSet};

pub type Tensors = BTreeMap<String, HostTensor>;

/// No number that a test computes: -391.5 in f32 and in bf16, far outside of any table as an index.
const GARBAGE: u8 = 0xc3;

/// Which stream goes on where several could.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ahead {
    /// Kernels as far as they may.
    Compute,
    /// Collectives and messages as far as they may.
    Communication,
    /// Any.
    Random(u64),
}

/// The ranks of a run.
pub struct Machine<'a> {
    programs: &'a [Program],
    arenas: Vec<BTreeMap<Space, Vec<u8>>>,
}

/// Where ranks meet: the ranks of a group, or the two ends of a message.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Meeting {
    Group(Vec<u64>),
    Message(u64, u64),
}

/// How far a rank has come.
struct Progress {
    run: usize,
    /// Of the instructions of the run, which are done, and which wait at a meeting.
    done: Vec<bool>,
    waits: Vec<bool>,
    /// How many streams the run has.
    streams: usize,
}

/// An instruction of a rank that may start.
type Candidate = (usize, usize);

impl<'a> Machine<'a> {
    pub fn new(programs: &'a [Program]) -> Self {
        let arena = |(space, bytes): &(Space, Bytes)| (*space, vec![GARBAGE; bytes.0 as usize]);
        Self { programs, arenas: programs.iter().map(|program| program.arenas.iter().map(arena).collect()).collect() }
    }

    /// Writes every slot from whole leaves: the cast of a parameter that is none of them is made from it.
    pub fn write_slots(&mut self, leaves: &Tensors) -> Result<(), String> {
        for rank in 0..self.programs.len() {
            for slot in &self.programs[rank].slots {
                let held = stored(slot, leaves)?.part(&slot.slice);
                let buffer = &self.programs[rank].buffers[slot.buffer].ty;
                self.write(rank, slot.buffer, &held.filled(buffer).bytes)?;
            }
        }
        Ok(())
    }

    /// Every slot, put together from the parts of all ranks, which must agree where they hold the same.
    pub fn slots(&self) -> Result<Tensors, String> {
        let (mut wholes, mut parts) = (Tensors::new(), BTreeMap::new());
        for (rank, program) in self.programs.iter().enumerate() {
            for slot in &program.slots {
                let part = self.read(rank, slot.buffer).beginning(&slot.part());
                let known = parts.entry((&slot.name, &slot.slice)).or_insert_with(|| part.clone());
                if *known != part {
                    return Err(format!("`{}` differs between ranks", slot.name));
                }
                let whole = wholes.entry(slot.name.clone()).or_insert_with(|| HostTensor::zeros(slot.ty.clone()));
                whole.set_part(&slot.slice, &part);
            }
        }
        Ok(wholes)
    }

    /// Runs one step; gives the readings, on which all ranks must agree.
    pub fn step(&mut self, inputs: &Tensors, ahead: Ahead) -> Result<Tensors, String> {
        self.spoil();
        let mut random = match ahead {
            Ahead::Random(seed) => seed,
            _ => 0,
        };
        let mut ranks: Vec<Progress> = self.programs.iter().map(Progress::new).collect();
        let mut arrived: BTreeMap<Meeting, BTreeMap<u64, (SectionId, usize)>> = BTreeMap::new();
        loop {
            let ready: Vec<Candidate> =
                (0..ranks.len()).flat_map(|rank| ranks[rank].ready(&self.programs[rank], rank)).collect();
            let stream = |(rank, at): &Candidate| ranks[*rank].instructions(&self.programs[*rank])[*at].stream;
            let next = match ahead {
                Ahead::Compute => ready.iter().copied().min_by_key(stream),
                Ahead::Communication => ready.iter().copied().max_by_key(stream),
                Ahead::Random(_) if ready.is_empty() => None,
                Ahead::Random(_) => {
                    random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    Some(ready[(random >> 33) as usize % ready.len()])
                }
            };
            let Some((rank, at)) = next else { break };
            let (program, run) = (&self.programs[rank], self.programs[rank].order[ranks[rank].run]);
            let instruction = &program.sections[run.section].instructions[at];
            match meeting(program, instruction) {
                None => {
                    self.local(rank, instruction, run.microbatch, inputs)?;
                    ranks[rank].finish(program, at);
                }
                Some(meeting) => {
                    ranks[rank].waits[at] = true;
                    let entries = arrived.entry(meeting.clone()).or_default();
                    entries.insert(program.rank, (run.section, at));
                    if entries.len() == meeting.ranks().len() {
                        let entries = arrived.remove(&meeting).unwrap_or_default();
                        self.meet(&meeting, &entries)?;
                        for (rank, (_, at)) in entries {
                            ranks[rank as usize].finish(&self.programs[rank as usize], at);
                        }
                    }
                }
            }
        }
        if let Some(rank) = (0..ranks.len()).find(|rank| ranks[*rank].run < self.programs[*rank].order.len()) {
            return Err(format!("rank {rank} waits forever: {:?}", arrived.keys().collect::<Vec<_>>()));
        }
        self.readings()
    }

    fn readings(&self) -> Result<Tensors, String> {
        let mut readings = Tensors::new();
        for (rank, program) in self.programs.iter().enumerate() {
            for reading in &program.readings {
                let value = self.read(rank, reading.buffer);
                let known = readings.entry(reading.name.clone()).or_insert_with(|| value.clone());
                if *known != value {
                    return Err(format!("`{}` differs between ranks", reading.name));
                }
            }
        }
        Ok(readings)
    }

    /// Garbage everywhere but in slots.
    fn spoil(&mut self) {
        for (program, arenas) in self.programs.iter().zip(&mut self.arenas) {
            let old = arenas.clone();
            arenas.values_mut().for_each(|arena| arena.fill(GARBAGE));
            for slot in &program.slots {
                let home = &program.buffers[slot.buffer];
                let range = home.offset as usize..home.end() as usize;
                if let Some(arena) = arenas.get_mut(&home.space) {
                    arena[range.clone()].copy_from_slice(&old[&home.space][range]);
                }
            }
        }
    }

    fn read(&self, rank: usize, id: BufferId) -> HostTensor {
        let buffer = &self.programs[rank].buffers[id];
        let (start, length) = (buffer.offset as usize, buffer.ty.bytes().0 as usize);
        HostTensor { ty: buffer.ty.clone(), bytes: self.arenas[rank][&buffer.space][start..start + length].to_vec() }
    }

    fn write(&mut self, rank: usize, id: BufferId, bytes: &[u8]) -> Result<(), String> {
        let buffer = &self.programs[rank].buffers[id];
        if bytes.len() as u64 != buffer.ty.bytes().0 {
            return Err(format!("{} bytes are written to {id}, which is {}", bytes.len(), buffer.ty));
        }
        let arena = self.arenas[rank].get_mut(&buffer.space).ok_or("there is no such arena")?;
        arena[buffer.offset as usize..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    /// The operands of an instruction as it finds them, once what it writes before it has read it is spoilt.
    fn operands(&mut self, rank: usize, instruction: &Instruction) -> Result<Vec<HostTensor>, String> {
        let program = &self.programs[rank];
        let results = instruction.results.iter().enumerate().map(|(index, id)| (Some(index), id));
        for (index, target) in results.chain(instruction.scratch.iter().map(|id| (None, id))) {
            let mut operands = instruction.operands.iter().enumerate();
            let may_stay = |(position, operand): (usize, &BufferId)| {
                let places = [&program.buffers[*operand], &program.buffers[*target]];
                !places[0].overlaps(places[1])
                    || index.is_some_and(|index| in_place(program, instruction, places, [position, index]))
            };
            if !operands.all(may_stay) {
                self.write(rank, *target, &vec![GARBAGE; program.buffers[*target].ty.bytes().0 as usize])?;
            }
        }
        Ok(instruction.operands.iter().map(|id| self.read(rank, *id)).collect())
    }

    /// An instruction that no other rank takes part in.
    fn local(&mut self, rank: usize, of: &Instruction, microbatch: u64, inputs: &Tensors) -> Result<(), String> {
        let program = &self.programs[rank];
        if is_view(&program.buffers, of) {
            return Ok(());
        }
        let own = self.operands(rank, of)?;
        let types: Vec<TensorType> = of.results.iter().map(|id| program.buffers[*id].ty.clone()).collect();
        let results: Vec<HostTensor> = match &of.action {
            Action::Compute(op) => compute_op(op, &own, &types).map_err(|error| error.to_string())?,
            Action::Copy => own,
            Action::Accumulate if microbatch == 0 => vec![cast(&own[0], types[0].dtype)?],
            Action::Accumulate => vec![combine(&[&self.read(rank, of.results[0]), &own[0]], ReduceKind::Sum)?],
            Action::Feed { input } => {
                let feed = &program.inputs[*input];
                let whole = inputs.get(&feed.name).filter(|whole| whole.ty == feed.ty);
                let whole = whole.ok_or_else(|| format!("`{}` is not given", feed.name))?;
                vec![whole.part(feed.slices.get(microbatch as usize).ok_or("there is no such microbatch")?)]
            }
            other => return Err(format!("{} is carried out by several ranks", other.name())),
        };
        self.finish(rank, of, results)
    }

    fn finish(&mut self, rank: usize, instruction: &Instruction, results: Vec<HostTensor>) -> Result<(), String> {
        if let Some(scratch) = instruction.scratch {
            let bytes = self.programs[rank].buffers[scratch].ty.bytes().0 as usize;
            self.write(rank, scratch, &vec![GARBAGE; bytes])?;
        }
        let mut pairs = instruction.results.iter().zip(results);
        pairs.try_for_each(|(id, result)| self.write(rank, *id, &result.bytes))
    }

    /// A collective, or a message, of ranks that all have come.
    fn meet(&mut self, meeting: &Meeting, entries: &BTreeMap<u64, (SectionId, usize)>) -> Result<(), String> {
        let programs = self.programs;
        let of = |rank: &u64| {
            let (section, at) = entries[rank];
            &programs[*rank as usize].sections[section].instructions[at]
        };
        let members = match meeting {
            Meeting::Message(from, to) => {
                let sent = self.operands(*from as usize, of(from))?;
                return self.finish(*to as usize, of(to), sent);
            }
            Meeting::Group(members) => members,
        };
        let mut all = Vec::with_capacity(members.len());
        for rank in members {
            all.push(self.operands(*rank as usize, of(rank))?);
        }
        let shape = |place: usize| {
            let types = all[place].iter().map(|tensor| (tensor.ty.dtype, tensor.ty.elements())).collect::<Vec<_>>();
            (same_action(&of(&members[place]).action), types)
        };
        if let Some(other) = (1..members.len()).find(|place| shape(*place) != shape(0)) {
            return Err(format!("{:?} meets {:?}", shape(0), shape(other)));
        }
        for (place, rank) in members.iter().enumerate() {
            let made = (0..all[place].len()).map(|index| {
                let terms: Vec<&HostTensor> = all.iter().map(|operands| &operands[index]).collect();
                collective(&of(rank).action, &terms, place)
            });
            let made = made.collect::<Result<Vec<_>, _>>()?;
            self.finish(*rank as usize, of(rank), made)?;
        }
        Ok(())
    }
}

impl Progress {
    fn new(program: &Program) -> Self {
        let mut progress = Self { run: 0, done: Vec::new(), waits: Vec::new(), streams: 0 };
        progress.enter(program);
        progress
    }

    /// Sections without instructions are over at once.
    fn enter(&mut self, program: &Program) {
        while self.run < program.order.len() && self.instructions(program).is_empty() {
            self.run += 1;
        }
        let count = self.instructions(program).len();
        (self.done, self.waits) = (vec![false; count], vec![false; count]);
        self.streams = self.instructions(program).iter().map(|of| of.stream).collect::<BTreeSet<_>>().len();
    }

    fn instructions<'a>(&self, program: &'a Program) -> &'a [Instruction] {
        program.order.get(self.run).map_or(&[], |run| &program.sections[run.section].instructions)
    }

    /// The instructions that may start: each the first of its stream, and of those that meet the same ranks.
    fn ready(&self, program: &Program, rank: usize) -> Vec<Candidate> {
        let (mut blocked, mut meetings, mut ready) = (Vec::new(), Vec::new(), Vec::new());
        for (at, instruction) in self.instructions(program).iter().enumerate().filter(|(at, _)| !self.done[*at]) {
            let is_first = !blocked.contains(&instruction.stream);
            let meeting = meeting(program, instruction);
            let may = !self.waits[at] && is_first && meeting.as_ref().is_none_or(|of| !meetings.contains(of));
            if may && instruction.after.iter().all(|other| self.done[*other]) {
                ready.push((rank, at));
            }
            blocked.extend(is_first.then_some(instruction.stream));
            if blocked.len() == self.streams {
                break;
            }
            meetings.extend(meeting);
        }
        ready
    }

    fn finish(&mut self, program: &Program, at: usize) {
        self.done[at] = true;
        if self.done.iter().all(|done| *done) {
            self.run += 1;
            self.enter(program);
        }
    }
}

impl Meeting {
    fn ranks(&self) -> Vec<u64> {
        match self {
            Self::Group(ranks) => ranks.clone(),
            Self::Message(from, to) => vec![*from, *to],
        }
    }
}

fn meeting(program: &Program, instruction: &Instruction) -> Option<Meeting> {
    match instruction.action {
        Action::Send { peer } => Some(Meeting::Message(program.rank, peer)),
        Action::Receive { peer } => Some(Meeting::Message(peer, program.rank)),
        _ => instruction.action.group().map(|group| Meeting::Group(program.groups[group].clone())),
    }
}

/// The tensor of which a slot holds a part.
fn stored(slot: &Slot, leaves: &Tensors) -> Result<HostTensor, String> {
    let given = leaves.get(&slot.name).cloned();
    let whole = match (given, &slot.cast_of) {
        (Some(given), _) => given,
        (None, Some(of)) => cast(leaves.get(of).ok_or_else(|| format!("`{of}` is not given"))?, slot.ty.dtype)?,
        (None, None) => return Err(format!("`{}` is not given", slot.name)),
    };
    if whole.ty == slot.ty { Ok(whole) } else { Err(format!("`{}` is {}, not {}", slot.name, whole.ty, slot.ty)) }
}

/// Whether an instruction reads each element of an operand before it writes that of a result in its place.
fn in_place(
    program: &Program,
    instruction: &Instruction,
    [from, to]: [&Buffer; 2],
    [position, index]: [usize; 2],
) -> bool {
    let is_same = from.offset == to.offset && from.ty.bytes() == to.ty.bytes();
    let part = |group: usize, bytes: Bytes| {
        let place = program.groups[group].iter().position(|rank| *rank == program.rank);
        place.unwrap_or_default() as u64 * bytes.0
    };
    let is_own = position == index;
    match &instruction.action {
        Action::Compute(Op::Each(each)) => {
            let counts = [instruction.operands.len(), instruction.results.len()];
            let of_item = counts[0] / each.count;
            is_same && each.is_one_item(counts, [position, index]) && each.op.may_overwrite(position % of_item, of_item)
        }
        Action::Compute(op) => {
            is_same && from.ty.shape == to.ty.shape && op.may_overwrite(position, instruction.operands.len())
        }
        Action::AllReduce { .. } => is_same && is_own,
        Action::AllGather { group } => is_own && from.offset == to.offset + part(*group, from.ty.bytes()),
        Action::ReduceScatter { group, .. } => is_own && to.offset == from.offset + part(*group, to.ty.bytes()),
        _ => false,
    }
}

/// An action without the index of its group, which is each rank's own.
fn same_action(action: &Action) -> (&'static str, Option<ReduceKind>) {
    match action {
        Action::AllReduce { reduce, .. } | Action::ReduceScatter { reduce, .. } => (action.name(), Some(*reduce)),
        other => (other.name(), None),
    }
}

/// What the member at a place of a group gets of the operands of all.
fn collective(action: &Action, terms: &[&HostTensor], place: usize) -> Result<HostTensor, String> {
    let flat = |bytes: Vec<u8>| HostTensor {
        ty: TensorType::new(terms[0].ty.dtype, [bytes.len() as u64 / terms[0].ty.dtype.size()]),
        bytes,
    };
    let cut = |bytes: &[u8]| {
        let length = bytes.len() / terms.len();
        bytes[place * length..][..length].to_vec()
    };
    Ok(match action {
        Action::AllReduce { reduce, .. } => combine(terms, *reduce)?,
        Action::ReduceScatter { reduce, .. } => flat(cut(&combine(terms, *reduce)?.bytes)),
        Action::AllGather { .. } => flat(terms.iter().flat_map(|tensor| tensor.bytes.clone()).collect()),
        Action::AllToAll { .. } => flat(terms.iter().flat_map(|tensor| cut(&tensor.bytes)).collect()),
        other => return Err(format!("{} is no collective", other.name())),
    })
}

fn cast(tensor: &HostTensor, dtype: DType) -> Result<HostTensor, String> {
    run(&Cast {}.into(), std::slice::from_ref(tensor), tensor.ty.with_dtype(dtype))
}

fn run(op: &Op, operands: &[HostTensor], ty: TensorType) -> Result<HostTensor, String> {
    let made = compute_op(op, operands, &[ty]).map_err(|error| error.to_string())?;
    made.into_iter().next().ok_or_else(|| format!("{} makes nothing", op.name()))
}

/// Terms of one size, combined in their order and rounded once to the type of the first.
fn combine(terms: &[&HostTensor], reduce: ReduceKind) -> Result<HostTensor, String> {
    let kind = match reduce {
        ReduceKind::Sum => BinaryKind::Add,
        ReduceKind::Max => BinaryKind::Max,
        ReduceKind::LogSumExp => return Err("log-sum-exp is made of a maximum and a sum".to_string()),
    };
    let (ty, wide) = (&terms[0].ty, if terms[0].ty.dtype.is_float() { DType::F32 } else { terms[0].ty.dtype });
    let widened = |term: &HostTensor| {
        let term = HostTensor { ty: ty.with_dtype(term.ty.dtype), bytes: term.bytes.clone() };
        if term.ty.dtype == wide { Ok(term) } else { cast(&term, wide) }
    };
    let mut total = widened(terms[0])?;
    for term in &terms[1..] {
        total = run(&Binary { kind }.into(), &[total, widened(term)?], ty.with_dtype(wide))?;
    }
    if ty.dtype == wide { Ok(total) } else { cast(&total, ty.dtype) }
}
