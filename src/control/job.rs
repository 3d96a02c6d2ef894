//! A job: processes that are paused and resumed as one.
//!
//! The coordinator, this code in the command line, talks to all of them in parallel, over one connection each. Each process completes a
//! step and waits (`Step`). When all have arrived, they go on; if one fails, all undo what they have done. The [`Decision`] that they share
//! makes them commit or abort together, even if one dies.
//!
//! A held program need not be idle, but its processes may have stopped at different points: one's GPU waits for a collective that another,
//! held at its gate, has not started. Then all gates open, and a little later all close again.

use crate::client::{Client, ClientError};
use crate::decision::Decision;
use crate::discovery::Directory;
use crate::protocol::{Prepare, Refusal, Reply, Request, Transition};
use crate::queue::{Claim, InQueue};
use std::collections::BTreeSet;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use std::{io, thread};
use vramctl_host::Unpoison;
use vramctl_model::{Error, Kind, Progress, Report, Verb};

/// What a job is to do.
#[derive(Debug)]
pub struct Job {
    /// A pause or a resume.
    pub verb: Verb,
    /// The request, without tags: those differ by process.
    pub wanted: Transition,
    /// Its processes.
    pub ranks: Vec<Rank>,
    /// Whether these are all processes of the job. Then each remembers the others.
    pub is_whole: bool,
    /// The job's name and GPUs, for the queue. Without it, a resume does not queue.
    pub ticket: Option<Claim>,
}

/// A process of a job.
#[derive(Debug)]
pub struct Rank {
    /// Its id.
    pub pid: u32,
    /// The tags to pause or resume in it; none means all.
    pub tags: Vec<String>,
    /// Ignore tags that it does not have, instead of failing.
    pub lenient: bool,
    /// Pause only: the communicators that NCCL is to suspend; each must be sent to all of its ranks.
    pub communicators: Vec<String>,
    /// It pauses nothing of its own, and sets aside its open memory that the others pause.
    pub is_borrower: bool,
}

/// What came of it.
#[derive(Debug)]
pub struct JobReport {
    /// For each process, in order.
    pub results: Vec<Result<Report, ClientError>>,
    /// Whether it was committed; otherwise everything was undone. After a commit, a process can only fail to answer: it has ended, or is
    /// stopped and completes the commit when it continues.
    pub committed: bool,
    /// Whether the [`Follower`] has objected to the last attempt.
    pub objected: bool,
    /// How often it was tried.
    pub attempts: u32,
    /// Milliseconds from the request until the last process was done.
    pub ms: f64,
}

/// Follows along.
pub trait Follower: Sync {
    /// A connection to a process, which ends the attempt when it is shut down.
    fn connected(&self, _pid: u32, _stream: UnixStream) {}

    /// The connection is no longer needed. The process counts it until every handle on it is closed.
    fn disconnected(&self, _pid: u32) {}

    /// Of a pause: nothing is released yet, and the work of all processes has ended; if they are held, none begins. An error undoes
    /// everything, and there is no further attempt. Must return well within the lease of 5 s.
    fn drained(&self) -> Result<(), Box<Refusal>> {
        Ok(())
    }

    /// Other jobs are ahead in the queue for the same GPUs.
    fn queued(&self, _before: &[Claim]) {}

    /// Progress of the process with this number in the job.
    fn progress(&self, _member: usize, _now: Progress) {}
}

impl Follower for () {}

/// How long a process waits for this coordinator before it undoes everything.
const LEASE: Duration = Duration::from_secs(5);
/// How often to renew a process's lease.
const RENEW_EVERY: Duration = Duration::from_secs(1);
/// How long to wait while another client uses a process, or resumes a job on the same GPUs.
const TURN_WITHIN: Duration = Duration::from_secs(10);
/// How long the first attempt waits for the work of several processes to drain; no attempt waits less.
const FIRST_DRAIN: Duration = Duration::from_millis(100);

/// The points at which the processes wait for each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// The processes that had to wait for memory have it.
    Early,
    /// All gates are closed; only then does it make sense to wait for work.
    Held,
    /// No device has work any more; only then does it make sense to copy contents.
    Drained,
    /// Every step that can fail is done.
    Prepared,
}

impl Job {
    /// Pauses or resumes all of them, or none.
    pub fn carry_out(&self, directory: &Directory, follower: &dyn Follower) -> JobReport {
        let (begun, mut attempts, mut next_drain, mut early) = (Instant::now(), 0, FIRST_DRAIN, BTreeSet::new());
        let mut place = match self.queue(directory, begun, follower) {
            Ok(place) => place,
            Err(refusal) => {
                let results = self.ranks.iter().map(|_| Err(ClientError::Refused(refusal.clone()))).collect();
                return JobReport { results, committed: false, objected: false, attempts, ms: begun.elapsed().as_secs_f64() * 1e3 };
            }
        };
        loop {
            attempts += 1;
            let drain_within = self.drain_within(next_drain, begun);
            let (mut results, committed, objected) = match Attempt::new(self, begun, drain_within, &early) {
                Ok(attempt) => (attempt.run(directory, follower), !attempt.decision.abort(), attempt.gathering().objected),
                Err(error) => (self.ranks.iter().map(|member| Err(failed(member.pid, error.kind().into()))).collect(), false, false),
            };
            // In the next attempt these come first, so that the others are not held prepared while these wait for memory.
            let is_short = |member: &usize| results[*member].as_ref().is_err_and(|error| kind(error) == Some(Kind::DeviceMemory));
            early.extend((0..results.len()).filter(is_short));
            let rest = a_little();
            if committed || objected || !self.is_worth_another(&results, begun.elapsed() + rest) {
                let ms = begun.elapsed().as_secs_f64() * 1e3;
                if attempts > 1 {
                    for error in results.iter_mut().filter_map(|result| result.as_mut().err()) {
                        add(error, &format!(" ({attempts} attempts in {ms:.0} ms)"));
                    }
                }
                return JobReport { results, committed, objected, attempts, ms };
            }
            if let Some(place) = place.as_mut().filter(|_| !early.is_empty()) {
                place.waits_for_memory();
            }
            if results.iter().any(|result| result.as_ref().is_err_and(|error| kind(error) == Some(Kind::Busy))) {
                next_drain = drain_within * 2;
            }
            thread::sleep(rest);
        }
    }

    /// How long an attempt may wait for the work to drain. Aligned ranks need as long as their work takes, others wait in vain: so of
    /// several processes' time, half is left for further attempts.
    fn drain_within(&self, next: Duration, begun: Instant) -> Duration {
        let hold = Duration::from_millis(self.wanted.hold_ms.unwrap_or_default());
        let left = hold.saturating_sub(begun.elapsed());
        let limit = if self.ranks.len() > 1 { next.min(left / 2) } else { left };
        limit.max(FIRST_DRAIN.min(hold))
    }

    /// Waits for its turn in the queue, if it needs one.
    fn queue(&self, directory: &Directory, begun: Instant, follower: &dyn Follower) -> Result<Option<InQueue>, Box<Refusal>> {
        let Some(ticket) = self.ticket.clone().filter(|_| self.verb == Verb::Resume) else { return Ok(None) };
        let timeout = self.wanted.timeout_ms.map(Duration::from_millis);
        ticket.queue(directory, begun, timeout, TURN_WITHIN, &mut |before| follower.queued(before))
    }

    /// Whether a retry may succeed, and there is time left for it.
    fn is_worth_another(&self, results: &[Result<Report, ClientError>], elapsed: Duration) -> bool {
        let hold = self.wanted.hold_ms.filter(|_| self.verb == Verb::Pause).map(Duration::from_millis);
        let patience = self.wanted.timeout_ms.map(Duration::from_millis);
        let limit = |error: &ClientError| match (kind(error), self.verb) {
            (Some(Kind::Aborted), _) => None,
            (Some(Kind::Leased), _) => Some(hold.or(patience).unwrap_or_default().max(TURN_WITHIN)),
            (Some(Kind::Busy | Kind::Capturing), Verb::Pause) if hold.is_some() => hold.map(|hold| hold.saturating_sub(FIRST_DRAIN)),
            (Some(Kind::DeviceMemory), Verb::Resume) if patience.is_some() => patience,
            _ => Some(Duration::ZERO),
        };
        let limit = results.iter().filter_map(|result| limit(result.as_ref().err()?)).min();
        limit.is_some_and(|limit| elapsed < limit)
    }
}

/// Ten to fifty milliseconds. Random, so that two coordinators, or a coordinator and a loop of the program, do not collide repeatedly.
fn a_little() -> Duration {
    Duration::from_millis(10 + RandomState::new().build_hasher().finish() % 41)
}

fn kind(error: &ClientError) -> Option<Kind> {
    match error {
        ClientError::Refused(refusal) => Some(refusal.code),
        ClientError::Io { .. } => None,
    }
}

fn add(error: &mut ClientError, more: &str) {
    if let ClientError::Refused(refusal) = error {
        refusal.message += more;
    }
}

fn failed(pid: u32, error: io::Error) -> ClientError {
    ClientError::Io { pid, error }
}

/// Requests a step whose answer carries no data.
fn expect(client: &mut Client, request: Request, file: Option<BorrowedFd<'_>>, wanted: &Reply) -> Result<(), ClientError> {
    match client.ask(request, file, &mut |_| ())? {
        reply if reply == *wanted => Ok(()),
        reply => Err(client.unexpected(&reply)),
    }
}

/// One attempt.
struct Attempt<'a> {
    job: &'a Job,
    begun: Instant,
    drain_within: Duration,
    /// The members that have to wait for memory.
    early: &'a BTreeSet<usize>,
    decision: Decision,
    /// The decision's descriptor, for the processes.
    file: OwnedFd,
    gathering: Mutex<Gathering>,
    changed: Condvar,
}

#[derive(Default)]
struct Gathering {
    /// How many members have reached each step.
    arrived: [usize; 4],
    /// How many members' work has ended; the last one asks the follower.
    drained: usize,
    /// The follower has objected.
    objected: bool,
    /// The first member that failed.
    failed: Option<usize>,
}

/// Why a member stops.
enum Stop {
    Failed(ClientError),
    /// Another one could not.
    Others,
}

impl From<ClientError> for Stop {
    fn from(error: ClientError) -> Self {
        Self::Failed(error)
    }
}

impl<'a> Attempt<'a> {
    fn new(job: &'a Job, begun: Instant, drain_within: Duration, early: &'a BTreeSet<usize>) -> io::Result<Self> {
        let (decision, file) = Decision::create()?;
        Ok(Self { job, begun, drain_within, early, decision, file, gathering: Mutex::default(), changed: Condvar::new() })
    }

    fn run(&self, directory: &Directory, follower: &dyn Follower) -> Vec<Result<Report, ClientError>> {
        let members = 0..self.job.ranks.len();
        let mut results: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = members.map(|member| scope.spawn(move || self.member(member, directory, follower))).collect();
            let broken = || Err(Stop::Failed(failed(0, io::Error::other("vramctl itself failed here; please report it"))));
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| broken())).collect()
        });
        let first = self.gathering().failed.map(|member| self.job.ranks[member].pid);
        let others = |stop| match stop {
            Stop::Failed(error) => error,
            Stop::Others => {
                let why = first.map_or_else(|| "another process of the job failed".into(), |pid| format!("process {pid} failed"));
                ClientError::Refused(Box::new(Refusal::from(&Error::Aborted(why))))
            }
        };
        results.drain(..).map(|result| result.map_err(others)).collect()
    }

    /// Drives one process through all steps.
    fn member(&self, member: usize, directory: &Directory, follower: &dyn Follower) -> Result<Report, Stop> {
        let done = self.prepare_and_commit(member, directory, follower);
        follower.disconnected(self.job.ranks[member].pid);
        // If it is committed, this process does not answer, but the others are done.
        if let Err(Stop::Failed(_)) = done {
            // Locked, so that whoever learns that it is aborted also learns by whom.
            let mut gathering = self.gathering();
            if self.decision.abort() {
                gathering.failed.get_or_insert(member);
                self.changed.notify_all();
            }
        }
        done
    }

    fn prepare_and_commit(&self, member: usize, directory: &Directory, follower: &dyn Follower) -> Result<Report, Stop> {
        let pid = self.job.ranks[member].pid;
        let is_early = self.early.contains(&member);
        if !is_early {
            // Not connected yet: waiting for other processes' memory may take longer than a process waits for a request.
            self.meet(Step::Early, None)?;
        }
        let mut client = Client::connect(directory, pid)?;
        if let Ok(stream) = client.connection() {
            follower.connected(pid, stream);
        }
        let prepared = self.prepare(member, is_early, &mut client, follower);
        if let Err(Stop::Others) = prepared {
            // It answers when everything is undone.
            return Err(match client.ask(Request::Abort, None, &mut |_| ()) {
                // It may also have given up by itself: then there is nothing to abort.
                Err(ClientError::Refused(_)) => Stop::Others,
                Err(error) => error.into(),
                Ok(reply) => client.unexpected(&reply).into(),
            });
        }
        prepared?;
        // Every member's thread commits; the first one decides.
        self.decision.commit();
        match client.ask(Request::Commit, None, &mut |_| ()) {
            Ok(Reply::Done(report)) => Ok(report),
            Ok(other) => Err(client.unexpected(&other).into()),
            Err(error) => Err(error.into()),
        }
    }

    fn prepare(&self, member: usize, is_early: bool, client: &mut Client, follower: &dyn Follower) -> Result<(), Stop> {
        let lease_ms = Some(LEASE.as_millis() as u64);
        let Rank { pid, tags, lenient, is_borrower, communicators } = &self.job.ranks[member];
        // Processes that are not held may be using memory of each other.
        let is_held_pause = self.job.verb == Verb::Pause && self.job.wanted.hold_ms.is_some();
        let others = |are_borrowers: bool| {
            let others = self.job.ranks.iter().filter(|rank| is_held_pause && rank.pid != *pid && rank.is_borrower == are_borrowers);
            others.map(|rank| rank.pid).collect::<Vec<_>>()
        };
        let (partners, borrowers) = (others(false), if *is_borrower { Vec::new() } else { others(true) });
        let (tags, communicators) = (tags.clone(), communicators.clone());
        let mut transition = Transition { tags, lenient: *lenient, partners, borrowers, communicators, ..self.job.wanted.clone() };
        if transition.hold_ms.take().is_some() && self.job.verb == Verb::Pause {
            let limit_ms = self.drain_within.as_millis() as u64;
            expect(client, Request::Hold { lease_ms }, Some(self.file.as_fd()), &Reply::Held)?;
            self.meet(Step::Held, Some(client))?;
            expect(client, Request::Drain { limit_ms }, None, &Reply::Drained).map_err(|error| self.cause(error))?;
            self.ask_when_all_are_drained(follower)?;
            self.meet(Step::Drained, Some(client))?;
            transition.timeout_ms = Some(limit_ms);
        } else if self.job.verb == Verb::Resume {
            let left = transition.timeout_ms.map(|limit| Duration::from_millis(limit).saturating_sub(self.begun.elapsed()));
            transition.tries_again = !is_early && left.is_some_and(|left| !left.is_zero());
            transition.timeout_ms = left.filter(|_| is_early).map(|left| left.as_millis() as u64);
        }
        let ranks = self.job.ranks.iter().filter(|rank| self.job.is_whole && !rank.is_borrower).map(|rank| rank.pid).collect();
        let prepare = if *is_borrower {
            Request::SetAside(transition)
        } else {
            Request::Prepare(Prepare { of: self.job.verb, lease_ms, ranks, transition })
        };
        match client.ask(prepare, Some(self.file.as_fd()), &mut |now| follower.progress(member, now)) {
            Ok(Reply::Prepared) => (),
            Ok(other) => return Err(client.unexpected(&other).into()),
            Err(ClientError::Refused(_)) if is_early && self.has_failed() => return Err(Stop::Others),
            Err(error) => return Err(self.cause(error)),
        }
        if is_early {
            self.meet(Step::Early, Some(client))?;
        }
        if self.job.verb == Verb::Pause && !is_held_pause {
            self.ask_when_all_are_drained(follower)?;
        }
        self.meet(Step::Prepared, Some(client))
    }

    /// Has the last member to get here ask the follower. The others wait for that member at the next step.
    fn ask_when_all_are_drained(&self, follower: &dyn Follower) -> Result<(), Stop> {
        let mut gathering = self.gathering();
        gathering.drained += 1;
        if gathering.drained < self.job.ranks.len() {
            return Ok(());
        }
        drop(gathering);
        follower.drained().map_err(|refusal| {
            self.gathering().objected = true;
            Stop::Failed(ClientError::Refused(refusal))
        })
    }

    /// Waits until all members have reached this step, and renews the process's lease meanwhile.
    fn meet(&self, step: Step, mut client: Option<&mut Client>) -> Result<(), Stop> {
        /// How often to check whether the process has ended while it waits for the others.
        const LOOK_EVERY: Duration = Duration::from_millis(50);
        let mut gathering = self.gathering();
        gathering.arrived[step as usize] += 1;
        self.changed.notify_all();
        let mut renewed = Instant::now();
        while gathering.arrived[step as usize] < self.job.ranks.len() {
            if gathering.failed.is_some() {
                return Err(Stop::Others);
            }
            gathering = self.changed.wait_timeout(gathering, LOOK_EVERY).unpoisoned().0;
            let Some(client) = &mut client else { continue };
            drop(gathering);
            if let Some(error) = client.unasked() {
                return Err(error.into());
            }
            if renewed.elapsed() >= RENEW_EVERY {
                client.renew();
                renewed = Instant::now();
            }
            gathering = self.gathering();
        }
        Ok(())
    }

    /// Why a process has refused a step: it may have noticed that another one failed, and given up.
    fn cause(&self, error: ClientError) -> Stop {
        let has_given_up = matches!(kind(&error), Some(Kind::Aborted | Kind::Busy)) && self.has_failed();
        if has_given_up { Stop::Others } else { Stop::Failed(error) }
    }

    fn has_failed(&self) -> bool {
        self.gathering().failed.is_some()
    }

    fn gathering(&self) -> MutexGuard<'_, Gathering> {
        self.gathering.lock().unpoisoned()
    }
}
