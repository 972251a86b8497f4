//! Collectives and messages between the rank threads of this process.
//!
//! A collective is a meeting: every member posts where its operands lie and waits for the others;
//! then each reads what it needs from the others' memory, and waits again before it goes on, so
//! that nobody overwrites what another still reads. Reductions add in the order of the group, in
//! f32, and every part of an all-reduce is computed by one rank: the result is the same on all ranks
//! and in every run.
//!
//! No wait is forever. Every wait ends when a rank fails ([`Exchange::abort`]), when a rank of the
//! group has ended its program, and when all ranks wait for one another.
#![allow(unsafe_code)]

use super::kernels::{View, ViewMut};
use super::memory::AlignedBytes;
use shardc_ir::sharding::ReduceKind;
use shardc_ir::{DType, TensorType};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Which collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// See [`shardc_ir::program::Action::AllReduce`].
    AllReduce(ReduceKind),
    /// See [`shardc_ir::program::Action::AllGather`].
    AllGather,
    /// See [`shardc_ir::program::Action::ReduceScatter`].
    ReduceScatter(ReduceKind),
    /// See [`shardc_ir::program::Action::AllToAll`].
    AllToAll,
}

/// Why a wait ended without what it waited for.
#[derive(Debug, PartialEq, Eq)]
pub enum Interrupt {
    /// Another rank failed first.
    Aborted,
    /// This rank found the reason.
    Failed(String),
}

impl From<String> for Interrupt {
    fn from(message: String) -> Self {
        Self::Failed(message)
    }
}

/// Where a posted operand lies: in memory that outlives the step, or in memory that it owns a share
/// of. So a rank that ends early leaves nothing behind that others must not read.
#[derive(Clone)]
struct Posted {
    start: *const u8,
    length: usize,
    _owner: Option<Arc<AlignedBytes>>,
}

// SAFETY: a posted pointer is read only between the two waits of its meeting, while its owner waits
// or reads.
unsafe impl Send for Posted {}

impl Posted {
    fn of(bytes: &[u8]) -> Self {
        Self { start: bytes.as_ptr(), length: bytes.len(), _owner: None }
    }

    fn owned(bytes: &Arc<AlignedBytes>) -> Self {
        Self { start: bytes.as_ptr(), length: bytes.len(), _owner: Some(bytes.clone()) }
    }

    /// # Safety
    /// Between the meeting's two waits, see above.
    unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: the owner's operand lives and is not written until the meeting's last wait.
        unsafe { std::slice::from_raw_parts(self.start, self.length) }
    }
}

/// The meetings of one group: arrivals only ever grow, `members` per wait.
#[derive(Default)]
struct Meeting {
    arrivals: u64,
    posts: Vec<Option<(Kind, Vec<Posted>)>>,
}

/// What a rank waits for.
#[derive(Clone, Debug)]
enum Wait {
    Arrivals { group: Vec<u64>, count: u64 },
    Message { from: u64, to: u64 },
}

#[derive(Default)]
struct State {
    meetings: BTreeMap<Vec<u64>, Meeting>,
    messages: BTreeMap<(u64, u64), VecDeque<Vec<u8>>>,
    waits: Vec<Option<Wait>>,
    ended: Vec<bool>,
    aborted: bool,
}

impl State {
    fn is_satisfied(&self, wait: &Wait) -> bool {
        match wait {
            Wait::Arrivals { group, count } => {
                self.meetings.get(group).is_some_and(|meeting| meeting.arrivals >= *count)
            }
            Wait::Message { from, to } => self.messages.get(&(*from, *to)).is_some_and(|queue| !queue.is_empty()),
        }
    }

    /// Whether no rank can go on.
    fn is_stuck(&self) -> bool {
        self.waits.iter().zip(&self.ended).all(|(wait, ended)| match wait {
            Some(wait) => !self.is_satisfied(wait),
            None => *ended,
        })
    }

    fn stuck_text(&self) -> String {
        let of = |(rank, wait): (usize, &Option<Wait>)| match wait {
            Some(Wait::Arrivals { group, .. }) => format!("rank {rank} waits for the group {group:?}"),
            Some(Wait::Message { from, .. }) => format!("rank {rank} waits for a message from rank {from}"),
            None => format!("rank {rank} has ended"),
        };
        let texts: Vec<_> = self.waits.iter().enumerate().map(of).collect();
        format!("no rank can go on: {}", texts.join(", "))
    }
}

/// What the ranks of one step share.
pub struct Exchange {
    state: Mutex<State>,
    changed: Condvar,
}

/// One rank's side of it.
pub struct Member<'a> {
    exchange: &'a Exchange,
    rank: u64,
    /// How many waits this rank has made in each group.
    waits: BTreeMap<Vec<u64>, u64>,
}

impl Exchange {
    /// For so many ranks.
    pub fn new(ranks: usize) -> Self {
        let state = State { waits: vec![None; ranks], ended: vec![false; ranks], ..State::default() };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// A rank's side.
    pub fn member(&self, rank: u64) -> Member<'_> {
        Member { exchange: self, rank, waits: BTreeMap::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A rank that panics is reported by its thread; the state itself is never left half-changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends every wait of every rank.
    pub fn abort(&self) {
        self.lock().aborted = true;
        self.changed.notify_all();
    }
}

impl Member<'_> {
    /// Says that this rank's program is over: whoever still waits for it waits in vain.
    pub fn end(&self) {
        self.exchange.lock().ended[self.rank as usize] = true;
        self.exchange.changed.notify_all();
    }

    fn wait(&self, mut state: MutexGuard<'_, State>, wait: Wait) -> Result<(), Interrupt> {
        self.exchange.changed.notify_all();
        let rank = self.rank as usize;
        state.waits[rank] = Some(wait.clone());
        let outcome = loop {
            if state.aborted {
                break Err(Interrupt::Aborted);
            }
            if state.is_satisfied(&wait) {
                break Ok(());
            }
            if state.is_stuck() {
                break Err(Interrupt::Failed(state.stuck_text()));
            }
            state = self.exchange.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        state.waits[rank] = None;
        outcome
    }

    /// Posts operands and waits for the group.
    fn meet(&mut self, group: &[u64], kind: Kind, operands: Vec<Posted>) -> Result<Vec<Vec<Posted>>, Interrupt> {
        let place = group.iter().position(|rank| *rank == self.rank);
        let place = place.ok_or_else(|| format!("rank {} is not of its group {group:?}", self.rank))?;
        {
            let mut state = self.exchange.lock();
            let meeting = state.meetings.entry(group.to_vec()).or_default();
            meeting.posts.resize(group.len(), None);
            meeting.posts[place] = Some((kind, operands));
        }
        self.arrive(group)?;
        let state = self.exchange.lock();
        let posts: Vec<_> = state.meetings.get(group).map(|meeting| meeting.posts.clone()).unwrap_or_default();
        let mine = posts.get(place).cloned().flatten();
        let mut all = Vec::new();
        for (rank, post) in group.iter().zip(posts) {
            let shape = |post: &(Kind, Vec<Posted>)| (post.0, post.1.iter().map(|p| p.length).collect::<Vec<_>>());
            if post.as_ref().map(shape) != mine.as_ref().map(shape) {
                let text = |post: Option<(Kind, Vec<usize>)>| {
                    post.map_or_else(|| "nothing".to_string(), |(kind, bytes)| format!("{kind:?} of {bytes:?} bytes"))
                };
                let (mine, other) = (text(mine.as_ref().map(shape)), text(post.as_ref().map(shape)));
                return Err(Interrupt::Failed(format!("it enters {mine}, but rank {rank} enters {other}")));
            }
            all.extend(post.map(|(_, operands)| operands));
        }
        Ok(all)
    }

    /// Waits until all of the group have come here.
    fn arrive(&mut self, group: &[u64]) -> Result<(), Interrupt> {
        let waits = self.waits.entry(group.to_vec()).or_default();
        *waits += 1;
        let count = *waits * group.len() as u64;
        let mut state = self.exchange.lock();
        state.meetings.entry(group.to_vec()).or_default().arrivals += 1;
        self.wait(state, Wait::Arrivals { group: group.to_vec(), count })
    }

    /// Hands a message over without waiting for its receiver.
    pub fn send(&self, peer: u64, bytes: &[u8]) {
        let mut state = self.exchange.lock();
        state.messages.entry((self.rank, peer)).or_default().push_back(bytes.to_vec());
        self.exchange.changed.notify_all();
    }

    /// Waits for the next message from a rank.
    pub fn receive(&self, peer: u64, result: &mut [u8]) -> Result<(), Interrupt> {
        self.wait(self.exchange.lock(), Wait::Message { from: peer, to: self.rank })?;
        let message = self.exchange.lock().messages.get_mut(&(peer, self.rank)).and_then(VecDeque::pop_front);
        let message = message.filter(|message| message.len() == result.len());
        let message = message.ok_or_else(|| format!("the message from rank {peer} has another size"))?;
        result.copy_from_slice(&message);
        Ok(())
    }

    /// Runs one collective over a bucket of operands, whose memory must outlive the exchange.
    pub fn collective(
        &mut self,
        kind: Kind,
        group: &[u64],
        operands: &[View<'_>],
        results: &mut [ViewMut<'_>],
    ) -> Result<(), Interrupt> {
        let place = group.iter().position(|rank| *rank == self.rank).unwrap_or(0);
        let posted = operands.iter().map(|operand| Posted::of(operand.bytes)).collect();
        let all = self.meet(group, kind, posted)?;
        // SAFETY: until the `arrive` below all members read only.
        let parts = |index: usize| -> Vec<&[u8]> { all.iter().map(|posts| unsafe { posts[index].bytes() }).collect() };
        match kind {
            Kind::AllReduce(reduce) => {
                let mut own = Vec::new();
                for (index, operand) in operands.iter().enumerate() {
                    let part = share(operand.ty, place, group.len());
                    own.push(Arc::new(reduce_part(reduce, operand.ty, &parts(index), part)?));
                }
                let pieces = self.meet_pieces(group, kind, own.iter().map(Posted::owned).collect())?;
                join_pieces(&pieces, results);
            }
            Kind::AllGather => {
                for (index, result) in results.iter_mut().enumerate() {
                    let parts = parts(index);
                    check_size(result, parts.iter().map(|part| part.len()).sum())?;
                    let mut at = 0;
                    for part in parts {
                        result.bytes[at..at + part.len()].copy_from_slice(part);
                        at += part.len();
                    }
                }
            }
            Kind::ReduceScatter(reduce) => {
                for (index, result) in results.iter_mut().enumerate() {
                    let (parts, ty) = (parts(index), operands[index].ty);
                    let length = ty.elements() as usize / group.len();
                    let piece = reduce_part(reduce, ty, &parts, (place * length, length))?;
                    check_size(result, piece.len())?;
                    result.bytes.copy_from_slice(&piece);
                }
            }
            Kind::AllToAll => {
                for (index, result) in results.iter_mut().enumerate() {
                    let parts = parts(index);
                    let length = operands[index].bytes.len() / group.len();
                    check_size(result, length * group.len())?;
                    for (member, part) in parts.iter().enumerate() {
                        let part = &part[place * length..(place + 1) * length];
                        result.bytes[member * length..(member + 1) * length].copy_from_slice(part);
                    }
                }
            }
        }
        self.arrive(group)
    }

    /// The second meeting of an all-reduce: everyone's reduced pieces, of whatever size.
    fn meet_pieces(&mut self, group: &[u64], kind: Kind, pieces: Vec<Posted>) -> Result<Vec<Vec<Posted>>, Interrupt> {
        // Nobody may post anew before all have read the operands' posts.
        self.arrive(group)?;
        let place = group.iter().position(|rank| *rank == self.rank).unwrap_or(0);
        if let Some(meeting) = self.exchange.lock().meetings.get_mut(group) {
            meeting.posts[place] = Some((kind, pieces));
        }
        self.arrive(group)?;
        let state = self.exchange.lock();
        let posts = state.meetings.get(group).map(|meeting| meeting.posts.clone()).unwrap_or_default();
        Ok(posts.into_iter().flatten().map(|(_, posts)| posts).collect())
    }
}

/// Writes every member's pieces one after the other.
fn join_pieces(pieces: &[Vec<Posted>], results: &mut [ViewMut<'_>]) {
    for (index, result) in results.iter_mut().enumerate() {
        let size = result.ty.dtype.size() as usize;
        for (member, posts) in pieces.iter().enumerate() {
            let (first, length) = share(result.ty, member, pieces.len());
            // SAFETY: a piece is not written after it was posted, and the post owns a share of it.
            let piece = unsafe { posts[index].bytes() };
            result.bytes[first * size..(first + length) * size].copy_from_slice(piece);
        }
    }
}

fn check_size(result: &ViewMut<'_>, bytes: usize) -> Result<(), String> {
    if result.bytes.len() == bytes {
        return Ok(());
    }
    Err(format!("the result {} has {} bytes; the collective makes {bytes}", result.ty, result.bytes.len()))
}

/// The first element and the length of member `place`'s share of a tensor, as equal as possible.
fn share(ty: &TensorType, place: usize, members: usize) -> (usize, usize) {
    let elements = ty.elements() as usize;
    let (first, next) = (elements * place / members, elements * (place + 1) / members);
    (first, next - first)
}

/// Elements `first..first + length` of the reduction of all members' operands.
pub(super) fn reduce_part(
    reduce: ReduceKind,
    ty: &TensorType,
    operands: &[&[u8]],
    (first, length): (usize, usize),
) -> Result<AlignedBytes, String> {
    let size = ty.dtype.size() as usize;
    let part = TensorType::new(ty.dtype, [length as u64]);
    let parts =
        || operands.iter().map(|operand| View { ty: &part, bytes: &operand[first * size..(first + length) * size] });
    let mut out = AlignedBytes::zeros(length * size);
    let mut result = ViewMut { ty: &part, bytes: &mut out };
    let takes_most = match reduce {
        ReduceKind::Sum => false,
        ReduceKind::Max => true,
        ReduceKind::LogSumExp => {
            return Err("a collective adds or takes the maximum; log-sum-exp is resolved by instructions".to_string());
        }
    };
    if ty.dtype.is_float() {
        let mut sum: Vec<f32> = Vec::new();
        for part in parts() {
            let values = part.f32s()?;
            if sum.is_empty() {
                sum = values.into_owned();
            } else if takes_most {
                sum.iter_mut().zip(values.iter()).for_each(|(a, b)| {
                    // The larger, or a NaN if either is one.
                    *a = if *a >= *b || a.is_nan() { *a } else { *b };
                });
            } else {
                sum.iter_mut().zip(values.iter()).for_each(|(a, b)| *a += b);
            }
        }
        result.round_f32(&sum)?;
    } else {
        let mut sum: Vec<i64> = Vec::new();
        for part in parts() {
            let values = part.i64s()?;
            if sum.is_empty() {
                sum = values.into_owned();
            } else if takes_most {
                sum.iter_mut().zip(values.iter()).for_each(|(a, b)| *a = (*a).max(*b));
            } else if ty.dtype == DType::Bool {
                sum.iter_mut().zip(values.iter()).for_each(|(a, b)| *a |= b);
            } else {
                sum.iter_mut().zip(values.iter()).for_each(|(a, b)| *a = a.wrapping_add(*b));
            }
        }
        result.round_i64(&sum)?;
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::HostTensor;

    /// Runs a collective on one thread per operand; each rank's result.
    fn run(kind: Kind, operands: &[Vec<f32>], length: u64) -> Vec<Vec<f32>> {
        let exchange = Exchange::new(operands.len());
        let group: Vec<u64> = (0..operands.len() as u64).collect();
        let rank = |rank: usize| {
            let operand = HostTensor::from_f32([operands[rank].len() as u64], &operands[rank]);
            let bytes = super::super::memory::Array::copy_of(operand.ty.clone(), &operand.bytes);
            let ty = TensorType::new(DType::F32, [length]);
            let mut out = AlignedBytes::zeros(length as usize * 4);
            let mut results = [ViewMut { ty: &ty, bytes: &mut out }];
            let operands = [View { ty: &operand.ty, bytes: &bytes.bytes }];
            let mut member = exchange.member(rank as u64);
            // Twice, so that a second meeting of a group is tried too.
            for _ in 0..2 {
                assert_eq!(member.collective(kind, &group, &operands, &mut results), Ok(()));
            }
            member.end();
            bytemuck::cast_slice::<_, f32>(&out).to_vec()
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..operands.len()).map(|index| scope.spawn(move || rank(index))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap_or_default()).collect()
        })
    }

    #[test]
    fn collectives() {
        let operands = [vec![1.0, 2.0, 3.0, 4.0], vec![5.0, -6.0, 7.0, 8.0]];
        let both = |values: &[f32]| vec![values.to_vec(); 2];
        assert_eq!(run(Kind::AllReduce(ReduceKind::Sum), &operands, 4), both(&[6.0, -4.0, 10.0, 12.0]));
        assert_eq!(run(Kind::AllReduce(ReduceKind::Max), &operands, 4), both(&[5.0, 2.0, 7.0, 8.0]));
        assert_eq!(run(Kind::AllGather, &operands, 8), both(&[1.0, 2.0, 3.0, 4.0, 5.0, -6.0, 7.0, 8.0]));
        let scattered = vec![vec![6.0, -4.0], vec![10.0, 12.0]];
        assert_eq!(run(Kind::ReduceScatter(ReduceKind::Sum), &operands, 2), scattered);
        let exchanged = vec![vec![1.0, 2.0, 5.0, -6.0], vec![3.0, 4.0, 7.0, 8.0]];
        assert_eq!(run(Kind::AllToAll, &operands, 4), exchanged);
        let three = [vec![1.0], vec![2.0], vec![4.0]];
        assert_eq!(run(Kind::AllReduce(ReduceKind::Sum), &three, 1), vec![vec![7.0]; 3]);
    }

    #[test]
    fn a_wait_in_vain_ends() {
        let exchange = Exchange::new(2);
        exchange.member(1).end();
        let outcome = exchange.member(0).arrive(&[0, 1]);
        assert!(matches!(&outcome, Err(Interrupt::Failed(text)) if text.contains("rank 1 has ended")), "{outcome:?}");
        let exchange = Exchange::new(2);
        exchange.abort();
        assert_eq!(exchange.member(0).receive(1, &mut []), Err(Interrupt::Aborted));
    }
}
