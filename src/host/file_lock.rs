//! Locks on files, by which processes of a host agree. The system releases them however a process dies. None of these calls waits, but
//! [`lock_within`], which tries again.

use std::fs::File;
use std::io;
use std::ops::Range;
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
pub fn try_lock_byte(file: &File, byte: u64, sharing: Sharing) -> io::Result<bool> {
    let mut lock = of_bytes(&(byte..byte + 1), sharing);
    // SAFETY: the structure is readable and writable.
    is_free(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw mut lock) })
}

/// Gives back all locks that this open file has on bytes. Needs no memory.
pub fn unlock_bytes(file: &File) {
    let mut all =
        libc::flock64 { l_type: libc::F_UNLCK as libc::c_short, l_whence: libc::SEEK_SET as libc::c_short, l_start: 0, l_len: 0, l_pid: 0 };
    // SAFETY: as above.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw mut all) };
}

/// Whether another open file has a lock on a byte.
pub fn is_byte_locked(file: &File, byte: u64) -> io::Result<bool> {
    locked_in(file, &(byte..byte + 1)).map(|found| found.is_some())
}

/// The bytes in a range on which other open files have locks, each by itself.
pub fn locked_bytes(file: &File, range: Range<u64>) -> io::Result<Vec<u64>> {
    let (mut left, mut locked) = (vec![range], Vec::new());
    while let Some(range) = left.pop() {
        // Any of them, not the first.
        if let Some(found) = locked_in(file, &range)? {
            locked.push(found.start);
            left.extend([range.start..found.start, found.end..range.end].into_iter().filter(|rest| !rest.is_empty()));
        }
    }
    Ok(locked)
}

/// What another open file has locked in a range.
fn locked_in(file: &File, range: &Range<u64>) -> io::Result<Option<Range<u64>>> {
    let mut lock = of_bytes(range, Sharing::Exclusive);
    // SAFETY: the structure is readable and writable.
    let answer = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    is_free(answer)?;
    let (start, bytes) = (lock.l_start as u64, lock.l_len as u64);
    // No length: to the end of the file, however long it gets.
    let end = if bytes == 0 { range.end } else { (start + bytes).min(range.end) };
    Ok((lock.l_type != libc::F_UNLCK as libc::c_short).then_some(start.max(range.start)..end))
}

fn of_bytes(range: &Range<u64>, sharing: Sharing) -> libc::flock64 {
    let kind = match sharing {
        Sharing::Shared => libc::F_RDLCK,
        Sharing::Exclusive => libc::F_WRLCK,
    };
    let (l_type, l_whence) = (kind as libc::c_short, libc::SEEK_SET as libc::c_short);
    libc::flock64 { l_type, l_whence, l_start: range.start as i64, l_len: (range.end - range.start) as i64, l_pid: 0 }
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
    use crate::exit::wait_until;

    /// A child that another test forks has this test's files, too, until it ends.
    #[track_caller]
    fn soon(is_so: impl Fn() -> bool) {
        assert!(wait_until(Duration::from_secs(60), is_so));
    }

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
        let others = [7 << 40, 3, 1 << 32].map(|byte| {
            let other = open();
            assert!(try_lock_byte(&other, byte, Sharing::Shared).unwrap());
            other
        });
        let mut locked = locked_bytes(&first, 2..1 << 62).unwrap();
        locked.sort_unstable();
        assert_eq!(locked, [3, 1 << 32, 7 << 40]);
        assert_eq!(locked_bytes(&first, 4..1 << 32).unwrap(), []);
        unlock_bytes(&others[0]);
        assert_eq!(locked_bytes(&first, 4..1 << 62).unwrap(), [1 << 32]);
        drop(others);
        soon(|| locked_bytes(&first, 2..1 << 62).unwrap().is_empty());
        drop(first);
        soon(|| try_lock(&second, Sharing::Exclusive).unwrap() && !is_byte_locked(&second, 1).unwrap());
        assert!(try_lock_byte(&second, 1, Sharing::Exclusive).unwrap());
    }
}
