//! The queue of jobs that are being resumed: memory of a GPU goes to the one that asked first. Two that took it at the same time would
//! both get a part, and neither enough.
//!
//! A ticket is a file in the directory of the sockets, locked as long as its owner is in the queue. The lock goes with the owner, so
//! nobody waits for one that has died.

use crate::discovery::Directory;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// How often to see whether it is one's turn.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// What a ticket says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// Whose it is, for messages.
    pub who: String,
    /// The GPUs, by UUID.
    pub gpus: Vec<String>,
    /// Whether it waits for memory that others hold, which may take long.
    #[serde(default)]
    pub waits: bool,
}

/// A place in the queue. Given up when dropped.
#[derive(Debug)]
pub struct InQueue {
    directory: Directory,
    number: u64,
    file: File,
    ticket: Claim,
}

impl InQueue {
    /// Takes the last place.
    pub fn take(directory: &Directory, ticket: Claim) -> io::Result<Self> {
        let directory = directory.again()?;
        let folder = directory.within_process();
        // One at a time looks at the queue or changes it.
        let _turn = turn(&folder)?;
        let number = numbers(&folder)?.last().map_or(1, |last| last + 1);
        let mut options = OpenOptions::new();
        let file = options.write(true).create_new(true).mode(0o600).open(path(&folder, number))?;
        lock(&file, libc::LOCK_EX)?;
        let place = Self { directory, number, file, ticket };
        place.write()?;
        Ok(place)
    }

    /// Those before this one that want memory of the same GPUs.
    fn before(&self) -> io::Result<Vec<Claim>> {
        let folder = self.directory.within_process();
        let _turn = turn(&folder)?;
        let others = numbers(&folder)?.into_iter().take_while(|number| *number < self.number);
        let others = others.filter_map(|number| read(&path(&folder, number)));
        Ok(others.filter(|other| other.gpus.iter().any(|gpu| self.ticket.gpus.contains(gpu))).collect())
    }

    /// Waits for its turn, at most until `deadline`; behind one that itself waits for memory, only with `patient`. `told` hears of
    /// those before this one, and so does the caller in an error.
    pub fn wait(&self, deadline: Instant, patient: bool, told: &mut dyn FnMut(&[Claim])) -> Result<(), Vec<Claim>> {
        let mut known = 0;
        loop {
            // A queue that cannot be read holds nobody up.
            let before = self.before().unwrap_or_default();
            if before.is_empty() {
                return Ok(());
            }
            if Instant::now() >= deadline || (!patient && before.iter().any(|ticket| ticket.waits)) {
                return Err(before);
            }
            if before.len() != known {
                known = before.len();
                told(&before);
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    /// Tells those behind that it may take long.
    pub fn waits_for_memory(&mut self) {
        if !self.ticket.waits
            && let Ok(_turn) = turn(&self.directory.within_process())
        {
            self.ticket.waits = true;
            let _ = self.write();
        }
    }

    fn write(&self) -> io::Result<()> {
        let text = serde_json::to_vec(&self.ticket)?;
        self.file.set_len(0)?;
        self.file.write_all_at(&text, 0)
    }
}

impl Drop for InQueue {
    fn drop(&mut self) {
        let _ = fs::remove_file(path(&self.directory.within_process(), self.number));
    }
}

fn path(folder: &Path, number: u64) -> PathBuf {
    folder.join(format!("{number}.ticket"))
}

/// The tickets' numbers, in order.
fn numbers(folder: &Path) -> io::Result<Vec<u64>> {
    let names = fs::read_dir(folder)?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut numbers: Vec<_> = names.filter_map(|name| name.strip_suffix(".ticket")?.parse().ok()).collect();
    numbers.sort_unstable();
    Ok(numbers)
}

/// The ticket in a file. Removes the file of an owner that has died.
fn read(path: &Path) -> Option<Claim> {
    let mut file = File::open(path).ok()?;
    if lock(&file, libc::LOCK_SH | libc::LOCK_NB).is_ok() {
        let _ = fs::remove_file(path);
        return None;
    }
    let mut text = String::new();
    file.read_to_string(&mut text).ok()?;
    serde_json::from_str(&text).ok()
}

/// Held as long as somebody looks at the queue or changes it: a lock of the directory itself.
fn turn(folder: &Path) -> io::Result<File> {
    let directory = File::open(folder)?;
    lock(&directory, libc::LOCK_EX)?;
    Ok(directory)
}

fn lock(file: &File, how: libc::c_int) -> io::Result<()> {
    // SAFETY: touches no memory.
    if unsafe { libc::flock(file.as_raw_fd(), how) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ticket(who: &str, gpus: &[&str]) -> Claim {
        Claim { who: who.into(), gpus: gpus.iter().map(ToString::to_string).collect(), waits: false }
    }

    #[test]
    fn memory_goes_to_the_one_that_asked_first() {
        let folder = tempfile::tempdir().unwrap();
        let directory = Directory::at(folder.path()).unwrap();
        let now = Instant::now();
        let mut first = InQueue::take(&directory, ticket("first", &["a", "b"])).unwrap();
        let second = InQueue::take(&directory, ticket("second", &["b"])).unwrap();
        let third = InQueue::take(&directory, ticket("third", &["b", "c"])).unwrap();
        let other = InQueue::take(&directory, ticket("other", &["d"])).unwrap();
        let names = |result: Result<(), Vec<Claim>>| result.map_err(|before| before.into_iter().map(|one| one.who).collect::<Vec<_>>());
        assert_eq!(names(first.wait(now, false, &mut |_| ())), Ok(()));
        assert_eq!(names(other.wait(now, false, &mut |_| ())), Ok(()));
        assert_eq!(names(third.wait(now, false, &mut |_| ())), Err(vec!["first".into(), "second".into()]));
        // Behind one that waits for memory, only the patient wait.
        first.waits_for_memory();
        let later = now + Duration::from_secs(60);
        assert_eq!(names(second.wait(later, false, &mut |_| ())), Err(vec!["first".into()]));
        drop(first);
        assert_eq!(names(second.wait(later, true, &mut |_| ())), Ok(()));
        drop((second, third, other));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    /// The system lets go of its lock.
    #[test]
    fn nobody_waits_for_one_that_has_died() {
        let folder = tempfile::tempdir().unwrap();
        let directory = Directory::at(folder.path()).unwrap();
        fs::write(folder.path().join("7.ticket"), r#"{"who":"dead","gpus":["a"]}"#).unwrap();
        let place = InQueue::take(&directory, ticket("next", &["a"])).unwrap();
        assert_eq!(place.number, 8);
        assert_eq!(place.wait(Instant::now(), false, &mut |_| ()), Ok(()));
    }
}
