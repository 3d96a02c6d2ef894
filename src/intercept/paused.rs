//! Calls that start no work but need the memory to be there: they register it, export it, or ask what only the driver knows. CUDA would not refuse
//! them, so in a held program they wait for the resume. In one that has paused its memory itself, or is not held, they fail as the driver says.
//!
//! Such a call is made first, and waits only if it was in vain: it takes no time otherwise, and a call about other memory does not wait. It
//! waits without a lock of the library's.

use vramctl_core::gate::{self, Gated};
use vramctl_model::{StatusCode, code};

/// Makes a call that is refused while its memory is paused. `is_paused`: whether that is so.
pub fn once_there(is_paused: impl Fn() -> bool, make: impl FnMut() -> StatusCode) -> StatusCode {
    once_useful(make, |answer| *answer != code::SUCCESS, is_paused)
}

/// Makes a call again and again until `is_in_vain` does not say so of its answer, or the memory is not paused, or the program not held.
pub fn once_useful<R>(mut make: impl FnMut() -> R, is_in_vain: impl Fn(&R) -> bool, is_paused: impl Fn() -> bool) -> R {
    static GATED: Gated = Gated("a call about paused memory");
    loop {
        let was_held = gate::is_held();
        let answer = make();
        let is_held = gate::is_held();
        if !(was_held || is_held) || !is_in_vain(&answer) {
            return answer;
        }
        // If it has been let go meanwhile, the memory may have come just after the call.
        if is_held && !(is_paused() && gate::wait(&GATED)) {
            return answer;
        }
    }
}
