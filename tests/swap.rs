//! Swaps: two jobs that do not both fit on a GPU change places. Real programs under the preloaded library on a simulated machine.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks)]

mod common;

use common::eventually;
use common::machine::{Machine, Program, Ran, proxy};
use serde_json::json;
use std::collections::VecDeque;
use std::process::Stdio;
use std::sync::mpsc::sync_channel;
use std::sync::{Condvar, Mutex};
use std::thread;
use std::time::Duration;

/// A machine on which one of two jobs fits, `a`, which runs, and `b`, which is paused.
fn one_of_two() -> (Machine, Program, Program) {
    let mut machine = Machine::new();
    machine.memory = "128M";
    machine.engine_mib = [48, 32];
    let b = machine.start("b", "engine_regions --weights-mib 48 --kv-mib 32");
    machine.vramctl("pause b").expect(0, "", "");
    let a = machine.start("a", "engine_regions --weights-mib 48 --kv-mib 32");
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
    assert_eq!(running(&machine, &a, &b), "a");
    check_both(&machine, &mut a, &mut b);
    let swapped = machine.vramctl("swap a b --json").expect(0, "", "").json();
    assert_eq!((&swapped["committed"], &swapped["jobs"].as_array().unwrap().len()), (&json!(true), &2), "{swapped}");
    assert_eq!((&swapped["processes"][0]["verb"], &swapped["processes"][1]["verb"]), (&json!("pause"), &json!("resume")), "{swapped}");
    machine.vramctl("swap a b").expect(0, "nothing to do", "");
    assert_eq!(running(&machine, &a, &b), "b");
    b.verify();
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
    let hog = machine.hog(0, 20);
    machine.vramctl("swap a b --out-tags weights").expect(4, "", "Nothing has changed");
    drop(hog);
    assert_eq!(running(&machine, &a, &b), "a");
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

/// Who ends, when a request to one of the two jobs, or its answer, is on its way.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Victim {
    Leaving,
    Coming,
    Coordinator,
}

/// Whoever dies, one of the two runs, the other one is paused and whole, and the message says which.
#[test]
fn whoever_dies_at_any_step_one_runs_and_the_other_is_whole() {
    let mut cases = VecDeque::new();
    for (place, requests) in [(0, &["hold", "drain", "prepare", "commit"][..]), (1, &["prepare", "commit"])] {
        for request in requests {
            for is_answered in [false, true] {
                for victim in [Victim::Leaving, Victim::Coming, Victim::Coordinator] {
                    cases.push_back((place, *request, is_answered, victim));
                }
            }
        }
    }
    assert_eq!(cases.len(), 36);
    let cases = Mutex::new(cases);
    let next = || cases.lock().unwrap().pop_front();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while let Some((place, request, is_answered, victim)) = next() {
                    dies(place, request, is_answered, victim);
                }
            });
        }
    });
}

fn dies(place: usize, request: &'static str, is_answered: bool, victim: Victim) {
    let case = format!("{victim:?} at {request} of {place}, answered: {is_answered}");
    let (machine, mut a, mut b) = one_of_two();
    let ((tell, reached), (go_on, asked)) = (sync_channel(1), sync_channel::<()>(1));
    let stage = Mutex::new(Some((tell, asked)));
    let folder = proxy(&machine, [&a, &b], move |at, of, _, is_answer| {
        if (at, of, is_answer) == (place, request, is_answered)
            && let Some((reached, go_on)) = stage.lock().unwrap().take()
        {
            reached.send(()).unwrap();
            let _ = go_on.recv();
        }
        true
    });
    let mut command = machine.cli("swap a b");
    command.env("VRAMCTL_DIR", folder.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut coordinator = command.spawn().unwrap();
    reached.recv_timeout(Duration::from_secs(100)).unwrap_or_else(|error| panic!("{case}: {error}"));
    match victim {
        Victim::Leaving => a.kill(),
        Victim::Coming => b.kill(),
        Victim::Coordinator => coordinator.kill().unwrap(),
    }
    go_on.send(()).unwrap();
    let ran = Ran::end_of(coordinator);
    let told = format!("{case}: {:?}: {}{}", ran.code, ran.out, ran.err);
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
            // Each notices by itself, one after the other.
            eventually(&case, || {
                matches!(
                    [machine.state(&a), machine.state(&b)].each_ref().map(String::as_str),
                    ["active", "paused, held"] | ["paused, held", "active"]
                )
            });
            check_both(&machine, &mut a, &mut b);
            return;
        }
    }
    let is_told = ["runs on", "runs", "swapped in"].iter().any(|text| ran.err.contains(text) || ran.out.contains(text));
    assert!(is_told, "{told}");
}
