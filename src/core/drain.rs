//! Waiting for the device's work.

use std::collections::BTreeSet;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
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

/// The same, for so long at most, and while somebody wants it, who is asked now and then. The driver's own wait has no limit, so a thread of ours waits in the caller's place, one
/// at a time: one that outlives its caller's limit ends with the work, and the next caller waits for it first.
pub fn wait_at_most(contexts: BTreeSet<Context>, limit: Duration, wanted: &mut dyn FnMut() -> bool) -> Result<(), Error> {
    static WAITER: PerProcess<Waiter> = PerProcess::new(Waiter::default);
    if contexts.is_empty() {
        return Ok(());
    }
    // An idle device must not look busy to a caller that does not want to wait.
    let deadline = Instant::now() + limit.clamp(SHORTEST, LONGEST);
    let waiter = WAITER.get();
    waiter.until_free(deadline, wanted).ok_or(Error::Busy(limit))?;
    let answer = Arc::new(Mutex::new(None));
    let slot = Arc::clone(&answer);
    let work = move || {
        let outcome = wait(contexts);
        *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
        waiter.set_free();
    };
    if let Err(error) = worker::spawn("vramctl-wait", work) {
        waiter.set_free();
        return Err(Error::Internal(format!("no thread could be started: {error}")));
    }
    if waiter.until_free(deadline, wanted).is_some() {
        waiter.set_free();
    }
    let answer = answer.lock().unwrap_or_else(PoisonError::into_inner).take();
    Ok(answer.ok_or(Error::Busy(limit))??)
}

/// What it takes at most to find out that there is nothing to wait for.
const SHORTEST: Duration = Duration::from_millis(50);
/// Longer than anybody waits, and short enough to be added to the time of day.
const LONGEST: Duration = Duration::from_secs(1 << 32);

/// How often it is asked whether anybody still wants to wait.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// Whether the one thread is waiting.
#[derive(Default)]
struct Waiter {
    waiting: Mutex<bool>,
    changed: Condvar,
}

impl Waiter {
    /// Takes the place; `None`: not until the deadline, or nobody wants it any more.
    fn until_free(&self, deadline: Instant, wanted: &mut dyn FnMut() -> bool) -> Option<()> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let round = left.min(ASK_EVERY);
            waiting = self.changed.wait_timeout_while(waiting, round, |waiting| *waiting).unwrap_or_else(PoisonError::into_inner).0;
            if !*waiting {
                *waiting = true;
                return Some(());
            }
            if left <= ASK_EVERY || exit::is_ending() || !wanted() {
                return None;
            }
        }
    }

    fn set_free(&self) {
        *self.waiting.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.changed.notify_all();
    }
}
