//! The C ABI, called the way C calls it.

use crate::common::{self, Gpu, MIB, free, malloc, pattern, read, write};
use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr;
use vramctl_core::memory::Memory;
use vramctl_intercept::abi::*;
use vramctl_model::{Kind, Policy};

fn begin(tag: &str, backup: i32) -> VramctlResult {
    let tag = CString::new(tag).unwrap();
    unsafe { vramctl_region_begin(tag.as_ptr(), backup) }
}

fn last_error() -> String {
    unsafe { CStr::from_ptr(vramctl_last_error()) }.to_str().unwrap().to_owned()
}

fn pause(tag: Option<&str>, backup: i32) -> VramctlResult {
    let tag = tag.map(|tag| CString::new(tag).unwrap());
    unsafe { vramctl_pause(tag.as_ref().map_or(ptr::null(), |tag| tag.as_ptr()), -1, backup) }
}

fn pause_options() -> VramctlPauseOptions {
    let size = size_of::<VramctlPauseOptions>();
    VramctlPauseOptions { size, tags: ptr::null(), tag_count: 0, timeout_ms: 0, unused: ptr::null(), unused_count: 0 }
}

fn resume(tag: Option<&str>, timeout_ms: i64) -> VramctlResult {
    let tag = tag.map(|tag| CString::new(tag).unwrap());
    unsafe { vramctl_resume(tag.as_ref().map_or(ptr::null(), |tag| tag.as_ptr()), timeout_ms) }
}

/// Calls a function that fills a string buffer, following its documented protocol.
fn text(call: impl Fn(*mut c_char, usize, *mut usize) -> VramctlResult) -> String {
    let mut needed = 0;
    assert_eq!(call(ptr::null_mut(), 0, &raw mut needed), Kind::BufferTooSmall);
    let mut buffer = vec![0x55u8; needed + 8];
    assert_eq!(call(buffer.as_mut_ptr().cast(), needed - 1, &raw mut needed), Kind::BufferTooSmall);
    assert!(buffer.iter().all(|byte| *byte == 0x55), "a buffer that is too small is left alone");
    assert_eq!(call(buffer.as_mut_ptr().cast(), needed, ptr::null_mut()), VramctlResult::OK);
    assert!(buffer[needed..].iter().all(|byte| *byte == 0x55), "nothing is written past the size");
    CStr::from_bytes_with_nul(&buffer[..needed]).unwrap().to_str().unwrap().to_owned()
}

#[test]
fn regions_set_the_current_tag() {
    let _gpu = Gpu::take();
    let current = || text(|buffer, capacity, needed| unsafe { vramctl_current_tag(buffer, capacity, needed) });
    assert_eq!(current(), "");
    assert_eq!(begin("weights", VramctlBackup::Default as i32), VramctlResult::OK);
    assert_eq!(begin("kv_cache", VramctlBackup::Discard as i32), VramctlResult::OK);
    assert_eq!(current(), "kv_cache");
    let address = malloc(2 * MIB).unwrap();
    assert_eq!(Memory::get().registry.find(address).unwrap().backup, Policy::Discard);
    assert_eq!(unsafe { vramctl_region_begin(ptr::null(), 0) }, VramctlResult::OK);
    assert_eq!(current(), "", "a region without a tag leaves allocations to CUDA");
    for _ in 0..3 {
        assert_eq!(vramctl_region_end(), VramctlResult::OK);
    }
    assert_eq!(vramctl_region_end(), Kind::Invalid);
    assert!(last_error().contains("no region"));
    assert_eq!(begin("a=b", 0), Kind::Invalid);
    assert_eq!(begin("weights", 77), Kind::Invalid);
    assert!(last_error().contains("77"));
    assert_eq!(unsafe { vramctl_region_begin(c"\xff".as_ptr(), 0) }, Kind::Invalid);
    assert_eq!(current(), "", "a refused region was not begun");
}

#[test]
fn a_backup_can_be_read_while_paused() {
    let _gpu = Gpu::take();
    begin("weights", 0);
    let address = malloc(3 * MIB).unwrap();
    vramctl_region_end();
    let contents = pattern(1, 3 * MIB);
    assert_eq!(write(address, &contents), 0);

    let (mut pointer, mut bytes) = (ptr::null(), 0);
    let mut look = |address: u64| {
        let result = unsafe { vramctl_backup_pointer(address as *const c_void, &raw mut pointer, &raw mut bytes) };
        (result == VramctlResult::OK).then(|| unsafe { std::slice::from_raw_parts(pointer.cast::<u8>(), bytes) })
    };
    assert!(look(address).is_none(), "there is no backup of what is active");
    assert_eq!(pause(Some("weights"), 0), VramctlResult::OK);
    assert!(look(address).unwrap()[..3 * MIB] == contents);
    assert!(look(address + 4097).unwrap()[..3 * MIB - 4097] == contents[4097..], "from anywhere in the allocation");
    assert_eq!(look(address).unwrap().len(), 4 * MIB, "to the end of what the device holds");
    assert!(look(1).is_none());
    assert_eq!(resume(None, 0), VramctlResult::OK);
    assert!(read(address, 3 * MIB).unwrap() == contents);

    assert_eq!(pause(Some("weights"), VramctlBackup::Discard as i32), VramctlResult::OK);
    assert!(look(address).is_none(), "discarded contents are nowhere");
    assert!(last_error().contains("not in a paused allocation"));
    assert_eq!(resume(None, -1), VramctlResult::OK);
    assert!(read(address, 3 * MIB).unwrap().iter().all(|byte| *byte == 0));
    assert_eq!(unsafe { vramctl_backup_pointer(address as *const c_void, ptr::null_mut(), ptr::null_mut()) }, Kind::Invalid);
}

#[test]
fn errors_have_codes_and_texts_of_the_calling_thread() {
    let gpu = Gpu::take();
    begin("weights", 0);
    malloc(128 * MIB).unwrap();
    vramctl_region_end();
    assert_eq!(pause(Some("nonsense"), 0), Kind::UnknownTag);
    assert!(last_error().contains("nonsense") && last_error().contains("weights"), "{}", last_error());
    std::thread::spawn(|| assert_eq!(last_error(), "")).join().unwrap();
    assert_eq!(pause(None, 0), VramctlResult::OK);
    gpu.occupy(0, common::DEVICE_BYTES - 64 * MIB);
    assert_eq!(resume(None, 50), Kind::DeviceMemory);
    assert!(last_error().contains("128.00 MiB needed"), "{}", last_error());
    gpu.occupy(0, 0);
    assert_eq!(resume(None, 0), VramctlResult::OK);
}

#[test]
fn the_status_is_json() {
    let _gpu = Gpu::take();
    begin("weights", 0);
    malloc(2 * MIB).unwrap();
    vramctl_region_end();
    let status = text(|buffer, capacity, needed| unsafe { vramctl_status_json(buffer, capacity, needed) });
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    assert_eq!(status["tags"][0]["tag"], "weights");
    assert_eq!(status["tags"][0]["bytes"], 2 << 20);
    assert_eq!(status["devices"][0]["total_bytes"], common::DEVICE_BYTES);
}

#[test]
fn the_margin_is_set_and_the_version_is_the_packages() {
    let _gpu = Gpu::take();
    assert_eq!(vramctl_set_memory_margin(common::DEVICE_BYTES as u64), VramctlResult::OK);
    begin("weights", 0);
    assert_eq!(malloc(2 * MIB), Err(2));
    common::last_error();
    assert_eq!(vramctl_set_memory_margin(0), VramctlResult::OK);
    assert!(malloc(2 * MIB).is_ok());
    assert_eq!(unsafe { CStr::from_ptr(vramctl_version()) }.to_str().unwrap(), env!("CARGO_PKG_VERSION"));
}

/// As the Python package does.
#[test]
fn a_pool_of_torchs_is_entered_and_left() {
    for entered in [1, 0, 0] {
        assert_eq!(vramctl_note_torch_pool(entered), VramctlResult::OK);
    }
    assert_eq!(vramctl_note_torch_pool(7), Kind::Invalid);
}

/// The Python package goes by this. Engines' stand-ins (`python/tests/test_share.py`) show the rest.
#[test]
fn nobody_asks_for_a_cache_where_nothing_is_shared() {
    let mut counts = 7;
    assert_eq!(unsafe { vramctl_cache_unused_begin(&raw mut counts) }, Kind::Invalid);
    assert_eq!(unsafe { vramctl_cache_unused_begin(ptr::null_mut()) }, Kind::Invalid);
    assert_eq!((counts, vramctl_cache_unused_end()), (7, VramctlResult::OK));
}

/// `vramctl pause` decides by this name what it refuses to discard.
#[test]
fn a_process_announces_its_engine() {
    let say = |name: Option<&CStr>| unsafe { vramctl_set_engine(name.map_or(ptr::null(), CStr::as_ptr)) };
    assert_eq!(vramctl_core::engine::name(), None);
    assert_eq!(say(Some(c"vllm")), VramctlResult::OK);
    assert_eq!(vramctl_core::engine::name().as_deref(), Some("vllm"));
    for wrong in [c"", c"a b", c"a\nb"] {
        assert_eq!(say(Some(wrong)), Kind::Invalid);
        assert!(last_error().contains("engine's name"), "{}", last_error());
    }
    assert_eq!(vramctl_core::engine::name().as_deref(), Some("vllm"), "a refused name changes nothing");
    assert_eq!(say(None), VramctlResult::OK);
    assert_eq!(vramctl_core::engine::name(), None);
    for tags in [true, false] {
        assert_eq!(vramctl_set_engine_tags_cache(tags.into()), VramctlResult::OK);
        assert_eq!(vramctl_set_engine_tags_cache(7), Kind::Invalid);
        assert_eq!(vramctl_core::engine::tags_cache(), tags);
    }
}

/// A retained backup makes the next pause fast; one that is not retained wastes host memory.
#[test]
fn retention_is_set_at_run_time_for_a_tag_or_for_all() {
    let _gpu = Gpu::take();
    let retain = |tag: Option<&CStr>, keep: i32| unsafe { vramctl_set_retain(tag.map_or(ptr::null(), CStr::as_ptr), keep) };
    let held = || {
        vramctl_backup::settle();
        Memory::get().status().host.used_bytes
    };
    let cycle = || {
        let paused = common::pause(&[]).unwrap();
        common::resume(&[]).unwrap();
        paused.unchanged_bytes
    };
    begin("weights", 0);
    let address = malloc(4 * MIB).unwrap();
    vramctl_region_end();
    let contents = pattern(5, 4 * MIB);
    assert_eq!(write(address, &contents), 0);
    assert_eq!((cycle(), held()), (0, 0), "not retained, as the environment says");

    assert_eq!(retain(Some(c"weights"), 1), VramctlResult::OK);
    assert_eq!((cycle(), held()), (0, 4 << 20));
    assert_eq!((cycle(), held()), (4 << 20, 4 << 20), "what has not changed is known, although the memory is older than the setting");
    assert_eq!(retain(None, 0), VramctlResult::OK);
    assert_eq!(held(), 4 << 20, "a tag's own setting counts first");
    assert_eq!(retain(Some(c"weights"), 0), VramctlResult::OK);
    assert_eq!(held(), 0, "given up at once");
    assert_eq!(retain(None, 1), VramctlResult::OK);
    assert_eq!((cycle(), held()), (0, 0));
    assert_eq!(retain(Some(c"weights"), -1), VramctlResult::OK);
    assert_eq!((cycle(), held()), (0, 4 << 20), "without a setting of its own, as all");
    assert_eq!(retain(None, -1), VramctlResult::OK);
    assert_eq!(held(), 0);

    // While paused, the backup is the only copy, so it is dropped by the resume.
    assert_eq!(retain(None, 1), VramctlResult::OK);
    common::pause(&[]).unwrap();
    assert_eq!(retain(None, -1), VramctlResult::OK);
    common::resume(&[]).unwrap();
    assert_eq!(held(), 0);
    assert!(read(address, 4 * MIB).unwrap() == contents);
    assert_eq!(free(address), 0);

    assert_eq!(retain(None, 2), Kind::Invalid);
    assert_eq!(retain(Some(c"a,b"), 1), Kind::Invalid);
}

#[test]
fn the_disk_directory_is_set_at_run_time() {
    let _gpu = Gpu::take();
    let set = |path: &std::path::Path| {
        let path = CString::new(path.to_str().unwrap()).unwrap();
        unsafe { vramctl_set_disk_directory(path.as_ptr()) }
    };
    let folder = tempfile::tempdir().unwrap();
    begin("weights", VramctlBackup::Disk as i32);
    let address = malloc(2 * MIB).unwrap();
    vramctl_region_end();
    let contents = pattern(6, 2 * MIB);
    assert_eq!(write(address, &contents), 0);
    assert_eq!(set(folder.path()), VramctlResult::OK);
    assert_eq!(pause(None, 0), VramctlResult::OK);
    assert_eq!(resume(None, 0), VramctlResult::OK);
    assert!(read(address, 2 * MIB).unwrap() == contents);

    assert_eq!(set(&folder.path().join("missing")), Kind::Disk);
    assert!(last_error().contains("missing"), "{}", last_error());
    std::fs::write(folder.path().join("file"), "").unwrap();
    assert_eq!(set(&folder.path().join("file")), Kind::Disk);
    drop(folder);
    assert_eq!(pause(None, 0), Kind::Disk, "the directory that was said is the one that is used");
    assert_eq!(unsafe { vramctl_set_disk_directory(ptr::null()) }, VramctlResult::OK);
    assert_eq!(pause(None, 0), VramctlResult::OK);
}

/// An allocator's free blocks need not be saved, but skipping one byte too many would lose data.
#[test]
fn unused_ranges_are_not_kept() {
    let _gpu = Gpu::take();
    begin("weights", 0);
    let address = malloc(8 * MIB).unwrap();
    let spare = malloc(2 * MIB).unwrap();
    vramctl_region_end();
    let contents = pattern(8, 8 * MIB);
    assert_eq!((write(address, &contents), write(spare, &contents[..2 * MIB])), (0, 0));
    let range = |from: usize, bytes| VramctlRange { address: (address as usize + from) as *const c_void, bytes };
    // One byte into the second page; ending one byte short of the third page's end; beyond the end; empty; unmanaged;
    // another allocation.
    let unused = [
        range(2 * MIB + 1, 2 * MIB),
        range(4 * MIB, 2 * MIB),
        range(7 * MIB, usize::MAX),
        range(0, 0),
        VramctlRange { address: 64 as *const c_void, bytes: 64 },
        VramctlRange { address: spare as *const c_void, bytes: 2 * MIB },
    ];
    let pause_without = |ranges: &[VramctlRange]| unsafe {
        vramctl_pause_with(&VramctlPauseOptions { timeout_ms: -1, unused: ranges.as_ptr(), unused_count: ranges.len(), ..pause_options() })
    };
    assert_eq!(pause_without(&unused), VramctlResult::OK, "{}", last_error());
    let report = || text(|buffer, capacity, needed| unsafe { vramctl_last_report_json(buffer, capacity, needed) });
    let report: serde_json::Value = serde_json::from_str(&report()).unwrap();
    assert_eq!((&report["kept_bytes"], &report["discarded_bytes"]), (&(6 << 20).into(), &(4 << 20).into()));
    assert_eq!(resume(None, 0), VramctlResult::OK);
    let found = read(address, 8 * MIB).unwrap();
    assert!(found[..4 * MIB] == contents[..4 * MIB] && found[6 * MIB..] == contents[6 * MIB..], "what is not whole pages is kept");
    assert!(found[4 * MIB..6 * MIB].iter().all(|byte| *byte == 0));
    assert!(read(spare, 2 * MIB).unwrap().iter().all(|byte| *byte == 0));
    assert_eq!(unsafe { vramctl_pause_with(&VramctlPauseOptions { unused_count: 1, ..pause_options() }) }, Kind::Invalid);

    // Once retained, contents are kept whole, although the previous backup was not.
    assert_eq!(write(address, &contents), 0);
    assert_eq!(pause_without(&unused[1..2]), VramctlResult::OK);
    assert_eq!(unsafe { vramctl_set_retain(ptr::null(), 1) }, VramctlResult::OK);
    assert_eq!(resume(None, 0), VramctlResult::OK);
    assert_eq!(write(address, &contents), 0);
    for _ in 0..2 {
        assert_eq!(pause_without(&unused[1..2]), VramctlResult::OK);
        assert_eq!(resume(None, 0), VramctlResult::OK);
        assert!(read(address, 8 * MIB).unwrap() == contents);
    }
    assert_eq!(unsafe { vramctl_set_retain(ptr::null(), -1) }, VramctlResult::OK);
}

#[test]
fn an_error_has_its_numbers() {
    let gpu = Gpu::take();
    let error = || -> serde_json::Value {
        let error = text(|buffer, capacity, needed| unsafe { vramctl_last_error_json(buffer, capacity, needed) });
        serde_json::from_str(&error).unwrap()
    };
    std::thread::spawn(move || assert_eq!(error(), serde_json::json!({}))).join().unwrap();
    begin("weights", 0);
    malloc(128 * MIB).unwrap();
    vramctl_region_end();
    assert_eq!(pause(Some("nonsense"), 0), Kind::UnknownTag);
    assert_eq!((&error()["code"], &error()["known_tags"][0]), (&"unknown_tag".into(), &"weights".into()));
    assert_eq!(pause(None, 0), VramctlResult::OK);
    gpu.occupy(0, common::DEVICE_BYTES - 64 * MIB);
    assert_eq!(resume(None, 0), Kind::DeviceMemory);
    assert_eq!(error()["shortage"]["needed"], 128 << 20);
    assert_eq!(error()["message"], last_error());
    gpu.occupy(0, 0);
}

/// A pause or resume of several tags must not stop halfway.
#[test]
fn several_tags_are_paused_and_resumed_at_once() {
    let gpu = Gpu::take();
    let allocate = |tag: &str| {
        begin(tag, 0);
        let address = malloc(64 * MIB).unwrap();
        vramctl_region_end();
        assert_eq!(write(address, &pattern(3, 4096)), 0);
        address
    };
    let (weights, cache, other) = (allocate("weights"), allocate("kv_cache"), allocate("other"));
    let is_paused = || [weights, cache, other].map(|address| Memory::get().registry.find(address).unwrap().is_unmapped());
    let tag = |tag: &'static CStr, backup: VramctlBackup| VramctlTag { tag: tag.as_ptr(), backup: backup as i32 };
    let others = |backup: VramctlBackup| VramctlTag { tag: ptr::null(), backup: backup as i32 };
    let pause = |tags: &[VramctlTag]| unsafe {
        vramctl_pause_with(&VramctlPauseOptions { tags: tags.as_ptr(), tag_count: tags.len(), timeout_ms: -1, ..pause_options() })
    };
    let resume = |tags: &[*const c_char], timeout_ms| unsafe {
        let size = size_of::<VramctlResumeOptions>();
        vramctl_resume_with(&VramctlResumeOptions { size, tags: tags.as_ptr(), tag_count: tags.len(), timeout_ms })
    };

    assert_eq!(pause(&[tag(c"weights", VramctlBackup::Host), tag(c"missing", VramctlBackup::Host)]), Kind::UnknownTag);
    assert_eq!(is_paused(), [false; 3]);
    assert_eq!(pause(&[tag(c"weights", VramctlBackup::Host), tag(c"kv_cache", VramctlBackup::Discard)]), VramctlResult::OK);
    assert_eq!(is_paused(), [true, true, false]);

    gpu.occupy(0, common::DEVICE_BYTES - 160 * MIB);
    assert_eq!(resume(&[c"weights".as_ptr(), c"kv_cache".as_ptr()], 50), Kind::DeviceMemory, "there is room for one of them");
    assert_eq!(is_paused(), [true, true, false]);
    gpu.occupy(0, 0);
    assert_eq!(resume(&[c"weights".as_ptr(), c"kv_cache".as_ptr()], 0), VramctlResult::OK);
    assert!(read(weights, 4096).unwrap() == pattern(3, 4096));
    assert!(read(cache, 4096).unwrap() == [0; 4096]);

    assert_eq!(write(cache, &pattern(4, 4096)), 0);
    let kept = [others(VramctlBackup::Discard), tag(c"kv_cache", VramctlBackup::Default), tag(c"missing", VramctlBackup::Host)];
    assert_eq!(pause(&kept), VramctlResult::OK, "beside all others, a name need not be there");
    assert_eq!(is_paused(), [true; 3]);
    assert_eq!(resume(&[ptr::null()], 0), VramctlResult::OK);
    assert!(read(cache, 4096).unwrap() == pattern(4, 4096));
    assert!(read(weights, 4096).unwrap() == [0; 4096] && read(other, 4096).unwrap() == [0; 4096]);

    // None means all, and so do no options.
    for (paused, resumed) in [(pause(&[]), resume(&[], 0)), unsafe { (vramctl_pause_with(ptr::null()), vramctl_resume_with(ptr::null())) }]
    {
        assert_eq!((paused, resumed), (VramctlResult::OK, VramctlResult::OK));
    }
    assert_eq!(pause(&[VramctlTag { tag: ptr::null(), backup: 9 }]), Kind::Invalid);
}

/// A program may be built with the header of another version.
#[test]
fn options_may_be_of_another_version() {
    #[repr(C)]
    struct Later {
        now: VramctlPauseOptions,
        more: u64,
    }
    let _gpu = Gpu::take();
    malloc(8 * MIB).unwrap();
    let later = |size, more| Later { now: VramctlPauseOptions { size, timeout_ms: -1, ..pause_options() }, more };
    let pause = |options: &Later| unsafe { vramctl_pause_with((&raw const *options).cast()) };
    // Shorter than today's, without the unused ranges; longer, with nothing in what is not known; and with something.
    for options in [later(std::mem::offset_of!(VramctlPauseOptions, unused), 0), later(size_of::<Later>(), 0)] {
        assert_eq!(pause(&options), VramctlResult::OK, "{}", last_error());
        assert_eq!(resume(None, 0), VramctlResult::OK);
    }
    assert_eq!(pause(&later(size_of::<Later>(), 1)), Kind::Invalid);
    for size in [0, 4, usize::MAX] {
        assert_eq!(pause(&later(size, 0)), Kind::Invalid);
        assert!(last_error().contains("size"), "{}", last_error());
    }
}

/// Discarded parts have no backup and take no host memory. The parts around them are still found.
#[test]
fn parts_that_are_not_kept_have_no_backup() {
    const GAPS: [(usize, usize); 4] = [(4, 6), (10, 210), (212, 214), (220, 224)];
    let _gpu = Gpu::take();
    begin("weights", 0);
    let address = malloc(224 * MIB).unwrap();
    vramctl_region_end();
    let contents = pattern(3, 224 * MIB);
    assert_eq!(write(address, &contents), 0);
    // An earlier backup, whose bytes must not be mistaken for the later one's.
    let range =
        |(from, to): (usize, usize)| VramctlRange { address: (address as usize + from * MIB) as *const c_void, bytes: (to - from) * MIB };
    let unused = GAPS.map(range);
    assert!(224 * MIB as u64 > common::HOST_CAP, "whole, it could not be kept");
    let options = VramctlPauseOptions { timeout_ms: -1, unused: unused.as_ptr(), unused_count: unused.len(), ..pause_options() };
    assert_eq!(unsafe { vramctl_pause_with(&raw const options) }, VramctlResult::OK);
    assert_eq!(Memory::get().status().tags[0].host_bytes, 16 << 20);
    for mib in 0..224 {
        let (mut found, mut bytes) = (ptr::null(), 0);
        let at = (address as usize + mib * MIB) as *const c_void;
        let answer = unsafe { vramctl_backup_pointer(at, &raw mut found, &raw mut bytes) };
        if GAPS.iter().any(|(from, to)| (*from..*to).contains(&mib)) {
            assert_eq!(answer, Kind::NotPaused, "{mib}");
            continue;
        }
        assert_eq!(answer, VramctlResult::OK, "{mib}");
        let end = GAPS.iter().map(|gap| gap.0).find(|from| *from > mib).unwrap_or(224);
        assert!(unsafe { std::slice::from_raw_parts(found.cast::<u8>(), bytes) } == &contents[mib * MIB..end * MIB], "{mib}");
    }
    assert_eq!(resume(None, 0), VramctlResult::OK);
    let found = read(address, 224 * MIB).unwrap();
    for mib in 0..224 {
        let part = mib * MIB..(mib + 1) * MIB;
        let gap = GAPS.iter().any(|(from, to)| (*from..*to).contains(&mib));
        assert!(if gap { found[part.clone()].iter().all(|byte| *byte == 0) } else { found[part.clone()] == contents[part] }, "{mib}");
    }
}
