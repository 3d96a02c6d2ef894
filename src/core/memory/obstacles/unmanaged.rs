//! Counts unmanaged memory, which the library sees but leaves to CUDA, by owner, for the status and the limit.
//!
//! Who asked for it is its owner: a library, by its file name. Without a limit, small requests are not counted: they are many, and
//! the driver packs them together.

use super::sightings::{self, ObstacleKey};
use crate::events::{self, Change, Owner, Presence};
use crate::limit::Charge;
use crate::memory::registry::{Keyed, Requester, Spread};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::BuildHasherDefault;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard};
use vramctl_driver::{self as driver, CUdevice, CUdeviceptr, Context, Current};
use vramctl_host::{PerProcess, Unpoison};
use vramctl_model::{Span, StatusCode, Unmanaged, code};

static UNMANAGED: PerProcess<UnmanagedMemory> = PerProcess::new(UnmanagedMemory::default);

#[derive(Default)]
struct UnmanagedMemory {
    /// By address. An entry is removed before the driver frees the memory, because afterwards another thread may get the address.
    blocks: Keyed<Given>,
    handles: Mutex<Handles>,
}

#[derive(Debug)]
struct Given {
    bytes: usize,
    requester: Requester,
    _charge: Option<Charge>,
    /// The context with which it ends, and that context's device.
    context: Option<(Context, CUdevice)>,
    presence: Arc<Presence>,
}

impl Given {
    fn device(&self) -> Option<CUdevice> {
        self.context.map(|(_, device)| device)
    }

    fn record(&self, change: Change) {
        events::change(change, Owner::Library(self.requester.library), self.device(), self.bytes, &self.presence);
    }
}

impl Drop for Given {
    fn drop(&mut self) {
        self.record(Change::Freed);
    }
}

/// Memory of `cuMemCreate`. It exists as long as it has a handle or a mapping.
#[derive(Debug, Default)]
struct Handles {
    /// Each with its number of outstanding releases.
    handles: HashMap<u64, (Arc<Created>, usize), BuildHasherDefault<Spread>>,
    mapped: BTreeMap<CUdeviceptr, Arc<Created>>,
}

#[derive(Debug)]
struct Created {
    bytes: usize,
    requester: Requester,
    _charge: Option<Charge>,
    device: CUdevice,
    presence: Arc<Presence>,
}

impl Created {
    /// What its obstacles are recorded under.
    fn key(&self) -> ObstacleKey {
        ObstacleKey::Created(ptr::from_ref(self).addr())
    }

    fn record(&self, change: Change) {
        events::change(change, Owner::Library(self.requester.library), Some(self.device), self.bytes, &self.presence);
    }
}

impl Drop for Created {
    fn drop(&mut self) {
        sightings::forget(self.key());
        self.record(Change::Freed);
    }
}

impl UnmanagedMemory {
    fn handles(&self) -> MutexGuard<'_, Handles> {
        self.handles.lock().unpoisoned()
    }
}

impl Handles {
    fn hold(&mut self, handle: u64, piece: Arc<Created>) {
        self.handles.entry(handle).or_insert((piece, 0)).1 += 1;
    }

    /// What is mapped at an address.
    fn at(&self, address: CUdeviceptr) -> Option<&Arc<Created>> {
        let (base, piece) = self.mapped.range(..=address).next_back()?;
        (address - base < piece.bytes as u64).then_some(piece)
    }

    fn let_go(&mut self, handle: u64) -> Option<Arc<Created>> {
        let (piece, times) = self.handles.get_mut(&handle)?;
        *times -= 1;
        let piece = Arc::clone(piece);
        if *times == 0 {
            self.handles.remove(&handle);
        }
        Some(piece)
    }
}

/// Records memory in the thread's current context, and what it counts of the limit.
pub fn note(address: CUdeviceptr, bytes: usize, requester: Requester, charge: Option<Charge>) {
    let context = Current::of_thread().ok().flatten().map(|current| (current.owner(), current.device()));
    let given = Given { bytes, requester, _charge: charge, context, presence: Arc::default() };
    given.record(Change::Allocated);
    UNMANAGED.get().blocks.insert(address, given);
}

/// Whether memory or an obstacle is recorded at an address.
#[inline]
pub fn knows(address: CUdeviceptr) -> bool {
    UNMANAGED.existing().is_some_and(|unmanaged| unmanaged.blocks.contains_key(&address)) || sightings::knows(ObstacleKey::Address(address))
}

/// Lets the real function free the memory at an address.
#[inline]
pub fn free(address: CUdeviceptr, real: impl FnOnce() -> StatusCode) -> StatusCode {
    let block = UNMANAGED.existing().and_then(|unmanaged| unmanaged.blocks.remove(&address));
    sightings::ending(ObstacleKey::Address(address), || {
        let answer = real();
        if answer != code::SUCCESS
            && let Some((_, block)) = block
        {
            UNMANAGED.get().blocks.insert(address, block);
        }
        answer
    })
}

/// Records memory that `cuMemCreate` has created on a device, and what it counts of the limit.
pub fn note_handle(handle: u64, bytes: usize, device: CUdevice, requester: Requester, charge: Option<Charge>) {
    let created = Created { bytes, requester, _charge: charge, device, presence: Arc::default() };
    created.record(Change::Allocated);
    UNMANAGED.get().handles().handles.insert(handle, (Arc::new(created), 1));
}

/// Lets the real function release a handle.
pub fn release(handle: u64, real: impl FnOnce() -> StatusCode) -> StatusCode {
    let taken = UNMANAGED.existing().and_then(|unmanaged| unmanaged.handles().let_go(handle));
    let answer = real();
    if answer != code::SUCCESS
        && let Some(piece) = taken
    {
        UNMANAGED.get().handles().hold(handle, piece);
    }
    answer
}

/// Records a handle that `cuMemRetainAllocationHandle` has given for an address.
pub fn note_retained(handle: u64, address: CUdeviceptr) {
    let Some(unmanaged) = UNMANAGED.existing() else { return };
    let mut handles = unmanaged.handles();
    let found = handles.at(address).map(Arc::clone);
    if let Some(piece) = found {
        handles.hold(handle, piece);
    }
}

/// What obstacles of the memory that is mapped at an address are recorded under, if it is recorded itself.
pub fn key_of_mapped(address: CUdeviceptr) -> Option<ObstacleKey> {
    UNMANAGED.existing()?.handles().at(address).map(|piece| piece.key())
}

/// Records what `cuMemMap` has mapped.
pub fn note_mapped(address: CUdeviceptr, handle: u64) {
    let Some(unmanaged) = UNMANAGED.existing() else { return };
    let mut handles = unmanaged.handles();
    let found = handles.handles.get(&handle).map(|(piece, _)| Arc::clone(piece));
    if let Some(piece) = found {
        handles.mapped.insert(address, piece);
    }
}

/// Lets the real function unmap a range.
pub fn unmap(span: Span, real: impl FnOnce() -> StatusCode) -> StatusCode {
    let mut taken = Vec::new();
    if let Some(unmanaged) = UNMANAGED.existing() {
        let mapped = &mut unmanaged.handles().mapped;
        let end = span.address.saturating_add(span.bytes as u64);
        while let Some(base) = mapped.range(span.address..end).next().map(|(base, _)| *base) {
            taken.extend(mapped.remove_entry(&base));
        }
    }
    sightings::ending_mapped_in(span, || {
        let answer = real();
        if answer != code::SUCCESS && !taken.is_empty() {
            UNMANAGED.get().handles().mapped.extend(taken);
        }
        answer
    })
}

/// A block of it.
#[derive(Debug)]
pub struct UnmanagedBlock {
    /// Bytes asked for.
    pub bytes: u64,
    /// By whom.
    pub requester: Requester,
    /// Its device, if known.
    pub device: Option<CUdevice>,
    presence: Arc<Presence>,
}

/// All unmanaged memory, as recorded; the driver is not asked whether it still exists.
pub fn blocks() -> Vec<UnmanagedBlock> {
    let Some(unmanaged) = UNMANAGED.existing() else { return Vec::new() };
    let blocks = unmanaged.blocks.iter().map(|given| UnmanagedBlock {
        bytes: given.bytes as u64,
        requester: given.requester.clone(),
        device: given.device(),
        presence: Arc::clone(&given.presence),
    });
    let mut all: Vec<_> = blocks.collect();
    let handles = unmanaged.handles();
    let held = handles.handles.values().map(|(piece, _)| piece);
    let pieces: BTreeMap<_, _> = held.chain(handles.mapped.values()).map(|piece| (Arc::as_ptr(piece), piece)).collect();
    all.extend(pieces.values().map(|piece| UnmanagedBlock {
        bytes: piece.bytes as u64,
        requester: piece.requester.clone(),
        device: Some(piece.device),
        presence: Arc::clone(&piece.presence),
    }));
    all
}

/// Publishes all of it.
pub(crate) fn tell_what_is_there() {
    for block in blocks() {
        let owner = Owner::Library(block.requester.library);
        events::tell_presence(owner, block.device, block.bytes as usize, &block.presence);
    }
}

/// Forgets memory that was destroyed with its context.
pub(crate) fn forget_gone() {
    let Some(unmanaged) = UNMANAGED.existing() else { return };
    // The driver is not called while the map is locked.
    let mut contexts: BTreeSet<_> = unmanaged.blocks.iter().filter_map(|block| block.context).collect();
    contexts.retain(|(context, _)| context.is_gone());
    unmanaged.blocks.retain(|_, block| block.context.is_none_or(|context| !contexts.contains(&context)));
}

/// Unmanaged memory now, by owner in alphabetical order.
pub fn status() -> Vec<Unmanaged> {
    forget_gone();
    let mut owners = BTreeMap::<&str, BTreeMap<Option<CUdevice>, u64>>::new();
    for block in blocks() {
        *owners.entry(block.requester.library).or_default().entry(block.device).or_default() += block.bytes;
    }
    let all = owners.into_iter().map(|(owner, devices)| Unmanaged {
        owner: owner.to_owned(),
        bytes: devices.values().sum(),
        gpus: devices.into_iter().filter_map(|(device, bytes)| Some((driver::uuid(device?)?, bytes))).collect(),
    });
    all.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 2 << 20;

    /// Tests share the process, so each counts under an owner of its own.
    fn bytes_of(owner: &str) -> u64 {
        status().iter().filter(|unmanaged| unmanaged.owner == owner).map(|unmanaged| unmanaged.bytes).sum()
    }

    fn done() -> StatusCode {
        code::SUCCESS
    }

    #[test]
    fn freed_memory_is_no_longer_counted_unless_the_free_fails() {
        let (first, second) = (0x1000_0000, 0x2000_0000);
        note(first, PAGE, Requester::of("blocks"), None);
        note(second, 2 * PAGE, Requester::of("blocks"), None);
        assert_eq!(bytes_of("blocks"), 3 * PAGE as u64);
        assert_eq!(free(first, || code::UNKNOWN), code::UNKNOWN);
        assert_eq!(bytes_of("blocks"), 3 * PAGE as u64);
        assert_eq!(free(first, done), code::SUCCESS);
        assert_eq!(bytes_of("blocks"), 2 * PAGE as u64);
        // Another thread may be given the address before the driver's call returns.
        free(second, || {
            note(second, PAGE, Requester::of("blocks"), None);
            code::SUCCESS
        });
        assert_eq!(bytes_of("blocks"), PAGE as u64);
        free(second, done);
    }

    #[test]
    fn physical_memory_exists_while_it_has_a_handle_or_a_mapping() {
        let (handle, at) = (0x5555_0000_0000, 0x3000_0000);
        let span = Span { address: at, bytes: 4 * PAGE };
        note_handle(handle, PAGE, 0, Requester::of("handles"), None);
        note_mapped(at, handle);
        note_mapped(at + 2 * PAGE as u64, handle);
        assert_eq!(bytes_of("handles"), PAGE as u64, "two mappings, one memory");
        release(handle, || code::UNKNOWN);
        release(handle, done);
        assert_eq!(bytes_of("handles"), PAGE as u64, "mapped");
        note_retained(handle, at + PAGE as u64 - 1);
        note_retained(handle + 1, at + PAGE as u64);
        unmap(span, || code::UNKNOWN);
        assert_eq!(unmap(span, done), code::SUCCESS);
        assert_eq!(bytes_of("handles"), PAGE as u64, "retained");
        note_mapped(at, handle);
        release(handle, done);
        unmap(Span { address: at, bytes: PAGE }, done);
        assert_eq!(bytes_of("handles"), 0);
        release(handle, done);
        assert_eq!(bytes_of("handles"), 0);
    }

    #[test]
    fn a_forked_child_has_none_of_it() {
        note(0x4000_0000, PAGE, Requester::of("parent"), None);
        // SAFETY: the child leaves by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let fine = status().is_empty() && free(0x4000_0000, done) == code::SUCCESS;
            // SAFETY: ends the child without running the test harness's exit handlers.
            unsafe { libc::_exit(i32::from(!fine)) };
        }
        let mut ended = -1;
        // SAFETY: `child` is ours and `ended` is writable.
        unsafe { libc::waitpid(child, &raw mut ended, 0) };
        assert_eq!(ended, 0);
        assert_eq!(bytes_of("parent"), PAGE as u64);
        free(0x4000_0000, done);
    }
}
