//! What a trace gives: the model as graphs.

use super::build::Builder;
use super::capture::{Batch, Captured, Slot, capture};
use super::constants::host_tensor;
use super::convert::Converter;
use super::error::TraceError;
use super::paths::{attribute, module_of};
use burn::backend::ir::OperationIr;
use burn::module::{Module, ParamId};
use burn::tensor::{Device, Tensor, TensorId};
use shardc_ir::ops::{Input, Parameter};
use shardc_ir::{Graph, HostTensor, Op, OutputKind, TensorType};
use std::collections::{BTreeMap, HashMap, HashSet};

/// A model: what a training step computes before it is differentiated.
#[derive(Clone, Debug)]
pub struct Model {
    /// Its name.
    pub name: String,
    /// The loss and the other results, from inputs and parameters, on one device.
    pub graph: Graph,
    /// One result per parameter, of its name: its initial value. Parameters that the module was
    /// given as data are in [`values`](Self::values) instead.
    pub init: Graph,
    /// Given data, by the name of the parameter.
    pub values: BTreeMap<String, HostTensor>,
    /// What a step is given, by name, in the order in which the loss asked for it.
    pub inputs: Vec<(String, TensorType)>,
    /// The number of trained numbers, shared ones once.
    pub parameters: u64,
    /// Parameters that no result depends on; they are leaves of the graph all the same.
    pub unused: Vec<String>,
    /// Further names of shared parameters, each with the name under which it is in the graph.
    pub tied: Vec<(String, String)>,
}

/// Traces a module. `init` makes it on a device, `loss` computes a scalar from the inputs that it
/// asks the [`Batch`] for, with global shapes. Nothing is computed and no parameter is held.
///
/// # Errors
///
/// See [`TraceError`]; operations that are not supported are all listed at once.
pub fn trace<M: Module>(
    name: &str,
    init: impl FnOnce(&Device) -> M,
    loss: impl FnOnce(&M, &mut Batch) -> Tensor<1>,
) -> Result<Model, TraceError> {
    let captured = capture(init, loss)?;
    let mut makers: HashMap<TensorId, usize> = HashMap::new();
    for (index, operation) in captured.operations.iter().enumerate() {
        if !matches!(operation, OperationIr::Init(_)) {
            makers.extend(operation.outputs().map(|tensor| (tensor.id, index)));
        }
    }
    let slots = Slots::new(&captured.slots);
    let (mut forward, unused) = forward_graph(name, &captured, &makers, &slots)?;
    let mut init = init_graph(&captured, &makers, &slots)?;
    let mut unsupported = std::mem::take(&mut init.unsupported);
    unsupported.append(&mut forward.unsupported);
    let mut seen = Vec::new();
    unsupported.retain(|op| !seen.contains(op) && (seen.push(op.clone()), true).1);
    if !unsupported.is_empty() {
        return Err(TraceError::Unsupported(unsupported));
    }
    let mut values = std::mem::take(&mut forward.values);
    values.append(&mut init.values);
    let graph = finish(forward.b)?;
    check_names(&graph)?;
    let trained = graph.leaves().filter(|(_, node)| matches!(&node.op, Op::Parameter(p) if !p.frozen));
    let parameters = trained.map(|(value, _)| graph.ty(value).elements()).sum();
    let inputs = graph.leaves().filter_map(|(value, node)| match &node.op {
        Op::Input(input) if captured.inputs.iter().any(|(name, _, _)| *name == input.name) => {
            Some((input.name.clone(), graph.ty(value).clone()))
        }
        _ => None,
    });
    let inputs = inputs.collect();
    Ok(Model {
        name: name.to_string(),
        init: finish(init.b)?,
        graph,
        values,
        inputs,
        parameters,
        unused,
        tied: slots.tied,
    })
}

/// Refuses a name that a parameter and an input of the step share: what is given to either is given by it.
fn check_names(graph: &Graph) -> Result<(), TraceError> {
    let inputs = graph.leaves().filter_map(|(_, node)| match &node.op {
        Op::Input(input) => Some(input.name.as_str()),
        _ => None,
    });
    let inputs: HashSet<&str> = inputs.collect();
    for (_, node) in graph.leaves() {
        if let Op::Parameter(Parameter { name, .. }) = &node.op
            && inputs.contains(name.as_str())
        {
            let message =
                format!("`{name}` is the name of a parameter and of an input of the step; rename one of them");
            return Err(TraceError::Module(message));
        }
    }
    Ok(())
}

/// The parameters, shared ones once.
struct Slots {
    /// Name, tensor, frozen.
    owners: Vec<(String, TensorId, bool)>,
    /// The name of every tensor that is a parameter.
    names: BTreeMap<TensorId, String>,
    tied: Vec<(String, String)>,
}

impl Slots {
    fn new(all: &[Slot]) -> Self {
        let mut slots = Self { owners: Vec::new(), names: BTreeMap::new(), tied: Vec::new() };
        let mut known: HashMap<ParamId, usize> = HashMap::new();
        for slot in all {
            let shared = known.get(&slot.param).copied();
            let shared = shared.or_else(|| slots.owners.iter().position(|(_, tensor, _)| *tensor == slot.tensor));
            let owner = shared.unwrap_or(slots.owners.len());
            if shared.is_none() {
                slots.owners.push((slot.name.clone(), slot.tensor, slot.frozen));
            } else {
                slots.tied.push((slot.name.clone(), slots.owners[owner].0.clone()));
            }
            known.insert(slot.param, owner);
            slots.names.insert(slot.tensor, slots.owners[owner].0.clone());
        }
        slots
    }
}

/// The operations that `roots` depend on, in program order, down to the tensors that `stop` says.
fn ancestors(
    operations: &[OperationIr],
    makers: &HashMap<TensorId, usize>,
    roots: impl IntoIterator<Item = TensorId>,
    stop: impl Fn(TensorId) -> bool,
) -> Vec<usize> {
    let mut stack: Vec<TensorId> = roots.into_iter().collect();
    let mut seen: HashSet<usize> = HashSet::new();
    while let Some(tensor) = stack.pop() {
        let Some(index) = makers.get(&tensor).copied().filter(|_| !stop(tensor)) else { continue };
        if seen.insert(index) {
            stack.extend(operations[index].inputs().map(|tensor| tensor.id));
        }
    }
    let mut order: Vec<usize> = seen.into_iter().collect();
    order.sort_unstable();
    order
}

fn forward_graph<'a>(
    name: &str,
    captured: &'a Captured,
    makers: &HashMap<TensorId, usize>,
    slots: &Slots,
) -> Result<(Converter<'a>, Vec<String>), TraceError> {
    let mut converter = Converter::new(name, &captured.values, true);
    let inputs: HashSet<TensorId> = captured.inputs.iter().map(|(_, _, id)| *id).collect();
    let roots = captured.results.iter().map(|(_, id)| *id);
    let order = ancestors(&captured.operations, makers, roots.clone(), |tensor| {
        inputs.contains(&tensor) || slots.names.contains_key(&tensor)
    });
    let operations: Vec<&OperationIr> = order.iter().map(|index| &captured.operations[*index]).collect();
    let means = captured.slots.iter().filter_map(|slot| {
        let path = slot.name.strip_suffix("running_mean").map(|path| path.trim_end_matches('.'))?;
        captured.norms.iter().find(|(norm, _)| norm == path).map(|(_, momentum)| (slot.tensor, *momentum))
    });
    converter.trained_norms = means.collect();
    // Some may have a row for each token of a sample.
    let sizes = || captured.inputs.iter().filter_map(|(_, ty, _)| ty.shape.first().copied());
    converter.batch = sizes().min().filter(|batch| *batch > 0 && sizes().all(|size| size.is_multiple_of(*batch)));
    for (name, ty, id) in &captured.inputs {
        let value = converter.b.emit(Input { name: name.clone() }, &[], std::slice::from_ref(ty))?;
        converter.map.insert(*id, value);
    }
    let types = parameter_types(captured, makers, slots)?;
    let mut leaves = HashMap::new();
    for ((name, _, frozen), ty) in slots.owners.iter().zip(types) {
        converter.b.path = module_of(name).to_string();
        let leaf = Parameter { name: name.clone(), frozen: *frozen };
        leaves.insert(name.clone(), converter.b.emit(leaf, &[], &[ty])?);
    }
    for (tensor, name) in &slots.names {
        converter.map.insert(*tensor, leaves[name]);
    }
    let paths = attribute(&operations, &slots.names);
    for (operation, path) in operations.iter().zip(&paths) {
        converter.stream_name = path.clone();
        converter.convert(operation, path)?;
    }
    let read: HashSet<&String> = operations
        .iter()
        .flat_map(|op| op.inputs().map(|tensor| tensor.id))
        .chain(roots)
        .filter_map(|tensor| slots.names.get(&tensor))
        .collect();
    let unused = slots.owners.iter().filter(|(name, _, _)| !read.contains(name)).map(|(name, _, _)| name.clone());
    let unused = unused.collect();
    if converter.unsupported.is_empty() {
        declare_results(&mut converter, captured)?;
        for (tensor, value) in std::mem::take(&mut converter.statistics) {
            let name = &slots.names[&tensor];
            converter.b.graph.output(name.clone(), value, OutputKind::Update(leaves[name]));
        }
    }
    Ok((converter, unused))
}

fn declare_results(converter: &mut Converter<'_>, captured: &Captured) -> Result<(), TraceError> {
    converter.b.path = String::new();
    for (name, id) in &captured.results {
        let missing = || TraceError::Module(format!("result `{name}` is not computed"));
        let mut value = *converter.map.get(id).ok_or_else(missing)?;
        if name == "loss" {
            if converter.b.ty(value).elements() != 1 {
                let ty = converter.b.ty(value);
                return Err(TraceError::Module(format!("the loss is {ty}; it must be one number (`.mean()`)")));
            }
            value = converter.b.reshape(value, &[])?;
        }
        converter.b.graph.output(name.clone(), value, OutputKind::Result);
    }
    Ok(())
}

/// The types of the parameters. All floats are kept in f32.
fn parameter_types(
    captured: &Captured,
    makers: &HashMap<TensorId, usize>,
    slots: &Slots,
) -> Result<Vec<TensorType>, TraceError> {
    let scratch = Converter::new("types", &captured.values, false);
    let mut types = Vec::new();
    for (name, tensor, _) in &slots.owners {
        let missing = || TraceError::Module(format!("parameter `{name}` has neither an initialiser nor data"));
        let ty = match (captured.values.get(tensor), makers.get(tensor)) {
            (Some(data), _) => host_tensor_type(data)
                .ok_or_else(|| TraceError::Module(format!("parameter `{name}` is of a strange type")))?,
            (None, Some(index)) => {
                let out = captured.operations[*index].outputs().find(|out| out.id == *tensor).ok_or_else(missing)?;
                scratch.ty(out)?
            }
            (None, None) => return Err(missing()),
        };
        types.push(ty);
    }
    Ok(types)
}

fn host_tensor_type(data: &burn::tensor::TensorData) -> Option<TensorType> {
    let shape: Vec<u64> = data.shape().iter().map(|size| *size as u64).collect();
    let dtype = super::constants::dtype(data.dtype())?;
    Some(TensorType::new(if dtype.is_float() { shardc_ir::DType::F32 } else { dtype }, shape))
}

fn init_graph<'a>(
    captured: &'a Captured,
    makers: &HashMap<TensorId, usize>,
    slots: &Slots,
) -> Result<Converter<'a>, TraceError> {
    let mut converter = Converter::new("init", &captured.values, false);
    let mut done: HashSet<usize> = HashSet::new();
    for (name, tensor, _) in &slots.owners {
        if let Some(data) = captured.values.get(tensor) {
            let strange = || TraceError::Module(format!("parameter `{name}` is of a strange type"));
            converter.values.insert(name.clone(), host_tensor(data).ok_or_else(strange)?);
            continue;
        }
        converter.stream_name = name.clone();
        for index in ancestors(&captured.operations, makers, [*tensor], |_| false) {
            if done.insert(index) {
                converter.convert(&captured.operations[index], module_of(name))?;
            }
        }
        if let Some(value) = converter.map.get(tensor) {
            converter.b.graph.output(name.clone(), *value, OutputKind::Result);
        }
    }
    Ok(converter)
}

/// Drops what nothing reads.
fn finish(builder: Builder) -> Result<Graph, TraceError> {
    let rebuilt = builder.graph.rebuild(|_, _, _| Ok(false));
    rebuilt.map_err(|error| TraceError::Bug { path: String::new(), error })
}
