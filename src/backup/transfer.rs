//! Copies contents between device memory and the arena on worker threads.
//!
//! One thread keeps the link busy if the host memory is ready; preparing it takes many. So each thread takes a piece at a
//! time, prepares it while its last piece is still being copied, and queues the copies into it.

use super::arena::{Arena, Claim};
use super::copier::{self, By, Choice};
use super::stock::HOST_PIECE;
use super::{OnProgress, quiet};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Mutex, TryLockError, mpsc};
use std::thread;
use std::time::Duration;
use vramctl_driver::{CUdeviceptr, Context, Current, Direction, Lane, Mark, PinnedBuffer, RelaxedCapture};
use vramctl_host::{Unpoison, worker};
use vramctl_model::{Error, Progress, Stage};

/// Most threads that prepare host memory. More gain nothing, because the driver registers one piece at a time (16 cores: 12
/// threads 35.3 GB/s, 16 threads 34.4, 32 threads 33.7); with slow host memory, fewer are not enough.
const MOST_THREADS: usize = 16;
/// Threads that save if all host memory is ready: one queues while the other waits, so that the link is always busy.
const FEW_THREADS: usize = 2;
/// Threads that restore from memory that has to be registered first. The driver registers one piece at a time, at the link's speed (H100:
/// 56 GB/s), and more threads get in each other's way.
const REGISTERING_THREADS: usize = 4;
/// Pieces of the arena a thread has in flight: enough to keep the link busy, few enough that finished copies are noticed
/// soon.
const UNDER_WAY: usize = 4;
/// Size in bytes of each thread's buffer for host memory that cannot be registered.
const STAGING: usize = 16 << 20;

/// How often a transfer that waits for host memory looks whether it is still wanted.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// How the host memory for contents comes and goes.
#[derive(Debug, Clone, Copy)]
pub enum Flow {
    /// All of it is there.
    Whole,
    /// Piece by piece, from or to another process, which waits for it. So a copier reports what it has copied before it waits for anything.
    Pieces {
        /// How long to wait for the next one.
        within: Duration,
    },
}

impl Flow {
    /// Whether what has been copied is worth something after this failure: there was no room for more.
    fn allows(self, failure: &Error) -> bool {
        matches!((self, failure), (Self::Pieces { .. }, Error::HostMemory { .. } | Error::DeviceMemory(_)))
    }
}

/// A part of some contents that lies in one piece of the arena.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// The allocation's context.
    pub context: Context,
    /// Address on the device.
    pub device: CUdeviceptr,
    /// Offset in the arena, in bytes.
    pub offset: usize,
    /// Length in bytes.
    pub bytes: usize,
}

/// Splits `bytes` at `device` into parts at the arena's piece boundaries; their backup starts at `offset`.
pub fn parts(context: Context, device: CUdeviceptr, offset: usize, bytes: usize) -> impl Iterator<Item = Part> {
    let device = device.wrapping_sub(offset as u64);
    let part = move |of: Range<usize>| Part { context, device: device.wrapping_add(of.start as u64), offset: of.start, bytes: of.len() };
    in_pieces(offset..offset + bytes).map(part)
}

/// Splits a range of the arena at the boundaries of its pieces.
fn in_pieces(Range { start, end }: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let next = |from: usize| from + HOST_PIECE - from % HOST_PIECE;
    std::iter::successors(Some(start), move |from| Some(next(*from)))
        .take_while(move |from| *from < end)
        .map(move |from| from..next(from).min(end))
}

/// Whether all host memory of the parts is ready and reachable by the copy engines.
fn is_prepared(parts: &[Part]) -> bool {
    Arena::get().is_ok_and(|arena| arena.are_pinned(parts.iter().map(|part| part.offset / HOST_PIECE)))
}

fn bytes_of(parts: &[Part]) -> usize {
    parts.iter().map(|part| part.bytes).sum()
}

/// Copies parts, sorted by offset, from the device and hands them back as they complete. No copy is in flight when this
/// returns, even on error.
pub fn save(parts: &[Part], flow: Flow, progress: &mut OnProgress<'_>, copied: &mut dyn FnMut(&[Part])) -> Result<(), Error> {
    let threads = if is_prepared(parts) { FEW_THREADS } else { threads_to_prepare() };
    let saved = transfer(Direction::FromDevice, flow, threads, bytes_of(parts), &BTreeSet::new(), progress, copied, |send| {
        parts.chunk_by(|a, b| a.offset / HOST_PIECE == b.offset / HOST_PIECE).for_each(|parts| send(parts.to_vec()));
        Ok(())
    });
    Arena::get()?.log_preparation();
    saved
}

/// Copies these parts to the device while `produce` still runs: it hands them over in groups, each group in one piece of the
/// arena, once their memory is mapped. An empty group has what is `copied` so far reported.
pub fn restore(
    parts: &[Part],
    flow: Flow,
    idle: &BTreeSet<Context>,
    progress: &mut OnProgress<'_>,
    copied: &mut dyn FnMut(&[Part]),
    produce: impl FnOnce(&mut dyn FnMut(Vec<Part>)) -> Result<(), Error>,
) -> Result<(), Error> {
    let threads = if is_prepared(parts) {
        // One keeps the link busy.
        1
    } else if Arena::can_register() {
        REGISTERING_THREADS
    } else {
        // All goes through the threads' buffers.
        threads_to_prepare()
    };
    transfer(Direction::ToDevice, flow, threads, bytes_of(parts), idle, progress, copied, produce)
}

fn threads_to_prepare() -> usize {
    thread::available_parallelism().map_or(FEW_THREADS, usize::from).clamp(FEW_THREADS, MOST_THREADS)
}

#[allow(clippy::too_many_arguments)] // two directions
fn transfer(
    direction: Direction,
    flow: Flow,
    threads: usize,
    total: usize,
    idle: &BTreeSet<Context>,
    progress: &mut OnProgress<'_>,
    copied: &mut dyn FnMut(&[Part]),
    produce: impl FnOnce(&mut dyn FnMut(Vec<Part>)) -> Result<(), Error>,
) -> Result<(), Error> {
    if total == 0 {
        return produce(&mut |_| ());
    }
    let stage = if direction == Direction::FromDevice { Stage::Save } else { Stage::Restore };
    let (stop, is_short) = (AtomicBool::new(false), AtomicBool::new(false));
    let (mut done, mut refused) = (0, Ok(()));
    let mut report = |parts: Vec<Part>| {
        done += bytes_of(&parts) as u64;
        if let Err(error) = progress(Progress { stage, done, total: total as u64 }) {
            stop.store(true, Ordering::Relaxed);
            refused = Err(error);
        }
        // After a failed copy, or a refusal, completed parts are not reported: they would only have to be undone.
        if !parts.is_empty() && !stop.load(Ordering::Relaxed) {
            copied(&parts);
        }
    };
    let (jobs, next) = mpsc::channel::<Vec<Part>>();
    let next = Mutex::new(next);
    let (completions, completed) = mpsc::channel();
    let new_worker = |completions| Copier {
        direction,
        flow,
        idle,
        jobs: &next,
        stop: &stop,
        is_short: &is_short,
        completions,
        staging: None,
        in_flight: VecDeque::new(),
        choices: BTreeMap::new(),
    };
    let transferred = thread::scope(|scope| {
        let (mut workers, mut own) = (Vec::new(), None);
        for _ in 0..threads {
            let worker = new_worker(completions.clone());
            match worker::spawn_scoped(scope, "vramctl-copy", move || worker.run()) {
                Ok(worker) => workers.push(worker),
                // What comes piece by piece does not come unless it is copied meanwhile.
                Err(error) if workers.is_empty() && matches!(flow, Flow::Pieces { .. }) => return Err(Error::NoThread(error.to_string())),
                // Fewer will do. Without any, this thread copies when all is there.
                Err(_) => {
                    own = workers.is_empty().then(|| new_worker(completions.clone()));
                    break;
                }
            }
        }
        drop(completions);
        let produced = produce(&mut |parts| {
            if !parts.is_empty() {
                let _ = jobs.send(parts);
            }
            completed.try_iter().for_each(&mut report);
        });
        // What there was room for is done.
        if produced.as_ref().is_err_and(|error| !flow.allows(error)) {
            stop.store(true, Ordering::Relaxed);
        }
        drop(jobs);
        let alone = own.map_or(Ok(()), Copier::run);
        // Ends with the last worker. While that waits for host memory, nothing is completed.
        loop {
            match completed.recv_timeout(LOOK_EVERY) {
                Ok(parts) => report(parts),
                Err(RecvTimeoutError::Timeout) if matches!(flow, Flow::Pieces { .. }) => report(Vec::new()),
                Err(RecvTimeoutError::Timeout) => (),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        let worked = workers.into_iter().map(|worker| worker.join().unwrap_or_else(|_| Err(Error::Internal("a copy panicked".into()))));
        produced.and(worked.fold(alone, Result::and))
    });
    transferred.and(refused)
}

/// Copies in flight.
struct InFlight {
    parts: Vec<Part>,
    end: Mark,
    /// What copies the single part, and when it started; `None` if not measured.
    measured: Option<(By, Mark)>,
}

/// Queues a copy to the device.
///
/// # Safety
/// As for [`Lane::queue`].
unsafe fn queue_by_choice(lane: &mut Lane, part: &Part, host: *mut u8, choice: &mut Choice) -> Result<Option<(By, Mark)>, Error> {
    let (by, measured) = choice.next(part.bytes);
    let begin = measured.then(|| lane.mark_in(part.context).ok()).flatten();
    // SAFETY: the caller's promise.
    let by = if by == By::Kernel && unsafe { copier::queue(lane, part.context, part.device, host, part.bytes)? } {
        By::Kernel
    } else {
        if by == By::Kernel {
            choice.refused();
        }
        // SAFETY: the caller's promise.
        unsafe { lane.queue(Direction::ToDevice, part.context, part.device, host, part.bytes)? };
        By::Engines
    };
    Ok(begin.map(|begin| (by, begin)))
}

struct Copier<'a> {
    direction: Direction,
    flow: Flow,
    /// Contexts in which a kernel may copy.
    idle: &'a BTreeSet<Context>,
    jobs: &'a Mutex<mpsc::Receiver<Vec<Part>>>,
    /// Set when one copy has failed, or no more is wanted, so that the others stop.
    stop: &'a AtomicBool,
    /// Set when one has found no room: then no more begins, and what has been copied stays.
    is_short: &'a AtomicBool,
    /// Sends completed parts.
    completions: mpsc::Sender<Vec<Part>>,
    staging: Option<PinnedBuffer>,
    in_flight: VecDeque<InFlight>,
    choices: BTreeMap<Context, Choice>,
}

impl<'a> Copier<'a> {
    fn run(mut self) -> Result<(), Error> {
        let _relaxed = RelaxedCapture::enter();
        let worked = self.work();
        if let Err(error) = &worked {
            if self.flow.allows(error) { self.is_short } else { self.stop }.store(true, Ordering::Relaxed);
        }
        // No copy uses it any more, but freeing it would wait for the program's work.
        if let Some(staging) = self.staging.take() {
            quiet::soon(move || drop(staging));
        }
        worked
    }

    fn work(&mut self) -> Result<(), Error> {
        let arena = Arena::get()?;
        let mut lane = Lane::default();
        while let Some((parts, claim)) = self.next()? {
            let Some(first) = parts.first() else { continue };
            let direct = arena.prepare(first.offset / HOST_PIECE, first.context, claim)?;
            while let Some(flight) = self.in_flight.front()
                && (self.in_flight.len() >= UNDER_WAY || flight.end.is_past()?)
            {
                self.finish_first()?;
            }
            if !direct {
                parts.iter().try_for_each(|part| self.copy_through_staging(part, arena.at(part.offset)))?;
                self.report(parts);
                continue;
            }
            let measured = if let (Direction::ToDevice, [part]) = (self.direction, &parts[..]) {
                let choice = self.choices.entry(part.context).or_insert_with(|| Choice::now(self.idle.contains(&part.context)));
                // SAFETY: as below.
                unsafe { queue_by_choice(&mut lane, part, arena.at(part.offset), choice)? }
            } else {
                for part in &parts {
                    // SAFETY: the piece is ready and stays so while a range touches it, as the one being filled or read
                    // does. Nobody else writes to this part, or reads it while it is being filled.
                    unsafe { lane.queue(self.direction, part.context, part.device, arena.at(part.offset), part.bytes)? };
                }
                None
            };
            self.in_flight.push_back(InFlight { parts, end: lane.mark()?, measured });
        }
        self.finish_all()
    }

    /// Waits for all copies in flight.
    fn finish_all(&mut self) -> Result<(), Error> {
        while !self.in_flight.is_empty() {
            self.finish_first()?;
        }
        Ok(())
    }

    /// Waits for the copies that have been in flight for longest.
    fn finish_first(&mut self) -> Result<(), Error> {
        let Some(flight) = self.in_flight.pop_front() else { return Ok(()) };
        flight.end.wait()?;
        if let (Some((by, begin)), [part]) = (flight.measured, &flight.parts[..])
            && let (Some(choice), Some(milliseconds)) = (self.choices.get_mut(&part.context), flight.end.since(&begin, part.context))
        {
            choice.took(by, part.bytes, milliseconds);
        }
        self.report(flight.parts);
        Ok(())
    }

    fn is_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed) || self.is_short.load(Ordering::Relaxed)
    }

    /// The next parts to copy, and the host memory for them if that has just come.
    #[allow(clippy::type_complexity)] // said once
    fn next(&mut self) -> Result<Option<(Vec<Part>, Option<Claim<'a>>)>, Error> {
        if self.is_over() {
            return Ok(None);
        }
        let Flow::Pieces { within } = self.flow else { return Ok(self.jobs.lock().unpoisoned().recv().ok().map(|parts| (parts, None))) };
        let jobs = match self.jobs.try_lock() {
            Ok(jobs) => jobs,
            Err(TryLockError::Poisoned(jobs)) => jobs.into_inner(),
            Err(TryLockError::WouldBlock) => {
                self.finish_all()?;
                self.jobs.lock().unpoisoned()
            }
        };
        if self.is_over() {
            return Ok(None);
        }
        let parts = if let Ok(parts) = jobs.try_recv() {
            parts
        } else {
            self.finish_all()?;
            let Ok(parts) = jobs.recv() else { return Ok(None) };
            parts
        };
        // Under the lock: so the pieces get their memory in order, and at most one allocation is saved in part.
        let (Direction::FromDevice, Some(first)) = (self.direction, parts.first()) else { return Ok(Some((parts, None))) };
        let (arena, piece) = (Arena::get()?, first.offset / HOST_PIECE);
        if let Ok(claim) = arena.room_now(piece) {
            return Ok(Some((parts, claim)));
        }
        self.finish_all()?;
        let is_wanted = || !self.is_over();
        match arena.await_room(piece, within, &is_wanted) {
            Err(_) if !is_wanted() => Ok(None),
            claim => Ok(Some((parts, claim?))),
        }
    }

    fn report(&self, copied: Vec<Part>) {
        let _ = self.completions.send(copied);
    }

    /// For host memory that cannot be registered: the copy engines use a buffer allocated by the driver, and the processor
    /// copies between the two. Without a buffer the driver does it all, more slowly.
    fn copy_through_staging(&mut self, part: &Part, host: *mut u8) -> Result<(), Error> {
        if self.staging.is_none() {
            self.staging = Current::push(part.context).and_then(|current| PinnedBuffer::new(STAGING, &current)).ok();
        }
        let (buffer, step) = self.staging.as_ref().map_or((None, part.bytes), |staging| (Some(staging.address()), staging.bytes()));
        let mut lane = Lane::default();
        for start in (0..part.bytes).step_by(step) {
            let bytes = step.min(part.bytes - start);
            let (host, device) = (host.wrapping_add(start), part.device + start as u64);
            let through = buffer.unwrap_or(host);
            // SAFETY: `host` is readable and writable for `bytes` and reserved for this copy, as in `work`. The buffer is
            // this worker's, holds `bytes`, and is not touched before the lane has finished.
            unsafe {
                if self.direction == Direction::ToDevice && buffer.is_some() {
                    ptr::copy_nonoverlapping(host, through, bytes);
                }
                lane.queue(self.direction, part.context, device, through, bytes)?;
                lane.finish()?;
                if self.direction == Direction::FromDevice && buffer.is_some() {
                    ptr::copy_nonoverlapping(through, host, bytes);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem;

    /// What the copiers of a save that waits for host memory share.
    struct Shared {
        jobs: Mutex<mpsc::Receiver<Vec<Part>>>,
        stop: AtomicBool,
        is_short: AtomicBool,
        idle: BTreeSet<Context>,
    }

    impl Shared {
        fn of(jobs: mpsc::Receiver<Vec<Part>>) -> Self {
            Self { jobs: Mutex::new(jobs), stop: AtomicBool::new(false), is_short: AtomicBool::new(false), idle: BTreeSet::new() }
        }

        fn copier(&self, completions: mpsc::Sender<Vec<Part>>) -> Copier<'_> {
            Copier {
                direction: Direction::FromDevice,
                flow: Flow::Pieces { within: LONG },
                idle: &self.idle,
                jobs: &self.jobs,
                stop: &self.stop,
                is_short: &self.is_short,
                completions,
                staging: None,
                in_flight: VecDeque::new(),
                choices: BTreeMap::new(),
            }
        }
    }

    const LONG: Duration = Duration::from_secs(100);

    /// All of a piece of the arena.
    fn part(piece: usize) -> Vec<Part> {
        // SAFETY: a number that nobody uses.
        let context: Context = unsafe { mem::zeroed() };
        vec![Part { context, device: 0, offset: piece * HOST_PIECE, bytes: HOST_PIECE }]
    }

    fn piece_of(parts: &[Part]) -> usize {
        parts[0].offset / HOST_PIECE
    }

    fn available(bytes: usize) {
        super::super::settings::set_host_keep(Some(Duration::ZERO), Some(bytes as u64));
    }

    /// A swap waits for what leaves first: if a later piece had the memory, no allocation might ever be whole.
    #[test]
    #[cfg_attr(miri, ignore = "maps memory without access")]
    fn host_memory_comes_in_the_order_of_the_pieces() {
        /// No other test uses it.
        const PIECE: usize = 100;
        let _turn = super::super::arena::turn();
        for round in 0..16 {
            available(0);
            let (jobs, next) = mpsc::channel();
            for piece in [PIECE, PIECE + 1] {
                jobs.send(part(piece)).unwrap();
            }
            drop(jobs);
            let (shared, (completions, found)) = (Shared::of(next), mpsc::channel());
            let got = thread::scope(|scope| {
                for _ in 0..2 {
                    let (mut copier, stop) = (shared.copier(completions.clone()), &shared.stop);
                    scope.spawn(move || {
                        // What it has been given stays taken.
                        let mut claims = Vec::new();
                        while let Some((parts, claim)) = copier.next().unwrap() {
                            claims.push(claim);
                            copier.report(parts);
                        }
                        while !stop.load(Ordering::Relaxed) {
                            thread::yield_now();
                        }
                    });
                }
                // At some moment of their looks, which are 1 to 32 ms apart.
                thread::sleep(Duration::from_millis(5 + 3 * round));
                available(HOST_PIECE);
                let got = found.recv_timeout(LONG);
                shared.stop.store(true, Ordering::Relaxed);
                got
            });
            assert_eq!(piece_of(&got.unwrap()), PIECE, "round {round}");
        }
        super::super::settings::set_host_keep(None, None);
    }

    /// The other job of a swap gives host memory back only when it gets device memory: it would wait for what a waiting copier holds back.
    #[test]
    #[cfg_attr(miri, ignore = "maps memory without access")]
    fn a_copier_reports_what_it_has_copied_before_it_waits() {
        /// No other test uses them.
        const COPIED: usize = 102;
        const NEXT: usize = 103;
        let _turn = super::super::arena::turn();
        for waits_for in ["its turn", "a job", "host memory"] {
            available(if waits_for == "host memory" { 0 } else { HOST_PIECE });
            let (jobs, next) = mpsc::channel();
            let (shared, (completions, completed)) = (Shared::of(next), mpsc::channel());
            let turn = (waits_for == "its turn").then(|| shared.jobs.lock().unwrap());
            if waits_for != "a job" {
                jobs.send(part(NEXT)).unwrap();
            }
            thread::scope(|scope| {
                let mut copier = shared.copier(completions);
                copier.in_flight.push_back(InFlight { parts: part(COPIED), end: Lane::default().mark().unwrap(), measured: None });
                let next = scope.spawn(move || copier.next().unwrap().map(|(parts, _)| piece_of(&parts)));
                let reported = completed.recv_timeout(Duration::from_secs(5)).map(|parts| piece_of(&parts));
                drop(turn);
                let _ = jobs.send(part(NEXT));
                available(HOST_PIECE);
                assert_eq!((reported, next.join().unwrap()), (Ok(COPIED), Some(NEXT)), "{waits_for}");
            });
        }
        super::super::settings::set_host_keep(None, None);
    }

    /// Each piece is made ready by itself: what crosses into another one may be overwritten when that is.
    #[test]
    fn no_part_crosses_into_another_piece() {
        const PIECE: usize = HOST_PIECE;
        let split = |from, to| in_pieces(from..to).map(|range| (range.start, range.end)).collect::<Vec<_>>();
        assert_eq!(split(0, 2 * PIECE), [(0, PIECE), (PIECE, 2 * PIECE)]);
        assert_eq!(split(PIECE - 4, PIECE + 4), [(PIECE - 4, PIECE), (PIECE, PIECE + 4)]);
        assert_eq!(split(PIECE + 8, PIECE + 16), [(PIECE + 8, PIECE + 16)]);
        assert_eq!(split(3 * PIECE + 1, 5 * PIECE), [(3 * PIECE + 1, 4 * PIECE), (4 * PIECE, 5 * PIECE)]);
        assert!(split(PIECE, PIECE).is_empty());
    }
}
