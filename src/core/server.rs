//! The control server inside the program: one thread accepts connections, and each connection has a thread.
//!
//! No client can disturb the program, whether it sends garbage, stalls or never reads: requests are limited in size and
//! time, connections in number, and a running pause does not wait for its client.

use crate::engine;
use crate::memory::Memory;
use crate::memory::share::{Borrower, Pieces};
use crate::suspend::suspended;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, Once, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, io, mem, thread};
use vramctl_config::Config;
use vramctl_control::descriptors;
use vramctl_control::discovery::{self, Directory};
use vramctl_control::protocol::{self, Hello, LONGEST_REQUEST, ProcessStatus, Refusal, Reply, Request, Transition, VERSION};
use vramctl_host::{Held, PerProcess, exit, worker};
use vramctl_model::{Error, Kind, Observer, Progress, Report, Stage, TransitionRequest};

/// Connection limit: each connection costs the program a thread.
const MOST_CONNECTIONS: usize = 16;
/// The same for processes that have memory of this one open, which stay connected meanwhile.
const MOST_BORROWERS: usize = 128;
/// How long a client may take to complete a request or to read a reply.
const PATIENCE: Duration = Duration::from_secs(30);
/// Delay between attempts to create the socket.
const TRY_AGAIN: Duration = Duration::from_secs(5);
/// Minimum time between progress messages.
const TELL_EVERY: Duration = Duration::from_millis(50);

/// Starts this process's server unless it is running. A failure is logged once and does not affect the program. Creating the
/// socket is retried, since the cause may go away.
pub fn ensure_running() {
    static STARTED: PerProcess<Once> = PerProcess::new(Once::new);
    STARTED.get().call_once(|| {
        let first = listen().inspect_err(complain);
        if let Err(error) = worker::spawn("vramctl-control", || serve(first)) {
            log::warn!("no control socket: could not start a thread: {error}");
        }
    });
}

fn complain(error: &io::Error) {
    log::warn!("no control socket: {error}");
}

fn listen() -> io::Result<Held> {
    let directory = Directory::open_or_create()?;
    // Wrap it in `Held` at once: a child forked before then inherits the socket.
    let socket = directory.bind()?;
    // A client may disconnect between `poll` and `accept`.
    socket.set_nonblocking(true)?;
    let socket = Held::new(socket)?;
    log::info!("listening on {}/{}.sock", directory.path().display(), std::process::id());
    BOUND.get();
    Ok(socket)
}

fn serve(mut listener: io::Result<Held>) {
    loop {
        listener = match listener {
            Ok(socket) => {
                accept(&socket);
                log::warn!("the program closed the control socket; creating a new one");
                drop(socket);
                listen().inspect_err(complain)
            }
            // Another process listens there; retrying would keep disturbing it.
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => return,
            Err(_) => {
                thread::sleep(TRY_AGAIN);
                listen().inspect_err(|error| log::debug!("no control socket: {error}"))
            }
        };
    }
}

/// Exists if this process has ever bound a socket, which is removed at exit. The socket of a killed process stays behind
/// until the next discovery removes it.
static BOUND: PerProcess<()> = PerProcess::new(remove_socket_at_exit);

fn remove_socket_at_exit() {
    extern "C" fn remove() {
        let _ = panic::catch_unwind(|| {
            // A forked child inherits this handler but has no socket unless it bound one. Reopen the directory: it may have
            // been replaced.
            if BOUND.existing().is_some()
                && let Ok(Some(directory)) = Directory::open()
            {
                directory.remove(std::process::id());
            }
        });
    }
    // SAFETY: the function lives in this library, which is never unloaded.
    unsafe { libc::atexit(remove) };
}

/// Accepts connections until the program closes the socket: a daemonizing program closes all descriptors and then reuses the
/// numbers for its own files.
///
/// Waits in `poll`, which takes no descriptor number. A blocked `accept` would reserve the lowest free one, and a program
/// that had closed a standard stream could not reopen it. If the program closes the socket during the wait, the next client
/// to connect ends the wait, is disconnected, and finds the new socket when it retries.
fn accept(socket: &Held) {
    loop {
        let Ok(waiting) = socket.get() else { return };
        let mut waiting = libc::pollfd { fd: waiting.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one writable entry. The result does not matter: `accept` below checks again.
        unsafe { libc::poll(&raw mut waiting, 1, -1) };
        let Ok(listener) = socket.as_type::<UnixListener>() else { return };
        match listener.accept() {
            Ok((stream, _)) => welcome(stream),
            // Shut down: no connection will ever arrive.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return,
            // The client has disconnected.
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => (),
            // Most likely out of descriptors. That is up to the program, and temporary.
            Err(error) => {
                log::debug!("accept: {error}");
                thread::sleep(Duration::from_millis(200));
            }
        }
    }
}

fn welcome(stream: UnixStream) {
    let refuse = |stream: &UnixStream, code: Kind, why: &str| {
        let refusal = Refusal { code, ..Refusal::from(&Error::Invalid(why.to_owned())) };
        let _ = send(stream, &Reply::Error(refusal), &[], libc::MSG_DONTWAIT);
    };
    let pid = match discovery::peer(&stream) {
        Ok(peer) if peer.uid == discovery::user() || peer.uid == 0 => peer.pid as u32,
        Ok(_) => return refuse(&stream, Kind::Invalid, "this process belongs to another user"),
        Err(error) => return log::debug!("SO_PEERCRED: {error}"),
    };
    let Some(seat) = Seat::take(&CONNECTIONS, MOST_CONNECTIONS) else {
        return refuse(&stream, Kind::Busy, "too many connections; try again");
    };
    let connection = match Held::new(stream) {
        Ok(held) => Connection::new(held, seat, pid),
        Err(error) => return log::debug!("could not accept a connection: {error}"),
    };
    if let Err(error) = worker::spawn("vramctl-client", move || converse(&connection)) {
        log::debug!("could not start a thread for a connection: {error}");
    }
}

/// One of a limited number of slots.
struct Seat(&'static AtomicUsize);

static CONNECTIONS: PerProcess<AtomicUsize> = PerProcess::new(AtomicUsize::default);
static BORROWERS: PerProcess<AtomicUsize> = PerProcess::new(AtomicUsize::default);

impl Seat {
    fn take(taken: &'static PerProcess<AtomicUsize>, most: usize) -> Option<Self> {
        let more = |count| (count < most).then_some(count + 1);
        let taken = taken.get();
        taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok().map(|_| Self(taken))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

struct Connection {
    held: Held,
    seat: Mutex<Seat>,
    borrower: Borrower,
    /// Whether the client has opened memory. Then it may be silent as long as it likes.
    borrows: AtomicBool,
}

impl Drop for Connection {
    fn drop(&mut self) {
        if *self.borrows.get_mut() {
            Memory::get().take_all_back(self.borrower.connection);
        }
    }
}

impl Connection {
    fn new(held: Held, seat: Seat, pid: u32) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let borrower = Borrower { connection: NEXT.fetch_add(1, Ordering::Relaxed), pid };
        Self { held, seat: Mutex::new(seat), borrower, borrows: AtomicBool::new(false) }
    }

    /// Passes memory to the client, which no longer counts against the clients that ask and go.
    fn lend(&self, token: &str) -> Result<Pieces, Error> {
        if !self.borrows.load(Ordering::Relaxed) {
            let too_many = || Error::Invalid("too many processes have memory of this one open".into());
            let seat = Seat::take(&BORROWERS, MOST_BORROWERS).ok_or_else(too_many)?;
            *self.seat.lock().unwrap_or_else(PoisonError::into_inner) = seat;
            self.borrows.store(true, Ordering::Relaxed);
        }
        Memory::get().lend(token, &self.borrower)
    }

    /// Waits for a request of a client that has memory open.
    fn wait_while_borrowing(&self) {
        if self.borrows.load(Ordering::Relaxed)
            && let Ok(stream) = self.stream()
        {
            let mut waiting = libc::pollfd { fd: stream.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one writable entry. The result does not matter: the read that follows finds out.
            unsafe { libc::poll(&raw mut waiting, 1, -1) };
        }
    }

    fn stream(&self) -> io::Result<ManuallyDrop<UnixStream>> {
        self.held.as_type()
    }

    /// Sends a line. With `MSG_DONTWAIT` the line is dropped if the client is not reading; a line is never cut short.
    fn send(&self, reply: &Reply, flags: libc::c_int) -> io::Result<()> {
        send(&*self.stream()?, reply, &[], flags)
    }

    fn send_with(&self, reply: &Reply, files: &[OwnedFd]) -> io::Result<()> {
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        send(&*self.stream()?, reply, &files, 0)
    }
}

/// Serves one connection's requests in order, until the client disconnects or an error makes it unusable.
fn converse(connection: &Connection) {
    if connection.stream().and_then(|stream| stream.set_write_timeout(Some(PATIENCE))).is_err() {
        return;
    }
    let mut lines = Lines { connection, unread: Vec::new() };
    loop {
        if lines.unread.is_empty() {
            connection.wait_while_borrowing();
        }
        let line = lines.next();
        // At exit, the program waits for replies in progress, but nothing new starts.
        let Some(_answering) = exit::Answering::unless_ending() else {
            let _ = connection.send(&Reply::Error(Refusal::from(&Error::Ending)), libc::MSG_DONTWAIT);
            return;
        };
        let mut files = Vec::new();
        let (reply, end) = match line {
            Ok(None) => return,
            Ok(Some(line)) if line.iter().all(u8::is_ascii_whitespace) => continue,
            Ok(Some(line)) => (answer(&line, connection, &mut files), false),
            Err(error) => (Reply::Error(Refusal::from(&error)), true),
        };
        if connection.send_with(&reply, &files).is_err() || end {
            return;
        }
    }
}

fn answer(line: &[u8], connection: &Connection, files: &mut Vec<OwnedFd>) -> Reply {
    let work = || protocol::parse(line).and_then(|request| carry_out(request, connection, files));
    // A bug in the library becomes an error reply and must not end the program.
    let done = panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err(Error::Internal("a request panicked".into())));
    done.unwrap_or_else(|error| Reply::Error(Refusal::from(&error)))
}

/// `files`: descriptors to send with the reply.
fn carry_out(request: Request, connection: &Connection, files: &mut Vec<OwnedFd>) -> Result<Reply, Error> {
    let memory = Memory::get();
    if suspended().is_some() && !matches!(request, Request::Hello | Request::Status | Request::Suspend | Request::Awake) {
        return Err(Error::Suspended);
    }
    match request {
        Request::Hello => Ok(Reply::Hello(hello())),
        Request::Status => Ok(Reply::Status(ProcessStatus { process: hello(), memory: memory.status() })),
        Request::Pause(wanted) => {
            let engine = if wanted.force { None } else { engine::name() };
            transition(wanted, connection, |request, client| memory.pause(&TransitionRequest { engine, ..request }, client))
        }
        Request::Plan(wanted) => memory.plan(&TransitionRequest { engine: engine::name(), ..wanted.into() }).map(Reply::Plan),
        Request::Resume(Transition { backup, backups, .. }) if backup.is_some() || !backups.is_empty() => {
            Err(Error::Invalid("a resume takes no backup policy: it brings back what the pause kept".into()))
        }
        Request::Resume(wanted) => transition(wanted, connection, |request, client| memory.resume(&request, client)),
        Request::Suspend => memory.suspend().map(|gpus| Reply::Suspended { gpus }),
        Request::Awake => {
            memory.awake();
            Ok(Reply::Awake)
        }
        Request::SetTag { tag } => {
            memory.set_process_tag(tag.as_deref())?;
            Ok(Reply::Tag { tag })
        }
        Request::Open { token } => {
            let pieces;
            (*files, pieces) = connection.lend(&token)?.into_iter().map(|(file, bytes)| (file, bytes as u64)).unzip();
            Ok(Reply::Opened { pieces })
        }
        Request::Close { token } => {
            memory.take_back(&token, connection.borrower.connection);
            Ok(Reply::Closed)
        }
    }
}

fn transition(
    wanted: Transition,
    connection: &Connection,
    work: impl FnOnce(TransitionRequest, &mut dyn Observer) -> Result<Report, Error>,
) -> Result<Reply, Error> {
    let mut asker = Asker { connection, wants_progress: wanted.progress, told: None };
    work(wanted.into(), &mut asker).map(Reply::Done)
}

/// The client that requested a pause or resume.
struct Asker<'a> {
    connection: &'a Connection,
    wants_progress: bool,
    told: Option<(Instant, Stage)>,
}

impl Observer for Asker<'_> {
    fn progress(&mut self, now: Progress) {
        let due = self.told.is_none_or(|(when, stage)| stage != now.stage || when.elapsed() >= TELL_EVERY) || now.done == now.total;
        if self.wants_progress && due {
            self.told = Some((Instant::now(), now.stage));
            let _ = self.connection.send(&Reply::Progress(now), libc::MSG_DONTWAIT);
        }
    }

    /// A client that has only shut down its sending side still reads the reply; one that has hung up does not.
    fn is_gone(&mut self) -> Option<bool> {
        let Ok(stream) = self.connection.stream() else { return Some(true) };
        let mut socket = libc::pollfd { fd: stream.as_raw_fd(), events: 0, revents: 0 };
        // SAFETY: one writable entry; does not block.
        Some(unsafe { libc::poll(&raw mut socket, 1, 0) == 1 && socket.revents & (libc::POLLHUP | libc::POLLERR) != 0 })
    }
}

fn hello() -> Hello {
    let own = |file: &str| fs::read(format!("/proc/self/{file}")).unwrap_or_default();
    let command = own("cmdline");
    let program = String::from_utf8_lossy(&command).replace('\0', " ");
    let name = Config::get().name.clone();
    Hello {
        protocol: VERSION,
        library: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        name: name.unwrap_or_else(|| String::from_utf8_lossy(&own("comm")).trim().to_owned()),
        program: program.trim().chars().take(200).collect(),
        engine: engine::name(),
    }
}

fn send(stream: &UnixStream, reply: &Reply, files: &[BorrowedFd<'_>], flags: libc::c_int) -> io::Result<()> {
    let line = protocol::line(reply);
    let mut rest = line.as_slice();
    if !files.is_empty() {
        rest = &rest[descriptors::send(stream, rest, files)?..];
    }
    while !rest.is_empty() {
        // Once part of the line is sent, the rest must follow.
        let flags = if rest.len() == line.len() { flags } else { 0 };
        // SAFETY: `rest` is readable for its length. `MSG_NOSIGNAL`, because the program may handle SIGPIPE.
        let sent = unsafe { libc::send(stream.as_raw_fd(), rest.as_ptr().cast(), rest.len(), flags | libc::MSG_NOSIGNAL) };
        match usize::try_from(sent) {
            Ok(sent) => rest = &rest[sent..],
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => (),
                error => return Err(error),
            },
        }
    }
    Ok(())
}

/// Reads lines, limited in size and time.
struct Lines<'a> {
    connection: &'a Connection,
    unread: Vec<u8>,
}

impl Lines<'_> {
    /// The next line, including its newline; `None` if the client has hung up.
    fn next(&mut self) -> Result<Option<Vec<u8>>, Error> {
        use std::io::Read;
        let deadline = Instant::now() + PATIENCE;
        let mut seen = 0;
        loop {
            if let Some(at) = self.unread[seen..].iter().position(|byte| *byte == b'\n') {
                let rest = self.unread.split_off(seen + at + 1);
                return Ok(Some(mem::replace(&mut self.unread, rest)));
            }
            seen = self.unread.len();
            if seen > LONGEST_REQUEST {
                return Err(Error::Invalid(format!("a request is limited to {LONGEST_REQUEST} bytes")));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let late = || Error::Invalid(format!("no complete request within {} s", PATIENCE.as_secs()));
            // If the program has closed the descriptor, nobody can be told.
            let Ok(stream) = self.connection.stream() else { return Ok(None) };
            if left.is_zero() || stream.set_read_timeout(Some(left)).is_err() {
                return Err(late());
            }
            let mut part = [0; 4096];
            match (&*stream).read(&mut part) {
                Ok(0) if seen == 0 => return Ok(None),
                Ok(0) => return Err(Error::Invalid("the request ends in the middle of a line".into())),
                Ok(count) => self.unread.extend_from_slice(&part[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => return Err(late()),
                Err(_) => return Ok(None),
            }
        }
    }
}
