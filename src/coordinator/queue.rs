//! The queue of jobs that are being resumed: the first in the queue gets the GPU's memory. If two took it at the same time, each would get
//! a part, and neither enough.
//!
//! A ticket is a file in the socket directory, locked while its owner is in the queue. The lock is released when the owner dies, so nobody
//! waits for a dead process. Nor for one that is stopped (^Z) while it waits: it has its place again when it goes on.

use crate::deadline::Deadline;
use crate::lock::FileLock;
use crate::patience::{LOCK_QUEUE_WITHIN, LOOK_AT_QUEUE_EVERY};
use crate::proc;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};
use vramctl_control::discovery::Directory;
use vramctl_control::protocol::Refusal;
use vramctl_host::file_lock::{Sharing, lock_within, try_lock};
use vramctl_model::Error;

/// How many times as long a job that is far behind waits.
const MOST_LOOKS_LEFT_OUT: usize = 25;
/// The longest ticket that is read.
const LONGEST_TICKET: u64 = 1 << 20;

/// The contents of a ticket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    /// Its owner, for messages.
    pub who: String,
    /// The GPUs, by UUID.
    pub gpus: Vec<String>,
    /// The command that resumes it, as a random number: one command may resume several jobs.
    #[serde(default)]
    pub command: u64,
    /// How far its owner is.
    #[serde(default)]
    pub stage: Stage,
    /// It queues only among the jobs of this command, whose own place in the queue is for all of them.
    #[serde(default)]
    pub within: Option<u64>,
    /// The process of its owner.
    pub pid: u32,
}

/// How far the owner of a ticket is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// It waits for those ahead.
    #[default]
    Queued,
    /// It has its turn, and may be in the middle of taking memory.
    HasTurn,
    /// It waits for memory that others hold, which may take long.
    WaitsForMemory,
}

impl Ticket {
    /// Takes a place in the queue and waits until it is first; with a timeout, it also waits behind jobs that wait for memory. Without one,
    /// it waits for `turn_within`. `None` if it needs none. `report` is called with the tickets ahead.
    pub fn queue(
        self,
        directory: &Directory,
        deadline: Deadline,
        turn_within: Duration,
        report: &mut dyn FnMut(&[Self]),
    ) -> Result<Option<Entry>, Box<Refusal>> {
        if self.gpus.is_empty() {
            return Ok(None);
        }
        // Continue without the queue if the directory is not writable.
        let Ok(mut place) = Entry::take(directory, self) else { return Ok(None) };
        let until = deadline.at().unwrap_or(deadline.begun + turn_within);
        place.wait(until, deadline.timeout.is_some(), report).map_err(|before| {
            let first: Vec<_> = before.iter().map(|ticket| ticket.who.clone()).collect();
            let why = format!(
                "memory of {} goes to {} first; this is number {} in the queue. Wait with --timeout, or try again",
                place.ticket.gpus.join(", "),
                first.join(", "),
                before.len() + 1
            );
            Box::new(Refusal { message: why, ..Refusal::from(&Error::Busy(deadline.begun.elapsed())) })
        })?;
        place.change(Stage::HasTurn);
        Ok(Some(place))
    }
}

/// A place in the queue. Given up when dropped.
#[derive(Debug)]
pub struct Entry {
    directory: Directory,
    number: u64,
    file: File,
    ticket: Ticket,
}

impl Entry {
    /// Takes the last place.
    pub fn take(directory: &Directory, ticket: Ticket) -> io::Result<Self> {
        let directory = directory.clone();
        // Only one process at a time reads or changes the queue.
        let _lock = lock(&directory);
        let number = numbers(&directory.within_process())?.last().map_or(1, |last| last.saturating_add(1));
        let file = directory.file(&name(number), File::options().write(true).create_new(true))?;
        // Whoever reads the queue tries each ticket, for a moment.
        lock_within(&file, Sharing::Exclusive, Instant::now() + LOCK_QUEUE_WITHIN, LOOK_AT_QUEUE_EVERY / 20)?;
        let place = Self { directory, number, file, ticket };
        place.write()?;
        Ok(place)
    }

    /// The tickets ahead of this one that want memory of the same GPUs.
    fn before(&self) -> io::Result<Vec<Ticket>> {
        let _lock = lock(&self.directory);
        let others = numbers(&self.directory.within_process())?.into_iter().take_while(|number| *number < self.number);
        let others = others.filter_map(|number| read(&self.directory, &name(number))).filter(|other| other.within == self.ticket.within);
        Ok(others.filter(|other| other.gpus.iter().any(|gpu| self.ticket.gpus.contains(gpu))).collect())
    }

    /// Waits until it is first in the queue. Gives up at `deadline`, or, unless `patient`, as soon as a ticket ahead waits for memory; the
    /// error has the tickets ahead. While all tickets ahead are jobs that this same command is resuming, it never gives up: the command is
    /// making progress. `report` is called with the tickets ahead.
    pub fn wait(&self, deadline: Instant, patient: bool, report: &mut dyn FnMut(&[Ticket])) -> Result<(), Vec<Ticket>> {
        let mut known = 0;
        loop {
            // Do not wait if the queue cannot be read.
            let before = self.before().unwrap_or_default();
            if before.is_empty() {
                return Ok(());
            }
            if !before.iter().all(|ahead| ahead.command == self.ticket.command && ahead.stage != Stage::WaitsForMemory) {
                if Instant::now() >= deadline || (!patient && before.iter().any(|ticket| ticket.stage == Stage::WaitsForMemory)) {
                    return Err(before);
                }
                if before.len() != known {
                    known = before.len();
                    report(&before);
                }
            }
            // Who is next looks often, and who is far behind seldom.
            thread::sleep(LOOK_AT_QUEUE_EVERY * before.len().min(MOST_LOOKS_LEFT_OUT) as u32);
        }
    }

    /// The command that it belongs to.
    pub fn command(&self) -> u64 {
        self.ticket.command
    }

    /// Marks the ticket as waiting for memory, which may take long.
    pub fn waits_for_memory(&mut self) {
        if self.ticket.stage != Stage::WaitsForMemory {
            self.change(Stage::WaitsForMemory);
        }
    }

    fn change(&mut self, stage: Stage) {
        let _lock = lock(&self.directory);
        self.ticket.stage = stage;
        let _ = self.write();
    }

    fn write(&self) -> io::Result<()> {
        let text = serde_json::to_vec(&self.ticket)?;
        self.file.set_len(0)?;
        self.file.write_all_at(&text, 0)
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let _ = fs::remove_file(self.directory.within_process().join(name(self.number)));
    }
}

fn name(number: u64) -> String {
    format!("{number}.ticket")
}

/// The tickets' numbers, in order.
fn numbers(folder: &Path) -> io::Result<Vec<u64>> {
    let names = fs::read_dir(folder)?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut numbers: Vec<_> = names.filter_map(|name| name.strip_suffix(".ticket")?.parse().ok()).collect();
    numbers.sort_unstable();
    Ok(numbers)
}

/// The ticket in a file. Removes the file of an owner that has died. `None` for one that is stopped while it waits, too.
fn read(directory: &Directory, name: &str) -> Option<Ticket> {
    let file = directory.file(name, File::options().read(true)).ok()?;
    if try_lock(&file, Sharing::Shared).unwrap_or(false) {
        let _ = fs::remove_file(directory.within_process().join(name));
        return None;
    }
    let mut text = Vec::new();
    file.take(LONGEST_TICKET).read_to_end(&mut text).ok()?;
    let ticket: Ticket = serde_json::from_slice(&text).ok()?;
    // In another PID namespace, the number may be another process's here.
    let is_stopped = ticket.stage != Stage::HasTurn && proc::is_stopped(ticket.pid) && proc::has_open(ticket.pid, name);
    (!is_stopped).then_some(ticket)
}

/// The queue's lock, held while reading or changing it. Others hold it for a moment only, unless they are stopped: then to go on without it
/// risks a place in the queue, and to wait would stop everybody.
fn lock(directory: &Directory) -> Option<FileLock> {
    FileLock::take_in(directory.clone(), "queue.lock", LOCK_QUEUE_WITHIN).ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    fn ticket(command: u64, who: &str, gpus: &[&str]) -> Ticket {
        Ticket {
            who: who.into(),
            gpus: gpus.iter().map(ToString::to_string).collect(),
            command,
            stage: Stage::Queued,
            within: None,
            pid: 0,
        }
    }

    #[test]
    fn the_queue_is_first_come_first_served() {
        let folder = tempfile::tempdir().unwrap();
        let directory = Directory::at(folder.path()).unwrap();
        let now = Instant::now();
        let mut first = Entry::take(&directory, ticket(1, "first", &["a", "b"])).unwrap();
        let second = Entry::take(&directory, ticket(2, "second", &["b"])).unwrap();
        let third = Entry::take(&directory, ticket(3, "third", &["b", "c"])).unwrap();
        let other = Entry::take(&directory, ticket(4, "other", &["d"])).unwrap();
        let names = |result: Result<(), Vec<Ticket>>| result.map_err(|before| before.into_iter().map(|one| one.who).collect::<Vec<_>>());
        assert_eq!(names(first.wait(now, false, &mut |_| ())), Ok(()));
        assert_eq!(names(other.wait(now, false, &mut |_| ())), Ok(()));
        assert_eq!(names(third.wait(now, false, &mut |_| ())), Err(vec!["first".into(), "second".into()]));
        // Behind a ticket that waits for memory, only patient ones wait.
        first.waits_for_memory();
        let later = now + Duration::from_secs(60);
        assert_eq!(names(second.wait(later, false, &mut |_| ())), Err(vec!["first".into()]));
        drop(first);
        assert_eq!(names(second.wait(later, true, &mut |_| ())), Ok(()));
        drop((second, third, other));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    /// A ticket that is being written says nothing yet, and one that is being taken is not locked: read at such a moment, two jobs would be
    /// first, or its owner would count as dead.
    #[test]
    fn who_comes_while_others_come_and_wait_is_behind_them() {
        use std::sync::atomic::{AtomicBool, AtomicU32};
        let folder = tempfile::tempdir().unwrap();
        let directory = Directory::at(folder.path()).unwrap();
        let mut first = Entry::take(&directory, ticket(1, "first", &["a"])).unwrap();
        let (over, checked) = (AtomicBool::new(false), AtomicU32::new(0));
        // Whoever gets no processor for too long goes on without the lock.
        let come = &|command| {
            let begun = Instant::now();
            let place = Entry::take(&directory, ticket(command, "other", &["a"]));
            let found = place.and_then(|place| Ok((place.before()?, folder.path().join(name(place.number)).exists())));
            if begun.elapsed() < LOCK_QUEUE_WITHIN / 2 {
                let (before, is_there) = found.unwrap();
                assert!(is_there && before.iter().any(|ahead| ahead.who == "first"), "{before:?}, {is_there}");
                checked.fetch_add(1, Ordering::Relaxed);
            }
        };
        thread::scope(|scope| {
            let writes = scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    first.ticket.stage = Stage::Queued;
                    first.waits_for_memory();
                    thread::yield_now();
                }
            });
            let coming = [2, 3].map(|command| scope.spawn(move || (0..150).for_each(|_| come(command))));
            let ended = coming.map(thread::ScopedJoinHandle::join);
            over.store(true, Ordering::Relaxed);
            writes.join().unwrap();
            ended.into_iter().for_each(Result::unwrap);
        });
        assert!(checked.into_inner() > 0);
    }

    /// Its command shows the progress of all its jobs, and each has its turn however long the others take.
    #[test]
    fn a_job_of_the_same_command_is_progress_until_it_waits_for_memory() {
        let folder = tempfile::tempdir().unwrap();
        let directory = Directory::at(folder.path()).unwrap();
        let now = Instant::now();
        let first = Entry::take(&directory, ticket(1, "first", &["a"])).unwrap();
        let second = Entry::take(&directory, ticket(1, "second", &["a"])).unwrap();
        let other = Entry::take(&directory, ticket(2, "other", &["a"])).unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| second.wait(now, false, &mut |ahead| panic!("behind {ahead:?}")));
            // It would have given up by then.
            thread::sleep(LOOK_AT_QUEUE_EVERY * 3);
            assert!(other.wait(now, true, &mut |_| ()).is_err());
            drop(first);
            assert_eq!(waiting.join().unwrap(), Ok(()));
        });
        let mut third = Entry::take(&directory, ticket(2, "third", &["a"])).unwrap();
        third.waits_for_memory();
        let fourth = Entry::take(&directory, ticket(2, "fourth", &["a"])).unwrap();
        drop((second, other));
        assert!(fourth.wait(now, true, &mut |_| ()).is_err());
    }

    /// Others that came later are behind all of its jobs.
    #[test]
    fn the_jobs_of_a_command_with_a_place_for_all_of_them_queue_only_among_themselves() {
        let folder = tempfile::tempdir().unwrap();
        let directory = Directory::at(folder.path()).unwrap();
        let now = Instant::now();
        let place = Entry::take(&directory, ticket(1, "all", &["a", "b"])).unwrap();
        let other = Entry::take(&directory, ticket(2, "other", &["a"])).unwrap();
        let within = |who| Ticket { within: Some(1), ..ticket(3, who, &["a"]) };
        let first = Entry::take(&directory, within("first")).unwrap();
        let mut second = within("second");
        second.command = 4;
        let second = Entry::take(&directory, second).unwrap();
        let names = |result: Result<(), Vec<Ticket>>| result.map_err(|before| before.into_iter().map(|one| one.who).collect::<Vec<_>>());
        assert_eq!(names(first.wait(now, false, &mut |_| ())), Ok(()));
        assert_eq!(names(second.wait(now, false, &mut |_| ())), Err(vec!["first".into()]));
        assert_eq!(names(other.wait(now, false, &mut |_| ())), Err(vec!["all".into()]));
        drop(place);
    }

    /// Each process that listens shares a lock on the directory (`control/presence.rs`), all its life.
    #[test]
    fn who_listens_in_the_directory_does_not_keep_others_from_the_queues_lock() {
        let folder = tempfile::tempdir().unwrap();
        let directory = Directory::at(folder.path()).unwrap();
        let listens = File::open(folder.path()).unwrap();
        assert!(try_lock(&listens, Sharing::Shared).unwrap());
        let mine = lock(&directory);
        assert!(mine.is_some() && lock(&directory).is_none(), "one at a time has it");
        drop(mine);
        assert!(lock(&directory).is_some());
    }

    /// As a command in the background is that was stopped at the wrong moment.
    #[test]
    fn a_stopped_owner_of_the_queues_lock_stops_nobody() {
        let folder = tempfile::tempdir().unwrap();
        let directory = Directory::at(folder.path()).unwrap();
        let first = Entry::take(&directory, ticket(1, "first", &["a"])).unwrap();
        let stopped = lock(&directory).unwrap();
        let second = Entry::take(&directory, ticket(2, "second", &["a"])).unwrap();
        assert!(second.wait(Instant::now(), true, &mut |_| ()).is_err(), "the first is ahead all the same");
        drop(first);
        assert_eq!(second.wait(Instant::now(), true, &mut |_| ()), Ok(()));
        drop(stopped);
    }

    /// The directory may be another user's, and root's command reads it.
    #[test]
    fn what_is_no_ticket_stops_nobody() {
        let folder = tempfile::tempdir().unwrap();
        let directory = Directory::at(folder.path()).unwrap();
        let pipe = std::ffi::CString::new(folder.path().join("1.ticket").to_str().unwrap()).unwrap();
        // SAFETY: the name ends with NUL.
        assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
        std::os::unix::fs::symlink("/dev/zero", folder.path().join("2.ticket")).unwrap();
        let place = Entry::take(&directory, ticket(1, "third", &["a"])).unwrap();
        assert_eq!(place.wait(Instant::now(), false, &mut |_| ()), Ok(()));
        drop(place);
        fs::write(folder.path().join(name(u64::MAX)), "").unwrap();
        assert!(Entry::take(&directory, ticket(1, "beyond", &["a"])).is_err());
    }

    /// It takes no memory, and others that have room would wait for whoever is at its terminal.
    #[test]
    fn a_stopped_owner_lets_others_go_first() {
        let folder = tempfile::tempdir().unwrap();
        let directory = Directory::at(folder.path()).unwrap();
        let path = folder.path().join("1.ticket");
        // It has its ticket open and locked, as a command.
        let mut owner = std::process::Command::new("flock")
            .args([path.as_os_str(), "sh".as_ref(), "-c".as_ref(), "echo; read line".as_ref()])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        owner.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
        let text = serde_json::to_vec(&Ticket { pid: owner.id(), ..ticket(1, "stopped", &["a"]) }).unwrap();
        fs::write(&path, text).unwrap();
        let second = Entry::take(&directory, ticket(2, "second", &["a"])).unwrap();
        let is_first = || second.wait(Instant::now(), true, &mut |_| ()).is_ok();
        assert!(!is_first());
        let signal = |signal| {
            // SAFETY: touches no memory; the child has not been waited for.
            assert_eq!(unsafe { libc::kill(owner.id() as i32, signal) }, 0);
        };
        let soon =
            |is_so: &dyn Fn() -> bool| assert!(std::iter::repeat_with(|| thread::sleep(LOOK_AT_QUEUE_EVERY)).take(3000).any(|()| is_so()));
        signal(libc::SIGSTOP);
        soon(&is_first);
        // Another process has that number where the owner of this ticket is.
        let _elsewhere = Entry::take(&directory, Ticket { pid: owner.id(), ..ticket(3, "elsewhere", &["b"]) }).unwrap();
        let behind = Entry::take(&directory, ticket(4, "behind", &["b"])).unwrap();
        assert!(behind.wait(Instant::now(), true, &mut |_| ()).is_err());
        // In the middle of taking memory, it is waited for.
        fs::write(&path, serde_json::to_vec(&Ticket { pid: owner.id(), stage: Stage::HasTurn, ..ticket(1, "stopped", &["a"]) }).unwrap())
            .unwrap();
        assert!(!is_first());
        signal(libc::SIGCONT);
        soon(&|| !is_first());
        owner.kill().unwrap();
        owner.wait().unwrap();
    }

    /// The system lets go of its lock.
    #[test]
    fn a_dead_owner_leaves_the_queue() {
        let folder = tempfile::tempdir().unwrap();
        let directory = Directory::at(folder.path()).unwrap();
        fs::write(folder.path().join("7.ticket"), r#"{"who":"dead","gpus":["a"]}"#).unwrap();
        let place = Entry::take(&directory, ticket(1, "next", &["a"])).unwrap();
        assert_eq!(place.number, 8);
        assert_eq!(place.wait(Instant::now(), false, &mut |_| ()), Ok(()));
    }
}
