//! Copies between device and host memory, and pinned host memory.

use super::{CUdeviceptr, Context, Current, Driver, Event, Manner, RelaxedCapture, Stream, pointer_attribute, wait_for_work};
use cudarc::driver::sys::CUpointer_attribute;
use std::ptr::{self, NonNull};
use vramctl_host::exit;
use vramctl_model::{Failure, code};

/// Host memory pinned by registering it with the driver, so that copies run at the link's speed.
#[derive(Debug)]
pub struct Pinned {
    address: NonNull<u8>,
    context: Context,
}

// SAFETY: a registration belongs to the process, not to a thread.
unsafe impl Send for Pinned {}
// SAFETY: as above; there is no interior mutability.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// The context that it was registered in. The registration ends with it.
    pub fn context(&self) -> Context {
        self.context
    }

    /// Registers host memory for all contexts of the process.
    ///
    /// # Safety
    /// The memory must stay mapped until it is unregistered.
    pub unsafe fn register(address: NonNull<u8>, bytes: usize, current: &Current) -> Result<Self, Failure> {
        const PORTABLE: u32 = 1; // CU_MEMHOSTREGISTER_PORTABLE
        let _relaxed = RelaxedCapture::enter();
        // SAFETY: the caller promises that the range is mapped.
        unsafe { Driver::get()?.cuMemHostRegister_v2(address.as_ptr().cast(), bytes, PORTABLE)? };
        Ok(Self { address, context: current.context() })
    }
}

impl Pinned {
    /// Unregisters the memory. On `Err` it is still registered and must stay mapped as it is: a copy to its addresses would go
    /// to the pages that were mapped at registration.
    pub fn unregister(self) -> Result<(), Self> {
        let _relaxed = RelaxedCapture::enter();
        // If the context has been destroyed, so has the registration. The driver waits for the context's work.
        let unregistered = exit::while_waiting(|| {
            let _current = Current::push(self.context)?;
            // SAFETY: registered by `register`, whose caller keeps it mapped.
            unsafe { Driver::get()?.cuMemHostUnregister(self.address.as_ptr().cast()) }
        });
        match unregistered {
            Err(failure) if !failure.is_of_gone_context() && failure.code != code::HOST_MEMORY_NOT_REGISTERED => {
                log::debug!("cannot unregister a backup's host memory: {failure}; will retry");
                Err(self)
            }
            _ => Ok(()),
        }
    }
}

/// The address of pinned host memory for kernels of the current context; an error if they cannot access it.
pub fn device_address(host: *const u8) -> Result<CUdeviceptr, Failure> {
    pointer_attribute(host as u64, CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
}

/// Pinned host memory allocated by the driver, to stage copies when our own memory cannot be registered.
#[derive(Debug)]
pub struct PinnedBuffer {
    address: NonNull<u8>,
    bytes: usize,
    context: Context,
}

// SAFETY: plain memory, owned by the value.
unsafe impl Send for PinnedBuffer {}

impl PinnedBuffer {
    /// Allocates `bytes`, for all contexts of the process.
    pub fn new(bytes: usize, current: &Current) -> Result<Self, Failure> {
        const PORTABLE: u32 = 1; // CU_MEMHOSTALLOC_PORTABLE
        let mut address = ptr::null_mut();
        // SAFETY: `address` is writable.
        unsafe { Driver::get()?.cuMemHostAlloc(&raw mut address, bytes, PORTABLE)? };
        let address = NonNull::new(address.cast()).ok_or(Failure { call: "cuMemHostAlloc", code: code::OUT_OF_MEMORY })?;
        Ok(Self { address, bytes, context: current.context() })
    }

    /// The first byte.
    pub fn address(&self) -> *mut u8 {
        self.address.as_ptr()
    }

    /// The size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        let _relaxed = RelaxedCapture::enter();
        let Ok(_current) = Current::push(self.context) else { return };
        // SAFETY: allocated by `new`, and no copy still uses it.
        let _ = Driver::get().and_then(|driver| unsafe { driver.cuMemFreeHost(self.address.as_ptr().cast()) });
    }
}

/// The direction of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the device to the host.
    FromDevice,
    /// From the host to the device.
    ToDevice,
}

/// A queue of copies, with one stream of ours per context. [`Lane::finish`] waits for them, and so does dropping the lane: after
/// either, no copy is in flight.
#[derive(Default)]
pub struct Lane {
    streams: Vec<(Context, Stream)>,
}

impl Lane {
    /// Queues a copy between host memory and a context's device memory.
    ///
    /// # Safety
    /// Until the lane has finished, the host memory must stay valid: for a copy from the device, writable and used by nobody
    /// else; for a copy to the device, readable and unchanged.
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
        // SAFETY: the caller's promise covers the host side; a wrong device address is an error.
        unsafe {
            match direction {
                Direction::FromDevice => driver.cuMemcpyDtoHAsync_v2(host.cast(), device, bytes, stream),
                Direction::ToDevice => driver.cuMemcpyHtoDAsync_v2(device, host.cast(), bytes, stream),
            }
        }
    }

    /// Queues zeros for a context's device memory, in order with the copies.
    pub fn queue_zeros(&mut self, context: Context, device: CUdeviceptr, bytes: usize) -> Result<(), Failure> {
        let driver = Driver::get()?;
        let _current = Current::push(context)?;
        let stream = self.stream(context)?.raw();
        // SAFETY: touches device memory alone; a wrong address is an error.
        unsafe { driver.cuMemsetD8Async(device, 0, bytes, stream) }
    }

    /// Queues a kernel in order with the copies; `launch` gets the stream. `current` must be the current context.
    pub fn queue_kernel(&mut self, current: &Current, launch: impl FnOnce(&Stream) -> Result<(), Failure>) -> Result<(), Failure> {
        launch(self.stream(current.context())?)
    }

    /// A context's stream, created at first use. The context must be current.
    fn stream(&mut self, context: Context) -> Result<&Stream, Failure> {
        if !self.streams.iter().any(|(known, _)| *known == context) {
            self.streams.push((context, Stream::create()?));
        }
        let found = self.streams.iter().find(|(known, _)| *known == context);
        found.map(|(_, stream)| stream).ok_or(Failure { call: "cuStreamCreate", code: code::UNKNOWN })
    }

    /// Marks the current end of the queue in one context.
    pub fn mark_in(&mut self, context: Context) -> Result<Mark, Failure> {
        let _current = Current::push(context)?;
        Ok(Mark(vec![Event::record(context, self.stream(context)?)?]))
    }

    /// Marks the current end of the queue.
    pub fn mark(&self) -> Result<Mark, Failure> {
        self.streams.iter().map(|(context, stream)| Event::record(*context, stream)).collect::<Result<_, _>>().map(Mark)
    }

    /// Waits for all queued work. No copy is in flight afterwards, even after an error.
    pub fn finish(&self) -> Result<(), Failure> {
        let mut first = Ok(());
        for (context, stream) in &self.streams {
            let finished = stream.synchronize().inspect_err(|_| {
                // The caller is about to unmap or free memory that a copy may still use, so wait in another way. If that
                // fails too, the context is lost and nothing runs in it.
                let _ = wait_for_work(*context, Manner::Unnoticed, || true);
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

/// A position in a lane's queue.
pub struct Mark(Vec<Event>);

impl Mark {
    /// Whether everything queued before it has finished.
    pub fn is_past(&self) -> Result<bool, Failure> {
        self.0.iter().try_fold(true, |past, event| Ok(past && event.has_happened()?))
    }

    /// Waits for everything queued before it.
    pub fn wait(&self) -> Result<(), Failure> {
        self.0.iter().try_for_each(Event::synchronize)
    }

    /// Milliseconds between an earlier mark and this one, by the device's clock; `None` unless both have an event in the
    /// context. Both must be past.
    pub fn since(&self, earlier: &Self, context: Context) -> Option<f32> {
        let event_of = |mark: &Self| mark.0.iter().find(|event| event.context == context).map(|event| event.raw);
        let (begin, end) = (event_of(earlier)?, event_of(self)?);
        let mut milliseconds = 0.0;
        // SAFETY: `milliseconds` is writable; both events are ours.
        unsafe { Driver::get().ok()?.cuEventElapsedTime(&raw mut milliseconds, begin, end).ok()? };
        Some(milliseconds)
    }
}
