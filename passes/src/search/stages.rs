//! Pipelines in the search: schedules, cuts, and what a step in stages takes.
//!
//! For a placed mesh with stages, the sums over classes are laid out along the forward pass ([`line`](mod@line)). The
//! best cuts follow by a dynamic program ([`cut`](crate::pipeline::cut)) under the memory of the schedule's own
//! microbatches in flight. What they take follows by running the schedule's steps with these seconds
//! ([`timeline`](crate::pipeline::timeline)), in the order in which programs will run them; only cuts that fit, or
//! nearly do, are run. With several chunks a stage, the program cuts into chunks that are equal, from where cuts are
//! moved until the stages are equal and fit ([`balance`](crate::pipeline::balance)); of the two, the faster is taken.
//!
//! **Unequal devices.** A stage takes what it takes the slowest of its own devices, and may take the memory of the
//! smallest of them: stages on unequal nodes are as long as each other, and hold unequal parts of the model.
//!
//! **Memory.** Stages hold different numbers of microbatches, so what is computed again is chosen for each of them,
//! block by block, and where that does not do, what lies away from its devices ([`moved`]): the least that fits
//! ([`levels`]), which the dynamic program weighs against moving the cut. Zero-bubble V may begin fewer microbatches at
//! a time instead: its order follows from how long the chunks take and from how many a stage holds, so for each number
//! that is tried all of this is found again.

mod cuts;
pub(in crate::search) mod exposed;
pub(in crate::search) mod held;
mod levels;
pub mod line;
mod messages;
mod moved;
mod parameters;
mod problem;
mod recomputed;
mod runs;
pub(in crate::search) mod schedules;
mod sent;
mod step;

use super::away::{Away, suits};
use super::candidate::{Candidate, fastest, least_step, overlap_chunks};
use super::choice::degrees::Degrees;
use super::choice::offload::Offload;
use super::choice::pins::{Pins, Recompute};
use super::choice::stages::{Limits, Stages};
use super::placed::{Seen, Solved, solved};
use super::space::{Point, Space};
use super::visit::Visited;
use super::work::Work;
use crate::cluster::Cluster;
use crate::cost::overlap::spread;
use crate::pipeline::order::Lengths;
use crate::shard::objective::Prices;
use crate::shard::tensor::{Placed, Prepared};
use crate::threads;
use exposed::Within;
use held::Held;
use levels::{Again, Choice, Levels, Pace, longest, pinned};
use line::{Line, Sums};
use messages::distances;
use moved::{InBlocks, Model, hosts};
use problem::{Portions, Problem, Solution};
use recomputed::Recomputed;
use runs::Runs;
use rustc_hash::FxHashMap;
use schedules::{MANY, limits, schedules, zeros};
use shardc_ir::pipeline::Schedule;
use shardc_ir::{Bytes, Family, Pipeline, Seconds};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

/// More chunks a stage than these are tried where a step has fewer than [`MANY`] microbatches for each stage: with more,
/// what they save of filling and draining is little beside what their messages cost.
const FEW_CHUNKS: u64 = 4;

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
    /// Per stage, how far it is to the next, and from the last to the first ([`distance`]).
    distances: Vec<usize>,
    /// How many ranks of each stage its hosts have.
    hosts: Vec<Vec<u64>>,
    away: Away,
    /// What blocks have, if anything may leave.
    in_blocks: Option<&'a InBlocks>,
    /// One for each way to store parameters.
    degrees: &'a [Degrees],
    work: Work,
    /// The share of its room that a stage may take whose recomputation is its own.
    spare: f64,
    /// Whether stages that do not fit are as good as any.
    with_unfit: bool,
    /// Whether many cuts are moved as well ([`Space::moves_cuts`]).
    moves_cuts: bool,
    /// Seconds of the fastest step that fits, of other meshes.
    best: f64,
    /// Seconds of a step from which on a pipeline is not worth a try, by what is known of other meshes.
    far: f64,
}

impl Mesh<'_> {
    /// So many microbatches, or all where there are fewer, in whole rounds.
    fn followed(&self, most: u64, round: u64) -> u64 {
        let all = self.placed.microbatches;
        all.min(most).next_multiple_of(round).min(all)
    }
}

/// The pipelines of a mesh with stages, of which the batch is placed. Where none fits, or the fastest that does computes
/// something again, the head is cut into smaller chunks as long as that gains.
pub(super) fn solve(
    space: &Space<'_, '_>,
    line: &Line,
    placed: Placed<'_>,
    point: &Point,
    visited: &mut Visited,
) -> Vec<Candidate> {
    let (prepared, pins) = (space.prepared, space.pins);
    let meshes: Vec<_> = point.degrees.iter().map(|degrees| degrees.mesh(space.request.batch)).collect();
    let (clusters, set) = clusters_by_stage(space, placed.mesh);
    let all = clusters.concat();
    let room = space.cluster.least_room(space.request.device_memory);
    // Layouts are those that are fastest on the slowest kind.
    let own = solved(prepared, placed, Prices::default(), &all, (&meshes, pins));
    visited.learn(&own, point, false);
    if !space.with_unfit && !visited.opens_stages(&own, point) {
        return Vec::new();
    }
    let sizes: Vec<usize> = clusters.iter().map(Vec::len).collect();
    let mut found = of_solved(space, line, &own, (&sizes, &set), point, visited);
    let is_free = |found: &[Candidate]| fastest(found).is_some_and(|of| of.recompute == Recompute::None);
    // By what programs of their like took, all may be so far from fitting that none is tried.
    if !is_free(&found) && (space.measure.excess > 1.0 || !found.is_empty()) {
        for smaller in own.in_smaller_chunks(prepared, room, (&meshes, pins)) {
            let others = of_solved(space, line, &smaller, (&sizes, &set), point, visited);
            if fastest(&found).is_some() && least_step(&others) >= least_step(&found) {
                break;
            }
            let is_enough = is_free(&others);
            found.extend(others);
            if is_enough {
                break;
            }
        }
    }
    found
}

/// The pipelines of a mesh with some layouts, as kinds of devices see it: sets of so many kinds, and for each stage the
/// place of its set behind the whole.
fn of_solved(
    space: &Space<'_, '_>,
    line: &Line,
    Solved { own, others }: &Solved<'_>,
    (sizes, set): (&[usize], &[usize]),
    point: &Point,
    visited: &mut Visited,
) -> Vec<Candidate> {
    let (prepared, degrees, work, cluster) = (space.prepared, &point.degrees[..], point.work, space.cluster);
    let placed = &own.placed;
    let rooms = cluster.rooms(placed.mesh, space.request.device_memory);
    let rooms = &rooms.into_iter().map(|room| space.measure.room(room)).collect::<Vec<_>>()[..];
    let spare = space.measure.share();
    let mut seen = vec![std::slice::from_ref(own)];
    let mut rest = &others[..];
    for of_set in sizes {
        let (first, after) = rest.split_at(*of_set);
        seen.push(first);
        rest = after;
    }
    let seen = &seen[..];
    let (with_unfit, moves_cuts, away) = (space.with_unfit, space.moves_cuts, point.away);
    let of = |recompute: Recompute| Sums::new(prepared, &own.shape, recompute, line);
    let in_blocks = away.moves().then(|| InBlocks::new(line, &of(Recompute::None), &of(Recompute::All)));
    let hosts = if away.moves() { hosts(placed.mesh, cluster.per_node) } else { Vec::new() };
    let in_blocks = in_blocks.as_ref();
    let distances = distances(placed.mesh, cluster);
    let mesh = Mesh {
        prepared,
        line,
        placed,
        seen,
        set,
        rooms,
        distances,
        hosts,
        away,
        in_blocks,
        degrees,
        work,
        spare,
        with_unfit,
        moves_cuts,
        best: visited.best,
        far: visited.limit_in_stages(),
    };
    let of_schedules = pipelines(&mesh, space.pins);
    visited.leave_out(of_schedules.iter().map(|of| of.1).fold(f64::INFINITY, f64::min));
    of_schedules.into_iter().flat_map(|of| of.0).collect()
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

/// One schedule on one mesh, with one choice of ZeRO.
struct Tries<'a> {
    mesh: &'a Mesh<'a>,
    pins: &'a Pins,
    again: &'a Recomputed<'a>,
    pipeline: Pipeline,
    stages: u64,
    /// Which of the ways to store parameters.
    storage: usize,
    zero: u64,
    portions: Portions,
    model: Model,
    /// What is pinned to lie away from the devices of each stage, if anything is.
    pinned: Vec<Offload>,
    /// Whether gradients may leave as they are made.
    may_leave: bool,
    runs: &'a Runs<'a>,
    /// What is known of ways to compute again, by theirs and by that at whose places they are cut.
    known: &'a RefCell<FxHashMap<[usize; 2], Rc<Again>>>,
    /// The least bound of what was left out beside other meshes.
    cut: &'a Cell<f64>,
    /// Seconds of the fastest step that fits, of those that were tried, or hold more in flight.
    fastest: &'a Cell<f64>,
    /// Of ways to compute again, the first that is known to take too long with as many in flight.
    slow: &'a Cell<usize>,
    /// Whether cuts that do not fit take much less than those that do: with less in flight they may fit.
    is_short: Cell<bool>,
}

/// The pipelines of a placed mesh with stages, and the least bound of what was left out: of each schedule, which knows
/// nothing of the others.
fn pipelines(mesh: &Mesh<'_>, pins: &Pins) -> Vec<(Vec<Candidate>, f64)> {
    let (microbatches, stages) = (mesh.placed.microbatches, mesh.placed.mesh.degree(Family::Pipeline));
    let again = &Recomputed::new(mesh, pins);
    // As many stages, there are no more chunks than are worth a try, unless they are asked for.
    let is_asked = pins.schedule.is_some() || pins.virtual_stages.is_some();
    let most = if is_asked { u64::MAX } else { mesh.line.most() };
    let is_worth = |(_, per_stage): &(Schedule, u64)| {
        let is_few = is_asked || *per_stage <= FEW_CHUNKS || microbatches < MANY * stages;
        *per_stage == 1 || (stages * per_stage <= most && is_few)
    };
    let worth: Vec<(Schedule, u64)> = schedules(pins).into_iter().filter(is_worth).collect();
    let zeros = &zeros(mesh, pins)[..];
    threads::map(&worth, |schedule| of_schedule(mesh, pins, (again, zeros), *schedule))
}

/// The pipelines of one schedule.
fn of_schedule(
    mesh: &Mesh<'_>,
    pins: &Pins,
    (again, zeros): (&Recomputed<'_>, &[Vec<u64>]),
    (schedule, per_stage): (Schedule, u64),
) -> (Vec<Candidate>, f64) {
    let (microbatches, stages) = (mesh.placed.microbatches, mesh.placed.mesh.degree(Family::Pipeline));
    let shape = &mesh.seen[0][0].shape;
    let (mut candidates, runs, cut) = (Vec::new(), Runs::new(mesh), Cell::new(f64::INFINITY));
    for (storage, zeros) in zeros.iter().enumerate() {
        for zero in zeros.iter().copied() {
            let stored = shape.share(storage, zero);
            let part = |least: u64| if zero >= least { stored } else { 1.0 };
            let (fastest, slow) = (&Cell::new(f64::INFINITY), &Cell::new(usize::MAX));
            let known = &RefCell::default();
            let tries = |Limits { in_flight, delayed }: Limits| Tries {
                mesh,
                pins,
                again,
                pipeline: Pipeline { schedule, per_stage, in_flight, delayed, ..Pipeline::default() },
                stages,
                storage,
                zero,
                portions: Portions { summed: part(2), stored, gathered: part(3) },
                model: Model::new(shape, storage, zero, mesh.in_blocks),
                pinned: pinned(pins, stages),
                may_leave: shape.leaves_gradients(storage, zero),
                runs: &runs,
                known,
                cut: &cut,
                fastest,
                slow,
                is_short: Cell::default(),
            };
            let all = limits((schedule, per_stage), (stages, microbatches), pins);
            // Of zero-bubble V the last hold the least: where that is too much, so it is with more.
            let is_less = schedule.splits_backward() && all.len() > 1;
            if is_less && all.iter().flatten().next_back().is_some_and(|least| tries(*least).lacks()) {
                continue;
            }
            // More is held where that lets stages wait for less, and less where memory lacks, or lets equal stages fit; fewer
            // gradients of weights are delayed as long as that gains.
            let gains = |before: f64| before.is_infinite() || fastest.get() < before;
            for all in all {
                let mut is_enough = false;
                // With another number in flight passes may have another order.
                slow.set(usize::MAX);
                for (index, limits) in all.into_iter().enumerate() {
                    let before = fastest.get();
                    let tries = tries(limits);
                    let lacks = tries.all(&mut candidates) || tries.is_short.get();
                    is_enough = schedule.splits_backward() && !lacks && index == 0;
                    if !lacks || (index > 0 && !gains(before)) {
                        break;
                    }
                }
                if is_enough {
                    break;
                }
            }
        }
    }
    (candidates, cut.get())
}

impl Tries<'_> {
    /// A way to compute again, cut at the places of another.
    fn again(&self, index: usize, cut_as: usize) -> Rc<Again> {
        let known = self.known.borrow().get(&[index, cut_as]).cloned();
        known.unwrap_or_else(|| {
            let found = Rc::new(self.found_again(index, self.again.sums(cut_as)));
            self.known.borrow_mut().insert([index, cut_as], found.clone());
            found
        })
    }

    fn found_again(&self, index: usize, places: &Sums) -> Again {
        let (recompute, schedule) = (self.again.ways[index], self.pipeline.schedule);
        let microbatches = self.mesh.placed.microbatches as f64;
        let pace = |all: &Vec<(&Seen<'_>, Sums)>| {
            let (Seen { placed, shape, .. }, sums) = &all[index];
            let mut whole = shape.predict(placed, self.storage, self.zero, recompute, self.mesh.work);
            let mut sums = sums.cut_as(places);
            sums = if shape.adds_parts(self.storage, self.zero) {
                let adding: f64 = shape.adding(placed, self.storage, self.zero).iter().sum();
                sums.with_parts_of_gradients(adding / microbatches)
            } else {
                sums.with_whole_gradients()
            };
            let exposed = whole.exposed_communication;
            let within = shape.within_passes(placed, (self.storage, self.zero), recompute);
            if let Some(Within { shown, .. }) = within {
                let shown = shown * microbatches;
                whole.exposed_communication.0 -= shown;
                whole.step.0 -= shown * spread(placed.cluster.ranks());
            }
            if schedule.splits_backward() {
                let longer;
                (sums, longer) = sums.split();
                let shown = Seconds(longer * microbatches);
                whole.exposed_communication += shown;
                whole.step += shown * spread(placed.cluster.ranks());
            } else {
                sums = sums.hiding(shape.hidden_again(placed, (self.storage, self.zero), recompute, exposed));
            }
            Pace { sums, whole, within }
        };
        let paces: Vec<Pace> = self.again.of_sets.iter().map(pace).collect();
        let Pace { sums, whole, .. } = &paces[0];
        // The largest of what gradients of weights wait for is made where most lives, and counted with
        // its copies.
        let copied = if schedule.splits_backward() { sums.largest_awaited() } else { 0.0 };
        let working = whole.memory.activations.0 as f64 - sums.between_passes() - copied;
        // Of the whole, most may live where a large head is: not in every stage.
        let working = working.max(self.again.returning(index));
        Again { recompute, paces, working }
    }

    /// All up to one of them, of which each stage may take its own: then cuts lie between blocks.
    fn mixed(&self, most: usize) -> Vec<Rc<Again>> {
        (0..=most).map(|index| self.again(index, most)).collect()
    }

    /// The levels of stages that may take all of these ways to compute again, which are cut at the same places.
    fn levels(&self, agains: &[Rc<Again>]) -> Levels {
        let Some(last) = agains.last() else { return Levels::whole([]) };
        let blocks: Vec<_> = self.mesh.line.blocks_at(&last.paces[0].sums.places).collect();
        let ways: Vec<Recompute> = agains.iter().map(|again| again.recompute).collect();
        Levels::by_block(&ways, self.mesh.seen[0][0].shape.menu(), &blocks)
    }

    /// Whether all cuts are far from fitting, with as much computed again as may be, and everything on the devices.
    fn lacks(&self) -> bool {
        let mesh = self.mesh;
        let Some((last, way)) = self.again.ways.iter().enumerate().next_back() else { return false };
        if mesh.with_unfit || mesh.away.is_open || !self.pinned.is_empty() {
            return false;
        }
        let agains = [self.again(last, last)];
        let (levels, choice) = (&Levels::whole([(0, *way)]), &Choice::All(0));
        let Some(held) = &self.held(&agains[0].paces[0].sums) else { return false };
        Problem { tries: self, agains: &agains, levels, choice, held, known: Default::default() }.lacks()
    }

    /// The copies of what each chunk holds, if all chunks are as long as each other, and their parts.
    fn held(&self, sums: &Sums) -> Option<Rc<[Held]>> {
        let chunks = self.stages * self.pipeline.per_stage;
        let [kept, lasting, awaited] = sums.held();
        let bytes = vec![[kept, lasting, awaited, chunks * sums.passing_in_the_middle()]; chunks as usize];
        self.runs.held(&self.pipeline, &|_| Lengths::EQUAL, bytes)
    }

    /// Whether a way to compute again takes too long for it to be worth a try.
    fn is_far(&self, index: usize) -> bool {
        let Pipeline { schedule, per_stage, .. } = self.pipeline;
        let (microbatches, stages) = (self.mesh.placed.microbatches as f64, self.stages as f64);
        let all = self.again.of_sets.iter().map(|all| all[index].1.whole()).fold(f64::INFINITY, f64::min);
        // Stages wait for each other while the pipeline fills and drains, for what others compute of a
        // microbatch; where backward passes are split they may make gradients of weights that were delayed while it drains.
        let others = (stages - 1.0) / per_stage as f64;
        let filling = if schedule.splits_backward() {
            let [forward, backward, weight] = self.again.sums(index).lengths().shares();
            let delayed = self.pipeline.most_delayed(self.stages) as f64 / per_stage as f64;
            others * forward + (others * backward - delayed * weight).max(0.0)
        } else {
            others
        };
        self.leaves_out((microbatches + filling) * all / stages)
    }

    /// Whether pipelines that take at least so many seconds are not worth a try.
    fn leaves_out(&self, least: f64) -> bool {
        self.refuse(least);
        least > self.far()
    }

    /// Pipelines that take at least so many seconds are not tried any further: which of them is told where that is because
    /// of what is known of other meshes.
    fn refuse(&self, least: f64) {
        if least >= self.mesh.far {
            self.cut.set(self.cut.get().min(least));
        }
    }

    /// Seconds of the fastest step that fits, of those that are known.
    fn best(&self) -> f64 {
        self.fastest.get().min(self.mesh.best)
    }

    /// Seconds of a step from which on a pipeline is not worth a try.
    fn far(&self) -> f64 {
        self.fastest.get().min(self.mesh.far)
    }

    /// Adds the best cuts where stages have a choice of levels; whether it fits, if there are any.
    fn try_out(
        &self,
        candidates: &mut Vec<Candidate>,
        agains: &[Rc<Again>],
        levels: Levels,
        choice: Choice,
    ) -> Option<bool> {
        let Pipeline { schedule, per_stage, in_flight, delayed, .. } = self.pipeline;
        let (mesh, levels, choice) = (self.mesh, &levels, &choice);
        let held = &self.held(&agains.last()?.paces[0].sums)?;
        let problem = Problem { tries: self, agains, levels, choice, held, known: Default::default() };
        if problem.lacks() && !mesh.with_unfit {
            return Some(false);
        }
        let Solution { cuts, mut recompute, lengths, offload, relief, prediction, is_short, .. } = problem.solve()?;
        self.is_short.set(self.is_short.get() || is_short);
        let most = recompute.iter().copied().max().unwrap_or(Recompute::None);
        if recompute.iter().all(|own| *own == most) {
            recompute.clear();
        }
        let (fits, shape) = (prediction.fits(), &mesh.seen[0][0].shape);
        if fits {
            self.fastest.set(self.fastest.get().min(prediction.step.0));
        }
        candidates.push(Candidate {
            degrees: mesh.degrees[self.storage].clone(),
            stages: Some(Stages {
                schedule,
                per_stage,
                limits: Limits { in_flight, delayed },
                cuts,
                recompute,
                lengths,
            }),
            zero: self.zero,
            recompute: most,
            loss_chunks: shape.loss_chunks,
            overlap_chunks: overlap_chunks(shape.uneven, self.pins)[0].0,
            within: shape.within(most) / self.stages as f64,
            prices: Prices::default(),
            offload,
            relief,
            prediction,
        });
        Some(fits)
    }

    /// Adds all that are worth a try; whether memory lacks for one of them.
    fn all(&self, candidates: &mut Vec<Candidate>) -> bool {
        let (ways, named) = (&self.again.ways, &self.pins.stage_recompute);
        if self.pinned.iter().any(|pin| !suits(pin, false, self.may_leave)) {
            return false;
        }
        if !named.is_empty() {
            let menu = self.mesh.seen[0][0].shape.menu();
            let of = |own: &Recompute| ways.iter().position(|known| *known == own.within(menu.steps())).unwrap_or(0);
            let again: Vec<usize> = named.iter().map(of).collect();
            let most = again.iter().copied().max().unwrap_or(0);
            let levels = Levels::whole(again.into_iter().map(|index| (index, ways[index])));
            let choice = Choice::Named((0..named.len()).collect());
            return self.try_out(candidates, &self.mixed(most), levels, choice) == Some(false);
        }
        // More recomputation takes longer: the first that fits is the best that all stages can do.
        let (mut first, mut last, mut lacks) = (None, None, false);
        for (index, way) in ways.iter().copied().enumerate().take(self.slow.get()) {
            if self.is_far(index) {
                // Some blocks of a stage may do so all the same.
                if index > 0 && !self.is_far(index - 1) {
                    self.mix(candidates, index);
                }
                continue;
            }
            let again = [self.again(index, index)];
            // The slowest stage does at the least its part of what the whole model takes.
            let whole = again[0].paces.iter().map(|pace| pace.whole.step.0).fold(f64::INFINITY, f64::min);
            if index == 0 && self.leaves_out(whole / self.stages as f64) {
                return false;
            }
            let fits = self.try_out(candidates, &again, Levels::whole([(0, way)]), Choice::All(0));
            lacks |= fits == Some(false);
            if fits.is_none() && self.pipeline.schedule.splits_backward() {
                self.slow.set(index);
            }
            if index > 0 && fits != Some(false) {
                self.mix(candidates, index);
            }
            (first, last) = (first.or(Some((index, fits))), Some((index, fits)));
            if fits == Some(true) {
                break;
            }
        }
        // Stages that may be cut anywhere may become unequal where those that have whole blocks do not.
        if let (Some(whole), Some(_)) = (&self.again.between_blocks, first) {
            let again = [Rc::new(self.found_again(0, whole))];
            self.try_out(candidates, &again, Levels::whole([(0, Recompute::None)]), Choice::All(0));
        }
        // What fits may do so because its stages are unequal: they are less so where some compute more again.
        if let Some((index, Some(true))) = last
            && index + 1 < ways.len()
            && !self.is_far(index)
        {
            self.mix(candidates, ways.len() - 1);
        }
        if !self.mesh.away.is_open {
            return lacks;
        }
        // Where something would have to be computed again values may leave instead; where that does not do, as well.
        let unfit = [first, last.filter(|last| Some(*last) != first)].into_iter().flatten();
        for (index, _) in unfit.filter(|(_, fits)| *fits != Some(true)) {
            self.leave(candidates, index);
        }
        lacks
    }

    /// Adds the pipeline in which each stage computes again the least that it must, up to one of the ways.
    fn mix(&self, candidates: &mut Vec<Candidate>, most: usize) {
        let agains = self.mixed(most);
        self.try_out(candidates, &agains, self.levels(&agains), Choice::Least);
    }

    /// Adds pipelines of which values leave the devices, where as much may be computed again.
    fn leave(&self, candidates: &mut Vec<Candidate>, most: usize) {
        let agains = self.mixed(most);
        let ladders = longest(self.again.ways[most] != Recompute::None, self.may_leave);
        let levels = self.levels(&agains).and_away(&ladders, self.model.blocks);
        // Where nothing fits, what lacks the least says by how much.
        if self.mesh.with_unfit {
            let all = levels.most();
            self.try_out(candidates, &agains, levels, Choice::All(all));
        } else {
            self.try_out(candidates, &agains, levels, Choice::Least);
        }
    }
}
