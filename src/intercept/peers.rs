//! Access of one device to another's memory, plain or from a pool, which the program sets through the runtime or the driver. Managed memory
//! follows.

use crate::call::Call;
use crate::{driver_originals, pools};
use std::ffi::{c_int, c_void};
use std::slice;
use vramctl_core::memory::{Memory, sightings};
use vramctl_driver::{self as driver, Access, Context, ContextHandle, Current};
use vramctl_model::{Error, Failure, ObstacleKind, StatusCode, code};

/// Whose memory the thread's current context may use.
#[derive(Clone, Copy)]
pub enum Peer {
    /// For the runtime.
    Device(c_int),
    /// For the driver.
    Context(ContextHandle),
}

/// The thread's current context, and the one whose memory it may use.
type Both = (Current, Context);

const NONE: Failure = Failure { call: "cuCtxGetCurrent", code: code::INVALID_CONTEXT };

impl Peer {
    fn contexts(self, call: &Call) -> Result<Both, Error> {
        let current = call.context().map_err(|code| Failure { call: "cuCtxGetCurrent", code })?.ok_or(NONE)?;
        let other = match self {
            Self::Device(device) => Current::primary_of(device)?.ok_or(NONE)?,
            Self::Context(context) => context.context()?,
        };
        Ok((current, other))
    }

    fn set_access(self, call: &Call, is_open: bool) {
        // SAFETY: the program has just done the contrary. There are no other flags.
        unsafe {
            match (self, is_open) {
                (Self::Device(device), true) => call.runtime().map(|runtime| runtime.cudaDeviceEnablePeerAccess(device, 0)),
                (Self::Device(device), false) => call.runtime().map(|runtime| runtime.cudaDeviceDisablePeerAccess(device)),
                (Self::Context(context), true) => Some(driver_originals::cuCtxEnablePeerAccess(context, 0)),
                (Self::Context(context), false) => Some(driver_originals::cuCtxDisablePeerAccess(context)),
            }
        };
    }
}

pub fn enable(call: &mut Call, peer: Peer) -> StatusCode {
    let answer = call.real();
    if !matches!(answer, code::SUCCESS | code::PEER_ACCESS_ALREADY_ENABLED) {
        return answer;
    }
    match peer.contexts(call).and_then(|(current, other)| Memory::get().enable_peer(&current, other)) {
        Ok(()) => answer,
        Err(error) => {
            log::warn!("cannot enable peer access to managed memory: {error}");
            if answer == code::SUCCESS {
                peer.set_access(call, false);
            }
            as_of_peers(&error)
        }
    }
}

pub fn disable(call: &mut Call, peer: Peer) -> StatusCode {
    let answer = call.real();
    let Some(memory) = Memory::existing().filter(|_| answer == code::SUCCESS) else { return answer };
    match peer.contexts(call).and_then(|(current, other)| memory.disable_peer(&current, other)) {
        Ok(()) => answer,
        Err(error) => {
            log::warn!("cannot disable peer access to managed memory, so it stays enabled: {error}");
            peer.set_access(call, true);
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
pub unsafe fn set_pool_access(call: &mut Call, pool: *mut c_void, access: *const Access, count: usize) -> StatusCode {
    sightings::making(ObstacleKind::Peers, || {
        let answer = call.real();
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
