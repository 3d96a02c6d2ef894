//! The table of exported functions. The exports themselves, `cuGetProcAddress`, fault injection, call counts and the checks
//! before each call are all generated from it.

use crate::abi::{
    AccessDesc, Address, AllocationProp, Handle, HostFunction, In, InstantiateParams, IpcHandle, Location, NvmlMemory, NvmlMemory2,
    NvmlPci, NvmlProcess, NvmlUtilization, Out, StreamCallback, Uuid,
};
use crate::codes::{self, Code, INVALID_VALUE, NOT_FOUND, NOT_SUPPORTED, Outcome};
use crate::copy::{self, Sides};
use crate::driver::settings;
use crate::pool::{PointerData, PoolProps};
use crate::shaped::{self, Copy2D, Copy3D, Reach, Until};
use crate::stream::{LEGACY, PER_THREAD, per_thread};
use crate::{array, capture, checkpoint, context, device, driver, graph, host, kernel, memory, nvml, pool, sharing, stream, vmm};
use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

/// What a function requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// Nothing: works before `cuInit` and in a forked child.
    Nothing,
    /// Like `Nothing`, but fails in a forked child of an initialised process: `cuInit` itself.
    Start,
    /// `cuInit`.
    Init,
    /// `cuInit` and devices with virtual memory management. No context is needed, and broken contexts do not matter.
    Vmm,
    /// `cuInit`. The call's arguments determine the context, but if the calling thread has a current context, it must not be
    /// destroyed or have a sticky error.
    Healthy,
    /// A current context in the calling thread, without a sticky error.
    Context,
}

/// How a call affects captures in progress. Calls on a stream check that themselves, because it depends on the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hazard {
    /// Nothing.
    Safe,
    /// Potentially unsafe: rejected by [`capture::Captures::refuse_unsafe_call`].
    CaptureUnsafe,
}

/// One exported function.
#[derive(Debug)]
pub struct Function {
    /// Symbol name.
    pub name: &'static str,
    /// Entry point.
    pub address: *const c_void,
    /// Requirements.
    pub needs: Needs,
    /// Effect on captures.
    pub hazard: Hazard,
}

// SAFETY: a function's address is the same for all threads.
unsafe impl Sync for Function {}

macro_rules! functions {
    ($($name:ident($($argument:ident: $kind:ty),* $(,)?) $needs:ident $hazard:ident => $body:expr;)*) => {
        $(
            /// See the documentation of the CUDA driver API and NVML.
            ///
            /// # Safety
            /// Pointers must be null or point to what the API requires.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($argument: $kind),*) -> Code {
                const INDEX: usize = Index::$name as usize;
                driver::call(INDEX, &TABLE[INDEX], || $body)
            }
        )*

        #[allow(non_camel_case_types, clippy::enum_variant_names)]
        #[repr(usize)]
        enum Index { $($name),* }

        /// Number of functions.
        pub const FUNCTIONS: usize = [$(stringify!($name)),*].len();

        /// All functions, by index.
        pub static TABLE: [Function; FUNCTIONS] = [$(Function {
            name: stringify!($name),
            address: $name as *const c_void,
            needs: Needs::$needs,
            hazard: Hazard::$hazard,
        }),*];
    };
}

functions! {
    // Initialisation, devices and contexts.
    cuInit(flags: u32) Start Safe => driver::init(flags);
    cuDriverGetVersion(version: Out<i32>) Nothing Safe => version.put(settings().cuda);
    cuDeviceGet(device: Out<i32>, ordinal: i32) Init Safe => device::get(device, ordinal);
    cuDeviceGetCount(count: Out<i32>) Init Safe => device::count(count);
    cuDeviceGetName(name: Out<c_char>, room: c_int, device: i32) Init Safe => device::name(name, room, device);
    cuDeviceGetUuid(uuid: Out<Uuid>, device: i32) Init Safe => device::uuid(uuid, device);
    cuDeviceGetUuid_v2(uuid: Out<Uuid>, device: i32) Init Safe => device::uuid(uuid, device);
    cuDeviceGetPCIBusId(text: Out<c_char>, room: c_int, device: i32) Init Safe => device::pci_bus_id(text, room, device);
    cuDeviceGetByPCIBusId(device: Out<i32>, text: In<c_char>) Init Safe => device::get_by_pci_bus_id(device, text);
    cuDeviceTotalMem_v2(bytes: Out<usize>, device: i32) Init Safe => device::total_memory(bytes, device);
    cuDeviceGetAttribute(value: Out<i32>, attribute: i32, device: i32) Init Safe => device::attribute(value, attribute, device);
    cuDeviceCanAccessPeer(answer: Out<i32>, device: i32, peer: i32) Init Safe => context::can_access_peer(answer, device, peer);
    cuDevicePrimaryCtxRetain(context: Out<Handle>, device: i32) Init Safe => context::retain_primary(context, device);
    cuDevicePrimaryCtxRelease(device: i32) Init Safe => context::release_primary(device);
    cuDevicePrimaryCtxRelease_v2(device: i32) Init Safe => context::release_primary(device);
    cuDevicePrimaryCtxReset(device: i32) Init Safe => context::reset_primary(device);
    cuDevicePrimaryCtxReset_v2(device: i32) Init Safe => context::reset_primary(device);
    cuDevicePrimaryCtxGetState(device: i32, flags: Out<u32>, active: Out<i32>) Init Safe => context::primary_state(device, flags, active);
    cuDevicePrimaryCtxSetFlags_v2(device: i32, flags: u32) Init Safe => context::primary_set_flags(device, flags);
    cuCtxCreate_v2(context: Out<Handle>, flags: u32, device: i32) Init Safe => context::create(context, flags, device);
    cuCtxCreate_v4(context: Out<Handle>, _params: *const c_void, flags: u32, device: i32) Init Safe => context::create(context, flags, device);
    cuCtxDestroy(context: Handle) Init Safe => context::destroy(context);
    cuCtxDetach(context: Handle) Init Safe => context::destroy(context);
    cuCtxDestroy_v2(context: Handle) Init Safe => context::destroy(context);
    cuGreenCtxCreate(green: Out<Handle>, _resources: *const c_void, device: i32, _flags: u32) Init Safe => context::create_green(green, device);
    cuGreenCtxDestroy(green: Handle) Init Safe => context::destroy_green(green);
    cuCtxFromGreenCtx(context: Out<Handle>, green: Handle) Init Safe => context::from_green(context, green);
    cuCtxGetCurrent(context: Out<Handle>) Init Safe => context::get_current(context);
    cuCtxSetCurrent(context: Handle) Init Safe => context::set_current(context);
    cuCtxPushCurrent_v2(context: Handle) Init Safe => context::push(context);
    cuCtxPopCurrent_v2(context: Out<Handle>) Init Safe => context::pop(context);
    cuCtxGetDevice(device: Out<i32>) Init Safe => context::get_device(device);
    cuCtxGetId(context: Handle, id: Out<u64>) Init Safe => context::get_id(context, id);
    cuCtxGetFlags(flags: Out<u32>) Context Safe => context::get_flags(flags);
    cuCtxGetApiVersion(context: Handle, version: Out<u32>) Init Safe => context::api_version(context, version);
    cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) Context Safe => context::priority_range(least, greatest);
    cuCtxSynchronize() Context Safe => context::synchronize();
    cuCtxRecordEvent(context: Handle, event: Handle) Init Safe => context::record_event(context, event);
    cuCtxEnablePeerAccess(peer: Handle, flags: u32) Context Safe => context::enable_peer(peer, flags);
    cuCtxDisablePeerAccess(peer: Handle) Context Safe => context::disable_peer(peer);

    // Virtual memory.
    cuMemGetAllocationGranularity(bytes: Out<usize>, prop: In<AllocationProp>, option: u32) Vmm Safe => vmm::granularity(bytes, prop, option);
    cuMemAddressReserve(pointer: Out<Address>, bytes: usize, alignment: usize, hint: Address, flags: u64) Vmm Safe => vmm::reserve(pointer, bytes, alignment, hint, flags);
    cuMemAddressFree(pointer: Address, bytes: usize) Vmm Safe => vmm::address_free(pointer, bytes);
    cuMemCreate(handle: Out<Handle>, bytes: usize, prop: In<AllocationProp>, flags: u64) Vmm Safe => vmm::create(handle, bytes, prop, flags);
    cuMemRelease(handle: Handle) Vmm Safe => vmm::release(handle);
    cuMemMap(pointer: Address, bytes: usize, offset: usize, handle: Handle, flags: u64) Vmm Safe => vmm::map(pointer, bytes, offset, handle, flags);
    cuMemUnmap(pointer: Address, bytes: usize) Vmm Safe => vmm::unmap(pointer, bytes);
    cuMemSetAccess(pointer: Address, bytes: usize, access: In<AccessDesc>, count: usize) Vmm Safe => vmm::set_access(pointer, bytes, access, count);
    cuMemGetAccess(flags: Out<u64>, location: In<Location>, pointer: Address) Vmm Safe => vmm::get_access(flags, location, pointer);
    cuMemRetainAllocationHandle(handle: Out<Handle>, pointer: Address) Vmm Safe => vmm::retain(handle, pointer);
    cuMemGetAllocationPropertiesFromHandle(prop: Out<AllocationProp>, handle: Handle) Vmm Safe => vmm::properties(prop, handle);
    cuMemExportToShareableHandle(shared: Out<c_int>, handle: Handle, kind: u32, flags: u64) Vmm Safe => sharing::export(shared, handle, kind, flags);
    cuMemImportFromShareableHandle(handle: Out<Handle>, shared: usize, kind: u32) Vmm Safe => sharing::import(handle, shared, kind);

    // Plain memory.
    cuMemGetAddressRange(_base: Out<u32>, _bytes: Out<u32>, _pointer: u32) Context Safe => Err(NOT_SUPPORTED);
    cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) Context Safe => device::memory_info(free, total);
    cuMemAlloc_v2(pointer: Out<Address>, bytes: usize) Context CaptureUnsafe => memory::allocate(pointer, bytes);
    cuMemAllocPitch_v2(pointer: Out<Address>, pitch: Out<usize>, width: usize, height: usize, element: u32) Context Safe =>
        memory::allocate_pitch(pointer, pitch, width, height, element);
    cuArrayCreate_v2(array: Out<Handle>, descriptor: In<array::Descriptor>) Context CaptureUnsafe => array::create(array, descriptor);
    cuArray3DCreate_v2(array: Out<Handle>, descriptor: In<array::Descriptor3D>) Context CaptureUnsafe => array::create_3d(array, descriptor);
    cuArrayDestroy(array: Handle) Healthy CaptureUnsafe => array::destroy(array);
    cuMipmappedArrayCreate(array: Out<Handle>, descriptor: In<array::Descriptor3D>, levels: u32) Context CaptureUnsafe => array::create_mipmapped(array, descriptor, levels);
    cuMipmappedArrayDestroy(array: Handle) Healthy CaptureUnsafe => array::destroy(array);
    cuMemAllocManaged(pointer: Out<Address>, bytes: usize, flags: u32) Context CaptureUnsafe => memory::allocate_managed(pointer, bytes, flags);
    cuMemFree_v2(pointer: Address) Healthy CaptureUnsafe => memory::free(pointer);
    cuMemAllocAsync(pointer: Out<Address>, bytes: usize, stream: Handle) Context CaptureUnsafe => memory::allocate_async(pointer, bytes, stream);
    cuMemAllocAsync_ptsz(pointer: Out<Address>, bytes: usize, stream: Handle) Context CaptureUnsafe => memory::allocate_async(pointer, bytes, per_thread(stream));
    cuMemAllocFromPoolAsync(pointer: Out<Address>, bytes: usize, pool: Handle, stream: Handle) Context CaptureUnsafe => memory::allocate_from_pool(pointer, bytes, pool, stream);
    cuMemAllocFromPoolAsync_ptsz(pointer: Out<Address>, bytes: usize, pool: Handle, stream: Handle) Context CaptureUnsafe =>
        memory::allocate_from_pool(pointer, bytes, pool, per_thread(stream));
    cuMemFreeAsync(pointer: Address, stream: Handle) Context Safe => memory::free_async(pointer, stream);
    cuMemFreeAsync_ptsz(pointer: Address, stream: Handle) Context Safe => memory::free_async(pointer, per_thread(stream));
    cuMemPoolCreate(pool: Out<Handle>, props: In<PoolProps>) Init CaptureUnsafe => pool::create(pool, props);
    cuMemPoolDestroy(pool: Handle) Init Safe => pool::destroy(pool);
    cuMemPoolTrimTo(pool: Handle, keep: usize) Init CaptureUnsafe => pool::trim(pool, keep);
    cuMemPoolSetAccess(pool: Handle, access: In<AccessDesc>, count: usize) Init Safe => pool::set_access(pool, access, count);
    cuMemPoolSetAttribute(pool: Handle, attribute: u32, value: *mut c_void) Init CaptureUnsafe => pool::set_attribute(pool, attribute, value);
    cuMemPoolGetAttribute(pool: Handle, attribute: u32, value: *mut c_void) Init CaptureUnsafe => pool::get_attribute(pool, attribute, value);
    cuMemPoolExportToShareableHandle(shared: Out<c_int>, pool: Handle, kind: u32, flags: u64) Init Safe => pool::export(shared, pool, kind, flags);
    cuMemPoolImportFromShareableHandle(pool: Out<Handle>, shared: usize, kind: u32, flags: u64) Init Safe => pool::import(pool, shared, kind, flags);
    cuMemPoolExportPointer(data: Out<PointerData>, pointer: Address) Init Safe => pool::export_pointer(data, pointer);
    cuMemPoolImportPointer(pointer: Out<Address>, pool: Handle, data: In<PointerData>) Context Safe => pool::import_pointer(pointer, pool, data);
    cuDeviceGetDefaultMemPool(pool: Out<Handle>, device: i32) Init Safe => pool::default(pool, device);
    cuDeviceGetMemPool(pool: Out<Handle>, device: i32) Init Safe => pool::default(pool, device);
    cuMemGetAddressRange_v2(base: Out<Address>, bytes: Out<usize>, pointer: Address) Context Safe => memory::address_range(base, bytes, pointer);
    cuPointerGetAttribute(data: *mut c_void, attribute: i32, pointer: Address) Init Safe => memory::pointer_attribute(data, attribute, pointer);
    cuPointerSetAttribute(value: In<u32>, attribute: i32, pointer: Address) Init CaptureUnsafe => memory::set_pointer_attribute(value, attribute, pointer);
    cuPointerGetAttributes(count: u32, attributes: In<i32>, data: In<*mut c_void>, pointer: Address) Init Safe => memory::pointer_attributes(count, attributes, data, pointer);
    cuMemGetHandleForAddressRange(shared: Out<c_int>, pointer: Address, bytes: usize, kind: u32, flags: u64) Init Safe =>
        sharing::range_handle(shared, pointer, bytes, kind, flags);
    cuIpcGetMemHandle(handle: Out<IpcHandle>, pointer: Address) Context Safe => sharing::get(handle, pointer);
    cuIpcOpenMemHandle(pointer: Out<Address>, handle: IpcHandle, flags: u32) Context Safe => sharing::open(pointer, handle, flags);
    cuIpcOpenMemHandle_v2(pointer: Out<Address>, handle: IpcHandle, flags: u32) Context Safe => sharing::open(pointer, handle, flags);
    cuIpcCloseMemHandle(pointer: Address) Context Safe => sharing::close(pointer);

    // Host memory.
    cuMemHostAlloc(pointer: Out<Address>, bytes: usize, flags: u32) Context CaptureUnsafe => host::allocate(pointer, bytes, flags);
    cuMemAllocHost_v2(pointer: Out<Address>, bytes: usize) Context CaptureUnsafe => host::allocate(pointer, bytes, 0);
    cuMemFreeHost(pointer: Address) Context CaptureUnsafe => host::free(pointer);
    cuMemHostRegister_v2(pointer: Address, bytes: usize, flags: u32) Context CaptureUnsafe => host::register(pointer, bytes, flags);
    cuMemHostUnregister(pointer: Address) Healthy CaptureUnsafe => host::unregister(pointer);
    cuMemHostGetDevicePointer_v2(pointer: Out<Address>, host: Address, flags: u32) Context Safe => host::device_pointer(pointer, host, flags);
    cuMemHostGetFlags(flags: Out<u32>, pointer: Address) Context Safe => host::get_flags(flags, pointer);

    // Copies and memsets.
    cuMemcpy(to: Address, from: Address, bytes: usize) Context Safe => copy::copy_and_wait(Sides::Any, to, from, bytes, LEGACY);
    cuMemcpy_ptds(to: Address, from: Address, bytes: usize) Context Safe => copy::copy_and_wait(Sides::Any, to, from, bytes, PER_THREAD);
    cuMemcpyAsync(to: Address, from: Address, bytes: usize, stream: Handle) Context Safe => copy::copy_async(Sides::Any, to, from, bytes, stream);
    cuMemcpyAsync_ptsz(to: Address, from: Address, bytes: usize, stream: Handle) Context Safe => copy::copy_async(Sides::Any, to, from, bytes, per_thread(stream));
    cuMemcpyHtoD_v2(to: Address, from: Address, bytes: usize) Context Safe => copy::copy_and_wait(Sides::Upload, to, from, bytes, LEGACY);
    cuMemcpyHtoD_v2_ptds(to: Address, from: Address, bytes: usize) Context Safe => copy::copy_and_wait(Sides::Upload, to, from, bytes, PER_THREAD);
    cuMemcpyHtoDAsync_v2(to: Address, from: Address, bytes: usize, stream: Handle) Context Safe => copy::copy_async(Sides::Upload, to, from, bytes, stream);
    cuMemcpyHtoDAsync_v2_ptsz(to: Address, from: Address, bytes: usize, stream: Handle) Context Safe => copy::copy_async(Sides::Upload, to, from, bytes, per_thread(stream));
    cuMemcpyDtoH_v2(to: Address, from: Address, bytes: usize) Context Safe => copy::copy_and_wait(Sides::Download, to, from, bytes, LEGACY);
    cuMemcpyDtoH_v2_ptds(to: Address, from: Address, bytes: usize) Context Safe => copy::copy_and_wait(Sides::Download, to, from, bytes, PER_THREAD);
    cuMemcpyDtoHAsync_v2(to: Address, from: Address, bytes: usize, stream: Handle) Context Safe => copy::copy_async(Sides::Download, to, from, bytes, stream);
    cuMemcpyDtoHAsync_v2_ptsz(to: Address, from: Address, bytes: usize, stream: Handle) Context Safe => copy::copy_async(Sides::Download, to, from, bytes, per_thread(stream));
    cuMemcpyDtoD_v2(to: Address, from: Address, bytes: usize) Context Safe => copy::copy_and_wait(Sides::Device, to, from, bytes, LEGACY);
    cuMemcpyDtoD_v2_ptds(to: Address, from: Address, bytes: usize) Context Safe => copy::copy_and_wait(Sides::Device, to, from, bytes, PER_THREAD);
    cuMemcpyDtoDAsync_v2(to: Address, from: Address, bytes: usize, stream: Handle) Context Safe => copy::copy_async(Sides::Device, to, from, bytes, stream);
    cuMemcpyDtoDAsync_v2_ptsz(to: Address, from: Address, bytes: usize, stream: Handle) Context Safe => copy::copy_async(Sides::Device, to, from, bytes, per_thread(stream));
    cuMemsetD8_v2(to: Address, value: u8, count: usize) Context Safe => copy::set_now(to, value.into(), 1, count, LEGACY);
    cuMemsetD8_v2_ptds(to: Address, value: u8, count: usize) Context Safe => copy::set_now(to, value.into(), 1, count, PER_THREAD);
    cuMemsetD8Async(to: Address, value: u8, count: usize, stream: Handle) Context Safe => copy::set(to, value.into(), 1, count, stream);
    cuMemsetD8Async_ptsz(to: Address, value: u8, count: usize, stream: Handle) Context Safe => copy::set(to, value.into(), 1, count, per_thread(stream));
    cuMemsetD16_v2(to: Address, value: u16, count: usize) Context Safe => copy::set_now(to, value.into(), 2, count, LEGACY);
    cuMemsetD16_v2_ptds(to: Address, value: u16, count: usize) Context Safe => copy::set_now(to, value.into(), 2, count, PER_THREAD);
    cuMemsetD16Async(to: Address, value: u16, count: usize, stream: Handle) Context Safe => copy::set(to, value.into(), 2, count, stream);
    cuMemsetD16Async_ptsz(to: Address, value: u16, count: usize, stream: Handle) Context Safe => copy::set(to, value.into(), 2, count, per_thread(stream));
    cuMemsetD32_v2(to: Address, value: u32, count: usize) Context Safe => copy::set_now(to, value, 4, count, LEGACY);
    cuMemsetD32_v2_ptds(to: Address, value: u32, count: usize) Context Safe => copy::set_now(to, value, 4, count, PER_THREAD);
    cuMemsetD32Async(to: Address, value: u32, count: usize, stream: Handle) Context Safe => copy::set(to, value, 4, count, stream);
    cuMemsetD32Async_ptsz(to: Address, value: u32, count: usize, stream: Handle) Context Safe => copy::set(to, value, 4, count, per_thread(stream));

    // Several rows, two contexts, batches.
    cuMemcpy2D_v2(copy: In<Copy2D>) Context Safe => shaped::copy_2d(copy, Until::Done, LEGACY);
    cuMemcpy2D_v2_ptds(copy: In<Copy2D>) Context Safe => shaped::copy_2d(copy, Until::Done, PER_THREAD);
    cuMemcpy2DUnaligned_v2(copy: In<Copy2D>) Context Safe => shaped::copy_2d(copy, Until::Done, LEGACY);
    cuMemcpy2DUnaligned_v2_ptds(copy: In<Copy2D>) Context Safe => shaped::copy_2d(copy, Until::Done, PER_THREAD);
    cuMemcpy3D_v2(copy: In<Copy3D>) Context Safe => shaped::copy_3d(copy, Reach::Current, Until::Done, LEGACY);
    cuMemcpy3D_v2_ptds(copy: In<Copy3D>) Context Safe => shaped::copy_3d(copy, Reach::Current, Until::Done, PER_THREAD);
    cuMemcpy3DPeer(copy: In<Copy3D>) Context Safe => shaped::copy_3d(copy, Reach::Contexts, Until::Done, LEGACY);
    cuMemcpy3DPeer_ptds(copy: In<Copy3D>) Context Safe => shaped::copy_3d(copy, Reach::Contexts, Until::Done, PER_THREAD);
    cuMemcpy2DAsync_v2(copy: In<Copy2D>, stream: Handle) Context Safe => shaped::copy_2d(copy, Until::Queued, stream);
    cuMemcpy2DAsync_v2_ptsz(copy: In<Copy2D>, stream: Handle) Context Safe => shaped::copy_2d(copy, Until::Queued, per_thread(stream));
    cuMemcpy3DAsync_v2(copy: In<Copy3D>, stream: Handle) Context Safe => shaped::copy_3d(copy, Reach::Current, Until::Queued, stream);
    cuMemcpy3DAsync_v2_ptsz(copy: In<Copy3D>, stream: Handle) Context Safe => shaped::copy_3d(copy, Reach::Current, Until::Queued, per_thread(stream));
    cuMemcpy3DPeerAsync(copy: In<Copy3D>, stream: Handle) Context Safe => shaped::copy_3d(copy, Reach::Contexts, Until::Queued, stream);
    cuMemcpy3DPeerAsync_ptsz(copy: In<Copy3D>, stream: Handle) Context Safe => shaped::copy_3d(copy, Reach::Contexts, Until::Queued, per_thread(stream));
    cuMemcpyPeer(to: Address, to_context: Handle, from: Address, from_context: Handle, bytes: usize) Context Safe =>
        shaped::copy_between(to, to_context, from, from_context, bytes, Until::Done, LEGACY);
    cuMemcpyPeer_ptds(to: Address, to_context: Handle, from: Address, from_context: Handle, bytes: usize) Context Safe =>
        shaped::copy_between(to, to_context, from, from_context, bytes, Until::Done, PER_THREAD);
    cuMemcpyPeerAsync(to: Address, to_context: Handle, from: Address, from_context: Handle, bytes: usize, stream: Handle) Context Safe =>
        shaped::copy_between(to, to_context, from, from_context, bytes, Until::Queued, stream);
    cuMemcpyBatchAsync(to: In<Address>, from: In<Address>, bytes: In<usize>, count: usize, _attributes: *const c_void, _first: In<usize>,
        attribute_count: usize, _failed: Out<usize>, stream: Handle) Context Safe =>
        shaped::batch(to, from, bytes, count, attribute_count, stream);
    cuMemcpyBatchAsync_v2(to: In<Address>, from: In<Address>, bytes: In<usize>, count: usize, _attributes: *const c_void, _first: In<usize>,
        attribute_count: usize, stream: Handle) Context Safe =>
        shaped::batch(to, from, bytes, count, attribute_count, stream);
    cuMemcpyPeerAsync_ptsz(to: Address, to_context: Handle, from: Address, from_context: Handle, bytes: usize, stream: Handle) Context Safe =>
        shaped::copy_between(to, to_context, from, from_context, bytes, Until::Queued, per_thread(stream));
    cuMemcpyBatchAsync_ptsz(to: In<Address>, from: In<Address>, bytes: In<usize>, count: usize, _attributes: *const c_void, _first: In<usize>,
        attribute_count: usize, _failed: Out<usize>, stream: Handle) Context Safe =>
        shaped::batch(to, from, bytes, count, attribute_count, per_thread(stream));
    cuMemcpyBatchAsync_v2_ptsz(to: In<Address>, from: In<Address>, bytes: In<usize>, count: usize, _attributes: *const c_void, _first: In<usize>,
        attribute_count: usize, stream: Handle) Context Safe =>
        shaped::batch(to, from, bytes, count, attribute_count, per_thread(stream));
    cuMemsetD2D8_v2(to: Address, pitch: usize, value: u8, width: usize, height: usize) Context Safe => shaped::set_2d_now(to, pitch, value.into(), 1, width, height, LEGACY);
    cuMemsetD2D8_v2_ptds(to: Address, pitch: usize, value: u8, width: usize, height: usize) Context Safe =>
        shaped::set_2d_now(to, pitch, value.into(), 1, width, height, PER_THREAD);
    cuMemsetD2D8Async(to: Address, pitch: usize, value: u8, width: usize, height: usize, stream: Handle) Context Safe =>
        shaped::set_2d(to, pitch, value.into(), 1, width, height, stream);
    cuMemsetD2D8Async_ptsz(to: Address, pitch: usize, value: u8, width: usize, height: usize, stream: Handle) Context Safe =>
        shaped::set_2d(to, pitch, value.into(), 1, width, height, per_thread(stream));
    cuMemsetD2D16_v2(to: Address, pitch: usize, value: u16, width: usize, height: usize) Context Safe => shaped::set_2d_now(to, pitch, value.into(), 2, width, height, LEGACY);
    cuMemsetD2D16_v2_ptds(to: Address, pitch: usize, value: u16, width: usize, height: usize) Context Safe =>
        shaped::set_2d_now(to, pitch, value.into(), 2, width, height, PER_THREAD);
    cuMemsetD2D16Async(to: Address, pitch: usize, value: u16, width: usize, height: usize, stream: Handle) Context Safe =>
        shaped::set_2d(to, pitch, value.into(), 2, width, height, stream);
    cuMemsetD2D16Async_ptsz(to: Address, pitch: usize, value: u16, width: usize, height: usize, stream: Handle) Context Safe =>
        shaped::set_2d(to, pitch, value.into(), 2, width, height, per_thread(stream));
    cuMemsetD2D32_v2(to: Address, pitch: usize, value: u32, width: usize, height: usize) Context Safe => shaped::set_2d_now(to, pitch, value, 4, width, height, LEGACY);
    cuMemsetD2D32_v2_ptds(to: Address, pitch: usize, value: u32, width: usize, height: usize) Context Safe => shaped::set_2d_now(to, pitch, value, 4, width, height, PER_THREAD);
    cuMemsetD2D32Async(to: Address, pitch: usize, value: u32, width: usize, height: usize, stream: Handle) Context Safe =>
        shaped::set_2d(to, pitch, value, 4, width, height, stream);
    cuMemsetD2D32Async_ptsz(to: Address, pitch: usize, value: u32, width: usize, height: usize, stream: Handle) Context Safe =>
        shaped::set_2d(to, pitch, value, 4, width, height, per_thread(stream));

    // Streams and events.
    cuStreamCreate(stream: Out<Handle>, flags: u32) Context Safe => stream::create(stream, flags);
    cuStreamCreateWithPriority(stream: Out<Handle>, flags: u32, priority: i32) Context Safe => stream::create_with_priority(stream, flags, priority);
    cuStreamDestroy_v2(stream: Handle) Healthy Safe => stream::destroy(stream);
    cuStreamSynchronize(stream: Handle) Healthy Safe => stream::synchronize(stream);
    cuStreamSynchronize_ptsz(stream: Handle) Healthy Safe => stream::synchronize(per_thread(stream));
    cuStreamQuery(stream: Handle) Healthy Safe => stream::query(stream);
    cuStreamQuery_ptsz(stream: Handle) Healthy Safe => stream::query(per_thread(stream));
    cuStreamWaitEvent(stream: Handle, event: Handle, flags: u32) Context Safe => stream::wait_event(stream, event, flags);
    cuStreamWaitEvent_ptsz(stream: Handle, event: Handle, flags: u32) Context Safe => stream::wait_event(per_thread(stream), event, flags);
    cuStreamGetCtx(stream: Handle, context: Out<Handle>) Healthy Safe => stream::get_context(stream, context);
    cuStreamGetCtx_v2(stream: Handle, context: Out<Handle>, green: Out<Handle>) Healthy Safe => stream::get_contexts(stream, context, green);
    cuStreamGetCtx_ptsz(stream: Handle, context: Out<Handle>) Healthy Safe => stream::get_context(per_thread(stream), context);
    cuStreamGetId(stream: Handle, id: Out<u64>) Healthy Safe => stream::get_id(stream, id);
    cuStreamGetId_ptsz(stream: Handle, id: Out<u64>) Healthy Safe => stream::get_id(per_thread(stream), id);
    cuStreamGetDevice(stream: Handle, device: Out<i32>) Context Safe => stream::get_device(stream, device);
    cuStreamGetDevice_ptsz(stream: Handle, device: Out<i32>) Context Safe => stream::get_device(per_thread(stream), device);
    cuStreamGetFlags(stream: Handle, flags: Out<u32>) Context Safe => stream::get_flags(stream, flags);
    cuStreamGetFlags_ptsz(stream: Handle, flags: Out<u32>) Context Safe => stream::get_flags(per_thread(stream), flags);
    cuStreamGetPriority(stream: Handle, priority: Out<i32>) Context Safe => stream::get_priority(stream, priority);
    cuStreamGetPriority_ptsz(stream: Handle, priority: Out<i32>) Context Safe => stream::get_priority(per_thread(stream), priority);
    cuStreamWriteValue32_v2(stream: Handle, address: Address, value: u32, _flags: u32) Context Safe => copy::set(address, value, 4, 1, stream);
    cuStreamWriteValue32_v2_ptsz(stream: Handle, address: Address, value: u32, _flags: u32) Context Safe => copy::set(address, value, 4, 1, per_thread(stream));
    cuStreamWaitValue32_v2(stream: Handle, address: Address, value: u32, flags: u32) Context Safe => stream::wait_value(stream, address, value.into(), 4, flags);
    cuStreamWaitValue32_v2_ptsz(stream: Handle, address: Address, value: u32, flags: u32) Context Safe => stream::wait_value(per_thread(stream), address, value.into(), 4, flags);
    cuStreamWaitValue64_v2(stream: Handle, address: Address, value: u64, flags: u32) Context Safe => stream::wait_value(stream, address, value, 8, flags);
    cuStreamWaitValue64_v2_ptsz(stream: Handle, address: Address, value: u64, flags: u32) Context Safe => stream::wait_value(per_thread(stream), address, value, 8, flags);
    cuLaunchHostFunc(stream: Handle, function: HostFunction, data: *mut c_void) Context Safe => stream::launch_host_function(stream, function, data);
    cuLaunchHostFunc_ptsz(stream: Handle, function: HostFunction, data: *mut c_void) Context Safe => stream::launch_host_function(per_thread(stream), function, data);
    cuStreamAddCallback(stream: Handle, function: StreamCallback, data: *mut c_void, flags: u32) Context Safe => stream::add_callback(stream, function, data, flags);
    cuStreamAddCallback_ptsz(stream: Handle, function: StreamCallback, data: *mut c_void, flags: u32) Context Safe =>
        stream::add_callback(per_thread(stream), function, data, flags);
    cuEventCreate(event: Out<Handle>, flags: u32) Context Safe => stream::create_event(event, flags);
    cuEventDestroy_v2(event: Handle) Context Safe => stream::destroy_event(event);
    cuEventRecord(event: Handle, stream: Handle) Context Safe => stream::record_event(event, stream);
    cuEventRecord_ptsz(event: Handle, stream: Handle) Context Safe => stream::record_event(event, per_thread(stream));
    cuEventRecordWithFlags(event: Handle, stream: Handle, _flags: u32) Context Safe => stream::record_event(event, stream);
    cuEventRecordWithFlags_ptsz(event: Handle, stream: Handle, _flags: u32) Context Safe => stream::record_event(event, per_thread(stream));
    cuEventQuery(event: Handle) Healthy CaptureUnsafe => stream::query_event(event);
    cuEventSynchronize(event: Handle) Healthy CaptureUnsafe => stream::synchronize_event(event);
    cuEventElapsedTime(milliseconds: Out<f32>, start: Handle, end: Handle) Context Safe => stream::elapsed(milliseconds, start, end);
    cuEventElapsedTime_v2(milliseconds: Out<f32>, start: Handle, end: Handle) Context Safe => stream::elapsed(milliseconds, start, end);

    // Capture and graphs.
    cuStreamBeginCapture_v2(stream: Handle, mode: u32) Context Safe => capture::begin(stream, mode);
    cuStreamBeginCapture_v2_ptsz(stream: Handle, mode: u32) Context Safe => capture::begin(per_thread(stream), mode);
    cuStreamEndCapture(stream: Handle, graph: Out<Handle>) Context Safe => capture::end(stream, graph);
    cuStreamEndCapture_ptsz(stream: Handle, graph: Out<Handle>) Context Safe => capture::end(per_thread(stream), graph);
    cuStreamIsCapturing(stream: Handle, answer: Out<u32>) Healthy Safe => capture::is_capturing(stream, answer);
    cuStreamIsCapturing_ptsz(stream: Handle, answer: Out<u32>) Healthy Safe => capture::is_capturing(per_thread(stream), answer);
    cuStreamGetCaptureInfo(stream: Handle, answer: Out<u32>, id: Out<u64>) Context Safe => capture::info(stream, answer, id, nothing(), nothing(), nothing());
    cuStreamGetCaptureInfo_ptsz(stream: Handle, answer: Out<u32>, id: Out<u64>) Context Safe => capture::info(per_thread(stream), answer, id, nothing(), nothing(), nothing());
    cuStreamGetCaptureInfo_v2(stream: Handle, answer: Out<u32>, id: Out<u64>, graph: Out<Handle>, dependencies: Out<*const Handle>, count: Out<usize>) Context Safe =>
        capture::info(stream, answer, id, graph, dependencies, count);
    cuStreamGetCaptureInfo_v2_ptsz(stream: Handle, answer: Out<u32>, id: Out<u64>, graph: Out<Handle>, dependencies: Out<*const Handle>, count: Out<usize>) Context Safe =>
        capture::info(per_thread(stream), answer, id, graph, dependencies, count);
    cuStreamGetCaptureInfo_v3(stream: Handle, answer: Out<u32>, id: Out<u64>, graph: Out<Handle>, dependencies: Out<*const Handle>,
        edges: Out<*const c_void>, count: Out<usize>) Context Safe =>
        { edges.put_if_given(std::ptr::null()); capture::info(stream, answer, id, graph, dependencies, count) };
    cuStreamGetCaptureInfo_v3_ptsz(stream: Handle, answer: Out<u32>, id: Out<u64>, graph: Out<Handle>, dependencies: Out<*const Handle>,
        edges: Out<*const c_void>, count: Out<usize>) Context Safe =>
        { edges.put_if_given(std::ptr::null()); capture::info(per_thread(stream), answer, id, graph, dependencies, count) };
    cuThreadExchangeStreamCaptureMode(mode: Out<u32>) Init Safe => capture::exchange_mode(mode);
    cuGraphCreate(graph: Out<Handle>, flags: u32) Init Safe => graph::create(graph, flags);
    cuGraphDestroy(graph: Handle) Init Safe => graph::destroy(graph);
    cuGraphAddMemcpyNode(node: Out<Handle>, graph: Handle, _after: In<Handle>, _after_count: usize, copy: In<Copy3D>, context: Handle) Init Safe =>
        shaped::add_copy(node, graph, copy, context);
    cuGraphGetNodes(graph: Handle, nodes: Out<Handle>, count: Out<usize>) Init Safe => graph::nodes(graph, nodes, count);
    cuGraphInstantiate_v2(executable: Out<Handle>, graph: Handle, _node: *mut c_void, _log: *mut c_char, _room: usize) Context Safe => graph::instantiate(executable, graph);
    cuGraphInstantiateWithFlags(executable: Out<Handle>, graph: Handle, _flags: u64) Context Safe => graph::instantiate(executable, graph);
    cuGraphInstantiateWithParams(executable: Out<Handle>, graph: Handle, params: Out<InstantiateParams>) Context Safe =>
        graph::instantiate_with(executable, graph, params, |stream| stream);
    cuGraphInstantiateWithParams_ptsz(executable: Out<Handle>, graph: Handle, params: Out<InstantiateParams>) Context Safe =>
        graph::instantiate_with(executable, graph, params, per_thread);
    cuGraphExecDestroy(executable: Handle) Init Safe => graph::destroy_executable(executable);
    cuGraphLaunch(executable: Handle, stream: Handle) Context Safe => graph::launch(executable, stream);
    cuGraphLaunch_ptsz(executable: Handle, stream: Handle) Context Safe => graph::launch(executable, per_thread(stream));
    cuGraphUpload(executable: Handle, stream: Handle) Context Safe => graph::upload(executable, stream);
    cuGraphUpload_ptsz(executable: Handle, stream: Handle) Context Safe => graph::upload(executable, per_thread(stream));

    // Modules and launches.
    cuModuleLoadData(module: Out<Handle>, image: In<c_char>) Context Safe => kernel::load(module, image);
    cuLinkCreate_v2(_options: u32, _kinds: *const u32, _values: *const c_void, linker: Out<Handle>) Context Safe => kernel::create_linker(linker);
    cuLinkAddData_v2(linker: Handle, kind: u32, data: In<c_char>, _bytes: usize, _name: In<c_char>, _options: u32, _kinds: *const u32, _values: *const c_void) Context Safe =>
        kernel::add_to_linker(linker, kind, data);
    cuLinkComplete(linker: Handle, image: Out<*const c_char>, bytes: Out<usize>) Context Safe => kernel::link(linker, image, bytes);
    cuLinkDestroy(linker: Handle) Init Safe => kernel::destroy_linker(linker);
    cuModuleUnload(module: Handle) Context CaptureUnsafe => kernel::unload(module);
    cuModuleGetFunction(function: Out<Handle>, module: Handle, name: In<c_char>) Context Safe => kernel::get_function(function, module, name);
    cuLaunchKernel(function: Handle, blocks_x: u32, blocks_y: u32, blocks_z: u32, threads_x: u32, threads_y: u32, threads_z: u32, _shared: u32,
        stream: Handle, arguments: In<*const c_void>, extra: usize) Context Safe =>
        kernel::launch(function, [blocks_x, blocks_y, blocks_z], [threads_x, threads_y, threads_z], stream, arguments, extra);
    cuLaunchKernel_ptsz(function: Handle, blocks_x: u32, blocks_y: u32, blocks_z: u32, threads_x: u32, threads_y: u32, threads_z: u32, _shared: u32,
        stream: Handle, arguments: In<*const c_void>, extra: usize) Context Safe =>
        kernel::launch(function, [blocks_x, blocks_y, blocks_z], [threads_x, threads_y, threads_z], per_thread(stream), arguments, extra);

    // Checkpoints of other processes.
    cuCheckpointProcessGetState(pid: i32, state: Out<u32>) Init Safe => checkpoint::state(pid, state);
    cuCheckpointProcessGetRestoreThreadId(pid: i32, thread: Out<i32>) Init Safe => checkpoint::restore_thread(pid, thread);
    cuCheckpointProcessLock(pid: i32, args: In<checkpoint::LockArgs>) Init Safe => checkpoint::lock(pid, args);
    cuCheckpointProcessCheckpoint(pid: i32, args: In<checkpoint::NoArgs>) Init Safe => checkpoint::checkpoint(pid, args);
    cuCheckpointProcessRestore(pid: i32, args: In<checkpoint::RestoreArgs>) Init Safe => checkpoint::restore(pid, args);
    cuCheckpointProcessUnlock(pid: i32, args: In<checkpoint::NoArgs>) Init Safe => checkpoint::unlock(pid, args);

    // Error names.
    cuGetErrorName(code: Code, text: Out<*const c_char>) Nothing Safe => error_text(code, text, |(name, _)| name);
    cuGetErrorString(code: Code, text: Out<*const c_char>) Nothing Safe => error_text(code, text, |(_, description)| description);
    cuGetProcAddress(name: In<c_char>, pointer: Out<*const c_void>, version: i32, flags: u64) Nothing Safe => proc_address_before(name, pointer, version, flags);
    cuGetProcAddress_v2(name: In<c_char>, pointer: Out<*const c_void>, version: i32, flags: u64, status: Out<u32>) Nothing Safe =>
        proc_address(name, pointer, version, flags, status);
    cuGetExportTable(_table: Out<*const c_void>, _id: *const c_void) Nothing Safe => Err(NOT_FOUND);

    // NVML.
    nvmlInit_v2() Nothing Safe => nvml::init();
    nvmlInitWithFlags(_flags: u32) Nothing Safe => nvml::init();
    nvmlShutdown() Nothing Safe => nvml::shutdown();
    nvmlDeviceGetCount_v2(count: Out<u32>) Nothing Safe => nvml::count(count);
    nvmlDeviceGetHandleByIndex_v2(index: u32, device: Out<nvml::Device>) Nothing Safe => nvml::by_index(index, device);
    nvmlDeviceGetHandleByPciBusId_v2(text: In<c_char>, device: Out<nvml::Device>) Nothing Safe => nvml::by_pci_bus_id(text, device);
    nvmlDeviceGetHandleByUUID(text: In<c_char>, device: Out<nvml::Device>) Nothing Safe => nvml::by_uuid(text, device);
    nvmlDeviceGetUUID(device: nvml::Device, text: Out<c_char>, room: u32) Nothing Safe => nvml::uuid(device, text, room);
    nvmlDeviceGetName(device: nvml::Device, text: Out<c_char>, room: u32) Nothing Safe => nvml::name(device, text, room);
    nvmlDeviceGetPciInfo_v3(device: nvml::Device, info: Out<NvmlPci>) Nothing Safe => nvml::pci(device, info);
    nvmlDeviceGetMemoryInfo(device: nvml::Device, memory: Out<NvmlMemory>) Nothing Safe => nvml::memory(device, memory);
    nvmlDeviceGetMemoryInfo_v2(device: nvml::Device, memory: Out<NvmlMemory2>) Nothing Safe => nvml::memory_v2(device, memory);
    nvmlDeviceGetTemperature(device: nvml::Device, sensor: u32, celsius: Out<u32>) Nothing Safe => nvml::temperature(device, sensor, celsius);
    nvmlDeviceGetPowerUsage(device: nvml::Device, milliwatts: Out<u32>) Nothing Safe => nvml::power(device, milliwatts);
    nvmlDeviceGetUtilizationRates(device: nvml::Device, rates: Out<NvmlUtilization>) Nothing Safe => nvml::utilization(device, rates);
    nvmlDeviceGetMigMode(device: nvml::Device, now: Out<u32>, after_a_reset: Out<u32>) Nothing Safe => nvml::mig_mode(device, now, after_a_reset);
    nvmlDeviceGetComputeRunningProcesses_v3(device: nvml::Device, count: Out<u32>, processes: Out<NvmlProcess>) Nothing Safe => nvml::processes(device, count, processes);
}

/// NVML's names for its codes. The only function that does not return a code.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(code: u32) -> *const c_char {
    nvml::describe(code).as_ptr()
}

/// Stands in for an output that an older version of a call lacks.
fn nothing<T>() -> Out<T> {
    Out::none()
}

fn error_text(
    code: Code,
    text: Out<*const c_char>,
    which: fn((&'static std::ffi::CStr, &'static std::ffi::CStr)) -> &'static std::ffi::CStr,
) -> Outcome {
    if let Some(texts) = codes::describe(code) {
        text.put(which(texts).as_ptr())
    } else {
        text.put(std::ptr::null())?;
        Err(INVALID_VALUE)
    }
}

/// A function's index in the table, by its exact name or else by its name without a version suffix.
pub fn index_of(name: &str) -> Option<usize> {
    exact(name).or_else(|| newest(name, i32::MAX, false).ok())
}

fn exact(name: &str) -> Option<usize> {
    TABLE.iter().position(|function| function.name == name)
}

/// The variants of each function: name for `cuGetProcAddress`, CUDA version, flavour, number of arguments, symbol, releases.
const VARIANTS: &str = include_str!("../../data/driver-functions.txt");

/// The version of CUDA whose driver first had a function. Of NVML's, 0.
pub fn since(index: usize) -> i32 {
    static SINCE: OnceLock<[i32; FUNCTIONS]> = OnceLock::new();
    SINCE.get_or_init(|| {
        let mut since = [0; FUNCTIONS];
        for line in VARIANTS.lines().filter(|line| !line.starts_with('#')) {
            let words: Vec<_> = line.split(' ').collect();
            if let (Some(version), Some(index)) =
                (words.get(1).and_then(|word| word.parse().ok()), words.get(4).and_then(|name| exact(name)))
            {
                since[index] = version;
            }
        }
        since
    })[index]
}

/// Why `cuGetProcAddress` finds nothing (`CUdriverProcAddressQueryResult`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum Missing {
    /// There is no such function.
    Unknown = 1,
    /// It came with a later version.
    Later = 2,
}

/// The newest variant of a function for a program built with this CUDA version, a negative one for no limit.
fn newest(name: &str, version: i32, per_thread: bool) -> Result<usize, Missing> {
    let limit = if version < 0 { i32::MAX } else { version };
    // Since CUDA 12 the plain name refers to what was called "WithFlags" before.
    if name == "cuGraphInstantiate" && limit >= 12000 {
        return exact("cuGraphInstantiateWithFlags").ok_or(Missing::Unknown);
    }
    let variants = VARIANTS.lines().filter_map(|line| {
        let mut words = line.split(' ');
        (words.next() == Some(name)).then_some(())?;
        let since: i32 = words.next()?.parse().ok()?;
        let of_thread = matches!(words.next()?, "ptsz" | "ptds");
        Some((since, of_thread, exact(words.nth(1)?)?))
    });
    let known: Vec<_> = variants.filter(|(_, of_thread, _)| per_thread || !of_thread).collect();
    // Of the same version, the one for per-thread default streams is wanted if it is there at all.
    let newest = known.iter().filter(|(since, ..)| *since <= limit).max_by_key(|(since, of_thread, _)| (*since, *of_thread));
    newest.map(|(.., index)| *index).ok_or(if known.is_empty() { Missing::Unknown } else { Missing::Later })
}

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const PER_THREAD_DEFAULT_STREAM: u64 = 2;

/// `cuGetProcAddress_v2`: takes names without a version suffix. If it finds nothing, it succeeds, and the status says why.
fn proc_address(name: In<c_char>, pointer: Out<*const c_void>, version: i32, flags: u64, status: Out<u32>) -> Outcome {
    let found = asked_for(name, pointer, version, flags)?;
    status.put_if_given(found.err().map_or(0, |missing| missing as u32));
    pointer.put(found.map_or(std::ptr::null(), |index| TABLE[index].address))
}

/// `cuGetProcAddress` before CUDA 12: if it finds nothing, it fails and leaves the pointer alone.
fn proc_address_before(name: In<c_char>, pointer: Out<*const c_void>, version: i32, flags: u64) -> Outcome {
    let found = asked_for(name, pointer, version, flags)?.map_err(|_| NOT_FOUND)?;
    pointer.put(TABLE[found].address)
}

fn asked_for(name: In<c_char>, pointer: Out<*const c_void>, version: i32, flags: u64) -> Outcome<Result<usize, Missing>> {
    let name = name.text()?;
    pointer.required()?;
    if flags & !3 != 0 || version > settings().cuda {
        return Err(INVALID_VALUE);
    }
    let version = if version < 0 { settings().cuda } else { version };
    Ok(newest(name, version, flags & PER_THREAD_DEFAULT_STREAM != 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(name: &str, version: i32, per_thread: bool) -> Option<&'static str> {
        newest(name, version, per_thread).ok().map(|index| TABLE[index].name)
    }

    #[test]
    fn names_resolve_to_the_newest_version_that_the_program_knows() {
        assert_eq!(resolved("cuMemAlloc", 13000, false), Some("cuMemAlloc_v2"));
        assert_eq!(resolved("cuMemcpyAsync", 13000, true), Some("cuMemcpyAsync_ptsz"));
        assert_eq!(resolved("cuMemcpyHtoD", 13000, true), Some("cuMemcpyHtoD_v2_ptds"));
        assert_eq!(resolved("cuGetProcAddress", 11080, false), Some("cuGetProcAddress"));
        assert_eq!(resolved("cuGetProcAddress", 12000, false), Some("cuGetProcAddress_v2"));
        assert_eq!(resolved("cuGraphInstantiate", 11080, false), Some("cuGraphInstantiate_v2"));
        assert_eq!(resolved("cuGraphInstantiate", 12000, false), Some("cuGraphInstantiateWithFlags"));
        assert_eq!(resolved("cuMemGetAddressRange", 3010, false), Some("cuMemGetAddressRange"));
        assert_eq!(resolved("cuMemGetAddressRange", 3020, false), Some("cuMemGetAddressRange_v2"));
        assert_eq!(resolved("cuMemAlloc", -1, false), Some("cuMemAlloc_v2"));
        assert_eq!(newest("cuMemAllocAsync", 11010, false), Err(Missing::Later));
        assert_eq!(newest("cuNoSuchThing", 13000, false), Err(Missing::Unknown));
        assert_eq!(newest("cuMemAlloc_v2", 13000, false), Err(Missing::Unknown));
        assert_eq!(newest("nvmlInit_v2", 13000, false), Err(Missing::Unknown));
    }

    #[test]
    fn no_name_is_twice_in_the_table() {
        let mut names: Vec<_> = TABLE.iter().map(|function| function.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), FUNCTIONS);
    }
}
