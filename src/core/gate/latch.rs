//! The latch of the gate: a word that closes it, and a mark of each thread. `model` explores it in all orders.
//!
//! What holds, whatever happens in which order:
//!
//! 1. Nobody is inside while the latch is closed and its closer has found nobody inside.
//! 2. A thread waits only while the latch is closed. Who opens it wakes all.
//! 3. A call within a call does not wait: the outer one could not end.
//!
//! A thread marks itself, then looks at the latch; the closer closes the latch, then looks at the marks. So one of them sees the
//! other, if neither looks before its own store has reached the other's processor. The closer sees to that for both ([`sync::heavy_fence`]).

use super::sync::{self, AtomicU32, AtomicUsize, Ordering};

/// The word.
#[derive(Debug)]
pub struct Latch(pub AtomicU32);

/// Threads pass after a look.
pub const OPEN: u32 = 0;
/// Threads fence for themselves before they look: the closer cannot do it for them.
pub const FENCED: u32 = 1;
/// Threads wait.
pub const CLOSED: u32 = 2;

/// What a thread is doing.
#[derive(Debug)]
pub struct ThreadMark {
    /// [`NOTHING`], or the call that the thread wants to make, and [`ADMITTED`] once it has found the latch open.
    pub inside: AtomicUsize,
    /// How many calls it makes within calls.
    pub nested: AtomicUsize,
}

/// Not inside.
pub const NOTHING: usize = 0;
/// Added to a call, which is an even number.
pub const ADMITTED: usize = 1;

impl ThreadMark {
    /// Goes inside, if that needs no more than a look at the latch. Then the caller must [`leave`](Self::leave).
    #[inline]
    pub fn enter(&self, latch: &Latch, call: usize) -> bool {
        // Within a call, or in a signal handler.
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
                // A call within a call, or what a fiber does while another of this thread is inside.
                outer if outer & ADMITTED != 0 => {
                    self.nested.fetch_add(1, Ordering::Relaxed);
                    sync::fence(Ordering::SeqCst);
                    let _leave = OnDrop(|| _ = self.nested.fetch_sub(1, Ordering::Release));
                    // The other fiber may have come out on another thread: then this call is not within one.
                    if self.inside.load(Ordering::Relaxed) != NOTHING {
                        return make();
                    }
                }
                // A signal handler, and the thread has not been admitted yet. It goes first; the thread then finds its mark as it
                // left it, and the latch as its mark demands.
                interrupted => {
                    let _return = OnDrop(|| {
                        self.wait_and_enter(latch, interrupted);
                        self.want(interrupted);
                    });
                    self.wait_and_enter(latch, call);
                    let _leave = OnDrop(|| self.leave());
                    return make();
                }
            }
        }
    }

    /// Makes a call without a look at the latch. For a thread of the library's that is not inside.
    pub fn pass_unheld<R>(&self, call: usize, make: impl FnOnce() -> R) -> R {
        self.inside.store(call | ADMITTED, Ordering::Release);
        let _leave = OnDrop(|| self.leave());
        make()
    }

    fn wait_and_enter(&self, latch: &Latch, call: usize) {
        loop {
            self.want(call);
            sync::fence(Ordering::SeqCst);
            let seen = latch.0.load(Ordering::Acquire);
            if seen & CLOSED == 0 {
                return self.inside.store(call | ADMITTED, Ordering::Release);
            }
            self.leave();
            sync::wait(&latch.0, seen);
        }
    }

    /// For the closer: the call that the thread is inside, or wants to make; `Some(NOTHING)` for one within a call that has ended.
    pub fn call(&self) -> Option<usize> {
        // In this order: a call within a call begins before the outer one ends.
        let inside = self.inside.load(Ordering::Acquire) & !ADMITTED;
        sync::fence(Ordering::SeqCst);
        (inside != NOTHING || self.nested.load(Ordering::Acquire) != 0).then_some(inside)
    }

    /// The thread is gone, wherever it was.
    pub fn clear(&self) {
        self.nested.store(0, Ordering::Relaxed);
        self.leave();
    }
}

impl Latch {
    /// Closes it. From now on, whoever is inside has a [`ThreadMark::call`].
    pub fn close(&self) {
        self.0.fetch_or(CLOSED, Ordering::SeqCst);
        if !sync::heavy_fence() {
            self.0.fetch_or(FENCED, Ordering::SeqCst);
            sync::fence(Ordering::SeqCst);
            // Those that are between their store and their look have long passed it when this returns.
            sync::rest();
        }
    }

    /// Opens it.
    pub fn open(&self) {
        self.0.fetch_and(!CLOSED, Ordering::SeqCst);
        sync::wake(&self.0);
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
