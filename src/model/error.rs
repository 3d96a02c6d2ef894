//! One error type, and how it becomes a CUDA code, a C code and a protocol code.

use crate::{Bytes, Failure, Holder, code};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// Why something was not done. Nothing was changed, unless the text says what was: undoing can fail, too.
#[derive(Debug, Clone)]
pub enum Error {
    /// The driver refused a call.
    Driver(Failure),
    /// The program's own GPU work had left an error behind (an illegal address, say). It is sticky: the context is lost.
    Work(Failure),
    /// The device has too little free memory.
    DeviceMemory(Shortage),
    /// The host has too little memory for the contents.
    HostMemory {
        /// Bytes of contents to keep.
        needed: u64,
        /// Bytes that the host could give.
        available: u64,
        /// Whether `VRAMCTL_HOST_CAP` is what keeps it from giving more.
        capped: bool,
    },
    /// A file for contents could not be made, written or read; the text says which and why.
    Disk(String),
    /// Tags that no allocation has.
    UnknownTag {
        /// Those asked for and not known.
        unknown: Vec<String>,
        /// Those that there are.
        known: Vec<String>,
    },
    /// A stream is being captured into a graph; memory cannot be taken away then.
    Capturing,
    /// The device's work had not finished in time.
    Busy(Duration),
    /// The device has no virtual memory management.
    Unsupported,
    /// A pause would drop a KV cache that the prefix cache of this inference engine still describes.
    PrefixCache(String),
    /// What was asked for makes no sense; the text says why.
    Invalid(String),
    /// An address is not where it would have to be, in a paused allocation whose contents were kept; the text says why.
    NotPaused(String),
    /// A caller's buffer is too small.
    BufferTooSmall {
        /// Bytes needed.
        needed: usize,
        /// Bytes that it has.
        capacity: usize,
    },
    /// Something that the library did not expect of itself. Nothing to be done but to report it.
    Internal(String),
}

/// How much device memory is missing, and who has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shortage {
    /// The device's ordinal in the process.
    pub device: i32,
    /// Its UUID, by which others know it; absent where the driver does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Bytes needed.
    pub needed: u64,
    /// Bytes free.
    pub free: u64,
    /// The other processes on the device, as far as the driver tells.
    pub holders: Vec<Holder>,
}

/// The kinds of error, as a C code (the discriminant) and a protocol code (the name). Neither ever changes its meaning.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// An argument or a request makes no sense.
    Invalid = 1,
    /// No allocation has such a tag.
    UnknownTag = 2,
    /// Too little device memory.
    DeviceMemory = 3,
    /// Too little host memory.
    HostMemory = 4,
    /// The driver refused a call.
    Driver = 5,
    /// The program's own GPU work has failed.
    Work = 6,
    /// A stream is being captured.
    Capturing = 7,
    /// The device's work had not finished in time.
    Busy = 8,
    /// The device or driver lacks what is needed.
    Unsupported = 9,
    /// A defect of the library.
    Internal = 10,
    /// The address is not one of a paused, kept allocation.
    NotPaused = 11,
    /// The caller's buffer is too small.
    BufferTooSmall = 12,
    /// A file for contents could not be made, written or read.
    Disk = 13,
    /// A KV cache would be dropped that an inference engine still relies on.
    PrefixCache = 14,
}

impl Error {
    /// Whether it is that the device has too little memory.
    pub fn is_device_memory(&self) -> bool {
        matches!(self, Self::DeviceMemory(_) | Self::Driver(Failure { code: code::OUT_OF_MEMORY, .. }))
    }

    /// The kind, for C and the protocol.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Driver(_) => Kind::Driver,
            Self::Work(_) => Kind::Work,
            Self::DeviceMemory(_) => Kind::DeviceMemory,
            Self::HostMemory { .. } => Kind::HostMemory,
            Self::Disk(_) => Kind::Disk,
            Self::UnknownTag { .. } => Kind::UnknownTag,
            Self::Capturing => Kind::Capturing,
            Self::Busy(_) => Kind::Busy,
            Self::Unsupported => Kind::Unsupported,
            Self::PrefixCache(_) => Kind::PrefixCache,
            Self::Invalid(_) => Kind::Invalid,
            Self::NotPaused(_) => Kind::NotPaused,
            Self::BufferTooSmall { .. } => Kind::BufferTooSmall,
            Self::Internal(_) => Kind::Internal,
        }
    }

    /// What the runtime's function would have returned in our place. Runtime and driver codes are the same numbers for
    /// all that can come here (`driver_types.h`).
    pub fn cuda_code(&self) -> u32 {
        match self {
            Self::Driver(failure) | Self::Work(failure) => failure.code,
            Self::DeviceMemory(_) | Self::HostMemory { .. } => code::OUT_OF_MEMORY,
            Self::UnknownTag { .. } | Self::Invalid(_) | Self::NotPaused(_) | Self::BufferTooSmall { .. } => code::INVALID_VALUE,
            Self::Capturing => code::STREAM_CAPTURE_UNSUPPORTED,
            Self::Unsupported => code::NOT_SUPPORTED,
            Self::Busy(_) | Self::PrefixCache(_) | Self::Disk(_) | Self::Internal(_) => code::UNKNOWN,
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
                "the program's own GPU work has failed ({failure}); its context is lost, so the memory is left as it is. \
                 Restart the program"
            ),
            Self::DeviceMemory(shortage) => shortage.fmt(out),
            Self::HostMemory { needed, available, capped } => write!(
                out,
                "too little host memory to keep the contents: {} needed, {} available{}, or discard tags whose contents can be made again",
                Bytes(*needed),
                Bytes(*available),
                if *capped { " under VRAMCTL_HOST_CAP. Raise it" } else { ". Free some" },
            ),
            Self::UnknownTag { unknown, known } => {
                write!(out, "no allocation has the tag {}; ", unknown.join(", "))?;
                if known.is_empty() { write!(out, "there are no tags yet") } else { write!(out, "the tags are {}", known.join(", ")) }
            }
            Self::Capturing => write!(out, "a CUDA stream is being captured into a graph; try again when the capture is over"),
            Self::Busy(waited) => write!(out, "the device's work had not finished after {} ms; nothing was changed", waited.as_millis()),
            Self::Unsupported => write!(out, "the device has no virtual memory management"),
            Self::PrefixCache(engine) => write!(
                out,
                "the contents of the KV cache would be discarded, but the prefix cache of the {engine} in this process still refers to them, \
                 so it would answer from zeros. Have it forget them (give its address with --engine URL or VRAMCTL_ENGINE), keep them \
                 (--backup host), or, if you have reset the prefix cache yourself, use --force"
            ),
            Self::Invalid(why) | Self::NotPaused(why) | Self::Disk(why) => write!(out, "{why}"),
            Self::BufferTooSmall { needed, capacity } => write!(out, "{needed} bytes are needed, the buffer has {capacity}"),
            Self::Internal(what) => write!(out, "internal error: {what}; please report it"),
        }
    }
}

impl std::error::Error for Error {}

impl fmt::Display for Shortage {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "too little memory on device {}: {} needed, {} free", self.device, Bytes(self.needed), Bytes(self.free))?;
        // The driver keeps a little of what it calls free to itself.
        match self.needed.saturating_sub(self.free) {
            0 => write!(out, ", which the driver would not give")?,
            short => write!(out, ", {} short", Bytes(short))?,
        }
        if self.holders.is_empty() {
            return write!(out, "; the driver names no other process on it");
        }
        let holders: Vec<_> = self.holders.iter().map(ToString::to_string).collect();
        write!(out, "; held by {}", holders.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scripts and other languages compare these; a changed one breaks them silently.
    #[test]
    fn the_codes_never_change() {
        let known = [
            (Kind::Invalid, 1, "invalid"),
            (Kind::UnknownTag, 2, "unknown_tag"),
            (Kind::DeviceMemory, 3, "device_memory"),
            (Kind::HostMemory, 4, "host_memory"),
            (Kind::Driver, 5, "driver"),
            (Kind::Work, 6, "work"),
            (Kind::Capturing, 7, "capturing"),
            (Kind::Busy, 8, "busy"),
            (Kind::Unsupported, 9, "unsupported"),
            (Kind::Internal, 10, "internal"),
            (Kind::NotPaused, 11, "not_paused"),
            (Kind::BufferTooSmall, 12, "buffer_too_small"),
            (Kind::Disk, 13, "disk"),
            (Kind::PrefixCache, 14, "prefix_cache"),
        ];
        for (kind, number, name) in known {
            assert_eq!(kind as i32, number);
            assert_eq!(serde_json::to_string(&kind).unwrap(), format!("\"{name}\""));
        }
    }

    #[test]
    fn a_shortage_says_what_was_needed_and_who_holds_the_rest() {
        let holders = vec![Holder { pid: 7, bytes: Some(3 << 30), program: Some("trainer".into()) }];
        let text = Shortage { device: 1, uuid: None, needed: 4 << 30, free: 1 << 30, holders }.to_string();
        assert_eq!(text, "too little memory on device 1: 4.00 GiB needed, 1.00 GiB free, 3.00 GiB short; held by pid 7 (trainer) 3.00 GiB");
    }
}
