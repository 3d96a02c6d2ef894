//! The client's side of the socket, for the command line.

use super::discovery::{self, Directory};
use super::protocol::{self, Hello, Message, ProcessStatus, Refusal, Reply, Request, Transition, VERSION};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use std::{fmt, fs};
use vramctl_model::{Plan, Progress, Report};

/// A connection to one process.
#[derive(Debug)]
pub struct Client {
    pid: u32,
    /// The server as this process sees it: in another container its name says a different number. 0: it cannot be seen.
    seen_as: i32,
    stream: BufReader<UnixStream>,
}

/// Why there is no answer, or not the one that was hoped for.
#[derive(Debug)]
pub enum ClientError {
    /// The process refused the request.
    Refused(Box<Refusal>),
    /// The process cannot be reached, or went away.
    Io {
        /// The process.
        pid: u32,
        /// What went wrong.
        error: io::Error,
    },
}

impl fmt::Display for ClientError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(refusal) => out.write_str(&refusal.message),
            Self::Io { pid, error } => write!(out, "process {pid} does not answer: {error}"),
        }
    }
}

impl std::error::Error for ClientError {}

/// How often a silent process is looked at: one that died while a forked child of it still holds its socket would never
/// answer, and never hang up.
const LOOK_AFTER: Duration = Duration::from_secs(1);

impl Client {
    /// Connects to a process.
    pub fn connect(directory: &Directory, pid: u32) -> Result<Self, ClientError> {
        let connect = || {
            let stream = directory.connect(pid)?;
            stream.set_read_timeout(Some(LOOK_AFTER))?;
            let seen_as = discovery::peer(&stream)?.pid;
            Ok(Self { pid, seen_as, stream: BufReader::new(stream) })
        };
        connect().map_err(|error| ClientError::Io { pid, error })
    }

    /// The connection once more, to hang up while an answer is being waited for.
    pub fn connection(&self) -> io::Result<UnixStream> {
        self.stream.get_ref().try_clone()
    }

    /// Who it is.
    pub fn hello(&mut self) -> Result<Hello, ClientError> {
        match self.ask(Request::Hello, &mut |_| ())? {
            Reply::Hello(hello) => Ok(hello),
            other => Err(self.unexpected(&other)),
        }
    }

    /// What it has.
    pub fn status(&mut self) -> Result<ProcessStatus, ClientError> {
        match self.ask(Request::Status, &mut |_| ())? {
            Reply::Status(status) => Ok(status),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Pauses.
    pub fn pause(&mut self, transition: Transition, progress: &mut dyn FnMut(Progress)) -> Result<Report, ClientError> {
        self.transition(Request::Pause(transition), progress)
    }

    /// What such a pause would do.
    pub fn plan(&mut self, transition: Transition) -> Result<Plan, ClientError> {
        match self.ask(Request::Plan(transition), &mut |_| ())? {
            Reply::Plan(plan) => Ok(plan),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Resumes.
    pub fn resume(&mut self, transition: Transition, progress: &mut dyn FnMut(Progress)) -> Result<Report, ClientError> {
        self.transition(Request::Resume(transition), progress)
    }

    /// Sets the tag of allocations outside regions.
    pub fn set_tag(&mut self, tag: Option<String>) -> Result<Option<String>, ClientError> {
        match self.ask(Request::SetTag { tag }, &mut |_| ())? {
            Reply::Tag { tag } => Ok(tag),
            other => Err(self.unexpected(&other)),
        }
    }

    fn transition(&mut self, request: Request, progress: &mut dyn FnMut(Progress)) -> Result<Report, ClientError> {
        match self.ask(request, progress)? {
            Reply::Done(report) => Ok(report),
            other => Err(self.unexpected(&other)),
        }
    }

    fn ask(&mut self, request: Request, progress: &mut dyn FnMut(Progress)) -> Result<Reply, ClientError> {
        let pid = self.pid;
        let fail = move |error| ClientError::Io { pid, error };
        let written = self.stream.get_mut().write_all(&protocol::line(&Message { version: VERSION, request }));
        loop {
            match self.read() {
                Ok(Reply::Progress(now)) => progress(now),
                Ok(Reply::Error(refusal)) => return Err(ClientError::Refused(refusal.into())),
                Ok(answer) => return Ok(answer),
                // A server that refuses the connection says why and hangs up, perhaps before the request is out. So the
                // answer counts, and that the request did not get through only where there is none.
                Err(error) => return Err(fail(written.err().unwrap_or(error))),
            }
        }
    }

    fn read(&mut self) -> io::Result<Reply> {
        let mut line = Vec::new();
        loop {
            match self.stream.read_until(b'\n', &mut line) {
                Ok(_) if line.last() == Some(&b'\n') => break,
                Ok(_) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it ended before it answered")),
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    if self.seen_as != 0 && !fs::exists(format!("/proc/{}", self.seen_as)).unwrap_or(true) {
                        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it ended before it answered"));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
                Err(error) => return Err(error),
            }
        }
        serde_json::from_slice(&line)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, format!("an answer not understood: {error}")))
    }

    fn unexpected(&self, reply: &Reply) -> ClientError {
        let error = io::Error::new(io::ErrorKind::InvalidData, format!("an answer that does not fit the question: {reply:?}"));
        ClientError::Io { pid: self.pid, error }
    }
}
