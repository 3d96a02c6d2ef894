//! State that belongs to one process and must not survive `fork`.
//!
//! A CUDA context cannot be used in a forked child, and a lock that another thread of the parent held at the time of
//! the fork would stay locked for ever. So every global of this library lives in a [`PerProcess`], which a forked
//! child finds empty: it makes its own when it first needs it. The parent's value stays where it is in the child's
//! copy of the memory, untouched and never dropped, because dropping it would mean calling the driver.
//!
//! For the same reason nothing in this library waits for a [`std::sync::Once`] in a plain `static`: a fork in the middle of one
//! would leave the child waiting for a thread that it does not have.

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

/// How many forks lie between this process and the one that first used the library.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// A lazily made global that a forked child does not inherit.
pub struct PerProcess<T: 'static> {
    current: AtomicPtr<Stamped<T>>,
    make: fn() -> T,
}

struct Stamped<T> {
    generation: u32,
    value: T,
}

impl<T: Send + Sync + 'static> PerProcess<T> {
    /// A global made by `make` at its first use in each process.
    pub const fn new(make: fn() -> T) -> Self {
        Self { current: AtomicPtr::new(ptr::null_mut()), make }
    }

    /// This process's value, made now if it is not there yet. Values are never freed.
    #[inline]
    pub fn get(&'static self) -> &'static T {
        self.existing().unwrap_or_else(|| self.create())
    }

    /// This process's value, if something made it already.
    #[inline]
    pub fn existing(&'static self) -> Option<&'static T> {
        // SAFETY: a non-null pointer comes from `Box::into_raw` in `create` and is never freed.
        let stamped = unsafe { self.current.load(Ordering::Acquire).as_ref() }?;
        (stamped.generation == GENERATION.load(Ordering::Relaxed)).then_some(&stamped.value)
    }

    #[cold]
    fn create(&'static self) -> &'static T {
        count_forks();
        let generation = GENERATION.load(Ordering::Relaxed);
        let before = self.current.load(Ordering::Acquire);
        // SAFETY: as in `existing`.
        if let Some(stamped) = unsafe { before.as_ref() }
            && stamped.generation == generation
        {
            return &stamped.value;
        }
        let fresh = Box::into_raw(Box::new(Stamped { generation, value: (self.make)() }));
        let winner = match self.current.compare_exchange(before, fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => fresh,
            Err(winner) => {
                // SAFETY: `fresh` lost the race and was never published, so this is its only owner.
                drop(unsafe { Box::from_raw(fresh) });
                winner
            }
        };
        // SAFETY: published by this or another thread of this process, and never freed from then on.
        unsafe { &(*winner).value }
    }
}

/// From now on a fork makes a new generation. Called at the first use of a global and not earlier, so that a program
/// without CUDA has no fork handler of ours.
fn count_forks() {
    static COUNTING: AtomicBool = AtomicBool::new(false);
    // Two threads may both get here first, and then a fork counts twice, which does no harm. To make one wait for the other
    // would: a child that was forked meanwhile would wait for ever.
    if !COUNTING.load(Ordering::Acquire) {
        on_fork_in_child(next_generation);
        COUNTING.store(true, Ordering::Release);
    }
}

extern "C" fn next_generation() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// The generation of this process: another one in each forked child.
pub(crate) fn generation() -> u32 {
    count_forks();
    GENERATION.load(Ordering::Relaxed)
}

/// Has `handler` run in every forked child, which may do async-signal-safe work only.
pub(crate) fn on_fork_in_child(handler: unsafe extern "C" fn()) {
    // SAFETY: `handler` lives in this library, which is never unloaded. Without memory for the list the handler is
    // not registered; a child that then uses CUDA state of its parent gets errors from the driver, as it does without us.
    unsafe { libc::pthread_atfork(None, None, Some(handler)) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Held;
    use std::process::Command;
    use std::sync::atomic::AtomicUsize;
    use std::{hint, thread};

    /// A child that could see its parent's locks or allocations would hang or hand a dead context to the driver.
    #[test]
    fn a_forked_child_starts_empty_and_the_parent_keeps_its_own() {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        static GLOBAL: PerProcess<usize> = PerProcess::new(|| MADE.fetch_add(1, Ordering::SeqCst));
        let mine = *GLOBAL.get();
        assert_eq!(GLOBAL.existing(), Some(&mine));

        // SAFETY: the child only touches atomics and allocates one box, then leaves by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let fine = GLOBAL.existing().is_none() && *GLOBAL.get() != mine;
            // SAFETY: ends the child without running the test harness's exit handlers.
            unsafe { libc::_exit(i32::from(!fine)) };
        }
        let mut status = -1;
        // SAFETY: `child` is ours and `status` is writable.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0);
        assert_eq!(GLOBAL.existing(), Some(&mine));
    }

    /// What a program does first: a global, and a descriptor that children are not to have.
    fn use_for_the_first_time() {
        static GLOBAL: PerProcess<usize> = PerProcess::new(|| 1);
        GLOBAL.get();
        drop(tempfile::tempfile().and_then(Held::new));
    }

    /// Forks a child that does this and leaves. One that hangs is killed.
    fn fork(seconds: u32, work: impl FnOnce()) -> libc::pid_t {
        // SAFETY: the child leaves by `_exit`, or by the alarm.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            unsafe { libc::alarm(seconds) };
            work();
            // SAFETY: as above.
            unsafe { libc::_exit(0) };
        }
        child
    }

    fn ends_well(child: libc::pid_t) -> bool {
        let mut status = -1;
        // SAFETY: a child of this process; `status` is writable.
        unsafe { libc::waitpid(child, &raw mut status, 0) == child && status == 0 }
    }

    /// In a process in which nothing was used yet.
    #[test]
    #[ignore = "run by the test below"]
    fn forks_during_first_uses() {
        for round in 0..2000 {
            let program = fork(30, || {
                let first = thread::spawn(use_for_the_first_time);
                // The fork comes a little later in each round.
                (0..round * 20).for_each(|_| hint::spin_loop());
                let child = fork(10, use_for_the_first_time);
                let _ = first.join();
                if !ends_well(child) {
                    // SAFETY: ends this child of the test.
                    unsafe { libc::_exit(1) };
                }
            });
            assert!(ends_well(program), "round {round}: a forked child hangs");
        }
    }

    /// It would wait for a thread of its parent, which it does not have.
    #[test]
    fn a_child_that_is_forked_during_a_first_use_does_not_hang() {
        let this = std::env::current_exe().unwrap();
        let ended = Command::new(this).args(["--ignored", "--exact", "fork::tests::forks_during_first_uses"]).output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stdout));
    }
}
