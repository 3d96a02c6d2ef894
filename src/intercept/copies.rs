//! Several copies of the library in one process, such as one preloaded by `vramctl run` and another, under a different file name,
//! by a framework.
//!
//! Each copy would have its own state and control socket, and the second would manage what the first leaves to CUDA, because to
//! the first, the second's hooks are the real functions. So only the first copy in symbol lookup order is active; the others
//! forward every call.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU8, Ordering};
use std::{mem, ptr};
use vramctl_config as config;

/// Whether another copy precedes this one in symbol lookup order. Checked once: copies loaded later come later in the order.
#[inline]
pub fn another_is_first() -> bool {
    match KNOWN.load(Ordering::Relaxed) {
        UNKNOWN => look(),
        known => known == OTHER,
    }
}

static KNOWN: AtomicU8 = AtomicU8::new(UNKNOWN);
const UNKNOWN: u8 = 0;
const THIS: u8 = 1;
const OTHER: u8 = 2;

#[cold]
fn look() -> bool {
    // SAFETY: a NUL-terminated name.
    // If the symbol is not global at all, this copy was opened with `RTLD_LOCAL` or linked statically, and is the only one.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"vramctl_version".as_ptr()) };
    let mine = library_of(ptr::from_ref(&KNOWN).cast());
    let other = !found.is_null() && library_of(found) != mine;
    KNOWN.store(if other { OTHER } else { THIS }, Ordering::Relaxed);
    if !other {
        // This is the program's first hooked call. Report errors in the environment now: they may be why nothing is managed.
        config::set_up_logger();
    }
    other
}

/// The base address of the library that contains `address`.
fn library_of(address: *const c_void) -> *mut c_void {
    // SAFETY: `info` is plain data and writable.
    unsafe {
        let mut info: libc::Dl_info = mem::zeroed();
        if libc::dladdr(address, &raw mut info) == 0 { ptr::null_mut() } else { info.dli_fbase }
    }
}
