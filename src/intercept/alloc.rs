//! Memory that the program asks CUDA to place: `cudaMalloc`, `cuMemAlloc`, and what they free.
//!
//! The first of our functions that a request reaches decides whether it is managed. If it leaves the request to CUDA, the request reaches
//! the hooked driver functions later ([`forward_unmanaged`]), which then forward it, too.

use crate::decided;
use crate::driver_originals;
use crate::exclude;
use crate::refusal;
use std::ffi::{c_uint, c_void};
use std::sync::Arc;
use vramctl_backup as backup;
use vramctl_config::Config;
use vramctl_core::events::{self, Cause, Event, FailedRequest};
use vramctl_core::gate::{self, Gated};
use vramctl_core::memory::sightings::{self, ObstacleKey};
use vramctl_core::memory::{Memory, Placement, Requester, is_ours, region, unmanaged};
use vramctl_core::server;
use vramctl_driver::{self as driver, CUdevice, CUdeviceptr, Current, StreamHandle, streams};
use vramctl_host::log_once;
use vramctl_model::{Error, Failure, ObstacleKind, StatusCode, code};

/// The functions through which a request came.
pub trait ApiLayer {
    /// The context in which a call without a stream allocates on this thread. `None` if there is none: then the real function is called,
    /// and returns the error.
    fn current_context(&self) -> Result<Option<Current>, StatusCode>;

    /// The side effects of an out-of-memory error, besides the result code.
    fn out_of_memory(&self, pointer: *mut *mut c_void);
}

/// Calls of the driver's functions.
struct DriverLayer;

impl ApiLayer for DriverLayer {
    fn current_context(&self) -> Result<Option<Current>, StatusCode> {
        Current::of_thread().map_err(|failure| failure.code)
    }

    fn out_of_memory(&self, _: *mut *mut c_void) {}
}

pub unsafe fn mem_alloc(pointer: *mut CUdeviceptr, bytes: usize, caller: *const c_void) -> StatusCode {
    if let Some(answer) = decided::next_answer() {
        return answer;
    }
    // SAFETY: here and below, the program promises that a non-null pointer is writable, and the real function gets the
    // arguments unchanged.
    unsafe { provide(&DriverLayer, caller, pointer.cast(), bytes, Source::Thread, || driver_originals::cuMemAlloc_v2(pointer, bytes)) }
}

/// Unified memory is left to CUDA, see [`malloc_managed`](crate::handlers::malloc_managed).
pub unsafe fn mem_alloc_managed(pointer: *mut CUdeviceptr, bytes: usize, flags: c_uint, caller: *const c_void) -> StatusCode {
    // The runtime's function has decided if the program has called that.
    let call = if decided::is_decided() { "cudaMallocManaged" } else { "cuMemAllocManaged" };
    // SAFETY: the arguments are passed on unchanged.
    let real = || unsafe { driver_originals::cuMemAllocManaged(pointer, bytes, flags) };
    sightings::noting(
        ObstacleKind::Unified,
        || reported(caller, bytes, None, real),
        || {
            if !pointer.is_null() {
                // SAFETY: not null, and written by the real function.
                sightings::note(ObstacleKind::Unified, call, ObstacleKey::Address(unsafe { pointer.read() }));
            }
        },
    )
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
        let mut asked = false;
        let answer = provide(&DriverLayer, caller, pointer.cast(), bytes, Source::Thread, || {
            asked = true;
            real()
        });
        if answer == code::SUCCESS && !asked {
            *pitch = row;
        }
        answer
    }
}

pub unsafe fn mem_alloc_async(pointer: *mut CUdeviceptr, bytes: usize, stream: StreamHandle, caller: *const c_void) -> StatusCode {
    // SAFETY: as in `mem_alloc`.
    unsafe {
        let real = || driver_originals::cuMemAllocAsync(pointer, bytes, stream);
        provide(&DriverLayer, caller, pointer.cast(), bytes, Source::Stream(stream), real)
    }
}

pub unsafe fn mem_alloc_async_ptsz(pointer: *mut CUdeviceptr, bytes: usize, stream: StreamHandle, caller: *const c_void) -> StatusCode {
    // SAFETY: as in `mem_alloc`.
    unsafe {
        let real = || driver_originals::cuMemAllocAsync_ptsz(pointer, bytes, stream);
        provide(&DriverLayer, caller, pointer.cast(), bytes, Source::Stream(stream.of_per_thread_program()), real)
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
        provide(&DriverLayer, caller, pointer.cast(), bytes, Source::Pool(pool, stream), real)
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
        provide(&DriverLayer, caller, pointer.cast(), bytes, Source::Pool(pool, stream.of_per_thread_program()), real)
    }
}

pub unsafe fn mem_free(pointer: CUdeviceptr) -> StatusCode {
    // SAFETY: the arguments are passed on unchanged.
    release(pointer, || unsafe { driver_originals::cuMemFree_v2(pointer) })
}

pub unsafe fn mem_free_async(pointer: CUdeviceptr, stream: StreamHandle) -> StatusCode {
    // SAFETY: the arguments are passed on unchanged.
    release_async(&DriverLayer, pointer, stream, || unsafe { driver_originals::cuMemFreeAsync(pointer, stream) })
}

pub unsafe fn mem_free_async_ptsz(pointer: CUdeviceptr, stream: StreamHandle) -> StatusCode {
    let real = || {
        // SAFETY: the arguments are passed on unchanged.
        unsafe { driver_originals::cuMemFreeAsync_ptsz(pointer, stream) }
    };
    release_async(&DriverLayer, pointer, stream.of_per_thread_program(), real)
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

/// Leaves a request to the real function; its own calls of driver functions are then left to CUDA as well. `note` counts the memory as left
/// alone. It gets the requesting library, which only the first of our functions on the request's path knows.
pub fn forward_unmanaged(
    caller: *const c_void,
    bytes: usize,
    device: Option<CUdevice>,
    real: impl FnOnce() -> StatusCode,
    note: impl FnOnce(Requester),
) -> StatusCode {
    if decided::is_decided() {
        return real();
    }
    if is_small(bytes) {
        return reported(caller, bytes, device, real);
    }
    let owner = exclude::library_at(caller).name();
    let noted = || {
        let answer = reported(caller, bytes, device, real);
        if answer == code::SUCCESS {
            note(Requester::of_request(owner, bytes, caller));
            has_memory();
        }
        answer
    };
    if sightings::is_communicator(owner) { sightings::making(ObstacleKind::Communicator, noted) } else { noted() }
}

/// Leaves a request to the real function, and reports if it fails for lack of memory, unless one of our functions on the request's path
/// does that already.
pub fn reported(caller: *const c_void, bytes: usize, device: Option<CUdevice>, real: impl FnOnce() -> StatusCode) -> StatusCode {
    if decided::is_decided() {
        return real();
    }
    let answer = decided::known_answer().unwrap_or_else(|| decided::pass_by(real));
    match answer {
        // Only `cuMemCreate` names a device.
        code::SUCCESS => events::succeeded(bytes, device.is_some()),
        code::OUT_OF_MEMORY => report(bytes, caller, device, None, Cause::Refused(None)),
        _ => (),
    }
    answer
}

/// Reports that a request has failed for lack of memory.
#[cold]
fn report(bytes: usize, caller: *const c_void, device: Option<CUdevice>, tag: Option<&Arc<str>>, cause: Cause) {
    // The library's own CUDA calls here are not requests of the program.
    decided::pass_by(|| {
        let (bytes, tag, library) = (bytes as u64, tag.map(Arc::clone), asker(caller));
        events::publish(Event::Failed(FailedRequest { bytes, device, tag, library, caller: caller as usize, cause }));
    });
}

/// The library that a request comes from. Only requests through [`torch_malloc`](crate::handlers::torch_malloc) have no caller.
fn asker(caller: *const c_void) -> &'static str {
    if caller.is_null() { "a pool of torch's" } else { exclude::library_at(caller).name() }
}

/// Whether a request can go straight to the real function: it is too small to be managed, and nobody is waiting for the next request.
#[inline]
pub fn can_forward(bytes: usize) -> bool {
    is_small(bytes) && !events::is_retry_expected()
}

/// Whether a free can go straight to the real function: the address is not known here.
#[inline]
pub fn is_unknown(address: CUdeviceptr) -> bool {
    Memory::existing().is_none_or(|memory| !memory.knows(address)) && !unmanaged::knows(address)
}

/// Whether no memory that was freed in stream order waits to be released.
#[inline]
pub fn has_nothing_freed() -> bool {
    Memory::existing().is_none_or(|memory| !memory.has_freed())
}

/// The program has waited for work: as with CUDA's pools, what has been freed in stream order is released.
pub fn synchronised() {
    if let Some(memory) = Memory::existing() {
        memory.synchronised();
    }
}

/// `cuMemGetInfo`: what has been freed in stream order counts as free.
pub unsafe fn mem_get_info(free: *mut usize, total: *mut usize) -> StatusCode {
    synchronised();
    // SAFETY: the arguments are passed on unchanged.
    unsafe { driver_originals::cuMemGetInfo_v2(free, total) }
}

/// Whether a request is so small that it is left to CUDA and not even counted.
#[inline]
fn is_small(bytes: usize) -> bool {
    bytes < Config::get().min_bytes.max(1)
}

/// What the calling thread's memory is recorded under; `None` if this request is left to CUDA. `caller`: its return address.
pub fn placement(bytes: usize, caller: *const c_void) -> Option<Placement> {
    if is_small(bytes) || decided::is_decided() {
        return None;
    }
    let library = exclude::library_at(caller);
    match library.tag() {
        _ if library.is_excluded() => None,
        Some(tag) => Some(region::of_library(tag)),
        None => region::current(),
    }
}

/// Allocates managed memory if the calling thread's allocations are managed, else calls the real function, which puts the address
/// into `pointer` too.
///
/// # Safety
/// `pointer` must be null or writable.
pub unsafe fn provide(
    layer: &impl ApiLayer,
    caller: *const c_void,
    pointer: *mut *mut c_void,
    bytes: usize,
    source: Source,
    real: impl FnMut() -> StatusCode,
) -> StatusCode {
    static IN_STREAM_ORDER: Gated = Gated("a stream-ordered allocation");
    // SAFETY: as promised.
    let now = || unsafe { provide_now(layer, caller, pointer, bytes, source, real) };
    match source {
        Source::Thread => now(),
        // A stream-ordered allocation is work of its stream, like a launch: it waits while the program is held.
        Source::Stream(_) | Source::Pool(..) => gate::pass(&IN_STREAM_ORDER, now),
    }
}

/// # Safety
/// As [`provide`].
unsafe fn provide_now(
    layer: &impl ApiLayer,
    caller: *const c_void,
    pointer: *mut *mut c_void,
    bytes: usize,
    source: Source,
    mut real: impl FnMut() -> StatusCode,
) -> StatusCode {
    if pointer.is_null() {
        return real();
    }
    // SAFETY: not null, and the real function has succeeded.
    let note = |requester| unmanaged::note(unsafe { pointer.read() } as CUdeviceptr, bytes, requester);
    match placement(bytes, caller).and_then(|placement| allocate(layer, &placement, bytes, source, caller)) {
        None if decided::is_decided() => real(),
        None => forward_unmanaged(caller, bytes, None, || with_room(bytes, real), note),
        Some(Ok(address)) => {
            // SAFETY: not null, and writable by the caller's promise.
            unsafe { pointer.write(address) };
            code::SUCCESS
        }
        Some(Err(error)) => {
            if error == code::OUT_OF_MEMORY {
                layer.out_of_memory(pointer);
            }
            error
        }
    }
}

/// Allocates managed memory; `None` if the real function must allocate.
fn allocate(
    layer: &impl ApiLayer,
    placement: &Placement,
    bytes: usize,
    source: Source,
    caller: *const c_void,
) -> Option<Result<*mut c_void, StatusCode>> {
    if let Some(address) = allocate_again(placement, bytes, source, caller) {
        return Some(Ok(address as *mut c_void));
    }
    let current = match source {
        // An allocation during capture becomes part of the graph, which only the driver can do.
        Source::Stream(stream) | Source::Pool(_, stream) if stream.is_capturing() => return None,
        Source::Stream(stream) | Source::Pool(_, stream) => context_of(layer, stream),
        Source::Thread => layer.current_context(),
    };
    let current = match current {
        Ok(current) => current?,
        // The first call creates the context.
        Err(code::OUT_OF_MEMORY) => {
            report(bytes, caller, None, Some(&placement.tag), Cause::Refused(None));
            return Some(Err(code::OUT_OF_MEMORY));
        }
        Err(_) => return None,
    };
    if refusal::is_expected() {
        return None;
    }
    // A pool that the program created has a purpose: another device, host memory, sharing with other processes.
    let pool = match source {
        Source::Pool(pool, _) => Some(pool),
        Source::Stream(_) => driver::current_pool(current.device()).ok(),
        Source::Thread => None,
    };
    if let Some(pool) = pool
        && driver::default_pool(current.device()).ok() != Some(pool)
    {
        return None;
    }
    let in_order = match source {
        Source::Stream(stream) | Source::Pool(_, stream) => Some(stream),
        Source::Thread => None,
    };
    let answer = Memory::get().allocate(placement, bytes, &current, in_order);
    let address = managed(&current, &placement.tag, answer, bytes, current.device(), caller)?;
    Some(address.map(|address| address as *mut c_void))
}

/// Allocates memory that was freed before in the same stream.
fn allocate_again(placement: &Placement, bytes: usize, source: Source, caller: *const c_void) -> Option<u64> {
    let memory = Memory::existing().filter(|memory| memory.has_freed())?;
    let (asked, stream) = match source {
        Source::Stream(stream) => (None, stream),
        Source::Pool(pool, stream) => (Some(pool), stream),
        Source::Thread => return None,
    };
    // A capture that is not known may be of this stream.
    if streams::is_any_captured() || stream.is_capturing() {
        return None;
    }
    let is_default = |device| {
        let pool = asked.or_else(|| driver::current_pool(device).ok());
        pool.is_some() && pool == driver::default_pool(device).ok()
    };
    let made = memory.reuse_again(placement, bytes, stream, is_default)?;
    memory.note_requester(made, Requester::of_request(asker(caller), bytes, caller));
    events::succeeded(bytes, false);
    Some(made)
}

/// Finishes a request for managed memory; `None` if the real function must handle it: the only error that the library gives a program is
/// lack of memory. Any other error may be one of virtual memory alone, or else the real function meets it as well.
pub fn managed(
    current: &Current,
    tag: &Arc<str>,
    answer: Result<u64, Error>,
    bytes: usize,
    device: CUdevice,
    caller: *const c_void,
) -> Option<Result<u64, StatusCode>> {
    match answer {
        Ok(made) => {
            Memory::get().note_requester(made, Requester::of_request(asker(caller), bytes, caller));
            events::succeeded(bytes, is_ours(made));
            has_memory();
            backup::get_ready(current, tag);
            Some(Ok(made))
        }
        Err(Error::Unsupported) => {
            log_once!(log::Level::Warn, "{}; its allocations are left to CUDA and cannot be paused", Error::Unsupported);
            None
        }
        Err(error) => {
            log::debug!("cannot allocate {bytes} bytes: {error}");
            if error.cuda_code() != code::OUT_OF_MEMORY {
                return None;
            }
            let cause = match error {
                Error::Driver(Failure { call, .. }) => Cause::Refused(Some(call)),
                _ => Cause::Margin,
            };
            report(bytes, caller, Some(device), Some(tag), cause);
            Some(Err(code::OUT_OF_MEMORY))
        }
    }
}

/// The process has memory now, managed or not: from now on it can be asked about it.
pub fn has_memory() {
    server::ensure_running();
    events::publish(Event::HasMemory);
}

/// The pitch and the total size, as the real function computes them: rows begin at multiples of 512 bytes. `None` on overflow,
/// for the real function to reject.
pub fn rows(width: usize, height: usize, depth: usize) -> Option<(usize, usize)> {
    let pitch = width.checked_next_multiple_of(512)?;
    Some((pitch, pitch.checked_mul(height)?.checked_mul(depth)?))
}

/// Releases memory that has been freed in stream order for a small request that has found none. Returns whether there was any.
#[cold]
pub fn makes_room() -> bool {
    let Some(memory) = Memory::existing() else { return false };
    let released = memory.released();
    matches!(Current::of_thread(), Ok(Some(current)) if memory.free_up(current.device(), 0, released))
}

/// Calls the real function; if it finds no memory, once more after releasing what has been freed in stream order.
fn with_room(bytes: usize, mut real: impl FnMut() -> StatusCode) -> StatusCode {
    let Some(memory) = Memory::existing() else { return real() };
    let released = memory.released();
    let answer = real();
    let has_room = || matches!(Current::of_thread(), Ok(Some(current)) if memory.free_up(current.device(), bytes, released));
    if answer == code::OUT_OF_MEMORY && has_room() { real() } else { answer }
}

/// A stream's context. For a default stream, that is the thread's current context, or the one that the runtime would create.
fn context_of(layer: &impl ApiLayer, stream: StreamHandle) -> Result<Option<Current>, StatusCode> {
    if stream.is_default() { layer.current_context() } else { Current::push_of_stream(stream).map(Some).map_err(|failure| failure.code) }
}

/// Frees memory: managed, or by the real function.
pub fn release(pointer: CUdeviceptr, mut real: impl FnMut() -> StatusCode) -> StatusCode {
    let _freeing = events::freeing();
    release_managed(pointer, &mut real).unwrap_or_else(|| free_unmanaged(pointer, real))
}

/// Lets the real function free memory; its own calls of the driver's functions are the same free.
fn free_unmanaged(pointer: CUdeviceptr, real: impl FnOnce() -> StatusCode) -> StatusCode {
    if decided::is_decided() { real() } else { unmanaged::free(pointer, || decided::pass_by(real)) }
}

fn release_managed(pointer: CUdeviceptr, real: impl FnMut() -> StatusCode) -> Option<StatusCode> {
    let memory = Memory::existing().filter(|memory| memory.manages(pointer))?;
    refusal::of_free(real).or_else(|| release_now(memory, pointer))
}

fn release_now(memory: &Memory, pointer: CUdeviceptr) -> Option<StatusCode> {
    let freed = memory.free(pointer)?;
    // This has waited for work.
    memory.synchronised();
    Some(freed.map_or_else(
        |error| {
            log::debug!("cannot free {pointer:#x}: {error}");
            error.cuda_code()
        },
        |()| code::SUCCESS,
    ))
}

/// Frees memory in stream order: managed, or by the real function.
pub fn release_async(
    layer: &impl ApiLayer,
    pointer: CUdeviceptr,
    stream: StreamHandle,
    mut real: impl FnMut() -> StatusCode,
) -> StatusCode {
    let _freeing = events::freeing();
    release_managed_async(layer, pointer, stream, &mut real).unwrap_or_else(|| free_unmanaged(pointer, real))
}

fn release_managed_async(
    layer: &impl ApiLayer,
    pointer: CUdeviceptr,
    stream: StreamHandle,
    real: impl FnMut() -> StatusCode,
) -> Option<StatusCode> {
    let memory = Memory::existing().filter(|memory| memory.manages(pointer))?;
    // A free during capture becomes part of the graph, which only the real function can do or reject.
    if stream.is_capturing() {
        return None;
    }
    if !streams::is_any_captured() && memory.free_again(pointer, stream) {
        return Some(code::SUCCESS);
    }
    let current = match context_of(layer, stream) {
        Ok(current) => current?,
        Err(error) => return refusal::of_free(real).or(Some(error)),
    };
    if let Some(refused) = refusal::of_free(real) {
        return Some(refused);
    }
    match memory.free_in_order(pointer, &current, stream)? {
        Ok(()) => Some(code::SUCCESS),
        Err(failure) => {
            log::debug!("cannot free {pointer:#x} in stream order: {failure}");
            // Without its event, the library waits as `cudaFree` does.
            if failure.is_refusal() { release_now(memory, pointer) } else { Some(failure.code) }
        }
    }
}
