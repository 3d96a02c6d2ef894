//! Rate limit for log messages about events that may repeat often.

use std::time::{Duration, Instant};

const AT_A_TIME: u32 = 3;
const ONE_MORE_AFTER: Duration = Duration::from_secs(10);

/// Allows three at once, and then one every ten seconds.
#[derive(Debug)]
pub struct Allowance {
    left: u32,
    counted: Instant,
}

impl Allowance {
    /// All of it.
    pub fn full(now: Instant) -> Self {
        Self { left: AT_A_TIME, counted: now }
    }

    /// Whether one more is allowed now; if so, it is used up.
    pub fn take(&mut self, now: Instant) -> bool {
        let more = now.saturating_duration_since(self.counted).as_secs() / ONE_MORE_AFTER.as_secs();
        if more > 0 {
            self.left = AT_A_TIME.min(self.left.saturating_add(u32::try_from(more).unwrap_or(u32::MAX)));
            self.counted = now;
        }
        let has_any = self.left > 0;
        self.left -= u32::from(has_any);
        has_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_at_once_and_then_one_every_ten_seconds() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let mut allowance = Allowance::full(begun);
        let mut taken = |seconds| (0..5).filter(|_| allowance.take(at(seconds))).count();
        assert_eq!([taken(0), taken(9), taken(10), taken(31), taken(1000)], [3, 0, 1, 2, 3]);
    }
}
