//! Waiting for the device's work.

use std::collections::BTreeSet;
use std::mem;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use vramctl_driver::{Context, Current};
use vramctl_host::{PerProcess, exit, worker};
use vramctl_model::{Error, Failure};

/// Waits until the work of these contexts has finished. A destroyed context has no work left.
pub fn wait(contexts: BTreeSet<Context>) -> Result<(), Failure> {
    exit::while_waiting(|| {
        contexts.into_iter().try_for_each(|context| match Current::push(context) {
            Ok(current) => current.wait_for_work(),
            Err(failure) if failure.is_of_gone_context() => Ok(()),
            Err(failure) => Err(failure),
        })
    })
}

/// The same, for so long at most, and while somebody wants it, who is asked now and then. The driver's own wait has no limit, so
/// a thread of ours waits in the caller's place, for one caller at a time: where it outlives its caller's limit it ends with the
/// work, and the next caller waits for it first. It is there from the first such wait on, and sleeps in between.
pub fn wait_at_most(contexts: BTreeSet<Context>, limit: Duration, wanted: &mut dyn FnMut() -> bool) -> Result<(), Error> {
    static WAITER: PerProcess<Waiter> = PerProcess::new(Waiter::default);
    if contexts.is_empty() {
        return Ok(());
    }
    // An idle device must not look busy to a caller that does not want to wait.
    let deadline = Instant::now() + limit.clamp(SHORTEST, LONGEST);
    let waiter = WAITER.get();
    let mut state = waiter.until(deadline, wanted, |turn| matches!(turn, Turn::Free)).ok_or(Error::Busy(limit))?;
    if !state.has_thread {
        worker::spawn("vramctl-wait", || waiter.serve())
            .map_err(|error| Error::Internal(format!("no thread could be started: {error}")))?;
        state.has_thread = true;
    }
    state.turn = Turn::Asked(contexts);
    drop(state);
    waiter.changed.notify_all();
    let answered = waiter.until(deadline, wanted, |turn| matches!(turn, Turn::Answered(_)));
    let Some(mut state) = answered else {
        let mut state = waiter.lock();
        // Not begun: then nobody needs to. Done by now: then nobody wants to know.
        state.turn = if matches!(state.turn, Turn::Waiting) { Turn::Unwanted } else { Turn::Free };
        waiter.changed.notify_all();
        return Err(Error::Busy(limit));
    };
    let turn = mem::take(&mut state.turn);
    drop(state);
    waiter.changed.notify_all();
    if let Turn::Answered(answer) = turn { Ok(answer?) } else { Ok(()) }
}

/// What it takes at most to find out that there is nothing to wait for.
const SHORTEST: Duration = Duration::from_millis(50);
/// Longer than anybody waits, and short enough to be added to the time of day.
const LONGEST: Duration = Duration::from_secs(1 << 32);

/// How often it is asked whether anybody still wants to wait.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// The one thread that waits, and whoever asks it to.
#[derive(Default)]
struct Waiter {
    state: Mutex<Desk>,
    changed: Condvar,
}

#[derive(Default)]
struct Desk {
    has_thread: bool,
    turn: Turn,
}

/// How far the one wait is that there can be.
#[derive(Default)]
enum Turn {
    #[default]
    Free,
    /// These are to be waited for.
    Asked(BTreeSet<Context>),
    Waiting,
    /// The thread waits for them, but the caller does not wait for the thread any more.
    Unwanted,
    Answered(Result<(), Failure>),
}

impl Waiter {
    fn lock(&self) -> MutexGuard<'_, Desk> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Until the turn is as it should be. `None`: not until the deadline, or nobody wants it any more.
    fn until(&self, deadline: Instant, wanted: &mut dyn FnMut() -> bool, is_so: fn(&Turn) -> bool) -> Option<MutexGuard<'_, Desk>> {
        let mut state = self.lock();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let round = left.min(ASK_EVERY);
            state = self.changed.wait_timeout_while(state, round, |state| !is_so(&state.turn)).unwrap_or_else(PoisonError::into_inner).0;
            if is_so(&state.turn) {
                return Some(state);
            }
            if left <= ASK_EVERY || exit::is_ending() || !wanted() {
                return None;
            }
        }
    }

    /// What the thread does.
    fn serve(&self) {
        let mut state = self.lock();
        loop {
            let idle = |state: &mut Desk| !matches!(state.turn, Turn::Asked(_));
            state = self.changed.wait_while(state, idle).unwrap_or_else(PoisonError::into_inner);
            let Turn::Asked(contexts) = mem::replace(&mut state.turn, Turn::Waiting) else { continue };
            drop(state);
            // Once nobody wants to know, the program may be about to destroy the next one.
            let wanted = || !matches!(self.lock().turn, Turn::Unwanted);
            let answer = contexts.into_iter().take_while(|_| wanted()).try_for_each(|context| wait(BTreeSet::from([context])));
            state = self.lock();
            state.turn = if matches!(state.turn, Turn::Unwanted) { Turn::Free } else { Turn::Answered(answer) };
            self.changed.notify_all();
        }
    }
}
