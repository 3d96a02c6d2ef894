//! What people see of the command line: the help of each command, its tables and its refusals, as files in `tests/snapshots`. `UPDATE=1` writes
//! them; `git diff` then shows what a change looks like.

use crate::common::generated;
use crate::common::machine::Machine;
use std::process::Command;

#[track_caller]
fn check(name: &str, shown: &str) {
    generated::check(&format!("tests/snapshots/{name}.txt"), shown, "the command line shows");
}

/// Checks these commands on a machine with two engines, which name the same run and the same host memory on each machine.
#[track_caller]
fn check_with_two(name: &str, commands: &[&str]) {
    let machine = Machine::new();
    let of_run = |command: &mut Command, name| _ = command.env("VRAMCTL_JOB", format!("run-of-{name}")).env("VRAMCTL_HOST_CAP", "64M");
    let engines = ["engine", "trainer"].map(|name| (name, machine.engine_with(name, |command| of_run(command, name))));
    check(name, &machine.transcript(&engines.each_ref().map(|(name, engine)| (*name, engine.pid())), commands));
}

#[test]
fn help() {
    let machine = Machine::without_gpus();
    let overview = machine.done("-h");
    let commands = overview.split("\nCommands:\n").nth(1).unwrap().split("\n\n").next().unwrap();
    let names = commands.lines().filter_map(|line| line.strip_prefix("  ")?.split([' ', ',']).next());
    let names: Vec<_> = names.filter(|name| !name.is_empty() && *name != "help").collect();
    assert!(names.len() > 12, "{names:?}");
    let lines: Vec<_> = ["-h".to_owned()].into_iter().chain(names.iter().map(|name| format!("{name} -h"))).collect();
    check("help", &machine.transcript(&[], &lines.iter().map(String::as_str).collect::<Vec<_>>()));
}

#[test]
fn tables() {
    check_with_two(
        "tables",
        &[
            "ps",
            "ps --sort bytes -o name",
            "status engine",
            "pause engine --dry-run",
            "suspend engine --dry-run",
            "pause engine --discard",
            "pause engine",
            "ps",
            "status engine",
            "resume engine",
        ],
    );
}

/// What people type who have not read the help: each is answered with the next step.
#[test]
fn mistakes() {
    let machine = Machine::without_gpus();
    let commands = [
        "engine",
        "pauze",
        "upgrade",
        "version",
        "-v",
        "man pause",
        "help paus",
        "pause -a",
        "pause --timeout 5d",
        "ps --wide",
        "status --watch",
        "resume engine --to 1",
        "move engine 1",
        "swap engine",
        "share on",
        "run",
        "run --name engine",
        "run --limit 20 GB -- true",
        "run --limit 200% -- true",
        "run --gpus 1 -- true",
        "run --memory 20G -- true",
        "run --priority high -- true",
        "trace engine",
        "save engine",
        "completions",
        "completion bash",
        "wait engine --for done",
        "watch engine --below 50%",
        "restart engine",
        "attach engine",
        "images /images delete engine",
        "pause engine --keep",
        "pause engine --disk",
        "pause engine --wait",
        "resume engine --force",
        "resume engine -t 5",
        "move engine --gpu 1",
        "swap trainer engine now",
        "suspend engine --quietly",
        "stop --force engine",
        "stop -s INT engine",
        "logs engine --tail 20",
        "logs engine --since 1h",
        "events --since 1h",
        "wait engine --until idle",
        "ps --user alice",
        "ps -q",
        "ps --format json",
        "trace --stop engine",
        "share --on",
        "metrics --port 9977",
        "metrics serve",
        "config set name engine",
        "doctor --fix",
        "run --background -- true",
        "run -e A=1 -- true",
        "run -it -- true",
        "run --restart always -- true",
        "run --zzz -- true",
        "metrics --listen 99999",
    ];
    check("mistakes", &machine.transcript(&[], &commands));
}

#[test]
fn refusals() {
    check_with_two(
        "refusals",
        &[
            "pause",
            "pause wieghts --name engine",
            "status enigne",
            "pause engine --ranks 2",
            "trim engine",
            "move engine --to 0",
            "watch engine --below 0",
            "watch engine --below 5 GB",
            "watch engine --below 900G",
            "run -- no-such-program",
            "run --nmae engine -- true",
            "run engine -- true",
            "unpause engine",
            "free engine",
            "kill engine",
            "stop",
            "wait engine --for paused --timeout 0",
            "wait engine --for active",
            "pause engine --tag default",
        ],
    );
}
