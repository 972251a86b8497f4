//! Requests drawn at random: a model, devices, and a plan's choices, of sizes that people train.

use shardc::NamedModel;
use shardc_passes::random::Random;
use std::fmt;

/// What is planned, and by which choices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    /// A built-in model.
    pub model: &'static str,
    /// Its devices.
    pub cluster: String,
    /// Sequences, or other samples, of a step.
    pub batch: u64,
    /// Tokens of a sequence; of a sample that has none, 0.
    pub seq: u64,
    /// The choices.
    pub pins: String,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, cluster, batch, seq, pins } = self;
        write!(f, "{model} --cluster {cluster} --batch {batch} --seq {seq} --pin {pins}")
    }
}

/// Models with the most tokens of a sequence; those without tokens have none.
const MODELS: [(&str, u64); 16] = [
    ("gpt2-124m", 1024),
    ("gpt2-355m", 1024),
    ("gpt2-1.5b", 1024),
    ("gpt3-1.3b", 2048),
    ("gpt3-6.7b", 2048),
    ("gpt3-13b", 2048),
    ("llama-160m", 4096),
    ("llama-1b", 8192),
    ("llama-3.2-1b", 8192),
    ("llama-3b", 8192),
    ("llama-8b", 8192),
    ("llama-70b", 8192),
    ("mixtral-8x7b", 4096),
    ("resnet-50", 0),
    ("unet", 0),
    ("mixer-b-16", 0),
];
const DEVICES: [&str; 9] = ["h100", "h200", "b200", "a100-40", "a100-80", "v100", "l40s", "rtx3090", "rtx4090"];

/// Requests that follow from a seed.
#[derive(Clone, Debug)]
pub struct Draw(Random);

impl Draw {
    /// From a seed.
    pub fn new(seed: u64) -> Self {
        Self(Random(seed))
    }

    fn below(&mut self, bound: usize) -> usize {
        self.0.below(bound)
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    /// One of the numbers that divide another.
    fn part(&mut self, of: u64, all: &[u64]) -> u64 {
        let parts: Vec<u64> = all.iter().copied().filter(|part| of.is_multiple_of(*part)).collect();
        self.of(&parts)
    }

    /// A request.
    pub fn case(&mut self) -> Case {
        let (model, most) = self.of(&MODELS);
        let layers =
            NamedModel::find(model).ok().and_then(|mut model| model.config.layers().map(|layers| *layers as u64));
        let (per_node, nodes) = (self.of(&[1, 2, 4, 8, 8]), self.of(&[1, 1, 2, 4, 8]));
        let device = self.of(&DEVICES);
        let cluster = if nodes == 1 { format!("{device}:{per_node}") } else { format!("{device}:{per_node}x{nodes}") };
        let mut left = per_node * nodes;
        let mut pins = Vec::new();
        let mut take = |own: &mut Self, name: &str, all: &[u64]| {
            let size = own.part(left, all);
            left /= size;
            if size > 1 {
                pins.push(format!("{name}={size}"));
            }
            size
        };
        let is_text = most > 0;
        let stages = match layers.filter(|_| is_text && self.below(2) == 0) {
            Some(_) => take(self, "pp", &[1, 2, 4, 8]),
            None => 1,
        };
        take(self, "tp", &[1, 1, 2, 4, 8]);
        if is_text && self.below(4) == 0 {
            let name = self.of(&["cp", "ulysses"]);
            take(self, name, &[2, 4, 1]);
        }
        if model.starts_with("mixtral") {
            take(self, "ep", &[8, 4, 2, 1]);
        }
        let data = left;
        pins.push(format!("dp={data}"));
        let most_zero = if stages > 1 { 2 } else { 4 };
        let zero = if data > 1 { self.below(most_zero) } else { 0 };
        let (microbatch, count) = match is_text {
            true => (self.of(&[1, 1, 2, 4, 8]), self.of(&[1, 1, 2, 4, 8]) * if stages > 1 { 2 * stages } else { 1 }),
            false => (self.of(&[8, 16, 32, 64]), 1),
        };
        pins.push(format!("zero={zero},microbatch={microbatch}"));
        if stages > 1 {
            let schedule = self.of(&["1f1b", "gpipe", "zbv", "zbv", "interleaved,virtual=2", "interleaved,virtual=4"]);
            pins.push(format!("schedule={schedule}"));
        }
        if is_text && self.below(3) == 0 {
            pins.push(format!("recompute={}", self.of(&["block", "selective"])));
        }
        let seq = if is_text { self.of(&[512, 1024, 2048, 4096, 8192]).min(most) } else { 0 };
        Case { model, cluster, batch: data * microbatch * count, seq, pins: pins.join(",") }
    }
}
