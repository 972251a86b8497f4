//! The two clocks on their way through the stretches of one microbatch.
//!
//! The order of events is that of the [schedule](crate::schedule): weights are gathered a stretch ahead, collectives of
//! the tensor axes go where their values are made or read, and gradients are reduced bucket by bucket beside both.

use super::{Bucket, Here, Loop, Shown, Stretch, Times, Traffic};
use crate::cluster::Cluster;
use crate::schedule::SMALL;
use crate::search::estimate::clocks::{Clocks, Meeting};
use crate::search::estimate::turns::{Reads, Turned};
use std::collections::VecDeque;
use std::iter::{Peekable, Zip};
use std::slice::Iter;

impl Loop {
    /// The communication of a microbatch.
    pub(super) fn microbatch(&self, traffic: &Traffic<'_>, times: &Times, here: Here, cluster: &Cluster) -> Shown {
        let (gathered, ordered) = self.read(traffic, times, here);
        let mut walk = Walk::new(self, traffic, here, times, &gathered, cluster);
        walk.gather_next();
        walk.clocks.wait(self.feed);
        for index in 0..self.stretches.len() {
            let of = |seconds: &[f64]| seconds.get(index).copied().unwrap_or(0.0);
            walk.pass(index, of(&gathered), of(&ordered));
        }
        walk.buckets.by_ref().for_each(|(_, seconds)| _ = walk.clocks.carry(*seconds));
        let clocks = walk.clocks;
        let shown = (clocks.end() - clocks.done - clocks.ordered - self.feed).max(0.0);
        Shown { all: clocks.carried, shown, ordered: ordered.iter().sum::<f64>() + clocks.ordered }
    }

    /// Per stretch, what bringing its weights takes: seconds of the wire, and of the kernels that bring into order what
    /// comes over it. Empty where no weights are brought.
    pub(super) fn read(&self, traffic: &Traffic<'_>, times: &Times, here: Here) -> (Vec<f64>, Vec<f64>) {
        let which = |stretch: &Stretch| match stretch.block {
            _ if !traffic.drops => 0,
            Some(block) if stretch.again.iter().any(|class| traffic.again.is_again(block, *class)) => 2,
            _ => 1,
        };
        let of = |(index, stretch): (usize, &Stretch)| {
            let which = which(stretch);
            let Reads { ordered, turned: Turned { turn, .. }, .. } = stretch.reads[which];
            let when = |is_here, seconds| if is_here { seconds } else { 0.0 };
            let wire = when(here.gathers, times.gather[which][index]) + when(here.turns, turn.wire);
            (wire, when(here.gathers, ordered) + when(here.turns, turn.before + turn.after))
        };
        self.stretches.iter().enumerate().filter(|_| here.gathers || here.turns).map(of).unzip()
    }

    /// Whether a stretch begins with collectives: its own, or those with which its block is computed again.
    fn begins_with_others(&self, stretch: usize, traffic: &Traffic<'_>) -> bool {
        let Some(stretch) = self.stretches.get(stretch).filter(|stretch| stretch.is_backward) else { return false };
        match stretch.way(traffic.again) {
            Some(way) => way.cost.communication > 0.0,
            None => stretch.leading() > 0,
        }
    }
}

/// What happens beside the kernels of a stretch. Of what happens at one moment, this is the order.
#[derive(Clone, Copy)]
enum Event {
    /// A collective of the tensor axes begins.
    Meeting,
    /// The next weights are gathered.
    Gather,
    /// A bucket of gradients closes.
    Bucket,
}

/// Where a microbatch stands: its clocks, and what is still to go over the wire.
struct Walk<'a> {
    all: &'a Loop,
    traffic: &'a Traffic<'a>,
    clocks: Clocks,
    /// Whether data ranks use the wire too: their collectives come before what is issued where it is read.
    is_shared: bool,
    /// Seconds of the gathers of weights that are not issued yet, in order.
    gathers: Peekable<std::vec::IntoIter<f64>>,
    /// When those arrive that are issued.
    arrivals: VecDeque<f64>,
    /// Whether the current stretch still has to issue the next gather.
    gathers_next: bool,
    /// The buckets that are not closed yet, in order, with the seconds of their reductions.
    buckets: Peekable<Zip<Iter<'a, Bucket>, Iter<'a, f64>>>,
    /// Seconds of closed buckets that let the collectives pass with which the next stretch begins.
    waiting: Vec<f64>,
}

impl<'a> Walk<'a> {
    /// At the beginning. `gathered` has the seconds of each stretch's gathers.
    fn new(
        all: &'a Loop,
        traffic: &'a Traffic<'a>,
        here: Here,
        times: &'a Times,
        gathered: &[f64],
        cluster: &Cluster,
    ) -> Self {
        let gathers: Vec<f64> = gathered.iter().copied().filter(|seconds| *seconds > 0.0).collect();
        let buckets = if here.reduces { &all.buckets[..] } else { &[] };
        Self {
            all,
            traffic,
            clocks: Clocks::new(cluster.device.overlap_loss.value),
            is_shared: here.gathers || here.reduces,
            gathers: gathers.into_iter().peekable(),
            arrivals: VecDeque::new(),
            gathers_next: false,
            buckets: buckets.iter().zip(times.reduction(traffic)).peekable(),
            waiting: Vec::new(),
        }
    }

    /// Issues the next gather; after a small one (a norm's), whose memory holds nothing back, those after it as well.
    fn gather_next(&mut self) {
        while let Some(seconds) = self.gathers.next() {
            self.arrivals.push_back(self.clocks.carry(seconds));
            if self.gathers.peek().is_none_or(|after| seconds > SMALL * after) {
                break;
            }
        }
    }

    /// Issues the next gather if this stretch has not yet.
    fn gather_if_due(&mut self) {
        if std::mem::take(&mut self.gathers_next) {
            self.gather_next();
        }
    }

    fn reduce(&mut self, seconds: f64) {
        match self.traffic.zero {
            // What is reduced in place gives no memory back.
            0 => _ = self.clocks.carry(seconds),
            _ => self.clocks.reduce(seconds),
        }
    }

    /// Reduces the buckets that let others pass.
    fn release(&mut self) {
        for seconds in std::mem::take(&mut self.waiting) {
            self.reduce(seconds);
        }
    }

    /// Passes a stretch, whose weights take so many seconds to gather and, once they are there, to bring into order.
    fn pass(&mut self, index: usize, gathered: f64, ordered: f64) {
        let stretch = &self.all.stretches[index];
        self.gathers_next = false;
        if gathered > 0.0 {
            // The weights that come next are gathered where the last ones are read.
            self.clocks.wait(self.arrivals.pop_front().unwrap_or(0.0));
            self.gathers_next = self.arrivals.is_empty();
        }
        // What is computed again reads the weights first.
        let mut later = self.recompute(stretch);
        let mut leading = if stretch.way(self.traffic.again).is_some() { 0 } else { stretch.leading() };
        if leading == 0 {
            self.release();
        }
        // The next weights are on their way while kernels bring these into order, if no collective comes before them.
        if stretch.fetch <= 0.0 && stretch.meetings.first().is_none_or(|meeting| meeting.at > 0.0) {
            self.gather_if_due();
        }
        self.clocks.run(self.clocks.done + ordered);
        let start = self.clocks.done;
        let mut meetings = stretch.meetings.iter().peekable();
        while let Some((at, event)) = self.next(index, meetings.peek().copied()) {
            self.clocks.run(start + at);
            match event {
                Event::Meeting => {
                    let Some(meeting) = meetings.next() else { break };
                    let since = if self.is_shared { 0.0 } else { meeting.since };
                    self.clocks.meet(&Meeting { since, ..*meeting });
                    // What is read here at once comes before what is read later.
                    self.clocks.carry(if meeting.is_local { 0.0 } else { std::mem::take(&mut later) });
                    leading = leading.saturating_sub(1);
                    if leading == 0 {
                        self.release();
                    }
                }
                Event::Gather => self.gather_if_due(),
                Event::Bucket => {
                    let Some((bucket, seconds)) = self.buckets.next() else { break };
                    match bucket.is_open && self.all.begins_with_others(index + 1, self.traffic) {
                        true => self.waiting.push(*seconds),
                        false => self.reduce(*seconds),
                    }
                }
            }
        }
        self.clocks.carry(later);
        self.clocks.run(start + stretch.seconds);
    }

    /// What comes next in a stretch, and after how many seconds of its kernels, if `meeting` is the next one.
    fn next(&mut self, index: usize, meeting: Option<&Meeting>) -> Option<(f64, Event)> {
        let stretch = &self.all.stretches[index];
        let closes = |bucket: &Bucket| match bucket.stretch.cmp(&index) {
            std::cmp::Ordering::Less => Some(0.0),
            std::cmp::Ordering::Equal => Some(bucket.at).filter(|at| *at <= stretch.seconds),
            std::cmp::Ordering::Greater => None,
        };
        let meets = meeting.map(|meeting| (meeting.at, Event::Meeting));
        let gathers = self.gathers_next.then_some((stretch.fetch, Event::Gather));
        let closes = self.buckets.peek().and_then(|(bucket, _)| closes(bucket)).map(|at| (at, Event::Bucket));
        [meets, gathers, closes].into_iter().flatten().min_by(|a, b| a.0.total_cmp(&b.0))
    }

    /// Computes again what the backward pass of a stretch's block reads, with the collectives of its forward pass. The
    /// next weights are gathered behind the first of these, and buckets that let them pass are reduced before the first
    /// product. Gives the seconds of the collectives whose results the backward pass reads later.
    fn recompute(&mut self, stretch: &Stretch) -> f64 {
        let mut later = 0.0;
        let again = self.traffic.again;
        let Some((block, way)) = stretch.block.zip(stretch.way(again)) else { return later };
        if way.cost.communication <= 0.0 {
            self.gather_if_due();
            self.clocks.run(self.clocks.done + way.cost.seconds());
            return later;
        }
        let all = self.all;
        let forward = || all.stretches.iter().filter(|of| !of.is_backward && of.block == stretch.block);
        let is_again =
            |of: &Stretch, node: usize| of.nodes.get(node).is_some_and(|(class, ..)| again.is_again(block, *class));
        // Terms that were added in the forward pass are there as a sum; a copy of several readers is waited for where
        // one of them is computed again.
        let is_read = |of: &Stretch, meeting: &Meeting| match meeting.is_shared {
            true => is_again(of, meeting.node),
            false => is_again(of, meeting.own),
        };
        if !forward().any(|of| of.meetings.iter().any(|meeting| !meeting.is_local && is_read(of, meeting))) {
            self.gather_if_due();
        }
        for of in forward() {
            let mut meetings = of.meetings.iter().peekable();
            for (index, (_, seconds, is_product)) in of.nodes.iter().enumerate() {
                while let Some(meeting) = meetings.next_if(|meeting| meeting.node <= index) {
                    if is_read(of, meeting) {
                        self.clocks.meet(&Meeting { slack: 0.0, since: 0.0, ..*meeting });
                        if !meeting.is_local {
                            self.gather_if_due();
                        }
                    } else if is_again(of, meeting.own) {
                        later += meeting.seconds;
                        self.clocks.meet(&Meeting { is_local: true, ..*meeting });
                    }
                }
                if is_again(of, index) {
                    if *is_product {
                        self.release();
                    }
                    self.clocks.run(self.clocks.done + *seconds);
                }
            }
        }
        self.gather_if_due();
        later
    }
}
