//! The hooked functions as a program sees them: managed where they should be, and otherwise like the real ones.

use crate::common::{
    self, Gate, Gpu, LONG_MS, MIB, OwnContext, Stream, free, last_error, malloc, malloc_tagged, pattern, pause, read, reset_unseen, resume,
    set_device, state, use_again, without_waiting, write,
};
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::process::Command;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Barrier, mpsc};
use std::time::{Duration, Instant};
use vramctl_backup::HOST_PIECE;
use vramctl_core::memory::share::Borrower;
use vramctl_core::memory::{Memory, region};
use vramctl_core::transition::Pause;
use vramctl_driver::{PHYSICAL_PIECE, RelaxedCapture, StreamHandle};
use vramctl_intercept::entries;
use vramctl_intercept::hooks as interpose;
use vramctl_intercept::table::{CudaExtent, CudaPitchedPtr};
use vramctl_model::Error;
use vramctl_model::{Kind, Observer, Policy, Progress, Report, Span, Stage, TagState};

const NULL_STREAM: StreamHandle = unsafe { std::mem::transmute::<usize, StreamHandle>(0) };

type Allocate = fn(usize) -> (u32, *mut c_void);
type Release = fn(*mut c_void) -> u32;

fn pointer(call: impl FnOnce(*mut *mut c_void) -> u32) -> (u32, *mut c_void) {
    let mut pointer = ptr::null_mut();
    let code = call(&raw mut pointer);
    (code, pointer)
}

const ALLOCATORS: [(&str, Allocate); 8] = [
    ("cudaMalloc", |bytes| pointer(|to| unsafe { interpose::cudaMalloc(to, bytes) })),
    ("cudaMallocAsync", |bytes| pointer(|to| unsafe { interpose::cudaMallocAsync(to, bytes, NULL_STREAM) })),
    ("cudaMallocAsync_ptsz", |bytes| pointer(|to| unsafe { interpose::cudaMallocAsync_ptsz(to, bytes, NULL_STREAM) })),
    ("cudaMallocAsync on a stream", |bytes| {
        let stream = Stream::create();
        pointer(|to| unsafe { interpose::cudaMallocAsync(to, bytes, stream.handle()) })
    }),
    ("cudaMallocPitch", |bytes| {
        let mut pitch = 0;
        pointer(|to| unsafe { interpose::cudaMallocPitch(to, &raw mut pitch, 1024, bytes / 1024) })
    }),
    ("cudaMalloc3D", |bytes| {
        let mut pitched = CudaPitchedPtr { pointer: ptr::null_mut(), pitch: 0, xsize: 0, ysize: 0 };
        let code = unsafe { interpose::cudaMalloc3D(&raw mut pitched, CudaExtent { width: 1024, height: bytes / 4096, depth: 4 }) };
        (code, pitched.pointer)
    }),
    ("cudaMallocFromPoolAsync", |bytes| {
        pointer(|to| unsafe { interpose::cudaMallocFromPoolAsync(to, bytes, common::default_pool(), NULL_STREAM) })
    }),
    ("cudaMallocFromPoolAsync_ptsz", |bytes| {
        pointer(|to| unsafe { interpose::cudaMallocFromPoolAsync_ptsz(to, bytes, common::default_pool(), NULL_STREAM) })
    }),
];

const RELEASERS: [(&str, Release); 4] = [
    ("cudaFree", |pointer| unsafe { interpose::cudaFree(pointer) }),
    ("cudaFreeAsync", |pointer| unsafe { interpose::cudaFreeAsync(pointer, NULL_STREAM) }),
    ("cudaFreeAsync_ptsz", |pointer| unsafe { interpose::cudaFreeAsync_ptsz(pointer, NULL_STREAM) }),
    ("cudaFreeAsync on a stream", |pointer| {
        let stream = Stream::create();
        unsafe { interpose::cudaFreeAsync(pointer, stream.handle()) }
    }),
];

#[test]
fn every_allocating_function_is_managed_and_every_free_works() {
    let gpu = Gpu::take();
    let before = gpu.footprint();
    for (allocator, allocate) in ALLOCATORS {
        for (releaser, release) in RELEASERS {
            for managed in [true, false] {
                let case = format!("{allocator}, {releaser}, managed: {managed}");
                if managed {
                    region::begin(Some("t"), None).unwrap();
                }
                let (code, address) = allocate(4 * MIB);
                let _ = region::end();
                assert_eq!(code, 0, "{case}");
                assert_eq!(Memory::get().registry.find(address as u64).is_some(), managed, "{case}");
                assert_eq!(write(address as u64, &pattern(1, 4 * MIB)), 0, "{case}");
                assert_eq!(release(address), 0, "{case}");
                assert_eq!(common::synchronize(), 0, "{case}");
                assert_eq!(gpu.footprint(), before, "{case}");
                // Only once.
                assert_eq!(release(address), 1, "{case}: a second free");
                last_error();
            }
        }
    }
}

/// A program that registers buffers with a network card must find managed memory equivalent to `cudaMalloc`'s, also after a
/// resume.
#[test]
fn network_cards_can_access_managed_memory_if_the_device_supports_it() {
    let gpu = Gpu::take();
    let address = malloc_tagged("weights", None, 4 * MIB).unwrap();
    let is_reached = || gpu.properties(address).map(|properties| properties.allocFlags.gpuDirectRDMACapable);
    assert_eq!(is_reached(), Some(1));
    common::cycle(&[]);
    assert_eq!(is_reached(), Some(1));
}

/// CUDA's managed (unified) memory migrates by itself, so it is left to CUDA even in a region.
#[test]
fn memory_that_migrates_is_left_to_the_runtime() {
    let gpu = Gpu::take();
    region::begin(Some("weights"), None).unwrap();
    let (code, migrating) = pointer(|to| unsafe { interpose::cudaMallocManaged(to, 4 * MIB, 1) });
    let before = gpu.used(0);
    assert_eq!((code, Memory::get().registry.addresses()), (0, Vec::new()));
    assert_eq!(gpu.properties(migrating as u64).map(drop), None, "it is virtual memory");
    assert_eq!(unsafe { interpose::cudaFree(migrating) }, 0);
    assert!(gpu.used(0) <= before);
    assert_ne!(unsafe { interpose::cudaFree(migrating) }, 0, "it was not freed");
    last_error();
    // What the runtime rejects is rejected here too.
    assert_ne!(pointer(|to| unsafe { interpose::cudaMallocManaged(to, 4 * MIB, 0) }).0, 0);
    last_error();
    region::end().unwrap();
}

#[test]
fn small_requests_and_odd_arguments_are_left_to_the_runtime() {
    let _gpu = Gpu::take();
    region::begin(Some("t"), None).unwrap();
    let small = malloc(MIB - 1).unwrap();
    assert!(Memory::get().registry.find(small).is_none());
    let large = malloc(MIB).unwrap();
    let allocation = Memory::get().registry.find(large).unwrap();
    assert_eq!(
        (allocation.origin().malloc().map(|malloc| malloc.requested), allocation.bytes()),
        (Some(MIB), 2 * MIB),
        "rounded up to the granularity"
    );
    assert_eq!(malloc(0), Ok(0));
    assert_eq!(unsafe { interpose::cudaMalloc(ptr::null_mut(), 4 * MIB) }, 1);
    assert_eq!(last_error(), 1);
    assert_eq!(unsafe { interpose::cudaFree(ptr::null_mut()) }, 0);
    assert_eq!(free(large + 4096), 1, "an address inside an allocation is not its address");
    assert_eq!(free(0xdead_0000), 1);
    last_error();
    assert_eq!((free(small), free(large)), (0, 0));
}

#[test]
fn rows_are_laid_out_as_the_runtime_does() {
    let _gpu = Gpu::take();
    for (width, height) in [(513, 4096), (4096, 300), (5000, 1000)] {
        let layout = |tag: Option<&str>| {
            if tag.is_some() {
                region::begin(tag, None).unwrap();
            }
            let mut pitch = 0;
            let (code, address) = pointer(|to| unsafe { interpose::cudaMallocPitch(to, &raw mut pitch, width, height) });
            let mut pitched = CudaPitchedPtr { pointer: ptr::null_mut(), pitch: 0, xsize: 0, ysize: 0 };
            let code_3d = unsafe { interpose::cudaMalloc3D(&raw mut pitched, CudaExtent { width, height, depth: 2 }) };
            let _ = region::end();
            assert_eq!((code, code_3d), (0, 0));
            assert_eq!((free(address as u64), free(pitched.pointer as u64)), (0, 0));
            (pitch, pitched.pitch, pitched.xsize, pitched.ysize)
        };
        assert_eq!(layout(Some("t")), layout(None), "width {width}, height {height}");
    }
    // On overflow the runtime's error is returned.
    region::begin(Some("t"), None).unwrap();
    let mut pitch = 0;
    assert_ne!(pointer(|to| unsafe { interpose::cudaMallocPitch(to, &raw mut pitch, usize::MAX - 3, 7) }).0, 0);
    last_error();
}

#[test]
fn out_of_memory_looks_like_the_runtimes_own_error() {
    let gpu = Gpu::take();
    let before = gpu.footprint();
    region::begin(Some("t"), None).unwrap();
    gpu.reset_counts();
    for bytes in [common::DEVICE_BYTES + 1, 1 << 46, 1 << 62, usize::MAX] {
        let mut address = ptr::dangling_mut();
        assert_eq!(unsafe { interpose::cudaMalloc(&raw mut address, bytes) }, 2);
        assert!(address.is_null());
        assert_eq!(last_error(), 2, "cudaGetLastError says so, as after the real call");
        assert_eq!(last_error(), 0, "and it can be cleared");
    }
    // A request that fits into one piece is left for the driver to refuse.
    let asked = u64::from(common::DEVICE_BYTES < PHYSICAL_PIECE);
    assert_eq!(gpu.calls("cuMemCreate"), asked, "more than there is: no piece of it is taken first");
    assert_eq!(gpu.footprint(), before);
    // torch then frees its cache and retries.
    let filling = malloc(common::DEVICE_BYTES - 4 * MIB).unwrap();
    assert_eq!(malloc(8 * MIB), Err(2));
    assert_eq!(free(filling), 0);
    malloc(8 * MIB).unwrap();
}

#[test]
fn a_margin_keeps_memory_free() {
    let _gpu = Gpu::take();
    region::begin(Some("t"), None).unwrap();
    let (free_bytes, _) = vramctl_driver::memory_info().unwrap();
    Memory::get().set_margin(free_bytes - 8 * MIB as u64);
    malloc(8 * MIB).unwrap();
    assert_eq!(malloc(2 * MIB), Err(2));
    Memory::get().set_margin(0);
    malloc(2 * MIB).unwrap();
}

#[test]
fn threads_without_a_context_and_several_devices() {
    let gpu = Gpu::take();
    let before = (gpu.used(0), gpu.used(1));
    let address = std::thread::spawn(|| {
        set_device(1);
        malloc_tagged("t", None, 4 * MIB).unwrap()
    });
    let second = address.join().unwrap();
    let first = std::thread::spawn(|| malloc_tagged("t", None, 6 * MIB).unwrap()).join().unwrap();
    assert_eq!((gpu.used(0) - before.0, gpu.used(1) - before.1), (6 * MIB as u64, 4 * MIB as u64));
    let contents = (pattern(1, 6 * MIB), pattern(2, 4 * MIB));
    set_device(0);
    assert_eq!(write(first, &contents.0), 0);
    set_device(1);
    assert_eq!(write(second, &contents.1), 0);
    // Paused and resumed by a thread that has never used CUDA.
    std::thread::spawn(|| pause(&["t"]).unwrap()).join().unwrap();
    assert_eq!((gpu.used(0), gpu.used(1)), before);
    std::thread::spawn(|| resume(&["t"]).unwrap()).join().unwrap();
    assert!(read(second, 4 * MIB).unwrap() == contents.1);
    set_device(0);
    assert!(read(first, 6 * MIB).unwrap() == contents.0);
    let status = Memory::get().status();
    assert_eq!(status.devices.iter().map(|device| (device.device, device.active_bytes)).collect::<Vec<_>>(), [(0, 6 << 20), (1, 4 << 20)]);
}

/// A capture in progress must survive whatever the library does.
#[test]
fn another_threads_capture_is_not_disturbed() {
    let _gpu = Gpu::take();
    for mode in 0..3 {
        let source = malloc_tagged("source", None, 2 * MIB).unwrap();
        let target = malloc_tagged("target", None, 2 * MIB).unwrap();
        let contents = pattern(5, 2 * MIB);
        assert_eq!(write(source, &contents), 0);
        let stream = Stream::create();
        stream.begin_capture(mode);
        assert_eq!(stream.copy(target, source, 2 * MIB), 0);
        std::thread::spawn(move || {
            // A global capture would forbid the program's calls otherwise.
            let _relaxed = RelaxedCapture::enter();
            let extra = malloc_tagged("extra", None, 4 * MIB).unwrap();
            assert_eq!(write(extra, &pattern(6, 4 * MIB)), 0);
            pause(&["extra"]).unwrap_or_else(|error| panic!("mode {mode}: {error}"));
            resume(&["extra"]).unwrap_or_else(|error| panic!("mode {mode}: {error}"));
            assert!(read(extra, 4 * MIB).unwrap() == pattern(6, 4 * MIB));
            assert_eq!(free(extra), 0, "mode {mode}");
            malloc_tagged("full", None, common::DEVICE_BYTES).unwrap_err();
            last_error();
        })
        .join()
        .unwrap();
        let graph = stream.end_capture().unwrap_or_else(|code| panic!("mode {mode}: the capture ended with {code}"));
        assert_eq!((stream.launch(&graph), stream.synchronize()), (0, 0));
        assert!(read(target, 2 * MIB).unwrap() == contents);
        drop((graph, stream));
        assert_eq!((free(source), free(target)), (0, 0));
    }
}

#[test]
fn a_graph_replays_after_a_pause_because_no_address_changes() {
    let _gpu = Gpu::take();
    let source = malloc_tagged("t", None, 2 * MIB).unwrap();
    let target = malloc_tagged("t", None, 2 * MIB).unwrap();
    let stream = Stream::create();
    stream.begin_capture(1);
    assert_eq!(stream.copy(target, source, 2 * MIB), 0);
    let graph = stream.end_capture().unwrap();
    for round in 0..5 {
        let contents = pattern(round, 2 * MIB);
        assert_eq!(write(source, &contents), 0);
        common::cycle(&[]);
        assert_eq!((stream.launch(&graph), stream.synchronize()), (0, 0));
        assert!(read(target, 2 * MIB).unwrap() == contents);
    }
}

#[test]
fn repeating_a_transition_is_no_error_but_unknown_tags_are() {
    let _gpu = Gpu::take();
    for tag in ["a", "b"] {
        malloc_tagged(tag, None, 2 * MIB).unwrap();
    }
    assert_eq!(resume(&[]).unwrap().unchanged, 2);
    assert_eq!(pause(&["a"]).unwrap().allocations, 1);
    let again = pause(&["a"]).unwrap();
    assert_eq!((again.allocations, again.unchanged, again.bytes), (0, 1, 0));
    assert_eq!(pause(&[]).unwrap().allocations, 1, "the rest");
    assert_eq!(resume(&["a", "b"]).unwrap().allocations, 2);
    match pause(&["a", "c"]) {
        Err(Error::UnknownTag { unknown, known }) => {
            assert_eq!((unknown, known), (vec!["c".to_owned()], vec!["a".to_owned(), "b".to_owned()]));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(state("a"), Some(TagState::Active), "nothing was paused along with an unknown tag");
}

#[test]
fn policies_discard_or_keep_by_request_region_and_environment() {
    let _gpu = Gpu::take();
    let contents = pattern(3, 2 * MIB);
    let allocate = |tag, backup| {
        let address = malloc_tagged(tag, backup, 2 * MIB).unwrap();
        assert_eq!(write(address, &contents), 0);
        address
    };
    let kept = |address| read(address, 2 * MIB).unwrap() == contents;
    let zero = |address| read(address, 2 * MIB).unwrap().iter().all(|byte| *byte == 0);
    let by_default = allocate("plain", None);
    let by_region = allocate("plain", Some(Policy::Discard));
    let by_environment = allocate(common::DISCARDED_TAG, None);
    let region_over_environment = allocate(common::DISCARDED_TAG, Some(Policy::Host));
    let report = pause(&[]).unwrap();
    assert_eq!((report.kept_bytes, report.discarded_bytes), (4 << 20, 4 << 20));
    resume(&[]).unwrap();
    assert!(kept(by_default) && kept(region_over_environment));
    assert!(zero(by_region) && zero(by_environment));

    assert_eq!(write(by_region, &contents), 0);
    Memory::get().pause(&common::pausing_with(&[], |request| request.options.backup = Some(Policy::Host)), &mut ()).unwrap();
    resume(&[]).unwrap();
    assert!(kept(by_region), "a request overrules the region");
    Memory::get().pause(&common::pausing_with(&[], |request| request.options.backup = Some(Policy::Discard)), &mut ()).unwrap();
    resume(&[]).unwrap();
    assert!(zero(by_default));
}

#[test]
fn memory_can_be_freed_and_allocated_while_paused() {
    let gpu = Gpu::take();
    let before = gpu.footprint();
    let (stays, goes) = (malloc_tagged("t", None, 2 * MIB).unwrap(), malloc_tagged("t", None, 2 * MIB).unwrap());
    let contents = pattern(4, 2 * MIB);
    assert_eq!(write(stays, &contents), 0);
    pause(&["t"]).unwrap();
    assert_eq!(free(goes), 0);
    let new = malloc_tagged("t", None, 2 * MIB).unwrap();
    let new_contents = pattern(5, 2 * MIB);
    assert_eq!(write(new, &new_contents), 0, "allocated while its tag is paused: active");
    assert_eq!(state("t"), Some(TagState::Mixed));
    let resumed = resume(&["t"]).unwrap();
    assert_eq!((resumed.allocations, resumed.unchanged), (1, 1));
    assert!(read(stays, 2 * MIB).unwrap() == contents && read(new, 2 * MIB).unwrap() == new_contents);
    assert_eq!(pause(&["t"]).unwrap().allocations, 2, "the next pause takes it");
    assert_eq!((free(stays), free(new)), (0, 0));
    assert_eq!(gpu.footprint(), before);
}

/// Waits until a pause or a free waits for the device. `reset_counts` comes before it.
fn until_it_waits(gpu: &Gpu) {
    common::eventually("it waits for the device", || gpu.calls("cuEventQuery") > 0);
}

/// Memory must not be unmapped under queued work, and what that work writes is part of the contents.
#[test]
fn a_pause_waits_for_the_devices_work() {
    let gpu = Gpu::take();
    let address = malloc_tagged("t", None, 2 * MIB).unwrap();
    let stream = Stream::create();
    gpu.set_op_delay_ms(LONG_MS);
    assert_eq!(stream.fill(address, 0x5A, 2 * MIB), 0);
    let hurried = Memory::get().pause(&common::pausing_with(&["t"], |request| request.timeout = Some(Duration::from_millis(20))), &mut ());
    assert!(matches!(hurried, Err(Error::Busy(_))), "{hurried:?}");
    assert_eq!(state("t"), Some(TagState::Active));
    gpu.reset_counts();
    std::thread::scope(|scope| {
        scope.spawn(|| pause(&["t"]).unwrap());
        until_it_waits(&gpu);
        gpu.set_op_delay_ms(0);
    });
    resume(&["t"]).unwrap();
    assert!(read(address, 2 * MIB).unwrap().iter().all(|byte| *byte == 0x5A));
    // A free waits too.
    gpu.set_op_delay_ms(LONG_MS);
    assert_eq!(stream.fill(address, 0x11, 2 * MIB), 0);
    gpu.reset_counts();
    std::thread::scope(|scope| {
        let freeing = scope.spawn(|| free(address));
        until_it_waits(&gpu);
        assert!(!freeing.is_finished());
        gpu.set_op_delay_ms(0);
        assert_eq!(freeing.join().unwrap(), 0);
    });
    assert_eq!(common::synchronize(), 0, "nothing was taken from under the work");
}

/// A stream that waits for a value is busy, although the device computes nothing.
#[test]
fn a_pause_and_a_free_wait_for_a_stream_that_waits_for_a_value() {
    let gpu = Gpu::take();
    for full in [false, true] {
        let (paused, freed) = (malloc_tagged("t", None, 2 * MIB).unwrap(), malloc_tagged("t", None, 2 * MIB).unwrap());
        let (gate, stream) = (Gate::new(), Stream::create());
        stream.wait_for(&gate);
        assert_eq!((stream.fill(paused, 0x5A, 2 * MIB), stream.fill(freed, 0x5A, 2 * MIB)), (0, 0));
        if full {
            gpu.occupy(0, common::DEVICE_BYTES - gpu.used(0) as usize);
        } else {
            // Makes the driver seem not to wait here, which it does not guarantee.
            gpu.fail("cuMemHostUnregister", 1, 0, u64::MAX);
        }
        std::thread::scope(|scope| {
            let freeing = scope.spawn(|| free(freed));
            std::thread::sleep(Duration::from_millis(30));
            let hurried =
                Memory::get().pause(&common::pausing_with(&["t"], |request| request.timeout = Some(Duration::from_millis(20))), &mut ());
            assert!(matches!(hurried, Err(Error::Busy(_))), "{hurried:?}");
            std::thread::sleep(Duration::from_millis(30));
            assert!(!freeing.is_finished());
            gate.open();
        });
        gpu.clear_faults();
        pause(&["t"]).unwrap();
        gpu.occupy(0, 0);
        resume(&["t"]).unwrap();
        assert_eq!(stream.synchronize(), 0, "nothing was taken from under the work");
        assert!(read(paused, 2 * MIB).unwrap().iter().all(|byte| *byte == 0x5A));
        assert_eq!(free(paused), 0);
    }
}

/// The runtime keeps the error of each failure: one that the program does not see would be taken for another call's.
#[test]
fn a_small_request_that_fails_is_made_once() {
    let gpu = Gpu::take();
    gpu.reset_counts();
    gpu.fail("cuMemAlloc_v2", 1, 2, 1);
    let mut address = 0;
    assert_eq!(unsafe { entries::cuMemAlloc_v2(&raw mut address, 4096) }, 2);
    assert_eq!(gpu.calls("cuMemAlloc_v2"), 1);
    assert_eq!(unsafe { entries::cuMemAlloc_v2(&raw mut address, 4096) }, 0);
    assert_eq!(unsafe { entries::cuMemFree_v2(address) }, 0);
}

/// Any context on the device may use the memory, not only the one it was allocated in: here one that allocates nothing itself.
#[test]
fn a_pause_waits_for_every_context_of_the_device() {
    let gpu = Gpu::take();
    let before = gpu.footprint();
    let address = malloc_tagged("t", None, 2 * MIB).unwrap();
    let (ready, paused) = (Barrier::new(2), Barrier::new(2));
    let hurried = std::thread::scope(|scope| {
        scope.spawn(|| {
            let _context = OwnContext::create(0);
            let (gate, stream) = (Gate::new(), Stream::create());
            stream.wait_for(&gate);
            assert_eq!(stream.fill(address, 0x5A, 2 * MIB), 0);
            ready.wait();
            paused.wait();
            gate.open();
            assert_eq!(stream.synchronize(), 0, "nothing was taken from under the work");
        });
        ready.wait();
        let hurried =
            Memory::get().pause(&common::pausing_with(&["t"], |request| request.timeout = Some(Duration::from_millis(20))), &mut ());
        paused.wait();
        hurried
    });
    assert!(matches!(hurried, Err(Error::Busy(_))), "{hurried:?}");
    assert!(read(address, 2 * MIB).unwrap().iter().all(|byte| *byte == 0x5A));
    assert_eq!(free(address), 0);
    assert_eq!(gpu.footprint(), before);
}

/// The primary context counts even if no hooked call has seen it: the runtime uses it by default.
#[test]
fn a_pause_waits_for_the_primary_context_that_has_allocated_nothing() {
    let _gpu = Gpu::take();
    let (gate, stream) = (Gate::new(), Stream::create());
    let (given, allocated) = std::sync::mpsc::channel();
    let done = &Barrier::new(2);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let _context = OwnContext::create(0);
            given.send(malloc_tagged("t", None, 2 * MIB).unwrap()).unwrap();
            done.wait();
        });
        let address = allocated.recv().unwrap();
        stream.wait_for(&gate);
        assert_eq!(stream.fill(address, 0x5A, 2 * MIB), 0);
        let hurried =
            Memory::get().pause(&common::pausing_with(&["t"], |request| request.timeout = Some(Duration::from_millis(20))), &mut ());
        gate.open();
        let ended = stream.synchronize();
        // Before its context is destroyed: a program must not do both at the same time.
        let freed = free(address);
        done.wait();
        assert!(matches!(hurried, Err(Error::Busy(_))), "{hurried:?}");
        assert_eq!((ended, freed), (0, 0));
    });
}

/// A context destroyed through the driver API takes its allocations with it, and a new context with the same handle is a
/// different one.
#[test]
fn memory_destroyed_with_an_unseen_reset_is_forgotten() {
    let gpu = Gpu::take();
    // The library's own objects in the primary context are destroyed for good.
    reset_unseen(0);
    use_again(0);
    let before = gpu.used(0);
    for case in ["reset and in use again", "reset", "destroyed", "destroyed, and its handle used again"] {
        set_device(1);
        let stays = malloc_tagged("t", None, 2 * MIB).unwrap();
        set_device(0);
        let gone = if case.starts_with("reset") {
            let gone = malloc_tagged("t", None, 4 * MIB).unwrap();
            reset_unseen(0);
            if case.ends_with("again") {
                use_again(0);
            }
            gone
        } else {
            let context = OwnContext::create(0);
            let gone = malloc_tagged("t", None, 4 * MIB).unwrap();
            drop(context);
            if case.ends_with("again") {
                drop(OwnContext::create(0));
            }
            gone
        };
        let report = pause(&["t"]).unwrap();
        assert_eq!((report.allocations, Memory::get().registry.find(gone).is_none()), (1, true), "{case}");
        resume(&["t"]).unwrap();
        assert_eq!((gpu.used(0), free(stays)), (before, 0), "{case}");
        if case == "reset" {
            use_again(0);
        }
        let again = malloc_tagged("t", None, 2 * MIB).unwrap();
        assert_eq!((write(again, &pattern(1, 2 * MIB)), pause(&[]).unwrap().allocations), (0, 1), "{case}");
        resume(&[]).unwrap();
        assert!(read(again, 2 * MIB).unwrap() == pattern(1, 2 * MIB), "{case}");
        assert_eq!(free(again), 0, "{case}");
    }
}

/// A pause must not happen after the client that requested it has left, nor may abandoned pauses block others.
#[test]
fn a_waiting_pause_is_given_up_when_its_client_is_gone() {
    struct Leaves;
    impl Observer for Leaves {
        fn is_gone(&mut self) -> Option<bool> {
            Some(true)
        }
    }
    let gpu = Gpu::take();
    let address = malloc_tagged("t", None, 2 * MIB).unwrap();
    let stream = Stream::create();
    gpu.set_op_delay_ms(LONG_MS);
    assert_eq!(stream.fill(address, 0x5A, 2 * MIB), 0);
    for timeout in [None, Some(Duration::from_secs(60))] {
        let answer = Memory::get().pause(&common::pausing_with(&["t"], |request| request.timeout = timeout), &mut Leaves);
        assert!(matches!(answer, Err(Error::Busy(_))), "{answer:?}");
    }
    gpu.set_op_delay_ms(0);
    assert_eq!(stream.synchronize(), 0);
    assert_eq!(state("t"), Some(TagState::Active));
    // Nor does it happen if the device is idle.
    let answer = Memory::get().pause(&common::pausing(&["t"]), &mut Leaves);
    assert!(matches!(answer, Err(Error::Busy(_))), "{answer:?}");
    assert_eq!(state("t"), Some(TagState::Active));
    assert!(read(address, 2 * MIB).unwrap().iter().all(|byte| *byte == 0x5A));
}

#[test]
fn a_resume_without_memory_says_what_is_short_and_can_wait() {
    let gpu = Gpu::take();
    let address = malloc_tagged("t", None, 64 * MIB).unwrap();
    let contents = pattern(8, 64 * MIB);
    assert_eq!(write(address, &contents), 0);
    pause(&["t"]).unwrap();
    gpu.occupy(0, common::DEVICE_BYTES - 32 * MIB);
    match resume(&["t"]) {
        Err(Error::DeviceMemory(shortage)) => assert_eq!((shortage.device, shortage.needed), (0, 64 << 20)),
        other => panic!("{other:?}"),
    }
    assert_eq!(state("t"), Some(TagState::Paused));
    gpu.reset_counts();
    let patient = std::thread::spawn(|| {
        Memory::get().resume(&common::resuming_with(&["t"], |request| request.timeout = Some(Duration::from_secs(100))), &mut ())
    });
    common::eventually("it looks again", || gpu.calls("cuMemGetInfo_v2") > 1);
    std::thread::sleep(Duration::from_millis(100));
    // During the wait, the program can allocate and free.
    let other = malloc_tagged("other", None, 2 * MIB).unwrap();
    assert_eq!(free(other), 0);
    gpu.occupy(0, 0);
    let report = patient.join().unwrap().unwrap();
    assert!(report.ms >= 100.0, "{report:?}");
    assert!(read(address, 64 * MIB).unwrap() == contents);
}

#[test]
fn a_device_reset_drops_what_it_destroys_and_nothing_else() {
    let gpu = Gpu::take();
    set_device(0);
    let here = malloc_tagged("t", None, 2 * MIB).unwrap();
    set_device(1);
    let there = malloc_tagged("t", None, 2 * MIB).unwrap();
    let contents = pattern(1, 2 * MIB);
    assert_eq!(write(there, &contents), 0);
    set_device(0);
    let used = gpu.used(0);
    assert_eq!(unsafe { interpose::cudaDeviceReset() }, 0);
    assert!(gpu.used(0) <= used - 2 * MIB as u64);
    assert!(Memory::get().registry.find(here).is_none());
    assert_eq!(free(here), 1, "as the runtime answers for memory that a reset has destroyed");
    last_error();
    set_device(1);
    common::cycle(&[]);
    assert!(read(there, 2 * MIB).unwrap() == contents);
    set_device(0);
    let again = malloc_tagged("t", None, 2 * MIB).unwrap();
    assert_eq!(write(again, &contents), 0, "the device works again after the reset");
    // Digests work too, despite an intermediate reset without allocations.
    assert_eq!(free(again), 0);
    assert_eq!(unsafe { interpose::cudaDeviceReset() }, 0);
    let again = malloc_tagged(common::RETAINED_TAG, None, 2 * MIB).unwrap();
    assert_eq!(write(again, &contents), 0);
    common::cycle(&[]);
    assert_eq!(pause(&[common::RETAINED_TAG]).unwrap().unchanged_bytes, 2 << 20);
    resume(&[]).unwrap();
    common::cycle(&[]);
}

/// Does work that must not wait for anything that the test does later.
#[track_caller]
fn in_time<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, is_done) = mpsc::channel();
    std::thread::spawn(move || done.send(work()));
    is_done.recv_timeout(Duration::from_secs(100)).unwrap_or_else(|_| panic!("{what} waits"))
}

/// What a call that ends a context waits for may need any other thread of the program, with or without a pause and a resume of somebody else.
#[test]
fn the_end_of_a_context_holds_up_neither_the_program_nor_a_transition() {
    type End = fn(vramctl_driver::ContextHandle) -> u32;
    let gpu = Gpu::take();
    let ends: [(&str, bool, End); 4] = [
        ("cuCtxDestroy_v2", true, |context| unsafe { entries::cuCtxDestroy_v2(context) }),
        ("cuDevicePrimaryCtxReset_v2", false, |_| unsafe { entries::cuDevicePrimaryCtxReset_v2(1) }),
        ("cuDevicePrimaryCtxRelease_v2", false, |_| unsafe { entries::cuDevicePrimaryCtxRelease_v2(1) }),
        ("cudaDeviceReset", false, |_| unsafe { interpose::cudaDeviceReset() }),
    ];
    for (name, is_own, end) in ends {
        // The runtime's function calls this one.
        let called = if name.starts_with("cuda") { "cuDevicePrimaryCtxReset_v2" } else { name };
        set_device(0);
        let gate = Gate::new();
        let stays = malloc_tagged("stays", None, 2 * MIB).unwrap();
        let gone = AtomicU64::new(0);
        std::thread::scope(|scope| {
            let ending = scope.spawn(|| {
                set_device(1);
                let own = is_own.then(|| ManuallyDrop::new(OwnContext::create(1)));
                gone.store(malloc_tagged("gone", None, 2 * MIB).unwrap(), Ordering::SeqCst);
                let stream = ManuallyDrop::new(Stream::create());
                stream.wait_for(&gate);
                gpu.reset_counts();
                end(own.map_or(unsafe { std::mem::zeroed() }, |own| own.handle()))
            });
            let checked = panic::catch_unwind(AssertUnwindSafe(|| {
                common::eventually("the call is in the driver", || gone.load(Ordering::SeqCst) != 0 && gpu.calls(called) > 0);
                in_time("a resume", || resume(&[]).map(drop)).unwrap();
                let (tags, more) = in_time("the program", || {
                    set_device(0);
                    let more = malloc_tagged("more", None, 2 * MIB).unwrap();
                    vramctl_core::contexts::memory_info(1);
                    (Memory::get().status().tags.len(), more)
                });
                assert_eq!((tags, free(more)), (3, 0), "{name}");
                // The work of the context may use any memory of the device.
                let soon = common::pausing_with(&["gone"], |request| request.timeout = Some(Duration::from_millis(20)));
                let hurried = in_time("a pause", move || Memory::get().pause(&soon, &mut ()));
                assert!(matches!(hurried, Err(Error::Busy(_))), "{name}: {hurried:?}");
            }));
            gate.open();
            let ended = ending.join().unwrap();
            checked.unwrap_or_else(|failed| panic::resume_unwind(failed));
            assert_eq!(ended, 0, "{name}");
        });
        let gone = gone.into_inner();
        assert_eq!((Memory::get().registry.find(gone).is_none(), free(stays)), (true, 0), "{name}");
        if !is_own {
            use_again(1);
        }
    }
}

/// A thread that looks whether a context of another still has work finds it there, or gone, but not going.
#[test]
fn a_context_does_not_end_while_another_thread_uses_it() {
    let gpu = Gpu::take();
    let uses: [(&str, fn()); 2] = [
        ("a synchronisation", || assert_eq!(unsafe { entries::cuCtxSynchronize() }, 0)),
        ("the status", || _ = vramctl_core::contexts::memory_info(0)),
    ];
    for (name, look) in uses {
        let ((ready, is_ready), (go, goes)) = (mpsc::channel(), mpsc::channel::<()>());
        let (looked, ended) = std::thread::scope(|scope| {
            let ends = scope.spawn(move || {
                let context = ManuallyDrop::new(OwnContext::create(0));
                let (stream, address) = (ManuallyDrop::new(Stream::create()), malloc_tagged("t", None, 2 * MIB).unwrap());
                let freed = (stream.fill(address, 1, 2 * MIB), free_async(address, &stream));
                ready.send(()).unwrap();
                let _ = goes.recv();
                (freed, unsafe { entries::cuCtxDestroy_v2(context.handle()) })
            });
            is_ready.recv().unwrap();
            gpu.reset_counts();
            gpu.slow_down("cuCtxPushCurrent_v2", LONG_MS);
            let looks = scope.spawn(|| {
                set_device(0);
                look();
            });
            let looked = common::patiently(|| if gpu.calls("cuCtxPushCurrent_v2") > 0 { Ok(()) } else { Err(()) });
            drop(go);
            // Time enough to end the context.
            std::thread::sleep(Duration::from_millis(30));
            gpu.slow_down("cuCtxPushCurrent_v2", 0);
            looks.join().unwrap();
            (looked, ends.join().unwrap())
        });
        assert_eq!((looked, ended), (Ok(()), ((0, 0), 0)), "{name}");
    }
}

/// A wait that asks the streams one by one asks none of a green context that is gone.
#[test]
fn streams_of_a_green_context_end_with_it() {
    let _gpu = Gpu::take();
    let (_, freed) = (malloc_tagged("t", None, 2 * MIB).unwrap(), malloc_tagged("t", None, 2 * MIB).unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let green = common::Green::create(0);
            green.enter();
            let _of_green = ManuallyDrop::new(Stream::create());
        });
    });
    let captured = Stream::create();
    captured.begin_capture(2);
    let (answer, paused) = (free(freed), pause(&["t"]));
    captured.end_capture().unwrap();
    assert_eq!((answer, paused.map(|report| report.allocations).ok()), (0, Some(1)));
    resume(&["t"]).unwrap();
}

/// A free waits for the work that there is when it is called, not for a moment without any.
#[test]
fn a_free_ends_although_there_is_always_work() {
    let gpu = Gpu::take();
    for is_old in [true, false] {
        let (used, freed) = (malloc_tagged("t", None, 2 * MIB).unwrap(), malloc_tagged("t", None, 2 * MIB).unwrap());
        let (captured, stop) = (Stream::create(), AtomicBool::new(false));
        if is_old {
            // Before CUDA 12.5.
            gpu.fail("cuCtxRecordEvent", 1, 500, u64::MAX);
        } else {
            captured.begin_capture(2);
        }
        gpu.set_op_delay_ms(2);
        let (busy, is_busy) = mpsc::channel();
        let checked = std::thread::scope(|scope| {
            scope.spawn(|| {
                // Some operations are always queued.
                let (stream, gates) = (Stream::create(), [(); 16].map(|()| Gate::new()));
                gates.iter().for_each(Gate::open);
                for turn in (0..16).cycle().take_while(|_| !stop.load(Ordering::SeqCst)) {
                    gates[turn].shut();
                    assert_eq!(stream.fill(used, 1, 4096), 0);
                    stream.open(&gates[turn]);
                    let _ = busy.send(());
                    common::eventually("the work goes on", || gates[(turn + 2) % 16].is_open() || stop.load(Ordering::SeqCst));
                }
                assert_eq!(stream.synchronize(), 0);
            });
            is_busy.recv().unwrap();
            let checked = panic::catch_unwind(|| in_time("a free", move || free(freed)));
            stop.store(true, Ordering::SeqCst);
            checked
        });
        gpu.set_op_delay_ms(0);
        gpu.clear_faults();
        assert_eq!(checked.unwrap_or_else(|failed| panic::resume_unwind(failed)), 0);
        if !is_old {
            captured.end_capture().unwrap();
        }
        assert_eq!(free(used), 0);
    }
}

#[test]
fn the_process_wide_tag_can_be_set_and_removed() {
    let _gpu = Gpu::take();
    let unmanaged = malloc(2 * MIB).unwrap();
    Memory::get().set_process_tag(Some("everything")).unwrap();
    let managed = malloc(2 * MIB).unwrap();
    region::begin(None, None).unwrap();
    let exempt = malloc(2 * MIB).unwrap();
    region::end().unwrap();
    Memory::get().set_process_tag(None).unwrap();
    let later = malloc(2 * MIB).unwrap();
    let found = [unmanaged, managed, exempt, later]
        .map(|address| Memory::get().registry.find(address).map(|allocation| allocation.tag.to_string()));
    assert_eq!(found, [None, Some("everything".into()), None, None]);
    for address in [unmanaged, managed, exempt, later] {
        assert_eq!(free(address), 0);
    }
}

/// `cudaDeviceEnablePeerAccess` applies to managed memory too: allocated before or after, and after a resume.
#[test]
fn peers_can_access_each_others_memory() {
    let _gpu = Gpu::take();
    set_device(1);
    let there = malloc_tagged("t", None, 2 * MIB).unwrap();
    let contents = pattern(1, 2 * MIB);
    assert_eq!(write(there, &contents), 0);
    set_device(0);
    assert!(matches!(unsafe { interpose::cudaDeviceEnablePeerAccess(1, 0) }, 0 | 704));
    last_error();
    let here = malloc_tagged("t", None, 2 * MIB).unwrap();
    let stream = Stream::create();
    assert_eq!((stream.copy(here, there, 2 * MIB), stream.synchronize()), (0, 0));
    assert!(read(here, 2 * MIB).unwrap() == contents);
    common::cycle(&[]);
    assert_eq!((stream.fill(there, 7, 2 * MIB), stream.copy(here, there, 2 * MIB), stream.synchronize()), (0, 0, 0));
    assert!(read(here, 2 * MIB).unwrap().iter().all(|byte| *byte == 7));
}

/// Access ends with `cudaDeviceDisablePeerAccess`, and with a reset of either device.
#[test]
fn a_former_peer_gets_no_access() {
    let _gpu = Gpu::take();
    let enable = || {
        set_device(0);
        assert!(matches!(unsafe { interpose::cudaDeviceEnablePeerAccess(1, 0) }, 0 | 704));
        last_error();
    };
    let opened_for = || {
        set_device(1);
        let address = malloc_tagged("t", Some(Policy::Discard), 2 * MIB).unwrap();
        let has_access = |device: &u32| {
            let (mut flags, location) = (0, [1, *device]);
            assert_eq!(unsafe { entries::cuMemGetAccess(&raw mut flags, location.as_ptr().cast(), address) }, 0);
            flags == 3
        };
        let devices = [0, 1].iter().filter(|device| has_access(device)).count();
        assert_eq!(free(address), 0);
        devices
    };
    enable();
    assert_eq!(opened_for(), 2);
    set_device(0);
    assert_eq!(unsafe { interpose::cudaDeviceDisablePeerAccess(1) }, 0);
    assert_eq!(opened_for(), 1);
    for device in [0, 1] {
        enable();
        assert_eq!(opened_for(), 2);
        set_device(device);
        assert_eq!(unsafe { interpose::cudaDeviceReset() }, 0);
        assert_eq!(opened_for(), 1, "after a reset of {device}");
    }
    set_device(0);
}

#[test]
fn a_free_waits_for_the_work_of_peers() {
    let gpu = Gpu::take();
    set_device(1);
    let there = malloc_tagged("t", None, 2 * MIB).unwrap();
    set_device(0);
    assert!(matches!(unsafe { interpose::cudaDeviceEnablePeerAccess(1, 0) }, 0 | 704));
    last_error();
    let stream = Stream::create();
    gpu.set_op_delay_ms(200);
    assert_eq!(stream.fill(there, 9, 2 * MIB), 0);
    set_device(1);
    assert_eq!(free(there), 0);
    gpu.set_op_delay_ms(0);
    set_device(0);
    assert_eq!(stream.synchronize(), 0, "nothing was taken from under the work");
}

/// An allocation that finds no memory first gets what the driver refused to take back, and what destroyed contexts left.
#[test]
fn leftover_memory_is_available_to_an_allocation() {
    let gpu = Gpu::take();
    let address = malloc_tagged("t", None, 200 * MIB).unwrap();
    gpu.fail("cuMemRelease", 1, 999, u64::MAX);
    assert_eq!(free(address), 0);
    gpu.clear_faults();
    assert!(gpu.used(0) >= 200 * MIB as u64, "the driver still has it");
    malloc_tagged("t", None, 200 * MIB).unwrap();
}

/// The program must be able to allocate and free while a pause waits for its work, which may depend on it.
#[test]
fn a_waiting_pause_does_not_block_the_program() {
    let gpu = Gpu::take();
    let address = malloc_tagged("t", None, 2 * MIB).unwrap();
    let (gate, stream) = (Gate::new(), Stream::create());
    stream.wait_for(&gate);
    assert_eq!(stream.fill(address, 1, 2 * MIB), 0);
    gpu.reset_counts();
    std::thread::scope(|scope| {
        let pausing = scope.spawn(|| pause(&["t"]).unwrap());
        until_it_waits(&gpu);
        let mut others = Vec::new();
        let is_free = without_waiting(&gate, || others.extend((0..3).map(|_| malloc_tagged("other", None, 2 * MIB).unwrap())));
        assert!(is_free, "an allocation waited for the pause");
        // Like the real one, this waits for the device's work.
        assert!(others.into_iter().all(|other| free(other) == 0));
        pausing.join().unwrap();
    });
}

fn free_async(address: u64, stream: &Stream) -> u32 {
    unsafe { interpose::cudaFreeAsync(address as *mut c_void, stream.handle()) }
}

/// CUDA does not wait here: a stream may wait for something that a correct program does after the call.
#[test]
fn a_free_in_the_order_of_a_stream_does_not_wait_for_it() {
    let gpu = Gpu::take();
    let before = gpu.footprint();
    for on_default_stream in [false, true] {
        let address = malloc_tagged("t", None, 2 * MIB).unwrap();
        let gate = Gate::new();
        let stream = ManuallyDrop::new(if on_default_stream { Stream(ptr::null_mut()) } else { Stream::create() });
        stream.wait_in_a_function_for(&gate);
        assert_eq!(stream.fill(address, 1, 2 * MIB), 0);
        let is_free = without_waiting(&gate, || {
            assert_eq!(free_async(address, &stream), 0);
            assert!(Memory::get().registry.find(address).is_none() && Memory::get().status().tags.is_empty());
            assert!(gpu.used(0) > before.used()[0], "the stream still needs it");
            assert_eq!((free_async(address, &stream), free(address)), (1, 1), "it is free");
            last_error();
        });
        assert!(is_free, "the call waited for the stream");
        assert_eq!(stream.synchronize(), 0, "nothing was taken from under the work");
        if !on_default_stream {
            drop(ManuallyDrop::into_inner(stream));
        }
        assert_eq!(common::synchronize(), 0);
        assert_eq!(gpu.footprint(), before, "the synchronisation has given it back");
    }
}

/// Later allocations get other memory until the stream reaches the free.
#[test]
fn a_free_takes_its_place_in_its_stream() {
    let gpu = Gpu::take();
    let (first, second) = (malloc_tagged("t", None, 2 * MIB).unwrap(), malloc_tagged("t", None, 2 * MIB).unwrap());
    let (gate, stream) = (Gate::new(), Stream::create());
    stream.wait_for(&gate);
    assert_eq!((stream.fill(first, 1, 2 * MIB), free_async(first, &stream)), (0, 0));
    region::begin(Some("t"), None).unwrap();
    let (code, third) = pointer(|to| unsafe { interpose::cudaMallocAsync(to, 2 * MIB, stream.handle()) });
    region::end().unwrap();
    assert_eq!((code, stream.fill(third as u64, 3, 2 * MIB), stream.copy(second, third as u64, 2 * MIB)), (0, 0, 0));
    assert_eq!(free_async(third as u64, &stream), 0);
    // An allocation that finds no memory gets it once the stream has been there; one on another device does not need it.
    set_device(1);
    assert_eq!(free(malloc(common::DEVICE_BYTES - 64 * MIB).unwrap()), 0);
    set_device(0);
    let largest = (common::DEVICE_BYTES - gpu.used(0) as usize + 4 * MIB) / (2 * MIB) * (2 * MIB);
    let is_free = without_waiting(&gate, || assert_eq!(malloc_tagged("t", None, largest), Err(2), "as CUDA answers"));
    assert!(is_free, "an allocation waited for a stream");
    last_error();
    gate.open();
    assert_eq!(stream.synchronize(), 0);
    assert_eq!(free(malloc_tagged("t", None, largest).expect("what has been freed")), 0);
    assert_eq!(stream.synchronize(), 0, "nothing was taken from under the work");
    assert!(read(second, 2 * MIB).unwrap().iter().all(|byte| *byte == 3));
}

/// The release of one does not keep another from being released.
#[test]
fn memory_freed_in_two_streams_is_released_as_each_gets_there() {
    let gpu = Gpu::take();
    let used = gpu.used(0);
    let frees = [(); 2].map(|()| {
        let (address, gate, stream) = (malloc_tagged("t", None, 2 * MIB).unwrap(), Gate::new(), Stream::create());
        stream.wait_for(&gate);
        assert_eq!(free_async(address, &stream), 0);
        (gate, stream)
    });
    for ((gate, stream), left) in frees.iter().zip([2 << 20, 0]) {
        gate.open();
        assert_eq!((stream.synchronize(), free(0), gpu.used(0) - used), (0, 0, left));
    }
}

/// A pause, a reset and the end of a context all release freed memory, and a pause does not save it.
#[test]
fn freed_memory_is_not_paused_and_ends_with_its_context() {
    let gpu = Gpu::take();
    let used = gpu.used(0);
    let (stays, goes) = (malloc_tagged("t", None, 2 * MIB).unwrap(), malloc_tagged("t", None, 4 * MIB).unwrap());
    let (gate, stream) = (Gate::new(), Stream::create());
    stream.wait_for(&gate);
    assert_eq!((stream.fill(goes, 1, 4 * MIB), free_async(goes, &stream)), (0, 0));
    gate.open();
    let report = pause(&[]).unwrap();
    assert_eq!((report.allocations, report.kept_bytes, gpu.used(0)), (1, 2 << 20, used));
    resume(&[]).unwrap();
    // Paused memory cannot be in use, so it is released at once.
    pause(&[]).unwrap();
    assert_eq!((free_async(stays, &stream), Memory::get().registry.addresses().len()), (0, 0));
    drop((stream, gate));

    for reset in [true, false] {
        let address = malloc_tagged("t", None, 64 * MIB).unwrap();
        let stream = ManuallyDrop::new(Stream::create());
        gpu.set_op_delay_ms(50);
        assert_eq!((stream.fill(address, 1, 4 * MIB), free_async(address, &stream)), (0, 0));
        if reset {
            assert_eq!(unsafe { interpose::cudaDeviceReset() }, 0);
            assert!(gpu.used(0) <= used, "it was released before the reset, not by the next call");
        } else {
            reset_unseen(0);
            use_again(0);
        }
        gpu.set_op_delay_ms(0);
        assert_eq!(common::synchronize(), 0);
        assert!(gpu.used(0) <= used, "reset: {reset}");
    }
}

#[test]
fn memory_freed_while_a_pause_waits_is_free_at_once() {
    let gpu = Gpu::take();
    let (stays, goes) = (malloc_tagged("t", None, 2 * MIB).unwrap(), malloc_tagged("t", None, 200 * MIB).unwrap());
    let stream = Stream::create();
    gpu.set_op_delay_ms(400);
    assert_eq!(stream.fill(stays, 1, 2 * MIB), 0);
    let pausing = std::thread::spawn(|| pause(&["t"]).unwrap());
    std::thread::sleep(Duration::from_millis(50));
    // In the order of an idle stream, so this does not wait for the work that the pause waits for.
    let idle = Stream::create();
    assert_eq!(unsafe { interpose::cudaFreeAsync(goes as *mut c_void, idle.handle()) }, 0);
    assert_eq!(idle.synchronize(), 0);
    let again = malloc(200 * MIB).expect("the memory that was freed");
    gpu.set_op_delay_ms(0);
    pausing.join().unwrap();
    assert_eq!((free(again), free(stays)), (0, 0));
}

#[test]
fn with_nothing_to_do_nothing_waits() {
    let _gpu = Gpu::take();
    malloc_tagged("paused", None, 2 * MIB).unwrap();
    pause(&["paused"]).unwrap();
    let busy = malloc_tagged("busy", None, 2 * MIB).unwrap();
    let (gate, stream) = (Gate::new(), Stream::create());
    stream.wait_for(&gate);
    assert_eq!(stream.fill(busy, 1, 2 * MIB), 0);
    let is_free = without_waiting(&gate, || {
        assert_eq!(pause(&["paused"]).unwrap().unchanged, 1);
        assert!(matches!(pause(&["nonsense"]), Err(Error::UnknownTag { .. })));
    });
    assert!(is_free, "it waited for the device");
}

#[test]
fn the_runtime_refuses_a_null_pointer() {
    let _gpu = Gpu::take();
    region::begin(Some("t"), None).unwrap();
    let mut pitch = 0;
    assert_eq!(unsafe { interpose::cudaMallocPitch(ptr::null_mut(), &raw mut pitch, 4096, 4096) }, 1);
    assert_eq!(pointer(|to| unsafe { interpose::cudaMallocPitch(to, ptr::null_mut(), 4096, 4096) }).0, 1);
    assert_eq!(unsafe { interpose::cudaMalloc3D(ptr::null_mut(), CudaExtent { width: 4096, height: 4096, depth: 1 }) }, 1);
    last_error();
}

/// Work on a peer device that may use the memory is waited for too.
#[test]
fn a_pause_waits_for_the_work_of_peers() {
    let gpu = Gpu::take();
    set_device(1);
    let there = malloc_tagged("t", None, 2 * MIB).unwrap();
    set_device(0);
    assert!(matches!(unsafe { interpose::cudaDeviceEnablePeerAccess(1, 0) }, 0 | 704));
    last_error();
    let stream = Stream::create();
    gpu.set_op_delay_ms(200);
    assert_eq!(stream.fill(there, 9, 2 * MIB), 0);
    pause(&[]).unwrap();
    gpu.set_op_delay_ms(0);
    assert_eq!(stream.synchronize(), 0, "nothing was taken from under the work");
    resume(&[]).unwrap();
    set_device(1);
    assert!(read(there, 2 * MIB).unwrap().iter().all(|byte| *byte == 9));
}

#[test]
fn host_memory_is_released_after_a_resume_or_retained_as_configured() {
    let _gpu = Gpu::take();
    let host = || {
        vramctl_backup::settle();
        Memory::get().status().host
    };
    let address = malloc_tagged("t", None, 3 * MIB).unwrap();
    let contents = pattern(1, 3 * MIB);
    assert_eq!(write(address, &contents), 0);
    pause(&[]).unwrap();
    assert_eq!((host().used_bytes, host().pinned_bytes), (4 << 20, HOST_PIECE as u64));
    resume(&[]).unwrap();
    assert_eq!((host().used_bytes, host().ready_bytes), (0, 0));

    let retained = malloc_tagged(common::RETAINED_TAG, None, 3 * MIB).unwrap();
    for round in 2..5 {
        let contents = pattern(round, 3 * MIB);
        assert_eq!(write(retained, &contents), 0);
        common::cycle(&[]);
        assert_eq!((host().used_bytes, host().ready_bytes), (4 << 20, HOST_PIECE as u64));
        assert!(read(retained, 3 * MIB).unwrap() == contents);
    }
    assert!(read(address, 3 * MIB).unwrap() == contents);
    assert_eq!((free(retained), free(address)), (0, 0));
    assert_eq!((host().used_bytes, host().ready_bytes), (0, 0), "what was retained goes with its allocation");
}

/// The driver takes as long to unmap a small mapping as a large one, so neighbours are unmapped together: unchanged ones that
/// were hashed together, and copied ones that share a piece of host memory.
#[test]
fn adjacent_saved_memory_is_unmapped_together() {
    const COUNT: usize = 60;
    let gpu = Gpu::take();
    let groups = (COUNT * 2 * MIB).div_ceil(HOST_PIECE);
    for (tag, unchanged, groups) in [(common::RETAINED_TAG, COUNT, 1), ("t", 0, groups)] {
        let mut addresses: Vec<_> = (0..COUNT).map(|_| malloc_tagged(tag, None, 2 * MIB).unwrap()).collect();
        addresses.sort_unstable();
        let runs = addresses.chunk_by(|one, next| one + 2 * MIB as u64 == *next).count();
        assert!(runs <= COUNT / 2 + 1, "hardly any are neighbours: {addresses:x?}");
        common::cycle(&[]);
        gpu.reset_counts();
        assert_eq!(pause(&[]).unwrap().unchanged_bytes, (unchanged * 2 * MIB) as u64);
        let calls = gpu.calls("cuMemUnmap") as usize;
        assert!((runs..runs + groups).contains(&calls), "{tag}: {calls} calls for {runs} runs of neighbours");
        for address in addresses {
            assert_eq!(free(address), 0);
        }
    }
}

#[test]
fn too_little_host_memory_is_an_error_before_anything_changed() {
    let gpu = Gpu::take();
    let before = gpu.footprint();
    let address = malloc_tagged("t", None, 200 * MIB).unwrap();
    let contents = pattern(2, 200 * MIB);
    assert_eq!(write(address, &contents), 0);
    match pause(&[]) {
        Err(Error::HostMemory { needed, available, capped }) => {
            assert!(needed > available && available <= common::HOST_CAP && capped);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(state("t"), Some(TagState::Active));
    assert!(read(address, 200 * MIB).unwrap() == contents);
    assert_eq!(Memory::get().status().host.used_bytes, 0);
    assert_eq!(free(address), 0);
    assert_eq!(gpu.footprint(), before);
}

/// Retained backups only save time. They must not prevent a pause of another tag.
#[test]
fn retained_contents_make_room_for_a_pause_that_needs_it() {
    const RETAINED: usize = 64 * MIB;
    const OTHERS: usize = 136 * MIB;
    const { assert!(OTHERS as u64 <= common::HOST_CAP && (RETAINED + OTHERS) as u64 > common::HOST_CAP) };
    let _gpu = Gpu::take();
    let host = || Memory::get().status().host.used_bytes;
    let make = |retained, others| {
        let addresses = [(common::RETAINED_TAG, retained), ("t", others)].map(|(tag, bytes)| malloc_tagged(tag, None, bytes).unwrap());
        common::cycle(&[common::RETAINED_TAG]);
        assert_eq!(host(), retained as u64, "it is retained");
        addresses
    };
    let [retained, others] = make(RETAINED, OTHERS);
    for round in 0..2 {
        assert_eq!((write(retained, &pattern(round, RETAINED)), write(others, &pattern(9, OTHERS))), (0, 0));
        pause(&["t"]).unwrap();
        assert_eq!(host(), OTHERS as u64, "what was retained is given up");
        resume(&["t"]).unwrap();
        // Everything is saved and restored as if nothing had been retained.
        common::cycle(&[common::RETAINED_TAG]);
        assert_eq!(host(), RETAINED as u64);
        assert!(read(retained, RETAINED).unwrap() == pattern(round, RETAINED));
        assert!(read(others, OTHERS).unwrap() == pattern(9, OTHERS));
    }
}

/// Retained backups are not dropped if that would not help.
#[test]
fn retained_contents_stay_if_dropping_them_would_not_help() {
    const RETAINED: usize = 64 * MIB;
    let _gpu = Gpu::take();
    malloc_tagged(common::RETAINED_TAG, None, RETAINED).unwrap();
    common::cycle(&[common::RETAINED_TAG]);
    for (tags, others) in [
        // More than would fit even without them.
        (&["t"][..], common::HOST_CAP as usize + 48 * MIB),
        // The pause would reuse the retained backup anyway.
        (&[], common::HOST_CAP as usize - RETAINED + 8 * MIB),
    ] {
        set_device(1);
        let others = malloc_tagged("t", None, others).unwrap();
        set_device(0);
        assert!(matches!(pause(tags), Err(Error::HostMemory { capped: true, .. })));
        assert_eq!(state("t"), Some(TagState::Active));
        assert_eq!(Memory::get().status().host.used_bytes, RETAINED as u64);
        assert_eq!(free(others), 0);
    }
}

/// Dropping a copy frees nothing if its piece of host memory is shared with contents that stay.
#[test]
fn retained_contents_that_make_no_room_stay() {
    let _gpu = Gpu::take();
    let allocate = |(tag, bytes)| malloc_tagged(tag, None, bytes).unwrap();
    let all = || [("kept", 8 * MIB), ("shares", 24 * MIB), ("alone", 64 * MIB)].map(allocate).to_vec();
    let mut addresses = all();
    while addresses[1] > addresses[2] {
        // The copy that would free nothing must be considered first. Addresses rise, until they begin again at the bottom.
        for address in addresses {
            assert_eq!(free(address), 0);
        }
        addresses = all();
    }
    const { assert!(HOST_PIECE == 32 * MIB && common::HOST_CAP == 6 * HOST_PIECE as u64) };
    // The first two share a piece; the third has two of its own.
    for tag in ["kept", "shares", "alone"] {
        Memory::get().set_retain(Some(tag), Some(true)).unwrap();
        pause(&[tag]).unwrap();
    }
    resume(&["shares", "alone"]).unwrap();
    // Needs four pieces; three are free.
    addresses.push(allocate(("t", 120 * MIB)));
    pause(&["t"]).unwrap();
    assert_eq!(Memory::get().status().host.used_bytes, (8 + 24 + 120) << 20, "the copy that takes two pieces is given up, and no other");
    resume(&[]).unwrap();
    for tag in ["kept", "shares", "alone"] {
        Memory::get().set_retain(Some(tag), None).unwrap();
    }
    for address in addresses {
        assert_eq!(free(address), 0);
    }
}

/// A copy saved before its tag was retained may hold other parts, so it cannot be reused.
#[test]
fn a_retained_copy_of_other_parts_makes_room_for_its_own_tag() {
    const BYTES: usize = 160 * MIB;
    let _gpu = Gpu::take();
    let address = malloc_tagged("parts", None, BYTES).unwrap();
    let unused = vec![Span { address, bytes: 96 * MIB }];
    Memory::get().pause(&Pause { unused, ..common::pausing(&[]) }, &mut ()).unwrap();
    Memory::get().set_retain(Some("parts"), Some(true)).unwrap();
    resume(&[]).unwrap();
    assert_eq!(Memory::get().status().host.used_bytes, 64 << 20, "a part is retained");
    let contents = pattern(5, BYTES);
    assert_eq!(write(address, &contents), 0);
    common::cycle(&[]);
    assert!(read(address, BYTES).unwrap() == contents);
    Memory::get().set_retain(Some("parts"), None).unwrap();
}

/// Changed neighbours are copied together, each in full.
#[test]
fn all_changes_to_retained_contents_are_saved() {
    const BYTES: usize = 16 * MIB;
    let _gpu = Gpu::take();
    let address = malloc_tagged(common::RETAINED_TAG, None, BYTES).unwrap();
    let mut contents = pattern(1, BYTES);
    assert_eq!(write(address, &contents), 0);
    pause(&[]).and_then(|_| resume(&[])).unwrap();
    let changed = 2 * MIB..10 * MIB;
    contents[changed.clone()].copy_from_slice(&pattern(2, changed.len()));
    assert_eq!(write(address, &contents), 0);
    let report = pause(&[]).unwrap();
    assert_eq!(report.unchanged_bytes, (BYTES - changed.len()) as u64);
    resume(&[]).unwrap();
    assert!(read(address, BYTES).unwrap() == contents);
}

/// A save that fails halfway has replaced part of the copy, which no longer matches its digests.
#[test]
fn a_partly_replaced_retained_copy_is_not_trusted() {
    const BYTES: usize = HOST_PIECE + 8 * MIB;
    let gpu = Gpu::take();
    let address = malloc_tagged(common::RETAINED_TAG, None, BYTES).unwrap();
    let (first, second) = (pattern(1, BYTES), pattern(2, BYTES));
    assert_eq!(write(address, &first), 0);
    pause(&[]).and_then(|_| resume(&[])).unwrap();
    assert_eq!(write(address, &second), 0);
    gpu.reset_counts();
    gpu.fail("cuEventSynchronize", 1, 999, u64::MAX);
    assert!(pause(&[]).is_err());
    gpu.clear_faults();
    assert!(gpu.calls("cuMemcpyDtoHAsync_v2") > 0, "something was copied");
    assert_eq!(write(address, &first), 0);
    pause(&[]).and_then(|_| resume(&[])).unwrap();
    assert!(read(address, BYTES).unwrap() == first);
}

/// The long wait comes before the lock. Work started meanwhile is waited for under the lock.
#[test]
fn work_that_is_started_during_the_first_wait_is_waited_for() {
    let gpu = Gpu::take();
    let address = malloc_tagged("t", Some(Policy::Discard), 4 * MIB).unwrap();
    let (one, other) = (Stream::create(), Stream::create());
    let (first, second) = (Gate::new(), Gate::new());
    one.wait_for(&first);
    assert_eq!(one.fill(address, 1, MIB), 0);
    gpu.reset_counts();
    let pausing = std::thread::spawn(|| pause(&["t"]).map(drop));
    until_it_waits(&gpu);
    // By then the driver has decided what to wait for.
    std::thread::sleep(Duration::from_millis(100));
    other.wait_for(&second);
    assert_eq!(other.fill(address, 2, MIB), 0);
    first.open();
    std::thread::sleep(Duration::from_millis(100));
    assert!(!pausing.is_finished());
    second.open();
    pausing.join().unwrap().unwrap();
    assert_eq!((one.synchronize(), other.synchronize()), (0, 0), "the memory was taken away under running work");
    resume(&[]).unwrap();
}

/// The wait under the lock is short. A pause whose work does not finish in that time starts again.
#[test]
fn work_that_outlasts_the_wait_under_the_lock_is_waited_for_without_it() {
    let gpu = Gpu::take();
    let address = malloc_tagged("t", Some(Policy::Discard), 4 * MIB).unwrap();
    for timeout in [None, Some(Duration::from_secs(60))] {
        let (one, other) = (Stream::create(), Stream::create());
        let (first, gate) = (Gate::new(), Gate::new());
        one.wait_for(&first);
        assert_eq!(one.fill(address, 1, MIB), 0);
        gpu.reset_counts();
        let pausing = std::thread::spawn(move || {
            Memory::get().pause(&common::pausing_with(&["t"], |request| request.timeout = timeout), &mut ()).map(drop)
        });
        until_it_waits(&gpu);
        std::thread::sleep(Duration::from_millis(100));
        other.wait_for(&gate);
        first.open();
        // The first stream is idle, and the wait under the lock is over, too.
        std::thread::sleep(Duration::from_secs(1));
        assert!(!pausing.is_finished());
        let allocated = malloc_tagged("u", Some(Policy::Discard), 2 * MIB).expect("nobody holds the lock");
        gate.open();
        pausing.join().unwrap().unwrap();
        assert_eq!(state("t"), Some(TagState::Paused));
        resume(&[]).unwrap();
        assert_eq!(free(allocated), 0);
    }
}

/// Discarded contents need no copy, which would fail as well.
#[test]
fn a_context_that_cannot_be_waited_for_keeps_its_memory() {
    let gpu = Gpu::take();
    let address = malloc_tagged("t", Some(Policy::Discard), 2 * MIB).unwrap();
    let (gate, stream) = (Gate::new(), Stream::create());
    stream.wait_for(&gate);
    assert_eq!(stream.fill(address, 1, 2 * MIB), 0);
    gpu.fail("cuCtxPushCurrent_v2", 1, 999, u64::MAX);
    let paused = pause(&["t"]).map(drop).map_err(|error| error.kind());
    gpu.clear_faults();
    assert_eq!((paused, state("t")), (Err(Kind::Driver), Some(TagState::Active)));
    gate.open();
    assert_eq!((stream.synchronize(), free(address)), (0, 0));
}

/// The kept parts of adjacent allocations are contiguous in host memory: a misplaced part would overwrite another's.
#[test]
fn kept_parts_of_several_allocations_do_not_mix() {
    let _gpu = Gpu::take();
    let all: Vec<_> = (1..4).map(|seed| (malloc_tagged("t", Some(Policy::Host), 8 * MIB).unwrap(), pattern(seed, 8 * MIB))).collect();
    for (address, contents) in &all {
        assert_eq!(write(*address, contents), 0);
    }
    let hole = |which: usize, from: usize, bytes: usize| Span { address: all[which].0 + from as u64, bytes };
    let unused = vec![hole(0, 0, 2 * MIB), hole(1, 2 * MIB, 2 * MIB), hole(1, 6 * MIB, 2 * MIB)];
    let kept: [&[(usize, usize)]; 3] = [&[(2, 8)], &[(0, 2), (4, 6)], &[(0, 8)]];
    let report = Memory::get().pause(&Pause { unused, ..common::pausing(&["t"]) }, &mut ()).unwrap();
    assert_eq!(report.kept_bytes, 18 << 20);
    resume(&[]).unwrap();
    for ((address, contents), kept) in all.iter().zip(kept) {
        let found = read(*address, contents.len()).unwrap();
        for (start, end) in kept {
            let part = start * MIB..end * MIB;
            assert!(found[part.clone()] == contents[part.clone()], "{address:#x}: {part:?}");
        }
        assert_eq!(free(*address), 0);
    }
}

/// Memory that a sweep fails to release stays on the list.
#[test]
fn a_refused_sweep_is_retried() {
    let gpu = Gpu::take();
    let before = gpu.used(0);
    malloc_tagged("t", Some(Policy::Discard), 4 * MIB).unwrap();
    gpu.fail("cuMemRelease", 1, 999, 3);
    assert_eq!(pause(&[]).unwrap().late_bytes, 4 << 20);
    for _ in 0..2 {
        assert!(!vramctl_driver::sweep());
        assert_eq!((vramctl_driver::leftover_bytes(), gpu.used(0)), (4 << 20, before + (4 << 20)));
    }
    assert!(vramctl_driver::sweep());
    assert_eq!((vramctl_driver::leftover_bytes(), gpu.used(0)), (0, before));
}

/// Host memory registered in a context that is then destroyed is registered again.
#[test]
fn host_memory_does_not_outlive_the_context_it_was_registered_in() {
    let gpu = Gpu::take();
    let registered_by_a_resume_of = |tag: &str| {
        gpu.reset_counts();
        resume(&[tag]).unwrap();
        gpu.calls("cuMemHostRegister_v2")
    };
    set_device(1);
    malloc_tagged("stays", None, 4 * MIB).unwrap();
    set_device(0);
    let context = common::OwnContext::create(0);
    malloc_tagged("goes", None, 4 * MIB).unwrap();
    // Both in one piece, registered in the first's context.
    pause(&["goes"]).unwrap();
    pause(&["stays"]).unwrap();
    drop(context);
    assert_eq!(registered_by_a_resume_of("stays"), 1, "its context was destroyed");
    // Memory that the other device's context has registered meanwhile is released in the background.
    vramctl_backup::settle();
    set_device(0);
    malloc_tagged("goes", None, 4 * MIB).unwrap();
    pause(&["goes"]).unwrap();
    pause(&["stays"]).unwrap();
    // SAFETY: no arguments.
    assert_eq!(unsafe { interpose::cudaDeviceReset() }, 0);
    assert_eq!(registered_by_a_resume_of("stays"), 1, "its context was reset");
}

/// A resume allocates nothing if the device has too little for all of it.
#[test]
fn a_resume_without_enough_memory_takes_none() {
    let gpu = Gpu::take();
    let addresses = [(); 2].map(|()| malloc_tagged("t", Some(Policy::Discard), 64 * MIB).unwrap());
    pause(&[]).unwrap();
    gpu.occupy(0, common::DEVICE_BYTES - gpu.used(0) as usize - 100 * MIB);
    gpu.reset_counts();
    match resume(&[]) {
        Err(Error::DeviceMemory(shortage)) => assert_eq!((shortage.needed, shortage.free), (128 << 20, 100 << 20)),
        other => panic!("{other:?}"),
    }
    assert_eq!(gpu.calls("cuMemCreate"), 0);
    assert_eq!(addresses.map(free), [0; 2]);
}

/// If host memory cannot be registered, backups go through a small buffer allocated by the driver, or through none.
#[test]
fn unregistered_host_memory_is_slower_but_correct() {
    let gpu = Gpu::take();
    // More than the buffer holds, and neighbours that too long a copy would reach.
    let sizes = [40, 20, 24, 17].map(|mib| mib * MIB);
    for without_staging in [false, true] {
        let allocations = sizes.map(|bytes| {
            let (address, contents) = (malloc_tagged("t", None, bytes).unwrap(), pattern(bytes as u64, bytes));
            assert_eq!(write(address, &contents), 0);
            (address, contents)
        });
        gpu.fail("cuMemHostRegister_v2", 1, 801, u64::MAX);
        if without_staging {
            gpu.fail("cuMemHostAlloc", 1, 2, u64::MAX);
        }
        pause(&[]).unwrap();
        let host = Memory::get().status().host;
        assert_eq!((host.ready_bytes, host.pinned_bytes), (sizes.iter().sum::<usize>().next_multiple_of(HOST_PIECE) as u64, 0));
        resume(&[]).unwrap();
        gpu.clear_faults();
        for (address, contents) in allocations {
            assert!(read(address, contents.len()).unwrap() == contents);
            assert_eq!(free(address), 0);
        }
    }
}

/// With a timeout of 0, a pause of an idle device succeeds.
#[test]
fn an_idle_device_is_paused_with_a_zero_timeout() {
    let _gpu = Gpu::take();
    malloc_tagged("t", None, 2 * MIB).unwrap();
    Memory::get().pause(&common::pausing_with(&[], |request| request.timeout = Some(Duration::ZERO)), &mut ()).unwrap();
}

#[test]
fn a_pause_of_one_gpu_leaves_the_others_alone() {
    let gpu = Gpu::take();
    for device in [1, 0] {
        set_device(device);
        malloc_tagged("weights", None, MIB).unwrap();
    }
    let uuids: Vec<_> = Memory::get().status().devices.iter().map(|device| device.uuid.clone().unwrap()).collect();
    assert!(uuids[0] != uuids[1] && uuids.iter().all(|uuid| uuid.starts_with("GPU-") && uuid.len() == 40), "{uuids:?}");
    let before = (gpu.used(0), gpu.used(1));
    let only = |gpu: &str| common::pausing_with(&[], |request| request.selection.gpus = vec![gpu.to_owned()]);
    let resume_only = |gpu: &str| {
        Memory::get().resume(&common::resuming_with(&[], |request| request.selection.gpus = vec![gpu.to_owned()]), &mut ()).unwrap()
    };
    assert_eq!(Memory::get().plan_pause(&only(&uuids[1])).unwrap().0.tags[0].allocations, 1);
    assert_eq!(Memory::get().pause(&only(&uuids[1]), &mut ()).unwrap().allocations, 1);
    assert_eq!(gpu.used(0), before.0);
    assert!(gpu.used(1) < before.1);
    assert_eq!(resume_only(&uuids[0]).allocations, 0);
    assert_eq!(resume_only(&uuids[1]).allocations, 1);
    assert_eq!((gpu.used(0), gpu.used(1)), before);
    assert_eq!(Memory::get().pause(&only("GPU-of-nobody"), &mut ()).unwrap().allocations, 0);
}

/// A status request during a pause sees neither `active` nor more host memory in use than there is.
#[test]
fn a_pause_and_a_resume_in_progress_show_in_the_status() {
    struct Looking {
        tag: TagState,
        seen: Vec<Progress>,
    }
    impl Observer for Looking {
        fn progress(&mut self, now: Progress) -> Result<(), Error> {
            let status = Memory::get().status();
            let tags: Vec<_> = status.tags.iter().map(|tag| (tag.tag.as_str(), tag.state, tag.progress)).collect();
            assert_eq!(tags, [("other", TagState::Active, None), ("weights", self.tag, Some(now))]);
            assert!(status.host.used_bytes <= status.host.ready_bytes, "{:?}", status.host);
            self.seen.push(now);
            Ok(())
        }
    }
    let _gpu = Gpu::take();
    malloc_tagged("weights", None, 6 * HOST_PIECE).unwrap();
    malloc_tagged("other", None, MIB).unwrap();
    let bytes = 6 * HOST_PIECE as u64;
    for tag in [TagState::Pausing, TagState::Resuming] {
        let mut looking = Looking { tag, seen: Vec::new() };
        let (done, stage) = if tag == TagState::Pausing {
            (Memory::get().pause(&common::pausing(&["weights"]), &mut looking), Stage::Save)
        } else {
            (Memory::get().resume(&common::resuming(&["weights"]), &mut looking), Stage::Restore)
        };
        assert_eq!(done.unwrap().kept_bytes, bytes);
        assert!(looking.seen.len() > 1, "{:?}", looking.seen);
        assert_eq!(looking.seen.last().map(|last| (last.stage, last.done, last.total)), Some((stage, bytes, bytes)));
        let after = if tag == TagState::Pausing { TagState::Paused } else { TagState::Active };
        let now = Memory::get().status().tags.into_iter().find(|tag| tag.tag == "weights").unwrap();
        assert_eq!((now.state, now.progress), (after, None));
    }
}

/// Only pieces that were written to since the last backup are copied again, even if a single bit has changed.
#[test]
fn only_what_has_changed_is_copied_again() {
    const PIECE: u64 = 2 << 20;
    let _gpu = Gpu::take();
    let address = malloc_tagged(common::RETAINED_TAG, None, 20 * MIB).unwrap();
    let mut contents = pattern(1, 20 * MIB);
    assert_eq!(write(address, &contents), 0);
    let cycle = || {
        let report = pause(&[]).unwrap();
        resume(&[]).unwrap();
        report.unchanged_bytes
    };
    assert_eq!(cycle(), 0);
    assert_eq!(cycle(), 10 * PIECE);
    for byte in [0, 2 * MIB - 1, 7 * MIB + 12345, 20 * MIB - 1] {
        contents[byte] ^= 1;
        assert_eq!(write(address + byte as u64, &contents[byte..=byte]), 0);
        assert_eq!(cycle(), 9 * PIECE, "byte {byte}");
        assert!(read(address, 20 * MIB).unwrap() == contents);
    }
    assert_eq!(cycle(), 10 * PIECE);
    // Changed and changed back: the copy is still valid.
    assert_eq!(write(address, &[!contents[0]]), 0);
    assert_eq!(write(address, &contents[..1]), 0);
    assert_eq!(cycle(), 10 * PIECE);
    // A discarding pause drops the copy.
    Memory::get().pause(&common::pausing_with(&[], |request| request.options.backup = Some(Policy::Discard)), &mut ()).unwrap();
    resume(&[]).unwrap();
    assert!(read(address, 20 * MIB).unwrap().iter().all(|byte| *byte == 0));
    assert_eq!(cycle(), 0);
    assert!(read(address, 20 * MIB).unwrap().iter().all(|byte| *byte == 0));
}

/// Digests only save time.
#[test]
fn a_pause_whose_digests_fail_copies_everything() {
    let gpu = Gpu::take();
    let address = malloc_tagged(common::RETAINED_TAG, None, 4 * MIB).unwrap();
    let contents = pattern(1, 4 * MIB);
    assert_eq!(write(address, &contents), 0);
    for fails in [false, true] {
        if fails {
            gpu.fail("cuLaunchKernel", 1, 4242, 1);
        }
        assert_eq!(pause(&[]).unwrap().unchanged_bytes, 0);
        resume(&[]).unwrap();
        gpu.clear_faults();
    }
    assert!(read(address, 4 * MIB).unwrap() == contents);
}

/// If a failed pause maps memory again but cannot open it, that memory must not count as active: no resume would open it.
#[test]
fn memory_that_could_not_be_opened_again_is_opened_by_the_next_resume_or_pause() {
    let gpu = Gpu::take();
    let allocate = |tag| malloc_tagged(tag, None, 2 * MIB).unwrap();
    // Not neighbours, so that they are unmapped in two calls.
    let (first, between, last) = (allocate("t"), allocate("u"), allocate("t"));
    let contents = pattern(1, 2 * MIB);
    for strand_in_resume in [false, true] {
        assert_eq!(write(first, &contents), 0);
        // Only the first of the two is unmapped, and it cannot be opened again.
        gpu.fail("cuMemUnmap", 2, 999, 2);
        gpu.fail("cuMemSetAccess", 1, 999, 2);
        pause(&["t"]).unwrap_err();
        gpu.clear_faults();
        if strand_in_resume {
            gpu.fail("cuMemSetAccess", 1, 999, 1);
            resume(&[]).unwrap_err();
            gpu.clear_faults();
        } else {
            assert_eq!(pause(&["t"]).unwrap().bytes, 4 << 20, "both are paused by now, and not one for show");
        }
        resume(&[]).unwrap();
        assert!(read(first, 2 * MIB).unwrap() == contents);
    }
    for address in [first, between, last] {
        assert_eq!(free(address), 0);
    }
}

/// A pause that fails while replacing a retained copy must not leave digests that vouch for the old one.
#[test]
fn a_failed_pause_invalidates_a_half_replaced_copy() {
    let gpu = Gpu::take();
    let address = malloc_tagged(common::RETAINED_TAG, None, 4 * MIB).unwrap();
    let (first, second) = (pattern(1, 4 * MIB), pattern(2, 4 * MIB));
    assert_eq!(write(address, &first), 0);
    common::cycle(&[]);
    assert_eq!(write(address, &second), 0);
    // Fails the unmap that overlaps the copies, and the last one.
    gpu.fail("cuMemUnmap", 1, 999, 2);
    pause(&[]).unwrap_err();
    // Restores the contents that the old digests match, while the copy holds the second contents.
    assert_eq!(write(address, &first), 0);
    common::cycle(&[]);
    assert!(read(address, 4 * MIB).unwrap() == first);
}

/// Compiling takes time and a large stack, which an allocation cannot spare. A pause that needs the kernel waits for it.
#[test]
fn the_kernel_of_the_digests_is_loaded_once_and_not_by_the_program() {
    let gpu = Gpu::take();
    let cycle = || {
        let report = pause(&[]).unwrap();
        resume(&[]).unwrap();
        report.unchanged_bytes
    };
    assert_eq!(unsafe { interpose::cudaDeviceReset() }, 0);
    let before = gpu.live("modules");
    gpu.slow_down("cuModuleLoadData", LONG_MS);
    let address = malloc_tagged(common::RETAINED_TAG, None, 2 * MIB).unwrap();
    assert_eq!(gpu.live("modules"), before, "the allocation has waited for it");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(300));
            gpu.slow_down("cuModuleLoadData", 0);
        });
        assert_eq!((cycle(), cycle()), (0, 2 << 20));
    });
    assert_eq!((gpu.live("modules"), free(address)), (before + 1, 0));

    assert_eq!(unsafe { interpose::cudaDeviceReset() }, 0);
    gpu.reset_counts();
    gpu.fail("cuModuleLoadData", 1, 222, u64::MAX);
    let all: Vec<_> = (0..50).map(|_| malloc_tagged(common::RETAINED_TAG, None, MIB).unwrap()).collect();
    vramctl_backup::settle();
    assert_eq!(gpu.calls("cuModuleLoadData"), 1, "it was tried again");
    assert_eq!((cycle(), cycle()), (0, 0));
    gpu.clear_faults();
    for address in all {
        assert_eq!(free(address), 0);
    }
    // Restores the state that the other tests expect.
    assert_eq!(unsafe { interpose::cudaDeviceReset() }, 0);
}

#[test]
fn contents_go_to_a_file_and_come_back() {
    let gpu = Gpu::take();
    let before = gpu.footprint();
    let sizes = [3, 70, 1, 9].map(|mib| mib * MIB);
    let allocations: Vec<_> = sizes
        .iter()
        .enumerate()
        .map(|(number, bytes)| {
            let address = malloc_tagged(if number % 2 == 0 { "even" } else { "odd" }, Some(Policy::Disk), *bytes).unwrap();
            let contents = pattern(number as u64, *bytes);
            assert_eq!(write(address, &contents), 0);
            (address, contents)
        })
        .collect();
    let report = pause(&[]).unwrap();
    assert_eq!(report.kept_bytes, (4 + 70 + 2 + 10) << 20);
    assert_eq!(gpu.footprint().used(), before.used());
    vramctl_backup::settle();
    let status = Memory::get().status();
    assert_eq!(status.host.used_bytes, 64 << 20, "no host memory beyond the staging buffers");
    assert_eq!(status.tags.iter().map(|tag| tag.disk_bytes).sum::<u64>(), 86 << 20);
    // By tag: parts of a file, out of order.
    resume(&["odd"]).unwrap();
    resume(&["even"]).unwrap();
    for (address, contents) in allocations {
        assert!(read(address, contents.len()).unwrap() == contents);
        assert_eq!(free(address), 0);
    }
    assert_eq!(gpu.footprint(), before);
}

/// Adjacent contents are read in one go; others must not be taken for adjacent.
#[test]
fn any_part_of_a_file_comes_back_alone() {
    let gpu = Gpu::take();
    let before = gpu.footprint();
    let tags = ["a", "b", "c", "d"];
    let allocations = [3, 1, 2, 5].map(|mib| mib * MIB).map(|bytes| (bytes, pattern(bytes as u64, bytes)));
    let addresses: Vec<_> =
        tags.iter().zip(&allocations).map(|(tag, (bytes, _))| malloc_tagged(tag, Some(Policy::Disk), *bytes).unwrap()).collect();
    for first in [["a", "c"], ["b", "d"], ["a", "d"], ["a", "b"], ["b", "c"]] {
        for (address, (_, contents)) in addresses.iter().zip(&allocations) {
            assert_eq!(write(*address, contents), 0);
        }
        pause(&[]).unwrap();
        resume(&first).unwrap();
        for ((tag, address), (bytes, contents)) in tags.iter().zip(&addresses).zip(&allocations) {
            assert!(!first.contains(tag) || read(*address, *bytes).unwrap() == *contents, "{tag} of {first:?}");
        }
        resume(&[]).unwrap();
        for (address, (bytes, contents)) in addresses.iter().zip(&allocations) {
            assert!(read(*address, *bytes).unwrap() == *contents, "after {first:?}");
        }
    }
    for address in addresses {
        assert_eq!(free(address), 0);
    }
    assert_eq!(gpu.footprint(), before);
}

struct Looks<'a>(&'a Gpu, Vec<u64>);

impl Observer for Looks<'_> {
    fn progress(&mut self, _: Progress) -> Result<(), Error> {
        self.1.push(self.0.used(0));
        Ok(())
    }
}

/// Release is the last step: a failed pause must leave everything as it was.
#[test]
fn nothing_is_released_before_everything_is_saved() {
    let gpu = Gpu::take();
    // Three pieces of the arena, so that one is copied before another.
    let all: Vec<_> = (0..90).map(|_| malloc_tagged(common::RETAINED_TAG, None, 2 * MIB).unwrap()).collect();
    let used = gpu.used(0);
    for seed in [1, 1000] {
        for (number, address) in all.iter().enumerate() {
            assert_eq!(write(*address, &pattern(number as u64 + seed, 2 * MIB)), 0);
        }
        let mut looks = Looks(&gpu, Vec::new());
        Memory::get().pause(&common::pausing(&[]), &mut looks).unwrap();
        assert!(looks.1.iter().all(|now| *now == used), "{:?}", looks.1);
        resume(&[]).unwrap();
    }
    for address in all {
        assert_eq!(free(address), 0);
    }
}

/// Memory released too early could be taken by another process before the pause is undone.
#[test]
fn after_a_failed_copy_nothing_is_released_and_everything_is_restored() {
    let gpu = Gpu::take();
    let all: Vec<_> = (0..70).map(|_| malloc_tagged(common::RETAINED_TAG, None, 2 * MIB).unwrap()).collect();
    let fill = |seed: u64, from: usize| {
        for (number, address) in all.iter().enumerate().skip(from) {
            assert_eq!(write(*address, &pattern(number as u64 + seed, 2 * MIB)), 0);
        }
    };
    let check = |seed: u64, from: usize| {
        for (number, address) in all.iter().enumerate().skip(from) {
            assert!(read(*address, 2 * MIB).unwrap() == pattern(number as u64 + seed, 2 * MIB), "allocation {number}");
        }
    };
    fill(0, 0);
    common::cycle(&[]);
    fill(1000, 0);
    gpu.reset_counts();
    gpu.set_op_delay_ms(5);
    gpu.fail("cuMemcpyDtoHAsync_v2", 10, 999, 1);
    pause(&[]).unwrap_err();
    gpu.set_op_delay_ms(0);
    gpu.clear_faults();
    assert_eq!(gpu.calls("cuMemRelease"), 0);
    check(1000, 0);

    // 66 are unmapped while the rest is hashed, then a copy fails.
    common::cycle(&[]);
    fill(2000, 66);
    gpu.reset_counts();
    gpu.fail("cuMemcpyDtoHAsync_v2", 2, 999, 1);
    pause(&[]).unwrap_err();
    gpu.clear_faults();
    assert_eq!(gpu.calls("cuMemRelease"), 0);
    check(2000, 66);
    for address in all {
        assert_eq!(free(address), 0);
    }
}

#[test]
#[ignore = "run by the test below, in a process of its own"]
fn one_allocation() {
    assert_ne!(malloc(MIB), Ok(0));
    assert!(Memory::get().registry.addresses().is_empty());
}

/// An error in the environment may be the reason why nothing is managed.
#[test]
fn a_mistake_in_the_environment_is_reported_even_if_nothing_is_managed() {
    let said = |program: &Path, arguments: &[&str], (name, value)| {
        let mut command = Command::new(program);
        command.args(arguments).env(name, value).env_remove("VRAMCTL_LOG");
        let ran = command.output().unwrap();
        assert!(ran.status.success(), "{ran:?}");
        String::from_utf8(ran.stderr).unwrap().lines().filter(|line| line.contains("vramctl[")).collect::<String>()
    };
    let allocating = |variable| said(&std::env::current_exe().unwrap(), &["--ignored", "--exact", "interpose::one_allocation"], variable);
    assert_eq!(allocating(("VRAMCTL_TAG", "")), "");
    let library = common::library();
    for wrong in [("VRAMCTL_TAG", "a,b"), ("TMS_INIT_ENABLE", "maybe")] {
        let warning = allocating(wrong);
        assert!(warning.contains(&format!("warn: {}", wrong.0)) && warning.contains(wrong.1), "{warning:?}");
        // A program without CUDA gets no message.
        let preload = |variable| said(Path::new("env"), &[&format!("LD_PRELOAD={}", library.display()), "true"], variable);
        assert_eq!(preload(wrong), "");
    }
}

/// The figures that users see, and that the documentation compares.
#[test]
fn a_report_says_how_long_each_stage_took() {
    let gpu = Gpu::take();
    malloc_tagged("t", Some(Policy::Host), 4 * MIB).unwrap();
    let slow = [("cuMemRelease", 120), ("cuMemUnmap", 60), ("cuMemMap", 60), ("cuMemcpyHtoDAsync_v2", 120)];
    for (function, milliseconds) in slow {
        gpu.slow_down(function, milliseconds);
    }
    let check = |report: Report, took: Duration, least: [(Stage, f64); 2]| {
        for (stage, least) in least {
            assert!(report.stages[&stage] >= least, "{stage:?}: {report:?}");
        }
        assert!(report.stages.values().all(|ms| (0.0..=report.ms).contains(ms)), "{report:?}");
        assert!(report.ms <= took.as_secs_f64() * 1e3, "{report:?} took {took:?}");
    };
    let started = Instant::now();
    let report = pause(&["t"]).unwrap();
    // Unmapping overlaps the save; releasing comes last.
    check(report, started.elapsed(), [(Stage::Save, 60.0), (Stage::Release, 120.0)]);
    let started = Instant::now();
    let report = resume(&["t"]).unwrap();
    check(report, started.elapsed(), [(Stage::Map, 60.0), (Stage::Restore, 180.0)]);
    for (function, _) in slow {
        gpu.slow_down(function, 0);
    }
}

/// If undoing fails too, the error says how many allocations stay paused.
#[test]
fn a_pause_that_cannot_be_undone_says_what_stays_paused() {
    let gpu = Gpu::take();
    // Not neighbours, so that each is unmapped in a call.
    let all = ["t", "u", "t", "u", "t"].map(|tag| malloc_tagged(tag, Some(Policy::Discard), 2 * MIB).unwrap());
    gpu.fail("cuMemUnmap", 3, 999, u64::MAX);
    gpu.fail("cuMemMap", 1, 999, u64::MAX);
    let error = pause(&["t"]).unwrap_err().to_string();
    gpu.clear_faults();
    assert!(error.contains(", and allocations could not be mapped again and stay paused (2)"), "{error}");
    assert!(error.ends_with("resume them"), "no bug to report: {error}");
    resume(&[]).unwrap();
    for address in all {
        assert_eq!(free(address), 0);
    }
}

/// The child would keep the memory, however often the program frees it.
#[test]
fn a_forked_child_has_no_descriptor_of_memory_that_is_being_shared() {
    let _gpu = Gpu::take();
    let address = malloc_tagged("t", None, 2 * PHYSICAL_PIECE).unwrap();
    let token = Memory::get().ipc_handle(address).unwrap().unwrap().token;
    let loan = Memory::get().lend(&token.text(), &Borrower { connection: u64::MAX, pid: 0 }).unwrap();
    let files: Vec<_> = loan.pieces.iter().map(|(file, _)| file.get().unwrap().as_raw_fd()).collect();
    assert!(files.len() > 1);
    let child = unsafe { libc::fork() };
    if child == 0 {
        let open = files.iter().filter(|file| unsafe { libc::fcntl(**file, libc::F_GETFD) } != -1).count();
        unsafe { libc::_exit(open as i32) };
    }
    let mut status = -1;
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "open in the child, in the upper byte");
    Memory::get().take_all_back(u64::MAX);
    drop(loan);
}

#[test]
#[ignore = "run by the test below, in a process of its own"]
fn what_managed_memory_is_made_for() {
    let gpu = Gpu::take();
    let address = malloc_tagged("t", None, 2 * MIB).unwrap();
    println!("usage {}", gpu.properties(address).unwrap().allocFlags.usage);
}

/// Blackwell's engine can decompress into plain memory; into virtual memory only if it was created for that.
#[test]
fn managed_memory_is_made_for_the_decompression_engine_of_devices_that_have_one() {
    for (has_engine, usage) in [("1", "usage 2"), ("0", "usage 0")] {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--ignored", "--exact", "--nocapture", "interpose::what_managed_memory_is_made_for"])
            .env("SIMGPU_DECOMPRESSION", has_engine);
        let output = command.output().unwrap();
        assert!(String::from_utf8_lossy(&output.stdout).contains(usage), "{output:?}");
    }
}
