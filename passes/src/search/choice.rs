//! What can be chosen, in the words of pins: how many ways each kind of parallelism divides the step, the pipeline, what is
//! computed again, what lies away from the devices.

pub mod degrees;
pub mod offload;
pub mod pins;
pub mod stages;
