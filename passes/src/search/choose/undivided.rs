//! Parameters that ZeRO is to store in parts and cannot: every dimension of them is short for the ranks that store
//! copies, so that there would be more to fill up than to store, and each rank stores them, and their state, whole.

use crate::divisors::divisors;
use crate::search::estimate::storage;
use crate::shard::family::storage_axes;
use crate::shard::zero::storage_dim;
use shardc_ir::ops::Update;
use shardc_ir::{Bytes, Family, Graph, Mesh, NodeId, Plan, Strategy, TensorType};
use std::fmt;

/// One in so many bytes of parameters may be stored whole before anybody is told: norms and biases are small.
const TOLD: u64 = 10;

/// What would do on any mesh.
pub(in crate::search) const OTHER_RANKS: &str = "use fewer ranks, or a number that divides them";

/// What is stored whole, where it is worth telling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Undivided {
    /// Bytes of the parameters that are stored whole, in the model.
    pub whole: Bytes,
    /// Bytes of all parameters.
    pub all: Bytes,
    /// The most ranks for which one of them is too short.
    pub ranks: u64,
    /// The outer and inner data ranks (`dp`, `fsdp`) under which most would be divided, if any are.
    pub instead: Option<(u64, u64)>,
}

impl Undivided {
    /// What is stored whole on a mesh where trained parameters are computed with, or already stored, as `strategy`
    /// says of their updates. `None` if it is little.
    fn new<'a>(graph: &Graph, mesh: &Mesh, strategy: impl Fn(NodeId) -> &'a Strategy) -> Option<Self> {
        let inner = storage::inner(mesh);
        // Each with the ranks that are to store it in parts: those of one copy.
        let parameters: Vec<(&TensorType, &Strategy, u64)> = graph
            .updates()
            .map(|(id, node)| {
                let ranks = mesh.extent(storage_axes(mesh, strategy(id)));
                (graph.ty(node.operands[Update::PARAMETER]), strategy(id), ranks)
            })
            .collect();
        let all: u64 = parameters.iter().map(|(ty, ..)| ty.bytes().0).sum();
        let of = |inner_ranks: u64| {
            let is_whole = move |(ty, strategy, ranks): &&(&TensorType, &Strategy, u64)| {
                let ranks = ranks / inner * inner_ranks;
                ranks > 1 && storage_dim(ty, strategy, mesh, ranks, 1).is_none()
            };
            parameters.iter().filter(is_whole)
        };
        let bytes = |inner_ranks| of(inner_ranks).map(|(ty, ..)| ty.bytes().0).sum::<u64>();
        let is_told = |whole: u64| whole * TOLD > all;
        let whole = bytes(inner);
        let data = mesh.degree(Family::Data) * mesh.degree(Family::Fsdp);
        let fewer = || divisors(inner).into_iter().filter(|ranks| (2..inner).contains(ranks));
        is_told(whole).then(|| Self {
            whole: Bytes(whole),
            all: Bytes(all),
            ranks: of(inner).map(|(_, _, ranks)| *ranks).max().unwrap_or(1),
            instead: fewer().filter(|ranks| !is_told(bytes(*ranks))).max().map(|ranks| (data / ranks, ranks)),
        })
    }

    /// What a plan stores whole.
    pub fn of_plan(plan: &Plan, zero: u64) -> Option<Self> {
        (zero > 0).then(|| Self::new(&plan.graph, &plan.mesh, |id| &plan.strategies[id])).flatten()
    }

    /// What at least would be stored whole on a mesh, whatever tensor axes divide.
    pub(in crate::search) fn of_mesh(graph: &Graph, mesh: &Mesh) -> Option<Self> {
        let none = Strategy::default();
        Self::new(graph, mesh, |_| &none)
    }

    /// What would do.
    pub fn fix(&self) -> String {
        match self.instead {
            Some((outer, inner)) => format!("pin dp={outer},fsdp={inner}, or {OTHER_RANKS}"),
            None => OTHER_RANKS.to_string(),
        }
    }
}

impl fmt::Display for Undivided {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { whole, all, ranks, .. } = self;
        write!(f, "{whole} of {all} of parameters have no dimension that is long enough for {ranks} ranks")
    }
}
