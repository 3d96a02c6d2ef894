//! Jobs over several nodes.
//!
//! The ranks of each node are taken through an attempt by a [`Participant`], which is this crate on that node. The participants take the same
//! steps ([`Step`](crate::barrier::Step)) together: when all ranks here have reached one, the participant says so, and goes on when its
//! coordinator says so. A coordinator elsewhere waits for all of them.
//!
//! Before the last step, a participant may give up by itself. Saying that all ranks here are prepared is its *vote*; from then on it does what
//! has been decided for all nodes. The decision is a *record* that is set once, somewhere where all nodes can read it. If a participant that
//! has voted hears nothing any more, it reads the record by a command, which sets it to aborted unless it is set. So nobody waits for a
//! coordinator that has died, and all nodes do the same.

pub mod coordinator;
pub mod messages;
mod participant;

pub use participant::{Aborted, Next, Participant, Participation, Terms, Word};
