//! The machine that operations run on: what its driver and NVML do for other processes. A simulation has its own.

use std::fmt::Debug;
use std::time::Duration;
use vramctl_driver::checkpoint::{self, GpuMap, ProcessState};
use vramctl_driver::{self as driver, Card, NoCards};
use vramctl_model::support::CudaVersion;
use vramctl_model::{Failure, Holder};

/// What the driver and NVML do for other processes. Processes are known by their ids as seen from here.
pub trait Machine: Sync + Debug {
    /// The newest CUDA version that the driver supports.
    fn cuda(&self) -> Result<CudaVersion, Failure>;
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

impl Machine for ThisMachine {
    fn cuda(&self) -> Result<CudaVersion, Failure> {
        driver::cuda_version()
    }

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
