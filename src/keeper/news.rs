//! What the scheduler's loop hears.

use crate::change::Ended;
use std::os::unix::net::UnixStream;
use vramctl_control::protocol;
use vramctl_model::MemberState;
use vramctl_scheduler::ChangeId;

/// Something that the loop hears.
#[derive(Debug)]
pub enum News {
    /// A process may have come or gone.
    Directory,
    /// A member says how it is.
    State(u32, MemberState),
    /// A process is no member, or refuses this scheduler.
    Refused(u32, protocol::Refusal),
    /// A connection has ended.
    Gone(u32),
    /// A change of places has ended.
    Done(ChangeId, Ended),
    /// Another keeper is the scheduler now.
    Deposed,
    /// Somebody wants to see how things are.
    Asked(UnixStream),
}
