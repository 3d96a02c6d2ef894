//! Programs that share a GPU by themselves, while somebody kills and stops them, their keepers and the scheduler: whoever is left goes on, and
//! answers as if nothing had happened.

use crate::common::machine::{Machine, Program};
use crate::common::patiently;
use crate::taking_turns::{crowded, one_at_a_time, start_all};
use serde_json::Value;
use std::fs;

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
    assert_eq!(scheduler(&machine), (second, after));
    // Only that one is left to take over.
    let others: Vec<_> = keepers(&machine).into_iter().filter(|pid| *pid != first).collect();
    others.into_iter().for_each(|pid| signal(pid, libc::SIGKILL));
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
