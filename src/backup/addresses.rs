//! System calls on the arena's addresses and the memory behind them. Keeps no state.

use std::io;
use std::ptr::{self, NonNull};

/// Reserves `bytes` of inaccessible addresses without memory: new ones, or the arena's own at `at`, which lose their memory.
/// They count only against the address space limit.
///
/// # Safety
/// `at` lies in the arena, and the range is not in use.
pub unsafe fn close(at: Option<NonNull<u8>>, bytes: usize) -> Option<NonNull<u8>> {
    let place = at.map_or(ptr::null_mut(), NonNull::as_ptr).cast();
    let fixed = if at.is_some() { libc::MAP_FIXED } else { 0 };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | fixed;
    // SAFETY: a new private mapping, or one that replaces an unused one, as the caller promises.
    let base = unsafe { libc::mmap(place, bytes, libc::PROT_NONE, flags, -1, 0) };
    if base == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the mapping just made.
    unsafe {
        // Huge pages make populating and registering cheaper. A forked child neither pays for the memory nor triggers
        // copy-on-write under the device's feet. Core dumps stay small. All three are hints; nothing is lost if the kernel
        // does not know one.
        for wish in [libc::MADV_HUGEPAGE, libc::MADV_DONTFORK, libc::MADV_DONTDUMP] {
            libc::madvise(base, bytes, wish);
        }
    }
    let base = NonNull::new(base.cast())?;
    unlock(base, bytes);
    Some(base)
}

/// Makes closed addresses writable.
///
/// # Safety
/// The range lies in the arena and is not in use.
pub unsafe fn open(base: NonNull<u8>, bytes: usize) -> io::Result<()> {
    unlock(base, bytes);
    // SAFETY: the caller's promise.
    let answer = unsafe { libc::mprotect(base.as_ptr().cast(), bytes, libc::PROT_READ | libc::PROT_WRITE) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Populates open addresses by writing to each page, because page faults of several threads run in parallel. `madvise` would
/// hold the address-space lock throughout, and the driver, which changes the address space to register memory, would wait
/// for all of it: 24 GiB populated, registered and copied in 16 threads take 34 and 35 GB/s this way, 26 and 11 with `madvise` (H200;
/// with pages of 4 KiB 20 and 8). `taken` receives the bytes added since its last call.
///
/// # Safety
/// The range lies in the arena and is not in use.
pub unsafe fn populate(base: NonNull<u8>, bytes: usize, mut taken: impl FnMut(usize)) {
    /// The smallest page size. On a larger page, writing more often is harmless.
    const PAGE: usize = 4096;
    /// A huge page.
    const STEP: usize = 2 << 20;
    for step in (0..bytes).step_by(STEP) {
        for offset in (step..step + STEP).step_by(PAGE) {
            // SAFETY: the caller's promise. Volatile, so that the write is not optimized away.
            unsafe { base.add(offset).write_volatile(0) };
        }
        taken(STEP);
    }
}

/// Returns the memory behind addresses to the system.
///
/// # Safety
/// The range lies in the arena and is not in use.
pub unsafe fn depopulate(base: NonNull<u8>, bytes: usize) {
    unlock(base, bytes);
    // SAFETY: the caller's promise.
    unsafe { libc::madvise(base.as_ptr().cast(), bytes, libc::MADV_DONTNEED) };
}

/// Unlocks addresses. In a program that locks all its memory (`mlockall`), they would otherwise be populated as soon as they
/// are writable, the system would refuse to take their memory back, and all of the arena would count as locked memory
/// (`ulimit -l`).
fn unlock(base: NonNull<u8>, bytes: usize) {
    // SAFETY: the arena's own addresses; their contents do not change.
    unsafe { libc::munlock(base.as_ptr().cast(), bytes) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program may lock all its memory at any time (`mlockall`).
    #[test]
    #[cfg_attr(miri, ignore = "maps memory without access")]
    fn locked_addresses_have_memory_only_from_populating_to_depopulating() {
        const BYTES: usize = 2 << 20;
        // SAFETY: new addresses.
        let base = unsafe { close(None, BYTES) }.unwrap();
        // SAFETY: their contents do not change.
        let lock = || unsafe { libc::mlock(base.as_ptr().cast(), BYTES) == 0 };
        let is_resident = || {
            let mut pages = [0_u8; BYTES / 4096];
            // SAFETY: a byte for each page.
            assert_eq!(unsafe { libc::mincore(base.as_ptr().cast(), BYTES, pages.as_mut_ptr()) }, 0);
            pages.iter().any(|page| page & 1 != 0)
        };
        assert!(!lock(), "closed addresses cannot be filled, but count as locked");
        // SAFETY: nobody else uses them.
        unsafe { open(base, BYTES) }.unwrap();
        assert!(!is_resident(), "opened");
        // SAFETY: as above.
        unsafe { populate(base, BYTES, |_| ()) };
        assert!(is_resident(), "populated");
        if !lock() {
            eprintln!("memory cannot be locked here: that part was not tested");
        }
        // SAFETY: as above.
        unsafe { depopulate(base, BYTES) };
        assert!(!is_resident(), "depopulated");
        // SAFETY: as above.
        unsafe { libc::munmap(base.as_ptr().cast(), BYTES) };
    }
}
