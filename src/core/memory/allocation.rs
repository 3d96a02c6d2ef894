//! One allocation: its addresses, and what is behind them now.

use super::Placement;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vramctl_backup::Saved;
use vramctl_config::CpuBackupBackend;
use vramctl_driver::{self as driver, Addresses, CUdevice, CUdeviceptr, Context, Extent, Physical};
use vramctl_model::{Backup, Failure};

/// The virtual addresses that the program was given, and the physical memory now behind them.
#[derive(Debug)]
pub struct Allocation {
    /// The tag under which it is paused and resumed.
    pub tag: Arc<str>,
    /// What becomes of its contents while it is paused, where the pause does not say otherwise.
    pub backup: Backup,
    /// The kind of host memory for them.
    pub backend: CpuBackupBackend,
    /// Bytes that the program asked for.
    pub requested: usize,
    /// The device that the memory is on.
    pub device: CUdevice,
    context: Context,
    contents: Mutex<Contents>,
    addresses: Arc<Addresses>,
}

/// Where the contents are. Changed only under the transition lock held for writing, or by the one that has taken the
/// allocation out of the registry.
#[derive(Debug)]
pub struct Contents {
    /// The physical memory. Unmapped only while a pause is under way, and after one that failed and could not map it again:
    /// then the contents are still in it.
    pub memory: Option<Physical>,
    /// While paused: the contents; `None`: they were discarded. While active: what they were when they were last saved,
    /// if that is retained.
    pub saved: Option<Arc<Saved>>,
}

impl Allocation {
    /// An active allocation of memory that is mapped at the addresses.
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

    /// The address that the program has.
    pub fn address(&self) -> CUdeviceptr {
        self.addresses.base()
    }

    /// Bytes of device memory when active: the request, rounded up to the device's granularity.
    pub fn bytes(&self) -> usize {
        self.addresses.bytes()
    }

    /// Where it is.
    pub fn extent(&self) -> Extent {
        Extent { context: self.context, device: self.device, address: self.address(), bytes: self.bytes() }
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
    pub fn addresses(&self) -> &Arc<Addresses> {
        &self.addresses
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

    /// Takes the memory and the saved contents away for good. After an error it is as it was.
    pub fn end(&self) -> Result<(), Failure> {
        let mut contents = self.contents();
        if let Some(memory) = &mut contents.memory {
            driver::unmap(&mut [memory])?;
        }
        let before = (contents.memory.take(), contents.saved.take());
        // Whoever looks at it need not wait until it is given back.
        drop(contents);
        drop(before);
        Ok(())
    }

    /// Lets another device read and write the memory that is there now.
    pub fn let_in(&self, peer: CUdevice) -> Result<(), Failure> {
        driver::let_in(peer, self.contents().memory.iter())
    }

    /// Whether it is paused: its addresses must not be used.
    pub fn is_paused(&self) -> bool {
        !self.contents().memory.as_ref().is_some_and(Physical::is_mapped)
    }
}
