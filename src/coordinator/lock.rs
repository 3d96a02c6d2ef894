//! Locks among commands: files beside the control sockets, which the kernel unlocks if a command dies. Not the directory itself: every process
//! that listens there shares a lock on it (`control/presence.rs`).

use crate::patience::TRY_LOCK_EVERY;
use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process;
use std::time::{Duration, Instant};
use vramctl_config::socket_directory;
use vramctl_control::discovery::Directory;
use vramctl_host::file_lock::{Sharing, lock_within};

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
    /// The file.
    pub place: PathBuf,
}

impl FileLock {
    /// Waits for the lock of this name. `None` where there can be no such file.
    pub fn take(name: &str, within: Duration) -> Result<Option<Self>, Others> {
        let Ok(Some(directory)) = Directory::open() else { return Ok(None) };
        Self::take_in(directory, name, within)
    }

    /// The same in this directory.
    pub fn take_in(directory: Directory, name: &str, within: Duration) -> Result<Option<Self>, Others> {
        /// Somebody else may have written anything.
        const LONGEST_PID: u64 = 20;
        let deadline = Instant::now() + within;
        loop {
            let opened = directory.file(name, File::options().read(true).write(true).create(true).truncate(false));
            let Ok(mut file) = opened else { return Ok(None) };
            match lock_within(&file, Sharing::Exclusive, deadline, TRY_LOCK_EVERY) {
                // Its last owner has removed it: others lock another file.
                Ok(true) if file.metadata().is_ok_and(|now| now.nlink() == 0) => (),
                Ok(true) => {
                    let _ = file.set_len(0).and_then(|()| file.rewind()).and_then(|()| write!(file, "{}", process::id()));
                    return Ok(Some(Self { _file: file, directory, name: name.to_owned() }));
                }
                Ok(false) => {
                    let mut text = String::new();
                    let _ = file.take(LONGEST_PID).read_to_string(&mut text);
                    return Err(Others { pid: text.parse().ok(), place: socket_directory().join(name) });
                }
                Err(_) => return Ok(None),
            }
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
