//! The NVML functions that report the memory use of processes.
//!
//! Like the real library, they work without `cuInit`: they need only the machine. A process that uses them alone can be checkpointed, too.

use crate::abi::{In, NvmlMemory, NvmlMemory2, NvmlPci, NvmlProcess, NvmlUtilization, Out};
use crate::device;
use crate::driver::{machine, settings};
use crate::machine::Machine;
use crate::nodes::{self, Opener};
use crate::restore_thread;
use crate::settings::Pids;
use std::ffi::{CStr, c_char, c_int};
use std::sync::atomic::{AtomicI64, Ordering};

/// The `nvmlReturn_t` values in use.
pub mod returns {
    /// `NVML_ERROR_UNINITIALIZED`.
    pub const UNINITIALIZED: u32 = 1;
    /// `NVML_ERROR_INVALID_ARGUMENT`.
    pub const INVALID_ARGUMENT: u32 = 2;
    /// `NVML_ERROR_NOT_SUPPORTED`.
    pub const NOT_SUPPORTED: u32 = 3;
    /// `NVML_ERROR_NOT_FOUND`.
    pub const NOT_FOUND: u32 = 6;
    /// `NVML_ERROR_INSUFFICIENT_SIZE`.
    pub const INSUFFICIENT_SIZE: u32 = 7;
    /// `NVML_ERROR_DRIVER_NOT_LOADED`.
    pub const DRIVER_NOT_LOADED: u32 = 9;
    /// `NVML_ERROR_ARGUMENT_VERSION_MISMATCH`.
    pub const ARGUMENT_VERSION_MISMATCH: u32 = 25;
}
use returns::{ARGUMENT_VERSION_MISMATCH, DRIVER_NOT_LOADED, INSUFFICIENT_SIZE, INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, UNINITIALIZED};

/// A device handle: recognisable, never dereferenced.
pub type Device = u64;
const FIRST: Device = 0x4e56_4d4c_0000_0000;

static USERS: AtomicI64 = AtomicI64::new(0);

fn opened() -> Result<&'static Machine, u32> {
    if USERS.load(Ordering::Relaxed) <= 0 {
        return Err(UNINITIALIZED);
    }
    machine().map_err(|_| DRIVER_NOT_LOADED)
}

fn ordinal(device: Device) -> Result<(&'static Machine, usize), u32> {
    let machine = opened()?;
    let ordinal = device.wrapping_sub(FIRST);
    if ordinal < machine.devices() as u64 { Ok((machine, ordinal as usize)) } else { Err(INVALID_ARGUMENT) }
}

fn put<T>(out: Out<T>, value: T) -> Result<(), u32> {
    out.put(value).map_err(|_| INVALID_ARGUMENT)
}

/// `nvmlInit_v2`.
pub fn init() -> Result<(), u32> {
    // If the machine cannot be opened, report that no driver is loaded.
    let machine = machine().map_err(|_| DRIVER_NOT_LOADED)?;
    if settings().restore_thread && machine.join() {
        // Others can checkpoint it, with or without CUDA.
        restore_thread::start(machine, Opener::Nvml);
    }
    USERS.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

/// `nvmlShutdown`.
pub fn shutdown() -> Result<(), u32> {
    opened()?;
    if USERS.fetch_sub(1, Ordering::Relaxed) == 1 {
        nodes::close(Opener::Nvml);
    }
    Ok(())
}

/// `nvmlDeviceGetCount_v2`.
pub fn count(count: Out<u32>) -> Result<(), u32> {
    put(count, opened()?.devices() as u32)
}

/// `nvmlDeviceGetHandleByIndex_v2`.
pub fn by_index(index: u32, device: Out<Device>) -> Result<(), u32> {
    if index as usize >= opened()?.devices() {
        return Err(INVALID_ARGUMENT);
    }
    put(device, FIRST + u64::from(index))
}

/// `nvmlDeviceGetHandleByPciBusId_v2`.
pub fn by_pci_bus_id(text: In<c_char>, device: Out<Device>) -> Result<(), u32> {
    opened()?;
    let text = text.text().map_err(|_| INVALID_ARGUMENT)?;
    let found = device::by_pci_bus_id(text).ok_or(NOT_FOUND)?;
    put(device, FIRST + found as u64)
}

/// `nvmlDeviceGetHandleByUUID`, with or without the prefix "GPU-".
pub fn by_uuid(text: In<c_char>, device: Out<Device>) -> Result<(), u32> {
    let machine = opened()?;
    let text = text.text().map_err(|_| INVALID_ARGUMENT)?;
    let names = |device: usize| {
        let uuid = device::uuid_text(machine.serial(), device);
        uuid.eq_ignore_ascii_case(text) || uuid["GPU-".len()..].eq_ignore_ascii_case(text)
    };
    let found = (0..machine.devices()).find(|&device| names(device)).ok_or(NOT_FOUND)?;
    put(device, FIRST + found as u64)
}

/// `nvmlDeviceGetUUID`.
pub fn uuid(device: Device, text: Out<c_char>, room: u32) -> Result<(), u32> {
    let (machine, device) = ordinal(device)?;
    let uuid = device::uuid_text(machine.serial(), device);
    if room as usize <= uuid.len() {
        return Err(INSUFFICIENT_SIZE);
    }
    text.put_text(&uuid, room as c_int).map_err(|_| INVALID_ARGUMENT)
}

/// `nvmlDeviceGetName`.
pub fn name(device: Device, text: Out<c_char>, room: u32) -> Result<(), u32> {
    let (machine, _) = ordinal(device)?;
    text.put_text(&device::model_name(machine.model()), room as c_int).map_err(|_| INVALID_ARGUMENT)
}

/// `nvmlDeviceGetPciInfo_v3`.
pub fn pci(device: Device, info: Out<NvmlPci>) -> Result<(), u32> {
    let (_, device) = ordinal(device)?;
    let (mut legacy, mut bus) = ([0; 16], [0; 32]);
    let fill = |to: &mut [u8], text: String| to[..text.len()].copy_from_slice(text.as_bytes());
    fill(&mut legacy, format!("0000:{:02X}:00.0", device::bus(device)));
    fill(&mut bus, format!("00000000:{:02X}:00.0", device::bus(device)));
    put(info, NvmlPci { legacy, numbers: [0, device::bus(device), 0, 0, 0], bus })
}

/// `nvmlDeviceGetMemoryInfo`.
pub fn memory(device: Device, memory: Out<NvmlMemory>) -> Result<(), u32> {
    let (machine, device) = ordinal(device)?;
    let (total, used) = (machine.memory(), machine.used(device));
    put(memory, NvmlMemory { total, free: total - used, used })
}

/// `nvmlDeviceGetMemoryInfo_v2`. Nothing is reserved.
pub fn memory_v2(device: Device, memory: Out<NvmlMemory2>) -> Result<(), u32> {
    const VERSION: u32 = size_of::<NvmlMemory2>() as u32 | 2 << 24;
    let (machine, device) = ordinal(device)?;
    let asked = memory.get().map_err(|_| INVALID_ARGUMENT)?;
    if asked.version != VERSION {
        return Err(ARGUMENT_VERSION_MISMATCH);
    }
    let (total, used) = (machine.memory(), machine.used(device));
    put(memory, NvmlMemory2 { version: VERSION, total, reserved: 0, free: total - used, used })
}

/// `nvmlDeviceGetUtilizationRates`. "On MIG-enabled GPUs, querying device utilization rates is not currently supported."
pub fn utilization(device: Device, rates: Out<NvmlUtilization>) -> Result<(), u32> {
    let (machine, device) = ordinal(device)?;
    if settings().mig {
        return Err(NOT_SUPPORTED);
    }
    let gpu = machine.utilization(device);
    put(rates, NvmlUtilization { gpu, memory: gpu })
}

/// `nvmlDeviceGetTemperature` of the chip: warmer, the longer kernels have run lately.
pub fn temperature(device: Device, sensor: u32, celsius: Out<u32>) -> Result<(), u32> {
    const IDLE: u32 = 31;
    let (machine, device) = ordinal(device)?;
    if sensor != 0 {
        return Err(INVALID_ARGUMENT);
    }
    put(celsius, IDLE + machine.utilization(device) / 3)
}

/// `nvmlDeviceGetPowerUsage`: likewise.
pub fn power(device: Device, milliwatts: Out<u32>) -> Result<(), u32> {
    const IDLE: u32 = 75_000;
    let (machine, device) = ordinal(device)?;
    put(milliwatts, IDLE + 6_000 * machine.utilization(device))
}

/// `nvmlDeviceGetMigMode`.
pub fn mig_mode(device: Device, now: Out<u32>, after_a_reset: Out<u32>) -> Result<(), u32> {
    ordinal(device)?;
    put(now, u32::from(settings().mig))?;
    put(after_a_reset, u32::from(settings().mig))
}

/// Above all process ids that Linux gives.
const FIRST_OF_THE_HOST: u32 = 1 << 23;

/// `nvmlDeviceGetComputeRunningProcesses_v3`.
pub fn processes(device: Device, count: Out<u32>, processes: Out<NvmlProcess>) -> Result<(), u32> {
    let (machine, device) = ordinal(device)?;
    let room = count.get().map_err(|_| INVALID_ARGUMENT)?;
    let pid = |pid| if settings().pids == Pids::OfTheHost { FIRST_OF_THE_HOST + pid } else { pid };
    let found: Vec<NvmlProcess> = machine
        .tenants()
        .into_iter()
        .filter(|tenant| tenant.used[device] > 0 && settings().pids != Pids::None)
        .map(|tenant| NvmlProcess { pid: pid(tenant.pid), used: tenant.used[device], gpu_instance: u32::MAX, compute_instance: u32::MAX })
        .collect();
    put(count, found.len() as u32)?;
    if found.is_empty() {
        return Ok(());
    }
    if (room as usize) < found.len() {
        return Err(INSUFFICIENT_SIZE);
    }
    if processes.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    processes.put_all(found);
    Ok(())
}

/// `nvmlErrorString`.
pub fn describe(code: u32) -> &'static CStr {
    match code {
        0 => c"Success",
        UNINITIALIZED => c"Uninitialized",
        INVALID_ARGUMENT => c"Invalid Argument",
        NOT_SUPPORTED => c"Not Supported",
        NOT_FOUND => c"Not Found",
        INSUFFICIENT_SIZE => c"Insufficient Size",
        DRIVER_NOT_LOADED => c"Driver Not Loaded",
        ARGUMENT_VERSION_MISMATCH => c"Argument Version Mismatch",
        _ => c"Unknown Error",
    }
}
