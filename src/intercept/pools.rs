//! Memory pools. Managed memory stands for that of the devices' default pools, and the memory of all others is left to CUDA, so they are known
//! only for what the program shares.

use crate::call::Call;
use crate::driver_memory;
use std::collections::BTreeMap;
use std::ffi::{c_uint, c_void};
use std::sync::{Mutex, MutexGuard};
use vramctl_core::limit;
use vramctl_core::memory::sightings::{self, ObstacleKey};
use vramctl_core::memory::{Level, Memory, PoolUse};
use vramctl_driver::{self as driver, Access, CUdevice, CUdeviceptr, Location};
use vramctl_host::{PerProcess, Unpoison};
use vramctl_model::{ObstacleKind, StatusCode, code};

/// A pool of the program's.
#[derive(Clone, Copy)]
enum Pool {
    /// It has memory of this device.
    On(CUdevice),
    /// It has host memory.
    Host,
    /// It is another process's.
    Imported,
}

/// By the driver's handle.
static POOLS: PerProcess<Mutex<BTreeMap<usize, Pool>>> = PerProcess::new(Mutex::default);

fn pools() -> MutexGuard<'static, BTreeMap<usize, Pool>> {
    POOLS.get().lock().unpoisoned()
}

/// The beginning of `CUmemPoolProps`.
#[repr(C)]
struct PoolProperties {
    kind: u32,
    handle_types: u32,
    location: Location,
}

pub unsafe fn create(call: &mut Call, pool: *mut *mut c_void, properties: *const c_void) -> StatusCode {
    let answer = call.real();
    if answer == code::SUCCESS {
        // SAFETY: the real function has read the one, and written the other.
        let (made, location) = unsafe { (pool.read() as usize, (*properties.cast::<PoolProperties>()).location) };
        pools().insert(made, location.device().map_or(Pool::Host, Pool::On));
    }
    answer
}

pub fn destroy(call: &mut Call, pool: *mut c_void) -> StatusCode {
    limit::forget_pool(pool);
    let key = ObstacleKey::Pool(pool as usize);
    let kept = pools().remove(&(pool as usize));
    // Imported memory is recorded for itself. Other memory in use outlives its pool, and its end cannot be seen.
    let ends = sightings::knows(key)
        // SAFETY: the program has shared it, so it is one.
        && (matches!(kept, Some(Pool::Imported)) || unsafe { driver::is_pool_in_use(pool) }.is_ok_and(|is_used| !is_used));
    let mut real = || {
        let answer = call.real();
        if answer != code::SUCCESS
            && let Some(kept) = kept
        {
            pools().insert(pool as usize, kept);
        }
        answer
    };
    if ends { sightings::ending(key, real) } else { real() }
}

pub fn trim(call: &mut Call, pool: *mut c_void, keep: usize) -> StatusCode {
    let answer = call.real();
    if answer == code::SUCCESS
        && let Some((memory, device)) = managed(pool)
    {
        memory.registry.trim(device, keep as u64);
    }
    answer
}

/// The managed memory, if any, and the device for whose default pool it stands.
fn managed(pool: *mut c_void) -> Option<(&'static Memory, CUdevice)> {
    Some((Memory::existing()?, default_of(pool)?))
}

/// The device of which this is the default pool.
fn default_of(pool: *mut c_void) -> Option<CUdevice> {
    driver::devices().find(|device| driver::default_pool(*device).ok() == Some(pool))
}

/// The device whose memory a pool of this process has. `None` for host memory and for other processes' pools.
pub fn device_of(pool: *mut c_void) -> Option<CUdevice> {
    let known = pools().get(&(pool as usize)).copied();
    match known {
        Some(Pool::On(device)) => Some(device),
        Some(Pool::Host | Pool::Imported) => None,
        None => default_of(pool),
    }
}

/// `CUmemPool_attribute`: the statistics.
mod attribute {
    pub const RESERVED: u32 = 5;
    pub const RESERVED_HIGH: u32 = 6;
    pub const USED: u32 = 7;
    pub const USED_HIGH: u32 = 8;
}

/// `cuMemPoolGetAttribute`: what is managed counts, too. The highest sum is not known, so it is the sum of the highest: neither is lower than it was.
pub unsafe fn get_attribute(call: &mut Call, pool: *mut c_void, attribute: c_uint, value: *mut c_void) -> StatusCode {
    let answer = call.real();
    if answer != code::SUCCESS || !(attribute::RESERVED..=attribute::USED_HIGH).contains(&attribute) {
        return answer;
    }
    if let Some((memory, device)) = managed(pool) {
        let PoolUse { reserved, used } = memory.registry.pools.of(device);
        let managed = match attribute {
            attribute::RESERVED => reserved.now,
            attribute::RESERVED_HIGH => reserved.high,
            attribute::USED => used.now,
            _ => used.high,
        };
        let value = value.cast::<u64>();
        // SAFETY: the real function has written the 64 bits of this attribute.
        unsafe { value.write_unaligned(value.read_unaligned() + managed) };
    }
    answer
}

/// `cuMemPoolSetAttribute`: the high-water marks can be reset.
pub fn set_attribute(call: &mut Call, pool: *mut c_void, attribute: c_uint) -> StatusCode {
    let answer = call.real();
    let level: fn(&mut PoolUse) -> &mut Level = match attribute {
        attribute::RESERVED_HIGH => |of| &mut of.reserved,
        attribute::USED_HIGH => |of| &mut of.used,
        _ => return answer,
    };
    if answer == code::SUCCESS
        && let Some((memory, device)) = managed(pool)
    {
        memory.registry.pools.reset_high(device, level);
    }
    answer
}

/// Records what other devices may do with memory of a pool that is no default pool.
pub fn note_access(pool: *mut c_void, access: &[Access]) {
    let (key, known) = (ObstacleKey::Pool(pool as usize), pools().get(&(pool as usize)).copied());
    for (device, access) in access.iter().filter_map(|access| Some((access.location.device()?, access))) {
        let is_own = match known {
            Some(Pool::On(own)) => own == device,
            Some(Pool::Host) => true,
            Some(Pool::Imported) | None => false,
        };
        if !access.is_any() {
            sightings::note_no_access(key, device);
        } else if !is_own {
            sightings::note_access("cuMemPoolSetAccess", key, device);
        }
    }
}

pub fn export(call: &mut Call, pool: *mut c_void) -> StatusCode {
    note_shared(call, || sightings::note(ObstacleKind::Shared, "cuMemPoolExportToShareableHandle", ObstacleKey::Pool(pool as usize)))
}

pub unsafe fn import(call: &mut Call, pool: *mut *mut c_void) -> StatusCode {
    note_shared(call, || {
        // SAFETY: written by the real function.
        let made = unsafe { pool.read() } as usize;
        pools().insert(made, Pool::Imported);
        sightings::note(ObstacleKind::Shared, "cuMemPoolImportFromShareableHandle", ObstacleKey::Pool(made));
    })
}

pub fn export_pointer(call: &mut Call, pointer: CUdeviceptr) -> StatusCode {
    note_shared(call, || {
        sightings::note(ObstacleKind::Shared, "cuMemPoolExportPointer", ObstacleKey::Address(driver_memory::start_of(pointer)));
    })
}

pub unsafe fn import_pointer(call: &mut Call, pointer: *mut CUdeviceptr) -> StatusCode {
    // SAFETY: written by the real function.
    note_shared(call, || sightings::note_opened("cuMemPoolImportPointer", ObstacleKey::Address(unsafe { pointer.read() })))
}

/// Makes a call that shares memory, and records that with `note` if it has succeeded.
fn note_shared(call: &mut Call, note: impl FnOnce()) -> StatusCode {
    sightings::noting(ObstacleKind::Shared, || call.real(), note)
}
