//! Cooperation between vramctl processes on a host: one may keep memory for later that another needs now.
//!
//! They signal by locking bytes of the control socket directory; the system releases the locks when a process dies. Only
//! processes that need memory check the locks, and those that keep some, which poll for memory pressure anyway.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use vramctl_config as config;
use vramctl_host::{Held, system};

/// What a process signals, and the byte it locks.
#[derive(Debug, Clone, Copy)]
pub enum Says {
    /// It keeps unused host memory or is releasing it.
    Keeps = 0,
    /// It needs host memory for a pause.
    Needs = 1,
}

/// Signals while it lives.
#[derive(Debug)]
pub struct Sign {
    /// Holds the lock.
    _directory: Held,
}

impl Sign {
    /// Gives a signal. `None`, and no signal, if the directory does not exist or does not support locks.
    pub fn put_up(says: Says) -> Option<Self> {
        let directory = Held::new(own_directory(config::socket_directory())?).ok()?;
        let mut lock = lock(libc::F_RDLCK, says);
        fcntl(&*directory.as_type::<File>().ok()?, libc::F_OFD_SETLK, &mut lock).ok()?;
        Some(Self { _directory: directory })
    }
}

/// Whether any process, including this one, gives this signal.
pub fn any(says: Says) -> bool {
    let Some(directory) = own_directory(config::socket_directory()) else { return false };
    let mut found = lock(libc::F_WRLCK, says);
    fcntl(&directory, libc::F_OFD_GETLK, &mut found).is_ok() && found.l_type != libc::F_UNLCK as libc::c_short
}

/// Opens the directory of the sockets, if it is one and the user's. In a shared `/tmp`, somebody else may have put anything under
/// its name: opening a FIFO would block, and locks in a foreign directory are foreign.
fn own_directory(path: &Path) -> Option<File> {
    let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW;
    let directory = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
    (directory.metadata().ok()?.uid() == system::user()).then_some(directory)
}

fn lock(kind: libc::c_int, says: Says) -> libc::flock64 {
    let (l_type, l_whence) = (kind as libc::c_short, libc::SEEK_SET as libc::c_short);
    libc::flock64 { l_type, l_whence, l_start: says as libc::off64_t, l_len: 1, l_pid: 0 }
}

fn fcntl(file: &File, command: libc::c_int, lock: &mut libc::flock64) -> io::Result<()> {
    // SAFETY: the structure is readable and writable.
    let answer = unsafe { libc::fcntl(file.as_raw_fd(), command, std::ptr::from_mut(lock)) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;
    use std::fs;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::symlink;

    /// Somebody else may have put these where the directory should be.
    #[test]
    fn only_a_directory_of_the_users_own_is_opened() {
        let folder = tempfile::tempdir().unwrap();
        let [directory, link, pipe] = ["directory", "link", "pipe"].map(|name| folder.path().join(name));
        fs::create_dir(&directory).unwrap();
        symlink(&directory, &link).unwrap();
        let name = CString::new(pipe.as_os_str().as_bytes()).unwrap();
        // SAFETY: the name ends with NUL.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        // Otherwise, to open it would wait for a writer.
        let _writer = OpenOptions::new().read(true).write(true).open(&pipe).unwrap();
        assert!(own_directory(&directory).is_some());
        assert!(own_directory(&link).is_none() && own_directory(&pipe).is_none());
    }
}
