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

pub mod cleaning;
mod hold;
mod pause;
mod plan;
mod resume;

pub use hold::Holding;

use crate::memory::{Allocation, Memory, borrow, communicators};
use crate::{events, gate};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use vramctl_driver::{self as driver, CUdevice};
use vramctl_host::exit;
use vramctl_model::{Communicator, Error, Registered, Registration, Report, Stage, TransitionRequest};

/// For messages.
fn tags_text(request: &TransitionRequest) -> String {
    if request.tags.is_empty() { "all tags".into() } else { request.tags.join(", ") }
}

/// The allocations a request selects.
struct Chosen {
    /// All allocations of the process, by address.
    all: Vec<Arc<Allocation>>,
    /// Selected and active.
    active: Vec<Arc<Allocation>>,
    /// Selected and paused.
    paused: Vec<Arc<Allocation>>,
}

impl Memory {
    /// Whether any memory of this process is paused.
    pub(crate) fn has_paused(&self) -> bool {
        self.snapshot().iter().any(|allocation| allocation.is_paused() && self.has(allocation))
    }

    /// Whether anything is paused, including open memory of other processes and NCCL's memory.
    fn any_paused(&self) -> bool {
        borrow::any_set_aside() || communicators::any_away() || self.has_paused()
    }

    /// Lets a held program continue once nothing is paused. Called wherever the last paused memory may have been resumed or freed. If only
    /// memory of other processes is still paused, the program continues by itself when that is back.
    pub fn let_go(&self) {
        gate::let_go(|| self.any_paused());
        if gate::is_held() {
            borrow::keep_asking();
        }
    }

    /// Selects allocations. A tag that no allocation has is an error.
    fn choose(&self, request: &TransitionRequest) -> Result<Chosen, Error> {
        let all = self.snapshot();
        if request.is_borrower {
            return Ok(Chosen { all, active: Vec::new(), paused: Vec::new() });
        }
        let known: BTreeSet<&str> = all.iter().map(|allocation| &*allocation.tag).collect();
        let unknown: BTreeSet<_> = request.tags.iter().filter(|tag| !known.contains(tag.as_str())).cloned().collect();
        if !unknown.is_empty() && !request.lenient {
            return Err(Error::UnknownTag {
                unknown: unknown.into_iter().collect(),
                known: known.into_iter().map(str::to_owned).collect(),
            });
        }
        let meant = all.iter().filter(|allocation| is_meant(request, allocation)).cloned();
        let (paused, active) = meant.partition(|allocation| allocation.is_paused());
        Ok(Chosen { all, active, paused })
    }

    /// Like [`choose`](Self::choose), after finishing what earlier failures and destroyed contexts left behind. Under the
    /// exclusive transition lock.
    fn choose_settled(&self, request: &TransitionRequest) -> Result<Chosen, Error> {
        driver::sweep();
        self.drop_gone();
        let chosen = self.choose(request)?;
        if self.map_stranded(&chosen.paused)? { self.choose(request) } else { Ok(chosen) }
    }

    /// Maps memory that a failed pause left unmapped: it still holds its contents, and it would count as paused while it stays
    /// on the device. Returns whether there was any.
    fn map_stranded(&self, paused: &[Arc<Allocation>]) -> Result<bool, Error> {
        let mut any = false;
        for allocation in paused {
            if allocation.contents().memory.is_some() {
                self.map_again(allocation)?;
                any = true;
            }
        }
        Ok(any)
    }
}

impl Chosen {
    /// Leaves out registered memory or fails because of it, as the request says. Memory that other processes have open is left out as well;
    /// it can never be taken, see [`refuse_if_lent`](crate::memory::share::refuse_if_lent).
    fn spare_registered(&mut self, request: &TransitionRequest) -> Result<(), Error> {
        match request.registered {
            Registered::Take => Ok(()),
            Registered::Keep => {
                self.active.retain(|allocation| {
                    let contents = allocation.contents();
                    contents.registrant().is_none() && contents.lent_to_others(request).is_empty()
                });
                Ok(())
            }
            Registered::Refuse => {
                let mut bytes = BTreeMap::<(String, String), u64>::new();
                for allocation in &self.active {
                    if let Some(registrant) = allocation.contents().registrant() {
                        *bytes.entry((allocation.tag.to_string(), registrant.to_owned())).or_default() += allocation.bytes() as u64;
                    }
                }
                let list: Vec<_> = bytes.into_iter().map(|((tag, registrant), bytes)| Registration { tag, registrant, bytes }).collect();
                if list.is_empty() { Ok(()) } else { Err(Error::Registered(list)) }
            }
        }
    }
}

/// Whether the request selects this allocation.
fn is_meant(request: &TransitionRequest, allocation: &Allocation) -> bool {
    let on_gpu = || driver::uuid(allocation.device).is_some_and(|uuid| request.gpus.contains(&uuid));
    (request.tags.is_empty() || request.tags.iter().any(|tag| **tag == *allocation.tag)) && (request.gpus.is_empty() || on_gpu())
}

/// Runs a pause or resume as library work, whoever requested it: once the program is exiting, it makes no driver call, and
/// fails for that reason.
fn unless_ending<R>(work: impl FnOnce() -> Result<R, Error>) -> Result<R, Error> {
    exit::as_worker(work).map_err(|error| if exit::is_ending() { Error::Ending } else { error })
}

/// Adds NCCL's results to a report.
fn with_communicators(report: Report, ask_nccl: impl FnOnce() -> Vec<Communicator>) -> Report {
    let started = Instant::now();
    let communicators = ask_nccl();
    if communicators.is_empty() {
        return report;
    }
    events::stage(Stage::Nccl, started.elapsed());
    let ms = milliseconds(started.elapsed());
    let mut stages = report.stages;
    *stages.entry(Stage::Nccl).or_default() += ms;
    Report { communicators, stages, ms: report.ms + ms, ..report }
}

/// Total bytes on each device.
fn bytes_of_devices<'a>(allocations: impl Iterator<Item = &'a Allocation>) -> BTreeMap<CUdevice, u64> {
    allocations.fold(BTreeMap::new(), |mut bytes, allocation| {
        *bytes.entry(allocation.device).or_default() += allocation.bytes() as u64;
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
        events::stage(stage, duration);
        *self.0.entry(stage).or_default() += milliseconds(duration);
    }
}
