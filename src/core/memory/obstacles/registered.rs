//! Memory that a library refers to by its physical pages, and until when. The end of most such references cannot be seen: then the memory
//! counts as registered until its physical pages are released.
//!
//! What NCCL has registered stays registered until it has been deregistered as often, or the communicator is destroyed. NCCL registers late
//! (at the first collective). For a range that it knows already, it returns the same handle, and keeps everything registered until the last
//! deregistration. The marks here follow that.

use crate::memory::registry::{Contents, Registrant, RegistrantMark};
use crate::memory::{Allocation, Memory};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard};
use vramctl_driver::CUdevice;
use vramctl_host::Unpoison;
use vramctl_model::{Span, StatusCode, code};

/// Until when memory stays registered.
#[derive(Debug, Clone, Copy)]
pub enum RegisteredUntil {
    /// The end of its physical pages.
    ItsEnd,
    /// It is unbound from a multicast object or a logical endpoint.
    Unbound(Binding),
}

/// A part of a multicast object, or of a logical endpoint, to which memory was bound. To unbind it, the program must name the same part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Binding {
    /// The object's handle, or the endpoint's id.
    pub object: u64,
    /// Where it begins in the object.
    pub offset: usize,
    /// Its length.
    pub bytes: usize,
    /// The device that has the memory; `None`: whichever has it.
    pub device: Option<CUdevice>,
}

/// What is registered, and can be deregistered.
#[derive(Default)]
pub struct Registrations {
    /// Memory that NCCL has registered, by communicator and NCCL's handle.
    nccl: Mutex<BTreeMap<(usize, usize), NcclRegistration>>,
    /// Memory that is bound to multicast objects and logical endpoints. All bindings name a device.
    bindings: Mutex<BTreeMap<Binding, RegistrantMark>>,
}

struct NcclRegistration {
    mark: RegistrantMark,
    times: usize,
}

impl Registrations {
    fn nccl(&self) -> MutexGuard<'_, BTreeMap<(usize, usize), NcclRegistration>> {
        self.nccl.lock().unpoisoned()
    }

    /// Runs `real`, which deregisters a handle and returns whether it succeeded. The memory counts as registered until after the call.
    pub fn deregistering(&self, communicator: usize, handle: usize, real: impl FnOnce() -> bool) {
        let key = (communicator, handle);
        // Remove it before the call: NCCL may give the handle to another thread as soon as it is free.
        let taken = match self.nccl().entry(key) {
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
            self.nccl().entry(key).or_insert(NcclRegistration { mark, times: 0 }).times += 1;
        }
    }

    /// Runs `real`, which destroys a communicator and returns whether it succeeded.
    pub fn ending_communicator(&self, communicator: usize, real: impl FnOnce() -> bool) {
        // Remove it before the call: a new communicator may get its address.
        let taken: Vec<_> = {
            let mut known = self.nccl();
            let keys: Vec<_> = known.range((communicator, 0)..=(communicator, usize::MAX)).map(|(key, _)| *key).collect();
            keys.into_iter().filter_map(|key| known.remove_entry(&key)).collect()
        };
        if !real() {
            self.nccl().extend(taken);
        }
    }

    fn bindings(&self) -> MutexGuard<'_, BTreeMap<Binding, RegistrantMark>> {
        self.bindings.lock().unpoisoned()
    }

    /// Records that memory is registered.
    pub(in crate::memory) fn record(&self, allocation: &Allocation, contents: &mut Contents, call: &'static str, until: RegisteredUntil) {
        match until {
            RegisteredUntil::ItsEnd => contents.registered_by(call),
            RegisteredUntil::Unbound(binding) => {
                let binding = Binding { device: binding.device.or(Some(allocation.device)), ..binding };
                let mut bindings = self.bindings();
                contents.mark(bindings.entry(binding).or_insert_with(|| Arc::new(Registrant { call, knows_addresses: false })));
            }
        }
    }

    /// Runs a call that unbinds memory. The memory counts as registered until after the call.
    pub fn unbinding(&self, binding: Binding, real: impl FnOnce() -> StatusCode) -> StatusCode {
        // Remove it before the call: another thread may bind memory there as soon as it is free.
        let taken = self.bindings().remove(&binding);
        let answer = real();
        if answer != code::SUCCESS
            && let Some(mark) = taken
        {
            self.bindings().entry(binding).or_insert(mark);
        }
        answer
    }

    /// Called before a handle of the driver's is released, or a logical endpoint destroyed. If memory is bound to that object, nobody can
    /// unbind it any more, and another object may get the same handle.
    pub fn releasing_object(&self, object: u64) {
        self.bindings().retain(|binding, mark| {
            let is_other = binding.object != object;
            if !is_other {
                // From now on, the memory counts as registered until its pages are released.
                mem::forget(Arc::clone(mark));
            }
            is_other
        });
    }
}

impl Memory {
    /// Runs `real`, which registers a range and returns the handle if it succeeded. The memory counts as registered from before the call
    /// on. No lock is held during the call, which may allocate and wait for other processes.
    pub fn registering(&self, span: Span, registrant: &'static str, communicator: usize, real: impl FnOnce() -> Option<usize>) {
        let mark = RegistrantMark::new(Registrant { call: registrant, knows_addresses: true });
        let covered = {
            // Not in the middle of a pause.
            let _shared = self.share();
            let covered = self.registry.touched_by(span);
            for allocation in &covered {
                allocation.contents().mark(&mark);
            }
            covered
        };
        let Some(handle) = real() else { return };
        match self.registrations.nccl().entry((communicator, handle)) {
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

    /// Runs a call that registers the memory in a range by its physical pages, and records that. No pause comes in between. For
    /// paused memory, the answer is an invalid value, with a guard or without.
    pub fn register(&self, span: Span, call: &'static str, until: RegisteredUntil, real: impl FnOnce() -> StatusCode) -> StatusCode {
        let _shared = self.share();
        let touched = self.registry.touched_by(span);
        // The driver would register what guards it.
        if touched.iter().any(|allocation| allocation.is_unmapped()) {
            return code::INVALID_VALUE;
        }
        let answer = real();
        if answer == code::SUCCESS {
            for allocation in touched {
                self.registrations.record(&allocation, &mut allocation.contents(), call, until);
            }
        }
        answer
    }
}
