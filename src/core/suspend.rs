//! Standing aside while another process checkpoints this one.
//!
//! The driver's checkpoint makes every CUDA call of this process wait, the library's own too. So before it, the library's workers
//! leave the driver and stay out, and the status is kept as it is: what the control socket tells needs no driver then. The caller
//! may die at any step. So what it has done to the process is asked of the driver (`cuCheckpointProcessGetState`), not kept here.

use crate::gate;
use crate::memory::Memory;
use crate::memory::obstacles::Moment;
use std::sync::{PoisonError, RwLock};
use std::time::Duration;
use vramctl_driver as driver;
use vramctl_host::{PerProcess, exit};
use vramctl_model::{DeviceStatus, Error, GpuUse, Status};

/// How it was before, while the process is suspended. Whoever takes the status holds it for reading, so that nobody asks the driver in
/// the middle of it.
static SUSPENDED: PerProcess<RwLock<Option<Aside>>> = PerProcess::new(RwLock::default);

struct Aside {
    status: Status,
    /// The program may make obstacles until the driver has locked it: its calls that make them are not held.
    without_obstacles: Moment,
}

impl Memory {
    /// Gets ready to be checkpointed. Returns what the process has on the GPUs, which a restore needs.
    pub fn suspend(&self) -> Result<Vec<GpuUse>, Error> {
        /// Longer than any call of the library takes, unless it waits for the program's work.
        const CALLS: Duration = Duration::from_secs(5);
        if let Some(gpus) = suspended() {
            return Ok(gpus);
        }
        exit::as_worker(|| {
            // No pause or resume is in progress, and none begins before the workers rest.
            let _exclusive = self.exclude();
            let without_obstacles = Moment::now();
            let status = self.status();
            if !status.obstacles.is_empty() {
                return Err(Error::NotRestorable(status.obstacles));
            }
            // The driver would have to keep and restore them, and a held program needs none.
            let guarded = self.unguard(&self.snapshot(), CALLS)?;
            let gpus = driver::uses();
            let mut suspended = SUSPENDED.get().write().unwrap_or_else(PoisonError::into_inner);
            if !exit::rest(CALLS) {
                self.guard(&guarded);
                return Err(Error::Busy(CALLS));
            }
            // How much is free changes meanwhile.
            let devices = status.devices.into_iter().map(|device| DeviceStatus { free_bytes: None, guard_bytes: 0, ..device }).collect();
            *suspended = Some(Aside { status: Status { suspended: Some(gpus.clone()), devices, ..status }, without_obstacles });
            Ok(gpus)
        })
    }

    /// The process can use its driver again.
    pub fn awake(&self) {
        *SUSPENDED.get().write().unwrap_or_else(PoisonError::into_inner) = None;
        exit::wake();
    }

    /// The current status. While the process is suspended, its obstacles are those that have come since.
    pub fn status(&self) -> Status {
        let suspended = SUSPENDED.get().read().unwrap_or_else(PoisonError::into_inner);
        match &*suspended {
            Some(Aside { status, without_obstacles }) => {
                Status { held: gate::is_held(), waiting_threads: gate::waiting(), obstacles: without_obstacles.since(), ..status.clone() }
            }
            None => self.status_now(),
        }
    }
}

/// What a suspended process needs to come back; `None` if it is not suspended.
pub fn suspended() -> Option<Vec<GpuUse>> {
    let suspended = SUSPENDED.existing()?.read().unwrap_or_else(PoisonError::into_inner);
    suspended.as_ref().and_then(|before| before.status.suspended.clone())
}
