//! A program in the making: instructions with hints for the schedule, buffers without offsets.
//!
//! Buffers that share bytes (a reshape and its operand, a whole and its parts) have one *storage*, each at
//! its own first byte of it. A storage is what gets a place in an arena.

use crate::pipeline::order::Pass;
use crate::pipeline::timeline::Event;
use shardc_ir::ops::{Matmul, Op, Reshape};
use shardc_ir::plan::{Category, Space};
use shardc_ir::program::{Action, Buffer, Feed, Instruction, Reading, Slot, Stream};
use shardc_ir::{AxisId, BufferId, Mesh, NodeId, PrimaryMap, SecondaryMap, TensorType, ValueId};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// The buffers of device memory; other spaces come with offloading.
pub(crate) const SPACE: Space = Space::Device;

/// A place of an instruction: its section and its index.
pub type Position = (usize, usize);

/// Who touches each storage, in order.
#[derive(Debug)]
pub struct Touched(Vec<Vec<Position>>);

impl Touched {
    /// Who touches one.
    pub fn of(&self, storage: StorageId) -> &[Position] {
        &self.0[storage.0 as usize]
    }

    /// Who of its section touches one last before a place.
    pub fn last_before(&self, storage: StorageId, place: Position) -> Option<usize> {
        let all = self.of(storage);
        let last = all[..all.partition_point(|touch| *touch < place)].last();
        last.filter(|touch| touch.0 == place.0).map(|touch| touch.1)
    }

    /// The same, to change.
    pub fn of_mut(&mut self, storage: StorageId) -> &mut Vec<Position> {
        &mut self.0[storage.0 as usize]
    }
}

/// The contraction of an instruction, if it is one.
pub fn contraction(instruction: &Instruction) -> Option<&Matmul> {
    match &instruction.action {
        Action::Compute(Op::Matmul(op)) => Some(op),
        _ => None,
    }
}

/// A section, in the order of execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// Once, before the microbatches.
    Prologue,
    /// Once per microbatch: the part of this number, of one or, in a pipeline, several.
    Microbatch(u16),
    /// Once, after the microbatches.
    Epilogue,
}

impl Place {
    /// All of a microbatch, where there is no pipeline.
    pub const LOOP: Place = Self::Microbatch(0);

    /// Its index among the sections of a draft with so many.
    pub const fn index(self, sections: usize) -> usize {
        match self {
            Self::Prologue => 0,
            Self::Microbatch(part) => 1 + part as usize,
            Self::Epilogue => sections - 1,
        }
    }

    /// The section of an index.
    pub fn of(index: usize, sections: usize) -> Self {
        match index {
            0 => Self::Prologue,
            _ if index + 1 == sections => Self::Epilogue,
            _ => Self::Microbatch(index as u16 - 1),
        }
    }

    /// The name of the section, where there is no pipeline.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prologue => "prologue",
            Self::Microbatch(_) => "microbatch",
            Self::Epilogue => "epilogue",
        }
    }
}

/// What the schedule may do with an instruction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Hint {
    /// It stays where it is.
    #[default]
    None,
    /// A reduction that may wait for others, to be one bucket with them.
    Bucket,
    /// The gather of a weight for the block of this number; it may be issued a block ahead, and farther if the copy is
    /// kept through the step.
    Prefetch {
        /// The block.
        block: u32,
        /// Whether it is kept.
        is_kept: bool,
    },
}

/// One instruction of a draft; `after` is empty until allocation.
#[derive(Clone, Debug, PartialEq)]
pub struct Item {
    /// The instruction.
    pub instruction: Instruction,
    /// What the schedule may do with it.
    pub hint: Hint,
}

/// A value that one stage of a pipeline sends and another receives in every microbatch.
#[derive(Clone, Debug, PartialEq)]
pub struct Handover {
    /// The value.
    pub value: ValueId,
    /// Between which passes, as an index of the links.
    pub link: usize,
    /// The other rank.
    pub peer: u64,
    /// Whether this rank sends it.
    pub is_send: bool,
    /// Where it lies here.
    pub buffer: BufferId,
}

/// See [`Draft::stage`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StageDraft {
    /// Which pass of which chunk each part is.
    pub parts: Vec<(u32, Pass)>,
    /// What is sent and received in the loop, in the order of the values.
    pub messages: Vec<Handover>,
    /// What the stage does in the loop.
    pub events: Vec<Event>,
}

/// The bytes that one or several buffers share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StorageId(pub u32);

/// See the [module](self).
#[derive(Clone, Debug, Default)]
pub struct Draft {
    /// The rank.
    pub rank: u64,
    /// The mesh.
    pub mesh: Mesh,
    /// The microbatches of the step.
    pub microbatches: u64,
    /// Those for which the section of the loop runs: all, unless some are part of other sections ([`mod@super::peel`]).
    pub repeats: Range<u64>,
    /// The buffers; their offsets are 0.
    pub buffers: PrimaryMap<BufferId, Buffer>,
    /// Per buffer, its storage.
    pub storage: SecondaryMap<BufferId, StorageId>,
    /// Per buffer, its first byte in the storage.
    pub first: SecondaryMap<BufferId, u64>,
    /// Results of slices that keep the same part on every rank: those of nodes, not those that change a layout.
    pub is_common: SecondaryMap<BufferId, bool>,
    /// The number of storages.
    pub storages: u32,
    /// The instructions of each [`Place`]: the prologue, the parts of a microbatch, the epilogue.
    pub sections: Vec<Vec<Item>>,
    /// What a stage of a pipeline does in the loop, and what it sends and receives.
    pub stage: Option<StageDraft>,
    /// The groups of ranks.
    pub groups: Vec<Vec<u64>>,
    /// The inputs.
    pub inputs: Vec<Feed>,
    /// Parameters and states.
    pub slots: Vec<Slot>,
    /// What the caller reads.
    pub readings: Vec<Reading>,
}

impl Draft {
    /// An empty draft.
    pub fn new(rank: u64, mesh: &Mesh) -> Self {
        let sections = vec![Vec::new(); 3];
        Self { rank, mesh: mesh.clone(), microbatches: 1, repeats: 0..1, sections, ..Self::default() }
    }

    /// Who touches each storage.
    pub fn touched(&self) -> Touched {
        self.places(Instruction::buffers)
    }

    /// Where instructions write each storage.
    pub fn written(&self) -> Touched {
        self.places(|instruction| instruction.results.iter().copied())
    }

    /// Where each storage is of the buffers that an instruction has.
    fn places<'a, I: Iterator<Item = BufferId>>(&'a self, of: impl Fn(&'a Instruction) -> I) -> Touched {
        let mut places = Touched(vec![Vec::new(); self.storages as usize]);
        for (section, items) in self.sections.iter().enumerate() {
            for (index, item) in items.iter().enumerate() {
                for buffer in of(&item.instruction) {
                    places.of_mut(self.storage[buffer]).push((section, index));
                }
            }
        }
        places
    }

    /// The storages of parameters and states.
    pub fn stored(&self) -> BTreeSet<StorageId> {
        self.slots.iter().map(|slot| self.storage[slot.buffer]).collect()
    }

    /// The storages whose contents others than the instructions want: what outlives the step, and what is
    /// sent or received.
    pub fn kept(&self) -> BTreeSet<StorageId> {
        let readings = self.readings.iter().map(|reading| reading.buffer);
        let messages = self.stage.iter().flat_map(|stage| stage.messages.iter().map(|message| message.buffer));
        let mut kept = self.stored();
        kept.extend(readings.chain(messages).map(|buffer| self.storage[buffer]));
        kept
    }

    /// Where inputs wait to be fed.
    pub fn staging(&self) -> impl Iterator<Item = BufferId> {
        let feeds =
            self.sections.iter().flatten().filter(|item| matches!(item.instruction.action, Action::Feed { .. }));
        feeds.flat_map(|item| item.instruction.operands.iter().copied())
    }

    /// A buffer with a storage of its own.
    pub fn buffer(&mut self, ty: TensorType, category: Category) -> BufferId {
        let id = self.buffers.push(Buffer { ty, space: SPACE, offset: 0, category, value: None });
        self.storage[id] = StorageId(self.storages);
        self.storages += 1;
        id
    }

    /// A buffer like another one, on a storage like that one's: the same for all that ask with the same map.
    pub fn twin(&mut self, of: BufferId, storages: &mut BTreeMap<StorageId, StorageId>) -> BufferId {
        let (buffer, storage) = (self.buffers[of].clone(), self.storage[of]);
        let next = StorageId(self.storages);
        let own = *storages.entry(storage).or_insert(next);
        self.storages += u32::from(own == next);
        let id = self.buffers.push(buffer);
        (self.storage[id], self.first[id], self.is_common[id]) = (own, self.first[of], self.is_common[of]);
        id
    }

    /// A buffer of another shape on the storage of `of`, declared by a reshape that moves nothing.
    pub fn view(&mut self, of: BufferId, ty: TensorType, place: Place, source: Option<NodeId>) -> BufferId {
        if self.buffers[of].ty == ty { of } else { self.name(of, ty, place, source) }
    }

    /// [`view`](Self::view), declared even if the shape is the same.
    pub fn name(&mut self, of: BufferId, ty: TensorType, place: Place, source: Option<NodeId>) -> BufferId {
        self.named(of, ty, Action::Compute(Reshape {}.into()), (place, source))
    }

    /// A buffer that begins where `of` does, declared by an action that moves nothing.
    pub fn named(
        &mut self,
        of: BufferId,
        ty: TensorType,
        action: Action,
        (place, source): (Place, Option<NodeId>),
    ) -> BufferId {
        let buffer = Buffer { ty, ..self.buffers[of].clone() };
        let id = self.buffers.push(buffer);
        (self.storage[id], self.first[id]) = (self.storage[of], self.first[of]);
        self.push(place, action, vec![of], vec![id], Stream::Compute, source, Hint::None);
        id
    }

    /// Whether an instruction only declares a view: it touches no bytes.
    pub fn is_view(&self, instruction: &Instruction) -> bool {
        matches!(instruction.action, Action::Compute(Op::Reshape(_) | Op::Slice(_) | Op::Concat(_)))
            && instruction.operands.iter().all(|id| self.storage[*id] == self.storage[instruction.results[0]])
    }

    /// The bytes of each storage.
    pub fn storage_bytes(&self) -> Vec<u64> {
        let mut bytes = vec![0; self.storages as usize];
        for (id, buffer) in &self.buffers {
            let known = &mut bytes[self.storage[id].0 as usize];
            *known = (*known).max(self.first[id] + buffer.ty.bytes().0);
        }
        bytes
    }

    /// Adds an instruction at the end of a section.
    #[allow(clippy::too_many_arguments)] // They are the fields of an instruction.
    pub fn push(
        &mut self,
        place: Place,
        action: Action,
        operands: Vec<BufferId>,
        results: Vec<BufferId>,
        stream: Stream,
        source: Option<NodeId>,
        hint: Hint,
    ) {
        let instruction = Instruction { source, ..Instruction::new(action, operands, results, stream) };
        let index = place.index(self.sections.len());
        self.sections[index].push(Item { instruction, hint });
    }

    /// The index of this rank's group over some axes.
    pub fn group(&mut self, axes: &[AxisId]) -> usize {
        let group = self.mesh.group(self.rank, axes);
        // The order of first use is the same on every rank, since which axes have equal groups is.
        if let Some(index) = self.groups.iter().position(|known| *known == group) {
            return index;
        }
        self.groups.push(group);
        self.groups.len() - 1
    }
}
