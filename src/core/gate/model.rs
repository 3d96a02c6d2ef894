//! Explores the latch and its closer in all interleavings, and with every value that the memory model allows each thread to see.
//!
//! `membarrier` is modelled as its manual describes it: a fence in every thread, so the light fence is a fence here. The model does not
//! check that the kernel does this nor, without `membarrier`, that a store is visible to other processors within 10 ms.

mod sync {
    pub use loom::sync::atomic::{AtomicU32, AtomicUsize, Ordering, fence};
    pub use loom::sync::{Condvar, Mutex, MutexGuard};
    use std::cell::Cell;

    std::thread_local! {
        /// Removes the fences, to check that the model finds the error.
        pub static NO_FENCES: Cell<bool> = const { Cell::new(false) };
    }

    pub fn light_fence() {
        if !NO_FENCES.get() {
            fence(Ordering::SeqCst);
        }
    }

    pub fn heavy_fence() -> bool {
        light_fence();
        true
    }

    pub fn rest() {}

    pub fn tell_of_waiter() {}

    /// The kernel's futex queue: the word is checked under the queue's lock.
    pub struct Futex {
        lock: Mutex<()>,
        changed: Condvar,
    }

    loom::lazy_static! {
        static ref FUTEX: Futex = Futex { lock: Mutex::new(()), changed: Condvar::new() };
    }

    pub fn wait(word: &AtomicU32, value: u32) {
        let lock = FUTEX.lock.lock().unwrap();
        if word.load(Ordering::SeqCst) == value {
            drop(FUTEX.changed.wait(lock).unwrap());
        }
    }

    pub fn wake(_: &AtomicU32) {
        drop(FUTEX.lock.lock().unwrap());
        FUTEX.changed.notify_all();
    }
}

#[path = "closer.rs"]
#[allow(clippy::duplicate_mod)]
mod closer;
#[path = "latch.rs"]
#[allow(clippy::duplicate_mod, dead_code)]
mod latch;

use closer::{Closer, Purpose};
use latch::{ADMITTED, FENCED, Latch, OPEN, ThreadMark};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use loom::thread;
use std::time::{Duration, Instant};

/// A program of two threads, and the memory that a pause takes away.
struct Program {
    latch: Latch,
    closer: Closer,
    marks: [ThreadMark; 2],
    /// Used inside the gate, and by the closer once nobody is inside. Loom detects concurrent and unordered uses.
    memory: UnsafeCell<()>,
    /// What is paused.
    paused: AtomicUsize,
}

const CALL: usize = 2;
const OTHER_CALL: usize = 4;

impl Program {
    fn new(word: u32) -> Arc<Self> {
        let (latch, closer, marks) = (Latch(AtomicU32::new(word)), Closer::new(), [ThreadMark::new(), ThreadMark::new()]);
        Arc::new(Self { latch, closer, marks, memory: UnsafeCell::new(()), paused: AtomicUsize::new(0) })
    }

    fn work(&self) {
        self.memory.with(|_| ());
    }

    /// A call as the entries make it.
    fn call(&self, thread: usize, work: impl FnOnce()) {
        let mark = &self.marks[thread];
        if mark.enter(&self.latch, CALL) {
            work();
            mark.leave();
        } else {
            mark.pass(&self.latch, CALL, work);
        }
    }

    fn close_for(&self, purpose: Purpose) -> closer::Closed<'_> {
        self.closer.close(&self.latch, purpose, Instant::now() + Duration::from_secs(3600)).unwrap()
    }

    fn close(&self) -> closer::Closed<'_> {
        self.close_for(Purpose::Hold)
    }

    /// What a closer does if nobody is inside; threads may stay inside longer than it waits.
    fn take_if_nobody_is_inside(&self) {
        if self.marks.iter().all(|mark| mark.call().is_none()) {
            self.memory.with_mut(|_| ());
        }
    }

    /// A closer from beginning to end.
    fn close_and_take(&self) {
        let _closed = self.close();
        self.take_if_nobody_is_inside();
    }

    fn let_go(&self) {
        self.closer.let_go(&self.latch, || self.paused.load(Ordering::Acquire) != 0);
    }
}

fn spawn(program: &Arc<Program>, work: impl FnOnce(&Program) + 'static) -> thread::JoinHandle<()> {
    let program = Arc::clone(program);
    thread::spawn(move || work(&program))
}

fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(model);
}

#[test]
fn nobody_is_inside_while_it_is_closed() {
    explore(|| {
        let program = Program::new(OPEN);
        let threads = [0, 1].map(|thread| spawn(&program, move |program| program.call(thread, || program.work())));
        program.close_and_take();
        for thread in threads {
            thread.join().unwrap();
        }
    });
}

/// Without the fences, a thread and the closer miss each other.
#[test]
#[should_panic(expected = "Causality violation")]
fn the_model_finds_missing_fences() {
    explore(|| {
        sync::NO_FENCES.set(true);
        let program = Program::new(OPEN);
        let thread = spawn(&program, |program| program.call(0, || program.work()));
        program.close_and_take();
        thread.join().unwrap();
    });
}

/// On a kernel without `membarrier`.
#[test]
fn threads_that_fence_for_themselves_are_seen() {
    explore(|| {
        let program = Program::new(FENCED);
        let thread = spawn(&program, |program| {
            program.call(0, || program.work());
            program.call(0, || program.work());
        });
        program.close_and_take();
        thread.join().unwrap();
    });
}

/// A nested call never waits: the closer would wait for the outer one.
#[test]
fn a_nested_call_does_not_wait() {
    explore(|| {
        let program = Program::new(OPEN);
        let thread = spawn(&program, |program| program.call(0, || program.call(0, || program.work())));
        let closed = program.close();
        while program.marks[0].call().is_some() {
            thread::yield_now();
        }
        program.memory.with_mut(|_| ());
        drop(closed);
        thread.join().unwrap();
    });
}

/// A signal handler that makes a call between the two steps of its thread's own call.
#[test]
fn a_signal_handler_waits_for_itself_and_for_its_thread() {
    explore(|| {
        let program = Program::new(OPEN);
        let thread = spawn(&program, |program| {
            let mark = &program.marks[0];
            mark.want(CALL);
            sync::light_fence();
            mark.pass(&program.latch, OTHER_CALL, || program.work());
            assert_eq!(mark.inside.load(Ordering::Relaxed), CALL | ADMITTED);
            if mark.look(&program.latch, CALL) {
                program.work();
                mark.leave();
            }
        });
        for _ in 0..2 {
            program.close_and_take();
        }
        thread.join().unwrap();
    });
}

/// The same after the thread has read the latch.
#[test]
fn a_threads_check_stays_valid_after_a_signal_handler() {
    explore(|| {
        let program = Program::new(OPEN);
        let thread = spawn(&program, |program| {
            let mark = &program.marks[0];
            mark.want(CALL);
            sync::light_fence();
            let open = program.latch.0.load(Ordering::Acquire) == OPEN;
            mark.pass(&program.latch, OTHER_CALL, || program.work());
            if open {
                mark.inside.store(CALL | ADMITTED, Ordering::Relaxed);
                program.work();
            }
            mark.leave();
        });
        for _ in 0..2 {
            program.close_and_take();
        }
        thread.join().unwrap();
    });
}

/// A fiber enters on one thread and leaves on another, while the first thread makes a call of its own.
#[test]
fn a_fiber_may_change_its_thread_inside() {
    explore(|| {
        let program = Program::new(OPEN);
        assert!(program.marks[0].enter(&program.latch, CALL));
        let fiber = spawn(&program, |program| {
            program.work();
            program.marks[0].leave();
        });
        let thread = spawn(&program, |program| program.call(0, || program.work()));
        program.close_and_take();
        fiber.join().unwrap();
        thread.join().unwrap();
    });
}

/// A pause, and two resumes of one part each: whichever is last, the program continues.
#[test]
fn a_held_program_is_let_go_when_nothing_is_paused() {
    explore(|| {
        let program = Program::new(OPEN);
        program.paused.store(2, Ordering::Relaxed);
        program.close().keep();
        let resume = || {
            spawn(&program, |program| {
                program.paused.fetch_sub(1, Ordering::AcqRel);
                program.let_go();
            })
        };
        let resumes = [resume(), resume()];
        program.call(0, || assert_eq!(program.paused.load(Ordering::Acquire), 0));
        for thread in resumes {
            thread.join().unwrap();
        }
        assert!(!program.latch.is_closed());
    });
}

/// A pause while its memory is being freed.
#[test]
fn a_program_that_frees_what_is_paused_is_let_go() {
    explore(|| {
        let program = Program::new(OPEN);
        program.paused.store(1, Ordering::Relaxed);
        let free = spawn(&program, |program| {
            program.paused.store(0, Ordering::Relaxed);
            program.let_go();
        });
        let closed = program.close();
        if program.paused.load(Ordering::Relaxed) != 0 {
            closed.keep();
        } else {
            drop(closed);
        }
        program.let_go();
        program.call(0, || ());
        free.join().unwrap();
        assert!(!program.latch.is_closed());
    });
}

/// A second pause of a held program, while the memory of the first is resumed.
#[test]
fn a_latch_closed_by_another_is_not_opened() {
    explore(|| {
        let program = Program::new(OPEN);
        program.paused.store(1, Ordering::Relaxed);
        program.close().keep();
        let thread = spawn(&program, |program| program.call(0, || program.work()));
        let resume = spawn(&program, |program| {
            program.paused.store(0, Ordering::Release);
            program.let_go();
        });
        program.close_and_take();
        program.let_go();
        resume.join().unwrap();
        thread.join().unwrap();
        assert!(!program.latch.is_closed());
    });
}

/// The library closes the latch for a moment, while the memory of a held program is resumed: the program is let go at once, and continues when the moment
/// is over, at which nobody asks whether there is still a reason.
#[test]
fn a_moment_does_not_prolong_a_hold() {
    explore(|| {
        let program = Program::new(OPEN);
        program.paused.store(1, Ordering::Relaxed);
        program.close().keep();
        let resume = spawn(&program, |program| {
            program.paused.store(0, Ordering::Release);
            program.let_go();
            assert!(!program.closer.is_holding());
        });
        let moment = program.close_for(Purpose::Moment);
        program.take_if_nobody_is_inside();
        drop(moment);
        program.call(0, || assert_eq!(program.paused.load(Ordering::Acquire), 0));
        resume.join().unwrap();
        assert!(!program.latch.is_closed());
    });
}

/// A call that is admitted while the latch is closed is seen by its closer, and no second one passes.
#[test]
fn an_admitted_call_is_seen() {
    explore(|| {
        let program = Program::new(OPEN);
        let closed = program.close();
        let threads = [0, 1].map(|thread| spawn(&program, move |program| program.call(thread, || program.work())));
        program.latch.admit(1);
        program.latch.admit_none();
        program.take_if_nobody_is_inside();
        drop(closed);
        for thread in threads {
            thread.join().unwrap();
        }
        assert!(!program.latch.is_closed() && !program.latch.admits());
    });
}

/// A closer begins a stillness. A later closer that finds it unbroken knows that nobody has worked in between.
#[test]
fn who_passes_breaks_the_stillness() {
    explore(|| {
        let program = Program::new(OPEN);
        let worked = Arc::new(AtomicUsize::new(0));
        let threads = [0, 1].map(|thread| {
            let worked = Arc::clone(&worked);
            spawn(&program, move |program| program.call(thread, || _ = worked.fetch_add(1, Ordering::Relaxed)))
        });
        let is_empty = || program.marks.iter().all(|mark| mark.call().is_none());
        let moment = program.close_for(Purpose::Moment);
        let begun = is_empty();
        if begun {
            program.latch.begin_stillness();
        }
        let before = worked.load(Ordering::Relaxed);
        drop(moment);
        let closed = program.close();
        if begun && is_empty() && program.latch.is_still() {
            assert_eq!(worked.load(Ordering::Relaxed), before);
        }
        drop(closed);
        for thread in threads {
            thread.join().unwrap();
        }
        if worked.load(Ordering::Relaxed) > before {
            assert!(!begun || !program.latch.is_still());
        }
    });
}

/// Two closers, one after the other.
#[test]
fn one_closer_at_a_time() {
    explore(|| {
        let program = Program::new(OPEN);
        let other = spawn(&program, |program| {
            let closed = program.close();
            program.memory.with_mut(|_| ());
            drop(closed);
            program.let_go();
        });
        let closed = program.close();
        program.memory.with_mut(|_| ());
        assert!(program.latch.is_closed());
        drop(closed);
        program.let_go();
        other.join().unwrap();
        assert!(!program.latch.is_closed());
    });
}
