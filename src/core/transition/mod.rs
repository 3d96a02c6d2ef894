//! Pause and resume: all or nothing, and idempotent.
//!
//! | | pause | resume |
//! | --- | --- | --- |
//! | can be undone | wait for device work, save the contents, unmap | create, map and fill new memory beside the old state |
//! | point of no return | release the physical memory | release the backups |
//!
//! Every failure before the point of no return can be undone. Nothing after it can fail: if the driver refuses a release, the pause still succeeds,
//! because the contents are already safe. The memory goes onto a list to retry, and the report counts it as late. Whoever asks stands between the
//! two: what is [`Prepared`] is committed or undone.
//!
//! As part of a swap ([`SwapOut`]), a pause releases memory before the point of no return, because the other job cannot come without it: as much as
//! that job needs (`hand_over.rs`) of the memory that is saved and whose physical pages nobody knows. To undo that, the pause creates, maps and fills
//! new memory, as a resume does, once the other job has given its memory back, however long that takes (`unfinished.rs`).
//!
//! On a host without room for the contents of both, host memory changes hands, too: the resume releases the host memory of restored contents before
//! the point of no return. To undo that, it saves the contents again (`exchange.rs`). So the pause and the resume mirror each other: the job that
//! leaves saves contents piece by piece as host memory becomes free, and releases device memory; the job that comes takes that memory, fills it, and
//! releases host memory. To undo a swap, they change roles. Neither needs to hear of the other: each waits for the memory that the other releases.
//! One of them can always go on if the host and the device together have room for the largest allocation of each. The coordinator checks that.

mod amounts;
mod choose;
mod contents;
mod exchange;
mod hand_over;
mod hold;
mod pause;
mod plan;
mod prepared;
mod request;
mod restore;
mod restored;
mod resume;
mod set_aside;
mod unfinished;

pub use hold::Holding;
pub use prepared::{Failed, Preparation, Prepared};
pub use request::{Pause, Resume};

pub(crate) use hold::{passing_by, stay};

use crate::events::{self, Event};
use crate::memory::{Allocation, Memory, PausedBy, aside};
use crate::{gate, holder, member};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use vramctl_backup::Flow;
use vramctl_driver::CUdevice;
use vramctl_host::exit;
use vramctl_model::{Error, Selection, Stage, SwapOut};

/// How long to wait under the lock for work started since the first wait. Short, because the program may need to allocate to finish that
/// work.
const WAIT_LOCKED: Duration = Duration::from_millis(100);

/// How long the undoing of a swap waits under the lock for the memory that the other job gives back. After that, `unfinished.rs` waits without it.
const TAKEN_BACK_WITHIN: Duration = Duration::from_secs(10);

/// How a pause gets host memory for contents.
fn flow_of(swap: Option<&SwapOut>) -> Flow {
    swap.and_then(|swap| swap.host).map_or(Flow::Whole, |within| Flow::Pieces { within })
}

/// For messages.
fn tags_text(selection: &Selection) -> String {
    if selection.tags.is_empty() { "all tags".into() } else { selection.tags.join(", ") }
}

impl Memory {
    /// Whether any memory of this process is paused by others, whether or not the program has paused it as well.
    pub(crate) fn is_paused_by_others(&self) -> bool {
        self.registry.all().iter().any(|allocation| allocation.contents().state.paused_by().is_some_and(PausedBy::is_held))
    }

    /// Whether the scheduler, and nobody else outside, keeps the program held: its calls bring its memory back.
    fn is_away(&self) -> bool {
        let paused_by: Vec<_> = self.registry.all().iter().filter_map(|allocation| allocation.contents().state.paused_by()).collect();
        let left_for = hold::leaves();
        let is_taken = left_for == Some(PausedBy::SCHEDULER) || paused_by.iter().any(|by| by.without_scheduler() != *by);
        gate::is_held() && is_taken && left_for != Some(PausedBy::OTHERS) && !paused_by.iter().any(|by| by.is_by_others())
    }

    /// Whether a held program must stay held: it leaves its GPUs, or some memory is paused or has to be, including open memory of other processes, and
    /// not only by the program itself.
    fn must_stay_held(&self) -> bool {
        aside::any() || self.is_paused_by_others() || unfinished::must_pause_more() || hold::leaves().is_some()
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
        self.tell_scheduler();
    }

    /// Whether calls of the program bring its memory back, has changed, perhaps.
    pub(crate) fn tell_scheduler(&self) {
        if member::is_member() {
            member::set_away(self.is_away());
        }
    }
}

/// Runs a pause or resume as the library's work, whoever has requested it: once the program is exiting, the pause or resume makes no driver
/// call, and fails with [`Error::Ending`].
pub(crate) fn unless_ending<R>(work: impl FnOnce() -> Result<R, Error>) -> Result<R, Error> {
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
