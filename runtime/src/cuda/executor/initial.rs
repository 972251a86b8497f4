//! Initial values made where they stay: a parameter's first value is a short chain of operations, the first of which
//! needs nothing and the others work in place, so a rank makes its shard in the slot itself. Only a few numbers cross
//! the bus, however large the model.

use super::commands::{Layout, commands};
use super::{Command, Rank};
use crate::cuda::device::Failure;
use crate::cuda::select::{Selection, kernels, select};
use shardc_ir::ops::Cast;
use shardc_ir::program::{Action, Instruction, Slot, Stream};
use shardc_ir::view::contiguous_part;
use shardc_ir::{BufferId, Op, Program, TensorType};
use std::sync::atomic::AtomicBool;

/// How one slot gets its value.
pub struct Making {
    steps: Vec<(Instruction, Selection)>,
}

impl Making {
    /// The steps of `chain` in a slot's buffer, of which what lies behind the rank's part is zero from the beginning;
    /// `None` where the part does not lie first, or a step has no kernel, or needs more memory than the slot.
    pub fn new(program: &Program, slot: &Slot, chain: Vec<(Op, TensorType)>) -> Option<Self> {
        let (buffer, part) = (slot.buffer, slot.part());
        contiguous_part(&program.buffers[buffer].ty.shape, &vec![0; part.rank()], &part.shape)?;
        if chain.iter().any(|(_, made)| *made != part) {
            return None;
        }
        let step = |(op, ty): (Op, TensorType), is_first: bool| {
            let operands: &[TensorType] = if is_first { &[] } else { std::slice::from_ref(&ty) };
            let selection = select(&op, operands, std::slice::from_ref(&ty)).ok()?;
            let operands = operands.iter().map(|_| buffer).collect();
            let instruction = Instruction::new(Action::Compute(op), operands, vec![buffer], Stream::Compute);
            (selection.scratch == 0).then_some((instruction, selection))
        };
        let steps = chain.into_iter().enumerate().map(|(index, made)| step(made, index == 0));
        Some(Self { steps: steps.collect::<Option<_>>()? })
    }

    /// The cast of what one buffer of a program holds in another.
    pub fn cast(program: &Program, from: BufferId, to: BufferId) -> Result<Self, String> {
        let (op, ty) = (Op::from(Cast {}), |id: BufferId| std::slice::from_ref(&program.buffers[id].ty));
        let selection = select(&op, ty(from), ty(to)).map_err(|error| error.to_string())?;
        let instruction = Instruction::new(Action::Compute(op), vec![from], vec![to], Stream::Compute);
        Ok(Self { steps: vec![(instruction, selection)] })
    }
}

impl Rank {
    /// Makes the values of slots, between steps.
    pub fn make(&mut self, all: &[Making]) -> Result<(), Failure> {
        let steps = || all.iter().flat_map(|making| &making.steps);
        self.device.load_missing(steps().flat_map(|(_, selection)| kernels(&selection.steps)))?;
        let program = self.program.clone();
        let layout = Layout { program: &program, arenas: &self.arenas };
        let mut all: Vec<Command> = Vec::new();
        for (instruction, selection) in steps() {
            all.extend(commands(&mut self.device, &mut self.libraries, &layout, instruction, Some(selection))?);
        }
        self.enqueue(&all, Stream::Compute, 0)?;
        self.finish(Stream::Compute, &AtomicBool::new(false))
    }
}
