//! NCCL's communicators.

use serde::{Deserialize, Serialize};

/// A rank of a communicator of NCCL.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Communicator {
    /// The same at all of its ranks, in whichever process. One that was split off another has the other's id, rank and ranks: its own ranks are
    /// among them.
    pub id: String,
    /// Which of its ranks this is.
    pub rank: u32,
    /// How many ranks it has; 0 if that is not known.
    pub ranks: u32,
}
