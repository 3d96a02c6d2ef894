//! What a scheduler leaves with each member for the next one, as durations: turns, back-offs, what changes took, peaks.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;
use vramctl_model as model;
use vramctl_scheduler::Remembered;

/// What the next scheduler is to know of a member.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memo {
    /// What the policy knows.
    pub remembered: Remembered,
    /// The most bytes so far, by the UUID of the GPU.
    pub peaks: BTreeMap<String, u64>,
}

impl Memo {
    /// As it is by now. What a scheduler of another version has left may not be understood: then nothing is known.
    pub fn read(left: Option<&model::Remembered>) -> Self {
        let read = |left: &model::Remembered| {
            let memo: Self = serde_json::from_str(&left.what).ok()?;
            Some(memo.after(Duration::from_millis(left.ago_ms)))
        };
        left.and_then(read).unwrap_or_default()
    }

    /// In words that [`read`](Self::read) understands.
    pub fn written(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// The same so much later.
    #[must_use]
    pub fn after(self, passed: Duration) -> Self {
        Self { remembered: self.remembered.after(passed), ..self }
    }

    /// Whether the next scheduler would do something else with the other. For how long requests were not served grows by the moment.
    pub fn differs(&self, other: &Self) -> bool {
        let [one, other] = [self, other].map(|memo| {
            let mut memo = memo.clone();
            memo.remembered.unserved.clear();
            memo
        });
        one != other
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vramctl_scheduler::{AskId, Priority};

    /// What began and what ends is told as it is when it is read, and what cannot be read is nothing.
    #[test]
    fn a_memo_is_read_as_of_now() {
        let second = Duration::from_secs(1);
        let memo = Memo {
            remembered: Remembered {
                turn: (3 * second, 9 * second, Priority::High),
                backoff: (2 * second, 20 * second),
                unserved: [(AskId(7), second)].into(),
                ..Remembered::default()
            },
            peaks: [("GPU-a".to_owned(), 5)].into(),
        };
        let left = model::Remembered { what: memo.written(), ago_ms: 4_000 };
        let read = Memo::read(Some(&left));
        assert_eq!(read, memo.clone().after(4 * second));
        assert_eq!((read.remembered.turn, read.remembered.backoff.0), ((7 * second, 5 * second, Priority::High), Duration::ZERO));
        assert!(!read.differs(&memo.clone().after(4 * second)) && read.differs(&memo));
        let strange = model::Remembered { what: r#"{"turns":3}"#.to_owned(), ago_ms: 0 };
        assert_eq!(Memo::read(Some(&strange)), Memo::default());
    }
}
