//! The `simgpu_*` functions, through which tests control the simulated GPU from inside the process. Look them up with
//! `dlsym` in this library. None of them needs `cuInit`.

use crate::driver::{is_initialised, machine, state};
use crate::machine::MAX_DEVICES;
use crate::{copy, faults};
use std::ffi::{CStr, c_char, c_int};

/// # Safety
/// `name` must be null or NUL-terminated.
unsafe fn text<'a>(pointer: *const c_char) -> &'a str {
    if pointer.is_null() {
        return "";
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(pointer) }.to_str().unwrap_or("")
}

/// Makes a function fail with `code`, starting at its `nth_from_now` call (1 is the next), `count` times in a row (all ones:
/// always). Returns 0, or 1 if there is no such function.
///
/// # Safety
/// `function` must be NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn simgpu_fail(function: *const c_char, nth_from_now: u64, code: u32, count: u64) -> c_int {
    // SAFETY: the caller's promise.
    c_int::from(!faults::inject(unsafe { text(function) }, nth_from_now, code, count))
}

/// Makes every call of a function take this much longer, including those being delayed now. If the process ends during such a call it is aborted, as a real
/// driver might crash then. Returns 0, or 1 if there is no such function.
///
/// # Safety
/// `function` must be NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn simgpu_slow_down(function: *const c_char, milliseconds: u64) -> c_int {
    // SAFETY: the caller's promise.
    c_int::from(!faults::slow_down(unsafe { text(function) }, milliseconds))
}

/// Holds the `nth` call of any function (1 is the next) until [`simgpu_release`]; 0 holds none.
#[unsafe(no_mangle)]
pub extern "C" fn simgpu_hold(nth: u64) {
    faults::hold(nth);
}

/// Whether a call is being held: 0 or 1.
#[unsafe(no_mangle)]
pub extern "C" fn simgpu_is_holding() -> c_int {
    c_int::from(faults::is_holding())
}

/// Releases the call being held, after a moment.
#[unsafe(no_mangle)]
pub extern "C" fn simgpu_release() {
    faults::release();
}

/// Removes all faults that have not triggered yet.
#[unsafe(no_mangle)]
pub extern "C" fn simgpu_clear_faults() {
    faults::clear();
}

/// Number of calls of a function, or of all functions if null, since the start or the last [`simgpu_reset_counts`].
///
/// # Safety
/// `function` must be NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn simgpu_calls(function: *const c_char) -> u64 {
    // SAFETY: the caller's promise.
    faults::calls(unsafe { text(function) })
}

/// Resets all call counts.
#[unsafe(no_mangle)]
pub extern "C" fn simgpu_reset_counts() {
    faults::reset_counts();
}

fn device(ordinal: c_int) -> Option<usize> {
    usize::try_from(ordinal).ok().filter(|&device| device < MAX_DEVICES)
}

/// Bytes of a device in use by this process.
#[unsafe(no_mangle)]
pub extern "C" fn simgpu_used(ordinal: c_int) -> u64 {
    match (machine(), device(ordinal)) {
        (Ok(machine), Some(device)) => machine.used_here(device),
        _ => 0,
    }
}

/// Number of live objects of a kind in this process: `reservations`, `handles`, `mappings`, `plain` (allocations),
/// `registered` (host ranges), `streams`, `events`, `contexts`, `graphs`, `modules`, `delayed` (operations that have begun and are being
/// delayed). All ones for an unknown kind.
///
/// # Safety
/// `kind` must be NUL-terminated.
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
            "delayed" => Some(copy::delayed()),
            _ => None,
        }
    } else {
        Some(0)
    };
    counted.map_or(u64::MAX, |count| count as u64)
}

/// Sets the minimum duration of every stream operation, including those being delayed now.
#[unsafe(no_mangle)]
pub extern "C" fn simgpu_set_op_delay_ms(milliseconds: u64) {
    copy::set_delay(milliseconds);
}

/// Pretends that another process uses this many bytes of a device, until the next call or the end of this process.
#[unsafe(no_mangle)]
pub extern "C" fn simgpu_occupy(ordinal: c_int, bytes: u64) {
    if let (Ok(machine), Some(device)) = (machine(), device(ordinal)) {
        machine.occupy(machine.place(device), bytes);
    }
}
