//! When a failed attempt is made again: one policy for all causes, for the ranks of a job ([`RetryPolicy`]) and for nodes ([`Limits`] alone).
//!
//! Two waits come before the first attempt and have loops of their own: for memory that others have open, before a pause (`plan/consent.rs`), and for
//! room on a GPU, before a restore (`checkpoint/restore.rs`).

use crate::deadline::Deadline;
use crate::engine::Engines;
use crate::patience::{FIRST_DRAIN, TURN_WITHIN};
use crate::shared::Borrower;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use vramctl_control::client::ClientError;
use vramctl_model::{Kind, Verb};

/// Why an attempt is made again.
#[derive(Debug)]
pub enum Retry {
    /// A resume was short of memory, and the user waits for it.
    Memory,
    /// The work in flight has not ended in time: the ranks may have been held at different points.
    Work,
    /// Another client uses one of the processes, or too many do.
    Lease,
    /// Other processes than before have the memory open: these.
    Borrowers(Vec<Borrower>),
    /// An engine had got a request, and has none any more. The moment until which to try again.
    Engine(Instant),
}

/// A failed attempt.
pub struct FailedAttempt<'a> {
    /// Why ranks failed.
    pub errors: Vec<&'a ClientError>,
    /// An engine had got a request.
    pub engine_objected: bool,
    /// The borrowers that took part; `None` if they are not to.
    pub borrowers: Option<&'a [Borrower]>,
    /// Finds those that have the memory open now. `None` if they cannot be found.
    pub find_borrowers: Box<dyn Fn() -> Option<Vec<Borrower>> + 'a>,
}

/// Which failures pass, and for how long to try again.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// A pause or a resume.
    pub verb: Verb,
    /// Whether the programs are held.
    pub holds: bool,
    /// For the work in flight if the programs are held, else for memory.
    pub timeout: Option<Duration>,
    /// How long the first attempt waits for the work of several processes to drain. No attempt waits less, unless the limit is shorter.
    pub first_drain: Duration,
}

impl Limits {
    /// How long an attempt may wait for the work to drain if `left` is left of the limit. Ranks that are held at the same point need as long as
    /// their work takes; others wait in vain. So several processes get at most half of the time left.
    pub fn drain_within(&self, next: Duration, left: Duration, are_several: bool) -> Duration {
        let limit = if are_several { next.min(left / 2) } else { left };
        limit.max(self.first_drain.min(self.timeout.unwrap_or_default()))
    }

    /// What to do about failures of these kinds after so much time, if all of them pass, or follow from others. `None` means a failure without a
    /// kind, which is final.
    pub fn retry(&self, kinds: impl IntoIterator<Item = Option<Kind>>, spent: Duration) -> Option<Retry> {
        let causes = kinds.into_iter().map(|kind| self.cause(kind)).collect::<Option<Vec<_>>>()?;
        let least = causes.iter().flatten().map(|(_, limit)| *limit).min()?;
        if spent >= least {
            return None;
        }
        // Of several causes, one that changes the next attempt decides: that begins with the ranks that are short of memory, or waits longer.
        causes.into_iter().flatten().map(|(retry, _)| retry).min_by_key(|retry| match retry {
            Retry::Memory => 0,
            Retry::Work => 1,
            _ => 2,
        })
    }

    /// What to do about a failure, and for how long; `Some(None)` if it only follows from another one. `None` if it is final.
    #[allow(clippy::option_option)] // three answers
    fn cause(&self, kind: Option<Kind>) -> Option<Option<(Retry, Duration)>> {
        Some(match (kind?, self.verb) {
            (Kind::Aborted, _) => None,
            // Busy: it has too many clients.
            (Kind::Leased, _) | (Kind::Busy, Verb::Resume) => Some((Retry::Lease, self.timeout.unwrap_or_default().max(TURN_WITHIN))),
            (Kind::Busy | Kind::Capturing, Verb::Pause) if self.holds => {
                Some((Retry::Work, self.timeout?.saturating_sub(self.first_drain)))
            }
            (Kind::DeviceMemory, Verb::Resume) => Some((Retry::Memory, self.timeout?)),
            _ => return None,
        })
    }
}

/// Which failed attempts of a job are made again, and until when.
pub struct RetryPolicy<'a> {
    /// A pause or a resume.
    pub verb: Verb,
    /// Whether the programs are held.
    pub holds: bool,
    /// The limit for the work in flight if the programs are held, else for memory.
    pub deadline: Deadline,
    /// The engines that must have no requests, and until when to try again if one has got a request.
    pub engines: Option<(&'a Engines, Option<Instant>)>,
}

impl RetryPolicy<'_> {
    /// How long an attempt may wait for the work of so many processes to drain.
    pub fn drain_within(&self, next: Duration, processes: usize) -> Duration {
        self.limits().drain_within(next, self.deadline.left().unwrap_or_default(), processes > 1)
    }

    fn limits(&self) -> Limits {
        Limits { verb: self.verb, holds: self.holds, timeout: self.deadline.timeout, first_drain: FIRST_DRAIN }
    }

    /// Whether another attempt may succeed after a `rest`, and there is time left for it; and what this one failed for.
    pub fn retry(&self, failed: &FailedAttempt<'_>, rest: Duration) -> Option<Retry> {
        if failed.engine_objected {
            return self.without_requests();
        }
        self.limits()
            .retry(failed.errors.iter().map(|error| kind(error)), self.deadline.begun.elapsed() + rest)
            .or_else(|| self.with_borrowers(failed))
    }

    /// Waits until the engines have no requests.
    fn without_requests(&self) -> Option<Retry> {
        let (engines, until) = self.engines?;
        let until = until.filter(|until| Instant::now() < *until)?;
        engines.prepare(Some(until)).is_ok().then_some(Retry::Engine(until))
    }

    /// Retries if other processes than before have the memory open, for whatever reason the ranks failed.
    fn with_borrowers(&self, failed: &FailedAttempt<'_>) -> Option<Retry> {
        let known = failed.borrowers.filter(|_| self.holds && !self.deadline.is_over())?;
        let now = (failed.find_borrowers)()?;
        let pids = |borrowers: &[Borrower]| borrowers.iter().map(|one| one.process.pid).collect::<BTreeSet<_>>();
        (pids(&now) != pids(known)).then_some(Retry::Borrowers(now))
    }
}

/// The code with which a process has refused a step. `None` if the connection has failed.
pub fn kind(error: &ClientError) -> Option<Kind> {
    match error {
        ClientError::Refused(refusal) => Some(refusal.code),
        ClientError::Io { .. } => None,
    }
}
