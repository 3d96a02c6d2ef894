//! A job: processes that are paused and resumed as one.
//!
//! An [`Attempt`] takes them through the steps of the [`Barrier`](crate::barrier::Barrier) together. If one fails, all undo what they have done.
//! The [`Decision`](vramctl_control::decision::Decision) that they share makes them commit or abort together, even if one dies.
//!
//! A held program need not be idle, but its processes may have stopped at different points: one's GPU waits for a collective that another,
//! held at its gate, has not started. Then all gates open, and a little later all close again. [`Retry`] decides about every further
//! attempt.
//!
//! If the job has ranks on other nodes, those that are behind go on within the attempt instead ([`Behind`](crate::barrier::Behind)): the more
//! nodes, the less often do all stand at the same point.
//!
//! A first attempt waits 100 ms for the work of several processes to drain, each further one twice as long, and none longer than half of
//! what is left of the limit. So queued work of up to a quarter of it always drains, and processes that are not aligned get more attempts.
//! Nothing is saved before all have drained: a failed attempt costs little. Counting collectives would align the processes, too, but
//! engines drain at the first attempt, and training loops mostly at the first or second (`docs/performance.md`).

mod attempt;

use crate::Reporter;
use crate::audit::Deed;
use crate::deadline::Deadline;
use crate::engine::Engines;
use crate::failure::CommandError;
use crate::hooks::Hook;
use crate::nodes::Participant;
use crate::parallel;
use crate::patience::{AS_LONG_AS_IT_TAKES, Backoff, FIRST_DRAIN, TURN_WITHIN};
use crate::processes::Found;
use crate::queue::{Entry, Ticket};
use crate::retry::{FailedAttempt, Retry, RetryPolicy};
use crate::room::Room;
use crate::shared::{self, Borrower};
use attempt::{Attempt, Attempted};
use std::collections::BTreeSet;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::ErrorKind;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use vramctl_control::client::ClientError;
use vramctl_control::protocol::Refusal;
use vramctl_host::Unpoison;
use vramctl_model::{Amounts, PauseRequest, Report, ResumeRequest, Selection, Transition, Verb};

/// What a job is to do.
pub struct Job<'a> {
    /// Where its processes listen.
    pub found: &'a Found,
    /// What its processes are asked for, without tags: those differ by process.
    pub request: JobRequest,
    /// Its processes.
    pub ranks: Vec<Rank>,
    /// The borrowers, which are held as well, if that is wanted (`--shared`). They are looked for again if an attempt fails.
    pub borrowers: Option<Vec<Borrower>>,
    /// Whether the ranks are all processes of the job. Then each remembers the others.
    pub is_whole: bool,
    /// The job's name and GPUs, for the queue. Without it, a resume does not queue.
    pub ticket: Option<Ticket>,
    /// The inference engines that must have no requests when the memory is released, and until when to try again if one has got a request.
    pub engines: Option<(&'a Engines, Option<Instant>)>,
    /// If the job has ranks on other nodes, which take part in the same attempt. Further attempts are made there.
    pub nodes: Option<Arc<Participant>>,
}

/// What the processes of a job are asked for.
#[derive(Debug, Clone)]
pub enum JobRequest {
    /// All leave.
    Pause(PauseRequest),
    /// All come.
    Resume(ResumeRequest),
    /// Some leave while others come. Those that come begin when the work of those that leave has ended, and all are committed as one.
    Swap(PauseRequest, ResumeRequest),
}

impl JobRequest {
    /// The request to those that leave.
    pub fn pause(&self) -> Option<&PauseRequest> {
        match self {
            Self::Pause(pause) | Self::Swap(pause, _) => Some(pause),
            Self::Resume(_) => None,
        }
    }

    /// The request to those that come.
    pub fn resume(&self) -> Option<&ResumeRequest> {
        match self {
            Self::Resume(resume) | Self::Swap(_, resume) => Some(resume),
            Self::Pause(_) => None,
        }
    }

    /// What it is for the queue and for further attempts. A swap is a pause, during which others come.
    fn verb(&self) -> Verb {
        if let Self::Resume(_) = self { Verb::Resume } else { Verb::Pause }
    }

    /// Whether the scheduler of programs that share GPUs asks, and not a person.
    fn is_of_scheduler(&self) -> bool {
        let asks = |scheduler: Option<Option<u64>>| scheduler.flatten().is_some();
        asks(self.pause().map(|pause| pause.scheduler)) || asks(self.resume().map(|resume| resume.scheduler))
    }

    /// How long to wait: for the device's work, or for memory.
    fn timeout(&self) -> Option<Duration> {
        match self {
            Self::Pause(pause) | Self::Swap(pause, _) => pause.timeout,
            Self::Resume(resume) => resume.timeout,
        }
    }

    fn is_swap(&self) -> bool {
        matches!(self, Self::Swap(..))
    }
}

impl From<Transition> for JobRequest {
    fn from(transition: Transition) -> Self {
        match transition {
            Transition::Pause(pause) => Self::Pause(pause),
            Transition::Resume(resume) => Self::Resume(resume),
        }
    }
}

/// What a process does in a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Its memory is paused.
    Leaves,
    /// Its memory is resumed.
    Comes,
    /// It pauses nothing of its own, and sets aside its open memory of those that leave.
    Borrows,
}

/// A process of a job.
#[derive(Debug, Clone)]
pub struct Rank {
    /// Its id.
    pub pid: u32,
    /// What it does.
    pub role: Role,
    /// The tags to pause or resume in it; none means all.
    pub tags: Vec<String>,
    /// Ignore tags that it does not have, instead of failing.
    pub lenient: bool,
    /// What to take of it. `None`: all that is selected.
    pub amounts: Option<Amounts>,
}

/// The result of a job.
#[derive(Debug)]
pub struct JobReport {
    /// For each rank, in order.
    pub results: Vec<Result<Report, ClientError>>,
    /// The borrowers that took part in the last attempt, with their results.
    pub borrowers: Vec<(Borrower, Result<Report, ClientError>)>,
    /// Whether it was committed; otherwise everything was undone. After a commit, a process can only fail to answer: it has ended, or is
    /// stopped and completes the commit when it continues.
    pub committed: bool,
    /// How often it was tried.
    pub attempts: u32,
    /// Milliseconds from the request until the last process was done.
    pub ms: f64,
    /// How long it took until all work had ended.
    pub waited: Duration,
}

impl JobReport {
    /// Tells the system's log what was done to whom.
    fn tell(&self, found: &Found, request: &JobRequest, ranks: &[Rank]) {
        let Some(first) = ranks.first() else { return };
        let process = found.processes.iter().find(|process| process.pid == first.pid);
        let what = match request {
            JobRequest::Swap(..) => "swap",
            JobRequest::Pause(pause) if pause.leaves => "suspend",
            JobRequest::Pause(_) | JobRequest::Resume(_) => request.verb().name(),
        };
        let failure = self.results.iter().find_map(|result| result.as_ref().err());
        let bytes = || self.results.iter().flatten().map(|report| report.bytes).sum();
        let pids: Vec<_> = ranks.iter().map(|rank| rank.pid).collect();
        Deed {
            what,
            job: &process.map_or_else(String::new, |process| process.job().or(process.name()).unwrap_or_default().to_owned()),
            pids: &pids,
            owner: found.directory(first.pid).ok().map(|directory| directory.owner()),
            result: failure.map_or_else(|| Ok(bytes()), |error| Err(error.to_string())),
            ms: self.ms,
        }
        .tell();
    }

    /// Takes the part of the ranks from this one on out of it.
    pub fn share(&mut self, from: usize) -> Self {
        let results = self.results.split_off(from.min(self.results.len()));
        Self { results, borrowers: Vec::new(), ..*self }
    }
}

impl Job<'_> {
    /// Pauses or resumes all of them, or none.
    pub fn run(self, reporter: &dyn Reporter) -> JobReport {
        let begun = Instant::now();
        // Who takes turns by itself is not told, nor is the system's log.
        if self.request.is_of_scheduler() {
            return self.run_told(reporter);
        }
        let (found, ranks, request) = (self.found, self.ranks.clone(), self.request.clone());
        let of_role = |role| ranks.iter().filter(move |rank| rank.role == role).map(|rank| rank.pid);
        let report = match Hook::run_all(&Hook::before(found, of_role(Role::Leaves))) {
            Err(CommandError::Refused(refusal)) => self.refused(&refusal, begun),
            _ => self.run_told(reporter),
        };
        let has_come = |(rank, result): (&Rank, &Result<Report, _>)| {
            (rank.role == Role::Comes && result.as_ref().is_ok_and(|report| report.bytes > 0)).then_some(rank.pid)
        };
        let mut due = Hook::after(found, ranks.iter().zip(&report.results).filter_map(has_come));
        if !report.committed {
            due.extend(Hook::after_nothing(found, of_role(Role::Leaves)));
        }
        if let Err(failure) = Hook::run_all(&due) {
            reporter.warn(&failure.to_string());
        }
        report.tell(found, &request, &ranks);
        report
    }

    /// The same, once the programs' own commands have been run.
    fn run_told(mut self, reporter: &dyn Reporter) -> JobReport {
        let begun = Instant::now();
        let hold = self.request.pause().and_then(|pause| pause.hold);
        let deadline = Deadline { begun, timeout: hold.or(self.request.timeout()) };
        let mut policy = RetryPolicy { verb: self.request.verb(), holds: hold.is_some(), deadline, engines: self.engines };
        let mut place = match self.queue(begun, reporter) {
            Ok(place) => place,
            Err(refusal) => return self.refused(&refusal, begun),
        };
        let _rooms = match self.rooms(&mut place, deadline, reporter) {
            Ok(rooms) => rooms,
            Err(refusal) => return self.refused(&refusal, begun),
        };
        let (mut attempts, mut drain, mut short) = (0, Backoff::new(FIRST_DRAIN, Duration::MAX), BTreeSet::new());
        let terms = self.nodes.as_ref().map(|nodes| nodes.terms().clone());
        if terms.as_ref().is_some_and(|terms| terms.early) {
            short.extend(0..self.ranks.len());
        }
        loop {
            attempts += 1;
            let drain_within = match &terms {
                Some(terms) => terms.drain,
                None => policy.drain_within(drain.now(), self.main_ranks().count() + self.borrowers.iter().flatten().count()),
            };
            let done = self.attempt(policy.deadline, drain_within, &short, reporter);
            let rest = a_little();
            let again = if done.committed || terms.is_some() { None } else { policy.retry(&self.failed_attempt(&done), rest) };
            let Some(retry) = again else { return self.report(done, attempts, begun) };
            match retry {
                Retry::Memory => {
                    // In the next attempt these come first, so that the others are not held prepared while these wait for memory.
                    short.extend(done.short());
                    if let Some(place) = &mut place {
                        place.waits_for_memory();
                    }
                }
                Retry::Work => drain.grow(),
                Retry::Lease => (),
                Retry::Borrowers(now) => self.borrowers = Some(now),
                // The program ran on meanwhile, so the time for its work begins anew.
                Retry::Engine(until) => policy.deadline = policy.deadline.anew(until),
            }
            thread::sleep(rest);
        }
    }

    /// It sets aside what the request selects of the others' memory.
    fn borrower(pause: &PauseRequest, Borrower { process, .. }: &Borrower) -> Rank {
        let Selection { tags, lenient, .. } = &pause.selection;
        Rank { pid: process.pid, role: Role::Borrows, tags: tags.clone(), lenient: *lenient, amounts: None }
    }

    /// The ranks without those that come.
    fn main_ranks(&self) -> impl Iterator<Item = &Rank> {
        self.ranks.iter().filter(|rank| !self.comes(rank))
    }

    /// Waits for its turn in the queue, if it needs one.
    fn queue(&self, begun: Instant, reporter: &dyn Reporter) -> Result<Option<Entry>, Box<Refusal>> {
        let Some(ticket) = self.ticket.clone().filter(|_| self.request.resume().is_some()) else { return Ok(None) };
        let timeout = self.request.timeout().or_else(|| self.sharing().next().map(|_| AS_LONG_AS_IT_TAKES));
        self.found.queue(ticket, Deadline { begun, timeout }, TURN_WITHIN, reporter)
    }

    /// The ranks that share their GPUs and wait for room there, if a person resumes them. Those of a job over several nodes do not wait: the ranks
    /// elsewhere would have to be prepared for as long.
    fn sharing(&self) -> impl Iterator<Item = &Rank> {
        let waits = matches!(self.request, JobRequest::Resume(_)) && !self.request.is_of_scheduler() && self.nodes.is_none();
        let shares = |rank: &&Rank| self.found.processes.iter().any(|process| process.pid == rank.pid && process.shares());
        self.ranks.iter().filter(move |rank| waits && shares(rank))
    }

    /// Waits until there is room for those that share their GPUs.
    fn rooms(&self, place: &mut Option<Entry>, deadline: Deadline, reporter: &dyn Reporter) -> Result<Vec<Option<Room>>, Box<Refusal>> {
        let Some(resume) = self.request.resume() else { return Ok(Vec::new()) };
        let until = deadline.timeout.map(|_| Instant::now() + deadline.left_or_a_moment());
        let place = Mutex::new(place);
        let waits = || _ = place.lock().unpoisoned().as_mut().map(Entry::waits_for_memory);
        let wait = |rank: &Rank| {
            let selection = Selection { tags: rank.tags.clone(), lenient: true, ..resume.selection.clone() };
            Room::wait(self.found, rank.pid, ResumeRequest { selection, ..resume.clone() }, until, reporter, &waits)
        };
        parallel::each_well(self.sharing(), wait).into_iter().collect()
    }

    /// What the policy decides by.
    fn failed_attempt<'b>(&'b self, done: &'b Attempted) -> FailedAttempt<'b> {
        let find_borrowers = || {
            let own: Vec<_> = self.main_ranks().map(|rank| rank.pid).collect();
            self.request.pause().and_then(|pause| shared::find(self.found, shared::lent_by(self.found, &own, pause)).ok())
        };
        FailedAttempt {
            errors: done.results.iter().filter_map(|result| result.as_ref().err()).collect(),
            engine_objected: done.objected,
            borrowers: self.borrowers.as_deref(),
            find_borrowers: Box::new(find_borrowers),
        }
    }

    fn attempt(&self, deadline: Deadline, drain_within: Duration, short: &BTreeSet<usize>, reporter: &dyn Reporter) -> Attempted {
        let pause = self.request.pause();
        let borrowers = self.borrowers.iter().flatten().filter_map(|one| Some(Self::borrower(pause?, one)));
        let ranks: Vec<_> = self.ranks.iter().cloned().chain(borrowers).collect();
        let pids: Vec<_> = ranks.iter().map(|rank| rank.pid).collect();
        match Attempt::new(self, ranks, deadline, drain_within, short, reporter) {
            Ok(attempt) => attempt.run(),
            Err(error) => {
                let failed = |pid| Err(ClientError::Io { pid, error: error.kind().into() });
                Attempted { results: pids.into_iter().map(failed).collect(), committed: false, objected: false, drained: None }
            }
        }
    }

    /// Whether a rank is held before its pause. Processes that are not held may be using memory of each other.
    fn holds(&self, rank: &Rank) -> bool {
        rank.role != Role::Comes && self.request.pause().is_some_and(|pause| pause.hold.is_some())
    }

    /// Whether a rank comes while others leave.
    fn comes(&self, rank: &Rank) -> bool {
        self.request.is_swap() && rank.role == Role::Comes
    }

    fn report(self, done: Attempted, attempts: u32, begun: Instant) -> JobReport {
        let ms = begun.elapsed().as_secs_f64() * 1e3;
        let Attempted { mut results, committed, drained, .. } = done;
        if attempts > 1 {
            for error in results.iter_mut().filter_map(|result| result.as_mut().err()) {
                add(error, &format!(" ({attempts} attempts in {ms:.0} ms)"));
            }
        }
        let of_borrowers = results.split_off(self.ranks.len());
        let gone = |error: &ClientError| matches!(error, ClientError::Io { error, .. } if error.kind() != ErrorKind::TimedOut);
        // A borrower that has ended has nothing open any more.
        let settled = |result: Result<Report, ClientError>| match result {
            Err(error) if committed && gone(&error) => Ok(Report::default()),
            result => result,
        };
        let borrowers = self.borrowers.into_iter().flatten().zip(of_borrowers.into_iter().map(settled)).collect();
        let waited = drained.map_or_else(|| begun.elapsed(), |drained| drained.saturating_duration_since(begun));
        JobReport { results, borrowers, committed, attempts, ms, waited }
    }

    fn refused(&self, refusal: &Refusal, begun: Instant) -> JobReport {
        let waited = begun.elapsed();
        let results = self.ranks.iter().map(|_| Err(ClientError::Refused(Box::new(refusal.clone())))).collect();
        JobReport { results, borrowers: Vec::new(), committed: false, attempts: 0, ms: waited.as_secs_f64() * 1e3, waited }
    }
}

/// Ten to fifty milliseconds. Random, so that two coordinators, or a coordinator and a loop of the program, do not collide repeatedly.
fn a_little() -> Duration {
    Duration::from_millis(10 + RandomState::new().build_hasher().finish() % 41)
}

fn add(error: &mut ClientError, more: &str) {
    if let ClientError::Refused(refusal) = error {
        refusal.message += more;
    }
}
