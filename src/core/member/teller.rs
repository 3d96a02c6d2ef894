//! Tells the scheduler of changes: one thread per connection, which sleeps until a call begins to wait, a request for room comes or goes, or
//! the time for a sign of life is there.

use super::{WORTH_A_WARNING, is_away, state, watches, why_waiting};
use crate::connection::Connection;
use crate::gate;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use vramctl_host::worker;
use vramctl_model::Error;

/// The longest time between two lines.
const SIGN_OF_LIFE: Duration = Duration::from_secs(2);
/// The shortest: what changes meanwhile goes into one line.
const TOGETHER: Duration = Duration::from_millis(2);
/// How often to look for calls while the scheduler wants to know how long there was none.
const LOOK_FOR_CALLS: Duration = Duration::from_millis(25);

/// Serves a connection, and tells its client meanwhile what changes.
pub fn telling(connection: &Connection, serve: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let teller = worker::spawn_scoped(scope, "vramctl-share", || tell_until(connection, &is_over))
            .map_err(|error| Error::NoThread(error.to_string()))?;
        gate::watcher::set(teller.thread().clone());
        let served = serve();
        is_over.store(true, Ordering::Release);
        teller.thread().unpark();
        served
    })
}

fn tell_until(connection: &Connection, is_over: &AtomicBool) {
    let (mut waiting, mut is_warned, mut is_first) = (Since::default(), false, true);
    while !is_over.load(Ordering::Acquire) {
        let calls_wait = waiting.of(gate::waiting() > 0);
        let wait_long = is_away() && calls_wait.is_some_and(|waited| waited >= WORTH_A_WARNING);
        if wait_long && !is_warned {
            log::warn!("calls have waited for the program's memory for {} s: {}", WORTH_A_WARNING.as_secs(), why_waiting());
        }
        is_warned = wait_long;
        // The client reads, or has hung up, which the other thread notices.
        if connection.send(&state(calls_wait, is_first), 0).is_err() {
            return;
        }
        is_first = false;
        thread::sleep(TOGETHER);
        thread::park_timeout(if watches() { LOOK_FOR_CALLS } else { SIGN_OF_LIFE });
    }
}

/// Since when something is so.
#[derive(Default)]
struct Since(Option<Instant>);

impl Since {
    fn of(&mut self, is_so: bool) -> Option<Duration> {
        self.0 = if is_so { self.0.or_else(|| Some(Instant::now())) } else { None };
        self.0.map(|since| since.elapsed())
    }
}
