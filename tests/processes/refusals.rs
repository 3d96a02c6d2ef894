//! Programs on drivers that refuse virtual memory, for good or now and then: they get what plain CUDA gives, and the user is told.

use crate::common;
use crate::common::machine::{Machine, Ran};
use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;

/// What a program prints, ways of allocating and the last error, and its log; and what commands say meanwhile.
struct Seen {
    codes: Vec<String>,
    log: Vec<String>,
    status: String,
    ps: String,
}

/// Runs a program that allocates in every way, with these settings of the simulated driver.
fn run(settings: &[(&str, &str)]) -> Seen {
    let machine = Machine::new();
    let program = common::programs().join("allocates");
    let mut command = machine.cli(&["run", "--no-python", "--", program.to_str().unwrap()]);
    command.envs(settings.iter().copied()).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut codes = Vec::new();
    for line in output.by_ref().map(Result::unwrap) {
        let is_last = line.starts_with("ready");
        codes.push(line);
        if is_last {
            break;
        }
    }
    let (status, ps) = (machine.vramctl("status").out, machine.vramctl("ps").out);
    drop(child.stdin.take());
    let mut log = String::new();
    child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    assert!(child.wait().unwrap().success(), "{log}");
    Seen { codes, log: log.lines().map(str::to_owned).collect(), status, ps }
}

impl Seen {
    #[track_caller]
    fn expect_what_plain_cuda_gives(&self, case: &str) {
        let all_right = |line: &String| line.ends_with(": 0 0 0 0") || line == "ready 0 0";
        assert!(self.codes.len() == 8 && self.codes.iter().all(all_right), "{case}: {:#?} {:#?}", self.codes, self.log);
    }

    #[track_caller]
    fn expect_log(&self, lines: &[&str], case: &str) {
        let matches = self.log.len() == lines.len() && self.log.iter().zip(lines).all(|(line, wanted)| line.contains(wanted));
        assert!(matches, "{case}: {:#?}", self.log);
    }
}

#[test]
fn a_driver_that_refuses_virtual_memory_leaves_the_program_with_plain_memory_and_one_warning() {
    for fault in [
        "cuMemGetAllocationGranularity:1:801:*",
        "cuMemCreate:1:801:*",
        "cuMemCreate:1:1:*",
        "cuMemAddressReserve:1:801:*",
        "cuMemMap:1:999:*",
        "cuMemSetAccess:1:999:*",
    ] {
        let seen = run(&[("SIMGPU_FAIL", fault)]);
        seen.expect_what_plain_cuda_gives(fault);
        let call = fault.split(':').next().unwrap();
        seen.expect_log(&[&format!("warn: GPU-73696d75: the driver refuses virtual memory ({call} returned ")], fault);
        assert!(seen.status.contains("The driver refuses virtual memory on GPU 0 (GPU-73696d75)"), "{fault}: {}", seen.status);
        assert!(seen.status.contains("allocates (left to CUDA): 8.00 MiB"), "{fault}: {}", seen.status);
        assert!(seen.ps.contains("empty, refused by the driver"), "{fault}: {}", seen.ps);
    }
}

/// What a driver refuses once, it may grant a moment later.
#[test]
fn a_driver_that_refuses_virtual_memory_once_is_asked_again() {
    for fault in ["cuMemCreate:2:999:1", "cuMemAddressReserve:3:999:1", "cuMemMap:1:600:1", "cuMemSetAccess:2:600:1"] {
        let seen = run(&[("SIMGPU_FAIL", fault)]);
        seen.expect_what_plain_cuda_gives(fault);
        seen.expect_log(&[], fault);
        assert!(!seen.status.contains("refuses") && seen.status.contains("default  active  8.00 MiB"), "{fault}: {}", seen.status);
    }
    // All tries for one request.
    let seen = run(&[("SIMGPU_FAIL", "cuMemSetAccess:1:600:6")]);
    seen.expect_what_plain_cuda_gives("six times");
    seen.expect_log(&["the driver refuses virtual memory (cuMemSetAccess returned 600 (CUDA_ERROR_NOT_READY))"], "six times");
    assert!(!seen.status.contains("refuses") && seen.status.contains("default  active  8.00 MiB"), "{}", seen.status);
}

/// As in WSL 2 (pytorch/pytorch#192330).
#[test]
fn memory_is_managed_without_what_the_driver_refuses() {
    let seen = run(&[("SIMGPU_NO_RDMA", "1")]);
    seen.expect_what_plain_cuda_gives("no RDMA");
    seen.expect_log(&["managed memory goes without: network cards cannot register it (GPUDirect RDMA)"], "no RDMA");
    assert!(seen.status.contains("default  active  8.00 MiB") && !seen.status.contains("refuses"), "{}", seen.status);
}

/// To the program it is freed; the driver takes it back later.
#[test]
fn a_free_succeeds_whatever_the_driver_refuses_to_take_back() {
    let of_memory = ["cuMemUnmap:1:999:*", "cuMemRelease:1:999:*", "cuMemAddressFree:1:999:*"];
    // Of the wait for the device's work, and of the note of where its stream is.
    let of_waits = ["cuCtxRecordEvent:1:999:*", "cuEventCreate:1:999:*", "cuEventRecord:1:999:*"];
    for fault in of_memory.into_iter().chain(of_waits) {
        let seen = run(&[("SIMGPU_FAIL", fault)]);
        seen.expect_what_plain_cuda_gives(fault);
        seen.expect_log(&[], fault);
    }
}

#[test]
fn lack_of_memory_stays_lack_of_memory() {
    let seen = run(&[("SIMGPU_FAIL", "cuMemCreate:1:2:1")]);
    assert_eq!(seen.codes[..2], ["cudaMalloc: 2 -1 -1 -1", "cudaMalloc: 0 0 0 0"], "{:#?}", seen.log);
    assert!(seen.log[0].contains("out of memory: allocates asked for 8.00 MiB"), "{:#?}", seen.log);
}

#[test]
fn the_doctor_tries_what_programs_will_need() {
    let machine = Machine::new();
    let doctor = |name, value| Ran::of(machine.cli("doctor").env(name, value));
    for fault in ["cuMemCreate:1:801:*", "cuMemMap:1:999:*", "cuMemSetAccess:1:999:*", "cuMemAddressReserve:1:801:*"] {
        let call = fault.split(':').next().unwrap();
        doctor("SIMGPU_FAIL", fault).expect(1, &format!("refuses virtual memory ({call} returned "), "");
    }
    doctor("SIMGPU_FAIL", "cuMemSetAccess:1:600:1").expect(0, "", "");
    let without = doctor("SIMGPU_NO_RDMA", "1").expect(0, "network cards cannot register it (GPUDirect RDMA)", "");
    assert!(without.out.lines().any(|line| line.starts_with("warning") && line.contains("RDMA")), "{}", without.out);
}
