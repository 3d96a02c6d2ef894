//! The names of sockets, and the pids of the processes that listen there.
//!
//! A process has a pid in each PID namespace from which it can be seen. The one in its own namespace is in the name of its socket, and is
//! what it calls itself and others. Users mean the one that they see.

use crate::absence::{Absence, Absent, Found};
use std::collections::BTreeMap;
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
pub(crate) fn namespace_of(folder: &Path) -> Option<u64> {
    fs::metadata(folder.join("ns/pid")).ok().map(|namespace| namespace.ino())
}

/// The pid of a process in its own namespace.
fn pid_within(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("NSpid:"))?.split_whitespace().last()?.parse().ok()
}

/// More than a pid can be.
const HIDDEN: u32 = 10_000_000;
/// Added to the pid here of a process that another one, of another namespace, has no pid for: above all numbers of hidden ones.
const HERE: u32 = 1 << 30;
/// How many processes that cannot be seen may have the same pid.
const MOST_NAMESAKES: u32 = 50;

/// The pid in its own namespace of a process that cannot be seen from here, from the number that it has here instead.
pub fn hidden(pid: u32) -> Option<u32> {
    (1..=MOST_NAMESAKES).contains(&(pid / HIDDEN)).then_some(pid % HIDDEN)
}

/// Processes that listen.
#[derive(Debug, Default)]
pub struct Listeners {
    found: BTreeMap<u32, Listed>,
    /// Those that live and do not listen.
    absent: Vec<Absent>,
}

#[derive(Debug)]
struct Listed {
    address: Address,
    /// The inode of its PID namespace. `None` if that cannot be known.
    namespace: Option<u64>,
    is_of_our_namespace: bool,
}

impl Listeners {
    /// By their pids here, `None` for those that cannot be seen, and their addresses.
    /// `alive`: those known to live. `marked`: those that are said not to listen.
    pub(crate) fn of(mut listening: Vec<(Option<u32>, Address)>, alive: Vec<Address>, marked: Vec<Found>) -> Self {
        listening.sort_by(|(_, one), (_, other)| one.cmp(other));
        let (mut known, mut unseen) = (Self::default(), Vec::new());
        for (here, address) in listening {
            let Some(here) = here else {
                unseen.push(address);
                continue;
            };
            let is_of_our_namespace = here == address.pid;
            let namespace = address.namespace.or_else(|| if is_of_our_namespace { None } else { namespace_of(&folder_of(here)) });
            known.found.insert(here, Listed { address, namespace, is_of_our_namespace });
        }
        for address in unseen {
            if let Some(number) = known.number_for(&address) {
                known.found.insert(number, Listed { namespace: address.namespace, address, is_of_our_namespace: false });
            }
        }
        let own = namespace_of(own_folder());
        let listens = |known: &Self, address: &Address| known.found.values().any(|listed| listed.may_be(address, own));
        let (mut absent, are_said) = (Vec::new(), marked.iter().map(|found| found.address.clone()).collect::<Vec<_>>());
        for Found { address, seen, name, why } in marked {
            if !listens(&known, &address) {
                absent.push((seen, address, name, why));
            }
        }
        for address in alive.into_iter().filter(|address| !are_said.contains(address) && !listens(&known, address)) {
            // A child that it has forked without the library's knowledge may have its lock.
            let seen = (address.namespace == own).then_some(address.pid);
            if seen.is_none_or(|pid| Path::new(&format!("/proc/{pid}")).exists()) {
                absent.push((seen, address, None, Absence::Deleted));
            }
        }
        for (seen, address, name, why) in absent {
            let pid = seen.or_else(|| known.number_for(&address));
            known.absent.extend(pid.map(|pid| Absent { pid, name, why }));
        }
        known
    }

    /// A number for a process that cannot be seen.
    fn number_for(&self, address: &Address) -> Option<u32> {
        let mut numbers = (1..=MOST_NAMESAKES).map(|nth| nth * HIDDEN + address.pid % HIDDEN);
        numbers.find(|number| !self.found.contains_key(number) && self.absent.iter().all(|absent| absent.pid != *number))
    }

    /// Those that live and do not listen.
    pub fn absent(&self) -> &[Absent] {
        &self.absent
    }

    /// Their pids here.
    pub fn pids(&self) -> Vec<u32> {
        self.found.keys().copied().collect()
    }

    /// Where the process of this pid here listens.
    pub fn address(&self, pid: u32) -> Option<&Address> {
        self.found.get(&pid).map(|listener| &listener.address)
    }

    /// The pid here of the process that another one, of this pid here, calls so.
    pub fn pid_here(&self, pid: u32, of: u32) -> u32 {
        if let Some(here) = pid.checked_sub(HERE) {
            return here;
        }
        let Some(speaker) = self.found.get(&of).filter(|speaker| !speaker.is_of_our_namespace && pid != 0) else { return pid };
        let is_meant = |listener: &Listed| listener.address.pid == pid && speaker.is_beside(listener);
        if is_meant(speaker) {
            return of;
        }
        // One that does not listen cannot be known, and must not pass for one of ours.
        self.found.iter().find(|(_, listener)| is_meant(listener)).map_or(HIDDEN + pid % HIDDEN, |(pid, _)| *pid)
    }

    /// What another process, of this pid here, calls the process of a pid here.
    pub fn pid_there(&self, pid: u32, of: u32) -> u32 {
        match (self.found.get(&of), self.found.get(&pid)) {
            (Some(speaker), Some(meant)) if speaker.is_beside(meant) => meant.address.pid,
            // It only remembers the number.
            (Some(speaker), Some(_)) if !speaker.is_of_our_namespace => HERE + pid,
            _ => pid,
        }
    }
}

impl Listed {
    /// Whether it is the process of this address, as far as can be known. `own`: the PID namespace of this process.
    fn may_be(&self, address: &Address, own: Option<u64>) -> bool {
        let namespace = if self.is_of_our_namespace { own } else { self.namespace };
        self.address.pid == address.pid && (namespace.is_none() || namespace == address.namespace)
    }

    /// Whether both are in the same namespace, as far as can be known.
    fn is_beside(&self, other: &Self) -> bool {
        self.is_of_our_namespace == other.is_of_our_namespace && (self.is_of_our_namespace || self.namespace == other.namespace)
    }
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

    /// A container in which 7 and 8 are what is 107 and 108 here, and another one that cannot be seen.
    #[test]
    fn each_process_gets_the_pids_of_its_own_namespace() {
        let listener = |pid, namespace, ours| Listed { address: Address::plain(pid), namespace, is_of_our_namespace: ours };
        let found = BTreeMap::from([
            (7, listener(7, None, true)),
            (9, listener(9, None, true)),
            (107, listener(7, Some(1), false)),
            (108, listener(8, Some(1), false)),
            (HIDDEN + 7, listener(7, None, false)),
        ]);
        let known = Listeners { found, absent: Vec::new() };
        assert_eq!([7, 9].map(|pid| known.pid_there(pid, 7)), [7, 9]);
        assert_eq!([107, 108].map(|pid| known.pid_there(pid, 107)), [7, 8]);
        assert_eq!([0, 7, 8].map(|pid| known.pid_here(pid, 107)), [0, 107, 108]);
        assert_eq!(known.pid_here(9, 107), HIDDEN + 9, "that is not the 9 here");
        // What is remembered of another namespace's processes comes back as it was told.
        for (pid, of) in [(9, 107), (9, HIDDEN + 7), (108, HIDDEN + 7), (HIDDEN + 7, 107), (107, 9)] {
            assert_eq!(known.pid_here(known.pid_there(pid, of), of), pid);
        }
        assert_eq!(known.pid_there(107, 9), 107, "it sees that one so");
        assert_eq!(known.pid_here(9, 7), 9);
        assert_eq!(known.pid_here(7, HIDDEN + 7), HIDDEN + 7);
        assert_eq!((hidden(HIDDEN + 7), hidden(7)), (Some(7), None));
    }
}
