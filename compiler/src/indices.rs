//! What the integers that a step is given may be: those with which it looks rows or classes up as they are.
//!
//! Kernels take an index that is out of range for a row of zeros, or a class without a logit, so that each part of a
//! divided table answers for its own rows alone. Given to a model, such an index is a mistake in its data.

use crate::error::Error;
use shardc_ir::{DType, Graph, HostTensor, Op, ValueId};
use shardc_runtime::Feeds;
use std::sync::Arc;

/// A part of an input, the first index and the size of each dimension; all of it if there is none.
type Part = Option<Vec<(u64, u64)>>;

/// An input with which something is looked up.
#[derive(Clone, Debug)]
pub struct Lookup {
    input: String,
    part: Part,
    /// The number of rows or classes.
    below: u64,
    /// The module that looks up; empty at the top.
    path: String,
}

/// The lookups of a graph by integers that are given. What is computed of them first, as where a mask hides some, may
/// be anything.
pub fn lookups(graph: &Graph) -> Vec<Lookup> {
    let mut all = Vec::new();
    for (id, node) in graph.nodes() {
        let ty = |index: usize| graph.ty(node.operands[index]);
        let (index, below) = match &node.op {
            Op::Embedding(_) => (1, ty(0).shape.first()),
            Op::CrossEntropy(_) => (1, ty(0).shape.last()),
            Op::Gather(op) => (1, ty(0).shape.get(op.dim)),
            Op::ScatterAdd(op) => (1, graph.ty(node.results[0]).shape.get(op.dim)),
            _ => continue,
        };
        let Some(below) = below else { continue };
        for (input, part) in sources(graph, node.operands[index]) {
            all.push(Lookup { input, part, below: *below, path: graph.node(id).path.clone() });
        }
    }
    all
}

/// The inputs, or parts of them, of which a value holds the numbers unchanged.
fn sources(graph: &Graph, value: ValueId) -> Vec<(String, Part)> {
    let (mut found, mut open) = (Vec::new(), vec![(value, None)]);
    while let Some((value, part)) = open.pop() {
        let node = graph.def(value);
        match &node.op {
            Op::Input(input) if graph.ty(value).dtype == DType::I64 => found.push((input.name.clone(), part)),
            Op::Reshape(_) | Op::Transpose(_) | Op::Broadcast(_) | Op::Concat(_) if part.is_none() => {
                open.extend(node.operands.iter().map(|source| (*source, None)));
            }
            Op::Slice(slice) if part.is_none() => {
                // What part of the input another view of it has, is not followed.
                if matches!(graph.def(node.operands[0]).op, Op::Input(_)) {
                    let ends = slice.start.iter().zip(&slice.limit);
                    open.push((node.operands[0], Some(ends.map(|(start, limit)| (*start, limit - start)).collect())));
                }
            }
            _ => {}
        }
    }
    found
}

/// Whether everything that a step is given is there to be looked up.
///
/// # Errors
/// The first number that is not.
pub fn check(lookups: &[Lookup], batch: &Feeds) -> Result<(), Error> {
    for Lookup { input, part, below, path } in lookups {
        // An input that is missing, or of another type, the runtime names.
        let fits = |given: &&Arc<HostTensor>| {
            let sizes = || part.iter().flatten().zip(&given.ty.shape);
            given.ty.dtype == DType::I64
                && part.as_ref().is_none_or(|part| part.len() == given.ty.rank())
                && sizes().all(|((start, count), size)| start + count <= *size)
        };
        let Some(given) = batch.get(input).filter(fits) else { continue };
        let of_part = part.as_ref().map(|part| given.part(part));
        let (numbers, _) = of_part.as_ref().unwrap_or(given).bytes.as_chunks::<8>();
        let mut numbers = numbers.iter().map(|bytes| i64::from_le_bytes(*bytes));
        let Some(number) = numbers.find(|number| !u64::try_from(*number).is_ok_and(|number| number < *below)) else {
            continue;
        };
        let place = if path.is_empty() { String::new() } else { format!(" in {path}") };
        let message = format!(
            "input `{input}` holds {number}, which is looked up among {below} rows or classes{place}: it must be at \
             least 0 and below {below}"
        );
        let fix = "number them from 0; where some do not count, let the model put a number that is there in their place \
                   (`mask_fill`) and hide what follows from it";
        return Err(Error::request(message, fix));
    }
    Ok(())
}
