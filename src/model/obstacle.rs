//! What prevents a process from being suspended, and the memory of a suspended one.

use crate::Bytes;
use crate::units::is_zero;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Something that the driver checkpoints but cannot restore: the process would be lost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Obstacle {
    /// What kind of thing.
    pub kind: ObstacleKind,
    /// Whose, or how many: for people.
    pub what: String,
    /// Its bytes of device memory, where they are known.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bytes: u64,
}

/// The kinds of obstacles. These names never change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ObstacleKind {
    /// A library's connections to other GPUs: NCCL, NVSHMEM.
    Communicator,
    /// Memory of this process that others have open, or memory of others.
    Shared,
    /// Memory whose physical pages are registered with somebody else.
    Registered,
    /// Memory of one GPU that another may reach.
    Peers,
    /// A multicast object.
    Multicast,
    /// Unified memory.
    Unified,
    /// The GPU is behind MPS.
    Mps,
    /// The GPU is in MIG mode. Detected through NVML by the client that suspends the process, not by the process.
    Mig,
}

impl ObstacleKind {
    /// All of them.
    pub const ALL: [Self; 8] =
        [Self::Communicator, Self::Shared, Self::Registered, Self::Peers, Self::Multicast, Self::Unified, Self::Mps, Self::Mig];
}

impl fmt::Display for Obstacle {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.what)?;
        if self.bytes > 0 { write!(out, " ({})", Bytes(self.bytes)) } else { Ok(()) }
    }
}

/// The memory that a process has on a GPU, apart from paused memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuUse {
    /// The GPU's UUID.
    pub uuid: String,
    /// Bytes of its memory, which a restore needs.
    pub bytes: u64,
}
