//! What is known of the contents of a buffer.

use super::arrangement::Arrangement;
use crate::entity::ValueId;
use crate::mesh::AxisId;
use crate::plan::Plan;

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
    /// The value in an earlier microbatch.
    Stale,
    /// A step of combining its terms over these axes.
    LogSumExp(LogSumExp, Vec<AxisId>),
}

/// A buffer holds these elements of this value, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fact {
    pub value: ValueId,
    pub arrangement: Arrangement,
    pub stage: Stage,
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
    Holds(Vec<Fact>),
}

impl Content {
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
        Self { value, arrangement, stage: Stage::Ready }
    }

    /// Whether two facts are equal but for the microbatch, which is one later in the second.
    pub fn is_followed_by(&self, later: &Self) -> bool {
        let stages = match (&self.stage, &later.stage) {
            (Stage::Accumulating(before), Stage::Accumulating(after)) => before + 1 == *after,
            (Stage::Adding(before, a), Stage::Adding(after, b)) => before + 1 == *after && a == b,
            (before, after) => before == after,
        };
        stages && self.value == later.value && self.arrangement == later.arrangement
    }

    /// `%5 [8@dp,4]/sum(tp)`, and what is special about it.
    pub fn text(&self, plan: &Plan) -> String {
        let value = value_text(plan, self.value, &self.arrangement);
        match &self.stage {
            Stage::Ready => value,
            Stage::Accumulating(last) => format!("the sum over the microbatches up to {last} of {value}"),
            Stage::Empty => format!("zeros for the sum over the microbatches of {value}"),
            Stage::Adding(microbatch, part) => {
                format!("the sum over the microbatches before {microbatch} of {value}, and {part} of that one")
            }
            Stage::Stale => format!("what was in an earlier microbatch {value}"),
            Stage::LogSumExp(..) => format!("a step of the log-sum-exp of {value}"),
        }
    }
}

/// `%5 [8@dp,4]/sum(tp)`.
pub(super) fn value_text(plan: &Plan, value: ValueId, arrangement: &Arrangement) -> String {
    format!("{value} {}", arrangement.text(&plan.graph.ty(value).shape, &plan.mesh))
}
