//! The peak of memory for any choice of what is computed again.
//!
//! What is held changes with that choice at few positions: behind the last reader of the forward pass, where the backward
//! pass of a block starts, and behind what is then read for the last time. The nodes from one of these to the next are a
//! *piece*; the pieces are the same for all meshes. Of each the most that is held while nothing is computed again is found
//! once, in a [`Profile`]. Computing a block again [moves](Moves) where the lives of what depends on it begin and end,
//! whatever the other blocks do. So the peak of a choice is found in a walk over the pieces alone, to which the moves of
//! its blocks are added.

use super::{Gradient, Gradients, Life, Liveness, Lives, Peak, Run, again};
use crate::search::estimate::copies::{Keeping, Lived};
use crate::search::estimate::recompute::Selected;
use crate::threads::lock;
use std::collections::BTreeSet;

/// What depends on a block's being computed again, by its places in the lists.
#[derive(Clone, Debug, Default)]
struct Dependents {
    lives: Vec<usize>,
    copies: Vec<usize>,
    runs: Vec<usize>,
}

impl Dependents {
    fn is_empty(&self) -> bool {
        self.lives.is_empty() && self.copies.is_empty() && self.runs.is_empty()
    }
}

/// The positions of a microbatch in pieces, within which what is held changes alike whatever is computed again.
#[derive(Debug, Default)]
pub struct Pieces {
    /// Where each begins.
    starts: Vec<usize>,
    /// The piece of each position; that behind the last ends all.
    of: Vec<usize>,
    /// What depends on each block alone.
    by_block: Vec<Dependents>,
    /// What depends on several.
    shared: Dependents,
}

impl Pieces {
    /// Cuts the positions.
    pub fn new(lives: &Lives) -> Self {
        let mut turns = BTreeSet::from([0]);
        let mut own = Self { by_block: vec![Dependents::default(); lives.backward.len()], ..Self::default() };
        for (index, life) in lives.lives.iter().enumerate() {
            turns.extend(life.turns(lives));
            own.dependents(lives, life.blocks()).into_iter().for_each(|of| of.lives.push(index));
        }
        for (index, copy) in lives.copies().all().iter().enumerate() {
            turns.extend(copy.turns(lives.copies()));
            own.dependents(lives, copy.blocks()).into_iter().for_each(|of| of.copies.push(index));
        }
        for (index, run) in lives.runs.iter().enumerate() {
            // What is computed again, with its scratch memory, counts where the backward pass starts.
            let start = run.block.and_then(|block| lives.start(block));
            turns.extend(start.into_iter().flat_map(|start| [start, start + 1]));
            own.dependents(lives, run.block.into_iter()).into_iter().for_each(|of| of.runs.push(index));
        }
        own.starts = turns.into_iter().filter(|start| *start <= lives.positions).collect();
        own.of = (0..=lives.positions).map(|at| own.starts.partition_point(|start| *start <= at) - 1).collect();
        own.of.push(own.starts.len());
        own
    }

    /// The list that belongs to all of some blocks, if there are any that have a backward pass.
    fn dependents(&mut self, lives: &Lives, blocks: impl Iterator<Item = u64>) -> Option<&mut Dependents> {
        let mut blocks = blocks.filter(|block| lives.start(*block).is_some());
        let first = blocks.next()?;
        match blocks.all(|block| block == first) {
            true => self.by_block.get_mut(first as usize),
            false => Some(&mut self.shared),
        }
    }
}

/// By how much what is held changes at a piece and behind it, and which scratch memory is needed there.
#[derive(Debug, Default)]
struct Moves {
    held: Vec<(usize, i64)>,
    scratch: Option<(usize, u64)>,
}

impl Moves {
    /// Those of values and scratch memory that depend on what is selected.
    fn of_values(liveness: &Liveness<'_>, dependents: &Dependents, selected: &Selected<'_>) -> Self {
        let (lives, none) = (liveness.of, Selected::default());
        let (mut changes, mut made) = (Changes::default(), Again::default());
        for life in dependents.lives.iter().map(|index| &lives.lives[*index]) {
            let [now, before] = [selected, &none].map(|selected| liveness.held(life, selected));
            if now == before {
                continue;
            }
            let spans = |held: Held| held.into_iter().filter_map(|(bytes, span)| Some((bytes, span?)));
            spans(before).for_each(|(bytes, (from, to))| changes.add(-(bytes as i64), from, to));
            let start = life.made_again(lives, selected);
            for (bytes, (from, to)) in spans(now) {
                if start == Some(from) {
                    made.make(life, bytes, to > from);
                }
                if start != Some(from) || to > from {
                    changes.add(bytes as i64, from, to);
                }
            }
        }
        let mut turn = None;
        for Run { class, block, position } in dependents.runs.iter().map(|index| &lives.runs[*index]) {
            let start = block.and_then(|block| again(lives, selected, block, *class));
            if start.is_some() {
                turn = start;
                made.scratch.push((*position, liveness.scratch[*class]));
            }
        }
        let scratch = turn.map(|start| (lives.pieces.of[start], made.beside()));
        Self { scratch, ..changes.moves(&lives.pieces) }
    }

    /// Those of copies of parameters that are kept like this.
    fn of_copies(
        liveness: &Liveness<'_>,
        dependents: &Dependents,
        selected: &Selected<'_>,
        keeping: Keeping<'_>,
    ) -> Self {
        let (lives, none) = (liveness.of, Selected::default());
        let mut changes = Changes::default();
        for copy in dependents.copies.iter().map(|index| &lives.copies().all()[*index]) {
            for (sign, selected) in [(1, selected), (-1, &none)] {
                let mut each = |lived: Lived| changes.add(sign * lived.bytes as i64, lived.from, lived.to);
                copy.lived(lives.copies(), &liveness.sizes, selected, keeping, &mut each);
            }
        }
        changes.moves(&lives.pieces)
    }
}

/// What is held of a value, and of its copy.
type Held = [(u64, Option<(usize, usize)>); 4];

/// What a block makes again, in the order of its forward pass, by whose positions it is: all of it runs where the block's
/// backward pass starts.
#[derive(Debug, Default)]
struct Again {
    /// What is made, and what ends with its last reader there.
    changes: Vec<(usize, i64)>,
    /// What the backward pass reads of it.
    lasting: i64,
    scratch: Vec<(usize, u64)>,
}

impl Again {
    /// Adds bytes of a value, which the backward pass reads or not.
    fn make(&mut self, life: &Life, bytes: u64, is_lasting: bool) {
        self.changes.push((life.made, bytes as i64));
        if is_lasting {
            self.lasting += bytes as i64;
            return;
        }
        // What is written in its place counts for it.
        let end = life.last_forward + usize::from(life.given != Some(life.last_forward));
        self.changes.push((end.max(life.made + 1), -(bytes as i64)));
    }

    /// The most that is held while it runs beside all that lasts, scratch memory included.
    fn beside(mut self) -> u64 {
        self.changes.sort_unstable();
        self.scratch.sort_unstable();
        let mut scratch = self.scratch.iter().peekable();
        let (mut held, mut most) = (0, 0);
        for (at, position) in self.changes.iter().enumerate() {
            held += position.1;
            // Of what changes at one position, what ends comes first.
            let next = self.changes.get(at + 1).map_or(usize::MAX, |next| next.0);
            if next == position.0 {
                continue;
            }
            let mut beside = 0;
            while let Some((_, bytes)) = scratch.next_if(|(run, _)| *run < next) {
                beside = beside.max(*bytes as i64);
            }
            most = most.max(held + beside - self.lasting);
        }
        most.max(0) as u64
    }
}

/// Positions at which what is held changes, and by how many bytes.
#[derive(Debug, Default)]
struct Changes(Vec<(usize, i64)>);

impl Changes {
    /// Adds bytes from one position to another.
    fn add(&mut self, bytes: i64, from: usize, to: usize) {
        self.0.extend([(from, bytes), (to + 1, -bytes)]);
    }

    /// Their sums, by pieces.
    fn moves(mut self, pieces: &Pieces) -> Moves {
        self.0.sort_unstable_by_key(|(position, _)| *position);
        let mut moves = Moves::default();
        for at in self.0.chunk_by(|a, b| a.0 == b.0) {
            let (position, bytes) = (at[0].0, at.iter().map(|(_, bytes)| bytes).sum::<i64>());
            if bytes != 0 {
                let piece = pieces.of[position];
                debug_assert!(pieces.starts.get(piece).is_none_or(|start| *start == position));
                moves.held.push((piece, bytes));
            }
        }
        moves
    }
}

/// Per block, the moves of the ways in which it was computed again.
#[derive(Debug, Default)]
pub struct Known(Vec<Vec<(usize, Moves)>>);

impl Known {
    /// The moves of a block and a way, which are found if they are not known.
    fn get(&mut self, (block, way): (usize, usize), find: impl FnOnce() -> Moves) -> &Moves {
        if self.0.len() <= block {
            self.0.resize_with(block + 1, Vec::new);
        }
        let known = &mut self.0[block];
        let index = known.iter().position(|(of, _)| *of == way).unwrap_or_else(|| {
            known.push((way, find()));
            known.len() - 1
        });
        &known[index].1
    }
}

/// What is held in each piece while nothing is computed again, and what changes if blocks are.
#[derive(Debug)]
pub struct Profile {
    /// Per piece, where the most is held for the first time, scratch memory included: what is held beside that.
    held: Vec<i64>,
    /// That scratch memory.
    scratch: Vec<u64>,
    /// Where that is.
    at: Vec<usize>,
    /// The bytes of gradients that stay beside the sums, or wait to be reduced, up to there.
    gradients: Vec<u64>,
    /// Those of scratch memory of collectives.
    staging: Vec<u64>,
    /// The moves of copies of parameters.
    copies: Known,
}

/// Bytes of collectives that add gradients.
struct Staging {
    /// Scratch memory of sums between nodes, which may be anywhere.
    sums: u64,
    /// The most scratch memory that reductions need beside that.
    reductions: u64,
    /// The most of gradients that wait to be reduced.
    waiting: u64,
}

impl Liveness<'_> {
    /// What is held beside the sums of gradients. Copies of parameters that are not there all the time live as they are
    /// kept.
    pub fn profile(&self, of: Gradients, keeping: Option<Keeping<'_>>) -> Profile {
        let Lives { lives, gradients, runs, positions, pieces, .. } = self.of;
        let none = Selected::default();
        // Per position, the change of what is held, and the scratch memory beside it.
        let (mut change, mut scratch) = (vec![0i64; positions + 2], vec![0u64; positions + 1]);
        let mut add = |bytes: u64, from: usize, to: usize| {
            change[from] += bytes as i64;
            change[to + 1] -= bytes as i64;
        };
        for life in lives.iter().filter(|life| !(life.is_term && of.is_in_place(true))) {
            for (bytes, span) in self.held(life, &none) {
                span.into_iter().for_each(|(from, to)| add(bytes, from, to));
            }
        }
        let Staging { sums, reductions, waiting } = self.staging(of);
        add(sums, 0, *positions);
        // Behind what has been made of gradients so far, as much waits and is reduced as there is.
        let size = |gradient: &Gradient| self.sizes[gradient.class][gradient.result];
        let kept = |gradient: &Gradient| (size(gradient) as f64 * of.kept()) as u64;
        let mut made = 0;
        for gradient in gradients {
            let before = made;
            made += size(gradient);
            for most in [reductions, waiting] {
                add(made.min(most) - before.min(most), gradient.made + 1, *positions);
            }
            add(kept(gradient), gradient.made, *positions);
            // It is whole where it is made.
            let is_part = of.is_parted() && self.in_parts.contains(&gradient.class);
            let whole = if is_part || of.is_in_place(gradient.adds_itself) { 0 } else { 1 };
            let (begin, terms) = self.terms(gradient);
            let bytes = terms * whole * size(gradient);
            if begin < gradient.made {
                add(bytes, begin, gradient.made - 1);
            }
            // What ranks reduce to parts is whole until then, when what it was made of is not there any more.
            let end = gradient.made + usize::from(of.is_reduced() && whole > 0);
            add(bytes.saturating_sub(kept(gradient)), gradient.made, end);
        }
        for (copy, keeping) in keeping.iter().flat_map(|keeping| self.of.copies().all().iter().map(|of| (of, *keeping)))
        {
            copy.lived(self.of.copies(), &self.sizes, &none, keeping, &mut |of| add(of.bytes, of.from, of.to));
        }
        for run in runs {
            scratch[run.position] = self.scratch[run.class].max(scratch[run.position]);
        }
        let mut profile = Profile::new(pieces, &change, &scratch);
        let [mut staying, mut behind] = [gradients.iter().peekable(), gradients.iter().peekable()];
        let (mut sum, mut made) = (0, 0);
        for at in &profile.at {
            while let Some(gradient) = staying.next_if(|gradient| gradient.made <= *at) {
                sum += kept(gradient);
            }
            while let Some(gradient) = behind.next_if(|gradient| gradient.made < *at) {
                made += size(gradient);
            }
            profile.gradients.push(sum + made.min(waiting));
            profile.staging.push(sums + made.min(reductions));
        }
        profile
    }

    /// From where on a gradient, or what there is of it, lives as it is made, and how many of its size that is: where the
    /// head is in chunks it is added up while they go by, and a term that does not add itself is there beside the sum.
    pub(in crate::search) fn terms(&self, gradient: &Gradient) -> (usize, u64) {
        let (classes, begin) = &self.in_terms;
        match classes.contains(&gradient.class) {
            true => (*begin, if gradient.adds_itself { 1 } else { 2 }),
            false => (gradient.made, 1),
        }
    }

    /// What collectives that add take beside what they add.
    fn staging(&self, of: Gradients) -> Staging {
        let ([sums, whole, others], [once, in_loop]) = (self.staging, self.waiting);
        let (most, waiting) = match of {
            Gradients::Kept(_) if of.is_parted() => (others, once),
            Gradients::Kept(_) => (whole, 0),
            Gradients::Added { is_reduced: true } => (whole, in_loop),
            Gradients::Added { is_reduced: false } => (0, 0),
        };
        Staging { sums, reductions: most.saturating_sub(sums), waiting }
    }
}

impl Profile {
    fn new(pieces: &Pieces, change: &[i64], scratch: &[u64]) -> Self {
        let count = pieces.starts.len();
        let mut own = Self {
            held: vec![i64::MIN; count],
            scratch: vec![0; count],
            at: vec![0; count],
            gradients: Vec::with_capacity(count),
            staging: Vec::with_capacity(count),
            copies: Known::default(),
        };
        let mut held = 0;
        for (position, (change, scratch)) in change.iter().zip(scratch).enumerate() {
            held += change;
            let piece = pieces.of[position];
            if own.held[piece] == i64::MIN || held + *scratch as i64 > own.held[piece] + own.scratch[piece] as i64 {
                (own.held[piece], own.scratch[piece], own.at[piece]) = (held, *scratch, position);
            }
        }
        own
    }

    /// The most bytes that live at one time, if what is selected is computed again. `liveness` and `keeping` are those of
    /// the profile.
    pub fn peak(&mut self, liveness: &Liveness<'_>, selected: &Selected<'_>, keeping: Option<Keeping<'_>>) -> Peak {
        let Lives { pieces, .. } = liveness.of;
        let (mut change, mut scratch) = (vec![0i64; self.held.len() + 1], self.scratch.clone());
        let mut apply = |moves: &Moves| {
            moves.held.iter().for_each(|(piece, bytes)| change[*piece] += bytes);
            moves.scratch.iter().for_each(|(piece, bytes)| scratch[*piece] = scratch[*piece].max(*bytes));
        };
        let mut values = lock(&liveness.known);
        for of in selected.chosen() {
            let Some(dependents) = pieces.by_block.get(of.0) else { continue };
            apply(values.get(of, || Moves::of_values(liveness, dependents, selected)));
            if let Some(keeping) = keeping {
                apply(self.copies.get(of, || Moves::of_copies(liveness, dependents, selected, keeping)));
            }
        }
        if !selected.is_empty() && !pieces.shared.is_empty() {
            apply(&Moves::of_values(liveness, &pieces.shared, selected));
            keeping.iter().for_each(|keeping| apply(&Moves::of_copies(liveness, &pieces.shared, selected, *keeping)));
        }
        let (mut moved, mut most) = (0i64, (0, 0));
        for (piece, ((held, change), scratch)) in self.held.iter().zip(&change).zip(&scratch).enumerate() {
            moved += change;
            let total = (held + moved).max(0) as u64 + scratch;
            if total > most.0 {
                most = (total, piece);
            }
        }
        let (total, piece) = most;
        let (at, scratch, gradients, staging) =
            (self.at[piece], scratch[piece], self.gradients[piece], self.staging[piece]);
        let (mut copies, mut gathered, mut ordered) = (0, 0, 0);
        let kept = keeping.iter().flat_map(|keeping| liveness.of.copies().all().iter().map(|of| (of, *keeping)));
        for (copy, keeping) in kept.filter(|(copy, keeping)| copy.may_live(at, *keeping)) {
            copy.lived(liveness.of.copies(), &liveness.sizes, selected, keeping, &mut |lived: Lived| {
                if lived.from <= at && at <= lived.to {
                    *(if lived.is_dropped { &mut gathered } else { &mut copies }) += lived.bytes;
                    ordered = if lived.is_ordered { lived.bytes.max(ordered) } else { ordered };
                }
            });
        }
        let activations = (total - scratch).saturating_sub(gradients + gathered + copies + staging);
        Peak { activations, gradients, scratch: scratch + staging, copies, gathered: gathered + ordered }
    }
}
