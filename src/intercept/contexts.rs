//! Contexts: peer access, and the memory that is destroyed with a context.

use crate::driver_originals;
use std::ffi::c_uint;
use vramctl_core::memory::{Memory, sightings};
use vramctl_driver::{CUdevice, ContextHandle, Current};
use vramctl_host::exit;
use vramctl_model::{Failure, ObstacleKind, StatusCode, code};

pub unsafe fn enable_peer_access(peer: ContextHandle, flags: c_uint) -> StatusCode {
    sightings::making(ObstacleKind::Peers, || {
        // SAFETY: here and below, the real function gets the arguments unchanged.
        let answer = unsafe { driver_originals::cuCtxEnablePeerAccess(peer, flags) };
        if !matches!(answer, code::SUCCESS | code::PEER_ACCESS_ALREADY_ENABLED) {
            return answer;
        }
        let opened = with_devices(peer, |current, other| Memory::get().enable_peer(current, other));
        match opened {
            Some(Err(error)) => {
                log::warn!("cannot enable peer access to managed memory: {error}");
                error.cuda_code()
            }
            _ => answer,
        }
    })
}

pub unsafe fn disable_peer_access(peer: ContextHandle) -> StatusCode {
    if let Some(memory) = Memory::existing() {
        with_devices(peer, |current, other| memory.disable_peer(current.device(), other));
    }
    // SAFETY: as above.
    unsafe { driver_originals::cuCtxDisablePeerAccess(peer) }
}

/// Calls `then` with the thread's current context and the device of another one. `None` if one of them does not exist.
fn with_devices<R>(peer: ContextHandle, then: impl FnOnce(&Current, CUdevice) -> R) -> Option<R> {
    let other = || -> Result<CUdevice, Failure> { Ok(Current::push(peer.context()?)?.device()) };
    let other = other().ok()?;
    Current::of_thread().ok().flatten().map(|current| then(&current, other))
}

pub unsafe fn destroy(context: ContextHandle) -> StatusCode {
    // SAFETY: as above.
    ending(|| unsafe { driver_originals::cuCtxDestroy_v2(context) })
}

pub unsafe fn reset_primary(device: CUdevice) -> StatusCode {
    // SAFETY: as above.
    ending(|| unsafe { driver_originals::cuDevicePrimaryCtxReset_v2(device) })
}

pub unsafe fn release_primary(device: CUdevice) -> StatusCode {
    // SAFETY: as above.
    ending(|| unsafe { driver_originals::cuDevicePrimaryCtxRelease_v2(device) })
}

/// Destroys a context and, at once, the managed memory that belongs to it, as CUDA does with its own memory.
fn ending(real: impl FnOnce() -> StatusCode) -> StatusCode {
    // While the program exits, interrupted code may hold our locks; and the memory is freed with the process anyway.
    let Some(memory) = Memory::existing().filter(|_| !exit::is_ending()) else { return real() };
    memory.ending_context(real)
}
