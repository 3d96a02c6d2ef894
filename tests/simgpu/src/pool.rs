//! Memory pools. The simulated pools cache nothing.

use crate::abi::{AccessDesc, Handle, In, LOCATION_DEVICE, Location, Out};
use crate::codes::{INVALID_VALUE, NOT_SUPPORTED, Outcome};
use crate::driver::{self, state};
use crate::machine::MAX_DEVICES;
use crate::vmm::{self, READ_WRITE};
use std::collections::HashMap;
use std::ffi::c_void;

/// The beginning of `CUmemPoolProps`, the part that is used.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PoolProps {
    kind: u32,
    handle_types: u32,
    location: Location,
}

/// This process's pools.
#[derive(Debug, Default)]
pub struct Pools {
    created: HashMap<Handle, usize>,
    default: HashMap<usize, Handle>,
    /// What other devices may do, where that has been set.
    access: HashMap<Handle, [u32; MAX_DEVICES]>,
}

impl Pools {
    /// A pool's device.
    pub fn device(&self, pool: Handle) -> Outcome<usize> {
        self.created
            .get(&pool)
            .copied()
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
    if props.handle_types != 0 {
        return Err(NOT_SUPPORTED);
    }
    let device = driver::device(props.location.id)?;
    let handle = driver::new_handle();
    state().pools.created.insert(handle, device);
    pool.put(handle)
}

/// `cuMemPoolDestroy`: fails for a default pool.
pub fn destroy(pool: Handle) -> Outcome {
    let mut state = state();
    state.pools.created.remove(&pool).ok_or(INVALID_VALUE)?;
    state.pools.access.remove(&pool);
    Ok(())
}

/// `cuDeviceGetDefaultMemPool` and `cuDeviceGetMemPool`: the current pool is always the default one.
pub fn default(pool: Out<Handle>, device: i32) -> Outcome {
    let device = driver::device(device)?;
    pool.put(state().pools.default_of(device))
}

/// `cuMemPoolTrimTo`: a no-op.
pub fn trim(pool: Handle) -> Outcome {
    state().pools.device(pool).map(drop)
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

/// `cuMemPoolSetAttribute`: accepted without effect.
pub fn set_attribute(pool: Handle, _attribute: u32, value: *mut c_void) -> Outcome {
    state().pools.device(pool)?;
    if value.is_null() { Err(INVALID_VALUE) } else { Ok(()) }
}
