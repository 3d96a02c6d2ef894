//! What a test asks of the simulated GPU from inside the process: the `simgpu_*` functions. They
//! are found with `dlsym` in the library that stands in for the driver; none of them needs `cuInit`.

use crate::driver::{is_initialised, machine, state};
use crate::machine::MAX_DEVICES;
use crate::{copy, faults};
use std::ffi::{CStr, c_char, c_int};

/// # Safety
/// Null or a terminated string.
unsafe fn text<'a>(pointer: *const c_char) -> &'a str {
    if pointer.is_null() {
        return "";
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(pointer) }.to_str().unwrap_or("")
}

/// Lets a function fail with a code, from its `nth_from_now` use on (1 is the next), `count` times in
/// a row (all ones: for ever). Answers 0, or 1 where there is no such function.
///
/// # Safety
/// `function` is a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn simgpu_fail(function: *const c_char, nth_from_now: u64, code: u32, count: u64) -> c_int {
    // SAFETY: the caller's promise.
    c_int::from(!faults::inject(unsafe { text(function) }, nth_from_now, code, count))
}

/// Has each use of a function take so much longer, from now on. Should the process end during one, it is aborted: a real
/// driver might crash then. Answers 0, or 1 where there is no such function.
///
/// # Safety
/// `function` is a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn simgpu_slow_down(function: *const c_char, milliseconds: u64) -> c_int {
    // SAFETY: the caller's promise.
    c_int::from(!faults::slow_down(unsafe { text(function) }, milliseconds))
}

/// Holds the `nth` call of any function from now on (1 is the next) until [`simgpu_release`]; 0: none.
#[unsafe(no_mangle)]
pub extern "C" fn simgpu_hold(nth: u64) {
    faults::hold(nth);
}

/// Whether a call is being held: 0 or 1.
#[unsafe(no_mangle)]
pub extern "C" fn simgpu_is_holding() -> c_int {
    c_int::from(faults::is_holding())
}

/// Lets the call that is held go on, a moment later.
#[unsafe(no_mangle)]
pub extern "C" fn simgpu_release() {
    faults::release();
}

/// Forgets all faults that have not happened yet.
#[unsafe(no_mangle)]
pub extern "C" fn simgpu_clear_faults() {
    faults::clear();
}

/// How often a function was called since the start or the last [`simgpu_reset_counts`]; null: all functions.
///
/// # Safety
/// `function` is a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn simgpu_calls(function: *const c_char) -> u64 {
    // SAFETY: the caller's promise.
    faults::calls(unsafe { text(function) })
}

/// Sets all call counts to zero.
#[unsafe(no_mangle)]
pub extern "C" fn simgpu_reset_counts() {
    faults::reset_counts();
}

fn device(ordinal: c_int) -> Option<usize> {
    usize::try_from(ordinal).ok().filter(|&device| device < MAX_DEVICES)
}

/// Bytes of a device that this process uses.
#[unsafe(no_mangle)]
pub extern "C" fn simgpu_used(ordinal: c_int) -> u64 {
    match (machine(), device(ordinal)) {
        (Ok(machine), Some(device)) => machine.used_here(device),
        _ => 0,
    }
}

/// How many of a kind of thing this process has: `reservations`, `handles`, `mappings`, `plain`
/// (allocations), `registered` (host ranges), `streams`, `events`, `contexts`, `graphs`, `modules`. All
/// ones for an unknown kind.
///
/// # Safety
/// `kind` is a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn simgpu_live(kind: *const c_char) -> u64 {
    // SAFETY: the caller's promise.
    let kind = unsafe { text(kind) };
    let counted = if is_initialised() {
        let state = state();
        match kind {
            "reservations" => Some(state.space.reserved()),
            "handles" => Some(state.space.created()),
            "mappings" => Some(state.space.mapped()),
            "plain" => Some(state.space.plain()),
            "registered" => Some(state.host.registered()),
            "streams" => Some(state.streams.live()),
            "events" => Some(state.streams.live_events()),
            "contexts" => Some(state.contexts.live()),
            "graphs" => Some(state.graphs.live()),
            "modules" => Some(state.modules.live()),
            _ => None,
        }
    } else {
        Some(0)
    };
    counted.map_or(u64::MAX, |count| count as u64)
}

/// How long each stream operation takes at least, from now on.
#[unsafe(no_mangle)]
pub extern "C" fn simgpu_set_op_delay_ms(milliseconds: u64) {
    copy::set_delay(milliseconds);
}

/// Pretends that somebody else uses so many bytes of a device, until it is said otherwise or this
/// process ends.
#[unsafe(no_mangle)]
pub extern "C" fn simgpu_occupy(ordinal: c_int, bytes: u64) {
    if let (Ok(machine), Some(device)) = (machine(), device(ordinal)) {
        machine.occupy(device, bytes);
    }
}
