//! The time of a step of equal layers: layers into stages, stages into a pipeline, gradients and
//! parameters over the data ranks, the update.
//!
//! What one layer takes comes from its operations ([`Machine::seconds`])
//! and its collectives; it depends on shapes and a few degrees only, so it is worth keeping. What is
//! left for one plan is arithmetic: far less than a microsecond.

use super::pipeline::{Schedule, Stage, Stages};
use shardc_passes::cluster::Cluster;
use shardc_passes::cost::collective::{self, Collective, Group};
use shardc_passes::cost::overlap::{self, spread};
use shardc_passes::cost::{Library, Machine};

/// Bytes that AdamW moves per parameter: weight, gradient and both moments are read, all but the
/// gradient written, in f32, and a 16-bit copy of the weight.
const UPDATE_BYTES: f64 = 30.0;

/// What one rank does for one layer and one microbatch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Layer {
    /// Seconds of the device, forward, with what shows of the layer's collectives.
    pub forward: f64,
    /// Seconds backward, without recomputation.
    pub backward: f64,
    /// Of the backward seconds, those of weight gradients.
    pub weight: f64,
    /// What recomputation adds.
    pub again: f64,
    /// Whether recomputation starts every kernel of the forward pass again.
    pub restarts: bool,
    /// Ranks of the collectives inside the layer.
    pub tensor: u64,
    /// Parameters of one rank.
    pub parameters: f64,
    /// Of them, those of experts.
    pub experts: f64,
}

impl Layer {
    /// Seconds of a microbatch, with what the host costs, forward and backward.
    pub fn seconds(&self, library: &Library) -> f64 {
        let host = &library.host;
        let tensor = if self.tensor > 1 { 1.0 } else { 0.0 };
        let forward = host.forward + tensor * host.tensor;
        let backward = host.backward + tensor * host.tensor + if self.restarts { forward } else { 0.0 };
        let (device, starts) = (self.forward + self.backward + self.again, forward + backward);
        // Of equal ranks each is the last at a collective as often as any other.
        let skew = host.skew * (1.0 - 1.0 / self.tensor.max(1) as f64);
        let waits = (skew - (starts - device).max(0.0)).max(0.0);
        // Ranks that wait for their hosts meet at collectives, and wait for the latest of them.
        let bound = if starts > 0.0 { (1.0 - device / starts).max(0.0) } else { 0.0 };
        let jitter = host.jitter * tensor * (self.tensor as f64 / 8.0).powi(4).min(1.0) * bound;
        beside_host(device, starts) + waits + jitter
    }
}

/// A step to be timed.
#[derive(Clone, Copy, Debug)]
pub struct Work<'a> {
    /// The devices.
    pub cluster: &'a Cluster,
    /// The software.
    pub library: &'a Library,
    /// One of the equal layers.
    pub layer: Layer,
    /// How many there are.
    pub layers: u64,
    /// Seconds of embedding, head and loss, for one microbatch.
    pub ends: f64,
    /// Parameters of one rank of the first stage's embedding, and of the last stage's head.
    pub end_parameters: f64,
    /// Microbatches of a pipeline.
    pub microbatches: u64,
    /// Pipeline stages.
    pub stages: u64,
    /// In which order they run.
    pub schedule: Schedule,
    /// Bytes that a rank sends to the next stage for one microbatch.
    pub sent: f64,
    /// Whether that goes to another node.
    pub sends_away: bool,
    /// The ranks over which gradients are reduced, and those for experts.
    pub data: [Group; 2],
    /// ZeRO stage.
    pub zero: u64,
    /// The devices of the whole run.
    pub ranks: u64,
}

/// Where the seconds of a step go.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Step {
    /// All of it.
    pub total: f64,
    /// The pipeline of microbatches, its bubble included.
    pub pipeline: f64,
    /// Data-parallel communication that shows.
    pub data: f64,
    /// The update.
    pub update: f64,
    /// The longest stage's parameters on one rank.
    pub parameters: f64,
}

/// Seconds for work that takes `device` seconds of the device and `host` seconds of the thread
/// that starts its kernels. The two overlap, but not perfectly: the queue between them runs empty
/// now and then. A norm between their sum (1) and their maximum (infinity); the order is fitted to
/// the launch-bound runs of vTrain (Bang et al., 2024).
fn beside_host(device: f64, host: f64) -> f64 {
    const ORDER: f64 = 3.7;
    if host <= 0.0 {
        return device;
    }
    let (most, least) = (device.max(host), device.min(host));
    most * (1.0 + (least / most).powf(ORDER)).powf(1.0 / ORDER)
}

impl Work<'_> {
    /// Layers of every stage but the last: in whole chunks, so that the last may have fewer and the head.
    pub fn stage_layers(&self) -> u64 {
        let chunks = match self.schedule {
            Schedule::Interleaved(chunks) => chunks.max(1),
            Schedule::ZeroBubbleV => 2,
            _ => 1,
        };
        if self.stages <= 1 { self.layers } else { self.layers.div_ceil(self.stages * chunks) * chunks }
    }

    /// Predicts the step.
    pub fn seconds(&self) -> Step {
        let library = self.library;
        let machine = Machine { device: &self.cluster.device, library };
        let layer = self.layer.seconds(library);
        let ends = beside_host(self.ends, library.host.ends);
        let typical = self.stage_layers();
        let last = self.layers.saturating_sub((self.stages.max(1) - 1) * typical);
        let chunks = if let Schedule::Interleaved(chunks) = self.schedule { chunks as f64 } else { 1.0 };
        let send = if self.stages > 1 { 2.0 * chunks * self.send() } else { 0.0 };
        let of = |seconds: f64| {
            let device = (self.layer.forward + self.layer.backward + self.layer.again).max(f64::MIN_POSITIVE);
            let (forward, weight) = (seconds * self.layer.forward / device, seconds * self.layer.weight / device);
            Stage { forward, weight, backward: seconds - forward - weight }
        };
        let stages = Stages {
            count: self.stages,
            typical: of(typical as f64 * layer + send),
            last: of(last as f64 * layer + send + ends),
        };
        let pipeline = stages.seconds(self.microbatches, self.schedule) * self.sharing(stages.typical.total());
        let layers = if self.stages > 1 { typical } else { self.layers };
        let dense = layers as f64 * (self.layer.parameters - self.layer.experts) + self.end_parameters;
        let experts = layers as f64 * self.layer.experts;
        let data = self.data(dense, experts, ends);
        let shared = if self.zero >= 1 { self.data.map(|group| group.size() as f64) } else { [1.0; 2] };
        let update = (dense / shared[0] + experts / shared[1]) * UPDATE_BYTES / machine.bandwidth();
        let total = (pipeline + data + update + library.step_seconds) * spread(self.ranks);
        Step { total, pipeline, data, update, parameters: dense + experts }
    }

    /// The factor by which the pipelines of a node slow each other down, whose stages take so many seconds for a
    /// microbatch.
    fn sharing(&self, seconds: f64) -> f64 {
        let tensor = self.layer.tensor;
        if self.stages <= 1 || !self.sends_away || tensor <= 1 {
            return 1.0;
        }
        let others = (self.cluster.per_node / tensor).max(1) - 1;
        let borders = (self.stages - 1) as f64;
        let each = self.library.pipeline_shared * (borders / seconds.max(f64::MIN_POSITIVE)).sqrt();
        1.0 + each * (others * others) as f64
    }

    /// What shows of one send to the next stage.
    fn send(&self) -> f64 {
        self.library.pipeline_exposed * collective::send_seconds(self.sent, self.sends_away, self.cluster).0
    }

    /// What shows of reducing gradients and, under ZeRO, of gathering parameters.
    fn data(&self, dense: f64, experts: f64, ends: f64) -> f64 {
        let library = self.library;
        let run = |kind: Collective, bytes: f64, group: Group| {
            let is_scattered = group.across > 1 && group.within > 1 && group.within < self.cluster.per_node;
            let reached = if is_scattered { library.scattered_rings } else { 1.0 };
            collective::alone(kind, bytes / reached, group, self.cluster).0
        };
        if self.zero < 3 {
            let reduce = |elements: f64, group: Group| {
                if elements > 0.0 { run(Collective::AllReduce, elements * library.gradient_bytes, group) } else { 0.0 }
            };
            return library.data_exposed * (reduce(dense, self.data[0]) + reduce(experts, self.data[1]));
        }
        let layers = (self.layers / self.stages.max(1)).max(1) as f64;
        let both = |kind: Collective, bytes: f64| {
            let experts = if experts > 0.0 { run(kind, experts * bytes / layers, self.data[1]) } else { 0.0 };
            run(kind, dense * bytes / layers, self.data[0]) + experts
        };
        if self.data[0].size() <= 1 {
            return 0.0;
        }
        let gather = both(Collective::AllGather, 2.0);
        let reduce = both(Collective::ReduceScatter, library.gradient_bytes);
        let forward = layers * self.layer.forward + ends / 3.0;
        let backward = layers * (self.layer.backward + self.layer.again) + ends * 2.0 / 3.0;
        let shown = |all: f64, last: f64, beside: f64| overlap::shown(all, last, beside, library.shard_loss);
        // In a pipeline a stage's weights stay gathered, and its gradients whole, through the step.
        let times = if self.stages > 1 { 1 } else { self.microbatches };
        times as f64
            * (shown(layers * gather, gather, forward) + shown(layers * (gather + reduce), gather + reduce, backward))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A step of eight equal layers on eight hosts of A100s whose gradients are reduced over this group.
    fn step(library: &Library, tensor: u64, stages: u64, group: Group) -> Step {
        let cluster = Cluster::parse("a100-80:8x8", "a100-80").unwrap();
        let layer = Layer { forward: 1e-2, backward: 2e-2, tensor, parameters: 1e8, ..Layer::default() };
        let work = Work {
            cluster: &cluster,
            library,
            layer,
            layers: 8,
            ends: 1e-3,
            end_parameters: 0.0,
            microbatches: 8,
            stages,
            schedule: Schedule::OneForwardOneBackward,
            sent: 1e6,
            sends_away: stages > 1,
            data: [group; 2],
            zero: 0,
            ranks: 64,
        };
        work.seconds()
    }

    #[test]
    fn rings_of_some_of_a_nodes_devices_reach_less_of_its_ports() {
        let slow = Library::MEGATRON_DEEPSPEED;
        let even = Library { scattered_rings: 1.0, ..slow };
        for (tensor, within, is_scattered) in [(1, 8, false), (2, 4, true), (4, 2, true), (8, 1, false)] {
            let group = Group::of_nodes(within, 8);
            let ratio = step(&slow, tensor, 1, group).data / step(&even, tensor, 1, group).data;
            let expect = if is_scattered { 1.0 / slow.scattered_rings } else { 1.0 };
            assert!((ratio / expect - 1.0).abs() < 0.02, "{within} in a node: {ratio}");
        }
        // Nothing leaves the node.
        let inside = Group::of_nodes(4, 1);
        assert_eq!(step(&slow, 2, 1, inside).data, step(&even, 2, 1, inside).data);
    }

    #[test]
    fn pipelines_of_one_node_slow_each_other_down() {
        let library = Library::MEGATRON_DEEPSPEED;
        let alone = Library { pipeline_shared: 0.0, ..library };
        let loss = |tensor: u64, stages: u64| {
            let group = Group::of_nodes(8 / tensor, 8 / stages);
            step(&library, tensor, stages, group).pipeline / step(&alone, tensor, stages, group).pipeline - 1.0
        };
        for (tensor, stages) in [(1, 4), (8, 4), (2, 1)] {
            assert_eq!(loss(tensor, stages), 0.0, "{tensor} tensor ranks, {stages} stages");
        }
        // Four pipelines lose nine times what two do (layers of two ranks wait a little less for each other); a deeper
        // one has more borders and shorter stages.
        let ratio = loss(2, 4) / loss(4, 4);
        assert!((ratio - 9.0).abs() < 0.1, "{ratio}");
        assert!(loss(4, 4) > loss(4, 2));
    }

    #[test]
    fn the_slower_of_device_and_host_decides() {
        assert_eq!(beside_host(2.0, 0.0), 2.0);
        assert!(beside_host(2.0, 0.2) < 2.01);
        let tie = beside_host(1.0, 1.0);
        assert!(tie > 1.1 && tie < 1.3);
    }
}
