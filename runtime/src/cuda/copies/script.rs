//! What each rank of a group does in one collective by copies: no device, only an order of acts.
//!
//! Every rank has two sides, each of which runs its acts in order: the side that *receives* (the stream of the
//! instruction) and the side that *sends*. They meet other ranks by flags, words that one rank sets and another waits
//! for and clears. A flag is set again only behind an answer to what it said before, so that none is lost, whatever
//! the ranks' speeds; and since it is cleared by who waits for it, the same acts can be run again and again.
//!
//! * **All-gather.** A rank says that it is [`Flag::Ready`]; the others copy their parts into its result and say
//!   [`Flag::Gathered`].
//! * **Reduce-scatter.** The parts that a rank is to add are sent into its scratch memory, which has a slot per
//!   sender: it says that the slots are free (`Ready`), the others that they filled them (`Done`), and it adds the slots
//!   and its own part in the order of the group, so that the sum does not depend on which rank adds. What the scratch
//!   memory does not hold at once is sent in rounds, in turns into one half of it and the other.
//! * **All-reduce.** A reduce-scatter of equal parts into the result, then its all-gather.
//! * **A message.** The receiver says that its buffer is [`Flag::Free`], the sender copies into it and says
//!   [`Flag::Sent`], both on the stream of the instruction: one passes from one rank to another at a time.

use crate::cuda::nccl::Part;
use shardc_ir::DType;

/// Where slots and parts begin: a multiple of this many bytes.
const ALIGN: u64 = 256;

/// A word that one rank sets at another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Flag {
    /// The half of my scratch memory is free; and of the first, my result.
    Ready(usize),
    /// I have sent all of this round that is yours.
    Done(usize),
    /// I have written my part of your result.
    Gathered,
    /// My buffer for your next message is free.
    Free,
    /// I have written it.
    Sent,
}

impl Flag {
    /// The number of flags between two ranks.
    pub const COUNT: usize = 7;

    /// Its place among them.
    pub fn index(self) -> usize {
        match self {
            Self::Ready(half) => half,
            Self::Done(half) => 2 + half,
            Self::Gathered => 4,
            Self::Free => 5,
            Self::Sent => 6,
        }
    }
}

/// The two sides of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The instruction's stream.
    Receive,
    /// The stream of copies to other ranks.
    Send,
}

/// One thing that a rank does. Ranks are positions in the group; places are bytes in a rank's arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Act {
    /// What sends waits for what receives.
    Fork,
    /// What receives waits for what sends.
    Join,
    /// Sets a flag at ranks.
    Signal(Side, Flag, Vec<usize>),
    /// Waits for the flags of ranks, and clears them.
    Await(Side, Flag, Vec<usize>),
    /// Sends bytes of this rank to another.
    Copy {
        /// On which side.
        side: Side,
        /// The receiving rank.
        peer: usize,
        /// Its place.
        to: u64,
        /// This rank's place.
        from: u64,
        /// How many.
        bytes: u64,
    },
    /// Copies this rank's own part, on the side that receives.
    Keep {
        /// Where to.
        to: u64,
        /// Where from.
        from: u64,
        /// How many.
        bytes: u64,
    },
    /// Adds this rank's elements and those of all others, in the order of the group, on the side that receives.
    Sum {
        /// This rank's elements.
        own: u64,
        /// Those of the first other rank.
        slots: u64,
        /// Bytes from there to those of the next.
        stride: u64,
        /// Where the sums go.
        to: u64,
        /// How many.
        elements: u64,
        /// Of which type; added in f32.
        dtype: DType,
    },
}

/// Where one rank of the group has what the others write.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Spot {
    /// Its scratch memory.
    pub scratch: u64,
    /// Its results.
    pub results: Vec<u64>,
    /// Bytes of its scratch memory and of each part: the same on all ranks.
    pub bytes: Vec<u64>,
}

/// One collective, seen from one rank. The places of `parts` are bytes in its arena.
#[derive(Debug)]
pub struct View<'a> {
    /// The rank's position in the group.
    pub index: usize,
    /// All ranks' places, in the order of the group.
    pub spots: &'a [Spot],
    /// What this rank sends and receives.
    pub parts: &'a [Part],
    /// Bytes of its scratch memory.
    pub scratch: u64,
    /// Whether every rank gets the whole of a sum.
    pub is_all: bool,
}

/// A stretch of every rank's part of one tensor that is sent in one round.
#[derive(Clone, Copy, Debug)]
struct Piece {
    /// Which tensor.
    part: usize,
    /// Where in a rank's part it begins.
    begin: u64,
    /// Its bytes, where the rank's part is not shorter.
    bytes: u64,
    /// Where in a slot it lies.
    at: u64,
}

/// Of a message of so many bytes, from one place to another rank's: what its sender does. Of the two ranks the sender is the
/// first.
pub fn send(from: u64, to: u64, bytes: u64) -> Vec<Act> {
    let side = Side::Receive;
    vec![
        Act::Await(side, Flag::Free, vec![1]),
        Act::Copy { side, peer: 1, to, from, bytes },
        Act::Signal(side, Flag::Sent, vec![1]),
    ]
}

/// What its receiver does.
pub fn receive() -> Vec<Act> {
    vec![Act::Signal(Side::Receive, Flag::Free, vec![0]), Act::Await(Side::Receive, Flag::Sent, vec![0])]
}

impl View<'_> {
    fn ranks(&self) -> usize {
        self.spots.len()
    }

    /// The other ranks, each rank beginning with the one behind it, so that no two send to the same one.
    fn others(&self) -> impl Iterator<Item = usize> + Clone {
        let (index, ranks) = (self.index, self.ranks());
        (1..ranks).map(move |step| (index + step) % ranks)
    }

    fn all_others(&self) -> Vec<usize> {
        self.others().collect()
    }

    /// The bytes of every rank's part of a tensor that is cut among them; the last ones may be shorter.
    fn part_bytes(&self, part: &Part) -> u64 {
        let size = part.dtype.size();
        match self.is_all {
            true => (part.sent * size).div_ceil(self.ranks() as u64).next_multiple_of(ALIGN),
            false => part.received * size,
        }
    }

    /// Bytes of a slot, of which there is one for every other rank: what one of them sends, or as much as fits twice.
    fn slot(&self) -> u64 {
        let others = self.ranks() as u64 - 1;
        let whole = self.parts.iter().map(|part| self.part_bytes(part).next_multiple_of(ALIGN)).sum();
        let half = self.scratch / (2 * others);
        if others * whole <= self.scratch { whole } else { half - half % ALIGN }
    }

    /// All ranks' parts, concatenated, for everyone.
    pub fn all_gather(&self) -> Vec<Act> {
        let mut acts = vec![Act::Signal(Side::Receive, Flag::Ready(0), self.all_others()), Act::Fork];
        let bytes = |part: &Part| part.sent * part.dtype.size();
        for part in self.parts {
            let to = part.to + self.index as u64 * bytes(part);
            acts.extend((to != part.from).then_some(Act::Keep { to, from: part.from, bytes: bytes(part) }));
        }
        for peer in self.others() {
            acts.push(Act::Await(Side::Send, Flag::Ready(0), vec![peer]));
            for (part, result) in self.parts.iter().zip(&self.spots[peer].results) {
                let to = result + self.index as u64 * bytes(part);
                acts.push(Act::Copy { side: Side::Send, peer, to, from: part.from, bytes: bytes(part) });
            }
            acts.push(Act::Signal(Side::Send, Flag::Gathered, vec![peer]));
        }
        acts.extend([Act::Await(Side::Receive, Flag::Gathered, self.all_others()), Act::Join]);
        acts
    }

    /// The sum, of which everyone gets a part, or the whole.
    pub fn reduce(&self) -> Vec<Act> {
        let mut acts = self.scatter();
        if !self.is_all {
            return acts;
        }
        acts.push(Act::Fork);
        for peer in self.others() {
            for (part, result) in self.parts.iter().zip(&self.spots[peer].results) {
                let [begin, end] = self.range(part, self.index);
                let (to, from, bytes) = (result + begin, part.to + begin, end - begin);
                acts.extend((bytes > 0).then_some(Act::Copy { side: Side::Send, peer, to, from, bytes }));
            }
            acts.push(Act::Signal(Side::Send, Flag::Gathered, vec![peer]));
        }
        acts.extend([Act::Await(Side::Receive, Flag::Gathered, self.all_others()), Act::Join]);
        acts
    }

    /// The bytes of a tensor that a rank adds.
    fn range(&self, part: &Part, rank: usize) -> [u64; 2] {
        let (own, whole) = (self.part_bytes(part), part.sent * part.dtype.size());
        [rank as u64, rank as u64 + 1].map(|edge| (edge * own).min(whole))
    }

    /// What is sent in each round: as much as a slot holds.
    fn rounds(&self) -> Vec<Vec<Piece>> {
        let slot = self.slot();
        let (mut rounds, mut filled) = (vec![Vec::new()], 0);
        for (part, tensor) in self.parts.iter().enumerate() {
            let (whole, mut begin) = (self.part_bytes(tensor), 0);
            while begin < whole {
                if filled + ALIGN > slot {
                    rounds.push(Vec::new());
                    filled = 0;
                }
                let bytes = (whole - begin).min(slot - filled);
                rounds.last_mut().into_iter().for_each(|round| round.push(Piece { part, begin, bytes, at: filled }));
                begin += bytes;
                filled += bytes.next_multiple_of(ALIGN);
            }
        }
        rounds
    }

    /// The bytes that a rank has of a piece of its part.
    fn of_piece(&self, piece: &Piece, rank: usize) -> (u64, u64) {
        let [begin, end] = self.range(&self.parts[piece.part], rank);
        let from = (begin + piece.begin).min(end);
        (from, piece.bytes.min(end - from))
    }

    fn scatter(&self) -> Vec<Act> {
        let (slot, rounds) = (self.slot(), self.rounds());
        let half = |round: usize| (round % 2) as u64 * (self.ranks() as u64 - 1) * slot;
        let is_free = |round: usize| Act::Signal(Side::Receive, Flag::Ready(round % 2), self.all_others());
        let mut acts: Vec<Act> = (0..rounds.len().min(2)).map(is_free).collect();
        acts.push(Act::Fork);
        for (round, pieces) in rounds.iter().enumerate() {
            for peer in self.others() {
                acts.push(Act::Await(Side::Send, Flag::Ready(round % 2), vec![peer]));
                let place = self.index - usize::from(self.index > peer);
                let there = self.spots[peer].scratch + half(round) + place as u64 * slot;
                for piece in pieces {
                    let (from, bytes) = self.of_piece(piece, peer);
                    let (to, from) = (there + piece.at, self.parts[piece.part].from + from);
                    acts.extend((bytes > 0).then_some(Act::Copy { side: Side::Send, peer, to, from, bytes }));
                }
                acts.push(Act::Signal(Side::Send, Flag::Done(round % 2), vec![peer]));
            }
            acts.push(Act::Await(Side::Receive, Flag::Done(round % 2), self.all_others()));
            for piece in pieces {
                let part = &self.parts[piece.part];
                let (begin, bytes) = self.of_piece(piece, self.index);
                let (own, slots) = (part.from + begin, self.spots[self.index].scratch + half(round) + piece.at);
                let to = part.to + if self.is_all { begin } else { piece.begin };
                let (elements, dtype) = (bytes / part.dtype.size(), part.dtype);
                acts.extend((elements > 0).then_some(Act::Sum { own, slots, stride: slot, to, elements, dtype }));
            }
            acts.extend((round + 2 < rounds.len()).then(|| is_free(round)));
        }
        acts.push(Act::Join);
        acts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    /// A collective of ranks with memories of bytes, of which f32 tensors are parts.
    struct Ring {
        memories: Vec<Vec<u8>>,
        scripts: Vec<[VecDeque<Act>; 2]>,
        /// Per rank, sender and flag, whether it is set.
        flags: Vec<Vec<[bool; Flag::COUNT]>>,
        /// Per rank, the forks that the side that receives has passed beyond the other, and the joins the other way.
        passed: Vec<[usize; 2]>,
    }

    fn read(memory: &[u8], at: u64) -> f32 {
        f32::from_le_bytes(memory[at as usize..at as usize + 4].try_into().unwrap())
    }

    impl Ring {
        fn new(case: &Case, acts: fn(&View<'_>) -> Vec<Act>) -> Self {
            let (ranks, memories) = (case.parts.len(), case.memories.clone());
            let scripts = (0..ranks).map(|index| sides(&acts(&case.view(index)))).collect();
            let (flags, passed) = (vec![vec![[false; Flag::COUNT]; ranks]; ranks], vec![[0; 2]; ranks]);
            Self { memories, scripts, flags, passed }
        }

        /// Runs the first act of a side, if it need not wait.
        fn step(&mut self, rank: usize, side: usize) -> bool {
            let Some(act) = self.scripts[rank][side].front().cloned() else { return false };
            match &act {
                Act::Fork | Act::Join => {
                    let passed = &mut self.passed[rank][usize::from(act == Act::Join)];
                    let waits = side == usize::from(act == Act::Fork);
                    if waits && *passed == 0 {
                        return false;
                    }
                    *passed = if waits { *passed - 1 } else { *passed + 1 };
                }
                Act::Signal(_, flag, to) => {
                    for peer in to {
                        let set = &mut self.flags[*peer][rank][flag.index()];
                        assert!(!*set, "rank {rank} sets {flag:?} at {peer} before it was taken");
                        *set = true;
                    }
                }
                Act::Await(_, flag, from) => {
                    if !from.iter().all(|peer| self.flags[rank][*peer][flag.index()]) {
                        return false;
                    }
                    from.iter().for_each(|peer| self.flags[rank][*peer][flag.index()] = false);
                }
                Act::Copy { peer, to, from, bytes, .. } => self.copy(rank, *peer, *from, *to, *bytes),
                Act::Keep { to, from, bytes } => self.copy(rank, rank, *from, *to, *bytes),
                Act::Sum { own, slots, stride, to, elements, .. } => {
                    for element in 0..*elements {
                        let other = |place: usize| slots + place as u64 * stride + 4 * element;
                        let place = |from: usize| match from.cmp(&rank) {
                            std::cmp::Ordering::Less => other(from),
                            std::cmp::Ordering::Equal => own + 4 * element,
                            std::cmp::Ordering::Greater => other(from - 1),
                        };
                        let sum: f32 =
                            (0..self.memories.len()).map(|from| read(&self.memories[rank], place(from))).sum();
                        let at = (to + 4 * element) as usize;
                        self.memories[rank][at..at + 4].copy_from_slice(&sum.to_le_bytes());
                    }
                }
            }
            self.scripts[rank][side].pop_front();
            true
        }

        fn copy(&mut self, rank: usize, peer: usize, from: u64, to: u64, bytes: u64) {
            let data = self.memories[rank][from as usize..(from + bytes) as usize].to_vec();
            self.memories[peer][to as usize..(to + bytes) as usize].copy_from_slice(&data);
        }

        /// Runs all sides in an order that `seed` draws; ranks differ much in speed.
        fn run(&mut self, seed: u64) {
            let mut state = seed | 1;
            let mut idle = 0;
            while self.scripts.iter().flatten().any(|acts| !acts.is_empty()) {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let ranks = self.memories.len();
                let (rank, side) = ((state >> 33) as usize % ranks, (state >> 61) as usize % 2);
                let times = 1 + (state >> 40) as usize % 7;
                let moved = (0..times).filter(|_| self.step(rank, side)).count();
                idle = if moved > 0 { 0 } else { idle + 1 };
                assert!(idle < 10_000, "nobody can go on: {:?}", self.scripts);
            }
            assert!(self.flags.iter().flatten().flatten().all(|set| !set), "a flag was left");
        }
    }

    /// The acts of each side.
    fn sides(acts: &[Act]) -> [VecDeque<Act>; 2] {
        let is_both = |act: &Act| matches!(act, Act::Fork | Act::Join);
        let is_sent = |act: &Act| {
            let (Act::Copy { side, .. } | Act::Signal(side, ..) | Act::Await(side, ..)) = act else { return false };
            *side == Side::Send
        };
        let of = |side: bool| acts.iter().filter(|act| is_both(act) || is_sent(act) == side).cloned().collect();
        [of(false), of(true)]
    }

    /// Tensors of each rank one behind the other, results (or not, if in place) behind them, scratch memory last; ranks
    /// begin at different places.
    struct Case {
        parts: Vec<Vec<Part>>,
        spots: Vec<Spot>,
        memories: Vec<Vec<u8>>,
        scratch: u64,
        is_all: bool,
    }

    fn value(rank: usize, tensor: usize, element: u64) -> f32 {
        (rank * 100 + tensor * 7) as f32 + (element % 50) as f32
    }

    fn case(ranks: usize, sizes: &[(u64, u64)], scratch: u64, in_place: bool) -> Case {
        let (mut all, mut spots, mut memories) = (Vec::new(), Vec::new(), Vec::new());
        for rank in 0..ranks {
            let mut at = 256 * rank as u64;
            let mut parts = Vec::new();
            let mut take = |elements: u64| {
                let own = at;
                at += (elements * 4).next_multiple_of(256);
                own
            };
            for (sent, received) in sizes {
                let from = take(*sent);
                let to = if in_place { from } else { take(*received) };
                parts.push(Part { from, to, sent: *sent, received: *received, dtype: DType::F32 });
            }
            let at_scratch = take(scratch / 4);
            let mut memory = vec![0xee; at as usize];
            for (tensor, part) in parts.iter().enumerate() {
                for element in 0..part.sent {
                    let at = (part.from + 4 * element) as usize;
                    memory[at..at + 4].copy_from_slice(&value(rank, tensor, element).to_le_bytes());
                }
            }
            let results = parts.iter().map(|part| part.to).collect();
            spots.push(Spot { scratch: at_scratch, results, bytes: Vec::new() });
            all.push(parts);
            memories.push(memory);
        }
        Case { parts: all, spots, memories, scratch, is_all: sizes.iter().all(|(sent, received)| sent == received) }
    }

    impl Case {
        fn view(&self, index: usize) -> View<'_> {
            let (spots, parts) = (&self.spots, &self.parts[index]);
            View { index, spots, parts, scratch: self.scratch, is_all: self.is_all }
        }
    }

    #[test]
    fn sums_are_those_of_all_ranks_whatever_their_speeds() {
        for (ranks, scratch, seed) in
            [(2, 2048, 1), (2, 512, 2), (3, 4096, 3), (4, 1536, 4), (4, 100_000, 5), (8, 7168, 6)]
        {
            let n = ranks as u64;
            let sizes = [(300 * n, 300), (64 * n, 64), (n, 1), (1000 * n, 1000)];
            let case = case(ranks, &sizes, scratch, false);
            let mut ring = Ring::new(&case, |view| view.reduce());
            ring.run(seed);
            for (rank, parts) in case.parts.iter().enumerate() {
                for (tensor, part) in parts.iter().enumerate() {
                    for element in 0..part.received {
                        let whole = rank as u64 * part.received + element;
                        let expect: f32 = (0..ranks).map(|from| value(from, tensor, whole)).sum();
                        assert_eq!(read(&ring.memories[rank], part.to + 4 * element), expect, "{ranks} ranks");
                    }
                }
            }
        }
    }

    #[test]
    fn all_ranks_get_the_sum_also_in_place_and_where_parts_are_uneven() {
        for (ranks, scratch, seed) in [(2, 2048, 1), (3, 2048, 2), (4, 6144, 3), (5, 8192, 4)] {
            for in_place in [false, true] {
                let sizes = [(1001, 1001), (5, 5), (256, 256), (3000, 3000)];
                let case = case(ranks, &sizes, scratch, in_place);
                let mut ring = Ring::new(&case, |view| view.reduce());
                ring.run(seed);
                for (rank, parts) in case.parts.iter().enumerate() {
                    for (tensor, part) in parts.iter().enumerate() {
                        for element in 0..part.sent {
                            let expect: f32 = (0..ranks).map(|from| value(from, tensor, element)).sum();
                            assert_eq!(read(&ring.memories[rank], part.to + 4 * element), expect, "{ranks} ranks");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn all_ranks_get_the_parts_of_all_in_order() {
        for (ranks, seed) in [(2, 1), (3, 2), (8, 3)] {
            let sizes = [(300, 300 * ranks as u64), (1, ranks as u64)];
            let case = case(ranks, &sizes, 0, false);
            let mut ring = Ring::new(&case, |view| view.all_gather());
            ring.run(seed);
            for (rank, parts) in case.parts.iter().enumerate() {
                for (tensor, part) in parts.iter().enumerate() {
                    for element in 0..part.received {
                        let expect = value((element / part.sent) as usize, tensor, element % part.sent);
                        assert_eq!(read(&ring.memories[rank], part.to + 4 * element), expect, "{ranks} ranks");
                    }
                }
            }
        }
    }

    /// Messages there and back, each into one buffer after the other of its receiver.
    #[test]
    fn messages_follow_one_another_without_losing_a_flag() {
        let (ranks, bytes, messages) = (2, 64u64, 12u64);
        for seed in 0..50 {
            let mut ring = Ring::new(&case(ranks, &[(4, 4)], 0, false), |_| Vec::new());
            for (rank, memory) in ring.memories.iter_mut().enumerate() {
                *memory = (0..2 * messages * bytes).map(|at| (at / bytes) as u8 + 100 * rank as u8).collect();
            }
            let place = |message: u64| (messages + message) * bytes;
            for message in 0..messages {
                let there = send(message * bytes, place(message), bytes);
                let back: Vec<Act> = send(message * bytes, place(message), bytes).iter().map(turned).collect();
                let (got, returned) = (receive(), receive().iter().map(turned).collect::<Vec<_>>());
                ring.scripts[0][0].extend(there.into_iter().chain(returned));
                ring.scripts[1][0].extend(got.into_iter().chain(back));
            }
            ring.run(seed);
            for (rank, memory) in ring.memories.iter().enumerate() {
                for message in 0..messages {
                    let expect = message as u8 + 100 * (1 - rank) as u8;
                    assert_eq!(memory[place(message) as usize], expect, "message {message} to rank {rank}");
                }
            }
        }
    }

    /// The act of two ranks that change places.
    fn turned(act: &Act) -> Act {
        let other = |ranks: &[usize]| ranks.iter().map(|rank| 1 - rank).collect();
        match act {
            Act::Signal(side, flag, to) => Act::Signal(*side, *flag, other(to)),
            Act::Await(side, flag, from) => Act::Await(*side, *flag, other(from)),
            Act::Copy { side, peer, to, from, bytes } => {
                Act::Copy { side: *side, peer: 1 - peer, to: *to, from: *from, bytes: *bytes }
            }
            other => other.clone(),
        }
    }

    #[test]
    fn collectives_follow_one_another_without_losing_a_flag() {
        let case = case(4, &[(2800, 2800), (400, 400)], 3 * 2 * 512, false);
        /// The same with a part of the elements sent, or received.
        fn part(view: &View<'_>, sent: u64, received: u64, acts: fn(&View<'_>) -> Vec<Act>) -> Vec<Act> {
            let cut = |part: &Part| Part { sent: part.sent / sent, received: part.received / received, ..*part };
            let parts: Vec<Part> = view.parts.iter().map(cut).collect();
            acts(&View { parts: &parts, is_all: false, ..*view })
        }
        for seed in 0..50 {
            let mut ring = Ring::new(&case, |view| {
                let scattered = part(view, 1, 4, |view| view.reduce());
                let gathered = part(view, 4, 1, |view| view.all_gather());
                [view.reduce(), scattered.clone(), gathered.clone(), gathered, scattered, view.reduce()].concat()
            });
            ring.run(seed);
        }
    }
}
