//! What a node does for the nodes' barrier.

use crate::barrier::{Step, Time};
use crate::patience::{READ_RECORD_AGAIN, READ_RECORD_WITHIN};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use vramctl_host::Unpoison;
use vramctl_host::system::poll;

/// What the coordinator says to a participant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Word {
    /// It is still there.
    Renew,
    /// All have reached the step.
    Go,
    /// The ranks here have no work in flight, and ranks elsewhere wait for them.
    Advance,
    /// All have voted, and the record says so.
    Commit,
    /// The record says that nothing is to change, or not all have voted.
    Abort,
}

/// How a participant takes part in one attempt.
#[derive(Debug, Clone, Default)]
pub struct Terms {
    /// How long the work of the ranks may take to drain. The coordinator makes further attempts, with more time.
    pub drain: Duration,
    /// Whether the ranks here wait for memory, before those of other nodes begin.
    pub early: bool,
    /// How long the coordinator may be silent.
    pub lease: Duration,
    /// A command that sets the record to aborted unless it is set, and prints `commit` or `abort`. If it fails, it is tried again.
    pub record: Vec<String>,
}

/// What the ranks of a node are to do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Wait.
    Wait,
    /// Go on: all ranks elsewhere have reached this step, too.
    GoOn(Step),
    /// Go on for a moment and drain again: ranks elsewhere wait for them.
    Advance,
    /// Commit, or abort.
    Decided(bool),
}

/// The state of a participant: without threads, sockets and clocks, as the [`Barrier`](crate::barrier::Barrier) of its ranks.
#[derive(Debug)]
pub struct Participation {
    lease: Duration,
    /// The step that all ranks here have reached, and whether they may go on.
    step: Option<Step>,
    may_go_on: bool,
    /// Whether they are to go on for a moment.
    advances: bool,
    /// Set once. A participant that has not voted may set it to aborted.
    committed: Option<bool>,
    heard: Time,
    needs_record: bool,
}

impl Participation {
    /// Begins now.
    pub fn new(lease: Duration, now: Time) -> Self {
        Self { lease, step: None, may_go_on: false, advances: false, committed: None, heard: now, needs_record: false }
    }

    fn has_voted(&self) -> bool {
        self.step == Some(Step::Prepared)
    }

    /// The coordinator has said something.
    pub fn hear(&mut self, now: Time, word: Word) {
        self.heard = now;
        match word {
            Word::Go => self.may_go_on = !self.has_voted(),
            Word::Advance if self.step == Some(Step::Drained) => (self.step, self.advances) = (Some(Step::Held), true),
            Word::Advance | Word::Renew => (),
            // Nobody else can say that all have voted.
            Word::Commit if !self.has_voted() => (),
            Word::Commit | Word::Abort => self.settle(word == Word::Commit),
        }
    }

    /// The coordinator will say nothing any more. Returns whether the participant gives up, because it has not voted.
    pub fn hang_up(&mut self) -> bool {
        let gives_up = self.committed.is_none() && !self.has_voted();
        self.needs_record |= !gives_up;
        if gives_up {
            self.settle(false);
        }
        gives_up
    }

    /// All ranks here have reached this step. The last one is the vote. Returns whether they still take part.
    pub fn reach(&mut self, now: Time, step: Step) -> bool {
        if self.committed.is_none() {
            (self.step, self.may_go_on, self.heard) = (Some(step), false, now);
        }
        self.committed.is_none()
    }

    /// A rank here has failed. After the vote, the others do what has been decided, which only the record may say.
    pub fn fail(&mut self) {
        self.needs_record |= self.has_voted();
    }

    /// Whether the record is to be read, for [`settle`](Self::settle).
    pub fn needs_record(&self) -> bool {
        self.needs_record && self.committed.is_none()
    }

    /// Decides, unless it is decided already.
    pub fn settle(&mut self, committed: bool) {
        self.committed.get_or_insert(committed);
    }

    /// What the ranks are to do now.
    pub fn next(&mut self, now: Time) -> Next {
        let is_silent = now.saturating_sub(self.heard) >= self.lease;
        match (self.committed, self.step) {
            (Some(committed), _) => Next::Decided(committed),
            (None, _) if std::mem::take(&mut self.advances) => Next::Advance,
            (None, Some(step)) if std::mem::take(&mut self.may_go_on) => Next::GoOn(step),
            (None, Some(Step::Prepared)) => {
                self.needs_record |= is_silent;
                Next::Wait
            }
            (None, _) if is_silent => {
                self.settle(false);
                Next::Decided(false)
            }
            (None, _) => Next::Wait,
        }
    }
}

/// A participant, with its coordinator and the record.
pub struct Participant {
    terms: Terms,
    /// Says that all ranks here have reached a step.
    report: Box<dyn Fn(Step) + Send + Sync>,
    begun: Instant,
    state: Mutex<Participation>,
    record: Mutex<Record>,
    /// One end is readable when something has been heard, which writes into the other one.
    woken: UnixStream,
    wakes: UnixStream,
}

/// The ranks elsewhere do not go on.
#[derive(Debug)]
pub struct Aborted;

impl fmt::Debug for Participant {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Participant").field("terms", &self.terms).finish_non_exhaustive()
    }
}

impl Participant {
    /// Takes part on these terms. `report` is called at each step.
    pub fn new(terms: Terms, report: impl Fn(Step) + Send + Sync + 'static) -> io::Result<Self> {
        let (woken, wakes) = UnixStream::pair()?;
        woken.set_nonblocking(true)?;
        wakes.set_nonblocking(true)?;
        let state = Mutex::new(Participation::new(terms.lease, Time::ZERO));
        let record = Mutex::new(Record { command: terms.record.clone(), begun: None, again: Instant::now(), child: None });
        Ok(Self { terms, report: Box::new(report), begun: Instant::now(), state, record, woken, wakes })
    }

    /// On what terms.
    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    /// The coordinator has said something.
    pub fn hear(&self, word: Word) {
        self.state.lock().unpoisoned().hear(self.begun.elapsed(), word);
        // If it is full, it is readable.
        _ = (&self.wakes).write(&[0]);
    }

    /// The coordinator will say nothing any more. Returns whether the participant gives up, because it has not voted.
    pub fn hang_up(&self) -> bool {
        let gives_up = self.state.lock().unpoisoned().hang_up();
        _ = (&self.wakes).write(&[0]);
        gives_up
    }

    /// All ranks here have reached this step. The last one is the vote.
    pub fn reach(&self, step: Step) -> Result<(), Aborted> {
        if !self.state.lock().unpoisoned().reach(self.begun.elapsed(), step) {
            return Err(Aborted);
        }
        (self.report)(step);
        Ok(())
    }

    /// A rank here has failed.
    pub fn fail(&self) {
        self.state.lock().unpoisoned().fail();
    }

    /// What the ranks are to do now. To be called whenever this is readable, and now and then.
    pub fn next(&self) -> Next {
        while (&self.woken).read(&mut [0; 64]).is_ok_and(|count| count > 0) {}
        if self.state.lock().unpoisoned().needs_record()
            && let Some(committed) = self.record.lock().unpoisoned().look()
        {
            self.state.lock().unpoisoned().settle(committed);
        }
        self.state.lock().unpoisoned().next(self.begun.elapsed())
    }

    /// Waits until all nodes may begin.
    pub fn begin(&self) -> Result<(), Aborted> {
        self.reach(Step::Found)?;
        loop {
            match self.next() {
                Next::GoOn(Step::Found) => return Ok(()),
                Next::Decided(false) => return Err(Aborted),
                _ => _ = poll(self.as_fd(), libc::POLLIN, 1000),
            }
        }
    }
}

/// Readable when something has been heard.
impl AsFd for Participant {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.woken.as_fd()
    }
}

/// Reads the record of the decision, by a command. Never waits.
#[derive(Debug)]
struct Record {
    command: Vec<String>,
    begun: Option<Instant>,
    /// When to run the command again.
    again: Instant,
    child: Option<Child>,
}

impl Record {
    /// What it says, if that is known. If nobody can read it for too long, its store is taken for lost, and nothing changes. Other nodes may have
    /// heard otherwise: whoever can reach neither the coordinator nor the record can only guess or wait, and whoever waits is held for ever.
    fn look(&mut self) -> Option<bool> {
        if self.begun.get_or_insert_with(Instant::now).elapsed() >= READ_RECORD_WITHIN {
            return Some(false);
        }
        if let Some(child) = &mut self.child {
            if matches!(child.try_wait(), Ok(None)) {
                return None;
            }
            let answer = self.child.take().and_then(|child| child.wait_with_output().ok());
            match answer.as_ref().map(|answer| answer.stdout.trim_ascii()) {
                Some(b"commit") => return Some(true),
                Some(b"abort") => return Some(false),
                _ => self.again = Instant::now() + READ_RECORD_AGAIN,
            }
        }
        if Instant::now() >= self.again {
            let (program, arguments) = self.command.split_first()?;
            let silent = Command::new(program).args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
            (self.child, self.again) = (silent.ok(), Instant::now() + READ_RECORD_AGAIN);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::barrier::Step::{Drained, Held, Prepared};
    use std::thread;

    const LONG: Duration = Duration::from_secs(100);
    const NOW: Time = Time::ZERO;

    fn at(step: Step) -> Participation {
        let mut one = Participation::new(LONG, NOW);
        assert!(one.reach(NOW, step));
        one
    }

    #[test]
    fn before_its_vote_a_participant_gives_up_by_itself() {
        let mut one = at(Held);
        one.hear(NOW, Word::Commit);
        assert!(one.hang_up() && !one.reach(NOW, Prepared) && !one.needs_record());
        assert_eq!(one.next(NOW), Next::Decided(false), "the ranks here need not go on");
        let mut one = at(Drained);
        assert_eq!(one.next(NOW), Next::Wait);
        assert_eq!(one.next(LONG), Next::Decided(false), "the lease has ended");
    }

    #[test]
    fn after_its_vote_it_does_what_the_record_says() {
        let gone: [fn(&mut Participation); 3] =
            [|one| assert!(!one.hang_up()), |one| assert_eq!(one.next(LONG), Next::Wait), Participation::fail];
        for committed in [true, false] {
            for gone in gone {
                let mut one = at(Prepared);
                assert!(!one.needs_record());
                gone(&mut one);
                assert!(one.needs_record());
                one.settle(committed);
                one.hear(NOW, if committed { Word::Abort } else { Word::Commit });
                assert_eq!(one.next(NOW), Next::Decided(committed), "it is decided once");
                assert!(!one.needs_record());
            }
        }
    }

    fn participant(record: &str) -> Participant {
        let record = ["sh", "-c", record].map(str::to_owned).to_vec();
        Participant::new(Terms { lease: LONG, record, ..Terms::default() }, |_| ()).unwrap()
    }

    fn decision(one: &Participant) -> bool {
        loop {
            match one.next() {
                Next::Decided(committed) => return committed,
                _ => thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    /// The store may be away for a moment, and the coordinator may come back first.
    #[test]
    fn a_record_that_cannot_be_read_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("asked");
        let one = participant(&format!("test -e {0} && echo commit; touch {0}", file.display()));
        one.reach(Prepared).unwrap();
        assert!(!one.hang_up() && decision(&one));
        let one = participant("exit 1");
        one.reach(Prepared).unwrap();
        assert!(!one.hang_up());
        assert_eq!(one.next(), Next::Wait);
        one.hear(Word::Commit);
        assert!(decision(&one));
    }

    #[test]
    fn whoever_can_reach_neither_the_coordinator_nor_the_record_runs_on_in_the_end() {
        let one = participant("false");
        one.reach(Prepared).unwrap();
        assert!(!one.hang_up());
        one.record.lock().unwrap().begun = Instant::now().checked_sub(READ_RECORD_WITHIN);
        assert!(!decision(&one));
        one.hear(Word::Commit);
        assert!(!decision(&one), "it has decided");
    }

    #[test]
    fn its_ranks_advance_only_while_they_have_no_work_and_nobody_has_gone_on() {
        let mut one = Participation::new(LONG, NOW);
        one.hear(NOW, Word::Advance);
        assert!(one.reach(NOW, Held));
        one.hear(NOW, Word::Advance);
        assert_eq!(one.next(NOW), Next::Wait);
        assert!(one.reach(NOW, Drained));
        one.hear(NOW, Word::Advance);
        one.hear(NOW, Word::Advance);
        assert_eq!([one.next(NOW), one.next(NOW)], [Next::Advance, Next::Wait], "once, until they have drained again");
        assert!(one.reach(NOW, Drained));
        one.hear(NOW, Word::Go);
        assert_eq!(one.next(NOW), Next::GoOn(Drained));
        assert!(one.reach(NOW, Prepared));
        one.hear(NOW, Word::Advance);
        assert_eq!(one.next(NOW), Next::Wait);
    }

    #[test]
    fn it_goes_on_when_its_coordinator_says_so() {
        let mut one = at(Held);
        assert_eq!(one.next(NOW), Next::Wait);
        one.hear(NOW, Word::Go);
        assert_eq!([one.next(NOW), one.next(NOW)], [Next::GoOn(Held), Next::Wait]);
        assert!(one.reach(NOW, Prepared));
        one.hear(NOW, Word::Go);
        assert_eq!(one.next(NOW), Next::Wait, "only a decision ends the last step");
        one.hear(NOW, Word::Commit);
        assert!(!one.hang_up());
        assert_eq!(one.next(NOW), Next::Decided(true));
    }
}
