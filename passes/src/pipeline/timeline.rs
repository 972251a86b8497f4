//! When every stage runs its steps and exchanges messages.
//!
//! Messages pass beside the steps of both ends, on a stream of their own, one at a time at each end. What a stage's
//! next step reads is handed over as soon as it is made, while the sender goes on to its next step and the receiver is
//! in the middle of another step, or waits.
//!
//! Stages that meet in different orders would wait for ever. So the hand-overs are those of one run of all stages
//! together, in which each starts its next step as soon as it has what the step reads. All stages meet in the order of
//! that one run, so they cannot deadlock, however long their steps really take.

use super::agenda::Agenda;
use super::order::{Pass, Step};
use shardc_ir::Pipeline;

/// Something that one pass of a chunk makes and a pass of a chunk of another stage reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Link {
    /// Who makes it.
    pub from: (u32, Pass),
    /// Who reads it.
    pub to: (u32, Pass),
}

/// One end of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Message {
    /// The index of its link.
    pub link: usize,
    /// The microbatch.
    pub microbatch: u64,
    /// The other stage.
    pub peer: u64,
    /// Whether this stage sends it.
    pub is_send: bool,
}

/// A message that passes in the middle of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Beside {
    /// The message.
    pub message: Message,
    /// Where in the step, in parts of [`PARTS`].
    pub at: u32,
}

/// The parts of a step that [`Beside::at`] counts.
pub const PARTS: u32 = 8;

/// What a stage does next.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// It runs a step, and exchanges messages beside it.
    Step(Step, Vec<Beside>),
    /// It exchanges messages, one after the other.
    Exchange(Vec<Message>),
}

/// How long things take, all in one unit: seconds, or what stands for them.
pub trait Durations {
    /// How long a pass of a chunk takes.
    fn pass(&self, chunk: u32, pass: Pass) -> f64;
    /// How long a message of a link takes, by its index.
    fn message(&self, link: usize) -> f64;
    /// By how much of its own time a message makes a step longer beside which it passes.
    fn loss(&self) -> f64 {
        0.0
    }
}

/// What all stages do.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// Per stage, in order.
    pub events: Vec<Vec<Event>>,
    /// Per stage, when it is done, in the unit of the [`Durations`].
    pub finish: Vec<f64>,
}

#[derive(Clone, Copy, Default)]
struct Stage {
    next: usize,
    /// When it is between two steps again.
    free: f64,
    /// When no message passes from it or to it any more.
    silent: f64,
    /// Whether a message that was made waits for that.
    is_awaited: bool,
    /// Since when it runs the step before the next, if it does.
    running: Option<f64>,
    /// How many messages were made for it and not handed over.
    pending: u32,
}

/// The messages of a link, which come one microbatch after the other: passes run in that order.
struct Wire {
    from: usize,
    to: usize,
    /// How long one takes.
    takes: f64,
    /// How many were made.
    made: u64,
    /// How many of them were handed over.
    received: u64,
}

/// Links by the pass of a chunk that has them.
struct ByPass {
    /// Per pass, where its links begin.
    begins: Vec<usize>,
    links: Vec<usize>,
}

impl ByPass {
    /// The passes of all links.
    fn new(all: impl Iterator<Item = (u32, Pass)>) -> Self {
        let mut sorted: Vec<(usize, usize)> = all.map(Self::index).zip(0..).collect();
        sorted.sort_unstable();
        let passes = sorted.last().map_or(0, |(last, _)| last + 1);
        let begins = (0..=passes).map(|pass| sorted.partition_point(|(of, _)| *of < pass)).collect();
        Self { begins, links: sorted.into_iter().map(|(_, link)| link).collect() }
    }

    fn index((chunk, pass): (u32, Pass)) -> usize {
        3 * chunk as usize + pass as usize
    }

    fn of(&self, step: Step) -> &[usize] {
        let index = Self::index((step.chunk, step.pass));
        match self.begins.get(index..index + 2) {
            Some([begin, end]) => &self.links[*begin..*end],
            _ => &[],
        }
    }
}

struct Run<'a> {
    orders: &'a [Vec<Step>],
    /// Per chunk, how long its passes take.
    passes: Vec<[f64; 3]>,
    /// By how much of its own time a message makes a step longer.
    loss: f64,
    /// Per pass of a chunk, the links that it reads, and those that it makes.
    reads: ByPass,
    makes: ByPass,
    wires: Vec<Wire>,
    /// Per stage, those to which it sends.
    receivers: Vec<Vec<usize>>,
    stages: Vec<Stage>,
    /// When stages are between two steps again, then when they are silent where that is awaited.
    awake: Agenda,
    /// What of this is so at this moment, and the stages for which something is new then.
    woken: Vec<usize>,
    touched: Vec<usize>,
    /// Per stage, if they are wanted.
    events: Option<Vec<Vec<Event>>>,
    now: f64,
}

/// Runs the orders of all stages; `links` are those between different stages. Nothing if the steps wait
/// for each other in a circle, which those of [`orders`](super::order::orders) do not.
pub fn timeline(
    pipeline: &Pipeline,
    orders: &[Vec<Step>],
    links: &[Link],
    durations: &dyn Durations,
) -> Option<Timeline> {
    let run = Run::of(pipeline, orders, links, durations, true)?;
    let finish = run.stages.iter().map(|stage| stage.free).collect();
    Some(Timeline { events: run.events.unwrap_or_default(), finish })
}

/// When the last stage of a [`timeline`] is done.
pub fn finish(pipeline: &Pipeline, orders: &[Vec<Step>], links: &[Link], durations: &dyn Durations) -> Option<f64> {
    let run = Run::of(pipeline, orders, links, durations, false)?;
    Some(run.stages.iter().map(|stage| stage.free).fold(0.0, f64::max))
}

impl<'a> Run<'a> {
    /// All of it, from the beginning to the end.
    fn of(
        pipeline: &Pipeline,
        orders: &'a [Vec<Step>],
        links: &[Link],
        durations: &dyn Durations,
        is_recorded: bool,
    ) -> Option<Self> {
        let stages = orders.len() as u64;
        let stage = |chunk: u32| pipeline.stage_of(chunk, stages) as usize;
        let wire = |(index, link): (usize, &Link)| {
            let (from, to) = (stage(link.from.0), stage(link.to.0));
            Wire { from, to, takes: durations.message(index), made: 0, received: 0 }
        };
        let wires: Vec<Wire> = links.iter().enumerate().map(wire).collect();
        let mut receivers = vec![Vec::new(); orders.len()];
        for Wire { from, to, .. } in &wires {
            if !receivers[*from].contains(to) {
                receivers[*from].push(*to);
            }
        }
        let chunks = 0..(stages * pipeline.per_stage) as u32;
        let of_chunk = |chunk| Pass::ALL.map(|pass| durations.pass(chunk, pass));
        let mut run = Run {
            orders,
            passes: chunks.map(of_chunk).collect(),
            loss: durations.loss(),
            reads: ByPass::new(links.iter().map(|link| link.to)),
            makes: ByPass::new(links.iter().map(|link| link.from)),
            wires,
            receivers,
            stages: (0..stages).map(|_| Stage::default()).collect(),
            awake: Agenda::new(2 * orders.len()),
            woken: Vec::new(),
            touched: Vec::new(),
            events: is_recorded.then(|| vec![Vec::new(); orders.len()]),
            now: 0.0,
        };
        (0..orders.len()).for_each(|stage| run.awake.set(stage, 0.0));
        while run.advance() {}
        let is_done = |(stage, steps): (&Stage, &Vec<Step>)| stage.next == steps.len();
        let has_passed = |of: &Wire| of.received == of.made;
        (run.stages.iter().zip(orders).all(is_done) && run.wires.iter().all(has_passed)).then_some(run)
    }

    /// Goes on to the next moment at which a stage is between two steps, or silent where that is awaited, and does what can be
    /// done then; whether there was one. Only for these stages, and for those that wait for what they made, something is
    /// other than before.
    fn advance(&mut self) -> bool {
        let (mut woken, mut touched) = (std::mem::take(&mut self.woken), std::mem::take(&mut self.touched));
        woken.clear();
        touched.clear();
        let Some(now) = self.awake.next(&mut woken) else { return false };
        self.now = now;
        for what in woken.iter().copied() {
            let Some(from) = what.checked_sub(self.stages.len()) else {
                touched.push(what);
                if self.stages[what].running.take().is_some() {
                    for link in self.makes.of(self.orders[what][self.stages[what].next - 1]) {
                        let Wire { to, made, .. } = &mut self.wires[*link];
                        *made += 1;
                        self.stages[*to].pending += 1;
                        touched.push(*to);
                    }
                }
                continue;
            };
            self.stages[from].is_awaited = false;
            touched.push(from);
            touched.extend(&self.receivers[from]);
        }
        touched.sort_unstable();
        touched.dedup();
        // What begins now does so before messages pass, which are beside it then; who waits for one comes first.
        loop {
            touched.iter().for_each(|stage| self.start(*stage));
            let mut receives = |waits: bool| {
                let is_next = |of: &Stage| of.running.is_none() == waits;
                touched.iter().any(|stage| is_next(&self.stages[*stage]) && self.receive(*stage))
            };
            if !receives(true) && !receives(false) {
                break;
            }
        }
        (self.woken, self.touched) = (woken, touched);
        true
    }

    /// Hands over one message that a stage's next step needs, if it was made and none passes at either end; else one end
    /// is awaited.
    fn receive(&mut self, to: usize) -> bool {
        if self.stages[to].pending == 0 {
            return false;
        }
        let Some(step) = self.orders[to].get(self.stages[to].next).copied() else { return false };
        let Self { reads, wires, stages, awake, now, .. } = self;
        let count = stages.len();
        let is_made = |of: &Wire| of.received <= step.microbatch && of.made > step.microbatch;
        let mut may_pass = |stage: usize| {
            let Stage { silent, is_awaited, .. } = &mut stages[stage];
            let is_silent = *silent <= *now;
            if !is_silent && !*is_awaited {
                *is_awaited = true;
                awake.set(count + stage, *silent);
            }
            is_silent
        };
        let mut made = reads.of(step).iter().copied().filter(|link| is_made(&wires[*link]));
        let Some(link) = made.find(|link| may_pass(to) && may_pass(wires[*link].from)) else { return false };
        let from = wires[link].from;
        wires[link].received += 1;
        stages[to].pending -= 1;
        for (stage, peer, is_send) in [(from, to, true), (to, from, false)] {
            self.pass(stage, Message { link, microbatch: step.microbatch, peer: peer as u64, is_send });
        }
        true
    }

    /// One end of a message that passes from now on: beside the step that the stage runs, or it waits for it.
    fn pass(&mut self, stage: usize, message: Message) {
        let takes = self.wires[message.link].takes;
        let (own, end) = (&mut self.stages[stage], self.now + takes);
        let free = match own.running {
            Some(since) => {
                let share = (self.now - since) / (own.free - since).max(f64::MIN_POSITIVE);
                let beside = Beside { message, at: (share * f64::from(PARTS)) as u32 };
                if let Some(Event::Step(_, all)) = self.events.as_mut().and_then(|events| events[stage].last_mut()) {
                    all.push(beside);
                }
                end.max(own.free + self.loss * takes)
            }
            None => {
                self.exchange(stage, message);
                end
            }
        };
        let own = &mut self.stages[stage];
        (own.free, own.silent) = (free, end);
        self.awake.set(stage, free);
    }

    fn exchange(&mut self, stage: usize, message: Message) {
        let Some(events) = &mut self.events else { return };
        match events[stage].last_mut() {
            Some(Event::Exchange(messages)) => messages.push(message),
            _ => events[stage].push(Event::Exchange(vec![message])),
        }
    }

    /// Starts the next step of a stage, if it has all that the step reads.
    fn start(&mut self, index: usize) {
        let stage = &mut self.stages[index];
        if stage.running.is_some() || stage.free > self.now {
            return;
        }
        let Some(step) = self.orders[index].get(stage.next).copied() else { return };
        if self.reads.of(step).iter().any(|link| self.wires[*link].received <= step.microbatch) {
            return;
        }
        stage.free = self.now + self.passes[step.chunk as usize][step.pass as usize];
        stage.next += 1;
        stage.running = Some(self.now);
        self.awake.set(index, stage.free);
        if let Some(events) = &mut self.events {
            events[index].push(Event::Step(step, Vec::new()));
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::order::{Lengths, orders};
    use super::*;
    use shardc_ir::pipeline::Schedule;

    /// The links of a chain of chunks.
    pub(in crate::pipeline) fn chain(pipeline: &Pipeline, stages: u64) -> Vec<Link> {
        let chunks = (stages * pipeline.per_stage) as u32;
        let apart = |link: &Link| pipeline.stage_of(link.from.0, stages) != pipeline.stage_of(link.to.0, stages);
        let pairs = (1..chunks).flat_map(|chunk| {
            let forward = Link { from: (chunk - 1, Pass::Forward), to: (chunk, Pass::Forward) };
            [forward, Link { from: (chunk, Pass::Backward), to: (chunk - 1, Pass::Backward) }]
        });
        pairs.filter(apart).collect()
    }

    /// Forward passes of one unit, backward passes of two, and messages that take no time.
    struct Units;

    impl Durations for Units {
        fn pass(&self, _: u32, pass: Pass) -> f64 {
            if pass == Pass::Backward { 2.0 } else { 1.0 }
        }

        fn message(&self, _: usize) -> f64 {
            0.0
        }
    }

    /// Passes of zero-bubble V whose chunks are as long as each other, and messages that take no time.
    pub(in crate::pipeline) struct Parts(pub Lengths);

    impl Durations for Parts {
        fn pass(&self, chunk: u32, pass: Pass) -> f64 {
            self.0.of(Schedule::ZeroBubbleV, chunk, pass)
        }
        fn message(&self, _: usize) -> f64 {
            0.0
        }
    }

    /// Passes of one unit each.
    struct Ones;

    impl Durations for Ones {
        fn pass(&self, _: u32, _: Pass) -> f64 {
            1.0
        }
        fn message(&self, _: usize) -> f64 {
            0.0
        }
    }

    fn finish(schedule: Schedule, per_stage: u64, microbatches: u64, durations: &dyn Durations) -> f64 {
        let pipeline = Pipeline { schedule, per_stage, ..Pipeline::default() };
        let of = |pass: Pass| durations.pass(1, pass);
        let lengths = Lengths { forward: of(Pass::Forward), backward: of(Pass::Backward), weight: of(Pass::Weight) };
        let orders = orders(&pipeline, 4, microbatches, &|_| lengths).unwrap();
        let run = timeline(&pipeline, &orders, &chain(&pipeline, 4), durations).expect("all steps run");
        run.finish.iter().copied().fold(0.0, f64::max)
    }

    #[test]
    fn the_bubble_is_that_of_the_schedule() {
        // 8 microbatches of 3 units, and the bubble: 3 stages of 3 units.
        assert_eq!(finish(Schedule::GPipe, 1, 8, &Units), 33.0);
        assert_eq!(finish(Schedule::OneForwardOneBackward, 1, 8, &Units), 33.0);
        // Twice as many chunks, each half as long: half the bubble.
        assert_eq!(finish(Schedule::Interleaved, 2, 8, &Units), 2.0 * 24.0 + 9.0);
        // So it is of any number of microbatches that fills the pipeline; with fewer, one waits for itself to come around.
        for microbatches in [4, 5, 7, 9, 18] {
            assert_eq!(finish(Schedule::Interleaved, 2, microbatches, &Units), 6.0 * microbatches as f64 + 9.0);
        }
        assert_eq!(finish(Schedule::Interleaved, 2, 2, &Units), 6.0 * 4.0 + 3.0);
        // 6 units for a microbatch, no bubble but where the pipeline fills.
        let steps = finish(Schedule::ZeroBubbleV, 2, 16, &Ones);
        assert!((96.0..=105.0).contains(&steps), "{steps}");
        // Little where backward passes are longer: 8 units for a microbatch, of which 1F1B would wait for three.
        let steps = finish(Schedule::ZeroBubbleV, 2, 16, &Units);
        assert!((128.0..=146.0).contains(&steps), "{steps}");
    }

    /// The more is in flight beyond what fills the pipeline, the longer messages take without a stage waiting for them:
    /// the more microbatches a round has, or the more forward passes run ahead.
    #[test]
    fn more_in_flight_hides_messages() {
        struct Slow;
        impl Durations for Slow {
            fn pass(&self, chunk: u32, pass: Pass) -> f64 {
                Units.pass(chunk, pass)
            }
            fn message(&self, _: usize) -> f64 {
                0.2
            }
        }
        let lost = |schedule: Schedule, in_flight: Option<u64>| {
            let pipeline =
                Pipeline { schedule, per_stage: schedule.usual_chunks()[0], in_flight, ..Pipeline::default() };
            let orders = orders(&pipeline, 4, 16, &|_| Lengths::EQUAL).unwrap();
            let run = timeline(&pipeline, &orders, &chain(&pipeline, 4), &Slow).expect("all steps run");
            run.finish.into_iter().fold(0.0, f64::max) - finish(schedule, pipeline.per_stage, 16, &Units)
        };
        let rounds = [None, Some(13), Some(15), Some(23)].map(|in_flight| lost(Schedule::Interleaved, in_flight));
        assert!(rounds[0] > 2.0 && rounds[1..].iter().all(|larger| *larger <= 0.5 * rounds[0]), "{rounds:?}");
        let ahead = [None, Some(4), Some(7)].map(|in_flight| lost(Schedule::OneForwardOneBackward, in_flight));
        assert!(ahead[0] > 5.0 && ahead[1] == ahead[0] && ahead[2] < 0.3 * ahead[0], "{ahead:?}");
    }

    /// Of zero-bubble V, however long its parts are: stages wait for each other hardly longer than the pipeline takes to
    /// fill, less than half as long as of 1F1B; the more gradients of weights are delayed, the less, and never more than may
    /// be.
    #[test]
    fn gradients_of_weights_fill_gaps() {
        let (stages, microbatches) = (8, 64);
        for (backward, weight) in [(1.0, 1.0), (1.3, 0.9), (2.0, 0.9), (1.25, 0.75)] {
            let lengths = Lengths { forward: 1.0, backward, weight };
            let waits = |in_flight: u64, delayed: u64| {
                let (in_flight, delayed) = (Some(in_flight), Some(delayed));
                let schedule = Schedule::ZeroBubbleV;
                let pipeline = Pipeline { schedule, per_stage: 2, in_flight, delayed, ..Pipeline::default() };
                let orders = orders(&pipeline, stages, microbatches, &|_| lengths).unwrap();
                for steps in &orders {
                    let (mut held, mut waiting) = (0, 0);
                    for step in steps {
                        let [forward, backward, weight] =
                            [Pass::Forward, Pass::Backward, Pass::Weight].map(|pass| u64::from(step.pass == pass));
                        (held, waiting) = (held + forward - weight, waiting + backward - weight);
                        assert!(held <= in_flight.unwrap() && waiting <= delayed.unwrap(), "{lengths:?}");
                    }
                }
                let run = timeline(&pipeline, &orders, &chain(&pipeline, stages), &Parts(lengths)).expect("all run");
                run.finish.into_iter().fold(0.0, f64::max) - 2.0 * microbatches as f64 * lengths.all()
            };
            // Of 1F1B, stages of two chunks wait twice as long as one takes, for each of the others.
            let plain = 2.0 * (stages - 1) as f64 * lengths.all();
            let [all, some, few] = [16, 8, 2].map(|delayed| waits(24, delayed));
            assert!(
                all <= some && some < few && few < 0.5 * plain && all < 0.35 * plain,
                "{lengths:?}: {all}, {some}, {few}"
            );
            // With less in flight they wait longer: with half of it not so much longer, where a backward pass leaves time for
            // the passes that it meets.
            let [most, less, half] = [17, 13, 11].map(|in_flight| waits(in_flight, 2));
            assert!(
                few <= most && most < less && less < half && less < plain,
                "{few}, {most}, {less}, {half} of {plain}"
            );
            assert!(backward > 1.0 + weight || half < 0.65 * plain, "{lengths:?}: {half} of {plain}");
        }
    }

    /// Where one chunk is longer than the others, an order that knows it waits less than one by their average.
    #[test]
    fn orders_go_by_the_lengths_of_each_chunk() {
        struct Head;
        impl Head {
            fn chunk(chunk: u32) -> Lengths {
                let times = if chunk == 7 { 1.6 } else { 1.0 };
                Lengths { forward: times, backward: times, weight: times }
            }
        }
        impl Durations for Head {
            fn pass(&self, chunk: u32, pass: Pass) -> f64 {
                Self::chunk(chunk).of(Schedule::ZeroBubbleV, chunk, pass)
            }
            fn message(&self, _: usize) -> f64 {
                0.0
            }
        }
        let pipeline = Pipeline { schedule: Schedule::ZeroBubbleV, per_stage: 2, ..Pipeline::default() };
        let finish = |lengths: &dyn Fn(u32) -> Lengths| {
            let orders = orders(&pipeline, 4, 16, lengths).unwrap();
            let run = timeline(&pipeline, &orders, &chain(&pipeline, 4), &Head).expect("all steps run");
            run.finish.into_iter().fold(0.0, f64::max)
        };
        let (own, average) = (finish(&Head::chunk), finish(&|_| Lengths::EQUAL));
        // The first stage is busy all the time, for 16 x 3 x (1 + 1.6).
        assert!((own - 124.8).abs() < 1e-9 && average > 1.01 * own, "{own}, {average}");
    }

    /// Messages pass beside steps, which they make longer by what kernels lose to them, and no more.
    #[test]
    fn messages_pass_beside_steps() {
        struct Slow(f64, f64);
        impl Durations for Slow {
            fn pass(&self, chunk: u32, pass: Pass) -> f64 {
                Units.pass(chunk, pass)
            }
            fn message(&self, _: usize) -> f64 {
                self.0
            }
            fn loss(&self) -> f64 {
                self.1
            }
        }
        for (schedule, per_stage) in Schedule::ALL.map(|schedule| (schedule, schedule.usual_chunks()[0])) {
            let times = [(0.0, 0.0), (0.25, 0.0), (0.25, 0.5)];
            let [free, silent, slow] =
                times.map(|(message, loss)| finish(schedule, per_stage, 16, &Slow(message, loss)));
            // A message is seen where the pipeline fills and drains, and where two stages wait for each other.
            let messages = 2.0 * 16.0 * per_stage as f64;
            assert!(silent - free <= 0.25 * messages, "{schedule:?}: {free}, {silent}");
            assert!(
                silent < slow && slow <= silent + 0.5 * 0.25 * 2.0 * (messages + 8.0),
                "{schedule:?}: {silent}, {slow}"
            );
        }
    }

    /// Both ends of all messages stand in one order of all meetings: so no stage waits for ever.
    #[test]
    fn messages_meet_in_one_order() {
        for (schedule, per_stage) in Schedule::ALL.map(|schedule| (schedule, schedule.usual_chunks()[0])) {
            let pipeline = Pipeline { schedule, per_stage, ..Pipeline::default() };
            let orders = orders(&pipeline, 4, 8, &|_| Lengths::EQUAL).unwrap();
            let run = timeline(&pipeline, &orders, &chain(&pipeline, 4), &Units).expect("all steps run");
            let mut queues: Vec<std::collections::VecDeque<Message>> = run
                .events
                .iter()
                .map(|events| {
                    let messages = events.iter().map(|event| match event {
                        Event::Exchange(messages) => messages.clone(),
                        Event::Step(_, beside) => beside.iter().map(|beside| beside.message).collect(),
                    });
                    messages.flatten().collect()
                })
                .collect();
            while let Some(stage) = (0..4).find(|stage| {
                let Some(head) = queues[*stage].front() else { return false };
                let other = Message { peer: *stage as u64, is_send: !head.is_send, ..*head };
                queues[head.peer as usize].front() == Some(&other)
            }) {
                let head = queues[stage].pop_front().expect("a head");
                queues[head.peer as usize].pop_front();
            }
            assert!(queues.iter().all(std::collections::VecDeque::is_empty), "{schedule:?}: {queues:?}");
        }
    }
}
