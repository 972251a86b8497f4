//! What a candidate takes, by the sums of its [`Shape`]: memory and time.

use super::beside::{Shown, Times, Traffic};
use super::liveness::Gradients;
use super::recompute::Selected;
use super::{Shape, Work};
use crate::cost::Machine;
use crate::cost::overlap::spread;
use crate::search::choice::pins::Recompute;
use crate::search::stages::exposed::Within;
use crate::shard::tensor::Placed;
use crate::threads::lock;
use shardc_ir::plan::{Memory, Prediction};
use shardc_ir::{Bytes, Family, Seconds};

impl Shape<'_> {
    /// Memory per rank, with parameters stored in one of the ways.
    pub fn memory(&self, index: usize, zero: u64, recompute: Recompute) -> Memory {
        self.memory_without(index, zero, recompute, 0.0)
    }

    /// The same where a share of the gradients leaves as they are made.
    pub fn memory_without(&self, index: usize, zero: u64, recompute: Recompute, left: f64) -> Memory {
        let storage = &self.storages[index];
        let is_shared = storage.ranks() > 1;
        let [whole, reduced] = [storage.gradients.whole as u64, storage.gradients.part as u64];
        let on_its_way = |bytes: u64| ((left * bytes as f64) as u64).min(self.window(bytes));
        let stay = |bytes: u64| ((1.0 - left) * bytes as f64) as u64 + on_its_way(bytes);
        let (peak, gradients, copies) = if self.microbatches > 1 {
            let accumulators = if zero >= 2 { reduced } else { whole };
            let is_reduced = zero >= 2 && is_shared;
            let peak = self.peak(recompute, Gradients::Added { is_reduced }, index, zero);
            // Copies that live through the step: what is made of parameters, and gathered parameters.
            let bare = if zero >= 1 { storage.bare } else { 0.0 };
            let copies = if zero == 3 { storage.copied.part } else { storage.copied.whole + bare };
            (peak, stay(accumulators) + peak.gradients, copies)
        } else {
            let kept = if zero >= 1 { reduced as f64 / whole.max(1) as f64 } else { 1.0 };
            let peak = self.peak(recompute, Gradients::Kept((1.0 - left) * kept), index, zero);
            let on_its_way = on_its_way(if zero >= 1 { reduced } else { whole });
            (peak, peak.gradients + on_its_way, 0.0)
        };
        // Stages reduce behind the loop, when its activations are gone, what they do not reduce in it.
        let is_staged = self.stages > 1;
        let bucket = if is_shared && (!is_staged || zero >= 2) { self.bucket(whole) } else { 0 };
        // However few of the gradients are a stage's, as many wait on it to be reduced.
        let waiting = if is_shared && is_staged && zero >= 2 { self.waiting_in_loop(self.stages) } else { 0 };
        Memory {
            parameters: Bytes((storage.parameters.under(zero) + copies) as u64 + peak.copies),
            gradients: Bytes(gradients),
            optimizer: Bytes(storage.state.under(zero) as u64),
            activations: Bytes(peak.activations),
            buffers: Bytes(peak.gathered + bucket + waiting + self.largest_copy + peak.scratch + self.around.staged()),
            reserved: Bytes(0),
        }
    }

    /// Seconds of a step in which gradients are added up over microbatches: of memory, and of products that are
    /// instructions of their own for it.
    pub fn adding(&self, placed: &Placed<'_>, storage: usize, zero: u64) -> [f64; 2] {
        if self.microbatches > 1 && self.adds_parts(storage, zero) {
            // What is reduced in every microbatch is added up as a shard.
            let bytes = 3.0 * self.storages[storage].gradients.part * self.microbatches as f64;
            return [bytes / Machine::own(&placed.cluster.device).bandwidth(), 0.0];
        }
        self.adding.seconds(placed)
    }

    /// Which communication of data ranks there is.
    fn traffic<'a>(&self, placed: &Placed<'_>, storage: usize, zero: u64, again: &'a Selected<'a>) -> Traffic<'a> {
        let is_shared = self.storages[storage].ranks() > 1;
        Traffic {
            zero,
            reduces: is_shared,
            gathers: zero >= 1 && is_shared,
            drops: zero == 3 && is_shared,
            reduces_in_loop: zero >= 2,
            is_staged: placed.mesh.degree(Family::Pipeline) > 1,
            microbatches: self.microbatches,
            again,
        }
    }

    /// The seconds of that communication.
    fn times(&self, placed: &Placed<'_>, storage: usize) -> &Times {
        self.times[storage].get_or_init(|| self.around.times(&self.storages[storage], placed.cluster))
    }

    /// The communication of a step.
    fn shown(&self, placed: &Placed<'_>, storage: usize, zero: u64, again: &Selected<'_>) -> Shown {
        let traffic = self.traffic(placed, storage, zero, again);
        self.around.shown(&traffic, self.times(placed, storage), placed.cluster)
    }

    /// What data ranks say to each other beside the passes of each microbatch, where they do.
    pub fn within_passes(
        &self,
        placed: &Placed<'_>,
        (storage, zero): (usize, u64),
        recompute: Recompute,
    ) -> Option<Within> {
        let again = self.select(recompute);
        let traffic = self.traffic(placed, storage, zero, &again);
        self.around.within(&traffic, self.times(placed, storage), placed.cluster)
    }

    /// Seconds of a microbatch by which collectives of what is computed again show less than they take, beside the kernels
    /// of the backward pass, of a step of which so many seconds of communication show.
    pub fn hidden_again(
        &self,
        placed: &Placed<'_>,
        (storage, zero): (usize, u64),
        recompute: Recompute,
        Seconds(exposed): Seconds,
    ) -> f64 {
        let again = self.select(recompute).cost().communication;
        if again <= 0.0 {
            return 0.0;
        }
        let find = || self.shown(placed, storage, zero, &Selected::default()).shown + self.once_shown();
        let without = *lock(&self.bare).entry((storage, zero)).or_insert_with(find);
        (again - (exposed - without) / self.microbatches as f64).clamp(0.0, again)
    }

    /// Of what is done once, the communication that shows beside no weights' own.
    fn once_shown(&self) -> f64 {
        self.once.communication - self.turned
    }

    /// Time and memory of a step, with parameters stored in one of the ways; what room there is for it, who asks knows.
    pub fn predict(
        &self,
        placed: &Placed<'_>,
        storage: usize,
        zero: u64,
        recompute: Recompute,
        work: Work,
    ) -> Prediction {
        let cluster = placed.cluster;
        let (of, microbatches) = (&self.storages[storage], self.microbatches as f64);
        let is_shared = of.ranks() > 1;
        let selected = self.select(recompute);
        let again = selected.cost();
        let Shown { all: communication, shown, ordered } = self.shown(placed, storage, zero, &selected);
        let bandwidth = Machine::own(&cluster.device).bandwidth();
        let [adding, alone] = self.adding(placed, storage, zero);
        // Sums over ranks in another type: products write it, what was added up is cast, and back.
        let recast = match self.prepared.reduce_dtype.filter(|_| is_shared) {
            Some(_) if self.microbatches > 1 && zero < 2 => 1.5 * (of.gradients.whole + of.gradients.under(zero)),
            Some(_) if zero >= 2 => 1.5 * of.gradients.part * microbatches,
            Some(_) => 1.5 * of.gradients.under(zero),
            None => 0.0,
        };
        // What was added up over microbatches was made without zeros behind it.
        let [inner, outer] = of.uneven.map(|bytes| 2.0 * bytes);
        let filled = match zero {
            0 => 0.0,
            1 if self.microbatches > 1 => inner + outer,
            _ => inner * microbatches,
        };
        // What goes over the wire along an inner dimension is brought into order first.
        let turned: f64 = of.turned.values().sum();
        let turned = match zero {
            0 => 0.0,
            1 => turned,
            _ => turned * microbatches,
        };
        let (stored_once, update) =
            (of.once.under(zero) + (recast + filled) / bandwidth + turned, of.update.under(zero));
        let within = self.forward.matmul + self.backward.matmul + again.matmul;
        let matmul = within * microbatches + alone + self.once.matmul;
        let saved = if zero >= 1 { self.saved } else { 0.0 };
        let memory = (self.forward.memory + self.backward.memory + again.memory) * microbatches - saved;
        let memory_bound = memory + self.once.memory + stored_once + adding + ordered;
        // The loop sees weights that change their layout.
        let once = self.once_shown();
        let (communication, shown) = (communication + once, shown + once);
        let feed = self.around.feed() * microbatches;
        let busy = matmul + memory_bound + shown + update + feed;
        let step = busy.max(self.around.brought() * microbatches) * spread(cluster.ranks());
        Prediction {
            step: Seconds(step),
            matmul: Seconds(matmul),
            memory_bound: Seconds(memory_bound),
            exposed_communication: Seconds(shown),
            communication: Seconds(communication),
            optimizer: Seconds(update),
            bubble: Seconds(0.0),
            flops: work.flops,
            mfu: work.at_peak.0 / (step * cluster.ranks() as f64),
            memory: self.memory(storage, zero, recompute),
            room: Bytes(0),
            host: Bytes(0),
        }
    }
}
