//! Finds each thread's mark.
//!
//! The mark is found through a thread-local variable of the initial-exec model, at a fixed offset from the thread register; this works
//! because the library is loaded at program start. Rust cannot express that, hence the assembly.

use super::latch::ThreadMark;
use super::{AWAY, LATCH, THE_END, number};
use std::arch::{asm, global_asm};
use std::cell::Cell;
use std::iter;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use vramctl_host::stack;

/// A thread's slot: its marks, in a cache line of their own. Never freed; reused by later threads.
#[repr(align(128))]
struct Slot {
    /// For the gate.
    mark: ThreadMark,
    /// For [`super::away`].
    away: ThreadMark,
    /// The thread's id, for messages.
    thread: AtomicU32,
    /// Whether a thread uses it.
    taken: AtomicBool,
    next: *const Slot,
}

// SAFETY: `next` does not change once others see the slot.
unsafe impl Sync for Slot {}

/// All slots, as a list without a lock: signal handlers use it, too.
static SLOTS: AtomicPtr<Slot> = AtomicPtr::new(ptr::null_mut());

global_asm!(
    ".pushsection .tbss.vramctl_thread_slot,\"awT\",@nobits",
    ".balign 8",
    ".hidden vramctl_thread_slot",
    ".globl vramctl_thread_slot",
    ".type vramctl_thread_slot, @object",
    ".size vramctl_thread_slot, 8",
    "vramctl_thread_slot:",
    ".zero 8",
    ".popsection",
);

/// This thread's slot, or null.
#[inline]
fn own() -> *const Slot {
    let slot;
    // SAFETY: reads the variable above.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        asm!(
            "mov {at}, qword ptr [rip + vramctl_thread_slot@GOTTPOFF]",
            "mov {at}, qword ptr fs:[{at}]",
            at = out(reg) slot,
            options(pure, readonly, nostack, preserves_flags)
        );
        #[cfg(target_arch = "aarch64")]
        asm!(
            "adrp {at}, :gottprel:vramctl_thread_slot",
            "ldr {at}, [{at}, :gottprel_lo12:vramctl_thread_slot]",
            "mrs {base}, tpidr_el0",
            "ldr {at}, [{base}, {at}]",
            at = out(reg) slot,
            base = out(reg) _,
            options(pure, readonly, nostack, preserves_flags)
        );
    }
    slot
}

/// Sets the value that [`own`] returns.
fn set_own(slot: *const Slot) {
    // SAFETY: writes the variable above.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        asm!(
            "mov {at}, qword ptr [rip + vramctl_thread_slot@GOTTPOFF]",
            "mov qword ptr fs:[{at}], {slot}",
            slot = in(reg) slot,
            at = out(reg) _,
            options(nostack, preserves_flags)
        );
        #[cfg(target_arch = "aarch64")]
        asm!(
            "adrp {at}, :gottprel:vramctl_thread_slot",
            "ldr {at}, [{at}, :gottprel_lo12:vramctl_thread_slot]",
            "mrs {base}, tpidr_el0",
            "str {slot}, [{base}, {at}]",
            slot = in(reg) slot,
            at = out(reg) _,
            base = out(reg) _,
            options(nostack, preserves_flags)
        );
    }
}

/// This thread's slot, if it has one.
#[inline]
fn known() -> Option<&'static Slot> {
    // SAFETY: null, or one of `SLOTS`, which are never freed.
    unsafe { own().as_ref() }
}

/// This thread's mark, if it has one.
#[inline]
pub fn known_mark() -> Option<&'static ThreadMark> {
    known().map(|slot| &slot.mark)
}

/// This thread's mark for [`super::away`], if it has one.
#[inline]
pub fn known_away_mark() -> Option<&'static ThreadMark> {
    known().map(|slot| &slot.away)
}

/// This thread's mark. `None` while its destructors run.
pub fn mark() -> Option<&'static ThreadMark> {
    known().or_else(take).map(|slot| &slot.mark)
}

/// This thread's mark for [`super::away`]. `None` while its destructors run.
pub fn away_mark() -> Option<&'static ThreadMark> {
    known().or_else(take).map(|slot| &slot.away)
}

#[cold]
fn take() -> Option<&'static Slot> {
    thread_local! {
        /// Gives the slot back when the thread ends.
        static OWNED: Cell<Option<Owned>> = const { Cell::new(None) };
    }
    start_clean_in_children();
    let slot = claim();
    if OWNED.try_with(|owned| owned.set(Some(Owned(slot)))).is_err() {
        slot.taken.store(false, Ordering::Release);
        return None;
    }
    slot.thread.store(stack::thread_id(), Ordering::Relaxed);
    set_own(slot);
    if ENDING.load(Ordering::Relaxed) == stack::thread_id() {
        slot.mark.stay_inside(number(&THE_END));
    }
    Some(slot)
}

/// Calls `make` with this thread's mark. While the thread's destructors run, nothing would give back a mark that it kept, so it gets one until
/// `make` returns. `None` for the thread that ends the process, whose calls are not held.
pub fn with_mark<R>(make: impl FnOnce(Option<&'static ThreadMark>) -> R) -> R {
    if let Some(mark) = mark() {
        return make(Some(mark));
    }
    let thread = stack::thread_id();
    if thread == ENDING.load(Ordering::Relaxed) {
        return make(None);
    }
    let lent = Owned(claim());
    lent.0.thread.store(thread, Ordering::Relaxed);
    // For nested calls.
    set_own(lent.0);
    make(Some(&lent.0.mark))
}

/// A slot that is free.
fn claim() -> &'static Slot {
    slots()
        .find(|slot: &&'static Slot| slot.taken.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed).is_ok())
        .unwrap_or_else(add)
}

/// The thread that ends the process, if it had no mark then.
static ENDING: AtomicU32 = AtomicU32::new(0);

/// From now on, all calls of this thread pass. Called on the thread that ends the process, which may be in a signal handler that has interrupted
/// `malloc`, so if it has no mark, its next call makes one.
pub fn stay_inside() {
    match known_mark() {
        Some(mark) => mark.stay_inside(number(&THE_END)),
        None => ENDING.store(stack::thread_id(), Ordering::Relaxed),
    }
}

/// The thread that ends the process, if its calls have somebody open the gate.
static LAST: AtomicU32 = AtomicU32::new(0);

/// This thread ends the process.
pub fn begin_the_end() {
    LAST.store(stack::thread_id(), Ordering::Relaxed);
}

/// Whether it is this thread that does.
pub fn is_the_last() -> bool {
    let last = LAST.load(Ordering::Relaxed);
    last != 0 && last == stack::thread_id()
}

/// A slot that this thread has until it is dropped.
struct Owned(&'static Slot);

impl Drop for Owned {
    fn drop(&mut self) {
        set_own(ptr::null());
        self.0.give_back();
    }
}

impl Slot {
    /// Clears the mark: a thread that ends inside a call never leaves it.
    fn give_back(&self) {
        self.mark.clear();
        self.away.clear();
        self.taken.store(false, Ordering::Release);
    }
}

/// A new slot, taken.
fn add() -> &'static Slot {
    let slot = Box::into_raw(Box::new(Slot {
        mark: ThreadMark::new(),
        away: ThreadMark::new(),
        thread: AtomicU32::new(0),
        taken: AtomicBool::new(true),
        next: ptr::null(),
    }));
    let _ = SLOTS.fetch_update(Ordering::AcqRel, Ordering::Acquire, |before| {
        // SAFETY: nobody else knows it yet.
        unsafe { (*slot).next = before };
        Some(slot)
    });
    // SAFETY: never freed.
    unsafe { &*slot }
}

fn slots() -> impl Iterator<Item = &'static Slot> {
    // SAFETY: null, or a slot, which is never freed.
    let slot = |slot: *const Slot| unsafe { slot.as_ref() };
    iter::successors(slot(SLOTS.load(Ordering::Acquire)), move |before| slot(before.next))
}

/// The marks of all threads, with the threads' ids.
pub fn marks() -> impl Iterator<Item = (&'static ThreadMark, u32)> {
    slots().map(|slot| (&slot.mark, slot.thread.load(Ordering::Relaxed)))
}

/// The same for [`super::away`].
pub fn away_marks() -> impl Iterator<Item = (&'static ThreadMark, u32)> {
    slots().map(|slot| (&slot.away, slot.thread.load(Ordering::Relaxed)))
}

/// A forked child has one thread, and nobody in it has closed the gate.
pub fn start_clean_in_children() {
    extern "C" fn start_clean() {
        let own = own();
        for slot in slots() {
            if ptr::eq(slot, own) {
                slot.thread.store(stack::thread_id(), Ordering::Relaxed);
            } else {
                slot.give_back();
            }
        }
        LATCH.open();
        AWAY.open();
        super::set_opened_by_calls(false);
    }
    static DONE: AtomicBool = AtomicBool::new(false);
    // Doing it twice is harmless. Waiting for another thread to do it is not: a child forked meanwhile would wait forever.
    if !DONE.load(Ordering::Acquire) {
        vramctl_host::on_fork_in_child(start_clean);
        DONE.store(true, Ordering::Release);
    }
}
