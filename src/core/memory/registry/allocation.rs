//! One allocation: physical memory, its contents, and the addresses where the program has it.
//!
//! `cudaMalloc` and similar functions make one with one mapping. A program that manages virtual memory itself (`cuMemCreate`) gets a handle
//! from the library and maps it wherever and as often as it likes (`handles`).
//!
//! Each allocation has physical memory of its own. Sharing pieces between adjacent ones made many small ones faster to pause, but not a
//! swap of two processes; the driver takes a piece back only as a whole, so frees were late; and a program that maps physical memory itself
//! needs a handle for each allocation. An allocation that is copied although the program has it mapped nowhere, or read-only, gets
//! addresses of the library's own.

use super::Requester;
use super::lending::{Lending, Token};
use super::registrant::{Registrant, RegistrantMark};
use super::state::{PausedBy, State};
use crate::contexts;
use crate::events::{self, Change, Owner, Presence};
use crate::limit::Charge;
use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, TryLockError, Weak};
use vramctl_backup::Backup;
use vramctl_config::CpuBackupBackend;
use vramctl_driver::{
    self as driver, Access, Account, Addresses, CUdevice, CUdeviceptr, Context, Event, Extent, Extras, Physical, Place, Properties,
    StreamId,
};
use vramctl_host::Unpoison;
use vramctl_model::{Failure, Participants, Policy, Span, StatusCode, code};

/// What an allocation is recorded under.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// The tag that selects it in pauses and resumes.
    pub tag: Arc<str>,
    /// What happens to its contents while it is paused.
    pub backup: Policy,
    /// Whether host memory for its contents may stay after a resume (`pinned`) or is freed before the resume returns
    /// (`mmap`).
    pub backend: CpuBackupBackend,
}

/// What the program got, and the physical memory that currently backs it.
#[derive(Debug)]
pub struct Allocation {
    /// The tag that selects it in pauses and resumes.
    pub tag: Arc<str>,
    /// What happens to its contents while it is paused, unless the pause overrides it.
    pub backup: Policy,
    /// The kind of host memory for its contents.
    pub backend: CpuBackupBackend,
    /// The memory's device. Of the host's memory: the device of the context that it was made in.
    pub device: CUdevice,
    /// Who asked for it, if known.
    pub requester: OnceLock<Requester>,
    bytes: usize,
    origin: Origin,
    contents: Mutex<Contents>,
    presence: Presence,
}

/// A place in a stream.
#[derive(Debug)]
pub struct FreedAt {
    /// `None`: the driver does not distinguish streams.
    pub stream: Option<StreamId>,
    /// Marks the work queued on the stream before that place.
    pub before: Event,
    /// The context of allocations in the stream.
    pub owner: Context,
}

impl FreedAt {
    pub fn is_in(&self, stream: Option<StreamId>) -> bool {
        stream.is_some() && self.stream == stream
    }
}

/// How the program got the memory.
#[derive(Debug)]
pub enum Origin {
    /// From `cudaMalloc` or the like.
    Malloc(Malloc),
    /// From its own `cuMemCreate`. It maps the memory itself.
    Created {
        /// The program's handle.
        handle: u64,
        /// What it asked for.
        properties: Properties,
    },
    /// From `cuMemImportFromShareableHandle`: another process owns it (`imports`). It is neither counted nor paused here.
    Imported {
        /// The program's handle.
        handle: u64,
        /// What the owner asked for.
        properties: Properties,
        /// The owner's name for it.
        token: Token,
    },
}

/// Memory from `cudaMalloc` or the like, which returned one address.
#[derive(Debug)]
pub struct Malloc {
    /// That address.
    pub address: CUdeviceptr,
    /// Bytes that the program asked for.
    pub requested: usize,
    /// Whether it stands for memory from the device's default pool (`cudaMallocAsync`), to which access is given for the whole pool.
    pub from_pool: bool,
    /// The place in a stream at which the memory was freed before, if it was.
    pub(in crate::memory) order: Option<Arc<FreedAt>>,
}

impl Origin {
    /// Whether it is from `cudaMalloc` or the like.
    pub fn is_malloc(&self) -> bool {
        matches!(self, Self::Malloc(_))
    }

    /// What `cudaMalloc` or the like was asked for.
    pub fn malloc(&self) -> Option<&Malloc> {
        if let Self::Malloc(malloc) = self { Some(malloc) } else { None }
    }

    /// What `cuMemCreate` was asked for.
    pub fn properties(&self) -> Option<&Properties> {
        match self {
            Self::Malloc(_) => None,
            Self::Created { properties, .. } | Self::Imported { properties, .. } => Some(properties),
        }
    }

    /// The owner's name for imported memory.
    pub(in crate::memory) fn token(&self) -> Option<&Token> {
        if let Self::Imported { token, .. } = self { Some(token) } else { None }
    }
}

/// What changes during the life of an allocation.
#[derive(Debug)]
pub struct Contents {
    /// Where the contents are.
    pub state: State,
    /// Where it is mapped when active, by address: one handle may stand behind each page of a large reservation.
    pub mappings: BTreeMap<CUdeviceptr, Mapping>,
    /// How often the program must still release its handle.
    pub references: usize,
    /// How often it has been paused.
    pub pauses: u64,
    /// The registrant of the physical memory for as long as that exists; it cannot be replaced unnoticed.
    known_to: Option<&'static str>,
    /// Registrants that last as long as their mark exists.
    marks: Vec<Weak<Registrant>>,
    /// Which other processes have it open.
    pub lending: Lending,
    /// What it counts of the limit, if there is one: also while it is paused.
    pub charge: Option<Charge>,
    /// A context of the device, for copies.
    context: Context,
}

/// One place where the program has the memory.
#[derive(Debug, Clone)]
pub struct Mapping {
    /// The addresses.
    pub place: Place,
    /// The devices with access; `None`: those that have it to all such memory of the device (`peers`).
    pub access: Option<Arc<[Access]>>,
    /// Whether the driver has mapped it, or will without doubt. It could not be asked if the program mapped or opened the memory while it was
    /// paused.
    pub is_tried: bool,
}

impl Mapping {
    /// First address.
    pub fn address(&self) -> CUdeviceptr {
        self.place.span().address
    }

    /// Whether the device may read and write there.
    fn is_open_to(&self, device: CUdevice) -> bool {
        self.access.as_ref().is_none_or(|access| access.iter().any(|access| access.is_full_for(device)))
    }
}

impl Contents {
    /// Where it is mapped, too.
    pub fn add(&mut self, mapping: Mapping) {
        self.mappings.insert(mapping.address(), mapping);
    }

    /// The mapping around an address.
    pub fn at(&self, address: CUdeviceptr) -> Option<&Mapping> {
        let (base, mapping) = self.mappings.range(..=address).next_back()?;
        (address - base < mapping.place.span().bytes as u64).then_some(mapping)
    }

    /// The registrant of the physical memory, if any; then the memory cannot be replaced.
    pub fn registrant(&self) -> Option<&'static str> {
        let marked = self.marks.iter().find_map(Weak::upgrade).map(|registrant| registrant.call);
        marked.or(self.known_to).or_else(|| self.lending.kept_open())
    }

    /// Which other processes have the memory open, except those that take part in the pause.
    pub fn lent_to_others(&self, participants: &Participants) -> BTreeSet<u32> {
        self.lending.to_others(participants, self.pauses)
    }

    /// Records a permanent registrant.
    pub(in crate::memory) fn registered_by(&mut self, registrant: &'static str) {
        self.known_to = Some(registrant);
    }

    /// Records a registrant that lasts as long as the mark exists.
    pub(in crate::memory) fn mark(&mut self, mark: &RegistrantMark) {
        self.marks.retain(|known| known.strong_count() > 0 && !Weak::ptr_eq(known, &Arc::downgrade(mark)));
        self.marks.push(Arc::downgrade(mark));
    }
}

impl Allocation {
    /// Active memory with these mappings. `context`: of the device, for copies.
    pub(in crate::memory) fn new(
        placement: Placement,
        device: CUdevice,
        context: Context,
        memory: Physical,
        mappings: BTreeMap<CUdeviceptr, Mapping>,
        origin: Origin,
    ) -> Self {
        let bytes = memory.bytes();
        let contents = Contents {
            state: State::active(memory, None),
            mappings,
            references: 1,
            pauses: 0,
            known_to: None,
            marks: Vec::new(),
            lending: Lending::default(),
            charge: None,
            context,
        };
        let made = Self {
            tag: placement.tag,
            backup: placement.backup,
            backend: placement.backend,
            device,
            requester: OnceLock::new(),
            bytes,
            origin,
            contents: Mutex::new(contents),
            presence: Presence::default(),
        };
        made.record(Change::Allocated);
        made
    }

    /// Hands active memory, which the program has freed at this place in a stream, on to a new allocation in a context. `None` if it is not
    /// active, or if anybody outside the program may know the physical memory.
    pub(in crate::memory) fn hand_on(
        &self,
        placement: Placement,
        requested: usize,
        context: Context,
        order: &Arc<FreedAt>,
    ) -> Option<Self> {
        let malloc = self.origin.malloc()?;
        let mut contents = self.contents();
        if !contents.state.is_active() || contents.registrant().is_some() || contents.lending.has_begun() {
            return None;
        }
        let State::Active(mut present) = contents.state.free() else { return None };
        let (mappings, charge) = (mem::take(&mut contents.mappings), contents.charge.take());
        drop(contents);
        if placement.tag != self.tag {
            present.memory.count_for(Account::of(self.device, &placement.tag));
        }
        self.record(Change::Freed);
        let origin = Malloc { address: malloc.address, requested, from_pool: malloc.from_pool, order: Some(Arc::clone(order)) };
        let made = Self::new(placement, self.device, context, present.memory, mappings, Origin::Malloc(origin));
        made.contents().charge = charge;
        Some(made)
    }

    /// Tells whoever counts the memory of this process. Imports are their owners'.
    fn record(&self, change: Change) {
        if let Some(device) = self.on_device().filter(|_| self.origin.token().is_none()) {
            events::change(change, Owner::Tag(&self.tag), Some(device), self.bytes, &self.presence);
        }
    }

    /// Publishes it, for who begins to count.
    pub(in crate::memory) fn tell_that_it_is_there(&self) {
        if let Some(device) = self.on_device().filter(|_| self.origin.token().is_none()) {
            events::tell_presence(Owner::Tag(&self.tag), Some(device), self.bytes, &self.presence);
        }
    }

    /// Whether it is memory of the host: made by `cuMemCreate` to be passed to other processes, as NCCL does (`NCCL_CUMEM_HOST_ENABLE`). Nothing of it is
    /// on a device, so it is away only while nothing may stay: what others have imported of it cannot be restored.
    pub fn is_on_host(&self) -> bool {
        self.origin.properties().is_some_and(Properties::is_on_host)
    }

    /// The device whose memory it takes.
    pub fn on_device(&self) -> Option<CUdevice> {
        (!self.is_on_host()).then_some(self.device)
    }

    /// What the driver would answer to an access, were the memory there.
    pub fn check(&self, access: Access) -> Result<(), StatusCode> {
        match (self.is_on_host(), access.location.device()) {
            (false, _) => access.check(self.device),
            // Each device reaches it.
            (true, Some(device)) => access.check(device),
            (true, None) if access.location.is_host() => Ok(()),
            (true, None) => Err(code::NOT_SUPPORTED),
        }
    }

    /// Its key in the registry: the address that `cudaMalloc` returned, or the handle that `cuMemCreate` did.
    pub fn key(&self) -> u64 {
        match &self.origin {
            Origin::Malloc(malloc) => malloc.address,
            Origin::Created { handle, .. } | Origin::Imported { handle, .. } => *handle,
        }
    }

    /// How the program got it.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Whether it stands for memory from the device's default pool.
    pub fn is_from_pool(&self) -> bool {
        self.origin.malloc().is_some_and(|malloc| malloc.from_pool)
    }

    /// The address of its first byte for copies: that of the first mapping that its device may read and write. `None` if there is no such
    /// mapping (see [`make_reachable`](Self::make_reachable)).
    pub fn address(&self) -> Option<CUdeviceptr> {
        match self.origin.malloc() {
            Some(malloc) => Some(malloc.address),
            None => self.contents().mappings.values().find(|mapping| mapping.is_open_to(self.device)).map(Mapping::address),
        }
    }

    /// Bytes of device memory when active: the request rounded up to the device's granularity.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its location. The address is 0 while there is none.
    pub fn extent(&self) -> Extent {
        let address = self.address().unwrap_or_default();
        Extent { context: self.context_for_copies(), device: self.device, address, bytes: self.bytes }
    }

    /// The offset of `address` in it.
    pub fn offset_of(&self, address: CUdeviceptr) -> Option<usize> {
        let base = match self.origin.malloc() {
            Some(malloc) => malloc.address,
            None => self.contents().at(address)?.address(),
        };
        address.checked_sub(base).filter(|offset| *offset < self.bytes as u64).map(|offset| offset as usize)
    }

    /// The program's address range around `address` (the whole `cudaMalloc` allocation, or one mapping), and whether any device has access.
    pub fn place_of(&self, address: CUdeviceptr) -> Option<(Span, bool)> {
        if let Some(malloc) = self.origin.malloc() {
            let is_inside = address.checked_sub(malloc.address).is_some_and(|offset| offset < malloc.requested as u64);
            return is_inside.then_some((Span { address: malloc.address, bytes: malloc.requested }, true));
        }
        let contents = self.contents();
        let mapping = contents.at(address)?;
        let access = mapping.access.as_ref()?;
        Some((mapping.place.span(), access.iter().any(|access| access.is_any())))
    }

    /// The context it was allocated in, or another of its device if that was destroyed and the memory was not.
    pub fn context(&self) -> Context {
        self.contents().context
    }

    /// A context of the device for copies.
    pub fn context_for_copies(&self) -> Context {
        contexts::for_copies(self.device, self.context())
    }

    /// Whether it is destroyed with its context, as CUDA's plain memory is. Memory of `cuMemCreate` stays.
    pub fn goes_with_context(&self) -> bool {
        self.origin.is_malloc()
    }

    /// Uses another context of the device from now on.
    pub fn move_to(&self, context: Context) {
        self.contents().context = context;
    }

    /// Where the contents are now. The lock is held briefly, but also while the driver maps or unmaps; a concurrent status waits for that.
    pub fn contents(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unpoisoned()
    }

    /// The same, unless somebody has the lock.
    pub fn try_contents(&self) -> Option<MutexGuard<'_, Contents>> {
        match self.contents.try_lock() {
            Ok(contents) => Some(contents),
            Err(TryLockError::Poisoned(contents)) => Some(contents.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Releases memory that a pause has unmapped. From here on, the contents are only where they were `saved`.
    pub(crate) fn release(&self, saved: Option<Arc<Backup>>) {
        self.record(Change::Paused);
        let mut contents = self.contents();
        let before = contents.state.release(saved);
        let exports = contents.lending.forget_exports();
        contents.pauses += 1;
        // The registration was of these pages.
        contents.known_to = None;
        contents.marks.retain(|mark| mark.upgrade().is_some_and(|registrant| registrant.knows_addresses));
        // The driver and the kernel free these without the lock.
        drop(contents);
        drop((before, exports));
    }

    /// Makes released memory active again. Returns the state before: dropping that frees the backup, unless it is `retained`.
    pub(crate) fn activate(&self, memory: Physical, retained: Option<Arc<Backup>>) -> State {
        self.record(Change::Resumed);
        self.contents().state.activate(memory, retained)
    }

    /// Takes the memory of an import away, to be dropped without a lock. The addresses and the handle stay the program's.
    pub(in crate::memory) fn give_up(&self) -> Option<Physical> {
        let mut contents = self.contents();
        if !contents.state.is_active() {
            return None;
        }
        let State::Active(present) = contents.state.release(None) else { return None };
        Some(present.memory)
    }

    /// Puts memory that has just been imported where the program has the mappings of an import now, with their access.
    pub(in crate::memory) fn take_up(&self, mut memory: Physical) -> Result<(), Failure> {
        let mut contents = self.contents();
        for Mapping { place, access, .. } in contents.mappings.values() {
            memory.map(place)?;
            driver::open([(place.span(), access.clone().unwrap_or_default())])?;
        }
        contents.state.activate(memory, None);
        Ok(())
    }

    /// New physical memory, mapped at all of the program's mappings, not accessible yet.
    pub fn create_again(&self) -> Result<Physical, Failure> {
        let account = Account::of(self.device, &self.tag);
        let mut memory = match &self.origin {
            Origin::Malloc(malloc) if malloc.from_pool => Physical::create_with(account, self.bytes, Extras::OF_POOLS)?,
            Origin::Malloc(_) => Physical::create(account, self.bytes)?,
            Origin::Created { properties, .. } | Origin::Imported { properties, .. } => {
                Physical::create_as(properties, account, self.bytes)?
            }
        };
        let places: Vec<_> = self.contents().mappings.values().map(|mapping| mapping.place.clone()).collect();
        places.iter().try_for_each(|place| memory.map(place))?;
        Ok(memory)
    }

    /// Makes sure that there are addresses at which its device can read and write it: the program may not have mapped it, or only
    /// read-only. If it has physical memory now, that is mapped there, not accessible until opened. Returns whether it has.
    pub fn make_reachable(&self) -> Result<bool, Failure> {
        let mut contents = self.contents();
        if contents.mappings.values().any(|mapping| mapping.is_open_to(self.device)) {
            return Ok(false);
        }
        let place = Place::of(&Arc::new(Addresses::reserve(self.bytes)?));
        if let Some(memory) = contents.state.memory_mut() {
            memory.map(&place)?;
        }
        contents.add(Mapping { place, access: None, is_tried: true });
        Ok(contents.state.memory().is_some())
    }

    /// Undoes [`make_reachable`](Self::make_reachable).
    pub fn make_unreachable(&self) {
        let mut contents = self.contents();
        let is_added = |mapping: &Mapping| mapping.access.is_none();
        let added: Vec<_> = contents.mappings.values().filter(|mapping| is_added(mapping)).map(Mapping::address).collect();
        contents.mappings.retain(|_, mapping| !is_added(mapping));
        for address in added {
            if let Some(memory) = contents.state.memory_mut() {
                memory.unmap_from(address);
            }
        }
    }

    /// The addresses and the devices with access. `usual`: those of memory with no access of its own.
    pub fn ranges(&self, usual: &Arc<[Access]>) -> Vec<(Span, Arc<[Access]>)> {
        let access = |mapping: &Mapping| Arc::clone(mapping.access.as_ref().unwrap_or(usual));
        self.contents().mappings.values().map(|mapping| (mapping.place.span(), access(mapping))).collect()
    }

    /// The other devices to which the program has given access.
    pub fn guests(&self) -> Vec<CUdevice> {
        let contents = self.contents();
        let listed = contents.mappings.values().filter_map(|mapping| mapping.access.as_ref()).flat_map(|access| access.iter());
        listed
            .filter(|access| access.is_any())
            .filter_map(|access| access.location.device())
            .filter(|device| *device != self.device)
            .collect()
    }

    /// Releases the memory and the saved contents for good. What the driver refuses to take back is late ([`driver::sweep`]): to the
    /// program it is freed, as after `cudaFree`, which has nothing to refuse.
    pub fn end(&self) {
        let mut contents = self.contents();
        let is_released = matches!(contents.state, State::Released(_));
        let before = (contents.state.free(), contents.lending.forget_exports(), contents.charge.take());
        // Readers need not wait until the driver has freed these.
        drop(contents);
        self.record(if is_released { Change::FreedPaused } else { Change::Freed });
        drop(before);
    }

    /// Whether nobody needs memory of `cuMemCreate` any more: the driver keeps it while a handle or a mapping refers to it, in any process.
    pub(in crate::memory) fn is_unused(&self) -> bool {
        !self.contents().lending.is_open() && self.is_given_up()
    }

    /// Whether the program does not need it any more. Other processes that have it open do.
    pub(crate) fn is_given_up(&self) -> bool {
        let contents = self.contents();
        contents.references == 0 && contents.mappings.values().all(|mapping| mapping.access.is_none())
    }

    /// Whether its addresses must not be used: whatever it is, it is not active.
    pub fn is_unmapped(&self) -> bool {
        !self.contents().state.is_active()
    }
}

/// Unmaps active memory for a pause, adjacent ranges in one call; it keeps its contents. On error, some may be unmapped.
pub(crate) fn unmap(allocations: &[Arc<Allocation>], by: PausedBy) -> Result<(), Failure> {
    let mut contents: Vec<_> = allocations.iter().map(|allocation| allocation.contents()).collect();
    let unmapped = driver::unmap(&mut contents.iter_mut().filter_map(|contents| contents.state.memory_mut()).collect::<Vec<_>>());
    for contents in &mut contents {
        if unmapped.is_ok() || contents.state.memory().is_some_and(|memory| !memory.is_mapped()) {
            contents.state.unmapped(by);
        }
    }
    unmapped
}
