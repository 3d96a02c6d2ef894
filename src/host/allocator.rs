//! The library's allocator: the C library's, with a reserve.
//!
//! A program at a limit of its own (`ulimit -v`) gets "out of memory" from CUDA, and goes on. Rust ends the process if an allocation fails. So what
//! the library needs for a call comes out of a reserve then, and the driver's own answer reaches the program.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

/// Slots of one size in the reserve.
struct Slots {
    /// A power of two.
    bytes: usize,
    /// Where the first one is.
    offset: usize,
    /// A bit for each: whether it is taken.
    taken: &'static [AtomicU64],
}

const BITS: usize = u64::BITS as usize;

static TAKEN: [AtomicU64; 28] = [const { AtomicU64::new(0) }; 28];

/// By size. What the library does for a call of the program's needs little; larger requests fail.
static SLOTS: [Slots; 4] = {
    let (small, rest) = TAKEN.split_at(16);
    let (medium, rest) = rest.split_at(8);
    let (large, huge) = rest.split_at(3);
    let [of_small, of_medium, of_large] = [small.len() * BITS * 64, medium.len() * BITS * 512, large.len() * BITS * 4096];
    [
        Slots { bytes: 64, offset: 0, taken: small },
        Slots { bytes: 512, offset: of_small, taken: medium },
        Slots { bytes: 4096, offset: of_small + of_medium, taken: large },
        Slots { bytes: 16384, offset: of_small + of_medium + of_large, taken: huge },
    ]
};

const RESERVED: usize = BITS * (16 * 64 + 8 * 512 + 3 * 4096 + 16384);

/// Takes no memory of the machine's before it is used.
#[repr(align(16384))]
struct Reserve(UnsafeCell<[u8; RESERVED]>);

// SAFETY: who takes a slot has it alone.
unsafe impl Sync for Reserve {}

static RESERVE: Reserve = Reserve(UnsafeCell::new([0; RESERVED]));

impl Slots {
    fn take(&self) -> Option<*mut u8> {
        self.taken.iter().enumerate().find_map(|(place, word)| {
            let taken = word.fetch_update(Ordering::Acquire, Ordering::Relaxed, |bits| (bits != u64::MAX).then(|| bits | (bits + 1)));
            let slot = place * BITS + taken.ok()?.trailing_ones() as usize;
            Some(RESERVE.0.get().cast::<u8>().wrapping_add(self.offset + slot * self.bytes))
        })
    }

    fn give_back(&self, offset: usize) {
        let slot = (offset - self.offset) / self.bytes;
        self.taken[slot / BITS].fetch_and(!(1 << (slot % BITS)), Ordering::Release);
    }
}

/// Where memory of the reserve begins in it; `None` for other memory.
fn offset_in_reserve(memory: *mut u8) -> Option<usize> {
    (memory as usize).checked_sub(RESERVE.0.get() as usize).filter(|offset| *offset < RESERVED)
}

fn take_from_reserve(layout: Layout) -> *mut u8 {
    let bytes = layout.size().max(layout.align());
    SLOTS.iter().filter(|slots| slots.bytes >= bytes).find_map(Slots::take).unwrap_or(ptr::null_mut())
}

/// Whether the C library has so much memory now: for work that needs more than the reserve has, and can be left undone.
pub fn has_beside_reserve(bytes: usize) -> bool {
    let Ok(layout) = Layout::from_size_align(bytes.max(1), 1) else { return false };
    // SAFETY: the layout has a size. Nobody uses the memory.
    unsafe {
        let memory = System.alloc(layout);
        if !memory.is_null() {
            System.dealloc(memory, layout);
        }
        !memory.is_null()
    }
}

/// The allocator.
#[derive(Debug)]
pub struct Allocator;

// SAFETY: memory is the C library's, or a slot that is large enough, aligned to its size, and nobody else's until it is given back.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: here and below, the caller's promises are passed on.
        let memory = unsafe { System.alloc(layout) };
        if memory.is_null() { take_from_reserve(layout) } else { memory }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        let memory = unsafe { System.alloc_zeroed(layout) };
        if !memory.is_null() {
            return memory;
        }
        let memory = take_from_reserve(layout);
        if !memory.is_null() {
            // SAFETY: as large as the layout.
            unsafe { memory.write_bytes(0, layout.size()) };
        }
        memory
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        match offset_in_reserve(memory) {
            Some(offset) => SLOTS.iter().rev().find(|slots| slots.offset <= offset).into_iter().for_each(|slots| slots.give_back(offset)),
            // SAFETY: as above.
            None => unsafe { System.dealloc(memory, layout) },
        }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        if offset_in_reserve(memory).is_none() {
            // SAFETY: as above.
            let moved = unsafe { System.realloc(memory, layout, bytes) };
            if !moved.is_null() {
                return moved;
            }
        }
        // SAFETY: as above: the alignment is valid, and the caller promises that the size is.
        unsafe {
            let moved = self.alloc(Layout::from_size_align_unchecked(bytes, layout.align()));
            if !moved.is_null() {
                moved.copy_from_nonoverlapping(memory, layout.size().min(bytes));
                self.dealloc(memory, layout);
            }
            moved
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_apart_aligned_and_taken_again() {
        let layouts = [(1, 1), (64, 64), (65, 8), (512, 512), (4096, 4096), (5000, 8), (16384, 16384)];
        let take = |(bytes, align)| {
            let layout = Layout::from_size_align(bytes, align).unwrap();
            let memory = take_from_reserve(layout);
            assert!(!memory.is_null() && (memory as usize).is_multiple_of(align) && offset_in_reserve(memory).is_some());
            // SAFETY: as large as asked for.
            unsafe { memory.write_bytes(bytes as u8, bytes) };
            (memory, layout)
        };
        for _ in 0..10_000 {
            let mut taken: Vec<_> = layouts.into_iter().map(take).collect();
            for (memory, layout) in taken.drain(..) {
                // SAFETY: written above.
                assert!(unsafe { std::slice::from_raw_parts(memory, layout.size()) }.iter().all(|byte| *byte == layout.size() as u8));
                // SAFETY: taken above.
                unsafe { Allocator.dealloc(memory, layout) };
            }
        }
        assert!(take_from_reserve(Layout::from_size_align(16385, 1).unwrap()).is_null(), "too large");
        let all: Vec<_> =
            std::iter::from_fn(|| Some(take_from_reserve(Layout::new::<[u8; 16384]>())).filter(|one| !one.is_null())).collect();
        assert_eq!(all.len(), BITS, "as many as there are");
        let layout = Layout::new::<[u8; 4000]>();
        let (memory, _) = take((4000, 1));
        // SAFETY: taken above, and given back below.
        unsafe {
            let moved = Allocator.realloc(memory, layout, 100_000);
            assert!(offset_in_reserve(moved).is_none() && *moved == 4000_usize as u8);
            Allocator.dealloc(moved, Layout::new::<[u8; 100_000]>());
        }
        // SAFETY: taken above.
        all.into_iter().for_each(|one| unsafe { Allocator.dealloc(one, Layout::new::<[u8; 16384]>()) });
        assert!(TAKEN.iter().all(|word| word.load(Ordering::Relaxed) == 0));
    }
}
