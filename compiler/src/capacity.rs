//! Questions of capacity: the largest model, batch or sequence that fits.
//!
//! Each question is a search for a plan, asked several times: the largest size is found by doubling until
//! nothing fits and bisecting between. So the answer holds for every way of spreading that the search
//! knows, and comes with the plan that reaches it.

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
    /// The sequences of a step, in one microbatch: with several, any number fits.
    Batch,
    /// The tokens of a sequence.
    Seq,
}

impl Dimension {
    /// What the sizes that are tried are multiples of.
    fn unit(self) -> u64 {
        match self {
            Self::Layers | Self::Batch => 1,
            Self::Seq => 64,
        }
    }

    /// Its name with a number: `48 layers`.
    pub fn text(self, size: u64) -> String {
        match self {
            Self::Layers => format!("{size} layers"),
            Self::Batch => format!("a batch of {size}"),
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
    /// Why more does not fit; nothing if the search ended at a limit of the model or of `shardc`.
    pub beyond: Option<String>,
    /// How many sizes were tried.
    pub tried: u64,
}

/// More than anyone asks for; the search for the largest ends here.
const MOST: u64 = 1 << 22;

/// Finds the largest size of a dimension that trains on a cluster.
///
/// # Errors
/// If not even the smallest fits, the reason; what [`compile`] refuses for any other reason.
pub fn maximize(
    model: &NamedModel,
    batch: Batch,
    cluster: &Cluster,
    options: &Options,
    dimension: Dimension,
) -> Result<Largest, Error> {
    let unit = dimension.unit();
    let is_there = match dimension {
        Dimension::Layers => model.config.clone().layers().is_some(),
        Dimension::Batch => true,
        Dimension::Seq => model.vocabulary().is_some(),
    };
    if !is_there {
        let what = if dimension == Dimension::Seq { "no sequence" } else { "no layers that are alike" };
        return Err(Error::request(format!("{} has {what} to make larger", model.name), "ask for the largest batch"));
    }
    let limit = match dimension {
        Dimension::Seq => model.positions().unwrap_or(MOST).min(MOST) / unit,
        _ => MOST,
    };
    let mut tried = 0;
    let mut probe = |count: u64| {
        tried += 1;
        attempt(model, batch, cluster, options, dimension, count * unit)
    };
    let (mut low, mut high, mut beyond) = (0, limit + 1, None);
    let mut best = None;
    let mut next = 1.min(limit);
    while low + 1 < high {
        match probe(next)? {
            Ok(found) => (low, best) = (next, Some(found)),
            Err(reason) => (high, beyond) = (next, Some(reason)),
        }
        next = if beyond.is_none() { (low * 2).min(limit) } else { low.midpoint(high) };
    }
    match (best, beyond) {
        (Some((parameters, compiled)), beyond) => {
            let beyond = beyond.map(|error| error.to_string());
            Ok(Largest { size: low * unit, parameters, compiled, beyond, tried })
        }
        (None, Some(error)) => Err(error),
        (None, None) => Err(Error::request("there is nothing to try", "give a model that takes a sequence")),
    }
}

type Attempt = Result<(u64, Compiled), Error>;

/// Whether one size fits: the outer error is of another kind.
fn attempt(
    model: &NamedModel,
    batch: Batch,
    cluster: &Cluster,
    options: &Options,
    dimension: Dimension,
    size: u64,
) -> Result<Attempt, Error> {
    let (model, batch) = match dimension {
        Dimension::Layers => (with_layers(model, size), batch),
        Dimension::Batch => (model.clone(), Batch { batch: size, ..batch }),
        Dimension::Seq => (model.clone(), Batch { seq: size, ..batch }),
    };
    let tries = match dimension {
        Dimension::Batch => whole_batches(size, cluster.ranks(), &options.pins)?,
        _ => vec![options.pins.clone()],
    };
    let mut refused = None;
    for pins in tries {
        let options = Options { pins, ..options.clone() };
        match compile(&model, batch, cluster, &options) {
            Ok(compiled) => return Ok(Ok((model.config.parameters(), compiled))),
            Err(error) if is_refusal(&error) => refused = Some(error),
            Err(error) => return Err(error),
        }
    }
    let indivisible = || {
        let message = format!("a batch of {size} does not divide over the data ranks of {} ranks", cluster.ranks());
        Error::request(message, "pin tp to the number of ranks, or ask for fewer")
    };
    Ok(Err(refused.unwrap_or_else(indivisible)))
}

fn is_refusal(error: &Error) -> bool {
    matches!(error, Error::Plan(error) if matches!(**error, PlanError::Infeasible { .. } | PlanError::Batch { .. }))
}

/// The pins under which a batch is one microbatch, for every number of data ranks that divides it.
fn whole_batches(batch: u64, ranks: u64, pins: &str) -> Result<Vec<String>, Error> {
    let known = Pins::parse(pins)?;
    let fits = |dp: &u64| {
        let is_pinned = known.dp.is_none_or(|pin| pin == *dp) && known.tp.is_none_or(|pin| pin * dp == ranks);
        ranks.is_multiple_of(*dp) && batch.is_multiple_of(*dp) && is_pinned
    };
    let others: Vec<&str> = pins
        .split(',')
        .filter(|pin| !pin.is_empty() && !["dp", "microbatch"].contains(&pin.split('=').next().unwrap_or("")))
        .collect();
    let text = |dp: u64| {
        let mut parts = vec![format!("dp={dp}"), format!("microbatch={}", batch / dp)];
        parts.extend(others.iter().map(|pin| (*pin).to_string()));
        parts.join(",")
    };
    Ok((1..=ranks).rev().filter(fits).map(text).collect())
}

/// The model with another number of layers.
fn with_layers(model: &NamedModel, layers: u64) -> NamedModel {
    let mut config = model.config.clone();
    if let Some(count) = config.layers() {
        *count = layers as usize;
    }
    NamedModel::from_config(&model.name, config)
}
