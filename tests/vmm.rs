//! Programs that manage virtual memory themselves, and programs that use the driver's functions: their memory is paused and resumed like
//! memory of `cudaMalloc`, and they do not notice that the driver's handles change.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks)]

mod common;

use common::{DEVICE_BYTES, DEVICES, Gate, Gpu, MIB, SHARED, Stream, malloc_tagged, pattern, pause, read, resume, state, write};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::ScopedJoinHandle;
use std::time::Duration;
use vramctl_core::gate;
use vramctl_core::memory::share::Borrower;
use vramctl_core::memory::{Memory, is_ours, region};
use vramctl_driver::Ending;
use vramctl_intercept::{entries, launch};
use vramctl_model::{Error, Kind, ObstacleKind, Policy, Registered, TagState};

const PAGE: usize = 2 * MIB;

/// `CUmemAllocationProp` of plain memory on a device.
fn properties(device: i32) -> [u32; 8] {
    [1, 0, 1, device as u32, 0, 0, 0, 0]
}

fn create(tag: &str, backup: Option<Policy>, bytes: usize) -> Result<u64, u32> {
    create_on(0, tag, backup, bytes)
}

fn create_on(device: i32, tag: &str, backup: Option<Policy>, bytes: usize) -> Result<u64, u32> {
    let (mut handle, wanted) = (0, properties(device));
    region::begin(Some(tag), backup).unwrap();
    let code = unsafe { entries::cuMemCreate(&raw mut handle, bytes, wanted.as_ptr().cast(), 0) };
    region::end().unwrap();
    if code == 0 { Ok(handle) } else { Err(code) }
}

/// Addresses that the program reserves.
struct Reserved(u64, usize);

impl Reserved {
    fn new(bytes: usize) -> Self {
        let mut base = 0;
        assert_eq!(unsafe { entries::cuMemAddressReserve(&raw mut base, bytes, 0, 0, 0) }, 0);
        Self(base, bytes)
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let freed = unsafe { entries::cuMemAddressFree(self.0, self.1) };
        assert!(freed == 0 || std::thread::panicking(), "something is still mapped there");
    }
}

fn map(address: u64, bytes: usize, handle: u64) -> u32 {
    unsafe { entries::cuMemMap(address, bytes, 0, handle, 0) }
}

fn unmap(address: u64, bytes: usize) -> u32 {
    unsafe { entries::cuMemUnmap(address, bytes) }
}

fn open(address: u64, bytes: usize) -> u32 {
    allow(address, bytes, 0, 3)
}

fn allow(address: u64, bytes: usize, device: i32, flags: u32) -> u32 {
    let access = [1, device as u32, flags];
    unsafe { entries::cuMemSetAccess(address, bytes, access.as_ptr().cast(), 1) }
}

fn access(address: u64, device: i32) -> Result<u64, u32> {
    let (mut flags, location) = (9, [1, device as u32]);
    match unsafe { entries::cuMemGetAccess(&raw mut flags, location.as_ptr().cast(), address) } {
        0 => Ok(flags),
        code => Err(code),
    }
}

fn release(handle: u64) -> u32 {
    unsafe { entries::cuMemRelease(handle) }
}

fn retain(address: u64) -> Result<u64, u32> {
    let mut handle = 0;
    match unsafe { entries::cuMemRetainAllocationHandle(&raw mut handle, ptr::without_provenance_mut(address as usize)) } {
        0 => Ok(handle),
        code => Err(code),
    }
}

/// Beyond what an idle device has in use: nothing here takes memory of the second one.
fn pages_in_use(gpu: &Gpu) -> u64 {
    gpu.used(0).saturating_sub(gpu.used(1)) / PAGE as u64
}

/// The life of a handle with two mappings, as an allocator that grows a segment has it.
#[test]
fn a_handle_with_two_mappings_comes_back_at_both() {
    let gpu = Gpu::take();
    let before = gpu.footprint();
    let place = Reserved::new(4 * PAGE);
    let handle = create("own", None, PAGE).unwrap();
    assert!(is_ours(handle));
    assert_eq!((map(place.0, PAGE, handle), map(place.0 + 2 * PAGE as u64, PAGE, handle)), (0, 0));
    assert_eq!((open(place.0, PAGE), allow(place.0 + 2 * PAGE as u64, PAGE, 0, 1)), (0, 0));
    let bytes = pattern(1, PAGE);
    assert_eq!(write(place.0, &bytes), 0);
    let used = gpu.used(0);

    for cycle in 0..3 {
        let report = pause(&["own"]).unwrap();
        assert_eq!((report.bytes, gpu.used(0)), (PAGE as u64, used - PAGE as u64), "cycle {cycle}");
        assert_eq!(state("own"), Some(TagState::Paused));
        assert_eq!((access(place.0, 0), access(place.0 + 2 * PAGE as u64, 0), access(place.0, 1)), (Ok(3), Ok(1), Ok(0)));
        resume(&["own"]).unwrap();
        assert_eq!(read(place.0, PAGE), Ok(bytes.clone()), "cycle {cycle}");
        assert_eq!(read(place.0 + 2 * PAGE as u64, PAGE), Ok(bytes.clone()), "cycle {cycle}: the second mapping");
        assert_ne!(write(place.0 + 2 * PAGE as u64, &bytes), 0, "cycle {cycle}: that mapping is read-only");
    }

    assert_eq!(release(handle), 0);
    assert_eq!(read(place.0, PAGE), Ok(bytes), "mapped memory outlives its handle");
    assert_eq!(unmap(place.0, 4 * PAGE), 0, "one call for both mappings and the holes");
    drop(place);
    assert_eq!(gpu.footprint().without_streams(), before.without_streams());
}

/// An allocator that grows on demand has one page stand behind all of a large reservation. If each call looked at all mappings, this would
/// take minutes.
#[test]
fn one_page_stands_behind_a_large_reservation() {
    const PAGES: usize = 40_000;
    let gpu = Gpu::take();
    let before = gpu.footprint();
    let place = Reserved::new(PAGES * PAGE);
    let handle = create("zero", None, PAGE).unwrap();
    let at = |page: usize| place.0 + (page * PAGE) as u64;
    for page in 0..PAGES {
        assert_eq!((map(at(page), PAGE, handle), open(at(page), PAGE)), (0, 0));
    }
    assert_eq!(open(place.0, PAGES * PAGE), 0);
    assert_eq!(write(at(PAGES / 2), &pattern(1, 64)), 0);
    // A page gets memory of its own, and gives it back.
    for page in (0..PAGES).step_by(97) {
        assert_eq!(unmap(at(page), PAGE), 0);
        let own = create("own", None, PAGE).unwrap();
        assert_eq!((map(at(page), PAGE, own), open(at(page), PAGE), release(own)), (0, 0, 0));
        assert_eq!((unmap(at(page), PAGE), map(at(page), PAGE, handle), open(at(page), PAGE)), (0, 0, 0));
    }
    pause(&["zero"]).unwrap();
    assert_eq!((access(at(0), 0), access(at(PAGES - 1), 0)), (Ok(3), Ok(3)));
    resume(&["zero"]).unwrap();
    for page in [0, 97, PAGES - 1] {
        assert_eq!((read(at(page), 64), retain(at(page) + 5)), (Ok(pattern(1, 64)), Ok(handle)));
        assert_eq!(release(handle), 0);
    }
    assert_eq!((unmap(place.0, PAGES * PAGE), release(handle)), (0, 0));
    drop(place);
    assert_eq!(gpu.footprint().without_streams(), before.without_streams());
}

/// Changes that a program makes to its mappings while the memory is paused must be in effect when it is back.
#[test]
fn changes_while_paused_take_effect_at_the_resume() {
    let gpu = Gpu::take();
    let place = Reserved::new(8 * PAGE);
    let at = |page: u64| place.0 + page * PAGE as u64;
    let (kept, gone) = (create("own", None, PAGE).unwrap(), create("own", None, PAGE).unwrap());
    assert_eq!((map(at(0), PAGE, kept), map(at(1), PAGE, gone), open(at(0), 2 * PAGE)), (0, 0, 0));
    let bytes = pattern(2, PAGE);
    assert_eq!(write(at(0), &bytes), 0);
    pause(&["own"]).unwrap();

    assert_eq!((map(at(4), PAGE, kept), open(at(4), PAGE)), (0, 0));
    assert_eq!((unmap(at(0), PAGE / 2), unmap(at(0), PAGE)), (1, 0), "only a part, all of it");
    assert_eq!((release(gone), unmap(at(1), PAGE)), (0, 0));
    assert_eq!(map(at(4), PAGE, kept), 1, "taken");
    assert_eq!(unsafe { entries::cuMemMap(at(5), PAGE / 2, 0, kept, 0) }, 801, "a part of a handle");
    assert_eq!(unsafe { entries::cuMemAddressFree(place.0, place.1) }, 1, "something is mapped there");
    assert_eq!(release(gone), 1, "released already");
    let fresh = create("own", None, PAGE).unwrap();
    assert_eq!((map(at(6), PAGE, fresh), open(at(6), PAGE)), (0, 0), "the program goes on allocating");
    assert_eq!(open(at(4), 2 * PAGE), 1, "a range that ends in a hole");
    let foreign = {
        let (mut handle, wanted) = (0, properties(0));
        assert_eq!(unsafe { entries::cuMemCreate(&raw mut handle, PAGE, wanted.as_ptr().cast(), 0) }, 0);
        handle
    };
    assert_eq!((map(at(5), PAGE, foreign), open(at(4), 2 * PAGE), access(at(5), 0)), (0, 0, Ok(3)), "what is not managed gets its access");
    assert_eq!((unmap(at(4), 2 * PAGE), release(foreign), pages_in_use(&gpu)), (0, 0, 1), "and is unmapped together with a hole");
    assert_eq!((map(at(4), PAGE, kept), open(at(4), PAGE)), (0, 0));
    assert_eq!(map(at(6), PAGE, kept), 1, "taken by memory that is there");

    resume(&["own"]).unwrap();
    assert_eq!(read(at(4), PAGE), Ok(bytes));
    assert_ne!(read(at(0), PAGE).unwrap_or_default(), pattern(2, PAGE), "unmapped while paused");
    assert_eq!((release(kept), map(at(0), PAGE, kept)), (0, 1), "it is mapped, but the handle is no longer the program's");
    assert_eq!((release(fresh), unmap(place.0, place.1)), (0, 0));
    assert_eq!(pages_in_use(&gpu), 0);
}

/// The driver sets access up to the first hole of a range and succeeds. What comes after the hole is not recorded either.
#[test]
fn access_ends_at_a_hole_of_the_range() {
    let _gpu = Gpu::take();
    let place = Reserved::new(4 * PAGE);
    let at = |page: u64| place.0 + page * PAGE as u64;
    let (first, second) = (create("first", None, PAGE).unwrap(), create("second", None, PAGE).unwrap());
    assert_eq!((map(at(0), PAGE, first), map(at(2), PAGE, second), open(at(0), 3 * PAGE)), (0, 0, 0));
    let (one, two) = (pattern(1, PAGE), pattern(2, PAGE));
    assert_eq!((write(at(0), &one), write(at(2), &two)), (0, 1), "the second is behind the hole");
    let cycle = |tags: &[&str], call: &dyn Fn()| {
        pause(tags).unwrap();
        call();
        resume(tags).unwrap();
    };
    cycle(&[], &|| assert_eq!((access(at(0), 0), access(at(2), 0)), (Ok(3), Ok(0))));
    assert_eq!((open(at(2), PAGE), write(at(2), &two), allow(at(0), 3 * PAGE, 0, 0), write(at(2), &two)), (0, 0, 0, 0));
    cycle(&[], &|| assert_eq!((access(at(0), 0), access(at(2), 0)), (Ok(0), Ok(3))));
    assert_eq!((read(at(0), PAGE), read(at(2), PAGE)), (Err(1), Ok(two.clone())));

    // The same if any of it is paused.
    for tags in [&[][..], &["first"], &["second"]] {
        cycle(tags, &|| assert_eq!(open(at(0), 3 * PAGE), 0));
        assert_eq!((access(at(0), 0), access(at(2), 0)), (Ok(3), Ok(3)), "{tags:?}");
        cycle(tags, &|| assert_eq!((allow(at(0), 3 * PAGE, 0, 0), open(at(1), 2 * PAGE), open(at(0), 2 * PAGE)), (0, 1, 1)));
        assert_eq!((access(at(0), 0), access(at(2), 0)), (Ok(0), Ok(3)), "{tags:?}");
    }
    // Without a hole, the second is reached.
    let between = create("second", None, PAGE).unwrap();
    assert_eq!(map(at(1), PAGE, between), 0);
    for tags in [&[][..], &["first"], &["second"]] {
        cycle(tags, &|| assert_eq!(allow(at(0), 3 * PAGE, 0, 0), 0));
        cycle(tags, &|| assert_eq!(open(at(0), 3 * PAGE), 0));
        assert_eq!((read(at(0), PAGE), read(at(2), PAGE)), (Ok(one.clone()), Ok(two.clone())), "{tags:?}");
    }
    assert_eq!((unmap(place.0, place.1), release(first), release(second), release(between)), (0, 0, 0, 0));
}

/// Else no resume could repeat it.
#[test]
fn what_the_driver_refuses_is_refused_while_paused() {
    let gpu = Gpu::take();
    let place = Reserved::new(8 * PAGE);
    let at = |page: u64| place.0 + page * PAGE as u64;
    let handle = create("own", None, PAGE).unwrap();
    assert_eq!((map(at(0), PAGE, handle), map(at(1), PAGE, handle), open(at(0), 2 * PAGE)), (0, 0, 0));
    let bytes = pattern(1, PAGE);
    assert_eq!(write(at(0), &bytes), 0);
    let (freed, plain) = (Reserved::new(PAGE).0, malloc_tagged("own", None, PAGE).unwrap());
    let mut other = 0;
    assert_eq!(unsafe { entries::cuMemCreate(&raw mut other, PAGE, properties(0).as_ptr().cast(), 0) }, 0);
    assert_eq!((is_ours(other), map(at(6), PAGE, other)), (false, 0));
    let allow_host = || {
        let access = [2, 0, 3];
        unsafe { entries::cuMemSetAccess(at(0), PAGE, access.as_ptr().cast(), 1) }
    };
    let answers = || {
        let half = PAGE as u64 / 2;
        let parts = [open(at(0), PAGE / 2), open(at(0) + half, PAGE / 2), open(at(0), PAGE + PAGE / 2), open(at(0) + half, PAGE)];
        let accesses =
            [allow(at(0), PAGE, 99, 3), allow(at(0), PAGE, 99, 0), allow(at(0), PAGE, 0, 2), allow(at(0), PAGE, 0, 8), allow_host()];
        let map_at = |address, flags| unsafe { entries::cuMemMap(address, PAGE, 0, handle, flags) };
        let maps = [map_at(at(4) + 4096, 0), map_at(at(4), 1), map_at(at(4) + 4096, 1)];
        // Behind the reservation, where addresses have been freed, where memory that is not managed is mapped, and where other memory is.
        let taken = [at(8), freed, at(6), plain].map(|address| map_at(address, 0));
        (parts, accesses, maps, taken)
    };
    let active = answers();
    assert_eq!(active, ([1; 4], [1, 1, 1, 1, 801], [1; 3], [1; 4]));
    for guard in [false, true] {
        Memory::get().pause(&common::pausing_with(&[], |request| request.options.guard = guard), &mut ()).unwrap();
        assert_eq!(answers(), active, "guard: {guard}");
        gpu.fail("cuDeviceCanAccessPeer", 1, 101, 1);
        assert_eq!((allow(at(0), PAGE, 1, 3), allow(at(0), PAGE, 1, 3)), (1, 0), "the driver is asked whether that device can");
        resume(&[]).unwrap();
        assert_eq!((read(at(0), PAGE), access(at(0), 1)), (Ok(bytes.clone()), Ok(3)));
        assert_eq!(allow(at(0), PAGE, 1, 0), 0);
    }
    assert_eq!((unmap(at(0), 8 * PAGE), release(handle), release(other), common::free(plain)), (0, 0, 0, 0));
}

/// What the library could not know: the memory and its contents come back, and the report names what does not.
#[test]
fn memory_comes_back_without_a_mapping_that_the_driver_refuses() {
    let gpu = Gpu::take();
    let place = Reserved::new(8 * PAGE);
    let at = |page: u64| place.0 + page * PAGE as u64;
    let (handle, other) = (create("own", None, PAGE).unwrap(), create("own", None, PAGE).unwrap());
    assert_eq!((map(at(0), PAGE, handle), open(at(0), PAGE)), (0, 0));
    let bytes = pattern(1, PAGE);
    assert_eq!(write(at(0), &bytes), 0);
    for (call, what) in [("cuMemMap", "mapping"), ("cuMemSetAccess", "access")] {
        pause(&["own"]).unwrap();
        assert_eq!((map(at(4), PAGE, other), open(at(4), PAGE), map(at(2), PAGE, handle), open(at(2), PAGE)), (0, 0, 0, 0));
        // A refusal that does not last is no reason.
        gpu.fail(call, 1, 1, 1);
        gpu.fail(call, 3, 1, 2);
        let report = resume(&["own"]).unwrap();
        let [refused] = &report.refused[..] else { panic!("{what}: {:?}", report.refused) };
        let [mapped, not] = if refused.contains(&format!("{:#x}", at(4))) { [at(2), at(4)] } else { [at(4), at(2)] };
        assert!(
            refused.starts_with(&format!("2.00 MiB of tag own at {not:#x}, ")) && refused.contains(&format!("{call} returned 1")),
            "{refused}"
        );
        assert_eq!((read(at(0), PAGE), read(mapped, PAGE).is_ok(), read(not, PAGE).is_ok()), (Ok(bytes.clone()), true, false), "{what}");
        assert_eq!(access(not, 0), if call == "cuMemMap" { Err(1) } else { Ok(0) });
        pause(&["own"]).and_then(|_| resume(&["own"])).map(|report| assert_eq!(report.refused, [""; 0])).unwrap();
        assert_eq!(unmap(at(2), 6 * PAGE), 0);
    }
    assert_eq!((unmap(at(0), PAGE), release(handle), release(other)), (0, 0, 0));
    assert_eq!(pages_in_use(&gpu), 0);
}

/// A handle that is mapped nowhere, or only for reading, has contents too.
#[test]
fn contents_without_addresses_are_kept() {
    let gpu = Gpu::take();
    let place = Reserved::new(2 * PAGE);
    let handle = create("own", None, 2 * PAGE).unwrap();
    let bytes = pattern(3, 2 * PAGE);
    assert_eq!((map(place.0, 2 * PAGE, handle), open(place.0, 2 * PAGE), write(place.0, &bytes)), (0, 0, 0));
    assert_eq!(unmap(place.0, 2 * PAGE), 0);
    for _ in 0..2 {
        pause(&["own"]).unwrap();
        assert_eq!(pages_in_use(&gpu), 0);
        resume(&["own"]).unwrap();
        assert_eq!((map(place.0, 2 * PAGE, handle), open(place.0, 2 * PAGE)), (0, 0));
        assert_eq!(read(place.0, 2 * PAGE), Ok(bytes.clone()));
        // From here on for reading alone.
        assert_eq!(allow(place.0, 2 * PAGE, 0, 1), 0);
        common::cycle(&["own"]);
        assert_eq!(read(place.0, 2 * PAGE), Ok(bytes.clone()));
        assert_eq!(unmap(place.0, 2 * PAGE), 0);
    }
    assert_eq!(release(handle), 0);
    assert_eq!((pages_in_use(&gpu), Memory::get().status().tags.len()), (0, 0));
}

#[test]
fn discarded_memory_comes_back_empty_and_short_memory_is_reported() {
    let gpu = Gpu::take();
    let bytes = DEVICE_BYTES / 2;
    let place = Reserved::new(bytes);
    let handle = create("scratch", Some(Policy::Discard), bytes).unwrap();
    assert_eq!((map(place.0, bytes, handle), open(place.0, bytes), write(place.0, &pattern(4, PAGE))), (0, 0, 0));
    pause(&["scratch"]).unwrap();
    gpu.occupy(0, DEVICE_BYTES - PAGE);
    assert!(resume(&["scratch"]).is_err(), "no room");
    assert_eq!(create("scratch", None, 2 * PAGE), Err(2), "out of memory");
    gpu.occupy(0, 0);
    resume(&["scratch"]).unwrap();
    assert_eq!(read(place.0, PAGE), Ok(vec![0; PAGE]));
    assert_eq!((unmap(place.0, bytes), release(handle)), (0, 0));
}

/// Programs decide by these queries what memory is, so the answers must agree, paused or not.
#[test]
fn the_queries_agree() {
    let gpu = Gpu::take();
    let place = Reserved::new(PAGE);
    let handle = create_on(0, "own", None, PAGE).unwrap();
    assert_eq!((map(place.0, PAGE, handle), open(place.0, PAGE)), (0, 0));
    let plain = malloc_tagged("plain", None, PAGE).unwrap();
    let foreign = {
        let (mut handle, wanted) = (0, properties(0));
        assert_eq!(unsafe { entries::cuMemCreate(&raw mut handle, PAGE, wanted.as_ptr().cast(), 0) }, 0);
        handle
    };
    assert!(!is_ours(foreign), "no region, no tag: left to CUDA");
    for paused in [false, true] {
        if paused {
            pause(&[]).unwrap();
        }
        let mut told = [9_u32; 8];
        assert_eq!(unsafe { entries::cuMemGetAllocationPropertiesFromHandle(told.as_mut_ptr().cast(), handle) }, 0);
        assert_eq!(told, properties(0));
        assert_eq!(unsafe { entries::cuMemGetAllocationPropertiesFromHandle(told.as_mut_ptr().cast(), foreign) }, 0);
        assert_eq!(retain(place.0 + 5), Ok(handle));
        assert_eq!(release(handle), 0);
        assert_eq!(retain(plain), Err(1), "memory of cudaMalloc has no handle");
        for unknown in [handle + 1000, 0] {
            assert_eq!(unsafe { entries::cuMemGetAllocationPropertiesFromHandle(told.as_mut_ptr().cast(), unknown) }, 1);
            assert_eq!((release(unknown), map(place.0, PAGE, unknown)), (1, 1));
        }
        assert_eq!(unsafe { entries::cuMemRetainAllocationHandle(ptr::null_mut(), ptr::null_mut()) }, 1);
    }
    resume(&[]).unwrap();
    assert_eq!((unmap(place.0, PAGE), release(handle), release(foreign), common::free(plain)), (0, 0, 0, 0));
    assert_eq!(pages_in_use(&gpu), 0);
}

/// Access for other devices is part of what comes back.
#[test]
fn access_of_other_devices_is_restored() {
    let _gpu = Gpu::take();
    let place = Reserved::new(PAGE);
    let handle = create("own", None, PAGE).unwrap();
    assert_eq!((map(place.0, PAGE, handle), open(place.0, PAGE), allow(place.0, PAGE, 1, 3)), (0, 0, 0));
    common::cycle(&["own"]);
    assert_eq!((access(place.0, 0), access(place.0, 1)), (Ok(3), Ok(3)));
    assert_eq!((unmap(place.0, PAGE), release(handle)), (0, 0));
}

/// Work of another device that may use the memory is waited for, too.
#[test]
fn a_pause_waits_for_the_work_of_devices_with_access() {
    let _gpu = Gpu::take();
    let place = Reserved::new(PAGE);
    let handle = create_on(1, "own", None, PAGE).unwrap();
    assert_eq!((map(place.0, PAGE, handle), allow(place.0, PAGE, 1, 3), allow(place.0, PAGE, 0, 3)), (0, 0, 0));
    let (stream, blocked) = (Stream::create(), Gate::new());
    stream.wait_for(&blocked);
    assert_eq!(stream.fill(place.0, 9, PAGE), 0);
    let soon = common::pausing_with(&["own"], |request| request.timeout = Some(Duration::ZERO));
    assert_eq!(Memory::get().pause(&soon, &mut ()).unwrap_err().kind(), Kind::Busy);
    blocked.open();
    pause(&["own"]).unwrap();
    assert_eq!(stream.synchronize(), 0, "nothing was taken from under the work");
    resume(&["own"]).unwrap();
    assert_eq!((read(place.0, PAGE), unmap(place.0, PAGE), release(handle)), (Ok(vec![9; PAGE]), 0, 0));
}

/// Any context of the device will do for copies.
#[test]
fn memory_is_managed_on_a_device_without_a_primary_context() {
    let _gpu = Gpu::take();
    common::reset_unseen(1);
    let other = common::OwnContext::create(1);
    common::set_device(0);
    let handle = create_on(1, "own", None, PAGE).unwrap();
    assert!(is_ours(handle));
    common::cycle(&["own"]);
    assert_eq!(release(handle), 0);
    // A call that may destroy it is under way.
    let ending = Ending::of(other.handle());
    let handle = create_on(1, "own", None, PAGE).unwrap();
    assert!(!is_ours(handle));
    drop(ending);
    assert_eq!(release(handle), 0);
    drop(other);
    common::use_again(1);
    common::use_again(0);
}

type Call<'a> = &'a dyn Fn(*mut u64) -> u32;

/// The driver's counterparts of `cudaMalloc` and related functions.
#[test]
fn the_drivers_allocations_are_managed_too() {
    let gpu = Gpu::take();
    let stream = Stream::create();
    let null = unsafe { std::mem::transmute::<usize, vramctl_driver::StreamHandle>(0) };
    let calls: [(&str, Call); 6] = [
        ("cuMemAlloc_v2", &|to| unsafe { entries::cuMemAlloc_v2(to, PAGE) }),
        ("cuMemAllocPitch_v2", &|to| unsafe { entries::cuMemAllocPitch_v2(to, &mut 0, 1024, PAGE / 1024, 4) }),
        ("cuMemAllocAsync", &|to| unsafe { entries::cuMemAllocAsync(to, PAGE, stream.handle()) }),
        ("cuMemAllocAsync_ptsz", &|to| unsafe { entries::cuMemAllocAsync_ptsz(to, PAGE, null) }),
        ("cuMemAllocFromPoolAsync", &|to| unsafe { entries::cuMemAllocFromPoolAsync(to, PAGE, common::default_pool(), null) }),
        ("cuMemAllocFromPoolAsync_ptsz", &|to| unsafe { entries::cuMemAllocFromPoolAsync_ptsz(to, PAGE, common::default_pool(), null) }),
    ];
    for (name, call) in calls {
        region::begin(Some("driver"), None).unwrap();
        let mut address = 0;
        assert_eq!(call(&raw mut address), 0, "{name}");
        region::end().unwrap();
        assert!(Memory::get().registry.manages(address), "{name}");
        let bytes = pattern(5, PAGE);
        assert_eq!(write(address, &bytes), 0, "{name}");
        pause(&["driver"]).unwrap();
        assert_eq!(pages_in_use(&gpu), 0, "{name}");
        resume(&["driver"]).unwrap();
        assert_eq!(read(address, PAGE), Ok(bytes), "{name}");
        let freed = match name.contains("Async") {
            true if name.ends_with("_ptsz") => unsafe { entries::cuMemFreeAsync_ptsz(address, null) },
            true => unsafe { entries::cuMemFreeAsync(address, stream.handle()) },
            false => unsafe { entries::cuMemFree_v2(address) },
        };
        assert_eq!(freed, 0, "{name}");
        assert!(!Memory::get().registry.manages(address), "{name}");
        assert_eq!(unsafe { entries::cuMemFree_v2(address) }, 1, "{name}: freed already");

        assert_eq!(call(&raw mut address), 0, "{name}, left to CUDA");
        assert!(!Memory::get().registry.manages(address), "{name}: no region, no tag");
        assert_eq!(unsafe { entries::cuMemFree_v2(address) }, 0, "{name}, left to CUDA");
    }
}

/// A request is left to CUDA once: what `cudaMalloc` leaves alone, the `cuMemAlloc` it ends in leaves alone too.
#[test]
fn the_driver_answers_a_null_pointer() {
    let _gpu = Gpu::take();
    region::begin(Some("driver"), None).unwrap();
    assert_eq!(unsafe { entries::cuMemAlloc_v2(ptr::null_mut(), PAGE) }, 1);
    assert_eq!(unsafe { entries::cuMemCreate(ptr::null_mut(), PAGE, properties(0).as_ptr().cast(), 0) }, 1);
    assert_eq!(unsafe { entries::cuMemCreate(&mut 0, PAGE, ptr::null(), 0) }, 1);
    assert_eq!(unsafe { entries::cuMemCreate(&mut 0, PAGE, properties(DEVICES).as_ptr().cast(), 0) }, 101);
    assert_eq!(unsafe { entries::cuMemCreate(&mut 0, PAGE + 1, properties(0).as_ptr().cast(), 0) }, 1);
    assert_eq!(unsafe { entries::cuMemSetAccess(0, 0, ptr::null(), 1) }, 1);
    region::end().unwrap();
}

/// A network card or another process would still use the old pages.
#[test]
fn registered_memory_is_replaced_only_when_told_so() {
    let gpu = Gpu::take();
    let (card, mine) = (malloc_tagged("buffers", None, PAGE).unwrap(), malloc_tagged("buffers", None, PAGE).unwrap());
    let place = Reserved::new(PAGE);
    let handle = {
        let (mut handle, mut wanted) = (0, properties(0));
        // A file descriptor, for another process.
        wanted[1] = 1;
        region::begin(Some("shared"), None).unwrap();
        assert_eq!(unsafe { entries::cuMemCreate(&raw mut handle, PAGE, wanted.as_ptr().cast(), 0) }, 0);
        region::end().unwrap();
        handle
    };
    assert_eq!((map(place.0, PAGE, handle), open(place.0, PAGE)), (0, 0));
    assert!(pause(&["shared"]).and(resume(&["shared"])).is_ok(), "nobody knows it yet");
    let mut shared = -1_i32;
    assert_eq!(unsafe { entries::cuMemExportToShareableHandle((&raw mut shared).cast(), handle, 1, 0) }, 0);
    assert!(shared >= 0);
    let on = 1_u32;
    assert_eq!(unsafe { entries::cuPointerSetAttribute((&raw const on).cast(), 6, card + 100) }, 0);

    let used = gpu.used(0);
    let refused = pause(&[]).unwrap_err();
    let Error::Registered(list) = &refused else { panic!("{refused}") };
    let seen: Vec<_> = list.iter().map(|one| (&*one.tag, &*one.registrant, one.bytes)).collect();
    let expected =
        [("buffers", "cuPointerSetAttribute(SYNC_MEMOPS)", PAGE as u64), ("shared", "cuMemExportToShareableHandle", PAGE as u64)];
    assert_eq!(seen, expected);
    assert_eq!((gpu.used(0), state("buffers")), (used, Some(TagState::Active)), "nothing has changed");
    assert!(Memory::get().plan_pause(&common::pausing(&[])).is_err(), "a dry run says so, too");

    let bytes = pattern(8, PAGE);
    assert_eq!((write(card, &bytes), write(mine, &bytes), write(place.0, &bytes)), (0, 0, 0));
    let with = |registered| common::pausing_with(&[], |request| request.options.registered = registered);
    let kept = Memory::get().pause(&with(Registered::Keep), &mut ()).unwrap();
    assert_eq!((kept.bytes, gpu.used(0)), (PAGE as u64, used - PAGE as u64));
    assert_eq!((read(card, PAGE), read(place.0, PAGE)), (Ok(bytes.clone()), Ok(bytes.clone())), "still there");
    resume(&[]).unwrap();
    let taken = Memory::get().pause(&with(Registered::Take), &mut ()).unwrap();
    assert_eq!((taken.bytes, gpu.used(0) + 3 * PAGE as u64), (3 * PAGE as u64, used));
    resume(&[]).unwrap();
    assert_eq!((read(card, PAGE), read(mine, PAGE), read(place.0, PAGE)), (Ok(bytes.clone()), Ok(bytes.clone()), Ok(bytes)));
    // What was known is gone, and nobody knows what came.
    assert!(Memory::get().obstacles().iter().all(|one| one.kind != ObstacleKind::Registered), "{:?}", Memory::get().obstacles());
    common::cycle(&[]);
    assert_eq!(unsafe { entries::cuPointerSetAttribute((&raw const on).cast(), 6, card) }, 0);
    assert!(matches!(pause(&[]), Err(Error::Registered(_))), "registered anew");
    unsafe { libc::close(shared) };
    assert_eq!((common::free(card), common::free(mine), unmap(place.0, PAGE), release(handle)), (0, 0, 0, 0));
    assert_eq!(pages_in_use(&gpu), 0);
}

/// Until somebody known has it, nobody knows who has the memory.
#[test]
fn a_descriptor_is_claimed_only_by_whoever_gets_the_memory() {
    let gpu = Gpu::take();
    let place = Reserved::new(PAGE);
    let (mut handle, mut wanted, mut file) = (0, properties(0), -1_i32);
    wanted[1] = 1;
    region::begin(Some("shared"), None).unwrap();
    assert_eq!(unsafe { entries::cuMemCreate(&raw mut handle, PAGE, wanted.as_ptr().cast(), 0) }, 0);
    region::end().unwrap();
    assert_eq!((map(place.0, PAGE, handle), open(place.0, PAGE)), (0, 0));
    assert_eq!(unsafe { entries::cuMemExportToShareableHandle((&raw mut file).cast(), handle, 1, 0) }, 0);
    let exported = unsafe { OwnedFd::from_raw_fd(file) };
    // What was on its way when the program closed it.
    let file = exported.try_clone().unwrap();
    drop(exported);
    let importer = Borrower { connection: u64::MAX, pid: 1 };
    let claim = |admit: Result<(), Error>| Memory::get().lend_claimed(file.as_fd(), &importer, || admit).map(drop);
    assert!(claim(Err(Error::Busy(Duration::ZERO))).is_err() && is_registered(), "it has no room for another importer");
    gpu.fail("cuMemExportToShareableHandle", 1, 999, u64::MAX);
    let refused = claim(Ok(()));
    gpu.clear_faults();
    assert!(refused.is_err() && is_registered(), "the driver does not pass it: {refused:?}");
    claim(Ok(())).unwrap();
    Memory::get().take_all_back(importer.connection);
    assert!(!is_registered());
    drop(file);
    assert_eq!((unmap(place.0, PAGE), release(handle)), (0, 0));
    assert_eq!(pages_in_use(&gpu), 0);
}

/// The driver's functions for multicast objects, which the simulated one lacks. Returns what they answer.
fn multicast() -> &'static AtomicI32 {
    static ANSWER: OnceLock<usize> = OnceLock::new();
    let answer = ANSWER.get_or_init(|| {
        let built = common::built("libmulticast.so", "multicast.c", &SHARED);
        let path = CString::new(built.to_str().unwrap()).unwrap();
        let answer = unsafe { libc::dlsym(libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL), c"multicast_answer".as_ptr()) };
        assert!(!answer.is_null());
        answer as usize
    });
    unsafe { &*ptr::with_exposed_provenance(*answer) }
}

/// Whether a pause is refused because of it.
fn is_registered() -> bool {
    match pause(&[]) {
        Ok(_) => resume(&[]).map(|_| false).unwrap(),
        Err(Error::Registered(_)) => true,
        Err(error) => panic!("{error}"),
    }
}

/// Bound memory is registered until exactly that part of the object has been unbound from it.
#[test]
fn memory_is_registered_while_it_is_bound_to_a_multicast_object() {
    const OBJECT: u64 = 0x5000;
    let _gpu = Gpu::take();
    let answer = multicast();
    let (plain, handle) = (malloc_tagged("bound", None, PAGE).unwrap(), create("bound", None, PAGE).unwrap());
    let bind_plain = || unsafe { entries::cuMulticastBindAddr_v2(OBJECT, 0, PAGE, plain, PAGE, 0) };
    let bind_handle = |at| unsafe { entries::cuMulticastBindMem(OBJECT, at, handle, 0, PAGE, 0) };
    let unbind = |at, bytes| unsafe { entries::cuMulticastUnbind(OBJECT, 0, at, bytes) };
    assert!(!is_registered());
    assert_eq!((bind_plain(), bind_handle(0)), (0, 0));
    assert!(is_registered());
    let obstacles = Memory::get().status().obstacles.into_iter().map(|obstacle| obstacle.what);
    let bound: Vec<_> = obstacles.filter(|what| what.contains("multicast")).collect();
    assert_eq!(bound, ["cuMulticastBindAddr", "cuMulticastBindMem"].map(|call| format!("1 multicast object ({call})")));
    assert_eq!(unbind(0, PAGE), 0);
    assert!(is_registered(), "the other one is still bound");
    answer.store(999, Ordering::SeqCst);
    assert_eq!(unbind(PAGE, PAGE), 999);
    assert!(is_registered(), "it could not be unbound");
    answer.store(0, Ordering::SeqCst);
    assert_eq!(unbind(PAGE, PAGE), 0);
    assert!(!is_registered());

    // In two places.
    assert_eq!((bind_handle(0), bind_handle(2 * PAGE), unbind(2 * PAGE, PAGE)), (0, 0, 0));
    assert!(is_registered());
    // Whatever else refers to it stays.
    let on = 1_u32;
    assert_eq!(unsafe { entries::cuPointerSetAttribute((&raw const on).cast(), 6, plain) }, 0);
    assert_eq!(unbind(0, PAGE), 0);
    assert!(is_registered());

    // The pages that a pause takes are bound, not those that come.
    assert_eq!(bind_handle(0), 0);
    Memory::get().pause(&common::pausing_with(&[], |request| request.options.registered = Registered::Take), &mut ()).unwrap();
    resume(&[]).unwrap();
    assert!(!is_registered());
    assert_eq!(unbind(0, PAGE), 0);

    // Another object has the number of one that the program has released, with memory bound to it.
    assert_eq!(bind_handle(0), 0);
    assert_ne!(release(OBJECT), 0, "the simulated driver does not know it");
    assert_eq!((bind_plain(), unbind(PAGE, PAGE), unbind(0, PAGE)), (0, 0, 0));
    assert!(is_registered());
    assert_eq!((common::free(plain), release(handle)), (0, 0));
}

#[test]
fn memory_is_registered_while_it_is_bound_to_a_logical_endpoint() {
    const ENDPOINT: u32 = 7;
    let _gpu = Gpu::take();
    multicast().store(0, Ordering::SeqCst);
    let (plain, handle) = (malloc_tagged("bound", None, PAGE).unwrap(), create("bound", None, PAGE).unwrap());
    let (page, pointer) = (PAGE as u64, ptr::without_provenance_mut(plain as usize));
    let unbind = |at| unsafe { entries::cuLogicalEndpointUnbind(ENDPOINT, 0, at, page) };
    assert_eq!(unsafe { entries::cuLogicalEndpointBindMem(ENDPOINT, 0, 0, handle, 0, page, 0) }, 0);
    assert!(is_registered());
    assert_eq!(unsafe { entries::cuLogicalEndpointBindAddr(ENDPOINT, 0, page, pointer, page, 0) }, 0);
    assert_eq!(unbind(0), 0);
    assert!(is_registered(), "the other one is still bound");
    assert_eq!(unbind(page), 0);
    assert!(!is_registered());
    assert_eq!((common::free(plain), release(handle)), (0, 0));
}

/// A program may also say that it does not need what network cards do.
#[test]
fn an_attribute_that_is_unset_registers_nothing() {
    let _gpu = Gpu::take();
    let address = malloc_tagged("buffers", None, PAGE).unwrap();
    let set = |value: u32| unsafe { entries::cuPointerSetAttribute((&raw const value).cast(), 6, address) };
    assert_eq!(set(0), 0);
    pause(&[]).and_then(|_| resume(&[])).unwrap();
    assert_eq!(set(1), 0);
    assert!(matches!(pause(&[]), Err(Error::Registered(_))));
    // The network card may have it still.
    assert_eq!(set(0), 0);
    assert!(matches!(pause(&[]), Err(Error::Registered(_))));
}

/// Memory of `cuMemCreate` outlives the context in which it was made; memory of `cuMemAlloc` does not.
#[test]
fn plain_memory_ends_with_its_context_and_virtual_memory_does_not() {
    let gpu = Gpu::take();
    for end in [entries::cuCtxDestroy_v2 as unsafe extern "C-unwind" fn(_) -> u32, entries::cuCtxDestroy, entries::cuCtxDetach] {
        what_is_in_a_context_ends_with_it(&gpu, end);
    }
}

fn what_is_in_a_context_ends_with_it(gpu: &Gpu, end: unsafe extern "C-unwind" fn(vramctl_driver::ContextHandle) -> u32) {
    let place = Reserved::new(PAGE);
    let mut context = ptr::null_mut();
    let primary = common::malloc_tagged("primary", None, PAGE).unwrap();
    assert_eq!(common::create_context(&mut context, 0), 0);
    let handle = create("own", None, PAGE).unwrap();
    let mut plain = 0;
    region::begin(Some("plain"), None).unwrap();
    assert_eq!(unsafe { entries::cuMemAlloc_v2(&raw mut plain, PAGE) }, 0);
    region::end().unwrap();
    assert_eq!((map(place.0, PAGE, handle), open(place.0, PAGE)), (0, 0));
    let bytes = pattern(9, PAGE);
    assert_eq!(write(place.0, &bytes), 0);
    assert_eq!(pages_in_use(gpu), 3);
    assert_eq!(unsafe { end(std::mem::transmute::<*mut std::ffi::c_void, vramctl_driver::ContextHandle>(context)) }, 0);
    assert_eq!(pages_in_use(gpu), 2, "at once");
    assert_eq!(state("plain"), None);
    common::cycle(&[]);
    assert_eq!(read(place.0, PAGE), Ok(bytes));
    assert_eq!((unmap(place.0, PAGE), release(handle), common::free(primary)), (0, 0, 0));
}

/// It belongs to the primary context of the device.
#[test]
fn memory_outlives_the_green_context_in_which_it_was_made() {
    let gpu = Gpu::take();
    let green = common::Green::create(0);
    green.enter();
    let (mut plain, mut streamed, stream) = (0, 0, Stream::create());
    region::begin(Some("green"), None).unwrap();
    assert_eq!(unsafe { entries::cuMemAlloc_v2(&raw mut plain, PAGE) }, 0);
    common::set_device(0);
    assert_eq!(unsafe { entries::cuMemAllocAsync(&raw mut streamed, PAGE, stream.handle()) }, 0);
    region::end().unwrap();
    let (one, two) = (pattern(1, PAGE), pattern(2, PAGE));
    assert_eq!((write(plain, &one), write(streamed, &two)), (0, 0));
    drop(stream);
    drop(green);
    for _ in 0..2 {
        common::cycle(&[]);
        assert_eq!((read(plain, PAGE), read(streamed, PAGE), pages_in_use(&gpu)), (Ok(one.clone()), Ok(two.clone()), 2));
    }
}

/// The library may never have seen the primary one, if the program has used the green one alone.
#[test]
fn memory_of_a_green_context_ends_with_the_primary_one() {
    let gpu = Gpu::take();
    common::reset_unseen(0);
    let green = common::Green::create(0);
    green.enter();
    let mut plain = 0;
    region::begin(Some("green"), None).unwrap();
    assert_eq!(unsafe { entries::cuMemAlloc_v2(&raw mut plain, PAGE) }, 0);
    region::end().unwrap();
    drop(green);
    common::reset_unseen(0);
    common::use_again(0);
    pause(&[]).unwrap();
    assert_eq!((state("green"), pages_in_use(&gpu)), (None, 0));
}

/// The driver would crash in one that is destroyed between the check that it exists and its use.
#[test]
fn a_pause_enters_no_context_while_one_is_destroyed() {
    let _gpu = Gpu::take();
    malloc_tagged("own", None, PAGE).unwrap();
    let soon = common::pausing_with(&["own"], |request| request.timeout = Some(Duration::from_millis(100)));
    let ending = Ending::of_primary(0);
    assert_eq!(Memory::get().pause(&soon, &mut ()).map_err(|error| error.kind()).map(drop), Err(Kind::Busy));
    drop(ending);
    common::pause(&["own"]).unwrap();
}

/// The last context of the device ends while memory is paused: a later context must be able to bring it back.
#[test]
fn paused_memory_survives_the_last_context() {
    let _gpu = Gpu::take();
    let place = Reserved::new(PAGE);
    let mut context = ptr::null_mut();
    assert_eq!(common::create_context(&mut context, 0), 0);
    let handle = create("own", None, PAGE).unwrap();
    assert_eq!((map(place.0, PAGE, handle), open(place.0, PAGE)), (0, 0));
    let bytes = pattern(10, PAGE);
    assert_eq!(write(place.0, &bytes), 0);
    pause(&["own"]).unwrap();
    common::reset_unseen(0);
    assert_eq!(
        unsafe { entries::cuCtxDestroy_v2(std::mem::transmute::<*mut std::ffi::c_void, vramctl_driver::ContextHandle>(context)) },
        0
    );
    common::use_again(0);
    resume(&["own"]).unwrap();
    assert_eq!(read(place.0, PAGE), Ok(bytes));
    assert_eq!((unmap(place.0, PAGE), release(handle)), (0, 0));
}

/// What shares interior pointers computes their offset from this: it must be the allocation's, not that of one of its pieces.
#[test]
fn the_range_of_an_address_is_its_allocation() {
    let _gpu = Gpu::take();
    let bytes = 40 * MIB + 100;
    let address = malloc_tagged("range", None, bytes).unwrap();
    let range = |at: u64| {
        let (mut base, mut length) = (0, 0);
        (unsafe { entries::cuMemGetAddressRange_v2(&raw mut base, &raw mut length, at) }, base, length)
    };
    for paused in [false, true] {
        if paused {
            pause(&["range"]).unwrap();
        }
        assert_eq!((range(address), range(address + 36 * MIB as u64)), ((0, address, bytes), (0, address, bytes)), "paused: {paused}");
    }
    assert_eq!(common::free(address), 0);
    assert_ne!(range(address).0, 0);
}

/// Of `CUpointer_attribute`, those that the library tells, but for `IS_LEGACY_CUDA_IPC_CAPABLE`.
const ATTRIBUTES: [u32; 11] = [1, 2, 3, 8, 9, 11, 12, 13, 14, 18, 19];

/// Libraries decide by the attributes how to share memory, and a held program goes on asking.
#[test]
fn the_attributes_of_managed_memory_are_those_of_plain_memory_also_while_it_is_paused() {
    let _gpu = Gpu::take();
    let bytes = 40 * MIB;
    let (managed, plain) = (malloc_tagged("asked", None, bytes).unwrap(), common::malloc(bytes).unwrap());
    let one = |which: u32, at: u64| {
        let mut value = 0xCCCC_CCCC_CCCC_CCCC_u64;
        (unsafe { entries::cuPointerGetAttribute((&raw mut value).cast(), which, at) }, value)
    };
    let all = |at: u64| {
        let mut values = [0xCCCC_CCCC_CCCC_CCCC_u64; 11];
        let mut places: Vec<_> = values.iter_mut().map(|value| ptr::from_mut(value).cast()).collect();
        assert_eq!(unsafe { entries::cuPointerGetAttributes(11, ATTRIBUTES.as_ptr(), places.as_mut_ptr(), at) }, 0);
        values
    };
    // Only their start addresses differ.
    let relative = |at: u64, of: u64| {
        let shift = |value: u64| if (of..of + bytes as u64).contains(&value) { value - of } else { value };
        let each = ATTRIBUTES.map(|which| one(which, at)).map(|(code, value)| (code, shift(value)));
        (each, all(at).map(shift))
    };
    for offset in [0, 36 * MIB as u64] {
        let wanted = relative(plain + offset, plain);
        assert!(wanted.0.iter().all(|(code, _)| *code == 0), "{wanted:?}");
        assert_eq!(relative(managed + offset, managed), wanted);
        pause(&["asked"]).unwrap();
        assert_eq!(relative(managed + offset, managed), wanted, "paused");
        assert_eq!(one(10, managed).1 as u32, 0, "NCCL would register it");
        resume(&["asked"]).unwrap();
        assert_eq!((one(10, managed).1 as u32, one(10, plain).1 as u32), (0, 1));
    }
    assert_eq!(unsafe { entries::cuPointerGetAttribute(ptr::null_mut(), 11, managed) }, 1);
    assert_eq!((common::free(managed), common::free(plain)), (0, 0));
    assert_eq!(one(2, managed).0, 1);
    assert_eq!(all(managed)[1] as u32, 0);
}

/// The same of memory that the program has mapped itself.
#[test]
fn the_attributes_of_mapped_memory_are_the_same_while_it_is_paused() {
    let gpu = Gpu::take();
    let place = Reserved::new(4 * PAGE);
    let (mut wanted, mut handles) = (properties(0), [0; 2]);
    wanted[1] = 1; // Can be shared by a descriptor.
    region::begin(Some("asked"), None).unwrap();
    for (at, handle) in handles.iter_mut().enumerate() {
        assert_eq!(unsafe { entries::cuMemCreate(handle, PAGE, wanted.as_ptr().cast(), 0) }, 0);
        assert_eq!(map(place.0 + (at * PAGE) as u64, PAGE, *handle), 0);
    }
    region::end().unwrap();
    // The second is open to nobody.
    assert_eq!(open(place.0, PAGE), 0);
    let asked = || {
        [place.0, place.0 + 100, place.0 + PAGE as u64 + 5, place.0 + 2 * PAGE as u64].map(|at| {
            let each = [1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 18, 19].map(|which| {
                let mut value = 0xCCCC_CCCC_CCCC_CCCC_u64;
                (unsafe { entries::cuPointerGetAttribute((&raw mut value).cast(), which, at) }, value)
            });
            let (mut base, mut length) = (7, 7);
            let code = unsafe { entries::cuMemGetAddressRange_v2(&raw mut base, &raw mut length, at) };
            (each, code, base, length)
        })
    };
    let before = asked();
    assert_eq!((before[1].0[9], before[1].1, before[1].2, before[1].3), ((0, 1), 0, place.0, PAGE));
    assert_eq!((before[2].0[2].0, before[2].1), (1, 500), "no device pointer where nobody has access");
    pause(&["asked"]).unwrap();
    assert_eq!(asked(), before, "paused");
    // The driver's other failures stay what they are.
    gpu.fail("cuPointerGetAttribute", 1, 700, 1);
    let mut kind = 0_u64;
    assert_eq!(unsafe { entries::cuPointerGetAttribute((&raw mut kind).cast(), 2, place.0) }, 700);
    assert_eq!(unsafe { entries::cuPointerGetAttributes(0, ptr::null(), ptr::null_mut(), place.0) }, unsafe {
        entries::cuPointerGetAttributes(0, ptr::null(), ptr::null_mut(), 0x1000)
    });
    resume(&["asked"]).unwrap();
    assert_eq!(asked(), before);
    assert_eq!(unmap(place.0, 2 * PAGE), 0);
    assert!(handles.iter().all(|handle| release(*handle) == 0));
}

/// Every call of a pause and a resume of such memory fails once: nothing is lost, and the next attempt works.
#[test]
fn a_failed_call_loses_nothing() {
    let gpu = Gpu::take();
    let place = Reserved::new(6 * PAGE);
    let at = |page: u64| place.0 + page * PAGE as u64;
    let (handle, other, unmapped) =
        (create("own", None, PAGE).unwrap(), create("own", None, PAGE).unwrap(), create("own", None, PAGE).unwrap());
    assert_eq!((map(at(0), PAGE, handle), map(at(1), PAGE, other), map(at(3), PAGE, handle)), (0, 0, 0));
    assert_eq!((open(at(0), 2 * PAGE), open(at(3), PAGE)), (0, 0));
    let (one, two) = (pattern(6, PAGE), pattern(7, PAGE));
    assert_eq!((write(at(0), &one), write(at(1), &two)), (0, 0));
    for call in ["cuMemCreate", "cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuMemRelease", "cuMemAddressReserve", "cuMemGetInfo_v2"] {
        for nth in 1..=6 {
            for resuming in [false, true] {
                if resuming {
                    pause(&["own"]).unwrap();
                }
                gpu.fail(call, nth, 999, 1);
                let _ = if resuming { resume(&["own"]) } else { pause(&["own"]) };
                gpu.clear_faults();
                resume(&["own"]).unwrap();
                let seen = (read(at(0), PAGE), read(at(1), PAGE), read(at(3), PAGE));
                assert!(seen == (Ok(one.clone()), Ok(two.clone()), Ok(one.clone())), "{call} {nth} resuming: {resuming}");
                assert_eq!(pages_in_use(&gpu), 3, "{call} {nth} resuming: {resuming}");
            }
        }
    }
    assert_eq!((unmap(place.0, place.1), release(handle), release(other), release(unmapped)), (0, 0, 0, 0));
    vramctl_driver::sweep();
    assert_eq!(pages_in_use(&gpu), 0);
}

#[derive(Debug, Clone)]
enum Step {
    Create,
    Map(usize, u64),
    Unmap(u64, u64),
    Allow(u64, u64, u32),
    Release(usize),
    Retain(u64),
    Write(u64, u64),
    /// Frees the reservation and makes a new one.
    Reserve,
    Pause,
    Resume,
}

fn step() -> impl Strategy<Value = Step> {
    let page = || 0..PAGES;
    prop_oneof![
        3 => Just(Step::Create),
        6 => (any::<usize>(), page()).prop_map(|(handle, at)| Step::Map(handle, at)),
        2 => (page(), 1..4_u64).prop_map(|(at, pages)| Step::Unmap(at, pages)),
        4 => (page(), 1..4_u64, prop_oneof![Just(0_u32), Just(1), Just(3), Just(3)]).prop_map(|(at, pages, flags)| Step::Allow(at, pages, flags)),
        2 => any::<usize>().prop_map(Step::Release),
        1 => page().prop_map(Step::Retain),
        4 => (page(), any::<u64>()).prop_map(|(at, seed)| Step::Write(at, seed)),
        1 => Just(Step::Reserve),
        2 => Just(Step::Pause),
        2 => Just(Step::Resume),
    ]
}

const PAGES: u64 = 8;
const WHOLE: usize = PAGES as usize * PAGE;

fn reserve() -> u64 {
    let place = Reserved::new(WHOLE);
    let base = place.0;
    std::mem::forget(place);
    base
}

/// The seed of a handle's contents, or 0. Several threads may have it mapped.
type Seed = Arc<Mutex<u64>>;

/// The view of a program or of one of its threads: the driver's rules, without any pause.
struct Model {
    tag: &'static str,
    /// The addresses that it has reserved.
    place: u64,
    /// How often it has to release each.
    handles: BTreeMap<u64, usize>,
    /// Page to handle and flags.
    mapped: BTreeMap<u64, (u64, u32)>,
    /// Also of those that it has released.
    contents: BTreeMap<u64, Seed>,
}

impl Model {
    fn new(tag: &'static str) -> Self {
        Self { tag, place: reserve(), handles: BTreeMap::new(), mapped: BTreeMap::new(), contents: BTreeMap::new() }
    }

    fn at(&self, page: u64) -> u64 {
        self.place + page * PAGE as u64
    }

    fn one(&self, which: usize) -> Option<u64> {
        self.handles.keys().nth(which % self.handles.len().max(1)).copied()
    }

    /// What a handle's memory holds. Others write to it only once this is dropped.
    fn seed(&self, handle: u64) -> MutexGuard<'_, u64> {
        self.contents[&handle].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn apply(&mut self, step: &Step) -> Result<(), TestCaseError> {
        match *step {
            Step::Create if self.handles.len() < 6 => {
                let handle = create(self.tag, None, PAGE).unwrap();
                prop_assert!(self.handles.insert(handle, 1).is_none());
                self.contents.insert(handle, Seed::default());
            }
            Step::Map(which, page) => {
                let Some(handle) = self.one(which) else { return Ok(()) };
                let expected = u32::from(self.mapped.contains_key(&page));
                prop_assert_eq!(map(self.at(page), PAGE, handle), expected);
                if expected == 0 {
                    self.mapped.insert(page, (handle, 0));
                }
            }
            Step::Unmap(page, pages) => {
                let pages = pages.min(PAGES - page);
                prop_assert_eq!(unmap(self.at(page), pages as usize * PAGE), 0);
                (page..page + pages).for_each(|page| _ = self.mapped.remove(&page));
            }
            Step::Allow(page, pages, flags) => {
                let pages = pages.min(PAGES - page);
                let ends = [page, page + pages - 1].iter().all(|page| self.mapped.contains_key(page));
                prop_assert_eq!(allow(self.at(page), pages as usize * PAGE, 0, flags), u32::from(!ends));
                // The driver stops at a hole.
                for page in (page..page + pages).take_while(|_| ends) {
                    let Some(mapping) = self.mapped.get_mut(&page) else { break };
                    mapping.1 = flags;
                }
            }
            Step::Release(which) => {
                let Some(handle) = self.one(which) else { return Ok(()) };
                prop_assert_eq!(release(handle), 0);
                let references = self.handles.get_mut(&handle).unwrap();
                *references -= 1;
                if *references == 0 {
                    self.handles.remove(&handle);
                }
            }
            Step::Retain(page) => {
                let expected = self.mapped.get(&page).map(|(handle, _)| *handle).ok_or(1);
                prop_assert_eq!(retain(self.at(page)), expected);
                if let Ok(handle) = expected {
                    *self.handles.entry(handle).or_default() += 1;
                }
            }
            Step::Write(page, new) => {
                let (place, contents) = (self.at(page) as usize, pattern(new, PAGE));
                let mapped = self.mapped.get(&page).map(|(handle, flags)| (self.seed(*handle), *flags == 3));
                let written = unsafe { launch::cuMemcpyHtoD_v2(place, contents.as_ptr() as usize, PAGE) } == 0;
                prop_assert_eq!(written, mapped.as_ref().is_some_and(|(_, is_writable)| *is_writable));
                if let Some((mut seed, true)) = mapped {
                    *seed = new;
                }
            }
            Step::Reserve => {
                let expected = u32::from(!self.mapped.is_empty());
                prop_assert_eq!(unsafe { entries::cuMemAddressFree(self.place, WHOLE) }, expected);
                if expected == 0 {
                    self.place = reserve();
                }
            }
            Step::Create | Step::Pause | Step::Resume => {}
        }
        Ok(())
    }

    /// Checks access and contents at every address.
    fn check(&self) -> Result<(), TestCaseError> {
        let mut found = vec![0_u8; PAGE];
        for (page, (handle, flags)) in &self.mapped {
            prop_assert_eq!(access(self.at(*page), 0), Ok(u64::from(*flags)));
            let seed = self.seed(*handle);
            let code = unsafe { launch::cuMemcpyDtoH_v2(found.as_mut_ptr() as usize, self.at(*page) as usize, PAGE) };
            prop_assert_eq!(code == 0, *flags != 0);
            let expected = if *seed == 0 { vec![0; PAGE] } else { pattern(*seed, PAGE) };
            prop_assert!(code != 0 || found == expected, "page {page}");
        }
        Ok(())
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        let unmapped = unmap(self.place, WHOLE);
        let released = self.handles.iter().map(|(handle, references)| (0..*references).map(|_| release(*handle)).sum::<u32>()).sum::<u32>();
        let freed = unsafe { entries::cuMemAddressFree(self.place, WHOLE) };
        assert!([unmapped, released, freed] == [0; 3] || std::thread::panicking());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: common::cases(64), failure_persistence: None, ..ProptestConfig::default() })]

    /// Random programs see the same answers and contents whether or not they are paused in between.
    #[test]
    fn random_programs_notice_nothing(steps in prop::collection::vec(step(), 1..60)) {
        let gpu = Gpu::take();
        let mut model = Model::new("own");
        let mut paused = false;
        for step in &steps {
            match *step {
                Step::Pause => {
                    let any = !Memory::get().status().tags.is_empty();
                    prop_assert_eq!(pause(&[]).is_ok(), true);
                    prop_assert!(!any || pages_in_use(&gpu) == 0, "{} pages stay", pages_in_use(&gpu));
                    paused = true;
                }
                Step::Resume => {
                    resume(&[]).unwrap();
                    paused = false;
                    model.check()?;
                }
                Step::Write(..) if paused => {}
                _ => model.apply(step)?,
            }
        }
        drop(model);
        prop_assert_eq!(pages_in_use(&gpu), 0);
        prop_assert_eq!(Memory::get().status().tags.len(), 0);
    }
}

const THREADS: usize = 3;

/// A pause from outside: the tags, whether with a guard, how long the program runs before it, and what is resumed first.
type Outside = (&'static [&'static str], bool, u64, &'static [&'static str]);

fn outside() -> impl Strategy<Value = Outside> {
    let tags = || prop::sample::select(vec![&[][..], &["even"], &["odd"], &["shared"], &["even", "shared"]]);
    (tags(), any::<bool>(), 0..3000_u64, tags())
}

/// Pauses and resumes while the threads go on, and has all of them check everything after each resume.
fn pause_from_outside(pauses: &[Outside], [resumed, checked]: [&AtomicUsize; 2], ended: &dyn Fn() -> bool) -> Result<(), TestCaseError> {
    for (round, (tags, guard, after, first)) in pauses.iter().enumerate() {
        std::thread::sleep(Duration::from_micros(*after));
        let wanted = common::pausing_with(tags, |request| {
            request.selection.lenient = true;
            request.hold = Some(Duration::from_secs(100));
            request.options.guard = *guard;
        });
        let report = Memory::get().pause(&wanted, &mut ());
        prop_assert!(report.is_ok(), "{report:?}");
        std::thread::sleep(Duration::from_micros(*after / 2));
        for tags in [*first, &[]] {
            let wanted = common::resuming_with(tags, |request| request.selection.lenient = true);
            let report = Memory::get().resume(&wanted, &mut ());
            prop_assert!(report.is_ok(), "{report:?}");
        }
        prop_assert!(!gate::is_held());
        resumed.fetch_add(1, Ordering::SeqCst);
        while checked.load(Ordering::SeqCst) < (round + 1) * THREADS && !ended() {
            std::thread::yield_now();
        }
    }
    Ok(())
}

/// What a thread does until it is told to end.
fn go_on(model: &mut Model, steps: &[Step], [resumed, checked]: [&AtomicUsize; 2], over: &AtomicBool) -> Result<(), TestCaseError> {
    let mut seen = 0;
    for step in steps.iter().cycle() {
        model.apply(step)?;
        if resumed.load(Ordering::SeqCst) > seen {
            model.check()?;
            seen += 1;
            checked.fetch_add(1, Ordering::SeqCst);
        }
        if over.load(Ordering::SeqCst) {
            break;
        }
    }
    model.check()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: common::cases(12), failure_persistence: None, ..ProptestConfig::default() })]

    /// The same with several threads, some of whose handles all of them may map, and with pauses at any moment.
    #[test]
    fn random_threads_notice_nothing(
        steps in prop::collection::vec(prop::collection::vec(step(), 1..60), THREADS),
        pauses in prop::collection::vec(outside(), 1..8),
    ) {
        let gpu = Gpu::take();
        let mut models = ["even", "odd", "even"].map(Model::new);
        let mut first = Model::new("shared");
        for page in 0..2 {
            first.apply(&Step::Create)?;
            first.apply(&Step::Map(page as usize, page))?;
            let handle = first.mapped[&page].0;
            for model in &mut models {
                prop_assert_eq!(retain(first.at(page)), Ok(handle));
                model.handles.insert(handle, 1);
                model.contents.insert(handle, Arc::clone(&first.contents[&handle]));
            }
        }
        // From now on, they are the threads'.
        drop(first);
        let (resumed, checked, over) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let threads: Vec<_> = models.iter_mut().zip(&steps).map(|(model, steps)| {
                let (resumed, checked, over) = (&resumed, &checked, &over);
                scope.spawn(move || {
                    common::set_device(0);
                    go_on(model, steps, [resumed, checked], over)
                })
            }).collect();
            let paused = pause_from_outside(&pauses, [&resumed, &checked], &|| threads.iter().any(ScopedJoinHandle::is_finished));
            if paused.is_err() {
                // Nobody will resume what they wait for.
                gate::let_go(|| false);
            }
            over.store(true, Ordering::SeqCst);
            let ended: Result<Vec<_>, _> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
            ended.and(paused)
        })
        // What has failed is not back in order, which the end of a model notices, too.
        .inspect_err(|why| eprintln!("{why}"))?;
        drop(models);
        prop_assert_eq!(pages_in_use(&gpu), 0);
        prop_assert_eq!(Memory::get().status().tags.len(), 0);
    }
}

/// The driver refuses these calls where memory is mapped. A pause that begins while one is under way must not take the memory from under it.
#[test]
fn what_is_refused_where_memory_is_mapped_is_refused_while_a_pause_begins() {
    let _gpu = Gpu::take();
    let place = Reserved::new(PAGE);
    let handle = create("own", None, PAGE).unwrap();
    assert_eq!((map(place.0, PAGE, handle), open(place.0, PAGE)), (0, 0));
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let asks = scope.spawn(|| {
            common::set_device(0);
            while !over.load(Ordering::SeqCst) {
                assert_eq!(unsafe { entries::cuMemAddressFree(place.0, PAGE) }, 1);
                assert_eq!(access(place.0, 0), Ok(3));
            }
        });
        for _ in 0..50 {
            let paused = pause(&[]).and_then(|_| resume(&[]));
            assert!(paused.is_ok() || asks.is_finished(), "{paused:?}");
        }
        over.store(true, Ordering::SeqCst);
        asks.join().unwrap();
    });
    assert_eq!((unmap(place.0, PAGE), release(handle)), (0, 0));
}

/// The release of the last paused handle lets a held program continue: nobody could resume it any more.
#[test]
fn a_held_program_continues_when_its_last_handle_is_released() {
    let _gpu = Gpu::take();
    let handle = create("last", None, PAGE).unwrap();
    let held = common::pausing_with(&["last"], |request| request.hold = Some(Duration::from_secs(20)));
    Memory::get().pause(&held, &mut ()).unwrap();
    assert!(gate::is_held());
    assert_eq!(unsafe { entries::cuMemRelease(handle) }, 0);
    assert!(!gate::is_held());
}

/// Nobody would resume it.
#[test]
fn a_held_program_continues_when_its_last_paused_handle_is_gone() {
    let _gpu = Gpu::take();
    let pause_held = || {
        let held = common::pausing_with(&["own"], |request| request.hold = Some(Duration::from_secs(20)));
        Memory::get().pause(&held, &mut ()).unwrap();
        assert!(gate::is_held());
    };
    let place = Reserved::new(PAGE);
    for unmaps_last in [true, false] {
        let handle = create("own", None, PAGE).unwrap();
        assert_eq!((map(place.0, PAGE, handle), open(place.0, PAGE)), (0, 0));
        if unmaps_last {
            assert_eq!(release(handle), 0);
            pause_held();
            assert_eq!(unmap(place.0, PAGE), 0);
        } else {
            assert_eq!(unmap(place.0, PAGE), 0);
            pause_held();
            assert_eq!(release(handle), 0);
        }
        assert!(!gate::is_held(), "{unmaps_last}");
    }
}
