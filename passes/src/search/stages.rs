//! Pipelines in the search: schedules, cuts, and what a step in stages takes.
//!
//! For a placed mesh with stages, the sums over classes are laid out along the forward pass
//! ([`line`](super::line)). The best cuts follow by a dynamic program ([`cut`](crate::pipeline::cut)) under
//! the memory of the schedule's own microbatches in flight; what they take by running the schedule's steps
//! with these seconds ([`timeline`](crate::pipeline::timeline)). With several chunks a stage, the program
//! cuts into chunks that are equal, from where cuts are moved until the stages are equal and fit
//! ([`balance`](crate::pipeline::balance)); of the two, the faster is taken.
//!
//! Stages hold different numbers of microbatches, so what is computed again is chosen for each of them: the
//! least that fits, which the dynamic program weighs against moving the cut.

use super::estimate::{Shape, Work};
use super::held::Held;
use super::line::{Line, Sums};
use super::offload::{Offload, Relief};
use super::pins::{Pins, Recompute};
use super::placed::loss_chunks;
use super::ways::divisors;
use super::{Candidate, Degrees, PlanError, Point, Space};
use crate::cluster::Cluster;
use crate::cost::collective::send_seconds;
use crate::cost::step;
use crate::pipeline::balance::{Shares, balanced};
use crate::pipeline::cut::{Segments, best_cuts};
use crate::pipeline::order::{Pass, Step, orders};
use crate::pipeline::timeline::{Durations, Link, timeline};
use crate::shard::family::copy_axes;
use crate::shard::place::place_axes;
use crate::shard::tensor::{Placed, Prepared};
use shardc_ir::pipeline::Schedule;
use shardc_ir::plan::{Memory, Prediction};
use shardc_ir::{Bytes, NodeId, Pipeline, Seconds};

/// Microbatches, in stages, after which every further one takes what the slowest stage does.
const STEADY: u64 = 3;

/// The pipeline of a candidate.
#[derive(Clone, Debug, PartialEq)]
pub struct Stages {
    /// The order of the microbatches.
    pub schedule: Schedule,
    /// Chunks of each stage.
    pub per_stage: u64,
    /// The nodes, of the graph that was searched, that begin the chunks but the first.
    pub cuts: Vec<NodeId>,
    /// What each stage computes again, if not all the same.
    pub recompute: Vec<Recompute>,
}

impl Stages {
    /// The choices, as pins would say them.
    pub fn text(&self) -> String {
        let chunks = if self.per_stage > 1 { format!(",virtual={}", self.per_stage) } else { String::new() };
        let recompute: Vec<String> = self.recompute.iter().map(Recompute::to_string).collect();
        let recompute = match recompute.is_empty() {
            true => String::new(),
            false => format!(",stage_recompute={}", recompute.join("/")),
        };
        format!("schedule={}{chunks}{recompute}", self.schedule.name())
    }
}

/// What all candidates of one placed mesh share.
struct Mesh<'a> {
    prepared: &'a Prepared<'a>,
    line: &'a Line,
    placed: &'a Placed<'a>,
    shape: &'a Shape<'a>,
    /// What a node takes on each kind of device that a stage of its own has; empty if there is one kind.
    kinds: &'a [Shape<'a>],
    /// Per stage, its kind.
    kind: &'a [usize],
    /// One for each way to store parameters.
    degrees: &'a [Degrees],
    work: Work,
    bound: Bytes,
    /// Whether stages that do not fit it are as good as any.
    with_unfit: bool,
    /// The fastest step of those that fit and are known.
    best: f64,
}

/// Pipelines that cannot come nearer than this factor to the fastest known step are left out.
const FAR: f64 = 1.3;

/// How far below the bound a stage stays whose recomputation is its own: estimates are off by as much.
const SPARE: f64 = 0.97;

/// One way to compute again, in whatever stages.
struct Level {
    recompute: Recompute,
    sums: Sums,
    /// The same for each kind of device; empty if there is one.
    kinds: Vec<Sums>,
    /// What the whole model would take on one stage.
    whole: Prediction,
    /// Of its memory, what does not grow with microbatches.
    working: f64,
}

/// By how much longer a stage is taken to be that does not fit, where cuts are moved.
const UNFIT: f64 = 1000.0;

/// Which level each stage takes.
#[derive(Clone, Debug)]
enum Choice {
    /// The same for all.
    All(usize),
    /// The first that fits, for each.
    Least,
    /// These.
    Named(Vec<usize>),
}

/// One schedule on one mesh, with one choice of ZeRO.
struct Problem<'a> {
    mesh: &'a Mesh<'a>,
    /// From the least to the most; all are cut at the places of the last.
    levels: &'a [Level],
    choice: Choice,
    pipeline: Pipeline,
    stages: u64,
    /// Per chunk.
    held: &'a [Held],
}

/// The chunks of a stage, with where they begin and end.
type Parts = Vec<(usize, usize, usize)>;

/// Cuts, what each stage computes again, and what they take.
struct Solution {
    cuts: Vec<NodeId>,
    levels: Vec<usize>,
    prediction: Prediction,
}

impl Segments for Problem<'_> {
    fn seconds(&self, chunk: usize, from: usize, to: usize) -> f64 {
        // The memory of several chunks is known only when all are cut: until then the most is taken.
        let last = self.levels.len() - 1;
        let level = match self.pipeline.per_stage {
            1 => self.level(chunk as u64, &[(chunk, from, to)]).unwrap_or(last),
            _ => last,
        };
        let stage = self.pipeline.stage_of(chunk as u32, self.stages) as usize;
        self.sums(level, stage).seconds(from, to) + 2.0 * (self.message(from) + self.message(to))
    }

    fn fits(&self, chunk: usize, from: usize, to: usize) -> bool {
        self.pipeline.per_stage > 1 || self.level(chunk as u64, &[(chunk, from, to)]).is_some()
    }
}

impl Shares for Problem<'_> {
    fn stage_of(&self, chunk: usize) -> usize {
        self.pipeline.stage_of(chunk as u32, self.stages) as usize
    }

    fn seconds(&self, stage: usize, chunks: &[(usize, usize, usize)]) -> f64 {
        let (level, by) = match self.level(stage as u64, chunks) {
            Some(level) => (level, 1.0),
            None => (self.levels.len() - 1, UNFIT),
        };
        let of = |(_, from, to): &(usize, usize, usize)| {
            self.sums(level, stage).seconds(*from, *to) + 2.0 * (self.message(*from) + self.message(*to))
        };
        by * chunks.iter().map(of).sum::<f64>()
    }
}

impl Problem<'_> {
    /// Where the line may be cut.
    fn line(&self) -> &Sums {
        &self.levels[self.levels.len() - 1].sums
    }

    /// What a stage takes, on its kind of device.
    fn sums(&self, level: usize, stage: usize) -> &Sums {
        let Level { sums, kinds, .. } = &self.levels[level];
        self.mesh.kind.get(stage).and_then(|kind| kinds.get(*kind)).unwrap_or(sums)
    }

    /// The level of a stage with these chunks; nothing if none fits.
    fn level(&self, stage: u64, chunks: &[(usize, usize, usize)]) -> Option<usize> {
        let fits = |level: usize, share: f64| {
            let memory = self.memory(level, chunks).total();
            self.mesh.with_unfit || memory.0 as f64 <= share * self.mesh.bound.0 as f64
        };
        match &self.choice {
            Choice::All(level) => Some(*level).filter(|level| fits(*level, 1.0)),
            Choice::Least => (0..self.levels.len()).find(|level| fits(*level, SPARE)),
            Choice::Named(levels) => levels.get(stage as usize).copied().filter(|level| fits(*level, 1.0)),
        }
    }

    fn message(&self, place: usize) -> f64 {
        let bytes = self.line().passing(place);
        if bytes > 0.0 { send_seconds(bytes, self.is_away(), self.mesh.placed.cluster).0 } else { 0.0 }
    }

    /// Whether some stage's next one lies on another node.
    fn is_away(&self) -> bool {
        self.mesh.placed.cluster.ranks() > self.mesh.placed.cluster.per_node
    }

    /// The memory of a stage with these chunks.
    fn memory(&self, level: usize, chunks: &[(usize, usize, usize)]) -> Memory {
        let Level { sums, whole, working, .. } = &self.levels[level];
        let share: f64 = chunks.iter().map(|(_, from, to)| sums.between(&sums.stored, *from, *to)).sum();
        let held = chunks.iter().map(|(chunk, from, to)| {
            let Held { kept, lasting, awaited } = self.held[*chunk];
            let of = |copies: u64, bytes: &[f64]| copies as f64 * sums.between(bytes, *from, *to);
            let passing = lasting as f64 * sums.passing(*from);
            passing + of(kept, &sums.kept) + of(lasting, &sums.lasting) + of(awaited, &sums.awaited)
        });
        let part = |bytes: Bytes| Bytes((bytes.0 as f64 * share) as u64);
        let whole = &whole.memory;
        Memory {
            parameters: part(whole.parameters),
            gradients: part(whole.gradients),
            optimizer: part(whole.optimizer),
            activations: Bytes((held.sum::<f64>() + working) as u64),
            buffers: whole.buffers,
            reserved: Bytes(0),
        }
    }

    /// Cuts the line, and predicts the step; nothing if no cuts fit.
    fn solve(&self, microbatches: u64) -> Option<Solution> {
        let chunks = (self.stages * self.pipeline.per_stage) as usize;
        let end = self.line().places.len() - 1;
        let (_, cuts) = best_cuts(end, chunks, microbatches * self.pipeline.per_stage, self)?;
        let ends: Vec<usize> = [0].into_iter().chain(cuts).chain([end]).collect();
        let first = self.cut_at(&ends, microbatches);
        if self.pipeline.per_stage == 1 {
            return first;
        }
        let second = self.cut_at(&balanced(ends, self), microbatches);
        let rank = |of: &Solution| (of.prediction.memory.total() > self.mesh.bound, of.prediction.step.0);
        first.into_iter().chain(second).min_by(|a, b| {
            let (a, b) = (rank(a), rank(b));
            a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))
        })
    }

    /// What cuts at these places come to.
    fn cut_at(&self, ends: &[usize], microbatches: u64) -> Option<Solution> {
        let (sums, last) = (self.line(), self.levels.len() - 1);
        let of_stage = |stage: u64| {
            let chunks = self.pipeline.chunks_of(stage, self.stages).into_iter().map(|chunk| chunk as usize);
            chunks.map(|chunk| (chunk, ends[chunk], ends[chunk + 1])).collect::<Parts>()
        };
        let stages: Vec<Parts> = (0..self.stages).map(of_stage).collect();
        let level = |(stage, chunks): (usize, &Parts)| match &self.choice {
            Choice::All(level) => *level,
            Choice::Least => self.level(stage as u64, chunks).unwrap_or(last),
            Choice::Named(levels) => levels[stage],
        };
        let levels: Vec<usize> = stages.iter().enumerate().map(level).collect();
        let memory = stages.iter().zip(&levels).map(|(chunks, level)| self.memory(*level, chunks));
        let memory = memory.max_by_key(|memory| memory.total())?;
        let inner = &ends[1..ends.len() - 1];
        let cuts = inner.iter().map(|cut| self.mesh.line.main[sums.places[*cut]]).collect();
        let prediction = self.predict(ends, &stages, &levels, memory, microbatches)?;
        Some(Solution { cuts, levels, prediction })
    }

    fn predict(
        &self,
        ends: &[usize],
        stages: &[Parts],
        levels: &[usize],
        memory: Memory,
        microbatches: u64,
    ) -> Option<Prediction> {
        let seconds = |(stage, (chunks, level)): (usize, (&Parts, &usize))| {
            chunks.iter().map(|(_, from, to)| self.sums(*level, stage).seconds(*from, *to)).sum::<f64>()
        };
        let slowest = stages.iter().zip(levels).enumerate().map(seconds).fold(0.0, f64::max);
        let links = chain(&self.pipeline, self.stages);
        let durations = Costs { problem: self, ends, levels, links: &links };
        let some = microbatches.min(STEADY * self.stages * self.pipeline.per_stage).next_multiple_of(self.stages);
        let some = some.min(microbatches);
        let orders = orders(&self.pipeline, self.stages, some, self.line().lengths()).ok()?;
        let run = timeline(&self.pipeline, &orders, &links, &durations)?;
        let run = run.finish.into_iter().fold(0.0, f64::max) + (microbatches - some) as f64 * slowest;
        // What the whole model does outside of the loop falls to each stage by its share of the parameters.
        let most = levels.iter().max().map_or(&self.levels[0], |level| &self.levels[*level]);
        let (whole, spread) = (&most.whole, step::spread(self.mesh.placed.cluster.ranks()));
        let all = microbatches as f64 * most.sums.seconds(0, most.sums.places.len() - 1);
        let once = (whole.step.0 / spread - all).max(0.0);
        let share = |chunks: &Parts| {
            chunks.iter().map(|(_, from, to)| most.sums.between(&most.sums.stored, *from, *to)).sum::<f64>()
        };
        let largest = stages.iter().map(share).fold(0.0, f64::max);
        let total = (run + once * largest) * spread;
        let part = microbatches as f64 * slowest / all.max(f64::MIN_POSITIVE);
        let scaled = |seconds: Seconds| Seconds(seconds.0 * part);
        let mut prediction = Prediction {
            step: Seconds(total),
            matmul: scaled(whole.matmul),
            memory_bound: scaled(whole.memory_bound),
            exposed_communication: scaled(whole.exposed_communication),
            communication: scaled(whole.communication),
            optimizer: Seconds(whole.optimizer.0 * largest),
            mfu: self.mesh.work.at_peak.0 / (total * self.mesh.placed.cluster.ranks() as f64),
            memory,
            ..*whole
        };
        let named = prediction.matmul + prediction.memory_bound + prediction.exposed_communication;
        prediction.bubble = Seconds((total - (named + prediction.optimizer).0).max(0.0));
        Some(prediction)
    }
}

/// The links of chunks that follow each other, between stages.
fn chain(pipeline: &Pipeline, stages: u64) -> Vec<Link> {
    let chunks = (stages * pipeline.per_stage) as u32;
    let both = (1..chunks).flat_map(|chunk| {
        let forward = Link { from: (chunk - 1, Pass::Forward), to: (chunk, Pass::Forward) };
        [forward, Link { from: (chunk, Pass::Backward), to: (chunk - 1, Pass::Backward) }]
    });
    both.filter(|link| pipeline.stage_of(link.from.0, stages) != pipeline.stage_of(link.to.0, stages)).collect()
}

/// The seconds of a schedule's steps.
struct Costs<'a> {
    problem: &'a Problem<'a>,
    ends: &'a [usize],
    /// Of each stage.
    levels: &'a [usize],
    links: &'a [Link],
}

impl Durations for Costs<'_> {
    fn step(&self, step: Step) -> f64 {
        let (problem, chunk) = (self.problem, step.chunk as usize);
        let stage = problem.pipeline.stage_of(step.chunk, problem.stages) as usize;
        let sums = problem.sums(self.levels[stage], stage);
        let of = |each: &[f64]| sums.between(each, self.ends[chunk], self.ends[chunk + 1]);
        match step.pass {
            Pass::Forward => of(&sums.forward),
            // No chunk waits for what the first one does in its backward pass.
            Pass::Weight if chunk == 0 => of(&sums.backward) + of(&sums.weight),
            Pass::Weight => of(&sums.weight),
            Pass::Backward if problem.pipeline.schedule.splits_backward() && chunk == 0 => 0.0,
            Pass::Backward if problem.pipeline.schedule.splits_backward() => of(&sums.backward),
            Pass::Backward => of(&sums.backward) + of(&sums.weight),
        }
    }

    fn message(&self, link: usize) -> f64 {
        let Link { from, to } = self.links[link];
        self.problem.message(self.ends[from.0.max(to.0) as usize])
    }
}

/// The schedules that pins leave open, with the chunks of a stage. GPipe has the bubble of 1F1B and more memory,
/// so it is taken where it is pinned.
fn schedules(pins: &Pins) -> Vec<(Schedule, u64)> {
    let all = [
        (Schedule::OneForwardOneBackward, 1),
        (Schedule::GPipe, 1),
        (Schedule::ZeroBubbleV, 2),
        (Schedule::Interleaved, 2),
        (Schedule::Interleaved, 4),
    ];
    let mut open: Vec<(Schedule, u64)> = all
        .into_iter()
        .filter(|(schedule, per_stage)| {
            let is_named = pins.schedule.map_or(*schedule != Schedule::GPipe, |pin| pin == *schedule);
            is_named && pins.virtual_stages.is_none_or(|pin| pin == *per_stage)
        })
        .collect();
    if let Some(per_stage) = pins.virtual_stages.filter(|pin| *pin > 1 && pins.schedule != Some(Schedule::ZeroBubbleV))
        && !open.contains(&(Schedule::Interleaved, per_stage))
    {
        open.push((Schedule::Interleaved, per_stage));
    }
    open
}

/// Why pins leave no pipeline at all, of so many ranks and samples, which may depend on each other.
pub(super) fn none(pins: &Pins, line: Option<&Line>, (ranks, batch): (u64, u64), is_coupled: bool) -> PlanError {
    let stages = pins.pp.unwrap_or(2);
    let per_stage = schedules(pins).into_iter().map(|(_, per_stage)| per_stage).min().unwrap_or(1);
    let (most, chunks) = (line.map_or(0, Line::places), stages.saturating_mul(per_stage));
    let fail = |pin: String, message: String| PlanError::Pin { pin, message };
    let schedule = pins.schedule.map_or(String::new(), |schedule| format!(",schedule={}", schedule.name()));
    let several = if per_stage > 1 { format!(",virtual={per_stage}") } else { String::new() };
    let named = format!("pp={stages}{schedule}{several}");
    if chunks > most {
        let message = format!("{chunks} chunks are more than the {most} operations that can begin one; pin fewer");
        return fail(named, message);
    }
    if is_coupled {
        let message = "samples of the batch depend on each other (statistics over a batch, places at experts), so what \
                       a rank has of it is one microbatch, and a pipeline takes at least 2; leave it out";
        return fail(named, message.to_string());
    }
    // Of the data ranks that the other pins leave, the fewest give each the most microbatches.
    let fixed = [pins.tp, pins.cp, pins.ring, pins.ulysses].into_iter().flatten().fold(stages, u64::saturating_mul);
    let data = match (pins.dp, pins.tp) {
        (Some(dp), _) => dp * pins.fsdp.unwrap_or(1) * pins.ep.unwrap_or(1),
        (None, Some(_)) => (ranks / fixed).max(1),
        (None, None) => pins.fsdp.unwrap_or(1) * pins.ep.unwrap_or(1),
    };
    let per_rank = batch / data.max(1);
    let is_interleaved = pins.schedule == Some(Schedule::Interleaved) || (pins.schedule.is_none() && per_stage > 1);
    let is_round = |count: u64| count >= 2 && (!is_interleaved || count.is_multiple_of(stages));
    let is_pinned = |size: &u64| pins.microbatch.is_none_or(|pin| pin == *size);
    if divisors(per_rank).into_iter().filter(is_pinned).any(|size| is_round(per_rank / size)) {
        let message =
            format!("the step cannot be cut into {chunks} chunks where little passes between them; pin fewer");
        return fail(named, message);
    }
    let (takes, needs) = match is_interleaved {
        true => ("schedule interleaved", format!("a number of microbatches that is a multiple of {stages}")),
        false => ("a pipeline", "at least 2 microbatches".to_string()),
    };
    let has = match pins.microbatch {
        Some(size) => format!("are {} of {size}", per_rank / size),
        None => format!("are {per_rank} sequences at the most"),
    };
    let message = format!(
        "{takes} takes {needs} on each data rank, and of a batch of {batch} over {data} data ranks there {has}; use a \
         larger batch, smaller microbatches or fewer data ranks"
    );
    fail(pins.microbatch.map_or(named, |size| format!("microbatch={size}")), message)
}

/// The pipelines of a mesh with stages, of which the batch is placed; `best` is the fastest known step.
pub(super) fn solve(
    space: &Space<'_, '_>,
    line: &Line,
    placed: Placed<'_>,
    point: &Point,
    best: f64,
) -> Vec<Candidate> {
    let mut found = Vec::new();
    let meshes: Vec<_> = point.degrees.iter().map(|degrees| degrees.mesh(space.request.batch)).collect();
    let (prepared, degrees, work, bound) = (space.prepared, &point.degrees[..], point.work, point.away.room.device);
    let mut placed = placed;
    let conversions = place_axes(prepared, &mut placed, 0.0);
    let chunks = loss_chunks(prepared, &placed, space.pins);
    let shape = Shape::new(prepared, &placed, &conversions, chunks, &meshes);
    // Layouts are those of the slowest kind; what a stage takes is of its own.
    let (clusters, kind) = clusters_by_stage(placed.cluster, placed.mesh);
    let kinds: Vec<Shape<'_>> = clusters
        .iter()
        .map(|cluster| {
            let placed = Placed { cluster, locals: prepared.locals(cluster), ..placed.clone() };
            Shape::new(prepared, &placed, &conversions, chunks, &meshes)
        })
        .collect();
    let (kinds, kind) = (&kinds[..], &kind[..]);
    let with_unfit = space.with_unfit;
    let placed = &placed;
    let mesh = Mesh { prepared, line, placed, shape: &shape, kinds, kind, degrees, work, bound, with_unfit, best };
    extend(&mut found, &mesh, space.pins);
    found
}

/// The cluster as each kind of its stages sees it, and the kind of each stage; nothing if there is one kind.
fn clusters_by_stage(cluster: &Cluster, mesh: &shardc_ir::Mesh) -> (Vec<Cluster>, Vec<usize>) {
    let (mut clusters, mut kind): (Vec<Cluster>, Vec<usize>) = (Vec::new(), Vec::new());
    if cluster.parts.len() < 2 {
        return (clusters, kind);
    }
    for stage in 0..mesh.degree("pp") {
        let device = cluster.stage_device(mesh, stage);
        let known = clusters.iter().position(|known| known.device == *device);
        kind.push(known.unwrap_or(clusters.len()));
        if known.is_none() {
            clusters.push(Cluster { device: device.clone(), parts: Vec::new(), ..cluster.clone() });
        }
    }
    (clusters, kind)
}

/// Adds the pipelines of a placed mesh with stages.
fn extend(candidates: &mut Vec<Candidate>, mesh: &Mesh<'_>, pins: &Pins) {
    let microbatches = mesh.placed.microbatches;
    let stages = mesh.placed.mesh.degree("pp");
    let has_copies = !copy_axes(mesh.placed.mesh).is_empty();
    if microbatches < 2 {
        return;
    }
    let named = &pins.stage_recompute;
    let recomputes = match pins.recompute.filter(|pin| *pin != Recompute::BY_NEED) {
        Some(pin) if named.is_empty() => vec![pin.within(mesh.shape.menu().steps())],
        _ => vec![Recompute::None, Recompute::Selective, Recompute::All],
    };
    let sums_of = |shape: &Shape<'_>| -> Vec<Sums> {
        recomputes.iter().map(|recompute| Sums::new(mesh.prepared, shape, *recompute, mesh.line)).collect()
    };
    let sums = sums_of(mesh.shape);
    let of_kinds: Vec<Vec<Sums>> = mesh.kinds.iter().map(sums_of).collect();
    for (schedule, per_stage) in schedules(pins) {
        let pipeline = Pipeline { schedule, per_stage, ..Pipeline::default() };
        // Gradients that are reduced in every microbatch cost more than they save here, unless they are asked for.
        let is_kept = |zero: u64, degrees: &Degrees| match degrees.degree("fsdp") > 1 {
            true => zero == 1,
            false => zero == 0 || (zero == 1 && has_copies),
        };
        for (storage, degrees) in mesh.degrees.iter().enumerate() {
            for zero in (0..=3).filter(|zero| pins.zero.map_or(is_kept(*zero, degrees), |pin| pin == *zero)) {
                let level = |index: usize, places: &Sums| {
                    let (recompute, sums) = (recomputes[index], sums[index].cut_as(places));
                    let kinds = of_kinds.iter().map(|all| all[index].cut_as(places)).collect();
                    let whole = mesh.shape.predict(mesh.placed, storage, zero, recompute, mesh.work);
                    let kept: f64 = [&sums.kept, &sums.lasting].into_iter().flat_map(|all| all.last()).sum();
                    // The largest of what gradients of weights wait for is made where most lives, and counted with
                    // its copies.
                    let copied = if schedule.splits_backward() { sums.largest_awaited() } else { 0.0 };
                    let working = (whole.memory.activations.0 as f64 - kept - copied).max(0.0);
                    Level { recompute, sums, kinds, whole, working }
                };
                let is_far = |index: usize| {
                    let all = of_kinds.iter().map(|all| &all[index]).chain([&sums[index]]);
                    let all = all.map(|sums| sums.seconds(0, sums.places.len() - 1)).fold(f64::INFINITY, f64::min);
                    microbatches as f64 * all / stages as f64 > FAR * mesh.best
                };
                let mut try_out = |levels: &[Level], choice: Choice| {
                    let (pipeline, lengths) = (pipeline.clone(), levels.last()?.sums.lengths());
                    let orders = orders(&pipeline, stages, microbatches, lengths).ok()?;
                    let held = &Held::of_chunks(&pipeline, &orders, (stages * per_stage) as usize)[..];
                    let Solution { cuts, levels: of_stages, prediction } =
                        Problem { mesh, levels, choice, pipeline, stages, held }.solve(microbatches)?;
                    let mut recompute: Vec<Recompute> =
                        of_stages.iter().map(|level| levels[*level].recompute).collect();
                    let most = recompute.iter().copied().max().unwrap_or(Recompute::None);
                    if recompute.iter().all(|own| *own == most) {
                        recompute.clear();
                    }
                    let stages = Some(Stages { schedule, per_stage, cuts, recompute });
                    let (degrees, loss_chunks, byte) = (degrees.clone(), mesh.shape.loss_chunks, 0.0);
                    let (offload, relief, recompute) = (Offload::default(), Relief::default(), most);
                    let fits = prediction.memory.total() <= mesh.bound;
                    candidates.push(Candidate {
                        degrees,
                        stages,
                        zero,
                        recompute,
                        loss_chunks,
                        overlap_chunks: 1,
                        within: 0.0,
                        byte,
                        offload,
                        relief,
                        prediction,
                    });
                    Some(fits)
                };
                // All may be computed again by stage: then cuts lie between blocks.
                let mixed = |most: usize| -> Vec<Level> { (0..=most).map(|index| level(index, &sums[most])).collect() };
                if !named.is_empty() {
                    let of = |own: &Recompute| recomputes.iter().position(|known| known == own).unwrap_or(0);
                    let levels: Vec<usize> = named.iter().map(of).collect();
                    let most = levels.iter().copied().max().unwrap_or(0);
                    try_out(&mixed(most), Choice::Named(levels));
                    continue;
                }
                // More recomputation takes longer: the first that fits is the best that all stages can do.
                for index in (0..sums.len()).filter(|index| !is_far(*index)) {
                    let fits = try_out(&[level(index, &sums[index])], Choice::All(0));
                    if index > 0 && fits != Some(false) {
                        try_out(&mixed(index), Choice::Least);
                    }
                    if fits == Some(true) {
                        break;
                    }
                }
            }
        }
    }
}
