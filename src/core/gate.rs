//! The gate: where the program's calls that start device work wait while it is held.
//!
//! Open, it costs a store to the thread's own cache line before and after a call, and a load of a word that nobody writes. So that
//! no fence is needed there, the closing side makes every thread of the process pass one (`membarrier`).
//!
//! Closing: new calls wait; calls inside finish; then the device's work is waited for, as at every pause. The library's own calls
//! do not come by here. A thread waits before it takes any lock of the driver's or the library's. Calls within calls pass: what a
//! thread inside does has to finish.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering, compiler_fence, fence};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};
use vramctl_host::PerProcess;

/// A gated function, by name. Its address marks a thread as inside it.
#[derive(Debug)]
pub struct Gated(pub &'static str);

/// A thread's mark: the function that it is inside, or null. In a cache line of its own.
#[repr(align(128))]
struct ThreadMark {
    inside: AtomicPtr<Gated>,
    /// Whether a thread has it.
    taken: AtomicBool,
}

/// Open (0), or closed by this process: a forked child takes its parent's gate for open.
static CLOSED: AtomicU32 = AtomicU32::new(OPEN);
const OPEN: u32 = 0;

/// What this process writes to close the gate.
fn generation() -> u32 {
    vramctl_host::generation() + 1
}

/// Whether threads must fence for themselves: the kernel has no `membarrier`.
static FENCE: AtomicBool = AtomicBool::new(false);

/// All marks of the process. They are never freed, and used again by later threads.
static MARKS: PerProcess<Mutex<Vec<&'static ThreadMark>>> = PerProcess::new(Mutex::default);

/// Threads that wait at the gate.
static WAITING: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static MARK: Cell<*const ThreadMark> = const { Cell::new(ptr::null()) };
    /// Gives the mark back when the thread ends.
    static OWNED: Cell<Option<Owned>> = const { Cell::new(None) };
}

struct Owned(&'static ThreadMark);

impl Drop for Owned {
    fn drop(&mut self) {
        let _ = MARK.try_with(|mark| mark.set(ptr::null()));
        // A thread that ends inside a call never comes out of it.
        self.0.inside.store(ptr::null_mut(), Ordering::Release);
        self.0.taken.store(false, Ordering::Release);
    }
}

/// Calls `function` once the gate is open.
#[inline]
pub fn pass<R>(gated: &'static Gated, call: impl FnOnce() -> R) -> R {
    let Some(mark) = my_mark() else { return call() };
    if !mark.inside.load(Ordering::Relaxed).is_null() {
        return call();
    }
    let name = ptr::from_ref(gated).cast_mut();
    loop {
        mark.inside.store(name, Ordering::Relaxed);
        if FENCE.load(Ordering::Relaxed) {
            fence(Ordering::SeqCst);
        } else {
            compiler_fence(Ordering::SeqCst);
        }
        if CLOSED.load(Ordering::Relaxed) == OPEN {
            break;
        }
        mark.inside.store(ptr::null_mut(), Ordering::Release);
        wait_at_gate();
    }
    // Whatever happens in the call, the thread is outside afterwards.
    let _leave = Leave(mark);
    call()
}

struct Leave(&'static ThreadMark);

impl Drop for Leave {
    #[inline]
    fn drop(&mut self) {
        self.0.inside.store(ptr::null_mut(), Ordering::Release);
    }
}

/// This thread's mark. `None` if the thread is ending: what it still calls is not held.
#[inline]
fn my_mark() -> Option<&'static ThreadMark> {
    let mark = MARK.try_with(Cell::get).ok()?;
    // SAFETY: null, or one of `MARKS`, which are never freed.
    unsafe { mark.as_ref() }.or_else(take_mark)
}

#[cold]
fn take_mark() -> Option<&'static ThreadMark> {
    let mut marks = marks();
    let free = |mark: &&&'static ThreadMark| mark.taken.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    let found = marks.iter().find(free).copied();
    let mark = found.unwrap_or_else(|| {
        let new: &'static ThreadMark = Box::leak(Box::new(ThreadMark { inside: AtomicPtr::default(), taken: AtomicBool::new(true) }));
        marks.push(new);
        new
    });
    drop(marks);
    if OWNED.try_with(|owned| owned.set(Some(Owned(mark)))).is_err() {
        mark.taken.store(false, Ordering::Release);
        return None;
    }
    MARK.set(mark);
    Some(mark)
}

fn marks() -> MutexGuard<'static, Vec<&'static ThreadMark>> {
    MARKS.get().lock().unwrap_or_else(PoisonError::into_inner)
}

#[cold]
fn wait_at_gate() {
    let closed = CLOSED.load(Ordering::Acquire);
    if closed == OPEN {
        return;
    }
    if closed != generation() {
        // A forked child, whose parent was held.
        let _ = CLOSED.compare_exchange(closed, OPEN, Ordering::AcqRel, Ordering::Relaxed);
        return;
    }
    WAITING.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the word lives as long as the process. A signal or a spurious end makes the caller look again.
    unsafe {
        let nothing = ptr::null::<libc::timespec>();
        libc::syscall(libc::SYS_futex, CLOSED.as_ptr(), libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG, closed, nothing);
    }
    WAITING.fetch_sub(1, Ordering::Relaxed);
}

/// Whether the program is held: the gate stays closed behind its last closer. Whoever closes the gate has the lock until it is done,
/// so that nobody opens it meanwhile.
static CLOSER: PerProcess<Mutex<bool>> = PerProcess::new(Mutex::default);

/// The closed gate. Opens when dropped, unless the program is held.
#[derive(Debug)]
pub struct Closed(MutexGuard<'static, bool>);

/// Calls that have not come out of the driver in time, with how many threads are in each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stuck(BTreeMap<&'static str, usize>);

impl fmt::Display for Stuck {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inside: Vec<_> = self.0.iter().map(|(name, threads)| format!("{threads} in {name}")).collect();
        write!(out, "threads have not come out of the driver: {}", inside.join(", "))
    }
}

/// Closes the gate, and waits until nobody is inside, at most until `deadline`. After an error it is as it was before.
pub fn close(deadline: Instant) -> Result<Closed, Stuck> {
    let closed = shut(CLOSER.get().lock().unwrap_or_else(PoisonError::into_inner));
    closed.wait_until_empty(deadline)?;
    Ok(closed)
}

/// Closes the gate without waiting for anything: from now on, new calls wait. `None` if somebody else is closing it.
pub fn try_shut() -> Option<Closed> {
    match CLOSER.get().try_lock() {
        Ok(turn) => Some(shut(turn)),
        Err(TryLockError::Poisoned(turn)) => Some(shut(turn.into_inner())),
        Err(TryLockError::WouldBlock) => None,
    }
}

fn shut(turn: MutexGuard<'static, bool>) -> Closed {
    let closed = Closed(turn);
    CLOSED.store(generation(), Ordering::SeqCst);
    make_all_threads_fence();
    closed
}

/// The functions that threads are inside.
fn inside() -> BTreeMap<&'static str, usize> {
    let mut names = BTreeMap::new();
    for mark in &*marks() {
        // SAFETY: null, or a static.
        if let Some(gated) = unsafe { mark.inside.load(Ordering::Acquire).as_ref() } {
            *names.entry(gated.0).or_default() += 1;
        }
    }
    names
}

impl Closed {
    /// Waits until nobody is inside, at most until `deadline`.
    pub fn wait_until_empty(&self, deadline: Instant) -> Result<(), Stuck> {
        loop {
            let inside = inside();
            if inside.is_empty() {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(Stuck(inside));
            }
            thread::sleep(Duration::from_micros(50));
        }
    }

    /// Leaves the gate closed: the program is held until [`let_go`].
    pub fn keep(mut self) {
        *self.0 = true;
    }
}

impl Drop for Closed {
    fn drop(&mut self) {
        if !*self.0 {
            open();
        }
    }
}

/// Opens the gate for a held program, unless there is still a reason to hold it. Does nothing while somebody is closing it, who
/// looks for reasons afterwards.
pub fn let_go(is_reason: impl FnOnce() -> bool) {
    if is_held()
        && let Ok(mut held) = CLOSER.get().try_lock()
        && *held
        && !is_reason()
    {
        *held = false;
        open();
    }
}

fn open() {
    CLOSED.store(OPEN, Ordering::SeqCst);
    // SAFETY: as in `wait_at_gate`.
    unsafe {
        libc::syscall(libc::SYS_futex, CLOSED.as_ptr(), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, i32::MAX);
    }
}

/// Whether the gate is closed: the program is held, or about to be.
pub fn is_held() -> bool {
    CLOSED.load(Ordering::Acquire) == generation()
}

/// How many threads wait at the gate.
pub fn waiting() -> usize {
    if is_held() { WAITING.load(Ordering::Relaxed) } else { 0 }
}

/// Afterwards, a thread that has not seen the gate closed is seen inside.
fn make_all_threads_fence() {
    const REGISTER: libc::c_long = 1 << 4; // MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED
    const EXPEDITED: libc::c_long = 1 << 3; // MEMBARRIER_CMD_PRIVATE_EXPEDITED
    // SAFETY: no pointers. Registering again does nothing.
    let fenced =
        unsafe { libc::syscall(libc::SYS_membarrier, REGISTER, 0, 0) == 0 && libc::syscall(libc::SYS_membarrier, EXPEDITED, 0, 0) == 0 };
    if !fenced {
        // Before Linux 4.14, and where it is forbidden. Threads fence from now on; those that are between their store and their
        // load now have long passed it when this returns.
        FENCE.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        thread::sleep(Duration::from_millis(10));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    static CALL: Gated = Gated("call");

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(5)
    }

    /// One test at a time: a process has one gate.
    fn turn() -> MutexGuard<'static, ()> {
        static TURN: Mutex<()> = Mutex::new(());
        TURN.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The invariant: while the gate is closed, nobody is inside.
    #[test]
    fn nobody_is_inside_while_it_is_closed() {
        let _turn = turn();
        let (working, stop) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let work = |_| {
            let (working, stop) = (Arc::clone(&working), Arc::clone(&stop));
            thread::spawn(move || {
                let mut calls = 0_u64;
                while !stop.load(Ordering::Relaxed) {
                    pass(&CALL, || {
                        working.fetch_add(1, Ordering::SeqCst);
                        // A call within a call must not wait for the gate: the outer one would never end.
                        pass(&CALL, || working.fetch_sub(1, Ordering::SeqCst));
                    });
                    calls += 1;
                }
                calls
            })
        };
        let threads: Vec<_> = (0..4).map(work).collect();
        for round in 0..300 {
            let closed = close(soon()).unwrap();
            for _ in 0..20 {
                assert_eq!(working.load(Ordering::SeqCst), 0, "round {round}");
                thread::yield_now();
            }
            drop(closed);
            if round % 8 == 0 {
                thread::sleep(Duration::from_millis(1));
            }
        }
        stop.store(true, Ordering::Relaxed);
        assert!(threads.into_iter().map(|thread| thread.join().unwrap()).sum::<u64>() > 0);
    }

    #[test]
    fn who_does_not_come_out_is_named_and_the_gate_opens_again() {
        let _turn = turn();
        let release = Arc::new(AtomicBool::new(false));
        let inside = {
            let release = Arc::clone(&release);
            thread::spawn(move || {
                pass(&CALL, || {
                    while !release.load(Ordering::Relaxed) {
                        thread::yield_now();
                    }
                });
            })
        };
        while super::inside().is_empty() {
            thread::yield_now();
        }
        let stuck = close(Instant::now() + Duration::from_millis(20)).unwrap_err();
        assert_eq!(stuck.to_string(), "threads have not come out of the driver: 1 in call");
        assert!(!is_held());
        release.store(true, Ordering::Relaxed);
        inside.join().unwrap();
        drop(close(soon()).unwrap());
    }

    #[test]
    fn a_held_program_waits_until_it_is_let_go() {
        let _turn = turn();
        close(soon()).unwrap().keep();
        assert!(is_held());
        let passed = Arc::new(AtomicBool::new(false));
        let waiting_thread = {
            let passed = Arc::clone(&passed);
            thread::spawn(move || pass(&CALL, || passed.store(true, Ordering::SeqCst)))
        };
        while waiting() == 0 {
            thread::yield_now();
        }
        // A second hold, given up, leaves the first in place.
        drop(close(soon()).unwrap());
        assert!(is_held() && !passed.load(Ordering::SeqCst));
        let_go(|| true);
        assert!(is_held(), "there is a reason");
        let_go(|| false);
        waiting_thread.join().unwrap();
        assert!(passed.load(Ordering::SeqCst) && !is_held());
    }

    /// The closer must not wait for threads that no longer exist.
    #[test]
    fn a_thread_that_ends_inside_a_call_is_not_waited_for() {
        extern "C" fn end(_: *mut libc::c_void) -> *mut libc::c_void {
            pass(&CALL, || ());
            // As a thread that is cancelled within a call: its mark still says inside.
            my_mark().unwrap().inside.store(ptr::from_ref(&CALL).cast_mut(), Ordering::SeqCst);
            ptr::null_mut()
        }
        let _turn = turn();
        let mut thread = 0;
        // SAFETY: the function needs nothing, and the thread is joined.
        unsafe {
            assert_eq!(libc::pthread_create(&raw mut thread, ptr::null(), end, ptr::null_mut()), 0);
            assert_eq!(libc::pthread_join(thread, ptr::null_mut()), 0);
        }
        drop(close(soon()).unwrap());
    }

    /// A child is forked while the program is held: its calls must reach the driver, which tells it that it cannot use CUDA.
    #[test]
    fn a_forked_child_is_not_held() {
        let _turn = turn();
        let closed = close(soon()).unwrap();
        // SAFETY: the child leaves by `_exit`, or by the alarm.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            unsafe {
                libc::alarm(10);
                pass(&CALL, || libc::_exit(0));
            }
        }
        let mut status = -1;
        // SAFETY: a child of this process.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0);
        drop(closed);
    }
}
