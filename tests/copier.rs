//! Contents that a kernel copies back, in place of the copy engines: the same bytes, whoever copies, and whatever of it fails.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks)]

mod common;

use common::{Gpu, MIB, free, malloc_tagged, pattern, pause, read, resume, write};
use vramctl::backup::set_copy_by;
use vramctl::config::CopyBy;

/// Large enough that how long one took says something.
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

/// Launches of kernels and copies to the device by the engines in one resume.
fn who_copies(gpu: &Gpu, copy_by: Option<CopyBy>, sizes: &[usize]) -> [u64; 2] {
    let program = Program::start(sizes);
    set_copy_by(copy_by);
    pause(&[]).unwrap();
    gpu.reset_counts();
    resume(&[]).unwrap();
    let calls = ["cuLaunchKernel", "cuMemcpyHtoDAsync_v2"].map(|call| gpu.calls(call));
    program.check(&format!("{copy_by:?}"));
    program.end();
    calls
}

#[test]
fn the_contents_are_the_same_whoever_copies() {
    let gpu = Gpu::take();
    let sizes = [3 * MIB, MIB, LARGE + MIB];
    assert_eq!(who_copies(&gpu, Some(CopyBy::Engines), &sizes), [0, 3]);
    assert_eq!(who_copies(&gpu, Some(CopyBy::Kernel), &sizes), [3, 0]);
}

/// Right after a release both are tried where that tells something, and small copies are left to the engines.
#[test]
fn right_after_a_release_both_are_tried() {
    let gpu = Gpu::take();
    let [launches, copies] = who_copies(&gpu, None, &[LARGE; 4]);
    assert!(launches > 0 && copies > 0, "{launches} by the kernel, {copies} by the engines");
    assert_eq!(launches + copies, 4);
    assert_eq!(who_copies(&gpu, None, &[MIB; 4]), [0, 4]);
}

/// Nobody needs the kernel: whatever of it cannot be had, the engines do the rest and the resume succeeds.
#[test]
fn without_the_kernel_the_engines_copy() {
    let gpu = Gpu::take();
    let program = Program::start(&[LARGE; 3]);
    let calls = ["cuLaunchKernel", "cuPointerGetAttribute", "cuEventElapsedTime"];
    for (call, copy_by) in calls.iter().flat_map(|call| [(call, None), (call, Some(CopyBy::Kernel))]) {
        set_copy_by(copy_by);
        pause(&[]).unwrap();
        gpu.fail(call, 1, 4242, u64::MAX);
        resume(&[]).unwrap_or_else(|error| panic!("{call}: {error}"));
        gpu.clear_faults();
        program.check(call);
    }
    program.end();
}

/// The kernel goes with a context that is reset, and is loaded anew in the next; if it cannot be, the engines copy.
#[test]
fn a_reset_takes_the_kernel_along() {
    let gpu = Gpu::take();
    for call in [None, Some("cuModuleLoadData"), Some("cuModuleGetFunction"), Some("cuMemAlloc_v2"), Some("cuLaunchKernel")] {
        assert_eq!(unsafe { vramctl::interpose::cudaDeviceReset() }, 0);
        let program = Program::start(&[MIB; 2]);
        set_copy_by(Some(CopyBy::Kernel));
        pause(&[]).unwrap();
        gpu.reset_counts();
        if let Some(call) = call {
            gpu.fail(call, 1, 2, 1);
        }
        resume(&[]).unwrap();
        assert_eq!(gpu.calls("cuModuleLoadData"), 1, "{call:?}");
        // The launch that fails is the one that puts the code on the device.
        assert_eq!(gpu.calls("cuMemcpyHtoDAsync_v2"), if call.is_some() { 2 } else { 0 }, "{call:?}");
        gpu.clear_faults();
        program.check(&format!("{call:?}"));
        program.end();
    }
}
