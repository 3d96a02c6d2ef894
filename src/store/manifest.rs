//! The manifest: what an image is. Its text has a hash, so that no flipped bit means something else.

use crate::contents::Listed;
use crate::hash::Hash;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::path::Path;

/// The format that this version writes and reads.
const FORMAT: u32 = 1;

/// Most bytes of a manifest.
pub const MOST: u64 = 256 << 20;

/// What an image is. [`crate::Saving::finish`] fills in `contents` and `hashes`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Manifest {
    /// When it was saved, in seconds since 1970.
    pub saved_at: u64,
    /// Who wrote it, and below what it ran.
    pub versions: Versions,
    /// The processor.
    pub cpu: Cpu,
    /// Bytes of a page of memory.
    pub page_size: u64,
    /// The GPUs.
    pub gpus: Vec<Gpu>,
    /// The processes, parents before children.
    pub processes: Vec<Process>,
    /// The contents, in the order of loading.
    pub contents: Vec<Listed>,
    /// Addresses at which the program listens.
    pub listeners: Vec<Listener>,
    /// Connections to outside.
    pub connections: Vec<Connection>,
    /// Standard streams, and other pipes and terminals to outside.
    pub streams: Vec<Stream>,
    /// Open and loaded files.
    pub files: Vec<OpenFile>,
    /// What is put back beside the image before a load.
    pub remaps: Vec<Remap>,
    /// All files of the image but the manifest.
    pub hashes: Vec<FileHash>,
    /// What else the command records, by name.
    pub more: BTreeMap<String, serde_json::Value>,
}

/// Who wrote an image, and below what its program ran.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Versions {
    /// The command.
    pub vramctl: String,
    /// The library in the program.
    pub library: String,
    /// CRIU.
    pub criu: String,
    /// CRIU's options.
    pub criu_options: Vec<String>,
    /// The kernel.
    pub kernel: String,
    /// NVIDIA's driver.
    pub driver: String,
}

/// A processor.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Cpu {
    /// Its architecture, as `uname -m` prints it.
    pub architecture: String,
    /// Its model.
    pub model: String,
    /// Its features, as in `/proc/cpuinfo`.
    pub features: Vec<String>,
}

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Gpu {
    /// Its UUID.
    pub uuid: String,
    /// Its model.
    pub model: String,
    /// Bytes of its memory.
    pub bytes: u64,
}

/// A process of the program.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Process {
    /// Its number, as the program sees it.
    pub pid: u32,
    /// Its parent's.
    pub parent: u32,
    /// Its users: real, effective, saved, for the file system.
    pub uids: Vec<u32>,
    /// Its groups: real, effective, saved, for the file system, supplementary.
    pub gids: Vec<u32>,
    /// Its capabilities: all that it has, or may get back.
    pub capabilities: u64,
    /// What it is: with the library, with CUDA, or without.
    pub kind: String,
    /// Its name in vramctl.
    pub name: String,
    /// The UUIDs of the GPUs that it sees, in its order.
    pub gpus: Vec<String>,
}

/// An address at which the program listens.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Listener {
    /// The process.
    pub process: u32,
    /// The address.
    pub address: String,
}

/// A connection to outside.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Connection {
    /// The process.
    pub process: u32,
    /// The address here.
    pub local: String,
    /// The address there.
    pub remote: String,
}

/// A pipe or terminal to outside.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Stream {
    /// The process.
    pub process: u32,
    /// The number of the descriptor.
    pub descriptor: i32,
    /// What it was, as CRIU names it: `pipe:[123]`, `tty:[1:2]`.
    pub was: String,
}

/// What becomes of a file that the program writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FilePolicy {
    /// It is only read: it must be as it was.
    #[default]
    Read,
    /// The program goes on at its end.
    Append,
    /// The program gets a copy of its own.
    Copy,
    /// There is no load while it is as it is.
    Refuse,
}

/// A file that the program has open or loaded.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OpenFile {
    /// Its path.
    pub path: String,
    /// Its size.
    pub bytes: u64,
    /// When it was changed, in nanoseconds since 1970.
    pub modified: i64,
    /// What tells its content, where that is quick to say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// What becomes of it.
    pub policy: FilePolicy,
}

/// A file of the image that is put somewhere before a load.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Remap {
    /// The file in the image, below `files`.
    pub from: String,
    /// Where it was.
    pub to: String,
    /// Its permissions.
    pub mode: u32,
    /// Its owner.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
}

/// A file of the image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileHash {
    /// Its path in the image.
    pub path: String,
    /// Its size.
    pub bytes: u64,
    /// Its BLAKE3 hash, which `b3sum` prints, too.
    pub hash: Hash,
}

/// What the file has: the image as text, and the hash of that text.
#[derive(Serialize, Deserialize)]
struct Wrapped<'a> {
    format: u32,
    blake3: Hash,
    #[serde(borrow)]
    image: &'a RawValue,
}

/// The least that a manifest of any format has.
#[derive(Deserialize)]
struct Format {
    format: u32,
}

impl Manifest {
    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        let failed = |error: serde_json::Error| Error::Invalid(format!("the manifest cannot be written: {error}"));
        let image = serde_json::value::to_raw_value(self).map_err(failed)?;
        let wrapped = Wrapped { format: FORMAT, blake3: Hash::of(image.get().as_bytes()), image: &image };
        let mut text = serde_json::to_vec(&wrapped).map_err(failed)?;
        text.push(b'\n');
        Ok(text)
    }

    pub(crate) fn decode(file: &Path, text: &[u8]) -> Result<Self> {
        let damaged = |error: serde_json::Error| Error::damaged(file, error.to_string());
        let Format { format } = serde_json::from_slice(text).map_err(damaged)?;
        if format != FORMAT {
            return Err(Error::Format { file: file.to_owned(), found: format.to_string() });
        }
        let wrapped: Wrapped = serde_json::from_slice(text).map_err(damaged)?;
        if Hash::of(wrapped.image.get().as_bytes()) != wrapped.blake3 {
            return Err(Error::damaged(file, "its hash is not that of its text"));
        }
        serde_json::from_str(wrapped.image.get()).map_err(damaged)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_flipped_bit_passes() {
        let process = Process { pid: 7, uids: vec![0; 4], capabilities: u64::MAX, ..Process::default() };
        let file = FileHash { path: "contents".into(), bytes: 5, hash: Hash::of(b"x") };
        let manifest = Manifest { processes: vec![process], hashes: vec![file], ..Manifest::default() };
        let text = manifest.encode().unwrap();
        let decode = |text: &[u8]| Manifest::decode(Path::new("manifest.json"), text);
        assert_eq!(decode(&text).unwrap(), manifest);
        for at in 0..text.len() {
            for bit in [1, 4, 32] {
                let mut flipped = text.clone();
                flipped[at] ^= bit;
                // Upper and lower case of a hash's digits are the same, and so are spaces at the end.
                assert!(decode(&flipped).is_ok_and(|found| found == manifest) || decode(&flipped).is_err(), "byte {at}, bit {bit}");
            }
            assert!(at + 1 == text.len() || decode(&text[..at]).is_err(), "cut at {at}");
        }
        assert!(matches!(decode(br#"{"format": 2, "image": 7}"#), Err(Error::Format { found, .. }) if found == "2"));
    }
}
