//! Says in the program's log why it stands still: who holds it, and when it continues.

use std::cell::Cell;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process;
use std::sync::Mutex;
use std::time::Instant;
use vramctl_host::{PerProcess, Unpoison, program_of};
use vramctl_model::{Caller, Standing};

thread_local! {
    /// The client that this thread serves.
    static CLIENT: Cell<u32> = const { Cell::new(0) };
}

/// A hold that lasts.
struct Held {
    since: Instant,
    /// Who asked for it. `None`: it gives way to other programs that share its GPUs, which is routine and said at a lower level.
    by: Option<Caller>,
}

impl Held {
    fn level(&self) -> log::Level {
        if self.by.is_none() { log::Level::Info } else { log::Level::Warn }
    }
}

static HELD: PerProcess<Mutex<Option<Held>>> = PerProcess::new(Mutex::default);

/// From now on, this thread serves a client with this process id; 0 if it is out of sight.
pub(crate) fn serve(client: u32) {
    CLIENT.set(client);
}

/// The program stays held. Once for each hold. `gives_way`: for other programs that share its GPUs, until it makes a call.
pub(crate) fn held(gives_way: bool) {
    let by = (!gives_way).then(|| caller(CLIENT.get()));
    if HELD.get().lock().unpoisoned().replace(Held { since: Instant::now(), by: by.clone() }).is_some() {
        return;
    }
    match by {
        None => log::info!(
            "gives way to other programs that share its GPUs: its next call brings its memory back (`vramctl share` tells who and why)"
        ),
        Some(by) => log::warn!(
            "held by {by}: calls that start GPU work wait until everything is resumed (`vramctl resume --pid {}`)",
            process::id()
        ),
    }
}

/// The program is no longer held, if it was.
pub(crate) fn released() {
    let Some(held) = HELD.existing().and_then(|held| held.lock().unpoisoned().take()) else { return };
    log::log!(held.level(), "no longer held, after {:.1} s", held.since.elapsed().as_secs_f64());
}

/// Since when it is held, and by whom.
pub(crate) fn standing() -> Option<Standing> {
    let held = HELD.existing()?.lock().unpoisoned();
    held.as_ref().map(|Held { since, by }| Standing { seconds: since.elapsed().as_secs(), by: by.clone() })
}

fn caller(pid: u32) -> Caller {
    let user = fs::metadata(format!("/proc/{pid}")).ok().map(|its| its.uid());
    Caller { pid, program: program_of(pid).unwrap_or_default(), user }
}
