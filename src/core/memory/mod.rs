//! The registry of this process's allocations, by address, and how they are made and freed.
//!
//! Locks are taken in this order:
//!
//! 1. the gate ([`gate`](crate::gate)), which a pause closes first;
//! 2. `Memory::transition`, for reading to allocate and free, for writing to pause and resume;
//! 3. a map of the registry or of another room, for a moment: no call of the driver and no copy is made meanwhile;
//! 4. the [contents](Allocation::contents) of one allocation, also while the driver maps or unmaps it.
//!
//! Memory of other processes has locks of its own, for which the transition lock need not be held: a connection, then what is borrowed
//! ([`borrow`]).

pub mod guard;
mod handles;
pub mod ipc;
pub mod limited;
pub mod obstacles;
mod peers;
pub mod region;
pub mod registry;
pub mod reserved;
mod stream_ordered;
pub(crate) mod under_way;

pub use ipc::{aside, borrow, imports, share};
pub use obstacles::{Binding, RegisteredUntil, communicators, sightings, unmanaged};
pub use peers::note_crossing;
pub use registry::{Allocation, Level, Malloc, Origin, PausedBy, Placement, PoolUse, Registry, Requester, State, is_ours};
pub(crate) use registry::{Released, unmap};
pub(crate) use under_way::UnderWay;

use crate::{contexts, drain, limit, quiet};
use obstacles::{Refusals, Registrations};
use peers::Peers;
use registry::Mapping;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use stream_ordered::InOrder;
use vramctl_backup::{self as backup, Backup};
use vramctl_config::{Config, DiskDirectory};
use vramctl_driver::{
    self as driver, Account, Addresses, CUdevice, CUdeviceptr, Context, Current, Ending, Extras, Manner, Physical, Place, RelaxedCapture,
    StreamHandle,
};
use vramctl_host::{PerProcess, Unpoison, exit};
pub use vramctl_model::NCCL;
use vramctl_model::{Error, Failure, Obstacle, PauseRequest, Shortage, Span, StatusCode, checked_tag, code};

/// Everything this process has under management.
pub struct Memory {
    /// The allocations.
    pub registry: Registry,
    /// What other libraries have registered of them.
    pub registrations: Registrations,
    /// Held for reading to allocate and free, for writing to pause and resume.
    pub(crate) transition: RwLock<()>,
    /// The pause or resume in progress, for status. Held briefly.
    under_way: Mutex<Option<under_way::UnderWay>>,
    /// Tag of allocations outside regions.
    process_tag: RwLock<Option<Arc<str>>>,
    /// Bytes an allocation must leave free on its device.
    margin: AtomicU64,
    /// Bytes written to guards and not reported yet.
    written: AtomicU64,
    /// Access of devices to others' memory.
    peers: Peers,
    /// Devices whose driver refuses virtual memory.
    pub(crate) refusals: Refusals,
}

static MEMORY: PerProcess<Memory> = PerProcess::new(Memory::new);

impl Memory {
    fn new() -> Self {
        backup::quiet::set_finder(quiet::find);
        Self {
            registry: Registry::default(),
            registrations: Registrations::default(),
            transition: RwLock::default(),
            under_way: Mutex::default(),
            process_tag: RwLock::new(Config::get().tag.clone()),
            margin: AtomicU64::new(0),
            written: AtomicU64::new(0),
            peers: Peers::default(),
            refusals: Refusals::default(),
        }
    }

    /// This process's managed memory.
    #[inline]
    pub fn get() -> &'static Self {
        MEMORY.get()
    }

    /// This process's managed memory, if it has been used yet.
    #[inline]
    pub fn existing() -> Option<&'static Self> {
        MEMORY.existing()
    }

    /// Tag of allocations outside regions; `None` if they are left to CUDA.
    pub fn process_tag(&self) -> Option<Arc<str>> {
        self.process_tag.read().unpoisoned().clone()
    }

    /// Sets the tag of future allocations outside regions; `None` leaves them to CUDA. Existing allocations keep their tags.
    pub fn set_process_tag(&self, tag: Option<&str>) -> Result<(), Error> {
        let tag = tag.map(checked_tag).transpose()?;
        *self.process_tag.write().unpoisoned() = tag;
        Ok(())
    }

    /// From now on, allocations that would leave less than `bytes` free on their device fail with out of memory.
    pub fn set_margin(&self, bytes: u64) {
        self.margin.store(bytes, Ordering::Relaxed);
    }

    /// Sets whether a tag's saved contents stay in host memory after a resume, overriding `VRAMCTL_RETAIN`. Without a tag,
    /// it applies to every tag without its own setting. `None` removes the setting.
    ///
    /// Drops retained backups that are no longer wanted. For newly retained tags, unchanged contents are recognized from the
    /// next pause on. Waits for a pause or resume in progress.
    pub fn set_retain(&self, tag: Option<&str>, keep: Option<bool>) -> Result<(), Error> {
        self.set_retain_in_resumes(tag, keep)?;
        drop(self.take_retained(&self.exclude(), |tag| !backup::retains_unchanged(tag)));
        Ok(())
    }

    /// Gives up the copies of active memory that nobody has asked for: host memory is short. Not during a pause or resume: then it is time enough the
    /// next time that somebody says so.
    pub fn drop_copies(&self) {
        let Some(exclusive) = self.transition.try_write().ok() else { return };
        let given_up = self.take_retained(&exclusive, |tag| !backup::retains(tag));
        drop(exclusive);
        if !given_up.is_empty() {
            log::info!("host memory is short: dropped the copies of {} allocations that have not changed", given_up.len());
        }
    }

    /// Takes the retained backups of active memory with such tags, to be dropped without the lock.
    fn take_retained(&self, _exclusive: &RwLockWriteGuard<'_, ()>, which: impl Fn(&str) -> bool) -> Vec<Arc<Backup>> {
        let all = self.registry.all().into_iter().filter(|allocation| which(&allocation.tag));
        all.filter_map(|allocation| allocation.contents().state.take_retained()).collect()
    }

    /// Like [`set_retain`](Self::set_retain), but keeps the retained backups of active memory until its next resume.
    pub fn set_retain_in_resumes(&self, tag: Option<&str>, keep: Option<bool>) -> Result<(), Error> {
        let tag = tag.map(checked_tag).transpose()?;
        {
            // Not during a pause, which reads the setting more than once.
            let _exclusive = self.exclude();
            backup::set_retain(tag, keep);
        }
        let retained = self.registry.snapshot().into_iter().filter(|allocation| backup::retains(&allocation.tag));
        let contexts: BTreeMap<_, _> = retained.map(|allocation| (allocation.context(), Arc::clone(&allocation.tag))).collect();
        for (context, tag) in contexts {
            // A destroyed context needs no preparation.
            if let Ok(current) = Current::push(context) {
                backup::get_ready(&current, &tag);
            }
        }
        Ok(())
    }

    /// Sets the directory where future pauses keep contents with policy `disk`; `None` restores `VRAMCTL_DISK_DIR`. It must
    /// exist, so that a wrong path fails now and not at the next pause. With `named`, each allocation gets a named file
    /// there.
    pub fn set_disk_directory(&self, directory: Option<&Path>, named: bool) -> Result<(), Error> {
        let wrong = |path: &Path, why: &dyn fmt::Display| Error::Disk(format!("cannot use {} for backups: {why}", path.display()));
        // Absolute, because the program may change its working directory.
        let directory = directory.map(|path| path.canonicalize().map_err(|error| wrong(path, &error))).transpose()?;
        if let Some(path) = directory.as_deref().filter(|path| !path.is_dir()) {
            return Err(wrong(path, &"not a directory"));
        }
        backup::set_disk_directory(directory.map(|path| DiskDirectory { path, named }));
        Ok(())
    }

    /// Allocates at least `bytes` on the current context's device and records the allocation. `in_order`: in the order of this stream, in
    /// place of memory from the device's default pool. Leaves nothing behind on error. Any error but lack of memory means that CUDA itself
    /// must answer.
    pub fn allocate(
        &self,
        placement: &Placement,
        bytes: usize,
        current: &Current,
        in_order: Option<StreamHandle>,
    ) -> Result<CUdeviceptr, Error> {
        let device = current.device();
        if !driver::supports_vmm(device) {
            return Err(Error::Unsupported);
        }
        if let Some(refused) = self.refusals.skip(device) {
            return Err(refused.into());
        }
        contexts::note(current);
        let _relaxed = RelaxedCapture::enter();
        let in_order = in_order.map(|stream| InOrder { placement, bytes, current, stream });
        loop {
            let released = self.registry.released();
            let made = self.reuse_or_create(placement, bytes, current, in_order.as_ref());
            let is_short = made.as_ref().is_err_and(|error| error.cuda_code() == code::OUT_OF_MEMORY);
            if !is_short || !could_fit(device, bytes) {
                return made;
            }
            // Without the lock, because the last of these waits.
            if self.registry.free_up(device, bytes, released) {
                continue;
            }
            let Some(request) = &in_order else { return made };
            if let Some(address) = self.reuse_later(request) {
                return Ok(address);
            }
            if !self.registry.wait_for_own(device, request.stream) || !self.registry.free_up(device, bytes, released) {
                return made;
            }
        }
    }

    fn reuse_or_create(
        &self,
        placement: &Placement,
        bytes: usize,
        current: &Current,
        in_order: Option<&InOrder<'_>>,
    ) -> Result<CUdeviceptr, Error> {
        let _shared = self.share();
        match in_order.and_then(|request| self.reuse(request)) {
            Some(address) => Ok(address),
            None => self.create_new(placement, bytes, current, in_order.is_some()),
        }
    }

    fn create_new(&self, placement: &Placement, bytes: usize, current: &Current, from_pool: bool) -> Result<CUdeviceptr, Error> {
        let device = current.device();
        let too_large = Failure { call: "cuMemCreate", code: code::OUT_OF_MEMORY };
        let granularity = driver::granularity(device);
        if granularity.is_err() {
            self.refusals.note(device, &granularity);
        }
        let size = bytes.checked_next_multiple_of(granularity?).ok_or(too_large)?;
        // Fail early: otherwise the first of several pieces would be created only to be released again.
        if size > driver::PHYSICAL_PIECE && driver::memory_info().is_ok_and(|(_, total)| size as u64 > total) {
            return Err(too_large.into());
        }
        self.check_margin(device, size)?;
        let charge = limited::charge(device, size)?;
        let account = Account::of(device, &placement.tag);
        let taken = if from_pool {
            self.take(&account, size, true, Extras::OF_POOLS)
        } else {
            driver::make_on(device, |extras| self.take(&account, size, false, extras))
        };
        self.refusals.note(device, &taken);
        let (memory, addresses) = taken?;
        let (place, address) = (Place::of(&addresses), addresses.base());
        let origin = Origin::Malloc(Malloc { address, requested: bytes, from_pool, order: None });
        let mappings = BTreeMap::from([(address, Mapping { place, access: None, is_tried: true })]);
        let made = Allocation::new(placement.clone(), device, current.owner(), memory, mappings, origin);
        made.contents().charge = charge;
        self.registry.insert(Arc::new(made));
        Ok(address)
    }

    /// New memory, mapped and accessible.
    fn take(&self, account: &Account, bytes: usize, from_pool: bool, extras: Extras) -> Result<(Physical, Arc<Addresses>), Failure> {
        let device = account.device;
        let mut memory = self.physical(|| Physical::create_with(account.clone(), bytes, extras))?;
        let addresses = Arc::new(if from_pool { Addresses::reserve_in_pool(bytes) } else { Addresses::reserve(bytes) }?);
        let place = Place::of(&addresses);
        memory.map(&place)?;
        driver::open([(place.span(), self.peers.usual_access(device, from_pool))])?;
        Ok((memory, addresses))
    }

    /// New physical memory. Leftovers of failed releases, and memory of destroyed contexts, may make a second try succeed.
    fn physical(&self, create: impl Fn() -> Result<Physical, Failure>) -> Result<Physical, Failure> {
        create().or_else(
            |failure| {
                if failure.code == code::OUT_OF_MEMORY && (driver::sweep() | self.drop_gone()) { create() } else { Err(failure) }
            },
        )
    }

    /// Bytes an allocation must leave free on its device.
    pub fn margin(&self) -> u64 {
        self.margin.load(Ordering::Relaxed)
    }

    fn check_margin(&self, device: CUdevice, size: usize) -> Result<(), Error> {
        let margin = self.margin();
        if margin == 0 {
            return Ok(());
        }
        let needed = (size as u64).saturating_add(margin);
        // A driver that does not say has not refused the memory.
        let Ok((free, _)) = driver::memory_info() else { return Ok(()) };
        if needed <= free {
            return Ok(());
        }
        Err(Error::DeviceMemory(Shortage { device, uuid: driver::uuid(device), index: None, needed, free, holders: Vec::new() }))
    }

    /// Frees the allocation at `address`, active or paused. `None` if it is not managed. Nothing changes on error.
    pub fn free(&self, address: CUdeviceptr) -> Option<Result<(), Error>> {
        let allocation = self.registry.get(address).filter(|allocation| allocation.origin().is_malloc())?;
        // Before taking the lock: the work may take long, and a pause waiting for the lock would block allocations.
        let wait = || self.wait_before_free(&allocation);
        // What a driver refuses once, it may grant a moment later.
        if let Err(failure) = wait().or_else(|failure| if failure.is_refusal() { wait() } else { Err(failure) }) {
            return Some(Err(failure.into()));
        }
        drop(allocation);
        let shared = self.share();
        // Exactly one of two frees of an address succeeds.
        self.registry.remove(address)?.end();
        drop(shared);
        self.let_go();
        Some(Ok(()))
    }

    /// Waits for what `cudaFree` waits for: work in the allocating context and in peers' contexts. A program that uses the
    /// memory in other contexts synchronizes them itself, and may rely on `cudaFree` not blocking on them.
    fn wait_before_free(&self, allocation: &Allocation) -> Result<(), Failure> {
        if matches!(&allocation.contents().state, State::Released(released) if released.guard.is_none()) {
            return Ok(());
        }
        let mut contexts = BTreeSet::from([allocation.context()]);
        contexts.extend(self.peers.contexts_with_access(allocation.device));
        drain::wait(contexts, Manner::AsFree)
    }

    /// The contexts whose work may use these allocations: every context of their devices and of peers with access, and of all devices once
    /// a copy has named contexts.
    pub(crate) fn contexts_that_use<'a>(&self, allocations: impl IntoIterator<Item = &'a Allocation>) -> BTreeSet<Context> {
        let (mut owners, mut devices) = (BTreeSet::new(), BTreeSet::new());
        for allocation in allocations {
            owners.insert(allocation.device);
            devices.extend(allocation.guests());
        }
        devices.extend(&owners);
        devices.extend(self.peers.of_owners(&owners));
        if peers::has_crossed() {
            devices.extend(driver::devices());
        }
        devices.extend(borrow::contexts().into_iter().filter_map(contexts::device_of));
        contexts::of_devices(&devices)
    }

    /// Runs a call of the program's that may end contexts, and drops what has ended with them. What the call waits for may need any thread of
    /// the program, and a pause or resume, so it holds no lock. But it begins and ends between these, which look away from contexts that are ending.
    pub fn ending_context(&self, announce: impl FnOnce() -> Ending, end: impl FnOnce() -> StatusCode) -> StatusCode {
        let ending = {
            let _shared = self.share();
            announce()
        };
        ending.wait_until_unused();
        let answer = end();
        let _relaxed = RelaxedCapture::enter();
        {
            let _shared = self.share();
            drop(ending);
            self.drop_gone();
        }
        self.registry.release_freed();
        answer
    }

    /// Drops allocations whose context the program has reset or destroyed, as CUDA does with its own memory. Returns whether
    /// there were any.
    pub(crate) fn drop_gone(&self) -> bool {
        let gone = contexts::forget_gone();
        borrow::forget_gone();
        let doomed = self.ending_with(&gone);
        let any = !doomed.is_empty();
        self.drop_all(doomed);
        // The device may have had no other context when its last one ended, so look again every time.
        let rest = self.registry.snapshot().into_iter().filter(|allocation| !allocation.goes_with_context());
        for allocation in rest.filter(|allocation| !contexts::knows(allocation.context())) {
            if let Some(other) = contexts::of_devices(&BTreeSet::from([allocation.device])).first() {
                allocation.move_to(*other);
            }
        }
        self.peers.forget_gone(&gone);
        gone.into_iter().for_each(backup::forget_context);
        any
    }

    /// The allocations that end with these contexts.
    fn ending_with(&self, contexts: &[Context]) -> Vec<Arc<Allocation>> {
        let mut all = self.registry.all();
        all.retain(|allocation| allocation.goes_with_context() && contexts.contains(&allocation.context()));
        all
    }

    fn drop_all(&self, doomed: impl IntoIterator<Item = Arc<Allocation>>) {
        for allocation in doomed {
            self.registry.remove(allocation.key());
            allocation.end();
        }
        self.let_go();
    }

    /// Gives the devices that the program expects access to mapped memory.
    pub(crate) fn open<'a>(&self, allocations: impl IntoIterator<Item = &'a Allocation>) -> Result<(), Failure> {
        let mut usual = BTreeMap::new();
        let mut ranges = Vec::new();
        for allocation in allocations {
            let kind = (allocation.device, allocation.is_from_pool());
            let usual = usual.entry(kind).or_insert_with(|| self.peers.usual_access(kind.0, kind.1));
            ranges.extend(allocation.ranges(usual));
        }
        ranges.sort_unstable_by_key(|(span, _)| span.address);
        driver::open(ranges)
    }

    /// Maps unmapped memory where it was last, accessible as before: it is active again. On error it is not mapped.
    pub(crate) fn map_again(&self, allocation: &Allocation) -> Result<(), Failure> {
        let mapped = { allocation.contents().state.memory_mut().map_or(Ok(()), Physical::map_again) };
        let opened = mapped.and_then(|()| self.open([allocation]));
        let mut contents = allocation.contents();
        match opened {
            Ok(()) => contents.state.mapped_again(),
            Err(_) => _ = driver::unmap(&mut contents.state.memory_mut().into_iter().collect::<Vec<_>>()),
        }
        opened
    }

    /// Publishes all memory that is on a device ([`Event::IsThere`](crate::events::Event)), for a subscriber that begins to count.
    pub fn tell_what_is_there(&self) {
        self.registry.all().iter().for_each(|allocation| allocation.tell_that_it_is_there());
        unmanaged::tell_what_is_there();
    }

    /// What prevents a suspend of this process.
    pub fn obstacles(&self) -> Vec<Obstacle> {
        self.obstacles_after(&[], &PauseRequest::default())
    }

    /// What would prevent it after a pause of these allocations.
    pub(crate) fn obstacles_after(&self, paused: &[Arc<Allocation>], request: &PauseRequest) -> Vec<Obstacle> {
        obstacles::after(self, paused, borrow::count_after(&request.selection, &request.participants.partners))
    }

    /// Whether any memory in a range is paused, or is another process's that is.
    pub fn is_paused_in(&self, span: Span) -> bool {
        let is_unmapped = self.registry.touched_by(span).iter().any(|allocation| allocation.is_unmapped());
        is_unmapped || borrow::at(span.address).is_some_and(|seen| seen.is_paused)
    }

    pub(crate) fn share(&self) -> RwLockReadGuard<'_, ()> {
        self.transition.read().unpoisoned()
    }

    pub(crate) fn exclude(&self) -> RwLockWriteGuard<'_, ()> {
        self.transition.write().unpoisoned()
    }

    /// Like [`exclude`](Self::exclude), for work that calls the driver: fails in a suspended process, where such calls would block with the
    /// lock held.
    pub(crate) fn exclude_unless_quiesced(&self) -> Result<RwLockWriteGuard<'_, ()>, Error> {
        let lock = self.exclude();
        check_not_quiesced().map(|()| lock)
    }
}

/// Whether a device, the current one, and the limit are as large.
fn could_fit(device: CUdevice, bytes: usize) -> bool {
    let bytes = bytes as u64;
    driver::memory_info().is_ok_and(|(_, total)| bytes <= total)
        && limit::taken(device).and_then(|taken| taken.limit).is_none_or(|limit| bytes <= limit)
}

/// An error while the library's driver calls wait because the process is suspended. Under the transition lock, that does not change.
pub(crate) fn check_not_quiesced() -> Result<(), Error> {
    if exit::is_quiesced() { Err(Error::Suspended) } else { Ok(()) }
}
