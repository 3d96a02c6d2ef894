//! Gives memory back: before the commit of a pause what the job that comes lacks, at the commit the rest.

use crate::memory::Allocation;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use vramctl_backup::{self as backup, Backup, Kept};
use vramctl_driver::{self as driver, CUdevice};
use vramctl_model::{Lacking, TransitionRequest};

/// How long a prepared pause waits for its commit until it gives back the rest as well: somebody else has taken what the other job was to
/// get. Longer than the driver needs to zero what that job lacks (96 GiB in 0.25 s).
const LATE: Duration = Duration::from_millis(500);

/// What has been given back of what the other job lacks.
pub(super) struct HandOver<'a> {
    lacking: &'a BTreeMap<String, Lacking>,
    /// What the other job lacks on a device, and bytes that it got.
    given: BTreeMap<CUdevice, (Lacking, u64)>,
}

impl<'a> HandOver<'a> {
    /// `None` unless the pause is part of a swap.
    pub fn of(request: &'a TransitionRequest) -> Option<Self> {
        request.hand_over.then(|| Self { lacking: &request.lacking, given: BTreeMap::new() })
    }

    /// These are saved while others are not yet: gives back what the other job lacks for its contents.
    pub fn are_saved<'i>(&mut self, saved: &[Arc<Allocation>], items: impl IntoIterator<Item = &'i backup::Item>) {
        release(saved, items, |allocation| self.takes(allocation, |lacks| lacks.for_contents));
    }

    /// Gives back the rest of what the other job lacks: its last copies are all that zeroing can slow now.
    pub fn all_are_saved(&mut self, victims: &[Arc<Allocation>], kept: &Kept) {
        let is_kept: BTreeSet<_> = kept.items.iter().map(|(extent, _)| extent.address).collect();
        // What is discarded goes last: if the pause is undone, it is zero.
        let (saved, discarded): (Vec<_>, Vec<_>) = victims.iter().cloned().partition(|allocation| is_kept.contains(&allocation.address()));
        for victims in [saved, discarded] {
            release(&victims, &kept.items, |allocation| self.takes(allocation, |lacks| lacks.for_all));
        }
    }

    /// The commit has not come yet.
    pub fn has_waited(waited: Duration, victims: &[Arc<Allocation>], kept: &Kept) {
        if waited >= LATE {
            release(victims, &kept.items, is_free_to_go);
        }
    }

    /// Whether to give the memory of this allocation back now, up to a `limit` on each device. It then counts as given.
    fn takes(&mut self, allocation: &Allocation, limit: impl Fn(&Lacking) -> u64) -> bool {
        if !is_free_to_go(allocation) {
            return false;
        }
        let Some(device) = allocation.on_device() else { return true };
        let lacking = self.lacking;
        let (lacks, given) = self.given.entry(device).or_insert_with(|| {
            let all = Lacking { for_contents: u64::MAX, for_all: u64::MAX };
            (driver::uuid(device).and_then(|uuid| lacking.get(&uuid)).copied().unwrap_or(all), 0)
        });
        let is_lacking = *given < limit(lacks);
        if is_lacking {
            *given += allocation.bytes() as u64;
        }
        is_lacking
    }
}

/// Releases the memory of these, unless that has been done. From here on, the contents are only where they were saved.
pub(super) fn release<'a>(
    victims: &[Arc<Allocation>],
    items: impl IntoIterator<Item = &'a backup::Item>,
    mut which: impl FnMut(&Allocation) -> bool,
) {
    let saved: BTreeMap<_, &Arc<Backup>> = items.into_iter().map(|(extent, saved)| (extent.address, saved)).collect();
    for allocation in victims {
        let is_there = allocation.contents().memory.is_some();
        if is_there && which(allocation) {
            allocation.replace(None, saved.get(&allocation.address()).map(|saved| Arc::clone(saved)));
        }
    }
}

/// Whether new memory can take the place of this memory without anybody's noticing, should the pause be undone. Whoever has it open or
/// registered knows its physical pages: it goes at the commit.
pub(super) fn is_free_to_go(allocation: &Allocation) -> bool {
    let contents = allocation.contents();
    contents.registrant().is_none() && contents.lent_to_others(&TransitionRequest::default()).is_empty()
}
