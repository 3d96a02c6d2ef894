//! The driver's checkpoint of another process: `cuCheckpointProcess*`, of drivers from 570 on.

use super::Driver;
use super::structures::{GpuPair, LockArgs, RestoreArgs};
use cudarc::driver::sys::CUuuid;
use std::ffi::{c_int, c_uint};
use std::ptr;
use std::time::Duration;
use vramctl_model::{Failure, code};

/// `CUprocessState`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessState {
    /// As always.
    Running,
    /// Its CUDA calls wait.
    Locked,
    /// Its CUDA calls wait, and it has nothing on any GPU.
    Checkpointed,
    /// A checkpoint or restore went wrong in the middle; the process is lost.
    Failed,
}

/// Maps old GPUs to new ones, as pairs of UUIDs (old, new). Empty: each GPU is restored to itself.
pub type GpuMap = Vec<(String, String)>;

/// Makes this process able to checkpoint others. The error has [`code::NOT_FOUND`] if the driver is older than 570.
pub fn prepare() -> Result<(), Failure> {
    let driver = Driver::get()?;
    driver.has_checkpoints()?;
    // A restore needs an initialised driver. SAFETY: no pointers.
    unsafe { driver.cuInit(0) }
}

/// The checkpoint state of a process.
pub fn state(pid: i32) -> Result<ProcessState, Failure> {
    let mut state = 0;
    // SAFETY: `state` is writable.
    unsafe { Driver::get()?.cuCheckpointProcessGetState(pid, &raw mut state)? };
    match state {
        0 => Ok(ProcessState::Running),
        1 => Ok(ProcessState::Locked),
        2 => Ok(ProcessState::Checkpointed),
        3 => Ok(ProcessState::Failed),
        _ => Err(Failure { call: "cuCheckpointProcessGetState", code: code::UNKNOWN }),
    }
}

/// Makes the process's CUDA calls wait, from running to locked. If those in progress do not end in time, the error has
/// [`code::NOT_READY`], and the process is running.
pub fn lock(pid: i32, limit: Duration) -> Result<(), Failure> {
    let timeout_ms = c_uint::try_from(limit.as_millis()).unwrap_or(c_uint::MAX).max(1);
    let args = LockArgs { timeout_ms, reserved: 0, reserved_too: [0; 7] };
    // SAFETY: the arguments have the driver's layout.
    unsafe { Driver::get()?.cuCheckpointProcessLock(pid, &raw const args) }
}

/// Checkpoints the process, from locked to checkpointed: takes everything that it has on the GPUs.
pub fn checkpoint(pid: i32) -> Result<(), Failure> {
    // SAFETY: null is no arguments.
    unsafe { Driver::get()?.cuCheckpointProcessCheckpoint(pid, ptr::null()) }
}

/// Restores the process, from checkpointed to locked. With a map, onto other GPUs; the map must contain every GPU that the process sees.
///
/// Once a restore has failed because memory was short, driver 580 can never restore the process: make sure that there is enough.
pub fn restore(pid: i32, map: &GpuMap) -> Result<(), Failure> {
    let unknown = Failure { call: "cuCheckpointProcessRestore", code: code::INVALID_VALUE };
    let pair = |(old, new): &(String, String)| Some(GpuPair { old: parse_uuid(old)?, new: parse_uuid(new)? });
    let pairs = map.iter().map(pair).collect::<Option<Vec<_>>>().ok_or(unknown)?;
    let args = RestoreArgs {
        pairs: pairs.as_ptr(),
        count: pairs.len() as c_uint,
        reserved: [0; 52 - size_of::<*const GpuPair>()],
        reserved_too: 0,
    };
    let args = if pairs.is_empty() { ptr::null() } else { &raw const args };
    // SAFETY: the arguments have the driver's layout, and live until it returns.
    unsafe { Driver::get()?.cuCheckpointProcessRestore(pid, args) }
}

/// Lets the process's CUDA calls continue, from locked to running.
pub fn unlock(pid: i32) -> Result<(), Failure> {
    // SAFETY: null is no arguments.
    unsafe { Driver::get()?.cuCheckpointProcessUnlock(pid, ptr::null()) }
}

/// Converts `GPU-0f5c2b8e-93d4-4a6b-8c1d-2e7f60a1b3c4` to the driver's binary form.
fn parse_uuid(text: &str) -> Option<CUuuid> {
    let digits = text.strip_prefix("GPU-")?.replace('-', "");
    let number = (digits.len() == 32).then(|| u128::from_str_radix(&digits, 16).ok())??;
    Some(CUuuid { bytes: number.to_be_bytes().map(|byte| byte as _) })
}

impl Driver {
    fn has_checkpoints(&self) -> Result<(), Failure> {
        let mut state: c_int = 0;
        // SAFETY: `state` is writable; there is no process -1, so a driver that has the function refuses.
        match unsafe { self.cuCheckpointProcessGetState(-1, &raw mut state) } {
            Err(missing) if missing.code == code::NOT_FOUND => Err(missing),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::parse_uuid;

    #[test]
    fn uuids_are_those_of_nvml() {
        let uuid = parse_uuid("GPU-0f5c2b8e-93d4-4a6b-8c1d-2e7f60a1b3c4").unwrap();
        assert_eq!(uuid.bytes.map(|byte| byte as u8)[..4], [0x0f, 0x5c, 0x2b, 0x8e]);
        for wrong in ["", "GPU-", "MIG-0f5c2b8e-93d4-4a6b-8c1d-2e7f60a1b3c4", "GPU-0f5c2b8e-93d4-4a6b-8c1d-2e7f60a1b3cx"] {
            assert!(parse_uuid(wrong).is_none(), "{wrong}");
        }
    }
}
