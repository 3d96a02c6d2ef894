//! Programs that `vramctl run` has started and that have not allocated GPU memory yet: they do not listen.

use crate::proc;
use crate::process::Process;
use crate::target::{Target, matches_name};
use crate::text::one_line;
use serde::Serialize;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::process;
use vramctl_config::{socket_directory, socket_directory_of};
use vramctl_host::program_of;
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
/// of which one does is past its start.
pub fn starting(target: &Target, managed: &[Process]) -> Vec<Starting> {
    const VARIABLES: [&str; 5] = ["VRAMCTL_JOB", "VRAMCTL_NAME", "VRAMCTL_DIR", "XDG_RUNTIME_DIR", "LD_PRELOAD"];
    let mut runs = BTreeMap::new();
    for pid in proc::pids().into_iter().filter(|pid| *pid != process::id() && managed.iter().all(|process| process.pid != *pid)) {
        let values = proc::variables(pid, VARIABLES);
        let value = |name: &str| VARIABLES.iter().position(|known| *known == name).and_then(|at| values[at].clone());
        let Some(run) = value("VRAMCTL_JOB").filter(|run| managed.iter().all(|process| process.run() != Some(run))) else { continue };
        let looks_here = || socket_directory_of(|name| value(name).map(OsString::from)) == socket_directory();
        if value("LD_PRELOAD").is_some() && looks_here() && proc::has_library(pid) {
            let name = value("VRAMCTL_NAME").filter(|name| checked_name(name).is_ok()).or_else(|| program_of(pid)).unwrap_or_default();
            runs.entry(run).or_insert_with(|| Starting { pid, name, program: proc::command_line(pid) });
        }
    }
    let mut found: Vec<_> = runs.into_values().filter(|one| is_meant(one, target)).collect();
    found.sort_by_key(|one| one.pid);
    found
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
