//! Devices and primary contexts: a thread's current device, and creating its context.

use crate::done;
use crate::driver::{self, Driver, Handle};
use crate::errors::{INVALID_DEVICE, INVALID_VALUE, Outcome};
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Mutex;

/// The primary contexts retained by the runtime, by device.
static RETAINED: Mutex<Vec<Handle>> = Mutex::new(Vec::new());

thread_local! {
    static DEVICE: Cell<c_int> = const { Cell::new(0) };
}

/// A device's primary context, retained once per process.
fn primary(driver: &Driver, ordinal: c_int) -> Outcome<Handle> {
    let mut retained = RETAINED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let index = usize::try_from(ordinal).map_err(|_| INVALID_DEVICE)?;
    if let Some(&context) = retained.get(index)
        && context != 0
    {
        return Ok(context);
    }
    let mut context = 0;
    // SAFETY: a pointer into this frame.
    done(unsafe { (driver.cuDevicePrimaryCtxRetain)(&raw mut context, ordinal) })?;
    if retained.len() <= index {
        retained.resize(index + 1, 0);
    }
    retained[index] = context;
    Ok(context)
}

/// The current context's device, if the context is usable.
fn current(driver: &Driver) -> Option<c_int> {
    let (mut id, mut ordinal) = (0, 0);
    // SAFETY: pointers into this frame. A destroyed context must not be asked for its device.
    unsafe { (driver.cuCtxGetId)(0, &raw mut id) == 0 && (driver.cuCtxGetDevice)(&raw mut ordinal) == 0 }.then_some(ordinal)
}

/// The driver, with a context current on the calling thread: the program's own if it set one, else the primary context of
/// the thread's device.
pub fn ready() -> Outcome<&'static Driver> {
    let driver = driver::get()?;
    if current(driver).is_none() {
        let context = primary(driver, DEVICE.get())?;
        // SAFETY: no pointers.
        done(unsafe { (driver.cuCtxSetCurrent)(context) })?;
    }
    Ok(driver)
}

/// `cudaSetDevice`: since CUDA 12 it also initialises the device's context.
pub fn set(ordinal: c_int) -> Outcome {
    let driver = driver::get()?;
    let mut count = 0;
    // SAFETY: a pointer into this frame.
    done(unsafe { (driver.cuDeviceGetCount)(&raw mut count) })?;
    if !(0..count).contains(&ordinal) {
        return Err(INVALID_DEVICE);
    }
    let context = primary(driver, ordinal)?;
    // SAFETY: no pointers.
    done(unsafe { (driver.cuCtxSetCurrent)(context) })?;
    DEVICE.set(ordinal);
    Ok(())
}

/// `cudaGetDevice`.
pub fn get() -> Outcome<c_int> {
    let driver = driver::get()?;
    Ok(current(driver).unwrap_or_else(|| DEVICE.get()))
}

/// `cudaDeviceReset`: for the thread's device. The next call recreates everything.
pub fn reset() -> Outcome {
    let driver = driver::get()?;
    let ordinal = get()?;
    if let Some(context) = RETAINED.lock().unwrap_or_else(std::sync::PoisonError::into_inner).get_mut(ordinal as usize) {
        *context = 0;
    }
    // SAFETY: no pointers.
    done(unsafe { (driver.cuDevicePrimaryCtxReset)(ordinal) })
}

/// `cudaDeviceEnablePeerAccess`.
pub fn enable_peer(peer: c_int, flags: u32) -> Outcome {
    let driver = ready()?;
    let peer = primary(driver, peer)?;
    // SAFETY: no pointers.
    done(unsafe { (driver.cuCtxEnablePeerAccess)(peer, flags) })
}

/// `cudaDeviceDisablePeerAccess`.
pub fn disable_peer(peer: c_int) -> Outcome {
    let driver = ready()?;
    let peer = primary(driver, peer)?;
    // SAFETY: no pointers.
    done(unsafe { (driver.cuCtxDisablePeerAccess)(peer) })
}

/// `cudaGetDriverEntryPoint`: for a missing driver function it succeeds, and the status says so.
///
/// # Safety
/// The name must be null or NUL-terminated, the other pointers null or valid.
pub unsafe fn entry_point(name: *const c_char, pointer: *mut *mut c_void, version: c_int, flags: u64, status: *mut u32) -> Outcome {
    if name.is_null() || pointer.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    let name = unsafe { CStr::from_ptr(name) };
    let (found, said) = match driver::get()?.entry_point(name, version, flags) {
        Ok(found) => (found, 0),
        Err(status) => (std::ptr::null_mut(), status),
    };
    // SAFETY: the caller's promise.
    unsafe {
        *pointer = found;
        if !status.is_null() {
            *status = said;
        }
    }
    Ok(())
}
