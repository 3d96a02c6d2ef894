//! Which thread has which mark.
//!
//! A thread finds its mark in thread-local memory of the initial-exec model, at a fixed distance from the thread's own register: the
//! library is loaded at start. Rust has no such thing, hence the instructions.

use super::door::{Mark, NOTHING};
use super::{DOOR, sync};
use std::arch::{asm, global_asm};
use std::cell::Cell;
use std::iter;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

/// A mark in a cache line of its own. Never freed, and used again by later threads.
#[repr(align(128))]
struct Place {
    mark: Mark,
    /// Whether a thread has it.
    taken: AtomicBool,
    next: *const Place,
}

// SAFETY: `next` does not change once others see the place.
unsafe impl Sync for Place {}

/// All of them. Without a lock, for the sake of signal handlers.
static PLACES: AtomicPtr<Place> = AtomicPtr::new(ptr::null_mut());

global_asm!(
    ".pushsection .tbss.vramctl_place,\"awT\",@nobits",
    ".balign 8",
    ".hidden vramctl_place",
    ".globl vramctl_place",
    ".type vramctl_place, @object",
    ".size vramctl_place, 8",
    "vramctl_place:",
    ".zero 8",
    ".popsection",
);

/// This thread's place, or null.
#[inline]
fn own() -> *const Place {
    let place;
    // SAFETY: reads the variable above.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        asm!(
            "mov {at}, qword ptr [rip + vramctl_place@GOTTPOFF]",
            "mov {at}, qword ptr fs:[{at}]",
            at = out(reg) place,
            options(pure, readonly, nostack, preserves_flags)
        );
        #[cfg(target_arch = "aarch64")]
        asm!(
            "adrp {at}, :gottprel:vramctl_place",
            "ldr {at}, [{at}, :gottprel_lo12:vramctl_place]",
            "mrs {base}, tpidr_el0",
            "ldr {at}, [{base}, {at}]",
            at = out(reg) place,
            base = out(reg) _,
            options(pure, readonly, nostack, preserves_flags)
        );
    }
    place
}

/// Sets what [`own`] answers.
fn set_own(place: *const Place) {
    // SAFETY: writes the variable above.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        asm!(
            "mov {at}, qword ptr [rip + vramctl_place@GOTTPOFF]",
            "mov qword ptr fs:[{at}], {place}",
            place = in(reg) place,
            at = out(reg) _,
            options(nostack, preserves_flags)
        );
        #[cfg(target_arch = "aarch64")]
        asm!(
            "adrp {at}, :gottprel:vramctl_place",
            "ldr {at}, [{at}, :gottprel_lo12:vramctl_place]",
            "mrs {base}, tpidr_el0",
            "str {place}, [{base}, {at}]",
            place = in(reg) place,
            at = out(reg) _,
            base = out(reg) _,
            options(nostack, preserves_flags)
        );
    }
}

/// This thread's mark, if it has one.
#[inline]
pub fn known_mark() -> Option<&'static Mark> {
    // SAFETY: null, or one of `PLACES`, which are never freed.
    unsafe { own().as_ref().map(|place| &place.mark) }
}

/// This thread's mark. `None` if the thread is ending.
pub fn mark() -> Option<&'static Mark> {
    known_mark().or_else(take)
}

#[cold]
fn take() -> Option<&'static Mark> {
    thread_local! {
        /// Gives the place back when the thread ends.
        static OWNED: Cell<Option<Owned>> = const { Cell::new(None) };
    }
    start_clean_in_children();
    let free = |place: &&'static Place| place.taken.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    let place = places().find(free).unwrap_or_else(add);
    if OWNED.try_with(|owned| owned.set(Some(Owned(place)))).is_err() {
        place.taken.store(false, Ordering::Release);
        return None;
    }
    set_own(place);
    Some(&place.mark)
}

struct Owned(&'static Place);

impl Drop for Owned {
    fn drop(&mut self) {
        set_own(ptr::null());
        self.0.give_back();
    }
}

impl Place {
    /// A thread that ends inside a call never comes out of it.
    fn give_back(&self) {
        self.mark.clear();
        self.taken.store(false, Ordering::Release);
    }
}

/// A new place, taken.
fn add() -> &'static Place {
    let mark = Mark { inside: AtomicUsize::new(NOTHING), nested: AtomicUsize::new(0) };
    let place = Box::into_raw(Box::new(Place { mark, taken: AtomicBool::new(true), next: ptr::null() }));
    let publish = |before: *mut Place| {
        // SAFETY: nobody else knows it yet.
        unsafe { (*place).next = before };
        Some(place)
    };
    let _ = PLACES.fetch_update(Ordering::AcqRel, Ordering::Acquire, publish);
    // SAFETY: never freed.
    unsafe { &*place }
}

fn places() -> impl Iterator<Item = &'static Place> {
    // SAFETY: null, or a place, which is never freed.
    let place = |place: *const Place| unsafe { place.as_ref() };
    iter::successors(place(PLACES.load(Ordering::Acquire)), move |before| place(before.next))
}

/// The marks of all threads.
pub fn marks() -> impl Iterator<Item = &'static Mark> {
    places().map(|place| &place.mark)
}

/// A forked child has one thread, and nobody in it has closed the gate.
pub fn start_clean_in_children() {
    extern "C" fn start_clean() {
        let own = own();
        places().filter(|place| !ptr::eq(*place, own)).for_each(Place::give_back);
        sync::forget_waiting();
        DOOR.open();
    }
    static DONE: AtomicBool = AtomicBool::new(false);
    // Twice is harmless. Waiting for another thread to do it is not: a child forked meanwhile would wait for ever.
    if !DONE.load(Ordering::Acquire) {
        vramctl_host::on_fork_in_child(start_clean);
        DONE.store(true, Ordering::Release);
    }
}
