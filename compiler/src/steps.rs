//! The steps of a run, one after the other on all ranks, while the batch of the next one is read.

use crate::error::Error;
use crate::metrics::StepMetrics;
use crate::train::Trainer;
use shardc_runtime::{Feeds, Span};
use std::ops::ControlFlow;
use std::sync::mpsc::sync_channel;

/// Who looks at the steps of a run, on every rank.
pub trait Observer {
    /// Whether this rank was told to stop: then all do, before the next step.
    fn is_stopped(&mut self) -> bool {
        false
    }

    /// What a step did and, if it was measured, what its instructions took; whether this rank wants another.
    fn saw(&mut self, step: StepMetrics, spans: Vec<Span>) -> ControlFlow<()>;
}

/// How the steps of a run ended.
#[derive(Debug, Default)]
pub struct Ended {
    /// Before all that were asked for were run.
    pub is_early: bool,
    /// Since a batch could not be read; what was trained before is kept.
    pub unread: Option<Error>,
}

impl Trainer<'_> {
    /// Runs so many steps, or until all ranks agree to stop. `batch` gives the tensors of each, from 0, on a thread of its
    /// own; the last one is measured, if that is asked.
    ///
    /// # Errors
    /// As [`Trainer::step`] and [`Trainer::goes_on`].
    pub fn steps(
        &mut self,
        count: u64,
        is_last_measured: bool,
        mut batch: impl FnMut(u64) -> Result<Feeds, Error> + Send,
        observer: &mut dyn Observer,
    ) -> Result<Ended, Error> {
        std::thread::scope(|scope| {
            let (read, batches) = sync_channel(0);
            scope.spawn(move || {
                for step in 0..count {
                    let batch = batch(step);
                    let is_last = batch.is_err();
                    if read.send(batch).is_err() || is_last {
                        break;
                    }
                }
            });
            let read = || batches.recv().map_err(|_| Error::Bug("the thread that reads batches has ended".to_string()));
            let (mut ended, mut is_enough, mut next) = (Ended::default(), false, None);
            for step in 0..count {
                let is_last = step + 1 == count;
                let batch = next.take().map_or_else(read, Ok)?;
                let batch = batch.map_err(|error| ended.unread.get_or_insert(error)).ok();
                // All ranks ask in the same place, so what one cannot read stops all of them before the step.
                let goes_on = self.goes_on(is_enough || ended.unread.is_some() || observer.is_stopped())?;
                let Some(batch) = batch.filter(|_| goes_on) else {
                    ended.is_early = true;
                    break;
                };
                next = if is_last { None } else { Some(read()?) };
                // What is wrong with it is told in its turn.
                if let Some(Ok(next)) = &next {
                    self.ahead(next);
                }
                let (step, spans) = match is_last && is_last_measured {
                    true => self.timed_step(batch)?,
                    false => (self.step(batch)?, Vec::new()),
                };
                is_enough = observer.saw(step, spans).is_break();
            }
            Ok(ended)
        })
    }
}
