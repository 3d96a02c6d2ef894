//! What CUDA serves counts against the limit of this process (`VRAMCTL_LIMIT`), and the program is shown what the limit leaves.

use crate::call::Call;
use crate::pools;
use std::ffi::c_void;
use vramctl_core::limit::{self, Charge, Growth};
use vramctl_core::memory::limited;
use vramctl_driver::{CUdevice, Current};
use vramctl_model::{Error, Shown, StatusCode, code};

/// Whether this process's memory is not counted: it has no limit, and does not share its GPUs.
#[inline]
pub fn is_uncounted() -> bool {
    !limit::counts()
}

/// What a request that CUDA serves counts.
#[derive(Default)]
pub struct Admitted {
    /// As long as its memory exists.
    pub charge: Option<Charge>,
    /// Until it is answered.
    pub growth: Option<Growth>,
}

/// Charges memory of a device.
pub fn on(device: CUdevice, bytes: usize) -> Result<Admitted, Error> {
    Ok(Admitted { charge: limited::charge_unmanaged(device, bytes)?, growth: None })
}

/// Charges a request to a pool. What is not this process's, or not a device's, does not count.
pub fn in_pool(pool: *mut c_void, bytes: usize) -> Result<Admitted, Error> {
    let Some(device) = pools::device_of(pool) else { return Ok(Admitted::default()) };
    // SAFETY: it is known.
    Ok(Admitted { charge: None, growth: unsafe { limited::charge_pool(device, pool, bytes) }? })
}

/// Changes what the driver has answered to `cuMemGetInfo`.
///
/// # Safety
/// Both must be what the driver has written.
pub unsafe fn show(free: *mut usize, total: *mut usize) {
    let Ok(Some(current)) = Current::of_thread() else { return };
    // SAFETY: the caller's promise.
    unsafe {
        if let Some(shown) = limited::shown(current.device(), free.read() as u64, total.read() as u64) {
            let Shown { free: left, total: all } = shown;
            (*free, *total) = (left as usize, all as usize);
        }
    }
}

/// `cuDeviceTotalMem`: not more than the limit.
pub unsafe fn total_memory(call: &mut Call, bytes: *mut usize, device: CUdevice) -> StatusCode {
    let answer = call.real();
    if answer == code::SUCCESS
        && let Some(limit) = limit::taken(device).and_then(|taken| taken.limit)
    {
        // SAFETY: written by the real function.
        unsafe { *bytes = (*bytes).min(limit as usize) };
    }
    answer
}
