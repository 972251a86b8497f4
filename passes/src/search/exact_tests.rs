//! The search against all that it leaves out, on small random models and clusters.

use super::away::Away;
use super::bound::stages::{InStages, least_fitting_in_stages, least_in_stages};
use super::bound::{Asked, least, least_fitting};
use super::candidate::Candidate;
use super::choice::degrees::Degrees;
use super::choice::pins::{Pins, Recompute};
use super::choose::{Chosen, choose, seen};
use super::enumerate::enumerate;
use super::estimate::Shape;
use super::placed::place_batch;
use super::space::{Pipelines, Space};
use super::stages::line::Line;
use super::stages::schedules::orders;
use super::visit::Visited;
use super::work::model_work;
use super::{may_take_less, search};
use crate::cluster::Cluster;
use crate::shard::eliminate::tests::integer_program;
use crate::shard::family::searched_axes;
use crate::shard::objective::{Objective, Prices};
use crate::shard::place::{apply, current, place_axes};
use crate::shard::prepare::prepare;
use crate::shard::problem::Problem;
use crate::shard::route::conversions;
use crate::synthetic::{Sizes, residual};
use proptest::prelude::*;
use shardc_ir::plan::Request;
use shardc_ir::{Bytes, DType, Family, Graph, NoScratch, Seconds};

const CLUSTERS: [&str; 5] = ["h100:2", "h100:4", "h100:2x2", "a100-80:6", "h200:8"];

fn models() -> impl Strategy<Value = (Graph, u64)> {
    let sizes = (any::<u64>(), 10usize..40, 0u32..4, 0u32..4);
    sizes.prop_map(|(seed, nodes, batch, width)| {
        let (batch, width) = (24 << batch, 256 << width);
        (residual(Sizes { seed, nodes, batch, width, dtype: DType::Bf16 }).unwrap(), batch)
    })
}

fn request(batch: u64, memory: u64) -> Request {
    Request { batch, seq: 1, device_memory: Bytes(memory), ..Request::default() }
}

/// The bytes between which plans begin to fit and all do.
fn range(space: &Space<'_, '_>) -> (u64, u64) {
    let all = enumerate(space, &mut Visited::within(Bytes(u64::MAX), f64::INFINITY)).unwrap();
    let bytes = |candidate: &Candidate| candidate.prediction.memory.total().0;
    (all.iter().map(bytes).min().unwrap() * 7 / 8, all.iter().map(bytes).max().unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20))]

    /// No mesh that was left out, no stage and no number of steps of recomputation does better.
    #[test]
    fn the_plan_is_the_best_of_all_candidates((graph, batch) in models(), cluster in 0..CLUSTERS.len(), share in 0.0..1.0) {
        let cluster = Cluster::parse(CLUSTERS[cluster], "h200").unwrap();
        let prepared = prepare(&graph, batch, &NoScratch);
        let (pins, free) = (Pins::default(), request(batch, u64::MAX));
        let away = Away::default();
        let space = Space { prepared: &prepared, line: None, pipelines: Pipelines::Never, meshes: None, cluster: &cluster, others: &[], request: &free, pins: &pins, away, with_unfit: false, moves_cuts: false, is_bounded: true, measure: Default::default() };
        let (low, high) = range(&space);
        let memory = low + ((high - low) as f64 * share) as u64;
        let request = request(batch, memory);
        let space = Space { request: &request, ..space };
        let work = model_work(&graph, &cluster);
        let mut best = f64::INFINITY;
        for degrees in enumerate(&space, &mut Visited::within(Bytes(memory), f64::INFINITY)).unwrap().iter().map(|c| &c.degrees) {
            let mesh = degrees.mesh(batch);
            let mut placed = place_batch(&prepared, &mesh, &cluster).unwrap().unwrap();
            let conversions = place_axes(&prepared, &mut placed, Prices::default());
            let shape = Shape::new(&prepared, &placed, &conversions, 1, std::slice::from_ref(&mesh));
            let steps = shape.menu().steps();
            for (zero, step) in (0..4).flat_map(|zero| (0..=steps).map(move |step| (zero, step))) {
                let recompute = if step == 0 { Recompute::None } else { Recompute::Values(step) };
                let prediction = shape.predict(&placed, 0, zero, recompute, work);
                // The search leaves a few percent where it recomputes.
                let room = if step == 0 { 1.0 } else { 0.97 };
                if prediction.memory.total().0 as f64 <= memory as f64 * room {
                    best = best.min(prediction.step.0);
                }
            }
        }
        match search(&graph, &cluster, &request, &pins, &NoScratch) {
            Ok(plan) => {
                let less = Seconds(0.999 * plan.search.bound.0);
                prop_assert!(!may_take_less(&prepared, &cluster, &request, &pins, less).unwrap());
                // Near-ties go to the simplest.
                prop_assert!(plan.prediction.step.0 <= best * 1.0011, "{} for {best}", plan.prediction.step.0);
                prop_assert!(plan.search.bound.0 <= best * (1.0 + 1e-9));
                prop_assert!((plan.prediction.step.0 / plan.search.bound.0 - 1.0 - plan.search.gap).abs() < 1e-9);
            }
            Err(error) => prop_assert!(best == f64::INFINITY, "{error}, and a plan takes {best}"),
        }
    }

    /// Other layouts than the search's take no less than the bound says, and fit in no less than it says.
    #[test]
    fn no_layout_is_below_the_bound(
        (graph, batch) in models(),
        ranks in prop_oneof![Just((1u64, [2u64, 1])), Just((2, [2, 1])), Just((1, [2, 2])), Just((2, [4, 1])), Just((1, [2, 4]))],
        microbatches in prop_oneof![Just(1u64), Just(2), Just(4)],
        changes in proptest::collection::vec(proptest::collection::vec(any::<(usize, usize)>(), 0..6), 8),
    ) {
        let tensor: u64 = ranks.1.iter().product();
        let cluster = Cluster::parse(&format!("h100:{}", ranks.0 * tensor), "h200").unwrap();
        let prepared = prepare(&graph, batch, &NoScratch);
        let degrees = Degrees::new(batch / ranks.0 / microbatches).with(Family::Data, &[ranks.0]).with(Family::Tensor, &ranks.1);
        let mesh = degrees.mesh(batch);
        let placed = place_batch(&prepared, &mesh, &cluster).unwrap().unwrap();
        let axes = searched_axes(&mesh);
        let lowest = least(&prepared, &placed, None, f64::INFINITY);
        let work = model_work(&graph, &cluster);
        'layouts: for change in changes {
            let mut own = placed.clone();
            for axis in axes.iter().rev() {
                let before = own.clone();
                let problem = Problem::new(&prepared, &before, *axis, Objective::Step(Prices::default()));
                let mut solution = problem.graph.solve();
                for (variable, choice) in &change {
                    let variable = variable % solution.choices.len();
                    solution.choices[variable] = choice % problem.graph.unary[variable].len();
                }
                if !problem.graph.cost(&solution.choices).is_finite() {
                    continue 'layouts;
                }
                apply(&problem, &mut own, &solution);
            }
            for axis in &axes {
                let problem = Problem::new(&prepared, &own, *axis, Objective::Step(Prices::default()));
                if current(&problem, &own).is_none() {
                    continue 'layouts;
                }
            }
            let conversions = conversions(&prepared, &own, &cluster);
            let shape = Shape::new(&prepared, &own, &conversions, 1, std::slice::from_ref(&mesh));
            for (zero, recompute) in (0..4).flat_map(|zero| [Recompute::None, Recompute::All].map(|again| (zero, again))) {
                let Seconds(step) = shape.predict(&own, 0, zero, recompute, work).step;
                let memory = shape.memory(0, zero, recompute).total();
                prop_assert!(lowest <= step * (1.0 + 1e-9), "{lowest} for {step}, zero {zero}, {recompute}");
                let within = least(&prepared, &placed, Some(memory), f64::INFINITY);
                prop_assert!(lowest <= within && within <= step * (1.0 + 1e-9), "{within} for {step} in {memory}, zero {zero}");
                let stored = [(mesh.clone(), vec![zero])];
                let asked = Asked { stored: &stored, memory: Some(memory), enough: f64::INFINITY };
                let fitting = least_fitting(&prepared, &placed, asked, lowest);
                prop_assert!(fitting <= step * (1.0 + 1e-9), "{fitting} for {step} in {memory}, zero {zero}, {recompute}");
            }
        }
    }

    /// Pipelines take no less than the bound of their mesh says, however little memory there is.
    #[test]
    fn no_pipeline_is_below_its_bound(
        (seed, nodes) in (any::<u64>(), 10usize..40),
        width in prop_oneof![Just(1024u64), Just(4096), Just(8192)],
        cluster in 1..CLUSTERS.len(),
        share in 0.0..1.0,
    ) {
        // Products are the most of it, so that bounds are not far below.
        let batch = 8 * width;
        let graph = residual(Sizes { seed, nodes, batch, width, dtype: DType::Bf16 }).unwrap();
        let cluster = Cluster::parse(CLUSTERS[cluster], "h200").unwrap();
        let prepared = prepare(&graph, batch, &NoScratch);
        let line = Line::new(&prepared);
        let (pins, free) = (Pins::default(), request(batch, u64::MAX));
        let space = Space { prepared: &prepared, line: Some(&line), pipelines: Pipelines::Alone, meshes: None, cluster: &cluster, others: &[], request: &free, pins: &pins, away: Away::default(), with_unfit: false, moves_cuts: false, is_bounded: true, measure: Default::default() };
        let (low, high) = range(&space);
        let request = request(batch, low + ((high - low) as f64 * share) as u64);
        let space = Space { request: &request, ..space };
        let Ok(all) = enumerate(&space, &mut Visited::within(request.device_memory, f64::INFINITY)) else { return Ok(()) };
        for of in all.iter().filter(|of| of.prediction.fits()) {
            let mesh = of.degrees.mesh(batch);
            let placed = place_batch(&prepared, &mesh, &cluster).unwrap().unwrap();
            let free = cluster.rooms(&mesh, request.device_memory).iter().map(|room| room.0 as f64).sum();
            let Seconds(limit) = of.prediction.step;
            let asked = InStages { free: Some(free), zero: of.zero, limit, orders: &orders(&pins) };
            let bound = least_in_stages(&prepared, &placed, &asked);
            prop_assert!(bound <= limit * (1.0 + 1e-9), "{bound} for {limit} of {}", of.choice());
            let stored = [(mesh.clone(), vec![of.zero])];
            let fitting = least_fitting_in_stages(&prepared, &placed, &asked, &stored, [bound, f64::INFINITY]);
            prop_assert!(fitting <= limit * (1.0 + 1e-9), "{fitting} for {limit} of {}", of.choice());
        }
    }

    /// The cost graphs of models are solved as the integer program solves them.
    #[test]
    fn layouts_are_those_of_the_integer_program(seed in any::<u64>(), nodes in 6usize..14, data in 1u64..3) {
        let graph = residual(Sizes { seed, nodes, batch: 16, width: 512, dtype: DType::F32 }).unwrap();
        let cluster = Cluster::parse(&format!("h100:{}", 2 * data), "h200").unwrap();
        let prepared = prepare(&graph, 16, &NoScratch);
        let mesh = Degrees::new(16 / data).with(Family::Data, &[data]).with(Family::Tensor, &[2]).mesh(16);
        let placed = place_batch(&prepared, &mesh, &cluster).unwrap().unwrap();
        let problem = Problem::new(&prepared, &placed, searched_axes(&mesh)[0], Objective::Step(Prices::default()));
        let mut scaled = problem.graph.clone();
        // In tens of microseconds, as the program's tolerances want it.
        scaled.unary.iter_mut().flatten().chain(scaled.pairs.values_mut().flatten()).for_each(|cost| *cost *= 1e5);
        let solution = scaled.solve();
        prop_assert!(solution.is_exact());
        prop_assert!((solution.cost - integer_program(&scaled)).abs() < 1e-6 * solution.cost.max(1.0));
    }
}

/// Where the fastest layouts do not fit, leaner ones are found, and what is chosen is the same every time.
#[test]
fn the_same_request_gives_the_same_plan() {
    let graph = residual(Sizes { seed: 3, nodes: 60, batch: 64, width: 1024, dtype: DType::Bf16 }).unwrap();
    let cluster = Cluster::parse("h100:8", "h200").unwrap();
    let prepared = prepare(&graph, 64, &NoScratch);
    let (pins, free) = (Pins::default(), request(64, u64::MAX));
    let away = Away::default();
    let space = Space {
        prepared: &prepared,
        line: None,
        pipelines: Pipelines::Never,
        meshes: None,
        cluster: &cluster,
        others: &[],
        request: &free,
        pins: &pins,
        away,
        with_unfit: false,
        moves_cuts: false,
        is_bounded: true,
        measure: Default::default(),
    };
    let (low, high) = range(&space);
    for memory in [u64::MAX, high, low.midpoint(high), low * 2] {
        let request = request(64, memory);
        let plan = || search(&graph, &cluster, &request, &pins, &NoScratch).unwrap().to_json();
        assert_eq!(plan(), plan());
    }
    let space = Space { request: &request(64, low * 2), ..space };
    let mut visited = Visited::within(Bytes(low * 2), f64::INFINITY);
    let candidates = seen(&space, &mut visited).unwrap();
    let Chosen::Best { plan: all, .. } = choose(&space, None, candidates, visited.against).unwrap() else {
        panic!("nothing is known")
    };
    let pruned = search(&graph, &cluster, space.request, &pins, &NoScratch).unwrap();
    let bound = visited.bound(&space, f64::INFINITY).unwrap().unwrap().min(all.search.estimate.0);
    assert_eq!((all.choice, Seconds(bound)), (pruned.choice, pruned.search.bound));
    assert_eq!(visited.pruned(), 0);
}
