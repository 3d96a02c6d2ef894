//! Virtual memory: reserved addresses and the physical memory behind them, as owned objects.
//!
//! An object that cannot undo itself when it is dropped (the driver refused to unmap, release or free) leaves what is
//! left of it in one list, and [`sweep`] tries again: a refused release is late memory, not lost memory.

use super::{CUdevice, CUdeviceptr, Driver, attribute, pointer_attribute};
use cudarc::driver::sys::{
    CUdevice_attribute, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags, CUmemAllocationHandleType,
    CUmemAllocationProp, CUmemAllocationType, CUmemGenericAllocationHandle, CUmemLocation, CUmemLocationType, CUpointer_attribute,
};
use std::mem;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use vramctl_host::PerProcess;
use vramctl_model::{Failure, Span};

/// Whether the device can map physical memory at reserved addresses.
pub fn supports_vmm(device: CUdevice) -> bool {
    attribute(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED as u32) != 0
}

/// What sizes must be a multiple of on the device, in bytes.
pub fn granularity(device: CUdevice) -> Result<usize, Failure> {
    let mut bytes = 0;
    let wanted = properties(device);
    let minimum = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM as u32;
    // SAFETY: `bytes` is writable and the properties are complete.
    unsafe { Driver::get()?.cuMemGetAllocationGranularity(&raw mut bytes, &raw const wanted, minimum)? };
    Ok(bytes)
}

fn location(device: CUdevice) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

/// Memory of the device, reachable by network cards and other devices where the device can do that: a program that
/// registers its buffers for RDMA must find managed memory no worse than `cudaMalloc`'s.
fn properties(device: CUdevice) -> CUmemAllocationProp {
    let rdma = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED as u32;
    // SAFETY: a plain C structure for which all zeroes is valid (no handle type, no flags).
    let mut properties: CUmemAllocationProp = unsafe { mem::zeroed() };
    properties.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE;
    properties.location = location(device);
    properties.allocFlags.gpuDirectRDMACapable = u8::from(attribute(device, rdma) != 0);
    properties
}

/// A range of virtual addresses that the driver keeps for us, given back when dropped.
#[derive(Debug)]
pub struct Addresses {
    base: CUdeviceptr,
    bytes: usize,
}

/// Where the last reservation ended.
static NEXT: AtomicU64 = AtomicU64::new(0);

impl Addresses {
    /// Reserves `bytes` (a multiple of the granularity), behind the last reservation where the driver can: neighbours are
    /// unmapped and made accessible in one call.
    pub fn reserve(bytes: usize) -> Result<Self, Failure> {
        let mut base = 0;
        let mut reserve = |wish| {
            // SAFETY: `base` is writable. The address asked for is a wish: taken already, the driver chooses another.
            Driver::get().and_then(|driver| unsafe { driver.cuMemAddressReserve(&raw mut base, bytes, 0, wish, 0) })
        };
        let wish = NEXT.load(Ordering::Relaxed);
        // At the end of the address space (2^47, after so many bytes in all) it does not choose but refuses.
        reserve(wish).or_else(|failure| if wish == 0 { Err(failure) } else { reserve(0) })?;
        NEXT.store(base + bytes as u64, Ordering::Relaxed);
        Ok(Self { base, bytes })
    }

    /// The first address.
    pub fn base(&self) -> CUdeviceptr {
        self.base
    }

    /// The length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Addresses {
    fn drop(&mut self) {
        undo(Leftover { addresses: Some((self.base, self.bytes)), ..Leftover::default() });
    }
}

/// The largest piece of physical memory asked for at once. Right after much memory was released the driver has to clean
/// it first, and one piece of 96 GiB takes twice as long as pieces of 8 GiB (`docs/performance.md`). The tests' own build,
/// whose devices are small, has smaller ones.
pub const PHYSICAL_PIECE: usize = if cfg!(debug_assertions) { 32 << 20 } else { 8 << 30 };

/// Physical memory of a device. Dropped, it is unmapped and given back to the driver.
#[derive(Debug)]
pub struct Physical {
    pieces: Vec<(CUmemGenericAllocationHandle, usize)>,
    /// Where it is mapped, or was last: kept for as long as it may be mapped there.
    at: Option<Arc<Addresses>>,
    mapped: bool,
}

impl Physical {
    /// Takes `bytes` (a multiple of the granularity) of the device's memory. It reads as zero once mapped.
    pub fn create(device: CUdevice, bytes: usize) -> Result<Self, Failure> {
        let driver = Driver::get()?;
        let wanted = properties(device);
        let mut memory = Self { pieces: Vec::new(), at: None, mapped: false };
        for offset in (0..bytes).step_by(PHYSICAL_PIECE) {
            let (mut handle, piece) = (0, PHYSICAL_PIECE.min(bytes - offset));
            // SAFETY: `handle` is writable and the properties are complete.
            unsafe { driver.cuMemCreate(&raw mut handle, piece, &raw const wanted, 0)? };
            memory.pieces.push((handle, piece));
        }
        Ok(memory)
    }

    fn bytes(&self) -> usize {
        self.pieces.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Puts the memory at addresses that are as long as it is. Nothing can use it there until [`let_in`]. After an error it
    /// is not mapped.
    pub fn map(&mut self, at: &Arc<Addresses>) -> Result<(), Failure> {
        let driver = Driver::get()?;
        let mut base = at.base;
        for (handle, bytes) in &self.pieces {
            // SAFETY: the addresses are reserved for as long as the memory may be mapped there: it keeps them.
            if let Err(failure) = unsafe { driver.cuMemMap(base, *bytes, 0, *handle, 0) } {
                if base > at.base {
                    let mapping = Some((at.base, (base - at.base) as usize));
                    undo(Leftover { mapping, at: Some(Arc::clone(at)), ..Leftover::default() });
                }
                return Err(failure);
            }
            base += *bytes as u64;
        }
        self.at = Some(Arc::clone(at));
        self.mapped = true;
        Ok(())
    }

    /// Puts it back where it was before it was unmapped.
    pub fn map_again(&mut self) -> Result<(), Failure> {
        self.at.clone().map_or(Ok(()), |at| self.map(&at))
    }

    /// Whether it is at its addresses.
    pub fn is_mapped(&self) -> bool {
        self.mapped
    }

    /// Where it is mapped, if it is.
    fn span(&self) -> Option<Span> {
        self.at.as_ref().filter(|_| self.mapped).map(|at| Span { address: at.base, bytes: at.bytes })
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        let mapping = self.span().map(|Span { address, bytes }| (address, bytes));
        undo(Leftover { mapping, at: self.at.take(), handles: mem::take(&mut self.pieces), ..Leftover::default() });
    }
}

/// Lets a device read and write mapped memory, with as few calls as its addresses allow.
pub fn let_in<'a>(device: CUdevice, memories: impl Iterator<Item = &'a Physical>) -> Result<(), Failure> {
    let access = CUmemAccessDesc { location: location(device), flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
    for Span { address, bytes } in Span::contiguous(memories.filter_map(Physical::span)) {
        // SAFETY: mappings of ours and nothing between them, and one complete descriptor.
        unsafe { Driver::get()?.cuMemSetAccess(address, bytes, &raw const access, 1)? };
    }
    Ok(())
}

/// Takes mapped memory away from its addresses, with as few calls as they allow; its contents stay in it. After an error,
/// what is not unmapped yet is mapped as before.
///
/// The caller has made sure that no work of the device uses the addresses: the driver does not wait.
pub fn unmap(mut memories: &mut [&mut Physical]) -> Result<(), Failure> {
    loop {
        let first = Span::contiguous(memories.iter().map_while(|memory| memory.span())).next();
        let Some(Span { address, bytes }) = first else { return Ok(()) };
        // SAFETY: mappings of ours and nothing between them.
        unsafe { Driver::get()?.cuMemUnmap(address, bytes)? };
        let (mut gone, mut neighbours) = (0, 0);
        while gone < bytes {
            gone += memories[neighbours].bytes();
            memories[neighbours].mapped = false;
            neighbours += 1;
        }
        memories = &mut memories[neighbours..];
    }
}

/// What is left to undo, in the order in which the driver wants it.
#[derive(Debug, Default)]
struct Leftover {
    /// A small allocation: address, bytes, and the driver's number for it.
    block: Option<(CUdeviceptr, usize, u64)>,
    mapping: Option<(CUdeviceptr, usize)>,
    /// What the mapping is at. Given back when all is undone.
    at: Option<Arc<Addresses>>,
    handles: Vec<(CUmemGenericAllocationHandle, usize)>,
    addresses: Option<(CUdeviceptr, usize)>,
}

impl Leftover {
    /// Undoes what can be undone and keeps the rest.
    fn undo(&mut self) -> Result<(), Failure> {
        let driver = Driver::get()?;
        // Where the number is another, it went with its context.
        if let Some((address, _, id)) = self.block
            && number_of(address) == Ok(id)
        {
            // SAFETY: allocated by us, and nothing else by its number.
            unsafe { driver.cuMemFree_v2(address) }.or_else(|failure| if failure.is_of_earlier_work() { Ok(()) } else { Err(failure) })?;
        }
        self.block = None;
        // SAFETY: each entry is one object of ours, taken out of its owner, and is cleared once it is undone.
        unsafe {
            if let Some((base, bytes)) = self.mapping {
                driver.cuMemUnmap(base, bytes)?;
                self.mapping = None;
            }
            let mut refused = Ok(());
            self.handles.retain(|(handle, _)| driver.cuMemRelease(*handle).map_err(|failure| refused = Err(failure)).is_err());
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

fn undo(mut leftover: Leftover) {
    if let Err(failure) = leftover.undo() {
        log::debug!("{failure}; will be tried again");
        LEFTOVERS.get().lock().unwrap_or_else(PoisonError::into_inner).push(leftover);
    }
}

/// Gives a small allocation back that the driver refused to take. One that failed work has spoilt goes with its context.
pub(super) fn free_later(address: CUdeviceptr, bytes: usize) {
    if let Ok(id) = number_of(address) {
        undo(Leftover { block: Some((address, bytes, id)), ..Leftover::default() });
    }
}

/// The driver's number for an allocation, which no other has.
fn number_of(address: CUdeviceptr) -> Result<u64, Failure> {
    pointer_attribute(address, CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID)
}

/// Tries again to undo what the driver refused to undo before. Whether any of it was undone.
pub fn sweep() -> bool {
    let Some(leftovers) = LEFTOVERS.existing() else { return false };
    let (mut undone, mut free) = (false, Vec::new());
    leftovers.lock().unwrap_or_else(PoisonError::into_inner).retain_mut(|leftover| {
        let before = (leftover.mapping, leftover.handles.len());
        let gone = leftover.undo().is_ok();
        undone |= gone || before != (leftover.mapping, leftover.handles.len());
        if gone {
            free.extend(leftover.at.take());
        }
        !gone
    });
    // Without the lock: the driver may refuse to take the addresses back, and then they are put on the list.
    drop(free);
    undone
}

/// Bytes of device memory that the driver has refused to take back so far.
pub fn leftover_bytes() -> u64 {
    LEFTOVERS.existing().map_or(0, |leftovers| {
        let leftovers = leftovers.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = |leftover: &Leftover| {
            let physical: usize = leftover.handles.iter().map(|(_, bytes)| bytes).sum();
            (physical + leftover.block.map_or(0, |(_, bytes, _)| bytes)) as u64
        };
        leftovers.iter().map(bytes).sum()
    })
}
