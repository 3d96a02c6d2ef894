//! That a process listens in a directory, shown by a lock on the directory: others may delete its socket, but not the lock, which ends when the
//! process does. So whoever looks for all processes of a job knows that one lives and cannot be reached.
//!
//! Each process locks one byte, whose number is its id and PID namespace. `systemd-tmpfiles` deletes nothing of a directory on which anybody has
//! a lock of the other kind (`flock`, see tmpfiles.d(5)), so it has that, too.

use crate::address::Address;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use vramctl_host::Held;
use vramctl_host::file_lock::{Sharing, is_byte_locked, locked_bytes, try_lock, try_lock_byte, unlock_bytes};

/// Locked after sockets were deleted, until all who have lost theirs have noticed. Numbers 0 and 1 are for host memory.
const DELETED: u64 = 2;
/// The bytes of processes.
const PROCESSES: Range<u64> = 1 << 32..1 << 62;

/// A lock on the directory, until it is dropped.
#[derive(Debug)]
pub(crate) struct Lock(Held);

impl Lock {
    /// That this process listens there. `None` where a directory cannot be locked.
    pub fn of_this_process(directory: &Path) -> Option<Self> {
        let [_, address] = Address::own();
        let lock = Self::on(directory, byte_of(&address)?)?;
        let _ = lock.0.as_type::<File>().and_then(|file| try_lock(&file, Sharing::Shared));
        Some(lock)
    }

    /// That sockets have been deleted.
    pub fn of_deleted(directory: &Path) -> Option<Self> {
        Self::on(directory, DELETED)
    }

    /// Gives it back before the process ends. Needs no memory.
    pub fn give_back(&self) {
        if let Ok(file) = self.0.as_type::<File>() {
            unlock_bytes(&file);
        }
    }

    fn on(directory: &Path, byte: u64) -> Option<Self> {
        let held = Held::new(File::open(directory).ok()?).ok()?;
        let is_locked = try_lock_byte(&*held.as_type::<File>().ok()?, byte, Sharing::Shared).ok()?;
        is_locked.then_some(Self(held))
    }
}

/// The processes that live and listen in a directory, whether or not anybody finds their sockets.
pub(crate) fn alive(directory: &File) -> Vec<Address> {
    let locked = locked_bytes(directory, PROCESSES).unwrap_or_default();
    locked.into_iter().map(|byte| Address { pid: (byte >> 32) as u32, namespace: Some(byte & u64::from(u32::MAX)) }).collect()
}

/// Whether a process has noticed a moment ago that its socket was deleted: others may not have.
pub(crate) fn is_deleted(directory: &File) -> io::Result<bool> {
    is_byte_locked(directory, DELETED)
}

fn byte_of(address: &Address) -> Option<u64> {
    let namespace = u32::try_from(address.namespace?).ok()?;
    Some(u64::from(address.pid) << 32 | u64::from(namespace))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use std::{iter, thread};

    #[test]
    #[cfg_attr(miri, ignore = "locks a directory")]
    fn a_process_is_known_by_its_lock_until_that_ends() {
        let folder = tempfile::tempdir().unwrap();
        let directory = File::open(folder.path()).unwrap();
        let [_, own] = Address::own();
        assert!(alive(&directory).is_empty() && !is_deleted(&directory).unwrap());
        let lock = Lock::of_this_process(folder.path()).unwrap();
        let deleted = Lock::of_deleted(folder.path()).unwrap();
        assert_eq!(alive(&directory), [own]);
        assert!(is_deleted(&directory).unwrap());
        assert!(!try_lock(&directory, Sharing::Exclusive).unwrap(), "cleaners leave the directory alone");
        lock.give_back();
        assert!(alive(&directory).is_empty() && is_deleted(&directory).unwrap());
        drop((lock, deleted));
        // A child that another test starts has the file, too, for a moment.
        let is_over = || alive(&directory).is_empty() && !is_deleted(&directory).unwrap();
        assert!(iter::repeat_with(|| thread::sleep(Duration::from_millis(1))).take(10_000).any(|()| is_over()));
    }
}
