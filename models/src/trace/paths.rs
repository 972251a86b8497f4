//! Which module an operation belongs to.
//!
//! Burn does not record it, so it is inferred from the parameters. An operation that reads
//! parameters (also through views of them) belongs to the innermost module that holds them all.
//! The others lie in gaps between two such operations in program order: within one block they
//! belong to the innermost module that holds both ends. A gap between two blocks is cut where the
//! data flow says so: what follows directly from the earlier block (a residual sum) stays there,
//! what only feeds the later operation (the square in a norm) goes with it.

use burn::backend::ir::{BaseOperationIr, OperationIr};
use burn::tensor::TensorId;
use std::collections::{BTreeMap, HashMap};

/// The module path of a parameter: its name without the last component.
pub(super) fn module_of(parameter: &str) -> &str {
    parameter.rsplit_once('.').map_or("", |(module, _)| module)
}

/// The longest common prefix of two paths, in whole components.
fn common(a: &str, b: &str) -> String {
    let same = a.split('.').zip(b.split('.')).take_while(|(left, right)| left == right);
    same.map(|(component, _)| component).collect::<Vec<_>>().join(".")
}

/// The path up to and including the first component that is a number, or nothing.
fn block(path: &str) -> &str {
    let mut end = 0;
    for component in path.split('.') {
        end += component.len();
        if !component.is_empty() && component.bytes().all(|byte| byte.is_ascii_digit()) {
            return &path[..end];
        }
        end += 1;
    }
    ""
}

/// Whether an operation only views or converts its operand.
fn is_view(operation: &OperationIr) -> bool {
    use BaseOperationIr::{Cast, Expand, Permute, Reshape, SwapDims};
    match operation {
        OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op) => {
            matches!(op, Reshape(_) | SwapDims(_) | Permute(_) | Expand(_) | Cast(_))
        }
        _ => false,
    }
}

/// The path of each operation, given in program order; `parameters` are the names by tensor.
pub(super) fn attribute(operations: &[&OperationIr], parameters: &BTreeMap<TensorId, String>) -> Vec<String> {
    let mut explicit: Vec<Option<String>> = vec![None; operations.len()];
    let mut views: HashMap<TensorId, String> = HashMap::new();
    for (index, operation) in operations.iter().enumerate() {
        let read = operation.inputs().filter_map(|tensor| {
            parameters
                .get(&tensor.id)
                .map(|name| module_of(name).to_string())
                .or_else(|| views.get(&tensor.id).cloned())
        });
        let Some(path) = read.reduce(|a, b| common(&a, &b)) else { continue };
        if is_view(operation) {
            views.extend(operation.outputs().map(|tensor| (tensor.id, path.clone())));
        }
        explicit[index] = Some(path);
    }
    fill(operations, &explicit)
}

/// Gives paths to the operations in the gaps.
fn fill(operations: &[&OperationIr], explicit: &[Option<String>]) -> Vec<String> {
    let mut users: HashMap<TensorId, Vec<usize>> = HashMap::new();
    for (index, operation) in operations.iter().enumerate() {
        for tensor in operation.inputs() {
            users.entry(tensor.id).or_default().push(index);
        }
    }
    let readers = |index: usize| -> Vec<usize> {
        operations[index].outputs().flat_map(|tensor| users.get(&tensor.id).cloned().unwrap_or_default()).collect()
    };
    let mut paths: Vec<String> = explicit.iter().map(|path| path.clone().unwrap_or_default()).collect();
    let labelled: Vec<usize> = (0..explicit.len()).filter(|index| explicit[*index].is_some()).collect();
    let mut start: usize = 0;
    for end in labelled.iter().copied().chain([operations.len()]) {
        let before = start.checked_sub(1).map_or(String::new(), |index| paths[index].clone());
        let after = paths.get(end).cloned();
        if let Some(after) = after.filter(|after| block(after) != block(&before)) {
            let tail = tails(operations, explicit, start..end, &readers);
            for index in (start..end).rev() {
                let feeds = readers(index);
                let follows = !feeds.is_empty() && feeds.iter().all(|reader| paths[*reader] == after);
                let stays = tail[index - start] || !follows;
                paths[index] = if stays { block(&before).to_string() } else { after.clone() };
            }
        } else {
            let path = paths.get(end).map_or(String::new(), |after| common(&before, after));
            paths[start..end].fill(path);
        }
        start = end + 1;
    }
    paths
}

/// Which operations of a gap follow directly from what came before it: they alone read a result of
/// a labelled operation or of another such operation.
fn tails(
    operations: &[&OperationIr],
    explicit: &[Option<String>],
    gap: std::ops::Range<usize>,
    readers: &impl Fn(usize) -> Vec<usize>,
) -> Vec<bool> {
    let mut makers: HashMap<TensorId, usize> = HashMap::new();
    let first = gap.start.saturating_sub(1);
    for (index, operation) in operations.iter().enumerate().take(gap.end).skip(first) {
        makers.extend(operation.outputs().map(|tensor| (tensor.id, index)));
    }
    let alone = |maker: usize| {
        let readers = readers(maker);
        readers.iter().all(|reader| *reader == readers[0])
    };
    let mut tail = vec![false; gap.len()];
    for index in gap.clone() {
        tail[index - gap.start] = operations[index].inputs().any(|tensor| match makers.get(&tensor.id) {
            Some(maker) if *maker < gap.start => explicit[*maker].is_some() && alone(*maker),
            Some(maker) => tail[*maker - gap.start] && alone(*maker),
            None => false,
        });
    }
    tail
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_and_blocks() {
        assert_eq!(common("blocks.1.attention.query", "blocks.1.mlp"), "blocks.1");
        assert_eq!(common("blocks.1", "blocks.10"), "blocks");
        assert_eq!(common("a", "b"), "");
        assert_eq!(block("blocks.12.mlp.up"), "blocks.12");
        assert_eq!(block("encoder.blocks.3"), "encoder.blocks.3");
        assert_eq!(block("head"), "");
        assert_eq!(module_of("blocks.0.up.weight"), "blocks.0.up");
        assert_eq!(module_of("table"), "");
    }
}
