//! Access of one device to another's memory, plain or from a pool, which the program sets through the runtime or the driver. Managed memory
//! follows.

use crate::driver_originals;
use crate::pools;
use crate::runtimes::Runtime;
use crate::table::CudaError;
use std::ffi::{c_int, c_uint, c_void};
use std::slice;
use vramctl_core::memory::{Memory, sightings};
use vramctl_driver::{self as driver, Access, CUmemAccessDesc, Context, ContextHandle, Current};
use vramctl_model::{Error, Failure, ObstacleKind, StatusCode, code};

pub unsafe fn cuda_enable(runtime: &Runtime, peer: c_int, flags: c_uint) -> CudaError {
    // SAFETY: here and below, the real function gets the arguments unchanged.
    let real = || unsafe { runtime.cudaDeviceEnablePeerAccess(peer, flags) };
    // SAFETY: as above.
    enable(real, || of_runtime(runtime, peer), || unsafe { runtime.cudaDeviceDisablePeerAccess(peer) })
}

pub unsafe fn cuda_disable(runtime: &Runtime, peer: c_int) -> CudaError {
    // SAFETY: as above.
    let real = || unsafe { runtime.cudaDeviceDisablePeerAccess(peer) };
    // SAFETY: the only flags there are.
    disable(real, || of_runtime(runtime, peer), || unsafe { runtime.cudaDeviceEnablePeerAccess(peer, 0) })
}

pub unsafe fn driver_enable(peer: ContextHandle, flags: c_uint) -> StatusCode {
    // SAFETY: as above.
    let real = || unsafe { driver_originals::cuCtxEnablePeerAccess(peer, flags) };
    // SAFETY: as above.
    enable(real, || of_driver(peer), || unsafe { driver_originals::cuCtxDisablePeerAccess(peer) })
}

pub unsafe fn driver_disable(peer: ContextHandle) -> StatusCode {
    // SAFETY: as above.
    let real = || unsafe { driver_originals::cuCtxDisablePeerAccess(peer) };
    // SAFETY: as above.
    disable(real, || of_driver(peer), || unsafe { driver_originals::cuCtxEnablePeerAccess(peer, 0) })
}

pub unsafe fn cuda_set_pool_access(runtime: &Runtime, pool: *mut c_void, access: *const c_void, count: usize) -> CudaError {
    // SAFETY: as above. The runtime's descriptors are the driver's.
    unsafe { set_pool_access(pool, access.cast(), count, || runtime.cudaMemPoolSetAccess(pool, access, count)) }
}

pub unsafe fn driver_set_pool_access(pool: *mut c_void, access: *const CUmemAccessDesc, count: usize) -> StatusCode {
    // SAFETY: as above.
    unsafe { set_pool_access(pool, access.cast(), count, || driver_originals::cuMemPoolSetAccess(pool, access, count)) }
}

/// The thread's current context, and the one whose memory it may use.
type Both = (Current, Context);

const NONE: Failure = Failure { call: "cuCtxGetCurrent", code: code::INVALID_CONTEXT };

fn of_runtime(runtime: &Runtime, peer: c_int) -> Result<Both, Error> {
    let current = runtime.current_context().map_err(|code| Failure { call: "cudaFree", code })?;
    Ok((current, Current::primary_of(peer)?.ok_or(NONE)?))
}

fn of_driver(peer: ContextHandle) -> Result<Both, Error> {
    Ok((Current::of_thread()?.ok_or(NONE)?, peer.context()?))
}

/// `undo` disables it.
fn enable(
    real: impl FnOnce() -> StatusCode,
    contexts: impl FnOnce() -> Result<Both, Error>,
    undo: impl FnOnce() -> StatusCode,
) -> StatusCode {
    let answer = real();
    if !matches!(answer, code::SUCCESS | code::PEER_ACCESS_ALREADY_ENABLED) {
        return answer;
    }
    match contexts().and_then(|(current, other)| Memory::get().enable_peer(&current, other)) {
        Ok(()) => answer,
        Err(error) => {
            log::warn!("cannot enable peer access to managed memory: {error}");
            if answer == code::SUCCESS {
                undo();
            }
            as_of_peers(&error)
        }
    }
}

/// `again` enables it.
fn disable(
    real: impl FnOnce() -> StatusCode,
    contexts: impl FnOnce() -> Result<Both, Error>,
    again: impl FnOnce() -> StatusCode,
) -> StatusCode {
    let answer = real();
    let Some(memory) = Memory::existing().filter(|_| answer == code::SUCCESS) else { return answer };
    match contexts().and_then(|(current, other)| memory.disable_peer(&current, other)) {
        Ok(()) => answer,
        Err(error) => {
            log::warn!("cannot disable peer access to managed memory, so it stays enabled: {error}");
            again();
            error.cuda_code()
        }
    }
}

/// The program's answer: what the driver refuses to virtual memory alone, as an error that programs expect of these functions.
fn as_of_peers(error: &Error) -> StatusCode {
    if matches!(error, Error::Driver(failure) if failure.is_refusal()) { code::PEER_ACCESS_UNSUPPORTED } else { error.cuda_code() }
}

/// # Safety
/// If the real function accepts them, there are `count` descriptors.
unsafe fn set_pool_access(pool: *mut c_void, access: *const Access, count: usize, real: impl FnOnce() -> StatusCode) -> StatusCode {
    sightings::making(ObstacleKind::Peers, || {
        let answer = real();
        if answer != code::SUCCESS || access.is_null() {
            return answer;
        }
        // SAFETY: as promised.
        let access = unsafe { slice::from_raw_parts(access, count) };
        let Some(owner) = driver::devices().find(|device| driver::default_pool(*device) == Ok(pool)) else {
            // Memory of other pools is left to CUDA.
            pools::note_access(pool, access);
            return answer;
        };
        match Memory::get().set_pool_access(owner, access) {
            Ok(()) => answer,
            Err(error) => {
                log::warn!("cannot set the access of a memory pool for managed memory: {error}");
                as_of_peers(&error)
            }
        }
    })
}
