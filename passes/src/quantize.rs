//! Makes the products of linear layers products of 8-bit floats. Runs for fp8 alone.
//!
//! A linear layer is a product of an activation with leading dimensions and a matrix that is made of one parameter. It
//! and the two products of its derivative read three tensors, each of which is quantised once: activation and weight in
//! e4m3, the cotangent in e5m2, whose range is larger (Micikevicius et al., "FP8 formats for deep learning", 2022,
//! section 3.1). A weight has one scale, an activation or cotangent one per sample; scales are values of the graph like
//! any other.
//!
//! * Quantising writes a tensor twice, as it is and with its last two dimensions exchanged, since matrix units for
//!   8-bit floats want the summed index innermost in both operands ([`Quantize`]). Each pass reads the arrangement that
//!   it needs.
//! * A side of a matrix is two factors: groups of [`SIDE`] indices, and the index in a group, which no axis divides. So
//!   every part that a plan makes is one that matrix units take.
//! * Products whose sizes are no multiples of [`SIDE`] stay as they are, and so does the one that makes the logits:
//!   matrix units take no others, and a rounded logit costs most.
//! * What the products read and make stays in the type it has; norms, attention and the residual stream do not know of
//!   it. Gradients of weights are summed, and kept, in f32.
//! * With ZeRO a rank quantises its own parts of the weights first (`lower/order.rs`), and the codes are gathered.
//! * The pass runs on the whole step, so that a backward product shares the quantised tensors of the forward one.

use crate::error::PassError;
use crate::error::UserError;
use crate::shard::prepare::parameter_values;
use shardc_ir::float8::SIDE;
use shardc_ir::ops::{Matmul, OpError, QuantizationScale, Quantize, ScaledMatmul};
use shardc_ir::{DType, Graph, Node, NodeId, Op, Role, TensorType, ValueId};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// The training step with its linear layers in 8-bit floats.
///
/// # Errors
/// A step that has no product of 8-bit floats.
pub fn quantize(graph: &Graph) -> Result<Graph, PassError> {
    let products = products(graph);
    if products.is_empty() {
        return Err(UserError::NothingIn8Bits { side: SIDE }.into());
    }
    let mut quantized = HashMap::new();
    let made = graph.rebuild(|to, id, map| {
        let Some(product) = products.get(&id) else { return Ok(false) };
        let node = graph.node(id);
        let operands = [0, 1].map(|index| one(graph, to, map, &mut quantized, node, &product.operands[index]));
        let [a, b] = operands;
        let (a, b) = (a?, b?);
        let op = ScaledMatmul { spec: product.spec.clone() };
        let result = graph.ty(node.results[0]).clone();
        let added = to.add_as(op.into(), &[a.0, b.0, a.1, b.1], &[result], node.path.clone(), node.role)?;
        map.insert(node.results[0], to.result(added));
        Ok(true)
    });
    made.map_err(PassError::ill_formed("quantize"))
}

/// An operand of a product in 8-bit floats.
struct Operand {
    value: ValueId,
    to: DType,
    lead: usize,
    /// Whether the summed index is not the last but the one before.
    is_exchanged: bool,
    role: Role,
}

/// A product as it becomes.
struct Product {
    operands: [Operand; 2],
    spec: String,
}

/// A quantised value: its scale, and its two arrangements.
type Quantized = HashMap<(ValueId, DType), [ValueId; 3]>;

/// The operand of a product and its scale in the new graph, made where they are first needed.
fn one(
    from: &Graph,
    to: &mut Graph,
    map: &HashMap<ValueId, ValueId>,
    quantized: &mut Quantized,
    node: &Node,
    operand: &Operand,
) -> Result<(ValueId, ValueId), OpError> {
    let key = (operand.value, operand.to);
    let [scale, whole, exchanged] = match quantized.get(&key) {
        Some(known) => *known,
        None => {
            let (value, ty) = (map[&operand.value], from.ty(operand.value));
            let of = QuantizationScale { to: operand.to, lead: operand.lead };
            let scale = to.add_as(of.into(), &[value], &[], node.path.clone(), operand.role)?;
            let scale = to.result(scale);
            let mut swapped = ty.shape.clone();
            swapped.swap(ty.rank() - 2, ty.rank() - 1);
            let types = [ty.with_dtype(operand.to), TensorType::new(operand.to, swapped)];
            let made = to.add_as(Quantize {}.into(), &[value, scale], &types, node.path.clone(), operand.role)?;
            let results = &to.node(made).results;
            let made = [scale, results[0], results[1]];
            quantized.insert(key, made);
            made
        }
    };
    Ok((if operand.is_exchanged { exchanged } else { whole }, scale))
}

/// The products that become 8-bit, forward and backward.
fn products(graph: &Graph) -> BTreeMap<NodeId, Product> {
    let (weights, heads) = (parameter_values(graph), heads(graph));
    let mut found = BTreeMap::new();
    // Per linear layer, its activation and its weight.
    let mut layers: BTreeMap<NodeId, [ValueId; 2]> = BTreeMap::new();
    for (id, node) in graph.nodes() {
        let Op::Matmul(matmul) = &node.op else { continue };
        let [a, b] = node.operands[..] else { continue };
        let forward = match node.role {
            Role::Forward if is_linear(graph, [a, b], &weights) && !heads.contains(&id) => id,
            Role::Backward(of) if layers.contains_key(&of) => of,
            _ => continue,
        };
        let [x, w] = *layers.entry(forward).or_insert([a, b]);
        let operand = |value: ValueId| {
            let is_cotangent = value != x && value != w;
            let (to, role) = if is_cotangent { (DType::F8e5m2, node.role) } else { (DType::F8e4m3, Role::Forward) };
            let lead = if value == w { 0 } else { graph.ty(value).rank().saturating_sub(2) };
            Operand { value, to, lead, is_exchanged: false, role }
        };
        match product(graph, matmul, [operand(a), operand(b)]) {
            Some(product) => drop(found.insert(id, product)),
            None if forward == id => drop(layers.remove(&id)),
            None => {}
        }
    }
    found
}

/// Whether a product is that of an activation with leading dimensions and a matrix made of a parameter.
fn is_linear(graph: &Graph, [x, w]: [ValueId; 2], weights: &BTreeSet<ValueId>) -> bool {
    let is_narrow = |value: ValueId| graph.ty(value).dtype.size() == 2 && graph.ty(value).dtype.is_float();
    let ranks = (graph.ty(x).rank(), graph.ty(w).rank());
    is_narrow(x) && is_narrow(w) && weights.contains(&w) && !weights.contains(&x) && ranks.0 > 2 && ranks.1 == 2
}

/// A product with the summed index innermost in both operands, if that can be and the sizes allow.
fn product(graph: &Graph, matmul: &Matmul, mut operands: [Operand; 2]) -> Option<Product> {
    if matmul.epilogue.is_some() || matmul.bias {
        return None;
    }
    let [mut a, mut b, result] = matmul.letters().ok()?;
    let is_inner = |letters: &[char], letter: &char| letters.iter().rev().take(2).any(|known| known == letter);
    let inner = |letter: &&char| !result.contains(letter) && is_inner(&a, letter) && is_inner(&b, letter);
    let inner = *a.iter().rev().find(inner)?;
    for (letters, operand) in [&mut a, &mut b].into_iter().zip(&mut operands) {
        let ty = graph.ty(operand.value);
        let sizes = &ty.shape[ty.rank().checked_sub(2)?..];
        if ty.dtype.size() != 2 || !sizes.iter().all(|size| size.is_multiple_of(SIDE)) {
            return None;
        }
        let last = letters.len() - 1;
        operand.is_exchanged = letters[last] != inner;
        if operand.is_exchanged {
            letters.swap(last - 1, last);
        }
    }
    let text = |letters: &[char]| letters.iter().collect::<String>();
    Some(Product { operands, spec: format!("{},{}->{}", text(&a), text(&b), text(&result)) })
}

/// The products that make logits: a cross-entropy reads them, perhaps in another shape, or with something done to each.
fn heads(graph: &Graph) -> BTreeSet<NodeId> {
    let entropies = graph.nodes().filter(|(_, node)| matches!(node.op, Op::CrossEntropy(_)));
    let mut open: Vec<NodeId> = entropies.map(|(_, node)| graph.value(node.operands[0]).def).collect();
    let (mut heads, mut seen) = (BTreeSet::new(), BTreeSet::new());
    while let Some(id) = open.pop() {
        let node = graph.node(id);
        if !seen.insert(id) {
            continue;
        }
        match node.op {
            Op::Matmul(_) => _ = heads.insert(id),
            Op::Reshape(_) | Op::Cast(_) | Op::Slice(_) | Op::Affine(_) | Op::Unary(_) | Op::Binary(_) => {
                open.extend(node.operands.iter().map(|value| graph.value(*value).def));
            }
            _ => {}
        }
    }
    heads
}
