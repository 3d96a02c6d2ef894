//! The only calls into CUDA's driver: the function table, raw status codes, and objects that undo themselves.
//!
//! Nothing above this module calls the driver, and this module knows nothing of tags, backups or sockets.

mod context;
mod copy;
mod kernel;
mod nvml;
mod survey;
mod table;
mod vmm;

pub use context::{Context, Current, RelaxedCapture, Stream, StreamHandle};
pub use copy::{Direction, Lane, Mark, Pinned, Staging, device_address};
use cudarc::driver::sys::{CUcontext, CUevent, CUpointer_attribute, CUstream};
pub use cudarc::driver::sys::{CUdevice, CUdeviceptr};
pub use kernel::{Parts, Resident};
pub use nvml::{Holder, holders, uuid, uuid_of_index};
pub use survey::{Gpu, Survey, survey};
pub use table::{Driver, Status, code};
pub use vmm::{Addresses, Memory, PIECE as MEMORY_PIECE, Reservation, granularity, leftover_bytes, let_in, supports_vmm, sweep, unmap};

use std::ffi::CStr;
use std::fmt;

/// A driver call that did not succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure {
    /// The function's name.
    pub call: &'static str,
    /// What it returned.
    pub code: Status,
}

impl Failure {
    fn check(call: &'static str, code: Status) -> Result<(), Self> {
        if code == code::SUCCESS { Ok(()) } else { Err(Self { call, code }) }
    }

    /// Whether it is the trace of GPU work that failed: such an error stays, and everything that needs the context answers
    /// with it from then on.
    pub fn is_of_earlier_work(self) -> bool {
        code::OF_WORK.contains(&self.code)
    }

    /// Whether a stream capture is what the call failed on.
    pub fn is_capture(self) -> bool {
        (code::CAPTURE_UNSUPPORTED..=code::CAPTURE_WRONG_THREAD).contains(&self.code)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match error_name(self.code) {
            Some(name) => write!(out, "{} answered {} ({name})", self.call, self.code),
            None => write!(out, "{} answered {}", self.call, self.code),
        }
    }
}

impl std::error::Error for Failure {}

/// The driver's own name for a code, such as `CUDA_ERROR_ILLEGAL_ADDRESS`.
fn error_name(code: Status) -> Option<String> {
    let driver = Driver::get().ok()?;
    let mut name = std::ptr::null();
    // SAFETY: `name` is writable; the driver answers null or a string of its own that lives for ever.
    unsafe {
        driver.cuGetErrorName(code, &raw mut name).ok()?;
        (!name.is_null()).then(|| CStr::from_ptr(name).to_string_lossy().into_owned())
    }
}

/// Bytes of device memory that are free and that there are, on the device of the current context.
pub fn memory_info() -> Result<(u64, u64), Failure> {
    let (mut free, mut total) = (0usize, 0usize);
    // SAFETY: both are writable.
    unsafe { Driver::get()?.cuMemGetInfo_v2(&raw mut free, &raw mut total)? };
    Ok((free as u64, total as u64))
}

/// Whether so much of a context's device is free, besides so many bytes, that the library may take a little for purposes of
/// its own: nobody is to be short of memory for them.
pub fn has_to_spare(context: Context, besides: u64) -> bool {
    /// In bytes; far more than it takes.
    const SPARE: u64 = 64 << 20;
    Current::push(context).and_then(|_current| memory_info()).is_ok_and(|(free, _)| free >= SPARE.saturating_add(besides))
}

/// An attribute of 64 bits of what is at an address, none of which is 0; an error where the driver does not know it.
fn pointer_attribute(address: CUdeviceptr, attribute: CUpointer_attribute) -> Result<u64, Failure> {
    let (mut value, attribute) = (0u64, attribute as u32);
    let mut place = (&raw mut value).cast();
    // SAFETY: one attribute and one place for it, which is large enough.
    unsafe { Driver::get()?.cuPointerGetAttributes(1, &raw const attribute, &raw mut place, address)? };
    // An address that it does not know is no error to this function, and has attributes that are 0.
    let known = if value == 0 { code::INVALID_VALUE } else { code::SUCCESS };
    Failure::check("cuPointerGetAttributes", known).map(|()| value)
}

/// A device attribute; 0 where the driver does not know it.
fn attribute(device: CUdevice, attribute: u32) -> i32 {
    attribute_if_known(device, attribute).unwrap_or(0)
}

fn attribute_if_known(device: CUdevice, attribute: u32) -> Option<i32> {
    let mut value = 0;
    let answer = Driver::get().and_then(|driver| {
        // SAFETY: `value` is writable; an unknown device or attribute is an error.
        unsafe { driver.cuDeviceGetAttribute(&raw mut value, attribute, device) }
    });
    answer.ok().map(|()| value)
}
