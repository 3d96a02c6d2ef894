//! The decision of a job: one word, shared by its processes and their coordinator.
//!
//! Whoever sets it first decides, and it is set only once. The coordinator commits only when all are prepared; a process that has lost the
//! coordinator aborts, or finds that the job has committed. So all of them take the same decision, no matter who dies at what moment.
//!
//! A process has lost the coordinator when the connection ends, or nothing is heard on it for five seconds (or as long as the coordinator
//! has said). The memory's file is sealed: shrinking it would kill the processes that have it mapped.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};
use std::{fs::File, mem};
use vramctl_model::Error;

/// The word, mapped from a memfd.
#[derive(Debug)]
pub struct Decision(NonNull<AtomicU32>);

// SAFETY: an atomic in memory of its own.
unsafe impl Send for Decision {}
// SAFETY: as above.
unsafe impl Sync for Decision {}

const OPEN: u32 = 0;
const COMMITTED: u32 = 1;
const ABORTED: u32 = 2;

/// Nobody may shrink the file: accessing the mapping would then kill the process.
const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;

impl Decision {
    /// An open decision, and the descriptor to pass to the processes.
    pub fn create() -> io::Result<(Self, OwnedFd)> {
        // SAFETY: a NUL-terminated name. (`memfd_create` would need glibc 2.27.)
        let file =
            unsafe { libc::syscall(libc::SYS_memfd_create, c"vramctl-decision".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        let Ok(file @ 0..) = libc::c_int::try_from(file) else { return Err(io::Error::last_os_error()) };
        // SAFETY: just opened, and nobody else's.
        let file = unsafe { OwnedFd::from_raw_fd(file) };
        let file = File::from(file);
        io::Write::write_all(&mut &file, &OPEN.to_ne_bytes())?;
        // SAFETY: touches no memory.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let file = OwnedFd::from(file);
        Ok((Self::map(&file)?, file))
    }

    /// The decision behind a descriptor that a client has passed. Refuses one that could harm this process.
    pub fn open(file: BorrowedFd<'_>) -> Result<Self, Error> {
        let refuse = |why: &str| Err(Error::Invalid(format!("the decision is not a sealed memfd: {why}")));
        // SAFETY: touches no memory.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 || seals & SEALS != SEALS {
            return refuse("F_SEAL_SHRINK and F_SEAL_GROW are missing");
        }
        // SAFETY: plain data, for which all zeroes is a value, and writable.
        let (about, system) = unsafe {
            let (mut about, mut system): (libc::stat, libc::statfs) = (mem::zeroed(), mem::zeroed());
            if libc::fstat(file.as_raw_fd(), &raw mut about) != 0 || libc::fstatfs(file.as_raw_fd(), &raw mut system) != 0 {
                return refuse("it cannot be asked");
            }
            (about, system)
        };
        // Huge pages may run out at the first access, which would also kill the process.
        if system.f_type != libc::TMPFS_MAGIC || (about.st_size as usize) < size_of::<AtomicU32>() {
            return refuse("it is too small, or made of huge pages");
        }
        Self::map(&file).or_else(|error| refuse(&error.to_string()))
    }

    fn map(file: &impl AsRawFd) -> io::Result<Self> {
        let (access, length) = (libc::PROT_READ | libc::PROT_WRITE, size_of::<AtomicU32>());
        // SAFETY: a new mapping, wherever there is room.
        let address = unsafe { libc::mmap(ptr::null_mut(), length, access, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(address.cast()).map(Self).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    /// Commits, unless it was decided before. Returns whether it is committed.
    pub fn commit(&self) -> bool {
        self.decide(COMMITTED) == COMMITTED
    }

    /// Aborts, unless it was decided before. Returns whether it is aborted.
    pub fn abort(&self) -> bool {
        self.decide(ABORTED) == ABORTED
    }

    /// Whether it is aborted already.
    pub fn is_aborted(&self) -> bool {
        self.word().load(Ordering::Acquire) == ABORTED
    }

    /// Sets the decision unless it is set already, and returns it. Any other value counts as aborted.
    fn decide(&self, wish: u32) -> u32 {
        match self.word().compare_exchange(OPEN, wish, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => wish,
            Err(COMMITTED) => COMMITTED,
            Err(_) => ABORTED,
        }
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: mapped until dropped, and the file behind it cannot shrink.
        unsafe { self.0.as_ref() }
    }
}

impl Drop for Decision {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and not used again.
        unsafe { libc::munmap(self.0.as_ptr().cast(), size_of::<AtomicU32>()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    #[cfg_attr(miri, ignore = "memfd")]
    fn a_decision_is_made_once_for_everyone() {
        for first_commits in [true, false] {
            let (coordinator, file) = Decision::create().unwrap();
            let process = Decision::open(file.as_fd()).unwrap();
            assert!(!process.is_aborted());
            if first_commits {
                assert!(coordinator.commit() && process.commit() && !process.abort() && !process.is_aborted());
            } else {
                assert!(process.abort() && !coordinator.commit() && coordinator.is_aborted());
            }
        }
    }

    /// Its owner could truncate the page under the mapping.
    #[test]
    #[cfg_attr(miri, ignore = "memfd")]
    fn a_file_that_may_shrink_is_refused() {
        let memfd = |seals: libc::c_int| {
            // SAFETY: a name, and a descriptor that was just opened.
            unsafe {
                let file =
                    libc::syscall(libc::SYS_memfd_create, c"test".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) as libc::c_int;
                assert!(file >= 0 && libc::ftruncate(file, 4096) == 0 && libc::fcntl(file, libc::F_ADD_SEALS, seals) == 0);
                OwnedFd::from_raw_fd(file)
            }
        };
        assert!(Decision::open(memfd(SEALS).as_fd()).is_ok());
        let file = OwnedFd::from(tempfile::tempfile().unwrap());
        let empty = {
            // SAFETY: as above.
            unsafe {
                let file = libc::syscall(libc::SYS_memfd_create, c"test".as_ptr(), libc::MFD_ALLOW_SEALING) as libc::c_int;
                assert_eq!(libc::fcntl(file, libc::F_ADD_SEALS, SEALS), 0);
                OwnedFd::from_raw_fd(file)
            }
        };
        for file in [memfd(0), memfd(libc::F_SEAL_GROW), memfd(SEALS | libc::F_SEAL_WRITE), file, empty] {
            assert!(Decision::open(file.as_fd()).unwrap_err().to_string().contains("sealed memfd"));
        }
    }
}
