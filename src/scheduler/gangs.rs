//! What is true of a gang as a whole.

use crate::action::Because;
use crate::ids::{AskId, GangId, GpuId, Priority, ProgramId};
use crate::memory::PerGpu;
use crate::state::{Ask, Gang, Program, State, Works};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

impl Program {
    fn waiting(&self) -> impl Iterator<Item = (&AskId, &Ask)> {
        self.asks.iter().filter(|(_, ask)| !ask.granted)
    }
}

impl Gang {
    /// Whether some of it is held, so that none of it may run.
    pub fn is_away(&self) -> bool {
        self.programs.values().any(|program| program.held)
    }

    /// Whether somebody else's pause holds it.
    pub fn is_paused(&self) -> bool {
        self.programs.values().any(|program| program.paused)
    }

    /// Whether work of one of its parts may wait for another part, on the GPU: then it cannot drain while one part waits for room.
    pub fn is_parallel(&self) -> bool {
        let mut gpus = self.on_gpus();
        let first = gpus.next();
        self.programs.len() > 1 || gpus.any(|gpu| Some(gpu) != first)
    }

    /// Whether it is in place, and one part waits for room while others may spin.
    pub fn is_blocked(&self) -> bool {
        self.is_parallel() && !self.is_away() && !self.is_paused() && self.asks().next().is_some()
    }

    /// Until when it is left alone since one of its programs did not drain.
    pub fn left_alone_until(&self) -> Duration {
        self.programs.values().map(|program| program.backoff.until).max().unwrap_or_default()
    }

    pub fn is_capturing(&self) -> bool {
        self.programs.values().any(|program| program.capturing)
    }

    /// What it asks for and has not been granted.
    pub fn asks(&self) -> impl Iterator<Item = (ProgramId, AskId, &Ask)> {
        self.programs.iter().flat_map(|(&program, one)| one.waiting().map(move |(&id, ask)| (program, id, ask)))
    }

    /// Whether nobody could serve it when it was last looked at.
    pub fn is_in_vain(&self) -> bool {
        matches!(self.because, Some(Because::NobodyCan | Because::HostFull | Because::Retries(_)))
    }

    /// Since when it waits; `None` if it does not. The calls of a gang that somebody else has paused are theirs.
    pub fn waits_since(&self) -> Option<Duration> {
        let calls = self.programs.values().filter(|_| self.is_away() && !self.is_paused()).filter_map(|program| program.called);
        self.asks().map(|(.., ask)| ask.since).chain(calls).min()
    }

    /// Its own priority: the highest of its programs'.
    pub fn priority(&self) -> Priority {
        self.programs.values().map(|program| program.settings.priority).max().unwrap_or_default()
    }

    /// The priority against which others take its place.
    pub fn class(&self, now: Duration) -> Priority {
        if now < self.turn.until { self.priority().max(self.turn.class) } else { self.priority() }
    }

    /// How long before it is released, idle; `None` if any program has no such limit.
    pub fn idle_limit(&self) -> Option<Duration> {
        self.programs.values().map(|program| program.settings.idle).try_fold(Duration::ZERO, |most, one| Some(most.max(one?)))
    }

    /// Whether it works: it does if one of its programs does.
    pub fn works(&self) -> Works {
        self.programs.values().map(|program| program.works).fold(Works::Empty, |all, one| match (all, one) {
            (Works::Busy, _) | (_, Works::Busy) => Works::Busy,
            (Works::Unknown, _) | (_, Works::Unknown) => Works::Unknown,
            (Works::Empty, other) | (other, Works::Empty) => other,
            (Works::IdleSince(one), Works::IdleSince(other)) => Works::IdleSince(one.max(other)),
        })
    }

    pub fn gpus(&self) -> BTreeSet<GpuId> {
        self.on_gpus().collect()
    }

    /// The same, some more than once.
    pub fn on_gpus(&self) -> impl Iterator<Item = GpuId> {
        let asked = self.programs.values().flat_map(|program| program.asks.values()).flat_map(|ask| ask.room.keys());
        self.programs.values().flat_map(|program| program.memory.keys()).chain(asked).copied()
    }

    /// What it needs to run and to go on: what is away, if it is to come in, and what it asks for.
    pub fn lack(&self) -> PerGpu {
        let mut lack = PerGpu::new();
        if !self.is_paused() {
            for (&gpu, memory) in self.programs.values().flat_map(|program| &program.memory) {
                *lack.entry(gpu).or_default() += memory.away.bytes();
            }
        }
        for (&gpu, bytes) in self.asks().flat_map(|(.., ask)| &ask.room) {
            *lack.entry(gpu).or_default() += bytes;
        }
        lack.retain(|_, bytes| *bytes > 0);
        lack
    }

    /// The most that it may come to have on a GPU: its programs' limits, else their peaks so far, with what they ask for.
    pub fn ceiling(&self, gpu: GpuId) -> u64 {
        let of = |program: &Program| {
            let asked: u64 = program.asks.values().filter_map(|ask| ask.room.get(&gpu)).sum();
            let now = program.memory.get(&gpu).map_or(0, |memory| memory.peak.max(memory.own() + asked)).max(asked);
            if program.memory.contains_key(&gpu) || asked > 0 { program.settings.limit.unwrap_or(0).max(now) } else { 0 }
        };
        self.programs.values().map(of).sum()
    }

    /// Bytes that stay on a GPU whatever happens.
    pub fn fixed(&self, gpu: GpuId) -> u64 {
        self.programs.values().filter_map(|program| program.memory.get(&gpu)).map(|memory| memory.fixed).sum()
    }

    /// Bytes on a GPU that may leave.
    pub fn resident(&self, gpu: GpuId) -> u64 {
        self.programs.values().filter_map(|program| program.memory.get(&gpu)).map(|memory| memory.resident.bytes()).sum()
    }

    /// Bytes of contents that are away.
    pub fn contents_away(&self) -> u64 {
        self.programs.values().flat_map(|program| program.memory.values()).map(|memory| memory.away.contents()).sum()
    }
}

impl State {
    /// Makes one gang of the programs that hang together: by job, or by memory that one has and another has open. `touched` are those whose
    /// ties have changed. A gang that moves is regrouped when it has arrived.
    pub(crate) fn regroup(&mut self, touched: &BTreeSet<ProgramId>) {
        let ids: BTreeSet<GangId> = touched.iter().filter_map(|program| self.gang(*program)).collect();
        if ids.iter().any(|id| self.gangs[id].moving.is_some() || self.gangs[id].served_by.is_some()) {
            self.ties.push(touched.clone());
            return;
        }
        let mut shells: BTreeMap<GangId, Gang> = ids.into_iter().filter_map(|id| Some((id, self.gangs.remove(&id)?))).collect();
        let take = |gang: &mut Gang| std::mem::take(&mut gang.programs);
        let mut pool: BTreeMap<ProgramId, (GangId, Program)> =
            shells.iter_mut().flat_map(|(&id, gang)| take(gang).into_iter().map(move |(program, one)| (program, (id, one)))).collect();
        while let Some((&first, _)) = pool.first_key_value() {
            let (mut gang, mut next) = (None::<Gang>, vec![first]);
            let id = GangId(first.0);
            while let Some(program) = next.pop() {
                let Some((from, one)) = pool.remove(&program) else { continue };
                let is_tied = |other: &Program| (one.job.is_some() && one.job == other.job) || other.partners.contains(&program);
                next.extend(pool.iter().filter(|(_, (_, other))| is_tied(other)).map(|(&other, _)| other));
                next.extend(&one.partners);
                let shell = shells[&from].clone();
                let mut joined = match gang.take() {
                    Some(gang) => gang.and(&shell),
                    None => shell,
                };
                joined.programs.insert(program, one);
                gang = Some(joined);
                self.gang_of.insert(program, id);
            }
            self.gangs.extend(gang.map(|gang| (id, gang)));
        }
    }
}

impl Gang {
    /// The two as one.
    fn and(mut self, other: &Self) -> Self {
        self.turn.since = self.turn.since.min(other.turn.since);
        self.turn.until = self.turn.until.max(other.turn.until);
        self.turn.class = self.turn.class.max(other.turn.class);
        self
    }
}
