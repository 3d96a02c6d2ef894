//! Contexts that the program may end at any moment, on any of its threads.
//!
//! The driver crashes if a context that has been destroyed is asked for its device, and what it says of a context is true only as long as nobody
//! ends that. So the library's uses of a context and the program's calls that may end it know of each other, here:
//!
//! - Whoever uses a context keeps it meanwhile ([`keep`]), unless the program vouches for it: it is the calling thread's own, or an argument of the
//!   program's call or of the same stream.
//! - A call that may end a context is preceded by an [`Ending`]. From then on no use begins, and the call waits for those that have begun. They
//!   are short, or wait for work of the context's device, which the call itself waits for (`cuCtxDestroy` and a reset of the primary context wait
//!   for all work of the device; H200, driver 580). No lock is held while the call runs: what it waits for may need other threads of the program.
//! - Meanwhile, the context is neither alive nor gone ([`Failure::is_of_ending_context`]): its work may still run, and its memory is still there.
//!
//! The driver also lets questions about a primary context wait while that is being reset (`cuDevicePrimaryCtxGetState`, `cuDevicePrimaryCtxRetain`;
//! as above), so they count as uses of it, too.

use super::CUdevice;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;
use vramctl_host::{PerProcess, Unpoison, exit};
use vramctl_model::{Failure, code};

/// What is used, or ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Subject {
    /// The context that has the handle at this address, or is to get it next: handles are reused.
    Handle(u64),
    /// A device's primary context, whatever its handle.
    Primary(CUdevice),
}

#[derive(Default)]
struct Lives {
    state: Mutex<State>,
    /// A use has ended of what somebody is about to end.
    unused: Condvar,
}

/// Few of each, so they are lists.
#[derive(Default)]
struct State {
    used: Vec<(Subject, usize)>,
    ending: Vec<Subject>,
}

static LIVES: PerProcess<Lives> = PerProcess::new(Lives::default);

impl Lives {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unpoisoned()
    }
}

/// While this lives, no call that the library sees ends the context.
#[derive(Debug)]
pub struct Kept(Subject);

/// Keeps a context alive, if it is: whether it has been destroyed before is for the driver to say. An error while a call may be ending it.
pub(super) fn keep(subject: Subject) -> Result<Kept, Failure> {
    let mut state = LIVES.get().state();
    if state.ending.contains(&subject) {
        return Err(Failure { call: "cuCtxPushCurrent_v2", code: code::NOT_READY });
    }
    match state.used.iter_mut().find(|(used, _)| *used == subject) {
        Some((_, uses)) => *uses += 1,
        None => state.used.push((subject, 1)),
    }
    Ok(Kept(subject))
}

impl Drop for Kept {
    fn drop(&mut self) {
        let lives = LIVES.get();
        let mut state = lives.state();
        if let Some(place) = state.used.iter().position(|(used, _)| *used == self.0) {
            state.used[place].1 -= 1;
            if state.used[place].1 == 0 {
                state.used.swap_remove(place);
            }
        }
        if state.ending.contains(&self.0) {
            lives.unused.notify_all();
        }
    }
}

/// Whether a call may be ending it now.
pub(super) fn is_ending(subject: Subject) -> bool {
    LIVES.existing().is_some_and(|lives| lives.state().ending.contains(&subject))
}

/// While this lives, a call of the program's may end contexts, and the library begins no use of them.
pub struct Ending(Vec<Subject>);

impl Ending {
    /// Of nothing yet.
    pub(super) const fn of_nothing() -> Self {
        Self(Vec::new())
    }

    /// Adds what the call may end.
    pub(super) fn add(&mut self, subject: Subject) {
        LIVES.get().state().ending.push(subject);
        self.0.push(subject);
    }

    /// Waits for the uses that have begun before.
    pub fn wait_until_unused(&self) {
        /// How often to look whether the program is exiting. The uses of threads that are gone then do not end.
        const LOOK: Duration = Duration::from_millis(100);
        let lives = LIVES.get();
        let mut state = lives.state();
        while state.used.iter().any(|(used, _)| self.0.contains(used)) && !exit::is_ending() {
            state = lives.unused.wait_timeout(state, LOOK).unpoisoned().0;
        }
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        let mut state = LIVES.get().state();
        for subject in &self.0 {
            if let Some(place) = state.ending.iter().position(|ending| ending == subject) {
                state.ending.swap_remove(place);
            }
        }
    }
}
