//! The schedules and stages of ZeRO that are tried, and why pins leave none.

use super::Mesh;
use super::line::Line;
use crate::divisors::divisors;
use crate::pipeline::rhythm::{held_in_turns, is_in_turns};
use crate::pipeline::zero_bubble::{CLOSE, kept_for_the_way_up};
use crate::search::bound::stages::Order;
use crate::search::choice::degrees::Degrees;
use crate::search::choice::pins::{Pins, Recompute};
use crate::search::choice::stages::{Limits, MOST_ZERO};
use crate::search::error::PlanError;
use crate::shard::family::copy_axes;
use shardc_ir::pipeline::Schedule;
use shardc_ir::{Family, Graph, NodeId, Pipeline};

/// The schedules that pins leave open, with the chunks of a stage. GPipe has the bubble of 1F1B and more memory,
/// so it is taken where it is pinned.
pub(in crate::search) fn schedules(pins: &Pins) -> Vec<(Schedule, u64)> {
    let chunks = |schedule: Schedule| schedule.usual_chunks().iter().map(move |chunks| (schedule, *chunks));
    let mut open: Vec<(Schedule, u64)> = Schedule::ALL
        .into_iter()
        .flat_map(chunks)
        .filter(|(schedule, per_stage)| {
            let is_named = pins.schedule.map_or(*schedule != Schedule::GPipe, |pin| pin == *schedule);
            let may_hold = pins.in_flight.is_none_or(|chunks| schedule.check_in_flight(chunks).is_ok());
            let may_delay = pins.delayed.is_none_or(|chunks| schedule.check_delayed(chunks).is_ok());
            is_named && may_hold && may_delay && pins.virtual_stages.is_none_or(|pin| pin == *per_stage)
        })
        .collect();
    if let Some(per_stage) = pins.virtual_stages.filter(|pin| *pin > 1 && pins.schedule != Some(Schedule::ZeroBubbleV))
        && !open.contains(&(Schedule::Interleaved, per_stage))
    {
        open.push((Schedule::Interleaved, per_stage));
    }
    open
}

/// The stages of ZeRO that are tried in pipelines whose parameters are stored in one way, where data ranks may hold copies.
pub(in crate::search) fn zero_stages(has_copies: bool, degrees: &Degrees, pins: &Pins) -> Vec<u64> {
    let is_kept = |zero: u64| match degrees.degree(Family::Fsdp) > 1 {
        true => zero == MOST_ZERO,
        false => zero == 0 || (zero == MOST_ZERO && has_copies),
    };
    (0..=3).filter(|zero| pins.zero.map_or(is_kept(*zero), |pin| pin == *zero)).collect()
}

/// A ZeRO stage above [`MOST_ZERO`] is tried where the closed form of a step without stages takes this share with it.
const WORTH: f64 = 0.998;

/// For each way to store parameters, the stages of ZeRO that are tried: those of [`zero_stages`], and one that reduces
/// gradients in every microbatch where that takes less, since what is added up is large beside the wire.
pub(super) fn zeros(mesh: &Mesh<'_>, pins: &Pins) -> Vec<Vec<u64>> {
    let has_copies = !copy_axes(mesh.placed.mesh).is_empty();
    let of = |(storage, degrees): (usize, &Degrees)| {
        let shape = &mesh.seen[0][0].shape;
        let takes = |zero: u64| shape.predict(mesh.placed, storage, zero, Recompute::None, mesh.work).step.0;
        let mut zeros = zero_stages(has_copies, degrees, pins);
        if pins.zero.is_none() && has_copies && takes(MOST_ZERO + 1) < WORTH * takes(MOST_ZERO) {
            zeros.push(MOST_ZERO + 1);
        }
        zeros
    };
    mesh.degrees.iter().enumerate().map(of).collect()
}

/// Of a microbatch in a stage, the least that is its forward pass, where much is computed again in the backward pass.
const FORWARD: f64 = 0.25;

/// What is known of the orders of the schedules that pins leave open.
pub(in crate::search) fn orders(pins: &Pins) -> Vec<Order> {
    let all = schedules(pins);
    let of = |splits: bool| {
        let alike = all.iter().filter(move |(schedule, _)| schedule.splits_backward() == splits);
        let most = alike.map(|(_, per_stage)| *per_stage).max()?;
        // Where backward passes are split there may be something else to do, but before the first forward pass has come.
        Some(Order { waits: if splits { FORWARD } else { 1.0 } / most as f64, splits_backward: splits })
    };
    [false, true].into_iter().filter_map(of).collect()
}

/// With so many microbatches for each stage little time of a step goes to filling and draining. With fewer, different
/// numbers of gradients of weights are delayed, which decides how much of that is saved.
pub(in crate::search) const MANY: u64 = 4;

/// The limits of a schedule, in the order in which they are tried: for each number of chunks in flight, those that are
/// delayed, from the most to the least.
pub(in crate::search) fn limits(
    (schedule, per_stage): (Schedule, u64),
    (stages, microbatches): (u64, u64),
    pins: &Pins,
) -> Vec<Vec<Limits>> {
    let all = in_flight((schedule, per_stage), (stages, microbatches), pins);
    let delayed = |in_flight: Option<u64>| {
        let most = in_flight.unwrap_or(2 * stages);
        let delayed = match pins.delayed {
            Some(_) => vec![pins.delayed],
            None if !schedule.splits_backward() => vec![None],
            // Where less has its turns there is hardly any time that more would fill.
            None if in_flight.is_some_and(|held| held < 2 * stages && is_in_turns(held, (stages, microbatches))) => {
                vec![Some(CLOSE)]
            }
            None if microbatches < MANY * stages => vec![None, Some((most / 4).max(CLOSE)), Some(CLOSE)],
            // Where memory lacks, what they wait for may be worth more than what they fill.
            None => vec![None, Some(CLOSE)],
        };
        delayed.into_iter().map(|delayed| Limits { in_flight, delayed }).collect()
    };
    all.into_iter().map(delayed).collect()
}

/// Of how many chunks a stage of a schedule may hold what forward passes leave.
fn in_flight(
    (schedule, per_stage): (Schedule, u64),
    (stages, microbatches): (u64, u64),
    pins: &Pins,
) -> Vec<Option<u64>> {
    let pipeline = Pipeline { schedule, per_stage, in_flight: pins.in_flight, ..Pipeline::default() };
    if pins.in_flight.is_some() {
        let may_hold = pipeline.check_held(stages, microbatches).is_ok();
        return may_hold.then_some(pins.in_flight).into_iter().collect();
    }
    match schedule {
        Schedule::GPipe => vec![None],
        // The least, then what two forward passes hold for each stage behind the first.
        Schedule::OneForwardOneBackward => vec![None, Some(2 * stages - 1)],
        // As microbatches come; as much as 1F1B holds, three quarters of that, and half of it.
        Schedule::ZeroBubbleV => {
            let kept = kept_for_the_way_up(stages);
            let [most, half] = match held_in_turns(stages) {
                held if held.iter().all(|held| is_in_turns(*held, (stages, microbatches))) => held,
                _ => [2 * stages + kept, stages + (stages / 4).min(2) + kept],
            };
            let mut all = vec![None, Some(most), Some((3 * stages).div_ceil(2) + kept), Some(half)];
            all.dedup();
            all
        }
        // The least, then what half as many rounds hold, in which messages may take longer.
        Schedule::Interleaved => {
            let all = pipeline.rounds(stages, microbatches);
            let half = Some(pipeline.held_in_rounds(stages, microbatches, all.div_ceil(2)));
            if all > 1 { vec![None, half] } else { vec![None] }
        }
    }
}

/// That what a rank has of the batch is one microbatch, since this node's result is needed as it is for all samples.
pub(in crate::search) fn coupled(graph: &Graph, id: NodeId) -> String {
    let node = graph.node(id);
    let place = if node.path.is_empty() { String::new() } else { format!(" of `{}`", node.path) };
    let made = node.results.first().map_or(id.to_string(), ToString::to_string);
    format!(
        "samples of the batch depend on each other, so what a rank has of it is one microbatch: {made} (of {}{place}) \
         is needed for all of them at once (statistics over a batch, terms of the loss with counts of their own, \
         places at experts, numbers drawn, counted or given along it); a count of what the labels say can be an \
         input instead",
        node.op.name()
    )
}

/// Why pins leave no pipeline at all, of so many ranks and samples; `coupled` says what makes samples depend on each
/// other, if anything does.
pub(in crate::search) fn none(
    pins: &Pins,
    line: Option<&Line>,
    (ranks, batch): (u64, u64),
    coupled: Option<String>,
) -> PlanError {
    let stages = pins.degree(Family::Pipeline).unwrap_or(2);
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
    if let Some(coupled) = coupled {
        return fail(named, format!("{coupled}; and a pipeline takes at least 2 microbatches; leave it out"));
    }
    // Of the data ranks that the other pins leave, the fewest give each the most microbatches.
    let fixed = pins.product(&[&[Family::Tensor][..], &Family::CONTEXT].concat()).saturating_mul(stages);
    let data = match (pins.fixes(&[Family::Data]), pins.fixes(&[Family::Tensor])) {
        (false, true) => (ranks / fixed).max(1),
        _ => pins.product(&Family::DATA),
    };
    let per_rank = batch / data.max(1);
    let is_pinned = |size: &u64| pins.microbatch.is_none_or(|pin| pin == *size);
    let mut counts = divisors(per_rank).into_iter().filter(is_pinned).map(|size| per_rank / size);
    if let Some(microbatches) = counts.find(|count| *count >= 2) {
        let in_flight = pins.in_flight;
        let mut open = schedules(pins);
        open.dedup_by_key(|(schedule, _)| *schedule);
        let held = open.into_iter().map(|(schedule, per_stage)| {
            let pipeline = Pipeline { schedule, per_stage, in_flight, ..Pipeline::default() };
            pipeline.check_held(stages, microbatches).err()
        });
        if let Some(messages) = held.collect::<Option<Vec<_>>>().filter(|messages| !messages.is_empty()) {
            return fail(format!("in_flight={}", in_flight.unwrap_or_default()), messages.join("; "));
        }
        let message =
            format!("the step cannot be cut into {chunks} chunks where little passes between them; pin fewer");
        return fail(named, message);
    }
    let has = match pins.microbatch {
        Some(size) => format!("are {} of {size}", per_rank / size),
        None => format!("are {per_rank} sequences at the most"),
    };
    let message = format!(
        "a pipeline takes at least 2 microbatches on each data rank, and of a batch of {batch} over {data} data ranks \
         there {has}; use a larger batch, smaller microbatches or fewer data ranks"
    );
    fail(pins.microbatch.map_or(named, |size| format!("microbatch={size}")), message)
}
