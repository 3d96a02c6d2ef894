//! A guard against our own functions: the first of them that a request reaches decides about it, and the driver calls that the real function
//! then makes are left alone.

use std::cell::Cell;
use std::ptr;
use vramctl_model::StatusCode;

thread_local! {
    /// Where on the stack the innermost real function was called; 0: nowhere. What it calls is below that. (A flag would stay set in a thread
    /// that is cancelled in the real function: its destructors still run, and may free memory.)
    static CALLED_AT: Cell<usize> = const { Cell::new(0) };
    /// What the next allocation is answered.
    static NEXT_ANSWER: Cell<Option<StatusCode>> = const { Cell::new(None) };
}

/// Calls a real function; its own driver calls are left alone.
pub fn forward<R>(real: impl FnOnce() -> R) -> R {
    let here = 0_u8;
    let before = CALLED_AT.replace(ptr::from_ref(&here).addr());
    let answer = real();
    CALLED_AT.set(before);
    answer
}

/// Whether this thread is in such a call.
#[inline]
pub fn is_nested() -> bool {
    let here = 0_u8;
    ptr::from_ref(&here).addr() < CALLED_AT.get()
}

/// Makes a call whose allocation from the driver gets this answer. Returns whether the call has allocated.
pub fn answer_next(answer: StatusCode, call: impl FnOnce() -> StatusCode) -> bool {
    NEXT_ANSWER.set(Some(answer));
    call();
    NEXT_ANSWER.take().is_none()
}

/// That answer, once.
pub fn take_next_answer() -> Option<StatusCode> {
    NEXT_ANSWER.take()
}
