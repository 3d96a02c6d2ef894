//! Other processes of ours on the same host: one that keeps memory for later, and one that needs it now.
//!
//! They tell each other by locks on the directory of the control sockets, which the system undoes when a process dies. Nobody
//! looks but those who need memory, and those who keep some and look anyway whether it is short.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use vramctl_config as config;
use vramctl_host::Held;

/// What a process says of itself, by a lock on a byte.
#[derive(Debug, Clone, Copy)]
pub enum Says {
    /// It keeps host memory that it does not use, or is giving it back.
    Keeps = 0,
    /// It needs host memory for a pause.
    Needs = 1,
}

/// This process says so for as long as the value lives.
#[derive(Debug)]
pub struct Sign {
    /// The lock goes with it.
    _directory: Held,
}

impl Sign {
    /// `None`: there is no such directory, or no such locks on it, and nobody is told.
    pub fn put_up(says: Says) -> Option<Self> {
        let directory = Held::new(File::open(config::socket_directory()).ok()?).ok()?;
        let mut lock = lock(libc::F_RDLCK, says);
        fcntl(&*directory.as_type::<File>().ok()?, libc::F_OFD_SETLK, &mut lock).ok()?;
        Some(Self { _directory: directory })
    }
}

/// Whether any process says so, this one or another.
pub fn any(says: Says) -> bool {
    let Ok(directory) = File::open(config::socket_directory()) else { return false };
    let mut found = lock(libc::F_WRLCK, says);
    fcntl(&directory, libc::F_OFD_GETLK, &mut found).is_ok() && found.l_type != libc::F_UNLCK as libc::c_short
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
