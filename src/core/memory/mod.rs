//! The allocations that this process was given, by address; how one is made and freed, and what there is.
//!
//! Locks: allocating and freeing hold the transition lock for reading, pausing and resuming for writing. No driver call
//! and no copy happens under a guard of the map.

mod allocation;
pub mod region;
mod status;

pub use allocation::{Allocation, Contents};
pub use region::Placement;

use crate::drain;
use dashmap::DashMap;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use vramctl_backup as backup;
use vramctl_config::Config;
use vramctl_driver::{self as driver, Addresses, CUdevice, CUdeviceptr, Context, Current, Physical, RelaxedCapture, StreamHandle};
use vramctl_host::PerProcess;
use vramctl_model::{Error, Failure, Shortage, checked_tag, code};

/// What must have finished before memory may be taken away.
#[derive(Debug, Clone, Copy)]
pub enum After {
    /// All work of the device: `cudaFree`.
    AllWork,
    /// The work queued on one stream so far: `cudaFreeAsync`.
    Stream(StreamHandle),
}

/// All that this process has under management.
pub struct Memory {
    allocations: DashMap<CUdeviceptr, Arc<Allocation>>,
    pub(crate) transition: RwLock<()>,
    /// What is being paused or resumed, for those who look. Held for moments.
    under_way: Mutex<Option<status::UnderWay>>,
    /// The tag of allocations outside regions.
    process_tag: RwLock<Option<Arc<str>>>,
    /// Bytes that an allocation must leave free on its device.
    margin: AtomicU64,
    /// Which device may also use the memory of which other, (the one, the other's), and the context in which it does.
    peers: RwLock<BTreeMap<(CUdevice, CUdevice), Context>>,
}

static MEMORY: PerProcess<Memory> = PerProcess::new(|| Memory {
    allocations: DashMap::new(),
    transition: RwLock::default(),
    under_way: Mutex::default(),
    process_tag: RwLock::new(Config::get().tag.clone()),
    margin: AtomicU64::new(0),
    peers: RwLock::default(),
});

impl Memory {
    /// This process's managed memory.
    #[inline]
    pub fn get() -> &'static Self {
        MEMORY.get()
    }

    /// The same, if anything has used it yet.
    #[inline]
    pub fn existing() -> Option<&'static Self> {
        MEMORY.existing()
    }

    /// The tag of allocations outside regions; `None`: those are left to CUDA.
    pub fn process_tag(&self) -> Option<Arc<str>> {
        self.process_tag.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets the tag of allocations outside regions, from now on; `None` leaves them to CUDA. What there is keeps its tag.
    pub fn set_process_tag(&self, tag: Option<&str>) -> Result<(), Error> {
        let tag = tag.map(checked_tag).transpose()?;
        *self.process_tag.write().unwrap_or_else(PoisonError::into_inner) = tag;
        Ok(())
    }

    /// From now on an allocation that would leave less than `bytes` of its device free is answered with out of memory.
    pub fn set_margin(&self, bytes: u64) {
        self.margin.store(bytes, Ordering::Relaxed);
    }

    /// Says whether the contents that a pause saves of a tag stay in host memory after the resume, in place of
    /// `VRAMCTL_RETAIN`; without a tag, of every tag that has no setting of its own. `None` takes back what was said.
    ///
    /// What is not to stay any more is given up at once; of what is to stay from now on, changes can be told from the next
    /// pause on. Waits for a pause or resume that is under way.
    pub fn set_retain(&self, tag: Option<&str>, keep: Option<bool>) -> Result<(), Error> {
        let tag = tag.map(checked_tag).transpose()?;
        let given_up: Vec<_> = {
            let _exclusive = self.exclude();
            backup::set_retain(tag, keep);
            let done_with = |allocation: &&Arc<Allocation>| !allocation.is_paused() && !backup::retains(&allocation.tag);
            self.snapshot().iter().filter(done_with).filter_map(|allocation| allocation.contents().saved.take()).collect()
        };
        drop(given_up);
        let retained = self.snapshot().into_iter().filter(|allocation| backup::retains(&allocation.tag));
        let contexts: BTreeMap<_, _> = retained.map(|allocation| (allocation.context(), Arc::clone(&allocation.tag))).collect();
        for (context, tag) in contexts {
            // One that the program has destroyed needs nothing.
            if let Ok(current) = Current::push(context) {
                backup::get_ready(&current, &tag);
            }
        }
        Ok(())
    }

    /// Where the pauses to come keep contents whose policy is `disk`; `None`: as `VRAMCTL_DISK_DIR` says. It must be there
    /// already, so that a wrong one is known now and not at the next pause.
    pub fn set_disk_directory(&self, directory: Option<&Path>) -> Result<(), Error> {
        let wrong = |path: &Path, why: &dyn fmt::Display| Error::Disk(format!("{} cannot be used for contents: {why}", path.display()));
        // Absolute, because the program may change its working directory.
        let directory = directory.map(|path| path.canonicalize().map_err(|error| wrong(path, &error))).transpose()?;
        if let Some(path) = directory.as_deref().filter(|path| !path.is_dir()) {
            return Err(wrong(path, &"it is no directory"));
        }
        backup::set_disk_directory(directory);
        Ok(())
    }

    /// Makes an allocation of at least `bytes` on the device of the current context, and records it. After an error
    /// nothing is left of it.
    pub fn allocate(&self, policy: Placement, bytes: usize, current: &Current) -> Result<CUdeviceptr, Error> {
        let device = current.device();
        if !driver::supports_vmm(device) {
            return Err(Error::Unsupported);
        }
        let _shared = self.share();
        let _relaxed = RelaxedCapture::enter();
        let too_large = Failure { call: "cuMemCreate", code: code::OUT_OF_MEMORY };
        let size = bytes.checked_next_multiple_of(driver::granularity(device)?).ok_or(too_large)?;
        // Of several pieces, the first ones would be had, and have to go again.
        if size > driver::PHYSICAL_PIECE && driver::memory_info().is_ok_and(|(_, total)| size as u64 > total) {
            return Err(too_large.into());
        }
        self.check_margin(device, size)?;
        let (memory, addresses) = self.take(device, size)?;
        let allocation = Allocation::new(policy, bytes, current, memory, addresses);
        let address = allocation.address();
        self.allocations.insert(address, Arc::new(allocation));
        Ok(address)
    }

    /// New memory, mapped and accessible.
    fn take(&self, device: CUdevice, bytes: usize) -> Result<(Physical, Arc<Addresses>), Failure> {
        let mut memory = Physical::create(device, bytes).or_else(|failure| {
            // What an earlier release was refused may be had now.
            if failure.code == code::OUT_OF_MEMORY && driver::sweep() { Physical::create(device, bytes) } else { Err(failure) }
        })?;
        let addresses = Arc::new(Addresses::reserve(bytes)?);
        memory.map(&addresses)?;
        self.open(device, [&memory])?;
        Ok((memory, addresses))
    }

    fn check_margin(&self, device: CUdevice, size: usize) -> Result<(), Error> {
        let margin = self.margin.load(Ordering::Relaxed);
        if margin == 0 {
            return Ok(());
        }
        let needed = (size as u64).saturating_add(margin);
        let (free, _) = driver::memory_info()?;
        if needed > free { Err(Error::DeviceMemory(Shortage { device, uuid: None, needed, free, holders: Vec::new() })) } else { Ok(()) }
    }

    /// Frees the allocation at `address`, active or paused. `None`: it is not managed. After an error it is still there.
    pub fn free(&self, address: CUdeviceptr, after: After) -> Option<Result<(), Error>> {
        let allocation = self.allocations.get(&address).map(|entry| Arc::clone(&entry))?;
        // Before the lock: the work may take long, and a pause that waits for the lock would keep others from allocating.
        if let Err(error) = self.wait_before_free(&allocation, after) {
            return Some(Err(error));
        }
        drop(allocation);
        let _shared = self.share();
        // Taken out first, so that of two frees of one address exactly one succeeds.
        let (_, allocation) = self.allocations.remove(&address)?;
        let freed = allocation.end().map_err(Error::from);
        if freed.is_err() {
            self.allocations.insert(address, allocation);
        }
        Some(freed)
    }

    /// Waits for what a free must wait for.
    fn wait_before_free(&self, allocation: &Allocation, after: After) -> Result<(), Error> {
        let _relaxed = RelaxedCapture::enter();
        if allocation.is_paused() {
            return Ok(());
        }
        match after {
            After::Stream(stream) => Ok(stream.synchronize()?),
            After::AllWork => Ok(drain::wait(self.contexts_that_use([allocation]))?),
        }
    }

    /// The contexts whose work may use the memory of these allocations: those that they were made in, and those of the
    /// peers that their devices were opened to.
    pub(crate) fn contexts_that_use<'a>(&self, allocations: impl IntoIterator<Item = &'a Allocation>) -> BTreeSet<Context> {
        let peers = self.peers.read().unwrap_or_else(PoisonError::into_inner);
        let using = |allocation: &'a Allocation| {
            let of_peers = peers.iter().filter(move |((_, other), _)| *other == allocation.device).map(|(_, context)| *context);
            std::iter::once(allocation.context()).chain(of_peers)
        };
        allocations.into_iter().flat_map(using).collect()
    }

    /// Drops the allocations that a reset of the device's primary context destroys.
    pub fn forget_device(&self, device: CUdevice) {
        let Ok(Some(primary)) = Current::primary_of(device) else { return };
        self.peers.write().unwrap_or_else(PoisonError::into_inner).retain(|(one, other), _| *one != device && *other != device);
        let _exclusive = self.exclude();
        let doomed: Vec<_> = self.snapshot().into_iter().filter(|allocation| allocation.context() == primary).collect();
        // An error of the device's work is no reason to keep what is about to go.
        let _ = drain::wait(self.contexts_that_use(doomed.iter().map(|allocation| &**allocation)));
        self.drop_all(doomed);
        backup::forget_context(primary);
    }

    /// Drops allocations whose context the program has destroyed: it would have taken memory of CUDA's own with it.
    pub(crate) fn drop_gone(&self) {
        let contexts: BTreeSet<_> = self.snapshot().iter().map(|allocation| allocation.context()).collect();
        for gone in contexts.into_iter().filter(|context| context.is_gone()) {
            self.drop_all(self.snapshot().into_iter().filter(|allocation| allocation.context() == gone));
            self.peers.write().unwrap_or_else(PoisonError::into_inner).retain(|_, context| *context != gone);
            backup::forget_context(gone);
        }
    }

    fn drop_all(&self, doomed: impl IntoIterator<Item = Arc<Allocation>>) {
        for allocation in doomed {
            self.allocations.remove(&allocation.address());
            if let Err(error) = allocation.end() {
                log::debug!("{error}; will be tried again");
            }
        }
    }

    /// Lets the device of the current context use the memory of `other`, what there is and what comes. Memory of
    /// `cudaMalloc` is opened to peers by `cudaDeviceEnablePeerAccess`; for virtual memory the driver wants it said of each
    /// mapping.
    pub fn enable_peer(&self, current: &Current, other: CUdevice) -> Result<(), Error> {
        let device = current.device();
        let _exclusive = self.exclude();
        let of_other: Vec<_> = self.snapshot().into_iter().filter(|allocation| allocation.device == other).collect();
        of_other.iter().try_for_each(|allocation| allocation.let_in(device))?;
        self.peers.write().unwrap_or_else(PoisonError::into_inner).insert((device, other), current.context());
        Ok(())
    }

    /// From now on, memory of `other` is no longer opened to `device`. What is open stays open until it is paused.
    pub fn disable_peer(&self, device: CUdevice, other: CUdevice) {
        self.peers.write().unwrap_or_else(PoisonError::into_inner).remove(&(device, other));
    }

    /// Lets a device use its own mapped memory, and those of its peers that may.
    pub(crate) fn open<'a>(&self, owner: CUdevice, memories: impl IntoIterator<Item = &'a Physical>) -> Result<(), Failure> {
        let peers: Vec<_> = {
            let peers = self.peers.read().unwrap_or_else(PoisonError::into_inner);
            peers.keys().filter(|(_, other)| *other == owner).map(|(device, _)| *device).collect()
        };
        let memories: Vec<_> = memories.into_iter().collect();
        std::iter::once(owner).chain(peers).try_for_each(|device| driver::let_in(device, memories.iter().copied()))
    }

    /// The allocation that `address` lies in.
    pub fn find(&self, address: CUdeviceptr) -> Option<Arc<Allocation>> {
        let exact = self.allocations.get(&address).map(|entry| Arc::clone(&entry));
        exact.or_else(|| self.snapshot().into_iter().find(|allocation| allocation.contains(address)))
    }

    /// The addresses of all allocations.
    pub fn addresses(&self) -> Vec<CUdeviceptr> {
        self.snapshot().iter().map(|allocation| allocation.address()).collect()
    }

    /// All allocations, by address, without holding the map.
    pub(crate) fn snapshot(&self) -> Vec<Arc<Allocation>> {
        let mut all: Vec<_> = self.allocations.iter().map(|entry| Arc::clone(&entry)).collect();
        all.sort_unstable_by_key(|allocation| allocation.address());
        all
    }

    pub(crate) fn share(&self) -> RwLockReadGuard<'_, ()> {
        self.transition.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn exclude(&self) -> RwLockWriteGuard<'_, ()> {
        self.transition.write().unwrap_or_else(PoisonError::into_inner)
    }
}
