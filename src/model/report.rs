//! What a pause or resume did, and who hears of it.

use crate::units::is_zero;
use crate::{Borrowed, Bytes, Error, Progress, Stage};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// What a pause or resume did.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Allocations that changed state.
    pub allocations: u64,
    /// Their bytes of device memory, released or allocated again.
    pub bytes: u64,
    /// Of those, bytes whose contents were saved or restored.
    pub kept_bytes: u64,
    /// Of those, bytes in files; the rest is in host memory.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub disk_bytes: u64,
    /// Of the bytes saved, those that a retained backup already held, so they were not copied.
    #[serde(default)]
    pub unchanged_bytes: u64,
    /// Of `bytes`, those whose contents were discarded: they read as zero after the resume.
    pub discarded_bytes: u64,
    /// Allocations that were in the requested state already.
    pub unchanged: u64,
    /// After a resume from outside without `self_paused`: bytes that stay paused, because the program has paused them itself.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub self_paused_bytes: u64,
    /// Bytes that the driver has refused to take back so far. Every pause, resume and shortage retries them.
    pub late_bytes: u64,
    /// After a resume: memory of other processes that this one has open, that the request selects and that is not back yet. After a pause
    /// of others: the memory of theirs that was set aside. The program stays held until it is back, and then continues by itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<Borrowed>,
    /// After a resume: memory of other processes that this one has open, and that is lost, since the last report: its owner has ended, or has
    /// freed the memory while it was paused. The program runs on without it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<Borrowed>,
    /// After a resume: what the driver refuses of what the program has mapped or opened while it was paused, in words. The memory is back without
    /// that.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refused: Vec<String>,
    /// After a pause with a guard: the guarded bytes.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub guarded_bytes: u64,
    /// After a pause with a guard: the bytes for which the guard failed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub unguarded_bytes: u64,
    /// Device memory used by guards, until no memory of their device is guarded any more.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub guard_bytes: u64,
    /// After a resume: bytes of the guards that something wrote to since the last report. A guard is mapped at many addresses, so
    /// this may be less than was written.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub guard_written_bytes: u64,
    /// With host memory that changes hands in a swap: the most by which the available host memory had shrunk, whoever took it, when a pause took a piece.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub host_taken_bytes: u64,
    /// Milliseconds in each stage.
    pub stages: BTreeMap<Stage, f64>,
    /// Milliseconds in total.
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

/// Follows a pause or resume for the caller that requested it.
pub trait Observer {
    /// Reports progress. Must not block. If it is already known that the caller will not commit, the error says why: no more is copied, and
    /// everything is undone.
    fn progress(&mut self, _: Progress) -> Result<(), Error> {
        Ok(())
    }

    /// Whether the caller has disconnected; `None` if it cannot. A pause that is still waiting for the device and a resume that is still
    /// waiting for memory are then abandoned.
    fn is_gone(&mut self) -> Option<bool> {
        None
    }

    /// Whether the caller has not disconnected, as far as it is known.
    fn is_wanted(&mut self) -> bool {
        self.is_gone() != Some(true)
    }
}

/// A caller that does not observe.
impl Observer for () {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stage_is_at_its_place() {
        assert!(Stage::ALL.iter().enumerate().all(|(place, stage)| *stage as usize == place));
        // The last one of the enumeration.
        assert_eq!(Stage::ALL.last(), Some(&Stage::Restore));
    }
}
