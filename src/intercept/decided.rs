//! Requests that have been decided: the first of our functions that a request passes decides about it, and what the real function
//! then asks of the driver passes our functions.

use std::cell::Cell;

thread_local! {
    static DECIDED: Cell<bool> = const { Cell::new(false) };
}

/// Calls a real function whose own calls have been decided about.
pub fn pass_by<R>(real: impl FnOnce() -> R) -> R {
    let before = DECIDED.replace(true);
    let answer = real();
    DECIDED.set(before);
    answer
}

/// Whether the thread is in such a call.
#[inline]
pub fn is_decided() -> bool {
    DECIDED.get()
}
