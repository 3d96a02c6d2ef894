//! Requests for memory that wait for room, instead of failing.
//!
//! A thread waits here outside the gate and without a lock of the library's, so that the program can be held, drained and paused meanwhile.
//! Locks of its callers (torch's allocator, CUDA's runtime, Python's interpreter) stay locked: nothing that the scheduler asks of the program
//! needs one of them.

use super::{WORTH_A_WARNING, is_member, tell, why_waiting};
use crate::gate;
use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};
use vramctl_config::Config;
use vramctl_driver::{self as driver, CUdevice};
use vramctl_host::{PerProcess, Unpoison, exit};
use vramctl_model::{Bytes, Want};

/// How long a request waits without a scheduler, unless `VRAMCTL_WAIT` says so: another one takes over within seconds.
const WITHOUT_SCHEDULER: Duration = Duration::from_secs(30);
/// How often to look whether the program exits.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The scheduler's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// There is room: try again.
    Granted,
    /// There will be none, for this reason.
    Denied(String),
}

#[derive(Debug)]
struct Waiting {
    device: CUdevice,
    bytes: u64,
    since: Instant,
    state: Progress,
}

#[derive(Debug)]
enum Progress {
    /// The thread waits for the verdict.
    Waits,
    /// The verdict that the thread has not seen yet.
    Answered(Verdict),
    /// The thread tries again. The room is promised to it.
    Tries,
}

#[derive(Debug)]
struct Queue {
    next: u64,
    /// By ticket.
    waiting: BTreeMap<u64, Waiting>,
    /// Since when there has been no scheduler; `None`: there is one.
    alone_since: Option<Instant>,
    /// The UUIDs of GPUs where room is promised to others.
    promised: BTreeSet<String>,
}

struct Room {
    queue: Mutex<Queue>,
    answered: Condvar,
}

static ROOM: PerProcess<Room> = PerProcess::new(|| Room {
    queue: Mutex::new(Queue { next: 1, waiting: BTreeMap::new(), alone_since: Some(Instant::now()), promised: BTreeSet::new() }),
    answered: Condvar::new(),
});

/// Whether there are GPUs where room is promised to others: nothing else has to be looked at on the way of an allocation.
static PROMISED: AtomicU64 = AtomicU64::new(0);

impl Queue {
    /// Returns its ticket.
    fn add(&mut self, waiting: Waiting) -> u64 {
        let ticket = self.next;
        self.next += 1;
        self.waiting.insert(ticket, waiting);
        ticket
    }
}

fn queue() -> MutexGuard<'static, Queue> {
    ROOM.get().queue.lock().unpoisoned()
}

/// Room on these GPUs, and on no others, is promised to other programs.
pub(super) fn promise(gpus: &[String]) {
    queue().promised = gpus.iter().cloned().collect();
    PROMISED.store(gpus.len() as u64, Ordering::Relaxed);
}

/// The scheduler's answer to a request.
pub(super) fn answer(ticket: u64, verdict: Verdict) {
    if let Some(waiting) = queue().waiting.get_mut(&ticket) {
        waiting.state = Progress::Answered(verdict);
    }
    ROOM.get().answered.notify_all();
}

/// A scheduler has connected.
pub(super) fn scheduler_here() {
    queue().alone_since = None;
}

/// No scheduler is connected any more. What it has promised is void.
pub(super) fn scheduler_gone() {
    promise(&[]);
    queue().alone_since = Some(Instant::now());
}

/// What waits, for the scheduler.
pub(super) fn wants() -> Vec<Want> {
    let wants = |(ticket, waiting): (&u64, &Waiting)| Want {
        ticket: *ticket,
        gpu: driver::uuid(waiting.device),
        bytes: waiting.bytes,
        tries: !matches!(waiting.state, Progress::Waits),
        waits_ms: u64::try_from(waiting.since.elapsed().as_millis()).unwrap_or(u64::MAX),
    };
    ROOM.existing().map_or_else(Vec::new, |room| room.queue.lock().unpoisoned().waiting.iter().map(wants).collect())
}

/// Whether there is a GPU where room is promised to others.
#[inline]
pub fn is_anything_promised() -> bool {
    PROMISED.load(Ordering::Relaxed) != 0
}

/// Whether room on a device is promised to others.
pub fn is_promised(device: CUdevice) -> bool {
    driver::uuid(device).is_some_and(|uuid| queue().promised.contains(&uuid))
}

/// The bytes that a context may need on a device.
pub fn of_context(device: CUdevice) -> u64 {
    at_most(512 << 20, device)
}

/// The bytes that code, or another object of the driver's, may need on a device.
pub fn of_code(device: CUdevice) -> u64 {
    at_most(64 << 20, device)
}

/// A guess, which is less on a small device.
fn at_most(bytes: u64, device: CUdevice) -> u64 {
    driver::total_memory(device).map_or(bytes, |total| bytes.min(total / 64))
}

/// A request for memory that has found no room. It is in the scheduler's queue until this is dropped.
#[derive(Debug)]
pub struct Ticket {
    number: u64,
    is_warned: bool,
}

impl Ticket {
    /// Takes a place in the queue. `None`: the program does not share, or this thread must not wait: it is inside a gated call, which the
    /// scheduler would wait for, or ends the process.
    pub fn take(device: CUdevice, bytes: u64) -> Option<Self> {
        if !is_member() || gate::is_inside() || exit::is_ending() {
            return None;
        }
        let waiting = Waiting { device, bytes, since: Instant::now(), state: Progress::Waits };
        let ticket = Self { number: queue().add(waiting), is_warned: false };
        tell();
        Some(ticket)
    }

    /// Waits again: for this many bytes there was no room after all.
    pub fn wait_for(&mut self, bytes: u64) -> bool {
        let mut queue = queue();
        if let Some(waiting) = queue.waiting.remove(&self.number) {
            // With a number of its own, so that the scheduler sees that the answer was in vain.
            self.number = queue.add(Waiting { bytes, state: Progress::Waits, ..waiting });
        }
        drop(queue);
        tell();
        self.wait()
    }

    /// Waits for a while, unless the program ends. What is promised stays so.
    pub fn rest(&self, longest: Duration) {
        let end = Instant::now() + longest;
        while !exit::is_ending() && Instant::now() < end {
            thread::sleep(LOOK_EVERY.min(end.saturating_duration_since(Instant::now())));
        }
    }

    /// Waits until the scheduler says that there is room. `false`: there will be none.
    pub fn wait(&mut self) -> bool {
        loop {
            if let Some(granted) = self.wait_a_moment() {
                return granted;
            }
        }
    }

    /// The same for a moment. `None`: it still waits.
    pub fn wait_a_moment(&mut self) -> Option<bool> {
        let patience = Config::get().waits_for.unwrap_or(WITHOUT_SCHEDULER);
        let mut queue = queue();
        let alone = queue.alone_since.map(|since| since.elapsed());
        let Some(waiting) = queue.waiting.get_mut(&self.number) else { return Some(false) };
        match &waiting.state {
            Progress::Answered(Verdict::Granted) => {
                waiting.state = Progress::Tries;
                return Some(true);
            }
            Progress::Answered(Verdict::Denied(why)) => {
                log::warn!("no room for {} on {}: {why}", Bytes(waiting.bytes), driver::gpu_in_words(waiting.device));
                return Some(false);
            }
            Progress::Waits | Progress::Tries => (),
        }
        if exit::is_ending() {
            return Some(false);
        }
        if let Some(alone) = alone.map(|alone| alone.min(waiting.since.elapsed())).filter(|alone| *alone >= patience) {
            log::warn!(
                "no room for {} on {}: no scheduler has answered for {} s; `vramctl share` shows who shares the GPU",
                Bytes(waiting.bytes),
                driver::gpu_in_words(waiting.device),
                alone.as_secs()
            );
            return Some(false);
        }
        if waiting.since.elapsed() >= WORTH_A_WARNING && !mem::replace(&mut self.is_warned, true) {
            let (bytes, gpu) = (Bytes(waiting.bytes), driver::gpu_in_words(waiting.device));
            log::warn!("{bytes} on {gpu} have waited for room for {} s: {}", WORTH_A_WARNING.as_secs(), why_waiting());
        }
        drop(ROOM.get().answered.wait_timeout(queue, LOOK_EVERY).unpoisoned());
        None
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        queue().waiting.remove(&self.number);
        gate::note_call();
        tell();
    }
}
