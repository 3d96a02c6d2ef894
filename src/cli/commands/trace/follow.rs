//! Follows the events of processes, each in its own thread.

use crate::ui::interrupt;
use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};
use vramctl_control::client::{Client, ClientError};
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::parallel;
use vramctl_coordinator::processes::{Found, Process};
use vramctl_model::{Events, MemoryOwner, TraceEvent};

/// How often to ask. A ring holds 40 s of ten thousand events per second.
const EVERY: Duration = Duration::from_millis(250);
/// The most events of a process: a few hundred MiB. Beyond that the oldest are dropped.
const MOST: usize = 4_000_000;
/// How long to wait for the last answers: a stopped process gives none.
const LAST: Duration = Duration::from_secs(10);

/// The events received from a process.
#[derive(Debug, Clone, Default)]
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
    /// Why its events stopped before the end.
    pub ended: Option<CommandError>,
}

/// How long to follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// Only events recorded already.
    Now,
    After(Duration),
    Interrupted,
}

/// Follows processes, from the oldest event that each has.
pub fn follow(found: &Found, processes: &[Process], until: Until) -> Vec<Followed> {
    interrupt::hold_ends();
    let (ended, all_ended) = mpsc::channel();
    let mut stops = Vec::new();
    for process in processes {
        let followed = Followed { pid: process.pid, name: process.name().unwrap_or("?").to_owned(), ..Followed::default() };
        let (stop, stopped) = mpsc::channel();
        stops.push(stop);
        let ended = ended.clone();
        if let Err(failure) = &process.status {
            _ = ended.send(Followed { ended: Some(failure.clone()), ..followed });
            continue;
        }
        let (client, result) = (found.connect(process.pid), ended.clone());
        let lost = followed.clone();
        // Never joined: one that gets no answer is abandoned.
        if let Err(error) = parallel::spawn(move || _ = result.send(follow_one(client, followed, &stopped))) {
            _ = ended.send(Followed { ended: Some(parallel::refused(&error)), ..lost });
        }
    }
    drop(ended);
    let mut all = wait(until, &all_ended, processes.len());
    drop(stops);
    let deadline = Instant::now() + LAST;
    while all.len() < processes.len() {
        match all_ended.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(followed) => all.push(followed),
            Err(_) => break,
        }
    }
    for process in processes {
        if !all.iter().any(|followed| followed.pid == process.pid) {
            let name = process.name().unwrap_or("?").to_owned();
            let ended = Some(CommandError::new(Exit::Busy, "no answer; is it stopped?"));
            all.push(Followed { pid: process.pid, name, ended, ..Followed::default() });
        }
    }
    all.sort_by_key(|followed| followed.pid);
    all
}

/// Waits for the end of the recording, or of all processes. Returns the finished ones.
fn wait(until: Until, all_ended: &Receiver<Followed>, count: usize) -> Vec<Followed> {
    let mut ended = Vec::new();
    let begun = Instant::now();
    let is_over = || match until {
        Until::Now => true,
        Until::After(time) => interrupt::comes_within(EVERY.min(time.saturating_sub(begun.elapsed()))) || begun.elapsed() >= time,
        Until::Interrupted => interrupt::comes_within(EVERY),
    };
    while ended.len() < count && !is_over() {
        ended.extend(all_ended.try_iter());
    }
    ended
}

fn follow_one(client: Result<Client, ClientError>, mut followed: Followed, stopped: &Receiver<()>) -> Followed {
    let mut since = 0;
    let follow = || -> Result<(), ClientError> {
        let mut client = client?;
        let mut is_last = false;
        loop {
            followed.catch_up(&mut since, |since| client.events(since))?;
            if is_last || !followed.is_on {
                return Ok(());
            }
            is_last = stopped.recv_timeout(EVERY) == Err(RecvTimeoutError::Disconnected);
        }
    };
    followed.ended = follow().err().map(CommandError::from);
    followed
}

impl Followed {
    /// Asks for what has happened up to the first answer. Not for all that there is: what happens meanwhile may be more than can be read.
    fn catch_up<E>(&mut self, since: &mut u64, mut ask: impl FnMut(u64) -> Result<Events, E>) -> Result<(), E> {
        let mut begun = None;
        loop {
            let page = ask(*since)?;
            let begun = *begun.get_or_insert(page.now_ns);
            let is_behind = page.more && page.events.last().is_some_and(|event| event.at_ns < begun);
            (*since, self.is_on, self.now_ns, self.unix_ns) = (page.next, page.on, page.now_ns, page.unix_ns);
            self.owners.extend(page.owners.into_iter().map(|owner| (owner.owner, owner)));
            self.events.extend(page.events);
            let beyond = self.events.len().saturating_sub(MOST);
            self.events.drain(..beyond);
            if !is_behind {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;
    use vramctl_model::{Happening, Verb};

    /// A process with a page of events from before it is first asked, and a page more at each answer.
    #[test]
    fn a_fast_recorder_is_read_up_to_now() {
        let (mut followed, mut since, mut asked) = (Followed::default(), 0, 0);
        let mut ask = |from: u64| {
            asked += 1;
            assert!(asked < 100, "it reads for ever");
            let what = Happening::Began { verb: Verb::Pause, thread: 1 };
            let events = (from..from + 10).map(|number| TraceEvent { number, at_ns: number, what }).collect();
            Ok::<_, Infallible>(Events { on: true, events, next: from + 10, more: true, now_ns: 15 + 10 * asked, ..Events::default() })
        };
        let Ok(()) = followed.catch_up(&mut since, &mut ask);
        // It was 25 when the first ten were sent, so the third page has the last of them.
        assert_eq!((followed.events.len(), since), (30, 30));
        // Events since then are sent the next time.
        let Ok(()) = followed.catch_up(&mut since, &mut ask);
        assert!(since > 30 && followed.events.iter().map(|event| event.number).eq(0..since));
    }
}
