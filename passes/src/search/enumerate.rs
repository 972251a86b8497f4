//! Every candidate that pins allow, by way to divide the ranks.
//!
//! The best plan so far tells which meshes need not be solved. So ways are visited in order, in lots of growing size: the
//! first way alone, then two, four and so on. The ways of a lot run in parallel, as do the schedules of one mesh, on one
//! thread pool ([`threads`](crate::threads)). Lots are the same on every machine, and a way learns only from the lots
//! before its own, so the number of threads changes no candidate.

use super::away::{Away, Room};
use super::candidate::Candidate;
use super::choice::degrees::Degrees;
use super::choice::pins::{Pins, divides};
use super::error::PlanError;
use super::measure::is_near;
use super::placed::{self, place_batch};
use super::space::{Point, Space};
use super::stages::schedules;
use super::visit::Visited;
use super::ways::{Way, ways};
use super::work::model_work;
use super::{stages, whole};
use crate::divisors::divisors;
use crate::threads;
use shardc_ir::plan::Prediction;
use shardc_ir::{Bytes, NodeId};
use std::cmp::Reverse;
use std::time::Instant;

/// The most microbatches of a step: programs list each of them, and nobody sums up more.
const MOST_SEARCHED: u64 = 1 << 16;

/// A room that everything fits in.
const ROOMY: Bytes = Bytes(u64::MAX);

/// The most ways of a lot.
const LOT: usize = 32;

/// What came of some ways.
#[derive(Debug, Default)]
struct Found {
    candidates: Vec<Candidate>,
    /// A node that does not let the batch be divided, if there was one.
    coupled: Option<NodeId>,
    /// Whether some were left out because their head is not cut as is pinned.
    drops_chunks: bool,
}

/// Every candidate the pins allow.
///
/// # Errors
/// Why there is none.
pub(super) fn enumerate(space: &Space<'_, '_>, visited: &mut Visited) -> Result<Vec<Candidate>, PlanError> {
    let found = found(space, visited)?;
    match found.candidates.is_empty() {
        true => none(space, &found),
        false => Ok(found.candidates),
    }
}

/// Whether a candidate is estimated to take less than so many seconds and to fit.
///
/// # Errors
/// A request that no mesh divides.
pub(super) fn any_below(space: &Space<'_, '_>, memory: Bytes, seconds: f64) -> Result<bool, PlanError> {
    let found = found(space, &mut Visited::within(memory, seconds))?;
    Ok(found.candidates.iter().any(|of| of.prediction.fits() && of.prediction.step.0 < seconds))
}

/// What comes of all ways to divide the ranks.
fn found(space: &Space<'_, '_>, visited: &mut Visited) -> Result<Found, PlanError> {
    let Space { prepared, line, cluster, request, pins, .. } = *space;
    let ways = ways(prepared, line.map_or(1..=1, |line| 2..=line.most()), cluster, request, pins)?;
    let (mut found, mut rest) = (Found::default(), &ways[..]);
    let mut size = 1;
    while !rest.is_empty() {
        let (lot, others) = rest.split_at(size.min(rest.len()));
        for (of, own) in of_lot(space, lot, visited) {
            let of = of?;
            visited.join(own);
            found.candidates.extend(of.candidates);
            found.coupled = found.coupled.or(of.coupled);
            found.drops_chunks |= of.drops_chunks;
        }
        (rest, size) = (others, LOT.min(2 * size));
    }
    Ok(found)
}

/// What comes of each way of a lot, and what is then known of its meshes.
fn of_lot(space: &Space<'_, '_>, lot: &[Way], visited: &Visited) -> Vec<(Result<Found, PlanError>, Visited)> {
    let of = |way: &Way| {
        let mut own = visited.fork();
        (of_way(space, way, &mut own), own)
    };
    // Ways of many stages and microbatches take the longest: begun first, they let all threads end at about the same time.
    let mut first: Vec<(usize, &Way)> = lot.iter().enumerate().collect();
    first.sort_by_key(|(index, way)| Reverse((way.pp * (space.request.batch / way.data), *index)));
    let mut found: Vec<_> =
        first.iter().map(|(index, _)| *index).zip(threads::map(&first, |(_, way)| of(way))).collect();
    found.sort_by_key(|(index, _)| *index);
    found.into_iter().map(|(_, found)| found).collect()
}

/// The candidates of one way to divide the ranks.
fn of_way(space: &Space<'_, '_>, way: &Way, visited: &mut Visited) -> Result<Found, PlanError> {
    let Space { prepared, line, cluster, request, pins, mut away, measure, .. } = *space;
    (away.room.device, away.room.share) = (measure.room(cluster.least_room(request.device_memory)), measure.share());
    let (batch, per_rank) = (request.batch, request.batch / way.data);
    let work = model_work(prepared.graph, cluster);
    let mut found = Found::default();
    let is_cut = |size: &u64| divides(*size, pins.overlap_chunks.unwrap_or(1));
    let is_pinned = |size: &u64| pins.microbatch.is_none_or(|pin| pin == *size) && is_cut(size);
    // Stages work beside each other on different microbatches.
    let least = if line.is_some() { 2 } else { 1 };
    let is_kept =
        |size: &u64| (least..=MOST_SEARCHED).contains(&(per_rank / size)) && !way.is_better_as_data(*size, pins);
    let mut larger = Larger::Any;
    for microbatch in divisors(per_rank).into_iter().filter(is_pinned).filter(is_kept) {
        match larger {
            Larger::None => break,
            Larger::Whole if microbatch < per_rank => continue,
            _ => {}
        }
        let mut solved = Vec::new();
        visited.may_fit = false;
        for axes in &way.tp {
            let point = Point { work, away, degrees: way.degrees(microbatch, axes) };
            if space.meshes.is_some_and(|meshes| !point.degrees.iter().any(|degrees| meshes.contains(degrees))) {
                continue;
            }
            let degrees = way.placed(microbatch, axes);
            let mesh = degrees.mesh(batch);
            let Some(placed) = place_batch(prepared, &mesh, cluster)? else {
                found.coupled = found.coupled.or_else(|| placed::coupled(prepared, &mesh));
                continue;
            };
            let began = Instant::now();
            if !visited.opens(space, &placed, &degrees, &point) {
                visited.may_fit = true;
                continue;
            }
            let mut of_mesh = match line {
                Some(line) => stages::solve(space, line, placed, &point, visited),
                None => whole::solve(space, placed, &point, visited),
            };
            found.drops_chunks |= placed::drop_unpinned_chunks(&mut of_mesh, pins);
            visited.add(&of_mesh);
            log(&degrees, &of_mesh, visited.least(), began);
            solved.extend(of_mesh);
        }
        if !solved.is_empty() && !visited.may_fit {
            larger = Larger::than(&solved, per_rank / microbatch);
        }
        found.candidates.extend(solved);
    }
    Ok(found)
}

/// Logs a solved mesh, with the lower bound of its step in seconds.
fn log(degrees: &Degrees, of_mesh: &[Candidate], bound: f64, began: Instant) {
    let least = |of: &dyn Fn(&Prediction) -> bool| {
        let of = of_mesh.iter().map(|candidate| candidate.prediction).filter(of);
        of.map(|of| of.step.0).fold(f64::INFINITY, f64::min)
    };
    tracing::debug!(
        degrees = degrees.text(),
        microbatch = degrees.microbatch,
        bound,
        plans = of_mesh.len(),
        fastest = least(&|_| true),
        fits = least(&Prediction::fits),
        took = began.elapsed().as_secs_f64(),
        "solved"
    );
}

/// Which microbatches may fit that are larger than some that were solved.
enum Larger {
    Any,
    /// That alone which is the whole batch of a rank: no gradients are added up for it. Where samples depend on each
    /// other (statistics of the batch), it is the only one there is.
    Whole,
    None,
}

impl Larger {
    /// Larger ones need more memory: where no candidate is near what fits by its estimate, none of them will fit, but
    /// maybe the whole batch of a rank, which is so many `times` as large.
    fn than(solved: &[Candidate], times: u64) -> Self {
        if solved.iter().any(|candidate| is_near(&candidate.prediction)) {
            return Self::Any;
        }
        // At least half of what lives in a microbatch grows with it.
        let growth = (times as f64 / 2.0).max(1.0);
        let fits_whole = |candidate: &Candidate| {
            let Prediction { memory, room, .. } = &candidate.prediction;
            let rest = memory.total() - memory.gradients - memory.activations;
            Bytes(rest.0 + (growth * memory.activations.0 as f64) as u64) <= *room
        };
        if solved.iter().any(fits_whole) { Self::Whole } else { Self::None }
    }
}

/// Why there is no candidate at all; or those of pipelines that do not fit, to say what they lack.
fn none(space: &Space<'_, '_>, found: &Found) -> Result<Vec<Candidate>, PlanError> {
    let Space { prepared, line, cluster, request, pins, away, with_unfit, measure, .. } = *space;
    let (ranks, batch, room) = (cluster.ranks(), request.batch, cluster.least_room(request.device_memory));
    if found.drops_chunks {
        return Err(placed::uncut_head(pins));
    }
    if pins.opens_stages() && !with_unfit {
        let mut visited = Visited::within(measure.room(room), f64::INFINITY);
        return enumerate(&Space { with_unfit: true, ..*space }, &mut visited);
    }
    // A pin stands in the way where there is something without it.
    if let Some(chunks) = pins.overlap_chunks.filter(|chunks| *chunks > 1)
        && opens(space, &Pins { overlap_chunks: None, ..pins.clone() })
    {
        return Err(undivided(chunks, pins.microbatch, batch));
    }
    if away.is_pinned && opens(space, &Pins { offload: None, stage_offload: Vec::new(), ..pins.clone() }) {
        return Err(too_large(space));
    }
    if pins.opens_stages() {
        let coupled = found.coupled.map(|node| schedules::coupled(prepared.graph, node));
        return Err(schedules::none(pins, line, (ranks, batch), coupled));
    }
    if let (Some(microbatch), Some(node)) = (pins.microbatch, found.coupled) {
        let message = format!(
            "{}; and no data degree on {ranks} ranks leaves {microbatch} of the batch of {batch}; leave it out",
            schedules::coupled(prepared.graph, node)
        );
        return Err(PlanError::Pin { pin: format!("microbatch={microbatch}"), message });
    }
    let least = batch / ranks.saturating_mul(pins.microbatch.unwrap_or(1)).max(1);
    let message = match pins.microbatch {
        Some(microbatch) if least > MOST_SEARCHED => {
            let message = format!(
                "a step has at most {MOST_SEARCHED} microbatches, and this would be {least} or more on each rank; pin \
                 larger ones, or use a smaller batch"
            );
            return Err(PlanError::Pin { pin: format!("microbatch={microbatch}"), message });
        }
        None if least > MOST_SEARCHED => format!(
            "a step has at most {MOST_SEARCHED} microbatches, and this would be {least} or more on each rank; use a \
             smaller batch, or one of more divisors"
        ),
        None | Some(_) if batch.is_multiple_of(ranks.saturating_mul(pins.microbatch.unwrap_or(1))) => {
            let message = "where samples become part of another dimension, as by a reshape behind a transpose, ranks and \
                           microbatches cannot have some of them; keep the batch as a dimension of its own, or pin dp=1";
            return Err(PlanError::Mixed { batch, message: message.to_string() });
        }
        Some(microbatch) => format!("no data degree takes microbatches of {microbatch}; pin another microbatch"),
        None => format!("use a multiple of {ranks}, or more tensor ranks"),
    };
    Err(PlanError::Batch { batch, ranks, message })
}

/// Why no microbatch is cut into so many chunks.
fn undivided(chunks: u64, microbatch: Option<u64>, batch: u64) -> PlanError {
    let message = match microbatch {
        Some(size) => {
            format!("a microbatch of {size} samples does not divide into {chunks} chunks; use a divisor of it")
        }
        None => format!("no microbatch of a batch of {batch} divides into {chunks} chunks; use a divisor of one"),
    };
    PlanError::Pin { pin: format!("overlap_chunks={chunks}"), message }
}

/// Why no candidate keeps what is pinned to lie away: no host has room for it, or it cannot leave.
fn too_large(space: &Space<'_, '_>) -> PlanError {
    let (pinned, bound) = (space.pins.offloads().unwrap_or_default(), space.away.room.host);
    let roomy = Space { away: Away { room: Room { host: ROOMY, ..space.away.room }, ..space.away }, ..*space };
    let visited = &mut Visited::within(space.away.room.device, f64::INFINITY);
    let all = if bound < ROOMY { enumerate(&roomy, visited).unwrap_or_default() } else { Vec::new() };
    if let Some(needed) = all.iter().map(|candidate| candidate.prediction.host).min() {
        return PlanError::Host { pin: pinned.text(), bound, needed };
    }
    let message = match pinned.leaves_gradients() {
        false => "no plan can move that; move something else",
        true => {
            "gradients leave as they are made only where that is a rank's part of their sum: with zero=2 or 3, with \
             zero=1 in one microbatch, or on one rank"
        }
    };
    PlanError::Pin { pin: pinned.text(), message: message.to_string() }
}

/// Whether there are candidates under other pins.
fn opens(space: &Space<'_, '_>, pins: &Pins) -> bool {
    let away = match pins.offloads() {
        None => Away { pin: None, is_pinned: false, ..space.away },
        Some(_) => space.away,
    };
    let visited = &mut Visited::within(away.room.device, f64::INFINITY);
    enumerate(&Space { pins, away, ..*space }, visited).is_ok()
}
