//! Several copies of the library in one process, such as one preloaded by `vramctl run` and another, under a different file name,
//! by a framework.
//!
//! Each copy would have its own state and control socket, and the second would manage what the first leaves to CUDA, because to
//! the first, the second's hooks are the real functions. So only the first copy in symbol lookup order is active; the others
//! forward every call.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicU8, Ordering};
use vramctl_config as config;
use vramctl_host::symbols::{self, Loaded};

/// Exported by each copy and by nobody else.
const MARK: &CStr = c"vramctl_version";

/// Whether a function is in a copy of the library, this one included.
pub fn contain(function: *const c_void) -> bool {
    Loaded::around(function).is_some_and(is_one)
}

/// Whether a library is a copy of this one, or itself.
pub fn is_one(library: Loaded) -> bool {
    library.symbol(MARK).is_some()
}

/// Activates this copy, unless another precedes it in symbol lookup order. Returns whether it is active. Checked once: copies loaded later come
/// later in the order.
#[inline]
pub fn activate() -> bool {
    match KNOWN.load(Ordering::Relaxed) {
        THIS => true,
        OTHER => false,
        _ => begin(),
    }
}

/// Whether another copy is the active one, for a lookup, which is not a call of CUDA: neither writes to the log nor needs memory.
pub fn another_answers() -> bool {
    match KNOWN.load(Ordering::Relaxed) {
        UNKNOWN => look(),
        known => known == OTHER,
    }
}

static KNOWN: AtomicU8 = AtomicU8::new(UNKNOWN);
const UNKNOWN: u8 = 0;
/// This copy is the first, and the program has called no function of CUDA yet.
const THIS_WAITING: u8 = 1;
const THIS: u8 = 2;
const OTHER: u8 = 3;

#[cold]
fn begin() -> bool {
    if another_answers() {
        return false;
    }
    // This is the program's first hooked call. Report errors in the environment now: they may be why nothing is managed.
    KNOWN.store(THIS, Ordering::Relaxed);
    config::set_up_logger();
    vramctl_observe::subscribe();
    true
}

#[cold]
fn look() -> bool {
    // SAFETY: `RTLD_DEFAULT` needs no handle.
    // If the symbol is not global at all, this copy was opened with `RTLD_LOCAL` or linked statically, and is the only one.
    let found = unsafe { symbols::dlsym(libc::RTLD_DEFAULT, MARK) };
    let other = !found.is_null() && !symbols::is_ours(found);
    // Two threads may check at once, and one of them may already be past the first call.
    let _ = KNOWN.compare_exchange(UNKNOWN, if other { OTHER } else { THIS_WAITING }, Ordering::Relaxed, Ordering::Relaxed);
    other
}
