//! Watches for values that are not finite, so that a NaN loss can be traced to where it began.
//!
//! CPU ranks look at every result of a computation in the step that makes it. GPUs run the step again,
//! one instruction at a time, which they can because an update by gradients that are not finite changes
//! nothing. Infinities are noted apart: those of masks are meant.

use half::{bf16, f16};
use shardc_ir::program::Instruction;
use shardc_ir::{BufferId, DType, Op, Program, TensorType};

/// The worst element of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    /// All are finite.
    Finite,
    /// Some are infinite, none is a NaN.
    Infinite,
    /// Some are not a number.
    Nan,
}

impl Finding {
    /// The worst element of a tensor.
    pub fn of(ty: &TensorType, bytes: &[u8]) -> Self {
        // The bits of a float without its sign grow with it, and those of a NaN lie above infinity's.
        let (worst, infinity) = match ty.dtype {
            DType::F32 => {
                let bits = bytemuck::cast_slice::<_, u32>(bytes);
                (bits.iter().fold(0, |worst, x| worst.max(x & 0x7FFF_FFFF)), f32::INFINITY.to_bits())
            }
            DType::Bf16 | DType::F16 => {
                let bits = bytemuck::cast_slice::<_, u16>(bytes);
                let worst = bits.iter().fold(0, |worst: u16, x| worst.max(x & 0x7FFF));
                let infinity = if ty.dtype == DType::F16 { f16::INFINITY.to_bits() } else { bf16::INFINITY.to_bits() };
                (u32::from(worst), u32::from(infinity))
            }
            _ => return Self::Finite,
        };
        match worst.cmp(&infinity) {
            std::cmp::Ordering::Less => Self::Finite,
            std::cmp::Ordering::Equal => Self::Infinite,
            std::cmp::Ordering::Greater => Self::Nan,
        }
    }
}

/// What a step made that is not finite.
#[derive(Clone, Debug, Default)]
pub struct Watch {
    infinite: Option<String>,
    nan: Option<String>,
}

impl Watch {
    /// Whether there is anything left to find.
    pub fn is_watching(&self) -> bool {
        self.nan.is_none()
    }

    /// Whether a finding would be the first of its kind. An infinity counts where it comes from
    /// arithmetic, not from the constants of a mask.
    fn is_new(&self, finding: Finding, op: &Op) -> bool {
        let is_mask = matches!(
            op,
            Op::Constant(_)
                | Op::Literal(_)
                | Op::Broadcast(_)
                | Op::Select(_)
                | Op::Reshape(_)
                | Op::Transpose(_)
                | Op::Slice(_)
                | Op::Concat(_)
                | Op::Pad(_)
                | Op::Cast(_)
        );
        match finding {
            Finding::Finite => false,
            Finding::Infinite => self.infinite.is_none() && !is_mask,
            Finding::Nan => self.nan.is_none(),
        }
    }

    /// Notes where the first of a kind was made.
    fn note(&mut self, finding: Finding, text: String) {
        match finding {
            Finding::Finite => {}
            Finding::Infinite => self.infinite = Some(text),
            Finding::Nan => self.nan = Some(text),
        }
    }

    /// Looks at the results of an instruction, `at`, that runs `op`; `find` gives the worst element of a
    /// buffer.
    pub fn inspect<E>(
        &mut self,
        program: &Program,
        instruction: &Instruction,
        (op, at): (&Op, &str),
        mut find: impl FnMut(BufferId) -> Result<Finding, E>,
    ) -> Result<(), E> {
        for result in &instruction.results {
            let found = find(*result)?;
            if found == Finding::Finite || !self.is_new(found, op) {
                continue;
            }
            let mut from = String::new();
            for operand in &instruction.operands {
                if find(*operand)? == found {
                    from = format!(", whose operand {} already was", describe(program, *operand));
                    break;
                }
            }
            self.note(found, format!("{at} ({}){from}", describe(program, *result)));
        }
        Ok(())
    }

    /// What was found, in a sentence.
    pub fn text(&self) -> Option<String> {
        match (&self.nan, &self.infinite) {
            (Some(nan), Some(infinite)) => Some(format!("NaN in {nan}; before it an infinity in {infinite}")),
            (Some(nan), None) => Some(format!("NaN in {nan}")),
            (None, Some(infinite)) => Some(format!("infinity in {infinite}")),
            (None, None) => None,
        }
    }
}

/// A buffer in words: its slot, its type and the plan's value.
fn describe(program: &Program, id: BufferId) -> String {
    let buffer = &program.buffers[id];
    let slot = program.slots.iter().find(|slot| slot.buffer == id);
    let name = slot.map(|slot| format!(" `{}`", slot.name)).unwrap_or_default();
    let value = buffer.value.map(|value| format!(", value {value} of the plan")).unwrap_or_default();
    format!("{id}{name}: {}{value}", buffer.ty)
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::ops::{Concat, Pad, Reshape, Select, Slice, Unary, UnaryKind};

    #[test]
    fn findings() {
        let check = |values: &[f32], expect| {
            let ty = TensorType::new(DType::F32, [values.len() as u64]);
            assert_eq!(Finding::of(&ty, bytemuck::cast_slice(values)), expect);
            let halves: Vec<bf16> = values.iter().map(|x| bf16::from_f32(*x)).collect();
            assert_eq!(Finding::of(&ty.with_dtype(DType::Bf16), bytemuck::cast_slice(&halves)), expect);
        };
        check(&[0.0, -1.0, 1e30], Finding::Finite);
        check(&[0.0, f32::NEG_INFINITY], Finding::Infinite);
        check(&[f32::INFINITY, f32::NAN, 1.0], Finding::Nan);
        check(&[], Finding::Finite);
    }

    /// An infinity that is moved comes from where it was made.
    #[test]
    fn infinities_of_masks_are_not_told() {
        let watch = Watch::default();
        let is_told = |op: Op| watch.is_new(Finding::Infinite, &op);
        assert!(is_told(Unary { kind: UnaryKind::Exp }.into()));
        let pad = Pad { low: vec![0], high: vec![1], value: f64::NEG_INFINITY };
        let part = Slice { start: vec![0], limit: vec![1] };
        for op in [Op::from(Concat { dim: 0 }), pad.into(), part.into(), Reshape {}.into(), Select {}.into()] {
            assert!(!is_told(op.clone()), "{op:?}");
            assert!(watch.is_new(Finding::Nan, &op), "{op:?}");
        }
    }
}
