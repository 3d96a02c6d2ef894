//! Copies between device and host memory, and host memory that the copy engines reach directly.

use super::{CUdeviceptr, CUevent, Context, Current, Driver, RelaxedCapture, Stream, StreamHandle, pointer_attribute};
use cudarc::driver::sys::{CUevent_flags, CUpointer_attribute};
use std::ptr::{self, NonNull};
use vramctl_model::{Failure, code};

/// Host memory registered with the driver (page-locked): copies to and from it run at the link's speed.
#[derive(Debug)]
pub struct Pinned {
    address: NonNull<u8>,
    context: Context,
}

// SAFETY: a registration is a fact about the process, not about a thread.
unsafe impl Send for Pinned {}
// SAFETY: as above; there is no interior state.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// The context that it was registered in, and goes with.
    pub fn context(&self) -> Context {
        self.context
    }

    /// Registers host memory for every context of the process.
    ///
    /// # Safety
    /// The memory must stay mapped until it is unregistered.
    pub unsafe fn register(address: NonNull<u8>, bytes: usize, current: &Current) -> Result<Self, Failure> {
        const PORTABLE: u32 = 1; // CU_MEMHOSTREGISTER_PORTABLE
        let _relaxed = RelaxedCapture::enter();
        // SAFETY: the range is mapped, by the caller's promise.
        unsafe { Driver::get()?.cuMemHostRegister_v2(address.as_ptr().cast(), bytes, PORTABLE)? };
        Ok(Self { address, context: current.context() })
    }
}

impl Pinned {
    /// Takes the memory away from the device. On `Err` the driver still knows it: it must stay as it is, for a copy to its
    /// addresses would go to the pages that were there when it was registered.
    pub fn unregister(self) -> Result<(), Self> {
        let _relaxed = RelaxedCapture::enter();
        // Needs a context. Where the one of the registration is gone, the registration went with it.
        let unregistered = Current::push(self.context).and_then(|_current| {
            // SAFETY: registered in `register` and still mapped, by the promise made there.
            unsafe { Driver::get()?.cuMemHostUnregister(self.address.as_ptr().cast()) }
        });
        match unregistered {
            Err(failure) if !failure.is_of_gone_context() && failure.code != code::HOST_MEMORY_NOT_REGISTERED => {
                log::debug!("{failure} for a backup's host memory; will be tried again");
                Err(self)
            }
            _ => Ok(()),
        }
    }
}

/// Where kernels of the current context find host memory; an error where they do not reach it.
pub fn device_address(host: *const u8) -> Result<CUdeviceptr, Failure> {
    pointer_attribute(host as u64, CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
}

/// Page-locked host memory of the driver's making, to copy through where memory of our own cannot be registered.
#[derive(Debug)]
pub struct PinnedBuffer {
    address: NonNull<u8>,
    bytes: usize,
    context: Context,
}

// SAFETY: plain memory that the value owns.
unsafe impl Send for PinnedBuffer {}

impl PinnedBuffer {
    /// So many bytes, for every context of the process.
    pub fn new(bytes: usize, current: &Current) -> Result<Self, Failure> {
        const PORTABLE: u32 = 1; // CU_MEMHOSTALLOC_PORTABLE
        let mut address = ptr::null_mut();
        // SAFETY: `address` is writable.
        unsafe { Driver::get()?.cuMemHostAlloc(&raw mut address, bytes, PORTABLE)? };
        let address = NonNull::new(address.cast()).ok_or(Failure { call: "cuMemHostAlloc", code: code::OUT_OF_MEMORY })?;
        Ok(Self { address, bytes, context: current.context() })
    }

    /// Its first byte.
    pub fn address(&self) -> *mut u8 {
        self.address.as_ptr()
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        let _relaxed = RelaxedCapture::enter();
        let Ok(_current) = Current::push(self.context) else { return };
        // SAFETY: allocated in `new`, and no copy of ours uses it any more.
        let _ = Driver::get().and_then(|driver| unsafe { driver.cuMemFreeHost(self.address.as_ptr().cast()) });
    }
}

/// Which way a copy goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the device to the host.
    FromDevice,
    /// From the host to the device.
    ToDevice,
}

/// Copies in order, one stream of ours in each context. What is queued is waited for by [`Lane::finish`], and at the
/// latest when the lane is dropped: nothing is being copied any more after that.
#[derive(Default)]
pub struct Lane {
    streams: Vec<(Context, Stream)>,
}

impl Lane {
    /// Queues a copy between host memory and device memory of a context.
    ///
    /// # Safety
    /// Until the lane has finished, the host memory must stay what it is: writable and used by nobody else where the copy
    /// comes from the device, readable and unchanged where it goes there.
    pub unsafe fn queue(
        &mut self,
        direction: Direction,
        context: Context,
        device: CUdeviceptr,
        host: *mut u8,
        bytes: usize,
    ) -> Result<(), Failure> {
        let driver = Driver::get()?;
        let _current = Current::push(context)?;
        let stream = self.stream(context)?.raw();
        // SAFETY: the host side by the caller's promise; a wrong device side is answered with an error.
        unsafe {
            match direction {
                Direction::FromDevice => driver.cuMemcpyDtoHAsync_v2(host.cast(), device, bytes, stream),
                Direction::ToDevice => driver.cuMemcpyHtoDAsync_v2(device, host.cast(), bytes, stream),
            }
        }
    }

    /// Queues work of a kernel's in the order of the copies; `launch` gets the stream for it. Its context is current.
    pub fn queue_kernel(&mut self, current: &Current, launch: impl FnOnce(&Stream) -> Result<(), Failure>) -> Result<(), Failure> {
        launch(self.stream(current.context())?)
    }

    /// The stream in a context, made at its first use. The context is current.
    fn stream(&mut self, context: Context) -> Result<&Stream, Failure> {
        if !self.streams.iter().any(|(known, _)| *known == context) {
            self.streams.push((context, Stream::create()?));
        }
        let found = self.streams.iter().find(|(known, _)| *known == context);
        found.map(|(_, stream)| stream).ok_or(Failure { call: "cuStreamCreate", code: code::UNKNOWN })
    }

    /// Marks what was queued in one context so far.
    pub fn mark_in(&mut self, context: Context) -> Result<Mark, Failure> {
        let _current = Current::push(context)?;
        Ok(Mark(vec![Event::record(context, self.stream(context)?)?]))
    }

    /// Marks what was queued so far.
    pub fn mark(&self) -> Result<Mark, Failure> {
        self.streams.iter().map(|(context, stream)| Event::record(*context, stream)).collect::<Result<_, _>>().map(Mark)
    }

    /// Waits until all that was queued is done. After an error, too, nothing is being copied any more.
    pub fn finish(&self) -> Result<(), Failure> {
        let mut first = Ok(());
        for (context, stream) in &self.streams {
            let finished = stream.synchronize().inspect_err(|_| {
                // The caller is about to unmap or free what may still be copied. A second way of waiting, for that the
                // first has failed; if it fails as well, the context is lost and nothing runs in it any more.
                let _ = Current::push(*context).and_then(|current| current.wait_for_work());
            });
            first = first.and(finished);
        }
        first
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let _ = self.finish();
    }
}

/// A place in the order of a lane's copies.
pub struct Mark(Vec<Event>);

impl Mark {
    /// Whether all that was queued before it is done.
    pub fn is_past(&self) -> Result<bool, Failure> {
        self.0.iter().try_fold(true, |past, event| Ok(past && event.has_happened()?))
    }

    /// Waits until all that was queued before it is done.
    pub fn wait(&self) -> Result<(), Failure> {
        self.0.iter().try_for_each(Event::synchronize)
    }

    /// Milliseconds from an earlier mark to this one by the clock of a context's device, if both mark something there. Both
    /// are past.
    pub fn since(&self, earlier: &Self, context: Context) -> Option<f32> {
        let event_of = |mark: &Self| mark.0.iter().find(|event| event.context == context).map(|event| event.raw);
        let (begin, end) = (event_of(earlier)?, event_of(self)?);
        let mut milliseconds = 0.0;
        // SAFETY: `milliseconds` is writable; both events are ours.
        unsafe { Driver::get().ok()?.cuEventElapsedTime(&raw mut milliseconds, begin, end).ok()? };
        Some(milliseconds)
    }
}

/// Happens when all that was on a stream before it is done.
#[derive(Debug)]
pub struct Event {
    raw: CUevent,
    context: Context,
}

// SAFETY: the handle names an object of the driver, which is thread-safe.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Of all that the program has put on a stream of the current context so far.
    pub fn after(current: &Current, stream: StreamHandle) -> Result<Self, Failure> {
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is writable.
        unsafe { Driver::get()?.cuEventCreate(&raw mut raw, CUevent_flags::CU_EVENT_DISABLE_TIMING as u32)? };
        let event = Self { raw, context: current.context() };
        // SAFETY: an event of ours, and what the program handed to CUDA as a stream of the context.
        unsafe { Driver::get()?.cuEventRecord(event.raw, stream.raw())? };
        Ok(event)
    }

    /// The context of the stream.
    pub fn context(&self) -> Context {
        self.context
    }

    /// Whether nothing that was on the stream will run any more: it is done, has failed, or its context is gone.
    pub fn is_over(&self) -> bool {
        let happened = Current::push(self.context).and_then(|_current| self.has_happened());
        happened.unwrap_or_else(|failure| failure.is_of_earlier_work() || failure.is_of_gone_context())
    }

    /// Waits until it is over.
    pub fn wait(&self) {
        // After an error it is not known to be over, and is asked later.
        let _ = Current::push(self.context).and_then(|_current| self.synchronize());
    }

    fn record(context: Context, stream: &Stream) -> Result<Self, Failure> {
        let _current = Current::push(context)?;
        let mut event = ptr::null_mut();
        // SAFETY: `event` is writable.
        unsafe { Driver::get()?.cuEventCreate(&raw mut event, CUevent_flags::CU_EVENT_DEFAULT as u32)? };
        let event = Self { raw: event, context };
        // SAFETY: an event and a stream of ours, of the same context.
        unsafe { Driver::get()?.cuEventRecord(event.raw, stream.raw())? };
        Ok(event)
    }

    fn has_happened(&self) -> Result<bool, Failure> {
        // SAFETY: an event of ours.
        match unsafe { Driver::get()?.cuEventQuery(self.raw) } {
            Err(Failure { code: code::NOT_READY, .. }) => Ok(false),
            answer => answer.map(|()| true),
        }
    }

    fn synchronize(&self) -> Result<(), Failure> {
        // SAFETY: an event of ours.
        unsafe { Driver::get()?.cuEventSynchronize(self.raw) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let Ok(_current) = Current::push(self.context) else { return };
        // SAFETY: created by us and dropped once; one that has not happened yet goes when it has.
        let _ = Driver::get().and_then(|driver| unsafe { driver.cuEventDestroy_v2(self.raw) });
    }
}
