//! CRIU: finding it, and running it.

use crate::namespace;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use vramctl_coordinator::failure::{CommandError, Exit};

/// The oldest version that dumps on current kernels, and passes what is asked of it here.
const OLDEST: (u32, u32) = (4, 1);

/// The program.
#[derive(Debug, Clone)]
pub struct Criu {
    program: PathBuf,
    version: String,
}

/// The log in the working folder.
const LOG: &str = "log";

/// What both directions need: nothing of the user's own settings, no plugin (CRIU's for CUDA would checkpoint and restore by itself), no cgroups.
const ALWAYS: [&str; 5] = ["--no-default-config", "--manage-cgroups=ignore", "--file-locks", "--shell-job", "-v4"];

/// The largest file without a name that is in an image, such as shared memory that was unlinked. By itself, CRIU takes 1 MiB of it.
const LARGEST_UNNAMED: &str = "4095M";

fn missing(why: &str) -> CommandError {
    let text = format!("images need CRIU {}.{} or later: {why}. Install it, or set VRAMCTL_CRIU to it", OLDEST.0, OLDEST.1);
    CommandError::new(Exit::Failed, text)
}

impl Criu {
    /// Finds it: `VRAMCTL_CRIU`, else on the `PATH`.
    pub fn find() -> Result<Self, CommandError> {
        let named = std::env::var_os("VRAMCTL_CRIU").filter(|name| !name.is_empty()).map(PathBuf::from);
        let program = named.unwrap_or_else(|| "criu".into());
        let asked = Command::new(&program).arg("--version").env_remove("LD_PRELOAD").stdin(Stdio::null()).output();
        let said = asked.map_err(|error| missing(&format!("{}: {error}", program.display())))?;
        let text = String::from_utf8_lossy(&said.stdout).into_owned();
        let version = text.lines().find_map(|line| line.strip_prefix("Version:")).map(str::trim).unwrap_or_default();
        match number(version) {
            Some(number) if number >= OLDEST => Ok(Self { program, version: version.to_owned() }),
            Some(_) => Err(missing(&format!("{} is {version}", program.display()))),
            None => Err(missing(&format!("{} does not say its version", program.display()))),
        }
    }

    /// Its version.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The program.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Fails if it says that it cannot work here.
    pub fn check(&self) -> Result<(), CommandError> {
        let checked = self.command().arg("check").stdin(Stdio::null()).output();
        let checked = checked.map_err(|error| CommandError::new(Exit::Failed, format!("{}: {error}", self.program.display())))?;
        if checked.status.success() {
            return Ok(());
        }
        let said = [checked.stdout, checked.stderr].concat();
        let text = format!("`{} check` fails: {}", self.program.display(), String::from_utf8_lossy(&said).trim());
        Err(CommandError::new(Exit::Failed, text))
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.env_remove("LD_PRELOAD");
        command
    }

    /// Writes a process, and leaves it stopped. `kept`: stay open in CRIU as long as it runs.
    pub fn dump(&self, pid: u32, images: BorrowedFd<'_>, work: BorrowedFd<'_>, more: &[String], kept: &[RawFd]) -> io::Result<ExitStatus> {
        let mut command = self.command();
        let there = namespace::pid_there(pid).ok_or(io::ErrorKind::NotFound)?;
        command.args(["dump", "--leave-stopped", "--link-remap", "--ghost-limit", LARGEST_UNNAMED, "-o", LOG, "-t", &there.to_string()]);
        command.args(ALWAYS).args(more).stdin(Stdio::null());
        in_folders(&mut command, images, work);
        inherit(&mut command, kept);
        namespace::spawn_beside(pid, &mut command)?.wait()
    }

    /// The command that brings a process back, as a child of the one that runs it.
    pub fn restore(&self, images: BorrowedFd<'_>, work: BorrowedFd<'_>, more: &[String]) -> Command {
        let mut command = self.command();
        command.args(["restore", "--restore-detached", "-o", LOG]).args(ALWAYS).args(more);
        in_folders(&mut command, images, work);
        command
    }
}

/// By descriptors, which lead there from another mount namespace, too. `work`: gets the log, and has no plugin in it.
fn in_folders(command: &mut Command, images: BorrowedFd<'_>, work: BorrowedFd<'_>) {
    let path = |folder: BorrowedFd<'_>| format!("/proc/self/fd/{}", folder.as_raw_fd());
    command.args(["-D", &path(images), "-W", &path(work), "--libdir", &path(work)]);
    inherit(command, &[images.as_raw_fd(), work.as_raw_fd()]);
}

/// Keeps descriptors open in the program that the command starts.
pub fn inherit(command: &mut Command, files: &[RawFd]) {
    let files = files.to_vec();
    let keep = move || {
        for file in &files {
            // SAFETY: touches no memory.
            if unsafe { libc::fcntl(*file, libc::F_SETFD, 0) } != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: the closure only makes system calls, and allocates nothing.
    unsafe { command.pre_exec(keep) };
}

/// Has a descriptor that was inherited go no further.
pub fn keep_to_itself(file: RawFd) -> io::Result<()> {
    // SAFETY: touches no memory.
    if unsafe { libc::fcntl(file, libc::F_SETFD, libc::FD_CLOEXEC) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn number(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split(['.', '-']);
    Some((parts.next()?.parse().ok()?, parts.next().unwrap_or("0").parse().ok()?))
}

/// What the log in a working folder says of a failure.
pub fn errors_in(work: &Path) -> String {
    let text = fs::read_to_string(work.join(LOG)).unwrap_or_default();
    let harmless = |line: &str| line.contains("Can't setup RLIMIT_NOFILE");
    let errors: Vec<_> = text.lines().filter(|line| line.contains("Error (") && !harmless(line)).take(4).collect();
    if errors.is_empty() { "it does not say why".into() } else { errors.join("; ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_their_numbers() {
        assert_eq!(["4.2.1", "4.1", "3.17.1", "4", "10.0-rc1"].map(number), [(4, 2), (4, 1), (3, 17), (4, 0), (10, 0)].map(Some));
        assert_eq!(number("none"), None);
    }
}
