//! Host memory for backups: one range of addresses, made of pieces that come and go.
//!
//! Making host memory fit for the copy engines (populating it and registering it with the driver) runs at 2 to 3 GB/s in
//! one thread and at 35 in many, where the link moves 55. So it is done in pieces, by the threads that copy, while other
//! pieces are being copied; and what is there is used again. Undoing it takes as long, and is done in the background.
//!
//! A [`Range`] is a contiguous part of the arena for the contents of one allocation. It keeps the pieces that it touches;
//! a piece that no range touches is given back to the system.
//!
//! Addresses that may be written to count against the limits of the program's data (`ulimit -d`, a system without
//! overcommitment), and `mlockall` has them filled. So only the beginning of the arena is writable, as far as it is in use.

use super::numa::Near;
use super::ranges::FreeRanges;
use std::io;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use vramctl_config::Config;
use vramctl_driver::{Context, Current, Pinned};
use vramctl_host::{PerProcess, exit, limits, log_once, worker};
use vramctl_model::{Bytes, Error, HostStatus};

/// The unit in which host memory is populated, registered and given back, in bytes. Measured on an H200 with 16 cores:
/// 64 MiB in 16 threads is where populating, registering and copying together are fastest (`docs/performance.md`). The tests'
/// own build fills thousands of them, and has smaller ones.
pub const HOST_PIECE: usize = if cfg!(debug_assertions) { 32 << 20 } else { 64 << 20 };

/// Where there are not so many bytes of addresses left, there is no arena.
const LEAST: usize = 2 * HOST_PIECE;

/// Host memory for backups.
pub struct Arena {
    base: NonNull<u8>,
    bytes: usize,
    state: Mutex<Stock>,
    /// Told whenever a piece has changed.
    changed: Condvar,
    made: Made,
    /// Bytes that threads are taking just now and the system does not count as used yet.
    coming: AtomicU64,
}

/// What making host memory ready has taken since it was last asked for, of the time of all threads together.
#[derive(Default)]
struct Made {
    pieces: AtomicU64,
    populating_us: AtomicU64,
    registering_us: AtomicU64,
}

// SAFETY: the base is an address; what is behind it is handed out in disjoint ranges.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

#[derive(Default)]
struct Stock {
    /// Free addresses.
    free: FreeRanges,
    pieces: Vec<Piece>,
    /// Stock at the beginning whose addresses may be read and written.
    open: usize,
    /// Stock at the beginning that stay when nobody uses them: the pre-warmed ones.
    kept: usize,
    /// Whether a thread is giving memory back.
    releasing: bool,
}

#[derive(Default)]
struct Piece {
    readiness: Readiness,
    /// How many ranges touch it.
    users: usize,
}

#[derive(Default)]
enum Readiness {
    /// Only addresses.
    #[default]
    Absent,
    /// A thread is making it ready or giving it back.
    Changing,
    /// There, and registered with the driver if that was possible.
    Ready(Option<Pinned>),
}

impl Readiness {
    fn is_ready(&self) -> bool {
        matches!(self, Self::Ready(_))
    }
}

static ARENA: PerProcess<Option<Arena>> = PerProcess::new(Arena::reserve);

impl Arena {
    /// This process's arena.
    pub fn get() -> Result<&'static Self, Error> {
        ARENA.get().as_ref().ok_or(Error::HostMemory { needed: LEAST as u64, available: 0, capped: false })
    }

    fn existing() -> Option<&'static Self> {
        ARENA.existing()?.as_ref()
    }

    /// Takes addresses, far more than there is memory: contents of any size lie in one range, and addresses cost nothing.
    /// Where they are limited (`ulimit -v`), at least half of what is left stays for the program.
    fn reserve() -> Option<Self> {
        // Locked, 8 TiB would overflow the kernel's count of pages: 2^31 of them.
        const MOST: usize = 4 << 40;
        let sizes = std::iter::successors(Some(MOST), |bytes| Some(bytes / 2)).take_while(|bytes| *bytes >= LEAST);
        let Some((base, fits)) = sizes.into_iter().find_map(|bytes| Some((close_addresses(None, bytes)?, bytes))) else {
            log::warn!(
                "no contents can be kept in host memory: this process may not have {} of addresses more (ulimit -v)",
                Bytes(LEAST as u64)
            );
            return None;
        };
        let bytes = if fits == MOST { fits } else { fits / 2 };
        // SAFETY: the end of the mapping just made; nothing where it is all used.
        unsafe { libc::munmap(base.as_ptr().wrapping_add(bytes).cast(), fits - bytes) };
        let state = Stock { free: FreeRanges::new(bytes), ..Stock::default() };
        let (changed, made, coming) = (Condvar::new(), Made::default(), AtomicU64::new(0));
        Some(Self { base, bytes, state: Mutex::new(state), changed, made, coming })
    }

    fn lock(&self) -> MutexGuard<'_, Stock> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ranges of these sizes, in bytes, or an error and nothing: too little host memory for the pieces that are not there
    /// yet, or more than `VRAMCTL_HOST_CAP`.
    pub fn take(&'static self, sizes: &[usize]) -> Result<Vec<Range>, Error> {
        /// How long to wait for memory that is being given back, where there is too little without it.
        const PATIENCE: Duration = Duration::from_secs(5);
        // It may end while we look at what there is.
        let releasing = self.lock().releasing;
        let taken = self.try_take(sizes);
        let state = self.lock();
        if !matches!(taken, Err(Error::HostMemory { .. })) || !(releasing || state.releasing) {
            return taken;
        }
        drop(self.changed.wait_timeout_while(state, PATIENCE, |state| state.releasing).unwrap_or_else(PoisonError::into_inner));
        self.try_take(sizes)
    }

    fn try_take(&'static self, sizes: &[usize]) -> Result<Vec<Range>, Error> {
        let mut state = self.lock();
        let before = state.populated();
        let mut ranges = Vec::with_capacity(sizes.len());
        for &bytes in sizes {
            let Some(offset) = state.take(bytes) else {
                // Before the ranges are dropped, which takes the lock.
                drop(state);
                return Err(Error::HostMemory { needed: sizes.iter().sum::<usize>() as u64, available: 0, capped: false });
            };
            ranges.push(Range { offset, bytes });
        }
        let populated = state.populated();
        let needed = ((populated - before) * HOST_PIECE) as u64;
        let cap = Config::get().host_cap.saturating_sub((before * HOST_PIECE) as u64);
        let host = limits::available_bytes();
        let (available, capped) = (host.min(cap), cap < host);
        let end = ranges.iter().map(|range| Self::pieces_of(range).end).max().unwrap_or(0);
        let fits = needed <= available;
        let opened = fits && self.open(&mut state, end);
        drop(state);
        match (opened, fits) {
            (true, _) => Ok(ranges),
            (_, true) => Err(Error::HostMemory { needed, available: 0, capped: false }),
            _ => Err(Error::HostMemory { needed, available, capped }),
        }
    }

    /// Makes the addresses of the first pieces writable. `false`: the limits of the program do not allow it. All at once,
    /// before they are populated: such a change stops every thread that is populating.
    fn open(&self, state: &mut Stock, pieces: usize) -> bool {
        if pieces > state.open {
            let (address, bytes) = (self.address(state.open), (pieces - state.open) * HOST_PIECE);
            unlock(address, bytes);
            // SAFETY: addresses of ours that nobody can have used yet.
            if unsafe { libc::mprotect(address.as_ptr().cast(), bytes, libc::PROT_READ | libc::PROT_WRITE) } != 0 {
                let error = io::Error::last_os_error();
                log::warn!("no {} of host memory for backups: this process may not have so much data ({error})", Bytes(bytes as u64));
                return false;
            }
            state.open = pieces;
        }
        true
    }

    /// Closes the addresses at the end that nobody uses.
    fn close(&self, state: &mut Stock) {
        let used = |piece: &Piece| piece.users > 0 || !matches!(piece.readiness, Readiness::Absent);
        let end = state.pieces.iter().rposition(used).map_or(0, |last| last + 1).max(state.kept);
        // Should the system refuse, they stay as they are.
        if end < state.open && close_addresses(Some(self.address(end)), (state.open - end) * HOST_PIECE).is_some() {
            state.open = end;
        }
    }

    /// The pieces that a range touches.
    pub fn pieces_of(range: &Range) -> std::ops::Range<usize> {
        range.offset / HOST_PIECE..(range.offset + range.bytes).div_ceil(HOST_PIECE)
    }

    /// Whether the copy engines reach all of these pieces directly.
    pub fn are_pinned(&self, mut pieces: impl Iterator<Item = usize>) -> bool {
        let state = self.lock();
        pieces.all(|piece| matches!(state.pieces.get(piece), Some(Piece { readiness: Readiness::Ready(Some(_)), .. })))
    }

    /// Makes a piece ready, and says whether the copy engines reach it directly. Waits where another thread is at it.
    pub fn prepare(&self, piece: usize, context: Context) -> Result<bool, Error> {
        let mut state = self.lock();
        let there = loop {
            match &state.piece(piece).readiness {
                Readiness::Ready(Some(_)) => return Ok(true),
                // Not registered: perhaps it can be now.
                Readiness::Ready(None) => break true,
                Readiness::Absent => break false,
                Readiness::Changing => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        };
        state.piece(piece).readiness = Readiness::Changing;
        drop(state);
        let current = Current::push(context).ok();
        let _near = current.as_ref().and_then(Near::to);
        let populated = if there { Ok(()) } else { timed(&self.made.populating_us, || self.populate(piece)) };
        let prepared =
            populated.map(|()| current.as_ref().and_then(|current| timed(&self.made.registering_us, || self.pin(piece, current))));
        self.made.pieces.fetch_add(1, Ordering::Relaxed);
        let mut state = self.lock();
        let (readiness, answer) = match prepared {
            Ok(pinned) => {
                let direct = pinned.is_some();
                (Readiness::Ready(pinned), Ok(direct))
            }
            Err(error) => (Readiness::Absent, Err(error)),
        };
        state.piece(piece).readiness = readiness;
        self.changed.notify_all();
        answer
    }

    /// The address of a place in the arena. What may be read and written there is for its piece to say.
    pub fn at(&self, offset: usize) -> *mut u8 {
        self.base.as_ptr().wrapping_add(offset)
    }

    fn address(&self, piece: usize) -> NonNull<u8> {
        // SAFETY: pieces lie inside the reserved range: they are touched by ranges, which do.
        unsafe { self.base.add(piece * HOST_PIECE) }
    }

    /// Takes memory for a piece, by a write to each page: page faults of several threads run side by side. `madvise` would
    /// hold the lock of the address space for a whole piece, and the driver, which changes the address space as it
    /// registers another, would wait for all of them (`docs/performance.md`).
    fn populate(&self, piece: usize) -> Result<(), Error> {
        /// The smallest there is: writing to every such part of a larger page does no harm.
        const PAGE: usize = 4096;
        /// A huge page.
        const STEP: usize = 2 << 20;
        // Looked at for each piece: other processes may be at it at the same time, and all of them saw the same memory. What
        // our other threads are about to take is spoken for.
        let coming = self.coming.fetch_add(HOST_PIECE as u64, Ordering::Relaxed);
        let available = limits::available_bytes().saturating_sub(coming);
        if available < HOST_PIECE as u64 {
            self.coming.fetch_sub(HOST_PIECE as u64, Ordering::Relaxed);
            return Err(Error::HostMemory { needed: HOST_PIECE as u64, available, capped: false });
        }
        let address = self.address(piece);
        for step in (0..HOST_PIECE).step_by(STEP) {
            for offset in (step..step + STEP).step_by(PAGE) {
                // SAFETY: our own addresses, and nobody else uses this piece now. Volatile, or nothing need be written.
                unsafe { address.add(offset).write_volatile(0) };
            }
            self.coming.fetch_sub(STEP as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    fn depopulate(&self, piece: usize) {
        let address = self.address(piece);
        unlock(address, HOST_PIECE);
        // SAFETY: our own addresses, and nobody uses this piece any more.
        unsafe { libc::madvise(address.as_ptr().cast(), HOST_PIECE, libc::MADV_DONTNEED) };
    }

    fn pin(&self, piece: usize, current: &Current) -> Option<Pinned> {
        // SAFETY: the piece stays mapped until its readiness changes, and the registration is dropped before that.
        match unsafe { Pinned::register(self.address(piece), HOST_PIECE, current) } {
            Ok(pinned) => Some(pinned),
            Err(failure) => {
                log_once!(log::Level::Warn, "host memory cannot be registered ({failure}): backups go through a small buffer, more slowly");
                None
            }
        }
    }

    /// Tells the log what making host memory ready took since it was last told.
    pub fn log_preparation(&self) {
        let [pieces, populating, registering] =
            [&self.made.pieces, &self.made.populating_us, &self.made.registering_us].map(|counter| counter.swap(0, Ordering::Relaxed));
        if pieces > 0 {
            let bytes = Bytes(pieces * HOST_PIECE as u64);
            let (populating, registering) = (populating / 1000, registering / 1000);
            log::debug!("{bytes} of host memory made ready: {populating} ms to populate and {registering} ms to register, of all threads");
        }
    }

    /// Registrations go with the context they were made in. What was registered there is registered anew when it is next
    /// used.
    pub fn forget_context(context: Context) {
        let Some(arena) = Self::existing() else { return };
        for piece in &mut arena.lock().pieces {
            if let Readiness::Ready(pinned) = &mut piece.readiness
                && pinned.as_ref().is_some_and(|pinned| pinned.context() == context)
            {
                *pinned = None;
            }
        }
    }

    /// Makes the first `bytes` ready in the background, and keeps them ready.
    pub fn prewarm(&'static self, bytes: u64, context: Context) {
        let pieces = (bytes as usize).div_ceil(HOST_PIECE).min(self.bytes / HOST_PIECE);
        {
            let mut state = self.lock();
            if !self.open(&mut state, pieces) {
                return;
            }
            state.kept = pieces;
        }
        let work = move || {
            worker::step_back();
            for piece in 0..pieces {
                if exit::is_ending() {
                    return;
                }
                if let Err(error) = self.prewarm_piece(piece, context) {
                    log::warn!("{} of host memory are ready, and no more: {error}", Bytes((piece * HOST_PIECE) as u64));
                    return self.keep(piece);
                }
            }
            log::info!("{} of host memory are ready", Bytes((pieces * HOST_PIECE) as u64));
        };
        if let Err(error) = worker::spawn("vramctl-prewarm", work) {
            log::warn!("no thread to prepare host memory: {error}");
            self.keep(0);
        }
    }

    /// Keeps no more than so many of the first pieces ready.
    fn keep(&self, pieces: usize) {
        let mut state = self.lock();
        state.kept = pieces;
        self.close(&mut state);
    }

    fn prewarm_piece(&self, piece: usize, context: Context) -> Result<(), Error> {
        let (there, ready) = {
            let mut state = self.lock();
            (state.piece(piece).readiness.is_ready(), state.populated())
        };
        let room = Config::get().host_cap.saturating_sub((ready * HOST_PIECE) as u64);
        if !there && room < HOST_PIECE as u64 {
            return Err(Error::HostMemory { needed: HOST_PIECE as u64, available: room, capped: true });
        }
        self.prepare(piece, context).map(drop)
    }

    /// How much host memory there is now.
    pub fn status(&self) -> HostStatus {
        let state = self.lock();
        let count = |wanted: fn(&Piece) -> bool| (state.pieces.iter().filter(|piece| wanted(piece)).count() * HOST_PIECE) as u64;
        let ready_bytes = count(|piece| piece.readiness.is_ready());
        HostStatus {
            // What is being saved has its place before there is memory for it.
            used_bytes: ((self.bytes - state.free.bytes()) as u64).min(ready_bytes),
            ready_bytes,
            pinned_bytes: count(|piece| matches!(piece.readiness, Readiness::Ready(Some(_)))),
        }
    }

    /// Bytes of contents that there is room for: in what is there, and in what the host and `VRAMCTL_HOST_CAP` would still give.
    pub fn available_to_process() -> u64 {
        let ready = Self::status_of_process();
        let free = ready.ready_bytes.saturating_sub(ready.used_bytes);
        let cap = Config::get().host_cap.saturating_sub(ready.ready_bytes);
        limits::available_bytes().min(cap).saturating_add(free)
    }

    /// How much host memory there is now; nothing, if no arena was needed yet.
    pub fn status_of_process() -> HostStatus {
        Self::existing().map_or_else(HostStatus::default, Self::status)
    }

    /// Waits until no memory is being given back. For tests and measurements.
    pub fn settle() {
        if let Some(arena) = Self::existing() {
            let state = arena.lock();
            drop(arena.changed.wait_while(state, |state| state.releasing).unwrap_or_else(PoisonError::into_inner));
        }
    }

    fn give_back(&'static self, range: &Range) {
        let mut state = self.lock();
        state.give_back(range);
        if state.releasing {
            return;
        }
        if state.idle_piece().is_none() {
            return self.close(&mut state);
        }
        state.releasing = true;
        drop(state);
        if worker::spawn("vramctl-release", || self.release_idle()).is_err() {
            // No thread to be had: then here and now.
            self.release_idle();
        }
    }

    /// Gives pieces that nobody uses back to the system, until there are none.
    fn release_idle(&self) {
        let mut state = self.lock();
        while let Some(piece) = state.idle_piece() {
            if exit::is_ending() {
                break;
            }
            let readiness = std::mem::replace(&mut state.piece(piece).readiness, Readiness::Changing);
            drop(state);
            let unregistered = match readiness {
                Readiness::Ready(Some(pinned)) => pinned.unregister(),
                _ => Ok(()),
            };
            if unregistered.is_ok() {
                self.depopulate(piece);
            }
            state = self.lock();
            let refused = unregistered.is_err();
            state.piece(piece).readiness = unregistered.map_or_else(|pinned| Readiness::Ready(Some(pinned)), |()| Readiness::Absent);
            self.changed.notify_all();
            if refused {
                // The next range that is given back has it tried again.
                break;
            }
        }
        self.close(&mut state);
        state.releasing = false;
        self.changed.notify_all();
    }
}

/// Addresses for so many bytes, with no memory behind them and not to be used: new ones, or those of ours that begin there,
/// which lose what they had. They count against no limit but that of addresses.
fn close_addresses(at: Option<NonNull<u8>>, bytes: usize) -> Option<NonNull<u8>> {
    let place = at.map_or(ptr::null_mut(), NonNull::as_ptr).cast();
    let fixed = if at.is_some() { libc::MAP_FIXED } else { 0 };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | fixed;
    // SAFETY: a new private mapping that touches no other memory, or takes the place of a part of ours that nobody uses.
    let base = unsafe { libc::mmap(place, bytes, libc::PROT_NONE, flags, -1, 0) };
    if base == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the mapping just made.
    unsafe {
        // Huge pages make populating and registering cheaper. A forked child neither pays for the memory nor turns its
        // pages into copies under the device's feet. A core dump is not made larger. They are wishes: where the kernel does
        // not know them, nothing is lost.
        for wish in [libc::MADV_HUGEPAGE, libc::MADV_DONTFORK, libc::MADV_DONTDUMP] {
            libc::madvise(base, bytes, wish);
        }
    }
    let base = NonNull::new(base.cast())?;
    unlock(base, bytes);
    Some(base)
}

/// In a program that has all its memory locked (`mlockall`), addresses are filled as soon as they can be written to, and
/// what is there does not go.
fn unlock(base: NonNull<u8>, bytes: usize) {
    // SAFETY: addresses of ours; their contents do not change.
    unsafe { libc::munlock(base.as_ptr().cast(), bytes) };
}

/// Adds the time that some work takes, in microseconds.
fn timed<R>(counter: &AtomicU64, work: impl FnOnce() -> R) -> R {
    let started = Instant::now();
    let result = work();
    counter.fetch_add(started.elapsed().as_micros() as u64, Ordering::Relaxed);
    result
}

impl Stock {
    fn piece(&mut self, piece: usize) -> &mut Piece {
        if piece >= self.pieces.len() {
            self.pieces.resize_with(piece + 1, Piece::default);
        }
        &mut self.pieces[piece]
    }

    /// Stock that have memory, or will have it as soon as a range that touches them is filled.
    fn populated(&self) -> usize {
        self.pieces.iter().filter(|piece| piece.users > 0 || !matches!(piece.readiness, Readiness::Absent)).count()
    }

    /// A piece with memory that nobody uses and nobody keeps.
    fn idle_piece(&self) -> Option<usize> {
        let idle = |piece: &Piece| piece.users == 0 && piece.readiness.is_ready();
        (self.kept..self.pieces.len()).find(|piece| idle(&self.pieces[*piece]))
    }

    /// The first free place. Low addresses first, so that ranges share pieces and use those that are ready.
    fn take(&mut self, bytes: usize) -> Option<usize> {
        let offset = self.free.take(bytes)?;
        for piece in Arena::pieces_of(&std::mem::ManuallyDrop::new(Range { offset, bytes })) {
            self.piece(piece).users += 1;
        }
        Some(offset)
    }

    fn give_back(&mut self, range: &Range) {
        for piece in Arena::pieces_of(range) {
            self.piece(piece).users -= 1;
        }
        self.free.give_back(range.offset, range.bytes);
    }
}

/// A contiguous part of the arena, given back when dropped.
#[derive(Debug)]
pub struct Range {
    offset: usize,
    bytes: usize,
}

impl Range {
    /// Its place in the arena, in bytes.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// How long it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its first byte. What may be read and written there is for the pieces to say.
    pub fn address(&self) -> *mut u8 {
        Arena::existing().map_or(ptr::null_mut(), |arena| arena.at(self.offset))
    }

    /// Its contents.
    ///
    /// # Safety
    /// All its pieces must have been prepared, and nothing may be written to it while the slice is used.
    pub unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: prepared pieces are readable, and they stay while a range touches them.
        unsafe { slice::from_raw_parts(self.address(), self.bytes) }
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        if let Some(arena) = Arena::existing() {
            arena.give_back(self);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn state() -> Stock {
        Stock { free: FreeRanges::new(100 * HOST_PIECE), ..Stock::default() }
    }

    fn range(offset: usize, bytes: usize) -> std::mem::ManuallyDrop<Range> {
        std::mem::ManuallyDrop::new(Range { offset, bytes })
    }

    proptest! {
        /// Two allocations whose contents overlap in the backup would both be lost.
        #[test]
        fn ranges_never_overlap_and_all_comes_back(steps in prop::collection::vec((1usize..90, any::<bool>(), any::<usize>()), 1..200)) {
            const UNIT: usize = 2 << 20;
            let mut state = state();
            let mut taken: Vec<(usize, usize)> = Vec::new();
            for (units, give, which) in steps {
                if give && !taken.is_empty() {
                    let (offset, bytes) = taken.swap_remove(which % taken.len());
                    state.give_back(&range(offset, bytes));
                } else if let Some(offset) = state.take(units * UNIT) {
                    prop_assert!(taken.iter().all(|(other, bytes)| offset + units * UNIT <= *other || other + bytes <= offset));
                    taken.push((offset, units * UNIT));
                }
                for piece in 0..state.pieces.len() {
                    let users = taken.iter().filter(|(offset, bytes)| Arena::pieces_of(&range(*offset, *bytes)).contains(&piece)).count();
                    prop_assert_eq!(state.pieces[piece].users, users);
                }
            }
            for (offset, bytes) in taken {
                state.give_back(&range(offset, bytes));
            }
            prop_assert_eq!(state.free, FreeRanges::new(100 * HOST_PIECE));
        }
    }
}
