//! A client's connection: reads requests line by line, sends replies.

use crate::memory::Memory;
use crate::memory::share::{Borrower, Loan, Token};
use std::mem::{self, ManuallyDrop};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};
use std::{io, thread};
use vramctl_control::descriptors::{self, Passed};
use vramctl_control::protocol::{self, LONGEST_REQUEST, Reply};
use vramctl_host::{Held, PerProcess, Unpoison, reserve, system};
use vramctl_model::Error;

/// Connection limit: each connection costs the program a thread.
const MOST_CONNECTIONS: usize = 16;
/// How many of their requests may wait at once, for the driver or for each other: so whoever is to bring the process back is always served.
/// A request that waits has a thread even after its client is gone.
const MOST_WAITING: usize = 8;
/// The limit of connections for processes that have memory of this one open; they stay connected as long as it is open.
const MOST_BORROWERS: usize = 128;
/// How long a client may take to complete a request or to read a reply.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// How long a client may take to send a request if a thread in reserve serves it.
pub const AT_LIMIT: Duration = Duration::from_millis(500);
/// One of a limited number of slots.
pub struct Seat(&'static AtomicUsize);

static CONNECTIONS: PerProcess<AtomicUsize> = PerProcess::new(AtomicUsize::default);
static WAITING: PerProcess<AtomicUsize> = PerProcess::new(AtomicUsize::default);
static BORROWERS: PerProcess<AtomicUsize> = PerProcess::new(AtomicUsize::default);
/// Those that have a seat for a connection.
static SEATED: PerProcess<Mutex<Vec<Weak<Connection>>>> = PerProcess::new(Mutex::default);

impl Seat {
    /// For a connection. `None` if there are too many clients.
    pub fn for_connection() -> Option<Self> {
        let take = || Self::take(&CONNECTIONS, MOST_CONNECTIONS);
        take().or_else(|| {
            Connection::dismiss_those_gone();
            take()
        })
    }

    /// For a request that may wait.
    pub fn for_waiting() -> Result<Self, Error> {
        Self::take(&WAITING, MOST_WAITING)
            .ok_or_else(|| Error::Late(format!("{MOST_WAITING} requests to this process wait already, perhaps for its driver; try again")))
    }

    fn take(taken: &'static PerProcess<AtomicUsize>, most: usize) -> Option<Self> {
        let taken = taken.get();
        taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| (count < most).then_some(count + 1)).ok().map(|_| Self(taken))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

pub struct Connection {
    held: Held,
    /// `None` once the client is gone.
    seat: Mutex<Option<Seat>>,
    pub borrower: Borrower,
    /// Whether the client has opened memory. Then it has no time limit.
    borrows: AtomicBool,
    /// Whether a thread in reserve serves it, which others need, too.
    pub is_brief: AtomicBool,
}

impl Drop for Connection {
    fn drop(&mut self) {
        if *self.borrows.get_mut() {
            Memory::get().take_all_back(self.borrower.connection);
        }
        reserve::take_over(&self.held);
    }
}

impl Connection {
    pub fn new(held: Held, seat: Seat, pid: u32) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let borrower = Borrower { connection: NEXT.fetch_add(1, Ordering::Relaxed), pid };
        let new = Arc::new(Self {
            held,
            seat: Mutex::new(Some(seat)),
            borrower,
            borrows: AtomicBool::new(false),
            is_brief: AtomicBool::new(false),
        });
        let mut seated = SEATED.get().lock().unpoisoned();
        seated.retain(|connection| connection.strong_count() > 0);
        seated.push(Arc::downgrade(&new));
        new
    }

    /// Hangs up on all clients, and waits until all connections are closed, if that is within this time.
    pub fn close_all(within: Duration) -> bool {
        const LOOK_AGAIN: Duration = Duration::from_millis(1);
        let deadline = Instant::now() + within;
        loop {
            SEATED.get().lock().unpoisoned().retain(|connection| connection.strong_count() > 0);
            let open: Vec<_> = SEATED.get().lock().unpoisoned().iter().filter_map(Weak::upgrade).collect();
            for stream in open.iter().filter_map(|connection| connection.stream().ok()) {
                let _ = stream.shutdown(Shutdown::Both);
            }
            if open.is_empty() || Instant::now() >= deadline {
                return open.is_empty();
            }
            drop(open);
            thread::sleep(LOOK_AGAIN);
        }
    }

    /// Whether the client is another process.
    pub fn is_from_outside(&self) -> bool {
        self.borrower.pid != std::process::id()
    }

    /// Gives away the seats of clients that are gone, whose requests may still be waiting.
    fn dismiss_those_gone() {
        let seated: Vec<_> = SEATED.get().lock().unpoisoned().iter().filter_map(Weak::upgrade).collect();
        for connection in seated.into_iter().filter(|connection| connection.is_gone() && !connection.borrows.load(Ordering::Relaxed)) {
            *connection.seat.lock().unpoisoned() = None;
        }
    }

    /// Whether the client has hung up. One that has only shut down its sending side still reads the reply.
    pub fn is_gone(&self) -> bool {
        let Ok(stream) = self.stream() else { return true };
        system::poll(stream.as_fd(), 0, 0).is_ok_and(|found| found & (libc::POLLHUP | libc::POLLERR) != 0)
    }

    /// Passes memory to the client, which then counts against the limit for borrowers instead of that for other clients.
    pub fn lend(&self, token: &str) -> Result<Loan, Error> {
        self.takes_a_borrowers_seat()?;
        Memory::get().lend(token, &self.borrower)
    }

    /// The same for memory whose descriptor the client has imported. A client that asks for another process's memory keeps its seat.
    pub fn lend_claimed(&self, file: &Held) -> Result<(Token, Loan), Error> {
        let file = file.get().map_err(|error| Error::Invalid(error.to_string()))?;
        Memory::get().lend_claimed(file, &self.borrower, || self.takes_a_borrowers_seat())
    }

    fn takes_a_borrowers_seat(&self) -> Result<(), Error> {
        if self.is_brief.load(Ordering::Relaxed) {
            return Err(Error::Busy(Duration::ZERO));
        }
        if !self.borrows.load(Ordering::Relaxed) {
            let seat = Seat::take(&BORROWERS, MOST_BORROWERS)
                .ok_or_else(|| Error::Invalid("too many processes have memory of this one open".into()))?;
            *self.seat.lock().unpoisoned() = Some(seat);
            self.borrows.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Waits for a request of a client that has memory open.
    pub fn wait_while_borrowing(&self) {
        if self.borrows.load(Ordering::Relaxed)
            && let Ok(stream) = self.stream()
        {
            // The result does not matter: the following read detects errors.
            let _ = system::poll(stream.as_fd(), libc::POLLIN, -1);
        }
    }

    pub fn stream(&self) -> io::Result<ManuallyDrop<UnixStream>> {
        self.held.as_type()
    }

    /// Sends a line. With `MSG_DONTWAIT` the line is dropped if the client is not reading; a line is never cut short.
    pub fn send(&self, reply: &Reply, flags: libc::c_int) -> io::Result<()> {
        send(&*self.stream()?, reply, &[], flags)
    }

    pub fn send_with(&self, reply: &Reply, files: &[Held]) -> io::Result<()> {
        let files = files.iter().map(Held::get).collect::<io::Result<Vec<_>>>()?;
        send(&*self.stream()?, reply, &files, 0)
    }
}

pub fn send(stream: &UnixStream, reply: &Reply, files: &[BorrowedFd<'_>], flags: libc::c_int) -> io::Result<()> {
    descriptors::send_line(stream, &protocol::line(reply), files, flags)
}

/// The result of waiting for a line.
pub enum Line {
    /// A line, with its newline.
    Complete(Vec<u8>),
    /// None yet.
    Late,
    /// The client has disconnected.
    End,
}

/// Reads lines, limited in size and time.
pub struct Lines<'a> {
    connection: &'a Connection,
    unread: Vec<u8>,
    /// The descriptor received last, if any.
    passed: Passed,
}

impl<'a> Lines<'a> {
    pub fn of(connection: &'a Connection) -> Self {
        Self { connection, unread: Vec::new(), passed: Passed::default() }
    }

    /// Whether part of a line has arrived.
    pub fn has_begun(&self) -> bool {
        !self.unread.is_empty()
    }

    /// The descriptor that was passed with the last line.
    pub fn take_file(&mut self) -> Option<Held> {
        self.passed.files.pop()
    }

    /// The next line, if it is complete within this time.
    pub fn next(&mut self, within: Duration) -> Result<Line, Error> {
        let deadline = Instant::now() + within;
        let mut seen = 0;
        // Drop descriptors of the previous line; but if part of the next line has arrived, they may belong to it.
        if !self.has_begun() {
            self.passed.files.clear();
        }
        loop {
            if let Some(at) = self.unread[seen..].iter().position(|byte| *byte == b'\n') {
                let rest = self.unread.split_off(seen + at + 1);
                return Ok(Line::Complete(mem::replace(&mut self.unread, rest)));
            }
            seen = self.unread.len();
            if seen > LONGEST_REQUEST {
                return Err(Error::Invalid(format!("a request is limited to {LONGEST_REQUEST} bytes")));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            // If the program has closed the descriptor, the client gets no answer.
            let Ok(stream) = self.connection.stream() else { return Ok(Line::End) };
            if left.is_zero() || stream.set_read_timeout(Some(left)).is_err() {
                return Ok(Line::Late);
            }
            let mut part = [0; 4096];
            let received = descriptors::receive(&stream, &mut part, &mut self.passed);
            if self.passed.lacks_some {
                return Err(Error::Invalid(
                    "the descriptor that came with the request did not arrive: this process has reached its limit of open files (ulimit -n)".into(),
                ));
            }
            match received {
                Ok(0) if seen == 0 => return Ok(Line::End),
                Ok(0) => return Err(Error::Invalid("the request ends in the middle of a line".into())),
                Ok(count) => {
                    self.unread.extend_from_slice(&part[..count]);
                    // Keep only the last, however many a client sends.
                    let files = &mut self.passed.files;
                    files.drain(..files.len().saturating_sub(1));
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => return Ok(Line::Late),
                Err(_) => return Ok(Line::End),
            }
        }
    }
}
