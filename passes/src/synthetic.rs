//! Models that nobody wrote: what planning is measured and tested on where no layer may repeat.

use crate::differentiate::differentiate;
use crate::error::PassError;
use crate::optimizer::{OptimizerConfig, add_optimizer};
use crate::random::Random;
use shardc_ir::ops::*;
use shardc_ir::{DType, Graph, NodeId, Op, OutputKind, Role, TensorType, ValueId};

/// The sizes of a synthetic model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// What all else is drawn from.
    pub seed: u64,
    /// Nodes of the forward pass, at least.
    pub nodes: usize,
    /// Samples of a step.
    pub batch: u64,
    /// Features of the residual stream; those of the layers are between half of it and four times.
    pub width: u64,
    /// The element type of the computation; weights are f32.
    pub dtype: DType,
}

/// The training step of a residual network of which no two layers are alike: products of different
/// widths, gates, norms, and sums with what layers far back made. Its inputs are `x: [batch, width]`.
///
/// # Errors
/// None but a bug.
pub fn residual(sizes: Sizes) -> Result<Graph, PassError> {
    let mut maker = Maker { graph: Graph::new("residual"), random: Random(sizes.seed), dtype: sizes.dtype };
    let made = maker.model(sizes).map_err(PassError::ill_formed("synthetic"));
    made.and_then(|()| add_optimizer(differentiate(&maker.graph, "loss")?, &OptimizerConfig::default()))
}

struct Maker {
    graph: Graph,
    random: Random,
    dtype: DType,
}

impl Maker {
    fn model(&mut self, sizes: Sizes) -> Result<(), OpError> {
        let rows = TensorType::new(self.dtype, [sizes.batch, sizes.width]);
        let mut x = self.add(Input { name: "x".into() }, &[], std::slice::from_ref(&rows), "")?;
        // What later layers may read again.
        let mut known = vec![x];
        for index in 0.. {
            if self.graph.node_count() >= sizes.nodes {
                break;
            }
            x = self.layer(x, &known, &format!("layers.{index}"), sizes.width)?;
            known.push(x);
        }
        let squares = self.add(Binary { kind: BinaryKind::Mul }, &[x, x], &[], "loss")?;
        let loss = self.add(Reduce { kind: ReduceOp::Sum, dims: vec![0, 1] }, &[squares], &[], "loss")?;
        self.graph.output("loss", loss, OutputKind::Result);
        Ok(())
    }

    fn layer(&mut self, x: ValueId, known: &[ValueId], path: &str, width: u64) -> Result<ValueId, OpError> {
        let hidden = (1 + self.random.below(8) as u64) * (width / 2);
        let gamma = self.parameter(&format!("{path}.norm.gamma"), &[width])?;
        let y = self.add(RmsNorm { eps: 1e-5 }, &[x, gamma], &[], &format!("{path}.norm"))?;
        let up = self.linear(y, &format!("{path}.up"), hidden)?;
        let inner = match self.random.below(3) {
            0 => self.add(Unary { kind: UnaryKind::Gelu }, &[up], &[], path)?,
            1 => self.add(Unary { kind: UnaryKind::Tanh }, &[up], &[], path)?,
            _ => {
                let gate = self.linear(y, &format!("{path}.gate"), hidden)?;
                self.add(Swiglu {}, &[gate, up], &[], path)?
            }
        };
        let down = self.linear(inner, &format!("{path}.down"), width)?;
        let sum = self.add(Binary { kind: BinaryKind::Add }, &[x, down], &[], path)?;
        if self.random.below(3) > 0 {
            return Ok(sum);
        }
        let far = known[self.random.below(known.len())];
        self.add(Binary { kind: BinaryKind::Add }, &[sum, far], &[], path)
    }

    fn linear(&mut self, x: ValueId, name: &str, out: u64) -> Result<ValueId, OpError> {
        let width = self.graph.ty(x).shape[1];
        let weight = self.parameter(&format!("{name}.weight"), &[width, out])?;
        self.add(Matmul::new("bk,kn->bn"), &[x, weight], &[], name)
    }

    fn parameter(&mut self, name: &str, shape: &[u64]) -> Result<ValueId, OpError> {
        let path = name.rsplit_once('.').map_or("", |(path, _)| path).to_string();
        let ty = TensorType::new(DType::F32, shape);
        let leaf = self.add(Parameter { name: name.into(), frozen: false }, &[], std::slice::from_ref(&ty), &path)?;
        match self.dtype {
            DType::F32 => Ok(leaf),
            dtype => self.add(Cast {}, &[leaf], &[ty.with_dtype(dtype)], &path),
        }
    }

    fn add(&mut self, op: impl Into<Op>, of: &[ValueId], types: &[TensorType], path: &str) -> Result<ValueId, OpError> {
        let node: NodeId = self.graph.add_as(op.into(), of, types, path.to_string(), Role::Forward)?;
        Ok(self.graph.node(node).results[0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::verify;

    #[test]
    fn models_are_legal_and_repeat_nothing() {
        let sizes = Sizes { seed: 7, nodes: 100, batch: 8, width: 64, dtype: DType::Bf16 };
        let graph = residual(sizes).unwrap();
        verify::graph(&graph).unwrap();
        let forward = graph.nodes().filter(|(_, node)| node.role == Role::Forward).count();
        assert!((100..130).contains(&forward), "{forward}");
        assert_eq!(residual(sizes).unwrap().to_string(), graph.to_string());
        assert_ne!(residual(Sizes { seed: 8, ..sizes }).unwrap().to_string(), graph.to_string());
    }
}
