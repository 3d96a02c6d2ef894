//! The latch of the gate: one word that closes it, and a mark per thread. `model` explores all interleavings.
//!
//! Invariants, in every order of events:
//!
//! 1. Once the latch is closed and its closer has found nobody inside, nobody gets inside, except calls that the closer admits. A closer that
//!    looks again after [`Latch::admit_none`] sees those calls.
//! 2. A thread waits only while the latch is closed. Opening it wakes all waiting threads.
//! 3. A nested call does not wait: the outer call could not finish.
//!
//! A thread sets its mark, then reads the latch; the closer closes the latch, then reads the marks. At least one of them sees the other,
//! provided that neither reads before its own store is visible to the other. The closer ensures that for both sides
//! ([`sync::heavy_fence`]).

use super::sync::{self, AtomicU32, AtomicUsize, Ordering};

/// The word.
#[derive(Debug)]
pub struct Latch(pub AtomicU32);

/// Threads only read the latch and pass.
pub const OPEN: u32 = 0;
/// Threads execute a fence of their own before they read the latch: the closer cannot do it for them.
pub const FENCED: u32 = 1;
/// Threads wait.
pub const CLOSED: u32 = 2;
/// Somebody wants to know whether a thread passes: the next one that does removes this.
pub const WATCHED: u32 = 4;
/// No thread has passed since this was set: the next one that does removes it.
pub const STILL: u32 = 8;
/// One permit: one call passes although the latch is closed, and takes the permit away. The bits from this one on count the permits.
pub const PERMIT: u32 = 16;

/// What a thread is doing.
#[derive(Debug)]
pub struct ThreadMark {
    /// [`NOTHING`], or the call that the thread wants to make, and [`ADMITTED`] once it has found the latch open.
    pub inside: AtomicUsize,
    /// The depth of nested calls.
    nested: AtomicUsize,
    /// How many calls wait: more than one if a signal handler has interrupted a wait. Only for messages, so the model need not see it.
    waits: std::sync::atomic::AtomicUsize,
}

/// Not inside.
pub const NOTHING: usize = 0;
/// Flag added to the number of a call, which is even.
pub const ADMITTED: usize = 1;

impl ThreadMark {
    /// Of a thread that is not inside.
    pub fn new() -> Self {
        Self { inside: AtomicUsize::new(NOTHING), nested: AtomicUsize::new(0), waits: std::sync::atomic::AtomicUsize::new(0) }
    }

    /// Fast path: goes inside if the latch is open. The caller must then [`leave`](Self::leave).
    #[inline]
    pub fn enter(&self, latch: &Latch, call: usize) -> bool {
        // A nested call, or a signal handler.
        if self.inside.load(Ordering::Relaxed) != NOTHING {
            return false;
        }
        self.want(call);
        sync::light_fence();
        self.look(latch, call)
    }

    /// The first half of [`enter`](Self::enter).
    #[inline]
    pub fn want(&self, call: usize) {
        self.inside.store(call, Ordering::Relaxed);
    }

    /// The second half.
    #[inline]
    pub fn look(&self, latch: &Latch, call: usize) -> bool {
        if latch.0.load(Ordering::Acquire) != OPEN {
            self.turn_back();
            return false;
        }
        self.inside.store(call | ADMITTED, Ordering::Relaxed);
        true
    }

    #[cold]
    fn turn_back(&self) {
        self.leave();
    }

    /// Comes out.
    #[inline]
    pub fn leave(&self) {
        self.inside.store(NOTHING, Ordering::Release);
    }

    /// Makes a call, once the latch is open.
    pub fn pass<R>(&self, latch: &Latch, call: usize, make: impl FnOnce() -> R) -> R {
        loop {
            match self.inside.load(Ordering::Relaxed) {
                NOTHING => {
                    self.wait_and_enter(latch, call);
                    let _leave = OnDrop(|| self.leave());
                    return make();
                }
                // A nested call, or a call of one fiber while another fiber of this thread is inside.
                outer if outer & ADMITTED != 0 => {
                    self.nested.fetch_add(1, Ordering::Relaxed);
                    sync::fence(Ordering::SeqCst);
                    let _leave = OnDrop(|| _ = self.nested.fetch_sub(1, Ordering::Release));
                    // The other fiber may have left on another thread: then this call is not nested.
                    if self.inside.load(Ordering::Relaxed) != NOTHING {
                        return make();
                    }
                }
                // A signal handler has interrupted a thread that may already have found the latch open, but does not say so yet. The handler's
                // call goes first. Then the mark is the thread's own again, set while the latch is open: what the thread has found still holds.
                interrupted => {
                    let _return = OnDrop(|| self.wait_and_enter(latch, interrupted));
                    self.wait_and_enter(latch, call);
                    return make();
                }
            }
        }
    }

    /// Goes inside for good: all later calls of the thread pass. Called on the thread that ends the process.
    pub fn stay_inside(&self, call: usize) {
        self.inside.store(call | ADMITTED, Ordering::Release);
    }

    /// Makes a call without checking the latch. Called on threads of the library that are not inside.
    pub fn pass_unheld<R>(&self, call: usize, make: impl FnOnce() -> R) -> R {
        self.inside.store(call | ADMITTED, Ordering::Release);
        let _leave = OnDrop(|| self.leave());
        make()
    }

    /// Goes inside once the latch is open. The thread is not inside.
    pub fn wait_and_enter(&self, latch: &Latch, call: usize) {
        loop {
            self.want(call);
            sync::fence(Ordering::SeqCst);
            let seen = latch.0.load(Ordering::Acquire);
            if seen & CLOSED == 0 {
                if seen & (WATCHED | STILL) != 0 {
                    latch.note_passage();
                }
                return self.inside.store(call | ADMITTED, Ordering::Release);
            }
            if seen >= PERMIT {
                if latch.0.compare_exchange(seen, (seen & !(WATCHED | STILL)) - PERMIT, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
                    return self.inside.store(call | ADMITTED, Ordering::Release);
                }
                continue;
            }
            self.leave();
            self.wait(|| {
                sync::tell_of_waiter();
                sync::wait(&latch.0, seen);
            });
        }
    }

    /// Makes a wait for the latch to open.
    pub fn wait(&self, wait: impl FnOnce()) {
        self.waits.fetch_add(1, Ordering::Relaxed);
        wait();
        self.waits.fetch_sub(1, Ordering::Relaxed);
    }

    /// For the closer: the call that the thread is inside, or wants to make; `Some(NOTHING)` for a nested call whose outer call has ended.
    pub fn call(&self) -> Option<usize> {
        // In this order: a nested call begins before the outer one ends.
        let inside = self.inside.load(Ordering::Acquire) & !ADMITTED;
        sync::fence(Ordering::SeqCst);
        (inside != NOTHING || self.nested.load(Ordering::Acquire) != 0).then_some(inside)
    }

    /// Whether the thread is inside a call, or about to be.
    pub fn is_inside(&self) -> bool {
        self.inside.load(Ordering::Relaxed) != NOTHING
    }

    /// Whether the thread waits for the latch to open.
    pub fn is_waiting(&self) -> bool {
        self.waits.load(Ordering::Relaxed) > 0
    }

    /// Clears the mark of a thread that has ended, even inside a call.
    pub fn clear(&self) {
        self.waits.store(0, Ordering::Relaxed);
        self.nested.store(0, Ordering::Relaxed);
        self.leave();
    }
}

impl Latch {
    /// Closes the latch. From now on, every thread inside shows up in [`ThreadMark::call`].
    pub fn close(&self) {
        self.0.fetch_or(CLOSED, Ordering::SeqCst);
        if !sync::heavy_fence() {
            self.0.fetch_or(FENCED, Ordering::SeqCst);
            sync::fence(Ordering::SeqCst);
            // When this returns, threads that were between setting their mark and reading the latch have long done so.
            sync::rest();
        }
    }

    /// Opens it.
    pub fn open(&self) {
        self.0.fetch_and(FENCED | WATCHED | STILL, Ordering::SeqCst);
        sync::wake(&self.0);
    }

    /// Lets this many calls pass although the latch is closed, until [`admit_none`](Self::admit_none).
    pub fn admit(&self, calls: u32) {
        self.0.fetch_add(calls * PERMIT, Ordering::SeqCst);
        sync::wake(&self.0);
    }

    /// Whether calls may still pass because of [`admit`](Self::admit).
    pub fn admits(&self) -> bool {
        self.0.load(Ordering::Relaxed) >= PERMIT
    }

    /// From now on, no call passes. Those that have are inside, where [`ThreadMark::call`] shows them.
    pub fn admit_none(&self) {
        self.0.fetch_and(PERMIT - 1, Ordering::SeqCst);
    }

    /// Begins to watch whether a thread passes. `false` if that has been begun, and none has passed since.
    pub fn watch(&self) -> bool {
        self.0.fetch_or(WATCHED, Ordering::Relaxed) & WATCHED == 0
    }

    /// Has the next [`watch`](Self::watch) find that a thread has passed.
    pub fn note(&self) {
        self.0.fetch_and(!WATCHED, Ordering::Relaxed);
    }

    /// A thread passes.
    #[cold]
    fn note_passage(&self) {
        self.0.fetch_and(!(WATCHED | STILL), Ordering::SeqCst);
    }

    /// Has [`is_still`](Self::is_still) say from now on whether a thread has passed since. Called by a closer that has found nobody inside.
    pub fn begin_stillness(&self) {
        self.0.fetch_or(STILL, Ordering::SeqCst);
    }

    /// Whether no thread has passed since the last [`begin_stillness`](Self::begin_stillness). A closer that has found nobody inside knows for
    /// sure; for others, it may just have changed.
    pub fn is_still(&self) -> bool {
        self.0.load(Ordering::SeqCst) & STILL != 0
    }

    /// Whether it is closed.
    pub fn is_closed(&self) -> bool {
        self.0.load(Ordering::Acquire) & CLOSED != 0
    }
}

struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
