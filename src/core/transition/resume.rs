//! A resume: create, map and fill new memory, then release the backups.

use super::came::{Came, goes_over};
use super::choose::Chosen;
use super::{Clock, WAIT_LOCKED, busy_since, bytes_of_devices, hold, milliseconds, owed, tags_text, unless_ending};
use crate::events::{self, Cause, Event, FailedRequest};
use crate::gate;
use crate::memory::{Allocation, Memory, PausedBy, State, aside, check_not_quiesced, guard};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use vramctl_backup::{self as backup, Backup, Flow};
use vramctl_driver::{self as driver, CUdevice, Context, Current, Physical, RelaxedCapture};
use vramctl_host::exit;
use vramctl_model::{Error, Failure, Observer, Report, Shortage, Stage, TagState, TransitionRequest, Verb, code};

/// The minimum time that a resume waits for work that may use guards.
const WORK: Duration = Duration::from_secs(10);

/// How often a resume waiting for memory retries.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

impl Memory {
    /// Resumes paused allocations: maps new memory at their addresses and restores their contents. Everything is undone on
    /// error.
    pub fn resume(&self, request: &TransitionRequest, observer: &mut dyn Observer) -> Result<Report, Error> {
        let resumed = events::transition(Verb::Resume, || {
            unless_ending(|| {
                let mut report = self.resume_when_there_is_room(request, observer)?;
                // With memory that others have paused, the program stays held anyway.
                if !self.is_paused_by_others() {
                    // Without the lock: the owner may be waiting for memory of this process.
                    aside::reopen(&mut || !exit::is_ending() && observer.is_wanted());
                    (report.missing, report.lost) = (aside::missing(request), aside::take_lost());
                }
                Ok(report)
            })
        });
        // After a failure as well: it may have closed the gate, and the program may have freed what was paused meanwhile.
        self.let_go();
        resumed
    }

    fn resume_when_there_is_room(&self, request: &TransitionRequest, observer: &mut dyn Observer) -> Result<Report, Error> {
        let started = Instant::now();
        // Set if the program always has work in flight: then no more of it starts until the guards are gone.
        let mut closed = None;
        loop {
            check_not_quiesced()?;
            let left = WORK.max(request.timeout.unwrap_or_default()).saturating_sub(started.elapsed());
            let mut chosen = self.choose(request)?;
            chosen.leave_self_paused(request);
            self.wait_for_guarded(&chosen.paused, left, observer).map_err(busy_since(started))?;
            let attempt = self.try_resume(request, started, observer);
            let limit = match &attempt {
                // It has waited for each piece.
                Err(Error::DeviceMemory(_)) if request.hand_over => Duration::ZERO,
                Err(Error::DeviceMemory(_)) => request.timeout.unwrap_or_default(),
                // Work that may use a guard has begun since.
                Err(Error::Busy(_)) => WORK.max(request.timeout.unwrap_or_default()),
                _ => {
                    return attempt.inspect(|report| log::info!("resumed {}: {report}", tags_text(request)));
                }
            };
            let left = limit.saturating_sub(started.elapsed());
            if left.is_zero() || !observer.is_wanted() {
                return attempt.map_err(with_holders).inspect_err(|error| {
                    if !request.tries_again {
                        report(request, error);
                    }
                });
            }
            closed = if matches!(attempt, Err(Error::Busy(_))) { closed.or_else(|| close_gate(left, observer)) } else { None };
            // Without the lock, so that the program can free memory.
            thread::sleep(left.min(LOOK_AGAIN));
        }
    }

    fn try_resume(&self, request: &TransitionRequest, started: Instant, observer: &mut dyn Observer) -> Result<Report, Error> {
        let mut clock = Clock::default();
        // Dropped after the lock is released.
        let mut done_with = Vec::new();
        let _exclusive = self.exclude_unless_quiesced()?;
        let _relaxed = RelaxedCapture::enter();
        let mut chosen = self.choose_settled(request)?;
        let left = chosen.leave_self_paused(request);
        let Chosen { all, mut paused, active: already } = chosen;
        let by_piece = request.hand_over_host.is_some();
        let _sparing = if by_piece { Some(self.spare_host(&all)?) } else { None };
        if request.hand_over {
            // The memory that comes first is filled while the rest comes.
            paused.sort_by_cached_key(|allocation| turn_of(allocation, by_piece));
        }
        // Nothing can be copied where the only context is ending, and the memory with it.
        if paused.iter().any(|allocation| allocation.context_for_copies().is_ending()) {
            return Err(Error::Busy(started.elapsed()));
        }
        self.registry.release_freed();
        clock.0.insert(Stage::Wait, milliseconds(started.elapsed()));
        let shown = self.show(TagState::Resuming, &paused);
        let needed = if request.hand_over { needed_by(&paused) } else { check_free(&paused)? };
        // The client may have gone while this waited for the lock, or for the driver.
        if !observer.is_wanted() {
            return Err(Error::Busy(started.elapsed()));
        }
        let observer = RefCell::new(observer);
        let mut progress = |now| shown.progress(now, *observer.borrow_mut());
        let mut is_wanted = || observer.borrow_mut().is_wanted();
        let mut arrival =
            if request.hand_over { Arrival::within(request.timeout.unwrap_or_default(), &mut is_wanted) } else { Arrival::None };
        events::publish(Event::Stage(Stage::Wait, started.elapsed()));
        let unguarding = Instant::now();
        let unguarded = self.unguard(&paused, WAIT_LOCKED)?;
        if !unguarded.is_empty() {
            clock.add(Stage::Guard, unguarding.elapsed());
        }
        let refused = self.try_mappings(&paused);
        // Without the vote, the new memory is released; the backups are untouched, but for those whose memory has gone over.
        let mut came = Vec::new();
        let brought = self
            .bring_back(&paused, &needed, &nearly_idle(&all), &mut arrival, by_piece.then_some(&mut came), &mut clock, &mut progress)
            .and_then(|memories| observer.borrow_mut().vote(&mut |_| ()).inspect_err(|_| self.show_undoing()).map(|()| memories));
        let memories = brought.map_err(|error| {
            if !came.is_empty() {
                // They can be saved again only when the other job takes no more host memory.
                observer.borrow_mut().give_up();
            }
            self.send_back(std::mem::take(&mut came), error)
        })?;
        unguarded.for_good();
        owed::keep_active(&already);
        if request.is_from_outside {
            hold::stay();
        }
        for allocation in &left {
            allocation.contents().state.set_paused_by(|_| PausedBy::Program);
        }

        let mut report = Report { allocations: paused.len() as u64, unchanged: already.len() as u64, refused, ..Report::default() };
        report.guard_bytes = guard::all_bytes(&all);
        report.guard_written_bytes = self.take_written();
        report.kept_bytes = came.iter().map(Came::kept_bytes).sum();
        report.bytes = paused.iter().map(|allocation| allocation.bytes() as u64).sum();
        // The rest is active already.
        for (allocation, memory) in paused.iter().zip(memories).filter_map(|(allocation, memory)| Some((allocation, memory?))) {
            let bytes = |saved: &Arc<Backup>| (saved.kept_bytes(), saved.disk_bytes());
            let (kept_bytes, disk_bytes) = allocation.contents().state.saved().map_or((0, 0), bytes);
            report.kept_bytes += kept_bytes;
            report.disk_bytes += disk_bytes;
            done_with.push(activate(allocation, memory));
        }
        // What the program has only had in a mapping that is refused.
        self.end_unused();
        report.discarded_bytes = report.bytes - report.kept_bytes;
        report.self_paused_bytes = left.iter().map(|allocation| allocation.bytes() as u64).sum();
        report.late_bytes = driver::leftover_bytes();
        report.stages = clock.0;
        report.ms = milliseconds(started.elapsed());
        Ok(report)
    }

    /// Maps new memory with the old contents for all of them, or for none. Contents are restored while more memory is being
    /// mapped. `needed`: bytes on each device, for the error. `idle`: contexts in which the program has nothing to run on. `arrival`: how the
    /// memory comes. `came`: if their host memory goes over, what has arrived; that is active, without a backup, also after an error.
    /// Returns the memory of the others.
    #[allow(clippy::too_many_arguments)] // one for each way
    fn bring_back(
        &self,
        paused: &[Arc<Allocation>],
        needed: &BTreeMap<CUdevice, u64>,
        idle: &BTreeSet<Context>,
        arrival: &mut Arrival<'_>,
        mut came: Option<&mut Vec<Came>>,
        clock: &mut Clock,
        progress: &mut backup::OnProgress<'_>,
    ) -> Result<Vec<Option<Physical>>, Error> {
        let started = Instant::now();
        let kept: Vec<_> = paused.iter().filter(|allocation| allocation.contents().state.saved().is_some()).map(Arc::clone).collect();
        self.make_reachable(&kept)?;
        let item = |allocation: &Arc<Allocation>| Some((allocation.extent(), allocation.contents().state.saved().cloned()?));
        let mut due = backup::Due::default();
        paused.iter().filter_map(item).for_each(|item| due.add(item));
        let place_of: BTreeMap<_, _> = paused.iter().enumerate().map(|(place, allocation)| (allocation.address(), place)).collect();
        let memories = RefCell::new(Vec::with_capacity(paused.len()));
        // What is taken is filled at once if another process waits for the host memory.
        let (flow, batch) = if came.is_some() { (Flow::Pieces { within: Duration::MAX }, 0) } else { (Flow::Whole, arrival.batch()) };
        let mut landed = |address| {
            if let (Some(came), Some(&place)) = (&mut came, place_of.get(&Some(address)))
                && let allocation = &paused[place]
                && goes_over(allocation)
                && let Some(memory) = memories.borrow_mut().get_mut(place).and_then(Option::take)
            {
                came.push(Came::of(allocation));
                drop(allocation.activate(memory, None));
            }
        };
        let brought = backup::restore(&due, flow, idle, progress, &mut landed, |give| {
            let mut from = 0;
            for upto in batches(paused, batch) {
                for allocation in &paused[from..upto] {
                    let needed = needed.get(&allocation.device).copied().unwrap_or_default();
                    let memory = arrival.take(allocation, needed, &mut || give(None))?;
                    memories.borrow_mut().push(Some(memory));
                }
                self.open(paused[from..upto].iter().map(|allocation| &**allocation))?;
                paused[from..upto].iter().filter_map(item).for_each(|item| give(Some(&item)));
                from = upto;
            }
            clock.add(Stage::Map, started.elapsed());
            Ok(())
        });
        clock.add(Stage::Restore, started.elapsed());
        // On error the new memory is released; no copy to it is in flight any more.
        brought.inspect_err(|_| self.show_undoing()).map(|()| memories.into_inner())
    }

    /// Takes new memory for what an undone pause had handed over, as the other job gives it back, and copies the contents there. `within`: how
    /// long to wait for the next piece. `by_piece`: the other job needs the host memory, so each piece goes back for good; after an error,
    /// the rest is still paused.
    pub(super) fn undo_hand_over(&self, gone: &[Arc<Allocation>], within: Duration, by_piece: bool) -> Result<(), Error> {
        if gone.is_empty() {
            return Ok(());
        }
        let mut gone = gone.to_vec();
        gone.sort_by_cached_key(|allocation| turn_of(allocation, by_piece));
        let mut is_wanted = || !exit::is_ending();
        let mut arrival = Arrival::within(within, &mut is_wanted);
        let (mut clock, mut progress, mut came) = (Clock::default(), |_| Ok(()), Vec::new());
        let came = by_piece.then_some(&mut came);
        let memories = self.bring_back(&gone, &needed_by(&gone), &BTreeSet::new(), &mut arrival, came, &mut clock, &mut progress)?;
        for (allocation, memory) in gone.iter().zip(memories) {
            // The rest is active already.
            if let Some(memory) = memory {
                drop(activate(allocation, memory));
            }
        }
        Ok(())
    }
}

/// How the memory for a resume comes.
enum Arrival<'a> {
    /// All of it is free, or the resume fails.
    None,
    /// Piece by piece, as another job gives it back.
    Pieces {
        /// How long to wait for the next one.
        within: Duration,
        /// Since when.
        since: Instant,
        /// Whether to go on waiting.
        is_wanted: &'a mut dyn FnMut() -> bool,
    },
}

impl<'a> Arrival<'a> {
    fn within(within: Duration, is_wanted: &'a mut dyn FnMut() -> bool) -> Self {
        Self::Pieces { within, since: Instant::now(), is_wanted }
    }

    /// Bytes of a batch ([`batches`]).
    fn batch(&self) -> usize {
        match self {
            // Copying this many bytes takes longer than mapping the next batch.
            Self::None => 256 << 20,
            // What has come is filled while the next batch is waited for.
            Self::Pieces { .. } => backup::HOST_PIECE,
        }
    }

    /// Takes memory for an allocation, as soon as there is room. `needed`: as for [`create`]. `meanwhile`: called before each look.
    fn take(&mut self, allocation: &Allocation, needed: u64, meanwhile: &mut dyn FnMut()) -> Result<Physical, Error> {
        /// The time between two looks: at first, about as long as the other job takes to save 64 MiB, and at most, which the end of a swap may
        /// wait. It doubles each time.
        const LOOK_AGAIN: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(4));
        let Self::Pieces { within, since, is_wanted } = self else { return create(allocation, needed) };
        let mut pause = LOOK_AGAIN.0;
        loop {
            meanwhile();
            // Large memory is created in several steps, so a try would take what another one needs.
            let taken = check_room_for(allocation, needed).and_then(|()| create(allocation, needed));
            if !matches!(taken, Err(Error::DeviceMemory(_))) || since.elapsed() >= *within {
                *since = Instant::now();
                return taken;
            }
            // Releases that the driver has refused are in the way, too.
            driver::sweep();
            // Nothing is to come any more, so it is not for lack of memory that this fails.
            if !is_wanted() {
                return Err(Error::Busy(since.elapsed()));
            }
            thread::sleep(pause);
            pause = (2 * pause).min(LOOK_AGAIN.1);
        }
    }
}

/// The order in which memory is taken while it comes piece by piece: first what has contents. If host memory goes over, first that which does, in
/// the order of the host memory, because backups share it with their neighbours.
fn turn_of(allocation: &Allocation, by_piece: bool) -> (u8, usize) {
    let goes_over = by_piece && goes_over(allocation);
    match allocation.contents().state.saved() {
        None => (2, 0),
        Some(saved) => saved.place().filter(|_| goes_over).map_or((1, 0), |place| (0, place)),
    }
}

/// Has the program's new calls wait, for a client. A program that resumes itself may hold a lock that they need.
fn close_gate(within: Duration, observer: &mut dyn Observer) -> Option<gate::Closed<'static>> {
    observer.is_gone()?;
    let deadline = Instant::now() + within;
    let closed = gate::close(deadline)?;
    closed.wait_until_empty(deadline, &mut || !exit::is_ending() && observer.is_wanted()).is_ok().then_some(closed)
}

/// The contexts whose managed memory is nearly all paused, so that the program has next to nothing to run on. What an engine
/// keeps active while it sleeps (0.1 to 0.3 GiB for vLLM and `SGLang`) does not count as busy.
fn nearly_idle(all: &[Arc<Allocation>]) -> BTreeSet<Context> {
    let mut bytes = BTreeMap::<Context, (usize, usize)>::new();
    for allocation in all {
        let (paused, total) = bytes.entry(allocation.context()).or_default();
        *paused += if allocation.is_unmapped() { allocation.bytes() } else { 0 };
        *total += allocation.bytes();
    }
    bytes.into_iter().filter(|(_, (paused, total))| *paused >= total / 8 * 7).map(|(context, _)| context).collect()
}

/// New memory mapped at an allocation's addresses, not accessible yet. `needed` is the total for the resume, for the error.
fn create(allocation: &Allocation, needed: u64) -> Result<Physical, Error> {
    let short = |failure: Failure| {
        let is_short = failure.code == code::OUT_OF_MEMORY && !allocation.is_on_host();
        if is_short { shortage(allocation.device, allocation.context_for_copies(), needed) } else { failure.into() }
    };
    allocation.create_again().map_err(short)
}

/// Makes a paused allocation active again, and retains its backup if that is wanted. Returns the state before, to be dropped without the
/// lock: freeing a backup may wait for the device's work, and the program may need to allocate in order to finish that work.
fn activate(allocation: &Allocation, memory: Physical) -> State {
    // Comparing with a file would be slower than writing a new one.
    let is_retained = |saved: &&Arc<Backup>| backup::retains(&allocation.tag) && matches!(***saved, Backup::Host(_));
    let retained = allocation.contents().state.saved().filter(is_retained).cloned();
    allocation.activate(memory, retained)
}

/// Where to interrupt mapping to enable access and start restoring. Access to adjacent memory is set in one call, so a call
/// per allocation would be wasteful; so would delaying the copies.
fn batches(allocations: &[Arc<Allocation>], batch: usize) -> Vec<usize> {
    let mut ends = Vec::new();
    let mut bytes = 0;
    for (at, allocation) in allocations.iter().enumerate() {
        // Memory with nothing to restore delays no copy.
        bytes += if allocation.contents().state.saved().is_some() { allocation.bytes() } else { 0 };
        let last = allocations.get(at + 1).is_none_or(|next| next.device != allocation.device);
        if bytes >= batch || last {
            ends.push(at + 1);
            bytes = 0;
        }
    }
    ends
}

/// An error if there is no room for the allocation now.
fn check_room_for(allocation: &Allocation, needed: u64) -> Result<(), Error> {
    let context = allocation.context_for_copies();
    let (free, _) = Current::push(context).and_then(|_current| driver::memory_info())?;
    if allocation.on_device().is_some() && allocation.bytes() as u64 > free {
        Err(shortage(allocation.device, context, needed))
    } else {
        Ok(())
    }
}

/// Bytes needed on each device.
fn needed_by(paused: &[Arc<Allocation>]) -> BTreeMap<CUdevice, u64> {
    bytes_of_devices(paused.iter().map(|allocation| &**allocation))
}

/// Bytes needed on each device; an error if they are not free. Memory of guards counts as free if it will be released first.
fn check_free(paused: &[Arc<Allocation>]) -> Result<BTreeMap<CUdevice, u64>, Error> {
    let all_needed = needed_by(paused);
    for (&device, &needed) in &all_needed {
        let on_device = paused.iter().find(|allocation| allocation.device == device).map(|allocation| allocation.context_for_copies());
        let Some(context) = on_device else { continue };
        let _current = Current::push(context)?;
        if needed > driver::memory_info()?.0 + guard::bytes_left_by(paused, device) {
            return Err(shortage(device, context, needed));
        }
    }
    Ok(all_needed)
}

/// Whether all of these could be resumed now.
pub(super) fn has_room_for(paused: &[Arc<Allocation>]) -> bool {
    check_free(paused).is_ok()
}

/// A shortage with the bytes free now: another process may have allocated since the check.
fn shortage(device: CUdevice, context: Context, needed: u64) -> Error {
    let free = Current::push(context).and_then(|_current| driver::memory_info()).map_or(0, |(free, _)| free);
    Error::DeviceMemory(Shortage { device, uuid: None, index: None, needed, free, holders: Vec::new() })
}

/// Reports a shortage that made a resume fail for good.
fn report(request: &TransitionRequest, error: &Error) {
    let Error::DeviceMemory(Shortage { device, needed, holders, .. }) = error else { return };
    events::publish(Event::Failed(FailedRequest {
        bytes: *needed,
        device: Some(*device),
        tag: (!request.tags.is_empty()).then(|| request.tags.join(", ").into()),
        library: "vramctl",
        caller: 0,
        cause: Cause::Resume(holders.clone()),
    }));
}

fn with_holders(error: Error) -> Error {
    match error {
        Error::DeviceMemory(shortage) => {
            let (uuid, holders) = (driver::uuid(shortage.device), driver::holders(shortage.device));
            Error::DeviceMemory(Shortage { index: uuid.as_deref().and_then(driver::index_of), uuid, holders, ..shortage })
        }
        other => other,
    }
}
