//! How long planning takes: named models on large clusters, a model without repeated layers, growth with
//! devices and with layers, and how many plans are evaluated in a second.

pub mod measure;
pub mod plot;
pub mod report;
