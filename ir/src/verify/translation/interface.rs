//! What the programs exchange with the caller, against the leaves and outputs of the graph: names,
//! types, and that each rank's part of an input or a slot is the one of its layout.

use crate::diagnostic::Diagnostics;
use crate::entity::ValueId;
use crate::graph::OutputKind;
use crate::mesh::Family;
use crate::ops::Op;
use crate::plan::Plan;
use crate::program::{Feed, Program, Slot};
use crate::types::TensorType;
use std::collections::{BTreeMap, BTreeSet};

/// The leaves of a graph that are fed, and those that are stored, by name.
pub(super) struct Leaves<'a> {
    pub inputs: BTreeMap<&'a str, ValueId>,
    pub stored: BTreeMap<&'a str, ValueId>,
}

impl<'a> Leaves<'a> {
    pub fn of(plan: &'a Plan) -> Self {
        let mut leaves = Self { inputs: BTreeMap::new(), stored: BTreeMap::new() };
        for (value, node) in plan.graph.leaves() {
            match &node.op {
                Op::Input(leaf) => drop(leaves.inputs.insert(&leaf.name, value)),
                Op::Parameter(leaf) => drop(leaves.stored.insert(&leaf.name, value)),
                Op::State(leaf) => drop(leaves.stored.insert(&leaf.name, value)),
                _ => {}
            }
        }
        leaves
    }
}

type Part = Vec<(u64, u64)>;

/// Checks the interface of every program.
pub(super) fn check(plan: &Plan, programs: &[Program], found: &mut Diagnostics) {
    let leaves = Leaves::of(plan);
    for program in programs {
        let rank = program.rank;
        for input in &program.inputs {
            if let Err(message) = check_input(plan, &leaves, rank, input) {
                found.push(format!("rank {rank}, input \"{}\"", input.name), message);
            }
        }
        for slot in &program.slots {
            let buffer = program.buffers.get(slot.buffer).map(|buffer| &buffer.ty);
            if let Err(message) = check_slot(plan, &leaves, rank, (slot, buffer)) {
                found.push(format!("rank {rank}, slot \"{}\"", slot.name), message);
            }
        }
        check_outputs(plan, program, found);
    }
}

fn expect_type(plan: &Plan, value: ValueId, ty: &TensorType) -> Result<(), String> {
    match plan.graph.ty(value) {
        known if known == ty => Ok(()),
        known => Err(format!("is {ty}, but {known} in the graph")),
    }
}

/// The parts of a leaf that a rank holds in the first microbatches.
fn parts(plan: &Plan, value: ValueId, rank: u64, microbatches: u64) -> Vec<Part> {
    let (sharding, shape) = (plan.sharding(value), &plan.graph.ty(value).shape);
    let part = |microbatch| sharding.slice(shape, &plan.mesh, &plan.mesh.coordinates(rank, microbatch));
    (0..microbatches).map(part).collect()
}

fn check_input(plan: &Plan, leaves: &Leaves<'_>, rank: u64, input: &Feed) -> Result<(), String> {
    let value = *leaves.inputs.get(input.name.as_str()).ok_or("the graph has no input of this name")?;
    expect_type(plan, value, &input.ty)?;
    let wanted = parts(plan, value, rank, plan.mesh.microbatches());
    if input.slices.len() != wanted.len() {
        return Err(format!("has parts for {} microbatches of {}", input.slices.len(), wanted.len()));
    }
    let differs = input.slices.iter().zip(&wanted).position(|(given, wanted)| given != wanted);
    match differs {
        Some(at) => Err(format!(
            "is fed the part {:?} in microbatch {at}; by its layout this rank's is {:?}",
            input.slices[at], wanted[at]
        )),
        None => Ok(()),
    }
}

fn check_slot(
    plan: &Plan,
    leaves: &Leaves<'_>,
    rank: u64,
    (slot, buffer): (&Slot, Option<&TensorType>),
) -> Result<(), String> {
    let value = *leaves.stored.get(slot.name.as_str()).ok_or("the graph has no parameter or state of this name")?;
    expect_type(plan, value, &slot.ty)?;
    let local = slot.ty.with_shape(plan.sharding(value).local_shape(&slot.ty.shape, &plan.mesh));
    if let Some(buffer) = buffer.filter(|buffer| **buffer != local) {
        return Err(format!("lies in {buffer}; by its layout a rank's part is {local}"));
    }
    let (is_parameter, init, cast_of) = match &plan.graph.def(value).op {
        Op::State(state) => (false, state.init, &state.cast_of),
        _ => (true, 0.0, &None),
    };
    if slot.is_parameter != is_parameter || slot.cast_of != *cast_of || (!is_parameter && slot.init != init) {
        return Err(format!("is not the {} of the graph", if is_parameter { "parameter" } else { "state" }));
    }
    match parts(plan, value, rank, 1).pop() {
        Some(wanted) if slot.slice != wanted => {
            Err(format!("holds the part {:?}; by its layout this rank's is {wanted:?}", slot.slice))
        }
        _ => Ok(()),
    }
}

/// Every output has its reading, every slot lies in its stage, and nothing else is read.
fn check_outputs(plan: &Plan, program: &Program, found: &mut Diagnostics) {
    let place = format!("rank {}", program.rank);
    let mut wanted = BTreeSet::new();
    for output in &plan.graph.outputs {
        match output.kind {
            OutputKind::Result => {
                wanted.insert(output.name.as_str());
                if !program.readings.iter().any(|reading| reading.name == output.name) {
                    found.push(&place, format!("has no reading \"{}\"", output.name));
                }
            }
            OutputKind::Update(leaf) => {
                let is_here = is_home(plan, leaf, program.rank);
                if is_here != program.slots.iter().any(|slot| slot.name == output.name) {
                    let what = if is_here { "no slot" } else { "a slot of another stage:" };
                    found.push(&place, format!("has {what} \"{}\"", output.name));
                }
            }
        }
    }
    for reading in program.readings.iter().filter(|reading| !wanted.contains(reading.name.as_str())) {
        found.push(&place, format!("the reading \"{}\" is no result of the graph", reading.name));
    }
}

/// Whether a leaf lies in the stage of a rank.
fn is_home(plan: &Plan, leaf: ValueId, rank: u64) -> bool {
    let chunk = plan.pipeline.chunks[plan.graph.value(leaf).def];
    let home = chunk.map(|chunk| plan.pipeline.stage_of(chunk, plan.stages()));
    let group = plan.mesh.group(rank, &plan.mesh.family(Family::Pipeline));
    home.is_none_or(|stage| group.get(stage as usize) == Some(&rank))
}
