//! Pipelines in the search: schedules, cuts, and what a step in stages takes.
//!
//! For a placed mesh with stages, the sums over classes are laid out along the forward pass
//! ([`line`](super::line)). The best cuts follow by a dynamic program ([`cut`](crate::pipeline::cut)) under
//! the memory of the schedule's own microbatches in flight; what they take by running the schedule's steps
//! with these seconds ([`timeline`](crate::pipeline::timeline)). With several chunks a stage, the program
//! cuts into chunks that are equal, from where cuts are moved until the stages are equal and fit
//! ([`balance`](crate::pipeline::balance)); of the two, the faster is taken.
//!
//! A stage takes what it takes the slowest of its own devices, and may take the memory of the smallest of them: stages on
//! unequal nodes are as long as each other, and hold unequal parts of the model.
//!
//! Stages hold different numbers of microbatches, so what is computed again is chosen for each of them: the
//! least that fits, which the dynamic program weighs against moving the cut.

mod cuts;

use super::estimate::Work;
use super::held::Held;
use super::line::{Line, Once, Sums};
use super::offload::{Offload, Relief};
use super::pins::{Pins, Recompute};
use super::placed::{Seen, Solved, solved};
use super::schedules::schedules;
use super::{Candidate, Degrees, Point, Space};
use crate::cluster::Cluster;
use crate::cost::collective::{distance, send_over};
use crate::cost::step;
use crate::pipeline::order::{Lengths, Pass, Step, orders};
use crate::pipeline::timeline::{Durations, Link, timeline};
use crate::shard::family::copy_axes;
use crate::shard::tensor::{Placed, Prepared};
use shardc_ir::pipeline::{Length, Schedule};
use shardc_ir::plan::{Memory, Prediction};
use shardc_ir::{Bytes, NodeId, Pipeline, Seconds};
use std::collections::BTreeSet;

/// By how much more than its slowest stage a microbatch takes at the most where no stage waits for messages.
const STEADY_WITHIN: f64 = 1.01;
/// Microbatches that are followed at the most where stages wait for messages.
const MOST_FOLLOWED: u64 = 256;
/// Microbatches, in stages, after which every further one takes as long as the one before.
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
    /// How long each chunk takes, where devices are unequal ([`Pipeline::lengths`]).
    pub lengths: Vec<Length>,
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
    /// The mesh as the slowest kind of devices sees it; and where there are several kinds, as each set of them does that
    /// has a stage.
    seen: &'a [&'a [Seen<'a>]],
    /// Per stage, which of these.
    set: &'a [usize],
    /// Per stage, what a rank may take of its memory.
    rooms: &'a [Bytes],
    /// One for each way to store parameters.
    degrees: &'a [Degrees],
    work: Work,
    /// The share of its room that a stage may take whose recomputation is its own.
    spare: f64,
    /// Whether stages that do not fit are as good as any.
    with_unfit: bool,
    /// The fastest step of those that fit and are known.
    best: f64,
}

/// Pipelines that cannot come nearer than this factor to the fastest known step are left out.
const FAR: f64 = 1.1;

/// One way to compute again, in whatever stages.
struct Level {
    recompute: Recompute,
    /// As [`Mesh::seen`]: on the slowest device of each set.
    paces: Vec<Pace>,
    /// Of its memory, what does not grow with microbatches.
    working: f64,
}

/// What a model takes on one kind of devices.
struct Pace {
    /// Along the line.
    sums: Sums,
    /// If one stage had all of it.
    whole: Prediction,
}

/// In how many units a plan says how long its longest part of a chunk takes.
const LONGEST: f64 = 10_000.0;

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
    portions: Portions,
}

/// What a rank has of what its stage shares with others.
#[derive(Clone, Copy, Debug)]
struct Portions {
    /// Of a gradient, while it is added up over the microbatches.
    summed: f64,
    /// Of a parameter or its gradient, as it is stored.
    stored: f64,
    /// Of a parameter, while the loop goes on.
    gathered: f64,
}

/// The chunks of a stage, with where they begin and end.
type Parts = Vec<(usize, usize, usize)>;

/// Cuts, what each stage computes again, and what they take.
struct Solution {
    cuts: Vec<NodeId>,
    levels: Vec<usize>,
    lengths: Vec<Length>,
    prediction: Prediction,
}

impl Problem<'_> {
    /// Where the line may be cut.
    fn line(&self) -> &Sums {
        &self.levels[self.levels.len() - 1].paces[0].sums
    }

    /// What the model takes on the devices of a stage.
    fn pace(&self, level: usize, stage: usize) -> &Pace {
        &self.levels[level].paces[self.mesh.set[stage]]
    }

    /// What a stage takes.
    fn sums(&self, level: usize, stage: usize) -> &Sums {
        &self.pace(level, stage).sums
    }

    /// The level of a stage with these chunks; nothing if none fits.
    fn level(&self, stage: u64, chunks: &[(usize, usize, usize)]) -> Option<usize> {
        let room = self.mesh.rooms[stage as usize].0 as f64;
        let fits = |level: usize, share: f64| {
            self.mesh.with_unfit || self.memory(level, chunks).total().0 as f64 <= share * room
        };
        match &self.choice {
            Choice::All(level) => Some(*level).filter(|level| fits(*level, 1.0)),
            Choice::Least => (0..self.levels.len()).find(|level| fits(*level, self.mesh.spare)),
            Choice::Named(levels) => levels.get(stage as usize).copied().filter(|level| fits(*level, 1.0)),
        }
    }

    fn message(&self, place: usize) -> f64 {
        self.send(self.line().passing(place))
    }

    /// What it takes to send so many bytes to another stage.
    fn send(&self, bytes: f64) -> f64 {
        // Stages are next to each other in the order of the ranks: some two are as far apart as any ranks are.
        let cluster = self.mesh.placed.cluster;
        let farthest = distance(0, cluster.ranks() - 1, cluster);
        if bytes > 0.0 { send_over(bytes, farthest, cluster).0 } else { 0.0 }
    }

    /// Seconds in which a stage exchanges gradients, and parameters, with others, once in a step.
    fn exchanged(&self, sums: &Sums, chunks: &[(usize, usize, usize)]) -> f64 {
        let Once { gradients, parameters, .. } = sums.once(chunks);
        let seconds = |each: [f64; 2]| self.send(self.portions.stored * each.iter().sum::<f64>());
        seconds(gradients) + seconds(parameters)
    }

    /// The memory of a stage with these chunks.
    fn memory(&self, level: usize, chunks: &[(usize, usize, usize)]) -> Memory {
        let Level { paces, working, .. } = &self.levels[level];
        let Pace { sums, whole } = &paces[0];
        let share: f64 = chunks.iter().map(|(_, from, to)| sums.between(&sums.stored, *from, *to)).sum();
        let held = chunks.iter().map(|(chunk, from, to)| {
            let Held { kept, lasting, awaited } = self.held[*chunk];
            let of = |copies: u64, bytes: &[f64]| copies as f64 * sums.between(bytes, *from, *to);
            let passing = lasting as f64 * sums.passing(*from);
            passing + of(kept, &sums.kept) + of(lasting, &sums.lasting) + of(awaited, &sums.awaited)
        });
        let part = |bytes: Bytes| Bytes((bytes.0 as f64 * share) as u64);
        let whole = &whole.memory;
        // Gradients from other stages come when the activations are gone.
        let (Portions { summed, gathered, .. }, once) = (self.portions, sums.once(chunks));
        let bytes = |bytes: f64| Bytes(bytes as u64);
        Memory {
            parameters: part(whole.parameters) + bytes(gathered * once.parameters[0]),
            gradients: part(whole.gradients) + bytes(summed * once.made),
            optimizer: part(whole.optimizer),
            activations: Bytes((held.sum::<f64>() + working) as u64),
            buffers: whole.buffers,
            reserved: Bytes(0),
        }
    }

    /// Cuts the line, and predicts the step; nothing if no cuts fit.
    fn solve(&self, microbatches: u64) -> Option<Solution> {
        let rank = |of: &Solution| (!of.prediction.fits(), of.prediction.step.0);
        let solutions = self.ends(microbatches).into_iter().filter_map(|ends| self.cut_at(&ends, microbatches));
        solutions.min_by(|a, b| {
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
        let taken = |((chunks, level), room): ((&Parts, &usize), &Bytes)| Prediction {
            memory: self.memory(*level, chunks),
            room: *room,
            ..Prediction::default()
        };
        let taken = stages.iter().zip(&levels).zip(self.mesh.rooms).map(taken);
        let fullest = taken.max_by(|a, b| a.filled().total_cmp(&b.filled()))?;
        let inner = &ends[1..ends.len() - 1];
        let cuts = inner.iter().map(|cut| self.mesh.line.main[sums.places[*cut]]).collect();
        let prediction = self.predict(ends, &stages, &levels, fullest, microbatches)?;
        // On equal devices what chunks compute and move tells nearly as much, and programs need less memory.
        let is_mixed = self.mesh.seen.len() > 1;
        let lengths = if is_mixed { self.lengths(ends, &levels) } else { Vec::new() };
        Some(Solution { cuts, levels, lengths, prediction })
    }

    /// What a chunk takes of a microbatch, at these levels of the stages.
    fn chunk(&self, chunk: u32, ends: &[usize], levels: &[usize]) -> Lengths {
        let stage = self.pipeline.stage_of(chunk, self.stages) as usize;
        let (sums, index) = (self.sums(levels[stage], stage), chunk as usize);
        let of = |each: &[f64]| sums.between(each, ends[index], ends[index + 1]);
        Lengths { forward: of(&sums.forward), backward: of(&sums.backward), weight: of(&sums.weight) }
    }

    /// What all chunks take, the longest part in [`LONGEST`].
    fn lengths(&self, ends: &[usize], levels: &[usize]) -> Vec<Length> {
        let chunks = 0..ends.len() as u32 - 1;
        let parts = chunks.map(|chunk| {
            let Lengths { forward, backward, weight } = self.chunk(chunk, ends, levels);
            [forward, backward, weight, self.message(ends[chunk as usize])]
        });
        let parts: Vec<[f64; 4]> = parts.collect();
        let longest = parts.iter().flatten().copied().fold(f64::MIN_POSITIVE, f64::max);
        let scaled = |parts: [f64; 4]| {
            let [forward, backward, weight, message] = parts.map(|part| (part / longest * LONGEST).round() as u64);
            Length { forward, backward, weight, message }
        };
        parts.into_iter().map(scaled).collect()
    }

    fn predict(
        &self,
        ends: &[usize],
        stages: &[Parts],
        levels: &[usize],
        fullest: Prediction,
        microbatches: u64,
    ) -> Option<Prediction> {
        let seconds = |(stage, (chunks, level)): (usize, (&Parts, &usize))| {
            chunks.iter().map(|(_, from, to)| self.sums(*level, stage).seconds(*from, *to)).sum::<f64>()
        };
        let seconds = stages.iter().zip(levels).enumerate().map(seconds).enumerate();
        let (longest, slowest) = seconds.max_by(|a, b| a.1.total_cmp(&b.1))?;
        let links = chain(&self.pipeline, self.stages);
        let durations = Costs { problem: self, ends, levels, links: &links };
        let some = microbatches.min(STEADY * self.stages * self.pipeline.per_stage).next_multiple_of(self.stages);
        let some = some.min(microbatches);
        let run = |microbatches: u64| {
            let orders = orders(&self.pipeline, self.stages, microbatches, self.line().lengths()).ok()?;
            let run = timeline(&self.pipeline, &orders, &links, &durations)?;
            Some(run.finish.into_iter().fold(0.0, f64::max))
        };
        let (all, mut run) = (&run, run(some)?);
        if some < microbatches {
            let further = (run - all(some - self.stages)?) / self.stages as f64;
            let (most, each) = match further > slowest * STEADY_WITHIN {
                // Stages wait for messages: the more, the more microbatches there are.
                true => (microbatches.min(MOST_FOLLOWED), further),
                false => (some, slowest),
            };
            run = if most > some { all(most)? } else { run } + (microbatches - most) as f64 * each;
        }
        // What the whole model does outside of the loop falls to each stage by its share of the parameters.
        let (most, spread) = (levels.iter().max().copied()?, step::spread(self.mesh.placed.cluster.ranks()));
        let all = |sums: &Sums| microbatches as f64 * sums.whole();
        let once = |(stage, chunks): (usize, &Parts)| {
            let Pace { sums, whole } = self.pace(most, stage);
            let stored = chunks.iter().map(|(_, from, to)| sums.between(&sums.stored, *from, *to)).sum::<f64>();
            let [once, optimizer] =
                [(whole.step.0 / spread - all(sums)).max(0.0), whole.optimizer.0].map(|seconds| seconds * stored);
            [once + self.exchanged(sums, chunks), optimizer]
        };
        let once = stages.iter().enumerate().map(once);
        let [once, optimizer] = once.fold([0.0f64; 2], |[a, b], [once, optimizer]| [a.max(once), b.max(optimizer)]);
        let total = (run + once) * spread;
        let Pace { sums, whole } = self.pace(most, longest);
        let part = microbatches as f64 * slowest / all(sums).max(f64::MIN_POSITIVE);
        let scaled = |seconds: Seconds| Seconds(seconds.0 * part);
        let mut prediction = Prediction {
            step: Seconds(total),
            matmul: scaled(whole.matmul),
            memory_bound: scaled(whole.memory_bound),
            exposed_communication: scaled(whole.exposed_communication),
            communication: scaled(whole.communication),
            optimizer: Seconds(optimizer),
            mfu: self.mesh.work.at_peak.0 / (total * self.mesh.placed.cluster.ranks() as f64),
            memory: fullest.memory,
            room: fullest.room,
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
        let own = self.problem.chunk(step.chunk, self.ends, self.levels);
        own.of(self.problem.pipeline.schedule, step.chunk, step.pass)
    }

    fn message(&self, link: usize) -> f64 {
        let Link { from, to } = self.links[link];
        self.problem.message(self.ends[from.0.max(to.0) as usize])
    }
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
    let (prepared, degrees, work, cluster) = (space.prepared, &point.degrees[..], point.work, space.cluster);
    let rooms = cluster.rooms(placed.mesh, space.request.device_memory);
    let rooms = &rooms.into_iter().map(|room| space.measure.room(room)).collect::<Vec<_>>()[..];
    let spare = space.measure.share();
    let (clusters, set) = clusters_by_stage(space, placed.mesh);
    let all = clusters.concat();
    // Layouts are those that are fastest on the slowest kind.
    let Solved { own, others } = &solved(prepared, placed, 0.0, &all, (&meshes, space.pins));
    let mut seen = vec![std::slice::from_ref(own)];
    let mut rest = &others[..];
    for of_set in &clusters {
        let (first, after) = rest.split_at(of_set.len());
        seen.push(first);
        rest = after;
    }
    let (placed, seen, set) = (&own.placed, &seen[..], &set[..]);
    let with_unfit = space.with_unfit;
    let mesh = Mesh { prepared, line, placed, seen, set, rooms, degrees, work, spare, with_unfit, best };
    extend(&mut found, &mesh, space.pins);
    found
}

/// The cluster as each kind of devices sees it, for each set of kinds that has a stage, and for each stage the place of
/// its set behind the whole; where there is one kind, the whole is the set of each.
fn clusters_by_stage(space: &Space<'_, '_>, mesh: &shardc_ir::Mesh) -> (Vec<Vec<Cluster>>, Vec<usize>) {
    let kinds = space.cluster.kinds_of_stages(mesh);
    if space.others.is_empty() {
        return (Vec::new(), vec![0; kinds.len()]);
    }
    let sets: Vec<_> = kinds.iter().collect::<BTreeSet<_>>().into_iter().collect();
    let place = |own| 1 + sets.iter().position(|set| *set == own).unwrap_or(0);
    let set = kinds.iter().map(place).collect();
    (sets.iter().map(|set| space.cluster.among(set)).collect(), set)
}

/// Adds the pipelines of a placed mesh with stages.
fn extend<'a>(candidates: &mut Vec<Candidate>, mesh: &Mesh<'a>, pins: &Pins) {
    let microbatches = mesh.placed.microbatches;
    let stages = mesh.placed.mesh.degree("pp");
    let has_copies = !copy_axes(mesh.placed.mesh).is_empty();
    if microbatches < 2 {
        return;
    }
    let own = &mesh.seen[0][0];
    let menu = own.shape.menu();
    let named: Vec<Recompute> = pins.stage_recompute.iter().map(|own| own.within(menu.steps())).collect();
    let recomputes: BTreeSet<Recompute> = match pins.recompute.filter(|pin| *pin != Recompute::BY_NEED) {
        _ if !named.is_empty() => named.iter().copied().collect(),
        Some(pin) => [pin.within(menu.steps())].into(),
        None => [Recompute::None].into_iter().chain(menu.rungs().map(Recompute::Values)).collect(),
    };
    let recomputes = Vec::from_iter(recomputes);
    // Per set of kinds and way to compute again, the slowest of the set, and its sums.
    let slowest = |seen: &'a [Seen<'a>], recompute: &Recompute| {
        let sums = |own: &'a Seen<'a>| (own, Sums::new(mesh.prepared, &own.shape, *recompute, mesh.line));
        let longer = |a: &(&Seen<'_>, Sums), b: &(&Seen<'_>, Sums)| a.1.whole().total_cmp(&b.1.whole());
        seen.iter().map(sums).max_by(longer)
    };
    let of_set = |seen: &&'a [Seen<'a>]| recomputes.iter().filter_map(|again| slowest(seen, again)).collect();
    let of_sets: Vec<Vec<(&Seen<'a>, Sums)>> = mesh.seen.iter().map(of_set).collect();
    let sums: Vec<&Sums> = of_sets[0].iter().map(|(_, sums)| sums).collect();
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
                    let recompute = recomputes[index];
                    let pace = |all: &Vec<(&Seen<'_>, Sums)>| {
                        let (Seen { placed, shape, .. }, sums) = &all[index];
                        let whole = shape.predict(placed, storage, zero, recompute, mesh.work);
                        Pace { sums: sums.cut_as(places), whole }
                    };
                    let paces: Vec<Pace> = of_sets.iter().map(pace).collect();
                    let Pace { sums, whole } = &paces[0];
                    let kept: f64 = [&sums.kept, &sums.lasting].into_iter().flat_map(|all| all.last()).sum();
                    // The largest of what gradients of weights wait for is made where most lives, and counted with
                    // its copies.
                    let copied = if schedule.splits_backward() { sums.largest_awaited() } else { 0.0 };
                    let working = (whole.memory.activations.0 as f64 - kept - copied).max(0.0);
                    Level { recompute, paces, working }
                };
                let stored = own.shape.share(storage, zero);
                let part = |least: u64| if zero >= least { stored } else { 1.0 };
                let portions = Portions { summed: part(2), stored, gathered: part(3) };
                let is_far = |index: usize| {
                    let all = of_sets.iter().map(|all| all[index].1.whole()).fold(f64::INFINITY, f64::min);
                    // Stages wait for each other while the pipeline fills and drains, for what others compute of a
                    // microbatch; where backward passes are split there may be something else to do.
                    let filling = if schedule.splits_backward() { 0.0 } else { (stages - 1) as f64 / per_stage as f64 };
                    (microbatches as f64 + filling) * all / stages as f64 > FAR * mesh.best
                };
                let mut try_out = |levels: &[Level], choice: Choice| {
                    let (pipeline, sums) = (pipeline.clone(), &levels.last()?.paces[0].sums);
                    let lengths = sums.lengths();
                    let orders = orders(&pipeline, stages, microbatches, lengths).ok()?;
                    let held = &Held::of_chunks(&pipeline, &orders, (stages * per_stage) as usize, sums.held())[..];
                    let Solution { cuts, levels: of_stages, lengths, prediction } =
                        Problem { mesh, levels, choice, pipeline, stages, held, portions }.solve(microbatches)?;
                    let mut recompute: Vec<Recompute> =
                        of_stages.iter().map(|level| levels[*level].recompute).collect();
                    let most = recompute.iter().copied().max().unwrap_or(Recompute::None);
                    if recompute.iter().all(|own| *own == most) {
                        recompute.clear();
                    }
                    let stages = Some(Stages { schedule, per_stage, cuts, recompute, lengths });
                    let (degrees, loss_chunks, byte) = (degrees.clone(), own.shape.loss_chunks, 0.0);
                    let (offload, relief, recompute) = (Offload::default(), Relief::default(), most);
                    let fits = prediction.fits();
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
                let mixed = |most: usize| -> Vec<Level> { (0..=most).map(|index| level(index, sums[most])).collect() };
                if !named.is_empty() {
                    let of = |own: &Recompute| recomputes.iter().position(|known| known == own).unwrap_or(0);
                    let levels: Vec<usize> = named.iter().map(of).collect();
                    let most = levels.iter().copied().max().unwrap_or(0);
                    try_out(&mixed(most), Choice::Named(levels));
                    continue;
                }
                // More recomputation takes longer: the first that fits is the best that all stages can do.
                for index in (0..sums.len()).filter(|index| !is_far(*index)) {
                    let fits = try_out(&[level(index, sums[index])], Choice::All(0));
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
