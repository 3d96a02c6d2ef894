//! Kernels that wait for other processes, or for the host.

// Every call here is a foreign function, with pointers to the test's own variables.
#![allow(clippy::undocumented_unsafe_blocks)]

#[macro_use]
mod common;
use common::{Gpu, MIB2, Scratch, command, isolated, start_until};
use std::ffi::{CString, c_void};
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
    isolated("a_collective_ends_when_all_processes_join_and_never_if_one_has_died", &[("SIMGPU_DIR", scratch.text())], || {
        let gpu = Gpu::start();
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
    isolated("a_machine_of_one_process_has_no_collectives", &[], || {
        let gpu = Gpu::start();
        assert_eq!(gpu.collective(gpu.kernel("simgpu_collective"), 0, 1, gpu.alloc(8), 0), 801);
    });
}

/// Its memory must stay while it runs.
#[test]
fn a_persistent_kernel_ends_when_its_word_is_set() {
    isolated("a_persistent_kernel_ends_when_its_word_is_set", &[], || {
        let gpu = Gpu::start();
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
        launch();
        sleep(MOMENT);
        fails!(600, gpu.cuStreamQuery(stream));
        unsafe { (word as *mut u32).write_volatile(1) };
        ok!(gpu.cuStreamSynchronize(stream));
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
