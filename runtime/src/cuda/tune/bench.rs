//! The measuring: how long what a program runs takes by an algorithm, and whether that computes what it should.

use super::Choice;
use crate::cuda::device::{Device, Failure};
use crate::cuda::graph;
use cudarc::driver::sys::CUevent;
use shardc_ir::DType;
use shardc_ir::program::Stream;

/// How much faster than the library's choice another must be to take its place: differences below are
/// within what a measurement repeats to.
const MARGIN: f64 = 0.985;

/// How often the finalists are measured, in turns: the device's clock changes meanwhile.
const TURNS: usize = 3;

/// A candidate that takes so much longer than the fastest in a single run is not measured any more.
pub const HOPELESS: f64 = 1.15;

/// Seconds of device time for a first measurement of one candidate, and for that of a finalist.
const SPENT: [f64; 2] = [5e-4, 4e-3];

/// The pieces of a result that are compared, over all of it, and the bytes of each.
const SAMPLE: (u64, u64) = (16, 64 << 10);

/// Something that several algorithms of a library compute, where a program does.
pub trait Trial {
    /// One of them.
    type Algorithm: Clone;

    /// Runs it once, which loads its kernel; whether the library takes it. The errors are the device's.
    fn load(&self, algorithm: &Self::Algorithm) -> Result<bool, Failure>;

    /// Seconds of one of so many runs; infinite for what the library refuses. The errors are the device's.
    fn seconds(&self, algorithm: &Self::Algorithm, runs: u32) -> Result<f64, Failure>;

    /// Pieces of what it makes of noise; none where the library refuses it.
    fn sample(&self, algorithm: &Self::Algorithm) -> Result<Option<Vec<u8>>, Failure>;

    /// Whether one sample is like another that is right.
    fn agree(&self, expected: &[u8], found: &[u8]) -> bool;

    /// What is computed, and how.
    fn text(&self, algorithm: &Self::Algorithm) -> String;
}

/// A first measurement of a candidate, where the fastest before took `least` seconds.
pub fn look<T: Trial>(trial: &T, algorithm: &T::Algorithm, least: f64) -> Result<f64, Failure> {
    if !trial.load(algorithm)? {
        return Ok(f64::INFINITY);
    }
    let once = trial.seconds(algorithm, 1)?;
    if once < HOPELESS * least { time(trial, algorithm, once, SPENT[0]) } else { Ok(once) }
}

/// Seconds of one run, over as many as take about `spent` seconds, where a single one took `once`.
fn time<T: Trial>(trial: &T, algorithm: &T::Algorithm, once: f64, spent: f64) -> Result<f64, Failure> {
    match (spent / once.max(1e-6)) as u32 {
        0..2 => Ok(once),
        runs => trial.seconds(algorithm, runs.min(200)),
    }
}

/// The fastest of some finalists, of which the library's first choice is the first: another takes its place if it is
/// faster and computes the same. None where none runs.
pub fn settle<T: Trial>(trial: &T, finalists: &[T::Algorithm]) -> Result<Option<Choice<T::Algorithm>>, Failure> {
    let once = finalists.iter().map(|algorithm| trial.seconds(algorithm, 1)).collect::<Result<Vec<_>, _>>()?;
    let mut times = vec![f64::INFINITY; finalists.len()];
    for _ in 0..TURNS {
        for ((best, once), algorithm) in times.iter_mut().zip(&once).zip(finalists) {
            *best = best.min(time(trial, algorithm, *once, SPENT[1])?);
        }
    }
    let Some(first) = times.first().copied() else { return Ok(None) };
    let mut faster: Vec<usize> = (1..times.len()).filter(|at| times[*at] < first * MARGIN).collect();
    faster.sort_by(|a, b| times[*a].total_cmp(&times[*b]));
    let at = first_right(trial, finalists, &faster)?.unwrap_or(0);
    if !times[at].is_finite() {
        return Ok(None);
    }
    let first_microseconds = if first.is_finite() { first * 1e6 } else { 0.0 };
    Ok(Some(Choice { algorithm: finalists[at].clone(), microseconds: times[at] * 1e6, first_microseconds }))
}

/// The first of the `faster` ones among the finalists that computes what the library's first choice does, and equal bits
/// when repeated. Where
/// that one does not run there is nothing to compare with, and the fastest is taken.
fn first_right<T: Trial>(trial: &T, finalists: &[T::Algorithm], faster: &[usize]) -> Result<Option<usize>, Failure> {
    let Some(fastest) = faster.first() else { return Ok(None) };
    let Some(expected) = trial.sample(&finalists[0])? else { return Ok(Some(*fastest)) };
    for at in faster {
        let found = trial.sample(&finalists[*at])?.filter(|found| trial.agree(&expected, found));
        if found.is_some() && trial.sample(&finalists[*at])? == found {
            return Ok(Some(*at));
        }
        tracing::warn!("{} does not compute, twice, what the first choice does", trial.text(&finalists[*at]));
    }
    Ok(None)
}

/// Bytes of noise that are repeated in the operands: no multiple of a row, so that the rows of a matrix differ.
const NOISE: usize = 1_000_000;

/// Bytes by which the noise in one operand is ahead of that in the one before: with equal noise in both, sums of
/// products would be sums of squares.
const SHIFT: usize = 100_006;

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
/// the type once, or once for every part of a sum that is split.
pub fn tolerance(dtype: DType) -> f32 {
    match dtype {
        DType::F32 => 2f32.powi(-9),
        DType::F16 => 2f32.powi(-7),
        _ => 2f32.powi(-5),
    }
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

/// The memory of what is measured, and how near its results must be to each other.
pub struct Memory<'a> {
    /// The first byte and the bytes of all that is read.
    pub operands: &'a [(u64, u64)],
    /// The same of what is written.
    pub results: &'a [(u64, u64)],
    /// Of the results.
    pub dtype: DType,
    /// By how much they may differ, of the largest magnitude.
    pub tolerance: f32,
}

impl Memory<'_> {
    /// Whether one sample is like another that is right.
    pub fn agree(&self, expected: &[u8], found: &[u8]) -> bool {
        is_near(self.dtype, self.tolerance, expected, found)
    }
}

/// What measures on a device.
pub struct Bench<'a> {
    device: &'a Device,
    start: CUevent,
    end: CUevent,
    noise: Vec<u8>,
}

impl<'a> Bench<'a> {
    /// For a device on which nothing else is running.
    pub fn new(device: &'a Device) -> Result<Self, Failure> {
        let (start, end) = (device.timed_event()?, device.timed_event()?);
        Ok(Self { device, start, end, noise: noise(NOISE) })
    }

    /// Seconds of one of so many runs; infinite for what the library refuses, which is logged under a name.
    pub fn seconds(
        &self,
        runs: u32,
        run: impl Fn(&Device, Stream) -> Result<(), Failure>,
        name: impl Fn() -> String,
    ) -> Result<f64, Failure> {
        self.device.record(self.start, Stream::Compute)?;
        let run = (0..runs).try_for_each(|_| run(self.device, Stream::Compute));
        self.device.record(self.end, Stream::Compute)?;
        self.device.drain(Stream::Compute)?;
        if let Err(reason) = run {
            tracing::debug!("{}: {reason}", name());
            return Ok(f64::INFINITY);
        }
        Ok(self.device.elapsed(self.start, self.end)? / f64::from(runs))
    }

    /// Seconds of one of so many runs that are launched at once, as those of a step are: where the host takes longer to
    /// launch one than the device to run it, [`Bench::seconds`] would measure the host. It has been run before.
    pub fn recorded_seconds(
        &self,
        runs: u32,
        run: impl Fn(&Device, Stream) -> Result<(), Failure>,
        name: impl Fn() -> String,
    ) -> Result<f64, Failure> {
        let stream = self.device.stream(Stream::Compute);
        graph::begin(stream)?;
        let enqueued = (0..runs).try_for_each(|_| run(self.device, Stream::Compute));
        let graph = match enqueued.and(graph::end(stream)) {
            Ok(graph) => graph,
            Err(reason) => {
                tracing::debug!("{}: {reason}", name());
                return Ok(f64::INFINITY);
            }
        };
        graph.upload(stream)?;
        self.device.record(self.start, Stream::Compute)?;
        graph.launch(stream)?;
        self.device.record(self.end, Stream::Compute)?;
        self.device.drain(Stream::Compute)?;
        Ok(self.device.elapsed(self.start, self.end)? / f64::from(runs))
    }

    /// Pieces of what a run makes of noise, in its results as well, so that what is not written is seen; none
    /// where the library refuses it.
    pub fn sample(
        &self,
        memory: &Memory<'_>,
        run: impl Fn(&Device, Stream) -> Result<(), Failure>,
    ) -> Result<Option<Vec<u8>>, Failure> {
        self.fill_all(memory)?;
        let run = run(self.device, Stream::Compute);
        self.device.drain(Stream::Compute)?;
        let mut sample = Vec::new();
        for (at, bytes) in memory.results.iter().flat_map(|result| pieces(*result, memory.dtype.size())) {
            let begin = sample.len();
            sample.resize(begin + bytes as usize, 0);
            self.device.read(at, &mut sample[begin..])?;
        }
        Ok(run.is_ok().then_some(sample))
    }

    /// Fills all that is read and written with noise. They may overlap where what is added is the result, or
    /// lie between each other in a batch: in the order of every call, the memory is the same before each.
    pub fn fill_all(&self, memory: &Memory<'_>) -> Result<(), Failure> {
        let mut all = memory.operands.iter().chain(memory.results).enumerate();
        all.try_for_each(|(index, (at, bytes))| self.fill(*at, *bytes, index * SHIFT % NOISE))
    }

    /// Fills memory with noise from a byte of it on: with all of it from the host, which is then doubled.
    fn fill(&self, at: u64, bytes: u64, from: usize) -> Result<(), Failure> {
        let mut filled = 0;
        for piece in [&self.noise[from..], &self.noise[..from]] {
            let piece = &piece[..piece.len().min((bytes - filled) as usize)];
            self.device.write(at + filled, piece)?;
            filled += piece.len() as u64;
        }
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
    use std::cell::Cell;

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

    /// Of algorithms that are numbers: the seconds of each, and what it computes; then how often one has run.
    struct Fake([(f64, u8); 7], Cell<u8>);

    /// A result whose last bits are others in every run.
    const ANY: u8 = 9;

    impl Trial for Fake {
        type Algorithm = usize;

        fn load(&self, algorithm: &usize) -> Result<bool, Failure> {
            Ok(self.0[*algorithm].0.is_finite())
        }

        fn seconds(&self, algorithm: &usize, _: u32) -> Result<f64, Failure> {
            Ok(self.0[*algorithm].0)
        }

        fn sample(&self, algorithm: &usize) -> Result<Option<Vec<u8>>, Failure> {
            let (seconds, result) = self.0[*algorithm];
            self.1.set(self.1.get() + 1);
            let bytes = if result == ANY { vec![1, self.1.get()] } else { vec![result, 0] };
            Ok(seconds.is_finite().then_some(bytes))
        }

        fn agree(&self, expected: &[u8], found: &[u8]) -> bool {
            expected[0] == found[0]
        }

        fn text(&self, algorithm: &usize) -> String {
            algorithm.to_string()
        }
    }

    #[test]
    fn the_fastest_that_computes_the_same_takes_the_place_of_the_first() {
        let never = f64::INFINITY;
        let all = [(1e-3, 1), (2e-4, 2), (never, 1), (5e-4, 1), (4e-4, 1), (9.9e-4, 1), (3e-4, ANY)];
        let fake = Fake(all, Cell::new(0));
        let settled = |finalists: &[usize]| {
            settle(&fake, finalists).unwrap().map(|choice| (choice.algorithm, choice.first_microseconds.round()))
        };
        // What computes something else or other bits each time and what the library refuses are passed over.
        assert_eq!(settled(&[0, 1, 2, 3, 4, 5, 6]), Some((4, 1000.0)));
        assert_eq!(settled(&[0, 1, 2, 5]), Some((0, 1000.0)), "a gain within the noise of measuring is none");
        assert_eq!(settled(&[2, 3, 4]), Some((4, 0.0)), "nothing to compare with");
        assert_eq!((settled(&[2]), settled(&[])), (None, None));
        assert_eq!(look(&fake, &2, 1.0).unwrap(), never);
    }
}
