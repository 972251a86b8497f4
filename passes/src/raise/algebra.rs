//! Finds normalizations and gated activations by equality saturation.
//!
//! Around each candidate (a product or a sum that a root or a sigmoid reaches within a few nodes) a
//! small term is written down in a language in which layout is abstract: `rows` is a value per row
//! copied along the last dimension, `columns` one vector for all rows. The rules reorder factors
//! and bring quotients by roots into one form; the composite then is one pattern. A candidate is
//! replaced if its class holds a composite whose operands are values of the graph.

use super::{Composite, Found};
use egg::{Id, Language, RecExpr, Rewrite, Runner, define_language, rewrite};
use shardc_ir::ops::{BinaryKind, ReduceOp, UnaryKind};
use shardc_ir::{Graph, NodeId, Op, TensorType, ValueId};
use std::collections::{BTreeMap, HashMap, HashSet};

define_language! {
    /// The terms around a candidate.
    enum Term {
        "add" = Add([Id; 2]),
        "sub" = Sub([Id; 2]),
        "mul" = Mul([Id; 2]),
        "div" = Div([Id; 2]),
        "neg" = Neg(Id),
        "sqrt" = Sqrt(Id),
        "rsqrt" = Rsqrt(Id),
        "recip" = Recip(Id),
        "sigmoid" = Sigmoid(Id),
        "silu" = Silu(Id),
        // A value per row, copied along the last dimension.
        "rows" = Rows(Id),
        // A vector, copied along all dimensions but the last.
        "columns" = Columns(Id),
        // The mean over the last dimension, plus a number.
        "mean" = Mean([Id; 2]),
        "rms_norm" = RmsNorm([Id; 3]),
        "layer_norm" = LayerNorm([Id; 4]),
        "swiglu" = Swiglu([Id; 2]),
        // Anything else: a value of the graph (`v3`, the region's third) or a number (`n` and the bits of an f64).
        Leaf(egg::Symbol),
    }
}

/// The most nodes of a term: a decomposed layer normalization has about twenty.
const MOST_NODES: usize = 40;
/// The most steps from the candidate to a node of its term.
const DEPTH: usize = 12;

fn rules() -> Vec<Rewrite<Term, ()>> {
    vec![
        rewrite!("commute_add"; "(add ?a ?b)" => "(add ?b ?a)"),
        rewrite!("commute_mul"; "(mul ?a ?b)" => "(mul ?b ?a)"),
        rewrite!("associate_mul"; "(mul (mul ?a ?b) ?c)" => "(mul ?a (mul ?b ?c))"),
        rewrite!("quotient"; "(div ?a ?b)" => "(mul ?a (recip ?b))"),
        rewrite!("reciprocal_root"; "(recip (sqrt ?a))" => "(rsqrt ?a)"),
        rewrite!("recip_of_rows"; "(recip (rows ?a))" => "(rows (recip ?a))"),
        rewrite!("sqrt_of_rows"; "(sqrt (rows ?a))" => "(rows (sqrt ?a))"),
        rewrite!("rsqrt_of_rows"; "(rsqrt (rows ?a))" => "(rows (rsqrt ?a))"),
        rewrite!("silu"; "(mul ?a (sigmoid ?a))" => "(silu ?a)"),
        rewrite!("swiglu"; "(mul (silu ?a) ?b)" => "(swiglu ?a ?b)"),
        rewrite!("rms_norm";
            "(mul ?x (mul (rows (rsqrt (mean (mul ?x ?x) ?e))) (columns ?g)))" => "(rms_norm ?x ?g ?e)"),
        rewrite!("layer_norm";
            "(add (mul (sub ?x (rows (mean ?x n0))) (mul (rows (rsqrt (mean (mul (sub ?x (rows (mean ?x n0))) \
             (sub ?x (rows (mean ?x n0)))) ?e))) (columns ?g))) (columns ?b))" => "(layer_norm ?x ?g ?b ?e)"),
    ]
}

/// Every composite, by the node that makes its value.
pub fn find(graph: &Graph) -> BTreeMap<NodeId, Found> {
    let rules = rules();
    let (mut found, mut covered) = (BTreeMap::new(), HashSet::new());
    // Layers are alike: what one region is, all of its form are. Their values are counted alike too.
    let mut known: HashMap<Form, (Vec<ValueId>, Option<Found>)> = HashMap::new();
    // The last node of a formula comes before its parts, so that a layer normalization is not cut
    // short at its product.
    let nodes: Vec<NodeId> = graph.nodes().map(|(id, _)| id).collect();
    for id in nodes.into_iter().rev() {
        let candidate =
            matches!(&graph.node(id).op, Op::Binary(op) if matches!(op.kind, BinaryKind::Mul | BinaryKind::Add));
        if !candidate || covered.contains(&id) {
            continue;
        }
        let mut region = Region::new(graph);
        let root = region.term(graph.result(id), DEPTH);
        if !region.triggered || region.term.len() > MOST_NODES {
            continue;
        }
        let values: Vec<ValueId> = region.values.iter().map(|(_, value)| *value).collect();
        let form = region.form(id, root);
        let (first, made) =
            known.entry(form).or_insert_with(|| (values.clone(), saturate(graph, id, region, root, &rules)));
        if let Some(made) = made.clone() {
            let place =
                |value: ValueId| first.iter().position(|own| *own == value).map_or(value, |place| values[place]);
            let composite = made.composite.moved(place);
            covered.extend(covered_by(graph, id, &composite));
            found.insert(id, Found { composite, ..made });
        }
    }
    found
}

/// What decides on a region's composite: the term, its root, and for each value its place, and whether it has the
/// type of the candidate or that of one of its rows.
type Form = (Vec<Term>, Id, Vec<(Id, bool, bool)>);

/// A term being written down.
struct Region<'a> {
    graph: &'a Graph,
    term: RecExpr<Term>,
    /// The place of each value in the term, and the values in the order of their places.
    known: HashMap<ValueId, Id>,
    values: Vec<(Id, ValueId)>,
    triggered: bool,
}

impl<'a> Region<'a> {
    fn new(graph: &'a Graph) -> Self {
        Self { graph, term: RecExpr::default(), known: HashMap::new(), values: Vec::new(), triggered: false }
    }

    fn form(&self, candidate: NodeId, root: Id) -> Form {
        let fits = Fits::new(self.graph, candidate);
        let places = self.values.iter().map(|(place, value)| (*place, fits.whole(*value), fits.vector(*value)));
        (self.term.as_ref().to_vec(), root, places.collect())
    }

    fn number(&mut self, number: f64) -> Id {
        let name = if number == 0.0 { "n0".to_string() } else { format!("n{}", number.to_bits()) };
        self.term.add(Term::Leaf(name.into()))
    }

    /// A value that is not looked into, by its place among the region's.
    fn leaf(&mut self) -> Id {
        self.term.add(Term::Leaf(format!("v{}", self.values.len()).into()))
    }

    /// A value's term, down to a depth.
    fn term(&mut self, value: ValueId, depth: usize) -> Id {
        if let Some(known) = self.known.get(&value) {
            return *known;
        }
        let inner = if depth == 0 || self.term.len() > MOST_NODES { None } else { self.node(value, depth - 1) };
        let id = inner.unwrap_or_else(|| self.leaf());
        self.known.insert(value, id);
        self.values.push((id, value));
        id
    }

    fn node(&mut self, value: ValueId, depth: usize) -> Option<Id> {
        let graph = self.graph;
        let node = graph.def(value);
        let same = |other: ValueId| graph.ty(other).rank() == graph.ty(value).rank();
        let term = match (&node.op, node.operands.as_slice()) {
            (Op::Binary(op), [a, b]) if same(*a) && same(*b) => {
                use BinaryKind::{Add, Div, Mul, Sub};
                if !matches!(op.kind, Add | Sub | Mul | Div) {
                    return None;
                }
                let pair = [self.term(*a, depth), self.term(*b, depth)];
                match op.kind {
                    Add => Term::Add(pair),
                    Sub => Term::Sub(pair),
                    Mul => Term::Mul(pair),
                    _ => Term::Div(pair),
                }
            }
            (Op::Binary(op), [a, b]) if op.kind == BinaryKind::Pow && constant(graph, *b) == Some(2.0) => {
                let x = self.term(*a, depth);
                Term::Mul([x, x])
            }
            (Op::Unary(op), [x]) => {
                use UnaryKind::{Neg, Recip, Rsqrt, Sigmoid, Silu, Sqrt};
                if !matches!(op.kind, Neg | Recip | Rsqrt | Sigmoid | Silu | Sqrt) {
                    return None;
                }
                self.triggered |= op.kind != Neg && op.kind != Recip;
                let x = self.term(*x, depth);
                match op.kind {
                    Neg => Term::Neg(x),
                    Recip => Term::Recip(x),
                    Rsqrt => Term::Rsqrt(x),
                    Sigmoid => Term::Sigmoid(x),
                    Silu => Term::Silu(x),
                    _ => Term::Sqrt(x),
                }
            }
            _ => return self.layout(value, depth),
        };
        Some(self.term.add(term))
    }

    /// Means over rows, and values per row or per column copied to all.
    fn layout(&mut self, value: ValueId, depth: usize) -> Option<Id> {
        if let Some((x, offset)) = mean(self.graph, value) {
            let (x, offset) = (self.term(x, depth), self.number(offset));
            return Some(self.term.add(Term::Mean([x, offset])));
        }
        let node = self.graph.def(value);
        match &node.op {
            Op::Broadcast(op) => {
                let source = node.operands[0];
                let (from, to) = (&self.graph.ty(source).shape, &self.graph.ty(value).shape);
                let last = to.len().checked_sub(1)?;
                let proper: Vec<usize> =
                    op.dims.iter().zip(from).filter(|(_, size)| **size != 1).map(|(dim, _)| *dim).collect();
                if proper == [last] && from.len() == 1 {
                    let x = self.term(source, depth);
                    return Some(self.term.add(Term::Columns(x)));
                }
                if proper.into_iter().eq((0..last).filter(|dim| to[*dim] != 1)) {
                    let x = self.term(source, depth);
                    return Some(self.term.add(Term::Rows(x)));
                }
                None
            }
            // Only dimensions of size one come or go: the same rows.
            Op::Reshape(_) => {
                let proper = |shape: &[u64]| shape.iter().copied().filter(|size| *size != 1).collect::<Vec<_>>();
                let same = proper(&self.graph.ty(node.operands[0]).shape) == proper(&self.graph.ty(value).shape);
                same.then(|| self.term(node.operands[0], depth))
            }
            _ => None,
        }
    }
}

/// The number that a value holds everywhere.
fn constant(graph: &Graph, value: ValueId) -> Option<f64> {
    match &graph.def(value).op {
        Op::Constant(constant) => Some(constant.value),
        Op::Broadcast(_) | Op::Reshape(_) => constant(graph, graph.def(value).operands[0]),
        _ => None,
    }
}

/// `(x, offset)` of `offset + mean of x over its last dimension`.
fn mean(graph: &Graph, value: ValueId) -> Option<(ValueId, f64)> {
    let (mut value, mut scale, mut offset) = (value, 1.0, 0.0);
    loop {
        let node = graph.def(value);
        value = match (&node.op, node.operands.as_slice()) {
            (Op::Affine(op), [x]) => {
                (scale, offset) = (scale * op.scale, scale * op.offset + offset);
                *x
            }
            (Op::Binary(op), [x, by]) if op.kind == BinaryKind::Div => {
                scale /= constant(graph, *by)?;
                *x
            }
            (Op::Binary(op), [x, by]) if op.kind == BinaryKind::Add => {
                offset += scale * constant(graph, *by)?;
                *x
            }
            (Op::Reshape(_), [x]) => {
                let proper = |shape: &[u64]| shape.iter().copied().filter(|size| *size != 1).collect::<Vec<_>>();
                if proper(&graph.ty(*x).shape) != proper(&graph.ty(value).shape) {
                    return None;
                }
                *x
            }
            (Op::Reduce(op), [x]) if op.kind == ReduceOp::Sum => {
                let ty = graph.ty(*x);
                let count = *ty.shape.last()? as f64;
                let rows = op.dims == [ty.rank() - 1] && (scale * count - 1.0).abs() < 1e-6;
                return rows.then_some((*x, offset));
            }
            _ => return None,
        };
    }
}

/// Which values have the type of a candidate, and which that of one of its rows.
struct Fits<'a> {
    graph: &'a Graph,
    whole: &'a TensorType,
    row: TensorType,
}

impl<'a> Fits<'a> {
    fn new(graph: &'a Graph, candidate: NodeId) -> Self {
        let whole = graph.ty(graph.result(candidate));
        let row = whole.with_shape(whole.shape.last().copied().into_iter().collect::<Vec<_>>());
        Self { graph, whole, row }
    }

    fn whole(&self, value: ValueId) -> bool {
        self.graph.ty(value) == self.whole
    }

    fn vector(&self, value: ValueId) -> bool {
        *self.graph.ty(value) == self.row
    }
}

/// The composite in the candidate's class, if there is one.
fn saturate(graph: &Graph, id: NodeId, region: Region<'_>, root: Id, rules: &[Rewrite<Term, ()>]) -> Option<Found> {
    let Region { term, values, .. } = region;
    let mut runner: Runner<Term, ()> = Runner::default().with_node_limit(4000).with_iter_limit(10);
    // The places of the term's nodes in the graph of classes.
    let mut places: Vec<Id> = Vec::new();
    for node in term.as_ref() {
        let node = node.clone().map_children(|child| places[usize::from(child)]);
        places.push(runner.egraph.add(node));
    }
    let top = places[usize::from(root)];
    let mut runner = runner.with_hook(move |runner| {
        let done = runner.egraph[top]
            .nodes
            .iter()
            .any(|node| matches!(node, Term::RmsNorm(_) | Term::LayerNorm(_) | Term::Swiglu(_)));
        if done { Err("found".to_string()) } else { Ok(()) }
    });
    runner = runner.run(rules);
    let egraph = &runner.egraph;
    let of_class = |class: Id, wanted: &dyn Fn(ValueId) -> bool| {
        let class = egraph.find(class);
        let mut here = values.iter().filter(|(place, _)| egraph.find(places[usize::from(*place)]) == class);
        here.find(|(_, value)| wanted(*value)).map(|(_, value)| *value)
    };
    let number = |class: Id| {
        egraph[class].nodes.iter().find_map(|node| match node {
            Term::Leaf(name) if name.as_str() == "n0" => Some(0.0),
            Term::Leaf(name) => Some(f64::from_bits(name.as_str().strip_prefix('n')?.parse().ok()?)),
            _ => None,
        })
    };
    let fits = Fits::new(graph, id);
    let (whole, vector) = (|value: ValueId| fits.whole(value), |value: ValueId| fits.vector(value));
    for node in &egraph[top].nodes {
        let made = match node {
            Term::RmsNorm([x, g, e]) => of_class(*x, &whole)
                .zip(of_class(*g, &vector))
                .zip(number(*e))
                .map(|((x, gamma), eps)| ("rms_norm", Composite::RmsNorm { x, gamma, eps })),
            Term::LayerNorm([x, g, b, e]) => {
                let operands = of_class(*x, &whole).zip(of_class(*g, &vector)).zip(of_class(*b, &vector));
                operands
                    .zip(number(*e))
                    .map(|(((x, gamma), beta), eps)| ("layer_norm", Composite::LayerNorm { x, gamma, beta, eps }))
            }
            Term::Swiglu([a, b]) => of_class(*a, &whole)
                .zip(of_class(*b, &whole))
                .map(|(gate, up)| ("swiglu", Composite::Swiglu { gate, up })),
            _ => None,
        };
        if let Some((rule, composite)) = made {
            return Some(Found { rule, composite, explanation: explain(&term, root, node, &runner, rules) });
        }
    }
    None
}

/// The proof that the candidate is the composite: the term after each step, in egg's notation. The
/// run is repeated with proofs switched on, which cost too much to keep for candidates that fail.
fn explain(
    term: &RecExpr<Term>,
    root: Id,
    composite: &Term,
    found: &Runner<Term, ()>,
    rules: &[Rewrite<Term, ()>],
) -> Vec<String> {
    let start = term[root].build_recexpr(|id| term[id].clone());
    let extractor = egg::Extractor::new(&found.egraph, egg::AstSize);
    let goal = composite.join_recexprs(|class| extractor.find_best(class).1);
    let mut runner =
        Runner::<Term, ()>::default().with_explanations_enabled().with_node_limit(4000).with_iter_limit(10);
    runner = runner.with_expr(&start).run(rules);
    if runner.egraph.lookup_expr(&goal).map(|id| runner.egraph.find(id)) != Some(runner.egraph.find(runner.roots[0])) {
        return Vec::new();
    }
    runner.explain_equivalence(&start, &goal).get_flat_strings()
}

/// The products and sums between a composite and what it reads: candidates no more.
fn covered_by(graph: &Graph, id: NodeId, composite: &Composite) -> Vec<NodeId> {
    let read = match composite {
        Composite::RmsNorm { x, gamma, .. } => vec![*x, *gamma],
        Composite::LayerNorm { x, gamma, beta, .. } => vec![*x, *gamma, *beta],
        Composite::Swiglu { gate, up } => vec![*gate, *up],
        Composite::Rotary { .. } | Composite::Attention { .. } => Vec::new(),
    };
    let (mut covered, mut open) = (vec![id], vec![id]);
    while let Some(node) = open.pop() {
        for operand in graph.node(node).operands.iter().filter(|operand| !read.contains(operand)) {
            let def = graph.value(*operand).def;
            if !covered.contains(&def) {
                covered.push(def);
                open.push(def);
            }
        }
    }
    covered
}
