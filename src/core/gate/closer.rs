//! Decides who may close the latch, and whether it stays closed afterwards. `model` explores this, too.
//!
//! 1. Only one thread closes it at a time, and nobody opens it meanwhile.
//! 2. The program stays held as long as there is a reason. Whoever removes a reason, and every closer when it is done, must then call
//!    [`Closer::let_go`]; this guarantees that the latch opens once no reason is left.

use super::latch::Latch;
use super::sync::{self, Condvar, Mutex, MutexGuard, Ordering};
use std::time::Instant;
use vramctl_host::Unpoison;

/// Whose tenure it is.
#[derive(Debug)]
pub struct Closer {
    tenure: Mutex<Tenure>,
    changed: Condvar,
}

#[derive(Debug)]
struct Tenure {
    /// A closer has the latch closed.
    taken: bool,
    /// The latch stays closed when the closer is done: the program is held.
    held: bool,
}

/// A closed latch. Opens when dropped, unless the program is held.
#[derive(Debug)]
pub struct Closed<'a> {
    closer: &'a Closer,
    latch: &'a Latch,
}

impl Closer {
    /// Nobody's tenure.
    pub fn new() -> Self {
        Self { tenure: Mutex::new(Tenure { taken: false, held: false }), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Tenure> {
        self.tenure.lock().unpoisoned()
    }

    /// Closes the latch. `None` if somebody else has it closed until the deadline.
    pub fn close<'a>(&'a self, latch: &'a Latch, deadline: Instant) -> Option<Closed<'a>> {
        let mut tenure = self.lock();
        while tenure.taken {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            tenure = self.changed.wait_timeout(tenure, left).unpoisoned().0;
        }
        tenure.taken = true;
        drop(tenure);
        latch.close();
        Some(Closed { closer: self, latch })
    }

    /// Opens the latch for a held program, unless there is still a reason to hold it. Does nothing while a closer has it closed: the closer
    /// calls this itself afterwards.
    pub fn let_go(&self, latch: &Latch, is_reason: impl FnOnce() -> bool) {
        // Either this thread sees that the latch is being closed, or the closer sees that the reason is gone.
        sync::fence(Ordering::SeqCst);
        if !latch.is_closed() {
            return;
        }
        // A thread that removes another reason meanwhile waits for this lock and then checks again.
        let mut tenure = self.lock();
        if tenure.held && !tenure.taken && !is_reason() {
            tenure.held = false;
            latch.open();
        }
    }
}

impl Closed<'_> {
    /// Whether the program was held before, so that it stays held after this.
    #[allow(dead_code)] // in the copy that `model` explores
    pub fn was_held(&self) -> bool {
        self.closer.lock().held
    }

    /// Keeps the program held after this closer is done, until it is let go.
    pub fn keep(self) {
        self.closer.lock().held = true;
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        let mut tenure = self.closer.lock();
        tenure.taken = false;
        if !tenure.held {
            self.latch.open();
        }
        drop(tenure);
        self.closer.changed.notify_one();
    }
}
