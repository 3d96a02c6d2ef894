//! What a pause gives back before its commit, as part of a swap: as much as the other job needs.

use crate::common::{self, Gpu, MIB, eventually, free, malloc_tagged, pattern, read, resume, state, write};
use std::collections::BTreeMap;
use std::time::Duration;
use std::{fs, mem, thread};
use vramctl_core::memory::Memory;
use vramctl_core::memory::share::Borrower;
use vramctl_core::transition::{Pause, Prepared};
use vramctl_model::{Error, Needed, Observer, Policy, Progress, Report, SwapIn, SwapOut, TagState};

/// As large as a piece of host memory: each is saved by itself.
const UNIT: u64 = 32 * MIB as u64;

/// Records what has been given back when everything is prepared, and after each of these waits.
struct Watches<'a> {
    gpu: &'a Gpu,
    active: u64,
    waits: &'a [u64],
    given: Vec<u64>,
    commits: bool,
    /// How long the first contents take.
    first_takes: Duration,
}

impl Observer for Watches<'_> {
    fn progress(&mut self, _: Progress) -> Result<(), Error> {
        thread::sleep(mem::take(&mut self.first_takes));
        Ok(())
    }
}

impl Watches<'_> {
    fn pause(&mut self, pause: &Pause) -> Result<Report, Error> {
        let prepared = Memory::get().prepare_pause(pause, self);
        common::decide(prepared, |prepared| self.vote(prepared))
    }

    fn vote(&mut self, prepared: &dyn Prepared) -> Result<(), Error> {
        self.given.push((self.active - self.gpu.used(0)) / UNIT);
        for &wait in self.waits {
            prepared.wait(Duration::from_millis(wait));
            self.given.push((self.active - self.gpu.used(0)) / UNIT);
        }
        if self.commits { Ok(()) } else { Err(Error::Aborted("a test".into())) }
    }
}

/// Memory with contents.
fn filled(seed: u64) -> (u64, Vec<u8>) {
    filled_as("weights", seed)
}

fn filled_as(tag: &str, seed: u64) -> (u64, Vec<u8>) {
    let (address, contents) = (malloc_tagged(tag, None, UNIT as usize).unwrap(), pattern(seed, UNIT as usize));
    assert_eq!(write(address, &contents), 0);
    (address, contents)
}

/// A program with three allocations that are kept and two that are discarded. Returns what was given back when, in units.
fn leave(needed: Option<Needed>, waits: &[u64], commits: bool) -> Vec<u64> {
    leave_slowly(needed, Duration::ZERO, waits, commits)
}

/// `first_takes`: how long it takes to save the first contents.
fn leave_slowly(needed: Option<Needed>, first_takes: Duration, waits: &[u64], commits: bool) -> Vec<u64> {
    let gpu = Gpu::take();
    let kept = [1, 2, 3].map(filled);
    let cache = [0, 0].map(|_| malloc_tagged("cache", Some(Policy::Discard), UNIT as usize).unwrap());
    let active = gpu.used(0);
    let uuid = Memory::get().status().devices[0].uuid.clone().unwrap();
    let needed: BTreeMap<_, _> = needed.map(|needed| (uuid, needed)).into_iter().collect();
    let mut watches = Watches { gpu: &gpu, active, waits, given: Vec::new(), commits, first_takes };
    let paused = watches.pause(&common::pausing_with(&[], |request| request.swap = Some(SwapOut { needed, host: None })));
    let given = watches.given;
    if commits {
        assert_eq!(paused.unwrap().bytes, 5 * UNIT);
        assert_eq!(active - gpu.used(0), 5 * UNIT, "the rest goes at the commit");
        resume(&[]).unwrap();
    } else {
        paused.unwrap_err();
    }
    assert_eq!(gpu.used(0), active);
    for (address, contents) in kept {
        assert!(read(address, contents.len()).unwrap() == contents);
        assert_eq!(free(address), 0);
    }
    for address in cache {
        assert_eq!(free(address), 0);
    }
    given
}

/// The driver zeroes what it gets back with the engines that copy, so what nobody needs yet would only slow the other job's copies.
#[test]
fn no_more_goes_before_the_commit_than_the_other_job_needs() {
    for commits in [true, false] {
        let needs = |for_contents, for_all| Some(Needed { for_contents: for_contents * UNIT, for_all: for_all * UNIT });
        assert_eq!(leave(needs(0, 0), &[], commits), [0]);
        assert_eq!(leave(needs(0, 2), &[], commits), [2]);
        assert_eq!(leave(needs(1, 1), &[], commits), [1]);
        assert_eq!(leave(needs(1, 4), &[], commits), [4], "kept memory first, then discarded memory");
        assert_eq!(leave(None, &[], commits), [5], "whoever does not say what is needed gets all of it");
    }
}

/// The other job does not wait for ever for the next piece of memory.
#[test]
fn what_is_saved_goes_if_saving_takes_long() {
    let given = leave_slowly(Some(Needed { for_contents: 0, for_all: 0 }), Duration::from_millis(4100), &[], true);
    assert!((1..=3).contains(&given[0]), "{given:?}");
}

/// A third program may have taken what the other job was to get.
#[test]
fn the_rest_goes_as_well_if_the_commit_is_late() {
    for commits in [true, false] {
        assert_eq!(leave(Some(Needed { for_contents: 0, for_all: UNIT }), &[100, 499, 500, 600], commits), [1, 1, 1, 5, 5]);
    }
}

/// A partner sets the memory aside at the commit. After a swap that is undone, it would have other memory than its owner.
#[test]
fn what_a_partner_has_open_goes_at_the_commit() {
    for commits in [true, false] {
        let gpu = Gpu::take();
        let [own, lent] = [1, 2].map(filled);
        let partner = Borrower { connection: u64::MAX, pid: std::process::id() };
        let token = Memory::get().ipc_handle(lent.0).unwrap().unwrap().token;
        drop(Memory::get().lend(&token.text(), &partner).unwrap());
        let active = gpu.used(0);
        let mut watches =
            Watches { gpu: &gpu, active, waits: &[600], given: Vec::new(), commits, first_takes: Duration::from_millis(4100) };
        let swap = common::pausing_with(&[], |request| {
            request.swap = Some(SwapOut::default());
            request.participants.partners = vec![partner.pid];
            request.hold = Some(Duration::from_secs(100));
        });
        let paused = watches.pause(&swap);
        assert_eq!((paused.is_ok(), watches.given), (commits, vec![1, 1]), "only what nobody else has open");
        if commits {
            assert_eq!(active - gpu.used(0), 2 * UNIT);
            resume(&[]).unwrap();
        }
        for (address, contents) in [own, lent] {
            assert!(read(address, contents.len()).unwrap() == contents);
            assert_eq!(free(address), 0);
        }
        Memory::get().take_all_back(partner.connection);
        assert_eq!(gpu.used(0), active - 2 * UNIT);
    }
}

/// Whether the thread lives that brings back what the undoing of a swap could not.
fn is_anything_unfinished() -> bool {
    let names = fs::read_dir("/proc/self/task").unwrap().filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.into_iter().any(|name| name.trim() == "vramctl-undo")
}

/// What was restored before a swap was undone is paused again by itself, as soon as that is possible, unless a user has resumed it.
#[test]
fn what_a_user_resumes_after_an_undone_swap_stays_active() {
    let gpu = Gpu::take();
    let kept = [("one", 1), ("two", 2)].map(|(tag, seed)| filled_as(tag, seed));
    Memory::get().pause(&common::pausing_with(&[], |request| request.hold = Some(Duration::from_secs(100))), &mut ()).unwrap();
    let swap = common::resuming_with(&[], |request| request.swap = Some(SwapIn { host: true }));
    let undone = common::decide(Memory::get().prepare_resume(&swap, &mut ()), |_| {
        gpu.fail("cuMemcpyDtoHAsync_v2", 1, 999, u64::MAX);
        Err(Error::Aborted("a test".into()))
    });
    assert!(matches!(undone, Err(Error::NotUndone(..))), "{undone:?}");
    assert_eq!(resume(&["one"]).unwrap().unchanged, 1);
    gpu.clear_faults();
    eventually("the rest is paused", || state("two") == Some(TagState::Paused));
    assert_eq!(state("one"), Some(TagState::Active));
    resume(&[]).unwrap();
    for (address, contents) in kept {
        assert!(read(address, contents.len()).unwrap() == contents);
        assert_eq!(free(address), 0);
    }
}

/// What comes back by itself after an undone swap stays away once a user has paused it, and the rest comes.
#[test]
fn what_a_user_pauses_after_an_undone_swap_stays_paused() {
    const TAGS: [&str; 2] = ["one", "two"];
    for paused in [&[][..], &TAGS[..1], &TAGS[..]] {
        let gpu = Gpu::take();
        let kept = [filled_as(TAGS[0], 1), filled_as(TAGS[1], 2)];
        let swap =
            common::pausing_with(&[], |request| request.swap = Some(SwapOut { host: Some(Duration::from_secs(1)), ..SwapOut::default() }));
        // The driver refuses memory, so that nothing comes back at once.
        let undone = common::decide(Memory::get().prepare_pause(&swap, &mut ()), |_| {
            gpu.fail("cuMemCreate", 1, 999, u64::MAX);
            Err(Error::Aborted("a test".into()))
        });
        let undone = undone.unwrap_err();
        assert!(matches!(undone, Error::NotUndone(..)), "{undone}");
        eventually("it is unfinished", is_anything_unfinished);
        // Between two attempts to bring it back.
        eventually("it is paused", || TAGS.map(state) == [Some(TagState::Paused); 2]);
        if !paused.is_empty() {
            assert_eq!(Memory::get().pause(&common::pausing(paused), &mut ()).unwrap().unchanged, paused.len() as u64);
        }
        gpu.clear_faults();
        eventually("nothing is unfinished", || !is_anything_unfinished());
        assert_eq!(TAGS.map(state), TAGS.map(|tag| Some(if paused.contains(&tag) { TagState::Paused } else { TagState::Active })));
        resume(&[]).unwrap();
        for (address, contents) in kept {
            assert!(read(address, contents.len()).unwrap() == contents);
            assert_eq!(free(address), 0);
        }
    }
}
