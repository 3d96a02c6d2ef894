//! Memory freed in stream order (`cudaFreeAsync`), until the stream reaches the free.
//!
//! The program no longer owns it: lookups do not find it, its tag no longer counts it, and no pause selects it. The next library
//! call that finds the stream past the free releases it; an allocation short of memory waits for the stream.

use super::{Allocation, Memory};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use vramctl_driver::{self as driver, CUdevice, CUdeviceptr, Context, Current, Event, RelaxedCapture, StreamHandle};
use vramctl_host::Unpoison;
use vramctl_model::Failure;

/// One such allocation.
#[derive(Debug)]
pub(super) struct Freed {
    allocation: Arc<Allocation>,
    stream: StreamHandle,
    /// Marks the work queued on the stream before the free.
    before: Event,
}

/// All such allocations, oldest first.
#[derive(Debug, Default)]
pub(super) struct Unreleased {
    list: Mutex<Vec<Arc<Freed>>>,
    /// Whether there are any. Every call that allocates or frees checks this; mostly there are none.
    any: AtomicBool,
}

impl Unreleased {
    fn are_there(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    fn list(&self) -> MutexGuard<'_, Vec<Arc<Freed>>> {
        self.list.lock().unpoisoned()
    }

    fn all(&self) -> Vec<Arc<Freed>> {
        if self.are_there() { self.list().clone() } else { Vec::new() }
    }

    fn add(&self, freed: Freed) {
        let mut list = self.list();
        list.push(Arc::new(freed));
        self.any.store(true, Ordering::Release);
    }

    fn remove(&self, freed: &Arc<Freed>) {
        let mut list = self.list();
        list.retain(|other| !Arc::ptr_eq(other, freed));
        self.any.store(!list.is_empty(), Ordering::Release);
    }
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
        {
            let _shared = self.share();
            // Remove it first, so that exactly one of two frees of an address succeeds.
            let allocation = self.take_out(address)?;
            self.freed.add(Freed { allocation, stream, before });
        }
        self.let_go();
        self.release_freed();
        Some(Ok(()))
    }

    /// Whether memory waits for its stream.
    #[inline]
    pub fn has_freed(&self) -> bool {
        self.freed.are_there()
    }

    /// Releases allocations whose streams have reached their frees.
    pub fn release_freed(&self) {
        let freed = self.freed.all();
        if freed.is_empty() {
            return;
        }
        let _relaxed = RelaxedCapture::enter();
        let mut behind = Vec::new();
        for one in freed {
            let stream = (one.before.context(), one.stream);
            if behind.contains(&stream) {
                continue;
            }
            if !one.before.is_over() {
                behind.push(stream);
                continue;
            }
            one.allocation.end();
            self.freed.remove(&one);
        }
    }

    /// Waits for the matching frees, then releases their memory.
    fn wait_for_freed(&self, is_meant: impl Fn(&Freed) -> bool) {
        let freed = self.freed.all();
        for one in freed.iter().filter(|one| is_meant(one)) {
            let _relaxed = RelaxedCapture::enter();
            one.before.wait();
        }
        self.release_freed();
    }

    /// The same for all frees that involve a context.
    pub(super) fn wait_for_freed_in(&self, context: Context) {
        self.wait_for_freed(|freed| freed.before.context() == context || freed.allocation.context() == context);
    }

    /// Releases freed memory to make `bytes` available on a device whose context is current. Waits for streams only if the
    /// device has less than that free.
    pub fn free_up(&self, device: CUdevice, bytes: usize) {
        /// More than the driver needs for itself.
        const SLACK: u64 = 64 << 20;
        self.release_freed();
        let is_there = |freed: &Freed| freed.allocation.device == device;
        if !self.freed.all().iter().any(|freed| is_there(freed)) {
            return;
        }
        if driver::memory_info().is_ok_and(|(free, _)| free < (bytes as u64).saturating_add(SLACK)) {
            self.wait_for_freed(is_there);
        }
    }
}
