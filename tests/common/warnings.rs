//! The library's warnings in this process.

use log::{LevelFilter, Log, Metadata, Record};
use std::sync::{Mutex, PoisonError};

struct Warnings(Mutex<Vec<String>>);

static WARNINGS: Warnings = Warnings(Mutex::new(Vec::new()));

impl Log for Warnings {
    fn enabled(&self, metadata: &Metadata) -> bool {
        metadata.level() <= log::Level::Warn
    }

    fn log(&self, record: &Record) {
        if self.enabled(record.metadata()) {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).push(record.args().to_string());
        }
    }

    fn flush(&self) {}
}

/// Collects warnings from now on, replacing the library's logger. Call once per process.
pub fn collect() {
    log::set_logger(&WARNINGS).unwrap();
    log::set_max_level(LevelFilter::Warn);
}

/// The warnings so far that are `meant`.
pub fn told(meant: impl Fn(&str) -> bool) -> Vec<String> {
    let all = WARNINGS.0.lock().unwrap_or_else(PoisonError::into_inner);
    all.iter().filter(|text| meant(text)).cloned().collect()
}
