//! One rank on one GPU.
//!
//! Loading a program resolves everything: every instruction becomes a list of commands with fixed
//! addresses. A step enqueues them on the program's streams and waits once, at its end. Waits
//! between streams are events: an instruction that another one names in `after` is marked, and runs
//! of sections are separated on all streams that the program uses.
//!
//! The first step runs so, since libraries load what they need late; the next one that is not measured is recorded as a
//! [`Graph`], which it and all later ones launch, if all ranks can record theirs ([`Agreement`]): NCCL takes a collective
//! as part of a graph from all ranks or from none. [`Inputs`], the learning rate among them, are read from page-locked
//! memory at fixed addresses, so no step needs another graph. Steps whose instructions are measured or inspected are not
//! launched as a graph.

mod algorithms;
mod commands;
mod initial;
mod inputs;
mod inspect;

use super::agreement::Agreement;
use super::copies::{self, Mail, Peers, Release};
use super::device::{Device, Failure};
use super::graph::{self, Graph};
use super::kernel::Kernel;
use super::nccl::{Collective, Communicator};
use super::select::{Gemm, Selection, Step, kernels, select_action};
use super::trail::Trail;
use super::tune::Tunings;
use super::watch::give_up;
use crate::launch::World;
use crate::{Feeds, Span};
use algorithms::libraries;
use commands::{Command, Layout, Libraries, action_name, commands, describe};
pub use commands::{MESSAGES, part};
use cudarc::driver::sys::CUevent;
pub use initial::Making;
use inputs::Inputs;
use shardc_ir::plan::Space;
use shardc_ir::program::{Instruction, Run, Section, Stream};
use shardc_ir::{BufferId, Bytes, DType, EntityRef, Program, SectionId};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The choices made for a program: per section and instruction. They need no device.
pub struct Chosen {
    sections: Vec<Vec<Option<Selection>>>,
}

/// Chooses kernels for every instruction of a program.
pub fn choose(program: &Program) -> Result<Chosen, Failure> {
    let types = |ids: &[BufferId]| ids.iter().map(|id| program.buffers[*id].ty.clone()).collect::<Vec<_>>();
    let one = |instruction: &Instruction| {
        let (operands, results) = (types(&instruction.operands), types(&instruction.results));
        let selection = select_action(&instruction.action, &operands, &results).map_err(|error| error.to_string())?;
        let needed = selection.as_ref().map_or(0, |selection| selection.scratch);
        let given = instruction.scratch.map_or(0, |scratch| program.buffers[scratch].ty.bytes().0);
        if needed > given {
            let name = action_name(&instruction.action);
            return Err(format!("{name} needs {needed} bytes of scratch memory and has {given}: lower it for CUDA"));
        }
        Ok(selection)
    };
    let sections = program.sections.values();
    let sections = sections.map(|section| section.instructions.iter().map(one).collect::<Result<Vec<_>, _>>());
    Ok(Chosen { sections: sections.collect::<Result<_, _>>()? })
}

impl Chosen {
    /// Whether there are products of 8-bit floats among them.
    pub fn has_f8_products(&self) -> bool {
        let is_f8 = |gemm: &Gemm| gemm.scales.is_some();
        self.sections.iter().flatten().flatten().flat_map(|selection| &selection.steps).any(|step| match step {
            Step::Gemm(gemm) => is_f8(gemm),
            Step::Products(gemms) => gemms.iter().any(is_f8),
            _ => false,
        })
    }

    /// The kernels that are compiled before a device is taken.
    pub fn kernels(&self) -> impl Iterator<Item = &Arc<Kernel>> {
        self.sections.iter().flatten().flatten().flat_map(|selection| kernels(&selection.steps))
    }
}

/// An instruction, ready.
struct Ready {
    commands: Vec<Command>,
    stream: Stream,
    waits: Vec<CUevent>,
    mark: Option<CUevent>,
    text: Arc<str>,
}

/// Events around the instructions of a measured step.
#[derive(Default)]
struct Clock {
    start: Option<CUevent>,
    /// Pairs, taken from the front as instructions are enqueued and kept for the next measured step.
    pairs: Vec<(CUevent, CUevent)>,
    /// What ran between the pairs, with the times still unknown.
    spans: Vec<Span>,
}

/// One rank.
pub struct Rank {
    program: Arc<Program>,
    // The graph, other ranks' memory and the libraries' objects are dropped before the device.
    recording: Recording,
    agreement: Arc<Agreement>,
    peers: Option<Peers>,
    mail: Mail,
    sections: Vec<Vec<Ready>>,
    libraries: Libraries,
    device: Device,
    arenas: HashMap<Space, u64>,
    communicators: HashMap<usize, Arc<Communicator>>,
    inputs: Inputs,
    /// What the last step was given.
    given: Feeds,
    readings: Vec<u64>,
    ends: Vec<(Stream, CUevent)>,
    clock: Clock,
    /// What the streams stand at.
    pub trail: Arc<Trail>,
}

/// Takes the memory of each space: its address.
fn arenas(program: &Program, device: &mut Device) -> Result<HashMap<Space, u64>, Failure> {
    let mut arenas = HashMap::new();
    for (space, bytes) in &program.arenas {
        let at = match space {
            Space::Device => device.allocate(bytes.0)?,
            Space::Host => device.allocate_pinned(bytes.0)?,
            Space::Disk if bytes.0 == 0 => continue,
            Space::Disk => return Err("programs that use the disk do not run on CUDA yet".to_string()),
        };
        arenas.insert(*space, at);
    }
    Ok(arenas)
}

/// Prepares the instructions of a section, with an event for each that others wait for.
fn ready(
    device: &mut Device,
    libraries: &mut Libraries,
    layout: &Layout<'_>,
    section: &Section,
    choices: &[Option<Selection>],
) -> Result<Vec<Ready>, Failure> {
    let mut events = HashMap::new();
    for index in section.instructions.iter().flat_map(|instruction| &instruction.after) {
        if let Entry::Vacant(event) = events.entry(*index) {
            event.insert(device.event()?);
        }
    }
    let mut ready = Vec::new();
    for (index, (instruction, selection)) in section.instructions.iter().zip(choices).enumerate() {
        let text = describe(layout.program, &section.name, index, instruction);
        let commands = commands(device, libraries, layout, instruction, selection.as_ref())
            .map_err(|error| format!("{text}: {error}"))?;
        let waits = instruction.after.iter().map(|before| events[before]).collect();
        let mark = events.get(&index).copied();
        ready.push(Ready { commands, stream: instruction.stream, waits, mark, text: text.into() });
    }
    Ok(ready)
}

/// Whether steps are launched as a graph.
enum Recording {
    /// Not yet: so many steps have been run.
    After(u32),
    /// Yes.
    Done(Graph),
    /// No; the log says why.
    Refused,
}

/// The variable that, set to `0` for any rank, leaves the steps of all unrecorded.
const SWITCH: &str = "SHARDC_CUDA_GRAPH";

/// Commands of a step up to which it is recorded: a graph takes memory of the device for each, which no
/// plan counts.
const MOST_RECORDED: usize = 1 << 16;

impl Rank {
    /// Takes the rank's memory and prepares every instruction. The caller has put the GPU's context
    /// on this thread by making `device`, and has loaded the kernels.
    pub fn new(
        program: Arc<Program>,
        chosen: &Chosen,
        mut device: Device,
        communicators: HashMap<usize, Arc<Communicator>>,
        (tuning, world, agreement): (&Tunings, &World, &Arc<Agreement>),
    ) -> Result<Self, Failure> {
        let arenas = arenas(&program, &mut device)?;
        let layout = Layout { program: &program, arenas: &arenas };
        let mut libraries = libraries(&layout, chosen, &device, tuning)?;
        let mut sections = Vec::new();
        for (section, choices) in program.sections.values().zip(&chosen.sections) {
            sections.push(ready(&mut device, &mut libraries, &layout, section, choices)?);
        }
        let met = copies::meet(&mut device, world, &program, arenas.get(&Space::Device).copied())?;
        let (mut peers, mut mail) = (None, Mail::default());
        if let Some(met) = met {
            (peers, mail) = (Some(met.peers), met.mail);
            for ((section, index), exchange) in met.exchanges {
                sections[section][index].commands = vec![Command::Exchange(exchange)];
            }
        }
        let inputs = Inputs::new(&layout, &mut device)?;
        let readings =
            program.readings.iter().map(|reading| device.allocate_pinned(program.buffers[reading.buffer].ty.bytes().0));
        let readings = readings.collect::<Result<Vec<_>, _>>()?;
        let used = |stream: &Stream| program.instructions().any(|instruction| instruction.stream == *stream);
        let mut streams: Vec<Stream> = Stream::ALL.into_iter().filter(used).collect();
        if !streams.contains(&Stream::Compute) {
            streams.push(Stream::Compute);
        }
        let ends = streams.into_iter().map(|stream| Ok((stream, device.event()?)));
        let ends = ends.collect::<Result<Vec<_>, Failure>>()?;
        let trail = Arc::new(Trail::new(&device, collectives(&program, &sections, &communicators))?);
        let rank = Self {
            program,
            recording: Recording::After(0),
            agreement: agreement.clone(),
            peers,
            mail,
            sections,
            libraries,
            device,
            arenas,
            communicators,
            inputs,
            given: Feeds::default(),
            readings,
            ends,
            clock: Clock::default(),
            trail,
        };
        rank.initialise()?;
        Ok(rank)
    }

    /// States start at their number.
    fn initialise(&self) -> Result<(), Failure> {
        for slot in self.program.slots.iter().filter(|slot| slot.init != 0.0) {
            let ty = &self.program.buffers[slot.buffer].ty;
            let one = match ty.dtype {
                DType::F32 => (slot.init as f32).to_le_bytes().to_vec(),
                DType::Bf16 => half::bf16::from_f64(slot.init).to_le_bytes().to_vec(),
                other => return Err(format!("slot `{}` of {other} cannot start at {}", slot.name, slot.init)),
            };
            self.write(slot.buffer, &one.repeat(ty.elements() as usize))?;
        }
        Ok(())
    }

    /// Bytes taken on the device: its arena.
    pub fn device_bytes(&self) -> Bytes {
        Bytes(self.device.taken())
    }

    fn address(&self, id: BufferId) -> u64 {
        let buffer = &self.program.buffers[id];
        self.arenas.get(&buffer.space).copied().unwrap_or(0) + buffer.offset
    }

    /// Writes a buffer between steps.
    pub fn write(&self, id: BufferId, bytes: &[u8]) -> Result<(), Failure> {
        self.device.write(self.address(id), bytes)
    }

    /// Reads a buffer between steps.
    pub fn read(&self, id: BufferId) -> Result<Vec<u8>, Failure> {
        let mut bytes = vec![0; self.program.buffers[id].ty.bytes().0 as usize];
        self.device.read(self.address(id), &mut bytes)?;
        Ok(bytes)
    }

    /// As [`Rank::step`], and measures every instruction.
    pub fn timed_step(
        &mut self,
        feeds: &Feeds,
        next: Option<&Feeds>,
        stop: &AtomicBool,
    ) -> Result<(Vec<Vec<u8>>, Vec<Span>), Failure> {
        let count: usize = self.program.order.iter().map(|run| self.sections[section_index(run.section)].len()).sum();
        while self.clock.pairs.len() < count {
            self.clock.pairs.push((self.device.timed_event()?, self.device.timed_event()?));
        }
        let start = match self.clock.start {
            Some(event) => event,
            None => self.device.timed_event()?,
        };
        self.clock.start = Some(start);
        self.device.record(start, Stream::Compute)?;
        self.clock.spans = Vec::with_capacity(count);
        let readings = self.enqueue_step(feeds, next, stop, true)?;
        let mut spans = std::mem::take(&mut self.clock.spans);
        for (span, (before, after)) in spans.iter_mut().zip(&self.clock.pairs) {
            span.start = self.device.elapsed(start, *before)?;
            span.end = self.device.elapsed(start, *after)?;
        }
        Ok((readings, spans))
    }

    /// Runs one step and gives the readings' bytes; while it runs, what is known of the next one's inputs is brought to
    /// where that reads it. Ends early if `stop` is set by another rank.
    pub fn step(&mut self, feeds: &Feeds, next: Option<&Feeds>, stop: &AtomicBool) -> Result<Vec<Vec<u8>>, Failure> {
        self.enqueue_step(feeds, next, stop, false)
    }

    fn enqueue_step(
        &mut self,
        feeds: &Feeds,
        next: Option<&Feeds>,
        stop: &AtomicBool,
        is_timed: bool,
    ) -> Result<Vec<Vec<u8>>, Failure> {
        self.given.clone_from(feeds);
        self.inputs.begin(feeds, &self.device)?;
        self.trail.begin();
        match self.recording {
            Recording::Done(ref graph) if !is_timed => {
                self.trail.issue_all();
                graph.launch(self.device.stream(Stream::Compute))?;
            }
            Recording::After(1..) if !is_timed => self.record(stop)?,
            Recording::After(ref mut steps) => {
                *steps += 1;
                self.enqueue_runs(is_timed)?;
            }
            _ => self.enqueue_runs(is_timed)?,
        }
        next.iter().for_each(|next| self.inputs.follow(next));
        self.finish(Stream::Compute, stop)?;
        let read = |(reading, place): (&shardc_ir::program::Reading, &u64)| {
            self.device.read_pinned(*place, self.program.buffers[reading.buffer].ty.bytes().0 as usize)
        };
        Ok(self.program.readings.iter().zip(&self.readings).map(read).collect())
    }

    /// Records a step and launches it; or, if that is not possible on all ranks, runs it as it is.
    fn record(&mut self, stop: &AtomicBool) -> Result<(), Failure> {
        match self.recorded(stop)? {
            Ok(graph) => {
                self.trail.issue_all();
                graph.launch(self.device.stream(Stream::Compute))?;
                self.recording = Recording::Done(graph);
                Ok(())
            }
            Err(reason) => {
                tracing::info!("rank {}: steps are not launched as a CUDA graph: {reason}", self.program.rank);
                self.recording = Recording::Refused;
                self.trail.begin();
                self.inputs.restart(&self.device);
                self.enqueue_runs(false)
            }
        }
    }

    /// The step as a graph, which no rank has if not all have it; the inner error is why this one has none.
    fn recorded(&mut self, stop: &AtomicBool) -> Result<Result<Graph, Failure>, Failure> {
        let of_another = || "that of another rank is not".to_string();
        // What NCCL does while it is recorded, it does with the other ranks.
        let recordable = self.recordable();
        if !self.agreement.all("recordable", recordable.is_ok(), stop)? {
            return Ok(Err(recordable.err().unwrap_or_else(of_another)));
        }
        let origin = self.device.stream(Stream::Compute);
        let recorded = graph::begin(origin).and_then(|()| {
            let enqueued = self.enqueue_runs(false);
            let graph = graph::end(origin);
            enqueued.and(graph)
        });
        // Nothing runs yet.
        self.trail.begin();
        let is_everywhere = self.agreement.all("recorded", recorded.is_ok(), stop)?;
        Ok(recorded.and_then(|graph| if is_everywhere { Ok(graph) } else { Err(of_another()) }))
    }

    /// The error is why a step is not recorded.
    fn recordable(&self) -> Result<(), Failure> {
        if std::env::var(SWITCH).as_deref() == Ok("0") {
            return Err(format!("{SWITCH} is 0"));
        }
        let section = |run: &Run| &self.sections[section_index(run.section)];
        let ready = self.program.order.iter().flat_map(section);
        let commands: usize = ready.map(|ready| ready.commands.len()).sum();
        if commands > MOST_RECORDED {
            return Err(format!("it has {commands} commands, and at most {MOST_RECORDED} are recorded"));
        }
        Ok(())
    }

    /// Enqueues everything that a step does. The compute stream comes first and last: every other
    /// stream waits for it at the beginning, and it for them at the end.
    fn enqueue_runs(&mut self, is_timed: bool) -> Result<(), Failure> {
        let (compute, others): (Vec<_>, Vec<_>) =
            self.ends.iter().copied().partition(|(stream, _)| *stream == Stream::Compute);
        for (stream, event) in compute {
            self.device.record(event, stream)?;
            others.iter().try_for_each(|(other, _)| self.device.wait(event, *other))?;
        }
        self.mail.begin();
        let program = self.program.clone();
        for (index, run) in program.order.iter().enumerate() {
            if index > 0 {
                self.separate()?;
            }
            self.run(*run, is_timed)?;
        }
        for (stream, event) in others {
            self.device.record(event, stream)?;
            self.device.wait(event, Stream::Compute)?;
        }
        for (reading, place) in self.program.readings.iter().zip(&self.readings) {
            let bytes = self.program.buffers[reading.buffer].ty.bytes().0;
            self.device.copy(*place, self.address(reading.buffer), bytes, Stream::Compute)?;
        }
        Ok(())
    }

    /// Lets every stream wait for all others.
    fn separate(&self) -> Result<(), Failure> {
        if self.ends.len() < 2 {
            return Ok(());
        }
        for (stream, event) in &self.ends {
            self.device.record(*event, *stream)?;
        }
        for (stream, _) in &self.ends {
            for (other, event) in &self.ends {
                if other != stream {
                    self.device.wait(*event, *stream)?;
                }
            }
        }
        Ok(())
    }

    fn run(&mut self, run: Run, is_timed: bool) -> Result<(), Failure> {
        for (index, ready) in self.sections[section_index(run.section)].iter().enumerate() {
            let stream = ready.stream;
            let pair = if is_timed { self.clock.pairs.get(self.clock.spans.len()).copied() } else { None };
            let enqueued = || {
                ready.waits.iter().try_for_each(|event| self.device.wait(*event, stream))?;
                pair.map_or(Ok(()), |(before, _)| self.device.record(before, stream))?;
                let collectives = self.enqueue(&ready.commands, stream, run.microbatch)?;
                pair.map_or(Ok(()), |(_, after)| self.device.record(after, stream))?;
                ready.mark.map_or(Ok(()), |event| self.device.record(event, stream))?;
                // Whoever waits for the collective does not wait for its mark.
                (0..collectives).try_for_each(|_| self.trail.mark(&self.device, stream))
            };
            enqueued().map_err(|error: Failure| format!("{}: {error}", ready.text))?;
            if is_timed {
                let (rank, section, microbatch) = (self.program.rank, run.section, run.microbatch);
                let span = Span { rank, stream, section, instruction: index, microbatch, start: 0.0, end: 0.0 };
                self.clock.spans.push(span);
            }
        }
        self.inputs.bring_next(&self.device)
    }

    /// Enqueues the commands of an instruction; gives how many times they meet other ranks.
    fn enqueue(&self, commands: &[Command], stream: Stream, microbatch: u64) -> Result<u32, Failure> {
        let mut met = 0;
        for command in commands {
            match command {
                Command::Launch(launch) => self.device.launch(launch, stream)?,
                Command::Zero { to, bytes } => self.device.zero(*to, *bytes, stream)?,
                Command::Copy { to, from, bytes } => self.device.copy(*to, *from, *bytes, stream)?,
                Command::Gemm(gemm) => self.libraries.blas.launch(gemm, self.device.stream(stream))?,
                // SAFETY: the stream is this device's, and lives as long as it.
                #[expect(unsafe_code, reason = "calls the library")]
                Command::Fused(bound) => unsafe { self.libraries.cudnn.launch(bound, self.device.stream(stream)) }?,
                Command::Collective { group, collective, parts } => match self.communicators.get(group) {
                    _ if self.sent_by_copies(*collective, stream)? => met += 1,
                    Some(group) => {
                        group.run(*collective, parts, self.device.stream(stream))?;
                        met += 1;
                    }
                    // A group of one: what is sent is what is received.
                    None => parts.iter().try_for_each(|part| {
                        self.device.copy(part.to, part.from, part.sent * part.dtype.size(), stream)
                    })?,
                },
                Command::Exchange(exchange) => {
                    let peers = self.peers.as_ref().ok_or("a collective by copies without other ranks")?;
                    peers.run(exchange, &self.device, stream)?;
                    met += 1;
                }
                Command::Feed { input, to, bytes } => {
                    self.inputs.feed((*input, microbatch), (*to, *bytes), &self.device, stream)?;
                }
                Command::Accumulate { first, rest } => {
                    met += self.enqueue(if microbatch == 0 { first } else { rest }, stream, microbatch)?;
                }
            }
        }
        Ok(met)
    }

    /// Enqueues the next message to a rank whose memory is reached; whether it is one.
    fn sent_by_copies(&self, collective: Collective, stream: Stream) -> Result<bool, Failure> {
        let (Collective::Send(peer), Some(peers)) = (collective, &self.peers) else { return Ok(false) };
        let Some(message) = self.mail.next(peer) else { return Ok(false) };
        peers.run(message, &self.device, stream).map(|()| true)
    }

    /// Waits for a stream, watching for faults of collectives and for other ranks' ends; meanwhile inputs are written
    /// ahead.
    fn finish(&self, stream: Stream, stop: &AtomicBool) -> Result<(), Failure> {
        let (_, end) = self.ends.iter().find(|(known, _)| *known == stream).ok_or("no stream")?;
        self.device.record(*end, stream)?;
        let mut polls = 0u64;
        while !self.device.passed(*end).map_err(|error| format!("the device failed in this step: {error}"))? {
            polls += 1;
            if polls.is_multiple_of(256) {
                if stop.load(Ordering::Relaxed) {
                    return Err(OTHER_FAILED.to_string());
                }
                self.communicators.values().try_for_each(|group| group.fault())?;
            }
            if self.inputs.write_ahead(&self.device)? {
                continue;
            }
            std::thread::sleep(std::time::Duration::from_micros(20));
        }
        // Streams that were let go have passed the mark too, and what they leave is no result.
        if stop.load(Ordering::Relaxed) { Err(OTHER_FAILED.to_string()) } else { Ok(()) }
    }

    /// Leaves the groups without waiting for ranks that may be gone, which itself may hang. A recorded step goes first:
    /// NCCL lets no communicator go while a graph holds its collectives.
    pub fn give_up(&mut self) {
        self.recording = Recording::Refused;
        let communicators: Vec<_> = self.communicators.values().cloned().collect();
        give_up(&communicators, &Vec::from_iter(self.release()));
    }

    /// What lets the streams go if a rank of a collective by copies is gone.
    pub fn release(&self) -> Option<Arc<Release>> {
        self.peers.as_ref().map(Peers::release)
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        // Before the device goes.
        self.give_up();
    }
}

/// The collectives of a step between several ranks, in the order of issue.
fn collectives<'a>(
    program: &'a Program,
    sections: &'a [Vec<Ready>],
    communicators: &'a HashMap<usize, Arc<Communicator>>,
) -> impl Iterator<Item = (Stream, u64, Arc<str>)> {
    let runs =
        program.order.iter().flat_map(|run| sections[section_index(run.section)].iter().map(move |ready| (run, ready)));
    runs.flat_map(|(run, ready)| {
        let is_met = |command: &&Command| match command {
            Command::Collective { group, .. } => communicators.contains_key(group),
            Command::Exchange(_) => true,
            _ => false,
        };
        ready.commands.iter().filter(is_met).map(|_| (ready.stream, run.microbatch, ready.text.clone()))
    })
}

/// The place of a section in a program.
pub fn section_index(id: SectionId) -> usize {
    id.index()
}

/// What a rank says that ended only because another had.
pub const OTHER_FAILED: &str = "another rank failed";
