//! ^C: the command says what becomes of what it has asked for, and ends as one that was interrupted.

use std::{mem, process, ptr, thread};

/// From now on ^C waits for [`watch`]. Threads that are started meanwhile leave it alone, too.
pub fn hold() {
    // SAFETY: the set is plain data; concerns the calling thread's mask alone.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &interrupt_alone(), ptr::null_mut()) };
}

/// Has a thread wait for ^C, which [`hold`] keeps from all others, do `last`, and end the process. Where the shell has had ^C
/// ignored, as for a job in the background, it stays so.
pub fn watch(last: impl FnOnce() + Send + 'static) {
    // SAFETY: plain data, and writable.
    let ignored = unsafe {
        let mut action: libc::sigaction = mem::zeroed();
        libc::sigaction(libc::SIGINT, ptr::null(), &raw mut action) == 0 && action.sa_sigaction == libc::SIG_IGN
    };
    if !ignored {
        thread::spawn(move || {
            let mut signal = 0;
            // SAFETY: a set of signals, and a place for the one that came.
            if unsafe { libc::sigwait(&interrupt_alone(), &raw mut signal) } == 0 {
                // The next one does not wait for this.
                release();
                last();
                // SAFETY: touches no memory. The shell is to see that it was interrupted.
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
