//! The two transitions, their stages, and the states between which they lead.

use serde::{Deserialize, Serialize};

/// The two transitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verb {
    /// Take memory away.
    Pause,
    /// Give it back.
    Resume,
}

impl Verb {
    /// The name used in the protocol and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pause => "pause",
            Self::Resume => "resume",
        }
    }

    /// The state of a tag afterwards.
    pub fn end(self) -> TagState {
        match self {
            Self::Pause => TagState::Paused,
            Self::Resume => TagState::Active,
        }
    }
}

/// A stage of a pause or resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// Wait for the device's work, or for free memory.
    Wait,
    /// Copy contents to the backup.
    Save,
    /// Unmap physical memory from its addresses.
    Unmap,
    /// Give physical memory back to the driver.
    Release,
    /// Map the guard under paused addresses, or remove it.
    Guard,
    /// Map new physical memory at the addresses.
    Map,
    /// Copy contents back.
    Restore,
}

impl Stage {
    /// All of them, in order: a recorded stage is its place here.
    pub const ALL: [Self; 7] = [Self::Wait, Self::Save, Self::Unmap, Self::Release, Self::Guard, Self::Map, Self::Restore];

    /// The name used in the protocol.
    pub fn name(self) -> &'static str {
        match self {
            Self::Wait => "wait",
            Self::Save => "save",
            Self::Unmap => "unmap",
            Self::Release => "release",
            Self::Guard => "guard",
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

/// The state of a tag.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TagState {
    /// Every allocation has physical memory.
    #[default]
    Active,
    /// None has.
    Paused,
    /// Some have: they were allocated after the pause.
    Mixed,
    /// A pause is in progress.
    Pausing,
    /// A resume is in progress.
    Resuming,
    /// A pause or resume has failed, or was cancelled, and is taken back.
    Undoing,
}

impl TagState {
    /// The name used in the protocol.
    pub fn name(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Paused => "paused",
            Self::Mixed => "mixed",
            Self::Pausing => "pausing",
            Self::Resuming => "resuming",
            Self::Undoing => "undoing",
        }
    }

    /// Whether a pause or resume is in progress.
    pub fn is_under_way(self) -> bool {
        matches!(self, Self::Pausing | Self::Resuming | Self::Undoing)
    }
}
