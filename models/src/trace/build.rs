//! Adds nodes to a graph, simplifying on the way.
//!
//! Burn keeps reduced dimensions at size one, gives scalars the shape `[1]` and widens operands
//! silently. Written down as it is, half the graph would be reshapes. So a reshape that only adds
//! or removes dimensions of size one is pushed towards the results, where it meets the next one
//! and cancels; numbers become part of `affine`; what is left without a reader is dropped at the
//! end of the trace.

use super::error::TraceError;
use shardc_ir::ops::{
    Affine, Binary, BinaryKind, Broadcast, Cast, Compare, CompareKind, Constant, Reduce, ReduceOp, Reshape, Select,
    Transpose, Unary, UnaryKind,
};
use shardc_ir::{DType, Graph, Op, Role, TensorType, ValueId};

/// The result of adding something.
pub(super) type Built = Result<ValueId, TraceError>;

/// A graph under construction.
pub(super) struct Builder {
    /// The graph so far.
    pub graph: Graph,
    /// The module path of the nodes that are added.
    pub path: String,
}

/// The sizes that are not one.
fn proper(shape: &[u64]) -> Vec<u64> {
    shape.iter().copied().filter(|size| *size != 1).collect()
}

impl Builder {
    /// An empty graph.
    pub fn new(name: &str) -> Self {
        Self { graph: Graph::new(name), path: String::new() }
    }

    /// Adds a node as it is and gives its results.
    pub fn emit_all(
        &mut self,
        op: impl Into<Op>,
        operands: &[ValueId],
        declared: &[TensorType],
    ) -> Result<Vec<ValueId>, TraceError> {
        let path = self.path.clone();
        let id = self.graph.add_as(op.into(), operands, declared, path.clone(), Role::Forward);
        let id = id.map_err(|error| TraceError::Bug { path, error })?;
        Ok(self.graph.node(id).results.clone())
    }

    /// Adds a node as it is and gives its first result.
    pub fn emit(&mut self, op: impl Into<Op>, operands: &[ValueId], declared: &[TensorType]) -> Built {
        Ok(self.emit_all(op, operands, declared)?[0])
    }

    /// A value's type.
    pub fn ty(&self, value: ValueId) -> TensorType {
        self.graph.ty(value).clone()
    }

    /// A value's shape.
    pub fn shape(&self, value: ValueId) -> Vec<u64> {
        self.graph.ty(value).shape.clone()
    }

    /// The operation that makes a value.
    pub fn op(&self, value: ValueId) -> &Op {
        &self.graph.def(value).op
    }

    /// An operand of the operation that makes a value.
    pub fn operand(&self, value: ValueId, index: usize) -> ValueId {
        self.graph.def(value).operands[index]
    }

    /// One number everywhere.
    pub fn constant(&mut self, value: f64, ty: TensorType) -> Built {
        self.emit(Constant { value }, &[], &[ty])
    }

    /// The number that a value holds everywhere, if that is known.
    pub fn number(&self, value: ValueId) -> Option<f64> {
        match self.op(value) {
            Op::Constant(constant) => Some(constant.value),
            Op::Reshape(_) | Op::Broadcast(_) => self.number(self.operand(value, 0)),
            _ => None,
        }
    }

    /// The same elements in another shape.
    pub fn reshape(&mut self, value: ValueId, shape: &[u64]) -> Built {
        let ty = self.ty(value);
        if ty.shape == shape {
            return Ok(value);
        }
        if let Op::Reshape(_) = self.op(value) {
            return self.reshape(self.operand(value, 0), shape);
        }
        if let Some(number) = self.number(value) {
            return self.constant(number, ty.with_shape(shape));
        }
        if let Op::Literal(literal) = self.op(value) {
            let literal = literal.clone();
            return self.emit(literal, &[], &[ty.with_shape(shape)]);
        }
        self.emit(Reshape {}, &[value], &[ty.with_shape(shape)])
    }

    /// The dimensions in another order.
    pub fn transpose(&mut self, value: ValueId, permutation: &[usize]) -> Built {
        if permutation.iter().enumerate().all(|(index, dim)| index == *dim) {
            return Ok(value);
        }
        if let Op::Transpose(inner) = self.op(value) {
            let both: Vec<usize> = permutation.iter().map(|dim| inner.permutation[*dim]).collect();
            return self.transpose(self.operand(value, 0), &both);
        }
        self.emit(Transpose { permutation: permutation.to_vec() }, &[value], &[])
    }

    /// What a value is without the reshape that only added or removed dimensions of size one.
    pub fn strip(&self, value: ValueId) -> ValueId {
        if let Op::Reshape(_) = self.op(value) {
            let source = self.operand(value, 0);
            if proper(&self.graph.ty(source).shape) == proper(&self.graph.ty(value).shape) {
                return source;
            }
        }
        value
    }

    /// A value widened to a shape, as Burn and NumPy do: aligned at the last dimension, sizes of
    /// one repeated.
    pub fn broadcast(&mut self, value: ValueId, shape: &[u64]) -> Built {
        let ty = self.ty(value);
        if ty.shape == shape {
            return Ok(value);
        }
        if let Some(number) = self.number(value) {
            return self.constant(number, ty.with_shape(shape));
        }
        let offset = shape.len().saturating_sub(ty.rank());
        let dims: Vec<usize> = (0..ty.rank()).filter(|dim| ty.shape[*dim] != 1).map(|dim| dim + offset).collect();
        let source = self.reshape(value, &proper(&ty.shape))?;
        if self.shape(source) == shape {
            return Ok(source);
        }
        self.emit(Broadcast { dims }, &[source], &[ty.with_shape(shape)])
    }

    /// The shape that two values widen to together.
    pub fn common_shape(&self, a: ValueId, b: ValueId) -> Vec<u64> {
        let (a, b) = (self.shape(a), self.shape(b));
        let rank = a.len().max(b.len());
        let size = |shape: &[u64], dim: usize| (dim + shape.len()).checked_sub(rank).map_or(1, |at| shape[at]);
        (0..rank).map(|dim| if size(&a, dim) == 1 { size(&b, dim) } else { size(&a, dim) }).collect()
    }

    /// Applies an elementwise operation below a reshape that only moves dimensions of size one.
    fn lift(&mut self, value: ValueId, apply: impl FnOnce(&mut Self, ValueId) -> Built) -> Built {
        let source = self.strip(value);
        let shape = self.shape(value);
        let result = apply(self, source)?;
        self.reshape(result, &shape)
    }

    /// A function of one operand.
    pub fn unary(&mut self, kind: UnaryKind, value: ValueId) -> Built {
        self.lift(value, |b, x| {
            let inner = match b.op(x) {
                Op::Unary(inner) => Some(inner.kind),
                _ => None,
            };
            match (kind, inner) {
                (UnaryKind::Neg, Some(UnaryKind::Neg)) => Ok(b.operand(x, 0)),
                (UnaryKind::Recip, Some(UnaryKind::Sqrt)) => {
                    let y = b.operand(x, 0);
                    b.emit(Unary { kind: UnaryKind::Rsqrt }, &[y], &[])
                }
                (UnaryKind::Neg, _) if matches!(b.op(x), Op::Binary(op) if op.kind == BinaryKind::Sub) => {
                    let (left, right) = (b.operand(x, 0), b.operand(x, 1));
                    b.emit(Binary { kind: BinaryKind::Sub }, &[right, left], &[])
                }
                _ => b.emit(Unary { kind }, &[x], &[]),
            }
        })
    }

    /// `scale * x + offset`.
    pub fn affine(&mut self, value: ValueId, scale: f64, offset: f64) -> Built {
        if (scale, offset) == (1.0, 0.0) {
            return Ok(value);
        }
        let ty = self.ty(value);
        if let Some(number) = self.number(value) {
            return self.constant(scale * number + offset, ty);
        }
        self.lift(value, |b, x| {
            if scale == 0.5
                && offset == 0.0
                && let Some(y) = b.gelu_argument(x)
            {
                return b.emit(Unary { kind: UnaryKind::GeluTanh }, &[y], &[]);
            }
            if let Op::Affine(inner) = b.op(x)
                && ty.dtype.is_float()
                && let Some(both) = (Affine { scale, offset }).after(inner)
            {
                let y = b.operand(x, 0);
                return b.affine(y, both.scale, both.offset);
            }
            b.emit(Affine { scale, offset }, &[x], &[])
        })
    }

    /// `x`, if the value is `x * (1 + tanh(sqrt(2/pi) * (x + 0.044715 * x^3)))`.
    fn gelu_argument(&self, value: ValueId) -> Option<ValueId> {
        let binary = |v: ValueId, kind| matches!(self.op(v), Op::Binary(op) if op.kind == kind);
        let affine = |v: ValueId| match self.op(v) {
            Op::Affine(op) => Some((self.operand(v, 0), op.scale, op.offset)),
            _ => None,
        };
        if !binary(value, BinaryKind::Mul) {
            return None;
        }
        let (x, factor) = (self.operand(value, 0), self.operand(value, 1));
        let (tanh, one, offset) = affine(factor)?;
        if (one, offset) != (1.0, 1.0) || !matches!(self.op(tanh), Op::Unary(op) if op.kind == UnaryKind::Tanh) {
            return None;
        }
        let (sum, scale, offset) = affine(self.operand(tanh, 0))?;
        let root = (2.0 / std::f64::consts::PI).sqrt();
        if (scale - root).abs() > 1e-6 || offset != 0.0 || !binary(sum, BinaryKind::Add) || self.operand(sum, 0) != x {
            return None;
        }
        let (cube, factor, offset) = affine(self.operand(sum, 1))?;
        if (factor - 0.044715).abs() > 1e-9 || offset != 0.0 || !binary(cube, BinaryKind::Mul) {
            return None;
        }
        let square = self.operand(cube, 0);
        let squared = binary(square, BinaryKind::Mul) && self.operand(square, 0) == x && self.operand(square, 1) == x;
        (squared && self.operand(cube, 1) == x).then_some(x)
    }

    /// Both operands in one shape (a scalar may stay one), and the shape of the result.
    fn align(&mut self, a: ValueId, b: ValueId) -> Result<(ValueId, ValueId, Vec<u64>), TraceError> {
        let shape = self.common_shape(a, b);
        let (lean_a, lean_b) = (self.strip(a), self.strip(b));
        if self.shape(lean_a) == self.shape(lean_b) && proper(&self.shape(lean_a)) == proper(&shape) {
            return Ok((lean_a, lean_b, shape));
        }
        let (count_a, count_b) = (self.ty(a).elements(), self.ty(b).elements());
        if count_a == 1 || count_b == 1 {
            let a = if count_a == 1 { self.reshape(a, &[])? } else { self.broadcast(a, &shape)? };
            let b = if count_b == 1 { self.reshape(b, &[])? } else { self.broadcast(b, &shape)? };
            return Ok((a, b, shape));
        }
        Ok((self.broadcast(a, &shape)?, self.broadcast(b, &shape)?, shape))
    }

    /// A function of two operands, widened to each other.
    pub fn binary(&mut self, kind: BinaryKind, a: ValueId, b: ValueId) -> Built {
        if let Some(simple) = self.with_number(kind, a, b)? {
            return Ok(simple);
        }
        if let Some(rows) = self.merged_rows(a, b) {
            let (shape, width) = (self.shape(a), self.shape(rows).last().copied().unwrap_or(1));
            let b = self.reshape(b, &[width])?;
            let result = self.binary(kind, rows, b)?;
            return self.reshape(result, &shape);
        }
        let (a, b, shape) = self.align(a, b)?;
        let result = match (kind, self.op(a), self.op(b)) {
            // x * sigmoid(x)
            (BinaryKind::Mul, _, Op::Unary(op)) if op.kind == UnaryKind::Sigmoid && self.operand(b, 0) == a => {
                self.emit(Unary { kind: UnaryKind::Silu }, &[a], &[])?
            }
            (BinaryKind::Mul, Op::Unary(op), _) if op.kind == UnaryKind::Sigmoid && self.operand(a, 0) == b => {
                self.emit(Unary { kind: UnaryKind::Silu }, &[b], &[])?
            }
            _ => self.emit(Binary { kind }, &[a, b], &[])?,
        };
        self.reshape(result, &shape)
    }

    /// What `a` was before its leading dimensions were merged into rows, if `b` is one such row.
    fn merged_rows(&self, a: ValueId, b: ValueId) -> Option<ValueId> {
        if !matches!(self.op(a), Op::Reshape(_)) {
            return None;
        }
        let source = self.operand(a, 0);
        let (merged, whole, row) = (self.shape(a), self.shape(source), self.shape(b));
        let fits = merged.len() == 2 && whole.len() > 2 && whole.last() == merged.last();
        let is_row = row.last() == merged.last() && proper(&row) == proper(&merged[1..]);
        (fits && is_row).then_some(source)
    }

    /// A function of two operands where one is a number, or a quotient by a root.
    fn with_number(&mut self, kind: BinaryKind, a: ValueId, b: ValueId) -> Result<Option<ValueId>, TraceError> {
        let (left, right) = (self.number(a), self.number(b));
        let float = self.ty(a).dtype.is_float();
        let shape = self.common_shape(a, b);
        let (x, scale, offset) = match (kind, left, right) {
            (BinaryKind::Add, Some(number), _) => (b, 1.0, number),
            (BinaryKind::Add, _, Some(number)) => (a, 1.0, number),
            (BinaryKind::Sub, _, Some(number)) => (a, 1.0, -number),
            (BinaryKind::Sub, Some(number), _) => (b, -1.0, number),
            (BinaryKind::Mul, Some(number), _) => (b, number, 0.0),
            (BinaryKind::Mul, _, Some(number)) => (a, number, 0.0),
            (BinaryKind::Div, _, Some(number)) if float && Affine::is_factor(1.0 / number) => (a, 1.0 / number, 0.0),
            (BinaryKind::Div, Some(number), _) if float => (self.unary(UnaryKind::Recip, b)?, number, 0.0),
            (BinaryKind::Div, _, _) if float => {
                let root = self.strip(b);
                let is_root = matches!(self.op(root), Op::Unary(op) if op.kind == UnaryKind::Sqrt);
                if !is_root || shape == self.shape(b) {
                    return Ok(None);
                }
                let reciprocal = self.unary(UnaryKind::Recip, b)?;
                return self.binary(BinaryKind::Mul, a, reciprocal).map(Some);
            }
            _ => return Ok(None),
        };
        let result = self.affine(x, scale, offset)?;
        self.broadcast(result, &shape).map(Some)
    }

    /// A function of a value and a number.
    pub fn binary_number(&mut self, kind: BinaryKind, value: ValueId, number: f64) -> Built {
        let dtype = self.ty(value).dtype;
        let number = self.constant(number, TensorType::scalar(dtype))?;
        self.binary(kind, value, number)
    }

    /// A comparison, operands widened to each other.
    pub fn compare(&mut self, kind: CompareKind, a: ValueId, b: ValueId) -> Built {
        let (a, b, shape) = self.align(a, b)?;
        let result = self.emit(Compare { kind }, &[a, b], &[])?;
        self.reshape(result, &shape)
    }

    /// A comparison with a number.
    pub fn compare_number(&mut self, kind: CompareKind, value: ValueId, number: f64) -> Built {
        let dtype = self.ty(value).dtype;
        let number = self.constant(number, TensorType::scalar(dtype))?;
        self.compare(kind, value, number)
    }

    /// `mask ? a : b`, all widened to a shape.
    pub fn select(&mut self, mask: ValueId, a: ValueId, b: ValueId, shape: &[u64]) -> Built {
        let lean = proper(shape);
        let mut operands = [mask, a, b];
        // Below a common reshape that only adds dimensions of size one, if all three are there.
        let fits = |builder: &Self, value| {
            builder.number(value).is_some()
                || builder.shape(builder.strip(value)) == lean
                || builder.shape(value) == lean
        };
        let target = if operands.iter().all(|value| fits(self, *value)) { lean } else { shape.to_vec() };
        for operand in &mut operands {
            let stripped = self.strip(*operand);
            let source = if self.shape(stripped) == target { stripped } else { *operand };
            *operand = self.broadcast(source, &target)?;
        }
        let result = self.emit(Select {}, &operands, &[])?;
        self.reshape(result, shape)
    }

    /// Another element type.
    pub fn cast(&mut self, value: ValueId, dtype: DType) -> Built {
        if self.ty(value).dtype == dtype {
            return Ok(value);
        }
        if let Some(number) = self.number(value)
            && dtype != DType::Bool
        {
            let number = if dtype.is_int() { number.trunc() } else { number };
            return self.constant(number, self.ty(value).with_dtype(dtype));
        }
        self.lift(value, |b, x| {
            let ty = b.ty(x).with_dtype(dtype);
            b.emit(Cast {}, &[x], &[ty])
        })
    }

    /// A reduction, with the reduced dimensions kept at size one.
    pub fn reduce(&mut self, kind: ReduceOp, value: ValueId, dims: &[usize]) -> Built {
        let mut kept = self.shape(value);
        let mut reduced: Vec<usize> = dims.to_vec();
        reduced.sort_unstable();
        reduced.dedup();
        for dim in &reduced {
            kept[*dim] = 1;
        }
        let result = self.emit(Reduce { kind, dims: reduced }, &[value], &[])?;
        self.reshape(result, &kept)
    }

    /// The sum over all elements, with the given shape of one element.
    pub fn reduce_all(&mut self, kind: ReduceOp, value: ValueId, shape: &[u64]) -> Built {
        let source = self.strip(value);
        let dims = (0..self.ty(source).rank()).collect();
        let result =
            if self.ty(source).rank() == 0 { source } else { self.emit(Reduce { kind, dims }, &[source], &[])? };
        self.reshape(result, shape)
    }
}
