//! Panics that are answers: caught, and not printed.

use std::any::Any;
use std::cell::Cell;
use std::panic::{self, UnwindSafe, catch_unwind};
use std::sync::Once;

thread_local! {
    /// Whether what panics on this thread is caught by [`catch`].
    static IS_CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// What a function gives, or the message with which it panics. The message is the caller's to show: nothing is
/// written to stderr, as it is for panics on all other threads and outside of this function.
pub(super) fn catch<T>(run: impl FnOnce() -> T + UnwindSafe) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let others = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !IS_CAUGHT.get() {
                others(info);
            }
        }));
    });
    let outer = IS_CAUGHT.replace(true);
    let outcome = catch_unwind(run);
    IS_CAUGHT.set(outer);
    outcome.map_err(message)
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
        assert_eq!(catch(|| catch(|| panic!("{} of them", 2)).map(|()| 0)), Ok(Err("2 of them".to_string())));
        assert_eq!(catch(|| panic!("as it is")), Err::<(), _>("as it is".to_string()));
        assert!(!IS_CAUGHT.get());
    }
}
