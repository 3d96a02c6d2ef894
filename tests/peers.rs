//! Access of one device to another's managed memory: peer access, and access to memory pools. Given and taken as with CUDA's own memory.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks)]

mod common;

use common::machine::{Machine, Ran};
use common::{Gpu, MIB, OwnContext, Stream, free, last_error, library, malloc_tagged, pattern, pause, read, resume, set_device, write};
use std::ffi::c_void;
use std::ptr;
use vramctl_core::memory::{Memory, region};
use vramctl_driver::{ContextHandle, Current, StreamHandle};
use vramctl_intercept::{entries, hooks, launch};
use vramctl_model::ObstacleKind;

const NULL_STREAM: StreamHandle = unsafe { std::mem::transmute::<usize, StreamHandle>(0) };

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

/// The same, in stream order from the default pool.
fn there_from_pool(tag: &str) -> u64 {
    set_device(OWNER);
    let mut pointer = ptr::null_mut();
    region::begin(Some(tag), None).unwrap();
    assert_eq!(unsafe { hooks::cudaMallocAsync(&raw mut pointer, 2 * MIB, NULL_STREAM) }, 0);
    region::end().unwrap();
    set_device(PEER);
    assert!(Memory::get().registry.manages(pointer as u64));
    pointer as u64
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
    common::cycle(&[]);
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

/// If the driver refuses to take access from some memory, the program is not told what plain CUDA cannot answer: nothing of it is left that
/// uses the memory there.
#[test]
fn access_that_the_driver_does_not_take_away_ends_with_the_next_pause() {
    let gpu = take();
    let addresses = [there("t"), there("t"), there("t")];
    // Then it takes two calls.
    release([addresses[1]]);
    let of_driver: fn() -> u32 = || unsafe { entries::cuCtxDisablePeerAccess(owner()) };
    for disable in [disable, of_driver] {
        assert_eq!(enable(), 0);
        gpu.fail("cuMemSetAccess", 2, 999, u64::MAX);
        assert_eq!(disable(), 0);
        gpu.clear_faults();
        assert_eq!(disable(), 705);
        pause_and_resume();
        assert!(!is_open(addresses[0]) && !is_open(addresses[2]));
    }
    assert_eq!(enable(), 0);
    gpu.fail("cuMemSetAccess", 2, 999, 1);
    assert_eq!(disable(), 0);
    assert!(!is_open(addresses[0]) && !is_open(addresses[2]), "one refusal is tried again");
    release([addresses[0], addresses[2]]);
}

/// A program is prepared for a device without peer access, and for nothing else.
#[test]
fn access_that_the_driver_refuses_is_unsupported() {
    let gpu = take();
    let address = there("t");
    gpu.fail("cuMemSetAccess", 1, 999, 1);
    assert_eq!(enable(), 0, "one refusal is tried again");
    assert!(is_open(address));
    assert_eq!(disable(), 0);
    for enable in [enable, || unsafe { entries::cuCtxEnablePeerAccess(owner(), 0) }] {
        gpu.fail("cuMemSetAccess", 1, 999, u64::MAX);
        assert_eq!(enable(), 217);
        gpu.clear_faults();
        assert!(!is_open(address));
        // It is not enabled for the driver, either.
        assert_eq!(enable(), 0);
        assert_eq!(disable(), 0);
    }
    release([address]);
}

fn set_pool_access(call: SetPoolAccess, flags: u32) -> u32 {
    let access = [[1, PEER as u32, flags], [1, OWNER as u32, 3]];
    let answer = call(vramctl_driver::default_pool(OWNER).unwrap(), access.as_ptr().cast(), access.len());
    last_error();
    answer
}

type SetPoolAccess = fn(*mut c_void, *const c_void, usize) -> u32;

const POOL_CALLS: [SetPoolAccess; 2] = [
    |pool, access, count| unsafe { hooks::cudaMemPoolSetAccess(pool, access, count) },
    |pool, access, count| unsafe { entries::cuMemPoolSetAccess(pool, access.cast(), count) },
];

/// `cudaMemPoolSetAccess` applies to managed memory from the pool: allocated before or after, and after a resume.
#[test]
fn the_access_of_a_pool_is_that_of_its_memory() {
    let _gpu = take();
    for call in POOL_CALLS {
        let (plain, earlier, paused) = (there("t"), there_from_pool("t"), there_from_pool("paused"));
        let contents = pattern(1, 2 * MIB);
        fill(earlier, &contents);
        pause(&["paused"]).unwrap();
        assert_eq!(set_pool_access(call, 3), 0);
        let later = there_from_pool("t");
        resume(&[]).unwrap();
        let all = [earlier, paused, later];
        let check = |open: bool| {
            for (index, address) in all.iter().enumerate() {
                assert_eq!(is_open(*address), open, "{index}");
            }
            assert!(!is_open(plain), "it is not from the pool");
        };
        check(true);
        let (stream, here) = (Stream::create(), malloc_tagged("here", None, 2 * MIB).unwrap());
        assert_eq!((stream.copy(here, earlier, 2 * MIB), stream.synchronize()), (0, 0));
        assert!(read(here, 2 * MIB).unwrap() == contents);
        pause_and_resume();
        check(true);
        let is_obstacle = || Memory::get().obstacles().iter().any(|obstacle| obstacle.kind == ObstacleKind::Peers);
        assert!(is_obstacle());

        pause(&["paused"]).unwrap();
        assert_eq!(set_pool_access(call, 0), 0);
        resume(&[]).unwrap();
        check(false);
        pause_and_resume();
        check(false);
        assert!(!is_obstacle());
        assert_eq!(free(here), 0);
        release(all.into_iter().chain([plain]));
    }
}

/// Enabled peer access is for plain memory, the access of a pool for its own: neither ends with the other.
#[test]
fn peer_access_and_that_of_pools_are_independent() {
    let _gpu = take();
    let (plain, from_pool) = (there("t"), there_from_pool("t"));
    let open = || (is_open(plain), is_open(from_pool));
    assert_eq!(enable(), 0);
    assert_eq!(open(), (true, false));
    assert_eq!(set_pool_access(POOL_CALLS[0], 3), 0);
    assert_eq!(open(), (true, true));
    assert_eq!(disable(), 0);
    assert_eq!(open(), (false, true));
    assert_eq!((enable(), set_pool_access(POOL_CALLS[0], 0)), (0, 0));
    assert_eq!(open(), (true, false));
    assert_eq!(disable(), 0);
    release([plain, from_pool]);
}

/// Neither a pause nor the call that closes a pool takes memory from under work of the other device.
#[test]
fn work_that_uses_a_pool_is_waited_for() {
    let gpu = take();
    // A pause that copies nothing takes no time otherwise.
    let address = there_from_pool(common::DISCARDED_TAG);
    assert_eq!(set_pool_access(POOL_CALLS[0], 3), 0);
    let stream = Stream::create();
    let while_it_works = |then: &dyn Fn()| {
        gpu.set_op_delay_ms(200);
        assert_eq!(stream.fill(address, 9, 2 * MIB), 0);
        then();
        gpu.set_op_delay_ms(0);
        assert_eq!(stream.synchronize(), 0, "nothing was taken from under the work");
    };
    while_it_works(&|| _ = pause(&[]).unwrap());
    resume(&[]).unwrap();
    while_it_works(&|| assert_eq!(set_pool_access(POOL_CALLS[0], 0), 0));
    assert!(!is_open(address));
    release([address]);
}

#[test]
fn access_of_a_pool_that_cannot_be_set_stays_as_it_was() {
    let gpu = take();
    let addresses = [there_from_pool("t"), there_from_pool("t"), there_from_pool("t")];
    // Then it takes two calls.
    release([addresses[1]]);
    let [first, _, last] = addresses;
    gpu.fail("cuMemPoolSetAccess", 1, 999, 1);
    assert_eq!(set_pool_access(POOL_CALLS[0], 3), 999);
    assert!(!is_open(first) && !is_open(last));
    for (flags, before) in [(3, false), (0, true)] {
        gpu.fail("cuMemSetAccess", 2, 999, u64::MAX);
        assert_eq!(set_pool_access(POOL_CALLS[0], flags), 217);
        gpu.clear_faults();
        pause_and_resume();
        assert_eq!((is_open(first), is_open(last)), (before, before));
        assert_eq!(set_pool_access(POOL_CALLS[0], flags), 0);
        assert_eq!((is_open(first), is_open(last)), (!before, !before));
    }
    release([first, last]);
}

/// In a program, a call of the runtime passes the library twice: the runtime's function and the driver's. Or once, if the program has looked
/// the runtime's function up.
#[test]
fn calls_of_the_runtime_pass_both_layers() {
    const PROGRAM: &str = r#"
import ctypes, sys
from ctypes import byref, c_size_t, c_uint64, c_void_p
own = ctypes.CDLL("libcudart.so.13", mode=ctypes.RTLD_GLOBAL)
cuda, driver = own if sys.argv[1] == "looked up" else ctypes.CDLL(None), ctypes.CDLL("libcuda.so.1")
def is_open(pointer):
    flags = c_uint64()
    assert driver.cuMemGetAccess(byref(flags), (ctypes.c_int * 2)(1, 0), pointer) == 0
    return flags.value == 3
cuda.cudaSetDevice(1)
plain, pooled, pool = c_void_p(), c_void_p(), c_void_p()
assert cuda.cudaMalloc(byref(plain), c_size_t(4 << 20)) == 0
assert cuda.cudaMallocAsync(byref(pooled), c_size_t(4 << 20), None) == 0
assert cuda.cudaDeviceGetDefaultMemPool(byref(pool), 1) == 0
cuda.cudaSetDevice(0)
assert not is_open(plain) and not is_open(pooled)
assert cuda.cudaMemPoolSetAccess(pool, (ctypes.c_int * 3)(1, 0, 3), c_size_t(1)) == 0
assert is_open(pooled)
assert cuda.cudaMemPoolSetAccess(pool, (ctypes.c_int * 3)(1, 0, 0), c_size_t(1)) == 0
assert cuda.cudaDeviceEnablePeerAccess(1, 0) == 0
assert is_open(plain) and not is_open(pooled)
assert cuda.cudaDeviceDisablePeerAccess(1) == 0
assert not is_open(plain)
assert cuda.cudaDeviceDisablePeerAccess(1) == 705
"#;
    for way in ["linked", "looked up"] {
        let machine = Machine::with(2, "256M");
        let mut python = machine.preloaded(&[&library()], "python3", &["-c", PROGRAM, way]);
        Ran::of(python.env("VRAMCTL_TAG", "default")).expect(0, "", "");
    }
}

/// A copy that names contexts needs no access, so a pause waits for those of every device.
#[test]
fn copies_between_contexts_are_waited_for() {
    let gpu = take();
    // A pause that copies nothing takes no time otherwise.
    let address = there(common::DISCARDED_TAG);
    let (stream, here) = (Stream::create(), malloc_tagged("here", None, 2 * MIB).unwrap());
    let word = |handle: ContextHandle| handle.address() as usize;
    let peer = Current::primary_of(PEER).unwrap().unwrap().handle();
    gpu.set_op_delay_ms(200);
    let copied =
        unsafe { launch::cuMemcpyPeerAsync(here as usize, word(peer), address as usize, word(owner()), 2 * MIB, stream.0 as usize) };
    assert_eq!(copied, 0);
    pause(&[common::DISCARDED_TAG]).unwrap();
    gpu.set_op_delay_ms(0);
    assert_eq!(stream.synchronize(), 0, "nothing was taken from under the copy");
    resume(&[]).unwrap();
    assert_eq!(free(here), 0);
    release([address]);
}
