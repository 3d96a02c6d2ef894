//! The boundary between the program's code and this library's.
//!
//! Nothing may unwind through it. A panic of ours must not reach the program. And a thread of the program that is cancelled
//! (`pthread_cancel`) unwinds from inside the next system call that waits, perhaps one of the driver's: where that meets Rust's
//! `catch_unwind`, the process is aborted.

use std::panic::{self, AssertUnwindSafe};
use std::ptr;

unsafe extern "C" {
    // The `libc` crate does not have it.
    fn pthread_setcancelstate(state: libc::c_int, before: *mut libc::c_int) -> libc::c_int;
}
const PTHREAD_CANCEL_DISABLE: libc::c_int = 1;

/// Runs the body of a function that the program calls. `None` if it panics. The thread is cancelled only after it.
#[inline]
pub fn guarded<R>(body: impl FnOnce() -> R) -> Option<R> {
    let mut before = PTHREAD_CANCEL_DISABLE;
    // SAFETY: writable. The state is this thread's own.
    unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &raw mut before) };
    let outcome = panic::catch_unwind(AssertUnwindSafe(body)).ok();
    // SAFETY: as above. A cancellation that waits takes effect in a later call of the program's, unless the program lets it interrupt any
    // instruction, which CUDA does not support.
    unsafe { pthread_setcancelstate(before, ptr::null_mut()) };
    outcome
}
