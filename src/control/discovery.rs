//! Finds the sockets: one directory per user, one socket per process ([`Address`]).
//!
//! All access goes through the directory's descriptor (`/proc/thread-self/fd/N/…`). So nobody can swap the directory after the
//! checks, and a long path fits into `sockaddr_un`.

use crate::absence::{self, Absence, Absent};
pub use crate::address::peer;
use crate::address::{self, Address, ListenerName};
use crate::folder::{Folder, naming};
use crate::listeners::Listeners;
use crate::presence::{self, Lock};
use std::ffi::{CStr, CString};
use std::fs::{self, File};
use std::ops::Deref;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use std::{io, mem, process, thread};
use vramctl_host::system::{own_folder, user};
use vramctl_host::{Held, Identity, Unpoison};

/// The directory of the sockets, and who listens there.
#[derive(Debug, Clone)]
pub struct Directory {
    folder: Folder,
    /// Who listens, once somebody has looked.
    known: Arc<Mutex<Option<Listeners>>>,
}

impl Deref for Directory {
    type Target = Folder;

    fn deref(&self) -> &Folder {
        &self.folder
    }
}

impl From<Folder> for Directory {
    fn from(folder: Folder) -> Self {
        Self { folder, known: Arc::default() }
    }
}

impl Directory {
    /// Opens the user's directory. `Ok(None)` if there is none yet, so no process has managed memory. Root may open anybody's.
    pub fn open() -> io::Result<Option<Self>> {
        Ok(Folder::open()?.map(Self::from))
    }

    /// Opens the directory for this process's socket, and creates it if necessary.
    pub fn open_or_create() -> io::Result<Self> {
        Folder::create(fs::DirBuilder::new().mode(0o700)).map(Self::from)
    }

    /// The same for a directory that has been there before: somebody may have deleted the directories above it, too.
    pub fn open_or_create_again() -> io::Result<Self> {
        Folder::create(fs::DirBuilder::new().mode(0o700).recursive(true)).map(Self::from)
    }

    /// The directory itself.
    pub fn folder(&self) -> Folder {
        self.folder.clone()
    }

    /// This directory, for tests.
    pub fn at(path: &Path) -> io::Result<Self> {
        Folder::at(path).map(Self::from)
    }

    /// Binds this process's socket. Replaces the socket of an earlier process with the same pid.
    pub fn bind(&self) -> io::Result<(Held, Bound)> {
        // In two containers that share a directory, a process may have this pid each.
        let in_use = |address: &Address| match self.look(address) {
            Ok(_) => true,
            Err(error) => error.kind() == io::ErrorKind::WouldBlock,
        };
        let Some(address) = Address::own().into_iter().find(|address| !in_use(address)) else {
            let why = format!(
                "{}: another process {} listens there; give each container a VRAMCTL_DIR of its own",
                self.path().display(),
                process::id()
            );
            return Err(io::Error::new(io::ErrorKind::AddrInUse, why));
        };
        // Renamed only once it listens: `processes` takes a socket without a listener for stale.
        let unfinished = address::unfinished(&self.within_process(), &ListenerName::own());
        let _ = fs::remove_file(&unfinished);
        let lock = Lock::of_this_process(&self.within_process());
        let bind = || {
            let listener = Held::new(UnixListener::bind(&unfinished)?)?;
            let file = fs::symlink_metadata(&unfinished)?;
            let path = CString::new(self.path().join(address.file()).into_os_string().into_vec())?;
            fs::rename(&unfinished, self.within(&address.file()))?;
            absence::remove_own(self);
            Ok((listener, Bound { path, file: (file.dev(), file.ino()), root: root(), lock, deleted: None }))
        };
        bind().map_err(|error| naming(self.path(), &error))
    }

    /// Connects to a process's socket, if the process belongs to the directory's owner. `WouldBlock` if the queue is full
    /// because the process has stopped accepting connections. `pid`: as seen from here, see [`processes`](Self::processes).
    pub fn connect(&self, pid: u32) -> io::Result<UnixStream> {
        self.dial(&self.address(pid)?)
    }

    /// Connects to the process with this pid in the PID namespace of this one.
    pub fn connect_beside(&self, pid: u32) -> io::Result<UnixStream> {
        let refused = |error: &io::Error| matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused);
        let [plain, distinct] = Address::beside(pid);
        match self.dial(&distinct) {
            Err(error) if refused(&error) => self.dial(&plain),
            answer => answer,
        }
    }

    /// The name of a file beside a process's socket. All who talk to the process have the same, whatever its pid is for them.
    pub fn beside(&self, pid: u32, ending: &str) -> String {
        self.address(pid).map_or_else(|_| format!("{pid}.{ending}"), |address| format!("{address}.{ending}"))
    }

    fn address(&self, pid: u32) -> io::Result<Address> {
        let plain = Address::plain(pid);
        if let Some(known) = &*self.known() {
            return Ok(known.address(pid).cloned().unwrap_or(plain));
        }
        match self.look(&plain) {
            Ok(Some(here)) if here == pid => return Ok(plain),
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Ok(plain),
            // Of another PID namespace.
            _ => _ = self.processes()?,
        }
        Ok(self.known().as_ref().and_then(|known| known.address(pid).cloned()).unwrap_or(plain))
    }

    /// Connects, and hangs up. Returns the pid here of the process that listens, or `None` if it cannot be seen.
    fn look(&self, address: &Address) -> io::Result<Option<u32>> {
        self.dial(address).map(|stream| address.pid_here(&stream))
    }

    fn dial(&self, address: &Address) -> io::Result<UnixStream> {
        let path = self.within(&address.file());
        let stream =
            if self.owner() == user() { connect_without_waiting(path.as_os_str().as_bytes())? } else { self.dial_of_another_user(&path)? };
        let peer = peer(&stream)?;
        if peer.uid == self.owner() || peer.uid == 0 {
            return Ok(stream);
        }
        let why = format!(
            "{}/{}: user {} answers there, not you; remove the file, or restart the program as yourself",
            self.path().display(),
            address.file(),
            peer.uid
        );
        Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
    }

    /// The same where the directory's owner could have put anything there, such as a link to a socket that only this user reaches.
    fn dial_of_another_user(&self, path: &Path) -> io::Result<UnixStream> {
        let socket = File::options().read(true).custom_flags(libc::O_PATH | libc::O_NOFOLLOW).open(path)?;
        let found = socket.metadata()?;
        if !found.file_type().is_socket() || found.nlink() > 1 || found.uid() != self.owner() {
            let why = format!(
                "{}: not a socket of the directory's owner; nothing there is followed",
                path.file_name().unwrap_or_default().display()
            );
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        connect_without_waiting(format!("/proc/self/fd/{}", socket.as_raw_fd()).as_bytes())
    }

    /// The pids of the processes that listen, sorted, as they are seen from here. A process of a PID namespace that cannot be seen from
    /// here has a number that no process here can have ([`hidden`](address::hidden)). Removes stale sockets.
    pub fn processes(&self) -> io::Result<Vec<u32>> {
        /// A process replaces a closed socket within this time. The new one must not be removed as stale.
        const NEW_SOCKET: Duration = Duration::from_millis(50);
        // In this order, because a process locks, then goes away and leaves a file, and removes that once it listens again.
        let alive = presence::alive(self.opened());
        let marked = absence::marked(self).map_err(|error| naming(self.path(), &error))?;
        let (mut listening, mut refused) = (Vec::new(), Vec::new());
        let entries = fs::read_dir(self.within_process()).map_err(|error| naming(self.path(), &error))?;
        for entry in entries {
            let name = entry?.file_name();
            let Some(address) = name.to_str().and_then(Address::of_file) else { continue };
            match self.look(&address) {
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => refused.push(address),
                Err(error) if error.kind() == io::ErrorKind::NotFound => (),
                // Other errors are reported when somebody talks to the process.
                answer => listening.push((answer.unwrap_or(Some(address.pid)), address)),
            }
        }
        if !refused.is_empty() {
            thread::sleep(NEW_SOCKET);
        }
        for address in refused {
            match self.look(&address) {
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => _ = fs::remove_file(self.within(&address.file())),
                answer => listening.push((answer.unwrap_or(Some(address.pid)), address)),
            }
        }
        let known = Listeners::of(listening, alive, marked);
        let pids = known.pids();
        *self.known() = Some(known);
        Ok(pids)
    }

    /// The processes that lived and did not listen when [`processes`](Self::processes) looked last.
    pub fn absent(&self) -> Vec<Absent> {
        self.known().as_ref().map_or_else(Vec::new, |known| known.absent().to_vec())
    }

    /// Why a process of this pid here, which lives, does not listen. `None` if it does, or has ended.
    pub fn absence_of(&self, pid: u32) -> Option<Absence> {
        self.processes().ok()?;
        self.absent().into_iter().find(|absent| absent.pid == pid).map(|absent| absent.why)
    }

    /// Whether sockets were deleted a moment ago, and processes that have lost theirs may not have noticed.
    pub fn is_being_restored(&self) -> bool {
        presence::is_deleted(self.opened()).unwrap_or(false)
    }

    /// The pid here of the process that another one, of this pid here, calls so.
    pub(crate) fn pid_here(&self, pid: u32, of: u32) -> u32 {
        self.known().as_ref().map_or(pid, |known| known.pid_here(pid, of))
    }

    /// What another process calls the process of this pid here.
    pub(crate) fn pid_there(&self, pid: u32, of: u32) -> u32 {
        self.known().as_ref().map_or(pid, |known| known.pid_there(pid, of))
    }

    fn known(&self) -> MutexGuard<'_, Option<Listeners>> {
        self.known.lock().unpoisoned()
    }
}

/// The PID namespace of this process.
pub fn own_namespace() -> Option<u64> {
    address::namespace_of(own_folder())
}

/// A bound socket's file.
#[derive(Debug)]
pub struct Bound {
    path: CString,
    file: Identity,
    /// The root directory of the process when it was bound.
    root: Option<Identity>,
    /// Tells that the process listens.
    lock: Option<Lock>,
    /// Tells that sockets have been deleted, and since when.
    deleted: Option<(Lock, Instant)>,
}

impl Bound {
    /// Tells for a while that sockets were deleted, which others may not have noticed.
    pub fn tell_of_deleted(&mut self, directory: &Directory) {
        self.deleted = Lock::of_deleted(&directory.within_process()).map(|lock| (lock, Instant::now()));
    }

    /// Stops telling so after this time.
    pub fn told_of_deleted(&mut self, after: Duration) {
        self.deleted.take_if(|(_, since)| since.elapsed() >= after);
    }

    /// Its name, without the ending.
    pub fn address(&self) -> Option<&str> {
        Path::new(self.path.to_str().ok()?).file_stem()?.to_str()
    }

    /// Whether its name is gone, or belongs to another file: somebody has deleted it, or the directory. In doubt it is not: in another
    /// root directory, a name means something else.
    pub fn is_lost(&self) -> bool {
        match identity(&self.path) {
            Ok(found) => found != self.file && root() == self.root,
            Err(error) => matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) && root() == self.root,
        }
    }

    /// Removes it, once nothing else tells that the process listens.
    pub fn give_up(mut self) {
        self.deleted = None;
        self.lock = None;
        self.remove();
    }

    /// Removes it, unless another file has its name by now. Needs no memory: the program may exit in a signal handler that has
    /// interrupted `malloc`.
    pub fn remove(&self) {
        if identity(&self.path).is_ok_and(|found| found == self.file) {
            // SAFETY: a NUL-terminated path.
            unsafe { libc::unlink(self.path.as_ptr()) };
        }
        // The process may take long to end.
        self.lock.iter().for_each(Lock::give_back);
    }
}

fn root() -> Option<Identity> {
    identity(c"/").ok()
}

/// What a path names, itself if it is a link. Needs no memory.
fn identity(path: &CStr) -> io::Result<Identity> {
    // SAFETY: plain data, for which all zeroes is a value.
    let mut found: libc::stat64 = unsafe { mem::zeroed() };
    // SAFETY: a NUL-terminated path, and writable memory.
    let answer = unsafe { libc::lstat64(path.as_ptr(), &raw mut found) };
    if answer == 0 { Ok((found.st_dev, found.st_ino)) } else { Err(io::Error::last_os_error()) }
}

/// Like [`UnixStream::connect`], but fails at once if the queue is full, instead of waiting for a stopped process. An abstract name begins with a
/// zero.
pub(crate) fn connect_without_waiting(name: &[u8]) -> io::Result<UnixStream> {
    // SAFETY: plain bytes, for which all zeroes is a value.
    let mut address: libc::sockaddr_un = unsafe { mem::zeroed() };
    // The last byte stays zero.
    if name.len() >= address.sun_path.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    address.sun_path.iter_mut().zip(name).for_each(|(place, byte)| *place = *byte as libc::c_char);
    // SAFETY: touches no memory.
    let socket = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0) };
    if socket < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just opened, and nobody else's.
    let stream = unsafe { UnixStream::from_raw_fd(socket) };
    // An abstract name ends there, a path at its first zero.
    let length = (mem::offset_of!(libc::sockaddr_un, sun_path) + name.len() + usize::from(name[0] != 0)) as libc::socklen_t;
    // SAFETY: `address` is readable for `length` bytes.
    if unsafe { libc::connect(socket, (&raw const address).cast(), length) } != 0 {
        return Err(io::Error::last_os_error());
    }
    stream.set_nonblocking(false)?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// Only root looks into another user's directory; here, a directory that is taken for another user's.
    #[test]
    #[cfg_attr(miri, ignore = "opens a directory")]
    fn a_link_in_another_users_directory_is_not_followed_to_a_socket() {
        let [theirs, own] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let service = UnixListener::bind(own.path().join("service")).unwrap();
        symlink(own.path().join("service"), theirs.path().join("4711.sock")).unwrap();
        let directory = Directory::from(Folder::at(theirs.path()).unwrap().of_another(user() + 1));
        let refused = directory.connect(4711).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied, "{refused}");
        // Nor is another name of one, or one that its owner did not make.
        fs::hard_link(own.path().join("service"), theirs.path().join("4712.sock")).unwrap();
        let _planted = UnixListener::bind(theirs.path().join("4713.sock")).unwrap();
        assert!([4712, 4713].iter().all(|pid| directory.connect(*pid).is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)));
        service.set_nonblocking(true).unwrap();
        assert_eq!(service.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock, "nobody has come");
        // What it did make is reached, by its own name alone.
        let directory = Directory::at(theirs.path()).unwrap();
        let dial = |file| directory.dial_of_another_user(&directory.within(file));
        assert!(dial("4713.sock").is_ok() && dial("4712.sock").is_err());
        fs::remove_file(theirs.path().join("4712.sock")).unwrap();
        assert!(dial("4711.sock").is_err());
    }
}
