//! Memory that the program asks CUDA to place: `cudaMalloc`, `cuMemAlloc`, and what they free. Invalid arguments are left for the real function to
//! reject.
//!
//! The first of our functions that a request reaches decides whether it is managed. If it leaves the request to CUDA, the request reaches
//! the hooked driver functions later ([`forward_unmanaged`]), which then forward it, too.

use crate::call::{Call, forward};
use crate::limited::{self, Admitted};
use crate::runtimes::Runtime;
use crate::table::{CudaExtent, CudaPitchedPtr};
use crate::{exclude, reentrancy, refusal, room};
use std::ffi::{c_uint, c_void};
use std::sync::Arc;
use vramctl_backup as backup;
use vramctl_config::Config;
use vramctl_core::events::{self, Cause, Event, FailedRequest};
use vramctl_core::gate::{self, Gated};
use vramctl_core::member;
use vramctl_core::memory::sightings::{self, ObstacleKey};
use vramctl_core::memory::{Memory, Placement, Requester, is_ours, region, unmanaged};
use vramctl_core::server;
use vramctl_driver::{self as driver, CUdevice, CUdeviceptr, Current, StreamHandle, streams};
use vramctl_host::log_once;
use vramctl_model::{Error, Failure, ObstacleKind, StatusCode, code};

/// Where to allocate.
#[derive(Clone, Copy)]
enum Source {
    /// On the calling thread's device.
    Thread,
    /// On a stream's device.
    Stream(StreamHandle),
    /// From a pool, in stream order.
    Pool(*mut c_void, StreamHandle),
}

impl Source {
    fn stream(self) -> Option<StreamHandle> {
        match self {
            Self::Thread => None,
            Self::Stream(stream) | Self::Pool(_, stream) => Some(stream),
        }
    }
}

pub unsafe fn malloc(call: &mut Call, pointer: *mut CUdeviceptr, bytes: usize) -> StatusCode {
    // SAFETY: here and below, the program promises that a non-null pointer is writable.
    unsafe { allocate(call, pointer, bytes, Source::Thread) }
}

pub unsafe fn mem_alloc(call: &mut Call, pointer: *mut CUdeviceptr, bytes: usize) -> StatusCode {
    // SAFETY: as in `malloc`.
    reentrancy::take_next_answer().unwrap_or_else(|| unsafe { malloc(call, pointer, bytes) })
}

pub unsafe fn malloc_async(call: &mut Call, pointer: *mut CUdeviceptr, bytes: usize, stream: StreamHandle) -> StatusCode {
    let source = Source::Stream(call.stream(stream));
    // SAFETY: as in `malloc`.
    unsafe { allocate_in_order(call, pointer, bytes, source) }
}

pub unsafe fn malloc_from_pool_async(
    call: &mut Call,
    pointer: *mut CUdeviceptr,
    bytes: usize,
    pool: *mut c_void,
    stream: StreamHandle,
) -> StatusCode {
    let source = Source::Pool(pool, call.stream(stream));
    // SAFETY: as in `malloc`.
    unsafe { allocate_in_order(call, pointer, bytes, source) }
}

/// A stream-ordered allocation is work of its stream, like a launch: it waits while the program is held.
unsafe fn allocate_in_order(call: &mut Call, pointer: *mut CUdeviceptr, bytes: usize, source: Source) -> StatusCode {
    static IN_STREAM_ORDER: Gated = Gated("a stream-ordered allocation");
    // SAFETY: as in `malloc`.
    gate::pass(&IN_STREAM_ORDER, || unsafe { allocate(call, pointer, bytes, source) })
}

pub unsafe fn malloc_pitch(call: &mut Call, pointer: *mut CUdeviceptr, pitch: *mut usize, width: usize, height: usize) -> StatusCode {
    let Some((row, bytes)) = rows(width, height, 1).filter(|_| !pitch.is_null()) else { return call.real() };
    // SAFETY: as in `malloc`.
    unsafe {
        let answer = allocate(call, pointer, bytes, Source::Thread);
        if answer == code::SUCCESS && !call.was_forwarded() {
            *pitch = row;
        }
        answer
    }
}

pub unsafe fn mem_alloc_pitch(
    call: &mut Call,
    pointer: *mut CUdeviceptr,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: c_uint,
) -> StatusCode {
    // SAFETY: as in `malloc`.
    if matches!(element, 4 | 8 | 16) { unsafe { malloc_pitch(call, pointer, pitch, width, height) } } else { call.real() }
}

pub unsafe fn malloc_3d(call: &mut Call, pitched: *mut CudaPitchedPtr, extent: CudaExtent) -> StatusCode {
    let rows = rows(extent.width, extent.height, extent.depth).filter(|_| !pitched.is_null());
    let Some((pitch, bytes)) = rows else { return call.real() };
    // SAFETY: as in `malloc`.
    unsafe {
        let pointer = &raw mut (*pitched).pointer;
        let answer = allocate(call, pointer.cast(), bytes, Source::Thread);
        if answer == code::SUCCESS && !call.was_forwarded() {
            *pitched = CudaPitchedPtr { pointer: pointer.read(), pitch, xsize: extent.width, ysize: extent.height };
        }
        answer
    }
}

/// Unified memory is always left to CUDA: it migrates by itself, so its share on the device is unknown. With a limit, all of it counts.
pub unsafe fn malloc_managed(call: &mut Call, pointer: *mut CUdeviceptr, bytes: usize) -> StatusCode {
    if limited::is_uncounted() || pointer.is_null() {
        return forward_reported(call, bytes, None, forward);
    }
    // SAFETY: as in `malloc`.
    unsafe { allocate_unmanaged(call, pointer, bytes, Source::Thread) }
}

pub unsafe fn mem_alloc_managed(call: &mut Call, pointer: *mut CUdeviceptr, bytes: usize) -> StatusCode {
    // If the program has called the runtime's function, that has decided.
    let name = if reentrancy::is_nested() { "cudaMallocManaged" } else { "cuMemAllocManaged" };
    sightings::noting(
        ObstacleKind::Unified,
        // SAFETY: as in `malloc`.
        || unsafe { malloc_managed(call, pointer, bytes) },
        || {
            if !pointer.is_null() {
                // SAFETY: not null, and written by the real function.
                sightings::note(ObstacleKind::Unified, name, ObstacleKey::Address(unsafe { pointer.read() }));
            }
        },
    )
}

/// Frees memory: managed, or by the real function.
pub fn free(call: &mut Call, pointer: CUdeviceptr) -> StatusCode {
    let _freeing = events::freeing();
    free_managed(call, pointer).unwrap_or_else(|| free_unmanaged(call, pointer))
}

/// Frees memory in stream order: managed, or by the real function.
pub fn free_async(call: &mut Call, pointer: CUdeviceptr, stream: StreamHandle) -> StatusCode {
    let _freeing = events::freeing();
    free_managed_async(call, pointer, call.stream(stream)).unwrap_or_else(|| free_unmanaged(call, pointer))
}

/// Charges a request that CUDA serves, if need be once more after releasing what has been freed in stream order. If the limit refuses the request,
/// that is reported.
pub fn admit(call: &Call, device: CUdevice, bytes: usize, charge: impl Fn() -> Result<Admitted, Error>) -> Result<Admitted, StatusCode> {
    if limited::is_uncounted() || reentrancy::is_nested() {
        return Ok(Admitted::default());
    }
    let memory = Memory::existing();
    let released = memory.map_or(0, |memory| memory.registry.released());
    let again = |error| if memory.is_some_and(|memory| memory.registry.free_up(device, bytes, released)) { charge() } else { Err(error) };
    match charge().or_else(again) {
        Err(Error::Limit(refused)) => {
            report(bytes, call.caller(), Some(device), None, Cause::Limit(refused));
            Err(code::OUT_OF_MEMORY)
        }
        // What the driver does not tell cannot count.
        admitted => Ok(admitted.unwrap_or_default()),
    }
}

/// The same for a request to the calling thread's device or to a pool.
fn admit_from(call: &Call, bytes: usize, source: Source) -> Result<Admitted, StatusCode> {
    if limited::is_uncounted() || reentrancy::is_nested() {
        return Ok(Admitted::default());
    }
    let current = match source.stream() {
        // It becomes part of the graph.
        Some(stream) if stream.is_capturing() => Ok(None),
        Some(stream) => context_of(call, stream),
        None => call.context(),
    };
    // Without a context, or in a capture that forbids the request, the real function refuses it.
    let Ok(Some(current)) = current else { return Ok(Admitted::default()) };
    if refusal::provoke() {
        return Ok(Admitted::default());
    }
    let device = current.device();
    admit(call, device, bytes, || match source {
        Source::Thread => limited::on(device, bytes),
        Source::Stream(_) => driver::current_pool(device).map_or_else(|failure| Err(failure.into()), |pool| limited::in_pool(pool, bytes)),
        Source::Pool(pool, _) => limited::in_pool(pool, bytes),
    })
}

/// Leaves a request to the real function; its own calls of driver functions are then left to CUDA as well. `note` counts the memory as
/// unmanaged. It gets the requesting library, which only the first of our functions on the request's path knows.
pub fn forward_unmanaged(
    call: &mut Call,
    bytes: usize,
    device: Option<CUdevice>,
    real: impl FnOnce(&mut Call) -> StatusCode,
    note: impl FnOnce(Requester),
) -> StatusCode {
    if reentrancy::is_nested() {
        return forward_nested(call, bytes, device);
    }
    if is_small(bytes) && (limited::is_uncounted() || bytes == 0) {
        return forward_reported(call, bytes, device, real);
    }
    let caller = call.caller();
    let owner = exclude::library_at(caller).name();
    let noted = || {
        let answer = forward_reported(call, bytes, device, real);
        if answer == code::SUCCESS {
            note(Requester::of_request(owner, bytes, caller));
            announce_memory();
        }
        answer
    };
    if sightings::is_communicator(owner) { sightings::making(ObstacleKind::Communicator, noted) } else { noted() }
}

/// Leaves a request to the real function, and reports if it fails because memory is short, unless one of our functions on the request's path
/// does that already.
fn forward_reported(call: &mut Call, bytes: usize, device: Option<CUdevice>, real: impl FnOnce(&mut Call) -> StatusCode) -> StatusCode {
    if reentrancy::is_nested() {
        return forward_nested(call, bytes, device);
    }
    let answer = reentrancy::forward(|| real(call));
    match answer {
        // Only `cuMemCreate` names a device.
        code::SUCCESS => events::succeeded(bytes, device.is_some()),
        code::OUT_OF_MEMORY => report(bytes, call.caller(), device, None, Cause::Refused(None)),
        _ => (),
    }
    answer
}

/// Leaves the driver call of a request to CUDA that another of our functions has decided about.
fn forward_nested(call: &mut Call, bytes: usize, device: Option<CUdevice>) -> StatusCode {
    let answer = call.real();
    if answer == code::OUT_OF_MEMORY {
        room::is_final(device, bytes);
    }
    answer
}

/// Reports that a request has failed because memory is short.
#[cold]
fn report(bytes: usize, caller: *const c_void, device: Option<CUdevice>, tag: Option<&Arc<str>>, cause: Cause) {
    // The library's own CUDA calls here are not requests of the program.
    reentrancy::forward(|| {
        // Above the limit, there is never room.
        if !matches!(cause, Cause::Limit(_)) && !room::is_final(device, bytes) {
            return;
        }
        let (bytes, tag, library) = (bytes as u64, tag.map(Arc::clone), asker(caller));
        events::publish(Event::Failed(FailedRequest { bytes, device, tag, library, caller: caller as usize, cause }));
    });
}

/// The library that a request comes from. Only requests through `tms_torch_malloc` have no caller.
fn asker(caller: *const c_void) -> &'static str {
    if caller.is_null() { "a pool of torch's" } else { exclude::library_at(caller).name() }
}

/// Whether a request can go straight to the real function: it is too small to be managed, no limit counts it, and nobody is waiting for the
/// next request.
#[inline]
pub fn can_forward(bytes: usize) -> bool {
    is_small(bytes) && limited::is_uncounted() && !events::is_retry_expected() && !member::is_member()
}

/// Whether a free can go straight to the real function: the address is not known here.
#[inline]
pub fn is_unknown(address: CUdeviceptr) -> bool {
    Memory::existing().is_none_or(|memory| !memory.registry.knows(address)) && !unmanaged::knows(address)
}

/// Whether no memory that was freed in stream order waits to be released.
#[inline]
pub fn has_nothing_freed() -> bool {
    Memory::existing().is_none_or(|memory| !memory.registry.has_freed())
}

/// The program has waited for work: as with CUDA's pools, what has been freed in stream order is released.
pub fn synchronised() {
    if let Some(memory) = Memory::existing() {
        memory.registry.synchronised();
    }
}

/// `cuMemGetInfo`: what has been freed in stream order counts as free, and a limit as all there is.
pub unsafe fn mem_get_info(call: &mut Call, free: *mut usize, total: *mut usize) -> StatusCode {
    synchronised();
    let answer = call.real();
    if answer == code::SUCCESS {
        // SAFETY: written by the real function.
        unsafe { limited::show(free, total) };
    }
    answer
}

/// Whether a request is so small that it is left to CUDA and not even counted.
#[inline]
fn is_small(bytes: usize) -> bool {
    bytes < Config::get().min_bytes.max(1)
}

/// What the calling thread's memory is recorded under; `None` if this request is left to CUDA. `caller`: its return address.
pub fn placement(bytes: usize, caller: *const c_void) -> Option<Placement> {
    if is_small(bytes) || reentrancy::is_nested() {
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
unsafe fn allocate(call: &mut Call, pointer: *mut CUdeviceptr, bytes: usize, source: Source) -> StatusCode {
    if pointer.is_null() {
        return call.real();
    }
    if room::is_for_others(None, bytes) {
        return code::OUT_OF_MEMORY;
    }
    let managed = placement(bytes, call.caller()).and_then(|placement| allocate_managed(call, &placement, bytes, source));
    match managed {
        // SAFETY: not null, and writable by the caller's promise.
        Some(Ok(address)) => unsafe {
            pointer.write(address);
            code::SUCCESS
        },
        // SAFETY: as above.
        Some(Err(error)) => unsafe { refused(call, pointer, error) },
        // SAFETY: as above.
        None => unsafe { allocate_unmanaged(call, pointer, bytes, source) },
    }
}

/// Has the real function allocate, within the limit.
///
/// # Safety
/// `pointer` must be writable.
unsafe fn allocate_unmanaged(call: &mut Call, pointer: *mut CUdeviceptr, bytes: usize, source: Source) -> StatusCode {
    match admit_from(call, bytes, source) {
        Ok(Admitted { charge, growth: _until_answered }) => {
            // SAFETY: the real function has succeeded.
            let note = |requester| unmanaged::note(unsafe { pointer.read() }, bytes, requester, charge);
            forward_unmanaged(call, bytes, None, |call| call.real_with_room(bytes), note)
        }
        // SAFETY: the caller's promise.
        Err(error) => unsafe { refused(call, pointer, error) },
    }
}

/// The answer to a request that the library refuses.
///
/// # Safety
/// `pointer` must be writable.
unsafe fn refused(call: &Call, pointer: *mut CUdeviceptr, error: StatusCode) -> StatusCode {
    // The runtime's function does that, too; the driver's does not.
    if error == code::OUT_OF_MEMORY && call.runtime().is_some() {
        // SAFETY: the caller's promise.
        unsafe { pointer.write(0) };
    }
    error
}

/// Allocates managed memory; `None` if the real function must allocate.
fn allocate_managed(call: &Call, placement: &Placement, bytes: usize, source: Source) -> Option<Result<CUdeviceptr, StatusCode>> {
    if let Some(address) = reuse_freed(placement, bytes, source, call.caller()) {
        return Some(Ok(address));
    }
    let current = match source.stream() {
        // An allocation during capture becomes part of the graph, which only the driver can do.
        Some(stream) if stream.is_capturing() => return None,
        Some(stream) => context_of(call, stream),
        None => call.context(),
    };
    let current = match current {
        Ok(current) => current?,
        // The first call creates the context.
        Err(code::OUT_OF_MEMORY) => {
            if let Some(device) = call.runtime().and_then(Runtime::current_device) {
                room::lacks_context(device);
            }
            report(bytes, call.caller(), None, Some(&placement.tag), Cause::Refused(None));
            return Some(Err(code::OUT_OF_MEMORY));
        }
        Err(_) => return None,
    };
    if refusal::provoke() {
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
    let answer = Memory::get().allocate(placement, bytes, &current, source.stream());
    finish(&current, &placement.tag, answer, bytes, current.device(), call.caller())
}

/// Allocates memory that was freed before in the same stream.
fn reuse_freed(placement: &Placement, bytes: usize, source: Source, caller: *const c_void) -> Option<CUdeviceptr> {
    let memory = Memory::existing().filter(|memory| memory.registry.has_freed())?;
    let stream = source.stream()?;
    // A capture that is not known may be of this stream.
    if streams::is_any_captured() || stream.is_capturing() {
        return None;
    }
    let made = memory.reuse_again(placement, bytes, stream, |device| {
        let pool = if let Source::Pool(pool, _) = source { Some(pool) } else { driver::current_pool(device).ok() };
        pool.is_some() && pool == driver::default_pool(device).ok()
    })?;
    memory.registry.note_requester(made, Requester::of_request(asker(caller), bytes, caller));
    events::succeeded(bytes, false);
    Some(made)
}

/// Finishes a request for managed memory; `None` if the real function must handle it: the only error that the library gives a program is
/// "out of memory". Any other error may be one of virtual memory alone, or else the real function meets it as well.
pub fn finish(
    current: &Current,
    tag: &Arc<str>,
    answer: Result<u64, Error>,
    bytes: usize,
    device: CUdevice,
    caller: *const c_void,
) -> Option<Result<u64, StatusCode>> {
    match answer {
        Ok(made) => {
            Memory::get().registry.note_requester(made, Requester::of_request(asker(caller), bytes, caller));
            events::succeeded(bytes, is_ours(made));
            announce_memory();
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
                Error::Limit(refused) => Cause::Limit(refused),
                _ => Cause::Margin,
            };
            report(bytes, caller, Some(device), Some(tag), cause);
            Some(Err(code::OUT_OF_MEMORY))
        }
    }
}

/// The process has memory now, managed or not: from now on it can be asked about it.
pub fn announce_memory() {
    server::ensure_running();
    events::publish(Event::HasMemory);
}

/// The pitch and the total size, as the real function computes them: rows begin at multiples of 512 bytes. `None` on overflow,
/// for the real function to reject.
fn rows(width: usize, height: usize, depth: usize) -> Option<(usize, usize)> {
    let pitch = width.checked_next_multiple_of(512)?;
    Some((pitch, pitch.checked_mul(height)?.checked_mul(depth)?))
}

/// A stream's context. For a default stream, that is the thread's current context, or the one that the runtime would create.
fn context_of(call: &Call, stream: StreamHandle) -> Result<Option<Current>, StatusCode> {
    if stream.is_default() { call.context() } else { Current::push_of_stream(stream).map(Some).map_err(|failure| failure.code) }
}

/// Has the real function free memory; its own calls of the driver's functions are the same free.
fn free_unmanaged(call: &mut Call, pointer: CUdeviceptr) -> StatusCode {
    if reentrancy::is_nested() { call.real() } else { unmanaged::free(pointer, || reentrancy::forward(|| call.real())) }
}

fn free_managed(call: &mut Call, pointer: CUdeviceptr) -> Option<StatusCode> {
    let memory = Memory::existing().filter(|memory| memory.registry.manages(pointer))?;
    refusal::of_free(call).or_else(|| free_now(memory, pointer))
}

fn free_now(memory: &Memory, pointer: CUdeviceptr) -> Option<StatusCode> {
    let freed = memory.free(pointer)?;
    // This has waited for work.
    memory.registry.synchronised();
    Some(freed.map_or_else(
        |error| {
            log::debug!("cannot free {pointer:#x}: {error}");
            error.cuda_code()
        },
        |()| code::SUCCESS,
    ))
}

fn free_managed_async(call: &mut Call, pointer: CUdeviceptr, stream: StreamHandle) -> Option<StatusCode> {
    let memory = Memory::existing().filter(|memory| memory.registry.manages(pointer))?;
    // A free during capture becomes part of the graph, which only the real function can do or reject.
    if stream.is_capturing() {
        return None;
    }
    if !streams::is_any_captured() && memory.free_again(pointer, stream) {
        return Some(code::SUCCESS);
    }
    let current = match context_of(call, stream) {
        Ok(current) => current?,
        Err(error) => return refusal::of_free(call).or(Some(error)),
    };
    if let Some(refused) = refusal::of_free(call) {
        return Some(refused);
    }
    match memory.free_in_order(pointer, &current, stream)? {
        Ok(()) => Some(code::SUCCESS),
        Err(failure) => {
            log::debug!("cannot free {pointer:#x} in stream order: {failure}");
            // Without its event, the library waits as `cudaFree` does.
            if failure.is_refusal() { free_now(memory, pointer) } else { Some(failure.code) }
        }
    }
}
