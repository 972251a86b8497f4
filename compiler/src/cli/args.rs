//! The command line: verbs, flags and their help.

use super::number;
use clap::{Args, Parser, Subcommand, ValueEnum};
use shardc::learning_rate::Decay;
use std::path::{Path, PathBuf};

/// Compiles a training step for many devices, and runs it.
#[derive(Debug, Parser)]
#[command(
    name = "shardc",
    version,
    propagate_version = true,
    subcommand_required = true,
    arg_required_else_help = true
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
    /// Print one JSON document to stdout instead of text.
    #[arg(long, global = true)]
    pub json: bool,
    /// Log more to stderr: -v passes and times, -vv everything.
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// List the built-in models, their parameters and where their sizes come from.
    Models,
    /// Choose how to spread a model's training step, and predict what it takes.
    Plan(PlanArgs),
    /// Show a plan file: layouts by module, collectives, the simulated step; or why one value lies as it does.
    Explain(ExplainArgs),
    /// Simulate the step of a plan: what every rank does when, also with slow ranks and shared links.
    Simulate(SimulateArgs),
    /// Show what two plans do differently.
    Diff(DiffArgs),
    /// Check a plan: statically, then on CPU ranks against one device, on a shrunken model.
    Verify(VerifyArgs),
    /// Train a model by the plan that is best, or by a plan file.
    Train(Box<TrainArgs>),
    /// Memory by precision and ZeRO stage, without a device; or whether and how a model trains in some memory.
    Estimate(EstimateArgs),
    /// Check what this machine has for running plans.
    Check(CheckArgs),
}

/// What is planned: the model, the devices, the batch.
#[derive(Debug, Args)]
pub struct RequestArgs {
    /// `cpu:N`, `cuda:N`, `h100:8x16` (per node x nodes) or a TOML file [default: cpu:1].
    #[arg(long, value_name = "CLUSTER")]
    pub cluster: Option<String>,
    /// Sequences per step over all ranks [default: the first multiple of the ranks from 8 on, or those of exact batches].
    #[arg(long, value_parser = number::count, allow_negative_numbers = true)]
    pub batch: Option<u64>,
    /// Tokens per sequence [default: 256, the model's positions if they are fewer, or those of exact batches].
    #[arg(long, value_parser = number::count, allow_negative_numbers = true)]
    pub seq: Option<u64>,
    /// Precision of the computation; weights and optimizer state are always kept in fp32 [default: fp32 on CPU ranks,
    /// else bf16 or fp16, whichever is faster on the device].
    #[arg(long, value_enum)]
    pub precision: Option<PrecisionArg>,
    /// The type in which gradients of matrices are summed over ranks.
    #[arg(long, value_enum, value_name = "DTYPE")]
    pub reduce_dtype: Option<ReduceArg>,
    /// Take kernels that give the same bits each time; the plan states what they cost.
    #[arg(long)]
    pub deterministic: bool,
    /// Bound on the memory of each rank: `24GiB`, `800MB`.
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub device_memory: Option<String>,
    /// Bound on the memory of each host, which CPU ranks share: `128GiB`.
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub host_memory: Option<String>,
    /// Fix choices, search the rest: `dp=2,tp=2,zero=1,microbatch=1,recompute=selective,loss_chunks=4,overlap_chunks=2`.
    #[arg(long, value_name = "CHOICES")]
    pub pin: Option<String>,
    /// Which plans to consider: those of one stage that the cluster's runtime executes (and what a pin asks for), or all.
    #[arg(long, value_enum, default_value_t = SearchArg::Runnable)]
    pub search: SearchArg,
    /// Write the graph after every pass as DIR/NN.name.ir, at last a program of each kind of rank.
    #[arg(long, value_name = "DIR")]
    pub dump_to: Option<PathBuf>,
}

/// The plans that are considered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SearchArg {
    /// What can be executed; pipelines on GPUs of several nodes, where ranks do not divide the batch, or where nothing else
    /// fits.
    Runnable,
    /// Pipelines everywhere, and what no runtime here executes yet; `train` refuses the latter.
    All,
}

/// The precisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PrecisionArg {
    /// IEEE binary32 throughout.
    Fp32,
    /// bfloat16, with fp32 master weights.
    Bf16,
    /// bfloat16, with linear layers in 8-bit floats (e4m3; gradients e5m2) under current scaling.
    Fp8,
    /// IEEE binary16, with fp32 master weights and a loss scale that adapts.
    Fp16,
}

/// The types in which gradients are summed over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ReduceArg {
    /// As they are kept; the default.
    Fp32,
    /// Each rank's term is rounded to bfloat16: half of the bytes on the wire, sums over microbatches stay in fp32.
    Bf16,
}

/// `shardc plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// A built-in name (see `shardc models`) or a Hugging Face directory.
    pub model: String,
    #[command(flatten)]
    pub request: RequestArgs,
    /// Write the plan file.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Find the largest number of layers, batch (in one microbatch) or sequence that fits.
    #[arg(long, value_enum, value_name = "SIZE")]
    pub maximize: Option<MaximizeArg>,
}

/// What can be made as large as fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MaximizeArg {
    /// The model's layers.
    Layers,
    /// The sequences of a step.
    Batch,
    /// The tokens of a sequence.
    Seq,
}

/// `shardc explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// The plan file.
    #[arg(required_unless_present = "schema")]
    pub plan: Option<PathBuf>,
    /// A value (`%12`), a parameter's name or a part of a module path.
    pub value: Option<String>,
    /// Print the JSON schema that every plan file keeps to.
    #[arg(long, conflicts_with_all = ["plan", "html", "timeline", "dot", "text"])]
    pub schema: bool,
    #[command(flatten)]
    pub files: ReportArgs,
}

/// The files that a report is written to, instead of text to stdout.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Write a report: one page that needs no network, with the graph, the timeline, memory and alternatives.
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Write the predicted step as a timeline for Perfetto (ui.perfetto.dev) or chrome://tracing.
    #[arg(long, value_name = "FILE")]
    pub timeline: Option<PathBuf>,
    /// Write the modules and what they hand on as a graph for Graphviz.
    #[arg(long, value_name = "FILE")]
    pub dot: Option<PathBuf>,
    /// Write the plan as a text whose layouts can be edited; every verb reads it back.
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
}

impl ReportArgs {
    /// The flags that are given, with their files.
    pub fn given(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        let all =
            [("--html", &self.html), ("--timeline", &self.timeline), ("--dot", &self.dot), ("--text", &self.text)];
        all.into_iter().filter_map(|(flag, path)| Some((flag, path.as_deref()?)))
    }
}

/// `shardc diff`.
#[derive(Debug, Args)]
pub struct DiffArgs {
    /// The first plan.
    pub first: PathBuf,
    /// The second plan.
    pub second: PathBuf,
}

/// `shardc simulate`.
#[derive(Debug, Args)]
pub struct SimulateArgs {
    /// The plan file.
    pub plan: PathBuf,
    /// A slow rank, and how many times as long as planned its kernels take; may be given again.
    #[arg(long, value_name = "RANK=FACTOR")]
    pub straggler: Vec<String>,
    /// How many times more than they carry a node's devices may ask of its links to other nodes.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = number::real, allow_negative_numbers = true)]
    pub contention: f64,
    /// The cluster to simulate on, if not the plan's own.
    #[arg(long, value_name = "CLUSTER")]
    pub cluster: Option<String>,
    /// Write a timeline for Perfetto (ui.perfetto.dev) or chrome://tracing.
    #[arg(long, value_name = "FILE")]
    pub timeline: Option<PathBuf>,
}

/// `shardc verify`.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// The plan file.
    pub plan: PathBuf,
    /// Only the static checks.
    #[arg(long)]
    pub static_only: bool,
}

/// `shardc train`.
#[derive(Debug, Args)]
pub struct TrainArgs {
    /// A built-in name, a Hugging Face directory or a plan file.
    pub model: String,
    #[command(flatten)]
    pub request: RequestArgs,
    /// A text file, a token file (.bin, or .bin/.idx of Megatron-LM) or exact batches (.safetensors).
    #[arg(long, value_name = "PATH")]
    pub data: PathBuf,
    /// A tokenizer.json for a text file; without one, tokens are bytes.
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
    /// Steps to train.
    #[arg(long, value_parser = number::count, allow_negative_numbers = true)]
    pub steps: u64,
    /// Seed of the initial weights and of the order of the samples.
    #[arg(long, default_value_t = 0, value_parser = number::whole, allow_negative_numbers = true)]
    pub seed: u64,
    #[command(flatten)]
    pub optimizer: OptimizerArgs,
    /// Write one line of JSON per step.
    #[arg(long, value_name = "FILE")]
    pub metrics: Option<PathBuf>,
    /// Measure every instruction of the last step, and write them as a timeline that Perfetto opens.
    #[arg(long, value_name = "FILE")]
    pub timeline: Option<PathBuf>,
    /// Measure every instruction of the last step, and print where its time went.
    #[arg(long)]
    pub profile: bool,
    /// Write the trained model as a Hugging Face directory; of a family that has no such form, its weights alone.
    #[arg(long, value_name = "DIR")]
    pub save: Option<PathBuf>,
}

/// The optimizer and the learning rate.
#[derive(Debug, Args)]
pub struct OptimizerArgs {
    /// The update rule.
    #[arg(long, value_enum, default_value_t = OptimizerArg::Adamw)]
    pub optimizer: OptimizerArg,
    /// The highest learning rate.
    #[arg(long, default_value_t = 1e-3, value_parser = number::real, allow_negative_numbers = true)]
    pub lr: f64,
    /// The learning rate at the end of a cosine or linear schedule.
    #[arg(long, default_value_t = 0.0, value_parser = number::real, allow_negative_numbers = true)]
    pub min_lr: f64,
    /// Steps of linear warm-up.
    #[arg(long, default_value_t = 0, value_parser = number::whole, allow_negative_numbers = true)]
    pub warmup: u64,
    /// How the rate falls after the warm-up.
    #[arg(long, value_enum, default_value_t = Decay::Constant)]
    pub schedule: Decay,
    /// Decay rates of the moments.
    #[arg(long, value_parser = number::pair, default_value = "0.9,0.95", value_name = "B1,B2", allow_negative_numbers = true)]
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    #[arg(long, default_value_t = 1e-8, value_parser = number::real, allow_negative_numbers = true)]
    pub eps: f64,
    /// Decoupled weight decay, of every parameter.
    #[arg(long, default_value_t = 0.1, value_parser = number::real, allow_negative_numbers = true)]
    pub weight_decay: f64,
    /// Largest global norm of the gradients; 0 does not clip.
    #[arg(long, default_value_t = 1.0, value_parser = number::real, allow_negative_numbers = true)]
    pub clip_grad_norm: f64,
}

/// The update rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OptimizerArg {
    /// Adam with decoupled weight decay.
    Adamw,
}

/// `shardc estimate`.
#[derive(Debug, Args)]
pub struct EstimateArgs {
    /// A built-in name or a Hugging Face directory.
    pub model: String,
    /// Data-parallel ranks over which ZeRO shards.
    #[arg(long, default_value_t = 8, value_parser = number::ranks, allow_negative_numbers = true)]
    pub ranks: u64,
    /// Memory of a device: says what fits in it, and what is left for activations.
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub device_memory: Option<String>,
    /// Memory of a host: says what fits if all ranks are CPU ranks of one host; with --device-memory, also
    /// what fits if the devices of one host leave optimizer state and parameters in its memory.
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub host_memory: Option<String>,
}

/// `shardc check`.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// What must be there: `cpu:N` or `cuda:N`.
    #[arg(long, value_name = "CLUSTER", default_value = "cpu:1")]
    pub cluster: String,
}
