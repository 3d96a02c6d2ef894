//! What the undoing of a swap could not do: the other job is stopped while it has the memory, or a third process has taken it.
//!
//! Nobody else would do it, and neither job would run. So a worker thread does, as soon as there is room, unless a client decides otherwise
//! meanwhile: it resumes memory that was handed over, and pauses memory that was restored and has no backup any more.

use super::restore::has_room_for;
use super::restored::Restored;
use crate::memory::{Allocation, Memory};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;
use std::{ptr, slice, thread};
use vramctl_driver::{self as driver, RelaxedCapture};
use vramctl_host::{PerProcess, Unpoison, exit, worker};
use vramctl_model::{Error, TagState};

/// The time between two looks for room: at first, and at most. It doubles each time.
const LOOK_AGAIN: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(500));

/// What the worker does. It runs while there is anything. The lists change only under the transition lock.
#[derive(Default)]
pub(super) struct Unfinished {
    to_resume: Vec<Weak<Allocation>>,
    /// These are resumed one by one, because another job waits for their host memory.
    one_by_one: bool,
    to_pause: Vec<Restored>,
    is_working: bool,
    /// How many resumes may still have to pause again what they have restored.
    pub exchanges: usize,
}

static UNFINISHED: PerProcess<Mutex<Unfinished>> = PerProcess::new(Mutex::default);

pub(super) fn list() -> MutexGuard<'static, Unfinished> {
    UNFINISHED.get().lock().unpoisoned()
}

fn existing() -> Option<MutexGuard<'static, Unfinished>> {
    UNFINISHED.existing().map(|existing| existing.lock().unpoisoned())
}

/// Resumes these as soon as there is room. `one_by_one`: each by itself, whatever fails. Returns whether that will be tried.
pub(super) fn resume_later(gone: &[Arc<Allocation>], one_by_one: bool) -> bool {
    let mut unfinished = list();
    unfinished.add_to_resume(gone, one_by_one);
    if !unfinished.work() {
        unfinished.to_resume.clear();
    }
    unfinished.is_working
}

/// Pauses these as soon as the host has room for their contents. The program is held until then.
pub(super) fn pause_later(restored: Vec<Restored>) {
    let mut unfinished = list();
    unfinished.to_pause.extend(restored);
    // Without a thread, the program stays held until a client resumes or pauses it.
    unfinished.work();
}

/// A client has paused these: they stay paused.
pub(super) fn keep_paused(paused: &[Arc<Allocation>]) {
    if let Some(mut unfinished) = existing() {
        unfinished.to_resume.retain(|one| !paused.iter().any(|paused| ptr::eq(one.as_ptr(), Arc::as_ptr(paused))));
    }
}

/// A client has resumed these: they stay active.
pub(super) fn keep_active(active: &[Arc<Allocation>]) {
    if let Some(mut unfinished) = existing() {
        unfinished.to_pause.retain(|one| !active.iter().any(|active| Arc::ptr_eq(&one.allocation, active)));
    }
}

/// Whether anything active has to be paused, or might have to.
pub(super) fn must_pause_more() -> bool {
    existing().is_some_and(|unfinished| unfinished.exchanges > 0 || unfinished.to_pause.iter().any(Restored::is_due))
}

impl Unfinished {
    fn add_to_resume(&mut self, gone: &[Arc<Allocation>], one_by_one: bool) {
        self.to_resume.extend(gone.iter().map(Arc::downgrade));
        self.one_by_one |= one_by_one;
    }

    /// How much there is to do.
    fn count(&self) -> usize {
        self.to_resume.iter().filter(|one: &&Weak<Allocation>| one.upgrade().is_some_and(|one| one.is_unmapped())).count()
            + self.to_pause.iter().filter(|one| one.is_due()).count()
    }

    /// Starts the worker unless it runs. Returns whether it does.
    fn work(&mut self) -> bool {
        if !self.is_working {
            match worker::spawn("vramctl-undo", work) {
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
        let before = list().count();
        Memory::get().finish_undoing();
        let mut unfinished = list();
        if unfinished.to_resume.is_empty() && unfinished.to_pause.is_empty() {
            (unfinished.is_working, unfinished.one_by_one) = (false, false);
            break;
        }
        pause = if unfinished.count() == before { (2 * pause).min(LOOK_AGAIN.1) } else { LOOK_AGAIN.0 };
    }
}

impl Memory {
    /// Does what there is room for.
    fn finish_undoing(&self) {
        {
            // While the process is suspended, the library stays out of the driver.
            let Ok(_exclusive) = self.exclude_unless_quiesced() else { return };
            let _relaxed = RelaxedCapture::enter();
            driver::sweep();
            self.finish_resuming();
            self.finish_pausing();
        }
        self.let_go();
    }

    fn finish_resuming(&self) {
        // Allocations that were freed or resumed meanwhile are not due.
        let is_due = |one: &Arc<Allocation>| self.registry.has(one) && one.contents().state.memory().is_none();
        let gone: Vec<_> = list().to_resume.iter().filter_map(Weak::upgrade).filter(is_due).collect();
        let one_by_one = list().one_by_one;
        if gone.is_empty() {
            list().to_resume.clear();
            return;
        }
        let has_room = if one_by_one { gone.iter().any(|one| has_room_for(slice::from_ref(one))) } else { has_room_for(&gone) };
        if !has_room {
            return;
        }
        let _shown = self.show(TagState::Resuming, &gone);
        let _exchange = if one_by_one { self.begin_exchange(&self.registry.snapshot()).ok() } else { None };
        match self.undo_hand_over(&gone, Duration::ZERO, one_by_one) {
            Ok(()) => log::warn!("{} allocations that were handed over are back", gone.len()),
            Err(Error::DeviceMemory(_)) => return,
            Err(error) if one_by_one && !is_final(&error) => return,
            Err(error) => log::error!("{} allocations that were handed over stay paused, with their contents: {error}", gone.len()),
        }
        list().to_resume.clear();
    }

    fn finish_pausing(&self) {
        list().to_pause.retain(|one| self.registry.has(&one.allocation) && one.is_due());
        // The list is there for others to see meanwhile.
        let restored = list().to_pause.clone();
        if restored.is_empty() {
            return;
        }
        let _shown = self.show(TagState::Pausing, restored.iter().map(|one| &one.allocation));
        self.show_undoing();
        let saved = self.begin_exchange(&self.registry.snapshot()).and_then(|_exchange| self.save_again(&restored, Duration::ZERO));
        match saved {
            Ok(()) => log::warn!("{} allocations are paused again, because the swap was undone", restored.len()),
            Err(error) if is_final(&error) => log::error!("{} allocations stay active, in a held program: {error}", restored.len()),
            Err(_) => return list().to_pause.retain(Restored::is_due),
        }
        list().to_pause.clear();
    }
}

/// Whether the failure will be the same at the next try.
fn is_final(error: &Error) -> bool {
    matches!(error, Error::Work(_))
}

#[cfg(test)]
mod tests {
    use super::Unfinished;

    /// The other job of the first swap still waits for host memory.
    #[test]
    fn a_second_undone_swap_does_not_make_the_first_one_wait_for_room_for_all() {
        let mut unfinished = Unfinished::default();
        for (one_by_one, expected) in [(false, false), (true, true), (false, true)] {
            unfinished.add_to_resume(&[], one_by_one);
            assert_eq!(unfinished.one_by_one, expected);
        }
    }
}
