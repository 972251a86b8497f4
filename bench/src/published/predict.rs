//! Predicts a published run: its degrees pinned, what it does not say chosen as the planner would.

use super::block::{Again, Block, Shape, group};
use super::contradiction::contradiction;
use super::decoder::Decoder;
use super::memory;
use super::pipeline::Schedule;
use super::rows::Row;
use super::step::{Step, Work};
use super::system::{self, Habit, System};
use super::words;
use shardc_passes::cluster::Cluster;
use std::collections::HashMap;
use std::fmt;

/// The degrees of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Degrees {
    /// Data ranks.
    pub data: u64,
    /// Tensor ranks.
    pub tensor: u64,
    /// Pipeline stages.
    pub stages: u64,
    /// Ranks of a sequence.
    pub context: u64,
    /// Ranks of the experts.
    pub expert: u64,
    /// Tensor ranks of one expert.
    pub expert_tensor: u64,
    /// ZeRO stage.
    pub zero: u64,
    /// Recomputation.
    pub again: Again,
    /// Sequences of a microbatch.
    pub microbatch: u64,
    /// Chunks of a stage.
    pub chunks: u64,
    /// The schedule of the stages, where the source names one; else 1F1B, interleaved if a stage has chunks.
    pub named: Option<Schedule>,
    /// Sequences of a step.
    pub global_batch: u64,
}

impl fmt::Display for Degrees {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { data, tensor, stages, context, expert, zero, microbatch, chunks, .. } = self;
        write!(f, "dp={data},tp={tensor}")?;
        for (name, degree) in [("pp", stages), ("virtual", chunks), ("cp", context), ("ep", expert)] {
            if *degree > 1 {
                write!(f, ",{name}={degree}")?;
            }
        }
        let again = format!("{:?}", self.again).to_lowercase();
        write!(f, ",zero={zero},microbatch={microbatch},recompute={again}")
    }
}

impl Degrees {
    /// What a layer's time depends on.
    pub fn shape(&self, is_f8: bool) -> Shape {
        let Self { microbatch, tensor, context, expert, expert_tensor, again, .. } = *self;
        Shape { microbatch, tensor, context, expert, expert_tensor, again, is_f8 }
    }

    /// Microbatches of a step.
    pub fn microbatches(&self) -> u64 {
        (self.global_batch / (self.data * self.microbatch)).max(1)
    }

    /// The schedule of the stages.
    pub fn schedule(&self) -> Schedule {
        let usual = if self.chunks > 1 { Schedule::Interleaved(self.chunks) } else { Schedule::OneForwardOneBackward };
        self.named.unwrap_or(usual)
    }

    /// The ranks that hold the same dense parameters, and the same experts.
    pub fn data_ranks(&self) -> [u64; 2] {
        let ranks = self.data * self.context;
        [ranks, (ranks * self.tensor / (self.expert * self.expert_tensor)).max(1)]
    }
}

/// Times plans of one model on one cluster under one system; layers of equal shape are timed once.
pub struct Evaluator {
    /// The devices.
    pub cluster: Cluster,
    /// The software.
    pub system: System,
    /// The model.
    pub decoder: Decoder,
    /// Whether products run in 8 bits.
    pub is_f8: bool,
    blocks: HashMap<Shape, Block>,
}

impl Evaluator {
    /// An evaluator with nothing timed yet.
    pub fn new(cluster: Cluster, system: System, decoder: Decoder, is_f8: bool) -> Self {
        Self { cluster, system, decoder, is_f8, blocks: HashMap::new() }
    }

    /// Times one plan.
    pub fn step(&mut self, degrees: &Degrees) -> Step {
        let shape = degrees.shape(self.is_f8);
        let Self { cluster, system, decoder, blocks, .. } = self;
        let block = *blocks.entry(shape).or_insert_with(|| decoder.block(shape, cluster, &system.library));
        let table = decoder.table_parameters(degrees.tensor);
        let neighbour = degrees.tensor * degrees.context * degrees.data;
        let [ranks, expert_ranks] = degrees.data_ranks();
        let work = Work {
            cluster,
            library: &system.library,
            layer: block.layer,
            layers: decoder.layers,
            ends: block.ends,
            end_parameters: decoder.tables(degrees.stages) * table,
            microbatches: degrees.microbatches(),
            stages: degrees.stages,
            schedule: degrees.schedule(),
            sent: block.stream,
            sends_away: neighbour >= cluster.per_node,
            data: [
                group(cluster, ranks, degrees.tensor),
                group(cluster, expert_ranks, shape.expert_tensor * degrees.expert),
            ],
            zero: degrees.zero,
            ranks: neighbour * degrees.stages,
        };
        work.seconds()
    }

    /// Bytes of one rank at the peak.
    pub fn memory(&self, degrees: &Degrees) -> f64 {
        memory::bytes(self, degrees)
    }
}

/// The prediction of one run.
pub struct Predicted {
    /// Its plan.
    pub degrees: Degrees,
    /// Which choices the source did not publish, as pins would say them.
    pub chosen: Vec<String>,
    /// Whether the batch is one of them: then the memory is that of another run.
    pub guesses_batch: bool,
    /// The time.
    pub step: Step,
    /// Bytes of one rank at the peak.
    pub memory: f64,
    /// What timed it.
    pub evaluator: Evaluator,
}

/// Predicts a run.
///
/// # Errors
/// Says why the run cannot be expressed.
pub fn predict(row: &Row) -> Result<Predicted, String> {
    if let Some(fault) = &row.fault {
        return Err(fault.clone());
    }
    let decoder = Decoder::of(row)?;
    if let Some(contradiction) = contradiction(row, &decoder) {
        return Err(contradiction);
    }
    if row.measured.step_s.is_some() && row.parallel.global_batch.is_none() {
        return Err("the length of a step was measured, but not of how many sequences".to_string());
    }
    let cluster = system::cluster(row)?;
    let system = system::system(row);
    let is_f8 = words::is_f8(&row.precision)?;
    let (candidates, chosen) = candidates(row, &decoder, &system)?;
    let mut evaluator = Evaluator::new(cluster, system, decoder, is_f8);
    // The run did fit: what our own plans leave free for the driver may be its, too.
    let bound = evaluator.cluster.device.memory_bytes.value;
    let mut best: Option<(bool, f64, Degrees)> = None;
    for degrees in candidates {
        // Where the batch is ours, too, plans are compared by the sequence.
        let time = evaluator.step(&degrees).total / degrees.global_batch as f64;
        let memory = evaluator.memory(&degrees);
        let does_not_fit = memory > bound;
        // What fits by time; of what does not, the leanest.
        let rank = (does_not_fit, if does_not_fit { memory } else { time });
        if best.as_ref().is_none_or(|best| rank < (best.0, best.1)) {
            best = Some((rank.0, rank.1, degrees));
        }
    }
    let (_, _, degrees) = best.ok_or("no degrees divide its devices, batch and heads")?;
    let guesses_batch = chosen.contains(&Choice::Batch);
    let chosen = chosen.into_iter().map(|choice| choice.text(&degrees)).collect();
    let (step, memory) = (evaluator.step(&degrees), evaluator.memory(&degrees));
    if !(step.total.is_finite() && step.total > 0.0 && memory.is_finite()) {
        return Err(format!("its sizes give a step of {} s", step.total));
    }
    Ok(Predicted { degrees, chosen, guesses_batch, step, memory, evaluator })
}

/// The fastest plan that fits for a run's model, devices and batch, with nothing pinned but the
/// experts' ranks; the published plan itself is among those that are compared, whether or not its
/// memory is predicted to fit. The evaluator is that of the run's own prediction.
///
/// # Errors
/// Says why nothing can be compared.
pub fn unpinned(row: &Row, published: &mut Predicted) -> Result<(Degrees, Step), String> {
    let mut free = row.clone();
    let parallel = &mut free.parallel;
    parallel.global_batch = Some(published.degrees.global_batch);
    parallel.recompute = None;
    for choice in [&mut parallel.dp, &mut parallel.tp, &mut parallel.pp, &mut parallel.cp] {
        *choice = None;
    }
    (parallel.microbatch, parallel.virtual_stages) = (None, None);
    let evaluator = &mut published.evaluator;
    let bound = evaluator.cluster.usable_memory().0 as f64;
    let system = System { habit: Habit::Least, ..evaluator.system };
    let (plans, _) = candidates(&free, &evaluator.decoder, &system)?;
    let mut best = (published.degrees, published.step);
    for plan in plans {
        for zero in 0..=3 {
            let plan = Degrees { zero, ..plan };
            let step = evaluator.step(&plan);
            if step.total < best.1.total && evaluator.memory(&plan) <= bound {
                best = (plan, step);
            }
        }
    }
    Ok(best)
}

/// A choice that a source did not publish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    Tensor,
    Stages,
    Context,
    Zero,
    Again,
    Microbatch,
    Batch,
    Chunks,
    ExpertTensor,
}

impl Choice {
    fn text(self, degrees: &Degrees) -> String {
        match self {
            Self::Tensor => format!("tp={}", degrees.tensor),
            Self::Stages => format!("pp={}", degrees.stages),
            Self::Context => format!("cp={}", degrees.context),
            Self::Zero => format!("zero={}", degrees.zero),
            Self::Again => format!("recompute={:?}", degrees.again).to_lowercase(),
            Self::Microbatch => format!("microbatch={}", degrees.microbatch),
            Self::Batch => format!("batch={}", degrees.global_batch),
            Self::Chunks => format!("virtual={}", degrees.chunks),
            Self::ExpertTensor => format!("etp={}", degrees.expert_tensor),
        }
    }
}

/// The powers of two up to a number.
fn powers(most: u64) -> Vec<u64> {
    std::iter::successors(Some(1), |power| Some(power * 2)).take_while(|power| *power <= most).collect()
}

/// What a run may have been: of each choice, the value that its source says, or all that are plausible.
struct Options {
    tensors: Vec<u64>,
    stages: Vec<u64>,
    contexts: Vec<u64>,
    microbatches: Vec<u64>,
    /// Chunks of a stage.
    chunks: Vec<u64>,
    /// The schedule of the stages, where the source names one.
    named: Option<Schedule>,
    zero: u64,
    agains: Vec<Again>,
    /// The choices that the source leaves open.
    chosen: Vec<Choice>,
}

impl Options {
    fn new(row: &Row, decoder: &Decoder, system: &System) -> Result<Self, String> {
        let parallel = &row.parallel;
        let mut chosen = Vec::new();
        let mut options = |value: Option<u64>, otherwise: Vec<u64>, choice: Choice| {
            let known = value.filter(|value| *value > 0).map(|value| vec![value]);
            known.unwrap_or_else(|| {
                chosen.push(choice);
                otherwise
            })
        };
        // Where the data ranks are known, so is the product of the others. Tensor ranks stay in a node (Narayanan et al.,
        // 2021, section 3.2), each with a key head, and so do the ranks of a sequence.
        let node = row.hardware.gpus_per_node.unwrap_or(8).min(row.hardware.count.unwrap_or(1));
        let tensors = options(parallel.tp, powers(decoder.kv_heads.min(node)), Choice::Tensor);
        let stages = options(parallel.pp, powers(decoder.layers.min(64)), Choice::Stages);
        let contexts = options(parallel.cp, powers(node), Choice::Context);
        let microbatches = options(parallel.microbatch, powers(64), Choice::Microbatch);
        if parallel.global_batch.is_none() {
            options(None, Vec::new(), Choice::Batch);
        }
        let mut chunks = vec![1];
        let named = words::schedule(&row.notes);
        if named.is_none() && stages.iter().any(|stages| *stages > 1) {
            let most = if system.interleaves { 32 } else { 1 };
            chunks = options(parallel.virtual_stages, (1..=most).collect(), Choice::Chunks);
        }
        let zero = parallel.zero.as_ref().map(words::zero_stage).transpose()?;
        let zero = options(zero.map(|zero| zero + 1), vec![system.zero + 1], Choice::Zero)[0] - 1;
        let recompute = parallel.recompute.as_ref().map(|text| text.to_lowercase());
        let agains = match recompute.as_deref() {
            Some(text) => vec![words::recomputation(text)?],
            None => {
                chosen.push(Choice::Again);
                match system.habit {
                    Habit::Full => vec![Again::Everything],
                    Habit::Least if !system.recomputes_operations => vec![Again::Nothing, Again::Everything],
                    Habit::Least => vec![Again::Nothing, Again::Operations, Again::Everything],
                }
            }
        };
        if decoder.routed > 0 && tensors.iter().any(|tensor| *tensor > 1) && !system.divides_experts {
            chosen.push(Choice::ExpertTensor);
        }
        Ok(Self { tensors, stages, contexts, microbatches, chunks, named, zero, agains, chosen })
    }
}

/// Every plan that a run may have been, and which of its choices are ours.
fn candidates(row: &Row, decoder: &Decoder, system: &System) -> Result<(Vec<Degrees>, Vec<Choice>), String> {
    let parallel = &row.parallel;
    let count = row.hardware.count.unwrap_or(1);
    let expert = parallel.ep.filter(|expert| *expert > 0).unwrap_or(1);
    let options = Options::new(row, decoder, system)?;
    // A step of a printed length is not of any batch.
    let usual = if row.measured.step_s.is_none() { system.batch_tokens } else { 0 };
    let mut plans = Vec::new();
    for (tensor, stages, context) in product(&options.tensors, &options.stages, &options.contexts) {
        let others = tensor * stages * context;
        let data = parallel.dp.unwrap_or(count / others);
        if data * others != count || !decoder.heads.is_multiple_of(tensor) || stages > decoder.layers {
            continue;
        }
        let expert_tensors = expert_tensors(decoder, system, tensor, (data * context * tensor / expert).max(1));
        let parts = product(&options.microbatches, &options.agains, &options.chunks);
        for (expert_tensor, (microbatch, again, chunks)) in
            expert_tensors.iter().flat_map(|ranks| parts.iter().map(|parts| (*ranks, *parts)))
        {
            // One microbatch, or as many as the software's own configuration has.
            let microbatches = (usual / (data * microbatch * decoder.seq)).max(1);
            let global_batch = parallel.global_batch.unwrap_or(data * microbatch * microbatches);
            // A published batch and its published parts are taken as they stand; our own parts must divide it.
            let is_ours = parallel.microbatch.is_none() || parallel.dp.is_none();
            let divides = global_batch.is_multiple_of(data * microbatch);
            let rounds = (global_batch / (data * microbatch).max(1)).is_multiple_of(stages);
            let is_cut = decoder.layers.is_multiple_of(stages * chunks) && rounds;
            let guessed = parallel.virtual_stages.is_none() && chunks > 1;
            if (!divides && is_ours) || (guessed && (stages == 1 || !is_cut)) {
                continue;
            }
            plans.push(Degrees {
                data,
                tensor,
                stages,
                context,
                expert,
                expert_tensor,
                zero: options.zero,
                again,
                microbatch,
                chunks: if stages > 1 { chunks } else { 1 },
                named: options.named,
                global_batch,
            });
        }
    }
    // Where the batch is the software's, plans that need a larger one are for runs whose degrees leave no other.
    if parallel.global_batch.is_none() && usual > 0 {
        let is_usual = |plan: &Degrees| plan.global_batch * decoder.seq <= usual;
        if plans.iter().any(is_usual) {
            plans.retain(is_usual);
        }
    }
    if plans.is_empty() {
        return Err(format!("no degrees divide its {count} devices, its batch and its {} heads", decoder.heads));
    }
    Ok((plans, options.chosen))
}

/// Into how many parts an expert may be cut: into as many as everything else or, where the software can,
/// into fewer; a stage has this many ranks left for them.
fn expert_tensors(decoder: &Decoder, system: &System, tensor: u64, left: u64) -> Vec<u64> {
    let most = (1..=tensor).rev().find(|parts| tensor.is_multiple_of(*parts) && *parts <= left).unwrap_or(1);
    if decoder.routed == 0 || system.divides_experts { vec![most] } else { powers(most) }
}

fn product<A: Copy, B: Copy, C: Copy>(a: &[A], b: &[B], c: &[C]) -> Vec<(A, B, C)> {
    let inner = |a: A| b.iter().flat_map(move |b| c.iter().map(move |c| (a, *b, *c)));
    a.iter().flat_map(|a| inner(*a).collect::<Vec<_>>()).collect()
}
