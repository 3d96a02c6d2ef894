//! The simulated machine: the devices' capacity, shared by all processes that use its directory.
//!
//! The state is one file that every process maps, with a slot per process: its identity and the bytes that it uses on each
//! device. A slot belongs to a live process while that process holds the POSIX record lock on the slot's byte. The kernel
//! drops the lock when the process dies, however it dies, so a killed process releases its memory as on a real GPU. A forked
//! child does not inherit the lock, so it owns nothing of its parent's.
//!
//! Memory that was shared has a place of its own. Each process that refers to it holds a read lock on the place's byte. It counts
//! as used by whoever made it while that process refers to it, then as nobody's, until the last process has let go of it.
//!
//! POSIX locks are per process, and closing any descriptor of the file drops them all. So a process opens the file once and
//! never closes it, and its threads also exclude each other with a mutex.

use crate::codes::{ILLEGAL_STATE, INVALID_VALUE, NOT_READY, NOT_SUPPORTED, OPERATING_SYSTEM, OUT_OF_MEMORY, Outcome};
use crate::device;
use crate::restore_thread::{self, has_left};
use crate::settings::{self, Settings};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, AtomicI64, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The most devices a machine can have.
pub const MAX_DEVICES: usize = 8;
const SLOTS: usize = 512;
/// The most memories that processes can share at a time.
const MEMORIES: usize = 1024;
/// What distinguishes a shared memory's file from all others: device and inode.
pub type Key = (u64, u64);
/// The UUIDs of a device, and of the one that a process is restored to in its place.
pub type Pair = ([u8; 16], [u8; 16]);
const COMMAND: usize = 64;
/// A restore has lacked room.
const OUT_OF_ROOM: u32 = 1;
/// The process has something that is never restored.
const UNRESTORABLE: u32 = 2;
/// Changes with the layout of [`Shared`], so that different versions do not share a machine.
const MAGIC: u64 = 0x7369_6d67_7075_0007;
/// The byte that is locked while capacity is handed out; the slots' bytes and those of shared memories follow it. Record locks apply to offsets, so the
/// file need not have a byte there.
const DOOR: i64 = 1 << 40;

#[repr(C)]
struct Slot {
    pid: AtomicU32,
    /// A [`checkpoint`](crate::checkpoint) state. Other processes change it.
    state: AtomicU32,
    /// The process's calls in progress, which a lock waits for.
    inside: AtomicU32,
    /// Memories that it has imported by descriptor.
    imported: AtomicU32,
    /// Memories that it has given a handle of `cuIpcGetMemHandle` for, or has opened by one.
    opened: AtomicU32,
    /// Why a restore fails for good: 0, [`OUT_OF_ROOM`] or [`UNRESTORABLE`].
    spoilt: AtomicU32,
    /// 1: it leaves the machine once it is checkpointed ([`crate::restore_thread`]).
    leaves: AtomicU32,
    /// The machine that it was on when it was checkpointed.
    was_on: Kind,
    used: [AtomicU64; MAX_DEVICES],
    /// What it used when it was checkpointed.
    saved: [AtomicU64; MAX_DEVICES],
    /// The device behind each of the process's ordinals: a restore may change it.
    place: [AtomicU32; MAX_DEVICES],
    /// Bytes that a test pretends another process uses.
    occupied: [AtomicU64; MAX_DEVICES],
    kernels: [Kernels; MAX_DEVICES],
    command: [AtomicU8; COMMAND],
}

/// What a process executes on a device.
#[repr(C)]
struct Kernels {
    running: AtomicU32,
    /// Since when at least one is running, in ns.
    since: AtomicU64,
    /// How long at least one was running before, in ns.
    busy: AtomicU64,
}

/// NVML's latest sample of a device's utilization.
#[repr(C)]
struct Sample {
    /// When it was taken, in ns; 0 for never.
    at: AtomicU64,
    /// How long kernels had been running until then, in ns.
    busy: AtomicU64,
    percent: AtomicU32,
}

/// Memory that was shared with another process.
#[repr(C)]
struct Common {
    /// 0: the place is free.
    bytes: AtomicU64,
    device: AtomicU64,
    key: [AtomicU64; 2],
    /// The slot and the process that count it as theirs; process 0 if none does.
    slot: AtomicU32,
    pid: AtomicU32,
}

/// What kind of machine it is, and which.
#[repr(C)]
struct Kind {
    devices: AtomicU64,
    serial: AtomicU64,
    model: AtomicU64,
}

impl Kind {
    fn get(&self) -> [u64; 3] {
        [&self.devices, &self.serial, &self.model].map(|word| word.load(Ordering::Relaxed))
    }

    fn set(&self, values: [u64; 3]) {
        for (word, value) in [&self.devices, &self.serial, &self.model].into_iter().zip(values) {
            word.store(value, Ordering::Relaxed);
        }
    }
}

#[repr(C)]
struct Shared {
    magic: AtomicU64,
    kind: Kind,
    memory: AtomicU64,
    samples: [Sample; MAX_DEVICES],
    slots: [Slot; SLOTS],
    memories: [Common; MEMORIES],
}

fn file_in(directory: &Path) -> PathBuf {
    directory.join("machine")
}

/// Maps the shared state, or memory of the same size.
///
/// # Safety
///
/// As for `mmap`: with `MAP_FIXED`, what is at the address is replaced.
unsafe fn map_at(address: *mut Shared, flags: i32, file: i32) -> io::Result<*const Shared> {
    // SAFETY: as promised.
    let mapped = unsafe { libc::mmap(address.cast(), size_of::<Shared>(), libc::PROT_READ | libc::PROT_WRITE, flags, file, 0) };
    if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(mapped.cast()) }
}

fn place_of_common(place: usize) -> i64 {
    DOOR + 1 + (SLOTS + place) as i64
}

/// What a checkpoint makes of a process: `CUprocessState`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum State {
    /// As always.
    Running,
    /// Its calls wait.
    Locked,
    /// They wait, and it has nothing on any device.
    Checkpointed,
    /// It is lost.
    Failed,
}

/// What ties a process's memory to another process, so that the process cannot be restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tie {
    /// It was imported by descriptor. Having exported memory prevents nothing.
    Imported,
    /// A handle of `cuIpcGetMemHandle` was given for it, or it was opened by one.
    Opened,
}

impl Slot {
    fn ties(&self, tie: Tie) -> &AtomicU32 {
        match tie {
            Tie::Imported => &self.imported,
            Tie::Opened => &self.opened,
        }
    }

    fn state(&self) -> State {
        [State::Running, State::Locked, State::Checkpointed, State::Failed][self.state.load(Ordering::SeqCst) as usize & 3]
    }
}

/// This process, as other processes handle it.
#[derive(Debug, Clone, Copy)]
pub struct Hand(&'static Machine);

impl std::fmt::Debug for Slot {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Slot").finish_non_exhaustive()
    }
}

/// A call in progress.
#[derive(Debug)]
pub struct Inside(&'static Slot);

impl Hand {
    /// Begins a call, once the process is not locked.
    pub fn enter(self) -> Inside {
        loop {
            if let Some(slot) = self.0.own() {
                slot.inside.fetch_add(1, Ordering::SeqCst);
                let inside = Inside(slot);
                if slot.state() == State::Running {
                    return inside;
                }
                drop(inside);
            }
            // Locked, or it has left the machine.
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Begins a call that a lock does not hold up. Ends the process if it is checkpointed, as the real driver does.
    pub fn look(self) -> Option<Inside> {
        let slot = self.0.own().filter(|slot| slot.state() != State::Checkpointed);
        if slot.is_none() {
            eprintln!("simgpu: a call that looks at the device in a process that is checkpointed");
            // SAFETY: ends the process.
            unsafe { libc::raise(libc::SIGSEGV) };
        }
        let slot = slot.filter(|slot| slot.state() == State::Running)?;
        slot.inside.fetch_add(1, Ordering::SeqCst);
        Some(Inside(slot))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A kernel that is being executed.
#[derive(Debug)]
pub struct Running {
    machine: &'static Machine,
    device: usize,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _threads = self.machine.keep_threads_out();
        if let Some(slot) = self.machine.own() {
            let kernels = &slot.kernels[self.device];
            if kernels.running.fetch_sub(1, Ordering::SeqCst) == 1 {
                kernels.busy.fetch_add(nanoseconds().saturating_sub(kernels.since.load(Ordering::SeqCst)), Ordering::SeqCst);
            }
        }
    }
}

/// The time since the system's start: the same for all processes.
fn nanoseconds() -> u64 {
    // SAFETY: a timespec of zeros is valid, and the call fills it.
    let now = unsafe {
        let mut now: libc::timespec = std::mem::zeroed();
        libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now);
        now
    };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// A process's use of the devices, as NVML reports it.
#[derive(Clone, Debug)]
pub struct Tenant {
    /// Process id.
    pub pid: u32,
    /// Program name.
    pub command: String,
    /// Bytes used, by device.
    pub used: [u64; MAX_DEVICES],
}

/// A simulated machine, opened by this process.
#[derive(Debug)]
pub struct Machine {
    /// The descriptor of its file; -1 while this process has left it.
    file: AtomicI32,
    /// The file's name, if it has one.
    path: Option<PathBuf>,
    shared: &'static Shared,
    /// Excludes other threads of this process; the record lock excludes other processes.
    door: Mutex<()>,
    /// This process's slot, or -1 if it has none.
    slot: AtomicI64,
    /// The slot that it had when it left, or -1.
    left: AtomicI64,
    /// The process that owns that slot: a forked child does not.
    owner: AtomicU32,
    /// How often this process refers to shared memories, by place.
    common: Mutex<BTreeMap<usize, usize>>,
    /// The devices that this process sees, by the ordinals that it has for them at its start.
    visible: Vec<usize>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Shared").finish_non_exhaustive()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // SAFETY: nobody else's, and -1 is refused.
        unsafe { libc::close(self.descriptor()) };
    }
}

struct Door<'a> {
    machine: &'a Machine,
    _threads: MutexGuard<'a, ()>,
}

impl Drop for Door<'_> {
    fn drop(&mut self) {
        self.machine.record_lock(libc::F_SETLK, libc::F_UNLCK, DOOR);
    }
}

impl Machine {
    /// Opens the machine named by the settings, or creates it. Whoever creates it decides the number and size of its
    /// devices.
    pub fn open(settings: &Settings) -> io::Result<Self> {
        let file = match &settings.directory {
            Some(directory) => {
                std::fs::create_dir_all(directory)?;
                File::options().read(true).write(true).create(true).truncate(false).open(file_in(directory))?
            }
            None => {
                // SAFETY: the name is a C string; the new descriptor is owned by the `File`.
                unsafe {
                    let descriptor = libc::memfd_create(c"simgpu-machine".as_ptr(), libc::MFD_CLOEXEC);
                    if descriptor < 0 {
                        return Err(io::Error::last_os_error());
                    }
                    File::from_raw_fd(descriptor)
                }
            }
        };
        // Setting an existing file's size to the same value changes nothing; the file must not shrink.
        if file.metadata()?.len() < size_of::<Shared>() as u64 {
            file.set_len(size_of::<Shared>() as u64)?;
        }
        let path = settings.directory.as_deref().map(file_in);
        let mut machine = Self::map(file)?;
        machine.path = path;
        let door = machine.enter();
        if machine.shared.magic.load(Ordering::Acquire) == 0 {
            machine.shared.kind.set([settings.devices as u64, settings.serial, settings.model]);
            machine.shared.memory.store(settings.memory, Ordering::Relaxed);
            machine.shared.magic.store(MAGIC, Ordering::Release);
        }
        drop(door);
        let mut machine = machine.checked()?;
        machine.visible = settings::visible(settings.visible.as_deref(), machine.serial(), machine.devices());
        Ok(machine)
    }

    /// Opens an existing machine read-only for inspection, without joining it.
    pub fn look(directory: &Path) -> io::Result<Self> {
        let file = File::options().read(true).write(true).open(file_in(directory))?;
        if file.metadata()?.len() < size_of::<Shared>() as u64 {
            return Err(io::Error::other("not a simulated machine of this version"));
        }
        Self::map(file)?.checked()
    }

    fn map(file: File) -> io::Result<Self> {
        // SAFETY: a new shared mapping of a file that is at least this long. It is never unmapped, and everything in it is
        // atomic.
        let shared = unsafe { &*map_at(std::ptr::null_mut(), libc::MAP_SHARED, file.as_raw_fd())? };
        let (door, slot, owner, common) = (Mutex::new(()), AtomicI64::new(-1), AtomicU32::new(0), Mutex::default());
        let file = AtomicI32::new(file.into_raw_fd());
        let left = AtomicI64::new(-1);
        Ok(Self { file, path: None, shared, door, slot, left, owner, common, visible: Vec::new() })
    }

    fn checked(self) -> io::Result<Self> {
        if self.shared.magic.load(Ordering::Acquire) == MAGIC {
            Ok(self)
        } else {
            Err(io::Error::other("not a simulated machine of this version"))
        }
    }

    /// Number of devices.
    pub fn devices(&self) -> usize {
        (self.shared.kind.devices.load(Ordering::Relaxed) as usize).min(MAX_DEVICES)
    }

    /// Which machine it is.
    pub fn serial(&self) -> u64 {
        self.shared.kind.serial.load(Ordering::Relaxed)
    }

    /// Which model its devices are.
    pub fn model(&self) -> u64 {
        self.shared.kind.model.load(Ordering::Relaxed)
    }

    /// Number of devices that this process sees.
    pub fn visible(&self) -> usize {
        self.visible.len()
    }

    /// The device that this process has under an ordinal at its start. Those that it does not see come last.
    pub fn first_place(&self, ordinal: usize) -> usize {
        let hidden = (0..MAX_DEVICES).filter(|device| !self.visible.contains(device));
        self.visible.iter().copied().chain(hidden).nth(ordinal).unwrap_or(ordinal)
    }

    /// Bytes of each device.
    pub fn memory(&self) -> u64 {
        self.shared.memory.load(Ordering::Relaxed)
    }

    /// Bytes of a device in use by all processes.
    pub fn used(&self, device: usize) -> u64 {
        let of_processes: u64 =
            self.living().map(|(_, slot)| slot.used[device].load(Ordering::Relaxed) + slot.occupied[device].load(Ordering::Relaxed)).sum();
        let memories = self.shared.memories.iter().enumerate().filter(|(place, memory)| {
            memory.bytes.load(Ordering::Relaxed) > 0
                && memory.device.load(Ordering::Relaxed) == device as u64
                && self.counts_it(memory).is_none()
                && self.is_referred_to(*place)
        });
        let of_nobody: u64 = memories.map(|(_, memory)| memory.bytes.load(Ordering::Relaxed)).sum();
        (of_processes + of_nobody).min(self.memory())
    }

    /// The living process that counts a shared memory as its own.
    fn counts_it(&self, memory: &Common) -> Option<&Slot> {
        let (index, pid) = (memory.slot.load(Ordering::Relaxed), memory.pid.load(Ordering::Relaxed));
        let slot = self.shared.slots.get(index as usize).filter(|slot| pid != 0 && slot.pid.load(Ordering::Acquire) == pid)?;
        let is_alive = self.own().is_some_and(|own| std::ptr::eq(own, slot)) || self.is_locked(1 + i64::from(index));
        is_alive.then_some(slot)
    }

    /// Whether any process refers to a shared memory.
    fn is_referred_to(&self, place: usize) -> bool {
        (self.own().is_some() && self.common().contains_key(&place)) || self.is_locked(1 + (SLOTS + place) as i64)
    }

    fn common(&self) -> MutexGuard<'_, BTreeMap<usize, usize>> {
        self.common.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes memory of this process, which it has taken, a shared one. Returns its place; `None` if there is no free one.
    pub fn share(&self, key: Key, device: usize, bytes: u64) -> Option<usize> {
        let _door = self.enter();
        self.claim()?;
        self.add_common(key, device, bytes)
    }

    /// Refers to a shared memory. If no process does any more, it counts as this process's from now on. `None` if there is not
    /// enough capacity for that.
    pub fn join_shared(&self, key: Key, device: usize, bytes: u64) -> Option<usize> {
        let _door = self.enter();
        let slot = self.claim()?;
        let is_it = |memory: &Common| memory.key.each_ref().map(|part| part.load(Ordering::Relaxed)) == [key.0, key.1];
        let mut known = self.shared.memories.iter().enumerate();
        if let Some((place, _)) = known.find(|(place, memory)| is_it(memory) && self.is_referred_to(*place)) {
            self.refer(place);
            return Some(place);
        }
        if bytes > self.memory() - self.used(device) {
            return None;
        }
        let place = self.add_common(key, device, bytes)?;
        slot.used[device].fetch_add(bytes, Ordering::Relaxed);
        Some(place)
    }

    /// Ends one reference to a shared memory.
    pub fn leave_shared(&self, place: usize) {
        // A forked child refers to nothing.
        if self.own().is_none() {
            return;
        }
        let _door = self.enter();
        {
            let mut common = self.common();
            let Some(count) = common.get_mut(&place) else { return };
            *count -= 1;
            if *count > 0 {
                return;
            }
            common.remove(&place);
        }
        let memory = &self.shared.memories[place];
        if let (Some(counts), Some(own)) = (self.counts_it(memory), self.own())
            && std::ptr::eq(counts, own)
        {
            own.used[memory.device.load(Ordering::Relaxed) as usize].fetch_sub(memory.bytes.load(Ordering::Relaxed), Ordering::Relaxed);
            memory.pid.store(0, Ordering::Relaxed);
        }
        self.record_lock(libc::F_SETLK, libc::F_UNLCK, place_of_common(place));
    }

    fn add_common(&self, key: Key, device: usize, bytes: u64) -> Option<usize> {
        let place = (0..MEMORIES).find(|&place| {
            let memory = &self.shared.memories[place];
            memory.bytes.load(Ordering::Relaxed) == 0 || !self.is_referred_to(place)
        })?;
        let memory = &self.shared.memories[place];
        memory.key[0].store(key.0, Ordering::Relaxed);
        memory.key[1].store(key.1, Ordering::Relaxed);
        memory.device.store(device as u64, Ordering::Relaxed);
        memory.slot.store(self.slot.load(Ordering::Relaxed) as u32, Ordering::Relaxed);
        memory.pid.store(std::process::id(), Ordering::Relaxed);
        self.refer(place);
        memory.bytes.store(bytes, Ordering::Release);
        Some(place)
    }

    /// Counts memory that prevents a restore of this process, until [`forget_tie`](Self::forget_tie).
    pub fn note_tie(&self, tie: Tie) {
        let _door = self.enter();
        if let Some(slot) = self.claim() {
            slot.ties(tie).fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The memory is gone.
    pub fn forget_tie(&self, tie: Tie) {
        if let Some(slot) = self.own() {
            slot.ties(tie).fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn refer(&self, place: usize) {
        *self.common().entry(place).or_default() += 1;
        self.record_lock(libc::F_SETLK, libc::F_RDLCK, place_of_common(place));
    }

    /// What distinguishes this machine from others.
    pub fn identity(&self) -> Key {
        // SAFETY: a stat of zeros is valid, and the call fills it.
        let found = unsafe {
            let mut found: libc::stat64 = std::mem::zeroed();
            libc::fstat64(self.descriptor(), &raw mut found);
            found
        };
        (found.st_dev, found.st_ino)
    }

    /// Bytes of a device in use by this process.
    pub fn used_here(&self, device: usize) -> u64 {
        self.own().map_or(0, |slot| slot.used[device].load(Ordering::Relaxed))
    }

    /// The device that this process has under an ordinal.
    pub fn place(&self, ordinal: usize) -> usize {
        self.own().map_or_else(|| self.first_place(ordinal), |slot| slot.place[ordinal].load(Ordering::Relaxed) as usize)
    }

    /// The ordinal under which this process has a device.
    pub fn ordinal(&self, device: usize) -> usize {
        (0..MAX_DEVICES).find(|&ordinal| self.place(ordinal) == device).unwrap_or(device)
    }

    /// The live processes that have joined the machine.
    pub fn tenants(&self) -> Vec<Tenant> {
        self.living()
            .map(|(index, slot)| Tenant {
                pid: self.pid_here(index, slot),
                command: slot
                    .command
                    .iter()
                    .map(|byte| byte.load(Ordering::Relaxed) as char)
                    .take_while(|&character| character != '\0')
                    .collect(),
                used: std::array::from_fn(|device| slot.used[device].load(Ordering::Relaxed)),
            })
            .collect()
    }

    /// Notes that this process executes a kernel on the device under an ordinal.
    pub fn execute(&'static self, ordinal: usize) -> Option<Running> {
        let _threads = self.keep_threads_out();
        let kernels = &self.own()?.kernels[self.place(ordinal)];
        if kernels.running.fetch_add(1, Ordering::SeqCst) == 0 {
            kernels.since.store(nanoseconds(), Ordering::SeqCst);
        }
        Some(Running { machine: self, device: self.place(ordinal) })
    }

    /// The share of the last sample period in which kernels were running, in percent. The period is the time between two
    /// questions, of at least what NVML's reference says; before the first one, it is a moment.
    pub fn utilization(&self, device: usize) -> u32 {
        const PERIOD: u64 = 1_000_000_000 / 6;
        let _door = self.enter();
        let now = nanoseconds();
        let (mut busy, mut is_running) = (0, false);
        for (_, slot) in self.living() {
            let Kernels { running, since, busy: before } = &slot.kernels[device];
            busy += before.load(Ordering::SeqCst);
            if running.load(Ordering::SeqCst) > 0 {
                is_running = true;
                busy += now.saturating_sub(since.load(Ordering::SeqCst));
            }
        }
        let sample = &self.shared.samples[device];
        let (at, was) = (sample.at.load(Ordering::SeqCst), sample.busy.load(Ordering::SeqCst));
        let passed = now - at.min(now);
        if at != 0 && passed < PERIOD {
            return sample.percent.load(Ordering::SeqCst);
        }
        let percent = if at == 0 { 100 * u64::from(is_running) } else { (busy.saturating_sub(was) * 100).div_ceil(passed).min(100) };
        sample.at.store(now, Ordering::SeqCst);
        sample.busy.store(busy, Ordering::SeqCst);
        sample.percent.store(percent as u32, Ordering::SeqCst);
        percent as u32
    }

    /// Joins the machine; `false` if it has no free slot.
    pub fn join(&self) -> bool {
        let _door = self.enter();
        self.claim().is_some()
    }

    /// What other processes do to this one, once it has joined.
    pub fn hand(&'static self) -> Option<Hand> {
        self.own().map(|_| Hand(self))
    }

    /// The living process with this id.
    fn process(&self, pid: u32) -> Option<&Slot> {
        self.living().find(|(index, slot)| self.pid_here(*index, slot) == pid).map(|(_, slot)| slot)
    }

    /// The id of a living process, in the PID namespace of this one.
    fn pid_here(&self, index: usize, slot: &Slot) -> u32 {
        let holder = self.locker(1 + index as i64).filter(|holder| *holder > 0);
        holder.map_or_else(|| slot.pid.load(Ordering::Acquire), i32::cast_unsigned)
    }

    /// A process's state.
    pub fn state_of(&self, pid: u32) -> Outcome<State> {
        let state = {
            let _door = self.enter();
            self.process(pid).map(Slot::state)
        };
        state.or_else(|| has_left(pid).then_some(State::Checkpointed)).ok_or(INVALID_VALUE)
    }

    /// Makes the calls of a running process wait, and waits for those that have begun.
    pub fn lock_process(&self, pid: u32, limit: Option<Duration>) -> Outcome {
        self.change(pid, State::Running, State::Locked, |_| Ok(()))?;
        let begun = Instant::now();
        loop {
            let door = self.enter();
            let slot = self.process(pid).ok_or(INVALID_VALUE)?;
            if slot.inside.load(Ordering::SeqCst) == 0 {
                return Ok(());
            }
            if limit.is_some_and(|limit| begun.elapsed() >= limit) {
                slot.state.store(State::Running as u32, Ordering::SeqCst);
                return Err(NOT_READY);
            }
            drop(door);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Takes all that a locked process has on the devices.
    pub fn checkpoint_process(&self, pid: u32) -> Outcome {
        self.change(pid, State::Locked, State::Checkpointed, |slot| {
            for (used, saved) in slot.used.iter().zip(&slot.saved) {
                saved.store(used.swap(0, Ordering::Relaxed), Ordering::Relaxed);
            }
            Ok(())
        })?;
        self.wait_until_left(pid)
    }

    /// Waits until a checkpointed process has left the machine, if it does that.
    fn wait_until_left(&self, pid: u32) -> Outcome {
        let is_leaving = || {
            let _door = self.enter();
            self.process(pid).is_some_and(|slot| slot.leaves.load(Ordering::SeqCst) != 0)
        };
        let begun = Instant::now();
        while is_leaving() {
            if begun.elapsed() > restore_thread::PATIENCE {
                return Err(OPERATING_SYSTEM);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// The device that each one goes to of those that there were where the process was checkpointed. Without pairs, it is the one with the same number
    /// (NVIDIA/cuda-checkpoint#48 and #54). With them, each must be in there, and none may share its new one.
    fn map_of(&self, slot: &Slot, pairs: &[Pair]) -> Outcome<BTreeMap<usize, usize>> {
        let [devices, serial, model] = slot.was_on.get();
        if model != self.model() {
            return Err(INVALID_VALUE);
        }
        if pairs.is_empty() {
            let needed = (0..devices as usize).filter(|device| slot.saved[*device].load(Ordering::Relaxed) > 0).max();
            let is_there = needed.is_none_or(|needed| needed < self.devices());
            return if is_there { Ok((0..self.devices()).map(|device| (device, device)).collect()) } else { Err(INVALID_VALUE) };
        }
        let find = |serial: u64, devices: usize, uuid: [u8; 16]| {
            (0..devices).find(|&device| device::uuid_bytes(serial, device) == uuid).ok_or(INVALID_VALUE)
        };
        let find_pair = |(old, new): &Pair| Ok((find(serial, devices as usize, *old)?, find(self.serial(), self.devices(), *new)?));
        let map = pairs.iter().map(find_pair).collect::<Outcome<BTreeMap<_, _>>>()?;
        let targets: BTreeSet<_> = map.values().collect();
        if map.len() == devices as usize && targets.len() == map.len() { Ok(map) } else { Err(INVALID_VALUE) }
    }

    /// Gives it back, on other devices if there are pairs.
    pub fn restore_process(&self, pid: u32, pairs: &[Pair]) -> Outcome {
        let _called = has_left(pid).then(|| restore_thread::Called::back(self, pid)).transpose()?;
        self.change(pid, State::Checkpointed, State::Locked, |slot| {
            let new = self.map_of(slot, pairs)?;
            // Observed: a restore that has failed for lack of memory leaves a process that cannot be restored at all.
            let spoilt = slot.spoilt.load(Ordering::Relaxed);
            if spoilt == OUT_OF_ROOM {
                return Err(OPERATING_SYSTEM);
            }
            let ties = |tie| slot.ties(tie).load(Ordering::Relaxed) > 0;
            let lost = match (spoilt == UNRESTORABLE || ties(Tie::Imported), ties(Tie::Opened)) {
                (true, _) => Some(NOT_SUPPORTED),
                (false, true) => Some(INVALID_VALUE),
                (false, false) => None,
            };
            if let Some(code) = lost {
                slot.state.store(State::Failed as u32, Ordering::SeqCst);
                return Err(code);
            }
            let saved = |device: usize| slot.saved[device].load(Ordering::Relaxed);
            if new.iter().any(|(&old, &new)| saved(old) > self.memory() - self.used(new)) {
                slot.spoilt.store(OUT_OF_ROOM, Ordering::Relaxed);
                return Err(OUT_OF_MEMORY);
            }
            for (&old, &new) in &new {
                slot.used[new].store(saved(old), Ordering::Relaxed);
            }
            for place in &slot.place {
                if let Some(device) = new.get(&(place.load(Ordering::Relaxed) as usize)) {
                    place.store(*device as u32, Ordering::Relaxed);
                }
            }
            slot.was_on.set(self.shared.kind.get());
            Ok(())
        })
    }

    /// Lets a locked process's calls go on.
    pub fn unlock_process(&self, pid: u32) -> Outcome {
        self.change(pid, State::Locked, State::Running, |_| Ok(()))
    }

    fn change(&self, pid: u32, from: State, to: State, work: impl FnOnce(&Slot) -> Outcome) -> Outcome {
        let _door = self.enter();
        let slot = self.process(pid).ok_or_else(|| if has_left(pid) { ILLEGAL_STATE } else { INVALID_VALUE })?;
        if slot.state() != from {
            return Err(ILLEGAL_STATE);
        }
        work(slot)?;
        slot.state.store(to as u32, Ordering::SeqCst);
        Ok(())
    }

    /// Takes capacity of a device; `false` if too little is left.
    pub fn take(&self, ordinal: usize, bytes: u64) -> bool {
        let _door = self.enter();
        let Some(slot) = self.claim() else { return false };
        let device = self.place(ordinal);
        if bytes > self.memory() - self.used(device) {
            return false;
        }
        slot.used[device].fetch_add(bytes, Ordering::Relaxed);
        true
    }

    /// Releases capacity.
    pub fn give(&self, ordinal: usize, bytes: u64) {
        if let Some(slot) = self.own() {
            slot.used[self.place(ordinal)].fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// Pretends that another process uses this many bytes of a device, while this process lives.
    pub fn occupy(&self, device: usize, bytes: u64) {
        let _door = self.enter();
        if let Some(slot) = self.claim() {
            slot.occupied[device].store(bytes, Ordering::Relaxed);
        }
    }

    /// Keeps this process's other threads from entering, and waits for one that is inside.
    pub fn keep_threads_out(&self) -> MutexGuard<'_, ()> {
        self.door.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self) -> Door<'_> {
        let threads = self.keep_threads_out();
        self.record_lock(libc::F_SETLKW, libc::F_WRLCK, DOOR);
        Door { machine: self, _threads: threads }
    }

    /// This process's slot, claimed at the first call. The caller must hold the lock.
    fn claim(&self) -> Option<&Slot> {
        self.own().or_else(|| self.claim_as(State::Running))
    }

    fn claim_as(&self, state: State) -> Option<&Slot> {
        let index = (0..SLOTS)
            .find(|&index| !self.is_locked(1 + index as i64) && self.record_lock(libc::F_SETLK, libc::F_WRLCK, DOOR + 1 + index as i64))?;
        self.common().clear();
        let slot = &self.shared.slots[index];
        for device in 0..MAX_DEVICES {
            slot.used[device].store(0, Ordering::Relaxed);
            slot.occupied[device].store(0, Ordering::Relaxed);
            slot.saved[device].store(0, Ordering::Relaxed);
            slot.place[device].store(self.first_place(device) as u32, Ordering::Relaxed);
            slot.kernels[device].running.store(0, Ordering::SeqCst);
            slot.kernels[device].busy.store(0, Ordering::SeqCst);
        }
        for word in [&slot.state, &slot.inside, &slot.imported, &slot.opened, &slot.leaves] {
            word.store(0, Ordering::SeqCst);
        }
        slot.was_on.set(self.shared.kind.get());
        slot.spoilt.store(if settings::get().unrestorable { UNRESTORABLE } else { 0 }, Ordering::SeqCst);
        slot.state.store(state as u32, Ordering::SeqCst);
        let command = std::fs::read("/proc/self/comm").unwrap_or_default();
        for (index, byte) in slot.command.iter().enumerate() {
            let value = command.get(index).copied().filter(|&byte| byte != b'\n').unwrap_or(0);
            byte.store(if index + 1 < COMMAND { value } else { 0 }, Ordering::Relaxed);
        }
        slot.pid.store(std::process::id(), Ordering::Release);
        self.owner.store(std::process::id(), Ordering::Relaxed);
        self.slot.store(index as i64, Ordering::Release);
        Some(slot)
    }

    /// Leaves the machine: what it has there is copied to its own memory, at the same addresses, and the file is closed, and with it the locks.
    pub fn leave(&self) {
        let door = self.enter();
        let bytes = size_of::<Shared>();
        let (mut copy, at) = (vec![0_u8; bytes], std::ptr::from_ref(self.shared).cast_mut());
        let left = self.slot.swap(-1, Ordering::SeqCst);
        // SAFETY: the mapping of this length is replaced by one of the process's own memory. Who reads it meanwhile reads zeros, and nobody waits
        // for anything that is in there: the process has no slot.
        unsafe {
            std::ptr::copy_nonoverlapping(at.cast(), copy.as_mut_ptr(), bytes);
            if map_at(at, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED, -1).is_err() {
                self.slot.store(left, Ordering::SeqCst);
                return;
            }
            std::ptr::copy_nonoverlapping(copy.as_ptr(), at.cast(), bytes);
            libc::close(self.file.swap(-1, Ordering::SeqCst));
        }
        self.left.store(left, Ordering::SeqCst);
        drop(door);
    }

    /// Comes back to the machine, checkpointed as it has left it. The machine may be another one of the same kind.
    pub fn come_back(&self) -> io::Result<()> {
        let path = self.path.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
        if file.metadata()?.len() < size_of::<Shared>() as u64 {
            file.set_len(size_of::<Shared>() as u64)?;
        }
        let words = |slot: &Slot| [&slot.imported, &slot.opened, &slot.spoilt].map(|word| word.load(Ordering::SeqCst));
        let left = &self.shared.slots[self.left.load(Ordering::SeqCst).max(0) as usize];
        let (ties, kind, memory) = (words(left), self.shared.kind.get(), self.memory());
        let saved: [u64; MAX_DEVICES] = std::array::from_fn(|device| left.saved[device].load(Ordering::SeqCst));
        let place: [u32; MAX_DEVICES] = std::array::from_fn(|device| left.place[device].load(Ordering::SeqCst));
        // SAFETY: as in `leave`; the file is at least this long.
        unsafe { map_at(std::ptr::from_ref(self.shared).cast_mut(), libc::MAP_SHARED | libc::MAP_FIXED, file.as_raw_fd())? };
        self.file.store(file.into_raw_fd(), Ordering::SeqCst);
        let _door = self.enter();
        if self.shared.magic.load(Ordering::Acquire) == 0 {
            self.shared.kind.set(kind);
            self.shared.memory.store(memory, Ordering::Relaxed);
            self.shared.magic.store(MAGIC, Ordering::Release);
        }
        let places: Vec<_> = self.common().keys().copied().collect();
        let slot = self.claim_as(State::Checkpointed).ok_or(io::ErrorKind::Other)?;
        for (word, was) in [&slot.imported, &slot.opened, &slot.spoilt].iter().zip(ties) {
            word.store(was, Ordering::SeqCst);
        }
        slot.was_on.set(kind);
        for device in 0..MAX_DEVICES {
            slot.saved[device].store(saved[device], Ordering::SeqCst);
            slot.place[device].store(place[device], Ordering::SeqCst);
        }
        for place in places {
            self.refer(place);
        }
        slot.leaves.store(1, Ordering::SeqCst);
        Ok(())
    }

    /// Whether this process has been checkpointed.
    pub fn is_checkpointed(&self) -> bool {
        self.own().is_some_and(|slot| slot.state() == State::Checkpointed)
    }

    /// This process will leave the machine once it is checkpointed.
    pub fn will_leave(&self) {
        self.own().iter().for_each(|slot| slot.leaves.store(1, Ordering::SeqCst));
    }

    /// The folder of its file.
    pub fn folder(&self) -> Option<&Path> {
        self.path.as_ref()?.parent()
    }

    fn descriptor(&self) -> i32 {
        self.file.load(Ordering::SeqCst)
    }

    fn own(&self) -> Option<&Slot> {
        let index = self.slot.load(Ordering::Acquire);
        (index >= 0 && self.owner.load(Ordering::Relaxed) == std::process::id()).then(|| &self.shared.slots[index as usize])
    }

    fn living(&self) -> impl Iterator<Item = (usize, &Slot)> {
        let own = self.own().map(std::ptr::from_ref);
        self.shared.slots.iter().enumerate().filter(move |&(index, slot)| {
            slot.pid.load(Ordering::Acquire) != 0
                // A process cannot see its own locks, but it knows its slot.
                && (own == Some(std::ptr::from_ref(slot)) || self.is_locked(1 + index as i64))
        })
    }

    /// Whether another process holds a lock on this byte, counted from the door's.
    fn is_locked(&self, byte: i64) -> bool {
        self.locker(byte).is_some()
    }

    /// Which other process does; 0 if that cannot be seen from here.
    fn locker(&self, byte: i64) -> Option<i32> {
        // SAFETY: a flock of zeros is valid, and the call fills it.
        unsafe {
            let mut lock: libc::flock = std::mem::zeroed();
            lock.l_type = libc::F_WRLCK as _;
            lock.l_whence = libc::SEEK_SET as _;
            lock.l_start = DOOR + byte;
            lock.l_len = 1;
            (libc::fcntl(self.descriptor(), libc::F_GETLK, &raw mut lock) == 0 && i32::from(lock.l_type) != libc::F_UNLCK)
                .then_some(lock.l_pid)
        }
    }

    fn record_lock(&self, command: i32, kind: i32, position: i64) -> bool {
        // SAFETY: a flock of zeros is valid, and the call only reads it.
        unsafe {
            let mut lock: libc::flock = std::mem::zeroed();
            lock.l_type = kind as _;
            lock.l_whence = libc::SEEK_SET as _;
            lock.l_start = position;
            lock.l_len = 1;
            loop {
                if libc::fcntl(self.descriptor(), command, &raw const lock) == 0 {
                    return true;
                }
                if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
                    return false;
                }
            }
        }
    }
}
