//! Who is the scheduler: whoever has the lock on a file beside the sockets. The kernel gives it back however a process dies.
//!
//! A scheduler that is stopped (`SIGSTOP`, a frozen container) keeps its lock. So it also shows that it runs, by the file's time. If it does not
//! for a while, another keeper takes the file's name away: the lock on a file without the name is worth nothing, and a new file has the name.
//! Whoever continues after that finds the name gone, and is the scheduler no longer.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use vramctl_control::discovery::Directory;
use vramctl_host::file_lock::{Sharing, try_lock};

const LOCK: &str = "share.lock";
const EPOCH: &str = "share.epoch";
/// Whoever has the lock on this file may take the name of the other one away.
const SUCCESSION: &str = "share.succession";
/// How often a scheduler shows that it runs.
const SHOW_EVERY: Duration = LOOK_EVERY.checked_div(2).unwrap();
/// How often the others look, and how many times in a row they find that it has not shown that it runs. They count looks and not the time: the whole
/// machine may have stood still.
const LOOK_EVERY: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 2 });
const LOOKS: u32 = 3;

/// The scheduler's office, as long as this is there.
#[derive(Debug)]
pub struct Office {
    /// The number of this term: greater than that of each one before.
    pub epoch: u64,
    lock: Arc<File>,
    directory: Directory,
}

impl Office {
    /// Takes the office as soon as nobody has it, or whoever has it stands still. `None`: the directory has another file now.
    pub fn wait_for(directory: &Directory) -> io::Result<Option<Self>> {
        let lock = Arc::new(directory.file(LOCK, OpenOptions::new().read(true).write(true).create(true).truncate(false))?);
        let locked = lock_beside(&lock)?;
        let (mut seen, mut looks) = (shown(&lock), 0);
        loop {
            match locked.recv_timeout(LOOK_EVERY) {
                Ok(locked) => {
                    locked?;
                    // It was another's, who has lost the name meanwhile.
                    if !has_name(directory, &lock) {
                        return Ok(None);
                    }
                    return Ok(Some(Self { epoch: begin_epoch(directory)?, lock, directory: directory.clone() }));
                }
                Err(RecvTimeoutError::Timeout) if !has_name(directory, &lock) => return Ok(None),
                Err(RecvTimeoutError::Timeout) => {
                    let now = shown(&lock);
                    looks = if now == seen { looks + 1 } else { 0 };
                    seen = now;
                    if looks >= LOOKS {
                        depose(directory, &lock)?;
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return Err(io::Error::other("the thread that waits for the office has ended")),
            }
        }
    }

    /// Shows that this scheduler runs, from now on, until it has lost the office. Calls `lost` then.
    pub fn show(&self, lost: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let (lock, directory) = (Arc::clone(&self.lock), self.directory.clone());
        let show = move || {
            while has_name(&directory, &lock) {
                let _ = lock.set_modified(SystemTime::now());
                thread::sleep(SHOW_EVERY);
            }
            lost();
        };
        thread::Builder::new().name("office".into()).spawn(show).map(drop)
    }
}

/// Locks a file in a thread: the kernel tells at once when nobody has it any more, and meanwhile this process looks whether that one stands still.
fn lock_beside(file: &Arc<File>) -> io::Result<Receiver<io::Result<()>>> {
    let (sender, locked) = mpsc::channel();
    let file = Arc::clone(file);
    let lock = move || {
        // SAFETY: touches no memory.
        while unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX) } != 0 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                let _ = sender.send(Err(error));
                return;
            }
        }
        let _ = sender.send(Ok(()));
    };
    thread::Builder::new().name("lock".into()).spawn(lock)?;
    Ok(locked)
}

/// When the scheduler has shown last that it runs.
fn shown(lock: &File) -> Option<SystemTime> {
    lock.metadata().and_then(|about| about.modified()).ok()
}

/// Whether the directory has this file, and no other one of the name.
fn has_name(directory: &Directory, lock: &File) -> bool {
    let identity = |about: fs::Metadata| (about.dev(), about.ino());
    let named = fs::symlink_metadata(directory.within_process().join(LOCK)).map(identity);
    named.is_ok_and(|named| lock.metadata().map(identity).is_ok_and(|own| own == named))
}

/// Takes the name of a file away on which somebody has the lock who stands still.
fn depose(directory: &Directory, lock: &File) -> io::Result<()> {
    let succession = directory.file(SUCCESSION, OpenOptions::new().write(true).create(true).truncate(false))?;
    // One at a time: nobody takes away the name of the file that follows.
    if try_lock(&succession, Sharing::Exclusive)? && has_name(directory, lock) {
        fs::remove_file(directory.within_process().join(LOCK))?;
    }
    Ok(())
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

    fn taken(directory: &Directory) -> Office {
        Office::wait_for(directory).unwrap().unwrap()
    }

    #[test]
    fn one_has_the_office_and_each_term_has_a_greater_epoch() {
        let folder = tempfile::tempdir().unwrap();
        let directory = Directory::at(folder.path()).unwrap();
        let first = taken(&directory);
        let lock = File::open(folder.path().join(LOCK)).unwrap();
        assert!(!try_lock(&lock, Sharing::Exclusive).unwrap());
        let epoch = first.epoch;
        drop(first);
        let second = taken(&directory);
        assert!(second.epoch > epoch);
        drop(second);
        fs::write(folder.path().join(EPOCH), "99999999999999999").unwrap();
        assert_eq!(taken(&directory).epoch, 100_000_000_000_000_000);
    }

    /// One that shows that it runs keeps the office. Another loses it to one of those who wait, and hears of it when it looks.
    #[test]
    fn whoever_stands_still_loses_the_office_to_one_of_the_others() {
        let folder = tempfile::tempdir().unwrap();
        let directory = Directory::at(folder.path()).unwrap();
        let (silent, lost) = (taken(&directory), mpsc::channel());
        let (sender, terms) = mpsc::channel();
        for _ in 0..2 {
            let (directory, sender) = (directory.clone(), sender.clone());
            thread::spawn(move || while sender.send(Office::wait_for(&directory).unwrap()).is_ok() {});
        }
        let next = terms.iter().flatten().next().unwrap();
        assert!(next.epoch > silent.epoch && !has_name(&directory, &silent.lock) && has_name(&directory, &next.lock));
        silent.show(move || lost.0.send(()).unwrap()).unwrap();
        lost.1.recv().unwrap();
        next.show(|| ()).unwrap();
        let all_looks = LOOK_EVERY * (LOOKS + 2);
        assert!(!terms.recv_timeout(all_looks).is_ok_and(|another| another.is_some()), "{next:?} has lost it as well");
    }

    /// A cleaner of old files has deleted it. Else a keeper that comes later would be a scheduler beside the first.
    #[test]
    fn a_lock_that_somebody_deletes_is_no_office() {
        let folder = tempfile::tempdir().unwrap();
        let directory = Directory::at(folder.path()).unwrap();
        let (first, lost) = (taken(&directory), mpsc::channel());
        fs::remove_file(folder.path().join(LOCK)).unwrap();
        first.show(move || lost.0.send(()).unwrap()).unwrap();
        lost.1.recv().unwrap();
        assert!(taken(&directory).epoch > first.epoch);
    }
}
