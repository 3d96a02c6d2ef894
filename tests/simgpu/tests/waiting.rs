//! Kernels that wait for other processes, or for the host; and which calls wait for work, and whom they hold up.

// Every call here is a foreign function, with pointers to the test's own variables.
#![allow(clippy::undocumented_unsafe_blocks)]

#[macro_use]
mod common;
use common::{Gate, Gpu, MIB2, Scratch, command, isolated, on_gpu, start_until};
use std::ffi::{CStr, CString, c_void};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

const NON_BLOCKING: u32 = 1;
const MOMENT: Duration = Duration::from_millis(50);

impl Gpu {
    fn kernel(&self, name: &str) -> u64 {
        let gpu = self;
        let image = CString::new(format!(".version 7.0\n.visible .entry {name}(")).unwrap();
        let (name, mut module, mut function) = (CString::new(name).unwrap(), 0, 0);
        ok!(gpu.cuModuleLoadData(&raw mut module, image.as_ptr()));
        ok!(gpu.cuModuleGetFunction(&raw mut function, module, name.as_ptr()));
        function
    }

    fn collective(&self, function: u64, rank: u32, ranks: u32, address: u64, stream: u64) -> u32 {
        let communicator = 1_u64;
        let arguments: [*const c_void; 4] =
            [(&raw const communicator).cast(), (&raw const rank).cast(), (&raw const ranks).cast(), (&raw const address).cast()];
        unsafe { (self.cuLaunchKernel)(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments.as_ptr(), 0) }
    }

    fn number(&self, address: u64) -> u64 {
        u64::from_le_bytes(self.download(address, 8).try_into().unwrap())
    }

    fn store(&self, address: u64, number: u64) {
        let gpu = self;
        ok!(gpu.cuMemcpyHtoD_v2(address, number.to_le_bytes().as_ptr() as u64, 8));
    }
}

/// The second rank: does 100 collectives, and then begins one more.
#[test]
#[ignore = "a part of another test"]
fn second_rank() {
    let gpu = Gpu::start();
    let (function, address, stream) = (gpu.kernel("simgpu_collective"), gpu.alloc(8), gpu.stream(NON_BLOCKING));
    gpu.store(address, 1);
    for _ in 0..100 {
        assert_eq!(gpu.collective(function, 1, 2, address, stream), 0);
    }
    ok!(gpu.cuStreamSynchronize(stream));
    println!("sum {}", gpu.number(address));
    sleep(Duration::from_secs(50));
}

#[test]
fn a_collective_ends_when_all_processes_join_and_never_if_one_has_died() {
    let scratch = Scratch::new("collective");
    on_gpu("a_collective_ends_when_all_processes_join_and_never_if_one_has_died", &[("SIMGPU_DIR", scratch.text())], |gpu| {
        let (function, address, stream) = (gpu.kernel("simgpu_collective"), gpu.alloc(8), gpu.stream(NON_BLOCKING));
        gpu.store(address, 2);
        assert_eq!(gpu.collective(function, 0, 2, address, stream), 0);
        sleep(MOMENT);
        fails!(600, gpu.cuStreamQuery(stream));
        for _ in 1..100 {
            assert_eq!(gpu.collective(function, 0, 2, address, stream), 0);
        }
        let directory = std::env::var("SIMGPU_DIR").unwrap();
        // Each sum is brought to the next collective by both.
        let sum = (0..99).fold(3_u64, |sum, _| sum.wrapping_mul(2));
        let mut other = start_until(&mut command("second_rank", &[("SIMGPU_DIR", &directory)]), &format!("sum {sum}"));
        ok!(gpu.cuStreamSynchronize(stream));
        assert_eq!(gpu.number(address), sum);
        other.kill().unwrap();
        other.wait().unwrap();
        assert_eq!(gpu.collective(function, 0, 2, address, stream), 0);
        sleep(MOMENT);
        fails!(600, gpu.cuStreamQuery(stream));
        assert_eq!(gpu.collective(function, 2, 2, address, stream), 1);
    });
}

#[test]
fn a_machine_of_one_process_has_no_collectives() {
    on_gpu("a_machine_of_one_process_has_no_collectives", &[], |gpu| {
        assert_eq!(gpu.collective(gpu.kernel("simgpu_collective"), 0, 1, gpu.alloc(8), 0), 801);
    });
}

/// Its memory must stay while it runs.
#[test]
fn a_persistent_kernel_ends_when_its_word_is_set() {
    on_gpu("a_persistent_kernel_ends_when_its_word_is_set", &[], |gpu| {
        let (function, stream, mut word) = (gpu.kernel("simgpu_persistent"), gpu.stream(NON_BLOCKING), 0_u64);
        ok!(gpu.cuMemHostAlloc(&raw mut word, 4, 0));
        let (pointer, bytes) = (gpu.reserve(MIB2), MIB2 as u64);
        let handle = gpu.create(MIB2);
        ok!(gpu.cuMemMap(pointer, MIB2, 0, handle, 0));
        gpu.access(pointer, MIB2, 3);
        let launch = || {
            let arguments: [*const c_void; 3] = [(&raw const word).cast(), (&raw const pointer).cast(), (&raw const bytes).cast()];
            ok!(gpu.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments.as_ptr(), 0));
        };
        // NVML counts kernels: all of the time while this one runs, none afterwards.
        let mut device = 0;
        ok!(gpu.nvmlInit_v2());
        ok!(gpu.nvmlDeviceGetHandleByIndex_v2(0, &raw mut device));
        let becomes = |percent| {
            let (begun, mut rates) = (Instant::now(), [u32::MAX; 2]);
            while rates[0] != percent {
                assert!(begun.elapsed() < Duration::from_secs(100), "{rates:?}");
                ok!(gpu.nvmlDeviceGetUtilizationRates(device, &raw mut rates));
                sleep(Duration::from_millis(1));
            }
        };
        becomes(0);
        launch();
        sleep(MOMENT);
        fails!(600, gpu.cuStreamQuery(stream));
        let warmth = || {
            let (mut celsius, mut milliwatts) = (0, 0);
            ok!(gpu.nvmlDeviceGetTemperature(device, 0, &raw mut celsius));
            ok!(gpu.nvmlDeviceGetPowerUsage(device, &raw mut milliwatts));
            (celsius, milliwatts)
        };
        becomes(100);
        assert_eq!(warmth(), (64, 675_000));
        unsafe { (word as *mut u32).write_volatile(1) };
        ok!(gpu.cuStreamSynchronize(stream));
        becomes(0);
        assert_eq!(warmth(), (31, 75_000));
        unsafe { (word as *mut u32).write_volatile(0) };
        launch();
        sleep(MOMENT);
        ok!(gpu.cuMemUnmap(pointer, MIB2));
        let begun = Instant::now();
        while unsafe { (gpu.cuStreamQuery)(stream) } == 600 {
            assert!(begun.elapsed() < Duration::from_secs(100));
            sleep(Duration::from_millis(1));
        }
        fails!(700, gpu.cuStreamQuery(stream));
    });
}

const EMPTY: &CStr = c".version 7.0\n.visible .entry nothing() { ret; }\n";

/// Makes a call on another thread while a stream waits for a value, and submits work to another stream meanwhile. Whether the call waits
/// for the work, and whether it holds up the submission.
fn meanwhile(gpu: &Gpu, call: impl FnOnce(&Gpu) + Send) -> (bool, bool) {
    let (gate, context) = (Gate::new(gpu), current(gpu));
    let (busy, other, mut event) = (gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING), 0);
    ok!(gpu.cuEventCreate(&raw mut event, 2));
    ok!(gpu.cuStreamWaitValue32_v2(busy, gate.0, 1, 0));
    let (called, submitted) = (AtomicBool::new(false), AtomicBool::new(false));
    let answer = std::thread::scope(|scope| {
        scope.spawn(|| {
            ok!(gpu.cuCtxSetCurrent(context));
            call(gpu);
            called.store(true, Ordering::SeqCst);
        });
        sleep(MOMENT);
        let waits = !called.load(Ordering::SeqCst);
        scope.spawn(|| {
            ok!(gpu.cuCtxSetCurrent(context));
            ok!(gpu.cuEventRecord(event, other));
            submitted.store(true, Ordering::SeqCst);
        });
        sleep(MOMENT);
        let answer = (waits, !submitted.load(Ordering::SeqCst));
        gate.set(1);
        answer
    });
    ok!(gpu.cuCtxSynchronize());
    answer
}

fn current(gpu: &Gpu) -> u64 {
    let mut context = 0;
    ok!(gpu.cuCtxGetCurrent(&raw mut context));
    context
}

/// As measured with driver 580 on an H100.
#[test]
fn which_calls_wait_and_whom_they_hold_up() {
    on_gpu("which_calls_wait_and_whom_they_hold_up", &[], |gpu| {
        let page = vec![0_u8; 8192];
        let page = (page.as_ptr() as u64).next_multiple_of(4096);
        ok!(gpu.cuMemHostRegister_v2(page, 4096, 0));
        let (memory, mut host, mut module) = (gpu.alloc(4096), 0, 0);
        ok!(gpu.cuMemHostAlloc(&raw mut host, 4096, 0));
        ok!(gpu.cuModuleLoadData(&raw mut module, EMPTY.as_ptr()));
        assert_eq!(meanwhile(&gpu, |gpu| ok!(gpu.cuMemFree_v2(memory))), (true, true));
        assert_eq!(meanwhile(&gpu, |gpu| ok!(gpu.cuMemHostUnregister(page))), (true, true));
        assert_eq!(meanwhile(&gpu, |gpu| ok!(gpu.cuMemFreeHost(host))), (true, true));
        assert_eq!(meanwhile(&gpu, |gpu| ok!(gpu.cuModuleLoadData(&mut 0, EMPTY.as_ptr()))), (true, true));
        assert_eq!(meanwhile(&gpu, |gpu| ok!(gpu.cuModuleUnload(module))), (true, false));
        assert_eq!(meanwhile(&gpu, |gpu| ok!(gpu.cuCtxSynchronize())), (true, false));
        assert_eq!(meanwhile(&gpu, |gpu| _ = gpu.alloc(4096)), (false, false));
        assert_eq!(meanwhile(&gpu, |gpu| ok!(gpu.cuMemHostRegister_v2(page, 4096, 0))), (false, false));
        assert_eq!(meanwhile(&gpu, |gpu| _ = gpu.map_new(MIB2)), (false, false));
    });
}

/// Begins a call on another thread while a stream of the current context waits for a value, and does something else meanwhile. Whether the call
/// waits for the work.
fn while_busy(gpu: &Gpu, call: impl FnOnce() -> u32 + Send, meanwhile: impl FnOnce()) -> bool {
    let (gate, busy, called) = (Gate::new(gpu), gpu.stream(NON_BLOCKING), AtomicBool::new(false));
    ok!(gpu.cuStreamWaitValue32_v2(busy, gate.0, 1, 0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(call(), 0);
            called.store(true, Ordering::SeqCst);
        });
        sleep(MOMENT);
        let waits = !called.load(Ordering::SeqCst);
        meanwhile();
        gate.set(1);
        waits
    })
}

/// As measured with driver 580 on an H200.
#[test]
fn the_end_of_a_context_waits_for_all_work_of_its_device_and_holds_nobody_up() {
    isolated("the_end_of_a_context_waits_for_all_work_of_its_device_and_holds_nobody_up", &[("SIMGPU_DEVICES", "2")], || {
        let (gpu, mut one, mut far, mut event) = (Gpu::start(), 0, 0, 0);
        let primary = current(&gpu);
        let create = |context: &mut u64, device| ok!(gpu.cuCtxCreate_v2(&raw mut *context, 0, device));
        create(&mut far, 1);
        create(&mut one, 0);
        ok!(gpu.cuEventCreate(&raw mut event, 2));
        ok!(gpu.cuCtxSetCurrent(primary));
        // An idle one, while another context of the device has work.
        let asked = || {
            let (mut id, mut device) = (0, -1);
            ok!(gpu.cuCtxGetId(one, &raw mut id));
            ok!(gpu.cuCtxPushCurrent_v2(one));
            ok!(gpu.cuCtxGetDevice(&raw mut device));
            ok!(gpu.cuEventQuery(event));
            ok!(gpu.cuCtxPopCurrent_v2(&mut 0));
            let memory = gpu.alloc(4096);
            ok!(gpu.cuMemsetD8Async(memory, 1, 4096, gpu.stream(NON_BLOCKING)));
        };
        assert!(while_busy(&gpu, || unsafe { (gpu.cuCtxDestroy_v2)(one) }, asked));
        fails!(709, gpu.cuCtxGetId(one, &mut 0));
        // One of another device.
        assert!(!while_busy(&gpu, || unsafe { (gpu.cuCtxDestroy_v2)(far) }, || ()));
        // A primary one: the driver does not say meanwhile whether it is active.
        create(&mut one, 0);
        let told = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let asks = || {
                scope.spawn(|| {
                    ok!(gpu.cuDevicePrimaryCtxGetState(0, &mut 0, &mut 0));
                    told.store(true, Ordering::SeqCst);
                });
                sleep(MOMENT);
                assert!(!told.load(Ordering::SeqCst));
            };
            assert!(while_busy(&gpu, || unsafe { (gpu.cuDevicePrimaryCtxReset_v2)(0) }, asks));
        });
    });
}

/// A function that came with a later version of CUDA is missing.
#[test]
fn an_older_driver_has_fewer_functions() {
    on_gpu("an_older_driver_has_fewer_functions", &[("SIMGPU_CUDA", "12.4")], |gpu| {
        let (context, mut event) = (current(&gpu), 0);
        ok!(gpu.cuEventCreate(&raw mut event, 2));
        ok!(gpu.cuCtxGetId(context, &mut 0));
        fails!(500, gpu.cuCtxRecordEvent(context, event));
    });
}

/// A launch that waits for room in a stream's queue holds the context's lock.
#[test]
fn a_launch_on_a_full_stream_holds_others_up() {
    on_gpu("a_launch_on_a_full_stream_holds_others_up", &[], |gpu| {
        let (context, gate, mut module, mut nothing) = (current(&gpu), Gate::new(&gpu), 0, 0);
        ok!(gpu.cuModuleLoadData(&raw mut module, EMPTY.as_ptr()));
        ok!(gpu.cuModuleGetFunction(&raw mut nothing, module, c"nothing".as_ptr()));
        let (full, launched, created) = (gpu.stream(NON_BLOCKING), AtomicU64::new(0), AtomicBool::new(false));
        ok!(gpu.cuStreamWaitValue32_v2(full, gate.0, 1, 0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                ok!(gpu.cuCtxSetCurrent(context));
                for _ in 0..1100 {
                    ok!(gpu.cuLaunchKernel(nothing, 1, 1, 1, 1, 1, 1, 0, full, std::ptr::null(), 0));
                    launched.fetch_add(1, Ordering::SeqCst);
                }
            });
            while launched.load(Ordering::SeqCst) < 1020 {
                sleep(Duration::from_millis(1));
            }
            sleep(MOMENT);
            scope.spawn(|| {
                ok!(gpu.cuCtxSetCurrent(context));
                ok!(gpu.cuEventCreate(&mut 0, 2));
                created.store(true, Ordering::SeqCst);
            });
            sleep(MOMENT);
            assert_eq!((launched.load(Ordering::SeqCst), created.load(Ordering::SeqCst)), (1020, false));
            fails!(600, gpu.cuStreamQuery(full));
            gate.set(1);
        });
        assert_eq!((launched.load(Ordering::SeqCst), created.load(Ordering::SeqCst)), (1100, true));
    });
}

/// Other contexts go on.
#[test]
fn a_call_that_waits_holds_up_its_own_context_alone() {
    isolated("a_call_that_waits_holds_up_its_own_context_alone", &[], || {
        let (gpu, mut other) = (Gpu::start(), 0);
        let (gate, stream, memory, mine) = (Gate::new(&gpu), gpu.stream(NON_BLOCKING), gpu.alloc(4096), current(&gpu));
        ok!(gpu.cuStreamWaitValue32_v2(stream, gate.0, 1, 0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                ok!(gpu.cuCtxSetCurrent(mine));
                ok!(gpu.cuMemFree_v2(memory));
            });
            sleep(MOMENT);
            ok!(gpu.cuCtxCreate_v2(&raw mut other, 0, 0));
            let (stream, memory) = (gpu.stream(NON_BLOCKING), gpu.alloc(4096));
            ok!(gpu.cuMemsetD8Async(memory, 1, 4096, stream));
            ok!(gpu.cuMemFree_v2(memory));
            gate.set(1);
        });
    });
}

#[test]
fn an_event_of_a_context_happens_when_all_work_so_far_is_done() {
    on_gpu("an_event_of_a_context_happens_when_all_work_so_far_is_done", &[], |gpu| {
        let (context, mut event) = (current(&gpu), 0);
        ok!(gpu.cuEventCreate(&raw mut event, 2));
        ok!(gpu.cuCtxRecordEvent(context, event));
        ok!(gpu.cuEventQuery(event));
        let gates = [Gate::new(&gpu), Gate::new(&gpu)];
        for (gate, flags) in gates.iter().zip([NON_BLOCKING, 0]) {
            ok!(gpu.cuStreamWaitValue32_v2(gpu.stream(flags), gate.0, 1, 0));
        }
        ok!(gpu.cuCtxRecordEvent(context, event));
        // No stream waits for it, and later work does not count.
        let (later, memory) = (Gate::new(&gpu), gpu.alloc(4096));
        ok!(gpu.cuMemsetD8Async(memory, 1, 4096, gpu.stream(NON_BLOCKING)));
        ok!(gpu.cuStreamWaitValue32_v2(gpu.stream(NON_BLOCKING), later.0, 1, 0));
        fails!(600, gpu.cuEventQuery(event));
        gates[0].set(1);
        sleep(MOMENT);
        fails!(600, gpu.cuEventQuery(event));
        gates[1].set(1);
        ok!(gpu.cuEventSynchronize(event));
        later.set(1);
        // "Such a call will invalidate all the conflicting captures", whatever the thread's mode.
        let (stream, mut graph, mut mode) = (gpu.stream(NON_BLOCKING), 0, 2);
        ok!(gpu.cuThreadExchangeStreamCaptureMode(&raw mut mode));
        ok!(gpu.cuStreamBeginCapture_v2(stream, 2));
        fails!(900, gpu.cuCtxRecordEvent(context, event));
        fails!(901, gpu.cuStreamEndCapture(stream, &raw mut graph));
        fails!(400, gpu.cuCtxRecordEvent(context, 1));
    });
}
