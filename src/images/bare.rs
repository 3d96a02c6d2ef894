//! Processes that have the driver open and no memory of the library's: the driver locks and checkpoints them as they are.

use std::time::Duration;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::{parallel, proc};
use vramctl_driver::checkpoint::{self, GpuMap, ProcessState};
use vramctl_model::{Failure, code};

/// Such processes, by their ids as seen from here.
#[derive(Debug, Clone)]
pub struct Bare(Vec<u32>);

impl Bare {
    /// These processes.
    pub fn new(pids: Vec<u32>) -> Self {
        Self(pids)
    }

    /// Locks all at once. What is locked already stays so.
    pub fn lock(&self, limit: Duration) -> Result<(), CommandError> {
        self.each("lock", |pid| match checkpoint::state(pid)? {
            ProcessState::Running => checkpoint::lock(pid, limit),
            ProcessState::Locked | ProcessState::Checkpointed | ProcessState::Failed => Ok(()),
        })
    }

    /// Checkpoints all.
    pub fn checkpoint(&self) -> Result<(), CommandError> {
        self.each("checkpoint", |pid| match checkpoint::state(pid)? {
            ProcessState::Checkpointed => Ok(()),
            _ => checkpoint::checkpoint(pid),
        })
    }

    /// Has all run again where they were, from whatever state each is in.
    pub fn free(&self) -> Result<(), CommandError> {
        self.free_on(&GpuMap::new())
    }

    /// The same on other GPUs. One that the driver does not know any GPUs of needs no map.
    pub fn free_on(&self, map: &GpuMap) -> Result<(), CommandError> {
        self.each("restore", |pid| {
            if checkpoint::state(pid)? == ProcessState::Checkpointed {
                match checkpoint::restore(pid, map) {
                    Err(failure) if failure.code == code::INVALID_VALUE && !map.is_empty() => checkpoint::restore(pid, &GpuMap::new())?,
                    answer => answer?,
                }
            }
            match checkpoint::state(pid)? {
                ProcessState::Locked => checkpoint::unlock(pid),
                ProcessState::Running => Ok(()),
                // The driver has lost it.
                ProcessState::Checkpointed | ProcessState::Failed => {
                    Err(Failure { call: "cuCheckpointProcessRestore", code: code::ILLEGAL_STATE })
                }
            }
        })
    }

    /// Does something for all at once. One that has ended needs nothing.
    fn each(&self, what: &str, step: impl Fn(i32) -> Result<(), Failure> + Sync) -> Result<(), CommandError> {
        let one = |pid: &u32| {
            let done = step(pid.cast_signed());
            done.or_else(|failure| if proc::has_ended(pid) { Ok(()) } else { Err(failure) }).map_err(|failure| {
                CommandError::new(Exit::Failed, format!("the driver did not {what} {}: {failure}", crate::tree::named(*pid)))
            })
        };
        parallel::each_well(&self.0, one).into_iter().collect()
    }
}
