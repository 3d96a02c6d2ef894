//! The pause or resume in progress, for the status.

use super::{Allocation, Memory};
use std::collections::BTreeSet;
use std::sync::{Arc, MutexGuard};
use vramctl_host::Unpoison;
use vramctl_model::{Error, Observer, Progress, TagState};

/// The pause or resume in progress.
#[derive(Debug, Clone)]
pub struct UnderWay {
    state: TagState,
    tags: BTreeSet<Arc<str>>,
    progress: Option<Progress>,
    is_undone: bool,
}

impl UnderWay {
    /// The state and progress of a tag in transition.
    pub fn of(&self, tag: &str) -> Option<(TagState, Option<Progress>)> {
        let state = if self.is_undone { TagState::Undoing } else { self.state };
        self.tags.contains(tag).then_some((state, self.progress))
    }
}

/// Shows a transition in status until dropped.
pub(crate) struct Shown<'a>(&'a Memory);

impl Shown<'_> {
    /// Reports progress here and to the observer. If that wants no more, all is undone from here on.
    pub fn progress(&self, now: Progress, observer: &mut dyn Observer) -> Result<(), Error> {
        if let Some(under_way) = &mut *self.0.under_way()
            && !under_way.is_undone
        {
            under_way.progress = Some(now);
        }
        observer.progress(now).inspect_err(|_| self.0.show_undoing())
    }
}

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        *self.0.under_way() = None;
    }
}

impl Memory {
    /// Whether a pause or resume is in progress.
    pub fn is_in_transition(&self) -> bool {
        self.under_way().is_some()
    }

    /// The pause or resume is taken back: its memory is on its way to where it was.
    pub(crate) fn show_undoing(&self) {
        if let Some(under_way) = &mut *self.under_way() {
            (under_way.is_undone, under_way.progress) = (true, None);
        }
    }

    pub(crate) fn under_way(&self) -> MutexGuard<'_, Option<UnderWay>> {
        self.under_way.lock().unpoisoned()
    }

    /// Shows these allocations' tags as in transition. One at a time: the caller holds the transition lock.
    pub(crate) fn show<'a>(&self, state: TagState, allocations: impl IntoIterator<Item = &'a Arc<Allocation>>) -> Shown<'_> {
        let tags = allocations.into_iter().map(|allocation| Arc::clone(&allocation.tag)).collect();
        *self.under_way() = Some(UnderWay { state, tags, progress: None, is_undone: false });
        Shown(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_that_is_undone_is_no_pause_any_more() {
        let tags = [Arc::from("weights")].into();
        let pausing = UnderWay { state: TagState::Pausing, tags, progress: None, is_undone: false };
        assert_eq!(pausing.of("weights"), Some((TagState::Pausing, None)));
        let undone = UnderWay { is_undone: true, ..pausing };
        assert_eq!(undone.of("weights"), Some((TagState::Undoing, None)));
        assert_eq!(undone.of("kv_cache"), None);
    }
}
