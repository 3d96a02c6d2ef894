//! One allocation: its addresses, and what is behind them now.

use super::Placement;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vramctl_backup::Saved;
use vramctl_driver::{self as driver, Addresses, CUdevice, CUdeviceptr, Context, Extent};
use vramctl_model::{Backup, Failure};

/// The virtual addresses that the program was given, and the physical memory now behind them.
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
    contents: Mutex<Contents>,
    addresses: Arc<Addresses>,
}

/// Physical memory, of one allocation or of neighbours that were resumed together.
pub type Shared = Arc<Mutex<driver::Physical>>;

/// Looks at physical memory, or changes it. Locked after the contents of an allocation, if both are. While a pause or resume
/// is not under way, who only looks must hold those: another owner would keep the memory from going back.
pub fn lock(memory: &Shared) -> MutexGuard<'_, driver::Physical> {
    memory.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where the contents are. Changed only under the transition lock held for writing, or by the one that has taken the
/// allocation out of the registry.
#[derive(Debug)]
pub struct Contents {
    /// The physical memory, mapped at all of the addresses; `None`: the allocation is paused.
    pub memory: Option<Shared>,
    /// While paused: the contents; `None`: they were discarded. While active: what they were when they were last saved,
    /// if that is retained.
    pub saved: Option<Arc<Saved>>,
}

impl Allocation {
    /// An active allocation of memory that is mapped at the addresses.
    pub fn new(policy: Placement, requested: usize, current: &driver::Current, memory: Shared, at: Arc<Addresses>) -> Self {
        Self {
            tag: policy.tag,
            backup: policy.backup,
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

    /// Takes the memory away from the addresses, if it is there; the contents stay in it. The caller has seen to it that
    /// nothing uses them. `false`: it is still there, because neighbours share it.
    pub fn unmap(&self) -> Result<bool, Failure> {
        let contents = self.contents();
        let Some(mut memory) = contents.memory.as_ref().map(lock) else { return Ok(true) };
        if memory.is_shared() {
            return Ok(false);
        }
        driver::unmap(&mut [&mut memory]).map(|()| true)
    }

    /// Takes the memory and the saved contents away for good; where neighbours share the memory, they go on with it alone.
    /// After an error it is as it was.
    pub fn end(&self) -> Result<(), Failure> {
        let mut contents = self.contents();
        if let Some(mut memory) = contents.memory.as_ref().map(lock) {
            if memory.is_shared() {
                memory.leave(&self.addresses);
            } else {
                driver::unmap(&mut [&mut memory])?;
            }
        }
        let before = (contents.memory.take(), contents.saved.take());
        // Whoever looks at it need not wait until it is given back.
        drop(contents);
        drop(before);
        Ok(())
    }

    /// Lets another device read and write the memory that is there now.
    pub fn let_in(&self, peer: CUdevice) -> Result<(), Failure> {
        let contents = self.contents();
        let memory = contents.memory.as_ref().map(lock);
        driver::let_in(peer, memory.as_deref().into_iter())
    }

    /// Whether the two have physical memory together.
    pub fn shares_with(&self, other: &Self) -> bool {
        // One lock at a time: threads may look at the two in either order.
        let memory = |allocation: &Self| allocation.contents().memory.as_ref().map(Arc::as_ptr);
        memory(self).is_some_and(|one| memory(other) == Some(one))
    }

    /// Whether memory may be mapped across the two, both paused and without contents.
    pub fn may_share_with(&self, next: &Self) -> bool {
        let nothing_kept = |allocation: &Self| allocation.contents().saved.is_none();
        self.context == next.context && self.addresses.may_share_with(&next.addresses) && nothing_kept(self) && nothing_kept(next)
    }

    /// Whether it is paused.
    pub fn is_paused(&self) -> bool {
        self.contents().memory.is_none()
    }
}
