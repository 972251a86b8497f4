//! Golden files: `golden/**/*.ir`, each a list of cases.
//!
//! ```text
//! ; run: print
//! graph @one {
//!   %x: f32[8] = input "x"
//! }
//! ; expect:
//! graph @one {
//!   %0: f32[8] = input "x"
//! }
//! ; -----
//! graph @two {
//!   ; error: unknown operation
//!   %x: f32[8] = inptu "x"
//! }
//! ```
//!
//! * `; run: VERB ARGUMENTS` says what is done with the text; a case without one takes that of the
//!   case before it. The verbs are in [`verbs`](crate::verbs).
//! * `; error: SUBSTRING` stands on the line of the error, or on lines of its own before it. Every
//!   finding must be announced so and every announced error found; one whose place is not a line
//!   (a value, a node) may be announced anywhere.
//! * `; expect:` is followed by the exact result; a case may have none. With `BLESS=1` in the
//!   environment the expectations of cases that give a result are rewritten.

use crate::verbs::VERBS;
use shardc_ir::{Diagnostic, Diagnostics};

const SEPARATOR: &str = "; -----";
const EXPECT: &str = "; expect:";
const ERROR: &str = "; error:";

/// An announced error: the line it belongs to (from 1, in the case) and a part of its message.
struct Announced<'a> {
    line: usize,
    message: &'a str,
}

/// Runs the cases of a file; gives the file with its expectations rewritten.
///
/// # Errors
/// What differs, case by case.
pub fn run(text: &str) -> Result<String, String> {
    let (mut blessed, mut wrong, mut run_line) = (Vec::new(), Vec::new(), String::new());
    let mut first_line = 1;
    for case in cases(text) {
        let header = case.lines().find_map(|line| line.trim().strip_prefix("; run:"));
        if let Some(header) = header {
            run_line = header.trim().to_string();
        }
        let (new, result) = run_case(&case, &run_line);
        if let Err(message) = result {
            wrong.push(format!("case at line {first_line} (`{run_line}`):\n{message}"));
        }
        first_line += case.lines().count() + 1;
        blessed.push(new);
    }
    let separator = format!("{SEPARATOR}\n");
    if wrong.is_empty() { Ok(blessed.join(&separator)) } else { Err(wrong.join("\n\n")) }
}

/// Whether expectations are to be rewritten.
pub fn is_blessing() -> bool {
    std::env::var_os("BLESS").is_some_and(|value| value == "1")
}

fn cases(text: &str) -> Vec<String> {
    let mut cases = vec![String::new()];
    for line in text.lines() {
        if line.trim_end() == SEPARATOR {
            cases.push(String::new());
        } else if let Some(case) = cases.last_mut() {
            case.push_str(line);
            case.push('\n');
        }
    }
    cases
}

fn run_case(case: &str, run_line: &str) -> (String, Result<(), String>) {
    let marker = case.lines().position(|line| line.trim_end() == EXPECT);
    let cut = marker.unwrap_or(usize::MAX);
    let join = |lines: Vec<&str>| lines.iter().flat_map(|line| [*line, "\n"]).collect::<String>();
    let input = join(case.lines().take(cut).collect());
    let expected = marker.map(|marker| join(case.lines().skip(marker + 1).collect()));
    let words: Vec<&str> = run_line.split_whitespace().collect();
    let Some((name, arguments)) = words.split_first() else {
        return (case.to_string(), Err("the first case needs a `; run: VERB` line".to_string()));
    };
    let Some((_, verb)) = VERBS.iter().find(|(known, _)| known == name) else {
        let known: Vec<_> = VERBS.iter().map(|(name, _)| *name).collect();
        return (case.to_string(), Err(format!("unknown verb `{name}`; known are {}", known.join(", "))));
    };
    let announced = announced(&input);
    match verb(&input, arguments) {
        Ok(result) => {
            let blessed = format!("{input}{EXPECT}\n{result}");
            if let Some(error) = announced.first() {
                return (case.to_string(), Err(format!("no error, but `{}` was announced", error.message)));
            }
            let differs = expected.is_none_or(|expected| expected.trim_end() != result.trim_end()) && !is_blessing();
            (blessed, if differs { Err(format!("the result is:\n{result}")) } else { Ok(()) })
        }
        Err(found) => (case.to_string(), compare(&announced, &found)),
    }
}

/// The announced errors, each with the first line at or below it that is not only a comment.
fn announced(input: &str) -> Vec<Announced<'_>> {
    let lines: Vec<&str> = input.lines().collect();
    let is_code = |line: &str| !line.trim().is_empty() && !line.trim_start().starts_with(';');
    let mut announced = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        if let Some((_, message)) = line.split_once(ERROR) {
            let offset = lines[index..].iter().position(|line| is_code(line)).unwrap_or(0);
            announced.push(Announced { line: index + offset + 1, message: message.trim() });
        }
    }
    announced
}

fn compare(announced: &[Announced<'_>], found: &Diagnostics) -> Result<(), String> {
    let mut left: Vec<&Announced<'_>> = announced.iter().collect();
    let mut wrong = Vec::new();
    for diagnostic in &found.0 {
        match left.iter().position(|announced| fits(announced, diagnostic)) {
            Some(index) => drop(left.remove(index)),
            None => wrong.push(format!("not announced: {diagnostic}")),
        }
    }
    wrong.extend(left.iter().map(|error| format!("not found: line {}: {}", error.line, error.message)));
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
}

fn fits(announced: &Announced<'_>, diagnostic: &Diagnostic) -> bool {
    let line: Option<usize> = diagnostic.place.strip_prefix("line ").and_then(|line| line.parse().ok());
    let whole = diagnostic.to_string();
    line.is_none_or(|line| line == announced.line) && whole.contains(announced.message)
}
