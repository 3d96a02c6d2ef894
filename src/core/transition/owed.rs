//! What the undoing of a swap could not do: the other job is stopped while it has the memory, or a third process has taken it.
//!
//! Nobody else would do it, and neither job would run. So a worker thread does, as soon as there is room, unless a client decides otherwise
//! meanwhile: it brings back memory that was handed over, and pauses memory that had come and whose contents have no backup any more.

use super::came::Came;
use crate::memory::{Allocation, Memory};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::thread;
use std::time::Duration;
use vramctl_host::{PerProcess, Unpoison, exit, worker};

/// The time between two looks for room: at first, and at most. It doubles each time.
const LOOK_AGAIN: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(500));

/// What the worker does. It runs while there is anything.
#[derive(Default)]
pub(super) struct Owed {
    /// Paused, to be brought back.
    pub to_come: Vec<Weak<Allocation>>,
    /// These come piece by piece, because another job waits for their host memory.
    pub by_piece: bool,
    /// Active, to be paused.
    pub to_go: Vec<Came>,
    is_working: bool,
    /// How many resumes have let host memory go over and are not committed yet.
    uncommitted: usize,
}

static OWED: PerProcess<Mutex<Owed>> = PerProcess::new(Mutex::default);

pub(super) fn owed() -> MutexGuard<'static, Owed> {
    OWED.get().lock().unpoisoned()
}

/// Brings these back as soon as there is room. `by_piece`: each by itself, whatever fails. Returns whether that will be tried.
pub(super) fn bring_back_later(gone: &[Arc<Allocation>], by_piece: bool) -> bool {
    let mut owed = owed();
    owed.to_come.extend(gone.iter().map(Arc::downgrade));
    owed.by_piece |= by_piece;
    if !owed.work() {
        owed.to_come.clear();
    }
    owed.is_working
}

/// Pauses these as soon as the host has room for their contents. The program is held until then.
pub(super) fn send_back_later(came: Vec<Came>) {
    let mut owed = owed();
    owed.to_go.extend(came);
    // Without a thread, the program stays held until a client resumes or pauses it.
    owed.work();
}

/// A client has paused these: they stay paused.
pub(super) fn keep_paused(paused: &[Arc<Allocation>]) {
    if let Some(existing) = OWED.existing() {
        existing.lock().unpoisoned().to_come.retain(|one| !paused.iter().any(|paused| std::ptr::eq(one.as_ptr(), Arc::as_ptr(paused))));
    }
}

/// A client has resumed these: they stay active.
pub(super) fn keep_active(active: &[Arc<Allocation>]) {
    if let Some(existing) = OWED.existing() {
        existing.lock().unpoisoned().to_go.retain(|one| !active.iter().any(|active| Arc::ptr_eq(&one.allocation, active)));
    }
}

/// Whether anything active has to be paused, or might have to.
pub(super) fn is_any_to_go() -> bool {
    OWED.existing().is_some_and(|existing| {
        let owed = existing.lock().unpoisoned();
        owed.uncommitted > 0 || owed.to_go.iter().any(Came::is_due)
    })
}

/// While it lives, the program stays held although what came is active: it may have to be paused again.
pub(super) struct Uncommitted(());

impl Uncommitted {
    pub fn begin() -> Self {
        owed().uncommitted += 1;
        Self(())
    }
}

impl Drop for Uncommitted {
    fn drop(&mut self) {
        owed().uncommitted -= 1;
    }
}

impl Owed {
    /// How much there is to do.
    pub fn count(&self) -> usize {
        let is_paused = |one: &&Weak<Allocation>| one.upgrade().is_some_and(|one| one.is_unmapped());
        self.to_come.iter().filter(is_paused).count() + self.to_go.iter().filter(|one| one.is_due()).count()
    }

    /// Starts the worker unless it runs. Returns whether it does.
    fn work(&mut self) -> bool {
        if !self.is_working {
            match worker::spawn("vramctl-owed", work) {
                Ok(()) => self.is_working = true,
                Err(error) => log::error!("could not start a thread: {error}"),
            }
        }
        self.is_working
    }
}

/// The worker's thread.
fn work() {
    let mut pause = LOOK_AGAIN.0;
    while !exit::is_ending() {
        thread::sleep(pause);
        let left = Memory::get().do_what_is_owed();
        let mut owed = owed();
        if owed.to_come.is_empty() && owed.to_go.is_empty() {
            owed.is_working = false;
            owed.by_piece = false;
            break;
        }
        pause = if left { (2 * pause).min(LOOK_AGAIN.1) } else { LOOK_AGAIN.0 };
    }
}
