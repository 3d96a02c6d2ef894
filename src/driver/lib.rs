//! The project's own calls of the CUDA driver: the function table, raw status codes, and RAII wrappers.
//!
//! Beside it, only `intercept` calls the driver, with the program's calls. This crate knows nothing of tags, backups or sockets.

mod account;
mod between;
pub mod checkpoint;
mod context;
mod copy;
mod ending;
mod event;
mod extras;
mod kernel;
mod life;
pub mod nccl;
mod no_cards;
mod nvml;
mod properties;
pub mod streams;
mod structures;
mod survey;
mod table;
mod vmm;
mod work;

pub use account::{Account, device_memory};
pub use between::{NodeParameters, Plane};
pub use context::{Context, ContextHandle, Current, Green, RelaxedCapture, Stream, StreamHandle, StreamId};
pub use copy::{Direction, Lane, Mark, Pinned, PinnedBuffer, device_address};
pub use cudarc::driver::sys::{
    CUarrayMapInfo, CUdevice, CUdeviceptr, CUmemAccessDesc, CUmemAllocationProp, CUmemGenericAllocationHandle, CUmemLocation,
};
use cudarc::driver::sys::{CUcontext, CUevent, CUpointer_attribute, CUstream};
pub use event::Event;
pub use extras::{Extras, make_on};
pub use kernel::{Image, Parts, Resident};
pub use life::{Ending, Kept};
pub use no_cards::NoCards;
pub use nvml::{
    Card, Climate, cards, climate, gpu_in_words, gpu_with_index, holders, holders_of, index_of, keep_nvml, own_use, uses, usual_uses, uuid,
    uuid_of_index,
};
pub use properties::{Access, Location, Properties};
pub use structures::{CopyBetween, CopySide};
pub use survey::{Gpu, Survey, cuda_version, survey, try_memory};
pub use table::Driver;
pub use vmm::{
    Addresses, PHYSICAL_PIECE, Physical, Place, free_spare_addresses, granularity, has_leftover_imports, is_shareable, is_spare,
    leftover_bytes, open, supports_vmm, sweep, unmap,
};

pub use work::{Activity, Manner, activity, wait_for_work};

use std::ffi::c_void;
use std::ops::Range;
use std::ptr;
use vramctl_model::{Failure, Span, code};

/// An allocation's location.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// The context that the program allocated in.
    pub context: Context,
    /// That context's device.
    pub device: CUdevice,
    /// First address.
    pub address: CUdeviceptr,
    /// Length in bytes.
    pub bytes: usize,
}

/// Free and total bytes of memory on the current context's device.
pub fn memory_info() -> Result<(u64, u64), Failure> {
    let (mut free, mut total) = (0usize, 0usize);
    // SAFETY: both are writable.
    unsafe { Driver::get()?.cuMemGetInfo_v2(&raw mut free, &raw mut total)? };
    Ok((free as u64, total as u64))
}

/// Bytes of memory of a device. Needs no context.
pub fn total_memory(device: CUdevice) -> Result<u64, Failure> {
    let mut total = 0;
    // SAFETY: `total` is writable.
    unsafe { Driver::get()?.cuDeviceTotalMem_v2(&raw mut total, device)? };
    Ok(total as u64)
}

/// The pool from which a device serves stream-ordered allocations.
pub fn current_pool(device: CUdevice) -> Result<*mut c_void, Failure> {
    let mut pool = std::ptr::null_mut();
    // SAFETY: `pool` is writable.
    unsafe { Driver::get()?.cuDeviceGetMemPool(&raw mut pool, device)? };
    Ok(pool)
}

/// The pool that does so unless the program chooses another.
pub fn default_pool(device: CUdevice) -> Result<*mut c_void, Failure> {
    let mut pool = std::ptr::null_mut();
    // SAFETY: `pool` is writable.
    unsafe { Driver::get()?.cuDeviceGetDefaultMemPool(&raw mut pool, device)? };
    Ok(pool)
}

/// How many bytes a device's default pool may keep when the program synchronises.
pub fn release_threshold(device: CUdevice) -> Result<u64, Failure> {
    /// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`.
    const RELEASE_THRESHOLD: u32 = 4;
    // SAFETY: a pool of the driver's.
    unsafe { pool_attribute(default_pool(device)?, RELEASE_THRESHOLD) }
}

/// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`.
const RESERVED: u32 = 5;
/// `CU_MEMPOOL_ATTR_USED_MEM_CURRENT`.
const USED: u32 = 7;

/// Whether memory of a pool is in use.
///
/// # Safety
/// `pool` must be a pool of the driver's.
pub unsafe fn is_pool_in_use(pool: *mut c_void) -> Result<bool, Failure> {
    // SAFETY: the caller's promise.
    Ok(unsafe { pool_attribute(pool, USED) }? > 0)
}

/// How many bytes a pool has reserved, and how many of these are in use.
///
/// # Safety
/// `pool` must be a pool of the driver's.
pub unsafe fn extent_of_pool(pool: *mut c_void) -> Result<(u64, u64), Failure> {
    // SAFETY: the caller's promise.
    unsafe { Ok((pool_attribute(pool, RESERVED)?, pool_attribute(pool, USED)?)) }
}

/// An attribute of 64 bits. A capture forbids such questions, too (observed with driver 580).
///
/// # Safety
/// `pool` must be a pool of the driver's.
unsafe fn pool_attribute(pool: *mut c_void, attribute: u32) -> Result<u64, Failure> {
    let _relaxed = RelaxedCapture::enter();
    let mut value = 0u64;
    // SAFETY: the caller's promise; there is room for 64 bits.
    unsafe { Driver::get()?.cuMemPoolGetAttribute(pool, attribute, (&raw mut value).cast())? };
    Ok(value)
}

/// Memory as the driver knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KnownMemory {
    /// Its device; `None`: it is host memory.
    pub device: Option<CUdevice>,
    /// The first address of the allocation or, for virtual memory, of the whole reservation.
    pub start: CUdeviceptr,
    /// The mapping.
    pub mapping: Span,
}

/// What is at an address; `None`: nothing that the driver knows.
pub fn memory_at(address: CUdeviceptr) -> Result<Option<KnownMemory>, Failure> {
    use CUpointer_attribute as Asked;
    const HOST: u64 = 1; // CU_MEMORYTYPE_HOST
    let attributes = [
        Asked::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        Asked::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        Asked::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        Asked::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR,
        Asked::CU_POINTER_ATTRIBUTE_MAPPING_SIZE,
    ]
    .map(|attribute| attribute as u32);
    let mut values = [0u64; 5];
    let mut places = values.each_mut().map(|value| ptr::from_mut(value).cast());
    // SAFETY: as many attributes as places, each with room for 64 bits.
    unsafe { Driver::get()?.cuPointerGetAttributes(5, attributes.as_ptr(), places.as_mut_ptr(), address)? };
    let [kind, device, start, base, bytes] = values;
    // The driver reports success for an unknown address, with attributes of 0.
    if kind == 0 {
        return Ok(None);
    }
    let or_here = |value: u64| if value == 0 { address } else { value };
    Ok(Some(KnownMemory {
        device: if kind == HOST { None } else { CUdevice::try_from(device).ok() },
        start: or_here(start),
        mapping: Span { address: or_here(base), bytes: bytes as usize },
    }))
}

/// Whether a context's device has enough free memory for the library to use a little itself without causing a shortage.
pub fn has_to_spare(context: Context) -> bool {
    /// In bytes; far more than the library uses.
    const SPARE: u64 = 64 << 20;
    Current::push(context).and_then(|_current| memory_info()).is_ok_and(|(free, _)| free >= SPARE)
}

/// A 64-bit pointer attribute that is never 0 for a known address. Unknown addresses are an error.
fn pointer_attribute(address: CUdeviceptr, attribute: CUpointer_attribute) -> Result<u64, Failure> {
    let (mut value, attribute) = (0u64, attribute as u32);
    let mut place = (&raw mut value).cast();
    // SAFETY: one attribute, and room for its 64-bit value.
    unsafe { Driver::get()?.cuPointerGetAttributes(1, &raw const attribute, &raw mut place, address)? };
    // The driver reports success for an unknown address, with attributes of 0.
    let known = if value == 0 { code::INVALID_VALUE } else { code::SUCCESS };
    Failure::check("cuPointerGetAttributes", known).map(|()| value)
}

/// The context with which memory of the driver's ends. `None` for other memory, which no context owns.
pub fn context_of_memory(address: CUdeviceptr) -> Option<Context> {
    let handle = pointer_attribute(address, CUpointer_attribute::CU_POINTER_ATTRIBUTE_CONTEXT).ok()?;
    ContextHandle::of_address(handle).context().ok()
}

/// The devices that this process sees; none if the driver does not say.
pub fn devices() -> Range<CUdevice> {
    let mut count = 0;
    // SAFETY: `count` is writable.
    let counted = Driver::get().and_then(|driver| unsafe { driver.cuDeviceGetCount(&raw mut count) });
    0..counted.map_or(0, |()| count)
}

/// Whether a device's contexts run under MPS.
pub fn is_behind_mps(device: CUdevice) -> bool {
    /// `CU_DEVICE_ATTRIBUTE_MPS_ENABLED`.
    const MPS_ENABLED: u32 = 133;
    attribute(device, MPS_ENABLED) != 0
}

/// A device attribute; 0 if the driver does not know it.
fn attribute(device: CUdevice, attribute: u32) -> i32 {
    let mut value = 0;
    let answer = Driver::get().and_then(|driver| {
        // SAFETY: `value` is writable; an unknown device or attribute is an error.
        unsafe { driver.cuDeviceGetAttribute(&raw mut value, attribute, device) }
    });
    answer.map_or(0, |()| value)
}
