//! Contexts that end, and the memory that is destroyed with them.

use crate::driver_originals;
use std::ffi::c_void;
use vramctl_core::memory::Memory;
use vramctl_driver::{CUdevice, ContextHandle};
use vramctl_host::exit;
use vramctl_model::{StatusCode, code};

pub unsafe fn destroy_v1(context: ContextHandle) -> StatusCode {
    // SAFETY: here and below, the real function gets the arguments unchanged.
    ending(|| unsafe { driver_originals::cuCtxDestroy(context) })
}

pub unsafe fn destroy(context: ContextHandle) -> StatusCode {
    // SAFETY: as above.
    ending(|| unsafe { driver_originals::cuCtxDestroy_v2(context) })
}

/// Ends it if nobody else has attached to it.
pub unsafe fn detach(context: ContextHandle) -> StatusCode {
    // SAFETY: as above.
    ending(|| unsafe { driver_originals::cuCtxDetach(context) })
}

pub unsafe fn reset_primary_v1(device: CUdevice) -> StatusCode {
    // SAFETY: as above.
    ending(|| unsafe { driver_originals::cuDevicePrimaryCtxReset(device) })
}

pub unsafe fn reset_primary(device: CUdevice) -> StatusCode {
    // SAFETY: as above.
    ending(|| unsafe { driver_originals::cuDevicePrimaryCtxReset_v2(device) })
}

pub unsafe fn release_primary_v1(device: CUdevice) -> StatusCode {
    // SAFETY: as above.
    ending(|| unsafe { driver_originals::cuDevicePrimaryCtxRelease(device) })
}

pub unsafe fn release_primary(device: CUdevice) -> StatusCode {
    // SAFETY: as above.
    ending(|| unsafe { driver_originals::cuDevicePrimaryCtxRelease_v2(device) })
}

pub unsafe fn from_green(context: *mut ContextHandle, green: *mut c_void) -> StatusCode {
    // SAFETY: as above.
    let answer = unsafe { driver_originals::cuCtxFromGreenCtx(context, green) };
    if answer == code::SUCCESS
        // SAFETY: the program promises that a non-null pointer is writable, and the real function has succeeded.
        && let Some(handle) = unsafe { context.as_ref() }
        && let Ok(context) = handle.context()
    {
        context.is_of_green();
    }
    answer
}

/// Destroys a context and, at once, the managed memory that belongs to it, as CUDA does with its own memory.
fn ending(real: impl FnOnce() -> StatusCode) -> StatusCode {
    // While the program exits, interrupted code may hold our locks; and the memory is freed with the process anyway.
    let Some(memory) = Memory::existing().filter(|_| !exit::is_ending()) else { return real() };
    memory.ending_context(real)
}
