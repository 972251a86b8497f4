//! What an operation needs to add its derivative to a graph.

use super::{Affine, Binary, BinaryKind, Broadcast, Cast, Constant, Op, OpError, Reduce, ReduceOp, Reshape};
use crate::entity::{NodeId, ValueId};
use crate::graph::{Graph, Role};
use crate::types::{DType, TensorType};

/// Why a derivative could not be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GradientError {
    /// The operation has none.
    #[error("{node} ({op}, from `{path}`) has no derivative, and a trained parameter depends on it")]
    NotDifferentiable {
        /// The node.
        node: NodeId,
        /// The operation.
        op: String,
        /// The module it came from.
        path: String,
    },
    /// A node of the derivative could not be built: a bug of the operation's file.
    #[error("the derivative of {node} is ill-formed")]
    IllFormed {
        /// The forward node.
        node: NodeId,
        /// What was wrong.
        source: OpError,
    },
}

/// One forward node whose derivative is being made.
///
/// A cotangent has the type of its value, but for a parameter's (also one cast to 16 bits, or
/// rearranged), which may be f32: see [`wanted_dtype`](Self::wanted_dtype).
///
/// [`OpDef::gradient`](super::OpDef::gradient) reads the cotangents of the results and
/// [`set`](Self::set)s the cotangents of the operands that need one, adding nodes to the graph.
pub struct Gradient<'a> {
    /// The graph, to which nodes are added behind all others.
    pub graph: &'a mut Graph,
    /// The forward node.
    pub node: NodeId,
    /// The operands of the forward node.
    pub operands: Vec<ValueId>,
    /// The results of the forward node.
    pub results: Vec<ValueId>,
    /// Per result, its cotangent; `None` if the loss does not depend on it.
    pub cotangents: Vec<Option<ValueId>>,
    /// Per operand, whether a trained parameter depends on it.
    pub needed: Vec<bool>,
    /// Per operand, its cotangent, as far as it has been set.
    pub made: Vec<Option<ValueId>>,
}

impl Gradient<'_> {
    /// The cotangent of result `index`, or zeros if the loss does not depend on it.
    pub fn cotangent(&mut self, index: usize) -> Result<ValueId, GradientError> {
        if let Some(cotangent) = self.cotangents[index] {
            return Ok(cotangent);
        }
        let ty = self.graph.ty(self.results[index]).clone();
        self.add(Constant { value: 0.0 }, &[], &[ty])
    }

    /// The type of operand `index`.
    pub fn operand_type(&self, index: usize) -> TensorType {
        self.graph.ty(self.operands[index]).clone()
    }

    /// Adds a node that came from the forward node; gives its first result.
    pub fn add(
        &mut self,
        op: impl Into<Op>,
        operands: &[ValueId],
        declared: &[TensorType],
    ) -> Result<ValueId, GradientError> {
        Ok(self.add_many(op, operands, declared)?[0])
    }

    /// Adds a node that came from the forward node; gives its results.
    pub fn add_many(
        &mut self,
        op: impl Into<Op>,
        operands: &[ValueId],
        declared: &[TensorType],
    ) -> Result<Vec<ValueId>, GradientError> {
        let operands = operands.iter().map(|operand| self.copied(*operand)).collect::<Result<Vec<_>, _>>()?;
        let (node, path) = (self.node, self.graph.node(self.node).path.clone());
        let added = self.graph.add_as(op.into(), &operands, declared, path, Role::Backward(node));
        let added = added.map_err(|source| GradientError::IllFormed { node, source })?;
        Ok(self.graph.node(added).results.clone())
    }

    /// Copies of a smaller forward value are made again beside what reads them: so that value is kept instead of them.
    fn copied(&mut self, value: ValueId) -> Result<ValueId, GradientError> {
        let node = self.graph.def(value);
        let (Op::Broadcast(op), Role::Forward) = (&node.op, node.role) else { return Ok(value) };
        let (op, source, ty) = (op.clone(), node.operands[0], self.graph.ty(value).clone());
        self.add(op, &[source], &[ty])
    }

    /// `a f b`; a product with a constant 1 is the other factor.
    pub fn binary(&mut self, kind: BinaryKind, a: ValueId, b: ValueId) -> Result<ValueId, GradientError> {
        if kind == BinaryKind::Mul {
            for (one, other) in [(a, b), (b, a)] {
                if self.constant_of(one) == Some(1.0) && self.graph.ty(one).rank() <= self.graph.ty(other).rank() {
                    return Ok(other);
                }
            }
        }
        self.add(Binary { kind }, &[a, b], &[])
    }

    /// `scale * x`
    pub fn scale(&mut self, x: ValueId, scale: f64) -> Result<ValueId, GradientError> {
        if scale == 1.0 {
            return Ok(x);
        }
        if let Some(value) = self.constant_of(x) {
            return self.constant_like(x, scale * value);
        }
        self.add(Affine { scale, offset: 0.0 }, &[x], &[])
    }

    /// The number that a value has everywhere, if a constant makes it.
    fn constant_of(&self, value: ValueId) -> Option<f64> {
        match &self.graph.def(value).op {
            Op::Constant(constant) => Some(constant.value),
            _ => None,
        }
    }

    /// One number in the type of another value.
    pub fn constant_like(&mut self, like: ValueId, value: f64) -> Result<ValueId, GradientError> {
        let ty = self.graph.ty(like).clone();
        self.add(Constant { value }, &[], &[ty])
    }

    /// The value in another element type, or itself if it has that type.
    pub fn cast(&mut self, x: ValueId, dtype: DType) -> Result<ValueId, GradientError> {
        let ty = self.graph.ty(x).clone();
        if ty.dtype == dtype {
            return Ok(x);
        }
        self.add(Cast {}, &[x], &[ty.with_dtype(dtype)])
    }

    /// The value in another shape, or itself if it has that shape.
    pub fn reshape(&mut self, x: ValueId, shape: &[u64]) -> Result<ValueId, GradientError> {
        let ty = self.graph.ty(x).clone();
        if ty.shape == shape {
            return Ok(x);
        }
        self.add(Reshape {}, &[x], &[ty.with_shape(shape)])
    }

    /// The value copied into a shape, its dimension `i` becoming `dims[i]`.
    pub fn broadcast(&mut self, x: ValueId, dims: Vec<usize>, shape: &[u64]) -> Result<ValueId, GradientError> {
        let ty = self.graph.ty(x).with_shape(shape);
        if self.graph.ty(x).shape == shape {
            return Ok(x);
        }
        if let Some(value) = self.constant_of(x) {
            return self.add(Constant { value }, &[], &[ty]);
        }
        self.add(Broadcast { dims }, &[x], &[ty])
    }

    /// The sum over some dimensions, in an element type.
    pub fn sum(&mut self, x: ValueId, dims: Vec<usize>, dtype: DType) -> Result<ValueId, GradientError> {
        if dims.is_empty() {
            return self.cast(x, dtype);
        }
        let ty = self.graph.ty(x);
        let kept: Vec<u64> = (0..ty.rank()).filter(|dim| !dims.contains(dim)).map(|dim| ty.shape[dim]).collect();
        let declared = [TensorType::new(dtype, kept)];
        self.add(Reduce { kind: ReduceOp::Sum, dims }, &[x], &declared)
    }

    /// The cotangent of operand `index` of an elementwise operation from that in the shape of the
    /// result: its sum, if the operand is a scalar.
    pub fn sum_to_scalar(&mut self, x: ValueId, index: usize) -> Result<ValueId, GradientError> {
        let rank = self.graph.ty(x).rank();
        if rank == 0 || self.operand_type(index).rank() > 0 {
            return Ok(x);
        }
        let dtype = self.wanted_dtype(index);
        self.sum(x, (0..rank).collect(), dtype)
    }

    /// The element type in which the cotangent of operand `index` is to be summed and kept: f32 for
    /// a parameter, or a parameter cast or rearranged, whatever it was cast to; else the operand's.
    pub fn wanted_dtype(&self, index: usize) -> DType {
        let dtype = self.operand_type(index).dtype;
        if dtype.is_float() && is_weight(self.graph, self.operands[index]) { DType::F32 } else { dtype }
    }

    /// As [`wanted_dtype`](Self::wanted_dtype), of an operand whose cotangent is a sum: f32 as well for what was cast
    /// from f32, whose derivative takes the cotangent back there, so that the sum is not rounded in between.
    pub fn summed_dtype(&self, index: usize) -> DType {
        let node = self.graph.def(self.operands[index]);
        let is_from_f32 = |value: &ValueId| self.graph.ty(*value).dtype == DType::F32;
        match &node.op {
            Op::Cast(_) if self.operand_type(index).dtype.is_float() && node.operands.iter().all(is_from_f32) => {
                DType::F32
            }
            _ => self.wanted_dtype(index),
        }
    }

    /// Sets the cotangent of operand `index`.
    pub fn set(&mut self, index: usize, cotangent: ValueId) {
        self.made[index] = Some(cotangent);
    }

    /// Sets the cotangents of all operands that need one, from the results of a derivative that has
    /// one per operand in order, each in the element type its operand wants.
    pub fn set_parts(&mut self, parts: &[ValueId]) -> Result<(), GradientError> {
        for (index, part) in parts.iter().enumerate() {
            if self.needed[index] {
                let dtype = self.wanted_dtype(index);
                let part = self.cast(*part, dtype)?;
                self.set(index, part);
            }
        }
        Ok(())
    }

    /// The error that this node has no derivative.
    pub fn not_differentiable(&self) -> GradientError {
        let node = self.graph.node(self.node);
        GradientError::NotDifferentiable { node: self.node, op: node.op.name().to_string(), path: node.path.clone() }
    }
}

/// Whether a value is a parameter, or one cast or rearranged: what cast to 16 bits stands for it.
fn is_weight(graph: &Graph, value: ValueId) -> bool {
    let node = graph.def(value);
    match &node.op {
        Op::Parameter(_) => true,
        Op::Cast(_) | Op::Reshape(_) | Op::Transpose(_) | Op::Slice(_) | Op::Pad(_) | Op::Concat(_) => {
            node.operands.iter().all(|operand| is_weight(graph, *operand))
        }
        _ => false,
    }
}
