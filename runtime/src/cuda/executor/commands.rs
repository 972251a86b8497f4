//! Instructions as commands: what to enqueue, with its addresses.

use super::super::copies::Exchange;
use super::super::cudnn::{Bound, Cudnn};
use super::super::device::{Device, Failure, ReadyLaunch};
use super::super::gemm::{Algorithm, Blas, Problem, ReadyGemm};
use super::super::kernel::Arg;
use super::super::nccl::{Collective, Part};
use super::super::select::{Gemm, Selection, Step, batch, kernels};
use super::super::tune::Choices;
use shardc_ir::plan::Space;
use shardc_ir::program::{Action, Instruction};
use shardc_ir::view::is_view;
use shardc_ir::{BufferId, DType, Op, Program};
use std::collections::HashMap;
use std::sync::Arc;

/// Something to enqueue, with its addresses.
pub enum Command {
    Launch(ReadyLaunch),
    Zero {
        to: u64,
        bytes: u64,
    },
    Copy {
        to: u64,
        from: u64,
        bytes: u64,
    },
    Gemm(Box<ReadyGemm>),
    Fused(Bound),
    Collective {
        group: usize,
        collective: Collective,
        parts: Vec<Part>,
    },
    /// A collective by copies.
    Exchange(Exchange),
    /// Copies the microbatch's part from where the caller's tensor was put.
    Feed {
        input: usize,
        to: u64,
        bytes: u64,
    },
    /// What the first microbatch does, and what the others do.
    Accumulate {
        first: Vec<Command>,
        rest: Vec<Command>,
    },
}

/// The libraries, opened for this rank's device.
pub struct Libraries {
    pub blas: Blas,
    /// The algorithms of products that were measured.
    pub choices: Arc<Choices<Algorithm>>,
    pub cudnn: Cudnn,
}

/// Where things are while commands are made.
pub struct Layout<'a> {
    pub program: &'a Program,
    pub arenas: &'a HashMap<Space, u64>,
}

impl Layout<'_> {
    /// The address of a buffer.
    pub fn buffer(&self, id: BufferId) -> u64 {
        let buffer = &self.program.buffers[id];
        self.arenas.get(&buffer.space).copied().unwrap_or(0) + buffer.offset
    }

    /// The address of what a kernel takes.
    pub fn resolve(&self, instruction: &Instruction, arg: Arg) -> u64 {
        match arg {
            Arg::Operand(index, at) => self.buffer(instruction.operands[index]) + at,
            Arg::Result(index, at) => self.buffer(instruction.results[index]) + at,
            // Without scratch memory nothing asks for it: `choose` has checked.
            Arg::Scratch(at) => instruction.scratch.map_or(0, |scratch| self.buffer(scratch)) + at,
        }
    }
}

impl Layout<'_> {
    /// A product of an instruction, at its addresses. `workspace` is a part of the scratch memory.
    pub fn problem(
        &self,
        blas: &Blas,
        instruction: &Instruction,
        gemm: &Gemm,
        workspace: (u64, u64),
    ) -> Result<Problem, Failure> {
        let resolve = |arg: Arg| self.resolve(instruction, arg);
        blas.describe(gemm, (resolve(Arg::Scratch(workspace.0)), workspace.1), resolve)
    }

    /// Products beside each other: one batch if they lie so and the library has an algorithm for it, else each.
    pub fn problems(
        &self,
        blas: &Blas,
        instruction: &Instruction,
        gemms: &[Gemm],
        workspace: (u64, u64),
    ) -> Result<Vec<Problem>, Failure> {
        if let Some(gemm) = batch(gemms, |arg| self.resolve(instruction, arg)) {
            let problem = self.problem(blas, instruction, &gemm, workspace)?;
            match blas.candidates(&problem, 1) {
                Ok(_) => return Ok(vec![problem]),
                Err(reason) => tracing::debug!("products one by one: {reason}"),
            }
        }
        gemms.iter().map(|gemm| self.problem(blas, instruction, gemm, workspace)).collect()
    }
}

/// The commands of an instruction.
pub fn commands(
    device: &mut Device,
    libraries: &mut Libraries,
    layout: &Layout<'_>,
    instruction: &Instruction,
    selection: Option<&Selection>,
) -> Result<Vec<Command>, Failure> {
    let at = |id: &BufferId| layout.buffer(*id);
    let bytes = |id: &BufferId| layout.program.buffers[*id].ty.bytes().0;
    match &instruction.action {
        Action::Compute(Op::Reshape(_) | Op::Slice(_) | Op::Concat(_))
            if is_view(&layout.program.buffers, instruction) =>
        {
            Ok(Vec::new())
        }
        Action::Compute(_) => {
            let selection = selection.ok_or("nothing chosen")?;
            selected(device, libraries, layout, instruction, (&selection.steps, selection.workspace))
        }
        Action::Copy => {
            let pairs = instruction.operands.iter().zip(&instruction.results);
            Ok(pairs.map(|(from, to)| Command::Copy { to: at(to), from: at(from), bytes: bytes(to) }).collect())
        }
        Action::Feed { input } => {
            let to = &instruction.results[0];
            Ok(vec![Command::Feed { input: *input, to: at(to), bytes: bytes(to) }])
        }
        Action::Accumulate => {
            let selection = selection.ok_or("nothing chosen")?;
            let (rest, first) = selection.steps.split_at(selection.steps.len() - selection.first);
            let mut all = |steps| selected(device, libraries, layout, instruction, (steps, selection.workspace));
            Ok(vec![Command::Accumulate { first: all(first)?, rest: all(rest)? }])
        }
        meeting => {
            let (group, collective) = collective(meeting).ok_or("is no collective")?;
            if let Some(selection) = selection {
                return selected(device, libraries, layout, instruction, (&selection.steps, selection.workspace));
            }
            let count = instruction.operands.len().max(instruction.results.len());
            let parts = (0..count).map(|index| part(layout.program, instruction, index, at)).collect();
            Ok(vec![Command::Collective { group, collective, parts }])
        }
    }
}

/// What the library does for an action, and the communicator that it takes.
fn collective(action: &Action) -> Option<(usize, Collective)> {
    Some(match action {
        Action::AllReduce { reduce, group } => (*group, Collective::AllReduce(*reduce)),
        Action::AllGather { group } => (*group, Collective::AllGather),
        Action::ReduceScatter { reduce, group } => (*group, Collective::ReduceScatter(*reduce)),
        Action::AllToAll { group } => (*group, Collective::AllToAll),
        Action::Send { peer } => (MESSAGES, Collective::Send(*peer)),
        Action::Receive { peer } => (MESSAGES, Collective::Receive(*peer)),
        _ => return None,
    })
}

/// The communicator of all ranks for messages between two.
pub const MESSAGES: usize = usize::MAX;

/// What a collective sends and receives of its `index`th tensor, with buffers where `place` says.
pub fn part(program: &Program, instruction: &Instruction, index: usize, place: impl Fn(&BufferId) -> u64) -> Part {
    let (from, to) = (instruction.operands.get(index), instruction.results.get(index));
    let ty = |id: &BufferId| &program.buffers[*id].ty;
    let elements = |id: Option<&BufferId>| id.map_or(0, |id| ty(id).elements());
    Part {
        from: from.map_or(0, &place),
        to: to.map_or(0, &place),
        sent: elements(from),
        received: elements(to),
        dtype: from.or(to).map_or(DType::F32, |id| ty(id).dtype),
    }
}

fn selected(
    device: &mut Device,
    libraries: &mut Libraries,
    layout: &Layout<'_>,
    instruction: &Instruction,
    (steps, workspace): (&[Step], (u64, u64)),
) -> Result<Vec<Command>, Failure> {
    let resolve = |arg: Arg| layout.resolve(instruction, arg);
    let mut commands = Vec::new();
    for step in steps {
        commands.push(match step {
            Step::Launch(launch) => Command::Launch(device.prepare(launch, resolve)?),
            Step::Table(table) => {
                for launch in table.launches(resolve) {
                    commands.push(Command::Launch(device.prepare_table(table, launch)?));
                }
                continue;
            }
            Step::Zero { to, bytes } => Command::Zero { to: resolve(*to), bytes: *bytes },
            Step::Copy { from, to, .. } if resolve(*from) == resolve(*to) => continue,
            Step::Copy { from, to, bytes } => Command::Copy { from: resolve(*from), to: resolve(*to), bytes: *bytes },
            Step::Upload { to, bytes } => {
                let from = device.allocate_pinned(bytes.len() as u64)?;
                device.write_pinned(from, bytes);
                Command::Copy { from, to: resolve(*to), bytes: bytes.len() as u64 }
            }
            Step::Products(gemms) => {
                for problem in layout.problems(&libraries.blas, instruction, gemms, workspace)? {
                    let choice = libraries.choices.get(&problem.key).copied();
                    commands.push(Command::Gemm(Box::new(libraries.blas.bind(problem, choice)?)));
                }
                continue;
            }
            Step::Gemm(gemm) => {
                let problem = layout.problem(&libraries.blas, instruction, gemm, workspace)?;
                let choice = libraries.choices.get(&problem.key).copied();
                Command::Gemm(Box::new(libraries.blas.bind(problem, choice)?))
            }
            Step::Meet { from, to, elements: [sent, received], dtype } => {
                let (group, collective) = collective(&instruction.action).ok_or("is no collective")?;
                let part =
                    Part { from: resolve(*from), to: resolve(*to), sent: *sent, received: *received, dtype: *dtype };
                Command::Collective { group, collective, parts: vec![part] }
            }
            Step::Engine(engine) => {
                let addresses: Vec<u64> = engine.buffers.iter().map(|arg| resolve(*arg)).collect();
                Command::Fused(libraries.cudnn.bind(&engine.kernel, &addresses, resolve(engine.workspace))?)
            }
            Step::Fused(fused) => {
                let steps = if fused.engines().all(|engine| libraries.cudnn.takes(&engine.kernel)) {
                    &fused.steps
                } else {
                    device.load_missing(kernels(&fused.otherwise))?;
                    &fused.otherwise
                };
                commands.extend(selected(device, libraries, layout, instruction, (steps, workspace))?);
                continue;
            }
        });
    }
    Ok(commands)
}

pub fn action_name(action: &Action) -> String {
    match action {
        Action::Compute(op) => op.name().to_string(),
        other => format!("{other:?}"),
    }
}

/// What an instruction is called in an error; of many operands, the first few.
pub fn describe(program: &Program, section: &str, index: usize, instruction: &Instruction) -> String {
    let list = |ids: &[BufferId]| {
        let each = ids.iter().take(LISTED).map(|id| format!("{id}: {}", program.buffers[*id].ty));
        let more = if ids.len() > LISTED { format!(", {} more", ids.len() - LISTED) } else { String::new() };
        each.collect::<Vec<_>>().join(", ") + &more
    };
    let name = action_name(&instruction.action);
    format!("{section}.{index} {name}({}) -> {}", list(&instruction.operands), list(&instruction.results))
}

/// The operands that a message lists.
const LISTED: usize = 4;
