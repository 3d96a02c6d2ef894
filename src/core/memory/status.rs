//! What there is: by tag and by device.

use super::Memory;
use std::collections::BTreeMap;
use vramctl_backup::{self as backup, Saved};
use vramctl_driver::{self as driver, CUdevice, Context, Current, Physical};
use vramctl_model::{DeviceStatus, Status, TagState, TagStatus};

impl Memory {
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
                    Some(saved @ Saved::Host(_)) => (saved.kept_bytes(), 0),
                    Some(Saved::Disk(_)) => (0, bytes),
                    None => (0, 0),
                };
                (if contents.memory.as_ref().is_some_and(Physical::is_mapped) { 0 } else { bytes }, host, disk)
            };
            let tag = tags.entry(allocation.tag.to_string()).or_default();
            tag.allocations += 1;
            tag.bytes += bytes;
            tag.paused_bytes += paused_bytes;
            tag.host_bytes += host_bytes;
            tag.disk_bytes += disk_bytes;
            *tag.backup.entry(allocation.backup).or_default() += bytes;
            let (device, _) = devices.entry(allocation.device).or_insert_with(|| {
                let device =
                    DeviceStatus { device: allocation.device, active_bytes: 0, paused_bytes: 0, free_bytes: None, total_bytes: None };
                (device, allocation.context())
            });
            device.active_bytes += bytes - paused_bytes;
            device.paused_bytes += paused_bytes;
        }
        let finish = |(name, tag): (String, TagStatus)| {
            let state = match tag.paused_bytes {
                0 => TagState::Active,
                paused if paused == tag.bytes => TagState::Paused,
                _ => TagState::Mixed,
            };
            TagStatus { retained: backup::retains(&name), tag: name, state, ..tag }
        };
        let ask = |(device, context): (DeviceStatus, Context)| {
            let info = Current::push(context).and_then(|_current| driver::memory_info()).ok();
            DeviceStatus { free_bytes: info.map(|(free, _)| free), total_bytes: info.map(|(_, total)| total), ..device }
        };
        Status {
            process_tag: self.process_tag().map(|tag| tag.to_string()),
            tags: tags.into_iter().map(finish).collect(),
            devices: devices.into_values().map(ask).collect(),
            host: backup::status(),
            late_bytes: driver::leftover_bytes(),
        }
    }
}
