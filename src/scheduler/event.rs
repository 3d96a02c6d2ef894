//! What the scheduler is told.

use crate::ids::{AskId, ChangeId, GpuId, JobId, Priority, ProgramId};
use crate::memory::{Memory, PerGpu};
use crate::remembered::Remembered;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::time::Duration;

/// What a person sets for a program.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// Its priority.
    pub priority: Priority,
    /// The most bytes on each GPU. The program keeps to it by itself.
    pub limit: Option<u64>,
    /// Idle for so long, the program gives its memory back even if nobody asks.
    pub idle: Option<Duration>,
    /// How long its requests wait while nobody can give way. `None`: as long as the policy says.
    pub wait: Option<Duration>,
}

/// Whether a program works.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Activity {
    /// A call has passed, or nobody has looked.
    Busy,
    /// No call has passed for this long.
    Idle(Duration),
    /// The program itself says that it has nothing to do.
    Empty,
}

/// A request for room, as a program that is asked again tells it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asked {
    /// Its number.
    pub ask: AskId,
    /// Bytes.
    pub room: PerGpu,
    /// How long it has been waiting.
    pub waited: Duration,
    /// Whether it has been granted and the memory is about to be taken.
    pub granted: bool,
}

/// All about a program: when it begins, and when a new scheduler asks. Times are durations, so that they mean the same to the next
/// scheduler.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::struct_excessive_bools)] // independent
pub struct Report {
    /// Who.
    pub program: ProgramId,
    /// The job that it is a rank of.
    pub job: Option<JobId>,
    /// The programs whose memory it has open, and those that have its own open.
    pub partners: BTreeSet<ProgramId>,
    /// Whether the job has ranks on other nodes.
    pub several_nodes: bool,
    /// What a person has set.
    pub settings: Settings,
    /// Its memory.
    pub memory: PerGpu<Memory>,
    /// Whether the scheduler's pause holds it.
    pub held: bool,
    /// Whether somebody else's pause does.
    pub paused: bool,
    /// Whether it captures a graph.
    pub capturing: bool,
    /// Whether it works.
    pub activity: Activity,
    /// How long a call has been waiting for its memory.
    pub called: Option<Duration>,
    /// What it asks for.
    pub asks: Vec<Asked>,
    /// What the last scheduler has left with it.
    pub remembered: Remembered,
}

/// How a change ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// As planned.
    Changed,
    /// All is as before: the programs of this one's gang did not drain, or cannot give their memory away now.
    Refused(ProgramId),
    /// All is as before, for another reason: the room had vanished, the host was short, somebody died.
    Failed,
}

/// What happens. In the order of each program's own doing; a report of a change comes in that order, too.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// A GPU as it is: its bytes, and those of programs that are not managed.
    Gpu {
        /// Which.
        gpu: GpuId,
        /// All bytes.
        total: u64,
        /// Bytes of unmanaged programs.
        unmanaged: u64,
    },
    /// How many bytes of contents the host may have in all. Retained copies of memory that is on the GPU do not count: they go first.
    Host {
        /// Bytes in host memory.
        room: u64,
        /// Bytes in files, for what the host has no room for.
        files: u64,
    },
    /// All programs have reported to this scheduler: it may decide.
    Ready,
    /// A program begins, or is asked again.
    Joined(Box<Report>),
    /// A program has ended.
    Left(ProgramId),
    /// These, and no others, have its memory open, or it has theirs.
    Tied(ProgramId, BTreeSet<ProgramId>),
    /// Its memory has changed, other than by a request or a change of places.
    Memory {
        /// Whose.
        program: ProgramId,
        /// Where.
        gpu: GpuId,
        /// What it is now.
        memory: Memory,
    },
    /// An allocation, a context or a resume of its own needs room.
    Asks {
        /// Who.
        program: ProgramId,
        /// The request's number.
        ask: AskId,
        /// Bytes.
        room: PerGpu,
    },
    /// It has used the room that it was granted, or does without.
    Settled {
        /// Who.
        program: ProgramId,
        /// The request's number.
        ask: AskId,
        /// Its memory now, on the GPUs of the request.
        memory: PerGpu<Memory>,
    },
    /// A call waits for memory that is away.
    Called(ProgramId),
    /// Only while the program is watched; [`Activity::Empty`] at any time.
    Activity(ProgramId, Activity),
    /// It has begun or ended to capture a graph.
    Capturing(ProgramId, bool),
    /// Somebody else has paused it or resumed it.
    Paused(ProgramId, bool),
    /// A pause or resume has ended that the scheduler before this one had begun: whether the program is held for the scheduler now.
    Held(ProgramId, bool),
    /// A person has changed its settings.
    Settings(ProgramId, Settings),
    /// A change of places has ended.
    Done {
        /// Which.
        change: ChangeId,
        /// How.
        outcome: Outcome,
        /// The memory of all that took part and live, and whether the scheduler's pause still holds them.
        programs: Vec<(ProgramId, PerGpu<Memory>, bool)>,
    },
    /// The time for which the scheduler asked has come.
    Timer,
}
