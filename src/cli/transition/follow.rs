//! Follows the processes of a job, and disconnects from them after ^C.

use crate::engine::Engines;
use crate::failure::CommandError;
use crate::output;
use crate::progress::Bar;
use std::collections::BTreeMap;
use std::mem;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard};
use std::thread;
use vramctl_control::job::Follower;
use vramctl_control::protocol::Refusal;
use vramctl_control::queue::Claim;
use vramctl_host::Unpoison;
use vramctl_model::Progress;

/// The connections of a command.
#[derive(Default)]
pub struct Connections(Mutex<OpenConnections>);

#[derive(Default)]
struct OpenConnections {
    /// By process.
    open: BTreeMap<u32, UnixStream>,
    /// ^C was pressed: all connections are being closed.
    interrupted: bool,
}

impl Connections {
    fn lock(&self) -> MutexGuard<'_, OpenConnections> {
        self.0.lock().unpoisoned()
    }

    /// After ^C, parks the thread forever: the interrupting thread prints the outcome and ends the process.
    pub fn stay_if_interrupted(&self) {
        while self.lock().interrupted {
            thread::park();
        }
    }

    /// Closes all connections, which cancels requests that are only waiting. From now on, threads park.
    pub fn interrupt(&self) {
        let mut state = self.lock();
        state.interrupted = true;
        for connection in mem::take(&mut state.open).values() {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }
}

/// Tells the user who is ahead in the queue.
pub fn tell_queue(before: &[Claim]) {
    let first: Vec<_> = before.iter().map(|ticket| ticket.who.as_str()).collect();
    output::complain("note", &format!("number {} in the queue for GPU memory, behind {}", before.len() + 1, first.join(", ")));
}

/// Shows the progress of a job, and disconnects from it when interrupted.
pub struct Following<'a> {
    pub connections: &'a Connections,
    /// One for each member.
    pub bars: Vec<Mutex<Bar>>,
    /// Those that must still have no requests when their memory is released.
    pub engines: Option<&'a Engines>,
    /// Whether to tell the user about a queue.
    pub tells_queue: bool,
}

impl Follower for Following<'_> {
    fn connected(&self, pid: u32, stream: UnixStream) {
        self.connections.lock().open.insert(pid, stream);
        self.connections.stay_if_interrupted();
    }

    fn disconnected(&self, pid: u32) {
        self.connections.lock().open.remove(&pid);
    }

    fn drained(&self) -> Result<(), Box<Refusal>> {
        self.engines.map_or(Ok(()), Engines::confirm).map_err(CommandError::into_refusal)
    }

    fn queued(&self, before: &[Claim]) {
        if self.tells_queue {
            tell_queue(before);
        }
    }

    fn progress(&self, member: usize, now: Progress) {
        // Borrowers copy nothing.
        if let Some(bar) = self.bars.get(member) {
            bar.lock().unpoisoned().show(now);
        }
    }
}
