//! What the driver checkpoints but cannot restore. Such a process is lost, so it must be known before it is suspended.
//!
//! Driver 580 refuses to restore processes with NCCL or memory that several processes use; earlier ones, with unified memory. What is
//! noted here is told as long as it may be there: too long rather than too short.

use super::{Memory, borrow, left};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use vramctl_driver::{self as driver, CUdevice};
use vramctl_host::PerProcess;
use vramctl_model::{Obstacle, ObstacleKind};

/// Seen at the program's calls and left to CUDA, by address or handle.
static SEEN: PerProcess<Mutex<BTreeMap<u64, ObstacleKind>>> = PerProcess::new(Mutex::default);

fn lock(seen: &Mutex<BTreeMap<u64, ObstacleKind>>) -> MutexGuard<'_, BTreeMap<u64, ObstacleKind>> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notes what is at an address, or behind a handle.
pub fn note(kind: ObstacleKind, key: u64) {
    lock(SEEN.get()).insert(key, kind);
}

/// What was at the address is gone.
#[inline]
pub fn forget(address: u64) {
    if let Some(seen) = SEEN.existing() {
        lock(seen).remove(&address);
    }
}

impl Memory {
    /// What keeps this process from being suspended.
    pub fn obstacles(&self) -> Vec<Obstacle> {
        let mut found = Vec::new();
        let mut add = |kind, what: String, bytes| found.push(Obstacle { kind, what, bytes });
        for owner in left::status() {
            if ["libnccl", "libnvshmem"].iter().any(|library| owner.owner.starts_with(library)) {
                add(ObstacleKind::Communicator, format!("communicators of {}", owner.owner), owner.bytes);
            }
        }
        let (mut lent, mut registered) = (0, BTreeMap::<_, u64>::new());
        for allocation in self.snapshot() {
            let (bytes, contents) = (allocation.bytes() as u64, allocation.contents());
            // What is paused has no memory that anybody could know.
            if contents.memory.is_none() {
                continue;
            }
            if !contents.lending.to_others(&[]).is_empty() {
                lent += bytes;
            } else if let Some(registrant) = contents.registrant() {
                *registered.entry(registrant).or_default() += bytes;
            }
        }
        if lent > 0 {
            add(ObstacleKind::Shared, "memory that other processes have open".into(), lent);
        }
        let borrowed = borrow::count();
        if borrowed > 0 {
            add(ObstacleKind::Shared, format!("{borrowed} pieces of other processes' memory"), 0);
        }
        for (registrant, bytes) in registered {
            add(ObstacleKind::Registered, format!("memory registered by {registrant}"), bytes);
        }
        if let Some(seen) = SEEN.existing() {
            let mut times = BTreeMap::<_, usize>::new();
            lock(seen).values().for_each(|kind| *times.entry(*kind).or_default() += 1);
            for (kind, times) in times {
                let what = match kind {
                    ObstacleKind::Unified => "allocations of unified memory (cudaMallocManaged)",
                    ObstacleKind::Multicast => "multicast objects",
                    _ => "pieces of memory shared with other processes",
                };
                add(kind, format!("{times} {what}"), 0);
            }
        }
        let peers = self.peers.read().unwrap_or_else(PoisonError::into_inner);
        if !peers.is_empty() {
            let pairs: Vec<_> = peers.keys().map(|(device, other)| format!("{device} to {other}")).collect();
            add(ObstacleKind::Peers, format!("access of GPU {}", pairs.join(", ")), 0);
        }
        drop(peers);
        let devices: BTreeSet<CUdevice> = self.snapshot().iter().map(|allocation| allocation.device).collect();
        if devices.into_iter().any(driver::is_behind_mps) {
            add(ObstacleKind::Mps, "a GPU behind MPS".into(), 0);
        }
        found
    }
}
