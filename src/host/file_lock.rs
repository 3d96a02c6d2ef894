//! Locks on files, by which processes of a host agree. The system releases them however a process dies. None of these calls waits, but
//! [`lock_within`], which tries again.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::thread;
use std::time::{Duration, Instant};

/// Who else may have the lock meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// Others that share it.
    Shared,
    /// Nobody.
    Exclusive,
}

/// Locks a file as long as it is open. `false` if somebody else has the lock.
pub fn try_lock(file: &File, sharing: Sharing) -> io::Result<bool> {
    let how = match sharing {
        Sharing::Shared => libc::LOCK_SH,
        Sharing::Exclusive => libc::LOCK_EX,
    };
    // SAFETY: touches no memory.
    is_free(unsafe { libc::flock(file.as_raw_fd(), how | libc::LOCK_NB) })
}

/// The same, trying `every` so often until the deadline.
pub fn lock_within(file: &File, sharing: Sharing, deadline: Instant, every: Duration) -> io::Result<bool> {
    loop {
        match try_lock(file, sharing) {
            Ok(false) if Instant::now() < deadline => thread::sleep(every),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
            answer => return answer,
        }
    }
}

/// Locks one byte of a file, or of a directory, as long as it is open. `false` if somebody else has the lock.
pub fn try_lock_byte(file: &File, byte: u8, sharing: Sharing) -> io::Result<bool> {
    let mut lock = of_byte(byte, sharing);
    // SAFETY: the structure is readable and writable.
    is_free(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw mut lock) })
}

/// Whether another open file has a lock on a byte.
pub fn is_byte_locked(file: &File, byte: u8) -> io::Result<bool> {
    let mut lock = of_byte(byte, Sharing::Exclusive);
    // SAFETY: as above.
    let answer = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    is_free(answer).map(|_| lock.l_type != libc::F_UNLCK as libc::c_short)
}

fn of_byte(byte: u8, sharing: Sharing) -> libc::flock64 {
    let kind = match sharing {
        Sharing::Shared => libc::F_RDLCK,
        Sharing::Exclusive => libc::F_WRLCK,
    };
    let (l_type, l_whence) = (kind as libc::c_short, libc::SEEK_SET as libc::c_short);
    libc::flock64 { l_type, l_whence, l_start: byte.into(), l_len: 1, l_pid: 0 }
}

fn is_free(answer: libc::c_int) -> io::Result<bool> {
    if answer == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    // `fcntl` may say either.
    if error.kind() == io::ErrorKind::WouldBlock || error.raw_os_error() == Some(libc::EACCES) { Ok(false) } else { Err(error) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_lasts_as_long_as_its_file_is_open() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let open = || File::options().read(true).write(true).create(true).truncate(false).open(&path).unwrap();
        let (first, second) = (open(), open());
        assert!(try_lock(&first, Sharing::Exclusive).unwrap() && !try_lock(&second, Sharing::Shared).unwrap());
        assert!(!lock_within(&second, Sharing::Exclusive, Instant::now(), Duration::ZERO).unwrap());
        assert!(try_lock_byte(&first, 1, Sharing::Shared).unwrap() && try_lock_byte(&second, 1, Sharing::Shared).unwrap());
        assert!(is_byte_locked(&second, 1).unwrap() && !is_byte_locked(&second, 0).unwrap());
        assert!(!try_lock_byte(&second, 1, Sharing::Exclusive).unwrap());
        drop(first);
        assert!(try_lock(&second, Sharing::Exclusive).unwrap() && !is_byte_locked(&second, 1).unwrap());
        assert!(try_lock_byte(&second, 1, Sharing::Exclusive).unwrap());
    }
}
