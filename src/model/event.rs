//! What has happened to the memory of a process, one thing at a time.

use crate::{Kind, Stage, StatusCode, Verb};
use serde::{Deserialize, Serialize};

/// Something that happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceEvent {
    /// The process's events are numbered as they are recorded. Numbers that are missing were overwritten.
    pub number: u64,
    /// When, by the system's monotonic clock, in nanoseconds: the same clock for all processes of a host.
    pub at_ns: u64,
    /// What.
    #[serde(flatten)]
    pub what: Happening,
}

/// What happened. `owner` is an index into the owners that come with the events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Happening {
    /// Memory was allocated.
    Allocated(OwnersBytes),
    /// Memory was freed.
    Freed(OwnersBytes),
    /// Paused memory was freed, which took nothing on the device any more.
    FreedPaused(OwnersBytes),
    /// A pause gave memory back to the driver.
    Paused(OwnersBytes),
    /// A resume took memory from the driver again.
    Resumed(OwnersBytes),
    /// A request for memory failed.
    Failed {
        /// Who asked.
        owner: u16,
        /// For how much.
        bytes: u64,
        /// The driver's code.
        code: StatusCode,
    },
    /// A pause or resume has begun.
    Began {
        /// Which of them.
        verb: Verb,
        /// The thread.
        thread: u32,
    },
    /// A stage of it has ended.
    Stage {
        /// The stage.
        stage: Stage,
        /// The thread.
        thread: u32,
        /// How long it took.
        ns: u64,
    },
    /// It has ended.
    Ended {
        /// Which of them.
        verb: Verb,
        /// The thread.
        thread: u32,
        /// How long it took.
        ns: u64,
        /// What it paused or resumed.
        bytes: u64,
        /// Why it failed, if it did.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<Kind>,
    },
    /// The program's allocator has returned what it held without using it.
    Trimmed {
        /// The thread that waited for it.
        thread: u32,
        /// How long it took.
        ns: u64,
        /// How much it has returned.
        bytes: u64,
    },
}

/// A change of what an owner has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnersBytes {
    /// Whose memory.
    pub owner: u16,
    /// How much.
    pub bytes: u64,
    /// What the owner has on the device afterwards. Two threads may record theirs in the other order.
    pub in_use: u64,
}

/// Who has memory on a device: a tag, or a library whose memory is left to CUDA.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryOwner {
    /// As in the events.
    pub owner: u16,
    /// The tag.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// The library.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub library: Option<String>,
    /// The device's ordinal in the process, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<i32>,
    /// The device's UUID, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
    /// What it has on the device now.
    pub in_use: u64,
}

/// A part of what a process has recorded.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Events {
    /// Whether the process records events.
    pub on: bool,
    /// The events, by number.
    pub events: Vec<TraceEvent>,
    /// The number from which to ask next.
    pub next: u64,
    /// Whether there are more to ask for now.
    pub more: bool,
    /// All owners that it knows.
    pub owners: Vec<MemoryOwner>,
    /// The time of the answer, as in the events.
    pub now_ns: u64,
    /// The same in nanoseconds since 1970.
    pub unix_ns: u64,
}
