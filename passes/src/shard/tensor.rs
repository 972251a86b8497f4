//! Tensor parallelism: what every node does with one axis, by exact elimination over a cost graph.
//!
//! A variable is a class of nodes; its choices are those of its factor rule, given what the node
//! does with the axes before. Its cost is the time of the node on its local shapes; the cost of a
//! pair is the time to bring the value from the layout in which it is made to the one in which it
//! is read, in seconds, times how often that happens in a step. A value with several readers has a
//! variable of its own, the layout in which it is handed on, so that one gather serves them all.
//! A parameter, its optimizer state and its update are one variable: they are stored alike.
//!
//! What each family of axes may divide is what its name means, so that no plan is visited twice: the
//! batch belongs to dp, and where a matrix product (or a table) meets a parameter, tp divides a
//! dimension of the parameter. Column then row, parallel vocabulary and the sequence between them
//! are not coded: they are what costs least.

use super::eliminate::{CostGraph, Solution};
use super::layout::{Along, Extent, convert_seconds};
use crate::chunk::Head;
use crate::cluster::Cluster;
use crate::cost::collective::{self, Collective, Group};
use crate::cost::{Machine, Pass};
use crate::fold::Folded;
use crate::search::liveness::Lives;
use shardc_ir::ops::Op;
use shardc_ir::{AxisId, Choice, FactorRule, Graph, Mesh, Role, Sharding, Strategy, Target, TensorType};
use std::collections::{BTreeMap, BTreeSet};

/// What does not depend on the mesh: computed once per graph.
pub struct Prepared<'a> {
    /// The graph.
    pub graph: &'a Graph,
    /// What will run it.
    pub target: &'a dyn Target,
    /// Its classes.
    pub folded: Folded,
    /// The rule of each class.
    pub rules: Vec<FactorRule>,
    /// What each class does with axes that divide the batch.
    pub batch: Vec<Choice>,
    /// Per class, the class whose strategy it shares (a parameter's update, for its state).
    pub tied: Vec<usize>,
    /// Per class, the operand or result (`true`) that is a parameter's matrix, if it is a product with one.
    pub weight: Vec<Option<(bool, usize)>>,
    /// Per class whether it is (a copy of) a parameter.
    pub is_parameter: Vec<bool>,
    /// Per class whether its result is a parameter's gradient.
    pub is_gradient: Vec<bool>,
    /// How values flow between classes.
    pub flows: Vec<Flow>,
    /// The head, if it can be cut into chunks.
    pub head: Option<Head>,
    /// When each value lives.
    pub lives: Lives,
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
    pub seconds: f64,
    /// How many of them there are in the graph.
    pub count: usize,
    /// Bytes of the converted copy on one rank.
    pub bytes: f64,
    /// Whether several readers share it.
    pub is_shared: bool,
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

    /// Whether a class runs once per microbatch.
    pub fn in_loop(&self, class: usize) -> bool {
        self.batch[class] != Choice::Replicate
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
pub struct Placed<'a> {
    /// The mesh.
    pub mesh: &'a Mesh,
    /// The cluster.
    pub cluster: &'a Cluster,
    /// The strategies.
    pub strategies: Vec<Strategy>,
    /// Microbatches of a step.
    pub microbatches: u64,
}

/// Chooses what every class does with `axis`, and adds it to the strategies.
pub fn place_axis(prepared: &Prepared<'_>, placed: &mut Placed<'_>, axis: AxisId) -> (Solution, Vec<Conversion>) {
    let problem = Problem::new(prepared, placed, axis);
    let solution = problem.graph.solve();
    let conversions = problem.conversions(&solution);
    let choice = |variable: &usize| problem.domains[*variable][solution.choices[*variable]];
    let choices: Vec<Choice> = problem.variable.iter().map(choice).collect();
    for (strategy, choice) in placed.strategies.iter_mut().zip(choices) {
        *strategy = strategy.with(axis, choice);
    }
    (solution, conversions)
}

/// What each choice of some classes on `axis` costs a step, in seconds beyond the best: all other nodes
/// are free to suit it.
pub fn choices_of(
    prepared: &Prepared<'_>,
    placed: &Placed<'_>,
    axis: AxisId,
    classes: &[usize],
) -> Vec<Vec<(Choice, f64)>> {
    let problem = Problem::new(prepared, placed, axis);
    let mut known: BTreeMap<usize, Vec<(Choice, f64)>> = BTreeMap::new();
    let of = |class: &usize| {
        let variable = problem.variable[*class];
        let choices = || problem.domains[variable].iter().copied();
        known.entry(variable).or_insert_with(|| choices().zip(problem.graph.costs_of(variable)).collect()).clone()
    };
    classes.iter().map(of).collect()
}

/// The cost graph of one axis.
struct Problem<'a, 'b> {
    prepared: &'a Prepared<'b>,
    placed: &'a Placed<'a>,
    axis: AxisId,
    group: Group,
    /// The ranks over which gradients are reduced.
    data: Group,
    graph: CostGraph,
    /// The variable of each class.
    variable: Vec<usize>,
    /// The choices of each variable.
    domains: Vec<Vec<Choice>>,
    /// Per flow with several readers, its variable and the layouts it may be handed on in.
    handed: BTreeMap<usize, (usize, Vec<Along>)>,
    /// Per class, per choice, the layouts of operands and results along the axis.
    layouts: Vec<Vec<(Vec<Along>, Vec<Along>)>>,
}

impl<'a, 'b> Problem<'a, 'b> {
    fn new(prepared: &'a Prepared<'b>, placed: &'a Placed<'a>, axis: AxisId) -> Self {
        let group = Group::new(placed.mesh, &[axis], placed.cluster);
        let data = Group::new(placed.mesh, &placed.mesh.family("dp"), placed.cluster);
        let mut problem = Self {
            prepared,
            placed,
            axis,
            group,
            data,
            graph: CostGraph::default(),
            variable: vec![usize::MAX; placed.strategies.len()],
            domains: Vec::new(),
            handed: BTreeMap::new(),
            layouts: Vec::new(),
        };
        problem.add_variables();
        problem.add_flows();
        problem
    }

    fn add_variables(&mut self) {
        let count = self.placed.strategies.len();
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
            let mut layouts = Vec::new();
            for index in 0..self.domains[variable].len() {
                let strategy = self.placed.strategies[class].with(self.axis, self.domains[variable][index]);
                self.graph.unary[variable][index] += self.node_cost(class, &strategy);
                layouts.push(self.layouts_of(class, &strategy));
            }
            self.layouts.push(layouts);
        }
    }

    fn layouts_of(&self, class: usize, strategy: &Strategy) -> (Vec<Along>, Vec<Along>) {
        let rule = &self.prepared.rules[class];
        let operands =
            (0..rule.operands.len()).map(|index| Along::of(&rule.operand_sharding(index, strategy), self.axis));
        let results = (0..rule.results.len()).map(|index| Along::of(&rule.result_sharding(index, strategy), self.axis));
        (operands.collect(), results.collect())
    }

    /// The choices of a class on this axis.
    fn domain(&self, class: usize) -> Vec<Choice> {
        let (prepared, rule) = (self.prepared, &self.prepared.rules[class]);
        if matches!(prepared.op(class), Op::Input(_)) {
            return vec![Choice::Replicate];
        }
        let dims = prepared.weight[class].map(|(is_result, index)| {
            let dims = if is_result { &rule.results[index] } else { &rule.operands[index] };
            dims.iter().flatten().copied().collect::<BTreeSet<usize>>()
        });
        let allowed = |choice: &Choice| match choice {
            Choice::Factor(factor) => {
                prepared.batch[class] != *choice && dims.as_ref().is_none_or(|dims| dims.contains(factor))
            }
            _ => true,
        };
        let choices = rule.choices(&self.placed.strategies[class], self.axis, self.placed.mesh);
        choices.into_iter().filter(allowed).collect()
    }

    /// How often a class runs in a step.
    fn runs(&self, class: usize) -> f64 {
        if self.prepared.in_loop(class) { self.placed.microbatches as f64 } else { 1.0 }
    }

    fn node_cost(&self, class: usize, strategy: &Strategy) -> f64 {
        let (operands, results) = self.prepared.local_types(class, strategy, self.placed.mesh);
        let op = self.prepared.op(class);
        let count = self.prepared.folded.classes[class].members.len() as f64;
        let machine = Machine::own(&self.placed.cluster.device);
        let (seconds, _) = machine.seconds(op, &operands, &results, Pass::of(self.prepared.role(class)));
        let mut cost = seconds.0 * self.runs(class);
        if let Op::Adamw(_) = op {
            cost += self.gradient_cost(&operands[0]);
        }
        cost * count
    }

    /// What a parameter of this size costs on the data axes: its gradient is reduced there and,
    /// where its storage is divided, its parts are gathered. Half of it is taken to be hidden.
    fn gradient_cost(&self, parameter: &TensorType) -> f64 {
        let bytes = parameter.bytes().0 as f64;
        let launch = self.placed.cluster.device.collective_launch.value;
        let time = collective::seconds(Collective::AllReduce, bytes, self.data, self.placed.cluster).0;
        0.5 * (time - launch).max(0.0)
    }

    fn add_flows(&mut self) {
        for (index, flow) in self.prepared.flows.iter().enumerate() {
            let made: Vec<Along> = self.layouts[flow.maker].iter().map(|(_, results)| results[flow.result]).collect();
            if let [(reader, operand, count)] = flow.readers[..] {
                let (cost, variables) =
                    (self.converter(flow, reader, count), (self.variable[flow.maker], self.variable[reader]));
                let read: Vec<Along> = self.layouts[reader].iter().map(|(operands, _)| operands[operand]).collect();
                let table = table(&made, &read, cost);
                self.graph.add_pair(variables.0, variables.1, |a, b| table[a * read.len() + b]);
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
            let shared = table(&made, &layouts, self.converter(flow, flow.readers[0].0, members));
            self.graph.add_pair(self.variable[flow.maker], handed, |a, b| shared[a * layouts.len() + b]);
            for (reader, operand, count) in &flow.readers {
                let read: Vec<Along> = self.layouts[*reader].iter().map(|(operands, _)| operands[*operand]).collect();
                let own = table(&layouts, &read, self.converter(flow, *reader, *count));
                self.graph.add_pair(handed, self.variable[*reader], |a, b| own[a * read.len() + b]);
            }
            self.handed.insert(index, (handed, layouts));
        }
    }

    /// The type of a flow's value, undivided along the axis.
    fn value_type(&self, flow: &Flow) -> TensorType {
        let node = self.prepared.folded.classes[flow.maker].node;
        let value = self.prepared.graph.node(node).results[flow.result];
        let sharding =
            self.prepared.rules[flow.maker].result_sharding(flow.result, &self.placed.strategies[flow.maker]);
        Prepared::local(self.prepared.graph.ty(value), &sharding, self.placed.mesh)
    }

    /// Whether a flow is converted once per microbatch when this class reads it.
    fn flow_runs(&self, flow: &Flow, reader: usize) -> f64 {
        if self.prepared.in_loop(flow.maker) && self.prepared.in_loop(reader) {
            self.placed.microbatches as f64
        } else {
            1.0
        }
    }

    /// Seconds of all conversions of a flow for a reader.
    fn converter(&self, flow: &Flow, reader: usize, count: usize) -> impl Fn(Along, Along) -> f64 + use<'a, 'b> {
        let ty = self.value_type(flow);
        let (group, cluster) = (self.group, self.placed.cluster);
        let times = self.flow_runs(flow, reader) * count as f64;
        move |from, to| {
            let value = Extent { bytes: ty.bytes().0 as f64, shape: &ty.shape };
            times * convert_seconds(from, to, value, group, cluster)
        }
    }

    /// The conversions of a solution.
    fn conversions(&self, solution: &Solution) -> Vec<Conversion> {
        let mut conversions = Vec::new();
        for (index, flow) in self.prepared.flows.iter().enumerate() {
            let chosen = |class: usize| &self.layouts[class][solution.choices[self.variable[class]]];
            let made = chosen(flow.maker).1[flow.result];
            let ty = self.value_type(flow);
            let mut add = |from: Along, to: Along, reader: usize, count: usize, is_shared: bool| {
                if from == to {
                    return;
                }
                let value = Extent { bytes: ty.bytes().0 as f64, shape: &ty.shape };
                let seconds = convert_seconds(from, to, value, self.group, self.placed.cluster);
                let bytes =
                    if matches!(to, Along::Dim(_)) { value.bytes / self.group.size() as f64 } else { value.bytes };
                conversions.push(Conversion {
                    maker: flow.maker,
                    result: flow.result,
                    reader,
                    seconds,
                    count,
                    bytes,
                    is_shared,
                });
            };
            let members = self.prepared.folded.classes[flow.maker].members.len();
            let handed = match self.handed.get(&index) {
                Some((variable, layouts)) => {
                    let handed = layouts[solution.choices[*variable]];
                    add(made, handed, flow.readers[0].0, members, true);
                    handed
                }
                None => made,
            };
            for (reader, operand, count) in &flow.readers {
                add(handed, chosen(*reader).0[*operand], *reader, *count, false);
            }
        }
        conversions
    }
}

fn table(from: &[Along], to: &[Along], cost: impl Fn(Along, Along) -> f64) -> Vec<f64> {
    from.iter().flat_map(|from| to.iter().map(|to| cost(*from, *to)).collect::<Vec<_>>()).collect()
}
