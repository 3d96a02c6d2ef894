//! Where the sockets are: one directory a user, one socket a process, `<pid>.sock`.
//!
//! Everything inside goes through the directory's descriptor (`/proc/self/fd/N/…`): what was checked is what is used,
//! and the length of the directory's path does not matter to `sockaddr_un`.

use std::fs::{self, File, OpenOptions};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::{io, mem, process};
use vramctl_config as config;

/// The directory of the sockets, open and found safe: no symbolic link, owned by the user, closed to others.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    owner: u32,
    open: File,
}

/// The user whose directories and peers are one's own.
pub fn user() -> u32 {
    // SAFETY: cannot fail and touches no memory.
    unsafe { libc::geteuid() }
}

impl Directory {
    /// The user's directory; `Ok(None)`: there is none yet, so no process has managed memory. Root may look into anybody's.
    pub fn open() -> io::Result<Option<Self>> {
        match Self::check(config::socket_directory(), user() == 0) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            answer => answer.map(Some),
        }
    }

    /// The same for sockets of one's own, made if need be.
    pub fn open_or_create() -> io::Result<Self> {
        let path = config::socket_directory();
        match fs::DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(naming(path, &error)),
            _ => Self::check(path, false),
        }
    }

    fn check(path: &Path, anybodys: bool) -> io::Result<Self> {
        let open = OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW).open(path);
        let refuse = |why: String| Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("{}: {why}", path.display())));
        // The kernel says of one that it is no directory, which those who look at it do not believe.
        if open.is_err() && path.is_symlink() {
            return refuse("a symbolic link; set VRAMCTL_DIR to the directory itself".into());
        }
        let open = open.map_err(|error| naming(path, &error))?;
        let metadata = open.metadata()?;
        if metadata.uid() != user() && !anybodys {
            return refuse(format!("owned by user {}, not by you; set VRAMCTL_DIR to a directory of yours", metadata.uid()));
        }
        if metadata.mode() & 0o077 != 0 {
            return refuse(format!("open to other users (mode {:o}); chmod 700 it", metadata.mode() & 0o777));
        }
        Ok(Self { path: path.to_owned(), owner: metadata.uid(), open })
    }

    /// Its path, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn within(&self, pid: u32) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/{pid}.sock", self.open.as_raw_fd()))
    }

    /// This process's socket. What an earlier process with the same id left is replaced.
    pub fn bind(&self) -> io::Result<UnixListener> {
        let place = self.within(process::id());
        // Two containers that share a directory may both have a process of this number.
        let connected = self.connect(process::id());
        if connected.is_ok() || connected.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
            let why = format!(
                "{}: another process {} listens there; give each container a VRAMCTL_DIR of its own",
                self.path.display(),
                process::id()
            );
            return Err(io::Error::new(io::ErrorKind::AddrInUse, why));
        }
        // Under its name only once it listens: `processes` takes one that does not for a stale one.
        let unfinished = place.with_extension("new");
        let _ = fs::remove_file(&unfinished);
        let bound = UnixListener::bind(&unfinished).and_then(|listener| fs::rename(&unfinished, &place).map(|()| listener));
        bound.map_err(|error| naming(&self.path, &error))
    }

    /// Removes the socket of a process.
    pub fn remove(&self, pid: u32) {
        let _ = fs::remove_file(self.within(pid));
    }

    /// Connects to the socket of a process, if it is one of the directory's owner. `WouldBlock`: it has accepted nothing for
    /// so long that no more connections may wait for it.
    pub fn connect(&self, pid: u32) -> io::Result<UnixStream> {
        let stream = connect_without_waiting(&self.within(pid))?;
        let peer = peer(&stream)?;
        if peer.uid == self.owner || peer.uid == 0 {
            return Ok(stream);
        }
        let why = format!("{}/{pid}.sock: user {} answers there", self.path.display(), peer.uid);
        Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
    }

    /// The processes that listen, by id. Sockets that nobody listens on any more are removed on the way.
    pub fn processes(&self) -> io::Result<Vec<u32>> {
        let mut pids = Vec::new();
        for entry in fs::read_dir(format!("/proc/self/fd/{}", self.open.as_raw_fd()))? {
            let name = entry?.file_name();
            let pid = name.to_str().and_then(|name| name.strip_suffix(".sock")).and_then(|pid| pid.parse().ok());
            let Some(pid) = pid else { continue };
            match self.connect(pid) {
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => self.remove(pid),
                Err(error) if error.kind() == io::ErrorKind::NotFound => (),
                // Whatever else is wrong with it is for the one who talks to it to say.
                _ => pids.push(pid),
            }
        }
        pids.sort_unstable();
        Ok(pids)
    }
}

/// As [`UnixStream::connect`], which waits for a place in the queue of a stopped process until that goes on.
fn connect_without_waiting(path: &Path) -> io::Result<UnixStream> {
    // SAFETY: plain bytes, for which all zeroes is a value.
    let mut address: libc::sockaddr_un = unsafe { mem::zeroed() };
    let path = path.as_os_str().as_bytes();
    // The last byte stays zero.
    if path.len() >= address.sun_path.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    address.sun_path.iter_mut().zip(path).for_each(|(place, byte)| *place = *byte as libc::c_char);
    // SAFETY: touches no memory.
    let socket = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0) };
    if socket < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just opened, and nobody else's.
    let stream = unsafe { UnixStream::from_raw_fd(socket) };
    let length = mem::size_of_val(&address) as libc::socklen_t;
    // SAFETY: `address` is readable for `length` bytes.
    if unsafe { libc::connect(socket, (&raw const address).cast(), length) } != 0 {
        return Err(io::Error::last_os_error());
    }
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Who is at the other end of a socket. The process id is as this process sees it, and 0 where it cannot.
pub fn peer(stream: &UnixStream) -> io::Result<libc::ucred> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = mem::size_of_val(&peer) as libc::socklen_t;
    // SAFETY: `peer` is writable for `length` bytes.
    let answer =
        unsafe { libc::getsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut peer).cast(), &raw mut length) };
    if answer == 0 { Ok(peer) } else { Err(io::Error::last_os_error()) }
}

fn naming(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}
