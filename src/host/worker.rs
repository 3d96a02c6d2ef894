//! The library's threads in somebody else's process: named, with all signals blocked, scheduled as the process is, and known to [`exit`].

use crate::symbols::Loaded;
use crate::{exit, schedule};
use std::cell::Cell;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::thread::{Builder, Scope, ScopedJoinHandle};
use std::{io, mem, ptr};

/// Starts a worker: a named thread that blocks all signals, so that the program's handlers run in the program's threads.
pub fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    start(builder(name), work)
}

/// Starts a worker in which the driver compiles code. Its stack is as large as a normal program thread's.
pub fn spawn_compiler(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    start(builder(name).stack_size((8 << 20) + thread_overhead()), work)
}

fn start(builder: Builder, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    exit::expect_workers();
    let starter = of_caller();
    with_signals_blocked(|| builder.spawn(move || exit::as_worker(|| work_as(starter, work)))).map(drop)
}

/// Starts a worker that ends with a scope.
pub fn spawn_scoped<'scope, 'env, R: Send + 'scope>(
    scope: &'scope Scope<'scope, 'env>,
    name: &str,
    work: impl FnOnce() -> R + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, R>> {
    exit::expect_workers();
    let starter = of_caller();
    with_signals_blocked(|| builder(name).spawn_scoped(scope, move || exit::as_worker(|| work_as(starter, work))))
}

thread_local! {
    /// Whether this thread is a worker.
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// Who has started a worker.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Starter {
    Program,
    /// Another worker, from which it inherits what somebody may have set for all threads since.
    Worker,
}

fn of_caller() -> Starter {
    if IS_WORKER.get() { Starter::Worker } else { Starter::Program }
}

fn work_as<R>(starter: Starter, work: impl FnOnce() -> R) -> R {
    IS_WORKER.set(true);
    if starter == Starter::Program {
        schedule::run_as_at_start();
    }
    work()
}

fn builder(name: &str) -> Builder {
    /// Plenty for these threads.
    const STACK: usize = 512 << 10;
    Builder::new().name(name.to_owned()).stack_size(STACK + thread_overhead())
}

/// Blocks all signals while `work` runs. A thread started in it has them blocked from its first instruction.
pub fn with_signals_blocked<R>(work: impl FnOnce() -> R) -> R {
    // SAFETY: both sets are plain data and writable. The mask is this thread's alone and restored below.
    let before = unsafe {
        let (mut all, mut before) = (mem::zeroed(), mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        before
    };
    let result = work();
    // SAFETY: the set filled above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut()) };
    result
}

/// Lowers the calling thread's priority, for work that nobody waits for.
pub fn step_back() {
    const NICE: libc::c_int = 10;
    // SAFETY: touches no memory. On Linux 0 means the calling thread and not its process. (`gettid` would need glibc 2.30.)
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) };
}

/// glibc's `__pthread_get_minstack`, or null. Found without the loader's lock. The standard library looks it up, too, when it starts a thread.
pub fn get_minstack() -> *mut libc::c_void {
    static FOUND: AtomicPtr<libc::c_void> = AtomicPtr::new(ptr::null_mut());
    const NONE: *mut libc::c_void = ptr::without_provenance_mut(1);
    let mut found = FOUND.load(Ordering::Relaxed);
    if found.is_null() {
        let library = Loaded::around(libc::pthread_getattr_np as *const libc::c_void);
        found = library.and_then(|library| library.symbol(c"__pthread_get_minstack")).unwrap_or(NONE);
        FOUND.store(found, Ordering::Relaxed);
    }
    if found == NONE { ptr::null_mut() } else { found }
}

/// What glibc takes from a thread's stack before the thread starts. A program's large thread-local arrays could use up a
/// stack of fixed size.
///
/// Looked up without the loader's lock: while the program is held, a thread that waits may have that.
fn thread_overhead() -> usize {
    let symbol = get_minstack();
    if symbol.is_null() {
        return 0;
    }
    // SAFETY: glibc's function of this name has this type and only reads initialised attributes.
    unsafe {
        let minimum = mem::transmute::<*mut libc::c_void, unsafe extern "C" fn(*const libc::pthread_attr_t) -> libc::size_t>(symbol);
        let mut attributes = mem::zeroed();
        libc::pthread_attr_init(&raw mut attributes);
        let bytes = minimum(&raw const attributes);
        libc::pthread_attr_destroy(&raw mut attributes);
        bytes
    }
}
