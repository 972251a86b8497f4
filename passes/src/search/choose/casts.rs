//! Whether the casts of parameters are kept from step to step ([`keep_casts`](crate::keep_casts)).
//!
//! A kept cast saves reading the parameter once a step and costs memory between steps. It moves the optimum of nothing
//! else, so only the plan that was found is lowered with its casts kept, where that may gain enough; the estimate and the
//! bound that a search reports are those of plans that cast in every step. Where programs do not do what is planned,
//! nothing tells what keeping casts takes, and they are not kept.

use super::build::Confirm;
use crate::keep_casts::Casts;
use crate::search::error::PlanError;
use crate::search::space::Space;
use shardc_ir::Plan;
use shardc_ir::feature::unlowered;
use shardc_ir::plan::Search;

/// What a plan's choice says of kept casts, and a pin.
const CHOICE: &str = "keep_casts";

/// The share of the step that is worth keeping casts for.
const GAIN: f64 = 0.001;

/// A plan, or the same with its casts kept: where that is pinned, or where its programs are faster and fit.
///
/// # Errors
/// A pin that the plan cannot meet.
pub(in crate::search) fn kept(
    plan: Plan,
    space: &Space<'_, '_>,
    confirm: Option<Confirm<'_>>,
) -> Result<Plan, PlanError> {
    let is_pinned = match space.pins.keep_casts {
        Some(false) => return Ok(plan),
        pin => pin.is_some(),
    };
    if !is_pinned && confirm.is_none() {
        return Ok(plan);
    }
    let refuse = |message: String| Err(PlanError::Pin { pin: format!("{CHOICE}=1"), message });
    if let Some(feature) = unlowered(&plan).first() {
        let message = format!("no program tells what a plan with {feature} takes then; leave one of the two out");
        return if is_pinned { refuse(message) } else { Ok(plan) };
    }
    let casts = Casts::of(&plan);
    let seconds = casts.bytes_read().0 as f64 / space.cluster.device.memory_bandwidth.value;
    if !is_pinned && seconds < GAIN * plan.prediction.step.0 {
        return Ok(plan);
    }
    let Some(mut made) = casts.keep().map_err(|error| PlanError::Bug(error.to_string()))? else {
        return match is_pinned {
            true => {
                refuse("no trained parameter is cast and lies on the device as its cast does; leave it out".to_string())
            }
            false => Ok(plan),
        };
    };
    if let Some(confirm) = confirm {
        made.prediction = confirm(&made).map_err(PlanError::Bug)?.prediction;
    }
    let (memory, room) = (made.prediction.memory.total(), made.prediction.room);
    if is_pinned && !made.prediction.fits() {
        return refuse(format!("the plan found then needs {memory} of {room}; leave it out"));
    }
    if !is_pinned && (!made.prediction.fits() || made.prediction.step.0 > (1.0 - GAIN) * plan.prediction.step.0) {
        return Ok(plan);
    }
    made.choice += &format!(",{CHOICE}=1");
    Ok(made)
}

/// What a search tells of the casts that its plan keeps.
pub(in crate::search) fn told(choice: &str, search: &mut Search, is_confirmed: bool) {
    if choice.ends_with(&format!(",{CHOICE}=1")) {
        search.lowered += u64::from(is_confirmed);
        search.stopped += "; estimate and bound are those of plans that cast parameters in every step";
    }
}
