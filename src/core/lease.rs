//! Pauses and resumes for clients, at once or in steps.
//!
//! In steps, the connection is a lease: if the client disconnects or stays silent too long, everything that it has begun is undone, unless
//! it is committed by then. So a client that dies at any step leaves nothing behind. A client that coordinates several processes passes the
//! same [`Decision`] to all of them. The decision holds even if the client dies before every process knows it.

use crate::connection::{Connection, Line, Lines};
use crate::memory::Memory;
use crate::transition::{Pause, Preparation, Prepared, Resume, unless_ending};
use crate::{engine, events, member};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};
use vramctl_control::decision::Decision;
use vramctl_control::protocol::{self, Prepare, Reply, Request};
use vramctl_host::{PerProcess, Unpoison, exit};
use vramctl_model::{Error, Kind, Observer, PauseRequest, Progress, Report, ResumeRequest, Stage, Transition, Verb};

/// How long a client may be silent if it sets no limit of its own.
const USUAL: Duration = Duration::from_secs(5);
/// The highest limit that a client may set: the program is held meanwhile.
const LONGEST: Duration = Duration::from_secs(30);
/// How often to check whether the program is exiting, or another process of the job has aborted.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How many calls of a held program one `advance` lets pass, at most.
const MOST_CALLS: u32 = 1 << 20;
/// Minimum time between progress messages.
const PROGRESS_EVERY: Duration = Duration::from_millis(50);

/// Pauses or resumes at once.
pub fn at_once(transition: Transition, connection: &Connection) -> Result<Report, Error> {
    let mut caller = Caller::of(connection, transition.progress(), None);
    match transition {
        Transition::Pause(request) => as_scheduled(request.scheduler, || Memory::get().pause(&pause_of(request, connection), &mut caller)),
        Transition::Resume(request) => {
            as_scheduled(request.scheduler, || Memory::get().resume(&resume_of(request, connection), &mut caller))
        }
    }
}

/// Holds the program, and pauses it in the steps that the client asks for.
pub fn hold(lease_ms: Option<u64>, connection: &Connection, lines: &mut Lines<'_>) -> Result<Report, Error> {
    let session = Session::begin(lease_ms, connection, lines)?;
    in_steps(Verb::Pause, || session.hold_and_pause())
}

/// Prepares a pause or resume, and completes it if the client commits.
pub fn prepare(wanted: Prepare, connection: &Connection, lines: &mut Lines<'_>) -> Result<Report, Error> {
    let session = Session::begin(wanted.lease_ms, connection, lines)?;
    let Prepare { ranks, transition, .. } = wanted;
    let (verb, progress, scheduler) = (transition.verb(), transition.progress(), transition.scheduler());
    let prepare = |caller: &mut dyn Observer| match transition {
        Transition::Pause(request) => Memory::get().prepare_pause(&pause_of(request, connection), caller),
        Transition::Resume(request) => Memory::get().prepare_resume(&resume_of(request, connection), caller),
    };
    in_steps(verb, || as_scheduled(scheduler, || session.complete(ranks, progress, prepare)))
}

/// Refuses a scheduler whose time is over. A program that is held afterwards knows whether its calls bring its memory back.
fn as_scheduled(scheduler: Option<u64>, work: impl FnOnce() -> Result<Report, Error>) -> Result<Report, Error> {
    member::admit(scheduler)?;
    let report = work()?;
    Memory::get().tell_scheduler();
    Ok(report)
}

fn in_steps(verb: Verb, work: impl FnOnce() -> Result<Report, Error>) -> Result<Report, Error> {
    events::transition(verb, || unless_ending(work))
}

/// The pause that a client asks for.
pub fn pause_of(request: PauseRequest, connection: &Connection) -> Pause {
    let engine = if request.options.force { None } else { engine::name() };
    Pause { request, is_from_outside: connection.is_from_outside(), engine, unused: Vec::new() }
}

/// The resume that a client asks for.
pub fn resume_of(request: ResumeRequest, connection: &Connection) -> Resume {
    Resume { request, is_from_outside: connection.is_from_outside() }
}

/// The processes that the job had when it was last paused or resumed as a whole.
pub fn ranks() -> MutexGuard<'static, Vec<u32>> {
    static RANKS: PerProcess<Mutex<Vec<u32>>> = PerProcess::new(Mutex::default);
    RANKS.get().lock().unpoisoned()
}

fn aborted_by_client() -> Error {
    Error::Aborted("the client aborted it".into())
}

/// A client's pause or resume in steps.
struct Session<'a, 'b> {
    connection: &'a Connection,
    lines: &'a mut Lines<'b>,
    /// How long the client may be silent.
    patience: Duration,
    /// The decision that all processes of the job share.
    decision: Option<Decision>,
    /// One client at a time, and a second is refused: two clients that each hold a process that the other needs would wait forever.
    _only: MutexGuard<'static, ()>,
}

impl<'a, 'b> Session<'a, 'b> {
    fn begin(lease_ms: Option<u64>, connection: &'a Connection, lines: &'a mut Lines<'b>) -> Result<Self, Error> {
        static ONE: PerProcess<Mutex<()>> = PerProcess::new(Mutex::default);
        let only = match ONE.get().try_lock() {
            Ok(only) => only,
            Err(TryLockError::Poisoned(only)) => only.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(Error::Leased),
        };
        let patience = lease_ms.map_or(USUAL, Duration::from_millis).min(LONGEST);
        let mut session = Self { connection, lines, patience, decision: None, _only: only };
        session.take_decision()?;
        Ok(session)
    }

    /// Hold, drain, prepare, vote, commit or undo.
    fn hold_and_pause(mut self) -> Result<Report, Error> {
        let connection = self.connection;
        let holding = Memory::get().hold()?;
        self.answer(&Reply::Held)?;
        loop {
            match self.next()? {
                Request::Drain { limit_ms } => {
                    let drained = holding.drain(Duration::from_millis(limit_ms), &mut Caller::of(connection, false, Some(&self)));
                    drained.map_err(|error| self.cause(error))?;
                    self.answer(&Reply::Drained)?;
                }
                Request::Advance { calls } => {
                    holding.advance(calls.min(MOST_CALLS));
                    self.answer(&Reply::Held)?;
                }
                Request::Prepare(Prepare { ranks, transition: Transition::Pause(request), .. }) => {
                    let (progress, scheduler, pause) = (request.progress, request.scheduler, pause_of(request, connection));
                    return as_scheduled(scheduler, || self.complete(ranks, progress, |caller| holding.prepare_pause(&pause, caller)));
                }
                Request::SetAside(request) => {
                    return self.complete(Vec::new(), false, |caller| holding.prepare_set_aside(&request, caller));
                }
                Request::Abort => return Err(aborted_by_client()),
                _ => {
                    let why = "after `hold`, only `drain`, `advance`, `prepare` of a pause, `set-aside`, `renew` and `abort` are valid; the program continues";
                    return Err(Error::Invalid(why.into()));
                }
            }
        }
    }

    /// Prepare, vote, commit or undo. `job`: its processes, if these are all.
    fn complete<'m>(
        mut self,
        job: Vec<u32>,
        wants_progress: bool,
        prepare: impl FnOnce(&mut dyn Observer) -> Preparation<'m>,
    ) -> Result<Report, Error> {
        self.take_decision()?;
        let prepared = prepare(&mut Caller::of(self.connection, wants_progress, Some(&self))).map_err(|failed| {
            let failed = failed.map(|error| self.cause(error));
            // Before anything is undone: the other processes need not wait for the client's message, and take no more of what has to come back.
            self.abort();
            failed.undo()
        })?;
        if let Err(refused) = self.vote(&*prepared) {
            return Err(prepared.undo(refused));
        }
        let report = prepared.commit(&mut Caller::of(self.connection, false, None));
        if !job.is_empty() {
            *ranks() = job;
        }
        Ok(report)
    }

    /// The decision that came with the last line, if any.
    fn take_decision(&mut self) -> Result<(), Error> {
        if let Some(file) = self.lines.take_file() {
            let file = file.get().map_err(|error| Error::Invalid(error.to_string()))?;
            self.decision = Some(Decision::open(file)?);
        }
        Ok(())
    }

    /// Why a step has failed. A step that stops waiting because another process has aborted fails as if its time were up.
    fn cause(&self, error: Error) -> Error {
        if error.kind() == Kind::Busy && self.is_aborted() { aborted_by_others() } else { error }
    }

    /// Answers that everything is prepared, and waits for the client's commit. If the job has committed meanwhile, this process does as well,
    /// whatever its client says.
    fn vote(&mut self, prepared: &dyn Prepared) -> Result<(), Error> {
        let why_not = match self.answer(&Reply::Prepared).and_then(|()| self.next_while(|waited| prepared.wait(waited))) {
            Ok(Request::Commit) if self.decision.as_ref().is_none_or(Decision::commit) => return Ok(()),
            Ok(Request::Commit) => aborted_by_others(),
            Ok(Request::Abort) => aborted_by_client(),
            Ok(_) => Error::Invalid("after `prepare`, only `commit`, `renew` and `abort` are valid; nothing has changed".into()),
            Err(error) => error,
        };
        if self.abort() { Err(why_not) } else { Ok(()) }
    }

    /// Aborts if the client cannot commit any more. The error says why.
    fn abort_if_it_cannot_commit(&self) -> Result<(), Error> {
        let why = match self.is_aborted() {
            true => aborted_by_others(),
            false if self.connection.is_gone() => hung_up(),
            false => return Ok(()),
        };
        if self.abort() { Err(why) } else { Ok(()) }
    }

    /// Aborts, unless it is decided already. Returns whether it is aborted.
    fn abort(&self) -> bool {
        self.decision.as_ref().is_none_or(Decision::abort)
    }

    fn is_aborted(&self) -> bool {
        self.decision.as_ref().is_some_and(Decision::is_aborted)
    }

    fn answer(&self, reply: &Reply) -> Result<(), Error> {
        self.connection.send(reply, 0).map_err(|_| hung_up())
    }

    /// The client's next request. An error if the lease has ended.
    fn next(&mut self) -> Result<Request, Error> {
        self.next_while(|_| ())
    }

    /// The same. Calls `waiting` now and then, with how long this has waited.
    fn next_while(&mut self, waiting: impl Fn(Duration)) -> Result<Request, Error> {
        let began = Instant::now();
        let mut deadline = began + self.patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.next(left.min(LOOK_EVERY))? {
                Line::Complete(line) if line.iter().all(u8::is_ascii_whitespace) => (),
                Line::Complete(line) => match protocol::parse(&line)? {
                    Request::Renew => deadline = Instant::now() + self.patience,
                    request => return Ok(request),
                },
                Line::End => return Err(hung_up()),
                Line::Late if exit::is_ending() => return Err(Error::Ending),
                Line::Late if self.is_aborted() => return Err(aborted_by_others()),
                Line::Late if left.is_zero() => {
                    return Err(Error::Aborted(format!("the client has been silent for {} ms", self.patience.as_millis())));
                }
                Line::Late => waiting(began.elapsed()),
            }
        }
    }
}

fn hung_up() -> Error {
    Error::Aborted("the client has hung up".into())
}

fn aborted_by_others() -> Error {
    Error::Aborted("another process of the job could not prepare".into())
}

/// The client that requested a pause or resume.
struct Caller<'s, 'a, 'b> {
    connection: &'a Connection,
    wants_progress: bool,
    /// When progress was last sent, and of which stage.
    sent: Option<(Instant, Stage)>,
    /// In steps; `None` at once.
    session: Option<&'s Session<'a, 'b>>,
}

impl<'s, 'a, 'b> Caller<'s, 'a, 'b> {
    fn of(connection: &'a Connection, wants_progress: bool, session: Option<&'s Session<'a, 'b>>) -> Self {
        Self { connection, wants_progress, sent: None, session }
    }
}

impl Observer for Caller<'_, '_, '_> {
    fn progress(&mut self, now: Progress) -> Result<(), Error> {
        let due = self.sent.is_none_or(|(when, stage)| stage != now.stage || when.elapsed() >= PROGRESS_EVERY) || now.done == now.total;
        if self.wants_progress && due {
            self.sent = Some((Instant::now(), now.stage));
            let _ = self.connection.send(&Reply::Progress(now), libc::MSG_DONTWAIT);
        }
        self.session.map_or(Ok(()), Session::abort_if_it_cannot_commit)
    }

    fn is_gone(&mut self) -> Option<bool> {
        Some(self.session.is_some_and(Session::is_aborted) || self.connection.is_gone())
    }
}
