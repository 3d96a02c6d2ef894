//! The control server inside the program: one thread accepts connections, and each connection has a thread. The first memory that the program
//! gets, managed or not, starts it. What a request asks for is done in `requests.rs`.
//!
//! No client can disturb the program, whether it sends garbage, stalls or never reads: requests are limited in size and
//! time, connections in number, and a running pause does not wait for its client.
//!
//! The only way to a program is the name of its socket, which others may delete. So the control thread looks each second whether the name
//! still leads to the socket, and otherwise creates the socket, and the directory, again. That needs neither the driver nor the gate: it
//! works for a program that is paused, held or suspended. Until then, a lock shows that the process lives (`control/presence.rs`).

use crate::connection::{AT_LIMIT, Connection, Line, Lines, PATIENCE, Seat, send};
use crate::{detach, door, holder, requests};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, Once};
use std::time::{Duration, Instant};
use std::{io, iter, mem, thread};
use vramctl_control::discovery::{self, Bound, Directory};
use vramctl_control::protocol::{Refusal, Reply};
use vramctl_host::{Held, PerProcess, Unpoison, exit, reserve, system, worker};
use vramctl_model::{Error, Kind};

/// Delay between attempts to create the socket.
const TRY_AGAIN: Duration = Duration::from_secs(5);
/// How often to check that the socket still has its name. Cleaners of `/tmp` and the end of a login session delete sockets.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Starts this process's server unless it is running. A failure is logged once and does not affect the program. Creating the
/// socket is retried, since the cause may go away.
pub fn ensure_running() {
    static STARTED: PerProcess<Once> = PerProcess::new(Once::new);
    STARTED.get().call_once(|| {
        let first = listen().inspect_err(complain);
        reserve::fill();
        if let Err(error) = worker::spawn("vramctl-control", || serve(first)) {
            log::warn!("no control socket: could not start a thread: {error}");
        }
    });
}

fn complain(error: &io::Error) {
    log::warn!("no control socket: {error}");
}

fn listen() -> io::Result<Held> {
    listen_in(&Directory::open_or_create()?)
}

fn listen_in(directory: &Directory) -> io::Result<Held> {
    let (socket, bound) = directory.bind()?;
    // A client may disconnect between `poll` and `accept`.
    socket.as_type::<UnixListener>()?.set_nonblocking(true)?;
    log::info!("listening on {}/{}.sock", directory.path().display(), std::process::id());
    *BOUND.get().lock().unpoisoned() = Some(bound);
    Ok(socket)
}

fn serve(first: io::Result<Held>) {
    let in_reserve = start_threads_in_reserve();
    let mut named = Named { socket: first.ok(), tried: Instant::now(), is_loss_logged: false };
    loop {
        if detach::is_wanted() {
            named = named.detach();
        }
        reserve::fill();
        let door = door::socket();
        let both = [named.socket.as_ref(), door.as_deref()];
        let [is_named_called, is_door_called] = wait_for_clients(both);
        if let Some(door) = door.filter(|_| is_door_called) {
            accept(&door, &in_reserve);
        }
        named = named.serve(is_named_called, &in_reserve);
    }
}

/// The socket in the directory.
struct Named {
    /// `None`: it could not be made.
    socket: Option<Held>,
    /// When that was tried last.
    tried: Instant,
    /// Whether the log says that the name was deleted and cannot be made again.
    is_loss_logged: bool,
}

impl Named {
    /// Closes everything by which the process is reached, and listens anew once it may.
    fn detach(self) -> Self {
        let bound = BOUND.get().lock().unpoisoned().take();
        door::close();
        drop(self.socket);
        detach::stay_away(bound);
        Self { socket: listen().inspect_err(complain).ok(), tried: Instant::now(), is_loss_logged: false }
    }

    /// Accepts a client if there `is_one`. Makes the socket again if the program has closed it, or if somebody has deleted its name.
    fn serve(self, is_one: bool, in_reserve: &Sender<Arc<Connection>>) -> Self {
        let Some(socket) = &self.socket else {
            if self.tried.elapsed() < TRY_AGAIN {
                return self;
            }
            let again = listen().inspect_err(|error| log::debug!("no control socket: {error}"));
            return Self { socket: again.ok(), tried: Instant::now(), ..self };
        };
        if socket.get().is_err() || is_one && !accept(socket, in_reserve) {
            // A daemonizing program closes all descriptors and then reuses the numbers for its own files.
            log::warn!("the program closed the control socket; creating a new one");
            drop(self.socket);
            return Self { socket: listen().inspect_err(complain).ok(), tried: Instant::now(), is_loss_logged: false };
        }
        if !is_lost() {
            BOUND.get().lock().unpoisoned().iter_mut().for_each(|bound| bound.told_of_deleted(2 * LOOK_EVERY));
            return self;
        }
        let again = Directory::open_or_create_again().and_then(|directory| Ok((listen_in(&directory)?, directory)));
        match again {
            Ok((new, directory)) => {
                BOUND.get().lock().unpoisoned().iter_mut().for_each(|bound| bound.tell_of_deleted(&directory));
                log::warn!("somebody has deleted the control socket; it is there again");
                Self { socket: Some(new), is_loss_logged: false, ..self }
            }
            // The next attempt may succeed: the directory is there again after the next login, say.
            Err(error) => {
                if !self.is_loss_logged {
                    log::warn!("somebody has deleted the control socket: {error}");
                }
                Self { is_loss_logged: true, ..self }
            }
        }
    }
}

/// Waits until a client calls at one of the sockets, or it is time to look at them. Returns at which.
///
/// Waits in `poll`, which takes no descriptor number. A blocked `accept` would reserve the lowest free one, and a program
/// that had closed a standard stream could not reopen it. If the program closes the socket during the wait, the next client
/// to connect is disconnected, and finds the new socket when it retries.
fn wait_for_clients(sockets: [Option<&Held>; 2]) -> [bool; 2] {
    let waiting = sockets.map(|socket| socket.and_then(|socket| socket.get().ok()));
    // Interrupted, say: then nobody calls, but somebody may.
    system::poll_all(waiting, libc::POLLIN, LOOK_EVERY).map_or([true; 2], |found| found.map(|events| events != 0))
}

/// Accepts a client that calls. `false` if the socket is closed. The reserve is lent only to a client that is there: a thread of the program that
/// asks for descriptors all the time would get what is free for a moment.
fn accept(socket: &Held, in_reserve: &Sender<Arc<Connection>>) -> bool {
    let Ok(listener) = socket.as_type::<UnixListener>() else { return false };
    match reserve::lend(2, || listener.accept().and_then(|(stream, _)| Held::new(stream))) {
        Ok(stream) => welcome(stream, in_reserve),
        // Shut down: no connection will ever arrive.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return false,
        // The client has disconnected, or there was none.
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => (),
        // Most likely out of descriptors. That is up to the program, and temporary.
        Err(error) => {
            log::debug!("accept: {error}");
            thread::sleep(Duration::from_millis(200));
        }
    }
    true
}

/// The socket that this process has bound last, which is removed at exit. The socket of a killed process stays behind until the next
/// discovery removes it. A forked child inherits the exit handler, but not the socket.
static BOUND: PerProcess<Mutex<Option<Bound>>> = PerProcess::new(remove_at_exit);

fn remove_at_exit() -> Mutex<Option<Bound>> {
    fn remove() {
        // The exit waits for no lock. Whoever has this one is replacing the socket.
        if let Some(Ok(mut last)) = BOUND.existing().map(Mutex::try_lock)
            && let Some(bound) = last.take()
        {
            bound.remove();
            // To free it could wait for `malloc`.
            mem::forget(bound);
        }
    }
    exit::at_exit(remove);
    Mutex::default()
}

/// Whether nobody finds the socket any more.
fn is_lost() -> bool {
    BOUND.get().lock().unpoisoned().as_ref().is_some_and(Bound::is_lost)
}

/// Starts the threads that serve clients when no other can be started. Two: while one client waits for a long answer, another connection
/// tells it that the process lives.
fn start_threads_in_reserve() -> Sender<Arc<Connection>> {
    let (hand_over, waiting) = mpsc::channel::<Arc<Connection>>();
    let waiting = Arc::new(Mutex::new(waiting));
    for _ in 0..2 {
        let waiting = Arc::clone(&waiting);
        let next = move || waiting.lock().unpoisoned().recv().ok();
        if let Err(error) = worker::spawn("vramctl-reserve", move || iter::from_fn(next).for_each(|connection| converse(&connection))) {
            log::debug!("could not start a thread in reserve: {error}");
        }
    }
    hand_over
}

fn welcome(held: Held, in_reserve: &Sender<Arc<Connection>>) {
    let Ok(stream) = held.as_type::<UnixStream>() else { return };
    let refuse = |stream: &UnixStream, code: Kind, why: &str| {
        let refusal = Refusal { code, ..Refusal::from(&Error::Invalid(why.to_owned())) };
        let _ = send(stream, &Reply::Error(refusal), &[], libc::MSG_DONTWAIT);
    };
    let pid = match discovery::peer(&stream) {
        Ok(peer) if peer.uid == system::user() || peer.uid == 0 => peer.pid as u32,
        Ok(_) => return refuse(&stream, Kind::Invalid, "this process belongs to another user"),
        Err(error) => return log::debug!("SO_PEERCRED: {error}"),
    };
    let Some(seat) = Seat::for_connection() else {
        return refuse(&stream, Kind::Busy, "too many connections; try again");
    };
    let connection = Connection::new(held, seat, pid);
    let its = Arc::clone(&connection);
    if let Err(error) = worker::spawn("vramctl-client", move || converse(&its)) {
        log::debug!("could not start a thread for a connection: {error}");
        connection.is_brief.store(true, Ordering::Relaxed);
        // Without any thread, the client is disconnected.
        let _ = in_reserve.send(connection);
    }
}

/// Serves one connection's requests in order, until the client disconnects or an error makes it unusable.
fn converse(connection: &Connection) {
    if connection.stream().and_then(|stream| stream.set_write_timeout(Some(PATIENCE))).is_err() {
        return;
    }
    holder::serve(connection.borrower.pid);
    let mut lines = Lines::of(connection);
    let patience = if connection.is_brief.load(Ordering::Relaxed) { AT_LIMIT } else { PATIENCE };
    loop {
        if !lines.has_begun() {
            connection.wait_while_borrowing();
        }
        let line = lines.next(patience);
        // At exit, the program waits for replies in progress, but nothing new starts.
        let Some(_answering) = exit::Answering::unless_ending() else {
            let _ = connection.send(&Reply::Error(Refusal::from(&Error::Ending)), libc::MSG_DONTWAIT);
            return;
        };
        let mut files = Vec::new();
        let (reply, end) = match line {
            Ok(Line::End) => return,
            Ok(Line::Complete(line)) if line.iter().all(u8::is_ascii_whitespace) => continue,
            Ok(Line::Complete(line)) => (requests::answer(&line, connection, &mut lines, &mut files), false),
            Ok(Line::Late) => {
                let late = Error::Invalid(format!("no complete request within {} s", patience.as_secs_f32()));
                (Reply::Error(Refusal::from(&late)), true)
            }
            Err(error) => (Reply::Error(Refusal::from(&error)), true),
        };
        let is_sent = connection.send_with(&reply, &files).is_ok();
        if reply == Reply::Detached {
            detach::want();
        }
        if !is_sent || end {
            return;
        }
    }
}
