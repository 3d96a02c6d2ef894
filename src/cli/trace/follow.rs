//! Following the events of processes, each in a thread of its own.

use crate::interrupt;
use crate::processes::{Found, Process};
use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};
use vramctl_control::client::{Client, ClientError};
use vramctl_model::{MemoryOwner, TraceEvent};

/// How often to ask. A ring holds 40 s of ten thousand events per second.
const EVERY: Duration = Duration::from_millis(250);
/// The most events of a process: a few hundred MiB. Beyond that the oldest go.
const MOST: usize = 4_000_000;
/// How long to wait for the last answers: a process that is stopped gives none.
const LAST: Duration = Duration::from_secs(10);

/// What a process has told.
#[derive(Debug, Default)]
pub struct Followed {
    pub pid: u32,
    pub name: String,
    /// By number.
    pub events: VecDeque<TraceEvent>,
    pub owners: BTreeMap<u16, MemoryOwner>,
    /// The time of the last answer, by the host's clock and since 1970.
    pub now_ns: u64,
    pub unix_ns: u64,
    /// Whether it records events at all.
    pub is_on: bool,
    /// Why it told no more before the end.
    pub ended: Option<String>,
}

/// For how long to follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// What is recorded already.
    Now,
    After(Duration),
    Interrupted,
}

/// Follows processes, from the oldest event that each has.
pub fn follow(found: &Found, processes: &[Process], until: Until) -> Vec<Followed> {
    interrupt::hold();
    let (tell, told) = mpsc::channel();
    let mut stops = Vec::new();
    for process in processes {
        let followed = Followed { pid: process.pid, name: process.name().unwrap_or("?").to_owned(), ..Followed::default() };
        let (stop, stopped) = mpsc::channel();
        stops.push(stop);
        let tell = tell.clone();
        if let Err(failure) = &process.status {
            _ = tell.send(Followed { ended: Some(failure.to_string()), ..followed });
            continue;
        }
        let client = found.connect(process.pid);
        // Never joined: one that gets no answer is abandoned.
        thread::spawn(move || _ = tell.send(follow_one(client, followed, &stopped)));
    }
    drop(tell);
    let mut all = wait(until, &told, processes.len());
    drop(stops);
    let deadline = Instant::now() + LAST;
    while all.len() < processes.len() {
        match told.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(followed) => all.push(followed),
            Err(_) => break,
        }
    }
    for process in processes {
        if !all.iter().any(|followed| followed.pid == process.pid) {
            let name = process.name().unwrap_or("?").to_owned();
            all.push(Followed { pid: process.pid, name, ended: Some("no answer; is it stopped?".into()), ..Followed::default() });
        }
    }
    all.sort_by_key(|followed| followed.pid);
    all
}

/// Waits for the end of the recording, or of all processes. Returns those that have ended.
fn wait(until: Until, told: &Receiver<Followed>, count: usize) -> Vec<Followed> {
    let mut ended = Vec::new();
    let begun = Instant::now();
    let is_over = || match until {
        Until::Now => true,
        Until::After(time) => interrupt::comes_within(EVERY.min(time.saturating_sub(begun.elapsed()))) || begun.elapsed() >= time,
        Until::Interrupted => interrupt::comes_within(EVERY),
    };
    while ended.len() < count && !is_over() {
        ended.extend(told.try_iter());
    }
    ended
}

fn follow_one(client: Result<Client, ClientError>, mut followed: Followed, stopped: &Receiver<()>) -> Followed {
    let mut since = 0;
    let follow = || -> Result<(), ClientError> {
        let mut client = client?;
        let mut is_last = false;
        loop {
            // At most what there is now: it may go on recording.
            loop {
                let page = client.events(since)?;
                (since, followed.is_on, followed.now_ns, followed.unix_ns) = (page.next, page.on, page.now_ns, page.unix_ns);
                followed.owners.extend(page.owners.into_iter().map(|owner| (owner.owner, owner)));
                followed.events.extend(page.events);
                let beyond = followed.events.len().saturating_sub(MOST);
                followed.events.drain(..beyond);
                if !page.more {
                    break;
                }
            }
            if is_last || !followed.is_on {
                return Ok(());
            }
            is_last = stopped.recv_timeout(EVERY) == Err(RecvTimeoutError::Disconnected);
        }
    };
    followed.ended = follow().err().map(|error| error.to_string());
    followed
}
