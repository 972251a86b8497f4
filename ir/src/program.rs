//! A program: what one rank runs in one training step.
//!
//! Instructions lie in *sections*, straight lines of code; [`Program::order`] says which section
//! runs when, and for which microbatch. Gradient accumulation is one section run once per
//! microbatch between a prologue and an epilogue; a pipeline schedule is an order over forward and
//! backward sections. Within a section instructions are listed in the order in which they are
//! issued, each on one [`Stream`]; streams run concurrently, and `after` lists the instructions of
//! other streams that must have finished first. A run of a section starts when the run before it
//! has finished on every stream, so `after` never reaches into another section.
//!
//! Every buffer has a fixed offset in the arena of its memory space. Buffers may overlap where
//! their lifetimes do not, or where one is a view of the other (a reshape, an update in place).
//! Nothing is allocated in a step: what a kernel needs for itself is a buffer as well, the
//! instruction's scratch.
//!
//! Collectives are flat: an all-gather concatenates the operands of the group's ranks in the order
//! of the group, whatever their shape. Where a layout conversion is along an inner dimension, the
//! transposes around it are instructions of their own. A collective with several operands is one
//! bucket: each operand has its own result, and the runtime starts them together.

use crate::entity::{BufferId, NodeId, PrimaryMap, SectionId, ValueId};
use crate::ops::Op;
use crate::plan::{Category, Space};
use crate::sharding::ReduceKind;
use crate::types::TensorType;
use crate::units::Bytes;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// The multiple at which buffers begin.
pub const ALIGNMENT: u64 = 256;

/// A queue of instructions that run one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stream {
    /// Kernels of the device.
    Compute,
    /// Collectives.
    Communication,
    /// Point-to-point messages between the stages of a pipeline.
    Messages,
    /// Copies from host to device.
    HostToDevice,
    /// Copies from device to host.
    DeviceToHost,
    /// Kernels of the host.
    HostCompute,
    /// Reads and writes of the disk.
    Disk,
}

impl Stream {
    /// Every stream.
    pub const ALL: [Stream; 7] = [
        Self::Compute,
        Self::Communication,
        Self::Messages,
        Self::HostToDevice,
        Self::DeviceToHost,
        Self::HostCompute,
        Self::Disk,
    ];

    /// The name in the text form.
    pub fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Communication => "communication",
            Self::Messages => "messages",
            Self::HostToDevice => "host_to_device",
            Self::DeviceToHost => "device_to_host",
            Self::HostCompute => "host_compute",
            Self::Disk => "disk",
        }
    }

    /// The stream of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|stream| stream.name() == name)
    }

    /// Whether ranks talk to each other on it.
    pub fn is_wire(self) -> bool {
        matches!(self, Self::Communication | Self::Messages)
    }
}

/// What an instruction does.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Runs an operation on this rank's shards. A result may share its operand's bytes where the
    /// buffers say so: `adamw` updates in place, a reshape is a view.
    Compute(Op),
    /// `result = reduction over the group of the operands`, elementwise.
    AllReduce {
        /// The reduction: a sum or a maximum.
        reduce: ReduceKind,
        /// The index of the group in [`Program::groups`].
        group: usize,
    },
    /// `result = the operands of the group's ranks, concatenated`.
    AllGather {
        /// The index of the group.
        group: usize,
    },
    /// `result = this rank's part of the reduction of the operands`, cut into equal parts.
    ReduceScatter {
        /// The reduction: a sum or a maximum.
        reduce: ReduceKind,
        /// The index of the group.
        group: usize,
    },
    /// Part `i` of the operand goes to the group's rank `i`; the result holds the parts received.
    AllToAll {
        /// The index of the group.
        group: usize,
    },
    /// Sends the operand.
    Send {
        /// The receiving rank.
        peer: u64,
    },
    /// Receives the result.
    Receive {
        /// The sending rank.
        peer: u64,
    },
    /// `result += operand`; in the first microbatch `result = operand`.
    Accumulate,
    /// Copies the operand into the result, perhaps in another memory space.
    Copy,
    /// Fills the result with this rank's part, for this microbatch, of an input. An operand is the input's staging
    /// buffer, which holds that part before it is read, and is the runtime's to fill for the next read, be it of the next
    /// step: no other instruction touches it.
    Feed {
        /// The index of the input in [`Program::inputs`].
        input: usize,
    },
}

impl Action {
    /// The name in the text form; of a computation, its operation's.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Compute(op) => op.name(),
            Self::AllReduce { .. } => "all_reduce",
            Self::AllGather { .. } => "all_gather",
            Self::ReduceScatter { .. } => "reduce_scatter",
            Self::AllToAll { .. } => "all_to_all",
            Self::Send { .. } => "send",
            Self::Receive { .. } => "receive",
            Self::Accumulate => "accumulate",
            Self::Copy => "copy",
            Self::Feed { .. } => "feed",
        }
    }

    /// What it is called among instructions: see [`Op::title`].
    pub fn title(&self) -> String {
        match self {
            Self::Compute(op) => op.title(),
            other => other.name().to_string(),
        }
    }

    /// The group of a collective, as an index in [`Program::groups`].
    pub fn group(&self) -> Option<usize> {
        match self {
            Self::AllReduce { group, .. }
            | Self::AllGather { group }
            | Self::ReduceScatter { group, .. }
            | Self::AllToAll { group } => Some(*group),
            _ => None,
        }
    }

    /// Whether several ranks carry it out together: a collective or a message.
    pub fn is_meeting(&self) -> bool {
        self.group().is_some() || matches!(self, Self::Send { .. } | Self::Receive { .. })
    }
}

/// One instruction.
#[derive(Clone, Debug, PartialEq)]
pub struct Instruction {
    /// What it does.
    pub action: Action,
    /// The buffers it reads.
    pub operands: Vec<BufferId>,
    /// The buffers it writes.
    pub results: Vec<BufferId>,
    /// Bytes (`u8[n]`) that are its own while it runs; how many, the [`Target`](crate::Target) says.
    /// What they hold before and after means nothing.
    pub scratch: Option<BufferId>,
    /// Where it runs.
    pub stream: Stream,
    /// Instructions of this section, on other streams, that must have finished before it starts.
    pub after: Vec<usize>,
    /// The node of the plan's graph it came from.
    pub source: Option<NodeId>,
}

impl Instruction {
    /// An instruction that waits for no other stream, has no scratch memory and comes from no node.
    pub fn new(action: Action, operands: Vec<BufferId>, results: Vec<BufferId>, stream: Stream) -> Self {
        Self { action, operands, results, scratch: None, stream, after: Vec::new(), source: None }
    }

    /// Every buffer it touches.
    pub fn buffers(&self) -> impl Iterator<Item = BufferId> {
        self.operands.iter().chain(&self.results).chain(&self.scratch).copied()
    }
}

/// A place in an arena.
#[derive(Clone, Debug, PartialEq)]
pub struct Buffer {
    /// The local type.
    pub ty: TensorType,
    /// The arena.
    pub space: Space,
    /// The first byte in the arena; a multiple of 256.
    pub offset: u64,
    /// What it is for.
    pub category: Category,
    /// The value of the plan's graph it holds.
    pub value: Option<ValueId>,
}

impl Buffer {
    /// The byte behind its last one, in the arena.
    pub fn end(&self) -> u64 {
        self.offset + self.ty.bytes().0
    }

    /// Whether two buffers share bytes.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.space == other.space && self.offset < other.end() && other.offset < self.end()
    }
}

/// A straight line of code.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Section {
    /// The name: `prologue`, `microbatch`, `epilogue`.
    pub name: String,
    /// The instructions, in the order of issue.
    pub instructions: Vec<Instruction>,
}

/// One run of a section.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Run {
    /// Which section.
    pub section: SectionId,
    /// For which microbatch.
    pub microbatch: u64,
}

/// A tensor that the caller gives to each step.
#[derive(Clone, Debug, PartialEq)]
pub struct Feed {
    /// The name.
    pub name: String,
    /// The global type.
    pub ty: TensorType,
    /// Per microbatch, this rank's part: per dimension, the first index and the length.
    pub slices: Vec<Vec<(u64, u64)>>,
}

/// A tensor that outlives the step: a parameter, an optimizer state, or the cast of a parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct Slot {
    /// The name.
    pub name: String,
    /// Where it lies between steps: this rank's part, and zeros behind its end where the buffer is longer.
    pub buffer: BufferId,
    /// The global type.
    pub ty: TensorType,
    /// This rank's part: per dimension, the first index and the length.
    pub slice: Vec<(u64, u64)>,
    /// Whether it is a parameter, else an optimizer state or a cast.
    pub is_parameter: bool,
    /// The number an optimizer state starts at.
    pub init: f64,
    /// The parameter whose cast it is, of the same part: whoever writes that one writes this one too.
    pub cast_of: Option<String>,
}

impl Slot {
    /// The type of this rank's part.
    pub fn part(&self) -> TensorType {
        self.ty.with_shape(self.slice.iter().map(|(_, length)| *length).collect::<Vec<_>>())
    }
}

/// A value that the caller reads after the step; every rank holds the whole of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Reading {
    /// The name: `loss`, `grad_norm`.
    pub name: String,
    /// Where it lies after the step.
    pub buffer: BufferId,
}

/// The program of one rank; see the [module](self).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Program {
    /// The rank.
    pub rank: u64,
    /// The number of ranks.
    pub ranks: u64,
    /// The bytes of each arena.
    pub arenas: Vec<(Space, Bytes)>,
    /// The buffers.
    pub buffers: PrimaryMap<BufferId, Buffer>,
    /// The sections.
    pub sections: PrimaryMap<SectionId, Section>,
    /// The step: which section runs when.
    pub order: Vec<Run>,
    /// The groups of ranks that collectives refer to; each holds this rank.
    pub groups: Vec<Vec<u64>>,
    /// The inputs.
    pub inputs: Vec<Feed>,
    /// What outlives the step.
    pub slots: Vec<Slot>,
    /// What the caller reads.
    pub readings: Vec<Reading>,
}

impl Program {
    /// The bytes of an arena.
    pub fn arena(&self, space: Space) -> Bytes {
        self.arenas.iter().find(|(known, _)| *known == space).map_or(Bytes(0), |(_, bytes)| *bytes)
    }

    /// Every instruction, in the order of the text.
    pub fn instructions(&self) -> impl Iterator<Item = &Instruction> {
        self.sections.values().flat_map(|section| &section.instructions)
    }

    /// The staging buffers of inputs, those of one input once: the input, and the buffer.
    pub fn staging(&self) -> BTreeSet<(usize, BufferId)> {
        let of = |instruction: &Instruction| match instruction.action {
            Action::Feed { input } => instruction.operands.first().map(|buffer| (input, *buffer)),
            _ => None,
        };
        self.instructions().filter_map(of).collect()
    }

    /// The place of an instruction, as findings show it.
    pub fn place(&self, section: SectionId, index: usize) -> String {
        format!("rank {}, section {}, instruction {index}", self.rank, self.sections[section].name)
    }

    /// The order without the third and later of equal runs that follow each other: microbatches after
    /// the second of them leave everything as the second does. The first microbatch, in which sums begin, equals no other.
    pub fn short_order(&self) -> Vec<Run> {
        let kind = |run: &Run| (run.section, run.microbatch == 0);
        let mut order: Vec<Run> = Vec::new();
        for run in &self.order {
            let repeats = order.iter().rev().take_while(|other| kind(other) == kind(run)).count();
            if repeats < 2 {
                order.push(*run);
            }
        }
        order
    }
}
