//! Virtual memory: reservations of addresses and the physical memory behind them, as owned objects.
//!
//! An object that cannot undo itself when it is dropped (the driver refused to unmap, release or free) leaves what is
//! left of it in one list, and [`sweep`] tries again: a refused release is late memory, not lost memory.

use super::{CUdevice, CUdeviceptr, Driver, Failure, attribute};
use crate::process::PerProcess;
use cudarc::driver::sys::{
    CUdevice_attribute, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags, CUmemAllocationHandleType,
    CUmemAllocationProp, CUmemAllocationType, CUmemGenericAllocationHandle, CUmemLocation, CUmemLocationType,
};
use std::mem;
use std::sync::{Mutex, PoisonError};

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

/// A range of virtual addresses that the driver keeps for us.
#[derive(Debug)]
pub struct Reservation {
    base: CUdeviceptr,
    bytes: usize,
}

impl Reservation {
    /// Reserves `bytes` (a multiple of the granularity) at an address of the driver's choice.
    pub fn new(bytes: usize) -> Result<Self, Failure> {
        let mut base = 0;
        // SAFETY: `base` is writable.
        unsafe { Driver::get()?.cuMemAddressReserve(&raw mut base, bytes, 0, 0, 0)? };
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

impl Drop for Reservation {
    fn drop(&mut self) {
        undo(Leftover { addresses: Some((self.base, self.bytes)), ..Leftover::default() });
    }
}

/// Physical memory of a device, mapped or not. Dropped, it is unmapped and given back to the driver.
#[derive(Debug)]
pub struct Memory {
    handle: CUmemGenericAllocationHandle,
    bytes: usize,
    device: CUdevice,
    mapped_at: Option<CUdeviceptr>,
}

impl Memory {
    /// Takes `bytes` (a multiple of the granularity) of the device's memory. It reads as zero once mapped.
    pub fn create(device: CUdevice, bytes: usize) -> Result<Self, Failure> {
        let mut handle = 0;
        let wanted = properties(device);
        // SAFETY: `handle` is writable and the properties are complete.
        unsafe { Driver::get()?.cuMemCreate(&raw mut handle, bytes, &raw const wanted, 0)? };
        Ok(Self { handle, bytes, device, mapped_at: None })
    }

    /// Maps the memory at the start of a reservation of the same size and lets its own device and the `peers` read and
    /// write it. After an error it is as it was: not mapped.
    pub fn map(&mut self, at: &Reservation, peers: &[CUdevice]) -> Result<(), Failure> {
        // SAFETY: `at` is reserved for as long as the memory is mapped there: its owner drops the memory first.
        unsafe { Driver::get()?.cuMemMap(at.base, self.bytes, 0, self.handle, 0)? };
        let own = std::iter::once(self.device);
        if let Err(failure) = self.set_access(at.base, own.chain(peers.iter().copied())) {
            undo(Leftover { mapping: Some((at.base, self.bytes)), ..Leftover::default() });
            return Err(failure);
        }
        self.mapped_at = Some(at.base);
        Ok(())
    }

    /// Lets another device read and write the memory too, for as long as it stays mapped.
    pub fn let_in(&self, peer: CUdevice) -> Result<(), Failure> {
        self.mapped_at.map_or(Ok(()), |base| self.set_access(base, std::iter::once(peer)))
    }

    fn set_access(&self, base: CUdeviceptr, devices: impl Iterator<Item = CUdevice>) -> Result<(), Failure> {
        let access: Vec<_> = devices
            .map(|device| CUmemAccessDesc { location: location(device), flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE })
            .collect();
        // SAFETY: exactly our mapping, and as many complete descriptors as are said.
        unsafe { Driver::get()?.cuMemSetAccess(base, self.bytes, access.as_ptr(), access.len()) }
    }

    /// Takes the memory away from its addresses; its contents stay in it. After an error it is mapped as before.
    ///
    /// The caller has made sure that no work of the device uses the addresses: the driver does not wait.
    pub fn unmap(&mut self) -> Result<(), Failure> {
        if let Some(base) = self.mapped_at {
            // SAFETY: exactly the mapping that `map` made.
            unsafe { Driver::get()?.cuMemUnmap(base, self.bytes)? };
            self.mapped_at = None;
        }
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let mapping = self.mapped_at.map(|base| (base, self.bytes));
        undo(Leftover { mapping, handle: Some((self.handle, self.bytes)), addresses: None });
    }
}

/// What is left to undo of an object, in the order in which the driver wants it.
#[derive(Debug, Default)]
struct Leftover {
    mapping: Option<(CUdeviceptr, usize)>,
    handle: Option<(CUmemGenericAllocationHandle, usize)>,
    addresses: Option<(CUdeviceptr, usize)>,
}

impl Leftover {
    /// Undoes what can be undone and keeps the rest.
    fn undo(&mut self) -> Result<(), Failure> {
        let driver = Driver::get()?;
        // SAFETY: each entry is one object of ours, taken out of its owner, and is cleared once it is undone.
        unsafe {
            if let Some((base, bytes)) = self.mapping {
                driver.cuMemUnmap(base, bytes)?;
                self.mapping = None;
            }
            if let Some((handle, _)) = self.handle {
                driver.cuMemRelease(handle)?;
                self.handle = None;
            }
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

/// Tries again to undo what the driver refused to undo before. In the order in which it was left: a mapping comes
/// before the reservation that it is in.
pub fn sweep() {
    if let Some(leftovers) = LEFTOVERS.existing() {
        leftovers.lock().unwrap_or_else(PoisonError::into_inner).retain_mut(|leftover| leftover.undo().is_err());
    }
}

/// Bytes of device memory that the driver has refused to take back so far.
pub fn leftover_bytes() -> u64 {
    LEFTOVERS.existing().map_or(0, |leftovers| {
        let leftovers = leftovers.lock().unwrap_or_else(PoisonError::into_inner);
        leftovers.iter().filter_map(|leftover| leftover.handle).map(|(_, bytes)| bytes as u64).sum()
    })
}
