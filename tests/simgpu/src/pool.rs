//! Memory pools.
//!
//! Memory that is freed in the order of a stream is reused by later allocations of the same size in that stream, and by any once the stream
//! has got there. A pool gives back what is above its release threshold (0) at the next synchronisation, and all if a request finds no memory.

use crate::abi::{AccessDesc, Address, Handle, In, IpcHandle, LOCATION_DEVICE, Location, Out};
use crate::codes::{INVALID_VALUE, NOT_SUPPORTED, Outcome};
use crate::driver::{self, State, state};
use crate::machine::MAX_DEVICES;
use crate::sharing;
use crate::vmm::{self, HANDLE_TYPE_FILE, READ_WRITE, Space};
use std::collections::HashMap;
use std::ffi::{c_int, c_void};

/// The beginning of `CUmemPoolProps`, the part that is used.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PoolProps {
    kind: u32,
    handle_types: u32,
    location: Location,
}

/// `CUmemPoolPtrExportData`.
pub type PointerData = IpcHandle;

/// A pool that the program has created or imported.
#[derive(Debug)]
struct Pool {
    device: usize,
    /// Bits of `CUmemAllocationHandleType`.
    handle_types: u32,
    imported: bool,
}

/// This process's pools.
#[derive(Debug, Default)]
pub struct Pools {
    created: HashMap<Handle, Pool>,
    default: HashMap<usize, Handle>,
    /// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`, where that has been set.
    thresholds: HashMap<Handle, u64>,
    /// What other devices may do, where that has been set.
    access: HashMap<Handle, [u32; MAX_DEVICES]>,
    /// High-water marks.
    peaks: HashMap<Handle, Extent>,
}

impl Pools {
    /// Fails for what is no pool, or an imported one.
    pub fn check_own(&self, pool: Handle) -> Outcome {
        self.device(pool)?;
        if self.created.get(&pool).is_some_and(|pool| pool.imported) { Err(INVALID_VALUE) } else { Ok(()) }
    }
    /// A pool's device.
    pub fn device(&self, pool: Handle) -> Outcome<usize> {
        self.created
            .get(&pool)
            .map(|pool| pool.device)
            .or_else(|| self.default.iter().find(|&(_, &handle)| handle == pool).map(|(&device, _)| device))
            .ok_or(INVALID_VALUE)
    }

    /// A device's default pool.
    pub fn default_of(&mut self, device: usize) -> Handle {
        *self.default.entry(device).or_insert_with(driver::new_handle)
    }

    /// Sets the high-water marks of a pool from which memory has been taken.
    pub fn note_peak(&mut self, pool: Handle, space: &Space) {
        let (peak, now) = (self.peaks.entry(pool).or_default(), Extent::of(pool, space));
        *peak = Extent { reserved: peak.reserved.max(now.reserved), used: peak.used.max(now.used) };
    }

    /// What each device may do with a pool's memory: its own always everything.
    pub fn access(&self, pool: Handle) -> Outcome<[u32; MAX_DEVICES]> {
        let mut access = self.access.get(&pool).copied().unwrap_or_default();
        access[self.device(pool)?] = READ_WRITE;
        Ok(access)
    }
}

/// `cuMemPoolCreate`.
pub fn create(pool: Out<Handle>, props: In<PoolProps>) -> Outcome {
    pool.required()?;
    let props = props.get()?;
    if props.kind != 1 || props.location.kind != LOCATION_DEVICE {
        return Err(INVALID_VALUE);
    }
    if !matches!(props.handle_types, 0 | HANDLE_TYPE_FILE) {
        return Err(NOT_SUPPORTED);
    }
    let device = driver::device(props.location.id)?;
    let handle = driver::new_handle();
    state().pools.created.insert(handle, Pool { device, handle_types: props.handle_types, imported: false });
    pool.put(handle)
}

/// `cuMemPoolDestroy`: fails for a default pool. Memory from it stays until it is freed.
pub fn destroy(pool: Handle) -> Outcome {
    let mut state = state();
    state.pools.created.remove(&pool).ok_or(INVALID_VALUE)?;
    state.pools.access.remove(&pool);
    state.pools.thresholds.remove(&pool);
    state.pools.peaks.remove(&pool);
    state.space.give_back_above(|of| if of == pool { 0 } else { u64::MAX });
    Ok(())
}

/// `cuDeviceGetDefaultMemPool` and `cuDeviceGetMemPool`: the current pool is always the default one.
pub fn default(pool: Out<Handle>, device: i32) -> Outcome {
    let device = driver::device(device)?;
    pool.put(state().pools.default_of(device))
}

/// `cuMemPoolTrimTo`: gives back what nobody uses, down to `keep` bytes.
pub fn trim(pool: Handle, keep: usize) -> Outcome {
    let mut state = state();
    state.pools.device(pool)?;
    state.space.give_back_above(|of| if of == pool { keep as u64 } else { u64::MAX });
    Ok(())
}

/// What a synchronisation does.
pub fn synchronised() {
    let State { pools, space, .. } = &mut *state();
    space.give_back_above(|pool| pools.thresholds.get(&pool).copied().unwrap_or(0));
}

/// `cuMemPoolSetAccess`: for all memory of the pool, present and future. Enabled peer access does not matter to it. The pool's own device
/// cannot lose its access (CUDA's programming guide).
pub fn set_access(pool: Handle, access: In<AccessDesc>, count: usize) -> Outcome {
    let mut changes = Vec::new();
    for access in access.get_all(count)? {
        if !matches!(access.flags, 0 | READ_WRITE) {
            return Err(INVALID_VALUE);
        }
        changes.push((vmm::access_device(access.location)?, access.flags));
    }
    let mut state = state();
    let owner = state.pools.device(pool)?;
    if changes.contains(&(owner, 0)) {
        return Err(INVALID_VALUE);
    }
    for (device, flags) in changes {
        state.pools.access.entry(pool).or_default()[device] = flags;
        state.space.set_pool_access(pool, device, flags);
    }
    Ok(())
}

/// `CUmemPool_attribute`.
mod attribute {
    pub const REUSE: std::ops::RangeInclusive<u32> = 1..=3;
    pub const RELEASE_THRESHOLD: u32 = 4;
    pub const RESERVED_MEM_CURRENT: u32 = 5;
    pub const RESERVED_MEM_HIGH: u32 = 6;
    pub const USED_MEM_CURRENT: u32 = 7;
    pub const USED_MEM_HIGH: u32 = 8;
}

/// How much of a pool there is and is in use, or once was.
#[derive(Clone, Copy, Debug, Default)]
struct Extent {
    reserved: u64,
    used: u64,
}

impl Extent {
    fn of(pool: Handle, space: &Space) -> Self {
        Self { reserved: space.bytes_of_pool(pool) as u64, used: space.used_of_pool(pool) as u64 }
    }
}

/// `cuMemPoolSetAttribute`: how memory is reused cannot be set here, high-water marks only to 0, for what is there now, and the rest not at
/// all.
pub fn set_attribute(pool: Handle, which: u32, value: *mut c_void) -> Outcome {
    let State { pools, space, .. } = &mut *state();
    pools.device(pool)?;
    if value.is_null() {
        return Err(INVALID_VALUE);
    }
    if attribute::REUSE.contains(&which) {
        return Ok(());
    }
    // SAFETY: CUDA's contract: the other attributes have 64 bits.
    let value = unsafe { value.cast::<u64>().read_unaligned() };
    let (peak, now) = (pools.peaks.entry(pool).or_default(), Extent::of(pool, space));
    match (which, value) {
        (attribute::RELEASE_THRESHOLD, threshold) => _ = pools.thresholds.insert(pool, threshold),
        (attribute::RESERVED_MEM_HIGH, 0) => peak.reserved = now.reserved,
        (attribute::USED_MEM_HIGH, 0) => peak.used = now.used,
        _ => return Err(INVALID_VALUE),
    }
    Ok(())
}

/// `cuMemPoolGetAttribute`.
pub fn get_attribute(pool: Handle, which: u32, value: *mut c_void) -> Outcome {
    let State { pools, space, .. } = &*state();
    pools.device(pool)?;
    if attribute::REUSE.contains(&which) {
        return Out::of(value).put(1_u32);
    }
    let (peak, now) = (pools.peaks.get(&pool).copied().unwrap_or_default(), Extent::of(pool, space));
    Out::of(value).put(match which {
        attribute::RELEASE_THRESHOLD => pools.thresholds.get(&pool).copied().unwrap_or(0),
        attribute::RESERVED_MEM_CURRENT => now.reserved,
        attribute::RESERVED_MEM_HIGH => peak.reserved,
        attribute::USED_MEM_CURRENT => now.used,
        attribute::USED_MEM_HIGH => peak.used,
        _ => return Err(INVALID_VALUE),
    })
}

/// `cuMemPoolExportToShareableHandle`: a descriptor. Only of a pool that was created with this type of handle.
pub fn export(shared: Out<c_int>, pool: Handle, kind: u32, flags: u64) -> Outcome {
    shared.required()?;
    let device = {
        let state = state();
        let pool = state.pools.created.get(&pool).filter(|pool| !pool.imported).ok_or(INVALID_VALUE)?;
        if kind != HANDLE_TYPE_FILE || flags != 0 || pool.handle_types & kind == 0 {
            return Err(INVALID_VALUE);
        }
        pool.device
    };
    shared.put(sharing::pool_file(device)?)
}

/// `cuMemPoolImportFromShareableHandle`. Each import gives a new pool.
pub fn import(pool: Out<Handle>, shared: usize, kind: u32, flags: u64) -> Outcome {
    pool.required()?;
    if kind != HANDLE_TYPE_FILE || flags != 0 {
        return Err(INVALID_VALUE);
    }
    let device = sharing::device_of_pool(shared)?;
    let handle = driver::new_handle();
    state().pools.created.insert(handle, Pool { device, handle_types: 0, imported: true });
    pool.put(handle)
}

/// `cuMemPoolExportPointer`: only memory of a pool that can be exported.
pub fn export_pointer(data: Out<PointerData>, pointer: Address) -> Outcome {
    data.required()?;
    {
        let state = state();
        let pool = state.space.find(pointer).and_then(|range| range.purpose.pool()).and_then(|pool| state.pools.created.get(&pool));
        if pool.is_none_or(|pool| pool.handle_types & HANDLE_TYPE_FILE == 0) {
            return Err(INVALID_VALUE);
        }
    }
    data.put(sharing::name(pointer)?)
}

/// `cuMemPoolImportPointer`: at a new address, to be freed like memory of a pool.
pub fn import_pointer(pointer: Out<Address>, pool: Handle, data: In<PointerData>) -> Outcome {
    pointer.required()?;
    if !state().pools.created.get(&pool).is_some_and(|pool| pool.imported) {
        return Err(INVALID_VALUE);
    }
    pointer.put(sharing::import_pooled(data.get()?, pool)?)
}
