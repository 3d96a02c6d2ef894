//! Pause and resume: all or nothing, and a no-op for what is already so.
//!
//! | | pause | resume |
//! | --- | --- | --- |
//! | can be taken back | wait for the device's work, save the contents, unmap | create, map, fill new memory beside the old state |
//! | point of no return | release the physical memory | let go of the backups |
//!
//! Whatever fails before the point of no return finds everything that is needed to go back. Nothing that can fail comes after
//! it: a release that the driver refuses does not fail the pause, because the contents are safe by then. The memory is kept in a
//! list and tried again, and the report says how much is late.

pub mod cleaning;
mod pause;
mod plan;
mod resume;

use crate::memory::{Allocation, Memory};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use vramctl_driver::{self as driver, CUdevice};
use vramctl_model::{Error, Stage, TransitionRequest};

/// For a reader.
fn tags_text(request: &TransitionRequest) -> String {
    if request.tags.is_empty() { "all tags".into() } else { request.tags.join(", ") }
}

/// What a request is about.
struct Chosen {
    /// All allocations of the process, by address.
    all: Vec<Arc<Allocation>>,
    /// Those that the request means and that are active.
    active: Vec<Arc<Allocation>>,
    /// Those that it means and that are paused.
    paused: Vec<Arc<Allocation>>,
}

impl Memory {
    /// Finds what a request is about. A tag that no allocation has is an error.
    fn choose(&self, request: &TransitionRequest) -> Result<Chosen, Error> {
        let all = self.snapshot();
        let known: BTreeSet<&str> = all.iter().map(|allocation| &*allocation.tag).collect();
        let unknown: BTreeSet<_> = request.tags.iter().filter(|tag| !known.contains(tag.as_str())).cloned().collect();
        if !unknown.is_empty() {
            return Err(Error::UnknownTag {
                unknown: unknown.into_iter().collect(),
                known: known.into_iter().map(str::to_owned).collect(),
            });
        }
        let meant = all.iter().filter(|allocation| is_meant(request, allocation)).cloned();
        let (paused, active) = meant.partition(|allocation| allocation.is_paused());
        Ok(Chosen { all, active, paused })
    }
}

/// Whether a request means this one.
fn is_meant(request: &TransitionRequest, allocation: &Allocation) -> bool {
    let on_gpu = || driver::uuid(allocation.device).is_some_and(|uuid| request.gpus.contains(&uuid));
    (request.tags.is_empty() || request.tags.iter().any(|tag| **tag == *allocation.tag)) && (request.gpus.is_empty() || on_gpu())
}

/// How many bytes they have on each device.
fn bytes_of_devices<'a>(allocations: impl Iterator<Item = &'a Allocation>) -> BTreeMap<CUdevice, u64> {
    allocations.fold(BTreeMap::new(), |mut bytes, allocation| {
        *bytes.entry(allocation.device).or_default() += allocation.bytes() as u64;
        bytes
    })
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// Adds up the time in each stage.
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
        *self.0.entry(stage).or_default() += milliseconds(duration);
    }
}
