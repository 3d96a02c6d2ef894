//! Says in the program's log why it stands still: who holds it, and when it continues.

use std::cell::Cell;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process;
use std::sync::Mutex;
use std::time::Instant;
use vramctl_host::{PerProcess, Unpoison};

thread_local! {
    /// The client that this thread serves.
    static CLIENT: Cell<u32> = const { Cell::new(0) };
}

/// A hold that lasts.
struct Held {
    since: Instant,
    /// What is routine is said at a lower level.
    level: log::Level,
}

static HELD: PerProcess<Mutex<Option<Held>>> = PerProcess::new(Mutex::default);

/// From now on, this thread serves a client with this process id; 0 if it is out of sight.
pub(crate) fn serve(client: u32) {
    CLIENT.set(client);
}

/// The program stays held. Once for each hold. `gives_way`: for other programs that share its GPUs, until it makes a call.
pub(crate) fn held(gives_way: bool) {
    let level = if gives_way { log::Level::Info } else { log::Level::Warn };
    if HELD.get().lock().unpoisoned().replace(Held { since: Instant::now(), level }).is_some() {
        return;
    }
    if gives_way {
        log::info!(
            "gives way to other programs that share its GPUs: its next call brings its memory back (`vramctl share` tells who and why)"
        );
    } else {
        let own = process::id();
        log::warn!(
            "held by {}: calls that start GPU work wait until everything is resumed (`vramctl resume --pid {own}`)",
            in_words(CLIENT.get())
        );
    }
}

/// The program is no longer held, if it was.
pub(crate) fn released() {
    let Some(Held { since, level }) = HELD.existing().and_then(|held| held.lock().unpoisoned().take()) else { return };
    log::log!(level, "no longer held, after {:.1} s", since.elapsed().as_secs_f64());
}

fn in_words(pid: u32) -> String {
    if pid == 0 {
        return "a process out of sight".into();
    }
    let folder = format!("/proc/{pid}");
    let name = fs::read_to_string(format!("{folder}/comm")).unwrap_or_default();
    let user = fs::metadata(folder).map_or_else(|_| String::new(), |its| format!(", user {}", its.uid()));
    format!("process {pid} ({}{user})", name.trim().escape_debug())
}
