//! What there is: by tag and by device.

use crate::{Backup, Progress};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// All that a process has under management. Taken while other threads go on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The tag of allocations outside regions; absent: those are left to CUDA.
    pub process_tag: Option<String>,
    /// By tag, in alphabetical order.
    pub tags: Vec<TagStatus>,
    /// The devices that have managed allocations.
    pub devices: Vec<DeviceStatus>,
    /// The host memory for backups.
    pub host: HostStatus,
    /// Bytes that the driver has refused to take back so far.
    pub late_bytes: u64,
}

/// One tag.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TagStatus {
    /// Its name.
    pub tag: String,
    /// Its state, over all its allocations.
    pub state: TagState,
    /// How many allocations it has.
    pub allocations: u64,
    /// Bytes of device memory of all its allocations when active.
    pub bytes: u64,
    /// Of those, bytes that are paused.
    pub paused_bytes: u64,
    /// Bytes of contents that are kept in host memory now: of what is paused, and what is retained of what is active.
    pub host_bytes: u64,
    /// Bytes of contents that are kept in files now.
    pub disk_bytes: u64,
    /// Bytes by the policy that a pause follows unless it is told otherwise.
    pub backup: BTreeMap<Backup, u64>,
    /// Whether what is saved in host memory stays there after a resume.
    #[serde(default)]
    pub retained: bool,
    /// While it is `pausing` or `resuming`: how far the stage that copies contents has come, over all tags of that pause or
    /// resume. Absent before and after, and where nothing is copied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
}

/// The state of a tag.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TagState {
    /// Every allocation has its memory.
    #[default]
    Active,
    /// None has.
    Paused,
    /// Some have: others were made after the pause.
    Mixed,
    /// A pause is under way.
    Pausing,
    /// A resume is under way.
    Resuming,
}

impl TagState {
    /// As in the protocol.
    pub fn name(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Paused => "paused",
            Self::Mixed => "mixed",
            Self::Pausing => "pausing",
            Self::Resuming => "resuming",
        }
    }
}

/// One device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceStatus {
    /// Its ordinal in the process.
    pub device: i32,
    /// Its UUID, by which others know it; absent where the driver does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Bytes under management that are active.
    pub active_bytes: u64,
    /// Bytes under management that are paused.
    pub paused_bytes: u64,
    /// Bytes free on the device, whoever uses the rest; absent where the driver does not answer.
    pub free_bytes: Option<u64>,
    /// Bytes that the device has.
    pub total_bytes: Option<u64>,
}

/// How much host memory there is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostStatus {
    /// Bytes that hold contents, of paused and of retained allocations.
    pub used_bytes: u64,
    /// Bytes of memory that the arena has, used or ready to be used.
    pub ready_bytes: u64,
    /// Of those, bytes that the copy engines reach directly.
    pub pinned_bytes: u64,
}
