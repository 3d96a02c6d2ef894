//! The identity of this process: its name, its program, and the inference engine that it has announced.

use std::fs;
use std::sync::Mutex;
use vramctl_config::Config;
use vramctl_host::{PerProcess, Unpoison};

static ENGINE: PerProcess<Mutex<Option<String>>> = PerProcess::new(Mutex::default);

/// Announces the inference engine in this process; `None` withdraws it.
pub fn set(name: Option<&str>) {
    *ENGINE.get().lock().unpoisoned() = name.map(str::to_owned);
}

/// The announced inference engine.
pub fn name() -> Option<String> {
    ENGINE.existing()?.lock().unpoisoned().clone()
}

/// The process's name: `VRAMCTL_NAME`, else the program's.
pub fn process_name() -> String {
    Config::get().name.clone().unwrap_or_else(|| String::from_utf8_lossy(&own("comm")).trim().to_owned())
}

/// The beginning of its command line.
pub fn program() -> String {
    let command = own("cmdline");
    String::from_utf8_lossy(&command).replace('\0', " ").trim().chars().take(200).collect()
}

fn own(file: &str) -> Vec<u8> {
    fs::read(format!("/proc/self/{file}")).unwrap_or_default()
}
