//! Kinds of ranks: those that run one program on equal devices and take as long for each of its instructions.
//!
//! Programs of ranks in one stage differ in numbers alone, but how long an instruction takes may depend on them: of
//! causal attention whose queries are divided, the rank that has the last part sees the most keys. So a rank's kind is
//! its program, its device and what the instructions take whose seconds depend on its place.

use super::price::{Work, kernel, source, work};
use crate::cluster::{Cluster, Profile};
use crate::lower::local_op;
use crate::threads;
use shardc_ir::program::{Action, Instruction};
use shardc_ir::{AxisId, NodeId, Plan, Program, SectionId, Sharding};
use std::collections::{BTreeMap, BTreeSet};

/// What the instructions of a program need, per section and instruction.
pub(super) type Works = Vec<Vec<Work>>;

/// Of each place along some axes, the kind of the ranks there.
type Places = BTreeMap<Vec<u64>, usize>;

/// The most instructions of a step that are simulated, of all kinds of ranks together; at least one kind is.
const MOST_INSTRUCTIONS: usize = 400_000;

/// The kinds of a mesh's ranks.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Kinds {
    /// Per kind, what its instructions need.
    pub works: Vec<Works>,
    /// Per kind, the index of its program.
    pub program: Vec<usize>,
    /// Per kind, the index of its device among those of the cluster.
    pub device: Vec<usize>,
    /// Per rank, its kind.
    pub of_rank: Vec<usize>,
}

impl Kinds {
    /// The kinds of all ranks, of which each runs the program of the index that `program_of` gives.
    ///
    /// Where there are too many to simulate, kinds that take nearly as long become one, each instruction of which takes
    /// what it takes the slowest of them. A rank that is the slowest in all that it does, as the last along the axes
    /// of a causal mask is, stays what it is, and with it the step, in which all wait for it.
    pub fn new(programs: &[Program], plan: &Plan, cluster: &Cluster, program_of: &dyn Fn(u64) -> usize) -> Self {
        let mesh = &plan.mesh;
        let most = (MOST_INSTRUCTIONS / programs.iter().map(instructions).sum::<usize>().max(1)).max(1);
        let mut kinds = Self { works: Vec::new(), program: Vec::new(), device: Vec::new(), of_rank: Vec::new() };
        let devices = cluster.kinds_of_ranks();
        let pair = |rank: u64| (program_of(rank), devices[rank as usize]);
        // What runs where, with the axes on which its seconds depend.
        let mut of_place: BTreeMap<(usize, usize), (Vec<AxisId>, Places)> = BTreeMap::new();
        let pairs: Vec<(usize, usize)> = (0..mesh.ranks()).map(pair).collect::<BTreeSet<_>>().into_iter().collect();
        let priced = |(index, device): &(usize, usize)| {
            let priced = Priced::new(&programs[*index], plan, (cluster.devices()[*device], cluster));
            let (seconds, places) = merged(priced.at_places(), most);
            let works: Vec<Works> = seconds.iter().map(|seconds| priced.works_with(seconds)).collect();
            (works, priced.axes, places)
        };
        for ((index, device), (works, axes, places)) in pairs.iter().zip(threads::map(&pairs, priced)) {
            let first = kinds.works.len();
            kinds.program.extend(works.iter().map(|_| *index));
            kinds.device.extend(works.iter().map(|_| *device));
            kinds.works.extend(works);
            let places = places.into_iter().map(|(place, kind)| (place, first + kind)).collect();
            of_place.insert((*index, *device), (axes, places));
        }
        let kind = |rank: u64| {
            let (axes, places) = &of_place[&pair(rank)];
            places[&place(&mesh.coordinates(rank, 0), axes)]
        };
        kinds.of_rank = (0..mesh.ranks()).map(kind).collect();
        kinds
    }
}

/// How many instructions one rank runs in a step.
fn instructions(program: &Program) -> usize {
    program.order.iter().map(|run| program.sections[run.section].instructions.len()).sum()
}

/// The coordinates along some axes.
fn place(coordinates: &[u64], axes: &[AxisId]) -> Vec<u64> {
    axes.iter().map(|axis| coordinates[axis.0 as usize]).collect()
}

/// An instruction whose operation depends on the rank.
struct Part<'a> {
    section: SectionId,
    index: usize,
    instruction: &'a Instruction,
    node: NodeId,
    /// The layouts of the node's operands and results.
    layouts: [Vec<Sharding>; 2],
}

/// A program with what its instructions need, and where that depends on the rank.
struct Priced<'a> {
    program: &'a Program,
    plan: &'a Plan,
    device: &'a Profile,
    /// On the rank whose program it is.
    works: Works,
    /// The instructions whose seconds depend on the rank.
    uneven: Vec<Part<'a>>,
    /// The axes on which they do, in the order of the mesh.
    axes: Vec<AxisId>,
}

impl<'a> Priced<'a> {
    fn new(program: &'a Program, plan: &'a Plan, (device, cluster): (&'a Profile, &Cluster)) -> Self {
        let of = |instruction| work(program, instruction, &plan.graph, (device, cluster));
        let works = program.sections.values().map(|section| section.instructions.iter().map(of).collect()).collect();
        let mut own = Self { program, plan, device, works, uneven: Vec::new(), axes: Vec::new() };
        let (mesh, here) = (&plan.mesh, plan.mesh.coordinates(program.rank, 0));
        // What depends on a place along an axis differs between its ends.
        let other_end = |axis: AxisId| {
            let (mut end, at) = (here.clone(), axis.0 as usize);
            end[at] = if end[at] == 0 { mesh.size(axis) - 1 } else { 0 };
            (axis, end)
        };
        let wide = mesh.ids().filter(|axis| !mesh.is_time(*axis) && mesh.size(*axis) > 1);
        let ends: Vec<(AxisId, Vec<u64>)> = wide.map(other_end).collect();
        for (section, of) in &program.sections {
            for (index, instruction) in of.instructions.iter().enumerate() {
                let Some(part) = own.part((section, index), instruction, &here) else { continue };
                let alone = own.seconds(&part, &here);
                let differs = |(_, end): &&(AxisId, Vec<u64>)| own.seconds(&part, end) != alone;
                let axes: Vec<AxisId> = ends.iter().filter(differs).map(|(axis, _)| *axis).collect();
                if !axes.is_empty() {
                    own.uneven.push(part);
                    own.axes.extend(axes);
                }
            }
        }
        own.axes.sort_unstable();
        own.axes.dedup();
        own
    }

    /// An instruction that does its node, if that is another operation on every rank.
    fn part(
        &self,
        (section, index): (SectionId, usize),
        instruction: &'a Instruction,
        here: &[u64],
    ) -> Option<Part<'a>> {
        let Action::Compute(op) = &instruction.action else { return None };
        let node = source(instruction, &self.plan.graph)?;
        let of = self.plan.graph.node(node);
        if *op == of.op {
            return None;
        }
        let rule = self.plan.rule(node);
        let strategy = rule.unrolled(&self.plan.strategies[node]);
        let operands = (0..of.operands.len()).map(|index| rule.operand_sharding(index, &strategy)).collect();
        let results = (0..of.results.len()).map(|index| rule.result_sharding(index, &strategy)).collect();
        let part = Part { section, index, instruction, node, layouts: [operands, results] };
        // Regions and what is repeated are another operation everywhere.
        (local_op(self.plan, of, part.layouts(), here) == *op).then_some(part)
    }

    /// The seconds of an instruction at some coordinates.
    fn seconds(&self, part: &Part<'_>, at: &[u64]) -> f64 {
        let graph = &self.plan.graph;
        let op = local_op(self.plan, graph.node(part.node), part.layouts(), at);
        kernel(&op, self.program, part.instruction, graph, self.device)
    }

    /// At each place along the axes on which they depend, the seconds of the uneven instructions.
    fn at_places(&self) -> Vec<(Vec<u64>, Vec<f64>)> {
        let mesh = &self.plan.mesh;
        let ranks = mesh.group(self.program.rank, &self.axes).into_iter();
        let at = |rank: u64| {
            let at = mesh.coordinates(rank, 0);
            (place(&at, &self.axes), self.uneven.iter().map(|part| self.seconds(part, &at)).collect())
        };
        ranks.map(at).collect()
    }

    /// What the instructions need where the uneven ones take so long.
    fn works_with(&self, seconds: &[f64]) -> Works {
        let mut works = self.works.clone();
        for (part, seconds) in self.uneven.iter().zip(seconds) {
            works[part.section.as_u32() as usize][part.index] = Work::Local(*seconds);
        }
        works
    }
}

impl Part<'_> {
    fn layouts(&self) -> [&[Sharding]; 2] {
        let [operands, results] = &self.layouts;
        [operands, results]
    }
}

/// The distinct seconds of some places, at most so many, and which of them each place has.
fn merged(places: Vec<(Vec<u64>, Vec<f64>)>, most: usize) -> (Vec<Vec<f64>>, Places) {
    let mut distinct: Vec<(Vec<f64>, Vec<Vec<u64>>)> = Vec::new();
    for (place, seconds) in places {
        match distinct.iter_mut().find(|(known, _)| *known == seconds) {
            Some((_, places)) => places.push(place),
            None => distinct.push((seconds, vec![place])),
        }
    }
    let sum = |seconds: &[f64]| seconds.iter().sum::<f64>();
    distinct.sort_by(|a, b| sum(&a.0).total_cmp(&sum(&b.0)));
    let (count, most) = (distinct.len(), most.min(distinct.len()));
    let (mut found, mut of_place): (Vec<Vec<f64>>, _) = (Vec::new(), Places::new());
    for (index, (seconds, places)) in distinct.into_iter().enumerate() {
        let kind = index * most / count;
        of_place.extend(places.into_iter().map(|place| (place, kind)));
        match found.get_mut(kind) {
            Some(slowest) => slowest.iter_mut().zip(seconds).for_each(|(own, other)| *own = own.max(other)),
            None => found.push(seconds),
        }
    }
    (found, of_place)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Equal places are one, and what is merged takes what the slowest of it takes.
    #[test]
    fn the_slowest_place_stays_what_it_is() {
        let places = |seconds: &[[f64; 2]]| -> Vec<(Vec<u64>, Vec<f64>)> {
            seconds.iter().enumerate().map(|(at, of)| (vec![at as u64], of.to_vec())).collect()
        };
        let check = |seconds: &[[f64; 2]], most: usize, expect: &[[f64; 2]]| {
            let (found, of_place) = merged(places(seconds), most);
            assert!(found.len() <= most, "{found:?}");
            assert_eq!(of_place.values().map(|kind| found[*kind].as_slice()).collect::<Vec<_>>(), expect);
        };
        check(&[[1.0, 2.0], [2.0, 4.0], [1.0, 2.0]], 8, &[[1.0, 2.0], [2.0, 4.0], [1.0, 2.0]]);
        check(&[[4.0, 8.0], [3.0, 6.0], [2.0, 4.0], [1.0, 2.0]], 2, &[[4.0, 8.0], [4.0, 8.0], [2.0, 4.0], [2.0, 4.0]]);
        check(&[[1.0, 2.0], [3.0, 1.0], [0.0, 1.0]], 1, &[[3.0, 2.0]; 3]);
    }
}
