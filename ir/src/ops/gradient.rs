//! What an operation needs to add its derivative to a graph.

use super::{Affine, Binary, BinaryKind, Op, OpError};
use crate::entity::{NodeId, ValueId};
use crate::graph::{Graph, Role};
use crate::types::TensorType;

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
        self.add(super::Constant { value: 0.0 }, &[], &[ty])
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
        let (node, path) = (self.node, self.graph.node(self.node).path.clone());
        let added = self.graph.add_as(op.into(), operands, declared, path, Role::Backward(node));
        let added = added.map_err(|source| GradientError::IllFormed { node, source })?;
        Ok(self.graph.node(added).results.clone())
    }

    /// `a f b`
    pub fn binary(&mut self, kind: BinaryKind, a: ValueId, b: ValueId) -> Result<ValueId, GradientError> {
        self.add(Binary { kind }, &[a, b], &[])
    }

    /// `scale * x`
    pub fn scale(&mut self, x: ValueId, scale: f64) -> Result<ValueId, GradientError> {
        self.add(Affine { scale, offset: 0.0 }, &[x], &[])
    }

    /// Sets the cotangent of operand `index`.
    pub fn set(&mut self, index: usize, cotangent: ValueId) {
        self.made[index] = Some(cotangent);
    }

    /// The error that this node has no derivative.
    pub fn not_differentiable(&self) -> GradientError {
        let node = self.graph.node(self.node);
        GradientError::NotDifferentiable { node: self.node, op: node.op.name().to_string(), path: node.path.clone() }
    }
}
