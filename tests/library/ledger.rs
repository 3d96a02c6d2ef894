//! What a process reports of its device memory is what the device shows, at every moment.

use crate::common::{self, DEVICES, Gate, Gpu, MIB, Stream, malloc_tagged, pause, resume, set_device};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;
use vramctl_core::memory::Memory;
use vramctl_model::Policy;

/// Small blocks that the library needs for a moment.
const OWN: u64 = 64 << 10;

/// Device memory that a status reports.
fn reported() -> Vec<u64> {
    let status = Memory::get().status();
    let of = |ordinal| {
        let device = status.devices.iter().find(|device| device.device == ordinal);
        device.map_or(0, |device| device.tags.values().sum::<u64>() + device.guard_bytes)
    };
    (0..DEVICES).map(of).collect()
}

/// Stops an action at one of its driver calls after the other (at fewer, the more it has made), and compares what is reported with what
/// the device shows. Each time begins with `set_up`. Returns how often a status could be compared.
fn compare_at_calls(gpu: &Gpu, set_up: impl Fn(), action: impl Fn() + Sync) -> usize {
    let used = || (0..DEVICES).map(|device| gpu.used(device)).collect::<Vec<_>>();
    let (mut compared, mut nth) = (0, 1);
    loop {
        set_up();
        let elsewhere: Vec<_> = used().iter().zip(reported()).map(|(used, known)| used - known).collect();
        let stopped = thread::scope(|scope| {
            gpu.hold(nth);
            let acting = scope.spawn(&action);
            while !gpu.is_holding() && !acting.is_finished() {
                thread::yield_now();
            }
            if !gpu.is_holding() {
                gpu.hold(0);
                return false;
            }
            // Another thread of a resume may go on for a while.
            let compare = || {
                let before = used();
                let (tell, told) = mpsc::channel();
                scope.spawn(move || _ = tell.send(reported()));
                // A status waits for a call that maps or unmaps.
                let reported = told.recv_timeout(Duration::from_millis(100)).ok()?;
                (used() == before).then_some((before, reported))
            };
            if let Some((used, reported)) = compare().or_else(compare) {
                let known: Vec<_> = reported.iter().zip(&elsewhere).map(|(known, elsewhere)| known + elsewhere).collect();
                if known.iter().zip(&used).any(|(known, used)| known > used || used - known > OWN) {
                    common::release();
                    panic!("before call {nth}: {known:?} known, {used:?} in use");
                }
                compared += 1;
            }
            common::release();
            true
        });
        if !stopped {
            return compared;
        }
        nth += 1 + nth / 8;
    }
}

fn guarded() -> vramctl_core::transition::Pause {
    common::pausing_with(&[], |request| request.options.guard = true)
}

#[test]
fn a_pause_and_a_resume_are_counted_at_every_moment() {
    let gpu = Gpu::take();
    // Host memory stays ready, which takes fewer calls.
    vramctl_backup::set_host_keep(Some(Duration::from_secs(60)), None);
    set_device(1);
    malloc_tagged("kept", None, 2 * MIB).unwrap();
    set_device(0);
    malloc_tagged("kept", None, 2 * MIB).unwrap();
    malloc_tagged("dropped", Some(Policy::Discard), 34 * MIB).unwrap();
    malloc_tagged("file", Some(Policy::Disk), 2 * MIB).unwrap();
    let pausing = compare_at_calls(&gpu, || _ = resume(&[]).unwrap(), || _ = pause(&[]).unwrap());
    let resuming = compare_at_calls(&gpu, || _ = pause(&[]).unwrap(), || _ = resume(&[]).unwrap());
    resume(&[]).unwrap();
    let guarding = compare_at_calls(&gpu, || _ = resume(&[]).unwrap(), || _ = Memory::get().pause(&guarded(), &mut ()).unwrap());
    let unguarding = compare_at_calls(&gpu, || _ = Memory::get().pause(&guarded(), &mut ()).unwrap(), || _ = resume(&[]).unwrap());
    for (action, compared) in [("pause", pausing), ("resume", resuming), ("guard", guarding), ("unguard", unguarding)] {
        assert!(compared >= 10, "{action}: compared at {compared} calls only");
    }
}

/// The sum over all devices that is reported, and in use.
fn known_and_used(gpu: &Gpu) -> (u64, u64) {
    (reported().iter().sum(), (0..DEVICES).map(|device| gpu.used(device)).sum())
}

#[test]
fn what_failures_and_streams_leave_behind_is_counted() {
    let gpu = Gpu::take();
    let (known, used) = known_and_used(&gpu);
    let elsewhere = used - known;
    let check = |what: &str| {
        let (known, used) = known_and_used(&gpu);
        assert_eq!(known + elsewhere, used, "{what}");
        known
    };
    let tag = malloc_tagged("kept", None, 2 * MIB).unwrap();
    // Each step of a pause and a resume fails, and cannot be undone either.
    for (call, times) in [("cuMemUnmap", 1), ("cuMemSetAccess", 9), ("cuMemMap", 9), ("cuMemCreate", 9), ("cuMemRelease", 9)] {
        gpu.fail(call, 1, 999, times);
        let _ = pause(&[]);
        check(&format!("a pause without {call}"));
        let _ = resume(&[]);
        check(&format!("a resume without {call}"));
        gpu.clear_faults();
        resume(&[]).unwrap();
        assert_eq!(check(&format!("{call} again")), 2 << 20);
    }
    gpu.fail("cuMemRelease", 1, 999, u64::MAX);
    pause(&[]).unwrap();
    assert_eq!(check("a late release"), 2 << 20);
    assert_eq!(Memory::get().status().late_bytes, 2 << 20);
    gpu.clear_faults();
    resume(&[]).unwrap();
    assert_eq!(check("a release that is no longer late"), 2 << 20);

    // Freed once the stream has come to that, which a gate prevents.
    let (gate, stream) = (Gate::new(), Stream::create());
    stream.wait_for(&gate);
    assert_eq!(unsafe { vramctl_intercept::hooks::cudaFreeAsync(tag as *mut _, stream.handle()) }, 0);
    assert!(Memory::get().status().tags.is_empty());
    assert_eq!(check("freed in stream order"), 2 << 20);
    gate.open();
    assert_eq!(stream.synchronize(), 0);
    Memory::get().registry.release_freed();
    assert_eq!(check("released"), 0);
}
