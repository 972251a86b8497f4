//! What data ranks say to each other in every microbatch of a stage, as far as that shows.
//!
//! With ZeRO 3 each pass of a chunk gathers the weights that it reads, block by block and one block ahead; with ZeRO 2 and
//! 3 the pass that makes gradients of weights reduces them, bucket by bucket. A pass is done when all of that is, and
//! nothing of it runs beside the next ([`Program`](shardc_ir::Program)). So of each pass the first gather and the last
//! reduction show, and all that takes longer than the kernels beside it; and the passes of other stages wait for it as
//! for kernels.

use crate::pipeline::order::Lengths;

/// What goes over the wire beside the passes of a microbatch, of the whole model, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Within {
    /// Gathers of weights in the forward pass, and in the backward pass.
    pub gathers: [Wire; 2],
    /// Reductions of gradients of weights.
    pub reductions: Wire,
    /// By how much of the time of what is on the wire kernels beside it take longer.
    pub loss: f64,
    /// What of all that shows in a step without stages.
    pub shown: f64,
}

/// Collectives of one kind, which go over the wire one after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Wire {
    /// Seconds of all.
    all: f64,
    /// Of one, as most are.
    each: f64,
}

impl Wire {
    /// Those of so many seconds each.
    pub fn of(each: impl Iterator<Item = f64>) -> Self {
        let mut each: Vec<f64> = each.filter(|seconds| *seconds > 0.0).collect();
        each.sort_by(f64::total_cmp);
        Self { all: each.iter().sum(), each: each.get(each.len() / 2).copied().unwrap_or(0.0) }
    }
}

/// Of the parameters, the share that a chunk has; and those where it begins and where it ends, as large tables do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shares {
    pub all: f64,
    pub first: f64,
    pub last: f64,
}

/// What goes over a wire beside one pass of a chunk: in all, and of that, what no kernels are beside.
#[derive(Clone, Copy, Debug)]
struct Beside {
    all: f64,
    bare: f64,
}

impl Wire {
    /// Of a chunk, where the largest that is bare has such a share.
    fn of_chunk(&self, of: &Shares, largest: f64) -> Beside {
        let all = of.all * self.all;
        Beside { all, bare: self.each.max(largest * self.all).min(all) }
    }

    /// By how much one of such a share takes longer than most.
    fn longer(&self, share: f64) -> f64 {
        (share * self.all - self.each).max(0.0)
    }
}

impl Within {
    /// By how much longer each pass of a chunk takes.
    pub(super) fn longer(&self, kernels: Lengths, of: &Shares, splits_backward: bool) -> Lengths {
        let (Self { gathers: [ahead, back], reductions, .. }, Lengths { forward, backward, weight }) = (self, kernels);
        // What is read last is gathered while the block before it runs.
        let mut ahead_of = ahead.of_chunk(of, of.first);
        ahead_of.bare = (ahead_of.bare + ahead.longer(of.last)).min(ahead_of.all);
        let (mut back_of, reduced) = (back.of_chunk(of, of.last), reductions.of_chunk(of, of.first));
        if splits_backward {
            let [forward, backward] = [(forward, ahead_of), (backward, back_of)].map(|(work, of)| self.by(work, &[of]));
            return Lengths { forward, backward, weight: self.by(weight, &[reduced]) };
        }
        // What is reduced first lets the weights wait that are read next.
        if back_of.all > 0.0 {
            back_of.bare += reductions.longer(of.last);
        }
        let backward = self.by(backward + weight, &[back_of, reduced]);
        Lengths { forward: self.by(forward, &[ahead_of]), backward, weight: 0.0 }
    }

    /// By how much kernels of so many seconds take longer beside some collectives. Where the wire is busy throughout, those
    /// kernels are beside nothing that come before the first reduction, or behind the last gather, unless there are both.
    fn by(&self, work: f64, wires: &[Beside]) -> f64 {
        let wires = || wires.iter().filter(|wire| wire.all > 0.0);
        let [all, bare] = wires().fold([0.0; 2], |[all, bare], wire| [all + wire.all, bare + wire.bare]);
        let apart = if wires().count() == 1 { work * bare / all } else { 0.0 };
        if all > 0.0 { (bare + self.loss * (all - bare)).max(all + apart - work) } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: Shares = Shares { all: 1.0, first: 0.0, last: 0.0 };

    /// Eight collectives of a second each.
    fn within() -> Within {
        let wire = Wire::of([1.0; 8].into_iter());
        Within { gathers: [Wire::default(); 2], reductions: wire, loss: 0.0, shown: 0.0 }
    }

    #[test]
    fn the_last_reduction_shows_and_what_kernels_are_too_short_for() {
        let kernels = |weight: f64| Lengths { forward: 10.0, backward: 10.0, weight };
        let weight = |seconds: f64, share: f64| {
            within().longer(kernels(seconds), &Shares { all: share, first: 0.0, last: 0.0 }, true).weight
        };
        assert_eq!(weight(100.0, 1.0), 1.0);
        // The first is issued when an eighth of the kernels is done.
        assert_eq!(weight(4.0, 1.0), 8.0 + 0.5 - 4.0);
        // A chunk with less than a bucket reduces that.
        assert_eq!(weight(100.0, 0.0625), 0.5);
        assert_eq!(weight(100.0, 0.0), 0.0);
        // A table that begins the chunk is reduced last.
        let of_table = within().longer(kernels(100.0), &Shares { first: 0.375, ..WHOLE }, true);
        assert_eq!(of_table.weight, 3.0);
    }

    #[test]
    fn a_whole_backward_pass_hides_more_than_that_of_weights() {
        let kernels = Lengths { forward: 4.0, backward: 4.0, weight: 4.0 };
        let whole = within().longer(kernels, &WHOLE, false);
        assert_eq!((whole.forward, whole.backward, whole.weight), (0.0, 1.0, 0.0));
        let split = within().longer(kernels, &WHOLE, true);
        assert_eq!((split.forward, split.backward, split.weight), (0.0, 0.0, 4.5));
    }

    #[test]
    fn gathers_and_reductions_share_a_wire() {
        let wire = Wire::of([1.0; 4].into_iter());
        let within = Within { gathers: [wire; 2], reductions: wire, loss: 0.1, shown: 0.0 };
        let kernels = |seconds: f64| Lengths { forward: seconds, backward: seconds, weight: 0.0 };
        let long = within.longer(kernels(100.0), &WHOLE, false);
        assert_eq!((long.forward, long.backward), (1.0 + 0.1 * 3.0, 2.0 + 0.1 * 6.0));
        assert_eq!(within.longer(kernels(5.0), &WHOLE, false).backward, 8.0 - 5.0);
        // A head is gathered while the block before it runs, and first of all on the way back.
        let head = within.longer(kernels(100.0), &Shares { last: 0.5, ..WHOLE }, false);
        assert_eq!((head.forward, head.backward), (2.0 + 0.1 * 2.0, 4.0 + 0.1 * 4.0));
    }
}
