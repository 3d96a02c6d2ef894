//! Quiet moments: no work is in flight in any context, and none can begin.
//!
//! Unregistering and freeing host memory and loading code wait for a context's work, and hold up every launch of the program meanwhile. If
//! the work needs such a launch to end, neither ever ends. So the library does these things only at quiet moments: while a pause has the
//! program held and drained, or when every context is idle and the gate is closed for an instant, which only the core can see to.

use once_cell::sync::OnceCell;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;
use vramctl_driver::Activity;
use vramctl_host::{PerProcess, Unpoison, exit, worker};

/// Runs the work if this is a quiet moment, and makes it last meanwhile. What was in the way, if anything.
pub type Finder = fn(work: &mut dyn FnMut()) -> Activity;

/// Finds moments on demand.
static FINDER: PerProcess<OnceCell<Finder>> = PerProcess::new(OnceCell::new);
/// The phase that a pause grants.
static GRANT: PerProcess<QuietPhase> = PerProcess::new(QuietPhase::default);

/// Sets what finds quiet moments. Without it, all are.
pub fn set_finder(finder: Finder) {
    // Once it is set, it stays.
    let _ = FINDER.get().set(finder);
}

#[derive(Default)]
struct QuietPhase {
    state: Mutex<Guests>,
    changed: Condvar,
}

#[derive(Default)]
struct Guests {
    is_granted: bool,
    /// How much work is being done in the granted moment.
    inside: usize,
}

impl QuietPhase {
    fn lock(&self) -> MutexGuard<'_, Guests> {
        self.state.lock().unpoisoned()
    }
}

/// A quiet moment for others, until dropped. Dropping it waits for what they have begun.
pub struct Granted(());

/// Grants a quiet moment: until the value is dropped, no work is in flight and none begins.
pub fn grant() -> Granted {
    GRANT.get().lock().is_granted = true;
    GRANT.get().changed.notify_all();
    Granted(())
}

impl Drop for Granted {
    fn drop(&mut self) {
        let grant = GRANT.get();
        let mut state = grant.lock();
        state.is_granted = false;
        drop(grant.changed.wait_while(state, |state| state.inside > 0).unpoisoned());
    }
}

/// Work in the granted moment, until dropped.
struct Guest(&'static QuietPhase);

impl Guest {
    fn enter() -> Option<Self> {
        let grant = GRANT.existing()?;
        let mut state = grant.lock();
        if !state.is_granted {
            return None;
        }
        state.inside += 1;
        Some(Self(grant))
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.0.lock().inside -= 1;
        self.0.changed.notify_all();
    }
}

/// Does the work if now is a quiet moment, or can be made one without delaying the program noticeably. If not, what is in the way.
pub fn now<R>(work: impl FnOnce() -> R) -> Result<R, Activity> {
    if let Some(_inside) = Guest::enter() {
        return Ok(work());
    }
    let Some(find) = FINDER.existing().and_then(OnceCell::get) else { return Ok(work()) };
    let (mut work, mut done) = (Some(work), None);
    let seen = find(&mut || done = work.take().map(|work| work()));
    done.ok_or(seen)
}

/// Whether a pause grants a moment now.
pub fn is_granted() -> bool {
    GRANT.existing().is_some_and(|grant| grant.lock().is_granted)
}

/// How long a pause waits for a quiet moment that it cannot grant.
pub const PATIENCE: Duration = Duration::from_millis(500);

/// How long to wait for the next try, after each that found no quiet moment.
pub struct Backoff(Duration);

impl Default for Backoff {
    fn default() -> Self {
        Self(Duration::from_millis(10))
    }
}

impl Backoff {
    /// The next time to wait. A look at an idle context takes microseconds, so a program that is never idle is looked at twice a second.
    fn take(&mut self) -> Duration {
        const LONGEST: Duration = Duration::from_millis(500);
        let now = self.0;
        self.0 = LONGEST.min(now * 2);
        now
    }
}

/// Waits for the next try, or until a pause grants a moment.
pub fn wait_for_next(backoff: &mut Backoff) {
    let grant = GRANT.get();
    drop(grant.changed.wait_timeout_while(grant.lock(), backoff.take(), |state: &mut Guests| !state.is_granted).unpoisoned());
}

/// Work for the next quiet moments.
static DUE: PerProcess<Mutex<Due>> = PerProcess::new(Mutex::default);

#[derive(Default)]
struct Due {
    work: Vec<Box<dyn FnOnce() + Send>>,
    has_thread: bool,
}

fn due() -> MutexGuard<'static, Due> {
    DUE.get().lock().unpoisoned()
}

/// Does the work at the next quiet moment, on a worker thread unless that moment is now. If no thread can be started, the work waits until there is
/// more.
pub fn soon(work: impl FnOnce() + Send + 'static) {
    due().work.push(Box::new(work));
    do_what_is_due();
    {
        let mut due = due();
        if due.work.is_empty() || due.has_thread {
            return;
        }
        due.has_thread = true;
    }
    if let Err(error) = worker::spawn("vramctl-quiet", do_until_done) {
        log::debug!("could not start a thread: {error}");
        due().has_thread = false;
    }
}

fn do_until_done() {
    let mut backoff = Backoff::default();
    loop {
        do_what_is_due();
        {
            let mut due = due();
            if due.work.is_empty() || exit::is_ending() {
                due.has_thread = false;
                return;
            }
        }
        wait_for_next(&mut backoff);
    }
}

/// Does what is due, one after the other, each at a moment of its own, as long as there are any.
fn do_what_is_due() {
    let do_one = || {
        let next = due().work.pop();
        next.map(|work| work())
    };
    while !due().work.is_empty() && now(do_one).is_ok() {}
}
