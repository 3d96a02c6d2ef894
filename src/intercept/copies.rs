//! Several copies of the library in one process: `vramctl run` preloads one, and a framework puts a file of another name
//! into `LD_PRELOAD`, or opens it.
//!
//! Each copy has its own regions and allocations, and to the first the next one's functions are the real ones. So the
//! memory that the first leaves to CUDA would come to be managed by the second after all, and the process would have two
//! control sockets. Therefore only the first in the loader's order answers; the others hand every call on.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU8, Ordering};
use std::{mem, ptr};
use vramctl_config as config;

/// Whether a copy that programs find before this one is loaded. Found out once: copies that are loaded later come later.
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
    // SAFETY: a NUL-terminated name. Where programs cannot find it at all, this copy was opened for its handle alone, or is
    // part of a program: it is the only one.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"vramctl_version".as_ptr()) };
    let mine = library_of(ptr::from_ref(&KNOWN).cast());
    let other = !found.is_null() && library_of(found) != mine;
    KNOWN.store(if other { OTHER } else { THIS }, Ordering::Relaxed);
    if !other {
        // The program's first call to the library that answers it. What is wrong with the environment is said now: it may be
        // the reason that nothing is ever managed.
        config::set_up_logger();
    }
    other
}

/// Where the library begins that an address lies in.
fn library_of(address: *const c_void) -> *mut c_void {
    // SAFETY: `info` is plain data and writable.
    unsafe {
        let mut info: libc::Dl_info = mem::zeroed();
        if libc::dladdr(address, &raw mut info) == 0 { ptr::null_mut() } else { info.dli_fbase }
    }
}
