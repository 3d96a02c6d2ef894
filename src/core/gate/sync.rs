//! The primitives of the latch. `model.rs` replaces them with its own.

pub use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering, fence};
pub use std::sync::{Condvar, Mutex, MutexGuard};

use std::ptr;
use std::sync::atomic::compiler_fence;
use std::thread;
use std::time::Duration;

/// A fence if the other side makes a [`heavy_fence`], else none.
#[inline]
pub fn light_fence() {
    compiler_fence(Ordering::SeqCst);
}

/// A fence, in this thread and in all others of the process. `false` before Linux 4.14 and where it is forbidden: then none.
pub fn heavy_fence() -> bool {
    const REGISTER: libc::c_long = 1 << 4; // MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED
    const EXPEDITED: libc::c_long = 1 << 3; // MEMBARRIER_CMD_PRIVATE_EXPEDITED
    // SAFETY: no pointers. Registering again does nothing.
    unsafe { libc::syscall(libc::SYS_membarrier, REGISTER, 0, 0) == 0 && libc::syscall(libc::SYS_membarrier, EXPEDITED, 0, 0) == 0 }
}

/// Sleeps longer than a store takes to become visible to other processors.
pub fn rest() {
    thread::sleep(Duration::from_millis(10));
}

/// Waits while the word has this value, until woken. May return spuriously.
pub fn wait(word: &AtomicU32, value: u32) {
    // SAFETY: the word lives as long as the process.
    unsafe {
        let nothing = ptr::null::<libc::timespec>();
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG, value, nothing);
    }
}

/// Wakes all that wait.
pub fn wake(word: &AtomicU32) {
    // SAFETY: as in `wait`.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, i32::MAX);
    }
}
