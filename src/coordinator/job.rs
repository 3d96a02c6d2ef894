//! A job: processes that are paused and resumed as one.
//!
//! The coordinator talks to all of them in parallel, over one connection each. Each process completes a step and waits ([`Step`]). When
//! all have arrived, they go on; if one fails, all undo what they have done. The [`Decision`] that they share makes them commit or abort
//! together, even if one dies.
//!
//! A held program need not be idle, but its processes may have stopped at different points: one's GPU waits for a collective that another,
//! held at its gate, has not started. Then all gates open, and a little later all close again. [`Retry`] decides about every further
//! attempt.
//!
//! If the job has ranks on other nodes, those that are behind go on within the attempt instead (`Attempt::drain`): the more nodes, the less
//! often do all stand at the same point.
//!
//! A first attempt waits 100 ms for the work of several processes to drain, each further one twice as long, and none longer than half of
//! what is left of the limit. So queued work of up to a quarter of it always drains, and processes that are not aligned get more attempts.
//! Nothing is saved before all have drained: a failed attempt costs little. Counting collectives would align the processes, too, but
//! engines drain at the first attempt, and training loops mostly at the first or second (`docs/performance.md`).
//!
//! A thread drives each rank. Where the system starts none, one thread takes all ranks through the steps in turn (`Attempt::run_in_turn`):
//! whatever limit a user or a container has reached, what is held or paused can be brought back.

use crate::Reporter;
use crate::deadline::{Deadline, TURN_WITHIN};
use crate::engine::Engines;
use crate::nodes::{Aborted, Participant};
use crate::parallel;
use crate::processes::Found;
use crate::queue::{Place, Ticket};
use crate::retry::{FIRST_DRAIN, Failed, Retry, RetryPolicy, kind};
use crate::shared::{self, Borrower};
use crate::step::Step;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};
use vramctl_control::client::{Client, ClientError};
use vramctl_control::decision::Decision;
use vramctl_control::protocol::{Prepare, Refusal, Reply, Request};
use vramctl_host::Unpoison;
use vramctl_model::{Error, Kind, Report, TransitionRequest, Verb};

/// What a job is to do.
pub struct Job<'a> {
    /// Where its processes listen.
    pub found: &'a Found,
    /// A pause or a resume. A swap is a pause, during which others come.
    pub verb: Verb,
    /// The request, without tags: those differ by process.
    pub wanted: TransitionRequest,
    /// In a swap: the request to those that come. They begin when the work of those that leave has ended, and all are committed as one.
    pub coming: Option<TransitionRequest>,
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

/// A process of a job.
#[derive(Debug, Clone)]
pub struct Rank {
    /// Its id.
    pub pid: u32,
    /// What it is asked for.
    pub verb: Verb,
    /// The tags to pause or resume in it; none means all.
    pub tags: Vec<String>,
    /// Ignore tags that it does not have, instead of failing.
    pub lenient: bool,
    /// It pauses nothing of its own, and sets aside its open memory that the others pause.
    pub is_borrower: bool,
}

/// What came of it.
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
    /// Takes the part of the ranks from this one on out of it.
    pub fn share(&mut self, from: usize) -> Self {
        let results = self.results.split_off(from.min(self.results.len()));
        Self { results, borrowers: Vec::new(), ..*self }
    }
}

/// How long a process waits for this coordinator before it undoes everything.
const LEASE: Duration = Duration::from_secs(5);
/// The same where one thread asks all processes in turn: each waits while others save or read their contents.
const IN_TURN_LEASE: Duration = Duration::from_secs(30);
/// How often to renew a process's lease.
const RENEW_EVERY: Duration = Duration::from_secs(1);
/// After how long without progress a rank that has drained goes on for a moment: the others' work may wait for it.
const ADVANCE_AFTER: Duration = Duration::from_millis(20);
/// How many calls such a rank makes at most in that moment.
const ADVANCE_BY: u32 = 1024;

impl Job<'_> {
    /// Pauses or resumes all of them, or none.
    pub fn run(mut self, reporter: &dyn Reporter) -> JobReport {
        let begun = Instant::now();
        let hold = self.wanted.hold.filter(|_| self.verb == Verb::Pause);
        let deadline = Deadline { begun, timeout: hold.or(self.wanted.timeout) };
        let mut policy = RetryPolicy { verb: self.verb, holds: hold.is_some(), deadline, engines: self.engines };
        let mut place = match self.queue(begun, reporter) {
            Ok(place) => place,
            Err(refusal) => return self.refused(&refusal, begun),
        };
        let (mut attempts, mut next_drain, mut early) = (0, FIRST_DRAIN, BTreeSet::new());
        let terms = self.nodes.as_ref().map(|nodes| nodes.terms().clone());
        if terms.as_ref().is_some_and(|terms| terms.early) {
            early.extend(0..self.ranks.len());
        }
        loop {
            attempts += 1;
            let drain_within = match &terms {
                Some(terms) => terms.drain,
                None => policy.drain_within(next_drain, self.main_ranks().count() + self.borrowers.iter().flatten().count()),
            };
            let done = self.attempt(policy.deadline, drain_within, &early, reporter);
            let rest = a_little();
            let again = if done.committed || terms.is_some() { None } else { policy.retry(&self.failed_attempt(&done), rest) };
            let Some(retry) = again else { return self.report(done, attempts, begun) };
            match retry {
                Retry::Memory => {
                    // In the next attempt these come first, so that the others are not held prepared while these wait for memory.
                    early.extend(done.short());
                    if let Some(place) = &mut place {
                        place.waits_for_memory();
                    }
                }
                Retry::Work => next_drain = drain_within * 2,
                Retry::Lease => (),
                Retry::Borrowers(now) => self.borrowers = Some(now),
                // The program ran on meanwhile, so the time for its work begins anew.
                Retry::Engine(until) => policy.deadline = policy.deadline.anew(until),
            }
            thread::sleep(rest);
        }
    }

    /// It sets aside what the request selects of the others' memory.
    fn borrower(&self, Borrower { process, .. }: &Borrower) -> Rank {
        let TransitionRequest { tags, lenient, .. } = &self.wanted;
        Rank { pid: process.pid, verb: self.verb, tags: tags.clone(), lenient: *lenient, is_borrower: true }
    }

    /// The ranks without those that come.
    fn main_ranks(&self) -> impl Iterator<Item = &Rank> {
        self.ranks.iter().filter(|rank| rank.verb == self.verb)
    }

    /// Waits for its turn in the queue, if it needs one.
    fn queue(&self, begun: Instant, reporter: &dyn Reporter) -> Result<Option<Place>, Box<Refusal>> {
        let Some(ticket) = self.ticket.clone().filter(|_| self.verb == Verb::Resume || self.coming.is_some()) else { return Ok(None) };
        self.found.queue(ticket, Deadline { begun, timeout: self.wanted.timeout }, TURN_WITHIN, reporter)
    }

    /// What the policy decides by.
    fn failed_attempt<'b>(&'b self, done: &'b Attempted) -> Failed<'b> {
        let find_borrowers = || {
            let own: Vec<_> = self.main_ranks().map(|rank| rank.pid).collect();
            shared::find(self.found, shared::lent_by(self.found, &own, &self.wanted)).ok()
        };
        Failed {
            errors: done.results.iter().filter_map(|result| result.as_ref().err()).collect(),
            engine_objected: done.objected,
            borrowers: self.borrowers.as_deref(),
            find_borrowers: Box::new(find_borrowers),
        }
    }

    fn attempt(&self, deadline: Deadline, drain_within: Duration, early: &BTreeSet<usize>, reporter: &dyn Reporter) -> Attempted {
        let borrowers = self.borrowers.iter().flatten().map(|one| self.borrower(one));
        let ranks: Vec<_> = self.ranks.iter().cloned().chain(borrowers).collect();
        match Decision::create() {
            Ok((decision, file)) => {
                let decision = Arc::new(decision);
                if let Some(nodes) = &self.nodes {
                    nodes.decides(Arc::clone(&decision));
                }
                let (gathering, changed) = (Mutex::default(), Condvar::new());
                Attempt { job: self, ranks, deadline, drain_within, early, decision, file, gathering, changed, reporter }.run()
            }
            Err(error) => {
                let results = ranks.iter().map(|rank| Err(failed(rank.pid, error.kind().into()))).collect();
                Attempted { results, committed: false, objected: false, drained: None }
            }
        }
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

/// What a library means that does not know how to advance.
fn unless_too_old(error: ClientError) -> ClientError {
    match error {
        ClientError::Refused(refusal) if refusal.code == Kind::Invalid => {
            let why = "its library is older than this command, and cannot wait for ranks on other nodes. Start the program again, with this version";
            ClientError::Refused(Box::new(Refusal { message: format!("{why} (it answers: {})", refusal.message), ..*refusal }))
        }
        error => error,
    }
}

/// One attempt.
struct Attempt<'a> {
    job: &'a Job<'a>,
    /// Its processes, the borrowers last.
    ranks: Vec<Rank>,
    deadline: Deadline,
    drain_within: Duration,
    /// The ranks that have to wait for memory.
    early: &'a BTreeSet<usize>,
    decision: Arc<Decision>,
    /// The decision's descriptor, for the processes.
    file: OwnedFd,
    gathering: Mutex<Gathering>,
    changed: Condvar,
    reporter: &'a dyn Reporter,
}

/// What came of an attempt.
struct Attempted {
    /// For each rank, the borrowers last.
    results: Vec<Result<Report, ClientError>>,
    committed: bool,
    /// An engine has got a request.
    objected: bool,
    /// When all work had ended.
    drained: Option<Instant>,
}

impl Attempted {
    /// The ranks that were short of memory.
    fn short(&self) -> impl Iterator<Item = usize> {
        let is_short = |result: &Result<Report, ClientError>| result.as_ref().is_err_and(|error| kind(error) == Some(Kind::DeviceMemory));
        self.results.iter().enumerate().filter(move |(_, result)| is_short(result)).map(|(rank, _)| rank)
    }
}

#[derive(Default)]
struct Gathering {
    /// How many ranks have reached each step.
    arrived: BTreeMap<Step, usize>,
    /// How many ranks' work has ended; the last one asks the engines.
    drained: usize,
    /// When the last rank's work had ended.
    all_drained: Option<Instant>,
    /// When a rank last made progress.
    changed: Option<Instant>,
    /// How many ranks are going on for a moment.
    advancing: usize,
    /// How often all ranks here have begun to go on for other nodes.
    advances: u32,
    /// An engine has objected.
    objected: bool,
    /// The first rank that failed.
    failed: Option<usize>,
    /// Whether all ranks have a thread. `None` while threads are being started.
    has_threads: Option<bool>,
    /// How many of the ranks that leave are done, or have failed.
    left: usize,
}

impl Gathering {
    /// Has all ranks here go on, if ranks on other nodes wait for them once more: then none counts as drained.
    fn follow(&mut self, advances: u32) {
        if advances > self.advances {
            (self.advances, self.drained, self.changed) = (advances, 0, Some(Instant::now()));
            self.arrived.remove(&Step::Drained);
        }
    }

    /// Has a drained rank leave the step, if the others of these `ranks` have made no progress for a while. Returns whether it has left.
    fn leave_if_late(&mut self, ranks: usize) -> bool {
        let is_late = self.changed.is_some_and(|changed| changed.elapsed() >= ADVANCE_AFTER);
        let arrived = self.arrived.get(&Step::Drained).copied().unwrap_or(0);
        let leaves = is_late && self.advancing == 0 && arrived < ranks;
        if leaves {
            self.arrived.insert(Step::Drained, arrived - 1);
            self.drained -= 1;
        }
        leaves
    }
}

/// Why a rank stops.
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

/// Those on other nodes could not.
impl From<Aborted> for Stop {
    fn from(_: Aborted) -> Self {
        Self::Others
    }
}

impl Attempt<'_> {
    fn run(&self) -> Attempted {
        let stopped = self.run_at_once().unwrap_or_else(|error| self.run_in_turn(&error));
        let Gathering { failed, objected, all_drained, .. } = *self.gathering();
        let first = failed.map(|rank| self.ranks[rank].pid);
        let others = |stop| match stop {
            Stop::Failed(error) => error,
            Stop::Others => {
                let why = first.map_or_else(|| "another process of the job failed".into(), |pid| format!("process {pid} failed"));
                ClientError::Refused(Box::new(Refusal::from(&Error::Aborted(why))))
            }
        };
        let results = stopped.into_iter().map(|result| result.map_err(others)).collect();
        Attempted { results, committed: !self.decision.abort(), objected, drained: all_drained }
    }

    /// Drives all ranks, each in a thread of its own; the last one in this. If one gets no thread, no rank has been asked for anything.
    fn run_at_once(&self) -> io::Result<Vec<Result<Report, Stop>>> {
        let Some(last) = self.ranks.len().checked_sub(1) else { return Ok(Vec::new()) };
        let drive_once_all_are_there = |rank| self.waits_for_threads().then(|| self.drive(rank));
        thread::scope(|scope| {
            let threads: io::Result<Vec<_>> =
                (0..last).map(|rank| parallel::spawn_in(scope, move || drive_once_all_are_there(rank))).collect();
            self.gathering().has_threads = Some(threads.is_ok());
            self.changed.notify_all();
            let threads = threads?;
            let of_last = self.drive(last);
            let broken = || Err(Stop::Failed(failed(0, io::Error::other("vramctl itself failed here; please report it"))));
            let joined = threads.into_iter().map(|thread| thread.join().ok().flatten().unwrap_or_else(broken));
            Ok(joined.chain([of_last]).collect())
        })
    }

    /// Waits until it is known whether each rank has a thread.
    fn waits_for_threads(&self) -> bool {
        let started = self.changed.wait_while(self.gathering(), |gathering| gathering.has_threads.is_none()).unpoisoned();
        started.has_threads == Some(true)
    }

    /// Takes all ranks through the steps on this thread. Where ranks have to wait for each other meanwhile, it fails with `error`, which says
    /// why they have no threads.
    fn run_in_turn(&self, error: &io::Error) -> Vec<Result<Report, Stop>> {
        let mut clients: Vec<_> = self.ranks.iter().map(|_| None).collect();
        let asked = match self.vote_in_turn(&mut clients, error) {
            Ok(()) => {
                self.decision.commit();
                None
            }
            Err((rank, stop)) => {
                self.decision.abort();
                self.gathering().failed = Some(rank);
                Some((rank, stop))
            }
        };
        let mut failed = asked;
        let end = |(rank, client): (usize, Option<Client>)| {
            let is_first = failed.as_ref().is_some_and(|(first, _)| *first == rank);
            let done = match (client, &failed) {
                _ if is_first => failed.take().map_or(Err(Stop::Others), |(_, stop)| Err(stop)),
                (Some(mut client), None) if !self.has_failed() => Self::commit(&mut client),
                (Some(mut client), _) => Err(Self::undo(&mut client)),
                (None, _) => Err(Stop::Others),
            };
            self.reporter.disconnected(self.ranks[rank].pid);
            done
        };
        clients.into_iter().enumerate().map(end).collect()
    }

    /// Takes all ranks to their votes. Those that have to wait for memory begin, as in an attempt with threads. Returns the rank that failed.
    fn vote_in_turn(&self, clients: &mut [Option<Client>], error: &io::Error) -> Result<(), (usize, Stop)> {
        // Ranks on other nodes are heard of by a thread; and host memory passes between two that take their steps side by side.
        if self.job.nodes.is_some() || self.job.wanted.hand_over_host.is_some() {
            return Err((0, Stop::Failed(ClientError::Refused(parallel::refused(error).into_refusal()))));
        }
        let mut order: Vec<_> = (0..self.ranks.len()).collect();
        order.sort_by_key(|rank| !self.early.contains(rank));
        // Only who has a lease is connected.
        Self::step_in_turn(&order, clients, |rank, client| {
            if self.is_held(rank) { self.hold(client.insert(self.connect(rank)?), IN_TURN_LEASE) } else { Ok(()) }
        })?;
        Self::step_in_turn(&order, clients, |rank, client| {
            let Some(client) = client.as_mut().filter(|_| self.is_held(rank)) else { return Ok(()) };
            expect(client, Request::Drain { limit_ms: self.drain_within.as_millis() as u64 }, None, &Reply::Drained)?;
            self.confirm_when_all_are_drained()
        })?;
        Self::step_in_turn(&order, clients, |rank, client| {
            let client = match client {
                Some(client) => client,
                none => none.insert(self.connect(rank)?),
            };
            self.ask_to_prepare(rank, self.early.contains(&rank), client, IN_TURN_LEASE)?;
            if self.ranks[rank].verb == Verb::Pause && !self.is_held(rank) { self.confirm_when_all_are_drained() } else { Ok(()) }
        })
    }

    /// One step of all ranks, and the leases of the others meanwhile.
    fn step_in_turn(
        order: &[usize],
        clients: &mut [Option<Client>],
        step: impl Fn(usize, &mut Option<Client>) -> Result<(), Stop>,
    ) -> Result<(), (usize, Stop)> {
        for &rank in order {
            step(rank, &mut clients[rank]).map_err(|stop| (rank, stop))?;
            clients.iter_mut().flatten().for_each(Client::renew);
        }
        Ok(())
    }

    /// Drives one rank through all steps.
    fn drive(&self, rank: usize) -> Result<Report, Stop> {
        let done = self.prepare_and_commit(rank);
        if !self.comes(rank) {
            self.gathering().left += 1;
            self.changed.notify_all();
        }
        self.reporter.disconnected(self.ranks[rank].pid);
        // If it is committed, this process does not answer, but the others are done.
        if let Err(Stop::Failed(_)) = done
            && self.job.nodes.as_ref().is_none_or(Participant::may_abort)
        {
            // Locked, so that whoever learns that it is aborted also learns by whom.
            let mut gathering = self.gathering();
            if self.decision.abort() {
                gathering.failed.get_or_insert(rank);
                self.changed.notify_all();
            }
        }
        done
    }

    fn prepare_and_commit(&self, rank: usize) -> Result<Report, Stop> {
        let is_early = self.early.contains(&rank);
        if !is_early {
            // Not connected yet: waiting for other processes' memory may take longer than a process waits for a request.
            self.meet(Step::Early, None)?;
        }
        if self.comes(rank) {
            self.meet(Step::Held, None)?;
            self.meet(Step::Drained, None)?;
        }
        let mut client = self.connect(rank)?;
        let prepared = self.prepare(rank, is_early, &mut client);
        if let Err(Stop::Others) = prepared {
            return Err(Self::undo(&mut client));
        }
        prepared?;
        // Every rank's thread commits; the first one decides.
        self.decision.commit();
        if self.comes(rank) {
            self.wait_for_those_that_leave();
        }
        Self::commit(&mut client)
    }

    fn connect(&self, rank: usize) -> Result<Client, Stop> {
        let pid = self.ranks[rank].pid;
        let client = self.job.found.connect(pid)?;
        if let Ok(stream) = client.connection() {
            self.reporter.connected(pid, stream);
        }
        Ok(client)
    }

    fn commit(client: &mut Client) -> Result<Report, Stop> {
        match client.ask(Request::Commit, None, &mut |_| ()) {
            Ok(Reply::Done(report)) => Ok(report),
            Ok(other) => Err(client.unexpected(&other).into()),
            Err(error) => Err(error.into()),
        }
    }

    /// Has a rank undo what it has done. It answers when everything is undone.
    fn undo(client: &mut Client) -> Stop {
        match client.ask(Request::Abort, None, &mut |_| ()) {
            // It may also have given up by itself: then there is nothing to abort.
            Err(ClientError::Refused(_)) => Stop::Others,
            Err(error) => error.into(),
            Ok(reply) => client.unexpected(&reply).into(),
        }
    }

    /// Takes a rank to its vote.
    fn prepare(&self, rank: usize, is_early: bool, client: &mut Client) -> Result<(), Stop> {
        if self.is_held(rank) {
            self.hold(client, LEASE)?;
            self.meet(Step::Held, Some(client))?;
            self.drain(client)?;
        }
        self.ask_to_prepare(rank, is_early, client, LEASE)?;
        if is_early {
            self.meet(Step::Early, Some(client))?;
        }
        if self.ranks[rank].verb == Verb::Pause && !self.is_held(rank) {
            self.confirm_when_all_are_drained()?;
        }
        self.meet(Step::Prepared, Some(client))
    }

    /// What a rank is asked for, without what differs by rank.
    fn wanted(&self, rank: usize) -> &TransitionRequest {
        self.job.coming.as_ref().filter(|_| self.comes(rank)).unwrap_or(&self.job.wanted)
    }

    /// Whether a rank is held before its pause. Processes that are not held may be using memory of each other.
    fn is_held(&self, rank: usize) -> bool {
        self.ranks[rank].verb == Verb::Pause && self.wanted(rank).hold.is_some()
    }

    fn hold(&self, client: &mut Client, lease: Duration) -> Result<(), Stop> {
        let hold = Request::Hold { lease_ms: Some(lease.as_millis() as u64) };
        Ok(expect(client, hold, Some(self.file.as_fd()), &Reply::Held)?)
    }

    fn ask_to_prepare(&self, rank: usize, is_early: bool, client: &mut Client, lease: Duration) -> Result<(), Stop> {
        let lease_ms = Some(lease.as_millis() as u64);
        let is_held_pause = self.is_held(rank);
        let Rank { pid, verb, tags, lenient, is_borrower } = &self.ranks[rank];
        let wanted = self.wanted(rank);
        let of_same_verb = || self.ranks.iter().filter(|rank| rank.verb == *verb);
        let others = |are_borrowers: bool| {
            let others = of_same_verb().filter(|rank| is_held_pause && rank.pid != *pid && rank.is_borrower == are_borrowers);
            others.map(|rank| rank.pid).collect::<Vec<_>>()
        };
        let (partners, borrowers) = (others(false), if *is_borrower { Vec::new() } else { others(true) });
        let mut transition = TransitionRequest { tags: tags.clone(), lenient: *lenient, partners, borrowers, ..wanted.clone() };
        transition.hold = None;
        if is_held_pause {
            transition.timeout = Some(self.drain_within);
        } else if *verb == Verb::Resume && !self.comes(rank) {
            let left = self.deadline.left();
            transition.tries_again = !is_early && left.is_some_and(|left| !left.is_zero());
            transition.timeout = left.filter(|_| is_early);
        }
        let ranks = of_same_verb().filter(|rank| self.job.is_whole && !rank.is_borrower).map(|rank| rank.pid).collect();
        let prepare =
            if *is_borrower { Request::SetAside(transition) } else { Request::Prepare(Prepare { of: *verb, lease_ms, ranks, transition }) };
        match client.ask(prepare, Some(self.file.as_fd()), &mut |now| self.reporter.progress(*pid, now)) {
            Ok(Reply::Prepared) => Ok(()),
            Ok(other) => Err(client.unexpected(&other).into()),
            Err(ClientError::Refused(_)) if is_early && self.has_failed() => Err(Stop::Others),
            Err(error) => Err(self.cause(error)),
        }
    }

    /// Waits until no rank has work in flight. One that has none may be behind: those that have started a collective wait for it, and it
    /// is held. Then some of its calls pass.
    fn drain(&self, client: &mut Client) -> Result<(), Stop> {
        let until = Instant::now() + self.drain_within;
        let (mut limit, mut calls, mut advances) = (self.drain_within, 0, 0);
        loop {
            let (begun, limit_ms) = (Instant::now(), limit.as_millis() as u64);
            expect(client, Request::Drain { limit_ms }, None, &Reply::Drained).map_err(|error| self.cause(error))?;
            let waited = begun.elapsed();
            self.confirm_when_all_are_drained()?;
            if self.meet_unless(Step::Drained, Some(client), || self.goes_on(&mut advances))? {
                return Ok(());
            }
            // More than one collective is too many: then the others are behind.
            calls = if waited >= ADVANCE_AFTER { 1 } else { (calls * 2).clamp(1, ADVANCE_BY) };
            expect(client, Request::Advance { calls }, None, &Reply::Held).map_err(|error| self.cause(unless_too_old(error)))?;
            let mut gathering = self.gathering();
            gathering.advancing -= 1;
            gathering.changed = Some(Instant::now());
            limit = until.saturating_duration_since(Instant::now());
        }
    }

    /// Whether a rank that has drained goes on for a moment, because others may wait for it: those on other nodes for all here, or others here
    /// for this one. `advances`: how often it has gone on for other nodes.
    fn goes_on(&self, advances: &mut u32) -> bool {
        let Some(nodes) = &self.job.nodes else { return false };
        let wanted = nodes.advances();
        let mut gathering = self.gathering();
        gathering.follow(wanted);
        let for_nodes = gathering.advances > *advances;
        let goes_on = for_nodes || gathering.leave_if_late(self.ranks.len());
        *advances = gathering.advances;
        gathering.advancing += usize::from(goes_on);
        goes_on
    }

    /// Whether it comes while others leave.
    fn comes(&self, rank: usize) -> bool {
        self.ranks[rank].verb != self.job.verb
    }

    fn count_not_coming(&self) -> usize {
        (0..self.ranks.len()).filter(|rank| !self.comes(*rank)).count()
    }

    /// Waits until the ranks that leave have given back all memory: whoever comes may allocate more at once. It does not wait long, because all
    /// is decided, and a rank that leaves may be stopped.
    fn wait_for_those_that_leave(&self) {
        const PATIENCE: Duration = Duration::from_secs(1);
        let all = self.count_not_coming();
        let _ = self.changed.wait_timeout_while(self.gathering(), PATIENCE, |gathering| gathering.left < all).unpoisoned();
    }

    /// Has the last rank that is drained ask the engines whether they still have no requests. The others wait for it at the next step.
    fn confirm_when_all_are_drained(&self) -> Result<(), Stop> {
        let mut gathering = self.gathering();
        gathering.drained += 1;
        if gathering.drained < self.count_not_coming() {
            return Ok(());
        }
        gathering.all_drained = Some(Instant::now());
        drop(gathering);
        self.job.engines.map_or(Ok(()), |(engines, _)| engines.confirm()).map_err(|failure| {
            self.gathering().objected = true;
            Stop::Failed(ClientError::Refused(failure.into_refusal()))
        })
    }

    /// Waits until all ranks have reached this step, and renews the process's lease meanwhile.
    fn meet(&self, step: Step, client: Option<&mut Client>) -> Result<(), Stop> {
        self.meet_unless(step, client, || false).map(drop)
    }

    /// The same, unless this says that the rank leaves again. Returns whether all have reached it.
    fn meet_unless(&self, step: Step, mut client: Option<&mut Client>, mut leaves: impl FnMut() -> bool) -> Result<bool, Stop> {
        /// How often to check whether the process has ended while it waits for the others.
        const LOOK_EVERY: Duration = Duration::from_millis(50);
        let look_every = if step == Step::Drained { ADVANCE_AFTER / 2 } else { LOOK_EVERY };
        let nodes = self.job.nodes.as_ref().filter(|_| step > Step::Early);
        if self.arrive(step) == self.ranks.len() {
            nodes.map_or(Ok(()), |nodes| nodes.reach(step))?;
        }
        let mut renewed = Instant::now();
        loop {
            if self.waits(step, look_every)? {
                // The ranks here have arrived.
                match nodes {
                    Some(nodes) if !nodes.may_go_on(step, look_every)? => (),
                    _ => return Ok(true),
                }
            }
            if leaves() {
                return Ok(false);
            }
            let Some(client) = &mut client else { continue };
            if let Some(error) = client.unasked() {
                return Err(error.into());
            }
            if renewed.elapsed() >= RENEW_EVERY {
                client.renew();
                renewed = Instant::now();
            }
        }
    }

    /// A rank has reached the step. Returns how many have.
    fn arrive(&self, step: Step) -> usize {
        let mut gathering = self.gathering();
        let arrived = gathering.arrived.entry(step).or_default();
        *arrived += 1;
        let arrived = *arrived;
        gathering.changed = Some(Instant::now());
        self.changed.notify_all();
        arrived
    }

    /// Waits a moment for all ranks to reach the step. Returns whether they have.
    fn waits(&self, step: Step, moment: Duration) -> Result<bool, Stop> {
        let have = |gathering: &Gathering| gathering.arrived.get(&step) == Some(&self.ranks.len());
        let is_open = |gathering: &mut Gathering| !have(gathering) && gathering.failed.is_none();
        let gathering = self.changed.wait_timeout_while(self.gathering(), moment, is_open).unpoisoned().0;
        match gathering.failed {
            _ if have(&gathering) && self.job.nodes.is_none() => Ok(true),
            Some(_) => Err(Stop::Others),
            None => Ok(have(&gathering)),
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_cannot_advance_is_said_to_be_too_old() {
        let refused = |error: &Error| ClientError::Refused(Box::new(Refusal::from(error)));
        let old = unless_too_old(refused(&Error::Invalid("unknown variant `advance`".into()))).to_string();
        assert!(old.starts_with("its library is older than this command") && old.contains("unknown variant `advance`"), "{old}");
        let ended = unless_too_old(refused(&Error::Ending)).to_string();
        assert_eq!(ended, refused(&Error::Ending).to_string());
    }
}
