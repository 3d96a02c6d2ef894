//! A job over several nodes: the part of this one.
//!
//! The ranks of each node are taken through an attempt by a participant, which is this crate on that node. The participants take the same steps
//! ([`Step`]) together: when all ranks here have reached one, the participant says so, and goes on when its coordinator says so. A coordinator elsewhere
//! waits for all of them.
//!
//! Before the last step, a participant may give up by itself. Saying that all ranks here are prepared is its *vote*; from then on it does what
//! has been decided for all nodes. The decision is a *record* that is set once, somewhere where all nodes can read it. If a participant that
//! has voted hears nothing any more, it reads the record by a command, which sets it to aborted unless it is set. So nobody waits for a
//! coordinator that has died, and all nodes do the same.

use crate::parallel;
use crate::step::Step;
use std::process::{Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};
use vramctl_control::decision::Decision;
use vramctl_host::Unpoison;

/// What the coordinator says to a participant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
    /// For how long. Then its store is taken for lost, and the ranks here go on as if nothing had been decided. Those of other nodes may have
    /// heard otherwise: whoever can reach neither the coordinator nor the record can only guess or wait, and whoever waits is held for ever.
    pub read_within: Duration,
}

/// A participant.
pub struct Participant {
    terms: Terms,
    /// Says that all ranks here have reached a step.
    report: Box<dyn Fn(Step) + Send + Sync>,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// The step that all ranks here have reached, and whether those elsewhere have.
    step: Option<Step>,
    may_go_on: bool,
    /// Set once. A participant that has not voted may set it to aborted.
    committed: Option<bool>,
    /// What the ranks here share. It follows.
    decision: Option<Arc<Decision>>,
    heard: Instant,
    /// A thread reads the record.
    reads: bool,
    /// How often the ranks here were to go on for a moment.
    advances: u32,
}

impl State {
    fn has_voted(&self) -> bool {
        self.step == Some(Step::Prepared)
    }

    /// Decides, unless it is decided already.
    fn settle(&mut self, committed: bool) {
        let committed = *self.committed.get_or_insert(committed);
        if let Some(decision) = &self.decision {
            _ = if committed { decision.commit() } else { decision.abort() };
        }
    }
}

/// The ranks elsewhere do not go on.
#[derive(Debug)]
pub struct Aborted;

/// How long a participant tries to read the record.
pub const READ_WITHIN: Duration = Duration::from_secs(60);
const READ_AGAIN: Duration = Duration::from_millis(300);

impl std::fmt::Debug for Participant {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Participant").field("terms", &self.terms).finish_non_exhaustive()
    }
}

impl Participant {
    /// Takes part on these terms. `report` is called at each step.
    pub fn new(terms: Terms, report: impl Fn(Step) + Send + Sync + 'static) -> Self {
        let state =
            State { step: None, may_go_on: false, committed: None, decision: None, heard: Instant::now(), reads: false, advances: 0 };
        Self { terms, report: Box::new(report), state: Mutex::new(state), changed: Condvar::new() }
    }

    /// On what terms.
    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    /// The coordinator has said something.
    pub fn hear(&self, word: Word) {
        let mut state = self.state();
        state.heard = Instant::now();
        match word {
            Word::Go => state.may_go_on = !state.has_voted(),
            Word::Advance if state.step == Some(Step::Drained) => {
                state.step = Some(Step::Held);
                state.advances += 1;
            }
            Word::Advance | Word::Renew => (),
            // Nobody else can say that all have voted.
            Word::Commit if !state.has_voted() => (),
            Word::Commit | Word::Abort => state.settle(word == Word::Commit),
        }
        self.changed.notify_all();
    }

    /// The coordinator will say nothing any more. Returns whether the participant gives up, because it has not voted.
    pub fn hang_up(self: &Arc<Self>) -> bool {
        let mut state = self.state();
        if state.committed.is_some() {
            return false;
        }
        if state.has_voted() {
            self.read_record(state);
            return false;
        }
        state.settle(false);
        self.changed.notify_all();
        true
    }

    /// From now on, the ranks here share this decision.
    pub fn decides(&self, decision: Arc<Decision>) {
        let mut state = self.state();
        state.decision = Some(decision);
        if let Some(committed) = state.committed {
            state.settle(committed);
        }
    }

    /// All ranks here have reached this step. The last one is the vote.
    pub fn reach(&self, step: Step) -> Result<(), Aborted> {
        let mut state = self.state();
        if state.committed.is_some() {
            return Err(Aborted);
        }
        (state.step, state.may_go_on, state.heard) = (Some(step), false, Instant::now());
        (self.report)(step);
        Ok(())
    }

    /// Waits a moment until all ranks elsewhere have reached the step, too, or, at the last one, until it is decided. Returns whether they have.
    pub fn may_go_on(self: &Arc<Self>, step: Step, moment: Duration) -> Result<bool, Aborted> {
        let may_go_on = |state: &State| state.may_go_on && state.step == Some(step);
        let state = self.state();
        let advances = state.advances;
        let is_open = |state: &mut State| state.committed.is_none() && !may_go_on(state) && state.advances == advances;
        let mut state = self.changed.wait_timeout_while(state, moment, is_open).unpoisoned().0;
        match state.committed {
            Some(true) => return Ok(true),
            Some(false) => return Err(Aborted),
            None if may_go_on(&state) => return Ok(true),
            None => (),
        }
        if state.heard.elapsed() < self.terms.lease {
            return Ok(false);
        }
        if state.has_voted() {
            self.read_record(state);
            return Ok(false);
        }
        state.settle(false);
        Err(Aborted)
    }

    /// How often the ranks here were to go on for a moment, because others wait for them.
    pub fn advances(&self) -> u32 {
        self.state().advances
    }

    /// Waits until all nodes may begin.
    pub fn begin(self: &Arc<Self>) -> Result<(), Aborted> {
        self.reach(Step::Found)?;
        while !self.may_go_on(Step::Found, Duration::from_secs(1))? {}
        Ok(())
    }

    /// A rank here has failed. Returns whether all others may undo what they have done: after the vote, only if it has been decided so.
    pub fn may_abort(self: &Arc<Self>) -> bool {
        let mut state = self.state();
        if !state.has_voted() {
            return true;
        }
        while state.committed.is_none() {
            self.read_record(state);
            state = self.changed.wait_while(self.state(), |state| state.committed.is_none()).unpoisoned();
        }
        state.committed == Some(false)
    }

    /// Has a thread read the record.
    fn read_record(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        if std::mem::replace(&mut state.reads, true) {
            return;
        }
        drop(state);
        let reader = Arc::clone(self);
        if parallel::spawn(move || reader.settle_by_record()).is_err() {
            self.settle_by_record();
        }
    }

    fn settle_by_record(&self) {
        let begun = Instant::now();
        let committed = loop {
            if let Some(committed) = read(&self.terms.record) {
                break committed;
            }
            // The coordinator may have come back.
            if self.state().committed.is_some() || begun.elapsed() >= self.terms.read_within {
                break false;
            }
            thread::sleep(READ_AGAIN);
        };
        self.state().settle(committed);
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unpoisoned()
    }
}

/// What the record says. `None` if it cannot be read.
fn read(record: &[String]) -> Option<bool> {
    let (program, arguments) = record.split_first()?;
    let answer = Command::new(program).args(arguments).stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    match answer.stdout.trim_ascii() {
        b"commit" => Some(true),
        b"abort" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn participant(record: &str, lease: Duration) -> Arc<Participant> {
        let record = ["sh", "-c", record].map(str::to_owned).to_vec();
        Arc::new(Participant::new(Terms { lease, record, read_within: LONG, ..Terms::default() }, |_| ()))
    }

    const LONG: Duration = Duration::from_secs(100);

    #[test]
    fn before_its_vote_a_participant_gives_up_by_itself() {
        let one = participant("echo commit", LONG);
        one.reach(Step::Held).unwrap();
        one.hear(Word::Commit);
        assert!(one.hang_up() && one.may_abort() && one.reach(Step::Prepared).is_err());
        let (decision, _) = Decision::create().unwrap();
        let decision = Arc::new(decision);
        one.decides(Arc::clone(&decision));
        assert!(decision.is_aborted(), "the ranks here need not go on");
        let one = participant("echo commit", Duration::ZERO);
        one.reach(Step::Drained).unwrap();
        assert!(one.may_go_on(Step::Drained, Duration::ZERO).is_err() && one.may_abort(), "the lease has ended");
    }

    #[test]
    fn after_its_vote_it_does_what_the_record_says() {
        for (record, committed) in [("echo commit", true), ("echo abort", false)] {
            let gone: [fn(&Arc<Participant>) -> bool; 2] =
                [|one| !one.hang_up(), |one| one.may_go_on(Step::Prepared, Duration::ZERO).is_ok()];
            for gone in gone {
                let one = participant(record, Duration::ZERO);
                one.reach(Step::Prepared).unwrap();
                assert!(gone(&one));
                assert_eq!(one.may_abort(), !committed);
                one.hear(if committed { Word::Abort } else { Word::Commit });
                assert_eq!(one.may_go_on(Step::Prepared, LONG).is_ok(), committed, "it is decided once");
            }
        }
    }

    /// The store may be away for a moment, and the coordinator may come back first.
    #[test]
    fn a_record_that_cannot_be_read_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("asked");
        let one = participant(&format!("test -e {0} && echo commit; touch {0}", file.display()), LONG);
        one.reach(Step::Prepared).unwrap();
        assert!(!one.hang_up() && !one.may_abort());
        let one = participant("exit 1", LONG);
        one.reach(Step::Prepared).unwrap();
        assert!(!one.hang_up());
        one.hear(Word::Commit);
        assert!(!one.may_abort());
    }

    #[test]
    fn whoever_can_reach_neither_the_coordinator_nor_the_record_runs_on_in_the_end() {
        let record = ["false".to_owned()].to_vec();
        let one = Arc::new(Participant::new(Terms { record, ..Terms::default() }, |_| ()));
        one.reach(Step::Prepared).unwrap();
        let (decision, _) = Decision::create().unwrap();
        let decision = Arc::new(decision);
        one.decides(Arc::clone(&decision));
        assert!(!one.hang_up() && one.may_abort() && decision.is_aborted());
        one.hear(Word::Commit);
        assert!(one.may_go_on(Step::Prepared, LONG).is_err(), "it has decided");
    }

    #[test]
    fn its_ranks_advance_only_while_they_have_no_work_and_nobody_has_gone_on() {
        let one = participant("exit 1", LONG);
        one.hear(Word::Advance);
        one.reach(Step::Held).unwrap();
        one.hear(Word::Advance);
        assert_eq!(one.advances(), 0);
        one.reach(Step::Drained).unwrap();
        one.hear(Word::Advance);
        one.hear(Word::Advance);
        assert_eq!(one.advances(), 1, "once, until they have drained again");
        assert!(!one.may_go_on(Step::Drained, Duration::ZERO).unwrap());
        one.reach(Step::Drained).unwrap();
        one.hear(Word::Go);
        assert!(one.may_go_on(Step::Drained, LONG).unwrap());
        one.reach(Step::Prepared).unwrap();
        one.hear(Word::Advance);
        assert_eq!(one.advances(), 1);
    }

    #[test]
    fn it_goes_on_when_its_coordinator_says_so() {
        let one = participant("exit 1", LONG);
        one.reach(Step::Held).unwrap();
        assert!(!one.may_go_on(Step::Held, Duration::ZERO).unwrap());
        one.hear(Word::Go);
        assert!(one.may_go_on(Step::Held, LONG).unwrap());
        assert!(!one.may_go_on(Step::Drained, Duration::ZERO).unwrap(), "that was for the step before");
        one.reach(Step::Prepared).unwrap();
        one.hear(Word::Go);
        assert!(!one.may_go_on(Step::Prepared, Duration::ZERO).unwrap(), "only a decision ends the last step");
        one.hear(Word::Commit);
        assert!(one.may_go_on(Step::Prepared, LONG).unwrap() && !one.may_abort() && !one.hang_up());
    }
}
