//! Tensors that the module was given as data: as few numbers as possible reach the graph.

use super::build::{Builder, Built};
use super::error::TraceError;
use burn::tensor::TensorData;
use shardc_ir::ops::{Iota, Literal, Op, Parameter};
use shardc_ir::{DType, HostTensor, TensorType};
use std::collections::BTreeMap;

/// Beyond this many numbers a table is a frozen parameter, not a literal in the graph.
const LITERAL_LIMIT: usize = 16_384;

/// Our element type, if we have it.
pub(super) fn dtype(dtype: burn::tensor::DType) -> Option<DType> {
    use burn::tensor::DType as Burn;
    Some(match dtype {
        Burn::F32 | Burn::Flex32 => DType::F32,
        Burn::F16 => DType::F16,
        Burn::BF16 => DType::Bf16,
        Burn::I64 => DType::I64,
        Burn::I32 => DType::I32,
        Burn::Bool(_) => DType::Bool,
        _ => return None,
    })
}

/// The numbers of a tensor, row-major.
fn numbers(data: &TensorData) -> Option<Vec<f64>> {
    let bytes = data.as_bytes();
    let kind = dtype(data.dtype())?;
    let width = if kind == DType::Bool { bytes.len() / data.num_elements().max(1) } else { kind.size() as usize };
    let numbers = bytes.chunks_exact(width.max(1)).map(|chunk| match (kind, chunk) {
        (DType::F32, &[a, b, c, d]) => f64::from(f32::from_le_bytes([a, b, c, d])),
        (DType::I32, &[a, b, c, d]) => f64::from(i32::from_le_bytes([a, b, c, d])),
        (DType::I64, &[a, b, c, d, e, f, g, h]) => i64::from_le_bytes([a, b, c, d, e, f, g, h]) as f64,
        (DType::F16, &[a, b]) => half::f16::from_le_bytes([a, b]).to_f64(),
        (DType::Bf16, &[a, b]) => half::bf16::from_le_bytes([a, b]).to_f64(),
        (_, chunk) => f64::from(u8::from(chunk.iter().any(|byte| *byte != 0))),
    });
    Some(numbers.collect())
}

/// The tensor in our form; floats become f32.
pub(super) fn host_tensor(data: &TensorData) -> Option<HostTensor> {
    let shape: Vec<u64> = data.shape().iter().map(|size| *size as u64).collect();
    let kind = dtype(data.dtype())?;
    let numbers = numbers(data)?;
    Some(match kind {
        DType::I64 => HostTensor::from_i64(shape, &numbers.iter().map(|x| *x as i64).collect::<Vec<_>>()),
        DType::I32 => {
            let bytes = numbers.iter().flat_map(|x| (*x as i32).to_le_bytes()).collect();
            HostTensor { ty: TensorType::new(kind, shape), bytes }
        }
        DType::Bool => {
            let bytes = numbers.iter().map(|x| u8::from(*x != 0.0)).collect();
            HostTensor { ty: TensorType::new(kind, shape), bytes }
        }
        _ => HostTensor::from_f32(shape, &numbers.iter().map(|x| *x as f32).collect::<Vec<_>>()),
    })
}

/// Adds given data to the graph: as one number, as an index, as a literal, or, if it is large, as
/// a frozen parameter `constant.N` whose numbers go to `values`.
pub(super) fn add(builder: &mut Builder, data: &TensorData, values: &mut BTreeMap<String, HostTensor>) -> Built {
    let unknown = || TraceError::Module(format!("a tensor of element type {:?} is not supported", data.dtype()));
    let kind = dtype(data.dtype()).ok_or_else(unknown)?;
    let shape: Vec<u64> = data.shape().iter().map(|size| *size as u64).collect();
    let ty = TensorType::new(kind, shape);
    let list = numbers(data).ok_or_else(unknown)?;
    let first = list.first().copied().unwrap_or(0.0);
    if list.len() == 1 || list.iter().all(|number| *number == first) {
        return builder.constant(first, ty);
    }
    let step = list[1] - first;
    let regular = || list.iter().enumerate().all(|(index, number)| *number == first + step * index as f64);
    if ty.rank() == 1 && kind.is_int() && regular() {
        if step == 1.0 && first >= 0.0 {
            return builder.emit(Iota { dim: 0, start: first as u64 }, &[], &[ty]);
        }
        let index = builder.emit(Iota { dim: 0, start: 0 }, &[], &[ty])?;
        return builder.affine(index, step, first);
    }
    if list.len() <= LITERAL_LIMIT {
        return builder.emit(Literal { values: list }, &[], &[ty]);
    }
    let is_taken = |name: &String| {
        builder.graph.leaves().any(|(_, node)| matches!(&node.op, Op::Parameter(other) if other.name == *name))
    };
    let mut names = (0..).map(|number| format!("constant.{number}"));
    let name = names.find(|name| !is_taken(name)).unwrap_or_default();
    let tensor = host_tensor(data).ok_or_else(unknown)?;
    let leaf = builder.emit(Parameter { name: name.clone(), frozen: true }, &[], std::slice::from_ref(&tensor.ty))?;
    values.insert(name, tensor);
    builder.cast(leaf, kind)
}
