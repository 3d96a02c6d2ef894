//! Who is the scheduler: whoever has the lock on a file beside the sockets. The kernel gives it back however a process dies.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::time::{SystemTime, UNIX_EPOCH};
use vramctl_control::discovery::Directory;

const LOCK: &str = "share.lock";
const EPOCH: &str = "share.epoch";

/// The scheduler's office, as long as this is there.
#[derive(Debug)]
pub struct Office {
    /// The number of this term: greater than that of each one before.
    pub epoch: u64,
    _lock: File,
}

impl Office {
    /// Takes the office as soon as nobody has it.
    pub fn wait_for(directory: &Directory) -> io::Result<Self> {
        let lock = directory.file(LOCK, OpenOptions::new().read(true).write(true).create(true).truncate(false))?;
        // SAFETY: touches no memory.
        while unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX) } != 0 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
        Ok(Self { epoch: begin_epoch(directory)?, _lock: lock })
    }
}

/// Writes down the next epoch. If the file is lost, the clock still gives a greater one.
fn begin_epoch(directory: &Directory) -> io::Result<u64> {
    let mut text = String::new();
    if let Ok(mut last) = directory.file(EPOCH, OpenOptions::new().read(true)) {
        last.read_to_string(&mut text)?;
    }
    let last: u64 = text.trim().parse().unwrap_or(0);
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
    let epoch = clock.max(last + 1);
    let unfinished = format!("{EPOCH}.new");
    let mut next = directory.file(&unfinished, OpenOptions::new().write(true).create(true).truncate(true))?;
    next.write_all(epoch.to_string().as_bytes())?;
    next.sync_all()?;
    let folder = directory.within_process();
    fs::rename(folder.join(&unfinished), folder.join(EPOCH))?;
    Ok(epoch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vramctl_host::file_lock::{Sharing, try_lock};

    #[test]
    fn one_has_the_office_and_each_term_has_a_greater_epoch() {
        let folder = tempfile::tempdir().unwrap();
        let directory = Directory::at(folder.path()).unwrap();
        let first = Office::wait_for(&directory).unwrap();
        let lock = File::open(folder.path().join(LOCK)).unwrap();
        assert!(!try_lock(&lock, Sharing::Exclusive).unwrap());
        let epoch = first.epoch;
        drop(first);
        let second = Office::wait_for(&directory).unwrap();
        assert!(second.epoch > epoch);
        drop(second);
        fs::write(folder.path().join(EPOCH), "99999999999999999").unwrap();
        assert_eq!(Office::wait_for(&directory).unwrap().epoch, 100_000_000_000_000_000);
    }
}
