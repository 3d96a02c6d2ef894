//! The client side of the socket, for the command line.

use super::discovery::{self, Directory};
use super::protocol::{self, DryRun, Hello, ImageName, ProcessStatus, Refusal, Reply, Request};
use crate::descriptors;
use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use std::{fmt, fs, thread};
use vramctl_host::system;
use vramctl_model::{
    Cached, Events, GpuUse, Holdings, Kind, PauseRequest, Progress, Report, ResumeRequest, Sharing, Transition, Trimmed, milliseconds,
};

/// A connection to one process.
#[derive(Debug)]
pub struct Client {
    directory: Directory,
    pid: u32,
    /// The server's pid as seen here, which differs from `pid` if it runs in another container. 0 if it cannot be seen.
    seen_as: i32,
    stream: BufReader<UnixStream>,
    /// What has arrived of the next line, and when its first byte did.
    line: Vec<u8>,
    line_begun: Option<Instant>,
    /// Why the last request could not be sent.
    unsent: Option<io::Error>,
    /// Since when nothing has arrived, although an answer is due.
    quiet_since: Instant,
    probe: Option<Probe>,
}

/// A second connection, which another thread of a process answers if the process answers at all.
#[derive(Debug)]
struct Probe {
    begun: Instant,
    /// `None` while nobody listens: somebody may have deleted the socket or its directory, and the process soon creates them again.
    stream: Option<UnixStream>,
}

/// Why a request failed.
#[derive(Debug)]
pub enum ClientError {
    /// The process refused the request.
    Refused(Box<Refusal>),
    /// The process could not be reached, or ended.
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
            Self::Io { pid, error } if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
                write!(out, "process {pid} cannot be asked: this command has reached its limit of open files (ulimit -n): {error}")
            }
            Self::Io { pid, error } => write!(out, "process {pid} does not answer: {error}"),
        }
    }
}

impl std::error::Error for ClientError {}

/// How often to check that a silent process is alive. If it has died but a forked child holds its socket open, the socket
/// never answers and never closes.
const LOOK_AFTER: Duration = Duration::from_secs(1);

/// How long a process may take to answer `hello`, whatever else it is doing. A stopped process never answers.
const ALIVE_WITHIN: Duration = Duration::from_secs(3);

/// How long a process may take to replace a closed socket.
const NEW_SOCKET: Duration = Duration::from_millis(500);
/// How long a process with too many clients is asked again. Most clients stay for a moment.
const SEAT: Duration = Duration::from_secs(1);
/// How long it may take to notice that its socket was deleted, and to create another.
const DELETED_SOCKET: Duration = Duration::from_secs(3);

/// Whether nobody listens, or the connection was closed.
fn is_closed(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionRefused, ConnectionReset, NotFound, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionRefused | ConnectionReset | NotFound | UnexpectedEof)
}

fn ended() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "it ended before it answered")
}

/// Connects in this directory, or in the one that has its name now, if somebody has deleted it.
fn dial(directory: &Directory, pid: u32) -> io::Result<(UnixStream, Directory)> {
    match directory.connect(pid) {
        Err(error) if is_closed(&error) => {
            let now = Directory::open()?.ok_or(error)?;
            Ok((now.connect(pid)?, now))
        }
        answer => Ok((answer?, directory.clone())),
    }
}

/// Sends a request. Returns what the answer has, which must match the pattern.
macro_rules! answer {
    ($client:ident, $request:expr, $wanted:pat => $value:expr) => {
        match $client.ask($request, None, &mut |_| ())? {
            $wanted => Ok($value),
            other => Err($client.unexpected(&other)),
        }
    };
}

impl Client {
    /// Connects to a process and waits for its hello.
    pub fn connect(directory: &Directory, pid: u32) -> Result<Self, ClientError> {
        Self::greet(directory, pid).map(|(client, _)| client)
    }

    /// The same, and returns the hello, too. Retries for a moment: a process whose socket was closed notices this when somebody connects,
    /// disconnects, and opens another. One whose socket was deleted notices by itself, and one with too many clients has fewer soon.
    pub fn greet(directory: &Directory, pid: u32) -> Result<(Self, Hello), ClientError> {
        let begun = Instant::now();
        loop {
            let greeted = Self::try_connect(directory, pid).and_then(|mut client| client.hello().map(|hello| (client, hello)));
            match &greeted {
                Err(ClientError::Io { error, .. }) if is_closed(error) => (),
                Err(ClientError::Refused(refusal)) if refusal.code == Kind::Busy && begun.elapsed() < SEAT => {
                    thread::sleep(SEAT / 50);
                    continue;
                }
                _ => return greeted,
            }
            if begun.elapsed() >= NEW_SOCKET {
                let Some(why) = directory.absence_of(pid) else { return greeted };
                if begun.elapsed() >= DELETED_SOCKET {
                    return Err(ClientError::Io { pid, error: io::Error::new(io::ErrorKind::TimedOut, why.to_string()) });
                }
            }
            thread::sleep(NEW_SOCKET / 50);
        }
    }

    fn try_connect(directory: &Directory, pid: u32) -> Result<Self, ClientError> {
        let connect = || {
            let (stream, directory) = dial(directory, pid)?;
            let seen_as = discovery::peer(&stream)?.pid;
            let (stream, quiet_since) = (BufReader::new(stream), Instant::now());
            Ok(Self { directory, pid, seen_as, stream, line: Vec::new(), line_begun: None, unsent: None, quiet_since, probe: None })
        };
        connect().map_err(|error| ClientError::Io { pid, error })
    }

    /// A second handle on the connection, to close it while waiting for an answer.
    pub fn connection(&self) -> io::Result<UnixStream> {
        self.stream.get_ref().try_clone()
    }

    fn hello(&mut self) -> Result<Hello, ClientError> {
        answer!(self, Request::Hello, Reply::Hello(hello) => hello)
    }

    /// Asks for its status.
    pub fn status(&mut self) -> Result<ProcessStatus, ClientError> {
        answer!(self, Request::Status, Reply::Status(status) => status)
    }

    /// Asks for the events of its memory, from this number on.
    pub fn events(&mut self, since: u64) -> Result<Events, ClientError> {
        answer!(self, Request::Events { since, most: None }, Reply::Events(events) => events)
    }

    /// Has it record the events of its memory from now on. Returns whether it has begun now.
    pub fn record(&mut self) -> Result<bool, ClientError> {
        answer!(self, Request::Record, Reply::Recording { begun } => begun)
    }

    /// Asks what a pause or resume would do.
    pub fn plan(&mut self, transition: Transition) -> Result<DryRun, ClientError> {
        answer!(self, Request::Plan(transition), Reply::Plan(plan) => plan)
    }

    /// Pauses this one process.
    pub fn pause(&mut self, transition: PauseRequest, progress: &mut dyn FnMut(Progress)) -> Result<Report, ClientError> {
        self.transition(Request::Pause(transition), progress)
    }

    /// Resumes this one process.
    pub fn resume(&mut self, transition: ResumeRequest, progress: &mut dyn FnMut(Progress)) -> Result<Report, ClientError> {
        self.transition(Request::Resume(transition), progress)
    }

    /// The server's pid as seen from here; 0 if it cannot be seen.
    pub fn seen_as(&self) -> i32 {
        self.seen_as
    }

    /// Prepares the process for the driver's checkpoint. Returns the memory that a restore needs.
    pub fn suspend(&mut self) -> Result<Vec<GpuUse>, ClientError> {
        answer!(self, Request::Suspend, Reply::Suspended { gpus } => gpus)
    }

    /// Lets it use its driver again.
    pub fn awake(&mut self) -> Result<(), ClientError> {
        answer!(self, Request::Awake, Reply::Awake => ())
    }

    /// Has it put its paused contents into an image by these descriptors. Returns the bytes of contents, and how many of them are written.
    pub fn store(&mut self, image: ImageName, files: &[BorrowedFd<'_>]) -> Result<(u64, u64), ClientError> {
        match self.ask_with(Request::Store(image), files)? {
            Reply::Stored { bytes, written_bytes } => Ok((bytes, written_bytes)),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Gives it the descriptors by which it reads stored contents back.
    pub fn set_origin(&mut self, image: ImageName, packs: Vec<u64>, files: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        match self.ask_with(Request::Origin { image, packs }, files)? {
            Reply::Origin => Ok(()),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Asks with many descriptors, which come through a socket of their own.
    fn ask_with(&mut self, request: Request, files: &[BorrowedFd<'_>]) -> Result<Reply, ClientError> {
        let pid = self.pid;
        let send = || {
            let (here, there) = UnixStream::pair()?;
            descriptors::send_line(&here, b"\n", files, 0)?;
            Ok(there)
        };
        let there = send().map_err(|error| ClientError::Io { pid, error })?;
        self.ask(request, Some(there.as_fd()), &mut |_| ())
    }

    /// Has it close everything by which it is reached.
    pub fn detach(&mut self) -> Result<(), ClientError> {
        let detached: Result<(), ClientError> = answer!(self, Request::Detach, Reply::Detached => ());
        // It begins when somebody calls.
        let _ = detached.is_ok().then(|| self.directory.connect(self.pid));
        detached
    }

    /// Sets the tag of allocations outside regions.
    pub fn set_tag(&mut self, tag: Option<String>) -> Result<Option<String>, ClientError> {
        answer!(self, Request::SetTag { tag }, Reply::Tag { tag } => tag)
    }

    /// Has it share its GPUs so. Returns how it shares now.
    pub fn share(&mut self, sharing: Sharing) -> Result<Sharing, ClientError> {
        answer!(self, Request::Sharing(sharing), Reply::Sharing(sharing) => sharing)
    }

    /// Asks what it could give up to a scheduler, and what it has.
    pub fn holdings(&mut self) -> Result<Holdings, ClientError> {
        answer!(self, Request::Holdings, Reply::Holdings(holdings) => holdings)
    }

    /// Has it keep room for this resume, as long as this client exists, once it is its turn among those that wait on its GPUs. `waits` hears why it
    /// still waits. Returns whether there is room, and not whether nobody can make it; `None`: not by then.
    pub fn room(&mut self, resume: ResumeRequest, until: Option<Instant>, waits: &dyn Fn(&str)) -> Result<Option<bool>, ClientError> {
        self.begin(Request::Room(resume), None);
        loop {
            let left = until.map_or(Duration::MAX, |until| until.saturating_duration_since(Instant::now()));
            match self.answer(&mut |_| ())? {
                Some(Reply::Waits { why }) => waits(&why),
                Some(Reply::Room { granted }) => return Ok(Some(granted)),
                Some(other) => return Err(self.unexpected(&other)),
                None if left.is_zero() => return Ok(None),
                None => self.wait(left),
            }
        }
    }

    /// Has its inference engine reset its prefix cache, if it has one that does so. `epoch`: the scheduler's that asks.
    pub fn reset_prefix_cache(&mut self, epoch: Option<u64>) -> Result<(), ClientError> {
        answer!(self, Request::ResetPrefixCache { epoch }, Reply::PrefixCacheReset => ())
    }

    /// Asks what its own allocator holds.
    pub fn cache(&mut self) -> Result<Vec<Cached>, ClientError> {
        answer!(self, Request::Cache, Reply::Cache { cache } => cache)
    }

    /// Has its own allocator return what it has cached.
    pub fn trim(&mut self, timeout: Option<Duration>) -> Result<Trimmed, ClientError> {
        let timeout_ms = timeout.map(milliseconds);
        answer!(self, Request::Trim { timeout_ms }, Reply::Trimmed(done) => done)
    }

    /// Has it watch for less than `below` bytes free. Returns the setting.
    pub fn watch(&mut self, below: Option<u64>, trim: bool) -> Result<(u64, bool), ClientError> {
        answer!(self, Request::Watch { below_bytes: below, trim }, Reply::Watch { below_bytes, trim } => (below_bytes, trim))
    }

    /// Sends it what NVML counts for it, by the UUID of the GPU.
    pub fn counted(&mut self, gpus: BTreeMap<String, u64>) -> Result<(), ClientError> {
        answer!(self, Request::Counted { gpus }, Reply::Counted => ())
    }

    fn transition(&mut self, request: Request, progress: &mut dyn FnMut(Progress)) -> Result<Report, ClientError> {
        match self.ask(request, None, progress)? {
            Reply::Done(report) => Ok(report),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Sends a request, with a descriptor, and waits for the answer as long as the process exists. `progress` gets the progress lines.
    pub fn ask(
        &mut self,
        request: Request,
        file: Option<BorrowedFd<'_>>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Reply, ClientError> {
        self.begin(request, file);
        loop {
            if let Some(answer) = self.answer(progress)? {
                return Ok(answer);
            }
            self.wait(Duration::MAX);
        }
    }

    /// Sends a request. [`answer`](Self::answer) has the answer once that has arrived.
    pub fn begin(&mut self, request: Request, file: Option<BorrowedFd<'_>>) {
        // A server that refuses the connection says why and disconnects, perhaps before the request is sent. So an answer, or the end of the
        // process, takes precedence over a failed write.
        self.unsent = self.send(request, file, 0).err().filter(|error| !is_closed(error));
        (self.quiet_since, self.probe) = (Instant::now(), None);
    }

    /// The answer to the last request, if it has arrived. Never waits. `progress` gets the progress lines. Fails once the process has ended, or
    /// does not answer at all.
    pub fn answer(&mut self, progress: &mut dyn FnMut(Progress)) -> Result<Option<Reply>, ClientError> {
        loop {
            match self.read() {
                Ok(None) => return Ok(None),
                Ok(Some(Reply::Progress(now))) => progress(now),
                Ok(Some(Reply::Error(refusal))) => return Err(ClientError::Refused(refusal.into())),
                Ok(answer) => return Ok(answer),
                Err(error) => {
                    let error = self.unsent.take().unwrap_or(error);
                    return Err(self.failed(error));
                }
            }
        }
    }

    /// Waits until something arrives, or it is time to check whether the process lives, but no longer than this.
    fn wait(&self, most: Duration) {
        let moment = if self.probe.is_some() { NEW_SOCKET / 10 } else { LOOK_AFTER.saturating_sub(self.quiet_since.elapsed()) };
        let probe = self.probe.as_ref().and_then(|probe| probe.stream.as_ref());
        _ = system::poll_all([Some(self.as_fd()), probe.map(AsFd::as_fd)], libc::POLLIN, moment.min(most));
    }

    /// Renews the lease. Never waits: a process that does not read does not need it.
    pub fn renew(&mut self) {
        let _ = self.send(Request::Renew, None, libc::MSG_DONTWAIT);
    }

    /// What the process sends without a request: its lease has ended, or it has exited.
    pub fn unasked(&mut self) -> Option<ClientError> {
        match self.read_arrived() {
            Ok(None) => None,
            Ok(Some(Reply::Error(refusal))) => Some(ClientError::Refused(refusal.into())),
            Ok(Some(other)) => Some(self.unexpected(&other)),
            Err(error) => Some(self.failed(error)),
        }
    }

    /// Fails if the process has ended, or answers no other connection either. Checks only if it has been quiet for a while.
    fn check_alive(&mut self) -> io::Result<()> {
        if self.quiet_since.elapsed() < LOOK_AFTER {
            return Ok(());
        }
        if self.seen_as != 0 && !fs::exists(format!("/proc/{}", self.seen_as)).unwrap_or(true) {
            return Err(ended());
        }
        let mut probe = self.probe.take().unwrap_or_else(|| Probe { begun: Instant::now(), stream: None });
        let answers = self.look_at(&mut probe).or_else(|error| if is_closed(&error) { Ok(false) } else { Err(error) });
        match answers {
            Ok(true) => self.quiet_since = Instant::now(),
            Ok(false) if probe.begun.elapsed() < ALIVE_WITHIN => self.probe = Some(probe),
            _ => {
                let why = format!("no answer within {} s; is it stopped?", (LOOK_AFTER + ALIVE_WITHIN).as_secs());
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
        }
        Ok(())
    }

    /// Whether the process has answered the second connection.
    fn look_at(&self, probe: &mut Probe) -> io::Result<bool> {
        if probe.stream.is_none() {
            let (stream, _) = dial(&self.directory, self.pid)?;
            descriptors::send_line(&stream, &protocol::request_line(Request::Hello), &[], libc::MSG_DONTWAIT)?;
            probe.stream = Some(stream);
        }
        let arrived = |stream: &&UnixStream| system::poll(stream.as_fd(), libc::POLLIN, 0).is_ok_and(|found| found != 0);
        let Some(mut stream) = probe.stream.as_ref().filter(arrived) else { return Ok(false) };
        if io::Read::read(&mut stream, &mut [0])? > 0 { Ok(true) } else { Err(io::ErrorKind::TimedOut.into()) }
    }

    /// In the words of the process: it knows others by the pids of its own PID namespace.
    fn send(&mut self, mut request: Request, file: Option<BorrowedFd<'_>>, flags: libc::c_int) -> io::Result<()> {
        for pid in request.pids() {
            *pid = self.directory.pid_there(*pid, self.pid);
        }
        descriptors::send_line(self.stream.get_ref(), &protocol::request_line(request), file.as_slice(), flags)
    }

    /// The next line, if it has arrived. Fails once no more will.
    fn read(&mut self) -> io::Result<Option<Reply>> {
        let arrived = self.read_arrived()?;
        if arrived.is_none()
            && let Err(error) = self.check_alive()
        {
            // It may have answered, and then ended, since the line above.
            return self.read_arrived()?.map(Some).ok_or(error);
        }
        Ok(arrived)
    }

    /// The next line, if it has arrived.
    fn read_arrived(&mut self) -> io::Result<Option<Reply>> {
        /// Far more than the longest one, a page of events.
        const LONGEST_ANSWER: usize = 64 << 20;
        /// How long an answer may take from its first byte on.
        const COMPLETE_WITHIN: Duration = Duration::from_secs(30);
        loop {
            if self.stream.buffer().is_empty() && matches!(system::poll(self.as_fd(), libc::POLLIN, 0), Ok(0)) {
                return Ok(None);
            }
            match self.read_more() {
                Ok(true) => break,
                // Who answers may be another user's program, if root asks.
                Ok(false) if self.line.len() > LONGEST_ANSWER || self.line_begun.is_some_and(|begun| begun.elapsed() > COMPLETE_WITHIN) => {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, "its answer does not end"));
                }
                Ok(false) => (),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
                Err(error) => return Err(error),
            }
        }
        self.line_begun = None;
        let mut reply: Reply = serde_json::from_slice(&std::mem::take(&mut self.line))
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, format!("cannot parse the answer: {error}")))?;
        for pid in reply.pids() {
            *pid = self.directory.pid_here(*pid, self.pid);
        }
        Ok(Some(reply))
    }

    /// Reads what has arrived of a line. Returns whether it is complete.
    fn read_more(&mut self) -> io::Result<bool> {
        let part = self.stream.fill_buf()?;
        if part.is_empty() {
            return Err(ended());
        }
        let end = part.iter().position(|byte| *byte == b'\n').map(|at| at + 1);
        let count = end.unwrap_or(part.len());
        self.line.extend_from_slice(&part[..count]);
        self.stream.consume(count);
        let now = Instant::now();
        self.line_begun.get_or_insert(now);
        (self.quiet_since, self.probe) = (now, None);
        Ok(end.is_some())
    }

    /// The error for an answer to another question.
    pub fn unexpected(&self, reply: &Reply) -> ClientError {
        self.failed(io::Error::new(io::ErrorKind::InvalidData, format!("the answer does not match the request: {reply:?}")))
    }

    fn failed(&self, error: io::Error) -> ClientError {
        ClientError::Io { pid: self.pid, error }
    }
}

/// Readable when something of an answer has arrived.
impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.get_ref().as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixListener;

    /// Root asks everybody's programs, and one of them may be hostile.
    #[test]
    #[cfg_attr(miri, ignore = "opens a directory")]
    fn an_answer_without_an_end_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let pid = std::process::id();
        let listener = UnixListener::bind(folder.path().join(format!("{pid}.sock"))).unwrap();
        let endless = thread::spawn(move || {
            let part = vec![b'a'; 1 << 20];
            // Far more than is read of it.
            let answer = |mut stream: UnixStream| (0..1000).take_while(|_| stream.write_all(&part).is_ok()).count();
            // The first to come only looks whether somebody listens.
            listener.incoming().map(|stream| answer(stream.unwrap())).find(|sent| *sent > 10)
        });
        let refused = Client::connect(&Directory::at(folder.path()).unwrap(), pid).unwrap_err();
        assert!(refused.to_string().ends_with("its answer does not end"), "{refused}");
        assert!(endless.join().unwrap() < Some(200));
    }
}
