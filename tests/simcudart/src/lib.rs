//! A stand-in for `libcudart` over the simulated driver, with the runtime's ABI of CUDA 13.
//!
//! Like the real runtime it is a thin layer. It finds the driver at first use (`driver`), makes a device's primary context
//! current on threads that have none (`device`), keeps each thread's last error (`errors`), and forwards everything
//! (`memory`, and the table below). It contains nothing specific to simulation and would work on a real `libcuda.so.1`.

#![allow(non_snake_case)]

mod device;
mod driver;
mod errors;
mod memory;

use crate::driver::{Address, Handle, IpcHandle};
use crate::errors::{Code, Outcome};
use device::ready;
use memory::{Extent, Order, PitchedPointer, PointerAttributes};
use std::ffi::{CStr, c_char, c_int, c_void};

/// Converts a driver call's code to an outcome.
fn done(code: Code) -> Outcome {
    if code == 0 { Ok(()) } else { Err(code) }
}

macro_rules! runtime {
    ($($name:ident($($argument:ident: $kind:ty),* $(,)?) => $body:expr;)*) => {$(
        /// See the documentation of the CUDA runtime API.
        ///
        /// # Safety
        /// Pointers must be null or point to what the API requires.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $kind),*) -> Code {
            #[allow(unused_unsafe)]
            // SAFETY: the caller's promise.
            errors::keep(|| unsafe { $body })
        }
    )*};
}

runtime! {
    // Versions and devices.
    cudaRuntimeGetVersion(version: *mut c_int) => memory::store(version, driver::VERSION);
    cudaDriverGetVersion(version: *mut c_int) => done((driver::get()?.cuDriverGetVersion)(version));
    cudaGetDeviceCount(count: *mut c_int) => done((driver::get()?.cuDeviceGetCount)(count));
    cudaSetDevice(ordinal: c_int) => device::set(ordinal);
    cudaGetDevice(ordinal: *mut c_int) => memory::store(ordinal, device::get()?);
    cudaDeviceSynchronize() => done((ready()?.cuCtxSynchronize)());
    cudaDeviceReset() => device::reset();
    cudaDeviceGetAttribute(value: *mut c_int, attribute: c_int, ordinal: c_int) => done((driver::get()?.cuDeviceGetAttribute)(value, attribute, ordinal));
    cudaDeviceCanAccessPeer(answer: *mut c_int, ordinal: c_int, peer: c_int) => done((driver::get()?.cuDeviceCanAccessPeer)(answer, ordinal, peer));
    cudaDeviceEnablePeerAccess(peer: c_int, flags: u32) => device::enable_peer(peer, flags);
    cudaDeviceDisablePeerAccess(peer: c_int) => device::disable_peer(peer);
    cudaDeviceGetDefaultMemPool(pool: *mut Handle, ordinal: c_int) => done((driver::get()?.cuDeviceGetDefaultMemPool)(pool, ordinal));
    cudaMemPoolSetAttribute(pool: Handle, attribute: c_int, value: *mut c_void) => done((driver::get()?.cuMemPoolSetAttribute)(pool, attribute, value));
    cudaMemPoolTrimTo(pool: Handle, keep: usize) => done((driver::get()?.cuMemPoolTrimTo)(pool, keep));
    cudaGetDriverEntryPoint(name: *const c_char, pointer: *mut *mut c_void, flags: u64, status: *mut u32) => device::entry_point(name, pointer, driver::VERSION, flags, status);
    cudaGetDriverEntryPointByVersion(name: *const c_char, pointer: *mut *mut c_void, version: u32, flags: u64, status: *mut u32) =>
        device::entry_point(name, pointer, version as c_int, flags, status);

    // Memory.
    cudaMemGetInfo(free: *mut usize, total: *mut usize) => done((ready()?.cuMemGetInfo)(free, total));
    cudaMalloc(pointer: *mut Address, bytes: usize) => memory::allocate(pointer, bytes);
    cudaFree(pointer: Address) => memory::free(pointer);
    cudaMallocAsync(pointer: *mut Address, bytes: usize, stream: Handle) => memory::unless_empty(pointer, bytes, |driver| (driver.cuMemAllocAsync)(pointer, bytes, stream));
    cudaMallocAsync_ptsz(pointer: *mut Address, bytes: usize, stream: Handle) =>
        memory::unless_empty(pointer, bytes, |driver| (driver.cuMemAllocAsync_ptsz)(pointer, bytes, stream));
    cudaMallocFromPoolAsync(pointer: *mut Address, bytes: usize, pool: Handle, stream: Handle) =>
        memory::unless_empty(pointer, bytes, |driver| (driver.cuMemAllocFromPoolAsync)(pointer, bytes, pool, stream));
    cudaMallocFromPoolAsync_ptsz(pointer: *mut Address, bytes: usize, pool: Handle, stream: Handle) =>
        memory::unless_empty(pointer, bytes, |driver| (driver.cuMemAllocFromPoolAsync_ptsz)(pointer, bytes, pool, stream));
    cudaFreeAsync(pointer: Address, stream: Handle) => { let driver = ready()?; if pointer == 0 { Ok(()) } else { done((driver.cuMemFreeAsync)(pointer, stream)) } };
    cudaFreeAsync_ptsz(pointer: Address, stream: Handle) => { let driver = ready()?; if pointer == 0 { Ok(()) } else { done((driver.cuMemFreeAsync_ptsz)(pointer, stream)) } };
    cudaMemPoolCreate(pool: *mut Handle, props: *const c_void) => done((driver::get()?.cuMemPoolCreate)(pool, props));
    cudaMemPoolDestroy(pool: Handle) => done((driver::get()?.cuMemPoolDestroy)(pool));
    cudaMemPoolSetAccess(pool: Handle, access: *const c_void, count: usize) => done((driver::get()?.cuMemPoolSetAccess)(pool, access, count));
    cudaMallocPitch(pointer: *mut Address, pitch: *mut usize, width: usize, height: usize) => memory::allocate_pitch(pointer, pitch, width, height);
    cudaMalloc3D(pointer: *mut PitchedPointer, extent: Extent) => memory::allocate_3d(pointer, extent);
    cudaMallocManaged(pointer: *mut Address, bytes: usize, flags: u32) => memory::unless_empty(pointer, bytes, |driver| (driver.cuMemAllocManaged)(pointer, bytes, flags));
    cudaMallocHost(pointer: *mut Address, bytes: usize) => memory::unless_empty(pointer, bytes, |driver| (driver.cuMemHostAlloc)(pointer, bytes, 0));
    cudaHostAlloc(pointer: *mut Address, bytes: usize, flags: u32) => memory::unless_empty(pointer, bytes, |driver| (driver.cuMemHostAlloc)(pointer, bytes, flags));
    cudaFreeHost(pointer: Address) => { let driver = ready()?; if pointer == 0 { Ok(()) } else { done((driver.cuMemFreeHost)(pointer)) } };
    cudaHostRegister(pointer: Address, bytes: usize, flags: u32) => done((ready()?.cuMemHostRegister)(pointer, bytes, flags));
    cudaHostUnregister(pointer: Address) => done((ready()?.cuMemHostUnregister)(pointer));
    cudaHostGetDevicePointer(pointer: *mut Address, host: Address, flags: u32) => done((ready()?.cuMemHostGetDevicePointer)(pointer, host, flags));
    cudaPointerGetAttributes(attributes: *mut PointerAttributes, pointer: Address) => memory::attributes(attributes, pointer);
    cudaIpcGetMemHandle(handle: *mut c_void, pointer: Address) => done((ready()?.cuIpcGetMemHandle)(handle, pointer));
    cudaIpcOpenMemHandle(pointer: *mut Address, handle: IpcHandle, flags: u32) => done((ready()?.cuIpcOpenMemHandle)(pointer, handle, flags));
    cudaIpcCloseMemHandle(pointer: Address) => done((ready()?.cuIpcCloseMemHandle)(pointer));
    cudaMemcpy(to: Address, from: Address, bytes: usize, kind: c_int) => memory::copy(to, from, bytes, kind, Order::Now);
    cudaMemcpyAsync(to: Address, from: Address, bytes: usize, kind: c_int, stream: Handle) => memory::copy(to, from, bytes, kind, Order::Stream(stream));
    cudaMemcpyAsync_ptsz(to: Address, from: Address, bytes: usize, kind: c_int, stream: Handle) => memory::copy(to, from, bytes, kind, Order::ThreadStream(stream));
    cudaMemset(to: Address, value: c_int, bytes: usize) => done((ready()?.cuMemsetD8)(to, value as u8, bytes));
    cudaMemsetAsync(to: Address, value: c_int, bytes: usize, stream: Handle) => done((ready()?.cuMemsetD8Async)(to, value as u8, bytes, stream));
    cudaMemsetAsync_ptsz(to: Address, value: c_int, bytes: usize, stream: Handle) => done((ready()?.cuMemsetD8Async_ptsz)(to, value as u8, bytes, stream));

    // Streams and events.
    cudaStreamCreate(stream: *mut Handle) => done((ready()?.cuStreamCreateWithPriority)(stream, 0, 0));
    cudaStreamCreateWithFlags(stream: *mut Handle, flags: u32) => done((ready()?.cuStreamCreateWithPriority)(stream, flags, 0));
    cudaStreamCreateWithPriority(stream: *mut Handle, flags: u32, priority: c_int) => done((ready()?.cuStreamCreateWithPriority)(stream, flags, priority));
    cudaStreamDestroy(stream: Handle) => done((ready()?.cuStreamDestroy)(stream));
    cudaStreamSynchronize(stream: Handle) => done((ready()?.cuStreamSynchronize)(stream));
    cudaStreamQuery(stream: Handle) => done((ready()?.cuStreamQuery)(stream));
    cudaStreamWaitEvent(stream: Handle, event: Handle, flags: u32) => done((ready()?.cuStreamWaitEvent)(stream, event, flags));
    cudaLaunchHostFunc(stream: Handle, function: *mut c_void, data: *mut c_void) => done((ready()?.cuLaunchHostFunc)(stream, function, data));
    cudaEventCreate(event: *mut Handle) => done((ready()?.cuEventCreate)(event, 0));
    cudaEventCreateWithFlags(event: *mut Handle, flags: u32) => done((ready()?.cuEventCreate)(event, flags));
    cudaEventDestroy(event: Handle) => done((ready()?.cuEventDestroy)(event));
    cudaEventRecord(event: Handle, stream: Handle) => done((ready()?.cuEventRecord)(event, stream));
    cudaEventQuery(event: Handle) => done((ready()?.cuEventQuery)(event));
    cudaEventSynchronize(event: Handle) => done((ready()?.cuEventSynchronize)(event));
    cudaEventElapsedTime(milliseconds: *mut f32, start: Handle, end: Handle) => done((ready()?.cuEventElapsedTime)(milliseconds, start, end));

    // Capture and graphs.
    cudaStreamBeginCapture(stream: Handle, mode: u32) => done((ready()?.cuStreamBeginCapture)(stream, mode));
    cudaStreamEndCapture(stream: Handle, graph: *mut Handle) => done((ready()?.cuStreamEndCapture)(stream, graph));
    cudaStreamIsCapturing(stream: Handle, answer: *mut u32) => done((ready()?.cuStreamIsCapturing)(stream, answer));
    cudaStreamGetCaptureInfo(stream: Handle, answer: *mut u32, id: *mut u64, graph: *mut Handle, dependencies: *mut *const Handle, edges: *mut *const c_void, count: *mut usize) =>
        done((ready()?.cuStreamGetCaptureInfo)(stream, answer, id, graph, dependencies, edges, count));
    cudaStreamGetCaptureInfo_v2(stream: Handle, answer: *mut u32, id: *mut u64, graph: *mut Handle, dependencies: *mut *const Handle, count: *mut usize) =>
        done((ready()?.cuStreamGetCaptureInfo)(stream, answer, id, graph, dependencies, std::ptr::null_mut(), count));
    cudaThreadExchangeStreamCaptureMode(mode: *mut u32) => done((driver::get()?.cuThreadExchangeStreamCaptureMode)(mode));
    cudaGraphInstantiate(executable: *mut Handle, graph: Handle, flags: u64) => done((ready()?.cuGraphInstantiate)(executable, graph, flags));
    cudaGraphInstantiateWithFlags(executable: *mut Handle, graph: Handle, flags: u64) => done((ready()?.cuGraphInstantiate)(executable, graph, flags));
    cudaGraphLaunch(executable: Handle, stream: Handle) => done((ready()?.cuGraphLaunch)(executable, stream));
    cudaGraphDestroy(graph: Handle) => done((ready()?.cuGraphDestroy)(graph));
    cudaGraphExecDestroy(executable: Handle) => done((ready()?.cuGraphExecDestroy)(executable));
    cudaGraphGetNodes(graph: Handle, nodes: *mut Handle, count: *mut usize) => done((ready()?.cuGraphGetNodes)(graph, nodes, count));
}

/// Returns and clears the calling thread's last failure.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGetLastError() -> Code {
    errors::take()
}

/// The calling thread's last failure.
#[unsafe(no_mangle)]
pub extern "C" fn cudaPeekAtLastError() -> Code {
    errors::peek()
}

/// A code's name.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorName(code: Code) -> *const c_char {
    errors::name(code).as_ptr()
}

/// A code's description, from the driver if it has one.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorString(code: Code) -> *const c_char {
    let mut text: *const c_char = std::ptr::null();
    if let Some(own) = errors::own_description(code) {
        return own.as_ptr();
    }
    if let Ok(driver) = driver::get() {
        // SAFETY: the driver stores a pointer to a constant.
        unsafe { (driver.cuGetErrorString)(code, &raw mut text) };
    }
    if text.is_null() {
        let unknown: &CStr = c"unrecognized error code";
        return unknown.as_ptr();
    }
    text
}
