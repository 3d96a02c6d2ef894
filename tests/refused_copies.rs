//! Copies that the driver refuses because the memory is closed to the current device, and what happens before the library has made them in
//! another form. In one test, because memory that has once been opened to a device stays open to it.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks)]

mod common;

use common::{Gpu, MIB, Stream, malloc_tagged, pattern, read, resume, set_device};
use std::thread;
use std::time::Duration;
use vramctl_core::memory::Memory;
use vramctl_driver::{ContextHandle, Driver, Ending};
use vramctl_intercept::launch;

#[test]
fn the_program_gets_no_refusal_that_is_the_librarys() {
    let gpu = Gpu::take();
    set_device(1);
    let there = malloc_tagged("there", None, 2 * MIB).unwrap();
    set_device(0);
    let here = malloc_tagged("here", None, 2 * MIB).unwrap();
    a_pause_that_comes_in_between_makes_no_copy_fail(&gpu, here);
    a_driver_that_fails_meanwhile_is_the_reason(&gpu, here);
    of_two_copies_that_need_the_memory_open_the_later_finds_it_so(&gpu, here, there);
    set_device(0);
}

fn a_pause_that_comes_in_between_makes_no_copy_fail(gpu: &Gpu, here: u64) {
    /// Enough for a pause that need not wait.
    const LIMIT: Duration = Duration::from_millis(500);
    let contents = pattern(1, MIB);
    // The context of the memory seems to end, so the driver is asked for another when the memory is looked at.
    let ending = Ending::of(ContextHandle::of_thread().unwrap().unwrap());
    let copy = || {
        gpu.hold(2);
        upload(here, &contents)
    };
    let copied = while_held(gpu, copy, || {
        drop(ending);
        // If the copy is still to be made, the pause waits for it in vain.
        let _ = Memory::get().pause(&common::pausing_with(&["here"], |request| request.hold = Some(LIMIT)), &mut ());
    });
    resume(&[]).unwrap();
    assert_eq!(copied, 0);
    assert!(read(here, MIB).unwrap() == contents);
}

fn a_driver_that_fails_meanwhile_is_the_reason(gpu: &Gpu, here: u64) {
    const FAILURE: u32 = 999;
    let contents = pattern(2, MIB);
    set_device(1);
    let stream = Stream::create();
    let in_stream = || unsafe { launch::cuMemcpyHtoDAsync_v2(here as usize, contents.as_ptr() as usize, MIB, stream.0 as usize) };
    let copies: [&dyn Fn() -> u32; 2] = [&|| upload(here, &contents), &in_stream];
    for call in Driver::NAMES {
        for copy in copies {
            gpu.fail(call, 1, FAILURE, 1);
            let answer = copy();
            gpu.clear_faults();
            assert!([0, FAILURE].contains(&answer), "{call}: {answer}");
            assert_eq!(stream.synchronize(), 0);
        }
    }
    set_device(0);
}

/// Copies that are captured.
fn of_two_copies_that_need_the_memory_open_the_later_finds_it_so(gpu: &Gpu, here: u64, there: u64) {
    let capture = |before: &dyn Fn()| {
        let stream = Stream::create();
        stream.begin_capture(1);
        before();
        let answer = unsafe { launch::cuMemcpyDtoDAsync_v2(here as usize, there as usize, MIB, stream.0 as usize) };
        stream.end_capture().unwrap();
        answer
    };
    let later = while_held(gpu, || capture(&|| gpu.hold(2)), || assert_eq!(capture(&|| ()), 0));
    assert_eq!(later, 0);
}

fn upload(to: u64, contents: &[u8]) -> u32 {
    unsafe { launch::cuMemcpyHtoD_v2(to as usize, contents.as_ptr() as usize, contents.len()) }
}

/// Makes a call on another thread, on which device 1 is current. In it, a call of the driver is held during `meanwhile`.
fn while_held(gpu: &Gpu, call: impl FnOnce() -> u32 + Send, meanwhile: impl FnOnce()) -> u32 {
    struct Held<'a>(&'a Gpu);
    impl Drop for Held<'_> {
        fn drop(&mut self) {
            self.0.hold(0);
            common::release();
        }
    }
    thread::scope(|scope| {
        let held = Held(gpu);
        let call = scope.spawn(|| {
            set_device(1);
            call()
        });
        common::eventually("it is held", || gpu.is_holding());
        meanwhile();
        drop(held);
        call.join().unwrap()
    })
}
