//! The library's one way to speak: lines on stderr, each in a single `write`.

use crate::config;
use log::{LevelFilter, Metadata, Record};
use std::sync::Once;

struct Stderr;

impl log::Log for Stderr {
    fn enabled(&self, metadata: &Metadata) -> bool {
        metadata.target().starts_with("vramctl")
    }

    fn log(&self, record: &Record) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let level = record.level().as_str().to_ascii_lowercase();
        let line = format!("vramctl[{}]: {level}: {}\n", std::process::id(), record.args());
        // Not `eprintln!`, which takes a lock that a forked child could find held.
        // SAFETY: `line` is readable for its length. A closed or full stderr loses the line, nothing more.
        unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
    }

    fn flush(&self) {}
}

/// Sets the logger up, once, and says what was wrong with the environment. Called where CUDA memory first comes into
/// play, so that a program without CUDA is never spoken into.
pub fn set_up() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let asked = config::log_level();
        let level = asked.as_deref().and_then(|level| level.parse().ok());
        // In a Rust program that links this crate, the program's own logger stays.
        if log::set_logger(&Stderr).is_ok() {
            log::set_max_level(level.unwrap_or(LevelFilter::Warn));
        }
        if asked.is_some_and(|text| !text.is_empty()) && level.is_none() {
            log::warn!("VRAMCTL_LOG is not one of off, error, warn, info, debug; using warn");
        }
        for complaint in &config::Config::get().complaints {
            log::warn!("{complaint}");
        }
    });
}
