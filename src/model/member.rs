//! Programs that share GPUs by themselves: what a member and the node's scheduler tell each other (`docs/protocol.md`).

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// What the scheduler has to know of a member at once. It asks for a status for the rest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberState {
    /// Whether the scheduler has paused the program.
    pub away: bool,
    /// How long the longest waiting call of a program that is away has waited, in milliseconds; absent: none waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calls_wait_ms: Option<u64>,
    /// For how many milliseconds no call has passed that starts device work or allocates, and none has been inside or has waited. Absent: the
    /// scheduler has not asked to watch for that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_ms: Option<u64>,
    /// Whether it captures work for a graph: it must not be paused.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub captures: bool,
    /// Who gives way to whom.
    #[serde(default)]
    pub priority: SharePriority,
    /// Idle for so many milliseconds, the program gives its memory back even if nobody asks. Absent: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gives_back_after_ms: Option<u64>,
    /// A request for room fails after so many milliseconds in which nobody could give way. Absent: as the scheduler thinks best.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for_ms: Option<u64>,
    /// Requests for memory that wait for room, the oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub wants: Vec<Want>,
    /// What the last scheduler has left for the next one. Only in the first line of a connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remembered: Option<Remembered>,
}

/// What a scheduler has left with a member for the next one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remembered {
    /// In the scheduler's own words.
    pub what: String,
    /// How many milliseconds ago.
    pub ago_ms: u64,
}

/// Who gives way to whom.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SharePriority {
    /// Takes what is left, and gives way first.
    Low,
    /// The usual one.
    #[default]
    Normal,
    /// Goes before all others.
    High,
}

impl fmt::Display for SharePriority {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Low => "low",
            Self::Normal => "normal",
            Self::High => "high",
        })
    }
}

/// How a program shares its GPUs. In a request, what is absent stays as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sharing {
    /// Who gives way to whom.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<SharePriority>,
    /// Idle for so many milliseconds, the program gives its memory back even if nobody asks. 0: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gives_back_after_ms: Option<u64>,
    /// The most memory that it may have of each GPU, as in `VRAMCTL_LIMIT`; in an answer, absent: it was started without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<String>,
}

/// A request of the program for memory that waits for room.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Want {
    /// Its number, for the answer.
    pub ticket: u64,
    /// The GPU's UUID; absent if the driver does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
    /// Bytes. What a context or loaded code takes is not known; then this is a guess.
    pub bytes: u64,
    /// The scheduler has answered, and the thread has not said yet whether it got the memory.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tries: bool,
    /// How long it has waited, in milliseconds.
    pub waits_ms: u64,
}

/// What it costs to take an allocation away. The cheapest comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// Contents that nobody needs: no copy either way.
    Discardable,
    /// Host memory still has the contents of the last pause: only what has changed since is copied.
    Retained,
    /// The contents are copied both ways.
    Kept,
}

impl Class {
    /// Whether the contents are somewhere else while the allocation is away.
    pub fn has_contents(self) -> bool {
        self != Self::Discardable
    }
}

/// Allocations of one class and size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Amount {
    /// What it costs to take them away.
    pub class: Class,
    /// Bytes of each.
    pub bytes: u64,
    /// How many.
    pub count: u64,
}

impl Amount {
    /// Bytes of all.
    pub fn total(&self) -> u64 {
        self.bytes.saturating_mul(self.count)
    }
}

/// Allocations by the UUID of the GPU.
pub type Amounts = BTreeMap<String, Vec<Amount>>;

/// What a member has, as far as the scheduler may take it or has taken it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holdings {
    /// On the GPU, and free to go: nobody else has it open, knows its physical memory, or must go with it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub here: Amounts,
    /// What the scheduler alone has taken.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub away: Amounts,
}

/// What the scheduler tells a member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "kebab-case")]
pub enum Order {
    /// The scheduler is alive.
    Beat,
    /// Watch from now on, or no longer, how long no call has passed.
    Watch {
        /// See above.
        on: bool,
    },
    /// Room on these GPUs is promised to others: allocations there wait before they try. Replaces what was said before.
    AskFirst {
        /// Their UUIDs.
        gpus: Vec<String>,
    },
    /// What no member gets of these GPUs. Replaces what was said before.
    Unavailable {
        /// Bytes of each that are kept free.
        reserve_bytes: u64,
        /// Bytes that programs have that do not share, by the GPUs' UUIDs.
        gpus: BTreeMap<String, u64>,
    },
    /// Why the program's calls and requests still wait.
    Waits {
        /// In words.
        why: String,
    },
    /// Keep this for the next scheduler, in place of what was left before.
    Remember {
        /// In the scheduler's own words.
        what: String,
    },
    /// Host memory is short: give up copies of what is on a GPU.
    DropCopies,
    /// There is room now: try again.
    Granted {
        /// Of the request.
        ticket: u64,
    },
    /// There will be no room: the request fails as plain CUDA's would.
    Denied {
        /// Of the request.
        ticket: u64,
        /// In words.
        why: String,
    },
}
