//! A request that finds no device memory, in a program that shares its GPUs, waits for room instead of failing: for an allocation, a context,
//! code, or what the program itself has paused. It waits outside the gate, and without a lock of the library's: handlers have returned by then.
//! If one of our functions reaches another, the outermost waits.
//!
//! Torch gets its first error at once where it then gives back what it has cached, and asks again: not while a pool is entered, or a graph is
//! captured (`captures_underway` in c10/cuda/CUDACachingAllocator.cpp, pytorch#159674).

use crate::exclude;
use crate::table::Effect;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use vramctl_core::events;
use vramctl_core::gate::{self, Gated};
use vramctl_core::member::{self, room};
use vramctl_core::memory::Memory;
use vramctl_core::transition::Resume;
use vramctl_driver::{CUdevice, Current, streams};
use vramctl_host::guarded;
use vramctl_model::{Error, Report, ResumeRequest, StatusCode, code};

/// How a request is tried.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// If it finds no memory, it fails.
    Final,
    /// If it finds no memory, or room is promised to others, it waits.
    Trial,
    /// There is room for it. If it finds no memory, it waits again.
    Granted,
}

/// What a request lacks.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Shortage {
    device: CUdevice,
    bytes: usize,
    /// Only the driver knows how much is needed.
    is_guess: bool,
}

thread_local! {
    /// How the thread's request is tried.
    static MODE: Cell<Mode> = const { Cell::new(Mode::Final) };
    /// What the thread's request in vain has lacked.
    static LACKED: Cell<Option<Shortage>> = const { Cell::new(None) };
    /// What torch has been refused, and is about to ask for again.
    static REFUSED: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Whether calls with this effect wait for room.
#[inline]
pub fn waits(effect: Effect) -> bool {
    matches!(effect, Effect::Allocates | Effect::Begins | Effect::Streams) && member::is_member()
}

/// Whether no call waits for room, because the program does not share its GPUs.
#[inline]
pub fn never_waits() -> bool {
    !member::is_member()
}

/// Whether a failure of the thread's request is to be reported: it will not be tried again.
pub fn is_final(device: Option<CUdevice>, bytes: usize) -> bool {
    lacks(|| Some(Shortage { device: device.or_else(device_of_thread)?, bytes, is_guess: false }))
}

/// The thread's request lacks room for a context.
pub fn lacks_context(device: CUdevice) {
    lacks(|| Some(Shortage { device, bytes: room::of_context(device) as usize, is_guess: true }));
}

/// The thread's request lacks room for code, or for another object of the driver's.
pub fn lacks_code() {
    lacks(|| {
        let device = device_of_thread()?;
        Some(Shortage { device, bytes: room::of_code(device) as usize, is_guess: true })
    });
}

/// Notes what the thread's request lacks, unless that is known. Returns whether it is not tried again.
fn lacks(what: impl FnOnce() -> Option<Shortage>) -> bool {
    if MODE.get() == Mode::Final {
        return true;
    }
    LACKED.set(LACKED.get().or_else(what));
    false
}

/// Whether a request must not take memory that is free, because the room is promised to others. Then it is as if there were none.
pub fn is_for_others(device: Option<CUdevice>, bytes: usize) -> bool {
    MODE.get() == Mode::Trial
        && room::is_anything_promised()
        && device.or_else(device_of_thread).is_some_and(room::is_promised)
        && !is_final(device, bytes)
}

fn device_of_thread() -> Option<CUdevice> {
    Some(Current::of_thread().ok()??.device())
}

/// Who makes a request.
#[derive(Clone, Copy)]
pub struct Caller {
    pub effect: Effect,
    /// The return address; null for a pool of torch's.
    pub address: *const c_void,
}

/// Answers a request, again and again until there is room, or there will be none. `attempt` answers it once.
pub fn once_there_is(caller: Caller, mut attempt: impl FnMut() -> StatusCode) -> StatusCode {
    if MODE.get() != Mode::Final {
        // The outer one waits.
        return attempt();
    }
    let mut wait = Wait::default();
    loop {
        if caller.effect == Effect::Allocates {
            static ALLOCATES: Gated = Gated("an allocation");
            // It counts as a call: it shows that the program is at work, and in a program that is away, it waits for the rest to come back.
            gate::wait(&ALLOCATES);
        }
        let (answer, lacked) = wait.attempt(&mut attempt);
        if answer != code::OUT_OF_MEMORY {
            REFUSED.set(None);
            return answer;
        }
        let Some(lacked) = lacked else { return answer };
        if gives_back_first(caller, lacked) || guarded(|| wait.wait_for(lacked)) != Some(true) {
            // Once more, to fail as without the library.
            return attempt();
        }
    }
}

/// Answers a call that has run out of memory once more when there is room for what it loads.
#[cold]
pub fn once_more(effect: Effect, answer: StatusCode, mut call: impl FnMut() -> StatusCode) -> StatusCode {
    if !member::is_member() {
        return answer;
    }
    let mut answered = Some(answer);
    once_there_is(Caller { effect, address: std::ptr::null() }, || {
        let answer = answered.take().unwrap_or_else(&mut call);
        if answer == code::OUT_OF_MEMORY {
            guarded(lacks_code);
        }
        answer
    })
}

/// Resumes what the program has paused itself, again and again until there is room, or there will be none.
pub fn resume(request: &ResumeRequest) -> Result<Report, Error> {
    static RESUMES: Gated = Gated("a resume");
    let memory = Memory::get();
    let resume = |request| memory.resume(&Resume { request, ..Resume::default() }, &mut ());
    if never_waits() {
        return resume(request.clone());
    }
    let trial = Resume { request: ResumeRequest { timeout: None, tries_again: true, ..request.clone() }, ..Resume::default() };
    let mut wait = Wait::default();
    loop {
        if member::is_away() {
            // What the scheduler has taken comes back by a call, and this is one.
            gate::wait(&RESUMES);
        }
        let is_first = wait.tickets.is_empty();
        let promised = if is_first && room::is_anything_promised() { memory.short_of_promised(&trial) } else { None };
        let lacked = match promised {
            Some((device, bytes)) => Shortage { device, bytes: bytes as usize, is_guess: false },
            None => match memory.resume(&trial, &mut ()) {
                Err(Error::DeviceMemory(short)) => Shortage { device: short.device, bytes: short.needed as usize, is_guess: false },
                done => return done,
            },
        };
        if !wait.wait_for(lacked) {
            // Once more, to fail as without the library, or to wait as the program says.
            return resume(request.clone());
        }
    }
}

/// The wait of a request, from its first attempt on.
#[derive(Default)]
struct Wait {
    /// By device. What has been granted on one stays promised while the request waits for another.
    tickets: BTreeMap<CUdevice, room::Ticket>,
    /// How often there has been room.
    granted: u32,
}

impl Wait {
    /// What did not help so often never will.
    const TRIES: u32 = 10;
    const TRIES_OF_GUESS: u32 = 3;
    /// The last one lasts for 15 s.
    const FIRST_REST: Duration = Duration::from_millis(60);

    /// Makes an attempt. Also returns what it has lacked.
    fn attempt<R>(&self, attempt: &mut impl FnMut() -> R) -> (R, Option<Shortage>) {
        MODE.set(if self.tickets.is_empty() { Mode::Trial } else { Mode::Granted });
        LACKED.set(None);
        let answer = attempt();
        MODE.set(Mode::Final);
        (answer, LACKED.take())
    }

    /// Waits until there is room; `false`: there will be none. A guess was too low if there has been room for it before. What was granted in vain is on
    /// its way, to this program or to another one, and is given longer each time: all tries take about as long as any request waits.
    fn wait_for(&mut self, lacked: Shortage) -> bool {
        let tries = if lacked.is_guess { Self::TRIES_OF_GUESS } else { Self::TRIES };
        if self.granted >= tries {
            return false;
        }
        let _waiting = events::waiting_for_room();
        let bytes = (lacked.bytes as u64) << if lacked.is_guess { self.granted } else { 0 };
        self.granted += 1;
        if let Some(ticket) = self.tickets.get_mut(&lacked.device) {
            if !lacked.is_guess {
                ticket.rest(Self::FIRST_REST * (1 << (self.granted - 2)));
            }
            return ticket.wait_for(bytes);
        }
        let Some(ticket) = room::Ticket::take(lacked.device, bytes) else { return false };
        self.tickets.entry(lacked.device).or_insert(ticket).wait()
    }
}

/// How many of torch's pools are entered, in all threads.
static POOLS: AtomicU32 = AtomicU32::new(0);

/// A thread has entered one of torch's pools, or has left it.
pub fn note_torch_pool(is_entered: bool) {
    if is_entered {
        POOLS.fetch_add(1, Ordering::Relaxed);
    } else {
        _ = POOLS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |pools| pools.checked_sub(1));
    }
}

/// Whether the request is torch's, and torch gives back what it has cached when it gets an error, and asks again.
fn gives_back_first(caller: Caller, lacked: Shortage) -> bool {
    let asks_again = || {
        POOLS.load(Ordering::Relaxed) == 0 && !streams::is_any_captured() && {
            let library = exclude::library_at(caller.address).name();
            library.starts_with("libc10_cuda") || library.starts_with("libtorch_cuda")
        }
    };
    caller.effect == Effect::Allocates
        && !caller.address.is_null()
        && !lacked.is_guess
        && asks_again()
        && REFUSED.replace(Some(lacked.bytes)) != Some(lacked.bytes)
}
