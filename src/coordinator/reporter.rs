//! How a user interface reports an operation.

use crate::queue::Ticket;
use std::os::unix::net::UnixStream;
use vramctl_model::Progress;

/// Reports an operation while it runs, from any of its threads.
pub trait Reporter: Sync {
    /// What the user should know, and need not act on.
    fn note(&self, _text: &str) {}

    /// What the user should act on.
    fn warn(&self, _text: &str) {}

    /// A part has failed, and the operation goes on.
    fn fail(&self, _text: &str) {}

    /// A step of several is done, which the outcome does not show by itself.
    fn done(&self, _text: &str) {}

    /// Other jobs are ahead in the queue for the same GPUs.
    fn queued(&self, _ahead: &[Ticket]) {}

    /// Whether to ask the processes for their progress.
    fn follows_progress(&self) -> bool {
        false
    }

    /// The progress of a process.
    fn progress(&self, _pid: u32, _now: Progress) {}

    /// A connection to a process, which ends the attempt when it is shut down.
    fn connected(&self, _pid: u32, _stream: UnixStream) {}

    /// The connection is no longer needed. The process counts it until every handle on it is closed.
    fn disconnected(&self, _pid: u32) {}
}

/// Nobody listens.
impl Reporter for () {}
