//! The error type, and its CUDA, C and protocol codes.

use crate::{Bytes, Failure, Holder, Kind, Lent, Obstacle, OverLimit, Registration, code, gpu_in_words};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// Why a call failed. Nothing has changed unless the message says otherwise: undoing can fail, too.
#[derive(Debug, Clone)]
pub enum Error {
    /// The driver refused a call.
    Driver(Failure),
    /// The program's own GPU work failed (an illegal address, say). The error is sticky: the context is lost.
    Work(Failure),
    /// The device has too little free memory.
    DeviceMemory(Shortage),
    /// The process has as much device memory as it may.
    Limit(OverLimit),
    /// The host has too little memory for the backup.
    HostMemory {
        /// Bytes of contents to keep.
        needed: u64,
        /// Bytes available on the host.
        available: u64,
        /// Whether the limit is `VRAMCTL_HOST_CAP`.
        capped: bool,
    },
    /// A thread could not be started; the text says why.
    NoThread(String),
    /// A backup file could not be created, written or read; the text says which and why.
    Disk(String),
    /// Tags that no allocation has.
    UnknownTag {
        /// The requested tags that do not exist.
        unknown: Vec<String>,
        /// The tags that do.
        known: Vec<String>,
    },
    /// A stream is being captured into a graph, so memory cannot be taken away.
    Capturing,
    /// The device did not finish its work in time.
    Busy(Duration),
    /// The program could not be held in time; the text says what is in the way.
    NotHeld(String),
    /// The program cannot be held: some of its calls pass by the gate; the texts say why.
    PassesBy(Vec<String>),
    /// The program did not do something in time; the text says what.
    Late(String),
    /// The device has no virtual memory management.
    Unsupported,
    /// The pause would discard a KV cache that this inference engine's prefix cache still describes.
    PrefixCache(String),
    /// The pause would replace memory whose physical pages are registered with somebody else.
    Registered(Vec<Registration>),
    /// Other processes have memory open that would be paused.
    Shared(Vec<Lent>),
    /// The process is suspended, and the request needs its driver.
    Suspended,
    /// The process could be checkpointed, but not restored.
    NotRestorable(Vec<Obstacle>),
    /// The request is invalid; the text says why.
    Invalid(String),
    /// The address is not in a paused allocation whose contents are kept; the text says why.
    NotPaused(String),
    /// A caller's buffer is too small.
    BufferTooSmall {
        /// Bytes needed.
        needed: usize,
        /// The buffer's size in bytes.
        capacity: usize,
    },
    /// The program is exiting. Transitions in progress are abandoned, and none is started.
    Ending,
    /// The transition was undone before its commit; the text says why.
    Aborted(String),
    /// What was begun has failed, and undoing it, too, for this reason; the text says what is where, and what to do.
    NotUndone(Box<Error>, String),
    /// Another client is in the middle of a transition of this process.
    Leased,
    /// A scheduler asks whose epoch is over.
    Stale {
        /// Its epoch.
        epoch: u64,
        /// The newest that the process has heard of.
        newest: u64,
    },
    /// A bug in the library.
    Internal(String),
}

/// How much device memory is missing, and who holds it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shortage {
    /// The device's ordinal in the process that lacks it. The command line counts as `nvidia-smi` does.
    pub device: i32,
    /// Its UUID, the same everywhere; absent if the driver does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Its index in `nvidia-smi`; absent where that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<u32>,
    /// Bytes needed.
    pub needed: u64,
    /// Bytes free.
    pub free: u64,
    /// The other processes on the device that the driver reports.
    pub holders: Vec<Holder>,
}

impl Error {
    /// A program asks to be held.
    pub fn holds_itself() -> Self {
        let why = "a program cannot hold itself: a thread that waits at the gate may have a lock that the asking thread needs to go on, such \
                   as Python's interpreter lock. Pause it from another process, or without hold while it is idle";
        Self::Invalid(why.into())
    }

    /// The kind, for C and the protocol.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Driver(_) => Kind::Driver,
            Self::Work(_) => Kind::Work,
            Self::DeviceMemory(_) | Self::Limit(_) => Kind::DeviceMemory,
            Self::HostMemory { .. } | Self::NoThread(_) => Kind::HostMemory,
            Self::Disk(_) => Kind::Disk,
            Self::UnknownTag { .. } => Kind::UnknownTag,
            Self::Capturing => Kind::Capturing,
            Self::Busy(_) | Self::NotHeld(_) | Self::Late(_) => Kind::Busy,
            Self::Unsupported | Self::PassesBy(_) => Kind::Unsupported,
            Self::PrefixCache(_) => Kind::PrefixCache,
            Self::Registered(_) => Kind::Registered,
            Self::Shared(_) => Kind::Shared,
            Self::Suspended => Kind::Suspended,
            Self::NotRestorable(_) => Kind::NotRestorable,
            Self::Aborted(_) => Kind::Aborted,
            Self::NotUndone(why, _) => match why.kind() {
                room @ (Kind::DeviceMemory | Kind::HostMemory) => room,
                // Another attempt is no answer to it.
                _ => Kind::Driver,
            },
            Self::Leased => Kind::Leased,
            Self::Stale { .. } => Kind::Stale,
            Self::Invalid(_) => Kind::Invalid,
            Self::NotPaused(_) => Kind::NotPaused,
            Self::BufferTooSmall { .. } => Kind::BufferTooSmall,
            Self::Ending => Kind::Ending,
            Self::Internal(_) => Kind::Internal,
        }
    }

    /// The code that the real runtime function would have returned. Runtime and driver use the same numbers for every code
    /// that can occur here (`driver_types.h`).
    pub fn cuda_code(&self) -> u32 {
        match self {
            Self::Driver(failure) | Self::Work(failure) => failure.code,
            Self::DeviceMemory(_) | Self::Limit(_) | Self::HostMemory { .. } => code::OUT_OF_MEMORY,
            Self::NotUndone(why, _) => why.cuda_code(),
            Self::UnknownTag { .. } | Self::Invalid(_) | Self::NotPaused(_) | Self::BufferTooSmall { .. } => code::INVALID_VALUE,
            Self::Capturing => code::STREAM_CAPTURE_UNSUPPORTED,
            Self::Unsupported | Self::PassesBy(_) => code::NOT_SUPPORTED,
            Self::Ending => code::DEINITIALIZED,
            Self::Busy(_)
            | Self::NotHeld(_)
            | Self::Late(_)
            | Self::PrefixCache(_)
            | Self::Registered(_)
            | Self::Shared(_)
            | Self::Suspended
            | Self::NotRestorable(_)
            | Self::Aborted(_)
            | Self::Leased
            | Self::Stale { .. }
            | Self::NoThread(_)
            | Self::Disk(_)
            | Self::Internal(_) => code::UNKNOWN,
        }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        if failure.is_capture() {
            Self::Capturing
        } else if failure.is_of_earlier_work() {
            Self::Work(failure)
        } else {
            Self::Driver(failure)
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Driver(failure) => failure.fmt(out),
            Self::Work(failure) => write!(
                out,
                "the program's own GPU work has failed ({failure}) and its context is lost; its memory is left as it was. \
                 Restart the program"
            ),
            Self::DeviceMemory(shortage) => shortage.fmt(out),
            Self::Limit(refused) => refused.fmt(out),
            Self::HostMemory { needed, available, capped } => {
                let short = Bytes(needed.saturating_sub(*available));
                let there = Bytes(*available);
                write!(out, "too little host memory to keep the contents: {} needed, {there} available", Bytes(*needed))?;
                if *capped {
                    write!(out, " under VRAMCTL_HOST_CAP. Start the program again with {short} more")?;
                } else if *available == 0 {
                    write!(out, ". Free {short}, or raise the process's own limit (ulimit -v, ulimit -d)")?;
                } else {
                    write!(out, ". Free {short}")?;
                }
                write!(out, ", or discard tags whose contents can be rebuilt (--discard)")
            }
            Self::UnknownTag { unknown, known } => {
                write!(out, "no allocation has the tag {}; ", unknown.join(", "))?;
                if known.is_empty() { write!(out, "there are no tags yet") } else { write!(out, "the tags are {}", known.join(", ")) }
            }
            Self::Capturing => write!(out, "a CUDA stream is being captured into a graph; try again when the capture has ended"),
            Self::Busy(waited) => write!(out, "the device's work had not finished after {} ms; nothing has changed", waited.as_millis()),
            Self::NotHeld(why) => write!(
                out,
                "the program could not be held: {why}; the program continues, and nothing has changed. If it only needs more time, \
                 raise --hold-timeout"
            ),
            Self::PassesBy(why) => write!(
                out,
                "the program cannot be held: {}. What it calls of CUDA may pass by the library, and would meet paused memory. Nothing has \
                 changed. Have it opened without that, or pause with --no-hold while the program does not use the GPU",
                why.join("; ")
            ),
            Self::Unsupported => write!(out, "the device has no virtual memory management"),
            Self::PrefixCache(engine) => write!(
                out,
                "the contents of the KV cache would be discarded, but the prefix cache of {engine} in this process still refers to them, \
                 so cached prefixes would read as zeros. Let vramctl reset the prefix cache (--engine URL or VRAMCTL_ENGINE), keep the \
                 contents (--backup host), or use --force if you have reset it yourself"
            ),
            Self::Registered(list) => {
                let listed: Vec<_> = list.iter().map(ToString::to_string).collect();
                write!(
                    out,
                    "memory is registered and cannot be given new physical pages unnoticed: {}; nothing has changed. Pause the rest \
                     with --registered keep, or this too with --registered take once nobody uses the registration",
                    listed.join(", ")
                )
            }
            Self::Shared(lent) => {
                let lent: Vec<_> = lent.iter().map(ToString::to_string).collect();
                write!(
                    out,
                    "other processes have the memory open: {}. Have them close it, or end them, first; or hold them as well with --shared; \
                     or pause the rest with --registered keep",
                    lent.join(", ")
                )
            }
            Self::Suspended => write!(out, "the process is suspended, or is being suspended or restored. `vramctl resume` brings it back"),
            Self::NotRestorable(obstacles) => {
                let obstacles: Vec<_> = obstacles.iter().map(ToString::to_string).collect();
                write!(out, "the driver could checkpoint the process, but not restore it: {}", obstacles.join("; "))
            }
            Self::Invalid(why) | Self::NotPaused(why) | Self::Disk(why) | Self::Late(why) => write!(out, "{why}"),
            Self::BufferTooSmall { needed, capacity } => write!(out, "{needed} bytes are needed, the buffer has {capacity}"),
            Self::NotUndone(_, what) => write!(out, "{what}"),
            Self::Aborted(why) => write!(out, "undone: {why}; nothing has changed"),
            Self::Stale { epoch, newest } => write!(out, "the scheduler of epoch {epoch} is over: epoch {newest} has begun"),
            Self::Leased => write!(out, "another client is pausing, resuming or suspending this process, or has just done so; try again"),
            Self::Ending => write!(out, "the program is exiting, which frees its memory"),
            Self::NoThread(why) => write!(
                out,
                "vramctl could not start a thread in the process: {why}. It may be at a limit: `ulimit -u` of its user, or the number of \
                 processes of its container (pids.max)"
            ),
            Self::Internal(what) => write!(out, "internal error: {what}; please report it"),
        }
    }
}

impl std::error::Error for Error {}

impl fmt::Display for Shortage {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gpu = gpu_in_words(self.device, self.uuid.as_deref(), self.index);
        write!(out, "too little memory on {gpu}: {} needed, {} free", Bytes(self.needed), Bytes(self.free))?;
        // The driver reserves a little of what it reports as free.
        match self.needed.saturating_sub(self.free) {
            0 => write!(out, ", which the driver refused to allocate")?,
            short => write!(out, ", {} short", Bytes(short))?,
        }
        if self.holders.is_empty() {
            return write!(out, "; the driver reports no other process on it");
        }
        let holders: Vec<_> = self.holders.iter().map(ToString::to_string).collect();
        write!(out, "; held by {}", holders.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortage_says_what_was_needed_and_who_holds_the_rest() {
        let holders = vec![Holder { pid: 7, bytes: Some(3 << 30), program: Some("trainer".into()) }];
        let shortage = Shortage { device: 1, uuid: None, index: None, needed: 4 << 30, free: 1 << 30, holders };
        let what = "4.00 GiB needed, 1.00 GiB free, 3.00 GiB short; held by pid 7 (trainer) 3.00 GiB";
        assert_eq!(shortage.to_string(), format!("too little memory on device 1: {what}"));
        // An ordinal means another GPU elsewhere.
        let uuid = Some("GPU-0f5c2b8e-93d4-4a6b-8c1d-2e7f60a1b3c4".into());
        let named = Shortage { uuid, ..shortage };
        assert_eq!(named.to_string(), format!("too little memory on GPU-0f5c2b8e: {what}"));
        assert_eq!(Shortage { index: Some(3), ..named }.to_string(), format!("too little memory on GPU 3 (GPU-0f5c2b8e): {what}"));
    }
}
