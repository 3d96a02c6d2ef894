//! Contexts that end, and the memory that is destroyed with them.

use crate::driver_originals;
use crate::runtimes::Runtime;
use crate::table::CudaError;
use std::ffi::{c_uint, c_void};
use vramctl_core::memory::Memory;
use vramctl_driver::{CUdevice, ContextHandle, Ending, Green};
use vramctl_host::exit;
use vramctl_model::{StatusCode, code};

pub unsafe fn destroy_v1(context: ContextHandle) -> StatusCode {
    // SAFETY: here and below, the real function gets the arguments unchanged.
    ending(|| Ending::of(context), || unsafe { driver_originals::cuCtxDestroy(context) })
}

pub unsafe fn destroy(context: ContextHandle) -> StatusCode {
    // SAFETY: as above.
    ending(|| Ending::of(context), || unsafe { driver_originals::cuCtxDestroy_v2(context) })
}

/// Ends it if nobody else has attached to it.
pub unsafe fn detach(context: ContextHandle) -> StatusCode {
    // SAFETY: as above.
    ending(|| Ending::of(context), || unsafe { driver_originals::cuCtxDetach(context) })
}

pub unsafe fn reset_primary_v1(device: CUdevice) -> StatusCode {
    // SAFETY: as above.
    ending(|| Ending::of_primary(device), || unsafe { driver_originals::cuDevicePrimaryCtxReset(device) })
}

pub unsafe fn reset_primary(device: CUdevice) -> StatusCode {
    // SAFETY: as above.
    ending(|| Ending::of_primary(device), || unsafe { driver_originals::cuDevicePrimaryCtxReset_v2(device) })
}

pub unsafe fn release_primary_v1(device: CUdevice) -> StatusCode {
    // SAFETY: as above.
    ending(|| Ending::of_primary(device), || unsafe { driver_originals::cuDevicePrimaryCtxRelease(device) })
}

pub unsafe fn release_primary(device: CUdevice) -> StatusCode {
    // SAFETY: as above.
    ending(|| Ending::of_primary(device), || unsafe { driver_originals::cuDevicePrimaryCtxRelease_v2(device) })
}

/// The runtime's reset of the current device. What the runtime does for that may be hidden from the library.
pub unsafe fn reset_device(runtime: &Runtime) -> CudaError {
    // SAFETY: no arguments.
    let real = || unsafe { runtime.cudaDeviceReset() };
    // Without memory of ours, nobody has to know the device, which the runtime may create a context to tell.
    match Memory::existing().and_then(|_| runtime.current_device()) {
        Some(device) => ending(|| Ending::of_primary(device), real),
        None => real(),
    }
}

pub unsafe fn create_green(green: *mut Green, resources: *const c_void, device: CUdevice, flags: c_uint) -> StatusCode {
    // SAFETY: as above.
    let answer = unsafe { driver_originals::cuGreenCtxCreate(green, resources, device, flags) };
    if answer == code::SUCCESS
        // SAFETY: the program promises that a non-null pointer is writable, and the real function has succeeded.
        && let Some(green) = unsafe { green.as_ref() }
    {
        green.is_of(device);
    }
    answer
}

pub unsafe fn destroy_green(green: Green) -> StatusCode {
    // SAFETY: as above.
    ending(|| Ending::of_green(green), || unsafe { driver_originals::cuGreenCtxDestroy(green) })
}

pub unsafe fn from_green(context: *mut ContextHandle, green: Green) -> StatusCode {
    // SAFETY: as above.
    let answer = unsafe { driver_originals::cuCtxFromGreenCtx(context, green) };
    if answer == code::SUCCESS
        // SAFETY: the program promises that a non-null pointer is writable, and the real function has succeeded.
        && let Some(handle) = unsafe { context.as_ref() }
        && let Ok(context) = handle.context()
    {
        green.is_behind(context);
    }
    answer
}

/// Destroys contexts and, at once, the managed memory that belongs to them, as CUDA does with its own memory.
fn ending(announce: impl FnOnce() -> Ending, real: impl FnOnce() -> StatusCode) -> StatusCode {
    // While the program exits, interrupted code may hold our locks; and the memory is freed with the process anyway.
    if exit::is_ending() {
        return real();
    }
    if let Some(memory) = Memory::existing() {
        return memory.ending_context(announce, real);
    }
    let ending = announce();
    ending.wait_until_unused();
    let answer = real();
    drop(ending);
    answer
}
