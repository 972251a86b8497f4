//! Runs a whole graph, or what one value of it needs, on one device and without a plan.

use super::kernels::{self, Context, View, ViewMut};
use super::memory::Array;
use crate::RuntimeError;
use shardc_ir::ops::{Cast, OpDef, Part, Random, State};
use shardc_ir::{FactorKind, Graph, HostTensor, NodeId, Op, TensorType, ValueId};
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

/// Every output of a graph by name. `leaves` holds inputs, parameters and states by name; a state
/// that is not given starts at its number. Memory is freed after a value's last use.
///
/// # Errors
/// A leaf that is missing or of another type, and an operation without a kernel for its types.
pub fn interpret(
    graph: &Graph,
    leaves: &BTreeMap<String, HostTensor>,
) -> Result<BTreeMap<String, HostTensor>, RuntimeError> {
    let context = Context { threads: super::cores() };
    let live = graph.live();
    let mut uses: HashMap<ValueId, usize> = HashMap::new();
    let live_nodes = || graph.nodes().filter(|(id, _)| live[id.as_u32() as usize]);
    for (_, node) in live_nodes() {
        node.operands.iter().for_each(|value| *uses.entry(*value).or_default() += 1);
    }
    graph.outputs.iter().for_each(|output| *uses.entry(output.value).or_default() += 1);
    let mut values: HashMap<ValueId, Rc<Array>> = HashMap::new();
    for (id, node) in live_nodes() {
        let results = match node.op {
            Op::Input(_) | Op::Parameter(_) | Op::State(_) if !uses.contains_key(&node.results[0]) => continue,
            Op::Input(_) | Op::Parameter(_) | Op::State(_) => vec![leaf(&node.op, graph.ty(node.results[0]), leaves)?],
            _ => {
                let operands: Vec<&Array> = node.operands.iter().map(|value| &*values[value]).collect();
                compute(context, &node.op, &operands, graph.result_types(id))?
            }
        };
        for (value, array) in node.results.iter().zip(results) {
            if uses.contains_key(value) {
                values.insert(*value, Rc::new(array));
            }
        }
        for value in &node.operands {
            release(&mut uses, &mut values, *value);
        }
    }
    let output = |output: &shardc_ir::Output| (output.name.clone(), values[&output.value].to_host());
    Ok(graph.outputs.iter().map(output).collect())
}

fn release(uses: &mut HashMap<ValueId, usize>, values: &mut HashMap<ValueId, Rc<Array>>, value: ValueId) {
    if let Some(count) = uses.get_mut(&value) {
        *count -= 1;
        if *count == 0 {
            values.remove(&value);
        }
    }
}

fn leaf(op: &Op, ty: &TensorType, leaves: &BTreeMap<String, HostTensor>) -> Result<Array, RuntimeError> {
    let name = match op {
        Op::Input(op) => &op.name,
        Op::Parameter(op) => &op.name,
        Op::State(op) => &op.name,
        _ => return Err(RuntimeError::Program(format!("{} is not a leaf", op.name()))),
    };
    match (leaves.get(name), op) {
        (Some(tensor), _) if tensor.ty == *ty => Ok(Array::copy_of(ty.clone(), &tensor.bytes)),
        (Some(tensor), _) => {
            Err(RuntimeError::WrongType { name: name.clone(), actual: tensor.ty.clone(), expected: ty.clone() })
        }
        (None, Op::State(State { cast_of: Some(parameter), .. })) => {
            let missing = || RuntimeError::Missing { name: parameter.clone() };
            let parameter = leaves.get(parameter).ok_or_else(missing)?;
            let parameter = Array::copy_of(parameter.ty.clone(), &parameter.bytes);
            Ok(compute(Context { threads: 1 }, &Cast {}.into(), &[&parameter], vec![ty.clone()])?.remove(0))
        }
        (None, Op::State(state)) => {
            let constant = shardc_ir::ops::Constant { value: state.init }.into();
            Ok(compute(Context { threads: 1 }, &constant, &[], vec![ty.clone()])?.remove(0))
        }
        (None, _) => Err(RuntimeError::Missing { name: name.clone() }),
    }
}

/// Computes one operation on tensors in memory of their own.
pub(super) fn compute(
    context: Context,
    op: &Op,
    operands: &[&Array],
    types: Vec<TensorType>,
) -> Result<Vec<Array>, RuntimeError> {
    let mut results: Vec<Array> = types.into_iter().map(Array::zeros).collect();
    let operands: Vec<View<'_>> = operands.iter().map(|x| View { ty: &x.ty, bytes: &x.bytes }).collect();
    let mut views: Vec<ViewMut<'_>> = results.iter_mut().map(|x| ViewMut { ty: &x.ty, bytes: &mut x.bytes }).collect();
    let outcome = kernels::run(context, op, &operands, &mut views);
    outcome.map_err(|message| RuntimeError::Kernel { op: op.name().to_string(), message })?;
    Ok(results)
}

/// Computes one operation on host tensors: the kernels' interface for tests and tools.
///
/// # Errors
/// An operation without a kernel for these types, or operands that the operation does not take.
pub fn compute_op(op: &Op, operands: &[HostTensor], types: &[TensorType]) -> Result<Vec<HostTensor>, RuntimeError> {
    let operand_types: Vec<TensorType> = operands.iter().map(|x| x.ty.clone()).collect();
    let types = OpDef::infer(op, &operand_types, types).map_err(|message| shardc_ir::ops::OpError::new(op, message))?;
    let operands: Vec<Array> = operands.iter().map(|x| Array::copy_of(x.ty.clone(), &x.bytes)).collect();
    let results = compute(Context { threads: super::cores() }, op, &operands.iter().collect::<Vec<_>>(), types)?;
    Ok(results.iter().map(Array::to_host).collect())
}

/// Per dimension, the first index and the length.
type Slices = Vec<(u64, u64)>;

/// The part `slice` of an output of a graph without leaves, made of constants, random numbers and
/// operations on them: one shard of one parameter's first value. Only what the part needs is
/// computed, as far as the operations' factor rules tell; so the result does not depend on how the
/// output is cut. `seed` takes the place of the seed of every random operation.
///
/// # Errors
/// An unknown output, a leaf on the way, a slice outside the output.
pub fn evaluate_part(init: &Graph, output: &str, slice: &[(u64, u64)], seed: u64) -> Result<HostTensor, RuntimeError> {
    let unknown = || RuntimeError::Unknown { what: "output", name: output.to_string() };
    let value = init.find_output(output).ok_or_else(unknown)?.value;
    let shape = &init.ty(value).shape;
    if slice.len() != shape.len() || slice.iter().zip(shape).any(|((first, length), size)| first + length > *size) {
        let message = format!("part {slice:?} is not inside `{output}`, which is {}", init.ty(value));
        return Err(RuntimeError::Program(message));
    }
    let mut evaluation = Evaluation { graph: init, seed, made: HashMap::new() };
    Ok(evaluation.value(value, slice.to_vec())?.to_host())
}

/// The operations on local types that make the part `slice` of an output from nothing, each but the first from the one
/// before and in its place; `None` where it takes more than that. As [`evaluate_part`] otherwise.
pub fn chain(init: &Graph, output: &str, slice: &[(u64, u64)], seed: u64) -> Option<Vec<(Op, TensorType)>> {
    let evaluation = Evaluation { graph: init, seed, made: HashMap::new() };
    let (mut value, mut slice) = (init.find_output(output)?.value, slice.to_vec());
    let mut steps: Vec<(Op, TensorType)> = Vec::new();
    loop {
        let (id, index) = (init.value(value).def, init.value(value).index);
        let (operands, results) = evaluation.parts(id, index, &slice)?;
        let (op, mut types) = evaluation.local(id, &operands, &results);
        let ty = types.pop().filter(|_| types.is_empty())?;
        // What the step behind reads is what this one makes.
        if steps.last().is_some_and(|(_, later)| *later != ty) {
            return None;
        }
        let is_in_place = op.may_overwrite(0, operands.len());
        steps.push((op, ty));
        match &init.node(id).operands[..] {
            [] => break,
            [operand] if is_in_place => (value, slice) = (*operand, operands.into_iter().next()?),
            _ => return None,
        }
    }
    steps.reverse();
    Some(steps)
}

struct Evaluation<'a> {
    graph: &'a Graph,
    seed: u64,
    made: HashMap<(ValueId, Slices), Rc<Array>>,
}

impl Evaluation<'_> {
    /// A part of a value.
    fn value(&mut self, value: ValueId, slice: Slices) -> Result<Rc<Array>, RuntimeError> {
        if let Some(made) = self.made.get(&(value, slice.clone())) {
            return Ok(made.clone());
        }
        let (id, index) = (self.graph.value(value).def, self.graph.value(value).index);
        let array = match self.parts(id, index, &slice) {
            Some((operands, results)) => self.node(id, operands, results)?.swap_remove(index),
            None => {
                let whole = self.value(value, whole(self.graph.ty(value)))?.to_host();
                let part = whole.part(&slice);
                Array::copy_of(part.ty.clone(), &part.bytes)
            }
        };
        let array = Rc::new(array);
        self.made.insert((value, slice), array.clone());
        Ok(array)
    }

    /// Computes a node on parts of its operands, making parts of its results.
    fn node(&mut self, id: NodeId, operands: Vec<Slices>, results: Vec<Slices>) -> Result<Vec<Array>, RuntimeError> {
        let (op, types) = self.local(id, &operands, &results);
        let values: Vec<ValueId> = self.graph.node(id).operands.clone();
        let arrays: Vec<Rc<Array>> = values
            .into_iter()
            .zip(operands)
            .map(|(value, slice)| self.value(value, slice))
            .collect::<Result<_, _>>()?;
        let arrays: Vec<&Array> = arrays.iter().map(|array| &**array).collect();
        compute(Context { threads: super::cores() }, &op, &arrays, types)
    }

    /// A node on parts of its operands and results, and the types of its results.
    fn local(&self, id: NodeId, operands: &[Slices], results: &[Slices]) -> (Op, Vec<TensorType>) {
        let node = self.graph.node(id);
        let parts = |types: Vec<TensorType>, slices: &[Slices]| -> Vec<Part> {
            let part = |(ty, slice): (TensorType, &Slices)| Part { shape: ty.shape, slice: slice.clone() };
            types.into_iter().zip(slices).map(part).collect()
        };
        let op = node
            .op
            .localize(&parts(self.graph.operand_types(id), operands), &parts(self.graph.result_types(id), results));
        let op = match op.unwrap_or_else(|| node.op.clone()) {
            Op::Random(op) => Random { seed: self.seed, ..op }.into(),
            op => op,
        };
        let types = self.graph.result_types(id).into_iter().zip(results).map(|(ty, slice)| local(&ty, slice));
        (op, types.collect())
    }

    /// The parts of a node's operands and results that a part of one result goes with; `None` if
    /// the node must be computed whole.
    fn parts(&self, id: NodeId, index: usize, slice: &Slices) -> Option<(Vec<Slices>, Vec<Slices>)> {
        let rule = self.graph.rule(id);
        let mut cut: BTreeMap<usize, (u64, u64)> = BTreeMap::new();
        for (dim, (size, part)) in self.graph.ty(self.graph.node(id).results[index]).shape.iter().zip(slice).enumerate()
        {
            if *part == (0, *size) {
                continue;
            }
            // Only a dimension that is one factor, which may be divided, is cut as it is.
            let [factor] = rule.results[index].get(dim)?[..] else { return None };
            if rule.factors[factor].kind != FactorKind::Parallel {
                return None;
            }
            cut.insert(factor, *part);
        }
        let slices = |dims: &[Vec<Vec<usize>>], types: Vec<TensorType>| -> Option<Vec<Slices>> {
            let of_dim = |factors: &Vec<usize>, size: u64| match factors[..] {
                [factor] if cut.contains_key(&factor) => Some(cut[&factor]),
                _ if factors.iter().any(|factor| cut.contains_key(factor)) => None,
                _ => Some((0, size)),
            };
            let of = |(dims, ty): (&Vec<Vec<usize>>, TensorType)| -> Option<Slices> {
                dims.iter().zip(ty.shape).map(|(factors, size)| of_dim(factors, size)).collect()
            };
            dims.iter().zip(types).map(of).collect()
        };
        Some((
            slices(&rule.operands, self.graph.operand_types(id))?,
            slices(&rule.results, self.graph.result_types(id))?,
        ))
    }
}

fn whole(ty: &TensorType) -> Slices {
    ty.shape.iter().map(|size| (0, *size)).collect()
}

fn local(ty: &TensorType, slice: &Slices) -> TensorType {
    ty.with_shape(slice.iter().map(|(_, length)| *length).collect::<Vec<_>>())
}
