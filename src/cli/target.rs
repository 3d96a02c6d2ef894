//! Finding the managed processes and choosing among them.

use crate::failure::{Exit, Failure};
use crate::output;
use serde::{Serialize, Serializer};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use std::{fmt, io, thread};
use vramctl_config as config;
use vramctl_control::client::{Client, ClientError};
use vramctl_control::discovery::Directory;
use vramctl_control::protocol::ProcessStatus;
use vramctl_model as model;
use vramctl_model::Bytes;
use vramctl_model::TagState;

/// The options by which every command chooses processes.
#[derive(clap::Args)]
#[group(id = "target", multiple = false)]
pub struct TargetArgs {
    /// The process with this id
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
    /// All processes of this name (`vramctl run --name`, else the program's)
    #[arg(long)]
    name: Option<String>,
    /// All managed processes
    #[arg(long)]
    all: bool,
}

/// Which processes are meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// The only one that there is.
    Only,
    Pid(u32),
    /// All of this name.
    Name(String),
    All,
}

impl From<TargetArgs> for Target {
    fn from(args: TargetArgs) -> Self {
        match args {
            TargetArgs { pid: Some(pid), .. } => Self::Pid(pid),
            TargetArgs { name: Some(name), .. } => Self::Name(name),
            TargetArgs { all: true, .. } => Self::All,
            TargetArgs { all: false, .. } => Self::Only,
        }
    }
}

impl Target {
    /// A number is a process id, all else a name; a name that is a number is for `--name`.
    pub fn parse(text: String) -> Self {
        text.parse().map_or_else(|_| Self::Name(text), Self::Pid)
    }
}

/// A tag as an argument.
pub fn checked_tag(text: &str) -> Result<String, String> {
    model::checked_tag(text).map(|tag| tag.to_string()).map_err(|error| error.to_string())
}

/// A managed process, and what it has, or why it does not say.
#[derive(Debug, Clone)]
pub struct Process {
    pub pid: u32,
    pub status: Result<ProcessStatus, Failure>,
}

impl Process {
    pub fn name(&self) -> Option<&str> {
        self.status.as_ref().ok().map(|status| status.process.name.as_str())
    }

    /// Bytes that it has and that are not paused.
    pub fn active_bytes(&self) -> u64 {
        let tags = self.status.as_ref().map_or(&[][..], |status| &status.memory.tags);
        tags.iter().map(|tag| tag.bytes - tag.paused_bytes).sum()
    }

    /// Its state over all tags; `None` without allocations.
    pub fn state(&self) -> Option<TagState> {
        let tags = &self.status.as_ref().ok()?.memory.tags;
        let first = tags.first()?.state;
        Some(if tags.iter().all(|tag| tag.state == first) { first } else { TagState::Mixed })
    }
}

/// For messages: `engine (pid 4711)`.
impl fmt::Display for Process {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(out, "{name} (pid {})", self.pid),
            None => write!(out, "process {}", self.pid),
        }
    }
}

impl Serialize for Process {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.status {
            Ok(status) => status.serialize(serializer),
            Err(failure) => json!({ "pid": self.pid, "error": failure }).serialize(serializer),
        }
    }
}

/// The managed processes of the user.
pub struct Found {
    directory: Option<Arc<Directory>>,
    /// Those that listen, by id.
    listening: Vec<u32>,
    /// Those that were asked.
    pub processes: Vec<Process>,
}

/// How long a process may take to say what it has. A stopped one never does; the others are not to wait for it.
const PATIENCE: Duration = Duration::from_secs(5);

impl Found {
    /// Looks for processes and asks those that may be meant what they have.
    pub fn look(target: &Target) -> Result<Self, Failure> {
        let failed = |error: io::Error| Failure::new(Exit::Failed, format!("the directory of the control sockets cannot be used: {error}"));
        let Some(directory) = Directory::open().map_err(failed)?.map(Arc::new) else {
            return Ok(Self { directory: None, listening: Vec::new(), processes: Vec::new() });
        };
        let listening = directory.processes().map_err(failed)?;
        let asked = match target {
            Target::Pid(pid) if listening.contains(pid) => std::slice::from_ref(pid),
            _ => listening.as_slice(),
        };
        let processes = ask(&directory, asked);
        Ok(Self { directory: Some(directory), listening, processes })
    }

    /// Those that are meant.
    pub fn choose(&self, target: &Target) -> Result<Vec<Process>, Failure> {
        choose(&self.processes, target).map_err(|none| match (target, self.processes.is_empty()) {
            (Target::Pid(_), _) | (_, false) => none,
            (_, true) => Failure::new(Exit::NoProcess, self.nothing()),
        })
    }

    /// Those of these processes that listen, and what they have now.
    pub fn look_again(&self, pids: &[u32]) -> Vec<Process> {
        let listening: Vec<_> = pids.iter().copied().filter(|pid| self.listening.contains(pid)).collect();
        self.directory.as_ref().map_or_else(Vec::new, |directory| ask(directory, &listening))
    }

    /// Connects to one of them.
    pub fn connect(&self, pid: u32) -> Result<Client, ClientError> {
        let nowhere = || ClientError::Io { pid, error: io::ErrorKind::NotFound.into() };
        Client::connect(self.directory.as_deref().ok_or_else(nowhere)?, pid)
    }

    /// That there is none, and what may be the reason.
    pub fn nothing(&self) -> String {
        let path = config::socket_directory();
        let path = self.directory.as_ref().map_or(path, |directory| directory.path());
        format!(
            "no process is managed (looked in {}). Start a program with `vramctl run -- COMMAND`; it shows once it has allocated GPU \
             memory. If it runs with another VRAMCTL_DIR or XDG_RUNTIME_DIR, set VRAMCTL_DIR to its directory",
            path.display()
        )
    }
}

/// Asks all at once.
fn ask(directory: &Arc<Directory>, pids: &[u32]) -> Vec<Process> {
    let (answer, answers) = mpsc::channel();
    for &pid in pids {
        let (directory, answer) = (Arc::clone(directory), answer.clone());
        thread::spawn(move || {
            let status = Client::connect(&directory, pid).and_then(|mut client| client.status());
            // Nobody waits any more where it took too long.
            let _ = answer.send((pid, status.map_err(Failure::from)));
        });
    }
    drop(answer);
    let deadline = Instant::now() + PATIENCE;
    let mut told = BTreeMap::new();
    while let Ok((pid, status)) = answers.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        told.insert(pid, status);
    }
    let silent = || Err(Failure::new(Exit::Busy, format!("no answer within {} s; is it stopped?", PATIENCE.as_secs())));
    pids.iter().map(|&pid| Process { pid, status: told.remove(&pid).unwrap_or_else(silent) }).collect()
}

fn choose(processes: &[Process], target: &Target) -> Result<Vec<Process>, Failure> {
    let chosen: Vec<_> = processes
        .iter()
        .filter(|process| match target {
            Target::Only | Target::All => true,
            Target::Pid(pid) => process.pid == *pid,
            Target::Name(name) => process.name() == Some(name),
        })
        .cloned()
        .collect();
    let fail = |exit, why: String| Err(Failure::new(exit, if processes.is_empty() { why } else { why + "\n" + &list(processes) }));
    match (target, chosen.len()) {
        (Target::Only, 2..) => fail(Exit::Usage, "several processes are managed; say which with --pid, --name or --all:".into()),
        (Target::Pid(pid), 0) => fail(Exit::NoProcess, not_managed(*pid)),
        (Target::Name(name), 0) => fail(Exit::NoProcess, format!("no managed process is called {name}; there are:")),
        (_, 0) => fail(Exit::NoProcess, "no process is managed".into()),
        _ => Ok(chosen),
    }
}

fn not_managed(pid: u32) -> String {
    if Path::new(&format!("/proc/{pid}")).exists() {
        format!("process {pid} is not managed: it was not started under `vramctl run`, or has not allocated GPU memory yet")
    } else {
        format!("there is no process {pid}")
    }
}

/// What there is to choose from.
fn list(processes: &[Process]) -> String {
    let row = |process: &Process| {
        let bytes = process.status.as_ref().map_or(0, |status| status.memory.tags.iter().map(|tag| tag.bytes).sum());
        let state = process.state().map_or("", |state| state.name());
        vec![process.pid.to_string(), process.name().unwrap_or("?").to_owned(), state.to_owned(), Bytes(bytes).to_string()]
    };
    output::table(&["PID", "NAME", "STATE", "BYTES"], processes.iter().map(row))
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use vramctl_control::protocol::Hello;
    use vramctl_model::{Status, TagStatus};

    /// A process with tags of one GiB each, in these states.
    pub fn process(pid: u32, name: &str, tags: &[(&str, TagState)]) -> Process {
        let hello = Hello { protocol: 1, library: "0".into(), pid, name: name.into(), program: name.into(), engine: None };
        let tag = |&(tag, state): &(&str, TagState)| {
            let paused_bytes = if state == TagState::Paused { 1 << 30 } else { 0 };
            TagStatus { tag: tag.into(), state, allocations: 1, bytes: 1 << 30, paused_bytes, ..TagStatus::default() }
        };
        let memory = Status {
            process_tag: None,
            tags: tags.iter().map(tag).collect(),
            devices: Vec::new(),
            host: vramctl_model::HostStatus::default(),
            late_bytes: 0,
        };
        Process { pid, status: Ok(ProcessStatus { process: hello, memory }) }
    }

    fn pids(chosen: Result<Vec<Process>, Failure>) -> Vec<u32> {
        chosen.unwrap().iter().map(|process| process.pid).collect()
    }

    #[test]
    fn one_process_needs_no_target_and_several_do() {
        let one = [process(1, "a", &[])];
        let two = [process(1, "a", &[]), process(2, "b", &[])];
        assert_eq!(pids(choose(&one, &Target::Only)), [1]);
        let failure = choose(&two, &Target::Only).unwrap_err();
        assert_eq!(failure.exit(), Exit::Usage);
        let text = failure.to_string();
        assert!(text.contains("--all") && text.contains("1    a") && text.contains("2    b"), "{text}");
        assert_eq!(choose(&[], &Target::Only).unwrap_err().exit(), Exit::NoProcess);
    }

    #[test]
    fn a_name_means_all_of_that_name() {
        let processes = [process(1, "a", &[]), process(2, "b", &[]), process(3, "a", &[])];
        assert_eq!(pids(choose(&processes, &Target::Name("a".into()))), [1, 3]);
        assert_eq!(pids(choose(&processes, &Target::Pid(2))), [2]);
        assert_eq!(pids(choose(&processes, &Target::All)), [1, 2, 3]);
        let failure = choose(&processes, &Target::Name("c".into())).unwrap_err();
        assert_eq!(failure.exit(), Exit::NoProcess);
        assert!(failure.to_string().contains("called c; there are:"), "{failure}");
    }

    #[test]
    fn a_process_that_is_not_managed_is_told_from_one_that_is_not_there() {
        let own = std::process::id();
        assert!(choose(&[], &Target::Pid(own)).unwrap_err().to_string().contains("is not managed"));
        assert!(choose(&[], &Target::Pid(u32::MAX)).unwrap_err().to_string().contains("there is no process"));
    }

    #[test]
    fn a_number_is_a_process() {
        assert_eq!(Target::parse("12".into()), Target::Pid(12));
        assert_eq!(Target::parse("engine".into()), Target::Name("engine".into()));
    }

    #[test]
    fn the_state_of_a_process_is_that_of_its_tags() {
        use TagState::{Active, Mixed, Paused};
        assert_eq!(process(1, "a", &[]).state(), None);
        assert_eq!(process(1, "a", &[("x", Paused), ("y", Paused)]).state(), Some(Paused));
        assert_eq!(process(1, "a", &[("x", Paused), ("y", Active)]).state(), Some(Mixed));
    }
}
