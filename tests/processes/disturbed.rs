//! Programs that share a GPU by themselves, while somebody kills and stops them, their keepers and the scheduler: whoever is left goes on, and
//! answers as if nothing had happened.

use crate::common::machine::{Machine, Program};
use crate::common::{built, eventually, in_parallel, patiently, some};
use crate::taking_turns::{crowded, one_at_a_time, start_all};
use serde_json::Value;
use std::fs;
use std::process::Command;

/// The scheduler's process and its epoch, once there is one that answers.
fn scheduler(machine: &Machine) -> (i32, u64) {
    let ask = || {
        let view: Value = serde_json::from_str(&machine.vramctl("share --json").out).ok()?;
        Some((view["scheduler"].as_i64()? as i32, view["epoch"].as_u64()?))
    };
    patiently(|| ask().ok_or(())).expect("a scheduler")
}

fn signal(pid: i32, signal: libc::c_int) {
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

/// It is stopped for so long that another keeper takes over. When it continues, it schedules no more, and takes over again when there is need.
#[test]
fn another_keeper_takes_over_from_a_scheduler_that_stands_still() {
    let _alone = one_at_a_time();
    let machine = crowded();
    let mut engines = start_all(&machine);
    let (first, before) = scheduler(&machine);
    signal(first, libc::SIGSTOP);
    engines.iter_mut().for_each(Program::verify);
    let (second, after) = scheduler(&machine);
    assert!(second != first && after > before, "{first} {second}, {before} {after}");
    signal(first, libc::SIGCONT);
    for _ in 0..2 {
        engines.iter_mut().for_each(Program::verify);
    }
    assert_ne!(scheduler(&machine).0, first);
    // Only that one is left to take over.
    for pid in keepers(&machine).into_iter().filter(|pid| *pid != first) {
        signal(pid, libc::SIGKILL);
    }
    engines.iter_mut().for_each(Program::verify);
    assert_eq!(scheduler(&machine).0, first);
}

/// The keepers of a machine's runs.
fn keepers(machine: &Machine) -> Vec<i32> {
    let folder = machine.sockets();
    let of_machine = |pid: &i32| {
        let read = |file| fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        String::from_utf8_lossy(&read("cmdline")).contains("keeper\0--run\0")
            && String::from_utf8_lossy(&read("environ")).contains(folder.to_str().unwrap())
    };
    let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    processes.filter(of_machine).collect()
}

/// The state of a process, as the kernel has it: `T` if it is stopped.
fn state_of(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(") ").next()?.chars().next()
}

/// A program of `tests/apps/room.c`.
fn asking(machine: &Machine, name: &str) -> Program {
    let room = built("room", "room.c", &["-l:libcuda.so.1", "-l:libcudart.so.13"]);
    let mut command: Command = machine.cli(&["run", "--share", "--name", name, "--no-python", "--"]);
    let mut program = Program::ready(command.arg(room));
    assert_eq!(program.ask("first"), "0");
    program
}

/// What a program calls while it leaves its GPU, and while it comes back.
const LEAVES: [&str; 3] = ["cuMemcpyDtoHAsync_v2", "cuMemUnmap", "cuMemRelease"];
const COMES: [&str; 4] = ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemcpyHtoDAsync_v2"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Killed {
    Scheduler,
    /// All keepers, the scheduler too, except one.
    Keepers,
    WhoLeaves,
    WhoComes,
}

/// Two programs change places, and one of them stands still at a step of that. Meanwhile somebody is killed.
fn is_killed_at(step: &str, killed: Killed) {
    let about = format!("{killed:?} at {step}");
    let mut machine = Machine::new();
    machine.memory = "96M";
    let mut programs = ["a", "b", "c"].map(|name| asking(&machine, name));
    let [leaves, comes, other] = &mut programs;
    for program in [&mut *comes, &mut *leaves] {
        for _ in 0..3 {
            assert_eq!(program.ask("take 20"), "0", "{about}");
        }
    }
    let (first, before) = scheduler(&machine);
    let stops = if LEAVES.contains(&step) { &mut *leaves } else { &mut *comes };
    assert_eq!(stops.ask(&format!("stop {step}")), "0", "{about}");
    let stopped = stops.pid();
    comes.tell("check");
    eventually(&format!("{about}: it stops"), || state_of(stopped) == Some('T'));
    match killed {
        Killed::Scheduler => signal(first, libc::SIGKILL),
        Killed::Keepers => {
            let mut all = keepers(&machine);
            all.sort_by_key(|pid| *pid != first);
            assert_eq!(all.len(), 3, "{about}");
            for pid in &all[..2] {
                signal(*pid, libc::SIGKILL);
            }
        }
        Killed::WhoLeaves => leaves.kill(),
        Killed::WhoComes => comes.kill(),
    }
    if state_of(stopped) == Some('T') {
        signal(stopped as i32, libc::SIGCONT);
    }
    if killed != Killed::WhoComes {
        assert_eq!(comes.line(), "ok", "{about}");
    }
    if killed != Killed::WhoLeaves {
        assert_eq!(leaves.ask("check"), "ok", "{about}");
    }
    // What was promised to the dead is there for another one.
    for _ in 0..4 {
        assert_eq!(other.ask("take 20"), "0", "{about}");
    }
    let alive = programs.iter_mut().filter(|program| !program.is_silent());
    for program in alive {
        assert_eq!(program.ask("check"), "ok", "{about}");
    }
    let (_, after) = scheduler(&machine);
    assert!(after > before || matches!(killed, Killed::WhoLeaves | Killed::WhoComes), "{about}");
}

/// `PROPTEST_CASES` sets how many of them.
#[test]
fn whoever_is_killed_at_any_step_of_a_change_the_others_go_on() {
    let _alone = one_at_a_time();
    let of = |step: &&'static str| [Killed::Scheduler, Killed::Keepers, Killed::WhoLeaves, Killed::WhoComes].map(|killed| (*step, killed));
    let all: Vec<_> = LEAVES.iter().chain(&COMES).flat_map(of).collect();
    in_parallel(some(all, 6), 3, |(step, killed)| is_killed_at(step, killed));
}
