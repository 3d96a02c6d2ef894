//! What members hold, in the scheduler's terms: from their statuses and from what NVML counts.

use std::collections::BTreeMap;
use vramctl_control::protocol::ProcessStatus;
use vramctl_driver::{self as driver, Card};
use vramctl_model::{Policy, TagStatus};
use vramctl_scheduler::{Class, GpuId, Holdings, Memory, PerGpu};

/// The GPUs of the host, numbered, and what NVML counts on each.
#[derive(Debug, Default)]
pub struct Gpus {
    numbers: BTreeMap<String, GpuId>,
    cards: Vec<Card>,
    /// Bytes by GPU and process.
    used: BTreeMap<(GpuId, u32), u64>,
}

impl Gpus {
    /// Asks NVML.
    pub fn look(&mut self) {
        self.cards = driver::cards().unwrap_or_default();
        self.used.clear();
        for card in &self.cards {
            let next = GpuId(self.numbers.len() as u32);
            let number = *self.numbers.entry(card.uuid.clone()).or_insert(next);
            for holder in driver::holders_of(&card.uuid) {
                self.used.insert((number, holder.pid), holder.bytes.unwrap_or(0));
            }
        }
    }

    /// The number of a GPU.
    pub fn number(&self, uuid: &str) -> Option<GpuId> {
        self.numbers.get(uuid).copied()
    }

    /// Each GPU, its bytes in all, and those that members do not hold.
    pub fn unmanaged(&self, members: &[u32]) -> Vec<(GpuId, u64, u64)> {
        let of = |card: &Card| {
            let number = self.number(&card.uuid)?;
            let held: u64 = members.iter().filter_map(|pid| self.used.get(&(number, *pid))).sum();
            Some((number, card.free + card.used, card.used.saturating_sub(held)))
        };
        self.cards.iter().filter_map(of).collect()
    }

    /// What a member has on each GPU. `is_away`: what is paused was taken by the scheduler. `peaks`: the most so far, which this raises.
    pub fn memory(&self, pid: u32, status: &ProcessStatus, is_away: bool, peaks: &mut PerGpu) -> PerGpu<Memory> {
        let mut all = PerGpu::new();
        for device in &status.memory.devices {
            let Some(number) = device.uuid.as_deref().and_then(|uuid| self.number(uuid)) else { continue };
            let memory: &mut Memory = all.entry(number).or_default();
            for (tag, bytes) in &device.tags {
                let class = status.memory.tags.iter().find(|known| known.tag == *tag).map_or(Class::Kept, class);
                memory.resident.add(class, *bytes, 1);
            }
            if is_away {
                memory.away = Holdings::from_iter([(Class::Kept, device.coming_bytes(), 1)]);
            }
        }
        for ((number, holder), used) in &self.used {
            if *holder == pid {
                let memory = all.entry(*number).or_default();
                memory.fixed = used.saturating_sub(memory.resident.bytes());
            }
        }
        for (number, memory) in &mut all {
            let peak = peaks.entry(*number).or_default();
            *peak = (*peak).max(memory.own());
            memory.peak = *peak;
        }
        all
    }
}

/// The tags of a member that make up these holdings, on any GPU. Tags go as a whole.
pub fn tags(status: &ProcessStatus, taken: &[&Holdings]) -> Vec<String> {
    let is_meant = |device: &BTreeMap<String, u64>, tag: &TagStatus| {
        device.get(&tag.tag).is_some_and(|bytes| taken.iter().any(|holdings| holdings.count(class(tag), *bytes) > 0))
    };
    let meant = |tag: &&TagStatus| status.memory.devices.iter().any(|device| is_meant(&device.tags, tag));
    status.memory.tags.iter().filter(meant).map(|tag| tag.tag.clone()).collect()
}

fn class(tag: &TagStatus) -> Class {
    let is_discarded = tag.bytes > 0 && tag.backup.get(&Policy::Discard) == Some(&tag.bytes);
    match () {
        () if is_discarded => Class::Discardable,
        () if tag.retained && tag.host_bytes >= tag.bytes => Class::Unchanged,
        () => Class::Kept,
    }
}
