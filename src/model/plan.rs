//! What a pause would do, without doing it.

use crate::Backup;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What a pause would do now.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// What would be paused, by tag, in alphabetical order; not what is paused already.
    pub tags: Vec<TagPlan>,
    /// The host memory that it would take.
    pub host: HostRoom,
    /// The inference engine whose prefix cache describes contents that would be dropped: without `force` the pause is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix_cache: Option<String>,
}

/// What would be paused of one tag.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TagPlan {
    /// Its name.
    pub tag: String,
    /// How many allocations.
    pub allocations: u64,
    /// Their bytes of device memory.
    pub bytes: u64,
    /// Of those, bytes by what would become of their contents.
    pub backup: BTreeMap<Backup, u64>,
}

/// Host memory for contents.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostRoom {
    /// Bytes that the contents need, besides what is retained of them already.
    pub needed_bytes: u64,
    /// Bytes that there are for them.
    pub available_bytes: u64,
}
