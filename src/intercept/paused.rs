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
    let mut was_there = false;
    loop {
        let was_held = gate::is_held();
        let answer = make();
        let is_held = was_held || gate::is_held();
        if !is_held || !is_in_vain(&answer) {
            return answer;
        }
        if is_paused() {
            if !gate::wait(&GATED) {
                return answer;
            }
            was_there = false;
        } else if was_there {
            return answer;
        } else {
            // It may have come just after the call.
            was_there = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::time::Instant;

    /// In a program that stays held, because other memory is still paused: what a call answers that fails as often, and how often it is made.
    fn in_a_held_program(fails: u32) -> (StatusCode, u32) {
        let _closed = gate::close(Instant::now()).unwrap();
        let calls = Cell::new(0);
        let make = || {
            calls.set(calls.get() + 1);
            if calls.get() <= fails { code::INVALID_VALUE } else { code::SUCCESS }
        };
        (once_there(|| false, make), calls.get())
    }

    #[test]
    fn a_call_that_fails_just_before_its_memory_comes_is_made_again() {
        assert_eq!(in_a_held_program(1), (code::SUCCESS, 2));
        assert_eq!(in_a_held_program(u32::MAX), (code::INVALID_VALUE, 2), "it fails for another reason");
        assert_eq!(in_a_held_program(0), (code::SUCCESS, 1));
    }
}
