//! Memory that the program has freed in the order of a stream (`cudaFreeAsync`), until the stream gets there.
//!
//! It is no longer the program's: not found by its address, not counted, not paused. It is given back by the next call of ours
//! that finds the stream far enough, and a call that is short of memory waits for it.

use super::{Allocation, Memory};
use std::sync::{Arc, MutexGuard, PoisonError};
use vramctl_driver::{self as driver, CUdevice, CUdeviceptr, Context, Current, Event, RelaxedCapture, StreamHandle};
use vramctl_model::Failure;

/// One allocation that was freed so.
#[derive(Debug)]
pub(super) struct Freed {
    allocation: Arc<Allocation>,
    stream: StreamHandle,
    /// What was on the stream when it was freed.
    before: Event,
}

impl Memory {
    /// Frees the allocation at `address` once a stream of the current context has come so far. `None`: it is not managed. After
    /// an error it is still there.
    pub fn free_in_order(&self, address: CUdeviceptr, current: &Current, stream: StreamHandle) -> Option<Result<(), Failure>> {
        if !self.manages(address) {
            return None;
        }
        let _relaxed = RelaxedCapture::enter();
        // Before the lock: the driver waits here where the stream's queue is full.
        let before = match Event::after(current, stream) {
            Ok(event) => event,
            Err(failure) => return Some(Err(failure)),
        };
        {
            let _shared = self.share();
            // Taken out first, so that of two frees of one address exactly one succeeds.
            let (_, allocation) = self.allocations.remove(&address)?;
            self.freed().push(Arc::new(Freed { allocation, stream, before }));
        }
        self.release_freed();
        Some(Ok(()))
    }

    fn freed(&self) -> MutexGuard<'_, Vec<Arc<Freed>>> {
        self.freed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives back what streams have come to.
    pub fn release_freed(&self) {
        let freed = self.freed().clone();
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
            match one.allocation.end() {
                Ok(()) => self.freed().retain(|other| !Arc::ptr_eq(other, &one)),
                Err(failure) => log::debug!("{failure}; will be tried again"),
            }
        }
    }

    /// Waits until what is meant can be given back, and gives it back.
    fn wait_for_freed(&self, is_meant: impl Fn(&Freed) -> bool) {
        let freed = self.freed().clone();
        for one in freed.iter().filter(|one| is_meant(one)) {
            let _relaxed = RelaxedCapture::enter();
            one.before.wait();
        }
        self.release_freed();
    }

    /// The same for what goes with a context.
    pub(super) fn wait_for_freed_in(&self, context: Context) {
        self.wait_for_freed(|freed| freed.before.context() == context || freed.allocation.context() == context);
    }

    /// Gives back what has been freed where that is needed for so many bytes on a device, whose context is current. Waits for it
    /// where the device has less than that free.
    pub fn free_up(&self, device: CUdevice, bytes: usize) {
        /// What the driver takes for itself besides, and more.
        const SLACK: u64 = 64 << 20;
        self.release_freed();
        let is_there = |freed: &Freed| freed.allocation.device == device;
        if !self.freed().iter().any(|freed| is_there(freed)) {
            return;
        }
        if driver::memory_info().is_ok_and(|(free, _)| free < (bytes as u64).saturating_add(SLACK)) {
            self.wait_for_freed(is_there);
        }
    }
}
