//! Pause and resume: all or nothing, and nothing to do for what is already so.
//!
//! A pause first does what can be taken back (wait, save, unmap) and only then what cannot (release). So whatever fails
//! before the release finds the physical memory still there with its contents, to be mapped again. A release that the
//! driver refuses does not fail the pause: the contents are safe by then, the memory is kept in a list and tried again,
//! and the report says how much is late.
//!
//! A resume creates, maps and fills new memory beside the old state, and only then lets go of the backups.

use super::{Allocation, Backup, Memory, State};
use crate::backup::{self, Saved};
use crate::driver::{self, CUdevice, Context, Current, Failure, RelaxedCapture, code};
use crate::error::{Error, Shortage};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// What to pause or resume, and how.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// The tags; none means all.
    pub tags: Vec<String>,
    /// What becomes of the contents, in place of the allocations' own policies. For a pause only.
    pub backup: Option<Backup>,
    /// How long to wait: a pause for the device's work, a resume for memory that others hold. `None`: a pause waits for
    /// as long as it takes, a resume not at all.
    pub timeout: Option<Duration>,
}

/// A part of a pause or resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// For the device's work, or for memory.
    Wait,
    /// Contents are copied to where they are kept.
    Save,
    /// Memory is taken away from its addresses.
    Unmap,
    /// Memory is given back to the driver.
    Release,
    /// New memory is put at the addresses.
    Map,
    /// Contents are copied back.
    Restore,
}

impl Stage {
    /// As in the protocol.
    pub fn name(self) -> &'static str {
        match self {
            Self::Wait => "wait",
            Self::Save => "save",
            Self::Unmap => "unmap",
            Self::Release => "release",
            Self::Map => "map",
            Self::Restore => "restore",
        }
    }
}

/// How far a stage has come, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// The stage.
    pub stage: Stage,
    /// Bytes done.
    pub done: u64,
    /// Bytes to do.
    pub total: u64,
}

/// What a pause or resume did.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Allocations that changed their state.
    pub allocations: u64,
    /// Their bytes of device memory, now given back or taken again.
    pub bytes: u64,
    /// Of those, bytes whose contents were saved or restored.
    pub kept_bytes: u64,
    /// Of those, bytes whose contents were discarded: they read as zero after the resume.
    pub discarded_bytes: u64,
    /// Allocations that were already so.
    pub unchanged: u64,
    /// Bytes that the driver has refused to take back so far. They are not lost: it is tried again at every pause,
    /// resume and shortage.
    pub late_bytes: u64,
    /// Milliseconds in each stage.
    pub stages: BTreeMap<Stage, f64>,
    /// Milliseconds in all.
    pub ms: f64,
}

/// How often a resume that waits for memory looks for it.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

impl Memory {
    /// Pauses: gives the memory of active allocations back to the driver, their contents kept as the policies say.
    /// After an error everything is as it was.
    pub fn pause(&self, request: &Request, progress: &mut dyn FnMut(Progress)) -> Result<Report, Error> {
        let started = Instant::now();
        let mut clock = Clock::default();
        // The long wait comes before the lock, so that the program can allocate and free meanwhile; under the lock only
        // what was started since has to finish.
        clock.time(Stage::Wait, || wait_for_work(&self.snapshot(), request.timeout))?;
        let _exclusive = self.exclude();
        let _relaxed = RelaxedCapture::enter();
        driver::sweep();
        let (all, chosen) = self.choose(&request.tags)?;
        let (already, victims): (Vec<_>, Vec<_>) = chosen.into_iter().partition(|allocation| allocation.is_paused());
        let left = request.timeout.map(|timeout| timeout.saturating_sub(started.elapsed()));
        clock.time(Stage::Wait, || wait_for_work(&all, left))?;

        let (keep, discard): (Vec<_>, Vec<_>) =
            victims.into_iter().partition(|allocation| request.backup.unwrap_or(allocation.backup) == Backup::Host);
        let (kept_bytes, discarded_bytes) = (total_bytes(&keep), total_bytes(&discard));
        let saved = clock.time(Stage::Save, || backup::save(&keep, progress))?;
        let saved = saved.into_iter().map(|saved| Some(Arc::new(saved))).chain(discard.iter().map(|_| None));
        let victims: Vec<_> = keep.iter().chain(&discard).cloned().zip(saved).collect();
        let victims = clock.time(Stage::Unmap, || self.unmap_all(victims))?;
        let allocations = victims.len() as u64;
        clock.time(Stage::Release, || {
            for (allocation, saved) in victims {
                // The old state's memory is released as it is dropped.
                *allocation.state() = State::Paused(saved);
            }
        });
        Ok(Report {
            allocations,
            bytes: kept_bytes + discarded_bytes,
            kept_bytes,
            discarded_bytes,
            unchanged: already.len() as u64,
            late_bytes: driver::leftover_bytes(),
            stages: clock.0,
            ms: milliseconds(started.elapsed()),
        })
    }

    /// Resumes: puts new memory at the addresses of paused allocations, and their contents into it. After an error
    /// everything is as it was.
    pub fn resume(&self, request: &Request, progress: &mut dyn FnMut(Progress)) -> Result<Report, Error> {
        let started = Instant::now();
        loop {
            let attempt = self.try_resume(request, started, progress);
            let Err(Error::DeviceMemory(_)) = &attempt else { return attempt };
            let left = request.timeout.unwrap_or_default().saturating_sub(started.elapsed());
            if left.is_zero() {
                return attempt.map_err(with_holders);
            }
            // Without the lock: the program may free something.
            thread::sleep(left.min(LOOK_AGAIN));
        }
    }

    fn try_resume(&self, request: &Request, started: Instant, progress: &mut dyn FnMut(Progress)) -> Result<Report, Error> {
        let mut clock = Clock::default();
        let _exclusive = self.exclude();
        let _relaxed = RelaxedCapture::enter();
        driver::sweep();
        let (_, chosen) = self.choose(&request.tags)?;
        let (paused, already): (Vec<_>, Vec<_>) = chosen.into_iter().partition(|allocation| allocation.is_paused());
        clock.0.insert(Stage::Wait, milliseconds(started.elapsed()));
        let memories = clock.time(Stage::Map, || self.map_all(&paused))?;
        clock.time(Stage::Restore, || restore_all(&paused, progress))?;

        let mut report =
            Report { allocations: paused.len() as u64, bytes: total_bytes(&paused), unchanged: already.len() as u64, ..Report::default() };
        for (allocation, memory) in paused.iter().zip(memories) {
            let before = std::mem::replace(&mut *allocation.state(), State::Active(memory));
            match before {
                State::Paused(Some(saved)) => {
                    report.kept_bytes += allocation.bytes() as u64;
                    backup::recycle(saved);
                }
                _ => report.discarded_bytes += allocation.bytes() as u64,
            }
        }
        report.late_bytes = driver::leftover_bytes();
        report.stages = clock.0;
        report.ms = milliseconds(started.elapsed());
        Ok(report)
    }

    /// All allocations, and those with one of the tags. A tag that none has is an error.
    #[allow(clippy::type_complexity)]
    fn choose(&self, tags: &[String]) -> Result<(Vec<Arc<Allocation>>, Vec<Arc<Allocation>>), Error> {
        let all = self.snapshot();
        let known: BTreeSet<&str> = all.iter().map(|allocation| &*allocation.tag).collect();
        let unknown: Vec<_> = tags.iter().filter(|tag| !known.contains(tag.as_str())).cloned().collect();
        if !unknown.is_empty() {
            return Err(Error::UnknownTag { unknown, known: known.into_iter().map(str::to_owned).collect() });
        }
        let wanted = |allocation: &&Arc<Allocation>| tags.is_empty() || tags.iter().any(|tag| **tag == *allocation.tag);
        let chosen = all.iter().filter(wanted).cloned().collect();
        Ok((all, chosen))
    }

    /// Unmaps all of them or none.
    fn unmap_all(&self, mut victims: Victims) -> Result<Victims, Error> {
        for at in 0..victims.len() {
            if let Err(failure) = victims[at].0.unmap() {
                victims.truncate(at);
                return Err(self.map_again(victims, failure));
            }
        }
        Ok(victims)
    }

    /// Maps what was unmapped a moment ago again; its contents are still in it.
    fn map_again(&self, victims: Victims, failure: Failure) -> Error {
        let mut stranded = 0;
        for (allocation, saved) in victims {
            let mut state = allocation.state();
            let State::Active(memory) = &mut *state else { continue };
            if let Err(second) = memory.map(allocation.reservation(), &self.peers_of(allocation.device)) {
                // Two failures in a row: it cannot be had back now, so it is paused, its contents as its policy says.
                log::error!("{:#x} ({}) stays paused: {second}", allocation.address(), allocation.tag);
                *state = State::Paused(saved);
                stranded += 1;
            }
        }
        if stranded == 0 {
            return failure.into();
        }
        Error::Internal(format!("{failure}, and {stranded} allocations could not be mapped again; they are paused: resume them"))
    }

    /// New memory, mapped at the addresses of all of them, or none.
    fn map_all(&self, paused: &[Arc<Allocation>]) -> Result<Vec<driver::Memory>, Error> {
        let mut needed = BTreeMap::<CUdevice, (u64, Context)>::new();
        for allocation in paused {
            needed.entry(allocation.device).or_insert((0, allocation.context())).0 += allocation.bytes() as u64;
        }
        for (&device, &(needed, context)) in &needed {
            check_free(device, context, needed)?;
        }
        let map = |allocation: &Arc<Allocation>| {
            let mut memory = driver::Memory::create(allocation.device, allocation.bytes())?;
            memory.map(allocation.reservation(), &self.peers_of(allocation.device))?;
            Ok(memory)
        };
        paused
            .iter()
            .map(|allocation| map(allocation).map_err(|failure: Failure| (allocation.device, failure)))
            .collect::<Result<_, _>>()
            .map_err(|(device, failure)| {
                if failure.code != code::OUT_OF_MEMORY {
                    return failure.into();
                }
                // Somebody was faster. What was taken so far is free again by now.
                let (needed, context) = needed[&device];
                let free = Current::push(context).and_then(|_current| driver::memory_info()).map_or(0, |(free, _)| free);
                Error::DeviceMemory(Shortage { device, needed, free, holders: Vec::new() })
            })
    }
}

/// Waits until the work of every context that allocated has finished, for so long at most.
fn wait_for_work(allocations: &[Arc<Allocation>], limit: Option<Duration>) -> Result<(), Error> {
    let contexts: BTreeSet<Context> = allocations.iter().map(|allocation| allocation.context()).collect();
    if contexts.is_empty() {
        return Ok(());
    }
    let wait = move || {
        contexts.into_iter().try_for_each(|context| match Current::push(context) {
            Ok(current) => current.wait_for_work(),
            // A destroyed context has no work left.
            Err(Failure { code: code::INVALID_CONTEXT | code::CONTEXT_IS_DESTROYED, .. }) => Ok(()),
            Err(failure) => Err(failure),
        })
    };
    let waited = match limit {
        None => wait(),
        Some(limit) => wait_elsewhere(wait, limit)?,
    };
    Ok(waited?)
}

/// Runs `wait` in a thread of its own, because the driver's wait has no limit. A thread that outlives the limit ends with
/// the work it waits for, and harms nothing meanwhile.
fn wait_elsewhere(wait: impl FnOnce() -> Result<(), Failure> + Send + 'static, limit: Duration) -> Result<Result<(), Failure>, Error> {
    let (answer, answered) = mpsc::channel();
    crate::process::spawn("vramctl-wait", move || {
        let _ = answer.send(wait());
    })
    .map_err(|error| Error::Internal(format!("no thread could be started: {error}")))?;
    answered.recv_timeout(limit).map_err(|_| Error::Busy(limit))
}

type Victims = Vec<(Arc<Allocation>, Option<Arc<Saved>>)>;

fn check_free(device: CUdevice, context: Context, needed: u64) -> Result<(), Error> {
    let _current = Current::push(context)?;
    let (free, _) = driver::memory_info()?;
    if needed > free { Err(Error::DeviceMemory(Shortage { device, needed, free, holders: Vec::new() })) } else { Ok(()) }
}

fn restore_all(paused: &[Arc<Allocation>], progress: &mut dyn FnMut(Progress)) -> Result<(), Error> {
    let contents: Vec<_> = paused
        .iter()
        .filter_map(|allocation| match &*allocation.state() {
            State::Paused(Some(saved)) => Some((Arc::clone(allocation), Arc::clone(saved))),
            _ => None,
        })
        .collect();
    backup::restore(&contents, progress)
}

fn with_holders(error: Error) -> Error {
    match error {
        Error::DeviceMemory(shortage) => Error::DeviceMemory(Shortage { holders: driver::holders(shortage.device), ..shortage }),
        other => other,
    }
}

fn total_bytes(allocations: &[Arc<Allocation>]) -> u64 {
    allocations.iter().map(|allocation| allocation.bytes() as u64).sum()
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
        *self.0.entry(stage).or_default() += milliseconds(started.elapsed());
        result
    }
}
