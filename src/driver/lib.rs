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
pub use copy::{Direction, Lane, Mark, Pinned, PinnedBuffer, device_address};
use cudarc::driver::sys::{CUcontext, CUevent, CUpointer_attribute, CUstream};
pub use cudarc::driver::sys::{CUdevice, CUdeviceptr};
pub use kernel::{Parts, Resident};
pub use nvml::{holders, uuid, uuid_of_index};
pub use survey::{Gpu, Survey, survey};
pub use table::Driver;
pub use vmm::{Addresses, PHYSICAL_PIECE, Physical, granularity, leftover_bytes, let_in, supports_vmm, sweep, unmap};

use vramctl_model::{Failure, code};

/// Where an allocation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// The context in which the program allocated.
    pub context: Context,
    /// That context's device.
    pub device: CUdevice,
    /// The first address.
    pub address: CUdeviceptr,
    /// The length in bytes.
    pub bytes: usize,
}

/// Bytes of device memory that are free and that there are, on the device of the current context.
pub fn memory_info() -> Result<(u64, u64), Failure> {
    let (mut free, mut total) = (0usize, 0usize);
    // SAFETY: both are writable.
    unsafe { Driver::get()?.cuMemGetInfo_v2(&raw mut free, &raw mut total)? };
    Ok((free as u64, total as u64))
}

/// Whether so much of a context's device is free that the library may take a little for purposes of its own: nobody is to
/// be short of memory for them.
pub fn has_to_spare(context: Context) -> bool {
    /// In bytes; far more than it takes.
    const SPARE: u64 = 64 << 20;
    Current::push(context).and_then(|_current| memory_info()).is_ok_and(|(free, _)| free >= SPARE)
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
