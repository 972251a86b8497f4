//! A rank's inputs in page-locked memory, from where a step's feeds copy them, and on their way to the device.
//!
//! Each place there is a part of an input, as one or more microbatches read it. A stream that has read a place says
//! so in a word of host memory, so the next step's inputs are written as soon as this one needs its own no more,
//! and that step finds them there.
//!
//! A large input has a staging buffer on the device, from which feeds copy it. What a step feeds first comes there
//! while the step before it runs, outside of its graph: nobody knows when the host has a batch. What it feeds next
//! comes beside the run that read what was there.

use super::commands::Layout;
use crate::Feeds;
use crate::cuda::device::{Device, Failure};
use cudarc::driver::sys::CUevent;
use shardc_ir::HostTensor;
use shardc_ir::program::{Action, Feed, Stream};
use shardc_ir::tensor::for_each_row;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::sync::Arc;

/// A part of an input in page-locked memory.
struct Place {
    input: usize,
    slice: Vec<(u64, u64)>,
    at: u64,
    bytes: u64,
    /// The word that counts the reads of a step.
    word: u64,
    /// How many reads a step has, and how many of them were enqueued.
    reads: u32,
    enqueued: Cell<u32>,
}

/// Where a part of an input is on the device before it is fed.
struct Staging {
    at: u64,
    /// The places that a step feeds from it, in order.
    turns: Vec<usize>,
    /// How many of them were fed, and which it holds, by what was enqueued.
    fed: Cell<usize>,
    held: Cell<usize>,
    /// The word that is not 0 once the last of a step is fed.
    word: u64,
    /// Whether it holds what the next step feeds first, and when that is there.
    is_filled: Cell<bool>,
    arrived: CUevent,
}

/// All inputs of a rank.
pub struct Inputs {
    feeds: Vec<Feed>,
    /// Input by input, microbatch by microbatch.
    places: Vec<Place>,
    /// By input, the first of its places.
    first: Vec<usize>,
    /// By input.
    staging: Vec<Option<Staging>>,
    /// By input, what its places hold, or will once `ahead` is written.
    held: Vec<Option<Arc<HostTensor>>>,
    /// Places to be written for the next step, in the order in which this one reads them for the last time.
    ahead: RefCell<VecDeque<usize>>,
    /// Whether the next step's inputs are known.
    is_followed: bool,
    /// All places in that order.
    order: Vec<usize>,
}

impl Inputs {
    /// Takes page-locked memory for a program's inputs.
    pub fn new(layout: &Layout<'_>, device: &mut Device) -> Result<Self, Failure> {
        let program = layout.program;
        let feeds = program.inputs.clone();
        let parts = feeds.iter().map(|feed| feed.slices.len() as u64).sum::<u64>();
        let words = device.allocate_pinned(4 * (parts + feeds.len() as u64))?;
        let (mut places, mut first) = (Vec::new(), Vec::new());
        for (input, feed) in feeds.iter().enumerate() {
            first.push(places.len());
            for slice in &feed.slices {
                let bytes = slice.iter().map(|(_, length)| length).product::<u64>() * feed.ty.dtype.size();
                let (at, word) = (device.allocate_pinned(bytes)?, words + 4 * places.len() as u64);
                let slice = slice.clone();
                places.push(Place { input, slice, at, bytes, word, reads: 0, enqueued: Cell::new(0) });
            }
        }
        let mut staging: Vec<Option<Staging>> = feeds.iter().map(|_| None).collect();
        for (input, buffer) in program.staging() {
            let (at, turns, word) = (layout.buffer(buffer), Vec::new(), words + 4 * (parts + input as u64));
            let (fed, held, is_filled) = (Cell::new(0), Cell::new(0), Cell::new(false));
            staging[input] = Some(Staging { at, turns, fed, held, word, is_filled, arrived: device.event()? });
        }
        let (held, ahead) = (vec![None; feeds.len()], RefCell::default());
        let mut inputs = Self { feeds, places, first, staging, held, ahead, is_followed: false, order: Vec::new() };
        let runs = program.order.iter().flat_map(|run| {
            program.sections[run.section].instructions.iter().map(move |instruction| (run.microbatch, instruction))
        });
        let mut order = Vec::new();
        for (microbatch, instruction) in runs {
            if let Action::Feed { input } = instruction.action {
                let place = inputs.place(input, microbatch).ok_or("an input without a slice")?;
                inputs.is_fed(input, place);
                order.retain(|known| *known != place);
                order.push(place);
            }
        }
        inputs.order = order;
        Ok(inputs)
    }

    /// A step feeds a place of an input next.
    fn is_fed(&mut self, input: usize, place: usize) {
        let is_read = match &mut self.staging[input] {
            None => true,
            Some(staging) => {
                // The first is brought before the step.
                let is_brought = staging.turns.last().is_some_and(|last| *last != place);
                staging.turns.push(place);
                is_brought
            }
        };
        self.places[place].reads += u32::from(is_read);
    }

    /// The place that a microbatch reads; the last one where all that are left read the same.
    fn place(&self, input: usize, microbatch: u64) -> Option<usize> {
        let count = self.feeds[input].slices.len();
        Some(self.first[input] + (microbatch as usize).min(count.checked_sub(1)?))
    }

    /// A step begins, and the device is idle: writes what is not there yet. The compute stream waits for what is still
    /// on its way.
    pub fn begin(&mut self, given: &Feeds, device: &Device) -> Result<(), Failure> {
        for place in self.ahead.get_mut().drain(..).map(|place| &self.places[place]) {
            self.held[place.input].iter().for_each(|tensor| write(place, tensor, device));
        }
        for (input, feed) in self.feeds.iter().enumerate() {
            let tensor = given.get(&feed.name).ok_or_else(|| format!("`{}` was not given", feed.name))?;
            if !self.held[input].as_ref().is_some_and(|held| Arc::ptr_eq(held, tensor)) {
                if let Some(staging) = &self.staging[input] {
                    // What was brought ahead is another's, and may be on its way still.
                    device.drain(Stream::HostToDevice)?;
                    staging.is_filled.set(false);
                }
                self.held[input] = Some(tensor.clone());
                let places = self.places.iter().filter(|place| place.input == input);
                places.for_each(|place| write(place, tensor, device));
            }
        }
        for staging in self.staging.iter().flatten().filter(|staging| !staging.turns.is_empty()) {
            if !staging.is_filled.get() {
                self.fill(staging, device)?;
            }
            device.wait(staging.arrived, Stream::Compute)?;
            staging.is_filled.set(staging.turns.first() == staging.turns.last());
        }
        self.is_followed = false;
        self.restart(device);
        Ok(())
    }

    /// Nothing of the step is enqueued, or all of it is enqueued anew.
    pub fn restart(&self, device: &Device) {
        let of_staging = self.staging.iter().flatten().map(|staging| staging.word);
        for word in self.places.iter().map(|place| place.word).chain(of_staging) {
            device.write_pinned(word, &0u32.to_ne_bytes());
        }
        self.places.iter().for_each(|place| place.enqueued.set(0));
        for staging in self.staging.iter().flatten() {
            staging.fed.set(0);
            staging.held.set(0);
        }
    }

    /// Brings to a staging buffer what a step feeds first, outside of the step.
    fn fill(&self, staging: &Staging, device: &Device) -> Result<(), Failure> {
        let Some(place) = staging.turns.first().map(|place| &self.places[*place]) else { return Ok(()) };
        device.copy(staging.at, place.at, place.bytes, Stream::HostToDevice)?;
        device.record(staging.arrived, Stream::HostToDevice)?;
        staging.is_filled.set(true);
        Ok(())
    }

    /// Enqueues a microbatch's copy of an input.
    pub fn feed(
        &self,
        (input, microbatch): (usize, u64),
        (to, bytes): (u64, u64),
        device: &Device,
        stream: Stream,
    ) -> Result<(), Failure> {
        let Some(staging) = &self.staging[input] else {
            let place = &self.places[self.place(input, microbatch).ok_or("an input without a slice")?];
            device.copy(to, place.at, bytes, stream)?;
            return place.was_read(device, stream);
        };
        self.bring(staging, device, stream)?;
        device.copy(to, staging.at, bytes, stream)?;
        staging.fed.set(staging.fed.get() + 1);
        match staging.fed.get() == staging.turns.len() {
            true => device.write_word(staging.word, 1, stream),
            false => Ok(()),
        }
    }

    /// All of a run is enqueued: what later ones of the step feed next comes beside it.
    pub fn bring_next(&self, device: &Device) -> Result<(), Failure> {
        let mut staging = self.staging.iter().flatten();
        staging.try_for_each(|staging| self.bring(staging, device, Stream::HostToDevice))
    }

    /// Brings to a staging buffer what the step feeds next, unless it is there.
    fn bring(&self, staging: &Staging, device: &Device, stream: Stream) -> Result<(), Failure> {
        let (turns, next) = (&staging.turns, staging.fed.get());
        let (Some(held), Some(wanted)) = (turns.get(staging.held.get()), turns.get(next)) else { return Ok(()) };
        staging.held.set(next);
        if held == wanted {
            return Ok(());
        }
        let place = &self.places[*wanted];
        device.copy(staging.at, place.at, place.bytes, stream)?;
        place.was_read(device, stream)
    }

    /// The step under way is followed by one with these inputs; those that are not given come later.
    pub fn follow(&mut self, next: &Feeds) {
        let mut is_new = vec![false; self.feeds.len()];
        for (input, feed) in self.feeds.iter().enumerate() {
            let Some(tensor) = next.get(&feed.name).filter(|tensor| tensor.ty == feed.ty) else { continue };
            is_new[input] = !self.held[input].as_ref().is_some_and(|held| Arc::ptr_eq(held, tensor));
            self.held[input] = Some(tensor.clone());
            if let Some(staging) = self.staging[input].as_ref().filter(|_| is_new[input]) {
                staging.is_filled.set(false);
            }
        }
        let ahead = self.order.iter().copied().filter(|place| is_new[self.places[*place].input]);
        *self.ahead.get_mut() = ahead.collect();
        self.is_followed = true;
    }

    /// Writes a place of the next step, if one is to be written and the step under way reads it no more, and brings to
    /// the device what that step feeds first; whether it did anything.
    pub fn write_ahead(&self, device: &Device) -> Result<bool, Failure> {
        if !self.is_followed {
            return Ok(false);
        }
        for staging in self.staging.iter().flatten().filter(|staging| !staging.is_filled.get()) {
            let is_written = staging.turns.first().is_some_and(|first| !self.ahead.borrow().contains(first));
            if is_written && device.pinned_word(staging.word) != 0 {
                self.fill(staging, device)?;
                return Ok(true);
            }
        }
        let mut ahead = self.ahead.borrow_mut();
        let Some(index) = ahead.front().copied() else { return Ok(false) };
        let place = &self.places[index];
        let staging = self.staging[place.input].as_ref().filter(|staging| staging.turns.first() == Some(&index));
        let has_arrived = staging.map_or(Ok(true), |staging| device.passed(staging.arrived))?;
        let is_free = has_arrived && device.pinned_word(place.word) == place.reads;
        if let Some(tensor) = self.held[place.input].as_ref().filter(|_| is_free) {
            write(place, tensor, device);
            ahead.pop_front();
        }
        Ok(is_free)
    }
}

impl Place {
    /// Its bytes are read once more when a stream comes to this point.
    fn was_read(&self, device: &Device, stream: Stream) -> Result<(), Failure> {
        self.enqueued.set(self.enqueued.get() + 1);
        device.write_word(self.word, self.enqueued.get(), stream)
    }
}

fn write(place: &Place, tensor: &HostTensor, device: &Device) {
    let mut at = place.at;
    for_each_row(&tensor.ty, &place.slice, |offset, length| {
        device.write_pinned(at, &tensor.bytes[offset..offset + length]);
        at += length as u64;
    });
}
