//! How a hooked call is answered.

use crate::alloc;
use crate::copies;
use crate::decided::{self, pass_by};
use crate::table::Effect;
use vramctl_core::contexts::note_current;
use vramctl_host::guarded;
use vramctl_model::{StatusCode, code};

/// Answers a call with its handler. If the handler panics, the call fails.
///
/// `passes`: the library has nothing to do with the call, so the original answers directly, outside [`guarded`], which costs more than all
/// else here. A thread that is cancelled in the original then unwinds through this function and its callers. They have nothing to
/// clean up, and are `C-unwind` functions, as the original is.
#[inline]
pub fn call(effect: Effect, passes: bool, mut original: impl FnMut() -> StatusCode, handler: impl FnOnce() -> StatusCode) -> StatusCode {
    if passes {
        let mut answer = pass_by(&mut original);
        if answer == code::OUT_OF_MEMORY && effect == Effect::Allocates && !decided::is_decided() {
            if guarded(alloc::makes_room) == Some(true) {
                answer = pass_by(original);
            }
            // A handler reports the failure.
            if answer == code::OUT_OF_MEMORY {
                guarded(|| decided::answered(answer, handler));
            }
        }
        return answer;
    }
    let body = || {
        if copies::another_is_first() {
            return original();
        }
        let answer = handler();
        if answer == code::SUCCESS && effect.shows_the_context() {
            note_current();
        }
        answer
    };
    guarded(body).unwrap_or(code::UNKNOWN)
}

/// Whether a call passes the library by: the condition that the table states, if any.
macro_rules! passes {
    () => {
        false
    };
    ($condition:tt) => {
        $condition
    };
}
pub(crate) use passes;
