//! CUDA IPC: handles of managed memory, and memory of other processes.

use crate::call::Call;
use crate::runtimes::Runtime;
use crate::table::IpcHandle;
use crate::{driver_memory, reentrancy};
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::BorrowedFd;
use vramctl_core::memory::share::{HANDLE_BYTES, SharedHandle};
use vramctl_core::memory::sightings::{self, ObstacleKey};
use vramctl_core::memory::{Memory, borrow, imports};
use vramctl_core::server;
use vramctl_driver::{CUdeviceptr, CUmemGenericAllocationHandle, Current};
use vramctl_host::{guarded, log_once};
use vramctl_model::{ObstacleKind, StatusCode, code};

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`: the driver accepts nothing else.
const LAZY: c_uint = 1;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub const BY_DESCRIPTOR: c_uint = 1;

/// `cuIpcGetMemHandle`.
///
/// # Safety
/// `handle` must be null or writable for a handle.
pub unsafe fn get(call: &mut Call, handle: *mut c_void, pointer: CUdeviceptr) -> StatusCode {
    if handle.is_null() {
        return call.real();
    }
    let memory = Memory::existing();
    match memory.and_then(|memory| memory.ipc_handle(pointer)) {
        Some(_) if !Current::works() => call.real(),
        Some(Ok(made)) => {
            // SAFETY: not null, and writable by the caller's promise.
            unsafe { handle.cast::<[u8; HANDLE_BYTES]>().write_unaligned(made.bytes()) };
            log_once!(
                log::Level::Info,
                "this process shares managed memory by CUDA IPC. A process can open it only if it has this library preloaded, too, and, in \
                 another network namespace, the same VRAMCTL_DIR; otherwise cudaIpcOpenMemHandle fails there with error 1 (invalid argument)"
            );
            code::SUCCESS
        }
        Some(Err(error)) => error,
        None => {
            let answer = sightings::noting(
                ObstacleKind::Shared,
                || call.real(),
                || {
                    sightings::note(ObstacleKind::Shared, "cuIpcGetMemHandle", ObstacleKey::Address(driver_memory::start_of(pointer)));
                },
            );
            if answer != code::SUCCESS
                // CUDA itself shares no memory of `cuMemCreate` this way.
                && let Some(allocation) = memory.and_then(|memory| memory.registry.find(pointer)).filter(|allocation| allocation.origin().is_malloc())
            {
                log_once!(
                    log::Level::Warn,
                    "the managed memory at {pointer:#x} (tag {}) cannot be shared by CUDA IPC on this device. Allocate shared memory in \
                     a region without a tag (vramctl_region_begin(NULL, 0)), or start the program with `vramctl run --no-tag` so that \
                     only regions are managed",
                    allocation.tag
                );
            }
            answer
        }
    }
}

/// `cuIpcOpenMemHandle`. The library's handles are opened in the thread's current context.
///
/// # Safety
/// `pointer` must be null or writable.
pub unsafe fn open(call: &mut Call, pointer: *mut CUdeviceptr, handle: &IpcHandle, flags: c_uint) -> StatusCode {
    let Some(handle) = SharedHandle::parse(&handle.reserved) else {
        // The runtime's function calls the driver's: one opening.
        if reentrancy::is_nested() {
            return call.real();
        }
        return sightings::noting(
            ObstacleKind::Shared,
            || reentrancy::forward(|| call.real()),
            || {
                if !pointer.is_null() {
                    // SAFETY: not null, and written by the real function.
                    sightings::note_opened("cuIpcOpenMemHandle", ObstacleKey::Address(unsafe { pointer.read() }));
                }
            },
        );
    };
    // The runtime creates the context, as its own function does.
    if let Some(Err(error)) = call.runtime().map(Runtime::current_context) {
        return error;
    }
    if pointer.is_null() || flags != LAZY {
        return code::INVALID_VALUE;
    }
    // If the driver is not initialised, or there is no context that works, the real function returns the right error.
    let Ok(Some(current)) = Current::of_thread() else { return call.real() };
    if !Current::works() {
        return call.real();
    }
    match sightings::making(ObstacleKind::Shared, || borrow::open(&handle, &current)) {
        Ok(address) => {
            // Needed so that this process can be paused together with the owner.
            server::ensure_running();
            // SAFETY: not null, and writable by the caller's promise.
            unsafe { pointer.write(address) };
            code::SUCCESS
        }
        Err(error) => error,
    }
}

/// `cuIpcCloseMemHandle`.
pub fn close(call: &mut Call, pointer: CUdeviceptr) -> StatusCode {
    if reentrancy::is_nested() {
        return call.real();
    }
    // As the runtime's own call does, on a thread without a context.
    if let Some(runtime) = call.runtime()
        && borrow::at(pointer).is_some()
        && let Err(error) = runtime.current_context()
    {
        return error;
    }
    if Current::works()
        && let Some(closed) = borrow::close(pointer)
    {
        // It may have been the last paused memory.
        Memory::get().let_go();
        return closed.err().unwrap_or(code::SUCCESS);
    }
    sightings::ending(ObstacleKey::Address(pointer), || reentrancy::forward(|| call.real()))
}

/// `cuMemImportFromShareableHandle`.
pub unsafe fn import(call: &mut Call, handle: *mut CUmemGenericAllocationHandle, shared: *mut c_void, kind: c_uint) -> StatusCode {
    sightings::noting(
        ObstacleKind::Shared,
        || call.real(),
        || {
            if handle.is_null() {
                return;
            }
            // SAFETY: not null, and written by the real function.
            let made = unsafe { handle.read() };
            match adopt(shared, kind, made) {
                // SAFETY: as above.
                Some(ours) => unsafe { handle.write(ours) },
                None => sightings::note(ObstacleKind::Shared, "cuMemImportFromShareableHandle", ObstacleKey::Handle(made)),
            }
        },
    )
}

/// The library's handle for memory that the program has imported, if the process that has exported it is known.
fn adopt(shared: *mut c_void, kind: c_uint, made: CUmemGenericAllocationHandle) -> Option<CUmemGenericAllocationHandle> {
    if kind != BY_DESCRIPTOR {
        return None;
    }
    // SAFETY: the driver has just read memory from this descriptor, so it is open.
    let file = unsafe { BorrowedFd::borrow_raw(c_int::try_from(shared as usize).ok()?) };
    let current = Current::of_thread().ok()??;
    let adopted = guarded(|| imports::adopt(file, made, &current)).flatten();
    if adopted.is_some() {
        // Needed so that this process can be paused together with the owner.
        server::ensure_running();
    }
    adopted
}
