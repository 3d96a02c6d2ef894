//! NCCL's communicators, and what NCCL gives back of their memory.

use crate::status::is_zero;
use serde::{Deserialize, Serialize};

/// One communicator of a process: one rank of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Communicator {
    /// The same at all of its ranks, in whichever process.
    pub id: String,
    /// How many ranks it has; 0 if that is not known.
    pub ranks: u32,
    /// The device's ordinal in the process.
    pub device: i32,
    /// The version of its NCCL: there may be several in a process.
    pub nccl: String,
    /// Whether it has its memory.
    pub state: CommunicatorState,
    /// Bytes of device memory that NCCL has given back, or could: see `state`. 0 if NCCL has not been asked.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bytes: u64,
    /// Bytes that NCCL does not give back.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub kept_bytes: u64,
    /// NCCL's error from the last attempt, if it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Why NCCL cannot give its memory back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unfit: Option<String>,
}

/// The state of a communicator.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CommunicatorState {
    /// It can be used.
    #[default]
    Active,
    /// NCCL is giving its memory back, which waits for the other ranks.
    Suspending,
    /// NCCL has given its memory back.
    Suspended,
    /// NCCL is taking its memory back, which waits for the other ranks.
    Resuming,
    /// NCCL has failed in the middle: the communicator is unusable.
    Broken,
}

impl CommunicatorState {
    /// The name used in the protocol.
    pub fn name(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Suspending => "suspending",
            Self::Suspended => "suspended",
            Self::Resuming => "resuming",
            Self::Broken => "broken",
        }
    }

    /// Whether NCCL is suspending or resuming it.
    pub fn is_in_progress(self) -> bool {
        matches!(self, Self::Suspending | Self::Resuming)
    }
}
