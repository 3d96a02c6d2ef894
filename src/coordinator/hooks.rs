//! Commands that programs ask for around their pauses (`vramctl run --on-pause`, `--on-resume`): whoever pauses or resumes a program runs them.
//!
//! A program is its user's, and so is what it asks for: if root pauses another user's program, the command runs as that user, who is the owner of
//! the directory in which the program listens. What a process says of itself proves nothing.

use crate::account::Account;
use crate::failure::CommandError;
use crate::parallel;
use crate::patience::{HOOK_WITHIN, LOOK_AT_HOOK_EVERY};
use crate::processes::{Found, Process};
use crate::text::one_line;
use std::collections::BTreeSet;
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};
use vramctl_host::system::user;
use vramctl_model::Error;

/// A command of a program.
#[derive(Debug)]
pub struct Hook {
    when: When,
    command: String,
    /// For messages and for the command.
    process: Process,
    /// Whose it is.
    owner: u32,
}

/// When it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    BeforePause,
    AfterResume,
}

impl When {
    fn option(self) -> &'static str {
        match self {
            Self::BeforePause => "on-pause",
            Self::AfterResume => "on-resume",
        }
    }
}

impl Hook {
    /// What to run before these leave. What is paused already is not paused again.
    pub fn before(found: &Found, leaving: impl Iterator<Item = u32>) -> Vec<Self> {
        Self::of(found, leaving, When::BeforePause, |process| process.active_bytes() > 0)
    }

    /// What to run for those that have come back.
    pub fn after(found: &Found, back: impl Iterator<Item = u32>) -> Vec<Self> {
        Self::of(found, back, When::AfterResume, |_| true)
    }

    /// What to run for those that were told of a pause that was not to be.
    pub fn after_nothing(found: &Found, stayed: impl Iterator<Item = u32>) -> Vec<Self> {
        let was_told = |process: &Process| process.status.as_ref().is_ok_and(|status| status.process.on_pause.is_some());
        Self::of(found, stayed, When::AfterResume, |process| process.active_bytes() > 0 && was_told(process))
    }

    /// Each command once, although all processes of a job ask for it.
    fn of(found: &Found, pids: impl Iterator<Item = u32>, when: When, is_due: impl Fn(&Process) -> bool) -> Vec<Self> {
        let mut known = BTreeSet::new();
        let mut hooks = Vec::new();
        for pid in pids {
            let Some(process) = found.processes.iter().find(|process| process.pid == pid).filter(|process| is_due(process)) else {
                continue;
            };
            let Ok(status) = &process.status else { continue };
            let command = match when {
                When::BeforePause => &status.process.on_pause,
                When::AfterResume => &status.process.on_resume,
            };
            let (Some(command), Ok(directory)) = (command, found.directory(pid)) else { continue };
            if known.insert((process.job_or_itself(), command.clone())) {
                hooks.push(Self { when, command: command.clone(), process: process.clone(), owner: directory.owner() });
            }
        }
        hooks
    }

    /// Runs them one after the other. The first that fails ends it: whoever is about to be paused is not ready.
    pub fn run_all(hooks: &[Self]) -> Result<(), CommandError> {
        hooks.iter().try_for_each(|hook| {
            hook.run(HOOK_WITHIN).map_err(|why| {
                let text = format!("{}: the command of --{} {why}: {}", hook.process, hook.when.option(), one_line(&hook.command));
                CommandError::from(&Error::Aborted(String::new())).saying(text)
            })
        })
    }

    fn run(&self, within: Duration) -> Result<(), String> {
        let mut command = self.prepare()?;
        let mut child = command.spawn().map_err(|error| format!("cannot be started ({error})"))?;
        let (said, hear) = mpsc::channel();
        if let Some(stderr) = child.stderr.take() {
            // Never joined: what the command has left behind may have the pipe.
            let _ = parallel::spawn(move || said.send(beginning(stderr)));
        }
        let status = wait(&mut child, within).map_err(|error| format!("cannot be waited for ({error})"))?;
        let text = || hear.recv_timeout(LOOK_AT_HOOK_EVERY * 10).unwrap_or_default();
        match status {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(match text().trim() {
                "" => format!("failed ({status})"),
                text => format!("failed ({status}: {})", one_line(text)),
            }),
            None => Err(format!("took longer than {} s and was killed", within.as_secs())),
        }
    }

    fn prepare(&self) -> Result<Command, String> {
        let mut command = Command::new("/bin/sh");
        command.arg("-c").arg(&self.command).current_dir("/").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        if self.owner != user() {
            let account = Account::of(self.owner).ok_or_else(|| format!("is not run: user {} is not known here", self.owner))?;
            command.env_clear().env("PATH", "/usr/local/bin:/usr/bin:/bin").env("HOME", account.home);
            command.env("USER", &account.name).env("LOGNAME", account.name);
            // In this order, and without other groups.
            command.gid(account.group).uid(account.user);
        }
        // The command is none of the programs.
        command.env_remove("LD_PRELOAD");
        command.env("VRAMCTL_HOOK", self.when.option()).env("VRAMCTL_HOOK_PID", self.process.pid.to_string());
        command.env("VRAMCTL_HOOK_NAME", self.process.name().unwrap_or_default());
        // SAFETY: only a call that is safe after a fork.
        unsafe {
            // Without the caller's terminal, and to be killed with all that it has started.
            command.pre_exec(|| if libc::setsid() < 0 { Err(io::Error::last_os_error()) } else { Ok(()) });
        }
        Ok(command)
    }
}

/// Waits for the end of a child, and kills its session after this time. `None`: it was killed.
fn wait(child: &mut Child, within: Duration) -> io::Result<Option<ExitStatus>> {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if begun.elapsed() >= within {
            // SAFETY: touches no memory. The child has not been waited for, so its id is its own.
            unsafe { libc::kill(-child.id().cast_signed(), libc::SIGKILL) };
            return child.wait().map(|_| None);
        }
        thread::sleep(LOOK_AT_HOOK_EVERY);
    }
}

/// The beginning of what it says. The rest is read, too: a full pipe would stop it.
fn beginning(mut from: impl Read) -> String {
    const SHOWN: u64 = 400;
    let mut text = Vec::new();
    let _ = from.by_ref().take(SHOWN).read_to_end(&mut text);
    let _ = io::copy(&mut from, &mut io::sink());
    String::from_utf8_lossy(&text).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::made_up::process;

    fn hook(command: &str) -> Hook {
        Hook { when: When::BeforePause, command: command.into(), process: process(7, "engine", &[]), owner: user() }
    }

    #[test]
    fn a_command_that_fails_is_quoted_with_its_reason() {
        let refusal = |command: &str| Hook::run_all(&[hook(command)]).map_err(|failure| failure.to_string());
        assert_eq!(refusal("exit 0"), Ok(()));
        assert_eq!(
            refusal("echo draining failed >&2; exit 3").unwrap_err(),
            "engine (pid 7): the command of --on-pause failed (exit status: 3: draining failed): echo draining failed >&2; exit 3"
        );
        assert!(refusal("exit 1").unwrap_err().contains("failed (exit status: 1): exit 1"));
    }

    #[test]
    fn a_command_knows_the_program_and_nothing_of_the_library() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("said");
        hook(&format!("echo \"$VRAMCTL_HOOK $VRAMCTL_HOOK_NAME $VRAMCTL_HOOK_PID $LD_PRELOAD $PWD\" > {}", file.display()))
            .run(HOOK_WITHIN)
            .unwrap();
        assert_eq!(std::fs::read_to_string(file).unwrap(), "on-pause engine 7  /\n");
    }

    /// What it has started is killed with it, and whoever waits does not wait for that.
    #[test]
    fn a_command_that_takes_too_long_is_killed_with_its_children() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("child");
        // A busy machine may take longer to start its child.
        let killed_within = |ms: u64| -> Option<u32> {
            let late = hook(&format!("sleep 1000 & echo $! > {}; wait", file.display())).run(Duration::from_millis(ms)).unwrap_err();
            assert_eq!(late, format!("took longer than {} s and was killed", ms / 1000));
            std::fs::read_to_string(&file).ok()?.trim().parse().ok()
        };
        let child = [300, 3000, 30_000].into_iter().find_map(killed_within).unwrap();
        while !crate::proc::has_ended(child) {
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// A pipe that is full would stop it.
    #[test]
    fn a_command_may_say_much() {
        let text = Hook::run_all(&[hook("head -c 1000000 /dev/zero | tr '\\0' x >&2; exit 1")]).unwrap_err().to_string();
        assert!(text.contains("failed (exit status: 1: xxxx") && text.len() < 1000, "{text}");
    }
}
