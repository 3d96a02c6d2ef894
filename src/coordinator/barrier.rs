//! The barrier of an attempt: parties take the same steps together, and then all commit, or all undo what they have done.
//!
//! A party is a rank of a job (`job/attempt.rs`), or a node with such ranks (`nodes/coordinator.rs`). The barrier is a state machine without threads,
//! sockets and clocks: what happens goes in, with the time, and [`Action`]s come out. So `tests/barrier.rs` replays whole runs from a seed.
//!
//! ```text
//! take steps ─ all prepared, and all agree ─▶ deciding ─▶ committing ─▶ over
//!     │                                          │                       ▲
//!     └── one has failed ────────────────────────┴─────▶ aborting ───────┘
//! ```
//!
//! When all parties have reached a step, [`Action::Reached`] asks those outside: the inference engines, the other nodes, or the record of the
//! decision. The parties go on when [`Barrier::go_on`] is called. After the last step, only [`Barrier::decide`] ends the attempt.

use crate::patience::{ADVANCE_AFTER, GIVEN_BACK_WITHIN};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The time since some moment.
pub type Time = Duration;

/// The points at which the parties wait for each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// The ranks are known; nothing has begun. Of nodes alone.
    Found,
    /// All gates are closed; only then does it make sense to wait for work.
    Held,
    /// No device has work any more; only then does it make sense to copy contents.
    Drained,
    /// Every step that can fail is done.
    Prepared,
}

impl Step {
    /// All of them, in order.
    pub const ALL: [Self; 4] = [Self::Found, Self::Held, Self::Drained, Self::Prepared];
}

/// When a party begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begins {
    /// With the others.
    Together,
    /// Before the others: it has to wait for memory, and nobody is held or prepared meanwhile.
    First,
    /// When those that begin together have drained: they give it memory from then on.
    OnceDrained,
}

/// Who takes part, and how.
#[derive(Debug, Clone, Copy)]
pub struct Party {
    /// The steps that it takes, in order.
    pub steps: &'static [Step],
    /// When it begins.
    pub begins: Begins,
}

/// What happens to parties that have drained while the work of others does not end: those may wait for them in a collective, which they have
/// started and these have not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Behind {
    /// They wait, until another attempt begins.
    Wait,
    /// One after the other goes on for a moment.
    GoOn,
    /// All of them go on for a moment, once one of the others has said that its work has not ended: the answer may only be late.
    GoOnIfAsked,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Take a party to its next step; then [`Barrier::reached`].
    Take(usize, Step),
    /// All parties have reached a step that they have in common; [`Barrier::go_on`] if they may go on.
    Reached(Step),
    /// Let a party that has drained go on for a moment, and drain again; then [`Barrier::reached`].
    Advance(usize),
    /// Ask a party whether its work has not ended yet; [`Barrier::note_unfinished`] if so.
    Ask(usize),
    /// Have a party complete what is prepared; then [`Barrier::ended`].
    Commit(usize),
    /// Have a party undo what it has done; then [`Barrier::ended`].
    Abort(usize),
}

/// How many parties are asked at a time.
const ASKED_AT_ONCE: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// It has reached its last step, and waits for the others.
    Waits,
    /// It is being taken to its next step.
    UnderWay,
    /// It is to complete or to undo.
    Ending,
    Ended,
}

#[derive(Debug)]
struct PartyState {
    party: Party,
    /// How many of its steps it has reached.
    count: usize,
    state: State,
    /// How often it has gone on for a moment.
    advances: u32,
}

impl PartyState {
    fn last(&self) -> Option<Step> {
        self.count.checked_sub(1).map(|last| self.party.steps[last])
    }

    fn next(&self) -> Option<Step> {
        self.party.steps.get(self.count).copied()
    }

    /// Whether it has reached this step, or does not take it.
    fn has_passed(&self, step: Step) -> bool {
        !self.party.steps.contains(&step) || self.last() >= Some(step)
    }

    /// Whether it has done more than being found.
    fn has_begun(&self) -> bool {
        self.last() > Some(Step::Found) || (self.state == State::UnderWay && self.next() != Some(Step::Found))
    }
}

/// How far an attempt is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The parties take steps.
    Steps,
    /// All are prepared, and wait for the decision.
    Deciding,
    /// It is decided, since this moment, that they commit.
    Committing(Time),
    /// They undo what they have done.
    Aborting,
}

/// One attempt.
#[derive(Debug)]
pub struct Barrier {
    parties: Vec<PartyState>,
    phase: Phase,
    /// The last step that all have reached, and the last one after which they may go on.
    reached: Option<Step>,
    agreed: Option<Step>,
    behind: Behind,
    /// How long work may take to drain, and until when that is.
    drain_within: Duration,
    drains_until: Time,
    /// When a party last made progress.
    progress: Time,
    /// When parties were last asked for their work, which is the next one, and whether one has said that its work has not ended.
    asked: Time,
    next_asked: usize,
    is_stuck: bool,
}

impl Barrier {
    /// Of these parties. `drain_within`: how long those that have drained may go on if they are behind.
    pub fn new(parties: impl IntoIterator<Item = Party>, behind: Behind, drain_within: Duration) -> Self {
        Self {
            parties: parties.into_iter().map(|party| PartyState { party, count: 0, state: State::Waits, advances: 0 }).collect(),
            phase: Phase::Steps,
            reached: None,
            agreed: None,
            behind,
            drain_within,
            drains_until: Time::ZERO,
            progress: Time::ZERO,
            asked: Time::ZERO,
            next_asked: 0,
            is_stuck: false,
        }
    }

    /// The attempt begins.
    pub fn begin(&mut self, now: Time) -> Vec<Action> {
        self.advance_steps(now)
    }

    /// A party has reached the step that it was taken to.
    pub fn reached(&mut self, now: Time, party: usize) -> Vec<Action> {
        let one = &mut self.parties[party];
        if one.state != State::UnderWay {
            return Vec::new();
        }
        (one.count, one.state) = (one.count + 1, State::Waits);
        (self.progress, self.is_stuck) = (now, false);
        self.advance_steps(now)
    }

    /// Records that the work of a party has not ended yet.
    pub fn note_unfinished(&mut self, party: usize) {
        self.is_stuck |= self.parties[party].state == State::UnderWay;
    }

    /// Those outside agree that the parties go on after this step. After [`Step::Prepared`], the parties wait for the decision from now on, even
    /// if one fails.
    pub fn go_on(&mut self, now: Time, step: Step) -> Vec<Action> {
        if self.phase != Phase::Steps || self.reached != Some(step) {
            return Vec::new();
        }
        self.agreed = Some(step);
        if step == Step::Prepared {
            self.phase = Phase::Deciding;
            return Vec::new();
        }
        self.advance_steps(now)
    }

    /// Parties elsewhere wait for those here, which have drained: all go on for a moment.
    pub fn advance(&mut self, now: Time) -> Vec<Action> {
        if self.phase == Phase::Steps && self.reached == Some(Step::Drained) && self.agreed < Some(Step::Drained) {
            self.let_go_on(now, self.drained())
        } else {
            Vec::new()
        }
    }

    /// A party has failed, or does not take part. It has nothing to undo, or undoes it by itself.
    pub fn failed(&mut self, now: Time, party: usize) -> Vec<Action> {
        self.parties[party].state = State::Ended;
        if self.phase == Phase::Steps { self.abort() } else { self.commit_late(now) }
    }

    /// A party has no ranks: the others go on without it.
    pub fn leave_out(&mut self, now: Time, party: usize) -> Vec<Action> {
        let one = &mut self.parties[party];
        (one.party.steps, one.state) = (&[], State::Ended);
        if self.parties.iter().all(|one| one.party.steps.is_empty()) { self.abort() } else { self.advance_steps(now) }
    }

    /// Has all undo what they have done, unless they are about to be told a decision.
    pub fn abort(&mut self) -> Vec<Action> {
        if self.phase != Phase::Steps {
            return Vec::new();
        }
        self.phase = Phase::Aborting;
        self.end_all(Action::Abort)
    }

    /// What has been decided, once: whether to commit. Those that have failed since have not heard of it.
    pub fn decide(&mut self, now: Time, commits: bool) -> Vec<Action> {
        match self.phase {
            Phase::Steps if !commits => self.abort(),
            Phase::Deciding if !commits => {
                self.phase = Phase::Aborting;
                self.end_all(Action::Abort)
            }
            Phase::Deciding => {
                self.phase = Phase::Committing(now);
                let waits = |one: &PartyState| one.state == State::Waits && one.party.begins != Begins::OnceDrained;
                self.end_those(waits, Action::Commit).into_iter().chain(self.commit_late(now)).collect()
            }
            _ => Vec::new(),
        }
    }

    /// A party has completed, or undone, what it had prepared.
    pub fn ended(&mut self, now: Time, party: usize) -> Vec<Action> {
        self.parties[party].state = State::Ended;
        self.commit_late(now)
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Time) -> Vec<Action> {
        match self.phase {
            Phase::Committing(_) => self.commit_late(now),
            Phase::Steps if self.somebody_is_behind() && self.progress + ADVANCE_AFTER <= now && now < self.drains_until => {
                self.advance_those_behind(now)
            }
            _ => Vec::new(),
        }
    }

    /// When to call [`tick`](Self::tick) at the latest. `None` if nothing depends on the time.
    pub fn next_tick(&self) -> Option<Time> {
        match self.phase {
            Phase::Committing(since) => {
                Some(since + GIVEN_BACK_WITHIN).filter(|_| self.parties.iter().any(|one| one.state == State::Waits))
            }
            Phase::Steps if self.somebody_is_behind() => {
                let asked = if self.behind == Behind::GoOnIfAsked && !self.is_stuck { self.asked } else { Time::ZERO };
                Some(self.progress.max(asked) + ADVANCE_AFTER).filter(|next| *next < self.drains_until)
            }
            _ => None,
        }
    }

    /// How far the attempt is.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Whether a party is being taken to a step.
    pub fn takes_step(&self, party: usize) -> bool {
        self.parties[party].state == State::UnderWay
    }

    /// Whether all parties have ended, and nothing is left to be decided.
    pub fn is_over(&self) -> bool {
        self.phase != Phase::Deciding && self.parties.iter().all(|one| one.state == State::Ended)
    }

    /// Takes every party that may go on to its next step.
    fn advance_steps(&mut self, now: Time) -> Vec<Action> {
        if self.phase != Phase::Steps {
            return Vec::new();
        }
        let mut actions = Vec::new();
        let may: Vec<_> = (0..self.parties.len()).filter(|party| self.may_go(&self.parties[*party])).collect();
        for party in may {
            let one = &mut self.parties[party];
            let Some(step) = one.next() else { continue };
            one.state = State::UnderWay;
            if step == Step::Drained {
                self.drains_until = now + self.drain_within;
            }
            self.progress = now;
            actions.push(Action::Take(party, step));
        }
        let next = Step::ALL.into_iter().find(|step| Some(*step) > self.reached && self.takes(*step));
        if let Some(step) = next.filter(|step| self.have_all_reached(*step)) {
            self.reached = Some(step);
            actions.push(Action::Reached(step));
        }
        actions
    }

    fn takes(&self, step: Step) -> bool {
        self.parties.iter().any(|one| one.party.steps.contains(&step))
    }

    fn have_all_reached(&self, step: Step) -> bool {
        self.parties.iter().all(|one| one.has_passed(step))
    }

    /// Whether a party waits for nobody any more.
    fn may_go(&self, one: &PartyState) -> bool {
        if one.state != State::Waits || one.next().is_none() {
            return false;
        }
        let first = || self.parties.iter().filter(|other| other.party.begins == Begins::First);
        if let Some(last) = one.last()
            && (self.agreed < Some(last) || !self.have_all_reached(last))
        {
            return false;
        }
        match one.party.begins {
            Begins::First => true,
            Begins::OnceDrained => self.agreed >= Some(Step::Drained),
            Begins::Together => {
                one.has_begun() || one.next() == Some(Step::Found) || first().all(|other| other.last() == Some(Step::Prepared))
            }
        }
    }

    /// The parties that have drained and wait for others.
    fn drained(&self) -> Vec<usize> {
        let is_drained = |one: &PartyState| one.state == State::Waits && one.last() == Some(Step::Drained);
        (0..self.parties.len()).filter(|party| is_drained(&self.parties[*party])).collect()
    }

    /// Whether some have drained, and all others have only their work to wait for.
    fn somebody_is_behind(&self) -> bool {
        let mut under_way = self.parties.iter().filter(|one| one.state == State::UnderWay).peekable();
        self.behind != Behind::Wait
            && under_way.peek().is_some()
            && under_way.all(|one| one.next() == Some(Step::Drained))
            && self.agreed < Some(Step::Drained)
            && !self.drained().is_empty()
    }

    fn advance_those_behind(&mut self, now: Time) -> Vec<Action> {
        let drained = self.drained();
        match self.behind {
            Behind::GoOn => {
                let least = drained.into_iter().min_by_key(|party| (self.parties[*party].advances, *party));
                self.let_go_on(now, least.into_iter().collect())
            }
            Behind::GoOnIfAsked if self.is_stuck => self.let_go_on(now, drained),
            Behind::GoOnIfAsked if now >= self.asked + ADVANCE_AFTER => {
                self.asked = now;
                let under_way: Vec<_> = (0..self.parties.len()).filter(|party| self.parties[*party].state == State::UnderWay).collect();
                let count = ASKED_AT_ONCE.min(under_way.len());
                let asked = (0..count).map(|nth| under_way[(self.next_asked + nth) % under_way.len()]);
                let asked = asked.map(Action::Ask).collect();
                self.next_asked += count;
                asked
            }
            Behind::Wait | Behind::GoOnIfAsked => Vec::new(),
        }
    }

    fn let_go_on(&mut self, now: Time, parties: Vec<usize>) -> Vec<Action> {
        (self.progress, self.is_stuck) = (now, false);
        // All will have drained only once more.
        self.reached = self.reached.min(Some(Step::Held));
        for party in &parties {
            let one = &mut self.parties[*party];
            (one.count, one.state, one.advances) = (one.count - 1, State::UnderWay, one.advances + 1);
        }
        parties.into_iter().map(Action::Advance).collect()
    }

    /// Commits those that have waited for the memory of others.
    fn commit_late(&mut self, now: Time) -> Vec<Action> {
        let Phase::Committing(since) = self.phase else { return Vec::new() };
        let are_given_back = self.parties.iter().all(|one| one.party.begins == Begins::OnceDrained || one.state == State::Ended);
        if are_given_back || now >= since + GIVEN_BACK_WITHIN {
            self.end_those(|one| one.state == State::Waits, Action::Commit)
        } else {
            Vec::new()
        }
    }

    fn end_all(&mut self, action: fn(usize) -> Action) -> Vec<Action> {
        // Nobody has asked these for anything.
        for one in self.parties.iter_mut().filter(|one| one.count == 0 && one.state == State::Waits) {
            one.state = State::Ended;
        }
        self.end_those(|one| matches!(one.state, State::Waits | State::UnderWay), action)
    }

    fn end_those(&mut self, which: impl Fn(&PartyState) -> bool, action: fn(usize) -> Action) -> Vec<Action> {
        let those = self.parties.iter_mut().enumerate().filter(|(_, one)| which(one));
        those
            .map(|(party, one)| {
                one.state = State::Ending;
                action(party)
            })
            .collect()
    }
}
