//! Signals that ask a run to stop, and the one that would end it where a file gets too large.

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// What asks once is heard for so long: `timeout` signals the process and then its group.
const ONE_REQUEST: Duration = Duration::from_secs(1);

/// Set when a signal asks to stop, which `told` tells; the process ends at the second request. Signals that whoever started
/// it has it ignore, as `nohup` does, stay ignored.
pub(super) fn stop(told: impl Fn() + Send + 'static) -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let (flag, ignored) = (stop.clone(), ignored());
    let heard = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| ignored >> (signal - 1) & 1 == 0);
    let mut signals = match Signals::new(heard) {
        Ok(signals) => signals,
        Err(error) => {
            tracing::warn!("Ctrl-C will stop without a summary: {error}");
            return stop;
        }
    };
    std::thread::spawn(move || {
        let mut first: Option<Instant> = None;
        for _ in signals.forever() {
            match first {
                Some(first) if first.elapsed() > ONE_REQUEST => std::process::exit(130),
                Some(_) => {}
                None => {
                    first = Some(Instant::now());
                    flag.store(true, Ordering::Relaxed);
                    told();
                }
            }
        }
    });
    stop
}

/// Lets a write fail that makes a file larger than may be (`ulimit -f`), which else ends the process.
pub(super) fn let_large_writes_fail() {
    if let Err(error) = signal_hook::flag::register(SIGXFSZ, Arc::default()) {
        tracing::debug!("a file larger than may be written ends the command: {error}");
    }
}

/// The signals that this process was started to ignore: signal `n` is bit `n - 1`.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
