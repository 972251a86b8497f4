//! Messages between the stages of a pipeline whose GPUs reach each other's memory: the sender copies what it sends to where
//! the receiver wants it.
//!
//! A section of the sender runs with several sections of the receiver, each of which receives somewhere else. So where a
//! message goes is known by its number: of all that one rank sends another in a step, in their order, which is the order
//! in which the other receives them.

use super::peers::{Exchange, Peers};
use super::script::{receive, send};
use super::{Exchanges, Failure};
use crate::cuda::device::Device;
use crate::cuda::executor::section_index;
use shardc_ir::program::{Action, Instruction};
use shardc_ir::{BufferId, Program};
use std::cell::Cell;
use std::collections::BTreeMap;

/// By the other rank, where the messages of a step lie in the arena, in their order, and their bytes.
pub(super) type Places = BTreeMap<u64, Vec<(u64, u64)>>;

/// The other rank of a message that is sent, or received, and its buffer.
fn message(instruction: &Instruction, is_send: bool) -> Option<(u64, BufferId)> {
    match instruction.action {
        Action::Send { peer } if is_send => instruction.operands.first().map(|buffer| (peer, *buffer)),
        Action::Receive { peer } if !is_send => instruction.results.first().map(|buffer| (peer, *buffer)),
        _ => None,
    }
}

/// Where the messages lie that a rank sends, or receives.
pub(super) fn places(program: &Program, is_send: bool) -> Places {
    let of_section = |section: &shardc_ir::program::Section| {
        let all = section.instructions.iter().filter_map(|instruction| message(instruction, is_send));
        all.map(|(peer, id)| (peer, program.buffers[id].offset, program.buffers[id].ty.bytes().0)).collect()
    };
    let sections: Vec<Vec<(u64, u64, u64)>> = program.sections.values().map(of_section).collect();
    let mut places = Places::new();
    for (peer, offset, bytes) in program.order.iter().flat_map(|run| &sections[section_index(run.section)]) {
        places.entry(*peer).or_default().push((*offset, *bytes));
    }
    places
}

/// The receiving ends of messages of these ranks.
pub(super) fn receiving(
    device: &mut Device,
    peers: &Peers,
    program: &Program,
    received: &Places,
) -> Result<Exchanges, Failure> {
    let mut exchanges = Exchanges::new();
    for (id, section) in program.sections.iter() {
        for (index, instruction) in section.instructions.iter().enumerate() {
            let Some((peer, _)) = message(instruction, false) else { continue };
            if received.contains_key(&peer) {
                let bound = peers.bind(device, &[peer, program.rank], &receive())?;
                exchanges.insert((section_index(id), index), bound);
            }
        }
    }
    Ok(exchanges)
}

/// The messages that a rank sends by copies in a step.
#[derive(Default)]
pub struct Mail(BTreeMap<u64, (Vec<Exchange>, Cell<usize>)>);

impl Mail {
    /// Of messages that lie in these places; `there` says where the other rank wants what this one sends.
    ///
    /// # Errors
    /// Ranks whose programs do not fit together.
    pub(super) fn new(
        device: &mut Device,
        peers: &Peers,
        rank: u64,
        sent: Places,
        there: &dyn Fn(u64) -> Option<Vec<(u64, u64)>>,
    ) -> Result<Self, Failure> {
        let mut all = BTreeMap::new();
        for (peer, from) in sent {
            let to = there(peer).unwrap_or_default();
            let bytes = |places: &[(u64, u64)]| places.iter().map(|(_, bytes)| *bytes).collect::<Vec<_>>();
            if bytes(&to) != bytes(&from) {
                let (ours, theirs) = (from.len(), to.len());
                return Err(format!("rank {rank} sends rank {peer} {ours} messages, which receives {theirs} others"));
            }
            let acts = from.iter().zip(&to).map(|((from, bytes), (to, _))| send(*from, *to, *bytes));
            let bound = acts.map(|acts| peers.bind(device, &[rank, peer], &acts)).collect::<Result<_, _>>()?;
            all.insert(peer, (bound, Cell::new(0)));
        }
        Ok(Self(all))
    }

    /// A step begins.
    pub fn begin(&self) {
        self.0.values().for_each(|(_, next)| next.set(0));
    }

    /// The next message to a rank, if those go by copies.
    pub fn next(&self, peer: u64) -> Option<&Exchange> {
        let (all, next) = self.0.get(&peer)?;
        all.get(next.replace(next.get() + 1))
    }
}
