//! Pins: choices that the user fixes.

use super::degrees;
use super::offload::{Offload, Offloads};
use crate::search::error::PlanError;

use shardc_ir::pipeline::{self, Schedule};
use shardc_ir::units::counted;
use shardc_ir::{Family, Plan};
use std::collections::BTreeMap;
use std::fmt;

/// How much of the forward pass is recomputed in the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Recompute {
    /// Nothing: every value that the backward pass reads is kept.
    None,
    /// Everything in the blocks but products and attention.
    Selective,
    /// The values that free the most memory per second, by so many steps (see
    /// [`recompute`](crate::search::estimate::recompute)).
    Values(u64),
    /// The first so many blocks.
    Blocks(u64),
    /// Every block.
    All,
}

impl Recompute {
    /// As many steps of [`Values`](Self::Values) as it takes to fit.
    pub const BY_NEED: Self = Self::Values(u64::MAX);

    /// With at most `steps` steps.
    pub(in crate::search) fn within(self, steps: u64) -> Self {
        match self {
            Self::BY_NEED => self,
            Self::Values(_) if steps == 0 => Self::None,
            Self::Values(count) => Self::Values(count.min(steps)),
            _ => self,
        }
    }

    /// Reads the value of a pin.
    fn parse(text: &str) -> Result<Self, String> {
        Ok(match text {
            "none" | "0" => Self::None,
            "selective" => Self::Selective,
            "value" => Self::BY_NEED,
            "block" | "full" => Self::All,
            _ => {
                let (kind, count) = text.split_once(':').unwrap_or(("", text));
                let count = count.parse().ok().filter(|_| matches!(kind, "" | "value"));
                let known = "none, selective, value, value:STEPS, block or a number of blocks";
                let count = count.ok_or_else(|| format!("`{text}` is not {known}"))?;
                match (kind, count) {
                    ("", _) => Self::Blocks(count),
                    (_, 0) => Self::None,
                    _ => Self::Values(count),
                }
            }
        })
    }

    /// Reads what one stage of a pipeline does.
    fn parse_of_stage(text: &str) -> Result<Self, String> {
        // How much memory needs is found for all stages alike, and a number of blocks counts those of the model.
        let is_of_stage = |own: &Self| !matches!(*own, Self::BY_NEED | Self::Blocks(_));
        Self::parse(text).ok().filter(is_of_stage).ok_or_else(|| {
            format!(
                "`{text}` is not none, selective, value:STEPS or block; write one for each stage: block/selective/none"
            )
        })
    }
}

impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::None => f.write_str("none"),
            Self::Selective => f.write_str("selective"),
            Self::BY_NEED => f.write_str("value"),
            Self::Values(steps) => write!(f, "value:{steps}"),
            Self::Blocks(count) => write!(f, "{count}"),
            Self::All => f.write_str("block"),
        }
    }
}

/// The families that divide parameters or a sequence; they may be pinned to have several axes.
const INNER: [Family; 4] = [Family::Ring, Family::Ulysses, Family::Context, Family::Tensor];

/// The most axes of one family.
const MOST_AXES: usize = 4;

/// Reads the sizes of several axes of one family: `2x4`.
fn sizes(text: &str) -> Result<Vec<u64>, String> {
    let sizes = text.split('x').map(|size| size.parse::<u64>().ok().filter(|size| *size > 1));
    let sizes = sizes.collect::<Option<Vec<u64>>>().filter(|sizes| sizes.len() <= MOST_AXES);
    let is_countable = |sizes: &Vec<u64>| sizes.iter().try_fold(1u64, |all, size| all.checked_mul(*size)).is_some();
    sizes.filter(is_countable).ok_or_else(|| format!("`{text}` is not a product of sizes above 1, as 2x4 is"))
}

fn number(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("`{text}` is not a whole number"))
}

fn positive(text: &str) -> Result<u64, String> {
    match number(text)? {
        0 => Err("it must be at least 1".to_string()),
        number => Ok(number),
    }
}

/// Each of some numbers from 1 on, once.
fn order(text: &str) -> Result<Vec<u64>, String> {
    let order = text.split('/').map(positive).collect::<Result<Vec<u64>, String>>()?;
    let is_whole = (1..=order.len() as u64).all(|number| order.contains(&number));
    is_whole.then_some(order).ok_or_else(|| format!("`{text}` does not number each part once, as 2/1 does"))
}

fn flag(text: &str) -> Result<bool, String> {
    match text {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err(format!("`{text}` is not 0 or 1")),
    }
}

fn schedule(text: &str) -> Result<Schedule, String> {
    let known = || Schedule::ALL.map(Schedule::name).join(", ");
    Schedule::from_name(text).ok_or_else(|| format!("`{text}` is no schedule; known are {}", known()))
}

/// Pins that cannot be met.
fn fail(pin: impl Into<String>, message: impl Into<String>) -> Result<(), PlanError> {
    Err(PlanError::Pin { pin: pin.into(), message: message.into() })
}

/// What is fixed; all else is searched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pins {
    /// The sizes of the axes of families, each at least 1: one, or several as of `tp=2x4`. With `fsdp=1` there are no
    /// replicas of parts.
    pub axes: BTreeMap<Family, Vec<u64>>,
    /// The order in which the stages of a pipeline run their microbatches.
    pub schedule: Option<Schedule>,
    /// Chunks of each stage (virtual stages).
    pub virtual_stages: Option<u64>,
    /// The most chunks of microbatches whose activations a stage holds.
    pub in_flight: Option<u64>,
    /// The most chunks of microbatches whose gradients of weights a stage of zero-bubble V delays.
    pub delayed: Option<u64>,
    /// ZeRO stage, 0 to 3.
    pub zero: Option<u64>,
    /// Sequences per data rank per microbatch, as in Megatron.
    pub microbatch: Option<u64>,
    /// Recomputation.
    pub recompute: Option<Recompute>,
    /// Recomputation of each stage of a pipeline; empty if it is open.
    pub stage_recompute: Vec<Recompute>,
    /// Chunks of the head and its loss; 1 for none.
    pub loss_chunks: Option<u64>,
    /// Chunks of a rank's microbatch that overlap in the blocks; 1 for none.
    pub overlap_chunks: Option<u64>,
    /// Whether casts of parameters are kept from step to step.
    pub keep_casts: Option<bool>,
    /// What lies away from the device, of every stage.
    pub offload: Option<Offload>,
    /// The same of each stage of a pipeline; empty if it is open.
    pub stage_offload: Vec<Offload>,
    /// The kinds of nodes of the cluster, each by its number, from 1 on, in the order in which they hold the stages; empty if
    /// it is open.
    pub parts: Vec<u64>,
}

impl Pins {
    /// The pins that would fix what a plan chose; none if its choice cannot be read.
    pub fn chosen(plan: &Plan) -> Self {
        Self::parse(&plan.choice).unwrap_or_default()
    }

    /// Reads pins such as `dp=2,tp=2x4,zero=1,recompute=value:3`, in any order and each at most once; an empty text fixes
    /// nothing. [`Family`] names those that divide the ranks; a product such as `2x4` makes several axes of one.
    pub fn parse(text: &str) -> Result<Self, PlanError> {
        let mut pins = Self::default();
        if text.trim().is_empty() {
            return Ok(pins);
        }
        let mut names = Vec::new();
        for part in text.split(',').map(str::trim) {
            let pin = |message: String| PlanError::Pin { pin: part.to_string(), message };
            if part.is_empty() {
                let message = "there is nothing before or after one of its commas; take the comma out".to_string();
                return Err(PlanError::Pin { pin: text.to_string(), message });
            }
            let (name, value) =
                part.split_once('=').ok_or_else(|| pin("write NAME=VALUE, for instance dp=2".to_string()))?;
            let (name, value) = (name.trim_end(), value.trim_start());
            if names.contains(&name) {
                return Err(pin(format!("`{name}` is pinned twice")));
            }
            names.push(name);
            pins.set(name, value).map_err(pin)?;
        }
        if pins.zero.is_some_and(|zero| zero > 3) {
            return Err(PlanError::Pin { pin: text.to_string(), message: "ZeRO has stages 0 to 3".to_string() });
        }
        Ok(pins)
    }

    /// Fixes one choice.
    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        if let Some(family) = Family::from_name(name).filter(|family| !family.is_time()) {
            let has_several = INNER.contains(&family) && value.contains('x');
            let sizes = if has_several { sizes(value)? } else { vec![positive(value)?] };
            self.axes.insert(family, sizes);
            return Ok(());
        }
        match name {
            "schedule" => self.schedule = Some(schedule(value)?),
            "virtual" => self.virtual_stages = Some(positive(value)?),
            "in_flight" => self.in_flight = Some(positive(value)?),
            "delayed" => self.delayed = Some(positive(value)?),
            "zero" => self.zero = Some(number(value)?),
            "microbatch" => self.microbatch = Some(positive(value)?),
            "recompute" => self.recompute = Some(Recompute::parse(value)?),
            "stage_recompute" => {
                self.stage_recompute = value.split('/').map(Recompute::parse_of_stage).collect::<Result<_, _>>()?;
            }
            "loss_chunks" => self.loss_chunks = Some(positive(value)?),
            "overlap_chunks" => self.overlap_chunks = Some(positive(value)?),
            "keep_casts" => self.keep_casts = Some(flag(value)?),
            "offload" => self.offload = Some(Offload::parse(value)?),
            "stage_offload" => self.stage_offload = value.split('/').map(Offload::parse).collect::<Result<_, _>>()?,
            "parts" => self.parts = order(value)?,
            _ => {
                let known = "dp, fsdp, ep, ring, ulysses, cp, tp, pp, schedule, virtual, in_flight, delayed, zero, \
                             microbatch, recompute, stage_recompute, loss_chunks, overlap_chunks, keep_casts, offload, stage_offload, \
                             parts";
                return Err(format!("unknown pin `{name}`; known are {known}"));
            }
        }
        Ok(())
    }

    /// The degree of a family, if it is pinned.
    pub fn degree(&self, family: Family) -> Option<u64> {
        self.axes.get(&family).map(|sizes| sizes.iter().product())
    }

    /// The sizes of the axes of a family that is pinned to have several.
    pub fn several(&self, family: Family) -> Option<&Vec<u64>> {
        self.axes.get(&family).filter(|sizes| sizes.len() > 1)
    }

    /// The degrees that are pinned.
    pub fn degrees(&self) -> impl Iterator<Item = (Family, u64)> {
        self.axes.iter().map(|(family, sizes)| (*family, sizes.iter().product()))
    }

    /// The pin of a family, as it was written.
    pub(in crate::search) fn pin(&self, family: Family) -> String {
        degrees::text(family, self.axes.get(&family).map_or(&[], Vec::as_slice))
    }

    /// The pins of all degrees.
    fn pinned(&self) -> String {
        self.axes.keys().map(|family| self.pin(*family)).collect::<Vec<_>>().join(",")
    }

    /// The ranks that some families have together, as far as they are pinned.
    pub fn product(&self, families: &[Family]) -> u64 {
        families.iter().filter_map(|family| self.degree(*family)).fold(1, u64::saturating_mul)
    }

    /// Whether the degree of one of some families is pinned.
    pub fn fixes(&self, families: &[Family]) -> bool {
        families.iter().any(|family| self.axes.contains_key(family))
    }

    /// What is pinned to lie away from the devices.
    pub fn offloads(&self) -> Option<Offloads> {
        let of_all = || self.offload.map(|pin| Offloads::new(vec![pin]));
        if self.stage_offload.is_empty() { of_all() } else { Some(Offloads::new(self.stage_offload.clone())) }
    }

    /// Pins of what a choice names only where it differs from the default, as further parts of the choice: pinned defaults.
    pub(in crate::search) fn unnamed(&self) -> String {
        let pinned = [
            (self.loss_chunks == Some(1), "loss_chunks=1"),
            (self.overlap_chunks == Some(1), "overlap_chunks=1"),
            (self.keep_casts == Some(false), "keep_casts=0"),
            (self.offloads().is_some_and(|pinned| pinned.is_none()), "offload=none"),
        ];
        pinned.into_iter().filter(|(is_pinned, _)| *is_pinned).map(|(_, part)| format!(",{part}")).collect()
    }

    /// Whether a pin asks for pipeline stages.
    pub fn opens_stages(&self) -> bool {
        let has_chunks =
            self.virtual_stages.is_some_and(|pin| pin > 1) || self.in_flight.is_some() || self.delayed.is_some();
        self.degree(Family::Pipeline).map_or(self.schedule.is_some() || has_chunks, |pin| pin > 1)
    }

    /// Whether all ranks may be data ranks, but those that are pinned to be something else, in microbatches as large as is
    /// pinned.
    pub fn leaves_data(&self, ranks: u64, batch: u64) -> bool {
        let open = ranks / self.product(&INNER);
        let is_pinned = !self.fixes(&[Family::Data]) || self.product(&Family::DATA) >= open;
        let samples = open.saturating_mul(self.microbatch.unwrap_or(1));
        is_pinned && batch.is_multiple_of(ranks) && batch.is_multiple_of(samples)
    }

    /// Whether the pins agree with each other, the cluster and the batch.
    pub fn check(&self, ranks: u64, batch: u64) -> Result<(), PlanError> {
        if let (Some(1), Some(schedule)) = (self.degree(Family::Pipeline), self.schedule) {
            let message = "a schedule is that of pipeline stages; pin pp above 1, or leave it out";
            return fail(format!("pp=1,schedule={}", schedule.name()), message);
        }
        if let Some(chunks) = self.overlap_chunks.filter(|chunks| *chunks > MOST_CHUNKS) {
            let message = format!("every block is computed once per chunk; use at most {MOST_CHUNKS}, such as 2 or 4");
            return fail(format!("overlap_chunks={chunks}"), message);
        }
        self.check_each_stage()?;
        self.check_limits()?;
        self.check_virtual_stages()?;
        self.check_ranks(ranks)?;
        if let (Some(fsdp), Some(0)) = (self.degree(Family::Fsdp).filter(|fsdp| *fsdp > 1), self.zero) {
            let message = "with ZeRO stage 0 every data rank stores all; pin zero=1, 2 or 3";
            return fail(format!("fsdp={fsdp},zero=0"), message);
        }
        self.check_batch(ranks, batch)
    }

    /// Whether what is pinned of each stage is pinned of all of them, and agrees with what is pinned of the whole.
    fn check_each_stage(&self) -> Result<(), PlanError> {
        let pinned = self.degree(Family::Pipeline);
        let named = [
            ("stage_recompute", "recompute", self.stage_recompute.len() as u64),
            ("stage_offload", "offload", self.stage_offload.len() as u64),
        ];
        for (name, of_all, named) in named.into_iter().filter(|(_, _, named)| *named > 0) {
            if pinned == Some(named) && named > 1 {
                continue;
            }
            let message = match pinned {
                Some(1) => format!("it is of pipeline stages, and pp=1 has none; pin {of_all} instead"),
                Some(stages) => format!("it names {named} of the {stages} stages of pp={stages}; name one for each"),
                None if named == 1 => "it names one stage; name one for each stage, and pin pp with it".to_string(),
                None => format!("it names {named} stages; pin pp={named} with it"),
            };
            return fail(name, message);
        }
        if let Some(pin) = self.offload.filter(|_| !self.stage_offload.is_empty()) {
            return fail(format!("offload={pin}"), "stage_offload says it of each stage; leave one of them out");
        }
        if let (Some(pin), Some(most)) = (self.recompute, self.stage_recompute.iter().max())
            && pin != *most
        {
            let message = format!("by stage_recompute it is {most} at most; leave recompute out, or pin {most}");
            return fail(format!("recompute={pin}"), message);
        }
        Ok(())
    }

    /// Whether a schedule can hold as many chunks as is pinned.
    fn check_limits(&self) -> Result<(), PlanError> {
        let schedule = self.schedule.unwrap_or(Schedule::ZeroBubbleV);
        let limits = [
            ("in_flight", self.in_flight, Schedule::check_in_flight as fn(Schedule, u64) -> Result<(), String>),
            ("delayed", self.delayed, Schedule::check_delayed),
        ];
        for (name, chunks, check) in limits {
            let Some(chunks) = chunks else { continue };
            if self.degree(Family::Pipeline) == Some(1) {
                let message = "it is of a pipeline; pin pp above 1, or leave it out";
                return fail(format!("pp=1,{name}={chunks}"), message);
            }
            if let Err(message) = check(schedule, chunks) {
                return fail(format!("{name}={chunks}"), message);
            }
        }
        Ok(())
    }

    /// Whether a stage can run as many chunks as is pinned.
    fn check_virtual_stages(&self) -> Result<(), PlanError> {
        let Some(chunks) = self.virtual_stages else { return Ok(()) };
        if self.degree(Family::Pipeline) == Some(1) && chunks > 1 {
            let message = "several chunks are those of a pipeline stage; pin pp above 1, or leave it out";
            return fail(format!("pp=1,virtual={chunks}"), message);
        }
        if chunks > pipeline::MOST_CHUNKS {
            let most = pipeline::MOST_CHUNKS;
            return fail(format!("virtual={chunks}"), format!("all stages have at most {most} chunks; write fewer"));
        }
        match self.schedule.map_or(Ok(()), |schedule| schedule.check_chunks(chunks)) {
            Ok(()) => Ok(()),
            Err(message) => fail(format!("virtual={chunks}"), message),
        }
    }

    /// Whether how many stages there are is left to the search.
    fn leaves_stages(&self) -> bool {
        !self.fixes(&[Family::Pipeline]) && self.opens_stages()
    }

    /// Whether the degrees divide the ranks of the cluster.
    fn check_ranks(&self, ranks: u64) -> Result<(), PlanError> {
        for (family, degree) in self.degrees() {
            if !ranks.is_multiple_of(degree) {
                let all = counted(ranks, "rank");
                let message = format!("{degree} does not divide the cluster's {all}; use a divisor of {ranks}");
                return fail(self.pin(family), message);
            }
        }
        let all = self.degrees().fold(1u64, |all, (_, degree)| all.saturating_mul(degree));
        let are_all = self.fixes(&[Family::Data]) && self.fixes(&[Family::Tensor]) && !self.leaves_stages();
        if !ranks.is_multiple_of(all) || (are_all && all != ranks) {
            let mut fix = if self.axes.len() == 2 { "pin only one of them" } else { "pin fewer of them" }.to_string();
            if ranks.is_multiple_of(all) && !self.fixes(&Family::CONTEXT) {
                fix += &format!(", or cp={} as well", ranks / all);
            }
            let message = format!("they make {} and the cluster has {ranks}; {fix}", counted(all, "rank"));
            return fail(self.pinned(), message);
        }
        Ok(())
    }

    /// Whether the batch divides over the data ranks, as many as are known, and into their microbatches.
    fn check_batch(&self, ranks: u64, batch: u64) -> Result<(), PlanError> {
        // All of what divides the batch does so, whatever else there is.
        let least = self.product(&Family::DATA);
        if !batch.is_multiple_of(least) {
            let pinned = self.degrees().filter(|(family, degree)| Family::DATA.contains(family) && *degree > 1);
            let pinned: Vec<String> = pinned.map(|(family, degree)| format!("{family}={degree}")).collect();
            let ranks = counted(least, "data rank");
            let message = format!("a batch of {batch} does not divide over {ranks}; use a multiple of {least}");
            return fail(pinned.join(","), message);
        }
        let rest = self.product(&[&[Family::Pipeline][..], &INNER].concat());
        let data = match self.degree(Family::Data) {
            Some(_) => Some(least),
            None => self.degree(Family::Tensor).filter(|_| !self.leaves_stages()).map(|_| ranks / rest),
        };
        // Ranks that samples do not fill may divide the sequence instead.
        let may_divide_sequence = !self.fixes(&[Family::Data]) && !self.fixes(&Family::CONTEXT);
        let data = data.filter(|data| !may_divide_sequence || batch.is_multiple_of(*data));
        if let Some(data) = data.filter(|data| !batch.is_multiple_of(*data)) {
            let ranks = counted(data, "data rank");
            let message =
                format!("a batch of {batch} does not divide over the {ranks} that are left; use a multiple of {data}");
            return fail(self.pinned(), message);
        }
        let Some(microbatch) = self.microbatch else { return Ok(()) };
        let data = data.unwrap_or(least);
        let parts = data.saturating_mul(microbatch);
        if !batch.is_multiple_of(parts) {
            let ranks = counted(data, "data rank");
            let message = format!(
                "a batch of {batch} does not divide into {ranks} times microbatches of {microbatch}; use a multiple of \
                 {parts}"
            );
            return fail(format!("microbatch={microbatch}"), message);
        }
        Ok(())
    }
}

/// The most chunks that may be pinned: every node of a block is one in each.
pub(in crate::search) const MOST_CHUNKS: u64 = 32;

/// Whether a microbatch of so many samples can be cut into chunks: of a single one the tokens are.
pub(in crate::search) fn divides(microbatch: u64, chunks: u64) -> bool {
    microbatch == 1 || microbatch.is_multiple_of(chunks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expect: &str) {
        let result = Pins::parse(text).and_then(|pins| pins.check(4, 8).map(|()| pins));
        let text = result.map_or_else(|error| error.to_string(), |pins| format!("{pins:?}"));
        assert!(text.contains(expect), "{text}");
    }

    #[test]
    fn pins_of_degrees() {
        check("", "axes: {}");
        check("dp", "write NAME=VALUE");
        check("fsdq=2", "unknown pin `fsdq`; known are dp, fsdp, ep, ring, ulysses, cp, tp");
        for text in [",", "dp=2,", ",dp=2", "dp=2, ,tp=2"] {
            check(text, "nothing before or after one of its commas");
        }
        check("dp=2,tp=2,zero=1", "axes: {Data: [2], Tensor: [2]}, schedule: None");
        check("tp=2x2,zero=1", "axes: {Tensor: [2, 2]}");
        check("dp=2,tp=4", "they make 8 ranks and the cluster has 4");
        check("dp=1,tp=2", "they make 2 ranks and the cluster has 4; pin only one of them, or cp=2 as well");
        check("cp=2,tp=2x2", "pin `cp=2,tp=2x2`: they make 8 ranks and the cluster has 4; pin only one of them");
        check("pp=2,dp=2,tp=2", "pin `pp=2,dp=2,tp=2`: they make 8 ranks and the cluster has 4");
        check("dp=3", "3 does not divide the cluster's 4 ranks");
        check("ep=3", "3 does not divide the cluster's 4 ranks");
        check("pp=3", "3 does not divide the cluster's 4 ranks");
        check("pp=1,tp=0", "at least 1");
        check("tp=2x0", "`2x0` is not a product of sizes above 1, as 2x4 is");
        check("dp=2x2", "`2x2` is not a whole number");
        check("zero=4", "stages 0 to 3");
        check("fsdp=2,zero=0", "with ZeRO stage 0 every data rank stores all; pin zero=1, 2 or 3");
    }

    #[test]
    fn pins_of_batches() {
        check("dp=4,microbatch=3", "a batch of 8 does not divide into 4 data ranks times microbatches of 3");
        check("dp=1,fsdp=4,microbatch=4", "a batch of 8 does not divide into 4 data ranks times microbatches of 4");
        check("dp=4,microbatch=18446744073709551615", "a batch of 8 does not divide into 4 data ranks");
        let left = Pins::parse("tp=2,cp=2").and_then(|pins| pins.check(12, 8)).map_err(|error| error.to_string());
        let message = "pin `cp=2,tp=2`: a batch of 8 does not divide over the 3 data ranks that are left";
        assert!(left.as_ref().is_err_and(|error| error.contains(message)), "{left:?}");
        let leaves = |text: &str| Pins::parse(text).map(|pins| pins.leaves_data(8, 16)).unwrap_or_default();
        for text in ["", "dp=8", "dp=2,fsdp=4", "tp=2", "dp=4,tp=2", "microbatch=2", "tp=4,microbatch=8"] {
            assert!(leaves(text), "{text}");
        }
        for text in ["dp=2", "dp=2,fsdp=2", "dp=2,cp=2", "microbatch=4", "tp=4,microbatch=16"] {
            assert!(!leaves(text), "{text}");
        }
    }

    #[test]
    fn pins_of_pipelines() {
        check("pp=2,schedule=1f1b", "axes: {Pipeline: [2]}, schedule: Some(OneForwardOneBackward)");
        check("pp=2,schedule=2f2b", "`2f2b` is no schedule; known are gpipe, 1f1b, interleaved, zbv");
        check("pp=1,schedule=1f1b", "a schedule is that of pipeline stages");
        check("pp=2,schedule=1f1b,virtual=2", "several take schedule interleaved");
        check("pp=2,schedule=interleaved,virtual=1", "at least two chunks");
        check("pp=2,schedule=zbv,virtual=3", "a stage of schedule zbv runs two chunks, not 3");
        check(
            "pp=2,schedule=interleaved,virtual=9223372036854775808",
            "all stages have at most 65536 chunks; write fewer",
        );
        check("pp=2,schedule=gpipe,in_flight=4", "4 chunks take another schedule");
        check("pp=1,in_flight=4", "pin pp above 1");
        check("in_flight=4294967297", "at most 4294967296");
        check("pp=2,in_flight=0", "it must be at least 1");
        check("pp=2,schedule=1f1b,delayed=4", "to delay those of 4 chunks takes schedule zbv");
        check("pp=1,delayed=4", "pin pp above 1");
    }

    #[test]
    fn pins_of_memory() {
        check("recompute=1,recompute=none", "`recompute` is pinned twice");
        check("recompute=value:3,tp=2", "recompute: Some(Values(3))");
        check("recompute=value:0", "recompute: Some(None)");
        check("recompute=block:3", "`block:3` is not none, selective, value");
        check("recompute=half", "`half` is not none, selective, value");
        check("pp=2,stage_recompute=block", "it names 1 of the 2 stages of pp=2");
        check("pp=1,stage_recompute=block", "pp=1 has none; pin recompute instead");
        check("stage_recompute=block/none", "it names 2 stages; pin pp=2 with it");
        check("offload=optimizer:2,tp=2", "optimizer: 2, gradients: 0, parameters: 0");
        check("offload=optimizer,offload=none", "`offload` is pinned twice");
        check("offload=weights", "`weights` is none of none, optimizer");
        check("pp=2,stage_offload=optimizer:2/none", "stage_offload: [Offload { optimizer: 2");
        check("pp=4,stage_offload=optimizer:2/none", "it names 2 of the 4 stages of pp=4");
        check("pp=1,stage_offload=optimizer", "pp=1 has none; pin offload instead");
        check("pp=2,stage_offload=none/weights", "`weights` is none of none, optimizer");
        check("pp=2,offload=none,stage_offload=none/none", "`offload=none`: stage_offload says it of each stage");
        check("parts=2/1/3", "parts: [2, 1, 3]");
        check("parts=2/2", "`2/2` does not number each part once");
        check("parts=3/1", "`3/1` does not number each part once");
        check("parts=l40s", "`l40s` is not a whole number");
    }

    #[test]
    fn pins_that_no_choice_names() {
        let unnamed = |text: &str| Pins::parse(text).map(|pins| pins.unnamed()).unwrap_or_default();
        assert_eq!(unnamed("loss_chunks=2,overlap_chunks=1,keep_casts=0"), ",overlap_chunks=1,keep_casts=0");
        assert_eq!(unnamed("loss_chunks=1,offload=none,keep_casts=1"), ",loss_chunks=1,offload=none");
    }
}
