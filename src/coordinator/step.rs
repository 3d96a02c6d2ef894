//! The steps of an attempt, which the ranks of a job take together, on all nodes.

/// The points at which the ranks wait for each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// The ranks are known; nothing has begun. Of the participant alone.
    Found,
    /// The ranks that had to wait for memory have it.
    Early,
    /// All gates are closed; only then does it make sense to wait for work.
    Held,
    /// No device has work any more; only then does it make sense to copy contents.
    Drained,
    /// Every step that can fail is done.
    Prepared,
}
