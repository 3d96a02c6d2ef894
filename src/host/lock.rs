//! Locks that a panic does not break.

use std::sync::{LockResult, PoisonError};

/// Gives access to what a lock protects, even if another thread has panicked while that thread held the lock: a bug of the library must not
/// break the program as well.
pub trait Unpoison<T> {
    /// The guard, or what a wait returns.
    fn unpoisoned(self) -> T;
}

impl<T> Unpoison<T> for LockResult<T> {
    #[inline]
    fn unpoisoned(self) -> T {
        self.unwrap_or_else(PoisonError::into_inner)
    }
}
