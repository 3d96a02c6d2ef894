//! Memory freed in stream order, until it is reused or released ([`stream_ordered`](super::super::stream_ordered)).

use super::Registry;
use super::allocation::{Allocation, FreedAt};
use crate::limit;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use vramctl_driver::{self as driver, CUdevice, RelaxedCapture, StreamHandle, StreamId};
use vramctl_host::Unpoison;

/// One such allocation.
#[derive(Debug)]
pub struct Freed {
    pub allocation: Arc<Allocation>,
    pub order: Arc<FreedAt>,
    /// What [`Peers::changes`](super::super::peers::Peers::changes) was: later changes did not reach it.
    pub access: u64,
}

impl Freed {
    pub fn bytes(&self) -> usize {
        self.allocation.bytes()
    }

    /// Whether its stream has passed the free. `behind`: streams that have not passed an earlier one, which are not asked again.
    pub fn is_over(&self, behind: &mut Vec<StreamId>) -> bool {
        let FreedAt { stream, before, .. } = &*self.order;
        if stream.is_some_and(|stream| behind.contains(&stream)) {
            return false;
        }
        let is_over = before.is_over();
        behind.extend(stream.filter(|_| !is_over));
        is_over
    }

    /// Whether it stands for memory of a pool of the device, large enough for a request, and at most a `1 / waste` larger.
    pub fn fits(&self, device: CUdevice, bytes: usize, access: u64, waste: usize) -> bool {
        let is_alike = self.allocation.is_from_pool() && self.allocation.device == device && self.access == access;
        is_alike && self.bytes() >= bytes && self.bytes() - bytes < (bytes / waste).max(SMALL)
    }
}

/// As much may be wasted in any case: sizes are multiples of it.
const SMALL: usize = 2 << 20;

/// All such allocations, oldest first.
#[derive(Debug, Default)]
pub struct Unreleased {
    list: Mutex<Vec<Arc<Freed>>>,
    /// Whether there are any. Every synchronisation checks this; mostly there are none.
    any: AtomicBool,
    /// Held while memory is released: who finds none waits for what another thread is about to release.
    releasing: Mutex<()>,
    /// Counts the releases.
    released: AtomicU64,
}

impl Unreleased {
    #[inline]
    fn are_there(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    pub fn list(&self) -> MutexGuard<'_, Vec<Arc<Freed>>> {
        self.list.lock().unpoisoned()
    }

    fn all(&self) -> Vec<Arc<Freed>> {
        if self.are_there() { self.list().clone() } else { Vec::new() }
    }

    fn add(&self, freed: Arc<Freed>) {
        let mut list = self.list();
        list.push(freed);
        self.any.store(true, Ordering::Relaxed);
    }

    /// Takes one out: exactly one of two threads gets it.
    fn remove(&self, freed: &Arc<Freed>) -> bool {
        let mut list = self.list();
        let place = list.iter().position(|other| Arc::ptr_eq(other, freed));
        if let Some(place) = place {
            list.remove(place);
            self.any.store(!list.is_empty(), Ordering::Relaxed);
        }
        place.is_some()
    }
}

impl Registry {
    /// Keeps an allocation that the program has freed.
    pub(crate) fn keep_freed(&self, freed: Arc<Freed>) {
        self.pools.kept(&freed.allocation);
        self.freed.add(freed);
    }

    /// Takes one out: exactly one of two threads gets it.
    pub(crate) fn take_freed(&self, freed: &Arc<Freed>) -> bool {
        let is_taken = self.freed.remove(freed);
        if is_taken {
            self.pools.given(&freed.allocation);
        }
        is_taken
    }

    /// Whether memory waits to be reused or released.
    #[inline]
    pub fn has_freed(&self) -> bool {
        self.freed.are_there()
    }

    /// Those that fit, the tightest first; of these, the one that was freed first.
    pub fn fitting(&self, device: CUdevice, bytes: usize, access: u64, waste: usize) -> Vec<Arc<Freed>> {
        let list = self.freed.list();
        let mut fitting: Vec<_> = list.iter().filter(|freed| freed.fits(device, bytes, access, waste)).map(Arc::clone).collect();
        drop(list);
        fitting.sort_by_key(|freed| freed.bytes());
        fitting
    }

    /// Releases what the streams have passed.
    pub fn release_freed(&self) {
        self.release(|_| true, |_| false);
    }

    /// Releases what the streams have passed and the default pools need not keep.
    pub fn synchronised(&self) {
        let devices: BTreeSet<_> = self.freed.all().iter().map(|freed| freed.allocation.device).collect();
        for device in devices {
            let above = match driver::release_threshold(device) {
                Ok(u64::MAX) => 0,
                Ok(threshold @ 1..) => self.bytes_of_pool(device).saturating_sub(threshold),
                Ok(0) | Err(_) => u64::MAX,
            };
            self.release_above(device, above);
        }
    }

    /// Releases what the streams have passed on a device, as long as its pool has more than `keep` bytes.
    pub fn trim(&self, device: CUdevice, keep: u64) {
        self.release_above(device, self.bytes_of_pool(device).saturating_sub(keep));
    }

    /// Releases what the streams have passed on a device; of its pool, until that is `above` bytes smaller.
    fn release_above(&self, device: CUdevice, above: u64) {
        let above = Cell::new(above);
        self.release(
            |freed| freed.allocation.device == device && (!freed.allocation.is_from_pool() || above.get() > 0),
            |freed| {
                above.set(above.get().saturating_sub(freed.bytes() as u64));
                false
            },
        );
    }

    /// Bytes of managed memory that stands for a device's default pool.
    fn bytes_of_pool(&self, device: CUdevice) -> u64 {
        let of_pool = |allocation: &Allocation| allocation.is_from_pool() && allocation.device == device;
        let used = self.all().into_iter().filter(|allocation| of_pool(allocation) && !allocation.is_unmapped());
        let freed = self.freed.all().into_iter().filter(|freed| of_pool(&freed.allocation));
        used.map(|allocation| allocation.bytes() as u64).chain(freed.map(|freed| freed.bytes() as u64)).sum()
    }

    /// Releases memory that `is_meant` and that the streams have passed, the oldest first, until one of the releases `is_enough`.
    fn release(&self, is_meant: impl Fn(&Freed) -> bool, is_enough: impl Fn(&Freed) -> bool) {
        if !self.has_freed() {
            return;
        }
        let _relaxed = RelaxedCapture::enter();
        let _alone = self.freed.releasing.lock().unpoisoned();
        let mut behind = Vec::new();
        for freed in self.freed.all() {
            if !is_meant(&freed) || !freed.is_over(&mut behind) || !self.take_freed(&freed) {
                continue;
            }
            freed.allocation.end();
            self.freed.released.fetch_add(1, Ordering::Relaxed);
            if is_enough(&freed) {
                break;
            }
        }
    }

    /// How often freed memory has been released so far.
    pub fn released(&self) -> u64 {
        self.freed.released.load(Ordering::Relaxed)
    }

    /// Releases what the streams have passed on a device, whose context is current, until there is room for `bytes`. Returns whether any has
    /// been released since `before`: then a request may find memory that has found none.
    pub fn free_up(&self, device: CUdevice, bytes: usize, before: u64) -> bool {
        /// More than the driver needs for itself.
        const SLACK: u64 = 64 << 20;
        let has_room = |_: &Freed| {
            let is_free = driver::memory_info().is_ok_and(|(free, _)| free >= (bytes as u64).saturating_add(SLACK));
            is_free && limit::has_room(device, bytes as u64)
        };
        self.release(|freed| freed.allocation.device == device, has_room);
        self.released() != before
    }

    /// Waits until a stream has passed all its frees of memory of this device. Returns whether there were any.
    pub(crate) fn wait_for_own(&self, device: CUdevice, stream: StreamHandle) -> bool {
        let Some(stream) = stream.id() else { return false };
        let last = self.freed.all().into_iter().rfind(|freed| freed.allocation.device == device && freed.order.is_in(Some(stream)));
        last.is_some_and(|freed| {
            freed.order.before.wait();
            freed.order.before.is_over()
        })
    }
}
