//! Contexts that begin, and those that end with the memory that is destroyed with them.

use crate::call::Call;
use crate::room;
use vramctl_core::memory::Memory;
use vramctl_driver::{CUdevice, ContextHandle, Ending, Green};
use vramctl_host::exit;
use vramctl_model::{StatusCode, code};

/// Also for `cuCtxDetach`, which ends a context to which nobody else has attached.
pub fn destroy(call: &mut Call, context: ContextHandle) -> StatusCode {
    end(call, || Ending::of(context))
}

/// Also for `cuDevicePrimaryCtxRelease`.
pub fn reset_primary(call: &mut Call, device: CUdevice) -> StatusCode {
    end(call, || Ending::of_primary(device))
}

/// The runtime's reset of the current device. What the runtime does for that may be hidden from the library.
pub fn reset_device(call: &mut Call) -> StatusCode {
    // Without memory of ours, nobody has to know the device, which the runtime may create a context to tell.
    match Memory::existing().and_then(|_| call.runtime()?.current_device()) {
        Some(device) => reset_primary(call, device),
        None => call.real(),
    }
}

/// Creates a context, or retains a primary one, which creates it if need be.
pub fn begin(call: &mut Call, device: CUdevice) -> StatusCode {
    let answer = call.real();
    if answer == code::OUT_OF_MEMORY {
        room::lacks_context(device);
    }
    answer
}

pub fn destroy_green(call: &mut Call, green: Green) -> StatusCode {
    end(call, || Ending::of_green(green))
}

pub unsafe fn create_green(call: &mut Call, green: *const Green, device: CUdevice) -> StatusCode {
    let answer = begin(call, device);
    if answer == code::SUCCESS
        // SAFETY: the program promises that a non-null pointer is writable, and the real function has succeeded.
        && let Some(green) = unsafe { green.as_ref() }
    {
        green.note_device(device);
    }
    answer
}

pub unsafe fn from_green(call: &mut Call, context: *const ContextHandle, green: Green) -> StatusCode {
    let answer = call.real();
    if answer == code::SUCCESS
        // SAFETY: as in `create_green`.
        && let Some(handle) = unsafe { context.as_ref() }
        && let Ok(context) = handle.context()
    {
        green.note_context(context);
    }
    answer
}

/// Destroys contexts and, at once, the managed memory that belongs to them, as CUDA does with its own memory.
fn end(call: &mut Call, announce: impl FnOnce() -> Ending) -> StatusCode {
    // While the program exits, interrupted code may hold our locks; and the memory is freed with the process anyway.
    if exit::is_ending() {
        return call.real();
    }
    if let Some(memory) = Memory::existing() {
        return memory.ending_context(announce, || call.real());
    }
    let ending = announce();
    ending.wait_until_unused();
    let answer = call.real();
    drop(ending);
    answer
}
