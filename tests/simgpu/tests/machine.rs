//! Several processes on one simulated machine.

// Every call here is a foreign function, with pointers to the test's own variables.
#![allow(clippy::undocumented_unsafe_blocks)]

#[macro_use]
mod common;
use common::{Gpu, MIB2, Process, Scratch, command, isolated, on_gpu, prop, start_until};
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Not a test: takes 6 MiB and waits for end of file on stdin.
#[test]
#[ignore = "part of another test"]
fn holds_six_mebibytes() {
    if std::env::var_os("SIMGPU_DIR").is_none() {
        return;
    }
    let gpu = Gpu::start();
    gpu.create(3 * MIB2);
    println!("holding");
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read_line(&mut String::new());
}

fn smi(directory: &str, argument: &str) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_simgpu-smi")).arg(argument).env("SIMGPU_DIR", directory).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// As with `CUDA_VISIBLE_DEVICES`, where the driver and NVML count differently.
#[test]
fn a_process_sees_the_devices_that_it_is_given_in_that_order() {
    let given = [("SIMGPU_DEVICES", "3"), ("CUDA_VISIBLE_DEVICES", "2,0")];
    on_gpu("a_process_sees_the_devices_that_it_is_given_in_that_order", &given, |gpu| {
        let (mut count, mut device, mut uuid, mut text, mut bus) = (0, 0, [0_u8; 16], [0; 96], [0; 32]);
        ok!(gpu.nvmlInit_v2());
        for ordinals in ["before memory is in use", "after"] {
            ok!(gpu.cuDeviceGetCount(&raw mut count));
            assert_eq!(count, 2, "{ordinals}");
            for (ordinal, index) in [(0, 2), (1, 0)] {
                ok!(gpu.cuDeviceGetUuid_v2(&raw mut uuid, ordinal));
                ok!(gpu.nvmlDeviceGetHandleByIndex_v2(index, &raw mut device));
                ok!(gpu.nvmlDeviceGetUUID(device, text.as_mut_ptr(), 96));
                // SAFETY: the call above has ended it.
                let text = unsafe { std::ffi::CStr::from_ptr(text.as_ptr()) }.to_str().unwrap().replace('-', "");
                assert_eq!(text, format!("GPU{:032x}", u128::from_be_bytes(uuid)), "{ordinals}: {ordinal}");
                ok!(gpu.cuDeviceGetPCIBusId(bus.as_mut_ptr(), 32, ordinal));
                let mut again = -1;
                ok!(gpu.cuDeviceGetByPCIBusId(&raw mut again, bus.as_ptr()));
                assert_eq!(again, ordinal, "{ordinals}");
            }
            fails!(101, gpu.cuDeviceGetUuid_v2(&raw mut uuid, 2));
            gpu.create(MIB2);
        }
    });
}

fn takes_turns(directory: &str) {
    let shared = [("SIMGPU_DIR", directory), ("SIMGPU_MEMORY", "8M")];
    let mut first = start_until(command("holds_six_mebibytes", &shared).stdin(Stdio::piped()), "holding");
    assert_eq!(smi(directory, "used"), "6");
    let json = smi(directory, "--json");
    assert!(json.contains(&format!(r#""pid":{},"used":6291456"#, first.id())), "{json}");

    // SAFETY: tests of this file run in processes of their own.
    unsafe { std::env::set_var("SIMGPU_DIR", directory) };
    let gpu = Gpu::start();
    let mut handle = 0;
    fails!(2, gpu.cuMemCreate(&raw mut handle, 2 * MIB2, &prop(0), 0));
    ok!(gpu.cuMemCreate(&raw mut handle, MIB2, &prop(0), 0));

    // NVML reports both.
    let (mut device, mut memory, mut count) = (0, [0; 3], 1);
    let mut processes = [Process::default(); 4];
    fails!(1, gpu.nvmlDeviceGetHandleByIndex_v2(0, &raw mut device));
    ok!(gpu.nvmlInit_v2());
    ok!(gpu.nvmlDeviceGetHandleByPciBusId_v2(c"00000000:10:00.0".as_ptr(), &raw mut device));
    ok!(gpu.nvmlDeviceGetMemoryInfo(device, &raw mut memory));
    assert_eq!(memory, [8 << 20, 0, 8 << 20]);
    fails!(7, gpu.nvmlDeviceGetComputeRunningProcesses_v3(device, &raw mut count, processes.as_mut_ptr()));
    assert_eq!(count, 2);
    ok!(gpu.nvmlDeviceGetComputeRunningProcesses_v3(device, &raw mut count, processes.as_mut_ptr()));
    let held = processes[..2].iter().find(|process| process.pid == first.id());
    assert_eq!(held.map(|process| process.used), Some(6 << 20));

    // After a kill its memory is free at once.
    first.kill().unwrap();
    first.wait().unwrap();
    let mut more = 0;
    ok!(gpu.cuMemCreate(&raw mut more, 3 * MIB2, &prop(0), 0));
    assert_eq!(smi(directory, "used"), "8");
}

#[test]
fn capacity_is_shared_and_a_killed_process_gives_it_back() {
    isolated("capacity_is_shared_and_a_killed_process_gives_it_back", &[], || {
        let scratch = Scratch::new("shared");
        takes_turns(scratch.text());
    });
}

#[test]
fn many_processes_never_take_more_than_there_is() {
    isolated("many_processes_never_take_more_than_there_is", &[], || {
        let scratch = Scratch::new("many");
        let shared = [("SIMGPU_DIR", scratch.text()), ("SIMGPU_MEMORY", "8M")];
        let mut children: Vec<_> = (0..4).map(|_| command("grabs_for_a_while", &shared).spawn().unwrap()).collect();
        let end = Instant::now() + Duration::from_secs(100);
        while children.iter_mut().any(|child| child.try_wait().unwrap().is_none()) {
            assert!(Instant::now() < end);
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(children.iter_mut().all(|child| child.wait().unwrap().success()));
        assert_eq!(smi(scratch.text(), "used"), "0");
    });
}

/// Not a test: allocates and frees memory for a while.
#[test]
#[ignore = "part of another test"]
fn grabs_for_a_while() {
    if std::env::var_os("SIMGPU_DIR").is_none() {
        return;
    }
    let gpu = Gpu::start();
    let (mut free, mut total) = (0usize, 0usize);
    let (mut taken, mut refused) = (Vec::new(), 0);
    let end = Instant::now() + Duration::from_millis(300);
    while Instant::now() < end {
        let mut handle = 0;
        match unsafe { (gpu.cuMemCreate)(&raw mut handle, MIB2, &prop(0), 0) } {
            0 => taken.push(handle),
            2 => refused += 1,
            other => panic!("{other}"),
        }
        // A total above the capacity would wrap around here.
        ok!(gpu.cuMemGetInfo_v2(&raw mut free, &raw mut total));
        assert!(free <= total && total == 8 << 20);
        if taken.len() > 2 || refused % 3 == 2 {
            if let Some(handle) = taken.pop() {
                ok!(gpu.cuMemRelease(handle));
            }
            refused = 0;
        }
    }
}

#[test]
fn invalid_settings_are_reported_and_ignored() {
    let output = command("starts", &[("SIMGPU_MEMORY", "lots"), ("SIMGPU_FAIL", "nonsense")]).output();
    let output = output.unwrap();
    assert!(output.status.success());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("SIMGPU_MEMORY=lots") && said.contains("nonsense"), "{said}");
}

/// Not a test: initialises CUDA.
#[test]
#[ignore = "part of another test"]
fn starts() {
    Gpu::start();
}
