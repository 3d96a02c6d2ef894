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

/// Since when the program is held.
static SINCE: PerProcess<Mutex<Option<Instant>>> = PerProcess::new(Mutex::default);

/// From now on, this thread serves a client with this process id; 0 if it is out of sight.
pub(crate) fn serve(client: u32) {
    CLIENT.set(client);
}

/// The program stays held. Once for each hold.
pub(crate) fn held() {
    let mut since = SINCE.get().lock().unpoisoned();
    if since.replace(Instant::now()).is_none() {
        let own = process::id();
        log::warn!(
            "held by {}: calls that start GPU work wait until everything is resumed (`vramctl resume --pid {own}`)",
            in_words(CLIENT.get())
        );
    }
}

/// The program is no longer held, if it was.
pub(crate) fn released() {
    let Some(since) = SINCE.existing().and_then(|since| since.lock().unpoisoned().take()) else { return };
    log::warn!("no longer held, after {:.1} s", since.elapsed().as_secs_f64());
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
