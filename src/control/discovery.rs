//! Where the sockets are: one directory a user, one socket a process, `<pid>.sock`.
//!
//! Everything inside goes through the directory's descriptor (`/proc/self/fd/N/…`): what was checked is what is used,
//! and the length of the directory's path does not matter to `sockaddr_un`.

use crate::config;
use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::{io, process};

/// The directory of the sockets, open and found safe: no symbolic link, owned by the user, closed to others.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    open: File,
}

/// The user whose directories and peers are one's own.
pub fn user() -> u32 {
    // SAFETY: cannot fail and touches no memory.
    unsafe { libc::geteuid() }
}

impl Directory {
    /// The user's directory; `Ok(None)`: there is none yet, so no process has managed memory.
    pub fn open() -> io::Result<Option<Self>> {
        match Self::check(&config::socket_directory()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            answer => answer.map(Some),
        }
    }

    /// The same, made if need be.
    pub fn open_or_create() -> io::Result<Self> {
        let path = config::socket_directory();
        match fs::DirBuilder::new().mode(0o700).create(&path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(naming(&path, &error)),
            _ => Self::check(&path),
        }
    }

    fn check(path: &Path) -> io::Result<Self> {
        let open = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW)
            .open(path)
            .map_err(|error| naming(path, &error))?;
        let metadata = open.metadata()?;
        let refuse = |why: String| Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("{}: {why}", path.display())));
        let user = user();
        // Root may look into another user's directory, but does not put its own sockets there: it has one of its own.
        if metadata.uid() != user && user != 0 {
            return refuse(format!("owned by user {}, not by you; set VRAMCTL_DIR to a directory of yours", metadata.uid()));
        }
        if metadata.mode() & 0o077 != 0 {
            return refuse(format!("open to other users (mode {:o}); chmod 700 it", metadata.mode() & 0o777));
        }
        Ok(Self { path: path.to_owned(), open })
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

    /// Connects to the socket of a process.
    pub fn connect(&self, pid: u32) -> io::Result<UnixStream> {
        UnixStream::connect(self.within(pid))
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

fn naming(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}
