//! Finds quiet moments ([`vramctl_backup::quiet`]) while the program runs.

use crate::{contexts, gate};
use std::time::{Duration, Instant};
use vramctl_driver::{self as driver, Current};
use vramctl_host::exit;

/// Does the work if every context is idle, with the gate closed meanwhile. A call of the program's that comes at this very moment waits until
/// the work is done; at any other moment, the program notices nothing. `false`: this was no such moment, and nothing was done.
pub fn find(work: &mut dyn FnMut()) -> bool {
    /// How long calls may be inside that came before the gate was closed. Longer ones are waiting for something.
    const CALLS: Duration = Duration::from_micros(200);
    // Looked at twice: the first look is what a busy program has to do with this.
    if exit::is_resting() || exit::is_ending() || !is_everything_idle() {
        return false;
    }
    // Whoever else has closed it is at work on the same memory.
    let Some(closed) = gate::close_for_a_moment() else { return false };
    let is_quiet = closed.wait_until_empty(Instant::now() + CALLS, &mut || true).is_ok() && is_everything_idle();
    if is_quiet {
        work();
    }
    is_quiet
}

/// Whether no work is in flight in any known context.
pub fn is_everything_idle() -> bool {
    contexts::all().into_iter().all(|context| {
        let _alive = contexts::alive();
        let is_idle = Current::push(context).and_then(|current| driver::is_idle(&current));
        // Nothing runs in a context that is gone or lost.
        is_idle.unwrap_or_else(|failure| failure.is_of_gone_context() || failure.is_of_earlier_work())
    })
}
