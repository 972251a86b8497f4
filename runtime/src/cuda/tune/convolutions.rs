//! Convolutions by cuDNN: which engines are tried, and for how long.
//!
//! The library's model of the device errs most where there are few channels. What it proposes for one convolution is tried
//! for the others as well, and the knobs of the fastest are set as those of other engines are. The time of a program's is
//! limited: those with the most operations come first, and what is left keeps the library's first choice, for later
//! runs as well.

use super::bench::{self, Bench, HOPELESS, Memory, Trial};
use super::search::{Ratios, Tried};
use super::{Choice, Choices};
use crate::cuda::cudnn::{self, Bound, Configuration, Cudnn, Placed};
use crate::cuda::device::{Device, Failure};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// The version of this way of choosing.
const METHOD: u32 = 1;

/// How many engines are tried of those that the library proposes.
const CANDIDATES: usize = 16;

/// Convolutions of fewer operations are over before their engine matters.
const LEAST_FLOPS: f64 = 1e8;

/// Engines whose knobs are set in other ways, one knob at a time: the fastest.
const VARIED: usize = 1;

/// Engines in a row that are no faster than the fastest before, after which no more are tried: of those that the library
/// proposes, of those that it proposes for other convolutions, and of those with a knob set in another way.
const PATIENCE: [usize; 3] = [8, 6, 6];

/// Engines that are measured once more, longer: at most so many, which take at most so much longer than the fastest.
const FINALISTS: (usize, f64) = (2, 1.03);

/// The time after which no more engines are tried for one convolution, and for any.
const LONGEST: [Duration; 2] = [Duration::from_millis(300), Duration::from_secs(6)];

/// Runs of a measurement, at the least and at the most: the host takes longer to launch a short one than the device to run
/// it, so that they are recorded and launched at once.
const RUNS: (u32, u32) = (4, 20);

/// The file in which the choices for a device are kept.
pub fn file(device: &Device) -> Result<String, Failure> {
    super::file(device, "convolution", &format!("cudnn-{}", cudnn::version()), METHOD)
}

/// The convolutions that are worth measuring, one of each key.
pub fn convolutions(all: impl Iterator<Item = Placed>) -> BTreeMap<String, Placed> {
    let mut convolutions = BTreeMap::new();
    for placed in all.filter(|placed| placed.convolution.flops() >= LEAST_FLOPS) {
        convolutions.entry(placed.convolution.key()).or_insert(placed);
    }
    convolutions
}

/// Measures some of a program's convolutions. Nothing else may be running on the device; what lies where they read and
/// write is lost.
///
/// # Errors
/// A fault of the device.
pub fn measure(
    cudnn: &Cudnn,
    device: &Device,
    convolutions: &BTreeMap<String, Placed>,
    (wanted, choices): (&BTreeSet<String>, &mut Choices<Configuration>),
) -> Result<(), Failure> {
    let (bench, since) = (Bench::new(device)?, Instant::now());
    let until = since + LONGEST[1];
    let mut proposed = Vec::new();
    for (key, placed) in convolutions {
        match cudnn.candidates(placed, CANDIDATES) {
            Ok(candidates) => proposed.push((key, placed, candidates)),
            // Other kernels take its place, as they do where there is no library.
            Err(reason) => tracing::debug!("{key}: {reason}"),
        }
    }
    let known = proposed.iter().flat_map(|(_, _, candidates)| candidates).cloned().collect();
    proposed.sort_by(|(_, a, _), (_, b, _)| b.convolution.flops().total_cmp(&a.convolution.flops()));
    let mut search = Search { cudnn, bench: &bench, known, ratios: Ratios::new(), until };
    for (key, placed, candidates) in proposed.into_iter().filter(|(key, ..)| wanted.contains(*key)) {
        let chosen = search.choose(placed, candidates).map_err(|error| format!("measuring {key}: {error}"))?;
        let Some(Choice { algorithm, microseconds, first_microseconds }) = chosen else { continue };
        let algorithm = algorithm.configuration;
        tracing::debug!("{key}: {microseconds:.1} us by {algorithm}, by the first choice {first_microseconds:.1} us");
        choices.0.insert(key.clone(), Choice { algorithm, microseconds, first_microseconds });
    }
    tracing::debug!("{} convolutions measured in {:.2} s", wanted.len(), since.elapsed().as_secs_f64());
    Ok(())
}

/// The search for the engines of a program's convolutions.
struct Search<'a> {
    cudnn: &'a Cudnn,
    bench: &'a Bench<'a>,
    /// What the library proposes for any convolution of the program.
    known: BTreeSet<Configuration>,
    ratios: Ratios<Configuration>,
    until: Instant,
}

impl Search<'_> {
    /// The fastest of the library's `candidates` and of what they become with other knobs; none where none runs.
    fn choose(&mut self, placed: &Placed, candidates: Vec<Configuration>) -> Result<Option<Choice<Engine>>, Failure> {
        let ([operands, results], dtype) = (placed.extents(), placed.dtype());
        let memory = Memory { operands: &operands, results: &results, dtype, tolerance: bench::tolerance(dtype) };
        let trial = Convolution { cudnn: self.cudnn, bench: self.bench, memory: &memory };
        self.bench.fill_all(&memory)?;
        let Some(first) = candidates.iter().find_map(|one| self.engine(placed, one)) else { return Ok(None) };
        let engines: BTreeSet<i64> = candidates.iter().map(Configuration::engine).collect();
        let search = &*self;
        let ready = |one: Configuration| (one.clone(), move || search.engine(placed, &one));
        let sorted = |mut all: Vec<Configuration>| {
            search.ratios.sort(&mut all, |one| one);
            all.into_iter().map(ready)
        };
        let mut tried = Tried::new(self.until.min(Instant::now() + LONGEST[0]));
        tried.try_all(&trial, [(first.configuration.clone(), || Some(first.clone()))], usize::MAX)?;
        tried.try_all(&trial, candidates.into_iter().map(ready), PATIENCE[0])?;
        let known = self.known.iter().filter(|one| engines.contains(&one.engine()));
        tried.try_all(&trial, sorted(known.cloned().collect()), PATIENCE[1])?;
        for (configuration, _) in tried.fastest(VARIED, HOPELESS) {
            tried.try_all(&trial, sorted(configuration.varied(&self.known)), PATIENCE[2])?;
        }
        let choice = tried.choose(&trial, (&first.configuration, first.clone()), FINALISTS)?;
        self.ratios.learn(&tried);
        Ok(choice)
    }

    /// An engine, if the library takes the convolution by it.
    fn engine(&self, placed: &Placed, configuration: &Configuration) -> Option<Engine> {
        match self.cudnn.bind_by(configuration, placed) {
            Ok(bound) => Some(Engine { configuration: configuration.clone(), bound: Rc::new(bound) }),
            Err(reason) => {
                tracing::trace!("{}: {configuration}: {reason}", placed.convolution.key());
                None
            }
        }
    }
}

/// A compiled engine.
#[derive(Clone)]
struct Engine {
    configuration: Configuration,
    bound: Rc<Bound>,
}

/// A convolution whose engines are measured.
struct Convolution<'a> {
    cudnn: &'a Cudnn,
    bench: &'a Bench<'a>,
    memory: &'a Memory<'a>,
}

impl Trial for Convolution<'_> {
    type Algorithm = Engine;

    fn load(&self, engine: &Engine) -> Result<bool, Failure> {
        let run = |device: &Device, stream| self.cudnn.enqueue(&engine.bound, device, stream);
        Ok(self.bench.seconds(1, run, || self.text(engine))?.is_finite())
    }

    fn seconds(&self, engine: &Engine, runs: u32) -> Result<f64, Failure> {
        let run = |device: &Device, stream| self.cudnn.enqueue(&engine.bound, device, stream);
        self.bench.recorded_seconds(runs.clamp(RUNS.0, RUNS.1), run, || self.text(engine))
    }

    fn sample(&self, engine: &Engine) -> Result<Option<Vec<u8>>, Failure> {
        self.bench.sample(self.memory, |device, stream| self.cudnn.enqueue(&engine.bound, device, stream))
    }

    fn agree(&self, expected: &[u8], found: &[u8]) -> bool {
        self.memory.agree(expected, found)
    }

    fn text(&self, engine: &Engine) -> String {
        format!("a convolution by {}", engine.configuration)
    }
}
