//! What lets a program go on if the command that saves it dies: a process that waits for the end of the command and of CRIU.

use crate::bare::Bare;
use crate::repair;
use crate::shared;
use crate::tree;
use std::collections::BTreeSet;
use std::env;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use vramctl_driver::checkpoint;

/// The process, until this is dropped. While it lives, the death of this one has the program continued.
pub struct Guard {
    child: Child,
    tell: ChildStdin,
}

/// What it is told: a word, and a process id.
const STOPS: &str = "stops";
const STAYS: &str = "stays";
const LOCKS: &str = "locks";

impl Guard {
    /// Starts the process. It watches nobody yet.
    pub fn start() -> io::Result<Self> {
        let mut command = Command::new(env::current_exe()?);
        // ^C is for the command.
        command.arg("image-guard").process_group(0).stdin(Stdio::piped()).stdout(Stdio::null());
        let mut child = command.spawn()?;
        let tell = child.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?;
        Ok(Self { child, tell })
    }

    /// From now on, these processes and all that came of them are continued if this command dies and whoever else has
    /// [`held_open`](Self::held_open).
    pub fn watch(&mut self, pids: &[u32]) -> io::Result<()> {
        pids.iter().try_for_each(|pid| writeln!(self.tell, "{STOPS} {pid}"))
    }

    /// This process stays stopped then.
    pub fn leave_stopped(&mut self, pid: u32) -> io::Result<()> {
        writeln!(self.tell, "{STAYS} {pid}")
    }

    /// From now on, the driver restores and unlocks this process then, which no `vramctl resume` reaches.
    pub fn watch_bare(&mut self, pid: u32) -> io::Result<()> {
        writeln!(self.tell, "{LOCKS} {pid}")
    }

    /// Open in each process whose end is waited for.
    pub fn held_open(&self) -> RawFd {
        self.tell.as_raw_fd()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // It has nothing to do any more.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the process does: reads whom to continue, and does so when nobody can tell it any more.
pub fn run() {
    let (mut stopped, mut stays, mut bare) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for line in io::stdin().lines().map_while(Result::ok) {
        match line.split_once(' ').and_then(|(word, pid)| Some((word, pid.parse::<u32>().ok()?))) {
            Some((STOPS, pid)) => _ = stopped.insert(pid),
            Some((STAYS, pid)) => _ = stays.insert(pid),
            Some((LOCKS, pid)) => _ = bare.insert(pid),
            _ => (),
        }
    }
    go_on(&stopped.into_iter().collect::<Vec<_>>(), &stays);
    if bare.is_empty() {
        return;
    }
    let freed = checkpoint::prepare().map_err(|failure| failure.to_string());
    let freed = freed.and_then(|()| Bare::new(bare.into_iter().collect()).free().map_err(|failure| failure.to_string()));
    if let Err(why) = freed {
        eprintln!("vramctl: the save was killed, and not all of the program goes on: {why}");
    }
}

/// Removes what CRIU has left of processes and all that came of them, and continues those that do not `stay`. Those whose parent has ended are
/// nobody's descendants any more, so each is named.
pub fn go_on(known: &[u32], stay: &BTreeSet<u32>) {
    let pids = tree::with_descendants(known);
    shared::unlink_what_is_left(&pids);
    repair::end(&pids);
    for pid in pids.into_iter().filter(|pid| !stay.contains(pid)) {
        // SAFETY: touches no memory.
        unsafe { libc::kill(pid.cast_signed(), libc::SIGCONT) };
    }
}
