//! `shardc train`.

use super::args::{SearchArg, TrainArgs};
use super::files::{check_places, check_writable, is_part};
use super::inspect::crowded;
use super::log::say;
use super::{files, print, print_json, request, signals};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};
use shardc::data::{Data, StreamConfig, formats, is_exact, open_batches, open_stream};
use shardc::explain::{Inspection, timeline};
use shardc::metrics::MetricsFile;
use shardc::profile::{self, Profile};
use shardc::steps::Observer;
use shardc::{Batch, Cluster, Compiled, Error, NamedModel, StepMetrics, TrainOptions, Trainer, launch};
use shardc_ir::units::counted;
use shardc_passes::simulate::Conditions;
use shardc_runtime::Span;
use shardc_runtime::launch::Place;
use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Steps that are left out of the median time: the first touch the memory.
const WARM: usize = 1;

/// The operations that a profile lists.
const OPERATIONS: usize = 40;

/// Refuses to write over what is read, and what cannot be written: that is told before the run, not after it. No file
/// of an earlier run is touched yet.
fn check_outputs(args: &TrainArgs, model: &NamedModel) -> Result<(), Error> {
    let data = formats::files(&args.data);
    let read = data.iter().chain(&args.tokenizer).map(PathBuf::as_path);
    let read: Vec<&Path> = read.chain([Path::new(&args.model)]).collect();
    let written = [("--metrics", &args.metrics), ("--timeline", &args.timeline)];
    let written: Vec<(&str, &Path)> =
        written.into_iter().filter_map(|(flag, path)| Some((flag, path.as_deref()?))).collect();
    check_places(&written, &read)?;
    if !launch::is_lead() {
        return Ok(());
    }
    if let Some(dir) = &args.save {
        std::fs::create_dir_all(dir).map_err(|source| Error::Io { path: dir.clone(), source })?;
        check_writable(&dir.join(format!(".{}.partial", std::process::id())))?;
        shardc_models::hf::check_place(dir)?;
        if let Some((flag, path)) = written.iter().find(|(_, path)| is_part(path, dir)) {
            let message = format!("{flag} {}: --save writes the model there", path.display());
            return Err(Error::request(message, "name another file"));
        }
        tell_foreign_tokenizer(args, model, &dir.join("tokenizer.json"));
    }
    written.iter().try_for_each(|(_, path)| check_writable(path))
}

/// Where a model is saved whose training went wrong: not over one that was there before.
fn diverged_place(dir: &Path) -> PathBuf {
    if !shardc_models::hf::holds_model(dir) {
        return dir.to_path_buf();
    }
    match dir.file_name() {
        Some(name) => dir.with_file_name(format!("{}.diverged", name.to_string_lossy())),
        None => dir.join("diverged"),
    }
}

/// Tells of a tokenizer where a model is to be saved whose text was read without one: later runs would read theirs with it.
fn tell_foreign_tokenizer(args: &TrainArgs, model: &NamedModel, tokenizer: &Path) {
    if reads_text(args) && args.tokenizer.is_none() && model.tokenizer().is_none() && tokenizer.exists() {
        let path = tokenizer.display();
        tracing::warn!("{path} stays, and is not of this run, whose tokens are bytes: what is saved is read with it");
    }
}

/// Whether the data suits the model, and lasts for all steps.
fn check_data(args: &TrainArgs, model: &NamedModel, compiled: &Compiled, data: &Data) -> Result<(), Error> {
    data.check(&compiled.model.inputs, &|input| model.config.range(input))?;
    if let Some(steps) = data.steps().filter(|steps| *steps < args.steps) {
        let message = format!("--steps {}: {} holds {steps} steps", args.steps, args.data.display());
        return Err(Error::request(message, format!("ask for --steps {steps} or less")));
    }
    Ok(())
}

/// Says by what plan is trained.
fn announce(compiled: &Compiled) -> Result<(), Error> {
    say(&format!("{}\n", shardc::report::plan_text(compiled.plan())));
    if let Some((note, fix)) = crowded(&Cluster::of(compiled.plan())?) {
        say(&format!("{note}; {fix}\n\n"));
    }
    Ok(())
}

/// Trains, and prints a summary.
pub fn train(args: &TrainArgs, json: bool) -> Result<(), Error> {
    let learning_rate = request::learning_rate(&args.optimizer, args.steps)?;
    let (model, compiled, data) = prepare(args)?;
    compiled.check_runs()?;
    check_data(args, &model, &compiled, &data)?;
    check_outputs(args, &model)?;
    if !json && launch::is_lead() {
        announce(&compiled)?;
    }
    let options = TrainOptions { learning_rate, seed: args.seed };
    let weights = model.weights()?;
    let beside = model.beside(args.tokenizer.as_deref())?;
    let diverged = args.save.as_deref().map(diverged_place);
    if compiled.needs_launch()? {
        return compiled.launch(&interrupt());
    }
    // Ranks that shardc's launcher started stop by a vote of theirs, whenever they are asked to. Others that are asked
    // before their first step end at once: nothing is trained yet, and they may wait for ranks that never come.
    let early = matches!(Place::from_env(), Ok(Some(place)) if place.is_ours).then(interrupt);
    let mut trainer = compiled.start(weights.as_ref(), options)?;
    let stop = early.unwrap_or_else(interrupt);
    let world = trainer.world().clone();
    let trained = launch::reporting(&world, || {
        let mut run = Run::new(args, world.is_lead(), compiled.unit())?;
        let outcome = run.steps(&mut trainer, &data, &stop);
        // A step whose norm is not finite leaves the parameters as they were, on every rank alike. What was
        // trained is saved first: it matters more than what becomes of that which is said of it.
        let place = match &outcome {
            Ok(()) => args.save.as_deref(),
            Err(Error::NotFinite { .. }) => diverged.as_deref(),
            Err(_) => None,
        };
        let place = place.filter(|_| !run.steps.is_empty());
        let saved = place.map_or(Ok(()), |dir| model.save(dir, &mut trainer, &beside)).map(|()| place);
        let mut shown = Ok(());
        if world.is_lead() {
            run.bar.finish_and_clear();
            let measured = run.measured(args, &compiled);
            let profile = measured.as_ref().ok().and_then(Option::as_ref);
            let place = saved.as_ref().ok().copied().flatten();
            match json {
                true => print_json(&summary_json(&compiled, &run, profile, place)),
                false => summarize((&model, &compiled), &run, profile, place),
            }
            shown = measured.map(drop);
        }
        saved?;
        outcome?;
        run.ended.map_or(Ok(()), Err)?;
        launch::leave(&world)?;
        shown
    });
    match trained {
        // The launcher has been told, and says it for all ranks.
        Err(error) if world.place().is_ours && world.failure().is_some() => {
            std::process::exit(error.exit_code().into())
        }
        outcome => outcome,
    }
}

/// The steps of one run, as they are shown and written down. Only rank 0 shows and writes.
struct Run {
    asked: u64,
    /// What a step is counted in.
    unit: &'static str,
    /// Whether the last step is measured.
    is_timed: bool,
    spans: Vec<Span>,
    bar: ProgressBar,
    metrics: Option<MetricsFile>,
    /// Why there is no further step: one could not be written down, or its batch not be read. The run stops, and what it
    /// trained is kept.
    ended: Option<Error>,
    is_lead: bool,
    steps: Vec<StepMetrics>,
    is_stopped: bool,
}

impl Run {
    fn new(args: &TrainArgs, is_lead: bool, unit: &'static str) -> Result<Self, Error> {
        let metrics = args.metrics.as_deref().filter(|_| is_lead).map(MetricsFile::create).transpose()?;
        let bar = progress(args.steps);
        let is_timed = args.profile || args.timeline.is_some();
        let (asked, spans, steps) = (args.steps, Vec::new(), Vec::new());
        Ok(Self { asked, unit, is_timed, spans, bar, metrics, ended: None, is_lead, steps, is_stopped: false })
    }

    /// Runs the steps that were asked for, or until all ranks agree to stop.
    fn steps(&mut self, trainer: &mut Trainer<'_>, data: &Data, stop: &AtomicBool) -> Result<(), Error> {
        let (asked, is_timed, inputs) = (self.asked, self.is_timed, &trainer.compiled().model.inputs);
        let batch = |step| Ok(data.batch(step, inputs)?);
        let ended = trainer.steps(asked, is_timed, batch, &mut Shown { run: self, stop })?;
        self.is_stopped = ended.is_early;
        self.ended = ended.unread.or(self.ended.take());
        Ok(())
    }

    /// What was measured of the last step: a timeline is written, and what a table shows is given.
    fn measured(&self, args: &TrainArgs, compiled: &Compiled) -> Result<Option<Profile>, Error> {
        if self.spans.is_empty() {
            if self.is_timed {
                say(
                    "no step was measured: that is the last of those that were asked for, and the run ended before it\n",
                );
            }
            return Ok(None);
        }
        let (spans, programs) = (&self.spans, compiled.programs()?);
        if let Some(path) = &args.timeline {
            let mut trace = profile::trace_events(programs, spans);
            // What was predicted stands below what was measured.
            let cluster = Cluster::of(compiled.plan())?;
            let predicted = Inspection::new(compiled.verified(), cluster, &Conditions::default())?;
            if let Some(events) = trace["traceEvents"].as_array_mut() {
                events.extend(timeline::events(&predicted, predicted.plan.mesh.ranks()));
            }
            files::write(path, &trace.to_string())?;
        }
        let Some(program) = programs.first().filter(|_| args.profile) else { return Ok(None) };
        let here = request::cluster(Some(&compiled.plan().request.cluster))?;
        Ok(Some(Profile::new(program, spans, &here.device)))
    }
}

/// A run whose steps are shown, until the user asks to stop.
struct Shown<'a> {
    run: &'a mut Run,
    stop: &'a AtomicBool,
}

impl Observer for Shown<'_> {
    fn is_stopped(&mut self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn saw(&mut self, step: StepMetrics, spans: Vec<Span>) -> ControlFlow<()> {
        let run = &mut *self.run;
        if run.is_lead {
            show(run, &step);
        }
        run.ended = run.metrics.as_mut().and_then(|file| file.write(&step).err());
        run.spans = spans;
        run.steps.push(step);
        if run.ended.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

/// Whether the data is text, of which tokens are made.
fn reads_text(args: &TrainArgs) -> bool {
    formats::is_text(&args.data) && !is_exact(&args.data)
}

/// The model, its plan and its data.
fn prepare(args: &TrainArgs) -> Result<(NamedModel, Compiled, Data), Error> {
    if let Some(tokenizer) = args.tokenizer.as_deref().filter(|_| !reads_text(args)) {
        let message = format!("--tokenizer {}: {} holds tokens already", tokenizer.display(), args.data.display());
        return Err(Error::request(message, "leave --tokenizer out, or give --data a text file"));
    }
    let exact = is_exact(&args.data).then(|| open_batches(&args.data)).transpose()?;
    let fixed = exact.as_ref().and_then(Data::shape);
    // A plan is a file, in JSON or as text, and a model never is; whatever looks like one was meant as one.
    let is_plan = Path::new(&args.model).is_file() || [".json", ".ir"].iter().any(|end| args.model.ends_with(end));
    let (model, compiled) = match is_plan {
        true => planned(args, fixed)?,
        false => {
            let model = NamedModel::find(&args.model)?;
            let cluster = request::cluster(args.request.cluster.as_deref())?;
            let batch = request::batch(&args.request, fixed, &model, &cluster)?;
            let mut options = request::options(&args.request, &cluster)?;
            options.optimizer = request::optimizer(&args.optimizer)?;
            let compiled = shardc::compile(&model, batch, &cluster, &options)?;
            (model, compiled)
        }
    };
    let request = &compiled.plan().request;
    let data = match exact {
        Some(data) => data,
        None => {
            let inputs = || compiled.model.inputs.iter().map(|(name, _)| format!("{name}.STEP")).collect::<Vec<_>>();
            let vocab = model.vocabulary().ok_or_else(|| {
                let message = format!("{} is no language model, and {} holds tokens", model.name, args.data.display());
                Error::request(message, format!("give exact batches: a .safetensors file with {}", inputs().join(", ")))
            })?;
            let (batch, seq, seed) = (request.batch, request.seq, args.seed);
            let config = StreamConfig { batch, seq, vocab, seed };
            let tokenizer = args.tokenizer.clone().or_else(|| model.tokenizer());
            open_stream(&args.data, tokenizer.as_deref(), config)?
        }
    };
    Ok((model, compiled, data))
}

/// The plan of a file, and its model traced again.
fn planned(args: &TrainArgs, fixed: Option<(u64, u64)>) -> Result<(NamedModel, Compiled), Error> {
    let path = Path::new(&args.model);
    let plan = request::plan_file(path)?;
    let asked = &plan.request;
    let flags = &args.request;
    let contradiction = |flag: &str, given: String, planned: &str| {
        let message = format!("{flag} {given} contradicts the plan, which is for {planned}");
        Err(Error::request(message, format!("leave {flag} out, or make another plan")))
    };
    if let Some(given) = flags.cluster.as_ref().filter(|given| **given != asked.cluster) {
        return contradiction("--cluster", given.clone(), &asked.cluster);
    }
    for (flag, given, planned) in [("--batch", flags.batch, asked.batch), ("--seq", flags.seq, asked.seq)] {
        if let Some(given) = given.filter(|given| *given != planned) {
            return contradiction(flag, given.to_string(), &planned.to_string());
        }
    }
    let memory = flags.device_memory.is_some() || flags.host_memory.is_some();
    let numbers = flags.precision.is_some() || flags.reduce_dtype.is_some() || flags.deterministic;
    if flags.pin.is_some() || numbers || memory {
        let message = "--pin, --precision, --reduce-dtype, --deterministic, --device-memory and --host-memory are choices \
                       that the plan file has made";
        return Err(Error::request(message, "leave them out, or give the model's name instead of the plan file"));
    }
    if flags.dump_to.is_some() || flags.search != SearchArg::Runnable {
        let message = "--dump-to and --search are about making a plan, which the plan file is";
        return Err(Error::request(message, "leave them out, or give the model's name instead of the plan file"));
    }
    if request::optimizer(&args.optimizer)? != shardc::OptimizerConfig::default() {
        let message = "--betas, --eps, --weight-decay and --clip-grad-norm are part of the plan file's graph";
        return Err(Error::request(message, "leave them out, or give the model's name instead of the plan file"));
    }
    if let Some((batch, seq)) = fixed.filter(|fixed| *fixed != (asked.batch, asked.seq)) {
        let (data, planned) = (args.data.display(), request::shape(asked.batch, asked.seq));
        let given = request::shape(batch, seq);
        let message = format!("--data {data} has batches of {given}, and the plan is for batches of {planned}");
        return Err(Error::request(message, "give batches of the plan's shape, or make another plan"));
    }
    if let Some(wrong) = Compiled::contradiction(&plan) {
        let message = format!("{} contradicts itself: {wrong}", path.display());
        return Err(Error::request(message, "plan again; `shardc verify` tells all that is wrong with a plan"));
    }
    request::check_here(&plan)?;
    let model = NamedModel::find(&asked.model)?;
    let traced = shardc::Trace::trace(&model, Batch { batch: asked.batch, seq: asked.seq })?;
    if let Some(wrong) = Compiled::other_model(&plan, &traced) {
        let message = format!("{} is the plan of another model: {wrong}", path.display());
        return Err(Error::request(message, format!("plan {} again, as it is now", asked.model)));
    }
    Ok((model, Compiled::from_plan(traced, plan)))
}

/// Set when the user asks to stop; the step in progress is finished first.
fn interrupt() -> Arc<AtomicBool> {
    signals::stop(|| {
        // The launcher says it for its ranks.
        if !matches!(Place::from_env(), Ok(Some(place)) if place.is_ours || place.rank > 0) {
            say("\nstopping at the end of this step; once more to stop at once\n");
        }
    })
}

fn progress(steps: u64) -> ProgressBar {
    let target = match std::io::stderr().is_terminal() {
        true => ProgressDrawTarget::stderr(),
        false => ProgressDrawTarget::hidden(),
    };
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} {eta}");
    let bar = ProgressBar::with_draw_target(Some(steps), target);
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn show(run: &Run, step: &StepMetrics) {
    let Run { bar, asked: steps, unit, .. } = run;
    bar.set_position(step.step + 1);
    bar.set_message(format!("loss {:.4} {:.0} {unit}/s", step.loss, step.tokens_per_s));
    // Off a terminal a run is followed by its lines: about twenty of them, and the last.
    let every = (steps / 20).max(1);
    if bar.is_hidden() && (step.step.is_multiple_of(every) || step.step + 1 == *steps) {
        let scale = step.loss_scale.map(|scale| format!("  loss scale {scale}")).unwrap_or_default();
        let StepMetrics { step, loss, grad_norm, step_s, tokens_per_s, .. } = step;
        say(&format!(
            "step {step:>5}  loss {loss:.4}  grad norm {grad_norm:.3}  {step_s:.3} s  {tokens_per_s:.0} {unit}/s{scale}\n"
        ));
    }
}

/// What the run did, measured beside predicted.
struct Summary {
    step_s: f64,
    tokens_per_s: f64,
    mfu: f64,
    peak: u64,
    first_loss: Option<f64>,
    last_loss: Option<f64>,
    loss_scale: Option<f64>,
    skipped: usize,
}

impl Summary {
    fn new(compiled: &Compiled, steps: &[StepMetrics]) -> Self {
        let prediction = &compiled.plan().prediction;
        let timed = if steps.len() > WARM { &steps[WARM..] } else { steps };
        let mut times: Vec<f64> = timed.iter().map(|step| step.step_s).collect();
        times.sort_by(f64::total_cmp);
        let step_s = times.get(times.len() / 2).copied().unwrap_or(f64::NAN);
        Self {
            step_s,
            tokens_per_s: compiled.tokens_per_step() as f64 / step_s,
            mfu: prediction.mfu * prediction.step.0 / step_s,
            peak: steps.last().map_or(0, |step| step.peak_device_bytes),
            first_loss: steps.first().map(|step| step.loss),
            last_loss: steps.last().map(|step| step.loss),
            loss_scale: steps.last().and_then(|step| step.loss_scale),
            skipped: steps.iter().filter(|step| step.is_skipped()).count(),
        }
    }
}

/// All that a run has to say, as one document.
fn summary_json(compiled: &Compiled, run: &Run, profile: Option<&Profile>, save: Option<&Path>) -> Value {
    let (summary, prediction) = (Summary::new(compiled, &run.steps), &compiled.plan().prediction);
    let mut document = json!({
        "steps": run.steps.len(),
        "stopped": run.is_stopped,
        "first_loss": summary.first_loss,
        "last_loss": summary.last_loss,
        "loss_scale": summary.loss_scale,
        "skipped_steps": summary.skipped,
        "step_s": summary.step_s,
        "predicted_step_s": prediction.step,
        "tokens_per_s": summary.tokens_per_s,
        "mfu": summary.mfu,
        "predicted_mfu": prediction.mfu,
        "peak_device_bytes": summary.peak,
        "predicted_device_bytes": prediction.memory.total(),
        "choice": compiled.plan().choice,
    });
    if let Some(profile) = profile {
        document["profile"] = json!(profile);
    }
    if let Some(dir) = save {
        document["save"] = json!(dir.display().to_string());
    }
    document
}

/// All that a run has to say, as text.
fn summarize((model, compiled): (&NamedModel, &Compiled), run: &Run, profile: Option<&Profile>, save: Option<&Path>) {
    summarize_steps(compiled, run, profile);
    if let Some(dir) = save {
        let form = if model.has_hf_form() {
            ""
        } else {
            " (weights alone: shardc writes no Hugging Face form of this family)"
        };
        print(&format!("saved to {}{form}\n", dir.display()));
    }
}

fn summarize_steps(compiled: &Compiled, run: &Run, profile: Option<&Profile>) {
    let (summary, prediction) = (Summary::new(compiled, &run.steps), &compiled.plan().prediction);
    let why = match (run.is_stopped, &run.ended) {
        (_, Some(Error::Data(_))) => ", ended since the data cannot be read",
        (_, Some(_)) => ", ended since the metrics cannot be written",
        (true, None) => ", stopped by the user",
        (false, None) => "",
    };
    print(&format!("\n{} of {}{why}\n", run.steps.len(), counted(run.asked, "step")));
    let (Some(first), Some(last)) = (summary.first_loss, summary.last_loss) else { return };
    print(&format!("loss         {first:.4} -> {last:.4}\n"));
    if let Some(scale) = summary.loss_scale {
        print(&format!("loss scale   {scale}, {} skipped\n", counted(summary.skipped as u64, "step")));
    }
    print("                 measured   predicted\n");
    let row =
        |name: &str, measured: String, predicted: String| print(&format!("{name:12} {measured:>12} {predicted:>12}\n"));
    row("step", shardc_ir::Seconds(summary.step_s).to_string(), prediction.step.to_string());
    let predicted_rate = compiled.tokens_per_step() as f64 / prediction.step.0;
    row(&format!("{}/s", compiled.unit()), format!("{:.0}", summary.tokens_per_s), format!("{predicted_rate:.0}"));
    row("MFU", format!("{:.1}%", summary.mfu * 100.0), format!("{:.1}%", prediction.mfu * 100.0));
    row("peak memory", shardc_ir::Bytes(summary.peak).to_string(), prediction.memory.total().to_string());
    if let Some(profile) = profile {
        print(&format!("\n{}", profile.text(OPERATIONS)));
    }
}
