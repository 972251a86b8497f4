//! Zero-bubble V: two chunks a stage, down the pipeline and up again, of which the gradients of weights come later.
//!
//! A microbatch follows the one before by a *period*, in which a stage does all it has to do of one. In a steady pipeline
//! every pass of a microbatch begins a fixed *hop* after the same pass on the stage before (Qi et al., "Pipeline parallelism
//! with controllable memory", 2024, section 3). Half a period for a hop lets the passes of all stages be in the same
//! cyclic order, so none ever waits for another, however long its parts are; then a stage holds what forward passes leave
//! of two chunks for each stage there is. Where it is to hold less, hops are as much shorter, and stages wait a little.
//!
//! While the pipeline fills, the first stage could take in microbatches faster than the others pass them on, and more would
//! be held than ever later. So they come in as fast as forward passes of both chunks let a stage pass them on, and of what a
//! stage may hold some is left for the way up ([`Pipeline::on_the_way_down`]), on which no microbatch waits for a later one.
//!
//! So each stage begins, when it is free, of the passes that are ready the one that is due first; of fewer microbatches than
//! stages, which are never steady, a backward pass before a forward pass, and that on the way up first. Gradients of weights
//! follow the backward pass closely as long as there are other passes; when forward passes are through, they fill the gaps
//! in which a stage waits for backward passes, as far as memory is there for what they read.

use super::agenda::Agenda;
use super::order::{Lengths, Pass, Step};
use shardc_ir::Pipeline;

/// Of how many chunks the gradients of weights are delayed before forward passes are through.
pub const CLOSE: u64 = 2;

/// When passes are due.
struct Due {
    period: f64,
    /// After what time the next microbatch may come in.
    pace: f64,
    /// Per chunk and pass, of the first microbatch.
    first: Vec<[f64; 3]>,
}

impl Due {
    /// In a steady pipeline, of chunks that take so long on average, where a stage holds so many.
    fn steady(stages: u64, lengths: &[[f64; 3]], in_flight: u64) -> Self {
        let mean = |pass: Pass| {
            let all = lengths.iter().map(|of| of[pass as usize]);
            all.sum::<f64>() / lengths.len().max(1) as f64
        };
        let [forward, backward, weight] = Pass::ALL.map(mean);
        let period = 2.0 * (forward + backward + weight);
        let share = in_flight as f64 / (2 * stages) as f64;
        // While the pipeline fills, three chunks for each stage are held at the most, however fast it does.
        let pace = 2.0 * forward * (3.0 - 2.0 * share).clamp(0.0, 1.0);
        let hop = (0.5 * period * share.min(1.0)).max(forward.max(backward));
        // What turns around on a stage goes on at once.
        let of_chunk = |chunk: u64| {
            let (is_up, back) = (u64::from(chunk >= stages), 2 * stages - 1 - chunk);
            let turn = [backward, 0.0][is_up as usize];
            let comes = (chunk - is_up) as f64 * hop + is_up as f64 * forward;
            let returns = (2 * (stages - 1) + back - (1 - is_up)) as f64 * hop + 2.0 * forward + turn;
            [comes, returns, returns]
        };
        Self { period, pace, first: (0..2 * stages).map(of_chunk).collect() }
    }

    /// Of so few microbatches that each pass has one rank at all times.
    fn of_few(stages: u64) -> Self {
        let of_chunk = |chunk: u64| {
            let is_down = f64::from(u8::from(chunk < stages));
            [2.0 + is_down, is_down, is_down]
        };
        Self { period: 0.0, pace: 0.0, first: (0..2 * stages).map(of_chunk).collect() }
    }

    /// When a microbatch may come in.
    fn comes_in(&self, microbatch: u64) -> f64 {
        microbatch as f64 * self.pace
    }
}

/// A chunk, by its passes.
#[derive(Clone, Copy)]
struct Chunk {
    takes: [f64; 3],
    /// When that of the first microbatch is due.
    due: [f64; 3],
    /// Of how many microbatches all is there that it waits for.
    ready: [u64; 3],
    begun: [u64; 3],
    /// Of how many the gradients of weights are made.
    done: u64,
}

impl Chunk {
    /// Of how many microbatches it holds what its forward passes left.
    fn held(&self) -> u64 {
        self.begun[Pass::Forward as usize] - self.done
    }

    /// Of how many the gradients of weights are delayed.
    fn waiting(&self) -> u64 {
        self.begun[Pass::Backward as usize] - self.begun[Pass::Weight as usize]
    }
}

/// What a stage may hold at the most.
struct Most {
    /// Of both chunks, whatever a forward pass on the way up leaves, and on the way down.
    up: u64,
    down: u64,
    delayed: u64,
}

/// All stages at some time.
struct Stages {
    due: Due,
    most: Most,
    microbatches: u64,
    chunks: Vec<Chunk>,
}

impl Stages {
    /// What a stage begins, that is free at this time.
    fn next(&self, (down, up): (u32, u32), now: f64) -> Option<Step> {
        let own = [up, down].map(|chunk| (chunk, &self.chunks[chunk as usize]));
        let held: u64 = own.iter().map(|(_, of)| of.held()).sum();
        let waiting: u64 = own.iter().map(|(_, of)| of.waiting()).sum();
        let [_, (_, on_way_down)] = own;
        let comes_next = on_way_down.begun[Pass::Forward as usize];
        let is_through = comes_next == self.microbatches;
        let is_late = waiting >= if is_through { self.most.delayed } else { self.most.delayed.min(CLOSE) };
        let may_go_up = held < self.most.up;
        let may_go_down = held < self.most.down && (down > 0 || self.due.comes_in(comes_next) <= now);
        let mut first: Option<((bool, f64), Step)> = None;
        for (chunk, of) in own {
            let may_go = if chunk == up { may_go_up } else { may_go_down };
            for pass in Pass::ALL {
                let (index, microbatch) = (pass as usize, of.begun[pass as usize]);
                if microbatch >= of.ready[index] || (pass == Pass::Forward && !may_go) {
                    continue;
                }
                let due = microbatch as f64 * self.due.period + of.due[index];
                let rank = ((pass == Pass::Weight) != is_late, due);
                if first.is_none_or(|(before, _)| rank < before) {
                    first = Some((rank, Step { chunk, pass, microbatch }));
                }
            }
        }
        first.map(|(_, step)| step)
    }

    /// A pass of a chunk is done for another microbatch; gives the chunk that waited for it, if one did.
    fn end(&mut self, chunk: u32, pass: Pass) -> Option<u32> {
        let last = (self.chunks.len() - 1) as u32;
        let (next, reader) = match pass {
            Pass::Forward if chunk == last => (Some(chunk), Pass::Backward),
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
    let last = (2 * stages - 1) as u32;
    let most = Most {
        up: pipeline.most_in_flight(stages),
        down: pipeline.on_the_way_down(stages),
        delayed: pipeline.most_delayed(stages),
    };
    let of_chunk = |chunk: u32| Pass::ALL.map(|pass| lengths(chunk).of(pipeline.schedule, chunk, pass));
    let takes: Vec<[f64; 3]> = (0..=last).map(of_chunk).collect();
    let due = if microbatches < stages { Due::of_few(stages) } else { Due::steady(stages, &takes, most.down) };
    let new = |(takes, due): (&[f64; 3], &[f64; 3])| Chunk {
        takes: *takes,
        due: *due,
        ready: [0; 3],
        begun: [0; 3],
        done: 0,
    };
    let chunks = takes.iter().zip(&due.first).map(new).collect();
    let mut all = Stages { due, most, microbatches, chunks };
    all.chunks[0].ready[Pass::Forward as usize] = microbatches;
    let mut running = vec![None; stages as usize];
    let mut orders: Vec<Vec<Step>> = vec![Vec::new(); stages as usize];
    // When stages are done with what they run, and behind them when another microbatch may come in.
    let mut agenda = Agenda::new(stages as usize + 1);
    // The stages that may begin something: those that are free, those that wait for what is done, and the first when
    // another microbatch may come in.
    let (mut now, mut ends, mut touched) = (0.0, Vec::new(), (0..stages as u32).collect::<Vec<_>>());
    loop {
        for stage in touched.drain(..) {
            if running[stage as usize].is_some() {
                continue;
            }
            let Some(step) = all.next((stage, last - stage), now) else { continue };
            let Step { chunk, pass, .. } = step;
            let own = &mut all.chunks[chunk as usize];
            orders[stage as usize].push(step);
            own.begun[pass as usize] += 1;
            agenda.set(stage as usize, now + own.takes[pass as usize]);
            running[stage as usize] = Some((chunk, pass));
            let next = all.due.comes_in(all.chunks[0].begun[Pass::Forward as usize]);
            if (chunk, pass) == (0, Pass::Forward) && next > now {
                agenda.set(stages as usize, next);
            }
        }
        let Some(next) = agenda.next(&mut ends) else { break };
        now = next;
        for end in ends.drain(..) {
            let Some(done) = running.get_mut(end) else {
                touched.push(0);
                continue;
            };
            touched.push(end as u32);
            let waits = done.take().and_then(|(chunk, pass)| all.end(chunk, pass));
            touched.extend(waits.map(|chunk| chunk.min(last - chunk)));
        }
    }
    let is_done = |of: &Chunk| of.done == microbatches;
    match all.chunks.iter().all(is_done) {
        true => Ok(orders),
        false => Err(format!("schedule zbv leaves {stages} stages waiting for each other")),
    }
}
