//! What the processes of a program have that can, or cannot, be written to a disk: looked at before anything changes.

use crate::details::Lock;
use crate::surroundings;
use crate::tree::{is_of_driver, named};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use vramctl_coordinator::proc;
use vramctl_store::{FilePolicy, OpenFile, Process};

/// What has been seen of a program.
#[derive(Debug, Default)]
pub struct Look {
    /// What prevents an image, each with what to do about it.
    pub obstacles: Vec<String>,
    /// The standard streams of the first process that lead to a terminal, a file, or a process outside.
    pub streams: [Option<Stream>; 3],
    /// Whether it has connections, to itself or to outside.
    pub has_connections: bool,
    /// Those to outside.
    pub outside: Vec<Outside>,
    /// The addresses at which it listens, each with its process.
    pub listeners: BTreeSet<(u32, SocketAddr)>,
    /// The files that it goes on with.
    pub files: Vec<OpenFile>,
    /// Those of them that it writes at any place.
    pub written: BTreeSet<PathBuf>,
    /// The folders that it has open or works in.
    pub folders: BTreeSet<PathBuf>,
    /// The locks on them.
    pub locks: Vec<Lock>,
    /// The descriptors that are replaced, each with its process.
    pub replaced: BTreeSet<(u32, u32)>,
}

/// A connection to outside.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Outside {
    /// The process that has it. Others may have it, too.
    pub pid: u32,
    /// The socket.
    pub inode: u64,
    /// The address here.
    pub local: String,
    /// The address there.
    pub remote: String,
}

/// A connection, with both addresses as the kernel writes them.
#[derive(Debug)]
struct Connection {
    pid: u32,
    inode: u64,
    own: String,
    other: String,
}

/// A standard stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stream {
    /// What CRIU calls it when it is replaced.
    pub name: String,
    /// What CRIU has to be told of it when it is saved.
    pub external: Option<String>,
}

/// An open file.
#[derive(Debug, Clone)]
struct Open {
    number: u32,
    /// Where `/proc` says that it leads.
    text: String,
    metadata: Option<fs::Metadata>,
    is_queue: bool,
    /// The id of its mount.
    mount: u64,
    /// Whether it is read, written, or both.
    access: libc::c_int,
    /// Whether each write goes to its end.
    appends: bool,
    /// What is locked by it.
    locks: Vec<Lock>,
}

impl Look {
    /// Has the program get its own copies of these of its files. Nobody else locks those.
    pub fn copy(&mut self, paths: &BTreeSet<PathBuf>) {
        for file in self.files.iter_mut().filter(|file| paths.contains(Path::new(&file.path))) {
            file.policy = FilePolicy::Copy;
        }
        self.locks.retain(|lock| !paths.contains(&lock.path));
    }
}

impl Open {
    /// Whether it is a folder that has its name still.
    fn is_folder(&self) -> bool {
        self.metadata.as_ref().is_some_and(|metadata| metadata.is_dir() && metadata.nlink() > 0)
    }

    /// What becomes of it, if it is a plain file.
    fn policy(&self) -> FilePolicy {
        match (self.access, self.appends) {
            (libc::O_RDONLY, _) => FilePolicy::Read,
            (_, true) => FilePolicy::Append,
            (_, false) => FilePolicy::Refuse,
        }
    }
}

/// Looks at processes that are saved together, the first one first. `with_driver`: they may have files of the driver open, as before their checkpoint.
pub fn look(pids: &[u32], with_driver: bool) -> io::Result<Look> {
    let mut look = Look::default();
    let of_all = pids.iter().map(|pid| Ok((*pid, unless_ended(*pid, open_files(*pid))?))).collect::<io::Result<Vec<_>>>()?;
    let inside = pipes_inside(of_all.iter().flat_map(|(_, files)| files));
    let is_inside = |file: &Open| numbered(&file.text, "pipe").is_some_and(|inode| inside.contains(&inode));
    for file in of_all.first().into_iter().flat_map(|(_, files)| files).filter(|file| !is_inside(file)) {
        if let Some(stream) = look.streams.get_mut(file.number as usize) {
            *stream = stream_of(file);
        }
    }
    let replaced: BTreeSet<_> = look.streams.iter().flatten().map(|stream| stream.name.clone()).collect();
    let mut connections = Vec::new();
    for (pid, files) in &of_all {
        let who = if pids.len() == 1 { String::new() } else { format!("{}: ", named(*pid)) };
        let own: Vec<_> = files.iter().filter(|file| !stream_of(file).is_some_and(|stream| replaced.contains(&stream.name))).collect();
        let plain = own.iter().filter_map(|file| Some((PathBuf::from(&file.text), file.metadata.clone()?, file.policy())));
        let listed = unless_ended(*pid, surroundings::files(*pid, plain.clone()))?;
        let names_written = plain.filter(|(.., policy)| *policy == FilePolicy::Refuse).map(|(path, ..)| path);
        let names_written: BTreeSet<_> = names_written.chain(unless_ended(*pid, surroundings::mapped_to_write(*pid))?).collect();
        look.written.extend(listed.iter().map(|file| PathBuf::from(&file.path)).filter(|path| names_written.contains(path)));
        look.files.extend(listed);
        look.folders.extend(own.iter().filter(|file| file.is_folder()).map(|file| PathBuf::from(&file.text)));
        look.folders
            .extend(fs::read_link(format!("/proc/{pid}/cwd")).ok().filter(|path| !path.as_os_str().as_bytes().ends_with(b" (deleted)")));
        look.replaced
            .extend(files.iter().map(|file| (*pid, file.number)).filter(|(_, number)| own.iter().all(|file| file.number != *number)));
        for file in own {
            look.locks.extend(file.locks.iter().cloned());
            let what = obstacle(pids, file, with_driver);
            look.obstacles.extend(what.map(|what| format!("{who}descriptor {}: {what}", file.number)));
        }
        let sockets: BTreeSet<u64> = files.iter().filter_map(|file| numbered(&file.text, "socket")).collect();
        connections.extend(connections_of(*pid, &sockets));
        look.listeners.extend(listeners_of(*pid, &sockets).into_iter().map(|address| (*pid, address)));
        if session(&unless_ended(*pid, fs::read_to_string(format!("/proc/{pid}/stat")))?) == Some(0) {
            let why = "a session whose leader is outside of this container, where CRIU cannot see it: start the program with `vramctl run --image`, or with setsid";
            look.obstacles.push(format!("{who}{why}"));
        }
    }
    // The strictest of each is first.
    look.files.sort_by(|one, other| (&one.path, one.policy as u8).cmp(&(&other.path, other.policy as u8)));
    look.files.dedup_by(|next, first| next.path == first.path);
    look.has_connections = !connections.is_empty();
    let leads_inside = |one: &Connection| connections.iter().any(|its| is_same(&its.own, &one.other) && is_same(&its.other, &one.own));
    let outside = connections.iter().filter(|connection| !leads_inside(connection));
    look.outside =
        outside.map(|one| Outside { pid: one.pid, inode: one.inode, local: address(&one.own), remote: address(&one.other) }).collect();
    // One that several processes have inherited.
    look.outside.dedup_by_key(|connection| connection.inode);
    Ok(look)
}

/// What has been read of a process. One that has ended meanwhile has nothing.
fn unless_ended<T: Default>(pid: u32, read: io::Result<T>) -> io::Result<T> {
    read.or_else(|error| if proc::has_ended(pid) { Ok(T::default()) } else { Err(error) })
}

/// The pipes of which both ends are among these.
fn pipes_inside<'a>(files: impl Iterator<Item = &'a Open>) -> BTreeSet<u64> {
    let mut ends = BTreeMap::<u64, [bool; 2]>::new();
    for file in files {
        if let Some(inode) = numbered(&file.text, "pipe") {
            let [reads, writes] = ends.entry(inode).or_default();
            *reads |= file.access != libc::O_WRONLY;
            *writes |= file.access != libc::O_RDONLY;
        }
    }
    ends.into_iter().filter(|(_, ends)| *ends == [true; 2]).map(|(inode, _)| inode).collect()
}

/// The session in a `/proc/PID/stat`: its leader's pid, 0 if that one is outside of the reader's pid namespace.
fn session(stat: &str) -> Option<u32> {
    const AFTER_NAME: usize = 3;
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(AFTER_NAME)?.parse().ok()
}

fn open_files(pid: u32) -> io::Result<Vec<Open>> {
    let folder = format!("/proc/{pid}/fd");
    let mut found = Vec::new();
    if proc::has_ended(pid) {
        return Ok(found);
    }
    for entry in fs::read_dir(&folder)? {
        let entry = entry?;
        let Some(number) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let Ok(text) = fs::read_link(entry.path()) else { continue };
        let text = text.to_string_lossy().into_owned();
        let information = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).unwrap_or_default();
        let field = |name: &str| information.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let metadata = fs::metadata(entry.path()).ok();
        let is_plain = metadata.as_ref().is_some_and(|found| found.is_file() && found.nlink() > 0);
        let locks = information.lines().filter(|_| is_plain).filter_map(|line| lock(&text, line.strip_prefix("lock:")?)).collect();
        let flags = field("flags:").and_then(|flags| libc::c_int::from_str_radix(flags, 8).ok()).unwrap_or_default();
        found.push(Open {
            number,
            text,
            metadata,
            is_queue: is_queue(&entry.path()),
            mount: field("mnt_id:").and_then(|mount| mount.parse().ok()).unwrap_or_default(),
            access: flags & libc::O_ACCMODE,
            appends: flags & libc::O_APPEND != 0,
            locks,
        });
    }
    found.sort_by_key(|file| file.number);
    Ok(found)
}

/// A lock of a file, as the kernel writes it: `1: FLOCK  ADVISORY  WRITE 1774 fd:01:1234 0 EOF`. `None` for one that is waited for.
fn lock(path: &str, text: &str) -> Option<Lock> {
    let [_, kind, _, mode, _, _, start, end] = text.split_whitespace().collect::<Vec<_>>()[..] else { return None };
    let start = start.parse().ok()?;
    let bytes = end.parse::<i64>().map_or(0, |end| end - start + 1);
    Some(Lock { path: path.into(), is_of_file: kind == "FLOCK", is_exclusive: mode == "WRITE", start, bytes })
}

/// Whether it is a POSIX message queue.
fn is_queue(path: &Path) -> bool {
    const MQUEUE_MAGIC: i64 = 0x1980_0202;
    let Ok(name) = std::ffi::CString::new(path.as_os_str().as_bytes()) else { return false };
    let mut found = MaybeUninit::<libc::statfs64>::zeroed();
    // SAFETY: a NUL-terminated name, and writable memory, which is valid as all zeros.
    unsafe { libc::statfs64(name.as_ptr(), found.as_mut_ptr()) == 0 && found.assume_init().f_type == MQUEUE_MAGIC }
}

/// The number in `KIND:[NUMBER]`.
fn numbered(text: &str, kind: &str) -> Option<u64> {
    text.strip_prefix(kind)?.strip_prefix(":[")?.strip_suffix(']')?.parse().ok()
}

/// What it is as a standard stream. `None` for what is the same everywhere, such as `/dev/null`.
fn stream_of(file: &Open) -> Option<Stream> {
    let found = file.metadata.as_ref()?;
    let kind = found.file_type();
    if numbered(&file.text, "pipe").is_some() {
        return Some(Stream { name: file.text.clone(), external: None });
    }
    if let Some(inode) = numbered(&file.text, "socket") {
        return Some(Stream { name: file.text.clone(), external: Some(format!("unix[{inode}]")) });
    }
    if kind.is_char_device() && is_terminal(&file.text) {
        let name = format!("tty[{:x}:{:x}]", found.rdev(), found.dev());
        return Some(Stream { external: Some(name.clone()), name });
    }
    // Of whatever mount namespace, and whatever size.
    let name = format!("file[{:x}:{:x}]", file.mount, found.ino());
    (kind.is_file() && file.number < 3).then(|| Stream { external: Some(name.clone()), name })
}

fn is_terminal(text: &str) -> bool {
    text.starts_with("/dev/pts/") || text.starts_with("/dev/tty") || text == "/dev/console"
}

/// Devices that are the same wherever the program goes on.
const SAME_EVERYWHERE: [&str; 7] = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/ptmx"];

fn obstacle(pids: &[u32], file: &Open, with_driver: bool) -> Option<String> {
    let text = file.text.as_str();
    if let Some(kind) = text.strip_prefix("anon_inode:") {
        return match kind {
            "[io_uring]" => Some(
                "an io_uring; start the program with `vramctl run --image`, or with USE_LIBUV=0 (torch's store) and UV_USE_IO_URING=0"
                    .into(),
            ),
            "[userfaultfd]" => Some("a userfaultfd, which CRIU does not save".into()),
            "[perf_event]" | "bpf-map" | "bpf-prog" | "bpf_link" => Some(format!("{kind}: a profiler or tracer; detach it")),
            _ if kind.starts_with("kvm") => Some("a virtual machine".into()),
            _ => None,
        };
    }
    if file.is_queue {
        return Some("a POSIX message queue; have it closed".into());
    }
    if let Some(inode) = numbered(text, "pipe") {
        return other_end(pids, inode).map(|other| format!("a pipe to {other}; have it closed, or start the program without it"));
    }
    // The kernel has taken it from its name in all namespaces.
    if text == "/" && file.metadata.as_ref().is_some_and(fs::Metadata::is_file) {
        return Some("the program's own copy of a file that was removed or replaced since its load; have it closed".into());
    }
    let is_device = file.metadata.as_ref().is_some_and(|found| found.file_type().is_char_device() || found.file_type().is_block_device());
    if !is_device {
        return None;
    }
    if SAME_EVERYWHERE.contains(&text) || text.starts_with("/dev/pts/") {
        return None;
    }
    if is_of_driver(text) {
        let why = "a file of the GPU driver that its checkpoint leaves open, such as one that was inherited from a process that has ended";
        return (!with_driver).then(|| format!("{text}: {why}"));
    }
    Some(format!("{text}, a device; have it closed"))
}

/// Who else has this pipe.
fn other_end(pids: &[u32], inode: u64) -> Option<String> {
    let text = format!("pipe:[{inode}]");
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let others = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok()).filter(|other| !pids.contains(other));
    others
        .filter(|other| {
            let files = fs::read_dir(format!("/proc/{other}/fd")).into_iter().flatten().flatten();
            files.filter_map(|file| fs::read_link(file.path()).ok()).any(|link| link.as_os_str() == text.as_str())
        })
        .map(named)
        .next()
}

/// What the kernel's tables have of these sockets of a process: inode, address here, address there, and state.
fn sockets_in(tables: &[&str], pid: u32, sockets: &BTreeSet<u64>) -> Vec<(u64, [String; 3])> {
    let mut found = Vec::new();
    for table in tables {
        let text = fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap_or_default();
        for line in text.lines().skip(1) {
            let fields: Vec<_> = line.split_whitespace().collect();
            let [_, own, other, state, ..] = fields[..] else { continue };
            let inode = fields.get(9).and_then(|inode| inode.parse().ok()).filter(|inode| sockets.contains(inode));
            found.extend(inode.map(|inode| (inode, [own, other, state].map(str::to_owned))));
        }
    }
    found
}

const LISTENING: &str = "0A";

/// The connections of these sockets of a process.
fn connections_of(pid: u32, sockets: &BTreeSet<u64>) -> Vec<Connection> {
    /// For UDP, a socket without another side.
    const CLOSED: &str = "07";
    let all = sockets_in(&["tcp", "tcp6", "udp", "udp6"], pid, sockets).into_iter();
    let connected = all.filter(|(_, [_, _, state])| ![LISTENING, CLOSED].contains(&state.as_str()));
    connected.map(|(inode, [own, other, _])| Connection { pid, inode, own, other }).collect()
}

/// The addresses at which these sockets of a process listen.
fn listeners_of(pid: u32, sockets: &BTreeSet<u64>) -> Vec<SocketAddr> {
    let all = sockets_in(&["tcp", "tcp6"], pid, sockets).into_iter();
    all.filter(|(_, [_, _, state])| state == LISTENING).filter_map(|(_, [own, ..])| socket_address(&own)).collect()
}

/// Whose a process is, and what it may do.
pub fn credentials(pid: u32) -> Process {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let words = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    let numbers = |name: &str| words(name).iter().filter_map(|word| word.parse().ok()).collect::<Vec<u32>>();
    let capabilities = ["CapInh:", "CapPrm:", "CapAmb:"].iter().flat_map(|name| words(name));
    let capabilities = capabilities.filter_map(|word| u64::from_str_radix(&word, 16).ok()).fold(0, |all, some| all | some);
    Process { uids: numbers("Uid:"), gids: [numbers("Gid:"), numbers("Groups:")].concat(), capabilities, ..Process::default() }
}

/// Whether two of the kernel's tables are the same: an IPv6 socket may have one of IPv4.
fn is_same(one: &str, other: &str) -> bool {
    let plain = |text: &str| socket_address(text).map(|address| (address.ip().to_canonical(), address.port()));
    one == other || plain(one).is_some_and(|one| plain(other) == Some(one))
}

/// Whether all that there is at a port is what ended processes have left: the kernel keeps the ends of their connections for a while (`TIME_WAIT`).
pub fn is_left_behind(port: u16) -> bool {
    let text: String = ["tcp", "tcp6"].map(|table| fs::read_to_string(format!("/proc/net/{table}")).unwrap_or_default()).concat();
    let rows = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let is_at = |row: &Vec<&str>| row.get(1).and_then(|own| socket_address(own)).is_some_and(|own| own.port() == port);
    // The inode, which what is nobody's has not.
    let is_nobodys = |row: &Vec<&str>| row[3] != LISTENING && row.get(9) == Some(&"0");
    let at_port: Vec<_> = rows.filter(is_at).collect();
    !at_port.is_empty() && at_port.iter().all(is_nobodys)
}

/// An address of the kernel's tables, to read.
fn address(text: &str) -> String {
    socket_address(text).map_or_else(|| text.to_owned(), |address| address.to_string())
}

/// The same: words of 32 bits as this machine writes them, and a port.
fn socket_address(text: &str) -> Option<SocketAddr> {
    let (host, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let words = host.as_bytes().chunks(8).map(|word| u32::from_str_radix(str::from_utf8(word).ok()?, 16).ok());
    let bytes = words.map(|word| word.map(u32::to_ne_bytes)).collect::<Option<Vec<_>>>()?.concat();
    let host = <[u8; 4]>::try_from(&bytes[..]).map(IpAddr::from);
    let host = host.or_else(|_| <[u8; 16]>::try_from(&bytes[..]).map(IpAddr::from)).ok()?;
    Some(SocketAddr::new(host, port))
}

/// The plain files that a process has open or mapped, by the names that `/proc` has for them: one that was removed ends in ` (deleted)`.
pub fn opened(pid: u32) -> Vec<(PathBuf, fs::Metadata)> {
    let mut found = Vec::new();
    for folder in ["fd", "map_files"] {
        for entry in fs::read_dir(format!("/proc/{pid}/{folder}")).into_iter().flatten().flatten() {
            if let Ok(path) = fs::read_link(entry.path())
                && let Ok(metadata) = fs::metadata(entry.path())
                && metadata.is_file()
            {
                found.push((path, metadata));
            }
        }
    }
    found
}

/// Whether a process has any socket, or the file of this name, open.
pub fn has_file(pid: u32, name: &str) -> bool {
    open_files(pid).is_ok_and(|files| files.iter().any(|file| Path::new(&file.text).file_name().is_some_and(|its| its == name)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn what_leads_outside_is_named() {
        let pid = std::process::id();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let own = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        let local = own.local_addr().unwrap().to_string();
        let is_outside = || look(&[pid], true).unwrap().outside.iter().any(|one| one.local == local);
        assert!(look(&[pid], true).unwrap().has_connections && !is_outside());
        // Its other side is in the kernel, or in another process.
        drop(accepted);
        assert!(is_outside());
        drop(own);
        assert_eq!(address("0100007F:1F90"), "127.0.0.1:8080");
        assert_eq!(address("00000000000000000000000001000000:1F90"), "[::1]:8080");
        assert!(look(&[pid], true).unwrap().listeners.contains(&(pid, listener.local_addr().unwrap())));
    }

    #[test]
    fn a_process_that_has_ended_is_in_nobodys_way() {
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        assert!(look(&[ended.id()], false).unwrap().obstacles.is_empty());
    }

    #[test]
    fn a_session_is_read_behind_any_name() {
        assert_eq!(session("17 (a) b (c)) S 16 17 0 34816 17 4194304"), Some(0));
        let own = fs::read_to_string("/proc/self/stat").unwrap();
        // SAFETY: takes no pointers.
        assert_eq!(session(&own), u32::try_from(unsafe { libc::getsid(0) }).ok());
        assert_eq!(session(""), None);
    }

    #[test]
    fn a_lock_is_read_as_the_kernel_writes_it() {
        let read = |text| lock("/f", text).map(|lock| (lock.is_of_file, lock.is_exclusive, lock.start, lock.bytes));
        assert_eq!(read("\t1: FLOCK  ADVISORY  WRITE 25 00:63:11 0 EOF"), Some((true, true, 0, 0)));
        assert_eq!(read("\t1: POSIX  ADVISORY  READ 25 00:63:11 4 7"), Some((false, false, 4, 4)));
        assert_eq!(read("\t1: -> FLOCK  ADVISORY  WRITE 25 00:63:11 0 EOF"), None);
    }

    #[test]
    fn an_anonymous_file_is_known_by_its_kind() {
        let file = |text: &str| Open {
            number: 9,
            text: text.into(),
            metadata: None,
            is_queue: false,
            mount: 0,
            access: 0,
            appends: false,
            locks: vec![],
        };
        assert!(obstacle(&[1], &file("anon_inode:[io_uring]"), false).unwrap().contains("UV_USE_IO_URING"));
        assert_eq!(obstacle(&[1], &file("anon_inode:[eventpoll]"), false), None);
        assert_eq!(numbered("pipe:[17]", "pipe"), Some(17));
    }
}
