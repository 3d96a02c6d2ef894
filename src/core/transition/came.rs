//! What has come in a swap in which host memory goes over.

use crate::memory::{Allocation, PausedBy, Released, State};
use std::ops::Range;
use std::sync::Arc;
use vramctl_backup as backup;
use vramctl_model::Policy;

/// Memory whose contents have arrived and whose backup is gone, although the resume is not committed.
#[derive(Debug, Clone)]
pub(super) struct Came {
    /// It is active.
    pub allocation: Arc<Allocation>,
    /// What was kept of it, as offsets.
    live: Vec<Range<usize>>,
}

impl Came {
    /// Of one that still has its backup.
    pub fn of(allocation: &Arc<Allocation>) -> Self {
        let live = allocation.contents().state.saved().map_or_else(Vec::new, |saved| saved.live().to_vec());
        Self { allocation: Arc::clone(allocation), live }
    }

    /// Bytes that were kept.
    pub fn kept_bytes(&self) -> u64 {
        self.live.iter().map(|part| part.len() as u64).sum()
    }

    /// Whether it is still to be saved.
    pub fn is_due(&self) -> bool {
        !self.allocation.is_unmapped()
    }

    /// To save it again.
    pub fn wanted(&self) -> backup::Wanted {
        let (extent, live) = (self.allocation.extent(), self.live.clone());
        backup::Wanted { extent, policy: Policy::Host, retain: false, at_once: false, before: None, live }
    }
}

/// Whether a backup's host memory may go over before the commit: it is in host memory, and nobody takes note of the new device memory before
/// that is certain to stay. If that is undone, the memory is paused by others only, so the program must not have paused it itself.
pub(super) fn goes_over(allocation: &Allocation) -> bool {
    let contents = allocation.contents();
    let State::Released(Released { saved: Some(saved), guard: None, by: PausedBy::Others }) = &contents.state else { return false };
    saved.place().is_some() && contents.registrant().is_none() && !contents.lending.has_begun()
}
