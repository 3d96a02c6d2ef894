//! Memory freed in stream order (`cudaFreeAsync`), until it is reused or released.
//!
//! The program no longer owns it: lookups do not find it, its tag does not count it, and no pause selects it. As with CUDA's own pools:
//!
//! - A later allocation of about this size in the same stream gets it at once. An allocation in another stream gets it if the stream has
//!   passed the free or, if memory is short, after that: then the other stream waits, not the caller.
//! - When the program synchronises or asks how much is free, what the streams have passed is released, except for as much as the default
//!   pool may keep (`CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`). An allocation short of memory and a pause release all of it.
//! - Nobody waits for a stream but a stream-ordered allocation that finds no memory: for its own stream, without a lock of ours. Without a
//!   stream (`cudaMalloc`), the answer is out of memory at once (observed with driver 580).

use super::allocation::FreedAt;
use super::{Allocation, Memory, Placement};
use crate::limit;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use vramctl_driver::{self as driver, CUdevice, CUdeviceptr, Context, Current, Event, RelaxedCapture, StreamHandle, StreamId};
use vramctl_host::Unpoison;
use vramctl_model::Failure;

/// One such allocation.
#[derive(Debug)]
pub(super) struct Freed {
    allocation: Arc<Allocation>,
    order: Arc<FreedAt>,
    /// What [`Peers::changes`](super::peers::Peers::changes) was: later changes did not reach it.
    access: u64,
}

impl Freed {
    fn bytes(&self) -> usize {
        self.allocation.bytes()
    }

    /// Whether its stream has passed the free. `behind`: streams that have not passed an earlier one, which are not asked again.
    fn is_over(&self, behind: &mut Vec<StreamId>) -> bool {
        let FreedAt { stream, before, .. } = &*self.order;
        if stream.is_some_and(|stream| behind.contains(&stream)) {
            return false;
        }
        let is_over = before.is_over();
        behind.extend(stream.filter(|_| !is_over));
        is_over
    }

    /// Whether it stands for memory of a pool of the device, large enough for a request, and at most a `1 / waste` larger.
    fn fits(&self, device: CUdevice, bytes: usize, access: u64, waste: usize) -> bool {
        let is_alike = self.allocation.is_from_pool() && self.allocation.device == device && self.access == access;
        is_alike && self.bytes() >= bytes && self.bytes() - bytes < (bytes / waste).max(SMALL)
    }
}

/// Little is wasted.
const EIGHTH: usize = 8;
/// As much may be wasted in any case: sizes are multiples of it.
const SMALL: usize = 2 << 20;

/// All such allocations, oldest first.
#[derive(Debug, Default)]
pub(super) struct Unreleased {
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

    fn list(&self) -> MutexGuard<'_, Vec<Arc<Freed>>> {
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

/// A request that memory freed in stream order may serve.
pub(super) struct InOrder<'a> {
    pub placement: &'a Placement,
    pub bytes: usize,
    pub current: &'a Current,
    pub stream: StreamHandle,
}

impl Memory {
    /// Frees the allocation at `address` once `stream`, of the current context, reaches this point. `None` if it is not
    /// managed. Nothing changes on error.
    pub fn free_in_order(&self, address: CUdeviceptr, current: &Current, stream: StreamHandle) -> Option<Result<(), Failure>> {
        if !self.manages(address) {
            return None;
        }
        let _relaxed = RelaxedCapture::enter();
        // Before taking the lock: the driver blocks here if the stream's queue is full.
        let before = match Event::after(current, stream) {
            Ok(event) => event,
            Err(failure) => return Some(Err(failure)),
        };
        let order = Arc::new(FreedAt { stream: stream.id(), before, owner: current.owner() });
        self.free_at(address, order).then_some(Ok(()))
    }

    /// The same for memory that was freed before in the order of the same stream, and has been handed on: with few calls of the driver.
    /// `false` if it is other memory, or if the driver refuses; nothing has changed then.
    pub fn free_again(&self, address: CUdeviceptr, stream: StreamHandle) -> bool {
        let order = self.allocations.get(&address).and_then(|allocation| allocation.origin().malloc()?.order.clone());
        let Some(order) = order.filter(|order| order.is_in(stream.id())) else { return false };
        // Before taking the lock, as above.
        order.before.record_again(stream).is_ok() && self.free_at(address, order)
    }

    fn free_at(&self, address: CUdeviceptr, order: Arc<FreedAt>) -> bool {
        {
            let _shared = self.share();
            // Remove it first, so that exactly one of two frees of an address succeeds.
            let Some(allocation) = self.take_out(address) else { return false };
            self.keep(Arc::new(Freed { allocation, order, access: self.peers.changes() }));
        }
        self.let_go();
        true
    }

    fn keep(&self, freed: Arc<Freed>) {
        self.pools.kept(&freed.allocation);
        self.freed.add(freed);
    }

    /// Takes one out: exactly one of two threads gets it.
    fn take_kept(&self, freed: &Arc<Freed>) -> bool {
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

    /// Serves a request with memory of the same tag that was freed before in the same stream: with few calls of the driver. `is_pool` says
    /// whether memory from a device's default pool is wanted.
    pub fn reuse_again(
        &self,
        placement: &Placement,
        bytes: usize,
        stream: StreamHandle,
        is_pool: impl FnOnce(CUdevice) -> bool,
    ) -> Option<CUdeviceptr> {
        let stream = stream.id().filter(|_| self.has_freed())?;
        let _shared = self.share();
        let access = self.peers.changes();
        let freed = {
            let list = self.freed.list();
            let is_meant = |freed: &&Arc<Freed>| {
                let Allocation { device, tag, .. } = &*freed.allocation;
                freed.order.is_in(Some(stream)) && *tag == placement.tag && freed.fits(*device, bytes, access, EIGHTH)
            };
            list.iter().filter(is_meant).min_by_key(|freed| freed.bytes()).map(Arc::clone)?
        };
        if is_pool(freed.allocation.device) { self.take_for(&freed, placement, bytes, freed.order.owner) } else { None }
    }

    /// Serves a request with freed memory that the stream may use at once. Under the transition lock.
    pub(super) fn reuse(&self, request: &InOrder<'_>) -> Option<CUdeviceptr> {
        if !self.has_freed() {
            return None;
        }
        let (stream, mut behind) = (request.stream.id(), Vec::new());
        let (of_stream, others): (Vec<_>, Vec<_>) = self.fitting(request, EIGHTH).into_iter().partition(|freed| freed.order.is_in(stream));
        let others = others.into_iter().filter(|freed| freed.is_over(&mut behind));
        let InOrder { placement, bytes, current, .. } = request;
        of_stream.into_iter().chain(others).find_map(|freed| self.take_for(&freed, placement, *bytes, current.owner()))
    }

    /// The same if memory is short: more may be wasted, and the stream may wait for another. Without a lock.
    pub(super) fn reuse_later(&self, request: &InOrder<'_>) -> Option<CUdeviceptr> {
        const ALL: usize = 1;
        let stream = request.stream.id();
        self.fitting(request, ALL).into_iter().find_map(|freed| {
            // Before the stream waits: nobody else takes it then.
            if !self.take_kept(&freed) {
                return None;
            }
            // The driver blocks here if the stream's queue is full.
            if !freed.order.is_in(stream) && freed.order.before.hold_up(request.stream).is_err() {
                self.keep(freed);
                return None;
            }
            let _shared = self.share();
            self.hand_on(&freed, request.placement, request.bytes, request.current.owner())
        })
    }

    /// Those that fit, the tightest first; of these, the one that was freed first.
    fn fitting(&self, request: &InOrder<'_>, waste: usize) -> Vec<Arc<Freed>> {
        let (device, access) = (request.current.device(), self.peers.changes());
        let list = self.freed.list();
        let mut fitting: Vec<_> = list.iter().filter(|freed| freed.fits(device, request.bytes, access, waste)).map(Arc::clone).collect();
        drop(list);
        fitting.sort_by_key(|freed| freed.bytes());
        fitting
    }

    fn take_for(&self, freed: &Arc<Freed>, placement: &Placement, bytes: usize, owner: Context) -> Option<CUdeviceptr> {
        if self.take_kept(freed) { self.hand_on(freed, placement, bytes, owner) } else { None }
    }

    /// Hands on memory that has been taken out. Under the transition lock.
    fn hand_on(&self, freed: &Arc<Freed>, placement: &Placement, bytes: usize, owner: Context) -> Option<CUdeviceptr> {
        let is_open = freed.access == self.peers.changes();
        let made = if is_open { freed.allocation.hand_on(placement.clone(), bytes, owner, &freed.order) } else { None };
        let Some(made) = made else {
            self.keep(Arc::clone(freed));
            return None;
        };
        let address = made.key();
        self.enter(Arc::new(made));
        Some(address)
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

    /// Releases what the streams have passed on a device and its pool has above a limit: so many bytes.
    fn release_above(&self, device: CUdevice, above: u64) {
        let above = Cell::new(above);
        let is_meant = |freed: &Freed| freed.allocation.device == device && (!freed.allocation.is_from_pool() || above.get() > 0);
        self.release(is_meant, |freed| {
            above.set(above.get().saturating_sub(freed.bytes() as u64));
            false
        });
    }

    /// Bytes of managed memory that stands for a device's default pool.
    fn bytes_of_pool(&self, device: CUdevice) -> u64 {
        let of_pool = |allocation: &Allocation| allocation.is_from_pool() && allocation.device == device;
        let used = self.all().into_iter().filter(|allocation| of_pool(allocation) && !allocation.is_unmapped());
        let freed = self.freed.all().into_iter().filter(|freed| of_pool(&freed.allocation));
        let sum = used.map(|allocation| allocation.bytes()).chain(freed.map(|freed| freed.bytes())).sum::<usize>();
        sum as u64
    }

    /// Releases what is meant and the streams have passed, oldest first, until there is enough.
    fn release(&self, is_meant: impl Fn(&Freed) -> bool, is_enough: impl Fn(&Freed) -> bool) {
        if !self.has_freed() {
            return;
        }
        let _relaxed = RelaxedCapture::enter();
        let _alone = self.freed.releasing.lock().unpoisoned();
        let mut behind = Vec::new();
        for freed in self.freed.all() {
            if !is_meant(&freed) || !freed.is_over(&mut behind) || !self.take_kept(&freed) {
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
    pub(super) fn wait_for_own(&self, device: CUdevice, stream: StreamHandle) -> bool {
        let Some(stream) = stream.id() else { return false };
        let last = self.freed.all().into_iter().rfind(|freed| freed.allocation.device == device && freed.order.is_in(Some(stream)));
        last.is_some_and(|freed| {
            freed.order.before.wait();
            freed.order.before.is_over()
        })
    }
}
