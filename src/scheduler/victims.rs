//! Who gives way.

use crate::action::{Because, Leave, Why};
use crate::host::Budget;
use crate::ids::{GangId, GpuId, ProgramId};
use crate::memory::{Holdings, PerGpu};
use crate::order::Waiter;
use crate::state::{Gang, Program, State, Works};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// What a waiter needs of others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Bytes by GPU.
    pub bytes: PerGpu,
    /// For a gang of several parts: by how many bytes it and the others of that kind in place may outgrow a GPU. So many must not run
    /// beside it.
    pub rivals: PerGpu,
}

impl Needs {
    pub fn is_met(&self) -> bool {
        self.bytes.is_empty() && self.rivals.is_empty()
    }

    /// The GPUs on which others have to give way.
    pub fn gpus(&self) -> impl Iterator<Item = GpuId> {
        self.bytes.keys().chain(self.rivals.keys()).copied()
    }
}

/// Whether a gang may give way to a waiter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    /// Not as things are; perhaps from a time on.
    Never(Option<Duration>),
    /// Once something else has happened.
    Later,
    /// From a time on.
    From(Duration, Why),
}

impl State {
    /// Whether and when the gang may give way to the waiter. `ahead` are the waiters that are served first.
    pub(crate) fn standing(&self, gang: &Gang, id: GangId, waiter: &Waiter, needs: &Needs, ahead: &BTreeSet<GangId>) -> Standing {
        if let Some(never) = gang.stays(self.now) {
            return never;
        }
        let works = gang.works();
        if gang.moving.is_some() || gang.served_by.is_some() || ahead.contains(&id) {
            return Standing::Later;
        }
        let waits = gang.waits_since().is_some();
        let in_turn = self.now < gang.turn.until;
        if gang.is_away() {
            return Standing::From(Duration::ZERO, if waits { Why::WaitsBehind } else { Why::Away });
        }
        let rested = match works {
            Works::Empty => Some(Duration::ZERO),
            // In its turn, a program that may soon go on is worth what it costs to bring back.
            Works::IdleSince(since) if in_turn => Some(since + self.policy.rest.max(self.return_cost(gang, needs))),
            Works::IdleSince(since) => Some(since + self.policy.rest),
            Works::Busy | Works::Unknown => None,
        };
        if let Some(rested) = rested.filter(|rested| *rested <= self.now) {
            return Standing::From(rested, Why::Idle);
        }
        let class = gang.class(self.now);
        // Its turn is of no use while it waits, and its own room comes later.
        if waits && class <= waiter.class {
            return Standing::From(Duration::ZERO, Why::WaitsBehind);
        }
        let busy = if class < waiter.own {
            Standing::From(gang.known_at(self.now, self.policy.rest), if waits { Why::WaitsBehind } else { Why::Lower(class) })
        } else if gang.priority() <= waiter.class {
            let from = gang.turn.until.max(gang.known_at(self.now, self.policy.rest));
            Standing::From(from, if waits { Why::WaitsBehind } else { Why::TurnOver })
        } else {
            Standing::Later
        };
        match (busy, rested) {
            (Standing::From(from, _), Some(rested)) if rested < from => Standing::From(rested, Why::Idle),
            (Standing::Later, Some(rested)) => Standing::From(rested, Why::Idle),
            _ => busy,
        }
    }

    /// What it takes to bring back what the gang would give.
    fn return_cost(&self, gang: &Gang, needs: &Needs) -> Duration {
        let contents = |(&gpu, &bytes): (&GpuId, &u64)| gang.holdings(gpu).cheapest(bytes, u64::MAX).contents();
        self.policy.overhead + self.policy.copy(needs.bytes.iter().map(contents).max().unwrap_or(0))
    }

    /// The order in which gangs that may give way do.
    pub(crate) fn preference(&self, id: GangId, why: Why) -> (Why, Duration, GangId) {
        let gang = &self.gangs[&id];
        let since = match gang.works() {
            Works::IdleSince(since) if why == Why::Idle => since,
            Works::Empty => Duration::ZERO,
            _ => gang.turn.since,
        };
        (why, since, id)
    }

    /// Chooses of the candidates, in their order, those that are needed, and of their memory what is missing. `None` if all do not suffice.
    pub(crate) fn cover(&self, needs: &Needs, candidates: &[(GangId, Why)], budget: Budget) -> Option<Vec<Leave>> {
        // If there is no place for the contents of the first, all give first what has none: a GPU may need the place that another can do
        // without.
        [&[budget.0][..], &[0, budget.0]].into_iter().find_map(|budgets| self.choose(needs, candidates, budgets))
    }

    /// The same in so many rounds, each with room for so many bytes of contents.
    fn choose(&self, needs: &Needs, candidates: &[(GangId, Why)], budgets: &[u64]) -> Option<Vec<Leave>> {
        let (mut left, mut chosen) = (needs.clone(), BTreeMap::new());
        for &budget in budgets {
            let mut budget = budget;
            for &(id, _) in candidates {
                if left.is_met() {
                    break;
                }
                let (gang, is_first) = (&self.gangs[&id], !chosen.contains_key(&id));
                let bytes = gang.take_cheapest(&left.bytes, &mut budget, chosen.entry(id).or_default());
                let rivals = if is_first { self.rivals(gang, &left) } else { PerGpu::new() };
                left = left.without(&Needs { bytes, rivals });
            }
        }
        if !left.is_met() {
            return None;
        }
        let leave = |&(id, why): &(GangId, Why)| {
            let programs = self.gangs[&id].programs.keys().copied().collect();
            Some(Leave { gang: id, programs, taken: chosen.remove(&id)?, why })
        };
        let mut leaving: Vec<Leave> = candidates.iter().filter_map(leave).collect();
        // A later one may have given so much that an earlier one need not leave.
        let mut given = leaving.iter().fold(Needs::default(), |given, leave| given.and(&self.gives(needs, leave)));
        for index in (0..leaving.len()).rev() {
            let rest = given.without(&self.gives(needs, &leaving[index]));
            if needs.without(&rest).is_met() {
                leaving.remove(index);
                given = rest;
            }
        }
        Some(leaving)
    }

    /// What a gang gives of what is needed.
    fn gives(&self, needs: &Needs, leave: &Leave) -> Needs {
        let bytes = needs.bytes.keys().map(|&gpu| (gpu, leave.on(gpu))).collect();
        Needs { bytes, rivals: self.rivals(&self.gangs[&leave.gang], needs) }
    }

    /// By how many bytes fewer the others may outgrow each GPU if the gang leaves.
    fn rivals(&self, gang: &Gang, needs: &Needs) -> PerGpu {
        needs.rivals.keys().filter(|gpu| gang.runs_on(**gpu)).map(|&gpu| (gpu, self.most_of(gang, gpu))).collect()
    }

    /// The most that a gang may come to have on a GPU of what can leave it.
    fn most_of(&self, gang: &Gang, gpu: GpuId) -> u64 {
        gang.movable_ceiling(gpu).min(self.capacity.get(&gpu).copied().unwrap_or(0))
    }

    /// By how many bytes the gangs of several parts that run on a GPU, and this one, may outgrow it. One alone cannot.
    pub(crate) fn excess(&self, totals: &Totals, gang: &Gang, gpu: GpuId) -> u64 {
        let own = self.most_of(gang, gpu);
        let runs = if gang.runs_on(gpu) { own } else { 0 };
        let others = totals.rivals.get(&gpu).map_or(0, |all| all.saturating_sub(runs));
        (others + own).saturating_sub(self.capacity.get(&gpu).copied().unwrap_or(0)).min(others)
    }

    /// Why all others together could not give what the waiter's gang needs, with this much room for contents; `None` if they could.
    pub(crate) fn in_vain(&self, totals: &Totals, gang: &Gang, needs: &Needs, budget: Budget) -> Option<Because> {
        let is_one = gang.stays(self.now).is_none();
        let own = |gpu: &GpuId| if is_one { gang.resident(*gpu) } else { 0 };
        let own_rival = |gpu: &GpuId| if is_one && gang.runs_on(*gpu) { self.most_of(gang, *gpu) } else { 0 };
        let suffice = |all: &PerGpu, gpu, own, bytes: &u64| all.get(gpu).is_some_and(|all| *bytes <= all.saturating_sub(own));
        if !needs.bytes.iter().all(|(gpu, bytes)| suffice(&totals.movable, gpu, own(gpu), bytes))
            || !needs.rivals.iter().all(|(gpu, bytes)| suffice(&totals.movable_rivals, gpu, own_rival(gpu), bytes))
        {
            return Some(Because::NobodyCan);
        }
        let contents = needs.bytes.iter().map(|(gpu, bytes)| bytes.saturating_sub(totals.without_contents.get(gpu).copied().unwrap_or(0)));
        Some(Because::HostFull).filter(|_| contents.sum::<u64>() > budget.0)
    }

    /// What all gangs together have.
    pub(crate) fn totals(&self) -> Totals {
        let mut all = Totals { contents: self.contents(), ..Totals::default() };
        for gang in self.gangs.values() {
            let stays = gang.stays(self.now);
            if let Some(Standing::Never(Some(until))) = stays {
                all.left_alone_until = Some(all.left_alone_until.map_or(until, |first| first.min(until)));
            }
            for (&gpu, memory) in gang.programs.values().flat_map(|program| &program.memory).filter(|_| stays.is_none()) {
                *all.movable.entry(gpu).or_default() += memory.resident.bytes();
                *all.without_contents.entry(gpu).or_default() += memory.resident.bytes() - memory.resident.contents();
            }
            if !gang.is_parallel() {
                continue;
            }
            for gpu in gang.gpus().into_iter().filter(|gpu| gang.runs_on(*gpu)) {
                let most = self.most_of(gang, gpu);
                *all.rivals.entry(gpu).or_default() += most;
                *all.movable_rivals.entry(gpu).or_default() += if stays.is_none() { most } else { 0 };
            }
        }
        all
    }
}

/// What all gangs together have. To ask each gang for each waiter would take too long among a thousand.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    /// Bytes of those that may give way now or later.
    movable: PerGpu,
    /// Of these, bytes without contents.
    without_contents: PerGpu,
    /// How many bytes gangs of several parts that run may come to have.
    rivals: PerGpu,
    /// The same of those that may give way.
    movable_rivals: PerGpu,
    /// Bytes of contents that are away, or about to leave.
    pub contents: u64,
    /// When the first gang may give way again that did not drain.
    pub left_alone_until: Option<Duration>,
}

impl Needs {
    /// Both.
    fn and(mut self, other: &Self) -> Self {
        for (mine, others) in [(&mut self.bytes, &other.bytes), (&mut self.rivals, &other.rivals)] {
            for (&gpu, bytes) in others {
                *mine.entry(gpu).or_default() += bytes;
            }
        }
        self
    }

    /// What is left of it without those.
    fn without(&self, those: &Self) -> Self {
        let mut left = self.clone();
        for (mine, others) in [(&mut left.bytes, &those.bytes), (&mut left.rivals, &those.rivals)] {
            mine.retain(|gpu, bytes| {
                *bytes = bytes.saturating_sub(others.get(gpu).copied().unwrap_or(0));
                *bytes > 0
            });
        }
        left
    }
}

impl Gang {
    /// [`Standing::Never`] if it gives way to nobody as things are.
    fn stays(&self, now: Duration) -> Option<Standing> {
        let works_elsewhere =
            || self.programs.values().any(|program| program.several_nodes) && matches!(self.works(), Works::Busy | Works::Unknown);
        if self.is_paused() || self.is_capturing() || self.is_blocked() || !self.is_away() && works_elsewhere() {
            return Some(Standing::Never(None));
        }
        Some(self.left_alone_until()).filter(|until| now < *until).map(|until| Standing::Never(Some(until)))
    }

    /// When it is known whether it is busy: one that is watched since recently may turn out to be idle, whatever it has said first.
    pub fn known_at(&self, now: Duration, rest: Duration) -> Duration {
        let known = |program: &Program| match program.works {
            Works::Empty => Duration::ZERO,
            Works::Unknown | Works::Busy => program.watched.unwrap_or(now) + rest,
            Works::IdleSince(since) => since.min(program.watched.unwrap_or(now) + rest) + rest,
        };
        self.programs.values().filter(|program| !program.held).map(known).max().unwrap_or_default()
    }

    /// Whether it is of several parts, which run or are about to, and one of them is on the GPU. Jobs that wait for their first memory do
    /// not keep each other from it.
    pub fn runs_on(&self, gpu: GpuId) -> bool {
        let has_something = |program: &Program| {
            program.memory.get(&gpu).is_some_and(|memory| memory.own() > 0)
                || program.asks.values().any(|ask| ask.granted && ask.room.contains_key(&gpu))
        };
        self.is_parallel()
            && (!self.is_away() || self.moving.is_some())
            && self.movable_ceiling(gpu) > 0
            && self.programs.values().any(has_something)
    }

    fn movable_ceiling(&self, gpu: GpuId) -> u64 {
        self.ceiling(gpu) - self.fixed(gpu)
    }

    /// What its programs have on a GPU.
    fn holdings(&self, gpu: GpuId) -> Holdings {
        let mut all = Holdings::default();
        self.programs.values().filter_map(|program| program.memory.get(&gpu)).for_each(|memory| all.add_all(&memory.resident));
        all
    }

    /// Takes the cheapest of its allocations that give so many bytes by GPU, beside those that are taken, with at most `budget` bytes of
    /// contents. Returns what they give.
    fn take_cheapest(&self, bytes: &PerGpu, budget: &mut u64, taken: &mut BTreeMap<(ProgramId, GpuId), Holdings>) -> PerGpu {
        let mut gives = PerGpu::new();
        for (&gpu, &bytes) in bytes {
            let mut there = self.holdings(gpu);
            taken.iter().filter(|((_, on), _)| *on == gpu).for_each(|(_, gone)| there.remove_all(gone));
            let chosen = there.cheapest(bytes, *budget);
            *budget -= chosen.contents();
            gives.insert(gpu, chosen.bytes());
            for (class, size, mut count) in chosen.iter() {
                for (&program, one) in &self.programs {
                    let gone = taken.get(&(program, gpu)).map_or(0, |gone| gone.count(class, size));
                    let has = one.memory.get(&gpu).map_or(0, |memory| memory.resident.count(class, size) - gone).min(count);
                    if has > 0 {
                        taken.entry((program, gpu)).or_default().add(class, size, has);
                        count -= has;
                    }
                }
            }
        }
        gives
    }
}
