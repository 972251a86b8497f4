//! What a search looks at.

use super::away::Away;
use super::choice::degrees::Degrees;
use super::choice::pins::Pins;
use super::measure::Measure;
use super::stages::line::Line;
use super::work::Work;
use crate::cluster::Cluster;
use crate::shard::tensor::Prepared;
use shardc_ir::plan::Request;

/// What is searched.
pub(in crate::search) struct Space<'a, 'b> {
    pub prepared: &'a Prepared<'b>,
    /// What pipelines are cut along, where those are visited; else plans of one stage are.
    pub line: Option<&'a Line>,
    /// Whether pipelines are searched.
    pub pipelines: Pipelines,
    /// The only meshes that are visited, if not all are.
    pub meshes: Option<&'a [Degrees]>,
    /// As the kind of devices sees it that is the slowest.
    pub cluster: &'a Cluster,
    /// As the other kinds see it, if there are any.
    pub others: &'a [Cluster],
    pub request: &'a Request,
    pub pins: &'a Pins,
    pub away: Away,
    /// Whether pipelines of which no stages fit are candidates too, to say what they lack.
    pub with_unfit: bool,
    /// Whether many cuts of a pipeline are moved as well where that makes a step shorter, which takes long to find.
    pub moves_cuts: bool,
    /// Whether it is told by how much the plan may exceed the least that is possible.
    pub is_bounded: bool,
    /// How estimates of memory are taken.
    pub measure: Measure,
}

/// One placed mesh, and what its candidates share.
pub(in crate::search) struct Point {
    /// One for each way to store parameters.
    pub degrees: Vec<Degrees>,
    pub work: Work,
    pub away: Away,
}

impl Point {
    /// The samples of a microbatch on a rank.
    pub fn microbatch(&self) -> u64 {
        self.degrees.first().map_or(1, |degrees| degrees.microbatch)
    }
}

/// Whether pipelines are searched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::search) enum Pipelines {
    /// Not at all.
    Never,
    /// Where no plan of one stage fits, or much of its step is communication or repeated.
    Fallback,
    /// As well.
    Too,
    /// Nothing else is.
    Alone,
}
