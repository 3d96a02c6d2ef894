//! Handles ^C: the command reports the state of its requests and dies by SIGINT. A full-screen command restores the terminal first.

use std::panic::AssertUnwindSafe;
use std::time::Duration;
use std::{mem, panic, process, ptr};
use vramctl_coordinator::parallel;

/// The signals that ask a program to end.
const ENDS: [libc::c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// Blocks SIGINT in this thread and the threads it starts, until [`watch`] handles it.
pub fn hold() {
    // SAFETY: the set is plain data; concerns the calling thread's mask alone.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &interrupt_alone(), ptr::null_mut()) };
}

/// Starts a thread that waits for SIGINT, runs `last` and ends the process. [`hold`] must have blocked SIGINT in all other
/// threads. If the shell has SIGINT ignored, as in background jobs, it stays ignored. Where there is no thread, SIGINT ends the process at
/// once: the processes undo what is not complete.
pub fn watch(last: impl FnOnce() + Send + 'static) {
    // SAFETY: plain data, and writable.
    let ignored = unsafe {
        let mut action: libc::sigaction = mem::zeroed();
        libc::sigaction(libc::SIGINT, ptr::null(), &raw mut action) == 0 && action.sa_sigaction == libc::SIG_IGN
    };
    if !ignored {
        let waiting = parallel::spawn(move || {
            let mut signal = 0;
            // SAFETY: an initialised set, and a writable signal number.
            if unsafe { libc::sigwait(&interrupt_alone(), &raw mut signal) } == 0 {
                // A second ^C ends the process at once.
                release();
                // Whatever this meets, the process ends.
                let _ = panic::catch_unwind(AssertUnwindSafe(last));
                // SAFETY: touches no memory. The signal shows the shell that the command was interrupted.
                unsafe { libc::raise(libc::SIGINT) };
                process::exit(130);
            }
        });
        if waiting.is_err() {
            release();
        }
    }
}

/// Has a thread report the first signal that asks this program to end, instead of ending it. Call it before there are other threads: they
/// must have these signals blocked.
pub fn catch_end(end: impl FnOnce(libc::c_int) + Send + 'static) {
    let signals = set_of(&ENDS);
    // SAFETY: an initialised set; concerns the calling thread's mask alone.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const signals, ptr::null_mut()) };
    let waiting = parallel::spawn(move || {
        let mut signal = 0;
        // SAFETY: an initialised set, and a writable signal number.
        if unsafe { libc::sigwait(&raw const signals, &raw mut signal) } == 0 {
            end(signal);
        }
    });
    if waiting.is_err() {
        // SAFETY: as above.
        unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const signals, ptr::null_mut()) };
    }
}

/// Ends this program by a signal that was caught.
pub fn end_by(signal: libc::c_int) -> ! {
    // SAFETY: an initialised set, and no memory.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &set_of(&[signal]), ptr::null_mut());
        libc::raise(signal);
    }
    process::exit(128 + signal)
}

fn release() {
    // SAFETY: as in `hold`.
    unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &interrupt_alone(), ptr::null_mut()) };
}

fn interrupt_alone() -> libc::sigset_t {
    set_of(&[libc::SIGINT])
}

fn set_of(signals: &[libc::c_int]) -> libc::sigset_t {
    // SAFETY: plain data, and writable.
    unsafe {
        let mut set = mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in signals {
            libc::sigaddset(&raw mut set, *signal);
        }
        set
    }
}

/// Blocks all signals that ask this program to end, in this thread and those that it starts, for [`comes_within`].
pub fn hold_ends() {
    // SAFETY: an initialised set; concerns the calling thread's mask alone.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set_of(&ENDS), ptr::null_mut()) };
}

/// Waits for a signal that [`hold_ends`] has blocked, for a while: ^C, the end of the terminal, or SIGTERM, as from `timeout` or a service
/// manager. If one comes, the next one ends the process at once.
pub fn comes_within(time: Duration) -> bool {
    let wait = libc::timespec { tv_sec: time.as_secs() as libc::time_t, tv_nsec: time.subsec_nanos().into() };
    // SAFETY: both are initialised, and the signal's details are not needed.
    let has_arrived = unsafe { libc::sigtimedwait(&set_of(&ENDS), ptr::null_mut(), &raw const wait) } > 0;
    if has_arrived {
        // SAFETY: as above.
        unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &set_of(&ENDS), ptr::null_mut()) };
    }
    has_arrived
}
