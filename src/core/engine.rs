//! The identity of this process: its name, its program, and the inference engine that it has announced.

use std::fs;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use vramctl_config::own_name;
use vramctl_host::system::own_folder;
use vramctl_host::{PerProcess, Unpoison, own_program};

static ENGINE: PerProcess<Mutex<Option<String>>> = PerProcess::new(Mutex::default);

/// Announces the inference engine in this process; `None` withdraws it.
pub fn set(name: Option<&str>) {
    *ENGINE.get().lock().unpoisoned() = name.map(str::to_owned);
}

/// Whether all of its KV cache has the tag of one. Otherwise, it may be in everything that is not known to be something else.
static TAGS_CACHE: PerProcess<AtomicBool> = PerProcess::new(AtomicBool::default);

/// Declares whether all of the engine's KV cache has the tag `kv_cache`.
pub fn set_tags_cache(tags: bool) {
    TAGS_CACHE.get().store(tags, Ordering::Relaxed);
}

/// Whether all of the engine's KV cache has the tag `kv_cache`.
pub fn tags_cache() -> bool {
    TAGS_CACHE.existing().is_some_and(|tags| tags.load(Ordering::Relaxed))
}

/// The announced inference engine.
pub fn name() -> Option<String> {
    ENGINE.existing()?.lock().unpoisoned().clone()
}

/// The process's name: that of an image's process, else `VRAMCTL_NAME`, else the program's ([`own_program`]).
pub fn process_name() -> String {
    own_name().or_else(own_program).unwrap_or_default()
}

/// The beginning of its command line.
pub fn program() -> String {
    let command = fs::read(own_folder().join("cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&command).replace('\0', " ").trim().chars().take(200).collect()
}

/// For how many seconds it has been running.
pub fn age_s() -> Option<u64> {
    const STARTED: usize = 22;
    let (status, uptime) = (own("stat"), fs::read_to_string("/proc/uptime").ok()?);
    // The second field, in brackets, may contain anything.
    let rest = String::from_utf8_lossy(&status).rsplit_once(')')?.1.to_owned();
    let ticks: u64 = rest.split_whitespace().nth(STARTED - 3)?.parse().ok()?;
    let up: f64 = uptime.split_whitespace().next()?.parse().ok()?;
    // SAFETY: touches no memory.
    let per_second = u64::try_from(unsafe { libc::sysconf(libc::_SC_CLK_TCK) }).ok().filter(|ticks| *ticks > 0)?;
    Some((up as u64).saturating_sub(ticks / per_second))
}

/// What of the main thread stays when that ends: its name, say.
fn own(file: &str) -> Vec<u8> {
    fs::read(format!("/proc/self/{file}")).unwrap_or_default()
}
