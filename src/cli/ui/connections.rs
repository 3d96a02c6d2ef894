//! The connections of an operation to its processes. To cancel it, all of them are closed.

use std::collections::BTreeMap;
use std::mem;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard};
use std::thread;
use vramctl_host::Unpoison;

/// Those of one operation.
#[derive(Default)]
pub struct Connections(Mutex<State>);

#[derive(Default)]
struct State {
    /// By process.
    open: BTreeMap<u32, UnixStream>,
    /// All are closed, and no new one is used.
    closed: bool,
}

impl Connections {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unpoisoned()
    }

    /// One to this process. After the cancellation, the thread parks.
    pub fn add(&self, pid: u32, stream: UnixStream) {
        self.state().open.insert(pid, stream);
        self.stay_if_closed();
    }

    /// The process's is no longer needed.
    pub fn remove(&self, pid: u32) {
        self.state().open.remove(&pid);
    }

    /// Closes all, which cancels requests that only wait. From now on, threads park.
    pub fn close_all(&self) {
        let mut state = self.state();
        state.closed = true;
        for connection in mem::take(&mut state.open).values() {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    /// After the cancellation, parks the thread forever: the thread that has cancelled prints the outcome and ends the process.
    pub fn stay_if_closed(&self) {
        while self.state().closed {
            thread::park();
        }
    }
}
