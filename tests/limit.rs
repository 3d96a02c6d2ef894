//! A process with a limit: every way to allocate counts, above it each is out of memory, and the program is shown what is left.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks)]

mod common;

use common::warnings;
use common::{DEVICE_BYTES, Gpu, MIB, OwnContext, Stream, default_pool, free, malloc, malloc_tagged, pause, resume, set_device};
use proptest::prelude::*;
use std::ffi::c_void;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::{ptr, thread};
use vramctl_core::limit;
use vramctl_core::memory::{Memory, is_ours};
use vramctl_intercept::table::{CudaExtent, CudaPitchedPtr};
use vramctl_intercept::{entries, hooks};
use vramctl_model::code::{INVALID_VALUE, OUT_OF_MEMORY, STREAM_CAPTURE_UNSUPPORTED, SUCCESS};
use vramctl_observe::out_of_memory;

/// Of each device: half of it.
const LIMIT: usize = DEVICE_BYTES / 2;
const PIECE: usize = 32 * MIB;

/// The simulated GPU, with a limit.
fn take() -> Gpu {
    static SET: Once = Once::new();
    SET.call_once(|| {
        // SAFETY: the first test's thread, before it takes its turn; the others wait here.
        unsafe { std::env::set_var("VRAMCTL_LIMIT", "50%") };
        warnings::collect();
    });
    let gpu = Gpu::take();
    log::set_max_level(log::LevelFilter::Off);
    assert_eq!(counted(0), 0, "nothing is left of the test before");
    gpu
}

/// Bytes that count on a device.
fn counted(device: i32) -> usize {
    limit::taken(device).unwrap().counted as usize
}

/// Free and total memory, as the program is shown them.
fn shown() -> (usize, usize) {
    let (mut free, mut total) = (0, 0);
    assert_eq!(unsafe { entries::cuMemGetInfo_v2(&raw mut free, &raw mut total) }, SUCCESS);
    (free, total)
}

/// A way to allocate memory, and to free it again.
struct Way {
    name: &'static str,
    allocate: fn(usize) -> Result<u64, u32>,
    free: Free,
}

type Free = fn(u64) -> u32;

fn answer(code: u32, made: u64) -> Result<u64, u32> {
    if code == SUCCESS { Ok(made) } else { Err(code) }
}

fn tagged(bytes: usize, allocate: fn(usize) -> Result<u64, u32>) -> Result<u64, u32> {
    vramctl_core::memory::region::begin(Some("managed"), None).unwrap();
    let made = allocate(bytes);
    vramctl_core::memory::region::end().unwrap();
    made
}

fn driver_malloc(bytes: usize) -> Result<u64, u32> {
    let mut address = 0;
    answer(unsafe { entries::cuMemAlloc_v2(&raw mut address, bytes) }, address)
}

fn driver_free(address: u64) -> u32 {
    unsafe { entries::cuMemFree_v2(address) }
}

fn pitched(bytes: usize) -> Result<u64, u32> {
    let (mut pointer, mut pitch) = (ptr::null_mut(), 0);
    answer(unsafe { hooks::cudaMallocPitch(&raw mut pointer, &raw mut pitch, 512, bytes / 512) }, pointer as u64)
}

fn driver_pitched(bytes: usize) -> Result<u64, u32> {
    let (mut address, mut pitch) = (0, 0);
    answer(unsafe { entries::cuMemAllocPitch_v2(&raw mut address, &raw mut pitch, 512, bytes / 512, 4) }, address)
}

fn three_dimensions(bytes: usize) -> Result<u64, u32> {
    let mut pitched = CudaPitchedPtr { pointer: ptr::null_mut(), pitch: 0, xsize: 0, ysize: 0 };
    let extent = CudaExtent { width: 512, height: bytes / 4096, depth: 8 };
    answer(unsafe { hooks::cudaMalloc3D(&raw mut pitched, extent) }, pitched.pointer as u64)
}

fn unified(bytes: usize) -> Result<u64, u32> {
    let mut pointer = ptr::null_mut();
    answer(unsafe { hooks::cudaMallocManaged(&raw mut pointer, bytes, 1) }, pointer as u64)
}

fn driver_unified(bytes: usize) -> Result<u64, u32> {
    let mut address = 0;
    answer(unsafe { entries::cuMemAllocManaged(&raw mut address, bytes, 1) }, address)
}

fn create_on(device: u32, bytes: usize) -> Result<u64, u32> {
    // `CUmemAllocationProp` of plain memory.
    let wanted = [1_u32, 0, 1, device, 0, 0, 0, 0];
    let mut handle = 0;
    answer(unsafe { entries::cuMemCreate(&raw mut handle, bytes, wanted.as_ptr().cast(), 0) }, handle)
}

fn create(bytes: usize) -> Result<u64, u32> {
    create_on(0, bytes)
}

fn release(handle: u64) -> u32 {
    unsafe { entries::cuMemRelease(handle) }
}

fn array(bytes: usize) -> Result<u64, u32> {
    // `CUDA_ARRAY_DESCRIPTOR` of one float for each element.
    let (mut array, wanted) = (ptr::null_mut(), [1024_u64, bytes as u64 / 4096, 0x1_0000_0020]);
    answer(unsafe { entries::cuArrayCreate_v2(&raw mut array, wanted.as_ptr().cast()) }, array as u64)
}

fn array_3d(bytes: usize) -> Result<u64, u32> {
    let (mut array, wanted) = (ptr::null_mut(), [1024_u64, 4, bytes as u64 / 16384, 0x1_0000_0020, 0]);
    answer(unsafe { entries::cuArray3DCreate_v2(&raw mut array, wanted.as_ptr().cast()) }, array as u64)
}

fn free_array(array: u64) -> u32 {
    unsafe { entries::cuArrayDestroy(array as *mut c_void) }
}

fn mipmapped(bytes: usize) -> Result<u64, u32> {
    let (mut array, wanted) = (ptr::null_mut(), [1024_u64, bytes as u64 / 4096, 0, 0x1_0000_0020, 0]);
    answer(unsafe { entries::cuMipmappedArrayCreate(&raw mut array, wanted.as_ptr().cast(), 1) }, array as u64)
}

fn free_mipmapped(array: u64) -> u32 {
    unsafe { entries::cuMipmappedArrayDestroy(array as *mut c_void) }
}

const WAYS: [Way; 18] = [
    Way { name: "cudaMalloc", allocate: malloc, free },
    Way { name: "cudaMalloc, managed", allocate: |bytes| tagged(bytes, malloc), free },
    Way { name: "cuMemAlloc", allocate: driver_malloc, free: driver_free },
    Way { name: "cuMemAlloc, managed", allocate: |bytes| tagged(bytes, driver_malloc), free: driver_free },
    Way { name: "cudaMallocPitch", allocate: pitched, free },
    Way { name: "cudaMallocPitch, managed", allocate: |bytes| tagged(bytes, pitched), free },
    Way { name: "cuMemAllocPitch", allocate: driver_pitched, free: driver_free },
    Way { name: "cuMemAllocPitch, managed", allocate: |bytes| tagged(bytes, driver_pitched), free: driver_free },
    Way { name: "cudaMalloc3D", allocate: three_dimensions, free },
    Way { name: "cudaMalloc3D, managed", allocate: |bytes| tagged(bytes, three_dimensions), free },
    Way { name: "cudaMallocManaged", allocate: unified, free },
    Way { name: "cuMemAllocManaged", allocate: driver_unified, free: driver_free },
    Way { name: "cuMemCreate", allocate: create, free: release },
    Way { name: "cuMemCreate, managed", allocate: |bytes| tagged(bytes, create), free: release },
    Way { name: "cuArrayCreate", allocate: array, free: free_array },
    Way { name: "cuArray3DCreate", allocate: array_3d, free: free_array },
    Way { name: "cuMipmappedArrayCreate", allocate: mipmapped, free: free_mipmapped },
    Way { name: "freed through the other door", allocate: malloc, free: driver_free },
];

#[test]
fn every_way_to_allocate_counts_until_it_is_freed() {
    let gpu = take();
    let before = gpu.used(0);
    for Way { name, allocate, free } in WAYS {
        let made: Vec<_> = (0..LIMIT / PIECE).map(|_| allocate(PIECE).unwrap()).collect();
        assert_eq!((counted(0), shown()), (LIMIT, (0, LIMIT)), "{name}");
        for Way { name: other, allocate, .. } in WAYS {
            assert_eq!(allocate(PIECE), Err(OUT_OF_MEMORY), "{other} after {name}");
        }
        assert!(gpu.used(0) <= before + LIMIT as u64, "{name}");
        assert_eq!(free(made[0]), SUCCESS, "{name}");
        assert_eq!(shown(), (PIECE, LIMIT), "{name}");
        let again = allocate(PIECE).unwrap();
        assert!(made[1..].iter().chain([&again]).all(|one| free(*one) == SUCCESS), "{name}");
        assert_eq!((counted(0), gpu.used(0)), (0, before), "{name}");
        assert_ne!(free(again), SUCCESS, "{name}: twice");
        assert_eq!(counted(0), 0, "{name}");
    }
}

/// The page of a request that the limit refuses: it is not the GPU that has too little, and what others have is no way out.
#[test]
fn a_refusal_by_the_limit_is_reported_as_such() {
    let gpu = take();
    log::set_max_level(log::LevelFilter::Warn);
    let held = malloc(LIMIT - PIECE).unwrap();
    for (tag, allocate) in [("unmanaged", malloc as fn(_) -> _), ("managed", |bytes| tagged(bytes, malloc))] {
        let before = warnings::told(|_| true).len();
        assert_eq!(allocate(2 * PIECE), Err(OUT_OF_MEMORY));
        out_of_memory::settle();
        let page = warnings::told(|_| true)[before..].join("\n");
        assert!(DEVICE_BYTES - gpu.used(0) as usize > 2 * PIECE, "the GPU has more");
        for part in [
            "; this process's limit of 128.00 MiB refuses it: 96.00 MiB is taken\n",
            "refused by the limit of 128.00 MiB, not by the GPU; 96.00 MiB of it is taken, 0 B by the context",
            "or start it with a higher limit (--limit, VRAMCTL_LIMIT)",
        ] {
            assert_eq!(page.matches(part).count(), 1, "{tag}: {part}\n{page}");
        }
        assert!(!page.contains("vramctl pause") && !page.contains("Nothing can be paused"), "{tag}: that makes no room\n{page}");
    }
    assert_eq!(free(held), SUCCESS);
}

/// Those that CUDA packs into pages: also if a library is asked for them that the hooks otherwise pass by.
#[test]
fn small_requests_count() {
    const SMALL: usize = 64 << 10;
    let _gpu = take();
    for (allocate, free) in [(malloc as fn(_) -> _, free as fn(_) -> _), (driver_malloc, driver_free)] {
        let large = allocate(LIMIT - PIECE).unwrap();
        let small: Vec<_> = (0..PIECE / SMALL).map(|_| allocate(SMALL).unwrap()).collect();
        assert_eq!((allocate(1), counted(0)), (Err(OUT_OF_MEMORY), LIMIT));
        assert_eq!(free(small[0]), SUCCESS);
        let tiny: Vec<_> = (0..SMALL / 512).map(|_| allocate(1).unwrap()).collect();
        assert_eq!(allocate(1), Err(OUT_OF_MEMORY), "each takes a unit of the driver's");
        assert!(small[1..].iter().chain(&tiny).chain([&large]).all(|one| free(*one) == SUCCESS));
        assert_eq!(counted(0), 0);
    }
    let mut pointer = ptr::without_provenance_mut(7);
    let full = malloc(LIMIT).unwrap();
    assert_eq!(unsafe { hooks::cudaMalloc(&raw mut pointer, SMALL) }, OUT_OF_MEMORY);
    assert!(pointer.is_null(), "as the runtime leaves it");
    assert_eq!((common::last_error(), free(full)), (OUT_OF_MEMORY, SUCCESS));
}

#[test]
fn what_cannot_be_allocated_does_not_count() {
    let gpu = take();
    for Way { name, allocate, .. } in WAYS {
        for function in [
            "cuMemAlloc_v2",
            "cuMemAllocPitch_v2",
            "cuMemCreate",
            "cuMemAllocManaged",
            "cuArrayCreate_v2",
            "cuArray3DCreate_v2",
            "cuMipmappedArrayCreate",
        ] {
            gpu.fail(function, 1, OUT_OF_MEMORY, 9);
        }
        assert_eq!(allocate(PIECE), Err(OUT_OF_MEMORY), "{name}");
        gpu.clear_faults();
        assert_eq!((allocate(LIMIT + PIECE), counted(0)), (Err(OUT_OF_MEMORY), 0), "{name}: more than the limit");
    }
    assert_eq!(unsafe { entries::cuMemAllocManaged(ptr::null_mut(), PIECE, 1) }, INVALID_VALUE);
    assert_eq!(unsafe { entries::cuArrayCreate_v2(ptr::null_mut(), ptr::null()) }, INVALID_VALUE);
    assert_eq!((malloc(0).map(free), counted(0)), (Ok(SUCCESS), 0));
}

/// In stream order from the default pool: managed, or CUDA's own.
#[test]
fn a_pool_counts_with_what_it_keeps() {
    let _gpu = take();
    let stream = Stream::create();
    let from_pool = |bytes| {
        let mut pointer = ptr::null_mut();
        answer(unsafe { hooks::cudaMallocAsync(&raw mut pointer, bytes, stream.handle()) }, pointer as u64)
    };
    let free_async = |address: u64| unsafe { hooks::cudaFreeAsync(address as *mut c_void, stream.handle()) };
    for managed in [true, false] {
        Memory::get().set_process_tag(managed.then_some("pool")).unwrap();
        let mut made: Vec<_> = (0..LIMIT / PIECE).map(|_| from_pool(PIECE).unwrap()).collect();
        assert_eq!((from_pool(PIECE), malloc(PIECE), counted(0)), (Err(OUT_OF_MEMORY), Err(OUT_OF_MEMORY), LIMIT), "{managed}");
        assert_eq!(free_async(made.pop().unwrap()), SUCCESS);
        assert_eq!(counted(0), LIMIT, "{managed}: the pool has it still");
        made.push(from_pool(PIECE).expect("and serves the next request with it"));
        assert_eq!((from_pool(PIECE), counted(0)), (Err(OUT_OF_MEMORY), LIMIT), "{managed}");
        assert!(made.iter().all(|one| free_async(*one) == SUCCESS));
        assert_eq!(stream.synchronize(), SUCCESS);
        assert_eq!(shown(), (LIMIT, LIMIT), "{managed}: and has given all back");
        let all = malloc(LIMIT).expect("which is seen without a question, too");
        assert_eq!((free(all), counted(0)), (SUCCESS, 0), "{managed}");
    }
}

/// What CUDA refuses whatever the limit is, it refuses itself: a program tries what it can capture.
#[test]
fn a_capture_forbids_an_allocation_before_the_limit_does() {
    let _gpu = take();
    let (stream, held) = (Stream::create(), malloc(LIMIT).unwrap());
    for allocate in [malloc as fn(_) -> _, driver_malloc] {
        stream.begin_capture(0);
        assert_eq!(allocate(64 << 10), Err(STREAM_CAPTURE_UNSUPPORTED));
        assert!(stream.end_capture().is_err(), "and the call has ended the capture");
    }
    stream.begin_capture(0);
    assert_eq!(create(PIECE), Err(OUT_OF_MEMORY));
    assert!(stream.end_capture().is_ok(), "physical memory is made in a capture, too");
    assert_eq!((free(held), counted(0)), (SUCCESS, 0));
}

/// A pool of the program's own. What other processes or the host have does not count.
#[test]
fn a_pool_of_the_programs_own_counts_on_its_device() {
    let _gpu = take();
    let stream = Stream::create();
    // `CUmemPoolProps` of the second device.
    let (mut pool, wanted) = (ptr::null_mut::<c_void>(), [1_u32, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(unsafe { entries::cuMemPoolCreate(&raw mut pool, wanted.as_ptr().cast()) }, SUCCESS);
    let from_pool = |bytes| {
        let mut address = 0;
        answer(unsafe { entries::cuMemAllocFromPoolAsync(&raw mut address, bytes, pool, stream.handle()) }, address)
    };
    let made: Vec<_> = (0..LIMIT / PIECE).map(|_| from_pool(PIECE).unwrap()).collect();
    assert_eq!((from_pool(PIECE), counted(1), counted(0)), (Err(OUT_OF_MEMORY), LIMIT, 0));
    assert!(made.iter().all(|one| unsafe { entries::cuMemFreeAsync(*one, stream.handle()) } == SUCCESS));
    assert_eq!((stream.synchronize(), unsafe { entries::cuMemPoolDestroy(pool) }), (SUCCESS, SUCCESS));
    assert_eq!(counted(1), 0);
    assert_ne!(pool, default_pool());
}

#[test]
fn each_device_has_the_limit_of_its_own() {
    let _gpu = take();
    let first = malloc(LIMIT).unwrap();
    let second = create_on(1, LIMIT).unwrap();
    assert!(!is_ours(second));
    assert_eq!((malloc(PIECE), create_on(1, PIECE)), (Err(OUT_OF_MEMORY), Err(OUT_OF_MEMORY)));
    assert_eq!((free(first), counted(0), counted(1)), (SUCCESS, 0, LIMIT));
    set_device(1);
    assert_eq!(shown(), (0, LIMIT));
    set_device(0);
    assert_eq!((shown(), release(second), counted(1)), ((LIMIT, LIMIT), SUCCESS, 0));
}

/// The memory of others counts for what the program is shown, not against its limit.
#[test]
fn the_program_is_shown_what_it_can_get() {
    let gpu = take();
    let others = DEVICE_BYTES - PIECE - gpu.used(0) as usize;
    assert_eq!(shown(), (LIMIT, LIMIT));
    gpu.occupy(0, others);
    assert_eq!(shown(), (PIECE, LIMIT));
    let made = malloc_tagged("shown", None, PIECE / 2).unwrap();
    assert_eq!(shown(), (PIECE / 2, LIMIT));
    gpu.occupy(0, 0);
    assert_eq!(shown(), (LIMIT - PIECE / 2, LIMIT));
    pause(&["shown"]).unwrap();
    assert_eq!(shown(), (LIMIT - PIECE / 2, LIMIT), "it needs the room when it is back");
    assert_eq!((malloc(LIMIT), counted(0)), (Err(OUT_OF_MEMORY), PIECE / 2));
    gpu.occupy(0, others);
    assert_eq!(shown(), (PIECE / 2, LIMIT), "also of what the GPU has free");
    gpu.occupy(0, 0);
    let rest = malloc(LIMIT - PIECE / 2).unwrap();
    resume(&["shown"]).expect("there is room for it within the limit");
    assert_eq!((free(made), free(rest), counted(0)), (SUCCESS, SUCCESS, 0));
    let mut total = 0;
    assert_eq!(unsafe { entries::cuDeviceTotalMem_v2(&raw mut total, 1) }, SUCCESS);
    assert_eq!(total, LIMIT);
}

/// Memory that is freed while it is paused, and memory whose context ends: destroyed, or reset where the library does not see it.
#[test]
fn what_has_ended_no_longer_counts() {
    let _gpu = take();
    let paused = malloc_tagged("ends", None, PIECE).unwrap();
    pause(&["ends"]).unwrap();
    assert_eq!((free(paused), counted(0)), (SUCCESS, 0));
    for allocate in [malloc, |bytes| tagged(bytes, malloc), array, unified] {
        let context = OwnContext::create(0);
        allocate(LIMIT).unwrap();
        drop(context);
        let again = allocate(LIMIT).expect("the context has ended, and its memory");
        common::reset_unseen(0);
        common::use_again(0);
        let _ = again;
        let last = malloc(LIMIT).expect("its context has ended unseen");
        assert_eq!(free(last), SUCCESS);
    }
    assert_eq!((shown(), counted(0)), ((LIMIT, LIMIT), 0));
}

/// Threads that race for the last bytes, in all ways at once.
#[test]
fn threads_never_exceed_it_together() {
    let gpu = take();
    let (before, is_over) = (gpu.used(0), AtomicBool::new(false));
    let refused: usize = thread::scope(|scope| {
        let _over = common::SetOnDrop(&is_over);
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                assert!(counted(0) <= LIMIT);
                assert!(gpu.used(0) <= before + LIMIT as u64);
            }
        });
        let work = |seed: usize| {
            let (mut held, mut refused) = (Vec::new(), 0);
            for round in 0..200 {
                let Way { allocate, free, .. } = &WAYS[(seed * 7 + round) % WAYS.len()];
                match allocate(PIECE / 2) {
                    Ok(made) => held.push((made, *free)),
                    Err(code) => {
                        assert_eq!(code, OUT_OF_MEMORY);
                        refused += 1;
                        held.drain(..).for_each(|(made, free)| assert_eq!(free(made), SUCCESS));
                    }
                }
            }
            held.drain(..).for_each(|(made, free)| assert_eq!(free(made), SUCCESS));
            refused
        };
        let threads: Vec<_> = (0..6)
            .map(|seed| {
                scope.spawn(move || {
                    set_device(0);
                    work(seed)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert!(refused > 0, "they have met the limit");
    assert_eq!((counted(0), gpu.used(0)), (0, before));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: common::cases(24), failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the program does, and in whatever order: what counts is what it has.
    #[test]
    fn what_counts_is_what_the_program_has(steps in prop::collection::vec((0..WAYS.len(), 1..6usize, any::<u8>()), 1..60)) {
        let _gpu = take();
        let mut held = Vec::new();
        for (way, pieces, choice) in steps {
            let has = held.iter().map(|(_, bytes, _): &(_, usize, Free)| bytes).sum::<usize>();
            prop_assert_eq!(counted(0), has);
            let bytes = pieces * PIECE / 4;
            if choice % 3 == 0 && !held.is_empty() {
                let (made, _, free) = held.swap_remove(choice as usize % held.len());
                prop_assert_eq!(free(made), SUCCESS);
            } else if choice % 7 == 0 {
                pause(&[]).and_then(|_| resume(&[])).ok();
            } else {
                let made = (WAYS[way].allocate)(bytes);
                prop_assert_eq!(made.is_ok(), has + bytes <= LIMIT, "{}", WAYS[way].name);
                held.extend(made.into_iter().map(|made| (made, bytes, WAYS[way].free)));
            }
        }
        prop_assert!(held.into_iter().all(|(made, _, free)| free(made) == SUCCESS));
    }
}
