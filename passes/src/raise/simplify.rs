//! Removes nodes that do nothing, or that their neighbour can do.

use super::{Fired, Report};
use shardc_ir::ops::{BinaryKind, Broadcast, Constant, Matmul, OpError, Reshape, Transpose};
use shardc_ir::{Graph, NodeId, Op, OpDef, ValueId};
use std::collections::HashMap;

/// The graph without pairs of transposes and of reshapes, affine functions of affine functions,
/// casts, reshapes and products that change nothing, layouts of constants, and transposes next to
/// contractions.
pub fn simplify(graph: &Graph, report: &mut Report) -> Result<Graph, OpError> {
    let users = graph.users();
    let mut uses: HashMap<ValueId, usize> = users.into_iter().map(|(value, users)| (value, users.len())).collect();
    for output in &graph.outputs {
        *uses.entry(output.value).or_default() += 1;
    }
    let simplified = graph.rebuild(|to, id, map| {
        let mut site = Site { to, from: graph, id, uses: &uses };
        let operands: Vec<ValueId> = graph.node(id).operands.iter().map(|operand| map[operand]).collect();
        let Some((rule, value)) = site.simpler(&operands)? else { return Ok(false) };
        map.insert(graph.result(id), value);
        report.fired.push(Fired { rule: rule.to_string(), path: graph.node(id).path.clone(), explanation: Vec::new() });
        Ok(true)
    })?;
    simplified.rebuild(|_, _, _| Ok(false))
}

struct Site<'a> {
    to: &'a mut Graph,
    from: &'a Graph,
    id: NodeId,
    /// How often the values of `from` are read.
    uses: &'a HashMap<ValueId, usize>,
}

type Simpler = Result<Option<(&'static str, ValueId)>, OpError>;

impl Site<'_> {
    fn add(&mut self, op: impl Into<Op>, operands: &[ValueId], declare: bool) -> Result<ValueId, OpError> {
        let node = self.from.node(self.id);
        let declared = if declare { self.from.result_types(self.id) } else { Vec::new() };
        let added = self.to.add_as(op.into(), operands, &declared, node.path.clone(), node.role)?;
        Ok(self.to.result(added))
    }

    /// The number that a value holds everywhere.
    fn number(&self, value: ValueId) -> Option<f64> {
        match &self.to.def(value).op {
            Op::Constant(constant) => Some(constant.value),
            _ => None,
        }
    }

    /// Whether nothing else reads what one node of `from` reads.
    fn reads_alone(&self, node: NodeId, operand: usize) -> bool {
        self.from.node(node).operands.get(operand).is_some_and(|value| self.uses.get(value) == Some(&1))
    }

    /// The rule that fired, and the value in the place of the node's.
    fn simpler(&mut self, operands: &[ValueId]) -> Simpler {
        let node = self.from.node(self.id);
        let ty = self.from.ty(self.from.result(self.id)).clone();
        let done = |rule, value| Ok(Some((rule, value)));
        if let (Op::Reshape(_) | Op::Broadcast(_) | Op::Cast(_), [x]) = (&node.op, operands) {
            if *self.to.ty(*x) == ty {
                return done("identity", *x);
            }
            let number = self.number(*x).filter(|_| ty.dtype.is_float() && self.to.ty(*x).dtype.is_float());
            if let Some(value) = number {
                return done("layout_of_constant", self.add(Constant { value }, &[], true)?);
            }
        }
        match (&node.op, operands) {
            (Op::Reshape(_), [x]) if matches!(self.to.def(*x).op, Op::Reshape(_)) => {
                let source = self.to.def(*x).operands[0];
                if *self.to.ty(source) == ty {
                    return done("reshapes", source);
                }
                done("reshapes", self.add(Reshape {}, &[source], true)?)
            }
            (Op::Broadcast(op), [x]) => {
                let Op::Broadcast(inner) = &self.to.def(*x).op else { return Ok(None) };
                let dims = inner.dims.iter().map(|dim| op.dims[*dim]).collect();
                let source = self.to.def(*x).operands[0];
                done("broadcasts", self.add(Broadcast { dims }, &[source], true)?)
            }
            (Op::Transpose(op), [x]) => self.transpose(&op.permutation.clone(), *x),
            (Op::Affine(op), [x]) => {
                if (op.scale, op.offset) == (1.0, 0.0) {
                    return done("identity", *x);
                }
                let Op::Affine(inner) = &self.to.def(*x).op else { return Ok(None) };
                if !ty.dtype.is_float() {
                    return Ok(None);
                }
                let Some(both) = op.after(inner) else { return Ok(None) };
                let source = self.to.def(*x).operands[0];
                done("affines", self.add(both, &[source], false)?)
            }
            (Op::Binary(op), [a, b]) => {
                for (number, other) in [(*b, *a), (*a, *b)] {
                    let unit = match op.kind {
                        BinaryKind::Mul => 1.0,
                        BinaryKind::Add => 0.0,
                        BinaryKind::Div if other == *a => 1.0,
                        BinaryKind::Sub if other == *a => 0.0,
                        _ => continue,
                    };
                    if self.number(number) == Some(unit) && *self.to.ty(other) == ty {
                        return done("identity", other);
                    }
                }
                Ok(None)
            }
            (Op::Matmul(op), [a, b]) => self.matmul(&op.clone(), [*a, *b]),
            _ => Ok(None),
        }
    }

    /// A transpose of a transpose, or of a contraction that nothing else reads, with or without a bias.
    fn transpose(&mut self, permutation: &[usize], x: ValueId) -> Simpler {
        if is_identity(permutation) {
            return Ok(Some(("identity", x)));
        }
        let inner = self.to.def(x).clone();
        let shape = &self.to.ty(x).shape;
        let is_kept = permutation.iter().filter(|dim| shape[**dim] != 1).is_sorted();
        // Filters of one element: what is stored lies as it is read.
        if is_kept && inner.op.is_leaf() {
            return Ok(Some(("transpose_of_ones", self.add(Reshape {}, &[x], true)?)));
        }
        match &inner.op {
            Op::Transpose(first) => {
                let both: Vec<usize> = permutation.iter().map(|dim| first.permutation[*dim]).collect();
                let source = inner.operands[0];
                if is_identity(&both) {
                    return Ok(Some(("transposes", source)));
                }
                Ok(Some(("transposes", self.add(Transpose { permutation: both }, &[source], false)?)))
            }
            Op::Matmul(_) if self.reads_alone(self.id, 0) => {
                Ok(self.permuted(permutation, x)?.map(|made| ("transpose_of_matmul", made)))
            }
            Op::Binary(sum) if sum.kind == BinaryKind::Add && self.reads_alone(self.id, 0) => {
                let Some(made) = self.biased(permutation, [inner.operands[0], inner.operands[1]])? else {
                    return Ok(None);
                };
                Ok(Some(("transpose_of_biased_matmul", self.add(sum.clone(), &made, true)?)))
            }
            _ => Ok(None),
        }
    }

    /// A contraction and what is copied to be added to it, both with their dimensions in another order, if nothing but the
    /// sum reads the contraction. The bias stays as it is: no dimensions of it change places.
    fn biased(&mut self, permutation: &[usize], sum: [ValueId; 2]) -> Result<Option<[ValueId; 2]>, OpError> {
        let Op::Broadcast(bias) = self.to.def(sum[1]).op.clone() else { return Ok(None) };
        let place = |dim: &usize| permutation.iter().position(|from| from == dim);
        let dims: Vec<usize> = bias.dims.iter().filter_map(place).collect();
        let def = self.from.value(self.from.node(self.id).operands[0]).def;
        if !dims.is_sorted() || !self.reads_alone(def, 0) {
            return Ok(None);
        }
        let Some(product) = self.permuted(permutation, sum[0])? else { return Ok(None) };
        let source = self.to.def(sum[1]).operands[0];
        Ok(Some([product, self.add(Broadcast { dims }, &[source], true)?]))
    }

    /// A contraction with the dimensions of what it makes in another order.
    fn permuted(&mut self, permutation: &[usize], product: ValueId) -> Result<Option<ValueId>, OpError> {
        let node = self.to.def(product).clone();
        let Op::Matmul(op) = &node.op else { return Ok(None) };
        let Ok([a, b, c]) = op.letters() else { return Ok(None) };
        let c = permutation.iter().map(|dim| c[*dim]).collect();
        let declared = self.from.result_types(self.id);
        let made =
            self.to.add_as(Matmul::of_letters([a, b, c]).into(), &node.operands, &declared, node.path, node.role)?;
        Ok(Some(self.to.result(made)))
    }

    /// A contraction of transposes.
    fn matmul(&mut self, op: &Matmul, operands: [ValueId; 2]) -> Simpler {
        let Ok([a, b, c]) = op.letters() else { return Ok(None) };
        let mut tensors = [a, b];
        let (mut read, mut changed) = (operands, false);
        for (letters, value) in tensors.iter_mut().zip(&mut read) {
            let node = self.to.def(*value);
            if let Op::Transpose(transpose) = &node.op {
                let mut before = letters.clone();
                for (to, from) in transpose.permutation.iter().enumerate() {
                    before[*from] = letters[to];
                }
                (*letters, *value, changed) = (before, node.operands[0], true);
            }
        }
        if !changed {
            return Ok(None);
        }
        let [a, b] = tensors;
        Ok(Some(("matmul_of_transpose", self.add(Matmul::of_letters([a, b, c]), &read, true)?)))
    }
}

fn is_identity(permutation: &[usize]) -> bool {
    permutation.iter().enumerate().all(|(index, dim)| index == *dim)
}
