//! What the software between a plan and the device costs, by generation.
//!
//! The same device runs the same plan at different speeds under different software: how attention
//! is computed, how often elementwise results pass through memory, what the host needs to start
//! kernels, and which communication is hidden. Each of these is one figure of a [`Library`]. The
//! cost model has no other constants: those of devices and links are in their
//! [`Profile`](crate::cluster::Profile), and there are none per model or run.
//!
//! [`Library::SHARDC`] is this project's runtime, for which plans are searched. The others are
//! generations of training software that others have published measurements of; they are what the
//! model is checked against (`shardc-bench`, `published`). Their figures were found by least squares
//! over those measurements, with device and link figures shared by all of them, unless a comment
//! gives another source.

use shardc_ir::ops::{FusedStep, Op};

/// How attention is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Attention {
    /// Matrix products around a softmax, with the scores in memory: bytes moved per score besides
    /// those of the products, forward and backward.
    Unfused {
        /// Bytes per score, forward: scale, mask, softmax, dropout.
        forward: f64,
        /// Bytes per score, backward.
        backward: f64,
    },
    /// FlashAttention 1 or 2 (Dao, 2022 and 2023): factors on what version 2 reaches on the device.
    Flash {
        /// Forward.
        forward: f64,
        /// Backward.
        backward: f64,
    },
    /// cuDNN's fused kernels, or FlashAttention 3: factors on what cuDNN 9 reaches on the device.
    Cudnn {
        /// Forward.
        forward: f64,
        /// Backward.
        backward: f64,
        /// On how long a sequence must be for the backward kernel to come near that.
        ramp: f64,
    },
}

/// What the host spends on starting kernels, in seconds; all zero where the step is one CUDA graph.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Host {
    /// Per layer and microbatch, the forward pass.
    pub forward: f64,
    /// Per layer and microbatch, the backward pass without recomputation.
    pub backward: f64,
    /// More of it in each pass, if the layer has collectives inside.
    pub tensor: f64,
    /// Per layer and microbatch, what the ranks of its collectives are apart: all but the last of them wait, unless
    /// they wait for their hosts anyway.
    pub skew: f64,
    /// Per layer and microbatch, what eight launch-bound ranks lose at their collectives to each
    /// other's jitter; grows with the fourth power of their number up to eight.
    pub jitter: f64,
    /// Per microbatch, embedding, head and loss.
    pub ends: f64,
}

/// The share of the device's memory rate that kernels of a kind reach; elementwise ones reach all of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reach {
    /// Those that read rows twice: norms with a mean, softmax, the loss.
    pub rows: f64,
    /// The gradients of such norms, with the sums over rows that they leave.
    pub rows_backward: f64,
    /// Root-mean-square norms and their gradients.
    pub rms: f64,
    /// Sums, of rows, of a table's rows; and largest elements.
    pub folds: f64,
    /// Sums of columns, and of squares.
    pub sums: f64,
    /// Sums of what a region of other operations makes.
    pub region_folds: f64,
    /// Casts to 8 bits, which write a tensor as it is and transposed.
    pub quantize: f64,
}

impl Reach {
    /// What moves bytes moves them at the device's rate; what is slower is in the traffic.
    const ALL: Reach =
        Reach { rows: 1.0, rows_backward: 1.0, rms: 1.0, folds: 1.0, sums: 1.0, region_folds: 1.0, quantize: 1.0 };

    /// The share that an operation's kernel reaches.
    pub fn of(&self, op: &Op) -> f64 {
        match op.single() {
            Op::LayerNorm(_) | Op::Softmax(_) | Op::CrossEntropy(_) => self.rows,
            Op::LayerNormGrad(_) => self.rows_backward,
            Op::RmsNorm(_) | Op::RmsNormGrad(_) => self.rms,
            Op::Reduce(reduce) if reduce.dims.iter().copied().eq(0..reduce.dims.len()) => self.sums,
            Op::SumSquares(_) => self.sums,
            Op::Reduce(_) | Op::EmbeddingGrad(_) | Op::QuantizationScale(_) => self.folds,
            Op::Quantize(_) => self.quantize,
            // The slowest of its steps sets a region's pace.
            Op::Fused(region) => {
                let of = |step: &FusedStep| match step.op {
                    Op::Reduce(_) => self.region_folds,
                    _ => self.of(&step.op),
                };
                region.steps.iter().map(of).fold(1.0, f64::min)
            }
            _ => 1.0,
        }
    }
}

/// One generation of training software.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Library {
    /// Its name.
    pub name: &'static str,
    /// How attention is computed.
    pub attention: Attention,
    /// Bytes that elementwise and normalising operations move, over their operands and results
    /// read and written once; below 1 where neighbours are fused. Forward.
    pub traffic_forward: f64,
    /// The same, backward.
    pub traffic_backward: f64,
    /// What of the memory rate kernels reach.
    pub reach: Reach,
    /// What starting a kernel takes, of the device's launch time.
    pub launch: f64,
    /// Whether a product whose result has few tiles is cut along its depth, so that all multiprocessors work.
    pub splits_products: bool,
    /// Bytes moved per element of a weight to add a microbatch's gradient to those before it, which the product
    /// that makes it does not hide.
    pub accumulated_bytes: f64,
    /// Bytes moved per logit besides those of the head's products: casts, softmax, loss, gradient.
    pub logit_bytes: f64,
    /// The share of them that moves where tensor ranks divide the loss, besides their division.
    pub divided_logits: f64,
    /// By how much the busiest rank's share of the routed tokens exceeds the mean: all wait for it.
    pub expert_imbalance: f64,
    /// Whether the experts of a rank are computed at once; one after the other otherwise.
    pub groups_experts: bool,
    /// The share of moving tokens to experts and back that nothing hides; more than 1 where they move below the
    /// link's rate.
    pub experts_exposed: f64,
    /// How many times as much moves where tokens are sorted by expert, and back, as reading and writing them
    /// once.
    pub expert_sorts: f64,
    /// How many times as much a cast to 8 bits moves of rows that are sorted by expert.
    pub expert_casts: f64,
    /// Bytes moved per element that is cast to an 8-bit format, with its statistics.
    pub f8_cast_bytes: f64,
    /// What the host costs.
    pub host: Host,
    /// The share of a layer's tensor-parallel collectives that nothing hides; more than 1 where they
    /// run below the link's rate.
    pub tensor_exposed: f64,
    /// The factor on it where they are split to run under their products.
    pub tensor_async: f64,
    /// Whether activations between the tensor-parallel products are divided over the sequence.
    pub is_sequence_parallel: bool,
    /// Whether a pipeline stage sends each activation once, divided over its tensor ranks.
    pub sends_parts: bool,
    /// The share of sends between stages that nothing hides.
    pub pipeline_exposed: f64,
    /// What a stage with tensor ranks loses to the other pipelines in its node, where stages lie on different nodes:
    /// pipelines out of step disturb each other, and a tensor group waits for its slowest rank. The share of the
    /// stage's time is this (in root seconds) times the square of their number, times the root of the borders between
    /// stages over the seconds of a microbatch in a stage: what comes at random grows by its root along the borders,
    /// and long microbatches even it out. Stages of a whole node, or of one device, lose nothing. The mechanism is
    /// inferred from which runs are slow; the figure is fitted.
    pub pipeline_shared: f64,
    /// The share of a node's ports that the data ranks' rings reach where a ring passes several of its devices, but not
    /// all: such a ring enters at one device and leaves from another, which is not beside the port that it entered by, so
    /// that the bytes cross the host. (NCCL goes round that over NVLink from version 2.12 on: NVIDIA, "Doubling all2all
    /// performance with NCCL 2.12", 2022.)
    pub scattered_rings: f64,
    /// What ring attention loses to the transfers it hides, of their time.
    pub context_loss: f64,
    /// Bytes moved per element of the output to merge the parts of ring attention, per step of the ring.
    pub context_merge_bytes: f64,
    /// Bytes of a gradient element when it is reduced.
    pub gradient_bytes: f64,
    /// The share of the data-parallel reduction (and of ZeRO-1's gathering) that nothing hides.
    pub data_exposed: f64,
    /// What computation loses to gathering parameters (ZeRO-3) under it, of the hidden time.
    pub shard_loss: f64,
    /// Seconds of a step that depend on nothing: the loader, the norm, logging.
    pub step_seconds: f64,
}

/// The figures that most PyTorch libraries share; each constant below says where it differs.
const COMMON: Library = Library {
    name: "common",
    attention: Attention::Cudnn { forward: 1.0, backward: 1.0, ramp: 1.0 },
    traffic_forward: 0.8,
    traffic_backward: 1.15,
    reach: Reach::ALL,
    launch: 1.0,
    splits_products: false,
    accumulated_bytes: 0.0,
    logit_bytes: 16.0,
    divided_logits: 1.0,
    expert_imbalance: 1.25,
    groups_experts: true,
    experts_exposed: 1.0,
    expert_sorts: 1.0,
    expert_casts: 1.0,
    f8_cast_bytes: 4.0,
    host: Host { forward: 3e-4, backward: 5e-4, tensor: 4e-5, skew: 2e-5, jitter: 0.0, ends: 1e-3 },
    tensor_exposed: 1.0,
    tensor_async: 0.7,
    is_sequence_parallel: false,
    sends_parts: false,
    pipeline_exposed: 1.0,
    pipeline_shared: 0.0,
    scattered_rings: 1.0,
    context_loss: 0.3,
    context_merge_bytes: 12.0,
    gradient_bytes: 2.0,
    data_exposed: 1.0,
    shard_loss: 0.15,
    step_seconds: 1e-2,
};

impl Library {
    /// The factor on [`f8_cast_bytes`](Self::f8_cast_bytes) where every row has a scale of its own.
    pub const ROWWISE_CASTS: f64 = 3.0;

    /// This project's runtime: cuDNN's attention; every other operation moves what it says it moves;
    /// the step is replayed, so the host costs nothing and kernels follow each other closely. To be found
    /// again from the single-GPU rows of `bench/RESULTS.md` whenever kernels change; `train --profile`
    /// says which figure is off.
    pub const SHARDC: Library = Library {
        name: "shardc",
        traffic_forward: 1.0,
        traffic_backward: 1.0,
        // `train --profile` of gpt2-124m, gpt2-1.5b, llama-160m and llama-1b on one H200.
        // Sums of columns and in regions are resnet-50's and mixer-b-16's, as are norms, with `cuda_selftest memory`.
        reach: Reach {
            rows: 0.78,
            rows_backward: 0.7,
            rms: 0.85,
            folds: 0.66,
            sums: 0.92,
            region_folds: 0.9,
            quantize: 0.61,
        },
        // In CUDA graphs: steps of resnet-50, unet and mixer-b-16 on one, two and four H100s and H200s.
        launch: 0.65,
        splits_products: true,
        logit_bytes: 0.0,
        f8_cast_bytes: 3.0,
        host: Host { forward: 0.0, backward: 0.0, tensor: 0.0, skew: 0.0, jitter: 0.0, ends: 0.0 },
        is_sequence_parallel: true,
        sends_parts: true,
        gradient_bytes: 4.0,
        step_seconds: 0.0,
        ..COMMON
    };

    /// Megatron-DeepSpeed of 2022 on eager PyTorch, as vTrain measured it.
    pub const MEGATRON_DEEPSPEED: Library = Library {
        name: "Megatron-DeepSpeed (2022)",
        attention: Attention::Unfused { forward: 17.2, backward: 18.8 },
        traffic_forward: 0.33,
        traffic_backward: 0.42,
        accumulated_bytes: 0.36,
        logit_bytes: 83.0,
        // A loss that is not divided takes as long as moving all of them, a divided one far less; both are fitted.
        divided_logits: 0.15,
        host: Host { forward: 8.9e-4, backward: 1.4e-3, tensor: 1.4e-5, skew: 8e-4, jitter: 1.5e-3, ends: 4.1e-3 },
        tensor_exposed: 1.05,
        sends_parts: true,
        pipeline_exposed: 0.193,
        // Fitted to the 20 runs of 512 devices with two and four tensor ranks; without those of any one depth or
        // microbatch the rest give 0.0073 to 0.0084.
        pipeline_shared: 0.008,
        // Two devices share a port there. Fitted to the nine runs of 64 devices with two and four tensor ranks and no
        // stages: their mean error is 10.1% with 1, and 3.8 to 4.1% from 0.27 to 0.36.
        scattered_rings: 0.33,
        step_seconds: 1.13e-3,
        ..COMMON
    };

    /// Megatron-LM of 2020: no fused softmax, PyTorch's own data parallelism (Shoeybi et al., 2019).
    pub const MEGATRON_2020: Library = Library {
        name: "Megatron-LM (2020)",
        attention: Attention::Unfused { forward: 17.95, backward: 20.0 },
        traffic_forward: 1.01,
        traffic_backward: 1.4,
        tensor_exposed: 1.43,
        data_exposed: 0.43,
        ..COMMON
    };

    /// Megatron-LM of 2021: fused softmax, interleaved pipelines (Narayanan et al., 2021).
    pub const MEGATRON_2021: Library = Library {
        name: "Megatron-LM (2021)",
        attention: Attention::Unfused { forward: 14.45, backward: 20.0 },
        traffic_forward: 0.81,
        tensor_exposed: 1.71,
        sends_parts: true,
        data_exposed: 0.854,
        ..COMMON
    };

    /// Megatron-LM of 2022: sequence parallelism and selective recomputation (Korthikanti et al., 2022).
    pub const MEGATRON_2022: Library = Library {
        name: "Megatron-LM (2022)",
        attention: Attention::Unfused { forward: 14.0, backward: 20.0 },
        traffic_forward: 0.78,
        tensor_exposed: 1.16,
        sends_parts: true,
        ..COMMON
    };

    /// Megatron-Core with Transformer Engine of 2025 (NeMo 25, NVIDIA's benchmarking recipes).
    pub const MEGATRON_CORE: Library = Library {
        name: "Megatron-Core (2025)",
        traffic_forward: 0.726,
        traffic_backward: 0.961,
        logit_bytes: 11.9,
        expert_imbalance: 1.0,
        f8_cast_bytes: 4.87,
        host: Host { forward: 4e-4, backward: 5e-4, ..COMMON.host },
        tensor_exposed: 0.42,
        is_sequence_parallel: true,
        sends_parts: true,
        pipeline_exposed: 0.226,
        context_loss: 0.317,
        context_merge_bytes: 26.3,
        data_exposed: 0.376,
        step_seconds: 1.84e-2,
        accumulated_bytes: 4.68,
        // The least mean error of the 24 runs of Grok 1, DeepSeek V3 and Llama 4 (recipes of 25.02 and 25.05, each for
        // itself): 1.25 and 1.75 give up to 4 points more.
        experts_exposed: 1.5,
        ..COMMON
    };

    /// The same where layers have experts, in NVIDIA's recipes before release 25.05: experts one after the other,
    /// and the tensor ranks' collectives not under their products (`moe_grouped_gemm: false`,
    /// `ub_tp_comm_overlap: false` in the recipe's configuration).
    pub const MEGATRON_CORE_SERIAL: Library = Library {
        name: "Megatron-Core (2025), experts one by one",
        groups_experts: false,
        tensor_exposed: 1.0,
        // Fitted to the 18 runs of Grok 1 in recipes of 25.02 so that none is off by 10%: the mean error hardly depends
        // on it between 8 and 18 (3.4 to 3.8%), and is 5.1% with 1.
        expert_sorts: 16.0,
        // By the same measure, on the nine of them in 8 bits; without it their mean error is 5.4% instead of 4.1%.
        expert_casts: 1.85,
        ..Self::MEGATRON_CORE
    };

    /// The same of 2024 (NeMo 24.03 to 24.07), with the first attention kernels for Hopper, and casts to 8 bits that
    /// are kernels of their own. Fitted to NVIDIA's 8-bit tables of 24.07 and its table of long sequences of 24.03;
    /// what attention takes forward and backward is told apart by the runs of the latter that compute layers again.
    pub const MEGATRON_CORE_2024: Library = Library {
        name: "Megatron-Core (2024)",
        attention: Attention::Cudnn { forward: 0.47, backward: 0.675, ramp: 1.0 },
        f8_cast_bytes: 9.8,
        accumulated_bytes: 2.1,
        tensor_exposed: 0.27,
        data_exposed: 0.12,
        context_loss: 0.13,
        context_merge_bytes: 8.5,
        step_seconds: 0.13,
        ..Self::MEGATRON_CORE
    };

    /// MaxText on XLA of 2025.
    pub const XLA: Library = Library {
        name: "XLA (2025)",
        attention: Attention::Cudnn { forward: 0.9, backward: 0.88, ramp: 1.0 },
        traffic_forward: 0.5,
        traffic_backward: 0.7,
        f8_cast_bytes: 1.0,
        tensor_exposed: 0.5,
        shard_loss: 0.0,
        ..COMMON
    };

    /// MosaicML's llm-foundry of 2023: PyTorch FSDP, eager, Triton's FlashAttention.
    pub const FSDP_2023: Library = Library {
        name: "PyTorch FSDP (2023)",
        attention: Attention::Flash { forward: 0.97, backward: 0.66 },
        traffic_forward: 1.22,
        traffic_backward: 1.75,
        logit_bytes: 22.5,
        host: Host { forward: 1e-3, backward: 1.5e-3, ..COMMON.host },
        shard_loss: 0.917,
        step_seconds: 1.1e-2,
        ..COMMON
    };

    /// FSDP2 of 2024, eager (torchtitan without compilation).
    pub const FSDP2: Library = Library {
        name: "PyTorch FSDP2 (2024)",
        attention: Attention::Flash { forward: 1.0, backward: 1.0 },
        traffic_forward: 1.225,
        traffic_backward: 1.7,
        logit_bytes: 22.0,
        host: Host { forward: 1e-3, backward: 1.5e-3, ..COMMON.host },
        is_sequence_parallel: true,
        shard_loss: 1.1,
        ..COMMON
    };

    /// FSDP2 of 2024 and 2025 with torch.compile (torchtitan, AutoParallel).
    pub const FSDP2_COMPILED: Library = Library {
        name: "PyTorch FSDP2, compiled (2024)",
        attention: Attention::Flash { forward: 1.0, backward: 1.0 },
        traffic_forward: 0.6,
        traffic_backward: 0.9,
        host: Host { forward: 5e-4, backward: 8e-4, ..COMMON.host },
        f8_cast_bytes: 6.6,
        tensor_exposed: 0.96,
        tensor_async: 0.61,
        is_sequence_parallel: true,
        sends_parts: true,
        shard_loss: 0.13,
        ..COMMON
    };
}
