//! What the events mean to what the scheduler knows.

use crate::action::{Action, Cause};
use crate::event::{Activity, Asked, Event, Outcome, Report};
use crate::ids::{AskId, ChangeId, GangId, GpuId, JobId, ProgramId};
use crate::memory::{Memory, PerGpu};
use crate::policy::Policy;
use crate::remembered::Remembered;
use crate::state::{Ask, Backoff, Gang, Gpu, Host, Program, State, Turn, Underway, Works};
use std::collections::BTreeSet;
use std::time::Duration;

impl State {
    /// Learns of an event. What no longer exists is not an error: whatever is told of it crossed with its end.
    pub(crate) fn learn(&mut self, event: Event, actions: &mut Vec<Action>) {
        let now = self.now;
        match event {
            Event::Gpu { gpu, total, unmanaged } => {
                let known = self.gpus.remove(&gpu).unwrap_or_default();
                self.gpus.insert(gpu, Gpu { total, unmanaged, ..known });
            }
            Event::Host { room, files } => self.host = Host { room, files },
            Event::Ready => self.ready = true,
            Event::Joined(report) => self.join(*report),
            Event::Left(program) => self.leave(program),
            Event::Tied(program, partners) => self.tie(program, partners),
            Event::Memory { program, gpu, memory } => self.set_memory(program, gpu, memory),
            Event::Asks { program, ask, room } => {
                let asked = Ask { room, since: now, unserved: Duration::ZERO, granted: false };
                self.with(program, |one| {
                    one.asks.insert(ask, asked);
                    one.acts();
                });
            }
            Event::Settled { program, ask, memory } => {
                self.with(program, |one| {
                    one.asks.remove(&ask);
                    one.acts();
                });
                self.set_memories(program, memory);
            }
            Event::Called(program) => self.call(program),
            Event::Activity(program, activity) => {
                self.with(program, |one| one.works = Works::known(now, activity, one.watched.is_some()));
            }
            Event::Capturing(program, capturing) => self.with(program, |one| one.capturing = capturing),
            Event::Paused(program, paused) => {
                self.with(program, |one| (one.paused, one.works) = (paused, Works::Unknown));
            }
            Event::Held(program, held) => self.with(program, |one| one.held = held),
            Event::Settings(program, settings) => self.with(program, |one| one.settings = settings),
            Event::Done { change, outcome, programs } => self.finish(change, outcome, programs, actions),
            Event::Timer => (),
        }
    }

    fn join(&mut self, report: Report) {
        let (now, id) = (self.now, report.program);
        self.leave(id);
        let gang = GangId(id.0);
        let Remembered { held, turn: (lasted, lasts, class), backoff: (left, next), paces, unserved } = report.remembered;
        // It has come in, and the last scheduler did not live to see it.
        let has_arrived = held && !report.held;
        let turn = if has_arrived {
            Turn { since: now, until: now + self.policy.slice, class }
        } else {
            Turn { since: now.saturating_sub(lasted), until: now + lasts, class }
        };
        let of_job = self.of_job(report.job);
        let asks = report.asks.into_iter().map(|Asked { ask, room, waited, granted }| {
            let unserved = unserved.get(&ask).copied().unwrap_or_default();
            (ask, Ask { room, since: now.saturating_sub(waited), unserved, granted })
        });
        let touched: BTreeSet<_> = report.partners.iter().copied().chain(of_job).chain([id]).collect();
        let program = Program {
            job: report.job,
            partners: report.partners,
            several_nodes: report.several_nodes,
            memory: report.memory,
            held: report.held,
            paused: report.paused,
            capturing: report.capturing,
            works: Works::known(now, report.activity, false),
            watched: None,
            backoff: Backoff { until: now + left, next },
            paces,
            called: report.called.map(|waited| now.saturating_sub(waited)),
            asks: asks.collect(),
            settings: report.settings,
        };
        self.gangs.insert(gang, Gang { programs: [(id, program)].into(), turn, ..Gang::default() });
        self.gang_of.insert(id, gang);
        self.regroup(&touched);
    }

    fn of_job(&self, job: Option<JobId>) -> Vec<ProgramId> {
        let programs = self.gangs.values().flat_map(|gang| &gang.programs);
        programs.filter(|(_, one)| job.is_some() && one.job == job).map(|(&id, _)| id).collect()
    }

    /// Its memory is free, and its promises are void. Its change goes on, and tells when it ends: until then, what it was to give there is
    /// promised to whoever comes, who may have it by now.
    fn leave(&mut self, program: ProgramId) {
        let Some(id) = self.gang_of.remove(&program) else { return };
        for Underway { change, promised, .. } in self.changes.values_mut() {
            let taken = change.leaving.iter().flat_map(|leave| &leave.taken).filter(|((of, _), _)| *of == program);
            for ((_, gpu), holdings) in taken.filter(|_| self.gangs.contains_key(&change.cause.gang())) {
                *promised.entry(*gpu).or_default() += holdings.bytes();
            }
        }
        let Some(gang) = self.gangs.get_mut(&id) else { return };
        gang.programs.remove(&program);
        if gang.programs.is_empty() {
            self.gangs.remove(&id);
            for underway in self.changes.values_mut().filter(|underway| underway.change.cause.gang() == id) {
                underway.promised.clear();
            }
            return;
        }
        // Those that were tied by it alone are no longer.
        let rest = gang.programs.keys().copied().collect();
        self.regroup(&rest);
    }

    fn tie(&mut self, program: ProgramId, partners: BTreeSet<ProgramId>) {
        let Some(one) = self.program(program) else { return };
        let before = std::mem::replace(&mut one.partners, partners.clone());
        for other in before.difference(&partners) {
            self.with(*other, |one| _ = one.partners.remove(&program));
        }
        for other in &partners {
            self.with(*other, |one| _ = one.partners.insert(program));
        }
        self.regroup(&before.into_iter().chain(partners).chain([program]).collect());
    }

    fn set_memories(&mut self, program: ProgramId, memory: PerGpu<Memory>) {
        for (gpu, memory) in memory {
            self.set_memory(program, gpu, memory);
        }
    }

    fn set_memory(&mut self, program: ProgramId, gpu: GpuId, mut memory: Memory) {
        let Some(one) = self.program(program) else { return };
        let before = one.memory.get(&gpu).map_or(0, |memory| memory.peak);
        memory.peak = memory.peak.max(before).max(memory.own());
        one.memory.insert(gpu, memory);
    }

    fn call(&mut self, program: ProgramId) {
        let now = self.now;
        let Some(gang) = self.gang(program).and_then(|id| self.gangs.get_mut(&id)) else { return };
        // A call that has crossed with its program's return has passed by now.
        if (gang.is_away() || gang.moving.is_some())
            && let Some(one) = gang.programs.get_mut(&program)
        {
            one.called.get_or_insert(now);
            one.works = Works::Busy;
        }
    }

    fn finish(&mut self, id: ChangeId, outcome: Outcome, programs: Vec<(ProgramId, PerGpu<Memory>, bool)>, actions: &mut Vec<Action>) {
        let Some(underway) = self.changes.remove(&id) else { return };
        let now = self.now;
        for (program, memory, held) in programs {
            self.set_memories(program, memory);
            let Some(one) = self.program(program) else { continue };
            one.held = held;
            if held && one.called.is_none() && matches!(one.works, Works::Busy | Works::Unknown) {
                // Nothing passes while it is held, and what calls is told.
                one.works = Works::IdleSince(now);
            }
        }
        let waiter = match underway.change.cause {
            Cause::Called(gang) | Cause::Asks(gang) => Some(gang),
            Cause::IdleFor(..) => None,
        };
        let took_part = |gang: &Gang| gang.moving == Some(id) || gang.served_by == Some(id);
        // Whoever else refuses, it is the waiter that tries again later.
        let refuses = match outcome {
            Outcome::Refused(program) => {
                Some(program).filter(|_| self.gang(program).is_some_and(|gang| waiter != Some(gang) && took_part(&self.gangs[&gang])))
            }
            Outcome::Changed | Outcome::Failed => None,
        };
        let policy = &self.policy;
        for (&gang_id, gang) in self.gangs.iter_mut().filter(|(_, gang)| took_part(gang)) {
            let arrived = gang.moving.is_some() && !gang.is_away();
            (gang.moving, gang.served_by) = (None, None);
            if !gang.is_away() {
                gang.programs.values_mut().for_each(|one| one.called = None);
            }
            if outcome != Outcome::Changed {
                if let Some(refuses) = refuses.and_then(|program| gang.programs.get_mut(&program)) {
                    refuses.backoff.extend(now, policy.backoff, policy.backoff_most);
                } else if refuses.is_none() && underway.change.cause.gang() == gang_id {
                    gang.retry.extend(now, policy.retry, policy.backoff);
                }
            } else if waiter == Some(gang_id) {
                gang.begin_turn(&underway, arrived, policy, now);
            } else {
                gang.programs.values_mut().for_each(|one| one.backoff = Backoff::default());
            }
        }
        if let Some(waiter) = waiter.filter(|waiter| outcome == Outcome::Changed && self.gangs.contains_key(waiter)) {
            if underway.class > self.gangs[&waiter].priority() {
                self.begin_aged_turn(waiter, &underway);
            }
            self.grant_what_fits(waiter, actions);
        }
        for tied in std::mem::take(&mut self.ties) {
            self.regroup(&tied);
        }
    }

    /// The turn of a gang that has risen because of its age is at least `low_percent` of the time since the last such turn.
    fn begin_aged_turn(&mut self, waiter: GangId, underway: &Underway) {
        let (now, gang) = (self.now, self.gangs.get_mut(&waiter).expect("the caller has looked"));
        let gpus = || underway.gpus.iter();
        let last = gpus().filter_map(|gpu| self.gpus.get(gpu)).map(|gpu| gpu.aged_until).max().unwrap_or_default();
        gang.turn.until = gang.turn.until.max(now + self.policy.aged_turn(now.saturating_sub(underway.since.max(last))));
        let (until, again) = (gang.turn.until, gang.turn.until + self.policy.aged_after(gang.turn.until.saturating_sub(now)));
        for gpu in gpus() {
            if let Some(gpu) = self.gpus.get_mut(gpu) {
                (gpu.aged_until, gpu.rises_again) = (gpu.aged_until.max(until), gpu.rises_again.max(again));
            }
        }
    }

    /// Grants what the gang asks for and there is room for, the oldest first.
    fn grant_what_fits(&mut self, id: GangId, actions: &mut Vec<Action>) {
        let mut free: PerGpu<i64> = self.books().into_iter().map(|(gpu, books)| (gpu, books.free(self.policy.reserve))).collect();
        let mut asks: Vec<_> = self.gangs[&id].asks().map(|(program, id, ask)| (ask.since, program, id, ask.room.clone())).collect();
        asks.sort();
        for (_, program, ask, room) in asks {
            if room.iter().all(|(gpu, &bytes)| free.get(gpu).is_some_and(|free| *free >= bytes as i64)) {
                for (gpu, &bytes) in &room {
                    *free.entry(*gpu).or_default() -= bytes as i64;
                }
                self.grant(program, ask, actions);
            }
        }
    }

    pub(crate) fn grant(&mut self, program: ProgramId, ask: AskId, actions: &mut Vec<Action>) {
        actions.push(Action::Grant(program, ask));
        if let Some(ask) = self.program(program).and_then(|one| one.asks.get_mut(&ask)) {
            ask.granted = true;
        }
        // Whoever has just got room is to have some use of it.
        let (now, slice) = (self.now, self.policy.slice);
        if let Some(gang) = self.gang(program).and_then(|id| self.gangs.get_mut(&id)).filter(|gang| gang.turn.until <= now) {
            gang.turn = Turn { since: now, until: now + slice, class: gang.priority() };
        }
    }
}

impl Program {
    /// It has done something that no call shows: to ask for room and to take it is work.
    fn acts(&mut self) {
        self.works = if self.watched.is_some() { Works::Busy } else { Works::Unknown };
    }
}

impl Gang {
    /// The turn that follows a change pays for it: it lasts at least `k` times as long, unless the change took much longer than those
    /// before. A gang that asks for more in its turn gets as much longer.
    fn begin_turn(&mut self, underway: &Underway, arrived: bool, policy: &Policy, now: Duration) {
        let took = now.saturating_sub(underway.began);
        let pace = |one: &mut Program| if arrived { &mut one.paces.coming } else { &mut one.paces.growing }.cost(took, underway.expected);
        let cost = self.programs.values_mut().map(pace).max().unwrap_or_default();
        self.retry = Backoff::default();
        if arrived {
            self.turn.since = now;
            self.programs.values_mut().for_each(|one| one.works = Works::Busy);
        }
        self.turn.until = if arrived || self.turn.until <= now { now + policy.turn(cost) } else { self.turn.until + cost * policy.k };
        self.turn.class = underway.class;
    }
}

impl Backoff {
    fn extend(&mut self, now: Duration, first: Duration, most: Duration) {
        let next = self.next.clamp(first, most);
        *self = Self { until: now + next, next: next * 2 };
    }
}

impl Works {
    /// What a program that is not watched said may be long past.
    fn known(now: Duration, activity: Activity, watched: bool) -> Self {
        match activity {
            Activity::Empty => Self::Empty,
            _ if !watched => Self::Unknown,
            Activity::Busy => Self::Busy,
            Activity::Idle(passed) => Self::IdleSince(now.saturating_sub(passed)),
        }
    }
}
