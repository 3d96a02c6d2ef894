//! What managed memory is, for who asks the driver: the same as memory of CUDA's own, and the same while it is paused. A held program
//! still asks, and libraries decide by the answers how to share or register memory.
//!
//! With one exception: it is not said to be capable of CUDA IPC, though [`share`](crate::share) makes it so for who just tries. NCCL
//! (`ipcRegisterBuffer`) would open buffers of captured collectives in the other ranks, and each of these could no longer be paused
//! alone, as engines' own calls do.

use crate::driver_originals;
use std::ffi::{c_uint, c_void};
use std::slice;
use std::sync::Arc;
use vramctl_core::memory::{Allocation, Memory};
use vramctl_driver::CUdeviceptr;
use vramctl_model::{StatusCode, code};

/// `CUpointer_attribute`.
mod attribute {
    pub const CONTEXT: u32 = 1;
    pub const MEMORY_TYPE: u32 = 2;
    pub const DEVICE_POINTER: u32 = 3;
    pub const IS_MANAGED: u32 = 8;
    pub const DEVICE_ORDINAL: u32 = 9;
    pub const IS_LEGACY_IPC_CAPABLE: u32 = 10;
    pub const RANGE_START: u32 = 11;
    pub const RANGE_SIZE: u32 = 12;
    pub const MAPPED: u32 = 13;
    pub const ALLOWED_HANDLE_TYPES: u32 = 14;
}

/// The value of an attribute, in the size in which the driver writes it (seen with 580).
enum Value {
    Narrow(u32),
    Wide(u64),
}

impl Value {
    /// # Safety
    /// `place` must be writable for the attribute's value.
    unsafe fn write(self, place: *mut c_void) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::Narrow(value) => place.cast::<u32>().write_unaligned(value),
                Self::Wide(value) => place.cast::<u64>().write_unaligned(value),
            }
        }
    }
}

/// An attribute that the driver would tell differently, because the memory is virtual memory to it, or paused.
fn told(allocation: &Allocation, attribute: u32, pointer: CUdeviceptr) -> Option<Value> {
    use Value::{Narrow, Wide};
    if allocation.wanted().is_none() {
        match attribute {
            attribute::CONTEXT => return Some(Wide(allocation.context().handle().address())),
            attribute::ALLOWED_HANDLE_TYPES => return Some(Wide(0)),
            attribute::RANGE_START => return Some(Wide(allocation.key())),
            attribute::RANGE_SIZE => return Some(Wide(allocation.requested as u64)),
            _ => (),
        }
    }
    match attribute {
        _ if !allocation.is_paused() => None,
        // Virtual memory belongs to no context.
        attribute::CONTEXT => Some(Wide(0)),
        attribute::MEMORY_TYPE => Some(Narrow(2)), // CU_MEMORYTYPE_DEVICE
        attribute::DEVICE_POINTER => Some(Wide(pointer)),
        attribute::IS_MANAGED => Some(Narrow(0)),
        attribute::DEVICE_ORDINAL => Some(Narrow(allocation.device.cast_unsigned())),
        attribute::IS_LEGACY_IPC_CAPABLE => Some(Narrow(0)),
        attribute::MAPPED => Some(Narrow(1)),
        _ => None,
    }
}

fn managed(pointer: CUdeviceptr) -> Option<Arc<Allocation>> {
    Memory::existing()?.find(pointer)
}

pub unsafe fn pointer_attribute(value: *mut c_void, attribute: c_uint, pointer: CUdeviceptr) -> StatusCode {
    match managed(pointer).and_then(|allocation| told(&allocation, attribute, pointer)) {
        Some(told) if !value.is_null() => {
            // SAFETY: not null, and writable by the program's promise.
            unsafe { told.write(value) };
            code::SUCCESS
        }
        // SAFETY: the real function gets the arguments unchanged.
        _ => unsafe { driver_originals::cuPointerGetAttribute(value, attribute, pointer) },
    }
}

pub unsafe fn pointer_attributes(count: c_uint, attributes: *const c_uint, values: *mut *mut c_void, pointer: CUdeviceptr) -> StatusCode {
    // SAFETY: as above.
    let answer = unsafe { driver_originals::cuPointerGetAttributes(count, attributes, values, pointer) };
    // It succeeds for unknown memory, too.
    if answer == code::SUCCESS
        && let Some(allocation) = managed(pointer)
    {
        // SAFETY: the real function has accepted the arrays.
        let (attributes, values) =
            unsafe { (slice::from_raw_parts(attributes, count as usize), slice::from_raw_parts(values, count as usize)) };
        for (attribute, value) in attributes.iter().zip(values) {
            if let Some(told) = told(&allocation, *attribute, pointer) {
                // SAFETY: the real function has written there.
                unsafe { told.write(*value) };
            }
        }
    }
    answer
}

pub unsafe fn address_range(base: *mut CUdeviceptr, bytes: *mut usize, pointer: CUdeviceptr) -> StatusCode {
    // The driver tells one of the pieces that large memory is made of, and nothing of paused memory.
    let Some(allocation) = managed(pointer).filter(|allocation| allocation.wanted().is_none()) else {
        // SAFETY: as above.
        return unsafe { driver_originals::cuMemGetAddressRange_v2(base, bytes, pointer) };
    };
    // SAFETY: the program promises that pointers that are not null are writable.
    unsafe {
        if !base.is_null() {
            base.write(allocation.key());
        }
        if !bytes.is_null() {
            bytes.write(allocation.requested);
        }
    }
    code::SUCCESS
}
