//! The measuring of products: which algorithms are tried, in which order, for how long, and whether they compute what
//! they should.

use super::{Choice, Choices};
use crate::cuda::device::{Device, Failure};
use crate::cuda::gemm::{Algorithm, Blas, Configuration, Problem};
use cudarc::driver::sys::CUevent;
use shardc_ir::DType;
use shardc_ir::program::Stream;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

/// How many of the library's algorithms are tried.
const CANDIDATES: usize = 12;

/// Products of fewer operations are over before their algorithm matters.
const LEAST_FLOPS: f64 = 1e8;

/// How much faster than the library's choice another must be to take its place: differences below are
/// within what a measurement repeats to.
const MARGIN: f64 = 0.985;

/// Configurations whose order of tiles is varied: the fastest.
const VARIED: usize = 3;

/// Elements of a result of which tiles are too few for a large device, so that it pays to split its sums: into one of
/// these numbers of parts.
const FEW: u64 = 1 << 20;
const PARTS: [u32; 9] = [2, 4, 8, 16, 24, 32, 48, 64, 128];

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

/// The pieces of a result that are compared, over all of it, and the bytes of each.
const SAMPLE: (u64, u64) = (16, 64 << 10);

/// The products that are worth measuring, one of each key.
pub fn products(
    problems: impl Iterator<Item = Result<Problem, Failure>>,
) -> Result<BTreeMap<String, Problem>, Failure> {
    let mut products = BTreeMap::new();
    for problem in problems {
        let problem = problem?;
        if problem.flops >= LEAST_FLOPS {
            products.entry(problem.key.clone()).or_insert(problem);
        }
    }
    Ok(products)
}

/// Measures some of a program's products. Nothing else may be running on the device; what lies where the products
/// read and write is lost.
///
/// # Errors
/// A fault of the device; a product that no algorithm of the library computes.
pub fn measure(
    blas: &Blas,
    device: &Device,
    products: &BTreeMap<String, Problem>,
    (wanted, choices): (&BTreeSet<String>, &mut Choices),
) -> Result<(), Failure> {
    let mut proposed = BTreeMap::new();
    for (key, problem) in products {
        proposed.insert(key, (problem, blas.candidates(problem, CANDIDATES)?));
    }
    let known = proposed.values().flat_map(|(_, candidates)| candidates).map(Configuration::of).collect();
    let mut bench = Bench::new(blas, device, known)?;
    for (key, (problem, candidates)) in proposed.into_iter().filter(|(key, _)| wanted.contains(*key)) {
        let chosen = bench.choose(problem, &candidates);
        let choice = chosen.map_err(|error| format!("measuring {key}: {error}"))?;
        tracing::debug!(
            "{key}: {:.1} us, by the first choice {:.1} us",
            choice.microseconds,
            choice.first_microseconds
        );
        choices.0.insert(key.clone(), choice);
    }
    Ok(())
}

/// Bytes of noise that are repeated in the operands: no multiple of a row, so that the rows of a matrix differ.
const NOISE: usize = 1_000_000;

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

/// The places and bytes of the pieces of a result that are compared, whose elements have `size` bytes: all of it, or
/// pieces from its beginning to its end.
fn pieces((at, bytes): (u64, u64), size: u64) -> Vec<(u64, u64)> {
    let (count, each) = SAMPLE;
    match bytes <= count * each {
        true => vec![(at, bytes)],
        false => (0..count).map(|index| (at + (bytes - each) * index / (count - 1) / size * size, each)).collect(),
    }
}

/// By how much results of two algorithms may differ, of the largest magnitude. They add in two orders, and round to
/// the type once, or once for every part of a sum that is split; products of 8-bit floats are summed in fewer bits.
fn tolerance(problem: &Problem) -> f32 {
    let of_type = match problem.dtype {
        DType::F32 => 2f32.powi(-9),
        DType::F16 => 2f32.powi(-7),
        _ => 2f32.powi(-5),
    };
    if problem.is_f8 { of_type.max(2f32.powi(-4)) } else { of_type }
}

/// Whether numbers of a type are all finite, and those found differ from those expected by at most `tolerance` of the largest
/// magnitude.
fn is_near(dtype: DType, tolerance: f32, expected: &[u8], found: &[u8]) -> bool {
    let number = |bytes: &[u8]| match (dtype, bytes) {
        (DType::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        (DType::F16, &[a, b]) => half::f16::from_le_bytes([a, b]).to_f32(),
        (DType::Bf16, &[a, b]) => half::bf16::from_le_bytes([a, b]).to_f32(),
        _ => f32::NAN,
    };
    let numbers = |bytes| <[u8]>::chunks(bytes, dtype.size() as usize).map(number);
    let (mut largest, mut difference) = (0f32, 0f32);
    for (one, other) in numbers(expected).zip(numbers(found)) {
        if !one.is_finite() || !other.is_finite() {
            return false;
        }
        largest = largest.max(one.abs());
        difference = difference.max((one - other).abs());
    }
    expected.len() == found.len() && difference <= tolerance * largest
}

impl<'a> Bench<'a> {
    fn new(blas: &'a Blas, device: &'a Device, known: BTreeSet<Configuration>) -> Result<Self, Failure> {
        let (start, end) = (device.timed_event()?, device.timed_event()?);
        Ok(Self { blas, device, start, end, noise: noise(NOISE), known, ratios: BTreeMap::new() })
    }

    /// The fastest of the library's `candidates` and of what they become in other configurations.
    fn choose(&mut self, problem: &Problem, candidates: &[Algorithm]) -> Result<Choice, Failure> {
        self.fill_all(problem)?;
        let mut tried = Tried { by: BTreeMap::new(), since: Instant::now() };
        let own = candidates.iter().map(|algorithm| (Configuration::of(algorithm), *algorithm));
        self.try_all(problem, own, usize::MAX, &mut tried)?;
        self.try_configured(problem, candidates, &self.known, PATIENCE[0], &mut tried)?;
        if problem.results.iter().map(|(_, bytes)| bytes / problem.dtype.size()).sum::<u64>() < FEW {
            let split = tried.fastest(VARIED, HOPELESS).into_iter().flat_map(|(at, _)| at.split(PARTS));
            self.try_configured(problem, candidates, &split.collect(), usize::MAX, &mut tried)?;
        }
        let varied = tried.fastest(VARIED, HOPELESS).into_iter().flat_map(|(at, _)| at.reordered(&self.known));
        self.try_configured(problem, candidates, &varied.collect(), PATIENCE[1], &mut tried)?;
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
                *best = best.min(self.time(problem, algorithm, SPENT[1])?);
            }
        }
        let first = times[0];
        let mut faster: Vec<usize> = (1..times.len()).filter(|at| times[*at] < first * MARGIN).collect();
        faster.sort_by(|a, b| times[*a].total_cmp(&times[*b]));
        let at = self.first_right(problem, &finalists, &faster)?.unwrap_or(0);
        let seconds = times[at];
        if !seconds.is_finite() {
            return Err("no algorithm of cuBLASLt runs it".to_string());
        }
        let (microseconds, first_microseconds) = (seconds * 1e6, if first.is_finite() { first * 1e6 } else { 0.0 });
        Ok(Choice { algorithm: finalists[at], microseconds, first_microseconds })
    }

    /// The first of the `faster` ones among the finalists that computes what the library's first choice does. Where
    /// that one does not run there is nothing to compare with, and the fastest is taken.
    fn first_right(
        &self,
        problem: &Problem,
        finalists: &[Algorithm],
        faster: &[usize],
    ) -> Result<Option<usize>, Failure> {
        let Some(fastest) = faster.first() else { return Ok(None) };
        let Some(expected) = self.sample(problem, &finalists[0])? else { return Ok(Some(*fastest)) };
        for at in faster {
            let found = self.sample(problem, &finalists[*at])?;
            if found.is_some_and(|found| is_near(problem.dtype, tolerance(problem), &expected, &found)) {
                return Ok(Some(*at));
            }
            let configuration = Configuration::of(&finalists[*at]);
            tracing::warn!("{}: {configuration:?} does not compute what the first choice does", problem.key);
        }
        Ok(None)
    }

    /// Pieces of what an algorithm makes of noise, in its results as well, so that what is not written is seen; none
    /// where the library refuses it.
    fn sample(&self, problem: &Problem, algorithm: &Algorithm) -> Result<Option<Vec<u8>>, Failure> {
        self.fill_all(problem)?;
        let run = self.blas.run(problem, algorithm, self.device.stream(Stream::Compute));
        self.device.drain(Stream::Compute)?;
        let mut sample = Vec::new();
        for (at, bytes) in problem.results.iter().flat_map(|result| pieces(*result, problem.dtype.size())) {
            let begin = sample.len();
            sample.resize(begin + bytes as usize, 0);
            self.device.read(at, &mut sample[begin..])?;
        }
        Ok(run.is_ok().then_some(sample))
    }

    /// Measures what the library takes in these configurations, the most promising first.
    fn try_configured(
        &self,
        problem: &Problem,
        candidates: &[Algorithm],
        configurations: &BTreeSet<Configuration>,
        patience: usize,
        tried: &mut Tried,
    ) -> Result<(), Failure> {
        let ratio = |configuration: &Configuration| self.ratios.get(configuration).copied().unwrap_or(UNTRIED);
        let mut all = self.blas.configured(problem, candidates, configurations);
        all.sort_by(|(a, _), (b, _)| ratio(a).total_cmp(&ratio(b)).then(a.cmp(b)));
        self.try_all(problem, all, patience, tried)
    }

    /// Measures what was not tried before, until `patience` in a row were no faster than the fastest.
    fn try_all(
        &self,
        problem: &Problem,
        candidates: impl IntoIterator<Item = (Configuration, Algorithm)>,
        patience: usize,
        tried: &mut Tried,
    ) -> Result<(), Failure> {
        let mut in_vain = 0;
        for (configuration, algorithm) in candidates {
            if tried.by.contains_key(&configuration) {
                continue;
            }
            if in_vain == patience || tried.since.elapsed().as_secs_f64() > LONGEST {
                break;
            }
            // The first launch loads the kernel.
            self.time_runs(problem, &algorithm, 1)?;
            let (least, mut seconds) = (tried.least(), self.time_runs(problem, &algorithm, 1)?);
            if seconds < HOPELESS * least && seconds < SPENT[0] {
                seconds = self.time(problem, &algorithm, SPENT[0])?;
            }
            in_vain = if seconds < GAIN * least { 0 } else { in_vain + 1 };
            tried.by.insert(configuration, (seconds, algorithm));
        }
        Ok(())
    }

    /// Seconds of one run, over as many as take about `spent` seconds; infinite for what the library refuses.
    fn time(&self, problem: &Problem, algorithm: &Algorithm, spent: f64) -> Result<f64, Failure> {
        let once = self.time_runs(problem, algorithm, 1)?;
        match (spent / once.max(1e-6)) as u32 {
            0..2 => Ok(once),
            runs => self.time_runs(problem, algorithm, runs.min(200)),
        }
    }

    /// Seconds of one of so many runs; infinite for what the library refuses. The errors are the device's.
    fn time_runs(&self, problem: &Problem, algorithm: &Algorithm, runs: u32) -> Result<f64, Failure> {
        let stream = self.device.stream(Stream::Compute);
        self.device.record(self.start, Stream::Compute)?;
        let run = (0..runs).try_for_each(|_| self.blas.run(problem, algorithm, stream));
        self.device.record(self.end, Stream::Compute)?;
        self.device.drain(Stream::Compute)?;
        if let Err(reason) = run {
            tracing::debug!("{}: {:?}: {reason}", problem.key, Configuration::of(algorithm));
            return Ok(f64::INFINITY);
        }
        Ok(self.device.elapsed(self.start, self.end)? / f64::from(runs))
    }

    /// Fills all that a product reads and writes with noise. They may overlap where what is added is the result, or
    /// lie between each other in a batch: in the order of every call, the memory is the same before each.
    fn fill_all(&self, problem: &Problem) -> Result<(), Failure> {
        problem.operands.iter().chain(&problem.results).try_for_each(|(at, bytes)| self.fill(*at, *bytes))
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

    #[test]
    fn results_are_near_within_their_rounding() {
        let bf16 = |numbers: &[f32]| -> Vec<u8> {
            numbers.iter().flat_map(|number| half::bf16::from_f32(*number).to_le_bytes()).collect()
        };
        let near = |one: &[f32], other: &[f32]| is_near(DType::Bf16, 0.03, &bf16(one), &bf16(other));
        assert!(near(&[1.0, -100.0], &[1.5, -101.0]));
        assert!(!near(&[1.0, -100.0], &[1.0, -104.0]));
        assert!(!near(&[1.0, f32::NAN], &[1.0, f32::NAN]));
        assert!(!near(&[1.0, 2.0], &[1.0, f32::INFINITY]));
        assert!(!near(&[1.0, 2.0], &[1.0]));
        assert!(near(&[0.0; 3], &[0.0; 3]));
        let f32s = |numbers: [f32; 2]| numbers.map(f32::to_le_bytes).concat();
        assert!(is_near(DType::F32, 1e-6, &f32s([1.0, 1e3]), &f32s([1.0005, 1e3])));
        assert!(!is_near(DType::F32, 1e-6, &f32s([1.0, 1e3]), &f32s([1.1, 1e3])));
    }

    #[test]
    fn pieces_reach_from_the_beginning_of_a_result_to_its_end() {
        assert_eq!(pieces((256, 1000), 2), [(256, 1000)]);
        let (bytes, all) = ((1 << 30) + 6, pieces((256, (1 << 30) + 6), 2));
        assert_eq!((all[0], all[15]), ((256, 64 << 10), (256 + bytes - (64 << 10), 64 << 10)));
        assert!(all.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0 && two[1].0 % 2 == 0));
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
