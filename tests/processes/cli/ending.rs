//! `vramctl stop` and `vramctl wait`.

use super::*;
use crate::common::machine::Program;

/// One that is held could save nothing at its end.
#[test]
fn a_paused_program_is_resumed_and_then_ended() {
    let machine = Machine::new();
    let (engine, other) = (machine.engine("engine"), machine.engine("other"));
    machine.vramctl("stop").expect(2, "", "name what to stop, or give --all");
    machine.done("pause engine");
    machine.vramctl("wait engine --for paused").expect(0, &format!("engine (pid {}): held, paused", engine.pid()), "");
    machine.vramctl("wait engine --for active --timeout 0.1").expect(5, "", "is held, paused");
    machine.vramctl("stop engine").expect(0, &format!("stopped engine (pid {})", engine.pid()), "");
    machine.vramctl("wait engine --for gone").expect(0, "", "");
    machine.vramctl("stop engine").expect(3, "", "no managed process is named engine");
    machine.vramctl("wait other").expect(0, &format!("other (pid {}): active", other.pid()), "");
}

/// None of the three fits beside another one.
#[test]
fn programs_that_take_turns_are_stopped_one_after_another() {
    let machine = Machine::with(1, "128M");
    let start = |name: &str| {
        let mut program = Program::spawn(&mut machine.program(name, "hog --mib 80 --seconds 600"));
        program.expect("holding");
        program
    };
    let mut programs = Vec::new();
    for (name, leaves) in [("first", true), ("second", true), ("third", false)] {
        programs.push(start(name));
        if leaves {
            machine.done(&format!("pause {name}"));
        }
    }
    let pids: Vec<_> = programs.iter().map(Program::pid).collect();
    let stopped = |place: usize, name: &str| format!("stopped {name} (pid {})\n", pids[place]);
    let told = machine.done("stop --all --timeout 100");
    assert_eq!(told, [stopped(2, "third"), stopped(0, "first"), stopped(1, "second")].concat(), "the one that runs first");
    machine.vramctl("ps").expect(0, "", "no process is managed");

    // What finds no room is left as it is.
    let waits = start("waits");
    machine.done("pause waits");
    let _hog = machine.hog(0, 80);
    machine.vramctl("stop waits --timeout 0.1").expect(4, "", "Nothing was stopped: `kill -KILL` ends it without a resume");
    machine.vramctl("wait waits --for paused").expect(0, &format!("waits (pid {}): held, paused", waits.pid()), "");
}

/// It ignores SIGTERM, and has no GPU memory yet.
#[test]
fn a_program_that_does_not_end_is_killed() {
    let machine = Machine::without_gpus();
    let mut program = machine.cli(&["run", "--name", "deaf", "--", "sh", "-c", "trap '' TERM; : >\"$READY\"; while :; do sleep 1; done"]);
    let ready = machine.folder.path().join("ready");
    let mut program = program.env("READY", &ready).spawn().unwrap();
    common::eventually("it is deaf", || ready.exists());
    common::eventually("it is listed", || machine.vramctl("ps").out.contains("deaf  starting"));
    machine.vramctl("wait deaf --timeout 0.1").expect(5, "", "deaf");
    machine.vramctl("stop deaf --timeout 0.3").expect(0, &format!("killed deaf (pid {})", program.id()), "");
    program.wait().unwrap();
}
