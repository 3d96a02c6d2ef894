//! Memory pools. The simulated pools cache nothing.

use crate::abi::{Handle, In, LOCATION_DEVICE, Location, Out};
use crate::codes::{INVALID_VALUE, NOT_SUPPORTED, Outcome};
use crate::driver::{self, state};
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
    state().pools.created.remove(&pool).map(drop).ok_or(INVALID_VALUE)
}

/// `cuDeviceGetDefaultMemPool` and `cuDeviceGetMemPool`: the current pool is always the default one.
pub fn default(pool: Out<Handle>, device: i32) -> Outcome {
    let device = driver::device(device)?;
    pool.put(*state().pools.default.entry(device).or_insert_with(driver::new_handle))
}

/// `cuMemPoolTrimTo`: a no-op.
pub fn trim(pool: Handle) -> Outcome {
    state().pools.device(pool).map(drop)
}

/// `cuMemPoolSetAttribute`: accepted without effect.
pub fn set_attribute(pool: Handle, _attribute: u32, value: *mut c_void) -> Outcome {
    state().pools.device(pool)?;
    if value.is_null() { Err(INVALID_VALUE) } else { Ok(()) }
}
