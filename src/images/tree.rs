//! A program's processes: its first one and all that came of it, by `/proc`. Each has the driver open in its own way.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::fs;
use std::iter;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::proc;
use vramctl_model::Holder;

/// What a process has to do with the GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// It has memory of the library's: held, paused, stored, and taken off the GPUs.
    Library,
    /// It has CUDA's driver open, without memory of the library's.
    Driver,
    /// It has NVML open, and nothing else.
    Nvml,
    /// It has nothing of the driver open.
    Plain,
}

/// A process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Node {
    /// Its id as seen from here.
    pub pid: u32,
    /// Its parent's; the first one's is outside.
    pub parent: u32,
    /// What it has of the driver.
    pub kind: Kind,
}

/// The processes of a program, the first one first, parents before children.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tree {
    nodes: Vec<Node>,
}

impl Tree {
    /// This process and its descendants. `listening`: those with memory of the library's.
    pub fn of(root: u32, listening: &BTreeSet<u32>) -> Self {
        let mut nodes = Vec::new();
        let mut due = VecDeque::from([(root, parent(root).unwrap_or_default())]);
        while let Some((pid, parent)) = due.pop_front() {
            let kind = if listening.contains(&pid) { Kind::Library } else { kind(pid) };
            nodes.push(Node { pid, parent, kind });
            due.extend(children(pid).into_iter().map(|child| (child, pid)));
        }
        Self { nodes }
    }

    /// The processes.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The first one.
    pub fn root(&self) -> u32 {
        self.nodes.first().map_or(0, |node| node.pid)
    }

    /// Those of another tree have their kind there.
    #[must_use]
    pub fn with_kinds_of(mut self, other: &Self) -> Self {
        for node in &mut self.nodes {
            let known = other.nodes.iter().find(|known| known.pid == node.pid);
            node.kind = known.map_or(node.kind, |known| if node.kind == Kind::Plain { known.kind } else { node.kind });
        }
        self
    }

    /// All ids.
    pub fn pids(&self) -> Vec<u32> {
        self.nodes.iter().map(|node| node.pid).collect()
    }

    /// Those that have the driver open and no memory of the library's.
    pub fn bare(&self) -> Vec<u32> {
        self.nodes.iter().filter(|node| matches!(node.kind, Kind::Driver | Kind::Nvml)).map(|node| node.pid).collect()
    }

    /// What only several processes have that prevents an image.
    pub fn obstacles(&self, holders: &[Holder]) -> Vec<String> {
        let inherited = self.nodes.iter().flat_map(|node| {
            let files = driver_files(node.pid).into_iter().filter(|file| is_inherited(node.pid, file));
            files.map(|DriverFile { number, path }| {
                format!(
                    "{}: descriptor {number} is {path} of the process that it was forked from, which its checkpoint leaves open; have the program \
                     start its processes with spawn (VLLM_WORKER_MULTIPROC_METHOD=spawn, or multiprocessing's)",
                    named(node.pid)
                )
            })
        });
        let strange = self.bare().into_iter().filter(|pid| holders.iter().any(|holder| holder.pid == *pid) && !proc::has_library(*pid));
        let strange = strange.map(|pid| {
            format!("{}: it has GPU memory, and runs without vramctl's library; start the program with `vramctl run`", named(pid))
        });
        inherited.chain(strange).collect()
    }
}

/// Whether somebody has stopped it.
pub fn is_stopped(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.lines().any(|line| line.starts_with("State:\tT"))
}

/// A process, for messages.
pub fn named(pid: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    format!("{} (pid {pid})", name.trim_end())
}

/// The process from which all of these come: of those that one `vramctl run` has started, the first. Fails if there are several.
pub fn root_of(pids: &[u32]) -> Result<u32, CommandError> {
    let roots: BTreeSet<_> = pids.iter().map(|pid| first_of_run(*pid)).collect();
    // One that another comes from.
    let is_below = |pid: u32| ancestors(pid).any(|above| roots.contains(&above));
    let tops: Vec<_> = roots.iter().copied().filter(|pid| !is_below(*pid)).collect();
    if let [root] = tops[..] {
        return Ok(root);
    }
    let names: Vec<_> = tops.iter().map(|pid| named(*pid)).collect();
    let why = format!(
        "an image is of one process and those that came of it, and these have been started separately: {}. Start all ranks of a job by one \
         `vramctl run`, such as `vramctl run -- torchrun …`; a job on Ray has a process for each actor, and no image. Nothing has changed",
        names.join(", ")
    );
    Err(CommandError::new(Exit::Unsuspendable, why))
}

/// The first process that the `vramctl run` of this one has started.
fn first_of_run(pid: u32) -> u32 {
    let run = |pid: u32| proc::variables(pid, ["VRAMCTL_JOB"])[0].clone();
    // A process whose title is written over its environment says of no run, and is of that of those around it.
    let with_run = |pid: u32| Some((pid, run(pid)?));
    let mut of_runs = iter::once(pid).chain(ancestors(pid)).filter_map(with_run);
    let Some((first, own)) = of_runs.next() else { return pid };
    of_runs.take_while(|(_, run)| *run == own).last().map_or(first, |(above, _)| above)
}

/// These processes and all that came of them.
pub fn with_descendants(pids: &[u32]) -> BTreeSet<u32> {
    let (mut found, mut due) = (BTreeSet::new(), pids.to_vec());
    while let Some(pid) = due.pop() {
        if found.insert(pid) {
            due.extend(children(pid));
        }
    }
    found
}

/// The children of all of its threads.
fn children(pid: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let texts = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    texts.flat_map(|text| text.split_whitespace().filter_map(|child| child.parse().ok()).collect::<Vec<_>>()).collect()
}

/// Its parent, that one's, and so on, without the first of all.
fn ancestors(pid: u32) -> impl Iterator<Item = u32> {
    iter::successors(parent(pid), |above| parent(*above))
}

fn parent(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok().filter(|parent| *parent > 1)
}

/// An open file of the driver's.
struct DriverFile {
    number: u32,
    path: String,
}

/// Whether a path is a file of the driver's. In a container, it may be below another folder.
pub fn is_of_driver(path: &str) -> bool {
    path.contains("/dev/nvidia")
}

fn driver_files(pid: u32) -> Vec<DriverFile> {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let file = |entry: fs::DirEntry| {
        let path = fs::read_link(entry.path()).ok()?.to_string_lossy().into_owned();
        let number = entry.file_name().to_str()?.parse().ok()?;
        is_of_driver(&path).then_some(DriverFile { number, path })
    };
    files.filter_map(file).collect()
}

fn kind(pid: u32) -> Kind {
    let own: Vec<_> = driver_files(pid).into_iter().filter(|file| !is_inherited(pid, file)).collect();
    if own.iter().any(|file| file.path.contains("nvidia-uvm")) {
        Kind::Driver
    } else if own.is_empty() {
        Kind::Plain
    } else {
        Kind::Nvml
    }
}

/// Whether a process that this one comes from has the same open file.
fn is_inherited(pid: u32, file: &DriverFile) -> bool {
    ancestors(pid)
        .any(|above| driver_files(above).iter().any(|its| its.path == file.path && is_one((pid, file.number), (above, its.number))))
}

/// Whether descriptors of two processes are one open file.
fn is_one(one: (u32, u32), other: (u32, u32)) -> bool {
    const KCMP_FILE: libc::c_int = 0;
    // SAFETY: touches no memory.
    unsafe { libc::syscall(libc::SYS_kcmp, one.0, other.0, KCMP_FILE, libc::c_ulong::from(one.1), libc::c_ulong::from(other.1)) == 0 }
}

impl fmt::Display for Kind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Library => "library",
            Self::Driver => "driver",
            Self::Nvml => "nvml",
            Self::Plain => "plain",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_program_is_its_first_process_and_all_that_came_of_it() {
        let start = |run: &str| {
            let mut shell = Command::new("sh");
            shell.args(["-c", "sleep 100 & cat; kill $!"]).env("VRAMCTL_JOB", run).stdin(Stdio::piped()).stdout(Stdio::null());
            shell.spawn().unwrap()
        };
        let (mut one, mut other) = (start("a"), start("b"));
        let children_of = |pid: u32| {
            for _ in 0..1000 {
                let found = children(pid);
                if found.len() == 2 {
                    return found;
                }
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
            panic!("{:?}", children(pid));
        };
        let below = children_of(one.id());
        let tree = Tree::of(one.id(), &BTreeSet::from([below[1]]));
        assert_eq!(tree.root(), one.id());
        assert!(tree.pids().len() >= 3 && below.iter().all(|pid| tree.pids().contains(pid)), "{tree:?}");
        assert_eq!(tree.nodes().iter().find(|node| node.pid == below[1]).map(|node| node.kind), Some(Kind::Library));
        assert_eq!(root_of(&below).unwrap(), one.id());
        // This process has not been started by that run.
        assert_eq!(root_of(&[below[1], one.id()]).unwrap(), one.id());
        let refused = root_of(&[below[0], children_of(other.id())[0]]).unwrap_err();
        assert_eq!(refused.exit(), Exit::Unsuspendable);
        for mut shell in [one.stdin.take(), other.stdin.take()] {
            drop(shell.take());
        }
        one.wait().unwrap();
        other.wait().unwrap();
    }

    #[test]
    fn one_open_file_is_known_by_both_numbers() {
        let own = std::process::id();
        let (file, again) = (fs::File::open("/dev/null").unwrap(), fs::File::open("/dev/null").unwrap());
        let copy = file.try_clone().unwrap();
        let number = |file: &fs::File| std::os::fd::AsRawFd::as_raw_fd(file).cast_unsigned();
        assert!(is_one((own, number(&file)), (own, number(&copy))));
        assert!(!is_one((own, number(&file)), (own, number(&again))));
    }
}
