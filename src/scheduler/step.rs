//! One step: learn of an event, then serve whoever can be served.

use crate::action::{Action, Because, Cause, Change, Leave, Refusal, Why};
use crate::event::Event;
use crate::host::Budget;
use crate::ids::{AskId, ChangeId, GangId, GpuId, Priority, ProgramId};
use crate::memory::PerGpu;
use crate::order::Waiter;
use crate::state::{AGES, Gang, State, Underway, Works};
use crate::victims::{Needs, Standing, Totals};
use std::collections::BTreeSet;
use std::time::Duration;

/// What to do after an event.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Step {
    /// In this order.
    pub actions: Vec<Action>,
    /// When to send [`Event::Timer`], since the epoch, unless something else happens before. `None`: not until something happens.
    pub wake: Option<Duration>,
}

/// What one step has found and decided so far.
struct Round {
    step: Step,
    /// What nobody has and nobody was promised.
    free: PerGpu<i64>,
    totals: Totals,
    /// Of that, what is kept for waiters that are served first.
    claimed: PerGpu,
    /// For which of them first.
    claimer: PerGpu<GangId>,
    /// The first waiter on each GPU for which others must give way: no other has them give way there.
    first: PerGpu<GangId>,
    /// Waiters that are served first, and can be.
    ahead: BTreeSet<GangId>,
    /// GPUs on which some change places.
    moving: BTreeSet<GpuId>,
}

/// Who may give way to a waiter.
struct Candidates {
    /// Now, in the order in which they do.
    now: Vec<(GangId, Why)>,
    /// Sooner or later, in the same order.
    ever: Vec<(GangId, Why)>,
    /// When the next of the others may.
    next: Option<Duration>,
}

impl Round {
    fn wake_at(&mut self, at: Duration) {
        self.step.wake = Some(self.step.wake.map_or(at, |wake| wake.min(at)));
    }

    fn take(&mut self, room: &PerGpu) {
        for (gpu, bytes) in room {
            *self.free.entry(*gpu).or_default() -= *bytes as i64;
        }
    }

    /// There will be room for the waiter once those have had theirs that are served first.
    fn comes_later(&mut self, waiter: &Waiter, needs: &Needs) -> Because {
        let before = waiter.lack.keys().find_map(|gpu| self.claimer.get(gpu)).copied();
        self.claim(waiter, needs);
        before.map_or(Because::Busy, Because::Behind)
    }

    /// Keeps for the waiter what it needs and is there, and those who may give way to it: nobody younger takes either.
    fn claim(&mut self, waiter: &Waiter, needs: &Needs) {
        for (&gpu, bytes) in &waiter.lack {
            *self.claimed.entry(gpu).or_default() += bytes;
            self.claimer.entry(gpu).or_insert(waiter.gang);
        }
        for gpu in needs.gpus() {
            self.first.entry(gpu).or_insert(waiter.gang);
        }
        self.ahead.insert(waiter.gang);
    }
}

impl State {
    /// Learns of an event that happens `now`, counted from the scheduler's epoch, and decides what to do.
    pub fn step(&mut self, now: Duration, event: Event) -> Step {
        let now = self.now.max(AGES + now);
        let passed = now.saturating_sub(self.now);
        self.now = now;
        self.count_unserved(passed);
        let mut actions = Vec::new();
        self.learn(event, &mut actions);
        if !self.ready {
            return Step { actions, wake: None };
        }
        self.note_why_others_wait();
        let mut round = self.round(actions);
        while let Some(refused) = self.serve_all(&mut round) {
            self.refuse(&mut round, refused);
            round = self.round(round.step.actions);
        }
        self.release_idle(&mut round);
        self.watch(&mut round);
        let Step { actions, wake } = round.step;
        Step { actions, wake: wake.map(|wake| wake.saturating_sub(AGES)) }
    }

    fn count_unserved(&mut self, passed: Duration) {
        for gang in self.gangs.values_mut().filter(|gang| gang.is_in_vain()) {
            let asks = gang.programs.values_mut().flat_map(|program| program.asks.values_mut());
            asks.filter(|ask| !ask.granted).for_each(|ask| ask.unserved += passed);
        }
    }

    /// Why those wait for whom a change is under way, and who leave by one.
    fn note_why_others_wait(&mut self) {
        for (&id, gang) in &mut self.gangs {
            if gang.waits_since().is_none() {
                gang.because = None;
            } else if let Some(change) = gang.served_by.or(gang.moving) {
                let is_for_it = self.changes.get(&change).is_some_and(|underway| underway.change.cause.gang() == id);
                gang.because = Some(if is_for_it { Because::Served } else { Because::Moving });
            }
        }
    }

    fn round(&mut self, actions: Vec<Action>) -> Round {
        let (reserve, books) = (self.policy.reserve, self.books());
        self.capacity = books.iter().map(|(&gpu, it)| (gpu, it.total.saturating_sub(reserve + it.unmanaged + it.fixed))).collect();
        Round {
            step: Step { actions, wake: None },
            free: books.iter().map(|(&gpu, books)| (gpu, books.free(reserve))).collect(),
            totals: self.totals(),
            claimed: PerGpu::new(),
            claimer: PerGpu::new(),
            first: PerGpu::new(),
            ahead: BTreeSet::new(),
            moving: self.changes.values().flat_map(|underway| underway.gpus.iter().copied()).collect(),
        }
    }

    /// Serves the waiters, or notes why they still wait. Returns the first request that has to fail, if there is one: what can never be
    /// had, or what nobody could give for too long. The caller begins again without it, since it may have kept its program from giving way
    /// to those before it.
    fn serve_all(&mut self, round: &mut Round) -> Option<(ProgramId, AskId, Refusal)> {
        let waiters = self.waiters();
        let refused = waiters.iter().find_map(|waiter| self.impossible(waiter));
        if refused.is_some() {
            return refused;
        }
        for waiter in waiters {
            if let Some(rises) = waiter.rises.filter(|rises| *rises > self.now) {
                round.wake_at(rises);
            }
            let because = self.try_to_serve(round, &waiter);
            let gang = self.gangs.get_mut(&waiter.gang).expect("a waiter exists");
            gang.because = because;
            let in_vain = gang.is_in_vain();
            if let Some(refused) = self.unserved(&waiter).filter(|_| in_vain) {
                return Some(refused);
            }
            if waiter.class > waiter.own && in_vain && !waiter.in_vain {
                // Another rises in its place.
                round.wake_at(self.now);
            }
        }
        None
    }

    fn refuse(&mut self, round: &mut Round, (program, ask, refusal): (ProgramId, AskId, Refusal)) {
        round.step.actions.push(Action::Refuse(program, ask, refusal));
        if let Some(gang) = self.gang(program).and_then(|id| self.gangs.get_mut(&id)) {
            gang.because = None;
            gang.programs.entry(program).and_modify(|one| _ = one.asks.remove(&ask));
        }
    }

    fn try_to_serve(&mut self, round: &mut Round, waiter: &Waiter) -> Option<Because> {
        let gang = &self.gangs[&waiter.gang];
        if gang.moving.is_some() {
            // It gives way to another since this step.
            return Some(Because::Moving);
        }
        if waiter.lack.keys().any(|gpu| !self.gpus.contains_key(gpu)) {
            return Some(Because::NobodyCan);
        }
        if self.now < gang.retry.until {
            round.wake_at(gang.retry.until);
            return Some(Because::Retries(gang.retry.until));
        }
        let (comes, needs) = (gang.is_away() && !gang.is_paused(), self.needs(round, waiter, &round.claimed));
        if needs.is_met() && !comes {
            self.grant_all(round, waiter);
            return None;
        }
        let mut gpus = gang.gpus();
        gpus.retain(|gpu| comes || !needs.rivals.is_empty() || waiter.lack.contains_key(gpu));
        if gpus.iter().any(|gpu| round.moving.contains(gpu)) {
            round.claim(waiter, &needs);
            return Some(Because::Moving);
        }
        if needs.is_met() {
            self.begin(round, waiter, Vec::new(), comes);
            return Some(Because::Served);
        }
        if let Some(&first) = needs.gpus().find_map(|gpu| round.first.get(&gpu)) {
            round.claim(waiter, &needs);
            return Some(Because::Behind(first));
        }
        Some(self.make_room(round, waiter, &needs, comes))
    }

    /// What others have to give, beside what is there and not `claimed` by those who are served first.
    fn needs(&self, round: &Round, waiter: &Waiter, claimed: &PerGpu) -> Needs {
        let gang = &self.gangs[&waiter.gang];
        let mut needs = Needs::default();
        for (&gpu, &lack) in &waiter.lack {
            let available = round.free[&gpu] - claimed.get(&gpu).map_or(0, |bytes| *bytes as i64);
            needs.bytes.insert(gpu, u64::try_from(lack as i64 - available).unwrap_or(0));
        }
        if gang.is_parallel() && !gang.is_paused() {
            needs.rivals = gang.gpus().into_iter().map(|gpu| (gpu, self.excess(&round.totals, gang, gpu))).collect();
        }
        needs.bytes.retain(|_, bytes| *bytes > 0);
        needs.rivals.retain(|_, bytes| *bytes > 0);
        needs
    }

    /// Has others give way, or finds out when they may.
    fn make_room(&mut self, round: &mut Round, waiter: &Waiter, needs: &Needs, comes: bool) -> Because {
        let gang = &self.gangs[&waiter.gang];
        let budgets = self.budgets(round.totals.contents, if comes { gang.contents_away() } else { 0 });
        let most = *budgets.last().expect("there is one at least");
        // What it would need without those that are served first.
        let alone = self.needs(round, waiter, &PerGpu::new());
        if let Some(because) = self.in_vain(&round.totals, gang, &alone, most) {
            return self.fails_in_time(round, waiter, because);
        }
        if self.in_vain(&round.totals, gang, needs, most).is_some() {
            return round.comes_later(waiter, needs);
        }
        let Candidates { now, ever, next } = self.candidates(round, waiter, needs);
        if let Some(leaving) = budgets.iter().find_map(|budget| self.cover(needs, &now, *budget)) {
            self.begin(round, waiter, leaving, comes);
            return Because::Served;
        }
        if let Some(at) = next {
            round.wake_at(at);
        }
        let can_cover = |needs: &Needs| budgets.iter().any(|budget| self.cover(needs, &ever, *budget).is_some());
        if can_cover(needs) {
            round.claim(waiter, needs);
            return next.map_or(Because::Busy, Because::Until);
        }
        if can_cover(&alone) {
            return round.comes_later(waiter, needs);
        }
        let is_host = self.cover(&alone, &ever, Budget(u64::MAX)).is_some();
        self.fails_in_time(round, waiter, if is_host { Because::HostFull } else { Because::NobodyCan })
    }

    /// Nobody can make the room that the waiter needs: its requests fail in time, unless somebody may who is left alone for now.
    fn fails_in_time(&self, round: &mut Round, waiter: &Waiter, because: Because) -> Because {
        if let Some(at) = round.totals.left_alone_until {
            round.wake_at(at);
        }
        let left = self.gangs[&waiter.gang].asks().map(|(program, _, ask)| self.patience(program).saturating_sub(ask.unserved)).min();
        if let Some(left) = left {
            round.wake_at(self.now + left);
        }
        because
    }

    fn candidates(&self, round: &Round, waiter: &Waiter, needs: &Needs) -> Candidates {
        let concerned =
            |gang: &Gang| needs.gpus().any(|gpu| gang.resident(gpu) > 0 || needs.rivals.contains_key(&gpu) && gang.runs_on(gpu));
        let others: Vec<_> = self.gangs.iter().filter(|(id, gang)| **id != waiter.gang && concerned(gang)).collect();
        // No busy one goes before it is known who is idle.
        let known_at = others.iter().map(|(_, gang)| gang.known_at(self.now, self.policy.rest)).max().unwrap_or_default();
        let (mut ever, mut later) = (Vec::new(), Vec::new());
        for (&id, gang) in others {
            let (from, why) = match self.standing(gang, id, waiter, needs, &round.ahead) {
                Standing::Never(until) => {
                    later.extend(until);
                    continue;
                }
                Standing::Later => (Duration::MAX, Why::TurnOver),
                Standing::From(from, why @ (Why::Lower(_) | Why::TurnOver)) => (from.max(known_at), why),
                Standing::From(from, why) => (from, why),
            };
            ever.push((from, (id, why)));
            later.push(from);
        }
        ever.sort_by_key(|&(_, (id, why))| self.preference(id, why));
        let now = ever.iter().filter(|(from, _)| *from <= self.now).map(|(_, one)| *one).collect();
        let ever = ever.into_iter().map(|(_, one)| one).collect();
        let next = later.into_iter().filter(|at| *at > self.now && *at < Duration::MAX).min();
        Candidates { now, ever, next }
    }

    /// The oldest request for which nobody could give way for too long.
    fn unserved(&self, waiter: &Waiter) -> Option<(ProgramId, AskId, Refusal)> {
        let asks = self.gangs[&waiter.gang].asks().filter(|(program, _, ask)| ask.unserved >= self.patience(*program));
        asks.min_by_key(|(.., ask)| ask.since).map(|(program, id, ask)| (program, id, Refusal::Unserved(ask.unserved)))
    }

    /// How long a program's requests wait while nobody can give way.
    fn patience(&self, program: ProgramId) -> Duration {
        let gang = self.gang(program).and_then(|id| self.gangs.get(&id));
        gang.and_then(|gang| gang.programs.get(&program)?.settings.wait).unwrap_or(self.policy.wait)
    }

    /// The oldest request that can never be served beside those before it, and why.
    fn impossible(&self, waiter: &Waiter) -> Option<(ProgramId, AskId, Refusal)> {
        let gang = &self.gangs[&waiter.gang];
        let mut asks: Vec<_> = gang.asks().collect();
        if asks.is_empty() {
            return None;
        }
        asks.sort_by_key(|&(program, id, ask)| (ask.since, program, id));
        let mut all = PerGpu::<u64>::new();
        for program in gang.programs.values() {
            program.memory.iter().for_each(|(&gpu, memory)| *all.entry(gpu).or_default() += memory.own());
            let granted = program.asks.values().filter(|ask| ask.granted).flat_map(|ask| &ask.room);
            granted.for_each(|(&gpu, &bytes)| *all.entry(gpu).or_default() += bytes);
        }
        for (program, id, ask) in asks {
            for (&gpu, &bytes) in &ask.room {
                let capacity = self.gpus.get(&gpu).map_or(u64::MAX, |gpu| gpu.total.saturating_sub(self.policy.reserve));
                let all = all.entry(gpu).or_default();
                *all += bytes;
                if *all > capacity {
                    return Some((program, id, Refusal::NeverFits));
                }
            }
        }
        None
    }

    fn grant_all(&mut self, round: &mut Round, waiter: &Waiter) {
        round.take(&waiter.lack);
        let asks: Vec<_> = self.gangs[&waiter.gang].asks().map(|(program, ask, _)| (program, ask)).collect();
        for (program, ask) in asks {
            self.grant(program, ask, &mut round.step.actions);
        }
        if waiter.blocked {
            round.totals = self.totals();
        }
    }

    /// Begins a change for a waiter. The room that is there is promised to it; the rest it has from those that leave.
    fn begin(&mut self, round: &mut Round, waiter: &Waiter, leaving: Vec<Leave>, comes: bool) {
        let promised: PerGpu =
            waiter.lack.iter().map(|(&gpu, lack)| (gpu, lack.saturating_sub(leaving.iter().map(|leave| leave.on(gpu)).sum()))).collect();
        round.take(&promised);
        let gang = &self.gangs[&waiter.gang];
        let called = gang.programs.values().any(|program| program.called.is_some());
        let cause = if comes && called { Cause::Called(waiter.gang) } else { Cause::Asks(waiter.gang) };
        let contents = if comes { gang.contents_away() } else { 0 };
        let coming: Vec<_> = if comes { gang.programs.keys().copied().collect() } else { Vec::new() };
        let gpus = if gang.is_parallel() || comes { gang.gpus() } else { waiter.lack.keys().copied().collect() };
        let mut copies = PerGpu::<u64>::new();
        for ((_, gpu), holdings) in leaving.iter().flat_map(|leave| &leave.taken) {
            *copies.entry(*gpu).or_default() += holdings.copied_out();
        }
        let mut back = PerGpu::<u64>::new();
        for (gpu, memory) in gang.programs.values().flat_map(|program| &program.memory).filter(|_| comes) {
            *back.entry(*gpu).or_default() += memory.away.contents();
        }
        let bytes = copies.values().chain(back.values()).copied().max().unwrap_or(0);
        let underway = self.underway(cause, leaving, coming, contents, gpus);
        let expected = self.policy.overhead + self.policy.copy(bytes) * if underway.change.passing { 2 } else { 1 };
        let id = underway.change.id;
        let gang = self.gangs.get_mut(&waiter.gang).expect("a waiter exists");
        *if comes { &mut gang.moving } else { &mut gang.served_by } = Some(id);
        self.start(
            round,
            Underway { promised, expected, class: if waiter.blocked { waiter.own } else { waiter.class }, since: waiter.since, ..underway },
        );
    }

    fn underway(
        &mut self,
        cause: Cause,
        leaving: Vec<Leave>,
        coming: Vec<ProgramId>,
        contents: u64,
        mut gpus: BTreeSet<GpuId>,
    ) -> Underway {
        let id = ChangeId(self.next_change);
        self.next_change += 1;
        let leaves = leaving.iter().map(Leave::contents).sum();
        gpus.extend(leaving.iter().flat_map(|leave| leave.taken.keys().map(|(_, gpu)| *gpu)));
        let (passing, to_files) = self.passing(&leaving, contents);
        let change = Change { id, cause, leaving, coming, passing, to_files };
        Underway {
            change,
            began: self.now,
            expected: Duration::ZERO,
            gpus,
            promised: PerGpu::new(),
            contents: (leaves, contents),
            class: Priority::Low,
            since: self.now,
        }
    }

    fn start(&mut self, round: &mut Round, underway: Underway) {
        for leave in &underway.change.leaving {
            self.gangs.get_mut(&leave.gang).expect("a victim exists").moving = Some(underway.change.id);
        }
        round.moving.extend(&underway.gpus);
        round.step.actions.push(Action::Change(underway.change.clone()));
        self.changes.insert(underway.change.id, underway);
        round.totals = self.totals();
    }

    /// Those that have been idle for longer than their `--idle` give their memory back.
    fn release_idle(&mut self, round: &mut Round) {
        let limits: Vec<_> = self.gangs.iter().filter_map(|(&id, gang)| Some((id, gang.idle_limit()?))).collect();
        for (id, limit) in limits {
            let gang = &self.gangs[&id];
            let Works::IdleSince(since) = gang.works() else { continue };
            let (gpus, is_free) = (gang.gpus(), gang.moving.is_none() && gang.served_by.is_none() && gang.waits_since().is_none());
            let has = |gpu: &GpuId| Some((*gpu, gang.resident(*gpu))).filter(|(_, bytes)| *bytes > 0);
            let bytes: PerGpu = gpus.iter().filter_map(has).collect();
            if bytes.is_empty() || !is_free || gang.is_paused() || gang.is_capturing() || gpus.iter().any(|gpu| round.moving.contains(gpu))
            {
                continue;
            }
            let due = (since + limit).max(gang.left_alone_until()).max(gang.retry.until);
            if due > self.now {
                round.wake_at(due);
                continue;
            }
            let needs = Needs { bytes, rivals: PerGpu::new() };
            let most = self.budgets(self.contents(), 0).pop().expect("there is one at least");
            if let Some(leaving) = self.cover(&needs, &[(id, Why::Idle)], most) {
                let underway = self.underway(Cause::IdleFor(id, self.now.saturating_sub(since)), leaving, Vec::new(), 0, BTreeSet::new());
                self.start(round, underway);
            }
        }
    }

    /// Has the programs tell whether they are idle, where it matters.
    fn watch(&mut self, round: &mut Round) {
        let waiters = self.gangs.values().filter(|gang| gang.waits_since().is_some());
        let waited_for: BTreeSet<GpuId> = waiters.flat_map(Gang::on_gpus).collect();
        for gang in self.gangs.values_mut() {
            let matters = gang.idle_limit().is_some() || gang.on_gpus().any(|gpu| waited_for.contains(&gpu));
            for (&id, program) in &mut gang.programs {
                let wanted = matters && !program.held;
                if program.watched.is_some() != wanted {
                    program.watched = wanted.then_some(self.now);
                    round.step.actions.push(Action::Watch(id, wanted));
                    if !wanted && !program.held && program.works != Works::Empty {
                        program.works = Works::Unknown;
                    }
                }
            }
        }
    }
}
