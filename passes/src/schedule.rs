//! The schedule: collectives merged into buckets, gathers of weights issued ahead.
//!
//! Lowering emits instructions in the order of the graph, each collective where its operand is ready (reductions) or
//! needed (gathers). Collectives go over the wire in the order of issue. Here
//!
//! * the gathers of weights of one block become one instruction, issued when the block before begins to use its own, so
//!   that it runs beside that block (the prefetch of Zhao et al., "PyTorch FSDP", 2023, section 3.3.2), or with those
//!   of that block if it has little to hide them; a collective there that kernels wait for at once goes first;
//! * reductions for the optimizer wait for others until there are enough bytes for one collective (the buckets of Li et
//!   al., "PyTorch Distributed", 2020, section 3.2.3); what is added up from a bucket, or cut from it first, is added
//!   when some more have closed, so that kernels go on while buckets are reduced;
//! * a reduction is issued as soon as its operand is made ([`mod@ready`]), as one with those of small values that are
//!   made there as well;
//! * a collective that kernels wait for goes before buckets of gradients, which nothing waits for until the update;
//! * what rearranges the result of a collective waits for its first reader ([`mod@sink`]).
//!
//! Invariants: an instruction never passes one that touches the same bytes, unless both only read; the result depends
//! on nothing that differs between ranks.

mod ready;
mod sink;

use crate::cost::is_product;
use crate::lower::draft::{Draft, Hint, Item, Place, StorageId};
use crate::lower::early::is_small;
use shardc_ir::program::{Action, Stream};
use shardc_ir::{BufferId, DType, Op, ReduceKind};
use sink::sink;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

/// The bytes of the operands of a bucket at which it is closed.
pub(crate) const BUCKET_BYTES: u64 = 32 << 20;
/// Weights of a block that have less than this share of the bytes of the next block's do not hide their gather.
pub(crate) const SMALL: f64 = 0.1;
/// How many closed buckets may be on the wire before kernels wait for the first of them.
const LATE: usize = 4;
/// A bucket that closes so many products or fewer before a collective for which kernels wait goes behind it.
pub(crate) const YIELDS: usize = 1;

/// Moves and merges collectives in every section.
pub fn schedule(draft: &mut Draft) {
    let sections = draft.sections.len();
    for section in 0..sections {
        let items = std::mem::take(&mut draft.sections[section]);
        let items = merge_sums(draft, ready::advance(draft, items));
        let items = prefetch(draft, items);
        // Stages do different things outside of the loop, and meet in the same order.
        let is_free = draft.stage.is_none() || matches!(Place::of(section, sections), Place::Microbatch(_));
        let items = bucket(draft, items, is_free);
        draft.sections[section] = sink(draft, items);
    }
}

/// What may be merged with what: one kind of collective over one group.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Gather(usize),
    Reduce(ReduceKind, usize),
    Scatter(ReduceKind, usize),
}

fn kind(action: &Action) -> Option<Kind> {
    match action {
        Action::AllGather { group } => Some(Kind::Gather(*group)),
        Action::AllReduce { reduce, group } => Some(Kind::Reduce(*reduce, *group)),
        Action::ReduceScatter { reduce, group } => Some(Kind::Scatter(*reduce, *group)),
        _ => None,
    }
}

/// The kind of a collective, and the element type: numbers of one type are reduced together.
fn kind_of(draft: &Draft, item: &Item) -> Option<(Kind, DType)> {
    let operand = *item.instruction.operands.first()?;
    Some((kind(&item.instruction.action)?, draft.buffers[operand].ty.dtype))
}

/// Adds the operands and results of a collective to one of the same kind.
fn merge(into: &mut Item, item: Item) {
    into.instruction.operands.extend(item.instruction.operands);
    into.instruction.results.extend(item.instruction.results);
}

/// Makes one collective of the sums over ranks of small values that follow on each other: each alone takes as long.
fn merge_sums(draft: &Draft, items: Vec<Item>) -> Vec<Item> {
    let of = |item: &Item| {
        let is_sum = matches!(item.instruction.action, Action::AllReduce { .. }) && item.hint == Hint::None;
        kind_of(draft, item).filter(|_| is_sum && is_small(draft, &item.instruction))
    };
    let mut merged: Vec<Item> = Vec::with_capacity(items.len());
    for item in items {
        let own = of(&item);
        let is_beside = |last: &Item| own.is_some() && of(last) == own;
        let is_apart = |last: &Item| !Touched::of(draft, last).meets(&Touched::of(draft, &item));
        match merged.last_mut() {
            Some(last) if is_beside(last) && is_apart(last) => merge(last, item),
            _ => merged.push(item),
        }
    }
    merged
}

/// Issues the gathers of each block's weights where the block before has issued its own.
fn prefetch(draft: &Draft, items: Vec<Item>) -> Vec<Item> {
    let mut first: BTreeMap<u32, usize> = BTreeMap::new();
    let mut order: Vec<(usize, u32)> = Vec::new();
    for (at, item) in items.iter().enumerate() {
        if let Hint::Prefetch { block, .. } = item.hint {
            first.entry(block).or_insert_with(|| {
                order.push((at, block));
                at
            });
        }
    }
    if order.is_empty() {
        return items;
    }
    // Where each block's gathers go: to a gather of the block before, or with those if there is little to them.
    let issue = behind_others(&items, &first);
    let (mut bytes, mut is_kept): (BTreeMap<u32, u64>, BTreeMap<u32, bool>) = Default::default();
    for item in &items {
        if let Hint::Prefetch { block, is_kept: kept } = item.hint {
            let all = item.instruction.results.iter().map(|id| draft.buffers[*id].ty.bytes().0);
            *bytes.entry(block).or_default() += all.sum::<u64>();
            *is_kept.entry(block).or_insert(true) &= kept;
        }
    }
    let mut target: BTreeMap<u32, usize> = BTreeMap::new();
    for (index, (own, block)) in order.iter().enumerate() {
        let before = index.checked_sub(1).map(|before| order[before].1);
        let is_small = |before: u32| is_kept[block] && (bytes[&before] as f64) < SMALL * bytes[block] as f64;
        let to = before.map_or(*own, |before| if is_small(before) { target[&before] } else { issue[&before] });
        target.insert(*block, to.min(*own));
    }
    let writers = writers(draft, &items);
    // (position, 0 = what the gather reads, 1 = the gathers, 2 = the rest, where it stood)
    let mut keys: Vec<(usize, u8, usize)> = (0..items.len()).map(|at| (at, 2, at)).collect();
    for (at, item) in items.iter().enumerate() {
        let Hint::Prefetch { block, .. } = item.hint else { continue };
        let to = target[&block];
        if hoist(draft, &items, &writers, &mut keys, at, to) {
            keys[at] = (to, 1, at);
        }
    }
    let mut moved: Vec<(usize, Item)> = items.into_iter().enumerate().collect();
    moved.sort_by_key(|(at, _)| keys[*at]);
    merge_gathers(draft, moved)
}

/// Per block, where the weights of the next are gathered: at its first gather or, if there is a collective for its
/// kernels before its first product, at the first behind that. A long gather would hold such a collective up, which
/// has nothing to run beside.
fn behind_others(items: &[Item], first: &BTreeMap<u32, usize>) -> BTreeMap<u32, usize> {
    let mut issue = first.clone();
    // The blocks without a product so far, and whether there was a collective since the first gather.
    let mut open: BTreeMap<u32, bool> = BTreeMap::new();
    for (at, Item { instruction, hint }) in items.iter().enumerate() {
        match (hint, &instruction.action) {
            (Hint::Prefetch { block, .. }, _) if first[block] == at => _ = open.insert(*block, false),
            (Hint::Prefetch { block, .. }, _) if open.get(block) == Some(&true) => {
                issue.insert(*block, at);
                open.remove(block);
            }
            (Hint::None, Action::Compute(op)) if is_product(op) => open.clear(),
            (Hint::None, _) if instruction.stream == Stream::Communication => {
                open.values_mut().for_each(|is_met| *is_met = true);
            }
            _ => {}
        }
    }
    issue
}

/// Per storage, where it is written, in order.
fn writers(draft: &Draft, items: &[Item]) -> HashMap<StorageId, Vec<usize>> {
    let mut writers: HashMap<StorageId, Vec<usize>> = HashMap::new();
    for (at, item) in items.iter().enumerate() {
        for result in &item.instruction.results {
            writers.entry(draft.storage[*result]).or_default().push(at);
        }
    }
    writers
}

/// Moves what makes the operands of instruction `at` before position `to`, if that is possible.
fn hoist(
    draft: &Draft,
    items: &[Item],
    writers: &HashMap<StorageId, Vec<usize>>,
    keys: &mut [(usize, u8, usize)],
    at: usize,
    to: usize,
) -> bool {
    let (mut needed, mut first) = (Vec::new(), None);
    let mut open = vec![at];
    while let Some(next) = open.pop() {
        for operand in &items[next].instruction.operands {
            let written = writers.get(&draft.storage[*operand]).map_or(&[][..], Vec::as_slice);
            for writer in written.iter().copied().filter(|writer| *writer >= to && *writer < next) {
                // A gather over other ranks goes where what it reads is gathered, and behind it.
                if keys[writer] == (to, 1, writer) {
                    first = Some(first.map_or(writer, |known: usize| known.min(writer)));
                    continue;
                }
                let local = matches!(items[writer].instruction.action, Action::Compute(_));
                let is_real = |at: &&usize| !draft.is_view(&items[**at].instruction);
                if !local || written.iter().filter(is_real).count() > 1 {
                    return false;
                }
                needed.push(writer);
                open.push(writer);
            }
        }
    }
    for writer in needed {
        let key = (to, u8::from(first.is_some_and(|first| writer > first)), writer);
        if keys[writer] > key {
            keys[writer] = key;
        }
    }
    true
}

/// Merges gathers of one block and one group that follow each other, none of which reads what is gathered in between.
fn merge_gathers(draft: &Draft, items: Vec<(usize, Item)>) -> Vec<Item> {
    let mut merged: Vec<Item> = Vec::with_capacity(items.len());
    let mut run = 0;
    for (_, item) in items {
        let Hint::Prefetch { .. } = item.hint else {
            run = merged.len() + 1;
            merged.push(item);
            continue;
        };
        let same =
            |other: &Item| other.hint == item.hint && kind(&other.instruction.action) == kind(&item.instruction.action);
        let made = |other: &Item| other.instruction.results.iter().map(|id| draft.storage[*id]).collect::<Vec<_>>();
        let reads = |storage: StorageId| item.instruction.operands.iter().any(|id| draft.storage[*id] == storage);
        let is_free = |index: usize| !merged[index..].iter().flat_map(made).any(reads);
        match (run..merged.len()).find(|index| same(&merged[*index]) && is_free(*index)) {
            Some(index) => merge(&mut merged[index], item),
            None => merged.push(item),
        }
    }
    merged
}

/// The bytes that some instructions read and write.
#[derive(Clone, Default)]
struct Touched {
    reads: BTreeSet<StorageId>,
    writes: BTreeSet<StorageId>,
}

impl Touched {
    fn of(draft: &Draft, item: &Item) -> Self {
        let storages = |buffers: &[BufferId]| buffers.iter().map(|id| draft.storage[*id]).collect();
        Self { reads: storages(&item.instruction.operands), writes: storages(&item.instruction.results) }
    }

    /// Whether neither may pass the other.
    fn meets(&self, other: &Self) -> bool {
        let hits = |a: &BTreeSet<StorageId>, b: &BTreeSet<StorageId>| b.iter().any(|storage| a.contains(storage));
        hits(&self.writes, &other.reads) || hits(&self.writes, &other.writes) || hits(&self.reads, &other.writes)
    }

    fn extend(&mut self, other: &Self) {
        self.reads.extend(&other.reads);
        self.writes.extend(&other.writes);
    }
}

/// A bucket that waits for more, or has closed.
struct Bucket {
    collective: Item,
    bytes: u64,
    /// How many instructions lie before it.
    at: usize,
    /// Reductions of its results over further ranks (replicas of what it scatters), one of each kind.
    further: Vec<((Kind, DType), Item)>,
    /// What it and what follows it touch.
    touched: Touched,
    /// Accumulations, slices and casts of its results, which follow it, and what they touch.
    deferred: Vec<Item>,
    deferred_touch: Touched,
}

impl Bucket {
    /// Whether what touches these bytes may wait until the bucket has closed.
    fn may_defer(&self, item: &Touched) -> bool {
        item.writes.iter().all(|storage| !self.touched.reads.contains(storage))
    }

    /// Whether a reduction is one of the parts that this one scatters.
    fn scatters(&self, item: &Touched) -> bool {
        let is_scatter = matches!(self.collective.instruction.action, Action::ReduceScatter { .. });
        is_scatter && self.touched.meets(item) && !self.deferred_touch.meets(item) && self.may_defer(item)
    }

    /// Postpones what is done with a result until the bucket has closed.
    fn defer(&mut self, item: Item, touched: &Touched) {
        self.touched.extend(touched);
        self.deferred_touch.extend(touched);
        self.deferred.push(item);
    }

    /// Adds a reduction of its results over further ranks.
    fn reduce_further(&mut self, kind: (Kind, DType), item: Item, touched: &Touched) {
        self.touched.extend(touched);
        match self.further.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, first)) => merge(first, item),
            None => self.further.push((kind, item)),
        }
    }
}

/// Merges reductions of gradients into buckets. Where the order `is_free`, buckets let other collectives pass, and the
/// reductions of their parts over further ranks are merged as well.
fn bucket(draft: &Draft, items: Vec<Item>, is_free: bool) -> Vec<Item> {
    let mut buckets = Buckets::default();
    for item in items {
        buckets.add(draft, item, is_free);
    }
    buckets.close(|_, _| true);
    let Buckets { late, mut placed, mut out, .. } = buckets;
    out.extend(late.into_iter().flat_map(|bucket| bucket.deferred));
    if is_free {
        let_pass(draft, &out, &mut placed);
    }
    insert_at(out, placed)
}

/// The buckets of a section while its instructions are added in their order.
#[derive(Default)]
struct Buckets {
    /// Those that wait for more.
    open: BTreeMap<(Kind, DType), Bucket>,
    /// Those that closed: what adds their results up waits until some more have.
    late: VecDeque<Bucket>,
    /// The collectives of those that closed, and how many instructions lie before each.
    placed: Vec<(usize, Item)>,
    /// All other instructions.
    out: Vec<Item>,
}

impl Buckets {
    fn add(&mut self, draft: &Draft, item: Item, is_free: bool) {
        let touched = Touched::of(draft, &item);
        let own = kind_of(draft, &item).filter(|_| item.hint == Hint::Bucket);
        // Parts are reduced over further ranks behind the bucket that they come from.
        let is_further = is_free && matches!(own, Some((Kind::Reduce(..), _)));
        let mut open = self.open.iter();
        let scattered = open.find(|(_, bucket)| is_further && bucket.scatters(&touched)).map(|(kind, _)| *kind);
        self.close(|kind, bucket| bucket.bytes >= BUCKET_BYTES && scattered != Some(*kind));
        let waits = matches!(item.instruction.action, Action::Accumulate | Action::Compute(Op::Slice(_) | Op::Cast(_)));
        let met = self.open.iter().filter(|(_, bucket)| bucket.touched.meets(&touched)).map(|(kind, _)| *kind);
        let met: Vec<(Kind, DType)> = met.collect();
        let closed = self.late.iter_mut().rfind(|bucket| bucket.touched.meets(&touched));
        if let Some(bucket) = closed.filter(|bucket| waits && met.is_empty() && bucket.may_defer(&touched)) {
            bucket.defer(item, &touched);
            return;
        }
        self.out.extend(released(&mut self.late, &touched));
        if let [only] = met.as_slice()
            && let Some(bucket) = self.open.get_mut(only)
        {
            if let Some(kind) = own.filter(|_| scattered == Some(*only)) {
                bucket.reduce_further(kind, item, &touched);
                return;
            }
            if waits && bucket.may_defer(&touched) {
                bucket.defer(item, &touched);
                return;
            }
        }
        self.close(|kind, _| met.contains(kind));
        self.out.extend(released(&mut self.late, &touched));
        match own {
            Some(kind) => self.fill(kind, draft, item, touched),
            None => self.out.push(item),
        }
    }

    /// Adds a reduction to the open bucket of its kind.
    fn fill(&mut self, kind: (Kind, DType), draft: &Draft, item: Item, touched: Touched) {
        let bytes = item.instruction.operands.iter().map(|id| draft.buffers[*id].ty.bytes().0).sum();
        let at = self.out.len();
        match self.open.get_mut(&kind) {
            Some(bucket) => {
                merge(&mut bucket.collective, item);
                bucket.bytes += bytes;
                bucket.at = at;
                bucket.touched.extend(&touched);
            }
            None => {
                let (further, deferred, deferred_touch) = (Vec::new(), Vec::new(), Touched::default());
                let bucket = Bucket { collective: item, bytes, at, further, touched, deferred, deferred_touch };
                self.open.insert(kind, bucket);
            }
        }
    }

    /// Closes some of the open buckets.
    fn close(&mut self, which: impl Fn(&(Kind, DType), &Bucket) -> bool) {
        let closes = self.open.extract_if(.., |kind, bucket| which(kind, bucket));
        for (_, bucket) in closes {
            self.late.retain(|bucket| !bucket.deferred.is_empty());
            if self.late.len() == LATE {
                self.out.extend(self.late.pop_front().into_iter().flat_map(|bucket| bucket.deferred));
            }
            self.placed.push((bucket.at, bucket.collective.clone()));
            self.placed.extend(bucket.further.iter().map(|(_, further)| (bucket.at, further.clone())));
            self.late.push_back(bucket);
        }
    }
}

/// Moves buckets behind collectives that kernels wait for. One that another bucket needs stays before that one.
fn let_pass(draft: &Draft, items: &[Item], placed: &mut [(usize, Item)]) {
    let touched: Vec<Touched> = placed.iter().map(|(_, bucket)| Touched::of(draft, bucket)).collect();
    for index in (0..placed.len()).rev() {
        let others = (index + 1..placed.len()).filter(|other| touched[index].meets(&touched[*other]));
        let limit = others.map(|other| placed[other].0).min().unwrap_or(items.len());
        let (position, bucket) = &placed[index];
        placed[index].0 = yielded(draft, &items[..limit], *position, (bucket, &touched[index]));
    }
}

/// Where a bucket goes that closed at a position: behind the next collective that kernels wait for, if that comes soon,
/// with those that follow it before the next product. A wire carries one after the other, and what waits for the
/// bucket comes much later. What is reduced in place lets weights pass, too, which come so soon where a block's kernels
/// are too few to hide their gather; what is scattered gives memory back that they need.
fn yielded(draft: &Draft, items: &[Item], position: usize, (bucket, touched): (&Item, &Touched)) -> usize {
    let is_in_place = matches!(bucket.instruction.action, Action::AllReduce { .. });
    let (mut to, mut products) = (position, 0);
    for (at, item) in items.iter().enumerate().skip(position) {
        products += usize::from(matches!(&item.instruction.action, Action::Compute(op) if is_product(op)));
        if products > YIELDS || touched.meets(&Touched::of(draft, item)) {
            break;
        }
        let is_awaited = match item.hint {
            Hint::None => true,
            Hint::Prefetch { .. } => is_in_place,
            Hint::Bucket => false,
        };
        if is_awaited && item.instruction.stream == Stream::Communication {
            (to, products) = (at + 1, YIELDS);
        }
    }
    to
}

/// What follows closed buckets and something else may not pass, nor what that may not pass. A reduction of what a
/// bucket made, over other ranks, hurries none of it.
fn released(late: &mut VecDeque<Bucket>, item: &Touched) -> Vec<Item> {
    if !late.iter().any(|bucket| bucket.deferred_touch.meets(item)) {
        return Vec::new();
    }
    let (mut touched, mut kept, mut out) = (item.clone(), VecDeque::new(), VecDeque::new());
    while let Some(bucket) = late.pop_back() {
        if bucket.deferred_touch.meets(&touched) {
            touched.extend(&bucket.deferred_touch);
            out.push_front(bucket.deferred);
        } else {
            kept.push_front(bucket);
        }
    }
    *late = kept;
    out.into_iter().flatten().collect()
}

/// Inserts each item before the instruction of its position; those of one position in their order.
fn insert_at(items: Vec<Item>, mut placed: Vec<(usize, Item)>) -> Vec<Item> {
    placed.sort_by_key(|(at, _)| *at);
    let mut out = Vec::with_capacity(items.len() + placed.len());
    let mut placed = placed.into_iter().peekable();
    for (at, item) in items.into_iter().enumerate() {
        while let Some((_, collective)) = placed.next_if(|(position, _)| *position <= at) {
            out.push(collective);
        }
        out.push(item);
    }
    out.extend(placed.map(|(_, item)| item));
    out
}
