//! Reverse-mode differentiation of a graph.
//!
//! The loss is first peeled: `loss = numerator * scale`, where `scale` holds every division by a
//! scalar that no parameter reaches (the number of tokens, say) and every constant factor on the
//! way. The numerator, a plain sum over the batch, is differentiated with the cotangent 1, and the
//! scale is left to the end. So the gradients of microbatches may be added up, and the result is
//! exact even where each holds another number of tokens.
//!
//! Invariants: every node added has the role `Backward` of the forward node it came from; only
//! cotangents that a trained parameter needs are made; the order of the nodes is a function of the
//! graph alone. A parameter's gradient is in f32 wherever its uses were in 16 bits.
//!
//! In fp16 the smallest cotangents would be lost. There the numerator's cotangent is not 1 but a number
//! that the run adapts, [`LOSS_SCALE`], and the scale that is left to the end is divided by it
//! (Micikevicius et al., "Mixed precision training", 2018, section 3.2).

use crate::error::{PassError, UserError};
use crate::fold::leaf_name;
use shardc_ir::ops::{
    Affine, Binary, BinaryKind, Cast, Constant, Gradient, GradientError, Input, ReduceOp, Reshape, UnaryKind,
};
use shardc_ir::{DType, EntityRef, Graph, NodeId, Op, OpDef, Role, TensorType, ValueId};

/// The name of the input by which the loss is scaled while it is differentiated, an f32 scalar.
pub const LOSS_SCALE: &str = "loss_scale";

/// A graph with the gradients of its loss.
#[derive(Clone, Debug, PartialEq)]
pub struct Differentiated {
    /// The graph, with the backward nodes behind the forward nodes.
    pub graph: Graph,
    /// Per trained parameter that the loss depends on, in the order of the leaves: the leaf, and
    /// the gradient of the loss's numerator.
    pub gradients: Vec<(ValueId, ValueId)>,
    /// The f32 scalar by which a gradient must be multiplied to be that of the loss.
    pub scale: ValueId,
    /// The loss.
    pub loss: ValueId,
}

/// Adds the gradients of the output `loss` with respect to every parameter that is not frozen.
///
/// # Errors
/// If there is no such output, it is not a floating-point scalar, or it reaches a trained parameter
/// only through operations without a derivative (all of them are named); if an input of the model is named
/// [`LOSS_SCALE`], whatever the precision, since a run knows by that name alone that its loss is scaled.
pub fn differentiate(graph: &Graph, loss: &str) -> Result<Differentiated, PassError> {
    from_seed(graph, loss, false)
}

/// As [`differentiate`], with every cotangent multiplied by the input [`LOSS_SCALE`] and
/// [`Differentiated::scale`] divided by it. The input is the factor of the loss itself: what the
/// numerator sums over is divided out of its cotangent, to the next power of two.
///
/// # Errors
/// As [`differentiate`].
pub fn differentiate_scaled(graph: &Graph, loss: &str) -> Result<Differentiated, PassError> {
    from_seed(graph, loss, true)
}

fn from_seed(graph: &Graph, loss: &str, is_scaled: bool) -> Result<Differentiated, PassError> {
    // A run gives an input of this name the scale in any precision.
    let is_given = |op: &Op| is_scaled || matches!(op, Op::Input(_));
    if graph.leaves().any(|(_, node)| leaf_name(&node.op) == LOSS_SCALE && is_given(&node.op)) {
        return Err(UserError::ReservedName { name: LOSS_SCALE.into() }.into());
    }
    let Some(output) = graph.find_output(loss) else {
        let known = graph.outputs.iter().map(|output| output.name.clone()).collect();
        return Err(UserError::NoOutput { name: loss.to_string(), known }.into());
    };
    let (loss, ty) = (output.value, graph.ty(output.value));
    if ty.elements() != 1 || !ty.dtype.is_float() {
        return Err(UserError::LossNotScalar { ty: ty.to_string() }.into());
    }
    let needed = reached_by_parameters(graph);
    let leaves: Vec<_> = graph.leaves().map(|(leaf, _)| leaf).filter(|leaf| needed[leaf.index()]).collect();
    let mut graph = graph.clone();
    let peeled = peel(&graph, &needed, loss);
    let mut scale = add_scale(&mut graph, loss, &peeled)?;
    let mut seed = None;
    if is_scaled {
        let of = graph.value(loss).def;
        let factor = add(&mut graph, of, Input { name: LOSS_SCALE.into() }, &[], &[TensorType::scalar(DType::F32)])?;
        let terms = Some(summed_elements(&graph, &needed, peeled.numerator)).filter(|terms| terms.is_finite());
        let terms = terms.unwrap_or(1.0).max(1.0).log2().ceil().exp2();
        let factor = add(&mut graph, of, Affine { scale: 1.0 / terms, offset: 0.0 }, &[factor], &[])?;
        scale = add(&mut graph, of, Binary { kind: BinaryKind::Div }, &[scale, factor], &[])?;
        seed = Some(factor);
    }
    let cotangents = propagate(&mut graph, &needed, peeled.numerator, seed)?;
    let mut gradients = Vec::new();
    for leaf in leaves {
        if let Some(gradient) = cotangents[leaf.index()] {
            gradients.push((leaf, gradient));
        }
    }
    Ok(Differentiated { graph, gradients, scale, loss })
}

/// Per value, whether it is a float that a trained parameter reaches.
pub(crate) fn reached_by_parameters(graph: &Graph) -> Vec<bool> {
    let mut reached = vec![false; graph.value_count()];
    for (_, node) in graph.nodes() {
        let trained = matches!(&node.op, Op::Parameter(parameter) if !parameter.frozen);
        let any = trained || node.operands.iter().any(|operand| reached[operand.index()]);
        for result in &node.results {
            reached[result.index()] = any && graph.ty(*result).dtype.is_float();
        }
    }
    reached
}

/// The loss as `numerator * constant * product of factors / product of divisors`, up to a summand
/// that no parameter reaches.
struct Peeled {
    numerator: ValueId,
    constant: f64,
    factors: Vec<(BinaryKind, ValueId)>,
}

fn peel(graph: &Graph, needed: &[bool], loss: ValueId) -> Peeled {
    let mut peeled = Peeled { numerator: loss, constant: 1.0, factors: Vec::new() };
    loop {
        let node = graph.def(peeled.numerator);
        let free = |value: ValueId| !needed[value.index()] && graph.ty(value).elements() == 1;
        let single = |value: ValueId| graph.ty(value).elements() == 1;
        peeled.numerator = match (&node.op, node.operands.as_slice()) {
            (Op::Affine(affine), [x]) => {
                peeled.constant *= affine.scale;
                *x
            }
            (Op::Unary(unary), [x]) if unary.kind == UnaryKind::Neg => {
                peeled.constant = -peeled.constant;
                *x
            }
            (Op::Reshape(_), [x]) => *x,
            (Op::Cast(_), [x]) if graph.ty(*x).dtype.is_float() => *x,
            (Op::Broadcast(_), [x]) if single(*x) => *x,
            (Op::Binary(binary), [a, b]) if binary.kind == BinaryKind::Div && free(*b) && single(*a) => {
                peeled.factors.push((BinaryKind::Div, *b));
                *a
            }
            (Op::Binary(binary), [a, b]) if binary.kind == BinaryKind::Mul && (free(*a) || free(*b)) => {
                let (free, other) = if free(*b) { (*b, *a) } else { (*a, *b) };
                if !single(other) {
                    return peeled;
                }
                peeled.factors.push((BinaryKind::Mul, free));
                other
            }
            _ => return peeled,
        };
    }
}

/// How many times the cotangent of a number is what the elements that it sums should have: how many they are, times what
/// scales them on the way, which the chain rule multiplies by once more. Of a sum of terms the least, so that none of their
/// gradients vanishes; 1 where anything else is between.
fn summed_elements(graph: &Graph, needed: &[bool], number: ValueId) -> f64 {
    let (node, elements) = (graph.def(number), graph.ty(number).elements());
    if elements != 1 {
        return elements as f64;
    }
    let of = |operand: &ValueId| summed_elements(graph, needed, *operand);
    match (&node.op, &node.operands[..]) {
        (Op::Affine(affine), [x]) => affine.scale.abs() * of(x),
        (Op::Unary(unary), [x]) if unary.kind == UnaryKind::Neg => of(x),
        (Op::Reduce(reduce), [x]) if reduce.kind == ReduceOp::Sum => of(x),
        (Op::Reshape(_) | Op::Cast(_) | Op::Broadcast(_) | Op::SumSquares(_), [x]) => of(x),
        (Op::Binary(binary), terms) if matches!(binary.kind, BinaryKind::Add | BinaryKind::Sub) => {
            terms.iter().filter(|term| needed[term.index()]).map(of).fold(f64::INFINITY, f64::min)
        }
        _ => 1.0,
    }
}

/// Adds the scale's nodes: an f32 scalar.
fn add_scale(graph: &mut Graph, loss: ValueId, peeled: &Peeled) -> Result<ValueId, PassError> {
    let mut constant = peeled.constant;
    let mut factors = Vec::new();
    for (kind, factor) in &peeled.factors {
        match (&graph.def(*factor).op, kind) {
            (Op::Constant(number), BinaryKind::Div) => constant /= number.value,
            (Op::Constant(number), _) => constant *= number.value,
            _ => factors.push((*kind, *factor)),
        }
    }
    let of = graph.value(loss).def;
    let scalar = TensorType::scalar(DType::F32);
    let mut scale = add(graph, of, Constant { value: constant }, &[], std::slice::from_ref(&scalar))?;
    for (kind, mut factor) in factors {
        let ty = graph.ty(factor).clone();
        if ty.dtype != DType::F32 {
            factor = add(graph, of, Cast {}, &[factor], &[ty.with_dtype(DType::F32)])?;
        }
        if ty.rank() > 0 {
            factor = add(graph, of, Reshape {}, &[factor], std::slice::from_ref(&scalar))?;
        }
        scale = add(graph, of, Binary { kind }, &[scale, factor], &[])?;
    }
    Ok(scale)
}

/// An f32 scalar as a value of one element.
fn like(graph: &mut Graph, of: NodeId, mut scalar: ValueId, ty: &TensorType) -> Result<ValueId, PassError> {
    if ty.dtype != DType::F32 {
        scalar = add(graph, of, Cast {}, &[scalar], &[ty.with_shape([])])?;
    }
    if ty.rank() > 0 {
        scalar = add(graph, of, Reshape {}, &[scalar], std::slice::from_ref(ty))?;
    }
    Ok(scalar)
}

/// Adds a node that came from the forward node `of`; gives its first result.
fn add(
    graph: &mut Graph,
    of: NodeId,
    op: impl Into<Op>,
    operands: &[ValueId],
    declared: &[TensorType],
) -> Result<ValueId, PassError> {
    let path = graph.node(of).path.clone();
    let node = graph.add_as(op.into(), operands, declared, path, Role::Backward(of));
    node.map(|node| graph.result(node)).map_err(PassError::ill_formed("differentiate"))
}

/// The cotangent of every forward value that a trained parameter reaches and the numerator depends
/// on, going backwards over the forward nodes. That of the numerator is the f32 scalar `seed`, or 1.
fn propagate(
    graph: &mut Graph,
    needed: &[bool],
    numerator: ValueId,
    seed: Option<ValueId>,
) -> Result<Vec<Option<ValueId>>, PassError> {
    let mut cotangents: Vec<Option<ValueId>> = vec![None; needed.len()];
    let mut failed = Vec::new();
    if needed[numerator.index()] {
        let (of, ty) = (graph.value(numerator).def, graph.ty(numerator).clone());
        cotangents[numerator.index()] = Some(match seed {
            None => add(graph, of, Constant { value: 1.0 }, &[], &[ty])?,
            Some(seed) => like(graph, of, seed, &ty)?,
        });
    }
    for id in (0..=graph.value(numerator).def.index()).rev().map(NodeId::new) {
        let node = graph.node(id);
        let of_results: Vec<_> = node.results.iter().map(|result| cotangents[result.index()]).collect();
        let of_operands: Vec<bool> = node.operands.iter().map(|operand| needed[operand.index()]).collect();
        if !of_results.iter().any(Option::is_some) || !of_operands.contains(&true) {
            continue;
        }
        let (op, operands, results) = (node.op.clone(), node.operands.clone(), node.results.clone());
        let made = vec![None; operands.len()];
        let mut gradient =
            Gradient { graph, node: id, operands, results, cotangents: of_results, needed: of_operands, made };
        match op.gradient(&mut gradient) {
            Ok(()) => {}
            Err(error @ GradientError::NotDifferentiable { .. }) => {
                failed.push(error);
                continue;
            }
            Err(GradientError::IllFormed { node, source }) => {
                let message = format!("the derivative of {node} is ill-formed: {source}");
                return Err(PassError::Bug { pass: "differentiate", message });
            }
        }
        let Gradient { operands, made, .. } = gradient;
        for (operand, part) in operands.into_iter().zip(made) {
            if let Some(part) = part.filter(|_| needed[operand.index()]) {
                let known = cotangents[operand.index()];
                let sum = known.map_or(Ok(part), |known| accumulate(graph, id, known, part))?;
                cotangents[operand.index()] = Some(sum);
            }
        }
    }
    if failed.is_empty() {
        return Ok(cotangents);
    }
    failed.reverse();
    Err(UserError::NotDifferentiable { nodes: failed }.into())
}

/// The sum of two cotangents of one value, in the wider of their element types.
fn accumulate(graph: &mut Graph, of: NodeId, a: ValueId, b: ValueId) -> Result<ValueId, PassError> {
    let (from, to) = (graph.ty(a).clone(), graph.ty(b).clone());
    let dtype = if from.dtype.size() >= to.dtype.size() { from.dtype } else { to.dtype };
    let mut parts = [a, b];
    for part in &mut parts {
        if graph.ty(*part).dtype != dtype {
            *part = add(graph, of, Cast {}, &[*part], &[from.with_dtype(dtype)])?;
        }
    }
    add(graph, of, Binary { kind: BinaryKind::Add }, &parts, &[])
}
