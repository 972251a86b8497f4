//! Products beside each other: a batch where they lie at even distances.

use super::matmul::Gemm;
use super::{Arg, Select, Step, select};
use shardc_ir::TensorType;
use shardc_ir::ops::{Fused, FusedStep};

/// The most products of a batch.
const MOST: usize = 8;

/// Elements of the result that a block of the library's largest kernels makes.
const TILE: [u64; 2] = [128, 256];

/// Tiles from which on a product alone leaves little of a large device without work: eight for each multiprocessor.
const MANY: u64 = 8 * 132;

/// Whether products of a region are worth one launch: each is one product of the library, and alone too small.
pub fn joins(region: &Fused, operands: &[TensorType]) -> bool {
    let is_small = |gemm: &Gemm| gemm.m.div_ceil(TILE[0]) * gemm.n.div_ceil(TILE[1]) < MANY;
    let fits = |step: &FusedStep| matches!(&gemms(step, operands)[..], [gemm] if gemm.batch == 1 && is_small(gemm));
    region.is_products() && region.steps.len() <= MOST && region.steps.iter().all(fits)
}

/// The products of the library that a step is, if it is nothing else, with arguments of its own.
fn gemms(step: &FusedStep, operands: &[TensorType]) -> Vec<Gemm> {
    let of = step.operands.iter().filter_map(|value| operands.get(*value).cloned()).collect::<Vec<_>>();
    let Ok(selection) = select(&step.op, &of, &step.results) else { return Vec::new() };
    let gemm = |step: Step| if let Step::Gemm(gemm) = step { Some(*gemm) } else { None };
    selection.steps.into_iter().map(gemm).collect::<Option<Vec<_>>>().unwrap_or_default()
}

impl Select<'_> {
    pub(super) fn products(&mut self, region: &Fused) -> Result<(), String> {
        let mut all = Vec::with_capacity(region.steps.len());
        let mut first = 0;
        for step in &region.steps {
            let place = |arg: Arg| match arg {
                Arg::Operand(index, at) => Arg::Operand(step.operands[index], at),
                Arg::Result(index, at) => Arg::Result(first + index, at),
                scratch => scratch,
            };
            let [gemm] = &gemms(step, self.operands)[..] else {
                return Err(format!("{} is not one product", step.op.name()));
            };
            all.push(gemm.placed(place));
            first += step.results.len();
        }
        let (_, bytes) = &mut self.out.workspace;
        *bytes =
            all.iter().map(|gemm| Gemm { batch: all.len() as u64, ..gemm.clone() }.workspace()).fold(*bytes, u64::max);
        self.out.steps.push(Step::Products(all));
        Ok(())
    }
}

/// Products of equal sizes as one batch, if what they read and make lies at even distances; `resolve` gives addresses.
pub fn batch(gemms: &[Gemm], resolve: impl Fn(Arg) -> u64) -> Option<Gemm> {
    let first = gemms.first()?;
    let is_alike = |gemm: &Gemm| {
        (gemm.m, gemm.n, gemm.k, gemm.batch) == (first.m, first.n, first.k, 1)
            && (gemm.bias.is_some(), gemm.epilogue.map(|(kind, beside)| (kind, beside.is_some())))
                == (first.bias.is_some(), first.epilogue.map(|(kind, beside)| (kind, beside.is_some())))
            && gemm.addend.is_none()
            && gemm.scales.is_none()
    };
    if gemms.len() < 2 || !gemms.iter().all(is_alike) {
        return None;
    }
    // In elements, the distance from one product's to the next one's; all are equal.
    let distance = |of: &dyn Fn(&Gemm) -> Option<Arg>, size: u64| -> Option<u64> {
        let places = gemms.iter().map(of).collect::<Option<Vec<_>>>();
        let Some(places) = places else { return Some(0) };
        let places: Vec<u64> = places.into_iter().map(&resolve).collect();
        let step = places[1].checked_sub(places[0])?;
        let is_even = places.windows(2).all(|pair| pair[1].checked_sub(pair[0]) == Some(step));
        (is_even && step.is_multiple_of(size)).then_some(step / size)
    };
    let size = |matrix: &super::Matrix| matrix.dtype.size();
    let bias = distance(&|gemm| gemm.bias, size(&first.c))?;
    let beside = distance(&|gemm| gemm.epilogue.and_then(|(_, beside)| beside), size(&first.c))?;
    let mut whole = Gemm { batch: gemms.len() as u64, beside: [bias, beside], ..first.clone() };
    whole.a.batch = distance(&|gemm| Some(gemm.a.at), size(&first.a))?;
    whole.b.batch = distance(&|gemm| Some(gemm.b.at), size(&first.b))?;
    whole.c.batch = distance(&|gemm| Some(gemm.c.at), size(&first.c))?;
    Some(whole)
}
