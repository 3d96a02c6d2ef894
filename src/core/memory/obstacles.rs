//! Obstacles: what the driver checkpoints but cannot restore. A process with an obstacle would be lost, so they must be known before a
//! suspend.
//!
//! Driver 580 refuses to restore processes with NCCL or memory that several processes use; earlier ones, with unified memory. An obstacle
//! is reported as long as it may exist: too long rather than too short.

use super::{Allocation, Memory, borrow, communicators, left};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vramctl_driver as driver;
use vramctl_host::PerProcess;
use vramctl_model::{Obstacle, ObstacleKind, TransitionRequest};

/// Seen at the program's calls and left to CUDA, by address or handle.
static SEEN: PerProcess<Mutex<BTreeMap<u64, ObstacleKind>>> = PerProcess::new(Mutex::default);

fn lock(seen: &Mutex<BTreeMap<u64, ObstacleKind>>) -> MutexGuard<'_, BTreeMap<u64, ObstacleKind>> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The program's calls that may leave an obstacle behind, by kind.
static CALLS: PerProcess<[Calls; ObstacleKind::ALL.len()]> = PerProcess::new(Default::default);

/// Atomics and no lock: a thread that blocks in the driver may hold locks.
#[derive(Default)]
struct Calls {
    begun: AtomicUsize,
    ended: AtomicUsize,
}

/// Makes a call that may create an obstacle, and records it.
pub fn making<R>(kind: ObstacleKind, call: impl FnOnce() -> R) -> R {
    struct Ended(&'static AtomicUsize);
    impl Drop for Ended {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let Calls { begun, ended } = &CALLS.get()[kind as usize];
    begun.fetch_add(1, Ordering::SeqCst);
    let _ended = Ended(ended);
    call()
}

/// A moment: the calls that had ended then.
pub(crate) struct Moment([usize; ObstacleKind::ALL.len()]);

impl Moment {
    /// Captures the current moment; later obstacles are reported by [`since`](Self::since).
    pub fn now() -> Self {
        Self(CALLS.get().each_ref().map(|calls| calls.ended.load(Ordering::SeqCst)))
    }

    /// Obstacles that may have appeared since then, or are about to. Does not call the driver, and waits for no thread that does.
    pub fn since(&self) -> Vec<Obstacle> {
        let calls = CALLS.get().each_ref().map(|calls| calls.begun.load(Ordering::SeqCst));
        let new = ObstacleKind::ALL.into_iter().map(|kind| (kind, calls[kind as usize] - self.0[kind as usize]));
        let found = |(kind, count)| Obstacle { kind, what: format!("{count} {}, new or in progress", plural(kind)), bytes: 0 };
        new.filter(|(_, count)| *count > 0).map(found).collect()
    }
}

fn plural(kind: ObstacleKind) -> &'static str {
    match kind {
        ObstacleKind::Communicator => "allocations of NCCL or NVSHMEM",
        ObstacleKind::Shared => "pieces of memory shared with other processes",
        ObstacleKind::Registered => "registrations of memory",
        ObstacleKind::Peers => "GPUs with access to another's memory",
        ObstacleKind::Multicast => "multicast objects",
        ObstacleKind::Unified => "allocations of unified memory (cudaMallocManaged)",
        ObstacleKind::Mps => "GPUs behind MPS",
        ObstacleKind::Mig => "GPUs in MIG mode",
    }
}

/// What becomes of memory that processes under the library share by CUDA IPC.
const UNLESS_TOGETHER: &str = "unless one command takes all of these processes (--all, or a name that they have in common)";

/// Whether memory of this library belongs to communicators.
pub fn is_communicator(library: &str) -> bool {
    ["libnccl", "libnvshmem"].iter().any(|name| library.starts_with(name))
}

/// The communicators whose creation was seen, by their number of ranks.
fn known_communicators() -> Option<String> {
    let mut times = BTreeMap::<_, usize>::new();
    for one in communicators::list() {
        *times.entry(one.ranks).or_default() += 1;
    }
    let text = |(ranks, times): (u32, usize)| match ranks {
        0 => format!("{times} of unknown size"),
        1 => format!("{times} of 1 rank"),
        ranks => format!("{times} of {ranks} ranks"),
    };
    let texts: Vec<_> = times.into_iter().map(text).collect();
    if texts.is_empty() { None } else { Some(texts.join(", ")) }
}

/// Records an obstacle by its address or handle.
pub fn note(kind: ObstacleKind, key: u64) {
    lock(SEEN.get()).insert(key, kind);
}

/// Removes the obstacle at the address.
#[inline]
pub fn forget(address: u64) {
    if let Some(seen) = SEEN.existing() {
        lock(seen).remove(&address);
    }
}

impl Memory {
    /// What prevents a suspend of this process.
    pub fn obstacles(&self) -> Vec<Obstacle> {
        self.obstacles_after(&[], &TransitionRequest::default())
    }

    /// What would prevent it after a pause of these allocations.
    pub(crate) fn obstacles_after(&self, paused: &[Arc<Allocation>], request: &TransitionRequest) -> Vec<Obstacle> {
        let paused: BTreeSet<_> = paused.iter().map(Arc::as_ptr).collect();
        let mut found = Vec::new();
        let mut add = |kind, what: String, bytes| found.push(Obstacle { kind, what, bytes });
        // Known communicators are reported together with NCCL's memory; NCCL may also be linked into another library.
        let mut known = known_communicators();
        for owner in left::status() {
            if is_communicator(&owner.owner) {
                let which = if owner.owner.starts_with("libnccl") { known.take() } else { None };
                let which = which.map_or_else(String::new, |which| format!(": {which}"));
                add(ObstacleKind::Communicator, format!("communicators of {}{which}", owner.owner), owner.bytes);
            }
        }
        if let Some(which) = known {
            add(ObstacleKind::Communicator, format!("communicators of NCCL: {which}"), 0);
        }
        let (mut lent, mut registered) = (0, BTreeMap::<_, u64>::new());
        for allocation in self.snapshot().iter().filter(|allocation| !paused.contains(&Arc::as_ptr(allocation))) {
            let (bytes, contents) = (allocation.bytes() as u64, allocation.contents());
            // Paused allocations have no memory that anybody could refer to.
            if contents.memory.is_none() {
                continue;
            }
            if !contents.lent_to_others(&TransitionRequest::default()).is_empty() {
                lent += bytes;
            } else if let Some(registrant) = contents.registrant() {
                *registered.entry(registrant).or_default() += bytes;
            }
        }
        if lent > 0 {
            add(ObstacleKind::Shared, format!("memory that other processes have open, {UNLESS_TOGETHER}"), lent);
        }
        let borrowed = borrow::count_after(request);
        if borrowed > 0 {
            let pieces = if borrowed == 1 { "piece" } else { "pieces" };
            add(ObstacleKind::Shared, format!("{borrowed} {pieces} of other processes' memory, {UNLESS_TOGETHER}"), 0);
        }
        for (registrant, bytes) in registered {
            add(ObstacleKind::Registered, format!("memory registered by {registrant}"), bytes);
        }
        if let Some(seen) = SEEN.existing() {
            let mut times = BTreeMap::<_, usize>::new();
            lock(seen).values().for_each(|kind| *times.entry(*kind).or_default() += 1);
            for (kind, times) in times {
                add(kind, format!("{times} {}", plural(kind)), 0);
            }
        }
        let peers = self.peers.read().unwrap_or_else(PoisonError::into_inner);
        if !peers.is_empty() {
            let pairs: Vec<_> = peers.keys().map(|(device, other)| format!("{device} to {other}")).collect();
            add(ObstacleKind::Peers, format!("access of GPU {}", pairs.join(", ")), 0);
        }
        drop(peers);
        // Also for a process without memory here: it may still have contexts.
        if driver::devices().any(driver::is_behind_mps) {
            add(ObstacleKind::Mps, "a GPU behind MPS".into(), 0);
        }
        found
    }
}
