//! Leaves a suspended process without any descriptor of the library's, so that it can be written to a disk: no socket, no lock, no connection. The
//! process is not reached meanwhile, so it looks by itself when that is over. To look takes a descriptor for a moment; whoever writes the process
//! looks for that.
//!
//! The process of an image goes on from here, too, with another PID namespace, and perhaps on another day. Then nobody has to release it.

use crate::connection::Connection;
use crate::memory::{Memory, borrow};
use crate::suspend::suspended;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use vramctl_backup as backup;
use vramctl_config as config;
use vramctl_control::absence;
use vramctl_control::discovery::{self, Bound};
use vramctl_host::{PerProcess, reserve};
use vramctl_model::Error;

/// Set from the answer to a client until the control thread has listened anew.
static WANTED: PerProcess<AtomicBool> = PerProcess::new(AtomicBool::default);

/// Whether the control thread is to close everything.
pub fn is_wanted() -> bool {
    WANTED.existing().is_some_and(|wanted| wanted.load(Ordering::SeqCst))
}

/// Fails unless the process is suspended, or if only another process still needs some of its memory: without the connection, it would be given back.
pub fn check() -> Result<(), Error> {
    let why = "only a suspended process can be detached";
    suspended().map(drop).ok_or_else(|| Error::Invalid(why.into()))?;
    let all = Memory::get().registry.snapshot();
    if all.iter().any(|allocation| allocation.is_given_up() && allocation.contents().lending.is_open()) {
        return Err(Error::Invalid("it has released memory that another process has imported and keeps; have that released, too".into()));
    }
    Ok(())
}

/// Has the control thread close everything.
pub fn want() {
    WANTED.get().store(true, Ordering::SeqCst);
}

/// Gives up the socket's name last, by which who waits knows that nothing is left. Returns once the process may listen again.
pub fn stay_away(bound: Option<Bound>) {
    /// How long clients may take to hang up.
    const PATIENCE: Duration = Duration::from_secs(5);
    const LOOK_EVERY: Duration = Duration::from_millis(20);
    // First: those that are saved together are each other's clients.
    borrow::hang_up();
    if !Connection::close_all(PATIENCE) {
        log::warn!("some clients do not hang up");
    }
    backup::close_origin();
    reserve::empty();
    bound.into_iter().for_each(Bound::give_up);
    let before = discovery::own_namespace();
    // In another namespace, this is the process of an image.
    while discovery::own_namespace() == before && absence::is_kept_away() {
        thread::sleep(LOOK_EVERY);
    }
    // The kernel may have given the number of a namespace that has ended to the new one, but nobody tells anything to a process that returns.
    let told = absence::told();
    if told.is_some() || discovery::own_namespace() != before {
        backup::draw_secret();
        told.and_then(|told| told.name).iter().for_each(|name| config::set_own_name(name));
    }
    WANTED.get().store(false, Ordering::SeqCst);
}
