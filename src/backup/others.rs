//! Cooperation between vramctl processes on a host: one may keep memory for later that another needs now.
//!
//! They signal by locking bytes of the control socket directory; the system releases the locks when a process dies. Only
//! processes that need memory check the locks, and those that keep some, which poll for memory pressure anyway.

use std::fs::File;
use vramctl_config as config;
use vramctl_host::Held;
use vramctl_host::directory::open_private;
use vramctl_host::file_lock::{Sharing, is_byte_locked, try_lock_byte};

/// What a process signals, and the byte it locks.
#[derive(Debug, Clone, Copy)]
pub enum Says {
    /// It keeps unused host memory or is releasing it.
    Keeps = 0,
    /// It needs host memory for a pause.
    Needs = 1,
}

/// Signals while it lives.
#[derive(Debug)]
pub struct Sign {
    /// Holds the lock.
    _directory: Held,
}

impl Sign {
    /// Gives a signal. `None`, and no signal, if the directory does not exist or does not support locks.
    pub fn put_up(says: Says) -> Option<Self> {
        let directory = Held::new(own_directory()?).ok()?;
        let is_locked = try_lock_byte(&*directory.as_type::<File>().ok()?, says as u64, Sharing::Shared).ok()?;
        is_locked.then_some(Self { _directory: directory })
    }
}

/// Whether any process, including this one, gives this signal.
pub fn any(says: Says) -> bool {
    own_directory().is_some_and(|directory| is_byte_locked(&directory, says as u64).unwrap_or(false))
}

/// The directory of the sockets, if nobody else can change it: locks in a foreign directory are foreign.
fn own_directory() -> Option<File> {
    open_private(config::socket_directory(), false).ok().map(|(directory, _)| directory)
}
