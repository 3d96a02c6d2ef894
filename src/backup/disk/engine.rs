//! Many requests on a file in flight: the calling thread submits [`Job`]s, one thread of the library with an `io_uring`,
//! or several with a request each, carry them out, and each comes back to the calling thread when it has ended.
//!
//! Why is the ring not the calling thread's own? The kernel gives a thread that has ever used one helper threads, of
//! which some stay, waking up every few seconds, until *that* thread ends; and the calling thread may be the program's,
//! which does not end and takes the program's signals in the middle of a request.

use super::{ALIGNMENT, Engine, Spill, file};
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use std::collections::VecDeque;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, Scope};
use std::time::Duration;
use std::{io, slice};
use vramctl_host::{above_standard, worker};

/// No more threads than this, each with a request: drives have long been busy then.
const THREADS: usize = 16;

/// How often in a row a request may come back with nothing done, a [`PAUSE`] apart, before that is an error.
const PATIENCE: u32 = 1000;

/// What a request that came back with nothing done waits before it is made again.
const PAUSE: Duration = Duration::from_millis(1);

/// The most that one request asks for; the kernel's own limit is a little below 2 GiB.
const REQUEST: usize = 1 << 30;

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
    waiting: Mutex<VecDeque<Job>>,
    /// A semaphore with one token for each waiting job; a token without a job says that no more will come. A descriptor,
    /// so that a ring can wait for it and for its requests at once.
    tokens: File,
}

impl<'a> Queue<'a> {
    pub fn new(spill: &'a Spill, operation: Operation) -> io::Result<Self> {
        // SAFETY: the call touches no memory.
        let descriptor = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_SEMAPHORE) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just opened, and nobody else's.
        let tokens = File::from(above_standard(unsafe { OwnedFd::from_raw_fd(descriptor) })?);
        Ok(Self { spill, operation, waiting: Mutex::default(), tokens })
    }

    fn put(&self, job: Job) {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).push_back(job);
        self.add_tokens(1);
    }

    /// The job that belongs to a token just taken.
    fn take(&self) -> Option<Job> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    /// Waits for a job.
    fn next(&self) -> Option<Job> {
        let mut token = [0; size_of::<u64>()];
        loop {
            match (&self.tokens).read(&mut token) {
                Ok(_) => return self.take(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return None,
            }
        }
    }

    /// Forgets the jobs that wait, and lets everybody who looks for one know that there are no more.
    fn close(&self) {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.add_tokens(2 * THREADS as u64);
    }

    fn add_tokens(&self, count: u64) {
        // SAFETY: eight readable bytes. The call fails only when the count would pass 2^64.
        unsafe { libc::write(self.tokens.as_raw_fd(), (&raw const count).cast(), size_of::<u64>()) };
    }

    /// The request that is to be made next for a job: address, bytes, offset.
    #[cfg_attr(not(test), expect(clippy::unused_self, reason = "it has the tests' faults"))]
    fn request(&self, job: &mut Job) -> (*mut u8, u32, u64) {
        let rest = REQUEST.min(job.bytes - job.done);
        #[cfg(test)]
        let rest = self.spill.faults.shape(self.operation, job, rest);
        // SAFETY: `done` is less than the memory's size.
        (unsafe { job.address.as_ptr().add(job.done) }, rest as u32, job.at + job.done as u64)
    }

    /// Carries a job out in the calling thread.
    fn perform(&self, mut job: Job) -> Landed {
        loop {
            // For each request anew: the program may have closed it.
            let file = match self.spill.file() {
                Ok(file) => file,
                Err(error) => return (job.slot, Err(error)),
            };
            let descriptor = file.as_raw_fd();
            let (address, bytes, at) = self.request(&mut job);
            // SAFETY: the memory is the job's, readable and writable for that many bytes.
            let result = unsafe {
                match self.operation {
                    Operation::Write => libc::pwrite64(descriptor, address.cast(), bytes as usize, at as i64),
                    Operation::Read => libc::pread64(descriptor, address.cast(), bytes as usize, at as i64),
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

/// The calling thread's end of an engine. When it is dropped the engine ends: requests that were made are waited for, jobs
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
        worker::spawn_scoped(scope, NAME, move || run(scope, queue, slots, &sender))?;
        Ok(Self { queue, landed, outstanding: 0 })
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

/// The engine's first thread: with a ring where there can be one, else one of several.
fn run<'scope, 'a>(scope: &'scope Scope<'scope, 'a>, queue: &'a Queue<'a>, slots: usize, landed: &Sender<Landed>) {
    // Through the page cache a ring would only move the work to threads of the kernel.
    let ring = match queue.spill.engine {
        Engine::Best if queue.spill.direct => Ring::new(queue, slots, landed).inspect_err(|error| log::debug!("no io_uring: {error}")).ok(),
        _ => None,
    };
    match ring {
        Some(mut ring) => ring.serve(),
        None => {
            for _ in 1..slots.min(THREADS) {
                let landed = landed.clone();
                // Fewer threads are slower and nothing else.
                let Ok(_) = worker::spawn_scoped(scope, NAME, move || queue.serve(&landed)) else { break };
            }
        }
    }
    // What a ring did not live to see.
    queue.serve(landed);
}

/// An `io_uring` with requests of jobs in it, and one for a token of the queue.
struct Ring<'a> {
    kernel: IoUring,
    queue: &'a Queue<'a>,
    landed: &'a Sender<Landed>,
    /// The jobs that have a request in the ring, by slot.
    flying: Vec<Option<Job>>,
    in_flight: usize,
    /// Where the kernel puts a token.
    token: Box<u64>,
    /// The kernel has refused requests in a way that will not pass.
    refused: bool,
}

/// Stands for the token's request where else a slot stands.
const TOKEN: u64 = u64::MAX;

impl<'a> Ring<'a> {
    fn new(queue: &'a Queue<'a>, slots: usize, landed: &'a Sender<Landed>) -> io::Result<Self> {
        /// The kernel's own limit. Requests are submitted one by one, so that fewer entries than slots will do.
        const ENTRIES: usize = 4096;
        #[cfg(test)]
        queue.spill.faults.set_up()?;
        // A forked child is not to reach the ring.
        let ring = IoUring::builder().dontfork().build((slots + 1).min(ENTRIES) as u32)?;
        // Kernels before 5.7 would block a thread of theirs on the token, or do not know the operations at all.
        if !ring.params().is_feature_fast_poll() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let flying = (0..slots).map(|_| None).collect();
        Ok(Self { kernel: ring, queue, landed, flying, in_flight: 0, token: Box::default(), refused: false })
    }

    /// Carries jobs out until there are no more, or until the ring takes no more. No request is in it when this returns.
    fn serve(&mut self) {
        let mut listening = self.listen();
        while listening || self.in_flight > 0 {
            self.wait();
            while let Some(entry) = self.ended() {
                match (entry.user_data(), entry.result()) {
                    (TOKEN, 0..) => {
                        let job = self.queue.take();
                        listening = job.is_some();
                        if let Some(job) = job {
                            self.fly(job, squeue::Flags::empty());
                            listening = self.listen();
                        }
                    }
                    (TOKEN, _) => listening = self.listen(),
                    (slot, result) => self.land(slot as usize, result),
                }
            }
        }
    }

    fn ended(&mut self) -> Option<cqueue::Entry> {
        self.kernel.completion().next()
    }

    /// Asks for a token.
    fn listen(&mut self) -> bool {
        let token = slice::from_mut(&mut *self.token);
        let read = opcode::Read::new(types::Fd(self.queue.tokens.as_raw_fd()), token.as_mut_ptr().cast(), size_of::<u64>() as u32);
        // SAFETY: the box outlives the request, since `serve` waits for it.
        unsafe { self.submit(&read.build().user_data(TOKEN)) }
    }

    /// Makes a job's next request.
    fn fly(&mut self, mut job: Job, flags: squeue::Flags) {
        // Where the program has closed it, `perform` finds that out and says so.
        let Ok(file) = self.queue.spill.file() else { return drop(self.landed.send(self.queue.perform(job))) };
        let file = types::Fd(file.as_raw_fd());
        let (address, bytes, at) = self.queue.request(&mut job);
        let entry = match self.queue.operation {
            Operation::Write => opcode::Write::new(file, address, bytes).offset(at).build(),
            Operation::Read => opcode::Read::new(file, address, bytes).offset(at).build(),
        };
        let slot = job.slot;
        // SAFETY: the job's memory is left alone until it has landed.
        if unsafe { self.submit(&entry.user_data(slot as u64).flags(flags)) } {
            self.flying[slot] = Some(job);
            self.in_flight += 1;
        } else {
            drop(self.landed.send(self.queue.perform(job)));
        }
    }

    /// A request has ended.
    fn land(&mut self, slot: usize, result: i32) {
        let Some(mut job) = self.flying[slot].take() else { return };
        self.in_flight -= 1;
        match job.advance(result.into()) {
            // In a thread of the kernel's, where a request may wait for what was not there at once.
            None => self.fly(job, squeue::Flags::ASYNC),
            // Nobody waits for it any more after an error.
            Some(outcome) => drop(self.landed.send((slot, outcome))),
        }
    }

    /// Whether the kernel has taken a request. If not, it never will.
    ///
    /// # Safety
    /// The request's memory stays as it is until the request has ended.
    unsafe fn submit(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: as promised by the caller.
        if self.refused || unsafe { self.kernel.submission().push(entry) }.is_err() {
            return false;
        }
        for _ in 0..PATIENCE {
            #[cfg(test)]
            let submitted = self.queue.spill.faults.enter().and_then(|()| self.kernel.submit());
            #[cfg(not(test))]
            let submitted = self.kernel.submit();
            if self.kernel.submission().is_empty() {
                return true;
            }
            match submitted.map_err(|error| error.raw_os_error()) {
                Ok(_) | Err(Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => thread::sleep(PAUSE),
                Err(_) => break,
            }
        }
        // The request stays in the queue, which is never handed over again.
        self.refused = true;
        false
    }

    /// Waits until a request has ended, and hands none over.
    fn wait(&self) {
        const GETEVENTS: u32 = 1;
        // SAFETY: the call has no argument that points anywhere.
        let waited = unsafe { self.kernel.submitter().enter::<libc::sigset_t>(0, 1, GETEVENTS, None) };
        // The caller looks again whatever the reason, but does not spin.
        if waited.is_err_and(|error| error.kind() != io::ErrorKind::Interrupted) {
            thread::sleep(PAUSE);
        }
    }
}
