//! A simulated node in virtual time: GPUs, a host, programs, a person, whoever else is there, and schedulers that die and stop.
//!
//! What the scheduler is told arrives a moment later, and so does what it wants. The seed repeats a run to the byte.

use crate::process::{Doing, GIB, Kind, Process, RealAsk, Spec, What, any_spec};
use crate::properties::{self, Properties};
use crate::random::Random;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::time::Duration;
use vramctl_scheduler::{
    Action, Activity, AskId, Change, ChangeId, Class, Event, GpuId, Holdings, JobId, Memory, Outcome, PerGpu, Policy, ProgramId, Refusal,
    Settings, State,
};

const LATENCY: Duration = Duration::from_millis(1);

pub type Key = (u64, ChangeId);

#[derive(Debug, Clone, Default)]
pub struct Card {
    pub total: u64,
    pub unmanaged: u64,
    /// What the scheduler knows of it.
    pub told: u64,
}

/// A change that the scheduler wants.
#[derive(Debug, Clone)]
pub struct Going {
    pub change: Change,
    /// Who is held by it, and was not before.
    pub holds: BTreeSet<ProgramId>,
    pub wanted_at: Duration,
    /// How long it takes if the links alone decide.
    pub expected: Duration,
    /// How many times as long it takes, since some leave for the first time.
    pub dear: u32,
    pub begun: bool,
    /// It has ended, and the scheduler does not know yet.
    pub ended: bool,
    pub committed: bool,
}

#[derive(Debug, Clone)]
enum Happens {
    Deliver(Event),
    Obey(u64, Action),
    /// A program has done what it did.
    Done(ProgramId, u64),
    Commit(Key),
    Refuse(Key, ProgramId),
    Wake(u64),
    Kill,
    Spawn,
    Unmanaged,
    Host,
    Person,
    PersonResumes(ProgramId),
    Share,
    Successor,
    Settings,
}

/// What may go wrong, in percent or in milliseconds on average; zero: never.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    pub fails: u64,
    /// How many times as long the first change takes in which a program leaves.
    pub dear_first: u64,
    pub kills_every: u64,
    pub spawns_every: u64,
    pub outsiders_every: u64,
    pub host_every: u64,
    pub person_every: u64,
    pub shares_every: u64,
    pub successor_every: u64,
    pub settings_every: u64,
}

#[derive(Debug)]
pub struct World {
    pub now: Duration,
    pub random: Random,
    pub policy: Policy,
    pub cards: PerGpu<Card>,
    /// In memory and in files, as the scheduler knows.
    pub host: (u64, u64),
    pub programs: BTreeMap<ProgramId, Process>,
    /// Those that have ended, and the scheduler does not know yet.
    pub ended: BTreeMap<ProgramId, Process>,
    pub changes: BTreeMap<Key, Going>,
    pub scheduler: State,
    pub epoch: u64,
    pub epoch_began: Duration,
    pub wake: Option<Duration>,
    pub faults: Faults,
    pub properties: Properties,
    pub trace: Trace,
    pub computed: BTreeMap<ProgramId, Duration>,
    /// Of scripted programs: from the end of a pause to the end of the work.
    pub responses: Vec<Duration>,
    /// No chance in how long things take.
    pub exact: bool,
    pub count: BTreeMap<&'static str, u64>,
    next_program: u64,
    queue: BTreeMap<(Duration, u64), Happens>,
    sequence: u64,
    pub crowd: u64,
}

/// A digest of all that happened, and the text if wanted.
#[derive(Debug, Clone)]
pub struct Trace {
    pub digest: u64,
    pub shown: bool,
}

impl Trace {
    fn line(&mut self, now: Duration, what: &dyn Debug) {
        let line = format!("{:>12.6} {what:?}", now.as_secs_f64());
        for byte in line.bytes() {
            self.digest = (self.digest ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
        if self.shown {
            println!("{line}");
        }
    }
}

impl World {
    pub fn new(seed: u64, policy: Policy, gpus: u32, total: u64, host: (u64, u64), faults: Faults, shown: bool) -> Self {
        let mut world = Self {
            now: Duration::ZERO,
            random: Random(seed),
            scheduler: State::new(policy.clone()),
            policy,
            cards: (0..gpus).map(|gpu| (GpuId(gpu), Card { total, ..Card::default() })).collect(),
            host,
            programs: BTreeMap::new(),
            ended: BTreeMap::new(),
            changes: BTreeMap::new(),
            epoch: 0,
            epoch_began: Duration::ZERO,
            wake: None,
            faults,
            properties: Properties::default(),
            trace: Trace { digest: 0xcbf2_9ce4_8422_2325, shown },
            computed: BTreeMap::new(),
            responses: Vec::new(),
            exact: false,
            count: BTreeMap::new(),
            next_program: 0,
            queue: BTreeMap::new(),
            sequence: 0,
            crowd: 1,
        };
        world.introduce();
        for (every, what) in world.regular() {
            world.later(every, what);
        }
        world
    }

    /// A node as the seed has it.
    pub fn any(seed: u64, shown: bool) -> Self {
        let mut random = Random(seed ^ 0x5eed);
        let gpus = *random.pick(&[1, 1, 1, 2, 2, 3, 4, 8]);
        let total = random.between(16, 140) * GIB;
        let crowd = match random.next() % 1000 {
            0..600 => random.between(1, 6),
            600..950 => random.between(4, 14),
            950..999 => random.between(10, 60),
            _ => random.between(100, 1000),
        };
        let mut every = |chance, from, to| if random.percent(chance) { random.between(from, to) } else { 0 };
        let faults = Faults {
            fails: every(40, 1, 20),
            dear_first: 0,
            kills_every: every(50, 3_000, 60_000),
            spawns_every: every(50, 3_000, 60_000),
            outsiders_every: every(40, 500, 30_000),
            host_every: every(20, 1_000, 30_000),
            person_every: every(25, 2_000, 30_000),
            shares_every: every(25, 1_000, 20_000),
            successor_every: every(30, 3_000, 60_000),
            settings_every: every(20, 3_000, 30_000),
        };
        let host = if random.percent(70) { 100 * total } else { random.between(0, 2 * total) };
        let files = if random.percent(30) { random.between(0, 2 * total) } else { 0 };
        let mut world = Self::new(seed, Policy::default(), gpus, total, (host, files), faults, shown);
        world.crowd = crowd;
        world.faults.dear_first = if random.percent(20) { random.between(2, 10) } else { 1 };
        for _ in 0..crowd {
            let at = if random.percent(50) { Duration::ZERO } else { random.millis(0, 20_000) };
            world.at(at, Happens::Spawn);
        }
        world
    }

    fn regular(&mut self) -> Vec<(u64, Happens)> {
        let faults = &self.faults;
        let all = [
            (faults.kills_every, Happens::Kill),
            (faults.spawns_every, Happens::Spawn),
            (faults.outsiders_every, Happens::Unmanaged),
            (faults.host_every, Happens::Host),
            (faults.person_every, Happens::Person),
            (faults.shares_every, Happens::Share),
            (faults.successor_every, Happens::Successor),
            (faults.settings_every, Happens::Settings),
        ];
        all.into_iter().filter(|(every, _)| *every > 0).collect()
    }

    fn at(&mut self, at: Duration, what: Happens) {
        self.sequence += 1;
        self.queue.insert((at.max(self.now), self.sequence), what);
    }

    /// Within so many milliseconds on average.
    fn later(&mut self, millis: u64, what: Happens) {
        let at = self.now + self.random.millis(millis / 2, millis * 3 / 2);
        self.at(at, what);
    }

    fn send(&mut self, event: Event) {
        self.at(self.now + LATENCY, Happens::Deliver(event));
    }

    pub fn counts(&mut self, what: &'static str) {
        *self.count.entry(what).or_default() += 1;
    }

    /// Since the scheduler's epoch.
    pub fn scheduler_now(&self) -> Duration {
        self.now.saturating_sub(self.epoch_began)
    }

    /// Runs until then.
    pub fn run(&mut self, until: Duration) {
        while let Some((&(at, sequence), _)) = self.queue.first_key_value() {
            if at > until {
                break;
            }
            let what = self.queue.remove(&(at, sequence)).expect("it is the first");
            self.now = at;
            self.happen(what);
        }
        self.now = until;
    }

    /// Runs until then; the longest time in which some program did nothing.
    pub fn run_and_watch(&mut self, until: Duration) -> Duration {
        let (mut longest, mut last) = (Duration::ZERO, BTreeMap::new());
        while self.now < until {
            let next = self.now + Duration::from_millis(100);
            self.run(next);
            for (id, computed) in &self.computed {
                let (before, since) = last.entry(*id).or_insert((*computed, next));
                if before == computed {
                    longest = longest.max(next.saturating_sub(*since));
                } else {
                    (*before, *since) = (*computed, next);
                }
            }
        }
        longest
    }

    fn happen(&mut self, what: Happens) {
        match what {
            Happens::Deliver(event) => self.deliver(&event),
            Happens::Obey(epoch, action) => self.obey(epoch, action),
            Happens::Done(program, generation) => {
                if self.programs.get(&program).is_some_and(|one| one.generation == generation) {
                    self.next(program);
                }
            }
            Happens::Commit(key) => self.commit(key),
            Happens::Refuse(key, program) => self.end(key, Outcome::Refused(program)),
            Happens::Wake(sequence) => {
                if self.wake == Some(self.now) && sequence == self.epoch {
                    self.wake = None;
                    self.deliver(&Event::Timer);
                }
            }
            regular => {
                match &regular {
                    Happens::Kill => self.kill_any(),
                    Happens::Spawn => self.spawn_any(),
                    Happens::Unmanaged => self.change_unmanaged(),
                    Happens::Host => self.change_host(),
                    Happens::Person => self.pause_any(),
                    Happens::PersonResumes(program) => self.person_resumes(*program),
                    Happens::Share => self.share_any(),
                    Happens::Successor => self.succeed(),
                    _ => self.change_settings(),
                }
                // Initial arrivals have no rate; one that has one comes again.
                let again = self.regular().into_iter().find(|(_, other)| std::mem::discriminant(other) == std::mem::discriminant(&regular));
                if let Some((every, what)) = again.filter(|_| !matches!(regular, Happens::Spawn) || self.random.percent(50)) {
                    self.later(every, what);
                }
            }
        }
    }

    /// A program that lives, or lives as far as the scheduler knows.
    pub fn told(&self, id: ProgramId) -> Option<&Process> {
        self.programs.get(&id).or_else(|| self.ended.get(&id))
    }

    pub fn all_told(&self) -> impl Iterator<Item = (&ProgramId, &Process)> {
        self.programs.iter().chain(&self.ended)
    }

    fn told_mut(&mut self, id: ProgramId) -> Option<&mut Process> {
        self.programs.get_mut(&id).or_else(|| self.ended.get_mut(&id))
    }

    // --- the scheduler ---

    fn introduce(&mut self) {
        let cards: Vec<_> = self.cards.iter().map(|(&gpu, card)| (gpu, card.total, card.unmanaged)).collect();
        for (gpu, total, unmanaged) in cards {
            self.deliver(&Event::Gpu { gpu, total, unmanaged });
        }
        self.deliver(&Event::Host { room: self.host.0, files: self.host.1 });
        let reports: Vec<_> = self.programs.iter().map(|(&id, one)| one.report(id, self.now)).collect();
        for report in reports {
            self.deliver(&Event::Joined(Box::new(report)));
        }
        self.deliver(&Event::Ready);
    }

    fn deliver(&mut self, event: &Event) {
        self.see(event);
        self.trace.line(self.now, event);
        let mut properties = std::mem::take(&mut self.properties);
        properties.before(self);
        let step = self.scheduler.step(self.scheduler_now(), event.clone());
        for action in &step.actions {
            self.trace.line(self.now, action);
            self.intend(action);
        }
        self.wake = step.wake.map(|wake| self.epoch_began + wake);
        properties.check(self, event, &step);
        self.properties = properties;
        for action in step.actions {
            self.at(self.now + LATENCY, Happens::Obey(self.epoch, action));
        }
        if let Some(wake) = self.wake {
            self.at(wake, Happens::Wake(self.epoch));
        }
    }

    /// Notes what the scheduler knows from now on.
    fn see(&mut self, event: &Event) {
        let now = self.now;
        match event {
            Event::Gpu { gpu, unmanaged, .. } => self.cards.get_mut(gpu).expect("a GPU stays").told = *unmanaged,
            Event::Host { room, files } => self.host = (*room, *files),
            Event::Asks { program, ask, .. } => {
                if let Some(ask) = self.told_mut(*program).and_then(|one| one.asks.get_mut(ask)) {
                    ask.seen = Some(now);
                }
            }
            Event::Settled { program, memory, .. } => self.told_mut(*program).into_iter().for_each(|one| one.known.extend(memory.clone())),
            Event::Memory { program, gpu, memory } => {
                self.told_mut(*program).into_iter().for_each(|one| _ = one.known.insert(*gpu, memory.clone()));
            }
            Event::Joined(report) => {
                if let Some(one) = self.told_mut(report.program) {
                    one.known.clone_from(&report.memory);
                    one.paused_seen = report.paused;
                    one.calls_seen = report.called.map(|waited| now.saturating_sub(waited));
                    for asked in &report.asks {
                        if let Some(ask) = one.asks.get_mut(&asked.ask) {
                            ask.seen = Some(now.saturating_sub(asked.waited));
                        }
                    }
                }
            }
            Event::Left(program) => _ = self.ended.remove(program),
            Event::Settings(program, settings) => {
                self.told_mut(*program).into_iter().for_each(|one| one.spec.settings = settings.clone());
            }
            Event::Paused(program, paused) => self.told_mut(*program).into_iter().for_each(|one| one.paused_seen = *paused),
            Event::Called(program) => {
                self.told_mut(*program).into_iter().filter(|one| one.calls.is_some()).for_each(|one| one.calls_seen = Some(now));
            }
            Event::Done { change, programs, .. } => {
                self.changes.remove(&(self.epoch, *change));
                for (program, memory, held) in programs {
                    let Some(one) = self.told_mut(*program) else { continue };
                    one.known.extend(memory.clone());
                    one.calls_seen = one.calls_seen.filter(|_| *held);
                }
            }
            _ => (),
        }
    }

    /// Notes what the scheduler has decided, before it is done.
    fn intend(&mut self, action: &Action) {
        match action {
            Action::Change(change) => {
                let leaving = change.leaving.iter().flat_map(|leave| &leave.programs);
                let is_first = leaving.filter_map(|id| self.programs.get(id)).any(|one| !one.has_left);
                let going = Going {
                    change: change.clone(),
                    holds: BTreeSet::new(),
                    wanted_at: self.now,
                    expected: Duration::ZERO,
                    dear: if is_first { self.faults.dear_first.max(1) as u32 } else { 1 },
                    begun: false,
                    ended: false,
                    committed: false,
                };
                self.changes.insert((self.epoch, change.id), going);
            }
            Action::Grant(program, ask) => {
                if let Some(ask) = self.told_mut(*program).and_then(|one| one.asks.get_mut(ask)) {
                    ask.granted = true;
                }
            }
            Action::Refuse(program, ask, _) => {
                if let Some(ask) = self.told_mut(*program).and_then(|one| one.asks.get_mut(ask)) {
                    ask.refused = true;
                }
            }
            Action::Watch(..) => (),
        }
    }

    fn obey(&mut self, epoch: u64, action: Action) {
        // The libraries refuse the orders of an older scheduler.
        if epoch != self.epoch {
            return self.counts("stale orders");
        }
        match action {
            Action::Change(change) => self.begin((epoch, change.id)),
            Action::Grant(program, ask) => self.take_room(program, ask),
            Action::Refuse(program, ask, refusal) => self.out_of_memory(program, ask, refusal),
            Action::Watch(program, watched) => {
                let Some(one) = self.programs.get_mut(&program) else { return };
                one.watched = watched;
                let works = one.works();
                if watched && !one.is_stopped() && works != Activity::Empty {
                    self.send(Event::Activity(program, works));
                }
            }
        }
    }

    /// The scheduler dies or stops, and another takes the next epoch. What was under way ends at once, one way or the other.
    fn succeed(&mut self) {
        self.counts("successors");
        let now = self.scheduler_now();
        for (&id, one) in &mut self.programs {
            one.remembered = self.scheduler.remembered(now, id).unwrap_or_default();
        }
        let stopped = self.scheduler.clone();
        let stopped_at = self.scheduler_now();
        for key in self.changes.keys().copied().collect::<Vec<_>>() {
            if self.changes[&key].begun && self.random.percent(50) {
                self.commit(key);
            } else if self.changes[&key].begun {
                self.end(key, Outcome::Failed);
            }
        }
        // What brought these in, and how long it took, nobody knows any more.
        let changes = std::mem::take(&mut self.changes);
        for id in changes.values().filter(|going| going.committed).flat_map(|going| &going.change.coming) {
            if let Some(one) = self.programs.get_mut(id) {
                one.came.1 = Duration::from_nanos(1);
                one.paces.pop();
            }
        }
        self.ended.clear();
        self.queue.retain(|_, what| !matches!(what, Happens::Deliver(_) | Happens::Refuse(..) | Happens::Commit(_)));
        self.programs.values_mut().flat_map(|one| one.asks.values_mut()).for_each(|ask| (ask.granted, ask.refused) = (false, false));
        self.programs.values_mut().for_each(|one| one.watched = false);
        self.epoch += 1;
        self.epoch_began = self.now;
        self.wake = None;
        self.scheduler = State::new(self.policy.clone());
        self.introduce();
        // The stopped one continues, and wants what it thinks right. Its epoch is over.
        let mut stale = stopped;
        let later = self.random.millis(0, 5_000);
        for action in stale.step(stopped_at + later, Event::Timer).actions {
            self.at(self.now + later, Happens::Obey(self.epoch - 1, action));
        }
    }

    // --- changes ---

    fn begin(&mut self, key: Key) {
        let Some(going) = self.changes.get_mut(&key) else { return };
        going.begun = true;
        let change = going.change.clone();
        let alive = |id: &ProgramId| self.programs.get(id);
        if change.coming.iter().any(|id| alive(id).is_none_or(|one| one.in_change.is_some() || one.paused)) {
            return self.end(key, Outcome::Failed);
        }
        let leaving: Vec<ProgramId> =
            change.leaving.iter().flat_map(|leave| &leave.programs).copied().filter(|id| alive(id).is_some()).collect();
        let may_not = |id: &&ProgramId| {
            let one = &self.programs[id];
            let is_tied =
                |other: &ProgramId, it: &Process| one.partners.contains(other) || one.spec.job.is_some() && it.spec.job == one.spec.job;
            let apart = self.programs.iter().any(|(other, it)| is_tied(other, it) && !leaving.contains(other));
            one.in_change.is_some() || one.paused || one.capturing || apart
        };
        if let Some(&refuses) = leaving.iter().find(may_not) {
            return self.end(key, Outcome::Refused(refuses));
        }
        for id in leaving.iter().chain(&change.coming) {
            self.programs.get_mut(id).expect("it lives").in_change = Some(key);
        }
        for id in &leaving {
            if !self.programs[id].held {
                self.changes.get_mut(&key).expect("it goes on").holds.insert(*id);
                self.hold(*id);
            }
        }
        let holds = self.changes[&key].holds.clone();
        if let Some(stays) = holds.iter().find(|id| !self.drains(**id)) {
            return self.at(self.now + self.policy.drain, Happens::Refuse(key, *stays));
        }
        let (least, most) = if self.exact { (10, 10) } else { (0, 20) };
        let drained = if holds.is_empty() { Duration::ZERO } else { self.random.millis(least, most) };
        let mut copies = PerGpu::<(u64, u64)>::new();
        for ((_, gpu), holdings) in change.leaving.iter().flat_map(|leave| &leave.taken) {
            copies.entry(*gpu).or_default().0 += holdings.copied_out();
        }
        for (gpu, memory) in change.coming.iter().flat_map(|id| &self.programs[id].memory) {
            copies.entry(*gpu).or_default().1 += memory.away.contents();
        }
        let bytes = copies.values().map(|(out, back)| *out.max(back)).max().unwrap_or(0);
        let percent = if self.exact { 100 } else { self.random.between(70, 130) as u32 };
        let pass = if change.passing { 2 } else { 1 };
        self.changes.get_mut(&key).expect("it goes on").expected = self.policy.overhead + self.policy.copy(bytes) * pass;
        for id in &leaving {
            self.programs.get_mut(id).expect("it lives").has_left = true;
        }
        let dear = self.changes[&key].dear;
        let time = self.policy.copy(bytes) * percent / 100 * pass * dear;
        let at = self.now + drained + time + if self.exact { self.policy.overhead } else { self.random.millis(10, 60) };
        if self.random.percent(self.faults.fails) {
            self.at(at, Happens::Refuse(key, ProgramId(u64::MAX)));
        } else {
            self.at(at, Happens::Commit(key));
        }
    }

    /// Whether the work of a program ends once it is held.
    fn drains(&mut self, id: ProgramId) -> bool {
        let one = &self.programs[&id];
        let busy = matches!(one.doing, Doing::Halted(_) | Doing::Spins);
        let job = one.spec.job;
        let waits_for_room = |other: &Process| matches!(other.doing, Doing::WaitsForRoom(_));
        let spins = one.doing == Doing::Spins
            && self.programs.values().any(|other| job.is_some() && other.spec.job == job && waits_for_room(other));
        !(spins || busy && one.spec.kind == Kind::Hog || busy && self.random.percent(self.faults.fails / 4))
    }

    fn commit(&mut self, key: Key) {
        let Some(going) = self.changes.get(&key).filter(|going| !going.ended) else { return };
        let change = going.change.clone();
        if change.coming.iter().any(|id| !self.programs.contains_key(id)) {
            return self.end(key, Outcome::Failed);
        }
        let taken: BTreeMap<_, _> =
            change.leaving.iter().flat_map(|leave| leave.taken.clone()).filter(|((id, _), _)| self.programs.contains_key(id)).collect();
        if taken.iter().any(|((id, gpu), holdings)| given(&self.programs[id].memory[gpu].resident, holdings).bytes() < holdings.bytes()) {
            return self.end(key, Outcome::Failed);
        }
        let mut free: PerGpu<i64> = self.cards.keys().map(|&gpu| (gpu, self.physically_free(gpu) as i64)).collect();
        for ((_, gpu), holdings) in &taken {
            *free.get_mut(gpu).expect("a GPU stays") += holdings.bytes() as i64;
        }
        for (gpu, memory) in change.coming.iter().flat_map(|id| &self.programs[id].memory) {
            *free.get_mut(gpu).expect("a GPU stays") -= memory.away.bytes() as i64;
        }
        if free.values().any(|free| *free < 0) {
            self.counts("room vanished");
            // Whoever took the room may have taken what was handed over: then those that were to leave cannot go on at once.
            if self.random.percent(30) {
                self.take_away(&taken);
                self.changes.get_mut(&key).expect("it goes on").holds.clear();
            }
            return self.end(key, Outcome::Failed);
        }
        self.take_away(&taken);
        let (took, expected) = (self.now.saturating_sub(self.changes[&key].wanted_at), self.changes[&key].expected);
        self.changes.get_mut(&key).expect("it goes on").holds.clear();
        let percent = (took.as_nanos() * 100 / expected.as_nanos().max(1)) as u64;
        // The middle one of the last three, of the program for which it is the most.
        let middle = |id| {
            let paces = &self.programs[id].paces;
            let mut three = [paces[paces.len() - 2], paces[paces.len() - 1], percent];
            three.sort_unstable();
            three[1]
        };
        let of_all = change.coming.iter().map(middle).max().unwrap_or(100);
        for id in &change.coming {
            let one = self.programs.get_mut(id).expect("it lives");
            for memory in one.memory.values_mut() {
                let away = std::mem::take(&mut memory.away);
                memory.resident.add_all(&away);
            }
            one.came = (self.now, took.min(expected * of_all as u32 / 100));
            one.paces.push(percent);
        }
        self.changes.get_mut(&key).expect("it goes on").committed = true;
        for id in &change.coming {
            self.programs.get_mut(id).expect("it lives").held = false;
        }
        for id in &change.coming {
            self.go_on(*id);
        }
        self.end(key, Outcome::Changed);
    }

    fn take_away(&mut self, taken: &BTreeMap<(ProgramId, GpuId), Holdings>) {
        for ((id, gpu), holdings) in taken {
            let memory = self.programs.get_mut(id).expect("it lives").memory.get_mut(gpu).expect("it is there");
            let gone = given(&memory.resident, holdings);
            memory.resident.remove_all(&gone);
            memory.away.add_all(&gone);
        }
    }

    fn end(&mut self, key: Key, outcome: Outcome) {
        let outcome = if outcome == Outcome::Refused(ProgramId(u64::MAX)) { Outcome::Failed } else { outcome };
        let Some(going) = self.changes.get_mut(&key).filter(|going| !going.ended) else { return };
        going.ended = true;
        let going = going.clone();
        self.counts(match outcome {
            Outcome::Changed => "changes",
            Outcome::Refused(_) => "refused changes",
            Outcome::Failed => "failed changes",
        });
        let all: Vec<ProgramId> =
            going.change.leaving.iter().flat_map(|leave| &leave.programs).chain(&going.change.coming).copied().collect();
        for id in all.iter().filter(|id| self.programs.contains_key(id)).copied().collect::<Vec<_>>() {
            let one = self.programs.get_mut(&id).expect("it lives");
            if one.in_change == Some(key) {
                one.in_change = None;
            }
            if going.holds.contains(&id) {
                one.held = false;
            }
        }
        going.holds.iter().for_each(|id| self.go_on(*id));
        let tell = |id: &ProgramId| self.programs.get(id).map(|one| (*id, one.memory.clone(), one.held));
        let programs = all.iter().filter_map(tell).collect();
        self.send(Event::Done { change: key.1, outcome, programs });
    }

    pub fn physically_free(&self, gpu: GpuId) -> u64 {
        let used: u64 = self.programs.values().filter_map(|one| one.memory.get(&gpu)).map(Memory::on_gpu).sum();
        let card = &self.cards[&gpu];
        card.total - card.unmanaged - used
    }

    // --- the gate ---

    fn hold(&mut self, id: ProgramId) {
        let now = self.now;
        let one = self.programs.get_mut(&id).expect("it lives");
        one.held = true;
        if let Doing::Computes(until) = one.doing {
            let left = until.saturating_sub(now);
            one.doing = Doing::Halted(left);
            one.generation += 1;
            if let Some(computed) = self.computed.get_mut(&id) {
                *computed = computed.saturating_sub(left);
            }
            self.call(id);
        } else if one.spec.kind == Kind::Flapper && one.doing == Doing::Idles {
            one.doing = Doing::WaitsAtGate(Duration::from_millis(1));
            one.generation += 1;
            self.call(id);
        }
    }

    /// A call of the program waits for its memory. Those that a person's pause holds are the person's.
    fn call(&mut self, id: ProgramId) {
        let now = self.now;
        let one = self.programs.get_mut(&id).expect("it lives");
        if one.held && !one.paused && one.calls.is_none() {
            one.calls = Some(now);
            self.send(Event::Called(id));
        }
    }

    /// The gate of a program has opened, unless something else keeps it closed.
    fn go_on(&mut self, id: ProgramId) {
        let Some(one) = self.programs.get_mut(&id) else { return };
        if !one.held {
            one.calls = None;
        }
        let (Doing::Halted(left) | Doing::WaitsAtGate(left)) = one.doing else { return };
        if one.is_stopped() {
            return self.call(id);
        }
        self.compute(id, left);
    }

    fn compute(&mut self, id: ProgramId, time: Duration) {
        let one = &self.programs[&id];
        if one.is_stopped() {
            self.does(id, Doing::WaitsAtGate(time));
            return self.call(id);
        }
        properties::whole(self, id);
        *self.computed.entry(id).or_default() += time;
        let until = self.now + time;
        self.does(id, Doing::Computes(until));
        let generation = self.programs[&id].generation;
        self.at(until, Happens::Done(id, generation));
    }

    fn does(&mut self, id: ProgramId, doing: Doing) {
        let one = self.programs.get_mut(&id).expect("it lives");
        let before = one.works();
        one.doing = doing;
        one.generation += 1;
        let works = one.works();
        let tells = one.watched && !one.is_stopped() || works == Activity::Empty || before == Activity::Empty;
        if before != works {
            one.works_since = self.now;
        }
        if before != works && tells {
            self.send(Event::Activity(id, works));
        }
    }

    // --- what programs do ---

    pub fn spawn(&mut self, spec: Spec) -> ProgramId {
        let id = ProgramId(self.next_program);
        self.next_program += 1;
        let one = Process::new(spec, self.now);
        let report = one.report(id, self.now);
        self.programs.insert(id, one);
        self.send(Event::Joined(Box::new(report)));
        self.ask(id, What::Context);
        id
    }

    fn spawn_any(&mut self) {
        if self.programs.len() as u64 > 2 * self.crowd + 8 {
            return;
        }
        let gpus: Vec<GpuId> = self.cards.keys().copied().collect();
        let total = self.cards[&GpuId(0)].total;
        let crowd = (self.crowd / gpus.len() as u64).max(1);
        let ranks = if gpus.len() > 1 && self.random.percent(40) { self.random.between(2, gpus.len() as u64) } else { 1 };
        let first = self.random.next() as usize % gpus.len();
        let on: Vec<GpuId> = (0..ranks as usize).map(|rank| gpus[(first + rank) % gpus.len()]).collect();
        let spec = any_spec(&mut self.random, &on, total, crowd);
        if ranks == 1 || self.random.percent(20) {
            self.spawn(spec);
            return;
        }
        let job = Some(JobId(self.next_program));
        for gpu in on {
            self.spawn(Spec { job, gpus: vec![gpu], ..spec.clone() });
        }
    }

    /// Asks for room, on all GPUs of the program, or on one.
    fn ask(&mut self, id: ProgramId, what: What) {
        let one = &self.programs[&id];
        let piece = (one.spec.target / one.spec.pieces).max(1);
        let room: PerGpu = match what {
            What::Context => one.spec.gpus.iter().map(|&gpu| (gpu, one.spec.context)).collect(),
            What::Allocation(_) => {
                let least = one.spec.gpus.iter().min_by_key(|gpu| one.memory[gpu].own()).expect("it has a GPU");
                [(*least, piece)].into()
            }
            What::Resume => one.with_person.iter().map(|(&gpu, holdings)| (gpu, holdings.bytes())).collect(),
        };
        let limit = one.spec.settings.limit.unwrap_or(u64::MAX);
        if what != What::Resume && room.iter().any(|(gpu, bytes)| one.memory[gpu].own() + bytes > limit) {
            self.counts("over the limit");
            return self.fails(id, what);
        }
        let (now, one) = (self.now, self.programs.get_mut(&id).expect("it lives"));
        let ask = AskId(one.next_ask);
        one.next_ask += 1;
        one.asks.insert(ask, RealAsk { room: room.clone(), what, since: now, seen: None, granted: false, refused: false });
        self.send(Event::Asks { program: id, ask, room });
        if what != What::Resume {
            self.does(id, Doing::WaitsForRoom(ask));
        }
    }

    fn take_room(&mut self, id: ProgramId, ask: AskId) {
        let Some(one) = self.programs.get(&id) else { return };
        let Some(asked) = one.asks.get(&ask).cloned() else { return };
        let fits = asked.room.iter().all(|(gpu, bytes)| self.physically_free(*gpu) >= *bytes);
        let one = self.programs.get_mut(&id).expect("it lives");
        one.asks.remove(&ask);
        if !fits {
            // Somebody who is not managed was faster.
            self.counts("granted room vanished");
            self.send(Event::Settled { program: id, ask, memory: PerGpu::new() });
            return self.ask(id, asked.what);
        }
        for (gpu, bytes) in &asked.room {
            let memory = one.memory.get_mut(gpu).expect("it is on the GPU");
            match asked.what {
                What::Context => memory.fixed += bytes,
                What::Allocation(class) => memory.resident.add(class, *bytes, 1),
                What::Resume => memory.resident.add_all(&one.with_person[gpu]),
            }
            memory.peak = memory.peak.max(memory.own());
        }
        let memory = asked.room.keys().map(|gpu| (*gpu, one.memory[gpu].clone())).collect();
        self.send(Event::Settled { program: id, ask, memory });
        if asked.what == What::Resume {
            self.person_has_resumed(id);
        } else {
            self.after_room(id);
        }
    }

    fn after_room(&mut self, id: ProgramId) {
        let time = self.random.millis(1, 20);
        self.compute(id, time);
    }

    fn out_of_memory(&mut self, id: ProgramId, ask: AskId, refusal: Refusal) {
        let Some(asked) = self.programs.get_mut(&id).and_then(|one| one.asks.remove(&ask)) else { return };
        self.counts(match refusal {
            Refusal::NeverFits => "never fits",
            Refusal::Unserved(_) => "unserved",
        });
        self.fails(id, asked.what);
    }

    fn fails(&mut self, id: ProgramId, what: What) {
        match what {
            What::Context => self.kill(id),
            What::Resume => self.later(5_000, Happens::PersonResumes(id)),
            What::Allocation(_) if self.random.percent(30) => self.kill(id),
            What::Allocation(_) => {
                let one = self.programs.get_mut(&id).expect("it lives");
                one.spec.target = one.spec.gpus.iter().map(|gpu| one.memory[gpu].own() - one.memory[gpu].fixed).min().unwrap_or(0);
                one.spec.pieces = one.spec.pieces.max(2);
                self.after_room(id);
            }
        }
    }

    /// What a program does next.
    fn next(&mut self, id: ProgramId) {
        let one = &self.programs[&id];
        if let (Some(job), Doing::Computes(_)) = (one.spec.job, one.doing) {
            self.does(id, Doing::Spins);
            return self.meet(job);
        }
        self.choose(id);
    }

    /// All ranks of a job have come as far.
    fn meet(&mut self, job: JobId) {
        let ranks: Vec<_> = self.programs.iter().filter(|(_, one)| one.spec.job == Some(job)).map(|(&id, one)| (id, one.doing)).collect();
        if ranks.iter().all(|(_, doing)| *doing == Doing::Spins) {
            for (id, _) in ranks {
                // One that runs out of memory takes the others with it.
                if self.programs.contains_key(&id) {
                    self.choose(id);
                }
            }
        }
    }

    fn choose(&mut self, id: ProgramId) {
        let class = *self.random.pick(&[Class::FreeCache, Class::Discardable, Class::Unchanged, Class::Kept, Class::Kept, Class::Kept]);
        let one = &self.programs[&id];
        let starting = one
            .spec
            .gpus
            .iter()
            .any(|gpu| one.memory[gpu].own() - one.memory[gpu].fixed < one.spec.target / one.spec.pieces * one.spec.pieces);
        if starting && !one.paused {
            return self.ask(id, What::Allocation(class));
        }
        if one.capturing {
            self.programs.get_mut(&id).expect("it lives").capturing = false;
            self.send(Event::Capturing(id, false));
        }
        if self.random.percent(3) {
            self.change_memory(id);
        }
        if self.programs[&id].spec.kind == Kind::Scripted {
            return self.follow_script(id);
        }
        let (kind, alone) = (self.programs[&id].spec.kind, self.programs[&id].spec.job.is_none());
        let works = self.programs[&id].doing != Doing::Idles;
        let (busy, idle) = match kind {
            Kind::Engine { .. } if works && self.random.percent(80) => (None, self.random.millis(1, 5_000)),
            Kind::Engine { .. } => (Some((1, 2_000)), Duration::ZERO),
            Kind::Notebook if works => (None, self.random.millis(1_000, 60_000)),
            Kind::Notebook => (Some((100, 5_000)), Duration::ZERO),
            Kind::Flapper if works && alone => (None, self.random.millis(1_000, 60_000)),
            Kind::Flapper => (Some((1, 2)), Duration::ZERO),
            Kind::Trainer | Kind::Hog | Kind::Scripted => (Some((50, 500)), Duration::ZERO),
            Kind::Grower if self.random.percent(20) => {
                self.programs.get_mut(&id).expect("it lives").spec.target += GIB;
                return self.ask(id, What::Allocation(class));
            }
            Kind::Grower => (Some((10, 200)), Duration::ZERO),
            Kind::Capturer => {
                if alone && !self.programs[&id].is_stopped() && self.random.percent(20) {
                    self.programs.get_mut(&id).expect("it lives").capturing = true;
                    self.send(Event::Capturing(id, true));
                }
                (Some((100, 3_000)), Duration::ZERO)
            }
        };
        if let Some((from, to)) = busy {
            let time = self.random.millis(from, to);
            return self.compute(id, time);
        }
        self.does(id, Doing::Idles);
        let generation = self.programs[&id].generation;
        self.at(self.now + idle, Happens::Done(id, generation));
    }

    fn follow_script(&mut self, id: ProgramId) {
        let (now, works) = (self.now, self.programs[&id].doing != Doing::Idles);
        let one = self.programs.get_mut(&id).expect("it lives");
        if works && one.asked_at.is_some() {
            let asked_at = one.asked_at.take().expect("it has just been looked at");
            self.responses.push(now.saturating_sub(asked_at));
        }
        let one = self.programs.get_mut(&id).expect("it lives");
        let Some(&(pause, work)) = one.spec.script.first() else { return self.does(id, Doing::Idles) };
        if works {
            self.does(id, Doing::Idles);
            let generation = self.programs[&id].generation;
            // The first pause ends at a fixed time.
            let until = if self.programs[&id].script_begun { now + pause } else { pause };
            return self.at(until, Happens::Done(id, generation));
        }
        one.script_begun = true;
        one.spec.script.remove(0);
        one.asked_at = Some(now);
        self.compute(id, work);
    }

    /// A program frees something, or contents turn into what is cheaper to take.
    fn change_memory(&mut self, id: ProgramId) {
        let one = &self.programs[&id];
        if one.is_stopped() || one.in_change.is_some() {
            return;
        }
        let (gpu, frees) = (one.spec.gpus[0], self.random.percent(30));
        let memory = self.programs.get_mut(&id).and_then(|one| one.memory.get_mut(&gpu)).expect("it lives");
        let Some((class, size, _)) = memory.resident.iter().next_back() else { return };
        let gone: Holdings = [(class, size, 1)].into_iter().collect();
        memory.resident.remove_all(&gone);
        if !frees {
            memory.resident.add(if class == Class::Kept { Class::Unchanged } else { Class::Kept }, size, 1);
        }
        let memory = memory.clone();
        self.send(Event::Memory { program: id, gpu, memory });
    }

    // --- what happens to them ---

    fn any_program(&mut self) -> Option<ProgramId> {
        let all: Vec<_> = self.programs.keys().copied().collect();
        (!all.is_empty()).then(|| *self.random.pick(&all))
    }

    fn kill_any(&mut self) {
        self.any_program().into_iter().for_each(|id| self.kill(id));
    }

    /// A rank that dies takes its job with it.
    fn kill(&mut self, id: ProgramId) {
        let job = self.programs[&id].spec.job;
        let all: Vec<_> =
            self.programs.iter().filter(|(other, one)| **other == id || job.is_some() && one.spec.job == job).map(|(&id, _)| id).collect();
        for id in all {
            let one = self.programs.remove(&id).expect("it lives");
            self.ended.insert(id, one);
            self.send(Event::Left(id));
        }
    }

    fn change_unmanaged(&mut self) {
        let gpus: Vec<GpuId> = self.cards.keys().copied().collect();
        let gpu = *self.random.pick(&gpus);
        let free = self.physically_free(gpu);
        let taken = if self.random.percent(50) { self.random.between(0, free) } else { 0 };
        let card = self.cards.get_mut(&gpu).expect("a GPU stays");
        card.unmanaged = if taken > 0 { card.unmanaged + taken } else { 0 };
        let (total, unmanaged) = (card.total, card.unmanaged);
        let at = self.now + self.random.millis(0, 500);
        self.at(at, Happens::Deliver(Event::Gpu { gpu, total, unmanaged }));
    }

    fn change_host(&mut self) {
        let total = self.cards[&GpuId(0)].total;
        let room = self.random.between(0, 3 * total);
        self.send(Event::Host { room, files: self.host.1 });
    }

    fn change_settings(&mut self) {
        let Some(id) = self.any_program() else { return };
        let spec = any_spec(&mut self.random, &[GpuId(0)], GIB * 16, 1);
        let limit = self.programs[&id].spec.settings.limit;
        self.send(Event::Settings(id, Settings { limit, ..spec.settings }));
    }

    /// A person pauses a program and resumes it later.
    fn pause_any(&mut self) {
        let Some(id) = self.any_program() else { return };
        let one = self.programs.get_mut(&id).expect("it lives");
        if one.is_stopped() || one.in_change.is_some() || one.capturing || one.spec.job.is_some() || !one.partners.is_empty() {
            return;
        }
        one.paused = true;
        if let Doing::Computes(until) = one.doing {
            one.doing = Doing::Halted(until.saturating_sub(self.now));
            one.generation += 1;
        }
        for (&gpu, memory) in &mut one.memory {
            one.with_person.insert(gpu, std::mem::take(&mut memory.resident));
        }
        let memory = one.memory.clone();
        self.send(Event::Paused(id, true));
        for (gpu, memory) in memory {
            self.send(Event::Memory { program: id, gpu, memory });
        }
        self.later(10_000, Happens::PersonResumes(id));
    }

    fn person_resumes(&mut self, id: ProgramId) {
        if self.programs.get(&id).is_some_and(|one| one.paused) {
            self.ask(id, What::Resume);
        }
    }

    fn person_has_resumed(&mut self, id: ProgramId) {
        let one = self.programs.get_mut(&id).expect("it lives");
        one.paused = false;
        one.with_person.clear();
        let (watched, works) = (one.watched, one.works());
        self.send(Event::Paused(id, false));
        if watched || works == Activity::Empty {
            self.send(Event::Activity(id, works));
        }
        self.go_on(id);
    }

    /// A program opens another's memory, or closes it.
    fn share_any(&mut self) {
        let (Some(id), Some(other)) = (self.any_program(), self.any_program()) else { return };
        let free = |id: &ProgramId| {
            let one = &self.programs[id];
            !one.is_stopped() && one.in_change.is_none() && one.spec.job.is_none()
        };
        if !free(&id) || !free(&other) || id == other {
            return;
        }
        if !self.programs[&id].partners.is_empty() {
            for partner in std::mem::take(&mut self.programs.get_mut(&id).expect("it lives").partners) {
                self.programs.get_mut(&partner).into_iter().for_each(|one| _ = one.partners.remove(&id));
            }
            return self.send(Event::Tied(id, BTreeSet::new()));
        }
        if self.programs[&id].spec.gpus == self.programs[&other].spec.gpus {
            self.programs.get_mut(&id).expect("it lives").partners.insert(other);
            self.programs.get_mut(&other).expect("it lives").partners.insert(id);
            self.send(Event::Tied(id, [other].into()));
        }
    }
}

/// What a program gives of its memory for what the scheduler chose: a class may have changed since.
fn given(resident: &Holdings, chosen: &Holdings) -> Holdings {
    let mut left = resident.clone();
    left.remove_all(chosen);
    let mut gone = resident.clone();
    gone.remove_all(&left);
    gone.add_all(&left.cheapest(chosen.bytes() - gone.bytes(), chosen.contents() - gone.contents()));
    gone
}
