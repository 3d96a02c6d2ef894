//! How many bytes of managed memory stand for memory of the devices' default pools: the driver's statistics of a pool do not contain them.
//!
//! To the program, nothing changes while memory is paused, so that counts.

use super::Allocation;
use std::collections::BTreeMap;
use std::sync::Mutex;
use vramctl_driver::CUdevice;
use vramctl_host::Unpoison;

/// A number of bytes, and the most that it has been since the program has reset that.
#[derive(Debug, Clone, Copy, Default)]
pub struct Level {
    /// Now.
    pub now: u64,
    /// At most.
    pub high: u64,
}

impl Level {
    fn rise(&mut self, bytes: usize) {
        self.now += bytes as u64;
        self.high = self.high.max(self.now);
    }

    fn fall(&mut self, bytes: usize) {
        self.now = self.now.saturating_sub(bytes as u64);
    }
}

/// What stands for memory of one pool.
#[derive(Debug, Clone, Copy, Default)]
pub struct PoolUse {
    /// All of it, also what has been freed and not released.
    pub reserved: Level,
    /// What the program has asked for and not freed.
    pub used: Level,
}

/// The use of each device's default pool, as far as it is managed.
#[derive(Debug, Default)]
pub struct Pools(Mutex<BTreeMap<CUdevice, PoolUse>>);

impl Pools {
    /// Counts a new allocation of the program.
    pub(super) fn allocated(&self, allocation: &Allocation) {
        self.change(allocation, |of, requested| {
            of.used.rise(requested);
            of.reserved.rise(allocation.bytes());
        });
    }

    /// The program has freed an allocation.
    pub(super) fn freed(&self, allocation: &Allocation) {
        self.change(allocation, |of, requested| {
            of.used.fall(requested);
            of.reserved.fall(allocation.bytes());
        });
    }

    /// Freed memory is kept.
    pub(super) fn kept(&self, allocation: &Allocation) {
        self.change(allocation, |of, _| of.reserved.rise(allocation.bytes()));
    }

    /// Freed memory is no longer kept: it is released, or a new allocation has it.
    pub(super) fn given(&self, allocation: &Allocation) {
        self.change(allocation, |of, _| of.reserved.fall(allocation.bytes()));
    }

    /// Passes `change` the bytes that the program asked for.
    fn change(&self, allocation: &Allocation, change: impl FnOnce(&mut PoolUse, usize)) {
        if let Some(malloc) = allocation.origin().malloc().filter(|malloc| malloc.from_pool) {
            change(self.0.lock().unpoisoned().entry(allocation.device).or_default(), malloc.requested);
        }
    }

    /// The use of a device's default pool.
    pub fn of(&self, device: CUdevice) -> PoolUse {
        self.0.lock().unpoisoned().get(&device).copied().unwrap_or_default()
    }

    /// Forgets how much it was before now, for a level of this use.
    pub fn reset_high(&self, device: CUdevice, level: fn(&mut PoolUse) -> &mut Level) {
        if let Some(of) = self.0.lock().unpoisoned().get_mut(&device) {
            let level = level(of);
            level.high = level.now;
        }
    }
}
