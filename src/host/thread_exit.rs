//! The end of a thread's thread-locals, without the loader's lock.
//!
//! Rust's standard library registers the destructor of a thread-local with the C library's `__cxa_thread_atexit_impl`, at its first use in a thread.
//! That takes the loader's lock, and while the program is held, a thread of the program may wait at the gate with that: in a constructor of a
//! library that it opens. No thread could start then that serves the resume. So a library of ours has a function of this name
//! for itself ([`own_thread_exit`](crate::own_thread_exit)), which keeps a list in each thread and has a `pthread` key's destructor run it.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

type Destroy = unsafe extern "C" fn(*mut u8);

struct Entry {
    destroy: Destroy,
    object: *mut u8,
    next: *mut Self,
}

thread_local! {
    /// The last one first. Changed in one step each: a signal handler may register as well.
    static LAST: AtomicPtr<Entry> = const { AtomicPtr::new(ptr::null_mut()) };
}

/// Defines `__cxa_thread_atexit_impl` for the library or program that is linked with it. Hidden: what else is in the process keeps the C
/// library's. Weak, as the standard library's reference to it is: a symbol that is both is worth a warning to the linker.
#[macro_export]
macro_rules! own_thread_exit {
    () => {
        #[cfg(target_arch = "x86_64")]
        $crate::own_thread_exit!("jmp");
        #[cfg(target_arch = "aarch64")]
        $crate::own_thread_exit!("b");
    };
    ($jump:literal) => {
        ::std::arch::global_asm!(
            ".pushsection .text.__cxa_thread_atexit_impl, \"ax\", %progbits",
            ".weak __cxa_thread_atexit_impl",
            ".hidden __cxa_thread_atexit_impl",
            ".type __cxa_thread_atexit_impl, %function",
            "__cxa_thread_atexit_impl:",
            concat!($jump, " {}"),
            ".popsection",
            sym $crate::thread_exit::register,
        );
    };
}

/// Has `destroy(object)` called when this thread ends, before what was registered earlier. Nonzero, and the object is leaked, if the program has
/// used up the process's keys.
///
/// # Safety
/// As for `__cxa_thread_atexit_impl`: until then, the call must stay sound in this thread. This code is never unloaded.
pub unsafe extern "C" fn register(destroy: Destroy, object: *mut u8, _library: *mut c_void) -> c_int {
    let Some(key) = key() else { return -1 };
    LAST.with(|last| {
        let entry = Box::into_raw(Box::new(Entry { destroy, object, next: ptr::null_mut() }));
        let mut next = last.load(Ordering::Relaxed);
        loop {
            // SAFETY: nobody else has the entry yet.
            unsafe { (*entry).next = next };
            match last.compare_exchange(next, entry, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => break,
                Err(newer) => next = newer,
            }
        }
    });
    // SAFETY: the key exists. Any value but null has its destructor called.
    unsafe { libc::pthread_setspecific(key, ptr::dangling()) }
}

/// The process's key, created at first use.
fn key() -> Option<libc::pthread_key_t> {
    const NONE: u64 = u64::MAX;
    static KEY: AtomicU64 = AtomicU64::new(NONE);
    let known = KEY.load(Ordering::Acquire);
    if known != NONE {
        return Some(known as libc::pthread_key_t);
    }
    let mut new = 0;
    // SAFETY: `new` is writable; the destructor is never unloaded.
    if unsafe { libc::pthread_key_create(&raw mut new, Some(run)) } != 0 {
        return None;
    }
    match KEY.compare_exchange(NONE, u64::from(new), Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => Some(new),
        Err(first) => {
            // SAFETY: created above, and used by nobody.
            unsafe { libc::pthread_key_delete(new) };
            Some(first as libc::pthread_key_t)
        }
    }
}

/// At the end of a thread. What a destructor registers is run as well.
unsafe extern "C" fn run(_: *mut c_void) {
    LAST.with(|last| {
        loop {
            let entry = last.load(Ordering::Relaxed);
            if entry.is_null() {
                return;
            }
            // SAFETY: made by `register`.
            let next = unsafe { (*entry).next };
            if last.compare_exchange(entry, next, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                // SAFETY: taken off the list, so nobody else has it.
                let Entry { destroy, object, .. } = *unsafe { Box::from_raw(entry) };
                // SAFETY: the contract of `register`.
                unsafe { destroy(object) };
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;
    use std::thread;

    static SEEN: Mutex<Vec<usize>> = Mutex::new(Vec::new());

    unsafe extern "C" fn see(object: *mut u8) {
        SEEN.lock().unwrap().push(object as usize);
        if object as usize == 2 {
            // SAFETY: `see` uses the number alone.
            unsafe { register(see, ptr::without_provenance_mut(3), ptr::null_mut()) };
        }
    }

    #[test]
    fn a_threads_end_runs_the_last_first_and_what_that_registers() {
        let thread = || {
            for number in [1, 2] {
                // SAFETY: as above.
                assert_eq!(unsafe { register(see, ptr::without_provenance_mut(number), ptr::null_mut()) }, 0);
            }
        };
        thread::spawn(thread).join().unwrap();
        assert_eq!(*SEEN.lock().unwrap(), [2, 3, 1]);
    }
}
