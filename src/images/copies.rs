//! Copies of a program that are loaded together: all of them run, or none is left.
//!
//! Each is loaded by a command of its own, which says when its program is back, and waits before it lets the program go on. Until then, nothing is
//! left of a program whose command is killed (`init.rs`).

use crate::criu::{inherit, keep_to_itself};
use crate::init::{ends, next_signal, pipe, waited_for};
use std::fs::File;
use std::io::{self, Read, Write};
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::process::{Child, Command};
use std::str::FromStr;
use vramctl_coordinator::failure::{CommandError, Exit};

/// The descriptors by which a copy's command agrees with the others: one to say that its program is back, one to hear that all are.
#[derive(Debug, Clone, Copy)]
pub struct Agreement {
    ready: RawFd,
    go: RawFd,
}

impl FromStr for Agreement {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text.split_once(',').and_then(|(ready, go)| Some((ready.parse().ok()?, go.parse().ok()?)));
        let (ready, go) = numbers.ok_or_else(|| format!("{text} is no pair of descriptors"))?;
        Ok(Self { ready, go })
    }
}

impl Agreement {
    /// From now on, they are not inherited.
    pub(crate) fn keep_to_itself(self) -> io::Result<()> {
        [self.ready, self.go].into_iter().try_for_each(keep_to_itself)
    }

    /// Says that the program is back, and waits for the others.
    pub(crate) fn reach(self) -> Result<(), CommandError> {
        // SAFETY: opened for this process alone.
        let [mut ready, mut go] = [self.ready, self.go].map(|file| unsafe { File::from_raw_fd(file) });
        let reached = ready.write_all(&[1]).and_then(|()| go.read_exact(&mut [0]));
        reached.map_err(|_| CommandError::new(Exit::Failed, "another copy cannot be loaded"))
    }
}

/// A copy that is being loaded, or runs.
#[derive(Debug)]
pub struct Copy {
    name: String,
    command: Child,
    ready: File,
    go: File,
}

/// Why there are no copies, and the exit code that says so.
#[derive(Debug)]
pub struct NoCopies {
    /// Why.
    pub why: String,
    /// The exit code.
    pub code: i32,
}

impl Copy {
    /// Begins to load it. `load`: the command, to which the descriptors are added.
    pub fn start(name: String, mut load: Command) -> io::Result<Self> {
        let [(ready, says), (hears, go)] = [pipe()?, pipe()?];
        let own = [says.as_raw_fd(), hears.as_raw_fd()];
        load.args(["--is-copy", &format!("{},{}", own[0], own[1])]);
        inherit(&mut load, &own);
        Ok(Self { name, command: load.spawn()?, ready, go })
    }
}

/// Copies that are being loaded. If this is dropped, nothing is left of them.
#[derive(Debug, Default)]
pub struct Copies(Vec<Copy>);

impl Copies {
    /// Adds one.
    pub fn add(&mut self, copy: Copy) {
        self.0.push(copy);
    }

    /// Waits until all programs are back, and lets them go on. [`init::hold_signals`](crate::init::hold_signals) must have been called before.
    pub fn let_go(mut self) -> Result<Running, NoCopies> {
        let no_watch = |error: io::Error| NoCopies { why: format!("cannot wait for the copies: {error}"), code: Exit::Failed as i32 };
        let mut signals = ends().map_err(no_watch)?;
        let mut waiting: Vec<_> = (0..self.0.len()).collect();
        while !waiting.is_empty() {
            let files = [signals.as_raw_fd()].into_iter().chain(waiting.iter().map(|at| self.0[*at].ready.as_raw_fd()));
            let mut files: Vec<_> = files.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }).collect();
            // SAFETY: so many structures, writable.
            unsafe { libc::poll(files.as_mut_ptr(), files.len() as libc::nfds_t, -1) };
            if files[0].revents != 0 {
                let signal = next_signal(&mut signals).map_err(no_watch)?;
                return Err(NoCopies { why: "interrupted: no copy is left".into(), code: 128 + signal });
            }
            let has_news: Vec<_> = waiting.iter().zip(&files[1..]).filter(|(_, file)| file.revents != 0).map(|(at, _)| *at).collect();
            for at in has_news {
                let copy = &mut self.0[at];
                if copy.ready.read_exact(&mut [0]).is_err() {
                    let code = copy.command.wait().ok().and_then(|ended| ended.code()).filter(|code| *code != 0);
                    let why = format!("{} cannot be loaded; no copy is left", copy.name);
                    return Err(NoCopies { why, code: code.unwrap_or(Exit::Failed as i32) });
                }
                waiting.retain(|other| *other != at);
            }
        }
        let all = mem::take(&mut self.0).into_iter().map(|mut copy| {
            // One that nobody hears has ended meanwhile.
            let _ = copy.go.write_all(&[1]);
            (copy.name, copy.command.id().cast_signed())
        });
        Ok(Running(all.collect()))
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        for copy in &mut self.0 {
            let _ = copy.command.kill();
        }
        for copy in &mut self.0 {
            let _ = copy.command.wait();
        }
    }
}

/// Copies that run, each with its command's id.
#[derive(Debug)]
pub struct Running(Vec<(String, libc::pid_t)>);

impl Running {
    /// Waits for the ends of all, and passes signals on to them meanwhile. Returns the first exit code that tells of a failure. `tell`: of each that has
    /// ended so while others go on.
    pub fn wait(mut self, tell: impl Fn(&str)) -> i32 {
        let (mut code, mut were_told) = (0, false);
        while !self.0.is_empty() {
            let mut status = 0;
            // SAFETY: writable; touches nothing else.
            let ended = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
            if let Some(at) = self.0.iter().position(|(_, command)| *command == ended) {
                let (name, _) = self.0.remove(at);
                let its = if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 128 + libc::WTERMSIG(status) };
                if its != 0 && !were_told && !self.0.is_empty() {
                    tell(&format!("{name} has ended with exit code {its}; the other copies go on"));
                }
                code = if code == 0 { its } else { code };
                continue;
            }
            let mut signal = 0;
            // SAFETY: an initialised set, and a writable number.
            if unsafe { libc::sigwait(&waited_for(), &raw mut signal) } == 0 && signal != libc::SIGCHLD {
                were_told = true;
                for (_, command) in &self.0 {
                    // SAFETY: touches no memory.
                    unsafe { libc::kill(*command, signal) };
                }
            }
        }
        code
    }
}
