//! Burn's operations become ours.

use super::build::{Builder, Built};
use super::constants;
use super::error::{TraceError, Unsupported};
use burn::backend::ir::{
    EmbeddingOpIr, LayerNormOpIr, LinearOpIr, MatmulOpIr, ModuleOperationIr, OperationIr, RandomOpIr, TensorIr,
};
use burn::tensor::{TensorData, TensorId};
use shardc_ir::ops::{BinaryKind, Distribution, Embedding, Input, Iota, LayerNorm, Matmul, Random, SAMPLE, STEP};
use shardc_ir::{DType, HostTensor, TensorType, ValueId};
use std::collections::{BTreeMap, HashMap};

/// Converts operations one by one.
pub(super) struct Converter<'a> {
    /// The graph under construction.
    pub b: Builder,
    /// The values so far.
    pub map: HashMap<TensorId, ValueId>,
    /// Logits by the logarithm of their softmax.
    pub log_softmax: HashMap<ValueId, ValueId>,
    /// Whether random numbers differ from step to step.
    pub per_step: bool,
    /// The samples of the inputs, if these have a dimension of samples.
    pub batch: Option<u64>,
    /// What random streams are derived from.
    pub stream_name: String,
    /// The data of large tables.
    pub values: BTreeMap<String, HostTensor>,
    /// Batch normalizations that train, by their running means, with the share of a batch in running statistics.
    pub trained_norms: HashMap<TensorId, f64>,
    /// Running statistics as a step leaves them.
    pub statistics: BTreeMap<TensorId, ValueId>,
    /// What could not be converted.
    pub unsupported: Vec<Unsupported>,
    streams: Vec<u64>,
    step: Option<ValueId>,
    sample: Option<ValueId>,
    data: &'a BTreeMap<TensorId, TensorData>,
}

/// 64-bit FNV-1a of a text, to 53 bits, which every JSON reader keeps exactly.
fn hash(text: &str) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    text.bytes().fold(0xcbf2_9ce4_8422_2325, step) >> 11
}

impl<'a> Converter<'a> {
    /// Nothing converted yet.
    pub fn new(name: &str, data: &'a BTreeMap<TensorId, TensorData>, per_step: bool) -> Self {
        Self {
            b: Builder::new(name),
            map: HashMap::new(),
            log_softmax: HashMap::new(),
            per_step,
            batch: None,
            stream_name: String::new(),
            values: BTreeMap::new(),
            trained_norms: HashMap::new(),
            statistics: BTreeMap::new(),
            unsupported: Vec::new(),
            streams: Vec::new(),
            step: None,
            sample: None,
            data,
        }
    }

    /// The value of a tensor.
    pub fn value(&mut self, tensor: &TensorIr) -> Built {
        if let Some(value) = self.map.get(&tensor.id) {
            return Ok(*value);
        }
        let missing = || TraceError::Module(format!("{} has neither an operation nor data", tensor.id));
        let data = self.data.get(&tensor.id).ok_or_else(missing)?;
        let value = constants::add(&mut self.b, data, &mut self.values)?;
        self.map.insert(tensor.id, value);
        Ok(value)
    }

    /// A tensor's shape.
    pub fn sizes(&self, tensor: &TensorIr) -> Vec<u64> {
        tensor.shape.iter().map(|size| *size as u64).collect()
    }

    /// A tensor's element type.
    pub fn dtype(&self, tensor: &TensorIr) -> Result<DType, TraceError> {
        constants::dtype(tensor.dtype)
            .ok_or_else(|| TraceError::Module(format!("element type {:?} is not supported", tensor.dtype)))
    }

    /// A tensor's type.
    pub fn ty(&self, tensor: &TensorIr) -> Result<TensorType, TraceError> {
        Ok(TensorType::new(self.dtype(tensor)?, self.sizes(tensor)))
    }

    /// Converts one operation, or notes that it cannot.
    pub fn convert(&mut self, operation: &OperationIr, path: &str) -> Result<(), TraceError> {
        self.b.path = path.to_string();
        let sources: Vec<&TensorIr> = operation.inputs().collect();
        let outputs: Vec<&TensorIr> = operation.outputs().collect();
        let known = |c: &Self, tensor: &TensorIr| c.map.contains_key(&tensor.id) || c.data.contains_key(&tensor.id);
        let complete = sources.iter().all(|tensor| known(self, tensor));
        let strange = sources.iter().chain(&outputs).find(|tensor| constants::dtype(tensor.dtype).is_none());
        if let Some(tensor) = strange {
            self.reject(format!("{} of {:?}", name(operation), tensor.dtype), path);
            return Ok(());
        }
        // What follows from an operation that is not supported is looked at only for its own sake.
        if !complete {
            if !self.recognises(operation) {
                self.reject(name(operation), path);
            }
            return Ok(());
        }
        match self.dispatch(operation) {
            Some(result) => {
                let value = result?;
                if let [out] = outputs[..] {
                    self.map.insert(out.id, value);
                }
            }
            None => self.reject(name(operation), path),
        }
        Ok(())
    }

    fn reject(&mut self, operation: String, path: &str) {
        self.unsupported.push(Unsupported { operation, path: path.to_string() });
    }

    /// Whether an operation whose operands are not there would be converted if they were: it is
    /// tried on placeholders in a graph that is thrown away.
    fn recognises(&mut self, operation: &OperationIr) -> bool {
        let mut trial = Converter::new("trial", self.data, false);
        for tensor in operation.inputs() {
            let Ok(ty) = trial.ty(tensor) else { return false };
            let Ok(value) = trial.b.emit(Input { name: tensor.id.to_string() }, &[], &[ty]) else { return false };
            trial.map.insert(tensor.id, value);
        }
        trial.dispatch(operation).is_some()
    }

    fn dispatch(&mut self, operation: &OperationIr) -> Option<Built> {
        match operation {
            OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op) => self.base(op),
            OperationIr::NumericFloat(_, op) | OperationIr::NumericInt(_, op) => self.numeric(op),
            OperationIr::Float(_, op) => self.float(op),
            OperationIr::Int(op) => self.int(op),
            OperationIr::Bool(op) => self.bool(op),
            OperationIr::Activation(op) => self.activation(op),
            OperationIr::Module(op) => self.module(op),
            _ => None,
        }
    }

    fn module(&mut self, op: &ModuleOperationIr) -> Option<Built> {
        Some(match op {
            ModuleOperationIr::Embedding(op) => self.embedding(op),
            ModuleOperationIr::Linear(op) => self.linear(op),
            ModuleOperationIr::LayerNorm(op) => self.layer_norm(op),
            ModuleOperationIr::Attention(op) => self.attention(op),
            _ => return self.picture(op),
        })
    }

    fn embedding(&mut self, op: &EmbeddingOpIr) -> Built {
        let (table, ids) = (self.value(&op.weights)?, self.value(&op.indices)?);
        self.b.emit(Embedding { start: 0 }, &[table, ids], &[])
    }

    fn linear(&mut self, op: &LinearOpIr) -> Built {
        let (x, weight) = (self.value(&op.x)?, self.value(&op.weight)?);
        let result = self.matmul_values(x, weight)?;
        match &op.bias {
            Some(bias) => {
                let bias = self.value(bias)?;
                self.b.binary(BinaryKind::Add, result, bias)
            }
            None => Ok(result),
        }
    }

    fn layer_norm(&mut self, op: &LayerNormOpIr) -> Built {
        let (x, gamma) = (self.value(&op.input)?, self.value(&op.gamma)?);
        let beta = match &op.beta {
            Some(beta) => self.value(beta)?,
            None => {
                let ty = self.b.ty(gamma);
                self.b.constant(0.0, ty)?
            }
        };
        self.b.emit(LayerNorm { eps: op.epsilon.elem() }, &[x, gamma, beta], &[])
    }

    /// A matrix product.
    pub(super) fn matmul(&mut self, op: &MatmulOpIr) -> Built {
        let (a, b) = (self.value(&op.lhs)?, self.value(&op.rhs)?);
        self.matmul_values(a, b)
    }

    /// `a @ b` over the last two dimensions, the leading ones widened to each other; a vector `a`
    /// has no row dimension. Transposes of the operands become part of the notation.
    pub(super) fn matmul_values(&mut self, a: ValueId, b: ValueId) -> Built {
        if let Some(result) = self.unflattened(a, b)? {
            return Ok(result);
        }
        let (matrix, shape) = (self.b.strip(b), self.b.shape(b));
        let is_widened = self.b.shape(matrix).len() == 2 && shape.ends_with(&self.b.shape(matrix));
        let b = if is_widened { matrix } else { b };
        let mut letters = "bhacdefgijlopqrtuvwxyz".chars();
        let (shape_a, shape_b) = (self.b.shape(a), self.b.shape(b));
        let rows = shape_a.len().min(2);
        let lead = shape_a.len().max(shape_b.len()) - 2.min(shape_a.len().max(shape_b.len()));
        let at = |shape: &[u64], tail: usize, dim: usize| {
            let own = shape.len() - tail;
            (dim + own).checked_sub(lead).map(|at| shape[at])
        };
        let is_kept = |left: Option<u64>, right: Option<u64>| left.is_some() && right.is_none();
        let (mut spec_a, mut spec_b, mut spec_out) = (String::new(), String::new(), String::new());
        let (mut lean_a, mut lean_b, mut full) = (Vec::new(), Vec::new(), Vec::new());
        for dim in 0..lead {
            let (left, right) = (at(&shape_a, rows, dim), at(&shape_b, 2, dim));
            let (size_a, size_b) = (left.unwrap_or(1), right.unwrap_or(1));
            full.push(size_a.max(size_b));
            let letter = letters.next().unwrap_or('z');
            // A size of one is left out, and the result reshaped; but it stays where `a` has it beside a matrix, so that
            // a batch of one sample looks like any other.
            if size_a != 1 || is_kept(left, right) {
                spec_a.push(letter);
                lean_a.push(size_a);
            }
            if size_b != 1 {
                spec_b.push(letter);
                lean_b.push(size_b);
            }
            if size_a != 1 || size_b != 1 || is_kept(left, right) {
                spec_out.push(letter);
            }
        }
        let (tail_a, row) = match (rows, lead) {
            (2, 0) => ("mk", "m"),
            (2, _) => ("sk", "s"),
            _ => ("k", ""),
        };
        spec_a.push_str(tail_a);
        spec_b.push_str("kn");
        spec_out.push_str(&format!("{row}n"));
        lean_a.extend(&shape_a[shape_a.len() - rows..]);
        lean_b.extend(&shape_b[shape_b.len() - 2..]);
        full.extend(&shape_a[shape_a.len() - rows..shape_a.len() - 1]);
        full.push(shape_b[shape_b.len() - 1]);
        let (a, b) = (self.b.reshape(a, &lean_a)?, self.b.reshape(b, &lean_b)?);
        let (a, spec_a) = self.untranspose(a, spec_a);
        let (b, spec_b) = self.untranspose(b, spec_b);
        let result = self.b.emit(Matmul::new(format!("{spec_a},{spec_b}->{spec_out}")), &[a, b], &[])?;
        self.b.reshape(result, &full)
    }

    /// `a @ b` where `a` is a matrix whose rows are merged dimensions: Burn merges them for a linear
    /// layer and splits the result again. They are kept, so that each can be divided.
    fn unflattened(&mut self, a: ValueId, b: ValueId) -> Result<Option<ValueId>, TraceError> {
        let (shape_a, shape_b) = (self.b.shape(a), self.b.shape(b));
        if shape_a.len() != 2 || shape_b.len() != 2 || !matches!(self.b.op(a), shardc_ir::Op::Reshape(_)) {
            return Ok(None);
        }
        let source = self.b.operand(a, 0);
        let mut lead = self.b.shape(source);
        let mut row = 1;
        while row < shape_a[1] {
            let Some(size) = lead.pop() else { return Ok(None) };
            row *= size;
        }
        let rows: u64 = lead.iter().product();
        if row != shape_a[1] || rows != shape_a[0] || lead.len() < 2 {
            return Ok(None);
        }
        lead.push(row);
        let a = self.b.reshape(source, &lead)?;
        let result = self.matmul_values(a, b)?;
        self.b.reshape(result, &[shape_a[0], shape_b[1]]).map(Some)
    }

    /// The operand of a transpose, with the letters in its order.
    fn untranspose(&self, value: ValueId, spec: String) -> (ValueId, String) {
        let shardc_ir::Op::Transpose(op) = self.b.op(value) else { return (value, spec) };
        let mut letters = vec![' '; op.permutation.len()];
        for (letter, dim) in spec.chars().zip(&op.permutation) {
            letters[*dim] = letter;
        }
        (self.b.operand(value, 0), letters.into_iter().collect())
    }

    /// Random numbers, from a stream of their own.
    pub(super) fn random(&mut self, op: &RandomOpIr) -> Built {
        use burn::tensor::Distribution as Burn;
        let distribution = match op.distribution {
            Burn::Default => Distribution::Uniform { low: 0.0, high: 1.0 },
            Burn::Bernoulli(p) => Distribution::Bernoulli { p },
            Burn::Uniform(low, high) => Distribution::Uniform { low, high },
            Burn::Normal(mean, std) => Distribution::Normal { mean, std },
        };
        let mut stream = hash(&format!("{}#{}", self.stream_name, self.streams.len()));
        while self.streams.contains(&stream) {
            stream += 1;
        }
        self.streams.push(stream);
        let ty = self.ty(&op.out)?;
        let mut operands: Vec<ValueId> = Vec::new();
        if self.per_step {
            operands.push(self.step_number()?);
            operands.extend(self.places(ty.shape.first().copied().unwrap_or(0))?);
        }
        let op = Random { distribution, stream, seed: 0, global: Vec::new(), start: Vec::new() };
        self.b.emit(op, &operands, &[ty])
    }

    /// Which of so many rows each is, if they are those of the samples, of each sample as many.
    fn places(&mut self, rows: u64) -> Result<Option<ValueId>, TraceError> {
        let Some(batch) = self.batch.filter(|batch| rows > 0 && rows.is_multiple_of(*batch)) else { return Ok(None) };
        let sample = match self.sample {
            Some(sample) => sample,
            None => {
                let path = std::mem::take(&mut self.b.path);
                let ty = TensorType::new(DType::I64, [batch]);
                let sample = self.b.emit(Input { name: SAMPLE.to_string() }, &[], &[ty])?;
                self.b.path = path;
                *self.sample.insert(sample)
            }
        };
        let each = rows / batch;
        if each == 1 {
            return Ok(Some(sample));
        }
        let wide = self.b.reshape(sample, &[batch, 1])?;
        let wide = self.b.broadcast(wide, &[batch, each])?;
        let first = self.b.affine(wide, each as f64, 0.0)?;
        let ty = TensorType::new(DType::I64, [batch, each]);
        let row = self.b.emit(Iota { dim: 1, start: 0 }, &[], &[ty])?;
        let row = self.b.binary(BinaryKind::Add, first, row)?;
        self.b.reshape(row, &[rows]).map(Some)
    }

    /// The number of the step, as an integer. The input itself is f32, as the optimizer reads it.
    fn step_number(&mut self) -> Built {
        if let Some(step) = self.step {
            return Ok(step);
        }
        let path = std::mem::take(&mut self.b.path);
        let input = self.b.emit(Input { name: STEP.to_string() }, &[], &[TensorType::scalar(DType::F32)])?;
        let step = self.b.cast(input, DType::I64)?;
        self.b.path = path;
        self.step = Some(step);
        Ok(step)
    }
}

/// Burn's name of an operation: the variant, in snake case.
fn name(operation: &OperationIr) -> String {
    let text = match operation {
        OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op) => format!("{op:?}"),
        OperationIr::NumericFloat(_, op) | OperationIr::NumericInt(_, op) => format!("{op:?}"),
        OperationIr::Float(_, op) => format!("{op:?}"),
        OperationIr::Int(op) => format!("{op:?}"),
        OperationIr::Bool(op) => format!("{op:?}"),
        OperationIr::Activation(op) => format!("{op:?}"),
        OperationIr::Module(op) => format!("{op:?}"),
        OperationIr::Custom(op) => return format!("custom operation `{}`", op.id),
        other => format!("{other:?}"),
    };
    let variant = text.split(['(', ' ', '{']).next().unwrap_or_default();
    let mut name = String::new();
    for letter in variant.chars() {
        if letter.is_ascii_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.push(letter.to_ascii_lowercase());
    }
    name
}
