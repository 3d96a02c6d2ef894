//! Contents in host memory, and copying only what has changed.
//!
//! With `VRAMCTL_RETAIN`, a backup stays after the resume. The next pause hashes the device memory and copies only the
//! pieces whose digests differ from the backup's (`docs/performance.md`).

use super::arena::{Arena, Range};
use super::digest::{self, DIGEST_PIECE, Digest, Hasher};
use super::loading::Kernels;
use super::transfer::{self, Flow, Part};
use super::{Backup, Item, Kept, OnProgress, Wanted};
use super::{copier, quiet};
use std::collections::{BTreeMap, BTreeSet};
use std::ops;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, mpsc};
use std::thread;
use vramctl_config::Config;
use vramctl_driver::{CUdeviceptr, Context, Current, Extent, RelaxedCapture};
use vramctl_host::{PerProcess, Unpoison, log_once, worker};
use vramctl_model::{Error, Policy};

/// An allocation's contents in the arena.
#[derive(Debug)]
pub struct InMemory {
    range: Range,
    /// The parts of the allocation it keeps, as offsets into the allocation.
    live: Vec<ops::Range<usize>>,
    /// Digests of the contents in `range`, one per piece. `None` if unknown, or while the contents are being replaced.
    digests: Mutex<Option<Vec<Digest>>>,
    /// Whether most of it was outdated when it was last overwritten.
    changes: AtomicBool,
}

impl InMemory {
    /// The kept parts, back to back.
    fn as_slice(&self) -> &[u8] {
        // SAFETY: a value is handed out only once its range is filled. Later writes happen while the allocation is active,
        // when nobody reads it.
        unsafe { self.range.as_slice() }
    }

    /// The kept contents from this byte of the allocation to the end of its kept part.
    pub fn kept_from(&self, byte: usize) -> Option<&[u8]> {
        let (live, at) = self.place_of(byte)?;
        Some(&self.as_slice()[at..at + (live.end - byte)])
    }

    /// The kept part that contains a byte of the allocation, and the byte's offset in the range.
    fn place_of(&self, byte: usize) -> Option<(&ops::Range<usize>, usize)> {
        let mut before = 0;
        self.live.iter().find_map(|live| {
            let found = live.contains(&byte).then(|| (live, before + byte - live.start));
            before += live.len();
            found
        })
    }

    /// Everything it keeps, split at the arena's pieces.
    pub fn parts(&self, extent: Extent) -> impl Iterator<Item = Part> {
        self.live.iter().flat_map(move |bytes| self.parts_in(extent, bytes.clone()))
    }

    /// Bytes kept.
    pub fn kept_bytes(&self) -> u64 {
        self.live.iter().map(|bytes| bytes.len() as u64).sum()
    }

    /// Whether digests tell what of it is outdated, and it was not mostly so the last time.
    pub fn is_worth_keeping(&self) -> bool {
        !self.changes.load(Ordering::Relaxed) && self.digests().is_some()
    }

    /// Where it begins in the arena, in bytes.
    pub fn offset(&self) -> usize {
        self.range.offset()
    }

    /// The parts of the allocation that it keeps.
    pub fn live(&self) -> &[ops::Range<usize>] {
        &self.live
    }

    fn parts_in(&self, extent: Extent, bytes: ops::Range<usize>) -> impl Iterator<Item = Part> {
        let at = self.range.offset() + self.place_of(bytes.start).map_or(0, |(_, at)| at);
        transfer::parts(extent.context, extent.address + bytes.start as u64, at, bytes.len())
    }

    fn digests(&self) -> MutexGuard<'_, Option<Vec<Digest>>> {
        self.digests.lock().unpoisoned()
    }

    /// The bytes that do not match `now`. Forgets the old digests, because the contents are about to be replaced: if that
    /// fails halfway, the next pause must not trust them.
    fn outdated(&self, now: Option<&[Digest]>) -> Vec<ops::Range<usize>> {
        let before = self.digests().take();
        match (before, now) {
            (Some(before), Some(now)) if before.len() == now.len() => {
                let outdated = differing(&before, now);
                let bytes: usize = outdated.iter().map(ops::Range::len).sum();
                self.changes.store(bytes as u64 > self.kept_bytes() / 2, Ordering::Relaxed);
                outdated
            }
            _ => self.live.clone(),
        }
    }
}

/// Byte ranges of the pieces that differ, adjacent ones merged.
fn differing(before: &[Digest], now: &[Digest]) -> Vec<ops::Range<usize>> {
    let mut ranges = Vec::<ops::Range<usize>>::new();
    for (piece, _) in before.iter().zip(now).enumerate().filter(|(_, (before, now))| before != now) {
        let start = piece * DIGEST_PIECE;
        match ranges.last_mut() {
            Some(last) if last.end == start => last.end += DIGEST_PIECE,
            _ => ranges.push(start..start + DIGEST_PIECE),
        }
    }
    ranges
}

/// Saves contents in host memory, overwriting retained backups. On error, no more host memory is in use than before. `done`
/// receives completed allocations while others are still being copied.
pub fn save(wanted: &[Wanted], flow: Flow, progress: &mut OnProgress<'_>, done: &mut dyn FnMut(&[&Item])) -> Result<Kept, Error> {
    if wanted.is_empty() {
        return Ok(Kept::default());
    }
    let items = places(wanted, flow)?;
    expect_restore(wanted);
    let contents =
        || items.iter().filter_map(|(extent, saved)| if let Backup::Host(saved) = &**saved { Some((*extent, saved)) } else { None });
    let of_address: BTreeMap<_, _> = contents().map(|(extent, saved)| (extent.address, saved)).collect();
    let item_at: BTreeMap<_, _> = items.iter().map(|item| (item.0.address, item)).collect();
    let mut done =
        |complete: Vec<CUdeviceptr>| done(&complete.iter().filter_map(|address| item_at.get(address).copied()).collect::<Vec<_>>());
    let (mut digests, mut outdated) = (BTreeMap::new(), BTreeMap::new());
    hash(wanted, &mut |group| {
        let mut unchanged = Vec::new();
        for (address, now) in group {
            let Some(saved) = of_address.get(&address) else { continue };
            let ranges = saved.outdated(Some(&now));
            if ranges.is_empty() {
                unchanged.push(address);
            }
            outdated.insert(address, ranges);
            digests.insert(address, now);
        }
        done(unchanged);
    })?;

    let (mut parts, mut missing) = (Vec::new(), BTreeMap::new());
    for (extent, saved) in contents() {
        let ranges = outdated.entry(extent.address).or_insert_with(|| saved.outdated(None));
        parts.extend(ranges.iter().flat_map(|bytes| saved.parts_in(extent, bytes.clone())));
        missing.insert(extent.address, ranges.iter().map(ops::Range::len).sum::<usize>());
    }
    parts.sort_unstable_by_key(|part| part.offset);
    transfer::save(&parts, flow, progress, &mut |copied| {
        let complete = copied.iter().filter_map(|part| {
            let (address, missing) = missing.range_mut(..=part.device).next_back()?;
            *missing -= part.bytes;
            (*missing == 0).then_some(*address)
        });
        done(complete.collect());
    })?;
    for (extent, saved) in contents() {
        *saved.digests() = digests.remove(&extent.address);
    }
    let copied: u64 = parts.iter().map(|part| part.bytes as u64).sum();
    let all: u64 = contents().map(|(_, saved)| saved.kept_bytes()).sum();
    Ok(Kept { items, unchanged_bytes: all - copied })
}

/// Prepares for copying these contents back later.
fn expect_restore(wanted: &[Wanted]) {
    let mut bytes = BTreeMap::<Context, usize>::new();
    for Wanted { extent, live, .. } in wanted {
        *bytes.entry(extent.context).or_default() += live.iter().map(ops::Range::len).sum::<usize>();
    }
    for (context, bytes) in bytes {
        copier::get_ready(context, bytes);
    }
}

/// Where each backup goes: over the old one, or to a new range.
fn places(wanted: &[Wanted], flow: Flow) -> Result<Vec<Item>, Error> {
    let missing = sizes_of_new(&wanted.iter().collect::<Vec<_>>());
    let fresh = match flow {
        _ if missing.is_empty() => Vec::new(),
        Flow::Whole => Arena::get()?.take(&missing)?,
        Flow::Pieces { .. } => Arena::get()?.take_by_piece(&missing)?,
    };
    let mut fresh = fresh.into_iter();
    let place = |wanted: &Wanted| {
        let make = |mut range: Range| {
            range.give_back_at_once(wanted.at_once);
            Arc::new(Backup::Host(InMemory { range, live: wanted.live.clone(), digests: Mutex::default(), changes: AtomicBool::default() }))
        };
        Some((wanted.extent, wanted.saved_over().cloned().or_else(|| fresh.next().map(make))?))
    };
    Ok(wanted.iter().filter_map(place).collect())
}

/// Sizes in bytes of the backups that need a new range.
pub fn sizes_of_new(wanted: &[&Wanted]) -> Vec<usize> {
    let new = wanted.iter().filter(|wanted| wanted.saved_over().is_none());
    new.map(|new| new.live.iter().map(ops::Range::len).sum()).collect()
}

impl Wanted {
    /// The earlier backup that these contents will overwrite: one that keeps the same parts. A backup saved before its tag
    /// was retained may keep other parts.
    pub fn saved_over(&self) -> Option<&Arc<Backup>> {
        self.before
            .as_ref()
            .filter(|_| self.policy == Policy::Host)
            .filter(|saved: &&Arc<Backup>| matches!(&***saved, Backup::Host(saved) if saved.live == self.live))
    }
}

/// Indices of the backups to drop to make room for ranges of these sizes ([`Arena::in_the_way`]).
pub fn in_the_way(retained: &[Arc<Backup>], sizes: &[usize]) -> Option<Vec<usize>> {
    let in_memory = |saved: &'_ Arc<Backup>| matches!(&**saved, Backup::Host(_));
    let places: Vec<_> = (0..retained.len()).filter(|place| in_memory(&retained[*place])).collect();
    let ranges: Vec<_> =
        places.iter().filter_map(|place| if let Backup::Host(saved) = &*retained[*place] { Some(&saved.range) } else { None }).collect();
    let found = Arena::get().ok()?.in_the_way(&ranges, sizes)?;
    Some(found.into_iter().map(|place| places[place]).collect())
}

/// Host memory that the system would get back if these backups were dropped.
pub fn given_back(all: &[Arc<Backup>]) -> u64 {
    let ranges: Vec<_> =
        all.iter().filter_map(|saved| if let Backup::Host(saved) = &**saved { Some(&saved.range) } else { None }).collect();
    Arena::get().map_or(0, |arena| arena.given_back(&ranges))
}

static HASHERS: PerProcess<Kernels<Hasher>> = PerProcess::new(Kernels::default);

/// Hashes the device memory of allocations whose backups will be retained. Hands the digests over by address, a group at a
/// time, while hashing continues. Allocations without a working hasher get no digests and are copied whole.
///
/// Waits for a hasher that is still being loaded: in a held program that takes only as long as the compiler (90 ms; at most 5 s), and without
/// digests the next pause would have to copy everything, too. Nobody has loaded one in advance where only a scheduler wants backups to be retained.
fn hash(wanted: &[Wanted], ready: &mut dyn FnMut(Vec<(CUdeviceptr, Vec<Digest>)>)) -> Result<(), Error> {
    if !wanted.iter().any(|new| new.retain) {
        return Ok(());
    }
    for context in wanted.iter().filter(|new| new.retain).map(|new| new.extent.context).collect::<BTreeSet<_>>() {
        // A destroyed context needs none.
        if let Ok(current) = Current::push(context) {
            prepare_digests(&current);
        }
    }
    for (context, kernel) in HASHERS.get().wait(quiet::PATIENCE).iter_mut() {
        let Some(hasher) = kernel.loaded() else { continue };
        let extents: Vec<_> = wanted
            .iter()
            .filter(|new| new.retain && new.extent.context == *context && new.extent.bytes.is_multiple_of(DIGEST_PIECE))
            .map(|new| new.extent)
            .collect();
        if extents.is_empty() {
            continue;
        }
        let (give, groups) = mpsc::channel();
        let all = &extents;
        thread::scope(|scope| {
            let work = move || {
                let _relaxed = RelaxedCapture::enter();
                groups_of(all).try_for_each(|group| {
                    let spans: Vec<_> = group.iter().map(|extent| (extent.address, extent.bytes)).collect();
                    let digests = Current::push(*context).and_then(|current| hasher.digests(&current, &spans));
                    let go_on = if digests.is_ok() { Some(()) } else { None };
                    give.send((group, digests)).ok().and(go_on)
                });
            };
            worker::spawn_scoped(scope, "vramctl-hash", work).map_err(|error| Error::NoThread(error.to_string()))?;
            for (group, digests) in groups {
                match digests {
                    Ok(digests) => {
                        let mut digests = digests.into_iter();
                        let of = |extent: &Extent| (extent.address, digests.by_ref().take(extent.bytes / DIGEST_PIECE).collect());
                        ready(group.iter().map(of).collect());
                    }
                    Err(failure) if failure.is_of_earlier_work() => return Err(Error::from(failure)),
                    Err(failure) => log::warn!("{failure}: what has changed is not known, so everything is copied"),
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Groups of allocations that take about as long to hash as to unmap, so that the two overlap.
fn groups_of(extents: &[Extent]) -> impl Iterator<Item = &[Extent]> {
    const GROUP: usize = 2 << 30;
    let mut rest = extents;
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let full = rest.iter().position(|extent| {
            bytes += extent.bytes;
            bytes >= GROUP
        });
        let (group, after) = rest.split_at(full.map_or(rest.len(), |last| last + 1));
        rest = after;
        (!group.is_empty()).then_some(group)
    })
}

/// Loads the hashing kernel into the current context, so that its allocations get digests from then on.
pub fn prepare_digests(current: &Current) {
    HASHERS.get().begin(current.context(), digest::PTX, Hasher::load, |failure| {
        log_once!(log::Level::Warn, "{failure}: cannot compute digests, so every pause copies everything");
    });
}

/// Waits until no kernel is being loaded. For tests and measurements.
pub fn settle_digests() {
    HASHERS.get().settle();
}

/// Drops a destroyed context's hasher.
pub fn forget_digests(context: Context) {
    if let Some(hashers) = HASHERS.existing() {
        hashers.forget(context);
    }
}

/// Prepares `VRAMCTL_PREWARM` bytes of host memory in the background. Only the first call has an effect.
pub fn prewarm(context: Context) {
    static STARTED: PerProcess<Once> = PerProcess::new(Once::new);
    let bytes = Config::get().prewarm;
    if bytes > 0 {
        STARTED.get().call_once(|| match Arena::get() {
            Ok(arena) => arena.prewarm(bytes, context),
            Err(error) => log::warn!("{error}"),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr;

    /// What is not in these ranges is not copied at the next pause.
    #[test]
    fn pieces_that_differ_are_joined_only_where_they_touch() {
        let found = |before: [u64; 7], now: [u64; 7]| {
            let [before, now] = [before, now].map(|numbers| numbers.map(Digest::of));
            let in_pieces = |range: &ops::Range<usize>| {
                assert!(range.start.is_multiple_of(DIGEST_PIECE) && range.end.is_multiple_of(DIGEST_PIECE), "{range:?}");
                (range.start / DIGEST_PIECE, range.end / DIGEST_PIECE)
            };
            differing(&before, &now).iter().map(in_pieces).collect::<Vec<_>>()
        };
        assert!(found([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7]).is_empty());
        assert_eq!(found([1, 2, 3, 4, 5, 6, 7], [0, 2, 3, 0, 0, 0, 7]), [(0, 1), (3, 6)]);
        assert_eq!(found([1, 2, 3, 4, 5, 6, 7], [1, 0, 3, 0, 5, 0, 0]), [(1, 2), (3, 4), (5, 7)]);
        assert_eq!(found([1; 7], [0; 7]), [(0, 7)]);
    }

    #[test]
    fn groups_have_all_allocations_in_order_and_end_where_they_are_full() {
        const GIB: usize = 1 << 30;
        // SAFETY: never given to the driver.
        let context: Context = unsafe { std::mem::zeroed() };
        let extents: Vec<_> = (0..)
            .zip([GIB, GIB, GIB, 3 * GIB, GIB, GIB / 2])
            .map(|(address, bytes)| Extent { context, device: 0, address, bytes })
            .collect();
        let groups: Vec<Vec<u64>> = groups_of(&extents).map(|group| group.iter().map(|extent| extent.address).collect()).collect();
        assert_eq!(groups, [vec![0, 1], vec![2, 3], vec![4, 5]]);
        assert!(ptr::eq(groups_of(&extents[..1]).next().unwrap(), &raw const extents[..1]));
        assert_eq!(groups_of(&[]).count(), 0);
    }
}
