//! Memory pools.
//!
//! Memory that is freed in the order of a stream is reused by later allocations of the same size in that stream, and by any once the stream
//! has got there. A pool gives back what is above its release threshold (0) at the next synchronisation, and all if a request finds no memory.

use crate::abi::{AccessDesc, Address, Handle, In, IpcHandle, LOCATION_DEVICE, Location, Out};
use crate::codes::{INVALID_VALUE, NOT_SUPPORTED, Outcome};
use crate::driver::{self, State, state};
use crate::machine::MAX_DEVICES;
use crate::sharing;
use crate::vmm::{self, HANDLE_TYPE_FILE, READ_WRITE};
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
    pub const RELEASE_THRESHOLD: u32 = 4;
    pub const RESERVED_MEM_CURRENT: u32 = 5;
    pub const USED_MEM_CURRENT: u32 = 7;
}

/// `cuMemPoolSetAttribute`: only the release threshold has an effect.
pub fn set_attribute(pool: Handle, which: u32, value: *mut c_void) -> Outcome {
    let mut state = state();
    state.pools.device(pool)?;
    if value.is_null() {
        return Err(INVALID_VALUE);
    }
    if which == attribute::RELEASE_THRESHOLD {
        // SAFETY: CUDA's contract: this attribute has 64 bits.
        let threshold = unsafe { value.cast::<u64>().read_unaligned() };
        state.pools.thresholds.insert(pool, threshold);
    }
    Ok(())
}

/// `cuMemPoolGetAttribute`: only the release threshold and the current bytes.
pub fn get_attribute(pool: Handle, which: u32, value: Out<u64>) -> Outcome {
    let state = state();
    state.pools.device(pool)?;
    value.put(match which {
        attribute::RELEASE_THRESHOLD => state.pools.thresholds.get(&pool).copied().unwrap_or(0),
        attribute::RESERVED_MEM_CURRENT => state.space.bytes_of_pool(pool) as u64,
        attribute::USED_MEM_CURRENT => state.space.used_of_pool(pool) as u64,
        _ => return Err(NOT_SUPPORTED),
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
