//! Peer access to managed memory, given and taken as with CUDA's own memory.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks)]

mod common;

use common::{Gpu, MIB, OwnContext, Stream, free, last_error, malloc_tagged, pattern, pause, read, resume, set_device, write};
use std::ptr;
use vramctl_driver::{ContextHandle, Current};
use vramctl_intercept::{entries, hooks};

/// The device whose memory is used, and the one that uses it.
const OWNER: i32 = 1;
const PEER: i32 = 0;

/// The GPU, without peer access and with the peer as the current device.
fn take() -> Gpu {
    let gpu = Gpu::take();
    for device in [OWNER, PEER] {
        set_device(device);
        assert_eq!(unsafe { hooks::cudaDeviceReset() }, 0);
        set_device(device);
        assert_eq!(unsafe { hooks::cudaFree(ptr::null_mut()) }, 0);
    }
    gpu
}

fn owner() -> ContextHandle {
    Current::primary_of(OWNER).unwrap().unwrap().handle()
}

/// Memory of the owner; the peer stays the current device.
fn there(tag: &str) -> u64 {
    set_device(OWNER);
    let address = malloc_tagged(tag, None, 2 * MIB).unwrap();
    set_device(PEER);
    address
}

fn fill(address: u64, contents: &[u8]) {
    set_device(OWNER);
    assert_eq!(write(address, contents), 0);
    set_device(PEER);
}

fn release(addresses: impl IntoIterator<Item = u64>) {
    set_device(OWNER);
    for address in addresses {
        assert_eq!(free(address), 0);
    }
    set_device(PEER);
}

/// Whether the peer may read and write there.
#[track_caller]
fn is_open(address: u64) -> bool {
    let (mut flags, location) = (9, [1, PEER]);
    assert_eq!(unsafe { entries::cuMemGetAccess(&raw mut flags, location.as_ptr().cast(), address) }, 0);
    let mut of_owner = 9;
    assert_eq!(unsafe { entries::cuMemGetAccess(&raw mut of_owner, [1, OWNER].as_ptr().cast(), address) }, 0);
    assert_eq!(of_owner, 3);
    assert!(matches!(flags, 0 | 3), "{flags}");
    flags == 3
}

fn enable() -> u32 {
    let answer = unsafe { hooks::cudaDeviceEnablePeerAccess(OWNER, 0) };
    last_error();
    answer
}

fn disable() -> u32 {
    let answer = unsafe { hooks::cudaDeviceDisablePeerAccess(OWNER) };
    last_error();
    answer
}

fn pause_and_resume() {
    pause(&[]).unwrap();
    resume(&[]).unwrap();
}

/// Each context has what it enabled, whatever others do.
#[test]
fn access_lasts_until_the_last_context_that_enabled_it_ends() {
    let _gpu = take();
    let address = there("t");
    let contents = pattern(1, 2 * MIB);
    fill(address, &contents);
    assert_eq!(enable(), 0);
    {
        let _other = OwnContext::create(PEER);
        assert_eq!(unsafe { entries::cuCtxEnablePeerAccess(owner(), 0) }, 0);
    }
    set_device(PEER);
    pause_and_resume();
    assert!(is_open(address));
    let (stream, here) = (Stream::create(), malloc_tagged("here", None, 2 * MIB).unwrap());
    assert_eq!((stream.copy(here, address, 2 * MIB), stream.synchronize()), (0, 0));
    assert!(read(here, 2 * MIB).unwrap() == contents);

    // The other way round: the one that stays enabled it last.
    let other = OwnContext::create(PEER);
    assert_eq!(unsafe { entries::cuCtxEnablePeerAccess(owner(), 0) }, 0);
    set_device(PEER);
    drop(stream);
    assert_eq!(unsafe { hooks::cudaDeviceReset() }, 0);
    pause_and_resume();
    assert!(is_open(address));
    drop(other);
    set_device(PEER);
    pause_and_resume();
    assert!(!is_open(address), "nobody has access any more");
    release([address]);
}

/// Access to the memory of a context ends with that context too.
#[test]
fn access_ends_with_the_context_whose_memory_it_was() {
    let _gpu = take();
    let address = there("t");
    {
        let other = OwnContext::create(OWNER);
        set_device(PEER);
        assert_eq!(unsafe { entries::cuCtxEnablePeerAccess(other.handle(), 0) }, 0);
        assert!(is_open(address));
    }
    pause_and_resume();
    assert!(!is_open(address));
    release([address]);
}

#[test]
fn a_rejected_disable_takes_nothing_away() {
    let gpu = take();
    let address = there("t");
    assert_eq!(enable(), 0);
    {
        let _other = OwnContext::create(PEER);
        assert_eq!(unsafe { entries::cuCtxDisablePeerAccess(owner()) }, 705, "it has not enabled it");
    }
    set_device(PEER);
    pause_and_resume();
    assert!(is_open(address));
    gpu.fail("cuCtxDisablePeerAccess", 1, 705, 1);
    assert_eq!(disable(), 705);
    gpu.fail("cuCtxDisablePeerAccess", 1, 705, 1);
    assert_eq!(unsafe { entries::cuCtxDisablePeerAccess(owner()) }, 705);
    pause_and_resume();
    assert!(is_open(address));
    assert_eq!(disable(), 0);
    release([address]);
}

/// As with CUDA's own memory, access ends with the call, not at the next pause.
#[test]
fn disabled_access_ends_at_once() {
    let _gpu = take();
    let (active, paused) = (there("active"), there("paused"));
    assert_eq!(enable(), 0);
    let other = OwnContext::create(PEER);
    assert_eq!(unsafe { entries::cuCtxEnablePeerAccess(owner(), 0) }, 0);
    set_device(PEER);
    pause(&["paused"]).unwrap();
    assert_eq!(disable(), 0);
    assert!(is_open(active), "another context still has access");
    other.enter();
    assert_eq!(unsafe { entries::cuCtxDisablePeerAccess(owner()) }, 0);
    assert!(!is_open(active));
    drop(other);
    set_device(PEER);
    resume(&[]).unwrap();
    assert!(!is_open(active) && !is_open(paused));
    let stream = Stream::create();
    assert_eq!((stream.fill(active, 1, MIB), stream.fill(paused, 1, MIB)), (1, 1));
    last_error();
    assert_eq!(enable(), 0);
    assert!(is_open(active) && is_open(paused));
    assert_eq!(disable(), 0);
    release([active, paused]);
}

#[test]
fn disabling_waits_for_the_work_that_uses_the_memory() {
    let gpu = take();
    let address = there("t");
    assert_eq!(enable(), 0);
    let stream = Stream::create();
    gpu.set_op_delay_ms(200);
    assert_eq!(stream.fill(address, 9, 2 * MIB), 0);
    assert_eq!(disable(), 0);
    gpu.set_op_delay_ms(0);
    assert_eq!(stream.synchronize(), 0, "nothing was taken from under the work");
    assert!(!is_open(address));
    release([address]);
}

/// If the driver refuses to take access from some memory, it stays enabled: for all memory, and for the driver.
#[test]
fn a_disable_that_fails_changes_nothing() {
    let gpu = take();
    let addresses = [there("t"), there("t"), there("t")];
    // Then it takes two calls.
    release([addresses[1]]);
    assert_eq!(enable(), 0);
    let of_driver: fn() -> u32 = || unsafe { entries::cuCtxDisablePeerAccess(owner()) };
    for disable in [disable, of_driver] {
        gpu.fail("cuMemSetAccess", 2, 999, 1);
        assert_eq!(disable(), 999);
        gpu.clear_faults();
        assert!(is_open(addresses[0]) && is_open(addresses[2]));
        pause_and_resume();
        assert!(is_open(addresses[0]) && is_open(addresses[2]));
        assert_eq!(enable(), 704);
    }
    assert_eq!(disable(), 0);
    assert!(!is_open(addresses[0]) && !is_open(addresses[2]));
    release([addresses[0], addresses[2]]);
}
