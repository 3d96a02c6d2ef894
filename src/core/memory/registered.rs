//! Memory that NCCL has registered: until it is deregistered as often, or the communicator has ended.
//!
//! NCCL registers late (at the first collective) and gives the same handle for a range that it knows already, of which it keeps all
//! until the last deregistration. So do the marks here.

use super::{Allocation, Memory};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vramctl_model::Span;

/// Who knows the memory. Allocations refer to it weakly: they are registered as long as it is there.
pub(super) type RegistrantMark = Arc<&'static str>;

/// By communicator, and the handle that NCCL gave.
pub(super) type Registrations = Mutex<BTreeMap<(usize, usize), NcclRegistration>>;

pub(super) struct NcclRegistration {
    mark: RegistrantMark,
    times: usize,
}

impl Memory {
    fn registrations(&self) -> MutexGuard<'_, BTreeMap<(usize, usize), NcclRegistration>> {
        self.registrations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a call that registers a range, and tells the handle if it has. The memory counts as registered from before the call on,
    /// which may itself allocate and wait for other processes: no lock is held meanwhile.
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

    /// Runs a call that deregisters a handle, and tells whether it has. The memory counts as registered until after the call.
    pub fn deregistering(&self, communicator: usize, handle: usize, real: impl FnOnce() -> bool) {
        let key = (communicator, handle);
        // Taken out before: NCCL may give the handle to another thread as soon as it is free.
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

    /// Runs a call that ends a communicator, and tells whether it has.
    pub fn ending_communicator(&self, communicator: usize, real: impl FnOnce() -> bool) {
        // Taken out before: a new communicator may get the address of this one.
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
        let end = span.address.saturating_add(span.bytes as u64);
        let touched = |one: &Allocation| one.wanted().is_none() && one.key() < end && one.key() + one.bytes() as u64 > span.address;
        let mapped = self.mapped_in(span).into_iter().map(|(_, allocation)| allocation);
        mapped.chain(self.allocations.iter().filter(|entry| touched(entry)).map(|entry| Arc::clone(&entry))).collect()
    }
}
