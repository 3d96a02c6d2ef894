//! A part of the memory in use: whose it is, and how it is shown.

use serde::Serialize;
use vramctl_model::{Bytes, TagState, unmanaged_of};

/// A part of the memory in use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Share {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The process's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub what: What,
    /// The tag, or the library that has asked CUDA for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub of: Option<String>,
    /// For a tag: its state, or nothing if the program has freed all of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<TagState>,
    /// Negative if the other shares add up to more than NVML counts.
    pub bytes: i64,
    /// Its smallest size in the last cycles.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub least_bytes: Option<u64>,
    /// For a tag: how the program's own allocator uses it.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub cache: Option<Cache>,
}

/// Bytes of the program's own allocator, such as torch's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[allow(clippy::struct_field_names)] // as in the protocol
pub struct Cache {
    /// In use.
    pub live_bytes: u64,
    /// Free, in whole segments.
    pub cached_bytes: u64,
    /// Free, in segments partly in use.
    pub fragmented_bytes: u64,
}

/// Whose a share is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(into = "&str")]
pub enum What {
    /// Managed, by tag.
    Tag,
    /// Left to CUDA, by the library that has asked for it.
    Unmanaged,
    /// The guard under paused memory.
    Guard,
    /// Page tables for the library's pinned host memory. An estimate; NVML attributes them to no process.
    PageTables,
    /// The rest of a process with the library.
    Driver,
    /// A process without the library, or one that does not answer.
    Process,
    /// Processes that NVML lists and that are not visible here, minus the known memory of processes that it does not list.
    OutOfSight,
    /// Memory that NVML attributes to nobody.
    Unexplained,
    /// Host memory: contents of paused memory, by tag.
    Backup,
    /// Host memory: contents of active memory, by tag, kept for the next pause.
    Retained,
    /// Host memory for the next backups.
    Ready,
    /// All other private host memory of the process.
    Own,
    /// Host memory that may be shared with other processes.
    Shared,
    /// Private host memory of the job's processes without the library.
    RestOfJob,
}

impl What {
    /// Those of a GPU's memory.
    #[cfg(test)]
    pub const OF_A_GPU: [Self; 8] =
        [Self::Tag, Self::Unmanaged, Self::Guard, Self::PageTables, Self::Driver, Self::Process, Self::OutOfSight, Self::Unexplained];

    /// As programs read it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tag => "tag",
            Self::Unmanaged => "unmanaged",
            Self::Guard => "guard",
            Self::PageTables => "page_tables",
            Self::Driver => "driver",
            Self::Process => "process",
            Self::OutOfSight => "out_of_sight",
            Self::Unexplained => "unexplained",
            Self::Backup => "backup",
            Self::Retained => "retained",
            Self::Ready => "ready",
            Self::Own => "own",
            Self::Shared => "shared",
            Self::RestOfJob => "rest_of_job",
        }
    }
}

impl From<What> for &'static str {
    fn from(what: What) -> Self {
        what.name()
    }
}

impl Share {
    /// Nobody's yet.
    pub fn new(what: What, bytes: i64) -> Self {
        Self { pid: None, name: None, what, of: None, state: None, bytes, least_bytes: None, cache: None }
    }

    /// As people read it.
    pub fn text(&self) -> String {
        let of = self.of.as_deref().unwrap_or_default();
        match self.what {
            What::Tag => match self.state {
                Some(TagState::Active | TagState::Mixed) => of.to_owned(),
                Some(TagState::Paused) => format!("{of} (paused, but not given back yet)"),
                Some(under_way) => format!("{of} ({})", under_way.name()),
                None => format!("{of} (freed, but not given back yet)"),
            },
            What::Unmanaged => unmanaged_of(of),
            What::Guard => "guard under paused memory".into(),
            What::PageTables => "page tables of pinned host memory (estimate)".into(),
            What::Driver if self.bytes < 0 => "counted above, and not by NVML".into(),
            What::Driver => {
                let least = self.least_bytes.map_or_else(String::new, |bytes| format!(" (lowest at a pause: {})", Bytes(bytes)));
                format!("context, loaded code, small allocations{least}")
            }
            What::Process => "all of it".into(),
            What::OutOfSight => "processes out of sight".into(),
            What::Unexplained => "unexplained".into(),
            What::Backup => format!("backup of {of}"),
            What::Retained => format!("backup of {of}, which is active (retained)"),
            What::Ready => "ready for backups".into(),
            What::Own => "all else of its own".into(),
            What::Shared => "shared memory".into(),
            What::RestOfJob => "other processes of the job".into(),
        }
    }
}

pub fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

pub fn text_of(bytes: i64) -> String {
    let sign = if bytes < 0 { "-" } else { "" };
    format!("{sign}{}", Bytes(bytes.unsigned_abs()))
}

pub fn row(share: &Share) -> Vec<String> {
    let pid = share.pid.map_or_else(String::new, |pid| pid.to_string());
    vec![pid, share.name.clone().unwrap_or_default(), share.text(), text_of(share.bytes)]
}

/// A share's row, and below it how an allocator uses it.
pub fn rows(share: &Share) -> Vec<Vec<String>> {
    let cache = share.cache.unwrap_or_default();
    let parts = [
        ("live", cache.live_bytes),
        ("cached by the allocator (vramctl trim)", cache.cached_bytes),
        ("free in partly used segments", cache.fragmented_bytes),
    ];
    let below = parts
        .iter()
        .filter(|_| share.cache.is_some())
        .map(|(what, bytes)| vec![String::new(), String::new(), format!("  {what}"), format!("  {}", Bytes(*bytes))]);
    [row(share)].into_iter().chain(below).collect()
}

/// Shares as tests compare them: text and MiB.
#[cfg(test)]
pub mod shown {
    use super::Share;

    pub const MIB: u64 = 1 << 20;

    pub fn rows(shares: &[Share]) -> Vec<(String, i64)> {
        let mib = |share: &Share| share.bytes / MIB as i64;
        shares.iter().map(|share| (format!("{} {}", share.name.as_deref().unwrap_or_default(), share.text()), mib(share))).collect()
    }

    pub fn line(text: &str, mib: i64) -> (String, i64) {
        (text.into(), mib)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn negative_bytes_have_a_sign() {
        assert_eq!((text_of(-3 << 20), text_of(0)), ("-3.00 MiB".into(), "0 B".into()));
    }
}
