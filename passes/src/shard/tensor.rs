//! What tensor parallelism knows of a graph: its classes, what flows between them, and what is placed on a mesh.

use super::layout::{Along, Lies, Turn};
use super::local::{AllLocals, Locals};
use super::route::Routes;
use super::share::Share;
use crate::cluster::Cluster;
use crate::fold::{Blocks, Folded};
use crate::head::Head;
use crate::search::estimate::liveness::Lives;
use crate::search::estimate::recompute::Kind;
use shardc_ir::ops::{Op, OpDef};
use shardc_ir::plan::{Scope, sums_in};
use shardc_ir::{
    AxisId, Choice, DType, FactorRule, Graph, Mesh, NodeId, Role, SecondaryMap, Sharding, Strategy, Target, TensorType,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What does not depend on the mesh: computed once per graph.
pub struct Prepared<'a> {
    /// The graph.
    pub graph: &'a Graph,
    /// What will run it.
    pub target: &'a dyn Target,
    /// Whether plans are wanted that it cannot run.
    pub scope: Scope,
    /// The element type in which gradients of matrices are summed over ranks, if it is not their own.
    pub reduce_dtype: Option<DType>,
    /// Its blocks.
    pub blocks: Blocks<'a>,
    /// Its classes.
    pub folded: Folded,
    /// The rule of each class.
    pub rules: Vec<&'a FactorRule>,
    /// Per class, how its operands and results lie along an axis with which it does what.
    pub lies: Vec<Lies>,
    /// What each class does with axes that divide the batch.
    pub batch: Vec<Choice>,
    /// Per class whether it runs once per microbatch.
    pub in_loop: Vec<bool>,
    /// Per class, the class whose strategy it shares (a parameter's update, for its state).
    pub tied: Vec<usize>,
    /// Per class, the operand or result (`true`) that is a parameter's matrix, if it is a product with one.
    pub weight: Vec<Option<(bool, usize)>>,
    /// Per class, the factors that tell experts apart: of products with a parameter that has one matrix
    /// for each of them, and of what the parameter is made of and becomes.
    pub experts: Vec<BTreeSet<usize>>,
    /// Per class whether it is (a copy of) a parameter.
    pub is_parameter: Vec<bool>,
    /// Per class whether its result is a parameter's gradient.
    pub is_gradient: Vec<bool>,
    /// The nodes of the loop that only updates wait for, by themselves or by what reads them: gradients of weights, and
    /// nothing that the rest of the backward pass reads.
    pub is_late: SecondaryMap<NodeId, bool>,
    /// How values flow between classes.
    pub flows: Vec<Flow>,
    /// The head, if it can be cut into chunks.
    pub head: Option<Head>,
    /// When each value lives.
    pub lives: Lives,
    /// What of its blocks can be computed again.
    pub kinds: Vec<Kind>,
    /// Per class, what lowering makes of one of its nodes, on average.
    pub emitted: Vec<Share>,
    /// What is known of its nodes on one rank.
    pub locals: AllLocals,
}

/// One result of a class and the classes that read it.
#[derive(Clone, Debug)]
pub struct Flow {
    /// The class that makes it.
    pub maker: usize,
    /// Which of its results.
    pub result: usize,
    /// Who reads it: class, operand, and how often in the graph.
    pub readers: Vec<(usize, usize, usize)>,
    /// The class of the first node that reads what its first maker makes.
    pub first: usize,
    /// The classes of the nodes between these two.
    pub between: Vec<usize>,
}

/// A conversion of a value that a plan makes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Conversion {
    /// The class that makes the value.
    pub maker: usize,
    /// Which of its results.
    pub result: usize,
    /// The class that reads it, the first of them where several share the copy.
    pub reader: usize,
    /// Its seconds, once.
    pub turn: Turn,
    /// Of those of the wire, what they are without a byte: collectives that are merged start once.
    pub start: f64,
    /// How many of them there are in the graph.
    pub count: usize,
    /// Bytes of the converted copy on one rank.
    pub bytes: f64,
    /// Whether several readers share it.
    pub is_shared: bool,
    /// Whether it resolves a partial value: such a conversion begins behind the maker.
    pub is_early: bool,
    /// Whether a kernel does it, without the other ranks.
    pub is_local: bool,
}

impl Prepared<'_> {
    /// The local type of a value under a layout.
    pub fn local(ty: &TensorType, sharding: &Sharding, mesh: &Mesh) -> TensorType {
        ty.with_shape(sharding.local_shape(&ty.shape, mesh))
    }

    /// The types of operands and results that one rank sees.
    pub fn local_types(&self, class: usize, strategy: &Strategy, mesh: &Mesh) -> (Vec<TensorType>, Vec<TensorType>) {
        let (node, rule) = (self.folded.classes[class].node, &self.rules[class]);
        let operands = self.graph.operand_types(node);
        let operands = operands.iter().enumerate();
        let operands = operands.map(|(index, ty)| Self::local(ty, &rule.operand_sharding(index, strategy), mesh));
        let results = self.graph.result_types(node);
        let results = results.iter().enumerate();
        let results = results.map(|(index, ty)| Self::local(ty, &rule.result_sharding(index, strategy), mesh));
        (operands.collect(), results.collect())
    }

    /// The classes of the nodes that run between the maker of a value and the first that reads it converted, once per
    /// microbatch of so many: the wire brings it beside them. Of a conversion that is issued where its reader stands they
    /// are gradients of weights, which nothing waits for.
    pub fn between(&self, of: &Conversion, microbatches: u64) -> impl Iterator<Item = usize> {
        // Flows are in this order.
        let own = self.flows.binary_search_by_key(&(of.maker, of.result), |flow| (flow.maker, flow.result));
        let flow = own.ok().map(|index| &self.flows[index]).filter(|flow| of.is_early || flow.first == of.reader);
        let is_early = of.is_early;
        let runs =
            move |class: &usize| self.runs_between(*class, microbatches) && (is_early || self.is_gradient[*class]);
        flow.into_iter().flat_map(|flow| &flow.between).copied().filter(runs)
    }

    /// Whether only updates wait for what a class makes.
    pub fn is_late(&self, class: usize) -> bool {
        self.is_late[self.folded.classes[class].node]
    }

    /// How many nodes like one of a class, itself included, may be one instruction that stands where the last of them does,
    /// with so many microbatches: gradients of weights, where one microbatch's are all that there are.
    pub fn most_joined(&self, class: usize, microbatches: u64) -> usize {
        if microbatches == 1 && self.is_late(class) { self.emitted[class].beside.max(1) } else { 1 }
    }

    /// Whether a class runs where its node stands, with so many microbatches: else it may run in front of the loop.
    pub fn runs_between(&self, class: usize, microbatches: u64) -> bool {
        microbatches == 1 || self.in_loop(class)
    }

    /// Whether a class runs once per microbatch.
    pub fn in_loop(&self, class: usize) -> bool {
        self.in_loop[class]
    }

    /// Whether a class makes a copy of a parameter: its cast, or its scale and codes in 8 bits.
    pub fn is_copy(&self, class: usize) -> bool {
        let op = self.op(class);
        self.is_parameter[class] && matches!(op, Op::Cast(_) | Op::QuantizationScale(_) | Op::Quantize(_))
    }

    /// Whether a class makes the scale of a parameter: those of all parameters are found together.
    pub fn is_scale(&self, class: usize) -> bool {
        matches!(self.op(class), Op::QuantizationScale(_)) && self.is_copy(class)
    }

    /// Whether what one class makes and another reads is a weight that the loop reads.
    pub fn is_of_weight(&self, maker: usize, reader: usize) -> bool {
        let is_ahead = self.is_parameter[maker] && !self.in_loop(maker);
        is_ahead && !self.is_scale(maker) && self.in_loop(reader)
    }

    /// Whether it is a copy of a parameter that is read in front of the loop: collectives of those of a block are one.
    pub fn is_merged(&self, maker: usize, reader: usize) -> bool {
        self.is_copy(maker) && !self.in_loop(reader) && self.role(reader) == Role::Forward
    }

    /// Whether a class is about what the data ranks store in parts: parameters, their copies, states and updates, and
    /// squares of gradients behind the loop.
    pub fn is_stored(&self, class: usize) -> bool {
        match self.op(class) {
            Op::Parameter(_) | Op::State(_) => true,
            Op::SumSquares(_) => !self.in_loop(class),
            op => op.update().is_some() || self.is_copy(class),
        }
    }

    /// The factors of the parameter that a product reads, or whose gradient it makes.
    pub fn weight_factors(&self, class: usize) -> Option<BTreeSet<usize>> {
        let rule = &self.rules[class];
        let (is_result, index) = self.weight[class]?;
        let dims = if is_result { &rule.results[index] } else { &rule.operands[index] };
        Some(dims.iter().flatten().copied().collect())
    }

    /// Bytes that go over the wire where a gradient of so many bytes is summed.
    pub fn on_wire(&self, ty: &TensorType, bytes: f64) -> f64 {
        sums_in(self.reduce_dtype, ty).map_or(bytes, |dtype| bytes * dtype.size() as f64 / ty.dtype.size() as f64)
    }

    /// The operation of a class.
    pub fn op(&self, class: usize) -> &Op {
        &self.graph.node(self.folded.classes[class].node).op
    }

    /// The role of a class.
    pub fn role(&self, class: usize) -> Role {
        self.graph.node(self.folded.classes[class].node).role
    }
}

/// A mesh with the strategies of the axes placed so far, per class.
#[derive(Clone)]
pub struct Placed<'a> {
    /// The mesh.
    pub mesh: &'a Mesh,
    /// The cluster.
    pub cluster: &'a Cluster,
    /// The strategies.
    pub strategies: Vec<Strategy>,
    /// Microbatches of a step.
    pub microbatches: u64,
    /// Per axis and flow with several readers, the layout in which the value is handed on.
    pub handed: BTreeMap<(AxisId, usize), Along>,
    /// What is known of nodes on one rank.
    pub locals: Arc<Locals>,
    /// The ways of values between layouts.
    pub routes: Arc<Routes>,
}
