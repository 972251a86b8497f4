//! What a step takes in stages, by running the schedule with what the passes of each chunk take.

use super::held::Held;
use super::levels::Pace;
use super::problem::{LONGEST, Part, Problem};
use crate::cost::host::Shown;
use crate::cost::overlap::spread;
use crate::pipeline::order::{Lengths, Pass};
use crate::pipeline::timeline::{Durations, Link, finish};
use crate::search::estimate::relief::Leaving;
use crate::search::measure::is_compared;
use shardc_ir::pipeline::{Length, Schedule};
use shardc_ir::plan::Prediction;
use shardc_ir::{Pipeline, Seconds};
use std::rc::Rc;

/// By how much more than its slowest stage a microbatch takes at the most where no stage waits for messages.
const STEADY_WITHIN: f64 = 1.01;
/// Microbatches that are followed at the most where stages wait for messages.
const MOST_FOLLOWED: u64 = 128;
/// Rounds after which every further one takes as long as the one before.
const STEADY: u64 = 3;

/// The chunks of each stage with where they begin and end, and its level.
type Stages<'a> = (&'a [Vec<Part>], &'a [usize]);

/// How many times as long as its kernels a stage takes for a microbatch's forward pass, and for its backward pass.
type Longer = [f64; 2];

/// What running a schedule came to: the seconds of all microbatches, or so many at the least, where it was given up.
struct Ran {
    seconds: f64,
    is_whole: bool,
}

impl Problem<'_> {
    /// Time and memory of a step with everything on the devices; nothing, if it takes at least so many seconds, and so much
    /// is seen without running the schedule.
    pub fn predict(
        &self,
        ends: &[usize],
        (stages, levels): Stages<'_>,
        fullest: Prediction,
        enough: f64,
    ) -> Option<Prediction> {
        let placed = &self.tries.mesh.placed;
        let (most, spread) = (self.most(levels)?, spread(placed.cluster.ranks()));
        // What the whole model does outside of the loop falls to each stage by its share of the parameters.
        let once = |(stage, chunks): (usize, &Vec<Part>)| {
            let share = self.share(chunks);
            let once = self.outside(most, stage) * share;
            once + self.exchanged(chunks, (once - self.pace(most, stage).whole.optimizer.0 * share).max(0.0))
        };
        let once = stages.iter().enumerate().map(once).fold(0.0, f64::max);
        let (longest, slowest) = self.slowest((stages, levels))?;
        let least = self.at_least((stages, levels)) + once * spread;
        if least >= enough {
            self.tries.refuse(least);
            return None;
        }
        // Of what is far from fitting, or not faster than what fits, nobody asks how long its stages wait.
        let leaves = levels.iter().enumerate().any(|(stage, level)| !self.offload(*level, stage).is_none());
        let is_asked = leaves || fullest.fits() || (is_compared(&fullest) && least < self.tries.best());
        let total = match is_asked || self.tries.mesh.with_unfit {
            true => {
                let longer = vec![[1.0; 2]; stages.len()];
                let Ran { seconds, is_whole } = self.run(ends, (stages, levels), &longer, enough / spread - once)?;
                let total = (seconds + once) * spread;
                if !is_whole {
                    self.tries.refuse(total);
                    return None;
                }
                total
            }
            false => least,
        };
        debug_assert!(total >= least * (1.0 - 1e-9), "stages take {total} s, and at the least {least}");
        let Pace { sums, whole, .. } = self.pace(most, longest);
        let kernels =
            stages[longest].iter().map(|part| self.kernels(levels[longest], longest, *part).all()).sum::<f64>();
        let part = kernels / sums.whole().max(f64::MIN_POSITIVE);
        let within = Seconds((slowest - kernels) * placed.microbatches as f64);
        let scaled = |seconds: Seconds| Seconds(seconds.0 * part);
        let mut prediction = Prediction {
            step: Seconds(total),
            matmul: scaled(whole.matmul),
            memory_bound: scaled(whole.memory_bound),
            exposed_communication: scaled(whole.exposed_communication) + within,
            communication: scaled(whole.communication),
            optimizer: Seconds(self.updates((stages, levels)).fold(0.0, f64::max)),
            mfu: self.tries.mesh.work.at_peak.0 / (total * placed.cluster.ranks() as f64),
            memory: fullest.memory,
            room: fullest.room,
            ..*whole
        };
        let named = prediction.matmul + prediction.memory_bound + prediction.exposed_communication;
        prediction.bubble = Seconds((total - (named + prediction.optimizer).0).max(0.0));
        Some(prediction)
    }

    /// Seconds that the whole model would take outside of the loop, on the devices of a stage.
    pub fn outside(&self, level: usize, stage: usize) -> f64 {
        let (Pace { sums, whole, .. }, placed) = (self.pace(level, stage), &self.tries.mesh.placed);
        let in_loop = placed.microbatches as f64 * sums.whole();
        (whole.step.0 / spread(placed.cluster.ranks()) - in_loop).max(0.0)
    }

    /// The level of those of stages at which the most is computed again.
    fn most(&self, levels: &[usize]) -> Option<usize> {
        levels.iter().max_by_key(|level| self.levels.all[**level].again).copied()
    }

    /// Seconds in which the devices of each stage update everything.
    fn updates<'s>(&'s self, (stages, levels): Stages<'s>) -> impl Iterator<Item = f64> + 's {
        let most = self.most(levels).unwrap_or(0);
        let of =
            move |(stage, chunks): (usize, &Vec<Part>)| self.pace(most, stage).whole.optimizer.0 * self.share(chunks);
        stages.iter().enumerate().map(of)
    }

    /// The stage whose kernels take the longest for a microbatch, and their seconds.
    fn slowest(&self, of: Stages<'_>) -> Option<(usize, f64)> {
        let seconds = |stage: usize| (stage, self.chunks(of, stage).map(Lengths::all).sum::<f64>());
        (0..of.0.len()).map(seconds).max_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// What each chunk of a stage takes of a microbatch.
    fn chunks<'s>(&'s self, (stages, levels): Stages<'s>, stage: usize) -> impl Iterator<Item = Lengths> + 's {
        stages[stage].iter().map(move |part| self.passes(levels[stage], stage, *part))
    }

    /// The copies of what each chunk holds, where passes run in the order that their lengths make.
    pub fn held_at(&self, ends: &[usize], levels: &[usize]) -> Option<Rc<[Held]>> {
        let (pipeline, count) = (&self.tries.pipeline, self.tries.stages);
        let bytes = |chunk: usize| {
            let level = levels[pipeline.stage_of(chunk as u32, count) as usize];
            let [kept, lasting, awaited] = self.left(level, (chunk, ends[chunk], ends[chunk + 1]));
            [kept, lasting, awaited, self.line().passing(ends[chunk])].map(|bytes| bytes as u64)
        };
        let (lengths, _) = self.lengths(ends, levels);
        let lengths = |chunk: u32| Lengths::from(&lengths[chunk as usize]);
        self.tries.runs.held(pipeline, &lengths, (0..ends.len() - 1).map(bytes).collect())
    }

    /// Seconds of the microbatches at the least: a stage does all of them, one after the other, once the first has come
    /// through the chunks before its own, which the last goes back through. While it does, the stage may make the gradients
    /// of weights that were delayed.
    pub fn at_least(&self, of: Stages<'_>) -> f64 {
        let (placed, pipeline) = (&self.tries.mesh.placed, &self.tries.pipeline);
        let splits = pipeline.schedule.splits_backward();
        let delayed = if splits { pipeline.most_delayed(self.tries.stages) } else { 0 };
        let (mut comes, mut returns) = (0.0, 0.0);
        let seconds = |stage: usize| {
            let chunks = || self.chunks(of, stage);
            let own = placed.microbatches as f64 * chunks().map(Lengths::all).sum::<f64>();
            let waiting = delayed as f64 * chunks().map(|own| own.weight).fold(0.0, f64::max);
            let seconds = comes + own + (returns - waiting).max(0.0);
            let Some(first) = chunks().next() else { return seconds };
            comes += first.forward;
            // No chunk waits for what the first makes of its gradients; and what goes back in a forward pass waits for
            // nothing that comes behind it.
            returns = match (splits && stage > 0, first.backward <= 0.0) {
                (_, true) => 0.0,
                (true, false) => returns + first.backward,
                (false, false) => returns + first.backward + first.weight,
            };
            seconds
        };
        (0..of.0.len()).map(seconds).fold(0.0, f64::max) * spread(placed.cluster.ranks())
    }

    /// Seconds of all microbatches, where passes take so much longer than their kernels, as far as it takes to see whether
    /// these are more than `enough`. Passes are as long as the plan says: what differs by less has one order, and one run.
    fn run(&self, ends: &[usize], (stages, levels): Stages<'_>, longer: &[Longer], enough: f64) -> Option<Ran> {
        let (pipeline, count) = (&self.tries.pipeline, self.tries.stages);
        let microbatches = self.tries.mesh.placed.microbatches;
        let (lengths, unit) = self.lengths(ends, levels);
        let links = chain(pipeline, count, &lengths);
        let durations = Costs::new(self, (&lengths, unit), &links, longer);
        let (unit, enough) = (durations.unit, enough / durations.unit);
        let taken = |chunks: &Vec<Part>| {
            let of = |part: &Part| durations.chunks[part.0].all() + self.lost(*part) / unit;
            chunks.iter().map(of).sum::<f64>()
        };
        let slowest = stages.iter().map(taken).fold(0.0, f64::max);
        let (followed, round) = in_rounds(pipeline, count, microbatches);
        let on_wire = [&durations.messages[..], &[durations.loss]].concat();
        let run = |microbatches: u64| {
            let passes = (&durations.chunks[..], &on_wire[..]);
            self.tries.runs.seconds(pipeline, passes, microbatches, &|| {
                let lengths = |chunk: u32| durations.chunks[chunk as usize];
                let steps = self.tries.runs.steps(&followed, microbatches, &lengths)?;
                finish(&followed, &steps, &links, &durations)
            })
        };
        let all = |microbatches: u64| self.tries.mesh.followed(microbatches, round);
        let (first, some) = (all((STEADY - 1) * round), all(STEADY * round));
        if enough < f64::INFINITY && first < some {
            let least = run(first)? + (microbatches - first) as f64 * slowest;
            if least > enough {
                return Some(Ran { seconds: least * unit, is_whole: false });
            }
        }
        let whole = |seconds: f64| Some(Ran { seconds: seconds * unit, is_whole: true });
        let few = run(some)?;
        if some == microbatches {
            return whole(few);
        }
        let further = (few - run(some - round)?) / round as f64;
        // Where stages wait for messages they do so the more, the more microbatches there are.
        let waits = further > slowest * STEADY_WITHIN;
        let most = if waits { microbatches.min(MOST_FOLLOWED).max(some) } else { some };
        let run = if most > some { run(most)? } else { few };
        whole(run + (microbatches - most) as f64 * if waits { further } else { slowest })
    }

    /// What leaves the stages adds to a step that is predicted with everything on the devices: seconds of transfers, and
    /// of the update.
    pub fn added(
        &self,
        ends: &[usize],
        (stages, levels): Stages<'_>,
        leaving: &[Leaving],
        on_device: &Prediction,
    ) -> Option<(f64, f64)> {
        let shown = self.shown(stages, levels, leaving);
        let longer = |((stage, chunks), Shown { forward, backward, .. }): ((usize, &Vec<Part>), &Shown)| {
            let beside = self.beside(levels[stage], stage, chunks);
            let times = |more: f64, own: f64| 1.0 + more / own.max(f64::MIN_POSITIVE);
            [times(*forward, beside.forward), times(*backward, beside.backward)]
        };
        let longer: Vec<Longer> = stages.iter().enumerate().zip(&shown).map(longer).collect();
        let alone = self.run(ends, (stages, levels), &vec![[1.0; 2]; stages.len()], f64::INFINITY)?.seconds;
        let beside = self.run(ends, (stages, levels), &longer, f64::INFINITY)?.seconds;
        let gradients = shown.iter().map(|own| own.gradients).fold(0.0, f64::max);
        let spread = spread(self.tries.mesh.placed.cluster.ranks());
        let updates = self.updates((stages, levels)).zip(leaving).zip(&shown);
        let update = updates.map(|((own, leaving), shown)| match leaving.updated > 0.0 {
            true => own * (1.0 - leaving.updated) + shown.update,
            false => own,
        });
        let transfers = ((beside - alone).max(0.0) + gradients) * spread;
        Some((transfers, update.fold(0.0, f64::max) - on_device.optimizer.0))
    }
}

/// A pipeline of which fewer microbatches are run in rounds as large as those of all, and how large they are.
pub(super) fn in_rounds(pipeline: &Pipeline, stages: u64, microbatches: u64) -> (Pipeline, u64) {
    if pipeline.schedule != Schedule::Interleaved {
        return (pipeline.clone(), stages);
    }
    let rounds = pipeline.rounds(stages, microbatches);
    let in_flight = Some(pipeline.held_in_rounds(stages, microbatches, rounds));
    (Pipeline { in_flight, ..pipeline.clone() }, microbatches.div_ceil(rounds))
}

/// The links of chunks that follow each other, between stages. What has nothing to do in a backward pass, as a head in
/// chunks, goes back in the forward pass.
pub(super) fn chain(pipeline: &Pipeline, stages: u64, lengths: &[Length]) -> Vec<Link> {
    let back = |own: &Length| if own.backward == 0 { Pass::Forward } else { Pass::Backward };
    let both = (1..).zip(lengths.iter().skip(1)).flat_map(|(chunk, own)| {
        let forward = Link { from: (chunk - 1, Pass::Forward), to: (chunk, Pass::Forward) };
        [forward, Link { from: (chunk, back(own)), to: (chunk - 1, Pass::Backward) }]
    });
    both.filter(|link| pipeline.stage_of(link.from.0, stages) != pipeline.stage_of(link.to.0, stages)).collect()
}

/// How long a schedule's steps take, in the units of a plan's lengths.
struct Costs {
    schedule: Schedule,
    /// Seconds of a unit.
    unit: f64,
    /// Of each chunk.
    chunks: Vec<Lengths>,
    /// Of each link.
    messages: Vec<f64>,
    /// By how much of its own time a message makes a step longer.
    loss: f64,
}

impl Costs {
    /// Those of chunks with lengths in such units, whose passes take so much longer than their kernels.
    fn new(problem: &Problem<'_>, (lengths, unit): (&[Length], f64), links: &[Link], longer: &[Longer]) -> Self {
        let pipeline = &problem.tries.pipeline;
        let chunk = |(chunk, own): (usize, &Length)| {
            let [in_forward, in_backward] = longer[pipeline.stage_of(chunk as u32, problem.tries.stages) as usize];
            let own = Lengths::from(own);
            Lengths {
                forward: in_forward * own.forward,
                backward: in_backward * own.backward,
                weight: in_backward * own.weight,
            }
        };
        Self {
            schedule: pipeline.schedule,
            unit,
            chunks: lengths.iter().enumerate().map(chunk).collect(),
            messages: links.iter().map(|Link { from, to }| lengths[from.0.max(to.0) as usize].message as f64).collect(),
            loss: (problem.loss() * LONGEST).ceil() / LONGEST,
        }
    }
}

impl Durations for Costs {
    fn pass(&self, chunk: u32, pass: Pass) -> f64 {
        self.chunks[chunk as usize].of(self.schedule, chunk, pass)
    }

    fn message(&self, link: usize) -> f64 {
        self.messages[link]
    }

    fn loss(&self) -> f64 {
        self.loss
    }
}
