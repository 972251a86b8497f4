//! The text forms of a [`Graph`](crate::Graph), a [`Plan`](crate::Plan) and a
//! [`Program`](crate::Program), and the plan file.
//!
//! ```text
//! graph @mlp {
//!   %0: f32[8,4] = input "x"
//!   %1: f32[4,2] = parameter "up.weight"
//!   %2: f32[8,2] = matmul %0, %1 at "up"
//!   %3: f32[] = sum_squares %2
//!   %4: f32[8,2] = affine %2 {offset=0.0, scale=2.0} grad_of %3
//!   return loss %3
//!   return update "up.weight" %1 = %1
//! }
//! ```
//!
//! A plan is the same text with a `mesh` line, layouts in the types and ` by FACTOR=AXES` after
//! the nodes, and ` in host` or ` in disk` after the type of what does not lie on the device; one in stages has
//! a `pipeline SCHEDULE CHUNKS` line, the chunks of a stage, and ` chunk N` after the nodes. `;` starts a comment.
//! Values may be named by words (`%query`); printing numbers them.
//!
//! Invariants: `parse(print(x)) == x` for everything the verifiers accept; a parser never panics,
//! and gathers every finding of a text, at most one per line.

mod cursor;
mod graph_parse;
mod graph_print;
mod plan_file;
mod program_parse;
mod program_print;

pub use plan_file::{PLAN_SCHEMA, PLAN_VERSION, PlanFileError};

use crate::names::edit_distance;
use crate::ops::{BinaryKind, CompareKind, Op, ReduceOp, UnaryKind};
use cursor::Cursor;
use serde::de::DeserializeOwned;

/// Every name that an operation can have in the text.
pub fn op_names() -> Vec<&'static str> {
    let families = ["unary", "unary_grad", "binary", "compare", "reduce"];
    let mut names: Vec<&str> = Op::NAMES.iter().copied().filter(|name| !families.contains(name)).collect();
    names.extend(UnaryKind::ALL.iter().map(|kind| kind.name()));
    names.extend(UnaryKind::ALL.iter().map(|kind| kind.grad_name()));
    names.extend(BinaryKind::ALL.iter().map(|kind| kind.name()));
    names.extend(CompareKind::ALL.iter().map(|kind| kind.name()));
    names.extend([ReduceOp::Sum, ReduceOp::Max].map(ReduceOp::name));
    names
}

/// `; did you mean …?` with the nearest of some names, if one is near.
fn suggestion(name: &str, known: &[&str]) -> String {
    let nearest = known.iter().map(|other| (edit_distance(name, other), *other)).min();
    match nearest.filter(|(distance, other)| *distance <= 1 + other.len() / 3) {
        Some((_, other)) => format!("; did you mean `{other}`?"),
        None => String::new(),
    }
}

/// A JSON document, of which every number is the one that was written: serde_json's may be the next to it.
///
/// # Errors
/// What is wrong with it, or does not suit.
pub fn read_json<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    let mut document = Cursor::document(text);
    let value = document.json()?;
    document.end()?;
    serde_json::from_value(value).map_err(|error| error.to_string())
}

/// A string as the text shows it.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Whether a string is a word, which needs no quotes.
fn is_word(text: &str) -> bool {
    !text.is_empty() && text.chars().all(cursor::is_word_char)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A number that is written and read again is the same, and nothing may follow a document.
    #[test]
    fn numbers_are_read_as_they_were_written() {
        let [written, other] = [0.394_077_960_308_120_03_f64, 0.394_077_960_308_12];
        assert_ne!(written, other);
        assert_eq!(read_json(&written.to_string()), Ok(written));
        assert_eq!(read_json::<f64>("1 2"), Err("expected the end of the line, found `2`".to_string()));
    }
}
