//! `dlopen` and `dlmopen`: what the program opens so that its calls pass by this library is noted, and nothing else changes.

use crate::jump::{Ruling, jumps};
use std::arch::naked_asm;
use std::ffi::{c_char, c_int, c_long, c_void};
use std::{panic, ptr};
use vramctl_host::{opens, symbols};

/// The names of this module's functions, which are exported.
pub const OPENERS: [&str; 2] = ["dlopen", "dlmopen"];

jumps!(dlopen(name: *const c_char, flags: c_int) => note);
jumps!(dlmopen(namespace: c_long, name: *const c_char, flags: c_int) => note_elsewhere);

unsafe extern "C" fn note(name: *const c_char, flags: c_int, _: usize, _: *const c_void) -> Ruling {
    // SAFETY: the program promises that the name is null or NUL-terminated.
    let _ = panic::catch_unwind(|| unsafe { opens::note(name, flags) });
    Ruling::onward(symbols::next_dlopen().unwrap_or(ptr::null_mut()))
}

unsafe extern "C" fn note_elsewhere(namespace: c_long, name: *const c_char, flags: c_int, _: *const c_void) -> Ruling {
    let _ = panic::catch_unwind(|| opens::note_elsewhere(namespace, name, flags));
    Ruling::onward(symbols::next_dlmopen().unwrap_or(ptr::null_mut()))
}
