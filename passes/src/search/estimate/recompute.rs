//! What is computed again: per block, the ways that free the most memory per second.
//!
//! Of a block's forward values, each is kept for the backward pass, computed again from others, or not needed. What is
//! computed again needs its operands. A copy that readers share (gathered over tensor ranks) is kept, or made again
//! with what reads it, as lowering does. For a price of memory in seconds per byte, the cheapest way is the least of a
//! small cost graph ([`CostGraph`]), whose variables are the block's nodes; the prices at which it changes give the
//! lower convex hull of time over bytes ([`hull`]), as in Lagrangian relaxation (Everett, "Generalized Lagrange
//! multiplier method", 1963).
//!
//! The hulls of all blocks make one list of steps, from the cheapest byte to the dearest, and a plan takes as many of
//! them as memory asks for: the relaxation of a knapsack, which is off by less than one step of one block. Steps whose
//! bytes cost about the same make a *tier*, in which block comes after block. So any number of steps is of the first
//! blocks, and a stage of a pipeline may take only those of some of its blocks ([`stages`](crate::search::stages)).
//!
//! Whole blocks (Chen et al., 2016) and all that is no product (Korthikanti et al., "Reducing activation
//! recomputation", 2022) are two more ways that can be pinned.

use super::split::Split;
use crate::cost::is_view;
use crate::rematerialize::fixed;
use crate::search::choice::pins::Recompute;
use crate::shard::eliminate::CostGraph;
use crate::shard::tensor::Prepared;
use shardc_ir::ops::Op;
use shardc_ir::{NodeId, OpDef, Role, SecondaryMap};
use std::collections::BTreeMap;
use std::ops::Range;

/// Blocks that are equal, and the nodes of their forward pass.
#[derive(Debug)]
pub struct Kind {
    /// Their places in the order of the forward pass.
    pub blocks: Vec<u64>,
    places: Vec<Place>,
    /// Per place, those that its kernel reads, also through views of what they make; of a view none.
    read: Vec<Vec<usize>>,
}

/// A node that can be computed again.
#[derive(Debug, Default)]
struct Place {
    class: usize,
    /// The places in the block that it reads.
    reads: Vec<usize>,
    is_view: bool,
    /// Whether what it makes is there to be kept: a product that is added to something makes the sum alone.
    is_made: bool,
    /// Whether the backward pass of its block reads it.
    is_read: bool,
    /// Whether it is kept in any case: something outside reads it in the backward pass.
    stays: bool,
    /// Whether another block makes it, so that only a copy of it is made again here.
    is_foreign: bool,
}

/// The kinds of blocks of a graph.
pub fn kinds(prepared: &Prepared<'_>) -> Vec<Kind> {
    let graph = prepared.graph;
    let fixed = fixed(graph);
    let mut blocks: BTreeMap<u64, Vec<Place>> = BTreeMap::new();
    let mut place: SecondaryMap<NodeId, Option<(u64, usize)>> = SecondaryMap::new();
    // What blocks read that others make.
    let mut foreign: BTreeMap<(u64, NodeId), usize> = BTreeMap::new();
    for (id, node) in graph.nodes() {
        let makers = || node.operands.iter().map(|value| graph.value(*value).def);
        let own = prepared.blocks.of(id);
        let inside = |maker: NodeId| place[maker].filter(|(block, _)| own == Some(*block)).map(|(_, index)| index);
        if node.role == Role::Forward
            && !node.op.is_leaf()
            && !fixed[id]
            && let Some(block) = own
        {
            let (class, is_view) = (prepared.folded.class[id], is_view(&node.op));
            let is_made = prepared.emitted[class].is_made;
            let places = blocks.entry(block).or_default();
            let mut reads: Vec<usize> = makers().filter_map(inside).collect();
            let is_foreign = |maker: &NodeId| {
                let is_leaf = graph.node(*maker).op.is_leaf();
                !is_leaf
                    && !fixed[*maker]
                    && prepared.blocks.of(*maker) != own
                    && graph.node(*maker).role == Role::Forward
            };
            for maker in makers().filter(is_foreign) {
                reads.push(*foreign.entry((block, maker)).or_insert_with(|| {
                    let class = prepared.folded.class[maker];
                    places.push(Place { class, is_made: true, stays: true, is_foreign: true, ..Place::default() });
                    places.len() - 1
                }));
            }
            place[id] = Some((block, places.len()));
            places.push(Place { class, reads, is_view, is_made, ..Place::default() });
        } else if node.role != Role::Forward {
            for (block, index) in makers().filter_map(|maker| place[maker]) {
                let Some(read) = blocks.get_mut(&block).map(|places| &mut places[index]) else { continue };
                let is_own = own == Some(block) && matches!(node.role, Role::Backward(_));
                *(if is_own { &mut read.is_read } else { &mut read.stays }) = true;
            }
            let Some(block) = own.filter(|_| matches!(node.role, Role::Backward(_))) else { continue };
            for index in makers().filter_map(|maker| foreign.get(&(block, maker))) {
                let Some(places) = blocks.get_mut(&block) else { continue };
                places[*index].is_read = true;
            }
        }
    }
    let mut kinds: BTreeMap<Vec<usize>, Kind> = BTreeMap::new();
    for (block, mut places) in blocks {
        // A view is what it views.
        for index in (0..places.len()).rev().filter(|index| places[*index].is_view).collect::<Vec<_>>() {
            if places[index].stays {
                places[index].reads.clone().into_iter().for_each(|of| places[of].stays = true);
            }
        }
        let classes = places.iter().map(|place| place.class).collect();
        kinds.entry(classes).or_insert_with(|| Kind::new(places)).blocks.push(block);
    }
    let mut kinds: Vec<Kind> = kinds.into_values().collect();
    kinds.sort_by_key(|kind| kind.blocks[0]);
    kinds
}

/// One way to compute a block again.
#[derive(Clone, Debug, Default)]
pub struct Way {
    /// Per class, whether its nodes are computed again.
    pub again: Vec<bool>,
    /// What that takes, once.
    pub cost: Split,
    /// The bytes that are kept all the same.
    bytes: f64,
}

/// What each class takes and makes, one node and one microbatch.
#[derive(Clone, Copy, Debug)]
pub struct Prices<'a> {
    /// Seconds, with its conversions.
    pub seconds: &'a [Split],
    /// Those of the copies of its results that their readers share.
    pub copies: &'a [Split],
    /// Bytes of its results, or of these copies.
    pub sizes: &'a [Vec<u64>],
    /// How much larger these copies are than the results.
    pub grown: &'a [Vec<u64>],
    /// The classes of whose copies the backward pass reads none.
    pub is_brief: &'a [bool],
}

impl Prices<'_> {
    /// Bytes of what a place keeps by itself, and of the copy of it, as far as that is larger and the backward pass
    /// reads it.
    fn kept(&self, place: &Place) -> [f64; 2] {
        let sum = |bytes: &[Vec<u64>]| bytes[place.class].iter().sum::<u64>() as f64;
        let grown = sum(self.grown);
        let is_copy_read = place.is_read && !self.is_brief[place.class];
        [if place.stays { 0.0 } else { sum(self.sizes) - grown }, if is_copy_read { grown } else { 0.0 }]
    }

    /// Whether readers share a copy of what a place makes, which may be made again for them.
    fn is_copied(&self, place: &Place) -> bool {
        self.grown[place.class].iter().any(|bytes| *bytes > 0)
    }
}

/// The ways of all blocks of a placed mesh.
#[derive(Debug, Default)]
pub struct Menu {
    ways: Vec<Way>,
    /// Per block, the way that computes all of it again, and the one that computes what is no product.
    whole: Vec<Option<[usize; 2]>>,
    /// Which block goes over to which way, from the cheapest byte to the dearest: by *tiers*, in each of which block comes
    /// after block.
    steps: Vec<(u64, usize)>,
    /// After how many steps each tier ends.
    tiers: Vec<u64>,
}

/// By how many times a byte of a tier is dearer than the cheapest of it, at the most.
const TIER: f64 = 1.25;

/// The most [rungs](Menu::rungs) that are told.
const MOST_RUNGS: usize = 6;

/// Per block, the way it is computed again, if it is.
#[derive(Clone, Debug, Default)]
pub struct Selected<'a> {
    ways: &'a [Way],
    of: Vec<Option<usize>>,
}

impl<'a> Selected<'a> {
    /// How a block is computed again.
    pub fn way(&self, block: u64) -> Option<&'a Way> {
        self.of.get(block as usize).copied().flatten().map(|way| &self.ways[way])
    }

    /// The blocks that are computed again, each with the index of its way.
    pub fn chosen(&self) -> impl Iterator<Item = (usize, usize)> {
        self.of.iter().enumerate().filter_map(|(block, way)| Some((block, (*way)?)))
    }

    /// Whether a block's nodes of a class are computed again.
    pub fn is_again(&self, block: u64, class: usize) -> bool {
        self.way(block).is_some_and(|way| way.again[class])
    }

    /// Whether nothing is.
    pub fn is_empty(&self) -> bool {
        self.of.iter().all(Option::is_none)
    }

    /// What it takes for one microbatch.
    pub fn cost(&self) -> Split {
        self.of.iter().flatten().fold(Split::default(), |sum, way| sum + self.ways[*way].cost)
    }
}

impl Menu {
    /// Finds the ways of every kind of block.
    pub fn new(prepared: &Prepared<'_>, prices: Prices<'_>) -> Self {
        let blocks = prepared.kinds.iter().flat_map(|kind| &kind.blocks).max().map_or(0, |last| *last as usize + 1);
        let mut menu = Self { ways: Vec::new(), whole: vec![None; blocks], ..Self::default() };
        // A sum that a product makes is kept in its place.
        let is_product = |class: usize| {
            let op = prepared.op(class);
            matches!(op, Op::Matmul(_) | Op::ScaledMatmul(_) | Op::Attention(_)) || prepared.emitted[class].is_summed
        };
        let mut steps = Vec::new();
        for kind in &prepared.kinds {
            let whole = kind.way(kind.needed(&|_| false), prices);
            let selective = kind.way(kind.needed(&is_product), prices);
            let first = menu.ways.len();
            menu.ways.extend([whole, selective]);
            kind.blocks.iter().for_each(|block| menu.whole[*block as usize] = Some([first, first + 1]));
            let hull = hull(&|price| kind.cheapest(price, prices));
            for (before, way) in hull.iter().zip(&hull[1..]) {
                let rate = (way.cost.seconds() - before.cost.seconds()) / (before.bytes - way.bytes);
                steps.extend(kind.blocks.iter().map(|block| (rate, menu.ways.len(), *block)));
                menu.ways.push(way.clone());
            }
        }
        steps.sort_by(|a, b| a.0.total_cmp(&b.0).then((a.1, a.2).cmp(&(b.1, b.2))));
        let mut rest = &mut steps[..];
        while let Some((cheapest, ..)) = rest.first().copied() {
            let (tier, dearer) = rest.split_at_mut(rest.partition_point(|(rate, ..)| *rate <= TIER * cheapest));
            tier.sort_by_key(|(_, way, block)| (*block, *way));
            menu.tiers.push(menu.tiers.last().unwrap_or(&0) + tier.len() as u64);
            rest = dearer;
        }
        menu.steps = steps.into_iter().map(|(_, way, block)| (block, way)).collect();
        menu
    }

    /// After how many steps blocks that are equal are computed again alike; of many such numbers some, the last among
    /// them.
    pub fn rungs(&self) -> impl Iterator<Item = u64> {
        let (all, told) = (&self.tiers, self.tiers.len().min(MOST_RUNGS));
        (1..=told).map(move |index| all[index * all.len() / told - 1])
    }

    /// How many steps a choice is; nothing, if it is none of them.
    pub fn steps_of(&self, recompute: Recompute) -> Option<u64> {
        match recompute.within(self.steps()) {
            Recompute::None => Some(0),
            Recompute::Values(count) => Some(count).filter(|count| *count <= self.steps()),
            _ => None,
        }
    }

    /// Of steps between two numbers: for a block, the number after which all blocks in front of it have taken those steps, and
    /// no other block any of them; nothing, if steps there do not go from block to block.
    pub fn by_block(&self, steps: Range<u64>) -> Option<impl Fn(u64) -> u64> {
        let all = &self.steps[steps.start as usize..steps.end as usize];
        let is_by_block = all.is_sorted_by_key(|(block, _)| *block);
        is_by_block.then_some(move |block| steps.start + all.partition_point(|(of, _)| *of < block) as u64)
    }

    /// Of these steps, each a block and the way it goes over to, and the ends of their tiers.
    #[cfg(test)]
    pub fn of_steps(steps: &[(u64, usize)], tiers: &[u64]) -> Self {
        Self { steps: steps.to_vec(), tiers: tiers.to_vec(), ..Self::default() }
    }

    /// How many steps there are.
    pub fn steps(&self) -> u64 {
        self.steps.len() as u64
    }

    /// What is computed again if each block has a choice of its own.
    pub fn select_by(&self, of: &dyn Fn(u64) -> Recompute) -> Selected<'_> {
        let mut selected: BTreeMap<Recompute, Selected<'_>> = BTreeMap::new();
        let chosen = |block: usize| {
            let recompute = of(block as u64);
            selected.entry(recompute).or_insert_with(|| self.select(recompute)).of[block]
        };
        Selected { ways: &self.ways, of: (0..self.whole.len()).map(chosen).collect() }
    }

    /// What a choice computes again.
    pub fn select(&self, recompute: Recompute) -> Selected<'_> {
        let whole = |count: u64, index: usize| {
            let of = |(block, ways): (usize, &Option<[usize; 2]>)| ways.filter(|_| (block as u64) < count);
            self.whole.iter().enumerate().map(|found| of(found).map(|ways| ways[index])).collect()
        };
        let of = match recompute {
            Recompute::None => vec![None; self.whole.len()],
            Recompute::Selective => whole(u64::MAX, 1),
            Recompute::Blocks(count) => whole(count, 0),
            Recompute::All => whole(u64::MAX, 0),
            Recompute::Values(count) => {
                let mut of = vec![None; self.whole.len()];
                for (block, way) in self.steps.iter().take(count as usize) {
                    of[*block as usize] = Some(*way);
                }
                of
            }
        };
        Selected { ways: &self.ways, of }
    }
}

impl Kind {
    /// Of these places, and of no block yet.
    fn new(places: Vec<Place>) -> Self {
        // What a place stands for, through views: they come before their readers.
        let mut behind: Vec<Vec<usize>> = Vec::with_capacity(places.len());
        let mut read = Vec::with_capacity(places.len());
        for (index, place) in places.iter().enumerate() {
            let all: Vec<usize> = place.reads.iter().flat_map(|of| behind[*of].iter().copied()).collect();
            behind.push(if place.is_view { all.clone() } else { vec![index] });
            read.push(if place.is_view { Vec::new() } else { all });
        }
        Self { blocks: Vec::new(), places, read }
    }

    /// What the backward pass needs again if all but `keep` is dropped.
    fn needed(&self, keep: &dyn Fn(usize) -> bool) -> Vec<bool> {
        let mut again = vec![false; self.places.len()];
        for index in (0..self.places.len()).rev() {
            let place = &self.places[index];
            if (place.is_read || again[index]) && !place.is_foreign && !keep(place.class) {
                again[index] = true;
                // Operands come before their readers, so they are met later.
                place.reads.iter().for_each(|of| again[*of] = true);
            } else {
                again[index] = false;
            }
        }
        again
    }

    /// A way by its places.
    fn way(&self, again: Vec<bool>, prices: Prices<'_>) -> Way {
        let mut way = Way { again: vec![false; prices.seconds.len()], ..Way::default() };
        let mut is_wanted: Vec<bool> = self.places.iter().map(|place| place.is_read).collect();
        let mut is_read_again = vec![false; self.places.len()];
        for (index, place) in self.places.iter().enumerate().filter(|(index, _)| again[*index]) {
            way.again[place.class] = true;
            way.cost = way.cost + prices.seconds[place.class];
            place.reads.iter().for_each(|of| is_wanted[*of] = true);
            self.read[index].iter().for_each(|of| is_read_again[*of] = true);
        }
        for (index, place) in self.places.iter().enumerate().filter(|(index, _)| !again[*index]) {
            let [own, copy] = prices.kept(place);
            way.bytes += if is_wanted[index] { own } else { 0.0 };
            match is_read_again[index] && prices.is_copied(place) {
                true => way.cost = way.cost + prices.copies[place.class],
                false => way.bytes += copy,
            }
        }
        way
    }

    /// The way that costs the least if a kept byte costs `price` seconds.
    fn cheapest(&self, price: f64, prices: Prices<'_>) -> Way {
        const KEPT: usize = 1;
        const AGAIN: usize = 2;
        let mut graph = CostGraph::default();
        for place in &self.places {
            let dropped = if place.is_read { f64::INFINITY } else { 0.0 };
            let kept = if place.is_view || !place.is_made { f64::INFINITY } else { price * prices.kept(place)[0] };
            let again = if place.is_foreign { f64::INFINITY } else { prices.seconds[place.class].seconds() };
            graph.variable(vec![dropped, kept, again]);
        }
        for (index, place) in self.places.iter().enumerate() {
            for of in &place.reads {
                graph.add_pair(*of, index, |of, reader| if reader == AGAIN && of == 0 { f64::INFINITY } else { 0.0 });
            }
        }
        // Of what is kept, the copy is kept too, or made again for what is computed again.
        for (of, place) in self.places.iter().enumerate().filter(|(_, place)| prices.is_copied(place)) {
            let never = |is: bool| if is { f64::INFINITY } else { 0.0 };
            let mut last = None;
            for reader in (of + 1..self.places.len()).filter(|reader| self.read[*reader].contains(&of)) {
                // Whether an earlier one is computed again (2 or 3), and whether this one is (1 or 3).
                let first = never(last.is_none());
                let any = graph.variable(vec![0.0, 0.0, first, first]);
                graph.add_pair(any, reader, |any, reader| never((any % 2 == 1) != (reader == AGAIN)));
                last.iter().for_each(|last| graph.add_pair(*last, any, |last, any| never((last > 0) != (any > 1))));
                last = Some(any);
            }
            let costs = [price * prices.kept(place)[1], prices.copies[place.class].seconds()];
            let cost = |of: usize, any: usize| if of == KEPT { costs[any.min(1)] } else { 0.0 };
            match last {
                Some(last) => graph.add_pair(of, last, cost),
                None => graph.add_pair(of, of, |of, _| cost(of, 0)),
            }
        }
        let choices = graph.solve().choices;
        let again = choices.into_iter().take(self.places.len()).map(|choice| choice == AGAIN);
        self.way(again.collect(), prices)
    }
}

/// The corners of the lower convex hull of seconds over bytes, from the least seconds to the least
/// bytes, where `cheapest` gives what is least for a price of a byte.
pub fn hull(cheapest: &dyn Fn(f64) -> Way) -> Vec<Way> {
    // Below and above any price at which something changes.
    const PRICES: [f64; 2] = [1e-30, 1e6];
    let [first, last] = PRICES.map(cheapest);
    let mut corners = vec![first.clone()];
    let mut open = vec![(first, last)];
    while let Some((left, right)) = open.pop() {
        let freed = left.bytes - right.bytes;
        if freed <= 0.0 {
            continue;
        }
        let price = (right.cost.seconds() - left.cost.seconds()) / freed;
        let of = |way: &Way| way.cost.seconds() + price * way.bytes;
        let middle = cheapest(price);
        if of(&middle) < of(&left) * (1.0 - 1e-9) && middle.bytes < left.bytes && middle.bytes > right.bytes {
            open.push((middle.clone(), right));
            open.push((left, middle));
        } else {
            corners.push(right);
        }
    }
    corners
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::Bound;
    use proptest::prelude::*;

    /// What the classes of nodes take and make, with the copies of it.
    #[derive(Debug, Default)]
    struct Classes {
        seconds: Vec<Split>,
        copies: Vec<Split>,
        sizes: Vec<Vec<u64>>,
        grown: Vec<Vec<u64>>,
    }

    /// Blocks of a few nodes: what each reads, takes and makes, and who reads it.
    fn blocks() -> impl Strategy<Value = (Kind, Classes)> {
        let node = (any::<(u8, u8)>(), 0u8..10, 1u8..9, 1u64..9, 0u64..6);
        proptest::collection::vec(node, 1..8).prop_map(|nodes| {
            let (mut places, mut classes) = (Vec::new(), Classes::default());
            for (class, (reads, kind, time, bytes, grown)) in nodes.into_iter().enumerate() {
                let (is_view, is_foreign) = (kind == 1 || kind == 2, kind > 7);
                let (is_read, stays) = (kind % 2 == 0, kind == 3 || kind == 4 || is_foreign);
                let reads = [reads.0, reads.1].map(usize::from).into_iter().filter(|of| *of < class && !is_foreign);
                places.push(Place {
                    class,
                    reads: reads.collect(),
                    is_view,
                    is_made: true,
                    is_read,
                    stays,
                    is_foreign,
                });
                let grown = if is_view { 0 } else { grown };
                let seconds = |time: u8| Split::of(f64::from(time), Bound::Memory);
                classes.seconds.push(seconds(if is_view { 0 } else { time }));
                classes.copies.push(seconds(9 - time));
                classes.sizes.push(vec![bytes + grown]);
                classes.grown.push(vec![grown]);
            }
            (Kind::new(places), classes)
        })
    }

    #[test]
    fn steps_are_counted_from_block_to_block() {
        let menu = Menu::of_steps(&[(0, 1), (1, 1), (2, 1), (0, 2), (0, 3), (2, 2), (2, 3)], &[3, 7]);
        assert_eq!(menu.rungs().collect::<Vec<_>>(), [3, 7]);
        let before = |steps: Range<u64>| {
            let before = menu.by_block(steps);
            [0, 1, 2, 3].map(|block| before.as_ref().map(|before| before(block)))
        };
        assert_eq!(before(0..3), [0, 1, 2, 3].map(Some));
        // Two steps of a block, and none of another.
        assert_eq!(before(3..7), [3, 5, 5, 7].map(Some));
        assert_eq!(before(0..7), [None; 4]);
        let steps = [Recompute::None, Recompute::Values(3), Recompute::Values(99), Recompute::All];
        assert_eq!(steps.map(|recompute| menu.steps_of(recompute)), [Some(0), Some(3), Some(7), None]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn no_way_lies_below_the_hull((kind, classes) in blocks()) {
            let Classes { seconds, copies, sizes, grown } = &classes;
            let is_brief = &vec![false; sizes.len()];
            let prices = Prices { seconds, copies, sizes, grown, is_brief };
            let hull = hull(&|price| kind.cheapest(price, prices));
            // Every choice of what is computed again, where what views are read is made again.
            let ways: Vec<Way> = (0..1u32 << kind.places.len())
                .map(|set| (0..kind.places.len()).map(|index| set & 1 << index != 0).collect::<Vec<bool>>())
                .filter(|again| {
                    let reads = |of: usize| (0..again.len()).any(|at| again[at] && kind.places[at].reads.contains(&of));
                    let is_wanted = |of: usize| kind.places[of].is_read || reads(of);
                    (0..again.len()).all(|of| match again[of] {
                        true => !kind.places[of].is_foreign,
                        false => !kind.places[of].is_view || !is_wanted(of),
                    })
                })
                .map(|again| kind.way(again, prices))
                .collect();
            let least = |of: &dyn Fn(&Way) -> f64| ways.iter().map(of).fold(f64::INFINITY, f64::min);
            prop_assert_eq!(hull[0].cost.seconds(), least(&|way| way.cost.seconds()));
            prop_assert_eq!(hull[hull.len() - 1].bytes, least(&|way| way.bytes));
            for (left, right) in hull.iter().zip(&hull[1..]) {
                prop_assert!(left.bytes > right.bytes && left.cost.seconds() < right.cost.seconds());
                let price = (right.cost.seconds() - left.cost.seconds()) / (left.bytes - right.bytes);
                let of = |way: &Way| way.cost.seconds() + price * way.bytes;
                prop_assert!(of(left) <= least(&of) + 1e-9);
            }
        }
    }
}
