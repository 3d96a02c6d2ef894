//! Who gives way.

use crate::action::{Leave, Why};
use crate::host::Budget;
use crate::ids::{GangId, GpuId, ProgramId};
use crate::memory::{Holdings, PerGpu};
use crate::order::Waiter;
use crate::state::{Gang, State, Works};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// What a waiter needs of others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Bytes by GPU.
    pub bytes: PerGpu,
    /// For a gang of several parts: by how many bytes it and the others of that kind in place may outgrow a GPU. So many must not run beside it.
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
        let works = gang.works();
        let works_elsewhere = gang.programs.values().any(|program| program.several_nodes) && matches!(works, Works::Busy | Works::Unknown);
        if gang.is_paused() || gang.is_capturing() || gang.is_blocked() || (works_elsewhere && !gang.is_away()) {
            return Standing::Never(None);
        }
        if self.now < gang.left_alone_until() {
            return Standing::Never(Some(gang.left_alone_until()));
        }
        if gang.moving.is_some() || gang.served_by.is_some() || ahead.contains(&id) {
            return Standing::Later;
        }
        let waits = gang.waits_since().is_some();
        let in_turn = self.now < gang.turn.until;
        if gang.is_away() {
            return Standing::From(Duration::ZERO, if waits { Why::WaitsBehind } else { Why::Away });
        }
        let rested = match works {
            // It works as soon as it has the room.
            _ if gang.takes_room() || waits && in_turn => None,
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
        let (mut left, mut budget, mut leaving) = (needs.clone(), budget.0, Vec::new());
        for &(id, why) in candidates {
            if left.is_met() {
                break;
            }
            let gang = &self.gangs[&id];
            let taken = gang.cheapest(&left.bytes, &mut budget);
            let is_rival = left.rivals.keys().any(|gpu| gang.runs_on(*gpu));
            if taken.is_empty() && !is_rival {
                continue;
            }
            let leave = Leave { gang: id, programs: gang.programs.keys().copied().collect(), taken, why };
            left = self.without(&left, &leave);
            leaving.push(leave);
        }
        if !left.is_met() {
            return None;
        }
        // A later one may have given so much that an earlier one need not leave.
        for index in (0..leaving.len()).rev() {
            let others = leaving.iter().enumerate().filter(|(other, _)| *other != index);
            if others.fold(needs.clone(), |left, (_, leave)| self.without(&left, leave)).is_met() {
                leaving.remove(index);
            }
        }
        Some(leaving)
    }

    /// What is still needed once these have left.
    fn without(&self, needs: &Needs, leave: &Leave) -> Needs {
        let gang = &self.gangs[&leave.gang];
        let mut left = needs.clone();
        left.bytes.iter_mut().for_each(|(&gpu, bytes)| *bytes = bytes.saturating_sub(leave.on(gpu)));
        left.bytes.retain(|_, bytes| *bytes > 0);
        left.rivals
            .iter_mut()
            .filter(|(gpu, _)| gang.runs_on(**gpu))
            .for_each(|(&gpu, bytes)| *bytes = bytes.saturating_sub(gang.movable_ceiling(gpu)));
        left.rivals.retain(|_, bytes| *bytes > 0);
        left
    }

    /// By how many bytes the gangs of several parts that run on a GPU, and this one, may outgrow it. One alone cannot.
    pub(crate) fn excess(&self, waiter: GangId, gpu: GpuId) -> u64 {
        let capacity = self.capacity(gpu);
        let rivals = self.gangs.iter().filter(|(id, gang)| **id != waiter && gang.runs_on(gpu));
        let rivals: u64 = rivals.map(|(_, gang)| gang.movable_ceiling(gpu).min(capacity)).sum();
        (rivals + self.gangs[&waiter].movable_ceiling(gpu).min(capacity)).saturating_sub(capacity).min(rivals)
    }

    /// Bytes of a GPU for all that can leave it.
    fn capacity(&self, gpu: GpuId) -> u64 {
        let fixed: u64 = self.gangs.values().map(|gang| gang.fixed(gpu)).sum();
        self.gpus.get(&gpu).map_or(0, |it| it.total.saturating_sub(self.policy.reserve + it.unmanaged + fixed))
    }
}

impl Gang {
    /// When it is known whether it is busy: one that is watched since recently may turn out to be idle.
    pub fn known_at(&self, now: Duration, rest: Duration) -> Duration {
        let unknown = self.programs.values().filter(|program| program.works == Works::Unknown && !program.held);
        unknown.map(|program| program.watched.unwrap_or(now) + rest).max().unwrap_or_default()
    }

    /// Whether it is of several parts, which run or are about to, and one of them is on the GPU.
    pub fn runs_on(&self, gpu: GpuId) -> bool {
        self.is_parallel() && (!self.is_away() || self.moving.is_some()) && self.movable_ceiling(gpu) > 0
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

    /// The cheapest of its allocations that give so many bytes by GPU, with at most `budget` bytes of contents.
    fn cheapest(&self, bytes: &PerGpu, budget: &mut u64) -> BTreeMap<(ProgramId, GpuId), Holdings> {
        let mut taken = BTreeMap::<(ProgramId, GpuId), Holdings>::new();
        for (&gpu, &bytes) in bytes {
            let chosen = self.holdings(gpu).cheapest(bytes, *budget);
            *budget -= chosen.contents();
            for (class, size, mut count) in chosen.iter() {
                for (&program, one) in &self.programs {
                    let has = one.memory.get(&gpu).map_or(0, |memory| memory.resident.count(class, size)).min(count);
                    if has > 0 {
                        taken.entry((program, gpu)).or_default().add(class, size, has);
                        count -= has;
                    }
                }
            }
        }
        taken
    }
}
