//! State that belongs to one process and must not survive `fork`.
//!
//! A CUDA context cannot be used in a forked child, and a lock that another thread held at the fork would stay locked forever.
//! So every global of this library lives in a [`PerProcess`], which a forked child finds empty and fills when it first needs
//! it. The parent's value stays in the child's memory, untouched and never dropped: dropping it would call the driver.
//!
//! For the same reason nothing in this library waits for a [`std::sync::Once`] in a plain `static`: after a fork in the middle
//! of one, the child would wait for a thread that it does not have.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, Ordering};
use std::time::{Duration, Instant};
use std::{ptr, thread};

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
        register(Some(before_fork), Some(after_fork), Some(in_child));
        COUNTING.store(true, Ordering::Release);
    }
}

extern "C" fn before_fork() {
    FORKING.fetch_add(1, Ordering::SeqCst);
    wait_until(Instant::now() + PATIENCE, || OPENING.load(Ordering::SeqCst) == 0);
}

extern "C" fn after_fork() {
    // Never below zero, even if it was registered in the middle of a fork.
    let _ = FORKING.fetch_update(Ordering::SeqCst, Ordering::Relaxed, |forking| forking.checked_sub(1));
}

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    note_process();
    // The other threads do not exist here.
    OPENING.store(0, Ordering::SeqCst);
    FORKING.store(0, Ordering::SeqCst);
}

/// Threads that have a [`ForkLock`].
static OPENING: AtomicU32 = AtomicU32::new(0);
/// Forks that have begun in this process and have not returned in it.
static FORKING: AtomicU32 = AtomicU32::new(0);

/// The longest that a fork waits for a [`ForkLock`], or its taker for a fork.
const PATIENCE: Duration = Duration::from_millis(100);

/// Kept from the call that opens a descriptor until the descriptor is [`Held`](crate::Held), and while one is closed. A fork of the program
/// waits for this, so that no child inherits a descriptor that its fork handler does not know. (Go's `syscall.ForkLock` keeps children from the same.)
///
/// Any number of threads may have it at once, and none of them may do anything long meanwhile. Neither side waits for more than 100 ms:
/// the program may fork in a signal handler that has interrupted the thread with the lock. Then the child inherits the descriptor.
#[derive(Debug)]
#[must_use]
pub struct ForkLock {
    generation: u32,
}

impl ForkLock {
    /// Takes it. If a fork is going on, waits for its end.
    pub fn take() -> Self {
        let lock = Self { generation: generation() };
        let mut deadline = None;
        loop {
            OPENING.fetch_add(1, Ordering::SeqCst);
            if FORKING.load(Ordering::SeqCst) == 0 {
                return lock;
            }
            let deadline = *deadline.get_or_insert_with(|| Instant::now() + PATIENCE);
            if Instant::now() >= deadline {
                return lock;
            }
            OPENING.fetch_sub(1, Ordering::SeqCst);
            wait_until(deadline, || FORKING.load(Ordering::SeqCst) == 0);
        }
    }
}

impl Drop for ForkLock {
    fn drop(&mut self) {
        // A child's count starts at zero.
        if self.generation == GENERATION.load(Ordering::Relaxed) {
            OPENING.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// Async-signal-safe.
fn wait_until(deadline: Instant, is_so: impl Fn() -> bool) {
    while !is_so() && Instant::now() < deadline {
        thread::sleep(Duration::from_micros(20));
    }
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
    register(None, None, Some(handler));
}

type Handler = unsafe extern "C" fn();

fn register(before: Option<Handler>, after: Option<Handler>, in_child: Option<Handler>) {
    // SAFETY: the handlers live in this library, which is never unloaded. If the call runs out of memory, they are not
    // registered; a child that uses its parent's CUDA state then gets errors from the driver, as without the library.
    unsafe { libc::pthread_atfork(before, after, in_child) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Held;
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;
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
        let lock = ForkLock::take();
        drop(tempfile::tempfile().and_then(|file| Held::new(file, &lock)));
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

    /// Runs in a process in which nobody else opens files.
    #[test]
    #[ignore = "run by the test below"]
    fn forks_while_descriptors_are_opened() {
        static ENDS: AtomicBool = AtomicBool::new(false);
        // A fork that has begun before the first use knows no handlers.
        use_for_the_first_time();
        let open = || {
            while !ENDS.load(Ordering::Relaxed) {
                let lock = ForkLock::take();
                let file = tempfile::tempfile().unwrap();
                let ours = file.metadata().unwrap();
                let held = Held::new(file, &lock).unwrap();
                drop(lock);
                assert_eq!(held.as_type::<File>().unwrap().metadata().unwrap().ino(), ours.ino());
            }
        };
        let threads = [thread::spawn(open), thread::spawn(open), thread::spawn(open)];
        let known: Vec<_> = (0..256).map(is_open).collect();
        for round in 0..300 {
            let child = fork(10, || {
                let is_new = |number: &i32| is_open(*number) && !known[*number as usize];
                // SAFETY: ends this child of the test.
                unsafe { libc::_exit((0..256).filter(is_new).count() as i32) };
            });
            assert!(ends_well(child), "round {round}: a child has inherited a descriptor");
        }
        ENDS.store(true, Ordering::Relaxed);
        for thread in threads {
            thread.join().unwrap();
        }
    }

    /// A child would keep a connection that its parent has just accepted, or the GPU memory behind a descriptor.
    #[test]
    fn a_child_inherits_nothing_that_is_being_opened() {
        alone("forks_while_descriptors_are_opened");
    }

    fn is_open(number: i32) -> bool {
        // SAFETY: touches no memory.
        unsafe { libc::fcntl(number, libc::F_GETFD) >= 0 }
    }

    /// A signal handler that has interrupted the thread with the lock may fork: neither the fork nor the thread waits for ever.
    #[test]
    fn a_fork_by_the_thread_with_the_lock_goes_on() {
        let lock = ForkLock::take();
        let begun = Instant::now();
        let child = fork(10, || drop(ForkLock::take()));
        assert!(ends_well(child) && begun.elapsed() >= PATIENCE);
        drop(lock);
        assert!(ends_well(fork(10, || drop(ForkLock::take()))));
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
        alone("forks_during_first_uses");
    }

    fn alone(test: &str) {
        let this = std::env::current_exe().unwrap();
        let ended = Command::new(this).args(["--ignored", "--exact", &format!("fork::tests::{test}")]).output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stdout));
    }
}
