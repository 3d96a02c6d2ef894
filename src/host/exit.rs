//! The end of the program, seen from work of ours.
//!
//! The driver takes itself down in an exit handler. A call of ours that comes later, or is still in it then, is undefined
//! behaviour in somebody else's program. So an exit handler of ours, which runs before the driver's, closes the driver to
//! our work ([`enter_driver`]) and waits for what is inside. What was being done fails, and [`Answering`] gives it the time
//! to tell whoever asked for it.
//!
//! Our work is that of our workers, and what a thread of the program does in [`as_worker`] at the program's request. All
//! other calls of the program's threads are the program's business, through us or not: they are not held back.
//!
//! Nothing here takes a lock: a program may end in a signal handler, whatever it has interrupted.

use crate::PerProcess;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Whose work a thread does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// The program's.
    Program,
    /// Ours.
    Worker,
    /// Ours, and it waits for the program's work on the device, which may never end.
    Waiter,
}

thread_local! {
    static ROLE: Cell<Role> = const { Cell::new(Role::Program) };
    /// Calls of this thread that are counted: the program may end in a signal handler in the middle of one.
    static INSIDE: Cell<usize> = const { Cell::new(0) };
}

/// Does work of ours, in a worker or in a thread of the program.
pub fn as_worker<R>(work: impl FnOnce() -> R) -> R {
    in_role(Role::Worker, work)
}

/// Waits for the program's work on the device. If this is work of ours, the program's end does not wait for it as long as
/// for other calls: what never ends would hold up every end.
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

/// A stay in the driver, for as long as it lives.
pub struct InDriver(Option<&'static AtomicUsize>);

/// Asks to call the driver. `None`: the program is ending and this is work of ours, so the driver must not be called any
/// more.
#[inline]
pub fn enter_driver() -> Option<InDriver> {
    let counted = match ROLE.get() {
        Role::Program => return Some(InDriver(None)),
        Role::Worker => begin(|work| &work.in_driver)?,
        Role::Waiter => begin(|work| &work.waiting)?,
    };
    INSIDE.set(INSIDE.get() + 1);
    Some(InDriver(Some(counted)))
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

/// Somebody waits for an answer of ours, for as long as this lives: the program's end waits for it a moment.
pub struct Answering(&'static AtomicUsize);

impl Answering {
    /// `None`: the program is ending, so nothing is begun any more.
    pub fn unless_ending() -> Option<Self> {
        begin(|work| &work.answering).map(Self)
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Whether the program is ending. What has failed since then has failed for that reason.
pub fn is_ending() -> bool {
    WORK.existing().is_some_and(|work| work.ending.load(Ordering::SeqCst))
}

/// How much of our work is where.
#[derive(Default)]
struct Work {
    in_driver: AtomicUsize,
    /// In the driver, for as long as the program's work takes.
    waiting: AtomicUsize,
    answering: AtomicUsize,
    ending: AtomicBool,
}

static WORK: PerProcess<Work> = PerProcess::new(Work::default);

/// One more, unless the program is ending.
fn begin(counter: impl FnOnce(&'static Work) -> &'static AtomicUsize) -> Option<&'static AtomicUsize> {
    let work = WORK.get();
    let counter = counter(work);
    // Counted before it is looked: the exit handler says that it is ending before it looks at the counters.
    counter.fetch_add(1, Ordering::SeqCst);
    if work.ending.load(Ordering::SeqCst) {
        counter.fetch_sub(1, Ordering::SeqCst);
        return None;
    }
    Some(counter)
}

/// There will be work of ours from now on. Exit handlers run in the opposite order of their registration: ours before those
/// of the driver, which is in use by now.
pub(crate) fn expect_workers() {
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    if !REGISTERED.swap(true, Ordering::Relaxed) {
        // SAFETY: a function that lives as long as the process: the library is never unloaded. Without memory for the list it
        // does not run.
        unsafe { libc::atexit(close_driver) };
    }
}

extern "C" fn close_driver() {
    // In a forked child that has none of its own there is no work of ours, whatever the parent was doing.
    if let Some(work) = WORK.existing() {
        end(work);
    }
}

/// Refuses everything from now on, and waits for what is under way. Whether it has come to its end.
fn end(work: &Work) -> bool {
    /// Far more than a call takes, unless the driver waits for the program.
    const CALLS: Duration = Duration::from_secs(5);
    /// What an answer takes once the driver refuses everything.
    const ANSWERS: Duration = Duration::from_secs(1);
    /// For work that is just about to end.
    const WAITS: Duration = Duration::from_millis(500);
    work.ending.store(true, Ordering::SeqCst);
    // Our own calls in this thread cannot go on.
    let interrupted = INSIDE.get();
    let calls = wait_until(CALLS, || work.in_driver.load(Ordering::SeqCst) <= interrupted);
    let answers = wait_until(ANSWERS, || work.answering.load(Ordering::SeqCst) == 0);
    let waits = wait_until(WAITS, || work.waiting.load(Ordering::SeqCst) <= interrupted);
    calls && answers && waits
}

fn wait_until(limit: Duration, over: impl Fn() -> bool) -> bool {
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

    /// In a forked child, which may end without the test harness doing so. Answers what the child answers.
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
    fn once_it_ends_our_work_is_refused_and_the_programs_is_not() {
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
    fn the_end_waits_for_a_call_and_for_an_answer() {
        assert!(in_child(|| {
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
        }));
    }

    /// A signal handler may end the program in the middle of a call of ours: that call cannot go on meanwhile.
    #[test]
    fn the_end_does_not_wait_for_what_it_has_interrupted() {
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
    fn a_thread_of_the_program_is_its_own_again_after_our_work() {
        let _ = std::panic::catch_unwind(|| as_worker(|| panic!("a defect of ours")));
        assert_eq!(ROLE.get(), Role::Program);
        as_worker(|| while_waiting(|| assert_eq!(ROLE.get(), Role::Waiter)));
        assert_eq!(ROLE.get(), Role::Program);
    }
}
