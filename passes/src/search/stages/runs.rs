//! What running a schedule came to. Ways to store parameters and choices of ZeRO often take the same in every pass, so what
//! is known of one of them is known of others.

use super::Mesh;
use super::held::{Ends, Held};
use super::step::in_rounds;
use crate::pipeline::order::{Lengths, Step, orders};
use crate::threads::lock;
use rustc_hash::FxHashMap;
use shardc_ir::pipeline::Schedule;
use shardc_ir::{Family, Pipeline};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::hash::Hash;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

/// The schedule, with the chunks of a stage, those in flight and those delayed.
type Order = (Schedule, u64, [(&'static str, Option<u64>); 2]);

/// The order, the bits of what passes and messages take, and of what steps lose to those, and the microbatches.
type Passes = (Order, Vec<u64>, u64);

/// What is known of one schedule on one mesh.
pub(super) struct Runs<'a> {
    mesh: &'a Mesh<'a>,
    /// Seconds.
    seconds: RefCell<FxHashMap<Passes, Option<f64>>>,
    /// Copies, by the bits of the seconds of passes, where orders go by those, and the bytes of one.
    held: RefCell<FxHashMap<Copies, Option<Rc<[Held]>>>>,
    /// The steps that were asked for last, the latest first.
    steps: RefCell<VecDeque<(Passes, Steps)>>,
}

/// What is known of orders of so many stages and microbatches.
pub(super) type AllEnds = Mutex<FxHashMap<(Order, [u64; 2]), Arc<[Ends]>>>;

/// Rounds of microbatches in which as many messages are under way as in all.
const FOLLOWED: u64 = 3;

/// Of how many orders the steps are kept.
const KEPT: usize = 8;

/// The steps of every stage.
type Steps = Rc<Vec<Vec<Step>>>;

/// The order, the bits of what passes take, and the bytes of a copy.
type Copies = (Order, Vec<u64>, Vec<[u64; 4]>);

impl<'a> Runs<'a> {
    /// Of a mesh, of which nothing is known.
    pub fn new(mesh: &'a Mesh<'a>) -> Self {
        Self { mesh, seconds: RefCell::default(), held: RefCell::default(), steps: RefCell::default() }
    }

    /// Seconds of so many microbatches, whose passes and messages take so many: those that are known, or that a run finds.
    pub fn seconds(
        &self,
        pipeline: &Pipeline,
        (chunks, on_wire): (&[Lengths], &[f64]),
        microbatches: u64,
        run: &dyn Fn() -> Option<f64>,
    ) -> Option<f64> {
        let bits = chunks.iter().flat_map(|own| bits(*own)).chain(on_wire.iter().map(|seconds| seconds.to_bits()));
        known(&self.seconds, (order(pipeline), bits.collect(), microbatches), run)
    }

    /// The steps of so many microbatches in the order that the lengths of passes make.
    pub fn steps(&self, pipeline: &Pipeline, microbatches: u64, lengths: &dyn Fn(u32) -> Lengths) -> Option<Steps> {
        let stages = self.mesh.placed.mesh.degree(Family::Pipeline);
        let chunks = (0..(stages * pipeline.per_stage) as u32).filter(|_| pipeline.schedule.splits_backward());
        let key = (order(pipeline), chunks.flat_map(|chunk| bits(lengths(chunk))).collect(), microbatches);
        let mut known = self.steps.borrow_mut();
        let latest = match known.iter().position(|(known, _)| *known == key) {
            Some(at) => known.remove(at)?,
            None => (key, Rc::new(orders(pipeline, stages, microbatches, lengths).ok()?)),
        };
        let steps = latest.1.clone();
        known.push_front(latest);
        known.truncate(KEPT);
        Some(steps)
    }

    /// The copies of what each chunk holds, of which one of each kind has so many `bytes`, where passes run in the order
    /// that their lengths make.
    pub fn held(
        &self,
        pipeline: &Pipeline,
        lengths: &dyn Fn(u32) -> Lengths,
        bytes: Vec<[u64; 4]>,
    ) -> Option<Rc<[Held]>> {
        let goes_by_lengths = pipeline.schedule.splits_backward();
        let bits = (0..bytes.len() as u32).filter(|_| goes_by_lengths).flat_map(|chunk| bits(lengths(chunk)));
        let key: Copies = (order(pipeline), bits.collect(), bytes);
        let bytes = key.2.clone();
        // Of an order of its own twice as many as may be in flight tell what all do: where one chunk is longer than the others,
        // so many come in before what is held does not grow any more. Others hold as many as there are.
        let stages = self.mesh.placed.mesh.degree(Family::Pipeline);
        let microbatches = match goes_by_lengths {
            true => self.mesh.followed(2 * pipeline.most_in_flight(stages), stages),
            false => self.mesh.placed.microbatches,
        };
        known(&self.held, key, &|| {
            let steps = self.steps(pipeline, microbatches, lengths)?;
            Some(Held::of_chunks(pipeline, &steps, &bytes, &self.ends(pipeline)?).into())
        })
    }

    /// The copies of what chunks send each other, of which some rounds tell what all do: of chunks that are as long as each
    /// other, on any mesh.
    fn ends(&self, pipeline: &Pipeline) -> Option<Arc<[Ends]>> {
        let Mesh { line, placed, .. } = self.mesh;
        let stages = placed.mesh.degree(Family::Pipeline);
        let (followed, round) = in_rounds(pipeline, stages, placed.microbatches);
        let microbatches = self.mesh.followed(FOLLOWED * round, round);
        let key = (order(&followed), [stages, microbatches]);
        if let Some(known) = lock(&line.ends).get(&key) {
            return Some(known.clone());
        }
        let steps = self.steps(&followed, microbatches, &|_| Lengths::EQUAL)?;
        let found: Arc<[Ends]> = Ends::of_chunks(&followed, &steps)?.into();
        lock(&line.ends).insert(key, found.clone());
        Some(found)
    }
}

fn order(pipeline: &Pipeline) -> Order {
    (pipeline.schedule, pipeline.per_stage, pipeline.limits())
}

fn bits(Lengths { forward, backward, weight }: Lengths) -> [u64; 3] {
    [forward, backward, weight].map(f64::to_bits)
}

/// What is known under a key, or is found now.
fn known<K: Hash + Eq, V: Clone>(all: &RefCell<FxHashMap<K, V>>, key: K, find: &dyn Fn() -> V) -> V {
    if let Some(known) = all.borrow().get(&key) {
        return known.clone();
    }
    let found = find();
    all.borrow_mut().insert(key, found.clone());
    found
}
