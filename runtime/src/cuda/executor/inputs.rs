//! A rank's inputs in page-locked memory, from where a step's feeds copy them.
//!
//! Each place there is a part of an input, as one or more microbatches read it. A stream that has read a place says
//! so in a word of host memory, so the next step's inputs are written as soon as this one needs its own no more,
//! and that step finds them there.

use crate::Feeds;
use crate::cuda::device::{Device, Failure};
use shardc_ir::program::{Action, Feed, Stream};
use shardc_ir::tensor::for_each_row;
use shardc_ir::{HostTensor, Program};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::sync::Arc;

/// A part of an input in page-locked memory.
struct Place {
    input: usize,
    slice: Vec<(u64, u64)>,
    at: u64,
    /// The word that counts the reads of a step.
    word: u64,
    /// How many reads a step has, and how many of them were enqueued.
    reads: u32,
    enqueued: Cell<u32>,
}

/// All inputs of a rank.
pub struct Inputs {
    feeds: Vec<Feed>,
    /// Input by input, microbatch by microbatch.
    places: Vec<Place>,
    /// By input, the first of its places.
    first: Vec<usize>,
    /// By input, what its places hold, or will once `ahead` is written.
    held: Vec<Option<Arc<HostTensor>>>,
    /// Places to be written for the next step, in the order in which this one reads them for the last time.
    ahead: RefCell<VecDeque<usize>>,
    /// All places in that order.
    order: Vec<usize>,
}

impl Inputs {
    /// Takes page-locked memory for a program's inputs.
    pub fn new(program: &Program, device: &mut Device) -> Result<Self, Failure> {
        let feeds = program.inputs.clone();
        let words = device.allocate_pinned(4 * feeds.iter().map(|feed| feed.slices.len() as u64).sum::<u64>())?;
        let (mut places, mut first) = (Vec::new(), Vec::new());
        for (input, feed) in feeds.iter().enumerate() {
            first.push(places.len());
            for slice in &feed.slices {
                let elements: u64 = slice.iter().map(|(_, length)| length).product();
                let (at, word) =
                    (device.allocate_pinned(elements * feed.ty.dtype.size())?, words + 4 * places.len() as u64);
                places.push(Place { input, slice: slice.clone(), at, word, reads: 0, enqueued: Cell::new(0) });
            }
        }
        let held = vec![None; feeds.len()];
        let mut inputs = Self { feeds, places, first, held, ahead: RefCell::default(), order: Vec::new() };
        let runs = program.order.iter().flat_map(|run| {
            program.sections[run.section].instructions.iter().map(move |instruction| (run.microbatch, instruction))
        });
        let mut order = Vec::new();
        for (microbatch, instruction) in runs {
            if let Action::Feed { input } = instruction.action {
                let place = inputs.place(input, microbatch).ok_or("an input without a slice")?;
                inputs.places[place].reads += 1;
                order.retain(|known| *known != place);
                order.push(place);
            }
        }
        inputs.order = order;
        Ok(inputs)
    }

    /// The place that a microbatch reads; the last one where all that are left read the same.
    fn place(&self, input: usize, microbatch: u64) -> Option<usize> {
        let count = self.feeds[input].slices.len();
        Some(self.first[input] + (microbatch as usize).min(count.checked_sub(1)?))
    }

    /// A step begins, and the device is idle: writes what is not there yet.
    pub fn begin(&mut self, given: &Feeds, device: &Device) -> Result<(), Failure> {
        for place in self.ahead.get_mut().drain(..).map(|place| &self.places[place]) {
            self.held[place.input].iter().for_each(|tensor| write(place, tensor, device));
        }
        for (input, feed) in self.feeds.iter().enumerate() {
            let tensor = given.get(&feed.name).ok_or_else(|| format!("`{}` was not given", feed.name))?;
            if !self.held[input].as_ref().is_some_and(|held| Arc::ptr_eq(held, tensor)) {
                self.held[input] = Some(tensor.clone());
                let places = self.places.iter().filter(|place| place.input == input);
                places.for_each(|place| write(place, tensor, device));
            }
        }
        self.restart(device);
        Ok(())
    }

    /// Nothing of the step is enqueued, or all of it is enqueued anew.
    pub fn restart(&self, device: &Device) {
        for place in &self.places {
            place.enqueued.set(0);
            device.write_pinned(place.word, &0u32.to_ne_bytes());
        }
    }

    /// Enqueues a microbatch's copy of an input.
    pub fn feed(
        &self,
        (input, microbatch): (usize, u64),
        (to, bytes): (u64, u64),
        device: &Device,
        stream: Stream,
    ) -> Result<(), Failure> {
        let place = &self.places[self.place(input, microbatch).ok_or("an input without a slice")?];
        device.copy(to, place.at, bytes, stream)?;
        place.enqueued.set(place.enqueued.get() + 1);
        device.write_word(place.word, place.enqueued.get(), stream)
    }

    /// The step under way is followed by one with these inputs; those that are not given come later.
    pub fn follow(&mut self, next: &Feeds) {
        let mut is_new = vec![false; self.feeds.len()];
        for (input, feed) in self.feeds.iter().enumerate() {
            let Some(tensor) = next.get(&feed.name).filter(|tensor| tensor.ty == feed.ty) else { continue };
            is_new[input] = !self.held[input].as_ref().is_some_and(|held| Arc::ptr_eq(held, tensor));
            self.held[input] = Some(tensor.clone());
        }
        let ahead = self.order.iter().copied().filter(|place| is_new[self.places[*place].input]);
        *self.ahead.get_mut() = ahead.collect();
    }

    /// Writes a place of the next step, if one is to be written and the step under way reads it no more; whether it did.
    pub fn write_ahead(&self, device: &Device) -> bool {
        let mut ahead = self.ahead.borrow_mut();
        let Some(place) = ahead.front().map(|place| &self.places[*place]) else { return false };
        let is_free = device.pinned_word(place.word) == place.reads;
        if let Some(tensor) = self.held[place.input].as_ref().filter(|_| is_free) {
            write(place, tensor, device);
            ahead.pop_front();
        }
        is_free
    }
}

fn write(place: &Place, tensor: &HostTensor, device: &Device) {
    let mut at = place.at;
    for_each_row(&tensor.ty, &place.slice, |offset, length| {
        device.write_pinned(at, &tensor.bytes[offset..offset + length]);
        at += length as u64;
    });
}
