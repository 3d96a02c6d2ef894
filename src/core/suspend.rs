//! Keeps the library out of the driver while another process checkpoints this one.
//!
//! While a process is checkpointed, every CUDA call in it blocks, including the library's own. So before that, the library's workers leave
//! the driver and stay out, and the status is saved, so that the control socket can answer without the driver. The caller may die at any
//! step. So the process's state is always read from the driver (`cuCheckpointProcessGetState`), never stored here.

use crate::memory::Memory;
use crate::memory::sightings::Moment;
use crate::{events, gate};
use std::sync::{PoisonError, RwLock};
use std::time::Duration;
use vramctl_driver as driver;
use vramctl_host::{PerProcess, exit};
use vramctl_model::{DeviceStatus, Error, GpuUse, Status};

/// The saved status, while the process is suspended. Taking a status locks it for reading, so that a suspend cannot begin in the middle,
/// while the driver is being asked.
static SUSPENDED: PerProcess<RwLock<Option<Aside>>> = PerProcess::new(RwLock::default);

struct Aside {
    status: Status,
    /// The moment of the last check for obstacles. Until the driver has locked the process, the program can still create some: those calls
    /// are not held.
    without_obstacles: Moment,
}

impl Memory {
    /// Prepares for the checkpoint. Returns the process's memory on each GPU, which a restore needs.
    pub fn suspend(&self) -> Result<Vec<GpuUse>, Error> {
        /// Longer than any driver call of the library takes, unless it waits for the program's work.
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
            // The driver would have to save and restore the guards, and a held program needs none.
            let guarded = self.unguard(&self.snapshot(), CALLS)?;
            let gpus = driver::uses();
            let mut suspended = SUSPENDED.get().write().unwrap_or_else(PoisonError::into_inner);
            if !exit::rest(CALLS) {
                self.guard(&guarded);
                return Err(Error::Busy(CALLS));
            }
            // The free memory changes meanwhile, so do not report it.
            let devices = status.devices.into_iter().map(|device| DeviceStatus { free_bytes: None, guard_bytes: 0, ..device }).collect();
            *suspended = Some(Aside { status: Status { suspended: Some(gpus.clone()), devices, ..status }, without_obstacles });
            Ok(gpus)
        })
    }

    /// The process may use its driver again.
    pub fn awake(&self) {
        *SUSPENDED.get().write().unwrap_or_else(PoisonError::into_inner) = None;
        exit::wake();
        events::gpus_may_have_changed();
    }

    /// The current status. While the process is suspended, its obstacles are those that have appeared since.
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

/// The memory that a suspended process needs to be restored; `None` if it is not suspended.
pub fn suspended() -> Option<Vec<GpuUse>> {
    let suspended = SUSPENDED.existing()?.read().unwrap_or_else(PoisonError::into_inner);
    suspended.as_ref().and_then(|before| before.status.suspended.clone())
}
