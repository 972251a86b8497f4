//! Simulation of a step: what every rank does when, by the cost model.
//!
//! The lowered programs are run as a discrete-event simulation: each stream of a rank runs its
//! instructions in their order, waits for those of `after`, and collectives and messages begin when
//! all who take part are there. What an instruction takes is what the [cost model](crate::cost) says of
//! its local shapes. Ranks that behave alike are simulated once ([`Rank::count`]), so the number of
//! devices costs nothing; a slow rank, or parts of attention that see more keys than others, split them into as
//! many classes as can be told apart.
//!
//! The search compares plans by step times in closed form ([`crate::search::estimate`]); the plan that it
//! chooses is predicted by the simulation of its programs ([`predict`]). Without contention and stragglers
//! the two agree within 3% over the plans that a test compares; where they do not is said in
//! [`crate::search::estimate::beside`].

mod engine;
mod kinds;
mod outline;
mod predict;
mod price;
mod ranks;
#[cfg(test)]
mod tests;

use crate::cluster::Cluster;
use crate::cost::overlap::spread;
use crate::threads;
use engine::Engine;
use kinds::Kinds;
pub use outline::Outline;
use outline::Works;
pub use predict::{Kernels, exact, fullest, predict};
use ranks::{Class, Ranks};
use shardc_ir::program::{Run, Stream};
use shardc_ir::units::{counted, number_text};
use shardc_ir::{AxisId, Mesh, Plan, Program, Seconds};
use std::collections::BTreeSet;
use std::rc::Rc;

/// The most by which something may be slower than planned; the text of [`SimulateError::Factor`] says it.
const MOST_SLOWDOWN: f64 = 1e6;

/// Why there is no simulation.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SimulateError {
    /// A rank that is not in the mesh.
    #[error("rank {rank} is to be slow, but the plan has ranks 0 to {last}; name one of them")]
    UnknownRank {
        /// The rank.
        rank: u64,
        /// The last rank.
        last: u64,
    },
    /// A factor that makes no sense.
    #[error("{what} is {value}; it must be a number from 1 to 1000000")]
    Factor {
        /// What it is of.
        what: &'static str,
        /// Its value.
        value: String,
    },
    /// A rank that is slow in two ways.
    #[error("rank {rank} is to be slow twice; name it once")]
    Twice {
        /// The rank.
        rank: u64,
    },
    /// The mesh has other ranks than the cluster.
    #[error("the plan has {} and the cluster {}; it takes a cluster of {ranks}", counted(*ranks, "rank"), counted(*devices, "device"))]
    Ranks {
        /// The ranks of the mesh.
        ranks: u64,
        /// The devices of the cluster.
        devices: u64,
    },
    /// Programs whose ranks never meet.
    #[error("the programs cannot finish: rank {rank} waits for ever at instruction {instruction} of {section}")]
    Stuck {
        /// The rank.
        rank: u64,
        /// The section.
        section: String,
        /// The instruction.
        instruction: usize,
    },
}

/// What is not as planned.
#[derive(Clone, Debug, PartialEq)]
pub struct Conditions {
    /// Slow ranks, and how many times as long as planned their kernels take.
    pub stragglers: Vec<(u64, f64)>,
    /// How many times more than they carry the devices of a node may ask of its links to other nodes:
    /// 1 where each device has a port of its own all the way, 2 where two share one.
    pub contention: f64,
}

impl Default for Conditions {
    fn default() -> Self {
        Self { stragglers: Vec::new(), contention: 1.0 }
    }
}

/// One instruction of a run. Times are seconds since the run began.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// Its index in the section.
    pub index: u32,
    /// When this rank was ready for it.
    pub ready: f64,
    /// When it began: later than `ready` where others were waited for.
    pub start: f64,
    /// When it ended.
    pub finish: f64,
    /// Of its time, how long a kernel of the same rank ran beside it.
    pub hidden: f64,
}

/// One run of a section. Times are seconds since the step began.
#[derive(Clone, Debug, PartialEq)]
pub struct RunSpan {
    /// Which section, for which microbatch.
    pub run: Run,
    /// When it began.
    pub start: f64,
    /// When its last instruction ended.
    pub finish: f64,
    /// What took time in it, in the order of the ends.
    pub spans: Rc<Vec<Span>>,
}

/// What ranks that are alike do in a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Rank {
    /// The lowest of them.
    pub rank: u64,
    /// How many there are.
    pub count: u64,
    /// The index of their program.
    pub program: usize,
    /// The index of their device among those of the cluster.
    pub kind: usize,
    /// Its runs, in order.
    pub runs: Vec<RunSpan>,
    /// Its kernels, each alone.
    pub kernels: Kernels,
    /// Per stream, in the order of [`Stream::ALL`], the time it was busy.
    pub busy: [Seconds; Stream::ALL.len()],
    /// Communication in all.
    pub communication: Seconds,
    /// Of it, what no kernel hid.
    pub exposed_communication: Seconds,
    /// Time without a kernel, spent waiting for other ranks at collectives and messages.
    pub waiting: Seconds,
}

/// What a step was simulated to be.
#[derive(Clone, Debug, PartialEq)]
pub struct Simulated {
    /// The step: until the last rank ended.
    pub step: Seconds,
    /// The classes of ranks, in the order of their lowest.
    pub ranks: Vec<Rank>,
    /// Of each rank, the index of its class.
    pub class_of: Vec<usize>,
}

/// Simulates a step of a plan. `programs` are those of the first rank of each coordinate of the axes `apart`,
/// along which ranks run different programs, in the order of these coordinates: one program where
/// there is no such axis. Programs of other ranks differ from these only in groups and slices.
///
/// # Errors
/// Conditions that make no sense, a cluster of another size than the mesh, programs that deadlock.
pub fn simulate(
    programs: &[Program],
    apart: &[AxisId],
    plan: &Plan,
    cluster: &Cluster,
    conditions: &Conditions,
) -> Result<Simulated, SimulateError> {
    let outlines = threads::map(programs, |program| Outline::of(program, plan, cluster));
    simulate_outlines(&outlines, apart, &plan.mesh, cluster, conditions)
}

/// The same, of what is known of the programs.
fn simulate_outlines(
    outlines: &[Outline],
    apart: &[AxisId],
    mesh: &Mesh,
    cluster: &Cluster,
    conditions: &Conditions,
) -> Result<Simulated, SimulateError> {
    let (count, devices) = (mesh.ranks(), cluster.ranks());
    if count != devices {
        return Err(SimulateError::Ranks { ranks: count, devices });
    }
    let mut slowdown = vec![1.0; count as usize];
    let check = |what, value: f64| match (1.0..=MOST_SLOWDOWN).contains(&value) {
        true => Ok(value),
        false => Err(SimulateError::Factor { what, value: number_text(value) }),
    };
    let contention = check("the contention", conditions.contention)?;
    for (rank, factor) in &conditions.stragglers {
        let last = count - 1;
        let slot = slowdown.get_mut(*rank as usize).ok_or(SimulateError::UnknownRank { rank: *rank, last })?;
        if *slot != 1.0 {
            return Err(SimulateError::Twice { rank: *rank });
        }
        *slot = check("the slowdown of a rank", *factor)?;
    }
    let program = |rank: u64| {
        let at = mesh.coordinates(rank, 0);
        apart.iter().fold(0, |index, axis| index * mesh.size(*axis) as usize + at[axis.0 as usize] as usize)
    };
    let kinds = Kinds::new(outlines, mesh, cluster, &program);
    let folded = Ranks { mesh, cluster, outlines, kinds: &kinds, slowdown }.fold();
    let clusters: Vec<Cluster> =
        (0..cluster.devices().len()).flat_map(|device| cluster.among(&BTreeSet::from([device]))).collect();
    let runs = Engine { outlines, works: &kinds.works, folded: &folded, clusters: &clusters, contention }.run()?;
    let classes = folded.classes.iter().zip(runs);
    let ranks: Vec<Rank> =
        classes.map(|(class, runs)| sum_up(class, runs, &outlines[class.program], &kinds.works[class.kind])).collect();
    // All wait for the slowest of many ranks, even where none is known to be slow.
    let brought = |rank: &Rank| outlines[rank.program].brought(rank.kind);
    let end = ranks.iter().map(|rank| rank.finish().max(brought(rank))).fold(0.0, f64::max);
    let step = Seconds(end * spread(count));
    Ok(Simulated { step, ranks, class_of: folded.class_of })
}

impl Rank {
    /// When it ends, in seconds since the step began.
    pub fn finish(&self) -> f64 {
        self.runs.last().map_or(0.0, |run| run.finish)
    }
}

impl Simulated {
    /// The rank that decides how long the step takes: of those that end last, the first of those that wait least.
    pub fn slowest(&self) -> Option<&Rank> {
        let end = self.ranks.iter().map(Rank::finish).fold(0.0, f64::max);
        let last = self.ranks.iter().filter(|rank| rank.finish() >= end - engine::SAME);
        last.min_by(|a, b| a.waiting.0.total_cmp(&b.waiting.0))
    }
}

/// The time of a run in which something waits for other ranks, and no kernel runs.
fn waited(spans: &[Span], is_kernel: &dyn Fn(&Span) -> bool) -> f64 {
    let mut waits: Vec<(f64, f64)> = spans.iter().map(|span| (span.ready, span.start)).collect();
    waits.retain(|(from, to)| to - from > engine::SAME);
    if waits.is_empty() {
        return 0.0;
    }
    // One stream's kernels run one after the other.
    let mut busy = spans.iter().filter(|span| is_kernel(span)).map(|span| (span.start, span.finish)).peekable();
    waits.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (mut waited, mut counted) = (0.0, 0.0f64);
    for (from, to) in waits {
        let mut at = counted.max(from);
        while let Some((start, finish)) = busy.next_if(|(start, _)| *start < to) {
            waited += (start - at).max(0.0);
            at = at.max(finish);
            // A kernel may run on beside the next wait.
            counted = counted.max(finish);
        }
        waited += (to - at).max(0.0);
        counted = counted.max(to);
    }
    waited
}

fn sum_up(class: &Class, runs: Vec<RunSpan>, outline: &Outline, works: &Works) -> Rank {
    let mut busy = [0.0; Stream::ALL.len()];
    let (mut communication, mut hidden, mut waiting) = (0.0, 0.0, 0.0);
    for run in &runs {
        let lines = outline.lines(&run.run);
        for span in run.spans.iter() {
            let stream = lines[span.index as usize].stream;
            busy[stream as usize] += span.finish - span.start;
            if stream.is_wire() {
                communication += span.finish - span.start;
                hidden += span.hidden;
            }
        }
        waiting += waited(&run.spans, &|span| lines[span.index as usize].stream == Stream::Compute);
    }
    Rank {
        rank: class.rank,
        count: class.count,
        program: class.program,
        kind: class.device,
        runs,
        kernels: Kernels::of(outline, works),
        busy: busy.map(Seconds),
        communication: Seconds(communication),
        exposed_communication: Seconds((communication - hidden).max(0.0)),
        waiting: Seconds(waiting),
    }
}
