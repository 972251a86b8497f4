//! From flags to what the library takes.

use super::args::{OptimizerArgs, PrecisionArg, ReduceArg, RequestArgs, SearchArg};
use shardc::explain::edit;
use shardc::learning_rate::Decay;
use shardc::{Batch, Cluster, Error, LearningRate, NamedModel, OptimizerConfig, OptimizerKind, Options, Precision};
use shardc_ir::plan::Scope;
use shardc_ir::text::PlanFileError;
use shardc_ir::verify::VerifiedPlan;
use shardc_ir::{Bytes, DType, Plan};
use shardc_passes::cluster::DeviceKind;
use std::io::Read;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// The fewest sequences per step where neither a flag nor the data says.
const DEFAULT_BATCH: u64 = 8;
/// Tokens per sequence where neither a flag nor the data says.
const DEFAULT_SEQ: u64 = 256;

/// No plan file is longer.
const MOST_PLAN: Bytes = Bytes(1 << 30);

/// The cluster of a flag. `cuda:N` takes the profile of this host's GPUs, where it is known.
pub fn cluster(text: Option<&str>) -> Result<Cluster, Error> {
    let text = text.unwrap_or("cpu:1");
    let profile = match text.starts_with("cuda") {
        true => cuda_profile(),
        false => "h200",
    };
    Ok(told(Cluster::parse(text, profile)?))
}

/// The cluster that a plan was made for.
pub fn cluster_of(plan: &Plan) -> Result<Cluster, Error> {
    Ok(told(Cluster::of(plan)?))
}

/// Says how a cluster of several kinds of nodes is planned.
fn told(cluster: Cluster) -> Cluster {
    if let Some(mixture) = cluster.mixture() {
        tracing::warn!("{} has {mixture}", cluster.name);
    }
    cluster
}

/// Whether a plan for this machine's own devices is for those that it has.
///
/// # Errors
/// CPU ranks that need more memory than the host has. Of other GPUs than the plan's, which may do, that is said.
pub fn check_here(plan: &Plan) -> Result<(), Error> {
    let planned = Cluster::of(plan)?;
    match planned.name.split(':').next() {
        Some("cpu") => {
            let (needed, here) = (plan.prediction.memory.total(), Cluster::parse(&planned.name, "h200")?);
            match here.share_of_host().filter(|share| needed > *share) {
                None => Ok(()),
                Some(share) => Err(Error::request(
                    format!("the plan needs {needed} per rank, and each rank's share of this host's memory is {share}"),
                    "plan again on this host",
                )),
            }
        }
        Some("cuda") => {
            let device = &planned.device.name;
            if let Some((name, _)) = own_gpu().filter(|(_, profile)| profile.is_some_and(|own| own != device)) {
                tracing::warn!("the plan is for {device}, and this host has {name}: what it predicts is of {device}");
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// The shipped profile that is nearest to this host's first GPU.
fn cuda_profile() -> &'static str {
    let Some((name, profile)) = own_gpu() else {
        tracing::warn!("this host shows no GPU: cuda:N is planned as GPUs of an h200, and h200:N says so itself");
        return "h200";
    };
    profile.unwrap_or_else(|| {
        tracing::warn!(
            "{name} has no profile: it is planned as an h200; --device-memory says how much memory there is, a cluster \
             file that names the nearest device and replaces its figures says the rest"
        );
        "h200"
    })
}

/// The name of this host's first GPU, in capitals, and its profile, if it has one.
fn own_gpu() -> Option<(String, Option<&'static str>)> {
    let name = shardc_runtime::probe::gpus().unwrap_or_default().first()?.name.to_uppercase();
    let profile = profile_of(&name);
    Some((name, profile))
}

/// The profile of a GPU of this name, in capitals.
fn profile_of(name: &str) -> Option<&'static str> {
    // What is part of another name stands behind it.
    let known = [
        ("GH200", "gh200"),
        ("H200", "h200"),
        ("H100 PCIE", "h100-pcie"),
        ("H100", "h100"),
        ("H800", "h800"),
        ("B200", "b200"),
        ("A100-SXM4-40", "a100-40"),
        ("A100-PCIE-40", "a100-40"),
        ("A100 80GB PCIE", "a100-pcie"),
        ("A100", "a100-80"),
        ("A800", "a800"),
        ("L40S", "l40s"),
        ("4090", "rtx4090"),
        ("3090", "rtx3090"),
        ("V100", "v100"),
    ];
    known.iter().find(|(part, _)| name.contains(part)).map(|(_, profile)| *profile)
}

/// Sequences per step where neither a flag nor the data says: as many for each device.
fn default_batch(cluster: &Cluster) -> u64 {
    DEFAULT_BATCH.next_multiple_of(cluster.ranks().max(1))
}

/// How large batches are, of samples or of sequences of tokens.
pub fn shape(batch: u64, seq: u64) -> String {
    if seq == 0 { batch.to_string() } else { format!("{batch} x {seq}") }
}

/// The batch: what the data fixes, else the flags, else a default.
///
/// # Errors
/// A flag that contradicts the data.
pub fn batch(
    args: &RequestArgs,
    fixed: Option<(u64, u64)>,
    model: &NamedModel,
    cluster: &Cluster,
) -> Result<Batch, Error> {
    if let Some((batch, seq)) = fixed {
        for (flag, asked, is) in [("--batch", args.batch, batch), ("--seq", args.seq, seq)] {
            if let Some(asked) = asked.filter(|asked| *asked != is) {
                let message = format!("{flag} {asked} contradicts the data, whose batches are {}", shape(batch, seq));
                return Err(Error::request(message, format!("leave {flag} out")));
            }
        }
        return Ok(Batch { batch, seq });
    }
    let batch = args.batch.unwrap_or_else(|| default_batch(cluster));
    if model.vocabulary().is_none() {
        if let Some(seq) = args.seq {
            let message = format!("--seq {seq}: {} takes no sequences", model.name);
            return Err(Error::request(message, "leave --seq out"));
        }
        return Ok(Batch { batch, seq: 0 });
    }
    let rotary = model.config.rotary_positions();
    let made_for = model.positions().or(rotary).unwrap_or(u64::MAX);
    let seq = args.seq.unwrap_or(DEFAULT_SEQ.min(made_for));
    if let Some(known) = rotary.filter(|known| *known < seq) {
        tracing::warn!(
            "sequences of {seq} tokens are longer than the {known} positions that {} was made for",
            model.name
        );
    }
    Ok(Batch { batch, seq })
}

/// The bound on the memory of each rank, if a flag says one. Of more than the device has, plans are made that do not
/// fit it, which is said.
fn device_memory(args: &RequestArgs, cluster: &Cluster) -> Result<Option<Bytes>, Error> {
    let asked = args.device_memory.as_deref().map(|text| size("--device-memory", text)).transpose()?;
    let (usable, device) = (cluster.usable_memory(), &cluster.device);
    if let Some(asked) = asked.filter(|asked| *asked > usable && device.kind != DeviceKind::Cpu) {
        let has = Bytes(device.memory_bytes.value as u64);
        tracing::warn!(
            "--device-memory {asked} is more than there is: {} has {has}, of which plans may take {usable}",
            device.name
        );
    }
    Ok(asked)
}

/// The options of a compilation for a cluster.
pub fn options(args: &RequestArgs, cluster: &Cluster) -> Result<Options, Error> {
    let precision = args.precision.map(|precision| match precision {
        PrecisionArg::Fp32 => Precision::Fp32,
        PrecisionArg::Bf16 => Precision::Bf16,
        PrecisionArg::Fp16 => Precision::Fp16,
        PrecisionArg::Fp8 => Precision::Fp8,
    });
    Ok(Options {
        precision,
        reduce_dtype: match args.reduce_dtype {
            Some(ReduceArg::Bf16) => Some(DType::Bf16),
            Some(ReduceArg::Fp32) | None => None,
        },
        optimizer: OptimizerConfig::default(),
        pins: args.pin.clone().unwrap_or_default(),
        scope: match args.search {
            SearchArg::Runnable => Scope::Runnable,
            SearchArg::All => Scope::All,
        },
        deterministic: args.deterministic,
        device_memory: device_memory(args, cluster)?,
        host_memory: args.host_memory.as_deref().map(|text| size("--host-memory", text)).transpose()?,
        dump_to: args.dump_to.clone(),
    })
}

/// The optimizer.
pub fn optimizer(args: &OptimizerArgs) -> Result<OptimizerConfig, Error> {
    let [beta1, beta2] = args.betas;
    let kind = OptimizerKind::AdamW { beta1, beta2, eps: args.eps, weight_decay: args.weight_decay };
    Ok(OptimizerConfig { kind, clip_grad_norm: (args.clip_grad_norm != 0.0).then_some(args.clip_grad_norm) })
}

/// The learning rate of every step.
pub fn learning_rate(args: &OptimizerArgs, steps: u64) -> Result<LearningRate, Error> {
    for (flag, rate) in [("--lr", args.lr), ("--min-lr", args.min_lr)] {
        if !(rate.is_finite() && rate >= 0.0) {
            return Err(Error::request(format!("{flag} is {rate}; it must be a number that is at least 0"), ""));
        }
        if rate > 0.0 && rate as f32 == 0.0 {
            let message = format!("{flag} is {rate:e}, which is 0 in fp32, in which weights are updated");
            return Err(Error::request(message, "give a larger one, such as 3e-4, or 0"));
        }
        if !(rate as f32).is_finite() {
            let message =
                format!("{flag} is {rate:e}, more than the largest number of fp32, in which weights are updated");
            return Err(Error::request(message, "give a smaller one, such as 3e-4"));
        }
    }
    if args.min_lr > 0.0 && args.schedule == Decay::Constant {
        let message = format!("--min-lr {} has no effect: a constant rate stays at --lr", args.min_lr);
        return Err(Error::request(message, "give --schedule cosine or linear too, or leave --min-lr out"));
    }
    if args.min_lr > args.lr {
        let message = format!("--min-lr {} is above --lr {}", args.min_lr, args.lr);
        return Err(Error::request(message, "the rate falls from --lr to --min-lr"));
    }
    let (rate, min_rate, warmup, decay) = (args.lr, args.min_lr, args.warmup, args.schedule);
    if warmup > steps {
        let reached = rate * steps as f64 / warmup as f64;
        tracing::warn!(
            "--warmup {warmup} is longer than --steps {steps}: the rate rises to {reached:e}, not to --lr {rate:e}"
        );
    }
    if decay != Decay::Constant && steps > 1 && (steps - 1..=steps).contains(&warmup) {
        tracing::warn!("--warmup {warmup} leaves no step of --steps {steps} in which the rate falls");
    }
    Ok(LearningRate { rate, min_rate, warmup, decay, steps })
}

/// Reads a plan file, or a plan as text that may have been edited, and verifies it.
pub fn plan_file(path: &Path) -> Result<VerifiedPlan<'static>, Error> {
    let bytes = plan_bytes(path)?;
    let wrong = |source| Error::PlanFile { path: path.to_path_buf(), source };
    let text =
        String::from_utf8(bytes).map_err(|_| wrong(PlanFileError::NotJson { message: "it is not UTF-8".into() }))?;
    if edit::is_text(&text) {
        return edit::from_text(path, &text);
    }
    let plan = Plan::from_json(&text).map_err(wrong)?;
    let illegal = |found| Error::Check(format!("{}: the plan is not legal:\n{found}", path.display()));
    shardc_ir::verify::plan(plan).map_err(illegal)
}

/// The bytes of a plan, from a file or through a pipe. What never ends is not read.
fn plan_bytes(path: &Path) -> Result<Vec<u8>, Error> {
    let io = |source| Error::Io { path: path.to_path_buf(), source };
    let refused = |what: &str| {
        let message = format!("{}: {what}; a plan is a file, or comes through a pipe", path.display());
        Err(Error::request(message, "name the file that `shardc plan -o FILE` wrote"))
    };
    let kind = std::fs::metadata(path).map_err(io)?.file_type();
    if kind.is_dir() {
        return refused("it is a directory");
    }
    if kind.is_char_device() || kind.is_block_device() {
        return refused("it is a device");
    }
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(io)?;
    file.take(MOST_PLAN.0 + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > MOST_PLAN.0 {
        return refused(&format!("it holds more than {MOST_PLAN}, which no plan does"));
    }
    Ok(bytes)
}

/// A size in bytes: `24GiB`, `800MB`, `1000000`.
pub fn size(flag: &str, text: &str) -> Result<Bytes, Error> {
    let refused = |why: &str| {
        let fix = "write 24GiB, 800MB or a number of bytes; KiB, MiB, GiB and TiB are units, and KB, MB, GB and TB";
        Error::request(format!("{flag} {text}: {why}"), fix)
    };
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: f64 = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        "kib" | "k" => 1024.0,
        "mib" | "m" => 1048576.0,
        "gib" | "g" => 1073741824.0,
        "tib" | "t" => 1099511627776.0,
        unit => return Err(refused(&format!("`{unit}` is no unit of sizes"))),
    };
    let number: f64 = digits.trim().parse().map_err(|_| refused("not a size"))?;
    let bytes = number * unit;
    if (1.0..1048576.0).contains(&bytes) && digits.len() == text.len() {
        let small = format!("{flag} {text}: without a unit it counts bytes, and nothing trains in so few");
        return Err(Error::request(small, format!("write {text}GiB, or {text}B if that is meant")));
    }
    match bytes {
        bytes if bytes >= 1e18 => Err(refused("no memory is as large")),
        bytes if bytes >= 1.0 => Ok(Bytes(bytes as u64)),
        bytes if bytes >= 0.0 => Err(refused("nothing fits into no memory")),
        _ => Err(refused("not a size")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_suit_the_ranks() {
        let of = |name: &str| default_batch(&Cluster::parse(name, "h200").unwrap());
        assert_eq!(["cpu:1", "cpu:4", "cpu:3", "h100:8x2048"].map(of), [8, 8, 9, 16384]);
    }

    #[test]
    fn names_of_gpus() {
        let check = |name: &str, profile| assert_eq!(profile_of(&name.to_uppercase()), profile, "{name}");
        check("NVIDIA H200", Some("h200"));
        check("NVIDIA GH200 480GB", Some("gh200"));
        check("NVIDIA H100 PCIe", Some("h100-pcie"));
        check("NVIDIA H100 80GB HBM3", Some("h100"));
        check("NVIDIA A100 80GB PCIe", Some("a100-pcie"));
        check("NVIDIA A100-SXM4-40GB", Some("a100-40"));
        check("NVIDIA A800-SXM4-80GB", Some("a800"));
        check("Tesla T4", None);
    }

    #[test]
    fn sizes() {
        let check =
            |text: &str, expect: Option<u64>| assert_eq!(size("--x", text).ok().map(|size| size.0), expect, "{text}");
        check("24GiB", Some(24 << 30));
        check("1.5 KB", Some(1500));
        check("77B", Some(77));
        check("77", None);
        check("77000000", Some(77_000_000));
        check("-1GB", None);
        check("GB", None);
        check("1QB", None);
    }
}
