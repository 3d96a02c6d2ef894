//! Memory that was handed over in a swap, and that the undoing could not take back: the other job is stopped while it has the memory, or a
//! third process has taken it.
//!
//! Nobody else would bring it back, and both jobs would stay paused. So a worker thread resumes these allocations as soon as there is room,
//! unless a client pauses them meanwhile.

use super::resume::has_room_for;
use crate::memory::{Allocation, Memory};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::thread;
use std::time::Duration;
use vramctl_driver::RelaxedCapture;
use vramctl_host::{PerProcess, Unpoison, exit, worker};
use vramctl_model::{Error, TagState};

/// The time between two looks for room: at first, and at most. It doubles each time.
const LOOK_AGAIN: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(500));

/// The paused allocations that the worker brings back. It runs while there are any.
static OWED: PerProcess<Mutex<Vec<Weak<Allocation>>>> = PerProcess::new(Mutex::default);

fn owed() -> MutexGuard<'static, Vec<Weak<Allocation>>> {
    OWED.get().lock().unpoisoned()
}

/// Brings these back as soon as there is room. Returns whether that will be tried.
pub(super) fn bring_back_later(gone: &[Arc<Allocation>]) -> bool {
    let mut owed = owed();
    let is_idle = owed.is_empty();
    owed.extend(gone.iter().map(Arc::downgrade));
    if is_idle && let Err(error) = worker::spawn("vramctl-owed", bring_back) {
        log::error!("could not start a thread: {error}");
        owed.clear();
    }
    !owed.is_empty()
}

/// A client has paused these: they stay paused.
pub(super) fn forget(paused: &[Arc<Allocation>]) {
    if let Some(existing) = OWED.existing() {
        existing.lock().unpoisoned().retain(|one| !paused.iter().any(|paused| std::ptr::eq(one.as_ptr(), Arc::as_ptr(paused))));
    }
}

/// The worker's thread.
fn bring_back() {
    let mut pause = LOOK_AGAIN.0;
    while !exit::is_ending() {
        thread::sleep(pause);
        pause = (2 * pause).min(LOOK_AGAIN.1);
        if Memory::get().bring_back_owed() {
            break;
        }
    }
}

impl Memory {
    /// Resumes what is owed, if there is room for all of it. Returns whether the worker is done: nothing is left, or the rest has failed for
    /// another reason than room.
    fn bring_back_owed(&self) -> bool {
        {
            // While the process is suspended, the library stays out of the driver.
            let Ok(_exclusive) = self.exclude_unless_quiesced() else { return false };
            let _relaxed = RelaxedCapture::enter();
            // Allocations that were freed or resumed meanwhile are not due. The list changes only under the transition lock.
            let is_due = |one: &Arc<Allocation>| self.has(one) && one.contents().memory.is_none();
            let gone: Vec<_> = owed().iter().filter_map(Weak::upgrade).filter(is_due).collect();
            if !has_room_for(&gone) {
                return false;
            }
            let _shown = self.show(TagState::Resuming, &gone);
            match self.undo_hand_over(&gone, Duration::ZERO) {
                Ok(()) if gone.is_empty() => (),
                Ok(()) => log::warn!("{} allocations that were handed over are back", gone.len()),
                Err(Error::DeviceMemory(_)) => return false,
                Err(error) => log::error!("{} allocations that were handed over stay paused, with their contents: {error}", gone.len()),
            }
            owed().clear();
        }
        self.let_go();
        true
    }
}
