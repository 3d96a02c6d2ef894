//! The file of an image that lists its pieces, in the order of loading.

use crate::hash::Hash;
use crate::listing::{Decoder, Encoder};
use crate::piece::{PieceId, cut};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;

const MAGIC: &[u8; 16] = b"vramctl pieces 1";

/// Most bytes of such a file: 16 TiB of contents.
pub const MOST: u64 = 1 << 29;

/// An allocation, and what is kept of it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Allocation {
    /// The process that had it, in the program.
    pub process: u32,
    /// Its tag.
    pub tag: String,
    /// The GPU, by its place in the manifest's list.
    pub gpu: u32,
    /// Its address.
    pub address: u64,
    /// Its size.
    pub bytes: u64,
    /// What is kept: offset and length of each range.
    pub ranges: Vec<(u64, u64)>,
}

/// The contents of an allocation, for [`crate::Saving::finish`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Contents {
    /// Of which.
    pub of: Allocation,
    /// The pieces of its ranges, as [`cut`] cuts each.
    pub pieces: Vec<PieceId>,
}

/// The same in a manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Listed {
    /// Of which.
    pub of: Allocation,
    /// The first of its pieces in `contents`.
    pub first: u64,
    /// How many pieces it has.
    pub pieces: u64,
    /// The hash of its part of `contents`.
    pub index: Hash,
}

impl Contents {
    /// Refuses pieces that do not fit the ranges.
    pub fn check(&self) -> Result<()> {
        let wanted = places(&self.of.ranges, self.of.bytes).map(|cuts| cuts.map(|(_, bytes)| bytes as u32));
        let fits = wanted.is_some_and(|wanted| wanted.eq(self.pieces.iter().map(|piece| piece.bytes)));
        let wrong = || Error::Invalid(format!("the pieces of tag {} at {:#x} do not fit its ranges", self.of.tag, self.of.address));
        if fits { Ok(()) } else { Err(wrong()) }
    }
}

/// Offset and length of each piece of ranges. `None` if these are no ranges of an allocation of so many bytes.
pub fn places(ranges: &[(u64, u64)], bytes: u64) -> Option<impl Iterator<Item = (u64, usize)>> {
    let are_inside = ranges.iter().all(|(offset, length)| offset.checked_add(*length).is_some_and(|end| end <= bytes));
    are_inside.then(|| ranges.iter().flat_map(|(offset, length)| cut(*offset, *length)))
}

/// The hash of pieces, as a manifest has it of each contents.
pub fn hash_of(pieces: &[PieceId]) -> Hash {
    let mut all = Vec::with_capacity(pieces.len() * 36);
    for piece in pieces {
        all.extend(piece.hash.0);
        all.extend(piece.bytes.to_le_bytes());
    }
    Hash::of(&all)
}

/// The file.
pub fn encode<'a>(pieces: impl ExactSizeIterator<Item = &'a PieceId>) -> Vec<u8> {
    let mut to = Encoder::new(MAGIC);
    to.number(pieces.len() as u64);
    pieces.for_each(|piece| to.piece(piece));
    to.finish()
}

/// Reads the file.
pub fn decode(file: &Path, all: &[u8]) -> Result<Vec<PieceId>> {
    let mut from = Decoder::new(file, all, MAGIC)?;
    let count = from.number()? as usize;
    let mut pieces = Vec::with_capacity(count.min(from.left() / 40));
    for _ in 0..count {
        pieces.push(from.piece()?);
    }
    from.finish()?;
    Ok(pieces)
}
