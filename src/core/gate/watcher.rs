//! The thread that is woken when a call begins to wait at the gate.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::thread::Thread;

/// Null: there is none. A handle is never freed, because a thread that wakes it may still be using it.
static WATCHER: AtomicPtr<Thread> = AtomicPtr::new(ptr::null_mut());

/// From now on, this thread is woken.
pub fn set(thread: Thread) {
    WATCHER.store(Box::into_raw(Box::new(thread)), Ordering::Release);
}

/// Wakes the watcher. Neither allocates nor locks.
pub fn wake() {
    // SAFETY: null, or a thread's handle that is never freed. A forked child wakes a thread that it does not have: nothing happens.
    if let Some(watcher) = unsafe { WATCHER.load(Ordering::Acquire).as_ref() } {
        watcher.unpark();
    }
}
