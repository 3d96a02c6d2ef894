//! Dry runs.

use crate::{Obstacle, Policy};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What a pause would do now.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The allocations it would pause, by tag, in alphabetical order. Those already paused are left out.
    pub tags: Vec<TagPlan>,
    /// Their device memory, by the UUID of the GPU, without GPUs of which the driver does not report it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub gpus: BTreeMap<String, GpuPlan>,
    /// The host memory it would need.
    pub host: HostRoom,
    /// The inference engine whose prefix cache describes contents that would be discarded; without `force` the pause is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix_cache: Option<String>,
    /// What would prevent a suspend after this pause.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub obstacles: Vec<Obstacle>,
    /// If the request is to hand host memory over: what that takes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hand_over: Option<HandOver>,
}

/// What a process would do in a swap in which host memory goes over.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandOver {
    /// In a pause.
    pub leaving: Moving,
    /// Bytes of device memory that a pause gives back only at the commit, because others know its physical pages.
    pub late_bytes: u64,
    /// In a resume.
    pub coming: Moving,
    /// The unit, in bytes, in which host memory is taken and given back.
    pub piece_bytes: u64,
}

/// Contents that move between device and host memory before the commit.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moving {
    /// Bytes of the largest allocation, by the UUID of the GPU (empty if the driver does not report it).
    pub largest: BTreeMap<String, u64>,
    /// Bytes of device memory.
    pub device_bytes: u64,
    /// Bytes of host memory that a pause takes, or a resume gives back.
    pub host_bytes: u64,
}

/// What a pause would do to one tag.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TagPlan {
    /// Its name.
    pub tag: String,
    /// Number of allocations.
    pub allocations: u64,
    /// Their bytes of device memory.
    pub bytes: u64,
    /// Those bytes by policy.
    pub backup: BTreeMap<Policy, u64>,
}

/// What a pause would release on one GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuPlan {
    /// Bytes of device memory.
    pub bytes: u64,
    /// Of those, bytes that others have open or registered: in a swap, they go at the commit.
    pub late_bytes: u64,
}

/// Host memory for backups.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostRoom {
    /// Bytes needed beyond what backups use already, in whole pieces (64 MiB).
    pub needed_bytes: u64,
    /// Bytes available: what the host and `VRAMCTL_HOST_CAP` allow, with the memory that is ready for backups.
    pub available_bytes: u64,
}
