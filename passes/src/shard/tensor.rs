//! Tensor parallelism: what every node does with one axis, by exact elimination over a cost graph.
//!
//! A variable is a class of nodes; its choices are those of its factor rule, given what the node
//! does with the axes before. Its cost is the time of the node on its local shapes; the cost of a
//! pair is the time to bring the value from the layout in which it is made to the one in which it
//! is read, in seconds, times how often that happens in a step. A value with several readers has a
//! variable of its own, the layout in which it is handed on, so that one gather serves them all.
//! A parameter, its optimizer state and its update are one variable: they are stored alike.
//!
//! What each family of axes may divide is what its name means ([`family`](super::family)), so that no
//! plan is visited twice. Column then row, parallel vocabulary and the sequence between them are not
//! coded: they are what costs least.
//!
//! Several axes are placed one after the other, then each again with the others as they are, until none
//! gets better ([`place`](super::place)). So a table of costs holds the conversions along all axes: what
//! one axis does with a value decides how much the others move of it.

use super::eliminate::{CostGraph, Solution};
use super::family::{allows, is_copy_axis, narrow, searched_axes};
use super::layout::{Along, Extent, Turn, convert_seconds};
use super::local::{AllLocals, Locals};
use super::objective::{Objective, Pricer, Quote};
use super::route::{self, Routes, Taken, Turning};
use super::share::Share;
use crate::cluster::Cluster;
use crate::cost::Machine;
use crate::cost::collective::Group;
use crate::fold::Folded;
use crate::head::Head;
use crate::search::liveness::Lives;
use crate::search::recompute::Kind;
use crate::search::sharing::Sharing;
use shardc_ir::ops::Op;
use shardc_ir::plan::{Scope, sums_in};
use shardc_ir::{
    AxisId, Choice, DType, FactorRule, Graph, Mesh, NodeId, Role, SecondaryMap, Sharding, Strategy, Target, TensorType,
};
use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
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
    /// Its classes.
    pub folded: Folded,
    /// The rule of each class.
    pub rules: Vec<&'a FactorRule>,
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
        let is_own = |flow: &&Flow| flow.maker == of.maker && flow.result == of.result;
        let flow = self.flows.iter().find(is_own).filter(|flow| of.is_early || flow.first == of.reader);
        let is_early = of.is_early;
        let runs =
            move |class: &usize| self.runs_between(*class, microbatches) && (is_early || self.is_gradient[*class]);
        flow.into_iter().flat_map(|flow| &flow.between).copied().filter(runs)
    }

    /// Whether only updates wait for what a class makes.
    pub fn is_late(&self, class: usize) -> bool {
        self.is_late[self.folded.classes[class].node]
    }

    /// Whether a class runs where its node stands, with so many microbatches: else it may run in front of the loop.
    fn runs_between(&self, class: usize, microbatches: u64) -> bool {
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

    /// Whether a class is about what the data ranks store in parts: parameters, their copies, states and updates, and
    /// squares of gradients behind the loop.
    pub fn is_stored(&self, class: usize) -> bool {
        match self.op(class) {
            Op::Parameter(_) | Op::State(_) | Op::Adamw(_) => true,
            Op::SumSquares(_) => !self.in_loop(class),
            _ => self.is_copy(class),
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
    pub routes: Rc<Routes>,
}

/// An axis that is placed already.
struct Other {
    axis: AxisId,
    /// Per class, the layouts of operands and results along it.
    layouts: Vec<(Vec<Along>, Vec<Along>)>,
}

/// The cost graph of one axis, the others being placed or not at all.
pub(crate) struct Problem<'a, 'b> {
    prepared: &'a Prepared<'b>,
    placed: &'a Placed<'a>,
    pub axis: AxisId,
    group: Group,
    /// All axes that are searched, in the order in which they divide a dimension.
    searched: Vec<AxisId>,
    objective: Objective,
    others: Vec<Other>,
    /// The strategies without the axis.
    strategies: Vec<Strategy>,
    pub graph: CostGraph,
    /// The variable of each class.
    pub variable: Vec<usize>,
    /// The choices of each variable, and what their classes cost.
    pub domains: Vec<Vec<Choice>>,
    quotes: Vec<Vec<Vec<Quote>>>,
    /// How many variables are classes' own.
    classes: usize,
    /// What variables pay for conversions between classes of their own.
    within: Vec<(usize, Vec<f64>)>,
    /// Per flow with several readers, its variable and the layouts it may be handed on in.
    pub handed: BTreeMap<usize, (usize, Vec<Along>)>,
    /// Per class, per choice, the layouts of operands and results along the axis.
    layouts: Vec<Vec<(Vec<Along>, Vec<Along>)>>,
}

/// The value of a flow.
struct Flowing<'a> {
    index: usize,
    flow: &'a Flow,
    /// Its type, undivided along all axes that are searched.
    ty: TensorType,
    /// The seconds of what its conversion may run beside, once they were asked for.
    beside: OnceCell<f64>,
}

/// Where a value goes: to be handed on, to a reader from there, or to its only reader.
#[derive(Clone, Copy)]
enum Way {
    Handed,
    Read { reader: usize, operand: usize, is_handed: bool },
}

impl<'a, 'b> Problem<'a, 'b> {
    pub fn new(prepared: &'a Prepared<'b>, placed: &'a Placed<'a>, axis: AxisId, objective: Objective) -> Self {
        let strategies: Vec<Strategy> = placed.strategies.iter().map(|strategy| strategy.without(axis)).collect();
        let searched = searched_axes(placed.mesh);
        let is_other = |other: &AxisId| *other != axis && placed.mesh.size(*other) > 1;
        let other = |other: AxisId| Other {
            axis: other,
            layouts: strategies
                .iter()
                .zip(&prepared.rules)
                .map(|(of, rule)| Along::of_rule(rule, of.choice(other)))
                .collect(),
        };
        let mut problem = Self {
            prepared,
            placed,
            axis,
            group: Group::new(placed.mesh, &[axis], placed.cluster),
            objective,
            others: searched.iter().copied().filter(is_other).map(other).collect(),
            searched,
            strategies,
            graph: CostGraph::default(),
            variable: vec![usize::MAX; placed.strategies.len()],
            domains: Vec::new(),
            quotes: Vec::new(),
            classes: 0,
            within: Vec::new(),
            handed: BTreeMap::new(),
            layouts: Vec::new(),
        };
        problem.add_variables();
        problem.add_flows();
        problem
    }

    fn add_variables(&mut self) {
        let count = self.strategies.len();
        for class in 0..count {
            let stands = self.prepared.tied[class];
            if self.variable[stands] == usize::MAX {
                let domain = self.domain(stands);
                self.variable[stands] = self.graph.variable(vec![0.0; domain.len()]);
                self.domains.push(domain);
            }
            self.variable[class] = self.variable[stands];
        }
        for class in 0..count {
            let variable = self.variable[class];
            let rule = self.prepared.rules[class];
            self.layouts.push(self.domains[variable].iter().map(|choice| Along::of_rule(rule, *choice)).collect());
        }
        self.classes = self.domains.len();
        self.quote();
        self.graph.unary = self.prices();
    }

    /// Asks what all classes cost.
    fn quote(&mut self) {
        self.quotes = self.domains[..self.classes].iter().map(|domain| vec![Vec::new(); domain.len()]).collect();
        let pricer = Pricer::new(self.prepared, self.placed, self.objective);
        for (class, variable) in self.variable.iter().enumerate() {
            for (quotes, choice) in self.quotes[*variable].iter_mut().zip(&self.domains[*variable]) {
                quotes.push(pricer.quote(class, &self.strategies[class].with(self.axis, *choice)));
            }
        }
    }

    /// Per variable, what its classes cost.
    fn prices(&self) -> Vec<Vec<f64>> {
        let byte = self.objective.byte();
        let at = |quotes: &Vec<Quote>| quotes.iter().map(|quote| quote.at(byte)).sum();
        self.quotes.iter().map(|choices| choices.iter().map(at).collect()).collect()
    }

    /// The same with bytes at another price: conversions stay as they are.
    pub fn reprice(&mut self, byte: f64) {
        self.objective = self.objective.with_byte(byte);
        // The layouts in which values are handed on have no price of their own.
        let prices = self.prices();
        self.graph.unary.iter_mut().zip(prices).for_each(|(costs, prices)| *costs = prices);
        for (variable, own) in &self.within {
            self.graph.unary[*variable].iter_mut().zip(own).for_each(|(cost, own)| *cost += own);
        }
    }

    /// The same where data ranks share in another way what is stored, with bytes at no price: conversions stay as they
    /// are here as well.
    pub fn share(&mut self, sharing: Sharing) {
        self.objective = self.objective.with_sharing(sharing);
        self.quote();
        self.reprice(0.0);
    }

    /// The choices of a class on this axis.
    fn domain(&self, class: usize) -> Vec<Choice> {
        let family = self.placed.mesh.axis(self.axis).family();
        let (rule, given) = (&self.prepared.rules[class], &self.strategies[class]);
        if self.objective.beside().parts > 1.0 {
            // Axes that are not placed may make legal what is not by itself.
            let size = self.placed.mesh.size(self.axis);
            let divides = |factor: &usize| rule.may_divide(*factor) && rule.factors[*factor].size.is_multiple_of(size);
            let factors = (0..rule.factors.len()).filter(divides).map(Choice::Factor);
            let choices =
                [Choice::Replicate].into_iter().chain(factors).chain((0..rule.linear.len()).map(Choice::Pass));
            return choices.filter(|choice| allows(self.prepared, class, family, *choice)).collect();
        }
        let choices = rule.choices(given, self.axis, self.placed.mesh).into_iter();
        let choices = choices.chain(rule.rings(given, self.axis, self.placed.mesh));
        let mut choices: Vec<Choice> = choices.filter(|choice| allows(self.prepared, class, family, *choice)).collect();
        narrow(self.prepared, class, family, &mut choices);
        choices
    }

    fn add_flows(&mut self) {
        for (index, flow) in self.prepared.flows.iter().enumerate() {
            let made: Vec<Along> = self.layouts[flow.maker].iter().map(|(_, results)| results[flow.result]).collect();
            let value = Flowing { index, flow, ty: self.value_type(flow), beside: OnceCell::new() };
            if let [(reader, operand, count)] = flow.readers[..] {
                let way = Way::Read { reader, operand, is_handed: false };
                let cost = self.converter(&value, way, count);
                let read: Vec<Along> = self.layouts[reader].iter().map(|(operands, _)| operands[operand]).collect();
                let table = table(&made, &read, cost);
                let (maker, reader) = (self.variable[flow.maker], self.variable[reader]);
                self.graph.add_pair(maker, reader, |a, b| table[a * read.len() + b]);
                if maker == reader {
                    let own = (0..read.len()).map(|choice| table[choice * read.len() + choice]);
                    self.within.push((maker, own.collect()));
                }
                continue;
            }
            let mut layouts: BTreeSet<Along> = made.iter().copied().collect();
            for (reader, operand, _) in &flow.readers {
                layouts.extend(self.layouts[*reader].iter().map(|(operands, _)| operands[*operand]));
            }
            let layouts: Vec<Along> = layouts.into_iter().collect();
            let handed = self.graph.variable(vec![0.0; layouts.len()]);
            self.domains.push(Vec::new());
            let members = self.prepared.folded.classes[flow.maker].members.len();
            let shared = table(&made, &layouts, self.converter(&value, Way::Handed, members));
            self.graph.add_pair(self.variable[flow.maker], handed, |a, b| shared[a * layouts.len() + b]);
            for (reader, operand, count) in &flow.readers {
                let read: Vec<Along> = self.layouts[*reader].iter().map(|(operands, _)| operands[*operand]).collect();
                let way = Way::Read { reader: *reader, operand: *operand, is_handed: true };
                let own = table(&layouts, &read, self.converter(&value, way, *count));
                self.graph.add_pair(handed, self.variable[*reader], |a, b| own[a * read.len() + b]);
            }
            self.handed.insert(index, (handed, layouts));
        }
    }

    /// The type of a flow's value, undivided along all axes that are searched.
    fn value_type(&self, flow: &Flow) -> TensorType {
        let made = self.prepared.rules[flow.maker].result_sharding(flow.result, &self.strategies[flow.maker]);
        route::undivided(self.prepared, flow, made, (&self.searched, self.placed.mesh))
    }

    /// Whether a flow is converted once per microbatch when this class reads it.
    fn flow_runs(&self, flow: &Flow, reader: usize) -> f64 {
        if self.prepared.in_loop(flow.maker) && self.prepared.in_loop(reader) {
            self.placed.microbatches as f64
        } else {
            1.0
        }
    }

    /// How a flow that goes a way lies along the other axes before and after.
    fn others(&self, index: usize, way: Way) -> Vec<(AxisId, Along, Along)> {
        let flow = &self.prepared.flows[index];
        let of = |other: &Other| {
            let made = other.layouts[flow.maker].1[flow.result];
            let handed = self.placed.handed.get(&(other.axis, index)).copied().unwrap_or(made);
            let (from, to) = match way {
                Way::Handed => (made, handed),
                Way::Read { reader, operand, is_handed } => {
                    (if is_handed { handed } else { made }, other.layouts[reader].0[operand])
                }
            };
            (other.axis, from, to)
        };
        self.others.iter().map(of).collect()
    }

    /// Seconds of all conversions of a flow that go one way, along all axes.
    fn converter(&self, value: &Flowing<'_>, way: Way, count: usize) -> impl Fn(Along, Along) -> f64 {
        let flow = value.flow;
        let reader = match way {
            Way::Handed => flow.readers[0].0,
            Way::Read { reader, .. } => reader,
        };
        let times = self.flow_runs(flow, reader) * count as f64;
        let (axis, group, cluster, mesh) = (self.axis, self.group, self.placed.cluster, self.placed.mesh);
        let only = if let Way::Read { reader, .. } = way { Some(reader) } else { None };
        let is_gradient = route::is_gradient(self.prepared, flow, only);
        let others = self.others(value.index, way);
        let is_alone = others.iter().all(|(_, from, to)| (*from, *to) == (Along::Whole, Along::Whole));
        let is_kept = others.iter().all(|(_, from, to)| from == to);
        let whole = value.ty.bytes().0 as f64 / self.objective.beside().parts;
        let loss = cluster.device.overlap_loss.value;
        let layout = move |others: &[(AxisId, Along, Along)], own, of: &dyn Fn(&(AxisId, Along, Along)) -> Along| {
            let along = |of_axis: &AxisId| match others.iter().find(|(other, ..)| other == of_axis) {
                Some(other) => of(other),
                None if *of_axis == axis => own,
                None => Along::Whole,
            };
            route::sharding(value.ty.shape.len(), self.searched.iter().map(|axis| (*axis, along(axis))))
        };
        let turning = (!is_alone).then(|| Turning { ty: value.ty.clone(), axis, others, is_gradient });
        let turning = turning.map(|turning| (self.placed.routes.turned(&turning), turning.others));
        move |from, to| {
            if is_kept && from == to {
                return 0.0;
            }
            let Some((known, others)) = &turning else {
                let is_sum = matches!(from, Along::Partial(_)) && to == Along::Whole;
                if is_gradient && is_sum && is_copy_axis(mesh, axis) {
                    return 0.0;
                }
                let all = convert_seconds(from, to, Extent { bytes: whole, shape: &value.ty.shape }, group, cluster);
                let is_beside = matches!(from, Along::Partial(_)) || only.is_none_or(|reader| reader == flow.first);
                if !is_beside || !all.is_finite() {
                    return times * all;
                }
                let free = *value.beside.get_or_init(|| self.beside(flow));
                return times * (all - all.min(free / (1.0 - loss)) * (1.0 - loss));
            };
            let find = || {
                let [from, to] = [layout(others, from, &|(_, from, _)| *from), layout(others, to, &|(_, _, to)| *to)];
                let from = if is_gradient { route::unpriced(from, &to, mesh) } else { from };
                let steps = self.placed.routes.find(&value.ty, from, to, (mesh, cluster));
                let seconds = |step: &Taken| step.seconds(value.ty.dtype.size() as f64, cluster);
                steps.map_or(f64::INFINITY, |steps| steps.iter().map(seconds).sum::<f64>())
            };
            times * *known.borrow_mut().entry((from, to)).or_insert_with(find)
        }
    }

    /// For a bound, the seconds of kernels that a conversion of a flow may run beside at the most: those of
    /// nodes that nothing but the batch divides.
    fn beside(&self, flow: &Flow) -> f64 {
        let launch = Machine::own(&self.placed.cluster.device).launch();
        let seconds = |class: &usize| {
            let local = self.placed.local(self.prepared, *class, &self.strategies[*class]);
            self.prepared.emitted[*class].seconds(local.seconds, local.bound, launch, true)
        };
        let runs = |class: &&usize| self.prepared.runs_between(**class, self.placed.microbatches);
        match self.objective {
            Objective::Step { .. } => 0.0,
            Objective::Bound { .. } => flow.between.iter().filter(runs).map(seconds).sum(),
        }
    }

    /// The layouts in which flows are handed on in a solution.
    pub fn handed_in(&self, solution: &Solution) -> BTreeMap<usize, Along> {
        let layout = |(variable, layouts): &(usize, Vec<Along>)| layouts[solution.choices[*variable]];
        self.handed.iter().map(|(index, handed)| (*index, layout(handed))).collect()
    }
}

fn table(from: &[Along], to: &[Along], cost: impl Fn(Along, Along) -> f64) -> Vec<f64> {
    let pairs = from.iter().flat_map(|from| to.iter().map(move |to| (*from, *to)));
    pairs.map(|(from, to)| cost(from, to)).collect()
}
