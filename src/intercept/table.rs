//! The table of the CUDA runtime's functions that are answered here, and the types in it.
//!
//! One macro lists them; the functions of [`hooks`](crate::hooks), those that the preloaded library exports, the look-ups of the
//! real functions and the list of names all come from it.

use std::ffi::c_void;

/// `cudaError_t` as a number: a code that a newer runtime adds must pass through unharmed.
pub type CudaError = u32;
/// `cudaStream_t`: the same handle as the driver's.
pub type CudaStream = vramctl_driver::StreamHandle;

/// `cudaPitchedPtr` (`driver_types.h`).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CudaPitchedPtr {
    /// The allocation.
    pub pointer: *mut c_void,
    /// Bytes from one row to the next.
    pub pitch: usize,
    /// Width of a row in bytes.
    pub xsize: usize,
    /// Rows.
    pub ysize: usize,
}

/// `cudaExtent` (`driver_types.h`), the width in bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CudaExtent {
    /// Bytes in a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
    /// Slices.
    pub depth: usize,
}

/// The table: every hooked function, its arguments, and its handler. Handed to each macro that makes something of it.
#[macro_export]
macro_rules! hooked_functions {
    ($with:ident) => { $with! {
        /// `cudaMalloc`.
        fn cudaMalloc(pointer: *mut *mut c_void, bytes: usize) => handlers::malloc;
        /// `cudaMallocPitch`.
        fn cudaMallocPitch(pointer: *mut *mut c_void, pitch: *mut usize, width: usize, height: usize) => handlers::malloc_pitch;
        /// `cudaMalloc3D`.
        fn cudaMalloc3D(pitched: *mut CudaPitchedPtr, extent: CudaExtent) => handlers::malloc_3d;
        /// `cudaMallocManaged`: always CUDA's own, for it migrates by itself.
        fn cudaMallocManaged(pointer: *mut *mut c_void, bytes: usize, flags: c_uint) => originals::cudaMallocManaged;
        /// `cudaMallocAsync`.
        fn cudaMallocAsync(pointer: *mut *mut c_void, bytes: usize, stream: CudaStream) => handlers::malloc_async;
        /// `cudaMallocAsync` in programs built for per-thread default streams.
        fn cudaMallocAsync_ptsz(pointer: *mut *mut c_void, bytes: usize, stream: CudaStream) => handlers::malloc_async_ptsz;
        /// `cudaMallocFromPoolAsync`.
        fn cudaMallocFromPoolAsync(pointer: *mut *mut c_void, bytes: usize, pool: *mut c_void, stream: CudaStream) => handlers::malloc_from_pool_async;
        /// `cudaMallocFromPoolAsync` in programs built for per-thread default streams.
        fn cudaMallocFromPoolAsync_ptsz(pointer: *mut *mut c_void, bytes: usize, pool: *mut c_void, stream: CudaStream) => handlers::malloc_from_pool_async_ptsz;
        /// `cudaFree`.
        fn cudaFree(pointer: *mut c_void) => handlers::free;
        /// `cudaFreeAsync`.
        fn cudaFreeAsync(pointer: *mut c_void, stream: CudaStream) => handlers::free_async;
        /// `cudaFreeAsync` in programs built for per-thread default streams.
        fn cudaFreeAsync_ptsz(pointer: *mut c_void, stream: CudaStream) => handlers::free_async_ptsz;
        /// `cudaDeviceReset`: drops what it destroys.
        fn cudaDeviceReset() => handlers::device_reset;
        /// `cudaDeviceEnablePeerAccess`: managed memory is opened to the peer, too.
        fn cudaDeviceEnablePeerAccess(peer: c_int, flags: c_uint) => handlers::enable_peer_access;
        /// `cudaDeviceDisablePeerAccess`.
        fn cudaDeviceDisablePeerAccess(peer: c_int) => handlers::disable_peer_access;
        /// `cudaIpcGetMemHandle`: explained where it cannot work.
        fn cudaIpcGetMemHandle(handle: *mut c_void, pointer: *mut c_void) => handlers::ipc_get_mem_handle;
    } };
}
