//! What driver 580 did on an H200 where its documentation is silent or wrong. The test names state the observations.

// Every call here is a foreign function, with pointers to the test's own variables.
#![allow(clippy::undocumented_unsafe_blocks, clippy::large_types_passed_by_value)]

#[macro_use]
mod common;
use common::{Access, Gate, Gpu, LONG_MS, MIB2, command, isolated, on_gpu, prop};

const BLOCKING: u32 = 0;
const NON_BLOCKING: u32 = 1;
const GLOBAL: u32 = 0;
const THREAD_LOCAL: u32 = 1;
const RELAXED: u32 = 2;
const MODES: [u32; 3] = [GLOBAL, THREAD_LOCAL, RELAXED];

/// A named call to make during a capture.
type Call<'a> = (&'a str, Box<dyn Fn() -> u32 + Send + Sync + 'a>);

macro_rules! call {
    ($gpu:ident . $name:ident($($argument:expr),* $(,)?)) => {
        {
            let call: Call<'_> = (stringify!($name), Box::new(move || unsafe { ($gpu.$name)($($argument),*) }));
            call
        }
    };
}

/// Makes a call with a thread capture mode set.
fn in_mode(gpu: Gpu, mut mode: u32, call: impl FnOnce() -> u32) -> u32 {
    ok!(gpu.cuThreadExchangeStreamCaptureMode(&raw mut mode));
    let code = call();
    ok!(gpu.cuThreadExchangeStreamCaptureMode(&raw mut mode));
    code
}

/// Makes a call on another thread.
fn elsewhere(gpu: Gpu, context: u64, mode: u32, call: &(impl Fn() -> u32 + Sync + ?Sized)) -> u32 {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            ok!(gpu.cuCtxSetCurrent(context));
            in_mode(gpu, mode, call)
        });
        thread.join().unwrap()
    })
}

/// A call's result during a capture on `stream`, and whether the capture survives.
fn during_capture(gpu: Gpu, stream: u64, capture: u32, call: impl FnOnce() -> u32) -> (u32, bool) {
    let mut graph = 0;
    ok!(gpu.cuStreamBeginCapture_v2(stream, capture));
    let code = call();
    let ended = unsafe { (gpu.cuStreamEndCapture)(stream, &raw mut graph) };
    assert!(matches!(ended, 0 | 901), "{ended}");
    if graph != 0 {
        ok!(gpu.cuGraphDestroy(graph));
    }
    (code, ended == 0)
}

/// All combinations of the capture's mode, the calling thread and its mode.
fn combinations() -> impl Iterator<Item = (u32, bool, u32)> {
    MODES
        .into_iter()
        .flat_map(|capture| [true, false].into_iter().flat_map(move |same| MODES.into_iter().map(move |mode| (capture, same, mode))))
}

fn call_during_capture(gpu: Gpu, context: u64, stream: u64, how: (u32, bool, u32), call: &Call<'_>) -> (u32, bool) {
    let (capture, same_thread, mode) = how;
    during_capture(gpu, stream, capture, || if same_thread { in_mode(gpu, mode, &call.1) } else { elsewhere(gpu, context, mode, &*call.1) })
}

fn is_unsafe((capture, same_thread, mode): (u32, bool, u32)) -> bool {
    if same_thread { capture != RELAXED && mode != RELAXED } else { capture == GLOBAL && mode == GLOBAL }
}

/// A place for results that nobody reads.
static NOWHERE: [std::sync::atomic::AtomicU64; 2] = [const { std::sync::atomic::AtomicU64::new(0) }; 2];

fn out() -> *mut u64 {
    NOWHERE[0].as_ptr()
}

fn out2() -> *mut usize {
    NOWHERE[1].as_ptr().cast()
}

#[test]
fn waiting_for_the_context_ends_its_captures_in_every_mode() {
    on_gpu("waiting_for_the_context_ends_its_captures_in_every_mode", &[], |gpu| {
        let context = gpu.use_device(0);
        let stream = gpu.stream(NON_BLOCKING);
        for how in combinations() {
            let code = call_during_capture(gpu, context, stream, how, &call!(gpu.cuCtxSynchronize()));
            assert_eq!(code, (900, false), "{how:?}");
        }
        // Captures in another context do not matter.
        let mut second = 0;
        ok!(gpu.cuCtxCreate_v2(&raw mut second, 0, 0));
        ok!(gpu.cuCtxSetCurrent(context));
        for capture in MODES {
            let code = during_capture(gpu, stream, capture, || elsewhere(gpu, second, GLOBAL, &|| unsafe { (gpu.cuCtxSynchronize)() }));
            assert_eq!(code, (0, true));
        }
    });
}

#[test]
fn unsafe_calls_are_refused_in_exactly_two_situations() {
    on_gpu("unsafe_calls_are_refused_in_exactly_two_situations", &[], |gpu| {
        let context = gpu.use_device(0);
        let (stream, other, blocking) = (gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING), gpu.stream(BLOCKING));
        let (mut event, mut pool) = (0, 0);
        ok!(gpu.cuEventCreate(&raw mut event, 0));
        ok!(gpu.cuEventRecord(event, other));
        ok!(gpu.cuCtxSynchronize());
        ok!(gpu.cuDeviceGetDefaultMemPool(&raw mut pool, 0));
        let plain = gpu.alloc(4096);
        let page = vec![0u8; 8192];
        let page = page.as_ptr() as u64;
        let calls: Vec<Call<'_>> = vec![
            call!(gpu.cuMemAlloc_v2(out(), 512)),
            call!(gpu.cuMemAllocPitch_v2(out(), out2(), 1000, 10, 4)),
            call!(gpu.cuMemFree_v2(from_the_pool(gpu, other))),
            call!(gpu.cuMemFree_v2(0)),
            call!(gpu.cuMemAllocAsync(out(), 512, other)),
            call!(gpu.cuMemFreeAsync(from_the_pool(gpu, other), other)),
            call!(gpu.cuMemPoolTrimTo(pool, 0)),
            call!(gpu.cuMemPoolGetAttribute(pool, 5, out().cast())),
            call!(gpu.cuMemPoolSetAttribute(pool, 4, (&raw const NOTHING).cast_mut().cast())),
            call!(gpu.cuPointerSetAttribute(&raw const ONE, SYNC_MEMOPS, plain)),
            call!(gpu.cuMemHostAlloc(out(), 512, 0)),
            call!(gpu.cuStreamSynchronize(other)),
            call!(gpu.cuStreamSynchronize(blocking)),
            call!(gpu.cuStreamSynchronize(2)),
            call!(gpu.cuStreamQuery(other)),
            call!(gpu.cuStreamSynchronize(0)),
            call!(gpu.cuStreamQuery(0)),
            call!(gpu.cuEventQuery(event)),
            call!(gpu.cuEventSynchronize(event)),
        ];
        for how in combinations() {
            let expected = if is_unsafe(how) { (900, false) } else { (0, true) };
            for call in &calls {
                assert_eq!(call_during_capture(gpu, context, stream, how, call), expected, "{} {how:?}", call.0);
            }
            // Calls that need something to undo.
            ok!(gpu.cuMemHostRegister_v2(page, 4096, 0));
            let mut pinned = 0;
            ok!(gpu.cuMemHostAlloc(&raw mut pinned, 64, 0));
            let undone: [Call<'_>; 3] =
                [call!(gpu.cuMemHostUnregister(page)), call!(gpu.cuMemFreeHost(pinned)), call!(gpu.cuMemHostRegister_v2(page, 4096, 0))];
            for call in &undone {
                let answer = call_during_capture(gpu, context, stream, how, call);
                assert_eq!(answer, expected, "{} {how:?}", call.0);
            }
            ok!(gpu.cuMemHostUnregister(page));
        }
    });
}

/// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`.
const SYNC_MEMOPS: i32 = 6;
static ONE: u32 = 1;
static NOTHING: u64 = 0;

/// Allocates from the pool, in a mode in which that is always allowed.
fn from_the_pool(gpu: Gpu, stream: u64) -> u64 {
    let mut pointer = 0;
    in_mode(gpu, RELAXED, || unsafe { (gpu.cuMemAllocAsync)(&raw mut pointer, 512, stream) });
    pointer
}

#[test]
fn virtual_memory_and_work_of_other_streams_are_never_unsafe() {
    on_gpu("virtual_memory_and_work_of_other_streams_are_never_unsafe", &[], |gpu| {
        let context = gpu.use_device(0);
        let (stream, other) = (gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING));
        let (mapped, plain) = (gpu.map_new(MIB2), gpu.alloc(4096));
        let mut pinned = 0;
        ok!(gpu.cuMemHostAlloc(&raw mut pinned, 4096, 0));
        let harmless = move || unsafe {
            let (mut handle, mut pointer, mut flags, mut new, mut event) = (0, 0, 0, 0, 0);
            let (mut granularity, mut free, mut total, mut kind) = (0, 0, 0, 0u32);
            let access = Access { location: [1, 0], flags: 3 };
            [
                (gpu.cuMemGetAllocationGranularity)(&raw mut granularity, &prop(0), 0),
                (gpu.cuMemCreate)(&raw mut handle, MIB2, &prop(0), 0),
                (gpu.cuMemAddressReserve)(&raw mut pointer, MIB2, 0, 0, 0),
                (gpu.cuMemMap)(pointer, MIB2, 0, handle, 0),
                (gpu.cuMemSetAccess)(pointer, MIB2, &raw const access, 1),
                (gpu.cuMemGetAccess)(&raw mut flags, &[1, 0], pointer),
                (gpu.cuMemUnmap)(pointer, MIB2),
                (gpu.cuMemRelease)(handle),
                (gpu.cuMemAddressFree)(pointer, MIB2),
                (gpu.cuMemRetainAllocationHandle)(&raw mut handle, mapped),
                (gpu.cuMemRelease)(handle),
                (gpu.cuMemGetInfo_v2)(&raw mut free, &raw mut total),
                (gpu.cuStreamCreate)(&raw mut new, BLOCKING),
                (gpu.cuMemsetD8Async)(plain, 1, 4096, new),
                (gpu.cuStreamDestroy_v2)(new),
                (gpu.cuMemcpyDtoHAsync_v2)(pinned, plain, 4096, other),
                (gpu.cuMemcpyHtoDAsync_v2)(plain, pinned, 4096, other),
                (gpu.cuEventCreate)(&raw mut event, 2),
                (gpu.cuEventRecord)(event, other),
                (gpu.cuStreamWaitEvent)(other, event, 0),
                (gpu.cuEventRecord)(event, 0),
                (gpu.cuEventDestroy_v2)(event),
                (gpu.cuMemsetD8_v2)(plain, 1, 4096),
                (gpu.cuMemcpyDtoH_v2)(pinned, plain, 4096),
                (gpu.cuPointerGetAttribute)((&raw mut kind).cast(), 2, plain),
                (gpu.cuMemGetAddressRange_v2)(&raw mut pointer, &raw mut free, plain),
                (gpu.cuCtxPushCurrent_v2)(context),
                (gpu.cuCtxPopCurrent_v2)(&raw mut new),
                (gpu.cuDevicePrimaryCtxRetain)(&raw mut new, 0),
                (gpu.cuDevicePrimaryCtxRelease_v2)(0),
                (gpu.cuStreamGetCtx)(0, &raw mut new),
                (gpu.cuStreamIsCapturing)(0, &raw mut kind),
                kind,
            ]
            .into_iter()
            .enumerate()
            .find(|&(_, code)| code != 0)
            .map_or(0, |(index, code)| 10_000 * (index as u32 + 1) + code)
        };
        for how in combinations() {
            assert_eq!(call_during_capture(gpu, context, stream, how, &("", Box::new(harmless))), (0, true), "{how:?}");
        }
    });
}

#[test]
fn wrong_arguments_and_frees_in_a_captured_stream_leave_captures_valid() {
    on_gpu("wrong_arguments_and_frees_in_a_captured_stream_leave_captures_valid", &[], |gpu| {
        let context = gpu.use_device(0);
        let (stream, other, plain) = (gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING), gpu.alloc(4096));
        let pooled = from_the_pool(gpu, other);
        for how in combinations() {
            for (expected, call) in [
                (1, call!(gpu.cuMemAllocPitch_v2(out(), out2(), 0, 4, 4))),
                (1, call!(gpu.cuMemAllocPitch_v2(out(), out2(), 4096, 4, 3))),
                // A graph frees only what it has allocated.
                (1, call!(gpu.cuMemFreeAsync(pooled, stream))),
                (1, call!(gpu.cuMemFreeAsync(plain, stream))),
                (0, call!(gpu.cuMemFreeAsync(0, stream))),
            ] {
                assert_eq!(call_during_capture(gpu, context, stream, how, &call), (expected, true), "{} {how:?}", call.0);
            }
        }
    });
}

#[test]
fn a_pool_tells_what_it_has_what_is_used_and_the_most_of_both() {
    /// `CU_MEMPOOL_ATTR_…`.
    const RESERVED: u32 = 5;
    const RESERVED_HIGH: u32 = 6;
    const USED: u32 = 7;
    const USED_HIGH: u32 = 8;
    const MIB: u64 = 1 << 20;
    on_gpu("a_pool_tells_what_it_has_what_is_used_and_the_most_of_both", &[], |gpu| {
        let context = gpu.use_device(0);
        let stream = gpu.stream(NON_BLOCKING);
        let (mut pool, mut large, mut small) = (0, 0, 0);
        ok!(gpu.cuDeviceGetDefaultMemPool(&raw mut pool, 0));
        let now = || {
            [RESERVED, RESERVED_HIGH, USED, USED_HIGH].map(|attribute| {
                let mut value = 0_u64;
                ok!(gpu.cuMemPoolGetAttribute(pool, attribute, (&raw mut value).cast()));
                value
            })
        };
        let set = |attribute, mut value: u64| unsafe { (gpu.cuMemPoolSetAttribute)(pool, attribute, (&raw mut value).cast()) };
        assert_eq!(now(), [0; 4]);
        ok!(gpu.cuMemAllocAsync(&raw mut large, 64 * MIB as usize, stream));
        ok!(gpu.cuMemAllocAsync(&raw mut small, 513, stream));
        // The real one has 32 MiB at least.
        let both = 64 * MIB + 1024;
        assert_eq!(now(), [both, both, 64 * MIB + 513, 64 * MIB + 513]);
        ok!(gpu.cuMemFreeAsync(large, stream));
        assert_eq!(now(), [both, both, 513, 64 * MIB + 513], "at the call");
        ok!(gpu.cuStreamSynchronize(stream));
        assert_eq!(now(), [1024, both, 513, 64 * MIB + 513]);
        assert_eq!((set(USED_HIGH, 5), set(RESERVED_HIGH, 5), set(USED, 0), set(9, 0), set(0, 0)), (1, 1, 1, 1, 1));
        assert_eq!((set(USED_HIGH, 0), set(RESERVED_HIGH, 0)), (0, 0));
        assert_eq!(now(), [1024, 1024, 513, 513]);
        // Its memory belongs to the pool, and to no context.
        let of = |attribute, pointer| {
            let mut value = 7_u64;
            ok!(gpu.cuPointerGetAttribute((&raw mut value).cast(), attribute, pointer));
            value
        };
        let plain = gpu.alloc(64);
        assert_eq!([of(17, small), of(1, small), of(17, plain), of(1, plain)], [pool, 0, 0, context]);
        fails!(1, gpu.cuMemPoolGetAttribute(pool, 9, (&raw mut large).cast()));
        fails!(1, gpu.cuMemPoolGetAttribute(pool, 5, std::ptr::null_mut()));
    });
}

#[test]
fn an_allocation_ends_at_the_last_byte_that_was_asked_for() {
    on_gpu("an_allocation_ends_at_the_last_byte_that_was_asked_for", &[], |gpu| {
        gpu.use_device(0);
        let stream = gpu.stream(NON_BLOCKING);
        for bytes in [1, 511, 513, 4096, (1 << 20) + 1] {
            let (plain, mut pooled) = (gpu.alloc(bytes), 0);
            ok!(gpu.cuMemAllocAsync(&raw mut pooled, bytes, stream));
            for address in [plain, pooled] {
                let (mut start, mut size, mut kind) = (7, 7, 0_u32);
                ok!(gpu.cuMemGetAddressRange_v2(&raw mut start, &raw mut size, address + bytes as u64 - 1));
                assert_eq!((start, size), (address, bytes));
                fails!(500, gpu.cuMemGetAddressRange_v2(&raw mut start, &raw mut size, address + bytes as u64));
                assert_eq!(size, 0);
                fails!(1, gpu.cuPointerGetAttribute((&raw mut kind).cast(), 2, address + bytes as u64));
            }
        }
    });
}

#[test]
fn a_capturing_stream_is_not_waited_for_in_any_mode() {
    on_gpu("a_capturing_stream_is_not_waited_for_in_any_mode", &[], |gpu| {
        let context = gpu.use_device(0);
        let stream = gpu.stream(NON_BLOCKING);
        for how in combinations() {
            for call in [call!(gpu.cuStreamSynchronize(stream)), call!(gpu.cuStreamQuery(stream))] {
                assert_eq!(call_during_capture(gpu, context, stream, how, &call), (900, false), "{how:?}");
            }
        }
    });
}

#[test]
fn the_legacy_stream_is_forbidden_while_a_blocking_stream_is_captured() {
    on_gpu("the_legacy_stream_is_forbidden_while_a_blocking_stream_is_captured", &[], |gpu| {
        let context = gpu.use_device(0);
        let stream = gpu.stream(BLOCKING);
        let plain = gpu.alloc(4096);
        let (mut event, mut pinned) = (0, 0);
        ok!(gpu.cuEventCreate(&raw mut event, 2));
        ok!(gpu.cuMemHostAlloc(&raw mut pinned, 4096, 0));
        let calls: Vec<Call<'_>> = vec![
            call!(gpu.cuStreamSynchronize(0)),
            call!(gpu.cuStreamQuery(0)),
            call!(gpu.cuEventRecord(event, 0)),
            call!(gpu.cuMemsetD8_v2(plain, 1, 64)),
            call!(gpu.cuMemcpyDtoH_v2(pinned, plain, 64)),
            call!(gpu.cuStreamGetCtx(0, out())),
        ];
        for how in combinations() {
            for call in &calls {
                assert_eq!(call_during_capture(gpu, context, stream, how, call), (906, false), "{} {how:?}", call.0);
            }
            let asked = call_during_capture(gpu, context, stream, how, &call!(gpu.cuStreamIsCapturing(0, out().cast())));
            assert_eq!(asked, (906, true));
        }
    });
}

#[test]
fn frees_wait_for_their_context_and_leave_captures_valid() {
    on_gpu("frees_wait_for_their_context_and_leave_captures_valid", &[], |gpu| {
        let context = gpu.use_device(0);
        let (stream, busy) = (gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING));
        let target = gpu.alloc(64);
        let page = vec![0u8; 8192];
        let page = page.as_ptr() as u64;
        let mut second = 0;
        ok!(gpu.cuCtxCreate_v2(&raw mut second, 0, 0));
        let foreign = gpu.stream(NON_BLOCKING);
        let foreign_target = gpu.alloc(64);
        ok!(gpu.cuCtxSetCurrent(context));
        let things = || {
            let (plain, mut pinned) = (gpu.alloc(64), 0);
            ok!(gpu.cuMemHostAlloc(&raw mut pinned, 64, 0));
            ok!(gpu.cuMemHostRegister_v2(page, 4096, 0));
            let calls: [Call<'_>; 3] =
                [call!(gpu.cuMemFree_v2(plain)), call!(gpu.cuMemFreeHost(pinned)), call!(gpu.cuMemHostUnregister(page))];
            calls
        };
        for (busy, target, waits) in [(busy, target, true), (foreign, foreign_target, false)] {
            for call in things() {
                gpu.slow_down(if waits { 150 } else { LONG_MS });
                let other = if waits { context } else { second };
                ok!(gpu.cuCtxSetCurrent(other));
                ok!(gpu.cuMemsetD8Async(target, 1, 64, busy));
                ok!(gpu.cuCtxSetCurrent(context));
                assert_eq!(during_capture(gpu, stream, GLOBAL, || elsewhere(gpu, context, RELAXED, &*call.1)), (0, true), "{}", call.0);
                fails!(if waits { 0 } else { 600 }, gpu.cuStreamQuery(busy));
                gpu.slow_down(0);
                ok!(gpu.cuStreamSynchronize(busy));
            }
        }
    });
}

/// Freeing memory waits for a stream that waits for a value. Allocating does not, and neither waits for another context on
/// the device.
#[test]
fn frees_wait_for_a_stream_that_waits_for_a_value() {
    on_gpu("frees_wait_for_a_stream_that_waits_for_a_value", &[], |gpu| {
        let context = gpu.use_device(0);
        let (gate, busy) = (Gate::new(&gpu), gpu.stream(NON_BLOCKING));
        let page = vec![0u8; 8192];
        let page = (page.as_ptr() as u64).next_multiple_of(4096);
        let mut second = 0;
        ok!(gpu.cuCtxCreate_v2(&raw mut second, 0, 0));
        ok!(gpu.cuCtxSetCurrent(context));
        for give_back in [0, 1, 2] {
            gate.set(0);
            ok!(gpu.cuStreamWaitValue32_v2(busy, gate.0, 1, 0));
            let (plain, mut pinned) = (gpu.alloc(4096), 0);
            ok!(gpu.cuMemHostRegister_v2(page, 4096, 0));
            ok!(gpu.cuMemHostAlloc(&raw mut pinned, 64, 0));
            fails!(600, gpu.cuStreamQuery(busy));
            ok!(gpu.cuCtxSetCurrent(second));
            let elsewhere = gpu.alloc(4096);
            ok!(gpu.cuMemFree_v2(elsewhere));
            fails!(600, gpu.cuStreamQuery(busy));
            ok!(gpu.cuCtxSetCurrent(context));
            std::thread::scope(|scope| {
                let gate = &gate;
                scope.spawn(move || {
                    std::thread::sleep(std::time::Duration::from_millis(30));
                    gate.set(1);
                });
                match give_back {
                    0 => ok!(gpu.cuMemFree_v2(plain)),
                    1 => ok!(gpu.cuMemFreeHost(pinned)),
                    _ => ok!(gpu.cuMemHostUnregister(page)),
                }
                ok!(gpu.cuStreamQuery(busy));
            });
            if give_back != 0 {
                ok!(gpu.cuMemFree_v2(plain));
            }
            if give_back != 1 {
                ok!(gpu.cuMemFreeHost(pinned));
            }
            if give_back != 2 {
                ok!(gpu.cuMemHostUnregister(page));
            }
        }
    });
}

/// As documented: at least (cyclically), equal, and, nor. Which waits a capture allows was not observed; here they become
/// nodes.
#[test]
fn a_stream_waits_for_the_given_values() {
    on_gpu("a_stream_waits_for_the_given_values", &[], |gpu| {
        let (gate, stream) = (Gate::new(&gpu), gpu.stream(NON_BLOCKING));
        for (condition, value, not_yet, then) in
            [(0, 5, 4, 5), (0, 5, u32::MAX, 6), (1, 5, 6, 5), (2, 0b110, 0b1001, 0b100), (3, !0b11, !0b100, !0b10)]
        {
            gate.set(not_yet);
            ok!(gpu.cuStreamWaitValue32_v2(stream, gate.0, value, condition));
            std::thread::sleep(std::time::Duration::from_millis(20));
            fails!(600, gpu.cuStreamQuery(stream));
            gate.set(then);
            ok!(gpu.cuStreamSynchronize(stream));
        }
        gate.set(7);
        ok!(gpu.cuStreamWaitValue64_v2(stream, gate.0, 7, 1));
        ok!(gpu.cuStreamSynchronize(stream));
        fails!(1, gpu.cuStreamWaitValue32_v2(stream, gate.0, 7, 4));
        fails!(1, gpu.cuStreamWaitValue32_v2(stream, gate.0 + 2, 7, 0));
        let (mut graph, mut executable) = (0, 0);
        ok!(gpu.cuStreamBeginCapture_v2(stream, GLOBAL));
        ok!(gpu.cuStreamWaitValue32_v2(stream, gate.0, 8, 0));
        ok!(gpu.cuStreamEndCapture(stream, &raw mut graph));
        ok!(gpu.cuGraphInstantiateWithFlags(&raw mut executable, graph, 0));
        ok!(gpu.cuGraphLaunch(executable, stream));
        fails!(600, gpu.cuStreamQuery(stream));
        gate.set(8);
        ok!(gpu.cuStreamSynchronize(stream));
    });
}

/// Only ids distinguish contexts: handles are reused.
#[test]
fn a_context_has_an_id_that_no_other_had() {
    on_gpu("a_context_has_an_id_that_no_other_had", &[], |gpu| {
        let primary = gpu.use_device(0);
        let id = |context| {
            let mut id = 0;
            match unsafe { (gpu.cuCtxGetId)(context, &raw mut id) } {
                0 => Ok(id),
                code => Err(code),
            }
        };
        let first = id(primary).unwrap();
        assert_eq!(id(0), Ok(first), "of the current one");
        ok!(gpu.cuDevicePrimaryCtxReset_v2(0));
        // A reset context can still be made current and has its device, but no id.
        let mut device = -1;
        ok!(gpu.cuCtxPushCurrent_v2(primary));
        ok!(gpu.cuCtxGetDevice(&raw mut device));
        assert_eq!((device, id(primary), id(0)), (0, Err(709), Err(709)));
        assert_eq!(gpu.use_device(0), primary);
        let second = id(primary).unwrap();
        assert_ne!(first, second);

        let mut one = 0;
        ok!(gpu.cuCtxCreate_v2(&raw mut one, 0, 0));
        let third = id(one).unwrap();
        ok!(gpu.cuCtxDestroy_v2(one));
        assert_eq!(id(one), Err(709));
        // So can a destroyed one; asking for its device then crashes the process.
        ok!(gpu.cuCtxPushCurrent_v2(one));
        assert_eq!(id(0), Err(709));
        ok!(gpu.cuCtxPopCurrent_v2(&raw mut one));
        let mut next = 0;
        ok!(gpu.cuCtxCreate_v2(&raw mut next, 0, 0));
        assert_eq!(next, one, "a handle comes again");
        assert!(![first, second, third].contains(&id(next).unwrap()));
    });
}

#[test]
fn frees_report_errors_of_earlier_work() {
    for which in 0..3 {
        let child = command("frees_report", &[("SIMGPU_WHICH", ["0", "1", "2"][which])]).status().unwrap();
        assert!(child.success(), "{which}");
    }
}

#[test]
#[ignore = "part of another test"]
fn frees_report() {
    let Some(which) = std::env::var_os("SIMGPU_WHICH") else { return };
    let gpu = Gpu::start();
    let stream = gpu.stream(NON_BLOCKING);
    let (mapped, plain, mut pinned) = (gpu.map_new(MIB2), gpu.alloc(64), 0);
    let page = vec![0u8; 8192];
    ok!(gpu.cuMemHostAlloc(&raw mut pinned, 64, 0));
    ok!(gpu.cuMemHostRegister_v2(page.as_ptr() as u64, 4096, 0));
    gpu.slow_down(LONG_MS);
    ok!(gpu.cuMemsetD8Async(mapped, 1, 64, stream));
    ok!(gpu.cuMemUnmap(mapped, MIB2));
    gpu.slow_down(150);
    match which.to_str().unwrap() {
        "0" => fails!(700, gpu.cuMemFree_v2(plain)),
        "1" => fails!(700, gpu.cuMemFreeHost(pinned)),
        _ => fails!(700, gpu.cuMemHostUnregister(page.as_ptr() as u64)),
    }
    fails!(700, gpu.cuCtxSynchronize());
}

/// Breaks the current context with work whose memory is unmapped.
fn break_context(gpu: Gpu) {
    let stream = gpu.stream(NON_BLOCKING);
    let mapped = gpu.map_new(MIB2);
    gpu.slow_down(LONG_MS);
    ok!(gpu.cuMemsetD8Async(mapped, 1, 64, stream));
    ok!(gpu.cuMemUnmap(mapped, MIB2));
    ok!(gpu.cuMemAddressFree(mapped, MIB2));
    gpu.slow_down(0);
    fails!(700, gpu.cuStreamSynchronize(stream));
}

#[test]
fn after_a_sticky_error_virtual_memory_can_still_be_managed() {
    on_gpu("after_a_sticky_error_virtual_memory_can_still_be_managed", &[], |gpu| {
        let (stream, plain, mapped, reserved) = (gpu.stream(0), gpu.alloc(4096), gpu.map_new(4 * MIB2), gpu.reserve(MIB2));
        let (mut event, mut pinned, mut none, mut size) = (0, 0, 0, 0);
        let page = vec![0u8; 8192];
        let page = page.as_ptr() as u64;
        ok!(gpu.cuEventCreate(&raw mut event, 0));
        ok!(gpu.cuMemHostAlloc(&raw mut pinned, 64, 0));
        ok!(gpu.cuMemHostRegister_v2(page, 4096, 0));
        let before = gpu.used();
        break_context(gpu);

        fails!(700, gpu.cuMemGetInfo_v2(&raw mut size, &raw mut size));
        fails!(700, gpu.cuMemAlloc_v2(&raw mut none, 64));
        fails!(700, gpu.cuMemFree_v2(plain));
        fails!(700, gpu.cuMemFree_v2(0));
        fails!(700, gpu.cuStreamCreate(&raw mut none, 0));
        fails!(700, gpu.cuStreamSynchronize(stream));
        fails!(700, gpu.cuStreamQuery(stream));
        fails!(700, gpu.cuStreamIsCapturing(stream, (&raw mut none).cast()));
        fails!(700, gpu.cuStreamGetCtx(0, &raw mut none));
        fails!(700, gpu.cuMemcpyDtoH_v2(pinned, plain, 64));
        fails!(700, gpu.cuMemcpyDtoHAsync_v2(pinned, plain, 64, stream));
        fails!(700, gpu.cuMemsetD8Async(plain, 1, 64, stream));
        fails!(700, gpu.cuEventCreate(&raw mut none, 0));
        fails!(700, gpu.cuEventRecord(event, stream));
        fails!(700, gpu.cuEventQuery(event));
        fails!(700, gpu.cuEventDestroy_v2(event));
        fails!(700, gpu.cuMemHostRegister_v2(page + 4096, 64, 0));
        fails!(700, gpu.cuMemHostUnregister(page));
        fails!(700, gpu.cuMemHostAlloc(&raw mut none, 64, 0));
        fails!(700, gpu.cuMemFreeHost(pinned));
        fails!(700, gpu.cuStreamDestroy_v2(stream));
        fails!(700, gpu.cuCtxSynchronize());
        // The context's handle still works, and it can be retained.
        let context = gpu.use_device(0);
        ok!(gpu.cuCtxGetCurrent(&raw mut none));
        assert_eq!(none, context);
        ok!(gpu.cuPointerGetAttribute((&raw mut none).cast(), 2, plain));

        // All of this works, and the memory is really freed.
        let other = gpu.map_new(MIB2);
        ok!(gpu.cuMemUnmap(other, MIB2));
        ok!(gpu.cuMemAddressFree(other, MIB2));
        gpu.put_new(reserved, MIB2);
        ok!(gpu.cuMemUnmap(mapped, 4 * MIB2));
        ok!(gpu.cuMemAddressFree(mapped, 4 * MIB2));
        assert_eq!(gpu.used(), before - 3 * MIB2 as u64);

        // A reset succeeds but does not help: neither this nor another context works.
        ok!(gpu.cuDevicePrimaryCtxReset_v2(0));
        fails!(709, gpu.cuMemsetD8_v2(reserved, 1, 64));
        fails!(709, gpu.cuCtxSynchronize());
        fails!(46, gpu.cuDevicePrimaryCtxRetain(&raw mut none, 0));
        fails!(46, gpu.cuCtxCreate_v2(&raw mut none, 0, 0));
        assert_eq!(gpu.used(), MIB2 as u64);
        ok!(gpu.cuMemUnmap(reserved, MIB2));
        assert_eq!(gpu.used(), 0);
        gpu.map_new(MIB2);
    });
}

#[test]
fn virtual_memory_survives_a_reset() {
    on_gpu("virtual_memory_survives_a_reset", &[], |gpu| {
        let context = gpu.use_device(0);
        let (mapped, created, reserved) = (gpu.map_new(MIB2), gpu.create(MIB2), gpu.reserve(MIB2));
        let plain = gpu.alloc(4096);
        gpu.upload(mapped, b"kept");
        ok!(gpu.cuDevicePrimaryCtxReset_v2(0));
        // The destroyed context stays current, under the same handle.
        let (mut current, mut active, mut size) = (0, 9, 0);
        ok!(gpu.cuCtxGetCurrent(&raw mut current));
        assert_eq!(current, context);
        ok!(gpu.cuDevicePrimaryCtxGetState(0, std::ptr::null_mut(), &raw mut active));
        assert_eq!(active, 0);
        fails!(709, gpu.cuMemGetInfo_v2(&raw mut size, &raw mut size));
        fails!(709, gpu.cuMemHostUnregister(4096));
        let mut flags = 0;
        ok!(gpu.cuMemGetAccess(&raw mut flags, &[1, 0], mapped));
        assert_eq!(flags, 3);
        assert_eq!(gpu.use_device(0), context);
        assert_eq!(gpu.download(mapped, 4), b"kept");
        fails!(1, gpu.cuMemFree_v2(plain));
        ok!(gpu.cuDevicePrimaryCtxReset_v2(0));
        // Cleaning up needs no context at all.
        ok!(gpu.cuMemUnmap(mapped, MIB2));
        ok!(gpu.cuMemAddressFree(mapped, MIB2));
        ok!(gpu.cuMemRelease(created));
        ok!(gpu.cuMemAddressFree(reserved, MIB2));
        assert_eq!(gpu.used(), 0);
    });
}

#[test]
fn what_needs_no_current_context() {
    on_gpu("what_needs_no_current_context", &[], |gpu| {
        let context = gpu.use_device(0);
        let (stream, plain) = (gpu.stream(0), gpu.alloc(64));
        let (mut event, mut none, mut kind) = (0, 0, 0u32);
        ok!(gpu.cuEventCreate(&raw mut event, 0));
        ok!(gpu.cuCtxSetCurrent(0));
        ok!(gpu.cuStreamSynchronize(stream));
        ok!(gpu.cuStreamQuery(stream));
        ok!(gpu.cuStreamIsCapturing(stream, &raw mut kind));
        ok!(gpu.cuStreamGetCtx(stream, &raw mut none));
        assert_eq!(none, context);
        ok!(gpu.cuEventQuery(event));
        ok!(gpu.cuEventSynchronize(event));
        ok!(gpu.cuPointerGetAttribute((&raw mut kind).cast(), 2, plain));
        ok!(gpu.cuMemFree_v2(plain));
        fails!(713, gpu.cuMemHostUnregister(4096));
        ok!(gpu.cuStreamDestroy_v2(stream));
        let mapped = gpu.map_new(MIB2);
        ok!(gpu.cuMemUnmap(mapped, MIB2));
        for stream in 0..3 {
            fails!(201, gpu.cuStreamGetCtx(stream, &raw mut none));
        }
        fails!(201, gpu.cuStreamSynchronize(0));
        fails!(201, gpu.cuStreamIsCapturing(0, &raw mut kind));
        fails!(201, gpu.cuMemGetAddressRange_v2(&raw mut none, std::ptr::null_mut(), mapped));
        fails!(201, gpu.cuCtxSynchronize());
        fails!(201, gpu.cuMemcpyDtoH_v2(0, 0, 1));
    });
}

#[test]
fn memory_unmapped_at_the_call_is_an_invalid_value_and_does_no_harm() {
    on_gpu("memory_unmapped_at_the_call_is_an_invalid_value_and_does_no_harm", &[], |gpu| {
        let stream = gpu.stream(NON_BLOCKING);
        let plain = gpu.alloc(1000);
        let (unmapped, no_access, read_only) = (gpu.reserve(MIB2), gpu.map_new(MIB2), gpu.map_new(MIB2));
        gpu.access(no_access, MIB2, 0);
        gpu.access(read_only, MIB2, 1);
        let was_plain = gpu.alloc(64);
        ok!(gpu.cuMemFree_v2(was_plain));
        let mut host = [0u8; 64];
        let host = host.as_mut_ptr() as u64;
        let mut pinned = 0;
        ok!(gpu.cuMemHostAlloc(&raw mut pinned, 64, 0));
        for bad in [unmapped, no_access, was_plain, read_only] {
            if bad != read_only {
                fails!(1, gpu.cuMemcpyDtoH_v2(host, bad, 64));
                fails!(1, gpu.cuMemcpyDtoHAsync_v2(pinned, bad, 64, stream));
                fails!(1, gpu.cuMemcpyDtoDAsync_v2(plain, bad, 64, stream));
            }
            fails!(1, gpu.cuMemcpyHtoDAsync_v2(bad, pinned, 64, stream));
            fails!(1, gpu.cuMemcpyDtoDAsync_v2(bad, plain, 64, stream));
            fails!(1, gpu.cuMemsetD8_v2(bad, 1, 64));
            fails!(1, gpu.cuMemsetD8Async(bad, 1, 64, stream));
        }
        // At the second one, the real process crashes.
        fails!(1, gpu.cuMemcpyAsync(pinned, no_access, 64, stream));
        fails!(1, gpu.cuMemcpyAsync(pinned, unmapped, 64, stream));
        ok!(gpu.cuMemcpyDtoH_v2(host, read_only, 64));
        // Beyond the end of an allocation.
        ok!(gpu.cuMemsetD8_v2(plain, 1, 1024));
        fails!(1, gpu.cuMemsetD8_v2(plain, 1, 1025));
        ok!(gpu.cuCtxSynchronize());

        // During a capture, copies are checked at once, memsets when the graph is instantiated.
        let (mut graph, mut executable) = (0, 0);
        ok!(gpu.cuStreamBeginCapture_v2(stream, RELAXED));
        fails!(1, gpu.cuMemcpyDtoHAsync_v2(pinned, unmapped, 64, stream));
        ok!(gpu.cuMemsetD8Async(unmapped, 7, 64, stream));
        ok!(gpu.cuStreamEndCapture(stream, &raw mut graph));
        fails!(1, gpu.cuGraphInstantiateWithFlags(&raw mut executable, graph, 0));
        gpu.put_new(unmapped, MIB2);
        ok!(gpu.cuGraphInstantiateWithFlags(&raw mut executable, graph, 0));
        ok!(gpu.cuGraphLaunch(executable, stream));
        ok!(gpu.cuStreamSynchronize(stream));
        assert_eq!(gpu.download(unmapped, 1), [7]);
    });
}

#[test]
fn faults_at_execution_have_their_codes() {
    for (work, code) in
        [("stream", "700"), ("device to device", "700"), ("device to host", "719"), ("host to device", "719"), ("memset", "719")]
    {
        let child = command("faults_at_execution", &[("SIMGPU_WORK", work), ("SIMGPU_CODE", code)]).status().unwrap();
        assert!(child.success(), "{work}");
    }
}

#[test]
#[ignore = "part of another test"]
fn faults_at_execution() {
    let (Ok(work), Ok(code)) = (std::env::var("SIMGPU_WORK"), std::env::var("SIMGPU_CODE")) else { return };
    let code: u32 = code.parse().unwrap();
    let gpu = Gpu::start();
    let stream = gpu.stream(NON_BLOCKING);
    let (mapped, plain, mut pinned) = (gpu.map_new(MIB2), gpu.alloc(64), 0);
    ok!(gpu.cuMemHostAlloc(&raw mut pinned, 64, 0));
    let submit = || match work.as_str() {
        "device to device" => ok!(gpu.cuMemcpyDtoDAsync_v2(plain, mapped, 64, stream)),
        "device to host" => ok!(gpu.cuMemcpyDtoHAsync_v2(pinned, mapped, 64, stream)),
        "host to device" => ok!(gpu.cuMemcpyHtoDAsync_v2(mapped, pinned, 64, stream)),
        _ => ok!(gpu.cuMemsetD8Async(mapped, 1, 64, stream)),
    };
    if work == "stream" {
        gpu.slow_down(LONG_MS);
        ok!(gpu.cuMemsetD8Async(plain, 1, 64, stream));
        submit();
        ok!(gpu.cuMemUnmap(mapped, MIB2));
        gpu.slow_down(0);
    } else {
        let (mut graph, mut executable) = (0, 0);
        ok!(gpu.cuStreamBeginCapture_v2(stream, RELAXED));
        submit();
        ok!(gpu.cuStreamEndCapture(stream, &raw mut graph));
        ok!(gpu.cuGraphInstantiateWithFlags(&raw mut executable, graph, 0));
        ok!(gpu.cuMemUnmap(mapped, MIB2));
        ok!(gpu.cuGraphLaunch(executable, stream));
    }
    fails!(code, gpu.cuStreamSynchronize(stream));
    fails!(code, gpu.cuCtxSynchronize());
    let mut size = 0;
    fails!(code, gpu.cuMemGetInfo_v2(&raw mut size, &raw mut size));
}

fn access_at(gpu: Gpu, pointer: u64) -> Option<u64> {
    let mut flags = 9;
    (unsafe { (gpu.cuMemGetAccess)(&raw mut flags, &[1, 0], pointer) } == 0).then_some(flags)
}

#[test]
fn unmapping_ignores_holes_but_does_not_split_mappings() {
    on_gpu("unmapping_ignores_holes_but_does_not_split_mappings", &[], |gpu| {
        let base = gpu.reserve(8 * MIB2);
        let at = |index: usize| base + (index * MIB2) as u64;
        let is_mapped = |index| access_at(gpu, at(index)).is_some();
        ok!(gpu.cuMemUnmap(base, 8 * MIB2));
        fails!(1, gpu.cuMemUnmap(base, 0));
        fails!(1, gpu.cuMemUnmap(4096, MIB2));
        fails!(1, gpu.cuMemUnmap(at(7), 2 * MIB2));
        for index in [1, 3] {
            gpu.put_new(at(index), MIB2);
        }
        ok!(gpu.cuMemUnmap(base, 8 * MIB2));
        assert_eq!(gpu.used(), 0);
        gpu.put_new(at(0), MIB2);
        gpu.put_new(at(2), 2 * MIB2);
        for (from, count) in [(2, 1), (3, 1), (0, 3), (3, 4)] {
            fails!(1, gpu.cuMemUnmap(at(from), count * MIB2));
        }
        assert!(is_mapped(0) && is_mapped(2) && is_mapped(3));
        ok!(gpu.cuMemUnmap(at(1), 7 * MIB2));
        assert!(is_mapped(0) && !is_mapped(2));
    });
}

#[test]
fn access_stops_at_the_first_hole() {
    on_gpu("access_stops_at_the_first_hole", &[], |gpu| {
        let base = gpu.reserve(8 * MIB2);
        let at = |index: usize| base + (index * MIB2) as u64;
        let map = |index, count| {
            let handle = gpu.create(count * MIB2);
            ok!(gpu.cuMemMap(at(index), count * MIB2, 0, handle, 0));
            ok!(gpu.cuMemRelease(handle));
        };
        let set = |from, bytes, location, count| {
            let access = Access { location, flags: 3 };
            unsafe { (gpu.cuMemSetAccess)(at(from), bytes, &raw const access, count) }
        };
        // [one] [hole] [one] [two]
        map(0, 1);
        map(2, 1);
        map(3, 2);
        let none = [Some(0), None, Some(0), Some(0)];
        let seen = || [0, 1, 2, 3].map(|index| access_at(gpu, at(index)));
        let device = [1, 0];
        for (from, bytes) in
            [(1, 2 * MIB2), (0, 2 * MIB2), (0, 4 * MIB2), (2, 2 * MIB2), (3, MIB2), (4, MIB2), (1, MIB2), (0, 0), (0, MIB2 / 2)]
        {
            assert_eq!(set(from, bytes, device, 1), 1, "{from} {bytes}");
        }
        assert_eq!(set(0, MIB2, device, 0), 1);
        assert_eq!(set(0, MIB2, [1, 7], 1), 1);
        assert_eq!(set(0, MIB2, [2, 0], 1), 801);
        assert_eq!(seen(), none);
        assert_eq!(set(0, 3 * MIB2, device, 1), 0);
        assert_eq!(seen(), [Some(3), None, Some(0), Some(0)]);
        fails!(1, gpu.cuMemsetD8_v2(at(2), 1, MIB2));
        assert_eq!(set(2, 3 * MIB2, device, 1), 0);
        assert_eq!(seen(), [Some(3), None, Some(3), Some(3)]);
    });
}

/// Observed with driver 580 on an H200.
#[test]
fn the_range_of_an_address_is_its_reservation_whatever_is_mapped() {
    on_gpu("the_range_of_an_address_is_its_reservation_whatever_is_mapped", &[], |gpu| {
        let base = gpu.reserve(2 * MIB2);
        let range = |at: u64| {
            let (attributes, mut values) = ([11, 12], [9_u64; 2]);
            let mut places = values.each_mut().map(|value| std::ptr::from_mut(value) as usize);
            ok!(gpu.cuPointerGetAttributes(2, attributes.as_ptr(), places.as_mut_ptr().cast(), at));
            values
        };
        let around = [base, 2 * MIB2 as u64];
        assert_eq!([range(base), range(base + 5), range(base + 2 * MIB2 as u64 - 1)], [around; 3]);
        gpu.put_new(base, MIB2);
        assert_eq!([range(base), range(base + MIB2 as u64)], [around; 2]);
        assert_eq!(range(0x1000), [9; 2], "nothing is known of it");
    });
}

#[test]
fn only_whole_handles_can_be_mapped() {
    on_gpu("only_whole_handles_can_be_mapped", &[], |gpu| {
        let base = gpu.reserve(8 * MIB2);
        let next = base + MIB2 as u64;
        let handle = gpu.create(2 * MIB2);
        for (pointer, bytes, offset) in
            [(base, MIB2, 0), (base, MIB2, MIB2), (base, 4 * MIB2, 0), (base, MIB2 / 2, 0), (base + 4096, MIB2, 0)]
        {
            fails!(801, gpu.cuMemMap(pointer, bytes, offset, handle, 0));
        }
        fails!(1, gpu.cuMemMap(base + 4096, 2 * MIB2, 0, handle, 0));
        fails!(1, gpu.cuMemMap(base, 0, 0, handle, 0));
        fails!(1, gpu.cuMemMap(base, 2 * MIB2, 0, handle, 1));
        fails!(1, gpu.cuMemMap(gpu.alloc(4 * MIB2), 2 * MIB2, 0, handle, 0));
        ok!(gpu.cuMemMap(base, 2 * MIB2, 0, handle, 0));
        fails!(1, gpu.cuMemMap(base, 2 * MIB2, 0, handle, 0));
        fails!(1, gpu.cuMemMap(next, 2 * MIB2, 0, handle, 0));
        gpu.access(base, 2 * MIB2, 3);
        gpu.upload(base, b"kept");
        // Mapped again, it has its contents but no access.
        ok!(gpu.cuMemUnmap(base, 2 * MIB2));
        ok!(gpu.cuMemMap(base, 2 * MIB2, 0, handle, 0));
        assert_eq!(access_at(gpu, base), Some(0));
        gpu.access(base, 2 * MIB2, 3);
        assert_eq!(gpu.download(base, 4), b"kept");
        for (pointer, bytes) in [(base, 8 * MIB2), (base, MIB2), (next, MIB2), (base, 0), (base, 16 * MIB2), (4096, MIB2)] {
            fails!(1, gpu.cuMemAddressFree(pointer, bytes));
        }
        ok!(gpu.cuMemRelease(handle));
        fails!(1, gpu.cuMemRelease(handle));
        fails!(1, gpu.cuMemRelease(0));
        assert_eq!(gpu.download(base, 4), b"kept");
        ok!(gpu.cuMemUnmap(base, 2 * MIB2));
        assert_eq!(gpu.used(), 4 * MIB2 as u64);
        ok!(gpu.cuMemAddressFree(base, 8 * MIB2));
    });
}

#[test]
fn sizes_of_reservations_and_memory() {
    on_gpu("sizes_of_reservations_and_memory", &[], |gpu| {
        let mut result = 0;
        for wrong in [0, 1, 4096, MIB2 - 1, MIB2 + 1, usize::MAX] {
            fails!(1, gpu.cuMemAddressReserve(&raw mut result, wrong, 0, 0, 0));
            fails!(1, gpu.cuMemCreate(&raw mut result, wrong, &prop(0), 0));
        }
        for large in [1 << 47, 1 << 48, 1 << 62, usize::MAX - MIB2 + 1] {
            fails!(2, gpu.cuMemAddressReserve(&raw mut result, large, 0, 0, 0));
            fails!(2, gpu.cuMemCreate(&raw mut result, large, &prop(0), 0));
        }
        fails!(2, gpu.cuMemCreate(&raw mut result, 1 << 40, &prop(0), 0));
        fails!(101, gpu.cuMemCreate(&raw mut result, MIB2, &prop(7), 0));
        fails!(1, gpu.cuMemCreate(&raw mut result, MIB2, &prop(0), 1));
        fails!(1, gpu.cuMemCreate(&raw mut result, MIB2, std::ptr::null(), 0));
        fails!(1, gpu.cuMemAddressReserve(&raw mut result, MIB2, 3, 0, 0));
        fails!(1, gpu.cuMemAddressReserve(&raw mut result, MIB2, 0, 4096, 0));
        fails!(1, gpu.cuMemAddressReserve(&raw mut result, MIB2, 0, 0, 1));
        fails!(2, gpu.cuMemAddressReserve(&raw mut result, MIB2, 0, 1 << 52, 0));
        for alignment in [1, 4096, 1 << 30] {
            ok!(gpu.cuMemAddressReserve(&raw mut result, MIB2, alignment, 0, 0));
        }
    });
}

#[test]
fn frees_take_only_what_their_kind_allocated() {
    on_gpu("frees_take_only_what_their_kind_allocated", &[], |gpu| {
        let stream = gpu.stream(NON_BLOCKING);
        let (mapped, unmapped, plain, mut pinned) = (gpu.map_new(MIB2), gpu.reserve(MIB2), gpu.alloc(4096), 0);
        ok!(gpu.cuMemHostAlloc(&raw mut pinned, 64, 0));
        let heap = [0u8; 8];
        for wrong in [mapped, unmapped, 0x1234, plain + 256, plain + 1, heap.as_ptr() as u64, pinned, u64::MAX] {
            fails!(1, gpu.cuMemFree_v2(wrong));
            fails!(1, gpu.cuMemFreeAsync(wrong, stream));
        }
        ok!(gpu.cuMemFreeAsync(0, stream));
        // Each kind of free accepts each kind of allocation, once.
        ok!(gpu.cuMemFreeAsync(plain, stream));
        fails!(1, gpu.cuMemFreeAsync(plain, stream));
        ok!(gpu.cuStreamSynchronize(stream));
        fails!(1, gpu.cuMemFree_v2(plain));
        let mut pooled = 0;
        ok!(gpu.cuMemAllocAsync(&raw mut pooled, 64, stream));
        let mut ipc = [0; 64];
        for wrong in [pooled, mapped, unmapped, 0x1234] {
            fails!(1, gpu.cuIpcGetMemHandle(&raw mut ipc, wrong));
        }
        ok!(gpu.cuMemFree_v2(pooled));
        fails!(1, gpu.cuMemFreeAsync(pooled, stream));
        assert_eq!(gpu.used(), MIB2 as u64);
        fails!(1, gpu.cuMemAlloc_v2(&raw mut pooled, 0));
    });
}

#[test]
fn pointers_of_virtual_memory() {
    on_gpu("pointers_of_virtual_memory", &[], |gpu| {
        let base = gpu.reserve(4 * MIB2);
        let second = base + MIB2 as u64;
        gpu.put_new(base, MIB2);
        gpu.put_new(second, MIB2);
        let attribute = |which, pointer| {
            let mut value = 0u64;
            let code = unsafe { (gpu.cuPointerGetAttribute)((&raw mut value).cast(), which, pointer) };
            if code == 0 { Ok(value) } else { Err(code) }
        };
        // RANGE_START_ADDR, RANGE_SIZE: the reservation. MAPPING_BASE_ADDR, MAPPING_SIZE.
        assert_eq!(
            [11, 12, 19, 18].map(|which| attribute(which, second + 5)),
            [Ok(base), Ok(4 * MIB2 as u64), Ok(second), Ok(MIB2 as u64)]
        );
        let (mut start, mut size) = (0, 0);
        ok!(gpu.cuMemGetAddressRange_v2(&raw mut start, &raw mut size, second + 5));
        assert_eq!((start, size), (second, MIB2));
        // As that of the host; plain memory is not.
        ok!(gpu.cuMemHostGetDevicePointer_v2(&raw mut start, second, 0));
        let plain = gpu.alloc(4096);
        fails!(1, gpu.cuMemHostGetDevicePointer_v2(&raw mut start, plain, 0));
        // Without access: known as device memory, but not as a device pointer.
        gpu.access(second, MIB2, 0);
        assert_eq!([2, 3].map(|which| attribute(which, second)), [Ok(2), Err(1)]);
        fails!(500, gpu.cuMemGetAddressRange_v2(&raw mut start, &raw mut size, second));
        // Unmapped: unknown.
        ok!(gpu.cuMemUnmap(base, 4 * MIB2));
        for which in [1, 2, 3, 9, 11, 12, 13] {
            assert_eq!(attribute(which, base), Err(1));
        }
        fails!(500, gpu.cuMemGetAddressRange_v2(&raw mut start, &raw mut size, base));
    });
}

#[test]
fn without_initialisation_and_in_a_forked_child_only_the_version_is_available() {
    isolated("without_initialisation_and_in_a_forked_child_only_the_version_is_available", &[], || {
        let gpu = Gpu::load();
        let answers = move || unsafe {
            let (mut number, mut wide, mut size) = (0, 0, 0);
            let refused = [
                (gpu.cuDeviceGetCount)(&raw mut number),
                (gpu.cuCtxGetCurrent)(&raw mut wide),
                (gpu.cuCtxSynchronize)(),
                (gpu.cuMemGetInfo_v2)(&raw mut size, &raw mut size),
                (gpu.cuMemAlloc_v2)(&raw mut wide, 64),
                (gpu.cuMemCreate)(&raw mut wide, MIB2, &prop(0), 0),
                (gpu.cuMemUnmap)(4096, MIB2),
                (gpu.cuMemHostUnregister)(4096),
                (gpu.cuPointerGetAttribute)((&raw mut wide).cast(), 2, 4096),
                (gpu.cuStreamSynchronize)(0),
                (gpu.cuDevicePrimaryCtxRetain)(&raw mut wide, 0),
            ];
            let mut text = std::ptr::null();
            let told = [(gpu.cuDriverGetVersion)(&raw mut number), (gpu.cuGetErrorName)(2, &raw mut text)];
            (refused, told)
        };
        assert_eq!(answers(), ([3; 11], [0; 2]));
        ok!(gpu.cuInit(0));
        gpu.use_device(0);
        let child = unsafe { libc::fork() };
        if child == 0 {
            let right = answers() == ([3; 11], [0; 2]) && unsafe { (gpu.cuInit)(0) } == 3;
            unsafe { libc::_exit(i32::from(!right)) };
        }
        let mut status = 0;
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0);
    });
}

static AT_EXIT: std::sync::OnceLock<(Gpu, u64)> = std::sync::OnceLock::new();

fn say_what_works(when: &str) {
    let &(gpu, mapped) = AT_EXIT.get().unwrap();
    let (mut size, mut context, mut text) = (0, 0, std::ptr::null());
    let codes = unsafe {
        [
            (gpu.cuMemGetInfo_v2)(&raw mut size, &raw mut size),
            (gpu.cuCtxGetCurrent)(&raw mut context),
            (gpu.cuCtxSynchronize)(),
            (gpu.cuMemUnmap)(mapped, MIB2),
            (gpu.cuInit)(0),
            (gpu.cuDevicePrimaryCtxRetain)(&raw mut context, 0),
            (gpu.cuGetErrorName)(2, &raw mut text),
        ]
    };
    let line = format!("{when} {codes:?}\n");
    unsafe { libc::write(1, line.as_ptr().cast(), line.len()) };
}

extern "C" fn registered_before() {
    say_what_works("before");
}

extern "C" fn registered_after() {
    say_what_works("after");
}

#[test]
#[ignore = "part of another test"]
fn exits() {
    if std::env::var_os("SIMGPU_EXITS").is_none() {
        return;
    }
    unsafe { libc::atexit(registered_before) };
    let gpu = Gpu::start();
    AT_EXIT.set((gpu, gpu.map_new(MIB2))).ok().unwrap();
    unsafe {
        libc::atexit(registered_after);
        libc::exit(0);
    }
}

#[test]
fn exit_handlers_from_before_the_first_call_have_no_driver() {
    let output = command("exits", &[("SIMGPU_EXITS", "1")]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("after [0, 0, 0, 0, 0, 0, 0]"), "{said}");
    assert!(said.contains("before [4, 4, 4, 4, 4, 4, 4]"), "{said}");
}

#[test]
fn nvml_takes_a_uuid_with_and_without_its_prefix() {
    on_gpu("nvml_takes_a_uuid_with_and_without_its_prefix", &[("SIMGPU_DEVICES", "2")], |gpu| {
        let (mut device, mut found, mut text) = (0, 0, [0; 96]);
        ok!(gpu.nvmlInit_v2());
        ok!(gpu.nvmlDeviceGetHandleByIndex_v2(1, &raw mut device));
        ok!(gpu.nvmlDeviceGetUUID(device, text.as_mut_ptr(), 96));
        for uuid in [text.as_ptr(), text[4..].as_ptr()] {
            ok!(gpu.nvmlDeviceGetHandleByUUID(uuid, &raw mut found));
            assert_eq!(found, device);
        }
        fails!(6, gpu.nvmlDeviceGetHandleByUUID(text[5..].as_ptr(), &raw mut found));
        // People shorten them to the first group.
        let mut first = [0; 96];
        ok!(gpu.nvmlDeviceGetHandleByIndex_v2(0, &raw mut device));
        ok!(gpu.nvmlDeviceGetUUID(device, first.as_mut_ptr(), 96));
        assert_ne!(first[..12], text[..12]);
    });
}
