//! After a large pause or resume, a worker makes the driver account for zeroed memory ("a look"): once, leaving no trace, and not while the
//! program exits. `scripts/bench` measures the effect.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks)]

mod common;

use common::{Gpu, MIB, free, malloc_tagged, pause, resume};
use std::process::Command;
use std::time::Duration;
use vramctl_backup::CopyBy;
use vramctl_core::transition::cleaning::{self, When};
use vramctl_model::Policy;

/// Lets looks run only when the test calls `settle`.
struct Looks;

impl Looks {
    /// Looks after every pause or resume of at least this many bytes.
    fn from(bytes: usize) -> Self {
        cleaning::set_when(When { after: Duration::from_secs(600), bytes: bytes as u64 });
        Self
    }
}

impl Drop for Looks {
    fn drop(&mut self) {
        cleaning::settle();
        cleaning::set_when(When::default());
    }
}

fn cache(bytes: usize) -> u64 {
    malloc_tagged("cache", Some(Policy::Discard), bytes).unwrap()
}

/// Number of allocations and releases of physical memory.
fn counts(gpu: &Gpu) -> (u64, u64) {
    (gpu.calls("cuMemCreate"), gpu.calls("cuMemRelease"))
}

#[test]
fn one_check_follows_a_pause_and_a_resume_and_leaves_nothing() {
    let gpu = Gpu::take();
    let address = cache(8 * MIB);
    let _looks = Looks::from(8 * MIB);
    let active = gpu.footprint();
    gpu.reset_counts();
    pause(&[]).unwrap();
    cleaning::settle();
    assert_eq!(counts(&gpu), (1, 2), "the pause's release, and the look's");
    gpu.reset_counts();
    resume(&[]).unwrap();
    cleaning::settle();
    assert_eq!(counts(&gpu), (2, 1), "the resume's creation, and the look's");
    assert_eq!(gpu.footprint(), active);
    assert_eq!(free(address), 0);
}

#[test]
fn one_check_covers_everything_before_it() {
    let gpu = Gpu::take();
    let address = cache(8 * MIB);
    gpu.reset_counts();
    {
        let _looks = Looks::from(8 * MIB);
        for _ in 0..3 {
            pause(&[]).unwrap();
            resume(&[]).unwrap();
        }
        assert_eq!(counts(&gpu), (3, 3));
    }
    assert_eq!(counts(&gpu), (4, 4));
    assert_eq!(free(address), 0);
}

#[test]
fn only_devices_with_enough_memory_are_checked() {
    let gpu = Gpu::take();
    let small = cache(2 * MIB);
    common::set_device(1);
    let large = cache(8 * MIB);
    common::set_device(0);
    let looks = Looks::from(4 * MIB);
    gpu.reset_counts();
    pause(&[]).unwrap();
    cleaning::settle();
    assert_eq!(counts(&gpu), (1, 3), "one of the two devices");
    resume(&[]).unwrap();
    drop(looks);
    gpu.reset_counts();
    pause(&[]).unwrap();
    resume(&[]).unwrap();
    cleaning::settle();
    assert_eq!(counts(&gpu), (2, 2), "nothing here is worth it by itself");
    assert_eq!((free(small), free(large)), (0, 0));
}

/// On a full device, the look must not take 2 MiB from the program's freed memory even for a moment.
#[test]
fn a_full_device_is_left_alone() {
    let gpu = Gpu::take();
    let address = cache(8 * MIB);
    gpu.reset_counts();
    {
        let _looks = Looks::from(8 * MIB);
        pause(&[]).unwrap();
        gpu.occupy(0, common::DEVICE_BYTES - 16 * MIB);
        resume(&[]).unwrap();
    }
    assert_eq!(counts(&gpu), (1, 1), "the resume's own, and the pause's");
    assert_eq!(free(address), 0);
}

/// By then there may be no memory left, and no device in use.
#[test]
fn destroyed_contexts_are_not_checked() {
    let gpu = Gpu::take();
    cache(8 * MIB);
    gpu.reset_counts();
    {
        let _looks = Looks::from(8 * MIB);
        pause(&[]).unwrap();
        assert_eq!(unsafe { vramctl_intercept::hooks::cudaDeviceReset() }, 0);
    }
    assert_eq!(gpu.calls("cuMemCreate"), 0);
}

#[test]
fn a_failed_check_changes_nothing() {
    let gpu = Gpu::take();
    let before = gpu.used(0);
    for call in ["cuCtxPushCurrent_v2", "cuMemGetInfo_v2", "cuMemGetAllocationGranularity", "cuMemCreate", "cuMemRelease"] {
        let address = cache(8 * MIB);
        {
            let _looks = Looks::from(8 * MIB);
            pause(&[]).unwrap();
            gpu.reset_counts();
            // What the driver refuses once is tried again.
            gpu.fail(call, 1, 999, u64::MAX);
        }
        assert!(gpu.calls(call) >= 1, "{call}");
        gpu.clear_faults();
        resume(&[]).unwrap();
        assert_eq!(free(address), 0, "{call}");
        vramctl_driver::sweep();
        assert_eq!(gpu.used(0), before, "{call}");
    }
}

/// Exits while a worker of the library is inside this driver call. Runs in a process of its own.
#[test]
#[ignore = "run by the test below"]
fn ends_during_a_call() {
    let gpu = Gpu::take();
    let call = std::env::var(CALL).expect("a name");
    // A fresh context, without the kernel loaded.
    assert_eq!(unsafe { vramctl_intercept::hooks::cudaDeviceReset() }, 0);
    cleaning::set_when(When { after: Duration::ZERO, bytes: 0 });
    vramctl_backup::set_copy_by(CopyBy::Auto, Some(0));
    malloc_tagged("weights", Some(Policy::Host), 8 * MIB).expect("memory");
    // This call releases host memory after a resume. A pause makes it too.
    let after_a_resume = call == "cuMemHostUnregister";
    if after_a_resume {
        pause(&[]).expect("a pause");
    }
    gpu.reset_counts();
    gpu.slow_down(&call, 300);
    if after_a_resume { resume(&[]) } else { pause(&[]) }.expect("memory");
    common::eventually("it is called", || gpu.calls(&call) > 0);
    // Runs the exit handlers, as returning from main does.
    std::process::exit(42);
}

/// A look's first driver call.
const FIRST_CALL: &str = "cuCtxPushCurrent_v2";

/// Exits slowly, before the worker has started.
#[test]
#[ignore = "run by the test below"]
fn ends_before_the_look() {
    extern "C" fn end_slowly() {
        let before = common::calls(FIRST_CALL);
        std::thread::sleep(Duration::from_millis(500));
        if common::calls(FIRST_CALL) > before {
            unsafe { libc::_exit(1) };
        }
    }
    // Registered before the driver's exit handler, so it runs after it.
    assert_eq!(unsafe { libc::atexit(end_slowly) }, 0);
    let _gpu = Gpu::take();
    cache(8 * MIB);
    cleaning::set_when(When { after: Duration::from_millis(200), bytes: 0 });
    pause(&[]).expect("a pause");
    std::process::exit(42);
}

const CALL: &str = "CLEANING_SLOW_CALL";

/// Exit handlers shut the driver down. A worker inside the driver at that moment, or calling it later, would crash the
/// program.
#[test]
fn a_program_may_exit_during_background_work() {
    let during = ["cuMemGetAllocationGranularity", "cuModuleLoadData", "cuMemHostUnregister"].map(|call| ("ends_during_a_call", call));
    for (test, call) in during.into_iter().chain([("ends_before_the_look", FIRST_CALL)]) {
        let this = std::env::current_exe().unwrap();
        let ended = Command::new(this).args(["--ignored", "--exact", test]).env(CALL, call).output().unwrap();
        assert_eq!(ended.status.code(), Some(42), "{test} {call}: {}", String::from_utf8_lossy(&ended.stderr));
    }
}
