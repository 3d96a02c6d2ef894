//! Swaps: two jobs that do not both fit on a GPU change places. Real programs under the preloaded library on a simulated machine.

use crate::common;
use crate::common::machine::{Machine, Program, Ran, proxy};
use crate::common::{SetOnDrop, eventually, in_parallel, some};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// A machine on which one of two jobs fits, `a`, which runs, and `b`, which is paused.
fn one_of_two() -> (Machine, Program, Program) {
    one_of_two_with(|_, _| ())
}

/// `change`: of the commands that start them, by name.
fn one_of_two_with(change: impl Fn(&str, &mut Command)) -> (Machine, Program, Program) {
    let mut machine = Machine::new();
    machine.memory = "128M";
    machine.engine_mib = [48, 32];
    let start = |name| machine.start_with(name, "engine_regions --weights-mib 48 --kv-mib 32", |command| change(name, command));
    let b = start("b");
    machine.vramctl("pause b").expect(0, "", "");
    let a = start("a");
    (machine, a, b)
}

/// Which of them runs; the other one is paused and whole.
fn running(machine: &Machine, a: &Program, b: &Program) -> &'static str {
    match [machine.settled(&[a]), machine.settled(&[b])].each_ref().map(String::as_str) {
        ["active", "paused, held"] => "a",
        ["paused, held", "active"] => "b",
        other => panic!("{other:?}"),
    }
}

/// Each runs in its turn, with the contents that it had.
fn check_both(machine: &Machine, a: &mut Program, b: &mut Program) {
    for _ in 0..2 {
        let words = if running(machine, a, b) == "a" { ["a", "b"] } else { ["b", "a"] };
        machine.vramctl(&["swap", words[0], words[1]]).expect(0, "swapped in ", "");
        if words[1] == "a" { a.verify() } else { b.verify() }
    }
}

#[test]
fn two_jobs_that_do_not_both_fit_change_places() {
    let (machine, mut a, mut b) = one_of_two();
    machine.vramctl("resume b").expect(4, "", "too little memory");
    let plan = machine.vramctl("swap a b --dry-run").expect(0, "a resume would bring 90.00 MiB", "");
    assert!(plan.out.contains("a pause would free 90.00 MiB") && plan.out.contains("Host memory for the contents"), "{}", plan.out);
    assert!(plan.out.contains("90.00 MiB would come, 90.00 MiB would leave"), "{}", plan.out);
    let plan = machine.vramctl("swap a b --dry-run --json").expect(0, "", "").json();
    assert_eq!((&plan["gpus"][0]["out_bytes"], &plan["gpus"][0]["in_bytes"]), (&json!(90 << 20), &json!(90 << 20)), "{plan}");
    assert!(plan["out"][0]["plan"]["gpu_indices"].is_object(), "as in a dry run of a pause: {plan}");
    assert_eq!(running(&machine, &a, &b), "a");
    check_both(&machine, &mut a, &mut b);
    let swapped = machine.vramctl("swap a b --json").expect(0, "", "").json();
    assert_eq!((&swapped["committed"], &swapped["jobs"].as_array().unwrap().len()), (&json!(true), &2), "{swapped}");
    assert_eq!((&swapped["processes"][0]["verb"], &swapped["processes"][1]["verb"]), (&json!("pause"), &json!("resume")), "{swapped}");
    machine.vramctl("swap a b").expect(0, "nothing to do", "");
    assert_eq!(running(&machine, &a, &b), "b");
    b.verify();
}

/// As at `ulimit -u`.
#[test]
fn two_jobs_change_places_without_a_thread_for_each() {
    let (machine, mut a, mut b) = one_of_two();
    Ran::of(&mut machine.with_few_threads(0, "swap a b")).expect(0, "swapped in ", "");
    b.verify();
    // The last rank needs none.
    Ran::of(&mut machine.with_few_threads(6, "swap b a")).expect(0, "swapped in ", "");
    assert_eq!(running(&machine, &a, &b), "a");
    a.verify();
}

/// A tag of one for a tag of the other; all else stays.
#[test]
fn tags_of_two_jobs_change_places() {
    let (machine, mut a, mut b) = one_of_two();
    machine.vramctl("swap a b --out-tags weights --in-tags weights").expect(0, "resumed weights of b", "");
    machine.vramctl("swap a b --out-tags weights,kv_cache --in-tags kv_cache,default").expect(0, "resumed default, kv_cache of b", "");
    b.verify();
    machine.vramctl("swap b a --in-tags nothing").expect(6, "", "no allocation has the tag nothing");
    machine.vramctl("swap b a").expect(0, "", "");
    assert_eq!(running(&machine, &a, &b), "a");
    a.verify();
}

#[test]
fn what_cannot_change_places_is_left_as_it_is() {
    let (machine, mut a, b) = one_of_two();
    machine.vramctl("swap a a").expect(2, "", "is meant as the one that leaves and as the one that comes");
    machine.vramctl("swap a nobody").expect(3, "", "nobody");
    machine.vramctl("swap a b --out-tags kv_cache").expect(4, "", "Nothing has changed");
    let refused = machine.vramctl("swap a b --out-tags kv_cache --json").expect(4, "", "").json();
    assert_eq!((&refused["committed"], &refused["jobs"]), (&json!(false), &json!([])), "{refused}");
    let (code, shortage) = (&refused["error"]["code"], &refused["error"]["shortage"]);
    assert_eq!((code, &shortage["needed"], &shortage["index"]), (&json!("device_memory"), &json!(90 << 20), &json!(0)), "{refused}");
    assert!(shortage["free"].as_u64() < shortage["needed"].as_u64() && shortage["free"].as_u64() > Some(0), "{refused}");
    let hog = machine.hog(0, 20);
    machine.vramctl("swap a b --out-tags weights").expect(4, "", "Nothing has changed");
    drop(hog);
    assert_eq!(running(&machine, &a, &b), "a");
    a.verify();
}

/// It is no lack of memory on the GPU, in any interface.
#[test]
fn a_host_without_room_for_both_is_named_with_figures() {
    let mut machine = Machine::new();
    machine.memory = "128M";
    let start = |name| {
        machine.start_with(name, "engine_regions --weights-mib 48 --kv-mib 32", |command| _ = command.env("VRAMCTL_HOST_CAP", "16M"))
    };
    let b = machine.start("b", "engine_regions --weights-mib 48 --kv-mib 32");
    machine.vramctl("pause b --no-hold").expect(0, "", "");
    let mut a = start("a");
    let refused = machine.vramctl("swap a b --json").expect(4, "", "").json();
    let shortage = &refused["error"]["host_shortage"];
    assert_eq!((&refused["error"]["code"], &shortage["available"]), (&json!("host_memory"), &json!(16 << 20)), "{refused}");
    assert!(shortage["needed"].as_u64() > shortage["available"].as_u64(), "{refused}");
    assert_eq!([machine.settled(&[&a]), machine.settled(&[&b])], ["active", "paused"]);
    a.verify();
}

/// The one that comes is filled before the other one is prepared to go: the two are not one after the other.
#[test]
fn one_comes_while_the_other_leaves() {
    let (machine, mut a, mut b) = one_of_two();
    let (has_come, changed) = (Mutex::new(false), Condvar::new());
    let folder = proxy(&machine, [&a, &b], move |place, request, line, is_answer| {
        let is_prepared = is_answer && request == "prepare" && String::from_utf8_lossy(line).contains("prepared");
        match (place, is_prepared) {
            (0, true) => drop(changed.wait_while(has_come.lock().unwrap(), |has_come| !*has_come).unwrap()),
            (1, true) => {
                *has_come.lock().unwrap() = true;
                changed.notify_all();
            }
            _ => (),
        }
        true
    });
    let mut command = machine.cli("swap a b");
    Ran::of(command.env("VRAMCTL_DIR", folder.path())).expect(0, "swapped in ", "");
    assert_eq!(running(&machine, &a, &b), "b");
    check_both(&machine, &mut a, &mut b);
}

/// Whoever comes may allocate more in its first moment, and finds the memory of the one that left. One that is stopped now is not waited for.
#[test]
fn the_one_that_comes_runs_once_the_other_one_has_left() {
    /// How long it is waited for.
    const WITHIN: Duration = Duration::from_secs(1);
    let order = |delay: Duration| {
        let (machine, a, b) = one_of_two();
        let (order, left) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(None)));
        let (heard, leaves) = (Arc::clone(&order), Arc::clone(&left));
        let folder = proxy(&machine, [&a, &b], move |place, request, _, is_answer| {
            match (place, request, is_answer) {
                (0, "commit", false) => {
                    *leaves.lock().unwrap() = Some(Instant::now());
                    thread::sleep(delay);
                }
                (0, "commit", true) => heard.lock().unwrap().push(("done", leaves.lock().unwrap().unwrap().elapsed())),
                (1, "commit", false) => heard.lock().unwrap().push(("commit", Duration::ZERO)),
                _ => (),
            }
            true
        });
        let mut command = machine.cli("swap a b");
        Ran::of(command.env("VRAMCTL_DIR", folder.path())).expect(0, "swapped in ", "");
        assert_eq!(running(&machine, &a, &b), "b");
        let order = order.lock().unwrap();
        (order.iter().map(|(what, _)| *what).collect::<Vec<_>>(), order.iter().map(|(_, took)| *took).max().unwrap())
    };
    // On a busy machine, that may take longer than it is waited for.
    let in_time = (0..20).map(|_| order(Duration::from_millis(100))).find(|(order, took)| order[0] == "done" || *took < WITHIN / 2);
    assert_eq!(in_time.expect("it never takes so little time").0, ["done", "commit"]);
    assert_eq!(order(WITHIN * 5 / 2).0, ["commit", "done"]);
}

/// Swaps, and returns the bytes that OUT is told that IN needs: for contents, and for all.
fn told_in_a_swap(machine: &Machine, programs: [&Program; 2], words: &str) -> Vec<[u64; 2]> {
    let told = Arc::new(Mutex::new(Vec::new()));
    let hears = Arc::clone(&told);
    let folder = proxy(machine, programs, move |place, request, line, is_answer| {
        if (place, request, is_answer) == (0, "prepare", false) {
            let needed = serde_json::from_slice::<Value>(line).unwrap()["swap"]["needed"].clone();
            let bytes = |needed: &Value| ["for_contents", "for_all"].map(|name| needed[name].as_u64().unwrap());
            hears.lock().unwrap().extend(needed.as_object().unwrap().values().map(bytes));
        }
        true
    });
    let mut command = machine.cli(words);
    Ran::of(command.env("VRAMCTL_DIR", folder.path())).expect(0, "swapped in ", "");
    let told = told.lock().unwrap();
    told.clone()
}

/// The paused memory of two tags is on two GPUs, and nobody reports which is where: OUT must count on all that may be on its GPU.
#[test]
fn a_tag_that_may_be_on_either_gpu_is_needed_on_both() {
    const MIB: u64 = 1 << 20;
    let machine = Machine::with(2, "128M");
    let mut b = machine.python("b");
    for (gpu, tag) in [(0, "x"), (1, "y")] {
        let begin = format!("cuda.cudaSetDevice({gpu}), cuda.vramctl_region_begin(b'{tag}', 2)");
        assert_eq!(b.ask(&begin), "(0, 0)");
        let pointer = b.number(&format!("malloc({})", 60 * MIB));
        assert_eq!(b.ask(&format!("fill({pointer}, 7, {}), cuda.vramctl_region_end()", 60 * MIB)), "(0, 0)");
    }
    machine.done("pause b");
    let mut a = machine.python("a");
    a.number(&format!("malloc({})", 90 * MIB));
    machine.vramctl("swap a b --in-tags x --dry-run").expect(0, "at least 0 B would come", "");
    let told = told_in_a_swap(&machine, [&a, &b], "swap a b --in-tags x");
    let most = told.iter().map(|[_, for_all]| *for_all).max();
    assert!(most.is_some_and(|most| most >= 22 * MIB), "{told:?}");
}

/// Of 90 MiB that leave, as many come, and some are free: what OUT is not told that IN needs stays until the commit.
#[test]
fn the_one_that_leaves_is_told_what_the_other_one_needs() {
    const MIB: u64 = 1 << 20;
    let (machine, a, b) = one_of_two();
    let free = (128 * MIB).checked_sub(machine.used()).unwrap();
    assert!(free > 10 * MIB, "{free}");
    let told = told_in_a_swap(&machine, [&a, &b], "swap a b");
    let [[for_contents, for_all]] = told[..] else { panic!("{told:?}") };
    let least = 90 * MIB - free;
    assert!((least..least + 4 * MIB).contains(&for_all) && for_contents <= for_all && for_contents > 0, "{told:?}, {free} free");
}

/// Somebody else may have taken what the other job was to get.
#[test]
fn a_swap_whose_commit_is_late_hands_over_the_rest() {
    let machine = Machine::new();
    let mut engine = machine.engine("engine");
    let uuid = machine.status("engine")["processes"][0]["devices"][0]["uuid"].clone();
    let needed = json!({uuid.as_str().unwrap(): {"for_contents": 0, "for_all": 0}});
    let active = machine.used();
    let mut wire = machine.connect(&engine);
    wire.step(&json!({"request": "hold", "lease_ms": 30_000}), None, "held");
    wire.step(&json!({"request": "drain", "limit_ms": 10_000}), None, "drained");
    wire.step(&json!({"request": "prepare", "of": "pause", "swap": {"needed": needed}}), None, "prepared");
    eventually("all is handed over", || machine.used() + (16 << 20) <= active);
    wire.send(&json!({"request": "abort"}), None);
    assert_eq!(wire.answer()["code"], "aborted");
    assert_eq!((machine.settled(&[&engine]).as_str(), machine.used()), ("active", active));
    engine.verify();
}

/// To whom something happens, when a request to one of the two jobs, or its answer, is on its way.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Victim {
    Leaving,
    Coming,
    Coordinator,
}

/// A moment of a swap: the place of the job in `swap a b`, the request to it, and whether that is answered already.
type Moment = (usize, &'static str, bool);

fn moments() -> impl Iterator<Item = Moment> {
    let of_leaving = ["hold", "drain", "prepare", "commit"].map(|request| (0, request));
    let of_coming = ["prepare", "commit"].map(|request| (1, request));
    of_leaving.into_iter().chain(of_coming).flat_map(|(place, request)| [(place, request, false), (place, request, true)])
}

/// A swap of `a b` that waits at a moment.
struct Halted {
    coordinator: Child,
    go_on: SyncSender<()>,
    _sockets: tempfile::TempDir,
}

impl Halted {
    /// `programs`: those of `a`, then those of `b`.
    fn at<'a>(moment: Moment, machine: &Machine, programs: impl IntoIterator<Item = &'a Program>) -> Self {
        let ((tell, reached), (go_on, asked)) = (sync_channel(1), sync_channel::<()>(1));
        let stage = Mutex::new(Some((tell, asked)));
        let sockets = proxy(machine, programs, move |place, request, _, is_answer| {
            if (place, request, is_answer) == moment
                && let Some((reached, go_on)) = stage.lock().unwrap().take()
            {
                reached.send(()).unwrap();
                let _ = go_on.recv();
            }
            true
        });
        let mut command = machine.cli("swap a b");
        command.env("VRAMCTL_DIR", sockets.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let coordinator = command.spawn().unwrap();
        reached.recv_timeout(Duration::from_secs(100)).unwrap_or_else(|error| panic!("{moment:?}: {error}"));
        Self { coordinator, go_on, _sockets: sockets }
    }

    fn go_on(self) -> Ran {
        self.go_on.send(()).unwrap();
        Ran::end_of(self.coordinator)
    }
}

/// Whoever dies, one of the two runs, the other one is paused and whole, and the message says which.
#[test]
fn whoever_dies_at_any_step_one_runs_and_the_other_is_whole() {
    let victims = [Victim::Leaving, Victim::Coming, Victim::Coordinator];
    let cases: Vec<_> = moments().flat_map(|moment| victims.map(|victim| (moment, victim))).collect();
    assert_eq!(cases.len(), 36);
    in_parallel(cases, 4, |(moment, victim)| dies(moment, victim));
}

fn dies(moment: Moment, victim: Victim) {
    let (machine, mut a, mut b) = one_of_two();
    let mut swap = Halted::at(moment, &machine, [&a, &b]);
    match victim {
        Victim::Leaving => a.kill(),
        Victim::Coming => b.kill(),
        Victim::Coordinator => swap.coordinator.kill().unwrap(),
    }
    let ran = swap.go_on();
    let told = format!("{victim:?} at {moment:?}: {:?}: {}{}", ran.code, ran.out, ran.err);
    match victim {
        Victim::Leaving => {
            assert_eq!(machine.settled(&[&b]), "active", "{told}");
            b.verify();
        }
        Victim::Coming => {
            assert_eq!(machine.settled(&[&a]), "active", "{told}");
            a.verify();
        }
        Victim::Coordinator => {
            eventually_one_runs(&told, &machine, &a, &b);
            check_both(&machine, &mut a, &mut b);
            return;
        }
    }
    let is_told = ["runs on", "runs", "swapped in"].iter().any(|text| ran.err.contains(text) || ran.out.contains(text));
    assert!(is_told, "{told}");
}

/// One of the two is stopped, and continues when the command has given up: one of them runs, and the other one is paused and whole.
#[test]
fn who_stops_at_any_step_finds_its_place_when_it_goes_on() {
    let cases: Vec<_> = moments().flat_map(|moment| [Victim::Leaving, Victim::Coming].map(|victim| (moment, victim))).collect();
    assert_eq!(cases.len(), 24);
    in_parallel(cases, 12, |(moment, victim)| stops(moment, victim));
}

fn stops(moment: Moment, victim: Victim) {
    let (machine, mut a, mut b) = one_of_two();
    let swap = Halted::at(moment, &machine, [&a, &b]);
    let (stopped, other) = if victim == Victim::Leaving { (&a, &b) } else { (&b, &a) };
    stopped.stop();
    let ran = swap.go_on();
    let told = format!("{victim:?} at {moment:?}: {:?}: {}{}", ran.code, ran.out, ran.err);
    assert!(["active", "paused, held"].contains(&&*machine.settled(&[other])), "{told}");
    stopped.go_on();
    eventually_one_runs(&told, &machine, &a, &b);
    // What the command has said of either is so.
    let is_said = ran.out.contains("of a (pid") || ran.out.contains("of b (pid");
    assert!(!is_said || running(&machine, &a, &b) == "b", "{told}");
    assert!(ran.code == Some(0) || ran.err.contains("no answer within"), "{told}");
    check_both(&machine, &mut a, &mut b);
}

/// A copy fails when a part of the memory has gone over: that part comes back, and nothing has changed.
#[test]
fn a_copy_that_fails_takes_back_what_was_handed_over() {
    // The last copies of the job that leaves, and one of the job that comes, after those of its start.
    let cases = vec![("a", "cuMemcpyDtoHAsync_v2:8:999"), ("a", "cuMemcpyDtoHAsync_v2:11:999"), ("b", "cuMemcpyHtoDAsync_v2:20:999")];
    in_parallel(cases, 3, |(failing, fault)| {
        let (machine, mut a, mut b) = one_of_two_with(|name, command| {
            if name == failing {
                command.env("SIMGPU_FAIL", fault);
            }
        });
        let ran = machine.vramctl("swap a b").expect(1, "", "returned 999");
        let ran = ran.expect(1, "", "job a runs on, job b stays paused, with its contents");
        // The job that comes need not find out by itself that nothing more will come.
        assert!(!ran.err.contains("too little memory"), "{fault}: {}", ran.err);
        assert_eq!(running(&machine, &a, &b), "a");
        a.verify();
        check_both(&machine, &mut a, &mut b);
    });
}

/// Jobs of two ranks each change places as two processes do. If one rank dies, its job cannot be whole; all others are as they were.
#[test]
fn jobs_of_several_ranks_change_places() {
    let mut machine = Machine::new();
    machine.memory = "128M";
    machine.engine_mib = [24, 16];
    let mut b: [Program; 2] = machine.job("b");
    machine.vramctl("pause b").expect(0, "", "");
    let mut a: [Program; 2] = machine.job("a");
    for (out, into) in [("a", "b"), ("b", "a")] {
        let swapped = machine.vramctl(&["swap", out, into, "--json"]).expect(0, "", "").json();
        assert_eq!((&swapped["committed"], swapped["processes"].as_array().unwrap().len()), (&json!(true), 4), "{swapped}");
        let states = [&a, &b].map(|ranks| machine.settled(&ranks.each_ref()));
        assert_eq!(
            states.each_ref().map(String::as_str),
            if into == "b" { ["paused, held", "active"] } else { ["active", "paused, held"] }
        );
        if into == "b" { &mut b } else { &mut a }.iter_mut().for_each(Program::verify);
    }
    // A rank that has come has memory that those which leave have given back.
    let swap = Halted::at((3, "prepare", false), &machine, a.iter().chain(&b));
    b[1].kill();
    let ran = swap.go_on();
    assert_eq!(machine.settled(&a.each_ref()), "active", "{}{}", ran.out, ran.err);
    assert_eq!(machine.settled(&[&b[0]]), "paused, held", "{}{}", ran.out, ran.err);
    let without = format!("job a runs on, job b (without pid {}, which has ended) stays paused, with its contents", b[1].pid());
    ran.expect(1, "", &without);
    a.iter_mut().for_each(Program::verify);
    machine.vramctl("pause a").expect(0, "", "");
    machine.vramctl("resume b").expect(0, "", "");
    b[0].verify();
}

/// Whoever has ended does not run on, is not paused, and cannot be resumed.
#[test]
fn nothing_is_said_of_a_job_that_has_ended_but_that() {
    let (machine, mut a, mut b) = one_of_two();
    let swap = Halted::at((0, "prepare", false), &machine, [&a, &b]);
    a.kill();
    b.kill();
    let ran = swap.go_on().expect(1, "", "note: job a has ended, job b has ended\n");
    assert!(!ran.text().contains("swapped in"), "{ran:?}");

    let (machine, mut a, mut b) = one_of_two();
    let swap = Halted::at((1, "commit", false), &machine, [&a, &b]);
    a.kill();
    b.kill();
    swap.go_on().expect(1, "", "note: job b has ended; job a has ended, too\n");
}

/// The one that leaves is back then, so its caller must not take it for swapped.
#[test]
fn a_job_that_ends_as_soon_as_it_has_come_makes_the_swap_fail() {
    let (machine, mut a, mut b) = one_of_two();
    let swap = Halted::at((1, "commit", true), &machine, [&a, &b]);
    b.kill();
    let ran = swap.go_on().expect(1, "resumed ", "note: job b has ended; job a runs\n");
    assert!(!ran.out.contains("swapped in"), "{ran:?}");
    a.verify();
}

/// A process of the job that leaves has ended: it is not among those that run on, and its job goes on with a loss.
#[test]
fn a_swap_says_which_processes_of_a_job_have_ended() {
    let mut machine = Machine::new();
    machine.memory = "128M";
    machine.engine_mib = [24, 16];
    let b = machine.engine("b");
    machine.done("pause b");
    let mut a: [Program; 2] = machine.job("a");
    let swap = Halted::at((0, "prepare", false), &machine, a.iter().chain([&b]));
    a[0].kill();
    let told = format!("note: job a (without pid {}, which has ended) runs on, job b stays paused, with its contents\n", a[0].pid());
    let ran = swap.go_on().expect(1, "", &told);
    assert!(!ran.err.contains("go on as before"), "{ran:?}");
    assert_eq!(machine.settled(&[&a[1]]), "active");
}

/// It was there before, so nothing has to be resumed.
#[test]
fn a_job_that_runs_already_runs_if_the_other_one_ends() {
    let mut machine = Machine::new();
    machine.engine_mib = [24, 16];
    let (mut a, b) = (machine.engine("a"), machine.engine("b"));
    let swap = Halted::at((0, "prepare", false), &machine, [&a, &b]);
    a.kill();
    swap.go_on().expect(1, "", "note: job a has ended; job b runs\n");
    assert_eq!(machine.settled(&[&b]), "active");
}

/// What the job that comes has paused itself needs no room, unless its tag is named.
#[test]
fn memory_that_a_job_has_paused_itself_takes_no_room() {
    let (machine, _a, mut b) = one_of_two();
    machine.done("swap a b");
    assert_eq!(b.ask("pause kv_cache"), "paused kv_cache");
    machine.done("swap b a");
    // 90 MiB would not fit, and 58 do.
    let named = "swap a b --out-tags kv_cache --in-tags default,kv_cache,weights";
    machine.vramctl(named).expect(4, "", "90.00 MiB would come, 32.00 MiB would leave");
    machine.vramctl("swap a b --out-tags kv_cache").expect(0, "resumed default, weights of b", "");
    machine.done("pause a");
    assert_eq!(b.ask("resume kv_cache"), "resumed kv_cache");
    b.verify();
}

/// What others have open or registered goes at the commit, and what is kept does not go: neither makes room for the other job. Without a refusal
/// at the start, that job would wait for it, while the one that leaves is held.
#[test]
fn what_goes_late_or_not_at_all_makes_no_room() {
    let machine = Machine::with(1, "128M");
    let mut b = machine.python("b");
    b.number(&format!("malloc({})", 90 * MIB));
    machine.done("pause b");
    let (mut a, mut a2) = (machine.python("a"), machine.python("a"));
    let [pointer, _] = [50, 40].map(|mib| a.number(&format!("malloc({})", mib * MIB)));
    let refused = |words: &str, said: &str| {
        let dry = machine.vramctl(&format!("swap a b {words} --dry-run"));
        let ran = machine.vramctl(&format!("swap a b {words}")).expect(4, "", said).expect(4, "", "Nothing has changed");
        assert_eq!((dry.code, dry.err), (ran.code, ran.err));
    };
    let late = "90.00 MiB would leave (50.00 MiB of them at the commit, because others have it open or registered)";
    let handle = a.ask(&format!("get({pointer})"));
    let opened = a2.number(&format!("open_('{handle}')"));
    refused("", late);
    assert_eq!(a2.ask(&format!("close({opened})")), "0");
    let register = |a: &mut Program, pointer| {
        a.ask(&format!("cuda.cuPointerSetAttribute(ctypes.byref(ctypes.c_int(1)), 6, ctypes.c_uint64({pointer}))"))
    };
    assert_eq!(register(&mut a, pointer), "0");
    refused("--registered keep", "40.00 MiB would leave, and 38.00 MiB are free");
    refused("--registered take", late);
    // With less of it, there is room.
    assert_eq!(a.ask(&format!("free({pointer})")), "0");
    let [pointer, _] = [20, 30].map(|mib| a.number(&format!("malloc({})", mib * MIB)));
    assert_eq!(register(&mut a, pointer), "0");
    let dry = machine.vramctl("swap a b --registered take --dry-run --json").expect(0, "", "").json();
    assert_eq!((&dry["gpus"][0]["out_bytes"], &dry["gpus"][0]["out_late_bytes"]), (&json!(90 * MIB), &json!(20 * MIB)), "{dry}");
    machine.vramctl("swap a b --registered take").expect(0, "swapped in ", "");
}

/// As on a machine of which one GPU is in trouble. Nothing but NVML's figures is missing.
#[test]
fn a_command_ends_without_an_answer_of_nvml() {
    let (machine, mut a, mut b) = one_of_two();
    let folder = machine.folder.path().join("silent");
    fs::create_dir(&folder).unwrap();
    common::compile(&folder.join("libnvidia-ml.so.1"), &["silent_nvml.c"], &common::SHARED);
    let libraries = format!("{}:{}", folder.display(), common::simulated_libraries().display());
    let vramctl = |words: &str| {
        let words: Vec<_> = ["60", common::command_line()].into_iter().chain(words.split(' ')).collect();
        Ran::of(machine.command("timeout", &words).env("LD_LIBRARY_PATH", &libraries))
    };
    vramctl("swap a b").expect(0, "swapped in ", "NVML has not answered within");
    b.verify();
    vramctl("pause b").expect(0, "paused ", "NVML has not answered within");
    vramctl("resume a").expect(0, "resumed ", "");
    a.verify();
}

const MIB: u64 = 1 << 20;
/// Plenty of host memory.
const PLENTY: u64 = 1 << 34;

/// A host with as little memory as a test says, for the programs that have joined it (`tests/apps/small_host.c`).
pub struct SmallHost {
    folder: PathBuf,
}

impl SmallHost {
    pub fn on(machine: &Machine) -> Self {
        let folder = machine.folder.path().join("host");
        fs::create_dir(&folder).unwrap();
        Self { folder }
    }

    /// The program of this command joins it.
    pub fn join(&self, command: &mut Command) {
        let library = common::built("small_host.so", "small_host.c", &common::SHARED);
        command.env("LD_PRELOAD", &library).env("VRAMCTL_KEEPER_PRELOAD", &library).env("SMALL_HOST", &self.folder);
    }

    /// Anonymous memory of its programs, as the kernel counts it. What passes from one to the other between two looks is not counted twice.
    fn used(&self) -> u64 {
        let anonymous = |pid: &u32| {
            let text = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
            let pages: Vec<u64> = text.split_whitespace().map(|word| word.parse().unwrap()).collect();
            Some((pages[1] - pages[2]) * 4096)
        };
        let pids: Vec<u32> =
            fs::read_dir(&self.folder).unwrap().filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok()).collect();
        let there = pids.iter().filter_map(anonymous).sum();
        let back = pids.iter().rev().filter_map(anonymous).sum();
        u64::min(there, back)
    }

    /// From now on, this much is available.
    pub fn leave(&self, bytes: u64) {
        self.write("total", &(self.used() + bytes).to_string());
    }

    /// From the `nth` use of a function of the driver on, the program gets a code, `count` times; 0 times: no fault is left.
    fn fail(&self, program: &Program, function: &str, nth: u64, code: u32, count: u64) {
        let name = format!("fail-{}", program.pid());
        self.write(&name, &format!("{function} {nth} {code} {count}\n"));
        eventually("the fault is injected", || !self.folder.join(&name).exists());
    }

    fn write(&self, name: &str, text: &str) {
        let new = self.folder.join("new");
        fs::write(&new, text).unwrap();
        fs::rename(new, self.folder.join(name)).unwrap();
    }

    /// The most that is used while something is done, and what came of that.
    fn most_during<R>(&self, work: impl FnOnce() -> R) -> (u64, R) {
        let is_done = AtomicBool::new(false);
        thread::scope(|scope| {
            let watch = scope.spawn(|| {
                let mut most = 0;
                while !is_done.load(Ordering::Relaxed) {
                    most = most.max(self.used());
                    thread::sleep(Duration::from_millis(1));
                }
                most
            });
            let told = SetOnDrop(&is_done);
            let result = work();
            drop(told);
            (watch.join().unwrap(), result)
        })
    }
}

/// A small host with a GPU for one of two jobs, `a`, which runs, and `b`, which is paused.
fn one_of_two_on_a_small_host(memory: &'static str, weights_mib: u32) -> (Machine, SmallHost, Program, Program) {
    let mut machine = Machine::new();
    machine.memory = memory;
    let host = SmallHost::on(&machine);
    let program = format!("engine_regions --weights-mib {weights_mib} --kv-mib 8 --layers 8");
    let b = machine.start_with("b", &program, |command| host.join(command));
    machine.vramctl("pause b").expect(0, "", "");
    let a = machine.start_with("a", &program, |command| host.join(command));
    (machine, host, a, b)
}

/// The states of a process's tags.
fn states(machine: &Machine, program: &Program) -> Vec<String> {
    let told = machine.connect(program).ask(&json!({"request": "status"}));
    let held = if told["held"] == true { ", held" } else { "" };
    let tags = told["tags"].as_array().unwrap_or_else(|| panic!("{told}"));
    tags.iter().map(|tag| format!("{}{held}", tag["state"].as_str().unwrap())).collect()
}

fn is_all(states: &[String], wanted: &str) -> bool {
    states.iter().all(|state| state == wanted)
}

/// Each notices by itself, one after the other, what has become of both.
fn eventually_one_runs(what: &str, machine: &Machine, a: &Program, b: &Program) {
    eventually(what, || {
        let [a, b] = [a, b].map(|program| states(machine, program));
        is_all(&a, "active") && is_all(&b, "paused, held") || is_all(&b, "active") && is_all(&a, "paused, held")
    });
}

/// With host memory for one copy of the contents and a half.
#[test]
fn two_jobs_change_places_on_a_host_without_room_for_both() {
    const WEIGHTS: u32 = 320;
    let (machine, host, mut a, mut b) = one_of_two_on_a_small_host("384M", WEIGHTS);
    let copy = machine.status("b")["processes"][0]["host"]["ready_bytes"].as_u64().unwrap();
    assert!(copy >= u64::from(WEIGHTS) * MIB, "{copy}");
    // The programs need a little themselves.
    let leave_half = || {
        host.leave(copy / 2 - 24 * MIB);
        host.used() - copy
    };
    leave_half();
    machine.vramctl("pause a").expect(4, "", "too little host memory");
    let plan = machine.vramctl("swap a b --dry-run").expect(0, "Host memory passes from one to the other", "");
    assert!(plan.out.contains("are needed at the start"), "{plan:?}");
    let plan = machine.vramctl("swap a b --dry-run --json").expect(0, "", "").json();
    assert!(plan["host"]["peak_bytes"].as_u64().unwrap() <= copy / 2 * 3, "{plan}");
    assert_eq!(running(&machine, &a, &b), "a");
    for words in [["a", "b"], ["b", "a"]] {
        let apart = leave_half();
        let (most, swapped) = host.most_during(|| machine.vramctl(&["swap", words[0], words[1], "--json"]).expect(0, "", "").json());
        // What the programs themselves use goes up and down.
        assert!(most - apart <= copy / 2 * 3 + 64 * MIB, "{} of {copy}", most - apart);
        let told = swapped["host_peak_bytes"].as_u64().unwrap();
        assert!(told >= copy && told <= copy / 2 * 3, "{swapped}");
        assert_eq!(running(&machine, &a, &b), words[1]);
        if words[1] == "a" { a.verify() } else { b.verify() }
    }
    // With room for both, memory that is prepared stays.
    host.leave(PLENTY);
    let swapped = machine.vramctl("swap a b --json").expect(0, "", "").json();
    assert!(swapped.get("host_peak_bytes").is_none(), "{swapped}");
    b.verify();
}

/// With a little less, both could wait for each other.
#[test]
fn a_host_without_room_for_the_next_step_is_refused_before_anything_changes() {
    let (machine, host, mut a, mut b) = one_of_two_on_a_small_host("240M", 160);
    host.leave(130 * MIB);
    let plan = machine.vramctl("swap a b --dry-run --json").expect(0, "", "").json();
    let least = plan["host"]["least_bytes"].as_u64().unwrap();
    assert!(least < 128 * MIB, "{plan}");
    host.leave(least - 4 * MIB);
    let ran = machine.vramctl("swap a b").expect(4, "", "the host has too little memory for the contents of both jobs");
    assert!(ran.err.contains("are missing") && ran.err.contains("Nothing has changed"), "{ran:?}");
    assert_eq!(running(&machine, &a, &b), "a");
    a.verify();
    host.leave(least + 4 * MIB);
    machine.vramctl("swap a b").expect(0, "host memory passed from one to the other", "");
    assert_eq!(running(&machine, &a, &b), "b");
    b.verify();
}

/// What happens to one of the two at a call of the driver.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fate {
    Fails,
    FailsForAWhile,
    Dies,
    Stops,
}

/// The calls of a job that leaves, and of one that comes, while host memory passes.
const OF_LEAVING: [&str; 5] = ["cuMemcpyDtoHAsync_v2", "cuMemHostRegister_v2", "cuMemUnmap", "cuMemRelease", "cuEventSynchronize"];
const OF_COMING: [&str; 5] = ["cuMemcpyHtoDAsync_v2", "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemHostUnregister"];

/// Whatever fails or dies at whichever step: one of the two runs, and the other one is paused and whole.
#[test]
fn whatever_happens_while_host_memory_passes_one_runs_and_the_other_is_whole() {
    let of = |victim, calls: &[&'static str]| {
        let fates = [Fate::Fails, Fate::FailsForAWhile, Fate::Dies, Fate::Stops];
        let cases = calls.iter().flat_map(move |call| fates.map(|fate| (victim, *call, fate)));
        cases.flat_map(|(victim, call, fate)| [1, 4].map(|nth| (victim, call, fate, nth))).collect::<Vec<_>>()
    };
    let mut cases = of(Victim::Leaving, &OF_LEAVING);
    cases.extend(of(Victim::Coming, &OF_COMING));
    // All 80 with PROPTEST_CASES=80: they copy gigabytes.
    in_parallel(some(cases, 32), 4, |(victim, call, fate, nth)| happens(victim, call, fate, nth));
}

fn happens(victim: Victim, call: &str, fate: Fate, nth: u64) {
    let (machine, host, mut a, mut b) = one_of_two_on_a_small_host("240M", 160);
    host.leave(128 * MIB);
    let (code, count) = match fate {
        Fate::Fails => (999, 1),
        Fate::FailsForAWhile => (999, 8),
        Fate::Dies => (u32::MAX - 1, 1),
        Fate::Stops => (u32::MAX - 3, 1),
    };
    let what = format!("{victim:?}: {call} {nth} {fate:?}");
    let unlucky = if victim == Victim::Leaving { &mut a } else { &mut b };
    host.fail(unlucky, call, nth, code, count);
    let command = machine.begin("swap a b");
    if fate == Fate::Stops {
        // The command gives up, and what was stopped goes on.
        let ran = Ran::end_of(command);
        unlucky.go_on();
        eventually_one_runs(&format!("{what}: {ran:?}"), &machine, &a, &b);
    } else {
        let ran = Ran::end_of(command);
        let has_died = fate == Fate::Dies && unlucky.is_silent();
        if has_died {
            let (other, name) = if victim == Victim::Leaving { (&mut b, "b") } else { (&mut a, "a") };
            eventually(&format!("{what}: {ran:?}"), || is_all(&states(&machine, other), "active"));
            other.verify();
            assert!(ran.text().contains(&format!("{name} runs")) || ran.code == Some(0), "{what}: {ran:?}");
            return;
        }
        eventually_one_runs(&format!("{what}: {ran:?}"), &machine, &a, &b);
        let runs = running(&machine, &a, &b);
        let told = if ran.code == Some(0) { "b" } else { "a" };
        assert_eq!(runs, told, "{what}: {ran:?}");
        assert!(
            ran.code == Some(0) || ran.err.contains("job a runs on, job b stays paused") || ran.err.contains("once"),
            "{what}: {ran:?}"
        );
    }
    host.leave(PLENTY);
    host.fail(if victim == Victim::Leaving { &a } else { &b }, call, 1, 0, 0);
    check_both(&machine, &mut a, &mut b);
}

/// Piece by piece: whoever waits for the next piece is heard meanwhile.
#[test]
fn host_memory_passes_without_a_thread_for_each() {
    let (machine, host, a, mut b) = one_of_two_on_a_small_host("240M", 160);
    host.leave(130 * MIB);
    Ran::of(&mut machine.with_few_threads(0, "swap a b")).expect(0, "host memory passed", "");
    host.leave(PLENTY);
    b.verify();
    drop(a);
}

/// The command dies while a part of each job is where it should not stay. Both go back, each taking what the other one gives up.
#[test]
fn two_jobs_go_back_by_themselves_on_a_small_host() {
    let cases = vec![("cuMemcpyHtoDAsync_v2", 3), ("cuMemcpyHtoDAsync_v2", 8), ("cuMemCreate", 6), ("cuMemHostUnregister", 2)];
    in_parallel(cases, 2, |(call, nth)| {
        let (machine, host, mut a, mut b) = one_of_two_on_a_small_host("240M", 160);
        host.leave(128 * MIB);
        host.fail(&b, call, nth, u32::MAX - 3, 1);
        let mut command = machine.begin("swap a b");
        eventually("b has stopped", || is_stopped(b.pid()));
        command.kill().unwrap();
        command.wait().unwrap();
        b.go_on();
        eventually(&format!("{call} {nth}"), || is_all(&states(&machine, &a), "active") && is_all(&states(&machine, &b), "paused, held"));
        a.verify();
        host.leave(PLENTY);
        check_both(&machine, &mut a, &mut b);
    });
}

/// The contents of what a program has paused itself do not go over: saved again, they would be paused by others.
#[test]
fn what_a_program_has_paused_itself_is_so_after_an_undone_swap() {
    let mut machine = Machine::new();
    machine.memory = "240M";
    let host = SmallHost::on(&machine);
    let start = |name| machine.start_with(name, "engine_regions --weights-mib 160 --kv-mib 8 --layers 8", |command| host.join(command));
    let mut b = start("b");
    assert_eq!(b.ask("pause default"), "paused default");
    machine.done("pause b");
    let mut a = start("a");
    host.leave(128 * MIB);
    let self_paused = || {
        let told = machine.status("b")["processes"][0]["tags"][0].clone();
        (told["tag"].clone(), told["self_paused_bytes"].clone())
    };
    let before = self_paused();
    assert!(before.1.as_u64().is_some_and(|bytes| bytes > 0), "{before:?}");
    host.fail(&b, "cuMemcpyHtoDAsync_v2", 8, 999, 1);
    let swap = machine.vramctl("swap a b --in-tags default,kv_cache,weights");
    swap.expect(1, "", "job a runs on, job b stays paused, with its contents");
    assert_eq!(self_paused(), before);
    host.leave(PLENTY);
    machine.done("swap a b --in-tags default,kv_cache,weights");
    b.verify();
    machine.done("swap b a");
    a.verify();
}

/// A third program takes what is free on the host. Both jobs stay held, with their contents, and go back as soon as there is room.
#[test]
fn a_swap_whose_host_memory_is_taken_by_others_is_undone_once_there_is_room() {
    let (machine, host, mut a, mut b) = one_of_two_on_a_small_host("240M", 160);
    host.leave(128 * MIB);
    host.fail(&b, "cuMemcpyHtoDAsync_v2", 8, u32::MAX - 3, 1);
    let mut command = machine.begin("swap a b");
    eventually("b has stopped", || is_stopped(b.pid()));
    host.write("total", "1");
    command.kill().unwrap();
    command.wait().unwrap();
    b.go_on();
    let is_held = |program| states(&machine, program).iter().all(|state| state.ends_with(", held"));
    eventually("a is held, and has taken all that it can get", || is_held(&a) && is_held(&b));
    host.leave(64 * MIB);
    eventually("a is back", || is_all(&states(&machine, &a), "active") && is_all(&states(&machine, &b), "paused, held"));
    a.verify();
    host.leave(PLENTY);
    check_both(&machine, &mut a, &mut b);
}

fn is_stopped(pid: u32) -> bool {
    fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat"))
        .is_ok_and(|text| text.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T')))
}

/// Ranks of one job take host memory, and GPU memory, from each other.
#[test]
fn jobs_of_several_ranks_change_places_on_a_small_host() {
    let mut machine = Machine::new();
    machine.memory = "300M";
    let host = SmallHost::on(&machine);
    let job = |name: &str| {
        [(); 2].map(|()| {
            machine.start_with(name, "engine_regions --weights-mib 96 --kv-mib 8 --layers 8", |command| {
                host.join(command.env("VRAMCTL_JOB", format!("run-of-{name}")));
            })
        })
    };
    let mut b = job("b");
    machine.vramctl("pause b").expect(0, "", "");
    let mut a = job("a");
    host.leave(190 * MIB);
    for (out, into) in [("a", "b"), ("b", "a")] {
        let swapped = machine.vramctl(&["swap", out, into, "--json"]).expect(0, "", "").json();
        assert!(swapped["host_peak_bytes"].as_u64().is_some() && swapped["processes"].as_array().unwrap().len() == 4, "{swapped}");
        if into == "b" { &mut b } else { &mut a }.iter_mut().for_each(Program::verify);
    }
    host.leave(190 * MIB);
    host.fail(&b[1], "cuMemcpyHtoDAsync_v2", 3, u32::MAX - 1, 1);
    machine.vramctl("swap a b").expect(1, "", "job a runs on");
    a.iter_mut().for_each(Program::verify);
    assert_eq!(machine.settled(&[&b[0]]), "paused, held");
    machine.vramctl("pause a --discard").expect(0, "", "");
    machine.vramctl("resume b").expect(0, "", "");
    b[0].verify();
}
