//! What a scheduler leaves for the next one.

use crate::ids::{AskId, Priority};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// What the next scheduler wants to know of a program beside what the program knows itself. The caller leaves it with the program, and
/// gives it back in the program's [`crate::Report`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remembered {
    /// Whether the scheduler's pause holds it.
    pub held: bool,
    /// How long its turn has lasted, how long it still lasts, and the priority that it was chosen with.
    pub turn: (Duration, Duration, Priority),
    /// How long it is still left alone after it did not drain, and for how long after the next time.
    pub backoff: (Duration, Duration),
    /// What its changes took.
    pub paces: Paces,
    /// For how long nobody could give way to each of its requests.
    pub unserved: BTreeMap<AskId, Duration>,
}

impl Remembered {
    /// The same so much later.
    #[must_use]
    pub fn after(self, passed: Duration) -> Self {
        let ((lasted, lasts, class), (left, next)) = (self.turn, self.backoff);
        Self { turn: (lasted + passed, lasts.saturating_sub(passed), class), backoff: (left.saturating_sub(passed), next), ..self }
    }
}

/// What the changes took that brought a program in, and those that made room for it in its place.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Paces {
    pub(crate) coming: Pace,
    pub(crate) growing: Pace,
}

/// How the last changes of one kind compare to what was expected of them, in percent; at first, as expected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Pace {
    last: [u64; 2],
}

impl Default for Pace {
    fn default() -> Self {
        Self { last: [100; 2] }
    }
}

impl Pace {
    /// What a change counts as that took so long: a figure counts once two of three changes have it. The first that leaves for memory of
    /// the host that nobody has touched takes 7 times as long as the next.
    pub fn cost(&mut self, took: Duration, expected: Duration) -> Duration {
        let percent = took.as_nanos() * 100 / expected.as_nanos().max(1);
        let percent = u64::try_from(percent).unwrap_or(u64::MAX);
        let mut three = [self.last[0], self.last[1], percent];
        three.sort_unstable();
        self.last = [self.last[1], percent];
        let nanoseconds = expected.as_nanos().saturating_mul(u128::from(three[1])) / 100;
        took.min(Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX)))
    }
}
