//! What goes to stderr: logs and the final error.

use shardc::Error;
use std::io::IsTerminal;
use tracing_subscriber::EnvFilter;

/// Starts logging to stderr; `RUST_LOG` overrides the number of `-v`.
pub fn start(verbose: u8) {
    let level = match verbose {
        0 => "warn",
        1 => "warn,shardc=info,shardc_passes=info,shardc_models=info,shardc_runtime=info",
        _ => "info,shardc=debug,shardc_passes=debug,shardc_models=debug,shardc_runtime=debug",
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let ansi = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(ansi)
        .without_time()
        .init();
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
            eprint!("{text}");
            return;
        }
    }
    eprintln!("error: {error}");
    if let Some(fix) = error.fix() {
        eprintln!("help: {fix}");
    }
}
