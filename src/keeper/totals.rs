//! What a scheduler counts, for `vramctl metrics`. A successor begins at zero.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use vramctl_model::Durations;

/// What has happened since the scheduler took over.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    /// Changes of places by how they ended: `changed`, `refused`, `failed`.
    pub changes: BTreeMap<String, u64>,
    /// Programs that gave way, by why: `away`, `waits`, `idle`, `lower`, `turn`.
    pub gave_way: BTreeMap<String, u64>,
    /// Changes that brought a program's memory back: its turn began.
    pub turns: u64,
    /// Bytes of GPU memory that left.
    pub bytes: u64,
    /// Durations that have ended, by how long they were.
    pub waits: Durations,
}

/// Since when members wait.
#[derive(Debug, Default)]
pub struct Waiting(BTreeMap<u32, Instant>);

impl Waiting {
    /// A member has waited for so long, or does not wait.
    pub fn note(&mut self, pid: u32, waits: Option<Duration>, now: Instant, ended: &mut Durations) {
        match waits {
            Some(waits) => _ = self.0.entry(pid).or_insert_with(|| now.checked_sub(waits).unwrap_or(now)),
            None => {
                if let Some(since) = self.0.remove(&pid) {
                    ended.add(now.saturating_duration_since(since));
                }
            }
        }
    }

    /// A member has ended.
    pub fn forget(&mut self, pid: u32) {
        self.0.remove(&pid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_counts_from_its_beginning_until_nothing_of_the_member_waits() {
        let (mut waiting, mut ended, begun) = (Waiting::default(), Durations::default(), Instant::now());
        let at = |ms| begun + Duration::from_millis(ms);
        waiting.note(1, Some(Duration::ZERO), at(0), &mut ended);
        waiting.note(1, Some(Duration::from_millis(10)), at(500), &mut ended);
        waiting.note(2, None, at(500), &mut ended);
        assert_eq!(ended, Durations::default());
        waiting.note(1, None, at(2000), &mut ended);
        waiting.note(1, None, at(9000), &mut ended);
        waiting.note(3, Some(Duration::ZERO), at(0), &mut ended);
        waiting.note(3, None, at(900_000), &mut ended);
        waiting.note(4, Some(Duration::ZERO), at(0), &mut ended);
        waiting.forget(4);
        waiting.note(4, None, at(1), &mut ended);
        assert_eq!((ended.counts, ended.seconds), (vec![0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1], 902.0));
    }
}
