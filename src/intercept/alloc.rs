//! Memory that the program asks CUDA to place: `cudaMalloc`, `cuMemAlloc`, and what they free.
//!
//! A request is managed by the first of our functions that it passes. What that one leaves to CUDA passes through the driver's
//! functions later ([`leave`]): they leave it alone, too.

use crate::driver_originals;
use crate::exclude;
use std::cell::Cell;
use std::ffi::{c_uint, c_void};
use std::ptr;
use vramctl_backup as backup;
use vramctl_config::Config;
use vramctl_core::memory::{Memory, Placement, region};
use vramctl_core::server;
use vramctl_driver::{self as driver, CUdeviceptr, Current, StreamHandle};
use vramctl_host::log_once;
use vramctl_model::{Error, StatusCode, code};

/// The functions through which a request came.
pub trait Door {
    /// The context in which a call without a stream allocates on this thread; `None` if the real function is to answer that
    /// there is none.
    fn current_context(&self) -> Result<Option<Current>, StatusCode>;

    /// What a call leaves behind when memory is short, beside its answer.
    fn out_of_memory(&self, pointer: *mut *mut c_void);
}

/// Calls of the driver's functions.
struct DriverDoor;

impl Door for DriverDoor {
    fn current_context(&self) -> Result<Option<Current>, StatusCode> {
        Current::of_thread().map_err(|failure| failure.code)
    }

    fn out_of_memory(&self, _: *mut *mut c_void) {}
}

pub unsafe fn mem_alloc(pointer: *mut CUdeviceptr, bytes: usize, caller: *const c_void) -> StatusCode {
    // SAFETY: here and below, the program promises that a non-null pointer is writable, and the real function gets the
    // arguments unchanged.
    unsafe { provide_to(caller, pointer.cast(), bytes, Source::Thread, || driver_originals::cuMemAlloc_v2(pointer, bytes)) }
}

pub unsafe fn mem_alloc_pitch(
    pointer: *mut CUdeviceptr,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: c_uint,
    caller: *const c_void,
) -> StatusCode {
    // SAFETY: as in `mem_alloc`.
    unsafe {
        let real = || driver_originals::cuMemAllocPitch_v2(pointer, pitch, width, height, element);
        if pointer.is_null() || pitch.is_null() || !matches!(element, 4 | 8 | 16) {
            return real();
        }
        let Some((row, bytes)) = rows(width, height, 1) else { return real() };
        let mut managed = ptr::null_mut();
        let answer = provide_to(caller, &raw mut managed, bytes, Source::Thread, real);
        if !managed.is_null() {
            *pitch = row;
            pointer.write(managed as CUdeviceptr);
        }
        answer
    }
}

pub unsafe fn mem_alloc_async(pointer: *mut CUdeviceptr, bytes: usize, stream: StreamHandle, caller: *const c_void) -> StatusCode {
    // SAFETY: as in `mem_alloc`.
    unsafe {
        let real = || driver_originals::cuMemAllocAsync(pointer, bytes, stream);
        provide_to(caller, pointer.cast(), bytes, Source::Stream(stream), real)
    }
}

pub unsafe fn mem_alloc_async_ptsz(pointer: *mut CUdeviceptr, bytes: usize, stream: StreamHandle, caller: *const c_void) -> StatusCode {
    // SAFETY: as in `mem_alloc`.
    unsafe {
        let real = || driver_originals::cuMemAllocAsync_ptsz(pointer, bytes, stream);
        provide_to(caller, pointer.cast(), bytes, Source::Stream(stream.of_per_thread_program()), real)
    }
}

pub unsafe fn mem_alloc_from_pool_async(
    pointer: *mut CUdeviceptr,
    bytes: usize,
    pool: *mut c_void,
    stream: StreamHandle,
    caller: *const c_void,
) -> StatusCode {
    // SAFETY: as in `mem_alloc`.
    unsafe {
        let real = || driver_originals::cuMemAllocFromPoolAsync(pointer, bytes, pool, stream);
        provide_to(caller, pointer.cast(), bytes, Source::Pool(pool, stream), real)
    }
}

pub unsafe fn mem_alloc_from_pool_async_ptsz(
    pointer: *mut CUdeviceptr,
    bytes: usize,
    pool: *mut c_void,
    stream: StreamHandle,
    caller: *const c_void,
) -> StatusCode {
    // SAFETY: as in `mem_alloc`.
    unsafe {
        let real = || driver_originals::cuMemAllocFromPoolAsync_ptsz(pointer, bytes, pool, stream);
        provide_to(caller, pointer.cast(), bytes, Source::Pool(pool, stream.of_per_thread_program()), real)
    }
}

pub unsafe fn mem_free(pointer: CUdeviceptr) -> StatusCode {
    // SAFETY: the arguments are passed on unchanged.
    release(pointer).unwrap_or_else(|| unsafe { driver_originals::cuMemFree_v2(pointer) })
}

pub unsafe fn mem_free_async(pointer: CUdeviceptr, stream: StreamHandle) -> StatusCode {
    // SAFETY: the arguments are passed on unchanged.
    release_async(&DriverDoor, pointer, stream).unwrap_or_else(|| unsafe { driver_originals::cuMemFreeAsync(pointer, stream) })
}

pub unsafe fn mem_free_async_ptsz(pointer: CUdeviceptr, stream: StreamHandle) -> StatusCode {
    let real = || {
        // SAFETY: the arguments are passed on unchanged.
        unsafe { driver_originals::cuMemFreeAsync_ptsz(pointer, stream) }
    };
    release_async(&DriverDoor, pointer, stream.of_per_thread_program()).unwrap_or_else(real)
}

/// Where to allocate.
#[derive(Clone, Copy)]
pub enum Source {
    /// On the calling thread's device.
    Thread,
    /// On a stream's device.
    Stream(StreamHandle),
    /// From a pool, in stream order.
    Pool(*mut c_void, StreamHandle),
}

thread_local! {
    /// Whether the thread's calls now answer a request that has been left to CUDA already.
    static LEFT: Cell<bool> = const { Cell::new(false) };
}

/// Leaves a request to the real function, whose own calls of the driver's functions then pass as well.
pub fn leave(real: impl FnOnce() -> StatusCode) -> StatusCode {
    let before = LEFT.replace(true);
    let answer = real();
    LEFT.set(before);
    answer
}

/// What the calling thread's memory is recorded under; `None` if this request is left to CUDA.
pub fn placement(bytes: usize, caller: Option<*const c_void>) -> Option<Placement> {
    if bytes < Config::get().min_bytes.max(1) || LEFT.get() || caller.is_some_and(exclude::is_excluded) {
        return None;
    }
    region::current()
}

/// As [`provide`], for the driver's functions.
unsafe fn provide_to(
    caller: *const c_void,
    pointer: *mut *mut c_void,
    bytes: usize,
    source: Source,
    real: impl FnOnce() -> StatusCode,
) -> StatusCode {
    // SAFETY: the caller's promises.
    unsafe { provide_as(&DriverDoor, placement(bytes, Some(caller)), pointer, bytes, source, real) }
}

/// Allocates managed memory if the calling thread's allocations are managed, else calls the real function.
///
/// # Safety
/// `pointer` must be null or writable.
pub unsafe fn provide(
    door: &impl Door,
    pointer: *mut *mut c_void,
    bytes: usize,
    source: Source,
    real: impl FnOnce() -> StatusCode,
) -> StatusCode {
    // SAFETY: the caller's promise.
    unsafe { provide_as(door, placement(bytes, None), pointer, bytes, source, real) }
}

unsafe fn provide_as(
    door: &impl Door,
    placement: Option<Placement>,
    pointer: *mut *mut c_void,
    bytes: usize,
    source: Source,
    real: impl FnOnce() -> StatusCode,
) -> StatusCode {
    if pointer.is_null() {
        return leave(real);
    }
    match placement.and_then(|policy| allocate(door, policy, bytes, source)) {
        None => {
            free_up(bytes);
            leave(real)
        }
        Some(Ok(address)) => {
            // SAFETY: not null, and writable by the caller's promise.
            unsafe { pointer.write(address) };
            code::SUCCESS
        }
        Some(Err(error)) => {
            if error == code::OUT_OF_MEMORY {
                door.out_of_memory(pointer);
            }
            error
        }
    }
}

/// Allocates managed memory; `None` if the real function must allocate.
fn allocate(door: &impl Door, policy: Placement, bytes: usize, source: Source) -> Option<Result<*mut c_void, StatusCode>> {
    let current = match source {
        // An allocation during capture becomes part of the graph, which only the driver can do.
        Source::Stream(stream) | Source::Pool(_, stream) if stream.is_capturing() => return None,
        Source::Stream(stream) | Source::Pool(_, stream) => context_of(door, stream),
        Source::Thread => door.current_context(),
    };
    let current = match current {
        Ok(current) => current?,
        Err(error) => return Some(Err(error)),
    };
    // A pool of the program's own has a purpose: another device, host memory, sharing with other processes.
    if matches!(source, Source::Pool(pool, _) if driver::default_pool(current.device()).ok() != Some(pool)) {
        return None;
    }
    let tag = policy.tag.clone();
    let address = managed(&current, &tag, Memory::get().allocate(policy, bytes, &current), bytes)?;
    Some(address.map(|address| address as *mut c_void))
}

/// What follows a request for managed memory; `None` if the real function must answer it.
pub fn managed(current: &Current, tag: &str, answer: Result<u64, Error>, bytes: usize) -> Option<Result<u64, StatusCode>> {
    match answer {
        Ok(made) => {
            server::ensure_running();
            backup::get_ready(current, tag);
            Some(Ok(made))
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

/// The pitch and the total size, as the real function computes them: rows begin at multiples of 512 bytes. `None` on overflow,
/// for the real function to reject.
pub fn rows(width: usize, height: usize, depth: usize) -> Option<(usize, usize)> {
    let pitch = width.checked_next_multiple_of(512)?;
    Some((pitch, pitch.checked_mul(height)?.checked_mul(depth)?))
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
fn context_of(door: &impl Door, stream: StreamHandle) -> Result<Option<Current>, StatusCode> {
    if stream.is_default() { door.current_context() } else { Current::push_of_stream(stream).map(Some).map_err(|failure| failure.code) }
}

/// Frees managed memory; `None` if the real function must free it.
pub fn release(pointer: CUdeviceptr) -> Option<StatusCode> {
    let memory = Memory::existing()?;
    memory.release_freed();
    let freed = memory.free(pointer)?;
    Some(freed.map_or_else(
        |error| {
            log::debug!("cannot free {pointer:#x}: {error}");
            error.cuda_code()
        },
        |()| code::SUCCESS,
    ))
}

/// Frees managed memory in stream order; `None` if the real function must free it.
pub fn release_async(door: &impl Door, pointer: CUdeviceptr, stream: StreamHandle) -> Option<StatusCode> {
    let memory = Memory::existing()?;
    // A free during capture becomes part of the graph, which only the real function can do or reject.
    if !memory.manages(pointer) || stream.is_capturing() {
        return None;
    }
    let current = match context_of(door, stream) {
        Ok(current) => current?,
        Err(error) => return Some(error),
    };
    let freed = memory.free_in_order(pointer, &current, stream)?;
    Some(freed.map_or_else(
        |failure| {
            log::debug!("cannot free {pointer:#x} in stream order: {failure}");
            failure.code
        },
        |()| code::SUCCESS,
    ))
}
