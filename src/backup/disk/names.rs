//! Named files, for directories that others inspect.
//!
//! A killed process leaves its files behind, and the next one to use the directory removes them. Each process locks its
//! files while it lives (`flock`, which the system releases however the process dies), so a file that can be locked is
//! stale. Process ids would not do: they are reused, and each container has its own.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;
use std::{io, process, thread};
use vramctl_host::file_lock::{Sharing, try_lock};
use vramctl_host::{PerProcess, Unpoison};

/// A unique name: `vramctl-<pid>-<process start time>-<number>`.
pub fn of(number: u64) -> String {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The program's name, in parentheses, may contain anything.
    let began = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(19)).unwrap_or("0");
    format!("vramctl-{}-{began}-{number:x}", process::id())
}

fn is_ours(name: &str) -> bool {
    let digits = |part: &str, radix| !part.is_empty() && part.chars().all(|digit| digit.is_digit(radix));
    let parts: Vec<_> = name.strip_prefix("vramctl-").into_iter().flat_map(|rest| rest.split('-')).collect();
    matches!(parts[..], [process, start, number] if digits(process, 10) && digits(start, 10) && digits(number, 16))
}

/// Creates a file and locks it.
pub fn open(path: &Path) -> io::Result<File> {
    /// How often to retry, 1 ms apart, if another process takes the file for stale before it is locked.
    const TRIES: u32 = 1000;
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true).mode(0o600);
    for _ in 0..TRIES {
        match options.open(path) {
            // On a file system without locks, no file ever counts as stale.
            Ok(file) if try_lock(&file, Sharing::Exclusive).unwrap_or(true) && file.metadata()?.nlink() > 0 => return Ok(file),
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => thread::sleep(Duration::from_millis(1)),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// Removes a file. If that fails, it is left stale for the next process to remove.
pub fn remove(path: &Path) {
    if let Err(error) = fs::remove_file(path) {
        log::debug!("could not remove {}: {error}", path.display());
    }
}

/// Removes stale files from a directory; once per process and directory.
pub fn remove_stale(directory: &Path) {
    static SEEN: PerProcess<Mutex<BTreeSet<PathBuf>>> = PerProcess::new(Mutex::default);
    if !SEEN.get().lock().unpoisoned().insert(directory.to_owned()) {
        return;
    }
    // An unreadable directory is reported when a file is created in it.
    for entry in fs::read_dir(directory).into_iter().flatten().flatten().filter(|entry| entry.file_name().to_str().is_some_and(is_ours)) {
        let file = OpenOptions::new().write(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(entry.path());
        if file.and_then(|file| try_lock(&file, Sharing::Exclusive)).unwrap_or(false) {
            log::info!("removing {}, left behind by a process that has exited", entry.path().display());
            remove(&entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::alone;
    use super::*;
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::symlink;

    #[test]
    fn only_our_own_file_names_are_recognised() {
        assert!(is_ours(&of(0x7f00_0000_0000)), "{}", of(0));
        for other in ["vramctl-1-2", "vramctl-1-2-3-4", "vramctl-a-2-3", "vramctl-1-2-xyz", "vramctl-1--3", "other-1-2-3", "vramctl-"] {
            assert!(!is_ours(other), "{other}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "creates a FIFO")]
    fn locked_files_stay_and_stale_files_are_removed() {
        let _alone = alone();
        let folder = tempfile::tempdir().unwrap();
        let (used, stale) = (folder.path().join(of(1)), folder.path().join(of(2)));
        let file = open(&used).unwrap();
        drop(open(&stale).unwrap());
        let is_free = |path| try_lock(&File::open(path).unwrap(), Sharing::Exclusive).unwrap();
        assert!(!is_free(&used) && is_free(&stale));
        // Somebody else put these under names of ours. To open a pipe waits for a reader; a link leads to a file of another.
        let (pipe, link) = (folder.path().join(of(3)), folder.path().join(of(4)));
        let name = CString::new(pipe.as_os_str().as_bytes()).unwrap();
        // SAFETY: the name ends with NUL.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        fs::write(folder.path().join("another's"), "").unwrap();
        symlink("another's", &link).unwrap();
        remove_stale(folder.path());
        assert!(used.exists() && !stale.exists() && pipe.exists() && link.exists());
        drop(file);
    }
}
