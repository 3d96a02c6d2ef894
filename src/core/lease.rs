//! Pauses and resumes for clients, at once or in steps.
//!
//! In steps, the connection is a lease: if the client disconnects or stays silent too long, everything that it has begun is undone, unless
//! it is committed by then. So a client that dies at any step leaves nothing behind. A client that coordinates several processes passes the
//! same [`Decision`] to all of them. The decision holds even if the client dies before every process knows it.

use crate::connection::{Connection, Line, Lines};
use crate::memory::Memory;
use crate::transition::Holding;
use crate::{engine, events};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};
use vramctl_control::decision::Decision;
use vramctl_control::protocol::{self, Prepare, Reply, Request};
use vramctl_host::{PerProcess, Unpoison, exit};
use vramctl_model::{Error, Kind, Observer, Progress, Report, Stage, TransitionRequest, Verb};

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
pub fn at_once(of: Verb, wanted: TransitionRequest, connection: &Connection) -> Result<Report, Error> {
    let mut asker = Asker::of(connection, wanted.progress, None);
    pause_or_resume(of, wanted, None, connection, &mut asker)
}

/// Holds the program, and does what the client asks for next.
pub fn hold(lease_ms: Option<u64>, connection: &Connection, lines: &mut Lines<'_>) -> Result<Report, Error> {
    let grant = Grant::take(lease_ms, connection, lines)?;
    events::transition(Verb::Pause, || hold_and_pause(grant))
}

fn hold_and_pause(mut grant: Grant<'_, '_>) -> Result<Report, Error> {
    let connection = grant.connection;
    let holding = Memory::get().hold()?;
    grant.answer(&Reply::Held)?;
    loop {
        match grant.next()? {
            Request::Drain { limit_ms } => {
                let drained = holding.drain(Duration::from_millis(limit_ms), &mut Asker::of(connection, false, Some(&mut grant)));
                drained.map_err(|error| grant.cause(error))?;
                grant.answer(&Reply::Drained)?;
            }
            Request::Advance { calls } => {
                holding.advance(calls.min(MOST_CALLS));
                grant.answer(&Reply::Held)?;
            }
            Request::Prepare(wanted @ Prepare { of: Verb::Pause, .. }) => return grant.prepare(wanted, Some(holding)),
            Request::SetAside(wanted) => return grant.set_aside(wanted, holding),
            Request::Abort => return Err(aborted_by_client()),
            _ => {
                let why = "after `hold`, only `drain`, `advance`, `prepare` of a pause, `set-aside`, `renew` and `abort` are valid; the program continues";
                return Err(Error::Invalid(why.into()));
            }
        }
    }
}

/// Prepares a pause or resume, and completes it if the client commits.
pub fn prepare(wanted: Prepare, connection: &Connection, lines: &mut Lines<'_>) -> Result<Report, Error> {
    Grant::take(wanted.lease_ms, connection, lines)?.prepare(wanted, None)
}

fn pause_or_resume(
    of: Verb,
    wanted: TransitionRequest,
    held: Option<Holding<'_>>,
    connection: &Connection,
    observer: &mut dyn Observer,
) -> Result<Report, Error> {
    let engine = if wanted.force { None } else { engine::name() };
    let wanted = TransitionRequest { is_from_outside: connection.is_from_outside(), ..wanted };
    match (of, held) {
        (Verb::Pause, None) => Memory::get().pause(&TransitionRequest { engine, ..wanted }, observer),
        (Verb::Pause, Some(held)) => held.pause(&TransitionRequest { engine, ..wanted }, observer),
        (Verb::Resume, _) if wanted.backup.is_some() || !wanted.backups.is_empty() => {
            Err(Error::Invalid("a resume takes no backup policy: it brings back what the pause kept".into()))
        }
        (Verb::Resume, _) => Memory::get().resume(&wanted, observer),
    }
}

/// The processes that the job had when it was last paused or resumed as a whole.
pub fn ranks() -> MutexGuard<'static, Vec<u32>> {
    static RANKS: PerProcess<Mutex<Vec<u32>>> = PerProcess::new(Mutex::default);
    RANKS.get().lock().unpoisoned()
}

fn aborted_by_client() -> Error {
    Error::Aborted("the client aborted it".into())
}

/// A client's permission to pause or resume in steps.
struct Grant<'a, 'b> {
    connection: &'a Connection,
    lines: &'a mut Lines<'b>,
    /// How long the client may be silent.
    patience: Duration,
    /// The decision that all processes of the job share.
    decision: Option<Decision>,
    /// One client at a time, and a second is refused: two clients that each hold a process that the other needs would wait forever.
    _only: MutexGuard<'static, ()>,
}

impl<'a, 'b> Grant<'a, 'b> {
    fn take(lease_ms: Option<u64>, connection: &'a Connection, lines: &'a mut Lines<'b>) -> Result<Self, Error> {
        static ONE: PerProcess<Mutex<()>> = PerProcess::new(Mutex::default);
        let only = match ONE.get().try_lock() {
            Ok(only) => only,
            Err(TryLockError::Poisoned(only)) => only.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(Error::Leased),
        };
        let patience = lease_ms.map_or(USUAL, Duration::from_millis).min(LONGEST);
        let mut grant = Self { connection, lines, patience, decision: None, _only: only };
        grant.take_decision()?;
        Ok(grant)
    }

    /// The decision that came with the last line, if any.
    fn take_decision(&mut self) -> Result<(), Error> {
        if let Some(file) = self.lines.take_file() {
            let file = file.get().map_err(|error| Error::Invalid(error.to_string()))?;
            self.decision = Some(Decision::open(file)?);
        }
        Ok(())
    }

    fn prepare(self, wanted: Prepare, held: Option<Holding<'_>>) -> Result<Report, Error> {
        let Prepare { of, ranks: job, transition, .. } = wanted;
        let connection = self.connection;
        let done = self.complete(transition.progress, |asker| pause_or_resume(of, transition, held, connection, asker));
        if done.is_ok() && !job.is_empty() {
            *ranks() = job;
        }
        done
    }

    fn set_aside(self, wanted: TransitionRequest, holding: Holding<'_>) -> Result<Report, Error> {
        let request = TransitionRequest { is_borrower: true, ..wanted };
        self.complete(false, |asker| holding.pause(&request, asker))
    }

    fn complete(mut self, wants_progress: bool, work: impl FnOnce(&mut dyn Observer) -> Result<Report, Error>) -> Result<Report, Error> {
        self.take_decision()?;
        let done = work(&mut Asker::of(self.connection, wants_progress, Some(&mut self))).map_err(|error| self.cause(error));
        if done.is_err() {
            // Abort for the other processes as well; they need not wait for the client's message.
            self.abort();
        }
        done
    }

    /// Why a step has failed. A step that stops waiting because another process has aborted fails as if its time were up.
    fn cause(&self, error: Error) -> Error {
        if error.kind() == Kind::Busy && self.is_aborted() { aborted_by_others() } else { error }
    }

    /// Answers that everything is prepared, and waits for the client's commit. If the job has committed meanwhile, this process does as well,
    /// whatever its client says.
    fn vote(&mut self, waiting: &mut dyn FnMut(Duration)) -> Result<(), Error> {
        let why_not = match self.answer(&Reply::Prepared).and_then(|()| self.next_while(waiting)) {
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
        self.next_while(&mut |_| ())
    }

    /// The same. Calls `waiting` now and then, with how long this has waited.
    fn next_while(&mut self, waiting: &mut dyn FnMut(Duration)) -> Result<Request, Error> {
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
struct Asker<'g, 'a, 'b> {
    connection: &'a Connection,
    wants_progress: bool,
    /// When progress was last sent, and of which stage.
    sent: Option<(Instant, Stage)>,
    /// In steps; `None` at once.
    grant: Option<&'g mut Grant<'a, 'b>>,
}

impl<'g, 'a, 'b> Asker<'g, 'a, 'b> {
    fn of(connection: &'a Connection, wants_progress: bool, grant: Option<&'g mut Grant<'a, 'b>>) -> Self {
        Self { connection, wants_progress, sent: None, grant }
    }
}

impl Observer for Asker<'_, '_, '_> {
    fn progress(&mut self, now: Progress) -> Result<(), Error> {
        let due = self.sent.is_none_or(|(when, stage)| stage != now.stage || when.elapsed() >= PROGRESS_EVERY) || now.done == now.total;
        if self.wants_progress && due {
            self.sent = Some((Instant::now(), now.stage));
            let _ = self.connection.send(&Reply::Progress(now), libc::MSG_DONTWAIT);
        }
        self.grant.as_ref().map_or(Ok(()), |grant| grant.abort_if_it_cannot_commit())
    }

    fn is_gone(&mut self) -> Option<bool> {
        if self.grant.as_ref().is_some_and(|grant| grant.is_aborted()) {
            return Some(true);
        }
        Some(self.connection.is_gone())
    }

    fn vote(&mut self, waiting: &mut dyn FnMut(Duration)) -> Result<(), Error> {
        self.grant.as_mut().map_or(Ok(()), |grant| grant.vote(waiting))
    }

    fn give_up(&mut self) {
        if let Some(grant) = &self.grant {
            grant.abort();
        }
    }
}
