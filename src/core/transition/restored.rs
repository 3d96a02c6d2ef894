//! What a resume has restored before its commit, in a swap in which host memory changes hands.

use crate::memory::{Allocation, PausedBy, Released, State};
use std::ops::Range;
use std::sync::Arc;
use vramctl_backup as backup;
use vramctl_model::Policy;

/// Memory that is active, and whose backup is gone, although the resume is not committed.
#[derive(Debug, Clone)]
pub(super) struct Restored {
    pub allocation: Arc<Allocation>,
    /// What was kept of it, as offsets.
    live: Vec<Range<usize>>,
    /// Who had paused it.
    by: PausedBy,
}

impl Restored {
    /// Of an allocation that still has its backup.
    pub fn of(allocation: &Arc<Allocation>) -> Self {
        let contents = allocation.contents();
        let live = contents.state.saved().map_or_else(Vec::new, |saved| saved.live().to_vec());
        Self { allocation: Arc::clone(allocation), live, by: contents.state.paused_by().unwrap_or(PausedBy::OTHERS) }
    }

    /// Bytes that were kept.
    pub fn kept_bytes(&self) -> u64 {
        self.live.iter().map(|part| part.len() as u64).sum()
    }

    /// Whether it is still to be saved.
    pub fn is_due(&self) -> bool {
        !self.allocation.is_unmapped()
    }

    /// It is paused again, for whoever had paused it.
    pub fn set_paused_by(&self) {
        self.allocation.contents().state.set_paused_by(|_| self.by);
    }

    /// To save it again.
    pub fn wanted(&self) -> backup::Wanted {
        let (extent, live) = (self.allocation.extent(), self.live.clone());
        backup::Wanted { extent, policy: Policy::Host, retain: false, at_once: false, before: None, live }
    }
}

/// Whether the host memory of a backup may change hands before the commit: the contents are in host memory, and nobody takes note of the new
/// device memory before that is certain to stay. What the program has paused itself would be paused by others only, if this were undone.
pub(super) fn can_change_hands(allocation: &Allocation) -> bool {
    let contents = allocation.contents();
    let State::Released(Released { saved: Some(saved), guard: None, by }) = &contents.state else { return false };
    !by.is_self_paused() && saved.place().is_some() && contents.registrant().is_none() && !contents.lending.has_begun()
}
