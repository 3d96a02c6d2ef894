//! Memory that NCCL has registered. It stays registered until it has been deregistered as often, or the communicator is destroyed.
//!
//! NCCL registers late (at the first collective). For a range that it knows already, it returns the same handle, and keeps everything
//! registered until the last deregistration. The marks here follow that.

use super::{Allocation, Memory};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vramctl_model::Span;

/// A registrant. Allocations hold weak references to it: they are registered as long as it exists.
pub(super) type RegistrantMark = Arc<&'static str>;

/// By communicator and NCCL's handle.
pub(super) type Registrations = Mutex<BTreeMap<(usize, usize), NcclRegistration>>;

pub(super) struct NcclRegistration {
    mark: RegistrantMark,
    times: usize,
}

impl Memory {
    fn registrations(&self) -> MutexGuard<'_, BTreeMap<(usize, usize), NcclRegistration>> {
        self.registrations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `real`, which registers a range and returns the handle if it succeeded. The memory counts as registered from before the call
    /// on. No lock is held during the call, which may allocate and wait for other processes.
    pub fn registering(&self, span: Span, registrant: &'static str, communicator: usize, real: impl FnOnce() -> Option<usize>) {
        let mark = RegistrantMark::new(registrant);
        let covered = {
            // Not in the middle of a pause.
            let _shared = self.share();
            let covered = self.touched_by(span);
            for allocation in &covered {
                allocation.contents().mark(&mark);
            }
            covered
        };
        let Some(handle) = real() else { return };
        match self.registrations().entry((communicator, handle)) {
            Entry::Vacant(_) if covered.is_empty() => (),
            Entry::Vacant(place) => {
                place.insert(NcclRegistration { mark, times: 1 });
            }
            Entry::Occupied(mut known) => {
                let known = known.get_mut();
                known.times += 1;
                for allocation in covered {
                    allocation.contents().mark(&known.mark);
                }
            }
        }
    }

    /// Runs `real`, which deregisters a handle and returns whether it succeeded. The memory counts as registered until after the call.
    pub fn deregistering(&self, communicator: usize, handle: usize, real: impl FnOnce() -> bool) {
        let key = (communicator, handle);
        // Remove it before the call: NCCL may give the handle to another thread as soon as it is free.
        let taken = match self.registrations().entry(key) {
            Entry::Vacant(_) => None,
            Entry::Occupied(mut known) if known.get().times > 1 => {
                known.get_mut().times -= 1;
                Some(Arc::clone(&known.get().mark))
            }
            Entry::Occupied(known) => Some(known.remove().mark),
        };
        if !real()
            && let Some(mark) = taken
        {
            self.registrations().entry(key).or_insert(NcclRegistration { mark, times: 0 }).times += 1;
        }
    }

    /// Runs `real`, which destroys a communicator and returns whether it succeeded.
    pub fn ending_communicator(&self, communicator: usize, real: impl FnOnce() -> bool) {
        // Remove it before the call: a new communicator may get its address.
        let taken: Vec<_> = {
            let mut known = self.registrations();
            let keys: Vec<_> = known.range((communicator, 0)..=(communicator, usize::MAX)).map(|(key, _)| *key).collect();
            keys.into_iter().filter_map(|key| known.remove_entry(&key)).collect()
        };
        if !real() {
            self.registrations().extend(taken);
        }
    }

    /// What a range touches.
    fn touched_by(&self, span: Span) -> Vec<Arc<Allocation>> {
        [&self.plain, &self.mapped].into_iter().flat_map(|index| index.touched_by(span)).map(|(_, allocation)| allocation).collect()
    }
}
