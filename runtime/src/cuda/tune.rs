//! The fastest algorithm for every matrix product of a program, measured.
//!
//! The library orders its algorithms by a model of the device. Here the first few of that order are run on
//! the device, and what it proposes for the program's other products ([`gemm::Configuration`]), on the
//! program's own addresses and with noise in the operands (a product of zeros draws little power, and is
//! faster than any other), before the program's first step. What was fast for other products of the program comes
//! first, and trying ends where some in a row were no faster. What is found is kept on disk per GPU, driver
//! and version of the library, so that a later run measures nothing and computes the same bits.
//!
//! **Ranks.** Two algorithms may add in two orders. Ranks that compute the same value must get the same
//! bits, so one rank measures, the run's first, and the others take its choices ([`Tuning`]).

use super::cache::Cache;
use super::device::{Device, Failure};
use super::gemm::{self, Algorithm, Blas, Configuration, Problem};
use crate::launch::World;
use cudarc::driver::sys::CUevent;
use serde::{Deserialize, Serialize};
use shardc_ir::program::Stream;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

/// The variable that, set to `0`, leaves every product to the library's first choice.
const SWITCH: &str = "SHARDC_TUNE_MATMUL";

/// How many of the library's algorithms are tried.
const CANDIDATES: usize = 12;

/// Products of fewer operations are over before their algorithm matters.
const LEAST_FLOPS: f64 = 1e8;

/// How much faster than the library's choice another must be to take its place: differences below are
/// within what a measurement repeats to.
const MARGIN: f64 = 0.985;

/// Configurations whose order of tiles is varied: the fastest.
const VARIED: usize = 3;

/// Configurations in a row that are no faster than the fastest before, after which no more are tried: of those that
/// the library proposes for other products, and of those with other orders of tiles.
const PATIENCE: [usize; 2] = [16, 10];

/// How much faster a candidate must be to count as faster.
const GAIN: f64 = 0.995;

/// What a configuration that was not tried yet is expected to take, of the fastest.
const UNTRIED: f64 = 1.1;

/// Candidates that are measured once more, longer: at most so many, which take at most so much longer than the
/// fastest.
const FINALISTS: (usize, f64) = (6, 1.04);

/// How often the finalists are measured, in turns: the device's clock changes meanwhile.
const TURNS: usize = 3;

/// A candidate that takes so much longer than the fastest in a single run is not measured any more.
const HOPELESS: f64 = 1.15;

/// Seconds of device time for a first measurement of one candidate, and for that of a finalist.
const SPENT: [f64; 2] = [5e-4, 4e-3];

/// Seconds after which no more candidates for one product are tried; the library's own come first.
const LONGEST: f64 = 0.6;

/// The version of this way of choosing, in the name of the file: what older ones chose is not read.
const METHOD: u32 = 3;

/// What was measured of one product.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Choice {
    algorithm: Algorithm,
    microseconds: f64,
    /// With the library's first choice.
    first_microseconds: f64,
}

/// The chosen algorithms, by the products' keys.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Choices(BTreeMap<String, Choice>);

impl Choices {
    /// The algorithm for a product, if it was measured.
    pub fn get(&self, key: &str) -> Option<Algorithm> {
        self.0.get(key).map(|choice| choice.algorithm)
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok()
    }

    fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }
}

/// The choices that all ranks of a run make together.
pub struct Tuning {
    world: Arc<World>,
    /// The rank that chooses for this process.
    lead: u64,
    /// The key under which the run's first rank puts its choices.
    key: String,
    cache: Cache,
    chosen: Mutex<Option<Result<Arc<Choices>, Failure>>>,
    done: Condvar,
}

impl Tuning {
    /// For the ranks that this process drives, of which `lead` is the first. All processes call this in the
    /// same order.
    pub fn new(world: Arc<World>, lead: u64) -> Self {
        let key = world.round("matmul");
        Self { world, lead, key, cache: Cache::of_user(), chosen: Mutex::default(), done: Condvar::new() }
    }

    /// The choices. The run's first rank makes them by `measure`, which adds to those it is given; all
    /// others wait for it.
    pub fn choices(
        &self,
        rank: u64,
        file: &str,
        measure: impl FnOnce(&mut Choices) -> Result<(), Failure>,
    ) -> Result<Arc<Choices>, Failure> {
        let lock = || self.chosen.lock().unwrap_or_else(PoisonError::into_inner);
        if rank == self.lead {
            let made = self.lead(file, measure).map(Arc::new);
            *lock() = Some(made);
            self.done.notify_all();
        }
        let waited = self.done.wait_while(lock(), |chosen| chosen.is_none());
        let chosen = waited.unwrap_or_else(PoisonError::into_inner).clone();
        chosen.unwrap_or_else(|| Ok(Arc::default()))
    }

    /// Lets no rank of this process wait for a lead that could not start.
    pub fn give_up(&self) {
        let mut chosen = self.chosen.lock().unwrap_or_else(PoisonError::into_inner);
        chosen.get_or_insert_with(|| Err("another rank could not start".to_string()));
        self.done.notify_all();
    }

    fn lead(&self, file: &str, measure: impl FnOnce(&mut Choices) -> Result<(), Failure>) -> Result<Choices, Failure> {
        if std::env::var(SWITCH).as_deref() == Ok("0") {
            return Ok(Choices::default());
        }
        self.world.at("choosing algorithms for matrix products");
        if !self.world.is_lead() {
            let bytes = self.world.get(&self.key, false).map_err(|error| error.to_string())?;
            return Choices::from_bytes(&bytes).ok_or_else(|| "the first rank's choices cannot be read".to_string());
        }
        let kept = self.cache.read(file).and_then(|bytes| Choices::from_bytes(&bytes)).unwrap_or_default();
        let mut choices = kept.clone();
        measure(&mut choices)?;
        if choices != kept {
            self.cache.write(file, &choices.to_bytes());
        }
        self.world.set(&self.key, &choices.to_bytes()).map_err(|error| error.to_string())?;
        Ok(choices)
    }
}

/// The file in which choices for a device are kept.
pub fn file(device: &Device) -> Result<String, Failure> {
    let (name, driver) = device.description()?;
    let word = |text: &str| text.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect::<String>();
    Ok(format!("matmul/{}-driver-{driver}-cublaslt-{}-{METHOD}.json", word(&name), gemm::version()))
}

/// Measures the products that are not among the choices, one of each key. Nothing else may be running on
/// the device; the operands' contents are lost.
pub fn measure(
    blas: &Blas,
    device: &Device,
    problems: impl Iterator<Item = Result<Problem, Failure>>,
    choices: &mut Choices,
) -> Result<(), Failure> {
    let mut proposed: BTreeMap<String, (Problem, Vec<Algorithm>)> = BTreeMap::new();
    for problem in problems {
        let problem = problem?;
        if problem.flops >= LEAST_FLOPS && !proposed.contains_key(&problem.key) {
            let candidates = blas.candidates(&problem, CANDIDATES)?;
            proposed.insert(problem.key.clone(), (problem, candidates));
        }
    }
    let known = proposed.values().flat_map(|(_, candidates)| candidates).map(Configuration::of).collect();
    proposed.retain(|key, _| !choices.0.contains_key(key));
    if proposed.is_empty() {
        return Ok(());
    }
    let mut bench = Bench::new(blas, device, known)?;
    for (key, (problem, candidates)) in proposed {
        let choice = bench.choose(&problem, &candidates)?;
        tracing::debug!(
            "{key}: {:.1} us, by the first choice {:.1} us",
            choice.microseconds,
            choice.first_microseconds
        );
        choices.0.insert(key, choice);
    }
    Ok(())
}

/// Bytes of noise that are repeated in the operands.
const NOISE: usize = 1 << 20;

struct Bench<'a> {
    blas: &'a Blas,
    device: &'a Device,
    start: CUevent,
    end: CUevent,
    noise: Vec<u8>,
    /// What the library proposes for any product of the program.
    known: BTreeSet<Configuration>,
    /// The least that configurations took for a product, of the fastest for that product.
    ratios: BTreeMap<Configuration, f64>,
}

/// What was measured of one product: seconds, and the algorithm, by how it is configured.
struct Tried {
    by: BTreeMap<Configuration, (f64, Algorithm)>,
    since: Instant,
}

impl Tried {
    fn least(&self) -> f64 {
        self.by.values().map(|(seconds, _)| *seconds).fold(f64::INFINITY, f64::min)
    }

    /// The `count` that took the least time, without those that took `most` times that of the fastest.
    fn fastest(&self, count: usize, most: f64) -> Vec<(Configuration, Algorithm)> {
        let mut all: Vec<_> = self.by.iter().map(|(at, (seconds, algorithm))| (*seconds, *at, *algorithm)).collect();
        all.retain(|(seconds, ..)| *seconds <= most * self.least());
        all.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        all.into_iter().take(count).map(|(_, at, algorithm)| (at, algorithm)).collect()
    }
}

/// bf16 numbers of magnitude 2^-8 to 1 with random signs and mantissas: finite numbers in f32, f16 and 8 bits, too.
fn noise(bytes: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        // Marsaglia, "Xorshift RNGs", 2003.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let (sign, exponent, mantissa) = ((state & 1) as u16, 119 + ((state >> 8) & 7) as u16, (state >> 32) as u16);
        (sign << 15 | exponent << 7 | mantissa & 0x6f).to_le_bytes()
    };
    (0..bytes / 2).flat_map(|_| next()).collect()
}

impl<'a> Bench<'a> {
    fn new(blas: &'a Blas, device: &'a Device, known: BTreeSet<Configuration>) -> Result<Self, Failure> {
        let (start, end) = (device.timed_event()?, device.timed_event()?);
        Ok(Self { blas, device, start, end, noise: noise(NOISE), known, ratios: BTreeMap::new() })
    }

    /// The fastest of the library's `candidates` and of what they become in other configurations.
    fn choose(&mut self, problem: &Problem, candidates: &[Algorithm]) -> Result<Choice, Failure> {
        problem.operands.iter().try_for_each(|(at, bytes)| self.fill(*at, *bytes))?;
        let mut tried = Tried { by: BTreeMap::new(), since: Instant::now() };
        let own = candidates.iter().map(|algorithm| (Configuration::of(algorithm), *algorithm));
        self.try_all(problem, own, usize::MAX, &mut tried);
        self.try_configured(problem, candidates, &self.known, PATIENCE[0], &mut tried);
        let varied = tried.fastest(VARIED, HOPELESS).into_iter().flat_map(|(at, _)| at.reordered(&self.known));
        self.try_configured(problem, candidates, &varied.collect(), PATIENCE[1], &mut tried);
        for (configuration, (seconds, _)) in &tried.by {
            let ratio = self.ratios.entry(*configuration).or_insert(f64::INFINITY);
            *ratio = ratio.min(seconds / tried.least());
        }
        // The library's first choice is what the others are compared with.
        let mut finalists: Vec<Algorithm> = vec![candidates[0]];
        let fastest = tried.fastest(FINALISTS.0, FINALISTS.1).into_iter().map(|(_, algorithm)| algorithm);
        finalists.extend(fastest.filter(|algorithm| *algorithm != candidates[0]));
        let mut times = vec![f64::INFINITY; finalists.len()];
        for _ in 0..TURNS {
            for (best, algorithm) in times.iter_mut().zip(&finalists) {
                *best = best.min(self.time(problem, algorithm, SPENT[1]));
            }
        }
        let first = times[0];
        let fastest = (0..times.len()).min_by(|a, b| times[*a].total_cmp(&times[*b])).unwrap_or(0);
        let at = if times[fastest] < first * MARGIN { fastest } else { 0 };
        let seconds = times[at];
        if !seconds.is_finite() {
            return Err(format!("no algorithm of cuBLASLt runs {}", problem.key));
        }
        let (microseconds, first_microseconds) = (seconds * 1e6, if first.is_finite() { first * 1e6 } else { 0.0 });
        Ok(Choice { algorithm: finalists[at], microseconds, first_microseconds })
    }

    /// Measures what the library takes in these configurations, the most promising first.
    fn try_configured(
        &self,
        problem: &Problem,
        candidates: &[Algorithm],
        configurations: &BTreeSet<Configuration>,
        patience: usize,
        tried: &mut Tried,
    ) {
        let ratio = |configuration: &Configuration| self.ratios.get(configuration).copied().unwrap_or(UNTRIED);
        let mut all = self.blas.configured(problem, candidates, configurations);
        all.sort_by(|(a, _), (b, _)| ratio(a).total_cmp(&ratio(b)).then(a.cmp(b)));
        self.try_all(problem, all, patience, tried);
    }

    /// Measures what was not tried before, until `patience` in a row were no faster than the fastest.
    fn try_all(
        &self,
        problem: &Problem,
        candidates: impl IntoIterator<Item = (Configuration, Algorithm)>,
        patience: usize,
        tried: &mut Tried,
    ) {
        let mut in_vain = 0;
        for (configuration, algorithm) in candidates {
            if tried.by.contains_key(&configuration) {
                continue;
            }
            if in_vain == patience || tried.since.elapsed().as_secs_f64() > LONGEST {
                return;
            }
            // The first launch loads the kernel.
            let once = || self.time_runs(problem, &algorithm, 1);
            let (least, mut seconds) = (tried.least(), once().and_then(|_| once()).unwrap_or(f64::INFINITY));
            if seconds < HOPELESS * least && seconds < SPENT[0] {
                seconds = self.time(problem, &algorithm, SPENT[0]);
            }
            in_vain = if seconds < GAIN * least { 0 } else { in_vain + 1 };
            tried.by.insert(configuration, (seconds, algorithm));
        }
    }

    /// Seconds of one run, over as many as take about `spent` seconds; infinite for what the library refuses.
    fn time(&self, problem: &Problem, algorithm: &Algorithm, spent: f64) -> f64 {
        let timed = self.time_runs(problem, algorithm, 1).and_then(|once| match (spent / once.max(1e-6)) as u32 {
            0..2 => Ok(once),
            runs => self.time_runs(problem, algorithm, runs.min(200)),
        });
        timed.unwrap_or(f64::INFINITY)
    }

    fn time_runs(&self, problem: &Problem, algorithm: &Algorithm, runs: u32) -> Result<f64, Failure> {
        let stream = self.device.stream(Stream::Compute);
        self.device.record(self.start, Stream::Compute)?;
        for _ in 0..runs {
            self.blas.run(problem, algorithm, stream)?;
        }
        self.device.record(self.end, Stream::Compute)?;
        self.device.drain(Stream::Compute)?;
        Ok(self.device.elapsed(self.start, self.end)? / f64::from(runs))
    }

    /// Fills memory with noise: a first piece from the host, which is then doubled.
    fn fill(&self, at: u64, bytes: u64) -> Result<(), Failure> {
        let mut filled = bytes.min(self.noise.len() as u64);
        self.device.write(at, &self.noise[..filled as usize])?;
        while filled < bytes {
            let more = filled.min(bytes - filled);
            self.device.copy(at + filled, at, more, Stream::Compute)?;
            filled += more;
        }
        self.device.drain(Stream::Compute)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choices(key: &str) -> Choices {
        let choice = Choice { algorithm: [7; 8], microseconds: 3.0, first_microseconds: 4.0 };
        Choices([(key.to_string(), choice)].into())
    }

    #[test]
    fn choices_are_read_as_they_were_written() {
        let all = choices("bf16[1,2]/1+0@256");
        assert_eq!(Choices::from_bytes(&all.to_bytes()), Some(all.clone()));
        assert_eq!(all.get("bf16[1,2]/1+0@256"), Some([7; 8]));
        assert_eq!(all.get("bf16[1,2]/1+0@128"), None);
        assert_eq!(Choices::from_bytes(b"{\"a\": 1}"), None);
    }

    #[test]
    fn the_first_rank_measures_and_the_others_take_its_choices() {
        let folder = std::env::temp_dir().join(format!("shardc-tune-{}", std::process::id()));
        let tuning = || Tuning { cache: Cache::at(&folder), ..Tuning::new(Arc::new(World::alone()), 4) };
        let run = |tuning: &Tuning| {
            std::thread::scope(|scope| {
                let other = scope.spawn(|| tuning.choices(5, "file", |_| panic!("measures as well")));
                let own = tuning.choices(4, "file", |known| {
                    known.0.extend(choices("a").0);
                    Ok(())
                });
                (own.unwrap(), other.join().unwrap().unwrap())
            })
        };
        let (own, other) = run(&tuning());
        assert_eq!((&*own, &*other), (&choices("a"), &choices("a")));
        let again = tuning().choices(4, "file", |known| {
            assert_eq!(*known, choices("a"), "kept for later runs");
            Err("no device".to_string())
        });
        assert_eq!(again, Err("no device".to_string()));
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn noise_is_finite_in_every_type() {
        let bytes = noise(4096);
        let finite = |pair: &[u8]| {
            let bits = u16::from_le_bytes([pair[0], pair[1]]);
            half::bf16::from_bits(bits).to_f32().abs() < 1.0 && half::f16::from_bits(bits).is_finite()
        };
        assert!(bytes.chunks(2).all(finite));
        assert!(bytes.chunks(4).all(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]).abs() < 1.0));
    }
}
