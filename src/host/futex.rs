//! The kernel's futex, within a process: a word that threads wait on. Takes no lock and allocates nothing.

use std::ptr;
use std::sync::atomic::AtomicU32;

/// Waits while the word has this value, until woken. May return spuriously.
pub fn wait(word: &AtomicU32, value: u32) {
    // SAFETY: the word lives as long as the call.
    unsafe {
        let no_limit = ptr::null::<libc::timespec>();
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG, value, no_limit);
    }
}

/// Wakes all that wait.
pub fn wake_all(word: &AtomicU32) {
    // SAFETY: as in `wait`.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, i32::MAX);
    }
}
