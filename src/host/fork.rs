//! State that belongs to one process and must not survive `fork`.
//!
//! A CUDA context cannot be used in a forked child, and a lock that another thread held at the fork would stay locked forever.
//! So every global of this library lives in a [`PerProcess`], which a forked child finds empty and fills when it first needs
//! it. The parent's value stays in the child's memory, untouched and never dropped: dropping it would call the driver.
//!
//! For the same reason nothing in this library waits for a [`std::sync::Once`] in a plain `static`: after a fork in the middle
//! of one, the child would wait for a thread that it does not have.

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, Ordering};

/// Number of forks between this process and the one that first used the library.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// A lazily initialised global that a forked child does not inherit.
pub struct PerProcess<T: 'static> {
    current: AtomicPtr<Stamped<T>>,
    make: fn() -> T,
}

struct Stamped<T> {
    generation: u32,
    value: T,
}

impl<T: Send + Sync + 'static> PerProcess<T> {
    /// A global that `make` initialises at its first use in each process.
    pub const fn new(make: fn() -> T) -> Self {
        Self { current: AtomicPtr::new(ptr::null_mut()), make }
    }

    /// This process's value, initialised if necessary. Values are never freed.
    #[inline]
    pub fn get(&'static self) -> &'static T {
        self.existing().unwrap_or_else(|| self.create())
    }

    /// This process's value, if initialised.
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

/// Starts counting forks. Called at the first use of a global and not earlier, so that a program without CUDA gets no fork
/// handler.
pub(crate) fn count_forks() {
    static COUNTING: AtomicBool = AtomicBool::new(false);
    // Two threads may both register, and a fork then counts twice, which is harmless. Making one wait for the other is not: a
    // child forked meanwhile would wait forever.
    if !COUNTING.load(Ordering::Acquire) {
        note_process();
        on_fork_in_child(next_generation);
        COUNTING.store(true, Ordering::Release);
    }
}

extern "C" fn next_generation() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    note_process();
}

/// The process that has this generation.
static PROCESS: AtomicI32 = AtomicI32::new(0);

fn note_process() {
    // SAFETY: cannot fail and touches no memory.
    PROCESS.store(unsafe { libc::getpid() }, Ordering::Relaxed);
}

/// Whether this is a child that was made past the fork handlers (`vfork`, or the system call): it has, or even shares, its parent's state.
pub(crate) fn is_stray() -> bool {
    // SAFETY: as above.
    PROCESS.load(Ordering::Relaxed) != unsafe { libc::getpid() }
}

/// This process's generation. Each forked child has a new one.
pub fn generation() -> u32 {
    count_forks();
    GENERATION.load(Ordering::Relaxed)
}

/// Runs `handler` in every forked child. It must be async-signal-safe.
pub fn on_fork_in_child(handler: unsafe extern "C" fn()) {
    // SAFETY: `handler` lives in this library, which is never unloaded. If the call runs out of memory, the handler is not
    // registered; a child that uses its parent's CUDA state then gets errors from the driver, as without the library.
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

    /// The first use of a global, and of a descriptor that children must not inherit.
    fn use_for_the_first_time() {
        static GLOBAL: PerProcess<usize> = PerProcess::new(|| 1);
        GLOBAL.get();
        drop(tempfile::tempfile().and_then(Held::new));
    }

    /// Forks a child that runs `work` and exits. It is killed if it hangs.
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

    /// Runs in a process that has used nothing yet.
    #[test]
    #[ignore = "run by the test below"]
    fn forks_during_first_uses() {
        for round in 0..2000 {
            let program = fork(30, || {
                let first = thread::spawn(use_for_the_first_time);
                // Fork a little later in each round.
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

    /// Such a child would wait for a thread that it does not have.
    #[test]
    fn a_child_that_is_forked_during_a_first_use_does_not_hang() {
        let this = std::env::current_exe().unwrap();
        let ended = Command::new(this).args(["--ignored", "--exact", "fork::tests::forks_during_first_uses"]).output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stdout));
    }
}
