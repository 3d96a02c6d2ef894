//! When a failed attempt is made again: one policy for all failures of ranks. `Job::retry` (`job.rs`) adds two causes that need more than the
//! failures: an engine that has got a request, and new borrowers.
//!
//! Two waits come before the first attempt and have loops of their own: for memory that others have open, before a pause (`plan.rs`), and for
//! room on a GPU, before a restore (`checkpoint.rs`).

use crate::deadline::Deadline;
use crate::shared::Borrower;
use std::time::{Duration, Instant};
use vramctl_control::client::ClientError;
use vramctl_model::{Kind, Verb};

/// How long to wait at least while another client uses a process, and, without a limit, while it resumes a job on the same GPUs.
pub const TURN_WITHIN: Duration = Duration::from_secs(10);
/// How long the first attempt waits for the work of several processes to drain. No attempt waits less, unless the limit is shorter.
pub const FIRST_DRAIN: Duration = Duration::from_millis(100);

/// Why an attempt is made again.
#[derive(Debug)]
pub enum Retry {
    /// A resume was short of memory, and the user waits for it.
    Memory,
    /// The work in flight has not ended in time: the ranks may have been held at different points.
    Work,
    /// Another client uses one of the processes.
    Lease,
    /// Other processes than before have the memory open: these.
    Borrowers(Vec<Borrower>),
    /// An engine had got a request, and has none any more. The moment until which to try again.
    Engine(Instant),
}

/// Which failed attempts of a job are made again, and until when.
#[derive(Debug, Clone, Copy)]
pub struct RetryPolicy {
    /// A pause or a resume.
    pub verb: Verb,
    /// Whether the programs are held.
    pub holds: bool,
    /// The limit for the work in flight if the programs are held, else for memory.
    pub deadline: Deadline,
}

impl RetryPolicy {
    /// How long an attempt may wait for the work to drain. Ranks that are held at the same point need as long as their work takes; others wait
    /// in vain. So with several processes, an attempt gets at most half of the time left.
    pub fn drain_within(&self, next: Duration, processes: usize) -> Duration {
        let left = self.deadline.left().unwrap_or_default();
        let limit = if processes > 1 { next.min(left / 2) } else { left };
        limit.max(FIRST_DRAIN.min(self.deadline.timeout.unwrap_or_default()))
    }

    /// Whether an attempt with these failures may succeed after a `rest`, and there is time left for it.
    pub fn retry<'a>(&self, failures: impl Iterator<Item = &'a ClientError>, rest: Duration) -> Option<Retry> {
        let causes: Vec<_> = failures.map(|error| self.cause(kind(error))).collect::<Option<Vec<_>>>()?.into_iter().flatten().collect();
        let least = causes.iter().map(|(_, limit)| *limit).min()?;
        if self.deadline.begun.elapsed() + rest >= least {
            return None;
        }
        // Of several causes, one that changes the next attempt decides: that begins with the ranks that lack memory, or waits longer for work.
        causes.into_iter().map(|(retry, _)| retry).min_by_key(|retry| match retry {
            Retry::Memory => 0,
            Retry::Work => 1,
            _ => 2,
        })
    }

    /// What to do about a failure, and for how long; `Some(None)` if it only follows from another rank's failure. `None` if it is final.
    #[allow(clippy::option_option)] // three answers
    fn cause(&self, kind: Option<Kind>) -> Option<Option<(Retry, Duration)>> {
        let limit = self.deadline.timeout;
        Some(match (kind?, self.verb) {
            (Kind::Aborted, _) => None,
            (Kind::Leased, _) => Some((Retry::Lease, limit.unwrap_or_default().max(TURN_WITHIN))),
            (Kind::Busy | Kind::Capturing, Verb::Pause) if self.holds => Some((Retry::Work, limit?.saturating_sub(FIRST_DRAIN))),
            (Kind::DeviceMemory, Verb::Resume) => Some((Retry::Memory, limit?)),
            _ => return None,
        })
    }
}

/// The code with which a process has refused a step. `None` if the connection has failed.
pub fn kind(error: &ClientError) -> Option<Kind> {
    match error {
        ClientError::Refused(refusal) => Some(refusal.code),
        ClientError::Io { .. } => None,
    }
}
