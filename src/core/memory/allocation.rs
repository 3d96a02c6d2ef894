//! One allocation: physical memory, its contents, and the addresses where the program has it.
//!
//! `cudaMalloc` and similar functions make one with one mapping. A program that manages virtual memory itself (`cuMemCreate`) gets a handle
//! from the library and maps it wherever and as often as it likes (`handles`).
//!
//! Each allocation has physical memory of its own. Sharing pieces between adjacent ones made many small ones faster to pause, but not a
//! swap of two processes; the driver takes a piece back only as a whole, so frees were late; and a program that maps physical memory itself
//! needs a handle for each allocation. An allocation that is copied although the program has it mapped nowhere, or read-only, gets
//! addresses of the library's own.

use super::freed::FreedAt;
use super::lending::{Lending, Token};
use super::registrant::{Registrant, RegistrantMark};
use super::{Placement, Requester};
use crate::contexts;
use crate::events::{self, Change, Owner};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, TryLockError, Weak};
use vramctl_backup::Backup;
use vramctl_config::CpuBackupBackend;
use vramctl_driver::{
    self as driver, Access, Account, Addresses, CUdevice, CUdeviceptr, Context, Extent, Extras, Physical, Place, Properties,
};
use vramctl_host::Unpoison;
use vramctl_model::{Failure, Policy, Span, StatusCode, TransitionRequest, code};

/// What the program got, and the physical memory that currently backs it.
#[derive(Debug)]
pub struct Allocation {
    /// The tag that selects it in pauses and resumes.
    pub tag: Arc<str>,
    /// What happens to its contents while it is paused, unless the pause overrides it.
    pub backup: Policy,
    /// The kind of host memory for its contents.
    pub backend: CpuBackupBackend,
    /// Bytes the program asked for.
    pub requested: usize,
    /// The memory's device. Of the host's memory: the device of the context that it was made in.
    pub device: CUdevice,
    /// Whether it stands for memory from the device's default pool (`cudaMallocAsync`), to which access is given for the whole pool.
    pub from_pool: bool,
    /// The place in a stream at which the memory was freed before, if it was.
    pub(super) order: Option<Arc<FreedAt>>,
    /// Of memory that the program has imported (`imports`): what its owner calls it. It is neither counted nor paused here.
    pub(super) import: Option<Token>,
    /// Who asked for it, if known.
    pub requester: OnceLock<Requester>,
    bytes: usize,
    key: u64,
    origin: Origin,
    contents: Mutex<Contents>,
}

/// How the program has got memory.
#[derive(Debug)]
pub enum Origin {
    /// From `cudaMalloc` or the like, which gave it one address.
    Malloc,
    /// From its own `cuMemCreate`, with these properties. It maps the memory itself.
    Create(Properties),
}

impl Origin {
    /// Whether it is from `cudaMalloc` or the like.
    pub fn is_malloc(&self) -> bool {
        matches!(self, Self::Malloc)
    }

    /// What the program asked `cuMemCreate` for.
    pub fn properties(&self) -> Option<&Properties> {
        match self {
            Self::Malloc => None,
            Self::Create(properties) => Some(properties),
        }
    }
}

/// Where the contents are. Changes only under the transition lock (exclusive for `memory` and `saved`, shared for changes by the program
/// itself), or after the allocation has been removed from the registry.
#[derive(Debug)]
pub struct Contents {
    /// The physical memory. It is unmapped only during a pause, and after a failed pause that could not map it again; then it still has the
    /// contents.
    pub memory: Option<Physical>,
    /// While paused with a guard: the block that is mapped in place of the memory (`guard`).
    pub guard: Option<Physical>,
    /// While paused: who wants that.
    pub paused_by: PausedBy,
    /// While paused: the contents, or `None` if they were discarded. While active: the last saved contents, if retained.
    pub saved: Option<Arc<Backup>>,
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
    /// A context of the device, for copies.
    context: Context,
}

/// Who wants paused memory to be away.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum PausedBy {
    /// Another process; or nobody, if a failed pause could not map it again. A held program stays held until it is back.
    #[default]
    Others,
    /// Only the program itself.
    Program,
    /// Both: when the other one resumes it, it stays paused.
    Both,
}

impl PausedBy {
    /// With another pause of the same memory.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        if self == other { self } else { Self::Both }
    }

    /// Whether the program itself wants it to be away.
    pub fn is_self_paused(self) -> bool {
        self != Self::Others
    }
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

    /// Which other processes have the memory open, except those that give it up for the request.
    pub fn lent_to_others(&self, request: &TransitionRequest) -> BTreeSet<u32> {
        self.lending.to_others(request, self.pauses)
    }

    /// What the driver currently maps for it, if anything.
    pub(super) fn there(&mut self) -> impl Iterator<Item = &mut Physical> {
        self.memory.iter_mut().chain(self.guard.iter_mut())
    }

    /// Records a permanent registrant.
    pub(super) fn registered_by(&mut self, registrant: &'static str) {
        self.known_to = Some(registrant);
    }

    /// Records a registrant that lasts as long as the mark exists.
    pub(super) fn mark(&mut self, mark: &RegistrantMark) {
        self.marks.retain(|known| known.strong_count() > 0 && !Weak::ptr_eq(known, &Arc::downgrade(mark)));
        self.marks.push(Arc::downgrade(mark));
    }
}

impl Allocation {
    /// An active allocation whose memory is mapped at `at`.
    pub fn new(
        policy: Placement,
        requested: usize,
        current: &driver::Current,
        memory: Physical,
        at: &Arc<Addresses>,
        from_pool: bool,
    ) -> Self {
        let made = Self::with(policy, at.bytes(), current.device(), current.owner(), memory, at.base(), Origin::Malloc);
        let made = Self { requested, from_pool, ..made };
        made.contents().add(Mapping { place: Place::of(at), access: None, is_tried: true });
        made.record(Change::Allocated);
        made
    }

    /// Memory of the program's own `cuMemCreate`, active and not mapped yet.
    pub fn with_handle(
        policy: Placement,
        bytes: usize,
        device: CUdevice,
        current: &driver::Current,
        memory: Physical,
        handle: u64,
        wanted: Properties,
    ) -> Self {
        let made = Self::with(policy, bytes, device, current.owner(), memory, handle, Origin::Create(wanted));
        made.record(Change::Allocated);
        made
    }

    /// Memory of another process, which the program has imported and not mapped yet.
    pub(super) fn imported(
        policy: Placement,
        device: CUdevice,
        context: Context,
        memory: Physical,
        handle: u64,
        wanted: Properties,
        token: Token,
    ) -> Self {
        let bytes = memory.bytes();
        Self { import: Some(token), ..Self::with(policy, bytes, device, context, memory, handle, Origin::Create(wanted)) }
    }

    /// Active, and not mapped yet.
    fn with(policy: Placement, bytes: usize, device: CUdevice, context: Context, memory: Physical, key: u64, origin: Origin) -> Self {
        let contents = Contents {
            memory: Some(memory),
            guard: None,
            paused_by: PausedBy::default(),
            saved: None,
            mappings: BTreeMap::new(),
            references: 1,
            pauses: 0,
            known_to: None,
            marks: Vec::new(),
            lending: Lending::default(),
            context,
        };
        Self {
            tag: policy.tag,
            backup: policy.backup,
            backend: policy.backend,
            requested: bytes,
            device,
            from_pool: false,
            order: None,
            import: None,
            requester: OnceLock::new(),
            bytes,
            key,
            origin,
            contents: Mutex::new(contents),
        }
    }

    /// Hands active memory, which the program has freed at this place, on to a new allocation in a context. `None` if it is paused, or if anybody outside
    /// the program may know the physical memory.
    pub(super) fn hand_on(&self, policy: Placement, requested: usize, context: Context, order: &Arc<FreedAt>) -> Option<Self> {
        let mut contents = self.contents();
        let is_plain = contents.guard.is_none() && contents.registrant().is_none() && !contents.lending.has_begun();
        let mut memory = contents.memory.take_if(|memory| is_plain && memory.is_mapped())?;
        if policy.tag != self.tag {
            memory.count_for(Account::of(self.device, &policy.tag));
        }
        self.record(Change::Freed);
        let (mappings, saved) = (std::mem::take(&mut contents.mappings), contents.saved.take());
        drop(contents);
        drop(saved);
        let made = Self::with(policy, self.bytes, self.device, context, memory, self.key, Origin::Malloc);
        let made = Self { requested, from_pool: self.from_pool, order: Some(Arc::clone(order)), ..made };
        made.contents().mappings = mappings;
        made.record(Change::Allocated);
        Some(made)
    }

    fn record(&self, change: Change) {
        if let Some(device) = self.on_device() {
            events::change(change, Owner::Tag(&self.tag), Some(device), self.bytes);
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
        self.key
    }

    /// How the program has got it.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// The address of its first byte for copies: the first mapping that its device may read and write. The handle, which is no
    /// address, if there is none (see [`make_reachable`](Self::make_reachable)).
    pub fn address(&self) -> CUdeviceptr {
        if self.origin.is_malloc() {
            return self.key;
        }
        self.contents().mappings.values().find(|mapping| mapping.is_open_to(self.device)).map_or(self.key, Mapping::address)
    }

    /// Bytes of device memory when active: the request rounded up to the device's granularity.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its location.
    pub fn extent(&self) -> Extent {
        Extent { context: self.context_for_copies(), device: self.device, address: self.address(), bytes: self.bytes }
    }

    /// The offset of `address` in it.
    pub fn offset_of(&self, address: CUdeviceptr) -> Option<usize> {
        let inside = |base: CUdeviceptr| (base..base + self.bytes as u64).contains(&address).then(|| (address - base) as usize);
        if self.origin.is_malloc() { inside(self.key) } else { self.contents().at(address).and_then(|mapping| inside(mapping.address())) }
    }

    /// The program's address range around `address` (the whole `cudaMalloc` allocation, or one mapping), and whether any device has access.
    pub fn place_of(&self, address: CUdeviceptr) -> Option<(Span, bool)> {
        if self.origin.is_malloc() {
            let is_inside = address.checked_sub(self.key).is_some_and(|offset| offset < self.requested as u64);
            return is_inside.then_some((Span { address: self.key, bytes: self.requested }, true));
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

    /// Replaces the memory and the saved contents. The old ones are freed after the lock is released.
    pub fn replace(&self, memory: Option<Physical>, saved: Option<Arc<Backup>>) {
        self.record(if memory.is_none() { Change::Paused } else { Change::Resumed });
        let before = {
            let mut contents = self.contents();
            let mut exports = Vec::new();
            if memory.is_some() {
                contents.paused_by = PausedBy::default();
            } else {
                exports = contents.lending.forget_exports();
                contents.pauses += 1;
                // The registration was of these pages.
                contents.known_to = None;
                contents.marks.retain(|mark| mark.upgrade().is_some_and(|registrant| registrant.knows_addresses));
            }
            (std::mem::replace(&mut contents.memory, memory), std::mem::replace(&mut contents.saved, saved), exports)
        };
        drop(before);
    }

    /// Of an import: takes the memory away, to be dropped without a lock. The addresses and the handle stay the program's.
    pub(super) fn give_up(&self) -> Option<Physical> {
        self.contents().memory.take()
    }

    /// Of an import: puts memory that has just been imported where the program has the mappings now, with their access.
    pub(super) fn take_up(&self, mut memory: Physical) -> Result<(), Failure> {
        let mut contents = self.contents();
        for Mapping { place, access, .. } in contents.mappings.values() {
            memory.map(place)?;
            driver::open([(place.span(), access.clone().unwrap_or_default())])?;
        }
        contents.memory = Some(memory);
        Ok(())
    }

    /// New physical memory, mapped at all of the program's mappings, not accessible yet.
    pub fn create_again(&self) -> Result<Physical, Failure> {
        let account = Account::of(self.device, &self.tag);
        let mut memory = match &self.origin {
            Origin::Create(wanted) => Physical::create_as(wanted, account, self.bytes)?,
            Origin::Malloc if self.from_pool => Physical::create_with(account, self.bytes, Extras::OF_POOLS)?,
            Origin::Malloc => Physical::create(account, self.bytes)?,
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
        if let Some(memory) = &mut contents.memory {
            memory.map(&place)?;
        }
        contents.add(Mapping { place, access: None, is_tried: true });
        Ok(contents.memory.is_some())
    }

    /// Undoes [`make_reachable`](Self::make_reachable).
    pub fn make_unreachable(&self) {
        let mut contents = self.contents();
        let is_added = |mapping: &Mapping| mapping.access.is_none();
        let added: Vec<_> = contents.mappings.values().filter(|mapping| is_added(mapping)).map(Mapping::address).collect();
        contents.mappings.retain(|_, mapping| !is_added(mapping));
        for address in added {
            if let Some(memory) = &mut contents.memory {
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
        if self.import.is_none() {
            self.record(if contents.memory.is_some() { Change::Freed } else { Change::FreedPaused });
        }
        let before = (contents.memory.take(), contents.guard.take(), contents.saved.take(), contents.lending.forget_exports());
        // Free outside the lock, so that readers need not wait.
        drop(contents);
        drop(before);
    }

    /// Whether nobody needs memory of `cuMemCreate` any more: the driver keeps it while a handle or a mapping refers to it, in any process.
    pub(super) fn is_unused(&self) -> bool {
        let contents = self.contents();
        contents.references == 0 && !contents.lending.is_open() && contents.mappings.values().all(|mapping| mapping.access.is_none())
    }

    /// Whether it is paused, so its addresses must not be used.
    pub fn is_paused(&self) -> bool {
        !self.contents().memory.as_ref().is_some_and(Physical::is_mapped)
    }
}
