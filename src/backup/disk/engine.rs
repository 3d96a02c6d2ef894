//! Many requests on a file in flight: the calling thread submits [`Job`]s, threads with a request each carry them out, and
//! each comes back to the calling thread when it has ended.

use super::{ALIGNMENT, Spill, file};
use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Scope};
use std::time::Duration;
use vramctl_host::worker;

/// No more threads than this, each with a request: drives have long been busy then.
const THREADS: usize = 16;

/// How often in a row a request may come back with nothing done, a [`PAUSE`] apart, before that is an error.
const PATIENCE: u32 = 1000;

/// What a request that came back with nothing done waits before it is made again.
const PAUSE: Duration = Duration::from_millis(1);

/// What a call does with the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Write,
    Read,
}

/// One piece of staging memory on its way to or from the file. It takes as many requests as the kernel makes it take.
#[derive(Debug)]
pub struct Job {
    slot: usize,
    address: NonNull<u8>,
    bytes: usize,
    pub(super) at: u64,
    pub(super) done: usize,
    in_vain: u32,
    #[cfg(test)]
    pub(super) forced: Option<i32>,
}

// SAFETY: whoever has the job is the only one to touch the memory: the calling thread leaves it alone until the job is back.
unsafe impl Send for Job {}

/// A job that has ended: the slot of its staging memory, and how.
type Landed = (usize, io::Result<()>);

impl Job {
    /// All of `piece`, the staging memory of `slot`, at the offset `at`.
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

    /// Takes in what a request came to, bytes or a negative error code. `None`: another request is to go on from there.
    fn advance(&mut self, result: i64) -> Option<io::Result<()>> {
        #[cfg(test)]
        let result = self.forced.take().map_or(result, i64::from);
        let moved = match result {
            1.. => result as usize,
            0 => {
                let text = format!("nothing moves at byte {}", self.at + self.done as u64);
                return Some(Err(io::Error::new(io::ErrorKind::UnexpectedEof, text)));
            }
            _ if [libc::EINTR, libc::EAGAIN].contains(&(-result as i32)) && self.in_vain < PATIENCE => 0,
            _ => {
                let error = io::Error::from_raw_os_error(-result as i32);
                return Some(Err(io::Error::new(error.kind(), format!("{error}, at byte {}", self.at + self.done as u64))));
            }
        };
        // Direct requests begin at whole blocks only.
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

/// What the threads of one call share: the file, and the jobs that wait.
pub struct Queue<'a> {
    spill: &'a Spill,
    operation: Operation,
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    jobs: VecDeque<Job>,
    /// No more will come.
    closed: bool,
}

impl<'a> Queue<'a> {
    pub fn new(spill: &'a Spill, operation: Operation) -> Self {
        Self { spill, operation, waiting: Mutex::default(), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, job: Job) {
        self.lock().jobs.push_back(job);
        self.changed.notify_one();
    }

    /// Waits for a job. `None`: there are no more.
    fn next(&self) -> Option<Job> {
        let idle = |waiting: &mut Waiting| waiting.jobs.is_empty() && !waiting.closed;
        self.changed.wait_while(self.lock(), idle).unwrap_or_else(PoisonError::into_inner).jobs.pop_front()
    }

    /// Forgets the jobs that wait, and lets every thread know that there are no more.
    fn close(&self) {
        *self.lock() = Waiting { jobs: VecDeque::new(), closed: true };
        self.changed.notify_all();
    }

    /// Carries a job out in the calling thread.
    fn perform(&self, mut job: Job) -> Landed {
        loop {
            // For each request anew: the program may have closed it.
            let file = match self.spill.file() {
                Ok(file) => file,
                Err(error) => return (job.slot, Err(error)),
            };
            let bytes = job.bytes - job.done;
            #[cfg(test)]
            let bytes = self.spill.faults.shape(self.operation, &mut job, bytes);
            let (descriptor, at) = (file.as_raw_fd(), (job.at + job.done as u64) as i64);
            // SAFETY: the memory is the job's, readable and writable for that many bytes from `done` on.
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

    /// Carries jobs out one after the other until there are no more.
    fn serve(&self, landed: &Sender<Landed>) {
        while let Some(job) = self.next() {
            // Nobody waits for it any more after an error.
            drop(landed.send(self.perform(job)));
        }
    }
}

/// The calling thread's end of an engine. When it is dropped the threads end: requests that were made are waited for, jobs
/// that wait are forgotten.
pub struct Flight<'a> {
    queue: &'a Queue<'a>,
    landed: Receiver<Landed>,
    outstanding: usize,
}

impl<'a> Flight<'a> {
    /// Starts the engine in `scope`, for as many jobs at a time as there are `slots`.
    pub fn start<'scope>(scope: &'scope Scope<'scope, 'a>, queue: &'a Queue<'a>, slots: usize) -> io::Result<Self> {
        let (sender, landed) = mpsc::channel();
        // From here on, so that the threads end with it whatever happens.
        let flight = Self { queue, landed, outstanding: 0 };
        for thread in 0..slots.min(THREADS) {
            let sender = sender.clone();
            match worker::spawn_scoped(scope, NAME, move || queue.serve(&sender)) {
                Ok(_) => (),
                Err(error) if thread == 0 => return Err(error),
                // Fewer are slower and nothing else.
                Err(_) => break,
            }
        }
        Ok(flight)
    }

    /// Hands a job to the engine. Its memory is not to be touched until it has landed.
    pub fn submit(&mut self, job: Job) {
        self.outstanding += 1;
        self.queue.put(job);
    }

    /// Whether jobs are in flight.
    pub fn any(&self) -> bool {
        self.outstanding > 0
    }

    /// Waits until a job has ended. Its slot, or what went wrong.
    pub fn landed(&mut self) -> io::Result<usize> {
        let landed = self.landed.recv().map_err(|_| io::Error::other("the threads that write and read it have ended"))?;
        self.take_in(landed)
    }

    /// The same without waiting, if one has ended.
    pub fn landed_already(&mut self) -> io::Result<Option<usize>> {
        self.landed.try_recv().ok().map(|landed| self.take_in(landed)).transpose()
    }

    fn take_in(&mut self, (slot, outcome): Landed) -> io::Result<usize> {
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
