//! The five properties, checked after every event against the node as it is, not as the scheduler believes.

use crate::process::{Process, RealAsk};
use crate::world::{Key, World};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use vramctl_scheduler::{
    Action, Activity, AskId, Because, Cause, Change, Class, Event, GangId, GpuId, Holdings, Leave, Memory, Outcome, PerGpu, Priority,
    ProgramId, Refusal, Step, Why,
};

/// What rounding and messages under way may add to a wait.
const SLACK: Duration = Duration::from_millis(500);

#[derive(Debug, Default)]
pub struct Properties {
    /// What the scheduler knows, since it has been told.
    capturing: BTreeSet<ProgramId>,
    paused: BTreeSet<ProgramId>,
    /// Until when a program is left alone after it did not drain, and how often in a row it did not.
    left_alone: BTreeMap<ProgramId, (Duration, u32)>,
    promised: BTreeMap<Key, PerGpu>,
    gangs: BTreeMap<GangId, Vec<ProgramId>>,
    waits: BTreeMap<GangId, Wait>,
    /// For how long nobody could give way to a request.
    unserved: BTreeMap<(ProgramId, AskId), Duration>,
    /// When a turn ended that somebody may have got because of its age.
    aged_until: Duration,
    last: Duration,
    epoch: u64,
    ready: bool,
    /// The GPUs' books before the event.
    free_before: PerGpu<i64>,
}

#[derive(Debug, Clone)]
struct Wait {
    since: Duration,
    /// When it was first seen, as it is.
    begun: Duration,
    programs: Vec<ProgramId>,
    /// Time in which nobody could give way, or those of a higher priority were busy and its own age was not enough.
    excluded: Duration,
    /// For those ahead.
    allowed: Duration,
    possible: bool,
}

/// A gang as it is after the event.
struct Group {
    programs: Vec<ProgramId>,
    because: Option<Because>,
    since: Option<Duration>,
    lack: PerGpu,
    priority: Priority,
    turn_left: Duration,
    is_parallel: bool,
    /// It may never give way, as far as the scheduler can know.
    is_fixed: bool,
}

/// All gangs, and what follows of all of them together: a check of each against each would take hours for a thousand programs.
struct Groups {
    of: BTreeMap<GangId, Group>,
    free: PerGpu<i64>,
    /// What those have that may give way.
    movable: PerGpu,
    fixed_rivals: usize,
    waiting: usize,
    turns_left: Duration,
    priorities: BTreeMap<Priority, usize>,
    /// Bytes of contents that are away or about to be, and the size of the largest allocation.
    contents: u64,
    largest: u64,
}

impl Groups {
    fn of(properties: &Properties, world: &World) -> Self {
        let mut all = Self {
            of: BTreeMap::new(),
            free: free(world),
            movable: PerGpu::new(),
            fixed_rivals: 0,
            waiting: 0,
            turns_left: Duration::ZERO,
            priorities: BTreeMap::new(),
            contents: world.all_told().map(|(_, one)| contents_away(&one.known)).sum(),
            largest: world.all_told().flat_map(|(_, one)| one.known.values()).map(|memory| memory.resident.largest()).max().unwrap_or(0),
        };
        all.contents += world.changes.values().flat_map(|going| &going.change.leaving).map(Leave::contents).sum::<u64>();
        for (gang, programs, because) in world.scheduler.gangs() {
            let group = Group {
                because,
                since: waits_since(world, &programs),
                lack: lack(world, &programs),
                priority: priority(world, &programs),
                turn_left: turn_left(world, &programs),
                is_parallel: is_parallel(world, &programs),
                is_fixed: properties.is_fixed(world, &programs),
                programs,
            };
            for (gpu, bytes) in group.movable(world) {
                *all.movable.entry(gpu).or_default() += bytes;
            }
            all.fixed_rivals += usize::from(group.is_fixed && group.is_parallel);
            all.waiting += usize::from(group.since.is_some());
            all.turns_left += group.turn_left;
            *all.priorities.entry(group.priority).or_default() += 1;
            all.of.insert(gang, group);
        }
        all
    }

    /// Whether there would be room if all others gave way that may. Where it is not clear: not.
    fn is_possible(&self, world: &World, group: &Group) -> bool {
        if group.is_parallel && self.fixed_rivals > usize::from(group.is_fixed) {
            return false;
        }
        let own = group.movable(world);
        let room = |gpu: &GpuId| {
            let others = self.movable.get(gpu).copied().unwrap_or(0) - own.get(gpu).copied().unwrap_or(0);
            self.free.get(gpu).map(|free| free + others as i64)
        };
        // Who gives way gives whole allocations.
        let contents = self.contents + group.lack.values().map(|lack| lack + self.largest).sum::<u64>() * 2;
        contents <= world.host.0 && group.lack.iter().all(|(gpu, bytes)| room(gpu).is_some_and(|room| room >= *bytes as i64))
    }

    /// What is left of the turns of all others.
    fn turns_beside(&self, group: &Group) -> Duration {
        self.turns_left.saturating_sub(group.turn_left)
    }
}

impl Group {
    fn movable(&self, world: &World) -> PerGpu {
        let mut all = PerGpu::new();
        for (gpu, memory) in told(world, &self.programs).filter(|_| !self.is_fixed).flat_map(|one| &one.known) {
            *all.entry(*gpu).or_default() += memory.resident.bytes();
        }
        all
    }
}

impl Properties {
    pub fn before(&mut self, world: &World) {
        self.free_before = free(world);
    }

    /// All of them, after an event.
    pub fn check(&mut self, world: &World, event: &Event, step: &Step) {
        self.note(world, event);
        if !self.ready {
            return;
        }
        let changes: Vec<&Change> =
            step.actions.iter().filter_map(|action| if let Action::Change(change) = action { Some(change) } else { None }).collect();
        let groups = Groups::of(self, world);
        self.room_is_enough(world, step, &changes, &groups);
        self.nobody_is_forgotten(world, step, &groups);
        // As things were until now.
        self.out_of_memory_only_if_it_must(world, step);
        self.waits_are_short(world, event, &changes, groups);
        for change in &changes {
            rivals_fit(world, change);
            self.turns_pay_for_changes(world, change);
            self.nobody_leaves_in_vain(world, change);
        }
        self.last = world.now;
    }

    /// 1. Resident, fixed and promised bytes never exceed a GPU, nor contents the host.
    fn room_is_enough(&mut self, world: &World, step: &Step, changes: &[&Change], groups: &Groups) {
        for (gpu, books) in world.scheduler.books() {
            assert!(books.resident + books.fixed + books.promised <= books.total, "(1) {gpu:?}: {books:?}");
        }
        for change in changes {
            let promised =
                lack_of(world, &change.cause).into_iter().map(|(gpu, lack)| (gpu, lack.saturating_sub(leaving_on(change, gpu)))).collect();
            self.promised.insert((world.epoch, change.id), promised);
            let leaves: u64 = change.leaving.iter().map(Leave::contents).sum();
            let comes: u64 = told(world, &change.coming).map(|one| contents_away(&one.known)).sum();
            let others = world.changes.iter().filter(|(key, _)| key.1 < change.id);
            let others: u64 = others.flat_map(|(_, going)| &going.change.leaving).map(Leave::contents).sum();
            let away: u64 = world.all_told().map(|(_, one)| contents_away(&one.known)).sum();
            let all = away + others + leaves - if change.passing { comes } else { 0 };
            assert!(leaves == 0 || all <= world.host.0 + world.host.1, "(1) contents of {all} bytes, room {:?}: {change:?}", world.host);
            let in_files = |contents: u64| contents.saturating_sub(world.host.0);
            let more = in_files(all).saturating_sub(in_files(all + if change.passing { comes } else { 0 } - leaves));
            assert!(change.to_files >= more, "(1) no room in memory: {change:?}");
        }
        self.promised.retain(|key, _| {
            world.changes.get(key).is_some_and(|going| !going.ended && groups.of.contains_key(&going.change.cause.gang()))
        });
        if !step.actions.iter().any(|action| {
            matches!(action, Action::Change(change) if !matches!(change.cause, Cause::IdleFor(..))) || matches!(action, Action::Grant(..))
        }) {
            return;
        }
        for (&gpu, card) in &world.cards {
            let used: u64 = world.programs.values().filter_map(|one| one.memory.get(&gpu)).map(Memory::on_gpu).sum();
            let granted =
                world.programs.values().flat_map(|one| one.asks.values()).filter(|ask| ask.granted).filter_map(|ask| ask.room.get(&gpu));
            let promised: u64 = granted.chain(self.promised.values().filter_map(|promised| promised.get(&gpu))).sum();
            let gives = step.actions.iter().any(|action| match action {
                Action::Grant(program, ask) => {
                    world.programs.get(program).and_then(|one| one.asks.get(ask)).is_some_and(|ask| ask.room.get(&gpu) > Some(&0))
                }
                Action::Change(change) => {
                    self.promised.get(&(world.epoch, change.id)).is_some_and(|promised| promised.get(&gpu).is_some_and(|bytes| *bytes > 0))
                }
                _ => false,
            });
            let limit = card.total.saturating_sub(world.policy.reserve + card.told);
            assert!(!gives || used + promised <= limit, "(1) {gpu:?}: used {used}, promised {promised}, of {limit}: {:?}", step.actions);
        }
    }

    /// 2. There is no waiter that could be served but neither action nor timer.
    fn nobody_is_forgotten(&self, world: &World, step: &Step, groups: &Groups) {
        for (&gang, group) in groups.of.iter().filter(|(_, group)| group.since.is_some()) {
            if world.changes.values().any(|going| concerns(&going.change, gang, &group.programs)) {
                continue;
            }
            assert!(group.because.is_some(), "(2) {gang:?} waits, and nobody knows why");
            if step.wake.is_none() && groups.is_possible(world, group) && world.changes.is_empty() && self.promised.is_empty() {
                let granted = world.all_told().flat_map(|(_, one)| one.asks.values()).any(|ask| ask.granted);
                assert!(granted, "(2) {gang:?} waits, and nothing happens, because {:?}", group.because);
            }
            let (lack, free) = (&group.lack, &groups.free);
            let quiet = world.changes.is_empty() && !group.is_parallel && lack.len() == 1;
            if groups.waiting == 1 && quiet && !matches!(group.because, Some(Because::Retries(_))) {
                assert!(
                    lack.iter().any(|(gpu, bytes)| free[gpu] < *bytes as i64),
                    "(2) {gang:?} waits for {lack:?} while there are {free:?}, because {:?}",
                    group.because
                );
            }
        }
    }

    /// 3. Nobody waits longer than the turns of those ahead, with their changes and drains; and nobody younger is served before.
    fn waits_are_short(&mut self, world: &World, event: &Event, changes: &[&Change], groups: Groups) {
        let passed = world.now.saturating_sub(self.last);
        let moving: Duration = world.changes.values().map(|going| longest(world, &going.change)).sum();
        let more: Duration = changes.iter().map(|change| longest(world, change) + world.policy.rest).sum();
        let mut waits = BTreeMap::new();
        for (&gang, group) in &groups.of {
            let (programs, because) = (&group.programs, group.because);
            let Some(since) = group.since else { continue };
            let known = self.waits.remove(&gang).filter(|wait| wait.since == since && wait.programs == *programs);
            let mut wait = known.unwrap_or_else(|| Wait {
                since,
                begun: world.now,
                programs: programs.clone(),
                excluded: Duration::ZERO,
                allowed: groups.turns_beside(group) + moving + world.policy.rest + SLACK,
                possible: true,
            });
            if !wait.possible {
                wait.excluded += passed;
            }
            wait.possible = groups.is_possible(world, group)
                && !matches!(because, Some(Because::Retries(_)))
                && !self.has_to_age(world, &groups, group, since);
            if world.trace.shown {
                let (lack, free) = (&group.lack, &groups.free);
                println!("             {gang:?} waits since {since:?} for {lack:?} of {free:?}: {because:?}, possible: {}", wait.possible);
            }
            wait.allowed += more;
            if let Event::Done { outcome: Outcome::Changed, .. } | Event::Settled { .. } | Event::Settings(..) = event {
                wait.allowed += groups.turns_beside(group);
            }
            let waited = world.now.saturating_sub(wait.begun).saturating_sub(wait.excluded);
            assert!(
                waited <= wait.allowed,
                "(3) {gang:?} {programs:?} waits for {waited:?}, allowed {:?}, because {because:?}",
                wait.allowed
            );
            waits.insert(gang, wait);
        }
        for change in changes.iter().filter(|change| !matches!(change.cause, Cause::IdleFor(..))) {
            let gang = change.cause.gang();
            self.check_not_overtaken(world, change, &groups, &waits);
            let programs = &groups.of[&gang].programs;
            if groups.of[&gang].since.is_some_and(|since| has_aged(world, programs, since)) {
                let turn = longest(world, change) * (world.policy.k + 2) + world.policy.slice;
                self.aged_until = self.aged_until.max(world.now + turn * 100 / world.policy.low_percent);
            }
        }
        self.waits = waits;
        self.gangs = groups.of.into_iter().map(|(gang, group)| (gang, group.programs)).collect();
    }

    fn check_not_overtaken(&self, world: &World, change: &Change, groups: &Groups, waits: &BTreeMap<GangId, Wait>) {
        let gang = change.cause.gang();
        let this = &groups.of[&gang];
        let on: BTreeSet<GpuId> =
            this.lack.keys().copied().chain(change.leaving.iter().flat_map(|leave| leave.taken.keys().map(|(_, gpu)| *gpu))).collect();
        let since = this.since.unwrap_or_default();
        let may_pass = is_blocked(world, &this.programs);
        for (other, wait) in waits.iter().filter(|(other, wait)| **other != gang && wait.possible) {
            let group = &groups.of[other];
            let needs_room =
                |gpu: &GpuId| group.lack.get(gpu).is_some_and(|lack| *lack as i64 > self.free_before[gpu].max(groups.free[gpu]));
            let concerned = || {
                let mut others = world.changes.values().filter(|going| going.change.id != change.id);
                others.any(|going| concerns(&going.change, *other, &group.programs))
            };
            if !on.iter().any(needs_room) || concerned() {
                continue;
            }
            let fair = may_pass
                || !is_blocked(world, &group.programs)
                    && (this.priority > group.priority
                        || this.priority == group.priority && since <= wait.since
                        || has_aged(world, &this.programs, since)
                        || this.turn_left > Duration::ZERO);
            assert!(
                fair,
                "(3) {:?} overtakes {:?}, which waits since {:?} for {:?}, {:?}, free {:?}: {change:?}",
                this.programs, group.programs, wait.since, group.lack, group.because, groups.free
            );
        }
    }

    /// 4. Changes take at most 1/k of busy time, plus drains.
    ///
    /// Who takes the place of a busy program of its own priority does so only after the turn of that one, which is k times as long as the
    /// change that brought it: so each change is paid for by the turn after it. Who did not drain is left alone.
    fn turns_pay_for_changes(&self, world: &World, change: &Change) {
        let this = of_cause(world, &change.cause);
        for leave in &change.leaving {
            let programs = &leave.programs;
            for id in programs {
                let one = world.told(*id).expect("the scheduler knows of it");
                let left_alone = self.left_alone.get(id).map_or(Duration::ZERO, |(until, _)| *until);
                assert!(world.now >= left_alone, "(4) {id:?} did not drain, and is asked again before {left_alone:?}: {change:?}");
                let (came, took) = one.came;
                let turn = world.policy.slice.max(took * world.policy.k);
                let is_over = took == Duration::ZERO || world.now >= came + turn;
                let busy_for_its_turn = leave.why == Why::TurnOver && !one.held && priority(world, programs) >= priority(world, &this);
                assert!(is_over || !busy_for_its_turn, "(4) {id:?} came at {came:?} by a change of {took:?}: {change:?}");
                let lower = matches!(leave.why, Why::Lower(_));
                assert!(!lower || priority(world, programs) < priority(world, &this), "(4) {id:?} is of no lower priority: {change:?}");
            }
            let idle = told(world, programs).all(|one| {
                let idle_for = world.now.saturating_sub(one.works_since);
                one.held
                    || if one.works() == Activity::Busy {
                        idle_for <= Duration::from_millis(3)
                    } else {
                        one.works() == Activity::Empty || idle_for + Duration::from_millis(2) >= world.policy.rest
                    }
            });
            assert!(leave.why != Why::Idle || idle, "(4) not idle: {leave:?}");
        }
    }

    /// 5. Nobody leaves where there is room, or who must not; no more leaves than is missing, and one allocation.
    fn nobody_leaves_in_vain(&self, world: &World, change: &Change) {
        for id in change.leaving.iter().flat_map(|leave| &leave.programs) {
            assert!(!self.capturing.contains(id) && !self.paused.contains(id), "(5) {id:?} must not leave: {change:?}");
        }
        for leave in &change.leaving {
            assert!(!is_blocked(world, &leave.programs), "(5) one of {:?} waits for room, others may spin: {change:?}", leave.programs);
            let taken_by_class = |class: Class| leave.taken.values().flat_map(Holdings::iter).filter(|(of, ..)| *of == class).count();
            for (program, gpu) in leave.taken.keys() {
                let one = world.told(*program).expect("the scheduler knows of it");
                let free_cache = |holdings: &Holdings| {
                    holdings.iter().filter(|(class, ..)| *class == Class::FreeCache).map(|(_, size, count)| size * count).sum::<u64>()
                };
                let kept = taken_by_class(Class::Kept) > 0 && leave.programs.len() == 1 && leave.taken.len() == 1;
                let all_free = free_cache(&one.known[gpu].resident) <= free_cache(&leave.taken[&(*program, *gpu)]);
                assert!(!kept || all_free, "(5) contents leave while {program:?} has free blocks: {change:?}");
            }
        }
        if matches!(change.cause, Cause::IdleFor(..)) {
            return;
        }
        let lack = lack_of(world, &change.cause);
        let this = of_cause(world, &change.cause);
        let ahead = self.waits.iter().filter(|(gang, _)| **gang != change.cause.gang());
        let mut claimed = PerGpu::<u64>::new();
        for (gpu, bytes) in ahead.filter_map(|(gang, _)| self.gangs.get(gang)).flat_map(|programs| self::lack(world, programs)) {
            *claimed.entry(gpu).or_default() += bytes;
        }
        let free = free(world);
        let missing = |gpu: GpuId, with_claims: bool| {
            // Its own promise is on the books by now.
            let own = self.promised.get(&(world.epoch, change.id)).and_then(|promised| promised.get(&gpu)).copied().unwrap_or(0);
            let available = free[&gpu] + own as i64 - if with_claims { claimed.get(&gpu).copied().unwrap_or(0) as i64 } else { 0 };
            u64::try_from(lack.get(&gpu).copied().unwrap_or(0) as i64 - available).unwrap_or(0)
        };
        for &gpu in world.cards.keys() {
            let moved = leaving_on(change, gpu);
            let largest = change
                .leaving
                .iter()
                .flat_map(|leave| &leave.taken)
                .filter(|((_, on), _)| *on == gpu)
                .map(|(_, taken)| taken.largest())
                .max();
            let largest = largest.unwrap_or(0);
            assert!(
                moved == 0 || moved < missing(gpu, true) + largest,
                "(5) {moved} leave {gpu:?}, {} are missing: {change:?}",
                missing(gpu, true)
            );
        }
        self.idle_before_busy(world, change, &|gpu| missing(gpu, true));
        for (index, leave) in change.leaving.iter().enumerate() {
            let without = |gpu: GpuId| leaving_on(change, gpu) - leave.on(gpu);
            let needed = world.cards.keys().any(|&gpu| leave.on(gpu) > 0 && without(gpu) < missing(gpu, true));
            let rival = is_parallel(world, &this) && is_parallel(world, &leave.programs);
            assert!(needed || rival, "(5) {index} of {change:?} leaves in vain");
        }
    }

    /// 5. No busy one leaves if there is enough of those who are away already, or have nothing to do.
    fn idle_before_busy(&self, world: &World, change: &Change, missing: &dyn Fn(GpuId) -> u64) {
        let busy =
            |leave: &&Leave| matches!(leave.why, Why::Lower(_) | Why::TurnOver) && leave.taken.keys().all(|(_, gpu)| missing(*gpu) > 0);
        let plenty = world.programs.values().map(|one| one.memory.values().map(Memory::own).sum::<u64>()).sum::<u64>() * 2 < world.host.0;
        if !plenty || change.leaving.iter().any(|leave| is_parallel(world, &leave.programs)) {
            return;
        }
        let others = world.changes.iter().filter(|(key, _)| **key != (world.epoch, change.id)).map(|(_, going)| &going.change);
        let moving: BTreeSet<ProgramId> =
            others.flat_map(|other| other.leaving.iter().flat_map(|leave| &leave.programs).chain(&other.coming)).copied().collect();
        let gpus: BTreeSet<GpuId> = change.leaving.iter().filter(busy).flat_map(|leave| leave.taken.keys().map(|(_, gpu)| *gpu)).collect();
        for gpu in &gpus {
            let idle = |(id, one): &(&ProgramId, &Process)| {
                let said_so = world.now > one.works_since + Duration::from_millis(5)
                    && match one.works() {
                        Activity::Empty => true,
                        // Nobody may have looked before, and in its turn, it is safe for a while.
                        Activity::Idle(_) => {
                            world.now > one.works_since + world.policy.rest * 2 && turn_left(world, &[**id]) == Duration::ZERO
                        }
                        Activity::Busy => false,
                    };
                let free = one.in_change.is_none()
                    && !self.paused.contains(id)
                    && !self.capturing.contains(id)
                    && !one.spec.several_nodes
                    && one.partners.is_empty();
                let away = one.held && one.calls_seen.is_none() && one.asks.is_empty();
                let left_alone = self.left_alone.get(id).is_some_and(|(until, _)| world.now < *until);
                free && one.spec.job.is_none() && one.asks.is_empty() && !left_alone && (said_so && !one.held || away)
            };
            let of_idle = world.all_told().filter(idle).filter(|(id, _)| !moving.contains(id)).filter_map(|(_, one)| one.known.get(gpu));
            let of_idle: u64 = of_idle.map(|memory| memory.resident.bytes()).sum();
            assert!(of_idle < missing(*gpu), "(5) a busy one leaves {gpu:?} although {of_idle} bytes of idle ones would do: {change:?}");
        }
    }

    /// 5. A program is out of memory only if its request never fits, or nobody could give way for `wait`.
    fn out_of_memory_only_if_it_must(&mut self, world: &World, step: &Step) {
        let passed = world.now.saturating_sub(self.last);
        let mut unserved = BTreeMap::new();
        for (gang, programs) in &self.gangs {
            let possible = self.waits.get(gang).is_some_and(|wait| wait.possible);
            for &id in programs {
                let Some(one) = world.told(id) else { continue };
                for (&ask, _) in one.asks.iter().filter(|(_, ask)| ask.waits()) {
                    let before = self.unserved.get(&(id, ask)).copied().unwrap_or_default();
                    unserved.insert((id, ask), if possible { before } else { before + passed });
                }
            }
        }
        for action in &step.actions {
            let Action::Refuse(id, ask, refusal) = action else { continue };
            let one = world.told(*id).expect("the scheduler knows of it");
            let asked = &one.asks[ask];
            match refusal {
                Refusal::NeverFits => {
                    let gang = world.scheduler.gang(*id);
                    let gang = world
                        .scheduler
                        .gangs()
                        .find(|(other, ..)| Some(*other) == gang)
                        .map(|(_, programs, _)| programs)
                        .unwrap_or_default();
                    let fits = asked.room.iter().all(|(gpu, bytes)| {
                        let own: u64 = gang
                            .iter()
                            .filter_map(|id| world.told(*id))
                            .map(|one| {
                                let asked: u64 = one.asks.values().filter_map(|ask| ask.room.get(gpu)).sum();
                                one.known.get(gpu).map_or(0, Memory::own) + asked
                            })
                            .sum();
                        own.max(*bytes) <= world.cards[gpu].total - world.policy.reserve
                    });
                    assert!(!fits, "(5) {action:?} could fit");
                }
                Refusal::Unserved(_) => {
                    let waited = self.unserved.get(&(*id, *ask)).copied().unwrap_or_default() + passed;
                    let before = one.remembered.unserved.get(ask).copied().unwrap_or_default();
                    assert!(waited + before + SLACK >= world.policy.wait, "(5) {action:?} after {waited:?} and {before:?}");
                }
            }
        }
        self.unserved = unserved;
    }

    fn note(&mut self, world: &World, event: &Event) {
        if self.epoch != world.epoch {
            *self = Self {
                left_alone: std::mem::take(&mut self.left_alone),
                free_before: std::mem::take(&mut self.free_before),
                epoch: world.epoch,
                last: world.now,
                aged_until: self.aged_until,
                ..Self::default()
            };
        }
        let set = |set: &mut BTreeSet<ProgramId>, id: ProgramId, on: bool| if on { set.insert(id) } else { set.remove(&id) };
        match event {
            Event::Joined(report) => {
                set(&mut self.capturing, report.program, report.capturing);
                set(&mut self.paused, report.program, report.paused);
            }
            Event::Ready => self.ready = true,
            Event::Capturing(id, on) => _ = set(&mut self.capturing, *id, *on),
            Event::Paused(id, on) => _ = set(&mut self.paused, *id, *on),
            Event::Left(id) => {
                self.capturing.remove(id);
                self.paused.remove(id);
            }
            Event::Done { outcome: Outcome::Refused(id), .. } => {
                let failures = self.left_alone.get(id).map_or(0, |(_, failures)| *failures);
                let time = (world.policy.backoff * 2u32.pow(failures.min(10))).min(world.policy.backoff_most);
                self.left_alone.insert(*id, (world.now + time, failures + 1));
            }
            Event::Done { outcome: Outcome::Changed, programs, .. } => {
                programs.iter().filter(|(.., held)| *held).for_each(|(id, ..)| _ = self.left_alone.remove(id));
            }
            _ => (),
        }
    }

    /// Whether these may never give way, as far as the scheduler can know.
    fn is_fixed(&self, world: &World, programs: &[ProgramId]) -> bool {
        let told = || programs.iter().filter_map(|id| world.told(*id).map(|one| (id, one)));
        told().any(|(id, one)| {
            let left_alone = self.left_alone.get(id).is_some_and(|(until, _)| world.now < *until);
            self.paused.contains(id) || self.capturing.contains(id) || left_alone || one.spec.several_nodes
        }) || is_blocked(world, programs)
    }

    fn ages_at(&self, world: &World, since: Duration) -> Duration {
        self.aged_until.max(since + world.policy.slice * (100 - world.policy.low_percent) / world.policy.low_percent)
    }

    /// Whether those of a higher priority go first for now.
    fn has_to_age(&self, world: &World, groups: &Groups, group: &Group, since: Duration) -> bool {
        let higher = groups.priorities.keys().any(|priority| *priority > group.priority);
        higher && world.now < self.ages_at(world, since) + SLACK
    }
}

/// 1. Two gangs of several parts are active on a common GPU only if the most that they may have fits together.
fn rivals_fit(world: &World, change: &Change) {
    let this = of_cause(world, &change.cause);
    if !is_parallel(world, &this) || change.coming.is_empty() {
        return;
    }
    let leaves = |programs: &[ProgramId]| change.leaving.iter().any(|leave| leave.programs.iter().any(|id| programs.contains(id)));
    let runs = |programs: &[ProgramId]| is_parallel(world, programs) && !leaves(programs) && told(world, programs).all(|one| !one.held);
    let others: Vec<_> =
        world.scheduler.gangs().map(|(_, programs, _)| programs).filter(|programs| *programs != this && runs(programs)).collect();
    for (gpu, card) in &world.cards {
        let most = |one: &Process| {
            let memory = one.memory.get(gpu).filter(|memory| memory.own() > memory.fixed)?;
            Some(one.spec.settings.limit.unwrap_or(0).max(memory.peak) - memory.fixed)
        };
        let fixed: u64 = world.all_told().filter_map(|(_, one)| one.known.get(gpu)).map(|memory| memory.fixed).sum();
        let capacity = card.total.saturating_sub(world.policy.reserve + card.told + fixed);
        let of = |programs: &[ProgramId]| told(world, programs).filter_map(most).sum::<u64>().min(capacity);
        let rivals: u64 = others.iter().map(|programs| of(programs)).sum();
        assert!(
            rivals == 0 || of(&this) == 0 || of(&this) + rivals <= capacity,
            "(1) {this:?} comes beside {others:?} on {gpu:?}, of {capacity}"
        );
    }
}

/// 1. Gangs are whole before they run.
pub fn whole(world: &World, id: ProgramId) {
    let one = &world.programs[&id];
    let is_with = |other: &ProgramId, it: &Process| {
        *other == id || one.spec.job.is_some() && it.spec.job == one.spec.job || one.partners.contains(other)
    };
    for (other, it) in world.programs.iter().filter(|(other, it)| is_with(other, it)) {
        assert!(!it.held && it.memory.values().all(|memory| memory.away.bytes() == 0), "(1) {id:?} runs, and {other:?} is away");
    }
}

fn of_cause(world: &World, cause: &Cause) -> Vec<ProgramId> {
    let gang = cause.gang();
    world.scheduler.gangs().find(|(id, ..)| *id == gang).map(|(_, programs, _)| programs).unwrap_or_default()
}

fn lack_of(world: &World, cause: &Cause) -> PerGpu {
    if matches!(cause, Cause::IdleFor(..)) { PerGpu::new() } else { lack(world, &of_cause(world, cause)) }
}

fn has_aged(world: &World, programs: &[ProgramId], since: Duration) -> bool {
    let turn = world.policy.slice * (100 - world.policy.low_percent) / world.policy.low_percent;
    priority(world, programs) < Priority::High && world.now >= since + turn
}

fn free(world: &World) -> PerGpu<i64> {
    world.scheduler.books().into_iter().map(|(gpu, books)| (gpu, books.free(world.policy.reserve))).collect()
}

fn told<'a>(world: &'a World, programs: &'a [ProgramId]) -> impl Iterator<Item = &'a Process> {
    programs.iter().filter_map(|id| world.told(*id))
}

fn lack(world: &World, programs: &[ProgramId]) -> PerGpu {
    let mut lack = PerGpu::new();
    told(world, programs).flat_map(Process::lack).for_each(|(gpu, bytes)| *lack.entry(gpu).or_default() += bytes);
    lack
}

fn waits_since(world: &World, programs: &[ProgramId]) -> Option<Duration> {
    let paused = told(world, programs).any(|one| one.paused_seen);
    told(world, programs).filter_map(|one| one.wants(paused)).min()
}

fn priority(world: &World, programs: &[ProgramId]) -> Priority {
    told(world, programs).map(|one| one.spec.settings.priority).max().unwrap_or_default()
}

fn is_parallel(world: &World, programs: &[ProgramId]) -> bool {
    programs.len() > 1 || told(world, programs).any(|one| one.spec.gpus.len() > 1)
}

fn is_blocked(world: &World, programs: &[ProgramId]) -> bool {
    let asks = |one: &Process| one.asks.values().any(RealAsk::waits);
    is_parallel(world, programs) && told(world, programs).all(|one| !one.held && !one.paused_seen) && told(world, programs).any(asks)
}

fn turn_left(world: &World, programs: &[ProgramId]) -> Duration {
    programs.first().and_then(|id| world.scheduler.remembered(world.scheduler_now(), *id)).map_or(Duration::ZERO, |it| it.turn.1)
}

fn contents_away(memory: &PerGpu<Memory>) -> u64 {
    memory.values().map(|memory| memory.away.contents()).sum()
}

fn leaving_on(change: &Change, gpu: GpuId) -> u64 {
    change.leaving.iter().map(|leave| leave.on(gpu)).sum()
}

fn concerns(change: &Change, gang: GangId, programs: &[ProgramId]) -> bool {
    let all = change.leaving.iter().flat_map(|leave| &leave.programs).chain(&change.coming);
    change.cause.gang() == gang || all.into_iter().any(|id| programs.contains(id))
}

/// The longest that a change may take.
fn longest(world: &World, change: &Change) -> Duration {
    let back = |gpu| told(world, &change.coming).filter_map(|one| one.known.get(gpu)).map(|memory| memory.away.contents()).sum::<u64>();
    let bytes = world.cards.keys().map(|gpu| leaving_on(change, *gpu).max(back(gpu))).max().unwrap_or(0);
    let dear = world.changes.get(&(world.epoch, change.id)).map_or(1, |going| going.dear);
    let pass = if change.passing { 2 } else { 1 };
    world.policy.drain + world.policy.copy(bytes) * 130 / 100 * pass * dear + Duration::from_millis(65)
}
