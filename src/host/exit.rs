//! The end of the program, seen from threads of ours.
//!
//! The driver takes itself down in an exit handler. A call of ours that comes later, or is still in it then, is undefined
//! behaviour in somebody else's program. So an exit handler of ours, which runs before the driver's, closes the driver to
//! our workers ([`enter_driver`]) and waits for those that are inside. What they were doing fails, and [`Answering`] gives
//! them the time to tell whoever asked for it.
//!
//! The program's own threads are not held back: when they call the driver, through us or not, is their business.

use crate::PerProcess;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

thread_local! {
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// Runs the body of a worker.
pub(crate) fn as_worker<R>(work: impl FnOnce() -> R) -> R {
    IS_WORKER.with(|is_worker| is_worker.set(true));
    work()
}

/// A worker's stay in the driver, for as long as it lives.
pub struct InDriver {
    counted: bool,
}

/// Asks to call the driver. `None`: the program is ending and this is a worker, so the driver must not be called any more.
#[inline]
pub fn enter_driver() -> Option<InDriver> {
    // A thread without thread-locals is ending, and so not one of ours.
    let is_worker = IS_WORKER.try_with(Cell::get).unwrap_or(false);
    if !is_worker {
        return Some(InDriver { counted: false });
    }
    count(|state| &mut state.in_driver).then(|| InDriver { counted: true })
}

impl Drop for InDriver {
    #[inline]
    fn drop(&mut self) {
        if self.counted {
            uncount(|state| &mut state.in_driver);
        }
    }
}

/// Somebody waits for an answer of ours, for as long as this lives: the program's end waits for it a moment.
pub struct Answering(());

impl Answering {
    /// `None`: the program is ending, so nothing is begun any more.
    pub fn unless_ending() -> Option<Self> {
        count(|state| &mut state.answering).then(|| Self(()))
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        uncount(|state| &mut state.answering);
    }
}

/// Whether the program is ending. What has failed since then has failed for that reason.
pub fn is_ending() -> bool {
    WORKERS.existing().is_some_and(|workers| workers.lock().ending)
}

/// How many workers are where.
#[derive(Default)]
struct Counts {
    in_driver: usize,
    answering: usize,
    ending: bool,
}

#[derive(Default)]
struct Workers {
    state: Mutex<Counts>,
    changed: Condvar,
}

static WORKERS: PerProcess<Workers> = PerProcess::new(Workers::default);

impl Workers {
    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One more of them, unless the program is ending.
fn count(counter: impl FnOnce(&mut Counts) -> &mut usize) -> bool {
    let mut state = WORKERS.get().lock();
    if !state.ending {
        *counter(&mut state) += 1;
    }
    !state.ending
}

fn uncount(counter: impl FnOnce(&mut Counts) -> &mut usize) {
    let workers = WORKERS.get();
    let mut state = workers.lock();
    *counter(&mut state) -= 1;
    if state.ending {
        workers.changed.notify_all();
    }
}

/// There will be workers from now on. Exit handlers run in the opposite order of their registration: ours before those of
/// the driver, which is in use by now.
pub(crate) fn expect_workers() {
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    // In a forked child too, which has inherited the handler.
    WORKERS.get();
    if !REGISTERED.swap(true, Ordering::Relaxed) {
        // SAFETY: a function that lives as long as the process: the library is never unloaded. Without memory for the list it
        // does not run.
        unsafe { libc::atexit(close_driver) };
    }
}

extern "C" fn close_driver() {
    /// Far more than a call takes, unless the driver waits for the program.
    const LONGEST: Duration = Duration::from_secs(5);
    // A forked child has none before it has workers.
    if let Some(workers) = WORKERS.existing() {
        let mut state = workers.lock();
        state.ending = true;
        let busy = |state: &mut Counts| state.in_driver + state.answering > 0;
        drop(workers.changed.wait_timeout_while(state, LONGEST, busy).unwrap_or_else(PoisonError::into_inner));
    }
}
