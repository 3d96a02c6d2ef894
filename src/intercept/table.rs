//! The tables of hooked functions: of the CUDA runtime, of NCCL, and of the driver, those that wait at the gate in a table of their own.
//! Also the argument types.
//!
//! Macros generate everything else from them: the exported symbols and the functions behind them, the lookups of the real functions, and
//! the lists of names.

use std::ffi::c_void;

/// `cudaError_t` as a number, so that codes added by newer runtimes pass through unchanged.
pub type CudaError = u32;

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

/// The runtime's functions. Each line: what the function does, its symbol, its flavour, its arguments and its handler. A handler gets the
/// `Call` (`call.rs`) and what stands in brackets. If the condition after `unless` is true, the real function answers, and the
/// handler hears only of an answer "out of memory", which it reports; the condition must not panic. Expands to `$with! { … }`.
#[macro_export]
macro_rules! hooked_functions {
    ($with:ident) => { $with! {
        Allocates cudaMalloc Plain (pointer: *mut *mut c_void, bytes: usize) { alloc::malloc(pointer.cast(), bytes) unless alloc::can_forward(bytes) };
        Allocates cudaMallocPitch Plain (pointer: *mut *mut c_void, pitch: *mut usize, width: usize, height: usize)
            { alloc::malloc_pitch(pointer.cast(), pitch, width, height) };
        Allocates cudaMalloc3D Plain (pitched: *mut CudaPitchedPtr, extent: CudaExtent) { alloc::malloc_3d(pitched, extent) };
        Allocates cudaMallocManaged Plain (pointer: *mut *mut c_void, bytes: usize, flags: c_uint) { alloc::malloc_managed(pointer.cast(), bytes) };
        Allocates cudaMallocAsync Plain (pointer: *mut *mut c_void, bytes: usize, stream: StreamHandle) { alloc::malloc_async(pointer.cast(), bytes, stream) };
        Allocates cudaMallocAsync_ptsz PerThread (pointer: *mut *mut c_void, bytes: usize, stream: StreamHandle) { alloc::malloc_async(pointer.cast(), bytes, stream) };
        Allocates cudaMallocFromPoolAsync Plain (pointer: *mut *mut c_void, bytes: usize, pool: *mut c_void, stream: StreamHandle)
            { alloc::malloc_from_pool_async(pointer.cast(), bytes, pool, stream) };
        Allocates cudaMallocFromPoolAsync_ptsz PerThread (pointer: *mut *mut c_void, bytes: usize, pool: *mut c_void, stream: StreamHandle)
            { alloc::malloc_from_pool_async(pointer.cast(), bytes, pool, stream) };
        Frees cudaFree Plain (pointer: *mut c_void) { alloc::free(pointer as u64) unless alloc::is_unknown(pointer as u64) };
        Frees cudaFreeAsync Plain (pointer: *mut c_void, stream: StreamHandle) { alloc::free_async(pointer as u64, stream) };
        Frees cudaFreeAsync_ptsz PerThread (pointer: *mut c_void, stream: StreamHandle) { alloc::free_async(pointer as u64, stream) };
        Ends cudaDeviceReset Plain () { contexts::reset_device() };
        Shares cudaDeviceEnablePeerAccess Plain (peer: c_int, flags: c_uint) { peers::enable(Peer::Device(peer)) };
        Shares cudaDeviceDisablePeerAccess Plain (peer: c_int) { peers::disable(Peer::Device(peer)) };
        Shares cudaMemPoolSetAccess Plain (pool: *mut c_void, access: *const c_void, count: usize) { peers::set_pool_access(pool, access.cast(), count) };
        Shares cudaIpcGetMemHandle Plain (handle: *mut c_void, pointer: *mut c_void) { share::get(handle, pointer as u64) };
        Shares cudaIpcOpenMemHandle Plain (pointer: *mut *mut c_void, handle: IpcHandle, flags: c_uint) { share::open(pointer.cast(), &handle, flags) };
        Shares cudaIpcCloseMemHandle Plain (pointer: *mut c_void) { share::close(pointer as u64) };
    } };
}

/// NCCL's functions that register memory, that make and end communicators, and the one that explains errors. Each line: arguments, answer
/// and handler. Expands to `$with! { … }`.
#[macro_export]
macro_rules! nccl_functions {
    ($with:ident) => { $with! {
        ncclCommRegister(communicator: usize, address: *mut c_void, bytes: usize, handle: *mut usize) -> NcclResult => register;
        ncclCommDeregister(communicator: usize, handle: usize) -> NcclResult => deregister;
        ncclCommWindowRegister(communicator: usize, address: *mut c_void, bytes: usize, window: *mut usize, flags: c_int) -> NcclResult => register_window;
        ncclCommWindowDeregister(communicator: usize, window: usize) -> NcclResult => deregister;
        ncclCommDestroy(communicator: usize) -> NcclResult => destroy;
        ncclCommAbort(communicator: usize) -> NcclResult => destroy;
        ncclCommInitRank(communicator: *mut usize, ranks: c_int, unique: UniqueId, rank: c_int) -> NcclResult => init;
        ncclCommInitRankConfig(communicator: *mut usize, ranks: c_int, unique: UniqueId, rank: c_int, config: *const c_void) -> NcclResult => init_with;
        ncclCommInitRankScalable(communicator: *mut usize, ranks: c_int, rank: c_int, ids: c_int, uniques: *const UniqueId, config: *const c_void) -> NcclResult => init_of_many;
        ncclCommInitAll(communicators: *mut usize, ranks: c_int, devices: *const c_int) -> NcclResult => init_all;
        ncclCommSplit(communicator: usize, color: c_int, key: c_int, made: *mut usize, config: *const c_void) -> NcclResult => split;
        ncclCommShrink(communicator: usize, excluded: *const c_int, count: c_int, made: *mut usize, config: *const c_void, flags: c_int) -> NcclResult => shrink;
        ncclCommGrow(communicator: usize, ranks: c_int, unique: *const UniqueId, rank: c_int, made: *mut usize, config: *const c_void) -> NcclResult => grow;
        ncclGetErrorString(code: NcclResult) -> *const c_char => explain;
    } };
}

/// What a driver function does to memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Creates memory, or the physical part of it.
    Allocates,
    /// Takes it back.
    Frees,
    /// Sets its addresses and which devices have access.
    Maps,
    /// Shares it with another process or device.
    Shares,
    /// Queries it.
    Queries,
    /// Starts the driver. Its handler gets the functions that have entries, and runs before it; then the server of a program that shares its
    /// GPUs starts.
    Starts,
    /// Creates a context.
    Begins,
    /// Destroys a context, and with it the memory in it.
    Ends,
    /// Creates or destroys a stream, or begins or ends a capture on one.
    Streams,
    /// Looks up functions, including these.
    Resolves,
    /// Starts kernels, graphs or host functions.
    Launches,
    /// Copies, by finding its own way to plain memory (`reach.rs`).
    Copies,
    /// The same, naming a context for each side.
    Crosses,
    /// Writes device memory otherwise: sets, prefetches.
    Writes,
    /// Waits for or writes a value in stream order.
    Signals,
    /// Describes work on memory: a graph or its nodes. Starts nothing, but the driver looks whether the memory is there.
    Describes,
    /// Waits for work on the host. Its handler runs after it. Waits for the driver to come back, too, as those that ask do.
    Synchronizes,
    /// Asks for the free memory. Waits for the driver to come back.
    Measures,
    /// Asks, or orders, in a way that the driver does not block in a process that is checkpointed.
    Asks,
    /// Loads code onto the device.
    Loads,
}

impl Effect {
    /// Whether the current context may be one that the library has not seen. Others are seen when they are created, or are the primary
    /// context of a device.
    pub fn shows_the_context(self) -> bool {
        matches!(self, Self::Allocates | Self::Begins)
    }
}

/// The meaning of the null stream to a driver function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flavour {
    /// The legacy stream, or the function takes no stream.
    Plain,
    /// The thread's own: the variant for programs that are built for per-thread default streams.
    PerThread,
}

/// The driver's functions. Each line: what the function does, its exported symbol, the name and CUDA version under which
/// `cuGetProcAddress` knows it, its flavour, its arguments and its handler, perhaps with a condition, as above. A handler without brackets
/// calls the driver itself, with arguments of its own, and gets those of the program. Expands to `$with! { … }`.
///
/// The versions are those of `cudaTypedefs.h`, where each function has a type `PFN_NAME_vVERSION`.
#[macro_export]
macro_rules! driver_functions {
    ($with:ident) => { $with! {
        Allocates cuMemAlloc_v2 "cuMemAlloc" 3020 Plain (pointer: *mut CUdeviceptr, bytes: usize) { alloc::mem_alloc(pointer, bytes) unless alloc::can_forward(bytes) };
        Allocates cuMemAllocPitch_v2 "cuMemAllocPitch" 3020 Plain (pointer: *mut CUdeviceptr, pitch: *mut usize, width: usize, height: usize, element: c_uint)
            { alloc::mem_alloc_pitch(pointer, pitch, width, height, element) };
        Allocates cuMemAllocAsync "cuMemAllocAsync" 11020 Plain (pointer: *mut CUdeviceptr, bytes: usize, stream: StreamHandle) { alloc::malloc_async(pointer, bytes, stream) };
        Allocates cuMemAllocAsync_ptsz "cuMemAllocAsync" 11020 PerThread
            (pointer: *mut CUdeviceptr, bytes: usize, stream: StreamHandle) { alloc::malloc_async(pointer, bytes, stream) };
        Allocates cuMemAllocFromPoolAsync "cuMemAllocFromPoolAsync" 11020 Plain
            (pointer: *mut CUdeviceptr, bytes: usize, pool: *mut c_void, stream: StreamHandle) { alloc::malloc_from_pool_async(pointer, bytes, pool, stream) };
        Allocates cuMemAllocFromPoolAsync_ptsz "cuMemAllocFromPoolAsync" 11020 PerThread
            (pointer: *mut CUdeviceptr, bytes: usize, pool: *mut c_void, stream: StreamHandle) { alloc::malloc_from_pool_async(pointer, bytes, pool, stream) };
        Allocates cuMemCreate "cuMemCreate" 10020 Plain
            (handle: *mut Handle, bytes: usize, properties: *const CUmemAllocationProp, flags: c_ulonglong) { vmm::create(handle, bytes, properties, flags) };
        Allocates cuArrayCreate_v2 "cuArrayCreate" 3020 Plain
            (array: *mut *mut c_void, descriptor: *const c_void) { arrays::create(array, descriptor.cast()) unless limited::is_uncounted() };
        Allocates cuArray3DCreate_v2 "cuArray3DCreate" 3020 Plain
            (array: *mut *mut c_void, descriptor: *const c_void) { arrays::create_3d(array, descriptor.cast(), 1) unless limited::is_uncounted() };
        Allocates cuMipmappedArrayCreate "cuMipmappedArrayCreate" 5000 Plain
            (array: *mut *mut c_void, descriptor: *const c_void, levels: c_uint) { arrays::create_3d(array, descriptor.cast(), levels) unless limited::is_uncounted() };
        Allocates cuMemAllocManaged "cuMemAllocManaged" 6000 Plain (pointer: *mut CUdeviceptr, bytes: usize, flags: c_uint) { alloc::mem_alloc_managed(pointer, bytes) };

        Frees cuMemFree_v2 "cuMemFree" 3020 Plain (pointer: CUdeviceptr) { alloc::free(pointer) unless alloc::is_unknown(pointer) };
        Frees cuMemFreeAsync "cuMemFreeAsync" 11020 Plain (pointer: CUdeviceptr, stream: StreamHandle) { alloc::free_async(pointer, stream) };
        Frees cuMemFreeAsync_ptsz "cuMemFreeAsync" 11020 PerThread (pointer: CUdeviceptr, stream: StreamHandle) { alloc::free_async(pointer, stream) };
        Frees cuArrayDestroy "cuArrayDestroy" 2000 Plain (array: *mut c_void) { arrays::destroy(array) unless limited::is_uncounted() };
        Frees cuMipmappedArrayDestroy "cuMipmappedArrayDestroy" 5000 Plain (array: *mut c_void) { arrays::destroy(array) unless limited::is_uncounted() };
        Frees cuMemRelease "cuMemRelease" 10020 Plain (handle: Handle) { vmm::release(handle) };

        Maps cuMemAddressReserve "cuMemAddressReserve" 10020 Plain
            (pointer: *mut CUdeviceptr, bytes: usize, alignment: usize, hint: CUdeviceptr, flags: c_ulonglong) { vmm::address_reserve(pointer, bytes) };
        Maps cuMemAddressFree "cuMemAddressFree" 10020 Plain (pointer: CUdeviceptr, bytes: usize) { vmm::address_free(pointer, bytes) };
        Maps cuMemMap "cuMemMap" 10020 Plain (pointer: CUdeviceptr, bytes: usize, offset: usize, handle: Handle, flags: c_ulonglong) { vmm::map };
        Maps cuMemUnmap "cuMemUnmap" 10020 Plain (pointer: CUdeviceptr, bytes: usize) { vmm::unmap(pointer, bytes) };
        Maps cuMemSetAccess "cuMemSetAccess" 10020 Plain (pointer: CUdeviceptr, bytes: usize, access: *const CUmemAccessDesc, count: usize) { vmm::set_access };
        Maps cuMemMapArrayAsync "cuMemMapArrayAsync" 11010 Plain (list: *mut CUarrayMapInfo, count: c_uint, stream: StreamHandle) { vmm::map_array(list, count) };
        Maps cuMemMapArrayAsync_ptsz "cuMemMapArrayAsync" 11010 PerThread (list: *mut CUarrayMapInfo, count: c_uint, stream: StreamHandle) { vmm::map_array(list, count) };
        Maps cuMulticastBindMem "cuMulticastBindMem" 12010 Plain
            (multicast: Handle, multicast_offset: usize, handle: Handle, offset: usize, bytes: usize, flags: c_ulonglong) { vmm::bind_multicast };
        Maps cuMulticastBindMem_v2 "cuMulticastBindMem" 13010 Plain
            (multicast: Handle, device: CUdevice, multicast_offset: usize, handle: Handle, offset: usize, bytes: usize, flags: c_ulonglong) { vmm::bind_multicast_v2 };
        Maps cuMulticastBindAddr "cuMulticastBindAddr" 12010 Plain (multicast: Handle, multicast_offset: usize, pointer: CUdeviceptr, bytes: usize, flags: c_ulonglong)
            { register::bind_multicast_address(Binding { object: multicast, offset: multicast_offset, bytes, device: None }, pointer) };
        Maps cuMulticastBindAddr_v2 "cuMulticastBindAddr" 13010 Plain
            (multicast: Handle, device: CUdevice, multicast_offset: usize, pointer: CUdeviceptr, bytes: usize, flags: c_ulonglong)
            { register::bind_multicast_address(Binding { object: multicast, offset: multicast_offset, bytes, device: Some(device) }, pointer) };
        Maps cuLogicalEndpointBindMem "cuLogicalEndpointBindMem" 13030 Plain
            (endpoint: c_uint, device: CUdevice, endpoint_offset: c_ulonglong, handle: Handle, offset: c_ulonglong, bytes: c_ulonglong, flags: c_ulonglong)
            { vmm::bind_endpoint };
        Maps cuLogicalEndpointBindAddr "cuLogicalEndpointBindAddr" 13030 Plain
            (endpoint: c_uint, device: CUdevice, offset: c_ulonglong, pointer: *mut c_void, bytes: c_ulonglong, flags: c_ulonglong)
            { register::bind_endpoint_address(part_of_endpoint(endpoint, device, offset, bytes), pointer as u64) };
        Maps cuLogicalEndpointUnbind "cuLogicalEndpointUnbind" 13030 Plain
            (endpoint: c_uint, device: CUdevice, offset: c_ulonglong, bytes: c_ulonglong) { vmm::unbind(part_of_endpoint(endpoint, device, offset, bytes)) };
        Maps cuLogicalEndpointDestroy "cuLogicalEndpointDestroy" 13030 Plain (endpoint: c_uint) { vmm::destroy_endpoint(endpoint) };
        Maps cuMulticastUnbind "cuMulticastUnbind" 12010 Plain
            (multicast: Handle, device: CUdevice, offset: usize, bytes: usize) { vmm::unbind(Binding { object: multicast, offset, bytes, device: Some(device) }) };

        Shares cuMemExportToShareableHandle "cuMemExportToShareableHandle" 10020 Plain (shared: *mut c_void, handle: Handle, kind: c_uint, flags: c_ulonglong) { vmm::export };
        Shares cuMemImportFromShareableHandle "cuMemImportFromShareableHandle" 10020 Plain
            (handle: *mut Handle, shared: *mut c_void, kind: c_uint) { share::import(handle, shared, kind) };
        Shares cuMemGetHandleForAddressRange "cuMemGetHandleForAddressRange" 11070 Plain
            (shared: *mut c_void, pointer: CUdeviceptr, bytes: usize, kind: c_uint, flags: c_ulonglong) { register::handle_for_range(pointer, bytes) };
        Shares cuIpcGetMemHandle "cuIpcGetMemHandle" 4010 Plain (shared: *mut c_void, pointer: CUdeviceptr) { share::get(shared, pointer) };
        Shares cuIpcOpenMemHandle "cuIpcOpenMemHandle" 4010 Plain (pointer: *mut CUdeviceptr, shared: IpcHandle, flags: c_uint) { share::open(pointer, &shared, flags) };
        Shares cuIpcOpenMemHandle_v2 "cuIpcOpenMemHandle" 11000 Plain (pointer: *mut CUdeviceptr, shared: IpcHandle, flags: c_uint) { share::open(pointer, &shared, flags) };
        Shares cuIpcCloseMemHandle "cuIpcCloseMemHandle" 4010 Plain (pointer: CUdeviceptr) { share::close(pointer) };
        Shares cuPointerSetAttribute "cuPointerSetAttribute" 6000 Plain
            (value: *const c_void, attribute: c_uint, pointer: CUdeviceptr) { register::pointer_set_attribute(value, attribute, pointer) };
        Shares cuCtxEnablePeerAccess "cuCtxEnablePeerAccess" 4000 Plain (peer: ContextHandle, flags: c_uint) { peers::enable(Peer::Context(peer)) };
        Shares cuCtxDisablePeerAccess "cuCtxDisablePeerAccess" 4000 Plain (peer: ContextHandle) { peers::disable(Peer::Context(peer)) };

        Shares cuMemPoolSetAccess "cuMemPoolSetAccess" 11020 Plain
            (pool: *mut c_void, access: *const CUmemAccessDesc, count: usize) { peers::set_pool_access(pool, access.cast(), count) };
        Shares cuMemPoolCreate "cuMemPoolCreate" 11020 Plain (pool: *mut *mut c_void, properties: *const c_void) { pools::create(pool, properties) };
        Shares cuMemPoolDestroy "cuMemPoolDestroy" 11020 Plain (pool: *mut c_void) { pools::destroy(pool) };
        Shares cuMemPoolExportToShareableHandle "cuMemPoolExportToShareableHandle" 11020 Plain
            (shared: *mut c_void, pool: *mut c_void, kind: c_uint, flags: c_ulonglong) { pools::export(pool) };
        Shares cuMemPoolImportFromShareableHandle "cuMemPoolImportFromShareableHandle" 11020 Plain
            (pool: *mut *mut c_void, shared: *mut c_void, kind: c_uint, flags: c_ulonglong) { pools::import(pool) };
        Shares cuMemPoolExportPointer "cuMemPoolExportPointer" 11020 Plain (data: *mut c_void, pointer: CUdeviceptr) { pools::export_pointer(pointer) };
        Shares cuMemPoolImportPointer "cuMemPoolImportPointer" 11020 Plain (pointer: *mut CUdeviceptr, pool: *mut c_void, data: *mut c_void) { pools::import_pointer(pointer) };

        Queries cuMemGetAccess "cuMemGetAccess" 10020 Plain
            (flags: *mut c_ulonglong, location: *const CUmemLocation, pointer: CUdeviceptr) { vmm::get_access(flags, location, pointer) };
        Queries cuMemGetAddressRange_v2 "cuMemGetAddressRange" 3020 Plain (base: *mut CUdeviceptr, bytes: *mut usize, pointer: CUdeviceptr) { queries::address_range };
        Queries cuMemHostGetDevicePointer_v2 "cuMemHostGetDevicePointer" 3020 Plain
            (pointer: *mut CUdeviceptr, host: *mut c_void, flags: c_uint) { queries::host_device_pointer };
        Queries cuPointerGetAttribute "cuPointerGetAttribute" 4000 Plain (value: *mut c_void, attribute: c_uint, pointer: CUdeviceptr) { queries::pointer_attribute };
        Queries cuPointerGetAttributes "cuPointerGetAttributes" 7000 Plain
            (count: c_uint, attributes: *const c_uint, values: *mut *mut c_void, pointer: CUdeviceptr) { queries::pointer_attributes };
        Queries cuMemRetainAllocationHandle "cuMemRetainAllocationHandle" 11000 Plain (handle: *mut Handle, pointer: *mut c_void) { vmm::retain_handle(handle, pointer) };
        Queries cuMemGetAllocationPropertiesFromHandle "cuMemGetAllocationPropertiesFromHandle" 10020 Plain
            (properties: *mut CUmemAllocationProp, handle: Handle) { vmm::properties_of(properties, handle) };

        Queries cuMemPoolGetAttribute "cuMemPoolGetAttribute" 11020 Plain
            (pool: *mut c_void, attribute: c_uint, value: *mut c_void) { pools::get_attribute(pool, attribute, value) };
        Queries cuMemPoolSetAttribute "cuMemPoolSetAttribute" 11020 Plain (pool: *mut c_void, attribute: c_uint, value: *mut c_void) { pools::set_attribute(pool, attribute) };
        Measures cuMemGetInfo_v2 "cuMemGetInfo" 3020 Plain
            (free: *mut usize, total: *mut usize) { alloc::mem_get_info(free, total) unless alloc::has_nothing_freed() && limited::is_uncounted() };
        Queries cuDeviceTotalMem_v2 "cuDeviceTotalMem" 3020 Plain
            (bytes: *mut usize, device: CUdevice) { limited::total_memory(bytes, device) unless limited::is_uncounted() };

        Synchronizes cuCtxSynchronize "cuCtxSynchronize" 2000 Plain () { alloc::synchronised unless alloc::has_nothing_freed() };
        Synchronizes cuCtxSynchronize_v2 "cuCtxSynchronize" 13000 Plain (context: ContextHandle) { alloc::synchronised unless alloc::has_nothing_freed() };
        Synchronizes cuEventSynchronize "cuEventSynchronize" 2000 Plain (event: *mut c_void) { alloc::synchronised unless alloc::has_nothing_freed() };
        Synchronizes cuStreamSynchronize "cuStreamSynchronize" 2000 Plain (stream: StreamHandle) { alloc::synchronised unless alloc::has_nothing_freed() };
        Synchronizes cuStreamSynchronize_ptsz "cuStreamSynchronize" 7000 PerThread (stream: StreamHandle) { alloc::synchronised unless alloc::has_nothing_freed() };
        Frees cuMemPoolTrimTo "cuMemPoolTrimTo" 11020 Plain (pool: *mut c_void, keep: usize) { pools::trim(pool, keep) };

        Starts cuInit "cuInit" 2000 Plain (flags: c_uint) { ready::look_up };
        Begins cuDevicePrimaryCtxRetain "cuDevicePrimaryCtxRetain" 7000 Plain
            (context: *mut ContextHandle, device: CUdevice) { contexts::begin(device) unless room::never_waits() };
        Begins cuCtxCreate "cuCtxCreate" 2000 Plain (context: *mut ContextHandle, flags: c_uint, device: CUdevice) { contexts::begin(device) };
        Begins cuCtxCreate_v2 "cuCtxCreate" 3020 Plain (context: *mut ContextHandle, flags: c_uint, device: CUdevice) { contexts::begin(device) };
        Begins cuCtxCreate_v3 "cuCtxCreate" 11040 Plain
            (context: *mut ContextHandle, affinity: *mut c_void, count: c_int, flags: c_uint, device: CUdevice) { contexts::begin(device) };
        Begins cuCtxCreate_v4 "cuCtxCreate" 12050 Plain (context: *mut ContextHandle, parameters: *mut c_void, flags: c_uint, device: CUdevice) { contexts::begin(device) };
        Begins cuGreenCtxCreate "cuGreenCtxCreate" 12040 Plain
            (green: *mut Green, resources: *const c_void, device: CUdevice, flags: c_uint) { contexts::create_green(green, device) };
        Begins cuCtxFromGreenCtx "cuCtxFromGreenCtx" 12040 Plain (context: *mut ContextHandle, green: Green) { contexts::from_green(context, green) };
        Ends cuGreenCtxDestroy "cuGreenCtxDestroy" 12040 Plain (green: Green) { contexts::destroy_green(green) };
        Ends cuCtxDestroy "cuCtxDestroy" 2000 Plain (context: ContextHandle) { contexts::destroy(context) };
        Ends cuCtxDestroy_v2 "cuCtxDestroy" 4000 Plain (context: ContextHandle) { contexts::destroy(context) };
        Ends cuCtxDetach "cuCtxDetach" 2000 Plain (context: ContextHandle) { contexts::destroy(context) };
        Ends cuDevicePrimaryCtxReset "cuDevicePrimaryCtxReset" 7000 Plain (device: CUdevice) { contexts::reset_primary(device) };
        Ends cuDevicePrimaryCtxReset_v2 "cuDevicePrimaryCtxReset" 11000 Plain (device: CUdevice) { contexts::reset_primary(device) };
        Ends cuDevicePrimaryCtxRelease "cuDevicePrimaryCtxRelease" 7000 Plain (device: CUdevice) { contexts::reset_primary(device) };
        Ends cuDevicePrimaryCtxRelease_v2 "cuDevicePrimaryCtxRelease" 11000 Plain (device: CUdevice) { contexts::reset_primary(device) };

        Streams cuStreamCreate "cuStreamCreate" 2000 Plain (stream: *mut StreamHandle, flags: c_uint) { streams::create(stream) };
        Streams cuStreamCreateWithPriority "cuStreamCreateWithPriority" 5050 Plain (stream: *mut StreamHandle, flags: c_uint, priority: c_int) { streams::create(stream) };
        Streams cuGreenCtxStreamCreate "cuGreenCtxStreamCreate" 12050 Plain
            (stream: *mut StreamHandle, green: *mut c_void, flags: c_uint, priority: c_int) { streams::create(stream) };
        Streams cuStreamDestroy "cuStreamDestroy" 2000 Plain (stream: StreamHandle) { streams::destroy(stream) };
        Streams cuStreamDestroy_v2 "cuStreamDestroy" 4000 Plain (stream: StreamHandle) { streams::destroy(stream) };
        Streams cuStreamBeginCapture "cuStreamBeginCapture" 10000 Plain (stream: StreamHandle) { streams::begin_capture(stream) };
        Streams cuStreamBeginCapture_ptsz "cuStreamBeginCapture" 10000 PerThread (stream: StreamHandle) { streams::begin_capture(stream) };
        Streams cuStreamBeginCapture_v2 "cuStreamBeginCapture" 10010 Plain (stream: StreamHandle, mode: c_uint) { streams::begin_capture(stream) };
        Streams cuStreamBeginCapture_v2_ptsz "cuStreamBeginCapture" 10010 PerThread (stream: StreamHandle, mode: c_uint) { streams::begin_capture(stream) };
        Streams cuStreamBeginCaptureToGraph "cuStreamBeginCaptureToGraph" 12030 Plain
            (stream: StreamHandle, graph: *mut c_void, nodes: *const c_void, edges: *const c_void, count: usize, mode: c_uint) { streams::begin_capture(stream) };
        Streams cuStreamBeginCaptureToGraph_ptsz "cuStreamBeginCaptureToGraph" 12030 PerThread
            (stream: StreamHandle, graph: *mut c_void, nodes: *const c_void, edges: *const c_void, count: usize, mode: c_uint) { streams::begin_capture(stream) };
        Streams cuStreamBeginCaptureToCig "cuStreamBeginCaptureToCig" 13010 Plain (stream: StreamHandle, parameters: *mut c_void) { streams::begin_capture(stream) };
        Streams cuStreamBeginCaptureToCig_ptsz "cuStreamBeginCaptureToCig" 13010 PerThread (stream: StreamHandle, parameters: *mut c_void) { streams::begin_capture(stream) };
        Streams cuStreamBeginRecaptureToGraph "cuStreamBeginRecaptureToGraph" 13030 Plain
            (stream: StreamHandle, second: usize, third: usize, fourth: usize, fifth: usize) { streams::begin_capture(stream) };
        Streams cuStreamBeginRecaptureToGraph_ptsz "cuStreamBeginRecaptureToGraph" 13030 PerThread
            (stream: StreamHandle, second: usize, third: usize, fourth: usize, fifth: usize) { streams::begin_capture(stream) };
        Streams cuStreamEndCaptureToCig "cuStreamEndCaptureToCig" 13010 Plain (stream: StreamHandle) { streams::end_capture(stream) };
        Streams cuStreamEndCaptureToCig_ptsz "cuStreamEndCaptureToCig" 13010 PerThread (stream: StreamHandle) { streams::end_capture(stream) };
        Streams cuStreamEndCapture "cuStreamEndCapture" 10000 Plain (stream: StreamHandle, graph: *mut *mut c_void) { streams::end_capture(stream) };
        Streams cuStreamEndCapture_ptsz "cuStreamEndCapture" 10000 PerThread (stream: StreamHandle, graph: *mut *mut c_void) { streams::end_capture(stream) };


        Resolves cuGetProcAddress "cuGetProcAddress" 11030 Plain
            (name: *const c_char, function: *mut *mut c_void, version: c_int, flags: c_ulonglong) { proc_address::get_proc_address };
        Resolves cuGetProcAddress_v2 "cuGetProcAddress" 12000 Plain
            (name: *const c_char, function: *mut *mut c_void, version: c_int, flags: c_ulonglong, status: *mut c_uint) { proc_address::get_proc_address_v2 };
    } };
}

/// The functions that start device work, change device memory or describe work on memory, and so wait at the gate
/// ([`vramctl_core::gate`]) while the program is held. Each line: what the function does, its exported symbol, name and version for
/// `cuGetProcAddress`, flavour, and a letter for each argument. All arguments are as wide as a register or narrower, and none is in
/// floating point, so that they can be passed on without knowing what they mean. Expands to `$with! { … }`.
///
/// Those that load include some that look like queries: with lazy loading, the default since CUDA 12.2, code and global variables
/// reach the device when a function or variable is first asked for in a context. What has no context (`cuLibraryGetKernel`) cannot load.
///
/// Those that describe work start none. But the driver refuses nodes that copy or set memory that is not there (observed with 580), and graphs of
/// captured sets, and a program that builds its graphs while it is held would get that error. Whether it looks at other nodes is its own affair.
///
/// Those that ask pass the gate, and wait only while another process has the driver checkpoint this one
/// ([`away`](vramctl_core::gate::away)).
///
/// The runtime has locks of its own, and may hold one when it makes such a call: it loads a kernel at its first launch. If a thread then
/// waits at the gate, another thread's `cudaFree` or `cudaEventQuery` may wait for that lock until the program is resumed, although it
/// is not gated. That delays the program, but not a pause or a resume, which wait for neither thread: they call the driver directly, not
/// through the runtime. (Only NCCL does, which is called for `--nccl` after the commit, and it has a runtime of its own.) The same holds
/// for `cuModuleLoadData` and `cuLibraryLoadData`, which the runtime calls from the same places. A thread that waits at the gate holds
/// no lock of the driver's. One that is inside, loading, may wait for the device's work; if that does not end in time, the gate opens
/// again.
#[macro_export]
macro_rules! gated_functions {
    ($with:ident) => {
        $with! {
            Launches cuGraphInstantiateWithParams "cuGraphInstantiateWithParams" 12000 Plain (a b c);
            Launches cuGraphInstantiateWithParams_ptsz "cuGraphInstantiateWithParams" 12000 PerThread (a b c);
            Launches cuGraphLaunch "cuGraphLaunch" 10000 Plain (a b);
            Launches cuGraphLaunch_ptsz "cuGraphLaunch" 10000 PerThread (a b);
            Launches cuGraphUpload "cuGraphUpload" 11010 Plain (a b);
            Launches cuGraphUpload_ptsz "cuGraphUpload" 11010 PerThread (a b);
            Launches cuLaunch "cuLaunch" 2000 Plain (a);
            Launches cuLaunchCooperativeKernel "cuLaunchCooperativeKernel" 9000 Plain (a b c d e f g h i j);
            Launches cuLaunchCooperativeKernel_ptsz "cuLaunchCooperativeKernel" 9000 PerThread (a b c d e f g h i j);
            Launches cuLaunchCooperativeKernelMultiDevice "cuLaunchCooperativeKernelMultiDevice" 9000 Plain (a b c);
            Launches cuLaunchGrid "cuLaunchGrid" 2000 Plain (a b c);
            Launches cuLaunchGridAsync "cuLaunchGridAsync" 2000 Plain (a b c d);
            Launches cuLaunchHostFunc "cuLaunchHostFunc" 10000 Plain (a b c);
            Launches cuLaunchHostFunc_ptsz "cuLaunchHostFunc" 10000 PerThread (a b c);
            Launches cuLaunchHostFunc_v2 "cuLaunchHostFunc" 13010 Plain (a b c d);
            Launches cuLaunchHostFunc_v2_ptsz "cuLaunchHostFunc" 13010 PerThread (a b c d);
            Launches cuLaunchKernel "cuLaunchKernel" 4000 Plain (a b c d e f g h i j k);
            Launches cuLaunchKernel_ptsz "cuLaunchKernel" 7000 PerThread (a b c d e f g h i j k);
            Launches cuLaunchKernelEx "cuLaunchKernelEx" 11060 Plain (a b c d);
            Launches cuLaunchKernelEx_ptsz "cuLaunchKernelEx" 11060 PerThread (a b c d);
            Launches cuStreamAddCallback "cuStreamAddCallback" 5000 Plain (a b c d);
            Launches cuStreamAddCallback_ptsz "cuStreamAddCallback" 7000 PerThread (a b c d);

            Writes cuFabricCpyBatchAsync_ptsz "cuFabricCpyBatchAsync" 13050 PerThread (a b c d);
            Writes cuFabricCpyBatchAsync "cuFabricCpyBatchAsync" 13050 Plain (a b c d);
            Writes cuMemBatchDecompressAsync "cuMemBatchDecompressAsync" 12060 Plain (a b c d e);
            Writes cuMemBatchDecompressAsync_ptsz "cuMemBatchDecompressAsync" 12060 PerThread (a b c d e);
            Writes cuMemDiscardAndPrefetchBatchAsync "cuMemDiscardAndPrefetchBatchAsync" 13000 Plain (a b c d e f g h);
            Writes cuMemDiscardAndPrefetchBatchAsync_ptsz "cuMemDiscardAndPrefetchBatchAsync" 13000 PerThread (a b c d e f g h);
            Writes cuMemDiscardBatchAsync "cuMemDiscardBatchAsync" 13000 Plain (a b c d e);
            Writes cuMemDiscardBatchAsync_ptsz "cuMemDiscardBatchAsync" 13000 PerThread (a b c d e);
            Writes cuMemPrefetchAsync "cuMemPrefetchAsync" 8000 Plain (a b c d);
            Writes cuMemPrefetchAsync_ptsz "cuMemPrefetchAsync" 8000 PerThread (a b c d);
            Writes cuMemPrefetchAsync_v2 "cuMemPrefetchAsync" 12020 Plain (a b c d e);
            Writes cuMemPrefetchAsync_v2_ptsz "cuMemPrefetchAsync" 12020 PerThread (a b c d e);
            Writes cuMemPrefetchBatchAsync "cuMemPrefetchBatchAsync" 13000 Plain (a b c d e f g h);
            Writes cuMemPrefetchBatchAsync_ptsz "cuMemPrefetchBatchAsync" 13000 PerThread (a b c d e f g h);
            Copies cuMemcpy "cuMemcpy" 4000 Plain (a b c);
            Copies cuMemcpy_ptds "cuMemcpy" 7000 PerThread (a b c);
            Copies cuMemcpy2D "cuMemcpy2D" 2000 Plain (a);
            Copies cuMemcpy2D_v2 "cuMemcpy2D" 3020 Plain (a);
            Copies cuMemcpy2D_v2_ptds "cuMemcpy2D" 7000 PerThread (a);
            Copies cuMemcpy2DAsync "cuMemcpy2DAsync" 2000 Plain (a b);
            Copies cuMemcpy2DAsync_v2 "cuMemcpy2DAsync" 3020 Plain (a b);
            Copies cuMemcpy2DAsync_v2_ptsz "cuMemcpy2DAsync" 7000 PerThread (a b);
            Copies cuMemcpy2DUnaligned "cuMemcpy2DUnaligned" 2000 Plain (a);
            Copies cuMemcpy2DUnaligned_v2 "cuMemcpy2DUnaligned" 3020 Plain (a);
            Copies cuMemcpy2DUnaligned_v2_ptds "cuMemcpy2DUnaligned" 7000 PerThread (a);
            Copies cuMemcpy3D "cuMemcpy3D" 2000 Plain (a);
            Copies cuMemcpy3D_v2 "cuMemcpy3D" 3020 Plain (a);
            Copies cuMemcpy3D_v2_ptds "cuMemcpy3D" 7000 PerThread (a);
            Copies cuMemcpy3DAsync "cuMemcpy3DAsync" 2000 Plain (a b);
            Copies cuMemcpy3DAsync_v2 "cuMemcpy3DAsync" 3020 Plain (a b);
            Copies cuMemcpy3DAsync_v2_ptsz "cuMemcpy3DAsync" 7000 PerThread (a b);
            Copies cuMemcpy3DBatchAsync "cuMemcpy3DBatchAsync" 12080 Plain (a b c d e);
            Copies cuMemcpy3DBatchAsync_ptsz "cuMemcpy3DBatchAsync" 12080 PerThread (a b c d e);
            Copies cuMemcpy3DBatchAsync_v2 "cuMemcpy3DBatchAsync" 13000 Plain (a b c d);
            Copies cuMemcpy3DBatchAsync_v2_ptsz "cuMemcpy3DBatchAsync" 13000 PerThread (a b c d);
            Crosses cuMemcpy3DPeer "cuMemcpy3DPeer" 4000 Plain (a);
            Crosses cuMemcpy3DPeer_ptds "cuMemcpy3DPeer" 7000 PerThread (a);
            Crosses cuMemcpy3DPeerAsync "cuMemcpy3DPeerAsync" 4000 Plain (a b);
            Crosses cuMemcpy3DPeerAsync_ptsz "cuMemcpy3DPeerAsync" 7000 PerThread (a b);
            Copies cuMemcpy3DWithAttributesAsync "cuMemcpy3DWithAttributesAsync" 13020 Plain (a b c);
            Copies cuMemcpy3DWithAttributesAsync_ptsz "cuMemcpy3DWithAttributesAsync" 13020 PerThread (a b c);
            Copies cuMemcpyAsync "cuMemcpyAsync" 4000 Plain (a b c d);
            Copies cuMemcpyAsync_ptsz "cuMemcpyAsync" 7000 PerThread (a b c d);
            Copies cuMemcpyAtoA "cuMemcpyAtoA" 2000 Plain (a b c d e);
            Copies cuMemcpyAtoA_v2 "cuMemcpyAtoA" 3020 Plain (a b c d e);
            Copies cuMemcpyAtoA_v2_ptds "cuMemcpyAtoA" 7000 PerThread (a b c d e);
            Copies cuMemcpyAtoD "cuMemcpyAtoD" 2000 Plain (a b c d);
            Copies cuMemcpyAtoD_v2 "cuMemcpyAtoD" 3020 Plain (a b c d);
            Copies cuMemcpyAtoD_v2_ptds "cuMemcpyAtoD" 7000 PerThread (a b c d);
            Copies cuMemcpyAtoH "cuMemcpyAtoH" 2000 Plain (a b c d);
            Copies cuMemcpyAtoH_v2 "cuMemcpyAtoH" 3020 Plain (a b c d);
            Copies cuMemcpyAtoH_v2_ptds "cuMemcpyAtoH" 7000 PerThread (a b c d);
            Copies cuMemcpyAtoHAsync "cuMemcpyAtoHAsync" 2000 Plain (a b c d e);
            Copies cuMemcpyAtoHAsync_v2 "cuMemcpyAtoHAsync" 3020 Plain (a b c d e);
            Copies cuMemcpyAtoHAsync_v2_ptsz "cuMemcpyAtoHAsync" 7000 PerThread (a b c d e);
            Copies cuMemcpyBatchAsync "cuMemcpyBatchAsync" 12080 Plain (a b c d e f g h i);
            Copies cuMemcpyBatchAsync_ptsz "cuMemcpyBatchAsync" 12080 PerThread (a b c d e f g h i);
            Copies cuMemcpyBatchAsync_v2 "cuMemcpyBatchAsync" 13000 Plain (a b c d e f g h);
            Copies cuMemcpyBatchAsync_v2_ptsz "cuMemcpyBatchAsync" 13000 PerThread (a b c d e f g h);
            Copies cuMemcpyDtoA "cuMemcpyDtoA" 2000 Plain (a b c d);
            Copies cuMemcpyDtoA_v2 "cuMemcpyDtoA" 3020 Plain (a b c d);
            Copies cuMemcpyDtoA_v2_ptds "cuMemcpyDtoA" 7000 PerThread (a b c d);
            Copies cuMemcpyDtoD "cuMemcpyDtoD" 2000 Plain (a b c);
            Copies cuMemcpyDtoD_v2 "cuMemcpyDtoD" 3020 Plain (a b c);
            Copies cuMemcpyDtoD_v2_ptds "cuMemcpyDtoD" 7000 PerThread (a b c);
            Copies cuMemcpyDtoDAsync "cuMemcpyDtoDAsync" 3000 Plain (a b c d);
            Copies cuMemcpyDtoDAsync_v2 "cuMemcpyDtoDAsync" 3020 Plain (a b c d);
            Copies cuMemcpyDtoDAsync_v2_ptsz "cuMemcpyDtoDAsync" 7000 PerThread (a b c d);
            Copies cuMemcpyDtoH "cuMemcpyDtoH" 2000 Plain (a b c);
            Copies cuMemcpyDtoH_v2 "cuMemcpyDtoH" 3020 Plain (a b c);
            Copies cuMemcpyDtoH_v2_ptds "cuMemcpyDtoH" 7000 PerThread (a b c);
            Copies cuMemcpyDtoHAsync "cuMemcpyDtoHAsync" 2000 Plain (a b c d);
            Copies cuMemcpyDtoHAsync_v2 "cuMemcpyDtoHAsync" 3020 Plain (a b c d);
            Copies cuMemcpyDtoHAsync_v2_ptsz "cuMemcpyDtoHAsync" 7000 PerThread (a b c d);
            Copies cuMemcpyHtoA "cuMemcpyHtoA" 2000 Plain (a b c d);
            Copies cuMemcpyHtoA_v2 "cuMemcpyHtoA" 3020 Plain (a b c d);
            Copies cuMemcpyHtoA_v2_ptds "cuMemcpyHtoA" 7000 PerThread (a b c d);
            Copies cuMemcpyHtoAAsync "cuMemcpyHtoAAsync" 2000 Plain (a b c d e);
            Copies cuMemcpyHtoAAsync_v2 "cuMemcpyHtoAAsync" 3020 Plain (a b c d e);
            Copies cuMemcpyHtoAAsync_v2_ptsz "cuMemcpyHtoAAsync" 7000 PerThread (a b c d e);
            Copies cuMemcpyHtoD "cuMemcpyHtoD" 2000 Plain (a b c);
            Copies cuMemcpyHtoD_v2 "cuMemcpyHtoD" 3020 Plain (a b c);
            Copies cuMemcpyHtoD_v2_ptds "cuMemcpyHtoD" 7000 PerThread (a b c);
            Copies cuMemcpyHtoDAsync "cuMemcpyHtoDAsync" 2000 Plain (a b c d);
            Copies cuMemcpyHtoDAsync_v2 "cuMemcpyHtoDAsync" 3020 Plain (a b c d);
            Copies cuMemcpyHtoDAsync_v2_ptsz "cuMemcpyHtoDAsync" 7000 PerThread (a b c d);
            Crosses cuMemcpyPeer "cuMemcpyPeer" 4000 Plain (a b c d e);
            Crosses cuMemcpyPeer_ptds "cuMemcpyPeer" 7000 PerThread (a b c d e);
            Crosses cuMemcpyPeerAsync "cuMemcpyPeerAsync" 4000 Plain (a b c d e f);
            Crosses cuMemcpyPeerAsync_ptsz "cuMemcpyPeerAsync" 7000 PerThread (a b c d e f);
            Copies cuMemcpyWithAttributesAsync "cuMemcpyWithAttributesAsync" 13020 Plain (a b c d e);
            Copies cuMemcpyWithAttributesAsync_ptsz "cuMemcpyWithAttributesAsync" 13020 PerThread (a b c d e);
            Writes cuMemsetD16 "cuMemsetD16" 2000 Plain (a b c);
            Writes cuMemsetD16_v2 "cuMemsetD16" 3020 Plain (a b c);
            Writes cuMemsetD16_v2_ptds "cuMemsetD16" 7000 PerThread (a b c);
            Writes cuMemsetD16Async "cuMemsetD16Async" 3020 Plain (a b c d);
            Writes cuMemsetD16Async_ptsz "cuMemsetD16Async" 7000 PerThread (a b c d);
            Writes cuMemsetD2D16 "cuMemsetD2D16" 2000 Plain (a b c d e);
            Writes cuMemsetD2D16_v2 "cuMemsetD2D16" 3020 Plain (a b c d e);
            Writes cuMemsetD2D16_v2_ptds "cuMemsetD2D16" 7000 PerThread (a b c d e);
            Writes cuMemsetD2D16Async "cuMemsetD2D16Async" 3020 Plain (a b c d e f);
            Writes cuMemsetD2D16Async_ptsz "cuMemsetD2D16Async" 7000 PerThread (a b c d e f);
            Writes cuMemsetD2D32 "cuMemsetD2D32" 2000 Plain (a b c d e);
            Writes cuMemsetD2D32_v2 "cuMemsetD2D32" 3020 Plain (a b c d e);
            Writes cuMemsetD2D32_v2_ptds "cuMemsetD2D32" 7000 PerThread (a b c d e);
            Writes cuMemsetD2D32Async "cuMemsetD2D32Async" 3020 Plain (a b c d e f);
            Writes cuMemsetD2D32Async_ptsz "cuMemsetD2D32Async" 7000 PerThread (a b c d e f);
            Writes cuMemsetD2D8 "cuMemsetD2D8" 2000 Plain (a b c d e);
            Writes cuMemsetD2D8_v2 "cuMemsetD2D8" 3020 Plain (a b c d e);
            Writes cuMemsetD2D8_v2_ptds "cuMemsetD2D8" 7000 PerThread (a b c d e);
            Writes cuMemsetD2D8Async "cuMemsetD2D8Async" 3020 Plain (a b c d e f);
            Writes cuMemsetD2D8Async_ptsz "cuMemsetD2D8Async" 7000 PerThread (a b c d e f);
            Writes cuMemsetD32 "cuMemsetD32" 2000 Plain (a b c);
            Writes cuMemsetD32_v2 "cuMemsetD32" 3020 Plain (a b c);
            Writes cuMemsetD32_v2_ptds "cuMemsetD32" 7000 PerThread (a b c);
            Writes cuMemsetD32Async "cuMemsetD32Async" 3020 Plain (a b c d);
            Writes cuMemsetD32Async_ptsz "cuMemsetD32Async" 7000 PerThread (a b c d);
            Writes cuMemsetD8 "cuMemsetD8" 2000 Plain (a b c);
            Writes cuMemsetD8_v2 "cuMemsetD8" 3020 Plain (a b c);
            Writes cuMemsetD8_v2_ptds "cuMemsetD8" 7000 PerThread (a b c);
            Writes cuMemsetD8Async "cuMemsetD8Async" 3020 Plain (a b c d);
            Writes cuMemsetD8Async_ptsz "cuMemsetD8Async" 7000 PerThread (a b c d);
            Writes cuStreamAttachMemAsync "cuStreamAttachMemAsync" 6000 Plain (a b c d);
            Writes cuStreamAttachMemAsync_ptsz "cuStreamAttachMemAsync" 7000 PerThread (a b c d);

            Signals cuSignalExternalSemaphoresAsync "cuSignalExternalSemaphoresAsync" 10000 Plain (a b c d);
            Signals cuSignalExternalSemaphoresAsync_ptsz "cuSignalExternalSemaphoresAsync" 10000 PerThread (a b c d);
            Signals cuStreamBatchMemOp "cuStreamBatchMemOp" 8000 Plain (a b c d);
            Signals cuStreamBatchMemOp_ptsz "cuStreamBatchMemOp" 8000 PerThread (a b c d);
            Signals cuStreamBatchMemOp_v2 "cuStreamBatchMemOp" 11070 Plain (a b c d);
            Signals cuStreamBatchMemOp_v2_ptsz "cuStreamBatchMemOp" 11070 PerThread (a b c d);
            Signals cuStreamWaitValue32 "cuStreamWaitValue32" 8000 Plain (a b c d);
            Signals cuStreamWaitValue32_ptsz "cuStreamWaitValue32" 8000 PerThread (a b c d);
            Signals cuStreamWaitValue32_v2 "cuStreamWaitValue32" 11070 Plain (a b c d);
            Signals cuStreamWaitValue32_v2_ptsz "cuStreamWaitValue32" 11070 PerThread (a b c d);
            Signals cuStreamWaitValue64 "cuStreamWaitValue64" 9000 Plain (a b c d);
            Signals cuStreamWaitValue64_ptsz "cuStreamWaitValue64" 9000 PerThread (a b c d);
            Signals cuStreamWaitValue64_v2 "cuStreamWaitValue64" 11070 Plain (a b c d);
            Signals cuStreamWaitValue64_v2_ptsz "cuStreamWaitValue64" 11070 PerThread (a b c d);
            Signals cuStreamWriteValue32 "cuStreamWriteValue32" 8000 Plain (a b c d);
            Signals cuStreamWriteValue32_ptsz "cuStreamWriteValue32" 8000 PerThread (a b c d);
            Signals cuStreamWriteValue32_v2 "cuStreamWriteValue32" 11070 Plain (a b c d);
            Signals cuStreamWriteValue32_v2_ptsz "cuStreamWriteValue32" 11070 PerThread (a b c d);
            Signals cuStreamWriteValue64 "cuStreamWriteValue64" 9000 Plain (a b c d);
            Signals cuStreamWriteValue64_ptsz "cuStreamWriteValue64" 9000 PerThread (a b c d);
            Signals cuStreamWriteValue64_v2 "cuStreamWriteValue64" 11070 Plain (a b c d);
            Signals cuStreamWriteValue64_v2_ptsz "cuStreamWriteValue64" 11070 PerThread (a b c d);
            Signals cuWaitExternalSemaphoresAsync "cuWaitExternalSemaphoresAsync" 10000 Plain (a b c d);
            Signals cuWaitExternalSemaphoresAsync_ptsz "cuWaitExternalSemaphoresAsync" 10000 PerThread (a b c d);

            Describes cuGraphAddBatchMemOpNode "cuGraphAddBatchMemOpNode" 11070 Plain (a b c d e);
            Describes cuGraphAddChildGraphNode "cuGraphAddChildGraphNode" 10000 Plain (a b c d e);
            Describes cuGraphAddKernelNode "cuGraphAddKernelNode" 10000 Plain (a b c d e);
            Describes cuGraphAddKernelNode_v2 "cuGraphAddKernelNode" 12000 Plain (a b c d e);
            Describes cuGraphAddMemAllocNode "cuGraphAddMemAllocNode" 11040 Plain (a b c d e);
            Describes cuGraphAddMemFreeNode "cuGraphAddMemFreeNode" 11040 Plain (a b c d e);
            Describes cuGraphAddMemcpyNode "cuGraphAddMemcpyNode" 10000 Plain (a b c d e f);
            Describes cuGraphAddMemsetNode "cuGraphAddMemsetNode" 10000 Plain (a b c d e f);
            Describes cuGraphAddNode "cuGraphAddNode" 12020 Plain (a b c d e);
            Describes cuGraphAddNode_v2 "cuGraphAddNode" 12030 Plain (a b c d e f);
            Describes cuGraphAddNode_v3 "cuGraphAddNode" 13040 Plain (a b c d e f);
            Describes cuGraphBatchMemOpNodeSetParams "cuGraphBatchMemOpNodeSetParams" 11070 Plain (a b);
            Describes cuGraphExecBatchMemOpNodeSetParams "cuGraphExecBatchMemOpNodeSetParams" 11070 Plain (a b c);
            Describes cuGraphExecChildGraphNodeSetParams "cuGraphExecChildGraphNodeSetParams" 11010 Plain (a b c);
            Describes cuGraphExecKernelNodeSetParams "cuGraphExecKernelNodeSetParams" 10010 Plain (a b c);
            Describes cuGraphExecKernelNodeSetParams_v2 "cuGraphExecKernelNodeSetParams" 12000 Plain (a b c);
            Describes cuGraphExecMemcpyNodeSetParams "cuGraphExecMemcpyNodeSetParams" 10020 Plain (a b c d);
            Describes cuGraphExecMemsetNodeSetParams "cuGraphExecMemsetNodeSetParams" 10020 Plain (a b c d);
            Describes cuGraphExecNodeSetParams "cuGraphExecNodeSetParams" 12020 Plain (a b c);
            Describes cuGraphExecUpdate "cuGraphExecUpdate" 10020 Plain (a b c d);
            Describes cuGraphExecUpdate_v2 "cuGraphExecUpdate" 12000 Plain (a b c);
            Describes cuGraphInstantiate "cuGraphInstantiate" 10000 Plain (a b c d e);
            Describes cuGraphInstantiate_v2 "cuGraphInstantiate" 11000 Plain (a b c d e);
            Describes cuGraphInstantiateWithFlags "cuGraphInstantiateWithFlags" 11040 Plain (a b c);
            Describes cuGraphKernelNodeSetParams "cuGraphKernelNodeSetParams" 10000 Plain (a b);
            Describes cuGraphKernelNodeSetParams_v2 "cuGraphKernelNodeSetParams" 12000 Plain (a b);
            Describes cuGraphMemcpyNodeSetParams "cuGraphMemcpyNodeSetParams" 10000 Plain (a b);
            Describes cuGraphMemsetNodeSetParams "cuGraphMemsetNodeSetParams" 10000 Plain (a b);
            Describes cuGraphNodeSetParams "cuGraphNodeSetParams" 12020 Plain (a b);
            Describes cuGraphNodeSetParams_v2 "cuGraphNodeSetParams" 13040 Plain (a b);

            Asks cuCtxWaitEvent "cuCtxWaitEvent" 12050 Plain (a b);
            Asks cuEventElapsedTime "cuEventElapsedTime" 2000 Plain (a b c);
            Asks cuEventElapsedTime_v2 "cuEventElapsedTime" 12080 Plain (a b c);
            Asks cuEventQuery "cuEventQuery" 2000 Plain (a);
            Asks cuGreenCtxWaitEvent "cuGreenCtxWaitEvent" 12040 Plain (a b);
            Asks cuStreamQuery "cuStreamQuery" 2000 Plain (a);
            Asks cuStreamQuery_ptsz "cuStreamQuery" 7000 PerThread (a);
            Asks cuStreamWaitEvent "cuStreamWaitEvent" 3020 Plain (a b c);
            Asks cuStreamWaitEvent_ptsz "cuStreamWaitEvent" 7000 PerThread (a b c);

            Loads cuFuncLoad "cuFuncLoad" 12040 Plain (a);
            Loads cuKernelGetFunction "cuKernelGetFunction" 12000 Plain (a b);
            Loads cuLibraryGetGlobal "cuLibraryGetGlobal" 12000 Plain (a b c d);
            Loads cuLibraryGetManaged "cuLibraryGetManaged" 12000 Plain (a b c d);
            Loads cuLibraryGetModule "cuLibraryGetModule" 12000 Plain (a b);
            Loads cuLibraryLoadData "cuLibraryLoadData" 12000 Plain (a b c d e f g h);
            Loads cuLibraryLoadFromFile "cuLibraryLoadFromFile" 12000 Plain (a b c d e f g h);
            Loads cuModuleGetFunction "cuModuleGetFunction" 2000 Plain (a b c);
            Loads cuModuleGetGlobal "cuModuleGetGlobal" 2000 Plain (a b c d);
            Loads cuModuleGetGlobal_v2 "cuModuleGetGlobal" 3020 Plain (a b c d);
            Loads cuModuleLoad "cuModuleLoad" 2000 Plain (a b);
            Loads cuModuleLoadData "cuModuleLoadData" 2000 Plain (a b);
            Loads cuModuleLoadDataEx "cuModuleLoadDataEx" 2010 Plain (a b c d e);
            Loads cuModuleLoadFatBinary "cuModuleLoadFatBinary" 2000 Plain (a b);
        }
    };
}
