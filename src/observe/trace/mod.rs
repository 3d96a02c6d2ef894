//! What happens to this process's memory over time, for `vramctl trace` and for reports. Off unless `VRAMCTL_TRACE` is set, or somebody asks for
//! it later (`vramctl trace --start`).
//!
//! Recording neither waits nor allocates, except at the first event of a process and of an owner. When it is off, it costs one load.

pub mod record;
mod ring;

use record::{read, written};
use ring::Ring;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use vramctl_config::{Config, MOST_TRACE};
use vramctl_control::protocol::{Refusal, Reply};
use vramctl_core::events::{Change, FailedRequest, Owner, Presence};
use vramctl_core::memory::Memory;
use vramctl_driver::{self as driver, CUdevice, Current};
use vramctl_host::stack::thread_id;
use vramctl_host::system::{nanoseconds, now};
use vramctl_host::{PerProcess, fnv1a};
use vramctl_model::{Error, Events, Happening, Kind, MemoryOwner, OwnersBytes, Report, Stage, Verb, code};

/// The most events in one answer.
const MOST: usize = 8192;

/// Never 0. Two owners with the same 64-bit hash would be shown as one. `gpu`: see [`Recorder::gpu`].
fn hash_of_owner(owner: Owner<'_>, device: Option<CUdevice>, gpu: u64) -> u64 {
    let (name, kind) = match owner {
        Owner::Tag(tag) => (&**tag, 1),
        Owner::Library(name) => (name, 2),
    };
    let device = device.map_or([0; 5], |device| {
        let [a, b, c, d] = device.to_le_bytes();
        [1, a, b, c, d]
    });
    fnv1a(name.as_bytes().iter().chain(&device).chain(&gpu.to_le_bytes()).chain(&[kind])).max(1)
}

#[derive(Debug)]
enum Name {
    Tag(Arc<str>),
    Library(&'static str),
}

impl Name {
    fn owner(&self) -> Owner<'_> {
        match self {
            Self::Tag(tag) => Owner::Tag(tag),
            Self::Library(name) => Owner::Library(name),
        }
    }
}

/// What an owner has on a GPU.
#[derive(Debug, Default)]
struct Entry {
    /// 0: not taken.
    hash: AtomicU64,
    /// The owner, its device and the GPU's UUID, set by the thread that has taken the entry.
    name: OnceLock<(Name, Option<CUdevice>, Option<String>)>,
    /// The sum of its changes: see [`MemoryOwner::in_use_of`].
    in_use: AtomicU64,
}

/// The most owners. Owners beyond that share the first entry.
const OWNERS: usize = 1024;

/// The most devices whose GPU is remembered.
const DEVICES: usize = 64;

#[derive(Debug)]
struct Recorder {
    ring: Ring,
    owners: Box<[Entry]>,
    /// By device: which GPU it is now, as a hash of its UUID. 0: not known yet.
    gpus: [AtomicU64; DEVICES],
}

static RECORDER: PerProcess<Option<Recorder>> = PerProcess::new(|| {
    let bytes = match Config::get().trace {
        0 => MOST_TRACE,
        bytes => bytes,
    };
    let ring = Ring::of_bytes(bytes);
    if ring.is_none() {
        log::warn!("no memory for a trace: nothing is recorded");
    }
    Some(Recorder::new(ring?))
});

const UNKNOWN: u8 = 0;
const OFF: u8 = 1;
const ON: u8 = 2;

/// Whether this process records. A forked child inherits this.
static IS_ON: AtomicU8 = AtomicU8::new(UNKNOWN);

#[inline]
fn recorder() -> Option<&'static Recorder> {
    // As strictly ordered as whether memory is there: whoever begins meanwhile sees the memory, or the thread sees that a record has begun.
    if IS_ON.load(Ordering::SeqCst) == OFF { None } else { find_recorder() }
}

#[cold]
fn find_recorder() -> Option<&'static Recorder> {
    match IS_ON.load(Ordering::SeqCst) {
        UNKNOWN => {
            let configured = if Config::get().trace == 0 { OFF } else { ON };
            // Somebody may have asked for it meanwhile.
            let _ = IS_ON.compare_exchange(UNKNOWN, configured, Ordering::SeqCst, Ordering::SeqCst);
            recorder()
        }
        // Another thread has just found out.
        OFF => None,
        _ => RECORDER.get().as_ref(),
    }
}

/// Begins to record, with the memory that is there as the first events.
pub(crate) fn begin() -> Reply {
    if recorder().is_some() {
        return Reply::Recording { begun: false };
    }
    if RECORDER.get().is_none() {
        let refusal = Refusal { code: Kind::HostMemory, ..Refusal::from(&Error::Invalid("there is no host memory for a trace".into())) };
        return Reply::Error(refusal);
    }
    let begun = IS_ON.swap(ON, Ordering::SeqCst) != ON;
    Memory::get().tell_what_is_there();
    Reply::Recording { begun }
}

/// Records a change of what an owner has on a device.
#[inline]
pub(crate) fn changed(change: Change, owner: Owner<'_>, device: Option<CUdevice>, bytes: usize, presence: &Presence) {
    let is_counted = match change {
        Change::Allocated | Change::Resumed => {
            presence.come();
            recorder().is_some() && presence.count()
        }
        Change::Freed | Change::Paused => presence.go(),
        Change::FreedPaused => true,
    };
    if let Some(recorder) = recorder().filter(|_| is_counted) {
        recorder.change(change, owner, device, bytes as u64);
    }
}

/// Records memory that was there before.
pub(crate) fn note_presence(owner: Owner<'_>, device: Option<CUdevice>, bytes: usize, presence: &Presence) {
    if let Some(recorder) = recorder().filter(|_| presence.count()) {
        recorder.change(Change::Allocated, owner, device, bytes as u64);
    }
}

/// Records that a request for memory has failed. The failure of a resume is recorded with the end of the resume.
pub(crate) fn failed(request: &FailedRequest) {
    let Some(recorder) = recorder().filter(|_| !request.cause.is_resume()) else { return };
    let device = request.device.or_else(|| Some(Current::of_thread().ok()??.device()));
    let owner = request.tag.as_ref().map_or(Owner::Library(request.library), Owner::Tag);
    recorder.record(&Happening::Failed { owner: recorder.owner(owner, device).0, bytes: request.bytes, code: code::OUT_OF_MEMORY });
}

/// Records that a pause or resume begins on this thread.
pub(crate) fn began(verb: Verb) {
    if let Some(recorder) = recorder() {
        recorder.record(&Happening::Began { verb, thread: thread_id() });
    }
}

/// Records the stage of a pause or resume on this thread that ends now.
pub(crate) fn stage(stage: Stage, took: Duration) {
    if let Some(recorder) = recorder() {
        recorder.record(&Happening::Stage { stage, thread: thread_id(), ns: took.as_nanos() as u64 });
    }
}

/// Records that a pause or resume on this thread ends.
pub(crate) fn ended(verb: Verb, outcome: &Result<Report, Error>, took: Duration) {
    if let Some(recorder) = recorder() {
        let (bytes, error) = outcome.as_ref().map_or_else(|error| (0, Some(error.kind())), |report| (report.bytes, None));
        recorder.record(&Happening::Ended { verb, thread: thread_id(), ns: took.as_nanos() as u64, bytes, error });
    }
}

/// Records a trim that ends now.
pub(crate) fn trimmed(bytes: u64, took: Duration) {
    if let Some(recorder) = recorder() {
        recorder.record(&Happening::Trimmed { thread: thread_id(), ns: took.as_nanos() as u64, bytes });
    }
}

/// The process may have moved to other GPUs. What it has there then belongs to new owners, so that earlier events stay with the old GPU.
/// Tags are paused during a move; memory that the driver has moved is recorded as freed on one GPU, and allocated on the other.
pub(crate) fn may_have_moved() {
    if let Some(recorder) = recorder() {
        recorder.ask_for_gpus(driver::uuid);
    }
}

/// What this process has recorded, from an event's number on. Needs no driver.
pub fn since(number: u64, most: Option<usize>) -> Events {
    let mut events = Events { now_ns: now(), unix_ns: nanoseconds(libc::CLOCK_REALTIME), ..Events::default() };
    let Some(recorder) = recorder() else { return events };
    let page = recorder.ring.read(number, most.unwrap_or(MOST).clamp(1, MOST), events.now_ns);
    events.on = true;
    events.more = page.records.len() == most.unwrap_or(MOST).clamp(1, MOST);
    events.events = page.records.into_iter().filter_map(|(number, record)| read(number, record)).collect();
    events.next = page.next;
    events.owners = recorder.owners_now();
    events
}

/// The last events, not older than this, and the time that they cover; `None` if the process does not record any.
pub(crate) fn last(within: Duration, most: usize) -> Option<(Events, Duration)> {
    recorder()?;
    let end = since(u64::MAX, Some(1)).next;
    let mut events = since(end.saturating_sub(most.min(MOST) as u64), Some(most));
    let covered = covered(&events, within);
    let oldest = events.now_ns.saturating_sub(within.as_nanos() as u64);
    events.events.retain(|event| event.at_ns >= oldest);
    Some((events, covered))
}

/// How far back these events go without a gap, at most so far.
fn covered(events: &Events, most: Duration) -> Duration {
    match events.events.first() {
        Some(first) if first.number > 0 => most.min(Duration::from_nanos(events.now_ns.saturating_sub(first.at_ns))),
        _ => most,
    }
}

impl Recorder {
    fn new(ring: Ring) -> Self {
        Self { ring, owners: (0..OWNERS).map(|_| Entry::default()).collect(), gpus: [const { AtomicU64::new(0) }; DEVICES] }
    }

    /// Which GPU a device is now. The driver is asked only the first time: the process may be suspended later.
    fn gpu(&self, device: Option<CUdevice>) -> u64 {
        let known = device.and_then(|device| self.gpus.get(usize::try_from(device).ok()?));
        let (Some(device), Some(known)) = (device, known) else { return 0 };
        match known.load(Ordering::Relaxed) {
            0 => {
                let gpu = hash_of_gpu(driver::uuid(device).as_deref());
                // Another thread, or the end of a move, may have been first.
                known.compare_exchange(0, gpu, Ordering::Relaxed, Ordering::Relaxed).map_or_else(|there| there, |_| gpu)
            }
            gpu => gpu,
        }
    }

    fn ask_for_gpus(&self, uuid: impl Fn(CUdevice) -> Option<String>) {
        let mut moved = Vec::new();
        for (device, known) in (0..).zip(&self.gpus) {
            let before = known.load(Ordering::Relaxed);
            if before != 0
                && let Some(uuid) = uuid(device)
            {
                let now = hash_of_gpu(Some(&uuid));
                known.store(now, Ordering::Relaxed);
                moved.extend((now != before).then_some((device, before)));
            }
        }
        for (device, before) in moved {
            for (number, entry) in self.owners.iter().enumerate() {
                let Some((name, at, _)) = entry.name.get() else { continue };
                let owner = name.owner();
                if *at != Some(device) || entry.hash.load(Ordering::Relaxed) != hash_of_owner(owner, *at, before) {
                    continue;
                }
                // The program may be freeing memory meanwhile, so the bytes that move are exactly those that this takes.
                let bytes = MemoryOwner::in_use_of(entry.in_use.swap(0, Ordering::Relaxed));
                if bytes > 0 {
                    self.record(&Happening::Freed(OwnersBytes { owner: number as u16, bytes, in_use: 0 }));
                    self.change(Change::Allocated, owner, *at, bytes);
                }
            }
        }
    }

    fn change(&self, change: Change, owner: Owner<'_>, device: Option<CUdevice>, bytes: u64) {
        self.change_at(change, self.owner(owner, device), bytes);
    }

    fn change_at(&self, change: Change, (owner, entry): (u16, &Entry), bytes: u64) {
        let sum = match change {
            Change::Allocated | Change::Resumed => entry.in_use.fetch_add(bytes, Ordering::Relaxed).wrapping_add(bytes),
            Change::Freed | Change::Paused => entry.in_use.fetch_sub(bytes, Ordering::Relaxed).wrapping_sub(bytes),
            Change::FreedPaused => entry.in_use.load(Ordering::Relaxed),
        };
        let bytes = OwnersBytes { owner, bytes, in_use: MemoryOwner::in_use_of(sum) };
        self.record(&match change {
            Change::Allocated => Happening::Allocated(bytes),
            Change::Freed => Happening::Freed(bytes),
            Change::FreedPaused => Happening::FreedPaused(bytes),
            Change::Paused => Happening::Paused(bytes),
            Change::Resumed => Happening::Resumed(bytes),
        });
    }

    /// The owner's entry, created if there is none yet.
    fn owner(&self, owner: Owner<'_>, device: Option<CUdevice>) -> (u16, &Entry) {
        let hash = hash_of_owner(owner, device, self.gpu(device));
        let shared = (0, &self.owners[0]);
        for step in 0..OWNERS - 1 {
            let place = 1 + (hash as usize).wrapping_add(step) % (OWNERS - 1);
            let entry = &self.owners[place];
            let mut there = entry.hash.load(Ordering::Relaxed);
            if there == 0 {
                match entry.hash.compare_exchange(0, hash, Ordering::Relaxed, Ordering::Relaxed) {
                    Ok(_) => {
                        let name = match owner {
                            Owner::Tag(tag) => Name::Tag(Arc::clone(tag)),
                            Owner::Library(name) => Name::Library(name),
                        };
                        let _ = entry.name.set((name, device, device.and_then(driver::uuid)));
                        there = hash;
                    }
                    Err(other) => there = other,
                }
            }
            if there == hash {
                return (place as u16, entry);
            }
        }
        shared
    }

    fn owners_now(&self) -> Vec<MemoryOwner> {
        let owner_now = |(owner, entry): (usize, &Entry)| {
            let in_use = MemoryOwner::in_use_of(entry.in_use.load(Ordering::Relaxed));
            let (tag, library, device, gpu) = match entry.name.get() {
                Some((Name::Tag(tag), device, gpu)) => (Some(tag.to_string()), None, *device, gpu.clone()),
                Some((Name::Library(name), device, gpu)) => (None, Some((*name).to_owned()), *device, gpu.clone()),
                None if owner == 0 && in_use > 0 => (None, None, None, None),
                None => return None,
            };
            Some(MemoryOwner { owner: owner as u16, tag, library, device, gpu, in_use })
        };
        self.owners.iter().enumerate().filter_map(owner_now).collect()
    }

    fn record(&self, what: &Happening) {
        self.ring.push(written(now(), what));
    }
}

/// Never 0.
fn hash_of_gpu(uuid: Option<&str>) -> u64 {
    fnv1a(uuid.unwrap_or_default().as_bytes()).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::thread as threads;
    use vramctl_model::TraceEvent;

    fn recorder(bytes: usize) -> Recorder {
        Recorder::new(Ring::of_bytes(bytes).unwrap())
    }

    #[test]
    fn events_cover_the_time_since_the_first_of_them_unless_there_were_no_others() {
        const MINUTE: Duration = Duration::from_secs(60);
        let event = |number, at_ns| TraceEvent { number, at_ns, what: Happening::Failed { owner: 1, bytes: 1, code: 2 } };
        let cover = |events| covered(&Events { now_ns: 100_000_000_000, events, ..Events::default() }, MINUTE);
        let second = 1_000_000_000;
        assert_eq!(cover(vec![event(7, 98 * second), event(8, 99 * second)]), Duration::from_secs(2));
        assert_eq!(cover(vec![event(7, 20 * second), event(8, 99 * second)]), MINUTE);
        assert_eq!(cover(vec![event(0, 99 * second)]), MINUTE, "all that there were");
        assert_eq!(cover(Vec::new()), MINUTE);
    }

    /// A thread may come here while another one finds out that nothing is recorded: it must not make a recorder, nor complain that there is
    /// no memory for one.
    #[test]
    fn a_recorder_that_is_off_is_not_made() {
        IS_ON.store(OFF, Ordering::Relaxed);
        assert!(find_recorder().is_none() && RECORDER.existing().is_none());
    }

    #[test]
    fn owners_are_distinguished_by_name_kind_and_device() {
        let recorder = recorder(64 << 10);
        let (a, b): (Arc<str>, Arc<str>) = ("libx.so".into(), "b".into());
        for (who, device) in [
            (Owner::Tag(&a), Some(0)),
            (Owner::Tag(&b), Some(0)),
            (Owner::Tag(&a), Some(1)),
            (Owner::Library("libx.so"), Some(0)),
            (Owner::Library("libx.so"), None),
        ] {
            recorder.change(Change::Allocated, who, device, 5);
            recorder.change(Change::Paused, who, device, 3);
            assert_eq!(recorder.owner(who, device).1.in_use.load(Ordering::Relaxed), 2);
        }
        let owners = recorder.owners_now();
        assert_eq!(owners.len(), 5);
        assert!(owners.iter().all(|owner| owner.in_use == 2 && owner.owner != 0));
    }

    #[test]
    fn what_has_moved_belongs_to_owners_on_the_new_gpu_and_back() {
        let recorder = recorder(64 << 10);
        let in_use = || recorder.owners_now().into_iter().map(|owner| owner.in_use).collect::<BTreeSet<_>>();
        recorder.change(Change::Allocated, Owner::Library("libx.so"), Some(0), 5);
        recorder.change(Change::Allocated, Owner::Library("libx.so"), Some(1), 7);
        recorder.change(Change::Allocated, Owner::Library("libx.so"), None, 9);
        // There is no driver here that reports another.
        let as_at_first = |_| Some(String::new());
        recorder.ask_for_gpus(as_at_first);
        recorder.ask_for_gpus(|_| None);
        assert_eq!((recorder.owners_now().len(), in_use()), (3, [5, 7, 9].into()), "nothing has moved");
        let moved = |device| Some(if device == 0 { "GPU-1".to_owned() } else { String::new() });
        recorder.ask_for_gpus(moved);
        assert_eq!((recorder.owners_now().len(), in_use()), (4, [0, 5, 7, 9].into()));
        recorder.change(Change::Freed, Owner::Library("libx.so"), Some(0), 2);
        assert_eq!(in_use(), [0, 3, 7, 9].into());
        for _ in 0..OWNERS {
            recorder.ask_for_gpus(as_at_first);
            recorder.ask_for_gpus(moved);
        }
        assert_eq!((recorder.owners_now().len(), in_use()), (4, [0, 3, 7, 9].into()), "the same owners again");
    }

    #[test]
    fn memory_that_is_freed_while_it_moves_is_never_less_than_nothing() {
        let recorder = recorder(64 << 10);
        let who = Owner::Library("libx.so");
        recorder.change(Change::Allocated, who, Some(0), 5);
        let (old, entry) = recorder.owner(who, Some(0));
        // The new GPU is known, and the memory has not moved yet.
        recorder.gpus[0].store(hash_of_gpu(Some("GPU-1")), Ordering::Relaxed);
        recorder.change(Change::Freed, who, Some(0), 2);
        recorder.change(Change::FreedPaused, who, Some(0), 1);
        let in_use = || recorder.owners_now().into_iter().map(|owner| owner.in_use).collect::<BTreeSet<_>>();
        assert_eq!(in_use(), [0, 5].into());
        recorder.gpus[0].store(hash_of_gpu(Some("")), Ordering::Relaxed);
        recorder.ask_for_gpus(|_| Some("GPU-1".to_owned()));
        assert_eq!(in_use(), [0, 3].into(), "what was freed did not move");
        // A thread that had found the old owner before.
        recorder.change_at(Change::Freed, (old, entry), 3);
        assert_eq!(in_use(), [0, 3].into());
        recorder.ask_for_gpus(|_| Some(String::new()));
        assert_eq!(in_use(), [0].into(), "the sum is right once it is back");
        for (number, record) in recorder.ring.read(0, 100, now()).records {
            if let Some(TraceEvent { what: Happening::Allocated(of) | Happening::Freed(of) | Happening::FreedPaused(of), .. }) =
                read(number, record)
            {
                assert!(of.in_use <= 5, "{of:?}");
            }
        }
    }

    #[test]
    fn owners_without_a_place_share_one() {
        let recorder = recorder(64 << 10);
        threads::scope(|scope| {
            for half in 0..2 {
                let recorder = &recorder;
                scope.spawn(move || {
                    for number in 0..OWNERS {
                        recorder.change(Change::Allocated, Owner::Tag(&format!("{}", number * 2 + half).into()), None, 1);
                    }
                });
            }
        });
        let owners = recorder.owners_now();
        assert_eq!(owners.len(), OWNERS);
        assert_eq!(owners.iter().map(|owner| owner.in_use).sum::<u64>(), 2 * OWNERS as u64);
        assert!(owners[0].tag.is_none() && owners[0].in_use > OWNERS as u64, "{:?}", owners[0]);
    }
}
