//! Our gradients of whole models against Burn's autodiff, in f32: every family of the zoo in a tiny size,
//! traced and raised as `shardc` does it.

#[path = "common/derivatives.rs"]
mod derivatives;

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::tensor::{Device, Gradients, Int, Tensor, TensorData};
use derivatives::{compare, ours};
use shardc_ir::{DType, HostTensor, TensorType};
use shardc_models::zoo::{
    Config, Gpt2Config, LlamaConfig, MixerConfig, MoeConfig, ResNetConfig, RopeScaling, TwoTowerConfig, UNetConfig,
    build_config, causal_loss, in_batch_loss, pixel_loss,
};
use shardc_models::{Model, trace};
use shardc_passes::raise::raise;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

const BATCH: usize = 2;
const SEQ: usize = 6;
const VOCABULARY: usize = 24;

/// Burn's generator is one for all threads: one test at a time draws from it, from its beginning, so that every run
/// compares the same numbers.
static GENERATOR: Mutex<()> = Mutex::new(());

fn seeded(device: &Device) -> MutexGuard<'static, ()> {
    let drawing = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    device.seed(1);
    drawing
}

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
        // Running statistics are held beside the parameters and have no gradient.
        let gradient = tensor.grad(self.gradients);
        assert!(gradient.is_some() || name.contains(".running_"), "{name} is used");
        if let Some(gradient) = gradient {
            self.found.insert(name.clone(), gradient.into_data().try_to_vec().unwrap());
        }
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
        let _drawing = seeded(&device);
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

/// Numbers for an input: integers below `below`, floats between -1 and 1.
fn given(ty: &TensorType, below: usize) -> HostTensor {
    let count = ty.elements() as usize;
    match ty.dtype {
        DType::I64 => HostTensor::from_i64(
            ty.shape.clone(),
            &(0..count).map(|at| ((at * 7 + 3) % below) as i64).collect::<Vec<_>>(),
        ),
        _ => HostTensor::from_f32(
            ty.shape.clone(),
            &(0..count).map(|at| (at * 37 % 101) as f32 / 50.0 - 1.0).collect::<Vec<_>>(),
        ),
    }
}

fn sizes<const D: usize>(host: &HostTensor) -> [usize; D] {
    std::array::from_fn(|dim| host.ty.shape[dim] as usize)
}

fn floats<const D: usize>(host: &HostTensor, device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(derivatives::floats(host), sizes::<D>(host)), device)
}

fn ints<const D: usize>(host: &HostTensor, device: &Device) -> Tensor<D, Int> {
    let numbers: Vec<i64> = host.bytes.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect();
    Tensor::from_data(TensorData::new(numbers, sizes::<D>(host)), device)
}

/// The loss of a model of the zoo in Burn, from its inputs by name, and traced.
macro_rules! check_model {
    ($config:expr, $variant:ident, $below:expr, |$model:ident, $inputs:ident, $device:ident| $loss:expr) => {{
        let (config, $device) = ($config, Device::flex().autodiff());
        let _drawing = seeded(&$device);
        let traced = build_config("model", &Config::$variant(config.clone()), BATCH, SEQ).unwrap();
        let $inputs: BTreeMap<String, HostTensor> =
            traced.inputs.iter().map(|(name, ty)| (name.clone(), given(ty, $below))).collect();
        let $model = config.init(&$device);
        let loss = $loss;
        check(&$model, loss, &traced, $inputs);
    }};
}

fn cross_entropy(logits: Tensor<2>, labels: Tensor<1, Int>) -> Tensor<1> {
    CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, labels)
}

#[test]
fn mlp_mixer() {
    let config = MixerConfig { patch: 2, size: 4, classes: 5, ..MixerConfig::new([2, 8, 12, 16]) };
    check_model!(config, Mixer, 5, |model, inputs, device| {
        cross_entropy(model.forward(floats(&inputs["images"], &device)), ints(&inputs["labels"], &device))
    });
}

#[test]
fn resnet() {
    let config = ResNetConfig { stages: vec![2, 1], width: 4, classes: 5, size: 24 };
    check_model!(config, ResNet, 5, |model, inputs, device| {
        cross_entropy(model.forward(floats(&inputs["images"], &device)), ints(&inputs["labels"], &device))
    });
}

#[test]
fn unet() {
    let config = UNetConfig { depth: 2, width: 4, groups: 2, channels: 3, classes: 3, size: 8 };
    check_model!(config, UNet, 3, |model, inputs, device| {
        pixel_loss(model.forward(floats(&inputs["images"], &device)), ints(&inputs["masks"], &device))
    });
}

#[test]
fn two_tower() {
    // The width is the batch, which nothing may confuse.
    let config = TwoTowerConfig { users: 9, items: 9, width: BATCH, hidden: vec![6, BATCH], temperature: 0.5 };
    check_model!(config, TwoTower, 9, |model, inputs, device| {
        in_batch_loss(model.forward(ints(&inputs["users"], &device), ints(&inputs["items"], &device)))
    });
}

#[test]
fn mixture_of_experts() {
    // Groups of three tokens, so that some find no slot.
    let base = LlamaConfig { init_std: 0.3, ..LlamaConfig::new([2, 16, 2, 1, 24, VOCABULARY]) };
    let config = MoeConfig { group: 3, capacity: 0.7, ..MoeConfig::new(base, 4, 2) };
    check_model!(config, Moe, VOCABULARY, |model, inputs, device| {
        let made = model.forward(ints(&inputs["input_ids"], &device));
        model.objective(made, ints(&inputs["labels"], &device))
    });
}
