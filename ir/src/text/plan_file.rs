//! The plan file: a plan as versioned JSON.
//!
//! It holds the request, the cluster with its figures, the choice, the mesh, the prediction, the alternatives, how the plan was
//! found and the annotated graph in its text form, one line per array element, so that a person can read it and a diff of
//! two is a diff of two texts. Keys are sorted. `hash` is the SHA-256 of everything else, written
//! without white space; a file that was edited by hand fails it. The format is published as a JSON
//! schema ([`PLAN_SCHEMA`]).

use super::cursor::Cursor;
use crate::diagnostic::Diagnostics;
use crate::pipeline::Pipeline;
use crate::plan::Plan;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

/// The version of the plan file's format.
pub const PLAN_VERSION: u64 = 2;

/// The JSON schema of the plan file.
pub const PLAN_SCHEMA: &str = include_str!("plan.schema.json");

const AGAIN: &str = "make the plan again with `shardc plan … -o FILE`";

/// Why a plan file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PlanFileError {
    /// The file ends too early.
    #[error("the plan file is cut short: it ends at line {line}, inside the JSON; copy it again, or {AGAIN}")]
    Cut {
        /// The last line.
        line: usize,
    },
    /// The file is not JSON.
    #[error("this is not a plan file: {message}; {AGAIN}")]
    NotJson {
        /// What the JSON parser says.
        message: String,
    },
    /// The file is of another version.
    #[error(
        "the plan file has version {found}, made by shardc {shardc}; this is shardc {ours} and reads version {PLAN_VERSION}; {AGAIN}",
        ours = env!("CARGO_PKG_VERSION")
    )]
    Version {
        /// The file's version.
        found: String,
        /// The version of shardc that wrote it.
        shardc: String,
    },
    /// The contents are not those that were hashed.
    #[error(
        "the plan file was changed after it was made: its hash says {found}, its contents {actual}; {AGAIN}, with `--pin` to fix a choice"
    )]
    Hash {
        /// What the file says.
        found: String,
        /// What its contents give.
        actual: String,
    },
    /// A part is missing or of the wrong form.
    #[error("`{key}` of the plan file: {message}; {AGAIN}")]
    Content {
        /// The key.
        key: &'static str,
        /// What is wrong.
        message: String,
    },
    /// The annotated graph cannot be read.
    #[error("the graph of the plan file{place} cannot be read; {AGAIN}\n{found}")]
    Graph {
        /// Where it lies in the file.
        place: String,
        /// What is wrong, with the lines of the graph's text.
        found: Diagnostics,
    },
}

impl Plan {
    /// The plan file's text.
    pub fn to_json(&self) -> String {
        let mut content = self.content();
        let hash = hash_of(&content);
        content.insert("hash".to_string(), hash.into());
        // Values without maps of other keys than strings always serialize.
        let text = serde_json::to_string_pretty(&Value::Object(content)).unwrap_or_default();
        text + "\n"
    }

    /// The SHA-256 of the plan's contents, in hexadecimal. All ranks compare it before they start.
    pub fn hash(&self) -> String {
        hash_of(&self.content())
    }

    fn content(&self) -> Map<String, Value> {
        let text = self.to_string();
        let part = |value: serde_json::Result<Value>| value.unwrap_or_default();
        let content = json!({
            "version": PLAN_VERSION,
            "shardc": env!("CARGO_PKG_VERSION"),
            "request": part(serde_json::to_value(&self.request)),
            "cluster": self.cluster,
            "choice": self.choice,
            "mesh": part(serde_json::to_value(&self.mesh)),
            "prediction": part(serde_json::to_value(self.prediction)),
            "alternatives": part(serde_json::to_value(&self.alternatives)),
            "search": part(serde_json::to_value(&self.search)),
            "graph": text.lines().collect::<Vec<_>>(),
        });
        let Value::Object(mut content) = content else { return Map::new() };
        if self.stages() > 1 {
            let Pipeline { schedule, per_stage, lengths, .. } = &self.pipeline;
            let mut pipeline = json!({"schedule": schedule, "per_stage": per_stage});
            for (name, chunks) in self.pipeline.limits() {
                if let Some(chunks) = chunks {
                    pipeline[name] = json!(chunks);
                }
            }
            if !lengths.is_empty() {
                pipeline["lengths"] = json!(lengths);
            }
            content.insert("pipeline".to_string(), pipeline);
        }
        content
    }

    /// Reads a plan file. The plan is not verified: that is [`verify::plan`](crate::verify::plan)'s.
    ///
    /// # Errors
    /// See [`PlanFileError`].
    pub fn from_json(text: &str) -> Result<Self, PlanFileError> {
        if let Err(error) = serde_json::from_str::<serde::de::IgnoredAny>(text) {
            return Err(match error.is_eof() {
                true => PlanFileError::Cut { line: error.line() },
                false => PlanFileError::NotJson { message: error.to_string() },
            });
        }
        // The cursor reads numbers exactly, so the contents hash to what they were written from.
        let value = Cursor::document(text).json().map_err(|message| PlanFileError::NotJson { message })?;
        let Value::Object(mut content) = value else {
            return Err(PlanFileError::NotJson { message: "it holds no object".to_string() });
        };
        let version = content.get("version").cloned().unwrap_or_default();
        if version != PLAN_VERSION {
            let shardc = content.get("shardc").and_then(Value::as_str).unwrap_or("of an unknown version");
            return Err(PlanFileError::Version { found: version.to_string(), shardc: shardc.to_string() });
        }
        let found: String = take(&mut content, "hash")?;
        let actual = hash_of(&content);
        if found != actual {
            return Err(PlanFileError::Hash { found, actual });
        }
        let lines: Vec<String> = take(&mut content, "graph")?;
        let graph = |found| PlanFileError::Graph { place: place_of_graph(text), found };
        let mut plan: Plan = lines.join("\n").parse().map_err(graph)?;
        if take::<crate::Mesh>(&mut content, "mesh")? != plan.mesh {
            let message = "it is not the mesh of the graph".to_string();
            return Err(PlanFileError::Content { key: "mesh", message });
        }
        if content.remove("pipeline") != plan.content().remove("pipeline") {
            let message = "it is not the pipeline of the graph".to_string();
            return Err(PlanFileError::Content { key: "pipeline", message });
        }
        plan.request = take(&mut content, "request")?;
        plan.cluster = take(&mut content, "cluster")?;
        plan.choice = take(&mut content, "choice")?;
        plan.prediction = take(&mut content, "prediction")?;
        let step = plan.prediction.step.0;
        if step < 0.0 || step.is_nan() {
            let message = format!("a step takes {step} seconds in it");
            return Err(PlanFileError::Content { key: "prediction", message });
        }
        plan.alternatives = take(&mut content, "alternatives")?;
        plan.search = take(&mut content, "search")?;
        Ok(plan)
    }
}

/// Where the graph's first line is in a file that has a line for each.
fn place_of_graph(text: &str) -> String {
    let before = text.lines().position(|line| line.trim() == "\"graph\": [");
    before.map_or(String::new(), |before| format!(", whose line 1 is line {} of the file,", before + 2))
}

fn take<T: DeserializeOwned>(content: &mut Map<String, Value>, key: &'static str) -> Result<T, PlanFileError> {
    let Some(value) = content.remove(key) else {
        return Err(PlanFileError::Content { key, message: "it is missing".to_string() });
    };
    serde_json::from_value(value).map_err(|error| PlanFileError::Content { key, message: error.to_string() })
}

fn hash_of(content: &Map<String, Value>) -> String {
    let mut text = String::new();
    write_canonical(&mut text, content);
    Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Compact JSON with sorted keys, whatever order the map keeps.
fn write_canonical(text: &mut String, map: &Map<String, Value>) {
    let mut keys: Vec<_> = map.keys().collect();
    keys.sort_unstable();
    text.push('{');
    for key in keys {
        text.push_str(&format!("{}:", Value::from(key.as_str())));
        write_value(text, &map[key]);
        text.push(',');
    }
    text.push('}');
}

fn write_value(text: &mut String, value: &Value) {
    match value {
        Value::Object(map) => write_canonical(text, map),
        Value::Array(items) => {
            text.push('[');
            for item in items {
                write_value(text, item);
                text.push(',');
            }
            text.push(']');
        }
        other => text.push_str(&other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::Length;
    use crate::plan::Alternative;
    use crate::units::{Bytes, Seconds};

    const TEXT: &str = "graph @step {
  mesh dp=2,time mb=2
  reduce_in_loop
  %0: f32[8@dp.mb,4] = input \"x\" by i=dp.mb
  %1: f32[4@dp,2] transient in host = parameter \"w\" by i=dp
  %2: f32[8@dp.mb,2] = matmul %0, %1 by m=dp.mb
  %3: f32[]/sum(dp)/sum(mb) = sum_squares %2 by i=dp.mb
  return loss %3
}
";

    fn plan() -> Plan {
        let mut plan: Plan = TEXT.parse().unwrap();
        plan.choice = "dp=2".to_string();
        plan.cluster = json!({"nodes": 1, "device": {"link_bandwidth": {"value": 2.5e10, "source": "measured"}}});
        plan.prediction.step = Seconds(0.1 + 0.2);
        plan.prediction.mfu = 1e-7 / 3.0;
        let (choice, reason) = ("tp=2".to_string(), "slower: \"tp\"".to_string());
        plan.search.gap = 0.1;
        plan.alternatives.push(Alternative { choice, reason, step: Seconds(0.7), memory: Bytes(7) });
        plan
    }

    #[test]
    fn files_round_trip() {
        let plan = plan();
        let text = plan.to_json();
        let read = Plan::from_json(&text).unwrap();
        assert_eq!(read, plan);
        assert_eq!(read.to_json(), text);
        assert_eq!(plan.to_string(), TEXT);
        assert!(text.contains(&plan.hash()));
    }

    #[test]
    fn lengths_of_chunks_round_trip() {
        let staged = TEXT.replace("dp=2,time mb=2", "dp=2,pp=2,time mb=2");
        let staged = staged
            .replace("  reduce_in_loop", "  reduce_in_loop\n  pipeline 1f1b 1 lengths 372/300/200/0 1000/700/600/5");
        let plan: Plan = staged.parse().unwrap();
        let last = Length { forward: 1000, backward: 700, weight: 600, message: 5 };
        assert_eq!((plan.pipeline.lengths.len(), plan.pipeline.lengths[1]), (2, last));
        assert_eq!(plan.to_string(), staged);
        assert_eq!(Plan::from_json(&plan.to_json()).unwrap(), plan);
        assert!(plan.to_json().contains("\"lengths\""));
        let bounded = staged.replace("1f1b 1", "zbv 2 in_flight 3 delayed 2");
        let plan: Plan = bounded.parse().unwrap();
        let Pipeline { in_flight, delayed, lengths, .. } = &plan.pipeline;
        assert_eq!((*in_flight, *delayed, lengths.len()), (Some(3), Some(2), 2));
        assert_eq!(plan.to_string(), bounded);
        let json = plan.to_json();
        assert!(["\"in_flight\": 3", "\"delayed\": 2"].iter().all(|part| json.contains(part)), "{json}");
        for (bad, expect) in [("fast/", "the length of a chunk's part"), ("372/300 ", "`/`")] {
            let error = staged.replace("372/300/", bad).parse::<Plan>().unwrap_err().to_string();
            assert!(error.contains(expect), "{error}");
        }
    }

    #[track_caller]
    fn check_error(text: &str, expect: &str) {
        let error = Plan::from_json(text).unwrap_err().to_string();
        assert!(error.contains(expect), "{error}");
    }

    #[test]
    fn bad_files_are_told_apart() {
        let text = plan().to_json();
        check_error(&text[..text.len() / 2], "cut short: it ends at line");
        check_error("", "cut short");
        check_error("not a plan", "not a plan file");
        check_error(&text.replace("\"version\": 2", "\"version\": 1"), "has version 1, made by shardc");
        check_error(&text.replace("dp=2", "dp=4"), "was changed after it was made");
        check_error("{\"version\": 2}", "`hash` of the plan file: it is missing");
        let check_content = |change: &dyn Fn(&mut Map<String, Value>), expect: &str| {
            let mut content = plan().content();
            change(&mut content);
            content.insert("hash".to_string(), hash_of(&content).into());
            check_error(&serde_json::to_string_pretty(&Value::Object(content)).unwrap(), expect);
        };
        check_content(&|content| drop(content.remove("choice")), "`choice` of the plan file: it is missing");
        let pipeline =
            |content: &mut Map<String, Value>| drop(content.insert("pipeline".into(), json!({"per_stage": 1})));
        check_content(&pipeline, "`pipeline` of the plan file: it is not the pipeline of the graph");
        let graph = |content: &mut Map<String, Value>| content["graph"][5] = json!("  %2: f32[8@dp.mb,2] = matmul %0");
        check_content(&graph, "whose line 1 is line 21 of the file");
        check_content(&|content| content["prediction"]["step"] = json!(-1.5), "a step takes -1.5 seconds in it");
    }
}
