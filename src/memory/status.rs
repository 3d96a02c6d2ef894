//! What there is: by tag and by device.

use super::{Allocation, Backup, Memory, Progress};
use crate::backup::{self, ArenaStatus, Saved};
use crate::driver::{self, CUdevice, Context, Current};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, MutexGuard, PoisonError};

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
    pub host: ArenaStatus,
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
    /// Bytes that the program has freed, and that the driver gets back when the neighbours that share their memory are
    /// paused or freed.
    #[serde(default)]
    pub freed_bytes: u64,
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

/// The pause or resume that is under way.
#[derive(Debug)]
pub struct UnderWay {
    state: TagState,
    tags: BTreeSet<Arc<str>>,
    progress: Option<Progress>,
}

/// Says that it is under way until it is dropped.
pub(super) struct Shown<'a>(&'a Memory);

impl Shown<'_> {
    pub fn progress(&self, now: Progress) {
        if let Some(under_way) = &mut *self.0.under_way() {
            under_way.progress = Some(now);
        }
    }
}

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        *self.0.under_way() = None;
    }
}

impl Memory {
    fn under_way(&self) -> MutexGuard<'_, Option<UnderWay>> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a status say that these are on their way. One at a time: the transition lock is held.
    pub(super) fn show<'a>(&self, state: TagState, allocations: impl IntoIterator<Item = &'a Arc<Allocation>>) -> Shown<'_> {
        let tags = allocations.into_iter().map(|allocation| Arc::clone(&allocation.tag)).collect();
        *self.under_way() = Some(UnderWay { state, tags, progress: None });
        Shown(self)
    }

    /// What there is now.
    pub fn status(&self) -> Status {
        let mut tags = BTreeMap::<String, TagStatus>::new();
        let mut devices = BTreeMap::<CUdevice, (DeviceStatus, Context)>::new();
        let all = self.snapshot();
        for allocation in &all {
            let bytes = allocation.bytes() as u64;
            let (paused_bytes, host_bytes, disk_bytes) = {
                let contents = allocation.contents();
                let (host, disk) = match contents.saved.as_deref() {
                    Some(saved @ Saved::Host(_)) => (saved.kept_bytes(allocation), 0),
                    Some(Saved::Disk(_)) => (0, bytes),
                    None => (0, 0),
                };
                (if contents.memory.is_none() { bytes } else { 0 }, host, disk)
            };
            let tag = tags.entry(allocation.tag.to_string()).or_default();
            tag.allocations += 1;
            tag.bytes += bytes;
            tag.paused_bytes += paused_bytes;
            tag.host_bytes += host_bytes;
            tag.disk_bytes += disk_bytes;
            *tag.backup.entry(allocation.backup).or_default() += bytes;
            let (device, _) = devices
                .entry(allocation.device)
                .or_insert_with(|| (DeviceStatus { device: allocation.device, ..DeviceStatus::default() }, allocation.context()));
            device.active_bytes += bytes - paused_bytes;
            device.paused_bytes += paused_bytes;
        }
        for (allocation, freed) in super::freed_bytes(&all) {
            tags.entry(allocation.tag.to_string()).or_default().freed_bytes += freed;
        }
        let under_way = self.under_way();
        let finish = |(name, tag): (String, TagStatus)| {
            let (state, progress) = match (under_way.as_ref().filter(|it| it.tags.contains(&*name)), tag.paused_bytes) {
                (Some(it), _) => (it.state, it.progress),
                (None, 0) => (TagState::Active, None),
                (None, paused) if paused == tag.bytes => (TagState::Paused, None),
                (None, _) => (TagState::Mixed, None),
            };
            TagStatus { retained: backup::retains(&name), tag: name, state, progress, ..tag }
        };
        let tags = tags.into_iter().map(finish).collect();
        drop(under_way);
        let ask = |(device, context): (DeviceStatus, Context)| {
            let info = Current::push(context).and_then(|_current| driver::memory_info()).ok();
            let uuid = driver::uuid(device.device);
            DeviceStatus { uuid, free_bytes: info.map(|(free, _)| free), total_bytes: info.map(|(_, total)| total), ..device }
        };
        Status {
            process_tag: self.process_tag().map(|tag| tag.to_string()),
            tags,
            devices: devices.into_values().map(ask).collect(),
            host: backup::status(),
            late_bytes: driver::leftover_bytes(),
        }
    }
}
