//! What CUDA refuses whatever the arguments are: in a capture, the calls that the thread's mode forbids, and it ends the capture; in a context
//! that a failed kernel has broken, almost all calls.
//!
//! A call that the library answers itself is to be refused as well: programs try whether something can be captured, and whether a context
//! still works. So the library asks CUDA first, with a call of the same kind that does nothing.

use crate::call::Call;
use crate::{driver_originals, reentrancy};
use vramctl_model::{Failure, StatusCode, code};

/// Frees nothing, and returns whether CUDA refuses that on this thread now, as it would refuse to allocate and to free: then the real function
/// must be called. As any such call does, this ends a capture that forbids it.
pub fn provoke() -> bool {
    // SAFETY: there is nothing to free.
    let asked = Failure::check("cuMemFree", reentrancy::forward(|| unsafe { driver_originals::cuMemFree_v2(0) }));
    // Other errors are of the context, which a free of memory does not need.
    asked.is_err_and(|failure| failure.is_capture() || failure.is_of_earlier_work())
}

/// The answer of the real function to a free of managed memory, if CUDA refuses to free on this thread now.
pub fn of_free(call: &mut Call) -> Option<StatusCode> {
    // The real function does not know the memory: the refusal has ended meanwhile if it says so.
    provoke().then(|| reentrancy::forward(|| call.real())).filter(|answer| *answer != code::INVALID_VALUE)
}
