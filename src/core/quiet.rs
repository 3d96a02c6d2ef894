//! Finds quiet moments ([`vramctl_backup::quiet`]) while the program runs.

use crate::{contexts, gate};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use vramctl_driver::{self as driver, Activity, Context, Current};
use vramctl_host::exit;

/// Does the work if the program makes no call, every context is idle, and the gate could be closed meanwhile. What was in the way, if anything: then
/// nothing was done, and the program has noticed nothing.
///
/// A call of the program's that comes in the middle waits until the work is done, which may take longer than is fair to a program that is
/// idle only between two launches (unregistering 64 MiB: 1 to 1.5 ms on an H100). So the program must have made no call for a while.
pub fn find(work: &mut dyn FnMut()) -> Activity {
    /// How long the program must have made no call. Tests wait for many moments.
    const REST: Duration = Duration::from_millis(if cfg!(debug_assertions) { 1 } else { 50 });
    /// How long calls that began before the gate was closed may be inside. Longer ones are waiting for something.
    const CALLS: Duration = Duration::from_micros(200);
    if exit::is_quiesced() || exit::is_ending() || !gate::is_held() && gate::idle_for() < REST {
        return Activity::Busy;
    }
    // Looked at twice: the first look is what a busy program has to do with this.
    let seen = activity_outside(&BTreeSet::new());
    if seen != Activity::Idle {
        return seen;
    }
    // Whoever else has closed it is at work on the same memory.
    let Some(closed) = gate::close_for_a_moment() else { return Activity::Busy };
    if closed.wait_until_empty(Instant::now() + CALLS, &mut || true).is_err() {
        return Activity::Busy;
    }
    let seen = activity_outside(&BTreeSet::new());
    if seen == Activity::Idle {
        work();
    }
    seen
}

/// The activity in all known contexts except those that are known to be idle.
pub fn activity_outside(idle: &BTreeSet<Context>) -> Activity {
    let asked = contexts::all().into_iter().filter(|context| !idle.contains(context));
    let mut seen = asked.map(|context| Current::push(context).map_or_else(Activity::of_failure, |current| driver::activity(&current)));
    seen.find(|seen| *seen != Activity::Idle).unwrap_or(Activity::Idle)
}
