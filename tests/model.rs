//! Random sequences of allocate, free, write, pause, resume and regions, checked against a simple model; and many threads at
//! once, each checking its own memory.
#![allow(missing_docs)]

mod common;

use common::{DEVICE_BYTES, Gpu, MIB, free, malloc, pattern, read, write};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vramctl_core::memory::{Memory, region};
use vramctl_core::transition::Pause;
use vramctl_model::{Amounts, Policy, Span};

const TAGS: [&str; 4] = ["weights", "kv_cache", "graph", common::RETAINED_TAG];

#[derive(Debug, Clone, Copy)]
enum Step {
    Begin(usize, Option<Policy>),
    BeginUntagged,
    End,
    Allocate(usize),
    Free(usize),
    Write(usize, u64),
    /// An optional unused range, which may reach into the next allocations: index of the one that it is counted from, offset and
    /// length. And whether with a guard.
    Pause(Option<usize>, Option<Policy>, Option<(usize, usize, usize)>, bool),
    Resume(Option<usize>),
    /// A scheduler takes some of each class and size, with or without a guard: of how many, counted from the number.
    Take(u64, bool),
    /// It brings them back.
    BringBack,
}

fn backup() -> impl Strategy<Value = Option<Policy>> {
    prop_oneof![2 => Just(None), 2 => Just(Some(Policy::Host)), 2 => Just(Some(Policy::Discard)), 1 => Just(Some(Policy::Disk))]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => (0..TAGS.len(), backup()).prop_map(|(tag, backup)| Step::Begin(tag, backup)),
        1 => Just(Step::BeginUntagged),
        2 => Just(Step::End),
        6 => (1usize..9 * MIB).prop_map(Step::Allocate),
        2 => any::<usize>().prop_map(Step::Free),
        4 => (any::<usize>(), any::<u64>()).prop_map(|(which, seed)| Step::Write(which, seed)),
        3 => (prop::option::of(0..TAGS.len()), backup(), prop::option::of((any::<usize>(), 0..8 * MIB, 0..8 * MIB)), any::<bool>())
            .prop_map(|(tag, backup, unused, guard)| Step::Pause(tag, backup, unused, guard)),
        3 => prop::option::of(0..TAGS.len()).prop_map(Step::Resume),
        3 => (any::<u64>(), any::<bool>()).prop_map(|(which, guard)| Step::Take(which, guard)),
        2 => Just(Step::BringBack),
    ]
}

/// An allocation's expected state. Contents are what was last written, or `None` for zeroes.
struct Model {
    tag: Option<(usize, Policy)>,
    bytes: usize,
    contents: Option<Vec<u8>>,
    paused: bool,
    /// Paused by the scheduler alone.
    away: bool,
    /// Paused with a guard: writes are lost, and nothing else happens.
    guarded: bool,
}

impl Model {
    /// Whole pages in a range read as zero from now on.
    fn forget(&mut self, from: usize, bytes: usize) {
        const PAGE: usize = 2 * MIB;
        let end = (from + bytes).min(self.bytes.next_multiple_of(PAGE)) / PAGE * PAGE;
        if let Some(contents) = &mut self.contents {
            let (start, end) = (from.next_multiple_of(PAGE), end.min(contents.len()));
            contents[start.min(end)..end].fill(0);
        }
    }
}

/// Allocations by their bytes, whatever their class.
fn counts(amounts: &Amounts) -> BTreeMap<u64, u64> {
    let mut counts = BTreeMap::new();
    for amount in amounts.values().flatten().filter(|amount| amount.count > 0) {
        *counts.entry(amount.bytes).or_default() += amount.count;
    }
    counts
}

#[derive(Default)]
struct World {
    allocations: BTreeMap<u64, Model>,
    regions: Vec<Option<(usize, Option<Policy>)>>,
    /// Whether something was written to a guard and not reported yet.
    strays: bool,
}

impl World {
    fn pick(&self, which: usize) -> Option<u64> {
        let count = self.allocations.len();
        (count > 0).then(|| *self.allocations.keys().nth(which % count).unwrap())
    }

    fn known(&self, tag: Option<usize>) -> bool {
        tag.is_none_or(|tag| self.allocations.values().any(|model| model.tag.is_some_and(|(known, _)| known == tag)))
    }

    fn of_tag(&mut self, tag: Option<usize>) -> impl Iterator<Item = &mut Model> {
        self.allocations.values_mut().filter(move |model| model.tag.is_some_and(|(known, _)| tag.is_none_or(|tag| known == tag)))
    }

    /// Managed allocations by bytes on the device.
    fn counts(&self, which: impl Fn(&Model) -> bool) -> BTreeMap<u64, u64> {
        let mut counts = BTreeMap::new();
        for model in self.allocations.values().filter(|model| model.tag.is_some() && which(model)) {
            *counts.entry(model.bytes.next_multiple_of(2 * MIB) as u64).or_default() += 1;
        }
        counts
    }

    fn apply(&mut self, step: Step) -> Result<(), TestCaseError> {
        let tags = |tag: Option<usize>| tag.map_or_else(Vec::new, |tag| vec![TAGS[tag]]);
        match step {
            Step::Begin(tag, backup) => {
                region::begin(Some(TAGS[tag]), backup).unwrap();
                self.regions.push(Some((tag, backup)));
            }
            Step::BeginUntagged => {
                region::begin(None, None).unwrap();
                self.regions.push(None);
            }
            Step::End => prop_assert_eq!(region::end().is_ok(), self.regions.pop().is_some()),
            Step::Allocate(bytes) => {
                let tag = self.regions.last().copied().flatten().filter(|_| bytes >= MIB);
                match malloc(bytes) {
                    Ok(address) => {
                        prop_assert_eq!(Memory::get().registry.find(address).is_some(), tag.is_some());
                        let tag = tag.map(|(tag, backup)| (tag, backup.unwrap_or(Policy::Host)));
                        let model = Model { tag, bytes, contents: None, paused: false, away: false, guarded: false };
                        // Plain memory is not guaranteed to be zero, so clear it.
                        if model.tag.is_none() {
                            prop_assert_eq!(write(address, &vec![0; bytes]), 0);
                        }
                        prop_assert!(self.allocations.insert(address, model).is_none(), "an address was given twice");
                    }
                    Err(code) => prop_assert_eq!(code, 2),
                }
            }
            Step::Free(which) => {
                if let Some(address) = self.pick(which) {
                    prop_assert_eq!(free(address), 0);
                    self.allocations.remove(&address);
                }
            }
            Step::Write(which, seed) => {
                let Some(address) = self.pick(which) else { return Ok(()) };
                let model = self.allocations.get_mut(&address).unwrap();
                if !model.paused {
                    let contents = pattern(seed, model.bytes);
                    prop_assert_eq!(write(address, &contents), 0);
                    model.contents = Some(contents);
                } else if model.guarded {
                    prop_assert_eq!(write(address, &pattern(seed, model.bytes)), 0);
                    self.strays = true;
                }
            }
            Step::Pause(tag, backup, unused, guard) => {
                let unused = unused.and_then(|(which, from, bytes)| Some((self.pick(which)?, from, bytes)));
                let unused = unused.map(|(address, from, bytes)| Span { address: address + from as u64, bytes });
                let spans = unused.into_iter().collect();
                let wanted = Pause {
                    unused: spans,
                    ..common::pausing_with(&tags(tag), |request| {
                        request.options.backup = backup;
                        request.options.guard = guard;
                    })
                };
                let answer = Memory::get().pause(&wanted, &mut ());
                prop_assert_eq!(answer.is_ok(), self.known(tag), "{:?}", answer);
                if answer.is_ok() {
                    self.of_tag(tag).for_each(|model| model.away = false);
                }
                let mut changed = 0;
                let wanted = |model: &Model| model.tag.is_some_and(|(known, _)| tag.is_none_or(|tag| known == tag));
                for (address, model) in self.allocations.iter_mut().filter(|(_, model)| wanted(model) && !model.paused) {
                    model.paused = true;
                    model.guarded = guard && answer.as_ref().is_ok_and(|report| report.unguarded_bytes == 0);
                    changed += 1;
                    let (tag, policy) = model.tag.unwrap();
                    match (backup.unwrap_or(policy), unused) {
                        (Policy::Discard, _) => model.contents = None,
                        (Policy::Host, Some(span)) if TAGS[tag] != common::RETAINED_TAG => {
                            let from = span.address.max(*address);
                            model.forget((from - address) as usize, (span.address + span.bytes as u64).saturating_sub(from) as usize);
                        }
                        _ => (),
                    }
                }
                if let Ok(report) = answer {
                    prop_assert_eq!(report.allocations, changed);
                }
            }
            Step::Take(which, guard) => self.take(which, guard)?,
            Step::BringBack => self.bring_back()?,
            Step::Resume(tag) => match Memory::get().resume(&common::resuming(&tags(tag)), &mut ()) {
                Ok(report) => {
                    let any_guarded = self.of_tag(tag).any(|model| model.paused && model.guarded);
                    // What is freed, or resumed with a failure, takes what was written to it along.
                    prop_assert!(report.guard_written_bytes == 0 || self.strays);
                    self.strays &= !any_guarded;
                    self.of_tag(tag).for_each(|model| (model.paused, model.away) = (false, false));
                }
                Err(vramctl_model::Error::DeviceMemory(shortage)) => prop_assert!(shortage.needed > shortage.free),
                Err(error) => prop_assert!(!self.known(tag), "{}", error),
            },
        }
        Ok(())
    }

    fn take(&mut self, which: u64, guard: bool) -> Result<(), TestCaseError> {
        let holdings = Memory::get().holdings();
        prop_assert_eq!(counts(&holdings.away), self.counts(|model| model.away));
        prop_assert_eq!(counts(&holdings.here), self.counts(|model| !model.paused));
        let mut amounts = holdings.here;
        amounts.values_mut().flatten().for_each(|amount| amount.count = which % (amount.count + 1));
        let asked = counts(&amounts);
        let wanted = common::pausing_with(&[], |request| {
            request.scheduler = Some(1);
            request.options.guard = guard;
            request.amounts = Some(amounts);
        });
        let report = Memory::get().pause(&wanted, &mut ()).unwrap();
        let is_away = |address: &u64| Memory::get().registry.find(*address).is_some_and(|one| one.is_unmapped());
        for (_, model) in self.allocations.iter_mut().filter(|(address, model)| !model.paused && is_away(address)) {
            (model.paused, model.away, model.guarded) = (true, true, guard && report.unguarded_bytes == 0);
            if model.tag.is_some_and(|(_, policy)| policy == Policy::Discard) {
                model.contents = None;
            }
        }
        let mut now = self.counts(|model| model.away);
        for (bytes, count) in counts(&holdings.away) {
            *now.entry(bytes).or_default() -= count;
        }
        now.retain(|_, count| *count > 0);
        prop_assert_eq!(now, asked);
        Ok(())
    }

    fn bring_back(&mut self) -> Result<(), TestCaseError> {
        let wanted = common::resuming_with(&[], |request| request.scheduler = Some(1));
        match Memory::get().resume(&wanted, &mut ()) {
            Ok(report) => {
                let away = |model: &&mut Model| model.away;
                prop_assert_eq!(report.allocations, self.of_tag(None).filter(away).count() as u64);
                let any_guarded = self.of_tag(None).any(|model| model.away && model.guarded);
                prop_assert!(report.guard_written_bytes == 0 || self.strays);
                self.strays &= !any_guarded;
                self.of_tag(None).filter(away).for_each(|model| (model.paused, model.away) = (false, false));
            }
            Err(vramctl_model::Error::DeviceMemory(shortage)) => prop_assert!(shortage.needed > shortage.free),
            Err(error) => prop_assert!(false, "{}", error),
        }
        Ok(())
    }

    fn check(&self) -> Result<(), TestCaseError> {
        for (address, model) in &self.allocations {
            if model.paused {
                continue;
            }
            let found = read(*address, model.bytes).unwrap();
            let right = model.contents.as_ref().map_or_else(|| found.iter().all(|byte| *byte == 0), |wanted| found == *wanted);
            prop_assert!(right, "contents at {:#x} are not what they should be", address);
        }
        let paused: usize = self.allocations.values().filter(|model| model.paused).count();
        let status = Memory::get().status();
        prop_assert_eq!(status.tags.iter().any(|tag| tag.paused_bytes > 0), paused > 0);
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: common::cases(48), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_sequences_behave_like_the_model(steps in prop::collection::vec(step(), 1..60)) {
        let gpu = Gpu::take();
        let before = gpu.footprint();
        let mut world = World::default();
        for step in steps {
            world.apply(step)?;
        }
        world.check()?;
        for address in world.allocations.keys() {
            prop_assert_eq!(free(*address), 0);
        }
        prop_assert_eq!(gpu.footprint(), before);
    }
}

/// Threads allocate, write, pause and resume under their own tags while one thread queries the status and another pauses and
/// resumes a bystander. Every thread must always find its own contents.
#[test]
fn many_threads_find_their_own_contents() {
    const THREADS: u64 = 6;
    let gpu = Gpu::take();
    let before = gpu.footprint();
    let over = AtomicBool::new(false);
    let bystander = common::malloc_tagged("bystander", None, 4 * MIB).unwrap();
    let bystanding = pattern(99, 4 * MIB);
    assert_eq!(write(bystander, &bystanding), 0);
    let until = Instant::now() + Duration::from_secs(4);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..THREADS).map(|number| scope.spawn(move || work(number, until))).collect();
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                let status = Memory::get().status();
                assert!(status.tags.iter().all(|tag| tag.paused_bytes <= tag.bytes));
            }
        });
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                common::cycle(&["bystander"]);
            }
        });
        let told = common::SetOnDrop(&over);
        let rounds: u64 = workers.into_iter().map(|worker| worker.join().unwrap()).sum();
        drop(told);
        println!("{rounds} rounds");
        assert!(rounds > THREADS);
    });
    assert!(read(bystander, 4 * MIB).unwrap() == bystanding);
    assert_eq!(free(bystander), 0);
    assert_eq!(gpu.footprint(), before);
}

fn work(number: u64, until: Instant) -> u64 {
    let tag = format!("thread-{number}");
    // Half of them discard their contents.
    let dropped = number % 4 >= 2;
    region::begin(Some(&tag), dropped.then_some(Policy::Discard)).unwrap();
    common::set_device((number % 2) as i32);
    let mut seed = number << 32;
    let mut rounds = 0;
    while Instant::now() < until || rounds < 2 {
        let mut held = Vec::new();
        for _ in 0..3 {
            seed += 1;
            let bytes = MIB + (seed as usize * 7919) % (4 * MIB);
            assert!(bytes < DEVICE_BYTES / 16);
            let address = malloc(bytes).unwrap();
            let contents = pattern(seed, bytes);
            assert_eq!(write(address, &contents), 0);
            held.push((address, contents));
        }
        common::pause(&[&tag]).unwrap();
        let (freed, _) = held.pop().unwrap();
        assert_eq!(free(freed), 0);
        common::resume(&[&tag]).unwrap();
        for (address, contents) in &mut held {
            if dropped {
                assert!(read(*address, contents.len()).unwrap().iter().all(|byte| *byte == 0), "thread {number} has strange contents");
                *contents = pattern(seed + *address, contents.len());
                assert_eq!(write(*address, contents), 0);
            }
        }
        while let Some((address, contents)) = held.pop() {
            assert!(read(address, contents.len()).unwrap() == contents, "thread {number} lost contents");
            assert_eq!(free(address), 0);
        }
        rounds += 1;
    }
    region::end().unwrap();
    rounds
}
