//! Memory allocated and freed in the order of a stream, as CUDA's own pools do it: reused at once in the same stream, seen as free after a
//! synchronisation, and no caller waits for somebody else's stream.

use crate::common::{self, Gate, Gpu, MIB, Stream, free, malloc, malloc_tagged, pause, read, resume, set_device, synchronize};
use std::ffi::{CString, c_void};
use std::sync::mpsc;
use std::time::Duration;
use std::{mem, ptr, thread};
use vramctl_core::memory::{Memory, region};
use vramctl_driver::StreamHandle;
use vramctl_intercept::entries;

/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: StreamHandle = unsafe { mem::transmute::<usize, StreamHandle>(2) };
const ALL: usize = common::DEVICE_BYTES;

/// Memory under a tag, in the order of a stream.
fn allocate_as(tag: &str, bytes: usize, stream: StreamHandle) -> Result<u64, u32> {
    region::begin(Some(tag), None).unwrap();
    let mut address = 0;
    let answer = unsafe { entries::cuMemAllocAsync(&raw mut address, bytes, stream) };
    region::end().unwrap();
    if answer == 0 { Ok(address) } else { Err(answer) }
}

fn allocate(bytes: usize, stream: StreamHandle) -> Result<u64, u32> {
    allocate_as("t", bytes, stream)
}

fn release(address: u64, stream: StreamHandle) {
    assert_eq!(unsafe { entries::cuMemFreeAsync(address, stream) }, 0);
}

/// Does what must not wait for the gate. A call that waits fails the test instead of hanging it.
#[track_caller]
fn without_waiting(gate: &Gate, work: impl FnOnce()) {
    let is_free = thread::scope(|scope| {
        let (done, is_done) = mpsc::channel();
        let late = scope.spawn(move || {
            let in_time = is_done.recv_timeout(Duration::from_secs(60)).is_ok();
            gate.open();
            in_time
        });
        work();
        let _ = done.send(());
        late.join().unwrap()
    });
    assert!(is_free, "a call waited");
}

/// The simulated driver's function of this name.
macro_rules! driver {
    ($name:ident($($argument:expr),*)) => {{
        let library = CString::new(common::simulated_libraries().join("libcuda.so.1").to_str().unwrap()).unwrap();
        let name = CString::new(stringify!($name)).unwrap();
        unsafe {
            let found = libc::dlsym(libc::dlopen(library.as_ptr(), libc::RTLD_NOW), name.as_ptr());
            assert!(!found.is_null());
            mem::transmute::<*mut c_void, unsafe extern "C" fn($(driver!(@any $argument)),*) -> u32>(found)($($argument),*)
        }
    }};
    (@any $argument:expr) => { _ };
}

/// A stream that waits for a gate.
fn blocked() -> (Gate, Stream) {
    let (gate, stream) = (Gate::new(), Stream::create());
    stream.wait_for(&gate);
    (gate, stream)
}

/// Sets the release threshold of device 0's default pool.
fn keep_up_to(bytes: u64) {
    assert_eq!(driver!(cuMemPoolSetAttribute(common::default_pool(), 4_u32, &raw const bytes)), 0);
}

/// The third round would not fit beside the first two.
#[test]
fn a_loop_in_one_stream_needs_no_synchronisation() {
    let gpu = Gpu::take();
    let before = gpu.used(0);
    let (gate, stream) = blocked();
    let kept = malloc_tagged("t", None, 2 * MIB).unwrap();
    without_waiting(&gate, || {
        for round in 0..10 {
            // The sizes differ a little, the tags too.
            let bytes = ALL * 2 / 5 - round % 3 * MIB;
            let address = allocate_as(["t", "u"][round % 2], bytes, stream.handle()).expect("what was freed before");
            assert_eq!((stream.fill(address, round as u8, bytes), stream.copy(kept, address, 2 * MIB)), (0, 0));
            assert_eq!(&*Memory::get().registry.find(address).unwrap().tag, ["t", "u"][round % 2]);
            release(address, stream.handle());
        }
    });
    assert_eq!(stream.synchronize(), 0, "nothing was taken from under the work");
    assert!(read(kept, 2 * MIB).unwrap().iter().all(|byte| *byte == 9), "in order");
    assert_eq!(free(kept), 0);
    drop((stream, gate));
    assert_eq!(gpu.used(0), before);
}

/// Each thread has its own stream behind the same handle.
#[test]
fn a_blocked_per_thread_stream_does_not_hide_the_frees_of_other_threads() {
    let gpu = Gpu::take();
    let gate = Gate::new();
    let (ready, is_ready) = mpsc::channel();
    let (end, ends) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let gate = &gate;
        scope.spawn(move || {
            set_device(0);
            let address = allocate(ALL / 5, PER_THREAD).unwrap();
            Stream(ptr::without_provenance_mut(2)).wait_for(gate);
            release(address, PER_THREAD);
            ready.send(()).unwrap();
            let _ = ends.recv();
        });
        is_ready.recv().unwrap();
        without_waiting(gate, || {
            let own = Stream(ptr::without_provenance_mut(2));
            for _ in 0..4 {
                // All that the other leaves, in pieces and as a whole: the pieces must have been released.
                let pieces = [(); 3].map(|()| allocate(ALL / 5, PER_THREAD).unwrap());
                for piece in pieces {
                    release(piece, PER_THREAD);
                }
                while driver!(cuStreamQuery(own.0)) != 0 {}
                let whole = allocate(ALL * 3 / 5, PER_THREAD).unwrap();
                assert_eq!(own.fill(whole, 1, ALL * 3 / 5), 0);
                release(whole, PER_THREAD);
                while driver!(cuStreamQuery(own.0)) != 0 {}
            }
            mem::forget(own);
        });
        gate.open();
        end.send(()).unwrap();
    });
    assert_eq!((synchronize(), gpu.live("handles")), (0, 0));
}

type Synchronise = fn(StreamHandle, *mut c_void) -> u32;

/// Programs size caches by what is free then.
#[test]
fn freed_memory_is_free_after_a_synchronisation() {
    let gpu = Gpu::take();
    let ways: [(&str, Synchronise); 6] = [
        ("cuStreamSynchronize", |stream, _| unsafe { entries::cuStreamSynchronize(stream) }),
        ("cuStreamSynchronize_ptsz", |stream, _| unsafe { entries::cuStreamSynchronize_ptsz(stream) }),
        ("cuCtxSynchronize", |_, _| unsafe { entries::cuCtxSynchronize() }),
        ("cuEventSynchronize", |_, event| unsafe { entries::cuEventSynchronize(event) }),
        ("cuMemGetInfo", |_, event| {
            assert_eq!(driver!(cuEventSynchronize(event)), 0);
            let (mut free, mut total) = (0, 0);
            assert_eq!(unsafe { entries::cuMemGetInfo_v2(&raw mut free, &raw mut total) }, 0);
            assert!(free > ALL - 64 * MIB, "{free} of {total}");
            0
        }),
        ("cudaFree", |_, event| {
            assert_eq!(driver!(cuEventSynchronize(event)), 0);
            free(malloc_tagged("t", None, 2 * MIB).unwrap())
        }),
    ];
    for from_pool in [true, false] {
        for (way, synchronise) in ways {
            let before = gpu.used(0);
            let (gate, stream) = blocked();
            let mut event = ptr::null_mut();
            assert_eq!(driver!(cuEventCreate(&raw mut event, 0_u32)), 0);
            let address = if from_pool { allocate(128 * MIB, stream.handle()) } else { malloc_tagged("t", None, 128 * MIB) }.unwrap();
            assert_eq!(stream.fill(address, 1, 128 * MIB), 0);
            release(address, stream.handle());
            assert_eq!(driver!(cuEventRecord(event, stream.0)), 0);
            assert!(gpu.used(0) >= before + (128 * MIB) as u64, "{way}: the stream still needs it");
            gate.open();
            assert_eq!(synchronise(stream.handle(), event), 0, "{way}");
            assert_eq!(gpu.used(0), before, "{way}");
            assert_eq!(driver!(cuEventDestroy_v2(event)), 0);
        }
    }
}

/// The backend of `PyTorch` for `cudaMallocAsync` lets the pool keep everything.
#[test]
fn as_much_as_the_pool_may_keep_is_kept_for_later() {
    let gpu = Gpu::take();
    let before = gpu.used(0);
    let (stream, other) = (Stream::create(), Stream::create());
    keep_up_to(u64::MAX);
    let first = allocate(64 * MIB, stream.handle()).unwrap();
    release(first, stream.handle());
    gpu.reset_counts();
    for _ in 0..3 {
        for stream in [&stream, &other] {
            assert_eq!(synchronize(), 0);
            assert_eq!(allocate(64 * MIB, stream.handle()), Ok(first), "the first stream is done with it");
            release(first, stream.handle());
        }
    }
    assert_eq!((gpu.calls("cuMemCreate"), gpu.calls("cuMemUnmap")), (0, 0));
    // What does not fit is not wasted, and what is kept is there for those who find nothing else.
    let small = allocate(2 * MIB, stream.handle()).unwrap();
    assert_ne!(small, first);
    release(small, stream.handle());
    assert_eq!(synchronize(), 0);
    let most = malloc(ALL - 48 * MIB).expect("what the pool has kept");
    assert_eq!(free(most), 0);
    release(allocate(64 * MIB, stream.handle()).unwrap(), stream.handle());
    assert_eq!(synchronize(), 0);
    let most = malloc_tagged("t", None, ALL - 48 * MIB).expect("what the pool has kept");
    assert_eq!(free(most), 0);

    // Above the threshold, by the program, and by a pause.
    for end in 0..3 {
        keep_up_to(u64::MAX);
        let both = [(); 2].map(|()| allocate(32 * MIB, stream.handle()).unwrap());
        for address in both {
            release(address, stream.handle());
        }
        assert_eq!((synchronize(), gpu.used(0) - before), (0, 64 << 20));
        match end {
            0 => {
                keep_up_to(40 << 20);
                assert_eq!((synchronize(), gpu.used(0) - before), (0, 32 << 20));
                keep_up_to(0);
                assert_eq!(synchronize(), 0);
            }
            1 => assert_eq!(unsafe { entries::cuMemPoolTrimTo(common::default_pool(), 0) }, 0),
            _ => {
                common::cycle(&[]);
            }
        }
        assert_eq!(gpu.used(0), before, "{end}");
    }
    keep_up_to(0);
}

/// As CUDA does: the other stream waits, not the caller.
#[test]
fn memory_that_another_stream_has_freed_is_taken_in_its_order_if_there_is_no_other() {
    let _gpu = Gpu::take();
    let (gate, stream) = blocked();
    let other = Stream::create();
    let kept = malloc_tagged("t", None, 4 * MIB).unwrap();
    let bytes = ALL * 3 / 5;
    let first = allocate(bytes, stream.handle()).unwrap();
    without_waiting(&gate, || {
        assert_eq!((stream.fill(first, 1, bytes), stream.copy(kept, first, 2 * MIB)), (0, 0));
        release(first, stream.handle());
        // There is memory that has not been used.
        let apart = allocate(ALL / 5, other.handle()).unwrap();
        assert!(apart != first && other.synchronize() == 0);
        let second = allocate(bytes, other.handle()).expect("what the first stream has freed");
        assert_eq!((other.fill(second, 2, bytes), other.copy(kept + 2 * MIB as u64, second, 2 * MIB)), (0, 0));
        release(second, other.handle());
        release(apart, other.handle());
    });
    assert_eq!((stream.synchronize(), other.synchronize()), (0, 0), "nothing was taken from under the work");
    assert!(read(kept, 2 * MIB).unwrap().iter().all(|byte| *byte == 1));
    assert!(read(kept + 2 * MIB as u64, 2 * MIB).unwrap().iter().all(|byte| *byte == 2));
}

/// A new stream may get the handle of a destroyed one, whose work goes on.
#[test]
fn a_new_stream_is_not_taken_for_a_destroyed_one() {
    let _gpu = Gpu::take();
    let (gate, stream) = blocked();
    let first = allocate(64 * MIB, stream.handle()).unwrap();
    assert_eq!(stream.fill(first, 1, 64 * MIB), 0);
    release(first, stream.handle());
    let handle = stream.0;
    drop(stream);
    let new = Stream::create();
    assert_eq!(new.0, handle);
    let second = allocate(64 * MIB, new.handle()).unwrap();
    assert_ne!(second, first, "the work of the destroyed stream still uses that");
    release(second, new.handle());
    gate.open();
    assert_eq!(synchronize(), 0);
}

/// A stream-ordered allocation that finds no memory waits for its own stream, and holds up nobody meanwhile.
#[test]
fn an_allocation_without_memory_waits_for_its_own_stream_alone() {
    let gpu = Gpu::take();
    let (gate, stream) = blocked();
    let (others_gate, other) = blocked();
    for (bytes, stream) in [(ALL / 4, &stream), (ALL / 4, &stream), (ALL / 5, &other)] {
        let address = allocate(bytes, stream.handle()).unwrap();
        assert_eq!(stream.fill(address, 1, bytes), 0);
        release(address, stream.handle());
    }
    gpu.reset_counts();
    thread::scope(|scope| {
        let handle = stream.handle();
        let waits = scope.spawn(move || {
            set_device(0);
            // More than any piece, and than what is free.
            allocate(ALL * 3 / 5, handle)
        });
        common::eventually("the allocation waits", || gpu.calls("cuEventSynchronize") > 0);
        // Nobody waits for that thread.
        without_waiting(&gate, || {
            malloc_tagged("t", None, 2 * MIB).unwrap();
            assert_eq!(Memory::get().status().tags.len(), 1);
            let _ = Memory::get().set_retain_in_resumes(Some("t"), None);
        });
        gate.open();
        release(waits.join().unwrap().expect("what its own stream has freed"), stream.handle());
    });
    others_gate.open();
    assert_eq!((stream.synchronize(), other.synchronize()), (0, 0), "nothing was taken from under the work");
    gpu.free_everything();
}

/// Who knows the physical memory must not find somebody else's contents in it.
#[test]
fn memory_that_others_know_is_not_handed_on() {
    let gpu = Gpu::take();
    let stream = Stream::create();
    let address = allocate(32 * MIB, stream.handle()).unwrap();
    assert!(Memory::get().ipc_handle(address).unwrap().is_ok());
    release(address, stream.handle());
    let other = allocate(32 * MIB, stream.handle()).unwrap();
    assert_ne!(other, address);
    // Paused memory is not there.
    pause(&[]).unwrap();
    release(other, stream.handle());
    let third = allocate(32 * MIB, stream.handle()).unwrap();
    assert_eq!(stream.fill(third, 3, 32 * MIB), 0);
    release(third, stream.handle());
    assert_eq!((synchronize(), gpu.live("handles")), (0, 0));
}

/// Each call of the driver costs the program time: these loops run as often as kernels are launched.
#[test]
fn a_steady_loop_makes_few_calls_of_the_driver() {
    let gpu = Gpu::take();
    let stream = Stream::create();
    let round = |tag| {
        let address = allocate_as(tag, 4 * MIB, stream.handle()).unwrap();
        assert_eq!(stream.fill(address, 1, 4 * MIB), 0);
        release(address, stream.handle());
    };
    (0..2).for_each(|_| round("t"));
    gpu.reset_counts();
    (0..10).for_each(|_| round("t"));
    let calls = ["cuMemCreate", "cuEventCreate", "cuCtxPushCurrent_v2", "cuEventRecord", "cuStreamGetId"].map(|call| gpu.calls(call));
    assert_eq!(calls, [0, 0, 0, 10, 20]);
    // Three of each round are of the program's own `cudaMemsetAsync`.
    assert!(common::calls("") <= 110, "{}", common::calls(""));
    round("another");
    assert_eq!((synchronize(), gpu.live("handles")), (0, 0));
}

/// Reserved and used bytes of the default pool, now and at most.
fn statistics() -> [u64; 4] {
    [5, 6, 7, 8].map(|attribute| {
        let mut value = 0_u64;
        assert_eq!(unsafe { entries::cuMemPoolGetAttribute(common::default_pool(), attribute, (&raw mut value).cast()) }, 0);
        value
    })
}

/// From now on, only what comes counts as the most.
fn reset_highest() {
    for attribute in [6, 8] {
        let mut reset = 0_u64;
        assert_eq!(unsafe { entries::cuMemPoolSetAttribute(common::default_pool(), attribute, (&raw mut reset).cast()) }, 0);
    }
}

/// To the program, nothing changes while its memory is paused. What ends otherwise than by a free in stream order counts no longer, either.
#[test]
fn statistics_of_the_pool_do_not_change_while_memory_is_paused() {
    const BYTES: u64 = 4 * MIB as u64;
    let _gpu = Gpu::take();
    reset_highest();
    let before = statistics();
    let stream = Stream::create();
    let address = allocate(4 * MIB, stream.handle()).unwrap();
    let used = statistics();
    assert_eq!(used, before.map(|bytes| bytes + BYTES));
    pause(&["t"]).unwrap();
    assert_eq!(statistics(), used);
    // A free that is paused, and one that is not.
    let other = allocate(4 * MIB, stream.handle()).unwrap();
    assert_eq!(free(address), 0);
    assert_eq!(statistics(), [used[0], used[1] + BYTES, used[2], used[3] + BYTES]);
    resume(&["t"]).unwrap();
    assert_eq!(free(other), 0);
    assert_eq!([statistics()[0], statistics()[2]], [before[0], before[2]]);
    // What the pool keeps for later is reserved and not used, and after a reset nothing counts that was before.
    keep_up_to(u64::MAX);
    release(allocate(4 * MIB, stream.handle()).unwrap(), stream.handle());
    assert_eq!(synchronize(), 0);
    reset_highest();
    assert_eq!(statistics(), [before[0] + BYTES, before[0] + BYTES, before[2], before[2]]);
    keep_up_to(0);
    assert_eq!(synchronize(), 0);
    assert_eq!(statistics()[0], before[0]);
}
