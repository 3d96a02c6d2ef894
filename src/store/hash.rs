//! BLAKE3 hashes: of pieces, and of whole files by several threads.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::fmt;

/// A BLAKE3 hash. Displays as `b3sum` prints it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Hash(pub [u8; 32]);

impl Hash {
    /// The hash of bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }
}

impl fmt::Display for Hash {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(out, "{byte:02x}"))
    }
}

impl fmt::Debug for Hash {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, out)
    }
}

impl Serialize for Hash {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Hash {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        let hash = blake3::Hash::from_hex(&text).map_err(|_| de::Error::custom(format!("{text:?} is no BLAKE3 hash")))?;
        Ok(Self(*hash.as_bytes()))
    }
}

/// Bytes of a file that are hashed at once, by one thread. A power of two, so that each is a subtree of BLAKE3's tree.
pub(crate) const CHUNK: u64 = 4 << 20;

/// What BLAKE3 calls the chaining value of a subtree.
pub(crate) type Subtree = blake3::hazmat::ChainingValue;

/// The subtree of a chunk at an offset of a file that has several.
pub(crate) fn subtree(chunk: &[u8], offset: u64) -> Subtree {
    use blake3::hazmat::HasherExt;
    blake3::Hasher::new().set_input_offset(offset).update(chunk).finalize_non_root()
}

/// The hash of a file of `bytes` bytes, of the subtrees of its chunks. At least two.
pub(crate) fn whole(subtrees: &[Subtree], bytes: u64) -> Hash {
    let left = left_chunks(bytes);
    let (left, right) = (merged(&subtrees[..left], left as u64 * CHUNK), merged(&subtrees[left..], bytes - left as u64 * CHUNK));
    Hash(*blake3::hazmat::merge_subtrees_root(&left, &right, blake3::hazmat::Mode::Hash).as_bytes())
}

fn merged(subtrees: &[Subtree], bytes: u64) -> Subtree {
    if let [one] = subtrees {
        return *one;
    }
    let left = left_chunks(bytes);
    let (left, right) = (merged(&subtrees[..left], left as u64 * CHUNK), merged(&subtrees[left..], bytes - left as u64 * CHUNK));
    blake3::hazmat::merge_subtrees_non_root(&left, &right, blake3::hazmat::Mode::Hash)
}

/// How many chunks are left of the tree's root: the largest power of two that leaves something to the right.
fn left_chunks(bytes: u64) -> usize {
    (blake3::hazmat::left_subtree_len(bytes) / CHUNK) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_by_chunks_is_that_of_the_whole() {
        let all: Vec<u8> = (0..5 * CHUNK as usize + 12345).map(|at| ((at * at) >> 7) as u8).collect();
        for bytes in [CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 3 * CHUNK, 4 * CHUNK + 5, 5 * CHUNK + 12345].map(|bytes| bytes as usize) {
            let chunks = all[..bytes].chunks(CHUNK as usize);
            let subtrees: Vec<_> = chunks.enumerate().map(|(at, chunk)| subtree(chunk, at as u64 * CHUNK)).collect();
            assert_eq!(whole(&subtrees, bytes as u64), Hash::of(&all[..bytes]), "{bytes} bytes");
        }
    }
}
