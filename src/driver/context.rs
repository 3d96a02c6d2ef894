//! Contexts and streams: a thread's current context, and waiting for a context's work.

use super::life::{self, Kept, Subject};
use super::{CUcontext, CUdevice, CUstream, Driver};
use cudarc::driver::sys::{CUstream_flags, CUstreamCaptureMode, CUstreamCaptureStatus};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::RwLock;
use vramctl_host::{PerProcess, Unpoison, log_once};
use vramctl_model::{Failure, code, support};

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

    /// The context that has this handle now; an error if none has. Unless the program vouches for it, it must be [kept](Self::keep).
    pub fn context(self) -> Result<Context, Failure> {
        let mut id = 0;
        // SAFETY: `id` is writable. The handle of a destroyed context is an error (observed with driver 580).
        let answer = unsafe { Driver::get()?.cuCtxGetId(self.0, &raw mut id) };
        if matches!(answer, Err(Failure { code: code::NOT_FOUND, .. })) {
            // Contexts that share a handle could not be told apart, and the driver crashes if it is asked about a destroyed one.
            log_once!(log::Level::Warn, "{}: {}", support::PAUSE.text(), support::PAUSE.otherwise);
        }
        answer.map(|()| Context { handle: self, id })
    }

    /// Keeps the context alive that has this handle, and that the program may end.
    pub fn keep(self) -> Result<Kept, Failure> {
        life::keep(Subject::Handle(self.address()))
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

    /// Keeps it alive. An error if it is gone, or if a call of the program's may be ending it.
    pub fn keep(self) -> Result<Kept, Failure> {
        let kept = self.handle.keep()?;
        let is_it = self.handle.context()? == self;
        // The driver accepts a destroyed context and crashes in the next call.
        if is_it { Ok(kept) } else { Err(Failure { call: "cuCtxPushCurrent_v2", code: code::CONTEXT_IS_DESTROYED }) }
    }

    /// Whether a call of the program's may be ending it now. This begins and ends between pauses and resumes.
    pub fn is_ending(self) -> bool {
        life::is_ending(Subject::Handle(self.handle.address()))
    }

    /// Whether the context has been destroyed or reset. Memory of CUDA's own would have been freed with it.
    pub fn is_gone(self) -> bool {
        self.keep().is_err_and(Failure::is_of_gone_context)
    }
}

/// The driver's handle of a green context, which has no memory of its own: it retains the primary context of its device.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Green(*mut c_void);
// SAFETY: the handle names an object of the driver, which is thread-safe.
unsafe impl Send for Green {}
// SAFETY: as above.
unsafe impl Sync for Green {}

/// Devices, and the contexts that stand for green ones of these.
type Greens = BTreeMap<Green, (CUdevice, Vec<Context>)>;

/// The green contexts of the program.
static GREENS: PerProcess<RwLock<Greens>> = PerProcess::new(RwLock::default);

impl Green {
    /// Records its device.
    pub fn note_device(self, device: CUdevice) {
        GREENS.get().write().unpoisoned().insert(self, (device, Vec::new()));
    }

    /// Records a context that stands for it.
    pub fn note_context(self, context: Context) {
        let Ok(device) = Current::push_of_program(context).map(|current| current.device()) else { return };
        GREENS.get().write().unpoisoned().entry(self).or_insert_with(|| (device, Vec::new())).1.push(context);
    }

    /// Its device, and the contexts that stand for it.
    pub(super) fn known(self) -> Option<(CUdevice, Vec<Context>)> {
        GREENS.existing()?.read().unpoisoned().get(&self).cloned()
    }

    /// Forgets it: it is about to be destroyed.
    pub(super) fn forget(self) {
        if let Some(greens) = GREENS.existing() {
            greens.write().unpoisoned().remove(&self);
        }
    }
}

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

    /// The green context that it was created in, if any.
    pub(super) fn green(self) -> Option<Green> {
        let (mut context, mut green) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: a handle that the program passed to CUDA as a stream; the others are writable.
        unsafe { Driver::get().ok()?.cuStreamGetCtx_v2(self.0, &raw mut context, &raw mut green) }.ok()?;
        Some(Green(green)).filter(|_| !green.is_null())
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
    /// Of a context that the program does not vouch for. Dropped once the context is no longer current.
    _kept: Option<Kept>,
}

impl Current {
    /// A device's primary context, the one that the runtime uses and resets, if it is active. An error while it may be ending.
    pub fn primary_of(device: CUdevice) -> Result<Option<Context>, Failure> {
        let _kept = life::keep(Subject::Primary(device))?;
        let Some(handle) = handle_of_primary(device) else { return Ok(None) };
        let _its = handle.keep()?;
        handle.context().map(Some)
    }

    /// Does something in a device's primary context, which is created for that if it is not active.
    pub fn in_primary<T>(device: CUdevice, work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
        let (driver, mut context) = (Driver::get()?, ptr::null_mut());
        // SAFETY: `context` is writable.
        unsafe { driver.cuDevicePrimaryCtxRetain(&raw mut context, device)? };
        let answer = ContextHandle(context).context().and_then(Self::push_of_program).and_then(|_current| work());
        // SAFETY: retained above, and no longer current.
        unsafe { driver.cuDevicePrimaryCtxRelease_v2(device)? };
        answer
    }

    /// The thread's current context, if it has one; `None` also if the driver is not initialised yet.
    pub fn of_thread() -> Result<Option<Self>, Failure> {
        let Some(handle) = ContextHandle::of_thread()? else { return Ok(None) };
        let context = handle.context()?;
        Ok(Some(Self { context, device: device_of_thread()?, pushed: false, _kept: None }))
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

    /// Makes `context` current on this thread until the value is dropped, which restores the previous one. The program does not end it
    /// meanwhile: its call waits.
    pub fn push(context: Context) -> Result<Self, Failure> {
        let kept = context.keep()?;
        Self::push_kept(context, Some(kept))
    }

    /// The same for a context that an argument of the program's call stands for.
    pub fn push_of_program(context: Context) -> Result<Self, Failure> {
        Self::push_kept(context, None)
    }

    fn push_kept(context: Context, kept: Option<Kept>) -> Result<Self, Failure> {
        // SAFETY: the context exists.
        unsafe { Driver::get()?.cuCtxPushCurrent_v2(context.handle.0)? };
        let device = device_of_thread().inspect_err(|_| pop())?;
        Ok(Self { context, device, pushed: true, _kept: kept })
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
        Self::push_of_program(ContextHandle(context).context()?)
    }

    /// The context.
    pub fn context(&self) -> Context {
        self.context
    }

    /// The context with which memory that is allocated here ends: in place of a green context, the primary one of its device.
    pub fn owner(&self) -> Context {
        let is_green = GREENS.existing().is_some_and(|greens| {
            let greens = greens.read().unpoisoned();
            greens.values().any(|(_, contexts)| contexts.contains(&self.context))
        });
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

fn device_of_thread() -> Result<CUdevice, Failure> {
    let mut device = 0;
    // SAFETY: `device` is writable, and a context is current.
    unsafe { Driver::get()?.cuCtxGetDevice(&raw mut device)? };
    Ok(device)
}

/// The handle of a device's primary context, if that is active. Nobody may be ending it.
pub(super) fn handle_of_primary(device: CUdevice) -> Option<ContextHandle> {
    /// It keeps its handle, also when it is reset (driver 580). To retain it only to learn the handle, as the first time, is not for
    /// every time: if the program releases it meanwhile, it is we who end it.
    static KNOWN: PerProcess<RwLock<BTreeMap<CUdevice, ContextHandle>>> = PerProcess::new(RwLock::default);
    let driver = Driver::get().ok()?;
    let (mut flags, mut active, mut context) = (0, 0, ptr::null_mut());
    // SAFETY: both are writable.
    unsafe { driver.cuDevicePrimaryCtxGetState(device, &raw mut flags, &raw mut active) }.ok().filter(|()| active != 0)?;
    let known = { KNOWN.get().read().unpoisoned().get(&device).copied() };
    known.filter(|handle| handle.context().is_ok()).or_else(|| {
        // SAFETY: `context` is writable. What is retained is released.
        unsafe {
            driver.cuDevicePrimaryCtxRetain(&raw mut context, device).ok()?;
            driver.cuDevicePrimaryCtxRelease_v2(device).ok()?;
        }
        KNOWN.get().write().unpoisoned().insert(device, ContextHandle(context));
        Some(ContextHandle(context))
    })
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
