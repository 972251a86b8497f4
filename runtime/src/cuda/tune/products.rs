//! Products by cuBLASLt: which algorithms are tried, in which order, and for how long.

use super::bench::{self, Bench, HOPELESS, Memory, Trial};
use super::search::{Ratios, Tried};
use super::{Choice, Choices};
use crate::cuda::device::{Device, Failure};
use crate::cuda::gemm::{self, Algorithm, Blas, Configuration, Problem};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// The version of this way of choosing.
const METHOD: u32 = 6;

/// How many of the library's algorithms are tried.
const CANDIDATES: usize = 12;

/// Products of fewer operations are over before their algorithm matters.
const LEAST_FLOPS: f64 = 1e8;

/// Configurations whose order of tiles is varied: the fastest.
const VARIED: usize = 3;

/// Elements of a result of which tiles are too few for a large device, so that it pays to split its sums: into one of
/// these numbers of parts.
const FEW: u64 = 1 << 20;
const PARTS: [u32; 9] = [2, 4, 8, 16, 24, 32, 48, 64, 128];

/// Configurations in a row that are no faster than the fastest before, after which no more are tried: of those that
/// the library proposes for other products, and of those with other orders of tiles.
const PATIENCE: [usize; 2] = [16, 10];

/// Candidates that are measured once more, longer: at most so many, which take at most so much longer than the
/// fastest.
const FINALISTS: (usize, f64) = (6, 1.04);

/// The time after which no more candidates for one product are tried; the library's own come first.
const LONGEST: Duration = Duration::from_millis(600);

/// The file in which the choices for a device are kept.
pub fn file(device: &Device) -> Result<String, Failure> {
    super::file(device, "matmul", &format!("cublaslt-{}", gemm::version()), METHOD)
}

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
    (wanted, choices): (&BTreeSet<String>, &mut Choices<Algorithm>),
) -> Result<(), Failure> {
    let mut proposed = BTreeMap::new();
    for (key, problem) in products {
        proposed.insert(key, (problem, blas.candidates(problem, CANDIDATES)?));
    }
    let known = proposed.values().flat_map(|(_, candidates)| candidates).map(Configuration::of).collect();
    let bench = Bench::new(device)?;
    let mut search = Search { blas, bench: &bench, known, ratios: Ratios::new() };
    for (key, (problem, candidates)) in proposed.into_iter().filter(|(key, _)| wanted.contains(*key)) {
        let chosen = search.choose(problem, &candidates);
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

/// A product whose algorithms are measured.
struct Product<'a> {
    blas: &'a Blas,
    bench: &'a Bench<'a>,
    problem: &'a Problem,
}

impl Product<'_> {
    /// The sums of products of 8-bit floats are kept in fewer bits.
    fn memory(&self) -> Memory<'_> {
        let Problem { operands, results, dtype, is_f8, .. } = self.problem;
        let least = if *is_f8 { 2f32.powi(-4) } else { 0.0 };
        Memory { operands, results, dtype: *dtype, tolerance: bench::tolerance(*dtype).max(least) }
    }
}

impl Trial for Product<'_> {
    type Algorithm = Algorithm;

    fn load(&self, algorithm: &Algorithm) -> Result<bool, Failure> {
        Ok(self.seconds(algorithm, 1)?.is_finite())
    }

    fn seconds(&self, algorithm: &Algorithm, runs: u32) -> Result<f64, Failure> {
        let run = |device: &Device, stream| self.blas.run(self.problem, algorithm, device.stream(stream));
        self.bench.seconds(runs, run, || self.text(algorithm))
    }

    fn sample(&self, algorithm: &Algorithm) -> Result<Option<Vec<u8>>, Failure> {
        self.bench
            .sample(&self.memory(), |device, stream| self.blas.run(self.problem, algorithm, device.stream(stream)))
    }

    fn agree(&self, expected: &[u8], found: &[u8]) -> bool {
        self.memory().agree(expected, found)
    }

    fn text(&self, algorithm: &Algorithm) -> String {
        format!("{}: {:?}", self.problem.key, Configuration::of(algorithm))
    }
}

/// The search for the algorithms of a program's products.
struct Search<'a> {
    blas: &'a Blas,
    bench: &'a Bench<'a>,
    /// What the library proposes for any product of the program.
    known: BTreeSet<Configuration>,
    ratios: Ratios<Configuration>,
}

impl Search<'_> {
    /// The fastest of the library's `candidates` and of what they become in other configurations.
    fn choose(&mut self, problem: &Problem, candidates: &[Algorithm]) -> Result<Choice<Algorithm>, Failure> {
        let product = Product { blas: self.blas, bench: self.bench, problem };
        self.bench.fill_all(&product.memory())?;
        let mut tried = Tried::new(Instant::now() + LONGEST);
        let own: Vec<_> = candidates.iter().map(|one| (Configuration::of(one), *one)).collect();
        tried.try_all(&product, ready(own), usize::MAX)?;
        tried.try_all(&product, self.configured(problem, candidates, &self.known), PATIENCE[0])?;
        if problem.results.iter().map(|(_, bytes)| bytes / problem.dtype.size()).sum::<u64>() < FEW {
            let split = tried.fastest(VARIED, HOPELESS).into_iter().flat_map(|(at, _)| at.split(PARTS));
            tried.try_all(&product, self.configured(problem, candidates, &split.collect()), usize::MAX)?;
        }
        let varied = tried.fastest(VARIED, HOPELESS).into_iter().flat_map(|(at, _)| at.reordered(&self.known));
        tried.try_all(&product, self.configured(problem, candidates, &varied.collect()), PATIENCE[1])?;
        self.ratios.learn(&tried);
        let first = (&Configuration::of(&candidates[0]), candidates[0]);
        tried.choose(&product, first, FINALISTS)?.ok_or_else(|| "no algorithm of cuBLASLt runs it".to_string())
    }

    /// What the library takes in these configurations, the most promising first.
    fn configured(
        &self,
        problem: &Problem,
        candidates: &[Algorithm],
        configurations: &BTreeSet<Configuration>,
    ) -> impl Iterator<Item = (Configuration, impl FnOnce() -> Option<Algorithm>)> {
        let mut all = self.blas.configured(problem, candidates, configurations);
        self.ratios.sort(&mut all, |(at, _)| at);
        ready(all)
    }
}

/// Algorithms that need nothing more to be run.
fn ready(
    all: Vec<(Configuration, Algorithm)>,
) -> impl Iterator<Item = (Configuration, impl FnOnce() -> Option<Algorithm>)> {
    all.into_iter().map(|(at, algorithm)| (at, move || Some(algorithm)))
}
