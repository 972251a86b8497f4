//! What a node is to one rank: its seconds and bytes, found once for every way to divide its factors.
//!
//! Both follow from by how much each factor is divided, whichever axes do it. So meshes share them, as do
//! choices of an axis that come to the same.

use super::price::{Ground, Price};
use super::tensor::{Placed, Prepared};
use crate::cluster::Cluster;
use crate::cost::{Machine, is_view};
use crate::threads;
use rustc_hash::FxHashMap;
use shardc_ir::program::Action;
use shardc_ir::{FactorKind, OpDef, Strategy, TensorType};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

/// One node of a class, as the rank that has the most to do sees it.
#[derive(Clone, Debug)]
pub struct Local {
    /// What it takes.
    pub price: Price,
    /// Bytes of each operand.
    pub operands: Vec<u64>,
    /// Bytes of each result.
    pub results: Vec<u64>,
    /// Bytes of scratch memory, once somebody asked.
    scratch: OnceLock<u64>,
}

/// Per class, what is known of its nodes, by the parts that each factor is divided into.
type Known = FxHashMap<Vec<u64>, Arc<Local>>;

/// What is known of the nodes of a graph on one cluster.
#[derive(Debug)]
pub struct Locals {
    cluster: Cluster,
    known: Vec<RwLock<Known>>,
}

/// What is known on each cluster.
pub type AllLocals = Mutex<Vec<Arc<Locals>>>;

impl Prepared<'_> {
    /// What is known of nodes on a cluster.
    pub fn locals(&self, cluster: &Cluster) -> Arc<Locals> {
        let mut all = threads::lock(&self.locals);
        if let Some(known) = all.iter().find(|known| known.cluster == *cluster) {
            return Arc::clone(known);
        }
        let known = self.rules.iter().map(|_| RwLock::default()).collect();
        let own = Arc::new(Locals { cluster: cluster.clone(), known });
        all.push(Arc::clone(&own));
        own
    }
}

impl Placed<'_> {
    /// One node of a class under a strategy.
    pub fn local(&self, prepared: &Prepared<'_>, class: usize, strategy: &Strategy) -> Arc<Local> {
        let rule = &prepared.rules[class];
        let find = || {
            let on = Ground { mesh: self.mesh, cluster: self.cluster };
            let (operands, results) = prepared.local_types(class, strategy, self.mesh);
            let price = prepared.price(class, strategy, on);
            let bytes = |types: Vec<TensorType>| types.iter().map(|ty| ty.bytes().0).collect();
            let scratch = OnceLock::new();
            Arc::new(Local { price, operands: bytes(operands), results: bytes(results), scratch })
        };
        let mut parts = vec![1; rule.factors.len()];
        for (factor, axes) in strategy.factors.iter().filter(|(_, axes)| !axes.is_empty()) {
            // What goes round a ring depends on the links of its axes.
            if matches!(rule.factors[*factor].kind, FactorKind::Ring { .. }) {
                return find();
            }
            parts[*factor] = self.mesh.extent(axes.iter().copied());
        }
        let all = &self.locals.known[class];
        if let Some(known) = all.read().unwrap_or_else(PoisonError::into_inner).get(&parts) {
            return Arc::clone(known);
        }
        let found = find();
        all.write().unwrap_or_else(PoisonError::into_inner).insert(parts, Arc::clone(&found));
        found
    }

    /// By how many seconds of a step all nodes of a class take longer under a strategy where nothing of them is merged
    /// into other instructions.
    pub fn apart(&self, prepared: &Prepared<'_>, class: usize, strategy: &Strategy) -> f64 {
        let local = self.local(prepared, class, strategy);
        let of = |apart: bool| local.emitted(prepared, (class, self.cluster), apart);
        let runs = if prepared.in_loop(class) { self.microbatches as f64 } else { 1.0 };
        (of(true) - of(false)) * runs * prepared.folded.classes[class].members.len() as f64
    }
}

impl Local {
    /// Its seconds as lowering emits it, or by itself where nothing of it is merged into other instructions (`apart`), of a
    /// class on a cluster.
    pub fn emitted(&self, prepared: &Prepared<'_>, (class, cluster): (usize, &Cluster), apart: bool) -> f64 {
        let launch = Machine::own(&cluster.device).launch();
        prepared.emitted[class].seconds(self.price.seconds, self.price.bound, launch, apart)
    }

    /// Bytes of scratch memory that a placed class needs, of which this is one node.
    pub fn scratch(&self, prepared: &Prepared<'_>, placed: &Placed<'_>, class: usize) -> u64 {
        let op = prepared.op(class);
        if op.is_leaf() || is_view(op) {
            return 0;
        }
        let find = || {
            let (operands, results) = prepared.local_types(class, &placed.strategies[class], placed.mesh);
            prepared.target.scratch(&Action::Compute(op.clone()), &operands, &results).0
        };
        *self.scratch.get_or_init(find)
    }
}
