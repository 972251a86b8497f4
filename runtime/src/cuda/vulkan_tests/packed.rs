//! Collectives of many small tensors as one, among ranks that all send the same.

use super::{client, execute, floats, t, tensor};
use crate::cuda::select::{Step, select_action};
use shardc_ir::TensorType;
use shardc_ir::program::Action;
use shardc_ir::sharding::ReduceKind;

/// The sizes of a rank's parts: of every width of vectors, and more than one launch copies.
fn sizes() -> Vec<u64> {
    (0..70).map(|index| [1, 64, 6, 4096, 1001, 50_000][index as usize % 6] + 4 * (index % 3)).collect()
}

#[test]
fn packed_collectives_move_what_those_of_each_tensor_do() {
    let Some(client) = client() else { return };
    let group = 0;
    for ranks in [1, 2, 3] {
        for action in [
            Action::AllReduce { reduce: ReduceKind::Max, group },
            Action::ReduceScatter { reduce: ReduceKind::Max, group },
            Action::AllGather { group },
        ] {
            let types = |times: u64| sizes().iter().map(|size| t(&[size * times])).collect::<Vec<TensorType>>();
            let (from, to) = match &action {
                Action::AllReduce { .. } => (1, 1),
                Action::ReduceScatter { .. } => (ranks, 1),
                _ => (1, ranks),
            };
            let (operands, results) = (types(from), types(to));
            let given: Vec<_> = operands.iter().enumerate().map(|(seed, ty)| tensor(ty, seed as u64 + 1, 9)).collect();
            let mut selection = select_action(&action, &operands, &results).unwrap().expect("many small tensors");
            // What the library would do, for the first of ranks that all have the same.
            let mut steps = Vec::new();
            for step in selection.steps.drain(..) {
                match step {
                    Step::Meet { from, to, elements: [sent, received], .. } => {
                        let times = (received / sent).max(1);
                        let bytes = 4 * sent.min(received);
                        steps.extend((0..times).map(|rank| Step::Copy { from, to: to.offset(rank * bytes), bytes }));
                    }
                    other => steps.push(other),
                }
            }
            selection.steps = steps;
            let found = execute(&client, selection, &given, &results);
            for (given, found) in given.iter().zip(&found) {
                let (given, found) = (floats(given), floats(found));
                let expected: Vec<f32> = given.iter().cycle().take(found.len()).copied().collect();
                assert_eq!(found, expected, "{action:?} of {ranks} ranks");
            }
        }
    }
}
