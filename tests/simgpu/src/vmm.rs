//! The device address space, physical memory, and the virtual memory management calls.
//!
//! An address range is a real mapping of this process without access rights, so that nobody else gets the addresses and the
//! host cannot read device memory, as on a real machine. Physical memory is another mapping, which only this library's
//! copies and memsets touch. It is anonymous, takes host memory only where it was written to, and is not inherited by
//! children, so releasing it really frees host memory. When it is shared with another process ([`crate::sharing`]), its pages
//! move to a file in memory.

use crate::abi::{AccessDesc, Address, AllocationProp, Handle, In, LOCATION_DEVICE, LOCATION_HOST_NUMA, Location, Out};
use crate::codes::{
    ILLEGAL_ADDRESS, INVALID_DEVICE, INVALID_VALUE, NOT_PERMITTED, NOT_SUPPORTED, OPERATING_SYSTEM, OUT_OF_MEMORY, Outcome, UNKNOWN,
};
use crate::context;
use crate::device;
use crate::driver::{self, machine, state};
use crate::machine::{Key, MAX_DEVICES, Tie};
use crate::settings;
use crate::sharing;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard};

/// The minimum and recommended granularity of physical memory and mappings: 2 MiB.
pub const GRANULARITY: usize = 2 << 20;
const PAGE: usize = 4096;
/// What new memory holds in each byte, if it is to be dirty.
const DIRT: u8 = 0xd7;
/// Size of a process's address space.
const ADDRESSES: u64 = 1 << 47;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub const HANDLE_TYPE_FILE: u32 = 1;
/// `CU_MEM_HANDLE_TYPE_FABRIC`.
const HANDLE_TYPE_FABRIC: u32 = 8;

/// `CUmemAccess_flags`.
pub const READ: u32 = 1;
/// As above.
pub const READ_WRITE: u32 = 3;
/// Access of all devices.
pub const OF_ALL: [u32; MAX_DEVICES] = [READ_WRITE; MAX_DEVICES];

/// Host memory that backs simulated device memory.
#[derive(Debug)]
pub struct Backing {
    start: *mut u8,
    space: usize,
    /// The file that holds it, once it is shared.
    file: OnceLock<File>,
}

// SAFETY: a plain mapping; streams order the accesses, as on a device.
unsafe impl Send for Backing {}
// SAFETY: as above.
unsafe impl Sync for Backing {}

impl Backing {
    fn new(bytes: usize, for_children: bool) -> Option<Self> {
        let space = bytes.checked_next_multiple_of(PAGE)?;
        // Whole pieces are backed by huge pages: page faults are most of what the simulated memory costs.
        let huge = is_granular(bytes);
        let reserved = if huge { space.checked_add(GRANULARITY)? } else { space };
        // SAFETY: a new mapping at an address chosen by the kernel; what is unmapped again are its ends.
        let start = unsafe {
            let reserved_at = libc::mmap(
                std::ptr::null_mut(),
                reserved,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            );
            if reserved_at == libc::MAP_FAILED {
                return None;
            }
            let mut start = reserved_at.cast::<u8>();
            if huge {
                let before = start.align_offset(GRANULARITY);
                start = start.add(before);
                release_addresses(reserved_at as Address, before);
                release_addresses(start as Address + space as u64, reserved - space - before);
                libc::madvise(start.cast(), space, libc::MADV_HUGEPAGE);
            }
            if !for_children {
                libc::madvise(start.cast(), space, libc::MADV_DONTFORK);
            }
            start
        };
        Some(Self { start, space, file: OnceLock::new() })
    }

    /// The memory in a file that another process has shared, or this one.
    fn of_file(file: File) -> io::Result<Self> {
        let space = file.metadata()?.len() as usize;
        let start = map_file(&file, std::ptr::null_mut(), space, 0)?;
        Ok(Self { start, space, file: OnceLock::from(file) })
    }

    /// The file that holds the memory. The first call moves the pages there, at unchanged addresses; untouched ones stay untouched.
    fn share(&self, name: &str) -> io::Result<&File> {
        let _nobody_touches_it = TOUCHING.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = self.file.get() {
            return Ok(file);
        }
        let file = crate::sharing::memory_file(name)?;
        file.set_len(self.space as u64)?;
        for offset in (0..self.space).step_by(PAGE) {
            // SAFETY: our own mapping, a whole number of pages, that nobody writes to now.
            let page = unsafe { std::slice::from_raw_parts(self.at(offset), PAGE) };
            if page.iter().any(|&byte| byte != 0) {
                file.write_all_at(page, offset as u64)?;
            }
        }
        map_file(&file, self.start, self.space, libc::MAP_FIXED)?;
        Ok(self.file.get_or_init(|| file))
    }

    /// This library's pointer to the memory.
    pub fn at(&self, offset: usize) -> *mut u8 {
        self.start.wrapping_add(offset)
    }
}

/// Held for reading while the host touches backings, for writing while one moves.
static TOUCHING: RwLock<()> = RwLock::new(());

/// Promises to touch backings only while the guard lives. The state must not be locked meanwhile.
pub fn touching() -> RwLockReadGuard<'static, ()> {
    TOUCHING.read().unwrap_or_else(PoisonError::into_inner)
}

fn map_file(file: &File, at: *mut u8, bytes: usize, flags: i32) -> io::Result<*mut u8> {
    // SAFETY: a new mapping, at an address that the kernel chooses, or in place of a backing of the same size.
    let start = unsafe {
        let start = libc::mmap(at.cast(), bytes, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | flags, file.as_raw_fd(), 0);
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        libc::madvise(start, bytes, libc::MADV_DONTFORK);
        start
    };
    Ok(start.cast())
}

impl Drop for Backing {
    fn drop(&mut self) {
        // SAFETY: our own mapping, with no remaining references.
        unsafe { libc::munmap(self.start.cast(), self.space) };
    }
}

/// Where physical memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Home {
    /// On a device.
    Device(usize),
    /// In the host's memory, at its only node.
    Host,
}

impl Home {
    /// The device; the first one stands for the host, whose memory all can access.
    fn device(self) -> usize {
        if let Self::Device(device) = self { device } else { 0 }
    }

    /// As programs name it.
    fn location(self) -> Location {
        match self {
            Self::Device(device) => Location { kind: LOCATION_DEVICE, id: device as i32 },
            Self::Host => Location { kind: LOCATION_HOST_NUMA, id: 0 },
        }
    }

    fn take(self, bytes: u64) -> Outcome {
        if let Self::Device(device) = self { device::take(device, bytes) } else { Ok(()) }
    }
}

/// Physical memory of one device, or of the host. As in the driver, it lives while a handle, a mapping or a running copy refers to it; then
/// its capacity returns to the machine.
#[derive(Debug)]
pub struct Physical {
    /// The handle that it was created with; 0 for plain memory.
    pub handle: Handle,
    /// Where it is.
    pub home: Home,
    /// Its size.
    pub bytes: usize,
    charged: u64,
    prop: Option<AllocationProp>,
    /// Once it is shared: where the machine counts it, in place of this process.
    shared: OnceLock<usize>,
    /// Whether it prevents a restore of this process.
    tie: OnceLock<Tie>,
    /// Its backing.
    pub backing: Backing,
}

impl Physical {
    fn new(handle: Handle, home: Home, bytes: usize, prop: Option<AllocationProp>, for_children: bool) -> Outcome<Arc<Self>> {
        let charged = bytes as u64;
        home.take(charged)?;
        let Some(backing) = Backing::new(bytes, for_children) else {
            if let Home::Device(device) = home {
                machine()?.give(device, charged);
            }
            return Err(OUT_OF_MEMORY);
        };
        if settings::get().dirty && home != Home::Host {
            // SAFETY: new memory of this size, which nobody else knows.
            unsafe { backing.at(0).write_bytes(DIRT, bytes) };
        }
        Ok(Arc::new(Self { handle, home, bytes, charged, prop, shared: OnceLock::new(), tie: OnceLock::new(), backing }))
    }

    /// Memory that was shared, by another process or this one.
    pub fn import(handle: Handle, home: Home, file: File, tie: Tie) -> Outcome<Arc<Self>> {
        let metadata = file.metadata().map_err(|_| OPERATING_SYSTEM)?;
        let bytes = metadata.len() as usize;
        let shared = OnceLock::new();
        if let Home::Device(device) = home {
            let place = machine()?.join_shared(key(&metadata), machine()?.place(device), bytes as u64).ok_or(OUT_OF_MEMORY)?;
            let _ = shared.set(place);
        }
        let backing = Backing::of_file(file).map_err(|_| {
            let _ = machine().map(|machine| shared.get().inspect(|place| machine.leave_shared(**place)));
            OPERATING_SYSTEM
        })?;
        // Driver 580 tells importers nothing of how the memory was made.
        let prop = Some(AllocationProp { kind: 1, handle_types: 0, location: home.location(), win32: std::ptr::null_mut(), flags: [0; 8] });
        let imported = Self { handle, home, bytes, charged: bytes as u64, prop, shared, tie: OnceLock::new(), backing };
        imported.is_tied(tie);
        Ok(Arc::new(imported))
    }

    /// Records that it prevents a restore of this process for as long as it exists.
    pub fn is_tied(&self, tie: Tie) {
        if self.tie.set(tie).is_ok() {
            let _ = machine().map(|machine| machine.note_tie(tie));
        }
    }

    /// The types of handles that it can be exported as.
    pub fn handle_types(&self) -> u32 {
        self.prop.map_or(0, |prop| prop.handle_types)
    }

    /// Whether it was asked for as memory that network cards can register (`gpuDirectRDMACapable`).
    fn is_for_rdma(&self) -> bool {
        self.prop.is_some_and(|prop| prop.flags[1] != 0)
    }

    /// The file that holds the memory, for another process. The state must not be locked.
    pub fn share(&self, name: &str) -> Outcome<&File> {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let file = self.backing.share(name).map_err(|_| OPERATING_SYSTEM)?;
        let metadata = file.metadata().map_err(|_| OPERATING_SYSTEM)?;
        if let Home::Device(device) = self.home
            && self.shared.get().is_none()
        {
            let place = machine()?.share(key(&metadata), machine()?.place(device), self.charged).ok_or(OPERATING_SYSTEM)?;
            let _ = self.shared.set(place);
        }
        Ok(file)
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        if let Ok(machine) = machine() {
            self.tie.get().inspect(|tie| machine.forget_tie(**tie));
            match (self.shared.get(), self.home) {
                (Some(place), _) => machine.leave_shared(*place),
                (None, Home::Device(device)) => machine.give(device, self.charged),
                (None, Home::Host) => (),
            }
        }
    }
}

fn key(metadata: &std::fs::Metadata) -> Key {
    (metadata.dev(), metadata.ino())
}

/// The purpose of a reserved range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Reserved by `cuMemAddressReserve`.
    Virtual,
    /// An allocation of the `cuMemAlloc` family.
    Plain {
        /// The context that it is freed with.
        context: Handle,
        /// The memory pool that it came from, in which case only the asynchronous calls could allocate it.
        pool: Option<Handle>,
    },
    /// An allocation of `cuMemAllocManaged`: the host may also access it.
    Managed {
        /// The context that it is freed with.
        context: Handle,
    },
    /// Plain memory of another process, opened with `cuIpcOpenMemHandle`.
    Opened {
        /// The context that it is closed with.
        context: Handle,
    },
}

impl Purpose {
    fn is_copied_from_everywhere(self) -> bool {
        !matches!(self, Self::Virtual | Self::Plain { pool: Some(_), .. })
    }

    /// The memory pool that it came from.
    pub fn pool(self) -> Option<Handle> {
        if let Self::Plain { pool, .. } = self { pool } else { None }
    }
}

#[derive(Debug)]
struct Reservation {
    /// The requested size.
    bytes: usize,
    /// Bytes of reserved address space; 0 if the backing itself is at the address.
    space: usize,
    purpose: Purpose,
    /// Distinguishes this range from a later one at the same address.
    id: u64,
    /// Who has freed it in stream order, so that no other call may.
    freed: Option<Freed>,
}

/// Of plain memory: "suitably aligned for any kind of variable".
const ALIGNMENT: usize = 512;

/// How far a range has got that was freed in stream order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Freed {
    /// The stream with this id will get there.
    Pending(Handle),
    /// The stream has been there. A pool keeps the memory until the next synchronisation.
    Over,
}

#[derive(Debug)]
struct Mapping {
    /// Distinguishes this mapping from a later one at the same address.
    id: u64,
    bytes: usize,
    physical: Arc<Physical>,
    access: [u32; MAX_DEVICES],
    /// The host's access, which only the host's memory can give.
    of_host: u32,
}

#[derive(Debug)]
struct Created {
    physical: Arc<Physical>,
    references: u32,
}

/// The device address space of this process.
#[derive(Debug, Default)]
pub struct Space {
    reservations: BTreeMap<Address, Reservation>,
    mappings: BTreeMap<Address, Mapping>,
    handles: HashMap<Handle, Created>,
    next_mapping: u64,
}

/// A piece of physical memory that an operation touches.
#[derive(Clone, Debug)]
pub struct Piece {
    /// The memory.
    pub physical: Arc<Physical>,
    /// Offset in it.
    pub offset: usize,
    /// Length in bytes.
    pub bytes: usize,
    /// The id of the mapping.
    pub mapping: u64,
}

/// The range that contains an address.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    /// First address of what is mapped.
    pub base: Address,
    /// How many bytes are mapped: of plain memory, perhaps more than were asked for.
    pub bytes: usize,
    /// Its device.
    pub device: usize,
    /// What the reservation is for.
    pub purpose: Purpose,
    /// Start and size of the whole reservation.
    pub reservation: (Address, usize),
    /// An id that no other reservation of this process ever has.
    pub id: u64,
    /// Whether any device has access.
    pub accessible: bool,
}

impl Space {
    fn reservation(&self, address: Address) -> Option<(Address, &Reservation)> {
        let (&base, reservation) = self.reservations.range(..=address).next_back()?;
        (address - base < reservation.bytes.max(1) as u64).then_some((base, reservation))
    }

    /// The program's reservation around an address: its start and its length.
    pub fn reserved_at(&self, address: Address) -> Option<(Address, usize)> {
        self.reservation(address).filter(|(_, range)| range.purpose == Purpose::Virtual).map(|(base, range)| (base, range.bytes))
    }

    fn mapping(&self, address: Address) -> Option<(Address, &Mapping)> {
        let (&base, mapping) = self.mappings.range(..=address).next_back()?;
        (address - base < mapping.bytes as u64).then_some((base, mapping))
    }

    /// Whether an address is in device address space, mapped or not.
    pub fn is_device(&self, address: Address) -> bool {
        self.reservation(address).is_some()
    }

    /// The memory mapped at an address.
    pub fn find(&self, address: Address) -> Option<Range> {
        let (start, reservation) = self.reservation(address)?;
        let (base, mapping) = self.mapping(address)?;
        Some(Range {
            base,
            bytes: mapping.bytes,
            device: mapping.physical.home.device(),
            purpose: reservation.purpose,
            reservation: (start, reservation.bytes),
            id: reservation.id,
            accessible: mapping.access.iter().any(|&access| access != 0),
        })
    }

    /// The physical memory behind a range, as a device sees it. An illegal address if any byte is unmapped or lacks the
    /// required access.
    pub fn touch(&self, address: Address, bytes: usize, device: usize, access: u32) -> Outcome<Vec<Piece>> {
        let mut pieces = Vec::new();
        let mut at = address;
        let end = address.checked_add(bytes as u64).ok_or(ILLEGAL_ADDRESS)?;
        while at < end {
            let (base, mapping) = self.mapping(at).ok_or(ILLEGAL_ADDRESS)?;
            if mapping.access[device] & access != access {
                return Err(ILLEGAL_ADDRESS);
            }
            let offset = (at - base) as usize;
            let bytes = (mapping.bytes - offset).min((end - at) as usize);
            pieces.push(Piece { physical: Arc::clone(&mapping.physical), offset, bytes, mapping: mapping.id });
            at += bytes as u64;
        }
        Ok(pieces)
    }

    /// The same for a copy: the driver finds its way to memory of `cuMemAlloc` on any device, whether or not peer access is enabled. To
    /// virtual memory and that of pools it does not.
    pub fn touch_in_copy(&self, address: Address, bytes: usize, device: usize, access: u32) -> Outcome<Vec<Piece>> {
        let of_owner = self.find(address).filter(|range| range.purpose.is_copied_from_everywhere());
        self.touch(address, bytes, of_owner.map_or(device, |range| range.device), access)
    }

    /// Number of ranges reserved by `cuMemAddressReserve`.
    pub fn reserved(&self) -> usize {
        self.reservations.values().filter(|range| range.purpose == Purpose::Virtual).count()
    }

    /// Number of live handles.
    pub fn created(&self) -> usize {
        self.handles.len()
    }

    /// Number of live mappings made by `cuMemMap`.
    pub fn mapped(&self) -> usize {
        self.mappings.values().filter(|mapping| mapping.physical.handle != 0).count()
    }

    /// Number of live allocations of the `cuMemAlloc` family.
    pub fn plain(&self) -> usize {
        self.reservations.values().filter(|range| matches!(range.purpose, Purpose::Plain { .. } | Purpose::Managed { .. })).count()
    }

    /// Makes a plain allocation: addresses, memory and mapping at once. `access`: of each device.
    pub fn allocate(&mut self, bytes: usize, device: usize, purpose: Purpose, access: [u32; MAX_DEVICES]) -> Outcome<Address> {
        let managed = matches!(purpose, Purpose::Managed { .. });
        let rounded = bytes.checked_next_multiple_of(ALIGNMENT).ok_or(OUT_OF_MEMORY)?;
        let physical = match Physical::new(0, Home::Device(device), rounded, None, managed) {
            Err(OUT_OF_MEMORY) if self.give_back(|of| of == device) => Physical::new(0, Home::Device(device), rounded, None, managed)?,
            other => other?,
        };
        let (address, space) = if managed {
            (physical.backing.at(0) as Address, 0)
        } else {
            let alignment = if rounded >= GRANULARITY { GRANULARITY } else { PAGE };
            let space = rounded.next_multiple_of(PAGE);
            (reserve_addresses(space, alignment, 0).ok_or(OUT_OF_MEMORY)?, space)
        };
        self.reservations.insert(address, Reservation { bytes, space, purpose, id: driver::new_handle(), freed: None });
        self.add_mapping(address, rounded, physical, access);
        Ok(address)
    }

    /// Sets a device's access to the memory of a pool.
    pub fn set_pool_access(&mut self, pool: Handle, device: usize, flags: u32) {
        for (address, range) in &self.reservations {
            if range.purpose.pool() == Some(pool)
                && let Some(mapping) = self.mappings.get_mut(address)
            {
                mapping.access[device] = flags;
            }
        }
    }

    /// How much memory of a pool the program uses.
    pub fn used_of_pool(&self, pool: Handle) -> usize {
        self.reservations
            .values()
            .filter(|range| range.purpose.pool() == Some(pool) && range.freed.is_none())
            .map(|range| range.bytes)
            .sum()
    }

    /// How much memory a pool has.
    pub fn bytes_of_pool(&self, pool: Handle) -> usize {
        let of_pool = self.reservations.values().filter(|range| range.purpose.pool() == Some(pool));
        of_pool.map(|range| range.bytes.next_multiple_of(ALIGNMENT)).sum()
    }

    /// Gives addresses to another process's memory.
    pub fn open(&mut self, physical: Arc<Physical>, purpose: Purpose) -> Outcome<Address> {
        let bytes = physical.bytes;
        let space = bytes.next_multiple_of(PAGE);
        let address = reserve_addresses(space, GRANULARITY, 0).ok_or(OUT_OF_MEMORY)?;
        self.reservations.insert(address, Reservation { bytes, space, purpose, id: driver::new_handle(), freed: None });
        self.add_mapping(address, bytes, physical, OF_ALL);
        Ok(address)
    }

    /// The physical memory at an address.
    pub fn physical(&self, address: Address) -> Option<Arc<Physical>> {
        self.mapping(address).map(|(_, mapping)| Arc::clone(&mapping.physical))
    }

    /// Whether this is the address of opened memory.
    pub fn is_open(&self, address: Address) -> bool {
        self.reservations.get(&address).is_some_and(|range| matches!(range.purpose, Purpose::Opened { .. }))
    }

    /// The context in which opened memory was opened.
    pub fn opened_in(&self, address: Address) -> Option<Handle> {
        match self.reservations.get(&address)?.purpose {
            Purpose::Opened { context } => Some(context),
            _ => None,
        }
    }

    /// The physical memory behind a handle.
    pub fn created_as(&self, handle: Handle) -> Option<Arc<Physical>> {
        self.handles.get(&handle).map(|created| Arc::clone(&created.physical))
    }

    /// Adds a handle of imported memory.
    pub fn add_handle(&mut self, physical: Arc<Physical>) {
        self.handles.insert(physical.handle, Created { physical, references: 1 });
    }

    /// Frees a plain allocation; `false` if there is none at this address.
    pub fn release_plain(&mut self, address: Address) -> bool {
        match self.reservations.get(&address) {
            Some(range) if range.purpose != Purpose::Virtual => {}
            _ => return false,
        }
        self.mappings.remove(&address);
        if let Some(range) = self.reservations.remove(&address) {
            release_addresses(address, range.space);
        }
        true
    }

    /// The context of the plain allocation at this address, unless it is already being freed.
    pub fn owner(&self, address: Address) -> Option<Handle> {
        match self.reservations.get(&address).filter(|range| range.freed.is_none())?.purpose {
            Purpose::Virtual | Purpose::Opened { .. } => None,
            Purpose::Plain { context, .. } | Purpose::Managed { context } => Some(context),
        }
    }

    /// Marks a plain allocation as being freed by a stream; the id tells it from a later one at the same address.
    pub fn free_in_order(&mut self, address: Address, stream: Handle) -> u64 {
        self.reservations.get_mut(&address).map_or(0, |range| {
            range.freed = Some(Freed::Pending(stream));
            range.id
        })
    }

    /// A stream has reached a free: other memory is released now, and a pool keeps its own.
    pub fn free_is_over(&mut self, address: Address, id: u64) {
        match self.reservations.get_mut(&address).filter(|range| range.id == id) {
            Some(range) if range.purpose.pool().is_some() => range.freed = Some(Freed::Over),
            Some(_) => _ = self.release_plain(address),
            None => (),
        }
    }

    /// Memory of a pool that was freed before in the order of this stream, or is not in use any more, for an allocation of the same size.
    pub fn reuse(&mut self, bytes: usize, purpose: Purpose, stream: Handle) -> Option<Address> {
        let rounded = bytes.checked_next_multiple_of(ALIGNMENT)?;
        let fits = |range: &Reservation| range.bytes.next_multiple_of(ALIGNMENT) == rounded && range.purpose.pool() == purpose.pool();
        let find = |state| self.reservations.iter().find(|(_, range)| fits(range) && range.freed == Some(state));
        let (&address, _) = find(Freed::Pending(stream)).or_else(|| find(Freed::Over))?;
        let range = self.reservations.get_mut(&address)?;
        (range.bytes, range.freed, range.purpose, range.id) = (bytes, None, purpose, driver::new_handle());
        Some(address)
    }

    /// Releases what pools keep on these devices and nobody uses. Returns whether there was anything.
    pub fn give_back(&mut self, is_meant: impl Fn(usize) -> bool) -> bool {
        let device_of = |address| self.mappings.get(address).map(|mapping| mapping.physical.home.device());
        let idle = self
            .reservations
            .iter()
            .filter(|(address, range)| range.freed == Some(Freed::Over) && device_of(address).is_some_and(&is_meant));
        let idle: Vec<_> = idle.map(|(&address, _)| address).collect();
        idle.iter().filter(|address| self.release_plain(**address)).count() > 0
    }

    /// Releases what pools keep and nobody uses, as far as a pool has more than `threshold` says.
    pub fn give_back_above(&mut self, threshold: impl Fn(Handle) -> u64) {
        let idle = self.reservations.iter().filter(|(_, range)| range.freed == Some(Freed::Over));
        for (address, pool) in idle.filter_map(|(&address, range)| Some((address, range.purpose.pool()?))).collect::<Vec<_>>() {
            if self.bytes_of_pool(pool) as u64 > threshold(pool) {
                self.release_plain(address);
            }
        }
    }

    /// Frees the plain allocations of a context.
    pub fn forget_context(&mut self, ended: Handle) {
        let addresses: Vec<Address> = self
            .reservations
            .iter()
            .filter(|(_, range)| match range.purpose {
                Purpose::Virtual => false,
                Purpose::Plain { context, .. } | Purpose::Managed { context } | Purpose::Opened { context } => context == ended,
            })
            .map(|(&address, _)| address)
            .collect();
        for address in addresses {
            self.release_plain(address);
        }
    }

    fn add_mapping(&mut self, at: Address, bytes: usize, physical: Arc<Physical>, access: [u32; MAX_DEVICES]) {
        self.next_mapping += 1;
        let id = self.next_mapping;
        self.mappings.insert(at, Mapping { id, bytes, physical, access, of_host: 0 });
    }

    /// The mappings in a range of reserved addresses, possibly none. The range must not cut any.
    fn mappings_within(&self, address: Address, bytes: usize) -> Outcome<Vec<Address>> {
        let end = address.checked_add(bytes as u64).filter(|&end| end > address).ok_or(INVALID_VALUE)?;
        let mut at = address;
        while at < end {
            match self.reservation(at) {
                Some((base, range)) if range.purpose == Purpose::Virtual => at = base + range.bytes as u64,
                _ => return Err(INVALID_VALUE),
            }
        }
        let touching = self.mappings.range(..end).rev().map(|(&base, mapping)| (base, base + mapping.bytes as u64));
        touching
            .take_while(|&(_, until)| until > address)
            .map(|(base, until)| if base >= address && until <= end { Ok(base) } else { Err(INVALID_VALUE) })
            .collect()
    }

    /// The mappings from the start of a range to its first hole. The range must begin and end with a mapping and must not
    /// cut any.
    fn leading_mappings(&self, address: Address, bytes: usize) -> Outcome<Vec<Address>> {
        let end = address.checked_add(bytes as u64).filter(|&end| end > address).ok_or(INVALID_VALUE)?;
        let (last, mapping) = self.mapping(end - 1).ok_or(INVALID_VALUE)?;
        if last < address || last + mapping.bytes as u64 != end {
            return Err(INVALID_VALUE);
        }
        let mut at = address;
        let mut found = Vec::new();
        // These calls do not apply to plain memory.
        while at < end
            && let Some(mapping) = self.mappings.get(&at).filter(|mapping| mapping.physical.handle != 0)
        {
            found.push(at);
            at += mapping.bytes as u64;
        }
        if found.is_empty() { Err(INVALID_VALUE) } else { Ok(found) }
    }
}

/// Reserves aligned address space without access rights, at `hint` if that is free.
fn reserve_addresses(bytes: usize, alignment: usize, hint: Address) -> Option<Address> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let reserve = |at: Address, bytes: usize, flags: i32| {
        // SAFETY: a new mapping; a fixed one replaces nothing.
        let start = unsafe { libc::mmap(at as *mut _, bytes, libc::PROT_NONE, flags, -1, 0) };
        (start != libc::MAP_FAILED).then_some(start as Address)
    };
    if hint != 0
        && hint.is_multiple_of(alignment as u64)
        && let Some(start) = reserve(hint, bytes, flags | libc::MAP_FIXED_NOREPLACE)
    {
        if start == hint {
            return Some(start);
        }
        release_addresses(start, bytes);
    }
    let larger = bytes.checked_add(alignment)?;
    let start = reserve(0, larger, flags)?;
    let aligned = start.next_multiple_of(alignment as u64);
    let before = (aligned - start) as usize;
    release_addresses(start, before);
    release_addresses(aligned + bytes as u64, larger - bytes - before);
    Some(aligned)
}

fn release_addresses(start: Address, bytes: usize) {
    if bytes > 0 {
        // SAFETY: address space of this module, already removed from its lists.
        unsafe { libc::munmap(start as *mut _, bytes) };
    }
}

fn is_granular(bytes: usize) -> bool {
    bytes > 0 && bytes.is_multiple_of(GRANULARITY)
}

fn checked_prop(prop: In<AllocationProp>) -> Outcome<(AllocationProp, Home)> {
    let prop = prop.get()?;
    if prop.kind != 1 {
        return Err(INVALID_VALUE);
    }
    let home = match prop.location {
        Location { kind: LOCATION_DEVICE, id } => Home::Device(driver::device(id)?),
        Location { kind: LOCATION_HOST_NUMA, id: 0 } => Home::Host,
        Location { kind: 0 | LOCATION_HOST_NUMA, .. } => return Err(INVALID_VALUE),
        _ => return Err(NOT_SUPPORTED),
    };
    // `CU_MEM_CREATE_USAGE_HW_DECOMPRESS`, of devices that have the engine.
    let usage = u16::from_ne_bytes([prop.flags[2], prop.flags[3]]);
    if usage != 0 && !(usage == 2 && driver::settings().decompression) {
        return Err(INVALID_VALUE);
    }
    match prop.handle_types {
        HANDLE_TYPE_FILE if driver::settings().no_sharing => Err(NOT_SUPPORTED),
        0 | HANDLE_TYPE_FILE => Ok((prop, home)),
        // Fabric handles need a service that this machine does not run.
        types if types & HANDLE_TYPE_FABRIC != 0 => Err(NOT_PERMITTED),
        _ => Err(INVALID_VALUE),
    }
}

/// The device that a location names.
pub fn access_device(location: Location) -> Outcome<usize> {
    if location.kind != LOCATION_DEVICE {
        return Err(if location.kind == 0 { INVALID_VALUE } else { NOT_SUPPORTED });
    }
    driver::device(location.id).map_err(|_| INVALID_VALUE)
}

/// `cuMemGetAllocationGranularity`.
pub fn granularity(bytes: Out<usize>, prop: In<AllocationProp>, option: u32) -> Outcome {
    checked_prop(prop)?;
    if option > 1 {
        return Err(INVALID_VALUE);
    }
    bytes.put(GRANULARITY)
}

/// `cuMemAddressReserve`.
pub fn reserve(pointer: Out<Address>, bytes: usize, alignment: usize, hint: Address, flags: u64) -> Outcome {
    pointer.required()?;
    if !is_granular(bytes) || flags != 0 || (alignment != 0 && !alignment.is_power_of_two()) {
        return Err(INVALID_VALUE);
    }
    // An invalid address as a hint is an error; one in use is not.
    if !hint.is_multiple_of(GRANULARITY as u64) {
        return Err(INVALID_VALUE);
    }
    // A hint too close to the end of the address space is an error too: the driver does not choose another address (driver
    // 580).
    if hint.checked_add(bytes as u64).is_none_or(|end| end > ADDRESSES) {
        return Err(OUT_OF_MEMORY);
    }
    let mut state = state();
    let address = reserve_addresses(bytes, alignment.max(GRANULARITY), hint).ok_or(OUT_OF_MEMORY)?;
    let id = driver::new_handle();
    state.space.reservations.insert(address, Reservation { bytes, space: bytes, purpose: Purpose::Virtual, id, freed: None });
    pointer.put(address)
}

/// `cuMemAddressFree`: only a whole reservation without mappings.
pub fn address_free(address: Address, bytes: usize) -> Outcome {
    let mut state = state();
    let space = &mut state.space;
    match space.reservations.get(&address) {
        Some(range) if range.purpose == Purpose::Virtual && range.bytes == bytes => {}
        _ => return Err(INVALID_VALUE),
    }
    if space.mappings.range(address..address + bytes as u64).next().is_some() {
        return Err(INVALID_VALUE);
    }
    space.reservations.remove(&address);
    release_addresses(address, bytes);
    Ok(())
}

/// `cuMemCreate`.
pub fn create(handle: Out<Handle>, bytes: usize, prop: In<AllocationProp>, flags: u64) -> Outcome {
    handle.required()?;
    let (prop, home) = checked_prop(prop)?;
    if !is_granular(bytes) || flags != 0 {
        return Err(INVALID_VALUE);
    }
    let new = driver::new_handle();
    let make = || Physical::new(new, home, bytes, Some(prop), false);
    let physical = match make() {
        Err(OUT_OF_MEMORY) if state().space.give_back(|of| Home::Device(of) == home) => make()?,
        other => other?,
    };
    if home == Home::Host {
        // The host has it at the program's addresses.
        physical.share(&sharing::name_of(&physical)?)?;
    }
    state().space.handles.insert(new, Created { physical, references: 1 });
    handle.put(new)
}

/// `cuMemRelease`: "the memory will be freed when there are no mappings left and all handles are
/// released".
pub fn release(handle: Handle) -> Outcome {
    let mut state = state();
    let handles = &mut state.space.handles;
    let created = handles.get_mut(&handle).ok_or(INVALID_VALUE)?;
    created.references -= 1;
    if created.references == 0 {
        handles.remove(&handle);
    }
    Ok(())
}

/// `cuMemRetainAllocationHandle`: every retain needs a release.
pub fn retain(handle: Out<Handle>, address: Address) -> Outcome {
    handle.required()?;
    let mut state = state();
    let space = &mut state.space;
    let (_, mapping) = space.mapping(address).ok_or(INVALID_VALUE)?;
    let physical = Arc::clone(&mapping.physical);
    if physical.handle == 0 {
        return Err(INVALID_VALUE);
    }
    let name = physical.handle;
    space.handles.entry(name).or_insert(Created { physical, references: 0 }).references += 1;
    handle.put(name)
}

/// `cuMemGetAllocationPropertiesFromHandle`.
pub fn properties(prop: Out<AllocationProp>, handle: Handle) -> Outcome {
    let state = state();
    let created = state.space.handles.get(&handle).ok_or(INVALID_VALUE)?;
    prop.put(created.physical.prop.ok_or(INVALID_VALUE)?)
}

/// `cuMemMap`: into one reservation, where nothing is mapped. (The driver lets it end behind the reservation.) Only a whole handle can be mapped; a part
/// is "not supported".
/// The mapping has no access yet.
pub fn map(address: Address, bytes: usize, offset: usize, handle: Handle, flags: u64) -> Outcome {
    if bytes == 0 || flags != 0 {
        return Err(INVALID_VALUE);
    }
    let mut state = state();
    let space = &mut state.space;
    let physical = Arc::clone(&space.handles.get(&handle).ok_or(INVALID_VALUE)?.physical);
    if offset != 0 || bytes != physical.bytes {
        return Err(NOT_SUPPORTED);
    }
    if !address.is_multiple_of(GRANULARITY as u64) {
        return Err(INVALID_VALUE);
    }
    let end = address.checked_add(bytes as u64).ok_or(INVALID_VALUE)?;
    match space.reservation(address) {
        Some((base, range)) if range.purpose == Purpose::Virtual && end <= base + range.bytes as u64 => {}
        _ => return Err(INVALID_VALUE),
    }
    let taken = space.mappings.range(..end).next_back().is_some_and(|(&base, mapping)| base + mapping.bytes as u64 > address);
    if taken {
        return Err(INVALID_VALUE);
    }
    space.add_mapping(address, bytes, physical, [0; MAX_DEVICES]);
    Ok(())
}

/// `cuMemUnmap`: all mappings in the range, which may have holes but must not cut any. It does not wait for device work:
/// that is the caller's responsibility, and work still running meets an illegal address.
pub fn unmap(address: Address, bytes: usize) -> Outcome {
    let mut state = state();
    for base in state.space.mappings_within(address, bytes)? {
        if let Some(mapping) = state.space.mappings.remove(&base)
            && mapping.of_host != 0
        {
            close_to_host(base, mapping.bytes)?;
        }
    }
    Ok(())
}

/// `cuMemSetAccess`: for whole mappings and each given location. If the range has a hole, it applies to what comes before
/// the hole and still returns success.
pub fn set_access(address: Address, bytes: usize, access: In<AccessDesc>, count: usize) -> Outcome {
    if count == 0 || count > 4096 {
        return Err(INVALID_VALUE);
    }
    let mut changes = Vec::new();
    for access in access.get_all(count)? {
        if !matches!(access.flags, 0 | READ | READ_WRITE) {
            return Err(INVALID_VALUE);
        }
        changes.push((accessor(access.location)?, access.flags));
    }
    let mut state = state();
    let mappings = state.space.leading_mappings(address, bytes)?;
    let is_refused = |base: &Address| state.space.mappings.get(base).is_some_and(|mapping| mapping.physical.is_for_rdma());
    if driver::settings().no_rdma && mappings.iter().any(is_refused) {
        return Err(UNKNOWN);
    }
    for owner in mappings.iter().filter_map(|base| Some(state.space.mappings.get(base)?.physical.home)) {
        for &(who, flags) in &changes {
            match (who, owner) {
                (Home::Host, Home::Device(_)) => return Err(NOT_SUPPORTED),
                (Home::Device(device), Home::Device(owner)) if flags != 0 && !context::has_path(device, owner) => {
                    return Err(INVALID_DEVICE);
                }
                _ => (),
            }
        }
    }
    for base in mappings {
        if let Some(mapping) = state.space.mappings.get_mut(&base) {
            for &(who, flags) in &changes {
                match who {
                    Home::Device(device) => mapping.access[device] = flags,
                    Home::Host => mapping.open_to_host(base, flags)?,
                }
            }
        }
    }
    Ok(())
}

impl Mapping {
    /// Puts the host's memory at the program's addresses, where the host can use it.
    fn open_to_host(&mut self, base: Address, flags: u32) -> Outcome {
        let file = self.physical.backing.file.get().ok_or(OPERATING_SYSTEM)?;
        map_file(file, base as *mut u8, self.bytes, libc::MAP_FIXED).map_err(|_| OPERATING_SYSTEM)?;
        let rights = if flags == READ_WRITE { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ * i32::from(flags == READ) };
        // SAFETY: the mapping that was just made.
        unsafe { libc::mprotect(base as *mut _, self.bytes, rights) };
        self.of_host = flags;
        Ok(())
    }
}

/// Takes memory away from the host's view of a range, which stays reserved.
fn close_to_host(base: Address, bytes: usize) -> Outcome {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: a range of this module's, in which the host's memory was.
    let closed = unsafe { libc::mmap(base as *mut _, bytes, libc::PROT_NONE, flags, -1, 0) };
    if closed == libc::MAP_FAILED { Err(OPERATING_SYSTEM) } else { Ok(()) }
}

/// Who gets access: a device, or the host at its only node.
fn accessor(location: Location) -> Outcome<Home> {
    if (location.kind, location.id) == (LOCATION_HOST_NUMA, 0) {
        return Ok(Home::Host);
    }
    access_device(location).map(Home::Device)
}

/// `cuMemGetAccess`.
pub fn get_access(flags: Out<u64>, location: In<Location>, address: Address) -> Outcome {
    let who = accessor(location.get()?)?;
    let state = state();
    let (_, mapping) = state.space.mapping(address).ok_or(INVALID_VALUE)?;
    flags.put(u64::from(match who {
        Home::Device(device) => mapping.access[device],
        Home::Host => mapping.of_host,
    }))
}
