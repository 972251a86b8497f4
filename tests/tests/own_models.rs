//! Models with what their authors put into them train alike under every family of plans: terms of the loss that read
//! parameters alone, labels of all tokens in one dimension, numbers given for each sample, parameters that nothing
//! reads, tokens that attention does not see, heads with a bias, a cap and a loss of their own.

use burn::module::Module;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::activation::{gelu, softmax};
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use shardc::{
    Batch, Cluster, Compiled, Decay, Error, Feeds, FromInitialisers, LearningRate, Options, Precision, TrainOptions,
};
use shardc_ir::{DType, HostTensor};
use shardc_models::{Model, TraceError, detach, trace};
use std::sync::Arc;

const WIDTH: usize = 16;
const CLASSES: usize = 8;
/// Entries of a vocabulary whose rows are not aligned.
const WORDS: usize = 515;
const BATCH: Batch = Batch { batch: 4, seq: 6 };

#[derive(Module, Debug)]
struct Tagger {
    table: Embedding,
    blocks: Vec<Linear>,
    head: Linear,
    attention: MultiHeadAttention,
    words: Linear,
}

impl Tagger {
    fn new(device: &Device) -> Self {
        let linear = |to| LinearConfig::new(WIDTH, to).init(device);
        Self {
            table: EmbeddingConfig::new(CLASSES, WIDTH).init(device),
            blocks: (0..2).map(|_| linear(WIDTH)).collect(),
            head: linear(CLASSES),
            attention: MultiHeadAttentionConfig::new(WIDTH, 2).with_dropout(0.0).init(device),
            words: linear(WORDS),
        }
    }

    /// The logits `[b * s, classes]` of tokens `[b, s]`.
    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<2> {
        let [batch, seq] = tokens.dims();
        let mut x = self.table.forward(tokens);
        for block in &self.blocks {
            x = x.clone() + gelu(block.forward(x));
        }
        self.head.forward(x).reshape([batch * seq, CLASSES])
    }
}

type Loss = fn(&Tagger, &mut shardc_models::Batch, [usize; 2]) -> Tensor<1>;

/// The labels of all tokens in one dimension, of which one class does not count.
fn flat_labels(model: &Tagger, inputs: &mut shardc_models::Batch, [batch, seq]: [usize; 2]) -> Tensor<1> {
    let logits = model.forward(inputs.int("tokens", [batch, seq]));
    let loss = CrossEntropyLossConfig::new().with_pad_tokens(Some(vec![3])).init(&logits.device());
    loss.forward(logits, inputs.int("labels", [batch * seq]))
}

/// One block that is every layer, and an embedding that is the head: what many stages read.
fn one_block(model: &Tagger, inputs: &mut shardc_models::Batch, [batch, seq]: [usize; 2]) -> Tensor<1> {
    let mut x = model.table.forward(inputs.int("tokens", [batch, seq]));
    for _ in 0..6 {
        x = x.clone() + gelu(model.blocks[0].forward(x));
    }
    let logits = x.reshape([batch * seq, WIDTH]).matmul(model.table.weight.val().transpose());
    let labels = inputs.int("labels", [batch, seq]).reshape([batch * seq]);
    CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, labels)
}

/// What each token takes from all others is added to what it was: a product that adds to what it reads.
fn mixed(model: &Tagger, inputs: &mut shardc_models::Batch, [batch, seq]: [usize; 2]) -> Tensor<1> {
    let mut x = model.table.forward(inputs.int("tokens", [batch, seq]));
    for block in &model.blocks {
        let weights = softmax(block.forward(x.clone()).matmul(x.clone().swap_dims(1, 2)), 2);
        x = x.clone() + weights.matmul(x);
    }
    let logits = model.head.forward(x).reshape([batch * seq, CLASSES]);
    let labels = inputs.int("labels", [batch, seq]).reshape([batch * seq]);
    CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, labels)
}

/// A penalty of the parameters' size, those that nothing else reads among them.
fn penalty(model: &Tagger, inputs: &mut shardc_models::Batch, [batch, seq]: [usize; 2]) -> Tensor<1> {
    let logits = model.forward(inputs.int("tokens", [batch, seq]));
    let size = model.head.weight.val().square().sum() + model.blocks[0].weight.val().abs().mean();
    logits.square().mean() + size * 1e-2 + model.words.weight.val().square().sum()
}

/// Weights of the samples that the model is given as numbers, and a target through which no gradient goes.
fn given_weights(model: &Tagger, inputs: &mut shardc_models::Batch, [batch, seq]: [usize; 2]) -> Tensor<1> {
    let logits = model.forward(inputs.int("tokens", [batch, seq])).reshape([batch, seq * CLASSES]);
    let weights: Vec<f32> = (0..batch).map(|sample| 0.5 + (sample * 5 % 7) as f32).collect();
    let weights = Tensor::<2>::from_data(TensorData::new(weights, [batch, 1]), &logits.device());
    ((logits.clone() - detach(logits.tanh())).square() * weights).mean()
}

/// Attention that sees neither padding nor what comes later.
fn padded(model: &Tagger, inputs: &mut shardc_models::Batch, [batch, seq]: [usize; 2]) -> Tensor<1> {
    let tokens = inputs.int("tokens", [batch, seq]);
    let x = model.table.forward(tokens.clone());
    let later = generate_autoregressive_mask(batch, seq, &x.device());
    let read = MhaInput::self_attn(x.clone()).mask_pad(tokens.clone().equal_elem(0)).mask_attn(later);
    let x = x + model.attention.forward(read).context;
    let logits = model.head.forward(x).reshape([batch * seq, CLASSES]);
    CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, tokens.flatten::<1>(0, 1))
}

/// Queries, keys and values of two heads, and what hides later keys from queries.
fn two_heads(model: &Tagger, x: &Tensor<3>) -> ([Tensor<4>; 3], Tensor<3, Bool>) {
    let [batch, seq, _] = x.dims();
    let apart = |linear: &Linear| linear.forward(x.clone()).reshape([batch, seq, 2, WIDTH / 2]).swap_dims(1, 2);
    let all = [&model.attention.query, &model.attention.key, &model.attention.value].map(apart);
    (all, generate_autoregressive_mask(1, seq, &x.device()))
}

fn heads(model: &Tagger, inputs: &mut shardc_models::Batch, [batch, seq]: [usize; 2]) -> Tensor<1> {
    let tokens = inputs.int("tokens", [batch, seq]);
    let x = model.table.forward(tokens.clone());
    let ([q, k, v], later) = two_heads(model, &x);
    let scores = (q.matmul(k.transpose()) / 3.0).mask_fill(later.unsqueeze::<4>(), f32::NEG_INFINITY);
    let x = x + softmax(scores, 3).matmul(v).swap_dims(1, 2).reshape([batch, seq, WIDTH]);
    let logits = model.head.forward(x).reshape([batch * seq, CLASSES]);
    CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, tokens.flatten::<1>(0, 1))
}

/// The same with batch and heads as one dimension.
fn joined_heads(model: &Tagger, inputs: &mut shardc_models::Batch, [batch, seq]: [usize; 2]) -> Tensor<1> {
    let tokens = inputs.int("tokens", [batch, seq]);
    let x = model.table.forward(tokens.clone());
    let (all, later) = two_heads(model, &x);
    let [q, k, v] = all.map(|heads| heads.reshape([batch * 2, seq, WIDTH / 2]));
    let later = later.expand([batch * 2, seq, seq]);
    let scores = (q.matmul(k.transpose()) / 3.0).mask_fill(later, f32::NEG_INFINITY);
    let seen = softmax(scores, 2).matmul(v).reshape([batch, 2, seq, WIDTH / 2]);
    let x = x + seen.swap_dims(1, 2).reshape([batch, seq, WIDTH]);
    let logits = model.head.forward(x).reshape([batch * seq, CLASSES]);
    CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, tokens.flatten::<1>(0, 1))
}

/// A head with a bias, whose logits are capped and kept from growing, and a token without a successor.
fn capped(model: &Tagger, inputs: &mut shardc_models::Batch, [batch, seq]: [usize; 2]) -> Tensor<1> {
    let tokens = inputs.int("tokens", [batch, seq]);
    let x = gelu(model.blocks[0].forward(model.table.forward(tokens.clone())));
    let logits = (model.words.forward(x) / 4.0).tanh() * 4.0;
    let level = logits.clone().exp().sum_dim(2).log().square().mean();
    let rows = logits.slice([0..batch, 0..seq - 1]).reshape([batch * (seq - 1), WORDS]);
    let labels = tokens.slice([0..batch, 1..seq]).reshape([batch * (seq - 1)]);
    CrossEntropyLossConfig::new().init(&rows.device()).forward(rows, labels) + level * 1e-2
}

/// What comes after each token but the last.
fn successors(model: &Tagger, inputs: &mut shardc_models::Batch, [batch, seq]: [usize; 2]) -> Tensor<1> {
    let logits = model.head.forward(model.table.forward(inputs.int("tokens", [batch, seq])));
    let rows = logits.slice([0..batch, 0..seq - 1]).reshape([batch * (seq - 1), CLASSES]);
    let labels = inputs.int("labels", [batch, seq - 1]).reshape([batch * (seq - 1)]);
    CrossEntropyLossConfig::new().init(&rows.device()).forward(rows, labels)
}

/// The largest number of a batch as a factor of what parameters alone make.
fn farthest(model: &Tagger, inputs: &mut shardc_models::Batch, [batch, seq]: [usize; 2]) -> Tensor<1> {
    let tokens = inputs.int("tokens", [batch, seq]);
    model.forward(tokens.clone()).square().mean() + tokens.float().max() * model.words.weight.val().square().sum()
}

/// How often samples have something, counted in integers.
fn counted(model: &Tagger, inputs: &mut shardc_models::Batch, [batch, seq]: [usize; 2]) -> Tensor<1> {
    let tokens = inputs.int("tokens", [batch, seq]);
    let counts = tokens.clone().equal_elem(3).int().sum_dim(0).float();
    model.forward(tokens).square().mean() + (counts * model.blocks[0].weight.val().slice([0..1, 0..seq])).sum()
}

/// The samples in the other order, in a sum over all of them.
fn turned(model: &Tagger, inputs: &mut shardc_models::Batch, [batch, seq]: [usize; 2]) -> Tensor<1> {
    let tokens = inputs.int("tokens", [batch, seq]);
    let x = model.table.forward(tokens.clone());
    model.head.forward(x).square().mean() + model.table.forward(tokens.flip([0])).mean()
}

/// A scale of the channels that every block reads, and a bias behind it.
fn tied_scale(model: &Tagger, inputs: &mut shardc_models::Batch, [batch, seq]: [usize; 2]) -> Tensor<1> {
    let scale = model.head.weight.val().slice([0..WIDTH, 0..1]).reshape([1, 1, WIDTH]);
    let x = model.table.forward(inputs.int("tokens", [batch, seq])) * scale.clone();
    let x = x.clone() + model.blocks[0].forward(x) * scale.clone();
    let x = (x.clone() + model.blocks[1].forward(x)) * scale;
    model.words.forward(x).square().mean()
}

/// What the model itself casts.
fn cast(model: &Tagger, inputs: &mut shardc_models::Batch, [batch, seq]: [usize; 2]) -> Tensor<1> {
    let x = model.table.forward(inputs.int("tokens", [batch, seq]));
    let x = x.cast(burn::tensor::FloatDType::BF16).cast(burn::tensor::FloatDType::F32);
    model.words.forward(x).square().mean()
}

/// Samples that become part of another dimension.
fn merged(model: &Tagger, inputs: &mut shardc_models::Batch, [batch, seq]: [usize; 2]) -> Tensor<1> {
    let x = model.table.forward(inputs.int("tokens", [batch, seq])).reshape([batch, seq * WIDTH]);
    let numbers: Vec<f32> = (0..batch * seq * WIDTH).map(|at| (at % 7) as f32).collect();
    let factors = Tensor::<2>::from_data(TensorData::new(numbers, [1, batch * seq * WIDTH]), &x.device());
    (x.transpose().reshape([1, batch * seq * WIDTH]) * factors).mean()
}

/// Blocks that are passed twice, in turn.
fn looped(model: &Tagger, inputs: &mut shardc_models::Batch, [batch, seq]: [usize; 2]) -> Tensor<1> {
    let mut x = model.table.forward(inputs.int("tokens", [batch, seq]));
    for _ in 0..2 {
        for block in &model.blocks {
            x = x.clone() + gelu(block.forward(x)).tanh();
        }
    }
    model.words.forward(x).square().mean()
}

/// Tokens of which the steps come first, then the samples.
fn steps_first(model: &Tagger, inputs: &mut shardc_models::Batch, [batch, seq]: [usize; 2]) -> Tensor<1> {
    let mut state = Tensor::<2>::zeros([batch, WIDTH], &model.head.weight.device());
    let x = model.table.forward(inputs.int("tokens", [seq, batch]));
    for step in 0..seq {
        state = (model.blocks[0].forward(x.clone().narrow(0, step, 1).squeeze_dim(0)) + state).tanh();
    }
    model.words.forward(state).square().mean() + model.blocks[1].forward(x).square().mean()
}

/// The same with all tokens in one dimension, of which a sample has no rows side by side.
fn steps_merged(model: &Tagger, inputs: &mut shardc_models::Batch, [batch, seq]: [usize; 2]) -> Tensor<1> {
    let logits = model.forward(inputs.int("tokens", [seq, batch]));
    let labels = inputs.int("labels", [seq, batch]).reshape([batch * seq]);
    CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, labels)
}

fn inputs(model: &Model) -> Feeds {
    let number = |at: u64| ((at * 7 + at / 3) % CLASSES as u64) as i64;
    let of = |ty: &shardc_ir::TensorType| {
        assert_eq!(ty.dtype, DType::I64);
        HostTensor::from_i64(ty.shape.clone(), &(0..ty.elements()).map(number).collect::<Vec<_>>())
    };
    model.inputs.iter().map(|(name, ty)| (name.clone(), of(ty).into())).collect()
}

fn compiled(loss: Loss, cluster: &str, pins: &str) -> Result<Compiled, Error> {
    let model = move |batch: Batch| -> Result<Model, TraceError> {
        let shape = [batch.batch as usize, batch.seq as usize];
        trace("tagger", Tagger::new, move |model, inputs| loss(model, inputs, shape))
    };
    let cluster = Cluster::parse(cluster, "h200").unwrap();
    let options = Options { precision: Some(Precision::Fp32), pins: pins.to_string(), ..Options::default() };
    shardc::compile(&model, BATCH, &cluster, &options)
}

/// The losses of some steps with the same inputs.
#[track_caller]
fn losses(loss: Loss, cluster: &str, pins: &str) -> Vec<f64> {
    let compiled = compiled(loss, cluster, pins).unwrap_or_else(|error| panic!("{pins}: {error}"));
    let choice = &compiled.plan().choice;
    assert!(pins.split(',').all(|pin| choice.contains(pin)), "{pins} gave {choice}");
    assert_eq!(Compiled::other_model(compiled.plan(), &compiled.model), None, "{pins}");
    let learning_rate = LearningRate { rate: 1e-2, min_rate: 0.0, warmup: 0, decay: Decay::Constant, steps: 3 };
    let mut trainer = compiled.start(&FromInitialisers, TrainOptions { learning_rate, seed: 1 }).unwrap();
    (0..3).map(|_| trainer.step(inputs(&compiled.model)).unwrap().loss).collect()
}

/// Plans of one microbatch, and of several.
const WHOLE: [(&str, &str); 3] =
    [("cpu:2", "dp=2,zero=1,microbatch=2"), ("cpu:2", "tp=2,microbatch=4"), ("cpu:4", "dp=2,tp=2,zero=3,microbatch=2")];
const CUT: [(&str, &str); 5] = [
    ("cpu:1", "microbatch=1"),
    ("cpu:2", "dp=2,zero=3,microbatch=1"),
    ("cpu:2", "tp=2,microbatch=2"),
    ("cpu:4", "dp=2,tp=2,microbatch=1"),
    ("cpu:2", "pp=2,schedule=1f1b,microbatch=1"),
];

#[track_caller]
fn check<'a>(loss: Loss, plans: impl IntoIterator<Item = &'a (&'a str, &'a str)>) {
    let whole = losses(loss, "cpu:1", "microbatch=4");
    for (cluster, pins) in plans {
        let losses = losses(loss, cluster, pins);
        let is_near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-5 * b.abs();
        assert!(losses.iter().zip(&whole).all(is_near), "{pins}: {losses:?}, on one rank {whole:?}");
    }
}

#[test]
fn labels_of_all_tokens() {
    check(flat_labels, WHOLE.iter().chain(&CUT));
}

#[test]
fn blocks_that_are_passed_twice() {
    let again = [
        ("cpu:1", "microbatch=4,recompute=block"),
        ("cpu:2", "pp=2,schedule=1f1b,microbatch=1,recompute=block"),
        ("cpu:2", "pp=2,schedule=zbv,microbatch=1,recompute=selective"),
    ];
    check(looped, WHOLE.iter().chain(&CUT).chain(&again));
    let kept = |pins: &str| compiled(looped, "cpu:1", pins).unwrap().plan().prediction.memory.activations.0;
    assert!(kept("microbatch=4,recompute=block") < kept("microbatch=4,recompute=none"));
}

#[test]
fn samples_behind_the_steps_of_time() {
    check(steps_first, WHOLE.iter().chain(&CUT));
    let whole = compiled(steps_first, "cpu:1", "microbatch=4").unwrap();
    let half = compiled(steps_first, "cpu:2", "dp=2,microbatch=2").unwrap();
    let kept = |of: &Compiled| of.plan().prediction.memory.activations.0;
    assert!(2 * kept(&half) <= kept(&whole) + 1024, "{} of {} bytes on each of two ranks", kept(&half), kept(&whole));
    check(steps_merged, &[("cpu:2", "tp=2,microbatch=4")]);
    let error = compiled(steps_merged, "cpu:2", "dp=2").expect_err("no plan");
    assert!(error.to_string().contains("keep the batch as a dimension of its own"), "{error}");
}

#[test]
fn a_head_whose_samples_and_tokens_are_merged() {
    let plans = [("cpu:2", "dp=2,microbatch=1,loss_chunks=3"), ("cpu:2", "tp=2,microbatch=2,loss_chunks=2")];
    check(one_block, WHOLE.iter().chain(&CUT).chain(&plans));
}

/// Plans that cut the head, of which no value has the logits of all tokens.
const CHUNKED: [(&str, &str); 4] = [
    ("cpu:1", "microbatch=4,loss_chunks=3"),
    ("cpu:2", "dp=2,microbatch=1,loss_chunks=2"),
    ("cpu:2", "tp=2,microbatch=2,loss_chunks=6"),
    ("cpu:2", "pp=2,schedule=1f1b,microbatch=1,loss_chunks=2"),
];

#[test]
fn a_head_with_more_than_a_product() {
    check(capped, WHOLE.iter().chain(&CUT).chain(&CHUNKED));
    for (cluster, pins) in CHUNKED {
        let compiled = compiled(capped, cluster, pins).unwrap();
        let graph = &compiled.plan().graph;
        let is_whole = |shape: &[u64]| shape.contains(&BATCH.seq) && shape.iter().any(|size| *size >= WORDS as u64);
        let whole = graph.values().find(|(_, value)| is_whole(&value.ty.shape));
        assert!(whole.is_none(), "{pins}: {:?}", whole.map(|(_, value)| graph.node(value.def)));
    }
}

#[test]
fn a_head_without_the_last_token() {
    let plans = [("cpu:2", "dp=2,microbatch=1,loss_chunks=3"), ("cpu:2", "cp=2,microbatch=4")];
    check(successors, WHOLE.iter().chain(&CUT).chain(&plans));
}

#[test]
fn a_head_whose_labels_are_merged() {
    check(flat_labels, &[("cpu:2", "dp=2,microbatch=1,loss_chunks=3"), ("cpu:2", "tp=2,microbatch=4,loss_chunks=2")]);
}

#[test]
fn a_sum_with_a_product_of_itself() {
    check(mixed, WHOLE.iter().chain(&CUT));
}

#[test]
fn a_parameter_of_many_stages() {
    let plans = [
        ("cpu:2", "pp=2,schedule=zbv,microbatch=1"),
        ("cpu:2", "pp=2,schedule=interleaved,virtual=2,microbatch=1"),
        ("cpu:4", "pp=4,schedule=1f1b,microbatch=1"),
        ("cpu:4", "dp=2,pp=2,zero=3,schedule=zbv,microbatch=1"),
    ];
    check(one_block, &plans);
}

#[test]
fn terms_of_parameters_alone() {
    // A sum over the parameters of several stages has no stage of its own yet.
    check(penalty, WHOLE.iter().chain(&CUT[..4]));
    let (cluster, pins) = CUT[4];
    let error = compiled(penalty, cluster, pins).expect_err("no plan");
    assert!(error.to_string().contains("a term that parameters alone make") && error.exit_code() == 2, "{error}");
}

/// Gradients of biases behind a scale are not taken apart by a parameter that another stage may have.
#[test]
fn a_scale_of_many_stages() {
    check(tied_scale, WHOLE.iter().chain(&CUT).chain(&[("cpu:2", "pp=2,schedule=zbv,microbatch=1")]));
}

#[test]
fn a_cast_of_the_model_is_not_its_precision() {
    check(cast, &WHOLE);
    let compiled = compiled(cast, "cpu:1", "").unwrap();
    assert_eq!(Compiled::contradiction(compiled.plan()), None);
    // What is in the program that made it alone is not compared, and no reason to refuse it.
    let findings = shardc::verify::verify(compiled.plan(), true);
    assert!(findings.iter().all(|finding| finding.ok != Some(false)), "{findings:?}");
    assert!(findings.iter().any(|finding| finding.check == "numbers" && finding.ok.is_none()), "{findings:?}");
}

#[test]
fn gradients_are_summed_in_floats_of_16_bits_at_least() {
    let model = |batch: Batch| -> Result<Model, TraceError> {
        let shape = [batch.batch as usize, batch.seq as usize];
        trace("tagger", Tagger::new, move |model, inputs| flat_labels(model, inputs, shape))
    };
    for dtype in [DType::F8e4m3, DType::Bool, DType::I64] {
        let options = Options { reduce_dtype: Some(dtype), ..Options::default() };
        let error =
            shardc::compile(&model, BATCH, &Cluster::parse("cpu:2", "h200").unwrap(), &options).expect_err("no plan");
        assert!(error.exit_code() == 2 && error.to_string().contains(dtype.name()), "{error}");
    }
}

/// Accumulators add floats: what is something else of all samples is made of all at once.
#[test]
fn what_no_microbatch_knows() {
    for loss in [farthest as Loss, counted, turned] {
        check(loss, &WHOLE);
        assert!(losses(loss, "cpu:2", "").iter().all(|loss| loss.is_finite()));
        for (cluster, pins) in [("cpu:1", "microbatch=1"), ("cpu:2", "dp=2,microbatch=1")] {
            let error = compiled(loss, cluster, pins).expect_err("no plan");
            assert_eq!(error.exit_code(), 2, "{error}");
            assert!(error.to_string().contains("microbatch"), "{error}");
        }
    }
    let error = compiled(merged, "cpu:2", "dp=2").expect_err("no plan");
    assert!(error.to_string().contains("samples become part of another dimension"), "{error}");
    // As `main` prints it.
    assert!(!format!("{error:?}").contains('{'), "{error:?}");
}

#[test]
fn numbers_of_each_sample() {
    check(given_weights, &WHOLE);
    // No operation is another one in every microbatch, and given numbers would be.
    let error = compiled(given_weights, "cpu:1", "microbatch=1").unwrap_err().to_string();
    assert!(error.contains("given along it"), "{error}");
}

/// The mask is a bias of attention, which keeps no scores, and is made once.
#[test]
fn tokens_that_attention_does_not_see() {
    let compiled = compiled(padded, "cpu:1", "microbatch=4").unwrap();
    let attention = |op: &shardc_ir::Op| matches!(op, shardc_ir::Op::Attention(op) if op.causal);
    let found = compiled.plan().graph.nodes().find(|(_, node)| attention(&node.op)).expect("attention");
    let bias = compiled.plan().graph.ty(found.1.operands[3]);
    assert_eq!(bias.shape, [BATCH.batch, 1, 1, BATCH.seq]);
    check(padded, WHOLE.iter().chain(&CUT).chain(&[("cpu:2", "cp=2,microbatch=4")]));
}

#[test]
fn attention_whose_batch_and_heads_are_one_dimension() {
    let compiled = compiled(joined_heads, "cpu:1", "microbatch=4").unwrap();
    let graph = &compiled.plan().graph;
    let attention = graph.nodes().find(|(_, node)| matches!(&node.op, shardc_ir::Op::Attention(op) if op.causal));
    let shape = &graph.ty(attention.expect("attention").1.operands[0]).shape;
    assert_eq!(shape, &[BATCH.batch, BATCH.seq, 2, WIDTH as u64 / 2]);
    check(joined_heads, WHOLE.iter().chain(&CUT));
    assert_eq!(losses(joined_heads, "cpu:1", "microbatch=4"), losses(heads, "cpu:1", "microbatch=4"));
}

#[test]
fn what_no_table_has() {
    let learning_rate = LearningRate { rate: 1e-2, min_rate: 0.0, warmup: 0, decay: Decay::Constant, steps: 1 };
    let plans = [(flat_labels as Loss, "cpu:1", "microbatch=4"), (successors, "cpu:2", "tp=2,microbatch=2")];
    for (loss, cluster, pins) in plans {
        let compiled = compiled(loss, cluster, pins).unwrap();
        let options = TrainOptions { learning_rate, seed: 1 };
        let mut trainer = compiled.start(&FromInitialisers, options).unwrap();
        for (input, number) in [("tokens", 8i64), ("tokens", -1), ("labels", -100), ("labels", 8)] {
            let mut batch = inputs(&compiled.model);
            Arc::make_mut(batch.get_mut(input).unwrap()).bytes[8..16].copy_from_slice(&number.to_le_bytes());
            let error = trainer.step(batch).unwrap_err().to_string();
            assert!(error.contains(&format!("`{input}` holds {number}, which is looked up among 8")), "{error}");
        }
        trainer.step(inputs(&compiled.model)).unwrap();
    }
}
