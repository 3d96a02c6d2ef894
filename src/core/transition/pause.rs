//! A pause: wait, save, unmap, release.

use super::plan::spare_prefix_cache;
use super::{Chosen, Clock, bytes_of_devices, cleaning, is_meant, milliseconds, tags_text};
use crate::drain;
use crate::memory::{Allocation, Contents, Memory};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vramctl_backup::{self as backup, Kept, Saved};
use vramctl_driver::{self as driver, RelaxedCapture};
use vramctl_model::{Backup, Bytes, Error, Failure, Observer, Progress, Report, Span, Stage, TagState, TransitionRequest};

/// How long a pause waits under the lock, for work that was started since it last waited. Short: the program may need to
/// allocate in order to finish that work.
const WAIT_LOCKED: Duration = Duration::from_millis(100);

impl Memory {
    /// Pauses: gives the memory of active allocations back to the driver, their contents kept as the policies say.
    /// After an error everything is as it was.
    pub fn pause(&self, request: &TransitionRequest, observer: &mut dyn Observer) -> Result<Report, Error> {
        let started = Instant::now();
        let mut clock = Clock::default();
        let left = || request.timeout.map(|timeout| timeout.saturating_sub(started.elapsed()));
        loop {
            self.wait_unlocked(request, left(), &mut clock, observer).map_err(|error| match error {
                Error::Busy(_) => Error::Busy(started.elapsed()),
                other => other,
            })?;
            match self.try_pause(request, started, &mut clock, observer) {
                Err(Error::Busy(_)) if left().is_none_or(|left| !left.is_zero()) && observer.is_gone() != Some(true) => (),
                Err(Error::Busy(_)) => return Err(Error::Busy(started.elapsed())),
                Err(Error::HostMemory { needed, available, .. }) if self.make_room(request, needed.saturating_sub(available)) => (),
                answer => return answer.inspect(|report| log::info!("paused {}: {report}", tags_text(request))),
            }
        }
    }

    /// The long wait for the device's work comes before the lock, so that the program can allocate and free meanwhile; under
    /// the lock only what was started since has to finish.
    fn wait_unlocked(
        &self,
        request: &TransitionRequest,
        left: Option<Duration>,
        clock: &mut Clock,
        observer: &mut dyn Observer,
    ) -> Result<(), Error> {
        let chosen = self.choose(request)?;
        spare_prefix_cache(request, &chosen)?;
        let Chosen { all, active, .. } = chosen;
        // Where there is nothing to pause, nothing needs to be waited for.
        if active.is_empty() {
            return Ok(());
        }
        let contexts = self.contexts_that_use(all.iter().map(|allocation| &**allocation));
        clock.time(Stage::Wait, || match (left, observer.is_gone()) {
            // In the calling thread: nothing can end the wait but the work.
            (None, None) => Ok(drain::wait(contexts)?),
            (left, _) => drain::wait_at_most(contexts, left.unwrap_or(Duration::MAX), &mut || observer.is_gone() != Some(true)),
        })
    }

    fn try_pause(
        &self,
        request: &TransitionRequest,
        started: Instant,
        clock: &mut Clock,
        observer: &mut dyn Observer,
    ) -> Result<Report, Error> {
        let _exclusive = self.exclude();
        let _relaxed = RelaxedCapture::enter();
        driver::sweep();
        self.drop_gone();
        let chosen = self.choose(request)?;
        spare_prefix_cache(request, &chosen)?;
        let Chosen { all, active: victims, paused: already } = chosen;
        if !victims.is_empty() {
            let contexts = self.contexts_that_use(all.iter().map(|allocation| &**allocation));
            clock.time(Stage::Wait, || drain::wait_at_most(contexts, WAIT_LOCKED, &mut || true))?;
        }
        let shown = self.show(TagState::Pausing, &victims);
        let kept = self.save(
            request,
            &victims,
            &mut |now| {
                shown.progress(now);
                observer.progress(now);
            },
            clock,
        )?;
        clock.time(Stage::Unmap, || unmap(&victims)).map_err(|failure| self.map_back(&victims, failure.into()))?;

        let bytes: u64 = victims.iter().map(|allocation| allocation.bytes() as u64).sum();
        let kept_bytes = kept.items.iter().map(|(_, saved)| saved.kept_bytes()).sum();
        clock.time(Stage::Release, || release(&victims, kept.items));
        if !victims.is_empty() {
            cleaning::expect(&bytes_of_devices(victims.iter().map(|allocation| &**allocation)));
        }
        Ok(Report {
            allocations: victims.len() as u64,
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

    /// Saves what is to be kept. What is saved is unmapped while the rest is still being copied: that takes long where
    /// allocations are many, and can be taken back.
    fn save(
        &self,
        request: &TransitionRequest,
        victims: &[Arc<Allocation>],
        progress: &mut dyn FnMut(Progress),
        clock: &mut Clock,
    ) -> Result<Kept, Error> {
        let of_address: BTreeMap<_, _> = victims.iter().map(|allocation| (allocation.address(), allocation)).collect();
        let mut wanted: Vec<_> = victims.iter().map(|allocation| wanted_of(request, allocation)).collect();
        wanted.retain(|wanted| !wanted.live.is_empty());
        let mut saved_already = |addresses: &[u64]| {
            let mut saved: Vec<_> = addresses.iter().filter_map(|address| of_address.get(address).map(|one| Arc::clone(one))).collect();
            saved.sort_unstable_by_key(|allocation| allocation.address());
            // Tried once more at the end, where it fails.
            let _ = unmap(&saved);
        };
        clock.time(Stage::Save, || backup::save(wanted, progress, &mut saved_already)).map_err(|error| self.map_back(victims, error))
    }

    /// Takes back what a pause has done so far: what was unmapped is mapped again, its contents still in it.
    fn map_back(&self, victims: &[Arc<Allocation>], error: Error) -> Error {
        let mut stranded = 0;
        for allocation in victims {
            let mapped = {
                let mut contents = allocation.contents();
                let Some(memory) = contents.memory.as_mut().filter(|memory| !memory.is_mapped()) else { continue };
                memory.map_again().and_then(|()| self.open(allocation.device, [&*memory]))
            };
            if let Err(second) = mapped {
                // Two failures in a row: it stays paused, its contents still in the memory that is there.
                log::error!("{:#x} ({}) stays paused: {second}", allocation.address(), allocation.tag);
                stranded += 1;
            }
        }
        if stranded == 0 {
            return error;
        }
        Error::Internal(format!("{error}, and {stranded} allocations could not be mapped again; they are paused: resume them"))
    }

    /// Gives up as much of what is retained of active memory, which only saves time, as a pause is short of. Not what that pause
    /// would save over. `false`: it would not be enough.
    fn make_room(&self, request: &TransitionRequest, short: u64) -> bool {
        let given_up: Vec<_> = {
            let _exclusive = self.exclude();
            let saves_over =
                |allocation: &Arc<Allocation>| is_meant(request, allocation) && policy_for(request, allocation) == Backup::Host;
            let retained = |allocation: Arc<Allocation>| {
                let bytes = allocation.contents().saved.as_ref().map(|saved| saved.kept_bytes());
                let useful = !allocation.is_paused() && !saves_over(&allocation);
                useful.then_some((allocation, bytes?))
            };
            let retained: Vec<_> = self.snapshot().into_iter().filter_map(retained).collect();
            let room: u64 = retained.iter().map(|(_, bytes)| bytes).sum();
            if room.next_multiple_of(backup::HOST_PIECE as u64) < short {
                return false;
            }
            let mut rest = short;
            let needed = |(_, bytes): &&(_, u64)| {
                let before = rest;
                rest = rest.saturating_sub(*bytes);
                before > 0
            };
            retained.iter().take_while(needed).filter_map(|(allocation, _)| allocation.contents().saved.take()).collect()
        };
        if !given_up.is_empty() {
            log::info!("host memory is short of {}: what was retained of {} allocations is given up", Bytes(short), given_up.len());
        }
        !given_up.is_empty()
    }
}

/// Takes memory away from its addresses, neighbours in one call; the contents stay in it. The allocations come in the order
/// of their addresses. After an error, some may be unmapped.
fn unmap(allocations: &[Arc<Allocation>]) -> Result<(), Failure> {
    let mut contents: Vec<_> = allocations.iter().map(|allocation| allocation.contents()).collect();
    let mut mapped: Vec<_> =
        contents.iter_mut().filter_map(|contents| contents.memory.as_mut()).filter(|memory| memory.is_mapped()).collect();
    driver::unmap(&mut mapped)
}

/// Gives the memory back. From now on the contents are where they were saved, or nowhere.
fn release(victims: &[Arc<Allocation>], items: Vec<backup::Item>) {
    let mut saved: BTreeMap<_, Arc<Saved>> = items.into_iter().map(|(extent, saved)| (extent.address, saved)).collect();
    for allocation in victims {
        allocation.replace(Contents { memory: None, saved: saved.remove(&allocation.address()) });
    }
}

/// What becomes of an allocation's contents: the request says it, or its own policy.
pub(super) fn policy_for(request: &TransitionRequest, allocation: &Allocation) -> Backup {
    request.backups.get(&*allocation.tag).copied().unwrap_or(request.backup).unwrap_or(allocation.backup)
}

/// What of an allocation is to be kept, and where.
pub(super) fn wanted_of(request: &TransitionRequest, allocation: &Allocation) -> backup::Wanted {
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
