//! The shape of derivatives: what is peeled, which gradients are made, what is refused.

use crate::differentiate::{LOSS_SCALE, differentiate, differentiate_scaled};
use crate::optimizer::{GRAD_NORM, LEARNING_RATE, OptimizerConfig, STEP, add_optimizer};
use crate::{PassError, UserError};
use shardc_ir::ops::{
    Binary, BinaryKind, Cast, Input, Matmul, Parameter, Reduce, ReduceOp, Softmax, SumSquares, Unary, UnaryKind,
};
use shardc_ir::{DType, Graph, Op, OutputKind, Role, TensorType, ValueId};

fn add(graph: &mut Graph, op: impl Into<Op>, operands: &[ValueId], declared: &[TensorType]) -> ValueId {
    let node = graph.add(op, operands, declared).unwrap();
    graph.result(node)
}

fn parameter(graph: &mut Graph, name: &str, frozen: bool, shape: &[u64]) -> ValueId {
    add(graph, Parameter { name: name.into(), frozen }, &[], &[TensorType::new(DType::F32, shape)])
}

/// `sum(x w) / count`, with a bf16 matmul, beside a frozen and an unused parameter.
fn linear() -> Graph {
    let mut graph = Graph::new("linear");
    let x = add(&mut graph, Input { name: "x".into() }, &[], &[TensorType::new(DType::Bf16, [4, 8])]);
    let count = add(&mut graph, Input { name: "count".into() }, &[], &[TensorType::scalar(DType::F32)]);
    let w = parameter(&mut graph, "w", false, &[8, 2]);
    parameter(&mut graph, "unused", false, &[3]);
    let frozen = parameter(&mut graph, "frozen", true, &[4, 2]);
    let w = add(&mut graph, Cast {}, &[w], &[TensorType::new(DType::Bf16, [8, 2])]);
    let y = add(&mut graph, Matmul::plain(), &[x, w], &[TensorType::new(DType::F32, [4, 2])]);
    let y = add(&mut graph, Binary { kind: BinaryKind::Mul }, &[y, frozen], &[]);
    let sum = add(&mut graph, Reduce { kind: ReduceOp::Sum, dims: vec![0, 1] }, &[y], &[]);
    let loss = add(&mut graph, Binary { kind: BinaryKind::Div }, &[sum, count], &[]);
    graph.output("loss", loss, OutputKind::Result);
    graph
}

#[test]
fn the_denominator_is_left_to_the_end() {
    let differentiated = differentiate(&linear(), "loss").unwrap();
    let graph = &differentiated.graph;
    let divided = graph.nodes().filter(|(_, node)| matches!(&node.op, Op::Binary(op) if op.kind == BinaryKind::Div));
    let divided: Vec<_> = divided.map(|(_, node)| node.results[0]).collect();
    assert_eq!(divided, [differentiated.loss, differentiated.scale]);
    assert_eq!(*graph.ty(differentiated.scale), TensorType::scalar(DType::F32));
}

#[test]
fn a_weight_used_in_bf16_has_its_gradient_in_f32_straight_from_the_matmul() {
    let differentiated = differentiate(&linear(), "loss").unwrap();
    let [(leaf, gradient)] = differentiated.gradients.as_slice() else { panic!("{:?}", differentiated.gradients) };
    let graph = &differentiated.graph;
    assert!(matches!(&graph.def(*leaf).op, Op::Parameter(parameter) if parameter.name == "w"));
    assert!(matches!(&graph.def(*gradient).op, Op::Matmul(matmul) if matmul.spec == "mk,mn->kn"));
    assert_eq!(*graph.ty(*gradient), TensorType::new(DType::F32, [8, 2]));
}

#[test]
fn every_added_node_knows_the_forward_node_it_came_from() {
    let forward = linear();
    let graph = differentiate(&forward, "loss").unwrap().graph;
    for (_, node) in graph.nodes().skip(forward.node_count()) {
        assert!(matches!(node.role, Role::Backward(of) if (of.as_u32() as usize) < forward.node_count()));
    }
}

#[test]
fn the_optimizer_updates_the_parameter_and_its_moments() {
    let graph = add_optimizer(differentiate(&linear(), "loss").unwrap(), &OptimizerConfig::default()).unwrap();
    let names: Vec<_> = graph.outputs.iter().map(|output| output.name.as_str()).collect();
    assert_eq!(names, ["loss", "grad_norm", "w", "w.m", "w.v"]);
    for output in &graph.outputs[2..] {
        let OutputKind::Update(leaf) = output.kind else { panic!("{output:?}") };
        assert_eq!(graph.ty(leaf), graph.ty(output.value));
    }
    // x, count, three parameters, the learning rate, the step and two moments
    assert_eq!(graph.leaves().count(), 9);
}

#[test]
fn every_operation_without_a_derivative_is_named() {
    let mut graph = Graph::new("bad");
    let w = parameter(&mut graph, "w", false, &[4]);
    let squares = add(&mut graph, SumSquares {}, &[w], &[]);
    let bad = differentiate(&graph, "loss").unwrap_err();
    assert!(matches!(bad, PassError::User(UserError::NoOutput { .. })));
    let soft = add(&mut graph, Softmax {}, &[w], &[]);
    let first = add(&mut graph, shardc_ir::ops::UnaryGrad { kind: UnaryKind::Exp }, &[soft, w], &[]);
    let second = add(&mut graph, shardc_ir::ops::UnaryGrad { kind: UnaryKind::Log }, &[soft, w], &[]);
    let both = add(&mut graph, Binary { kind: BinaryKind::Add }, &[first, second], &[]);
    let sum = add(&mut graph, Reduce { kind: ReduceOp::Sum, dims: vec![0] }, &[both], &[]);
    let loss = add(&mut graph, Binary { kind: BinaryKind::Mul }, &[sum, squares], &[]);
    graph.output("loss", loss, OutputKind::Result);
    match differentiate(&graph, "loss").unwrap_err() {
        PassError::User(UserError::NotDifferentiable { nodes }) => assert_eq!(nodes.len(), 2),
        other => panic!("{other}"),
    }
}

/// A run would give it the loss's scale, in any precision.
#[test]
fn no_input_of_a_model_has_the_name_of_the_scale() {
    let mut graph = linear();
    let scalar = TensorType::scalar(DType::F32);
    add(&mut graph, Input { name: LOSS_SCALE.into() }, &[], &[scalar]);
    for differentiate in [differentiate, differentiate_scaled] {
        let refused = differentiate(&graph, "loss").unwrap_err();
        assert!(matches!(refused, PassError::User(UserError::ReservedName { name }) if name == LOSS_SCALE));
    }
}

#[test]
fn a_parameter_has_the_name_of_the_scale_where_there_is_none() {
    let mut graph = linear();
    parameter(&mut graph, LOSS_SCALE, true, &[1]);
    let refused = differentiate_scaled(&graph, "loss").unwrap_err();
    assert!(matches!(refused, PassError::User(UserError::ReservedName { name }) if name == LOSS_SCALE));
    assert!(differentiate(&graph, "loss").is_ok());
}

/// What the optimizer adds has names of its own: of inputs, moments, updates and the norm.
#[test]
fn nothing_of_a_model_has_a_name_that_the_optimizer_gives() {
    let refused = |graph: &Graph, name: &str| {
        let made = add_optimizer(differentiate(graph, "loss").unwrap(), &OptimizerConfig::default());
        let is_refused =
            matches!(&made, Err(PassError::User(UserError::ReservedName { name: taken })) if taken == name);
        assert!(is_refused, "{name}: {made:?}");
    };
    let scalar = TensorType::scalar(DType::F32);
    for name in [LEARNING_RATE, "w.m", "w.v"] {
        let mut graph = linear();
        add(&mut graph, Input { name: name.into() }, &[], std::slice::from_ref(&scalar));
        refused(&graph, name);
    }
    for name in [GRAD_NORM, "w", "w.m"] {
        let mut graph = linear();
        let loss = graph.find_output("loss").unwrap().value;
        graph.output(name, loss, OutputKind::Result);
        refused(&graph, name);
    }
    for name in [LEARNING_RATE, STEP] {
        let mut graph = linear();
        parameter(&mut graph, name, true, &[1]);
        refused(&graph, name);
    }
}

/// Every elementwise function either has a derivative or is a step, or is to have none.
#[test]
fn every_unary_function_of_floats_is_differentiated() {
    for kind in UnaryKind::ALL.iter().copied().filter(|kind| *kind != UnaryKind::Not) {
        let mut graph = Graph::new(kind.name());
        let w = parameter(&mut graph, "w", false, &[4]);
        let y = add(&mut graph, Unary { kind }, &[w], &[]);
        let loss = add(&mut graph, Reduce { kind: ReduceOp::Sum, dims: vec![0] }, &[y], &[]);
        graph.output("loss", loss, OutputKind::Result);
        let made = differentiate(&graph, "loss").unwrap().gradients.len();
        use UnaryKind::{Ceil, Detach, Floor, Round, Sign};
        let is_still = matches!(kind, Sign | Floor | Ceil | Round | Detach);
        assert_eq!(made, usize::from(!is_still), "{}", kind.name());
    }
}
