//! Values that are cut as wholes, wholes as chunks, and chunks in the layouts in which they are read.

use super::{Cutting, Known, Phase, Place, Reader, Stop};
use crate::reshard::{normalize, path, rough_cost};
use shardc_ir::ops::{Concat, Reshape, Slice};
use shardc_ir::{NodeId, Role, Sharding, ValueId};

impl Cutting<'_> {
    /// How a value of the new graph is made.
    pub(super) fn made_as(&self, value: ValueId) -> Sharding {
        let value = self.to.graph.value(value);
        let (rule, strategy) = (self.to.graph.rule(value.def), &self.to.strategies[value.def]);
        normalize(&rule.result_sharding(value.index, &rule.unrolled(strategy)), self.step.mesh)
    }

    /// One chunk of a value, in the layout in which it is read.
    pub(super) fn chunk(&mut self, value: ValueId, dim: usize, chunk: usize, reader: &Reader) -> Result<ValueId, Stop> {
        match self.known[&value].clone() {
            Known::Cut(known, parts) if known == dim => {
                self.hand_on(parts[chunk], (chunk as u64, self.kept[value]), reader)
            }
            Known::Cut(..) => {
                let whole = self.whole(value, reader)?;
                self.part(whole, dim, (chunk, self.kept[value]), reader)
            }
            Known::Whole(whole) => self.part(whole, dim, (chunk, self.kept[value]), reader),
        }
    }

    /// A value of the new graph in a layout, handed on behind its maker if ranks communicate for it.
    fn hand_on(&mut self, value: ValueId, (chunk, kept): (u64, bool), reader: &Reader) -> Result<ValueId, Stop> {
        let (made, mesh) = (self.made_as(value), self.step.mesh);
        let ty = self.to.graph.ty(value).clone();
        let steps = path(&ty, &made, &reader.layout, mesh, &|step, local| rough_cost(step, local, mesh));
        if !steps.is_some_and(|steps| steps.iter().any(|step| !step.group_axes().is_empty())) {
            return Ok(value);
        }
        let own = Phase::of(reader.role);
        let key = |phase: Phase| (reader.laid(value), phase);
        let shared: &[Phase] = match (own, kept) {
            (Phase::Forward, _) | (_, false) => &[Phase::Forward, Phase::Recompute, Phase::Backward],
            (Phase::Recompute, true) => &[Phase::Recompute],
            (Phase::Backward, true) => &[Phase::Recompute, Phase::Backward],
        };
        if let Some(known) = shared.iter().find_map(|phase| self.handed.get(&key(*phase))) {
            return Ok(*known);
        }
        // What is handed on again is a recomputation of what was handed on first.
        let first = self.handed.get(&key(Phase::Forward)).map(|first| self.to.graph.value(*first).def);
        let role = match (own, first) {
            (Phase::Recompute, Some(first)) => Role::Recompute(first),
            (Phase::Recompute, None) => self.recomputed(value, reader).ok_or(Stop::Uncut)?,
            _ => reader.role,
        };
        let reader = Reader { role, ..reader.of(reader.layout.clone()) };
        let place = Place { hands_on: true, ..Place::of(Some(chunk)) };
        let handed = self.add(Reshape {}, &[value], std::slice::from_ref(&ty), &reader, (place, false))?;
        self.handed.insert(key(own), handed);
        Ok(handed)
    }

    /// The role of handing on a value that is computed again: that of its first.
    fn recomputed(&self, value: ValueId, reader: &Reader) -> Option<Role> {
        let (graph, made) = (&self.to.graph, self.to.graph.value(value));
        let Role::Recompute(of) = graph.node(made.def).role else { return None };
        let first = *graph.node(of).results.get(made.index)?;
        let handed = self.handed.get(&(reader.laid(first), Phase::Forward))?;
        Some(Role::Recompute(graph.value(*handed).def))
    }

    /// A value that is in chunks as a whole, in the layout in which it is read.
    pub(super) fn whole(&mut self, value: ValueId, reader: &Reader) -> Result<ValueId, Stop> {
        let (dim, parts) = match self.known[&value].clone() {
            Known::Whole(whole) => return Ok(whole),
            Known::Cut(dim, parts) => (dim, parts),
        };
        let (kept, own) = (self.kept[value], Phase::of(reader.role));
        let reader = &self.uncut(reader, dim);
        let key = |phase: Phase| (reader.laid(value), phase);
        let shared = [own, Phase::Recompute, Phase::Forward].map(&key);
        let is_shared = |at: &usize| *at < 2 || !kept || !self.is_again(value);
        if let Some(known) = (0..shared.len()).filter(is_shared).find_map(|at| self.joined.get(&shared[at])) {
            return Ok(*known);
        }
        let twins = match (own, self.step.graph.def(value).role) {
            (Phase::Recompute, Role::Recompute(of)) => {
                let first = self.step.graph.node(of).results[self.step.graph.value(value).index];
                let first = self.joined.get(&(reader.laid(first), Phase::Forward)).ok_or(Stop::Uncut)?;
                self.made_by[first].clone()
            }
            (Phase::Recompute, _) => return Err(Stop::Uncut),
            _ => Vec::new(),
        };
        let whole = self.step.graph.ty(value).clone();
        let mut all = Vec::with_capacity(parts.len());
        for (chunk, part) in parts.iter().enumerate() {
            all.push(self.hand_on(*part, (chunk as u64, kept), reader)?);
        }
        self.begin(twins);
        let mut ordered = Vec::with_capacity(all.len());
        for (chunk, part) in all.into_iter().enumerate() {
            for part in self.exchanged(part, dim, (chunk as u64, Place::default()), reader)? {
                ordered.push(self.see_parts(part, dim, reader)?);
            }
        }
        let split = reader.of(split_layout(&reader.layout, dim));
        let joined = self.add(Concat { dim: dim + 1 }, &ordered, &[], &split, (Place::default(), false))?;
        let joined = self.add(Reshape {}, &[joined], &[whole], &split, (Place::default(), true))?;
        self.made_by.insert(joined, std::mem::take(&mut self.added));
        self.joined.insert(key(own), joined);
        Ok(joined)
    }

    /// Begins nodes that belong together; they are computed again of `twins`, if there are any.
    fn begin(&mut self, twins: Vec<NodeId>) {
        self.added.clear();
        self.twins = twins.into();
    }

    /// Whether a value of the old graph is one that is computed again.
    fn is_again(&self, value: ValueId) -> bool {
        matches!(self.step.graph.def(value).role, Role::Recompute(_))
    }

    /// What reads a value whole along `dim`, unless all chunks are divided alike.
    fn uncut(&self, reader: &Reader, dim: usize) -> Reader {
        let mut layout = reader.layout.clone();
        if self.step.parts == 1 {
            layout.dims[dim].clear();
        }
        reader.of(layout)
    }

    /// A value with the batch, along `dim`, as parts and samples of a part.
    fn see_parts(&mut self, value: ValueId, dim: usize, reader: &Reader) -> Result<ValueId, Stop> {
        let ty = self.to.graph.ty(value);
        let mut shape = ty.shape.clone();
        shape[dim] /= self.step.parts;
        shape.insert(dim, self.step.parts);
        let ty = ty.with_shape(shape);
        let split = reader.of(split_layout(&reader.layout, dim));
        self.add(Reshape {}, &[value], &[ty], &split, (Place::default(), false))
    }

    /// The parts of a chunk of a value in the other order, if it is one of those whose parts are reversed; the chunk itself
    /// otherwise. Whoever reads it reads all of it.
    fn exchanged(
        &mut self,
        value: ValueId,
        dim: usize,
        (chunk, place): (u64, Place),
        reader: &Reader,
    ) -> Result<Vec<ValueId>, Stop> {
        if !self.is_reversed(chunk) {
            return Ok(vec![value]);
        }
        let (shape, parts) = (self.to.graph.ty(value).shape.clone(), self.step.reversed);
        if !shape[dim].is_multiple_of(parts) || !reader.layout.dims[dim].is_empty() {
            return Err(Stop::Uncut);
        }
        let length = shape[dim] / parts;
        let part = |index: u64| {
            let (mut start, mut limit) = (vec![0; shape.len()], shape.clone());
            (start[dim], limit[dim]) = (index * length, (index + 1) * length);
            self.add(Slice { start, limit }, &[value], &[], reader, (place, false))
        };
        (0..parts).rev().map(part).collect()
    }

    /// One chunk of a value of the new graph. Where ranks divide the chunk, it is cut as the value lies, and handed on.
    fn part(
        &mut self,
        whole: ValueId,
        dim: usize,
        (chunk, kept): (usize, bool),
        reader: &Reader,
    ) -> Result<ValueId, Stop> {
        if self.step.parts > 1 || reader.layout.dims[dim].is_empty() {
            return Ok(self.slices(whole, dim, reader)?[chunk]);
        }
        let lying = self.uncut(&reader.of(self.made_as(whole)), dim);
        let part = self.slices(whole, dim, &lying)?[chunk];
        self.hand_on(part, (chunk as u64, kept), reader)
    }

    /// The chunks of a value of the new graph in the layout in which it is read, which ranks divide as they do the whole.
    fn slices(&mut self, whole: ValueId, dim: usize, reader: &Reader) -> Result<Vec<ValueId>, Stop> {
        let key = (reader.laid(whole), dim);
        if let Some(parts) = self.slices.get(&key) {
            return Ok(parts.clone());
        }
        let twins = match (Phase::of(reader.role), self.to.graph.def(whole).role) {
            (Phase::Recompute, Role::Recompute(of)) => {
                let first = self.to.graph.node(of).results[self.to.graph.value(whole).index];
                let first = self.slices.get(&(reader.laid(first), dim)).and_then(|parts| parts.last());
                self.made_by[first.ok_or(Stop::Uncut)?].clone()
            }
            (Phase::Recompute, _) => return Err(Stop::Uncut),
            _ => Vec::new(),
        };
        self.begin(twins);
        let split = reader.of(split_layout(&reader.layout, dim));
        let seen = self.see_parts(whole, dim, reader)?;
        let shape = self.to.graph.ty(seen).shape.clone();
        let length = shape[dim + 1] / self.chunks;
        let ty = self.to.graph.ty(whole).clone();
        let mut own = ty.shape.clone();
        own[dim] /= self.chunks;
        let mut parts = Vec::new();
        for index in 0..self.chunks {
            let (mut start, mut limit) = (vec![0; shape.len()], shape.clone());
            (start[dim + 1], limit[dim + 1]) = (index * length, (index + 1) * length);
            let place = Place::of(Some(index));
            let part = self.add(Slice { start, limit }, &[seen], &[], &split, (place, false))?;
            let part = self.add(Reshape {}, &[part], &[ty.with_shape(own.clone())], &split, (place, true))?;
            parts.push(match &self.exchanged(part, dim, (index, place), reader)?[..] {
                [part] => *part,
                parts => self.add(Concat { dim }, parts, &[], reader, (place, false))?,
            });
        }
        self.made_by.extend(parts.last().map(|last| (*last, std::mem::take(&mut self.added))));
        self.slices.insert(key, parts.clone());
        Ok(parts)
    }
}

/// The layout with a dimension seen as its parts and what is in one.
fn split_layout(layout: &Sharding, dim: usize) -> Sharding {
    let mut split = layout.clone();
    split.dims.insert(dim + 1, Vec::new());
    split
}
