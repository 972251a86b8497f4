//! The one list of passes, and why they come in this order.
//!
//! After each pass its result is verified and timed; `--dump-to DIR` writes it as `NN.name.ir`.
//! What a verifier finds after a pass is a bug of that pass, never of the user.

use crate::error::Error;
use crate::options::Options;
use shardc_ir::plan::Request;
use shardc_ir::{Graph, Plan, Program, verify};
use shardc_models::Model;
use shardc_passes::allocate::memory;
use shardc_passes::cluster::Cluster;
use shardc_passes::differentiate::differentiate;
use shardc_passes::lower::{lower_all, lower_rank};
use shardc_passes::optimizer::add_optimizer;
use shardc_passes::precision::lower_precision;
use shardc_passes::raise::raise;
use shardc_passes::search::{Pins, search_confirmed};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// From a traced model to a plan.
pub fn plan(model: &Model, request: &Request, cluster: &Cluster, options: &Options) -> Result<Plan, Error> {
    let mut stage = Stage::new(options.dump_to.as_deref())?;
    let graph = stage.graph("trace", || Ok(model.graph.clone()))?;

    // First, because every later pass does better on few large operations than on many small ones:
    // a composite operation has a derivative, a factor rule and a kernel of its own.
    let graph = stage.graph("raise", || Ok(raise(&graph)?.0))?;

    // Before differentiation, so that gradients pass back through the casts and those of
    // parameters arrive in f32; after raising, because patterns are written without casts.
    let graph = stage.graph("lower_precision", || Ok(lower_precision(&graph, options.precision)?))?;

    let differentiated = stage.run("differentiate", || Ok(differentiate(&graph, "loss")?))?;
    stage.check_graph("differentiate", &differentiated.graph)?;

    // Part of the graph, because how it is spread (ZeRO) is part of the plan.
    let graph = stage.graph("add_optimizer", || Ok(add_optimizer(differentiated, &options.optimizer)?))?;

    // Recomputation is a choice of the search: it rewrites the graph for each candidate, since what
    // a layout costs decides what is worth recomputing.
    // The memory of a winner is confirmed by lowering it, so what is planned fits what is run.
    let pins = Pins::parse(&options.pins)?;
    let confirm = |plan: &Plan| match lower_rank(plan, 0) {
        Ok(program) => Ok(memory(&program)),
        Err(error) => Err(error.to_string()),
    };
    let plan = stage.run("search", || Ok(search_confirmed(&graph, cluster, request, &pins, Some(&confirm))?))?;
    stage.check_plan("search", &plan)?;
    Ok(plan)
}

/// From a plan, perhaps read from a file, to the programs of all ranks. Scheduling and allocation
/// are part of lowering a rank: offsets exist only once the order of instructions is fixed.
pub fn programs(plan: &Plan, dump_to: Option<&Path>) -> Result<Vec<Program>, Error> {
    let mut stage = Stage::new(dump_to)?;
    stage.number = AFTER_SEARCH;
    let programs = stage.run("lower", || Ok(lower_all(plan)?))?;
    stage.dump("lower", programs.first().into_iter())?;
    match verify::program(&programs) {
        Ok(_) => {}
        Err(found) => return Err(Error::Bug(format!("after lower: {found}"))),
    }
    Ok(programs)
}

/// The number of the first pass after the search.
const AFTER_SEARCH: usize = 6;

/// Runs passes one after the other.
struct Stage {
    dump_to: Option<PathBuf>,
    number: usize,
}

impl Stage {
    fn new(dump_to: Option<&Path>) -> Result<Self, Error> {
        if let Some(dir) = dump_to {
            std::fs::create_dir_all(dir).map_err(|source| Error::Io { path: dir.to_path_buf(), source })?;
        }
        Ok(Self { dump_to: dump_to.map(Path::to_path_buf), number: 0 })
    }

    fn run<T>(&self, name: &str, pass: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        let start = Instant::now();
        let result = pass()?;
        tracing::info!(pass = name, seconds = start.elapsed().as_secs_f64(), "done");
        Ok(result)
    }

    fn graph(&mut self, name: &str, pass: impl FnOnce() -> Result<Graph, Error>) -> Result<Graph, Error> {
        let graph = self.run(name, pass)?;
        self.check_graph(name, &graph)?;
        Ok(graph)
    }

    fn check_graph(&mut self, name: &str, graph: &Graph) -> Result<(), Error> {
        self.dump(name, [graph].into_iter())?;
        match verify::graph(graph) {
            Ok(_) => Ok(()),
            Err(found) => Err(Error::Bug(format!("after {name}: {found}"))),
        }
    }

    fn check_plan(&mut self, name: &str, plan: &Plan) -> Result<(), Error> {
        self.dump(name, [plan].into_iter())?;
        match verify::plan(plan) {
            Ok(_) => Ok(()),
            Err(found) => Err(Error::Bug(format!("after {name}: {found}"))),
        }
    }

    fn dump<'a, T: Display + 'a>(&mut self, name: &str, texts: impl Iterator<Item = &'a T>) -> Result<(), Error> {
        if let Some(dir) = &self.dump_to {
            let path = dir.join(format!("{:02}.{name}.ir", self.number));
            let text: String = texts.map(ToString::to_string).collect();
            std::fs::write(&path, text).map_err(|source| Error::Io { path, source })?;
        }
        self.number += 1;
        Ok(())
    }
}
