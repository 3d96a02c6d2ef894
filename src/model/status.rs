//! The state of a process, by tag and by device.

use crate::units::is_zero;
use crate::{Borrowed, Cached, Communicator, Cycle, GpuUse, Growth, Obstacle, Policy, Progress, RefusingDevice, TagState, Totals, Verb};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// All managed memory of a process. Other threads keep running while it is taken, so it is not an atomic snapshot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Whether the program is held: calls that start device work wait until everything is resumed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub held: bool,
    /// While it stays held after a pause or suspend: since when, and who asked for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standing: Option<Standing>,
    /// How many of its threads wait.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub waiting_threads: usize,
    /// For at least how many milliseconds no call of the program that starts device work or allocates has passed, been inside or waited. The time
    /// counts from the first question. Absent while the program is held or suspended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_ms: Option<u64>,
    /// While the process is suspended: the GPUs that it sees, and the memory that a restore needs there. The rest of the status is from
    /// before the suspend.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suspended: Option<Vec<GpuUse>>,
    /// What prevents a hold: calls of the program that may pass by the library, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub passing_by: Vec<String>,
    /// What prevents a suspend.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub obstacles: Vec<Obstacle>,
    /// The devices on which the driver refuses virtual memory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refusals: Vec<RefusingDevice>,
    /// The tag of allocations outside regions; absent if those are left to CUDA.
    pub process_tag: Option<String>,
    /// By tag, in alphabetical order.
    pub tags: Vec<TagStatus>,
    /// The devices with managed allocations, or with memory that counts against a limit.
    pub devices: Vec<DeviceStatus>,
    /// Memory of other processes that this one has open, by owner and GPU. While any of it is paused, the program is held.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub borrowed: Vec<Borrowed>,
    /// The ranks of NCCL's communicators that the program has created and not destroyed.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub communicators: BTreeSet<Communicator>,
    /// Host memory for backups.
    pub host: HostStatus,
    /// Bytes that the driver has refused to take back so far.
    pub late_bytes: u64,
    /// Memory that the library sees but leaves to CUDA, by owner in alphabetical order.
    #[serde(default)]
    pub unmanaged: Vec<Unmanaged>,
    /// The process's memory in the last cycles, the oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cycles: Vec<Cycle>,
    /// The owners that grow from cycle to cycle.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub growing: Vec<Growth>,
    /// Sums over its pauses and resumes since it started. Absent before the first.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub totals: BTreeMap<Verb, Totals>,
    /// Memory of the program's own allocator. Only if it was requested.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cache: Vec<Cached>,
}

/// Why a program stands still.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Standing {
    /// For how many seconds.
    pub seconds: u64,
    /// Who has paused it last; absent if it gives way to other programs that share its GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<Caller>,
}

/// A process that asked for something.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caller {
    /// Its id as the program sees it; 0 if it was out of sight.
    pub pid: u32,
    /// The name of its program; empty if that is not known.
    pub program: String,
    /// Its user, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<u32>,
}

impl fmt::Display for Caller {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.pid == 0 {
            return write!(out, "a process out of sight");
        }
        let user = self.user.map_or_else(String::new, |user| format!(", user {user}"));
        write!(out, "process {} ({}{user})", self.pid, self.program.escape_debug())
    }
}

/// Memory of one owner that is left to CUDA.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unmanaged {
    /// The file name of the library, or of the program, that asked CUDA for it.
    pub owner: String,
    /// Bytes asked for and not freed, without small requests.
    pub bytes: u64,
    /// The same by the UUID of the GPU.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub gpus: BTreeMap<String, u64>,
}

/// One tag.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TagStatus {
    /// Its name.
    pub tag: String,
    /// The combined state of its allocations.
    pub state: TagState,
    /// Number of allocations.
    pub allocations: u64,
    /// Bytes of device memory that its allocations take when active.
    pub bytes: u64,
    /// Of those, paused bytes.
    pub paused_bytes: u64,
    /// Of those, bytes that the program has paused itself: a resume from outside leaves them, unless it names the tag.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub self_paused_bytes: u64,
    /// Of those, bytes that others have paused as well: the program is held until they resume the tag, or all.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub both_paused_bytes: u64,
    /// Of those, bytes that the scheduler alone has taken (`vramctl run --share`): a call of the program brings them back.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub away_bytes: u64,
    /// Bytes of contents in host memory: backups of paused allocations and retained copies of active ones.
    pub host_bytes: u64,
    /// Bytes of contents in files.
    pub disk_bytes: u64,
    /// Bytes by the policy that a pause follows by default.
    pub backup: BTreeMap<Policy, u64>,
    /// Whether backups in host memory are retained after a resume.
    #[serde(default)]
    pub retained: bool,
    /// Progress of the stage that copies contents, over all tags of the pause or resume in progress. Absent if nothing is
    /// being copied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
}

impl DeviceStatus {
    /// Bytes that a resume brings back which leaves what the program has paused itself.
    pub fn coming_bytes(&self) -> u64 {
        self.paused_bytes.saturating_sub(self.self_paused_bytes)
    }
}

impl TagStatus {
    /// Bytes that a resume brings back which leaves what the program has paused itself.
    pub fn coming_bytes(&self) -> u64 {
        self.paused_bytes.saturating_sub(self.self_paused_bytes)
    }

    /// Whether nobody but the program has paused what is paused of it.
    pub fn is_only_self_paused(&self) -> bool {
        self.self_paused_bytes == self.paused_bytes && self.both_paused_bytes == 0
    }

    /// Its state in words. Only the program itself has paused what is "paused by itself", and only the scheduler what is "away".
    pub fn state_in_words(&self) -> &'static str {
        let is_away = self.paused_bytes > 0 && self.away_bytes == self.paused_bytes;
        match self.state {
            TagState::Mixed if is_away => "partly away",
            TagState::Paused if is_away => "away",
            TagState::Mixed => "partly paused",
            TagState::Paused if self.is_only_self_paused() => "paused by itself",
            state => state.name(),
        }
    }
}

/// One device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceStatus {
    /// Its ordinal in the process.
    pub device: i32,
    /// Its UUID, the same in every process; absent if the driver does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Active managed bytes.
    pub active_bytes: u64,
    /// Managed memory that there is on the device now, by tag: also what a resume in progress has allocated, what a pause could not give
    /// back yet, and what is freed once a stream has come to that.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tags: BTreeMap<String, u64>,
    /// Paused managed bytes.
    pub paused_bytes: u64,
    /// Of those, bytes that the program has paused itself: a resume from outside leaves them, unless it names the tag.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub self_paused_bytes: u64,
    /// Of those, bytes that the scheduler alone has taken (`vramctl run --share`): a call of the program brings them back.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub away_bytes: u64,
    /// Bytes of the block that is mapped under guarded paused memory.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub guard_bytes: u64,
    /// The most memory that the process may take of the device; absent without a limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// What counts against the limit: managed memory, also while it is paused, what is left to CUDA, and the context.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub counted_bytes: u64,
    /// Bytes free on the device; absent if the driver does not answer.
    pub free_bytes: Option<u64>,
    /// The device's total memory in bytes; absent if the driver does not answer.
    pub total_bytes: Option<u64>,
}

/// Host memory used for backups.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostStatus {
    /// Bytes that hold contents, of paused and of retained allocations.
    pub used_bytes: u64,
    /// Bytes of memory in the arena, whether in use or not.
    pub ready_bytes: u64,
    /// Of those, pinned bytes.
    pub pinned_bytes: u64,
}
