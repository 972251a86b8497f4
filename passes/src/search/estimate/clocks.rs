//! Two clocks: that of a rank's kernels, and that of its wire.
//!
//! Collectives go over the wire one after the other, in the order in which they are issued. Kernels run on beside
//! them, slower by the share of the device that collectives take ([`overlap_loss`](crate::cluster::Profile)), and
//! wait where they read what one of them brings. That is what the simulation of programs does
//! ([`crate::simulate`]), without programs.

use crate::allocate::WINDOW;

/// A value whose layout along the tensor axes changes.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::search) struct Meeting {
    /// When it begins: after so many seconds of the stretch's kernels.
    pub at: f64,
    /// Seconds of kernels from there to its first reader.
    pub slack: f64,
    /// Seconds of kernels since the value was made, of one that is issued where it is read.
    pub since: f64,
    /// Seconds of its collectives.
    pub seconds: f64,
    /// Of kernels that bring into order what goes over the wire, and what it brings.
    pub before: f64,
    pub after: f64,
    /// Whether a kernel does it, and nobody is met.
    pub is_local: bool,
    /// How many of the stretch's nodes come before it.
    pub node: usize,
    /// The node with which it is done again: the one that reads the value, of terms and of a copy that several read
    /// the one that makes them.
    pub own: usize,
    /// Whether several nodes read the copy, some of them in the other pass.
    pub is_shared: bool,
}

/// What is read later.
#[derive(Clone, Copy, Debug)]
struct Awaited {
    /// How far kernels come before.
    at: f64,
    /// When it has arrived.
    arrival: f64,
    /// Seconds in which kernels bring it into order then.
    after: f64,
}

/// Where the clocks of a microbatch stand.
#[derive(Debug, Default)]
pub(in crate::search) struct Clocks {
    /// When the kernels that were started are done.
    pub now: f64,
    /// When the wire is free.
    free: f64,
    /// What kernels lose while the wire is busy, and how many times as long they take then.
    loss: f64,
    slowed: f64,
    /// Seconds of the kernels so far.
    pub done: f64,
    /// Beside them, of those that brought into order what changes its layout.
    pub ordered: f64,
    /// Seconds of the collectives so far.
    pub carried: f64,
    /// When the latest reductions end, up to the one whose memory is used again.
    ends: [f64; 1 + WINDOW],
    /// What is read later.
    awaited: Vec<Awaited>,
}

impl Clocks {
    /// At the beginning of a microbatch.
    pub fn new(loss: f64) -> Self {
        let loss = loss.clamp(0.0, 0.99);
        Self { loss, slowed: 1.0 / (1.0 - loss), ..Self::default() }
    }

    /// Runs kernels of so many seconds, which wait for nothing.
    fn go(&mut self, seconds: f64) {
        if self.free <= self.now {
            self.now += seconds;
            return;
        }
        let beside = self.free - self.now;
        let [alone, slowed] = [seconds - beside * (1.0 - self.loss), seconds * self.slowed];
        self.now += if beside < slowed { beside + alone } else { slowed };
    }

    /// Runs kernels up to so many seconds of them.
    fn come(&mut self, to: f64) {
        self.go((to - self.done).max(0.0));
        self.done = self.done.max(to);
    }

    /// Runs kernels that bring something into order.
    fn order(&mut self, seconds: f64) {
        self.go(seconds);
        self.ordered += seconds;
    }

    /// Runs kernels until so many seconds of them are done; on their way they wait for what they read.
    pub fn run(&mut self, until: f64) {
        while !self.awaited.is_empty() {
            let due = self.awaited.iter().enumerate().filter(|(_, of)| of.at <= until);
            let Some((index, _)) = due.min_by(|a, b| a.1.at.total_cmp(&b.1.at)) else { break };
            let Awaited { at, arrival, after } = self.awaited.remove(index);
            self.come(at);
            self.wait(arrival);
            self.order(after);
        }
        self.come(until);
    }

    /// Lets kernels wait for what arrives at a moment; whatever arrives before is there as well.
    pub fn wait(&mut self, arrival: f64) {
        self.now = self.now.max(arrival);
        self.awaited.retain(|of| of.arrival > arrival || of.after > 0.0);
    }

    /// Puts a collective on the wire; gives when it has arrived.
    pub fn carry(&mut self, seconds: f64) -> f64 {
        if seconds > 0.0 {
            self.free = self.free.max(self.now) + seconds;
            self.carried += seconds;
        }
        self.free
    }

    /// Reduces gradients in memory that is used again: of the latest reductions alone the allocator keeps it, so
    /// these gradients lie where those before them did.
    pub fn reduce(&mut self, seconds: f64) {
        self.wait(self.ends[0]);
        self.ends.rotate_left(1);
        self.ends[WINDOW] = self.carry(seconds);
    }

    /// Converts a value that kernels have made, and which they read `meeting.slack` seconds of kernels later.
    pub fn meet(&mut self, meeting: &Meeting) {
        self.order(meeting.before);
        if !meeting.is_local && !self.bring(meeting) {
            return;
        }
        self.order(meeting.after);
    }

    /// Lets the wire bring a value; whether it is there. One that is issued where it is read was on the wire since it
    /// was made, or since the wire was free.
    fn bring(&mut self, meeting: &Meeting) -> bool {
        if meeting.since > 0.0 {
            let begin = self.free.max(self.now - meeting.since);
            self.free = begin + meeting.seconds;
            self.carried += meeting.seconds;
            let slowed = if begin < self.now { meeting.seconds * self.loss } else { 0.0 };
            self.wait(self.free.max(self.now + slowed));
            return true;
        }
        let arrival = self.carry(meeting.seconds);
        if meeting.slack > 0.0 {
            self.awaited.push(Awaited { at: self.done + meeting.slack, arrival, after: meeting.after });
            return false;
        }
        self.wait(arrival);
        true
    }

    /// When kernels and wire are done.
    pub fn end(&self) -> f64 {
        self.now.max(self.free)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meeting(slack: f64, seconds: f64) -> Meeting {
        Meeting { slack, seconds, ..Meeting::default() }
    }

    #[test]
    fn kernels_go_on_slower_beside_the_wire_and_wait_for_what_they_read() {
        let mut clocks = Clocks::new(0.5);
        clocks.run(1.0);
        clocks.meet(&meeting(1.0, 4.0));
        // A second of kernels takes two beside the wire; then they wait until it is over.
        clocks.run(3.0);
        assert_eq!((clocks.now, clocks.end()), (6.0, 6.0));
        // What is read at once shows in full.
        clocks.meet(&meeting(0.0, 1.0));
        clocks.run(4.0);
        assert_eq!((clocks.now, clocks.carried), (8.0, 5.0));
    }

    #[test]
    fn what_is_issued_where_it_is_read_was_on_its_way_since_it_was_made() {
        let mut clocks = Clocks::new(0.5);
        clocks.run(4.0);
        // Two seconds of the wire take one second of kernels away from the four before.
        clocks.meet(&Meeting { since: 4.0, ..meeting(0.0, 2.0) });
        assert_eq!((clocks.now, clocks.free, clocks.carried), (5.0, 2.0, 2.0));
        // It waits for what is on the wire.
        clocks.carry(3.0);
        clocks.meet(&Meeting { since: 1.0, ..meeting(0.0, 2.0) });
        assert_eq!((clocks.now, clocks.carried), (10.0, 7.0));
    }

    #[test]
    fn kernels_bring_into_order_what_goes_over_the_wire_and_what_it_brings() {
        let mut clocks = Clocks::new(0.5);
        clocks.run(1.0);
        clocks.meet(&Meeting { before: 1.0, after: 2.0, ..meeting(1.0, 2.0) });
        // Until the value is read nothing has to be in order.
        assert_eq!((clocks.now, clocks.ordered), (2.0, 1.0));
        clocks.run(2.0);
        assert_eq!((clocks.now, clocks.done, clocks.ordered, clocks.carried), (6.0, 2.0, 3.0, 2.0));
        clocks.meet(&Meeting { is_local: true, after: 1.0, ..Meeting::default() });
        assert_eq!((clocks.now, clocks.ordered), (7.0, 4.0));
    }

    #[test]
    fn collectives_queue() {
        let mut clocks = Clocks::new(0.0);
        clocks.carry(3.0);
        clocks.meet(&meeting(1.0, 2.0));
        clocks.run(2.0);
        assert_eq!(clocks.now, 6.0);
        // Gradients are made where those were that were reduced some time ago.
        (0..=WINDOW).for_each(|_| clocks.reduce(1.0));
        assert_eq!(clocks.now, 6.0);
        clocks.reduce(1.0);
        assert_eq!(clocks.now, 7.0);
    }
}
