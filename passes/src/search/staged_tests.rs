//! Bounds of pipelines against the plans that the search finds, of models with blocks, in which memory is short.

use super::away::Away;
use super::bound::sharing::{Filling, Sharing};
use super::bound::stages::{InStages, least_fitting_in_stages, least_in_stages};
use super::candidate::Candidate;
use super::choice::degrees::Degrees;
use super::choice::pins::{Pins, Recompute};
use super::enumerate::enumerate;
use super::placed::place_batch;
use super::search;
use super::space::{Pipelines, Space};
use super::stages::line::Line;
use super::stages::schedules::orders;
use super::visit::Visited;
use crate::cluster::Cluster;
use crate::search_tests::{Sizes, llama};
use crate::shard::objective::{Beside, Objective, Pricer};
use crate::shard::prepare::prepare;
use crate::shard::tensor::Prepared;
use shardc_ir::plan::Request;
use shardc_ir::{Bytes, DType, Family, NoScratch};

const MODEL: Sizes = Sizes { layers: 8, batch: 64, seq: 2048, hidden: 1024, heads: 8, kv: 8, ffn: 4096, vocab: 4096 };

/// The most plans of a cluster with some memory whose bounds are looked at.
const MOST: usize = 60;

/// The pipelines of a request.
fn staged<'a, 'b>(
    prepared: &'a Prepared<'b>,
    line: &'a Line,
    cluster: &'a Cluster,
    (request, pins): (&'a Request, &'a Pins),
) -> Space<'a, 'b> {
    Space {
        prepared,
        line: Some(line),
        pipelines: Pipelines::Alone,
        meshes: None,
        cluster,
        others: &[],
        request,
        pins,
        away: Away::default(),
        with_unfit: false,
        moves_cuts: false,
        is_bounded: true,
        measure: Default::default(),
    }
}

/// The seconds of the fastest of candidates that fits.
fn fastest(all: &[Candidate]) -> f64 {
    let fit = all.iter().filter(|of| of.prediction.fits());
    fit.map(|of| of.prediction.step.0).fold(f64::INFINITY, f64::min)
}

/// However little memory there is, and whatever is computed again for it: no plan is estimated to take less than the bounds
/// of its mesh say, of those that take as long as itself.
#[test]
fn no_pipeline_is_below_its_bounds() {
    let graph = llama(MODEL, DType::Bf16);
    let prepared = prepare(&graph, MODEL.batch, &NoScratch);
    let line = Line::new(&prepared);
    let (mut checked, mut again, mut nearest) = (0, 0, f64::INFINITY);
    for (cluster, pins) in [("h100:8", "pp=4"), ("h100:4x4", "pp=4,microbatch=1"), ("h200:8", "pp=8")] {
        let (cluster, pins) = (Cluster::parse(cluster, "h200").unwrap(), Pins::parse(pins).unwrap());
        for memory in [1300u64, 1700, 2300, 4000, 9000].map(|mib| Bytes(mib << 20)) {
            let request = &Request { batch: MODEL.batch, seq: MODEL.seq, device_memory: memory, ..Request::default() };
            let (prepared, cluster, pins) = (&prepared, &cluster, &pins);
            let space = staged(prepared, &line, cluster, (request, pins));
            let Ok(all) = enumerate(&space, &mut Visited::within(memory, f64::INFINITY)) else { continue };
            let fitting: Vec<_> = all.iter().filter(|of| of.prediction.fits()).collect();
            for of in fitting.iter().step_by(fitting.len().div_ceil(MOST).max(1)) {
                let mesh = of.degrees.mesh(MODEL.batch);
                let placed = place_batch(prepared, &mesh, cluster).unwrap().unwrap();
                let free = cluster.rooms(&mesh, memory).iter().map(|room| room.0 as f64).sum();
                let (limit, orders) = (of.prediction.step.0, &orders(pins));
                let asked = InStages { free: Some(free), zero: of.zero, limit, orders };
                let least = least_in_stages(prepared, &placed, &asked);
                let stored = [(mesh.clone(), vec![of.zero])];
                let tight = least_fitting_in_stages(prepared, &placed, &asked, &stored, [least, f64::INFINITY]);
                assert!(tight <= limit * (1.0 + 1e-9), "{tight} after {least} for {limit} of {}", of.choice());
                assert!(least <= tight);
                (checked, nearest) = (checked + 1, f64::min(nearest, limit / tight));
                again += usize::from(of.recompute != Recompute::None);
            }
        }
    }
    assert!(checked > 200 && again > 50, "{checked} plans, {again} of which compute something again");
    assert!(nearest < 1.17, "the nearest bound is {nearest} below its plan");
}

/// What is computed again of a microbatch is so once, however many of them are under way.
#[test]
fn copies_are_computed_again_together() {
    let graph = llama(MODEL, DType::Bf16);
    let prepared = prepare(&graph, MODEL.batch, &NoScratch);
    let cluster = Cluster::parse("h200:4", "h200").unwrap();
    let mesh = Degrees::new(1).with(Family::Pipeline, &[4]).mesh(MODEL.batch);
    let placed = place_batch(&prepared, &mesh, &cluster).unwrap().unwrap();
    let seconds = |rate: f64| -> Vec<f64> {
        let sharing = Sharing::least(&mesh).in_stages(Filling { rate, ..Filling::default() }, 1);
        let objective = Objective::Bound { byte: 0.0, beside: Beside::NONE, sharing };
        let pricer = Pricer::new(&prepared, &placed, objective);
        // At prices at which nothing is kept that need not be, without what is kept all the same.
        let of = |(class, strategy)| {
            let quote = pricer.quote(class, strategy);
            2.0 * quote.at(1e-3) - quote.at(2e-3)
        };
        placed.strategies.iter().enumerate().map(of).collect()
    };
    let (one, many) = (seconds(0.0), seconds(1e4));
    let whole: f64 = one.iter().sum();
    assert!(one.iter().zip(&many).all(|(one, many)| (one - many).abs() < 1e-6 * whole), "{one:?} {many:?}");
}

/// Where messages and memory are no matter, a bound is close to the best pipeline.
#[test]
fn the_bound_of_pipelines_with_room_is_close() {
    let sizes = Sizes { batch: 256, ..MODEL };
    let graph = llama(sizes, DType::Bf16);
    let cluster = Cluster::parse("h200:4", "h200").unwrap();
    let request = Request { batch: sizes.batch, seq: sizes.seq, ..Request::default() };
    let pins = Pins::parse("pp=4").unwrap();
    let plan = search(&graph, &cluster, &request, &pins, &NoScratch).unwrap();
    assert!(plan.search.gap < 0.12, "{}: {:.4}", plan.choice, plan.search.gap);
}

/// Where a step has few microbatches, stages that are equal are not the fastest: cuts are moved as the schedule's run tells.
#[test]
fn few_microbatches_have_stages_of_their_own() {
    let sizes = Sizes { batch: 8, seq: 512, ..MODEL };
    let graph = llama(sizes, DType::Bf16);
    let cluster = Cluster::parse("h200:4", "h200").unwrap();
    let request = Request { batch: sizes.batch, seq: sizes.seq, ..Request::default() };
    let estimate = |pins: &str| {
        let pins = Pins::parse(&format!("pp=4,microbatch=2,{pins}")).unwrap();
        search(&graph, &cluster, &request, &pins, &NoScratch).unwrap().search.estimate.0
    };
    // GPipe's equal stages are left as they are; equal stages of the others take 1.0 and 0.87 times as long.
    let equal = estimate("schedule=gpipe");
    for (pins, most) in [("schedule=1f1b", 0.95), ("schedule=interleaved,virtual=2", 0.845)] {
        let share = estimate(pins) / equal;
        assert!(share < most, "{pins} takes {share} times as long as stages that are equal");
    }
}

/// Where a step has many microbatches, or a pipeline many cuts, they are moved as the schedule's run tells if that is asked.
#[test]
fn many_cuts_are_moved_where_that_is_asked() {
    let sizes = Sizes { layers: 26, batch: 64, seq: 512, vocab: 65_536, ..MODEL };
    let graph = llama(sizes, DType::Bf16);
    let (prepared, cluster) = (prepare(&graph, sizes.batch, &NoScratch), Cluster::parse("rtx4090:8", "h200").unwrap());
    let line = Line::new(&prepared);
    let memory = Bytes(20 << 30);
    let request = Request { batch: sizes.batch, seq: sizes.seq, device_memory: memory, ..Request::default() };
    for (pins, most) in [("schedule=zbv", 0.98), ("schedule=interleaved,virtual=2", 0.94), ("schedule=1f1b", 0.99)] {
        let pins = Pins::parse(&format!("pp=8,microbatch=2,zero=0,{pins}")).unwrap();
        let of = |moves_cuts: bool| {
            let space = Space { moves_cuts, ..staged(&prepared, &line, &cluster, (&request, &pins)) };
            fastest(&enumerate(&space, &mut Visited::within(memory, f64::INFINITY)).unwrap())
        };
        let share = of(true) / of(false);
        assert!(share < most, "{pins:?} takes {share} times as long where cuts are moved");
    }
}

/// What is left out beside a plan that takes little is found beside one that takes longer, as if that one had been known from
/// the beginning; and no mesh is visited again that has nothing to offer.
#[test]
fn what_was_left_out_is_found_again() {
    let graph = llama(MODEL, DType::Bf16);
    let prepared = prepare(&graph, MODEL.batch, &NoScratch);
    let line = Line::new(&prepared);
    let (mut again_in_all, mut meshes_in_all) = (0, 0);
    for (cluster, pins) in [("h100:4x4", "zero=1"), ("h200:2x4", "tp=1"), ("h100:4x4", "schedule=zbv")] {
        let (cluster, pins) = (Cluster::parse(cluster, "h200").unwrap(), Pins::parse(pins).unwrap());
        for memory in [1300u64, 2300, 9000].map(|mib| Bytes(mib << 20)) {
            let request = &Request { batch: MODEL.batch, seq: MODEL.seq, device_memory: memory, ..Request::default() };
            let (prepared, cluster, pins) = (&prepared, &cluster, &pins);
            let space = staged(prepared, &line, cluster, (request, pins));
            let beside = |step: f64| {
                let mut visited = Visited::new(memory).against(step);
                (enumerate(&space, &mut visited).unwrap_or_default(), visited)
            };
            let best = fastest(&beside(f64::INFINITY).0);
            for share in [0.8, 1.0] {
                let (first, visited) = beside(share * best);
                let known = visited.meshes();
                let (mut wider, meshes) = visited.against(1.1 * best).reopened(None);
                let mut again = wider.fork();
                let found = enumerate(&Space { meshes: Some(&meshes), ..space }, &mut again).unwrap_or_default();
                again_in_all += again.meshes();
                wider.join(again);
                let kept: Vec<Candidate> = first.into_iter().filter(|of| !meshes.contains(&of.degrees)).collect();
                assert_eq!(fastest(&[kept, found].concat()), fastest(&beside(1.1 * best).0));
                assert_eq!(wider.meshes(), known);
                meshes_in_all += known;
            }
        }
    }
    assert!(again_in_all > 0 && again_in_all < meshes_in_all, "{again_in_all} of {meshes_in_all} meshes");
}
