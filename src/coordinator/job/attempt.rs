//! One attempt of a job: one thread takes all of its ranks through the steps of the [`Barrier`], over one connection each.
//!
//! No step needs a thread of its own: whatever limit a user or a container has reached, what is held or paused can be brought back.

use crate::Reporter;
use crate::barrier::{Action, Barrier, Begins, Behind, Party, Step, Time};
use crate::deadline::Deadline;
use crate::job::{Job, Rank, Role};
use crate::nodes::Next;
use crate::patience::{ADVANCE_AFTER, CHECK_RANKS_EVERY, LEASE, RENEW_EVERY};
use crate::retry::kind;
use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};
use vramctl_control::client::{Client, ClientError};
use vramctl_control::decision::Decision;
use vramctl_control::protocol::{Prepare, Refusal, Reply, Request};
use vramctl_host::system::poll_each;
use vramctl_model::{Error, Kind, Participants, PauseRequest, Report, ResumeRequest, Selection, SetAside, Transition, Verb};

/// How many calls of a rank that is behind pass at most, when it goes on for a moment.
const MOST_CALLS: u32 = 1024;

/// How an attempt has ended.
pub struct Attempted {
    /// For each rank, the borrowers last.
    pub results: Vec<Result<Report, ClientError>>,
    /// Whether it was committed; otherwise, everything was undone.
    pub committed: bool,
    /// An engine has got a request.
    pub objected: bool,
    /// When all work had ended.
    pub drained: Option<Instant>,
}

impl Attempted {
    /// The ranks that were short of memory.
    pub fn short(&self) -> impl Iterator<Item = usize> {
        let is_short = |result: &Result<Report, ClientError>| result.as_ref().is_err_and(|error| kind(error) == Some(Kind::DeviceMemory));
        self.results.iter().enumerate().filter(move |(_, result)| is_short(result)).map(|(rank, _)| rank)
    }
}

/// What a rank was asked for last.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Asked {
    Hold,
    Drain,
    Advance,
    Prepare,
    Commit,
    Abort,
}

/// Why a rank has no report.
enum Stop {
    Failed(ClientError),
    /// Another one has failed.
    Others,
}

/// The connection to a rank.
#[derive(Default)]
struct Connection {
    client: Option<Client>,
    /// What has not been answered yet.
    asked: Option<Asked>,
    /// It has been asked for something that it must undo, and whether it is to do so once it has answered.
    has_begun: bool,
    is_to_undo: bool,
    renewed: Option<Instant>,
    /// When its work must have drained, since when that is waited for, and how long it took last.
    drains_until: Option<Instant>,
    drains_since: Option<Instant>,
    drained_after: Duration,
    /// How many of its calls have passed when it last went on for a moment.
    calls: u32,
    result: Option<Result<Report, Stop>>,
}

/// One attempt.
pub struct Attempt<'a> {
    job: &'a Job<'a>,
    /// Its processes, the borrowers last.
    ranks: Vec<Rank>,
    deadline: Deadline,
    drain_within: Duration,
    /// The ranks that have to wait for memory.
    short: &'a BTreeSet<usize>,
    decision: Decision,
    /// The decision's descriptor, for the processes.
    file: OwnedFd,
    reporter: &'a dyn Reporter,
    begun: Instant,
    barrier: Barrier,
    connections: Vec<Connection>,
    /// The first rank that has failed.
    culprit: Option<usize>,
    /// Why an engine has objected.
    objection: Option<ClientError>,
    /// When the last rank's work had ended.
    drained: Option<Instant>,
    /// The other nodes know that all ranks here are prepared.
    has_voted: bool,
}

impl<'a> Attempt<'a> {
    /// Of these ranks, of which those that are `short` have to wait for memory.
    pub fn new(
        job: &'a Job<'a>,
        ranks: Vec<Rank>,
        deadline: Deadline,
        drain_within: Duration,
        short: &'a BTreeSet<usize>,
        reporter: &'a dyn Reporter,
    ) -> io::Result<Self> {
        let (decision, file) = Decision::create()?;
        let party = |(place, rank): (usize, &Rank)| Party {
            steps: if job.holds(rank) { &[Step::Held, Step::Drained, Step::Prepared] } else { &[Step::Prepared] },
            begins: match () {
                () if job.comes(rank) => Begins::OnceDrained,
                () if short.contains(&place) => Begins::First,
                () => Begins::Together,
            },
        };
        // On one node, another attempt is made instead.
        let behind = if job.nodes.is_some() { Behind::GoOn } else { Behind::Wait };
        Ok(Self {
            barrier: Barrier::new(ranks.iter().enumerate().map(party), behind, drain_within),
            connections: ranks.iter().map(|_| Connection::default()).collect(),
            job,
            ranks,
            deadline,
            drain_within,
            short,
            decision,
            file,
            reporter,
            begun: Instant::now(),
            culprit: None,
            objection: None,
            drained: None,
            has_voted: false,
        })
    }

    /// Takes all ranks through the steps.
    pub fn run(mut self) -> Attempted {
        let begin = self.barrier.begin(self.now());
        self.carry_out(begin);
        let mut checked = Instant::now();
        while !self.barrier.is_over() {
            let mut ready = self.wait();
            if checked.elapsed() >= CHECK_RANKS_EVERY {
                (ready, checked) = ((0..self.ranks.len()).collect(), Instant::now());
            }
            let actions = self.hear_nodes();
            self.carry_out(actions);
            for rank in ready {
                let actions = self.hear(rank);
                self.carry_out(actions);
            }
            let actions = self.barrier.tick(self.now());
            self.carry_out(actions);
        }
        self.finish()
    }

    fn finish(self) -> Attempted {
        let why = self.culprit.map(|rank| format!("process {} failed", self.ranks[rank].pid));
        let others = || Refusal::from(&Error::Aborted(why.clone().unwrap_or_else(|| "another process of the job failed".into())));
        let result = |connection: Connection| match connection.result {
            Some(Ok(report)) => Ok(report),
            Some(Err(Stop::Failed(error))) => Err(error),
            Some(Err(Stop::Others)) | None => Err(ClientError::Refused(Box::new(others()))),
        };
        let mut results: Vec<_> = self.connections.into_iter().map(result).collect();
        let objected = self.objection.is_some();
        if let (Some(first), Some(objection)) = (results.first_mut(), self.objection) {
            *first = Err(objection);
        }
        Attempted { results, committed: !self.decision.abort(), objected, drained: self.drained }
    }

    fn now(&self) -> Time {
        self.begun.elapsed()
    }

    /// Waits until a rank or the other nodes have said something, or it is time to look. Returns the ranks that have.
    fn wait(&self) -> Vec<usize> {
        let next = self.barrier.next_tick().map_or(CHECK_RANKS_EVERY, |next| next.saturating_sub(self.now()).min(CHECK_RANKS_EVERY));
        let open = || self.connections.iter().enumerate().filter_map(|(rank, connection)| Some((rank, connection.client.as_ref()?)));
        let nodes = self.job.nodes.as_ref().map(AsFd::as_fd);
        let descriptors: Vec<_> = open().map(|(_, client)| client.as_fd()).chain(nodes).collect();
        let ready = poll_each(&descriptors, libc::POLLIN, next).unwrap_or_default();
        open().zip(ready).filter(|(_, is_ready)| *is_ready).map(|((rank, _), _)| rank).collect()
    }

    fn carry_out(&mut self, mut actions: Vec<Action>) {
        while !actions.is_empty() {
            let mut more = self.connect_all(&actions);
            for action in actions {
                match action {
                    Action::Take(rank, step) if !self.has_failed() => self.take(rank, step),
                    Action::Take(..) | Action::Ask(_) => (),
                    Action::Advance(rank) => self.let_go_on(rank),
                    Action::Commit(rank) => self.ask(rank, Asked::Commit, Request::Commit),
                    Action::Abort(rank) => more.extend(self.undo(rank)),
                    Action::Reached(step) => more.extend(self.all_have_reached(step)),
                }
            }
            actions = more;
        }
    }

    /// Connects to all ranks that are to take a step before the first one is asked: the less they are apart, the more often do they stand at the
    /// same point.
    fn connect_all(&mut self, actions: &[Action]) -> Vec<Action> {
        for action in actions {
            if let Action::Take(rank, _) = action
                && self.connections[*rank].client.is_none()
                && !self.has_failed()
                && let Err(error) = self.connect(*rank)
            {
                return self.fail(*rank, Stop::Failed(error));
            }
            self.renew(RENEW_EVERY);
        }
        Vec::new()
    }

    fn connect(&mut self, rank: usize) -> Result<(), ClientError> {
        let pid = self.ranks[rank].pid;
        let client = self.job.found.connect(pid)?;
        if let Ok(stream) = client.connection() {
            self.reporter.connected(pid, stream);
        }
        self.connections[rank].client = Some(client);
        Ok(())
    }

    /// Renews the leases of the ranks that wait and have had no sign for so long.
    fn renew(&mut self, every: Duration) {
        for connection in self.connections.iter_mut().filter(|connection| connection.asked.is_none() && connection.has_begun) {
            if let Some(client) = &mut connection.client
                && connection.renewed.is_none_or(|renewed| renewed.elapsed() >= every)
            {
                client.renew();
                connection.renewed = Some(Instant::now());
            }
        }
    }

    fn ask(&mut self, rank: usize, asked: Asked, request: Request) {
        let carries_decision = matches!(asked, Asked::Hold | Asked::Prepare);
        let connection = &mut self.connections[rank];
        let Some(client) = &mut connection.client else { return };
        client.begin(request, carries_decision.then(|| self.file.as_fd()));
        (connection.asked, connection.has_begun, connection.renewed) = (Some(asked), true, Some(Instant::now()));
    }

    /// Takes a rank to its next step.
    fn take(&mut self, rank: usize, step: Step) {
        match step {
            Step::Found => (),
            Step::Held => self.ask(rank, Asked::Hold, Request::Hold { lease_ms: Some(LEASE.as_millis() as u64) }),
            Step::Drained => {
                self.connections[rank].drains_until = Some(Instant::now() + self.drain_within);
                self.drain(rank);
            }
            Step::Prepared => {
                let request = self.prepare(rank);
                self.ask(rank, Asked::Prepare, request);
            }
        }
    }

    /// Waits until a rank has no work in flight.
    fn drain(&mut self, rank: usize) {
        let now = Instant::now();
        let connection = &mut self.connections[rank];
        connection.drains_since = Some(now);
        let left = connection.drains_until.map_or(Duration::ZERO, |until| until.saturating_duration_since(now));
        self.ask(rank, Asked::Drain, Request::Drain { limit_ms: left.as_micros().div_ceil(1000) as u64 });
    }

    /// A rank that has drained may be behind: those that have started a collective wait for it, and it is held. So some of its calls pass.
    fn let_go_on(&mut self, rank: usize) {
        let connection = &mut self.connections[rank];
        // More than one collective is too many: then the others are behind.
        connection.calls = if connection.drained_after >= ADVANCE_AFTER { 1 } else { (connection.calls * 2).clamp(1, MOST_CALLS) };
        let calls = connection.calls;
        self.ask(rank, Asked::Advance, Request::Advance { calls });
    }

    fn prepare(&self, rank: usize) -> Request {
        let Rank { role, tags, lenient, amounts, .. } = &self.ranks[rank];
        let lease_ms = Some(LEASE.as_millis() as u64);
        let selection = |common: &Selection| Selection { tags: tags.clone(), lenient: *lenient, ..common.clone() };
        match (role, self.job.request.pause(), self.job.request.resume()) {
            (Role::Leaves, Some(pause), _) => {
                let (timeout, participants) = match pause.hold {
                    Some(_) => (Some(self.drain_within), self.others_that_pause(rank)),
                    None => (pause.timeout, Participants::default()),
                };
                let (selection, amounts) = (selection(&pause.selection), amounts.clone());
                let pause = PauseRequest { selection, amounts, timeout, participants, hold: None, ..pause.clone() };
                Request::Prepare(Prepare { lease_ms, ranks: self.whole_job(Role::Leaves), transition: Transition::Pause(pause) })
            }
            (Role::Borrows, Some(pause), _) => Request::SetAside(SetAside {
                selection: selection(&pause.selection),
                timeout: Some(self.drain_within),
                partners: self.others_that_pause(rank).partners,
                ..SetAside::default()
            }),
            (_, _, Some(resume)) => {
                let mut resume = ResumeRequest { selection: selection(&resume.selection), ..resume.clone() };
                if !self.job.comes(&self.ranks[rank]) {
                    let (left, waits) = (self.deadline.left(), self.short.contains(&rank));
                    resume.tries_again = !waits && left.is_some_and(|left| !left.is_zero());
                    resume.timeout = left.filter(|_| waits);
                }
                Request::Prepare(Prepare { lease_ms, ranks: self.whole_job(Role::Comes), transition: Transition::Resume(resume) })
            }
            (_, _, None) => unreachable!("the ranks of a resume come"),
        }
    }

    /// The other processes that are held in the same pause.
    fn others_that_pause(&self, rank: usize) -> Participants {
        let pid = self.ranks[rank].pid;
        let of_role = |role| self.ranks.iter().filter(|other| other.pid != pid && other.role == role).map(|other| other.pid).collect();
        Participants { partners: of_role(Role::Leaves), borrowers: of_role(Role::Borrows) }
    }

    /// The ranks in this role, for each of them to remember, if these are all of the job.
    fn whole_job(&self, role: Role) -> Vec<u32> {
        self.ranks.iter().filter(|rank| self.job.is_whole && rank.role == role).map(|rank| rank.pid).collect()
    }

    /// Has a rank undo what it has done, once it has answered what it was asked for. It answers when everything is undone.
    fn undo(&mut self, rank: usize) -> Vec<Action> {
        let connection = &mut self.connections[rank];
        if !connection.has_begun {
            return self.end(rank, Err(Stop::Others));
        }
        connection.is_to_undo = true;
        if connection.asked.is_none() {
            // If nobody has failed here, a rank has given up by itself: asked to commit what it cannot any more, it says why.
            let gave_up = !self.has_failed() && self.job.nodes.is_none();
            let (asked, request) = if gave_up { (Asked::Commit, Request::Commit) } else { (Asked::Abort, Request::Abort) };
            self.ask(rank, asked, request);
        }
        Vec::new()
    }

    /// All ranks have reached a step: those on other nodes wait for it, and before the memory goes, the engines are asked.
    fn all_have_reached(&mut self, step: Step) -> Vec<Action> {
        let now = self.now();
        let drained = if self.ranks.iter().any(|rank| self.job.holds(rank)) { Step::Drained } else { Step::Prepared };
        if step == drained && self.job.request.verb() == Verb::Pause {
            self.drained = Some(Instant::now());
            if let Some((engines, _)) = self.job.engines {
                // That takes less time than a lease.
                self.renew(Duration::ZERO);
                if let Err(failure) = engines.confirm() {
                    self.objection = Some(ClientError::Refused(failure.into_refusal()));
                    self.decision.abort();
                    return self.barrier.abort();
                }
            }
        }
        match &self.job.nodes {
            Some(nodes) if nodes.reach(step).is_err() => Vec::new(),
            Some(_) if step == Step::Prepared => {
                self.has_voted = true;
                self.barrier.go_on(now, step)
            }
            Some(_) => Vec::new(),
            None if step == Step::Prepared => {
                let committed = self.decision.commit();
                let mut actions = self.barrier.go_on(now, step);
                actions.extend(self.barrier.decide(now, committed));
                actions
            }
            None => self.barrier.go_on(now, step),
        }
    }

    /// What the ranks on other nodes have these do.
    fn hear_nodes(&mut self) -> Vec<Action> {
        let Some(nodes) = &self.job.nodes else { return Vec::new() };
        let now = self.now();
        match nodes.next() {
            Next::Wait => Vec::new(),
            Next::GoOn(step) => self.barrier.go_on(now, step),
            Next::Advance => self.barrier.advance(now),
            Next::Decided(committed) => {
                // A rank here may have given up by itself, because this process was stopped for too long.
                let committed = if committed { self.decision.commit() } else { !self.decision.abort() };
                self.barrier.decide(now, committed)
            }
        }
    }

    /// What a rank has said.
    fn hear(&mut self, rank: usize) -> Vec<Action> {
        let (pid, reporter) = (self.ranks[rank].pid, self.reporter);
        let connection = &mut self.connections[rank];
        let Some(client) = &mut connection.client else { return Vec::new() };
        let Some(asked) = connection.asked else {
            let unasked = client.unasked();
            self.renew(RENEW_EVERY);
            return unasked.map_or_else(Vec::new, |error| self.fail(rank, Stop::Failed(error)));
        };
        let answer = match client.answer(&mut |now| reporter.progress(pid, now)) {
            Ok(None) => return Vec::new(),
            Ok(Some(reply)) => Ok(reply),
            Err(error) => Err(error),
        };
        connection.asked = None;
        match (asked, answer) {
            (Asked::Commit, Ok(Reply::Done(report))) => self.end(rank, Ok(report)),
            // It may also have given up by itself: then there is nothing to undo.
            (Asked::Abort, Err(ClientError::Refused(_))) => self.end(rank, Err(Stop::Others)),
            (Asked::Hold | Asked::Advance, Ok(Reply::Held))
            | (Asked::Drain, Ok(Reply::Drained))
            | (Asked::Prepare, Ok(Reply::Prepared)) => self.step_done(rank, asked),
            (_, Ok(other)) => {
                let error = client.unexpected(&other);
                self.fail(rank, Stop::Failed(error))
            }
            (_, Err(error)) => {
                let stop = self.cause(rank, asked, error);
                self.fail(rank, stop)
            }
        }
    }

    fn step_done(&mut self, rank: usize, asked: Asked) -> Vec<Action> {
        let connection = &mut self.connections[rank];
        if connection.is_to_undo {
            self.ask(rank, Asked::Abort, Request::Abort);
            return Vec::new();
        }
        if asked == Asked::Advance {
            self.drain(rank);
            return Vec::new();
        }
        if let (Asked::Drain, Some(since)) = (asked, connection.drains_since) {
            connection.drained_after = since.elapsed();
        }
        self.barrier.reached(self.now(), rank)
    }

    /// Why a process has refused a step: it may have noticed that another one failed, and given up.
    fn cause(&self, rank: usize, asked: Asked, error: ClientError) -> Stop {
        let gives_up = match kind(&error) {
            Some(Kind::Aborted | Kind::Busy) => !matches!(asked, Asked::Hold | Asked::Commit),
            Some(_) => self.short.contains(&rank) && asked == Asked::Prepare,
            None => false,
        };
        if gives_up && self.has_failed() { Stop::Others } else { Stop::Failed(error) }
    }

    fn has_failed(&self) -> bool {
        self.culprit.is_some() || self.objection.is_some()
    }

    /// A rank has failed: all undo what they have done, unless that is not for this node to say.
    fn fail(&mut self, rank: usize, stop: Stop) -> Vec<Action> {
        if let Some(nodes) = &self.job.nodes {
            nodes.fail();
        }
        if matches!(stop, Stop::Failed(_)) && !self.has_voted && self.decision.abort() {
            self.culprit.get_or_insert(rank);
        }
        self.close(rank, Err(stop));
        self.barrier.failed(self.now(), rank)
    }

    /// A rank has completed or undone everything.
    fn end(&mut self, rank: usize, result: Result<Report, Stop>) -> Vec<Action> {
        self.close(rank, result);
        self.barrier.ended(self.now(), rank)
    }

    fn close(&mut self, rank: usize, result: Result<Report, Stop>) {
        let connection = &mut self.connections[rank];
        (connection.client, connection.asked, connection.result) = (None, None, Some(result));
        self.reporter.disconnected(self.ranks[rank].pid);
    }
}
