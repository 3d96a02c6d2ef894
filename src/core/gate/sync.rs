//! The primitives of the latch. `model.rs` replaces them with its own.

pub use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering, fence};
pub use std::sync::{Condvar, Mutex, MutexGuard};
pub use vramctl_host::futex::{wait, wake_all as wake};

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

/// A call is about to wait: programs that share GPUs tell the scheduler.
pub fn tell_of_waiter() {
    super::watcher::wake();
}
