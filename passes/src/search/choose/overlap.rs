//! Whether communication within the blocks is hidden better if the microbatch is cut into chunks
//! ([`split_batch`](crate::split_batch)).
//!
//! What chunks hide depends on the order of kernels and collectives, and what they lose on kernels of small products
//! and on more launches. So plans in chunks are not estimated. For plans that are lowered anyway, of pipelines the
//! one that promises most, and for the fastest of the others that may gain enough, some numbers of chunks are lowered and simulated as
//! well; of pipelines of [too many](LONG) microbatches only if they are pinned. The estimate and the bound that a
//! search reports are those of whole plans.
//!
//! What chunks hide need not be avoided. So where the bound of a mesh promises more than its plans give, layouts are
//! also found for a wire at a part of its price ([`HIDDEN_WIRE`]), and lowered in chunks.

use crate::cluster::DeviceKind;
use crate::search::candidate::{Candidate, passes};
use crate::search::choice::degrees::Degrees;
use crate::search::choice::pins::{Pins, divides};
use crate::search::error::PlanError;
use crate::search::space::Space;
use crate::shard::objective::Prices;
use shardc_ir::feature::unlowered;
use shardc_ir::{Family, Plan};

/// The numbers of chunks that are tried.
const CHUNKS: [u64; 3] = [2, 4, 8];

/// More chunks are taken if they make the step so much shorter.
const GAIN: f64 = 0.005;

/// The share of the communication within blocks that chunks are thought to hide at the most, before they are tried.
const HIDDEN: f64 = 0.8;

/// The share of it that they usually hide in the stages of a pipeline.
const USUAL: f64 = 0.2;

/// What layouts are found for that are to be in chunks: those with which kernels have less to do are worth more of what
/// chunks hide then.
pub(in crate::search) const HIDDEN_WIRE: Prices = Prices { byte: 0.0, wire: 0.7 };

/// The share of the fastest known step below which the bound of a mesh has to be, if layouts for chunks are to be found on
/// it: they take as long to find as others.
const WORTH: f64 = 0.93;

/// By how many times the share that chunks were found to hide under the same degrees they may hide more in microbatches of
/// another size.
const MORE: f64 = 1.5;

/// Microbatches of all stages together above which programs in chunks are not tried.
const LONG: u64 = 8192;

/// How many plans are tried in chunks that without them are not among the fastest.
const CONTENDERS: usize = 2;

/// The most nodes that a graph in chunks may have, of a plan that is lowered anyway and of another: lowering takes
/// time.
const NODES: [u64; 2] = [32_000, 16_000];

/// The shares of the communication within blocks that chunks were found to hide, by what divides the step.
#[derive(Default)]
pub(in crate::search) struct Hidden(Vec<(Kind, f64)>);

/// What divides a step, whether in stages, and whether layouts are for chunks: beside stages, whose weights are gathered once
/// in a step, it does not matter over how many ranks they are stored.
type Kind = (Degrees, [bool; 2]);

fn kind(candidate: &Candidate) -> Kind {
    let (degrees, is_for_chunks) = (candidate.degrees.clone(), candidate.is_for_chunks());
    match candidate.stages {
        Some(_) => (degrees.with(Family::Data, &[]).with(Family::Fsdp, &[]), [true, is_for_chunks]),
        None => (degrees, [false, is_for_chunks]),
    }
}

impl Hidden {
    /// What a candidate takes at the least in chunks, of `alone` seconds without.
    fn least(&self, candidate: &Candidate, alone: f64) -> f64 {
        let own = kind(candidate);
        let alike = self.0.iter().filter(|((degrees, of), _)| degrees.divide_like(&own.0) && *of == own.1);
        let share = alike.map(|(_, share)| MORE * share).fold(HIDDEN, f64::min);
        alone - share * candidate.within
    }

    /// Learns from a candidate that takes `least` seconds in chunks, of `alone` without.
    fn learn(&mut self, candidate: &Candidate, [least, alone]: [f64; 2]) {
        if least.is_finite() {
            self.0.push((kind(candidate), (alone - least).max(0.0) / candidate.within));
        }
    }

    /// Whether a plan of a candidate, which takes `alone` seconds without chunks, may be faster in chunks than `step`
    /// seconds, and that can be found out in time.
    fn may_gain(&self, candidate: &Candidate, alone: f64, space: &Space<'_, '_>, step: f64) -> bool {
        may_hide(candidate, alone, space) && !is_long(candidate, space) && self.least(candidate, alone) < step
    }
}

/// Whether chunks are left to the search and have something to hide of a candidate that takes `alone` seconds. Ranks that
/// are threads of one process run nothing beside anything.
fn may_hide(candidate: &Candidate, alone: f64, space: &Space<'_, '_>) -> bool {
    // Where chunks are pinned, layouts for them are left to the search.
    let is_open = space.pins.overlap_chunks.is_none_or(|pin| pin > 1 && candidate.is_for_chunks());
    is_open
        && space.cluster.device.kind != DeviceKind::Cpu
        && candidate.offload.is_none()
        && candidate.within > GAIN * alone
}

/// Whether layouts for chunks are worth to be found on a mesh with such candidates: no plan of it takes fewer than `least`
/// seconds, whatever is hidden, and some known one takes `best`.
pub(in crate::search) fn may_need_layouts(
    found: &[Candidate],
    space: &Space<'_, '_>,
    (least, best): (f64, f64),
) -> bool {
    let is_cut = |of: &Candidate| divides(of.degrees.microbatch, space.pins.overlap_chunks.unwrap_or(CHUNKS[0]));
    let is_open = space.pins.overlap_chunks != Some(1) && space.cluster.device.kind != DeviceKind::Cpu;
    let may_gain = least < WORTH * best && NODES[1] / nodes(space) >= CHUNKS[0];
    is_open && may_gain && found.iter().any(is_cut)
}

/// What there is to say of a plan that was not tried in chunks though they may hide something.
pub(in crate::search) fn untried(candidate: &Candidate, space: &Space<'_, '_>) -> &'static str {
    match may_hide(candidate, candidate.prediction.step.0, space) && is_long(candidate, space) {
        true => {
            "; steps of so many microbatches in chunks that overlap take seconds to predict: pin overlap_chunks=2 to try"
        }
        false => "",
    }
}

/// A lowered plan of a candidate or, where that is faster and fits, one of it in chunks, and in how many. `best` is what
/// the fastest plan takes, in seconds, and `known` are others that were tried, and in how many chunks they are: those of
/// the same degrees, which differ in what is computed again, tell of how many. `make` builds a candidate and predicts it
/// by its programs; `hidden` is what was learnt.
///
/// # Errors
/// Those of `make`; that a plan cannot be cut is none.
pub(in crate::search) fn in_chunks<'a>(
    candidate: &Candidate,
    plan: Plan,
    space: &Space<'_, '_>,
    (best, known, hidden): (f64, impl IntoIterator<Item = &'a Candidate>, &mut Hidden),
    make: &dyn Fn(&Candidate) -> Result<Plan, PlanError>,
) -> Result<(u64, Plan), PlanError> {
    let (own, most) = (plan.prediction.step.0, NODES[0] / nodes(space));
    let mut alike = known.into_iter().filter(|other| other.degrees == candidate.degrees && other.overlap_chunks > 1);
    if !hidden.may_gain(candidate, own, space, best) {
        return Ok((candidate.overlap_chunks, plan));
    }
    let Tried { best, least } = tried(candidate, own, (alike.next().map(|other| other.overlap_chunks), most), make)?;
    hidden.learn(candidate, [least, own]);
    Ok(best.unwrap_or((candidate.overlap_chunks, plan)))
}

/// Tries the pipeline in chunks that is likely the fastest in them ([`usual`]), if it may become the fastest plan.
///
/// # Errors
/// Those of `make`.
pub(in crate::search) fn of_pipelines(
    candidates: &mut [Candidate],
    lowered: &mut Vec<(usize, Plan)>,
    space: &Space<'_, '_>,
    hidden: &mut Hidden,
    make: &dyn Fn(&Candidate) -> Result<Plan, PlanError>,
) -> Result<(), PlanError> {
    let step = |at: usize| lowered[at].1.prediction.step.0;
    let least = (0..lowered.len()).map(step).fold(f64::INFINITY, f64::min);
    let may_gain = |at: &usize| {
        let candidate = &candidates[lowered[*at].0];
        candidate.stages.is_some() && hidden.may_gain(candidate, step(*at), space, least)
    };
    let in_chunks_of = |at: &usize| usual(&candidates[lowered[*at].0], step(*at));
    let likely = (0..lowered.len()).filter(may_gain).min_by(|a, b| in_chunks_of(a).total_cmp(&in_chunks_of(b)));
    if let Some(at) = likely {
        let (index, plan) = lowered.remove(at);
        let own = (least, std::iter::empty(), hidden);
        let (chunks, plan) = in_chunks(&candidates[index], plan, space, own, make)?;
        candidates[index].overlap_chunks = chunks;
        lowered.insert(at, (index, plan));
    }
    Ok(())
}

/// What a candidate usually takes in chunks, of `alone` seconds without.
fn usual(candidate: &Candidate, alone: f64) -> f64 {
    alone - if candidate.stages.is_some() { USUAL * candidate.within } else { 0.0 }
}

/// Whether to predict a plan in chunks takes seconds.
fn is_long(candidate: &Candidate, space: &Space<'_, '_>) -> bool {
    passes(candidate, space.request.batch) > LONG
}

fn nodes(space: &Space<'_, '_>) -> u64 {
    (space.prepared.graph.node_count() as u64).max(1)
}

/// A candidate in chunks.
struct Tried {
    /// The fastest plan, and of how many.
    best: Option<(u64, Plan)>,
    /// Seconds of the fastest one that was lowered, if any was.
    least: f64,
}

/// The fastest plan of a candidate in chunks, of just so many or of any number up to another, that takes less than `step`
/// seconds and fits.
fn tried(
    candidate: &Candidate,
    mut step: f64,
    (just, most): (Option<u64>, u64),
    make: &dyn Fn(&Candidate) -> Result<Plan, PlanError>,
) -> Result<Tried, PlanError> {
    let mut all = Tried { best: None, least: f64::INFINITY };
    let microbatch = candidate.degrees.microbatch;
    let is_open = |chunks: &u64| *chunks <= most && divides(microbatch, *chunks);
    let is_new = |chunks: &u64| *chunks > candidate.overlap_chunks || candidate.is_for_chunks();
    let numbers = just.map_or(CHUNKS.to_vec(), |just| vec![just]);
    for overlap_chunks in numbers.into_iter().filter(is_new).filter(is_open) {
        let plan = match make(&Candidate { overlap_chunks, ..candidate.clone() }) {
            Ok(plan) => plan,
            Err(PlanError::Pin { .. }) => break,
            Err(error) => return Err(error),
        };
        // Estimates do not see chunks.
        if !unlowered(&plan).is_empty() {
            break;
        }
        all.least = all.least.min(plan.prediction.step.0);
        if plan.prediction.step.0 > (1.0 - GAIN) * step || !plan.prediction.fits() {
            break;
        }
        step = plan.prediction.step.0;
        all.best = Some((overlap_chunks, plan));
    }
    Ok(all)
}

/// What of the others becomes faster in chunks than the best plan that is lowered, of `step` seconds: those that may
/// gain most are tried, one of each mesh. Gives the candidates, their chunks, their plans.
///
/// # Errors
/// Those of `make`.
pub(in crate::search) fn contenders(
    candidates: &[Candidate],
    known: &[usize],
    space: &Space<'_, '_>,
    (mut step, hidden): (f64, &mut Hidden),
    make: &dyn Fn(&Candidate) -> Result<Plan, PlanError>,
) -> Result<Vec<(usize, u64, Plan)>, PlanError> {
    let most = NODES[1] / nodes(space);
    let mut found: Vec<(usize, u64, Plan)> = Vec::new();
    let mut meshes: Vec<&Degrees> = Vec::new();
    while meshes.len() < CONTENDERS {
        let Some(index) = contender(candidates, known, (&meshes, hidden), space, step) else { break };
        let candidate = &candidates[index];
        meshes.push(&candidate.degrees);
        let Tried { best, least } = tried(candidate, step, (space.pins.overlap_chunks, most), make)?;
        hidden.learn(candidate, [least, candidate.prediction.step.0]);
        if let Some((chunks, plan)) = best {
            step = plan.prediction.step.0;
            found.push((index, chunks, plan));
        }
    }
    Ok(found)
}

/// The candidate that may gain most in chunks of those that are neither known nor of these meshes, by what is hidden.
fn contender(
    candidates: &[Candidate],
    known: &[usize],
    (meshes, hidden): (&[&Degrees], &Hidden),
    space: &Space<'_, '_>,
    step: f64,
) -> Option<usize> {
    let least = |of: &Candidate| hidden.least(of, of.prediction.step.0);
    let is_open = |(index, of): &(usize, &Candidate)| {
        let is_new = !known.contains(index) && !meshes.contains(&&of.degrees);
        is_new && of.prediction.fits() && hidden.may_gain(of, of.prediction.step.0, space, step)
    };
    let open = candidates.iter().enumerate().filter(is_open).filter(|_| NODES[1] / nodes(space) >= CHUNKS[0]);
    open.min_by(|a, b| least(a.1).total_cmp(&least(b.1))).map(|(index, _)| index)
}

/// What is likely the first candidate to be tried in chunks, if those that are known, the fastest first, take what is
/// estimated.
pub(in crate::search) fn likely(candidates: &[Candidate], known: &[usize], space: &Space<'_, '_>) -> Option<Candidate> {
    let step = |index: &usize| candidates[*index].prediction.step.0;
    let fastest = step(known.first()?);
    let hidden = &Hidden::default();
    let may_gain = |index: &usize| hidden.may_gain(&candidates[*index], step(index), space, fastest);
    let in_chunks_of = |index: &usize| usual(&candidates[*index], step(index));
    let open = known.iter().copied().filter(may_gain);
    let own = open.min_by(|a, b| in_chunks_of(a).total_cmp(&in_chunks_of(b)));
    let index = own.or_else(|| contender(candidates, known, (&[], hidden), space, fastest))?;
    let overlap_chunks = CHUNKS.into_iter().find(|chunks| *chunks > candidates[index].overlap_chunks)?;
    let in_chunks = Candidate { overlap_chunks, ..candidates[index].clone() };
    divides(in_chunks.degrees.microbatch, overlap_chunks).then_some(in_chunks)
}

/// Whether a plan's graph is in chunks: it is that of one mesh then, and its sums are not those of whole nodes.
pub fn is_in_chunks(plan: &Plan) -> bool {
    Pins::chosen(plan).overlap_chunks.is_some_and(|chunks| chunks > 1)
}
