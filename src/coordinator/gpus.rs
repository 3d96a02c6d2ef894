//! The GPUs of this machine, as users name them, and what the driver and NVML do for other processes.

use std::collections::BTreeMap;
use std::time::Duration;
use vramctl_driver::checkpoint::{self, GpuMap, ProcessState};
use vramctl_driver::{self as driver, Card, NoCards, uuid_of_index};
use vramctl_model::{Failure, Holder};

/// What the driver and NVML do for other processes. Processes are known by their ids as seen from here.
pub trait Gpus: Sync {
    /// Loads the driver, to checkpoint or restore.
    fn prepare(&self) -> Result<(), Failure>;
    /// The checkpoint state of a process.
    fn state(&self, pid: i32) -> Result<ProcessState, Failure>;
    /// From running to locked.
    fn lock(&self, pid: i32, limit: Duration) -> Result<(), Failure>;
    /// From locked to checkpointed.
    fn checkpoint(&self, pid: i32) -> Result<(), Failure>;
    /// From checkpointed to locked.
    fn restore(&self, pid: i32, map: &GpuMap) -> Result<(), Failure>;
    /// From locked to running.
    fn unlock(&self, pid: i32) -> Result<(), Failure>;
    /// The GPUs.
    fn cards(&self) -> Result<Vec<Card>, NoCards>;
    /// Who has memory on a GPU.
    fn holders_of(&self, uuid: &str) -> Vec<Holder>;
}

/// The driver and NVML.
#[derive(Debug, Clone, Copy)]
pub struct ThisMachine;

impl Gpus for ThisMachine {
    fn prepare(&self) -> Result<(), Failure> {
        checkpoint::prepare()
    }

    fn state(&self, pid: i32) -> Result<ProcessState, Failure> {
        checkpoint::state(pid)
    }

    fn lock(&self, pid: i32, limit: Duration) -> Result<(), Failure> {
        checkpoint::lock(pid, limit)
    }

    fn checkpoint(&self, pid: i32) -> Result<(), Failure> {
        checkpoint::checkpoint(pid)
    }

    fn restore(&self, pid: i32, map: &GpuMap) -> Result<(), Failure> {
        checkpoint::restore(pid, map)
    }

    fn unlock(&self, pid: i32) -> Result<(), Failure> {
        checkpoint::unlock(pid)
    }

    fn cards(&self) -> Result<Vec<Card>, NoCards> {
        driver::cards()
    }

    fn holders_of(&self, uuid: &str) -> Vec<Holder> {
        driver::holders_of(uuid)
    }
}

/// The GPUs' indices in `nvidia-smi`, by UUID. None without NVML.
pub fn indices() -> BTreeMap<String, u32> {
    (0..).map_while(|index| Some((uuid_of_index(index).ok()??, index))).collect()
}

/// Whether the UUID begins as the user has written, perhaps without `GPU-`.
pub fn begins_as(uuid: &str, written: &str) -> bool {
    let short = |text: &str| text.to_ascii_lowercase().trim_start_matches("gpu-").to_owned();
    short(uuid).starts_with(&short(written))
}
