//! Other processes that hold device memory.

use crate::Bytes;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A process that holds device memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Process id as the driver sees it; in a container it may be the host's.
    pub pid: u32,
    /// Bytes of device memory, if the driver reports them.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub bytes: Option<u64>,
    /// The program's name, if `/proc` has the process.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub program: Option<String>,
}

impl fmt::Display for Holder {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "pid {}", self.pid)?;
        if let Some(program) = &self.program {
            write!(out, " ({program})")?;
        }
        match self.bytes {
            Some(bytes) => write!(out, " {}", Bytes(bytes)),
            None => Ok(()),
        }
    }
}

/// Memory of one tag that another process has open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lent {
    /// The tag.
    pub tag: String,
    /// Who has it open, and how many bytes. The pid is 0 if the process is in another container.
    pub by: Holder,
}

impl fmt::Display for Lent {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} by {}", self.tag, self.by)
    }
}
