//! Virtual memory: reserved addresses and the physical memory behind them, as owned objects.
//!
//! If the driver refuses to unmap, release or free something when an object is dropped, the rest goes onto a list that
//! [`sweep`] retries: the memory comes back late but is not leaked.

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

/// Whether the device supports virtual memory management.
pub fn supports_vmm(device: CUdevice) -> bool {
    attribute(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED as u32) != 0
}

/// The device's allocation granularity in bytes: sizes must be multiples of it.
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

/// Requests device memory, with `GPUDirect` RDMA where supported: a program must be able to register managed memory for RDMA, as
/// it can memory from the real `cudaMalloc`.
fn properties(device: CUdevice) -> CUmemAllocationProp {
    let rdma = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED as u32;
    // SAFETY: a plain C structure for which all zeroes are valid (no handle type, no flags).
    let mut properties: CUmemAllocationProp = unsafe { mem::zeroed() };
    properties.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE;
    properties.location = location(device);
    properties.allocFlags.gpuDirectRDMACapable = u8::from(attribute(device, rdma) != 0);
    properties
}

/// A reserved range of virtual addresses, freed when dropped.
#[derive(Debug)]
pub struct Addresses {
    base: CUdeviceptr,
    bytes: usize,
}

/// The end of the last reservation.
static NEXT: AtomicU64 = AtomicU64::new(0);

impl Addresses {
    /// Reserves `bytes` (a multiple of the granularity), right behind the last reservation if possible: neighbours can be
    /// unmapped and made accessible in one call.
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
        Ok(Self { base, bytes })
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

impl Drop for Addresses {
    fn drop(&mut self) {
        undo(Leftover { addresses: Some((self.base, self.bytes)), ..Leftover::default() });
    }
}

/// The largest physical allocation requested in one call. Right after a large release the driver must clear the memory first,
/// and one request of 96 GiB then takes twice as long as twelve of 8 GiB (`docs/performance.md`). Debug builds use a smaller
/// size, to match the small devices in tests.
pub const PHYSICAL_PIECE: usize = if cfg!(debug_assertions) { 32 << 20 } else { 8 << 30 };

/// Physical device memory. Dropping it unmaps and releases it.
#[derive(Debug)]
pub struct Physical {
    pieces: Vec<(CUmemGenericAllocationHandle, usize)>,
    /// Where it is, or was last, mapped. Held so that the addresses outlive the mapping.
    at: Option<Arc<Addresses>>,
    mapped: bool,
}

impl Physical {
    /// Allocates `bytes` (a multiple of the granularity) on the device. The memory is zeroed.
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

    /// Maps the memory at a range of the same length. It is not accessible until [`let_in`]. After an error it is not mapped.
    pub fn map(&mut self, at: &Arc<Addresses>) -> Result<(), Failure> {
        let driver = Driver::get()?;
        let mut base = at.base;
        for (handle, bytes) in &self.pieces {
            // SAFETY: the addresses are reserved, and `self.at` or the leftover keeps them reserved while anything is mapped.
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

    /// Maps it where it was last mapped.
    pub fn map_again(&mut self) -> Result<(), Failure> {
        self.at.clone().map_or(Ok(()), |at| self.map(&at))
    }

    /// Whether it is mapped.
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

/// Gives a device read and write access to mapped memory, with one call per contiguous range.
pub fn let_in<'a>(device: CUdevice, memories: impl Iterator<Item = &'a Physical>) -> Result<(), Failure> {
    let access = CUmemAccessDesc { location: location(device), flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
    for Span { address, bytes } in Span::contiguous(memories.filter_map(Physical::span)) {
        // SAFETY: the range contains only our mappings, without gaps; the descriptor is complete.
        unsafe { Driver::get()?.cuMemSetAccess(address, bytes, &raw const access, 1)? };
    }
    Ok(())
}

/// Unmaps memory, with one call per contiguous range; its contents stay intact. After an error, the memory not reached yet is
/// still mapped.
///
/// The caller must make sure that no device work uses the addresses: the driver does not wait.
pub fn unmap(mut memories: &mut [&mut Physical]) -> Result<(), Failure> {
    loop {
        let first = Span::contiguous(memories.iter().map_while(|memory| memory.span())).next();
        let Some(Span { address, bytes }) = first else { return Ok(()) };
        // SAFETY: the range contains only our mappings, without gaps.
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

/// The operations left to undo, in the order that the driver requires.
#[derive(Debug, Default)]
struct Leftover {
    /// A block from `cuMemAlloc`: address, bytes and buffer id.
    block: Option<(CUdeviceptr, usize, u64)>,
    mapping: Option<(CUdeviceptr, usize)>,
    /// The mapping's addresses, freed last.
    at: Option<Arc<Addresses>>,
    handles: Vec<(CUmemGenericAllocationHandle, usize)>,
    addresses: Option<(CUdeviceptr, usize)>,
}

impl Leftover {
    /// Undoes as much as possible and keeps the rest.
    fn undo(&mut self) -> Result<(), Failure> {
        let driver = Driver::get()?;
        // If the id differs, the block was freed with its context. If earlier work failed, it will be.
        if let Some((address, _, id)) = self.block
            && number_of(address) == Ok(id)
        {
            // SAFETY: our allocation, as its id shows.
            unsafe { driver.cuMemFree_v2(address) }.or_else(|failure| if failure.is_of_earlier_work() { Ok(()) } else { Err(failure) })?;
        }
        self.block = None;
        // SAFETY: each entry is an object of ours, moved out of its owner, and is cleared once undone.
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
        log::debug!("{failure}; will retry");
        LEFTOVERS.get().lock().unwrap_or_else(PoisonError::into_inner).push(leftover);
    }
}

/// Queues a block from `cuMemAlloc` that the driver has refused to free.
pub(super) fn free_later(address: CUdeviceptr, bytes: usize) {
    if let Ok(id) = number_of(address) {
        undo(Leftover { block: Some((address, bytes, id)), ..Leftover::default() });
    }
}

/// The driver's buffer id of an allocation, unique within the process.
fn number_of(address: CUdeviceptr) -> Result<u64, Failure> {
    pointer_attribute(address, CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID)
}

/// Retries what the driver has refused to undo. Returns whether any of it was undone.
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
    // Outside the lock: if the driver refuses to free the addresses, dropping them adds them to the list.
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
