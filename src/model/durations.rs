//! How long something took, each time: a histogram.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A histogram. It only ever grows.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Durations {
    /// How many were at most so long as [`Durations::UP_TO`] says, each beside those before it; the last: longer ones.
    pub counts: Vec<u64>,
    /// All of them, in seconds.
    pub seconds: f64,
}

impl Durations {
    /// Seconds.
    pub const UP_TO: [f64; 11] = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0];

    /// Adds one.
    pub fn add(&mut self, took: Duration) {
        let seconds = took.as_secs_f64();
        self.counts.resize(Self::UP_TO.len() + 1, 0);
        let place = Self::UP_TO.iter().position(|most| seconds <= *most).unwrap_or(Self::UP_TO.len());
        self.counts[place] += 1;
        self.seconds += seconds;
    }

    /// How many there were.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// How many were at most so long, for each of [`Durations::UP_TO`].
    pub fn up_to(&self) -> impl Iterator<Item = (f64, u64)> {
        let mut all = 0;
        Self::UP_TO.into_iter().enumerate().map(move |(place, most)| {
            all += self.counts.get(place).copied().unwrap_or_default();
            (most, all)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_counted_once_and_in_all_that_follow() {
        let mut durations = Durations::default();
        assert_eq!((durations.count(), durations.up_to().map(|(_, count)| count).sum::<u64>()), (0, 0));
        for ms in [0, 10, 11, 300_000, 300_001] {
            durations.add(Duration::from_millis(ms));
        }
        assert_eq!((durations.count(), durations.counts.last()), (5, Some(&1)));
        assert_eq!(durations.up_to().map(|(_, count)| count).collect::<Vec<_>>(), [2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 4]);
        assert!((durations.seconds - 600.022).abs() < 1e-9);
    }
}
