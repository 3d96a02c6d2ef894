//! Backups in host memory: page-locked, so that the copy engines reach it, and kept for the next pause.

use crate::driver::{Current, Pinned};
use crate::error::Error;
use crate::process::PerProcess;
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::{Mutex, Once, PoisonError};
use std::{fs, ptr, slice};

/// A piece of host memory of our own.
#[derive(Debug)]
pub struct Buffer {
    // Before the memory, so that it is unregistered before it is unmapped.
    _pinned: Option<Pinned>,
    memory: Mapped,
}

#[derive(Debug)]
struct Mapped {
    address: NonNull<u8>,
    bytes: usize,
}

// SAFETY: plain memory that the value owns.
unsafe impl Send for Mapped {}
// SAFETY: shared access only reads.
unsafe impl Sync for Mapped {}

impl Buffer {
    /// Fresh host memory. Where it cannot be page-locked it is used as it is: slower, and still right.
    fn new(bytes: usize, current: &Current) -> Result<Self, Error> {
        let memory = Mapped::new(bytes).ok_or_else(|| Error::HostMemory { needed: bytes as u64, available: available_bytes() })?;
        // SAFETY: the memory outlives the registration: it is the later field.
        let pinned = unsafe { Pinned::register(memory.address, bytes, current) };
        if let Err(failure) = &pinned {
            static ONCE: Once = Once::new();
            ONCE.call_once(|| log::warn!("host memory cannot be page-locked ({failure}): backups will be slow"));
        }
        Ok(Self { _pinned: pinned.ok(), memory })
    }

    /// Its contents.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: mapped, readable, and written only through `&mut self`.
        unsafe { slice::from_raw_parts(self.memory.address.as_ptr(), self.memory.bytes) }
    }

    /// Its first byte, to be written.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.memory.address.as_ptr()
    }
}

impl Mapped {
    fn new(bytes: usize) -> Option<Self> {
        // SAFETY: a new private mapping that touches no other memory.
        let address = unsafe {
            libc::mmap(ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
        };
        if address == libc::MAP_FAILED {
            return None;
        }
        // Huge pages make locking them cheaper. A forked child neither pays for the memory nor turns its pages into
        // copies under the device's feet. Both are wishes: where the kernel does not know them, nothing is lost.
        // SAFETY: the mapping just made.
        unsafe {
            libc::madvise(address, bytes, libc::MADV_HUGEPAGE);
            libc::madvise(address, bytes, libc::MADV_DONTFORK);
        }
        Some(Self { address: NonNull::new(address.cast())?, bytes })
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: our own mapping; nothing refers to it any more.
        unsafe { libc::munmap(self.address.as_ptr().cast(), self.bytes) };
    }
}

/// Buffers of the last cycle, by size, for one pause to draw on.
pub struct Pool {
    spare: HashMap<usize, Vec<Buffer>>,
}

static SPARE: PerProcess<Mutex<Vec<Buffer>>> = PerProcess::new(Mutex::default);

impl Pool {
    /// The spare buffers, after making sure that the host can give what they lack for `sizes`. Those that do not fit
    /// are given back to the system when the pool is dropped, so that no more is kept than the last pause needed.
    pub fn take(sizes: &[usize]) -> Result<Self, Error> {
        let mut counts = HashMap::<usize, usize>::new();
        for size in sizes {
            *counts.entry(*size).or_default() += 1;
        }
        let mut spare = HashMap::<usize, Vec<Buffer>>::new();
        for buffer in std::mem::take(&mut *SPARE.get().lock().unwrap_or_else(PoisonError::into_inner)) {
            let fitting = spare.entry(buffer.memory.bytes).or_default();
            if fitting.len() < counts.get(&buffer.memory.bytes).copied().unwrap_or(0) {
                fitting.push(buffer);
            }
        }
        let pool = Self { spare };
        let have = |size: &usize| pool.spare.get(size).map_or(0, Vec::len);
        let needed = counts.iter().map(|(size, count)| (size * (count - have(size))) as u64).sum();
        let available = available_bytes();
        if needed > available {
            Self::give_back(pool.spare.into_values().flatten());
            return Err(Error::HostMemory { needed, available });
        }
        Ok(pool)
    }

    /// A buffer of exactly so many bytes.
    pub fn buffer(&mut self, bytes: usize, current: &Current) -> Result<Buffer, Error> {
        match self.spare.get_mut(&bytes).and_then(Vec::pop) {
            Some(buffer) => Ok(buffer),
            None => Buffer::new(bytes, current),
        }
    }

    /// Keeps buffers for the next pause.
    pub fn give_back(buffers: impl IntoIterator<Item = Buffer>) {
        SPARE.get().lock().unwrap_or_else(PoisonError::into_inner).extend(buffers);
    }

    /// Bytes kept for the next pause.
    pub fn spare_bytes() -> u64 {
        SPARE
            .existing()
            .map_or(0, |spare| spare.lock().unwrap_or_else(PoisonError::into_inner).iter().map(|buffer| buffer.memory.bytes as u64).sum())
    }
}

/// Bytes that the host can still give this process: what the kernel calls available, and what is left of the memory
/// limits of its control groups. Taking more would have the kernel kill somebody, perhaps the program itself.
fn available_bytes() -> u64 {
    system_available().unwrap_or(u64::MAX).min(cgroup_available().unwrap_or(u64::MAX))
}

fn system_available() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

/// The tightest of the limits on the way up (control groups, version 2). File pages that the group could drop count as
/// available.
fn cgroup_available() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/cgroup").ok()?;
    let group = text.lines().find_map(|line| line.strip_prefix("0::"))?.trim_start_matches('/');
    let mut directory = std::path::Path::new("/sys/fs/cgroup").join(group);
    let mut tightest = None;
    while directory.starts_with("/sys/fs/cgroup") {
        let number = |name: &str| fs::read_to_string(directory.join(name)).ok()?.trim().parse::<u64>().ok();
        if let (Some(limit), Some(current)) = (number("memory.max"), number("memory.current")) {
            let statistics = fs::read_to_string(directory.join("memory.stat")).unwrap_or_default();
            let droppable = statistics.lines().find_map(|line| line.strip_prefix("inactive_file ")?.parse().ok()).unwrap_or(0);
            let left = limit.saturating_sub(current.saturating_sub(droppable));
            tightest = Some(tightest.map_or(left, |known: u64| known.min(left)));
        }
        directory.pop();
    }
    tightest
}
