//! What a verifier or a parser has to say: all of it at once, each with its place.

use std::fmt;

/// One finding, at one place of the text form (`%12`, `node7`, `line 3`, `$4`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// Where: an entity or a line, as the text form shows it.
    pub place: String,
    /// What is wrong, and what would be right.
    pub message: String,
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.message)
    }
}

/// Every finding of one verification or one parse, in the order of the text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Diagnostics(pub Vec<Diagnostic>);

impl Diagnostics {
    /// Adds a finding.
    pub fn push(&mut self, place: impl fmt::Display, message: impl Into<String>) {
        self.0.push(Diagnostic { place: place.to_string(), message: message.into() });
    }

    /// `Ok(value)` if nothing was found, else the findings.
    pub fn finish<T>(self, value: T) -> Result<T, Self> {
        if self.0.is_empty() { Ok(value) } else { Err(self) }
    }
}

impl fmt::Display for Diagnostics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, diagnostic) in self.0.iter().enumerate() {
            let newline = if index > 0 { "\n" } else { "" };
            write!(f, "{newline}{diagnostic}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Diagnostics {}
