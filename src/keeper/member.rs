//! A member, as the scheduler has it: its connection, and what it said last.

use crate::memo::Memo;
use crate::news::News;
use std::collections::BTreeSet;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};
use vramctl_control::discovery::Directory;
use vramctl_control::protocol::{self, Reply, Request};
use vramctl_model::{MemberState, Order};
use vramctl_scheduler::{ProgramId, Settings};

/// A member that has said how it is.
#[derive(Debug)]
pub struct Member {
    /// The scheduler's number for it.
    pub program: ProgramId,
    /// The name that people gave it.
    pub name: String,
    /// What it said last.
    pub state: MemberState,
    /// When.
    pub heard: Instant,
    /// Whether somebody else than the scheduler holds it, as of the last look.
    pub paused: bool,
    /// What the policy was told last of how it shares, and of those that have its memory open or the other way round.
    pub settings: Settings,
    pub partners: BTreeSet<ProgramId>,
    /// What was left with it last for the next scheduler, and when.
    pub memo: Option<(Memo, Duration)>,
    /// The connection.
    pub line: Line,
}

/// A connection to a member.
#[derive(Debug)]
pub struct Line(UnixStream);

impl Line {
    /// Connects, and has the member tell its states as [`News`], until it ends or refuses.
    pub fn open(directory: &Directory, pid: u32, epoch: u64, news: Sender<News>) -> io::Result<Self> {
        let stream = directory.connect(pid)?;
        stream.set_write_timeout(Some(Duration::from_secs(2)))?;
        let mut line = Self(stream.try_clone()?);
        line.send(Request::Share { epoch })?;
        thread::Builder::new().name(format!("member-{pid}")).spawn(move || listen(stream, pid, &news))?;
        Ok(line)
    }

    /// Tells it something. A member that does not take it has ended, or will be noticed to be silent.
    pub fn order(&mut self, order: Order) {
        let _ = self.send(Request::Order(order));
    }

    fn send(&mut self, request: Request) -> io::Result<()> {
        self.0.write_all(&protocol::request_line(request))
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let _ = self.0.shutdown(std::net::Shutdown::Both);
    }
}

fn listen(stream: UnixStream, pid: u32, news: &Sender<News>) {
    for line in BufReader::new(stream).lines() {
        let told = match line.ok().and_then(|line| serde_json::from_str(&line).ok()) {
            Some(Reply::Member(state)) => News::State(pid, state),
            Some(Reply::Error(refusal)) => News::Refused(pid, refusal),
            _ => break,
        };
        if news.send(told).is_err() {
            return;
        }
    }
    let _ = news.send(News::Gone(pid));
}
