//! Copies between device and host memory, and host memory that the copy engines reach directly.

use super::{CUdeviceptr, Context, Current, Driver, Failure, Stream};
use std::ffi::c_void;
use std::ptr::NonNull;

/// How much is queued before the copy is waited for, in bytes. Large enough that the wait (some microseconds) does not
/// show at the link's speed, small enough that progress is seen.
const WAIT_EVERY: usize = 256 << 20;

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
    /// Registers host memory for every context of the process.
    ///
    /// # Safety
    /// The memory must stay mapped until the value is dropped.
    pub unsafe fn register(address: NonNull<u8>, bytes: usize, current: &Current) -> Result<Self, Failure> {
        const PORTABLE: u32 = 1; // CU_MEMHOSTREGISTER_PORTABLE
        // SAFETY: the range is mapped, by the caller's promise.
        unsafe { Driver::get()?.cuMemHostRegister_v2(address.as_ptr().cast(), bytes, PORTABLE)? };
        Ok(Self { address, context: current.context() })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // Needs a context. Where the one of the registration is gone, the registration went with it.
        let Ok(_current) = Current::push(self.context) else { return };
        // SAFETY: registered in `register` and still mapped, by the promise made there.
        let answer = Driver::get().and_then(|driver| unsafe { driver.cuMemHostUnregister(self.address.as_ptr().cast()) });
        if let Err(failure) = answer {
            log::debug!("{failure} for a backup's host memory");
        }
    }
}

/// Copies device memory of the current context to host memory. When it returns, with or without an error, the device is
/// done with both. `done` is told of each part's bytes.
///
/// # Safety
/// `to` must be writable for `bytes` and used by nobody else meanwhile.
pub unsafe fn copy_from_device(
    current: &Current,
    to: *mut u8,
    from: CUdeviceptr,
    bytes: usize,
    done: &mut dyn FnMut(u64),
) -> Result<(), Failure> {
    let driver = Driver::get()?;
    in_parts(current, bytes, done, |stream, offset, part| {
        // SAFETY: inside the range that the caller promised.
        unsafe { driver.cuMemcpyDtoHAsync_v2(to.add(offset).cast::<c_void>(), from + offset as u64, part, stream.raw()) }
    })
}

/// Copies host memory to device memory of the current context. When it returns, with or without an error, the device is
/// done with both. `done` is told of each part's bytes.
///
/// # Safety
/// `from` must be readable for `bytes` and not change meanwhile.
pub unsafe fn copy_to_device(
    current: &Current,
    to: CUdeviceptr,
    from: *const u8,
    bytes: usize,
    done: &mut dyn FnMut(u64),
) -> Result<(), Failure> {
    let driver = Driver::get()?;
    in_parts(current, bytes, done, |stream, offset, part| {
        // SAFETY: inside the range that the caller promised.
        unsafe { driver.cuMemcpyHtoDAsync_v2(to + offset as u64, from.add(offset).cast::<c_void>(), part, stream.raw()) }
    })
}

fn in_parts(
    current: &Current,
    bytes: usize,
    done: &mut dyn FnMut(u64),
    queue: impl Fn(&Stream, usize, usize) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let stream = Stream::create()?;
    for offset in (0..bytes).step_by(WAIT_EVERY) {
        let part = WAIT_EVERY.min(bytes - offset);
        queue(&stream, offset, part).and_then(|()| stream.synchronize()).inspect_err(|_| {
            // The caller is about to unmap or free what may still be copied. A second way of waiting, for that the first
            // has failed; if it fails as well, the context is lost and nothing runs in it any more.
            let _ = current.wait_for_work();
        })?;
        done(part as u64);
    }
    Ok(())
}
