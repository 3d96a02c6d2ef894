//! Sightings of obstacles ([`super`]): the program's calls that create or end one, and whether there are more since a moment.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use vramctl_driver::{self as driver, CUdevice, CUdeviceptr, Context};
use vramctl_host::{PerProcess, Unpoison};
use vramctl_model::{Obstacle, ObstacleKind, Span, StatusCode, code};

/// What an obstacle is recorded under: it ends with that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ObstacleKey {
    /// An allocation, by its first address.
    Address(CUdeviceptr),
    /// A mapping of `cuMemMap`, by its first address.
    Mapping(CUdeviceptr),
    /// A handle of the driver's.
    Handle(u64),
    /// Memory of `cuMemCreate`, by its record in [`unmanaged`](super::unmanaged).
    Created(usize),
    /// A memory pool, by the driver's handle.
    Pool(usize),
}

/// One reason why something is an obstacle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Reason {
    kind: ObstacleKind,
    /// The program's call.
    call: &'static str,
    /// Who got access by it.
    peer: Option<CUdevice>,
}

#[derive(Debug, Clone, Default)]
struct Sighting {
    reasons: BTreeSet<Reason>,
    /// How often it is open, if it belongs to another process: the driver counts the openings, and each is closed once.
    openings: usize,
    /// The context with which it ends. `None` for what no context owns.
    context: Option<Context>,
}

impl Sighting {
    fn of(key: ObstacleKey) -> Self {
        let context = match key {
            ObstacleKey::Address(address) => driver::context_of_memory(address),
            ObstacleKey::Mapping(_) | ObstacleKey::Handle(_) | ObstacleKey::Created(_) | ObstacleKey::Pool(_) => None,
        };
        Self { context, ..Self::default() }
    }
}

/// What the program's calls have made an obstacle, and still is one.
static SEEN: PerProcess<Mutex<BTreeMap<ObstacleKey, Sighting>>> = PerProcess::new(Mutex::default);

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

/// The same for a call that creates one whenever it succeeds, which `note` records.
pub fn noting(kind: ObstacleKind, call: impl FnOnce() -> StatusCode, note: impl FnOnce()) -> StatusCode {
    making(kind, || {
        let answer = call();
        if answer == code::SUCCESS {
            note();
        }
        answer
    })
}

/// A moment in time, as the number of calls of each kind that had ended by then.
pub(crate) struct Moment([usize; ObstacleKind::ALL.len()]);

impl Moment {
    /// Captures the current moment; later obstacles are reported by [`since`](Self::since).
    pub fn now() -> Self {
        Self(CALLS.get().each_ref().map(|calls| calls.ended.load(Ordering::SeqCst)))
    }

    /// Obstacles that may have appeared since then, or are about to. Does not call the driver, and waits for no thread that does.
    pub fn since(&self) -> Vec<Obstacle> {
        let calls = CALLS.get().each_ref().map(|calls| calls.begun.load(Ordering::SeqCst));
        let new =
            ObstacleKind::ALL.into_iter().map(|kind| (kind, calls[kind as usize] - self.0[kind as usize])).filter(|(_, count)| *count > 0);
        new.map(|(kind, count)| Obstacle { kind, what: format!("{}, new or in progress", several(count, kind)), bytes: 0 }).collect()
    }
}

/// Records that `call` has made something an obstacle.
pub fn note(kind: ObstacleKind, call: &'static str, key: ObstacleKey) {
    record(key, Reason { kind, call, peer: None }, |_| ());
}

fn record(key: ObstacleKey, reason: Reason, more: impl FnOnce(&mut Sighting)) {
    // The driver is not called while the map is locked.
    let new = Sighting::of(key);
    let mut seen = SEEN.get().lock().unpoisoned();
    // What was there before may have ended with its context.
    let one = seen
        .entry(key)
        .and_modify(|one| {
            if new.context.is_some() && one.context != new.context {
                *one = new.clone();
            }
        })
        .or_insert(new);
    one.reasons.insert(reason);
    more(one);
}

/// Records that `call` has opened memory of another process.
pub fn note_opened(call: &'static str, key: ObstacleKey) {
    record(key, Reason { kind: ObstacleKind::Shared, call, peer: None }, |one| one.openings += 1);
}

/// Records that `call` has given another device access.
pub fn note_access(call: &'static str, key: ObstacleKey, peer: CUdevice) {
    record(key, Reason { kind: ObstacleKind::Peers, call, peer: Some(peer) }, |_| ());
}

/// Records that a device's access to something has been withdrawn.
pub fn note_no_access(key: ObstacleKey, peer: CUdevice) {
    withdraw(key..=key, peer);
}

/// Records that a device's access to the mappings in a range has been withdrawn.
pub fn note_no_access_in(span: Span, peer: CUdevice) {
    withdraw(mapped_in(span), peer);
}

fn withdraw(keys: RangeInclusive<ObstacleKey>, peer: CUdevice) {
    let Some(seen) = SEEN.existing() else { return };
    let mut seen = seen.lock().unpoisoned();
    seen.range_mut(keys.clone()).for_each(|(_, one)| one.reasons.retain(|reason| reason.peer != Some(peer)));
    seen.retain(|key, one| !keys.contains(key) || !one.reasons.is_empty());
}

/// The mappings that begin in a range.
fn mapped_in(span: Span) -> RangeInclusive<ObstacleKey> {
    let last = span.address.saturating_add((span.bytes as u64).saturating_sub(1));
    ObstacleKey::Mapping(span.address)..=ObstacleKey::Mapping(last)
}

/// Whether something is an obstacle.
#[inline]
pub fn knows(key: ObstacleKey) -> bool {
    SEEN.existing().is_some_and(|seen| seen.lock().unpoisoned().contains_key(&key))
}

/// Records that something has ended.
pub fn forget(key: ObstacleKey) {
    if let Some(seen) = SEEN.existing() {
        seen.lock().unpoisoned().remove(&key);
    }
}

/// Makes a call that ends an obstacle, if there is one, unless it fails. If it is open several times, this ends one opening.
#[inline]
pub fn ending(key: ObstacleKey, call: impl FnOnce() -> StatusCode) -> StatusCode {
    ending_all(key..=key, call)
}

/// The same for the mappings in a range.
pub fn ending_mapped_in(span: Span, call: impl FnOnce() -> StatusCode) -> StatusCode {
    ending_all(mapped_in(span), call)
}

fn ending_all(keys: RangeInclusive<ObstacleKey>, call: impl FnOnce() -> StatusCode) -> StatusCode {
    // Before the call: afterwards another thread may get the address.
    let taken = take(keys);
    let answer = call();
    if let Some((_in_progress, taken)) = taken
        && answer != code::SUCCESS
    {
        let mut seen = SEEN.get().lock().unpoisoned();
        for (key, one) in taken {
            let now = seen.entry(key).or_insert_with(|| Sighting { context: one.context, ..Sighting::default() });
            now.reasons.extend(one.reasons);
            now.openings += one.openings;
        }
    }
    answer
}

/// Removes obstacles, for a call that ends them.
fn take(keys: RangeInclusive<ObstacleKey>) -> Option<(InProgress, Vec<(ObstacleKey, Sighting)>)> {
    let mut seen = SEEN.existing()?.lock().unpoisoned();
    let kind = seen.range(keys.clone()).find_map(|(_, one)| one.reasons.first()).map(|reason| reason.kind)?;
    let in_progress = InProgress::begin(kind);
    let known: Vec<_> = seen.range(keys).map(|(key, _)| *key).collect();
    let taken = known.into_iter().filter_map(|key| match seen.get_mut(&key) {
        Some(one) if one.openings > 1 => {
            one.openings -= 1;
            Some((key, Sighting { openings: 1, ..one.clone() }))
        }
        _ => seen.remove_entry(&key),
    });
    Some((in_progress, taken.collect()))
}

/// Whether memory of this library belongs to communicators.
pub fn is_communicator(library: &str) -> bool {
    ["libnccl", "libnvshmem"].iter().any(|name| library.starts_with(name))
}

/// Forgets what has ended with its context.
fn forget_gone() {
    let Some(seen) = SEEN.existing() else { return };
    let mut contexts: BTreeSet<_> = seen.lock().unpoisoned().values().filter_map(|one| one.context).collect();
    // The driver is not called while the map is locked.
    contexts.retain(|context| context.is_gone());
    if !contexts.is_empty() {
        seen.lock().unpoisoned().retain(|_, one| one.context.is_none_or(|context| !contexts.contains(&context)));
    }
}

/// How many of each kind there are now, and the calls that made them, in words.
pub(crate) fn counted() -> Vec<(ObstacleKind, String)> {
    forget_gone();
    let mut times = BTreeMap::<_, usize>::new();
    if let Some(seen) = SEEN.existing() {
        for one in seen.lock().unpoisoned().values() {
            let calls: BTreeSet<_> = one.reasons.iter().map(|reason| (reason.kind, reason.call)).collect();
            for call in calls {
                *times.entry(call).or_default() += 1;
            }
        }
    }
    times.into_iter().map(|((kind, call), times)| (kind, format!("{} ({call})", several(times, kind)))).collect()
}

/// A number of them, in words.
fn several(count: usize, kind: ObstacleKind) -> String {
    let (what, which) = match kind {
        ObstacleKind::Communicator => ("allocation", " of NCCL or NVSHMEM"),
        ObstacleKind::Shared => ("piece", " of memory shared with other processes"),
        ObstacleKind::Registered => ("registration", " of memory"),
        ObstacleKind::Peers => ("grant", " of access to another GPU's memory"),
        ObstacleKind::Multicast => ("multicast object", ""),
        ObstacleKind::Unified => ("allocation", " of unified memory"),
        ObstacleKind::Mps => ("GPU", " behind MPS"),
        ObstacleKind::Mig => ("GPU", " in MIG mode"),
    };
    let end = if count == 1 { "" } else { "s" };
    format!("{count} {what}{end}{which}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_a_kind_is_not_in_the_plural() {
        for (count, kind, text) in [
            (1, ObstacleKind::Multicast, "1 multicast object"),
            (2, ObstacleKind::Multicast, "2 multicast objects"),
            (1, ObstacleKind::Shared, "1 piece of memory shared with other processes"),
            (3, ObstacleKind::Peers, "3 grants of access to another GPU's memory"),
        ] {
            assert_eq!(several(count, kind), text);
        }
    }

    #[test]
    fn each_opening_ends_once_unless_the_call_fails() {
        let key = ObstacleKey::Address(0x7000_0000_0000);
        (0..3).for_each(|_| note_opened("open", key));
        assert_eq!(ending(key, || code::UNKNOWN), code::UNKNOWN);
        ending(key, || code::SUCCESS);
        ending(key, || code::SUCCESS);
        ending(key, || code::UNKNOWN);
        assert!(knows(key));
        ending(key, || code::SUCCESS);
        assert!(!knows(key));

        // What this process shares is not opened, but freed.
        (0..2).for_each(|_| note(ObstacleKind::Shared, "share", key));
        ending(key, || code::SUCCESS);
        assert!(!knows(key));
    }

    #[test]
    fn a_failed_call_leaves_what_another_thread_has_noted_meanwhile() {
        let key = ObstacleKey::Address(0x7100_0000_0000);
        note_opened("open", key);
        ending(key, || {
            note_opened("open", key);
            code::UNKNOWN
        });
        ending(key, || code::SUCCESS);
        assert!(knows(key));
        ending(key, || code::SUCCESS);
        assert!(!knows(key));
    }

    #[test]
    fn access_ends_for_each_device_and_with_the_mapping() {
        let span = Span { address: 0x7200_0000_0000, bytes: 0x40_0000 };
        let [first, second] = [0, 0x20_0000].map(|offset| ObstacleKey::Mapping(span.address + offset));
        for (key, peer) in [(first, 1), (first, 2), (second, 1)] {
            note_access("access", key, peer);
        }
        note_no_access_in(span, 1);
        assert!(knows(first) && !knows(second));
        note_no_access(first, 2);
        assert!(!knows(first));
        note_access("access", second, 1);
        ending_mapped_in(Span { bytes: 0x20_0000, ..span }, || code::SUCCESS);
        assert!(knows(second));
        ending_mapped_in(span, || code::SUCCESS);
        assert!(!knows(second));
    }
}
