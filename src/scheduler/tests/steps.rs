//! Single steps that no property of the simulation tells apart.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use vramctl_scheduler::{
    Action, Activity, AskId, Cause, Change, Class, Event, GangId, GpuId, Holdings, JobId, Memory, Outcome, Policy, Priority, ProgramId,
    Refusal, Remembered, Report, Settings, State, Why,
};

const GIB: u64 = 1 << 30;
const GPU: GpuId = GpuId(0);
const OTHER: GpuId = GpuId(1);

/// A GPU of 102 GiB, of which 100 are for programs.
fn node() -> State {
    let mut state = State::new(Policy::default());
    state.step(Duration::ZERO, Event::Gpu { gpu: GPU, total: 102 * GIB, unmanaged: 0 });
    state.step(Duration::ZERO, Event::Host { room: 1000 * GIB, files: 0 });
    state.step(Duration::ZERO, Event::Ready);
    state
}

/// A second GPU of the same size.
fn with_other_gpu(mut state: State) -> State {
    state.step(Duration::ZERO, Event::Gpu { gpu: OTHER, total: 102 * GIB, unmanaged: 0 });
    state
}

/// In its turn for so many seconds more.
fn in_turn(seconds: u64, report: Report) -> Report {
    let turn = (Duration::ZERO, Duration::from_secs(seconds), Priority::Normal);
    Report { remembered: Remembered { turn, ..Remembered::default() }, ..report }
}

fn join(state: &mut State, reports: impl IntoIterator<Item = Report>) {
    for report in reports {
        state.step(Duration::ZERO, Event::Joined(Box::new(report)));
    }
}

fn asks(program: u64, room: &[(GpuId, u64)]) -> Event {
    let room = room.iter().map(|&(gpu, gib)| (gpu, gib * GIB)).collect();
    Event::Asks { program: ProgramId(program), ask: AskId(0), room }
}

/// A program with GiB on the GPU and away from it.
fn program(id: u64, resident: u64, away: u64) -> Report {
    let holdings = |gib: u64| -> Holdings { [(Class::Kept, gib * GIB, 1)].into_iter().collect() };
    let memory = Memory { resident: holdings(resident), away: holdings(away), fixed: 0, peak: (resident + away) * GIB };
    Report {
        program: ProgramId(id),
        job: None,
        partners: BTreeSet::new(),
        several_nodes: false,
        settings: Settings::default(),
        memory: [(GPU, memory)].into(),
        held: away > 0,
        paused: false,
        capturing: false,
        activity: Activity::Busy,
        called: None,
        asks: Vec::new(),
        remembered: Remembered::default(),
    }
}

/// The change among the actions.
fn change(actions: &[Action]) -> Option<&Change> {
    actions.iter().find_map(|action| if let Action::Change(change) = action { Some(change) } else { None })
}

/// Who leaves by it, and why.
fn leaves(change: &Change) -> Vec<(ProgramId, Why)> {
    change.leaving.iter().flat_map(|leave| leave.programs.iter().map(|program| (*program, leave.why))).collect()
}

/// Room that was promised to a program is free when the program dies, not only when its change has ended.
#[test]
fn nothing_stays_promised_to_the_dead() {
    let mut state = node();
    state.step(Duration::ZERO, Event::Joined(Box::new(program(1, 0, 40))));
    state.step(Duration::ZERO, Event::Joined(Box::new(program(2, 5, 0))));
    let comes = state.step(Duration::from_secs(1), Event::Called(ProgramId(1))).actions;
    assert!(comes.iter().any(|action| matches!(action, Action::Change(change) if change.coming == [ProgramId(1)])), "{comes:?}");
    let ask = Event::Asks { program: ProgramId(2), ask: AskId(0), room: [(GPU, 90 * GIB)].into() };
    let early = state.step(Duration::from_secs(2), ask).actions;
    assert!(!early.contains(&Action::Grant(ProgramId(2), AskId(0))), "it is promised: {early:?}");
    let freed = state.step(Duration::from_secs(3), Event::Left(ProgramId(1))).actions;
    assert!(freed.contains(&Action::Grant(ProgramId(2), AskId(0))), "{freed:?}");
}

/// A program dies while it leaves for another one: what it was to give is the other's, as long as the change has not ended.
#[test]
fn what_the_dead_were_to_give_is_promised_to_who_comes() {
    let mut state = node();
    let idle = Report { activity: Activity::Idle(Duration::from_secs(9)), ..program(1, 90, 0) };
    for report in [idle, program(2, 0, 40), program(3, 5, 0)] {
        state.step(Duration::ZERO, Event::Joined(Box::new(report)));
    }
    let mut comes = state.step(Duration::from_secs(1), Event::Called(ProgramId(2))).actions;
    if !comes.iter().any(|action| matches!(action, Action::Change(_))) {
        let idle = Activity::Idle(Duration::from_secs(9));
        comes = state.step(Duration::from_secs(2), Event::Activity(ProgramId(1), idle)).actions;
    }
    let change = comes.iter().find_map(|action| if let Action::Change(change) = action { Some(change.clone()) } else { None });
    let change = change.unwrap_or_else(|| panic!("{comes:?}"));
    assert_eq!((&change.coming[..], change.leaving[0].programs[0]), (&[ProgramId(2)][..], ProgramId(1)), "{change:?}");
    state.step(Duration::from_secs(2), Event::Left(ProgramId(1)));
    let ask = Event::Asks { program: ProgramId(3), ask: AskId(0), room: [(GPU, 50 * GIB)].into() };
    let early = state.step(Duration::from_secs(2), ask).actions;
    assert!(!early.contains(&Action::Grant(ProgramId(3), AskId(0))), "it is promised: {early:?}");
    let done =
        Event::Done { change: change.id, outcome: Outcome::Changed, programs: vec![(ProgramId(2), program(2, 40, 0).memory, false)] };
    let late = state.step(Duration::from_secs(3), done).actions;
    assert!(late.contains(&Action::Grant(ProgramId(3), AskId(0))), "the rest is free: {late:?}");
}

/// A scheduler takes over in the middle of a pause, which ends after the program has joined.
#[test]
fn a_pause_that_ends_late_is_the_schedulers_own() {
    let mut state = node();
    state.step(Duration::ZERO, Event::Joined(Box::new(program(1, 40, 0))));
    let away = program(1, 0, 40).memory.remove(&GPU).unwrap();
    state.step(Duration::from_secs(1), Event::Memory { program: ProgramId(1), gpu: GPU, memory: away });
    state.step(Duration::from_secs(1), Event::Held(ProgramId(1), true));
    let comes = state.step(Duration::from_secs(1), Event::Called(ProgramId(1))).actions;
    assert!(comes.iter().any(|action| matches!(action, Action::Change(change) if change.coming == [ProgramId(1)])), "{comes:?}");
}

/// Jobs that start at the same moment do not keep each other from their first memory: when one leaves, the next may begin.
#[test]
fn jobs_that_wait_for_their_first_memory_are_served_one_after_the_other() {
    let mut state = node();
    let job = |id: u64, rank: u64| Report {
        job: Some(JobId(id)),
        settings: Settings { limit: Some(60 * GIB), ..Settings::default() },
        ..program(10 * id + rank, 0, 0)
    };
    let asks = |id: u64| Event::Asks { program: ProgramId(id), ask: AskId(0), room: [(GPU, GIB)].into() };
    for id in 1..=3 {
        for rank in 0..2 {
            state.step(Duration::ZERO, Event::Joined(Box::new(job(id, rank))));
        }
    }
    let first = state.step(Duration::from_secs(1), asks(10)).actions;
    assert!(first.contains(&Action::Grant(ProgramId(10), AskId(0))), "{first:?}");
    let settled = Memory { fixed: GIB, peak: GIB, ..Memory::default() };
    state.step(Duration::from_secs(1), Event::Settled { program: ProgramId(10), ask: AskId(0), memory: [(GPU, settled)].into() });
    for id in [20, 30] {
        state.step(Duration::from_secs(2), asks(id));
    }
    let next: Vec<_> = [10, 11].iter().flat_map(|id| state.step(Duration::from_secs(3), Event::Left(ProgramId(*id))).actions).collect();
    assert!(next.contains(&Action::Grant(ProgramId(20), AskId(0))), "{next:?}");
    assert!(!next.contains(&Action::Grant(ProgramId(30), AskId(0))), "both would outgrow the GPU: {next:?}");
}

/// Who works is known only once all have been watched for a while: a busy one does not leave in place of one that nobody has watched and is
/// idle.
#[test]
fn it_is_known_who_is_idle_before_a_busy_one_leaves() {
    let mut state = node();
    for report in [program(1, 40, 0), program(2, 40, 0), program(3, 10, 30)] {
        state.step(Duration::ZERO, Event::Joined(Box::new(report)));
    }
    let mut now = Duration::from_secs(100);
    let mut actions = state.step(now, Event::Called(ProgramId(3))).actions;
    // Nobody has looked before: both say that they work at first.
    for (id, activity) in [(1, Activity::Busy), (2, Activity::Busy), (2, Activity::Idle(Duration::from_millis(25)))] {
        now += if activity == Activity::Busy { Duration::from_millis(1) } else { Duration::from_millis(25) };
        actions.extend(state.step(now, Event::Activity(ProgramId(id), activity)).actions);
    }
    actions.extend(state.step(now + Duration::from_millis(50), Event::Timer).actions);
    let changes = actions.iter().filter_map(|action| if let Action::Change(change) = action { Some(change) } else { None });
    let left: Vec<_> = changes.flat_map(|change| &change.leaving).flat_map(|leave| &leave.programs).collect();
    assert_eq!(left, [&ProgramId(2)], "{actions:?}");
}

/// One of a low priority that nobody could serve does not keep another from rising.
#[test]
fn whoever_waits_in_vain_keeps_nobody_from_rising() {
    let mut state = node();
    let of = |priority, report: Report| Report { settings: Settings { priority, ..Settings::default() }, ..report };
    let captures = Report { capturing: true, ..program(1, 60, 0) };
    let all = [captures, of(Priority::High, program(2, 35, 0)), of(Priority::Low, program(3, 0, 50)), of(Priority::Low, program(4, 0, 30))];
    for report in all {
        state.step(Duration::ZERO, Event::Joined(Box::new(report)));
    }
    let mut actions = Vec::new();
    for id in [3, 4] {
        actions.extend(state.step(Duration::from_secs(id), Event::Called(ProgramId(id))).actions);
    }
    actions.extend(state.step(Duration::from_secs(5), Event::Activity(ProgramId(2), Activity::Busy)).actions);
    // As often as it asks to be woken: until two have been served, say.
    let mut now = Duration::from_secs(5);
    for _ in 0..20 {
        let step = state.step(now, Event::Timer);
        actions.extend(step.actions);
        now = step.wake.unwrap_or(now).max(now);
    }
    let comes = |action: &Action| matches!(action, Action::Change(change) if change.coming == [ProgramId(4)]);
    assert!(actions.iter().any(comes), "{actions:?}");
}

/// One program of a gang gets room where the gang is. Another of them has been idle all the time, and does not say so again.
#[test]
fn who_is_idle_stays_so_while_its_partner_grows() {
    let mut state = node();
    let at = Duration::from_millis;
    // Its work elsewhere keeps the two in place as long as they are tied.
    let first = Report { partners: [ProgramId(2)].into(), several_nodes: true, ..program(1, 20, 0) };
    let second = Report { partners: [ProgramId(1)].into(), ..program(2, 40, 0) };
    for report in [first, second, program(3, 40, 0), program(4, 0, 50)] {
        state.step(at(0), Event::Joined(Box::new(report)));
    }
    state.step(at(0), Event::Called(ProgramId(4)));
    state.step(at(1), Event::Activity(ProgramId(1), Activity::Busy));
    state.step(at(1), Event::Activity(ProgramId(2), Activity::Idle(Duration::ZERO)));
    state.step(at(1), Event::Activity(ProgramId(3), Activity::Idle(Duration::ZERO)));
    let asks = Event::Asks { program: ProgramId(1), ask: AskId(0), room: [(GPU, 10 * GIB)].into() };
    let grows = state.step(at(200), asks).actions;
    let grows = change(&grows).unwrap_or_else(|| panic!("{grows:?}"));
    assert_eq!(leaves(grows), [(ProgramId(3), Why::Idle)]);
    let left = vec![(ProgramId(3), program(3, 0, 40).memory, true)];
    let granted = state.step(at(300), Event::Done { change: grows.id, outcome: Outcome::Changed, programs: left }).actions;
    assert!(granted.contains(&Action::Grant(ProgramId(1), AskId(0))), "{granted:?}");
    state.step(at(301), Event::Settled { program: ProgramId(1), ask: AskId(0), memory: program(1, 30, 0).memory });
    // The turn of the two is not over.
    let untied = state.step(at(1900), Event::Tied(ProgramId(1), BTreeSet::new()));
    let comes = change(&untied.actions).unwrap_or_else(|| panic!("{untied:?}"));
    assert_eq!(leaves(comes), [(ProgramId(2), Why::Idle)], "{comes:?}");
}

/// A request that never fits is refused before anybody is served: as long as it waits, its job cannot give way to the one that comes first,
/// and others would pass that one.
#[test]
fn a_request_that_never_fits_lets_nobody_pass() {
    let mut state = node();
    let job = |id: u64, resident| Report { job: Some(JobId(id / 10)), ..program(id, resident, 0) };
    for report in [job(10, 5), job(11, 5), job(20, 40), job(21, 40), program(3, 0, 5)] {
        state.step(Duration::ZERO, Event::Joined(Box::new(report)));
    }
    let at = |ms: u64| Duration::from_millis(1000 + ms);
    let asks = |program, gib: u64| Event::Asks { program: ProgramId(program), ask: AskId(0), room: [(GPU, gib * GIB)].into() };
    assert_eq!(change(&state.step(at(0), asks(10, 20)).actions), None, "the others may be busy or not");
    assert_eq!(change(&state.step(at(1), Event::Called(ProgramId(3))).actions), None, "the job comes first");
    let refused = state.step(at(2), asks(20, 200)).actions;
    assert_eq!(refused[..1], [Action::Refuse(ProgramId(20), AskId(0), Refusal::NeverFits)]);
    assert_eq!(change(&refused), None, "the job still comes first");
    let served = state.step(at(100), Event::Timer).actions;
    let served = change(&served).unwrap_or_else(|| panic!("{served:?}"));
    assert_eq!(leaves(served), [(ProgramId(20), Why::TurnOver), (ProgramId(21), Why::TurnOver)], "{served:?}");
}

/// The host has room for the contents of one: they are those of the GPU on which all have contents, although another comes first that has
/// some, too.
#[test]
fn the_hosts_room_goes_to_the_gpu_that_cannot_do_without() {
    let mut state = with_other_gpu(node());
    state.step(Duration::ZERO, Event::Host { room: 50 * GIB, files: 0 });
    for (id, gpu, class, count) in [(1, GPU, Class::Kept, 4), (2, GPU, Class::Discardable, 4), (3, OTHER, Class::Kept, 8)] {
        let memory = Memory { resident: [(class, 10 * GIB, count)].into_iter().collect(), ..Memory::default() };
        let report = Report { memory: [(gpu, memory)].into(), activity: Activity::Empty, ..program(id, 0, 0) };
        state.step(Duration::ZERO, Event::Joined(Box::new(report)));
    }
    state.step(Duration::ZERO, Event::Joined(Box::new(program(4, 0, 0))));
    let step = state.step(Duration::from_secs(1), asks(4, &[(GPU, 60), (OTHER, 60)]));
    let makes_room = change(&step.actions).unwrap_or_else(|| panic!("{step:?}, {:?}", state.gangs().collect::<Vec<_>>()));
    assert_eq!(leaves(makes_room), [(ProgramId(2), Why::Idle), (ProgramId(3), Why::Idle)]);
    assert_eq!((makes_room.leaving[0].contents(), makes_room.leaving[1].contents()), (0, 40 * GIB));
}

/// One that is served first waits for others on one GPU, and holds memory on another: it loses nothing there to those behind it.
#[test]
fn who_comes_first_does_not_give_way_to_who_comes_later() {
    let mut state = with_other_gpu(node());
    let mut first = program(1, 0, 40);
    first.memory.insert(OTHER, program(1, 40, 0).memory.remove(&GPU).unwrap());
    let second = Report { memory: BTreeMap::new(), ..program(2, 0, 0) };
    join(&mut state, [first, second, in_turn(60, program(3, 90, 0))]);
    assert_eq!(change(&state.step(Duration::from_secs(1), Event::Called(ProgramId(1))).actions), None, "another has its turn");
    assert_eq!(change(&state.step(Duration::from_secs(2), asks(2, &[(OTHER, 80)])).actions), None, "the first is about to come");
}

/// One waits behind another on one GPU, and there is room for it on the other GPU: that is kept.
#[test]
fn the_room_of_who_waits_behind_another_is_kept() {
    let mut state = with_other_gpu(node());
    let last = Report { memory: BTreeMap::new(), ..program(4, 0, 0) };
    let mut second = program(2, 0, 20);
    second.memory.insert(OTHER, program(2, 0, 60).memory.remove(&GPU).unwrap());
    join(&mut state, [program(1, 0, 40), second, in_turn(60, program(3, 90, 0)), last]);
    state.step(Duration::from_secs(1), Event::Called(ProgramId(1)));
    assert_eq!(change(&state.step(Duration::from_secs(2), Event::Called(ProgramId(2))).actions), None, "it waits behind the first");
    let passed = state.step(Duration::from_secs(3), asks(4, &[(OTHER, 60)])).actions;
    assert!(!passed.contains(&Action::Grant(ProgramId(4), AskId(0))), "{passed:?}");
}

/// Its turn would be of no use otherwise: of two that start together, each would lose its place to the other at each allocation.
#[test]
fn who_asks_for_more_in_its_turn_comes_before_older_waiters() {
    let mut state = node();
    let idle = Report { activity: Activity::Empty, ..program(3, 40, 0) };
    join(&mut state, [program(1, 0, 60), in_turn(60, program(2, 50, 0)), idle]);
    assert_eq!(change(&state.step(Duration::from_secs(1), Event::Called(ProgramId(1))).actions), None, "another has its turn");
    let grows = state.step(Duration::from_secs(2), asks(2, &[(GPU, 20)])).actions;
    let grows = change(&grows).unwrap_or_else(|| panic!("{grows:?}"));
    assert_eq!((grows.cause, leaves(grows)), (Cause::Asks(GangId(2)), vec![(ProgramId(3), Why::Idle)]));
}

/// The time of one that did not drain ends without any event.
#[test]
fn who_waits_for_one_that_is_left_alone_is_woken_when_that_ends() {
    let mut state = node();
    let backoff = (Duration::from_secs(10), Duration::from_secs(20));
    let left_alone = Report { remembered: Remembered { backoff, ..Remembered::default() }, ..program(2, 90, 0) };
    join(&mut state, [program(1, 0, 50), left_alone]);
    let step = state.step(Duration::from_secs(1), Event::Called(ProgramId(1)));
    assert_eq!((change(&step.actions), step.wake), (None, Some(Duration::from_secs(10))), "{step:?}");
}

/// A change that makes room for one in its turn is paid for, too, and room that costs nothing is worth a slice.
#[test]
fn a_turn_grows_with_what_was_done_for_it() {
    let mut state = node();
    let idle = Report { activity: Activity::Empty, ..program(2, 50, 0) };
    join(&mut state, [in_turn(30, program(1, 50, 0)), idle]);
    let left = |state: &State, at, id| state.remembered(at, ProgramId(id)).unwrap().turn.1;
    let grows = state.step(Duration::from_secs(10), asks(1, &[(GPU, 20)])).actions;
    let grows = change(&grows).unwrap_or_else(|| panic!("{grows:?}")).id;
    let programs = vec![(ProgramId(2), program(2, 0, 50).memory, true)];
    state.step(Duration::from_secs(11), Event::Done { change: grows, outcome: Outcome::Changed, programs });
    assert_eq!(left(&state, Duration::from_secs(11), 1), Duration::from_secs(19 + 20));
    join(&mut state, [program(3, 0, 0)]);
    state.step(Duration::from_secs(12), asks(3, &[(GPU, 1)]));
    assert_eq!(left(&state, Duration::from_secs(12), 3), Duration::from_secs(2));
}

/// 90 GiB take 2 s to bring back.
#[test]
fn who_is_idle_in_its_turn_is_safe_for_as_long_as_bringing_it_back_takes() {
    let mut state = node();
    join(&mut state, [in_turn(60, program(1, 90, 0)), program(2, 0, 50)]);
    let at = Duration::from_millis;
    state.step(at(0), Event::Called(ProgramId(2)));
    state.step(at(1), Event::Activity(ProgramId(1), Activity::Idle(Duration::ZERO)));
    assert_eq!(change(&state.step(at(1500), Event::Timer).actions), None);
    let comes = state.step(at(2500), Event::Timer).actions;
    assert_eq!(change(&comes).map(leaves), Some(vec![(ProgramId(1), Why::Idle)]), "{comes:?}");
}

/// Else it would do nothing but fail. Whoever refuses, it is the waiter that pauses if it has nobody else to blame.
#[test]
fn who_has_failed_tries_again_after_a_while() {
    for outcome in [Outcome::Failed, Outcome::Refused(ProgramId(1)), Outcome::Refused(ProgramId(9))] {
        let mut state = node();
        join(&mut state, [program(1, 0, 50)]);
        let at = Duration::from_millis;
        let comes = state.step(at(0), Event::Called(ProgramId(1))).actions;
        let comes = change(&comes).unwrap_or_else(|| panic!("{comes:?}")).id;
        let programs = vec![(ProgramId(1), program(1, 0, 50).memory, true)];
        let failed = state.step(at(100), Event::Done { change: comes, outcome, programs });
        assert_eq!((change(&failed.actions), failed.wake), (None, Some(at(200))), "{failed:?}");
        let again = state.step(at(200), Event::Timer).actions;
        assert!(change(&again).is_some(), "{again:?}");
    }
}

/// It waits for room where it is, and one of its threads has nothing to do: it keeps what it has.
#[test]
fn who_waits_is_not_released_for_being_idle() {
    let mut state = node();
    let settings = Settings { idle: Some(Duration::from_secs(5)), ..Settings::default() };
    join(&mut state, [Report { settings, ..program(1, 40, 0) }, Report { capturing: true, ..program(2, 30, 0) }]);
    state.step(Duration::from_secs(1), asks(1, &[(GPU, 50)]));
    state.step(Duration::from_secs(2), Event::Activity(ProgramId(1), Activity::Idle(Duration::ZERO)));
    assert_eq!(change(&state.step(Duration::from_secs(10), Event::Timer).actions), None);
}

/// The last scheduler died while it brought a program in: its turn begins when the next one sees it.
#[test]
fn who_has_come_while_no_scheduler_looked_has_a_slice() {
    let mut state = node();
    join(&mut state, [Report { remembered: Remembered { held: true, ..Remembered::default() }, ..program(1, 40, 0) }]);
    assert_eq!(state.remembered(Duration::ZERO, ProgramId(1)).unwrap().turn.1, Duration::from_secs(2));
}

/// Part of a program is away, so nothing of it passes: as long as it does not call, it is idle.
#[test]
fn who_is_held_and_does_not_call_is_released_for_being_idle() {
    let mut state = node();
    let settings = Settings { idle: Some(Duration::from_secs(5)), ..Settings::default() };
    let memory = |resident, away| {
        let of = |count| [(Class::Kept, 45 * GIB, count)].into_iter().collect();
        [(GPU, Memory { resident: of(resident), away: of(away), fixed: 0, peak: 90 * GIB })].into()
    };
    join(&mut state, [Report { settings, memory: memory(2, 0), ..program(1, 0, 0) }, program(2, 0, 30)]);
    let at = Duration::from_millis;
    state.step(at(0), Event::Called(ProgramId(2)));
    state.step(at(1), Event::Activity(ProgramId(1), Activity::Busy));
    let comes = state.step(at(100), Event::Timer).actions;
    let comes = change(&comes).unwrap_or_else(|| panic!("{comes:?}"));
    assert_eq!(leaves(comes), [(ProgramId(1), Why::TurnOver)]);
    let programs = vec![(ProgramId(1), memory(1, 1), true), (ProgramId(2), program(2, 30, 0).memory, false)];
    state.step(at(1000), Event::Done { change: comes.id, outcome: Outcome::Changed, programs });
    let released = state.step(at(7000), Event::Timer).actions;
    let cause = change(&released).map(|change| change.cause);
    assert_eq!(cause, Some(Cause::IdleFor(GangId(1), at(6000))), "{released:?}");
}

/// Files take what host memory has no room for, and only if nobody leaves for whom there is room.
#[test]
fn files_are_for_what_host_memory_has_no_room_for() {
    let of = |id, class| {
        let memory = Memory { resident: [(class, 40 * GIB, 1)].into_iter().collect(), ..Memory::default() };
        Report { memory: [(GPU, memory)].into(), activity: Activity::Empty, ..program(id, 0, 0) }
    };
    for (class, leaving, to_files) in [(Class::Discardable, 2, 0), (Class::Kept, 1, 40 * GIB)] {
        let mut state = node();
        state.step(Duration::ZERO, Event::Host { room: 30 * GIB, files: 100 * GIB });
        // Of what is away, 10 GiB are in files.
        join(&mut state, [of(1, Class::Kept), of(2, class), program(3, 0, 40), program(4, 0, 0)]);
        let makes_room = state.step(Duration::from_secs(1), asks(4, &[(GPU, 60)])).actions;
        let makes_room = change(&makes_room).unwrap_or_else(|| panic!("{makes_room:?}"));
        assert_eq!((leaves(makes_room), makes_room.to_files), (vec![(ProgramId(leaving), Why::Idle)], to_files), "{makes_room:?}");
    }
}

/// Programs whose ties change while one of them moves stay or go together from when it has arrived.
#[test]
fn ties_that_change_during_a_move_hold_after_it() {
    let mut state = node();
    join(&mut state, [program(1, 0, 40), program(2, 10, 0)]);
    let comes = state.step(Duration::from_secs(1), Event::Called(ProgramId(1))).actions;
    let comes = change(&comes).unwrap_or_else(|| panic!("{comes:?}")).id;
    state.step(Duration::from_secs(2), Event::Tied(ProgramId(1), [ProgramId(2)].into()));
    assert_ne!(state.gang(ProgramId(1)), state.gang(ProgramId(2)));
    let programs = vec![(ProgramId(1), program(1, 40, 0).memory, false)];
    state.step(Duration::from_secs(3), Event::Done { change: comes, outcome: Outcome::Changed, programs });
    assert_eq!(state.gang(ProgramId(1)), state.gang(ProgramId(2)));
}

/// How long a request waits while nobody can give way is the program's own affair.
#[test]
fn a_program_says_how_long_its_requests_wait_in_vain() {
    let mut state = node();
    let settings = Settings { wait: Some(Duration::from_secs(5)), ..Settings::default() };
    join(&mut state, [Report { capturing: true, ..program(1, 90, 0) }, Report { settings, ..program(2, 0, 0) }]);
    let waits = state.step(Duration::from_secs(1), asks(2, &[(GPU, 50)]));
    assert_eq!(waits.wake, Some(Duration::from_secs(6)), "{waits:?}");
    let refused = state.step(Duration::from_secs(6), Event::Timer).actions;
    assert!(refused.contains(&Action::Refuse(ProgramId(2), AskId(0), Refusal::Unserved(Duration::from_secs(5)))), "{refused:?}");
}

/// One that has drained at last is left alone for a short time again after its next failure.
#[test]
fn who_has_left_begins_anew_after_its_failures() {
    let mut state = node();
    let remembered = Remembered { backoff: (Duration::ZERO, Duration::from_secs(80)), ..Remembered::default() };
    join(&mut state, [Report { activity: Activity::Empty, remembered, ..program(1, 90, 0) }, program(2, 0, 50)]);
    let comes = state.step(Duration::from_secs(1), Event::Called(ProgramId(2))).actions;
    let comes = change(&comes).unwrap_or_else(|| panic!("{comes:?}")).id;
    let programs = vec![(ProgramId(1), program(1, 0, 90).memory, true), (ProgramId(2), program(2, 50, 0).memory, false)];
    state.step(Duration::from_secs(3), Event::Done { change: comes, outcome: Outcome::Changed, programs });
    assert_eq!(state.remembered(Duration::from_secs(3), ProgramId(1)).unwrap().backoff, (Duration::ZERO, Duration::ZERO));
}

/// Nothing of a program that a person has paused spins, and it has no use of its turn: when it is to be resumed, it waits behind those
/// before it.
#[test]
fn who_is_resumed_by_a_person_takes_no_room_that_others_wait_for() {
    for ranks in [1, 2] {
        let mut state = node();
        let paused = |id| in_turn(100, Report { job: Some(JobId(1)), paused: true, ..program(id, 0, 0) });
        join(&mut state, (10..10 + ranks).map(paused).chain([in_turn(100, program(2, 70, 0)), program(3, 1, 0)]));
        let second = Duration::from_secs(1);
        assert_eq!(change(&state.step(second, asks(3, &[(GPU, 40)])).actions), None, "the one in place has its turn");
        let actions = state.step(second, asks(10, &[(GPU, 25)])).actions;
        assert!(!actions.iter().any(|action| matches!(action, Action::Grant(..))), "{ranks}: {actions:?}");
        let done = state.step(second, Event::Left(ProgramId(2))).actions;
        let granted: Vec<_> =
            done.iter().filter_map(|action| if let Action::Grant(program, _) = action { Some(program.0) } else { None }).collect();
        assert_eq!(granted, [3, 10], "{ranks}");
    }
}
