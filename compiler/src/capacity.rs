//! Questions of capacity: the largest model, batch or sequence that fits.
//!
//! Each question is a search for a plan, asked several times: from the size that the user named, sizes are doubled until
//! nothing fits, and then bisected. So the answer holds for every way of spreading that the search knows, and comes with
//! the plan that reaches it. A batch is sought for each number of data ranks by itself, in multiples of it: only there
//! more never fits where less does not.

use crate::compile::{Compiled, compile};
use crate::error::Error;
use crate::model::NamedModel;
use crate::options::{Batch, Options};
use serde::Serialize;
use shardc_passes::cluster::Cluster;
use shardc_passes::search::{Pins, PlanError};

/// What is made as large as fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Dimension {
    /// The layers of the model.
    Layers,
    /// The sequences of a step, in one microbatch on each rank: with several, any number fits.
    Batch,
    /// The tokens of a sequence, in multiples of 64.
    Seq,
}

impl Dimension {
    /// What the sizes that are tried are multiples of.
    pub fn unit(self) -> u64 {
        match self {
            Self::Layers | Self::Batch => 1,
            Self::Seq => 64,
        }
    }

    /// How near the largest size that fits and the least that does not are to be, in units: of long sequences 1 part
    /// in 64.
    fn gap(self, count: u64) -> u64 {
        match self {
            Self::Layers | Self::Batch => 1,
            Self::Seq => (count / 64).max(1),
        }
    }

    /// Its name with a number: `48 layers`.
    pub fn text(self, size: u64) -> String {
        match self {
            Self::Layers => format!("{size} layers"),
            Self::Batch => format!("a batch of {size} in one microbatch"),
            Self::Seq => format!("sequences of {size} tokens"),
        }
    }
}

/// The largest size that fits.
#[derive(Debug)]
pub struct Largest {
    /// The size.
    pub size: u64,
    /// The parameters of the model of that size.
    pub parameters: u64,
    /// The plan that reaches it.
    pub compiled: Compiled,
    /// The next size that was tried and does not fit, and why; nothing if the search ended at a limit of the model, of
    /// the pins or of `shardc`.
    pub beyond: Option<(u64, String)>,
    /// How many sizes were tried.
    pub tried: u64,
}

/// More than anyone asks for; the search for the largest ends here.
const MOST: u64 = 1 << 22;

/// Finds the largest size of a dimension that trains on a cluster. `observe` is told of each size that was tried, and
/// whether it fits.
///
/// # Errors
/// If not even the smallest fits, the reason; what [`compile`] refuses for any other reason.
pub fn maximize(
    model: &NamedModel,
    batch: Batch,
    cluster: &Cluster,
    options: &Options,
    dimension: Dimension,
    observe: &dyn Fn(u64, bool),
) -> Result<Largest, Error> {
    let unit = dimension.unit();
    let layers = model.config.clone().layers().map(|count| *count as u64);
    let is_there = match dimension {
        Dimension::Layers => layers.is_some(),
        Dimension::Batch => true,
        Dimension::Seq => model.vocabulary().is_some(),
    };
    if !is_there {
        let what = if dimension == Dimension::Seq { "no sequence" } else { "no layers that are alike" };
        return Err(Error::request(format!("{} has {what} to make larger", model.name), "ask for the largest batch"));
    }
    let question = Question { model, batch, cluster, options, dimension, observe };
    if dimension == Dimension::Batch {
        return question.batch();
    }
    let limit = match dimension {
        Dimension::Seq => model.positions().unwrap_or(MOST).min(MOST) / unit,
        _ => MOST,
    };
    let first = if dimension == Dimension::Seq { batch.seq / unit } else { layers.unwrap_or(1) };
    let found = question.largest(Range { low: 0, first, limit }, unit, &|_| options.pins.clone())?;
    match (found.best, found.beyond) {
        (Some(best), beyond) => Ok(best.largest(beyond, found.tried)),
        (None, Some((_, error))) => Err(error),
        (None, None) => Err(Error::request("there is nothing to try", "give a model that takes a sequence")),
    }
}

/// Where a size is sought: above `low`, from `first`, up to `limit`.
#[derive(Clone, Copy)]
struct Range {
    low: u64,
    first: u64,
    limit: u64,
}

/// A size that fits, and its plan.
struct Fit {
    size: u64,
    parameters: u64,
    compiled: Compiled,
}

/// What came of a range: the largest size that fits, if any does, and the least that does not.
struct Found {
    best: Option<Fit>,
    beyond: Option<(u64, Error)>,
    tried: u64,
}

impl Fit {
    fn largest(self, beyond: Option<(u64, Error)>, tried: u64) -> Largest {
        let Self { size, parameters, compiled } = self;
        Largest { size, parameters, compiled, beyond: beyond.map(|(size, error)| (size, sentence(&error))), tried }
    }
}

struct Question<'a> {
    model: &'a NamedModel,
    batch: Batch,
    cluster: &'a Cluster,
    options: &'a Options,
    dimension: Dimension,
    observe: &'a dyn Fn(u64, bool),
}

impl Question<'_> {
    /// The largest count of a range whose multiple of `unit` fits under the pins of that count.
    fn largest(&self, range: Range, unit: u64, pins: &dyn Fn(u64) -> String) -> Result<Found, Error> {
        let Range { mut low, first, limit } = range;
        let (mut high, mut found) = (limit + 1, Found { best: None, beyond: None, tried: 0 });
        let mut next = first.clamp((low + 1).min(limit), limit);
        while low + self.dimension.gap(low) < high {
            let size = next * unit;
            found.tried += 1;
            match self.attempt(size, pins(next)) {
                Ok(fit) => (low, found.best) = (next, Some(fit)),
                Err(error) if is_refusal(&error) => (high, found.beyond) = (next, Some((size, error))),
                Err(error) => return Err(error),
            }
            (self.observe)(size, low == next);
            next = if found.beyond.is_none() { (low * 2).min(limit) } else { low.midpoint(high) };
        }
        Ok(found)
    }

    /// The largest batch in one microbatch, of every number of data ranks that the pins leave.
    fn batch(&self) -> Result<Largest, Error> {
        let ranks = self.cluster.ranks();
        let known = Pins::parse(&self.options.pins)?;
        // A batch that every number of ranks divides: what is wrong with the pins is wrong for any.
        known.check(ranks, ranks.saturating_mul(known.microbatch.unwrap_or(1)))?;
        let (mut best, mut tried): (Option<Fit>, u64) = (None, 0);
        let (mut beyond, mut refused) = (None, None);
        for (dp, data) in data_degrees(ranks, &known) {
            let pins = |microbatch: u64| self.whole(dp, microbatch);
            // Only more than is known to fit counts.
            let low = best.as_ref().map_or(0, |best| best.size / data);
            let range = match known.microbatch {
                Some(size) if size > low => Range { low: size - 1, first: size, limit: size },
                Some(_) => continue,
                None => {
                    let first = if low == 0 { self.batch.batch / data } else { low + 1 };
                    Range { low, first, limit: MOST / data }
                }
            };
            if range.limit <= range.low {
                continue;
            }
            let found = match self.largest(range, data, &pins) {
                Err(error @ Error::Plan(_)) => {
                    refused = refused.or(Some(error));
                    continue;
                }
                found => found?,
            };
            tried += found.tried;
            if found.best.is_some() {
                (best, beyond) = (found.best, found.beyond);
            } else {
                refused = found.beyond.map(|(_, error)| error).or(refused);
            }
        }
        match (best, refused) {
            (Some(best), _) => Ok(best.largest(beyond, tried)),
            (None, Some(error)) => Err(self.without_own_pins(error)),
            (None, None) => Err(Error::request(
                format!("the pins `{}` leave no data ranks among {ranks}", self.options.pins),
                "pin fewer of them",
            )),
        }
    }

    /// The pins under which a batch is one microbatch on each of so many data ranks.
    fn whole(&self, dp: u64, microbatch: u64) -> String {
        let is_other = |pin: &&str| !["dp", "microbatch"].contains(&pin.split('=').next().unwrap_or("").trim());
        let own = [format!("dp={dp}"), format!("microbatch={microbatch}")];
        let others = self.options.pins.split(',').filter(|pin| !pin.trim().is_empty()).filter(is_other);
        own.into_iter().chain(others.map(str::to_string)).collect::<Vec<_>>().join(",")
    }

    /// That nothing fits, without the advice to drop pins that the user did not make.
    fn without_own_pins(&self, error: Error) -> Error {
        match error {
            Error::Plan(error) => Error::Plan(Box::new(match *error {
                PlanError::Infeasible { bound, share, choice, needed, breakdown, .. } => {
                    let is_pinned = !self.options.pins.is_empty();
                    let pins = if is_pinned { " under these pins" } else { "" }.into();
                    let drop = if is_pinned { ", drop a pin" } else { "" };
                    let fix = format!("give each rank {needed}{drop}, or use more than {} ranks", self.cluster.ranks());
                    PlanError::Infeasible { bound, share, pins, choice, needed, breakdown, fix }
                }
                other => other,
            })),
            other => other,
        }
    }

    /// The plan of one size.
    fn attempt(&self, size: u64, pins: String) -> Result<Fit, Error> {
        let (model, batch) = match self.dimension {
            Dimension::Layers => (with_layers(self.model, size), self.batch),
            Dimension::Batch => (self.model.clone(), Batch { batch: size, ..self.batch }),
            Dimension::Seq => (self.model.clone(), Batch { seq: size, ..self.batch }),
        };
        let options = Options { pins, ..self.options.clone() };
        let compiled = compile(&model, batch, self.cluster, &options)?;
        Ok(Fit { size, parameters: model.config.parameters(), compiled })
    }
}

fn is_refusal(error: &Error) -> bool {
    matches!(error, Error::Plan(error) if matches!(**error, PlanError::Infeasible { .. } | PlanError::Batch { .. }))
}

/// Why a size does not fit, without advice: nobody asked for that size.
fn sentence(error: &Error) -> String {
    if let Error::Plan(plan) = error
        && let PlanError::Infeasible { bound, share, choice, needed, breakdown, .. } = &**plan
    {
        return format!("no plan fits in {bound} per rank{share}: the nearest, {choice}, needs {needed} ({breakdown})");
    }
    error.to_string()
}

/// The sizes of `dp` that pins leave, the largest first, and the data ranks that each makes with `fsdp` and `ep`.
fn data_degrees(ranks: u64, pins: &Pins) -> Vec<(u64, u64)> {
    let own = pins.fsdp.unwrap_or(1) * pins.ep.unwrap_or(1);
    let others =
        pins.degrees().into_iter().filter(|(name, _)| *name != "dp").filter_map(|(_, pin)| pin).product::<u64>();
    let is_whole = pins.tp.is_some() && (pins.pp.is_some() || !pins.opens_stages());
    let fits = |dp: &u64| {
        let all = dp * others;
        pins.dp.is_none_or(|pin| pin == *dp) && ranks.is_multiple_of(all) && (!is_whole || all == ranks)
    };
    (1..=ranks / others).rev().filter(fits).map(|dp| (dp, dp * own)).collect()
}

/// The model with another number of layers.
fn with_layers(model: &NamedModel, layers: u64) -> NamedModel {
    let mut config = model.config.clone();
    if let Some(count) = config.layers() {
        *count = layers as usize;
    }
    NamedModel::from_config(&model.name, config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_degrees_are_those_that_pins_leave() {
        let check = |pins: &str, expect: &[(u64, u64)]| {
            assert_eq!(data_degrees(12, &Pins::parse(pins).unwrap()), expect, "{pins}");
        };
        check("", &[(12, 12), (6, 6), (4, 4), (3, 3), (2, 2), (1, 1)]);
        check("tp=3", &[(4, 4)]);
        check("dp=2", &[(2, 2)]);
        check("fsdp=6", &[(2, 12), (1, 6)]);
        check("pp=2,tp=3", &[(2, 2)]);
        check("tp=5", &[]);
    }
}
