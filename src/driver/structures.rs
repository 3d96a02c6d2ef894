//! Structures of the driver's calls.

use super::CUdeviceptr;
use cudarc::driver::sys::CUuuid;
use std::ffi::c_uint;

/// `CUcheckpointLockArgs`.
#[repr(C)]
pub struct LockArgs {
    /// 0 is no limit.
    pub(super) timeout_ms: c_uint,
    pub(super) reserved: c_uint,
    pub(super) reserved_too: [u64; 7],
}

/// `CUcheckpointCheckpointArgs` and `CUcheckpointUnlockArgs`.
#[repr(C)]
pub struct NoArgs(pub(super) [u64; 8]);

/// `CUcheckpointGpuPair`.
#[repr(C)]
pub struct GpuPair {
    pub(super) old: CUuuid,
    pub(super) new: CUuuid,
}

/// `CUcheckpointRestoreArgs`. Before CUDA 13, all of it was reserved.
#[repr(C)]
pub struct RestoreArgs {
    pub(super) pairs: *const GpuPair,
    pub(super) count: c_uint,
    pub(super) reserved: [u8; 52 - size_of::<*const GpuPair>()],
    pub(super) reserved_too: u64,
}

const _: () = assert!(size_of::<LockArgs>() == 64 && size_of::<NoArgs>() == 64 && size_of::<RestoreArgs>() == 64);

/// One side of a [`CopyBetween`].
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct CopySide {
    pub(super) x: usize,
    pub(super) y: usize,
    pub(super) z: usize,
    pub(super) level: usize,
    pub(super) kind: u32,
    pub(super) host: u64,
    pub(super) device: CUdeviceptr,
    pub(super) array: u64,
    pub(super) context: u64,
    pub(super) pitch: usize,
    pub(super) height: usize,
}

/// `CUDA_MEMCPY3D_PEER`, and `CUDA_MEMCPY3D`, which has no contexts.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct CopyBetween {
    /// Where it reads.
    pub from: CopySide,
    /// Where it writes.
    pub to: CopySide,
    pub(super) width: usize,
    pub(super) height: usize,
    pub(super) depth: usize,
}
