//! Pause and resume: all or nothing, and idempotent.
//!
//! | | pause | resume |
//! | --- | --- | --- |
//! | can be undone | wait for device work, save the contents, unmap | create, map and fill new memory beside the old state |
//! | point of no return | release the physical memory | release the backups |
//!
//! Every failure before the point of no return can be undone. Nothing after it can fail: if the driver refuses a release,
//! the pause still succeeds, because the contents are already safe. The memory goes onto a list to retry, and the report
//! counts it as late.
//!
//! As part of a swap (`hand_over`), a pause releases memory before the point of no return, because the other job cannot come without it: as much as
//! that job lacks (`hand_over.rs`) of what is saved, and of what nobody knows by its physical pages. To undo that, it creates, maps and fills new
//! memory, as a resume does, once the other
//! job has given its own back, however long that takes (`owed.rs`).
//!
//! On a host without room for the contents of both (`hand_over_host`), the resume releases host memory before the point of no return, too: that
//! of contents that have arrived. To undo that, it saves them again (`send_back.rs`). So the pause and the resume are each other's mirror image:
//! the one that leaves a place saves contents piece by piece as host memory comes, and releases device memory; the one that comes takes that,
//! fills it, and releases host memory. Undone, they change roles. Neither needs to hear of the other: each waits for the memory that the other
//! releases. One of them can always go on if the host and the device together have room for the largest allocation of each, which the
//! coordinator sees to.

mod came;
mod choose;
mod contents;
mod hand_over;
mod hold;
mod owed;
mod pause;
mod plan;
mod repay;
mod resume;
mod send_back;

pub use hold::Holding;

pub(crate) use hold::{passing_by, stay};

use crate::events::{self, Event};
use crate::memory::{Allocation, Memory, PausedBy, aside};
use crate::{gate, holder};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use vramctl_backup::Flow;
use vramctl_driver::CUdevice;
use vramctl_host::exit;
use vramctl_model::{Error, Stage, TransitionRequest};

/// How long to wait under the lock for work started since the first wait. Short, because the program may need to allocate to finish that
/// work.
const WAIT_LOCKED: Duration = Duration::from_millis(100);

/// How the host memory for contents comes.
fn flow_of(request: &TransitionRequest) -> Flow {
    request.hand_over_host.map_or(Flow::Whole, |within| Flow::Pieces { within })
}

/// For messages.
fn tags_text(request: &TransitionRequest) -> String {
    if request.tags.is_empty() { "all tags".into() } else { request.tags.join(", ") }
}

impl Memory {
    /// Whether any memory of this process is paused by others, whether or not the program has paused it as well.
    pub(crate) fn is_paused_by_others(&self) -> bool {
        self.registry.all().iter().any(|allocation| allocation.contents().state.paused_by().is_some_and(|by| by != PausedBy::Program))
    }

    /// Whether a held program must stay held: it leaves its GPUs, or anything is paused or has to be, including open memory of other processes, but
    /// for what the program has paused itself.
    fn must_stay_held(&self) -> bool {
        aside::any() || self.is_paused_by_others() || owed::is_any_to_go() || hold::leaves()
    }

    /// Lets a held program continue once nothing is paused by others. Called wherever the last paused memory may have been resumed or freed. If only
    /// memory of other processes is still paused, the program continues by itself when that is back.
    pub fn let_go(&self) {
        gate::let_go(|| self.must_stay_held());
        if gate::is_held() {
            aside::keep_asking();
        } else {
            holder::released();
        }
    }
}

/// Runs a pause or resume as the library's work, whoever has requested it: once the program is exiting, the pause or resume makes no driver
/// call, and fails with [`Error::Ending`].
fn unless_ending<R>(work: impl FnOnce() -> Result<R, Error>) -> Result<R, Error> {
    exit::as_worker(work).map_err(|error| if exit::is_ending() { Error::Ending } else { error })
}

/// Says in a "busy" error how long the device has been busy: since the first attempt, not only during the last one.
fn busy_since(started: Instant) -> impl FnOnce(Error) -> Error {
    move |error| if let Error::Busy(_) = error { Error::Busy(started.elapsed()) } else { error }
}

/// Total bytes on each device.
fn bytes_of_devices<'a>(allocations: impl Iterator<Item = &'a Allocation>) -> BTreeMap<CUdevice, u64> {
    allocations.fold(BTreeMap::new(), |mut bytes, allocation| {
        if let Some(device) = allocation.on_device() {
            *bytes.entry(device).or_default() += allocation.bytes() as u64;
        }
        bytes
    })
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// Accumulates the time spent in each stage.
#[derive(Default)]
struct Clock(BTreeMap<Stage, f64>);

impl Clock {
    fn time<R>(&mut self, stage: Stage, work: impl FnOnce() -> R) -> R {
        let started = Instant::now();
        let result = work();
        self.add(stage, started.elapsed());
        result
    }

    fn add(&mut self, stage: Stage, duration: Duration) {
        events::publish(Event::Stage(stage, duration));
        *self.0.entry(stage).or_default() += milliseconds(duration);
    }
}
