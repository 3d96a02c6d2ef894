//! Keeps the library's work out of the driver when the program exits.
//!
//! The driver tears itself down in an exit handler. A call that the library makes later, or that is still in the driver then,
//! is undefined behaviour in somebody else's program. So the library's exit handler, which runs before the driver's, refuses
//! new calls ([`enter_driver`]) and waits for those in flight. Work in progress fails, and [`Answering`] gives it time to answer
//! its client.
//!
//! The library's work is that of its workers, and what a thread of the program does in [`as_worker`]. All other calls of the
//! program's threads, through the library or not, are the program's own and are not held back.
//!
//! Nothing here takes a lock: a program may exit in a signal handler, no matter what code that has interrupted.

use crate::{PerProcess, fork, futex};
use std::cell::Cell;
use std::ffi::c_void;
use std::panic::AssertUnwindSafe;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use std::{mem, panic, thread};

/// On whose behalf a thread works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// The program's.
    Program,
    /// The library's.
    Worker,
    /// The library's, and it waits for the program's work on the device, which may never end.
    Waiter,
}

thread_local! {
    static ROLE: Cell<Role> = const { Cell::new(Role::Program) };
    /// This thread's calls in flight. The program may exit in a signal handler that interrupts one.
    static INSIDE: Cell<usize> = const { Cell::new(0) };
}

/// Runs work of the library, in a worker or in a thread of the program.
pub fn as_worker<R>(work: impl FnOnce() -> R) -> R {
    in_role(Role::Worker, work)
}

/// Runs a wait for the program's work on the device. If it is the library's work, the exit handler waits for it only briefly:
/// the device's work may never end.
pub fn while_waiting<R>(work: impl FnOnce() -> R) -> R {
    in_role(if ROLE.get() == Role::Program { Role::Program } else { Role::Waiter }, work)
}

fn in_role<R>(role: Role, work: impl FnOnce() -> R) -> R {
    struct Before(Role);
    impl Drop for Before {
        fn drop(&mut self) {
            ROLE.set(self.0);
        }
    }
    let _before = Before(ROLE.replace(role));
    work()
}

/// A driver call in flight, until dropped.
pub struct InDriver(Option<&'static AtomicUsize>);

/// Asks for permission to call the driver. `None` if this is the library's work and the program is exiting: then the driver
/// must not be called.
#[inline]
pub fn enter_driver() -> Option<InDriver> {
    enter(|quiesced| {
        futex::wait(quiesced, 1);
        true
    })
}

/// As [`enter_driver`], for several calls that must not be torn apart: `None` while the library's work is quiesced, too. Until the
/// result is dropped, this thread's calls do not wait, and [`quiesce`] waits for them.
pub fn enter_driver_at_once() -> Option<InDriver> {
    enter(|_| false)
}

/// `wait` is called with a word that is 1 while the library's work is quiesced; it returns whether to try again.
#[inline]
fn enter(mut wait: impl FnMut(&AtomicU32) -> bool) -> Option<InDriver> {
    let of_role: fn(&Work) -> &AtomicUsize = match ROLE.get() {
        Role::Program => return Some(InDriver(None)),
        Role::Worker => |work| &work.in_driver,
        Role::Waiter => |work| &work.waiting,
    };
    loop {
        let counted = begin(of_role)?;
        let work = WORK.get();
        // What is inside must not wait: `quiesce` waits for that.
        if work.quiesced.load(Ordering::SeqCst) == 0 || INSIDE.get() > 0 {
            INSIDE.set(INSIDE.get() + 1);
            return Some(InDriver(Some(counted)));
        }
        counted.fetch_sub(1, Ordering::SeqCst);
        if !wait(&work.quiesced) {
            return None;
        }
    }
}

/// Keeps the library's work out of the driver until [`unquiesce`]: its new calls wait. Returns whether all calls inside have finished; if they
/// do not within `limit`, it gives up and lets waiting calls continue.
pub fn quiesce(limit: Duration) -> bool {
    let work = WORK.get();
    work.quiesced_times.fetch_add(1, Ordering::SeqCst);
    work.quiesced.store(1, Ordering::SeqCst);
    let are_out = wait_until(limit, || work.in_driver.load(Ordering::SeqCst) == 0 && work.waiting.load(Ordering::SeqCst) == 0);
    if !are_out {
        unquiesce();
    }
    are_out
}

/// Ends [`quiesce`].
pub fn unquiesce() {
    let quiesced = &WORK.get().quiesced;
    quiesced.store(0, Ordering::SeqCst);
    futex::wake_all(quiesced);
}

/// Whether the library's work stays out of the driver, or is about to.
pub fn is_quiesced() -> bool {
    WORK.existing().is_some_and(|work| work.quiesced.load(Ordering::SeqCst) != 0)
}

/// How often the library's work has been quiesced so far. Meanwhile, the process may have moved to another GPU.
pub fn quiesced_times() -> u32 {
    WORK.existing().map_or(0, |work| work.quiesced_times.load(Ordering::SeqCst))
}

impl Drop for InDriver {
    #[inline]
    fn drop(&mut self) {
        if let Some(counter) = self.0 {
            INSIDE.set(INSIDE.get() - 1);
            counter.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// While this lives, a client waits for an answer, and the exit handler waits briefly for that.
pub struct Answering(&'static AtomicUsize);

impl Answering {
    /// `None` if the program is exiting: start nothing new.
    pub fn unless_ending() -> Option<Self> {
        begin(|work| &work.answering).map(Self)
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Whether the program is exiting. Failures from then on are due to that.
pub fn is_ending() -> bool {
    WORK.existing().is_some_and(|work| work.ending.load(Ordering::SeqCst))
}

/// Counts of the library's work in flight.
#[derive(Default)]
struct Work {
    in_driver: AtomicUsize,
    /// In the driver, waiting for the program's work.
    waiting: AtomicUsize,
    answering: AtomicUsize,
    ending: AtomicBool,
    /// 1 while the library's work stays out of the driver.
    quiesced: AtomicU32,
    /// How often it has rested.
    quiesced_times: AtomicU32,
}

static WORK: PerProcess<Work> = PerProcess::new(Work::default);

/// Increments a counter, unless the program is exiting.
fn begin(counter: impl FnOnce(&'static Work) -> &'static AtomicUsize) -> Option<&'static AtomicUsize> {
    let work = WORK.get();
    let counter = counter(work);
    // Count before checking `ending`: the exit handler sets `ending` before it reads the counters.
    counter.fetch_add(1, Ordering::SeqCst);
    if work.ending.load(Ordering::SeqCst) {
        counter.fetch_sub(1, Ordering::SeqCst);
        return None;
    }
    Some(counter)
}

/// Registers the exit handler, before the first worker starts. Exit handlers run in reverse order of registration, so this
/// one runs before the driver's: the driver is in use by now.
pub(crate) fn expect_workers() {
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    if !REGISTERED.swap(true, Ordering::Relaxed) {
        at_exit(close_driver);
    }
}

/// Registers `handler` to run when the program exits, also by `quick_exit`; without memory for that, it does not run. A handler is a function
/// or a closure that captures nothing, but not a function pointer. It does not run in a child that was made without the fork handlers: such a
/// child has a copy of its parent's state, or even shares it.
///
/// The program may exit in a signal handler, which may have interrupted `malloc` or the owner of a lock. So a handler must not allocate,
/// and every wait in it must have a time limit.
pub fn at_exit<Handler: Fn() + 'static>(handler: Handler) {
    unsafe extern "C" {
        /// The C library's `atexit` with an argument.
        fn __cxa_atexit(run: extern "C" fn(*mut c_void), argument: *mut c_void, library: *mut c_void) -> libc::c_int;
        /// The same for `quick_exit`, which gives no argument.
        fn __cxa_at_quick_exit(run: extern "C" fn(*mut c_void), library: *mut c_void) -> libc::c_int;
    }
    extern "C" fn run<Handler: Fn()>(_: *mut c_void) {
        if !fork::is_stray() {
            // SAFETY: a value without size is valid at any address, and `at_exit` got one that is never dropped.
            let handler = unsafe { NonNull::<Handler>::dangling().as_ref() };
            let _ = panic::catch_unwind(AssertUnwindSafe(handler));
        }
    }
    const { assert!(size_of::<Handler>() == 0) };
    mem::forget(handler);
    fork::count_forks();
    // ThreadSanitizer treats a registration without an address of a library as a plain `atexit`. Any address of ours will do.
    let library = (&raw const WORK).cast_mut().cast();
    // SAFETY: the function lives as long as the process: the library is never unloaded.
    unsafe {
        __cxa_atexit(run::<Handler>, ptr::null_mut(), library);
        __cxa_at_quick_exit(run::<Handler>, library);
    }
}

fn close_driver() {
    // A forked child starts without work, whatever its parent was doing.
    if let Some(work) = WORK.existing() {
        end(work);
    }
}

/// Refuses new work and waits for work in flight. Returns whether all of it has finished.
fn end(work: &Work) -> bool {
    /// Far longer than a call takes, unless the driver waits for the program.
    const CALLS: Duration = Duration::from_secs(5);
    /// Enough to answer once driver calls are refused.
    const ANSWERS: Duration = Duration::from_secs(1);
    /// Enough for work that is about to finish.
    const WAITS: Duration = Duration::from_millis(500);
    work.ending.store(true, Ordering::SeqCst);
    // Wake quiesced workers, so that they see it.
    unquiesce();
    // This thread's own calls are interrupted and cannot finish.
    let interrupted = INSIDE.get();
    let calls = wait_until(CALLS, || work.in_driver.load(Ordering::SeqCst) <= interrupted);
    let answers = wait_until(ANSWERS, || work.answering.load(Ordering::SeqCst) == 0);
    let waits = wait_until(WAITS, || work.waiting.load(Ordering::SeqCst) <= interrupted);
    calls && answers && waits
}

/// Waits until `over` says so, at most for as long as `limit`. Returns whether it does.
pub(crate) fn wait_until(limit: Duration, over: impl Fn() -> bool) -> bool {
    let begun = Instant::now();
    while !over() {
        if begun.elapsed() > limit {
            return false;
        }
        thread::sleep(Duration::from_millis(1));
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker;
    use std::sync::mpsc;

    /// Runs `work` in a forked child, which can exit without ending the test harness. Returns its result.
    fn in_child(work: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child leaves by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let fine = work();
            // SAFETY: ends the child without running the test harness's exit handlers.
            unsafe { libc::_exit(i32::from(!fine)) };
        }
        let mut status = -1;
        // SAFETY: `child` is ours and `status` is writable.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        status == 0
    }

    #[test]
    fn at_exit_the_librarys_work_is_refused_and_the_programs_is_not() {
        assert!(in_child(|| {
            let before = as_worker(enter_driver).is_some() && Answering::unless_ending().is_some() && !is_ending();
            close_driver();
            let waiting = as_worker(|| while_waiting(enter_driver));
            let program = enter_driver().is_some() && while_waiting(enter_driver).is_some();
            before
                && is_ending()
                && as_worker(enter_driver).is_none()
                && waiting.is_none()
                && program
                && Answering::unless_ending().is_none()
        }));
    }

    #[test]
    fn the_exit_waits_for_a_call_and_for_an_answer() {
        let both_end_before = || {
            static OVER: AtomicUsize = AtomicUsize::new(0);
            let (begun, has_begun) = mpsc::channel();
            let answering = begun.clone();
            let call = worker::spawn("vramctl-call", move || {
                let _inside = enter_driver();
                begun.send(()).unwrap();
                thread::sleep(Duration::from_millis(100));
                OVER.fetch_add(1, Ordering::SeqCst);
            });
            let answer = worker::spawn("vramctl-answer", move || {
                let _answering = Answering::unless_ending();
                answering.send(()).unwrap();
                thread::sleep(Duration::from_millis(200));
                OVER.fetch_add(1, Ordering::SeqCst);
            });
            (call.is_ok() && answer.is_ok()).then(|| (0..2).for_each(|_| has_begun.recv().unwrap()));
            close_driver();
            OVER.load(Ordering::SeqCst) == 2
        };
        // It waits only so long, which a slow machine may exceed.
        assert!((0..10).any(|_| in_child(both_end_before)));
    }

    /// If a signal handler that interrupts a call ends the program, that call cannot finish.
    #[test]
    fn the_exit_does_not_wait_for_calls_it_has_interrupted() {
        assert!(in_child(|| {
            let (_call, _wait) = (as_worker(enter_driver), as_worker(|| while_waiting(enter_driver)));
            end(WORK.get())
        }));
    }

    #[test]
    fn a_forked_child_has_no_work_and_is_not_ending() {
        assert!(in_child(|| {
            let _inside = as_worker(enter_driver);
            close_driver();
            is_ending() && in_child(|| !is_ending() && as_worker(enter_driver).is_some())
        }));
    }

    #[test]
    fn quiesced_work_waits_outside_until_that_ends_or_the_program_ends() {
        assert!(in_child(|| {
            static INSIDE_DRIVER: AtomicUsize = AtomicUsize::new(0);
            let inside = as_worker(enter_driver);
            let refused = !quiesce(Duration::from_millis(20)) && as_worker(enter_driver).is_some();
            drop(inside);
            let is_quiesced = quiesce(Duration::from_secs(100));
            let call = || {
                worker::spawn("vramctl-call", || {
                    INSIDE_DRIVER.fetch_add(usize::from(enter_driver().is_some()), Ordering::SeqCst);
                    INSIDE_DRIVER.fetch_add(10, Ordering::SeqCst);
                })
            };
            let after = |count| wait_until(Duration::from_secs(100), || INSIDE_DRIVER.load(Ordering::SeqCst) == count);
            let started = call().is_ok();
            thread::sleep(Duration::from_millis(20));
            let waits = INSIDE_DRIVER.load(Ordering::SeqCst) == 0 && enter_driver().is_some();
            unquiesce();
            let woken = after(11);
            let again = quiesce(Duration::from_secs(100)) && call().is_ok();
            thread::sleep(Duration::from_millis(20));
            close_driver();
            refused && is_quiesced && started && waits && woken && again && after(21)
        }));
    }

    #[test]
    fn calls_that_belong_together_are_made_before_work_is_quiesced_or_not_at_all() {
        assert!(in_child(|| {
            let together = as_worker(enter_driver_at_once);
            let waited_for = !quiesce(Duration::from_millis(20));
            // As `quiesce` leaves it while it waits.
            WORK.get().quiesced.store(1, Ordering::SeqCst);
            let calls = as_worker(enter_driver).is_some() && as_worker(|| while_waiting(enter_driver)).is_some();
            drop(together);
            let none = as_worker(enter_driver_at_once).is_none() && quiesce(Duration::from_secs(100));
            unquiesce();
            waited_for && calls && none && as_worker(enter_driver_at_once).is_some()
        }));
    }

    #[test]
    fn a_thread_of_the_program_is_its_own_again_after_our_work() {
        let _ = panic::catch_unwind(|| as_worker(|| panic!("a defect of ours")));
        assert_eq!(ROLE.get(), Role::Program);
        as_worker(|| while_waiting(|| assert_eq!(ROLE.get(), Role::Waiter)));
        assert_eq!(ROLE.get(), Role::Program);
    }
}
