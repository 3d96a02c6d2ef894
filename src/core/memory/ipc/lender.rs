//! The owner of memory that this process borrows, as a server: requests over its control socket, and what its refusals mean.

use crate::memory::registry::lending::Token;
use serde::Deserialize;
use std::mem::ManuallyDrop;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use std::{io, thread};
use vramctl_control::descriptors::{self, Passed};
use vramctl_control::discovery::Directory;
use vramctl_control::door::Door;
use vramctl_control::protocol::{self, Request};
use vramctl_host::Held;
use vramctl_model::{Failure, Kind, StatusCode, code};

/// How long an owner may take to answer: it first finishes a pause or resume.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long a process may take to say whether it has exported a descriptor, on a machine that is overloaded while a job starts. Memory that its
/// owner does not speak for in time prevents pauses as long as it is there.
const CLAIMED_WITHIN: Duration = Duration::from_secs(5);
/// How long a close waits for the owner's confirmation. An owner that is stopped reads the request when it continues.
const NOTED_WITHIN: Duration = Duration::from_millis(500);
/// The first and the longest delay before a busy owner is asked again.
const ASK_AGAIN: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(100));

/// What is read of an owner's [`Reply`](protocol::Reply). Only that: the code to read all of them is large, and this one is in every process.
#[derive(Debug, Deserialize)]
#[serde(tag = "reply", rename_all = "kebab-case")]
pub(super) enum Answer {
    Opened {
        pieces: Vec<u64>,
        tag: Option<String>,
        #[serde(default)]
        pauses: u64,
        token: Option<String>,
    },
    Error {
        code: Kind,
        message: String,
        cuda_code: Option<u32>,
    },
    #[serde(other)]
    Other,
}

/// A connection to an owner.
#[derive(Debug)]
pub(super) struct Lender {
    pub(super) pid: u32,
    /// `None`: this process has hung up.
    connection: Option<Held>,
}

impl Lender {
    /// `door`: its second socket, if that is known.
    pub(super) fn connect(pid: u32, door: Option<Door>) -> io::Result<Self> {
        let named = || Directory::open()?.ok_or(io::ErrorKind::NotFound)?.connect_beside(pid);
        let stream = named().or_else(|error| match door {
            Some(door) if error.kind() != io::ErrorKind::WouldBlock => door.connect(pid).map_err(|_| error),
            _ => Err(error),
        })?;
        Ok(Self { pid, connection: Some(Held::new(stream)?) })
    }

    /// One that is not connected.
    pub(super) fn without_connection(pid: u32) -> Self {
        Self { pid, connection: None }
    }

    fn stream(&self) -> io::Result<ManuallyDrop<UnixStream>> {
        self.connection.as_ref().ok_or(io::ErrorKind::NotConnected)?.as_type()
    }

    /// Asks for the memory behind a descriptor that it may have exported.
    pub(super) fn claim(&self, file: BorrowedFd<'_>) -> io::Result<(Answer, Vec<Held>)> {
        self.exchange_with(Request::Claim, &[file], CLAIMED_WITHIN)
    }

    /// Asks for the memory behind a handle.
    pub(super) fn open(&self, token: &Token) -> io::Result<(Answer, Vec<Held>)> {
        self.exchange(Request::Open { token: token.text() }, PATIENCE)
    }

    /// Informs it that memory is closed, and waits until it knows.
    pub(super) fn close(&self, token: &Token) -> io::Result<()> {
        self.exchange(Request::Close { token: token.text() }, NOTED_WITHIN).map(drop)
    }

    /// Informs it that memory is closed, over a connection on which another answer may be outstanding.
    pub(super) fn close_unconfirmed(&self, token: &Token) {
        let said = self.stream().and_then(|stream| {
            stream.set_write_timeout(Some(NOTED_WITHIN))?;
            send(&stream, Request::Close { token: token.text() }, &[])
        });
        if let Err(error) = said {
            log::debug!("process {}: {error}", self.pid);
        }
    }

    /// Sends a request and receives the answer, with the descriptors that come with it. `TimedOut` if there is none in time.
    fn exchange(&self, request: Request, within: Duration) -> io::Result<(Answer, Vec<Held>)> {
        self.exchange_with(request, &[], within)
    }

    /// The same; descriptors go with it.
    fn exchange_with(&self, request: Request, files: &[BorrowedFd<'_>], within: Duration) -> io::Result<(Answer, Vec<Held>)> {
        let stream = self.stream()?;
        stream.set_read_timeout(Some(within))?;
        stream.set_write_timeout(Some(within))?;
        let in_time = |error: io::Error| if error.kind() == io::ErrorKind::WouldBlock { io::ErrorKind::TimedOut.into() } else { error };
        match send(&stream, request, files) {
            // An owner that is busy says so without reading the request, and disconnects.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => receive(&stream).map_err(|_| error),
            Err(error) => Err(in_time(error)),
            Ok(()) => receive(&stream).map_err(in_time),
        }
    }
}

fn send(stream: &UnixStream, request: Request, files: &[BorrowedFd<'_>]) -> io::Result<()> {
    descriptors::send_line(stream, &protocol::request_line(request), files, 0)
}

fn receive(stream: &UnixStream) -> io::Result<(Answer, Vec<Held>)> {
    let (mut answer, mut passed) = (Vec::new(), Passed::default());
    while answer.last() != Some(&b'\n') {
        let mut part = [0; 4096];
        match descriptors::receive(stream, &mut part, &mut passed) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
            Err(error) => return Err(error),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => answer.extend_from_slice(&part[..count]),
        }
    }
    // Their number is in the answer: the caller notices if some are missing.
    Ok((serde_json::from_slice(&answer)?, passed.files))
}

/// Why memory could not be opened.
pub(super) enum Refused {
    /// The program gets this code.
    Finally(StatusCode),
    /// The owner has too many connections, or has disconnected; another process may be listening.
    ForNow,
}

impl From<Failure> for Refused {
    fn from(failure: Failure) -> Self {
        Self::Finally(failure.code)
    }
}

impl Refused {
    /// What a failure to reach an owner means.
    pub(super) fn because(owner: u32, error: &io::Error) -> Self {
        use io::ErrorKind as Why;
        log::debug!("process {owner} does not share its memory: {error}");
        match error.kind() {
            // `WouldBlock` comes from `connect`: the queue is full.
            Why::WouldBlock | Why::UnexpectedEof | Why::BrokenPipe | Why::ConnectionReset | Why::NotConnected => Self::ForNow,
            // There is no such process any more, or another one has its id.
            Why::NotFound | Why::ConnectionRefused | Why::PermissionDenied => Self::Finally(code::INVALID_HANDLE),
            // It does not answer in time, or this process is short of descriptors; that does not mean the memory is lost.
            _ => Self::Finally(code::OPERATING_SYSTEM),
        }
    }
}

/// Retries what an owner has refused for now, while `wanted` says so.
pub(super) fn patiently<R>(wanted: &mut dyn FnMut() -> bool, mut attempt: impl FnMut() -> Result<R, Refused>) -> Result<R, StatusCode> {
    let deadline = Instant::now() + PATIENCE;
    let mut pause = ASK_AGAIN.0;
    loop {
        match attempt() {
            Err(Refused::Finally(code)) => return Err(code),
            Err(Refused::ForNow) if Instant::now() >= deadline || !wanted() => return Err(code::OPERATING_SYSTEM),
            Err(Refused::ForNow) => {
                thread::sleep(pause);
                pause = (2 * pause).min(ASK_AGAIN.1);
            }
            Ok(done) => return Ok(done),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory that is set aside and whose handle is stale is given up for good.
    #[test]
    fn only_a_missing_owner_makes_a_handle_stale() {
        let code = |error: io::Error| match Refused::because(1, &error) {
            Refused::Finally(code) => Some(code),
            Refused::ForNow => None,
        };
        for number in [libc::ENOENT, libc::ECONNREFUSED] {
            assert_eq!(code(io::Error::from_raw_os_error(number)), Some(code::INVALID_HANDLE));
        }
        for number in [libc::EMFILE, libc::ENFILE, libc::ENOMEM] {
            assert_eq!(code(io::Error::from_raw_os_error(number)), Some(code::OPERATING_SYSTEM));
        }
        assert_eq!(code(io::ErrorKind::UnexpectedEof.into()), None);
    }
}
