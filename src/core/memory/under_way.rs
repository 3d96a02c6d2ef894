//! The pause or resume in progress, for the status.

use super::{Allocation, Memory};
use std::collections::BTreeSet;
use std::sync::{Arc, MutexGuard};
use vramctl_host::Unpoison;
use vramctl_model::{Progress, TagState};

/// The pause or resume in progress.
#[derive(Debug, Clone)]
pub struct UnderWay {
    state: TagState,
    tags: BTreeSet<Arc<str>>,
    progress: Option<Progress>,
}

impl UnderWay {
    /// The state and progress of a tag in transition.
    pub fn of(&self, tag: &str) -> Option<(TagState, Option<Progress>)> {
        self.tags.contains(tag).then_some((self.state, self.progress))
    }

    /// Whether a tag is being paused.
    pub fn is_pausing(&self, tag: &str) -> bool {
        self.state == TagState::Pausing && self.tags.contains(tag)
    }
}

/// Shows a transition in status until dropped.
pub(crate) struct Shown<'a>(&'a Memory);

impl Shown<'_> {
    pub fn progress(&self, now: Progress) {
        if let Some(under_way) = &mut *self.0.under_way() {
            under_way.progress = Some(now);
        }
    }
}

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        *self.0.under_way() = None;
    }
}

impl Memory {
    /// The pause or resume in progress, if any.
    /// Whether a pause or resume is in progress.
    pub fn is_in_transition(&self) -> bool {
        self.under_way().is_some()
    }

    pub(crate) fn under_way(&self) -> MutexGuard<'_, Option<UnderWay>> {
        self.under_way.lock().unpoisoned()
    }

    /// Shows these allocations' tags as in transition. One at a time: the caller holds the transition lock.
    pub(crate) fn show<'a>(&self, state: TagState, allocations: impl IntoIterator<Item = &'a Arc<Allocation>>) -> Shown<'_> {
        let tags = allocations.into_iter().map(|allocation| Arc::clone(&allocation.tag)).collect();
        *self.under_way() = Some(UnderWay { state, tags, progress: None });
        Shown(self)
    }
}
