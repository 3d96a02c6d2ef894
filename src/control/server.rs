//! The server inside the program: a thread that waits for connections, and one for each connection.
//!
//! Whatever a client does (sends garbage, stops in the middle, never reads), the program does not notice: lines are
//! limited in size and time, connections in number, and a pause under way does not wait for its client.

use super::discovery::{self, Directory};
use super::protocol::{self, Hello, LONGEST_REQUEST, ProcessStatus, Refusal, Reply, Request, Transition, VERSION};
use crate::config::Config;
use crate::error::Error;
use crate::memory::{Memory, Observer, Progress, Report, Stage};
use crate::process::{self, ClosedOnFork, PerProcess, Tracked};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;
use std::time::{Duration, Instant};
use std::{fs, io, mem, thread};

/// Connections at a time. More are refused: each costs the program a thread.
const MOST_CONNECTIONS: usize = 16;
/// How long a client may take to finish a request, and to take in an answer.
const PATIENCE: Duration = Duration::from_secs(30);
/// When a socket is tried again that could not be made.
const TRY_AGAIN: Duration = Duration::from_secs(5);
/// How often progress is told, at most.
const TELL_EVERY: Duration = Duration::from_millis(50);

/// Starts the server of this process unless it is there. What goes wrong is said once, and the program goes on without; the
/// socket is tried again, for what was in its way may be mended.
pub fn ensure_running() {
    static STARTED: PerProcess<Once> = PerProcess::new(Once::new);
    STARTED.get().call_once(|| {
        let first = listen().inspect_err(complain);
        if let Err(error) = process::spawn("vramctl-control", || serve(first)) {
            log::warn!("no control socket: no thread could be started: {error}");
        }
    });
}

fn complain(error: &io::Error) {
    log::warn!("no control socket: {error}");
}

fn listen() -> io::Result<Tracking<UnixListener>> {
    let directory = Directory::open_or_create()?;
    let socket = process::above_standard(directory.bind()?)?;
    log::info!("listening on {}/{}.sock", directory.path().display(), std::process::id());
    BOUND.get();
    // Before any other thread has it: a fork in between would take the socket along.
    Ok(Tracking { tracked: track(socket.as_raw_fd()), socket })
}

/// A socket that forked children close.
struct Tracking<S> {
    /// Dropped before the socket, whose number another file may have a moment after.
    tracked: Option<Tracked>,
    socket: S,
}

fn serve(mut listener: io::Result<Tracking<UnixListener>>) {
    loop {
        listener = match listener {
            Ok(Tracking { tracked, socket }) => {
                accept(&socket);
                log::warn!("the program has closed the control socket; there is a new one");
                drop(tracked);
                // Closed already: its number may be another file's.
                mem::forget(socket);
                listen().inspect_err(complain)
            }
            // Whoever listens there is not to be bothered again and again.
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => return,
            Err(_) => {
                thread::sleep(TRY_AGAIN);
                listen().inspect_err(|error| log::debug!("no control socket: {error}"))
            }
        };
    }
}

/// There if this process has had a socket of its own, which is removed at its end. That of one that is killed stays; whoever
/// looks for processes next removes it.
static BOUND: PerProcess<()> = PerProcess::new(remove_socket_at_exit);

fn remove_socket_at_exit() {
    extern "C" fn remove() {
        let _ = panic::catch_unwind(|| {
            // A forked child has this handler, too, and no socket unless it has made one. The directory anew: it may be another.
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

/// Takes connections until the number is not the socket's any more: a program that goes into the background closes all
/// descriptors, and has files of its own under the numbers.
fn accept(socket: &UnixListener) {
    let identity = process::identity(socket.as_raw_fd());
    loop {
        wait_for_standard_streams(socket);
        if identity.is_none() || process::identity(socket.as_raw_fd()) != identity {
            return;
        }
        // While this waits, the socket stays, whatever becomes of its number.
        match socket.accept().and_then(|(stream, _)| process::above_standard(stream)) {
            Ok(stream) => welcome(stream),
            // Shut down: there will never be another connection.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return,
            // Out of descriptors, most likely: the program's affair, and over some day.
            Err(error) => {
                log::debug!("accept: {error}");
                thread::sleep(Duration::from_millis(200));
            }
        }
    }
}

/// Waits for a connection without taking it, where a standard stream is closed: a blocked `accept` holds the lowest free
/// number, and the program could not open the stream again.
fn wait_for_standard_streams(socket: &UnixListener) {
    // SAFETY: the call touches no memory.
    let is_open = |stream| unsafe { libc::fcntl(stream, libc::F_GETFD) } >= 0;
    if !(libc::STDIN_FILENO..=libc::STDERR_FILENO).all(is_open) {
        let mut waiting = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry that is writable. Without an answer, `accept` waits.
        unsafe { libc::poll(&raw mut waiting, 1, -1) };
    }
}

fn welcome(stream: UnixStream) {
    let refuse = |why: &str| {
        let refusal = Reply::Error(Refusal::from(&Error::Invalid(why.to_owned())));
        let _ = Peer(&stream).send(&refusal, libc::MSG_DONTWAIT);
    };
    match discovery::peer(&stream) {
        Ok(peer) if peer.uid == discovery::user() || peer.uid == 0 => (),
        Ok(_) => return refuse("this process belongs to another user"),
        Err(error) => return log::debug!("SO_PEERCRED: {error}"),
    }
    let Some(tracked) = track(stream.as_raw_fd()) else {
        return refuse("too many connections at a time; try again");
    };
    let connection = Tracking { tracked: Some(tracked), socket: stream };
    if let Err(error) = process::spawn("vramctl-client", move || converse(&connection)) {
        log::debug!("no thread for a connection: {error}");
    }
}

/// Answers the requests of one connection, one after the other, until the client hangs up or cannot be talked to.
fn converse(connection: &Tracking<UnixStream>) {
    let stream = &connection.socket;
    if stream.set_write_timeout(Some(PATIENCE)).is_err() {
        return;
    }
    let mut lines = Lines { stream, unread: Vec::new() };
    let peer = Peer(stream);
    loop {
        let (reply, end) = match lines.next() {
            Ok(None) => return,
            Ok(Some(line)) if line.iter().all(u8::is_ascii_whitespace) => continue,
            Ok(Some(line)) => (answer(&line, peer), false),
            Err(error) => (Reply::Error(Refusal::from(&error)), true),
        };
        if peer.send(&reply, 0).is_err() || end {
            return;
        }
    }
}

fn answer(line: &[u8], peer: Peer<'_>) -> Reply {
    let work = || protocol::parse(line).and_then(|request| carry_out(request, peer));
    // A defect of ours is the client's answer, not the program's end.
    let done = panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err(Error::Internal("a request panicked".into())));
    done.unwrap_or_else(|error| Reply::Error(Refusal::from(&error)))
}

fn carry_out(request: Request, peer: Peer<'_>) -> Result<Reply, Error> {
    let memory = Memory::get();
    match request {
        Request::Hello => Ok(Reply::Hello(hello())),
        Request::Status => Ok(Reply::Status(ProcessStatus { process: hello(), memory: memory.status() })),
        Request::Pause(wanted) => transition(wanted, peer, |request, client| memory.pause(request, client)),
        Request::Resume(Transition { backup, backups, .. }) if backup.is_some() || !backups.is_empty() => {
            Err(Error::Invalid("a resume takes no backup policy: it brings back what the pause kept".into()))
        }
        Request::Resume(wanted) => transition(wanted, peer, |request, client| memory.resume(request, client)),
        Request::SetTag { tag } => {
            memory.set_process_tag(tag.as_deref())?;
            Ok(Reply::Tag { tag })
        }
    }
}

fn transition(
    wanted: Transition,
    peer: Peer<'_>,
    work: impl FnOnce(&crate::memory::Request, &mut dyn Observer) -> Result<Report, Error>,
) -> Result<Reply, Error> {
    let mut client = Client { peer, wants_progress: wanted.progress, told: None };
    work(&wanted.into(), &mut client).map(Reply::Done)
}

/// The client of a pause or resume.
struct Client<'a> {
    peer: Peer<'a>,
    wants_progress: bool,
    told: Option<(Instant, Stage)>,
}

impl Observer for Client<'_> {
    fn progress(&mut self, now: Progress) {
        let due = self.told.is_none_or(|(when, stage)| stage != now.stage || when.elapsed() >= TELL_EVERY) || now.done == now.total;
        if self.wants_progress && due {
            self.told = Some((Instant::now(), now.stage));
            let _ = self.peer.send(&Reply::Progress(now), libc::MSG_DONTWAIT);
        }
    }

    /// A client that has only stopped sending still reads the answer; one that has hung up does not.
    fn is_gone(&mut self) -> Option<bool> {
        let mut socket = libc::pollfd { fd: self.peer.0.as_raw_fd(), events: 0, revents: 0 };
        // SAFETY: one entry that is writable; does not block.
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
        engine: process::engine(),
    }
}

/// The client's end of the connection, for answers.
#[derive(Clone, Copy)]
struct Peer<'a>(&'a UnixStream);

impl Peer<'_> {
    /// Sends a line. With `MSG_DONTWAIT` it is left out if the client is not reading; a line is never sent in part.
    fn send(self, reply: &Reply, flags: libc::c_int) -> io::Result<()> {
        let line = protocol::line(reply);
        let mut rest = line.as_slice();
        while !rest.is_empty() {
            // Once a part is out, the rest must follow.
            let flags = if rest.len() == line.len() { flags } else { 0 };
            // SAFETY: `rest` is readable for its length. No SIGPIPE: the program may have a handler for it.
            let sent = unsafe { libc::send(self.0.as_raw_fd(), rest.as_ptr().cast(), rest.len(), flags | libc::MSG_NOSIGNAL) };
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
}

/// Reads lines within limits.
struct Lines<'a> {
    stream: &'a UnixStream,
    unread: Vec<u8>,
}

impl Lines<'_> {
    /// The next line without its newline; `None` when the client has hung up.
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
                return Err(Error::Invalid(format!("a request may have {LONGEST_REQUEST} bytes")));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let late = || Error::Invalid(format!("no complete request within {} s", PATIENCE.as_secs()));
            if left.is_zero() || self.stream.set_read_timeout(Some(left)).is_err() {
                return Err(late());
            }
            let mut part = [0; 4096];
            match self.stream.read(&mut part) {
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

/// The listener and the connections.
static DESCRIPTORS: ClosedOnFork<{ MOST_CONNECTIONS + 1 }> = ClosedOnFork::new();

/// Has a forked child find it closed. `None`: there are too many.
fn track(descriptor: RawFd) -> Option<Tracked> {
    extern "C" fn close_in_child() {
        DESCRIPTORS.close_in_child();
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| process::on_fork_in_child(close_in_child));
    DESCRIPTORS.track(descriptor)
}
