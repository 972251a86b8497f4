//! What becomes of the statistics of a norm that a model writes down itself.

use super::*;
use crate::differentiate::differentiate;
use crate::optimizer::{OptimizerConfig, add_optimizer};
use shardc_ir::Role;
use shardc_ir::ops::BinaryKind;

/// A norm over samples as a model writes it down, and what it is the norm of.
pub(crate) const NORM: &str = r#"graph @norm {
  %x: f32[32,8] = input "x"
  %w: f32[8,4] = parameter "w"
  %gamma: f32[4] = parameter "gamma"
  %beta: f32[4] = parameter "beta"
  %h: f32[32,4] = matmul %x, %w {spec="mk,kn->mn"}
  %s: f32[4] = reduce_sum %h {dims=[0]}
  %m: f32[4] = affine %s {offset=0, scale=0.03125}
  %mb: f32[32,4] = broadcast %m {dims=[1]}
  %c: f32[32,4] = sub %h, %mb
  %q: f32[32,4] = mul %c, %c
  %v: f32[4] = reduce_sum %q {dims=[0]}
  %e: f32[4] = affine %v {offset=0.00001, scale=0.03125}
  %r: f32[4] = rsqrt %e
  %g: f32[4] = mul %r, %gamma
  %gb: f32[32,4] = broadcast %g {dims=[1]}
  %n: f32[32,4] = mul %c, %gb
  %bb: f32[32,4] = broadcast %beta {dims=[1]}
  %y: f32[32,4] = add %n, %bb
  %a: f32[32,4] = gelu %y
  %l: f32[] = reduce_sum %a {dims=[0,1]}
  return loss %l
}"#;

pub(crate) fn step(text: &str) -> Graph {
    let graph: Graph = text.parse().expect("a graph");
    add_optimizer(differentiate(&graph, "loss").expect("gradients"), &OptimizerConfig::default()).expect("a step")
}

fn names(graph: &Graph, wanted: impl Fn(Role) -> bool) -> Vec<String> {
    let rows = |value: &ValueId| graph.ty(*value).shape == [32, 4];
    let sums = graph.nodes().filter(|(_, node)| wanted(node.role) && node.operands.iter().any(rows));
    sums.map(|(_, node)| node.op.name().to_string()).collect()
}

fn count(names: &[String], name: &str) -> usize {
    names.iter().filter(|other| *other == name).count()
}

#[test]
fn the_derivative_of_a_mean_is_told_by_that_of_the_bias() {
    let before = step(NORM);
    let after = share_statistics(&before).expect("a graph");
    let backward = |role| matches!(role, Role::Backward(_));
    assert_eq!(count(&names(&before, backward), "reduce_sum"), 3);
    // Those of the bias and of the weight.
    assert_eq!(count(&names(&after, backward), "reduce_sum"), 2);
    assert_eq!(after.outputs.len(), before.outputs.len());
}

#[test]
fn differences_are_made_by_all_that_read_them() {
    let after = share_statistics(&step(NORM)).expect("a graph");
    let users = after.users();
    let is_difference = |op: &Op| matches!(op, Op::Binary(op) if op.kind == BinaryKind::Sub);
    let large = after.nodes().filter(|(_, node)| is_difference(&node.op) && after.ty(node.results[0]).rank() == 2);
    let large: Vec<_> = large.collect();
    // For the variance, for what is normalized, for the derivative of the weight and for that of the variance.
    assert_eq!(large.len(), 4);
    for (id, node) in large {
        let readers: Vec<_> = users[&node.results[0]].iter().map(|user| user.0).collect();
        assert!(readers.iter().all(|reader| *reader == readers[0]), "{id} is read by {readers:?}");
        let is_behind = matches!(node.role, Role::Backward(_));
        assert_eq!(is_behind, matches!(after.node(readers[0]).role, Role::Backward(_)));
    }
}

#[test]
fn differences_from_what_is_no_statistic_are_made_once() {
    let other = NORM.replace("%s: f32[4] = reduce_sum %h {dims=[0]}", "%s: f32[4] = affine %gamma {offset=1, scale=1}");
    let (before, after) = (step(&other), share_statistics(&step(&other)).expect("a graph"));
    let differences = |graph: &Graph| count(&names(graph, |_| true), "sub");
    assert_eq!(differences(&after), differences(&before));
}

#[test]
fn a_sum_that_nothing_tells_stays() {
    // What is scaled before it is taken off the mean is not what the bias's gradient is the sum of.
    let other = NORM.replace("%bb: f32[32,4] = broadcast %beta {dims=[1]}", "%bb: f32[32,4] = mul %h, %h");
    let graph = step(&other.replace("  %beta: f32[4] = parameter \"beta\"\n", ""));
    let sums = |graph: &Graph| count(&names(graph, |role| matches!(role, Role::Backward(_))), "reduce_sum");
    assert_eq!(sums(&share_statistics(&graph).expect("a graph")), sums(&graph));
}
