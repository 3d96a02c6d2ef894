//! Answers pointer queries about managed memory, and about memory opened from other processes, as for CUDA's own memory, even while it is
//! paused. A held program can still make queries, and libraries decide by the answers how to share or register memory.
//!
//! There is one exception: managed memory is reported as not capable of CUDA IPC, although [`share`](crate::share) makes it work for
//! callers that do not ask. Otherwise NCCL (`ipcRegisterBuffer`) would open buffers of captured collectives in the other ranks, and a rank
//! could no longer be paused alone, as engines' own calls do.
//!
//! What only the driver knows waits for the resume in a held program ([`paused`](crate::paused)), such as the numbers of the memory, which are
//! others after a pause. In a program that is not held, the driver answers that it knows no such memory.

use crate::driver_originals;
use crate::paused::{once_there, once_useful};
use std::ffi::{c_uint, c_void};
use std::sync::Arc;
use std::{ptr, slice};
use vramctl_core::memory::borrow::{self, OpenMemory};
use vramctl_core::memory::{Allocation, Memory, reserved};
use vramctl_driver::{self as driver, CUdevice, CUdeviceptr, Properties};
use vramctl_model::{Span, StatusCode, code};

/// `CUpointer_attribute`.
mod attribute {
    pub const CONTEXT: u32 = 1;
    pub const MEMORY_TYPE: u32 = 2;
    pub const DEVICE_POINTER: u32 = 3;
    pub const HOST_POINTER: u32 = 4;
    pub const IS_MANAGED: u32 = 8;
    pub const DEVICE_ORDINAL: u32 = 9;
    pub const IS_LEGACY_IPC_CAPABLE: u32 = 10;
    pub const RANGE_START: u32 = 11;
    pub const RANGE_SIZE: u32 = 12;
    pub const MAPPED: u32 = 13;
    pub const ALLOWED_HANDLE_TYPES: u32 = 14;
    pub const MEMPOOL_HANDLE: u32 = 17;
    pub const MAPPING_SIZE: u32 = 18;
    pub const MAPPING_BASE: u32 = 19;
}

/// The value of an attribute, in the size that the driver writes (observed with 580).
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

/// Whether the driver's value of this attribute differs between memory of `cudaMalloc` and virtual memory. All other attributes are only
/// unknown to it while the memory is paused.
fn shows_virtual_memory(attribute: u32) -> bool {
    use attribute::{ALLOWED_HANDLE_TYPES, CONTEXT, MAPPING_BASE, MAPPING_SIZE, MEMPOOL_HANDLE, RANGE_SIZE, RANGE_START};
    matches!(attribute, CONTEXT | ALLOWED_HANDLE_TYPES | MEMPOOL_HANDLE | RANGE_START | RANGE_SIZE | MAPPING_BASE | MAPPING_SIZE)
}

/// Memory that looks different to the driver than to the program.
enum Pointed {
    Managed(Arc<Allocation>),
    /// Memory of another process. To the program it is CUDA IPC's.
    Opened(OpenMemory),
}

impl Pointed {
    /// What is at a pointer, and about which pointer to ask the driver: about none where CUDA would know nothing, which is behind the last byte
    /// that the program has asked for, because virtual memory is larger, and where freed memory was.
    fn at(pointer: CUdeviceptr) -> (Option<Self>, CUdeviceptr) {
        let Some(allocation) = Memory::existing().and_then(|memory| memory.registry.find(pointer)) else {
            let opened = borrow::at(pointer).map(Self::Opened);
            let is_unknown = opened.is_none() && driver::is_spare(pointer);
            return (opened, if is_unknown { 0 } else { pointer });
        };
        let is_behind = allocation.origin().is_malloc() && allocation.place_of(pointer).is_none();
        if is_behind { (None, 0) } else { (Some(Self::Managed(allocation)), pointer) }
    }

    /// What the program asked `cuMemCreate` for, if it is its own virtual memory.
    fn properties(&self) -> Option<&Properties> {
        if let Self::Managed(allocation) = self { allocation.origin().properties() } else { None }
    }

    fn is_paused(&self) -> bool {
        match self {
            Self::Managed(allocation) => allocation.is_unmapped(),
            Self::Opened(seen) => seen.is_paused,
        }
    }

    /// 0 for virtual memory and that of pools, which belong to no context.
    fn context(&self) -> u64 {
        match self {
            Self::Managed(allocation) if allocation.origin().malloc().is_some_and(|malloc| !malloc.from_pool) => {
                allocation.context().handle().address()
            }
            Self::Managed(_) => 0,
            Self::Opened(seen) => seen.context.map_or(0, |context| context.handle().address()),
        }
    }

    fn is_on_host(&self) -> bool {
        matches!(self, Self::Managed(allocation) if allocation.is_on_host())
    }

    fn device(&self) -> CUdevice {
        match self {
            Self::Managed(allocation) => allocation.device,
            Self::Opened(seen) => seen.device,
        }
    }

    /// The pool that it is from; 0 if it is from none.
    fn pool(&self) -> u64 {
        match self {
            Self::Managed(allocation) if allocation.is_from_pool() => driver::default_pool(allocation.device).map_or(0, |pool| pool as u64),
            Self::Managed(_) | Self::Opened(_) => 0,
        }
    }

    /// The address range around a pointer, and whether any device has access.
    fn place_of(&self, pointer: CUdeviceptr) -> Option<(Span, bool)> {
        match self {
            Self::Managed(allocation) => allocation.place_of(pointer),
            Self::Opened(seen) => Some((seen.span, true)),
        }
    }
}

/// Our value of an attribute, if the driver's would differ because the memory is virtual memory to it, or paused.
fn own_answer(known: &Pointed, attribute: u32, pointer: CUdeviceptr) -> Option<Value> {
    use Value::{Narrow, Wide};
    let is_plain = known.properties().is_none();
    let is_ours = known.is_paused() || (is_plain && shows_virtual_memory(attribute));
    if !is_ours {
        return None;
    }
    let place = || known.place_of(pointer);
    match attribute {
        attribute::CONTEXT => Some(Wide(known.context())),
        attribute::MEMORY_TYPE => Some(Narrow(if known.is_on_host() { 1 } else { 2 })), // CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE
        attribute::DEVICE_POINTER => place().filter(|(_, is_open)| *is_open).map(|_| Wide(pointer)),
        attribute::IS_MANAGED | attribute::IS_LEGACY_IPC_CAPABLE => Some(Narrow(0)),
        attribute::DEVICE_ORDINAL => Some(Narrow(known.device().cast_unsigned())),
        attribute::MAPPED => Some(Narrow(1)),
        attribute::ALLOWED_HANDLE_TYPES => Some(Wide(known.properties().map_or(0, Properties::handle_types).into())),
        attribute::MEMPOOL_HANDLE => Some(Wide(known.pool())),
        // Of the program's own mappings, the reservation.
        attribute::RANGE_START if !is_plain => reserved::around(pointer).map(|span| Wide(span.address)),
        attribute::RANGE_SIZE if !is_plain => reserved::around(pointer).map(|span| Wide(span.bytes as u64)),
        attribute::RANGE_START | attribute::MAPPING_BASE => place().map(|(span, _)| Wide(span.address)),
        attribute::RANGE_SIZE | attribute::MAPPING_SIZE => place().map(|(span, _)| Wide(span.bytes as u64)),
        _ => None,
    }
}

/// Whether only the driver can answer this, and only once the memory is back.
fn is_paused_for(known: &Pointed, attribute: u32) -> bool {
    use attribute::{
        ALLOWED_HANDLE_TYPES, CONTEXT, DEVICE_ORDINAL, DEVICE_POINTER, HOST_POINTER, IS_LEGACY_IPC_CAPABLE, IS_MANAGED, MAPPED,
        MAPPING_BASE, MAPPING_SIZE, MEMORY_TYPE, MEMPOOL_HANDLE, RANGE_SIZE, RANGE_START,
    };
    let is_known = match attribute {
        // The device's memory has none.
        HOST_POINTER => !known.is_on_host(),
        CONTEXT
        | MEMORY_TYPE
        | DEVICE_POINTER
        | IS_MANAGED
        | DEVICE_ORDINAL
        | IS_LEGACY_IPC_CAPABLE
        | RANGE_START
        | RANGE_SIZE
        | MAPPED
        | ALLOWED_HANDLE_TYPES
        | MEMPOOL_HANDLE
        | MAPPING_SIZE
        | MAPPING_BASE => true,
        _ => false,
    };
    !is_known && known.is_paused()
}

pub unsafe fn pointer_attribute(value: *mut c_void, attribute: c_uint, pointer: CUdeviceptr) -> StatusCode {
    // SAFETY: the program's promises.
    once_there(
        || Pointed::at(pointer).0.is_some_and(|known| is_paused_for(&known, attribute)),
        || unsafe { pointer_attribute_now(value, attribute, pointer) },
    )
}

unsafe fn pointer_attribute_now(value: *mut c_void, attribute: c_uint, pointer: CUdeviceptr) -> StatusCode {
    let (known, asked) = Pointed::at(pointer);
    // SAFETY: the real function gets the program's arguments, or a pointer that it does not know.
    let answer = unsafe { driver_originals::cuPointerGetAttribute(value, attribute, asked) };
    // Other errors stay unchanged.
    if matches!(answer, code::SUCCESS | code::INVALID_VALUE)
        && !value.is_null()
        && let Some(own) = known.and_then(|known| own_answer(&known, attribute, pointer))
    {
        // SAFETY: not null, and writable by the program's promise.
        unsafe { own.write(value) };
        return code::SUCCESS;
    }
    answer
}

pub unsafe fn pointer_attributes(count: c_uint, attributes: *const c_uint, values: *mut *mut c_void, pointer: CUdeviceptr) -> StatusCode {
    let is_paused = || {
        Pointed::at(pointer).0.is_some_and(|known| {
            // SAFETY: the real function has accepted the arrays.
            let attributes = unsafe { slice::from_raw_parts(attributes, count as usize) };
            attributes.iter().any(|attribute| is_paused_for(&known, *attribute))
        })
    };
    // The driver succeeds for unknown memory, too.
    let may_be_in_vain = |answer: &StatusCode| *answer == code::SUCCESS && count > 0;
    // SAFETY: the program's promises.
    once_useful(|| unsafe { pointer_attributes_now(count, attributes, values, pointer) }, may_be_in_vain, is_paused)
}

unsafe fn pointer_attributes_now(count: c_uint, attributes: *const c_uint, values: *mut *mut c_void, pointer: CUdeviceptr) -> StatusCode {
    let (known, asked) = Pointed::at(pointer);
    // SAFETY: as above.
    let answer = unsafe { driver_originals::cuPointerGetAttributes(count, attributes, values, asked) };
    // The driver succeeds for unknown memory, too.
    if answer == code::SUCCESS
        && count > 0
        && let Some(known) = known
    {
        // SAFETY: the real function has accepted the arrays.
        let (attributes, values) =
            unsafe { (slice::from_raw_parts(attributes, count as usize), slice::from_raw_parts(values, count as usize)) };
        for (attribute, value) in attributes.iter().zip(values) {
            if let Some(own) = own_answer(&known, *attribute, pointer) {
                // SAFETY: the real function has written there.
                unsafe { own.write(*value) };
            }
        }
    }
    answer
}

/// The device's address of host memory. The driver takes virtual memory of a device for such, and memory of `cudaMalloc` not (observed with 580).
pub unsafe fn host_device_pointer(pointer: *mut CUdeviceptr, host: *mut c_void, flags: c_uint) -> StatusCode {
    let asked = match Pointed::at(host as CUdeviceptr) {
        (Some(known), _) if known.properties().is_none() => ptr::null_mut(),
        (_, asked) => asked as *mut c_void,
    };
    // SAFETY: the program's arguments, or no host memory.
    unsafe { driver_originals::cuMemHostGetDevicePointer_v2(pointer, asked, flags) }
}

pub unsafe fn address_range(base: *mut CUdeviceptr, bytes: *mut usize, pointer: CUdeviceptr) -> StatusCode {
    let (known, asked) = Pointed::at(pointer);
    // SAFETY: as above.
    let answer = unsafe { driver_originals::cuMemGetAddressRange_v2(base, bytes, asked) };
    // The driver reports only one of the pieces of a large allocation, and nothing for memory that was paused when it was asked. Other errors
    // stay unchanged.
    let place = known.filter(|known| known.properties().is_none() || answer != code::SUCCESS).and_then(|known| known.place_of(pointer));
    let (Some((place, true)), code::SUCCESS | code::NOT_FOUND | code::INVALID_VALUE) = (place, answer) else { return answer };
    // SAFETY: the program promises that pointers that are not null are writable.
    unsafe {
        if !base.is_null() {
            base.write(place.address);
        }
        if !bytes.is_null() {
            bytes.write(place.bytes);
        }
    }
    code::SUCCESS
}
