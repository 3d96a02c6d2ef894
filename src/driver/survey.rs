//! What CUDA there is, for those who want to know before anything uses it. Makes no context.

use super::{CUdevice, Driver, supports_vmm, uuid};
use serde::Serialize;
use std::ffi::{CStr, c_char, c_int};
use vramctl_model::Failure;

/// A machine's CUDA, as this process would see it.
#[derive(Debug, Clone, Serialize)]
pub struct Survey {
    /// The version of CUDA that the driver speaks, such as 13.0.
    pub cuda: String,
    /// The devices, by ordinal.
    pub gpus: Vec<Gpu>,
}

/// A device.
#[derive(Debug, Clone, Serialize)]
pub struct Gpu {
    /// What it calls itself.
    pub name: String,
    /// Its UUID, where the driver tells.
    pub uuid: Option<String>,
    /// Bytes of memory.
    pub total_bytes: u64,
    /// Whether it has virtual memory management, without which nothing on it can be paused.
    pub virtual_memory: bool,
}

/// Looks at the driver and its devices.
pub fn survey() -> Result<Survey, Failure> {
    let driver = Driver::get()?;
    let (mut version, mut count) = (0, 0);
    // SAFETY: both places are writable; no flags are defined.
    unsafe {
        driver.cuInit(0)?;
        driver.cuDriverGetVersion(&raw mut version)?;
        driver.cuDeviceGetCount(&raw mut count)?;
    }
    let gpus = (0..count).map(|ordinal| look_at(driver, ordinal)).collect::<Result<_, _>>()?;
    Ok(Survey { cuda: format!("{}.{}", version / 1000, version % 1000 / 10), gpus })
}

fn look_at(driver: &Driver, ordinal: c_int) -> Result<Gpu, Failure> {
    let (mut device, mut total, mut name): (CUdevice, usize, _) = (0, 0, [0 as c_char; 128]);
    // SAFETY: all three are writable, and the room for the name is said.
    unsafe {
        driver.cuDeviceGet(&raw mut device, ordinal)?;
        driver.cuDeviceTotalMem_v2(&raw mut total, device)?;
        driver.cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int, device)?;
    }
    // SAFETY: the driver has ended it with a NUL inside the room that it was given.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    Ok(Gpu { name, uuid: uuid(device), total_bytes: total as u64, virtual_memory: supports_vmm(device) })
}
