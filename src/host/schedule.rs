//! Where and how the library's threads run: as the process did when it was started.
//!
//! A thread inherits from the one that starts it, and a thread of the program may be bound to one processor, or run in real time
//! (`OMP_PROC_BIND`, an audio thread). All copies would run there, and before everything else. A thread that is bound to many, such as those of a
//! NUMA node, is followed: that is meant for the process.

use std::process;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// More than a kernel has processors, in words.
const WORDS: usize = 128;

/// As many as copies keep busy.
const ENOUGH: u32 = 8;

/// As the process was started.
struct AtStart {
    process: AtomicU32,
    /// A bit for each processor that it may use.
    processors: [AtomicU64; WORDS],
    /// Of these, how many the kernel has told.
    bytes: AtomicUsize,
    policy: AtomicI32,
    priority: AtomicI32,
}

static AT_START: AtStart = AtStart {
    process: AtomicU32::new(0),
    processors: [const { AtomicU64::new(0) }; WORDS],
    bytes: AtomicUsize::new(0),
    policy: AtomicI32::new(0),
    priority: AtomicI32::new(0),
};

/// Remembers it. Called when the library is loaded.
pub fn remember() {
    let mut parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the words are writable, and nobody else uses them yet; so are the parameters. (The C library's function fills only its own type's size.)
    let (bytes, policy) = unsafe {
        libc::sched_getparam(0, &raw mut parameters);
        let words = AT_START.processors.as_ptr();
        (libc::syscall(libc::SYS_sched_getaffinity, 0, size_of_val(&AT_START.processors), words), libc::sched_getscheduler(0))
    };
    AT_START.bytes.store(usize::try_from(bytes).unwrap_or(0), Ordering::Relaxed);
    AT_START.policy.store(policy, Ordering::Relaxed);
    AT_START.priority.store(parameters.sched_priority, Ordering::Relaxed);
    AT_START.process.store(process::id(), Ordering::Release);
}

/// From now on, the calling thread runs so. Nothing changes in a forked child: whoever has forked it may have given it other processors.
pub(crate) fn run_as_at_start() {
    if AT_START.process.load(Ordering::Acquire) != process::id() {
        return;
    }
    let (bytes, policy) = (AT_START.bytes.load(Ordering::Relaxed), AT_START.policy.load(Ordering::Relaxed));
    let parameters = libc::sched_param { sched_priority: AT_START.priority.load(Ordering::Relaxed) };
    // SAFETY: only the calling thread is meant. The words are only read. What the kernel refuses stays as it is.
    unsafe {
        if bytes > 0 && inherited() < ENOUGH {
            libc::syscall(libc::SYS_sched_setaffinity, 0, bytes, AT_START.processors.as_ptr());
        }
        if policy != libc::sched_getscheduler(0) {
            libc::sched_setscheduler(0, policy, &raw const parameters);
        }
    }
}

/// The number of processors that the calling thread may use.
fn inherited() -> u32 {
    let mut words = [0_u64; WORDS];
    // SAFETY: the words are writable. The kernel leaves those alone that it does not use.
    unsafe { libc::syscall(libc::SYS_sched_getaffinity, 0, size_of_val(&words), words.as_mut_ptr()) };
    words.iter().map(|word| word.count_ones()).sum()
}
