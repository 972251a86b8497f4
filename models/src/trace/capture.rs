//! Runs a module on Burn's capture device and collects what it did.

use super::error::TraceError;
use super::paths::module_of;
use super::quiet::{self, Caught};
use burn::backend::Capture;
use burn::backend::ir::OperationIr;
use burn::module::{Flag, Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Bool, Device, Int, Tensor, TensorData, TensorId};
use shardc_ir::ops::{SAMPLE, STEP};
use shardc_ir::{DType, TensorType};
use std::any::Any;
use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;

/// The inputs of one step, and its results beside the loss. The loss function asks it for every
/// tensor of the batch, by name and global shape, and records what it wants to see after a step.
pub struct Batch {
    device: Device,
    pub(super) inputs: Vec<(String, TensorType, TensorId)>,
    pub(super) results: Vec<(String, TensorId)>,
    // Results are kept alive: a tensor that is dropped may be overwritten in place.
    kept: Vec<Box<dyn Any>>,
    pub(super) mistakes: Vec<String>,
}

/// The id by which the capture device knows a tensor.
macro_rules! id {
    ($tensor:expr) => {
        $tensor.try_into_primitive::<Capture>().map(|tensor| tensor.id()).map_err(|error| format!("{error:?}"))
    };
}

impl Batch {
    fn new(device: &Device) -> Self {
        let (inputs, results, kept, mistakes) = Default::default();
        Self { device: device.clone(), inputs, results, kept, mistakes }
    }

    /// An input of floating-point numbers (f32).
    pub fn float<const D: usize>(&mut self, name: &str, shape: [usize; D]) -> Tensor<D> {
        let tensor = Tensor::<D>::empty(shape, &self.device);
        let id = id!(tensor.clone());
        self.declare(name, DType::F32, &shape, id);
        tensor
    }

    /// An input of 64-bit integers: token ids, labels.
    pub fn int<const D: usize>(&mut self, name: &str, shape: [usize; D]) -> Tensor<D, Int> {
        let tensor = Tensor::<D, Int>::empty(shape, &self.device);
        let id = id!(tensor.clone());
        self.declare(name, DType::I64, &shape, id);
        tensor
    }

    /// An input of booleans: a mask.
    pub fn bool<const D: usize>(&mut self, name: &str, shape: [usize; D]) -> Tensor<D, Bool> {
        let tensor = Tensor::<D, Bool>::empty(shape, &self.device);
        let id = id!(tensor.clone());
        self.declare(name, DType::Bool, &shape, id);
        tensor
    }

    fn declare(&mut self, name: &str, dtype: DType, shape: &[usize], id: Result<TensorId, String>) {
        if self.inputs.iter().any(|(known, _, _)| known == name) {
            self.mistakes.push(format!("input `{name}` is declared twice"));
        }
        if name.is_empty() {
            self.mistakes.push("an input has an empty name: give it one by which it is fed".to_string());
        }
        if [STEP, SAMPLE].contains(&name) {
            self.mistakes.push(format!("input `{name}`: the training step has one of this name; give yours another"));
        }
        let shape: Vec<u64> = shape.iter().map(|size| *size as u64).collect();
        match id {
            Ok(id) => self.inputs.push((name.to_string(), TensorType::new(dtype, shape), id)),
            Err(error) => self.mistakes.push(format!("input `{name}`: {error}")),
        }
    }

    /// Declares a result beside the loss, such as the logits.
    pub fn result<const D: usize>(&mut self, name: &str, tensor: Tensor<D>) {
        if name == "loss" || self.results.iter().any(|(known, _)| known == name) {
            self.mistakes.push(format!("result `{name}` is declared twice"));
        }
        match id!(tensor.clone()) {
            Ok(id) => self.results.push((name.to_string(), id)),
            Err(error) => self.mistakes.push(format!("result `{name}`: {error}")),
        }
        self.kept.push(Box::new(tensor));
    }

    /// The device on which the module lives, for tensors that the loss makes itself.
    pub fn device(&self) -> Device {
        self.device.clone()
    }
}

/// One parameter as the module holds it.
pub(super) struct Slot {
    /// The module path.
    pub name: String,
    /// Burn's identity of the parameter: equal where a parameter is shared.
    pub param: ParamId,
    /// The tensor.
    pub tensor: TensorId,
    /// Whether it is not trained.
    pub frozen: bool,
}

/// What a capture recorded.
pub(super) struct Captured {
    /// The operations in order.
    pub operations: Vec<OperationIr>,
    /// The data of tensors that were given, not computed.
    pub values: BTreeMap<TensorId, TensorData>,
    /// The parameters in the order of the module's fields.
    pub slots: Vec<Slot>,
    /// The paths of batch normalizations that train, each with the share of a batch in its running statistics.
    pub norms: Vec<(String, f64)>,
    /// The inputs.
    pub inputs: Vec<(String, TensorType, TensorId)>,
    /// The results, the loss first.
    pub results: Vec<(String, TensorId)>,
}

#[derive(Default)]
struct Parameters {
    path: Vec<String>,
    containers: Vec<String>,
    slots: Vec<Slot>,
    dropouts: Vec<(String, bool)>,
    noises: Vec<(String, bool)>,
    slopes: Vec<String>,
    norms: Vec<(String, bool)>,
    mistakes: Vec<String>,
}

impl Parameters {
    fn push(&mut self, param: ParamId, tensor: Result<TensorId, String>, frozen: bool) {
        let name = self.path.join(".");
        match tensor {
            Ok(tensor) => self.slots.push(Slot { name, param, tensor, frozen }),
            Err(error) => self.mistakes.push(format!("parameter `{name}`: {error}")),
        }
    }
}

impl ModuleVisitor for Parameters {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.push(param.id, id!(param.base()), !is_trained(param));
    }
    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.push(param.id, id!(param.base()), true);
    }
    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.push(param.id, id!(param.base()), true);
    }
    fn visit_flag(&mut self, flag: &Param<Flag>) {
        let (path, acts) = (self.path[..self.path.len().saturating_sub(1)].join("."), flag.is_enabled());
        match self.containers.last().map(String::as_str) {
            // Burn's batch normalization takes the statistics of the batch only under Burn's autodiff.
            Some("Struct:BatchNorm") => self.norms.push((path, acts)),
            // What Burn's own layers draw at random they draw under Burn's autodiff alone, which capture does not have.
            Some("Struct:Dropout") => self.dropouts.push((path, acts)),
            Some("Struct:GaussianNoise") => self.noises.push((path, acts)),
            Some("Struct:RRelu") if acts => self.slopes.push(path),
            _ => {}
        }
    }
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.push(name.to_string());
        self.containers.push(container.to_string());
    }
    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
        self.containers.pop();
    }
}

/// Whether a parameter is to be trained. Burn keeps that privately and tells it only to a tensor
/// that can have gradients, so a stand-in is asked.
fn is_trained<const D: usize>(param: &Param<Tensor<D>>) -> bool {
    let (id, _, mapper) = param.clone().consume();
    let stand_in = Tensor::<D>::zeros([1; D], &Device::flex());
    Param::from_mapped_value(id, stand_in, mapper).train().base().is_require_grad()
}

/// A number of each of Burn's layers of a kind, in the order in which layers are visited; `None` if they are not `count`.
/// No visitor is told such numbers, so they are read from what the module prints of itself to its authors (what it
/// displays leaves out parts of Burn's own layers).
fn printed_numbers(printed: &str, layer: &str, field: &str, count: usize) -> Option<Vec<f64>> {
    let (opening, field) = (format!("{layer} {{ "), format!(" {field}: "));
    let starts = printed.match_indices(&opening).filter(|(at, _)| {
        let before = printed[..*at].chars().next_back();
        !before.is_some_and(|letter| letter.is_alphanumeric() || letter == '_')
    });
    let number = |rest: &str| {
        let at = rest.find(&field)? + field.len();
        rest[at..].split([',', ' ', '}']).next()?.parse().ok().filter(|number: &f64| !number.is_nan())
    };
    let numbers: Option<Vec<f64>> = starts.map(|(at, _)| number(&printed[at..])).collect();
    numbers.filter(|numbers| numbers.len() == count)
}

/// The paths of Burn's layers of a kind that would draw something, given all of them and whether they act.
fn silent(printed: &str, layer: &str, field: &str, layers: Vec<(String, bool)>) -> Vec<String> {
    let numbers = printed_numbers(printed, layer, field, layers.len());
    let draws = |index: usize| numbers.as_ref().is_none_or(|numbers| numbers[index] > 0.0);
    let silent = layers.into_iter().enumerate().filter(|(index, (_, acts))| *acts && draws(*index));
    silent.map(|(_, (path, _))| path).collect()
}

/// The batch normalizations that train, with the share of a batch in their running statistics.
fn trained_norms(printed: &str, norms: Vec<(String, bool)>) -> Result<Vec<(String, f64)>, String> {
    let numbers = printed_numbers(printed, "BatchNorm", "momentum", norms.len());
    let trained = norms.into_iter().enumerate().filter(|(_, (_, acts))| *acts);
    let momentum = |index: usize, path: &str| match &numbers {
        Some(numbers) => Ok(numbers[index]),
        None => Err(format!(
            "the momentum of the batch normalization `{path}` is not known, since `{{:?}}` of the module does not show it: \
             derive `Debug` for the structs that hold it",
        )),
    };
    trained.map(|(index, (path, _))| Ok((path.clone(), momentum(index, &path)?))).collect()
}

/// What a module did wrong, where, and after which layer: in the words of its author where Burn's are those of its
/// capture.
fn explained(caught: Caught, operations: &[OperationIr], slots: &[Slot]) -> String {
    let said = if caught.message.contains("has no concrete value") { READS } else { caught.message.trim_end() };
    let read = |operation: &OperationIr| {
        let mut inputs = operation.inputs();
        inputs.find_map(|tensor| slots.iter().find(|slot| slot.tensor == tensor.id))
    };
    let last = operations.iter().rev().find_map(read).map(|slot| module_of(&slot.name));
    let last =
        last.filter(|path| !path.is_empty()).map(|path| format!("the last layer that had run by then is `{path}`"));
    let place = caught.place.map(|place| format!("at {place}"));
    [Some(said.to_string()), place, last].into_iter().flatten().collect::<Vec<_>>().join("; ")
}

/// What a module does that needs numbers while there are none.
const READS: &str = "it reads the numbers of a tensor (`into_data`, `into_scalar`, and in Burn `one_hot`, \
     `mask_select`, `argwhere` and `nonzero`, some losses to check them), but nothing is computed while a model is \
     traced: compute with the tensor itself, as with a mask in place of the elements that it selects, or \
     `ids.equal(classes)` in place of `one_hot`";

/// Runs constructor and loss on a capture device.
pub(super) fn capture<M: Module>(
    init: impl FnOnce(&Device) -> M,
    loss: impl FnOnce(&M, &mut Batch) -> Tensor<1>,
) -> Result<Captured, TraceError> {
    let device = Device::capture();
    let (mut batch, mut parameters) = (Batch::new(&device), Parameters::default());
    let (mut dropouts, mut noises, mut norms) = (Vec::new(), Vec::new(), Ok(Vec::new()));
    let mut panic = None;
    let captured = device.capture_scope(|scope| {
        // A module that is used wrongly panics inside Burn; its message is the user's error.
        let run = quiet::catch(AssertUnwindSafe(|| {
            let mut model = init(&device);
            if model.devices().iter().any(|other| *other != device) {
                model = model.to_device(&device);
            }
            model.visit(&mut parameters);
            if !(parameters.dropouts.is_empty() && parameters.noises.is_empty() && parameters.norms.is_empty()) {
                let printed = format!("{model:?}");
                dropouts = silent(&printed, "Dropout", "prob", std::mem::take(&mut parameters.dropouts));
                noises = silent(&printed, "GaussianNoise", "std", std::mem::take(&mut parameters.noises));
                norms = trained_norms(&printed, std::mem::take(&mut parameters.norms));
            }
            let loss = loss(&model, &mut batch);
            match id!(loss.clone()) {
                Ok(id) => batch.results.insert(0, ("loss".to_string(), id)),
                Err(error) => batch.mistakes.push(format!("the loss: {error}")),
            }
            let mut outputs: Vec<TensorId> = Vec::new();
            for (_, id) in &batch.results {
                if !outputs.contains(id) {
                    outputs.push(*id);
                }
            }
            outputs
        }));
        let outputs = run.unwrap_or_else(|caught| {
            panic = Some(caught);
            Vec::new()
        });
        scope.complete([], outputs)
    });
    if let Some(caught) = panic {
        let operations = captured.map(|captured| captured.graph.operations).unwrap_or_default();
        return Err(TraceError::Module(explained(caught, &operations, &parameters.slots)));
    }
    let captured = captured.map_err(|error| TraceError::Module(error.to_string()))?;
    if !dropouts.is_empty() {
        return Err(TraceError::SilentDropout(dropouts));
    }
    noises.append(&mut parameters.slopes);
    if !noises.is_empty() {
        return Err(TraceError::SilentNoise(noises));
    }
    if let Some(mistake) = parameters.mistakes.into_iter().chain(batch.mistakes).next() {
        return Err(TraceError::Module(mistake));
    }
    Ok(Captured {
        operations: captured.graph.operations,
        values: captured.values,
        slots: parameters.slots,
        norms: norms.map_err(TraceError::Module)?,
        inputs: batch.inputs,
        results: batch.results,
    })
}
