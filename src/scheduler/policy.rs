//! The constants of the policy.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The constants of the policy. The defaults are those that the documentation gives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// Bytes of each GPU that nobody is given: what contexts and unmanaged programs take at any moment comes out of these.
    pub reserve: u64,
    /// A program that took another's place keeps it for at least this many times as long as the change took.
    pub k: u32,
    /// And for at least this long.
    pub slice: Duration,
    /// A program counts as idle once it has made no call for this long.
    pub rest: Duration,
    /// How long a busy program's work in flight may take to finish once the program is held.
    pub drain: Duration,
    /// A program that did not drain is left alone for this long. The time doubles from failure to failure.
    pub backoff: Duration,
    /// At most for this long.
    pub backoff_most: Duration,
    /// A waiter whose change failed through no fault of a victim tries again after this long. The time doubles, too, up to `backoff`.
    pub retry: Duration,
    /// An allocation fails after this long, counting only time in which nobody could give way.
    pub wait: Duration,
    /// Percent of the time that programs of a lower priority get, however busy those of a higher one are.
    pub low_percent: u32,
    /// Bytes a second that one GPU's link moves in one direction. Estimates alone use it; a change that has happened counts as it was.
    pub link: u64,
    /// What a change takes beside its copies.
    pub overhead: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            reserve: 2 << 30,
            k: 20,
            slice: Duration::from_secs(2),
            rest: Duration::from_millis(50),
            drain: Duration::from_secs(1),
            backoff: Duration::from_secs(10),
            backoff_most: Duration::from_secs(300),
            retry: Duration::from_millis(100),
            wait: Duration::from_secs(30),
            low_percent: 5,
            link: 50_000_000_000,
            overhead: Duration::from_millis(50),
        }
    }
}

impl Policy {
    /// How long a link takes for so many bytes in one direction.
    pub fn copy(&self, bytes: u64) -> Duration {
        let nanoseconds = u128::from(bytes) * 1_000_000_000 / u128::from(self.link.max(1));
        Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }

    /// The turn of a program after a change that took so long has brought it in.
    pub fn turn(&self, took: Duration) -> Duration {
        self.slice.max(took * self.k)
    }

    /// How long a waiter of a lower priority waits for a turn of this length, so that it gets `low_percent`.
    pub fn aged_after(&self, turn: Duration) -> Duration {
        turn * (100 - self.low_percent.clamp(1, 99)) / self.low_percent.clamp(1, 99)
    }

    /// The turn of a waiter of a lower priority that has waited so long, so that it gets `low_percent`.
    pub fn aged_turn(&self, waited: Duration) -> Duration {
        waited * self.low_percent.clamp(1, 99) / (100 - self.low_percent.clamp(1, 99))
    }
}
