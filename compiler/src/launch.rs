//! One process per GPU, from the library's side.
//!
//! `cuda:N` with more than one rank runs as one process per GPU. A process that no launcher started
//! becomes the launcher of this host: where the ranks are to start ([`Compiled::start`](crate::Compiled::start)) it starts its
//! own program again, once per GPU and with the same arguments, waits for all, and ends. Each of these
//! comes the same way to the same place and goes on as its rank; [`crate::compile()`] there takes the
//! plan that the launcher made. A process that torchrun, srun or mpirun started is a rank from the
//! first, and starts nothing.
//!
//! So a program that trains on several GPUs runs once per GPU, up to its end, and once more as the
//! launcher, up to the start of the ranks. What is to happen once belongs behind [`is_lead`].
//!
//! Before a rank takes its first step all compare what they were given: plan, programs, options and
//! the first batch.

use crate::error::Error;
use sha2::{Digest, Sha256};
use shardc_ir::Plan;
use shardc_ir::verify::{self, VerifiedPlan};
use shardc_passes::cluster::Cluster;
use shardc_runtime::launch::{Limits, Place, World};
use shardc_runtime::{Feeds, cuda};
use std::fmt::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The run that this process is a rank of, as long as anything holds it.
static WORLD: Mutex<Weak<World>> = Mutex::new(Weak::new());

/// Whether this process has started its ranks, or is one that has.
static STARTED: AtomicBool = AtomicBool::new(false);

/// Whether this process speaks for the run: the only one, the launcher, or rank 0. Of ranks that
/// shardc's launcher started, rank 0 does so from [`Compiled::start`](crate::Compiled::start) on: before, the launcher does.
pub fn is_lead() -> bool {
    match Place::from_env() {
        Ok(Some(place)) => place.rank == 0 && (!place.is_ours || STARTED.load(Ordering::Relaxed)),
        _ => true,
    }
}

/// The run of `ranks` ranks: joined when first asked for. `None` if no launcher started this process.
fn joined(ranks: u64) -> Result<Option<Arc<World>>, Error> {
    let Some(place) = Place::from_env()? else { return Ok(None) };
    if place.ranks != ranks {
        let message =
            format!("the cluster has {ranks} ranks, but {} started {} processes", place.launcher, place.ranks);
        return Err(Error::request(message, format!("start {ranks} processes, or ask for cuda:{}", place.ranks)));
    }
    let mut known = WORLD.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(world) = known.upgrade() {
        return Ok(Some(world));
    }
    let device = format!("GPU {}", place.local_rank);
    let world = Arc::new(World::join(place, &device, Limits::from_env()?)?);
    *known = Arc::downgrade(&world);
    Ok(Some(world))
}

/// The plan that the launcher made for this request, if it started this process.
///
/// # Errors
/// A launcher that is gone; a plan that is not one.
pub(crate) fn planned(key: &str, cluster: &Cluster) -> Result<Option<(Arc<World>, VerifiedPlan<'static>)>, Error> {
    let is_ours = Place::from_env()?.is_some_and(|place| place.is_ours && place.ranks == cluster.ranks());
    if !is_ours || !is_cuda(&cluster.name) {
        return Ok(None);
    }
    let Some(world) = joined(cluster.ranks())? else { return Ok(None) };
    let Some(text) = world.look(&format!("plan/{key}"))? else { return Ok(None) };
    let plan = Plan::from_json(&String::from_utf8_lossy(&text));
    let plan = plan.map_err(|error| Error::Bug(format!("the launcher's plan: {error}")))?;
    let plan = verify::plan(plan).map_err(|found| Error::Bug(format!("the launcher's plan: {found}")))?;
    Ok(Some((world, plan)))
}

/// Whether a cluster is of this machine's GPUs.
pub(crate) fn is_cuda(cluster: &str) -> bool {
    cluster.split(':').next() == Some("cuda")
}

/// A short name of anything that can be printed.
pub(crate) fn digest(text: &str) -> String {
    Sha256::digest(text).iter().fold(String::new(), |mut digits, byte| {
        let _ = write!(digits, "{byte:02x}");
        digits
    })
}

/// Whether processes are to be started for these ranks: each has a GPU of its own, and none has begun.
///
/// # Errors
/// Variables of a launcher that make no sense.
pub(crate) fn is_missing(ranks: u64, cluster: &str) -> Result<bool, Error> {
    Ok(ranks > 1 && is_cuda(cluster) && Place::from_env()?.is_none())
}

/// The run of a cluster's ranks that this process is part of, from its start on; `known` if it has joined one.
///
/// # Errors
/// Processes that a launcher started for one rank; a run that cannot be joined.
pub(crate) fn world(known: Option<&Arc<World>>, ranks: u64, cluster: &str) -> Result<Arc<World>, Error> {
    STARTED.store(true, Ordering::Relaxed);
    if let Some(world) = known {
        return Ok(world.clone());
    }
    let is_joined = ranks > 1 && is_cuda(cluster);
    if let Some(place) = Place::from_env()?.filter(|_| !is_joined) {
        // Each of them would do all of it, and write the same files.
        let message = format!("{} started {} processes, and cluster {cluster} is one", place.launcher, place.ranks);
        return Err(Error::request(message, format!("start one, or ask for cuda:{}", place.ranks)));
    }
    let world = if is_joined { joined(ranks)? } else { None };
    world.map_or_else(|| Ok(Arc::new(World::alone_within(Limits::from_env()?))), Ok)
}

/// Which GPU of this host a rank takes: that of its local rank, or the only one it is allowed to see.
pub(crate) fn device(world: &World) -> Result<usize, Error> {
    let local = world.place().local_rank as usize;
    match cuda::require(&[local], world.ranks()) {
        Ok(()) => Ok(local),
        Err(cuda::CudaError::TooFewDevices { present: 1, .. }) => Ok(0),
        Err(error) => Err(error.into()),
    }
}

/// Checks that no two ranks drive the same device.
///
/// # Errors
/// Two ranks and their device.
pub(crate) fn check_distinct(world: &World, identity: &str) -> Result<(), Error> {
    let all = world.gather("device", identity.as_bytes())?;
    let same = |(rank, device): (usize, &Vec<u8>)| Some((all[..rank].iter().position(|other| other == device)?, rank));
    match all.iter().enumerate().find_map(same) {
        None => Ok(()),
        Some((first, second)) => Err(Error::request(
            format!("ranks {first} and {second} were given the same GPU"),
            "give each process a LOCAL_RANK of its own, or make one GPU visible to each (CUDA_VISIBLE_DEVICES)",
        )),
    }
}

/// Checks that all ranks read the same first batch.
///
/// # Errors
/// Two ranks and the hashes of their batches.
pub(crate) fn agree_on_batch(world: &World, batch: &Feeds) -> Result<(), Error> {
    if world.is_alone() {
        return Ok(());
    }
    let mut hash = Sha256::new();
    for (name, tensor) in batch {
        hash.update(format!("{name}: {}", tensor.ty));
        hash.update(&tensor.bytes);
    }
    let digits = hash.finalize().iter().fold(String::new(), |digits, byte| format!("{digits}{byte:02x}"));
    Ok(world.agree(&[("first batch's hash", digits)])?)
}

/// Waits for the other ranks behind the last step: none leaves its groups while another may still be in it.
///
/// # Errors
/// What ended the run on another rank.
pub fn leave(world: &World) -> Result<(), Error> {
    world.at("the end of the run");
    Ok(world.barrier("end")?)
}

/// Runs what a rank does; should it fail, all ranks are told why.
pub fn reporting<T>(world: &World, work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    let outcome = work();
    if let Err(error) = &outcome {
        world.fail(&error.to_string(), error.fix(), error.exit_code());
    }
    outcome
}
