//! Adds the optimizer's update to a differentiated graph, so that one step is one graph.
//!
//! The global gradient norm and the clipping follow PyTorch's `clip_grad_norm_`, the update its
//! `AdamW`. No gradient is scaled by itself: the loss's scale and the clipping coefficient are one
//! scalar that the update applies; if the norm is not finite, neither is that scalar, and nothing is
//! updated.

use crate::differentiate::Differentiated;
use crate::error::{PassError, UserError};
use crate::fold::leaf_name;
use serde::{Deserialize, Serialize};
pub use shardc_ir::ops::STEP;
use shardc_ir::ops::{Adamw, Affine, Binary, BinaryKind, Constant, Input, State, SumSquares, Total, Unary, UnaryKind};
use shardc_ir::{DType, Graph, Node, Op, Output, OutputKind, Role, TensorType, ValueId};
use std::collections::BTreeSet;

/// The name of the input that holds the learning rate of the step, an f32 scalar.
pub const LEARNING_RATE: &str = "learning_rate";
/// The name of the output that holds the norm of all gradients before clipping.
pub const GRAD_NORM: &str = "grad_norm";

/// What the names of a parameter's moments have behind its own.
const MOMENTS: [&str; 2] = [".m", ".v"];

/// What PyTorch's `clip_grad_norm_` adds to the norm before it divides by it.
const CLIP_EPS: f64 = 1e-6;

/// Which optimizer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OptimizerKind {
    /// Adam with decoupled weight decay; see [`Adamw`].
    AdamW {
        /// The decay of the first moment.
        beta1: f64,
        /// The decay of the second moment.
        beta2: f64,
        /// The number added to the root of the second moment.
        eps: f64,
        /// The decoupled weight decay, of every trained parameter.
        weight_decay: f64,
    },
}

/// How to update the parameters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OptimizerConfig {
    /// Which optimizer.
    pub kind: OptimizerKind,
    /// The largest norm of all gradients together; larger ones are scaled down to it.
    pub clip_grad_norm: Option<f64>,
}

impl Default for OptimizerConfig {
    /// AdamW as language models are trained with it (Touvron et al., "LLaMA", 2023, section 2.3).
    fn default() -> Self {
        let kind = OptimizerKind::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
        Self { kind, clip_grad_norm: Some(1.0) }
    }
}

/// Adds the inputs [`LEARNING_RATE`] and [`STEP`] (which the model may read already), the moments `NAME.m` and `NAME.v` of each
/// parameter `NAME` with a gradient, and the updates. The outputs are then the scalar results and the updates (running
/// statistics) of before, [`GRAD_NORM`], and the updates; what only other results needed is dropped.
///
/// # Errors
/// If nothing is trained, an option is out of its range, or the model has something of a name that is added and it is
/// not the number of the step, an f32 scalar.
pub fn add_optimizer(differentiated: Differentiated, config: &OptimizerConfig) -> Result<Graph, PassError> {
    check(&differentiated, config)?;
    let Differentiated { mut graph, gradients, scale, .. } = differentiated;
    let OptimizerKind::AdamW { beta1, beta2, eps, weight_decay } = config.kind;
    let scalar = TensorType::scalar(DType::F32);
    graph.outputs = kept(&graph).cloned().collect();

    let mut builder = Builder { graph: &mut graph, path: String::new() };
    let learning_rate = builder.add(Input { name: LEARNING_RATE.into() }, &[], std::slice::from_ref(&scalar))?;
    let is_step = |node: &Node| matches!(&node.op, Op::Input(input) if input.name == STEP);
    let known = builder.graph.leaves().find(|(_, node)| is_step(node)).map(|(value, _)| value);
    let step = match known {
        Some(step) => step,
        None => builder.add(Input { name: STEP.into() }, &[], std::slice::from_ref(&scalar))?,
    };
    let norm = builder.norm(&gradients, scale)?;
    let scale = match config.clip_grad_norm {
        Some(max_norm) => builder.clip(norm, max_norm, scale)?,
        None => scale,
    };
    let scale = builder.guard(norm, scale)?;
    builder.graph.output(GRAD_NORM, norm, OutputKind::Result);
    for (parameter, gradient) in gradients {
        let (name, path) = parameter_name(builder.graph, parameter);
        builder.path = path;
        let ty = builder.graph.ty(parameter).with_dtype(DType::F32);
        let mut leaves = vec![parameter];
        for moment in MOMENTS {
            let state = State { name: format!("{name}{moment}"), init: 0.0, cast_of: None };
            leaves.push(builder.add(state, &[], std::slice::from_ref(&ty))?);
        }
        let operands = [parameter, gradient, leaves[1], leaves[2], scale, learning_rate, step];
        let updated = builder.add_many(Adamw { beta1, beta2, eps, weight_decay, cast: None }, &operands, &[])?;
        for (leaf, (value, suffix)) in leaves.into_iter().zip(updated.into_iter().zip(["", MOMENTS[0], MOMENTS[1]])) {
            builder.graph.output(format!("{name}{suffix}"), value, OutputKind::Update(leaf));
        }
    }
    graph.rebuild(|_, _, _| Ok(false)).map_err(PassError::ill_formed("add_optimizer"))
}

/// The outputs that stay: numbers, and what replaces a leaf.
fn kept(graph: &Graph) -> impl Iterator<Item = &Output> {
    let is_number = |output: &Output| graph.ty(output.value).elements() == 1;
    graph.outputs.iter().filter(move |output| is_number(output) || output.kind != OutputKind::Result)
}

/// Refuses what has a name that the step gives: leaves are told apart by theirs, and so are outputs.
fn check_names(differentiated: &Differentiated) -> Result<(), UserError> {
    let Differentiated { graph, gradients, .. } = differentiated;
    let updates: BTreeSet<String> =
        gradients.iter().map(|(parameter, _)| parameter_name(graph, *parameter).0).collect();
    let is_moment = |name: &str| {
        let parameter = MOMENTS.iter().find_map(|suffix| name.strip_suffix(suffix));
        parameter.is_some_and(|parameter| updates.contains(parameter))
    };
    let is_step =
        |value, node: &Node| matches!(node.op, Op::Input(_)) && graph.ty(value) == &TensorType::scalar(DType::F32);
    let leaves = graph.leaves().map(|(value, node)| (leaf_name(&node.op), is_step(value, node)));
    let is_taken = |name: &str, is_step: bool| name == LEARNING_RATE || (name == STEP && !is_step) || is_moment(name);
    let leaf = leaves.filter(|(name, is_step)| is_taken(name, *is_step)).map(|(name, _)| name);
    let output = kept(graph)
        .map(|output| &*output.name)
        .filter(|name| *name == GRAD_NORM || updates.contains(*name) || is_moment(name));
    match leaf.chain(output).next() {
        Some(name) => Err(UserError::ReservedName { name: name.to_string() }),
        None => Ok(()),
    }
}

/// Everything a user could have got wrong.
fn check(differentiated: &Differentiated, config: &OptimizerConfig) -> Result<(), UserError> {
    if differentiated.gradients.is_empty() {
        return Err(UserError::NothingToTrain);
    }
    check_names(differentiated)?;
    let OptimizerKind::AdamW { beta1, beta2, eps, weight_decay } = config.kind;
    let decay = "at least 0 and below 1";
    for (option, value, range, good) in [
        ("beta1", beta1, decay, (0.0..1.0).contains(&beta1)),
        ("beta2", beta2, decay, (0.0..1.0).contains(&beta2)),
        (
            "eps",
            eps,
            "a number above 0 in fp32, such as 1e-8: it divides where the second moment is 0",
            eps as f32 > 0.0,
        ),
        ("the weight decay", weight_decay, "at least 0", weight_decay >= 0.0),
    ] {
        if !good || !(value as f32).is_finite() {
            return Err(UserError::OutOfRange { option, value, range });
        }
    }
    match config.clip_grad_norm {
        Some(value) if !(value as f32 > 0.0 && (value as f32).is_finite()) => Err(UserError::OutOfRange {
            option: "the largest gradient norm",
            value,
            range: "a number above 0 in fp32, such as 1 (0 does not clip)",
        }),
        _ => Ok(()),
    }
}

/// How a training step updates its parameters: by its first update, and what divides its largest gradient norm. `None` of a
/// graph that updates none.
pub fn config_of(graph: &Graph) -> Option<OptimizerConfig> {
    let nodes = || graph.nodes().map(|(_, node)| node).filter(|node| node.role == Role::Optimizer);
    let update = nodes().find_map(|node| match &node.op {
        Op::Adamw(Adamw { beta1, beta2, eps, weight_decay, .. }) => {
            Some(OptimizerKind::AdamW { beta1: *beta1, beta2: *beta2, eps: *eps, weight_decay: *weight_decay })
        }
        _ => None,
    });
    let is_norm = |op: &Op| matches!(op, Op::Affine(Affine { scale: 1.0, offset: CLIP_EPS }));
    let clip_grad_norm = nodes().find_map(|node| match (&node.op, &node.operands[..]) {
        (Op::Binary(Binary { kind: BinaryKind::Div }), [largest, norm]) if is_norm(&graph.def(*norm).op) => {
            if let Op::Constant(Constant { value }) = &graph.def(*largest).op {
                Some(*value)
            } else {
                None
            }
        }
        _ => None,
    });
    update.map(|kind| OptimizerConfig { kind, clip_grad_norm })
}

/// The name and the module path of a parameter.
fn parameter_name(graph: &Graph, parameter: ValueId) -> (String, String) {
    let node = graph.def(parameter);
    let name = if let Op::Parameter(parameter) = &node.op { parameter.name.clone() } else { parameter.to_string() };
    (name, node.path.clone())
}

/// Adds nodes of the optimizer.
struct Builder<'a> {
    graph: &'a mut Graph,
    /// The module path that they get.
    path: String,
}

impl Builder<'_> {
    fn add_many(
        &mut self,
        op: impl Into<Op>,
        operands: &[ValueId],
        declared: &[TensorType],
    ) -> Result<Vec<ValueId>, PassError> {
        let node = self.graph.add_as(op.into(), operands, declared, self.path.clone(), Role::Optimizer);
        node.map(|node| self.graph.node(node).results.clone()).map_err(PassError::ill_formed("add_optimizer"))
    }

    fn add(&mut self, op: impl Into<Op>, operands: &[ValueId], declared: &[TensorType]) -> Result<ValueId, PassError> {
        Ok(self.add_many(op, operands, declared)?[0])
    }

    /// The norm of all gradients of the loss: `sqrt(sum of squares) * |scale|`.
    fn norm(&mut self, gradients: &[(ValueId, ValueId)], scale: ValueId) -> Result<ValueId, PassError> {
        let mut terms = Vec::with_capacity(gradients.len());
        for (parameter, gradient) in gradients {
            self.path = parameter_name(self.graph, *parameter).1;
            terms.push(self.add(SumSquares {}, &[*gradient], &[])?);
        }
        self.path.clear();
        let total = self.add(Total {}, &terms, &[])?;
        let root = self.add(Unary { kind: UnaryKind::Sqrt }, &[total], &[])?;
        let size = self.add(Unary { kind: UnaryKind::Abs }, &[scale], &[])?;
        self.add(Binary { kind: BinaryKind::Mul }, &[root, size], &[])
    }

    /// `scale`, or NaN if the norm is not finite.
    fn guard(&mut self, norm: ValueId, scale: ValueId) -> Result<ValueId, PassError> {
        let one = self.add(Affine { scale: 0.0, offset: 1.0 }, &[norm], &[])?;
        self.add(Binary { kind: BinaryKind::Mul }, &[scale, one], &[])
    }

    /// `scale * min(1, max_norm / (norm + 1e-6))`
    fn clip(&mut self, norm: ValueId, max_norm: f64, scale: ValueId) -> Result<ValueId, PassError> {
        let scalar = [TensorType::scalar(DType::F32)];
        let norm = self.add(Affine { scale: 1.0, offset: CLIP_EPS }, &[norm], &[])?;
        let largest = self.add(Constant { value: max_norm }, &[], &scalar)?;
        let ratio = self.add(Binary { kind: BinaryKind::Div }, &[largest, norm], &[])?;
        let one = self.add(Constant { value: 1.0 }, &[], &scalar)?;
        let coefficient = self.add(Binary { kind: BinaryKind::Min }, &[ratio, one], &[])?;
        self.add(Binary { kind: BinaryKind::Mul }, &[scale, coefficient], &[])
    }
}
