//! One allocation: a reservation of addresses, and what is behind them now.

use super::Backup;
use crate::backup::Saved;
use crate::driver::{self, CUdevice, CUdeviceptr, Context, Failure, Reservation};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One reservation of virtual addresses that the program was given, and the physical memory now behind it.
#[derive(Debug)]
pub struct Allocation {
    /// The tag under which it is paused and resumed.
    pub tag: Arc<str>,
    /// What becomes of its contents while it is paused, where the pause does not say otherwise.
    pub backup: Backup,
    /// Bytes that the program asked for.
    pub requested: usize,
    /// The device that the memory is on.
    pub device: CUdevice,
    context: Context,
    // Before the reservation, so that memory is unmapped before its addresses are given up.
    contents: Mutex<Contents>,
    reservation: Reservation,
}

/// Where the contents are. Changed only under the transition lock held for writing, or by the one that has taken the
/// allocation out of the registry.
#[derive(Debug)]
pub struct Contents {
    /// The physical memory, mapped at all of the reservation; `None`: the allocation is paused.
    pub memory: Option<driver::Memory>,
    /// While paused: the contents; `None`: they were discarded. While active: what they were when they were last saved,
    /// if that is retained.
    pub saved: Option<Arc<Saved>>,
}

impl Allocation {
    /// An active allocation of memory that is mapped at the reservation.
    pub fn new(policy: super::Policy, requested: usize, current: &driver::Current, memory: driver::Memory, at: Reservation) -> Self {
        Self {
            tag: policy.tag,
            backup: policy.backup,
            requested,
            device: current.device(),
            context: current.context(),
            contents: Mutex::new(Contents { memory: Some(memory), saved: None }),
            reservation: at,
        }
    }

    /// The address that the program has.
    pub fn address(&self) -> CUdeviceptr {
        self.reservation.base()
    }

    /// Bytes of device memory when active: the request, rounded up to the device's granularity.
    pub fn bytes(&self) -> usize {
        self.reservation.bytes()
    }

    /// Whether `address` lies in it.
    pub fn contains(&self, address: CUdeviceptr) -> bool {
        (self.address()..self.address() + self.bytes() as u64).contains(&address)
    }

    /// The context in which the program allocated.
    pub fn context(&self) -> Context {
        self.context
    }

    /// Its addresses.
    pub fn reservation(&self) -> &Reservation {
        &self.reservation
    }

    /// Where the contents are now. Held for moments, and while the driver unmaps or maps it: a
    /// status that is asked for meanwhile waits so long.
    pub fn contents(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has other contents from now on. What there was is given up without anybody waiting for the lock.
    pub fn replace(&self, contents: Contents) {
        let before = std::mem::replace(&mut *self.contents(), contents);
        drop(before);
    }

    /// Takes the memory away from the addresses, if it is there; the contents stay in it. The caller has seen to it that
    /// nothing uses them.
    pub fn unmap(&self) -> Result<(), Failure> {
        self.contents().memory.as_mut().map_or(Ok(()), |memory| driver::unmap(&mut [memory]))
    }

    /// Lets another device read and write the memory that is there now.
    pub fn let_in(&self, peer: CUdevice) -> Result<(), Failure> {
        driver::let_in(peer, self.contents().memory.iter())
    }

    /// Whether it is paused.
    pub fn is_paused(&self) -> bool {
        self.contents().memory.is_none()
    }
}
