//! Tensor parallelism: what every node does with one axis, by exact elimination over a cost graph.
//!
//! A variable is a class of nodes; its choices are those of its factor rule, given what the node does with the axes
//! before. Its cost is the time of the node on its local shapes; the cost of a pair is the time to bring the value from
//! the layout in which it is made to the one in which it is read, in seconds, times how often that happens in a step. A
//! value with several readers has a variable of its own, the layout in which it is handed on, so that one gather serves
//! them all. A reader may also take the value as it is made, where that is nearer ([`HandedOn`]). A parameter, its
//! optimizer state and its update are one variable: they are stored alike.
//!
//! What each family of axes may divide is what its name means ([`family`](super::family)), so that no plan is visited
//! twice. Column then row, parallel vocabulary and the sequence between them are not coded: they are what costs least.
//!
//! Several axes are placed one after the other, then each again with the others as they are, until none gets better
//! ([`place`](super::place)). So a table of costs holds the conversions along all axes: what one axis does with a value
//! decides how much the others move of it.

use super::eliminate::{CostGraph, Solution};
use super::family::{allows, is_copy_axis, narrow, searched_axes};
use super::layout::{Along, Extent, convert};
use super::local::Local;
use super::objective::{Objective, Pricer, Quote};
use super::route::{self, Turning};
use super::tensor::{Flow, Placed, Prepared};
use crate::cost::collective::Group;
use crate::cost::is_view;
use crate::search::bound::sharing::Sharing;
use crate::threads::lock;
use shardc_ir::{AxisId, Choice, Strategy, TensorType};
use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Seconds by which a conversion before a view is taken to be dearer than one behind it, which all its readers may share.
const BEFORE_VIEW: f64 = 1e-9;

/// Bytes of collectives of weights that are merged, as many as let none take less for another byte.
const MERGED: f64 = 1e9;

/// An axis that is placed already.
struct Other<'a> {
    axis: AxisId,
    /// Per class, the layouts of operands and results along it.
    layouts: Vec<&'a (Vec<Along>, Vec<Along>)>,
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
    others: Vec<Other<'a>>,
    /// The strategies without the axis.
    strategies: Vec<Strategy>,
    pub graph: CostGraph,
    /// The variable of each class.
    pub variable: Vec<usize>,
    /// The choices of each variable, and what their classes cost.
    pub domains: Vec<Vec<Choice>>,
    quotes: Vec<Vec<Vec<Quote>>>,
    /// What they are to one rank, in the order in which it is asked what they cost.
    locals: Vec<(Strategy, Arc<Local>)>,
    /// How many variables are classes' own.
    classes: usize,
    /// What variables pay for conversions between classes of their own.
    within: Vec<(usize, Vec<f64>)>,
    /// Per flow with several readers, its variable and the ways in which it may be handed on.
    pub handed: BTreeMap<usize, (usize, Vec<HandedOn>)>,
    /// Per class, per choice, the layouts of operands and results along the axis.
    layouts: Vec<Vec<&'a (Vec<Along>, Vec<Along>)>>,
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

/// A layout in which a value is handed on to its readers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct HandedOn {
    /// The layout.
    pub in_layout: Along,
    /// The layout in which it is made, if readers may read it as it is made where they are nearer to that: where parts are
    /// gathered for others. Terms of a sum that is handed on are read by nobody: chunks would hide less of what adds them.
    pub made: Option<Along>,
}

impl HandedOn {
    /// Whether a value that is handed on like this may be made in a layout.
    pub fn may_be(self, made: Along) -> bool {
        self.made.is_none_or(|own| own == made)
    }
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
            layouts: strategies.iter().zip(&prepared.lies).map(|(of, lies)| lies.with(of.choice(other))).collect(),
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
            locals: Vec::new(),
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
            let lies = &self.prepared.lies[class];
            self.layouts.push(self.domains[variable].iter().map(|choice| lies.with(*choice)).collect());
        }
        self.classes = self.domains.len();
        self.quote();
        self.graph.unary = self.prices();
    }

    /// Asks what all classes cost.
    fn quote(&mut self) {
        self.quotes = self.domains[..self.classes].iter().map(|domain| vec![Vec::new(); domain.len()]).collect();
        if self.locals.is_empty() {
            for (class, variable) in self.variable.iter().enumerate() {
                for choice in &self.domains[*variable] {
                    let strategy = self.strategies[class].with(self.axis, *choice);
                    let local = self.placed.local(self.prepared, class, &strategy);
                    self.locals.push((strategy, local));
                }
            }
        }
        let pricer = Pricer::new(self.prepared, self.placed, self.objective);
        let mut locals = self.locals.iter();
        for (class, variable) in self.variable.iter().enumerate() {
            for (quotes, (strategy, local)) in self.quotes[*variable].iter_mut().zip(&mut locals) {
                quotes.push(pricer.quote_of(class, strategy, local));
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
        let family = self.placed.mesh.axis(self.axis).family;
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
                let mut table = table(&made, &read, cost);
                self.add_apart(&mut table, reader);
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
            // In a layout in which it is made it is there as it is made, unless it changes that along another axis.
            let changes = self.others(index, Way::Handed).iter().any(|(_, made, handed)| made != handed);
            let may_read = |made: Along, in_layout: Along| match made == in_layout {
                true => changes,
                false => made.is_gathered_in(in_layout) && self.is_read_as(flow, made),
            };
            let ways = ways(&made, &layouts, &may_read);
            let handed = self.graph.variable(vec![0.0; ways.len()]);
            self.domains.push(Vec::new());
            let members = self.prepared.folded.classes[flow.maker].members.len();
            let shared = {
                let convert = self.converter(&value, Way::Handed, members);
                table(&made, &ways, |made, way: HandedOn| match way.may_be(made) {
                    true => convert(made, way.in_layout),
                    false => f64::INFINITY,
                })
            };
            self.graph.add_pair(self.variable[flow.maker], handed, |a, b| shared[a * ways.len() + b]);
            for (reader, operand, count) in &flow.readers {
                let read: Vec<Along> = self.layouts[*reader].iter().map(|(operands, _)| operands[*operand]).collect();
                let way = Way::Read { reader: *reader, operand: *operand, is_handed: true };
                let mut own = {
                    let convert = self.converter(&value, way, *count);
                    let anew = self.converter(
                        &value,
                        Way::Read { reader: *reader, operand: *operand, is_handed: false },
                        *count,
                    );
                    let nearest = |way: HandedOn, read| {
                        let made = way.made.map_or(f64::INFINITY, |made| anew(made, read));
                        convert(way.in_layout, read).min(made)
                    };
                    table(&ways, &read, nearest)
                };
                self.add_apart(&mut own, *reader);
                self.graph.add_pair(handed, self.variable[*reader], |a, b| own[a * read.len() + b]);
            }
            self.handed.insert(index, (handed, ways));
        }
    }

    /// Adds to a table of costs, whose columns are the choices of a reader, what else is dearer where what it reads is
    /// converted: a sum that a product would make is an instruction of its own then.
    fn add_apart(&self, table: &mut [f64], reader: usize) {
        if matches!(self.objective, Objective::Bound { .. }) {
            return;
        }
        if is_view(self.prepared.op(reader)) {
            table.iter_mut().filter(|cost| **cost > 0.0).for_each(|cost| *cost += BEFORE_VIEW);
        }
        if !self.prepared.emitted[reader].is_summed {
            return;
        }
        let choices = &self.domains[self.variable[reader]];
        let strategies = choices.iter().map(|choice| self.strategies[reader].with(self.axis, *choice));
        let apart: Vec<f64> = strategies.map(|own| self.placed.apart(self.prepared, reader, &own)).collect();
        for row in table.chunks_exact_mut(choices.len().max(1)) {
            for (cost, apart) in row.iter_mut().zip(&apart) {
                *cost += if *cost > 0.0 { *apart } else { 0.0 };
            }
        }
    }

    /// Whether a reader may read a flow in a layout along the axis.
    fn is_read_as(&self, flow: &Flow, layout: Along) -> bool {
        let reads = |(reader, operand, _): &(usize, usize, usize)| {
            self.layouts[*reader].iter().any(|(operands, _)| operands[*operand] == layout)
        };
        flow.readers.iter().any(reads)
    }

    /// The type of a flow's value, undivided along all axes that are searched.
    fn value_type(&self, flow: &Flow) -> TensorType {
        let made = self.prepared.rules[flow.maker].result_sharding(flow.result, &self.strategies[flow.maker]);
        route::undivided(self.prepared, flow, made, (&self.searched, self.placed.mesh))
    }

    /// How often a flow counts that is converted when this class reads it: what is converted once per microbatch, as far
    /// as it is not hidden.
    fn flow_runs(&self, flow: &Flow, reader: usize) -> f64 {
        if self.prepared.in_loop(flow.maker) && self.prepared.in_loop(reader) {
            self.placed.microbatches as f64 * self.objective.wire()
        } else {
            1.0
        }
    }

    /// How a flow that goes a way lies along the other axes before and after.
    fn others(&self, index: usize, way: Way) -> Vec<(AxisId, Along, Along)> {
        let flow = &self.prepared.flows[index];
        let of = |other: &Other<'_>| {
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
        let ahead = self.ahead(flow.maker, reader);
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
                let turn = |bytes| convert(from, to, Extent { bytes, shape: &value.ty.shape }, group, cluster);
                let own = turn(whole);
                let all = own.seconds();
                if let Some(share) = ahead.filter(|_| all.is_finite()) {
                    let wire = turn(MERGED + whole).wire - turn(MERGED).wire;
                    return times * (own.before + share * wire + own.after);
                }
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
                self.placed.routes.seconds(&value.ty, [from, to], (mesh, cluster), cluster)
            };
            times * *lock(known).entry((from, to)).or_insert_with(find)
        }
    }

    /// For a bound, the share of the wire that shows at the least of what is made in front of the loop: collectives of
    /// weights are merged, and run beside the first microbatch. Each is the bytes by which it makes a large one longer.
    fn ahead(&self, maker: usize, reader: usize) -> Option<f64> {
        let (prepared, loss) = (self.prepared, self.placed.cluster.device.overlap_loss.value);
        match self.objective {
            Objective::Step(_) => None,
            Objective::Bound { .. } if prepared.is_scale(maker) => Some(0.0),
            Objective::Bound { .. } if prepared.is_of_weight(maker, reader) => Some(loss),
            Objective::Bound { .. } => prepared.is_merged(maker, reader).then_some(1.0),
        }
    }

    /// For a bound, the seconds of kernels that a conversion of a flow may run beside at the most: those of
    /// nodes that nothing but the batch divides, gradients of weights with all that may be joined with them.
    fn beside(&self, flow: &Flow) -> f64 {
        let (prepared, placed) = (self.prepared, self.placed);
        let seconds = |class: &usize| {
            let joined = prepared.most_joined(*class, placed.microbatches);
            let local = placed.local(prepared, *class, &self.strategies[*class]);
            local.emitted(prepared, (*class, placed.cluster), true) * joined as f64
        };
        let runs = |class: &&usize| self.prepared.runs_between(**class, self.placed.microbatches);
        match self.objective {
            Objective::Step(_) => 0.0,
            Objective::Bound { .. } => flow.between.iter().filter(runs).map(seconds).sum(),
        }
    }

    /// The layout along the axis in which a flow is made.
    #[cfg(test)]
    pub fn made(&self, flow: usize, choices: &[usize]) -> Along {
        let flow = &self.prepared.flows[flow];
        self.layouts[flow.maker][choices[self.variable[flow.maker]]].1[flow.result]
    }

    /// The layouts in which flows are handed on in a solution.
    pub fn handed_in(&self, solution: &Solution) -> BTreeMap<usize, Along> {
        let layout = |(variable, ways): &(usize, Vec<HandedOn>)| ways[solution.choices[*variable]].in_layout;
        self.handed.iter().map(|(index, handed)| (*index, layout(handed))).collect()
    }
}

/// The ways to hand on in one of some layouts what is made in one of some, where readers may read what is made.
fn ways(made: &[Along], layouts: &BTreeSet<Along>, may_read: &dyn Fn(Along, Along) -> bool) -> Vec<HandedOn> {
    let made: BTreeSet<Along> = made.iter().copied().collect();
    let from = |in_layout: Along, made: Along| HandedOn {
        in_layout,
        made: Some(made).filter(|made| may_read(*made, in_layout)),
    };
    let ways: BTreeSet<HandedOn> =
        layouts.iter().flat_map(|layout| made.iter().map(|made| from(*layout, *made))).collect();
    let mut ways: Vec<HandedOn> = ways.into_iter().collect();
    // What tells most of a way is the first that it is.
    ways.sort_by_key(|way| way.made.is_none());
    ways
}

fn table<From: Copy, To: Copy>(from: &[From], to: &[To], cost: impl Fn(From, To) -> f64) -> Vec<f64> {
    let pairs = from.iter().flat_map(|from| to.iter().map(move |to| (*from, *to)));
    pairs.map(|(from, to)| cost(from, to)).collect()
}
