//! Events: they show when work before them is over.

use super::{CUevent, Context, Current, Driver, Stream, StreamHandle};
use cudarc::driver::sys::CUevent_flags;
use std::ptr;
use vramctl_model::{Failure, code};

/// An event that fires when everything before it on its stream has finished.
#[derive(Debug)]
pub struct Event {
    pub(super) raw: CUevent,
    pub(super) context: Context,
}

// SAFETY: the handle names an object of the driver, which is thread-safe.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Records an event behind everything that the program has queued on a stream of the current context.
    pub fn after(current: &Current, stream: StreamHandle) -> Result<Self, Failure> {
        let event = Self::new(current)?;
        // SAFETY: our event, and a stream of the context, as the program passed it to CUDA.
        unsafe { Driver::get()?.cuEventRecord(event.raw, stream.raw())? };
        Ok(event)
    }

    /// Records it once more, behind everything that the program has queued on the stream by now: the same stream.
    pub fn record_again(&self, stream: StreamHandle) -> Result<(), Failure> {
        // SAFETY: our event, whose context exists as long as the stream.
        unsafe { Driver::get()?.cuEventRecord(self.raw, stream.raw()) }
    }

    /// Records the event behind everything that the program has queued in the event's context, on any stream. None of them may be being
    /// captured. Drivers before CUDA 12.5 cannot.
    pub(super) fn record_after_all(&self) -> Result<(), Failure> {
        // SAFETY: our event, and its context, which exists as long as the event.
        unsafe { Driver::get()?.cuCtxRecordEvent(self.context.handle().raw(), self.raw) }
    }

    /// An event of the current context. While a launch waits for room in a stream's queue, so does this.
    pub(super) fn new(current: &Current) -> Result<Self, Failure> {
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is writable.
        unsafe { Driver::get()?.cuEventCreate(&raw mut raw, CUevent_flags::CU_EVENT_DISABLE_TIMING as u32)? };
        Ok(Self { raw, context: current.context() })
    }

    /// The stream's context.
    pub fn context(&self) -> Context {
        self.context
    }

    /// Whether the work before it will no longer run: it has finished or failed, or its context has been destroyed. Not while that is ending:
    /// the driver is not asked then.
    pub fn is_over(&self) -> bool {
        let happened = Current::push(self.context).and_then(|_current| self.has_happened());
        happened.unwrap_or_else(|failure| failure.is_of_earlier_work() || failure.is_of_gone_context())
    }

    /// Lets later work of a stream wait for it. An error if its context is gone or ending.
    pub fn hold_up(&self, stream: StreamHandle) -> Result<(), Failure> {
        let _kept = self.context.keep()?;
        // SAFETY: our event, and a stream as the program passed it to CUDA.
        unsafe { Driver::get()?.cuStreamWaitEvent(stream.raw(), self.raw, 0) }
    }

    /// Waits until it is over, best effort.
    pub fn wait(&self) {
        // After an error it may not be over; `is_over` shows that later.
        let _ = Current::push(self.context).and_then(|_current| self.synchronize());
    }

    pub(super) fn record(context: Context, stream: &Stream) -> Result<Self, Failure> {
        let _current = Current::push(context)?;
        let mut event = ptr::null_mut();
        // SAFETY: `event` is writable.
        unsafe { Driver::get()?.cuEventCreate(&raw mut event, CUevent_flags::CU_EVENT_DEFAULT as u32)? };
        let event = Self { raw: event, context };
        // SAFETY: our event and our stream, in the same context.
        unsafe { Driver::get()?.cuEventRecord(event.raw, stream.raw())? };
        Ok(event)
    }

    pub(super) fn has_happened(&self) -> Result<bool, Failure> {
        // SAFETY: our event.
        match unsafe { Driver::get()?.cuEventQuery(self.raw) } {
            Err(Failure { code: code::NOT_READY, .. }) => Ok(false),
            answer => answer.map(|()| true),
        }
    }

    pub(super) fn synchronize(&self) -> Result<(), Failure> {
        // SAFETY: our event.
        unsafe { Driver::get()?.cuEventSynchronize(self.raw) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let Ok(_current) = Current::push(self.context) else { return };
        // SAFETY: our event, dropped once; the driver defers destroying one that has not fired.
        let _ = Driver::get().and_then(|driver| unsafe { driver.cuEventDestroy_v2(self.raw) });
    }
}
