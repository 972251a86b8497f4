//! Equal ranks are one: which ranks behave alike at every moment of a step.
//!
//! Two ranks start out alike if they run the same program, each instruction of which takes as long on both
//! ([`super::kinds`]), at the same speed, and their groups lie over the nodes alike. Ranks that are alike but meet
//! ranks that are not (one data rank is slow) are told apart, again and again until nothing changes: the coarsest
//! stable colouring of the ranks and their groups (colour refinement; Paige and Tarjan, "Three partition refinement algorithms",
//! 1987). In it every group of one kind holds the same number of each class, so one rank of each
//! class stands for all.

use super::kinds::Kinds;
use super::outline::Outline;
use crate::cluster::Cluster;
use crate::cost::collective::{Group, distance};
use shardc_ir::program::{Action, Instruction};
use shardc_ir::{AxisId, Mesh};
use std::collections::BTreeMap;

/// What tells one meeting of ranks from another: its axes, the colours that meet, and where they lie in nodes.
type MeetingKey = (Vec<AxisId>, Vec<usize>, Group);

/// Ranks that behave alike.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Class {
    /// The lowest of them.
    pub rank: u64,
    /// How many there are.
    pub count: u64,
    /// Their kind (see [`Kinds`](super::kinds::Kinds)).
    pub kind: usize,
    /// The index of their program.
    pub program: usize,
    /// The index of their device among those of the cluster.
    pub device: usize,
    /// How many times as long as planned their kernels take.
    pub slowdown: f64,
    /// Per group of the program, the meeting.
    pub groups: Vec<usize>,
    /// Per rank that the program's own rank exchanges messages with, the class that stands there for a
    /// rank of this class, and how many borders lie between them.
    pub peers: BTreeMap<u64, (usize, usize)>,
    /// The most of them that one node holds, per kind of node.
    pub per_node: Vec<u64>,
}

/// A kind of group.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Meeting {
    /// The classes that come.
    pub classes: Vec<usize>,
    /// How it lies over the nodes.
    pub group: Group,
}

/// The classes and their meetings.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Folded {
    pub classes: Vec<Class>,
    pub meetings: Vec<Meeting>,
    /// The class of each rank.
    pub class_of: Vec<usize>,
}

/// What a program says of one of its ranks' neighbours, so that it can be said of any rank that runs it.
#[derive(Debug)]
pub(super) struct Pattern {
    /// Per group, the axes over which it extends.
    pub groups: Vec<Vec<AxisId>>,
    /// Per peer, the coordinates in which it differs.
    pub peers: BTreeMap<u64, Vec<(AxisId, u64)>>,
}

impl Pattern {
    /// Reads the pattern off a program of rank `rank`.
    pub fn new<'a>(
        rank: u64,
        groups: &[Vec<u64>],
        instructions: impl Iterator<Item = &'a Instruction>,
        mesh: &Mesh,
    ) -> Self {
        let mut peers = BTreeMap::new();
        for instruction in instructions {
            if let Action::Send { peer } | Action::Receive { peer } = &instruction.action {
                let at = mesh.coordinates(*peer, 0);
                let axes = mesh.axes_between(&[rank, *peer]);
                peers.insert(*peer, axes.into_iter().map(|axis| (axis, at[axis.0 as usize])).collect());
            }
        }
        Self { groups: groups.iter().map(|group| mesh.axes_between(group)).collect(), peers }
    }

    fn peer_of(&self, peer: u64, rank: u64, mesh: &Mesh) -> u64 {
        self.peers[&peer].iter().fold(rank, |rank, (axis, coordinate)| mesh.group(rank, &[*axis])[*coordinate as usize])
    }
}

/// Numbers for keys, in the order of their first appearance.
struct Numbers<K: Ord>(BTreeMap<K, usize>);

impl<K: Ord> Numbers<K> {
    fn new() -> Self {
        Self(BTreeMap::new())
    }

    fn of(&mut self, key: K) -> usize {
        let next = self.0.len();
        *self.0.entry(key).or_insert(next)
    }
}

/// The ranks of a mesh on a cluster, and how they are alike.
pub(super) struct Ranks<'a> {
    pub mesh: &'a Mesh,
    pub cluster: &'a Cluster,
    pub outlines: &'a [Outline],
    /// Which program each rank runs, and how long it takes it.
    pub kinds: &'a Kinds,
    /// How many times as long as planned each rank's kernels take.
    pub slowdown: Vec<f64>,
}

impl Ranks<'_> {
    fn count(&self) -> u64 {
        self.slowdown.len() as u64
    }

    fn program(&self, rank: usize) -> usize {
        self.kinds.program[self.kinds.of_rank[rank]]
    }

    fn node(&self, rank: u64) -> u64 {
        rank / self.cluster.per_node
    }

    /// For each set of axes that some program communicates over, the group of each rank.
    fn groups(&self) -> BTreeMap<Vec<AxisId>, Vec<Vec<u64>>> {
        let mut groups: BTreeMap<Vec<AxisId>, Vec<Vec<u64>>> = BTreeMap::new();
        for axes in self.outlines.iter().flat_map(|outline| &outline.pattern.groups) {
            groups.entry(axes.clone()).or_insert_with(|| {
                let mut seen = vec![false; self.slowdown.len()];
                let mut all = Vec::new();
                for rank in 0..self.count() {
                    if !seen[rank as usize] {
                        let group = self.mesh.group(rank, axes);
                        group.iter().for_each(|rank| seen[*rank as usize] = true);
                        all.push(group);
                    }
                }
                all
            });
        }
        groups
    }

    /// Folds the ranks.
    pub fn fold(&self) -> Folded {
        let groups = self.groups();
        let (mut first, of_rank) = (Numbers::new(), &self.kinds.of_rank);
        let mut colours: Vec<usize> =
            (0..self.slowdown.len()).map(|rank| first.of((of_rank[rank], self.slowdown[rank].to_bits()))).collect();
        let mut known = first.0.len();
        // Per set of axes, the kind of each rank's group.
        let mut kinds: BTreeMap<&Vec<AxisId>, Vec<usize>>;
        let mut meetings;
        loop {
            meetings = Numbers::new();
            kinds = BTreeMap::new();
            for (axes, all) in &groups {
                let of_rank = kinds.entry(axes).or_insert_with(|| vec![0; colours.len()]);
                for group in all {
                    let mut present: Vec<usize> = group.iter().map(|rank| colours[*rank as usize]).collect();
                    present.sort_unstable();
                    let shape = Group::of_ranks(group, self.cluster);
                    let kind = meetings.of((axes.clone(), present, shape));
                    group.iter().for_each(|rank| of_rank[*rank as usize] = kind);
                }
            }
            let mut next = Numbers::new();
            let refined: Vec<usize> = (0..self.count())
                .map(|rank| {
                    let at = rank as usize;
                    let pattern = &self.outlines[self.program(at)].pattern;
                    let met: Vec<usize> = pattern.groups.iter().map(|axes| kinds[axes][at]).collect();
                    let peer = |peer: &u64| pattern.peer_of(*peer, rank, self.mesh);
                    let peers = pattern.peers.keys().map(peer);
                    let peers: Vec<(usize, usize)> =
                        peers.map(|peer| (colours[peer as usize], distance(peer, rank, self.cluster))).collect();
                    next.of((colours[at], met, peers))
                })
                .collect();
            let is_stable = next.0.len() == known;
            (known, colours) = (next.0.len(), refined);
            if is_stable {
                break;
            }
        }
        self.classes(&colours, &kinds, meetings.0)
    }

    fn classes(
        &self,
        colours: &[usize],
        kinds: &BTreeMap<&Vec<AxisId>, Vec<usize>>,
        numbers: BTreeMap<MeetingKey, usize>,
    ) -> Folded {
        // Stable colours are numbered anew in the order of ranks, which is that of the refinement.
        let mut folded = Folded { class_of: colours.to_vec(), ..Folded::default() };
        let mut per_node: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        let classes = colours.iter().max().map_or(0, |last| last + 1);
        for (rank, colour) in colours.iter().enumerate() {
            per_node.entry(self.node(rank as u64)).or_insert_with(|| vec![0; classes])[*colour] += 1;
            if *colour < folded.classes.len() {
                folded.classes[*colour].count += 1;
                continue;
            }
            let pattern = &self.outlines[self.program(rank)].pattern;
            let rank = rank as u64;
            let peer = |peer: &u64| {
                let other = pattern.peer_of(*peer, rank, self.mesh);
                (*peer, (colours[other as usize], distance(other, rank, self.cluster)))
            };
            folded.classes.push(Class {
                rank,
                count: 1,
                kind: self.kinds.of_rank[rank as usize],
                device: self.kinds.device[self.kinds.of_rank[rank as usize]],
                program: self.program(rank as usize),
                slowdown: self.slowdown[rank as usize],
                groups: pattern.groups.iter().map(|axes| kinds[axes][rank as usize]).collect(),
                peers: pattern.peers.keys().map(peer).collect(),
                per_node: Vec::new(),
            });
        }
        let mut node_kinds: Vec<Vec<u64>> = per_node.into_values().collect();
        node_kinds.sort_unstable();
        node_kinds.dedup();
        for (index, class) in folded.classes.iter_mut().enumerate() {
            class.per_node = node_kinds.iter().map(|counts| counts[index]).collect();
        }
        folded.meetings = vec![Meeting { classes: Vec::new(), group: Group::of_nodes(1, 1) }; numbers.len()];
        for ((_, _, group), index) in numbers {
            folded.meetings[index].group = group;
        }
        for (index, class) in folded.classes.iter().enumerate() {
            for meeting in &class.groups {
                let classes = &mut folded.meetings[*meeting].classes;
                if !classes.contains(&index) {
                    classes.push(index);
                }
            }
        }
        folded
    }
}
