//! The CPU backend: every rank is a thread of this process.
//!
//! Each rank has one arena per memory space, of exactly the bytes its program says. In a step every
//! rank's thread runs its program; they meet in collectives. The first rank that fails, or panics,
//! ends all of them, and is named.

mod collectives;
mod executor;
pub mod interpret;
mod kernels;
mod memory;
mod target;
#[cfg(test)]
mod tests;

pub use target::CpuTarget;

use crate::{Feeds, Readings, Runtime, RuntimeError, TimedStep, check_feeds, held};
use collectives::{Exchange, Interrupt};
use executor::Rank;
use interpret::compute_op;
use kernels::Context;
use shardc_ir::ops::Cast;
use shardc_ir::plan::Space;
use shardc_ir::program::Slot;
use shardc_ir::{Bytes, HostTensor, Program};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// The processor cores this process may use.
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, Into::into)
}

/// All ranks of a run, in this process.
pub struct CpuRuntime {
    ranks: Vec<Rank>,
}

impl CpuRuntime {
    /// Takes the memory of all ranks. `programs[i]` is the program of rank `i`. Parameters are zero
    /// until they are written; optimizer states have the numbers they start at.
    ///
    /// # Errors
    /// A malformed program: a compiler bug.
    pub fn new(programs: Vec<Program>) -> Result<Self, RuntimeError> {
        let count = programs.len() as u64;
        let mut ranks = Vec::with_capacity(programs.len());
        for (rank, program) in (0..).zip(programs) {
            if program.rank != rank || program.ranks != count {
                let message =
                    format!("program {rank} of {count} is that of rank {} of {}", program.rank, program.ranks);
                return Err(RuntimeError::Program(message));
            }
            let made = Rank::new(program);
            ranks.push(made.map_err(|message| RuntimeError::Program(format!("rank {rank}: {message}")))?);
        }
        Ok(Self { ranks })
    }

    fn slot(&self, rank: u64, name: &str) -> Result<(usize, &Slot), RuntimeError> {
        let index = rank as usize;
        let unknown = |what, name: String| RuntimeError::Unknown { what, name };
        let program = self.ranks.get(index).map(|rank| &rank.program);
        let program = program.ok_or_else(|| unknown("rank", rank.to_string()))?;
        let slot = program.slots.iter().find(|slot| slot.name == name);
        slot.map(|slot| (index, slot)).ok_or_else(|| unknown("slot", name.to_string()))
    }

    /// Runs a step on all ranks, measured if there is a clock.
    fn run(&mut self, feeds: &Feeds, clock: Option<Instant>) -> Result<Readings, RuntimeError> {
        check_feeds(self.ranks.iter().map(|rank| &*rank.program), feeds)?;
        let count = self.ranks.len();
        let context = Context { threads: (cores() / count.max(1)).max(1) };
        let exchange = Exchange::new(count);
        let first_failure: Mutex<Option<RuntimeError>> = Mutex::new(None);
        std::thread::scope(|scope| {
            for (index, rank) in (0..).zip(&mut self.ranks) {
                let (exchange, first_failure) = (&exchange, &first_failure);
                scope.spawn(move || {
                    let mut member = exchange.member(index);
                    let outcome = catch_unwind(AssertUnwindSafe(|| rank.step(context, &mut member, feeds, clock)));
                    let message = match outcome {
                        Ok(Ok(())) => return member.end(),
                        Ok(Err(Interrupt::Aborted)) => return,
                        Ok(Err(Interrupt::Failed(message))) => message,
                        Err(panic) => format!("panicked: {}", panic_text(&*panic)),
                    };
                    let failure = RuntimeError::Rank { rank: index, at: rank.at.clone(), message };
                    // Noted before the others are woken, so that the first cause stays first.
                    first_failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failure);
                    exchange.abort();
                });
            }
        });
        if let Some(failure) = first_failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(failure);
        }
        let Some(rank) = self.ranks.first() else { return Ok(BTreeMap::new()) };
        let reading = |reading: &shardc_ir::program::Reading| {
            let value = rank.reading(reading.buffer).map_err(RuntimeError::Program)?;
            Ok((reading.name.clone(), value))
        };
        rank.program.readings.iter().map(reading).collect()
    }
}

impl Runtime for CpuRuntime {
    fn ranks(&self) -> Vec<u64> {
        self.ranks.iter().map(|rank| rank.program.rank).collect()
    }

    fn write_slot(&mut self, rank: u64, name: &str, part: &HostTensor) -> Result<(), RuntimeError> {
        let (index, slot) = self.slot(rank, name)?;
        let (buffer, part) = (slot.buffer, held(slot, part, &self.ranks[index].program)?);
        let rank = &mut self.ranks[index];
        let program = rank.program.clone();
        rank.bytes_mut(buffer).copy_from_slice(&part.bytes);
        for slot in program.slots.iter().filter(|slot| slot.cast_of.as_deref() == Some(name)) {
            let to = program.buffers[slot.buffer].ty.clone();
            let cast = compute_op(&Cast {}.into(), std::slice::from_ref(&part), &[to])?;
            rank.bytes_mut(slot.buffer).copy_from_slice(&cast[0].bytes);
        }
        Ok(())
    }

    fn read_slot(&mut self, rank: u64, name: &str) -> Result<HostTensor, RuntimeError> {
        let (index, slot) = self.slot(rank, name)?;
        let rank = &self.ranks[index];
        let ty = rank.program.buffers[slot.buffer].ty.clone();
        Ok(HostTensor { ty, bytes: rank.bytes(slot.buffer).to_vec() }.beginning(&slot.part()))
    }

    fn step(&mut self, feeds: &Feeds) -> Result<Readings, RuntimeError> {
        self.run(feeds, None)
    }

    fn timed_step(&mut self, feeds: &Feeds) -> Result<TimedStep, RuntimeError> {
        let readings = self.run(feeds, Some(Instant::now()))?;
        let spans = self.ranks.iter().flat_map(|rank| rank.spans.iter().copied()).collect();
        Ok(TimedStep { readings, spans })
    }

    fn peak_bytes(&self) -> Bytes {
        self.ranks.iter().map(|rank| rank.program.arena(Space::Device)).max().unwrap_or_default()
    }

    fn first_non_finite(&mut self) -> Result<Option<String>, RuntimeError> {
        let found = self.ranks.iter().find_map(|rank| Some((rank.program.rank, rank.watch.text()?)));
        Ok(found.map(|(rank, text)| format!("rank {rank}: {text}")))
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
