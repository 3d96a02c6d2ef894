//! How long an operation waits: one clock for all waits.

use std::time::{Duration, Instant};

/// A limit for waits in total: for all waits of an operation, or for its waits for work in flight.
#[derive(Debug, Clone, Copy)]
pub struct Deadline {
    /// The moment from which the time counts.
    pub begun: Instant,
    /// The limit. `None`: the operation waits for nothing that may take long.
    pub timeout: Option<Duration>,
}

impl Deadline {
    /// The shortest limit of a wait for calls that are about to end.
    pub const A_MOMENT: Duration = Duration::from_secs(1);

    /// A limit that counts from now on.
    pub fn new(timeout: Option<Duration>) -> Self {
        Self { begun: Instant::now(), timeout }
    }

    /// The same limit, of which only `waited` is used up: time for other work, such as saving contents, does not count.
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

    /// The moment at which the limit is reached. `None` without a limit.
    pub fn at(&self) -> Option<Instant> {
        self.timeout.map(|timeout| self.begun + timeout)
    }

    /// The time left. `None` without a limit.
    pub fn left(&self) -> Option<Duration> {
        self.timeout.map(|timeout| timeout.saturating_sub(self.begun.elapsed()))
    }

    /// The time left, but at least a moment, or the whole limit if that is shorter. Zero without a limit.
    pub fn left_or_a_moment(&self) -> Duration {
        self.left().unwrap_or_default().max(Self::A_MOMENT.min(self.timeout.unwrap_or_default()))
    }

    /// Whether no time is left, or there is no limit, so that the operation does not wait.
    pub fn is_over(&self) -> bool {
        self.left().is_none_or(|left| left.is_zero())
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
