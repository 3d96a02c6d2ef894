//! Does what is owed ([`owed`](super::owed)), as far as there is room.

use super::came::Came;
use super::owed::owed;
use super::resume::has_room_for;
use crate::memory::{Allocation, Memory};
use std::slice;
use std::sync::{Arc, Weak};
use std::time::Duration;
use vramctl_driver::{self as driver, RelaxedCapture};
use vramctl_model::{Error, TagState};

impl Memory {
    /// Does what there is room for. Returns whether nothing was.
    pub(super) fn do_what_is_owed(&self) -> bool {
        let before = owed().count();
        {
            // While the process is suspended, the library stays out of the driver.
            let Ok(_exclusive) = self.exclude_unless_quiesced() else { return true };
            let _relaxed = RelaxedCapture::enter();
            driver::sweep();
            self.bring_back_owed();
            self.send_back_owed();
        }
        self.let_go();
        owed().count() == before
    }

    /// Resumes what is owed, if there is room.
    fn bring_back_owed(&self) {
        // Allocations that were freed or resumed meanwhile are not due. The list changes only under the transition lock.
        let is_due = |one: &Arc<Allocation>| self.registry.has(one) && one.contents().state.memory().is_none();
        let gone: Vec<_> = owed().to_come.iter().filter_map(Weak::upgrade).filter(is_due).collect();
        let by_piece = owed().by_piece;
        if gone.is_empty() {
            owed().to_come.clear();
            return;
        }
        let has_room = if by_piece { gone.iter().any(|one| has_room_for(slice::from_ref(one))) } else { has_room_for(&gone) };
        if !has_room {
            return;
        }
        let _shown = self.show(TagState::Resuming, &gone);
        let _sparing = if by_piece { self.spare_host(&self.registry.snapshot()).ok() } else { None };
        match self.undo_hand_over(&gone, Duration::ZERO, by_piece) {
            Ok(()) => log::warn!("{} allocations that were handed over are back", gone.len()),
            Err(Error::DeviceMemory(_)) => return,
            Err(error) if by_piece && !is_final(&error) => return,
            Err(error) => log::error!("{} allocations that were handed over stay paused, with their contents: {error}", gone.len()),
        }
        owed().to_come.clear();
    }

    /// Pauses what is owed, if there is room for its contents.
    fn send_back_owed(&self) {
        // The list changes only under the transition lock, and is there for others to see meanwhile.
        owed().to_go.retain(|one| self.registry.has(&one.allocation) && one.is_due());
        let came = owed().to_go.clone();
        if came.is_empty() {
            return;
        }
        let allocations: Vec<_> = came.iter().map(|one| Arc::clone(&one.allocation)).collect();
        let _shown = self.show(TagState::Pausing, &allocations);
        self.show_undoing();
        let saved = self.spare_host(&self.registry.snapshot()).and_then(|_sparing| self.save_again(&came, Duration::ZERO));
        match saved {
            Ok(()) => log::warn!("{} allocations are paused again, because the swap was undone", came.len()),
            Err(error) if is_final(&error) => log::error!("{} allocations stay active, in a held program: {error}", came.len()),
            Err(_) => return owed().to_go.retain(Came::is_due),
        }
        owed().to_go.clear();
    }
}

/// Whether the failure will be the same at the next try.
fn is_final(error: &Error) -> bool {
    matches!(error, Error::Work(_))
}
