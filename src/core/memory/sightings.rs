//! Sightings of obstacles ([`super::obstacles`]): the program's calls that make or end one, and whether more have come since.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use vramctl_host::PerProcess;
use vramctl_model::{Obstacle, ObstacleKind};

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

/// Such a call in progress, until dropped.
struct InProgress(&'static Calls);

impl InProgress {
    fn begin(kind: ObstacleKind) -> Self {
        let calls = &CALLS.get()[kind as usize];
        calls.begun.fetch_add(1, Ordering::SeqCst);
        Self(calls)
    }
}

impl Drop for InProgress {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Ordering::SeqCst);
    }
}

/// Makes a call that may create an obstacle, and records it.
pub fn making<R>(kind: ObstacleKind, call: impl FnOnce() -> R) -> R {
    let _in_progress = InProgress::begin(kind);
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

/// Records an obstacle by its address or handle.
pub fn note(kind: ObstacleKind, key: u64) {
    lock(SEEN.get()).insert(key, kind);
}

/// Removes the obstacle at the address.
pub fn forget(address: u64) {
    if let Some(seen) = SEEN.existing() {
        lock(seen).remove(&address);
    }
}

/// Whether there is an obstacle at the address.
#[inline]
pub fn knows(address: u64) -> bool {
    SEEN.existing().is_some_and(|seen| lock(seen).contains_key(&address))
}

/// A call in progress that ends an obstacle, unless it fails.
pub struct Removal {
    key: u64,
    kind: ObstacleKind,
    _in_progress: InProgress,
}

/// Removes the obstacle at the address, if there is one, for a call that ends it: before the call, because afterwards another thread may get
/// the address.
#[inline]
pub fn ending(address: u64) -> Option<Removal> {
    let seen = SEEN.existing()?;
    let kind = *lock(seen).get(&address)?;
    let removal = Removal { key: address, kind, _in_progress: InProgress::begin(kind) };
    lock(seen).remove(&address);
    Some(removal)
}

impl Removal {
    /// The call has failed: the obstacle is still there.
    pub fn failed(self) {
        note(self.kind, self.key);
    }
}

/// Whether memory of this library belongs to communicators.
pub fn is_communicator(library: &str) -> bool {
    ["libnccl", "libnvshmem"].iter().any(|name| library.starts_with(name))
}

/// How many of each kind there are now, in words.
pub(crate) fn counted() -> Vec<(ObstacleKind, String)> {
    let mut times = BTreeMap::<_, usize>::new();
    if let Some(seen) = SEEN.existing() {
        lock(seen).values().for_each(|kind| *times.entry(*kind).or_default() += 1);
    }
    times.into_iter().map(|(kind, times)| (kind, format!("{times} {}", plural(kind)))).collect()
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
