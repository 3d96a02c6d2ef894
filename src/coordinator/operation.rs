//! What a caller asks for.

use crate::deadline::Deadline;
use crate::engine;
use crate::failure::CommandError;
use crate::nodes::Participant;
use crate::patience::HOLD_WITHIN;
use crate::processes::{Found, Target};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use vramctl_model::{Amounts, Error, PauseOptions, PauseRequest, Selection, Verb};

/// An operation on jobs.
#[derive(Debug, Clone)]
pub struct Operation {
    /// Take memory away, or give it back.
    pub verb: Verb,
    /// The processes.
    pub target: Target,
    /// Which of their memory.
    pub scope: Scope,
    /// How many processes there must be; `None`: as many as when the job was last paused or resumed.
    pub ranks: Option<usize>,
    /// The limit of all waits. That for work in flight may have another ([`Hold`]).
    pub deadline: Deadline,
    /// Pause only: how.
    pub pause: HowToPause,
    /// Resume only: whether it brings back what the programs have paused themselves. `None`: if tags are named.
    pub self_paused: Option<bool>,
    /// The epoch of the scheduler of programs that share GPUs, if it asks: it pauses and resumes beside people.
    pub scheduler: Option<u64>,
    /// If the job has ranks on other nodes: how those here take part.
    pub nodes: Option<Arc<Participant>>,
}

/// Which memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    /// That of tags, all if there are none, on these GPUs, all if there are none.
    Tags {
        /// The tags.
        words: Vec<String>,
        /// Whether the words may also name processes, if the target is [`Target::Only`]: people need not say which is which.
        may_name: bool,
        /// The GPUs, as users name them.
        gpus: Vec<String>,
    },
    /// So many allocations of each process. Only a scheduler can count them.
    Amounts(BTreeMap<u32, Amounts>),
    /// All of it: the tags, and then contexts and loaded code by the driver's checkpoint.
    Device,
    /// The same, and back on other GPUs at once.
    Elsewhere {
        /// The GPUs, as users name them, one for each of the job's own.
        to: Vec<String>,
        /// The job that comes to this one's GPUs.
        swap: Option<Target>,
    },
}

/// How to pause.
#[derive(Debug, Clone, Default)]
pub struct HowToPause {
    /// What each process is asked for.
    pub options: PauseOptions,
    /// The inference engines to ask first.
    pub engines: engine::Addresses,
    /// Whether to hold the programs.
    pub hold: Hold,
    /// Also hold the borrowers: other processes that have the memory open.
    pub shared: bool,
    /// Without tags: also NCCL's own memory.
    pub nccl: bool,
    /// NCCL's communicators whose ranks on other nodes take part.
    pub everywhere: BTreeSet<String>,
    /// A process that waits for this operation, and must not be held by it.
    pub waiting: Option<u32>,
}

/// Whether to hold programs during a pause.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Hold {
    /// The program must be idle, or not use the paused memory.
    No,
    /// For as long as the work in flight may take: what is left of the deadline, or 10 s.
    #[default]
    Yes,
    /// For this long.
    Within(Duration),
}

impl Hold {
    /// How long to wait for work in flight. `None` if the programs are not held.
    pub fn limit(self, deadline: &Deadline) -> Option<Duration> {
        match self {
            Self::No => None,
            Self::Yes => Some(deadline.left().unwrap_or(HOLD_WITHIN)),
            Self::Within(limit) => Some(limit),
        }
    }
}

impl Operation {
    /// On this machine, and with as many processes as when the job was last paused or resumed.
    pub fn new(verb: Verb, target: Target, scope: Scope, deadline: Deadline, pause: HowToPause) -> Self {
        Self { verb, target, scope, ranks: None, deadline, pause, self_paused: None, scheduler: None, nodes: None }
    }

    /// What to take of a process. `None`: all that is selected.
    pub(crate) fn amounts_of(&self, pid: u32) -> Option<Amounts> {
        if let Scope::Amounts(amounts) = &self.scope { Some(amounts.get(&pid).cloned().unwrap_or_default()) } else { None }
    }

    /// Which processes, and which of their tags.
    pub(crate) fn target_and_tags(&self, found: &Found) -> Result<(Target, Vec<String>), CommandError> {
        match &self.scope {
            Scope::Tags { words, may_name: true, .. } => found.separate(self.target.clone(), words.clone()),
            Scope::Tags { words, .. } => Ok((self.target.clone(), words.clone())),
            Scope::Amounts(_) | Scope::Device | Scope::Elsewhere { .. } => Ok((self.target.clone(), Vec::new())),
        }
    }
}

impl HowToPause {
    /// As a request to a process.
    pub fn request(&self, deadline: &Deadline) -> PauseRequest {
        PauseRequest {
            selection: Selection { nccl: self.nccl, ..Selection::default() },
            options: self.options.clone(),
            hold: self.hold.limit(deadline),
            ..PauseRequest::default()
        }
    }

    /// Fails if the process that waits is one of those to be held. The processes themselves see only the operation, not who has started it.
    pub fn check_not_held(&self, mut held: impl Iterator<Item = u32>) -> Result<(), CommandError> {
        let holds_itself = self.waiting.is_some_and(|pid| held.any(|held| held == pid));
        if holds_itself { Err(CommandError::from(&Error::holds_itself())) } else { Ok(()) }
    }
}
