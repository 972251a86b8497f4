//! Pins: choices that the user fixes.

use super::PlanError;
use std::fmt;

/// How much of the forward pass is computed again in the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Recompute {
    /// Nothing: every value that the backward pass reads is kept.
    None,
    /// All of every block but products and attention.
    Selective,
    /// The values that free the most memory per second, by so many steps (see
    /// [`recompute`](super::recompute)).
    Values(u64),
    /// The first so many blocks.
    Blocks(u64),
    /// Every block.
    All,
}

impl Recompute {
    /// As many steps of [`Values`](Self::Values) as memory needs.
    pub const BY_NEED: Self = Self::Values(u64::MAX);
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

/// What is fixed; all else is searched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pins {
    /// Data ranks.
    pub dp: Option<u64>,
    /// Tensor ranks.
    pub tp: Option<u64>,
    /// ZeRO stage, 0 to 3.
    pub zero: Option<u64>,
    /// Sequences per data rank per microbatch, as in Megatron.
    pub microbatch: Option<u64>,
    /// Recomputation.
    pub recompute: Option<Recompute>,
    /// Chunks of the head and its loss; 1 for none.
    pub loss_chunks: Option<u64>,
}

impl Pins {
    /// Reads `dp=2,tp=2,zero=1,microbatch=1,recompute=none|selective|value|block|N,loss_chunks=4`; an empty text fixes nothing.
    pub fn parse(text: &str) -> Result<Self, PlanError> {
        let mut pins = Self::default();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let pin = |message: String| PlanError::Pin { pin: part.to_string(), message };
            let (name, value) =
                part.split_once('=').ok_or_else(|| pin("write NAME=VALUE, for instance dp=2".to_string()))?;
            let number = || {
                let parsed = value.parse::<u64>().ok();
                parsed.ok_or_else(|| pin(format!("`{value}` is not a whole number")))
            };
            let positive = || match number()? {
                0 => Err(pin("it must be at least 1".to_string())),
                value => Ok(value),
            };
            let slot = match name {
                "dp" => &mut pins.dp,
                "tp" => &mut pins.tp,
                "zero" => &mut pins.zero,
                "microbatch" => &mut pins.microbatch,
                "loss_chunks" => &mut pins.loss_chunks,
                "recompute" => {
                    if pins.recompute.is_some() {
                        return Err(pin(format!("`{name}` is pinned twice")));
                    }
                    pins.recompute = Some(match value {
                        "none" | "0" => Recompute::None,
                        "selective" => Recompute::Selective,
                        "value" => Recompute::BY_NEED,
                        "block" | "full" => Recompute::All,
                        _ => {
                            let (kind, count) = value.split_once(':').unwrap_or(("", value));
                            let count = count.parse().ok().filter(|_| matches!(kind, "" | "value"));
                            let known = "none, selective, value, value:STEPS, block or a number of blocks";
                            let count = count.ok_or_else(|| pin(format!("`{value}` is not {known}")))?;
                            if kind.is_empty() { Recompute::Blocks(count) } else { Recompute::Values(count) }
                        }
                    });
                    continue;
                }
                "pp" | "cp" | "ep" => {
                    if positive()? != 1 {
                        return Err(pin(format!(
                            "the runtime cannot execute {name} above 1 yet; pin {name}=1 or leave it out"
                        )));
                    }
                    continue;
                }
                _ => {
                    let known = "dp, tp, zero, microbatch, recompute, loss_chunks, pp, cp, ep";
                    return Err(pin(format!("unknown pin `{name}`; known are {known}")));
                }
            };
            if slot.is_some() {
                return Err(pin(format!("`{name}` is pinned twice")));
            }
            *slot = Some(if name == "zero" { number()? } else { positive()? });
        }
        if pins.zero.is_some_and(|zero| zero > 3) {
            return Err(PlanError::Pin { pin: text.to_string(), message: "ZeRO has stages 0 to 3".to_string() });
        }
        Ok(pins)
    }

    /// Whether the pins agree with each other, the cluster and the batch.
    pub fn check(&self, ranks: u64, batch: u64) -> Result<(), PlanError> {
        let fail = |pin: String, message: String| Err(PlanError::Pin { pin, message });
        for (name, degree) in [("dp", self.dp), ("tp", self.tp)] {
            if let Some(degree) = degree.filter(|degree| !ranks.is_multiple_of(*degree)) {
                let message = format!("{degree} does not divide the cluster's {ranks} ranks");
                return fail(format!("{name}={degree}"), message);
            }
        }
        if let (Some(dp), Some(tp)) = (self.dp, self.tp)
            && dp * tp != ranks
        {
            let message = format!("they make {} ranks and the cluster has {ranks}; pin only one of them", dp * tp);
            return fail(format!("dp={dp},tp={tp}"), message);
        }
        let dp = self.dp.or(self.tp.map(|tp| ranks / tp));
        if let Some(dp) = dp.filter(|dp| !batch.is_multiple_of(*dp)) {
            let message = format!("a batch of {batch} does not divide over {dp} data ranks; use a multiple of {dp}");
            return fail(format!("dp={dp}"), message);
        }
        if let Some(microbatch) = self.microbatch {
            let parts = dp.unwrap_or(1).saturating_mul(microbatch);
            if !batch.is_multiple_of(parts) {
                let message = format!(
                    "a batch of {batch} does not divide into {} data ranks times microbatches of {microbatch}; \
                     use a multiple of {parts}",
                    dp.unwrap_or(1)
                );
                return fail(format!("microbatch={microbatch}"), message);
            }
        }
        Ok(())
    }
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
    fn pins() {
        check("dp=2,tp=2,zero=1", "dp: Some(2), tp: Some(2), zero: Some(1)");
        check("dp=2,tp=4", "they make 8 ranks and the cluster has 4");
        check("dp=3", "3 does not divide the cluster's 4 ranks");
        check("dp=4,microbatch=3", "a batch of 8 does not divide into 4 data ranks times microbatches of 3");
        check("dp=4,microbatch=18446744073709551615", "a batch of 8 does not divide into 4 data ranks");
        check("recompute=1,recompute=none", "`recompute` is pinned twice");
        check("zero=4", "stages 0 to 3");
        check("pp=2", "cannot execute pp above 1 yet");
        check("pp=1,tp=0", "at least 1");
        check("fsdp=2", "unknown pin `fsdp`");
        check("recompute=value:3,tp=2", "recompute: Some(Values(3))");
        check("recompute=block:3", "`block:3` is not none, selective, value");
        check("recompute=half", "`half` is not none, selective, value");
        check("dp", "write NAME=VALUE");
    }
}
