//! The order of zero-bubble V: each stage has two chunks, one on the way down the pipeline and one on the way up, and
//! the gradients of weights are passes of their own, which may come later (Qi et al., "Zero bubble
//! pipeline parallelism", 2024, section 6).
//!
//! **Which pass is next.** Passes are [due](super::rhythm) at times of a steady pipeline, in which a stage holds as
//! many chunks as it may. Where that is what 1F1B holds, or half of it, each pass has its turn, and a stage waits for
//! it. Elsewhere a free stage begins, of the passes that are ready, the one that is due first. In a long pipeline that
//! may hold much and is full for most of the step, it does not begin one just before another arrives that is due
//! earlier.
//!
//! **Filling.** While the pipeline fills, the first stage could take in microbatches faster than the others pass them
//! on, and would hold more than ever later. So microbatches come in at the pace at which the forward passes of both
//! chunks let a stage pass them on. Part of what a stage may hold is left for the way up ([`kept_for_the_way_up`]), on
//! which no microbatch waits for a later one.
//!
//! **Draining.** The gradients of weights follow the backward pass closely as long as there are other passes. When
//! forward passes are through, they fill the gaps in which a stage waits for backward passes, as far as there is memory
//! for what they read ([`Pipeline::delayed`]).
//!
//! **Few microbatches.** With fewer microbatches than stages the pipeline is never steady. Then backward passes go
//! before forward passes, and of each kind those on the way up go first.

use super::agenda::Agenda;
use super::order::{Lengths, Pass, Step};
use super::rhythm::{Due, Rhythm};
use shardc_ir::Pipeline;

/// The most chunks whose gradients of weights are delayed while there are still forward passes.
pub const CLOSE: u64 = 2;

/// For how many chunks a stage keeps room on the way up: one for every eight stages. With less, some forward passes on the
/// way up would wait.
pub fn kept_for_the_way_up(stages: u64) -> u64 {
    stages.div_ceil(8)
}

/// The stages of a pipeline in which it pays to wait for what comes soon.
const LONG: u64 = 16;

/// The share of a pass for which a stage rather waits for one that is due before it. With more, the gaps cost more than they
/// gain.
const SOON: f64 = 0.5;

/// A chunk of the model. Arrays are by [`Pass`].
#[derive(Clone, Copy)]
struct Chunk {
    /// The length of a pass.
    takes: [f64; 3],
    /// When the pass of the first microbatch is due.
    due: [f64; 3],
    /// For how many microbatches a pass has all that it waits for.
    ready: [u64; 3],
    /// For how many microbatches it was begun.
    begun: [u64; 3],
    /// For how many microbatches the gradients of weights are made.
    done: u64,
}

impl Chunk {
    /// How many microbatches it holds activations of.
    fn held(&self) -> u64 {
        self.begun[Pass::Forward as usize] - self.done
    }

    /// How many microbatches it delays the gradients of weights of.
    fn waiting(&self) -> u64 {
        self.begun[Pass::Backward as usize] - self.begun[Pass::Weight as usize]
    }
}

/// What a stage may hold at the most.
struct Most {
    /// Microbatches whose activations it holds, of both chunks together, behind a forward pass on the way up, and behind
    /// one on the way down.
    up: u64,
    down: u64,
    /// Microbatches whose gradients of weights it delays.
    delayed: u64,
}

/// What a stage begins, when it is free.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// Of the passes that are ready, the one that is due first.
    Ready,
    /// The same, but it waits where one that is due before will be ready in less than half of that pass ([`SOON`]).
    ReadyUnlessSoon,
    /// What is due first, when it is ready.
    Due,
}

/// A pass that a stage runs.
#[derive(Clone, Copy)]
struct Running {
    chunk: u32,
    pass: Pass,
    ends: f64,
}

/// All stages at some time.
struct Stages {
    due: Due,
    rule: Rule,
    most: Most,
    microbatches: u64,
    chunks: Vec<Chunk>,
    running: Vec<Option<Running>>,
}

impl Stages {
    /// Before the first pass.
    fn new(pipeline: &Pipeline, stages: u64, microbatches: u64, lengths: &dyn Fn(u32) -> Lengths) -> Self {
        let in_flight = pipeline.most_in_flight(stages);
        let most = Most {
            up: in_flight,
            down: in_flight.saturating_sub(kept_for_the_way_up(stages)).max(1),
            delayed: pipeline.most_delayed(stages),
        };
        let of_chunk = |chunk: u32| Pass::ALL.map(|pass| lengths(chunk).of(pipeline.schedule, chunk, pass));
        let takes: Vec<[f64; 3]> = (0..2 * stages as u32).map(of_chunk).collect();
        let mean = |pass: Pass| takes.iter().map(|of| of[pass as usize]).sum::<f64>() / takes.len().max(1) as f64;
        let steady = || Due::steady(stages, Pass::ALL.map(mean), most.down);
        let rhythm = Rhythm::of(in_flight, (stages, microbatches)).filter(|_| most.delayed >= CLOSE);
        let (rule, due) = match rhythm {
            _ if microbatches < stages => (Rule::Ready, Due::of_few(stages)),
            Some(rhythm) => (Rule::Due, Due::in_turns(stages, &rhythm)),
            // Many stages would wait for what is late, stages may hold much (four fifths of what 1F1B holds), and the
            // pipeline is full for most of the step.
            None if stages >= LONG && 5 * in_flight >= 8 * stages && microbatches >= 2 * stages => {
                (Rule::ReadyUnlessSoon, steady())
            }
            None => (Rule::Ready, steady()),
        };
        let new = |(takes, due): (&[f64; 3], &[f64; 3])| Chunk {
            takes: *takes,
            due: *due,
            ready: [0; 3],
            begun: [0; 3],
            done: 0,
        };
        let mut chunks: Vec<Chunk> = takes.iter().zip(&due.first).map(new).collect();
        chunks[0].ready[Pass::Forward as usize] = microbatches;
        Self { due, rule, most, microbatches, chunks, running: vec![None; stages as usize] }
    }

    /// The last chunk, the second of the first stage.
    fn last(&self) -> u32 {
        (self.chunks.len() - 1) as u32
    }

    /// The stage of a chunk.
    fn stage_of(&self, chunk: u32) -> u32 {
        chunk.min(self.last() - chunk)
    }

    /// Begins the next pass of a stage at this time, if the stage is free and has one. Gives the step, and when it ends.
    fn begin(&mut self, stage: u32, now: f64) -> Option<(Step, f64)> {
        if self.running[stage as usize].is_some() {
            return None;
        }
        let step = self.next((stage, self.last() - stage), now)?;
        let Step { chunk, pass, .. } = step;
        let own = &mut self.chunks[chunk as usize];
        own.begun[pass as usize] += 1;
        let ends = now + own.takes[pass as usize];
        self.running[stage as usize] = Some(Running { chunk, pass, ends });
        Some((step, ends))
    }

    /// What a stage begins, that is free at this time.
    fn next(&self, own: (u32, u32), now: f64) -> Option<Step> {
        match self.rule {
            // When forward passes are through, gradients of weights that may be delayed fill gaps.
            Rule::Due if self.most.delayed <= CLOSE || !self.is_through(own) => self.next_due(own),
            _ => self.next_ready(own, now),
        }
    }

    /// Whether forward passes of both chunks are.
    fn is_through(&self, (down, up): (u32, u32)) -> bool {
        [down, up].iter().all(|chunk| self.chunks[*chunk as usize].begun[Pass::Forward as usize] == self.microbatches)
    }

    /// When the next pass of a kind is due.
    fn due(&self, of: &Chunk, pass: Pass) -> f64 {
        of.begun[pass as usize] as f64 * self.due.period + of.due[pass as usize]
    }

    /// What is due first of a stage, if it is ready.
    fn next_due(&self, (down, up): (u32, u32)) -> Option<Step> {
        let mut first: Option<(f64, (u32, Pass))> = None;
        for chunk in [up, down] {
            let of = &self.chunks[chunk as usize];
            for pass in Pass::ALL {
                let due = self.due(of, pass);
                if of.begun[pass as usize] < self.microbatches && first.is_none_or(|(before, _)| due < before) {
                    first = Some((due, (chunk, pass)));
                }
            }
        }
        let (_, (chunk, pass)) = first?;
        let of = &self.chunks[chunk as usize];
        let microbatch = of.begun[pass as usize];
        (microbatch < of.ready[pass as usize]).then_some(Step { chunk, pass, microbatch })
    }

    /// What is due first of what is ready on a stage.
    fn next_ready(&self, (down, up): (u32, u32), now: f64) -> Option<Step> {
        let own = [up, down].map(|chunk| (chunk, &self.chunks[chunk as usize]));
        let held: u64 = own.iter().map(|(_, of)| of.held()).sum();
        let waiting: u64 = own.iter().map(|(_, of)| of.waiting()).sum();
        let [_, (_, on_way_down)] = own;
        let comes_next = on_way_down.begun[Pass::Forward as usize];
        let is_through = comes_next == self.microbatches;
        let is_late = waiting >= if is_through { self.most.delayed } else { self.most.delayed.min(CLOSE) };
        let may_go_up = held < self.most.up;
        let may_go_down = held < self.most.down && (down > 0 || self.due.comes_in(comes_next) <= now);
        let may_go =
            |chunk: u32, pass: Pass| pass != Pass::Forward || if chunk == up { may_go_up } else { may_go_down };
        let mut first: Option<((bool, f64), Step)> = None;
        for (chunk, of) in own {
            for pass in Pass::ALL {
                let (index, microbatch) = (pass as usize, of.begun[pass as usize]);
                if microbatch >= of.ready[index] || !may_go(chunk, pass) {
                    continue;
                }
                let rank = ((pass == Pass::Weight) != is_late, self.due(of, pass));
                if first.is_none_or(|(before, _)| rank < before) {
                    first = Some((rank, Step { chunk, pass, microbatch }));
                }
            }
        }
        let (_, step) = first?;
        let is_soon = |chunk: u32, pass: Pass| may_go(chunk, pass) && self.comes_soon(step, (chunk, pass), now);
        let waits = self.rule == Rule::ReadyUnlessSoon
            && !(is_late && step.pass == Pass::Weight)
            && [up, down].into_iter().any(|chunk| is_soon(chunk, Pass::Forward) || is_soon(chunk, Pass::Backward));
        (!waits).then_some(step)
    }

    /// Whether a pass that is due before a step is on its way, and is ready within [`SOON`] of what that step takes.
    fn comes_soon(&self, step: Step, (chunk, pass): (u32, Pass), now: f64) -> bool {
        let (of, other) = (&self.chunks[chunk as usize], &self.chunks[step.chunk as usize]);
        let begun = of.begun[pass as usize];
        if begun < of.ready[pass as usize]
            || begun == self.microbatches
            || (step.pass != Pass::Weight && self.due(of, pass) > self.due(other, step.pass))
        {
            return false;
        }
        let maker = match pass {
            Pass::Forward => chunk.checked_sub(1).map(|before| (before, pass)),
            _ if chunk == self.last() => Some((chunk, Pass::Forward)),
            _ => Some((chunk + 1, pass)),
        };
        let Some(maker) = maker else { return false };
        let running = self.running[self.stage_of(maker.0) as usize];
        let soon = now + SOON * other.takes[step.pass as usize];
        running.is_some_and(|running| (running.chunk, running.pass) == maker && running.ends < soon)
    }

    /// Ends a pass of a chunk for another microbatch. Gives the chunk that waited for it, if one did.
    fn end(&mut self, chunk: u32, pass: Pass) -> Option<u32> {
        let (next, reader) = match pass {
            Pass::Forward if chunk == self.last() => (Some(chunk), Pass::Backward),
            Pass::Forward => (Some(chunk + 1), Pass::Forward),
            Pass::Backward => (chunk.checked_sub(1), Pass::Backward),
            Pass::Weight => (None, Pass::Weight),
        };
        let own = &mut self.chunks[chunk as usize];
        match pass {
            Pass::Backward => own.ready[Pass::Weight as usize] += 1,
            Pass::Weight => own.done += 1,
            Pass::Forward => {}
        }
        let next = next?;
        self.chunks[next as usize].ready[reader as usize] += 1;
        Some(next)
    }
}

/// The steps of every stage.
///
/// # Errors
/// A bug, if some are left over.
pub(super) fn orders(
    pipeline: &Pipeline,
    stages: u64,
    microbatches: u64,
    lengths: &dyn Fn(u32) -> Lengths,
) -> Result<Vec<Vec<Step>>, String> {
    let mut all = Stages::new(pipeline, stages, microbatches, lengths);
    // Three passes of both chunks.
    let mut orders: Vec<Vec<Step>> = (0..stages).map(|_| Vec::with_capacity(6 * microbatches as usize)).collect();
    // When stages are done with what they run, and behind them when another microbatch may come in.
    let mut agenda = Agenda::new(stages as usize + 1);
    // The stages that may begin something: those that are free, those that wait for what is done, and the first when
    // another microbatch may come in.
    let (mut now, mut ends, mut touched) = (0.0, Vec::new(), (0..stages as u32).collect::<Vec<_>>());
    loop {
        for stage in touched.drain(..) {
            let Some((step, ends)) = all.begin(stage, now) else { continue };
            orders[stage as usize].push(step);
            agenda.set(stage as usize, ends);
            let next = all.due.comes_in(all.chunks[0].begun[Pass::Forward as usize]);
            if (step.chunk, step.pass) == (0, Pass::Forward) && next > now {
                agenda.set(stages as usize, next);
            }
        }
        let Some(next) = agenda.next(&mut ends) else { break };
        now = next;
        for end in ends.drain(..) {
            let Some(done) = all.running.get_mut(end) else {
                touched.push(0);
                continue;
            };
            touched.push(end as u32);
            let waits = done.take().and_then(|Running { chunk, pass, .. }| all.end(chunk, pass));
            touched.extend(waits.map(|chunk| all.stage_of(chunk)));
        }
    }
    let is_done = |of: &Chunk| of.done == microbatches;
    match all.chunks.iter().all(is_done) {
        true => Ok(orders),
        false => Err(format!("schedule zbv leaves {stages} stages waiting for each other")),
    }
}
