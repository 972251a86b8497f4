//! Brings transposes to where they meet another, or something that does without.
//!
//! An operation that treats every element alike, or whose dimensions can be named in any order, is done in the order of
//! dimensions that its operands are held in; the transposes in front of it follow behind. So what a model says of pictures
//! `[b, c, h, w]`, whose convolutions and pooling have channels last, happens with channels last from one convolution to
//! the next, and only what comes in and goes out is transposed.

use shardc_ir::ops::{Broadcast, Concat, Constant, OpError, Pad, Reduce, Reshape, Slice, Transpose};
use shardc_ir::{Graph, NodeId, Op, ValueId};
use std::collections::{HashMap, VecDeque};

/// The graph with transposes moved towards what reads the results.
pub fn settle(graph: &Graph) -> Result<Graph, OpError> {
    let mut layouts = Layouts { from: graph, laid: HashMap::new(), made: HashMap::new() };
    let outputs: Vec<ValueId> = graph.outputs.iter().map(|output| output.value).collect();
    let settled = graph.rebuild(|to, id, map| {
        if !layouts.node(to, id)? {
            let node = graph.node(id);
            for operand in &node.operands {
                map.insert(*operand, layouts.whole(to, *operand)?);
            }
            let copy = to.copy_node(graph, id, map)?;
            for (old, new) in node.results.iter().zip(to.node(copy).results.clone()) {
                layouts.lay(*old, new, Layout::whole(&graph.ty(*old).shape));
            }
        }
        for result in graph.node(id).results.iter().filter(|result| outputs.contains(result)) {
            map.insert(*result, layouts.whole(to, *result)?);
        }
        Ok(true)
    })?;
    settled.rebuild(|_, _, _| Ok(false))
}

/// The elements that transposes move.
pub fn moved(graph: &Graph) -> u64 {
    let transposes = graph.nodes().filter(|(_, node)| matches!(node.op, Op::Transpose(_)));
    transposes.map(|(id, _)| graph.ty(graph.result(id)).elements()).sum()
}

/// How a tensor holds a value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Layout {
    /// Of each dimension of the value, the dimensions of the tensor that it consists of, the slowest first; none of one
    /// element. Each dimension of the tensor is there once.
    dims: Vec<Vec<usize>>,
    /// The tensor's sizes.
    shape: Vec<u64>,
}

impl Layout {
    /// A value as it is.
    fn whole(shape: &[u64]) -> Self {
        Self { dims: (0..shape.len()).map(|dim| vec![dim]).collect(), shape: shape.to_vec() }
    }

    fn is_whole(&self) -> bool {
        self.dims.iter().enumerate().all(|(index, dims)| *dims == [index])
    }

    /// The tensor's dimensions in the order of the value's.
    fn order(&self) -> Vec<usize> {
        self.dims.concat()
    }

    /// The sizes of the tensor's dimensions in the order of the value's.
    fn sizes(&self) -> Vec<u64> {
        self.order().into_iter().map(|dim| self.shape[dim]).collect()
    }

    /// With the value's dimensions in another order.
    fn permuted(&self, permutation: &[usize]) -> Self {
        Self { dims: permutation.iter().map(|dim| self.dims[*dim].clone()).collect(), ..self.clone() }
    }

    /// Of one number for each dimension of the value, those of the tensor's dimensions; if each is one.
    fn each<T: Copy>(&self, numbers: &[T]) -> Option<Vec<T>> {
        let mut held: Vec<Option<T>> = vec![None; self.shape.len()];
        for (dims, number) in self.dims.iter().zip(numbers) {
            let [dim] = dims[..] else { return None };
            held[dim] = Some(*number);
        }
        held.into_iter().collect()
    }

    /// With each dimension of the tensor divided into some of these sizes, in the order of the value's dimensions.
    fn divided(&self, sizes: &[u64]) -> Option<Self> {
        let (order, mut sizes) = (self.order(), sizes.iter().copied());
        let mut parts: Vec<Vec<u64>> = vec![Vec::new(); self.shape.len()];
        for dim in order {
            let mut left = self.shape[dim];
            while left > 1 || parts[dim].is_empty() {
                let part = sizes.next().filter(|part| *part > 0 && left.is_multiple_of(*part))?;
                left /= part;
                parts[dim].push(part);
            }
        }
        let firsts: Vec<usize> = (0..parts.len()).map(|dim| parts[..dim].iter().map(Vec::len).sum()).collect();
        let of = |dim: &usize| firsts[*dim]..firsts[*dim] + parts[*dim].len();
        let dims = self.dims.iter().map(|dims| dims.iter().flat_map(of).collect()).collect();
        sizes.next().is_none().then_some(Self { dims, shape: parts.concat() })
    }

    /// With dimensions of the tensor that lie together and belong to one of the value's as one.
    fn joined(&self) -> Self {
        let follows = |dim: usize| self.dims.iter().any(|dims| dims.windows(2).any(|pair| pair == [dim - 1, dim]));
        let mut place = Vec::new();
        let mut shape: Vec<u64> = Vec::new();
        for (dim, size) in self.shape.iter().enumerate() {
            match shape.last_mut().filter(|_| dim > 0 && follows(dim)) {
                Some(last) => *last *= size,
                None => shape.push(*size),
            }
            place.push(shape.len() - 1);
        }
        let of = |dims: &Vec<usize>| {
            let mut dims: Vec<usize> = dims.iter().map(|dim| place[*dim]).collect();
            dims.dedup();
            dims
        };
        Self { dims: self.dims.iter().map(of).collect(), shape }
    }

    /// Of the same elements in another shape, with dimensions of the tensor divided where it takes that.
    fn reshaped(&self, shape: &[u64]) -> Option<Self> {
        let fine = self.divided(&refined(&self.sizes(), shape)?)?;
        let mut left: VecDeque<usize> = fine.order().into();
        let mut dims = Vec::new();
        for size in shape {
            let (mut taken, mut held) = (Vec::new(), 1);
            while held < *size {
                let dim = left.pop_front()?;
                held *= fine.shape[dim];
                taken.push(dim);
            }
            dims.push(taken);
        }
        // Those of one element that are left.
        if !left.is_empty() {
            dims.last_mut()?.extend(left);
        }
        Some(Self { dims, shape: fine.shape })
    }
}

/// The fewest sizes, row-major, of which neighbours multiplied are those of both; none if there are not.
fn refined(a: &[u64], b: &[u64]) -> Option<Vec<u64>> {
    let ends = |sizes: &[u64]| -> Option<Vec<u64>> {
        let mut ends = Vec::new();
        let mut product = 1u64;
        for size in sizes {
            product = product.checked_mul(*size).filter(|product| *product > 0)?;
            ends.push(product);
        }
        Some(ends)
    };
    let mut all = [ends(a)?, ends(b)?].concat();
    all.sort_unstable();
    let ones = a.iter().filter(|size| **size == 1).count();
    all.dedup();
    let (mut before, mut sizes) = (1, Vec::new());
    for end in all.into_iter().filter(|end| *end > 1) {
        if !end.is_multiple_of(before) {
            return None;
        }
        sizes.push(end / before);
        before = end;
    }
    // Dimensions of one element are where the first has them.
    if ones > 0 {
        let (mut with_ones, mut fine) = (Vec::new(), sizes.into_iter());
        for size in a {
            let mut held = 1;
            with_ones.extend((*size == 1).then_some(1));
            while held < *size {
                let next = fine.next()?;
                held *= next;
                with_ones.push(next);
            }
        }
        sizes = with_ones;
    }
    Some(sizes)
}

struct Layouts<'a> {
    from: &'a Graph,
    /// The tensor that was made for a value, and how it holds it.
    laid: HashMap<ValueId, (ValueId, Layout)>,
    /// What holds a value in another way.
    made: HashMap<(ValueId, Layout), ValueId>,
}

impl Layouts<'_> {
    /// Says how a value is held.
    fn lay(&mut self, value: ValueId, tensor: ValueId, layout: Layout) {
        self.laid.insert(value, (tensor, layout));
    }

    /// Whether a value is as easily made in any layout.
    fn is_light(&self, value: ValueId) -> bool {
        matches!(self.from.def(value).op, Op::Constant(_) | Op::Broadcast(_))
    }

    /// How a value is held, unless as it is.
    fn moved(&self, value: ValueId) -> Option<&Layout> {
        self.laid.get(&value).map(|(_, layout)| layout).filter(|layout| !layout.is_whole())
    }

    /// Adds a node where a value is made.
    fn add(
        &self,
        to: &mut Graph,
        (value, shape): (ValueId, &[u64]),
        op: impl Into<Op>,
        operand: Option<ValueId>,
    ) -> Result<ValueId, OpError> {
        let (node, ty) = (self.from.def(value), self.from.ty(value).with_shape(shape.to_vec()));
        let operands: Vec<ValueId> = operand.into_iter().collect();
        let added = to.add_as(op.into(), &operands, &[ty], node.path.clone(), node.role)?;
        Ok(to.result(added))
    }

    fn reshape(&self, to: &mut Graph, value: ValueId, tensor: ValueId, shape: &[u64]) -> Result<ValueId, OpError> {
        if to.ty(tensor).shape == shape {
            return Ok(tensor);
        }
        self.add(to, (value, shape), Reshape {}, Some(tensor))
    }

    /// A tensor that holds a value in a layout.
    fn held(&mut self, to: &mut Graph, value: ValueId, layout: &Layout) -> Result<ValueId, OpError> {
        if let Some((tensor, _)) = self.laid.get(&value).filter(|(_, known)| known == layout) {
            return Ok(*tensor);
        }
        let key = (value, layout.clone());
        if let Some(made) = self.made.get(&key) {
            return Ok(*made);
        }
        let made = match &self.from.def(value).op {
            Op::Constant(op) => self.add(to, (value, &layout.shape), Constant { value: op.value }, None)?,
            Op::Broadcast(op) => self.copied(to, value, op, layout)?,
            _ => self.converted(to, value, layout)?,
        };
        self.made.insert(key, made);
        Ok(made)
    }

    /// Copies made in a layout.
    fn copied(&mut self, to: &mut Graph, value: ValueId, op: &Broadcast, layout: &Layout) -> Result<ValueId, OpError> {
        let source = self.from.def(value).operands[0];
        let small = self.from.ty(source).shape.clone();
        // Each dimension of what is copied, in as many as the copies have it in.
        let (mut sizes, mut places) = (Vec::new(), Vec::new());
        for (size, dim) in small.iter().zip(&op.dims) {
            let parts = &layout.dims[*dim];
            if *size > 1 {
                sizes.extend(parts.iter().map(|part| layout.shape[*part]));
                places.extend(parts);
            }
        }
        let whole = self.whole(to, source)?;
        let mut tensor = self.reshape(to, source, whole, &sizes)?;
        let mut order: Vec<usize> = (0..places.len()).collect();
        order.sort_by_key(|place| places[*place]);
        if !order.is_sorted() {
            let sizes: Vec<u64> = order.iter().map(|place| sizes[*place]).collect();
            tensor = self.add(to, (source, &sizes), Transpose { permutation: order }, Some(tensor))?;
        }
        places.sort_unstable();
        self.add(to, (value, &layout.shape), Broadcast { dims: places }, Some(tensor))
    }

    /// The elements of the tensor that holds a value, brought into another layout.
    fn converted(&mut self, to: &mut Graph, value: ValueId, layout: &Layout) -> Result<ValueId, OpError> {
        let (tensor, known) = self.laid[&value].clone();
        let Some([from, wanted]) = refined(&known.sizes(), &layout.sizes())
            .and_then(|sizes| Some([known.divided(&sizes)?, layout.divided(&sizes)?]))
            .filter(|[from, wanted]| from.order().len() == wanted.order().len())
        else {
            // Where they divide a dimension differently, by way of the value's order.
            let tensor = self.ordered(to, value, tensor, (&known.order(), &Layout::whole(&known.sizes())))?;
            let tensor = self.reshape(to, value, tensor, &layout.sizes())?;
            return self.ordered(to, value, tensor, (&(0..layout.shape.len()).collect::<Vec<_>>(), layout));
        };
        let tensor = self.reshape(to, value, tensor, &from.shape)?;
        let tensor = self.ordered(to, value, tensor, (&from.order(), &wanted))?;
        self.reshape(to, value, tensor, &layout.shape)
    }

    /// A tensor whose dimensions, named in the order of the value's, are `order`, with those dimensions as a layout has them.
    fn ordered(
        &self,
        to: &mut Graph,
        value: ValueId,
        tensor: ValueId,
        (order, wanted): (&[usize], &Layout),
    ) -> Result<ValueId, OpError> {
        let mut permutation = vec![0; order.len()];
        order.iter().zip(wanted.order()).for_each(|(from, to)| permutation[to] = *from);
        if permutation.is_sorted() {
            return Ok(tensor);
        }
        self.add(to, (value, &wanted.shape), Transpose { permutation }, Some(tensor))
    }

    /// A value as it is.
    fn whole(&mut self, to: &mut Graph, value: ValueId) -> Result<ValueId, OpError> {
        self.held(to, value, &Layout::whole(&self.from.ty(value).shape))
    }

    /// The layout in which the fewest operands have to be brought, that of the values as they are if there are several.
    fn best(&self, operands: &[ValueId], shape: &[u64]) -> Layout {
        let heavy: Vec<ValueId> = operands.iter().copied().filter(|operand| !self.is_light(*operand)).collect();
        let whole = Layout::whole(shape);
        let moved = |layout: &Layout| {
            let lies = |value: &&ValueId| self.laid.get(value).is_some_and(|(_, known)| known == layout);
            let is_known = |value: &&ValueId| lies(value) || self.made.contains_key(&(**value, layout.clone()));
            heavy.iter().filter(|value| !is_known(value)).count()
        };
        let candidates = heavy.iter().filter_map(|operand| self.moved(*operand).cloned());
        let best = candidates.min_by_key(moved).filter(|best| moved(best) < moved(&whole));
        best.unwrap_or(whole)
    }

    /// Adds what does a node's work in the layout of its operands, if that can be; whether it did.
    fn node(&mut self, to: &mut Graph, id: NodeId) -> Result<bool, OpError> {
        let (from, node) = (self.from, self.from.node(id));
        let ([result], Some(first)) = (&node.results[..], node.operands.first()) else { return Ok(false) };
        match &node.op {
            // It is made where it is read.
            Op::Broadcast(_) => {}
            Op::Transpose(op) => {
                let shape = &from.ty(*first).shape;
                let layout = self.laid.get(first).map_or_else(|| Layout::whole(shape), |(_, layout)| layout.clone());
                let tensor = self.held(to, *first, &layout)?;
                self.lay(*result, tensor, layout.permuted(&op.permutation));
            }
            Op::Reshape(_) => {
                let Some(layout) = self.moved(*first).and_then(|layout| layout.reshaped(&from.ty(*result).shape))
                else {
                    return Ok(false);
                };
                let (layout, tensor) = (layout.joined(), self.laid[first].0);
                let tensor = self.reshape(to, *result, tensor, &layout.shape)?;
                self.lay(*result, tensor, layout);
            }
            _ => return self.computed(to, id),
        }
        Ok(true)
    }

    /// The same for a node that computes something: in the layout in which most of its operands are held, unless that is
    /// the order of the values.
    fn computed(&mut self, to: &mut Graph, id: NodeId) -> Result<bool, OpError> {
        let (from, node) = (self.from, self.from.node(id));
        let (result, shape) = (node.results[0], |value: &ValueId| &from.ty(*value).shape);
        // A scalar goes with everything.
        let rank = node.operands.iter().map(|operand| shape(operand).len()).max().unwrap_or(0);
        let tensors: Vec<ValueId> =
            node.operands.iter().copied().filter(|operand| shape(operand).len() == rank).collect();
        let Some(lead) = tensors.first() else { return Ok(false) };
        let layout = self.best(&tensors, shape(lead));
        if layout.is_whole() {
            return Ok(false);
        }
        let Some((op, laid)) = in_layout(&node.op, &layout, shape(&result)) else { return Ok(false) };
        let mut operands = Vec::new();
        for operand in &node.operands {
            let shape = shape(operand);
            let layout = match &node.op {
                _ if shape.len() != rank => Layout::whole(shape),
                Op::Concat(_) => Layout { shape: layout.each(shape).unwrap_or_default(), ..layout.clone() },
                _ => layout.clone(),
            };
            operands.push(self.held(to, *operand, &layout)?);
        }
        let ty = from.ty(result).with_shape(laid.shape.clone());
        let added = to.add_as(op, &operands, &[ty], node.path.clone(), node.role)?;
        self.lay(result, to.result(added), laid);
        Ok(true)
    }
}

/// The operation that does to tensors of a layout what `op` does to values, and the layout of its result, which is a value
/// of this shape. None if there is no such operation.
fn in_layout(op: &Op, layout: &Layout, shape: &[u64]) -> Option<(Op, Layout)> {
    let with_shape = |shape| Layout { shape, ..layout.clone() };
    Some(match op {
        Op::Unary(_) | Op::Binary(_) | Op::Affine(_) | Op::Cast(_) | Op::Select(_) | Op::Compare(_) => {
            (op.clone(), layout.clone())
        }
        Op::Slice(op) => {
            let (start, limit) = (layout.each(&op.start)?, layout.each(&op.limit)?);
            (Slice { start, limit }.into(), with_shape(layout.each(shape)?))
        }
        Op::Pad(op) => {
            let (low, high) = (layout.each(&op.low)?, layout.each(&op.high)?);
            (Pad { low, high, value: op.value }.into(), with_shape(layout.each(shape)?))
        }
        Op::Concat(op) => {
            let shape = layout.each(shape)?;
            (Concat { dim: layout.dims[op.dim][0] }.into(), with_shape(shape))
        }
        Op::Reduce(op) => {
            let mut gone: Vec<usize> = op.dims.iter().flat_map(|dim| layout.dims[*dim].iter().copied()).collect();
            gone.sort_unstable();
            let place = |dim: &usize| dim - gone.iter().filter(|gone| *gone < dim).count();
            let rest = layout.dims.iter().enumerate().filter(|(dim, _)| !op.dims.contains(dim));
            let dims = rest.map(|(_, dims)| dims.iter().map(place).collect()).collect();
            let kept = (0..layout.shape.len()).filter(|dim| !gone.contains(dim));
            let shape = kept.map(|dim| layout.shape[dim]).collect();
            (Reduce { kind: op.kind, dims: gone }.into(), Layout { dims, shape })
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(body: &str) -> Graph {
        format!("graph @g {{\n{body}\n}}").parse().unwrap()
    }

    /// The elements that are moved by the transposes of a graph, and by those of the same one settled.
    fn moves(body: &str) -> (u64, u64) {
        let graph = graph(body);
        (moved(&graph), moved(&settle(&graph).unwrap()))
    }

    #[test]
    fn layouts_of_reshapes() {
        // [b, c, h, w] = [2, 6, 4, 5], held with channels last.
        let last = Layout { dims: vec![vec![0], vec![3], vec![1], vec![2]], shape: vec![2, 4, 5, 6] };
        let joined = |shape: &[u64]| last.reshaped(shape).map(|layout| layout.joined());
        let of = |dims: &[&[usize]], shape: &[u64]| {
            Some(Layout { dims: dims.iter().map(|dims| dims.to_vec()).collect(), shape: shape.to_vec() })
        };
        assert_eq!(joined(&[2, 6, 20]), of(&[&[0], &[2], &[1]], &[2, 20, 6]));
        assert_eq!(joined(&[2, 3, 40]), of(&[&[0], &[2], &[3, 1]], &[2, 20, 3, 2]));
        assert_eq!(joined(&[2, 3, 2, 4, 5]), of(&[&[0], &[3], &[4], &[1], &[2]], &[2, 4, 5, 3, 2]));
        assert_eq!(joined(&[2, 6, 1, 4, 5]), of(&[&[0], &[3], &[], &[1], &[2]], &[2, 4, 5, 6]));
        assert_eq!(joined(&[240]), of(&[&[0, 2, 1]], &[2, 20, 6]));
        // Eight of the twelve elements of a channel and a half.
        assert_eq!(joined(&[2, 15, 8]), None);
        let sequence = Layout { dims: vec![vec![0], vec![3], vec![1], vec![2]], shape: vec![2, 1, 5, 6] };
        let flat = sequence.reshaped(&[2, 6, 5]).map(|layout| layout.joined());
        assert_eq!(flat, of(&[&[0], &[2], &[1]], &[2, 5, 6]));
    }

    #[test]
    fn transposes_meet() {
        let normalized = "%x: f32[2,4,5,6] = parameter \"x\"\n%g: f32[6] = parameter \"g\"\n\
            %a: f32[2,6,4,5] = transpose %x {permutation=[0,3,1,2]}\n\
            %s: f32[6] = reduce_sum %a {dims=[0,2,3]}\n%m: f32[2,6,4,5] = broadcast %s {dims=[1]}\n\
            %d: f32[2,6,4,5] = sub %a, %m\n%b: f32[2,6,4,5] = broadcast %g {dims=[1]}\n\
            %y: f32[2,6,4,5] = mul %d, %b\n%o: f32[2,4,5,6] = transpose %y {permutation=[0,2,3,1]}\n\
            return o %o";
        assert_eq!(moves(normalized), (480, 0));
        // Groups of channels, and an average of each channel.
        let grouped = "%x: f32[2,4,5,6] = parameter \"x\"\n\
            %a: f32[2,6,4,5] = transpose %x {permutation=[0,3,1,2]}\n%r: f32[2,3,40] = reshape %a\n\
            %s: f32[2,3] = reduce_max %r {dims=[2]}\n%m: f32[2,3,40] = broadcast %s {dims=[0,1]}\n\
            %d: f32[2,3,40] = sub %r, %m\n%y: f32[2,6,4,5] = reshape %d\n\
            %o: f32[2,4,5,6] = transpose %y {permutation=[0,2,3,1]}\n\
            %p: f32[2,6,1,4,1,5] = reshape %y\n%q: f32[2,6,1,1] = reduce_sum %p {dims=[3,5]}\n\
            return o %o\nreturn q %q";
        assert_eq!(moves(grouped), (480, 0));
        // Beside what is as it is a transpose stays where it was.
        let beside = "%x: f32[4,6] = parameter \"x\"\n%y: f32[6,4] = parameter \"y\"\n\
            %a: f32[6,4] = transpose %x {permutation=[1,0]}\n%o: f32[6,4] = add %a, %y\nreturn o %o";
        assert_eq!(moves(beside), (24, 24));
    }
}
