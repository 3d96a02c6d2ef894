//! The table of the error codes: the only one. From it come the protocol's codes, those of C (`include/vramctl.h`) and the table in
//! `docs/protocol.md`; `tests/tree/errors.rs` makes the documents, and compares Python's exceptions.

use serde::{Deserialize, Serialize};

/// Where a kind of error can occur.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Surface {
    /// In answers on the socket only: the calls of C do not ask for what fails so.
    Socket,
    /// In the C ABI only.
    C,
    /// In both.
    Both,
}

macro_rules! kinds {
    ($($(#[doc = $meaning:literal])+ $name:ident = $number:literal, $surface:ident, $fields:literal;)+) => {
        /// The kind of error, as a C code (the discriminant) and a protocol code (the name). Both are stable.
        #[repr(i32)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum Kind {
            $($(#[doc = $meaning])+ $name = $number,)+
        }

        impl Kind {
            /// All of them, by their C codes.
            pub const ALL: &[Self] = &[$(Self::$name),+];

            /// What has happened.
            pub fn meaning(self) -> &'static str {
                match self {
                    $(Self::$name => concat!($($meaning),+).trim_ascii(),)+
                }
            }

            /// Where it can occur.
            pub fn surface(self) -> Surface {
                match self {
                    $(Self::$name => Surface::$surface,)+
                }
            }

            /// The fields of the protocol's `error` reply, beside `code` and `message`, in the words of its document.
            pub fn fields(self) -> &'static str {
                match self {
                    $(Self::$name => $fields,)+
                }
            }
        }
    };
}

kinds! {
    /// An argument or a request is malformed, too long or too late, or its sender is not allowed to make it.
    Invalid = 1, Both, "";
    /// No allocation has one of the tags.
    UnknownTag = 2, Both, "`known_tags`";
    /// There is too little device memory.
    DeviceMemory = 3, Both, "`shortage`";
    /// There is too little host memory to keep the contents, or no thread could be started.
    HostMemory = 4, Both, "`host_shortage`, unless it is a thread";
    /// The driver refused a call.
    Driver = 5, Both, "`cuda_code`";
    /// The program's own GPU work has failed; its context is lost.
    Work = 6, Both, "`cuda_code`";
    /// A stream is being captured into a graph; try again when the capture has ended.
    Capturing = 7, Both, "";
    /// The device's work had not finished in time, the driver does not answer, or the process has too many clients.
    Busy = 8, Both, "";
    /// The device or the driver lacks a required feature, or the program cannot be held (`passing_by` in its status).
    Unsupported = 9, Both, "";
    /// A bug in the library; please report it.
    Internal = 10, Both, "";
    /// The address is not in a paused allocation whose contents are in host memory.
    NotPaused = 11, C, "";
    /// The buffer is too small.
    BufferTooSmall = 12, C, "";
    /// A file for contents could not be created, written or read.
    Disk = 13, Both, "";
    /// A pause without `force` would discard a KV cache that an inference engine's prefix cache still describes.
    PrefixCache = 14, Socket, "";
    /// The program is exiting: the request was cancelled, and its memory is freed with the program.
    Ending = 15, Both, "";
    /// The pause would replace memory whose physical pages another process, a network card or NCCL has registered.
    Registered = 16, Both, "`registered`: a list of `tag`, `registrant` and `bytes`";
    /// Other processes have memory open that would be paused.
    Shared = 17, Both, "`lent`";
    /// What was begun has been undone, or nobody waits for it any more.
    Aborted = 18, Both, "";
    /// Another client is pausing, resuming or suspending this process, or has just resumed it; try again.
    Leased = 19, Socket, "";
    /// The process is suspended, or is being suspended or restored, and the request needs its driver. `vramctl resume` brings it back.
    Suspended = 20, Both, "";
    /// The driver could checkpoint the process, but not restore it.
    NotRestorable = 21, Socket, "`obstacles`";
    /// A newer scheduler has taken over from the one that asks.
    Stale = 22, Socket, "";
}

impl Kind {
    /// The kind with a C code.
    pub fn of_number(number: i32) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| *kind as i32 == number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scripts and other languages compare these codes; changing one breaks them silently.
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
            (Kind::Ending, 15, "ending"),
            (Kind::Registered, 16, "registered"),
            (Kind::Shared, 17, "shared"),
            (Kind::Aborted, 18, "aborted"),
            (Kind::Leased, 19, "leased"),
            (Kind::Suspended, 20, "suspended"),
            (Kind::NotRestorable, 21, "not_restorable"),
            (Kind::Stale, 22, "stale"),
        ];
        assert_eq!(known.map(|(kind, ..)| kind).as_slice(), Kind::ALL);
        for (kind, number, name) in known {
            assert_eq!(kind as i32, number);
            assert_eq!(serde_json::to_string(&kind).unwrap(), format!("\"{name}\""));
        }
    }
}
