//! The libraries of a rank, with the algorithms that are chosen for its program.

use super::super::cudnn::{Cudnn, Kernel, Placed};
use super::super::device::{Device, Failure};
use super::super::gemm::{Blas, Problem};
use super::super::select::Step;
use super::super::tune::{Tunings, convolutions, products};
use super::Chosen;
use super::commands::{Layout, Libraries};
use shardc_ir::plan::Space;
use shardc_ir::program::Stream;
use std::collections::BTreeSet;

/// Opens the libraries and chooses, with the other ranks, what they compute the program's products and convolutions by.
/// What was measured leaves zeros in the device's arena.
pub fn libraries(
    layout: &Layout<'_>,
    chosen: &Chosen,
    device: &Device,
    tunings: &Tunings,
) -> Result<Libraries, Failure> {
    let clear = || {
        for (space, bytes) in layout.program.arenas.iter().filter(|(space, _)| *space == Space::Device) {
            device.zero(layout.arenas[space], bytes.0, Stream::Compute)?;
        }
        device.drain(Stream::Compute)
    };
    let rank = layout.program.rank;
    let blas = Blas::new()?;
    let all = products::products(problems(layout, chosen, &blas))?;
    let keys: BTreeSet<String> = all.keys().cloned().collect();
    let choices = tunings.products.choices(rank, &products::file(device)?, &keys, |choices, wanted| {
        products::measure(&blas, device, &all, (wanted, choices))?;
        clear()
    })?;
    let mut cudnn = Cudnn::default();
    let all = convolutions::convolutions(placed(layout, chosen));
    let keys: BTreeSet<String> = all.keys().cloned().collect();
    let engines = tunings.convolutions.choices(rank, &convolutions::file(device)?, &keys, |choices, wanted| {
        convolutions::measure(&cudnn, device, &all, (wanted, choices))?;
        clear()
    })?;
    cudnn.adopt(engines);
    Ok(Libraries { blas, choices, cudnn })
}

/// The matrix products of a program.
fn problems<'a>(
    layout: &'a Layout<'a>,
    chosen: &'a Chosen,
    blas: &'a Blas,
) -> impl Iterator<Item = Result<Problem, Failure>> + 'a {
    let instructions = layout.program.instructions().zip(chosen.sections.iter().flatten());
    instructions.flat_map(move |(instruction, selection)| {
        let steps =
            selection.iter().flat_map(|selection| selection.steps.iter().map(|step| (step, selection.workspace)));
        steps.flat_map(move |(step, workspace)| {
            let found = match step {
                Step::Gemm(gemm) => layout.problem(blas, instruction, gemm, workspace).map(|problem| vec![problem]),
                Step::Products(gemms) => layout.problems(blas, instruction, gemms, workspace),
                _ => Ok(Vec::new()),
            };
            match found {
                Ok(problems) => problems.into_iter().map(Ok).collect(),
                Err(error) => vec![Err(error)],
            }
        })
    })
}

/// The convolutions of a program that cuDNN may compute.
fn placed<'a>(layout: &'a Layout<'a>, chosen: &'a Chosen) -> impl Iterator<Item = Placed> + 'a {
    let instructions = layout.program.instructions().zip(chosen.sections.iter().flatten());
    instructions.flat_map(move |(instruction, selection)| {
        let fused = selection.iter().flat_map(|selection| &selection.steps).filter_map(|step| match step {
            Step::Fused(fused) => Some(fused),
            _ => None,
        });
        fused.flat_map(|fused| fused.engines()).filter_map(move |engine| match &engine.kernel {
            Kernel::Convolution(convolution) => Some(Placed {
                convolution: convolution.clone(),
                buffers: engine.buffers.iter().map(|arg| layout.resolve(instruction, *arg)).collect(),
                workspace: layout.resolve(instruction, engine.workspace),
            }),
            Kernel::Attention(_) => None,
        })
    })
}
