//! Virtual memory: reserved addresses and the physical memory behind them, as owned objects.
//!
//! If the driver refuses to unmap, release or free something when an object is dropped, the rest goes onto a list that
//! [`sweep`] retries: the memory comes back late but is not leaked.

use super::account::Account;
use super::extras::{self, Extras, WithExtras};
use super::properties::{Access, BY_DESCRIPTOR, Properties};
use super::{CUdevice, CUdeviceptr, Driver, attribute, pointer_attribute};
use cudarc::driver::sys::{CUdevice_attribute, CUmemAllocationGranularity_flags, CUmemGenericAllocationHandle, CUpointer_attribute};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use vramctl_host::{Held, PerProcess, Unpoison};
use vramctl_model::{Failure, Span, code};

/// Whether the device supports virtual memory management.
pub fn supports_vmm(device: CUdevice) -> bool {
    attribute(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED as u32) != 0
}

/// Whether memory for `cudaMalloc` on this device can be passed to other processes. The one place that decides it: asking the
/// driver for such memory costs no time, but libraries may treat it differently.
pub fn is_shareable(device: CUdevice) -> bool {
    Extras::of(device).shareable
}

/// The device's allocation granularity in bytes: sizes must be multiples of it.
pub fn granularity(device: CUdevice) -> Result<usize, Failure> {
    extras::make_on(device, |extras| granularity_with(device, extras))
}

fn granularity_with(device: CUdevice, extras: Extras) -> Result<usize, Failure> {
    let mut bytes = 0;
    let wanted = Properties::of_device(device, extras);
    let minimum = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM as u32;
    // SAFETY: `bytes` is writable and the properties are complete.
    unsafe { Driver::get()?.cuMemGetAllocationGranularity(&raw mut bytes, (&raw const wanted).cast(), minimum)? };
    Ok(bytes)
}

/// Makes, opens and releases a little memory on a device, as for `cudaMalloc`.
pub(super) fn try_on(device: CUdevice) -> Result<WithExtras<()>, Failure> {
    extras::make(Extras::of(device), |extras| {
        let bytes = granularity_with(device, extras)?;
        let mut memory = Physical::create_for_a_moment(device, bytes, extras)?;
        let place = Place::of(&Arc::new(Addresses::reserve(bytes)?));
        memory.map(&place)?;
        open([(place.span(), [Access::of_device(device)].into())])
    })
}

/// A reserved range of virtual addresses, freed when dropped.
#[derive(Debug)]
pub struct Addresses {
    base: CUdeviceptr,
    bytes: usize,
    /// Kept for the next of this size instead, as pools do: reserving and freeing takes the driver as long as mapping a few pages.
    is_of_pool: bool,
}

/// Ranges that nothing is mapped at.
static SPARE: PerProcess<Mutex<Vec<(CUdeviceptr, usize)>>> = PerProcess::new(Mutex::default);
/// The most of them.
const MOST_SPARE: usize = 16;

/// The end of the last reservation.
static NEXT: AtomicU64 = AtomicU64::new(0);

impl Addresses {
    /// Reserves `bytes` (a multiple of the granularity), right behind the last reservation if possible: adjacent mappings can be unmapped
    /// and made accessible in one call.
    pub fn reserve(bytes: usize) -> Result<Self, Failure> {
        let mut base = 0;
        let mut reserve = |wish| {
            // SAFETY: `base` is writable. The requested address is a hint: if it is taken, the driver chooses another.
            Driver::get().and_then(|driver| unsafe { driver.cuMemAddressReserve(&raw mut base, bytes, 0, wish, 0) })
        };
        let wish = NEXT.load(Ordering::Relaxed);
        // At the end of the address space (2^47) the driver fails instead of choosing another address.
        reserve(wish).or_else(|failure| if wish == 0 { Err(failure) } else { reserve(0) })?;
        NEXT.store(base + bytes as u64, Ordering::Relaxed);
        Ok(Self { base, bytes, is_of_pool: false })
    }

    /// For memory that stands for a device's default pool: the last range of this size that is spare, or a new one.
    pub fn reserve_in_pool(bytes: usize) -> Result<Self, Failure> {
        let spare = {
            let mut spare = SPARE.get().lock().unpoisoned();
            let last = spare.iter().rposition(|(_, size)| *size == bytes);
            last.map(|place| spare.remove(place))
        };
        if let Some((base, _)) = spare {
            return Ok(Self { base, bytes, is_of_pool: true });
        }
        let mut new = Self::reserve(bytes)?;
        new.is_of_pool = true;
        Ok(new)
    }

    /// First address.
    pub fn base(&self) -> CUdeviceptr {
        self.base
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Whether an address is in a range that is kept for pools. The driver knows the range, and the program does not.
pub fn is_spare(address: CUdeviceptr) -> bool {
    SPARE.get().lock().unpoisoned().iter().any(|(base, bytes)| (*base..base + *bytes as u64).contains(&address))
}

/// Frees the ranges that are kept for pools. For tests: what is reserved then is in use.
pub fn free_spare_addresses() {
    for range in mem::take(&mut *SPARE.get().lock().unpoisoned()) {
        give_back(Leftover { addresses: Some(range), ..Leftover::default() });
    }
}

impl Drop for Addresses {
    fn drop(&mut self) {
        let mut freed = Some((self.base, self.bytes));
        if self.is_of_pool {
            let mut spare = SPARE.get().lock().unpoisoned();
            spare.extend(freed.take());
            freed = (spare.len() > MOST_SPARE).then(|| spare.remove(0));
        }
        if freed.is_some() {
            give_back(Leftover { addresses: freed, ..Leftover::default() });
        }
    }
}

/// The largest physical allocation requested in one call. Right after a large release the driver must clear the memory first,
/// and one request of 100 GiB then takes 290 ms, pieces of 8 GiB 120 to 165 (H200, driver 580). Smaller pieces cost more later: 4000 of
/// 2 MiB take 168 to 212 ms to create and map, six for the same addresses 0.8. Debug builds use a smaller size, to match the small devices in tests.
pub const PHYSICAL_PIECE: usize = if cfg!(debug_assertions) { 32 << 20 } else { 8 << 30 };

/// An address range at which to map physical memory.
#[derive(Debug, Clone)]
pub struct Place {
    span: Span,
    /// The reservation, if it is the library's. Held so that the addresses outlive the mapping.
    ours: Option<Arc<Addresses>>,
}

impl Place {
    /// A reservation of the library's.
    pub fn of(addresses: &Arc<Addresses>) -> Self {
        Self { span: Span { address: addresses.base, bytes: addresses.bytes }, ours: Some(Arc::clone(addresses)) }
    }

    /// Addresses that the program has reserved.
    pub fn of_program(span: Span) -> Self {
        Self { span, ours: None }
    }

    /// The addresses.
    pub fn span(&self) -> Span {
        self.span
    }
}

/// Physical device memory. Dropping it unmaps and releases it.
#[derive(Debug, Default)]
pub struct Physical {
    pieces: Vec<(CUmemGenericAllocationHandle, usize)>,
    /// By address: one handle may stand behind each page of a large reservation.
    mappings: BTreeMap<CUdeviceptr, Mapped>,
    /// At how many of these it is not mapped now.
    away: usize,
    /// The block whose pieces are mapped, if not its own.
    of: Option<Arc<Physical>>,
    /// Where its pieces are counted, if they are.
    account: Option<Account>,
    /// Whether it is another process's memory.
    is_import: bool,
}

#[derive(Debug)]
struct Mapped {
    place: Place,
    /// Whether it is mapped now. If not, it was, and will be mapped again.
    mapped: bool,
}

impl Physical {
    /// Allocates `bytes` (a multiple of the granularity) on the account's device. The memory is zeroed.
    pub fn create(account: Account, bytes: usize) -> Result<Self, Failure> {
        let extras = Extras::of(account.device);
        Self::create_with(account, bytes, extras)
    }

    /// The same with these extras.
    pub fn create_with(account: Account, bytes: usize, extras: Extras) -> Result<Self, Failure> {
        Self::in_pieces(&Properties::of_device(account.device, extras), in_equal_pieces(bytes, PHYSICAL_PIECE), Some(account))
    }

    /// Allocates a little memory for a moment, which is not worth counting.
    pub fn create_for_a_moment(device: CUdevice, bytes: usize, extras: Extras) -> Result<Self, Failure> {
        Self::in_pieces(&Properties::of_device(device, extras), in_equal_pieces(bytes, PHYSICAL_PIECE), None)
    }

    /// Allocates memory in pieces of which each is half as long as the one before: from `largest` to `smallest`, both powers of two.
    pub fn in_halves(account: Account, largest: usize, smallest: usize) -> Result<Self, Failure> {
        let sizes = std::iter::successors(Some(largest), |piece| Some(piece / 2)).take_while(|piece| *piece >= smallest);
        Self::in_pieces(&Properties::of_device(account.device, Extras::of(account.device)), sizes, Some(account))
    }

    /// Repeats the pieces of a block made by [`in_halves`](Self::in_halves), to be mapped under `bytes` of addresses: a piece can be mapped
    /// any number of times, but only as a whole (driver 580).
    pub fn repeated(block: &Arc<Self>, bytes: usize) -> Result<Self, Failure> {
        let (mut pieces, mut left) = (Vec::new(), bytes);
        for &(handle, piece) in &block.pieces {
            pieces.extend(std::iter::repeat_n((handle, piece), left / piece));
            left %= piece;
        }
        if left > 0 {
            return Err(Failure { call: "cuMemMap", code: code::NOT_SUPPORTED });
        }
        Ok(Self { pieces, mappings: BTreeMap::new(), away: 0, of: Some(Arc::clone(block)), account: None, is_import: false })
    }

    /// The block that it repeats.
    pub fn block(&self) -> Option<&Arc<Self>> {
        self.of.as_ref()
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> usize {
        self.pieces.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Counts the memory there from now on.
    pub fn count_for(&mut self, account: Account) {
        let bytes = self.bytes();
        account.add(bytes);
        if let Some(before) = self.account.replace(account) {
            before.subtract(bytes);
        }
    }

    /// Allocates memory as the program wants it, in one piece. The memory is zeroed. Only a device's is counted.
    pub fn create_as(wanted: &Properties, account: Account, bytes: usize) -> Result<Self, Failure> {
        Self::in_pieces(wanted, in_equal_pieces(bytes, bytes.max(1)), Some(account).filter(|_| !wanted.is_on_host()))
    }

    fn in_pieces(wanted: &Properties, sizes: impl Iterator<Item = usize>, account: Option<Account>) -> Result<Self, Failure> {
        let driver = Driver::get()?;
        let mut memory = Self { pieces: Vec::new(), mappings: BTreeMap::new(), away: 0, of: None, account, is_import: false };
        for piece in sizes {
            let mut handle = 0;
            // SAFETY: `handle` is writable, and the properties have the layout of CUDA's.
            unsafe { driver.cuMemCreate(&raw mut handle, piece, std::ptr::from_ref(wanted).cast(), 0)? };
            if let Some(account) = &memory.account {
                account.add(piece);
            }
            memory.pieces.push((handle, piece));
        }
        Ok(memory)
    }

    /// Memory behind a handle that the program has got from `cuMemImportFromShareableHandle`, which it takes over.
    pub fn of_import(handle: CUmemGenericAllocationHandle, bytes: usize) -> Self {
        Self { pieces: vec![(handle, bytes)], mappings: BTreeMap::new(), away: 0, of: None, account: None, is_import: true }
    }

    /// Memory that another process has exported: its pieces, in order.
    pub fn import(pieces: &[(Held, usize)]) -> Result<Self, Failure> {
        let driver = Driver::get()?;
        let mut memory = Self { pieces: Vec::new(), mappings: BTreeMap::new(), away: 0, of: None, account: None, is_import: true };
        for (file, bytes) in pieces {
            let file = file.get().map_err(|_| Failure { call: "cuMemImportFromShareableHandle", code: code::OPERATING_SYSTEM })?;
            let (mut handle, file) = (0, file.as_raw_fd() as usize as *mut c_void);
            // SAFETY: `handle` is writable. The descriptor is passed as the pointer itself, and stays ours.
            unsafe { driver.cuMemImportFromShareableHandle(&raw mut handle, file, BY_DESCRIPTOR)? };
            memory.pieces.push((handle, *bytes));
        }
        Ok(memory)
    }

    /// A descriptor for each piece, with its length. A forked child finds it closed: it would keep the memory.
    pub fn export(&self) -> Result<Vec<(Held, usize)>, Failure> {
        let driver = Driver::get()?;
        self.pieces
            .iter()
            .map(|(handle, bytes)| {
                let mut file: c_int = -1;
                // SAFETY: `file` is writable and what this type of handle needs. The descriptor is new, and closed on `exec`.
                let file = unsafe {
                    driver.cuMemExportToShareableHandle((&raw mut file).cast(), *handle, BY_DESCRIPTOR, 0)?;
                    OwnedFd::from_raw_fd(file)
                };
                let file = Held::new(file).map_err(|_| Failure { call: "cuMemExportToShareableHandle", code: code::OPERATING_SYSTEM })?;
                Ok((file, *bytes))
            })
            .collect()
    }

    /// The device that the memory is on, as the driver reports it; `None` for host memory.
    pub fn device(&self) -> Result<Option<CUdevice>, Failure> {
        Ok(self.properties()?.and_then(|found| found.location.device()))
    }

    /// What the driver says of its first piece; `None` if it has none.
    pub fn properties(&self) -> Result<Option<Properties>, Failure> {
        let mut found = Properties::of_device(0, Extras::NONE);
        let Some((handle, _)) = self.pieces.first() else { return Ok(None) };
        // SAFETY: `found` is writable and has the layout of CUDA's.
        unsafe { Driver::get()?.cuMemGetAllocationPropertiesFromHandle((&raw mut found).cast(), *handle)? };
        Ok(Some(found))
    }

    /// The driver's handle of memory in one piece.
    pub fn handle(&self) -> Option<CUmemGenericAllocationHandle> {
        if let [(handle, _)] = self.pieces[..] { Some(handle) } else { None }
    }

    /// Maps the memory at a place of the same length. It is not accessible until [`open`]. After an error it is not mapped there.
    pub fn map(&mut self, place: &Place) -> Result<(), Failure> {
        map_pieces(&self.pieces, place, self.is_import)?;
        self.note_mapped(place.clone());
        Ok(())
    }

    /// Records that the program has mapped the memory.
    pub fn note_mapped(&mut self, place: Place) {
        self.mappings.insert(place.span.address, Mapped { place, mapped: true });
    }

    fn forget(&mut self, address: CUdeviceptr) -> Option<Mapped> {
        let mapping = self.mappings.remove(&address)?;
        self.away -= usize::from(!mapping.mapped);
        Some(mapping)
    }

    fn count_away(&mut self) {
        self.away = self.mappings.values().filter(|mapping| !mapping.mapped).count();
    }

    /// Records that the program has unmapped the memory from `address`, or that it need not be mapped there again.
    pub fn note_unmapped(&mut self, address: CUdeviceptr) {
        self.forget(address);
    }

    /// Unmaps it from `address` for good. If the driver refuses, it is tried again later.
    pub fn unmap_from(&mut self, address: CUdeviceptr) {
        if let Some(mapping) = self.forget(address) {
            let mappings = if mapping.mapped { vec![mapping.place.span] } else { Vec::new() };
            let (at, is_import) = (mapping.place.ours.into_iter().collect(), self.is_import);
            give_back(Leftover { mappings, at, is_import, ..Leftover::default() });
        }
    }

    /// Maps it wherever [`unmap`] has unmapped it. After an error, it may be mapped at some of the places.
    pub fn map_again(&mut self) -> Result<(), Failure> {
        for mapping in self.mappings.values_mut().filter(|mapping| !mapping.mapped) {
            map_pieces(&self.pieces, &mapping.place, self.is_import)?;
            mapping.mapped = true;
            self.away -= 1;
        }
        Ok(())
    }

    /// Whether it is mapped at all its places.
    pub fn is_mapped(&self) -> bool {
        self.away == 0
    }

    /// Where it is mapped now.
    pub fn spans(&self) -> impl Iterator<Item = Span> {
        self.mappings.values().filter(|mapping| mapping.mapped).map(|mapping| mapping.place.span)
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        let mappings = self.spans().collect();
        let at = mem::take(&mut self.mappings).into_values().filter_map(|mapping| mapping.place.ours).collect();
        let of = self.of.take();
        let handles = if of.is_none() { mem::take(&mut self.pieces) } else { Vec::new() };
        let (account, is_import) = (self.account.take(), self.is_import);
        give_back(Leftover { mappings, at, handles, account, of, is_import, ..Leftover::default() });
    }
}

/// Splits `bytes` into pieces of the same length; only the last may be shorter.
fn in_equal_pieces(bytes: usize, largest: usize) -> impl Iterator<Item = usize> {
    (0..bytes).step_by(largest).map(move |offset| largest.min(bytes - offset))
}

/// Maps pieces one behind the other. After an error none is mapped.
fn map_pieces(pieces: &[(CUmemGenericAllocationHandle, usize)], place: &Place, is_import: bool) -> Result<(), Failure> {
    let driver = Driver::get()?;
    let start = place.span.address;
    let mut base = start;
    for (handle, bytes) in pieces {
        // SAFETY: the addresses are reserved, by the program, or by what `place` and then the mapping or the leftover holds.
        if let Err(failure) = unsafe { driver.cuMemMap(base, *bytes, 0, *handle, 0) } {
            if base > start {
                let mappings = vec![Span { address: start, bytes: (base - start) as usize }];
                give_back(Leftover { mappings, at: place.ours.iter().cloned().collect(), is_import, ..Leftover::default() });
            }
            return Err(failure);
        }
        base += *bytes as u64;
    }
    Ok(())
}

/// Sets access to mapped ranges, in address order, with one call for adjacent ranges with the same access.
pub fn open(ranges: impl IntoIterator<Item = (Span, Arc<[Access]>)>) -> Result<(), Failure> {
    let mut ranges = ranges.into_iter().peekable();
    while let Some((mut span, access)) = ranges.next() {
        while let Some((next, _)) = ranges.next_if(|(next, other)| next.address == span.address + span.bytes as u64 && *other == access) {
            span.bytes += next.bytes;
        }
        if !access.is_empty() {
            // SAFETY: the range contains only our mappings, without gaps; the descriptors have the layout of CUDA's.
            unsafe { Driver::get()?.cuMemSetAccess(span.address, span.bytes, access.as_ptr().cast(), access.len())? };
        }
    }
    Ok(())
}

/// Unmaps memory wherever it is mapped, with one call per contiguous range; its contents stay intact. After an error, some of it
/// is still mapped.
///
/// The caller must make sure that no device work uses the addresses: the driver does not wait.
pub fn unmap(memories: &mut [&mut Physical]) -> Result<(), Failure> {
    let unmapped = unmap_all(memories);
    for memory in memories.iter_mut() {
        memory.count_away();
    }
    unmapped
}

fn unmap_all(memories: &mut [&mut Physical]) -> Result<(), Failure> {
    let mut mapped: Vec<_> = memories.iter_mut().flat_map(|memory| memory.mappings.values_mut().filter(|mapping| mapping.mapped)).collect();
    mapped.sort_unstable_by_key(|mapping| mapping.place.span.address);
    let mut rest = &mut mapped[..];
    loop {
        let first = Span::contiguous(rest.iter().map(|mapping| mapping.place.span)).next();
        let Some(Span { address, bytes }) = first else { return Ok(()) };
        // SAFETY: the range contains only our mappings, without gaps.
        unsafe { Driver::get()?.cuMemUnmap(address, bytes)? };
        let neighbours = rest.iter().take_while(|mapping| mapping.place.span.address < address + bytes as u64).count();
        let (gone, others) = rest.split_at_mut(neighbours);
        for mapping in gone {
            mapping.mapped = false;
        }
        rest = others;
    }
}

/// What is to be given back to the driver, in the order that it requires.
#[derive(Debug, Default)]
struct Leftover {
    /// A block from `cuMemAlloc`: address, bytes and buffer id.
    block: Option<(CUdeviceptr, usize, u64)>,
    mappings: Vec<Span>,
    /// The mappings' addresses, freed last.
    at: Vec<Arc<Addresses>>,
    handles: Vec<(CUmemGenericAllocationHandle, usize)>,
    /// Where the handles' memory is counted, if it is.
    account: Option<Account>,
    /// The block that is mapped, if others map it too.
    of: Option<Arc<Physical>>,
    addresses: Option<(CUdeviceptr, usize)>,
    /// Whether it is another process's memory.
    is_import: bool,
}

impl Leftover {
    /// As much as the driver takes; keeps the rest.
    fn give_back(&mut self) -> Result<(), Failure> {
        let driver = Driver::get()?;
        // If the id differs, the block was freed with its context. If earlier work failed, it will be.
        if let Some((address, _, id)) = self.block
            && number_of(address) == Ok(id)
        {
            // SAFETY: our allocation, as its id shows.
            unsafe { driver.cuMemFree_v2(address) }.or_else(|failure| if failure.is_of_earlier_work() { Ok(()) } else { Err(failure) })?;
        }
        self.block = None;
        // SAFETY: each entry is an object of ours, moved out of its owner, and is cleared once it is given back.
        unsafe {
            let mut refused = Ok(());
            self.mappings.retain(|span| driver.cuMemUnmap(span.address, span.bytes).map_err(|failure| refused = Err(failure)).is_err());
            refused?;
            self.handles.retain(|(handle, bytes)| match driver.cuMemRelease(*handle) {
                Ok(()) => {
                    self.account.iter().for_each(|account| account.subtract(*bytes));
                    false
                }
                Err(failure) => {
                    refused = Err(failure);
                    true
                }
            });
            refused?;
            if let Some((base, bytes)) = self.addresses {
                driver.cuMemAddressFree(base, bytes)?;
                self.addresses = None;
            }
        }
        Ok(())
    }
}

static LEFTOVERS: PerProcess<Mutex<Vec<Leftover>>> = PerProcess::new(Mutex::default);

/// Gives it back to the driver, now or later ([`sweep`]).
fn give_back(mut leftover: Leftover) {
    if let Err(failure) = leftover.give_back() {
        log::debug!("{failure}; will retry");
        LEFTOVERS.get().lock().unpoisoned().push(leftover);
    }
}

/// Queues a block from `cuMemAlloc` that the driver has refused to free.
pub(super) fn free_later(address: CUdeviceptr, bytes: usize) {
    if let Ok(id) = number_of(address) {
        give_back(Leftover { block: Some((address, bytes, id)), ..Leftover::default() });
    }
}

/// The driver's buffer id of an allocation, unique within the process.
fn number_of(address: CUdeviceptr) -> Result<u64, Failure> {
    pointer_attribute(address, CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID)
}

/// Retries what the driver has refused to take back. Returns whether it has taken any of it.
pub fn sweep() -> bool {
    let Some(leftovers) = LEFTOVERS.existing() else { return false };
    let (mut any, mut free, mut blocks) = (false, Vec::new(), Vec::new());
    leftovers.lock().unpoisoned().retain_mut(|leftover| {
        let before = (leftover.mappings.len(), leftover.handles.len());
        let gone = leftover.give_back().is_ok();
        any |= gone || before != (leftover.mappings.len(), leftover.handles.len());
        if gone {
            free.append(&mut leftover.at);
            blocks.extend(leftover.of.take());
        }
        !gone
    });
    // Outside the lock: if the driver refuses to free them, dropping them adds them to the list. The blocks first, which are mapped.
    drop(blocks);
    drop(free);
    any
}

/// Whether there is memory of other processes among what the driver has refused to take back so far.
pub fn has_leftover_imports() -> bool {
    LEFTOVERS.existing().is_some_and(|leftovers| leftovers.lock().unpoisoned().iter().any(|leftover| leftover.is_import))
}

/// Bytes of device memory that the driver has refused to take back so far.
pub fn leftover_bytes() -> u64 {
    LEFTOVERS.existing().map_or(0, |leftovers| {
        let leftovers = leftovers.lock().unpoisoned();
        let bytes = |leftover: &Leftover| {
            let physical: usize = leftover.handles.iter().map(|(_, bytes)| bytes).sum();
            (physical + leftover.of.as_ref().map_or(0, |of| of.bytes()) + leftover.block.map_or(0, |(_, bytes, _)| bytes)) as u64
        };
        leftovers.iter().map(bytes).sum()
    })
}
