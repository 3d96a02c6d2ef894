//! What programs print that `vramctl run --detach` has started: a file for each name, and the one before it.
//!
//! The program has the file locked as long as anything of it can print there: nothing else has to be kept, and nothing is left of a program that
//! was killed.

use std::env;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use vramctl_config::socket_directory;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::text;
use vramctl_host::file_lock::{Sharing, lock_within, try_lock};

/// How the names of the files end.
const ENDING: &str = ".log";

/// The log of a program that starts.
pub struct Log(File);

impl Log {
    /// Makes the file, and keeps the one of the last program of this name.
    pub fn create(name: &str) -> Result<Self, CommandError> {
        /// Whoever looks whether the program has ended has it locked for a moment.
        const LOCK_WITHIN: Duration = Duration::from_millis(200);
        let path = path_of(name);
        let failed = |error: io::Error| CommandError::new(Exit::Failed, format!("the log {} cannot be written: {error}", path.display()));
        DirBuilder::new().mode(0o700).recursive(true).create(folder()).map_err(failed)?;
        let open = |options: &mut OpenOptions| options.append(true).mode(0o600).custom_flags(libc::O_NOFOLLOW).open(&path);
        let lock = |file: &File| lock_within(file, Sharing::Exclusive, Instant::now() + LOCK_WITHIN, LOCK_WITHIN / 20);
        let last = open(OpenOptions::new().create(true)).map_err(failed)?;
        if !lock(&last).map_err(failed)? {
            let name = text::one_line(name);
            let text = format!("{name} runs in the background already: `vramctl stop {name}` ends it, and --name gives another name");
            return Err(CommandError::new(Exit::Failed, text));
        }
        if last.metadata().map_err(failed)?.len() == 0 {
            return Ok(Self(last));
        }
        fs::rename(&path, path.with_extension("log.1")).map_err(failed)?;
        let new = open(OpenOptions::new().create_new(true)).map_err(failed)?;
        lock(&new).map_err(failed)?;
        Ok(Self(new))
    }

    /// Starts a program that prints there, in a session of its own. Returns its id.
    pub fn start(self, command: &mut Command) -> io::Result<u32> {
        command.stdin(Stdio::null()).stdout(self.0.try_clone()?).stderr(self.0);
        // SAFETY: only a call that is safe after a fork.
        unsafe { command.pre_exec(|| if libc::setsid() < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }) };
        command.spawn().map(|child| child.id())
    }
}

/// Opens the log of this name.
pub fn open(name: &str) -> io::Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path_of(name))?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::ErrorKind::InvalidInput.into()) }
}

/// Whether anything of the program can still print there. In doubt, it can.
pub fn is_written(file: &File) -> bool {
    !try_lock(file, Sharing::Shared).is_ok_and(|is_free| {
        // SAFETY: an open file; touches no memory.
        is_free && unsafe { libc::flock(std::os::fd::AsRawFd::as_raw_fd(file), libc::LOCK_UN) } == 0
    })
}

/// The names of the logs that there are, in order.
pub fn names() -> Vec<String> {
    let entries = fs::read_dir(folder()).into_iter().flatten().flatten();
    let name = |entry: fs::DirEntry| decoded(entry.file_name().to_str()?.strip_suffix(ENDING)?);
    let mut names: Vec<_> = entries.filter_map(name).collect();
    names.sort();
    names
}

/// Where the log of a program of this name is.
pub fn path_of(name: &str) -> PathBuf {
    folder().join(encoded(name) + ENDING)
}

/// Beside the sockets if their place was chosen, else where the user's programs keep such files.
fn folder() -> PathBuf {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let chosen = set("VRAMCTL_DIR").map(|_| socket_directory().to_owned());
    let usual = || Some(set("XDG_STATE_HOME").or_else(|| Some(set("HOME")?.join(".local/state")))?.join("vramctl"));
    let absolute = |path: &Path| path.is_absolute();
    chosen.or_else(usual).filter(|path| absolute(path)).unwrap_or_else(|| socket_directory().to_owned()).join("logs")
}

/// The name as a file's name.
fn encoded(name: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.+@".contains(&byte);
    let letter = |(at, byte): (usize, u8)| {
        if is_plain(byte) && !(at == 0 && byte == b'.') { char::from(byte).to_string() } else { format!("%{byte:02X}") }
    };
    name.bytes().enumerate().map(letter).collect()
}

fn decoded(file: &str) -> Option<String> {
    let (mut bytes, mut rest) = (Vec::new(), file.as_bytes());
    while let [first, more @ ..] = rest {
        let (byte, after) = match (first, more) {
            (b'%', [high, low, after @ ..]) => (u8::from_str_radix(std::str::from_utf8(&[*high, *low]).ok()?, 16).ok()?, after),
            _ => (*first, more),
        };
        bytes.push(byte);
        rest = after;
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A name may have anything in it but control characters.
    #[test]
    fn each_name_has_a_file_of_its_own() {
        for (name, file) in [("engine", "engine"), ("my engine", "my%20engine"), ("../a", "%2E.%2Fa"), ("50%", "50%25"), ("kü", "k%C3%BC")]
        {
            assert_eq!(encoded(name), file);
            assert_eq!(decoded(file).as_deref(), Some(name));
        }
    }
}
