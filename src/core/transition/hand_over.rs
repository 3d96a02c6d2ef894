//! Device memory that a pause gives back before its commit, as part of a swap: as much as the other job needs.

use crate::memory::Allocation;
use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vramctl_backup::{self as backup, Backup, Kept};
use vramctl_driver::{self as driver, CUdevice};
use vramctl_model::{Needed, Participants, SwapOut};

/// After this time without a commit, a prepared pause gives back the rest as well: somebody else has taken what the other job was to get. Longer
/// than the driver takes to zero what that job needs (96 GiB in 0.25 s).
const LATE: Duration = Duration::from_millis(500);

/// After this time, saved memory is given back even if the other job does not need it for its contents: that job waits only so long for the next
/// piece of memory (10 s or more, `coordinator/swap.rs`). At the speed of a link, all memory of a GPU is saved in 3 s.
const SLOW: Duration = Duration::from_secs(4);

/// What has been given back of what the other job needs.
pub(super) struct HandOver {
    needed: BTreeMap<String, Needed>,
    /// What the other job needs on a device, and the bytes that it has got.
    given: BTreeMap<CUdevice, (Needed, u64)>,
    began: Instant,
    /// What is saved and free to go, but not needed for contents.
    withheld: (Vec<Arc<Allocation>>, Vec<backup::Item>),
}

impl HandOver {
    pub fn new(swap: &SwapOut) -> Self {
        Self { needed: swap.needed.clone(), given: BTreeMap::new(), began: Instant::now(), withheld: Default::default() }
    }

    /// Some memory is saved, other memory is not yet: gives back what the other job needs for its contents. The driver zeroes what it gets with the
    /// engines that copy, so each GiB that is given back delays the other job's copies by 5 ms, whether or not anybody needs it. If all that the other
    /// job needs were given back at once, a swap of 84 GiB (33 kept) on an H200 would take 946 ms, not 849 (or 972, not 862, where the other job asks
    /// for memory without contents only after its copies).
    pub fn release_saved(&mut self, saved: &[Arc<Allocation>], items: &[&backup::Item]) {
        release(saved, items.iter().copied(), |allocation| self.count_given(allocation, |needed| needed.for_contents));
        let (allocations, of_them) = &mut self.withheld;
        for allocation in saved.iter().filter(|allocation| is_free_to_go(allocation) && allocation.contents().state.memory().is_some()) {
            allocations.push(Arc::clone(allocation));
            of_them.extend(items.iter().filter(|(extent, _)| Some(extent.address) == allocation.address()).map(|item| (*item).clone()));
        }
    }

    /// Others are still being saved. Returns whether that takes so long that [`release_withheld`](Self::release_withheld).
    pub fn is_slow(&self) -> bool {
        self.began.elapsed() >= SLOW && !self.withheld.0.is_empty()
    }

    /// Gives back what is saved and was not needed for contents.
    pub fn release_withheld(&mut self) {
        let (saved, items) = mem::take(&mut self.withheld);
        release(&saved, &items, is_free_to_go);
    }

    /// Gives back the rest of what the other job needs: zeroing can delay only its last copies now.
    pub fn release_rest_of_needed(&mut self, victims: &[Arc<Allocation>], kept: &Kept) {
        self.withheld = Default::default();
        let is_kept: BTreeSet<_> = kept.items.iter().map(|(extent, _)| Some(extent.address)).collect();
        // What is discarded goes last: if the pause is undone, it is zero. Given back first, it is zeroed during the copies, and the same swap
        // takes 805 ms. That is not worth zeros after each swap that fails.
        let (saved, discarded): (Vec<_>, Vec<_>) = victims.iter().cloned().partition(|allocation| is_kept.contains(&allocation.address()));
        for victims in [saved, discarded] {
            release(&victims, &kept.items, |allocation| self.count_given(allocation, |needed| needed.for_all));
        }
    }

    /// Gives back the rest as well if the commit is late.
    pub fn release_if_late(waited: Duration, victims: &[Arc<Allocation>], kept: &Kept) {
        if waited >= LATE {
            release(victims, &kept.items, is_free_to_go);
        }
    }

    /// Counts the memory of this allocation as given, up to a `limit` on each device. Returns whether it is to be given back now.
    fn count_given(&mut self, allocation: &Allocation, limit: impl Fn(&Needed) -> u64) -> bool {
        if !is_free_to_go(allocation) {
            return false;
        }
        let Some(device) = allocation.on_device() else { return true };
        let Self { needed, given, .. } = self;
        let (needed, given) = given.entry(device).or_insert_with(|| {
            let all = Needed { for_contents: u64::MAX, for_all: u64::MAX };
            (driver::uuid(device).and_then(|uuid| needed.get(&uuid)).copied().unwrap_or(all), 0)
        });
        let is_needed = *given < limit(needed);
        if is_needed {
            *given += allocation.bytes() as u64;
        }
        is_needed
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
        let is_there = allocation.contents().state.memory().is_some();
        if is_there && which(allocation) {
            allocation.release(allocation.address().and_then(|address| saved.get(&address).map(|saved| Arc::clone(saved))));
        }
    }
}

/// Whether nobody would notice if new memory took the place of this memory, should the pause be undone. Whoever has the memory open or registered
/// knows its physical pages: such memory goes at the commit.
pub(super) fn is_free_to_go(allocation: &Allocation) -> bool {
    let contents = allocation.contents();
    contents.registrant().is_none() && contents.lent_to_others(&Participants::default()).is_empty()
}
