//! One allocation: its addresses and the memory behind them.

use super::Placement;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vramctl_backup::Saved;
use vramctl_config::CpuBackupBackend;
use vramctl_driver::{self as driver, Addresses, CUdevice, CUdeviceptr, Context, Extent, Physical};
use vramctl_model::{Backup, Failure};

/// The virtual addresses given to the program, and the physical memory now behind them.
#[derive(Debug)]
pub struct Allocation {
    /// The tag that selects it in pauses and resumes.
    pub tag: Arc<str>,
    /// What becomes of its contents while it is paused, unless the pause overrides it.
    pub backup: Backup,
    /// The kind of host memory for its contents.
    pub backend: CpuBackupBackend,
    /// Bytes the program asked for.
    pub requested: usize,
    /// The memory's device.
    pub device: CUdevice,
    context: Context,
    contents: Mutex<Contents>,
    addresses: Arc<Addresses>,
}

/// Where the contents are. Changes only under the exclusive transition lock, or once the allocation has been removed from
/// the registry.
#[derive(Debug)]
pub struct Contents {
    /// The physical memory. Unmapped only during a pause, and after a failed pause that could not map it again; then it
    /// still holds the contents.
    pub memory: Option<Physical>,
    /// While paused: the contents, or `None` if they were discarded. While active: the last saved contents, if retained.
    pub saved: Option<Arc<Saved>>,
}

impl Allocation {
    /// An active allocation whose memory is mapped at `at`.
    pub fn new(policy: Placement, requested: usize, current: &driver::Current, memory: Physical, at: Arc<Addresses>) -> Self {
        Self {
            tag: policy.tag,
            backup: policy.backup,
            backend: policy.backend,
            requested,
            device: current.device(),
            context: current.context(),
            contents: Mutex::new(Contents { memory: Some(memory), saved: None }),
            addresses: at,
        }
    }

    /// The program's address.
    pub fn address(&self) -> CUdeviceptr {
        self.addresses.base()
    }

    /// Bytes of device memory when active: the request rounded up to the device's granularity.
    pub fn bytes(&self) -> usize {
        self.addresses.bytes()
    }

    /// Its location.
    pub fn extent(&self) -> Extent {
        Extent { context: self.context, device: self.device, address: self.address(), bytes: self.bytes() }
    }

    /// Whether `address` lies inside it.
    pub fn contains(&self, address: CUdeviceptr) -> bool {
        (self.address()..self.address() + self.bytes() as u64).contains(&address)
    }

    /// The context it was allocated in.
    pub fn context(&self) -> Context {
        self.context
    }

    /// Its virtual addresses.
    pub fn addresses(&self) -> &Arc<Addresses> {
        &self.addresses
    }

    /// Where the contents are now. The lock is held briefly, but also while the driver maps or unmaps, which a concurrent
    /// status waits for.
    pub fn contents(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the contents. The old ones are freed after the lock is released.
    pub fn replace(&self, contents: Contents) {
        let before = std::mem::replace(&mut *self.contents(), contents);
        drop(before);
    }

    /// Releases the memory and the saved contents for good. Nothing changes on error.
    pub fn end(&self) -> Result<(), Failure> {
        let mut contents = self.contents();
        if let Some(memory) = &mut contents.memory {
            driver::unmap(&mut [memory])?;
        }
        let before = (contents.memory.take(), contents.saved.take());
        // Free outside the lock, so that readers need not wait.
        drop(contents);
        drop(before);
        Ok(())
    }

    /// Gives another device access to the memory mapped now.
    pub fn let_in(&self, peer: CUdevice) -> Result<(), Failure> {
        driver::let_in(peer, self.contents().memory.iter())
    }

    /// Whether it is paused, so its addresses must not be used.
    pub fn is_paused(&self) -> bool {
        !self.contents().memory.as_ref().is_some_and(Physical::is_mapped)
    }
}
