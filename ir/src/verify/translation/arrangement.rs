//! Which elements of a value each rank holds, and in which order: the algebra of layout conversions.
//!
//! A rank's buffer, read as a flat row-major array, is a number in mixed radix: its [`Digit`]s,
//! outermost first, each of which counts along one dimension of the value with a stride. What the
//! digits leave open is fixed by the rank's coordinates: an axis that divides a dimension adds its
//! coordinate times a stride. So a shard, the stack of parts that a flat all-gather leaves, and the
//! transposes around it are all of one form, and every step of a conversion is exact arithmetic on
//! digits: nothing needs to be executed to see which element lies where.
//!
//! Where an axis divides a dimension unevenly, digits count beyond what its last part has: such an index, at or behind
//! the stride of what lies outside of it, is of no element of the value. What is there is zero.
//!
//! Invariant: an arrangement is canonical (digits of size 1 are dropped, digits that continue each
//! other are joined), so equal contents are equal arrangements.

use crate::mesh::{AxisId, Mesh};
use crate::sharding::{ReduceKind, Sharding, cuts};

/// A local index that counts along dimension `dim` of the value in steps of `stride`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Digit {
    dim: usize,
    stride: u64,
    size: u64,
}

/// See the [module](self). Axes of size 1 appear nowhere.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Arrangement {
    digits: Vec<Digit>,
    /// Axis, dimension and stride, in the order of the axes.
    spread: Vec<(AxisId, usize, u64)>,
    /// The axes over which each coordinate holds one term, in their order.
    partial: Vec<(AxisId, ReduceKind)>,
}

impl Arrangement {
    /// How a value of this global shape lies under a layout that is legal for it.
    pub fn of(shape: &[u64], sharding: &Sharding, mesh: &Mesh) -> Self {
        let mut arrangement = Self::default();
        for (dim, (size, axes)) in shape.iter().zip(&sharding.dims).enumerate() {
            let mut local = *size;
            for cut in cuts(*size, axes, mesh) {
                local = cut.part;
                let mut stride = cut.part * cut.count;
                for axis in cut.axes.iter().filter(|axis| mesh.size(**axis) > 1) {
                    stride /= mesh.size(*axis);
                    arrangement.spread.push((*axis, dim, stride));
                }
            }
            arrangement.digits.push(Digit { dim, stride: 1, size: local });
        }
        arrangement.partial = sharding.partial.iter().copied().filter(|(axis, _)| mesh.size(*axis) > 1).collect();
        arrangement.spread.sort_unstable();
        arrangement.canonical()
    }

    fn canonical(mut self) -> Self {
        let mut digits: Vec<Digit> = Vec::with_capacity(self.digits.len());
        for digit in self.digits.into_iter().filter(|digit| digit.size != 1) {
            match digits.last_mut() {
                Some(last) if last.dim == digit.dim && last.stride == digit.stride * digit.size => {
                    *last = Digit { size: last.size * digit.size, ..digit };
                }
                _ => digits.push(digit),
            }
        }
        self.digits = digits;
        self
    }

    /// The reduction over an axis, if each coordinate holds one term.
    pub fn partial_over(&self, axis: AxisId) -> Option<ReduceKind> {
        self.partial.iter().find(|(partial, _)| *partial == axis).map(|(_, kind)| *kind)
    }

    /// The axes that divide it or over which it is partial.
    pub fn axes(&self) -> impl Iterator<Item = AxisId> + '_ {
        self.spread.iter().map(|(axis, ..)| *axis).chain(self.partial.iter().map(|(axis, _)| *axis))
    }

    /// The same elements with the terms over some axes combined.
    pub fn without_partial(&self, axes: &[AxisId]) -> Self {
        let mut rest = self.clone();
        rest.partial.retain(|(axis, _)| !axes.contains(axis));
        rest
    }

    /// A value of which an axis holds copies becomes a sum: coordinate 0 keeps it, the others hold
    /// zeros. Zeros are neutral for a sum only, so it may be partial by no other reduction.
    pub fn isolated(&self, axis: AxisId, mesh: &Mesh) -> Result<Self, String> {
        self.expect_copies(axis, mesh)?;
        if let Some((_, kind)) = self.partial.iter().find(|(_, kind)| *kind != ReduceKind::Sum) {
            return Err(format!("zeros are not neutral for its terms, which combine by {}", kind.name()));
        }
        let mut next = self.clone();
        next.partial.push((axis, ReduceKind::Sum));
        next.partial.sort_unstable();
        Ok(next)
    }

    fn expect_copies(&self, axis: AxisId, mesh: &Mesh) -> Result<(), String> {
        match self.axes().find(|other| *other == axis) {
            Some(axis) => Err(format!("its coordinates on `{}` do not hold copies", mesh.axis(axis).name())),
            None => Ok(()),
        }
    }

    /// Cuts digits into consecutive runs that count up to the given sizes.
    fn cut(digits: &[Digit], sizes: &[u64]) -> Option<Vec<Vec<Digit>>> {
        let mut rest = digits.iter().copied();
        let mut open = rest.next();
        let mut runs = Vec::with_capacity(sizes.len());
        for size in sizes {
            let (mut run, mut left) = (Vec::new(), *size);
            while left > 1 {
                let digit = open.take()?;
                if left.is_multiple_of(digit.size) {
                    left /= digit.size;
                    run.push(digit);
                    open = rest.next();
                } else if digit.size.is_multiple_of(left) {
                    let inner = digit.size / left;
                    run.push(Digit { stride: digit.stride * inner, size: left, ..digit });
                    open = Some(Digit { size: inner, ..digit });
                    left = 1;
                } else {
                    return None;
                }
            }
            runs.push(run);
        }
        let done = open.is_none_or(|digit| digit.size == 1) && rest.next().is_none();
        done.then_some(runs)
    }

    fn elements(&self) -> u64 {
        self.digits.iter().map(|digit| digit.size).product()
    }

    /// The outermost index, cut by the sizes of some axes, is given to their coordinates.
    fn give(&mut self, axes: &[AxisId], mesh: &Mesh) -> Result<(), String> {
        let mut sizes: Vec<u64> = axes.iter().map(|axis| mesh.size(*axis)).collect();
        let parts: u64 = sizes.iter().product();
        let elements = self.elements();
        if !elements.is_multiple_of(parts) {
            return Err(format!("{elements} elements do not divide into {parts} parts"));
        }
        sizes.push(elements / parts);
        let broken = "its equal parts are no shards of the value";
        let mut runs = Self::cut(&self.digits, &sizes).ok_or(broken)?;
        self.digits = runs.pop().unwrap_or_default();
        for (axis, run) in axes.iter().zip(runs) {
            let [digit] = run.as_slice() else { return Err(broken.to_string()) };
            self.spread.push((*axis, digit.dim, digit.stride));
        }
        self.spread.sort_unstable();
        Ok(())
    }

    /// The coordinates on some axes become the outermost indices.
    fn take(&mut self, axes: &[AxisId], mesh: &Mesh) -> Result<(), String> {
        let mut digits = Vec::with_capacity(axes.len() + self.digits.len());
        for axis in axes {
            let Some(at) = self.spread.iter().position(|(other, ..)| other == axis) else {
                return Err(format!("it is not divided over `{}`", mesh.axis(*axis).name()));
            };
            let (_, dim, stride) = self.spread.remove(at);
            digits.push(Digit { dim, stride, size: mesh.size(*axis) });
        }
        digits.append(&mut self.digits);
        self.digits = digits;
        Ok(())
    }

    fn expect_whole(&self, axes: &[AxisId], mesh: &Mesh) -> Result<(), String> {
        match axes.iter().find(|axis| self.partial_over(**axis).is_some()) {
            Some(axis) => Err(format!("it is a partial value over `{}`", mesh.axis(*axis).name())),
            None => Ok(()),
        }
    }

    /// After an all-gather over a group of these axes.
    pub fn gathered(&self, axes: &[AxisId], mesh: &Mesh) -> Result<Self, String> {
        self.expect_whole(axes, mesh)?;
        let mut next = self.clone();
        next.take(axes, mesh)?;
        Ok(next.canonical())
    }

    /// After an all-reduce.
    pub fn reduced(&self, axes: &[AxisId], kind: ReduceKind, mesh: &Mesh) -> Result<Self, String> {
        for axis in axes {
            let name = &mesh.axis(*axis).name();
            match self.partial_over(*axis) {
                Some(known) if known == kind => {}
                Some(known) => return Err(format!("its terms over `{name}` combine by {}", known.name())),
                None => return Err(format!("it is not partial over `{name}`")),
            }
        }
        Ok(self.without_partial(axes))
    }

    /// After a reduce-scatter.
    pub fn scattered(&self, axes: &[AxisId], kind: ReduceKind, mesh: &Mesh) -> Result<Self, String> {
        let mut next = self.reduced(axes, kind, mesh)?;
        next.give(axes, mesh)?;
        Ok(next.canonical())
    }

    /// After an all-to-all.
    pub fn exchanged(&self, axes: &[AxisId], mesh: &Mesh) -> Result<Self, String> {
        self.expect_whole(axes, mesh)?;
        let mut next = self.clone();
        let mut outer = Self { spread: std::mem::take(&mut next.spread), ..Self::default() };
        outer.take(axes, mesh)?;
        next.spread = outer.spread;
        next.give(axes, mesh)?;
        outer.digits.append(&mut next.digits);
        next.digits = outer.digits;
        Ok(next.canonical())
    }

    /// After every coordinate of axes that held copies keeps its own part of a dimension of the
    /// buffer, which has this shape.
    pub fn sliced(&self, shape: &[u64], dim: usize, axes: &[AxisId], mesh: &Mesh) -> Result<Self, String> {
        axes.iter().try_for_each(|axis| self.expect_copies(*axis, mesh))?;
        let broken = || "its parts are no shards of the value".to_string();
        let mut runs = Self::cut(&self.digits, shape).ok_or_else(broken)?;
        let mut one = Self { digits: runs[dim].clone(), ..Self::default() };
        one.give(axes, mesh)?;
        runs[dim] = one.digits;
        let mut next = Self { digits: runs.concat(), ..self.clone() };
        next.spread.append(&mut one.spread);
        next.spread.sort_unstable();
        Ok(next.canonical())
    }

    /// How far a digit of stride 1 can count before what it reaches belongs to another part, or to nothing, in a value
    /// of this global shape.
    fn room(&self, digit: Digit, whole: &[u64]) -> u64 {
        let digits = self.digits.iter().filter(|other| other.dim == digit.dim).map(|other| other.stride);
        let spread = self.spread.iter().filter(|(_, dim, _)| *dim == digit.dim).map(|(_, _, stride)| *stride);
        digits.chain(spread).filter(|stride| *stride > digit.stride).min().unwrap_or(whole[digit.dim])
    }

    /// The digits of the buffer, which has this shape, by its dimensions, and the one along which `dim` counts alone.
    fn along(&self, shape: &[u64], dim: usize) -> Result<(Vec<Vec<Digit>>, Digit), String> {
        let runs = Self::cut(&self.digits, shape).ok_or("it lies across its shards")?;
        match runs[dim][..] {
            [digit] if digit.stride == 1 => Ok((runs, digit)),
            _ => Err("its elements do not lie one behind the other".to_string()),
        }
    }

    /// After the zeros behind the elements of a dimension of the buffer, which has this shape, are cut off; `whole` is the
    /// value's global shape.
    pub fn trimmed(&self, shape: &[u64], (dim, size): (usize, u64), whole: &[u64]) -> Result<Self, String> {
        let (mut runs, digit) = self.along(shape, dim)?;
        if self.room(digit, whole) != size {
            return Err(format!("{size} are not all that its dimension has here"));
        }
        runs[dim] = vec![Digit { size, ..digit }];
        Ok(Self { digits: runs.concat(), ..self.clone() }.canonical())
    }

    /// After zeros are put behind all elements of a dimension of the buffer, which has this shape; `whole` is the value's
    /// global shape. The terms of a sum may have such zeros.
    pub fn filled(&self, shape: &[u64], (dim, size): (usize, u64), whole: &[u64]) -> Result<Self, String> {
        let (mut runs, digit) = self.along(shape, dim)?;
        if self.room(digit, whole) != digit.size {
            return Err("its dimension goes on behind it, or ends before".to_string());
        }
        if let Some((_, kind)) = self.partial.iter().find(|(_, kind)| *kind != ReduceKind::Sum) {
            return Err(format!("zeros are not neutral for its terms, which combine by {}", kind.name()));
        }
        runs[dim] = vec![Digit { size, ..digit }];
        Ok(Self { digits: runs.concat(), ..self.clone() }.canonical())
    }

    /// After a transpose of the buffer, which has this shape.
    pub fn transposed(&self, shape: &[u64], permutation: &[usize]) -> Result<Self, String> {
        let runs = Self::cut(&self.digits, shape).ok_or("the transpose cuts across its shards")?;
        let digits = permutation.iter().flat_map(|dim| runs[*dim].iter().copied()).collect();
        Ok(Self { digits, ..self.clone() }.canonical())
    }

    /// The text of what a rank holds: per dimension of the value its axes, then the partial axes, and
    /// how the elements lie if not in their order.
    pub fn text(&self, shape: &[u64], mesh: &Mesh) -> String {
        let mut dims: Vec<String> = Vec::with_capacity(shape.len());
        for (dim, size) in shape.iter().enumerate() {
            let mut axes: Vec<_> = self.spread.iter().filter(|(_, other, _)| *other == dim).collect();
            axes.sort_by_key(|(_, _, stride)| std::cmp::Reverse(*stride));
            let names: Vec<_> = axes.iter().map(|(axis, ..)| mesh.axis(*axis).name()).collect();
            let at = if names.is_empty() { "" } else { "@" };
            dims.push(format!("{size}{at}{}", names.join(".")));
        }
        let sharding = Sharding { dims: Vec::new(), partial: self.partial.clone() };
        let ordered =
            self.digits.iter().all(|digit| digit.stride == 1) && self.digits.is_sorted_by_key(|digit| digit.dim);
        let order = if ordered { "" } else { " in another order" };
        format!("[{}]{}{order}", dims.join(","), sharding.partial_text(mesh))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Family;

    #[test]
    fn collectives_around_an_inner_dimension_lead_to_the_layout_they_are_for() {
        let mut mesh = Mesh::default();
        let (dp, tp) = (mesh.push(Family::Data, 2), mesh.push(Family::Tensor, 3));
        let shape = [4, 6, 5];
        let layout = |dims: [&[AxisId]; 3], partial: &[AxisId]| {
            let mut sharding = Sharding { dims: dims.iter().map(|axes| axes.to_vec()).collect(), partial: Vec::new() };
            partial.iter().for_each(|axis| sharding.add_partial(*axis, ReduceKind::Sum));
            Arrangement::of(&shape, &sharding, &mesh)
        };
        let both = layout([&[], &[dp, tp], &[]], &[]);
        // A stack of 3 parts of [4, 1, 5] becomes [4, 3, 5].
        let stacked = both.gathered(&[tp], &mesh).unwrap();
        assert_eq!(stacked.text(&shape, &mesh), "[4,6@dp,5] in another order");
        assert_eq!(stacked.transposed(&[3, 4, 5], &[1, 0, 2]).unwrap(), layout([&[], &[dp], &[]], &[]));
        // Only the innermost axis of a dimension can be gathered into one piece.
        let outer = both.gathered(&[dp], &mesh).unwrap();
        assert_ne!(outer.transposed(&[2, 4, 5], &[1, 0, 2]).unwrap(), layout([&[], &[tp], &[]], &[]));

        let sum = layout([&[dp], &[], &[]], &[tp]);
        let scattered = sum.transposed(&[2, 3, 10], &[1, 0, 2]).unwrap().scattered(&[tp], ReduceKind::Sum, &mesh);
        assert_eq!(scattered.unwrap(), layout([&[dp], &[tp], &[]], &[]));
        assert!(sum.scattered(&[tp], ReduceKind::Sum, &mesh).is_err(), "2 rows do not divide into 3 parts");
        assert!(sum.reduced(&[dp], ReduceKind::Sum, &mesh).is_err());
        assert!(sum.reduced(&[tp], ReduceKind::Max, &mesh).is_err());

        let rows = layout([&[dp], &[tp], &[]], &[]);
        let moved = layout([&[], &[tp, dp], &[]], &[]);
        let exchanged = rows.transposed(&[2, 2, 5], &[1, 0, 2]).unwrap().exchanged(&[dp], &mesh).unwrap();
        assert_eq!(exchanged, moved);
        assert!(moved.sliced(&[4, 1, 5], 0, &[dp], &mesh).is_err(), "it is divided over dp already");
        let whole = layout([&[], &[], &[]], &[]);
        assert_eq!(whole.sliced(&shape, 1, &[tp], &mesh).unwrap(), layout([&[], &[tp], &[]], &[]));
        assert_eq!(whole.isolated(dp, &mesh).unwrap(), layout([&[], &[], &[]], &[dp]));
    }

    #[test]
    fn zeros_behind_uneven_parts_are_cut_off_and_put_there_where_a_dimension_ends_alone() {
        let mut mesh = Mesh::default();
        let (tp, dp) = (mesh.push(Family::Tensor, 2), mesh.push(Family::Data, 3));
        let shape = [16, 5];
        let layout = |dims: [&[AxisId]; 2], partial: &[AxisId]| {
            let mut sharding = Sharding { dims: dims.iter().map(|axes| axes.to_vec()).collect(), partial: Vec::new() };
            partial.iter().for_each(|axis| sharding.add_partial(*axis, ReduceKind::Sum));
            Arrangement::of(&shape, &sharding, &mesh)
        };
        let (stored, read) = (layout([&[tp, dp], &[]], &[]), layout([&[tp], &[]], &[]));
        // 8 rows of a tensor rank are 3 + 3 + 2.
        let gathered = stored.gathered(&[dp], &mesh).unwrap();
        assert_ne!(gathered, read);
        assert_eq!(gathered.trimmed(&[9, 5], (0, 8), &shape).unwrap(), read);
        assert!(gathered.trimmed(&[9, 5], (0, 7), &shape).is_err(), "an element is lost");
        assert!(gathered.gathered(&[tp], &mesh).unwrap().trimmed(&[18, 5], (0, 16), &shape).is_err(), "zeros between");
        let term = layout([&[tp], &[]], &[dp]);
        let filled = term.filled(&[8, 5], (0, 9), &shape).unwrap();
        assert_eq!(filled.scattered(&[dp], ReduceKind::Sum, &mesh).unwrap(), stored);
        assert!(filled.filled(&[9, 5], (0, 12), &shape).is_err(), "it is filled already");
        assert!(term.scattered(&[dp], ReduceKind::Sum, &mesh).is_err(), "8 rows do not divide into 3 parts");
        // All ranks together: 16 rows are 5 times 3, and 1.
        let (together, copies) = (layout([&[dp, tp], &[]], &[]), layout([&[], &[]], &[]));
        let gathered = together.gathered(&[dp, tp], &mesh).unwrap();
        assert_eq!(gathered.trimmed(&[18, 5], (0, 16), &shape).unwrap(), copies);
        let filled = copies.filled(&shape, (0, 18), &shape).unwrap();
        assert_eq!(filled.sliced(&[18, 5], 0, &[dp, tp], &mesh).unwrap(), together);
        let max = Arrangement { partial: vec![(dp, ReduceKind::Max)], ..term };
        assert!(max.filled(&[8, 5], (0, 9), &shape).is_err(), "zero may be the largest");
    }
}
