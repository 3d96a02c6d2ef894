//! A pause or a resume: what is asked for, how far it has come, and what it did.

use crate::{Backup, Bytes, Span};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// What to pause or resume, and how.
#[derive(Debug, Clone, Default)]
pub struct TransitionRequest {
    /// The tags; none means all.
    pub tags: Vec<String>,
    /// The GPUs, by their UUIDs; none means all.
    pub gpus: Vec<String>,
    /// What becomes of the contents, in place of the allocations' own policies. For a pause only.
    pub backup: Option<Backup>,
    /// The same for single tags, in place of `backup`; `None`: the allocations' own policies.
    pub backups: BTreeMap<String, Option<Backup>>,
    /// How long to wait: a pause for the device's work, a resume for memory that others hold. `None`: a pause waits for
    /// as long as it takes, a resume not at all.
    pub timeout: Option<Duration>,
    /// Device memory whose contents nobody needs, wherever a policy says that they are kept. For a pause only.
    pub unused: Vec<Span>,
    /// The inference engine whose KV cache must not be dropped, because its prefix cache describes it. For a pause only.
    pub engine: Option<String>,
}

/// A part of a pause or resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// For the device's work, or for memory.
    Wait,
    /// Contents are copied to where they are kept.
    Save,
    /// Memory is taken away from its addresses.
    Unmap,
    /// Memory is given back to the driver.
    Release,
    /// New memory is put at the addresses.
    Map,
    /// Contents are copied back.
    Restore,
}

impl Stage {
    /// As in the protocol.
    pub fn name(self) -> &'static str {
        match self {
            Self::Wait => "wait",
            Self::Save => "save",
            Self::Unmap => "unmap",
            Self::Release => "release",
            Self::Map => "map",
            Self::Restore => "restore",
        }
    }
}

/// How far a stage has come, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// The stage.
    pub stage: Stage,
    /// Bytes done.
    pub done: u64,
    /// Bytes to do.
    pub total: u64,
}

/// What a pause or resume did.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Allocations that changed their state.
    pub allocations: u64,
    /// Their bytes of device memory, now given back or taken again.
    pub bytes: u64,
    /// Of those, bytes whose contents were saved or restored.
    pub kept_bytes: u64,
    /// Of the bytes saved, those that were not copied, because the backup had them already.
    #[serde(default)]
    pub unchanged_bytes: u64,
    /// Of those, bytes whose contents were discarded: they read as zero after the resume.
    pub discarded_bytes: u64,
    /// Allocations that were already so.
    pub unchanged: u64,
    /// Bytes that the driver has refused to take back so far. They are not lost: it is tried again at every pause,
    /// resume and shortage.
    pub late_bytes: u64,
    /// Milliseconds in each stage.
    pub stages: BTreeMap<Stage, f64>,
    /// Milliseconds in all.
    pub ms: f64,
}

impl fmt::Display for Report {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} in {:.1} ms, {} kept", Bytes(self.bytes), self.ms, Bytes(self.kept_bytes))?;
        if self.unchanged_bytes > 0 {
            write!(out, " ({} of it unchanged)", Bytes(self.unchanged_bytes))?;
        }
        self.stages.iter().try_for_each(|(stage, ms)| write!(out, ", {} {ms:.1}", stage.name()))
    }
}

/// Who asked for a pause or resume, and wants to know how it goes.
pub trait Observer {
    /// A stage has come so far. Must not block.
    fn progress(&mut self, _: Progress) {}

    /// Whether nobody is interested any more; `None`: that is never so. A pause that still waits for the device's work, and a
    /// resume that has not found its memory yet, are given up then.
    fn is_gone(&mut self) -> Option<bool> {
        None
    }
}

/// Nobody in particular.
impl Observer for () {}
