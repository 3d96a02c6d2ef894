//! `vramctl stop` and `vramctl wait`.

use super::*;

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
