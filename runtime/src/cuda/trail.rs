//! Where a rank's streams stand: what a hang is named by.
//!
//! After each collective its stream writes the collective's number in the step to a word of host
//! memory, which any thread may read at any time, without the driver and whatever state the device
//! is in. A stream that hangs stands at the first collective that was issued and has no number yet:
//! collectives are where ranks wait for one another.

use super::device::{Device, Failure};
use shardc_ir::program::Stream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// A collective of a step.
struct Mark {
    microbatch: u64,
    text: Arc<str>,
}

/// The collectives of a step on one stream, in the order of issue.
struct Line {
    stream: Stream,
    marks: Vec<Mark>,
    issued: AtomicU32,
    passed: &'static AtomicU32,
    /// The device's address of `passed`.
    at: u64,
}

/// The collectives of a step, per stream.
#[derive(Default)]
pub struct Trail {
    lines: Vec<Line>,
}

impl Trail {
    /// Of a step's collectives in the order of issue: stream, microbatch and text.
    pub fn new(device: &Device, collectives: impl Iterator<Item = (Stream, u64, Arc<str>)>) -> Result<Self, Failure> {
        let mut lines: Vec<Line> = Vec::new();
        for (stream, microbatch, text) in collectives {
            let mark = Mark { microbatch, text };
            match lines.iter_mut().find(|line| line.stream == stream) {
                Some(line) => line.marks.push(mark),
                None => {
                    let (passed, at) = device.host_word()?;
                    lines.push(Line { stream, marks: vec![mark], issued: AtomicU32::new(0), passed, at });
                }
            }
        }
        Ok(Self { lines })
    }

    /// A step begins; the device is idle.
    pub fn begin(&self) {
        for line in &self.lines {
            line.issued.store(0, Ordering::Relaxed);
            line.passed.store(0, Ordering::Relaxed);
        }
    }

    /// The next collective of a stream was issued.
    pub fn mark(&self, device: &Device, stream: Stream) -> Result<(), Failure> {
        let Some(line) = self.lines.iter().find(|line| line.stream == stream) else { return Ok(()) };
        let number = line.issued.fetch_add(1, Ordering::Relaxed) + 1;
        device.write_word(line.at, number, stream)
    }

    /// All collectives of a step were issued at once.
    pub fn issue_all(&self) {
        self.lines.iter().for_each(|line| line.issued.store(line.marks.len() as u32, Ordering::Relaxed));
    }

    /// What the streams stand at; `None` if every collective that was issued is done.
    pub fn text(&self) -> Option<String> {
        let stands = |line: &Line| {
            let (issued, passed) = (line.issued.load(Ordering::Relaxed), line.passed.load(Ordering::Relaxed));
            let mark = line.marks.get(passed as usize).filter(|_| passed < issued)?;
            Some(format!("the {} stream in microbatch {}: {}", line.stream.name(), mark.microbatch, mark.text))
        };
        let texts: Vec<String> = self.lines.iter().filter_map(stands).collect();
        (!texts.is_empty()).then(|| texts.join("; "))
    }
}

#[cfg(test)]
impl Trail {
    /// A trail whose stream stands at its only collective.
    pub fn standing(stream: Stream, microbatch: u64, text: &str) -> Self {
        static PASSED: AtomicU32 = AtomicU32::new(0);
        let marks = vec![Mark { microbatch, text: text.into() }];
        Self { lines: vec![Line { stream, marks, issued: AtomicU32::new(1), passed: &PASSED, at: 0 }] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_stands_at_the_first_collective_that_is_not_done() {
        static PASSED: AtomicU32 = AtomicU32::new(0);
        let mark = |microbatch, text: &str| Mark { microbatch, text: text.into() };
        let marks = vec![mark(0, "microbatch.3 AllReduce"), mark(1, "microbatch.3 AllReduce"), mark(0, "epilogue.1")];
        let issued = AtomicU32::new(0);
        let line = Line { stream: Stream::Communication, marks, issued, passed: &PASSED, at: 0 };
        let trail = Trail { lines: vec![line] };
        let check = |issued, passed, expect: Option<&str>| {
            trail.lines[0].issued.store(issued, Ordering::Relaxed);
            PASSED.store(passed, Ordering::Relaxed);
            let expect = expect.map(|text| format!("the communication stream in {text}"));
            assert_eq!(trail.text(), expect);
        };
        check(0, 0, None);
        check(1, 0, Some("microbatch 0: microbatch.3 AllReduce"));
        check(3, 1, Some("microbatch 1: microbatch.3 AllReduce"));
        check(3, 2, Some("microbatch 0: epilogue.1"));
        check(3, 3, None);
        trail.begin();
        assert_eq!(trail.text(), None);
        assert_eq!(PASSED.load(Ordering::Relaxed), 0);
    }
}
