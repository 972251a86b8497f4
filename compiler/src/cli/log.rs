//! What goes to stderr: logs and the final error.

use shardc::Error;
use shardc_runtime::launch::Place;
use std::io::{IsTerminal, Write};
use tracing_subscriber::EnvFilter;

/// Stderr, with the rank before each line where another launcher than shardc's, which does so itself,
/// started this process.
#[derive(Clone)]
struct Stderr {
    prefix: String,
}

impl Stderr {
    fn new() -> Self {
        let place = Place::from_env().ok().flatten().filter(|place| !place.is_ours && place.rank > 0);
        Self { prefix: place.map(|place| format!("[rank {}] ", place.rank)).unwrap_or_default() }
    }
}

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        // A line in one piece: other ranks write to the same terminal.
        let mut text = Vec::with_capacity(self.prefix.len() + bytes.len());
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            text.extend(self.prefix.as_bytes());
            text.extend(line);
        }
        // Nobody is left to tell should stderr be closed, and what reports a failed write would write there itself.
        let _ = std::io::stderr().write_all(&text);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        let _ = std::io::stderr().flush();
        Ok(())
    }
}

/// Starts logging to stderr; `RUST_LOG` overrides the number of `-v`.
pub fn start(verbose: u8) {
    let level = match verbose {
        0 => "warn",
        1 => "warn,shardc=info,shardc_passes=info,shardc_models=info,shardc_runtime=info",
        _ => "info,shardc=debug,shardc_passes=debug,shardc_models=debug,shardc_runtime=debug",
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let ansi = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let stderr = Stderr::new();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(move || stderr.clone())
        .with_ansi(ansi)
        .without_time()
        .init();
}

/// Writes to stderr. Whoever reads it may stop reading, and the command goes on.
pub fn say(text: &str) {
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// An error as a person sees it: what, why and what to do.
#[derive(Debug)]
struct Report<'a>(&'a Error);

impl std::fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Report<'_> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        None
    }
}

impl miette::Diagnostic for Report<'_> {
    fn help<'a>(&'a self) -> Option<Box<dyn std::fmt::Display + 'a>> {
        self.0.fix().map(|fix| Box::new(fix) as Box<dyn std::fmt::Display>)
    }
}

/// Writes the error to stderr. Off a terminal it is two plain lines, for logs and scripts.
pub fn report(error: &Error) {
    if std::io::stderr().is_terminal() {
        let mut text = String::new();
        let handler = miette::GraphicalReportHandler::new();
        if handler.render_report(&mut text, &Report(error)).is_ok() {
            say(&text);
            return;
        }
    }
    let help = error.fix().map(|fix| format!("help: {fix}\n")).unwrap_or_default();
    let _ = Stderr::new().write_all(format!("error: {error}\n{help}").as_bytes());
}
