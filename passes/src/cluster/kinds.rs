//! Several kinds of devices in one cluster.
//!
//! No device is made up for them: what devices of several kinds do together takes what it takes the slowest of them
//! *in that work*, so it is priced as each kind sees it, and the largest price counts. What ranks of one kind do among
//! themselves is priced as that kind alone. Devices are of one kind if all of their figures are equal, wherever in the
//! cluster they are.

use super::{Cluster, Part, Profile};
use shardc_ir::units::{Bytes, counted};
use shardc_ir::{Family, Mesh};
use std::collections::BTreeSet;

impl Cluster {
    /// The devices, each kind once, in the order in which they first appear.
    pub fn devices(&self) -> Vec<&Profile> {
        let mut devices: Vec<&Profile> = Vec::new();
        for device in self.parts.iter().map(|part| &part.device) {
            if !devices.contains(&device) {
                devices.push(device);
            }
        }
        if devices.is_empty() { vec![&self.device] } else { devices }
    }

    /// Changes the figures of every device.
    pub fn change_devices(&mut self, change: impl Fn(&mut Profile)) {
        self.parts.iter_mut().map(|part| &mut part.device).chain([&mut self.device]).for_each(change);
    }

    /// Twice the nodes of each kind.
    pub fn double_nodes(&mut self) {
        self.nodes *= 2;
        self.parts.iter_mut().for_each(|part| part.nodes *= 2);
    }

    /// Of each rank, the index of its device among [`Cluster::devices`].
    pub fn kinds_of_ranks(&self) -> Vec<usize> {
        if self.parts.is_empty() {
            return vec![0; self.ranks() as usize];
        }
        let of_node = |kind| std::iter::repeat_n(kind, self.per_node as usize);
        self.kinds_of_nodes(&self.parts).into_iter().flat_map(of_node).collect()
    }

    /// The same of each node of some of its parts.
    fn kinds_of_nodes<'a>(&self, parts: impl IntoIterator<Item = &'a Part>) -> Vec<usize> {
        let devices = self.devices();
        let kind = |part: &Part| devices.iter().position(|device| **device == part.device).unwrap_or(0);
        let of_part = |part: &Part| std::iter::repeat_n(kind(part), part.nodes as usize);
        parts.into_iter().flat_map(of_part).collect()
    }

    /// Of each stage of a mesh, the kinds of its ranks' devices; of a mesh without stages, of all ranks.
    pub fn kinds_of_stages(&self, mesh: &Mesh) -> Vec<BTreeSet<usize>> {
        let stages = mesh.degree(Family::Pipeline) as usize;
        if self.devices().len() == 1 {
            return vec![BTreeSet::from([0]); stages];
        }
        let mut kinds = vec![BTreeSet::new(); stages];
        for (rank, kind) in self.kinds_of_ranks().into_iter().enumerate().take(mesh.ranks() as usize) {
            kinds[mesh.stage_of(rank as u64) as usize].insert(kind);
        }
        kinds
    }

    /// The cluster as each of these kinds sees it that has only the others of these to do with: with its own device,
    /// and the links of all of them.
    pub fn among(&self, kinds: &BTreeSet<usize>) -> Vec<Self> {
        let devices = self.devices();
        let own: Vec<&Profile> = kinds.iter().filter_map(|kind| devices.get(*kind).copied()).collect();
        let is_met = |part: &&Part| own.contains(&&part.device);
        let parts: Vec<Part> = self.parts.iter().filter(is_met).cloned().collect();
        let of = |device: &&Profile| Self { device: (*device).clone(), parts: parts.clone(), ..self.clone() };
        own.iter().map(of).collect()
    }

    /// The seconds of what all of the devices take part in: those of the slowest.
    pub fn together(&self, seconds: impl Fn(&Profile) -> f64) -> f64 {
        match &self.parts[..] {
            [] | [_] => seconds(&self.device),
            parts => parts.iter().map(|part| seconds(&part.device)).fold(0.0, f64::max),
        }
    }

    /// What a rank on any device of these kinds may take of its memory, where `most` may be taken anywhere. Of a single
    /// kind of devices, that is `most`, which may be more than they have.
    pub fn room(&self, kinds: &BTreeSet<usize>, most: Bytes) -> Bytes {
        match &self.devices()[..] {
            [_] => most,
            devices => {
                kinds.iter().filter_map(|kind| devices.get(*kind)).map(|of| of.usable_memory()).fold(most, Bytes::min)
            }
        }
    }

    /// [`Cluster::room`] on each stage of a mesh; without stages, on all ranks.
    pub fn rooms(&self, mesh: &Mesh, most: Bytes) -> Vec<Bytes> {
        self.kinds_of_stages(mesh).iter().map(|kinds| self.room(kinds, most)).collect()
    }

    /// What a rank may take of its memory anywhere, where `most` may be taken on the devices that have it.
    pub fn least_room(&self, most: Bytes) -> Bytes {
        self.room(&(0..self.devices().len()).collect(), most)
    }

    /// The memory of the host that has least.
    pub fn host_memory(&self) -> Bytes {
        let hosts = self.devices().into_iter().map(|device| device.host_memory_bytes.value);
        Bytes(hosts.fold(f64::INFINITY, f64::min) as u64)
    }

    /// A figure of the cluster's devices, on average.
    pub fn mean(&self, figure: impl Fn(&Profile) -> f64) -> f64 {
        let nodes = self.parts.iter().map(|part| part.nodes).sum::<u64>();
        let sum = self.parts.iter().map(|part| part.nodes as f64 * figure(&part.device)).sum::<f64>();
        if nodes == 0 { figure(&self.device) } else { sum / nodes as f64 }
    }

    /// The nodes, by their kinds: `8 x 16 of h100`, per node x nodes.
    pub fn shape(&self) -> String {
        let part = |nodes: u64, device: &Profile| format!("{} x {nodes} of {}", self.per_node, device.name);
        match &self.parts[..] {
            [] => part(self.nodes, &self.device),
            parts => parts.iter().map(|of| part(of.nodes, &of.device)).collect::<Vec<_>>().join(", "),
        }
    }

    /// The cluster with its parts in an order: by their numbers, from 1 on; `None` if these are not its parts.
    pub fn in_order(&self, order: &[u64]) -> Option<Self> {
        let part = |number: &u64| self.parts.get((*number as usize).checked_sub(1)?).cloned();
        let parts = order.iter().map(part).collect::<Option<Vec<Part>>>()?;
        (parts.len() == self.parts.len()).then(|| Self { parts, ..self.clone() })
    }

    /// The orders of its parts that differ in their kinds, other than the one in which they are: all of up to three parts,
    /// of more the reverse. Where nodes lie in racks there is none, since a part has its own.
    pub fn other_orders(&self) -> Vec<Vec<u64>> {
        let count = self.parts.len() as u64;
        if self.devices().len() < 2 || !self.levels.is_empty() {
            return Vec::new();
        }
        let all: Vec<Vec<u64>> = match count {
            2 => vec![vec![2, 1]],
            3 => [[1, 3, 2], [2, 1, 3], [2, 3, 1], [3, 1, 2], [3, 2, 1]].map(Vec::from).to_vec(),
            _ => vec![(1..=count).rev().collect()],
        };
        let mut seen = vec![self.kinds_of_nodes(&self.parts)];
        let is_new = |order: &Vec<u64>| {
            let kinds = self.kinds_of_nodes(order.iter().map(|number| &self.parts[*number as usize - 1]));
            let is_new = !seen.contains(&kinds);
            seen.push(kinds);
            is_new
        };
        all.into_iter().filter(is_new).collect()
    }

    /// What a cluster of several kinds of nodes has, and how it is planned; nothing for any other.
    pub fn mixture(&self) -> Option<String> {
        let part = |part: &Part| format!("{} of {}", counted(part.nodes, "node"), part.device.name);
        let parts: Vec<String> = self.parts.iter().map(part).collect();
        let how = "what devices of several kinds do together is planned at the pace of those that are slowest in it";
        (self.devices().len() > 1).then(|| format!("{}: {how}", parts.join(", ")))
    }

    /// In which order the kinds of nodes of a cluster come that has several.
    pub fn order(&self) -> Option<String> {
        let part = |part: &Part| format!("{} of {}", part.nodes, part.device.name);
        (self.devices().len() > 1).then(|| self.parts.iter().map(part).collect::<Vec<_>>().join(", then "))
    }

    /// A cluster of one kind of nodes that no stage of a pipeline on this one is faster than.
    pub fn fastest(&self) -> Self {
        let [first, others @ ..] = &self.parts[..] else { return self.clone() };
        Self { device: fastest_of_all(&first.device, others), parts: Vec::new(), ..self.clone() }
    }
}

/// A device that is as fast, and holds as much, as any of these.
fn fastest_of_all(first: &Profile, others: &[Part]) -> Profile {
    let mut device = first.clone();
    for (name, figure) in others.iter().flat_map(|part| part.device.figures()) {
        let Some((quantity, own)) = device.figure_mut(name) else { continue };
        let is_faster = if quantity.is_cost() { figure.value < own.value } else { figure.value > own.value };
        if is_faster {
            *own = figure.clone();
        }
    }
    device
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::collective::{Collective, Group, seconds, send_over};
    use shardc_ir::Family;

    fn cluster(parts: &[(&str, u64)]) -> Cluster {
        let part = |(device, nodes): &(&str, u64)| format!("[[parts]]\ndevice = \"{device}\"\nnodes = {nodes}\n");
        let parts: String = parts.iter().map(part).collect();
        Cluster::from_toml("c.toml", &format!("per_node = 4\n{parts}")).unwrap()
    }

    #[test]
    fn equal_devices_are_of_one_kind_wherever_they_are() {
        let mixed = cluster(&[("h100", 1), ("a100-40", 2), ("h100", 1)]);
        assert_eq!(mixed.devices().iter().map(|device| device.name.as_str()).collect::<Vec<_>>(), ["h100", "a100-40"]);
        let kinds: Vec<usize> = mixed.kinds_of_ranks().into_iter().step_by(4).collect();
        assert_eq!(kinds, [0, 1, 1, 0]);
        let mut mesh = Mesh::default();
        mesh.push(Family::Pipeline, 4);
        mesh.push(Family::Data, 4);
        assert_eq!(mixed.kinds_of_stages(&mesh), [0, 1, 1, 0].map(|kind| BTreeSet::from([kind])));
        let mut mesh = Mesh::default();
        mesh.push(Family::Pipeline, 2);
        mesh.push(Family::Data, 8);
        assert_eq!(mixed.kinds_of_stages(&mesh), [0, 1].map(|_| BTreeSet::from([0, 1])));
        assert_eq!(mixed.other_orders(), [vec![1, 3, 2], vec![2, 1, 3]]);
        let turned = mixed.in_order(&[2, 1, 3]).unwrap();
        assert_eq!(turned.parts.iter().map(|part| part.nodes).collect::<Vec<_>>(), [2, 1, 1]);
        assert_eq!([mixed.in_order(&[2, 1]), mixed.in_order(&[1, 2, 3, 4])], [None, None]);
        let alike = cluster(&[("h100", 1), ("h100", 3)]);
        assert_eq!(alike.other_orders(), Vec::<Vec<u64>>::new());
        assert_eq!((alike.devices().len(), alike.kinds_of_ranks(), alike.mixture()), (1, vec![0; 16], None));
    }

    #[test]
    fn every_kind_has_its_own_memory() {
        let mixed = cluster(&[("h100", 1), ("a100-40", 1)]);
        let [large, small] = ["h100", "a100-40"].map(|name| Profile::find(name).unwrap().usable_memory());
        let room = |kinds: &[usize], most: Bytes| mixed.room(&kinds.iter().copied().collect(), most);
        assert_eq!(mixed.usable_memory(), large);
        assert_eq!((room(&[0], large), room(&[1], large), room(&[0, 1], large)), (large, small, small));
        assert_eq!((room(&[0], Bytes(7)), mixed.least_room(large)), (Bytes(7), small));
    }

    /// What leaves its nodes takes what it takes the slower kind, whoever asks; what does not, what it takes its own.
    #[test]
    fn links_are_those_of_who_is_on_them() {
        let (mixed, slow) = (cluster(&[("h100", 2), ("a100-80", 2)]), cluster(&[("a100-80", 4)]));
        let kinds = mixed.among(&BTreeSet::from([0, 1]));
        let time = |cluster: &Cluster, group| seconds(Collective::AllReduce, 1e9, group, cluster).0;
        let (inside, across) = (Group::of_nodes(4, 1), Group::of_nodes(4, 2));
        assert!(time(&kinds[0], inside) < time(&kinds[1], inside));
        assert_eq!(kinds.iter().map(|own| time(own, across)).collect::<Vec<_>>(), [time(&slow, across); 2]);
        assert_eq!(send_over(1e9, 1, &kinds[0]), send_over(1e9, 1, &slow));
        let alone = &mixed.among(&BTreeSet::from([0]))[0];
        assert_eq!(time(alone, across), time(&cluster(&[("h100", 4)]), across));
    }
}
