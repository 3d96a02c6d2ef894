//! Registered memory: another process that has imported it, a network card or NCCL refers to its physical pages.

use crate::Bytes;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The registered memory of one tag.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registration {
    /// The tag.
    pub tag: String,
    /// Who registered it: the call by which it was seen, or another process.
    pub registrant: String,
    /// Bytes of device memory.
    pub bytes: u64,
}

impl fmt::Display for Registration {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} of {} ({})", Bytes(self.bytes), self.tag, self.registrant)
    }
}
