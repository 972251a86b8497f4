//! Regions: their steps one after the other, what no result names in memory of its own.

use super::{Context, View, ViewMut, run};
use crate::cpu::memory::Array;
use shardc_ir::ops::Fused;

pub fn fused(context: Context, op: &Fused, operands: &[View<'_>], results: &mut [ViewMut<'_>]) -> Result<(), String> {
    let mut made: Vec<Array> = Vec::new();
    for step in &op.steps {
        let view = |value: &usize| match operands.get(*value) {
            Some(operand) => Some(*operand),
            None => made.get(*value - operands.len()).map(|array| View { ty: &array.ty, bytes: &array.bytes }),
        };
        let views = step.operands.iter().map(view).collect::<Option<Vec<_>>>().ok_or("a value before it is made")?;
        let mut next: Vec<Array> = step.results.iter().cloned().map(Array::zeros).collect();
        let mut out: Vec<ViewMut<'_>> = next.iter_mut().map(|x| ViewMut { ty: &x.ty, bytes: &mut x.bytes }).collect();
        run(context, &step.op, &views, &mut out)?;
        made.extend(next);
    }
    for (value, result) in op.results.iter().zip(results) {
        let array = made.get(value.wrapping_sub(operands.len())).ok_or("a result that no step makes")?;
        result.bytes.copy_from_slice(&array.bytes);
    }
    Ok(())
}
