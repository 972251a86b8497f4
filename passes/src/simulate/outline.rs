//! What the prediction of a plan needs of a program: of each instruction its stream, what it waits for and what it
//! takes.
//!
//! Programs of many stages and copies can take a gigabyte. In an outline sections that differ in addresses alone are
//! one body, and a program may go as soon as its outline is known ([`lower_each`](crate::lower::lower_each)).

use super::price::{Work, brought, kernel, source, work};
use super::ranks::Pattern;
use crate::allocate::{Abridged, memory_beside};
use crate::cluster::{Cluster, Profile};
use crate::cost::is_product;
use crate::lower::local_op;
use rustc_hash::{FxHashMap, FxHasher};
use shardc_ir::ops::{Op, OpDef};
use shardc_ir::plan::Memory;
use shardc_ir::program::{Action, Instruction, Run, Section, Stream};
use shardc_ir::view::is_view;
use shardc_ir::{AxisId, BufferId, NodeId, Plan, Program, Sharding};
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};

/// What the instructions of a program need, per body and instruction.
pub(super) type Works = Vec<Vec<Work>>;

/// Per stream, instructions by their indices.
pub(super) type Queues = [Vec<u32>; Stream::ALL.len()];

/// The outline of a program.
#[derive(Debug)]
pub struct Outline {
    /// The rank whose program it is.
    pub rank: u64,
    /// What its device memory is for at its peak.
    pub memory: Memory,
    /// The step: which section runs when.
    pub(super) order: Vec<Run>,
    /// The name of each section, and its body.
    pub(super) sections: Vec<(String, usize)>,
    /// The instructions of sections: those of a stage's copies are alike.
    pub(super) bodies: Vec<Vec<Line>>,
    /// Per body, those of each stream in their order.
    pub(super) queues: Vec<Queues>,
    /// Whom it meets.
    pub(super) pattern: Pattern,
    /// What the instructions need, by the index of the device among those of the cluster, for all on which
    /// ranks run the program.
    pub(super) priced: BTreeMap<usize, Priced>,
}

/// An instruction.
#[derive(Debug, PartialEq)]
pub(super) struct Line {
    pub stream: Stream,
    pub sort: Sort,
    /// The instructions that must have finished before it starts.
    pub after: Box<[u32]>,
}

/// What the seconds of an instruction count as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sort {
    /// Matrix products and attention.
    Product,
    /// The optimizer's update.
    Optimizer,
    /// Any other.
    Rest,
}

impl Outline {
    /// Of a program of a plan.
    pub fn of(program: &Program, plan: &Plan, cluster: &Cluster) -> Self {
        Self::beside((program, &[]), plan, cluster)
    }

    /// The same of a program that is abridged.
    pub fn of_abridged(Abridged { program, held }: &Abridged, plan: &Plan, cluster: &Cluster) -> Self {
        Self::beside((program, held), plan, cluster)
    }

    fn beside((program, held): (&Program, &[BufferId]), plan: &Plan, cluster: &Cluster) -> Self {
        let (sections, first) = bodies(program);
        let devices = &cluster.kinds_of_stages(&plan.mesh)[plan.mesh.stage_of(program.rank) as usize];
        let price =
            |device: &usize| (*device, Priced::new((program, &first), plan, (cluster.devices()[*device], cluster)));
        let bodies = first.iter().map(|section| section.instructions.iter().map(Line::of).collect());
        let bodies: Vec<Vec<Line>> = bodies.collect();
        Self {
            rank: program.rank,
            memory: memory_beside(program, held),
            order: program.order.clone(),
            sections,
            queues: bodies.iter().map(|lines| queues(lines)).collect(),
            bodies,
            pattern: Pattern::new(program.rank, &program.groups, program.instructions(), &plan.mesh),
            priced: devices.iter().map(price).collect(),
        }
    }

    /// The body of a run's section.
    pub(super) fn body(&self, run: &Run) -> usize {
        self.sections[run.section.as_u32() as usize].1
    }

    /// The instructions of a run.
    pub(super) fn lines(&self, run: &Run) -> &[Line] {
        &self.bodies[self.body(run)]
    }

    /// The seconds in which inputs of a step are brought ahead to a device: the host's link does nothing else, so no step
    /// is shorter.
    pub(super) fn brought(&self, device: usize) -> f64 {
        let of = |priced: &Priced| self.order.iter().map(|run| priced.brought[self.body(run)]).sum();
        self.priced.get(&device).map_or(0.0, of)
    }

    /// How many instructions one rank runs in a step.
    pub(super) fn instructions(&self) -> usize {
        self.order.iter().map(|run| self.lines(run).len()).sum()
    }
}

fn queues(lines: &[Line]) -> Queues {
    let mut queues = Queues::default();
    for (index, line) in lines.iter().enumerate() {
        queues[line.stream as usize].push(index as u32);
    }
    queues
}

/// The name and the body of each section, and the first section of each body.
fn bodies(program: &Program) -> (Vec<(String, usize)>, Vec<&Section>) {
    let mut first: Vec<&Section> = Vec::new();
    let mut of_hash: FxHashMap<u64, Vec<usize>> = FxHashMap::default();
    let mut sections = Vec::with_capacity(program.sections.len());
    for section in program.sections.values() {
        let mut hasher = FxHasher::default();
        section.instructions.iter().for_each(|of| (of.stream, &of.after, of.source).hash(&mut hasher));
        let known = of_hash.entry(hasher.finish()).or_default();
        let body = known.iter().copied().find(|body| is_alike(program, first[*body], section)).unwrap_or_else(|| {
            known.push(first.len());
            first.push(section);
            first.len() - 1
        });
        sections.push((section.name.clone(), body));
    }
    (sections, first)
}

/// Whether sections do the same with other buffers of the same types.
fn is_alike(program: &Program, a: &Section, b: &Section) -> bool {
    let equal = |(a, b): (&BufferId, &BufferId)| program.buffers[*a].ty == program.buffers[*b].ty;
    let all = |a: &[BufferId], b: &[BufferId]| a.len() == b.len() && a.iter().zip(b).all(equal);
    let is_alike = |(a, b): (&Instruction, &Instruction)| {
        let is_equal = a.stream == b.stream && a.after == b.after && a.source == b.source && a.action == b.action;
        // What moves nothing depends on where the bytes lie.
        let may_view = matches!(a.action, Action::Compute(Op::Slice(_) | Op::Concat(_)));
        let is_view = |of| is_view(&program.buffers, of);
        is_equal
            && all(&a.operands, &b.operands)
            && all(&a.results, &b.results)
            && (!may_view || is_view(a) == is_view(b))
    };
    a.instructions.len() == b.instructions.len() && a.instructions.iter().zip(&b.instructions).all(is_alike)
}

impl Line {
    fn of(instruction: &Instruction) -> Self {
        let after = instruction.after.iter().map(|after| *after as u32).collect();
        Self { stream: instruction.stream, sort: Sort::of(&instruction.action), after }
    }
}

impl Sort {
    fn of(action: &Action) -> Self {
        match action {
            Action::Compute(op) if is_product(op) => Self::Product,
            Action::Compute(op) if op.single().update().is_some() => Self::Optimizer,
            _ => Self::Rest,
        }
    }
}

/// What the instructions of a program need on a device, and where that depends on the rank.
#[derive(Debug)]
pub(super) struct Priced {
    /// On the rank whose program it is.
    works: Works,
    /// Per body, the seconds in which the host brings inputs ahead.
    brought: Vec<f64>,
    /// The instructions whose seconds depend on the rank, by their body and index.
    uneven: Vec<(usize, usize)>,
    /// The axes on which they do, in the order of the mesh.
    pub axes: Vec<AxisId>,
    /// At each place along these axes, the seconds of the uneven instructions.
    pub places: Vec<(Vec<u64>, Vec<f64>)>,
}

impl Priced {
    fn new((program, bodies): (&Program, &[&Section]), plan: &Plan, (device, cluster): (&Profile, &Cluster)) -> Self {
        let (mesh, here) = (&plan.mesh, plan.mesh.coordinates(program.rank, 0));
        // What depends on a place along an axis differs between its ends.
        let other_end = |axis: AxisId| {
            let (mut end, at) = (here.clone(), axis.0 as usize);
            end[at] = if end[at] == 0 { mesh.size(axis) - 1 } else { 0 };
            (axis, end)
        };
        let wide = mesh.ids().filter(|axis| !mesh.is_time(*axis) && mesh.size(*axis) > 1);
        let ends: Vec<(AxisId, Vec<u64>)> = wide.map(other_end).collect();
        let price = |instruction| work(program, instruction, &plan.graph, (device, cluster));
        let works = bodies.iter().map(|of| of.instructions.iter().map(price).collect()).collect();
        let ahead = |of: &&Section| of.instructions.iter().map(|of| brought(program, of, (device, cluster))).sum();
        let brought = bodies.iter().map(ahead).collect();
        let (mut uneven, mut axes) = (Vec::new(), Vec::new());
        for (body, of) in bodies.iter().enumerate() {
            for (index, instruction) in of.instructions.iter().enumerate() {
                let Some(part) = Part::of(plan, instruction, &here) else { continue };
                let seconds = |at: &[u64]| part.seconds(plan, program, device, at);
                let alone = seconds(&here);
                let differs = |(_, end): &&(AxisId, Vec<u64>)| seconds(end) != alone;
                let known = axes.len();
                axes.extend(ends.iter().filter(differs).map(|(axis, _)| *axis));
                if axes.len() > known {
                    uneven.push(((body, index), part));
                }
            }
        }
        axes.sort_unstable();
        axes.dedup();
        let at = |rank: u64| {
            let at = mesh.coordinates(rank, 0);
            (place(&at, &axes), uneven.iter().map(|(_, part)| part.seconds(plan, program, device, &at)).collect())
        };
        let places = mesh.group(program.rank, &axes).into_iter().map(at).collect();
        Self { works, brought, uneven: uneven.into_iter().map(|(at, _)| at).collect(), axes, places }
    }

    /// What the instructions need where the uneven ones take so long.
    pub fn works_with(&self, seconds: &[f64]) -> Works {
        let mut works = self.works.clone();
        for ((body, index), seconds) in self.uneven.iter().zip(seconds) {
            works[*body][*index] = Work::Local(*seconds);
        }
        works
    }
}

/// The coordinates along some axes.
pub(super) fn place(coordinates: &[u64], axes: &[AxisId]) -> Vec<u64> {
    axes.iter().map(|axis| coordinates[axis.0 as usize]).collect()
}

/// An instruction whose operation depends on the rank.
struct Part<'a> {
    instruction: &'a Instruction,
    node: NodeId,
    /// The layouts of the node's operands and results.
    layouts: [Vec<Sharding>; 2],
}

impl<'a> Part<'a> {
    /// An instruction that does its node, if that is another operation on every rank.
    fn of(plan: &Plan, instruction: &'a Instruction, here: &[u64]) -> Option<Self> {
        let Action::Compute(op) = &instruction.action else { return None };
        let node = source(instruction, &plan.graph)?;
        let of = plan.graph.node(node);
        // Of queries that are a part already, as those of a chunk are, the first rank's part is the same operation.
        let is_led = match op {
            Op::Attention(op) => op.lead.is_some(),
            Op::AttentionGrad(op) => op.lead.is_some(),
            _ => false,
        };
        if *op == of.op && !is_led {
            return None;
        }
        let rule = plan.rule(node);
        let strategy = rule.unrolled(&plan.strategies[node]);
        let operands = (0..of.operands.len()).map(|index| rule.operand_sharding(index, &strategy)).collect();
        let results = (0..of.results.len()).map(|index| rule.result_sharding(index, &strategy)).collect();
        let part = Self { instruction, node, layouts: [operands, results] };
        // Regions and what is repeated are another operation everywhere.
        (part.op(plan, here) == *op).then_some(part)
    }

    /// The operation at some coordinates.
    fn op(&self, plan: &Plan, at: &[u64]) -> Op {
        let [operands, results] = &self.layouts;
        local_op(plan, plan.graph.node(self.node), [operands, results], at)
    }

    /// The seconds of the instruction at some coordinates.
    fn seconds(&self, plan: &Plan, program: &Program, device: &Profile, at: &[u64]) -> f64 {
        kernel(&self.op(plan, at), program, self.instruction, &plan.graph, device)
    }
}
