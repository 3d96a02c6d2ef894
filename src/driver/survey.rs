//! The driver and its devices, queried without creating a context.

use super::extras::{Extras, WithExtras};
use super::{CUdevice, Current, Driver, is_behind_mps, supports_vmm, total_memory, uuid, vmm};
use serde::Serialize;
use std::ffi::{CStr, c_char, c_int};
use vramctl_model::support::CudaVersion;
use vramctl_model::{Failure, code};

/// The CUDA driver and devices that this process sees.
#[derive(Debug, Clone, Serialize)]
pub struct Survey {
    /// The newest CUDA version that the driver supports.
    pub cuda: CudaVersion,
    /// The devices, by ordinal.
    pub gpus: Vec<Gpu>,
}

/// A device.
#[derive(Debug, Clone, Serialize)]
pub struct Gpu {
    /// Model name.
    pub name: String,
    /// UUID, if the driver reports it.
    pub uuid: Option<String>,
    /// Bytes of memory.
    pub total_bytes: u64,
    /// Whether it supports virtual memory management, without which nothing on it can be paused.
    pub virtual_memory: bool,
    /// Whether its contexts run under MPS.
    pub behind_mps: bool,
}

/// Queries the driver and its devices.
pub fn survey() -> Result<Survey, Failure> {
    let driver = Driver::get()?;
    let mut count = 0;
    // SAFETY: the output is writable.
    unsafe {
        driver.cuInit(0)?;
        driver.cuDeviceGetCount(&raw mut count)?;
    }
    let gpus = (0..count).map(|ordinal| look_at(driver, ordinal)).collect::<Result<_, _>>()?;
    Ok(Survey { cuda: cuda_version()?, gpus })
}

/// The newest CUDA version that the driver supports. Does not initialise the driver.
pub fn cuda_version() -> Result<CudaVersion, Failure> {
    let mut version = 0;
    // SAFETY: the output is writable.
    unsafe { Driver::get()?.cuDriverGetVersion(&raw mut version)? };
    Ok(CudaVersion(version))
}

fn look_at(driver: &Driver, ordinal: c_int) -> Result<Gpu, Failure> {
    let (mut device, mut name): (CUdevice, _) = (0, [0 as c_char; 128]);
    // SAFETY: both are writable, and the driver gets the size of `name`.
    unsafe {
        driver.cuDeviceGet(&raw mut device, ordinal)?;
        driver.cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int, device)?;
    }
    // SAFETY: the driver NUL-terminates the name within the given size.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let total_bytes = total_memory(device)?;
    Ok(Gpu { name, uuid: uuid(device), total_bytes, virtual_memory: supports_vmm(device), behind_mps: is_behind_mps(device) })
}

/// Makes and releases virtual memory on a device as the library does for a program's `cudaMalloc`. Returns what the driver refuses to do
/// with it, in words, and its answer; an error if it refuses the memory itself.
pub fn try_memory(device: CUdevice) -> Result<Option<(String, Failure)>, Failure> {
    let wanted = Extras::of(device);
    // The memory needs no context (driver 580). Another driver may, so a refusal is confirmed as in a program, which has one.
    let answer = vmm::try_on(device);
    let is_final = answer.as_ref().map_or_else(|failure| failure.code == code::OUT_OF_MEMORY, |made| made.refused.is_none());
    let WithExtras { extras, refused, .. } = if is_final { answer? } else { Current::in_primary(device, || vmm::try_on(device))? };
    Ok(refused.map(|failure| (extras.missing_from(wanted).join("; "), failure)))
}
