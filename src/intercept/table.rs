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

/// `cudaIpcMemHandle_t` and `CUipcMemHandle`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct IpcHandle {
    /// Opaque to programs.
    pub reserved: [u8; 64],
}

/// The table: what each hooked function does, its arguments and its handler, which takes them and, if the function allocates, the
/// address to which the call returns. Expands to `$with! { … }`.
#[macro_export]
macro_rules! hooked_functions {
    ($with:ident) => { $with! {
        /// `cudaMalloc`.
        Allocates fn cudaMalloc(pointer: *mut *mut c_void, bytes: usize) => handlers::malloc;
        /// `cudaMallocPitch`.
        Allocates fn cudaMallocPitch(pointer: *mut *mut c_void, pitch: *mut usize, width: usize, height: usize) => handlers::malloc_pitch;
        /// `cudaMalloc3D`.
        Allocates fn cudaMalloc3D(pitched: *mut CudaPitchedPtr, extent: CudaExtent) => handlers::malloc_3d;
        /// `cudaMallocManaged`: always left to CUDA, because unified memory migrates by itself.
        Allocates fn cudaMallocManaged(pointer: *mut *mut c_void, bytes: usize, flags: c_uint) => handlers::malloc_managed;
        /// `cudaMallocAsync`.
        Allocates fn cudaMallocAsync(pointer: *mut *mut c_void, bytes: usize, stream: CudaStream) => handlers::malloc_async;
        /// `cudaMallocAsync` in programs built for per-thread default streams.
        Allocates fn cudaMallocAsync_ptsz(pointer: *mut *mut c_void, bytes: usize, stream: CudaStream) => handlers::malloc_async_ptsz;
        /// `cudaMallocFromPoolAsync`.
        Allocates fn cudaMallocFromPoolAsync(pointer: *mut *mut c_void, bytes: usize, pool: *mut c_void, stream: CudaStream) => handlers::malloc_from_pool_async;
        /// `cudaMallocFromPoolAsync` in programs built for per-thread default streams.
        Allocates fn cudaMallocFromPoolAsync_ptsz(pointer: *mut *mut c_void, bytes: usize, pool: *mut c_void, stream: CudaStream) => handlers::malloc_from_pool_async_ptsz;
        /// `cudaFree`.
        Frees fn cudaFree(pointer: *mut c_void) => handlers::free;
        /// `cudaFreeAsync`.
        Frees fn cudaFreeAsync(pointer: *mut c_void, stream: CudaStream) => handlers::free_async;
        /// `cudaFreeAsync` in programs built for per-thread default streams.
        Frees fn cudaFreeAsync_ptsz(pointer: *mut c_void, stream: CudaStream) => handlers::free_async_ptsz;
        /// `cudaDeviceReset`: forgets the managed memory that it destroys.
        Ends fn cudaDeviceReset() => handlers::device_reset;
        /// `cudaDeviceEnablePeerAccess`: also gives the peer access to managed memory.
        Shares fn cudaDeviceEnablePeerAccess(peer: c_int, flags: c_uint) => handlers::enable_peer_access;
        /// `cudaDeviceDisablePeerAccess`.
        Shares fn cudaDeviceDisablePeerAccess(peer: c_int) => handlers::disable_peer_access;
        /// `cudaIpcGetMemHandle`: the handle for managed memory is the library's.
        Shares fn cudaIpcGetMemHandle(handle: *mut c_void, pointer: *mut c_void) => share::cuda_get;
        /// `cudaIpcOpenMemHandle`: gets managed memory from its owner.
        Shares fn cudaIpcOpenMemHandle(pointer: *mut *mut c_void, handle: IpcHandle, flags: c_uint) => share::cuda_open;
        /// `cudaIpcCloseMemHandle`.
        Shares fn cudaIpcCloseMemHandle(pointer: *mut c_void) => share::cuda_close;
    } };
}

/// What a driver function does to memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Gives memory, or the physical part of it.
    Allocates,
    /// Takes it back.
    Frees,
    /// Decides where it is and who reaches it.
    Maps,
    /// Hands it to another process or device.
    Shares,
    /// Tells something about it.
    Queries,
    /// Ends a context, and with it the memory in it.
    Ends,
    /// Tells where functions are, these among them.
    Resolves,
}

/// Which stream the null stream is to a driver function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flavour {
    /// The legacy stream, or the function takes no stream.
    Plain,
    /// The thread's own: the variant for programs that are built for per-thread default streams.
    PerThread,
}

/// The table of driver functions. Each line: what the function does, its exported symbol, the name and CUDA version under which
/// `cuGetProcAddress` knows it, its flavour, its arguments, and its handler or `forward`. Expands to `$with! { … }`.
///
/// The versions are those of `cudaTypedefs.h`, where each function has a type `PFN_NAME_vVERSION`. A handler takes the function's
/// arguments and, if it allocates, the address to which the call returns.
#[macro_export]
macro_rules! driver_functions {
    ($with:ident) => { $with! {
        Allocates cuMemAlloc_v2 "cuMemAlloc" 3020 Plain (pointer: *mut CUdeviceptr, bytes: usize) => alloc::mem_alloc;
        Allocates cuMemAllocPitch_v2 "cuMemAllocPitch" 3020 Plain (pointer: *mut CUdeviceptr, pitch: *mut usize, width: usize, height: usize, element: c_uint) => alloc::mem_alloc_pitch;
        Allocates cuMemAllocAsync "cuMemAllocAsync" 11020 Plain (pointer: *mut CUdeviceptr, bytes: usize, stream: StreamHandle) => alloc::mem_alloc_async;
        Allocates cuMemAllocAsync_ptsz "cuMemAllocAsync" 11020 PerThread (pointer: *mut CUdeviceptr, bytes: usize, stream: StreamHandle) => alloc::mem_alloc_async_ptsz;
        Allocates cuMemAllocFromPoolAsync "cuMemAllocFromPoolAsync" 11020 Plain (pointer: *mut CUdeviceptr, bytes: usize, pool: *mut c_void, stream: StreamHandle) => alloc::mem_alloc_from_pool_async;
        Allocates cuMemAllocFromPoolAsync_ptsz "cuMemAllocFromPoolAsync" 11020 PerThread (pointer: *mut CUdeviceptr, bytes: usize, pool: *mut c_void, stream: StreamHandle) => alloc::mem_alloc_from_pool_async_ptsz;
        Allocates cuMemCreate "cuMemCreate" 10020 Plain (handle: *mut CUmemGenericAllocationHandle, bytes: usize, properties: *const CUmemAllocationProp, flags: c_ulonglong) => vmm::create;

        Frees cuMemFree_v2 "cuMemFree" 3020 Plain (pointer: CUdeviceptr) => alloc::mem_free;
        Frees cuMemFreeAsync "cuMemFreeAsync" 11020 Plain (pointer: CUdeviceptr, stream: StreamHandle) => alloc::mem_free_async;
        Frees cuMemFreeAsync_ptsz "cuMemFreeAsync" 11020 PerThread (pointer: CUdeviceptr, stream: StreamHandle) => alloc::mem_free_async_ptsz;
        Frees cuMemRelease "cuMemRelease" 10020 Plain (handle: CUmemGenericAllocationHandle) => vmm::release;

        Maps cuMemAddressReserve "cuMemAddressReserve" 10020 Plain (pointer: *mut CUdeviceptr, bytes: usize, alignment: usize, hint: CUdeviceptr, flags: c_ulonglong) => forward;
        Maps cuMemAddressFree "cuMemAddressFree" 10020 Plain (pointer: CUdeviceptr, bytes: usize) => vmm::address_free;
        Maps cuMemMap "cuMemMap" 10020 Plain (pointer: CUdeviceptr, bytes: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: c_ulonglong) => vmm::map;
        Maps cuMemUnmap "cuMemUnmap" 10020 Plain (pointer: CUdeviceptr, bytes: usize) => vmm::unmap;
        Maps cuMemSetAccess "cuMemSetAccess" 10020 Plain (pointer: CUdeviceptr, bytes: usize, access: *const CUmemAccessDesc, count: usize) => vmm::set_access;
        Maps cuMemMapArrayAsync "cuMemMapArrayAsync" 11010 Plain (list: *mut CUarrayMapInfo, count: c_uint, stream: StreamHandle) => vmm::map_array;
        Maps cuMemMapArrayAsync_ptsz "cuMemMapArrayAsync" 11010 PerThread (list: *mut CUarrayMapInfo, count: c_uint, stream: StreamHandle) => vmm::map_array_ptsz;
        Maps cuMulticastBindMem "cuMulticastBindMem" 12010 Plain (multicast: CUmemGenericAllocationHandle, multicast_offset: usize, handle: CUmemGenericAllocationHandle, offset: usize, bytes: usize, flags: c_ulonglong) => vmm::bind_multicast;
        Maps cuMulticastBindMem_v2 "cuMulticastBindMem" 13010 Plain (multicast: CUmemGenericAllocationHandle, device: CUdevice, multicast_offset: usize, handle: CUmemGenericAllocationHandle, offset: usize, bytes: usize, flags: c_ulonglong) => vmm::bind_multicast_v2;
        Maps cuMulticastBindAddr "cuMulticastBindAddr" 12010 Plain (multicast: CUmemGenericAllocationHandle, multicast_offset: usize, pointer: CUdeviceptr, bytes: usize, flags: c_ulonglong) => register::bind_multicast_address;
        Maps cuMulticastBindAddr_v2 "cuMulticastBindAddr" 13010 Plain (multicast: CUmemGenericAllocationHandle, device: CUdevice, multicast_offset: usize, pointer: CUdeviceptr, bytes: usize, flags: c_ulonglong) => register::bind_multicast_address_v2;

        Shares cuMemExportToShareableHandle "cuMemExportToShareableHandle" 10020 Plain (shared: *mut c_void, handle: CUmemGenericAllocationHandle, kind: c_uint, flags: c_ulonglong) => vmm::export;
        Shares cuMemImportFromShareableHandle "cuMemImportFromShareableHandle" 10020 Plain (handle: *mut CUmemGenericAllocationHandle, shared: *mut c_void, kind: c_uint) => forward;
        Shares cuMemGetHandleForAddressRange "cuMemGetHandleForAddressRange" 11070 Plain (shared: *mut c_void, pointer: CUdeviceptr, bytes: usize, kind: c_uint, flags: c_ulonglong) => register::handle_for_range;
        Shares cuIpcGetMemHandle "cuIpcGetMemHandle" 4010 Plain (shared: *mut c_void, pointer: CUdeviceptr) => share::driver_get;
        Shares cuIpcOpenMemHandle_v2 "cuIpcOpenMemHandle" 11000 Plain (pointer: *mut CUdeviceptr, shared: IpcHandle, flags: c_uint) => share::driver_open;
        Shares cuIpcCloseMemHandle "cuIpcCloseMemHandle" 4010 Plain (pointer: CUdeviceptr) => share::driver_close;
        Shares cuPointerSetAttribute "cuPointerSetAttribute" 6000 Plain (value: *const c_void, attribute: c_uint, pointer: CUdeviceptr) => register::pointer_set_attribute;
        Shares cuCtxEnablePeerAccess "cuCtxEnablePeerAccess" 4000 Plain (peer: ContextHandle, flags: c_uint) => contexts::enable_peer_access;
        Shares cuCtxDisablePeerAccess "cuCtxDisablePeerAccess" 4000 Plain (peer: ContextHandle) => contexts::disable_peer_access;

        Queries cuMemGetAccess "cuMemGetAccess" 10020 Plain (flags: *mut c_ulonglong, location: *const CUmemLocation, pointer: CUdeviceptr) => vmm::get_access;
        Queries cuMemGetAddressRange_v2 "cuMemGetAddressRange" 3020 Plain (base: *mut CUdeviceptr, bytes: *mut usize, pointer: CUdeviceptr) => forward;
        Queries cuMemRetainAllocationHandle "cuMemRetainAllocationHandle" 11000 Plain (handle: *mut CUmemGenericAllocationHandle, pointer: *mut c_void) => vmm::retain_handle;
        Queries cuMemGetAllocationPropertiesFromHandle "cuMemGetAllocationPropertiesFromHandle" 10020 Plain (properties: *mut CUmemAllocationProp, handle: CUmemGenericAllocationHandle) => vmm::properties_of;

        Ends cuCtxDestroy_v2 "cuCtxDestroy" 4000 Plain (context: ContextHandle) => contexts::destroy;
        Ends cuDevicePrimaryCtxReset_v2 "cuDevicePrimaryCtxReset" 11000 Plain (device: CUdevice) => contexts::reset_primary;
        Ends cuDevicePrimaryCtxRelease_v2 "cuDevicePrimaryCtxRelease" 11000 Plain (device: CUdevice) => contexts::release_primary;

        Resolves cuGetProcAddress "cuGetProcAddress" 11030 Plain (name: *const c_char, function: *mut *mut c_void, version: c_int, flags: c_ulonglong) => resolve::get_proc_address;
        Resolves cuGetProcAddress_v2 "cuGetProcAddress" 12000 Plain (name: *const c_char, function: *mut *mut c_void, version: c_int, flags: c_ulonglong, status: *mut c_uint) => resolve::get_proc_address_v2;
    } };
}
