//! Collectives and messages by copies: what the copy engines do beside the multiprocessors.
//!
//! NCCL moves bytes by kernels, which hold multiprocessors that matrix products want: both become slower while they run
//! beside each other. Ranks whose GPUs are linked by NVLink reach each other's memory, so that a GPU's copy engines can
//! write parts straight to where they belong ([`peers`]); only the additions of a reduction are kernels. The parts that
//! a rank adds lie in scratch memory of the program, which the collectives of a section share if they need about as
//! much. What is done in which order is a [`script`]. Small collectives, and those between hosts, stay with NCCL; so do
//! messages between hosts ([`messages`]).

mod messages;
mod peers;
mod script;

use super::device::{Device, Failure, host};
use super::executor::{part, section_index};
use super::gather::gather;
use super::nccl::Part;
use crate::launch::World;
pub use messages::Mail;
use messages::Places;
pub use peers::{Exchange, Peers, Release};
use script::{Spot, View};
use shardc_ir::plan::Space;
use shardc_ir::program::{Action, Instruction, Stream};
use shardc_ir::sharding::ReduceKind;
use shardc_ir::{BufferId, DType, Program, TensorType};
use std::collections::{BTreeMap, BTreeSet};

/// The variable that, set to `0`, leaves all collectives and messages to NCCL.
const SWITCH: &str = "SHARDC_CUDA_COPIES";

/// Bytes for each rank, and of each tensor on average, below which a collective is NCCL's: what it takes then is waiting. Sums
/// of 19 MB over four H100s take 125 us by NCCL's kernels and 182 us by copies; of 100 MB and more, and of gradients of 32
/// MiB beside products, copies are faster, but for buckets of many tensors; of 25 MB over two H200s as well, beside products
/// (`bench/HISTORY.md`).
const LEAST_OF_RANK: u64 = 8 << 20;
const LEAST_OF_EACH: u64 = 4 << 20;

/// Bytes of scratch memory into which parts to be added are sent, at most. The less it is, the more sums there are to
/// wait for: each begins when a kernel that holds the multiprocessors ends.
const STAGING: u64 = 256 << 20;

fn bytes(types: &[TensorType]) -> u64 {
    types.iter().map(|ty| ty.bytes().0).sum()
}

/// Whether a collective of tensors of these types can go by copies, between two ranks if not between more, and the scratch
/// memory that it takes then.
pub fn scratch(action: &Action, operands: &[TensorType], results: &[TensorType]) -> Option<u64> {
    let is_large = |types: &[TensorType]| bytes(types) >= (2 * LEAST_OF_RANK).max(LEAST_OF_EACH * types.len() as u64);
    let adds = |ty: &TensorType| matches!(ty.dtype, DType::F32 | DType::Bf16 | DType::F16);
    match action {
        Action::AllGather { .. } => is_large(results).then_some(0),
        Action::ReduceScatter { reduce: ReduceKind::Sum, .. } | Action::AllReduce { reduce: ReduceKind::Sum, .. } => {
            (operands.iter().all(adds) && is_large(operands)).then(|| bytes(operands).min(STAGING))
        }
        _ => None,
    }
}

/// A collective of the program that can go by copies.
struct Site<'a> {
    /// The section, and the instruction in it.
    at: (usize, usize),
    action: &'a Action,
    group: &'a [u64],
    /// Places in the arena.
    parts: Vec<Part>,
    scratch: u64,
    spot: Spot,
}

/// What a rank tells the others of its host.
#[derive(Debug, Default, serde::Serialize, serde::Deserialize)]
struct Told {
    /// None where its memory cannot be opened.
    card: Option<peers::Card>,
    /// Of each group, its collectives in order.
    spots: Vec<(Vec<u64>, Vec<Spot>)>,
    /// Where what other ranks send it comes to.
    received: Places,
}

/// The collectives that go by copies, and the receiving ends of messages, by section and instruction.
pub type Exchanges = BTreeMap<(usize, usize), Exchange>;

/// What goes by copies between ranks that reach each other.
pub struct Met {
    /// The memory of the others.
    pub peers: Peers,
    /// What is the same each time that it runs.
    pub exchanges: Exchanges,
    /// What is sent.
    pub mail: Mail,
}

/// Where parts of an instruction lie in the arena, if they do.
///
/// # Errors
/// Scratch memory that the instruction needs and lacks.
fn site<'a>(
    program: &'a Program,
    at: (usize, usize),
    instruction: &'a Instruction,
) -> Result<Option<Site<'a>>, Failure> {
    let types = |ids: &[BufferId]| ids.iter().map(|id| program.buffers[*id].ty.clone()).collect::<Vec<_>>();
    let (operands, results) = (types(&instruction.operands), types(&instruction.results));
    let needed = scratch(&instruction.action, &operands, &results);
    let Some(needed) = needed else { return Ok(None) };
    let (Action::AllGather { group } | Action::ReduceScatter { group, .. } | Action::AllReduce { group, .. }) =
        &instruction.action
    else {
        return Ok(None);
    };
    let is_here = |id: &BufferId| program.buffers[*id].space == Space::Device;
    let all = instruction.operands.iter().chain(&instruction.results);
    let ranks = program.groups[*group].len() as u64;
    let is_small = bytes(&operands).max(bytes(&results)) < LEAST_OF_RANK * ranks;
    if instruction.stream != Stream::Communication || !{ all }.all(is_here) || ranks < 2 || is_small {
        return Ok(None);
    }
    let in_arena = |id: &BufferId| program.buffers[*id].offset;
    let indices = 0..instruction.operands.len();
    let parts: Vec<Part> = indices.map(|index| part(program, instruction, index, in_arena)).collect();
    let given = instruction.scratch.map(|scratch| &program.buffers[scratch]);
    let has = given.map_or(0, |scratch| scratch.ty.bytes().0);
    if has < needed {
        let name = instruction.action.title();
        return Err(format!("{name} needs {needed} bytes of scratch memory and has {has}: lower it for CUDA"));
    }
    let bytes = [needed].into_iter().chain(parts.iter().map(|part| part.sent * part.dtype.size())).collect();
    let results = parts.iter().map(|part| part.to).collect();
    let spot = Spot { scratch: given.map_or(0, |scratch| scratch.offset), results, bytes };
    let group = &program.groups[*group][..];
    Ok(Some(Site { at, action: &instruction.action, group, parts, scratch: needed, spot }))
}

fn sites(program: &Program) -> Result<Vec<Site<'_>>, Failure> {
    let sections = program.sections.iter();
    let all = sections.flat_map(|(id, section)| {
        let each = section.instructions.iter().enumerate();
        each.map(move |(index, instruction)| ((section_index(id), index), instruction))
    });
    all.filter_map(|(at, instruction)| site(program, at, instruction).transpose()).collect()
}

/// Whether all ranks of a group are of one host. A rank that leaves all to NCCL names none.
fn is_of_one_host(group: &[u64], hosts: &[String]) -> bool {
    let host = |rank: &u64| hosts.get(*rank as usize).filter(|host| !host.is_empty());
    group.iter().all(|rank| host(rank).is_some() && host(rank) == host(&group[0]))
}

/// Opens the memory of the other ranks, and makes the collectives of a program that can go by copies between the
/// ranks of their group. All ranks call this at the same time; each is a process of its own, or nothing is opened.
///
/// # Errors
/// Ranks that do not come or whose programs do not fit together; a driver that refuses what it promised.
pub fn meet(device: &mut Device, world: &World, program: &Program, arena: Option<u64>) -> Result<Option<Met>, Failure> {
    if program.ranks < 2 || world.ranks() != program.ranks {
        return Ok(None);
    }
    let mut sites = sites(program)?;
    let [mut sent, mut received] = [true, false].map(|is_send| messages::places(program, is_send));
    let (count, key) = (sites.len(), world.round("memory"));
    let has_any = count > 0 || !sent.is_empty() || !received.is_empty();
    let is_wanted = std::env::var(SWITCH).as_deref() != Ok("0") && has_any && arena.is_some();
    let hosts: Vec<String> = gather(world, "hosts", &if is_wanted { host() } else { String::new() })?;
    sites.retain(|site| is_of_one_host(site.group, &hosts));
    for places in [&mut sent, &mut received] {
        places.retain(|peer, _| is_of_one_host(&[program.rank, *peer], &hosts));
    }
    let has_any = !sites.is_empty() || !sent.is_empty() || !received.is_empty();
    let mut own = match arena.filter(|_| has_any) {
        Some(arena) => Some(Peers::new(device, arena, program.rank, program.ranks)?),
        None => None,
    };
    let key = |rank: u64| format!("{key}/{rank}/");
    let mut told = BTreeMap::new();
    if let Some(own) = &mut own {
        let mut spots: BTreeMap<Vec<u64>, Vec<Spot>> = BTreeMap::new();
        sites.iter().for_each(|site| spots.entry(site.group.to_vec()).or_default().push(site.spot.clone()));
        let card = own.card().inspect_err(|why| tracing::info!("no copies: {why}")).ok();
        let of_own = Told { card, spots: spots.into_iter().collect(), received: received.clone() };
        let bytes = serde_json::to_vec(&of_own).map_err(|error| error.to_string())?;
        world.set(&key(program.rank), &bytes).map_err(|error| error.to_string())?;
        told.insert(program.rank, of_own);
        let met: BTreeSet<u64> =
            sites.iter().flat_map(|site| site.group).chain(sent.keys()).chain(received.keys()).copied().collect();
        for rank in met.into_iter().filter(|rank| *rank != program.rank) {
            let bytes = world.get(&key(rank), false).map_err(|error| error.to_string())?;
            let other: Told = serde_json::from_slice(&bytes).map_err(|error| format!("memory: {error}"))?;
            if let Some(Err(why)) = other.card.as_ref().map(|card| own.open(rank, card)) {
                tracing::info!("rank {}: the memory of rank {rank} is not reached: {why}", program.rank);
            }
            told.insert(rank, other);
        }
    }
    // A group's ranks all go by copies, or none does.
    let reached = (0..program.ranks).filter(|rank| own.as_ref().is_some_and(|own| own.reaches(*rank)));
    let reached: Vec<Vec<u64>> = gather(world, "reached", &reached.collect::<Vec<u64>>())?;
    let Some(own) = own else { return Ok(None) };
    // All have read it.
    world.remove(&key(program.rank)).map_err(|error| error.to_string())?;
    let is_whole =
        |group: &[u64]| group.iter().all(|rank| group.iter().all(|other| reached[*rank as usize].contains(other)));
    let mut counts: BTreeMap<&[u64], usize> = BTreeMap::new();
    let mut exchanges = Exchanges::new();
    for site in &sites {
        let count = counts.entry(site.group).or_default();
        let number = std::mem::replace(count, *count + 1);
        if is_whole(site.group) {
            exchanges.insert(site.at, exchange(device, &own, site, number, &told)?);
        }
    }
    tracing::info!("rank {}: {} of {} large collectives go by copies", program.rank, exchanges.len(), count);
    for places in [&mut sent, &mut received] {
        places.retain(|peer, _| is_whole(&[program.rank, *peer]));
    }
    exchanges.extend(messages::receiving(device, &own, program, &received)?);
    let there = |peer: u64| told.get(&peer).and_then(|told| told.received.get(&program.rank)).cloned();
    let mail = Mail::new(device, &own, program.rank, sent, &there)?;
    Ok(Some(Met { peers: own, exchanges, mail }))
}

/// The `number`th collective of its group.
fn exchange(
    device: &mut Device,
    peers: &Peers,
    site: &Site<'_>,
    number: usize,
    told: &BTreeMap<u64, Told>,
) -> Result<Exchange, Failure> {
    let spot = |rank: &u64| {
        let of = told.get(rank)?.spots.iter().find(|(group, _)| group == site.group)?;
        of.1.get(number).filter(|spot| spot.bytes == site.spot.bytes)
    };
    let spots: Option<Vec<Spot>> = site.group.iter().map(|rank| spot(rank).cloned()).collect();
    let spots = spots.ok_or_else(|| format!("ranks {:?} differ in their collective {number}", site.group))?;
    let is_all = matches!(site.action, Action::AllReduce { .. });
    let view =
        View { index: peers.index(site.group)?, spots: &spots, parts: &site.parts, scratch: site.scratch, is_all };
    let is_sum = !matches!(site.action, Action::AllGather { .. });
    peers.bind(device, site.group, &if is_sum { view.reduce() } else { view.all_gather() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_of_one_host_if_all_its_ranks_are() {
        let hosts = ["a", "a", "b", "", "b", ""].map(str::to_string);
        let is_one = |group: &[u64]| is_of_one_host(group, &hosts);
        assert!(is_one(&[0, 1]) && is_one(&[4, 2]));
        assert!(!is_one(&[0, 1, 2]), "two hosts");
        assert!(!is_one(&[2, 3]) && !is_one(&[3, 5]), "without copies");
        assert!(!is_one(&[0, 6]), "of no rank");
    }

    #[test]
    fn small_tensors_are_left_to_nccl() {
        let action = Action::AllGather { group: 0 };
        let by_copies = |shapes: &[u64]| {
            let types: Vec<TensorType> = shapes.iter().map(|size| TensorType::new(DType::Bf16, [*size])).collect();
            scratch(&action, &types, &types).is_some()
        };
        assert!(by_copies(&[8 << 20]) && by_copies(&[8 << 20, 16, 16]));
        assert!(!by_copies(&[(8 << 20) - 1]));
        assert!(!by_copies(&[&[17 << 20][..], &[16; 20]].concat()), "many small ones");
    }

    #[test]
    fn the_more_ranks_the_larger_is_what_goes_by_copies() {
        let by_copies = |ranks: &str, elements: u64| {
            let text = format!(
                "program rank 0 of 4 {{\n  arena device 268435456\n  group 0 = {ranks}\n  \
                 $0: f32[{elements}] device+0 buffer\n  $1: f32[{elements}] device+67108864 buffer\n  \
                 $2: u8[67108864] device+134217728 buffer\n  section main {{\n    \
                 0: $1 = all_reduce $0 sum over 0 scratch $2 on communication\n  }}\n  order main 0\n}}"
            );
            let program: Program = text.parse().unwrap();
            !sites(&program).unwrap().is_empty()
        };
        assert!(by_copies("0, 1", 4 << 20) && !by_copies("0, 1, 2, 3", 4 << 20));
        assert!(by_copies("0, 1, 2, 3", 8 << 20) && !by_copies("0, 1, 2, 3", (8 << 20) - 1));
    }

    #[test]
    fn a_sum_without_scratch_memory_is_refused() {
        let text = |scratch: &str| {
            format!(
                "program rank 0 of 2 {{\n  arena device 268435456\n  group 0 = 0, 1\n  \
                 $0: f32[8388608] device+0 buffer\n  $1: f32[8388608] device+33554432 buffer\n  \
                 $2: u8[33554432] device+67108864 buffer\n  $3: u8[33554431] device+100663296 buffer\n  section main {{\n    \
                 0: $1 = all_reduce $0 sum over 0{scratch} on communication\n  }}\n  order main 0\n}}"
            )
        };
        let found = |scratch: &str| {
            let program: Program = text(scratch).parse().unwrap();
            sites(&program).map(|sites| sites.iter().map(|site| site.spot.scratch).collect::<Vec<_>>())
        };
        assert_eq!(found(" scratch $2"), Ok(vec![67_108_864]));
        assert!(found(" scratch $3").unwrap_err().contains("needs 33554432 bytes of scratch memory and has 33554431"));
        assert!(found("").unwrap_err().contains("has 0"));
    }
}
