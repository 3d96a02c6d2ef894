//! Programs that `vramctl run` has started and that have not allocated GPU memory yet: they do not listen.

use crate::proc;
use crate::process::Process;
use crate::target::{Target, matches_name};
use crate::text::one_line;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::process;
use vramctl_config::socket_directory;
use vramctl_control::address::namespace_of;
use vramctl_host::program_of;
use vramctl_host::system::folder_of;
use vramctl_host::system::user;
use vramctl_model::checked_name;

/// Such a program: the first process of its run.
#[derive(Debug, Clone, Serialize)]
pub struct Starting {
    /// Its process id.
    pub pid: u32,
    /// Its name (`vramctl run --name`), else the program's.
    pub name: String,
    /// Its command line.
    pub program: String,
}

impl fmt::Display for Starting {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} (pid {})", one_line(&self.name), self.pid)
    }
}

/// The programs among which this target chooses, and that will listen where this command looks. `managed`: the processes that listen; a run
/// of which one does is past its start, and so is all of a loaded program, whose other processes say of the run and the name before.
pub fn starting(target: &Target, managed: &[Process]) -> Vec<Starting> {
    const VARIABLES: [&str; 3] = ["VRAMCTL_JOB", "VRAMCTL_NAME", "LD_PRELOAD"];
    let namespace = |pid: u32| namespace_of(&folder_of(pid));
    let here = namespace(process::id());
    let loaded: BTreeSet<_> = managed.iter().filter_map(|process| namespace(process.pid)).filter(|one| Some(*one) != here).collect();
    let is_loaded = |pid| namespace(pid).is_some_and(|one| loaded.contains(&one));
    let mut runs = BTreeMap::new();
    for pid in proc::pids().into_iter().filter(|pid| *pid != process::id() && managed.iter().all(|process| process.pid != *pid)) {
        let values = proc::variables(pid, VARIABLES);
        let value = |name: &str| VARIABLES.iter().position(|known| *known == name).and_then(|at| values[at].clone());
        let Some(run) = value("VRAMCTL_JOB").filter(|run| managed.iter().all(|process| process.run() != Some(run))) else { continue };
        if value("LD_PRELOAD").is_some() && proc::socket_directory(pid) == socket_directory() && proc::has_library(pid) && !is_loaded(pid) {
            let name = name_of(pid, value("VRAMCTL_NAME"));
            runs.entry(run).or_insert_with(|| Starting { pid, name, program: proc::command_line(pid) });
        }
    }
    let mut found: Vec<_> = runs.into_values().filter(|one| is_meant(one, target)).collect();
    found.sort_by_key(|one| one.pid);
    found
}

/// The program of this name that is another user's, for root, who sees it: its id, whose it is, and where it listens.
pub fn of_other_user(name: &str) -> Option<(u32, u32, PathBuf)> {
    proc::pids().into_iter().find_map(|pid| {
        let owner = proc::owner(pid).filter(|owner| *owner != user())?;
        let [given, preloaded] = proc::variables(pid, ["VRAMCTL_NAME", "LD_PRELOAD"]);
        preloaded?;
        let there = proc::socket_directory(pid);
        let is_it = there != socket_directory() && matches_name(name, &name_of(pid, given)) && proc::has_library(pid);
        is_it.then_some((pid, owner, there))
    })
}

/// Its name: the one given, else the program's.
fn name_of(pid: u32, given: Option<String>) -> String {
    given.filter(|name| checked_name(name).is_ok()).or_else(|| program_of(pid)).unwrap_or_default()
}

fn is_meant(one: &Starting, target: &Target) -> bool {
    target.parts().iter().any(|part| match part {
        Target::Only | Target::All => true,
        Target::Pid(pid) => one.pid == *pid,
        Target::Name(name) => matches_name(name, &one.name),
        // Not a part.
        Target::Several(_) => false,
    })
}
