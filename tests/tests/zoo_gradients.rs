//! Our gradients of whole models against Burn's autodiff, in f32: every family of the zoo in a tiny size,
//! traced and raised as `shardc` does it, and a model of another kind.

#[path = "common/derivatives.rs"]
mod derivatives;

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Gradients, Int, Tensor, TensorData};
use derivatives::{compare, ours};
use shardc_ir::HostTensor;
use shardc_models::zoo::{Gpt2Config, LlamaConfig, RopeScaling, causal_loss};
use shardc_models::{Batch, Model, trace};
use shardc_passes::raise::raise;
use std::collections::BTreeMap;

const BATCH: usize = 2;
const SEQ: usize = 6;
const VOCABULARY: usize = 24;

/// The parameters of a module by name: their values, and their gradients.
struct Parameters<'a> {
    path: Vec<String>,
    gradients: &'a Gradients,
    values: BTreeMap<String, HostTensor>,
    found: BTreeMap<String, Vec<f32>>,
}

impl ModuleVisitor for Parameters<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let (name, tensor) = (self.path.join("."), param.val());
        let shape: Vec<u64> = tensor.dims().iter().map(|size| *size as u64).collect();
        let gradient = tensor.grad(self.gradients).expect("every parameter is used");
        self.found.insert(name.clone(), gradient.into_data().try_to_vec().unwrap());
        let values: Vec<f32> = tensor.into_data().try_to_vec().unwrap();
        self.values.insert(name, HostTensor::from_f32(shape, &values));
    }
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_string());
    }
    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }
}

/// Compares the gradients of a loss that Burn computed with those of the traced model.
fn check<M: Module>(module: &M, loss: Tensor<1>, model: &Model, inputs: BTreeMap<String, HostTensor>) {
    let gradients = loss.backward();
    let (values, found) = (inputs, BTreeMap::new());
    let mut theirs = Parameters { path: Vec::new(), gradients: &gradients, values, found };
    module.visit(&mut theirs);
    let raised = raise(&model.graph).unwrap().0;
    let ours = ours(&raised, &theirs.values);
    assert!(ours.keys().eq(theirs.found.keys()), "{:?}", ours.keys());
    compare(&model.name, &ours, &theirs.found);
}

/// Tokens, and labels of which some do not count.
fn tokens() -> (Vec<i64>, Vec<i64>) {
    let ids = (0..BATCH * SEQ).map(|at| (at * 7 + at * at) as i64 % VOCABULARY as i64);
    let labels = (0..BATCH * SEQ).map(|at| if at % 5 == 3 { -100 } else { (at * 11 + 5) as i64 % VOCABULARY as i64 });
    (ids.collect(), labels.collect())
}

/// The same loss of a language model in Burn and traced.
macro_rules! check_language_model {
    ($name:expr, $config:expr) => {{
        let config = $config;
        let device = Device::flex().autodiff();
        let (ids, labels) = tokens();
        let shape = [BATCH, SEQ];
        let tensor = |numbers: &Vec<i64>| Tensor::<2, Int>::from_data(TensorData::new(numbers.clone(), shape), &device);
        let module = config.init(&device);
        let loss = causal_loss(module.forward(tensor(&ids)), tensor(&labels));
        let model = trace($name, |device| config.init(device), |model, batch| model.loss(batch, BATCH, SEQ)).unwrap();
        let whole = |numbers: &[i64]| HostTensor::from_i64([BATCH as u64, SEQ as u64], numbers);
        let inputs = [("input_ids", whole(&ids)), ("labels", whole(&labels))];
        check(&module, loss, &model, inputs.map(|(name, value)| (name.to_string(), value)).into());
    }};
}

#[test]
fn gpt2() {
    let config = Gpt2Config { vocabulary: VOCABULARY, init_std: 0.3, ..Gpt2Config::new(2, 16, 4, 8) };
    check_language_model!("gpt2", config);
}

fn llama_config(tied: bool, scaled: bool) -> LlamaConfig {
    // Wavelengths on both sides of the scaling's borders, and between them.
    let scaling = RopeScaling { factor: 8.0, low: 1.0, high: 4.0, original: 32.0 };
    let rope_scaling = scaled.then_some(scaling);
    let sizes = [2, 32, 4, 2, 24, VOCABULARY];
    LlamaConfig { tied, rope_scaling, rope_theta: 100.0, init_std: 0.3, ..LlamaConfig::new(sizes) }
}

#[test]
fn llama_with_grouped_heads() {
    check_language_model!("llama", llama_config(false, false));
}

#[test]
fn llama_with_a_tied_head_and_scaled_rotary_frequencies() {
    check_language_model!("tied llama", llama_config(true, true));
}

/// Mixes the tokens, then the channels (Tolstikhin et al., "MLP-Mixer", 2021).
#[derive(Module, Debug)]
struct Mixer {
    embed: Linear,
    token_norm: LayerNorm,
    token_up: Linear,
    token_down: Linear,
    channel_norm: LayerNorm,
    channel_up: Linear,
    channel_down: Linear,
    head: Linear,
}

const PATCHES: usize = 4;
const PATCH_WIDTH: usize = 6;
const CLASSES: usize = 5;

fn mixer(device: &Device) -> Mixer {
    let linear = |from, to| LinearConfig::new(from, to).init(device);
    let norm = || LayerNormConfig::new(8).init(device);
    Mixer {
        embed: linear(PATCH_WIDTH, 8),
        token_norm: norm(),
        token_up: linear(PATCHES, 12),
        token_down: linear(12, PATCHES),
        channel_norm: norm(),
        channel_up: linear(8, 16),
        channel_down: linear(16, 8),
        head: linear(8, CLASSES),
    }
}

impl Mixer {
    fn loss(&self, pictures: Tensor<3>, labels: Tensor<1, Int>) -> Tensor<1> {
        let x = self.embed.forward(pictures);
        let y = self.token_norm.forward(x.clone()).swap_dims(1, 2);
        let x = x + self.token_down.forward(gelu(self.token_up.forward(y))).swap_dims(1, 2);
        let y = self.channel_norm.forward(x.clone());
        let x = x + self.channel_down.forward(gelu(self.channel_up.forward(y)));
        let [batch, _, width] = x.dims();
        let logits = self.head.forward(x.mean_dim(1).reshape([batch, width]));
        CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, labels)
    }
}

#[test]
fn mlp_mixer() {
    const PICTURES: usize = 3;
    let shape = [PICTURES, PATCHES, PATCH_WIDTH];
    let pixels: Vec<f32> = (0..shape.iter().product()).map(|at| ((at * 37 % 101) as f32 - 50.0) / 50.0).collect();
    let labels = [1i64, 4, 0];
    let device = Device::flex().autodiff();
    let module = mixer(&device);
    let loss = module.loss(
        Tensor::from_data(TensorData::new(pixels.clone(), shape), &device),
        Tensor::from_data(TensorData::new(labels.to_vec(), [PICTURES]), &device),
    );
    let traced = |module: &Mixer, batch: &mut Batch| {
        let (pictures, labels) = (batch.float("pictures", shape), batch.int("labels", [PICTURES]));
        module.loss(pictures, labels)
    };
    let model = trace("mixer", mixer, traced).unwrap();
    let pictures = HostTensor::from_f32(shape.map(|size| size as u64), &pixels);
    let inputs = [("pictures", pictures), ("labels", HostTensor::from_i64([PICTURES as u64], &labels))];
    check(&module, loss, &model, inputs.map(|(name, value)| (name.to_string(), value)).into());
}
