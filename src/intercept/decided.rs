//! Marks requests that have been decided: the first of our functions that a request reaches decides about it; the driver calls that the
//! real function then makes are left alone.

use std::cell::Cell;

thread_local! {
    static DECIDED: Cell<bool> = const { Cell::new(false) };
}

/// Calls a real function; its own driver calls are left alone.
pub fn pass_by<R>(real: impl FnOnce() -> R) -> R {
    let before = DECIDED.replace(true);
    let answer = real();
    DECIDED.set(before);
    answer
}

/// Whether this thread is in such a call.
#[inline]
pub fn is_decided() -> bool {
    DECIDED.get()
}
