//! Pause and resume: all or nothing, and nothing to do for what is already so.
//!
//! A pause first does what can be taken back (wait, save, unmap) and only then what cannot (release). So whatever fails
//! before the release finds the physical memory still there with its contents, to be mapped again. There is one exception:
//! where all the memory for the contents is there, so that only a copy could still fail, what is copied is released at
//! once, and should a copy fail, it gets new memory and its contents. A release that the driver refuses does not fail the
//! pause: the contents are safe by then, the memory is kept in a list and tried again, and the report says how much is
//! late.
//!
//! A resume creates, maps and fills new memory beside the old state, and only then lets go of the backups.

pub mod cleaning;
pub(crate) mod drain;

use crate::memory::{Allocation, Contents, Memory, Shared, lock};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use vramctl_backup::{self as backup, Saved};
use vramctl_driver::{self as driver, CUdevice, Current, RelaxedCapture};
use vramctl_host::exit;
use vramctl_model::{Backup, Error, Failure, Observer, Progress, Report, Request, Shortage, Span, Stage, code};

/// For a reader.
fn tags_text(request: &Request) -> String {
    if request.tags.is_empty() { "all tags".into() } else { request.tags.join(", ") }
}

/// What becomes of an allocation's contents: the request says it, or its own policy.
fn policy_for(request: &Request, allocation: &Allocation) -> Backup {
    request.backups.get(&*allocation.tag).copied().unwrap_or(request.backup).unwrap_or(allocation.backup)
}

/// What of an allocation is to be kept, and where.
fn wanted_of(request: &Request, allocation: &Allocation) -> backup::Wanted {
    let policy = policy_for(request, allocation);
    let retain = backup::retains(&allocation.tag);
    let all = Range { start: 0, end: allocation.bytes() };
    let live = match policy {
        Backup::Discard => Vec::new(),
        // What is not kept cannot be compared with what will be there next time.
        _ if retain => vec![all],
        _ => without(all, request.unused.iter().filter_map(|span| pages_inside(*span, allocation))),
    };
    backup::Wanted { extent: allocation.extent(), policy, retain, before: allocation.contents().saved.clone(), live }
}

/// The whole pages of an allocation that lie in a span, in bytes from the allocation's beginning. Less than a page is not
/// worth a copy of its own.
fn pages_inside(span: Span, allocation: &Allocation) -> Option<Range<usize>> {
    const PAGE: usize = 2 << 20;
    let offset = |address: u64| address.saturating_sub(allocation.address()).min(allocation.bytes() as u64) as usize;
    let start = offset(span.address).next_multiple_of(PAGE);
    let end = offset(span.address.saturating_add(span.bytes as u64)) / PAGE * PAGE;
    (start < end).then_some(start..end)
}

/// What is left of a range without some parts of it, in order.
fn without(all: Range<usize>, parts: impl Iterator<Item = Range<usize>>) -> Vec<Range<usize>> {
    let mut parts: Vec<_> = parts.collect();
    parts.sort_unstable_by_key(|part| part.start);
    let (mut left, mut from) = (Vec::new(), all.start);
    for part in parts {
        if part.start > from {
            left.push(from..part.start);
        }
        from = from.max(part.end);
    }
    if from < all.end {
        left.push(from..all.end);
    }
    left
}

/// How often a resume that waits for memory looks for it.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// How long a pause waits under the lock, for work that was started since it last waited. Short: the program may need to
/// allocate in order to finish that work.
const WAIT_LOCKED: Duration = Duration::from_millis(100);

impl Memory {
    /// Pauses: gives the memory of active allocations back to the driver, their contents kept as the policies say.
    /// After an error everything is as it was.
    pub fn pause(&self, request: &Request, observer: &mut dyn Observer) -> Result<Report, Error> {
        unless_ending(|| self.pause_when_idle(request, observer))
    }

    fn pause_when_idle(&self, request: &Request, observer: &mut dyn Observer) -> Result<Report, Error> {
        let started = Instant::now();
        let mut clock = Clock::default();
        let left = || request.timeout.map(|timeout| timeout.saturating_sub(started.elapsed()));
        loop {
            // The long wait comes before the lock, so that the program can allocate and free meanwhile; under the lock
            // only what was started since has to finish.
            let contexts = {
                let (all, chosen) = self.choose(&request.tags)?;
                // Where there is nothing to pause, nothing needs to be waited for.
                let idle = chosen.iter().all(|allocation| allocation.is_paused());
                if idle { BTreeSet::new() } else { self.contexts_that_use(all.iter().map(|allocation| &**allocation)) }
            };
            let waited = clock.time(Stage::Wait, || match (left(), observer.is_gone()) {
                // In the calling thread: nothing can end the wait but the work.
                (None, None) => Ok(drain::wait(contexts)?),
                (left, _) => drain::wait_at_most(contexts, left.unwrap_or(Duration::MAX), &mut || observer.is_gone() != Some(true)),
            });
            waited.map_err(|error| match error {
                Error::Busy(_) => Error::Busy(started.elapsed()),
                other => other,
            })?;
            match self.try_pause(request, started, &mut clock, observer) {
                Err(Error::Busy(_)) if left().is_none_or(|left| !left.is_zero()) && observer.is_gone() != Some(true) => (),
                Err(Error::Busy(_)) => return Err(Error::Busy(started.elapsed())),
                Err(Error::HostMemory { .. }) if self.make_room(request) => (),
                answer => return answer.inspect(|report| log::info!("paused {}: {report}", tags_text(request))),
            }
        }
    }

    fn try_pause(&self, request: &Request, started: Instant, clock: &mut Clock, observer: &mut dyn Observer) -> Result<Report, Error> {
        let _exclusive = self.exclude();
        let _relaxed = RelaxedCapture::enter();
        driver::sweep();
        self.drop_gone();
        let (all, chosen) = self.choose(&request.tags)?;
        let (already, victims): (Vec<_>, Vec<_>) = chosen.into_iter().partition(|allocation| allocation.is_paused());
        if !victims.is_empty() {
            let contexts = self.contexts_that_use(all.iter().map(|allocation| &**allocation));
            clock.time(Stage::Wait, || drain::wait_at_most(contexts, WAIT_LOCKED, &mut || true))?;
        }
        let progress = &mut |now| observer.progress(now);

        let bytes: u64 = victims.iter().map(|allocation| allocation.bytes() as u64).sum();
        let of_address: BTreeMap<_, _> = victims.iter().map(|allocation| (allocation.address(), allocation)).collect();
        let of_item = |(extent, saved): &backup::Item| (Arc::clone(of_address[&extent.address]), Some(Arc::clone(saved)));
        let mut wanted: Vec<_> = victims.iter().map(|allocation| wanted_of(request, allocation)).collect();
        wanted.retain(|wanted| !wanted.live.is_empty());
        // What is saved is unmapped while the rest is still being copied: that takes long where allocations are many, and can
        // be taken back. Where it fails, it is tried once more at the end. It is released as well only if no more than a copy
        // to memory that is there can fail: the driver cleans what is released in the background, and better now than when a
        // resume needs the copy engines.
        let (mut unmapped, mut released) = (Vec::new(), Vec::new());
        let mut give_up = |item: &backup::Item, certain| {
            let (allocation, saved) = of_item(item);
            if !allocation.unmap().is_ok_and(|unmapped| unmapped) {
                return;
            }
            unmapped.push((Arc::clone(&allocation), saved.clone()));
            if certain {
                allocation.replace(Contents { memory: None, saved });
                released.push(allocation);
            }
        };
        let paused = bytes_of_devices(all.iter().filter(|allocation| allocation.is_paused()).map(|allocation| &**allocation));
        let kept = clock.time(Stage::Save, || backup::save(wanted, &paused, progress, &mut give_up));
        let kept = kept.map_err(|error| self.take_back(&unmapped, &released, error))?;
        let kept_bytes = kept.items.iter().map(|(_, saved)| saved.kept_bytes()).sum();
        let mut saved: BTreeMap<_, _> = kept.items.into_iter().map(|(extent, saved)| (extent.address, saved)).collect();
        // In the order of their addresses, as they come: neighbours are unmapped in one call.
        let victims: Vec<_> = victims.iter().map(|allocation| (Arc::clone(allocation), saved.remove(&allocation.address()))).collect();
        let unmapped = clock.time(Stage::Unmap, || unmap_all(&victims));
        unmapped.map_err(|failure| self.take_back(&victims, &released, failure.into()))?;
        let allocations = victims.len() as u64;
        let given_back = bytes_of_devices(victims.iter().map(|(allocation, _)| &**allocation));
        clock.time(Stage::Release, || {
            for (allocation, saved) in victims {
                allocation.replace(Contents { memory: None, saved });
            }
        });
        if allocations > 0 {
            backup::paused();
            cleaning::expect(&given_back);
        }
        Ok(Report {
            allocations,
            bytes,
            kept_bytes,
            unchanged_bytes: kept.unchanged_bytes,
            discarded_bytes: bytes - kept_bytes,
            unchanged: already.len() as u64,
            late_bytes: driver::leftover_bytes(),
            stages: std::mem::take(&mut clock.0),
            ms: milliseconds(started.elapsed()),
        })
    }

    /// Gives up of what is retained of active memory, which only saves time, as much as a pause needs. Not what that pause
    /// saves over. `false`: there is nothing to give up, or all of it would not be enough.
    fn make_room(&self, request: &Request) -> bool {
        let given_up: Vec<_> = {
            let _exclusive = self.exclude();
            let (mut wanted, mut retained) = (Vec::new(), Vec::new());
            for allocation in self.snapshot().into_iter().filter(|allocation| !allocation.is_paused()) {
                let new = Some(wanted_of(request, &allocation)).filter(|new| is_meant(&request.tags, &allocation) && !new.live.is_empty());
                let saved = allocation.contents().saved.clone();
                if let Some(saved) = saved.filter(|_| new.as_ref().is_none_or(|new| new.saved_over().is_none())) {
                    retained.push((allocation, saved));
                }
                wanted.extend(new);
            }
            let (of, retained): (Vec<_>, Vec<_>) = retained.into_iter().unzip();
            let Some(given_up) = backup::in_the_way(&retained, wanted) else { return false };
            given_up.into_iter().filter_map(|place| of[place].contents().saved.take()).collect()
        };
        if !given_up.is_empty() {
            log::info!("host memory is short: what was retained of {} allocations is given up", given_up.len());
        }
        !given_up.is_empty()
    }

    /// Resumes: puts new memory at the addresses of paused allocations, and their contents into it. After an error
    /// everything is as it was.
    pub fn resume(&self, request: &Request, observer: &mut dyn Observer) -> Result<Report, Error> {
        unless_ending(|| self.resume_when_there_is_room(request, observer))
    }

    fn resume_when_there_is_room(&self, request: &Request, observer: &mut dyn Observer) -> Result<Report, Error> {
        let started = Instant::now();
        loop {
            let attempt = self.try_resume(request, started, observer);
            let Err(Error::DeviceMemory(_)) = &attempt else {
                return attempt.inspect(|report| log::info!("resumed {}: {report}", tags_text(request)));
            };
            let left = request.timeout.unwrap_or_default().saturating_sub(started.elapsed());
            if left.is_zero() || observer.is_gone() == Some(true) {
                return attempt.map_err(with_holders);
            }
            // Without the lock: the program may free something.
            thread::sleep(left.min(LOOK_AGAIN));
        }
    }

    fn try_resume(&self, request: &Request, started: Instant, observer: &mut dyn Observer) -> Result<Report, Error> {
        let mut clock = Clock::default();
        let _exclusive = self.exclude();
        let _relaxed = RelaxedCapture::enter();
        driver::sweep();
        self.drop_gone();
        let (_, chosen) = self.choose(&request.tags)?;
        let (paused, already): (Vec<_>, Vec<_>) = chosen.into_iter().partition(|allocation| allocation.is_paused());
        let progress = &mut |now| observer.progress(now);
        clock.0.insert(Stage::Wait, milliseconds(started.elapsed()));
        let memories = self.bring_back(&paused, &mut clock, progress)?;

        let mut report = Report { allocations: paused.len() as u64, unchanged: already.len() as u64, ..Report::default() };
        for (allocation, memory) in paused.iter().zip(memories) {
            let kept_bytes = allocation.contents().saved.as_ref().map_or(0, |saved| saved.kept_bytes());
            report.kept_bytes += kept_bytes;
            report.discarded_bytes += allocation.bytes() as u64 - kept_bytes;
            report.bytes += allocation.bytes() as u64;
            activate(allocation, memory);
        }
        report.late_bytes = driver::leftover_bytes();
        report.stages = clock.0;
        report.ms = milliseconds(started.elapsed());
        // Somebody else may have given it back just before.
        cleaning::expect(&bytes_of_devices(paused.iter().map(|allocation| &**allocation)));
        Ok(report)
    }

    /// All allocations, and those with one of the tags. A tag that none has is an error.
    #[allow(clippy::type_complexity)]
    fn choose(&self, tags: &[String]) -> Result<(Vec<Arc<Allocation>>, Vec<Arc<Allocation>>), Error> {
        let all = self.snapshot();
        let known: BTreeSet<&str> = all.iter().map(|allocation| &*allocation.tag).collect();
        let unknown: BTreeSet<_> = tags.iter().filter(|tag| !known.contains(tag.as_str())).cloned().collect();
        if !unknown.is_empty() {
            return Err(Error::UnknownTag {
                unknown: unknown.into_iter().collect(),
                known: known.into_iter().map(str::to_owned).collect(),
            });
        }
        let chosen = all.iter().filter(|allocation| is_meant(tags, allocation)).cloned().collect();
        Ok((all, chosen))
    }

    /// Takes back what a pause has done so far: what was unmapped is mapped again, its contents still in it, and what was
    /// released gets new memory and its contents.
    fn take_back(&self, victims: &[(Arc<Allocation>, Option<Arc<Saved>>)], released: &[Arc<Allocation>], error: Error) -> Error {
        let mut stranded = 0;
        // Neighbours that share memory have it back together, or not at all.
        for sharing in victims.chunk_by(|(one, _), (next, _)| one.shares_with(next)) {
            let Some((first, _)) = sharing.first() else { continue };
            let Some(memory) = first.contents().memory.clone() else { continue };
            let mapped = {
                let mut memory = lock(&memory);
                if memory.is_mapped() { Ok(()) } else { memory.map_again().and_then(|()| self.open(first.device, [&*memory])) }
            };
            if let Err(second) = mapped {
                // Two failures in a row: it cannot be had back now, so it is paused, its contents as its policy says.
                for (allocation, saved) in sharing {
                    log::error!("{:#x} ({}) stays paused: {second}", allocation.address(), allocation.tag);
                    allocation.replace(Contents { memory: None, saved: saved.clone() });
                    stranded += 1;
                }
            }
        }
        // What the driver has refused to take back would be missing now.
        driver::sweep();
        match self.bring_back(released, &mut Clock::default(), &mut |_| ()) {
            Ok(memories) => released.iter().zip(memories).for_each(|(allocation, memory)| activate(allocation, memory)),
            Err(second) => {
                log::error!("{} allocations stay paused: {second}", released.len());
                stranded += released.len();
            }
        }
        if stranded == 0 {
            return error;
        }
        Error::Internal(format!("{error}, and {stranded} allocations could not be mapped again; they are paused: resume them"))
    }

    /// New memory with the old contents at the addresses of all of them, or none. Contents are copied to memory that is
    /// mapped already while more is being mapped.
    fn bring_back(&self, paused: &[Arc<Allocation>], clock: &mut Clock, progress: &mut dyn FnMut(Progress)) -> Result<Vec<Shared>, Error> {
        let started = Instant::now();
        let needed = check_free(paused)?;
        let item = |allocation: &Arc<Allocation>| Some((allocation.extent(), allocation.contents().saved.clone()?));
        let saved: Vec<_> = paused.iter().filter_map(item).collect();
        let mut saved_next = saved.iter().peekable();
        let mut memories: Vec<Shared> = Vec::with_capacity(paused.len());
        let brought = backup::restore(&saved, progress, |give| {
            let mut from = 0;
            for upto in batches(paused) {
                let (device, mut mapped) = (paused[from].device, Vec::new());
                for sharing in neighbours(&paused[from..upto]) {
                    let bytes = sharing.iter().map(|allocation| allocation.bytes()).sum();
                    let mut memory = driver::Physical::create(device, bytes).map_err(|failure| {
                        if failure.code == code::OUT_OF_MEMORY { shortage(&sharing[0], needed[&device]) } else { failure.into() }
                    })?;
                    memory.map(sharing.iter().map(|allocation| Arc::clone(allocation.addresses())).collect())?;
                    let memory = Arc::new(Mutex::new(memory));
                    memories.extend(sharing.iter().map(|_| Arc::clone(&memory)));
                    mapped.push(memory);
                }
                {
                    let mapped: Vec<_> = mapped.iter().map(lock).collect();
                    self.open(device, mapped.iter().map(|memory| &**memory))?;
                }
                for allocation in &paused[from..upto] {
                    saved_next.next_if(|(next, _)| next.address == allocation.address()).into_iter().for_each(&mut *give);
                }
                from = upto;
            }
            clock.add(Stage::Map, started.elapsed());
            Ok(())
        });
        clock.add(Stage::Restore, started.elapsed());
        // After an error the new memory goes as it came; nothing is being copied to it any more.
        brought.map(|()| memories)
    }
}

/// Whoever asks for it, a pause or resume is work of ours: once the program ends it does not call the driver any more, and
/// that is then why it fails.
fn unless_ending(work: impl FnOnce() -> Result<Report, Error>) -> Result<Report, Error> {
    exit::as_worker(work).map_err(|error| if exit::is_ending() { Error::Ending } else { error })
}

/// Whether the tags mean this one. None of them: all.
fn is_meant(tags: &[String], allocation: &Allocation) -> bool {
    tags.is_empty() || tags.iter().any(|tag| **tag == *allocation.tag)
}

/// Unmaps all of them that are not unmapped yet. After an error, some may be.
fn unmap_all(victims: &[(Arc<Allocation>, Option<Arc<Saved>>)]) -> Result<(), Failure> {
    let mut memories: Vec<_> = victims.iter().filter_map(|(allocation, _)| allocation.contents().memory.clone()).collect();
    // What is shared comes once for each of those that share it, one behind the other.
    memories.dedup_by(|next, one| Arc::ptr_eq(next, one));
    let mut memories: Vec<_> = memories.iter().map(lock).filter(|memory| memory.is_mapped()).collect();
    driver::unmap(&mut memories.iter_mut().map(|memory| &mut **memory).collect::<Vec<_>>())
}

/// A paused allocation has its memory and contents back.
fn activate(allocation: &Allocation, memory: Shared) {
    let saved = allocation.contents().saved.take();
    // What is in a file is slower to compare with than to write anew.
    let saved = saved.filter(|saved| backup::retains(&allocation.tag) && matches!(**saved, Saved::Host(_)));
    allocation.replace(Contents { memory: Some(memory), saved });
}

/// Paused allocations in groups that get physical memory together. What it costs to take memory, to make it accessible and
/// to give it back hardly depends on its size: 4000 times 2 MiB take 170 ms, and in three pieces 0.4
/// (`docs/performance.md`). But a piece is given back as a whole, after the last that shares it is freed. So only those share
/// that may ([`crate::memory::Placement::may_share`]), and none of a tag of which the program has freed some while they were active.
fn neighbours(paused: &[Arc<Allocation>]) -> impl Iterator<Item = &[Arc<Allocation>]> {
    let mut rest = paused;
    std::iter::from_fn(move || {
        let mut bytes = rest.first()?.bytes();
        let more = rest.windows(2).take_while(|pair| {
            bytes += pair[1].bytes();
            bytes <= driver::PHYSICAL_PIECE && pair[0].may_share_with(&pair[1])
        });
        let (sharing, after) = rest.split_at(1 + more.count());
        rest = after;
        Some(sharing)
    })
}

/// Where to stop mapping for a moment, make accessible what was mapped, and have it filled: neighbours on a device are
/// made accessible in one call, so a call for each would be a waste; so would it be to keep the copies waiting.
fn batches(allocations: &[Arc<Allocation>]) -> Vec<usize> {
    /// As many bytes as take longer to copy than the next ones take to map.
    const BATCH: usize = 256 << 20;
    let mut ends = Vec::new();
    let mut bytes = 0;
    for (at, allocation) in allocations.iter().enumerate() {
        // Where there is nothing to copy, nothing is kept waiting.
        bytes += if allocation.contents().saved.is_some() { allocation.bytes() } else { 0 };
        let last = allocations.get(at + 1).is_none_or(|next| next.device != allocation.device);
        if bytes >= BATCH || last {
            ends.push(at + 1);
            bytes = 0;
        }
    }
    ends
}

/// The bytes needed on each device, if they are free.
fn check_free(paused: &[Arc<Allocation>]) -> Result<BTreeMap<CUdevice, u64>, Error> {
    let all_needed = bytes_of_devices(paused.iter().map(|allocation| &**allocation));
    for (&device, &needed) in &all_needed {
        let on_device = paused.iter().find(|allocation| allocation.device == device);
        let Some(allocation) = on_device else { continue };
        let _current = Current::push(allocation.context())?;
        if needed > driver::memory_info()?.0 {
            return Err(shortage(allocation, needed));
        }
    }
    Ok(all_needed)
}

/// How many bytes they have on each device.
pub(super) fn bytes_of_devices<'a>(allocations: impl Iterator<Item = &'a Allocation>) -> BTreeMap<CUdevice, u64> {
    allocations.fold(BTreeMap::new(), |mut bytes, allocation| {
        *bytes.entry(allocation.device).or_default() += allocation.bytes() as u64;
        bytes
    })
}

/// How much is missing now. Between the look and the taking, somebody may have been faster.
fn shortage(allocation: &Allocation, needed: u64) -> Error {
    let free = Current::push(allocation.context()).and_then(|_current| driver::memory_info()).map_or(0, |(free, _)| free);
    Error::DeviceMemory(Shortage { device: allocation.device, needed, free, holders: Vec::new() })
}

fn with_holders(error: Error) -> Error {
    match error {
        Error::DeviceMemory(shortage) => Error::DeviceMemory(Shortage { holders: driver::holders(shortage.device), ..shortage }),
        other => other,
    }
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
