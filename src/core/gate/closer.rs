//! Decides who may close the latch, and whether it stays closed afterwards. `model` explores this, too.
//!
//! 1. Only one thread closes it at a time, and nobody opens it meanwhile.
//! 2. The program stays held as long as there is a reason. Whoever removes a reason, and every closer that holds when it is done, must then
//!    call [`Closer::let_go`]; this guarantees that the latch opens once no reason is left.
//! 3. The library also closes the latch for moments that end by themselves. Such a moment is no hold, and neither begins nor prolongs one.

use super::latch::Latch;
use super::sync::{self, Condvar, Mutex, MutexGuard, Ordering};
use std::time::{Duration, Instant};
use vramctl_host::Unpoison;

/// Whether somebody has closed the latch, and what for; and whether the program is held.
#[derive(Debug)]
pub struct Closer {
    tenure: Mutex<Tenure>,
    changed: Condvar,
}

#[derive(Debug)]
struct Tenure {
    /// What a closer has the latch closed for.
    taken: Option<Purpose>,
    /// The latch stays closed when the closer is done: the program is held.
    held: bool,
}

/// What the latch is closed for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// The program is held, or about to be.
    Hold,
    /// The library works for an instant.
    Moment,
}

/// A closed latch. Opens when dropped, unless the program is held.
#[derive(Debug)]
pub struct Closed<'a> {
    closer: &'a Closer,
    latch: &'a Latch,
}

impl Closer {
    /// Nobody has closed the latch.
    pub fn new() -> Self {
        Self { tenure: Mutex::new(Tenure { taken: None, held: false }), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Tenure> {
        self.tenure.lock().unpoisoned()
    }

    /// Closes the latch. `None` if somebody else has it closed until the deadline. Whoever holds the program waits for a moment even
    /// without time to wait.
    pub fn close<'a>(&'a self, latch: &'a Latch, purpose: Purpose, deadline: Instant) -> Option<Closed<'a>> {
        /// Longer than any moment lasts.
        const MOMENT: Duration = Duration::from_secs(1);
        let outlasting_moments = deadline.max(Instant::now() + MOMENT);
        let mut tenure = self.lock();
        while let Some(other) = tenure.taken {
            let until = if (purpose, other) == (Purpose::Hold, Purpose::Moment) { outlasting_moments } else { deadline };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            tenure = self.changed.wait_timeout(tenure, left).unpoisoned().0;
        }
        tenure.taken = Some(purpose);
        drop(tenure);
        latch.close();
        Some(Closed { closer: self, latch })
    }

    /// Whether the program is held, or about to be.
    pub fn is_holding(&self) -> bool {
        let tenure = self.lock();
        tenure.held || tenure.taken == Some(Purpose::Hold)
    }

    /// Lets a held program go, unless there is still a reason to hold it. Does nothing while a closer holds it: the closer calls this itself
    /// afterwards.
    pub fn let_go(&self, latch: &Latch, is_reason: impl FnOnce() -> bool) {
        // Either this thread sees that the latch is being closed, or the closer sees that the reason is gone.
        sync::fence(Ordering::SeqCst);
        if !latch.is_closed() {
            return;
        }
        // A thread that removes another reason meanwhile waits for this lock and then checks again.
        let mut tenure = self.lock();
        if tenure.held && tenure.taken != Some(Purpose::Hold) && !is_reason() {
            tenure.held = false;
            // A moment opens it when it is over.
            if tenure.taken.is_none() {
                latch.open();
            }
        }
    }
}

impl Closed<'_> {
    /// Whether the program was held before, so that it stays held after this.
    #[allow(dead_code)] // in the copy that `model` explores
    pub fn was_held(&self) -> bool {
        self.closer.lock().held
    }

    /// Lets this many calls pass: those that wait, and those that come within this time. Returns when all have passed or the time is over;
    /// from then on, no call passes.
    #[allow(dead_code)] // in the copy that `model` explores
    pub fn admit(&self, calls: u32, within: Duration) {
        const LOOK_EVERY: Duration = Duration::from_micros(50);
        let deadline = Instant::now() + within;
        self.latch.admit(calls);
        while self.latch.admits() && Instant::now() < deadline {
            std::thread::sleep(LOOK_EVERY);
        }
        self.latch.admit_none();
    }

    /// Keeps the program held after this closer is done, until it is let go.
    pub fn keep(self) {
        self.closer.lock().held = true;
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        let mut tenure = self.closer.lock();
        tenure.taken = None;
        if !tenure.held {
            self.latch.open();
        }
        drop(tenure);
        self.closer.changed.notify_one();
    }
}
