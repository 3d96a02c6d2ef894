//! What the store's binary files have in common: a magic, a hash of all at the end, and numbers in little endian.

use crate::hash::Hash;
use crate::piece::PieceId;
use crate::{Error, Result};
use std::path::Path;

/// Bytes of a magic.
const MAGIC: usize = 16;

/// Writes such a file.
pub struct Encoder(Vec<u8>);

impl Encoder {
    pub fn new(magic: &[u8; MAGIC]) -> Self {
        Self(magic.to_vec())
    }

    pub fn number(&mut self, number: u64) {
        self.0.extend(number.to_le_bytes());
    }

    pub fn piece(&mut self, id: &PieceId) {
        self.0.extend(id.hash.0);
        self.number(u64::from(id.bytes));
    }

    pub fn finish(mut self) -> Vec<u8> {
        let hash = Hash::of(&self.0);
        self.0.extend(hash.0);
        self.0
    }
}

/// Reads such a file, once its hash is seen to be right.
pub struct Decoder<'a> {
    file: &'a Path,
    left: &'a [u8],
}

impl<'a> Decoder<'a> {
    pub fn new(file: &'a Path, all: &'a [u8], magic: &[u8; MAGIC]) -> Result<Self> {
        let Some((body, hash)) = all.split_last_chunk::<32>().filter(|(body, _)| body.len() >= MAGIC) else {
            return Err(Error::damaged(file, "it is cut off"));
        };
        if Hash::of(body).0 != *hash {
            return Err(Error::damaged(file, "its hash is not that of what it says"));
        }
        let (found, left) = body.split_at(MAGIC);
        if found != magic {
            return Err(Error::Format { file: file.to_owned(), found: String::from_utf8_lossy(found).trim_end_matches('\0').to_owned() });
        }
        Ok(Self { file, left })
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (taken, left) = self.left.split_first_chunk().ok_or_else(|| self.refusal("it has fewer entries than it says"))?;
        self.left = left;
        Ok(*taken)
    }

    pub fn number(&mut self) -> Result<u64> {
        self.take().map(u64::from_le_bytes)
    }

    pub fn piece(&mut self) -> Result<PieceId> {
        let hash = Hash(self.take()?);
        let bytes = self.number()?;
        if bytes == 0 || bytes > crate::PIECE_BYTES as u64 {
            return Err(self.refusal("a piece has a size that no piece has"));
        }
        Ok(PieceId { hash, bytes: bytes as u32 })
    }

    /// Bytes that are left, and so the most that may follow.
    pub fn left(&self) -> usize {
        self.left.len()
    }

    pub fn finish(self) -> Result<()> {
        if self.left.is_empty() { Ok(()) } else { Err(self.refusal("it has more than it says")) }
    }

    pub fn refusal(&self, why: &str) -> Error {
        Error::damaged(self.file, why)
    }
}
