//! The gate: while the program is held, its calls that start device work wait here.
//!
//! An open gate costs two stores to the thread's own cache line, one load of a word that nobody writes, and one store after the call
//! (`latch.rs`). No fence is needed there, because the closing side makes every thread of the process execute one (`membarrier`).
//!
//! Closing: new calls wait; calls inside finish; then, as at every pause, the device's work does. The library's own calls are not
//! gated. A thread waits before it takes any lock of the driver or the library. Nested calls pass: a call that is inside must be able to
//! finish.
//!
//! A closed gate can admit a number of calls ([`Closed::admit`]): if the ranks of a job are held at different points, those that are behind make
//! some more calls, so that the work of all ends.
//!
//! Not covered: a fiber that is inside while its thread ends.

pub mod away;
mod closer;
mod latch;
#[cfg(test)]
mod model;
mod sync;
mod threads;
pub mod watcher;

pub use closer::Closed;
use closer::{Closer, Purpose};
use latch::Latch;
use std::collections::BTreeMap;
use std::fmt;
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use vramctl_host::{PerProcess, Unpoison, exit, stack};

/// A gated function. Its address is the mark of a thread that is inside it.
#[derive(Debug)]
#[repr(align(2))]
pub struct Gated(pub &'static str);

/// What the thread that ends the process is inside for good.
static THE_END: Gated = Gated("the program's end");

static LATCH: Latch = Latch(AtomicU32::new(latch::OPEN));

/// That of [`away`].
static AWAY: Latch = Latch(AtomicU32::new(latch::OPEN));

/// The thread is inside until this is dropped.
#[derive(Debug)]
pub struct Inside(&'static latch::ThreadMark);

/// Fast path: goes inside if the gate is open and the thread already has a mark. Otherwise the caller uses [`pass`].
#[inline]
pub fn enter(gated: &'static Gated) -> Option<Inside> {
    let mark = threads::known_mark()?;
    if mark.enter(&LATCH, number(gated)) { Some(Inside(mark)) } else { None }
}

impl Drop for Inside {
    #[inline]
    fn drop(&mut self) {
        self.0.leave();
    }
}

/// Calls `make` once the gate is open.
pub fn pass<R>(gated: &'static Gated, make: impl FnOnce() -> R) -> R {
    wait_at_the_end();
    threads::with_mark(|mark| match mark {
        Some(mark) => mark.pass(&LATCH, number(gated), make),
        None => make(),
    })
}

/// Waits until the gate is open. `false`, at once, in a call that is inside already, and in the thread that ends the process.
pub fn wait(gated: &'static Gated) -> bool {
    wait_at_the_end();
    threads::with_mark(|mark| {
        let outside = mark.filter(|mark| !mark.is_inside());
        outside.inspect(|mark| mark.pass(&LATCH, number(gated), || ())).is_some()
    })
}

/// Whether this thread is inside a gated call.
pub fn is_inside() -> bool {
    threads::with_mark(|mark| mark.is_some_and(latch::ThreadMark::is_inside))
}

/// Calls `make`, whose calls all pass even if the gate is closed: for the library's own work that goes through hooked entries.
pub fn unheld<R>(make: impl FnOnce() -> R) -> R {
    static UNHELD: Gated = Gated("NCCL, for the library");
    threads::with_mark(|mark| match mark {
        Some(mark) => mark.pass_unheld(number(&UNHELD), make),
        None => make(),
    })
}

fn number(gated: &'static Gated) -> usize {
    ptr::from_ref(gated).expose_provenance()
}

static CLOSER: PerProcess<Closer> = PerProcess::new(Closer::new);

/// Calls that have not returned from the driver in time, with the ids of the threads in each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stuck(BTreeMap<&'static str, Vec<u32>>);

impl fmt::Display for Stuck {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// How many threads of a call to list.
        const SHOWN: usize = 4;
        let shown = |thread: &u32| match stack::name_of_thread(*thread) {
            Some(name) => format!("{thread} {name}"),
            None => thread.to_string(),
        };
        let inside = self.0.iter().map(|(call, threads)| {
            let mut who: Vec<_> = threads.iter().take(SHOWN).map(shown).collect();
            who.extend((threads.len() > SHOWN).then(|| "…".to_owned()));
            format!("{} in {call} ({})", threads.len(), who.join(", "))
        });
        write!(out, "threads have not returned from the driver: {}", inside.collect::<Vec<_>>().join(", "))
    }
}

/// Closes the gate to hold the program, without waiting for calls inside: from now on, new calls wait. `None` if another closer has it until
/// the deadline.
pub fn close(deadline: Instant) -> Option<Closed<'static>> {
    close_for(Purpose::Hold, deadline)
}

/// Closes the gate for an instant, which is no hold: the status does not show it. `None` if another closer has it.
pub fn close_for_a_moment() -> Option<Closed<'static>> {
    close_for(Purpose::Moment, Instant::now())
}

fn close_for(purpose: Purpose, deadline: Instant) -> Option<Closed<'static>> {
    threads::start_clean_in_children();
    let_the_end_pass();
    CLOSER.get().close(&LATCH, purpose, deadline)
}

/// A thread that ends a held program runs its exit handlers and destructors: if one of them waited at the gate, the program would not
/// end before somebody resumed it. Unless its calls do that. Registered as late as this, so that it runs before those of the program.
fn let_the_end_pass() {
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    if !REGISTERED.swap(true, Ordering::Relaxed) {
        exit::at_exit(|| if is_opened_by_calls() { threads::begin_the_end() } else { threads::stay_inside() });
    }
}

/// Whether a call that waits at the closed gate has somebody open it.
static OPENED_BY_CALLS: AtomicBool = AtomicBool::new(false);

fn is_opened_by_calls() -> bool {
    OPENED_BY_CALLS.load(Ordering::Relaxed)
}

/// From now on, a call that waits at the closed gate has somebody open it, or no longer.
pub(crate) fn set_opened_by_calls(is_so: bool) {
    OPENED_BY_CALLS.store(is_so, Ordering::Relaxed);
}

/// On the thread that ends the process, its call opens the gate. If that takes too long, the program ends without: its calls pass.
fn wait_at_the_end() {
    const TOO_LONG: Duration = Duration::from_secs(30);
    const LOOK_EVERY: Duration = Duration::from_millis(1);
    if !threads::is_the_last() || !LATCH.is_closed() {
        return;
    }
    let Some(mark) = threads::mark().filter(|mark| !mark.is_inside()) else { return };
    let begun = Instant::now();
    mark.wait(|| {
        while LATCH.is_closed() && is_opened_by_calls() && begun.elapsed() < TOO_LONG {
            watcher::wake();
            thread::sleep(LOOK_EVERY);
        }
    });
    threads::stay_inside();
}

/// The functions that threads are inside, with the ids of the threads.
fn inside() -> BTreeMap<&'static str, Vec<u32>> {
    calls_of(threads::marks())
}

fn calls_of(marks: impl Iterator<Item = (&'static latch::ThreadMark, u32)>) -> BTreeMap<&'static str, Vec<u32>> {
    let mut calls = BTreeMap::<_, Vec<_>>::new();
    for (mark, thread) in marks {
        let Some(call) = mark.call() else { continue };
        // SAFETY: null, or a static.
        let gated = unsafe { ptr::with_exposed_provenance::<Gated>(call).as_ref() };
        calls.entry(gated.map_or("a call within a call", |gated| gated.0)).or_default().push(thread);
    }
    calls
}

impl Closed<'_> {
    /// Waits until nobody is inside, at most until `deadline`, and only while `wanted` says so.
    pub fn wait_until_empty(&self, deadline: Instant, wanted: &mut dyn FnMut() -> bool) -> Result<(), Stuck> {
        /// How often to ask.
        const ASK_EVERY: Duration = Duration::from_millis(20);
        let mut asked = Instant::now();
        loop {
            let inside = inside();
            if inside.is_empty() {
                return Ok(());
            }
            let now = Instant::now();
            if now >= deadline {
                return Err(Stuck(inside));
            }
            if now - asked >= ASK_EVERY {
                if !wanted() {
                    return Err(Stuck(inside));
                }
                asked = now;
            }
            thread::sleep(Duration::from_micros(50));
        }
    }
}

/// Opens the gate for a held program, unless there is still a reason to hold it.
pub fn let_go(is_reason: impl FnOnce() -> bool) {
    if let Some(closer) = CLOSER.existing() {
        closer.let_go(&LATCH, is_reason);
    }
}

/// Whether the program is held, or about to be.
pub fn is_held() -> bool {
    LATCH.is_closed() && CLOSER.existing().is_some_and(Closer::is_holding)
}

/// How long, at least, no call of the program has passed, been inside or waited. The time counts from the first question, and anew from each that
/// finds such a call now or since the question before.
pub fn idle_for() -> Duration {
    static SINCE: PerProcess<Mutex<Option<Instant>>> = PerProcess::new(Mutex::default);
    let mut since = SINCE.get().lock().unpoisoned();
    let has_passed = LATCH.watch();
    if has_passed || threads::marks().any(|(mark, _)| mark.is_waiting() || mark.call().is_some()) {
        *since = Some(Instant::now());
        return Duration::ZERO;
    }
    since.map_or(Duration::ZERO, |since| since.elapsed())
}

/// Has [`is_still`] say from now on whether a call has passed since. `false`: a call is inside, or somebody else has the gate closed.
pub fn begin_stillness() -> bool {
    /// How long calls may take to end. Longer ones wait for something.
    const CALLS: Duration = Duration::from_millis(1);
    let Some(closed) = close_for_a_moment() else { return false };
    let is_empty = closed.wait_until_empty(Instant::now() + CALLS, &mut || true).is_ok();
    if is_empty {
        LATCH.begin_stillness();
    }
    is_empty
}

/// Whether no call has passed since the last [`begin_stillness`]. Sure if the gate is closed and nobody is inside; else, this may just have
/// changed.
pub fn is_still() -> bool {
    LATCH.is_still()
}

/// Something counts as a call that does not pass.
pub fn note_call() {
    LATCH.note();
}

/// How many threads of a held program wait at the gate.
pub fn waiting() -> usize {
    if is_held() { threads::marks().filter(|(mark, _)| mark.is_waiting()).count() } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::sync::{Arc, MutexGuard};

    static CALL: Gated = Gated("call");

    fn close_soon() -> Closed<'static> {
        let closed = close(soon()).unwrap();
        closed.wait_until_empty(soon(), &mut || true).unwrap();
        closed
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(100)
    }

    /// One test at a time: a process has one gate.
    fn turn() -> MutexGuard<'static, ()> {
        static TURN: Mutex<()> = Mutex::new(());
        TURN.lock().unpoisoned()
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
                    call(|| {
                        working.fetch_add(1, Ordering::SeqCst);
                        // A nested call must not wait at the gate: the outer one would never end.
                        call(|| working.fetch_sub(1, Ordering::SeqCst));
                    });
                    calls += 1;
                }
                calls
            })
        };
        let threads: Vec<_> = (0..4).map(work).collect();
        for round in 0..300 {
            let closed = close_soon();
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

    /// What entries do: the fast path if the gate is open, else the slow one.
    fn call<R>(make: impl FnOnce() -> R) -> R {
        match enter(&CALL) {
            Some(_inside) => make(),
            None => pass(&CALL, make),
        }
    }

    #[test]
    fn a_thread_stays_inside_during_a_nested_call() {
        let _turn = turn();
        call(|| ());
        call(|| {
            call(|| assert_eq!(inside().len(), 1));
            assert_eq!(inside(), BTreeMap::from([("call", vec![stack::thread_id()])]));
        });
        assert!(inside().is_empty());
    }

    #[test]
    fn a_call_that_does_not_return_is_named_and_the_gate_opens_again() {
        let _turn = turn();
        let release = Arc::new(AtomicBool::new(false));
        let inside = {
            let release = Arc::clone(&release);
            let work = move || {
                pass(&CALL, || {
                    while !release.load(Ordering::Relaxed) {
                        thread::yield_now();
                    }
                });
            };
            thread::Builder::new().name("a-thread".into()).spawn(work).unwrap()
        };
        while super::inside().is_empty() {
            thread::yield_now();
        }
        let id = super::inside()["call"][0];
        let stuck = close(soon()).unwrap().wait_until_empty(Instant::now() + Duration::from_millis(20), &mut || true).unwrap_err();
        assert_eq!(stuck.to_string(), format!("threads have not returned from the driver: 1 in call ({id} a-thread)"));
        assert!(!is_held());
        release.store(true, Ordering::Relaxed);
        inside.join().unwrap();
        drop(close_soon());
    }

    #[test]
    fn a_held_program_waits_until_it_is_let_go() {
        let _turn = turn();
        close_soon().keep();
        assert!(is_held());
        let passed = Arc::new(AtomicBool::new(false));
        let waiting_thread = {
            let passed = Arc::clone(&passed);
            thread::spawn(move || {
                // As if it had made calls before.
                threads::mark();
                call(|| passed.store(true, Ordering::SeqCst));
                inside()
            })
        };
        while waiting() == 0 {
            thread::yield_now();
        }
        // A second hold, given up, leaves the first in place.
        drop(close_soon());
        assert!(is_held() && !passed.load(Ordering::SeqCst));
        let_go(|| true);
        assert!(is_held(), "there is a reason");
        let_go(|| false);
        assert_eq!(waiting_thread.join().unwrap(), BTreeMap::new(), "nobody waits for a thread that has waited itself");
        assert!(passed.load(Ordering::SeqCst) && !is_held());
    }

    /// A destructor of the program's may run after the thread's own variables are gone.
    #[test]
    fn the_last_calls_of_a_thread_wait_too() {
        static MADE: AtomicU32 = AtomicU32::new(0);
        extern "C" fn last(_: *mut libc::c_void) {
            call(|| call(|| _ = MADE.fetch_add(1, Ordering::SeqCst)));
            call(|| _ = MADE.fetch_add(1, Ordering::SeqCst));
        }
        let _turn = turn();
        let mut key = 0;
        // SAFETY: the destructor stays valid.
        assert_eq!(unsafe { libc::pthread_key_create(&raw mut key, Some(last)) }, 0);
        let (begun, go) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let thread = {
            let (begun, go) = (Arc::clone(&begun), Arc::clone(&go));
            thread::spawn(move || {
                call(|| ());
                // SAFETY: the key exists. Its value only has to be other than null.
                assert_eq!(unsafe { libc::pthread_setspecific(key, (&raw const MADE).cast()) }, 0);
                begun.store(true, Ordering::SeqCst);
                while !go.load(Ordering::SeqCst) {
                    thread::yield_now();
                }
            })
        };
        while !begun.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        close_soon().keep();
        go.store(true, Ordering::SeqCst);
        while waiting() == 0 {
            thread::yield_now();
        }
        assert_eq!(MADE.load(Ordering::SeqCst), 0);
        let_go(|| false);
        thread.join().unwrap();
        assert_eq!((MADE.load(Ordering::SeqCst), inside()), (2, BTreeMap::new()));
    }

    /// The closer waits for the outer call, which could not finish.
    #[test]
    fn a_nested_call_of_an_ending_thread_passes_a_closed_gate() {
        static INSIDE: AtomicBool = AtomicBool::new(false);
        static MADE: AtomicU32 = AtomicU32::new(0);
        extern "C" fn last(_: *mut libc::c_void) {
            call(|| {
                INSIDE.store(true, Ordering::SeqCst);
                while !LATCH.is_closed() {
                    thread::yield_now();
                }
                call(|| call(|| _ = MADE.fetch_add(1, Ordering::SeqCst)));
            });
        }
        let _turn = turn();
        let mut key = 0;
        // SAFETY: the destructor stays valid.
        assert_eq!(unsafe { libc::pthread_key_create(&raw mut key, Some(last)) }, 0);
        let thread = thread::spawn(move || {
            call(|| ());
            // SAFETY: the key exists. Its value only has to be other than null.
            assert_eq!(unsafe { libc::pthread_setspecific(key, (&raw const MADE).cast()) }, 0);
        });
        while !INSIDE.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        let closed = close(soon()).unwrap();
        let emptied = closed.wait_until_empty(soon(), &mut || true);
        drop(closed);
        thread.join().unwrap();
        emptied.unwrap();
        assert_eq!((MADE.load(Ordering::SeqCst), inside()), (1, BTreeMap::new()));
    }

    #[test]
    fn an_ending_thread_has_a_mark_for_each_call() {
        static STEP: AtomicU32 = AtomicU32::new(0);
        fn come_to(step: u32) {
            while STEP.load(Ordering::SeqCst) < step {
                thread::yield_now();
            }
        }
        fn stay(step: u32) {
            call(|| {
                STEP.store(step, Ordering::SeqCst);
                come_to(4);
            });
        }
        extern "C" fn last(_: *mut libc::c_void) {
            call(|| ());
            STEP.store(1, Ordering::SeqCst);
            come_to(2);
            stay(3);
        }
        let _turn = turn();
        let mut key = 0;
        // SAFETY: the destructor stays valid.
        assert_eq!(unsafe { libc::pthread_key_create(&raw mut key, Some(last)) }, 0);
        let ending = thread::spawn(move || {
            call(|| ());
            // SAFETY: the key exists. Its value only has to be other than null.
            assert_eq!(unsafe { libc::pthread_setspecific(key, (&raw const STEP).cast()) }, 0);
        });
        come_to(1);
        // It gets the mark that the other has given back.
        let other = thread::spawn(|| stay(2));
        come_to(3);
        let both = inside();
        STEP.store(4, Ordering::SeqCst);
        ending.join().unwrap();
        other.join().unwrap();
        assert_eq!(both.values().flatten().count(), 2, "{both:?}");
    }

    #[test]
    fn a_call_ends_the_programs_rest_once() {
        let _turn = turn();
        call(|| ());
        idle_for();
        assert!(!LATCH.watch(), "nobody has come since");
        assert!(enter(&CALL).is_none(), "it looks closer");
        call(|| call(|| ()));
        assert!(enter(&CALL).is_some(), "and passes again as if nothing were");
        assert_eq!(idle_for(), Duration::ZERO);
    }

    #[test]
    fn a_call_breaks_the_stillness_however_it_passes() {
        let _turn = turn();
        call(|| ());
        assert!(begin_stillness());
        note_call();
        idle_for();
        drop(close_soon());
        assert!(is_still(), "nothing has passed");
        call(|| ());
        assert!(!is_still());
        assert!(!call(begin_stillness), "a call is inside");

        let closed = close_soon();
        assert!(!begin_stillness(), "somebody else has the gate closed");
        closed.keep();
        assert!(begin_stillness(), "it is held");
        let closed = close_soon();
        let thread = thread::spawn(|| call(|| ()));
        closed.admit(1, Duration::from_secs(100));
        thread.join().unwrap();
        assert!(!is_still(), "it was let pass");
        drop(closed);
        let_go(|| false);
        assert!(!is_held());
    }

    #[test]
    fn so_many_calls_pass_a_closed_gate() {
        let _turn = turn();
        let closed = close_soon();
        let calls = Arc::new(AtomicUsize::new(0));
        let thread = {
            let calls = Arc::clone(&calls);
            thread::spawn(move || (0..5).for_each(|_| call(|| _ = calls.fetch_add(1, Ordering::SeqCst))))
        };
        for passed in [1, 3] {
            closed.admit(passed / 2 + 1, Duration::from_secs(100));
            closed.wait_until_empty(soon(), &mut || true).unwrap();
            assert_eq!(calls.load(Ordering::SeqCst), passed as usize);
        }
        while waiting() == 0 {
            thread::yield_now();
        }
        assert_eq!(calls.load(Ordering::SeqCst), 3);
        drop(closed);
        thread.join().unwrap();
        close_soon().admit(7, Duration::ZERO);
        assert!(!LATCH.is_closed() && !LATCH.admits());
    }

    /// A moment's work right after it could be in the way of the program's next call.
    #[test]
    fn a_call_that_passes_a_closed_gate_ends_the_programs_rest() {
        let _turn = turn();
        call(|| ());
        let closed = close_soon();
        idle_for();
        assert!(!LATCH.watch(), "nobody has come since");
        let thread = thread::spawn(|| call(|| ()));
        closed.admit(1, Duration::from_secs(100));
        thread.join().unwrap();
        drop(closed);
        assert_eq!(idle_for(), Duration::ZERO);
    }

    /// While the library closes the gate for a moment, calls wait as in a hold, but the status shows no hold.
    #[test]
    fn a_moment_is_no_hold() {
        let _turn = turn();
        let is_somebody_waiting = || threads::marks().any(|(mark, _)| mark.is_waiting());
        let moment = close_for_a_moment().unwrap();
        let waiting_thread = thread::spawn(|| call(|| ()));
        while !is_somebody_waiting() {
            thread::yield_now();
        }
        assert_eq!((is_held(), waiting()), (false, 0));
        assert!(close_for_a_moment().is_none(), "one at a time");
        thread::scope(|scope| {
            // With no time to wait, either.
            let holding = scope.spawn(|| close(Instant::now()).expect("a moment ends by itself").keep());
            thread::sleep(Duration::from_millis(10));
            drop(moment);
            holding.join().unwrap();
        });
        assert!(is_held());
        let moment = close_for_a_moment().unwrap();
        assert!(is_held(), "the program stays held in a moment");
        let_go(|| false);
        assert!(!is_held(), "and is let go in one");
        drop(moment);
        waiting_thread.join().unwrap();
        assert!(!LATCH.is_closed());
    }

    /// The closer must not wait for threads that no longer exist.
    #[test]
    fn a_thread_that_ends_inside_a_call_is_not_waited_for() {
        extern "C" fn end(_: *mut libc::c_void) -> *mut libc::c_void {
            pass(&CALL, || ());
            // Like a thread that is cancelled inside a call: its mark still says inside.
            threads::mark().unwrap().want(number(&CALL));
            ptr::null_mut()
        }
        let _turn = turn();
        let mut thread = 0;
        // SAFETY: the function needs nothing, and the thread is joined.
        unsafe {
            assert_eq!(libc::pthread_create(&raw mut thread, ptr::null(), end, ptr::null_mut()), 0);
            assert_eq!(libc::pthread_join(thread, ptr::null_mut()), 0);
        }
        drop(close_soon());
    }

    /// A child is forked while the program is held: its calls must reach the driver, which answers that it cannot use CUDA.
    #[test]
    fn a_forked_child_is_not_held() {
        let _turn = turn();
        let closed = close_soon();
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
