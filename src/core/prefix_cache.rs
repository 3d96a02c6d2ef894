//! An inference engine's prefix cache, which describes what is in the KV cache. An idle engine resets it if a scheduler is about to take memory
//! (`vramctl run --share`), or a save to write it (`run --image`): then the KV cache need not be kept.
//!
//! Only the engine's own loop can reset it. So a thread of the program waits for requests ([`wait`]) and passes them on to that loop, which answers
//! ([`answer`]). Nobody waits for a loop that does not answer soon: then the KV cache is kept.
//!
//! What is in the KV cache is worth nothing from a reset until the next call that starts device work: only such a call can put anything there, and
//! a request that the engine accepts meanwhile is computed by such calls. So a pause that has closed the gate knows whether it must keep the contents
//! (`is_reset`), whatever has happened since the reset, and for each process of a job by itself.
//!
//! The same goes for the KV cache of an engine that starts ([`begin_unused`]): nothing describes any of it, and it is filled with zeros, as discarded memory
//! is when it is back. Else engines that start at the same moment would each need host memory for all that the others have of theirs.

use crate::gate;
use crate::memory::Memory;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};
use vramctl_config::{Config, IdleCache};
use vramctl_host::{PerProcess, Unpoison, exit};
use vramctl_model::Error;

/// The tag of an engine's KV cache.
pub(crate) const KV_CACHE: &str = "kv_cache";

/// How long the engine's loop may take to answer.
const WITHIN: Duration = Duration::from_millis(200);
/// How long it then waits for the gate to be closed, so that it does not put new contents into the KV cache.
const PARKED: Duration = Duration::from_millis(200);
/// How often it looks for that.
const LOOK_EVERY: Duration = Duration::from_micros(500);

/// What the two sides know of each other.
#[derive(Default)]
struct State {
    /// A thread passes requests on.
    is_served: bool,
    /// The engine has no requests, as its loop has said last.
    is_idle: bool,
    /// There is a KV cache, or is going to be, that no request has used.
    is_unused: bool,
    /// The number of the last request.
    last: u64,
    ask: Ask,
}

/// The one request that there can be at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Ask {
    #[default]
    None,
    /// The thread has not seen it yet.
    Asked(u64),
    /// The loop has not answered yet.
    PassedOn(u64),
    /// Whether the prefix cache is reset.
    Answered(bool),
}

#[derive(Default)]
struct Desk {
    state: Mutex<State>,
    changed: Condvar,
}

static DESK: PerProcess<Desk> = PerProcess::new(Desk::default);

fn lock() -> MutexGuard<'static, State> {
    DESK.get().state.lock().unpoisoned()
}

/// Whether the KV cache would probably be worth nothing to a pause before which the engine is asked.
pub(crate) fn may_be_reset() -> bool {
    DESK.existing().is_some() && {
        let state = lock();
        state.is_unused || state.is_served && (gate::is_still() || state.is_idle && !gate::is_held())
    }
}

/// Whether the prefix cache was reset and no call has passed since, or no request has come yet. Sure while the gate is closed and nobody is inside.
pub(crate) fn is_reset() -> bool {
    gate::is_still() || DESK.existing().is_some() && lock().is_unused
}

/// Has the engine reset its prefix cache, if there is an idle one that does that. An error if it does not after all: a request has come, say.
pub fn reset() -> Result<(), Error> {
    if DESK.existing().is_none() {
        return Ok(());
    }
    let (desk, deadline) = (DESK.get(), Instant::now() + WITHIN);
    let mut state = lock();
    // Of others, nobody has counted on it: their caches are kept, unless they are reset and nothing has happened since.
    if !state.is_served || !state.is_idle || gate::is_held() {
        return Ok(());
    }
    state.last += 1;
    let number = state.last;
    // Whoever else has asked has another epoch, or has given up.
    state.ask = Ask::Asked(number);
    desk.changed.notify_all();
    let answered = loop {
        match state.ask {
            Ask::Answered(is_reset) if state.last == number => break Some(is_reset),
            _ if state.last != number => break None,
            _ => (),
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break None;
        }
        state = desk.changed.wait_timeout(state, left).unpoisoned().0;
    };
    if state.last == number {
        state.ask = Ask::None;
        // A loop that has answered has said it itself. Else until it says otherwise.
        state.is_idle &= answered.is_some();
    }
    drop(state);
    match answered {
        Some(true) => {
            log::info!("the engine has reset its prefix cache: what is in its KV cache need not be kept");
            Ok(())
        }
        Some(false) => Err(Error::Late("the engine cannot reset its prefix cache now, because it has requests, say".into())),
        None => Err(Error::Late(format!("the engine's loop has not answered within {} ms", WITHIN.as_millis()))),
    }
}

/// For the thread that passes requests on: waits for the next one. Returns its number.
pub fn wait() -> u64 {
    let (desk, mut state) = (DESK.get(), lock());
    state.is_served = true;
    loop {
        if let Ask::Asked(number) = state.ask {
            state.ask = Ask::PassedOn(number);
            return number;
        }
        state = desk.changed.wait(state).unpoisoned();
    }
}

/// For the engine's loop: answers a request. `is_reset`: it has just reset its prefix cache, and nothing in the KV cache is used. Then this waits
/// until the program is held, at most 0.2 s.
pub fn answer(number: u64, is_reset: bool) {
    let is_still = is_reset && gate::begin_stillness();
    let mut state = lock();
    state.is_idle = is_reset;
    if state.ask != Ask::PassedOn(number) {
        // Too late. Whoever asks next has a loop that answers.
        return;
    }
    state.ask = Ask::Answered(is_still);
    drop(state);
    DESK.get().changed.notify_all();
    let until = Instant::now() + PARKED;
    while is_still && !gate::is_held() && !exit::is_ending() && Instant::now() < until {
        thread::sleep(LOOK_EVERY);
    }
}

/// For the engine's loop: whether it has no requests now.
pub fn set_idle(is_idle: bool) {
    lock().is_idle = is_idle;
}

/// An engine is about to allocate its KV cache, filled with zeros. Returns whether that counts: not if there is one, of which something may be
/// described.
pub fn begin_unused() -> bool {
    let is_there = || Memory::existing().is_some_and(|memory| memory.registry.all().iter().any(|allocation| &*allocation.tag == KV_CACHE));
    let counts = !is_there();
    lock().is_unused |= counts;
    counts
}

/// It is about to use its KV cache for a request.
pub fn end_unused() {
    lock().is_unused = false;
}

/// Whether the program shares its GPUs or may be saved, and lets its engine's cache go.
pub fn is_wanted() -> bool {
    Config::get().idle_cache == IdleCache::Dropped
}
