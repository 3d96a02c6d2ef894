//! A held program: its new calls wait at the gate, so that it need not be idle to be paused.
//!
//! A program cannot hold itself: a waiting thread may hold Python's interpreter lock, and then no other thread could resume it. So only the
//! socket accepts a hold, and not from the process itself.

use super::prepared::{Failed, Preparation, Prepared};
use super::{Pause, unless_ending};
use crate::events::{self, Event};
use crate::memory::{Allocation, Memory, PausedBy, aside, check_not_quiesced};
use crate::{contexts, drain, gate, holder};
use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use vramctl_driver::{self as driver, CUdevice};
use vramctl_host::{PerProcess, Unpoison, exit, opens};
use vramctl_model::{Error, Observer, PauseRequest, Report, SetAside, Stage};

/// A held program. When this is dropped, the program continues, unless memory of it is away by then: after a commit because it is paused, after a
/// failure because it could not be mapped again. Also after a panic.
pub struct Holding<'a> {
    memory: &'a Memory,
    /// Until the end.
    closed: Option<gate::Closed<'static>>,
    /// Whether it was held before.
    was_held: bool,
    /// Whether it makes room for programs that share its GPUs.
    gives_way: bool,
    pause: PauseOfHeld,
}

/// What has become of the pause of a held program.
enum PauseOfHeld {
    NotBegun,
    Begun(PausedBefore),
    Committed,
}

impl Drop for Holding<'_> {
    fn drop(&mut self) {
        let must_stay = match &self.pause {
            PauseOfHeld::NotBegun => false,
            PauseOfHeld::Begun(before) => before.are_more_now(self.memory),
            PauseOfHeld::Committed => self.memory.must_stay_held(),
        };
        if let Some(closed) = self.closed.take().filter(|_| must_stay) {
            closed.keep();
            holder::held(self.gives_way);
        }
        // Memory paused before may have been resumed or freed while the gate was closed.
        self.memory.let_go();
    }
}

/// Work that has not ended, although every call of the program has returned or waits at the gate: what is known of it, and its likely
/// causes.
struct StillWorking {
    device: Option<CUdevice>,
    threads_at_gate: usize,
}

impl StillWorking {
    /// After a wait that has failed.
    fn now() -> Self {
        Self { device: drain::unfinished().and_then(contexts::device_of), threads_at_gate: gate::waiting() }
    }
}

impl fmt::Display for StillWorking {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.device {
            Some(device) => write!(out, "the work on {}", driver::gpu_in_words(device))?,
            None => write!(out, "the device's work")?,
        }
        write!(out, " has not ended: a kernel is still running, or waits for another process, as in a collective")?;
        match self.threads_at_gate {
            0 => Ok(()),
            1 => write!(out, "; or a host function waits for the thread that is held at the gate"),
            many => write!(out, "; or a host function waits for one of the {many} threads that are held at the gate"),
        }
    }
}

fn not_held(limit: Duration, why: &dyn fmt::Display) -> Error {
    Error::NotHeld(format!("after {} ms, {why}", limit.as_millis()))
}

/// What may call the driver past the gate, and why: libraries that the loader binds past this one. While the program is held, nothing: a
/// thread that waits at the gate may have the loader's lock.
pub(crate) fn passing_by() -> Vec<String> {
    /// A library that looks the driver's functions up has some of their names.
    const TRACES: [&[u8]; 4] = [b"libcuda.so", b"cuGetProcAddress", b"cuMem", b"cuLaunch"];
    if opens::count() == 0 || gate::is_held() {
        return Vec::new();
    }
    opens::passing_by(c"libcuda.so.1", |name| name.starts_with(b"cu") && name.get(2).is_some_and(u8::is_ascii_uppercase), &TRACES)
}

/// For whom the program stays held whether or not anything of it is paused: it leaves its GPUs as a whole, or others of its job have left.
static LEAVES: PerProcess<Mutex<Option<PausedBy>>> = PerProcess::new(Mutex::default);

pub(super) fn leaves() -> Option<PausedBy> {
    LEAVES.existing().and_then(|leaves| *leaves.lock().unpoisoned())
}

/// From now on, until it stays. Under the transition lock.
pub(super) fn leave(by: PausedBy) {
    *LEAVES.get().lock().unpoisoned() = Some(by);
}

/// The program is on its GPUs again, or stays there after all.
pub(crate) fn stay() {
    if let Some(leaves) = LEAVES.existing() {
        *leaves.lock().unpoisoned() = None;
    }
}

impl Memory {
    /// Holds the program at once: from now on, its new calls wait.
    pub fn hold(&self) -> Result<Holding<'_>, Error> {
        self.hold_until(Instant::now())
    }

    fn hold_until(&self, deadline: Instant) -> Result<Holding<'_>, Error> {
        let opened = opens::count();
        let passing_by = passing_by();
        if !passing_by.is_empty() {
            return Err(Error::PassesBy(passing_by));
        }
        let closed = gate::close(deadline).ok_or(Error::Leased)?;
        if opens::count() != opened {
            return Err(Error::NotHeld("it has just opened a library whose calls may pass by the gate".into()));
        }
        Ok(Holding { memory: self, was_held: closed.was_held(), closed: Some(closed), gives_way: false, pause: PauseOfHeld::NotBegun })
    }

    /// Holds the program, once calls inside have finished, and prepares its pause.
    pub(super) fn hold_and_prepare(&self, pause: &Pause, limit: Duration, observer: &mut dyn Observer) -> Preparation<'_> {
        /// How long the program runs between two attempts, so that it can finish a capture.
        const RUN_ON: Duration = Duration::from_millis(20);
        let deadline = Instant::now() + limit;
        let left = || deadline.saturating_duration_since(Instant::now());
        loop {
            let holding = self.hold_until(deadline)?;
            holding.wait_for_calls(limit, deadline, observer)?;
            let request = PauseRequest { timeout: Some(left()), ..pause.request.clone() };
            let failed = match holding.prepare_pause(&Pause { request, ..pause.clone() }, observer) {
                Ok(prepared) => return Ok(prepared),
                Err(failed) => failed,
            };
            let has_time = !left().is_zero();
            failed.undo_to_retry(|why| matches!(why, Error::Capturing) && has_time).map_err(|failed| {
                failed.map(|why| match why {
                    Error::Capturing => not_held(limit, &"a stream capture has not ended"),
                    Error::Busy(_) => not_held(limit, &StillWorking::now()),
                    other => other,
                })
            })?;
            thread::sleep(RUN_ON);
        }
    }
}

impl<'a> Holding<'a> {
    /// Waits until no call is inside the driver. Stops if the client is gone or the program exits.
    fn wait_for_calls(&self, limit: Duration, deadline: Instant, observer: &mut dyn Observer) -> Result<(), Error> {
        let wanted = &mut || !exit::is_ending() && observer.is_wanted();
        let empty = self.closed.as_ref().map_or(Ok(()), |closed| closed.wait_until_empty(deadline, wanted));
        empty.map_err(|stuck| not_held(limit, &stuck))
    }

    /// Lets this many of the program's calls pass the closed gate, because other processes wait for this one, as in a collective that it has
    /// not begun. None passes if the program was held before: then its memory is paused, by another operation that has just ended.
    pub fn advance(&self, calls: u32) {
        /// The calls may not have reached the gate yet.
        const WITHIN: Duration = Duration::from_millis(10);
        if let Some(closed) = self.closed.as_ref().filter(|_| !self.was_held) {
            closed.admit(calls, WITHIN);
        }
    }

    /// Waits until the program's calls have returned from the driver and the device's work has finished.
    pub fn drain(&self, limit: Duration, observer: &mut dyn Observer) -> Result<(), Error> {
        let begun = Instant::now();
        self.wait_for_calls(limit, begun + limit, observer)?;
        check_not_quiesced()?;
        let contexts = self.memory.contexts_that_use(self.memory.registry.snapshot().iter().map(|allocation| &**allocation));
        let left = limit.saturating_sub(begun.elapsed());
        let drained = unless_ending(|| drain::wait_at_most(contexts, left, &mut || observer.is_wanted()));
        events::publish(Event::Stage(Stage::Wait, begun.elapsed()));
        drained.map_err(|error| match error {
            Error::Busy(_) => not_held(limit, &StillWorking::now()),
            other => other,
        })
    }

    /// Prepares a pause. Once that is committed, the program stays held until everything is resumed.
    pub fn prepare_pause(mut self, pause: &Pause, observer: &mut dyn Observer) -> Preparation<'a> {
        self.gives_way = pause.request.scheduler.is_some();
        self.prepare(|memory| memory.prepare_when_idle(pause, observer))
    }

    /// Prepares to give up open memory of others. Once that is committed, the program stays held until the memory is back.
    pub fn prepare_set_aside(self, request: &SetAside, observer: &mut dyn Observer) -> Preparation<'a> {
        if !self.was_held && self.memory.is_paused_by_others() {
            // It would stay held until its own memory is resumed as well, so resuming the owners would not be enough for it to continue.
            let why = "some of its own memory was paused with --no-hold; resume that first";
            return Err(Error::Invalid(why.into()).into());
        }
        self.prepare(|memory| memory.prepare_set_aside(request, observer))
    }

    fn prepare(mut self, work: impl FnOnce(&'a Memory) -> Preparation<'a>) -> Preparation<'a> {
        self.pause = PauseOfHeld::Begun(PausedBefore::of(self.memory));
        Failed::wrap(work(self.memory), |prepared| Box::new(PreparedInHeld { prepared, holding: self }))
    }
}

/// A prepared pause of a held program.
struct PreparedInHeld<'a> {
    prepared: Box<dyn Prepared + 'a>,
    holding: Holding<'a>,
}

impl Prepared for PreparedInHeld<'_> {
    fn wait(&self, waited: Duration) {
        self.prepared.wait(waited);
    }

    fn commit(self: Box<Self>, observer: &mut dyn Observer) -> Report {
        let Self { prepared, mut holding } = *self;
        let report = prepared.commit(observer);
        holding.pause = PauseOfHeld::Committed;
        report
    }

    fn undo(self: Box<Self>, why: Error) -> Error {
        let Self { prepared, holding: _holding } = *self;
        prepared.undo(why)
    }
}

/// What is paused before an attempt. The program may free some of it meanwhile, so numbers cannot be compared.
struct PausedBefore {
    allocations: Vec<Arc<Allocation>>,
    is_set_aside: bool,
}

impl PausedBefore {
    fn of(memory: &Memory) -> Self {
        let allocations = memory.registry.snapshot().into_iter().filter(|allocation| allocation.is_unmapped()).collect();
        Self { allocations, is_set_aside: aside::any() }
    }

    /// Whether anything else is paused now.
    fn are_more_now(&self, memory: &Memory) -> bool {
        let known: BTreeSet<_> = self.allocations.iter().map(Arc::as_ptr).collect();
        let is_paused = |allocation: &Arc<Allocation>| allocation.contents().state.paused_by().is_some();
        aside::any() && !self.is_set_aside
            || memory.registry.snapshot().iter().any(|allocation| !known.contains(&Arc::as_ptr(allocation)) && is_paused(allocation))
    }
}
