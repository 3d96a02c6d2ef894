//! Other processes that hold device memory, or have memory of each other open.

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

/// Memory of another process that this one has open (CUDA IPC), on one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Borrowed {
    /// The owner's pid, as in the name of its socket.
    pub owner: u32,
    /// The UUID of the GPU; absent if the driver does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
    /// Bytes of device memory when active.
    pub bytes: u64,
    /// Of those, bytes that are paused.
    pub paused_bytes: u64,
}
