//! How long an operation waits, and when a failed attempt is made again: one clock, and one policy for all causes.
//!
//! Two waits are no attempts and have loops of their own: for memory that others have open, before a pause (`plan.rs`), and for room on a GPU,
//! before a restore (`checkpoint.rs`).

use crate::shared::Borrower;
use std::time::{Duration, Instant};
use vramctl_control::client::ClientError;
use vramctl_model::{Kind, Verb};

/// How long to wait while another client uses a process, or resumes a job on the same GPUs.
pub const TURN_WITHIN: Duration = Duration::from_secs(10);
/// How long the first attempt waits for the work of several processes to drain; no attempt waits less.
pub const FIRST_DRAIN: Duration = Duration::from_millis(100);

/// The limit of waits, all in all: an operation's, or those for work in flight.
#[derive(Debug, Clone, Copy)]
pub struct Deadline {
    /// Since when.
    pub begun: Instant,
    /// `None`: nothing is waited for that may take long.
    pub timeout: Option<Duration>,
}

impl Deadline {
    /// The shortest wait, for calls that are about to end.
    pub const A_MOMENT: Duration = Duration::from_secs(1);

    /// From now on.
    pub fn new(timeout: Option<Duration>) -> Self {
        Self { begun: Instant::now(), timeout }
    }

    /// The same limit, of which this much has been waited. What has been done since, such as saving contents, does not count.
    #[must_use]
    pub fn after(self, waited: Duration) -> Self {
        let now = Instant::now();
        Self { begun: now.checked_sub(waited).unwrap_or(now), ..self }
    }

    /// The same limit from now on, but not beyond `until`.
    #[must_use]
    pub fn anew(self, until: Instant) -> Self {
        let begun = Instant::now();
        Self { begun, timeout: self.timeout.map(|timeout| timeout.min(until.saturating_duration_since(begun))) }
    }

    /// The moment.
    pub fn at(&self) -> Option<Instant> {
        self.timeout.map(|timeout| self.begun + timeout)
    }

    /// What is left.
    pub fn left(&self) -> Option<Duration> {
        self.timeout.map(|timeout| timeout.saturating_sub(self.begun.elapsed()))
    }

    /// What is left, or a moment if the limit is as long.
    pub fn left_or_a_moment(&self) -> Duration {
        self.left().unwrap_or_default().max(Self::A_MOMENT.min(self.timeout.unwrap_or_default()))
    }

    /// Whether nothing is left, or nothing was to be waited for.
    pub fn is_over(&self) -> bool {
        self.left().is_none_or(|left| left.is_zero())
    }
}

/// Why an attempt is made again.
#[derive(Debug)]
pub enum Retry {
    /// A resume was short of memory, and the user waits for it.
    Memory,
    /// A pause could not wait for the work in flight: the ranks may have been held at different points.
    Work,
    /// Another client uses one of the processes.
    Lease,
    /// Others have the memory open by now.
    Borrowers(Vec<Borrower>),
    /// An engine had got a request, and has none any more. Until when to try.
    Engine(Instant),
}

/// Which failed attempts of a job are made again, and until when.
#[derive(Debug, Clone, Copy)]
pub struct RetryPolicy {
    /// A pause or a resume.
    pub verb: Verb,
    /// Whether the programs are held.
    pub holds: bool,
    /// For the work in flight of held programs, or else for memory.
    pub deadline: Deadline,
}

impl RetryPolicy {
    /// How long an attempt may wait for the work to drain. Aligned ranks need as long as their work takes, others wait in vain: so of
    /// several processes' time, half is left for further attempts.
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
        // Work is waited for longer next time, and memory in another order, whatever else failed.
        causes.into_iter().map(|(retry, _)| retry).min_by_key(|retry| match retry {
            Retry::Memory => 0,
            Retry::Work => 1,
            _ => 2,
        })
    }

    /// What to do about a failure, and for how long; `Some(None)` if it only follows from another one. `None` if it is final.
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

/// The process's own code of a refusal.
pub fn kind(error: &ClientError) -> Option<Kind> {
    match error {
        ClientError::Refused(refusal) => Some(refusal.code),
        ClientError::Io { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_been_waited_for_one_thing_is_gone_for_the_next() {
        let (seconds, limit) = (Duration::from_secs, Deadline::new(Some(Duration::from_secs(10))));
        assert!(limit.after(seconds(4)).left_or_a_moment() <= seconds(6));
        assert!(limit.after(seconds(60)).after(Duration::ZERO).left_or_a_moment() > seconds(1), "what is no wait does not count");
        assert_eq!(limit.after(seconds(60)).left_or_a_moment(), seconds(1), "calls that are about to end");
        let short = Deadline::new(Some(Duration::from_millis(200)));
        assert_eq!(short.after(seconds(60)).left_or_a_moment(), Duration::from_millis(200));
    }
}
