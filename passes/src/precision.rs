//! Lowers a forward graph to mixed precision: 16-bit compute with f32 master parameters.
//!
//! Where PyTorch would run under `autocast` with parameters kept in f32 by FSDP's mixed precision,
//! this pass makes the casts part of the graph, before differentiation, so gradients of parameters
//! come back through them in f32.
//!
//! * Parameters stay f32 leaves; each has one cast to bf16 (or fp16: what follows holds for both), next to it.
//! * Matmuls, convolutions, attention, norms, embeddings and elementwise operations on activations compute in
//!   bf16, and so the residual stream is bf16. Kernels work in f32 inside.
//! * Exponentials, logarithms, powers, roots and reciprocals that no composite operation took in
//!   give f32, as do sums, running ones as well, as under `autocast`, and what they reach stays f32 until the next matmul or
//!   norm, or until it is copied to the elements of an activation in bf16. What is taken from scores before their exponentials
//!   and behind their logarithm, a maximum and the logarithm, is taken in f32, and so is what a logarithm is taken of, back to
//!   the softmax or the sigmoid that makes it: in 16 bits it would be 0 or 1. In fp16 squares give f32: their range is twice
//!   that of what is squared.
//! * What parameters make by themselves, or with values that no parameter reaches, is f32 until it meets an activation.
//! * Values that no parameter reaches (positions, masks, rotary tables, counts) stay as they are;
//!   where an activation meets one, that one is cast.
//! * Cross-entropy reads bf16 logits and gives f32 rows; scalars, and so the loss, are f32.

use crate::cluster::{Cluster, DeviceKind, Profile};
use crate::error::{PassError, UserError};
use crate::raise::LEAST;
use serde::{Deserialize, Serialize};
use shardc_ir::ops::{Arithmetic, Binary, BinaryKind, Cast, Constant, OpError, ReduceOp, UnaryKind};
use shardc_ir::{DType, EntityRef, Graph, NodeId, Op, OpDef, Role, TensorType, ValueId};
use std::collections::HashMap;

/// The largest numbers of the 16-bit types.
const LARGEST_F16: f64 = 65504.0;
const LARGEST_BF16: f64 = 3.389_531_389_251_535_5e38;

/// Which operand of attention is what is added to scores.
const BIAS: usize = 3;

/// The element type of the forward and backward computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// f32 throughout: the graph as it is.
    Fp32,
    /// bf16 with f32 parameters, optimizer states, gradients of parameters and loss.
    Bf16,
    /// fp16 with the same in f32, and a loss that is scaled while it is differentiated
    /// ([`differentiate_scaled`](crate::differentiate::differentiate_scaled)).
    Fp16,
    /// bf16, with the products of linear layers in 8-bit floats ([`quantize`](crate::quantize)).
    Fp8,
}

impl Precision {
    /// The name in requests and flags.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
            Self::Fp8 => "fp8",
        }
    }

    /// The precision of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Fp32, Self::Bf16, Self::Fp16, Self::Fp8].into_iter().find(|precision| precision.name() == name)
    }

    /// The element type of what is not kept in f32; `None` where all is.
    pub fn narrow(self) -> Option<DType> {
        match self {
            Self::Fp32 => None,
            Self::Bf16 | Self::Fp8 => Some(DType::Bf16),
            Self::Fp16 => Some(DType::F16),
        }
    }

    /// The precision of 16 bits in which a device is the fastest; bf16, whose range is that of f32, where both are.
    pub fn fastest(device: &Profile) -> Self {
        if device.prefers_f16() { Self::Fp16 } else { Self::Bf16 }
    }

    /// The precision of a device where none is asked for: fp32 on CPUs, elsewhere the [fastest](Self::fastest).
    pub fn usual(device: &Profile) -> Self {
        match device.kind {
            DeviceKind::Cpu => Self::Fp32,
            DeviceKind::Cuda => Self::fastest(device),
        }
    }

    /// Whether every device of a cluster computes in it. Ranks on CPUs do all of it by software.
    ///
    /// # Errors
    /// 8-bit floats, and a GPU without units for them: no library has products of such there.
    pub fn check(self, cluster: &Cluster) -> Result<(), UserError> {
        let kinds = cluster.parts.iter().map(|part| &part.device);
        let lacks = |device: &&Profile| !device.has_f8_units() && device.kind != DeviceKind::Cpu;
        match kinds.chain([&cluster.device]).find(lacks).filter(|_| self == Self::Fp8) {
            Some(device) => Err(UserError::NoUnits {
                precision: self.name(),
                device: device.name.clone(),
                cluster: cluster.name.clone(),
                instead: Self::fastest(device).name(),
            }),
            None => Ok(()),
        }
    }

    /// Whether small gradients would be lost if the loss were not scaled.
    pub fn scales_loss(self) -> bool {
        self == Self::Fp16
    }
}

/// The graph in another precision; see the [module](self).
pub fn lower_precision(graph: &Graph, precision: Precision) -> Result<Graph, PassError> {
    let Some(narrow) = precision.narrow() else { return Ok(graph.clone()) };
    let (reached, logged) = (reached(graph), logged(graph));
    let mut lowering = Lowering { from: graph, narrow, reached, casts: HashMap::new(), ranged: HashMap::new(), logged };
    let mut lowered = graph
        .rebuild(|to, id, map| lowering.node(to, id, map).map(|()| true))
        .map_err(PassError::ill_formed("lower_precision"))?;
    for index in 0..lowered.outputs.len() {
        let value = lowered.outputs[index].value;
        let ty = lowered.ty(value).clone();
        if ty.rank() == 0 && ty.dtype == narrow {
            let path = lowered.def(value).path.clone();
            let f32 = ty.with_dtype(DType::F32);
            let cast = lowered.add_as(Cast {}.into(), &[value], &[f32], path, Role::Forward);
            let cast = cast.map_err(PassError::ill_formed("lower_precision"))?;
            lowered.outputs[index].value = lowered.result(cast);
        }
    }
    // Copies in f32 of what was cast before it was copied are dropped.
    lowered.rebuild(|_, _, _| Ok(false)).map_err(PassError::ill_formed("lower_precision"))
}

/// Per value, whether it is a float that a parameter, trained or frozen, reaches.
fn reached(graph: &Graph) -> Vec<bool> {
    let mut reached = vec![false; graph.value_count()];
    for (_, node) in graph.nodes() {
        let any = matches!(node.op, Op::Parameter(_)) || node.operands.iter().any(|operand| reached[operand.index()]);
        for result in &node.results {
            reached[result.index()] = any && graph.ty(*result).dtype.is_float();
        }
    }
    reached
}

struct Lowering<'a> {
    from: &'a Graph,
    /// The 16-bit type.
    narrow: DType,
    reached: Vec<bool>,
    /// Values of the new graph in other element types.
    casts: HashMap<(ValueId, DType), ValueId>,
    /// What is added to scores, in the range of 16 bits.
    ranged: HashMap<ValueId, ValueId>,
    /// Values of the old graph of which a logarithm is taken, with what they are made of.
    logged: Vec<bool>,
}

fn is_logarithm(op: &Op) -> bool {
    matches!(op, Op::Unary(op) if matches!(op.kind, UnaryKind::Log | UnaryKind::Log1p))
}

/// Per value, whether a logarithm is taken of it, or of what is made of it element by element or by taking elements out.
fn logged(graph: &Graph) -> Vec<bool> {
    let mut logged = vec![false; graph.value_count()];
    for (_, node) in graph.nodes().rev() {
        let passes = match &node.op {
            Op::Affine(_) | Op::Reshape(_) | Op::Slice(_) | Op::Gather(_) | Op::Select(_) => true,
            Op::Unary(op) => op.kind == UnaryKind::Neg,
            Op::Binary(op) => {
                use BinaryKind::{Add, Max, Min, Mul, Sub};
                matches!(op.kind, Add | Sub | Mul | Max | Min)
            }
            _ => false,
        };
        if is_logarithm(&node.op) || passes && logged[node.results[0].index()] {
            node.operands.iter().for_each(|operand| logged[operand.index()] = true);
        }
    }
    logged
}

impl Lowering<'_> {
    /// Adds what a node becomes.
    fn node(&mut self, to: &mut Graph, id: NodeId, map: &mut HashMap<ValueId, ValueId>) -> Result<(), OpError> {
        let node = self.from.node(id);
        if node.op.is_leaf() || !node.results.iter().chain(&node.operands).any(|value| self.reached[value.index()]) {
            to.copy_node(self.from, id, map)?;
            return Ok(());
        }
        let dtype = match self.arithmetic(id) {
            Arithmetic::Narrow => Some(self.narrow),
            Arithmetic::Wide => Some(DType::F32),
            Arithmetic::Follow | Arithmetic::Sum => Some(self.followed(to, id, map)),
            Arithmetic::AsIs => None,
        };
        let mut operands = Vec::new();
        for (index, operand) in node.operands.iter().enumerate() {
            let table = matches!(node.op, Op::Rotary(_)) && index > 0;
            let target = dtype.filter(|_| !table && self.from.ty(*operand).dtype == DType::F32);
            let is_bias = matches!(node.op, Op::Attention(_)) && index == BIAS;
            let operand = if is_bias { self.in_range(to, map[operand])? } else { map[operand] };
            operands.push(self.cast(to, operand, target)?);
        }
        let types = self.from.result_types(id);
        let declared: Vec<TensorType> = match &node.op {
            Op::Cast(_) => types,
            Op::Reduce(reduce) if reduce.kind == ReduceOp::Sum => types,
            Op::Reshape(_)
            | Op::Broadcast(_)
            | Op::Matmul(_)
            | Op::Reduce(_)
            | Op::ScatterAdd(_)
            | Op::ConvolutionTranspose(_) => {
                let narrow = |ty: &TensorType| match dtype {
                    Some(dtype) if ty.dtype == DType::F32 => ty.with_dtype(dtype),
                    _ => ty.clone(),
                };
                types.iter().map(narrow).collect()
            }
            _ => Vec::new(),
        };
        let copy = to.add_as(node.op.clone(), &operands, &declared, node.path.clone(), node.role)?;
        for (old, new) in node.results.iter().zip(to.node(copy).results.clone()) {
            map.insert(*old, new);
        }
        Ok(())
    }

    /// In which element type a node computes.
    fn arithmetic(&self, id: NodeId) -> Arithmetic {
        let node = self.from.node(id);
        let is_product = matches!(&node.op, Op::Binary(op) if op.kind == BinaryKind::Mul);
        let is_square = is_product && node.operands[0] == node.operands[1];
        let is_logged = self.logged[node.results[0].index()];
        match node.op.arithmetic(self.from.ty(node.results[0])) {
            Arithmetic::Follow if is_logged || is_square && self.narrow == DType::F16 => Arithmetic::Wide,
            own => own,
        }
    }

    /// The widest element type of the operands that parameters reach; a parameter counts as narrow, and so does what is copied
    /// to every element (a statistic of a norm), but for a maximum or a logarithm: what is taken from scores for the sake of
    /// their exponentials is taken in f32. So is what is made of nothing that is narrow yet.
    fn followed(&self, to: &Graph, id: NodeId, map: &HashMap<ValueId, ValueId>) -> DType {
        let node = self.from.node(id);
        let is_narrow = |operand: &ValueId| to.ty(map[operand]).dtype == self.narrow;
        let is_elementwise =
            matches!(node.op, Op::Unary(_) | Op::Binary(_) | Op::Affine(_) | Op::Reduce(_) | Op::Broadcast(_));
        if is_elementwise && !node.operands.iter().any(is_narrow) {
            return DType::F32;
        }
        let operands = node.operands.iter().filter(|operand| self.reached[operand.index()]);
        let wide = |operand: &ValueId| match &self.from.def(*operand).op {
            Op::Parameter(_) => false,
            Op::Broadcast(_) => self.is_of_exponents(*operand),
            _ => to.ty(map[operand]).dtype == DType::F32,
        };
        if operands.into_iter().any(wide) { DType::F32 } else { self.narrow }
    }

    /// Whether a value is copies of a maximum, of a logarithm or of a running sum.
    fn is_of_exponents(&self, value: ValueId) -> bool {
        let node = self.from.def(value);
        match &node.op {
            Op::Broadcast(_) | Op::Reshape(_) => self.is_of_exponents(node.operands[0]),
            Op::Reduce(op) => op.kind == ReduceOp::Max,
            Op::Cumsum(_) => true,
            op => is_logarithm(op),
        }
    }

    /// What is added to scores, with numbers that hide a key as far as any need to: the least of f32 has no place in 16 bits,
    /// and a row of which all are hidden would be that of no number.
    fn in_range(&mut self, to: &mut Graph, bias: ValueId) -> Result<ValueId, OpError> {
        let node = to.def(bias);
        let number = |value: &ValueId| match &to.def(*value).op {
            Op::Constant(constant) => Some(constant.value),
            _ => None,
        };
        let is_near = |value: &ValueId| number(value).is_some_and(|number| number >= LEAST);
        let is_choice = matches!(node.op, Op::Select(_)) && node.operands[1..].iter().all(is_near);
        if is_choice || matches!(node.op, Op::Parameter(_)) || to.ty(bias).dtype != DType::F32 {
            return Ok(bias);
        }
        if let Some(known) = self.ranged.get(&bias) {
            return Ok(*known);
        }
        let ranged = self.at_least(to, bias, LEAST)?;
        self.ranged.insert(bias, ranged);
        Ok(ranged)
    }

    /// The larger of a value's elements and a number.
    fn at_least(&self, to: &mut Graph, value: ValueId, least: f64) -> Result<ValueId, OpError> {
        let node = to.def(value);
        let (path, role, ty) = (node.path.clone(), node.role, to.ty(value).clone());
        let scalar = TensorType::scalar(DType::F32);
        let least = to.add_as(Constant { value: least }.into(), &[], &[scalar], path.clone(), role)?;
        let most = Binary { kind: BinaryKind::Max }.into();
        let made = to.add_as(most, &[value, to.result(least)], &[ty], path, role)?;
        Ok(to.result(made))
    }

    /// The value in an element type: itself, an earlier cast, the constant anew, or a cast.
    fn cast(&mut self, to: &mut Graph, value: ValueId, dtype: Option<DType>) -> Result<ValueId, OpError> {
        let ty = to.ty(value).clone();
        let Some(dtype) = dtype.filter(|dtype| *dtype != ty.dtype) else { return Ok(value) };
        if let Some(known) = self.casts.get(&(value, dtype)) {
            return Ok(*known);
        }
        let node = to.def(value);
        let (path, role) = (node.path.clone(), node.role);
        let cast = match &node.op {
            // Fewer numbers are cast before they are copied.
            Op::Broadcast(broadcast) => {
                let (broadcast, source) = (broadcast.clone(), node.operands[0]);
                let source = self.cast(to, source, Some(dtype))?;
                to.add_as(broadcast.into(), &[source], &[ty.with_dtype(dtype)], path, role)?
            }
            Op::Constant(constant) => {
                let constant = Constant { value: within(constant.value, dtype) }.into();
                to.add_as(constant, &[], &[ty.with_dtype(dtype)], path, role)?
            }
            _ => {
                let least = within(f64::MIN, dtype);
                let value = if scales_beyond(to, value, dtype) { self.at_least(to, value, least)? } else { value };
                to.add_as(Cast {}.into(), &[value], &[ty.with_dtype(dtype)], path, role)?
            }
        };
        let cast = to.result(cast);
        self.casts.insert((value, dtype), cast);
        Ok(cast)
    }
}

/// Whether a value, of a mask say, is made with numbers that an element type does not hold.
fn scales_beyond(graph: &Graph, value: ValueId, dtype: DType) -> bool {
    let is_beyond = |number: f64| within(number, dtype) != number;
    let node = graph.def(value);
    match &node.op {
        Op::Affine(op) => is_beyond(op.scale) || is_beyond(op.offset),
        Op::Constant(op) => is_beyond(op.value),
        Op::Reshape(_) | Op::Broadcast(_) | Op::Select(_) | Op::Slice(_) => {
            node.operands.iter().any(|operand| scales_beyond(graph, *operand, dtype))
        }
        _ => false,
    }
}

/// A number as an element type holds it: what is finite stays finite, with room for what is added to it. The least number of
/// f32, which hides a key, would hide all keys of a row as infinity.
fn within(number: f64, dtype: DType) -> f64 {
    let most = match dtype {
        DType::F16 => LARGEST_F16,
        DType::Bf16 => LARGEST_BF16,
        _ => return number,
    };
    if number.is_finite() && number.abs() > most { number.signum() * most / 2.0 } else { number }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_gpus_with_units_for_them_take_8_bit_floats() {
        let cluster = |text: &str| Cluster::parse(text, "h200").unwrap();
        for device in ["h100", "h200", "b200", "l40s", "rtx4090", "cpu"] {
            assert_eq!(Precision::Fp8.check(&cluster(&format!("{device}:8"))), Ok(()));
        }
        for (device, instead) in [("a100-40", "bf16"), ("a100-80", "bf16"), ("v100", "fp16"), ("rtx3090", "bf16")] {
            let cluster = cluster(&format!("{device}:8"));
            let message = Precision::Fp8.check(&cluster).unwrap_err().to_string();
            let says = |text: &str| message.contains(text);
            assert!(says("fp8") && says(device) && says(&format!("--precision {instead}")), "{message}");
            assert_eq!(
                [Precision::Fp32, Precision::Bf16, Precision::Fp16].map(|other| other.check(&cluster)),
                [Ok(()), Ok(()), Ok(())]
            );
        }
        let mixed =
            "per_node = 1\n[[parts]]\nnodes = 1\ndevice = \"h100\"\n[[parts]]\nnodes = 1\ndevice = \"a100-80\"\n";
        let mixed = Cluster::from_toml("mixed.toml", mixed).unwrap();
        assert!(Precision::Fp8.check(&mixed).unwrap_err().to_string().contains("`a100-80`"));
    }
}
