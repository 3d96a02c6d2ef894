//! The programs of other users, for root: a command for each directory of sockets that is in use on this machine. It looks as its user does, and
//! each directory is checked as a user's own is.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use vramctl_config::socket_directory;
use vramctl_control::protocol::ProcessStatus;
use vramctl_coordinator::account::name_of;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::processes::Process;
use vramctl_coordinator::{parallel, proc};
use vramctl_host::system::user;

/// The option that asks for them.
#[derive(clap::Args)]
pub struct EverybodyArgs {
    /// Those of all users [default for root, unless `VRAMCTL_DIR` is set]
    #[arg(long)]
    all_users: bool,
}

impl EverybodyArgs {
    /// The programs of others, if they are meant.
    pub fn look(&self) -> Result<Option<Others>, CommandError> {
        let is_usual = user() == 0 && env::var_os("VRAMCTL_DIR").is_none();
        if self.all_users && user() != 0 {
            return Err(CommandError::new(Exit::Usage, "only root sees the programs of all users: sudo vramctl …"));
        }
        Ok((self.all_users || is_usual).then(Others::look))
    }
}

/// Programs that another directory than this command's has the sockets of.
pub struct Others {
    pub processes: Vec<Process>,
    /// Whose they are, by process.
    users: BTreeMap<u32, u32>,
}

impl Others {
    fn look() -> Self {
        let found = parallel::each_well(directories(), |(path, owner)| (processes_in(&path), owner));
        let users = found.iter().flat_map(|(processes, owner)| processes.iter().map(|process| (process.pid, *owner))).collect();
        Self { processes: found.into_iter().flat_map(|(processes, _)| processes).collect(), users }
    }

    /// The user's name, or number.
    pub fn user_of(&self, pid: u32) -> String {
        let owner = self.users.get(&pid).copied().unwrap_or_else(user);
        name_of(owner).unwrap_or_else(|| owner.to_string())
    }
}

/// The directories with sockets in which this command does not look anyway, and whose they are.
fn directories() -> Vec<(PathBuf, u32)> {
    let of_process = |pid: u32| {
        let [preloaded] = proc::variables(pid, ["LD_PRELOAD"]);
        preloaded?;
        Some(as_seen_here(pid, &proc::socket_directory(pid)))
    };
    let usual = ["/run/user", "/tmp"].iter().flat_map(|folder| fs::read_dir(folder).into_iter().flatten().flatten()).map(|entry| {
        let path = entry.path();
        if path.starts_with("/run/user") { path.join("vramctl") } else { path }
    });
    let usual = usual.filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vramctl")));
    let identity =
        |path: &Path| fs::symlink_metadata(path).ok().filter(fs::Metadata::is_dir).map(|found| ((found.dev(), found.ino()), found.uid()));
    let mut known: BTreeSet<_> = identity(socket_directory()).map(|(id, _)| id).into_iter().collect();
    let all = proc::pids().into_iter().filter_map(of_process).chain(usual);
    all.filter_map(|path| identity(&path).filter(|(id, _)| known.insert(*id)).map(|(_, owner)| (path, owner))).collect()
}

/// A path of a process, which may be in a container.
fn as_seen_here(pid: u32, path: &Path) -> PathBuf {
    let theirs = PathBuf::from(format!("/proc/{pid}/root")).join(path.strip_prefix("/").unwrap_or(path));
    let id = |path: &Path| fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    if id(&theirs) == id(path) { path.to_owned() } else { theirs }
}

/// The processes that listen in a directory. None if it is no good: its user hears of that.
fn processes_in(directory: &Path) -> Vec<Process> {
    let Ok(binary) = env::current_exe() else { return Vec::new() };
    let mut command = Command::new(binary);
    command.args(["ps", "--json"]).env("VRAMCTL_DIR", directory).stdin(Stdio::null()).stderr(Stdio::null());
    let answer = command.output().ok().and_then(|output| serde_json::from_slice::<Value>(&output.stdout).ok());
    let processes = answer.as_ref().and_then(|answer| answer["processes"].as_array());
    processes.into_iter().flatten().filter_map(process).collect()
}

/// A process as `ps --json` prints it.
fn process(told: &Value) -> Option<Process> {
    let (pid, name) = (told["pid"].as_u64()?.try_into().ok()?, told["name"].as_str().map(str::to_owned));
    let status = match told.get("error") {
        Some(error) => Err(CommandError::new(Exit::Busy, error["message"].as_str().unwrap_or("it does not answer"))),
        None => Ok(serde_json::from_value::<ProcessStatus>(told.clone()).ok()?),
    };
    Some(Process { pid, name, status })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use vramctl_coordinator::process::made_up;

    #[test]
    fn what_a_command_prints_is_what_it_was() {
        let silent = Process { status: Err(CommandError::new(Exit::Busy, "no answer")), ..made_up::process(8, "b", &[]) };
        for one in [made_up::process(7, "a", &[]), silent] {
            let again = process(&json!(one)).unwrap();
            assert_eq!((again.pid, again.name, again.status), (one.pid, one.name, one.status));
        }
    }
}
