//! One step of the ranks of a stage at once, instruction by instruction, over facts.

use super::TranslationFacts;
use super::arrangement::Arrangement;
use super::conversion::{self, Local, group_axes};
use super::interface::Leaves;
use super::kernel::{Kernels, Layout, Layouts};
use super::segment::{Kind, Segment, segments};
use super::state::{Content, Fact, value_text};
use super::stored::Stored;
use super::sums::is_zero;
use crate::diagnostic::Diagnostics;
use crate::entity::{BufferId, EntityRef, NodeId, SectionId, ValueId};
use crate::graph::{Node, OutputKind};
use crate::mesh::{AxisId, AxisSet};
use crate::ops::{Each, Epilogue, Op, OpDef};
use crate::plan::Plan;
use crate::program::{Action, Instruction, Program, Run};
use crate::sharding::{ReduceKind, Sharding};
use crate::view::is_view;
use std::collections::{BTreeMap, HashSet};
use std::rc::Rc;

/// Where an instruction stands.
pub(super) type At = (SectionId, usize);

/// A kind of segment, and where in it.
pub(super) type Of = (usize, usize);

/// In which run, where, and of what, if it is the same wherever this is.
type When = (Run, At, Option<Of>);

/// What a collective over some axes makes of a fact.
type Conversion<'a> = dyn Fn(&Fact, &[AxisId]) -> Result<Fact, String> + 'a;

pub(super) struct Interpreter<'a> {
    pub plan: &'a Plan,
    pub programs: &'a [Program],
    coordinates: Vec<Vec<u64>>,
    pub groups: Vec<Result<Vec<AxisId>, String>>,
    /// The time axes of more than one microbatch.
    pub time: AxisSet,
    leaves: Leaves<'a>,
    pub kernels: Kernels<'a>,
    pub contents: Vec<Content>,
    stored: Stored,
    pub segments: Rc<BTreeMap<SectionId, Vec<Segment>>>,
    pub kinds: Vec<Kind>,
    /// The kernels whose types and attributes were compared with their node's. What is a change of layout in one run may
    /// be a kernel in another.
    compared: HashSet<Of>,
    pub facts: TranslationFacts,
    pub found: Diagnostics,
}

impl<'a> Interpreter<'a> {
    /// Before the step of programs that are alike. `stages` are the axes along which they are not.
    pub fn new(plan: &'a Plan, programs: &'a [Program], stages: &[AxisId]) -> Self {
        let (mesh, count) = (&plan.mesh, |of: fn(&Program) -> usize| programs.first().map_or(0, of));
        let groups: Vec<_> =
            (0..count(|program| program.groups.len())).map(|index| group_axes(programs, index, mesh)).collect();
        let (segments, kinds) = segments(programs, |instruction| meets_stages(instruction, &groups, stages));
        let mut interpreter = Self {
            plan,
            programs,
            coordinates: programs.iter().map(|program| mesh.coordinates(program.rank, 0)).collect(),
            groups,
            time: mesh.ids().filter(|axis| mesh.is_time(*axis) && mesh.size(*axis) > 1).collect(),
            leaves: Leaves::of(plan),
            kernels: Kernels::new(plan, programs),
            contents: vec![Content::Nothing; count(|program| program.buffers.len())],
            stored: programs.first().map(Stored::of).unwrap_or_default(),
            segments: Rc::new(segments),
            kinds: vec![Kind::default(); kinds],
            compared: HashSet::new(),
            facts: TranslationFacts {
                ranks: programs.len(),
                instructions: count(|program| program.instructions().count()),
                ..TranslationFacts::default()
            },
            found: Diagnostics::default(),
        };
        interpreter.seed();
        interpreter
    }
}

/// Whether other stages take part in an instruction.
fn meets_stages(instruction: &Instruction, groups: &[Result<Vec<AxisId>, String>], stages: &[AxisId]) -> bool {
    let axes = instruction.action.group().and_then(|group| groups[group].as_ref().ok());
    matches!(instruction.action, Action::Send { .. } | Action::Receive { .. })
        || axes.is_some_and(|axes| axes.iter().any(|axis| stages.contains(axis)))
}

impl Interpreter<'_> {
    fn program(&self) -> &Program {
        &self.programs[0]
    }

    fn seed(&mut self) {
        let program = &self.programs[0];
        for slot in &program.slots {
            let Some(value) = self.leaves.stored.get(slot.name.as_str()) else { continue };
            let fact = Fact::ready(*value, self.kernels.made_as(*value));
            self.contents[slot.buffer.index()] = vec![fact].into();
        }
    }

    /// Interprets one instruction; `is_seen` says that it is not the first time that one of its kind is.
    pub fn step(&mut self, run: Run, at: At, of: Of, is_seen: bool) {
        let programs = self.programs;
        let instruction = &programs[0].sections[at.0].instructions[at.1];
        let mut read = instruction.operands.clone();
        if instruction.action == Action::Accumulate && run.microbatch > 0 {
            read.extend(&instruction.results);
        }
        let refuted = read.iter().any(|buffer| self.contents[buffer.index()] == Content::Refuted);
        let made = match refuted {
            true => None,
            false => match self.transfer((run, at, Some(of)), instruction, is_seen) {
                Ok(facts) => Some(facts),
                Err(message) => {
                    self.found.push(programs[0].place(at.0, at.1), message);
                    None
                }
            },
        };
        let is_view = is_view(&programs[0].buffers, instruction);
        let mut made = made.map(Vec::into_iter);
        for result in &instruction.results {
            let facts = made.as_mut().and_then(Iterator::next);
            self.contents[result.index()] = facts.map_or(Content::Refuted, Content::from);
            self.note_stored(*result, is_view);
        }
        instruction.scratch.into_iter().for_each(|scratch| self.note_stored(scratch, false));
    }

    /// A buffer was written, or named if it is a view.
    pub fn note_stored(&mut self, buffer: BufferId, is_view: bool) {
        self.stored.note(buffer, &self.programs[0].buffers[buffer], is_view);
    }

    /// The facts about each result.
    fn transfer(&mut self, when: When, instruction: &Instruction, is_seen: bool) -> Result<Vec<Vec<Fact>>, String> {
        let (first, (run, at, _)) = (!is_seen, when);
        let mesh = &self.plan.mesh;
        match &instruction.action {
            Action::Compute(Op::Each(each)) => {
                self.facts.kernels += if first { each.count } else { 0 };
                self.each(when, instruction, each)
            }
            Action::Compute(op) => {
                let is_conversion = self.is_conversion(op, instruction);
                self.facts.conversions += usize::from(first && is_conversion && !matches!(op, Op::Reshape(_)));
                if is_conversion {
                    return Ok(vec![self.local(at, instruction, op)?]);
                }
                self.facts.kernels += usize::from(first);
                let node = instruction.source.ok_or("is no change of layout, and comes from no node of the graph")?;
                self.kernel(when, instruction, node)
            }
            Action::AllReduce { reduce, group } => {
                let name = if *reduce == ReduceKind::Max { "takes the maximum of" } else { "reduces" };
                let step = |fact: &Fact, axes: &[AxisId]| conversion::all_reduce(fact, axes, *reduce, mesh);
                self.collective(first, name, *group, instruction, &step)
            }
            Action::AllGather { group } => {
                let step = |fact: &Fact, axes: &[AxisId]| conversion::all_gather(fact, axes, mesh);
                self.collective(first, "gathers", *group, instruction, &step)
            }
            Action::ReduceScatter { reduce, group } => {
                let step = |fact: &Fact, axes: &[AxisId]| conversion::reduce_scatter(fact, axes, *reduce, mesh);
                self.collective(first, "reduces and scatters", *group, instruction, &step)
            }
            Action::AllToAll { group } => {
                let step = |fact: &Fact, axes: &[AxisId]| conversion::all_to_all(fact, axes, mesh);
                self.collective(first, "exchanges", *group, instruction, &step)
            }
            Action::Copy => {
                let content = |buffer: &BufferId| match self.contents[buffer.index()].facts() {
                    [] => Err(format!("copies {buffer}, of which nothing is known")),
                    facts => Ok(facts.to_vec()),
                };
                instruction.operands.iter().map(content).collect()
            }
            Action::Accumulate => Ok(vec![vec![self.accumulate(run, instruction)?]]),
            Action::Feed { input } => {
                let name = self.program().inputs[*input].name.as_str();
                let value = *self.leaves.inputs.get(name).ok_or("feeds what is no input of the graph")?;
                let of = self.plan.graph.value(value);
                let (layouts, ty) = (self.kernels.layouts(of.def), &self.program().buffers[instruction.results[0]].ty);
                let fed = &layouts.results[of.index];
                match fed.local == *ty {
                    true => Ok(vec![vec![Fact::ready(value, fed.arrangement.clone())]]),
                    false => Err(format!("feeds {ty}; by its layout a rank's part is {}", fed.local)),
                }
            }
            Action::Send { .. } | Action::Receive { .. } => {
                Err("passes a value to another stage: it is no part of a segment".to_string())
            }
        }
    }

    /// The items of an instruction, each by the node that it is: of those that read what its first operand
    /// holds, all that justify it.
    fn each(&mut self, when: When, instruction: &Instruction, each: &Each) -> Result<Vec<Vec<Fact>>, String> {
        let mut made = Vec::with_capacity(instruction.results.len());
        let items = each.items(&instruction.operands).zip(each.items(&instruction.results));
        for (index, (operands, results)) in items.enumerate() {
            let (operands, results) = (operands.to_vec(), results.to_vec());
            let held = self.contents[operands[0].index()].facts().iter().map(|fact| fact.value);
            let readers = held.flat_map(|value| self.kernels.users(value)).filter(|(_, position)| *position == 0);
            let is_same = |id: &NodeId| self.plan.graph.node(*id).op == *each.op;
            let nodes: Vec<NodeId> = readers.map(|(id, _)| *id).filter(is_same).collect();
            let item = Instruction { operands, results, ..instruction.clone() };
            let (mut facts, mut why) = (vec![Vec::new(); item.results.len()], None);
            for id in nodes {
                // What is held says which node it is: in a later run it may be another one.
                match self.kernel((when.0, when.1, None), &item, id) {
                    Ok(more) => facts.iter_mut().zip(more).for_each(|(facts, more)| facts.extend(more)),
                    Err(message) => why = why.or(Some(message)),
                }
            }
            if facts.iter().any(Vec::is_empty) {
                let held = self.held(item.operands[0]);
                let why = why.unwrap_or_else(|| format!("no {} of the graph reads {held}", each.op.name()));
                return Err(format!("item {index}: {why}"));
            }
            made.extend(facts);
        }
        Ok(made)
    }

    /// Whether a local operation rearranges a result of the node it comes from, instead of making it.
    fn is_conversion(&self, op: &Op, instruction: &Instruction) -> bool {
        if op.may_add() || matches!(op, Op::Matmul(_)) {
            return false;
        }
        let Some(source) = instruction.source else { return true };
        let results = &self.plan.graph.node(source).results;
        let holds =
            |buffer: &BufferId| self.contents[buffer.index()].facts().iter().any(|fact| results.contains(&fact.value));
        instruction.operands.iter().any(holds)
    }

    fn local(&self, at: At, instruction: &Instruction, op: &Op) -> Result<Vec<Fact>, String> {
        if let (Op::Cast(_), [from], [to]) = (op, &instruction.operands[..], &instruction.results[..]) {
            return self.recast(*from, *to);
        }
        let ops = self.programs.iter().filter_map(|program| match &program.sections[at.0].instructions[at.1].action {
            Action::Compute(op) => Some(op),
            _ => None,
        });
        let shape = instruction.operands.first().map_or(&[][..], |buffer| &self.program().buffers[*buffer].ty.shape);
        let (mesh, graph) = (&self.plan.mesh, &self.plan.graph);
        let result = instruction.results.first().map_or(&[][..], |buffer| &self.program().buffers[*buffer].ty.shape);
        let local = Local { ops: ops.collect(), coordinates: &self.coordinates, shape, result, mesh, graph };
        let operands: Vec<&[Fact]> =
            instruction.operands.iter().map(|buffer| self.contents[buffer.index()].facts()).collect();
        local.apply(&operands).map_err(|why| {
            let held: Vec<String> = instruction.operands.iter().map(|buffer| self.held(*buffer)).collect();
            format!("{} of {} is no change of its layout: {why}", op.name(), held.join(" and "))
        })
    }

    /// A gradient on its way through a sum over ranks, in the type in which the plan makes it and back.
    fn recast(&self, from: BufferId, to: BufferId) -> Result<Vec<Fact>, String> {
        let (old, new) = (&self.program().buffers[from].ty, &self.program().buffers[to].ty);
        let is_way = |fact: &&Fact| {
            let (own, types) = (self.plan.graph.ty(fact.value).dtype, [old.dtype, new.dtype]);
            self.kernels.sums_in(fact.value).is_some_and(|sums| types == [own, sums] || types == [sums, own])
        };
        let facts: Vec<Fact> = self.contents[from.index()].facts().iter().filter(is_way).cloned().collect();
        match facts.is_empty() || old.shape != new.shape {
            true => Err(format!("casts {}, which no sum over ranks needs as {new}", self.held(from))),
            false => Ok(facts),
        }
    }

    /// Whether a buffer holds a value in an arrangement.
    pub fn holds(&self, buffer: BufferId, value: ValueId, arrangement: &Arrangement) -> bool {
        self.contents[buffer.index()].is(value, arrangement)
    }

    /// `$3 (%5 [8@dp,4])`.
    pub fn held(&self, buffer: BufferId) -> String {
        format!("{buffer} ({})", self.contents[buffer.index()].text(self.plan))
    }

    fn collective(
        &mut self,
        first: bool,
        name: &str,
        group: usize,
        instruction: &Instruction,
        step: &Conversion<'_>,
    ) -> Result<Vec<Vec<Fact>>, String> {
        self.facts.conversions += usize::from(first);
        let axes = self.groups[group].clone()?;
        let mut results = Vec::with_capacity(instruction.operands.len());
        for operand in &instruction.operands {
            let facts = self.contents[operand.index()].facts();
            let (mut made, mut why) = (Vec::new(), None);
            for fact in facts {
                match step(fact, &axes) {
                    Ok(next) => made.push(next),
                    Err(message) => why = why.or(Some(message)),
                }
            }
            if made.is_empty() {
                let axes = crate::sharding::axes_text(&axes, &self.plan.mesh, "");
                let why = why.unwrap_or_else(|| "nothing is known of it".to_string());
                return Err(format!("{name} {} over `{axes}`: {why}", self.held(*operand)));
            }
            results.push(made);
        }
        Ok(results)
    }

    /// A kernel: its node's operation on operands in the layouts of the node's strategy.
    fn kernel(&mut self, when: When, instruction: &Instruction, id: NodeId) -> Result<Vec<Vec<Fact>>, String> {
        let (run, at, of) = when;
        let node = self.plan.graph.node(id);
        let counts = (instruction.operands.len(), instruction.results.len());
        let (takes, makes) = (node.operands.len(), node.results.len());
        let may_be_zeros = counts == (0, 1) && is_zero(instruction);
        if takes > 0 && may_be_zeros {
            return Ok(vec![vec![self.zeros(node.results[0])]]);
        }
        let epilogue = self.epilogue(at).filter(|_| matches!(&node.op, Op::Matmul(op) if op.epilogue.is_none()));
        let more = takes + 1..=takes + 2;
        let adds = node.op.may_add() && more.contains(&counts.0) && counts.1 == makes;
        if counts != (takes, makes) && !adds && epilogue.is_none() {
            return Err(format!("is no {} of {}", node.op.name(), node.results[0]));
        }
        if takes == 0 {
            return match self.kernels.made_of_nothing(id, at, instruction.results[0]) {
                Err(_) if may_be_zeros => Ok(vec![vec![self.zeros(node.results[0])]]),
                made => Ok(vec![made?]),
            };
        }
        let layouts = self.kernels.layouts(id);
        self.expect_operands(instruction, node, &layouts)?;
        if of.is_none_or(|of| self.compared.insert(of)) {
            self.kernels.check(id, at, instruction, &layouts)?;
        }
        if let Some(epilogue) = epilogue {
            let product = Fact::ready(node.results[0], layouts.results[0].arrangement.clone());
            return self.activate(run, epilogue, &product, instruction);
        }
        if adds {
            let product = Fact::ready(node.results[0], layouts.results[0].arrangement.clone());
            return Ok(vec![self.add_all(run, &product, instruction, takes)?]);
        }
        let fact = |(value, layout): (_, &Layout)| vec![Fact::ready(value, layout.arrangement.clone())];
        Ok(node.results.iter().copied().zip(&layouts.results).map(fact).collect())
    }

    /// Whether the operands hold what the node reads, as its strategy says.
    fn expect_operands(&self, instruction: &Instruction, node: &Node, layouts: &Layouts) -> Result<(), String> {
        for (index, (buffer, value)) in instruction.operands.iter().zip(&node.operands).enumerate() {
            let wanted = &layouts.operands[index];
            if !self.contents[buffer.index()].is(*value, &wanted.arrangement) {
                return Err(format!(
                    "reads {} as operand {index}, but {} of {} takes {}",
                    self.held(*buffer),
                    node.op.name(),
                    node.results[0],
                    value_text(self.plan, *value, &wanted.arrangement)
                ));
            }
        }
        Ok(())
    }

    fn epilogue(&self, at: At) -> Option<Epilogue> {
        match &self.program().sections[at.0].instructions[at.1].action {
            Action::Compute(Op::Matmul(op)) => op.epilogue,
            _ => None,
        }
    }

    /// Readings hold results, slots hold their next values, or what they held.
    pub fn finish(&mut self) {
        let (plan, program) = (self.plan, &self.programs[0]);
        for output in &plan.graph.outputs {
            let ty = plan.graph.ty(output.value);
            match output.kind {
                OutputKind::Result => {
                    let whole = Arrangement::of(&ty.shape, &Sharding::replicated(ty.rank()), &plan.mesh);
                    let reading = program.readings.iter().find(|reading| reading.name == output.name);
                    if let Some(reading) = reading {
                        self.expect(format!("reading \"{}\"", output.name), &[reading.buffer], output.value, &whole);
                    }
                }
                OutputKind::Update(leaf) => self.expect_stored(&output.name, output.value, leaf),
            }
        }
        let updated = |leaf| plan.graph.outputs.iter().any(|output| output.kind == OutputKind::Update(leaf));
        let kept: Vec<(String, _)> = self.leaves.stored.iter().map(|(name, leaf)| (name.to_string(), *leaf)).collect();
        for (name, leaf) in kept.into_iter().filter(|(_, leaf)| !updated(*leaf)) {
            self.expect_stored(&name, leaf, leaf);
        }
    }

    fn expect_stored(&mut self, name: &str, value: ValueId, leaf: ValueId) {
        let program = &self.programs[0];
        let Some(slot) = program.slots.iter().find(|slot| slot.name == name) else { return };
        let home = &program.buffers[slot.buffer];
        let holders = self.stored.holders(home).to_vec();
        let wanted = self.kernels.made_as(leaf);
        self.expect(format!("slot \"{name}\""), &holders, value, &wanted);
    }

    fn expect(&mut self, what: String, holders: &[BufferId], value: ValueId, wanted: &Arrangement) {
        let contents: Vec<&Content> = holders.iter().map(|buffer| &self.contents[buffer.index()]).collect();
        if contents.iter().any(|content| content.is(value, wanted) || **content == Content::Refuted) {
            return;
        }
        let held = contents.last().map_or("nothing".to_string(), |content| content.text(self.plan));
        let wanted = value_text(self.plan, value, wanted);
        self.found.push(what, format!("holds {held} after the step; it should hold {wanted}"));
    }
}
