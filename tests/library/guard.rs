//! Paused memory with a guard: stray work finds memory there, keeps its context, and is reported.

use crate::common::{self, DEVICE_BYTES, Gate, Gpu, Graph, MIB, SetOnDrop, Stream, free, malloc_tagged, pattern, read, resume, write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use vramctl_core::gate;
use vramctl_core::memory::{Memory, region};
use vramctl_intercept::{entries, launch};
use vramctl_model::{Error, Kind, Observer, Policy, Report};

/// Device memory that a guard uses in debug builds: pieces of 8, 4 and 2 MiB.
const BLOCK: u64 = 14 * MIB as u64;

fn pause(tags: &[&str]) -> Result<Report, Error> {
    Memory::get().pause(&common::pausing_with(tags, |request| request.options.guard = true), &mut ())
}

/// Memory with contents.
fn filled(tag: &str, seed: u64, bytes: usize) -> (u64, Vec<u8>) {
    let (address, contents) = (malloc_tagged(tag, None, bytes).unwrap(), pattern(seed, bytes));
    assert_eq!(write(address, &contents), 0);
    (address, contents)
}

/// A graph that writes to memory whenever it is launched, paused or not.
fn writing(stream: &Stream, address: u64, value: u8, bytes: usize) -> Graph {
    stream.begin_capture(2);
    assert_eq!(stream.fill(address, value, bytes), 0);
    stream.end_capture().unwrap()
}

fn guard_bytes() -> u64 {
    Memory::get().status().devices.iter().map(|device| device.guard_bytes).sum()
}

#[test]
fn work_on_paused_memory_keeps_its_context_and_is_reported() {
    let gpu = Gpu::take();
    let before = gpu.footprint();
    let (cache, cached) = filled("cache", 1, 3 * MIB);
    let (weights, kept) = filled("weights", 2, 45 * MIB);
    let stream = Stream::create();
    let graph = writing(&stream, weights + 44 * MIB as u64, 0, MIB);
    let active = gpu.used(0);

    let report = pause(&[]).unwrap();
    assert_eq!((report.guarded_bytes, report.unguarded_bytes, report.guard_bytes), (report.bytes, 0, BLOCK));
    assert_eq!((guard_bytes(), gpu.used(0)), (BLOCK, active - report.bytes + BLOCK));
    for _ in 0..2 {
        assert_eq!((stream.launch(&graph), stream.synchronize(), common::last_error()), (0, 0, 0));
    }
    assert_eq!(read(cache, 4).unwrap(), 1_u32.to_le_bytes(), "what nobody has written to");
    let report = resume(&[]).unwrap();
    assert_eq!((report.guard_written_bytes, report.guard_bytes, guard_bytes()), (MIB as u64, 0, 0));
    assert!(read(cache, cached.len()).unwrap() == cached && read(weights, kept.len()).unwrap() == kept);
    assert_eq!(gpu.used(0), active);

    assert_eq!(pause(&[]).unwrap().unguarded_bytes, 0);
    assert_eq!(resume(&[]).unwrap().guard_written_bytes, 0, "nothing was written this time");
    assert!(read(weights, kept.len()).unwrap() == kept);
    drop((graph, stream));
    assert_eq!((free(cache), free(weights)), (0, 0));
    assert_eq!(gpu.footprint(), before);
}

#[test]
fn tags_share_a_block_until_the_last_is_resumed_or_freed() {
    let gpu = Gpu::take();
    let (one, first) = filled("one", 1, 2 * MIB);
    let (two, _) = filled("two", 2, 20 * MIB);
    let (bare, third) = filled("bare", 3, 2 * MIB);
    pause(&["one"]).unwrap();
    assert_eq!(pause(&["two"]).unwrap().guard_bytes, BLOCK);
    common::pause(&["bare"]).unwrap();
    assert_eq!(write(two, &[9; 64]), 0);
    let report = resume(&["one", "bare"]).unwrap();
    assert_eq!((report.guard_written_bytes, report.guard_bytes), (64, BLOCK));
    assert!(read(one, first.len()).unwrap() == first && read(bare, third.len()).unwrap() == third);
    // The guard is restored: reported writes are not reported again.
    pause(&["one"]).unwrap();
    assert_eq!(resume(&["one"]).unwrap().guard_written_bytes, 0);
    assert_eq!(guard_bytes(), BLOCK);
    let used = gpu.used(0);
    assert_eq!(free(two), 0);
    assert_eq!((guard_bytes(), gpu.used(0)), (0, used - BLOCK));
}

/// Else a network card or another device would get the guard's memory.
#[test]
fn paused_memory_cannot_be_registered() {
    let _gpu = Gpu::take();
    let (address, _) = filled("one", 1, 4 * MIB);
    for pause in [common::pause, pause] {
        pause(&[]).unwrap();
        let (on, mut shared) = (1_u32, -1_i32);
        let set = unsafe { entries::cuPointerSetAttribute((&raw const on).cast(), 6, address) };
        let range = unsafe { entries::cuMemGetHandleForAddressRange((&raw mut shared).cast(), address, 2 * MIB, 1, 0) };
        assert_eq!((set, range, shared), (1, 1, -1));
        resume(&[]).unwrap();
    }
    pause(&[]).and_then(|_| resume(&[])).expect("nothing is registered");
}

#[test]
fn without_memory_for_it_a_pause_succeeds_and_says_so() {
    let gpu = Gpu::take();
    let (address, contents) = filled("one", 1, 4 * MIB);
    gpu.occupy(0, DEVICE_BYTES - gpu.used(0) as usize);
    let report = pause(&[]).unwrap();
    assert_eq!((report.guarded_bytes, report.unguarded_bytes, report.guard_bytes, guard_bytes()), (0, report.bytes, 0, 0));
    resume(&[]).unwrap();
    assert!(read(address, contents.len()).unwrap() == contents);
}

/// The guard itself may occupy the missing memory. Memory that cannot be resumed stays guarded.
#[test]
fn a_resume_uses_the_guards_memory_and_a_failed_one_restores_the_guard() {
    let gpu = Gpu::take();
    let (address, contents) = filled("one", 1, 40 * MIB);
    let others = DEVICE_BYTES - 40 * MIB - gpu.used(0) as usize + 40 * MIB;
    pause(&[]).unwrap();
    gpu.occupy(0, others + MIB);
    assert!(matches!(resume(&[]), Err(Error::DeviceMemory(_))));
    assert_eq!((write(address, &[7; 8]), guard_bytes()), (0, BLOCK));
    gpu.occupy(0, others);
    common::decide(Memory::get().prepare_resume(&common::resuming(&[]), &mut ()), |_| Err(Error::Aborted("no".into()))).unwrap_err();
    assert_eq!((write(address, &[7; 8]), guard_bytes()), (0, BLOCK));
    gpu.fail("cuMemUnmap", 1, 999, 1);
    assert!(resume(&[]).is_err());
    assert_eq!((write(address, &[7; 8]), guard_bytes()), (0, BLOCK));
    // Including writes that an earlier attempt has found.
    assert_eq!(resume(&[]).unwrap().guard_written_bytes, 16);
    assert!(read(address, contents.len()).unwrap() == contents);
}

/// Pauses, and queues work on the guard that only ends later: `action` returns after that, not before.
fn waits_for_work_on(address: u64, action: impl FnOnce()) -> Stream {
    let (gate, stream) = (Gate::new(), Stream::create());
    pause(&[]).unwrap();
    stream.wait_for(&gate);
    assert_eq!(stream.fill(address, 3, MIB), 0);
    let opened = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(300));
            opened.store(true, Ordering::Relaxed);
            gate.open();
        });
        action();
        assert!(opened.load(Ordering::Relaxed));
    });
    stream
}

/// Otherwise the work would hit unmapped addresses, or write to memory that is being restored.
#[test]
fn a_resume_waits_for_work_that_may_use_the_guard() {
    let _gpu = Gpu::take();
    let (address, contents) = filled("one", 1, 4 * MIB);
    let stream = waits_for_work_on(address, || assert_eq!(resume(&[]).unwrap().guard_written_bytes, MIB as u64));
    assert_eq!(stream.synchronize(), 0);
    assert!(read(address, contents.len()).unwrap() == contents);
}

/// A client that stays.
struct Stays;

impl Observer for Stays {
    fn is_gone(&mut self) -> Option<bool> {
        Some(false)
    }
}

/// A program that always has work in flight would otherwise keep its guard, and its memory away, for ever.
#[test]
fn a_program_that_is_never_idle_is_resumed() {
    let gpu = Gpu::take();
    let (address, contents) = filled("one", 2, 4 * MIB);
    let (other, stop) = (malloc_tagged("other", None, MIB).unwrap(), AtomicBool::new(false));
    pause(&["one"]).unwrap();
    gpu.set_op_delay_ms(150);
    thread::scope(|scope| {
        scope.spawn(|| {
            let stream = Stream::create();
            while !stop.load(Ordering::Relaxed) {
                assert_eq!(unsafe { launch::cuMemsetD8Async(other as usize, 1, MIB, stream.0 as usize) }, 0);
                thread::sleep(Duration::from_millis(140));
            }
            assert_eq!(stream.synchronize(), 0);
        });
        let _told = SetOnDrop(&stop);
        thread::sleep(Duration::from_millis(500));
        let resumed = Memory::get().resume(&common::resuming(&["one"]), &mut Stays);
        assert!(!gate::is_held());
        resumed.unwrap();
    });
    gpu.set_op_delay_ms(0);
    assert!(read(address, contents.len()).unwrap() == contents);
}

/// The client of a resume, which has closed the gate because of work on the guard when it finds too little memory. Then the program frees
/// what is paused, and the client gives up.
struct GivesUp<'a> {
    gpu: &'a Gpu,
    blocked: &'a Gate,
    paused: [u64; 2],
    attempts: u64,
    is_short: bool,
}

impl Observer for GivesUp<'_> {
    fn is_gone(&mut self) -> Option<bool> {
        let attempts = self.gpu.calls("cuMemGetInfo_v2");
        if attempts == self.attempts {
            return Some(false);
        }
        self.attempts = attempts;
        if !self.is_short {
            self.is_short = true;
            self.gpu.occupy(0, DEVICE_BYTES - self.gpu.used(0) as usize);
            self.blocked.open();
            return Some(false);
        }
        assert_eq!(thread::scope(|scope| scope.spawn(|| self.paused.map(free)).join().unwrap()), [0, 0]);
        Some(true)
    }
}

/// Otherwise it would wait for a resume of memory that is no more.
#[test]
fn a_program_that_frees_what_is_paused_during_a_resume_that_fails_is_let_go() {
    let gpu = Gpu::take();
    let (guarded, _) = filled("guarded", 1, 2 * BLOCK as usize);
    let held = malloc_tagged("held", None, 4 * MIB).unwrap();
    pause(&["guarded"]).unwrap();
    common::decide(Memory::get().hold().unwrap().prepare_pause(&common::pausing(&["held"]), &mut ()), |_| Ok(())).unwrap();
    assert!(gate::is_held());
    let (blocked, before) = (Gate::new(), gpu.calls("cuMemGetInfo_v2"));
    let mut client = GivesUp { gpu: &gpu, blocked: &blocked, paused: [guarded, held], attempts: before, is_short: false };
    gpu.slow_down("cuMemGetInfo_v2", 500);
    let failed = thread::scope(|scope| {
        scope.spawn(|| {
            // Once the resume has found the device idle.
            common::eventually("it looks for room", || gpu.calls("cuMemGetInfo_v2") > before);
            let stream = Stream::create();
            stream.wait_for(&blocked);
            gpu.slow_down("cuMemGetInfo_v2", 0);
            assert_eq!(stream.synchronize(), 0);
        });
        let wanted = common::resuming_with(&["guarded"], |request| request.timeout = Some(Duration::from_secs(100)));
        Memory::get().resume(&wanted, &mut client).unwrap_err()
    });
    assert_eq!(failed.kind(), Kind::DeviceMemory, "{failed}");
    assert!(!gate::is_held());
    gpu.occupy(0, 0);
}

#[test]
fn a_free_waits_too() {
    let _gpu = Gpu::take();
    let (address, _) = filled("one", 1, 4 * MIB);
    let stream = waits_for_work_on(address, || assert_eq!(free(address), 0));
    assert_eq!((stream.synchronize(), guard_bytes()), (0, 0));
}

/// The driver checkpoints no guards, and a suspended program needs none.
#[test]
fn a_suspended_process_has_no_guard() {
    let gpu = Gpu::take();
    let (address, contents) = filled("one", 1, 4 * MIB);
    pause(&[]).unwrap();
    let used = gpu.used(0);
    Memory::get().suspend(|| false).unwrap();
    assert_eq!((guard_bytes(), gpu.used(0)), (0, used - BLOCK));
    Memory::get().awake();
    resume(&[]).unwrap();
    assert!(read(address, contents.len()).unwrap() == contents);
}

/// A handle of the program's with two mappings, one of them unmapped, and another mapped, while it is paused.
#[test]
fn a_programs_own_mappings_are_guarded_and_can_change() {
    const BYTES: usize = 6 * MIB;
    let gpu = Gpu::take();
    let before = gpu.footprint();
    let (mut handle, wanted, access) = (0, [1_u32, 0, 1, 0, 0, 0, 0, 0], [1_u32, 0, 3]);
    let places: Vec<u64> = (0..3)
        .map(|_| {
            let mut base = 0;
            assert_eq!(unsafe { entries::cuMemAddressReserve(&raw mut base, BYTES, 0, 0, 0) }, 0);
            base
        })
        .collect();
    let map = |base, handle| unsafe {
        assert_eq!(entries::cuMemMap(base, BYTES, 0, handle, 0), 0);
        assert_eq!(entries::cuMemSetAccess(base, BYTES, access.as_ptr().cast(), 1), 0);
    };
    region::begin(Some("own"), Some(Policy::Host)).unwrap();
    assert_eq!(unsafe { entries::cuMemCreate(&raw mut handle, BYTES, wanted.as_ptr().cast(), 0) }, 0);
    region::end().unwrap();
    map(places[0], handle);
    map(places[1], handle);
    let contents = pattern(5, BYTES);
    assert_eq!(write(places[0], &contents), 0);
    assert_eq!(pause(&[]).unwrap().guarded_bytes, BYTES as u64);
    assert_eq!((write(places[0], &[8; 8]), write(places[1] + 4 * MIB as u64, &[8; 8])), (0, 0));
    // New mappings have no guard.
    map(places[2], handle);
    let unmap = |base| unsafe { entries::cuMemUnmap(base, BYTES) };
    assert_eq!((unmap(places[0]), unmap(places[1]), unmap(places[2])), (0, 0, 0));
    map(places[0], handle);
    map(places[1], handle);
    assert_eq!(resume(&[]).unwrap().guard_written_bytes, 16);
    for base in &places[..2] {
        assert!(read(*base, BYTES).unwrap() == contents);
        assert_eq!(unmap(*base), 0);
    }
    assert_eq!(unsafe { entries::cuMemRelease(handle) }, 0);
    for base in places {
        assert_eq!(unsafe { entries::cuMemAddressFree(base, BYTES) }, 0);
    }
    assert_eq!(gpu.footprint(), before);
}

/// Memory of the program that the library does not manage, mapped where paused memory was: a resume leaves it there.
#[test]
fn what_the_program_maps_in_the_place_of_a_guard_stays() {
    const BYTES: usize = 4 * MIB;
    let gpu = Gpu::take();
    let before = gpu.footprint();
    let (wanted, access) = ([1_u32, 0, 1, 0, 0, 0, 0, 0], [1_u32, 0, 3]);
    let (mut base, mut handles) = (0, [0; 2]);
    assert_eq!(unsafe { entries::cuMemAddressReserve(&raw mut base, BYTES, 0, 0, 0) }, 0);
    for (handle, tag) in handles.iter_mut().zip([Some("own"), None]) {
        region::begin(tag, None).unwrap();
        assert_eq!(unsafe { entries::cuMemCreate(handle, BYTES, wanted.as_ptr().cast(), 0) }, 0);
        region::end().unwrap();
    }
    let map = |handle| unsafe {
        assert_eq!(entries::cuMemMap(base, BYTES, 0, handle, 0), 0);
        assert_eq!(entries::cuMemSetAccess(base, BYTES, access.as_ptr().cast(), 1), 0);
    };
    let unmap = || assert_eq!(unsafe { entries::cuMemUnmap(base, BYTES) }, 0);
    map(handles[0]);
    let contents = pattern(6, BYTES);
    assert_eq!(write(base, &contents), 0);
    assert_eq!(pause(&[]).unwrap().guarded_bytes, BYTES as u64);
    unmap();
    map(handles[1]);
    let others = pattern(7, BYTES);
    assert_eq!(write(base, &others), 0);
    resume(&[]).unwrap();
    assert!(read(base, BYTES).unwrap() == others, "it is still there");
    unmap();
    map(handles[0]);
    assert!(read(base, BYTES).unwrap() == contents);
    unmap();
    for handle in handles {
        assert_eq!(unsafe { entries::cuMemRelease(handle) }, 0);
    }
    assert_eq!(unsafe { entries::cuMemAddressFree(base, BYTES) }, 0);
    assert_eq!(gpu.footprint(), before);
}
