//! Finds rotary embeddings and attention by following layouts.

use super::{Bias, Composite, Effect, Found, Heads};
use shardc_ir::ops::{BinaryKind, CompareKind, Matmul, UnaryKind};
use shardc_ir::{DType, EntityRef, Graph, NodeId, Op, ValueId};
use std::collections::BTreeMap;

/// A score at or below this counts as hidden: its exponential is 0 in f32.
const HIDDEN: f64 = -1e4;

/// The least that a bias adds to a hidden score: it is finite in 16 bits. A query to which all keys are hidden then
/// sees all of them by their scores; with the mask written out it would see all alike, or give no number.
pub(crate) const LEAST: f64 = -3e4;

/// The most elements of a head: products make the scores of larger ones faster than attention in one kernel does, where
/// there is one at all (cuDNN's takes as many).
const MOST_OF_HEAD: u64 = 256;

/// Every such operation, by the node that makes its value.
pub fn find(graph: &Graph) -> BTreeMap<NodeId, Found> {
    let mut found = BTreeMap::new();
    let given = given(graph);
    for (id, node) in graph.nodes() {
        let composite = match &node.op {
            Op::Concat(op) if op.dim == 3 && node.operands.len() == 2 => {
                rotary_halves(graph, id).map(|c| ("rotary", c))
            }
            Op::Binary(op) if op.kind == BinaryKind::Add => {
                rotary_whole(graph, node.operands[0], node.operands[1]).map(|c| ("rotary", c))
            }
            Op::Matmul(op) => attention(graph, &given, id, op).map(|c| ("attention", c)),
            _ => None,
        };
        if let Some((rule, composite)) = composite {
            found.insert(id, Found { rule, composite, explanation: Vec::new() });
        }
    }
    found
}

/// Per value, whether no parameter reaches it, not even through integers.
fn given(graph: &Graph) -> Vec<bool> {
    let mut given = vec![true; graph.value_count()];
    for (_, node) in graph.nodes() {
        let all = !matches!(node.op, Op::Parameter(_)) && node.operands.iter().all(|value| given[value.index()]);
        node.results.iter().for_each(|result| given[result.index()] = all);
    }
    given
}

/// The operands of an elementwise function of two operands.
fn pair(graph: &Graph, value: ValueId, kind: BinaryKind) -> Option<(ValueId, ValueId)> {
    let node = graph.def(value);
    match &node.op {
        Op::Binary(op) if op.kind == kind => Some((node.operands[0], node.operands[1])),
        _ => None,
    }
}

/// `(x, half)` if the value is the first (0) or second (1) half of `x` along the last of four
/// dimensions.
fn half(graph: &Graph, value: ValueId) -> Option<(ValueId, usize)> {
    let node = graph.def(value);
    let Op::Slice(slice) = &node.op else { return None };
    let x = node.operands[0];
    let shape = &graph.ty(x).shape;
    let whole = |dim: usize| slice.start[dim] == 0 && slice.limit[dim] == shape[dim];
    if shape.len() != 4 || !shape[3].is_multiple_of(2) || !(0..3).all(whole) {
        return None;
    }
    let middle = shape[3] / 2;
    match (slice.start[3], slice.limit[3]) {
        (0, end) if end == middle => Some((x, 0)),
        (start, end) if start == middle && end == shape[3] => Some((x, 1)),
        _ => None,
    }
}

/// What a broadcast or a change of dimensions of size 1 reads, and per dimension of that the one of the whole that it
/// becomes (any, if its size is 1), from those of the value at hand.
fn before_copy(graph: &Graph, value: ValueId, dims: &[usize]) -> Option<(ValueId, Vec<usize>)> {
    let (node, ty) = (graph.def(value), graph.ty(value));
    let source = *node.operands.first()?;
    let from = &graph.ty(source).shape;
    let proper = || (0..ty.rank()).filter(|dim| ty.shape[*dim] != 1);
    let dims = match &node.op {
        Op::Broadcast(op) => op.dims.iter().map(|dim| dims[*dim]).collect(),
        Op::Reshape(_) if from.iter().filter(|size| **size != 1).eq(proper().map(|dim| &ty.shape[dim])) => {
            let mut rest = proper().map(|dim| dims[dim]);
            let kept = from.iter().map(|size| if *size == 1 { Some(usize::MAX) } else { rest.next() });
            kept.collect::<Option<_>>()?
        }
        _ => return None,
    };
    Some((source, dims))
}

/// A factor that differs along one of the dimensions 1 and 2 and along the last only: the value
/// with these two dimensions alone, and the first of them.
fn table(graph: &Graph, value: ValueId) -> Option<(ValueId, usize)> {
    // Per dimension of the value at hand, the dimension of the factor that it becomes.
    let (mut value, mut dims): (ValueId, Vec<usize>) = (value, (0..graph.ty(value).rank()).collect());
    loop {
        let ty = graph.ty(value);
        let proper: Vec<usize> = (0..ty.rank()).filter(|dim| ty.shape[*dim] != 1).collect();
        if let [row, column] = proper[..]
            && dims[column] == 3
            && (dims[row] == 1 || dims[row] == 2)
            && ty.dtype == DType::F32
        {
            return Some((value, dims[row]));
        }
        (value, dims) = before_copy(graph, value, &dims)?;
    }
}

/// `(x, half of x, table, its row dimension)` of a product of a half of `x` with a table.
fn turned(graph: &Graph, value: ValueId) -> Option<(ValueId, usize, ValueId, usize)> {
    let (a, b) = pair(graph, value, BinaryKind::Mul)?;
    let ((x, which), factor) = half(graph, a).map(|h| (h, b)).or_else(|| half(graph, b).map(|h| (h, a)))?;
    let (table, row) = table(graph, factor)?;
    Some((x, which, table, row))
}

/// `concat(x1 cos - x2 sin, x2 cos + x1 sin)`
fn rotary_halves(graph: &Graph, id: NodeId) -> Option<Composite> {
    let node = graph.node(id);
    let (a, b) = pair(graph, node.operands[0], BinaryKind::Sub)?;
    let (c, d) = pair(graph, node.operands[1], BinaryKind::Add)?;
    let (a, b, c, d) = (turned(graph, a)?, turned(graph, b)?, turned(graph, c)?, turned(graph, d)?);
    let (c, d) = if c.1 == 1 { (c, d) } else { (d, c) };
    let (x, cos, sin, row) = (a.0, a.2, b.2, a.3);
    let right = a == (x, 0, cos, row) && b == (x, 1, sin, row) && c == (x, 1, cos, row) && d == (x, 0, sin, row);
    right.then_some(Composite::Rotary { x, cos, sin, heads_first: row == 2 })
}

/// `x cos + concat(-x2, x1) sin`, with tables whose two halves are equal.
fn rotary_whole(graph: &Graph, a: ValueId, b: ValueId) -> Option<Composite> {
    let products = [pair(graph, a, BinaryKind::Mul)?, pair(graph, b, BinaryKind::Mul)?];
    for (plain, crossed) in [(products[0], products[1]), (products[1], products[0])] {
        for (x, cos) in [plain, (plain.1, plain.0)] {
            for (rotated, sin) in [crossed, (crossed.1, crossed.0)] {
                if rotated_half(graph, rotated) != Some(x) {
                    continue;
                }
                let ((cos, row), (sin, other)) = (table(graph, cos)?, table(graph, sin)?);
                if row == other && is_doubled(graph, cos) && is_doubled(graph, sin) {
                    return Some(Composite::Rotary { x, cos, sin, heads_first: row == 2 });
                }
            }
        }
    }
    None
}

/// `x` of `concat(-x2, x1)`.
fn rotated_half(graph: &Graph, value: ValueId) -> Option<ValueId> {
    let node = graph.def(value);
    let Op::Concat(concat) = &node.op else { return None };
    let [negated, first] = node.operands[..] else { return None };
    let sign = graph.def(negated);
    let negative = match &sign.op {
        Op::Unary(op) => op.kind == UnaryKind::Neg,
        Op::Affine(op) => (op.scale, op.offset) == (-1.0, 0.0),
        _ => false,
    };
    let ((x, one), (y, zero)) = (half(graph, *sign.operands.first()?)?, half(graph, first)?);
    (concat.dim == 3 && negative && x == y && (one, zero) == (1, 0)).then_some(x)
}

/// Whether the two halves along the last dimension are equal.
fn is_doubled(graph: &Graph, value: ValueId) -> bool {
    let (node, rank) = (graph.def(value), graph.ty(value).rank());
    match &node.op {
        Op::Concat(op) => op.dim + 1 == rank && node.operands.len() == 2 && node.operands[0] == node.operands[1],
        Op::Unary(_) | Op::Affine(_) | Op::Cast(_) => is_doubled(graph, node.operands[0]),
        Op::Slice(op) => {
            let last = rank.wrapping_sub(1);
            let whole = graph.ty(node.operands[0]).shape.last().copied() == op.limit.get(last).copied();
            whole && op.start.get(last) == Some(&0) && is_doubled(graph, node.operands[0])
        }
        Op::Reshape(_) => {
            let same = graph.ty(node.operands[0]).shape.last() == graph.ty(value).shape.last();
            same && is_doubled(graph, node.operands[0])
        }
        _ => false,
    }
}

/// `softmax(scale * q k' with hidden scores) v`
fn attention(graph: &Graph, given: &[bool], id: NodeId, second: &Matmul) -> Option<Composite> {
    let node = graph.node(id);
    let (weights, v) = (node.operands[0], node.operands[1]);
    if !matches!(graph.def(weights).op, Op::Softmax(_)) {
        return None;
    }
    let [of_weights, of_v, of_o] = second.letters().ok()?;
    let [lead @ .., s, t] = &of_weights[..] else { return None };
    let dims = second.dims().ok()?;
    if !matches!(lead.len(), 1 | 2) || dims.batch != lead || dims.m != [*s] || dims.k != [*t] || dims.n.len() != 1 {
        return None;
    }
    let sizes = batch_and_heads(graph, weights, v)?;
    let (mut scores, mut scale, mut causal) = (graph.def(weights).operands[0], 1.0, false);
    let mut bias = Vec::new();
    let first = loop {
        let node = graph.def(scores);
        scores = match &node.op {
            Op::Affine(op) if op.offset == 0.0 && op.scale > 0.0 => {
                scale *= op.scale;
                node.operands[0]
            }
            Op::Select(_) => {
                let (kept, when, by) = hides(graph, &node.operands)?;
                if !causal && is_the_future(graph, node.operands[0], when) {
                    causal = true;
                } else {
                    let by = Some(by * scale).filter(|by| *by <= HIDDEN)?.max(LEAST);
                    let (value, shape) = uncopied(graph, given, node.operands[0], sizes)?;
                    bias.push(Bias { value, shape, effect: Effect::Hides { when, by } });
                }
                kept
            }
            Op::Binary(op) if matches!(op.kind, BinaryKind::Add | BinaryKind::Sub) => {
                let copied = |side: usize| uncopied(graph, given, node.operands[side], sizes);
                let of = |side: usize| Some((node.operands[1 - side], copied(side)?));
                let sum = op.kind == BinaryKind::Add;
                let (kept, (value, shape)) = of(1).or_else(|| of(0).filter(|_| sum))?;
                bias.push(Bias { value, shape, effect: Effect::Times(if sum { scale } else { -scale }) });
                kept
            }
            Op::Matmul(first) => break first,
            _ => return None,
        };
    };
    let made = graph.def(scores);
    let [of_q, of_k, of_scores] = first.letters().ok()?;
    let kinds = first.dims().ok()?;
    let [lead1 @ .., s1, t1] = &of_scores[..] else { return None };
    if kinds.batch != lead1 || kinds.m != [*s1] || kinds.n != [*t1] || kinds.k.len() != 1 {
        return None;
    }
    let read = [
        heads(graph, made.operands[0], &of_q, (lead1, sizes), [*s1, kinds.k[0]], false)?,
        heads(graph, made.operands[1], &of_k, (lead1, sizes), [*t1, kinds.k[0]], true)?,
        heads(graph, v, &of_v, (lead, sizes), [*t, dims.n[0]], true)?,
    ];
    let size = |heads: &Heads, dim: usize| heads.shape[heads.permutation[dim]];
    let (keys, values) = (&read[1], &read[2]);
    if size(keys, 2) != size(values, 2) || size(keys, 3).max(size(values, 3)) > MOST_OF_HEAD {
        return None;
    }
    let [b, h] = APART;
    let order = [b, *s, h, dims.n[0]];
    let made = apart(&of_o, lead).into_iter().map(|letter| order.iter().position(|other| *other == letter));
    Some(Composite::Attention { read: Box::new(read), made: made.collect::<Option<_>>()?, causal, scale, bias })
}

/// The letters of batch and heads, which no contraction has.
const APART: [char; 2] = ['0', '1'];

/// Where batch and heads are one dimension, as if it were the one behind scores.
const JOINED: usize = 4;

/// Letters with those of batch and heads, or the one of both joined, as [`APART`].
fn apart(letters: &[char], lead: &[char]) -> Vec<char> {
    let of = |letter: &char| match lead.iter().position(|other| other == letter) {
        Some(_) if lead.len() == 1 => APART.to_vec(),
        Some(place) => vec![APART[place]],
        None => vec![*letter],
    };
    letters.iter().flat_map(of).collect()
}

/// The sizes of batch and heads, of which weights `[b, h, s, t]` tell, or `[b * h, s, t]` and what the values `[b * h, ..]`
/// are made of; of what is not joined from both, as a batch of single heads.
fn batch_and_heads(graph: &Graph, weights: ValueId, mut values: ValueId) -> Option<[u64; 2]> {
    let all = match graph.ty(weights).shape[..] {
        [b, h, _, _] => return Some([b, h]),
        [all, _, _] => all,
        _ => return None,
    };
    while matches!(graph.def(values).op, Op::Reshape(_) | Op::Transpose(_)) {
        let (source, to) = (graph.def(values).operands[0], &graph.ty(values).shape);
        if let [b, _, .., rows, columns] = &graph.ty(source).shape[..]
            && to[..] == [all, *rows, *columns]
            && *b > 0
        {
            return Some([*b, all / b]);
        }
        values = source;
    }
    Some([all, 1])
}

/// What a reshape joins to a dimension of batch and heads, as [`before_copy`].
fn before_join(graph: &Graph, value: ValueId, dims: &[usize], sizes: [u64; 2]) -> Option<(ValueId, Vec<usize>)> {
    let node = graph.def(value);
    let at = dims.iter().position(|dim| *dim == JOINED).filter(|_| matches!(node.op, Op::Reshape(_)))?;
    let (mut shape, mut dims) = (graph.ty(value).shape.clone(), dims.to_vec());
    shape.splice(at..=at, sizes);
    dims.splice(at..=at, [0, 1]);
    (graph.ty(node.operands[0]).shape == shape).then_some((node.operands[0], dims))
}

/// What is copied to `[b, h, s, t]` or `[b * h, s, t]`, and its shape with 1 in the place of each dimension of the former
/// along which it is copied, if no parameter reaches it and it differs from key to key.
fn uncopied(graph: &Graph, given: &[bool], value: ValueId, sizes: [u64; 2]) -> Option<(ValueId, [u64; 4])> {
    let (keys, is_given) = (*graph.ty(value).shape.last()?, given[value.index()]);
    let mut dims = if graph.ty(value).rank() == 3 { vec![JOINED, 2, 3] } else { vec![0, 1, 2, 3] };
    let mut value = value;
    while let Some(from) = before_copy(graph, value, &dims).or_else(|| before_join(graph, value, &dims, sizes)) {
        (value, dims) = from;
    }
    let mut shape = [1; 4];
    let proper = dims.iter().zip(&graph.ty(value).shape).filter(|(_, size)| **size != 1);
    let mut places = Vec::new();
    for (dim, size) in proper {
        match *dim {
            JOINED => (shape[0], shape[1]) = (sizes[0], sizes[1]),
            dim => *shape.get_mut(dim)? = *size,
        }
        places.push(dim % JOINED);
    }
    (is_given && places.is_sorted() && shape[3] == keys).then_some((value, shape))
}

/// A tensor with these letters, among which are those of batch and heads or the one of both with their sizes, as heads of
/// `rows`; keys and values without the copies that were made for the groups of queries, if they may be `shared`.
fn heads(
    graph: &Graph,
    mut value: ValueId,
    letters: &[char],
    (lead, sizes): (&[char], [u64; 2]),
    [row, column]: [char; 2],
    shared: bool,
) -> Option<Heads> {
    let mut letters = letters.to_vec();
    while let Op::Transpose(op) = &graph.def(value).op {
        let moved = letters.clone();
        op.permutation.iter().zip(moved).for_each(|(from, letter)| letters[*from] = letter);
        value = graph.def(value).operands[0];
    }
    let (letters, [b, h]) = (apart(&letters, lead), APART);
    let place = |letter: char| letters.iter().position(|other| *other == letter);
    let permutation: Vec<usize> = [b, row, h, column].into_iter().map(place).collect::<Option<_>>()?;
    let mut shape = graph.ty(value).shape.clone();
    if lead.len() == 1 {
        let joined = place(b)?;
        shape.splice(joined..=joined, sizes);
    }
    let whole = Heads { value, shape: shape.clone(), permutation: permutation.clone() };
    let mut node = graph.def(value);
    if !shared || !matches!(node.op, Op::Reshape(_)) {
        return Some(whole);
    }
    while matches!(graph.def(node.operands[0]).op, Op::Reshape(_)) {
        node = graph.def(node.operands[0]);
    }
    let (copies, at) = (node.operands[0], permutation[2]);
    let (wide, copy) = (&graph.ty(copies).shape, graph.def(copies));
    if !matches!(copy.op, Op::Broadcast(_)) || wide.len() != 5 || wide[at] * wide[at + 1] != shape[at] {
        return Some(whole);
    }
    let mut split = shape.clone();
    (split[at], _) = (wide[at], split.insert(at + 1, wide[at + 1]));
    let (source, mut single) = (copy.operands[0], shape);
    single[at] = wide[at];
    let Op::Broadcast(op) = &copy.op else { return Some(whole) };
    let from = &graph.ty(source).shape;
    // Every dimension but the group's comes from the source as it is.
    let kept: Vec<usize> = op.dims.iter().zip(from).filter(|(_, size)| **size != 1).map(|(dim, _)| *dim).collect();
    let all = (0..5).filter(|dim| wide[*dim] != 1 && *dim != at + 1);
    if split != *wide || !kept.into_iter().eq(all) {
        return Some(whole);
    }
    Some(Heads { value: source, shape: single, permutation })
}

/// Of a selection that hides scores: those that it keeps, the value of the mask where it hides, and by which number.
fn hides(graph: &Graph, operands: &[ValueId]) -> Option<(ValueId, bool, f64)> {
    let [_, a, b] = operands else { return None };
    let hidden = |value: ValueId| number(graph, value).filter(|number| *number <= HIDDEN);
    match (hidden(*a), hidden(*b)) {
        (Some(by), _) => Some((*b, true, by)),
        (None, Some(by)) => Some((*a, false, by)),
        (None, None) => None,
    }
}

/// Whether a mask is `when` exactly of the keys after each query.
fn is_the_future(graph: &Graph, mask: ValueId, when: bool) -> bool {
    let [lead @ .., s, t] = &graph.ty(mask).shape[..] else { return false };
    // Key j is after query i, where the last key is seen by the last query.
    let terms = lead.iter().map(|_| 0).chain([-1, 1]).collect();
    let future = Linear { terms, constant: *s as i64 - *t as i64 };
    let condition = condition(graph, mask);
    condition.is_some_and(|condition| future == if when { condition } else { condition.negated() })
}

/// The number that a value holds everywhere.
fn number(graph: &Graph, value: ValueId) -> Option<f64> {
    let node = graph.def(value);
    match &node.op {
        Op::Constant(constant) => Some(constant.value),
        Op::Broadcast(_) | Op::Reshape(_) => number(graph, node.operands[0]),
        _ => None,
    }
}

/// `constant + sum of terms[dim] * index[dim]`
#[derive(Clone, Debug, PartialEq, Eq)]
struct Linear {
    terms: Vec<i64>,
    constant: i64,
}

impl Linear {
    fn combined(&self, other: &Self, sign: i64) -> Option<Self> {
        let rank = self.terms.len().max(other.terms.len());
        let term = |linear: &Self, dim: usize| linear.terms.get(dim).copied().unwrap_or(0);
        let fits = |linear: &Self| linear.terms.is_empty() || linear.terms.len() == rank;
        let terms = (0..rank).map(|dim| term(self, dim) + sign * term(other, dim)).collect();
        (fits(self) && fits(other)).then_some(Self { terms, constant: self.constant + sign * other.constant })
    }

    /// `not (self > 0)` as `result > 0`, over the integers.
    fn negated(&self) -> Self {
        Self { terms: self.terms.iter().map(|term| -term).collect(), constant: 1 - self.constant }
    }

    /// The same function of the indices of the result of a layout operation.
    fn moved(self, graph: &Graph, value: ValueId) -> Option<Self> {
        let node = graph.def(value);
        let (from, to) = (&graph.ty(node.operands[0]).shape, &graph.ty(value).shape);
        let mut terms = vec![0; to.len()];
        match &node.op {
            Op::Broadcast(op) => {
                for ((dim, size), term) in op.dims.iter().zip(from).zip(&self.terms) {
                    terms[*dim] = if *size == to[*dim] { *term } else { 0 };
                }
            }
            Op::Transpose(op) => {
                for (to, from) in op.permutation.iter().enumerate() {
                    terms[to] = *self.terms.get(*from)?;
                }
            }
            Op::Reshape(_) => {
                let places = |shape: &[u64]| (0..shape.len()).filter(|dim| shape[*dim] != 1).collect::<Vec<_>>();
                let (old, new) = (places(from), places(to));
                if !old.iter().map(|dim| from[*dim]).eq(new.iter().map(|dim| to[*dim])) {
                    return None;
                }
                for (old, new) in old.into_iter().zip(new) {
                    terms[new] = *self.terms.get(old)?;
                }
            }
            _ => return None,
        }
        Some(Self { terms, constant: self.constant })
    }
}

/// A value as a linear function of its indices.
fn linear(graph: &Graph, value: ValueId) -> Option<Linear> {
    let (node, rank) = (graph.def(value), graph.ty(value).rank());
    let whole = |number: f64| (number.fract() == 0.0 && number.abs() < 1e12).then_some(number as i64);
    match &node.op {
        Op::Iota(op) => {
            let mut terms = vec![0; rank];
            terms[op.dim] = 1;
            Some(Linear { terms, constant: op.start as i64 })
        }
        Op::Constant(op) => Some(Linear { terms: vec![0; rank], constant: whole(op.value)? }),
        Op::Affine(op) => {
            let (x, scale) = (linear(graph, node.operands[0])?, whole(op.scale)?);
            let terms = x.terms.iter().map(|term| term * scale).collect();
            Some(Linear { terms, constant: x.constant * scale + whole(op.offset)? })
        }
        Op::Binary(op) if matches!(op.kind, BinaryKind::Add | BinaryKind::Sub) => {
            let sign = if op.kind == BinaryKind::Add { 1 } else { -1 };
            linear(graph, node.operands[0])?.combined(&linear(graph, node.operands[1])?, sign)
        }
        Op::Cast(_) => linear(graph, node.operands[0]),
        Op::Broadcast(_) | Op::Reshape(_) | Op::Transpose(_) => linear(graph, node.operands[0])?.moved(graph, value),
        _ => None,
    }
}

/// A mask as `linear > 0`, over integer indices.
fn condition(graph: &Graph, value: ValueId) -> Option<Linear> {
    let node = graph.def(value);
    match &node.op {
        Op::Compare(op) => {
            let (a, b) = (linear(graph, node.operands[0])?, linear(graph, node.operands[1])?);
            let (difference, slack) = match op.kind {
                CompareKind::Gt => (a.combined(&b, -1)?, 0),
                CompareKind::Ge => (a.combined(&b, -1)?, 1),
                CompareKind::Lt => (b.combined(&a, -1)?, 0),
                CompareKind::Le => (b.combined(&a, -1)?, 1),
                CompareKind::Eq | CompareKind::Ne => return None,
            };
            Some(Linear { constant: difference.constant + slack, ..difference })
        }
        Op::Unary(op) if op.kind == UnaryKind::Not => Some(condition(graph, node.operands[0])?.negated()),
        Op::Broadcast(_) | Op::Reshape(_) | Op::Transpose(_) => condition(graph, node.operands[0])?.moved(graph, value),
        _ => None,
    }
}
