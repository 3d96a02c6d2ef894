//! ^C: the command reports what becomes of its requests, and dies by SIGINT.

use std::{mem, process, ptr, thread};

/// Blocks SIGINT in this thread and the threads it starts, until [`watch`] handles it.
pub fn hold() {
    // SAFETY: the set is plain data; concerns the calling thread's mask alone.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &interrupt_alone(), ptr::null_mut()) };
}

/// Starts a thread that waits for SIGINT, runs `last` and ends the process. [`hold`] must have blocked SIGINT in all other
/// threads. If the shell has SIGINT ignored, as in background jobs, it stays ignored.
pub fn watch(last: impl FnOnce() + Send + 'static) {
    // SAFETY: plain data, and writable.
    let ignored = unsafe {
        let mut action: libc::sigaction = mem::zeroed();
        libc::sigaction(libc::SIGINT, ptr::null(), &raw mut action) == 0 && action.sa_sigaction == libc::SIG_IGN
    };
    if !ignored {
        thread::spawn(move || {
            let mut signal = 0;
            // SAFETY: an initialised set, and a writable signal number.
            if unsafe { libc::sigwait(&interrupt_alone(), &raw mut signal) } == 0 {
                // A second ^C ends the process at once.
                release();
                last();
                // SAFETY: touches no memory. The signal tells the shell that the command was interrupted.
                unsafe { libc::raise(libc::SIGINT) };
                process::exit(130);
            }
        });
    }
}

fn release() {
    // SAFETY: as in `hold`.
    unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &interrupt_alone(), ptr::null_mut()) };
}

fn interrupt_alone() -> libc::sigset_t {
    // SAFETY: plain data, and writable.
    unsafe {
        let mut set = mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGINT);
        set
    }
}
