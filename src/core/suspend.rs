//! Keeps the library out of the driver while another process checkpoints this one.
//!
//! While a process is checkpointed, most CUDA calls in it block, including the library's own, and some end it. So before that, the library's
//! workers leave the driver and stay out, the program's calls that would end it wait ([`away`]), and the status is saved, so that the control
//! socket can answer without the driver. The caller may die at any step. So the process's state is always read from the driver
//! (`cuCheckpointProcessGetState`), never stored here.

use crate::events::{self, Event};
use crate::gate::{self, away};
use crate::holder;
use crate::memory::Memory;
use crate::memory::sightings::Moment;
use crate::transition;
use std::sync::{Mutex, RwLock, TryLockError, mpsc};
use std::thread;
use std::time::{Duration, Instant};
use vramctl_backup as backup;
use vramctl_driver as driver;
use vramctl_host::{PerProcess, Unpoison, exit, worker};
use vramctl_model::{DeviceStatus, Error, GpuUse, Status, TagState};

/// The saved status, while the process is suspended, or about to be.
static SUSPENDED: PerProcess<RwLock<Option<SavedStatus>>> = PerProcess::new(RwLock::default);

/// Locked for reading while a status queries the driver: if a suspend began meanwhile, the query would block until the process is back. A
/// suspend does not block on this lock but tries it repeatedly, with [`SUSPENDED`] unlocked, because every request reads that.
static QUERIES: PerProcess<RwLock<()>> = PerProcess::new(RwLock::default);

/// Locked during a request to suspend.
static SUSPENDING: PerProcess<Mutex<()>> = PerProcess::new(Mutex::default);

struct SavedStatus {
    status: Status,
    /// The moment of the last check for obstacles. Until the driver has locked the process, the program can still create some: those calls
    /// are not held.
    without_obstacles: Moment,
}

impl Memory {
    /// Prepares for the checkpoint. Returns the process's memory on each GPU, which a restore needs. `is_gone`: whether the client has hung up
    /// meanwhile. Then nobody would wake the library again, so it stays as it was.
    pub fn suspend(&self, is_gone: impl FnOnce() -> bool) -> Result<Vec<GpuUse>, Error> {
        /// Longer than any driver call of the library takes, unless it waits for the program's work.
        const CALLS: Duration = Duration::from_secs(5);
        // A second request waits for the first.
        let _one = SUSPENDING.get().lock().unpoisoned();
        if let Some(gpus) = suspended() {
            return Ok(gpus);
        }
        exit::as_worker(|| {
            // No pause or resume is in progress, and none begins before the workers are quiesced.
            let _exclusive = self.exclude();
            let without_obstacles = Moment::now();
            // The driver may have refused to release memory of other processes, which it cannot restore.
            driver::sweep();
            let status = self.status();
            if !status.obstacles.is_empty() {
                return Err(Error::NotRestorable(status.obstacles));
            }
            // The process has been resumed since the pause: the driver would have to save everything.
            if !status.held && !status.tags.is_empty() && status.tags.iter().all(|tag| tag.state == TagState::Active) {
                return Err(Error::Leased);
            }
            // The driver would have to save and restore the guards, and a held program needs none.
            let unguarded = self.unguard(&self.registry.snapshot(), CALLS)?;
            backup::unregister_all();
            let gpus = uses(CALLS);
            // The free memory changes meanwhile, so do not report it.
            let devices = status.devices.into_iter().map(|device| DeviceStatus { free_bytes: None, guard_bytes: 0, ..device }).collect();
            let status = Status { suspended: Some(gpus.clone()), devices, host: backup::status(), ..status };
            // Before the library leaves the driver, so that from here on a status needs no driver.
            save_status(Some(SavedStatus { status, without_obstacles }));
            if !queries_end(CALLS) || !exit::quiesce(CALLS) {
                save_status(None);
                return Err(Error::Busy(CALLS));
            }
            if let Err(stuck) = away::close(CALLS) {
                self.awake();
                return Err(Error::NotHeld(format!("after {} ms, {stuck}", CALLS.as_millis())));
            }
            if is_gone() {
                self.awake();
                return Err(Error::Aborted("the client has hung up".into()));
            }
            unguarded.for_good();
            Ok(gpus)
        })
    }

    /// The library may use the driver again.
    pub fn awake(&self) {
        save_status(None);
        exit::unquiesce();
        away::open();
        events::publish(Event::MayHaveMoved);
        // What is paused keeps it held.
        transition::stay();
        self.let_go();
    }

    /// The current status. While the process is suspended, its obstacles are those that have appeared since.
    pub fn status(&self) -> Status {
        let suspended = SUSPENDED.get().read().unpoisoned();
        if let Some(saved) = &*suspended {
            return saved.status_now();
        }
        let _query = QUERIES.get().read().unpoisoned();
        drop(suspended);
        self.status_now()
    }
}

/// This process's memory on each GPU. On a machine with a GPU in trouble, NVML may never answer, and to load it takes the loader's lock, with which
/// a thread of the program may wait until the resume. A thread that is left there ends then.
fn uses(limit: Duration) -> Vec<GpuUse> {
    let (tell, told) = mpsc::channel();
    match worker::spawn("vramctl-nvml", move || _ = tell.send(driver::uses())) {
        Ok(()) => told.recv_timeout(limit).unwrap_or_else(|_| driver::usual_uses()),
        Err(_) => driver::uses(),
    }
}

impl SavedStatus {
    fn status_now(&self) -> Status {
        let obstacles = self.without_obstacles.since();
        Status { held: gate::is_held(), standing: holder::standing(), waiting_threads: gate::waiting(), obstacles, ..self.status.clone() }
    }
}

/// The status of a suspended process, for which the driver is not asked; `None` if it is not suspended.
pub(crate) fn saved_status() -> Option<Status> {
    SUSPENDED.existing()?.read().unpoisoned().as_ref().map(SavedStatus::status_now)
}

fn save_status(saved: Option<SavedStatus>) {
    *SUSPENDED.get().write().unpoisoned() = saved;
}

/// Waits until no status queries the driver, and returns whether that is so. Another query begins only if the process is not suspended.
fn queries_end(limit: Duration) -> bool {
    const LOOK_AGAIN: Duration = Duration::from_millis(1);
    let deadline = Instant::now() + limit;
    while matches!(QUERIES.get().try_write(), Err(TryLockError::WouldBlock)) {
        if Instant::now() >= deadline {
            return false;
        }
        thread::sleep(LOOK_AGAIN);
    }
    true
}

/// The memory that a suspended process needs to be restored; `None` if it is not suspended.
pub fn suspended() -> Option<Vec<GpuUse>> {
    let suspended = SUSPENDED.existing()?.read().unpoisoned();
    suspended.as_ref().and_then(|before| before.status.suspended.clone())
}
