//! NCCL's communicators: lists them, and has NCCL release and restore their memory.
//!
//! `ncclCommSuspend` and `ncclCommResume` return once all ranks have called them. So each communicator has its own thread; then the ranks
//! may reach their communicators in any order. While one is not active, the program stays held: a collective would access memory that is
//! not there.
//!
//! A failure cannot be undone, because other ranks may have succeeded. If NCCL refuses before doing anything, the communicator stays
//! active. If it fails in the middle, it is [`Broken`](State::Broken). If a resume fails before the memory is back, the communicator stays
//! suspended, and another resume continues with what is missing.

use crate::gate;
use crate::memory::Memory;
use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use vramctl_driver::nccl::{Nccl, answer};
use vramctl_driver::{CUdevice, Current};
use vramctl_host::{PerProcess, Unpoison, exit, fnv1a, worker};
use vramctl_model::{Communicator, CommunicatorState as State, Error, Verb};

/// How long a pause or resume waits for NCCL, which waits for the other ranks. After that, NCCL continues in the background and the program
/// stays held.
const WITHIN: Duration = Duration::from_secs(10);

static TABLE: PerProcess<Table> = PerProcess::new(Table::default);

#[derive(Default)]
struct Table {
    /// By NCCL's handle.
    known: Mutex<BTreeMap<usize, Known>>,
    changed: Condvar,
}

struct Known {
    nccl: Nccl,
    id: u64,
    /// How many communicators have been made from it; all of its ranks make them together.
    children: u64,
    sharing: Sharing,
    told: Communicator,
}

/// Whether communicators made from this one share its memory, by `splitShare` and `shrinkShare`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sharing {
    /// By `ncclCommSplit`.
    pub split: bool,
    /// By `ncclCommShrink`.
    pub shrink: bool,
}

/// How a communicator was made.
#[derive(Debug, Clone, Copy)]
pub enum CommunicatorOrigin<'a> {
    /// From these unique ids, which all of its ranks have been given.
    Unique(&'a [u8]),
    /// By one call, which has made all of its ranks in this process.
    Here(u64),
    /// From another communicator, by the ranks that pass the same arguments.
    Child {
        /// The other one.
        of: usize,
        /// The arguments that only the ranks of the new communicator pass.
        saying: &'a [u8],
    },
}

/// What is known about a communicator at its creation.
#[derive(Debug, Clone, Copy)]
pub struct NewCommunicator<'a> {
    /// Whose it is.
    pub nccl: Nccl,
    /// NCCL's handle.
    pub handle: usize,
    /// How it was made.
    pub origin: CommunicatorOrigin<'a>,
    /// What communicators made from it will share with it.
    pub sharing: Sharing,
    /// Whether it shares the memory of the one that it was made from.
    pub shares: bool,
    /// Whether its calls wait for their work.
    pub blocks: bool,
}

fn known(table: &Table) -> MutexGuard<'_, BTreeMap<usize, Known>> {
    table.known.lock().unpoisoned()
}

/// The same in every process.
fn hash(parts: &[&[u8]]) -> u64 {
    fnv1a(parts.iter().copied().flatten())
}

const SHARES: &str = "it shares its memory with another one (splitShare or shrinkShare)";

/// Records a communicator that NCCL has created.
pub fn made(made: &NewCommunicator) {
    let NewCommunicator { nccl, handle, origin, sharing, shares, blocks } = *made;
    // SAFETY: NCCL has just created it, and the program cannot have destroyed it yet.
    let (ranks, device) = if blocks { unsafe { (nccl.ranks(handle), nccl.device(handle)) } } else { (None, None) };
    let mut all = known(TABLE.get());
    let id = match origin {
        CommunicatorOrigin::Unique(ids) => Some(hash(&[b"unique", ids])),
        CommunicatorOrigin::Here(call) => Some(hash(&[b"here", &std::process::id().to_le_bytes(), &call.to_le_bytes()])),
        CommunicatorOrigin::Child { of, saying } => all.get_mut(&of).map(|parent| {
            if shares {
                parent.told.unfit = Some(SHARES.into());
            }
            hash(&[b"child", &parent.id.to_le_bytes(), &parent.children.to_le_bytes(), saying])
        }),
    };
    let unfit = match (ranks, id) {
        _ if !nccl.can_suspend() => Some(format!("NCCL {} cannot give memory back; 2.29.7 and later can", nccl.version())),
        _ if !blocks => Some("its calls do not wait for their work (blocking = 0)".into()),
        (None, _) => Some("it was not ready when it was made, as within ncclGroupStart".into()),
        (_, None) => Some("it was made from a communicator that is not known".into()),
        _ if shares => Some(SHARES.into()),
        _ => None,
    };
    let told = Communicator {
        id: format!("{:016x}", id.unwrap_or_default()),
        ranks: ranks.unwrap_or_default(),
        device: device.unwrap_or_default(),
        nccl: nccl.version(),
        unfit,
        ..Communicator::default()
    };
    all.insert(handle, Known { nccl, id: id.unwrap_or_default(), children: 0, sharing, told });
}

/// The NCCL that has made a communicator, if it is known.
pub fn made_by(handle: usize) -> Option<Nccl> {
    TABLE.existing().and_then(|table| Some(known(table).get(&handle)?.nccl))
}

/// What communicators made from this one share with it by default.
pub fn sharing(handle: usize) -> Sharing {
    TABLE.existing().and_then(|table| Some(known(table).get(&handle)?.sharing)).unwrap_or_default()
}

/// Records that another communicator has been made from this one, at each of its ranks.
pub fn has_had_child(handle: usize) {
    if let Some(table) = TABLE.existing()
        && let Some(parent) = known(table).get_mut(&handle)
    {
        parent.children += 1;
    }
}

/// Runs `real`, which destroys a communicator and returns whether it did. With `waits`, first waits for a suspend or resume of it to
/// finish; not for an abort, which must be possible in the middle.
pub fn ending(handle: usize, waits: bool, real: impl FnOnce() -> bool) {
    let Some(table) = TABLE.existing() else {
        real();
        return;
    };
    let deadline = Instant::now() + WITHIN;
    let mut all = known(table);
    let in_progress = |all: &BTreeMap<usize, Known>| all.get(&handle).is_some_and(|one| one.told.state.is_in_progress());
    while waits && in_progress(&all) && !exit::is_ending() && Instant::now() < deadline {
        all = table.changed.wait_timeout(all, WITHIN / 100).unpoisoned().0;
    }
    // Remove it before the call: a new communicator may get its address.
    let taken = all.remove(&handle);
    drop(all);
    let was_away = taken.as_ref().is_some_and(|one| one.told.state != State::Active);
    if !real() {
        if let Some(one) = taken {
            known(table).insert(handle, one);
        }
    } else if was_away && let Some(memory) = Memory::existing() {
        memory.let_go();
    }
}

/// The known communicators, without asking NCCL.
pub fn list() -> Vec<Communicator> {
    TABLE.existing().map_or_else(Vec::new, |table| known(table).values().map(|one| one.told.clone()).collect())
}

/// The known communicators, with their memory.
pub fn measured() -> Vec<Communicator> {
    let Some(table) = TABLE.existing() else { return Vec::new() };
    let measure = |(handle, one): (&usize, &Known)| {
        let mut told = one.told.clone();
        if told.state != State::Active || told.unfit.is_some() {
            return told;
        }
        // SAFETY: it has not been destroyed, which would first remove it from the table. NCCL only reads its own counters.
        match unsafe { one.nccl.memory(*handle) } {
            Ok(memory) if memory.is_suspended => told.unfit = Some("the program itself has suspended it".into()),
            Ok(memory) => (told.bytes, told.kept_bytes) = (memory.bytes, memory.kept_bytes),
            Err(code) => told.unfit = Some(one.nccl.text(code)),
        }
        told
    };
    known(table).iter().map(measure).collect()
}

/// Whether any communicator lacks some of its memory.
pub(crate) fn any_away() -> bool {
    TABLE.existing().is_some_and(|table| known(table).values().any(|one| one.told.state != State::Active))
}

/// Bytes that the suspended communicators need, by device.
pub(crate) fn bytes_away() -> BTreeMap<CUdevice, u64> {
    let mut bytes = BTreeMap::new();
    for one in list().into_iter().filter(|one| one.state == State::Suspended) {
        *bytes.entry(one.device).or_default() += one.bytes;
    }
    bytes
}

/// Checks that these exist and are active, before anything is given up.
pub(crate) fn check(ids: &[String]) -> Result<(), Error> {
    let all = if ids.is_empty() { Vec::new() } else { list() };
    let is_here = |id: &&String| all.iter().any(|one| one.id == **id && one.unfit.is_none() && one.state == State::Active);
    match ids.iter().find(|id| !is_here(id)) {
        Some(id) => Err(Error::Aborted(format!("NCCL's communicator {id} has ended meanwhile; try again"))),
        None => Ok(()),
    }
}

/// Has NCCL suspend these. Returns their state afterwards.
pub(crate) fn suspend(ids: &[String]) -> Vec<Communicator> {
    if ids.is_empty() { Vec::new() } else { change(Verb::Pause, |told| told.state == State::Active && ids.contains(&told.id)) }
}

/// Has NCCL resume all suspended communicators. Returns their state afterwards.
pub(crate) fn resume() -> Vec<Communicator> {
    if any_away() { change(Verb::Resume, |told| told.state == State::Suspended) } else { Vec::new() }
}

fn change(verb: Verb, is_meant: impl Fn(&Communicator) -> bool) -> Vec<Communicator> {
    let table = TABLE.get();
    let deadline = Instant::now() + WITHIN;
    let settled = |mut all: MutexGuard<'static, BTreeMap<usize, Known>>| {
        while all.values().any(|one| one.told.state.is_in_progress()) && !exit::is_ending() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            all = table.changed.wait_timeout(all, left.min(WITHIN / 100)).unpoisoned().0;
        }
        all
    };
    let mut all = settled(known(table));
    let mut meant = Vec::new();
    for (handle, one) in all.iter_mut() {
        let before = one.told.state;
        if is_meant(&one.told) {
            one.told.state = if verb == Verb::Pause { State::Suspending } else { State::Resuming };
            one.told.error = None;
            let (handle, id, nccl, device) = (*handle, one.id, one.nccl, one.told.device);
            // NCCL runs in it, so it needs a stack as large as program threads have.
            if let Err(error) = worker::spawn_compiler("vramctl-nccl", move || suspend_or_resume(verb, handle, id, nccl, device)) {
                one.told.state = before;
                one.told.error = Some(format!("no thread: {error}"));
            }
        }
        if one.told.state != State::Active || before != one.told.state || one.told.error.is_some() {
            meant.push(one.id);
        }
    }
    let all = settled(all);
    all.values().filter(|one| meant.contains(&one.id)).map(|one| one.told.clone()).collect()
}

/// Has NCCL suspend or resume one communicator, and records the result.
fn suspend_or_resume(verb: Verb, handle: usize, id: u64, nccl: Nccl, device: CUdevice) {
    // NCCL copies contents, which the gate would hold. It also waits for other processes; the program's exit must not wait for them.
    let called = gate::unheld(|| {
        exit::while_waiting(|| {
            let _inside = exit::enter_driver()?;
            // NCCL restores the thread's current device at the end, so that must be a device that the program uses.
            let _current = Current::primary_of(device).ok().flatten().and_then(|context| Current::push(context).ok());
            // SAFETY: destroying the communicator waits for this; NCCL allows an abort in the middle. The program is held.
            Some(unsafe { if verb == Verb::Pause { nccl.suspend(handle) } else { nccl.resume(handle) } })
        })
    });
    let mut all = known(TABLE.get());
    // If it was aborted, it is gone.
    let Some(told) = all.get_mut(&handle).filter(|one| one.id == id).map(|one| &mut one.told) else { return };
    let done = called.unwrap_or(Err(answer::INVALID_USAGE));
    // SAFETY: as in `measured`.
    let memory = unsafe { nccl.memory(handle) }.ok();
    if let Some(memory) = memory {
        (told.bytes, told.kept_bytes) = (memory.bytes, memory.kept_bytes);
    }
    let has_its_memory = memory.is_some_and(|memory| !memory.is_suspended);
    told.state = match (verb, done) {
        // A suspend that was refused, or that another rank has not joined: NCCL waits for all ranks before it releases anything.
        (Verb::Resume, Ok(())) | (Verb::Pause, Err(answer::INVALID_ARGUMENT | answer::INVALID_USAGE | answer::REMOTE_ERROR)) => {
            State::Active
        }
        // Not suspended: the program has resumed it.
        (Verb::Resume, Err(answer::INVALID_USAGE)) if has_its_memory => State::Active,
        // NCCL counts it as resumed before it waits for the other ranks a last time. If that fails, it refuses to resume it again.
        (Verb::Pause, Err(_)) => State::Broken,
        (Verb::Resume, Err(_)) if has_its_memory => State::Broken,
        (Verb::Pause, Ok(())) | (Verb::Resume, Err(_)) => State::Suspended,
    };
    if let Err(code) = done {
        told.error = Some(nccl.text(code));
        log::warn!("NCCL's communicator {id:016x} (ranks: {}): {}", told.ranks, nccl.text(code));
    }
    drop(all);
    TABLE.get().changed.notify_all();
    if let Some(memory) = Memory::existing() {
        memory.let_go();
    }
}
