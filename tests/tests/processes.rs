//! A training run whose ranks are processes equals one whose ranks are threads: parameters, steps,
//! votes and saving go the same way as on several GPUs.
//!
//! A process here runs all ranks, for want of GPUs, but gives its trainer only its own. The ranks are
//! this test program again, restricted to the test `rank`.

use shardc::data::open_batches;
use shardc::train::parameter_part;
use shardc::{Batch, Cluster, Compiled, Decay, Error, Feeds, LearningRate, NamedModel, Options, Precision};
use shardc::{TrainOptions, Trainer, Weights};
use shardc_ir::{Bytes, HostTensor};
use shardc_runtime::launch::{LaunchError, Launcher, Limits, Place, World};
use shardc_runtime::{CpuRuntime, Runtime, RuntimeError, TimedStep};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

const PINS: [&str; 2] = ["dp=2,zero=3", "tp=2"];
const SEED: u64 = 1;

fn fixture() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures/hf/llama")
}

/// All ranks, of which the trainer sees one.
struct OneOf {
    all: CpuRuntime,
    rank: u64,
}

impl OneOf {
    fn new(compiled: &Compiled, weights: &dyn Weights, rank: u64) -> Result<Self, Error> {
        let mut all = CpuRuntime::new(compiled.programs()?.to_vec())?;
        for program in compiled.programs()?.iter().filter(|program| program.rank != rank) {
            for slot in program.slots.iter().filter(|slot| slot.is_parameter) {
                let part = parameter_part(&compiled.model, weights, &slot.name, &slot.ty, &slot.slice, SEED)?;
                all.write_slot(program.rank, &slot.name, &part)?;
            }
        }
        Ok(Self { all, rank })
    }

    fn check(&self, rank: u64) -> Result<(), RuntimeError> {
        let unknown = RuntimeError::Unknown { what: "rank", name: rank.to_string() };
        if rank == self.rank { Ok(()) } else { Err(unknown) }
    }
}

impl Runtime for OneOf {
    fn ranks(&self) -> Vec<u64> {
        vec![self.rank]
    }

    fn write_slot(&mut self, rank: u64, name: &str, part: &HostTensor) -> Result<(), RuntimeError> {
        self.check(rank)?;
        self.all.write_slot(rank, name, part)
    }

    fn read_slot(&mut self, rank: u64, name: &str) -> Result<HostTensor, RuntimeError> {
        self.check(rank)?;
        self.all.read_slot(rank, name)
    }

    fn step(&mut self, feeds: &Feeds) -> Result<BTreeMap<String, f64>, RuntimeError> {
        self.all.step(feeds)
    }

    fn timed_step(&mut self, feeds: &Feeds) -> Result<TimedStep, RuntimeError> {
        let mut step = self.all.timed_step(feeds)?;
        step.spans.retain(|span| span.rank == self.rank);
        Ok(step)
    }

    fn peak_bytes(&self) -> Bytes {
        self.all.peak_bytes()
    }
}

/// Trains three steps under a plan and saves; as a rank of `world`, or as the whole run.
fn train(pins: &str, save: &Path, world: Option<Arc<World>>, steps: [u64; 3]) -> Result<(), Error> {
    let model = NamedModel::find(fixture().to_str().unwrap())?;
    let data = open_batches(&fixture().join("batches.safetensors"))?;
    let (batch, seq) = data.shape().unwrap();
    let options = Options { precision: Some(Precision::Fp32), pins: pins.into(), ..Options::default() };
    let compiled = shardc::compile(&model, Batch { batch, seq }, &Cluster::parse("cpu:2", "h200")?, &options)?;
    let learning_rate = LearningRate { rate: 1e-3, min_rate: 0.0, warmup: 0, decay: Decay::Constant, steps: 3 };
    let (weights, options) = (model.weights()?, TrainOptions { learning_rate, seed: SEED });
    let mut trainer = match world {
        None => compiled.start(weights.as_ref(), options)?,
        Some(world) => {
            let runtime = Box::new(OneOf::new(&compiled, weights.as_ref(), world.rank())?);
            Trainer::start(&compiled, runtime, world, weights.as_ref(), options)?
        }
    };
    for step in steps {
        assert!(trainer.goes_on(false)?);
        let (_, spans) = trainer.timed_step(data.batch(step, &compiled.model.inputs)?)?;
        // Rank 0 has every rank's, whoever measured them.
        let is_lead = trainer.world().is_lead();
        assert!((0..2).all(|rank| spans.iter().any(|span| span.rank == rank) == is_lead));
    }
    // One rank's wish is the decision of all.
    assert!(!trainer.goes_on(trainer.world().rank() == trainer.world().ranks() - 1)?);
    if !trainer.world().is_alone() && compiled.plan().choice.contains("zero=3") {
        let name = compiled.programs()?[0].slots[0].name.clone();
        let error = trainer.gather(&name).unwrap_err().to_string();
        assert!(error.contains("is in the process of rank"), "{error}");
    }
    model.save(save, &mut trainer, &model.beside(None)?)
}

/// What a rank does; not a test where no launcher started this process.
#[test]
fn rank() {
    let Some(place) = Place::from_env().unwrap() else { return };
    let rank = place.rank;
    let world = Arc::new(World::join(place, "CPU", Limits::default()).unwrap());
    let text = |key: &str| String::from_utf8(world.get(key, false).unwrap()).unwrap();
    let (pins, dir, own_data) = (text("pins"), text("dir"), text("own data") == "yes");
    // A rank that reads other data than the others.
    let steps = if own_data && rank == 1 { [1, 2, 0] } else { [0, 1, 2] };
    let outcome = train(&pins, Path::new(&dir), Some(world.clone()), steps);
    drop(world);
    std::process::exit(outcome.map_or_else(|error| error.exit_code().into(), |()| 0));
}

fn launch(pins: &str, dir: &Path, own_data: &str) -> Result<(), LaunchError> {
    let launcher = Launcher::new(2, "CPU", Limits::default()).unwrap();
    launcher.set("pins", pins.as_bytes());
    launcher.set("dir", dir.to_str().unwrap().as_bytes());
    launcher.set("own data", own_data.as_bytes());
    let arguments = ["--exact", "rank", "--nocapture", "--test-threads=1"].map(OsString::from);
    launcher.run(&std::env::current_exe().unwrap(), &arguments, &AtomicBool::new(false))
}

#[test]
fn ranks_as_processes_equal_ranks_as_threads() {
    for pins in PINS {
        let dir = tempfile::tempdir().unwrap();
        let (processes, threads) = (dir.path().join("processes"), dir.path().join("threads"));
        launch(pins, &processes, "no").unwrap();
        train(pins, &threads, None, [0, 1, 2]).unwrap();
        let read = |saved: &Path| fs::read(saved.join("model.safetensors")).unwrap();
        assert!(read(&processes) == read(&threads), "{pins}: the saved parameters differ");
        assert!(
            read(&threads) != fs::read(fixture().join("model.safetensors")).unwrap(),
            "{pins}: nothing was learned"
        );
    }
}

#[test]
fn ranks_with_other_data_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let error = launch(PINS[0], dir.path(), "yes").unwrap_err().to_string();
    assert!(error.contains("the ranks disagree on the first batch's hash: rank 0 has"), "{error}");
}
