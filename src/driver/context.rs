//! Contexts and streams: what is current on a thread, and waiting for a device.

use super::{CUcontext, CUdevice, CUstream, Driver, Failure, code};
use cudarc::driver::sys::{CUstream_flags, CUstreamCaptureMode, CUstreamCaptureStatus};
use std::ffi::c_void;
use std::ptr;

/// A context, by its opaque handle: never dereferenced here, and any thread may use it. One that has been destroyed is
/// answered with an error by the driver.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Context(CUcontext);
// SAFETY: the handle names an object of the driver, which is thread-safe.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// A stream of the program, by its opaque handle, which is never dereferenced here. The layout is the handle's, so that
/// hooked functions can take it as it comes.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamHandle(CUstream);

impl StreamHandle {
    /// The null stream, `cudaStreamLegacy` or `cudaStreamPerThread`: handles that name another stream in each context, and
    /// the last in each thread.
    pub fn is_default(self) -> bool {
        self.0 as usize <= 2
    }

    /// Whether it is being captured into a graph.
    pub fn is_capturing(self) -> bool {
        let mut status = 0;
        // SAFETY: a handle that the program gave to CUDA as a stream; `status` is writable.
        let answer = Driver::get().and_then(|driver| unsafe { driver.cuStreamIsCapturing(self.0, &raw mut status) });
        match answer {
            Ok(()) => status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as u32,
            // The legacy stream cannot be asked while another stream is being captured, and not be used then either.
            Err(failure) => failure.is_capture(),
        }
    }

    /// Waits for everything on it.
    pub fn synchronize(self) -> Result<(), Failure> {
        // SAFETY: a handle that the program gave to CUDA as a stream, or our own.
        unsafe { Driver::get()?.cuStreamSynchronize(self.0) }
    }
}

/// A context that is current on this thread, with its device. Made current for as long as it lives by [`Current::push`],
/// or found there by [`Current::of_thread`].
#[derive(Debug)]
pub struct Current {
    context: Context,
    device: CUdevice,
    pushed: bool,
}

impl Current {
    /// The thread's current context, if it has one. A driver that is not initialised yet counts as none.
    pub fn of_thread() -> Result<Option<Self>, Failure> {
        let mut context = ptr::null_mut();
        // SAFETY: `context` is writable.
        match unsafe { Driver::get()?.cuCtxGetCurrent(&raw mut context) } {
            Ok(()) if context.is_null() => Ok(None),
            Ok(()) => Self::with_device(Context(context), false).map(Some),
            Err(Failure { code: code::NOT_INITIALIZED, .. }) => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// Makes `context` current on this thread until the value is dropped; what was current before is current again then.
    pub fn push(context: Context) -> Result<Self, Failure> {
        // SAFETY: `context` was current on some thread of this process when it was recorded; one that has been
        // destroyed since is answered with an error.
        unsafe { Driver::get()?.cuCtxPushCurrent_v2(context.0)? };
        Self::with_device(context, true).inspect_err(|_| pop())
    }

    /// The context of a stream, made current until the value is dropped. The default streams are those of the thread's
    /// current context.
    pub fn push_of_stream(stream: StreamHandle) -> Result<Self, Failure> {
        let mut context = ptr::null_mut();
        // SAFETY: `stream` is what the program handed to CUDA as a stream; `context` is writable.
        unsafe { Driver::get()?.cuStreamGetCtx(stream.0, &raw mut context)? };
        Self::push(Context(context))
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

    /// The context's device.
    pub fn device(&self) -> CUdevice {
        self.device
    }

    /// Waits until the context's work has finished, on all streams. An error that the work left behind is returned.
    ///
    /// Not by `cuCtxSynchronize`, which makes any stream capture in the context invalid, whatever the thread's capture
    /// mode (observed with driver 580). Taking a page of host memory away from the device waits for the same work,
    /// because the device must be done with the page before the system may have it back, and in the relaxed mode it
    /// leaves captures alone. Where registering memory is not possible, the plain way is all there is.
    pub fn wait_for_work(&self) -> Result<(), Failure> {
        let _relaxed = RelaxedCapture::enter();
        let driver = Driver::get()?;
        let Some(page) = Page::new() else {
            // SAFETY: a context is current; no arguments.
            return unsafe { driver.cuCtxSynchronize() };
        };
        // SAFETY: the page is ours and stays mapped until it is unregistered.
        match unsafe { driver.cuMemHostRegister_v2(page.0, PAGE, 0) } {
            // SAFETY: registered just now.
            Ok(()) => unsafe { driver.cuMemHostUnregister(page.0) },
            // SAFETY: a context is current; no arguments.
            Err(_) => unsafe { driver.cuCtxSynchronize() },
        }
    }
}

const PAGE: usize = 4096;

/// A page of host memory, of a thread's own for as long as it lives.
struct Page(*mut c_void);

impl Page {
    fn new() -> Option<Self> {
        // SAFETY: a new private mapping that touches no other memory.
        let page = unsafe {
            libc::mmap(ptr::null_mut(), PAGE, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
        };
        (page != libc::MAP_FAILED).then_some(Self(page))
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: our own mapping; nothing refers to it any more.
        unsafe { libc::munmap(self.0, PAGE) };
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
    // SAFETY: `context` is writable. A failure means the context is gone, and then nothing is left to restore.
    let _ = Driver::get().and_then(|driver| unsafe { driver.cuCtxPopCurrent_v2(&raw mut context) });
}

/// Calls of this thread do not disturb a stream capture that another thread has under way, for as long as this lives.
///
/// Memory management calls are "potentially unsafe" to CUDA while somebody captures in the global mode, and would
/// invalidate that capture; the memory managed here is not part of anybody's graph
/// (`cuThreadExchangeStreamCaptureMode` in the driver API's reference).
pub struct RelaxedCapture {
    before: u32,
}

impl RelaxedCapture {
    /// Enters the relaxed mode. A driver that does not know modes has nothing to disturb.
    pub fn enter() -> Self {
        Self { before: exchange_capture_mode(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as u32) }
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        exchange_capture_mode(self.before);
    }
}

fn exchange_capture_mode(mut mode: u32) -> u32 {
    // SAFETY: `mode` is writable and holds a valid mode.
    let _ = Driver::get().and_then(|driver| unsafe { driver.cuThreadExchangeStreamCaptureMode(&raw mut mode) });
    mode
}

/// A stream of our own, on which nothing waits for the program's work.
pub struct Stream(CUstream);

impl Stream {
    /// A stream of the current context.
    pub fn create() -> Result<Self, Failure> {
        let mut stream = ptr::null_mut();
        // SAFETY: `stream` is writable.
        unsafe { Driver::get()?.cuStreamCreate(&raw mut stream, CUstream_flags::CU_STREAM_NON_BLOCKING as u32)? };
        Ok(Self(stream))
    }

    /// Waits for everything on the stream.
    pub fn synchronize(&self) -> Result<(), Failure> {
        StreamHandle(self.0).synchronize()
    }

    pub(super) fn raw(&self) -> CUstream {
        self.0
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created by us and dropped once. Work still on it goes on until done; whoever queued it waited, or
        // keeps the memory (see `Copies`).
        let _ = Driver::get().and_then(|driver| unsafe { driver.cuStreamDestroy_v2(self.0) });
    }
}
