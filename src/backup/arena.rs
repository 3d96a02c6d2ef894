//! Host memory for backups: one address range, populated and released in pieces.
//!
//! Preparing host memory for the copy engines (populating it and registering it with the driver) runs at 2 to 3 GB/s on one
//! thread and at 35 GB/s on many, while the link moves 55 GB/s. So the copying threads prepare it piece by piece while other
//! pieces are being copied, and prepared memory is reused. Releasing it takes as long, and happens in the background.
//!
//! A [`Range`] is a contiguous part of the arena that holds one allocation's contents and keeps every piece it touches. A
//! piece that no range touches stays ready for the next pause for a while (`VRAMCTL_HOST_KEEP`), then returns to the system;
//! sooner if anyone needs the memory.
//!
//! Writable addresses count against the program's data limits (`ulimit -d`, systems without overcommit), and `mlockall`
//! populates them. So only the start of the arena, as far as it is in use, is writable.
//!
//! `stock` does the bookkeeping and `addresses` the system calls; this module decides what happens when.

use super::others::{self, Says, Sign};
use super::ranges::FreeRanges;
use super::stock::{self, HOST_PIECE, Piece, Readiness, Stock};
use super::{addresses, quiet, settings};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use std::{mem, slice, thread};
use vramctl_config::Config;
use vramctl_driver::{Activity, Context, Current, Pinned};
use vramctl_host::{PerProcess, Unpoison, exit, limits, log_once, worker};
use vramctl_model::{Bytes, Error, Failure, HostStatus, Span};

/// Threads that end registrations.
const UNREGISTERING: usize = 4;
/// Minimum bytes of addresses for an arena.
const LEAST: usize = 2 * HOST_PIECE;

/// Host memory for backups.
pub struct Arena {
    base: NonNull<u8>,
    bytes: usize,
    state: Mutex<Stock>,
    /// Signalled whenever a piece changes.
    changed: Condvar,
    /// Wakes the release thread when pieces expire.
    due: Condvar,
    made: Made,
    /// Bytes being populated that the system does not count as used yet.
    coming: AtomicU64,
    /// How many want no pooling ([`Arena::stop_pooling`]).
    unpooled: AtomicUsize,
    /// The fewest bytes that were available while somebody was.
    fewest: AtomicU64,
    /// Whether the driver refused the last registration.
    is_refused: AtomicBool,
}

/// The cost of preparing host memory since it was last logged, summed over all threads.
#[derive(Default)]
struct Made {
    pieces: AtomicU64,
    populating_us: AtomicU64,
    registering_us: AtomicU64,
}

/// The host memory that is needed for contents, and what there is: whole pieces.
#[derive(Debug, Clone, Copy)]
pub struct Need {
    /// Bytes.
    pub bytes: u64,
    /// Bytes that the host and `VRAMCTL_HOST_CAP` allow.
    pub available: u64,
    /// Whether `VRAMCTL_HOST_CAP` is the tighter limit.
    pub capped: bool,
}

impl Need {
    /// For `after` pieces where there are `before`. `host`: bytes that the host has available.
    fn of(before: usize, after: usize, host: u64) -> Self {
        let bytes = |pieces: usize| (pieces * HOST_PIECE) as u64;
        let cap = Config::get().host_cap.saturating_sub(bytes(before));
        Self { bytes: bytes(after.saturating_sub(before)), available: host.min(cap), capped: cap < host }
    }

    fn is_met(self) -> bool {
        self.bytes <= self.available
    }

    /// The program's own limits are in the way.
    fn forbidden(self) -> Error {
        Error::HostMemory { needed: self.bytes, available: 0, capped: false }
    }

    /// An error if there is too little.
    pub fn check(self) -> Result<(), Error> {
        let Self { bytes: needed, available, capped } = self;
        if self.is_met() { Ok(()) } else { Err(Error::HostMemory { needed, available, capped }) }
    }
}

fn no_addresses(sizes: &[usize]) -> Error {
    Error::HostMemory { needed: sizes.iter().sum::<usize>() as u64, available: 0, capped: false }
}

// SAFETY: the base is only an address; the memory behind it is handed out in disjoint ranges.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

static ARENA: PerProcess<Option<Arena>> = PerProcess::new(Arena::reserve);

impl Arena {
    /// This process's arena.
    pub fn get() -> Result<&'static Self, Error> {
        ARENA.get().as_ref().ok_or(Error::HostMemory { needed: LEAST as u64, available: 0, capped: false })
    }

    fn existing() -> Option<&'static Self> {
        ARENA.existing()?.as_ref()
    }

    /// Reserves far more addresses than there is memory: contents of any size fit in one range, and addresses cost nothing.
    /// If they are limited (`ulimit -v`), leaves at least half of the rest to the program.
    fn reserve() -> Option<Self> {
        // 8 TiB, if locked, would overflow the kernel's page count of 2^31.
        const MOST: usize = 4 << 40;
        let sizes = std::iter::successors(Some(MOST), |bytes| Some(bytes / 2)).take_while(|bytes| *bytes >= LEAST);
        // SAFETY: new addresses.
        let reserve = |bytes| unsafe { addresses::close(None, bytes) };
        let Some((base, fits)) = sizes.into_iter().find_map(|bytes| Some((reserve(bytes)?, bytes))) else {
            log::warn!("cannot keep contents in host memory: less than {} of address space left (ulimit -v)", Bytes(LEAST as u64));
            return None;
        };
        let bytes = if fits == MOST { fits } else { fits / 2 };
        // SAFETY: the unused end of the mapping just made; nothing if all of it is used.
        unsafe { libc::munmap(base.as_ptr().wrapping_add(bytes).cast(), fits - bytes) };
        let state = Stock { free: FreeRanges::new(bytes), ..Stock::default() };
        let (changed, due) = (Condvar::new(), Condvar::new());
        let (made, coming, is_refused) = (Made::default(), AtomicU64::new(0), AtomicBool::new(false));
        let (unpooled, fewest) = (AtomicUsize::new(0), AtomicU64::new(u64::MAX));
        Some(Self { base, bytes, state: Mutex::new(state), changed, due, made, coming, unpooled, fewest, is_refused })
    }

    fn lock(&self) -> MutexGuard<'_, Stock> {
        self.state.lock().unpoisoned()
    }

    /// Takes ranges of these sizes in bytes, all or none. Fails if there is too little host memory for the pieces not ready
    /// yet, or `VRAMCTL_HOST_CAP` is exceeded.
    pub fn take(&'static self, sizes: &[usize]) -> Result<Vec<Range>, Error> {
        // The last spare memory may be released while availability is checked.
        let spare = self.lock().has_spare();
        let taken = self.try_take(sizes, limits::available_bytes);
        let is_short = matches!(taken, Err(Error::HostMemory { .. }));
        let taken = if is_short && (self.give_up_spare() || spare) { self.try_take(sizes, limits::available_bytes) } else { taken };
        let is_short_on_host = matches!(taken, Err(Error::HostMemory { capped: false, .. }));
        if is_short_on_host && others::any(Says::Keeps) { self.take_from_others(sizes) } else { taken }
    }

    /// Whether other vramctl processes keep host memory that they would give up. What this one keeps is released first.
    pub fn others_may_help() -> bool {
        if let Some(arena) = Self::existing() {
            arena.give_up_spare();
        }
        others::any(Says::Keeps)
    }

    /// Asks other vramctl processes for the host memory they keep, and retries as they release it.
    fn take_from_others(&'static self, sizes: &[usize]) -> Result<Vec<Range>, Error> {
        const PATIENCE: Duration = Duration::from_secs(10);
        const LOOK_AGAIN: Duration = Duration::from_millis(20);
        let _sign = Sign::put_up(Says::Needs);
        let started = Instant::now();
        loop {
            let waits = others::any(Says::Keeps) && started.elapsed() < PATIENCE;
            let taken = self.try_take(sizes, limits::available_bytes);
            if !waits || !matches!(taken, Err(Error::HostMemory { capped: false, .. })) {
                return taken;
            }
            thread::sleep(LOOK_AGAIN);
        }
    }

    /// Releases all spare memory now and waits for it. `false` if there is none.
    fn give_up_spare(&self) -> bool {
        const PATIENCE: Duration = Duration::from_secs(5);
        let mut state = self.lock();
        let found = state.has_spare();
        state.expire();
        self.due.notify_all();
        drop(self.changed.wait_timeout_while(state, PATIENCE, |state: &mut Stock| state.releasing).unpoisoned());
        found
    }

    /// Takes ranges of these sizes, whose memory comes piece by piece ([`await_room`](Self::await_room)). Fails if `VRAMCTL_HOST_CAP` would be
    /// exceeded at the end.
    pub fn take_by_piece(&'static self, sizes: &[usize]) -> Result<Vec<Range>, Error> {
        self.try_take(sizes, || u64::MAX)
    }

    /// `host`: bytes that the host has available.
    fn try_take(&'static self, sizes: &[usize], host: fn() -> u64) -> Result<Vec<Range>, Error> {
        let mut state = self.lock();
        let before = state.populated();
        let mut ranges = Vec::with_capacity(sizes.len());
        for &bytes in sizes {
            let Some(offset) = state.take(bytes) else {
                // Before the ranges are dropped, which takes the lock.
                drop(state);
                return Err(no_addresses(sizes));
            };
            ranges.push(Range { offset, bytes, at_once: false });
        }
        let need = Need::of(before, state.populated(), host());
        let end = ranges.iter().map(|range| Self::pieces_of(range).end).max().unwrap_or(0);
        let opened = need.is_met() && self.open(&mut state, end);
        drop(state);
        match need.check() {
            Ok(()) if !opened => Err(need.forbidden()),
            met => met.map(|()| ranges),
        }
    }

    /// Bytes that the system would get back if these ranges were dropped and nothing was kept for later.
    pub fn given_back(&self, ranges: &[&Range]) -> u64 {
        let state = self.lock();
        let before = state.pieces_with(std::iter::empty(), &[]).unwrap_or_default();
        let after = state.pieces_with(ranges.iter().map(|range| (range.offset, range.bytes)), &[]).unwrap_or_default();
        (before.saturating_sub(after) * HOST_PIECE) as u64
    }

    /// What ranges of these sizes would need, if nobody else gives up memory for them. `by_piece`: as for [`take_by_piece`](Self::take_by_piece).
    pub fn need(&self, sizes: &[usize], by_piece: bool) -> Result<Need, Error> {
        let mut state = self.lock();
        let pieces = |sizes| state.pieces_with(std::iter::empty(), sizes);
        let (before, after) = (pieces(&[]).unwrap_or_default(), pieces(sizes).ok_or_else(|| no_addresses(sizes))?);
        // Spare memory that is not reused is released first.
        let spare = (state.populated().saturating_sub(before) * HOST_PIECE) as u64;
        let host = if by_piece { u64::MAX } else { limits::available_bytes().saturating_add(spare) };
        let need = Need::of(before, after, host);
        let mut free = state.free.clone();
        let end = sizes.iter().filter_map(|bytes| Some(stock::pieces_of(free.take(*bytes)?, *bytes).end)).max().unwrap_or(0);
        // Only an attempt shows whether the program's limits allow it.
        let is_allowed = !need.is_met() || self.open(&mut state, end);
        self.close(&mut state);
        if is_allowed { Ok(need) } else { Err(need.forbidden()) }
    }

    /// Indices of the ranges to drop to make room for new ones of these sizes; `None` if dropping all would not be enough.
    /// Ranges that start in the same piece go together, because memory comes and goes in pieces.
    pub fn in_the_way(&self, ranges: &[&Range], sizes: &[usize]) -> Option<Vec<usize>> {
        let state = self.lock();
        let populated = (state.populated() * HOST_PIECE) as u64;
        let most = populated.saturating_add(limits::available_bytes()).min(Config::get().host_cap);
        let fits_without = |gone: &[&[usize]]| {
            let gone = gone.iter().copied().flatten().map(|place| (ranges[*place].offset, ranges[*place].bytes));
            state.pieces_with(gone, sizes).is_some_and(|pieces| (pieces * HOST_PIECE) as u64 <= most)
        };
        let first_piece = |place: &usize| Self::pieces_of(ranges[*place]).start;
        let mut places: Vec<_> = (0..ranges.len()).collect();
        places.sort_unstable_by_key(first_piece);
        let mut gone: Vec<_> = places.chunk_by(|one, next| first_piece(one) == first_piece(next)).collect();
        if !fits_without(&gone) {
            return None;
        }
        for group in (0..gone.len()).rev() {
            let kept = gone.remove(group);
            if !fits_without(&gone) {
                gone.insert(group, kept);
            }
        }
        Some(gone.concat())
    }

    /// Makes the first pieces' addresses writable. `false` if the program's limits forbid it. All at once, before
    /// populating: the change stops every populating thread.
    fn open(&self, state: &mut Stock, pieces: usize) -> bool {
        if pieces > state.open {
            let (address, bytes) = (self.address(state.open), (pieces - state.open) * HOST_PIECE);
            // SAFETY: closed addresses are not in use.
            if let Err(error) = unsafe { addresses::open(address, bytes) } {
                log::warn!("cannot use {} of host memory for backups: over the data limit ({error})", Bytes(bytes as u64));
                return false;
            }
            state.open = pieces;
        }
        true
    }

    /// Closes the unused addresses at the end.
    fn close(&self, state: &mut Stock) {
        let end = state.in_use();
        // SAFETY: no range touches anything behind `end`, and it has no memory.
        let close = |open| unsafe { addresses::close(Some(self.address(end)), (open - end) * HOST_PIECE) };
        // If the system refuses, they stay open.
        if end < state.open && close(state.open).is_some() {
            state.open = end;
        }
    }

    /// The pieces a range touches.
    pub fn pieces_of(range: &Range) -> std::ops::Range<usize> {
        stock::pieces_of(range.offset, range.bytes)
    }

    /// Whether the copy engines reach all of these pieces directly.
    pub fn are_pinned(&self, mut pieces: impl Iterator<Item = usize>) -> bool {
        let state = self.lock();
        pieces.all(|piece| matches!(state.pieces.get(piece), Some(Piece { readiness: Readiness::Ready(Some(_)), .. })))
    }

    /// Whether the driver registers host memory: it has not refused the last piece.
    pub fn can_register() -> bool {
        Self::existing().is_none_or(|arena| !arena.is_refused.load(Ordering::Relaxed))
    }

    /// From now on, until the value is dropped, host memory goes back to the system as soon as no range touches it, and the drop of the range
    /// waits for that: another process waits for it.
    pub fn stop_pooling(&'static self) -> PoolingStopped {
        self.unpooled.fetch_add(1, Ordering::Relaxed);
        self.give_up_spare();
        let available = limits::available_bytes();
        self.fewest.store(available, Ordering::Relaxed);
        PoolingStopped { arena: self, available }
    }

    /// The host memory of a piece that has none: as soon as it is there, if that is `within` this time and while it `is_wanted`. `None` if
    /// the piece has memory.
    pub fn await_room(&self, piece: usize, within: Duration, is_wanted: &dyn Fn() -> bool) -> Result<Option<Claim<'_>>, Error> {
        /// The time between two looks: at first, and at most. It doubles each time.
        const LOOK_AGAIN: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(32));
        let (started, mut pause) = (Instant::now(), LOOK_AGAIN.0);
        let mut sign = None;
        while !self.lock().piece(piece).readiness.is_ready() {
            match self.claim() {
                Ok(claim) => return Ok(Some(claim)),
                Err(short) if started.elapsed() >= within || !is_wanted() => return Err(short),
                Err(_) => (),
            }
            // Other processes may keep memory that they do not need.
            sign.get_or_insert_with(|| Sign::put_up(Says::Needs));
            thread::sleep(pause);
            pause = (2 * pause).min(LOOK_AGAIN.1);
        }
        Ok(None)
    }

    /// The host memory of a piece that has none, if it is there now. `None` if the piece has memory.
    pub fn room_now(&self, piece: usize) -> Result<Option<Claim<'_>>, Error> {
        self.await_room(piece, Duration::ZERO, &|| false)
    }

    /// Prepares a piece and returns whether the copy engines reach it directly. If another thread is changing it, waits for
    /// that. `claim`: the memory for it; without one, it must be there now.
    pub fn prepare(&self, piece: usize, context: Context, claim: Option<Claim<'_>>) -> Result<bool, Error> {
        let mut state = self
            .changed
            .wait_while(self.lock(), |state: &mut Stock| matches!(state.piece(piece).readiness, Readiness::Changing))
            .unpoisoned();
        match state.piece(piece).readiness {
            Readiness::Ready(Some(_)) => Ok(true),
            _ => self.change(state, piece, |readiness| self.make_ready(piece, readiness, context, claim)).1,
        }
    }

    /// Populates a piece that has no memory, and registers it. Returns whether the driver has registered it.
    fn make_ready(&self, piece: usize, readiness: &mut Readiness, context: Context, claim: Option<Claim<'_>>) -> Result<bool, Error> {
        if matches!(readiness, Readiness::Absent) {
            timed(&self.made.populating_us, || self.populate(piece, claim))?;
        }
        let current = Current::push(context).ok();
        let pinned = current.as_ref().and_then(|current| timed(&self.made.registering_us, || self.pin(piece, current)));
        self.made.pieces.fetch_add(1, Ordering::Relaxed);
        let is_registered = pinned.is_some();
        *readiness = Readiness::Ready(pinned);
        Ok(is_registered)
    }

    /// Changes what is behind a piece, without the lock, which it then takes again. No other thread uses or changes the piece meanwhile.
    fn change<'a, R>(
        &'a self,
        mut state: MutexGuard<'a, Stock>,
        piece: usize,
        change: impl FnOnce(&mut Readiness) -> R,
    ) -> (MutexGuard<'a, Stock>, R) {
        let mut readiness = mem::replace(&mut state.piece(piece).readiness, Readiness::Changing);
        drop(state);
        let changed = change(&mut readiness);
        state = self.lock();
        state.piece(piece).readiness = readiness;
        self.changed.notify_all();
        (state, changed)
    }

    /// The address of an arena offset. Its piece determines whether it may be accessed.
    pub fn at(&self, offset: usize) -> *mut u8 {
        self.base.as_ptr().wrapping_add(offset)
    }

    /// The offset of an address. `None` for other memory.
    pub fn offset_of(&self, address: u64) -> Option<usize> {
        let offset = usize::try_from(address.checked_sub(self.base.as_ptr().addr() as u64)?).ok()?;
        (offset < self.bytes).then_some(offset)
    }

    fn address(&self, piece: usize) -> NonNull<u8> {
        // SAFETY: pieces lie inside the reserved range, because the ranges that touch them do.
        unsafe { self.base.add(piece * HOST_PIECE) }
    }

    fn populate(&self, piece: usize, claim: Option<Claim<'_>>) -> Result<(), Error> {
        let mut claim = claim.map_or_else(|| self.claim(), Ok)?;
        // SAFETY: the addresses are open, and `Changing` gives this thread exclusive access.
        unsafe { addresses::populate(self.address(piece), HOST_PIECE, |bytes| claim.used(bytes as u64)) };
        Ok(())
    }

    /// Memory for one piece, if it is there. Looked at for each piece: other processes may be populating too, each having seen the same memory
    /// free. What this process's other threads are about to take is not available either.
    fn claim(&self) -> Result<Claim<'_>, Error> {
        self.claim_of(limits::available_bytes)
    }

    fn claim_of(&self, available_bytes: impl FnOnce() -> u64) -> Result<Claim<'_>, Error> {
        const BYTES: u64 = HOST_PIECE as u64;
        let claim = Claim { arena: self, left: BYTES };
        let before = self.coming.fetch_add(BYTES, Ordering::Relaxed);
        let available = available_bytes().saturating_sub(before);
        if available < BYTES {
            return Err(Error::HostMemory { needed: BYTES, available, capped: false });
        }
        self.fewest.fetch_min(available - BYTES, Ordering::Relaxed);
        Ok(claim)
    }

    fn pin(&self, piece: usize, current: &Current) -> Option<Pinned> {
        // SAFETY: the piece stays mapped until its readiness changes, and the registration is dropped before that.
        let registered = unsafe { Pinned::register(self.address(piece), HOST_PIECE, current) };
        self.is_refused.store(registered.is_err(), Ordering::Relaxed);
        let warn = |failure: &Failure| {
            log_once!(log::Level::Warn, "host memory cannot be registered ({failure}): backups go through a small buffer, more slowly");
        };
        registered.inspect_err(warn).ok()
    }

    /// Logs what preparing host memory has cost since the last call.
    pub fn log_preparation(&self) {
        let [pieces, populating, registering] =
            [&self.made.pieces, &self.made.populating_us, &self.made.registering_us].map(|counter| counter.swap(0, Ordering::Relaxed));
        if pieces > 0 {
            let bytes = Bytes(pieces * HOST_PIECE as u64);
            let (populating, registering) = (populating / 1000, registering / 1000);
            log::debug!("prepared {bytes} of host memory: {populating} ms to populate and {registering} ms to register, over all threads");
        }
    }

    /// Drops the registrations made in a destroyed context, which have ended with it. The memory is registered again on next use. Waits for a
    /// worker that has registered or unregistered a piece and is about to record it. Not forever: the driver may be waiting for the program.
    pub fn forget_context(context: Context) {
        const LONGEST: Duration = Duration::from_secs(5);
        let Some(arena) = Self::existing() else { return };
        let (mut stock, _) = arena
            .changed
            .wait_timeout_while(arena.lock(), LONGEST, |stock: &mut Stock| {
                stock.pieces.iter().any(|piece| matches!(piece.readiness, Readiness::Changing))
            })
            .unpoisoned();
        for piece in &mut stock.pieces {
            if let Readiness::Ready(pinned) = &mut piece.readiness
                && pinned.as_ref().is_some_and(|pinned| pinned.context() == context)
            {
                *pinned = None;
            }
        }
    }

    /// Ends all registrations, on several threads, if this is a quiet moment ([`quiet`]); each piece is registered again at its next use. This is
    /// for the driver's checkpoint of this process, because the driver would release and register the memory on one thread (23 and 50 ms for each
    /// GiB, H100, driver 580). Calls of the program that start device work wait meanwhile.
    pub fn unregister_all() {
        let Some(arena) = Self::existing() else { return };
        let next = AtomicUsize::new(0);
        let on_threads = || {
            thread::scope(|scope| {
                for _ in 1..UNREGISTERING {
                    // Fewer will do.
                    let _ = worker::spawn_scoped(scope, "vramctl-unregister", || arena.unregister_from(&next));
                }
                arena.unregister_from(&next);
            });
        };
        if let Err(activity) = quiet::now(on_threads) {
            log::debug!("host memory stays registered during the checkpoint ({activity:?})");
        }
    }

    /// Ends the registrations of pieces, one after the other. `next`: the first piece that no thread has taken. A piece that the driver refuses to
    /// unregister stays registered, and the driver's checkpoint includes it.
    fn unregister_from(&self, next: &AtomicUsize) {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let state = self.lock();
            let Some(piece) = state.pieces.get(number).filter(|_| !exit::is_ending()) else { return };
            if matches!(piece.readiness, Readiness::Ready(Some(_))) {
                drop(self.change(state, number, unregister));
            }
        }
    }

    /// Prepares the first `bytes` in the background and keeps them ready.
    pub fn prewarm(&'static self, bytes: u64, context: Context) {
        let pieces = (bytes as usize).div_ceil(HOST_PIECE).min(self.bytes / HOST_PIECE);
        {
            let mut state = self.lock();
            // Open addresses count against the program's data limit, so only those that may get memory.
            let allowed = usize::try_from(Config::get().host_cap).unwrap_or(usize::MAX) / HOST_PIECE;
            if !self.open(&mut state, pieces.min(allowed)) {
                return;
            }
            state.kept = pieces;
        }
        if let Err(error) = worker::spawn("vramctl-prewarm", move || {
            worker::step_back();
            for piece in 0..pieces {
                if exit::is_ending() {
                    return;
                }
                if let Err(error) = self.prewarm_piece(piece, context) {
                    log::warn!("only {} of host memory is ready: {error}", Bytes((piece * HOST_PIECE) as u64));
                    return self.keep(piece);
                }
            }
            log::info!("{} of host memory is ready", Bytes((pieces * HOST_PIECE) as u64));
        }) {
            log::warn!("could not start a thread to prepare host memory: {error}");
            self.keep(0);
        }
    }

    /// Keeps at most this many of the first pieces ready.
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
        self.prepare(piece, context, None).map(drop)
    }

    /// Current host memory use.
    pub fn status(&self) -> HostStatus {
        let state = self.lock();
        let count = |wanted: fn(&Piece) -> bool| (state.pieces.iter().filter(|piece| wanted(piece)).count() * HOST_PIECE) as u64;
        let ready_bytes = count(|piece| piece.readiness.is_ready());
        HostStatus {
            // Contents being saved get their range before its memory.
            used_bytes: ((self.bytes - state.free.bytes()) as u64).min(ready_bytes),
            ready_bytes,
            pinned_bytes: count(|piece| matches!(piece.readiness, Readiness::Ready(Some(_)))),
        }
    }

    /// Current host memory use; zero if no arena has been needed yet.
    pub fn status_of_process() -> HostStatus {
        Self::existing().map_or_else(HostStatus::default, Self::status)
    }

    /// Waits until all memory that is neither in use nor kept for the next pause has been released, unless only a pause can. For tests and
    /// measurements.
    pub fn settle() {
        if let Some(arena) = Self::existing() {
            drop(
                arena
                    .changed
                    .wait_while(arena.lock(), |state: &mut Stock| {
                        state.releasing && !state.waits_for_pause && state.is_releasing(Instant::now())
                    })
                    .unpoisoned(),
            );
        }
    }

    fn give_back(&'static self, range: &Range) {
        let at_once = range.at_once || self.unpooled.load(Ordering::Relaxed) > 0;
        let keep = if at_once { Duration::ZERO } else { settings::host_keep() };
        let mut state = self.lock();
        state.give_back(range.offset, range.bytes, Instant::now().checked_add(keep).filter(|_| !keep.is_zero()));
        if at_once {
            drop(state);
            self.release_soon();
            self.wait_until_released(range);
            state = self.lock();
        }
        if state.releasing {
            return self.due.notify_all();
        }
        if !state.has_spare() {
            return self.close(&mut state);
        }
        state.releasing = true;
        drop(state);
        if worker::spawn("vramctl-release", || self.release_in_time()).is_err() {
            // No thread available, so do it here, if it can be done now.
            self.lock().expire();
            let _ = self.release_due();
            self.lock().releasing = false;
        }
    }

    /// Releases expired pieces. If there is no quiet moment soon, the rest is left to the release thread.
    fn release_soon(&self) {
        const SOON: Duration = Duration::from_millis(200);
        let (begun, mut backoff) = (Instant::now(), quiet::Backoff::default());
        while self.release_due() == Released::Not(Activity::Busy) && begun.elapsed() < SOON {
            quiet::wait_for_next(&mut backoff);
        }
    }

    /// Releases spare pieces as they expire, or all at once when someone else needs the memory: each at a quiet moment. Ends when none is
    /// left.
    fn release_in_time(&self) {
        /// How often to check for memory pressure, while there is memory to release.
        const LOOK: Duration = Duration::from_millis(500);
        let mut sign = Some(Sign::put_up(Says::Keeps));
        let mut backoff = quiet::Backoff::default();
        loop {
            if limits::is_short() || others::any(Says::Needs) {
                self.lock().expire();
            }
            let went = self.release_due();
            if matches!(went, Released::Not(_)) {
                quiet::wait_for_next(&mut backoff);
                continue;
            }
            backoff = quiet::Backoff::default();
            let mut state = self.lock();
            let Some(due) = state.next_due().filter(|_| went == Released::All) else {
                // First, so that this process does not take its own sign for another's.
                drop(sign.take());
                state.releasing = false;
                self.changed.notify_all();
                return;
            };
            let left = due.saturating_duration_since(Instant::now());
            drop(self.due.wait_timeout(state, left.min(LOOK)).unpoisoned());
        }
    }

    /// Releases expired pieces, each that is registered at a quiet moment of its own, so that the program runs on in between. A piece that
    /// the driver refuses to unregister is retried when the next range is released.
    fn release_due(&self) -> Released {
        let mut state = self.lock();
        let mut went = Released::All;
        while let Some(piece) = state.due_piece(Instant::now()).filter(|_| went == Released::All) {
            if exit::is_ending() {
                went = Released::Refused;
                break;
            }
            (state, went) = self.change(state, piece, |readiness| self.release(piece, readiness));
        }
        state.waits_for_pause = went == Released::Not(Activity::Unknown);
        self.changed.notify_all();
        self.close(&mut state);
        went
    }

    /// Releases an unused piece's memory, and first ends its registration.
    fn release(&self, piece: usize, readiness: &mut Readiness) -> Released {
        let is_registered = matches!(readiness, Readiness::Ready(Some(_)));
        let went = if is_registered { quiet::now(|| unregister(readiness)).unwrap_or_else(Released::Not) } else { Released::All };
        if went == Released::All {
            // SAFETY: no range touches it, and `Changing` gives this thread exclusive access.
            unsafe { addresses::depopulate(self.address(piece), HOST_PIECE) };
            *readiness = Readiness::Absent;
        }
        went
    }

    /// Waits while another thread releases pieces that this range was the last to touch.
    fn wait_until_released(&self, range: &Range) {
        let changing = |state: &mut Stock| {
            let mut pieces = Self::pieces_of(range).filter_map(|piece| state.pieces.get(piece));
            pieces.any(|piece| piece.users == 0 && matches!(piece.readiness, Readiness::Changing))
        };
        drop(self.changed.wait_while(self.lock(), changing).unpoisoned());
    }
}

/// Where the arena's piece ends in which these bytes begin. `None` unless all of them belong to backups.
pub fn piece_end(bytes: Span) -> Option<u64> {
    let arena = Arena::existing()?;
    let offset = arena.offset_of(bytes.address)?;
    let are_ours = bytes.bytes <= arena.bytes - offset && !arena.lock().free.overlaps(offset, bytes.bytes);
    are_ours.then(|| bytes.address + (HOST_PIECE - offset % HOST_PIECE) as u64)
}

/// While it lives, no host memory stays in the pool.
pub struct PoolingStopped {
    arena: &'static Arena,
    /// Bytes available at the start.
    available: u64,
}

impl PoolingStopped {
    /// By how many bytes, at most, the host's available memory had shrunk since the start when this process prepared some, whoever took them.
    pub fn taken_bytes(&self) -> u64 {
        self.available.saturating_sub(self.arena.fewest.load(Ordering::Relaxed))
    }
}

impl Drop for PoolingStopped {
    fn drop(&mut self) {
        self.arena.unpooled.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Memory for one piece, which the system does not count as used yet.
pub struct Claim<'a> {
    arena: &'a Arena,
    left: u64,
}

impl Claim<'_> {
    /// The system counts this much more of it.
    fn used(&mut self, bytes: u64) {
        self.left -= bytes;
        self.arena.coming.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.arena.coming.fetch_sub(self.left, Ordering::Relaxed);
    }
}

/// How far a release of pieces has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Released {
    All,
    /// The driver refused one, or the program is exiting.
    Refused,
    /// At the next quiet moment: what was in the way.
    Not(Activity),
}

/// Ends a piece's registration, at a quiet moment.
fn unregister(readiness: &mut Readiness) -> Released {
    let Readiness::Ready(pinned) = readiness else { return Released::All };
    match pinned.take().map_or(Ok(()), Pinned::unregister) {
        Ok(()) => Released::All,
        Err(still) => {
            *pinned = Some(still);
            Released::Refused
        }
    }
}

/// Adds the work's duration to a counter, in microseconds.
fn timed<R>(counter: &AtomicU64, work: impl FnOnce() -> R) -> R {
    let started = Instant::now();
    let result = work();
    counter.fetch_add(started.elapsed().as_micros() as u64, Ordering::Relaxed);
    result
}

/// A contiguous part of the arena, released when dropped.
#[derive(Debug)]
pub struct Range {
    offset: usize,
    bytes: usize,
    /// Whether dropping it also releases its memory, synchronously.
    at_once: bool,
}

impl Range {
    /// Sets whether dropping it returns its memory to the system before the drop ends.
    pub fn give_back_at_once(&mut self, at_once: bool) {
        self.at_once = at_once;
    }

    /// Offset in the arena, in bytes.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Address of its first byte. Its pieces determine whether it may be accessed.
    pub fn address(&self) -> *mut u8 {
        Arena::existing().map_or(ptr::null_mut(), |arena| arena.at(self.offset))
    }

    /// Its contents.
    ///
    /// # Safety
    /// All its pieces must be prepared, and nothing may write to it during the slice's lifetime.
    pub unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: prepared pieces are readable and stay so while a range touches them.
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

/// For tests that say how much the host has, which is said for the whole process: one at a time.
#[cfg(test)]
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unpoisoned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "maps memory without access")]
    fn what_is_dropped_makes_room_where_the_host_has_none() {
        let _turn = turn();
        let arena = Arena::get().unwrap();
        settings::set_host_keep(Some(Duration::ZERO), Some(u64::MAX));
        // The last two share a piece.
        let ranges = arena.take(&[2 * HOST_PIECE, HOST_PIECE, HOST_PIECE / 2, HOST_PIECE / 2]).unwrap();
        settings::set_host_keep(Some(Duration::ZERO), Some(0));
        let for_pieces = |pieces| arena.in_the_way(&ranges.iter().collect::<Vec<_>>(), &[pieces * HOST_PIECE]);
        assert_eq!(for_pieces(2), Some(vec![0]), "as few as possible");
        assert_eq!(for_pieces(3), Some(vec![0, 1]));
        assert_eq!(for_pieces(4), Some(vec![0, 1, 2, 3]));
        assert_eq!(for_pieces(5), None);

        // Another process may take the memory after the ranges were taken.
        let populate = |available| {
            settings::set_host_keep(Some(Duration::ZERO), Some(available));
            arena.populate(0, None)
        };
        for _ in 0..2 {
            assert!(matches!(populate(HOST_PIECE as u64 - 1), Err(Error::HostMemory { capped: false, .. })));
            assert!(populate(HOST_PIECE as u64).is_ok(), "all that is there");
        }
        drop(ranges);
        settings::set_host_keep(None, None);
    }

    /// Threads that look at the same moment have seen the same memory free.
    #[test]
    #[cfg_attr(miri, ignore = "maps memory without access")]
    fn what_one_is_about_to_take_is_not_there_for_others() {
        const BYTES: u64 = HOST_PIECE as u64;
        let _turn = turn();
        let arena = Arena::get().unwrap();
        let one = || {
            assert!(arena.claim_of(|| BYTES).is_err(), "while this one looks");
            assert!(arena.claim_of(|| 2 * BYTES).is_ok(), "there is enough for both");
            BYTES
        };
        let mut claim = arena.claim_of(one).unwrap_or_else(|error| panic!("{error}"));
        assert!(arena.claim_of(|| BYTES).is_err(), "until the system counts it");
        claim.used(BYTES / 2);
        assert!(arena.claim_of(|| BYTES + BYTES / 2).is_ok());
        assert!(arena.claim_of(|| BYTES + BYTES / 2 - 1).is_err());
        drop(claim);
        assert_eq!(arena.coming.load(Ordering::Relaxed), 0);
    }

    /// What follows is the program's.
    #[test]
    #[cfg_attr(miri, ignore = "maps memory without access")]
    fn no_addresses_behind_the_arena_are_opened_or_closed() {
        const BYTES: usize = 8 * HOST_PIECE;
        // SAFETY: new addresses.
        let base = unsafe { addresses::close(None, 2 * BYTES) }.unwrap();
        // SAFETY: the second half is not the arena's: first memory, then a hole.
        let behind = unsafe {
            let behind = base.add(BYTES);
            addresses::open(behind, HOST_PIECE).unwrap();
            behind.write_volatile(1);
            libc::munmap(behind.add(BYTES / 2).as_ptr().cast(), BYTES / 2);
            behind
        };
        let (changed, due) = (Condvar::new(), Condvar::new());
        let (made, coming, is_refused) = (Made::default(), AtomicU64::new(0), AtomicBool::new(false));
        let (unpooled, fewest) = (AtomicUsize::new(0), AtomicU64::new(u64::MAX));
        let arena = Arena { base, bytes: BYTES, state: Mutex::default(), changed, due, made, coming, unpooled, fewest, is_refused };
        let mut state = Stock { kept: 5, ..Stock::default() };
        for pieces in [4, 6] {
            assert!(arena.open(&mut state, pieces), "a hole cannot be opened");
        }
        arena.close(&mut state);
        assert_eq!(state.open, 5);
        let mut resident = 0;
        // SAFETY: a byte for the page.
        assert_eq!(unsafe { libc::mincore(behind.as_ptr().cast(), 1, &raw mut resident) }, 0);
        assert_eq!(resident & 1, 1, "the memory is still there");
        // SAFETY: nobody uses it any more.
        unsafe { libc::munmap(base.as_ptr().cast(), BYTES + BYTES / 2) };
    }
}
