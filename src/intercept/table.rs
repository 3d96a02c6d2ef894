//! The table of hooked CUDA runtime functions, and their argument types.
//!
//! One macro generates everything from it: the functions in [`hooks`](crate::hooks), the exported symbols, the lookups of the real
//! functions and the list of names.

use std::ffi::c_void;

/// `cudaError_t` as a number, so that codes added by newer runtimes pass through unchanged.
pub type CudaError = u32;
/// `cudaStream_t`, which is the driver's handle.
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
    /// Number of rows.
    pub ysize: usize,
}

/// `cudaExtent` (`driver_types.h`).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CudaExtent {
    /// Width of a row in bytes.
    pub width: usize,
    /// Number of rows.
    pub height: usize,
    /// Number of slices.
    pub depth: usize,
}

/// The table: each hooked function, its arguments and its handler. Expands to `$with! { … }`.
#[macro_export]
macro_rules! hooked_functions {
    ($with:ident) => { $with! {
        /// `cudaMalloc`.
        fn cudaMalloc(pointer: *mut *mut c_void, bytes: usize) => handlers::malloc;
        /// `cudaMallocPitch`.
        fn cudaMallocPitch(pointer: *mut *mut c_void, pitch: *mut usize, width: usize, height: usize) => handlers::malloc_pitch;
        /// `cudaMalloc3D`.
        fn cudaMalloc3D(pitched: *mut CudaPitchedPtr, extent: CudaExtent) => handlers::malloc_3d;
        /// `cudaMallocManaged`: always left to CUDA, because unified memory migrates by itself.
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
        /// `cudaDeviceReset`: forgets the managed memory that it destroys.
        fn cudaDeviceReset() => handlers::device_reset;
        /// `cudaDeviceEnablePeerAccess`: also gives the peer access to managed memory.
        fn cudaDeviceEnablePeerAccess(peer: c_int, flags: c_uint) => handlers::enable_peer_access;
        /// `cudaDeviceDisablePeerAccess`.
        fn cudaDeviceDisablePeerAccess(peer: c_int) => handlers::disable_peer_access;
        /// `cudaIpcGetMemHandle`: logs why it fails for managed memory.
        fn cudaIpcGetMemHandle(handle: *mut c_void, pointer: *mut c_void) => handlers::ipc_get_mem_handle;
    } };
}
