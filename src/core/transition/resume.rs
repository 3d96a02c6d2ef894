//! A resume: create, map and fill new memory, then release the backups.

use super::choose::Chosen;
use super::exchange::Exchange;
use super::prepared::{Failed, Preparation, Prepared, complete};
use super::restore::{Arrival, activate, check_free, has_room_for, needed_by, turn_of};
use super::restored::Restored;
use super::{Clock, Resume, WAIT_LOCKED, busy_since, hold, milliseconds, tags_text, unfinished, unless_ending};
use crate::events::{self, Cause, Event, FailedRequest};
use crate::gate;
use crate::member::room;
use crate::memory::guard::Unguarded;
use crate::memory::under_way::Shown;
use crate::memory::{Allocation, Memory, PausedBy, aside, check_not_quiesced, guard};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, RwLockWriteGuard};
use std::thread;
use std::time::{Duration, Instant};
use vramctl_backup as backup;
use vramctl_driver::{self as driver, CUdevice, Context, Physical, RelaxedCapture};
use vramctl_host::exit;
use vramctl_model::{Error, Observer, Report, ResumeRequest, Selection, Shortage, Stage, TagState, Verb};

/// The minimum time that a resume waits for work that may use guards.
const WORK: Duration = Duration::from_secs(10);

/// How often a resume waiting for memory retries.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

impl Memory {
    /// Resumes paused allocations: maps new memory at their addresses and restores their contents. Everything is undone on
    /// error.
    pub fn resume(&self, resume: &Resume, observer: &mut dyn Observer) -> Result<Report, Error> {
        events::transition(Verb::Resume, || unless_ending(|| complete(self.prepare_resume(resume, observer), observer)))
    }

    /// Room that a resume needs where it is promised to other programs: the device, and bytes.
    pub fn short_of_promised(&self, resume: &Resume) -> Option<(CUdevice, u64)> {
        let mut chosen = self.choose(&resume.request.selection).ok()?;
        chosen.leave_paused(resume);
        needed_by(&chosen.paused).into_iter().find(|(device, _)| room::is_promised(*device))
    }

    /// Room for which a resume waits among the programs that share its GPUs: the devices, and bytes. None if it is there and is promised to nobody.
    pub fn room_for(&self, resume: &Resume) -> Result<Vec<(CUdevice, u64)>, Error> {
        let mut chosen = self.choose(&resume.request.selection)?;
        chosen.leave_paused(resume);
        let needed = needed_by(&chosen.paused);
        let is_there = !needed.keys().any(|device| room::is_promised(*device)) && has_room_for(&chosen.paused);
        Ok(if is_there { Vec::new() } else { needed.into_iter().collect() })
    }

    /// Does all of a resume that can be undone.
    pub fn prepare_resume(&self, resume: &Resume, observer: &mut dyn Observer) -> Preparation<'_> {
        let (request, started) = (&resume.request, Instant::now());
        // After a failure as well: it may have closed the gate, and the program may have freed what was paused meanwhile.
        let let_go = LetGo(self);
        // Set if the program always has work in flight: then no more of it starts until the guards are gone.
        let mut closed = None;
        loop {
            check_not_quiesced()?;
            let left = WORK.max(request.timeout.unwrap_or_default()).saturating_sub(started.elapsed());
            let mut chosen = self.choose(&request.selection)?;
            chosen.leave_paused(resume);
            self.wait_for_guarded(&chosen.paused, left, observer).map_err(busy_since(started))?;
            let attempt = self.try_prepare_resume(resume, started, observer);
            let limit = match &attempt {
                // It has waited for each piece.
                Err(failed) if request.swap.is_some() && failed.has_begun() => Duration::ZERO,
                Err(Failed { why: Error::DeviceMemory(_), .. }) => request.timeout.unwrap_or_default(),
                // Work that may use a guard has begun since.
                Err(Failed { why: Error::Busy(_), .. }) => WORK.max(request.timeout.unwrap_or_default()),
                _ => Duration::ZERO,
            };
            let left = limit.saturating_sub(started.elapsed());
            let failed = match attempt {
                Err(failed) if !left.is_zero() => failed,
                attempt => {
                    let attempt =
                        attempt.map(|prepared| Box::new(prepared) as Box<dyn Prepared>).map_err(|failed| final_failure(request, failed));
                    let selection = request.selection.clone();
                    return Failed::wrap(attempt, |prepared| {
                        Box::new(WholeResume { prepared, memory: self, selection, closed, _let_go: let_go })
                    });
                }
            };
            let why = failed.undo_to_retry(|why| matches!(why, Error::DeviceMemory(_) | Error::Busy(_)))?;
            if !observer.is_wanted() {
                return Err(final_failure(request, why.into()));
            }
            closed = if matches!(why, Error::Busy(_)) { closed.or_else(|| close_gate(left, observer)) } else { None };
            // Without the lock, so that the program can free memory.
            thread::sleep(left.min(LOOK_AGAIN));
        }
    }

    fn try_prepare_resume(&self, resume: &Resume, started: Instant, observer: &mut dyn Observer) -> Result<PreparedResume<'_>, Failed<'_>> {
        let request = &resume.request;
        let mut clock = Clock::default();
        let exclusive = self.exclude_unless_quiesced()?;
        let relaxed = RelaxedCapture::enter();
        let mut chosen = self.choose_settled(&request.selection)?;
        let stays_paused = chosen.leave_paused(resume);
        let Chosen { all, mut paused, active: already } = chosen;
        let exchanges = request.swap.as_ref().is_some_and(|swap| swap.host);
        let exchange = if exchanges { Some(self.begin_exchange(&all)?) } else { None };
        if request.swap.is_some() {
            // The memory that comes first is filled while the rest comes.
            paused.sort_by_cached_key(|allocation| turn_of(allocation, exchanges));
        }
        // Nothing can be copied where the only context is ending, and the memory with it.
        if paused.iter().any(|allocation| allocation.context_for_copies().is_ending()) {
            return Err(Error::Busy(started.elapsed()).into());
        }
        self.registry.release_freed();
        clock.0.insert(Stage::Wait, milliseconds(started.elapsed()));
        let shown = self.show(TagState::Resuming, &paused);
        let needed = if request.swap.is_some() { needed_by(&paused) } else { check_free(&paused)? };
        // The client may have gone while this waited for the lock, or for the driver.
        if !observer.is_wanted() {
            return Err(Error::Busy(started.elapsed()).into());
        }
        events::publish(Event::Stage(Stage::Wait, started.elapsed()));
        let unguarding = Instant::now();
        let unguarded = self.unguard(&paused, WAIT_LOCKED)?;
        if !unguarded.is_empty() {
            clock.add(Stage::Guard, unguarding.elapsed());
        }
        let refused = self.try_mappings(&paused);
        let guards = Guards { shown, _exchange: exchange, _relaxed: relaxed, _exclusive: exclusive };
        let is_from_outside = resume.is_from_outside;
        let (memories, restored) = (Vec::new(), Vec::new());
        let mut prepared = PreparedResume {
            memory: self,
            is_from_outside,
            is_by_scheduler: request.scheduler.is_some(),
            started,
            clock,
            all,
            paused,
            memories,
            restored,
            already,
            stays_paused,
            refused,
            unguarded,
            guards,
        };
        let observer = RefCell::new(observer);
        let mut progress = |now| prepared.guards.shown.progress(now, *observer.borrow_mut());
        let mut is_wanted = || observer.borrow_mut().is_wanted();
        let mut arrival =
            if request.swap.is_some() { Arrival::within(request.timeout.unwrap_or_default(), &mut is_wanted) } else { Arrival::None };
        let idle = nearly_idle(&prepared.all);
        let restored = exchanges.then_some(&mut prepared.restored);
        match self.bring_back(&prepared.paused, &needed, &idle, &mut arrival, restored, &mut prepared.clock, &mut progress) {
            Ok(memories) => Ok(PreparedResume { memories, ..prepared }),
            Err(why) => Err(Failed::after(why, prepared)),
        }
    }
}

/// What lasts until a prepared resume is committed or undone. Dropped in this order.
struct Guards<'a> {
    shown: Shown<'a>,
    _exchange: Option<Exchange>,
    _relaxed: RelaxedCapture,
    _exclusive: RwLockWriteGuard<'a, ()>,
}

/// A resume that is prepared, or in which something has failed. Its backups are untouched, except where host memory has changed hands.
struct PreparedResume<'a> {
    memory: &'a Memory,
    is_from_outside: bool,
    is_by_scheduler: bool,
    started: Instant,
    clock: Clock,
    /// All allocations of the process.
    all: Vec<Arc<Allocation>>,
    paused: Vec<Arc<Allocation>>,
    /// The new memory of those that were `paused`. `None`: it is active already.
    memories: Vec<Option<Physical>>,
    /// What is active already, without a backup.
    restored: Vec<Restored>,
    /// What was active before.
    already: Vec<Arc<Allocation>>,
    /// What stays paused, because the program itself has paused it, or others than the scheduler that asks.
    stays_paused: Vec<Arc<Allocation>>,
    /// What the driver refuses of the program's mappings.
    refused: Vec<String>,
    unguarded: Unguarded<'a>,
    guards: Guards<'a>,
}

impl Prepared for PreparedResume<'_> {
    fn commit(self: Box<Self>, _: &mut dyn Observer) -> Report {
        let Self {
            memory,
            is_from_outside,
            is_by_scheduler,
            started,
            clock,
            all,
            paused,
            memories,
            restored,
            already,
            stays_paused,
            refused,
            unguarded,
            guards,
        } = *self;
        unguarded.for_good();
        unfinished::keep_active(&already);
        if is_from_outside && (!is_by_scheduler || hold::leaves() == Some(PausedBy::SCHEDULER)) {
            hold::stay();
        }
        for allocation in &stays_paused {
            allocation.contents().state.set_paused_by(|by| if is_by_scheduler { by.without_scheduler() } else { PausedBy::PROGRAM });
        }
        let mut report = Report { allocations: paused.len() as u64, unchanged: already.len() as u64, refused, ..Report::default() };
        report.guard_bytes = guard::all_bytes(&all);
        report.guard_written_bytes = memory.take_written();
        report.kept_bytes = restored.iter().map(Restored::kept_bytes).sum();
        report.bytes = paused.iter().map(|allocation| allocation.bytes() as u64).sum();
        let (mut done_with, has_room) = (Vec::new(), backup::has_room_for_copies());
        // The rest is active already.
        for (allocation, memory) in paused.iter().zip(memories).filter_map(|(allocation, memory)| Some((allocation, memory?))) {
            if let Some(saved) = allocation.contents().state.saved() {
                report.kept_bytes += saved.kept_bytes();
                report.disk_bytes += saved.disk_bytes();
            }
            done_with.push(activate(allocation, memory, has_room));
        }
        // What the program has only had in a mapping that is refused.
        memory.end_unused();
        report.discarded_bytes = report.bytes - report.kept_bytes;
        let is_self_paused = |one: &&Arc<Allocation>| one.contents().state.paused_by().is_some_and(PausedBy::is_self_paused);
        report.self_paused_bytes = stays_paused.iter().filter(is_self_paused).map(|allocation| allocation.bytes() as u64).sum();
        report.late_bytes = driver::leftover_bytes();
        report.stages = clock.0;
        report.ms = milliseconds(started.elapsed());
        drop(guards);
        // Without the lock.
        drop(done_with);
        memory.close_origin();
        report
    }

    fn undo(self: Box<Self>, why: Error) -> Error {
        let this = *self;
        this.memory.show_undoing();
        drop(this.memories);
        this.memory.undo_exchange(this.restored, why)
    }
}

/// Lets the program continue if nothing keeps it held, when this is dropped.
struct LetGo<'a>(&'a Memory);

impl Drop for LetGo<'_> {
    fn drop(&mut self) {
        self.0.let_go();
    }
}

/// A prepared resume, and what follows it without the transition lock.
struct WholeResume<'a> {
    prepared: Box<dyn Prepared + 'a>,
    memory: &'a Memory,
    selection: Selection,
    closed: Option<gate::Closed<'static>>,
    _let_go: LetGo<'a>,
}

impl Prepared for WholeResume<'_> {
    fn commit(self: Box<Self>, observer: &mut dyn Observer) -> Report {
        let Self { prepared, memory, selection, closed, _let_go } = *self;
        let mut report = prepared.commit(observer);
        drop(closed);
        // With memory that others have paused, the program stays held anyway.
        if !memory.is_paused_by_others() {
            // The owner may be waiting for memory of this process.
            aside::reopen(&mut || !exit::is_ending() && observer.is_wanted());
            (report.missing, report.lost) = (aside::missing(&selection), aside::take_lost());
        }
        log::info!("resumed {}: {report}", tags_text(&selection));
        report
    }

    fn undo(self: Box<Self>, why: Error) -> Error {
        let Self { prepared, closed: _closed, _let_go, .. } = *self;
        prepared.undo(why)
    }
}

/// Makes the program's new calls wait, if another process asks for the resume. A program that resumes itself may hold a lock that they need.
fn close_gate(within: Duration, observer: &mut dyn Observer) -> Option<gate::Closed<'static>> {
    observer.is_gone()?;
    let deadline = Instant::now() + within;
    let closed = gate::close(deadline)?;
    closed.wait_until_empty(deadline, &mut || !exit::is_ending() && observer.is_wanted()).is_ok().then_some(closed)
}

/// The contexts whose managed memory is nearly all paused, so that the program has next to nothing to run on. What an engine
/// keeps active while it sleeps (0.1 to 0.3 GiB for vLLM and `SGLang`) does not count as busy. A held program runs nothing, whatever it has.
fn nearly_idle(all: &[Arc<Allocation>]) -> BTreeSet<Context> {
    let mut bytes = BTreeMap::<Context, (usize, usize)>::new();
    for allocation in all {
        let (paused, total) = bytes.entry(allocation.context()).or_default();
        *paused += if allocation.is_unmapped() { allocation.bytes() } else { 0 };
        *total += allocation.bytes();
    }
    bytes.into_iter().filter(|(_, (paused, total))| gate::is_held() || *paused >= total / 8 * 7).map(|(context, _)| context).collect()
}

/// A failure after which no other attempt is made. Whoever asks may try again; otherwise, a shortage is reported.
fn final_failure<'a>(request: &ResumeRequest, failed: Failed<'a>) -> Failed<'a> {
    let failed = failed.map(with_holders);
    if !request.tries_again {
        report(&request.selection, &failed.why);
    }
    failed
}

/// Reports a shortage that made a resume fail for good.
fn report(selection: &Selection, error: &Error) {
    let Error::DeviceMemory(Shortage { device, needed, holders, .. }) = error else { return };
    events::publish(Event::Failed(FailedRequest {
        bytes: *needed,
        device: Some(*device),
        tag: (!selection.tags.is_empty()).then(|| selection.tags.join(", ").into()),
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
