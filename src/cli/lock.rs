//! Locks among the commands that suspend and restore: files beside the control sockets, which the kernel unlocks if a command dies.

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{process, thread};
use vramctl_config::socket_directory;
use vramctl_control::discovery::Directory;
use vramctl_host::system::user;

/// A lock, until it is dropped.
pub struct FileLock {
    _file: File,
    directory: Directory,
    name: String,
}

/// Whoever else has the lock.
#[derive(Debug)]
pub struct Others {
    /// The command's process id, if it has written it by now.
    pub pid: Option<u32>,
    pub place: PathBuf,
}

impl FileLock {
    /// Waits for the lock of this name. `None` where there can be no such file.
    pub fn take(name: &str, within: Duration) -> Result<Option<Self>, Others> {
        /// How often to try.
        const LOOK_AGAIN: Duration = Duration::from_millis(10);
        let Ok(Some(directory)) = Directory::open() else { return Ok(None) };
        let deadline = Instant::now() + within;
        loop {
            let Ok(mut file) = open(&directory.within_process(), name) else { return Ok(None) };
            // SAFETY: an open descriptor.
            if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
                // Its last owner has removed it: others lock another file.
                if file.metadata().is_ok_and(|now| now.nlink() == 0) {
                    continue;
                }
                let _ = file.set_len(0).and_then(|()| file.rewind()).and_then(|()| write!(file, "{}", process::id()));
                return Ok(Some(Self { _file: file, directory, name: name.to_owned() }));
            }
            if io::Error::last_os_error().kind() != io::ErrorKind::WouldBlock {
                return Ok(None);
            }
            if Instant::now() >= deadline {
                let mut text = String::new();
                let _ = file.read_to_string(&mut text);
                return Err(Others { pid: text.parse().ok(), place: socket_directory().join(name) });
            }
            thread::sleep(LOOK_AGAIN);
        }
    }
}

impl Others {
    /// For messages.
    pub fn who(&self) -> String {
        self.pid.map_or_else(|| "another vramctl".into(), |pid| format!("another vramctl (pid {pid})"))
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // Still locked: whoever has opened it looks for another.
        let _ = fs::remove_file(self.directory.within_process().join(&self.name));
    }
}

/// Opens the file, and creates it if necessary. The directory may be another user's, who could have put anything there: only a plain file
/// without another name is taken.
fn open(folder: &Path, name: &str) -> io::Result<File> {
    let mut options = File::options();
    options.create(true).truncate(false).read(true).write(true).mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let file = options.open(folder.join(name))?;
    let (found, owner) = (file.metadata()?, fs::metadata(folder)?.uid());
    // None: it has just been removed.
    if !found.is_file() || found.nlink() > 1 || ![owner, user()].contains(&found.uid()) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    // Root takes the locks of the directory's owner, who must be able to open them.
    if found.uid() != owner && found.nlink() == 1 {
        fchown(&file, Some(owner), None)?;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// A command that root runs must not touch what the directory's owner points it to.
    #[test]
    fn only_a_plain_file_without_another_name_is_opened() {
        let folder = tempfile::tempdir().unwrap();
        let elsewhere = folder.path().join("elsewhere");
        fs::write(&elsewhere, "contents").unwrap();
        symlink(&elsewhere, folder.path().join("linked.lock")).unwrap();
        fs::hard_link(&elsewhere, folder.path().join("also.lock")).unwrap();
        fs::create_dir(folder.path().join("folder.lock")).unwrap();
        for name in ["linked.lock", "also.lock", "folder.lock"] {
            assert!(open(folder.path(), name).is_err(), "{name}");
        }
        assert!(open(folder.path(), "new.lock").is_ok());
        assert_eq!(fs::read(&elsewhere).unwrap(), b"contents");
    }
}
