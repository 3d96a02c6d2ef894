//! Finds each thread's mark.
//!
//! The mark is found through a thread-local variable of the initial-exec model, at a fixed offset from the thread register; this works
//! because the library is loaded at program start. Rust cannot express that, hence the assembly.

use super::latch::ThreadMark;
use super::{LATCH, THE_END, number};
use std::arch::{asm, global_asm};
use std::cell::Cell;
use std::iter;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use vramctl_host::stack;

/// A berth: a mark in its own cache line. Never freed; reused by later threads.
#[repr(align(128))]
struct Slot {
    mark: ThreadMark,
    /// The thread's id, for messages.
    thread: AtomicU32,
    /// Whether a thread uses it.
    taken: AtomicBool,
    next: *const Slot,
}

// SAFETY: `next` does not change once others see the berth.
unsafe impl Sync for Slot {}

/// All berths, as a list without a lock: signal handlers use it, too.
static BERTHS: AtomicPtr<Slot> = AtomicPtr::new(ptr::null_mut());

global_asm!(
    ".pushsection .tbss.vramctl_berth,\"awT\",@nobits",
    ".balign 8",
    ".hidden vramctl_berth",
    ".globl vramctl_berth",
    ".type vramctl_berth, @object",
    ".size vramctl_berth, 8",
    "vramctl_berth:",
    ".zero 8",
    ".popsection",
);

/// This thread's berth, or null.
#[inline]
fn own() -> *const Slot {
    let berth;
    // SAFETY: reads the variable above.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        asm!(
            "mov {at}, qword ptr [rip + vramctl_berth@GOTTPOFF]",
            "mov {at}, qword ptr fs:[{at}]",
            at = out(reg) berth,
            options(pure, readonly, nostack, preserves_flags)
        );
        #[cfg(target_arch = "aarch64")]
        asm!(
            "adrp {at}, :gottprel:vramctl_berth",
            "ldr {at}, [{at}, :gottprel_lo12:vramctl_berth]",
            "mrs {base}, tpidr_el0",
            "ldr {at}, [{base}, {at}]",
            at = out(reg) berth,
            base = out(reg) _,
            options(pure, readonly, nostack, preserves_flags)
        );
    }
    berth
}

/// Sets the value that [`own`] returns.
fn set_own(berth: *const Slot) {
    // SAFETY: writes the variable above.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        asm!(
            "mov {at}, qword ptr [rip + vramctl_berth@GOTTPOFF]",
            "mov qword ptr fs:[{at}], {berth}",
            berth = in(reg) berth,
            at = out(reg) _,
            options(nostack, preserves_flags)
        );
        #[cfg(target_arch = "aarch64")]
        asm!(
            "adrp {at}, :gottprel:vramctl_berth",
            "ldr {at}, [{at}, :gottprel_lo12:vramctl_berth]",
            "mrs {base}, tpidr_el0",
            "str {berth}, [{base}, {at}]",
            berth = in(reg) berth,
            at = out(reg) _,
            base = out(reg) _,
            options(nostack, preserves_flags)
        );
    }
}

/// This thread's mark, if it has one.
#[inline]
pub fn known_mark() -> Option<&'static ThreadMark> {
    // SAFETY: null, or one of `BERTHS`, which are never freed.
    unsafe { own().as_ref().map(|berth| &berth.mark) }
}

/// This thread's mark. `None` if the thread is ending.
pub fn mark() -> Option<&'static ThreadMark> {
    known_mark().or_else(take)
}

#[cold]
fn take() -> Option<&'static ThreadMark> {
    thread_local! {
        /// Gives the berth back when the thread ends.
        static OWNED: Cell<Option<Owned>> = const { Cell::new(None) };
    }
    start_clean_in_children();
    let free = |berth: &&'static Slot| berth.taken.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    let berth = berths().find(free).unwrap_or_else(add);
    if OWNED.try_with(|owned| owned.set(Some(Owned(berth)))).is_err() {
        berth.taken.store(false, Ordering::Release);
        return None;
    }
    berth.thread.store(stack::thread_id(), Ordering::Relaxed);
    set_own(berth);
    if ENDING.load(Ordering::Relaxed) == stack::thread_id() {
        berth.mark.stay_inside(number(&THE_END));
    }
    Some(&berth.mark)
}

/// The thread that ends the process, if it had no mark then.
static ENDING: AtomicU32 = AtomicU32::new(0);

/// From now on, all calls of this thread pass. For the thread that ends the process. It may be in a signal handler that has interrupted
/// `malloc`, so if it has no mark, its next call makes one.
pub fn stay_inside() {
    match known_mark() {
        Some(mark) => mark.stay_inside(number(&THE_END)),
        None => ENDING.store(stack::thread_id(), Ordering::Relaxed),
    }
}

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
        self.taken.store(false, Ordering::Release);
    }
}

/// A new berth, taken.
fn add() -> &'static Slot {
    let berth = Box::into_raw(Box::new(Slot {
        mark: ThreadMark::new(),
        thread: AtomicU32::new(0),
        taken: AtomicBool::new(true),
        next: ptr::null(),
    }));
    let publish = |before: *mut Slot| {
        // SAFETY: nobody else knows it yet.
        unsafe { (*berth).next = before };
        Some(berth)
    };
    let _ = BERTHS.fetch_update(Ordering::AcqRel, Ordering::Acquire, publish);
    // SAFETY: never freed.
    unsafe { &*berth }
}

fn berths() -> impl Iterator<Item = &'static Slot> {
    // SAFETY: null, or a berth, which is never freed.
    let berth = |berth: *const Slot| unsafe { berth.as_ref() };
    iter::successors(berth(BERTHS.load(Ordering::Acquire)), move |before| berth(before.next))
}

/// The marks of all threads, with the threads' ids.
pub fn marks() -> impl Iterator<Item = (&'static ThreadMark, u32)> {
    berths().map(|berth| (&berth.mark, berth.thread.load(Ordering::Relaxed)))
}

/// A forked child has one thread, and nobody in it has closed the gate.
pub fn start_clean_in_children() {
    extern "C" fn start_clean() {
        let own = own();
        for berth in berths() {
            if ptr::eq(berth, own) {
                berth.thread.store(stack::thread_id(), Ordering::Relaxed);
            } else {
                berth.give_back();
            }
        }
        LATCH.open();
    }
    static DONE: AtomicBool = AtomicBool::new(false);
    // Doing it twice is harmless. Waiting for another thread to do it is not: a child forked meanwhile would wait forever.
    if !DONE.load(Ordering::Acquire) {
        vramctl_host::on_fork_in_child(start_clean);
        DONE.store(true, Ordering::Release);
    }
}
