//! The handlers of the hooked functions. Invalid arguments are left for the real function to reject.

use crate::copies;
use crate::real::{self, originals};
use crate::table::{CudaError, CudaExtent, CudaPitchedPtr, CudaStream};
use std::ffi::{c_int, c_uint, c_void};
use std::ptr;
use vramctl_backup as backup;
use vramctl_config::Config;
use vramctl_core::memory::{Memory, region};
use vramctl_core::server;
use vramctl_driver::Current;
use vramctl_host::log_once;
use vramctl_model::{Error, code};

pub unsafe fn malloc(pointer: *mut *mut c_void, bytes: usize) -> CudaError {
    // SAFETY: here and below, the program promises that a non-null pointer is writable, and the real function gets the
    // arguments unchanged.
    unsafe { provide(pointer, bytes, Place::Thread, || originals::cudaMalloc(pointer, bytes)) }
}

pub unsafe fn malloc_async(pointer: *mut *mut c_void, bytes: usize, stream: CudaStream) -> CudaError {
    // SAFETY: as in `malloc`.
    unsafe { provide(pointer, bytes, Place::Stream(stream), || originals::cudaMallocAsync(pointer, bytes, stream)) }
}

pub unsafe fn malloc_async_ptsz(pointer: *mut *mut c_void, bytes: usize, stream: CudaStream) -> CudaError {
    // SAFETY: as in `malloc`.
    unsafe {
        provide(pointer, bytes, Place::Stream(stream.of_per_thread_program()), || originals::cudaMallocAsync_ptsz(pointer, bytes, stream))
    }
}

pub unsafe fn malloc_from_pool_async(pointer: *mut *mut c_void, bytes: usize, pool: *mut c_void, stream: CudaStream) -> CudaError {
    // SAFETY: as in `malloc`.
    unsafe { provide(pointer, bytes, Place::Pool(pool, stream), || originals::cudaMallocFromPoolAsync(pointer, bytes, pool, stream)) }
}

pub unsafe fn malloc_from_pool_async_ptsz(pointer: *mut *mut c_void, bytes: usize, pool: *mut c_void, stream: CudaStream) -> CudaError {
    // SAFETY: as in `malloc`.
    unsafe {
        let place = Place::Pool(pool, stream.of_per_thread_program());
        provide(pointer, bytes, place, || originals::cudaMallocFromPoolAsync_ptsz(pointer, bytes, pool, stream))
    }
}

pub unsafe fn malloc_pitch(pointer: *mut *mut c_void, pitch: *mut usize, width: usize, height: usize) -> CudaError {
    // SAFETY: as in `malloc`.
    unsafe {
        let real = || originals::cudaMallocPitch(pointer, pitch, width, height);
        if pointer.is_null() || pitch.is_null() {
            return real();
        }
        let Some((row, bytes)) = rows(width, height, 1) else { return real() };
        let mut managed = ptr::null_mut();
        let answer = provide(&raw mut managed, bytes, Place::Thread, real);
        if !managed.is_null() {
            *pitch = row;
            pointer.write(managed);
        }
        answer
    }
}

pub unsafe fn malloc_3d(pitched: *mut CudaPitchedPtr, extent: CudaExtent) -> CudaError {
    // SAFETY: as in `malloc`.
    unsafe {
        let real = || originals::cudaMalloc3D(pitched, extent);
        if pitched.is_null() {
            return real();
        }
        let Some((pitch, bytes)) = rows(extent.width, extent.height, extent.depth) else { return real() };
        let mut managed = ptr::null_mut();
        let answer = provide(&raw mut managed, bytes, Place::Thread, real);
        if !managed.is_null() {
            *pitched = CudaPitchedPtr { pointer: managed, pitch, xsize: extent.width, ysize: extent.height };
        }
        answer
    }
}

/// The pitch and the total size, as the real function computes them: rows begin at multiples of 512 bytes. `None` on overflow,
/// for the real function to reject.
fn rows(width: usize, height: usize, depth: usize) -> Option<(usize, usize)> {
    let pitch = width.checked_next_multiple_of(512)?;
    Some((pitch, pitch.checked_mul(height)?.checked_mul(depth)?))
}

pub unsafe fn free(pointer: *mut c_void) -> CudaError {
    // SAFETY: the arguments are passed on unchanged.
    release(pointer).unwrap_or_else(|| unsafe { originals::cudaFree(pointer) })
}

pub unsafe fn free_async(pointer: *mut c_void, stream: CudaStream) -> CudaError {
    // SAFETY: the arguments are passed on unchanged.
    release_async(pointer, stream).unwrap_or_else(|| unsafe { originals::cudaFreeAsync(pointer, stream) })
}

pub unsafe fn free_async_ptsz(pointer: *mut c_void, stream: CudaStream) -> CudaError {
    // SAFETY: the arguments are passed on unchanged.
    release_async(pointer, stream.of_per_thread_program()).unwrap_or_else(|| unsafe { originals::cudaFreeAsync_ptsz(pointer, stream) })
}

pub unsafe fn device_reset() -> CudaError {
    if let Some(memory) = Memory::existing()
        && let Some(device) = real::current_device()
    {
        memory.forget_device(device);
    }
    // SAFETY: no arguments.
    unsafe { originals::cudaDeviceReset() }
}

pub unsafe fn enable_peer_access(peer: c_int, flags: c_uint) -> CudaError {
    // SAFETY: the arguments are passed on unchanged.
    let answer = unsafe { originals::cudaDeviceEnablePeerAccess(peer, flags) };
    if !matches!(answer, code::SUCCESS | code::PEER_ACCESS_ALREADY_ENABLED) {
        return answer;
    }
    let opened = real::current_context().map(|current| Memory::get().enable_peer(&current, peer));
    match opened {
        Ok(Err(error)) => {
            log::warn!("cannot enable peer access to managed memory of device {peer}: {error}");
            error.cuda_code()
        }
        _ => answer,
    }
}

pub unsafe fn disable_peer_access(peer: c_int) -> CudaError {
    if let (Some(memory), Some(device)) = (Memory::existing(), real::current_device()) {
        memory.disable_peer(device, peer);
    }
    // SAFETY: the arguments are passed on unchanged.
    unsafe { originals::cudaDeviceDisablePeerAccess(peer) }
}

pub unsafe fn ipc_get_mem_handle(handle: *mut c_void, pointer: *mut c_void) -> CudaError {
    // SAFETY: the arguments are passed on unchanged.
    let answer = unsafe { originals::cudaIpcGetMemHandle(handle, pointer) };
    if answer != code::SUCCESS
        && let Some(allocation) = Memory::existing().and_then(|memory| memory.find(pointer as u64))
    {
        log_once!(
            log::Level::Warn,
            "cudaIpcGetMemHandle cannot share the managed memory at {pointer:p} (tag {}): CUDA IPC supports only memory from the real \
                 cudaMalloc. Allocate shared memory in a region without a tag (vramctl_region_begin(NULL, 0)), or start the program \
                 with `vramctl run --no-tag` so that only regions are managed",
            allocation.tag
        );
    }
    answer
}

/// Allocates on a device for torch's pluggable allocator, as the hooked `cudaMalloc` does. Null if out of memory: torch then
/// frees its cached blocks and retries.
pub fn torch_malloc(bytes: usize, device: c_int) -> *mut c_void {
    let before = real::current_device();
    if before != Some(device) && !real::set_device(device) {
        log::error!("cannot allocate on device {device}: it does not exist, or no CUDA runtime is loaded");
        return ptr::null_mut();
    }
    let mut pointer = ptr::null_mut();
    // SAFETY: `pointer` is writable.
    let answer = unsafe {
        if copies::another_is_first() { originals::cudaMalloc(&raw mut pointer, bytes) } else { malloc(&raw mut pointer, bytes) }
    };
    if let Some(before) = before.filter(|before| *before != device) {
        real::set_device(before);
    }
    if answer == code::SUCCESS { pointer } else { ptr::null_mut() }
}

/// Frees memory of [`torch_malloc`].
///
/// # Safety
/// `pointer` must come from there and must not have been freed.
pub unsafe fn torch_free(pointer: *mut c_void) {
    // SAFETY: the caller's promise.
    let answer = unsafe { if copies::another_is_first() { originals::cudaFree(pointer) } else { free(pointer) } };
    // At exit the runtime may shut down before torch's pools; everything is freed then anyway.
    if !matches!(answer, code::SUCCESS | code::DEINITIALIZED) {
        log::error!("cannot free the memory at {pointer:p} (CUDA error {answer})");
    }
}

/// Where to allocate.
#[derive(Clone, Copy)]
enum Place {
    /// On the calling thread's device.
    Thread,
    /// On a stream's device.
    Stream(CudaStream),
    /// From a pool, in stream order.
    Pool(*mut c_void, CudaStream),
}

/// Allocates managed memory if the calling thread's allocations are managed, else calls the real function.
unsafe fn provide(pointer: *mut *mut c_void, bytes: usize, place: Place, real: impl FnOnce() -> CudaError) -> CudaError {
    if pointer.is_null() || bytes < Config::get().min_bytes.max(1) {
        return real();
    }
    match allocate(bytes, place) {
        None => {
            free_up(bytes);
            real()
        }
        Some(Ok(address)) => {
            // SAFETY: not null, and writable by the caller's promise.
            unsafe { pointer.write(address) };
            code::SUCCESS
        }
        Some(Err(error)) => {
            if error == code::OUT_OF_MEMORY {
                // Like the real function: a null pointer, and the error for `cudaGetLastError`.
                // SAFETY: as above.
                unsafe { pointer.write(ptr::null_mut()) };
                real::leave_out_of_memory_as_last_error();
            }
            error
        }
    }
}

/// Allocates managed memory; `None` if the real function must allocate.
fn allocate(bytes: usize, place: Place) -> Option<Result<*mut c_void, CudaError>> {
    let policy = region::current()?;
    let current = match place {
        // An allocation during capture becomes part of the graph, which only the driver can do.
        Place::Stream(stream) | Place::Pool(_, stream) if stream.is_capturing() => return None,
        Place::Stream(stream) | Place::Pool(_, stream) => context_of(stream),
        Place::Thread => real::current_context(),
    };
    let current = match current {
        Ok(current) => current,
        Err(error) => return Some(Err(error)),
    };
    // A pool of the program's own has a purpose: another device, host memory, sharing with other processes.
    if matches!(place, Place::Pool(pool, _) if real::default_pool(current.device()) != Some(pool)) {
        return None;
    }
    let tag = policy.tag.clone();
    match Memory::get().allocate(policy, bytes, &current) {
        Ok(address) => {
            server::ensure_running();
            backup::get_ready(&current, &tag);
            Some(Ok(address as *mut c_void))
        }
        Err(Error::Unsupported) => {
            log_once!(log::Level::Warn, "{}; its allocations are left to CUDA and cannot be paused", Error::Unsupported);
            None
        }
        Err(error) => {
            log::debug!("cannot allocate {bytes} bytes: {error}");
            Some(Err(error.cuda_code()))
        }
    }
}

/// Makes room for the real function by releasing memory whose stream-ordered free is still pending.
fn free_up(bytes: usize) {
    if let Some(memory) = Memory::existing()
        && let Ok(Some(current)) = Current::of_thread()
    {
        memory.free_up(current.device(), bytes);
    }
}

/// A stream's context. A default stream belongs to the thread's current context, or to the one that the runtime would create.
fn context_of(stream: CudaStream) -> Result<Current, CudaError> {
    if stream.is_default() { real::current_context() } else { Current::push_of_stream(stream).map_err(|failure| failure.code) }
}

/// Frees managed memory; `None` if the real function must free it.
fn release(pointer: *mut c_void) -> Option<CudaError> {
    let memory = Memory::existing()?;
    memory.release_freed();
    let freed = memory.free(pointer as u64)?;
    Some(freed.map_or_else(
        |error| {
            log::debug!("cudaFree({pointer:p}): {error}");
            error.cuda_code()
        },
        |()| code::SUCCESS,
    ))
}

/// Frees managed memory in stream order; `None` if the real function must free it.
fn release_async(pointer: *mut c_void, stream: CudaStream) -> Option<CudaError> {
    let memory = Memory::existing()?;
    // A free during capture becomes part of the graph, which only the real function can do or reject.
    if !memory.manages(pointer as u64) || stream.is_capturing() {
        return None;
    }
    let current = match context_of(stream) {
        Ok(current) => current,
        Err(error) => return Some(error),
    };
    let freed = memory.free_in_order(pointer as u64, &current, stream)?;
    Some(freed.map_or_else(
        |failure| {
            log::debug!("cudaFreeAsync({pointer:p}): {failure}");
            failure.code
        },
        |()| code::SUCCESS,
    ))
}
