//! Training in 16 bits follows training in f32: the same model, weights and batches.

use shardc::{
    Batch, Cluster, Compiled, Decay, Feeds, LearningRate, NamedModel, Options, Precision, StepMetrics, TrainOptions,
};
use shardc_ir::program::{Action, Instruction};
use shardc_ir::{BufferId, DType, Graph, HostTensor, Op, ReduceKind, Target, ValueId};
use shardc_passes::precision::lower_precision;
use shardc_runtime::{CudaTarget, interpret};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

const BATCH: Batch = Batch { batch: 4, seq: 32 };
const STEPS: u64 = 10;

/// Sequences that count upwards in strides, which differ by row and step.
fn tokens(step: u64) -> Feeds {
    let token = |row: u64, at: u64| ((7 * row + 3 * step + at * (1 + row)) % 256) as i64;
    let ids: Vec<i64> = (0..BATCH.batch).flat_map(|row| (0..BATCH.seq).map(move |at| token(row, at))).collect();
    let ids = Arc::new(HostTensor::from_i64([BATCH.batch, BATCH.seq], &ids));
    Feeds::from([("input_ids".into(), ids.clone()), ("labels".into(), ids)])
}

fn compiled(precision: Precision, cluster: &str, pins: &str) -> (NamedModel, Compiled) {
    let model = NamedModel::find("llama-tiny").unwrap();
    let cluster = Cluster::parse(cluster, "h200").unwrap();
    let options = Options { precision: Some(precision), pins: pins.into(), ..Options::default() };
    let compiled = shardc::compile(&model, BATCH, &cluster, &options).unwrap();
    (model, compiled)
}

fn train_options() -> TrainOptions {
    let learning_rate = LearningRate { rate: 1e-3, min_rate: 0.0, warmup: 0, decay: Decay::Constant, steps: STEPS };
    TrainOptions { learning_rate, seed: 1 }
}

fn train(precision: Precision) -> Vec<StepMetrics> {
    let (model, compiled) = compiled(precision, "cpu:1", "");
    let weights = model.weights().unwrap();
    let mut trainer = compiled.start(weights.as_ref(), train_options()).unwrap();
    (0..STEPS).map(|step| trainer.step(tokens(step)).unwrap()).collect()
}

/// Every loss and norm of a run within these fractions of those in f32.
fn follows(precision: Precision, of_loss: f64, of_norm: f64) {
    let (name, exact, rounded) = (precision.name(), train(Precision::Fp32), train(precision));
    let mut equal = 0;
    for (a, b) in exact.iter().zip(&rounded) {
        let error = |a: f64, b: f64| (b / a - 1.0).abs();
        assert!(error(a.loss, b.loss) < of_loss, "step {}: loss {} in f32, {} in {name}", a.step, a.loss, b.loss);
        let norms = (a.grad_norm, b.grad_norm);
        assert!(error(norms.0, norms.1) < of_norm, "step {}: norm {} in f32, {} in {name}", a.step, norms.0, norms.1);
        equal += usize::from(a.loss == b.loss);
    }
    assert!(equal < exact.len(), "{name} changed nothing");
    let (first, last) = (exact[0].loss, exact[exact.len() - 1].loss);
    assert!(last < 0.9 * first, "it must learn for this to say anything: {first} to {last}");
}

/// bf16 keeps 8 bits, so one rounding is off by up to 0.4%; a loss is a mean of many.
#[test]
fn bf16_follows_f32() {
    follows(Precision::Bf16, 0.01, 0.05);
}

/// fp16 keeps 11 bits, and what would be too small for it is scaled.
#[test]
fn fp16_follows_f32() {
    follows(Precision::Fp16, 0.001, 0.01);
}

/// Scaled gradients that overflow skip the step on every rank, and halve the scale for the next.
/// A row of attention of which all is hidden by the least number of f32, which has no place in 16 bits.
#[test]
fn what_is_hidden_stays_a_number() {
    let text = r#"graph @hidden {
  %q: f32[1,2,1,4] = parameter "q"
  %k: f32[1,2,1,4] = parameter "k"
  %v: f32[1,2,1,4] = parameter "v"
  %m: f32[1,1,2,2] = input "m"
  %o: f32[1,2,1,4], %lse: f32[1,1,2] = attention %q, %k, %v, %m {scale=0.5}
  %loss: f32[] = reduce_sum %o {dims=[0,1,2,3]}
  return loss %loss
}"#;
    let graph: Graph = text.parse().unwrap();
    let eights = HostTensor::from_f32([1, 2, 1, 4], &[1.0, 0.5, 0.25, 1.5, 1.0, 2.0, 0.75, 0.5]);
    for hidden in [f32::MIN, -1e9] {
        let mask = HostTensor::from_f32([1, 1, 2, 2], &[hidden, hidden, 0.0, hidden]);
        let leaves = ["q", "k", "v"].map(|name| (name.to_string(), eights.clone()));
        let leaves = leaves.into_iter().chain([("m".to_string(), mask)]).collect();
        for precision in [Precision::Fp32, Precision::Bf16, Precision::Fp16] {
            let lowered = lower_precision(&graph, precision).unwrap();
            let loss = &interpret(&lowered, &leaves).unwrap()["loss"];
            let loss = f32::from_le_bytes(loss.bytes[..4].try_into().unwrap());
            // Of nothing to see all is seen, alike or by its scores; the second query sees the first key alone.
            assert!((loss - 7.0).abs() < 0.5, "{loss} in {}", precision.name());
        }
    }
}

#[test]
fn an_overflow_skips_the_step_on_every_rank() {
    for pins in ["tp=2", "dp=2,zero=1", "pp=2"] {
        let (model, compiled) = compiled(Precision::Fp16, "cpu:2", pins);
        let mut weights = {
            let weights = model.weights().unwrap();
            compiled.start(weights.as_ref(), train_options()).unwrap().parameters().unwrap()
        };
        // A steep head: its logits are finite, what goes back through it is not.
        let (name, head) = weights.iter_mut().find(|(name, _)| name.as_str() == "head.weight").unwrap();
        let float = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
        let steep: Vec<f32> = head.bytes.chunks_exact(4).map(|bytes| 1e4 * float(bytes)).collect();
        *head = HostTensor::from_f32(head.ty.shape.clone(), &steep);
        let name = name.clone();
        let mut trainer = compiled.start(&weights, train_options()).unwrap();
        let mut scale = 65_536.0;
        let mut skipped = 0;
        for step in 0..30 {
            let metrics = trainer.step(tokens(0)).unwrap();
            assert_eq!(metrics.loss_scale, Some(scale), "{pins}, step {step}");
            let after = trainer.parameters().unwrap();
            if !metrics.is_skipped() {
                assert!(metrics.grad_norm.is_finite() && after != weights, "{pins}: nothing was learnt from {name}");
                break;
            }
            assert!(after == weights, "{pins}: step {step} was skipped, and changed something");
            (scale, skipped) = (scale / 2.0, skipped + 1);
        }
        assert!((1..30).contains(&skipped), "{pins}: {skipped} steps skipped");
    }
}

/// Asked for equal bits, every derivative of attention is the one that gives them, and the plan counts what it takes.
#[test]
fn a_deterministic_plan_counts_what_it_costs() {
    let model = NamedModel::find("llama-tiny").unwrap();
    let cluster = Cluster::parse("h100:1x1", "h200").unwrap();
    let [free, fixed] = [false, true].map(|deterministic| {
        let options = Options {
            precision: Some(Precision::Bf16),
            pins: "microbatch=4,recompute=none,loss_chunks=1".into(),
            deterministic,
            ..Options::default()
        };
        shardc::compile(&model, Batch { batch: 4, seq: 512 }, &cluster, &options).unwrap()
    });
    let flags = |compiled: &Compiled| -> Vec<bool> {
        let of = |node: &shardc_ir::graph::Node| match &node.op {
            Op::AttentionGrad(op) => Some(op.deterministic),
            _ => None,
        };
        compiled.plan().graph.nodes().filter_map(|(_, node)| of(node)).collect()
    };
    assert!(!flags(&free).is_empty() && flags(&free).iter().all(|flag| !flag));
    assert_eq!(flags(&fixed), vec![true; flags(&free).len()]);
    // What the derivative's kernels have to themselves, at most.
    let scratch = |compiled: &Compiled| {
        let program = &compiled.programs().unwrap()[0];
        let grads = program.instructions().filter(|instruction| {
            matches!(&instruction.action, Action::Compute(op) if matches!(op.single(), Op::AttentionGrad(_)))
        });
        grads.filter_map(|grad| Some(program.buffers[grad.scratch?].ty.bytes())).max().unwrap()
    };
    assert!(scratch(&fixed) > scratch(&free), "{} and {}", scratch(&fixed), scratch(&free));
}

/// 8-bit floats keep 4 bits of a weight or an activation and 3 of a cotangent: the linear layers' errors
/// average out in the loss, and half of the gradient's norm is theirs.
#[test]
fn fp8_follows_f32() {
    follows(Precision::Fp8, 0.02, 0.1);
}

/// However samples are divided over ranks and microbatches, and matrices over ranks, scales are those of whole
/// tensors: what differs is the order of sums alone.
#[test]
fn fp8_is_the_same_on_any_plan() {
    let run = |cluster: &str, pins: &str| -> Vec<StepMetrics> {
        let (model, compiled) = compiled(Precision::Fp8, cluster, pins);
        let weights = model.weights().unwrap();
        let mut trainer = compiled.start(weights.as_ref(), train_options()).unwrap();
        (0..3).map(|step| trainer.step(tokens(step)).unwrap()).collect()
    };
    let alone = run("cpu:1", "");
    for (cluster, pins) in [
        ("cpu:1", "microbatch=1"),
        ("cpu:2", "dp=2,zero=0"),
        ("cpu:2", "dp=2,zero=3"),
        ("cpu:4", "dp=4,zero=3"),
        ("cpu:4", "dp=4,zero=3,keep_casts=1"),
        ("cpu:2", "dp=2,zero=1,recompute=full"),
        ("cpu:4", "dp=2,tp=2,zero=3,microbatch=1,recompute=full"),
        ("cpu:2", "tp=2"),
        ("cpu:2", "pp=2"),
        ("cpu:4", "dp=2,tp=2,zero=1,microbatch=1,recompute=full"),
    ] {
        for (a, b) in alone.iter().zip(run(cluster, pins)) {
            let error = |a: f64, b: f64| (b / a - 1.0).abs();
            let errors = (error(a.loss, b.loss), error(a.grad_norm, b.grad_norm));
            assert!(errors.0 < 2e-3 && errors.1 < 2e-2, "{pins}, step {}: off by {errors:?}", a.step);
        }
    }
}

/// What ranks with parts of a tensor find as its scale is not its scale: powers of two of either part round alike in
/// most steps, so that a run does not tell. The programs do: what divides by a scale reads the largest of all ranks',
/// wherever a rank looked at a part of a tensor.
#[test]
fn a_scale_of_a_tensor_in_parts_is_the_largest_of_its_parts() {
    let (_, compiled) = compiled(Precision::Fp8, "cpu:2", "tp=2");
    for program in compiled.programs().unwrap() {
        let computes = |instruction: &&Instruction, is_it: fn(&Op) -> bool| match &instruction.action {
            Action::Compute(op) => is_it(op.single()),
            _ => false,
        };
        let is_largest = |instruction: &&Instruction| {
            matches!(instruction.action, Action::AllReduce { reduce: ReduceKind::Max, .. })
        };
        let all = || program.instructions();
        let found: BTreeSet<BufferId> = all()
            .filter(|instruction| computes(instruction, |op| matches!(op, Op::QuantizationScale(_))))
            .flat_map(|instruction| instruction.results.iter().copied())
            .collect();
        let reduced: BTreeSet<BufferId> = all()
            .filter(is_largest)
            .filter(|instruction| instruction.operands.iter().any(|operand| found.contains(operand)))
            .flat_map(|instruction| instruction.results.iter().copied())
            .collect();
        let dividing = || all().filter(|instruction| computes(instruction, |op| matches!(op, Op::Quantize(_))));
        let reads = |of: &BTreeSet<BufferId>| {
            dividing().filter(|instruction| instruction.operands.iter().any(|operand| of.contains(operand))).count()
        };
        assert!(!reduced.is_empty() && reads(&reduced) > 0, "rank {}: {reduced:?} of {found:?}", program.rank);
    }
}

/// With ZeRO a rank rounds its own part of a weight: what ranks gather of linear layers is 8 bits wide, for each pass
/// the arrangement that this reads, and all scales are reduced in one collective. ZeRO-3 gathers in every microbatch.
#[test]
fn ranks_that_store_parts_of_a_weight_gather_its_codes() {
    for (zero, recompute, gathers) in [(1, "none", 1), (3, "none", 1), (3, "full", 2)] {
        let pins = format!("dp=4,zero={zero},recompute={recompute},keep_casts=0");
        let (_, compiled) = compiled(Precision::Fp8, "cpu:4", &pins);
        let graph = &compiled.plan().graph;
        let defined = |op: fn(&Op) -> bool| -> BTreeSet<ValueId> {
            let nodes = graph.nodes().filter(|(_, node)| op(&node.op));
            nodes.flat_map(|(_, node)| node.results.iter().copied()).collect()
        };
        let parameters = defined(|op| matches!(op, Op::Parameter(_)));
        let is_cast = |value: &ValueId| {
            let node = graph.def(*value);
            matches!(node.op, Op::Cast(_)) && parameters.contains(&node.operands[0])
        };
        let of_weight = graph.nodes().filter(|(_, node)| is_cast(node.operands.first().unwrap_or(&node.results[0])));
        let of_weight: Vec<_> = of_weight.filter(|(_, node)| matches!(node.op, Op::Quantize(_))).collect();
        let weights: BTreeSet<ValueId> = of_weight.iter().map(|(_, node)| node.operands[0]).collect();
        let program = &compiled.programs().unwrap()[0];
        let instructions: Vec<&Instruction> = program.instructions().collect();
        let mut gathered: BTreeMap<ValueId, usize> = BTreeMap::new();
        for instruction in instructions.iter().filter(|of| matches!(of.action, Action::AllGather { .. })) {
            for value in instruction.operands.iter().filter_map(|operand| program.buffers[*operand].value) {
                *gathered.entry(value).or_default() += 1;
            }
        }
        assert!(weights.len() > 5 && weights.iter().all(|weight| !gathered.contains_key(weight)), "{pins}");
        // The gradient of an activation reads the plain arrangement. The product reads the other one, and if it is
        // computed again, again.
        let counts = |index: usize| -> BTreeSet<usize> {
            of_weight.iter().map(|(_, node)| gathered.get(&node.results[index]).copied().unwrap_or(0)).collect()
        };
        assert_eq!([counts(0), counts(1)].map(|counts| counts.into_iter().max()), [Some(1), Some(gathers)], "{pins}");
        assert!(!counts(0).contains(&0) && !counts(1).contains(&0), "{pins}");
        let largest =
            instructions.iter().filter(|of| matches!(of.action, Action::AllReduce { reduce: ReduceKind::Max, .. }));
        assert_eq!(largest.map(|of| of.operands.len()).collect::<Vec<_>>(), [weights.len()], "{pins}");
    }
}

/// A library of products writes their results as it reads them, or in f32: what sums over ranks in another type is cast
/// behind them.
#[test]
fn gpus_have_every_product_whatever_sums_over_ranks() {
    let model = NamedModel::find("gpt2-124m@layers=1").unwrap();
    let cluster = Cluster::parse("h100:2", "h200").unwrap();
    for (precision, merges) in [(Precision::Fp32, false), (Precision::Fp16, false), (Precision::Bf16, true)] {
        let options = Options {
            precision: Some(precision),
            reduce_dtype: Some(DType::Bf16),
            pins: "dp=2".into(),
            ..Options::default()
        };
        let compiled = shardc::compile(&model, BATCH, &cluster, &options).unwrap();
        let mut written = BTreeSet::new();
        for program in compiled.programs().unwrap() {
            let ty = |id: &BufferId| program.buffers[*id].ty.clone();
            let types = |buffers: &[BufferId]| buffers.iter().map(ty).collect::<Vec<_>>();
            for Instruction { action, operands, results, .. } in program.instructions() {
                let Action::Compute(op @ Op::Matmul(_)) = action else { continue };
                let (operands, results) = (types(operands), types(results));
                assert!(CudaTarget.has_kernel(op, &operands, &results), "{op:?} {operands:?} -> {results:?}");
                written.insert(results[0].dtype);
            }
        }
        let narrow = if precision == Precision::Fp16 { DType::F16 } else { DType::Bf16 };
        assert_eq!(written.contains(&DType::Bf16), merges, "{precision:?} {written:?}");
        assert!(written.contains(&narrow) || precision == Precision::Fp32, "{written:?}");
    }
}
