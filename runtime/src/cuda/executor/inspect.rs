//! The last step once more, looked into: where does the first value that is not finite come from?
//!
//! The inputs are brought back to where the step read them, and slots are as before it, since an update by gradients
//! that are not finite changes nothing. Every instruction is run and waited for, and a kernel looks at its
//! results. All ranks do this together, to the end, so that they meet in collectives.

use super::{Rank, section_index};
use crate::cuda::device::Failure;
use crate::cuda::kernel::{Arg, Launch};
use crate::cuda::select::{Selection, Step, select_scan};
use crate::watch::{Finding, Watch};
use shardc_ir::program::{Action, Stream};
use shardc_ir::{BufferId, DType};
use std::sync::atomic::AtomicBool;

/// The bytes that a scan writes.
const WORDS: u64 = 8;

impl Rank {
    /// What the last step made first that is not finite, in a sentence.
    pub fn inspect(&mut self, stop: &AtomicBool) -> Result<Option<String>, Failure> {
        let words = self.device.allocate_pinned(WORDS)?;
        self.load_scans()?;
        let given = std::mem::take(&mut self.given);
        self.inputs.begin(&given, &self.device)?;
        self.trail.begin();
        self.mail.begin();
        self.first_finding(words, stop)
    }

    fn first_finding(&self, words: u64, stop: &AtomicBool) -> Result<Option<String>, Failure> {
        let (program, mut watch) = (self.program.clone(), Watch::default());
        for run in &program.order {
            for (index, instruction) in program.sections[run.section].instructions.iter().enumerate() {
                let ready = &self.sections[section_index(run.section)][index];
                let failed = |error: Failure| format!("{}: {error}", ready.text);
                self.enqueue(&ready.commands, ready.stream, run.microbatch).map_err(failed)?;
                self.finish(ready.stream, stop).map_err(failed)?;
                let Action::Compute(op) = &instruction.action else { continue };
                if watch.is_watching() {
                    let find = |id: BufferId| self.scan(id, words, stop);
                    watch.inspect(&program, instruction, (op, &*ready.text), find)?;
                }
            }
        }
        Ok(watch.text())
    }

    /// Compiles the kernels that look at the program's buffers.
    fn load_scans(&mut self) -> Result<(), Failure> {
        let scanned = self.program.buffers.values().filter(|buffer| is_scanned(buffer.ty.dtype));
        let scans: Vec<Selection> = scanned.map(|buffer| select_scan(&buffer.ty)).collect();
        self.device.load_missing(scans.iter().flat_map(launches).map(|launch| &launch.kernel))
    }

    /// The worst element of a buffer.
    fn scan(&self, id: BufferId, words: u64, stop: &AtomicBool) -> Result<Finding, Failure> {
        let ty = &self.program.buffers[id].ty;
        if !is_scanned(ty.dtype) || ty.elements() == 0 {
            return Ok(Finding::Finite);
        }
        self.device.write_pinned(words, &[0; WORDS as usize]);
        let at = |arg| match arg {
            Arg::Operand(_, bytes) => self.address(id) + bytes,
            Arg::Result(_, bytes) | Arg::Scratch(bytes) => words + bytes,
        };
        for launch in launches(&select_scan(ty)) {
            self.device.launch(&self.device.prepare(launch, at)?, Stream::Compute)?;
        }
        self.finish(Stream::Compute, stop)?;
        let found = self.device.read_pinned(words, WORDS as usize);
        Ok(match (found[4], found[0]) {
            (1.., _) => Finding::Nan,
            (0, 1..) => Finding::Infinite,
            (0, 0) => Finding::Finite,
        })
    }
}

fn launches(selection: &Selection) -> impl Iterator<Item = &Launch> {
    selection.steps.iter().filter_map(|step| if let Step::Launch(launch) = step { Some(&**launch) } else { None })
}

/// The element types in which computations are made.
fn is_scanned(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::Bf16 | DType::F16)
}
