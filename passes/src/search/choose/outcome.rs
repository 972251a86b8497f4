//! What a search reports: the runners-up and why they lost, or why nothing fits and what would help.

use super::overstated::Refused;
use super::undivided::{OTHER_RANKS, Undivided};
use crate::cluster::DeviceKind;
use crate::search::candidate::{Candidate, kin};
use crate::search::choice::degrees::Degrees;
use crate::search::choice::pins::Pins;
use crate::search::error::PlanError;
use crate::search::space::{Pipelines, Space};
use shardc_ir::plan::{Alternative, Memory, Prediction, Scope};
use shardc_ir::units::counted;
use shardc_ir::{Bytes, Family, Feature, Plan, Seconds};

/// What a pipeline may be pinned to, for which values are not chosen one by one.
const LEANER: &str = "pin recompute=selective or recompute=block, or more loss_chunks";

/// The share of another plan's step that one takes at the most which is called faster.
const FASTER: f64 = 0.999;

/// What a wider search would also try, and what of it does not run yet.
fn wider(space: &Space<'_, '_>, is_staged: bool) -> Option<String> {
    let (target, has_device) = (space.prepared.target, space.cluster.device.kind != DeviceKind::Cpu);
    let open = [(Feature::Pipeline, "pipelines", !is_staged), (Feature::Offload, "offload", has_device)];
    let open: Vec<_> = open.into_iter().filter(|(_, _, is_new)| *is_new).collect();
    let names = |all: &[&str]| (!all.is_empty()).then(|| all.join(" or "));
    let tried = names(&open.iter().map(|(_, name, _)| *name).collect::<Vec<_>>())?;
    let unrun = open.iter().filter(|(feature, ..)| !target.runs(*feature)).map(|(_, name, _)| *name);
    let unrun =
        names(&unrun.collect::<Vec<_>>()).map_or(String::new(), |names| format!("; `train` does not run {names} yet"));
    Some(format!("see by --search all whether {tried} would fit{unrun}"))
}

/// Runners-up that are told of.
const TOLD: usize = 12;

/// What came of the candidates. Those that were lowered have their exact predictions.
pub(in crate::search) struct Told<'a> {
    pub candidates: &'a [Candidate],
    pub chosen: usize,
    /// Those that fit.
    pub lowered: &'a [(usize, Prediction)],
    /// Those that do not.
    pub refused: &'a Refused,
}

impl Told<'_> {
    /// What a plan takes by its programs, if it was lowered.
    fn exact(&self, index: usize) -> Option<&Prediction> {
        self.lowered.iter().chain(self.refused).find(|(other, _)| *other == index).map(|(_, exact)| exact)
    }

    /// How many plans are faster or leaner by their estimates and do not fit when lowered; and how many are faster,
    /// do not fit by their estimates, and were not lowered.
    pub(in crate::search) fn left_out(&self) -> (u64, u64) {
        let step = self.candidates[self.chosen].prediction.step.0;
        let is_untried = |(index, of): &(usize, &Candidate)| {
            of.prediction.step.0 < FASTER * step && !of.prediction.fits() && self.exact(*index).is_none()
        };
        let fit = |of: &&(usize, Prediction)| self.candidates[of.0].prediction.fits();
        let refused = self.refused.iter().filter(fit).count() as u64;
        (refused, self.candidates.iter().enumerate().filter(is_untried).count() as u64)
    }

    /// What estimates are compared with, and by what their steps are scaled. What the estimate does not see of the
    /// winner it does not see of its like either, so that is what the winner's exact step is of its own estimate; but
    /// what chunks hide is the winner's alone, since plans that were not lowered are in none. Casts they would keep
    /// too.
    fn measure(&self) -> (&Prediction, f64) {
        let winner = &self.candidates[self.chosen];
        let (estimated, exact) = (&winner.prediction, self.exact(self.chosen).unwrap_or(&winner.prediction));
        if winner.overlap_chunks > 1 { (exact, 1.0) } else { (estimated, exact.step.0 / estimated.step.0) }
    }

    /// Why a plan lost that was not lowered.
    fn estimated(&self, index: usize) -> String {
        let (candidate, (winner, scale)) = (&self.candidates[index], self.measure());
        let own = &candidate.prediction;
        if !own.fits() {
            return format!("estimated: {}", needs(own));
        }
        if own.step.0 >= FASTER * winner.step.0 {
            return format!("estimated: {}", slower(own, winner));
        }
        // It looks faster. Those like it that were lowered say why it was not.
        let known = || self.lowered.iter().chain(self.refused).map(|(index, exact)| (&self.candidates[*index], exact));
        let excess = known()
            .filter(|(of, _)| kin(of) == kin(candidate))
            .map(|(of, exact)| exact.filled() / of.prediction.filled().max(f64::MIN_POSITIVE));
        let excess = excess.fold(1.0, f64::max);
        let expected = Bytes((own.memory.total().0 as f64 * excess) as u64);
        if expected > own.room {
            let ((data, zero), bound) = (kin(candidate), own.room);
            return format!(
                "estimated faster; programs of dp={data},zero={zero} need {excess:.2} times what is estimated, so {expected} \
                 of {bound}"
            );
        }
        let same = known().find(|(of, _)| of.degrees == candidate.degrees);
        let longest = known().max_by(|(a, exact), (b, other)| {
            (exact.step.0 / a.prediction.step.0).total_cmp(&(other.step.0 / b.prediction.step.0))
        });
        match same.or(longest) {
            Some((of, exact)) if exact.step.0 > of.prediction.step.0 * scale => {
                let (choice, estimate) = (of.choice(), of.prediction.step);
                format!(
                    "estimated faster; of its like {choice} takes {} instead of {estimate} when lowered",
                    exact.step
                )
            }
            _ => "estimated faster, by less than estimates are off".to_string(),
        }
    }
}

/// The runners-up, fastest first, and why each lost. Those that were not lowered are said to be estimated, by the
/// [measure](Told::measure) of the winner.
pub(in crate::search) fn alternatives(told: &Told<'_>) -> Vec<Alternative> {
    let Told { candidates, chosen, lowered, refused } = *told;
    let winner = told.exact(chosen).unwrap_or(&candidates[chosen].prediction);
    let (_, scale) = told.measure();
    let mut seen = vec![candidates[chosen].choice()];
    let (mut list, mut unfit) = (Vec::new(), 0);
    let known = lowered.iter().chain(refused).map(|of| of.0);
    for index in known.chain(0..candidates.len()) {
        let (candidate, exact) = (&candidates[index], told.exact(index));
        let choice = candidate.choice();
        if seen.contains(&choice) {
            continue;
        }
        seen.push(choice.clone());
        let known = exact.unwrap_or(&candidate.prediction);
        // The fastest that do not fit say what memory costs; more of them say no more.
        unfit += u64::from(!known.fits());
        if !known.fits() && unfit > 4 {
            continue;
        }
        let (step, reason) = match exact {
            Some(exact) if !exact.fits() => (exact.step, needs(exact)),
            Some(exact) => (exact.step, slower(exact, winner)),
            None => (candidate.prediction.step * scale, told.estimated(index)),
        };
        list.push(Alternative { choice, step, memory: known.memory.total(), reason });
        if list.len() == TOLD {
            break;
        }
    }
    list.sort_by(|a, b| a.step.0.total_cmp(&b.step.0));
    list
}

fn needs(prediction: &Prediction) -> String {
    let (name, bytes) = largest(&prediction.memory);
    format!("needs {} of {} ({name} {bytes})", prediction.memory.total(), prediction.room)
}

/// By how much a plan is slower, and what makes it so.
fn slower(prediction: &Prediction, winner: &Prediction) -> String {
    let percent = 100.0 * (prediction.step.0 / winner.step.0 - 1.0);
    let parts = [
        ("communication", prediction.exposed_communication, winner.exposed_communication),
        ("matmuls", prediction.matmul, winner.matmul),
        ("memory traffic and launches", prediction.memory_bound, winner.memory_bound),
        ("the update", prediction.optimizer, winner.optimizer),
        ("waits between stages", prediction.bubble, winner.bubble),
    ];
    let worst = parts.iter().max_by(|a, b| (a.1.0 - a.2.0).total_cmp(&(b.1.0 - b.2.0)));
    match worst {
        Some((name, own, best)) if own.0 > best.0 => {
            format!("{percent:.1}% slower: {} more in {name}", Seconds(own.0 - best.0))
        }
        _ => "as fast, and less simple".to_string(),
    }
}

/// Adds a plan that lost to the runners-up of another; of one that was not lowered, `estimated` says so.
pub(in crate::search) fn add_runner_up(plan: &mut Plan, choice: String, lost: &Prediction, estimated: &str) {
    let is_faster = !estimated.is_empty() && lost.step.0 < FASTER * plan.prediction.step.0;
    let reason = match is_faster {
        true => "estimated faster; by its programs, or those of its like, it does not fit or is not".to_string(),
        false => format!("{estimated}{}", slower(lost, &plan.prediction)),
    };
    plan.alternatives.truncate(TOLD - 1);
    plan.alternatives.push(Alternative { choice, step: lost.step, memory: lost.memory.total(), reason });
    plan.alternatives.sort_by(|a, b| a.step.0.total_cmp(&b.step.0));
}

fn parts(memory: &Memory) -> [(&'static str, Bytes); 5] {
    [
        ("parameters", memory.parameters),
        ("gradients", memory.gradients),
        ("optimizer", memory.optimizer),
        ("activations", memory.activations),
        ("buffers", memory.buffers),
    ]
}

pub(in crate::search) fn breakdown(memory: &Memory) -> String {
    parts(memory).map(|(name, bytes)| format!("{name} {bytes}")).join(", ")
}

fn largest(memory: &Memory) -> (&'static str, Bytes) {
    parts(memory).into_iter().max_by_key(|(_, bytes)| *bytes).unwrap_or_default()
}

/// Why a search ended, after plans were left out that are faster by their estimates ([`Told::left_out`]).
pub(in crate::search) fn stopped(space: &Space<'_, '_>, is_proven: bool, left_out: (u64, u64)) -> String {
    match left_out {
        (0, untried) if is_proven => {
            let of = if untried == 0 { "its space" } else { "those whose estimates fit" };
            let is_free = space.prepared.head.is_some() && space.pins.loss_chunks.is_none();
            let head = if is_free { ", in which the head is cut by its tokens" } else { "" };
            let is_staged = space.line.is_some() && space.pins.zero.is_none();
            let stages = if is_staged { ", in which stages do not divide their gradients" } else { "" };
            format!("it is the best of {of}{head}{stages}")
        }
        (0, _) => "every mesh was solved, or left out as too slow".to_string(),
        (refused, _) => {
            let (plans, do_not) =
                if refused == 1 { ("plan that is", "does not") } else { ("plans that are", "do not") };
            format!("{refused} {plans} faster or leaner by estimates {do_not} fit when lowered")
        }
    }
}

/// Why nothing fits, told of the plan that needs the least memory: of those that were lowered, or if none was, by estimate.
pub(in crate::search) fn infeasible(candidates: &[Candidate], refused: &Refused, space: &Space<'_, '_>) -> PlanError {
    let Space { cluster, request, pins, .. } = *space;
    // Once programs are known, estimates are not compared with them.
    let known: Vec<(&Candidate, Prediction)> = match refused.is_empty() {
        true => candidates.iter().map(|of| (of, of.prediction)).collect(),
        false => refused.iter().map(|(index, exact)| (&candidates[*index], *exact)).collect(),
    };
    let Some((nearest, exact)) = known.into_iter().min_by(|(_, a), (_, b)| a.filled().total_cmp(&b.filled())) else {
        return PlanError::Bug("no candidate at all".to_string());
    };
    let (needs, bound) = (exact.memory, exact.room);
    // Where ZeRO is not of the nearest, it may be because nothing divides over all ranks.
    let mesh = match nearest.zero {
        0 => Degrees::new(1).with(Family::Data, &[cluster.ranks()]).mesh(cluster.ranks()),
        _ => nearest.mesh(request.batch),
    };
    let undivided = Undivided::of_mesh(space.prepared.graph, &mesh).filter(|_| pins.zero != Some(0));
    let mut breakdown = breakdown(&needs);
    if let Some(undivided) = &undivided {
        breakdown += &format!("; {undivided}");
    }
    // No program tells how far an estimate is off.
    let by = if refused.is_empty() { ", by an estimate" } else { "" };
    let is_shared = cluster.share_of_host() == Some(bound);
    let (share, give) = match is_shared {
        true => {
            let host = cluster.host_memory();
            let (ranks, needed) = (cluster.per_node, cluster.on_host(needs.total()));
            (
                format!(", its share of the host's {host} over {}", counted(ranks, "rank")),
                format!("give the host {}{by}", needed.rounded_up()),
            )
        }
        false => (String::new(), format!("give each rank {}{by}", needs.total().rounded_up())),
    };
    let mut fixes = vec![give];
    fixes.extend(other_fixes(nearest, (largest(&needs).0 == "activations", is_shared), undivided, space));
    PlanError::Infeasible {
        bound,
        share: share.into(),
        pins: if is_pinned(space) { " under these pins" } else { "" }.into(),
        choice: nearest.choice(),
        needed: needs.total(),
        breakdown: breakdown.into(),
        fix: fixes.join(", or "),
    }
}

fn is_pinned(space: &Space<'_, '_>) -> bool {
    *space.pins != Pins::default()
}

/// What would help beside more memory. `nearest` is the plan that needs the least, `is_of_activations` whether most of that
/// is activations, `is_shared` whether what lacks is a share of the host's memory.
fn other_fixes(
    nearest: &Candidate,
    (is_of_activations, is_shared): (bool, bool),
    undivided: Option<Undivided>,
    space: &Space<'_, '_>,
) -> Vec<String> {
    let Space { cluster, request, pins, .. } = *space;
    let mut fixes = Vec::new();
    // Without pins, every way to store parts has been tried on so many ranks.
    fixes.extend(undivided.map(|undivided| if is_pinned(space) { undivided.fix() } else { OTHER_RANKS.to_string() }));
    if is_pinned(space) {
        fixes.push("drop a pin".to_string());
    }
    if is_of_activations && pins.microbatch.is_some_and(|pin| pin > 1) {
        fixes.push("use smaller microbatches".to_string());
    }
    let ranks = cluster.ranks();
    fixes.extend(match (request.seq, request.batch) {
        // More ranks would share the same memory.
        _ if !is_of_activations => (!is_shared).then(|| format!("use more than {}", counted(ranks, "rank"))),
        (0, batch) => Some(format!("use fewer samples than {batch}")),
        (_, 1) => Some("use shorter sequences".to_string()),
        (_, batch) => Some(format!("use shorter sequences or fewer of them than {batch}")),
    });
    if nearest.degrees.data() < ranks && !request.batch.is_multiple_of(ranks) {
        fixes.push(format!("use a batch that is a multiple of {ranks}, for all ranks to be data ranks"));
    }
    if is_of_activations && pins.product(&[Family::Pipeline]) > 1 && pins.recompute.is_none() {
        fixes.push(LEANER.to_string());
    }
    if request.scope == Scope::Runnable && !space.away.is_pinned {
        fixes.extend(wider(space, space.pipelines != Pipelines::Never || pins.fixes(&[Family::Pipeline])));
    }
    if space.away.is_open && nearest.offload.is_none() {
        let host = space.away.room.host;
        fixes.push(format!(
            "give each host more than {host} (--host-memory), which what would leave the devices exceeds"
        ));
    }
    fixes
}
