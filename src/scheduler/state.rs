//! What the scheduler knows. Its times count from long before its epoch ([`AGES`]), so that what began before it has one, too.

use crate::action::{Because, Cause, Change};
use crate::event::Settings;
use crate::ids::{AskId, ChangeId, GangId, GpuId, JobId, Priority, ProgramId};
use crate::memory::{Memory, PerGpu};
use crate::policy::Policy;
use crate::remembered::{Paces, Remembered};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The time of the scheduler's epoch, as it counts. Older than any program.
pub(crate) const AGES: Duration = Duration::from_secs(1 << 30);

/// What the scheduler knows.
#[derive(Debug, Clone)]
pub struct State {
    pub(crate) policy: Policy,
    pub(crate) now: Duration,
    /// Whether all programs have reported. Nothing is decided before.
    pub(crate) ready: bool,
    pub(crate) gpus: PerGpu<Gpu>,
    /// Bytes of each GPU for all that can leave it, as of this step.
    pub(crate) capacity: PerGpu,
    pub(crate) host: Host,
    pub(crate) gangs: BTreeMap<GangId, Gang>,
    pub(crate) gang_of: BTreeMap<ProgramId, GangId>,
    pub(crate) changes: BTreeMap<ChangeId, Underway>,
    pub(crate) next_change: u64,
    /// Programs whose ties have changed while their gangs move, as they were told.
    pub(crate) ties: Vec<BTreeSet<ProgramId>>,
}

/// A GPU.
#[derive(Debug, Clone, Default)]
pub(crate) struct Gpu {
    pub total: u64,
    pub unmanaged: u64,
    /// When the last turn ended that a program of a lower priority got because of its age, and when the next may rise.
    pub aged_until: Duration,
    pub rises_again: Duration,
}

/// Where contents go.
#[derive(Debug, Clone, Default)]
pub(crate) struct Host {
    pub room: u64,
    pub files: u64,
}

/// Programs that stay or go together.
#[derive(Debug, Clone, Default)]
pub(crate) struct Gang {
    pub programs: BTreeMap<ProgramId, Program>,
    /// The change that it leaves or comes by.
    pub moving: Option<ChangeId>,
    /// The change that makes room for it.
    pub served_by: Option<ChangeId>,
    pub turn: Turn,
    /// A change for it failed, and it tries again later.
    pub retry: Backoff,
    /// Why it still waits. `None` if it does not.
    pub because: Option<Because>,
}

/// The time for which a gang that a change has brought in keeps its place against its own priority.
#[derive(Debug, Clone, Default)]
pub(crate) struct Turn {
    pub since: Duration,
    pub until: Duration,
    /// The priority that it was chosen with, until the turn ends.
    pub class: Priority,
}

/// A time that doubles from failure to failure.
#[derive(Debug, Clone, Default)]
pub(crate) struct Backoff {
    pub until: Duration,
    /// How long it will be after the next failure; zero: the policy's first.
    pub next: Duration,
}

/// A process.
#[derive(Debug, Clone)]
#[allow(clippy::struct_excessive_bools)] // independent
pub(crate) struct Program {
    pub job: Option<JobId>,
    pub partners: BTreeSet<ProgramId>,
    pub several_nodes: bool,
    pub settings: Settings,
    pub memory: PerGpu<Memory>,
    pub held: bool,
    pub paused: bool,
    pub capturing: bool,
    pub works: Works,
    /// Since when it is to tell whether it is idle.
    pub watched: Option<Duration>,
    /// It did not drain, and is left alone.
    pub backoff: Backoff,
    pub paces: Paces,
    /// Since when a call waits.
    pub called: Option<Duration>,
    pub asks: BTreeMap<AskId, Ask>,
}

/// Whether a program works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Works {
    /// Nobody looks.
    Unknown,
    Busy,
    IdleSince(Duration),
    Empty,
}

/// A request for room.
#[derive(Debug, Clone)]
pub(crate) struct Ask {
    pub room: PerGpu,
    pub since: Duration,
    /// For how long nobody could give way.
    pub unserved: Duration,
    pub granted: bool,
}

/// A change of places that has begun.
#[derive(Debug, Clone)]
pub(crate) struct Underway {
    pub change: Change,
    pub began: Duration,
    /// How long it takes if the links alone decide.
    pub expected: Duration,
    /// All GPUs of those that take part.
    pub gpus: BTreeSet<GpuId>,
    /// Room for the waiter, beside what the others give back for it.
    pub promised: PerGpu,
    /// Bytes of contents that leave, and that come.
    pub contents: (u64, u64),
    /// The priority that the waiter was chosen with.
    pub class: Priority,
    /// Since when it had waited.
    pub since: Duration,
}

/// The bytes of a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Books {
    /// All.
    pub total: u64,
    /// Of unmanaged programs.
    pub unmanaged: u64,
    /// Managed allocations.
    pub resident: u64,
    /// Contexts, and what programs leave to CUDA.
    pub fixed: u64,
    /// Room that somebody is about to take.
    pub promised: u64,
}

impl Books {
    /// What may be given to somebody; negative if unmanaged programs have taken too much.
    pub fn free(&self, reserve: u64) -> i64 {
        self.total as i64 - (reserve + self.unmanaged + self.resident + self.fixed + self.promised) as i64
    }
}

impl State {
    /// Knows nothing yet.
    pub fn new(policy: Policy) -> Self {
        Self {
            policy,
            now: AGES,
            ready: false,
            gpus: BTreeMap::new(),
            capacity: PerGpu::new(),
            host: Host::default(),
            gangs: BTreeMap::new(),
            gang_of: BTreeMap::new(),
            changes: BTreeMap::new(),
            next_change: 0,
            ties: Vec::new(),
        }
    }

    /// The constants.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The bytes of all GPUs.
    pub fn books(&self) -> PerGpu<Books> {
        let mut all: PerGpu<Books> =
            self.gpus.iter().map(|(&id, gpu)| (id, Books { total: gpu.total, unmanaged: gpu.unmanaged, ..Books::default() })).collect();
        let programs = || self.gangs.values().flat_map(|gang| gang.programs.values());
        for (id, memory) in programs().flat_map(|program| &program.memory) {
            if let Some(books) = all.get_mut(id) {
                books.resident += memory.resident.bytes();
                books.fixed += memory.fixed;
            }
        }
        let granted = programs().flat_map(|program| program.asks.values()).filter(|ask| ask.granted).flat_map(|ask| &ask.room);
        for (id, bytes) in granted.chain(self.changes.values().flat_map(|underway| &underway.promised)) {
            if let Some(books) = all.get_mut(id) {
                books.promised += bytes;
            }
        }
        all
    }

    /// The gang that a program is in.
    pub fn gang(&self, program: ProgramId) -> Option<GangId> {
        self.gang_of.get(&program).copied()
    }

    /// All gangs with their programs and why they still wait, if they do.
    pub fn gangs(&self) -> impl Iterator<Item = (GangId, Vec<ProgramId>, Option<Because>)> {
        let because = |gang: &Gang| {
            Some(match gang.because? {
                Because::Until(at) => Because::Until(at.saturating_sub(AGES)),
                Because::Retries(at) => Because::Retries(at.saturating_sub(AGES)),
                other => other,
            })
        };
        self.gangs.iter().map(move |(&id, gang)| (id, gang.programs.keys().copied().collect(), because(gang)))
    }

    /// What the next scheduler cannot ask the program otherwise. `now`: since the epoch.
    pub fn remembered(&self, now: Duration, program: ProgramId) -> Option<Remembered> {
        let now = self.now.max(AGES + now);
        let gang = self.gangs.get(self.gang_of.get(&program)?)?;
        let (one, left) = (&gang.programs[&program], |until: Duration| until.saturating_sub(now));
        Some(Remembered {
            held: one.held,
            turn: (now.saturating_sub(gang.turn.since), left(gang.turn.until), gang.turn.class),
            backoff: (left(one.backoff.until), one.backoff.next),
            paces: one.paces,
            unserved: one.asks.iter().map(|(&id, ask)| (id, ask.unserved)).collect(),
        })
    }

    /// Changes a program, if it still exists.
    pub(crate) fn with(&mut self, program: ProgramId, change: impl FnOnce(&mut Program)) {
        if let Some(one) = self.program(program) {
            change(one);
        }
    }

    pub(crate) fn program(&mut self, program: ProgramId) -> Option<&mut Program> {
        self.gangs.get_mut(self.gang_of.get(&program)?)?.programs.get_mut(&program)
    }
}

impl Cause {
    /// The gang for which the change is.
    pub fn gang(self) -> GangId {
        match self {
            Self::Called(gang) | Self::Asks(gang) | Self::IdleFor(gang, _) => gang,
        }
    }
}
