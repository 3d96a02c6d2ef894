//! The names of sockets, and the pids of the processes that listen there.
//!
//! A process has a pid in each PID namespace from which it can be seen. The one in its own namespace is in the name of its socket, and is
//! what it calls itself and others. Users mean the one that they see.

use std::fmt::{self, Write};
use std::fs;
use std::io;
use std::mem;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process;
use vramctl_config as config;
use vramctl_host::own_program;
use vramctl_host::system::{folder_of, own_folder};

/// Where a process listens: `<pid>.sock`, or `<pid>-<PID namespace>.sock` if a process of another namespace has that name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Address {
    /// In its own namespace.
    pub(crate) pid: u32,
    /// The inode of its namespace, if the name has it.
    pub(crate) namespace: Option<u64>,
}

impl Address {
    /// Without the namespace.
    pub fn plain(pid: u32) -> Self {
        Self { pid, namespace: None }
    }

    /// The addresses that this process may have, the best first.
    pub fn own() -> [Self; 2] {
        Self::beside(process::id())
    }

    /// Those of a process in the namespace of this one.
    pub fn beside(pid: u32) -> [Self; 2] {
        [Self::plain(pid), Self { pid, namespace: namespace_of(own_folder()) }]
    }

    /// The one that a socket's file names.
    pub fn of_file(name: &str) -> Option<Self> {
        Self::parse(name.strip_suffix(".sock")?)
    }

    /// The one of a process of this pid here, with its namespace. `None` if it cannot be seen.
    pub fn distinct(pid: u32) -> Option<Self> {
        Some(Self { pid: pid_within(pid)?, namespace: Some(namespace_of(&folder_of(pid))?) })
    }

    /// The pid here of its process. `own`: the PID namespace of this process.
    pub(crate) fn seen_here(&self, own: Option<u64>) -> Option<u32> {
        if self.namespace == own {
            return Path::new(&format!("/proc/{}", self.pid)).exists().then_some(self.pid);
        }
        let entries = fs::read_dir("/proc").ok()?.flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.into_iter().find(|pid| Self::distinct(*pid).as_ref() == Some(self))
    }

    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (pid, namespace) = match text.split_once('-') {
            Some((pid, namespace)) => (pid, Some(namespace.parse().ok()?)),
            None => (text, None),
        };
        Some(Self { pid: pid.parse().ok()?, namespace })
    }

    /// The socket's file.
    pub fn file(&self) -> String {
        format!("{self}.sock")
    }

    /// The pid here of the process that listens. `None` if it cannot be seen from here.
    pub fn pid_here(&self, stream: &UnixStream) -> Option<u32> {
        let seen = peer(stream).map_or(0, |peer| peer.pid.cast_unsigned());
        if seen == 0 {
            return None;
        }
        // Another process may listen on its behalf.
        Some(if seen == self.pid || pid_within(seen) != Some(self.pid) { self.pid } else { seen })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.namespace {
            None => write!(out, "{}", self.pid),
            Some(namespace) => write!(out, "{}-{namespace}", self.pid),
        }
    }
}

/// The inode of the PID namespace of a process, from its folder in `/proc`.
pub fn namespace_of(folder: &Path) -> Option<u64> {
    fs::metadata(folder.join("ns/pid")).ok().map(|namespace| namespace.ino())
}

/// The pid of a process in its own namespace.
fn pid_within(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("NSpid:"))?.split_whitespace().last()?.parse().ok()
}

/// More than a pid can be.
pub(crate) const HIDDEN: u32 = 10_000_000;
/// How many processes that cannot be seen may have the same pid.
pub(crate) const MOST_NAMESAKES: u32 = 50;

/// The pid in its own namespace of a process that cannot be seen from here, from the number that it has here instead.
pub fn hidden(pid: u32) -> Option<u32> {
    (1..=MOST_NAMESAKES).contains(&(pid / HIDDEN)).then_some(pid % HIDDEN)
}

/// The credentials of the peer. The pid is as seen by this process, 0 if not visible.
pub fn peer(stream: &UnixStream) -> io::Result<libc::ucred> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = mem::size_of_val(&peer) as libc::socklen_t;
    // SAFETY: `peer` is writable for `length` bytes.
    let answer =
        unsafe { libc::getsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut peer).cast(), &raw mut length) };
    if answer == 0 { Ok(peer) } else { Err(io::Error::last_os_error()) }
}

/// What this process's socket is bound to, before it gets the name that clients look for. The kernel keeps it as the socket's address and
/// shows it to clients, also while the process is stopped. So it has the process's name in it.
pub fn unfinished(folder: &Path, name: &ListenerName) -> PathBuf {
    let [_, address] = Address::own();
    let start = format!("{}/{address}.", folder.display());
    let room = mem::size_of::<libc::sockaddr_un>() - mem::offset_of!(libc::sockaddr_un, sun_path) - 1;
    PathBuf::from(format!("{start}{}{UNFINISHED}", name.encoded(room.saturating_sub(start.len() + UNFINISHED.len()))))
}

/// How the name of a socket ends that is not ready.
const UNFINISHED: &str = ".new";

/// The name of a process that does not answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListenerName {
    /// Its `VRAMCTL_NAME`.
    Given(String),
    /// That of its program, when it made its socket.
    Program(String),
}

impl ListenerName {
    /// That of this process.
    pub fn own() -> Self {
        config::own_name().map_or_else(|| Self::Program(own_program().unwrap_or_default()), Self::Given)
    }

    /// The name in the address of the socket that this is a connection to. `None` if the name is too long.
    pub fn of_listener(stream: &UnixStream) -> Option<Self> {
        let address = stream.peer_addr().ok()?;
        let file = address.as_pathname()?.file_name()?.to_str()?;
        let (address, encoded) = file.strip_suffix(UNFINISHED)?.split_once('.')?;
        Address::parse(address)?;
        Self::decoded(encoded)
    }

    /// As part of a file's name. Empty if it does not fit.
    fn encoded(&self, room: usize) -> String {
        let (kind, name) = match self {
            Self::Given(name) => ('+', name),
            Self::Program(name) => ('-', name),
        };
        let mut text = String::from(kind);
        for char in name.chars() {
            let _ = if matches!(char, '/' | '%' | '\0') { write!(text, "%{:02x}", char as u32) } else { text.write_char(char) };
        }
        if text.len() <= room { text } else { String::new() }
    }

    fn decoded(text: &str) -> Option<Self> {
        let (kind, mut rest) = text.split_at_checked(1)?;
        let mut name = String::new();
        while let Some((plain, code)) = rest.split_once('%') {
            let (code, after) = code.split_at_checked(2)?;
            name.push_str(plain);
            name.push(u8::from_str_radix(code, 16).ok()?.into());
            rest = after;
        }
        name.push_str(rest);
        match kind {
            "+" => Some(Self::Given(name)),
            "-" => Some(Self::Program(name)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    #[cfg_attr(miri, ignore = "Unix sockets")]
    fn a_process_that_never_answers_has_its_name_in_its_address() {
        let folder = tempfile::tempdir().unwrap();
        let long = "x".repeat(60);
        for name in ["engine", "a/b %41 ü", "%", "", "...new", &long] {
            for name in [ListenerName::Given(name.into()), ListenerName::Program(name.into())] {
                let path = unfinished(folder.path(), &name);
                let _listener = UnixListener::bind(&path).unwrap();
                assert_eq!(ListenerName::of_listener(&UnixStream::connect(&path).unwrap()), Some(name));
            }
        }
        let unknown = unfinished(folder.path(), &ListenerName::Given("x".repeat(200)));
        for path in [unknown, folder.path().join("7.new"), folder.path().join("7.sock"), folder.path().join("7.+%4.new")] {
            let _listener = UnixListener::bind(&path).unwrap();
            assert_eq!(ListenerName::of_listener(&UnixStream::connect(&path).unwrap()), None, "{path:?}");
        }
    }

    #[test]
    fn a_file_names_an_address_or_none() {
        for (name, address) in [("7.sock", Some((7, None))), ("7-4026531836.sock", Some((7, Some(4_026_531_836))))] {
            let parsed = Address::of_file(name);
            assert_eq!(parsed.as_ref().map(|its| (its.pid, its.namespace)), address);
            assert_eq!(parsed.unwrap().file(), name);
        }
        for name in ["x.sock", "-1.sock", "7-.sock", "7-x.sock", "7.new", "7", "7-1-2.sock", ".sock"] {
            assert_eq!(Address::of_file(name), None, "{name}");
        }
    }
}
