//! Questions of capacity: the largest model, batch or sequence that fits.
//!
//! Each question is a search for a plan, asked several times: from the size that the user named, sizes are doubled until
//! nothing fits, and then bisected. Which sizes are planned for that is another matter ([`Known`]): where a size does
//! not fit, what it lacks tells nearly which does, so that one plan settles many steps of the bisection. And whether a
//! size fits is asked of the mesh first that the size before fitted on, or that was the leanest of those that did not:
//! where it does, no other mesh is searched. What that does not settle all meshes do, and the answer is planned among
//! all of them: so it holds for every way of spreading that the search knows, and comes with the fastest plan that
//! reaches it. A batch is sought for each number of data ranks by itself, in multiples of it: only there more never
//! fits where less does not.

use crate::compile::{Compiled, compile};
use crate::error::Error;
use crate::model::{MOST_LAYERS, NamedModel};
use crate::options::{Batch, Options, each_pin, leaves_open, with_pins};
use serde::Serialize;
use shardc_ir::Family;
use shardc_ir::units::counted;
use shardc_passes::cluster::Cluster;
use shardc_passes::search::{Degrees, Pins, PlanError};
use std::cell::RefCell;

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

    /// More than anyone asks for: the search for the largest ends here.
    pub fn most(self) -> u64 {
        match self {
            Self::Layers => MOST_LAYERS,
            Self::Batch | Self::Seq => 1 << 22,
        }
    }

    /// Its name with a number: `48 layers`.
    pub fn text(self, size: u64) -> String {
        match self {
            Self::Layers => counted(size, "layer"),
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
    let question = Question { model, batch, cluster, options, dimension, observe, near: RefCell::default() };
    if dimension == Dimension::Batch {
        return question.batch();
    }
    let limit = match dimension {
        Dimension::Seq => model.positions().unwrap_or(dimension.most()).min(dimension.most()) / unit,
        _ => dimension.most().max(layers.unwrap_or(1)),
    };
    let first = if dimension == Dimension::Seq { batch.seq / unit } else { layers.unwrap_or(1) };
    let found = question.largest(Range { low: 0, first, limit }, unit, &|_| options.pins.clone())?;
    match (found.best, found.beyond) {
        (Some(best), beyond) => Ok(question.fastest(best)?.largest(beyond, found.tried)),
        // As it is refused without pins of our own, which the advice goes by.
        (None, Some((size, error))) => Err(question.plan(size, &options.pins).err().unwrap_or(error)),
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

/// A size that fits, and a plan of it.
struct Fit {
    size: u64,
    parameters: u64,
    compiled: Compiled,
    /// Where only one mesh was asked, the pins among all of whose meshes the fastest plan is still to be found.
    open: Option<String>,
}

/// What came of a range: the largest size that fits, if any does, and the least that does not.
struct Found {
    best: Option<Fit>,
    beyond: Option<(u64, Error)>,
    tried: u64,
}

impl Fit {
    fn largest(self, beyond: Option<(u64, Error)>, tried: u64) -> Largest {
        let Self { size, parameters, compiled, .. } = self;
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
    /// The choice of the last plan that fitted or was the nearest.
    near: RefCell<Option<String>>,
}

impl Question<'_> {
    /// The largest count of a range whose multiple of `unit` fits under the pins of that count.
    fn largest(&self, range: Range, unit: u64, pins: &dyn Fn(u64) -> String) -> Result<Found, Error> {
        let mut tried = 0;
        let mut plan = |count: u64| {
            tried += 1;
            let attempt = match self.attempt(count * unit, &pins(count)) {
                Ok(fit) => Attempt::Fits(fit),
                Err(error) if is_refusal(&error) => Attempt::Refused(filled(&error), error),
                Err(error) => return Err(error),
            };
            (self.observe)(count * unit, matches!(attempt, Attempt::Fits(_)));
            Ok(attempt)
        };
        let (best, beyond) = sought(range, &|count| self.dimension.gap(count), &mut plan)?;
        let beyond = beyond.map(|(count, error)| (count * unit, error));
        Ok(Found { best: best.map(|(_, fit)| fit), beyond, tried })
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
                    Range { low, first, limit: self.dimension.most() / data }
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
            (Some(best), _) => Ok(self.fastest(best)?.largest(beyond, tried)),
            (None, Some(error)) => Err(self.without_own_pins(error)),
            (None, None) => Err(Error::request(
                format!("the pins `{}` leave no data ranks among {ranks}", self.options.pins),
                "pin fewer of them",
            )),
        }
    }

    /// The pins under which a batch is one microbatch on each of so many data ranks.
    fn whole(&self, dp: u64, microbatch: u64) -> String {
        let others =
            each_pin(&self.options.pins).filter(|(name, _)| ![Family::Data.name(), "microbatch"].contains(name));
        with_pins(&format!("dp={dp},microbatch={microbatch}"), others.map(|(_, pin)| pin.to_string()))
    }

    /// That nothing fits, without the advice to drop pins that the user did not make.
    fn without_own_pins(&self, error: Error) -> Error {
        match error {
            Error::Plan(error) => Error::Plan(Box::new(match *error {
                PlanError::Infeasible { bound, share, choice, needed, breakdown, .. } => {
                    let is_pinned = !self.options.pins.is_empty();
                    let pins = if is_pinned { " under these pins" } else { "" }.into();
                    let drop = if is_pinned { ", drop a pin" } else { "" };
                    let (more, ranks) = (needed.rounded_up(), self.cluster.ranks());
                    let fix = format!("give each rank {more}{drop}, or use more than {ranks} ranks");
                    PlanError::Infeasible { bound, share, pins, choice, needed, breakdown, fix }
                }
                other => other,
            })),
            other => other,
        }
    }

    /// Whether one size fits: on the mesh that is near, or on any.
    fn attempt(&self, size: u64, pins: &str) -> Result<Fit, Error> {
        let near = self.near.borrow().as_deref().and_then(|choice| on_mesh_of(pins, choice));
        if let Some(on_one) = near
            && let Ok(fit) = self.plan(size, &on_one)
        {
            return Ok(Fit { open: Some(pins.to_string()), ..fit });
        }
        // Whether it fits is all that is asked; the answer is planned among all that is as fast.
        let found = self.plan(size, &quick(pins)).map(|fit| Fit { open: Some(pins.to_string()), ..fit });
        let choice = match &found {
            Ok(fit) => Some(fit.compiled.plan().choice.clone()),
            Err(Error::Plan(error)) => match &**error {
                PlanError::Infeasible { choice, .. } => Some(choice.clone()),
                _ => None,
            },
            Err(_) => None,
        };
        if choice.is_some() {
            self.near.replace(choice);
        }
        found
    }

    /// The fastest plan of a size that fits.
    fn fastest(&self, fit: Fit) -> Result<Fit, Error> {
        let Some(pins) = &fit.open else { return Ok(fit) };
        match self.plan(fit.size, pins) {
            // All that a search lowers may be too large, and leaner plans on one of its meshes not.
            Err(error) if is_refusal(&error) => Ok(fit),
            found => found,
        }
    }

    /// The plan of one size under pins.
    fn plan(&self, size: u64, pins: &str) -> Result<Fit, Error> {
        let (model, batch) = match self.dimension {
            Dimension::Layers => (self.model.with_layers(size)?, self.batch),
            Dimension::Batch => (self.model.clone(), Batch { batch: size, ..self.batch }),
            Dimension::Seq => (self.model.clone(), Batch { seq: size, ..self.batch }),
        };
        let options = Options { pins: pins.to_string(), ..self.options.clone() };
        let compiled = compile(&model, batch, self.cluster, &options)?;
        Ok(Fit { size, parameters: model.config.parameters(), compiled, open: None })
    }
}

/// Pins that leave nothing open which takes time and makes no plan leaner: chunks that overlap and casts that are kept make
/// plans faster.
fn quick(pins: &str) -> String {
    let added = [("overlap_chunks", "1"), ("keep_casts", "0")].into_iter().filter(|(name, _)| leaves_open(pins, name));
    with_pins(pins, added.map(|(name, value)| format!("{name}={value}")))
}

/// [Quick](quick) pins with the degrees of a choice where they leave them open. Nothing where they leave no degree open.
fn on_mesh_of(pins: &str, choice: &str) -> Option<String> {
    let degrees = Degrees::of_choice(choice).ok()?;
    // Which of the ways to divide a sequence is meant is said by none of them where it is not divided.
    let is_said = |family: &Family| !matches!(family, Family::Ring | Family::Ulysses) || degrees.degree(*family) > 1;
    let families = Family::over_ranks().filter(is_said);
    let open = families.filter(|family| leaves_open(pins, family.name())).map(|family| degrees.pin(family));
    let open: Vec<String> = open.collect();
    if open.is_empty() || degrees.degree(Family::Pipeline) > 1 {
        return None;
    }
    Some(quick(&with_pins(pins, open)))
}

/// What came of planning a size.
enum Attempt<T, E> {
    Fits(T),
    /// Why it does not, and by which factor more is needed than there is, if that is known.
    Refused(Option<f64>, E),
}

/// The largest count that fits, and the least beyond it that does not: from the first, doubled until nothing fits, then
/// bisected up to a gap. What fits makes all that is less fit.
type Sought<T, E> = (Option<(u64, T)>, Option<(u64, E)>);

fn sought<T, E, F>(
    Range { low, first, limit }: Range,
    gap: &dyn Fn(u64) -> u64,
    plan: &mut dyn FnMut(u64) -> Result<Attempt<T, E>, F>,
) -> Result<Sought<T, E>, F> {
    let start = low;
    let mut known = Known { fits: None, refused: Vec::new(), is_on_a_line: true };
    let (mut low, mut high) = (low, limit + 1);
    let mut next = first.clamp((low + 1).min(limit), limit);
    while low + gap(low) < high {
        let fits = loop {
            if let Some(fits) = known.of(next) {
                break fits;
            }
            let suggested = known.suggested(start, next);
            known.add(plan, suggested)?;
            known.is_on_a_line &= known.of(next).is_some();
        };
        if fits {
            low = next;
        } else {
            high = next;
        }
        next = if high > limit { (low * 2).min(limit) } else { low.midpoint(high) };
    }
    // What was settled by others is planned all the same: it is the answer.
    if low > start && known.fits.as_ref().is_none_or(|of| of.0 != low) {
        known.fits = None;
        known.add(plan, low)?;
    }
    if high <= limit && known.refused.is_empty() {
        known.add(plan, high)?;
    }
    let beyond = known.refused.into_iter().next().map(|(count, _, error)| (count, error));
    Ok((known.fits, beyond))
}

/// What is known of sizes.
struct Known<T, E> {
    /// The largest that fits.
    fits: Option<(u64, T)>,
    /// Those that do not, the least first, each with its factor.
    refused: Vec<(u64, Option<f64>, E)>,
    /// Whether every size that was suggested has settled the one that it was suggested for.
    is_on_a_line: bool,
}

impl<T, E> Known<T, E> {
    /// Whether a size fits, if that is settled.
    fn of(&self, count: u64) -> Option<bool> {
        let fits = self.fits.as_ref().is_some_and(|of| count <= of.0);
        let refused = self.refused.first().is_some_and(|of| count >= of.0);
        (fits || refused).then_some(fits)
    }

    /// What to plan in order to settle a size: where the line through the two least that do not fit meets what there
    /// is, or that through nothing and the least; the size itself where no such line is known or one has misled.
    fn suggested(&self, start: u64, next: u64) -> u64 {
        let fits = self.fits.as_ref().map_or(start, |of| of.0);
        let Some(&(least, Some(factor), _)) = self.refused.first().filter(|_| self.is_on_a_line) else { return next };
        let (other, others) = match self.refused.get(1) {
            Some(&(other, Some(others), _)) if others > factor => (other as f64, others),
            _ => (0.0, 0.0),
        };
        let slope = (factor - others) / (least as f64 - other);
        let meets = (least as f64 - (factor - 1.0) / slope).floor().max(0.0) as u64;
        if (fits + 1..least).contains(&meets) { meets } else { next }
    }

    fn add<F>(&mut self, plan: &mut dyn FnMut(u64) -> Result<Attempt<T, E>, F>, count: u64) -> Result<(), F> {
        match plan(count)? {
            Attempt::Fits(fit) => self.fits = Some((count, fit)),
            Attempt::Refused(factor, error) => {
                let place = self.refused.partition_point(|of| of.0 < count);
                self.refused.insert(place, (count, factor, error));
            }
        }
        Ok(())
    }
}

/// By which factor a plan that does not fit needs more than there is.
fn filled(error: &Error) -> Option<f64> {
    match error {
        Error::Plan(error) => error.filled().filter(|factor| *factor > 1.0),
        _ => None,
    }
}

fn is_refusal(error: &Error) -> bool {
    matches!(error, Error::Plan(error) if error.is_refusal())
}

/// Why a size does not fit, without advice: nobody asked for that size.
fn sentence(error: &Error) -> String {
    match error {
        Error::Plan(plan) => match &**plan {
            PlanError::Infeasible { bound, share, choice, needed, breakdown, .. } => {
                format!("no plan fits in {bound} per rank{share}: the nearest, {choice}, needs {needed} ({breakdown})")
            }
            PlanError::Host { pin, bound, needed } => {
                format!("`{pin}` takes {needed} of the {bound} that a host has for its ranks")
            }
            other => other.to_string(),
        },
        other => other.to_string(),
    }
}

/// The sizes of `dp` that pins leave, the largest first, and the data ranks that each makes with `fsdp` and `ep`.
fn data_degrees(ranks: u64, pins: &Pins) -> Vec<(u64, u64)> {
    let own = pins.product(&[Family::Fsdp, Family::Expert]);
    let others =
        pins.degrees().filter(|(family, _)| *family != Family::Data).map(|(_, degree)| degree).product::<u64>();
    let is_whole = pins.fixes(&[Family::Tensor]) && (pins.fixes(&[Family::Pipeline]) || !pins.opens_stages());
    let fits = |dp: &u64| {
        let all = dp * others;
        pins.degree(Family::Data).is_none_or(|pin| pin == *dp)
            && ranks.is_multiple_of(all)
            && (!is_whole || all == ranks)
    };
    (1..=ranks / others).rev().filter(fits).map(|dp| (dp, dp * own)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::Bytes;

    /// The answers are those of doubling and bisection, with fewer plans.
    #[test]
    fn the_largest_is_that_of_bisection() {
        let bisected =
            |Range { mut low, first, limit }: Range, gap: &dyn Fn(u64) -> u64, fits: &dyn Fn(u64) -> bool| {
                let (mut high, mut tried, mut next) = (limit + 1, 0, first.clamp((low + 1).min(limit), limit));
                while low + gap(low) < high {
                    tried += 1;
                    if fits(next) {
                        low = next;
                    } else {
                        high = next;
                    }
                    next = if high > limit { (low * 2).min(limit) } else { low.midpoint(high) };
                }
                (low, high, tried)
            };
        let (mut all, mut before) = (0, 0);
        let gaps: [&dyn Fn(u64) -> u64; 2] = [&|_| 1, &|count| (count / 64).max(1)];
        // A part of what is needed grows with the size, in steps, and is known of what does not fit alone.
        for (most, fixed, step, first) in
            [1u64, 2, 3, 31, 32, 33, 64, 170, 171, 500, 1023, 2000].into_iter().flat_map(|most| {
                [(0.0, 1), (0.3, 1), (0.6, 5), (0.9, 3)].map(|(fixed, step)| (most, fixed, step, 1 + most % 40))
            })
        {
            let needed = |count: u64| {
                let grown = (count / step * step) as f64 / (most / step * step).max(1) as f64;
                if count <= most { 1.0 } else { (fixed + (1.0 - fixed) * grown).max(1.001) }
            };
            for gap in gaps {
                let range = Range { low: 0, first, limit: 1500 };
                let (mut tried, mut nearest) = (0, None);
                let mut plan = |count: u64| {
                    tried += 1;
                    if count > most {
                        nearest = Some(nearest.map_or(count, |known: u64| known.min(count)));
                    }
                    assert!(count >= 1 && count <= range.limit);
                    let attempt =
                        if count <= most { Attempt::Fits(count) } else { Attempt::Refused(Some(needed(count)), count) };
                    Ok::<_, ()>(attempt)
                };
                let (best, beyond) = sought(range, gap, &mut plan).unwrap();
                let (low, high, plans) = bisected(range, gap, &|count| count <= most);
                assert_eq!(best, (low > 0).then_some((low, low)), "{most} {fixed}");
                // The least that was planned and does not fit, which is as near as bisection comes or nearer.
                assert_eq!(beyond, nearest.map(|least| (least, least)), "{most} {fixed}");
                assert_eq!(beyond.is_some(), high <= range.limit, "{most} {fixed}");
                assert!(beyond.is_none_or(|(least, _)| low < least && least <= high), "{most} {fixed}: {beyond:?}");
                assert!(tried <= plans + 3, "{most} {fixed} {step}: {tried} for {plans}");
                (all, before) = (all + tried, before + plans);
            }
        }
        assert!(6 * all < 5 * before, "{all} for {before}");
    }

    #[test]
    fn a_mesh_is_asked_under_the_pins_that_are_there() {
        let check = |pins: &str, choice: &str, expect: Option<&str>| {
            assert_eq!(on_mesh_of(pins, choice).as_deref(), expect, "{pins} and {choice}");
            expect.iter().for_each(|pins| assert!(Pins::parse(pins).is_ok(), "{pins}"));
        };
        let found = "dp=2,cp=4x2,tp=1,zero=3,microbatch=1,recompute=value:9";
        let open = "pp=1,dp=2,fsdp=1,ep=1,cp=4x2,tp=1,overlap_chunks=1,keep_casts=0";
        check("", found, Some(open));
        check("zero=1, dp=4", found, Some("zero=1,dp=4,pp=1,fsdp=1,ep=1,cp=4x2,tp=1,overlap_chunks=1,keep_casts=0"));
        check("overlap_chunks=2", found, Some("overlap_chunks=2,pp=1,dp=2,fsdp=1,ep=1,cp=4x2,tp=1,keep_casts=0"));
        check(
            "",
            "dp=1,ring=2,tp=1,zero=0,microbatch=1,recompute=none",
            Some("pp=1,dp=1,fsdp=1,ep=1,ring=2,cp=1,tp=1,overlap_chunks=1,keep_casts=0"),
        );
        check("pp=1,dp=8,fsdp=1,ep=1,cp=1,tp=1", found, None);
        check("", "pp=2,dp=1,tp=1,schedule=1f1b,zero=0,microbatch=1,recompute=none", None);
    }

    /// Asking one mesh first changes no answer: those are the sizes and plans that all meshes give.
    #[test]
    fn the_largest_is_planned_among_all_meshes() {
        let model = NamedModel::find("llama-tiny").unwrap();
        let cluster = Cluster::parse("h100:2", "h200").unwrap();
        let options = Options { device_memory: Some(Bytes(48 << 20)), ..Options::default() };
        let batch = Batch { batch: 8, seq: 256 };
        for dimension in [Dimension::Layers, Dimension::Seq] {
            let found = maximize(&model, batch, &cluster, &options, dimension, &|_, _| {}).unwrap();
            let question = Question {
                model: &model,
                batch,
                cluster: &cluster,
                options: &options,
                dimension,
                observe: &|_, _| {},
                near: RefCell::default(),
            };
            let all = question.plan(found.size, "").unwrap();
            assert_eq!(found.compiled.plan().choice, all.compiled.plan().choice, "{dimension:?}");
            let (beyond, _) = found.beyond.unwrap();
            assert!(is_refusal(&question.plan(beyond, "").err().unwrap()), "{dimension:?}: {beyond}");
        }
    }

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
