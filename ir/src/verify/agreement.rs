//! What the programs of all ranks must agree on, and whether their parts make up the whole: of a
//! slot, the parts that the ranks hold; of an input, the parts that they are fed in one step. Ranks of
//! different pipeline stages have slots and inputs of their own; what has one name has one type.

use crate::diagnostic::Diagnostics;
use crate::program::{Action, Program};
use crate::types::TensorType;
use std::collections::{BTreeMap, BTreeSet};

/// Per dimension, the first index and the length.
type Part = Vec<(u64, u64)>;

/// Checks the interfaces of programs that are sound by themselves.
pub(super) fn check(programs: &[Program], found: &mut Diagnostics) {
    let Some(first) = programs.first() else { return };
    let readings = |program: &Program| program.readings.iter().map(|reading| reading.name.clone()).collect::<Vec<_>>();
    for program in programs.iter().filter(|program| readings(program) != readings(first)) {
        found.push(format!("rank {}", program.rank), "its readings are not those of rank 0");
    }
    let mut slots: Named<'_> = BTreeMap::new();
    let mut inputs: Named<'_> = BTreeMap::new();
    for program in programs {
        for slot in &program.slots {
            let known = slots.entry(&slot.name).or_insert_with(|| (&slot.ty, BTreeSet::new()));
            if *known.0 != slot.ty {
                let message = format!("is {}, and {} on a rank before", slot.ty, known.0);
                found.push(format!("rank {}, slot \"{}\"", program.rank, slot.name), message);
            }
            known.1.insert(&slot.slice);
        }
        for (index, input) in program.inputs.iter().enumerate() {
            let place = || format!("rank {}, input \"{}\"", program.rank, input.name);
            let known = inputs.entry(&input.name).or_insert_with(|| (&input.ty, BTreeSet::new()));
            if *known.0 != input.ty {
                found.push(place(), format!("is {}, and {} on a rank before", input.ty, known.0));
            }
            let fed = fed(program, index);
            if fed.is_empty() {
                found.push(place(), "no instruction of the step feeds its part");
            }
            known.1.extend(fed);
        }
    }
    for (name, (ty, parts)) in slots {
        if let Some(hole) = hole(&ty.shape, parts) {
            found.push(format!("slot \"{name}\""), format!("no rank holds its part {hole:?}"));
        }
    }
    for (name, (ty, parts)) in inputs {
        if let Some(hole) = hole(&ty.shape, parts) {
            found.push(format!("input \"{name}\""), format!("no rank is fed its part {hole:?} in any microbatch"));
        }
    }
}

/// By name, the type and the parts that some rank has.
type Named<'a> = BTreeMap<&'a str, (&'a TensorType, BTreeSet<&'a Part>)>;

/// The parts of an input that a rank is fed in one step.
fn fed(program: &Program, index: usize) -> Vec<&Part> {
    let Some(input) = program.inputs.get(index) else { return Vec::new() };
    let feeds = Action::Feed { input: index };
    let run = |run: &crate::program::Run| {
        let instructions = &program.sections[run.section].instructions;
        let is_fed = instructions.iter().any(|instruction| instruction.action == feeds);
        input.slices.get(run.microbatch as usize).filter(|_| is_fed)
    };
    program.order.iter().filter_map(run).collect()
}

/// A part of a tensor that is in none of `parts`, if there is one: a cell of the grid of their edges.
fn hole(shape: &[u64], parts: BTreeSet<&Part>) -> Option<Part> {
    fn search(shape: &[u64], parts: &[&Part], dim: usize) -> Option<Part> {
        if parts.is_empty() {
            return Some(shape[dim..].iter().map(|size| (0, *size)).collect());
        }
        let size = shape.get(dim)?;
        let edges = parts.iter().flat_map(|part| [part[dim].0, part[dim].0 + part[dim].1]);
        let edges: Vec<u64> = edges.chain([0, *size]).collect::<BTreeSet<u64>>().into_iter().collect();
        edges.windows(2).find_map(|edge| {
            let holds = |part: &&Part| part[dim].0 <= edge[0] && edge[1] <= part[dim].0 + part[dim].1;
            let inside: Vec<&Part> = parts.iter().copied().filter(holds).collect();
            let mut hole = search(shape, &inside, dim + 1)?;
            hole.insert(0, (edge[0], edge[1] - edge[0]));
            Some(hole)
        })
    }
    // A part of another rank of tensor is a finding of its own.
    search(shape, &parts.into_iter().filter(|part| part.len() == shape.len()).collect::<Vec<_>>(), 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_hole(shape: &[u64], parts: &[&[(u64, u64)]], expect: Option<&[(u64, u64)]>) {
        let parts: Vec<Part> = parts.iter().map(|part| part.to_vec()).collect();
        assert_eq!(hole(shape, parts.iter().collect()).as_deref(), expect);
    }

    #[test]
    fn holes() {
        check_hole(&[], &[&[]], None);
        check_hole(&[], &[], Some(&[]));
        check_hole(&[4, 2], &[], Some(&[(0, 4), (0, 2)]));
        check_hole(&[4, 2], &[&[(0, 2), (0, 2)], &[(2, 2), (0, 2)]], None);
        check_hole(&[4, 2], &[&[(0, 2), (0, 2)], &[(2, 2), (1, 1)]], Some(&[(2, 2), (0, 1)]));
        // Their sizes sum to that of the whole, but they overlap.
        check_hole(&[4], &[&[(0, 3)], &[(1, 2)]], Some(&[(3, 1)]));
        // A pinwheel, which no single cut divides.
        let pinwheel: [&[(u64, u64)]; 4] = [&[(0, 1), (0, 2)], &[(0, 2), (2, 1)], &[(2, 1), (1, 2)], &[(1, 2), (0, 1)]];
        check_hole(&[3, 3], &pinwheel, Some(&[(1, 1), (1, 1)]));
    }
}
