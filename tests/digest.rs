//! Digests by the simulated kernel, compared with the reference, and a hasher's behaviour when calls fail, memory is
//! unmapped or its context is destroyed.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks, clippy::missing_transmute_annotations)]

mod common;

use common::{Gpu, MIB, free, malloc, pattern, synchronize, write};
use std::ffi::{CStr, c_char, c_void};
use std::mem::transmute;
use vramctl_backup::digest::{DIGEST_PIECE as PIECE, Digest, Hasher, Key};
use vramctl_driver::{Addresses, Current};
use vramctl_model::code;

fn current() -> Current {
    Current::of_thread().unwrap().expect("the program has a context")
}

fn reference(contents: &[u8]) -> Vec<Digest> {
    contents.chunks_exact(PIECE).map(|piece| Key::of_process().unwrap().digest(piece)).collect()
}

fn allocate(seed: u64, bytes: usize) -> (u64, Vec<u8>) {
    let (address, contents) = (malloc(bytes).unwrap(), pattern(seed, bytes));
    assert_eq!(write(address, &contents), 0);
    (address, contents)
}

/// A function of the simulated driver.
fn symbol(name: &CStr) -> *mut c_void {
    let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    let symbol = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!symbol.is_null(), "{name:?}");
    symbol
}

/// Live driver objects that a hasher creates, by kind.
fn parts() -> [u64; 3] {
    let live: unsafe extern "C" fn(*const c_char) -> u64 = unsafe { transmute(symbol(c"simgpu_live")) };
    [c"modules", c"plain", c"streams"].map(|kind| unsafe { live(kind.as_ptr()) })
}

#[test]
fn the_kernel_agrees_with_the_reference() {
    let gpu = Gpu::take();
    let current = current();
    let mut hasher = Hasher::new(&current).unwrap();
    let (one, mut contents) = allocate(1, 6 * MIB);
    let (two, other) = allocate(2, 4 * MIB);
    assert_eq!(hasher.digests(&current, &[]).unwrap(), []);
    // In the requested order, in one launch.
    gpu.reset_counts();
    let found = hasher.digests(&current, &[(two, 4 * MIB), (one, 0), (one + 2 * MIB as u64, 4 * MIB), (one, PIECE)]).unwrap();
    let wanted = [&other, &contents[PIECE..], &contents[..PIECE]].map(reference).concat();
    assert_eq!(found, wanted);
    assert_eq!(gpu.calls("cuLaunchKernel"), 1);
    assert_eq!(gpu.calls("cuMemAlloc_v2"), 0, "everything was taken in advance");

    contents[3 * MIB + 5] ^= 0x20;
    assert_eq!(write(one, &contents), 0);
    let after = hasher.digests(&current, &[(one, 6 * MIB)]).unwrap();
    assert_eq!(after, reference(&contents));
    assert_eq!((after[0], after[2]), (found[4], found[3]));
    assert_ne!(after[1], found[2]);
}

#[test]
fn partial_pieces_are_refused() {
    let _gpu = Gpu::take();
    let current = current();
    let mut hasher = Hasher::new(&current).unwrap();
    let (address, _) = allocate(1, 4 * MIB);
    for span in [(address, MIB), (address, PIECE + 1), (address + 8, PIECE)] {
        assert_eq!(hasher.digests(&current, &[span]).unwrap_err().code, code::INVALID_VALUE);
    }
}

/// Fails each call at each of its uses in a hasher's life. The result is an error or the right digests, without a leak.
#[test]
fn every_call_may_fail() {
    const CALLS: &[&str] = &[
        "cuModuleLoadData",
        "cuModuleUnload",
        "cuModuleGetFunction",
        "cuLaunchKernel",
        "cuMemAlloc_v2",
        "cuMemFree_v2",
        "cuPointerGetAttributes",
        "cuMemcpyHtoDAsync_v2",
        "cuMemcpyDtoHAsync_v2",
        "cuStreamCreate",
        "cuStreamSynchronize",
        "cuCtxPushCurrent_v2",
    ];
    let gpu = Gpu::take();
    let current = current();
    let (address, contents) = allocate(1, 4 * MIB);
    let wanted = reference(&contents);
    let life = || {
        let mut hasher = Hasher::new(&current)?;
        hasher.digests(&current, &[(address, 4 * MIB)])
    };
    assert_eq!(life().as_ref(), Ok(&wanted));
    let mut before = parts();
    for call in CALLS {
        gpu.reset_counts();
        assert_eq!(life().as_ref(), Ok(&wanted));
        let uses = gpu.calls(call);
        assert_ne!(uses, 0, "{call}");
        for nth in 1..=uses {
            gpu.fail(call, nth, 4242, 1);
            let answer = life();
            gpu.clear_faults();
            match answer {
                Ok(digests) => assert_eq!(digests, wanted, "{call} {nth}"),
                Err(failure) => assert!([4242, code::CONTEXT_IS_DESTROYED].contains(&failure.code), "{call} {nth}: {failure}"),
            }
            // What cannot be destroyed, or may be destroyed already, is left to its context.
            let leaves = ["cuModuleUnload", "cuMemFree_v2", "cuPointerGetAttributes", "cuCtxPushCurrent_v2"].contains(call);
            let after = parts();
            assert!(after == before || (leaves && after.iter().zip(before).all(|(after, before)| after - before <= 1)), "{call} {nth}");
            before = after;
        }
    }
    free(address);
}

/// An illegal address in the kernel breaks the context for good, but does not hang the hasher.
#[test]
fn unmapped_memory_is_an_error() {
    let _gpu = Gpu::take();
    // In a context of its own, because it will be lost.
    let create: unsafe extern "C" fn(*mut *mut c_void, u32, i32) -> u32 = unsafe { transmute(symbol(c"cuCtxCreate_v2")) };
    let mut context = std::ptr::null_mut();
    assert_eq!(unsafe { create(&raw mut context, 0, 0) }, 0);
    let current = current();
    let mut hasher = Hasher::new(&current).unwrap();
    let nothing = Addresses::reserve(2 * PIECE).unwrap();
    let spans = [(nothing.base(), 2 * PIECE)];
    for _ in 0..2 {
        assert_eq!(hasher.digests(&current, &spans).unwrap_err().code, 700);
    }
    drop(hasher);
}

/// A reset destroys everything a hasher owns. It reports that, and dropping it makes no call on the destroyed objects.
#[test]
fn a_reset_is_noticed() {
    let gpu = Gpu::take();
    let reset: unsafe extern "C" fn(i32) -> u32 = unsafe { transmute(symbol(c"cuDevicePrimaryCtxReset_v2")) };
    let retain: unsafe extern "C" fn(*mut *mut c_void, i32) -> u32 = unsafe { transmute(symbol(c"cuDevicePrimaryCtxRetain")) };
    let mut hasher = Hasher::new(&current()).unwrap();
    assert_eq!(unsafe { reset(0) }, 0);
    let mut context = std::ptr::null_mut();
    assert_eq!(unsafe { retain(&raw mut context, 0) }, 0);
    let (address, contents) = allocate(1, PIECE);
    // A new hasher has its memory by now, at the same address.
    let mut next = Hasher::new(&current()).unwrap();
    assert_eq!(hasher.digests(&current(), &[(address, PIECE)]).unwrap_err().code, code::CONTEXT_IS_DESTROYED);
    gpu.reset_counts();
    drop(hasher);
    for call in ["cuModuleUnload", "cuMemFree_v2", "cuStreamDestroy_v2"] {
        assert_eq!(gpu.calls(call), 0, "{call}");
    }
    assert_eq!(next.digests(&current(), &[(address, PIECE)]).unwrap(), reference(&contents));
    assert_eq!(synchronize(), 0);
}
