//! What is known of the contents of a buffer.

use super::arrangement::Arrangement;
use crate::entity::ValueId;
use crate::mesh::AxisId;
use crate::plan::Plan;
use std::rc::Rc;

/// How far a log-sum-exp over some axes has come: `log(sum(exp(x - m))) + m` with the maximum `m`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LogSumExp {
    /// `m`, the same on all coordinates.
    Max,
    /// `x - m`.
    Shifted,
    /// `exp(x - m)`.
    Exp,
    /// The sum of it.
    Total,
    /// Its logarithm.
    Log,
}

/// What the elements are of the value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The value itself, of this microbatch if it differs between them.
    Ready,
    /// Zeros: the sum over no microbatch.
    Empty,
    /// The sum over the microbatches up to and including this one.
    Accumulating(u64),
    /// The sum over the microbatches before this one, and this value in it.
    Adding(u64, ValueId),
    /// What is of another microbatch than that of the run; and whether it is the value itself.
    Stale(bool),
    /// A step of combining its terms over these axes.
    LogSumExp(LogSumExp, Vec<AxisId>),
}

/// A buffer holds these elements of this value, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fact {
    pub value: ValueId,
    pub arrangement: Arrangement,
    pub stage: Stage,
    /// Between two runs: of which microbatch the value is, if it differs between them. In a run it is of the
    /// run's own.
    pub of: Option<u64>,
}

/// What a buffer holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Content {
    /// Nothing was written.
    #[default]
    Nothing,
    /// A finding was reported on the way here; what follows from it is not reported.
    Refuted,
    /// Every fact of the list is true.
    Holds(Rc<Vec<Fact>>),
}

impl From<Vec<Fact>> for Content {
    fn from(facts: Vec<Fact>) -> Self {
        Self::Holds(Rc::new(facts))
    }
}

impl Content {
    /// What a run over a microbatch finds here.
    pub fn seen_in(&self, microbatch: u64) -> Self {
        if self.facts().iter().all(|fact| fact.of.is_none()) {
            return self.clone();
        }
        let seen = |fact: &Fact| match fact.of {
            Some(of) if of != microbatch => Fact { stage: Stage::Stale(fact.stage == Stage::Ready), ..fact.clone() },
            _ => Fact { of: None, ..fact.clone() },
        };
        self.facts().iter().map(seen).collect::<Vec<_>>().into()
    }

    /// What a run over a microbatch leaves here; `varies` says which facts are of that microbatch.
    pub fn left_by(&self, microbatch: u64, varies: impl Fn(&Fact) -> bool) -> Self {
        if !self.facts().iter().any(|fact| fact.of.is_none() && varies(fact)) {
            return self.clone();
        }
        let left = |fact: &Fact| match fact.of.is_none() && varies(fact) {
            true => Fact { of: Some(microbatch), ..fact.clone() },
            false => fact.clone(),
        };
        self.facts().iter().map(left).collect::<Vec<_>>().into()
    }

    /// The same so many microbatches later.
    pub fn later(&self, by: i64) -> Self {
        if by == 0 || self.facts().iter().all(|fact| fact.microbatch().is_none()) {
            return self.clone();
        }
        self.facts().iter().map(|fact| fact.later(by)).collect::<Vec<_>>().into()
    }

    /// Whether this is what the other is so many microbatches later.
    pub fn is_later(&self, by: i64, other: &Self) -> bool {
        match (self, other) {
            (Self::Holds(a), Self::Holds(b)) => {
                (by == 0 && Rc::ptr_eq(a, b))
                    || (a.len() == b.len() && a.iter().zip(b.iter()).all(|(a, b)| a.is_later(by, b)))
            }
            _ => self == other,
        }
    }

    pub fn facts(&self) -> &[Fact] {
        match self {
            Self::Holds(facts) => facts,
            _ => &[],
        }
    }

    /// Whether this is the value itself in this arrangement.
    pub fn is(&self, value: ValueId, arrangement: &Arrangement) -> bool {
        let fits = |fact: &Fact| fact.value == value && fact.stage == Stage::Ready && fact.arrangement == *arrangement;
        self.facts().iter().any(fits)
    }

    /// The text of what a buffer holds.
    pub fn text(&self, plan: &Plan) -> String {
        self.facts().first().map_or("nothing that is known".to_string(), |fact| fact.text(plan))
    }
}

impl Fact {
    pub fn ready(value: ValueId, arrangement: Arrangement) -> Self {
        Self { value, arrangement, stage: Stage::Ready, of: None }
    }

    /// The microbatch that is named.
    fn microbatch(&self) -> Option<u64> {
        match self.stage {
            Stage::Accumulating(microbatch) | Stage::Adding(microbatch, _) => Some(microbatch),
            _ => self.of,
        }
    }

    fn later(&self, by: i64) -> Self {
        let add = |microbatch: u64| microbatch.wrapping_add_signed(by);
        let stage = match &self.stage {
            Stage::Accumulating(last) => Stage::Accumulating(add(*last)),
            Stage::Adding(now, part) => Stage::Adding(add(*now), *part),
            stage => stage.clone(),
        };
        Self { stage, of: self.of.map(add), ..self.clone() }
    }

    fn is_later(&self, by: i64, other: &Self) -> bool {
        let add = |microbatch: u64| microbatch.wrapping_add_signed(by);
        let stages = match (&self.stage, &other.stage) {
            (Stage::Accumulating(after), Stage::Accumulating(before)) => *after == add(*before),
            (Stage::Adding(after, a), Stage::Adding(before, b)) => *after == add(*before) && a == b,
            (after, before) => after == before,
        };
        stages && self.of == other.of.map(add) && self.value == other.value && self.arrangement == other.arrangement
    }

    /// `%5 [8@dp,4]/sum(tp)`, and what is special about it.
    pub fn text(&self, plan: &Plan) -> String {
        let value = value_text(plan, self.value, &self.arrangement);
        let value = match (&self.stage, self.of) {
            (Stage::Ready, Some(microbatch)) => format!("in microbatch {microbatch} {value}"),
            _ => value,
        };
        match &self.stage {
            Stage::Ready => value,
            Stage::Accumulating(last) => format!("the sum over the microbatches up to {last} of {value}"),
            Stage::Empty => format!("zeros for the sum over the microbatches of {value}"),
            Stage::Adding(microbatch, part) => {
                format!("the sum over the microbatches before {microbatch} of {value}, and {part} of that one")
            }
            Stage::Stale(_) => match self.of {
                Some(microbatch) => format!("what is in microbatch {microbatch} {value}"),
                None => format!("what is in another microbatch {value}"),
            },
            Stage::LogSumExp(..) => format!("a step of the log-sum-exp of {value}"),
        }
    }
}

/// `%5 [8@dp,4]/sum(tp)`.
pub(super) fn value_text(plan: &Plan, value: ValueId, arrangement: &Arrangement) -> String {
    format!("{value} {}", arrangement.text(&plan.graph.ty(value).shape, &plan.mesh))
}
