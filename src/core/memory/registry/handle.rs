//! The handles that the program gets for memory that it maps itself. They stay the same while the driver's change with each pause and resume.

use std::sync::atomic::{AtomicU64, Ordering};

/// The library's handles start here: above all addresses (below 2^57), and so above the driver's handles, which are pointers.
const FIRST: u64 = 0x7672_0000_0000_0000;
const LAST: u64 = 0x7672_ffff_ffff_ffff;

/// A handle that the program does not have yet.
pub fn next_handle() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(FIRST);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Whether a handle may be one of the library's. False for every handle of the driver.
#[inline]
pub fn is_ours(handle: u64) -> bool {
    (FIRST..=LAST).contains(&handle)
}
