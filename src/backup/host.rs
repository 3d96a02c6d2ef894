//! Contents in host memory, and copying only what has changed.
//!
//! With `VRAMCTL_RETAIN`, what was saved stays after the resume. The next pause hashes the device memory and copies only
//! the pieces whose digest is not that of the copy (`docs/unchanged.md`).

use super::arena::{Arena, Range};
use super::copier;
use super::digest::{DIGEST_PIECE, Digest, Hasher};
use super::transfer::{self, Part};
use super::{Item, Kept, Saved, Wanted};
use std::collections::BTreeMap;
use std::ops;
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError, mpsc};
use std::thread;
use vramctl_config::{Config, Unchanged};
use vramctl_driver::{CUdeviceptr, Context, Current, Extent, RelaxedCapture};
use vramctl_host::{PerProcess, log_once, worker};
use vramctl_model::{Error, Progress};

/// The contents of an allocation, in the arena.
#[derive(Debug)]
pub struct InMemory {
    range: Range,
    /// The parts of the allocation that it keeps, in bytes from its beginning.
    live: Vec<ops::Range<usize>>,
    /// Of the contents in `range`, one for each piece. `None`: not known, or the contents are being replaced.
    digests: Mutex<Option<Vec<Digest>>>,
}

impl InMemory {
    /// The contents, one live part behind the other, readable for as long as the value lives.
    fn as_slice(&self) -> &[u8] {
        // SAFETY: a value is handed out only when its range has been filled, and what is written to it later is written
        // while the allocation is active, when nobody reads it.
        unsafe { self.range.as_slice() }
    }

    /// What is kept of an allocation from this byte of it on, up to the first that is not kept.
    pub fn kept_from(&self, byte: usize) -> Option<&[u8]> {
        let (live, at) = self.place_of(byte)?;
        Some(&self.as_slice()[at..at + (live.end - byte)])
    }

    /// The live part that a byte of the allocation is in, and where it is in the range.
    fn place_of(&self, byte: usize) -> Option<(&ops::Range<usize>, usize)> {
        let mut before = 0;
        self.live.iter().find_map(|live| {
            let found = live.contains(&byte).then(|| (live, before + byte - live.start));
            before += live.len();
            found
        })
    }

    /// All that it keeps, in the pieces of the arena.
    pub fn parts(&self, extent: Extent) -> impl Iterator<Item = Part> {
        self.live.iter().flat_map(move |bytes| self.parts_in(extent, bytes.clone()))
    }

    /// How many bytes it keeps.
    pub fn kept_bytes(&self) -> u64 {
        self.live.iter().map(|bytes| bytes.len() as u64).sum()
    }

    fn parts_in(&self, extent: Extent, bytes: ops::Range<usize>) -> impl Iterator<Item = Part> {
        let at = self.range.offset() + self.place_of(bytes.start).map_or(0, |(_, at)| at);
        transfer::parts(extent.context, extent.address + bytes.start as u64, at, bytes.len())
    }

    fn digests(&self) -> MutexGuard<'_, Option<Vec<Digest>>> {
        self.digests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The bytes that are not what `now` says they are, and from now on not known to be anything: they are about to be
    /// replaced. Should that fail halfway, the next pause must not believe the old digests.
    fn outdated(&self, now: Option<&[Digest]>) -> Vec<ops::Range<usize>> {
        let before = self.digests().take();
        match (before, now) {
            (Some(before), Some(now)) => differing(&before, now),
            _ => self.live.clone(),
        }
    }
}

/// The ranges in bytes of the pieces that differ, neighbours joined.
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

/// Saves contents in host memory: over what was saved before, where that was retained. After an error no more host memory
/// is used than before. `done` is told the addresses of what is complete while other contents are being copied.
pub fn save(wanted: &[Wanted], progress: &mut dyn FnMut(Progress), done: &mut dyn FnMut(&[CUdeviceptr])) -> Result<Kept, Error> {
    if wanted.is_empty() {
        return Ok(Kept::default());
    }
    let items = places(wanted)?;
    expect_restore(wanted);
    let contents =
        || items.iter().filter_map(|(extent, saved)| if let Saved::Host(saved) = &**saved { Some((*extent, saved)) } else { None });
    let of_address: BTreeMap<_, _> = contents().map(|(extent, saved)| (extent.address, saved)).collect();
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
        done(&unchanged);
    })?;

    let (mut parts, mut missing) = (Vec::new(), BTreeMap::new());
    for (extent, saved) in contents() {
        let ranges = outdated.entry(extent.address).or_insert_with(|| saved.outdated(None));
        parts.extend(ranges.iter().flat_map(|bytes| saved.parts_in(extent, bytes.clone())));
        missing.insert(extent.address, ranges.iter().map(ops::Range::len).sum::<usize>());
    }
    parts.sort_unstable_by_key(|part| part.offset);
    transfer::save(&parts, progress, &mut |copied| {
        let complete = copied.iter().filter_map(|part| {
            let (address, missing) = missing.range_mut(..=part.device).next_back()?;
            *missing -= part.bytes;
            (*missing == 0).then_some(*address)
        });
        done(&complete.collect::<Vec<_>>());
    })?;
    for (extent, saved) in contents() {
        *saved.digests() = digests.remove(&extent.address);
    }
    let copied: u64 = parts.iter().map(|part| part.bytes as u64).sum();
    let all: u64 = contents().map(|(_, saved)| saved.kept_bytes()).sum();
    Ok(Kept { items, unchanged_bytes: all - copied })
}

/// These contents are about to be saved, and later copied back: makes ready what that is faster with.
fn expect_restore(wanted: &[Wanted]) {
    let mut bytes = BTreeMap::<Context, usize>::new();
    for Wanted { extent, live, .. } in wanted {
        *bytes.entry(extent.context).or_default() += live.iter().map(ops::Range::len).sum::<usize>();
    }
    for (context, bytes) in bytes {
        copier::get_ready(context, bytes);
    }
}

/// Where the contents were saved before, if they can be saved over that.
fn retained(wanted: &Wanted) -> Option<Arc<Saved>> {
    // It keeps the same parts, unless it was saved before it was to be retained.
    wanted.before.clone().filter(|saved| matches!(&**saved, Saved::Host(saved) if saved.live == wanted.live))
}

/// Bytes of new host memory that saving these contents would take.
pub fn fresh_bytes(wanted: &Wanted) -> u64 {
    if retained(wanted).is_some() { 0 } else { wanted.live.iter().map(|bytes| bytes.len() as u64).sum() }
}

/// Where the contents go: where they were, or ranges of their own.
fn places(wanted: &[Wanted]) -> Result<Vec<Item>, Error> {
    let retained: Vec<_> = wanted.iter().map(retained).collect();
    let missing: Vec<_> = wanted
        .iter()
        .zip(&retained)
        .filter(|(_, saved)| saved.is_none())
        .map(|(new, _)| new.live.iter().map(ops::Range::len).sum())
        .collect();
    let mut fresh = if missing.is_empty() { Vec::new() } else { Arena::get()?.take(&missing)? }.into_iter();
    let place = |(wanted, saved): (&Wanted, Option<Arc<Saved>>)| {
        let make = |range| Arc::new(Saved::Host(InMemory { range, live: wanted.live.clone(), digests: Mutex::default() }));
        Some((wanted.extent, saved.or_else(|| fresh.next().map(make))?))
    };
    Ok(wanted.iter().zip(retained).filter_map(place).collect())
}

type Hashers = Mutex<BTreeMap<Context, Hasher>>;
static HASHERS: PerProcess<Hashers> = PerProcess::new(Hashers::default);

fn hashers() -> MutexGuard<'static, BTreeMap<Context, Hasher>> {
    HASHERS.get().lock().unwrap_or_else(PoisonError::into_inner)
}

/// Computes the digests of what is in device memory now, of those allocations whose backups will be retained, and hands
/// them over by address, a group at a time, while others are being computed. None of what there is no hasher for, or where
/// it fails: that is copied.
fn hash(wanted: &[Wanted], tell: &mut dyn FnMut(Vec<(CUdeviceptr, Vec<Digest>)>)) -> Result<(), Error> {
    for (context, hasher) in hashers().iter_mut() {
        let hashed: Vec<_> = wanted
            .iter()
            .filter(|new| new.retain && new.extent.context == *context && new.extent.bytes.is_multiple_of(DIGEST_PIECE))
            .map(|new| new.extent)
            .collect();
        if hashed.is_empty() {
            continue;
        }
        let (give, groups) = mpsc::channel();
        let all = &hashed;
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
            worker::spawn_scoped(scope, "vramctl-hash", work)
                .map_err(|error| Error::Internal(format!("no thread could be started: {error}")))?;
            for (group, digests) in groups {
                match digests {
                    Ok(digests) => {
                        let mut digests = digests.into_iter();
                        let of = |extent: &Extent| (extent.address, digests.by_ref().take(extent.bytes / DIGEST_PIECE).collect());
                        tell(group.iter().map(of).collect());
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

/// Allocations in groups that take about as long to hash as to be given up, so that both are done side by side.
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

/// Has the digests of allocations in the current context computed from now on. Done once in each context.
pub fn prepare_digests(current: &Current) {
    if Config::get().unchanged == Unchanged::Off || hashers().contains_key(&current.context()) {
        return;
    }
    let _relaxed = RelaxedCapture::enter();
    match Hasher::new(current) {
        Ok(hasher) => drop(hashers().insert(current.context(), hasher)),
        Err(failure) => {
            log_once!(log::Level::Warn, "{failure}: no digests can be computed, so every pause copies everything");
        }
    }
}

/// The context is gone, and its hasher with it.
pub fn forget_digests(context: Context) {
    if HASHERS.existing().is_some() {
        drop(hashers().remove(&context));
    }
}

/// Prepares as much host memory as `VRAMCTL_PREWARM` says, in the background. The first call does it.
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
