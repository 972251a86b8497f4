//! Engines: which the library has for a graph, and by what a later process makes the same kernel.

use super::descriptor::{Descriptor, Kind, Knob, Name, Note};
use crate::cuda::device::Failure;
use cudarc::cudnn::sys;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use sys::cudnnBackendHeurMode_t as Mode;

/// An engine and what its knobs are set to, by the library's numbers. They mean the same to every process with this
/// version of the library, whatever the order in which its heuristics propose them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Configuration {
    engine: i64,
    knobs: Vec<(u32, i64)>,
}

/// More than there are kinds of knobs.
const KNOBS: usize = 64;

/// The engines that the library proposes for a graph, the fastest by its own judgement first.
pub fn proposed(operations: &Descriptor, mode: Mode) -> Result<Vec<Descriptor>, Failure> {
    let heuristics = Descriptor::new(Kind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?
        .with_parts(Name::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, &[operations])?
        .with(Name::CUDNN_ATTR_ENGINEHEUR_MODE, &[mode])?
        .finalize()?;
    heuristics.parts(Name::CUDNN_ATTR_ENGINEHEUR_RESULTS, Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, 16)
}

/// The engine of a configuration.
fn engines(configuration: &Descriptor) -> Result<Vec<Descriptor>, Failure> {
    configuration.parts(Name::CUDNN_ATTR_ENGINECFG_ENGINE, Kind::CUDNN_BACKEND_ENGINE_DESCRIPTOR, 1)
}

/// Whether an engine adds in a fixed order.
pub fn is_repeatable(configuration: &Descriptor) -> Result<bool, Failure> {
    let any = Note(sys::cudnnBackendNumericalNote_t::CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC as u32);
    let engines = engines(configuration)?;
    let mut notes = engines.iter().map(Descriptor::notes);
    notes.try_fold(true, |is_repeatable, notes| Ok(is_repeatable && !notes?.contains(&any)))
}

impl Configuration {
    /// That of a descriptor.
    pub fn of(configuration: &Descriptor) -> Result<Self, Failure> {
        let engines = engines(configuration)?;
        let engine = engines.first().ok_or("cuDNN, a configuration without an engine")?;
        let kind = Kind::CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR;
        let choices = configuration.parts(Name::CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, kind, KNOBS)?;
        let knob = |choice: &Descriptor| {
            Ok::<_, Failure>((choice.knob()?.0, choice.number(Name::CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE)?))
        };
        Ok(Self {
            engine: engine.number(Name::CUDNN_ATTR_ENGINE_GLOBAL_INDEX)?,
            knobs: choices.iter().map(knob).collect::<Result<_, _>>()?,
        })
    }

    /// The number of the engine.
    pub fn engine(&self) -> i64 {
        self.engine
    }

    /// This with one knob set as in some other of the same engine.
    pub fn varied<'a>(&self, known: impl IntoIterator<Item = &'a Self>) -> Vec<Self> {
        let known = known.into_iter().filter(|other| other.engine == self.engine);
        let settings: BTreeSet<(u32, i64)> = known.flat_map(|other| other.knobs.iter().copied()).collect();
        let set = |(knob, value): (u32, i64)| {
            let at = self.knobs.iter().position(|(own, now)| *own == knob && *now != value)?;
            let mut varied = self.clone();
            varied.knobs[at].1 = value;
            Some(varied)
        };
        settings.into_iter().filter_map(set).collect()
    }

    /// The descriptor of this for a graph.
    ///
    /// # Errors
    /// The graph has no such engine, or that no such knob.
    pub fn descriptor(&self, operations: &Descriptor) -> Result<Descriptor, Failure> {
        let engine = Descriptor::new(Kind::CUDNN_BACKEND_ENGINE_DESCRIPTOR)?
            .with_parts(Name::CUDNN_ATTR_ENGINE_OPERATION_GRAPH, &[operations])?
            .with(Name::CUDNN_ATTR_ENGINE_GLOBAL_INDEX, &[self.engine])?
            .finalize()?;
        let choice = |(knob, value): &(u32, i64)| {
            Descriptor::new(Kind::CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR)?
                .with(Name::CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, &[Knob(*knob)])?
                .with(Name::CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, &[*value])?
                .finalize()
        };
        let choices = self.knobs.iter().map(choice).collect::<Result<Vec<_>, Failure>>()?;
        let configuration = Descriptor::new(Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR)?
            .with_parts(Name::CUDNN_ATTR_ENGINECFG_ENGINE, &[&engine])?;
        let configuration = match choices.iter().collect::<Vec<_>>() {
            none if none.is_empty() => configuration,
            choices => configuration.with_parts(Name::CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, &choices)?,
        };
        configuration.finalize()
    }
}

impl std::fmt::Display for Configuration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "engine {}", self.engine)?;
        self.knobs.iter().try_for_each(|(knob, value)| write!(f, " {knob}={value}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_is_read_as_it_was_written() {
        let configuration = Configuration { engine: 57, knobs: vec![(14, 2), (0, -1)] };
        let text = serde_json::to_string(&configuration).unwrap();
        assert_eq!(text, r#"{"engine":57,"knobs":[[14,2],[0,-1]]}"#);
        assert_eq!(serde_json::from_str::<Configuration>(&text).unwrap(), configuration);
        assert_eq!(configuration.to_string(), "engine 57 14=2 0=-1");
    }

    #[test]
    fn knobs_are_set_as_in_others_of_the_engine() {
        let one = |engine: i64, knobs: [(u32, i64); 2]| Configuration { engine, knobs: knobs.to_vec() };
        let known = [one(62, [(2, 0), (27, 1)]), one(62, [(2, 4), (27, 8)]), one(65, [(2, 7), (27, 3)])];
        assert_eq!(known[0].varied(&known), [one(62, [(2, 4), (27, 1)]), one(62, [(2, 0), (27, 8)])]);
    }
}
