//! When a failed attempt is made again: one policy for all causes.

use crate::shared::Borrower;
use std::time::{Duration, Instant};
use vramctl_control::client::ClientError;
use vramctl_model::{Kind, Verb};

/// How long to wait while another client uses a process, or resumes a job on the same GPUs.
pub const TURN_WITHIN: Duration = Duration::from_secs(10);
/// How long the first attempt waits for the work of several processes to drain; no attempt waits less.
pub const FIRST_DRAIN: Duration = Duration::from_millis(100);

/// The limit of an operation's waits, all in all.
#[derive(Debug, Clone, Copy)]
pub struct Deadline {
    /// Since when.
    pub begun: Instant,
    /// `None`: the operation waits for nothing that may take long.
    pub timeout: Option<Duration>,
}

impl Deadline {
    /// From now on.
    pub fn new(timeout: Option<Duration>) -> Self {
        Self { begun: Instant::now(), timeout }
    }

    /// The moment.
    pub fn at(&self) -> Option<Instant> {
        self.timeout.map(|timeout| self.begun + timeout)
    }

    /// What is left.
    pub fn left(&self) -> Option<Duration> {
        self.timeout.map(|timeout| timeout.saturating_sub(self.begun.elapsed()))
    }

    /// Whether nothing is left, or nothing was to be waited for.
    pub fn is_over(&self) -> bool {
        self.left().is_none_or(|left| left.is_zero())
    }
}

/// How long an operation waits for work and calls in flight and for other commands, all in all. What else it does in between, such as saving
/// contents, does not count.
#[derive(Debug)]
pub struct Patience {
    limit: Duration,
    used: Duration,
}

impl Patience {
    /// Of this much.
    pub fn new(limit: Duration) -> Self {
        Self { limit, used: Duration::ZERO }
    }

    /// What is left of it. Calls that are about to end are always waited for.
    pub fn left(&self) -> Duration {
        const A_MOMENT: Duration = Duration::from_secs(1);
        self.limit.saturating_sub(self.used).max(A_MOMENT.min(self.limit))
    }

    /// Something has been waited for.
    pub fn spend(&mut self, time: Duration) {
        self.used += time;
    }

    /// Waits for something.
    pub fn wait<R>(&mut self, wait: impl FnOnce(Duration) -> R) -> R {
        let begun = Instant::now();
        let result = wait(self.left());
        self.spend(begun.elapsed());
        result
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

/// The user's limits for one job.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// A pause or a resume.
    pub verb: Verb,
    /// How long a held program's work in flight may take; `None` if the program is not held.
    pub hold: Option<Duration>,
    /// How long a resume waits for memory; `None` if it does not.
    pub timeout: Option<Duration>,
    /// Since when.
    pub begun: Instant,
}

impl Limits {
    /// What is left to wait for work, if the program is held.
    pub fn hold_left(&self) -> Option<Duration> {
        self.hold.map(|hold| hold.saturating_sub(self.begun.elapsed()))
    }

    /// The same limits from now on, but not beyond `until`.
    #[must_use]
    pub fn anew(self, until: Instant) -> Self {
        let now = Instant::now();
        Self { hold: self.hold.map(|hold| hold.min(until.saturating_duration_since(now))), begun: now, ..self }
    }

    /// How long an attempt may wait for the work to drain. Aligned ranks need as long as their work takes, others wait in vain: so of
    /// several processes' time, half is left for further attempts.
    pub fn drain_within(&self, next: Duration, processes: usize) -> Duration {
        let left = self.hold_left().unwrap_or_default();
        let limit = if processes > 1 { next.min(left / 2) } else { left };
        limit.max(FIRST_DRAIN.min(self.hold.unwrap_or_default()))
    }

    /// Whether an attempt with these failures may succeed after a `rest`, and there is time left for it.
    pub fn retry<'a>(&self, failures: impl Iterator<Item = &'a ClientError>, rest: Duration) -> Option<Retry> {
        let causes: Vec<_> = failures.map(|error| self.cause(kind(error))).collect::<Option<Vec<_>>>()?.into_iter().flatten().collect();
        let least = causes.iter().map(|(_, limit)| *limit).min()?;
        if self.begun.elapsed() + rest >= least {
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
        Some(match (kind?, self.verb) {
            (Kind::Aborted, _) => None,
            (Kind::Leased, _) => Some((Retry::Lease, self.hold.or(self.timeout).unwrap_or_default().max(TURN_WITHIN))),
            (Kind::Busy | Kind::Capturing, Verb::Pause) => Some((Retry::Work, self.hold?.saturating_sub(FIRST_DRAIN))),
            (Kind::DeviceMemory, Verb::Resume) => Some((Retry::Memory, self.timeout?)),
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
    use std::thread;

    #[test]
    fn what_an_operation_has_waited_for_one_thing_is_gone_for_the_next() {
        let mut patience = Patience::new(Duration::from_secs(10));
        patience.wait(|left| {
            assert_eq!(left, Duration::from_secs(10));
            thread::sleep(Duration::from_millis(20));
        });
        assert!(patience.left() <= Duration::from_millis(9980));
        patience.spend(Duration::from_secs(60));
        assert_eq!(patience.left(), Duration::from_secs(1), "calls that are about to end");
        assert_eq!(Patience::new(Duration::from_millis(200)).left(), Duration::from_millis(200));
    }
}
