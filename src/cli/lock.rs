//! Locks among the commands that suspend and restore: files beside the control sockets, which the kernel unlocks if a command dies.

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{process, thread};
use vramctl_config::socket_directory;
use vramctl_control::discovery::user;

/// A lock, until it is dropped.
pub struct FileLock {
    _file: File,
    place: PathBuf,
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
        let place = socket_directory().join(name);
        let deadline = Instant::now() + within;
        loop {
            let Ok(mut file) = open(&place) else { return Ok(None) };
            // SAFETY: an open descriptor.
            if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
                // Its last owner has removed it: others lock another file.
                if file.metadata().is_ok_and(|now| now.nlink() == 0) {
                    continue;
                }
                let _ = file.set_len(0).and_then(|()| file.rewind()).and_then(|()| write!(file, "{}", process::id()));
                return Ok(Some(Self { _file: file, place }));
            }
            if io::Error::last_os_error().kind() != io::ErrorKind::WouldBlock {
                return Ok(None);
            }
            if Instant::now() >= deadline {
                let mut text = String::new();
                let _ = file.read_to_string(&mut text);
                return Err(Others { pid: text.parse().ok(), place });
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
        let _ = fs::remove_file(&self.place);
    }
}

fn open(place: &Path) -> io::Result<File> {
    let file = File::options().create(true).truncate(false).read(true).write(true).mode(0o600).open(place)?;
    // Root takes the locks of the directory's owner, who must be able to open them.
    if let Some(owner) = place.parent().and_then(|folder| folder.metadata().ok()).filter(|folder| folder.uid() != user()) {
        let _ = fchown(&file, Some(owner.uid()), None);
    }
    Ok(file)
}
