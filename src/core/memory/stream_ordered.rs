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

use super::registry::{Freed, FreedAt};
use super::{Allocation, Memory, Placement};
use std::sync::Arc;
use vramctl_driver::{CUdevice, CUdeviceptr, Context, Current, Event, RelaxedCapture, StreamHandle};
use vramctl_model::Failure;

/// As much of a request's size as may be wasted: an eighth.
const EIGHTH: usize = 8;

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
        if !self.registry.manages(address) {
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
        let order = self.registry.get(address).and_then(|allocation| allocation.origin().malloc()?.order.clone());
        let Some(order) = order.filter(|order| order.is_in(stream.id())) else { return false };
        // Before taking the lock, as above.
        order.before.record_again(stream).is_ok() && self.free_at(address, order)
    }

    fn free_at(&self, address: CUdeviceptr, order: Arc<FreedAt>) -> bool {
        {
            let _shared = self.share();
            // Remove it first, so that exactly one of two frees of an address succeeds.
            let Some(allocation) = self.registry.remove(address) else { return false };
            self.registry.keep_freed(Arc::new(Freed { allocation, order, access: self.peers.changes() }));
        }
        self.let_go();
        true
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
        let stream = stream.id().filter(|_| self.registry.has_freed())?;
        let _shared = self.share();
        let access = self.peers.changes();
        let freed = {
            let list = self.registry.freed.list();
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
        if !self.registry.has_freed() {
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
            if !self.registry.take_freed(&freed) {
                return None;
            }
            // The driver blocks here if the stream's queue is full.
            if !freed.order.is_in(stream) && freed.order.before.hold_up(request.stream).is_err() {
                self.registry.keep_freed(freed);
                return None;
            }
            let _shared = self.share();
            self.hand_on(&freed, request.placement, request.bytes, request.current.owner())
        })
    }

    fn fitting(&self, request: &InOrder<'_>, waste: usize) -> Vec<Arc<Freed>> {
        self.registry.fitting(request.current.device(), request.bytes, self.peers.changes(), waste)
    }

    fn take_for(&self, freed: &Arc<Freed>, placement: &Placement, bytes: usize, owner: Context) -> Option<CUdeviceptr> {
        if self.registry.take_freed(freed) { self.hand_on(freed, placement, bytes, owner) } else { None }
    }

    /// Hands on memory that has been taken out. Under the transition lock.
    fn hand_on(&self, freed: &Arc<Freed>, placement: &Placement, bytes: usize, owner: Context) -> Option<CUdeviceptr> {
        let is_open = freed.access == self.peers.changes();
        let made = if is_open { freed.allocation.hand_on(placement.clone(), bytes, owner, &freed.order) } else { None };
        let Some(made) = made else {
            self.registry.keep_freed(Arc::clone(freed));
            return None;
        };
        let address = made.key();
        self.registry.insert(Arc::new(made));
        Some(address)
    }
}
