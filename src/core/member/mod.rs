//! The member's side of programs that share GPUs by themselves (`vramctl run --share`).
//!
//! The node's scheduler has a connection to each member ([`serve`]). The member tells it which calls wait because the scheduler has taken the
//! memory, and which requests wait for room ([`room`]); the scheduler says when there is room. It pauses and resumes the member as any client
//! does.
//!
//! Schedulers are numbered by epochs. A member that has heard of an epoch refuses all that an older scheduler asks for, so a scheduler that
//! was stopped, and continues when another has taken over, does no harm.

pub mod room;
mod teller;

use crate::connection::{Connection, Line, Lines};
use crate::gate;
use crate::limit;
use crate::memory::Memory;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use vramctl_config::Config;
use vramctl_control::protocol::{self, Reply, Request};
use vramctl_driver::streams;
use vramctl_host::{PerProcess, Unpoison, exit};
use vramctl_model::{Error, MemberState, Order, Remembered, Sharing, milliseconds};

/// How long a scheduler may be silent. It sends a beat every two seconds.
const SILENCE: Duration = Duration::from_secs(6);
/// When calls or a request that still wait are worth a warning.
const WORTH_A_WARNING: Duration = Duration::from_secs(5);
/// How often to look whether another scheduler has taken over, or the program exits.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// What this member knows of the scheduler.
#[derive(Debug, Default)]
struct Membership {
    /// The highest epoch heard of.
    epoch: AtomicU64,
    /// The number of the scheduler's connection, from 1 on; 0: there is none. A scheduler may connect anew before the end of its old connection is
    /// noticed.
    connected: AtomicU64,
    /// Whether the scheduler keeps the program held.
    is_away: AtomicBool,
    /// Whether to watch how long no call has passed.
    watches: AtomicBool,
    /// Why calls and requests wait, as the scheduler has said.
    why: Mutex<Option<String>>,
    /// What the scheduler has left for the next one, and when.
    remembered: Mutex<Option<(String, Instant)>>,
    /// How the program shares, where somebody has said it since its start.
    sharing: Mutex<Sharing>,
}

static MEMBERSHIP: PerProcess<Membership> = PerProcess::new(Membership::default);

/// Whether the program shares its GPUs. Constant.
#[inline]
pub fn is_member() -> bool {
    Config::get().shares
}

/// Whether the scheduler has the program's memory, so that calls of the program bring it back.
pub fn is_away() -> bool {
    MEMBERSHIP.existing().is_some_and(|its| its.is_away.load(Ordering::Relaxed))
}

/// Something has changed that the scheduler may have to know. Neither allocates nor locks.
pub(crate) fn tell() {
    gate::watcher::wake();
}

/// A capture has begun or ended.
pub fn note_capture() {
    if is_member() {
        tell();
    }
}

/// Has the program share its GPUs in another way from now on. Returns how it shares then.
pub fn share_so(new: Sharing) -> Result<Sharing, Error> {
    if !is_member() {
        return Err(not_a_member());
    }
    if let Some(limit) = &new.limit {
        limit::set(limit.parse().map_err(Error::Invalid)?);
    }
    let mut sharing = MEMBERSHIP.get().sharing.lock().unpoisoned();
    let Sharing { priority, gives_back_after_ms, limit } = new;
    *sharing = Sharing {
        priority: priority.or(sharing.priority),
        gives_back_after_ms: gives_back_after_ms.or(sharing.gives_back_after_ms),
        limit: limit.or_else(|| sharing.limit.take()),
    };
    drop(sharing);
    tell();
    Ok(shares_so())
}

/// How the program shares its GPUs.
fn shares_so() -> Sharing {
    let config = Config::get();
    let said = MEMBERSHIP.existing().map(|its| its.sharing.lock().unpoisoned().clone()).unwrap_or_default();
    Sharing {
        priority: said.priority.or(Some(config.priority)),
        gives_back_after_ms: said.gives_back_after_ms.or_else(|| config.gives_back_after.map(milliseconds)).filter(|after| *after > 0),
        limit: said.limit.or_else(|| config.limit.map(|limit| limit.to_string())),
    }
}

fn not_a_member() -> Error {
    Error::Invalid("this process does not share its GPUs: it was not started with `vramctl run --share`".into())
}

/// Why calls and requests wait, in a message.
pub(crate) fn why_waiting() -> String {
    let why = MEMBERSHIP.existing().and_then(|its| its.why.lock().unpoisoned().clone());
    why.unwrap_or_else(|| "`vramctl share` shows who has the GPU".into())
}

/// Refuses what a scheduler asks for whose epoch is over. `None`: another client asks.
pub fn admit(epoch: Option<u64>) -> Result<(), Error> {
    let Some(epoch) = epoch else { return Ok(()) };
    let newest = MEMBERSHIP.get().epoch.fetch_max(epoch, Ordering::SeqCst);
    if epoch < newest { Err(Error::Stale { epoch, newest }) } else { Ok(()) }
}

/// Whether the scheduler keeps the program held, from now on. What another client has paused, the program's calls do not bring back.
pub(crate) fn set_away(is_away: bool) {
    if MEMBERSHIP.get().is_away.swap(is_away, Ordering::Relaxed) != is_away {
        gate::set_opened_by_calls(is_away);
        tell();
    }
}

/// Serves the scheduler until its connection ends, or a newer one connects.
pub fn serve(epoch: u64, connection: &Connection, lines: &mut Lines<'_>) -> Result<(), Error> {
    if !is_member() {
        return Err(not_a_member());
    }
    admit(Some(epoch))?;
    let its = MEMBERSHIP.get();
    let number = connection.borrower.connection + 1;
    its.connected.store(number, Ordering::SeqCst);
    room::scheduler_here();
    let _connected = Connected(number);
    teller::telling(connection, || {
        let mut silent = Duration::ZERO;
        while its.connected.load(Ordering::SeqCst) == number && silent < SILENCE && !exit::is_ending() {
            match lines.next(LOOK_EVERY)? {
                // Another one may have taken over meanwhile.
                Line::Complete(_) if its.connected.load(Ordering::SeqCst) != number => break,
                Line::Complete(line) => {
                    obey(&line)?;
                    silent = Duration::ZERO;
                }
                Line::Late => silent += LOOK_EVERY,
                Line::End => break,
            }
        }
        Ok(())
    })
}

/// A scheduler is connected until this is dropped, or until it or another one connects anew.
struct Connected(u64);

impl Drop for Connected {
    fn drop(&mut self) {
        let its = MEMBERSHIP.get();
        if its.connected.compare_exchange(self.0, 0, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
            its.watches.store(false, Ordering::Relaxed);
            *its.why.lock().unpoisoned() = None;
            room::scheduler_gone();
        }
    }
}

fn obey(line: &[u8]) -> Result<(), Error> {
    if line.iter().all(u8::is_ascii_whitespace) {
        return Ok(());
    }
    match protocol::parse(line)? {
        Request::Order(Order::Beat) => (),
        Request::Order(Order::Watch { on }) => {
            MEMBERSHIP.get().watches.store(on, Ordering::Relaxed);
            tell();
        }
        Request::Order(Order::AskFirst { gpus }) => room::promise(&gpus),
        Request::Order(Order::Unavailable { reserve_bytes, gpus }) => limit::set_unavailable(reserve_bytes, gpus),
        Request::Order(Order::Remember { what }) => *MEMBERSHIP.get().remembered.lock().unpoisoned() = Some((what, Instant::now())),
        Request::Order(Order::DropCopies) => {
            if let Some(memory) = Memory::existing() {
                memory.drop_copies();
            }
        }
        Request::Order(Order::Waits { why }) => *MEMBERSHIP.get().why.lock().unpoisoned() = Some(why),
        Request::Order(Order::Granted { ticket }) => room::answer(ticket, room::Verdict::Granted),
        Request::Order(Order::Denied { ticket, why }) => room::answer(ticket, room::Verdict::Denied(why)),
        _ => return Err(Error::Invalid("on the scheduler's connection, only orders are valid".into())),
    }
    Ok(())
}

fn watches() -> bool {
    MEMBERSHIP.existing().is_some_and(|its| its.watches.load(Ordering::Relaxed))
}

fn remembered() -> Option<Remembered> {
    let remembered = MEMBERSHIP.get().remembered.lock().unpoisoned();
    remembered.as_ref().map(|(what, since)| Remembered { what: what.clone(), ago_ms: milliseconds(since.elapsed()) })
}

fn state(calls_wait: Option<Duration>, is_first: bool) -> Reply {
    let Sharing { priority, gives_back_after_ms, .. } = shares_so();
    let wants = room::wants();
    let idle_for = || if wants.is_empty() { gate::idle_for() } else { Duration::ZERO };
    Reply::Member(MemberState {
        away: is_away(),
        calls_wait_ms: calls_wait.filter(|_| is_away()).map(milliseconds),
        idle_ms: watches().then(|| milliseconds(idle_for())),
        captures: streams::is_any_captured(),
        priority: priority.unwrap_or_default(),
        gives_back_after_ms,
        waits_for_ms: Config::get().waits_for.map(milliseconds),
        wants,
        remembered: if is_first { remembered() } else { None },
    })
}
