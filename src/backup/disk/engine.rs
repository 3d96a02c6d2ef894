//! Keeps many file requests in flight: the calling thread submits [`FileRequest`]s, worker threads run one request each, and
//! completed jobs return to the calling thread.

use super::{ALIGNMENT, Spill, file};
use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::thread::{self, Scope};
use std::time::Duration;
use vramctl_host::{Unpoison, worker};

/// Most worker threads, with one request each; that already saturates drives.
const THREADS: usize = 16;

/// How often in a row a request may make no progress, [`PAUSE`] apart, before that is an error.
pub(super) const PATIENCE: u32 = 1000;

/// Delay before retrying a request that made no progress.
const PAUSE: Duration = Duration::from_millis(1);

/// The direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Write,
    Read,
}

/// A piece of staging memory on its way to or from the file, in as many requests as the kernel needs.
#[derive(Debug)]
pub struct FileRequest {
    slot: usize,
    address: NonNull<u8>,
    bytes: usize,
    pub(super) at: u64,
    pub(super) done: usize,
    in_vain: u32,
    #[cfg(test)]
    pub(super) forced: Option<i32>,
}

// SAFETY: only the job's holder touches the memory; the calling thread leaves it alone until the job returns.
unsafe impl Send for FileRequest {}

/// A completed job: the slot of its staging memory, and the result.
type Completion = (usize, io::Result<()>);

impl FileRequest {
    /// Transfers all of `piece`, the staging memory of `slot`, at the file offset `at`.
    pub fn new(slot: usize, piece: &mut [u8], at: u64) -> Self {
        Self {
            slot,
            bytes: piece.len(),
            address: NonNull::from(piece).cast(),
            at,
            done: 0,
            in_vain: 0,
            #[cfg(test)]
            forced: None,
        }
    }

    /// Processes a request's result: bytes, or a negative error code. `None` if another request must continue the job.
    fn advance(&mut self, result: i64) -> Option<io::Result<()>> {
        #[cfg(test)]
        let result = self.forced.take().map_or(result, i64::from);
        let moved = match result {
            // Less than a block is no progress either.
            1.. if result as usize >= ALIGNMENT || self.in_vain < PATIENCE => result as usize,
            0.. => {
                let text = format!("no progress at byte {}", self.at + self.done as u64);
                return Some(Err(io::Error::new(io::ErrorKind::UnexpectedEof, text)));
            }
            _ if [libc::EINTR, libc::EAGAIN].contains(&(-result as i32)) && self.in_vain < PATIENCE => 0,
            _ => {
                let error = io::Error::from_raw_os_error(-result as i32);
                return Some(Err(io::Error::new(error.kind(), format!("{error}, at byte {}", self.at + self.done as u64))));
            }
        };
        // Direct I/O must start at whole blocks.
        let moved = moved / ALIGNMENT * ALIGNMENT;
        self.done += moved;
        if self.done == self.bytes {
            return Some(Ok(()));
        }
        if moved > 0 {
            self.in_vain = 0;
        } else {
            self.in_vain += 1;
            thread::sleep(PAUSE);
        }
        None
    }
}

/// What a call's threads share: the file and the waiting jobs.
pub struct Queue<'a> {
    spill: &'a Spill,
    operation: Operation,
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    jobs: VecDeque<FileRequest>,
    /// No more will come.
    closed: bool,
}

impl<'a> Queue<'a> {
    pub fn new(spill: &'a Spill, operation: Operation) -> Self {
        Self { spill, operation, waiting: Mutex::default(), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unpoisoned()
    }

    fn put(&self, job: FileRequest) {
        self.lock().jobs.push_back(job);
        self.changed.notify_one();
    }

    /// Waits for a job. `None` if there are no more.
    fn next(&self) -> Option<FileRequest> {
        self.changed
            .wait_while(self.lock(), |waiting: &mut Waiting| waiting.jobs.is_empty() && !waiting.closed)
            .unpoisoned()
            .jobs
            .pop_front()
    }

    /// Drops waiting jobs and has every thread stop.
    fn close(&self) {
        *self.lock() = Waiting { jobs: VecDeque::new(), closed: true };
        self.changed.notify_all();
    }

    /// Runs a job on this thread.
    fn perform(&self, mut job: FileRequest) -> Completion {
        loop {
            // Look it up for each request: the program may have closed it.
            let file = match self.spill.file() {
                Ok(file) => file,
                Err(error) => return (job.slot, Err(error)),
            };
            let bytes = job.bytes - job.done;
            #[cfg(test)]
            let bytes = self.spill.faults.shape(self.operation, &mut job, bytes);
            let (descriptor, at) = (file.as_raw_fd(), (job.at + job.done as u64) as i64);
            // SAFETY: the memory belongs to the job, and is readable and writable for `bytes` from `done` on.
            let result = unsafe {
                let address = job.address.as_ptr().add(job.done).cast();
                match self.operation {
                    Operation::Write => libc::pwrite64(descriptor, address, bytes, at),
                    Operation::Read => libc::pread64(descriptor, address, bytes, at),
                }
            };
            let result =
                if result < 0 { -i64::from(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)) } else { result as i64 };
            if let Some(outcome) = job.advance(result) {
                if outcome.is_ok() && !self.spill.direct {
                    return (job.slot, file::leave_no_cache(&file, job.at, job.bytes as u64));
                }
                return (job.slot, outcome);
            }
        }
    }

    /// Runs jobs until there are no more.
    fn serve(&self, completed: &Sender<Completion>) {
        while let Some(job) = self.next() {
            // After an error, nobody receives it.
            drop(completed.send(self.perform(job)));
        }
    }
}

/// The calling thread's handle on the workers. Dropping it stops them: running requests finish, waiting jobs are dropped.
pub struct Flight<'a> {
    queue: &'a Queue<'a>,
    completed: Receiver<Completion>,
    outstanding: usize,
    /// Without any, the calling thread runs the jobs.
    has_workers: bool,
}

impl<'a> Flight<'a> {
    /// Starts the workers in `scope`, for at most `slots` jobs at a time.
    pub fn start<'scope>(scope: &'scope Scope<'scope, 'a>, queue: &'a Queue<'a>, slots: usize) -> Self {
        let (sender, completed) = mpsc::channel();
        // Create it before the threads, so that they always end with it.
        let mut flight = Self { queue, completed, outstanding: 0, has_workers: false };
        for _ in 0..slots.min(THREADS) {
            let sender = sender.clone();
            // Fewer workers are only slower.
            if worker::spawn_scoped(scope, NAME, move || queue.serve(&sender)).is_err() {
                break;
            }
            flight.has_workers = true;
        }
        flight
    }

    /// Submits a job. Its memory must not be touched until it is completed.
    pub fn submit(&mut self, job: FileRequest) {
        self.outstanding += 1;
        self.queue.put(job);
    }

    /// Whether jobs are in flight.
    pub fn any(&self) -> bool {
        self.outstanding > 0
    }

    /// Waits for a job to complete and returns its slot.
    pub fn next_completed(&mut self) -> io::Result<usize> {
        let own = if self.has_workers { None } else { self.queue.next().map(|job| self.queue.perform(job)) };
        let completed = own.or_else(|| self.completed.recv().ok()).ok_or_else(|| io::Error::other("the I/O threads have exited"))?;
        self.take_in(completed)
    }

    /// The same without waiting.
    pub fn landed_already(&mut self) -> io::Result<Option<usize>> {
        self.completed.try_recv().ok().map(|completed| self.take_in(completed)).transpose()
    }

    fn take_in(&mut self, (slot, outcome): Completion) -> io::Result<usize> {
        self.outstanding -= 1;
        outcome.map(|()| slot)
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        self.queue.close();
    }
}

/// The threads' name.
pub(super) const NAME: &str = "vramctl-disk";
