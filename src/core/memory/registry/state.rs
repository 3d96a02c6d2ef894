//! The states of an allocation: all of them are variants of [`State`], and each change of one is a function of it.

use std::mem;
use std::sync::Arc;
use vramctl_backup::Backup;
use vramctl_driver::Physical;

/// Where the contents of an allocation are. Changes only under the transition lock: exclusive for pauses and resumes, shared for a free.
///
/// ```text
/// Active ──unmapped──▶ Unmapped ──release──▶ Released ──activate──▶ Active
///   ▲ ▲                   │ │
///   │ └────mapped again───┘ └──strand──▶ Stranded          each ──free──▶ Freed
///   └──────────────────────mapped again─────┘
/// ```
///
/// An import is released while it is active, when its owner pauses it.
#[derive(Debug)]
pub enum State {
    /// The memory is mapped wherever the program has it.
    Active(Present),
    /// A pause in progress has unmapped the memory. It still has the contents, so the pause can be undone.
    Unmapped(Present, PausedBy),
    /// A failed pause could not map the memory again. It still has the contents, and the next transition maps it. Counts as paused.
    Stranded(Present, PausedBy),
    /// Paused: the physical memory is released, and the addresses are kept. So is an import that its owner has paused.
    Released(Released),
    /// The program has freed it, or it ended with its context.
    Freed,
}

/// Memory that exists.
#[derive(Debug)]
pub struct Present {
    /// The physical memory.
    pub memory: Physical,
    /// The backup of the last pause, if the tag retains it.
    pub retained: Option<Arc<Backup>>,
}

/// What is left of released memory.
#[derive(Debug)]
pub struct Released {
    /// The contents; `None` if they were discarded.
    pub saved: Option<Arc<Backup>>,
    /// The block that is mapped in place of the memory, if any (`guard`).
    pub guard: Option<Physical>,
    /// Who wants the memory to be paused.
    pub by: PausedBy,
}

/// Who wants memory to be paused. When one of them no longer does, it stays paused for the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PausedBy {
    program: bool,
    others: bool,
    scheduler: bool,
}

impl PausedBy {
    /// Only another process.
    pub const OTHERS: Self = Self { program: false, others: true, scheduler: false };
    /// Only the program itself.
    pub const PROGRAM: Self = Self { program: true, others: false, scheduler: false };
    /// Only the scheduler of programs that share GPUs: the program's calls bring the memory back.
    pub const SCHEDULER: Self = Self { program: false, others: false, scheduler: true };

    /// With another pause of the same memory.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self { program: self.program || other.program, others: self.others || other.others, scheduler: self.scheduler || other.scheduler }
    }

    /// Once the scheduler no longer wants it.
    #[must_use]
    pub fn without_scheduler(self) -> Self {
        Self { scheduler: false, ..self }
    }

    /// Whether the program itself wants it to be paused.
    pub fn is_self_paused(self) -> bool {
        self.program
    }

    /// Whether anybody else does: the program is held meanwhile.
    pub fn is_held(self) -> bool {
        self.others || self.scheduler
    }

    /// Whether another process does that is not the scheduler.
    pub fn is_by_others(self) -> bool {
        self.others
    }
}

impl State {
    /// With memory that is mapped.
    pub(in crate::memory) fn active(memory: Physical, retained: Option<Arc<Backup>>) -> Self {
        Self::Active(Present { memory, retained })
    }

    /// Whether the program's addresses are mapped to its memory.
    pub fn is_active(&self) -> bool {
        matches!(self, Self::Active(_))
    }

    /// The physical memory, mapped or not.
    pub fn memory(&self) -> Option<&Physical> {
        match self {
            Self::Active(present) | Self::Unmapped(present, _) | Self::Stranded(present, _) => Some(&present.memory),
            Self::Released(_) | Self::Freed => None,
        }
    }

    /// The same, to map or unmap it.
    pub(in crate::memory) fn memory_mut(&mut self) -> Option<&mut Physical> {
        match self {
            Self::Active(present) | Self::Unmapped(present, _) | Self::Stranded(present, _) => Some(&mut present.memory),
            Self::Released(_) | Self::Freed => None,
        }
    }

    /// The guard under released memory.
    pub fn guard(&self) -> Option<&Physical> {
        if let Self::Released(released) = self { released.guard.as_ref() } else { None }
    }

    /// The same, to change it; `None` unless the memory is released.
    pub(in crate::memory) fn guard_mut(&mut self) -> Option<&mut Option<Physical>> {
        if let Self::Released(released) = self { Some(&mut released.guard) } else { None }
    }

    /// What the driver maps at the program's addresses, if anything.
    pub(in crate::memory) fn backing(&self) -> Option<&Physical> {
        self.memory().or_else(|| self.guard())
    }

    /// The same, to change where it is mapped.
    pub(in crate::memory) fn backing_mut(&mut self) -> Option<&mut Physical> {
        match self {
            Self::Active(present) | Self::Unmapped(present, _) | Self::Stranded(present, _) => Some(&mut present.memory),
            Self::Released(released) => released.guard.as_mut(),
            Self::Freed => None,
        }
    }

    /// The contents of released memory, if they were kept.
    pub fn saved(&self) -> Option<&Arc<Backup>> {
        if let Self::Released(released) = self { released.saved.as_ref() } else { None }
    }

    /// Replaces the contents of released memory by the same in another place. Returns where they were.
    pub(crate) fn replace_saved(&mut self, now: Arc<Backup>) -> Option<Arc<Backup>> {
        if let Self::Released(released) = self { released.saved.replace(now) } else { None }
    }

    /// The backup that exists: the contents of released memory, or what was retained of the last pause.
    pub fn backup(&self) -> Option<&Arc<Backup>> {
        match self {
            Self::Active(present) | Self::Unmapped(present, _) | Self::Stranded(present, _) => present.retained.as_ref(),
            Self::Released(released) => released.saved.as_ref(),
            Self::Freed => None,
        }
    }

    /// Takes the retained backup of active memory, which only saves time. To be dropped without a lock.
    pub(crate) fn take_retained(&mut self) -> Option<Arc<Backup>> {
        if let Self::Active(present) = self { present.retained.take() } else { None }
    }

    /// Who wants the memory to be paused, from the moment that a pause unmaps it.
    pub fn paused_by(&self) -> Option<PausedBy> {
        match self {
            Self::Unmapped(_, by) | Self::Stranded(_, by) => Some(*by),
            Self::Released(released) => Some(released.by),
            Self::Active(_) | Self::Freed => None,
        }
    }

    /// Changes who wants released memory to be paused.
    pub(crate) fn set_paused_by(&mut self, change: impl FnOnce(PausedBy) -> PausedBy) {
        if let Self::Released(released) = self {
            released.by = change(released.by);
        }
    }

    /// A pause has unmapped active memory.
    pub(in crate::memory) fn unmapped(&mut self, by: PausedBy) {
        self.change(|state| if let Self::Active(present) = state { Self::Unmapped(present, by) } else { state });
    }

    /// Unmapped memory has been mapped again.
    pub(in crate::memory) fn mapped_again(&mut self) {
        self.change(|state| match state {
            Self::Unmapped(present, _) | Self::Stranded(present, _) => Self::Active(present),
            other => other,
        });
    }

    /// Unmapped memory cannot be mapped again.
    pub(crate) fn strand(&mut self) {
        self.change(|state| if let Self::Unmapped(present, by) = state { Self::Stranded(present, by) } else { state });
    }

    /// Released, with the contents where they were `saved`. Returns the state before: dropping that gives the memory back to the driver.
    pub(in crate::memory) fn release(&mut self, saved: Option<Arc<Backup>>) -> Self {
        let by = self.paused_by().unwrap_or(PausedBy::OTHERS);
        mem::replace(self, Self::Released(Released { saved, guard: None, by }))
    }

    /// Active again, with new memory. Returns the state before: dropping that frees the backup, unless it is `retained`.
    pub(in crate::memory) fn activate(&mut self, memory: Physical, retained: Option<Arc<Backup>>) -> Self {
        mem::replace(self, Self::active(memory, retained))
    }

    /// Freed. Returns the state before, with what is to be dropped.
    pub(in crate::memory) fn free(&mut self) -> Self {
        mem::replace(self, Self::Freed)
    }

    fn change(&mut self, change: impl FnOnce(Self) -> Self) {
        *self = change(self.free());
    }
}
