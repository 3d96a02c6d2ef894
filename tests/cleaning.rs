//! After a large pause or resume the driver is made to look at what it has cleaned: once, without a trace, and not by a
//! program that ends. (That this makes the next pause faster is what `scripts/bench` shows.)
#![allow(missing_docs, clippy::undocumented_unsafe_blocks)]

mod common;

use common::{Gpu, MIB, free, malloc, malloc_tagged, pause, resume};
use std::process::Command;
use vramctl::memory::{Backup, cleaning};

/// Memory taken, and given back, to have the driver look; and since the counts were last reset.
fn looks(gpu: &Gpu) -> (u64, u64) {
    cleaning::settle();
    (gpu.calls("cuMemCreate"), gpu.calls("cuMemRelease"))
}

/// The first so many bytes are worth a look, in this test alone.
struct WorthIt;

impl WorthIt {
    fn from(bytes: u64) -> Self {
        cleaning::set_worth_it(Some(bytes));
        Self
    }
}

impl Drop for WorthIt {
    fn drop(&mut self) {
        cleaning::settle();
        cleaning::set_worth_it(None);
    }
}

#[test]
fn it_looks_once_after_each_pause_and_resume_and_leaves_nothing() {
    let gpu = Gpu::take();
    let address = malloc_tagged("cache", Some(Backup::Discard), 8 * MIB).unwrap();
    let _worth_it = WorthIt::from(8 << 20);
    let active = gpu.footprint();
    gpu.reset_counts();
    pause(&[]).unwrap();
    let paused = gpu.footprint();
    assert_eq!(looks(&gpu), (1, 2), "the pause's release, and the look's");
    assert_eq!(gpu.footprint(), paused);
    gpu.reset_counts();
    resume(&[]).unwrap();
    assert_eq!(looks(&gpu), (2, 1), "the resume's creation, and the look's");
    assert_eq!(gpu.footprint(), active);
    // One look is enough for all that happens before it.
    gpu.reset_counts();
    for _ in 0..3 {
        pause(&[]).unwrap();
        resume(&[]).unwrap();
    }
    assert_eq!(looks(&gpu), (4, 4));
    assert_eq!(free(address), 0);
}

#[test]
fn each_device_is_looked_at_where_it_is_worth_it() {
    let gpu = Gpu::take();
    let small = malloc_tagged("cache", Some(Backup::Discard), 2 * MIB).unwrap();
    common::set_device(1);
    let large = malloc_tagged("cache", Some(Backup::Discard), 8 * MIB).unwrap();
    common::set_device(0);
    let _worth_it = WorthIt::from(4 << 20);
    gpu.reset_counts();
    pause(&[]).unwrap();
    assert_eq!(looks(&gpu), (1, 3), "one of the two devices");
    resume(&[]).unwrap();
    cleaning::set_worth_it(None);
    cleaning::settle();
    gpu.reset_counts();
    pause(&[]).unwrap();
    resume(&[]).unwrap();
    assert_eq!(looks(&gpu), (2, 2), "nothing here is as large as what is worth it by itself");
    assert_eq!((free(small), free(large)), (0, 0));
}

/// What a program on a full device has just got back is not to be short of 2 MiB for a moment.
#[test]
fn a_full_device_is_left_alone_after_a_resume() {
    let gpu = Gpu::take();
    let address = malloc_tagged("cache", Some(Backup::Discard), 8 * MIB).unwrap();
    let _worth_it = WorthIt::from(8 << 20);
    pause(&[]).unwrap();
    cleaning::settle();
    gpu.occupy(0, common::DEVICE_BYTES - 16 * MIB);
    gpu.reset_counts();
    resume(&[]).unwrap();
    assert_eq!(looks(&gpu), (1, 0), "the resume's own");
    assert_eq!(free(address), 0);
}

#[test]
fn a_look_that_fails_changes_nothing() {
    let gpu = Gpu::take();
    let _worth_it = WorthIt::from(8 << 20);
    let before = gpu.used(0);
    for call in ["cuMemGetAllocationGranularity", "cuMemCreate", "cuMemRelease"] {
        let address = malloc_tagged("cache", Some(Backup::Discard), 8 * MIB).unwrap();
        pause(&[]).unwrap();
        gpu.fail(call, 1, 999, 1);
        cleaning::settle();
        gpu.clear_faults();
        resume(&[]).unwrap();
        assert_eq!(free(address), 0, "{call}");
        cleaning::settle();
        vramctl::driver::sweep();
        assert_eq!(gpu.used(0), before, "{call}");
    }
}

/// In a process of its own: it is to end while work is left to do in the background.
#[test]
#[ignore = "run by the test below"]
fn ends_at_once() {
    let _gpu = Gpu::take();
    cleaning::set_worth_it(Some(0));
    vramctl::backup::set_copy_by(None, Some(0));
    malloc(8 * MIB).expect("memory");
    malloc_tagged("cache", Some(Backup::Discard), 8 * MIB).expect("memory");
    malloc_tagged("weights", Some(Backup::Host), 8 * MIB).expect("memory");
    pause(&[]).expect("a pause");
    // By the exit handlers, as a program ends that returns from main.
    std::process::exit(42);
}

/// Exit handlers take the driver down; a thread of ours that is in it, or enters it then, would crash the program.
#[test]
fn a_program_may_end_while_something_is_still_to_be_done() {
    for _ in 0..10 {
        let this = std::env::current_exe().unwrap();
        let ended = Command::new(this).args(["--ignored", "--exact", "ends_at_once"]).output().unwrap();
        assert_eq!(ended.status.code(), Some(42), "{}", String::from_utf8_lossy(&ended.stderr));
    }
}
