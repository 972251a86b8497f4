//! A program in the making: instructions with hints for the schedule, buffers without offsets.
//!
//! Buffers that share bytes (a reshape and its operand) have one *storage*. A storage is what gets a
//! place in an arena.

use super::SPACE;
use shardc_ir::ops::{Op, Reshape};
use shardc_ir::plan::Category;
use shardc_ir::program::{Action, Buffer, Feed, Instruction, Reading, Slot, Stream};
use shardc_ir::{AxisId, BufferId, Mesh, NodeId, PrimaryMap, SecondaryMap, TensorType};

/// A section, in the order of execution.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// Once, before the microbatches.
    Prologue,
    /// Once per microbatch.
    #[default]
    Microbatch,
    /// Once, after the microbatches.
    Epilogue,
}

impl Place {
    /// Every section.
    pub const ALL: [Place; 3] = [Self::Prologue, Self::Microbatch, Self::Epilogue];

    /// The name of the section.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prologue => "prologue",
            Self::Microbatch => "microbatch",
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
    /// The gather of a weight for the block of this number; it may be issued a block ahead.
    Prefetch(u32),
}

/// One instruction of a draft; `after` is empty until allocation.
#[derive(Clone, Debug, PartialEq)]
pub struct Item {
    /// The instruction.
    pub instruction: Instruction,
    /// What the schedule may do with it.
    pub hint: Hint,
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
    /// How often the middle section runs.
    pub microbatches: u64,
    /// The buffers; their offsets are 0.
    pub buffers: PrimaryMap<BufferId, Buffer>,
    /// Per buffer, its storage.
    pub storage: SecondaryMap<BufferId, StorageId>,
    /// The number of storages.
    pub storages: u32,
    /// The instructions of each [`Place`].
    pub sections: [Vec<Item>; 3],
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
        Self { rank, mesh: mesh.clone(), microbatches: 1, ..Self::default() }
    }

    /// A buffer with a storage of its own.
    pub fn buffer(&mut self, ty: TensorType, category: Category) -> BufferId {
        let id = self.buffers.push(Buffer { ty, space: SPACE, offset: 0, category, value: None });
        self.storage[id] = StorageId(self.storages);
        self.storages += 1;
        id
    }

    /// A buffer of another shape on the storage of `of`, declared by a reshape that moves nothing.
    pub fn view(&mut self, of: BufferId, ty: TensorType, place: Place, source: Option<NodeId>) -> BufferId {
        if self.buffers[of].ty == ty {
            return of;
        }
        let buffer = Buffer { ty, ..self.buffers[of].clone() };
        let id = self.buffers.push(buffer);
        self.storage[id] = self.storage[of];
        let action = Action::Compute(Reshape {}.into());
        self.push(place, action, vec![of], vec![id], Stream::Compute, source, Hint::None);
        id
    }

    /// Whether an instruction only declares a view: it touches no bytes.
    pub fn is_view(&self, instruction: &Instruction) -> bool {
        matches!(instruction.action, Action::Compute(Op::Reshape(_)))
            && self.storage[instruction.operands[0]] == self.storage[instruction.results[0]]
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
        self.sections[place as usize].push(Item { instruction, hint });
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
