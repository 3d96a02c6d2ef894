//! The arena's addresses, and the memory behind them: system calls and no bookkeeping.

use std::io;
use std::ptr::{self, NonNull};

/// Addresses for so many bytes, with no memory behind them and not to be used: new ones, or those of ours that begin there,
/// which lose what they had. They count against no limit but that of addresses.
///
/// # Safety
/// Those of ours are addresses of the arena, and nobody uses them now.
pub unsafe fn close(at: Option<NonNull<u8>>, bytes: usize) -> Option<NonNull<u8>> {
    let place = at.map_or(ptr::null_mut(), NonNull::as_ptr).cast();
    let fixed = if at.is_some() { libc::MAP_FIXED } else { 0 };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | fixed;
    // SAFETY: a new private mapping that touches no other memory, or by the caller's promise takes the place of one that nobody uses.
    let base = unsafe { libc::mmap(place, bytes, libc::PROT_NONE, flags, -1, 0) };
    if base == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the mapping just made.
    unsafe {
        // Huge pages make populating and registering cheaper. A forked child neither pays for the memory nor turns its
        // pages into copies under the device's feet. A core dump is not made larger. They are wishes: where the kernel does
        // not know them, nothing is lost.
        for wish in [libc::MADV_HUGEPAGE, libc::MADV_DONTFORK, libc::MADV_DONTDUMP] {
            libc::madvise(base, bytes, wish);
        }
    }
    let base = NonNull::new(base.cast())?;
    unlock(base, bytes);
    Some(base)
}

/// Makes addresses of ours writable that nobody can have used yet.
///
/// # Safety
/// They are addresses of the arena, and nobody uses them now.
pub unsafe fn open(base: NonNull<u8>, bytes: usize) -> io::Result<()> {
    unlock(base, bytes);
    // SAFETY: the caller's promise.
    let answer = unsafe { libc::mprotect(base.as_ptr().cast(), bytes, libc::PROT_READ | libc::PROT_WRITE) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Takes memory for open addresses that nobody else uses, by a write to each page: page faults of several threads run side by
/// side. `madvise` would hold the lock of the address space all the while, and the driver, which changes the address space as
/// it registers memory, would wait for all of them (`docs/performance.md`). `taken` is told how many bytes more there are.
///
/// # Safety
/// They are addresses of the arena, and nobody uses them now.
pub unsafe fn populate(base: NonNull<u8>, bytes: usize, mut taken: impl FnMut(usize)) {
    /// The smallest there is: writing to every such part of a larger page does no harm.
    const PAGE: usize = 4096;
    /// A huge page.
    const STEP: usize = 2 << 20;
    for step in (0..bytes).step_by(STEP) {
        for offset in (step..step + STEP).step_by(PAGE) {
            // SAFETY: the caller's promise. Volatile, or nothing need be written.
            unsafe { base.add(offset).write_volatile(0) };
        }
        taken(STEP);
    }
}

/// Gives the memory behind addresses back to the system. Nobody uses it any more.
///
/// # Safety
/// They are addresses of the arena, and nobody uses them now.
pub unsafe fn depopulate(base: NonNull<u8>, bytes: usize) {
    unlock(base, bytes);
    // SAFETY: the caller's promise.
    unsafe { libc::madvise(base.as_ptr().cast(), bytes, libc::MADV_DONTNEED) };
}

/// In a program that has all its memory locked (`mlockall`), addresses are filled as soon as they can be written to, and
/// what is there does not go.
fn unlock(base: NonNull<u8>, bytes: usize) {
    // SAFETY: addresses of ours; their contents do not change.
    unsafe { libc::munlock(base.as_ptr().cast(), bytes) };
}
