//! A request for memory that finds none, in a program that shares its GPUs, waits for room instead of failing. It waits outside the gate, and
//! without a lock of the library's: handlers have returned by then.
//!
//! Torch gets its first error at once: it gives back what it has cached, and asks again.

use crate::exclude;
use crate::table::Effect;
use std::cell::Cell;
use std::ffi::c_void;
use vramctl_core::gate::{self, Gated};
use vramctl_core::member::{self, room};
use vramctl_driver::{CUdevice, Current};
use vramctl_host::guarded;
use vramctl_model::{StatusCode, code};

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
}

thread_local! {
    /// How the thread's request is tried.
    static MODE: Cell<Mode> = const { Cell::new(Mode::Final) };
    /// What the last request of the thread in vain has lacked.
    static LACKED: Cell<Option<Shortage>> = const { Cell::new(None) };
    /// What torch has been refused, and is about to ask for again.
    static REFUSED: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Whether calls with this effect wait for room.
#[inline]
pub fn waits(effect: Effect) -> bool {
    effect == Effect::Allocates && member::is_member()
}

/// Who makes a request.
#[derive(Clone, Copy)]
pub struct Caller {
    /// The return address; null for a pool of torch's.
    pub address: *const c_void,
    /// Whether it has called the runtime: that allocates through the driver, whose functions wait by themselves.
    pub is_runtimes: bool,
}

/// Whether a failure of the thread's request is to be reported: it will not be tried again.
pub fn is_final(device: Option<CUdevice>, bytes: usize) -> bool {
    if MODE.get() == Mode::Final {
        return true;
    }
    let device = device.or_else(device_of_thread);
    LACKED.set(device.map(|device| Shortage { device, bytes }));
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

/// Answers a request, again and again until there is room, or there will be none. `attempt` answers it once, and says whether the real function
/// did: what that calls waits by itself.
pub fn once_there_is(caller: Caller, mut attempt: impl FnMut() -> (StatusCode, bool)) -> StatusCode {
    static ALLOCATES: Gated = Gated("an allocation");
    // An allocation counts as a call: it shows that the program is at work, and in a program that is away, it waits for the rest to come back.
    gate::wait(&ALLOCATES);
    let mut ticket = None;
    loop {
        MODE.set(if ticket.is_none() { Mode::Trial } else { Mode::Granted });
        LACKED.set(None);
        let (answer, was_forwarded) = attempt();
        MODE.set(Mode::Final);
        let lacked = LACKED.take();
        if answer != code::OUT_OF_MEMORY {
            REFUSED.set(None);
            return answer;
        }
        let waits_inside = was_forwarded && caller.is_runtimes;
        let Some(lacked) = lacked.filter(|_| !waits_inside) else { return answer };
        if gives_back_first(caller, lacked.bytes) || guarded(|| waited(&mut ticket, lacked)) != Some(true) {
            // Once more, to fail as without the library.
            return attempt().0;
        }
    }
}

fn waited(ticket: &mut Option<room::Ticket>, lacked: Shortage) -> bool {
    match ticket {
        Some(ticket) => ticket.wait_for(lacked.bytes as u64),
        None => match room::Ticket::take(lacked.device, lacked.bytes as u64) {
            Some(new) => ticket.insert(new).wait(),
            None => false,
        },
    }
}

/// Whether the request is torch's, which gives back what it has cached when it gets an error, and asks again.
fn gives_back_first(caller: Caller, bytes: usize) -> bool {
    let is_torchs = caller.address.is_null() || {
        let library = exclude::library_at(caller.address).name();
        library.starts_with("libc10_cuda") || library.starts_with("libtorch_cuda")
    };
    is_torchs && REFUSED.replace(Some(bytes)) != Some(bytes)
}
