//! Events: what has happened to the memory of a process.

use crate::{Kind, Stage, StatusCode, Verb};
use serde::{Deserialize, Serialize};

/// Something that happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceEvent {
    /// Events are numbered in the order in which they are recorded. Missing numbers belong to overwritten events.
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
    /// Paused memory was freed; it used no device memory.
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
    /// The program's allocator has returned cached memory.
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
    /// What the owner has on the device afterwards. Two threads may record their events out of order.
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

impl MemoryOwner {
    /// What an owner has, from the sum of its changes. That is negative if memory was freed in the middle of its move to another GPU: one of
    /// its two owners then has the free, and the other the memory.
    pub fn in_use_of(sum: u64) -> u64 {
        u64::try_from(sum.cast_signed()).unwrap_or(0)
    }
}

/// A page of recorded events.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Events {
    /// Whether the process records events.
    pub on: bool,
    /// The events, by number.
    pub events: Vec<TraceEvent>,
    /// The number to ask for next.
    pub next: u64,
    /// Whether there are more to ask for now.
    pub more: bool,
    /// All owners known to the process.
    pub owners: Vec<MemoryOwner>,
    /// The time of the answer, as in the events.
    pub now_ns: u64,
    /// The same in nanoseconds since 1970.
    pub unix_ns: u64,
}
