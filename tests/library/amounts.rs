//! A scheduler takes so many allocations of a class and size, whatever their tags, and leaves the rest where it is.

use crate::common::{self, Gpu, MIB, free, malloc_tagged, pattern, read, state, write};
use std::thread;
use std::time::Duration;
use vramctl_core::gate;
use vramctl_core::memory::Memory;
use vramctl_core::transition::Prepared;
use vramctl_driver as driver;
use vramctl_intercept::{entries, launch};
use vramctl_model::Class::{self, Discardable, Kept, Retained};
use vramctl_model::{Amount, Error, PauseRequest, Policy, Report, SwapIn, SwapOut, TagState};

const LARGE: u64 = 4 * MIB as u64;
const SMALL: u64 = 2 * MIB as u64;

/// Allocations with contents, in the order of their addresses.
type Filled = Vec<(u64, Vec<u8>)>;

fn filled(tag: &str, backup: Option<Policy>, sizes: &[u64]) -> Filled {
    let one = |(place, bytes): (usize, &u64)| {
        let contents = pattern(place as u64 + 100 * tag.len() as u64, *bytes as usize);
        let address = malloc_tagged(tag, backup, *bytes as usize).unwrap();
        assert_eq!(write(address, &contents), 0);
        (address, contents)
    };
    let mut all: Filled = sizes.iter().enumerate().map(one).collect();
    all.sort();
    all
}

fn check(all: &Filled) {
    for (address, contents) in all {
        assert!(read(*address, contents.len()).unwrap() == *contents, "what was at {address:#x} is lost");
    }
}

fn free_all(all: Filled) {
    for (address, _) in all {
        assert_eq!(free(address), 0);
    }
}

fn request(list: &[(Class, u64, u64)]) -> impl FnOnce(&mut PauseRequest) {
    let amounts = list.iter().map(|&(class, bytes, count)| Amount { class, bytes, count }).collect();
    |request| {
        request.scheduler = Some(1);
        request.hold = Some(Duration::from_secs(100));
        request.amounts = Some([(driver::uuid(0).unwrap(), amounts)].into());
    }
}

fn take(list: &[(Class, u64, u64)]) -> Result<Report, Error> {
    Memory::get().pause(&common::pausing_with(&[], request(list)), &mut ())
}

fn bring_back() -> Result<Report, Error> {
    Memory::get().resume(&common::resuming_with(&[], |request| request.scheduler = Some(1)), &mut ())
}

fn list(amounts: &vramctl_model::Amounts) -> Vec<(Class, u64, u64)> {
    let mut list: Vec<_> = amounts.values().flatten().map(|it| (it.class, it.bytes, it.count)).collect();
    list.sort_unstable();
    list
}

fn here() -> Vec<(Class, u64, u64)> {
    list(&Memory::get().holdings().here)
}

fn away() -> Vec<(Class, u64, u64)> {
    list(&Memory::get().holdings().away)
}

/// Bytes of all tags: paused, and of those away.
fn paused_and_away() -> (u64, u64) {
    let status = Memory::get().status();
    let by_tag = status.tags.iter().fold((0, 0), |sum, tag| (sum.0 + tag.paused_bytes, sum.1 + tag.away_bytes));
    let by_gpu = status.devices.iter().fold((0, 0), |sum, device| (sum.0 + device.paused_bytes, sum.1 + device.away_bytes));
    assert_eq!(by_tag, by_gpu);
    by_tag
}

#[test]
fn only_what_is_asked_for_goes_and_all_of_it_comes_back() {
    let gpu = Gpu::take();
    let before = gpu.footprint();
    let one = filled("one", None, &[LARGE, LARGE, LARGE, SMALL]);
    let two = filled("two", None, &[LARGE, SMALL]);
    assert_eq!(here(), [(Kept, SMALL, 2), (Kept, LARGE, 4)]);
    let used = gpu.used(0);
    let report = take(&[(Kept, LARGE, 2), (Kept, SMALL, 1)]).unwrap();
    let bytes = 2 * LARGE + SMALL;
    assert_eq!((report.allocations, report.bytes, report.kept_bytes), (3, bytes, bytes));
    assert_eq!((gpu.used(0), paused_and_away()), (used - bytes, (bytes, bytes)));
    assert_eq!(away(), [(Kept, SMALL, 1), (Kept, LARGE, 2)]);
    assert_eq!(here(), [(Kept, SMALL, 1), (Kept, LARGE, 2)]);
    assert_eq!(state("one"), Some(TagState::Mixed));
    assert!(gate::is_held());

    // More of it goes from a program that is held already.
    assert_eq!(take(&[(Kept, LARGE, 1)]).unwrap().bytes, LARGE);
    assert_eq!((gpu.used(0), paused_and_away()), (used - bytes - LARGE, (bytes + LARGE, bytes + LARGE)));
    let report = bring_back().unwrap();
    assert_eq!((report.allocations, report.bytes, gpu.used(0)), (4, bytes + LARGE, used));
    assert_eq!((paused_and_away(), away(), gate::is_held()), ((0, 0), vec![], false));
    check(&one);
    check(&two);
    free_all(one);
    free_all(two);
    assert_eq!(gpu.footprint(), before);
}

/// A call waits until all of it is back, not only a part.
#[test]
fn the_gate_opens_when_all_of_it_is_back() {
    let _gpu = Gpu::take();
    let all = filled("one", None, &[LARGE, LARGE, LARGE]);
    let address = all[2].0;
    take(&[(Kept, LARGE, 2)]).unwrap();
    thread::scope(|scope| {
        let call = scope.spawn(move || {
            common::set_device(0);
            unsafe { launch::cuMemsetD8_v2(address as usize, 1, MIB) }
        });
        common::eventually("it waits", || Memory::get().status().waiting_threads > 0);
        assert_eq!(free(all[0].0), 0, "some of what is away is freed");
        assert!(!call.is_finished() && gate::is_held());
        bring_back().unwrap();
        assert_eq!(call.join().unwrap(), 0);
    });
    check(&all[1..2].to_vec());
    free_all(all[1..].to_vec());
}

/// The cheapest are known by their class: what is discarded, and what host memory still has.
#[test]
fn classes_go_as_they_are_asked_for() {
    let _gpu = Gpu::take();
    let dropped = filled("cache", Some(Policy::Discard), &[LARGE, LARGE]);
    let retained = filled(common::RETAINED_TAG, None, &[LARGE]);
    let kept = filled("kept", None, &[LARGE]);
    assert_eq!(here(), [(Discardable, LARGE, 2), (Kept, LARGE, 2)]);
    common::pause(&[common::RETAINED_TAG]).unwrap();
    common::resume(&[common::RETAINED_TAG]).unwrap();
    assert_eq!(here(), [(Discardable, LARGE, 2), (Retained, LARGE, 1), (Kept, LARGE, 1)]);

    let report = take(&[(Discardable, LARGE, 1), (Retained, LARGE, 1)]).unwrap();
    assert_eq!((report.discarded_bytes, report.unchanged_bytes), (LARGE, LARGE));
    assert_eq!(away(), [(Discardable, LARGE, 1), (Kept, LARGE, 1)]);
    bring_back().unwrap();
    check(&retained);
    check(&kept);
    assert!(read(dropped[0].0, MIB).unwrap().iter().all(|byte| *byte == 0));
    check(&dropped[1..].to_vec());

    // What the class was when it was counted: the contents were retained then.
    vramctl_backup::settle();
    Memory::get().set_retain(Some(common::RETAINED_TAG), Some(false)).unwrap();
    assert_eq!(take(&[(Retained, LARGE, 2)]).unwrap().bytes, 2 * LARGE);
    assert_eq!(away(), [(Discardable, LARGE, 2)], "no copy is cheaper");
    bring_back().unwrap();
    Memory::get().set_retain(Some(common::RETAINED_TAG), None).unwrap();
    [dropped, retained, kept].into_iter().for_each(free_all);
}

#[test]
fn a_pause_of_more_than_there_is_changes_nothing() {
    let gpu = Gpu::take();
    let all = filled("one", None, &[LARGE, SMALL]);
    let used = gpu.used(0);
    for wrong in [&[(Kept, LARGE, 3)][..], &[(Discardable, LARGE, 1)], &[(Kept, u64::MAX, 2)]] {
        assert!(matches!(take(wrong), Err(Error::Invalid(_))), "{wrong:?}");
        assert_eq!((gpu.used(0), gate::is_held(), paused_and_away()), (used, false, (0, 0)));
    }
    let amounts = common::pausing_with(&[], |request| request.amounts = Some([].into()));
    assert!(matches!(Memory::get().pause(&amounts, &mut ()), Err(Error::Invalid(_))), "only schedulers take amounts");
    assert_eq!(take(&[(Kept, LARGE + SMALL, 1)]).unwrap().allocations, 2, "as many bytes");
    bring_back().unwrap();
    check(&all);
    free_all(all);
}

/// What others have open or registered would have to go with them.
#[test]
fn shared_and_registered_memory_is_not_offered() {
    let _gpu = Gpu::take();
    let all = filled("one", None, &[LARGE, LARGE, LARGE]);
    let mut handle = [0_u8; 64];
    unsafe {
        assert_eq!(entries::cuIpcGetMemHandle(handle.as_mut_ptr().cast(), all[0].0), 0);
        let on = 1_u32;
        assert_eq!(entries::cuPointerSetAttribute((&raw const on).cast(), 6, all[1].0), 0);
    }
    assert_eq!(here(), [(Kept, LARGE, 1)]);
    assert!(matches!(take(&[(Kept, LARGE, 2)]), Err(Error::Invalid(_))));
    assert_eq!(take(&[(Kept, LARGE, 1)]).unwrap().bytes, LARGE);
    bring_back().unwrap();
    check(&all);
    free_all(all);
}

/// With a guard, stray work finds memory where some is away.
#[test]
fn a_guard_is_under_what_is_away() {
    let gpu = Gpu::take();
    let all = filled("one", None, &[LARGE, LARGE]);
    let used = gpu.used(0);
    let guarded = common::pausing_with(&[], |it| {
        request(&[(Kept, LARGE, 1)])(it);
        it.options.guard = true;
    });
    let report = Memory::get().pause(&guarded, &mut ()).unwrap();
    assert_eq!((report.bytes, report.guarded_bytes), (LARGE, LARGE));
    assert_eq!(bring_back().unwrap().guard_written_bytes, 0);
    assert_eq!(gpu.used(0), used);
    check(&all);
    free_all(all);
}

/// A scheduler brings back what only it has taken, and takes nothing that others have paused.
#[test]
fn what_a_person_pauses_is_left_alone() {
    let _gpu = Gpu::take();
    let (one, two) = (filled("one", None, &[LARGE]), filled("two", None, &[LARGE, LARGE]));
    common::pause(&["one"]).unwrap();
    assert_eq!(here(), [(Kept, LARGE, 2)]);
    take(&[(Kept, LARGE, 1)]).unwrap();
    assert_eq!((paused_and_away(), away()), ((2 * LARGE, LARGE), vec![(Kept, LARGE, 1)]));
    assert_eq!(bring_back().unwrap().allocations, 1);
    assert_eq!((paused_and_away(), state("two")), ((LARGE, 0), Some(TagState::Active)));

    // What was away already stays paused for the person, and a resume by the person brings it back for both.
    take(&[(Kept, LARGE, 1)]).unwrap();
    common::pause(&["two"]).unwrap();
    assert_eq!((paused_and_away(), away()), ((3 * LARGE, 0), vec![]));
    assert_eq!(bring_back().unwrap().allocations, 0);
    assert_eq!(common::resume(&[]).unwrap().allocations, 3);
    assert!(!gate::is_held());

    // A resume of one tag by a person leaves the scheduler its own.
    take(&[(Kept, LARGE, 3)]).unwrap();
    assert_eq!(common::resume(&["one"]).unwrap().allocations, 1);
    assert_eq!((paused_and_away(), gate::is_held()), ((2 * LARGE, 2 * LARGE), true));
    bring_back().unwrap();
    check(&one);
    check(&two);
    free_all(one);
    free_all(two);
}

/// In a swap, memory changes hands before the commit. What is undone is the scheduler's as before.
#[test]
fn a_swap_takes_and_brings_back_as_much() {
    const UNIT: u64 = 32 * MIB as u64;
    let gpu = Gpu::take();
    let all = filled("one", None, &[UNIT; 4]);
    let used = gpu.used(0);
    let aborted = |_: &dyn Prepared| Err(Error::Aborted("a test".into()));
    for host in [None, Some(Duration::from_secs(100))] {
        let leaving = common::pausing_with(&[], |it| {
            request(&[(Kept, UNIT, 2)])(it);
            it.swap = Some(SwapOut { host, ..SwapOut::default() });
        });
        let coming = common::resuming_with(&[], |it| {
            it.scheduler = Some(1);
            it.timeout = Some(Duration::from_secs(100));
            it.swap = Some(SwapIn { host: host.is_some() });
        });
        common::decide(Memory::get().prepare_pause(&leaving, &mut ()), aborted).unwrap_err();
        assert_eq!((here(), away(), gate::is_held(), gpu.used(0)), (vec![(Kept, UNIT, 4)], vec![], false, used));
        common::decide(Memory::get().prepare_pause(&leaving, &mut ()), |_| Ok(())).unwrap();
        assert_eq!((here(), away()), (vec![(Kept, UNIT, 2)], vec![(Kept, UNIT, 2)]));
        common::decide(Memory::get().prepare_resume(&coming, &mut ()), aborted).unwrap_err();
        assert_eq!((here(), away(), gate::is_held()), (vec![(Kept, UNIT, 2)], vec![(Kept, UNIT, 2)], true));
        assert_eq!((gpu.used(0), paused_and_away()), (used - 2 * UNIT, (2 * UNIT, 2 * UNIT)));
        common::decide(Memory::get().prepare_resume(&coming, &mut ()), |_| Ok(())).unwrap();
        assert_eq!((away(), gate::is_held(), gpu.used(0)), (vec![], false, used));
        check(&all);
    }
    free_all(all);
}

/// What the program has paused itself, it resumes itself.
#[test]
fn what_the_program_pauses_itself_is_left_alone() {
    let _gpu = Gpu::take();
    let (one, two) = (filled("one", None, &[LARGE]), filled("two", None, &[LARGE]));
    let mut own = common::pausing(&["one"]);
    own.is_from_outside = false;
    Memory::get().pause(&own, &mut ()).unwrap();
    assert_eq!(here(), [(Kept, LARGE, 1)]);
    take(&[(Kept, LARGE, 1)]).unwrap();
    let report = bring_back().unwrap();
    assert_eq!((report.allocations, report.self_paused_bytes, gate::is_held()), (1, LARGE, false));
    let mut own = common::resuming(&["one"]);
    own.is_from_outside = false;
    assert_eq!(Memory::get().resume(&own, &mut ()).unwrap().allocations, 1);
    check(&one);
    check(&two);
    free_all(one);
    free_all(two);
}

/// A program of whose job others have left stays held, too, until a scheduler or a person brings it back.
#[test]
fn a_program_of_which_nothing_is_taken_stays_held_all_the_same() {
    let _gpu = Gpu::take();
    let all = filled("one", None, &[LARGE]);
    for back in [bring_back, || common::resume(&[])] {
        assert_eq!(take(&[]).unwrap().allocations, 0);
        assert!(gate::is_held());
        back().unwrap();
        assert!(!gate::is_held());
    }
    check(&all);
    free_all(all);
}
