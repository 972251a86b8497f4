//! The pipeline of a plan: which ranks run which part of the graph, and in which order.
//!
//! The ranks along the mesh axis `pp` are *stages*. The graph is cut into *chunks*, as many as there are
//! stages or a multiple of it, in the order of the forward pass; each stage runs one or several of them. A
//! node without a chunk depends on inputs and constants alone, or is arithmetic on what is left of all
//! chunks after the loop over the microbatches (the norm of the gradients): every stage that needs it
//! makes it itself. What a chunk makes and another stage reads is sent there, once per microbatch.
//!
//! No strategy names `pp`: layouts are those within a stage.

use crate::entity::{NodeId, SecondaryMap};
use crate::graph::{Graph, Role};
use serde::{Deserialize, Serialize};

/// In which order a stage runs its microbatches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Schedule {
    /// All forward passes, then all backward passes (Huang et al., "GPipe", 2019).
    #[serde(rename = "gpipe")]
    GPipe,
    /// One forward, one backward, once the pipeline is full (Narayanan et al.,
    /// "Memory-efficient pipeline-parallel DNN training", 2021, section 3).
    #[default]
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
    /// The same over several chunks of a stage, which are dealt out in turns (Narayanan et al.,
    /// "Efficient large-scale language model training on GPU clusters", 2021, section 2.2), of any number of
    /// microbatches in rounds of at least as many as there are stages (Llama team, "The Llama 3 herd of models", 2024,
    /// section 3.3.2).
    #[serde(rename = "interleaved")]
    Interleaved,
    /// Two chunks of a stage, down the pipeline and back up; gradients of weights fill the waits (Qi et
    /// al., "Zero bubble pipeline parallelism", 2024, section 6).
    #[serde(rename = "zbv")]
    ZeroBubbleV,
}

/// More chunks in flight than any step has.
const MOST_IN_FLIGHT: u64 = 1 << 32;

/// The most chunks of all stages, more than any pipeline has.
pub const MOST_CHUNKS: u64 = 1 << 16;

impl Schedule {
    /// Every schedule, the simplest first.
    pub const ALL: [Schedule; 4] = [Self::GPipe, Self::OneForwardOneBackward, Self::Interleaved, Self::ZeroBubbleV];

    /// The name in the text form and in pins.
    pub fn name(self) -> &'static str {
        match self {
            Self::GPipe => "gpipe",
            Self::OneForwardOneBackward => "1f1b",
            Self::Interleaved => "interleaved",
            Self::ZeroBubbleV => "zbv",
        }
    }

    /// The schedule of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|schedule| schedule.name() == name)
    }

    /// Whether a stage may run so many chunks.
    ///
    /// # Errors
    /// How many it runs, as a sentence.
    pub fn check_chunks(self, per_stage: u64) -> Result<(), String> {
        let name = self.name();
        match (self, per_stage) {
            (Self::GPipe | Self::OneForwardOneBackward, 1) | (Self::ZeroBubbleV, 2) | (Self::Interleaved, 2..) => {
                Ok(())
            }
            (Self::GPipe | Self::OneForwardOneBackward, _) => Err(format!(
                "a stage of schedule {name} runs one chunk, not {per_stage}; several take schedule interleaved"
            )),
            (Self::ZeroBubbleV, _) => Err(format!("a stage of schedule {name} runs two chunks, not {per_stage}")),
            (Self::Interleaved, _) => Err(format!(
                "a stage of schedule {name} runs at least two chunks, not {per_stage}; one takes schedule 1f1b"
            )),
        }
    }

    /// That a plan may say of how many chunks a stage holds what forward passes leave ([`Pipeline::in_flight`]).
    ///
    /// # Errors
    /// Why not.
    pub fn check_in_flight(self, chunks: u64) -> Result<(), String> {
        match self {
            Self::GPipe => Err(format!(
                "all microbatches are in flight in schedule {}; {chunks} chunks take another schedule",
                self.name()
            )),
            _ if (1..=MOST_IN_FLIGHT).contains(&chunks) => Ok(()),
            _ => Err(format!("a stage has at least one chunk in flight and at most {MOST_IN_FLIGHT}, not {chunks}")),
        }
    }

    /// That a plan may say of how many chunks a stage delays the gradients of weights ([`Pipeline::delayed`]).
    ///
    /// # Errors
    /// Why not.
    pub fn check_delayed(self, chunks: u64) -> Result<(), String> {
        match self.splits_backward() {
            false => Err(format!(
                "gradients of weights are no pass of their own in schedule {}; to delay those of {chunks} chunks takes \
                 schedule {}",
                self.name(),
                Self::ZeroBubbleV.name()
            )),
            true if (1..=MOST_IN_FLIGHT).contains(&chunks) => Ok(()),
            true => Err(format!("at least one chunk is delayed and at most {MOST_IN_FLIGHT}, not {chunks}")),
        }
    }

    /// How many chunks of a stage a search tries.
    pub fn usual_chunks(self) -> &'static [u64] {
        match self {
            Self::GPipe | Self::OneForwardOneBackward => &[1],
            Self::Interleaved => &[2, 4, 8],
            Self::ZeroBubbleV => &[2],
        }
    }

    /// Whether gradients of weights are steps of their own.
    pub fn splits_backward(self) -> bool {
        match self {
            Self::GPipe | Self::OneForwardOneBackward | Self::Interleaved => false,
            Self::ZeroBubbleV => true,
        }
    }
}

/// How long a chunk takes for one microbatch, all in one unit. Seconds would say more than an order needs: they change with
/// the devices that a plan is priced for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Length {
    /// The forward pass.
    pub forward: u64,
    /// The backward pass without the gradients of weights.
    pub backward: u64,
    /// The gradients of weights.
    pub weight: u64,
    /// What passes between it and the chunk before, one way.
    pub message: u64,
}

/// See the [module](self). The default is that of a mesh without stages.
#[derive(Clone, Debug, PartialEq)]
pub struct Pipeline {
    /// The order of the microbatches.
    pub schedule: Schedule,
    /// Chunks of each stage.
    pub per_stage: u64,
    /// Per node, its chunk.
    pub chunks: SecondaryMap<NodeId, Option<u32>>,
    /// Of how many chunks a stage holds what forward passes leave, at the most. The fewer, the less memory, and the longer
    /// stages wait: for each other in zero-bubble V (Qi et al., "Pipeline parallelism with controllable memory", 2024),
    /// else for messages ([`Self::ahead`], [`Self::rounds`]).
    pub in_flight: Option<u64>,
    /// Of how many chunks a stage of zero-bubble V delays the gradients of weights, at the most: when its forward passes are
    /// through, they fill the gaps in which it would wait. The fewer, the less memory for what they read.
    pub delayed: Option<u64>,
    /// How long each chunk takes, from which the order follows in which stages meet; none where the plan does not say.
    pub lengths: Vec<Length>,
}

impl Default for Pipeline {
    fn default() -> Self {
        Self {
            schedule: Schedule::default(),
            per_stage: 1,
            chunks: SecondaryMap::new(),
            in_flight: None,
            delayed: None,
            lengths: Vec::new(),
        }
    }
}

impl Pipeline {
    /// What a stage holds at the most, by the names that plans and pins have for it.
    pub fn limits(&self) -> [(&'static str, Option<u64>); 2] {
        [("in_flight", self.in_flight), ("delayed", self.delayed)]
    }

    /// [`Self::in_flight`] of zero-bubble V, of so many stages; where the plan does not say, no less than is held if
    /// microbatches come in as fast as the first stage takes them.
    pub fn most_in_flight(&self, stages: u64) -> u64 {
        self.in_flight.unwrap_or(3 * stages)
    }

    /// [`Self::delayed`] of so many stages: those of all that is in flight, where the plan does not say.
    pub fn most_delayed(&self, stages: u64) -> u64 {
        self.delayed.unwrap_or(self.most_in_flight(stages))
    }

    /// How many forward passes a stage of 1F1B runs before its first backward pass: one for each stage behind it, or up to
    /// [`Self::in_flight`] of the first stage, and of the others in the same ratio. With two for each stage behind it no
    /// message lets it wait that takes no longer than a step (Zhuang et al., "On optimizing the communication of model
    /// parallelism", 2023, section 4).
    pub fn ahead(&self, stage: u64, stages: u64) -> u64 {
        let behind = stages.saturating_sub(stage + 1);
        let most = self.in_flight.unwrap_or(stages).saturating_sub(1);
        (u128::from(behind) * u128::from(most) / u128::from(stages.saturating_sub(1).max(1))) as u64
    }

    /// Into how many rounds, as equal as can be, the microbatches of interleaved chunks are divided: those of a round go
    /// through a chunk of a stage one after the other, before any of them goes through the next one. A round has at least
    /// as many as there are stages, or they would wait for it to come around; the more it has, the longer messages
    /// may take. As many rounds as can be, or as few as [`Self::in_flight`] leaves.
    pub fn rounds(&self, stages: u64, microbatches: u64) -> u64 {
        let all = (microbatches / stages.max(1)).max(1);
        let Some(most) = self.in_flight else { return all };
        // What is held is the less, the more rounds there are.
        let (mut least, mut enough) = (1, all);
        while least < enough {
            let middle = least.midpoint(enough);
            match self.held_in_rounds(stages, microbatches, middle) <= most {
                true => enough = middle,
                false => least = middle + 1,
            }
        }
        enough
    }

    /// Of how many chunks the first stage, which holds the most, holds what forward passes leave in so many rounds.
    pub fn held_in_rounds(&self, stages: u64, microbatches: u64, rounds: u64) -> u64 {
        let turns = self.per_stage.saturating_sub(1).saturating_mul(microbatches.div_ceil(rounds.max(1)));
        let all = microbatches.saturating_mul(self.per_stage);
        (2 * stages.saturating_sub(1) + 1).saturating_add(turns).min(all)
    }

    /// That so many stages can keep to [`Self::in_flight`] and [`Self::delayed`] over so many microbatches.
    ///
    /// # Errors
    /// How many chunks they hold at the least.
    pub fn check_held(&self, stages: u64, microbatches: u64) -> Result<(), String> {
        self.delayed.map_or(Ok(()), |chunks| self.schedule.check_delayed(chunks))?;
        let Some(chunks) = self.in_flight else { return Ok(()) };
        self.schedule.check_in_flight(chunks)?;
        let least = match self.schedule {
            Schedule::GPipe => 1,
            // The last stage holds both chunks of a microbatch.
            Schedule::ZeroBubbleV => 2,
            Schedule::OneForwardOneBackward => stages,
            Schedule::Interleaved => self.held_in_rounds(stages, microbatches, self.rounds(stages, microbatches)),
        };
        match chunks < least {
            true => Err(format!(
                "{stages} stages of schedule {} have at least {least} chunks in flight, not {chunks}",
                self.schedule.name()
            )),
            false => Ok(()),
        }
    }

    /// The stage that runs a chunk, of so many stages.
    pub fn stage_of(&self, chunk: u32, stages: u64) -> u64 {
        let chunk = u64::from(chunk);
        match self.schedule {
            // Down, and back up.
            Schedule::ZeroBubbleV if chunk >= stages => (2 * stages - 1).saturating_sub(chunk),
            _ => chunk % stages.max(1),
        }
    }

    /// The chunks of a stage, in the order of the forward pass.
    pub fn chunks_of(&self, stage: u64, stages: u64) -> Vec<u32> {
        (0..(stages * self.per_stage) as u32).filter(|chunk| self.stage_of(*chunk, stages) == stage).collect()
    }
}

/// The last node of the forward pass. What computes a gradient before it, as the head does chunk by
/// chunk, runs in the forward pass.
pub fn last_forward(graph: &Graph) -> NodeId {
    let mut forward = graph.nodes().filter(|(_, node)| node.role == Role::Forward);
    forward.next_back().map_or(NodeId::from_u32(0), |(id, _)| id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_dealt_out() {
        let pipeline = |schedule, per_stage| Pipeline { schedule, per_stage, ..Pipeline::default() };
        assert_eq!(pipeline(Schedule::OneForwardOneBackward, 1).chunks_of(2, 4), [2]);
        assert_eq!(pipeline(Schedule::Interleaved, 3).chunks_of(1, 4), [1, 5, 9]);
        assert_eq!(pipeline(Schedule::ZeroBubbleV, 2).chunks_of(0, 4), [0, 7]);
        assert_eq!(pipeline(Schedule::ZeroBubbleV, 2).chunks_of(3, 4), [3, 4]);
        assert_eq!(Schedule::from_name("1f1b"), Some(Schedule::OneForwardOneBackward));
        assert!(Schedule::GPipe.check_chunks(2).is_err());
    }

    #[test]
    fn rounds_are_as_many_as_what_is_in_flight_leaves() {
        let rounds = |in_flight, microbatches| {
            let schedule = Schedule::Interleaved;
            let pipeline = Pipeline { schedule, per_stage: 2, in_flight, ..Pipeline::default() };
            let rounds = pipeline.rounds(4, microbatches);
            (rounds, pipeline.held_in_rounds(4, microbatches, rounds))
        };
        assert_eq!([2, 4, 8, 9, 15].map(|microbatches| rounds(None, microbatches).0), [1, 1, 2, 2, 3]);
        assert_eq!([2, 4, 8, 9, 15].map(|microbatches| rounds(None, microbatches).1), [4, 8, 11, 12, 12]);
        // Of sixteen, four rounds of four, three of which the largest has six, or two of eight.
        let held = [1, 11, 12, 13, 14, 15, 1 << 40].map(|chunks| rounds(Some(chunks), 16));
        assert_eq!(held, [(4, 11), (4, 11), (4, 11), (3, 13), (3, 13), (2, 15), (1, 23)]);
    }
}
