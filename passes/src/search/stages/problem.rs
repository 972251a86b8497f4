//! One schedule on one mesh, with one choice of ZeRO: cuts, and what they take.

use super::cuts::Alone;
use super::exposed::Shares;
use super::held::{Ends, Held};
use super::levels::{Again, Choice, Level, Levels, Pace};
use super::line::Once;
use super::schedules::MANY;
use super::{Recompute, Sums, Tries};
use crate::cost::collective::distance;
use crate::pipeline::order::Lengths;
use crate::search::choice::offload::{Offload, Offloads};
use crate::search::estimate::relief::{Leaving, Relief, less};
use rustc_hash::FxHashMap;
use shardc_ir::pipeline::Length;
use shardc_ir::plan::{Memory, Prediction};
use shardc_ir::{Bytes, NodeId};
use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;

/// In how many units a plan says how long its longest part of a chunk takes.
pub(super) const LONGEST: f64 = 10_000.0;

/// Cuts are refined where a step has fewer than [`MANY`] microbatches for each stage and so many cuts at the most, and
/// takes less than so many times the fastest that is known; by moving some by so many places, as long as it then takes no
/// more than such a share.
const FEW_CUTS: usize = 7;
const NEAR: f64 = 1.05;
const MOVES: [isize; 6] = [-4, -2, -1, 1, 2, 4];
const LESS: f64 = 0.999;

/// Of what ranks say to each other outside of the microbatches, how much comes before them: weights in 16 bits, beside
/// gradients in 32.
const GATHERED: f64 = 1.0 / 3.0;

/// Where more cuts may be moved ([`Space::moves_cuts`](crate::search::space::Space)), how many are weighed at the most.
const MOST_WEIGHED: usize = 500;

/// Cuts are to be found, where stages have a choice of levels.
pub(super) struct Problem<'a> {
    pub tries: &'a Tries<'a>,
    /// From the least to the most; all are cut at the places of the last.
    pub agains: &'a [Rc<Again>],
    pub levels: &'a Levels,
    pub choice: &'a Choice,
    /// Per chunk.
    pub held: &'a [Held],
    /// What was asked about cuts.
    pub known: Known,
}

/// What is known of cuts, which are weighed against each other many times.
#[derive(Default)]
pub(super) struct Known {
    /// Of chunks by themselves.
    pub alone: RefCell<FxHashMap<Part, Alone>>,
    /// Of them, the one that was asked about last.
    pub latest: Cell<Option<(Part, Alone)>>,
    /// The fewest bytes that pass over any cut.
    pub fewest: OnceCell<f64>,
    /// Seconds of stages with some chunks.
    pub stages: RefCell<FxHashMap<Vec<Part>, f64>>,
    /// The level that the stage took which was asked about last: the others are much alike.
    pub level: Cell<usize>,
}

/// What a rank has of what its stage shares with others.
#[derive(Clone, Copy, Debug)]
pub(super) struct Portions {
    /// Of a gradient, while it is added up over the microbatches.
    pub summed: f64,
    /// Of a gradient, as its parameter is stored.
    pub stored: f64,
    /// Of a parameter, while the loop goes on.
    pub gathered: f64,
}

/// A chunk of a stage, with where it begins and ends.
pub(super) type Part = (usize, usize, usize);

/// Cuts, what each stage computes again and what leaves its devices, and what they take.
pub(super) struct Solution {
    /// Where the first chunk begins and each ends.
    ends: Vec<usize>,
    pub cuts: Vec<NodeId>,
    pub recompute: Vec<Recompute>,
    pub lengths: Vec<Length>,
    pub offload: Offloads,
    pub relief: Relief,
    pub prediction: Prediction,
    /// Whether other cuts take much less, but do not fit.
    pub is_short: bool,
}

/// With less than this share of the seconds.
const SHORT: f64 = 0.98;

impl Problem<'_> {
    /// Where the line may be cut, and what goes by no level: what is stored, and what passes.
    pub fn line(&self) -> &Sums {
        &self.agains[self.agains.len() - 1].paces[0].sums
    }

    /// What the model takes on the devices of a stage.
    pub fn pace(&self, level: usize, stage: usize) -> &Pace {
        &self.agains[self.levels.all[level].again].paces[self.tries.mesh.set[stage]]
    }

    /// Of three sums along the line, what lies between two places at a level, on one set of devices.
    fn between(&self, level: usize, set: usize, of: fn(&Sums) -> &[[f64; 3]], [from, to]: [usize; 2]) -> [f64; 3] {
        let Level { again, until, .. } = self.levels.all[level];
        let between = |again: usize, from: usize, to: usize| {
            let sums = &self.agains[again].paces[set].sums;
            sums.between(of(sums), from, to)
        };
        match until.map(|until| until.clamp(from, to)) {
            Some(until) if until < to => {
                let (first, rest) = (between(again, from, until), between(again - 1, until, to));
                std::array::from_fn(|sum| first[sum] + rest[sum])
            }
            _ => between(again, from, to),
        }
    }

    /// What the kernels of a part of a stage take of a microbatch, and collectives that they wait for.
    pub fn kernels(&self, level: usize, stage: usize, (_, from, to): Part) -> Lengths {
        self.between(level, self.tries.mesh.set[stage], |sums| &sums.passes, [from, to]).into()
    }

    /// What a part of a stage takes of a microbatch.
    pub fn passes(&self, level: usize, stage: usize, part: Part) -> Lengths {
        let (kernels, (chunk, from, to)) = (self.kernels(level, stage, part), part);
        let Pace { sums, within: Some(within), .. } = self.pace(level, stage) else { return kernels };
        // Of the first chunk the backward pass is one with its gradients of weights.
        let splits_backward = self.tries.pipeline.schedule.splits_backward() && chunk > 0;
        let [all, first, last] = [[from, to], [from, from + 1], [to - 1, to]].map(|[from, to]| sums.stored(from, to));
        kernels + within.longer(kernels, &Shares { all, first, last }, splits_backward)
    }

    /// Bytes that a microbatch leaves in a part, as [`Sums::held`] has them.
    pub fn left(&self, level: usize, (_, from, to): Part) -> [f64; 3] {
        self.between(level, 0, |sums| &sums.held, [from, to])
    }

    /// Of that, what is sent and not held ([`Sums::sent`]).
    fn sent(&self, level: usize, (_, from, to): Part) -> [f64; 3] {
        let Level { again, until, .. } = self.levels.all[level];
        let is_before = until.is_some_and(|until| until < to);
        self.agains[again - usize::from(is_before)].paces[0].sums.sent(from, to)
    }

    /// Seconds of a message between a chunk, which begins at a place, and the chunk before it.
    pub fn message(&self, chunk: usize, place: usize) -> f64 {
        let stage = |chunk: usize| self.tries.pipeline.stage_of(chunk as u32, self.tries.stages);
        self.tries.mesh.message([chunk.saturating_sub(1), chunk].map(stage), self.line().passing(place))
    }

    /// Seconds that kernels of a chunk, and of the one before it, lose at the least to what passes where it begins: to the
    /// fewest bytes that pass anywhere.
    pub fn lost_at_least(&self, chunk: usize) -> f64 {
        let fewest = || {
            let line = self.line();
            (1..line.places.len() - 1).map(|place| line.passing(place)).reduce(f64::min).unwrap_or_default()
        };
        let bytes = *self.known.fewest.get_or_init(fewest);
        let stage = |chunk: usize| self.tries.pipeline.stage_of(chunk as u32, self.tries.stages);
        self.loss() * 2.0 * self.tries.mesh.message([chunk - 1, chunk].map(stage), bytes)
    }

    /// Seconds that kernels of a chunk lose to its messages in a microbatch, both ways.
    pub fn lost(&self, (chunk, from, to): Part) -> f64 {
        self.loss() * 2.0 * (self.message(chunk, from) + self.message(chunk + 1, to))
    }

    /// By how much of its own time a message makes a step longer beside which it passes: kernels lose to it, collectives
    /// do not.
    pub fn loss(&self) -> f64 {
        let whole = &self.agains[0].paces[0].whole;
        let kernels = (whole.matmul + whole.memory_bound).0;
        let share = kernels / (kernels + whole.exposed_communication.0).max(f64::MIN_POSITIVE);
        self.tries.mesh.placed.cluster.device.overlap_loss.value * share
    }

    /// Seconds in which the last stage would get what it hands to itself at a place.
    pub fn turn(&self, place: usize) -> f64 {
        let last = self.tries.stages - 1;
        self.tries.mesh.message([last - 1, last], self.line().passing(place))
    }

    /// What it takes to send so many bytes to another stage, wherever that is.
    fn send(&self, bytes: f64) -> f64 {
        let cluster = self.tries.mesh.placed.cluster;
        self.tries.mesh.send(bytes, distance(0, cluster.ranks() - 1, cluster))
    }

    /// Seconds in which a stage exchanges gradients, and parameters, with others, once in a step, beside `others` in
    /// which it does what else is done outside of the microbatches before it updates. Parameters pass before the first of
    /// them, while others are gathered. Gradients are added up by the ranks of the stage that made them, which sends them
    /// while it goes on with others.
    pub fn exchanged(&self, chunks: &[Part], others: f64) -> f64 {
        let Tries { mesh, portions, storage, zero, .. } = self.tries;
        let share = |class: usize| mesh.seen[0][0].shape.share_of(class, *storage, *zero);
        let Once { gradients: [received, sent], parameters, .. } = self.line().once(chunks, share);
        let send = |bytes: f64| self.send(portions.stored * bytes);
        let passed = self.send(parameters.iter().sum());
        let reduce = |bytes: f64| mesh.seen[0][0].shape.reduced(*storage, *zero, bytes, mesh.placed.cluster);
        let beyond = |seconds: f64, others: f64| (seconds - others).max(0.0);
        let late = |seconds: f64| beyond(seconds, (1.0 - GATHERED) * others);
        let received = late(reduce(received) + send(received));
        beyond(passed, GATHERED * others) + received.max(reduce(sent) + late(send(sent)))
    }

    /// The memory of a stage with these chunks.
    pub fn memory(&self, level: usize, stage: usize, chunks: &[Part]) -> Memory {
        let (on_device, offload) = (self.on_device(level, chunks), self.offload(level, stage));
        if offload.is_none() { on_device } else { less(on_device, self.leaving(level, chunks, &offload).memory) }
    }

    /// The share of the parameters that a stage with these chunks has.
    pub fn share(&self, chunks: &[Part]) -> f64 {
        let sums = self.line();
        chunks.iter().map(|(_, from, to)| sums.stored(*from, *to)).sum()
    }

    /// The same with everything on the devices.
    fn on_device(&self, level: usize, chunks: &[Part]) -> Memory {
        let Level { again, until, .. } = self.levels.all[level];
        let Again { paces, working, .. } = &*self.agains[again];
        let before = until.map_or(0.0, |_| self.agains[again - 1].working);
        let (whole, sums, share) = (&paces[0].whole.memory, self.line(), self.share(chunks));
        let [held, arriving] = self.held_by(level, chunks);
        let bytes = |bytes: f64| Bytes(bytes.max(0.0) as u64);
        let part = |all: Bytes| bytes(all.0 as f64 * share);
        let (Portions { summed, gathered, .. }, once) = (self.tries.portions, sums.once(chunks, |_| 1.0));
        // What is made of parameters lies where it is made, as a large table that is gathered: no share of it on each stage.
        let own: f64 = chunks.iter().map(|(_, from, to)| sums.copied(*from, *to)).sum();
        let copied = own - share * sums.copied(0, sums.places.len() - 1) + once.kept;
        let has_head = chunks.iter().any(|(_, _, to)| to + 1 == sums.places.len());
        let without = if has_head { 0 } else { self.tries.mesh.seen[0][0].shape.head_copy() };
        Memory {
            parameters: bytes(share * whole.parameters.0 as f64 + gathered * copied),
            // Gradients from other stages come when the activations are gone.
            gradients: part(whole.gradients) + bytes(summed * once.made),
            optimizer: part(whole.optimizer),
            activations: bytes(held + working.max(before)),
            buffers: bytes((whole.buffers.0 - without) as f64 + arriving),
            reserved: Bytes(0),
        }
    }

    /// Bytes of what these chunks of a stage hold of microbatches; and of the buffers in which what they hold arrives.
    fn held_by(&self, level: usize, chunks: &[Part]) -> [f64; 2] {
        let of = |part: &Part| {
            let Held { kept, lasting, awaited, ends: Ends { comes, goes } } = self.held[part.0];
            let each = self.left(level, *part).into_iter().zip(self.sent(level, *part));
            let held = [kept, lasting, awaited].into_iter().zip(each);
            let held =
                held.map(|(copies, (left, sent))| copies as f64 * left - copies.saturating_sub(goes[0]) as f64 * sent);
            let [into, out_of] = [part.1, part.2].map(|place| self.line().passing(place));
            let back = goes[1] as f64 * into + comes[1] as f64 * out_of;
            [held.sum::<f64>() + lasting as f64 * into + back, comes[0] as f64 * into]
        };
        chunks.iter().map(of).fold([0.0; 2], |[a, b], [held, arriving]| [a + held, b + arriving])
    }

    /// Cuts the line, and predicts the step; nothing if no cuts fit.
    pub fn solve(&self) -> Option<Solution> {
        let rank = |of: &Solution| (!of.prediction.fits(), of.prediction.step.0);
        let (mut best, mut unfit): (Option<Solution>, f64) = (None, f64::INFINITY);
        for ends in self.ends(self.tries.mesh.placed.microbatches) {
            let best_fit =
                best.as_ref().filter(|best| best.prediction.fits()).map_or(f64::INFINITY, |best| rank(best).1);
            let enough = best_fit.min(self.tries.far());
            let Some(found) = self.cut_at(&ends, enough) else { continue };
            if !found.prediction.fits() {
                unfit = unfit.min(found.prediction.step.0);
            }
            if best.as_ref().is_none_or(|best| rank(&found) < rank(best)) {
                best = Some(found);
            }
        }
        let mut best = self.refined(best?);
        best.is_short = best.prediction.fits() && unfit < SHORT * best.prediction.step.0;
        Some(best)
    }

    /// Moves runs of neighbouring cuts as long as that makes the step shorter, as running its schedule tells. With few
    /// microbatches a step is filling and draining for much of its time, and stages that are equal are not the fastest. Of many
    /// microbatches or cuts this is done where it is asked for.
    fn refined(&self, mut best: Solution) -> Solution {
        let Tries { mesh, stages, .. } = self.tries;
        let (cuts, is_near) = (best.ends.len() - 2, best.prediction.step.0 < NEAR * self.tries.best());
        let is_much = mesh.placed.microbatches >= MANY * stages || cuts > FEW_CUTS;
        if !best.prediction.fits() || !is_near || (is_much && !mesh.moves_cuts) {
            return best;
        }
        let runs = (1..=cuts).flat_map(|first| (first..=cuts).map(move |last| (first, last)));
        let moves: Vec<_> = runs.flat_map(|run| MOVES.map(|by| (run, by))).collect();
        let mut left = if is_much { MOST_WEIGHED } else { usize::MAX };
        loop {
            let before = best.prediction.step.0;
            for ((first, last), by) in moves.iter().copied() {
                let mut ends = best.ends.clone();
                ends[first..=last].iter_mut().for_each(|end| *end = end.saturating_add_signed(by));
                if ends[first] <= ends[first - 1] || ends[last] >= ends[last + 1] {
                    continue;
                }
                if left == 0 {
                    return best;
                }
                left -= 1;
                let enough = LESS * best.prediction.step.0;
                let found = self.cut_at(&ends, enough);
                best =
                    found.filter(|found| found.prediction.fits() && found.prediction.step.0 < enough).unwrap_or(best);
            }
            if best.prediction.step.0 == before {
                return best;
            }
        }
    }

    /// What cuts at these places come to; nothing, if that is seen to be a step of so many seconds or more.
    fn cut_at(&self, ends: &[usize], enough: f64) -> Option<Solution> {
        if !self.tries.pipeline.schedule.splits_backward() {
            return self.solution(ends, enough);
        }
        // The order of passes goes by how long they are: what is held is known once they are.
        let (stages, levels) = self.stages(ends);
        let least = self.at_least((&stages, &levels));
        if least >= enough {
            self.tries.refuse(least);
            return None;
        }
        let held = &self.held_at(ends, &levels)?;
        Problem { held, known: Default::default(), ..*self }.solution(ends, enough)
    }

    /// The chunks of each stage, and its level.
    pub fn stages(&self, ends: &[usize]) -> (Vec<Vec<Part>>, Vec<usize>) {
        let of_stage = |stage: u64| {
            let chunks = self.tries.pipeline.chunks_of(stage, self.tries.stages).into_iter();
            chunks.map(|chunk| (chunk as usize, ends[chunk as usize], ends[chunk as usize + 1])).collect()
        };
        let stages: Vec<Vec<Part>> = (0..self.tries.stages).map(of_stage).collect();
        let level = |(stage, chunks): (usize, &Vec<Part>)| match self.choice {
            Choice::All(level) => *level,
            Choice::Least => self.level(stage, chunks).unwrap_or(self.levels.last()),
            Choice::Named(levels) => levels[stage],
        };
        let levels = stages.iter().enumerate().map(level).collect();
        (stages, levels)
    }

    fn solution(&self, ends: &[usize], enough: f64) -> Option<Solution> {
        let mesh = self.tries.mesh;
        let (stages, levels) = self.stages(ends);
        let memory = |(chunks, level): (&Vec<Part>, &usize)| self.on_device(*level, chunks);
        let memory: Vec<Memory> = stages.iter().zip(&levels).map(memory).collect();
        let taken =
            |(memory, room): (&Memory, &Bytes)| Prediction { memory: *memory, room: *room, ..Default::default() };
        let fullest = memory.iter().zip(mesh.rooms).map(taken).max_by(|a, b| a.filled().total_cmp(&b.filled()))?;
        let prediction = self.predict(ends, (&stages, &levels), fullest, enough)?;
        let (offload, relief) = self.relief(ends, (&stages, &levels), &prediction)?;
        let prediction = relief.apply(&prediction, &memory, mesh.rooms);
        let inner = &ends[1..ends.len() - 1];
        let cuts = inner.iter().map(|cut| mesh.line.main[self.line().places[*cut]]).collect();
        let (lengths, _) = self.lengths(ends, &levels);
        let recompute = levels.iter().map(|level| self.levels.all[*level].recompute).collect();
        let (ends, is_short) = (ends.to_vec(), false);
        Some(Solution { ends, cuts, recompute, lengths, offload, relief, prediction, is_short })
    }

    /// What lies away from the devices of each stage, and what that takes from them and adds to a step; nothing, if no
    /// host has room for it.
    fn relief(
        &self,
        ends: &[usize],
        (stages, levels): (&[Vec<Part>], &[usize]),
        on_device: &Prediction,
    ) -> Option<(Offloads, Relief)> {
        let mut offloads: Vec<Offload> =
            levels.iter().enumerate().map(|(stage, level)| self.offload(*level, stage)).collect();
        if offloads.iter().all(Offload::is_none) {
            return Some(Default::default());
        }
        let of = |offloads: &[Offload]| -> Vec<Leaving> {
            let all = stages.iter().zip(levels).zip(offloads);
            all.map(|((chunks, level), offload)| self.leaving(*level, chunks, offload)).collect()
        };
        let room = self.tries.mesh.away.room.host.0 as f64;
        let mut leaving = of(&offloads);
        if self.on_host(&leaving) > room && self.tries.pinned.is_empty() {
            offloads.iter_mut().for_each(|offload| *offload = offload.on_disk());
            leaving = of(&offloads);
        }
        let host = self.on_host(&leaving);
        if host > room {
            return None;
        }
        let (transfers, update) = self.added(ends, (stages, levels), &leaving, on_device)?;
        let freed = leaving.iter().map(|own| own.memory).collect();
        Some((Offloads::new(offloads), Relief { freed, host: Bytes(host as u64), transfers, update }))
    }

    /// What a chunk takes of a microbatch, at these levels of the stages.
    fn chunk(&self, chunk: u32, ends: &[usize], levels: &[usize]) -> Lengths {
        let stage = self.tries.pipeline.stage_of(chunk, self.tries.stages) as usize;
        let index = chunk as usize;
        self.passes(levels[stage], stage, (index, ends[index], ends[index + 1]))
    }

    /// What all chunks take, as a plan says it: in units, of which the longest part has [`LONGEST`] and a part of one is
    /// whole; and the seconds of a unit.
    pub fn lengths(&self, ends: &[usize], levels: &[usize]) -> (Vec<Length>, f64) {
        let chunks = 0..ends.len() as u32 - 1;
        let parts = chunks.map(|chunk| {
            let Lengths { forward, backward, weight } = self.chunk(chunk, ends, levels);
            [forward, backward, weight, self.message(chunk as usize, ends[chunk as usize])]
        });
        let parts: Vec<[f64; 4]> = parts.collect();
        let unit = parts.iter().flatten().copied().fold(f64::MIN_POSITIVE, f64::max) / LONGEST;
        let scaled = |parts: [f64; 4]| {
            // Of the longest itself no more units are left by rounding.
            let [forward, backward, weight, message] = parts.map(|part| (part / unit - 1e-6).ceil() as u64);
            Length { forward, backward, weight, message }
        };
        (parts.into_iter().map(scaled).collect(), unit)
    }
}
