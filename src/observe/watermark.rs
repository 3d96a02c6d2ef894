//! Estimates how much of each device is free: the last sample of the watch (`watch`), corrected by this process's own allocations since.
//! Wakes the watch when that may be too little.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::thread::Thread;
use vramctl_config::{Config, Watch};
use vramctl_core::events::Change;
use vramctl_driver::CUdevice;
use vramctl_host::PerProcess;

/// The most devices that are watched.
const MOST: usize = 64;
/// Not known yet. Large, but far from overflowing when something is added.
const UNKNOWN: i64 = i64::MAX / 2;

/// What is watched for.
#[derive(Debug)]
pub struct Watermark {
    /// 0: nothing.
    below: AtomicU64,
    /// Whether to return what the program's own allocator has cached.
    trims: AtomicBool,
    free: [AtomicI64; MOST],
    /// The thread to wake when a device may have fallen below the level.
    watcher: OnceLock<Thread>,
}

static LEVEL: PerProcess<Watermark> = PerProcess::new(|| {
    let Watch { below, trims } = Config::get().watch;
    Watermark {
        below: AtomicU64::new(below),
        trims: AtomicBool::new(trims),
        free: [const { AtomicI64::new(UNKNOWN) }; MOST],
        watcher: OnceLock::new(),
    }
});

/// What this process watches for.
pub fn level() -> &'static Watermark {
    LEVEL.get()
}

/// Records that an allocation or free changes a device's free memory.
#[inline]
pub fn changed(change: Change, device: Option<CUdevice>, bytes: usize) {
    if let (Some(level), Some(device)) = (LEVEL.existing(), device)
        && level.below() != 0
    {
        level.freed(device, freed_by(change, bytes as i64));
    }
}

/// Bytes that a change frees on the device; negative if it allocates.
fn freed_by(change: Change, bytes: i64) -> i64 {
    match change {
        Change::Allocated | Change::Resumed => -bytes,
        Change::Freed | Change::Paused => bytes,
        Change::FreedPaused => 0,
    }
}

impl Watermark {
    /// Sets it.
    pub fn set(&self, below: u64, trims: bool) {
        self.trims.store(trims, Ordering::Relaxed);
        self.below.store(below, Ordering::Relaxed);
        self.free.iter().for_each(|free| free.store(UNKNOWN, Ordering::Relaxed));
        if let Some(watcher) = self.watcher.get() {
            watcher.unpark();
        }
    }

    /// The level below which free memory is too little. 0: nothing is watched.
    #[inline]
    pub fn below(&self) -> u64 {
        self.below.load(Ordering::Relaxed)
    }

    /// Whether to return what the program's own allocator has cached.
    pub fn trims(&self) -> bool {
        self.trims.load(Ordering::Relaxed)
    }

    /// Makes the calling thread the one to wake.
    pub fn wake_this_thread(&self) {
        let _ = self.watcher.set(std::thread::current());
    }

    /// Records what a sample says.
    pub fn note_sample(&self, device: CUdevice, free: u64) {
        if let Some(place) = self.free.get(device as usize) {
            place.store(free.min(UNKNOWN as u64) as i64, Ordering::Relaxed);
        }
    }

    /// Estimated free bytes, if known.
    pub fn free(&self, device: CUdevice) -> Option<u64> {
        let free = self.free.get(device as usize)?.load(Ordering::Relaxed);
        (free < UNKNOWN / 2).then_some(free.max(0) as u64)
    }

    fn freed(&self, device: CUdevice, bytes: i64) {
        let Some(place) = self.free.get(device as usize) else { return };
        let before = place.fetch_add(bytes, Ordering::Relaxed);
        let below = self.below() as i64;
        if before >= below
            && before + bytes < below
            && let Some(watcher) = self.watcher.get()
        {
            watcher.unpark();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_allocations_count_until_the_next_sample() {
        let level = Watermark {
            below: AtomicU64::new(100),
            trims: AtomicBool::new(false),
            free: [const { AtomicI64::new(UNKNOWN) }; MOST],
            watcher: OnceLock::new(),
        };
        level.freed(1, -50);
        assert_eq!(level.free(1), None, "of a device that was never sampled");
        level.note_sample(1, 300);
        level.freed(1, -150);
        level.freed(1, -100);
        assert_eq!(level.free(1), Some(50));
        level.freed(1, -90);
        assert_eq!(level.free(1), Some(0), "somebody else has given some back");
        level.freed(1, 110);
        assert_eq!((level.free(1), level.free(0), level.free(-1), level.free(64)), (Some(70), None, None, None));
        level.note_sample(1, u64::MAX);
        assert_eq!(level.free(1), None);
    }
}
