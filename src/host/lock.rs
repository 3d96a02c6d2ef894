//! Locks that a panic does not break.

use std::sync::{LockResult, PoisonError};

/// What a lock protects, even if another thread has panicked while it held the lock: that must not break the program, too.
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
