//! Waiting for device work.

use std::collections::BTreeSet;
use std::mem;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use vramctl_driver::{self as driver, Context, Manner};
use vramctl_host::{PerProcess, Unpoison, exit, worker};
use vramctl_model::{Error, Failure};

/// Waits for all work in these contexts. A destroyed context has no work left.
pub fn wait(contexts: BTreeSet<Context>, manner: Manner) -> Result<(), Failure> {
    contexts.into_iter().try_for_each(|context| exit::while_waiting(|| driver::wait_for_work(context, manner, || true)).map(drop))
}

/// Like [`wait`], but gives up after `limit`, or once `wanted` (polled now and then) returns false.
///
/// A worker thread does the waiting, for one caller at a time, because with old drivers it cannot be cancelled
/// ([`driver::wait_for_work`]). If it outlives its caller's limit, the next caller waits for it to finish first. The thread starts on first
/// use and sleeps between waits.
pub fn wait_at_most(contexts: BTreeSet<Context>, limit: Duration, wanted: &mut dyn FnMut() -> bool) -> Result<(), Error> {
    if contexts.is_empty() {
        return Ok(());
    }
    // An idle device must not look busy to a caller that passes no time to wait.
    let deadline = Instant::now() + limit.clamp(SHORTEST, LONGEST);
    let waiter = WAITER.get();
    let mut state = waiter.until(deadline, wanted, |turn| matches!(turn, Turn::Free)).ok_or(Error::Busy(limit))?;
    if !state.has_thread {
        worker::spawn("vramctl-wait", || waiter.serve()).map_err(|error| Error::NoThread(error.to_string()))?;
        state.has_thread = true;
    }
    state.turn = Turn::Asked(contexts);
    drop(state);
    waiter.changed.notify_all();
    let answered = waiter.until(deadline, wanted, |turn| matches!(turn, Turn::Answered(_)));
    let Some(mut state) = answered else {
        let mut state = waiter.lock();
        state.unfinished = state.at;
        // If the worker has not started, it need not start any more. If it has just finished, the answer is dropped.
        state.turn = if matches!(state.turn, Turn::Waiting) { Turn::Unwanted } else { Turn::Free };
        waiter.changed.notify_all();
        return Err(Error::Busy(limit));
    };
    let turn = mem::take(&mut state.turn);
    drop(state);
    waiter.changed.notify_all();
    if let Turn::Answered(answer) = turn { Ok(answer?) } else { Ok(()) }
}

/// The context whose work was not finished when the last caller of [`wait_at_most`] gave up.
pub fn unfinished() -> Option<Context> {
    WAITER.existing()?.lock().unfinished
}

/// Enough time to find that a device is idle.
const SHORTEST: Duration = Duration::from_millis(50);
/// Longer than anyone waits, yet small enough to add to an `Instant`.
const LONGEST: Duration = Duration::from_secs(1 << 32);

/// How often to ask whether the wait is still wanted.
const ASK_EVERY: Duration = Duration::from_millis(100);

static WAITER: PerProcess<Waiter> = PerProcess::new(Waiter::default);

/// The worker thread and the callers that use it.
#[derive(Default)]
struct Waiter {
    state: Mutex<Desk>,
    changed: Condvar,
}

#[derive(Default)]
struct Desk {
    has_thread: bool,
    turn: Turn,
    /// The context that the worker is waiting for.
    at: Option<Context>,
    /// And the one that it was waiting for when the last caller gave up.
    unfinished: Option<Context>,
}

/// State of the one wait that can be in progress.
#[derive(Default)]
enum Turn {
    #[default]
    Free,
    /// Contexts to wait for.
    Asked(BTreeSet<Context>),
    Waiting,
    /// The worker is still waiting, but its caller has given up.
    Unwanted,
    Answered(Result<(), Failure>),
}

impl Waiter {
    fn lock(&self) -> MutexGuard<'_, Desk> {
        self.state.lock().unpoisoned()
    }

    /// Waits until `is_so` holds. `None` at the deadline, or if the wait is no longer wanted.
    fn until(&self, deadline: Instant, wanted: &mut dyn FnMut() -> bool, is_so: fn(&Turn) -> bool) -> Option<MutexGuard<'_, Desk>> {
        let mut state = self.lock();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let round = left.min(ASK_EVERY);
            state = self.changed.wait_timeout_while(state, round, |state| !is_so(&state.turn)).unpoisoned().0;
            if is_so(&state.turn) {
                return Some(state);
            }
            if left <= ASK_EVERY || exit::is_ending() || !wanted() {
                return None;
            }
        }
    }

    /// Whether the worker still has to wait for this context. Once nobody wants the answer, the program may be about to destroy it.
    fn goes_on_to(&self, context: Context) -> bool {
        let mut state = self.lock();
        state.at = Some(context);
        !matches!(state.turn, Turn::Unwanted)
    }

    fn wait_in(&self, context: Context) -> Result<(), Failure> {
        exit::while_waiting(|| driver::wait_for_work(context, Manner::Unnoticed, || !matches!(self.lock().turn, Turn::Unwanted))).map(drop)
    }

    fn serve(&self) {
        let mut state = self.lock();
        loop {
            state = self.changed.wait_while(state, |state: &mut Desk| !matches!(state.turn, Turn::Asked(_))).unpoisoned();
            let Turn::Asked(contexts) = mem::replace(&mut state.turn, Turn::Waiting) else { continue };
            drop(state);
            let answer = contexts.into_iter().take_while(|context| self.goes_on_to(*context)).try_for_each(|context| self.wait_in(context));
            state = self.lock();
            state.at = None;
            state.turn = if matches!(state.turn, Turn::Unwanted) { Turn::Free } else { Turn::Answered(answer) };
            self.changed.notify_all();
        }
    }
}
