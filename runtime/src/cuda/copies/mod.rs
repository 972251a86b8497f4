//! Collectives by copies: what the copy engines do beside the multiprocessors.
//!
//! NCCL moves bytes by kernels, which hold multiprocessors that matrix products want: both become slower while they
//! run beside each other. Ranks whose GPUs are linked by NVLink reach each other's memory, so that a GPU's copy
//! engines can write parts straight to where they belong ([`peers`]); only the additions of a reduction are kernels.
//! What is done in which order is a [`script`]. Small collectives, and those between hosts, stay with NCCL.

mod peers;
mod script;

use super::device::{Device, Failure};
use super::executor::{part, section_index};
use super::nccl::Part;
use crate::launch::World;
pub use peers::{Exchange, Peers, Release};
use script::{Spot, View};
use shardc_ir::plan::Space;
use shardc_ir::program::{Action, Instruction, Stream};
use shardc_ir::sharding::ReduceKind;
use shardc_ir::{BufferId, DType, Program, TensorType};
use std::collections::BTreeMap;

/// The variable that, set to `0`, leaves all collectives to NCCL.
const SWITCH: &str = "SHARDC_CUDA_COPIES";

/// Bytes below which a collective is NCCL's: what it takes then is waiting.
const LEAST: u64 = 1 << 20;

/// Bytes of scratch memory into which parts to be added are sent, at most. The less it is, the more sums there are to
/// wait for: each begins when a kernel that holds the multiprocessors ends.
const STAGING: u64 = 256 << 20;

/// Whether a collective of tensors of these types can go by copies, and the scratch memory that it takes then.
pub fn scratch(action: &Action, operands: &[TensorType], results: &[TensorType]) -> Option<u64> {
    let bytes = |types: &[TensorType]| types.iter().map(|ty| ty.bytes().0).sum::<u64>();
    let adds = |ty: &TensorType| matches!(ty.dtype, DType::F32 | DType::Bf16 | DType::F16);
    match action {
        Action::AllGather { .. } => (bytes(results) >= LEAST).then_some(0),
        Action::ReduceScatter { reduce: ReduceKind::Sum, .. } | Action::AllReduce { reduce: ReduceKind::Sum, .. } => {
            (operands.iter().all(adds) && bytes(operands) >= LEAST).then(|| bytes(operands).min(STAGING))
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

/// What a rank tells the others.
#[derive(Debug, Default, serde::Serialize, serde::Deserialize)]
struct Told {
    /// None where it leaves all to NCCL.
    card: Option<peers::Card>,
    /// Of each group, its collectives in order.
    spots: Vec<(Vec<u64>, Vec<Spot>)>,
}

/// The collectives that go by copies, by section and instruction.
pub type Exchanges = BTreeMap<(usize, usize), Exchange>;

/// Where parts of an instruction lie in the arena, if they do.
fn site<'a>(program: &'a Program, at: (usize, usize), instruction: &'a Instruction) -> Option<Site<'a>> {
    let types = |ids: &[BufferId]| ids.iter().map(|id| program.buffers[*id].ty.clone()).collect::<Vec<_>>();
    let needed = scratch(&instruction.action, &types(&instruction.operands), &types(&instruction.results))?;
    let (Action::AllGather { group } | Action::ReduceScatter { group, .. } | Action::AllReduce { group, .. }) =
        &instruction.action
    else {
        return None;
    };
    let is_here = |id: &BufferId| program.buffers[*id].space == Space::Device;
    let all = instruction.operands.iter().chain(&instruction.results);
    if instruction.stream != Stream::Communication || !{ all }.all(is_here) || program.groups[*group].len() < 2 {
        return None;
    }
    let in_arena = |id: &BufferId| program.buffers[*id].offset;
    let indices = 0..instruction.operands.len();
    let parts: Vec<Part> = indices.map(|index| part(program, instruction, index, in_arena)).collect();
    let scratch = instruction.scratch.map(|scratch| &program.buffers[scratch]);
    let bytes = [needed].into_iter().chain(parts.iter().map(|part| part.sent * part.dtype.size())).collect();
    let results = parts.iter().map(|part| part.to).collect();
    let spot = Spot { scratch: scratch.map_or(0, |scratch| scratch.offset), results, bytes };
    let group = &program.groups[*group][..];
    Some(Site { at, action: &instruction.action, group, parts, scratch: needed, spot })
}

fn sites(program: &Program) -> Vec<Site<'_>> {
    let sections = program.sections.iter();
    let all = sections.flat_map(|(id, section)| {
        let each = section.instructions.iter().enumerate();
        each.map(move |(index, instruction)| ((section_index(id), index), instruction))
    });
    all.filter_map(|(at, instruction)| site(program, at, instruction)).collect()
}

/// Opens the memory of the other ranks, and makes the collectives of a program that can go by copies between the
/// ranks of their group. All ranks call this at the same time; each is a process of its own, or nothing is opened.
///
/// # Errors
/// Ranks that do not come or whose programs do not fit together; a driver that refuses what it promised.
pub fn meet(
    device: &mut Device,
    world: &World,
    program: &Program,
    arena: Option<u64>,
) -> Result<Option<(Peers, Exchanges)>, Failure> {
    if program.ranks < 2 || world.ranks() != program.ranks {
        return Ok(None);
    }
    let sites = sites(program);
    let is_wanted = std::env::var(SWITCH).as_deref() != Ok("0") && !sites.is_empty();
    let mut own = match arena.filter(|_| is_wanted) {
        Some(arena) => Some(Peers::new(device, arena, program.rank, program.ranks)?),
        None => None,
    };
    let mut spots: BTreeMap<Vec<u64>, Vec<Spot>> = BTreeMap::new();
    sites.iter().for_each(|site| spots.entry(site.group.to_vec()).or_default().push(site.spot.clone()));
    let card = own.as_ref().and_then(|peers| peers.card().inspect_err(|why| tracing::info!("no copies: {why}")).ok());
    let told = gather(world, "memory", &Told { card, spots: spots.into_iter().collect() })?;
    if let Some(own) = &mut own {
        for (rank, other) in (0..).zip(&told).filter(|(rank, _)| *rank != program.rank) {
            let is_met = |site: &Site<'_>| site.group.contains(&rank);
            let Some(card) = other.card.as_ref().filter(|_| sites.iter().any(is_met)) else { continue };
            if let Err(why) = own.open(rank, card) {
                tracing::info!("rank {}: the memory of rank {rank} is not reached: {why}", program.rank);
            }
        }
    }
    // A group's ranks all go by copies, or none does.
    let reached = (0..program.ranks).filter(|rank| own.as_ref().is_some_and(|own| own.reaches(*rank)));
    let reached: Vec<Vec<u64>> = gather(world, "reached", &reached.collect::<Vec<u64>>())?;
    let Some(own) = own else { return Ok(None) };
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
    tracing::info!("rank {}: {} of {} large collectives go by copies", program.rank, exchanges.len(), sites.len());
    Ok(Some((own, exchanges)))
}

/// The `number`th collective of its group.
fn exchange(
    device: &mut Device,
    peers: &Peers,
    site: &Site<'_>,
    number: usize,
    told: &[Told],
) -> Result<Exchange, Failure> {
    let spot = |rank: &u64| {
        let of = told.get(*rank as usize)?.spots.iter().find(|(group, _)| group == site.group)?;
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

fn gather<T: serde::Serialize + serde::de::DeserializeOwned>(
    world: &World,
    name: &str,
    value: &T,
) -> Result<Vec<T>, Failure> {
    let bytes = serde_json::to_vec(value).map_err(|error| error.to_string())?;
    let all = world.gather(name, &bytes).map_err(|error| error.to_string())?;
    all.iter().map(|bytes| serde_json::from_slice(bytes).map_err(|error| format!("{name}: {error}"))).collect()
}
