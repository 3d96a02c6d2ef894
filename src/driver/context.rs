//! Contexts and streams: a thread's current context, and waiting for a context's work.

use super::{CUcontext, CUdevice, CUstream, Driver};
use cudarc::driver::sys::{CUstream_flags, CUstreamCaptureMode, CUstreamCaptureStatus};
use std::collections::BTreeSet;
use std::ptr;
use std::sync::RwLock;
use vramctl_host::{PerProcess, Unpoison};
use vramctl_model::{Failure, code};

/// The driver's opaque handle of a context.
///
/// Handles are reused: a primary context keeps its own across resets, and a new context may get that of a destroyed one. A
/// [`Context`] is unique.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ContextHandle(CUcontext);
// SAFETY: the handle names an object of the driver, which is thread-safe.
unsafe impl Send for ContextHandle {}
// SAFETY: as above.
unsafe impl Sync for ContextHandle {}

impl ContextHandle {
    pub(super) fn raw(self) -> CUcontext {
        self.0
    }

    /// The handle that some driver functions report as a number.
    pub(super) fn of_address(address: u64) -> Self {
        Self(address as CUcontext)
    }

    /// The handle as a number, as some driver functions report it.
    pub fn address(self) -> u64 {
        self.0 as u64
    }

    /// The handle of the thread's current context, if it has one. Cheaper than [`Current::of_thread`].
    #[inline]
    pub fn of_thread() -> Result<Option<Self>, Failure> {
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is writable.
        match unsafe { Driver::get()?.cuCtxGetCurrent(&raw mut handle) } {
            Ok(()) => Ok((!handle.is_null()).then_some(Self(handle))),
            // The driver is not initialised yet.
            Err(Failure { code: code::NOT_INITIALIZED, .. }) => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// The context that has this handle now; an error if none has.
    pub fn context(self) -> Result<Context, Failure> {
        let mut id = 0;
        // SAFETY: `id` is writable. The handle of a destroyed context is an error (observed with driver 580).
        match unsafe { Driver::get()?.cuCtxGetId(self.0, &raw mut id) } {
            // Before CUDA 12.0, contexts that share a handle cannot be told apart.
            Ok(()) | Err(Failure { code: code::NOT_FOUND, .. }) => Ok(Context { handle: self, id }),
            Err(failure) => Err(failure),
        }
    }
}

/// A context, unique from its creation to its destruction, even if its handle is reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Context {
    handle: ContextHandle,
    /// "Unique for the life of the program" (`cuCtxGetId` in the driver API's reference).
    id: u64,
}

impl Context {
    /// The driver's handle, valid while the context exists.
    pub fn handle(self) -> ContextHandle {
        self.handle
    }

    /// Records that it stands for a green context, which has no memory of its own.
    pub fn is_of_green(self) {
        GREEN.get().write().unpoisoned().insert(self);
    }

    /// Whether the context has been destroyed or reset. Memory of CUDA's own would have been freed with it.
    pub fn is_gone(self) -> bool {
        match self.handle.context() {
            // Before CUDA 12.0 there are no ids; only using the context shows it.
            Ok(now) if now == self => self.id == 0 && Current::push(self).is_err_and(Failure::is_of_gone_context),
            Ok(_) => true,
            Err(failure) => failure.is_of_gone_context(),
        }
    }
}

/// The contexts that stand for green ones.
static GREEN: PerProcess<RwLock<BTreeSet<Context>>> = PerProcess::new(RwLock::default);

/// The opaque handle of a stream of the program. It has the handle's layout, so that hooked functions can take it as an argument.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamHandle(CUstream);
// SAFETY: the handle names an object of the driver, which is thread-safe.
unsafe impl Send for StreamHandle {}
// SAFETY: as above.
unsafe impl Sync for StreamHandle {}

impl StreamHandle {
    /// Whether this is the null stream, `cudaStreamLegacy` or `cudaStreamPerThread`. These handles mean a different stream in each
    /// context, and the last one in each thread too.
    pub fn is_default(self) -> bool {
        self.0 as usize <= 2
    }

    /// `cudaStreamLegacy`.
    pub const LEGACY: Self = Self(1 as CUstream);

    /// Whether this is the legacy stream of a context.
    pub fn is_legacy(self) -> bool {
        self.0 as usize <= 1
    }

    /// The meaning of the handle in a program built for per-thread default streams.
    #[must_use]
    pub fn of_per_thread_program(self) -> Self {
        const PER_THREAD: usize = 2; // CU_STREAM_PER_THREAD
        if self.0.is_null() { Self(PER_THREAD as CUstream) } else { self }
    }

    /// The stream that the handle means to this thread now. `None` if the driver does not say, as before CUDA 12.0.
    pub fn id(self) -> Option<StreamId> {
        let mut id = 0;
        // SAFETY: a handle that the program passed to CUDA as a stream; `id` is writable.
        unsafe { Driver::get().ok()?.cuStreamGetId(self.0, &raw mut id) }.ok()?;
        Some(StreamId(id))
    }

    /// Whether the stream is being captured into a graph.
    pub fn is_capturing(self) -> bool {
        let mut status = 0;
        // SAFETY: a handle that the program passed to CUDA as a stream; `status` is writable.
        let answer = Driver::get().and_then(|driver| unsafe { driver.cuStreamIsCapturing(self.0, &raw mut status) });
        match answer {
            Ok(()) => status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as u32,
            // The legacy stream can be neither queried nor used while another stream is being captured.
            Err(failure) => failure.is_capture(),
        }
    }

    pub(super) fn raw(self) -> CUstream {
        self.0
    }
}

/// A stream, "unique for the life of the program" (`cuStreamGetId` in the driver API's reference): handles are reused, and those of default
/// streams mean another one in each context, and one of them in each thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamId(u64);

/// This thread's current context and its device: pushed by [`Current::push`] until dropped, or found by [`Current::of_thread`].
#[derive(Debug)]
pub struct Current {
    context: Context,
    device: CUdevice,
    pushed: bool,
}

impl Current {
    /// A device's primary context, the one that the runtime uses and resets, if it is active.
    pub fn primary_of(device: CUdevice) -> Result<Option<Context>, Failure> {
        let driver = Driver::get()?;
        let (mut flags, mut active, mut context) = (0, 0, ptr::null_mut());
        // SAFETY: all are writable. The context is retained only to learn its handle.
        unsafe {
            driver.cuDevicePrimaryCtxGetState(device, &raw mut flags, &raw mut active)?;
            if active == 0 {
                return Ok(None);
            }
            driver.cuDevicePrimaryCtxRetain(&raw mut context, device)?;
            let context = ContextHandle(context).context();
            driver.cuDevicePrimaryCtxRelease_v2(device)?;
            context.map(Some)
        }
    }

    /// Does something in a device's primary context, which is created for that if it is not active.
    pub fn in_primary<T>(device: CUdevice, work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
        let (driver, mut context) = (Driver::get()?, ptr::null_mut());
        // SAFETY: `context` is writable.
        unsafe { driver.cuDevicePrimaryCtxRetain(&raw mut context, device)? };
        let answer = ContextHandle(context).context().and_then(Self::push).and_then(|_current| work());
        // SAFETY: retained above, and no longer current.
        unsafe { driver.cuDevicePrimaryCtxRelease_v2(device)? };
        answer
    }

    /// The thread's current context, if it has one; `None` also if the driver is not initialised yet.
    pub fn of_thread() -> Result<Option<Self>, Failure> {
        let Some(handle) = ContextHandle::of_thread()? else { return Ok(None) };
        Self::with_device(handle.context()?, false).map(Some)
    }

    /// Whether this thread has a current context that works: failed work breaks it, and it refuses almost every call from then on. Asking
    /// disturbs no capture.
    pub fn works() -> bool {
        let mut status = 0;
        // SAFETY: `status` is writable.
        let asked = Driver::get().and_then(|driver| unsafe { driver.cuStreamIsCapturing(StreamHandle::LEGACY.0, &raw mut status) });
        // The legacy stream cannot be asked about while another is captured.
        asked.is_ok() || asked.is_err_and(Failure::is_capture)
    }

    /// Makes `context` current on this thread until the value is dropped, which restores the previous one.
    pub fn push(context: Context) -> Result<Self, Failure> {
        // The driver accepts a destroyed context here and crashes in the next call.
        if context.handle.context()? != context {
            return Err(Failure { call: "cuCtxPushCurrent_v2", code: code::CONTEXT_IS_DESTROYED });
        }
        // SAFETY: the context exists.
        unsafe { Driver::get()?.cuCtxPushCurrent_v2(context.handle.0)? };
        Self::with_device(context, true).inspect_err(|_| pop())
    }

    /// Makes a stream's context current until the value is dropped; of a green context's stream, the primary one of the device. Default
    /// streams belong to the thread's current context.
    pub fn push_of_stream(stream: StreamHandle) -> Result<Self, Failure> {
        let (driver, mut context, mut green) = (Driver::get()?, ptr::null_mut(), ptr::null_mut());
        // SAFETY: a handle that the program passed to CUDA as a stream; the others are writable.
        if unsafe { driver.cuStreamGetCtx_v2(stream.0, &raw mut context, &raw mut green) }.is_err() {
            // Drivers before CUDA 12.5 have only this one.
            // SAFETY: as above.
            unsafe { driver.cuStreamGetCtx(stream.0, &raw mut context)? };
        }
        Self::push(ContextHandle(context).context()?)
    }

    fn with_device(context: Context, pushed: bool) -> Result<Self, Failure> {
        let mut device = 0;
        // SAFETY: `device` is writable, and a context is current.
        unsafe { Driver::get()?.cuCtxGetDevice(&raw mut device)? };
        Ok(Self { context, device, pushed })
    }

    /// The context.
    pub fn context(&self) -> Context {
        self.context
    }

    /// The context with which memory that is allocated here ends: in place of a green context, the primary one of its device.
    pub fn owner(&self) -> Context {
        let is_green = GREEN.existing().is_some_and(|green| green.read().unpoisoned().contains(&self.context));
        let primary = if is_green { Self::primary_of(self.device).ok().flatten() } else { None };
        primary.unwrap_or(self.context)
    }

    /// The context's device.
    pub fn device(&self) -> CUdevice {
        self.device
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        if self.pushed {
            pop();
        }
    }
}

fn pop() {
    let mut context = ptr::null_mut();
    // SAFETY: `context` is writable. If this fails, the context has been destroyed and there is nothing to restore.
    let _ = Driver::get().and_then(|driver| unsafe { driver.cuCtxPopCurrent_v2(&raw mut context) });
}

/// While this value lives, calls on this thread do not disturb stream captures in progress.
///
/// CUDA considers memory management calls "potentially unsafe" during a capture in global mode and invalidates the capture
/// (`cuThreadExchangeStreamCaptureMode` in the driver API's reference). The library's memory is not part of any graph, so its
/// calls are safe.
pub struct RelaxedCapture {
    /// The mode to restore; `None` if the driver has no modes or is not initialised yet.
    before: Option<u32>,
}

impl RelaxedCapture {
    /// Enters the relaxed mode.
    pub fn enter() -> Self {
        Self { before: exchange_capture_mode(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as u32) }
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            exchange_capture_mode(before);
        }
    }
}

fn exchange_capture_mode(mut mode: u32) -> Option<u32> {
    // SAFETY: `mode` is writable and holds a valid mode.
    let exchanged = Driver::get().and_then(|driver| unsafe { driver.cuThreadExchangeStreamCaptureMode(&raw mut mode) });
    exchanged.ok().map(|()| mode)
}

/// A non-blocking stream of our own, which does not wait for the program's work.
pub struct Stream(CUstream);

// SAFETY: the handle names an object of the driver, which is thread-safe.
unsafe impl Send for Stream {}

impl Stream {
    /// Creates a stream in the current context.
    pub fn create() -> Result<Self, Failure> {
        let mut stream = ptr::null_mut();
        // SAFETY: `stream` is writable.
        unsafe { Driver::get()?.cuStreamCreate(&raw mut stream, CUstream_flags::CU_STREAM_NON_BLOCKING as u32)? };
        Ok(Self(stream))
    }

    /// Waits for all work on the stream.
    pub fn synchronize(&self) -> Result<(), Failure> {
        // SAFETY: our stream.
        unsafe { Driver::get()?.cuStreamSynchronize(self.0) }
    }

    pub(super) fn raw(&self) -> CUstream {
        self.0
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: our stream, dropped once. Work still queued completes; its owner has waited for it or keeps its memory valid
        // (see `Lane`).
        let _ = Driver::get().and_then(|driver| unsafe { driver.cuStreamDestroy_v2(self.0) });
    }
}
