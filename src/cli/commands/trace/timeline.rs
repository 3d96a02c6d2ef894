//! Interprets a recording, by process: each owner's memory over time, pauses and resumes, and failures.

use super::follow::Followed;
use std::collections::BTreeMap;
use vramctl_model::{Happening, Kind, MemoryOwner, OwnersBytes, StatusCode, TraceEvent, Verb};

/// The life of one process's memory.
#[derive(Debug, Default)]
pub struct Timeline {
    /// From when to when, in nanoseconds of the host's clock.
    pub from: u64,
    pub to: u64,
    pub owners: BTreeMap<u16, History>,
    pub slices: Vec<Stretch>,
    pub failures: Vec<FailedRequest>,
    /// How many events were lost.
    pub missed: u64,
}

/// One owner's memory on a device.
#[derive(Debug)]
pub struct History {
    pub owner: MemoryOwner,
    /// (Time, bytes from then on). Times do not decrease.
    pub steps: Vec<(u64, u64)>,
}

/// A pause, a resume, a stage of one, or a trim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stretch {
    pub name: &'static str,
    pub is_stage: bool,
    pub thread: u32,
    pub from: u64,
    pub to: u64,
    pub bytes: u64,
    /// What it paused or resumed of each owner.
    pub owners: BTreeMap<u16, u64>,
    pub outcome: Ending,
}

impl Stretch {
    fn new(name: &'static str, thread: u32, from: u64, to: u64) -> Self {
        Self { name, is_stage: false, thread, from, to, bytes: 0, owners: BTreeMap::new(), outcome: Ending::Done }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    Done,
    Failed(Kind),
    /// It had not ended.
    UnderWay,
}

/// A request for memory that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FailedRequest {
    pub at: u64,
    pub owner: u16,
    pub bytes: u64,
    pub code: StatusCode,
}

impl Timeline {
    pub fn of(followed: &Followed) -> Self {
        let events: Vec<_> = followed.events.iter().copied().collect();
        let first = events.first().map_or(followed.now_ns, |event| event.at_ns);
        // The answer's time may be before its last events.
        let last = events.iter().map(|event| event.at_ns).max().unwrap_or_default();
        let mut timeline = Self { from: first, to: followed.now_ns.max(last), missed: missed(&events), ..Self::default() };
        timeline.owners = histories(&events, &followed.owners, first);
        timeline.slices = slices(&events, timeline.to);
        timeline.failures = events.iter().filter_map(failure).collect();
        timeline
    }
}

fn missed(events: &[TraceEvent]) -> u64 {
    events.last().map_or(0, |last| last.number + 1 - events.len() as u64)
}

fn failure(event: &TraceEvent) -> Option<FailedRequest> {
    match event.what {
        Happening::Failed { owner, bytes, code } => Some(FailedRequest { at: event.at_ns, owner, bytes, code }),
        _ => None,
    }
}

/// The bytes that an event adds; `None` if it changes nothing.
fn change(what: &Happening) -> Option<(OwnersBytes, i64)> {
    match *what {
        Happening::Allocated(of) | Happening::Resumed(of) => Some((of, of.bytes as i64)),
        Happening::Freed(of) | Happening::Paused(of) => Some((of, -(of.bytes as i64))),
        Happening::FreedPaused(of) => Some((of, 0)),
        _ => None,
    }
}

/// Sums up changes instead of using the totals in the events: two threads may have recorded their events out of order, but the sum is right
/// in the end. Only the total in each owner's first event, and in the first after a gap, is used.
fn histories(events: &[TraceEvent], owners: &BTreeMap<u16, MemoryOwner>, from: u64) -> BTreeMap<u16, History> {
    let mut all: BTreeMap<_, _> = owners.iter().map(|(id, owner)| (*id, History { owner: owner.clone(), steps: Vec::new() })).collect();
    let is_whole = events.first().is_none_or(|event| event.number == 0);
    let (mut known, mut now, mut next) = (BTreeMap::<u16, u64>::new(), from, events.first().map_or(0, |event| event.number));
    for event in events {
        if event.number != next {
            known.clear();
        }
        next = event.number + 1;
        // Events are in the order of their numbers. A thread may have read the clock and then been delayed.
        now = now.max(event.at_ns);
        let Some((of, added)) = change(&event.what) else { continue };
        let Some(History { steps, .. }) = all.get_mut(&of.owner) else { continue };
        if steps.is_empty() {
            let before = if is_whole { 0 } else { of.in_use.wrapping_add_signed(-added) };
            steps.push((from, MemoryOwner::in_use_of(before)));
            known.entry(of.owner).or_insert(before);
        }
        let there = match known.get(&of.owner) {
            Some(before) => before.wrapping_add_signed(added),
            None => of.in_use,
        };
        known.insert(of.owner, there);
        steps.push((now, MemoryOwner::in_use_of(there)));
    }
    for History { owner, steps } in all.values_mut() {
        if steps.is_empty() {
            steps.push((from, owner.in_use));
        }
    }
    all
}

/// A pause or resume whose end has not come yet.
#[derive(Debug)]
struct Unfinished {
    verb: Verb,
    from: u64,
    owners: BTreeMap<u16, u64>,
    stages: Vec<Stretch>,
}

impl Unfinished {
    fn new(verb: Verb, from: u64) -> Self {
        Self { verb, from, owners: BTreeMap::new(), stages: Vec::new() }
    }

    /// A process pauses or resumes once at a time, so whose memory changes belongs to that.
    fn changes(open: &mut BTreeMap<u32, Self>, verb: Verb, of: OwnersBytes) {
        if let Some(one) = open.values_mut().find(|one| one.verb == verb) {
            *one.owners.entry(of.owner).or_default() += of.bytes;
        }
    }
}

/// Each thread does one thing at a time, so its slices nest.
fn slices(events: &[TraceEvent], to: u64) -> Vec<Stretch> {
    let mut open = BTreeMap::<u32, Unfinished>::new();
    let mut done = Vec::new();
    for event in events {
        let at = event.at_ns;
        match event.what {
            Happening::Began { verb, thread } => _ = open.insert(thread, Unfinished::new(verb, at)),
            Happening::Stage { stage, thread, ns } => {
                let from = at.saturating_sub(ns);
                let slice = Stretch { is_stage: true, ..Stretch::new(stage.name(), thread, from, at) };
                match open.get_mut(&thread) {
                    Some(transition) => transition.stages.push(slice),
                    None => done.push(slice),
                }
            }
            Happening::Ended { verb, thread, ns, bytes, error } => {
                let Unfinished { from, owners, stages, .. } =
                    open.remove(&thread).unwrap_or_else(|| Unfinished::new(verb, at.saturating_sub(ns)));
                let outcome = error.map_or(Ending::Done, Ending::Failed);
                done.push(Stretch { bytes, owners, outcome, ..Stretch::new(verb.name(), thread, from, at) });
                done.extend(fitted(stages, from));
            }
            Happening::Trimmed { thread, ns, bytes } => {
                let from = at.saturating_sub(ns);
                done.push(Stretch { bytes, ..Stretch::new("trim", thread, from, at) });
            }
            Happening::Paused(of) => Unfinished::changes(&mut open, Verb::Pause, of),
            Happening::Resumed(of) => Unfinished::changes(&mut open, Verb::Resume, of),
            _ => (),
        }
    }
    for (thread, Unfinished { verb, from, owners, stages }) in open {
        done.push(Stretch { owners, outcome: Ending::UnderWay, ..Stretch::new(verb.name(), thread, from, to) });
        done.extend(fitted(stages, from));
    }
    done.sort_by_key(|slice| (slice.from, std::cmp::Reverse(slice.to)));
    done
}

/// Adjusts stages so that they do not partly overlap and begin within their transition. Only a stage's length and the time of its recording
/// are known, and that is slightly late.
fn fitted(mut stages: Vec<Stretch>, from: u64) -> Vec<Stretch> {
    /// The largest such delay.
    const LATE: u64 = 50_000;
    for at in 0..stages.len() {
        stages[at].from = stages[at].from.max(from);
        let (before, rest) = stages.split_at_mut(at);
        let stage = &mut rest[0];
        for other in before {
            if stage.from >= other.to {
                continue;
            }
            if stage.from.abs_diff(other.from) < LATE {
                // They began together.
                stage.from = other.from;
            } else if stage.from > other.from {
                stage.from = other.to.min(stage.to);
            }
        }
    }
    stages
}

#[cfg(test)]
mod tests {
    use super::*;
    use vramctl_model::Stage;

    fn of(bytes: u64, in_use: u64) -> OwnersBytes {
        OwnersBytes { owner: 7, bytes, in_use }
    }

    fn events(first: u64, all: &[(u64, Happening)]) -> Vec<TraceEvent> {
        (first..).zip(all).map(|(number, (at_ns, what))| TraceEvent { number, at_ns: *at_ns, what: *what }).collect()
    }

    fn steps(events: &[TraceEvent], in_use: u64) -> Vec<(u64, u64)> {
        let owner = MemoryOwner { owner: 7, tag: Some("kv".into()), library: None, device: None, gpu: None, in_use };
        let from = events.first().map_or(3, |event| event.at_ns);
        histories(events, &[(7, owner)].into(), from).remove(&7).unwrap().steps
    }

    #[test]
    fn a_history_adds_up_whatever_the_order() {
        // Two threads: the first one's event is recorded second.
        let all = [(10, Happening::Allocated(of(2, 5))), (9, Happening::Allocated(of(3, 3))), (20, Happening::Paused(of(5, 0)))];
        assert_eq!(steps(&events(0, &all), 0), [(10, 0), (10, 2), (10, 5), (20, 0)]);
        let all = [(30, Happening::FreedPaused(of(2, 0))), (40, Happening::Resumed(of(3, 3))), (50, Happening::Freed(of(3, 0)))];
        assert_eq!(steps(&events(0, &all), 0), [(30, 0), (30, 0), (40, 3), (50, 0)]);
    }

    #[test]
    fn earlier_memory_is_known_from_the_first_event_or_the_last_answer() {
        assert_eq!(steps(&events(100, &[(10, Happening::Freed(of(2, 5)))]), 5), [(10, 7), (10, 5)]);
        assert_eq!(steps(&[], 9), [(3, 9)]);
    }

    #[test]
    fn after_a_gap_an_owners_total_is_used() {
        let mut all = events(0, &[(1, Happening::Allocated(of(2, 2)))]);
        all.extend(events(5, &[(9, Happening::Allocated(of(1, 8))), (10, Happening::Freed(of(3, 4)))]));
        assert_eq!(steps(&all, 0), [(1, 0), (1, 2), (9, 8), (10, 5)]);
        assert_eq!(missed(&all), 4);
    }

    #[test]
    fn a_history_is_never_less_than_nothing() {
        let all = [(1, Happening::Freed(of(2, 0))), (2, Happening::Allocated(of(5, 3)))];
        assert_eq!(steps(&events(0, &all), 0), [(1, 0), (1, 0), (2, 3)]);
        assert_eq!(steps(&events(9, &[(1, Happening::Allocated(of(5, 0)))]), 0), [(1, 0), (1, 0)]);
    }

    #[test]
    fn slices_nest() {
        let stage = |stage, thread, ns| Happening::Stage { stage, thread, ns };
        let all = [
            (1_000_000, Happening::Began { verb: Verb::Resume, thread: 1 }),
            (1_000_500, Happening::Began { verb: Verb::Pause, thread: 2 }),
            // Longer than the transition: recorded late.
            (1_010_000, stage(Stage::Wait, 1, 12_000)),
            (2_000_000, stage(Stage::Map, 1, 980_000)),
            (5_000_300, stage(Stage::Restore, 1, 3_980_000)),
            (5_000_400, Happening::Ended { verb: Verb::Resume, thread: 1, ns: 4_000_300, bytes: 64, error: None }),
        ];
        let found = slices(&events(0, &all), 9_000_000);
        let slices: Vec<_> = found.iter().map(|slice| (slice.name, slice.thread, slice.from, slice.to)).collect();
        assert_eq!(
            slices,
            [
                ("resume", 1, 1_000_000, 5_000_400),
                ("wait", 1, 1_000_000, 1_010_000),
                ("pause", 2, 1_000_500, 9_000_000),
                ("restore", 1, 1_020_000, 5_000_300),
                ("map", 1, 1_020_000, 2_000_000),
            ]
        );
        assert_eq!((found[0].outcome, found[2].outcome, found[0].bytes), (Ending::Done, Ending::UnderWay, 64));
    }

    #[test]
    fn nothing_comes_after_the_end() {
        let events = events(0, &[(10, Happening::Allocated(of(2, 2))), (30, Happening::Freed(of(2, 0)))]);
        let end = |now_ns| Timeline::of(&Followed { events: events.clone().into(), now_ns, ..Followed::default() }).to;
        assert_eq!((end(20), end(40)), (30, 40));
    }

    #[test]
    fn a_slice_whose_beginning_is_gone_is_known_by_its_length() {
        let ended = Happening::Ended { verb: Verb::Pause, thread: 1, ns: 40, bytes: 0, error: Some(Kind::Busy) };
        let found = slices(&events(70, &[(100, ended)]), 200);
        assert_eq!((found[0].from, found[0].to, found[0].outcome), (60, 100, Ending::Failed(Kind::Busy)));
    }
}
