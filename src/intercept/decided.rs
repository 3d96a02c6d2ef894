//! Marks requests that have been decided: the first of our functions that a request reaches decides about it; the driver calls that the
//! real function then makes are left alone.

use std::cell::Cell;
use std::ptr;
use vramctl_model::StatusCode;

thread_local! {
    /// Where on the stack the innermost real function was called; 0: nowhere. What it calls is below that. (A flag would stay set in a thread
    /// that is cancelled in the real function: its destructors still run, and may free memory.)
    static DECIDED: Cell<usize> = const { Cell::new(0) };
    /// What the real function has answered already.
    static KNOWN: Cell<Option<StatusCode>> = const { Cell::new(None) };
    /// What the next allocation is answered.
    static NEXT: Cell<Option<StatusCode>> = const { Cell::new(None) };
}

/// Calls a real function; its own driver calls are left alone.
pub fn pass_by<R>(real: impl FnOnce() -> R) -> R {
    let here = 0_u8;
    let before = DECIDED.replace(ptr::from_ref(&here).addr());
    let answer = real();
    DECIDED.set(before);
    answer
}

/// Whether this thread is in such a call.
#[inline]
pub fn is_decided() -> bool {
    let here = 0_u8;
    ptr::from_ref(&here).addr() < DECIDED.get()
}

/// Handles a call that the real function has answered already.
pub fn answered<R>(answer: StatusCode, handle: impl FnOnce() -> R) -> R {
    KNOWN.set(Some(answer));
    let handled = handle();
    KNOWN.set(None);
    handled
}

/// That answer, once.
pub fn known_answer() -> Option<StatusCode> {
    KNOWN.take()
}

/// Makes a call whose allocation from the driver is answered so. Returns whether it has come to that.
pub fn next_answers(answer: StatusCode, call: impl FnOnce() -> StatusCode) -> bool {
    NEXT.set(Some(answer));
    call();
    NEXT.take().is_none()
}

/// That answer, once.
pub fn next_answer() -> Option<StatusCode> {
    NEXT.take()
}
