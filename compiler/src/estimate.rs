//! Memory of parameters, gradients and optimizer state, without a device or a trace.
//!
//! What shardc keeps per parameter: an fp32 master copy (4 bytes), beside it while a step runs a copy in
//! the precision of the products (2 bytes); an fp32 gradient (4 bytes); AdamW's two fp32 moments (8 bytes). In fp8 a
//! weight of a block has two arrangements of a byte, of which one lives at the peak where the step is one microbatch;
//! ZeRO-3 shards the 16-bit copy that both are made from, so there it is 2 bytes, as it is of embeddings, heads and
//! norms always.
//! ZeRO-1 shards the optimizer state and the master copy over the data ranks, ZeRO-2 the
//! gradients, ZeRO-3 every copy of the parameters (Rajbhandari et al., "ZeRO", SC 2020). Where the step is one
//! microbatch, ZeRO-1 divides the gradients as well: nothing is added to them, so each is reduced to the rank's part as
//! soon as it is there; and a copy is dropped behind the product that makes the gradient, so that the step holds all
//! copies, or all gradients, but never both.

use serde::Serialize;
use shardc_ir::units::counted;
use shardc_ir::{Bytes, Graph, Op};
use shardc_passes::fold::block_of;
use std::collections::BTreeMap;

/// Every precision, with the bytes of a parameter that lives for its products.
pub const PRECISIONS: [(&str, u64); 4] = [("fp32", 4), ("bf16", 2), ("fp16", 2), ("fp8", 1)];

/// Numbers of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// All of its parameters.
    pub parameters: u64,
    /// Those that products in 8 bits may read: the matrices of its blocks.
    pub matrices: u64,
    /// Those that are on a device at once at the least, where they come and go: of one block, or the largest parameter.
    pub at_once: u64,
}

impl Sizes {
    /// Of what a model's graph trains.
    pub fn of(graph: &Graph) -> Self {
        let mut sizes = Self { parameters: 0, matrices: 0, at_once: 0 };
        let mut blocks: BTreeMap<&str, u64> = BTreeMap::new();
        let is_trained = |op: &Op| matches!(op, Op::Parameter(leaf) if !leaf.frozen);
        for (_, node) in graph.nodes().filter(|(_, node)| is_trained(&node.op)) {
            let (ty, block) = (graph.ty(node.results[0]), block_of(graph, node));
            let count = ty.elements();
            sizes.parameters += count;
            sizes.at_once = sizes.at_once.max(count);
            sizes.matrices += if block.is_some() && ty.rank() > 1 { count } else { 0 };
            block.iter().for_each(|block| *blocks.entry(block).or_default() += count);
        }
        sizes.at_once = blocks.into_values().fold(sizes.at_once, u64::max);
        sizes
    }

    /// Bytes of the copies that products read, of `working` bytes each: shards are not of 8-bit floats, and over several
    /// microbatches both arrangements live.
    fn copies(self, working: u64, zero: u64, is_one: bool) -> u64 {
        let of_matrix = if is_one && zero < 3 { working } else { working.max(2) };
        self.matrices * of_matrix + (self.parameters - self.matrices) * working.max(2)
    }
}

/// The bytes of one rank under one choice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Row {
    /// One of [`PRECISIONS`].
    pub precision: &'static str,
    /// `adamw`, or `none` for inference.
    pub optimizer: &'static str,
    /// The ZeRO stage.
    pub zero: u64,
    /// Master parameters and copies.
    pub parameters: Bytes,
    /// Gradients, where several microbatches add to them.
    pub gradients: Bytes,
    /// Optimizer state.
    pub state: Bytes,
    /// All of it, where the step is one microbatch.
    pub in_one: Bytes,
}

impl Row {
    /// All of it.
    pub fn total(&self) -> Bytes {
        self.parameters + self.gradients + self.state
    }

    /// The least of it, in one microbatch or in several.
    fn least(&self) -> Bytes {
        self.in_one.min(self.total())
    }

    /// Whether it is of training in a precision.
    fn trains(&self, precision: &str) -> bool {
        self.optimizer != "none" && self.precision == precision
    }
}

/// A rank's part of so many bytes.
fn part(bytes: u64, ranks: u64, is_divided: bool) -> u64 {
    if is_divided { bytes.div_ceil(ranks) } else { bytes }
}

/// Every precision, optimizer and ZeRO stage, for a model over `ranks` data ranks.
pub fn estimate(sizes: Sizes, ranks: u64) -> Vec<Row> {
    let (ranks, parameters) = (ranks.max(1), sizes.parameters);
    let mut rows = Vec::new();
    for (precision, working) in PRECISIONS {
        let is_mixed = working < 4;
        rows.push(Row {
            precision,
            optimizer: "none",
            zero: 0,
            parameters: Bytes(sizes.copies(working, 0, true)),
            gradients: Bytes(0),
            state: Bytes(0),
            in_one: Bytes(sizes.copies(working, 0, true)),
        });
        for stage in 0..=3 {
            // One rank has nobody to divide anything with.
            let zero = if ranks == 1 { 0 } else { stage };
            let part = |bytes: u64, from_stage: u64| Bytes(part(bytes, ranks, zero >= from_stage));
            let share = |bytes: u64, from_stage: u64| part(parameters * bytes, from_stage);
            // In fp32 the master is the working copy: from stage 1 on, the shard is kept beside the
            // gathered copy, and from stage 3 on only the shard is.
            let master = share(4, 1);
            let has_copy = is_mixed || (zero > 0 && zero < 3);
            let copy = |is_one| if has_copy { part(sizes.copies(working, zero, is_one), 3) } else { Bytes(0) };
            let (gradients, state) = (share(4, 2), share(8, 1));
            let in_one = master + copy(true).max(share(4, 1)) + state;
            let (optimizer, zero, parameters) = ("adamw", stage, master + copy(false));
            rows.push(Row { precision, optimizer, zero, parameters, gradients, state, in_one });
        }
    }
    rows
}

/// What the ranks' memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// Each rank has a device with so much memory.
    Devices(Bytes),
    /// All ranks share a host with so much memory.
    Host(Bytes),
}

impl Room {
    /// The memory of each of so many ranks.
    pub fn per_rank(self, ranks: u64) -> Bytes {
        match self {
            Self::Devices(bytes) => bytes,
            Self::Host(bytes) => Bytes(bytes.0 / ranks.max(1)),
        }
    }
}

/// The stages of ZeRO from one on, as it is told.
fn from_stage(zero: u64) -> String {
    if zero < 3 { format!("ZeRO {zero} or more") } else { "ZeRO 3".to_string() }
}

/// How a model trains in such room: per precision, the lowest ZeRO stage that fits, or what stage 3
/// would need.
pub fn verdict(sizes: Sizes, ranks: u64, room: Room) -> Vec<String> {
    let rows = estimate(sizes, ranks);
    let memory = room.per_rank(ranks);
    let say = |precision: &str| {
        let is_trained = |row: &&Row| row.trains(precision);
        // A lower stage may do in one microbatch.
        let in_one = rows.iter().filter(is_trained).find(|row| row.in_one <= memory);
        if let Some(row) = rows.iter().filter(is_trained).find(|row| row.total() <= memory) {
            let in_one = match in_one.filter(|other| other.zero < row.zero) {
                Some(other) => format!(" (or with ZeRO {} in one microbatch)", other.zero),
                None => String::new(),
            };
            return format!(
                "{precision}: trains with {}{in_one}, and has {} per rank left for activations",
                from_stage(row.zero),
                memory - row.total()
            );
        }
        if let Some(row) = in_one {
            return format!(
                "{precision}: trains with {} in one microbatch, and has {} per rank left for activations",
                from_stage(row.zero),
                memory - row.in_one
            );
        }
        // With stage 3 the ranks together hold what one would.
        let whole = estimate(sizes, 1);
        let needed = whole.iter().filter(is_trained).map(Row::least).min().unwrap_or_default();
        let needs = match room {
            Room::Devices(bytes) => {
                let ranks = counted(needed.0.div_ceil(bytes.0.max(1)), "data rank");
                format!("takes {ranks} or more, and the activations")
            }
            Room::Host(_) => format!("needs {needed} and the activations"),
        };
        format!("{precision}: does not fit; with ZeRO 3 it {needs}")
    };
    PRECISIONS.map(|(precision, _)| say(precision)).to_vec()
}

/// How a model trains on devices of so much memory that leave their optimizer state, and if need be their gradients
/// and their parameters, in one host's memory beside them: a line per precision. The host keeps the master
/// copies, AdamW's moments and the gradients it is given: all of a step's at its end, or each as it is made, where that
/// is the rank's part of the sum. Of what comes and goes, a device has what is there [at once](Sizes::at_once).
/// `shardc plan --search all` says which of it to move and what that costs.
pub fn hosted(sizes: Sizes, ranks: u64, device: Bytes, host: Bytes) -> Vec<String> {
    let (ranks, parameters) = (ranks.max(1), sizes.parameters);
    let say = |(precision, working): (&str, u64)| {
        let mut leanest = None;
        let leaves = |zero: u64| zero >= 1 || ranks == 1;
        let ways = |zero| [(zero, false, false), (zero, leaves(zero), false), (zero, leaves(zero), true)];
        for (zero, leaves, streams) in (0..=3).flat_map(ways) {
            let share = |bytes: u64, from_stage: u64| part(parameters * bytes, ranks, zero >= from_stage);
            let copies = part(sizes.copies(working, zero, true), ranks, zero >= 3);
            // A gradient is whole until it is summed, and a copy while it is read.
            let there = |bytes: u64, all: u64| (sizes.at_once * bytes).min(all);
            let gradients = if leaves { there(4, parameters * 4) } else { share(4, 2) };
            let on_device = gradients + if streams { there(working, copies) } else { copies };
            let on_host = Bytes(ranks * (share(4 + 8 + 4, 1) + if streams { copies } else { 0 }));
            let given = if leaves { "+gradients" } else { "" };
            let (streamed, also) = if streams { ("+parameters", ", and what the passes read") } else { ("", "") };
            if on_host <= host
                && let Some(left) = device.0.checked_sub(on_device)
            {
                let left = Bytes(left);
                let zero = from_stage(zero);
                return format!(
                    "{precision}: trains with {zero} and offload=optimizer{given}{streamed}: the host holds {on_host} \
                     (master copies, moments and gradients{also}), and each device has at most {left} left for activations"
                );
            }
            let needed = (on_host, Bytes(on_device));
            leanest = Some(leanest.map_or(needed, |least: (Bytes, Bytes)| least.min(needed)));
        }
        let (on_host, on_device) = leanest.unwrap_or_default();
        if estimate(sizes, ranks).iter().any(|row| row.trains(precision) && row.least() <= device) {
            return format!(
                "{precision}: trains on the devices alone; for offload=optimizer the host would need {on_host}"
            );
        }
        format!("{precision}: does not fit; at least it needs {on_host} of the host and {on_device} of each device")
    };
    PRECISIONS.map(say).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thousand parameters, all of them matrices of blocks of ten.
    const MODEL: Sizes = Sizes { parameters: 1000, matrices: 1000, at_once: 10 };

    #[test]
    fn verdicts_name_the_stage_or_the_ranks() {
        let check = |memory: u64, expect: [&str; 2]| {
            for room in [Room::Devices(Bytes(memory)), Room::Host(Bytes(memory * 10))] {
                for (line, expect) in verdict(MODEL, 10, room).iter().zip(expect) {
                    assert!(line.contains(expect), "{line}");
                }
            }
        };
        check(18_000, ["ZeRO 0 or more, and has 1.95 KiB per rank left", "ZeRO 0 or more, and has 0 B per rank left"]);
        let either = "ZeRO 2 or more (or with ZeRO 1 in one microbatch), and has";
        check(5700, [either, either]);
        let bf16 = "ZeRO 3 in one microbatch, and has 0 B per rank left";
        check(1600, ["ZeRO 3, and has 0 B per rank left", bf16]);
        check(1500, ["does not fit; with ZeRO 3 it ", "does not fit; with ZeRO 3 it "]);
        let check = |room, expect: &str| assert!(verdict(MODEL, 10, room)[1].contains(expect));
        check(Room::Devices(Bytes(1500)), "it takes 11 data ranks or more, and the activations");
        check(Room::Host(Bytes(15_000)), "it needs 15.62 KiB and the activations");
    }

    /// One rank has nobody to divide anything with: every stage takes what stage 0 takes.
    #[test]
    fn one_rank_divides_nothing() {
        for of_one in estimate(MODEL, 1).chunk_by(|a, b| (a.precision, a.optimizer) == (b.precision, b.optimizer)) {
            assert!(of_one.iter().all(|row| row.total() == of_one[0].total()), "{of_one:?}");
        }
    }

    #[test]
    fn hosts_take_what_devices_cannot() {
        let check = |device: u64, host: u64, expect: &str| {
            let line = hosted(MODEL, 10, Bytes(device), Bytes(host)).remove(1);
            assert!(line.contains(expect), "{line}");
        };
        check(6000, 160_000, "bf16: trains with ZeRO 0 or more and offload=optimizer: the host holds");
        check(6000, 16_000, "trains with ZeRO 1 or more");
        check(20_000, 10, "bf16: trains on the devices alone; for offload=optimizer the host would need");
        check(2400, 16_000, "trains with ZeRO 1 or more and offload=optimizer+gradients: the");
        check(600, 16_000, "trains with ZeRO 3 and offload=optimizer: the host holds 15.62 KiB");
        check(400, 16_000, "trains with ZeRO 3 and offload=optimizer+gradients:");
        check(100, 18_000, "trains with ZeRO 3 and offload=optimizer+gradients+parameters:");
        check(100, 18_000, "each device has at most 40 B left");
        check(100, 16_000, "does not fit; at least it needs 15.62 KiB of the host and 240 B of each device");
        let alone = hosted(MODEL, 1, Bytes(2040), Bytes(16_000)).remove(1);
        assert!(alone.contains("trains with ZeRO 0 or more and offload=optimizer+gradients:"), "{alone}");
    }

    #[test]
    fn zero_divides_what_its_stage_says() {
        let check = |precision: &str, zero: u64, expect: u64| {
            let rows = estimate(MODEL, 10);
            let row =
                rows.iter().find(|row| row.precision == precision && row.zero == zero && row.optimizer == "adamw");
            assert_eq!(row.map(|row| row.total().0), Some(expect), "{precision} zero {zero}");
        };
        check("fp32", 0, 16_000);
        check("fp32", 1, 400 + 4000 + 4000 + 800);
        check("fp32", 2, 400 + 4000 + 400 + 800);
        check("fp32", 3, 400 + 400 + 800);
        check("bf16", 0, 18_000);
        check("bf16", 1, 400 + 2000 + 4000 + 800);
        check("bf16", 3, 400 + 200 + 400 + 800);
        check("fp16", 3, 400 + 200 + 400 + 800);
        check("fp8", 1, 400 + 2000 + 4000 + 800);
        check("fp8", 3, 400 + 200 + 400 + 800);
        // In one microbatch, stage 1 holds what stage 2 holds, and nothing needs more than in several.
        for rows in estimate(MODEL, 10).chunk_by(|a, b| (a.precision, a.optimizer) == (b.precision, b.optimizer)) {
            let [_, one, two, _] = rows else { continue };
            assert!(one.in_one == two.in_one && one.in_one < one.total());
            assert!(rows.iter().all(|row| row.in_one <= row.total()), "{rows:?}");
        }
        let in_one = |precision: &str, zero: u64| {
            let rows = estimate(MODEL, 10);
            let is_own = |row: &&Row| row.precision == precision && row.zero == zero && row.optimizer == "adamw";
            rows.iter().find(is_own).map(|row| row.in_one.0)
        };
        assert_eq!(in_one("bf16", 0), Some(4000 + 4000 + 8000));
        assert_eq!(in_one("bf16", 1), Some(400 + 2000 + 800));
        assert_eq!(in_one("fp8", 1), Some(400 + 1000 + 800));
    }
}
