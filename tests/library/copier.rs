//! Restoring contents with a kernel instead of the copy engines. The result must be the same, whichever copies and whatever
//! fails.

use crate::common::{self, Gpu, MIB, free, malloc_tagged, pattern, pause, read, resume, write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use vramctl_backup::{CopyBy, set_copy_by};
use vramctl_model::Policy;

/// Large enough that its copy time is meaningful.
const LARGE: usize = 16 * MIB;

struct Program(Vec<(u64, Vec<u8>)>);

impl Program {
    fn start(sizes: &[usize]) -> Self {
        let allocate = |(seed, &bytes): (usize, &usize)| {
            let address = malloc_tagged("weights", None, bytes).unwrap();
            let contents = pattern(seed as u64, bytes);
            assert_eq!(write(address, &contents), 0);
            (address, contents)
        };
        Self(sizes.iter().enumerate().map(allocate).collect())
    }

    fn check(&self, case: &str) {
        for (address, contents) in &self.0 {
            assert!(read(*address, contents.len()).unwrap() == *contents, "{case}: other contents at {address:#x}");
        }
    }

    fn end(self) {
        self.0.iter().for_each(|(address, _)| assert_eq!(free(*address), 0));
    }
}

/// Kernel launches and engine copies to the device in one resume.
fn resume_and_count(gpu: &Gpu) -> [u64; 2] {
    gpu.reset_counts();
    resume(&[]).unwrap();
    ["cuLaunchKernel", "cuMemcpyHtoDAsync_v2"].map(|call| gpu.calls(call))
}

fn who_copies(gpu: &Gpu, copy_by: CopyBy, sizes: &[usize]) -> [u64; 2] {
    let program = Program::start(sizes);
    set_copy_by(copy_by, None);
    pause(&[]).unwrap();
    let counts = resume_and_count(gpu);
    program.check(&format!("{copy_by:?}"));
    program.end();
    counts
}

#[test]
fn the_contents_are_the_same_with_either_copier() {
    let gpu = Gpu::take();
    let sizes = [3 * MIB, MIB, LARGE + MIB];
    assert_eq!(who_copies(&gpu, CopyBy::Engines, &sizes), [0, 3]);
    assert_eq!(who_copies(&gpu, CopyBy::Kernel, &sizes), [3, 0]);
}

/// Both are tried if their times are meaningful; small copies are left to the engines.
#[test]
fn with_everything_paused_both_copiers_are_tried() {
    let gpu = Gpu::take();
    let [launches, copies] = who_copies(&gpu, CopyBy::Auto, &[LARGE; 4]);
    assert!(launches > 0 && copies > 0, "{launches} by the kernel, {copies} by the engines");
    assert_eq!(launches + copies, 4);
    assert_eq!(who_copies(&gpu, CopyBy::Auto, &[MIB; 4]), [0, 4]);
}

/// A program with more than a little active memory may run kernels on all multiprocessors, which the copy engines do not need.
/// Memory paused on another device does not count.
#[test]
fn with_active_memory_only_the_engines_copy() {
    let gpu = Gpu::take();
    let program = Program::start(&[LARGE; 4]);
    let active = common::malloc_tagged("active", Some(Policy::Discard), LARGE).unwrap();
    common::set_device(1);
    // Small pieces, which are left to the engines. With these bytes, nearly all would be paused.
    let elsewhere = Program::start(&[MIB; 48]);
    common::set_device(0);
    pause(&["weights"]).unwrap();
    assert_eq!(resume_and_count(&gpu)[0], 0, "nothing by the kernel");
    pause(&["weights"]).unwrap();
    assert_eq!(free(active), 0);
    let [launches, copies] = resume_and_count(&gpu);
    assert!(launches > 0, "{launches} by the kernel, {copies} by the engines");
    program.check("device 0");
    common::set_device(1);
    elsewhere.check("device 1");
    common::set_device(0);
    program.end();
    elsewhere.end();
}

#[test]
fn each_device_has_its_own_kernel() {
    let gpu = Gpu::take();
    let programs = [0, 1].map(|device| {
        common::set_device(device);
        Program::start(&[MIB; 2])
    });
    set_copy_by(CopyBy::Kernel, None);
    pause(&[]).unwrap();
    assert_eq!(resume_and_count(&gpu), [4, 0]);
    for (device, program) in (0..).zip(programs) {
        common::set_device(device);
        program.check("two devices");
        program.end();
    }
    common::set_device(0);
}

/// The kernel is optional: if any of it fails, the engines copy the rest and the resume succeeds.
#[test]
fn without_the_kernel_the_engines_copy() {
    let gpu = Gpu::take();
    let program = Program::start(&[LARGE; 3]);
    let cases = [
        ("cuLaunchKernel", CopyBy::Auto),
        ("cuLaunchKernel", CopyBy::Kernel),
        ("cuPointerGetAttributes", CopyBy::Auto),
        ("cuPointerGetAttributes", CopyBy::Kernel),
        ("cuEventElapsedTime", CopyBy::Auto),
    ];
    for (call, copy_by) in cases {
        set_copy_by(copy_by, None);
        pause(&[]).unwrap();
        gpu.fail(call, 1, 4242, u64::MAX);
        let [_, copies] = resume_and_count(&gpu);
        assert!(gpu.calls(call) > 0 && copies > 0, "{call} was called {} times, the engines copied {copies} times", gpu.calls(call));
        gpu.clear_faults();
        program.check(call);
    }
    program.end();
}

/// A reset destroys the kernel with its context, and it is loaded again in the next. If loading fails, the engines copy and
/// nothing of the attempt is left.
#[test]
fn a_reset_drops_the_kernel() {
    let gpu = Gpu::take();
    let mut allocated = 1;
    for call in [None, Some("cuModuleLoadData"), Some("cuModuleGetFunction"), Some("cuMemAlloc_v2"), Some("cuLaunchKernel")] {
        assert_eq!(unsafe { vramctl_intercept::hooks::cudaDeviceReset() }, 0);
        let program = Program::start(&[MIB; 2]);
        let before = gpu.footprint();
        set_copy_by(CopyBy::Kernel, None);
        gpu.reset_counts();
        if let Some(call) = call {
            // The first launch, which uploads the code to the device, fails. Waiting for the device allocates, too, and first.
            gpu.fail(call, if call == "cuMemAlloc_v2" { allocated } else { 1 }, 2, 1);
        }
        pause(&[]).unwrap();
        assert_eq!(gpu.calls("cuModuleLoadData"), u64::from(call != Some("cuMemAlloc_v2")), "{call:?}");
        allocated = if call.is_none() { gpu.calls("cuMemAlloc_v2") } else { allocated };
        gpu.clear_faults();
        let [_, copies] = resume_and_count(&gpu);
        assert_eq!(copies, if call.is_some() { 2 } else { 0 }, "{call:?}");
        program.check(&format!("{call:?}"));
        if call.is_some() {
            assert_eq!(gpu.footprint(), before, "{call:?} left something");
        }
        program.end();
    }
    // After a failure it is not retried.
    assert_eq!(unsafe { vramctl_intercept::hooks::cudaDeviceReset() }, 0);
}

/// Loading takes device memory, which must not be missing in a resume, now or later.
#[test]
fn a_device_without_memory_to_spare_gets_no_kernel() {
    let gpu = Gpu::take();
    assert_eq!(unsafe { vramctl_intercept::hooks::cudaDeviceReset() }, 0);
    let program = Program::start(&[MIB; 2]);
    set_copy_by(CopyBy::Kernel, None);
    let free = common::DEVICE_BYTES - gpu.used(0) as usize;
    // Enough for the kernel, and then nothing.
    for left in [8 * MIB, 0] {
        gpu.occupy(0, free - left);
        gpu.reset_counts();
        pause(&[]).unwrap();
        assert_eq!(gpu.calls("cuModuleLoadData"), 0);
        assert_eq!(resume_and_count(&gpu), [0, 2]);
        assert_eq!(gpu.calls("cuModuleLoadData"), 0);
    }
    program.check("a full device");
    program.end();
}

/// As in a program: the first large pause loads the kernel in the background without waiting for it, and the resume can use
/// it.
#[test]
fn a_large_pause_loads_it_in_the_background() {
    let gpu = Gpu::take();
    assert_eq!(unsafe { vramctl_intercept::hooks::cudaDeviceReset() }, 0);
    let program = Program::start(&[LARGE; 3]);
    set_copy_by(CopyBy::Auto, Some(0));
    for loaded in [1, 0] {
        gpu.reset_counts();
        pause(&[]).unwrap();
        vramctl_backup::settle();
        assert_eq!(gpu.calls("cuModuleLoadData"), loaded);
        let [launches, _] = resume_and_count(&gpu);
        assert!(launches > 0, "it is not used");
        assert_eq!(gpu.calls("cuModuleLoadData"), 0, "loaded twice");
        program.check("with the kernel");
    }
    // Small ones do not load it.
    assert_eq!(unsafe { vramctl_intercept::hooks::cudaDeviceReset() }, 0);
    let small = Program::start(&[LARGE; 2]);
    set_copy_by(CopyBy::Auto, None);
    gpu.reset_counts();
    common::cycle(&[]);
    vramctl_backup::settle();
    assert_eq!(gpu.calls("cuModuleLoadData"), 0);
    small.end();
}

/// Nothing may be loading into a context while the driver destroys it.
#[test]
fn a_reset_waits_for_a_kernel_that_is_being_loaded() {
    let gpu = Gpu::take();
    let load_a_copier = || {
        drop(Program::start(&[LARGE; 3]));
        set_copy_by(CopyBy::Auto, Some(0));
        common::cycle(&[]);
    };
    let load_a_hasher = || assert!(malloc_tagged(common::RETAINED_TAG, None, 2 * MIB).is_ok());
    for load in [&load_a_copier as &dyn Fn(), &load_a_hasher] {
        assert_eq!(unsafe { vramctl_intercept::hooks::cudaDeviceReset() }, 0);
        gpu.reset_counts();
        gpu.slow_down("cuModuleLoadData", common::LONG_MS);
        load();
        common::eventually("it is being loaded", || gpu.calls("cuModuleLoadData") == 1);
        let loaded = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(300));
                loaded.store(true, Ordering::Relaxed);
                gpu.slow_down("cuModuleLoadData", 0);
            });
            assert_eq!(unsafe { vramctl_intercept::hooks::cudaDeviceReset() }, 0);
            assert!(loaded.load(Ordering::Relaxed));
        });
    }
    set_copy_by(CopyBy::Auto, None);
}
