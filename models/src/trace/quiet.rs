//! Panics that are answers: caught, and not printed.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::{self, UnwindSafe, catch_unwind};
use std::sync::Once;

thread_local! {
    /// Whether what panics on this thread is caught by [`catch`].
    static IS_CAUGHT: Cell<bool> = const { Cell::new(false) };
    /// Where it panicked.
    static PLACE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// A panic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Caught {
    /// What it says.
    pub message: String,
    /// Its file and line, unless they are Burn's or those of Rust's own crates, which tell an author nothing.
    pub place: Option<String>,
}

/// What a function gives, or the panic with which it ends. That is the caller's to show: nothing is written to stderr,
/// as it is for panics on all other threads and outside of this function.
pub(super) fn catch<T>(run: impl FnOnce() -> T + UnwindSafe) -> Result<T, Caught> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let others = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !IS_CAUGHT.get() {
                return others(info);
            }
            let is_authors = |file: &str| !file.contains("burn-") && !file.starts_with("/rustc/");
            let place = info.location().filter(|place| is_authors(place.file()));
            PLACE.set(place.map(|place| format!("{}:{}", place.file(), place.line())));
        }));
    });
    let outer = IS_CAUGHT.replace(true);
    let outcome = catch_unwind(run);
    IS_CAUGHT.set(outer);
    outcome.map_err(|panic| Caught { message: message(panic), place: PLACE.take() })
}

fn message(panic: Box<dyn Any + Send>) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_a_message() {
        assert_eq!(catch(|| 1), Ok(1));
        let line = line!() + 1;
        let inner = catch(|| catch(|| panic!("{} of them", 2)).map(|()| 0)).unwrap().unwrap_err();
        assert_eq!(inner.message, "2 of them");
        assert!(inner.place.unwrap().ends_with(&format!("quiet.rs:{line}")));
        let message = |caught: Result<(), Caught>| caught.unwrap_err().message;
        assert_eq!(message(catch(|| panic!("as it is"))), "as it is");
        assert!(!IS_CAUGHT.get());
    }
}
