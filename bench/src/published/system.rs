//! Which device, links and software a published run used, from the words of its source.
//!
//! This is the only place that looks at names of devices and software. It chooses among figures; the few of its
//! own say where they come from.

use super::decoder;
use super::rows::Row;
use serde::Deserialize;
use shardc_passes::cluster::{Cluster, Figure, Profile};
use shardc_passes::cost::Library;
use std::collections::BTreeMap;

/// How a system recomputes where the source does not say; the planner's choice if there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Habit {
    /// The least that fits.
    Least,
    /// Every layer.
    Full,
}

/// The software of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct System {
    /// Its generation.
    pub library: Library,
    /// ZeRO stage where the source does not say.
    pub zero: u64,
    /// Recomputation where the source does not say.
    pub habit: Habit,
    /// Tokens of a batch where the source does not say; 0 where the software has none of its own.
    pub batch_tokens: u64,
    /// Whether the inputs of 8-bit products are kept in 8 bits for the backward pass.
    pub keeps_f8: bool,
    /// Bytes of weights, gradients, and master weights with the optimizer's state, per parameter.
    pub stored: [f64; 3],
    /// Bytes that live per logit at the peak of the loss: 16-bit logits, f32 ones or their logarithmic
    /// softmax, and gradients of both where nothing fuses them.
    pub logit_stored: f64,
    /// The same where the loss is divided over tensor ranks, so that each of its steps is a kernel of its own.
    pub logit_stored_divided: f64,
    /// Whether a gate and its activation are one kernel, which keeps the gate's operands alone.
    pub fuses_gates: bool,
    /// Whether compilation makes elementwise results again in the backward pass.
    pub is_compiled: bool,
    /// Whether tensor ranks keep the gathered sequence for the gradient of the weight.
    pub keeps_gathered: bool,
    /// Bytes per element of a microbatch's whole stream of the buffers in which collectives run under the products
    /// of tensor ranks in one node: where products run in 16 bits, and in 8.
    pub overlap_buffers: [f64; 2],
    /// Whether single operations can be computed again, not only whole layers.
    pub recomputes_operations: bool,
    /// Whether the ranks of a sequence gather all of its keys and values, a copy for every query head.
    pub gathers_keys: bool,
    /// Whether an expert is always cut into as many parts as everything else is for the tensor ranks.
    pub divides_experts: bool,
    /// Whether a pipeline stage allocates what it receives and sends for all microbatches at once.
    pub buffers_microbatches: bool,
    /// What the allocator holds beyond what is in use, as a share of it: sizes that change from kernel to kernel
    /// leave holes. Sources print what is held.
    pub slack: f64,
    /// Whether stages can have several chunks.
    pub interleaves: bool,
}

/// What must hold besides a word of the source.
#[derive(Clone, Copy)]
enum When {
    /// Nothing.
    Always,
    /// The source names this release (year and month) or a later one.
    Since([u32; 2]),
    /// The model has experts.
    WithExperts,
    /// The device's name has this word: it dates a source that names no release.
    On(&'static str),
}

use When::{Always, On, Since, WithExperts};

/// The generation of each software, by the name and release that the source gives: the first that is found, so
/// the newest release stands first. How rows are put into sets says nothing about software and is not asked.
const GENERATIONS: [(&str, When, &Library); 26] = [
    ("vtrain", Always, &Library::MEGATRON_DEEPSPEED),
    ("maxtext", Always, &Library::XLA),
    // NVIDIA's benchmark recipes: those for experts changed with release 25.05.
    ("dgxc-benchmarking", Since([25, 5]), &Library::MEGATRON_CORE),
    ("dgxc-benchmarking", WithExperts, &Library::MEGATRON_CORE_SERIAL),
    ("dgxc-benchmarking", Always, &Library::MEGATRON_CORE),
    ("megatron-bridge", Always, &Library::MEGATRON_CORE),
    ("megatron-core", Always, &Library::MEGATRON_CORE),
    ("nemo", Since([25, 1]), &Library::MEGATRON_CORE),
    ("nemo", Always, &Library::MEGATRON_CORE_2024),
    ("megascale", Always, &Library::MEGATRON_2022),
    ("korthikanti", Always, &Library::MEGATRON_2022),
    ("alpa", Always, &Library::MEGATRON_2020),
    ("aceso", Always, &Library::MEGATRON_2020),
    ("amp@", Always, &Library::MEGATRON_2020),
    ("mt-nlg", Always, &Library::MEGATRON_2021),
    ("foundry", Always, &Library::FSDP_2023),
    ("titan", Always, &Library::FSDP2_COMPILED),
    ("autoparallel", Always, &Library::FSDP2_COMPILED),
    ("nanotron", Always, &Library::FSDP2),
    ("deepspeed", Always, &Library::FSDP2),
    // Megatron-LM has no releases; its documents say when, or the devices do.
    ("images/tables.tex", Always, &Library::MEGATRON_2020),
    ("jan-2021", Always, &Library::MEGATRON_2020),
    ("sc21", Always, &Library::MEGATRON_2021),
    ("megatron", On("v100"), &Library::MEGATRON_2020),
    ("megatron", On("a100"), &Library::MEGATRON_2021),
    ("megatron", Always, &Library::MEGATRON_CORE),
];

/// The release that a source names, as year and month: `v25.02.02`, `NeMo 24.07`.
fn release(source: &str) -> Option<[u32; 2]> {
    let figures: Vec<&str> = source.split(|letter: char| !letter.is_ascii_digit() && letter != '.').collect();
    figures.into_iter().find_map(|figure| {
        let mut parts = figure.split('.').map(|part| part.parse().ok().filter(|_| part.len() == 2));
        Some([parts.next()??, parts.next()??])
    })
}

/// The generation of a run's software; an eager PyTorch where the source names none that is known.
fn generation(row: &Row, source: &str) -> Library {
    let (release, device) = (release(source), row.hardware.gpu.to_lowercase());
    let holds = |when: When| match when {
        Always => true,
        Since(least) => release.is_some_and(|release| release >= least),
        WithExperts => decoder::has_experts(row),
        On(word) => device.contains(word),
    };
    let found = GENERATIONS.iter().find(|(word, when, _)| source.contains(word) && holds(*when));
    found.map_or(Library::FSDP2, |(_, _, library)| **library)
}

/// What an eager allocator holds beyond what is in use, as a share of it. Fitted to the two eager runs whose
/// memory is printed (torchtitan, December 2024: Llama 3 8B on 8 and on 128 H100s), which are predicted 7.4% and 7.1%
/// too low without it.
const EAGER_HOLES: f64 = 0.07;

/// Transformer Engine has ten buffers of a whole stream for tensor ranks that overlap, one per product and pass;
/// with products in 8 bits, the six of gathers are in 8 bits (`initialize_ub` of its version 1.5).
const OVERLAP_BUFFERS: [f64; 2] = [20.0, 14.0];

/// Tokens of a batch in NeMo's configurations of early 2024: 2,048 sequences of 4,096
/// (`launcher_scripts/conf/training/llama/llama2_7b.yaml` of its launcher).
const NEMO_BATCH: u64 = 2048 * 4096;

/// The software of a run.
pub fn system(row: &Row) -> System {
    let words = row.source.to_lowercase();
    let notes = row.notes.to_lowercase();
    let mut library = generation(row, &words);
    if words.contains("titan") && !notes.contains("compile") && !notes.contains("tp") {
        library = Library { tensor_async: Library::FSDP2_COMPILED.tensor_async, ..Library::FSDP2 };
    }
    if ["async t", "tp async"].iter().any(|word| notes.contains(word)) {
        library.tensor_exposed *= library.tensor_async;
    }
    if notes.contains("rowwise") || row.precision.to_lowercase().contains("rowwise") {
        library.f8_cast_bytes *= Library::ROWWISE_CASTS;
    }
    let is = |names: &[&str]| names.contains(&library.name);
    let is_core = library.name.starts_with("Megatron-Core");
    let is_early = is(&[Library::MEGATRON_DEEPSPEED.name, Library::MEGATRON_2020.name, Library::MEGATRON_2021.name]);
    let is_megatron = library.name.starts_with("Megatron");
    let is_compiled = is(&[Library::FSDP2_COMPILED.name, Library::XLA.name]);
    let is_2024 = is(&[Library::MEGATRON_CORE_2024.name]);
    // NVIDIA's recipes came to NeMo 2 with release 25.04.
    let is_nemo_1 = is_2024 || release(&words).is_some_and(|release| release < [25, 4]);
    // Alpa divides the optimizer's state over the data ranks (Zheng et al., 2022, section 4.2).
    let is_alpa = words.contains("alpa");
    let (stored, zero) = match library.name {
        _ if is_alpa => ([2.0, 2.0, 12.0], 1),
        // NeMo 1's optimizer keeps the 16 bits of a master weight that its bf16 copy lacks
        // (`store_param_remainders` in its `megatron_base_model.py`).
        _ if is_core && is_nemo_1 => ([2.0, 2.0, 10.0], 1),
        _ if is_core => ([2.0, 2.0, 12.0], 1),
        _ if is_megatron => ([2.0, 4.0, 12.0], 0),
        _ if words.contains("nnscaler") => ([4.0, 4.0, 8.0], 0),
        _ => ([4.0, 4.0, 8.0], 3),
    };
    // The loss itself is one kernel, too, from 2025 on.
    let is_fused = (is_core && !is_2024) || (is_compiled && words.contains("2025"));
    let is_fsdp2 = is(&[Library::FSDP2.name, Library::FSDP2_COMPILED.name]);
    let logit_stored = match library.name {
        _ if is_fused || words.contains("autoparallel") || is(&[Library::MEGATRON_DEEPSPEED.name]) => 6.0,
        _ if is_fsdp2 => 14.0,
        _ => 10.0,
    };
    System {
        library,
        zero,
        habit: if is_early { Habit::Full } else { Habit::Least },
        batch_tokens: if is_2024 { NEMO_BATCH } else { 0 },
        keeps_f8: is_core,
        stored,
        logit_stored,
        logit_stored_divided: if logit_stored > 10.0 { logit_stored + 10.0 } else { logit_stored },
        // NeMo's configurations of Llama 2 of early 2024 say `bias_activation_fusion: false`.
        fuses_gates: library.traffic_forward <= 1.0 && !is_2024,
        is_compiled,
        keeps_gathered: !is_megatron && !is_compiled,
        overlap_buffers: if is(&[Library::MEGATRON_CORE.name]) || is_2024 { OVERLAP_BUFFERS } else { [0.0; 2] },
        recomputes_operations: !is_megatron || is(&[Library::MEGATRON_CORE.name, Library::MEGATRON_CORE_SERIAL.name]),
        // `context_parallel` of PyTorch gathers by default; torchtitan's models repeat the key heads before it.
        gathers_keys: is_fsdp2,
        divides_experts: is_2024 || is(&[Library::MEGATRON_CORE_SERIAL.name]),
        buffers_microbatches: is_fsdp2,
        slack: if is(&[Library::FSDP2.name]) { EAGER_HOLES } else { 0.0 },
        interleaves: !is(&[Library::MEGATRON_2020.name]),
    }
}

/// What published software reaches on devices whose profiles say what this runtime was measured to reach.
const REACHED: &str = include_str!("devices.json");

/// The figures that replace those of the profiles of some devices.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Reached {
    devices: Vec<String>,
    figures: BTreeMap<String, Figure>,
}

/// Replaces the figures of `devices.json`.
fn reached_by_others(name: &str, device: &mut Profile) -> Result<(), String> {
    let all: Vec<Reached> = serde_json::from_str(REACHED).map_err(|error| format!("devices.json: {error}"))?;
    for Reached { devices, figures } in all {
        if devices.iter().any(|listed| listed == name) {
            for (figure, value) in figures {
                let (_, at) =
                    device.figure_mut(&figure).ok_or_else(|| format!("devices.json: no figure `{figure}`"))?;
                *at = value;
            }
        }
    }
    Ok(())
}

/// The devices of a run.
///
/// # Errors
/// Says what is missing: the device has no profile, or there is no count.
pub fn cluster(row: &Row) -> Result<Cluster, String> {
    let words = row.hardware.gpu.to_lowercase().replace(['_', ' '], "-");
    let mut device_words = words.split('(').next().unwrap_or_default();
    // The maker's name and those of its servers say nothing about the device.
    for brand in ["nvidia-", "tesla-", "dgx-", "hgx-"] {
        device_words = device_words.trim_start_matches(brand);
    }
    let name = match device_words {
        word if word.contains('/') => None,
        word if word.starts_with("a100") && word.contains("40gb") => Some("a100-40"),
        word if word.starts_with("a100") && word.contains("pcie") => Some("a100-pcie"),
        word if word.starts_with("h100") && word.contains("pcie") => Some("h100-pcie"),
        word if word.starts_with("a800") => Some("a800"),
        word if word.starts_with("h800") => Some("h800"),
        word if word.starts_with("gh200") => Some("gh200"),
        word if word.starts_with("a100") => Some("a100-80"),
        word if word.starts_with("h100") && word.contains("500w") => Some("h100-500w"),
        word if word.starts_with("h100") => Some("h100"),
        word if word.starts_with("h200") => Some("h200"),
        word if word.starts_with("b200") => Some("b200"),
        word if word.starts_with("v100") => Some("v100"),
        word if word.starts_with("l40s") => Some("l40s"),
        word if word.contains("3090") => Some("rtx3090"),
        word if word.contains("4090") => Some("rtx4090"),
        _ => None,
    };
    let name = name.ok_or_else(|| format!("no profile of device `{}`", row.hardware.gpu))?;
    let mut device = Profile::find(name).map_err(|error| error.to_string())?;
    reached_by_others(name, &mut device)?;
    let count = row.hardware.count.filter(|count| *count > 0).ok_or("the number of devices is not known")?;
    let per_node = row.hardware.gpus_per_node.unwrap_or(8).max(1).min(count);
    if words.contains("16gb") {
        device.memory_bytes = Figure { value: 16e9, source: row.source.clone() };
    }
    if words.contains("v100") && words.contains("32gb") {
        device.memory_bytes = Figure { value: 32e9, source: row.source.clone() };
    }
    let links = format!("{} {}", row.hardware.interconnect.as_deref().unwrap_or_default(), row.notes);
    if let Some(gigabits) = gigabits_per_node(&links) {
        let per_node = row.hardware.gpus_per_node.unwrap_or(8).max(1) as f64;
        let value = PORT_EFFICIENCY * gigabits * 1e9 / 8.0 / per_node;
        device.node_bandwidth = Figure { value, source: row.source.clone() };
    }
    Ok(Cluster::new(row.hardware.gpu.clone(), per_node, count.div_ceil(per_node), device))
}

/// The share of a port that a collective reaches, as in the profiles.
const PORT_EFFICIENCY: f64 = 0.9;

/// Reads `800 Gb/s per node`, `1600 Gb/s RoCE per node`, `1600 Gbps node-node`.
fn gigabits_per_node(text: &str) -> Option<f64> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let unit = |word: &str| ["gb/s", "gbps", "gbit/s"].contains(&word.to_lowercase().as_str());
    let found = words.windows(2).enumerate().find(|(at, pair)| {
        let after = words[at + 2..].iter().take(3).map(|word| word.to_lowercase()).collect::<Vec<_>>().join(" ");
        pair[0].parse::<f64>().is_ok() && unit(pair[1]) && (after.contains("per node") || after.contains("node-node"))
    });
    found.and_then(|(_, pair)| pair[0].parse().ok()).filter(|value: &f64| value.is_finite() && *value > 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_read() {
        assert_eq!(gigabits_per_node("NVLink; inter-node 800 Gb/s per node per config"), Some(800.0));
        assert_eq!(gigabits_per_node("NVSwitch; 1600 Gb/s RoCE per node"), Some(1600.0));
        assert_eq!(gigabits_per_node("A100 with 1600 Gbps node-node interconnect"), Some(1600.0));
        assert_eq!(gigabits_per_node("8x400Gb/s IB NDR per node"), None);
    }

    #[test]
    fn figures_of_others_have_devices() {
        let all: Vec<Reached> = serde_json::from_str(REACHED).unwrap();
        for name in all.iter().flat_map(|reached| &reached.devices) {
            let own = Profile::find(name).unwrap();
            let mut device = own.clone();
            reached_by_others(name, &mut device).unwrap();
            assert!(device.figures() != own.figures(), "{name}");
        }
    }

    #[test]
    fn software_is_found() {
        let of = |source: &str, kind: &str, gpu: &str, notes: &str| {
            let mut row = Row { source: source.into(), notes: notes.into(), ..Row::default() };
            (row.model.kind, row.hardware.gpu) = (kind.into(), gpu.into());
            // Rows are put into sets by whoever collects them: a set is no software.
            let of_set = |split: &str| system(&Row { split: split.into(), ..row.clone() }).library.name;
            assert_eq!(of_set(""), of_set("dgxc_moe titan_a100 sc21 megatron_old"), "{source}");
            of_set("")
        };
        let recipes =
            |release: &str, kind: &str| of(&format!("NVIDIA/dgxc-benchmarking@{release} x"), kind, "H100", "");
        assert_eq!(recipes("v25.02.02", "MoE 8 experts top-2"), Library::MEGATRON_CORE_SERIAL.name);
        assert_eq!(recipes("v25.02.02", "llama3-8b"), Library::MEGATRON_CORE.name);
        assert_eq!(recipes("v25.05.05", "MoE 8 experts top-2"), Library::MEGATRON_CORE.name);
        assert_eq!(of("NVIDIA/dgxc-benchmarking@v25.02.02 maxtext", "", "H100", ""), Library::XLA.name);
        assert_eq!(of("VIA-Research/vTrain", "", "A100", ""), Library::MEGATRON_DEEPSPEED.name);
        assert_eq!(of("NVIDIA/NeMo (NeMo 24.07)", "", "H100", ""), Library::MEGATRON_CORE_2024.name);
        assert_eq!(of("NVIDIA/NeMo (NeMo 25.02)", "", "H100", ""), Library::MEGATRON_CORE.name);
        assert_eq!(of("NVIDIA/Megatron-LM README", "", "V100-32GB", ""), Library::MEGATRON_2020.name);
        assert_eq!(of("NVIDIA/Megatron-LM README", "", "A100-80GB", ""), Library::MEGATRON_2021.name);
        assert_eq!(of("NVIDIA/Megatron-LM README", "", "H100", ""), Library::MEGATRON_CORE.name);
        assert_eq!(of("pytorch/torchtitan", "", "H100", "FSDP"), Library::FSDP2.name);
        assert_eq!(of("pytorch/torchtitan", "", "H100", "FSDP+compile"), Library::FSDP2_COMPILED.name);
        assert_eq!(release("(Korthikanti et al. 2205.05198)"), None);
    }
}
