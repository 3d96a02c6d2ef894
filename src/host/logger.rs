//! The library's only output: lines on stderr, each in a single `write`.
//!
//! A program that closes its stderr gets the number for its next file, or its next connection. The two cannot be told apart from a redirection in
//! every case, and a line among a program's data does more harm than a missing one. So lines go to descriptor 2 only while that
//! looks like stderr (`is_stderr`), and nowhere else.

use crate::descriptor::{Identity, file_of};
use crate::exit;
use log::{Level, LevelFilter, Metadata, Record};
use std::fmt::{self, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::{mem, ptr};

struct Stderr;

/// The program's stderr when the library was loaded, if it was open.
static AT_LOAD: OnceLock<Identity> = OnceLock::new();

/// The loader calls this, before the program can close anything. It needs no memory, and only looks.
#[used]
#[unsafe(link_section = ".init_array")]
static NOTE_AT_LOAD: extern "C" fn() = {
    extern "C" fn note() {
        if let Some((file, _)) = file_of(libc::STDERR_FILENO) {
            let _ = AT_LOAD.set(file);
        }
    }
    note
};

/// Whether descriptor 2 is what the program's messages go to: what was there when the library was loaded; or what a program puts in its place to
/// redirect them, which is a terminal or another character device, a pipe, or a file opened for appending, and does not close on exec,
/// since a program's children have its stderr, too.
fn is_stderr() -> bool {
    let (Some(at_load), Some((file, mode))) = (AT_LOAD.get(), file_of(libc::STDERR_FILENO)) else { return false };
    // SAFETY: these calls touch no memory.
    let has = |command, flag| unsafe { libc::fcntl(libc::STDERR_FILENO, command) } & flag != 0;
    let redirects = match mode & libc::S_IFMT {
        libc::S_IFCHR | libc::S_IFIFO => true,
        libc::S_IFREG => has(libc::F_GETFL, libc::O_APPEND),
        _ => false,
    };
    file == *at_load || redirects && !has(libc::F_GETFD, libc::FD_CLOEXEC)
}

impl log::Log for Stderr {
    fn enabled(&self, metadata: &Metadata) -> bool {
        metadata.target().starts_with("vramctl")
    }

    fn log(&self, record: &Record) {
        // Work that fails because the program exits need not be reported.
        if !self.enabled(record.metadata()) || exit::is_ending() {
            return;
        }
        let level = match record.level() {
            Level::Error => "error",
            Level::Warn => "warn",
            Level::Info => "info",
            Level::Debug => "debug",
            Level::Trace => "trace",
        };
        let (process, text) = (std::process::id(), record.args());
        let mut line = ShortLine { bytes: [0; SHORT], length: 0 };
        match writeln!(line, "vramctl[{process}]: {level}: {text}") {
            Ok(()) => write_to_stderr(&line.bytes[..line.length]),
            Err(fmt::Error) => write_to_stderr(format!("vramctl[{process}]: {level}: {text}\n").as_bytes()),
        }
    }

    fn flush(&self) {}
}

/// Longer lines need memory. At the program's exit, messages must be shorter: the exit may have interrupted `malloc`.
const SHORT: usize = 512;

/// A line on the stack. Writing to it fails once it is full.
struct ShortLine {
    bytes: [u8; SHORT],
    length: usize,
}

impl Write for ShortLine {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let end = self.length + text.len();
        self.bytes.get_mut(self.length..end).ok_or(fmt::Error)?.copy_from_slice(text.as_bytes());
        self.length = end;
        Ok(())
    }
}

/// Writes a line, best effort: a full pipe must not block the program. A closed pipe must not kill it (SIGPIPE), nor may a file that
/// has reached the size limit (SIGXFSZ), and a terminal must not stop it in the background (SIGTTOU). Not `eprintln!`, which takes a lock
/// that a forked child could find held.
fn write_to_stderr(line: &[u8]) {
    if !is_stderr() {
        return;
    }
    let mut stderr = libc::pollfd { fd: libc::STDERR_FILENO, events: libc::POLLOUT, revents: 0 };
    // SAFETY: writable plain data, and a line that is readable for its length. The signal mask is this thread's own and is
    // restored; a signal raised by this write is consumed, one that was pending before is not.
    unsafe {
        if libc::poll(&raw mut stderr, 1, 0) != 1 || stderr.revents & libc::POLLOUT == 0 {
            return;
        }
        let (mut kept_off, mut before, mut pending) = (mem::zeroed(), mem::zeroed(), mem::zeroed());
        libc::sigemptyset(&raw mut kept_off);
        libc::sigaddset(&raw mut kept_off, libc::SIGPIPE);
        libc::sigaddset(&raw mut kept_off, libc::SIGXFSZ);
        // Blocked, it is not raised.
        libc::sigaddset(&raw mut kept_off, libc::SIGTTOU);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const kept_off, &raw mut before);
        libc::sigpending(&raw mut pending);
        let written = libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len());
        if written < 0 {
            for signal in [libc::SIGPIPE, libc::SIGXFSZ, libc::SIGTTOU] {
                if libc::sigismember(&raw const pending, signal) == 1 {
                    libc::sigdelset(&raw mut kept_off, signal);
                }
            }
            let no_time: libc::timespec = mem::zeroed();
            libc::sigtimedwait(&raw const kept_off, ptr::null_mut(), &raw const no_time);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut());
    }
}

/// Sets up the logger. `level` is `off`, `error`, `warn`, `info` or `debug`; anything else means `warn`. Called at the
/// program's first hooked call, so that nothing is printed into programs without CUDA. Idempotent; returns whether this call
/// was the first.
pub fn set_up(level: Option<&str>) -> bool {
    static DONE: AtomicBool = AtomicBool::new(false);
    if DONE.swap(true, Ordering::Relaxed) {
        return false;
    }
    let known = level.and_then(|level| level.parse().ok());
    // A Rust program that links this crate keeps its own logger.
    if log::set_logger(&Stderr).is_ok() {
        log::set_max_level(known.unwrap_or(LevelFilter::Warn));
    }
    if level.is_some_and(|level| !level.is_empty()) && known.is_none() {
        log::warn!("VRAMCTL_LOG is not one of off, error, warn, info, debug; using warn");
    }
    true
}

/// Logs a message once per process.
#[macro_export]
macro_rules! log_once {
    ($level:expr, $($text:tt)+) => {{
        static SAID: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);
        if !SAID.swap(true, std::sync::atomic::Ordering::Relaxed) {
            log::log!($level, $($text)+);
        }
    }};
}
