//! Streams, events, capture and graphs.

// Every call here is a foreign function, with pointers to the test's own variables.
#![allow(clippy::undocumented_unsafe_blocks)]

#[macro_use]
mod common;
use common::{Gate, Gpu, LONG_MS, MIB2, isolated, on_gpu};
use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const NON_BLOCKING: u32 = 1;

#[test]
fn work_is_asynchronous_and_in_order() {
    on_gpu("work_is_asynchronous_and_in_order", &[("SIMGPU_OP_DELAY_MS", "30")], |gpu| {
        let (stream, pointer) = (gpu.stream(NON_BLOCKING), gpu.alloc(4096));
        let mut pinned = 0;
        ok!(gpu.cuMemHostAlloc(&raw mut pinned, 4096, 0));
        let queue = || {
            for value in 1..=3 {
                ok!(gpu.cuMemsetD8Async(pointer, value, 4096, stream));
            }
            ok!(gpu.cuMemcpyDtoHAsync_v2(pinned, pointer, 4096, stream));
        };
        let start = Instant::now();
        queue();
        ok!(gpu.cuStreamSynchronize(stream));
        assert!(start.elapsed() >= Duration::from_millis(120));
        ok!(gpu.cuStreamQuery(stream));
        assert_eq!(unsafe { *(pinned as *const u8) }, 3);
        gpu.slow_down(LONG_MS);
        queue();
        fails!(600, gpu.cuStreamQuery(stream));
        gpu.slow_down(0);
        ok!(gpu.cuStreamSynchronize(stream));
        ok!(gpu.cuStreamQuery(stream));
    });
}

#[test]
fn copies_between_host_and_device_share_a_link() {
    isolated("copies_between_host_and_device_share_a_link", &[("SIMGPU_LINK", "10M")], || {
        const BYTES: usize = 512 << 10; // 50 ms
        let gpu = Gpu::start();
        let pointer = gpu.alloc(2 * BYTES);
        let mut pinned = 0;
        ok!(gpu.cuMemHostAlloc(&raw mut pinned, 2 * BYTES, 0));
        let start = Instant::now();
        // Two streams, one link.
        for half in [0, BYTES as u64] {
            unsafe { std::ptr::write_bytes((pinned + half) as *mut u8, 7, BYTES) };
            ok!(gpu.cuMemcpyHtoDAsync_v2(pointer + half, pinned + half, BYTES, gpu.stream(NON_BLOCKING)));
        }
        ok!(gpu.cuCtxSynchronize());
        assert!(start.elapsed() >= Duration::from_millis(95));
        let start = Instant::now();
        ok!(gpu.cuMemcpyDtoD_v2(pointer, pointer + BYTES as u64, BYTES));
        let mut back = vec![0u8; BYTES];
        ok!(gpu.cuMemcpyDtoH_v2(back.as_mut_ptr() as u64, pointer, BYTES));
        assert!(start.elapsed() >= Duration::from_millis(47) && back.iter().all(|byte| *byte == 7));
    });
}

#[test]
fn pageable_memory_is_no_longer_used_when_the_call_returns() {
    on_gpu("pageable_memory_is_no_longer_used_when_the_call_returns", &[("SIMGPU_OP_DELAY_MS", "20")], |gpu| {
        let (stream, pointer) = (gpu.stream(NON_BLOCKING), gpu.alloc(4096));
        let mut buffer = [7u8; 4096];
        ok!(gpu.cuMemcpyHtoDAsync_v2(pointer, buffer.as_ptr() as u64, 4096, stream));
        buffer.fill(8);
        let mut back = [0u8; 4096];
        ok!(gpu.cuMemcpyDtoHAsync_v2(back.as_mut_ptr() as u64, pointer, 4096, stream));
        assert_eq!(back, [7; 4096]);
    });
}

#[test]
fn the_legacy_stream_waits_for_blocking_streams() {
    on_gpu("the_legacy_stream_waits_for_blocking_streams", &[("SIMGPU_OP_DELAY_MS", "40")], |gpu| {
        let pointer = gpu.alloc(4096);
        let (blocking, other, gate) = (gpu.stream(0), gpu.stream(NON_BLOCKING), Gate::new(&gpu));
        ok!(gpu.cuMemsetD8Async(pointer, 5, 4096, blocking));
        assert_eq!(gpu.download(pointer, 1), [5]);
        ok!(gpu.cuStreamQuery(blocking));
        ok!(gpu.cuStreamWaitValue32_v2(other, gate.0, 1, 0));
        let _ = gpu.download(pointer, 1);
        fails!(600, gpu.cuStreamQuery(other));
        gate.set(1);
        ok!(gpu.cuCtxSynchronize());
        ok!(gpu.cuStreamQuery(other));
        // And a blocking stream waits for the legacy stream.
        ok!(gpu.cuMemsetD8Async(pointer, 9, 4096, 0));
        ok!(gpu.cuMemsetD8Async(pointer, 10, 4096, blocking));
        ok!(gpu.cuStreamSynchronize(blocking));
        assert_eq!(gpu.download(pointer, 1), [10]);
    });
}

#[test]
fn events_order_streams() {
    on_gpu("events_order_streams", &[], |gpu| {
        let pointer = gpu.alloc(4096);
        let (first, second) = (gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING));
        let (mut start, mut end) = (0, 0);
        ok!(gpu.cuEventCreate(&raw mut start, 0));
        ok!(gpu.cuEventCreate(&raw mut end, 0));
        ok!(gpu.cuEventQuery(end));
        gpu.slow_down(LONG_MS);
        let queued = Instant::now();
        ok!(gpu.cuEventRecord(start, first));
        ok!(gpu.cuMemsetD8Async(pointer, 1, 4096, first));
        ok!(gpu.cuEventRecord(end, first));
        fails!(600, gpu.cuEventQuery(end));
        ok!(gpu.cuStreamWaitEvent(second, end, 0));
        ok!(gpu.cuMemsetD8Async(pointer, 2, 4096, second));
        // A destroyed stream still completes its work.
        ok!(gpu.cuStreamDestroy_v2(second));
        fails!(400, gpu.cuStreamSynchronize(second));
        gpu.slow_down(30);
        ok!(gpu.cuCtxSynchronize());
        assert_eq!(gpu.download(pointer, 1), [2]);
        let (mut milliseconds, longest) = (0.0, queued.elapsed().as_secs_f32() * 1e3 + 1.0);
        ok!(gpu.cuEventElapsedTime(&raw mut milliseconds, start, end));
        assert!((30.0..=longest).contains(&milliseconds), "{milliseconds}");
        ok!(gpu.cuEventDestroy_v2(start));
        ok!(gpu.cuEventDestroy_v2(end));
        assert_eq!((gpu.live("events"), gpu.live("streams")), (0, 1));
    });
}

static ANSWER: AtomicU32 = AtomicU32::new(u32::MAX);

unsafe extern "C" fn calls_cuda(data: *mut c_void) {
    let gpu = unsafe { &*data.cast::<Gpu>() };
    ANSWER.store(unsafe { (gpu.cuCtxSynchronize)() }, Ordering::SeqCst);
}

#[test]
fn host_functions_may_not_call_cuda() {
    isolated("host_functions_may_not_call_cuda", &[], || {
        let mut gpu = Gpu::start();
        let stream = gpu.stream(0);
        let data = (&raw mut gpu).cast();
        ok!(gpu.cuLaunchHostFunc(stream, calls_cuda, data));
        ok!(gpu.cuStreamSynchronize(stream));
        assert_eq!(ANSWER.load(Ordering::SeqCst), 800);
    });
}

unsafe extern "C" fn notes_its_arguments(stream: u64, code: u32, data: *mut c_void) {
    unsafe { &*data.cast::<Mutex<Vec<(u64, u32)>>>() }.lock().unwrap().push((stream, code));
}

/// Callbacks are called in stream order, also after an error, which they are told.
#[test]
fn callbacks_are_called_even_after_an_error() {
    on_gpu("callbacks_are_called_even_after_an_error", &[], |gpu| {
        let stream = gpu.stream(NON_BLOCKING);
        let mut seen = Mutex::new(Vec::<(u64, u32)>::new());
        let data = (&raw mut seen).cast();
        fails!(1, gpu.cuStreamAddCallback(stream, None, data, 0));
        fails!(1, gpu.cuStreamAddCallback(stream, Some(notes_its_arguments), data, 1));
        ok!(gpu.cuStreamAddCallback(stream, Some(notes_its_arguments), data, 0));
        ok!(gpu.cuStreamSynchronize(stream));
        assert_eq!(*seen.lock().unwrap(), [(stream, 0)]);

        ok!(gpu.cuStreamBeginCapture_v2(stream, 2));
        fails!(900, gpu.cuStreamAddCallback(stream, Some(notes_its_arguments), data, 0));
        let mut graph = 0;
        fails!(901, gpu.cuStreamEndCapture(stream, &raw mut graph));

        let pointer = gpu.map_new(MIB2);
        gpu.slow_down(LONG_MS);
        ok!(gpu.cuMemsetD8Async(pointer, 1, 4096, stream));
        ok!(gpu.cuStreamAddCallback(stream, Some(notes_its_arguments), data, 0));
        ok!(gpu.cuMemUnmap(pointer, MIB2));
        gpu.slow_down(0);
        fails!(700, gpu.cuStreamSynchronize(stream));
        assert_eq!(*seen.lock().unwrap(), [(stream, 0), (stream, 700)]);
    });
}

#[test]
fn freeing_in_a_stream_is_in_order() {
    on_gpu("freeing_in_a_stream_is_in_order", &[], |gpu| {
        gpu.slow_down(LONG_MS);
        let stream = gpu.stream(NON_BLOCKING);
        let mut pointer = 0;
        ok!(gpu.cuMemAllocAsync(&raw mut pointer, 4096, stream));
        ok!(gpu.cuMemsetD8Async(pointer, 1, 4096, stream));
        ok!(gpu.cuMemFreeAsync(pointer, stream));
        assert_eq!(gpu.used(), 4096);
        gpu.slow_down(0);
        ok!(gpu.cuStreamSynchronize(stream));
        assert_eq!(gpu.used(), 0);
    });
}

#[test]
fn a_graph_replays_what_was_captured() {
    on_gpu("a_graph_replays_what_was_captured", &[], |gpu| {
        let (stream, fork) = (gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING));
        let (from, to) = (gpu.map_new(MIB2), gpu.map_new(MIB2));
        let mut pinned = 0;
        ok!(gpu.cuMemHostAlloc(&raw mut pinned, 4096, 0));
        let (mut out, mut back) = (0, 0);
        ok!(gpu.cuEventCreate(&raw mut out, 0));
        ok!(gpu.cuEventCreate(&raw mut back, 0));

        ok!(gpu.cuStreamBeginCapture_v2(stream, 1));
        let mut status = 9;
        ok!(gpu.cuStreamIsCapturing(stream, &raw mut status));
        assert_eq!(status, 1);
        ok!(gpu.cuMemcpyHtoDAsync_v2(from, pinned, 4096, stream));
        ok!(gpu.cuEventRecord(out, stream));
        ok!(gpu.cuStreamWaitEvent(fork, out, 0));
        ok!(gpu.cuMemsetD8Async(to, 9, 4096, fork));
        ok!(gpu.cuEventRecord(back, fork));
        ok!(gpu.cuStreamWaitEvent(stream, back, 0));
        ok!(gpu.cuMemcpyDtoHAsync_v2(pinned + 2048, to, 1, stream));
        let mut graph = 0;
        ok!(gpu.cuStreamEndCapture(stream, &raw mut graph));
        let mut nodes = 0;
        ok!(gpu.cuGraphGetNodes(graph, std::ptr::null_mut(), &raw mut nodes));
        assert_eq!(nodes, 3);
        // Nothing has run so far.
        assert_eq!(gpu.download(to, 1), [0]);

        let mut executable = 0;
        ok!(gpu.cuGraphInstantiateWithFlags(&raw mut executable, graph, 0));
        // Instantiated again, it is uploaded with the flag, in a stream that must exist.
        let (mut uploaded, mut params) = (0, [2, stream, 0, 9]);
        ok!(gpu.cuGraphInstantiateWithParams(&raw mut uploaded, graph, &raw mut params));
        assert_eq!(params, [2, stream, 0, 0]);
        ok!(gpu.cuGraphExecDestroy(uploaded));
        params[1] = 77;
        fails!(400, gpu.cuGraphInstantiateWithParams(&raw mut uploaded, graph, &raw mut params));
        assert_eq!(params[3], 1);
        ok!(gpu.cuGraphDestroy(graph));
        let word = pinned as *mut u8;
        for value in [3u8, 4] {
            unsafe { word.write(value) };
            ok!(gpu.cuGraphLaunch(executable, stream));
            ok!(gpu.cuStreamSynchronize(stream));
            assert_eq!(gpu.download(from, 1), [value]);
        }
        assert_eq!(unsafe { *word.add(2048) }, 9);
        // Other memory at the same addresses works; no memory is a fault.
        ok!(gpu.cuMemUnmap(from, MIB2));
        gpu.put_new(from, MIB2);
        ok!(gpu.cuGraphLaunch(executable, stream));
        ok!(gpu.cuStreamSynchronize(stream));
        assert_eq!(gpu.download(from, 1), [4]);
        ok!(gpu.cuMemUnmap(from, MIB2));
        ok!(gpu.cuGraphLaunch(executable, stream));
        fails!(719, gpu.cuStreamSynchronize(stream));
        ok!(gpu.cuGraphExecDestroy(executable));
    });
}

#[test]
fn a_capture_forbids_unsafe_calls() {
    on_gpu("a_capture_forbids_unsafe_calls", &[], |gpu| {
        let stream = gpu.stream(NON_BLOCKING);
        let context = gpu.use_device(0);
        let mut graph = 9;
        let begin = |mode| ok!(gpu.cuStreamBeginCapture_v2(stream, mode));

        fails!(900, gpu.cuStreamBeginCapture_v2(0, 0));
        fails!(401, gpu.cuStreamEndCapture(stream, &raw mut graph));
        begin(0);
        fails!(900, gpu.cuCtxSynchronize());
        fails!(901, gpu.cuStreamEndCapture(stream, &raw mut graph));
        assert_eq!(graph, 0);

        begin(2);
        fails!(900, gpu.cuStreamSynchronize(stream));
        fails!(901, gpu.cuMemsetD8Async(gpu.reserve(MIB2), 0, 1, stream));
        fails!(901, gpu.cuStreamEndCapture(stream, &raw mut graph));

        // A potentially unsafe call, on this and on another thread, in each mode.
        let allocate = move || {
            let mut pointer = 0;
            unsafe {
                (gpu.cuCtxSetCurrent)(context);
                (gpu.cuMemAlloc_v2)(&raw mut pointer, 512)
            }
        };
        for (mode, here, there) in [(0, 900, 900), (1, 900, 0), (2, 0, 0)] {
            begin(mode);
            assert_eq!(allocate(), here);
            let ended = if here == 0 { 0 } else { 901 };
            fails!(ended, gpu.cuStreamEndCapture(stream, &raw mut graph));
            begin(mode);
            assert_eq!(std::thread::spawn(allocate).join().unwrap(), there);
            let ended = if there == 0 { 0 } else { 901 };
            fails!(ended, gpu.cuStreamEndCapture(stream, &raw mut graph));
        }
        // A thread in relaxed mode.
        begin(0);
        let mut mode = 2;
        ok!(gpu.cuThreadExchangeStreamCaptureMode(&raw mut mode));
        assert_eq!((mode, allocate()), (0, 0));
        ok!(gpu.cuThreadExchangeStreamCaptureMode(&raw mut mode));
        assert_eq!(mode, 2);
        // Virtual memory calls are not unsafe.
        gpu.map_new(MIB2);
        ok!(gpu.cuStreamEndCapture(stream, &raw mut graph));

        // The legacy stream would have to wait for a blocking stream that is being captured.
        let blocking = gpu.stream(0);
        ok!(gpu.cuStreamBeginCapture_v2(blocking, 2));
        let pointer = gpu.map_new(MIB2);
        fails!(906, gpu.cuMemsetD8Async(pointer, 0, 1, 0));
        fails!(901, gpu.cuStreamEndCapture(blocking, &raw mut graph));

        // The origin must wait for a stream that joined.
        let mut event = 0;
        ok!(gpu.cuEventCreate(&raw mut event, 2));
        begin(2);
        ok!(gpu.cuEventRecord(event, stream));
        ok!(gpu.cuStreamWaitEvent(blocking, event, 0));
        fails!(907, gpu.cuEventQuery(event));
        ok!(gpu.cuMemsetD8Async(pointer, 0, 1, blocking));
        fails!(904, gpu.cuStreamEndCapture(stream, &raw mut graph));
        ok!(gpu.cuCtxSynchronize());
    });
}

/// As the real driver does: a pool keeps freed memory for the next allocations of its stream, and gives it back at a synchronisation.
#[test]
fn a_pool_reuses_memory_in_stream_order_and_gives_it_back_at_a_synchronisation() {
    on_gpu("a_pool_reuses_memory_in_stream_order_and_gives_it_back_at_a_synchronisation", &[], |gpu| {
        let (stream, other, mut pool, mut event) = (gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING), 0, 0);
        ok!(gpu.cuEventCreate(&raw mut event, 0));
        let from = |stream| {
            let mut pointer = 0;
            ok!(gpu.cuMemAllocAsync(&raw mut pointer, MIB2, stream));
            pointer
        };
        gpu.slow_down(LONG_MS);
        let first = from(stream);
        ok!(gpu.cuMemsetD8Async(first, 1, MIB2, stream));
        ok!(gpu.cuMemFreeAsync(first, stream));
        let (again, others) = (from(stream), from(other));
        assert_eq!((again, gpu.used()), (first, 2 * MIB2 as u64));
        assert_ne!(others, first, "the other stream does not know that this one will get there");
        for (pointer, stream) in [(again, stream), (others, other)] {
            ok!(gpu.cuMemFreeAsync(pointer, stream));
        }
        gpu.slow_down(0);
        for stream in [stream, other] {
            while unsafe { (gpu.cuStreamQuery)(stream) } != 0 {}
        }
        assert_eq!(gpu.used(), 2 * MIB2 as u64, "the pool has it until somebody synchronises");
        ok!(gpu.cuEventSynchronize(event));
        assert_eq!(gpu.used(), 0);

        // Above the threshold.
        ok!(gpu.cuDeviceGetDefaultMemPool(&raw mut pool, 0));
        let mut threshold = MIB2 as u64;
        ok!(gpu.cuMemPoolSetAttribute(pool, 4, (&raw mut threshold).cast()));
        for pointer in [from(stream), from(stream)] {
            ok!(gpu.cuMemFreeAsync(pointer, stream));
        }
        ok!(gpu.cuStreamSynchronize(stream));
        assert_eq!(gpu.used(), MIB2 as u64);
        ok!(gpu.cuMemPoolTrimTo(pool, 0));
        assert_eq!(gpu.used(), 0);
    });
}

#[test]
fn a_new_stream_may_get_the_handle_of_a_destroyed_one_but_not_its_id() {
    on_gpu("a_new_stream_may_get_the_handle_of_a_destroyed_one_but_not_its_id", &[], |gpu| {
        let id = |stream| {
            let mut id = 0;
            ok!(gpu.cuStreamGetId(stream, &raw mut id));
            id
        };
        let first = gpu.stream(NON_BLOCKING);
        let before = id(first);
        ok!(gpu.cuStreamDestroy_v2(first));
        let second = gpu.stream(NON_BLOCKING);
        assert!(second == first && id(second) != before);
        // Each thread has its own.
        let context = gpu.use_device(0);
        let own = id(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                ok!(gpu.cuCtxSetCurrent(context));
                assert_ne!(id(2), own);
            });
        });
        assert_eq!(id(2), own);
    });
}
