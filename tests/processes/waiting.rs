//! What a program that shares its GPU waits for (`vramctl run --share`), and what it does not.

use crate::common::machine::{Machine, Program};
use crate::common::{built, eventually, patiently, programs};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::process::Command;
use std::thread;
use std::time::Duration;

const MIB: u64 = 1 << 20;
/// Of a context, and of what is loaded.
const FIXED: u64 = 4;

fn crowded() -> Machine {
    let mut machine = Machine::new();
    (machine.memory, machine.context_bytes) = ("96M", FIXED * MIB);
    machine
}

fn sharing(machine: &Machine, name: &str, program: &[&str]) -> Command {
    let mut command = machine.cli(&["run", "--share", "--name", name, "--no-python", "--"]);
    command.args(program).env("SIMGPU_CODE_BYTES", (FIXED * MIB).to_string());
    command
}

/// A program with this much memory, which is idle.
fn idle(machine: &Machine, mib: u32) -> Program {
    let engine = programs().join("engine");
    let weights = (mib - 8).to_string();
    Program::ready(&mut sharing(machine, "idle", &[engine.to_str().unwrap(), "--weights-mib", &weights, "--kv-mib", "8"]))
}

/// The program of `tests/apps/room.c`.
fn room() -> String {
    built("room", "room.c", &["-l:libcuda.so.1", "-l:libcudart.so.13"]).into_os_string().into_string().unwrap()
}

fn asking(machine: &Machine) -> Program {
    Program::ready(&mut sharing(machine, "asking", &[&room()]))
}

fn view(machine: &Machine) -> Value {
    machine.vramctl("share --json").expect(0, "", "").json()
}

/// What `vramctl share` says of a program.
fn member(machine: &Machine, program: &Program) -> Value {
    let view = view(machine);
    view["members"].as_array().unwrap().iter().find(|member| member["pid"] == program.pid()).unwrap_or_else(|| panic!("{view}")).clone()
}

/// Whether some of its memory is away.
fn has_given_way(machine: &Machine, program: &Program) -> bool {
    ["partly away", "away"].map(Value::from).contains(&member(machine, program)["place"])
}

/// Fills the GPU with a program that does not share, so that there is no room for anything fixed.
fn fill(machine: &Machine) -> Program {
    let mut program = Program::ready(&mut machine.command(room(), &[]));
    assert_eq!(program.ask("first"), "0");
    let free = 96 - machine.used() / MIB;
    assert_eq!(program.ask(&format!("take {}", free - 2)), "0");
    program
}

/// On a full GPU, they would all be out of memory.
#[test]
fn contexts_and_code_wait_for_room() {
    for first in ["first", "runtime"] {
        let machine = crowded();
        let mut idle = idle(&machine, 48);
        let mut asking = asking(&machine);
        for request in [first, "context", "load", "launch", "graph", "order 4"] {
            idle.verify();
            let hog = fill(&machine);
            assert_eq!(asking.ask(request), "0", "{request}");
            assert_eq!(asking.ask("error"), "0", "{request}");
            assert!(has_given_way(&machine, &idle), "{request}");
            drop(hog);
        }
        idle.verify();
        assert_eq!(asking.ask("check"), "ok");
    }
}

/// Threads that wait for events do so for ever: NCCL's watchdog, and those that keep pinned memory.
#[test]
fn questions_about_work_are_no_calls() {
    let machine = crowded();
    let mut idle = idle(&machine, 48);
    let mut asking = asking(&machine);
    for request in ["first", "take 40", "poll"] {
        assert_eq!(asking.ask(request), "0", "{request}");
    }
    // In place, it is idle.
    let mut wire = machine.connect(&asking);
    wire.step(&json!({ "request": "share", "epoch": u64::MAX }), None, "member");
    wire.send(&json!({ "request": "order", "order": "watch", "on": true }), None);
    patiently(|| {
        wire.send(&json!({ "request": "order", "order": "beat" }), None);
        let told = wire.answer();
        if told["idle_ms"].as_u64() > Some(300) { Ok(()) } else { Err(told) }
    })
    .unwrap();
    drop(wire);
    drop(asking);
    // Away, it stays away.
    let mut asking = self::asking(&machine);
    for request in ["first", "take 40", "poll"] {
        assert_eq!(asking.ask(request), "0", "{request}");
    }
    idle.verify();
    thread::sleep(Duration::from_millis(300));
    assert_eq!(member(&machine, &asking)["place"], "away");
    assert_eq!(asking.ask("check"), "ok");
}

/// Torch gives back what it has cached when it gets an error, and asks again; but not in a pool or a capture, where an error would be final.
#[test]
fn torch_gets_an_error_first_only_where_it_asks_again() {
    let machine = crowded();
    let torch = machine.folder.path().join("libc10_cuda.so");
    symlink(room(), &torch).unwrap();
    let torch = torch.to_str().unwrap();
    for (request, answers) in [("", &["2", "0"][..]), ("pool", &["0"]), ("capture", &["0"])] {
        let mut idle = idle(&machine, 48);
        let mut asking = Program::ready(&mut sharing(&machine, "asking", &[torch]));
        assert_eq!(asking.ask("first"), "0");
        if !request.is_empty() {
            assert_eq!(asking.ask(request), "0");
        }
        for answer in answers {
            assert_eq!(asking.ask("take 40"), *answer, "{request}");
        }
        if request == "capture" {
            assert_eq!(asking.ask("end"), "0");
        }
        assert_eq!(asking.ask("check"), "ok");
        asking.end();
        idle.verify();
        idle.end();
    }
}

/// What can never be had fails as it would alone: above the program's own limit, and on any GPU of this size.
#[test]
fn what_can_never_fit_is_out_of_memory() {
    let machine = crowded();
    let mut idle = idle(&machine, 48);
    let room = room();
    let mut command = machine.cli(&["run", "--share", "--name", "asking", "--no-python", "--limit", "40M", "--", &room]);
    let mut asking = Program::ready(&mut command);
    assert_eq!(asking.ask("first"), "0");
    for request in ["take 44", "order 44", "take 200"] {
        assert_eq!([asking.ask(request), asking.ask("error")], ["2", "2"], "{request}");
    }
    assert!(!has_given_way(&machine, &idle), "in vain");
    assert_eq!([asking.ask("take 24"), asking.ask("error")], ["0", "0"]);
    drop(asking);
    let mut asking = self::asking(&machine);
    for request in ["take 200", "order 200"] {
        assert_eq!([asking.ask(request), asking.ask("error")], ["2", "2"], "{request}");
    }
    idle.verify();
}

/// A person changes how a running program shares. Whoever it was at the start, the change holds.
#[test]
fn how_a_running_program_shares_can_be_changed() {
    let machine = crowded();
    let mut idle = idle(&machine, 48);
    let room = &room();
    let mut command = machine.cli(&["run", "--share", "--name", "asking", "--no-python", "--limit", "40M", "--", room]);
    let mut asking = Program::ready(&mut command);
    assert_eq!([asking.ask("first"), asking.ask("take 44"), asking.ask("error")], ["0", "2", "2"]);
    machine.vramctl("share asking --limit 60M --priority low").expect(0, "low priority, at most 60M of each GPU", "");
    assert_eq!([asking.ask("take 44"), asking.ask("error")], ["0", "0"]);
    let seen = eventually_is(&machine, &asking, "priority", "low");
    assert_eq!(seen["place"], "in place");
    machine.vramctl("share idle --limit 80M").expect(0, "at most 80M of each GPU", "");
    machine.vramctl("share asking").expect(2, "", "what is to change?");
    machine.vramctl("share").expect(0, "turns of 2.0 s", "");
    // Idle, it gives all of its memory back, although nobody asks for it.
    idle.verify();
    machine.vramctl("share idle --idle 1").expect(0, "gives its memory back after 1 s", "");
    eventually_is(&machine, &idle, "place", "away");
    idle.verify();
    machine.vramctl("share idle --idle 0").expect(0, "normal priority", "");
    assert_eq!(asking.ask("check"), "ok");
    // Of a program that does not share, there is nothing to change.
    drop(asking);
    let plain = machine.engine("plain");
    machine.vramctl("share plain --priority low").expect(1, "", "does not share its GPUs");
    drop(plain);
}

fn eventually_is(machine: &Machine, program: &Program, what: &str, value: &str) -> Value {
    eventually(&format!("its {what} is {value}"), || member(machine, program)[what] == value);
    member(machine, program)
}

/// A program that would rather fail than wait says so.
#[test]
fn a_program_says_how_long_it_waits_while_nobody_can_give_way() {
    let machine = crowded();
    let mut capturing = asking(&machine);
    for request in ["first", "take 60", "capture"] {
        assert_eq!(capturing.ask(request), "0", "{request}");
    }
    let log = machine.folder.path().join("log");
    let mut command = machine.cli(&["run", "--share", "--name", "hasty", "--no-python", "--wait", "1", "--", &room()]);
    let mut hasty = Program::ready(command.stderr(File::create(&log).unwrap()));
    assert_eq!([hasty.ask("first"), hasty.ask("take 40")], ["0", "2"]);
    let log = fs::read_to_string(log).unwrap();
    assert!(log.contains("nobody could give way for 1 s"), "{log}");
    assert_eq!(capturing.ask("end"), "0");
    assert_eq!([hasty.ask("error"), hasty.ask("take 40")], ["2", "0"]);
    assert_eq!([capturing.ask("check"), hasty.ask("check")], ["ok", "ok"]);
}

/// A program that grows by many small allocations has others give way a few times only.
#[test]
fn a_program_that_grows_makes_others_give_way_seldom() {
    let mut machine = crowded();
    machine.memory = "256M";
    let mut idle = asking(&machine);
    assert_eq!(idle.ask("first"), "0");
    // Beside the context of the other one, it must fit again.
    let full = || 256 * MIB - machine.used() < 24 * MIB;
    while !full() {
        assert_eq!(idle.ask("take 2"), "0");
    }
    let mut growing = Program::ready(&mut sharing(&machine, "growing", &[&room()]));
    assert_eq!(growing.ask("first"), "0");
    let changes = || metric(&machine, "vramctl_share_changes_total{outcome=\"changed\"}");
    let before = changes();
    for _ in 0..24 {
        assert_eq!(growing.ask("take 2"), "0");
    }
    let made = changes() - before;
    assert!((3.0..12.0).contains(&made), "{made} changes of places for 24 allocations");
    assert_eq!([growing.ask("check"), idle.ask("check")], ["ok", "ok"]);

    // What all this was is on the page of the metrics, too.
    let [waits, bytes] = ["vramctl_share_wait_seconds_count", "vramctl_share_bytes_total"].map(|name| metric(&machine, name));
    assert!(waits >= made && bytes >= (40 * MIB) as f64, "{waits} waits, {bytes} bytes");
    let all = metric(&machine, "vramctl_share_wait_seconds_bucket{le=\"+Inf\"}");
    assert!(all >= waits, "{all}");
    let [idle, away] = ["idle", "away"].map(|why| metric(&machine, &format!("vramctl_share_gave_way_total{{reason=\"{why}\"}}")));
    assert!(idle >= 1.0 && idle + away >= made, "{idle} and {away} of {made}");
}

fn metric(machine: &Machine, name: &str) -> f64 {
    let page = machine.vramctl("metrics").expect(0, "", "").out;
    page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok()).unwrap_or(0.0)
}

/// An engine that sleeps wakes up while others have the GPU. Neither its calls nor the scheduler bring back what it has paused itself.
#[test]
fn a_programs_own_resume_waits_for_room() {
    let machine = crowded();
    let program = programs().join("engine_regions");
    let mut sleeper =
        Program::ready(&mut sharing(&machine, "sleeper", &[program.to_str().unwrap(), "--weights-mib", "40", "--kv-mib", "8"]));
    assert_eq!(sleeper.ask("pause weights"), "paused weights");
    let mut idle = idle(&machine, 48);
    sleeper.ask("memory");
    idle.verify();
    let status = machine.status("sleeper");
    let weights =
        status["processes"][0]["tags"].as_array().unwrap().iter().find(|tag| tag["tag"] == "weights").unwrap_or_else(|| panic!("{status}"));
    assert_eq!(weights["self_paused_bytes"], weights["bytes"], "{status}");
    assert_eq!(sleeper.ask("resume weights 0"), "resumed weights");
    assert!(has_given_way(&machine, &idle));
    sleeper.verify();
    idle.verify();
    sleeper.verify();
}

/// Whoever captures is left alone, and may wait for others meanwhile.
#[test]
fn a_capture_waits_for_room_and_gives_none() {
    let machine = crowded();
    let mut idle = idle(&machine, 48);
    let mut asking = asking(&machine);
    assert_eq!([asking.ask("first"), asking.ask("capture")], ["0", "0"]);
    assert_eq!(asking.ask("take 40"), "0");
    assert!(has_given_way(&machine, &idle));
    idle.tell("verify");
    eventually("nobody can give way", || member(&machine, &idle)["because"] == "nobody can give way: asking captures a graph");
    assert!(!has_given_way(&machine, &asking));
    assert_eq!(asking.ask("end"), "0");
    assert!(idle.line().contains("ok"));
    assert_eq!(asking.ask("check"), "ok");
}

/// With the memory away, exit handlers and signal handlers find it where it was, and what ends without them does not wait.
#[test]
fn a_program_that_is_away_ends_as_it_would_alone() {
    for (request, says) in [("at-exit", "ok"), ("free-at-exit", "0"), ("on-term", "ok"), ("error", "")] {
        let machine = crowded();
        let mut idle = idle(&machine, 48);
        // A call of the library's during the driver's end, or after it, would abort the program.
        let mut asking = Program::ready(sharing(&machine, "asking", &[&room()]).env("SIMGPU_END_MS", "20"));
        for request in ["first", "take 40", request] {
            assert_eq!(asking.ask(request), "0", "{request}");
        }
        idle.verify();
        assert_eq!(member(&machine, &asking)["place"], "away", "{request}");
        match request {
            "on-term" => asking.signal(libc::SIGTERM),
            "error" => asking.signal(libc::SIGKILL),
            _ => drop(asking.child.stdin.take()),
        }
        assert_eq!(asking.line(), says, "{request}");
        let status = asking.ended();
        assert_eq!(status.success(), request != "error", "{request}: {status}");
        idle.verify();
    }
}
