//! Packs: files of pieces, and the index that says which pieces are where. A pack with an index never changes again.

use crate::disk::{self, Disk};
use crate::listing::{Decoder, Encoder};
use crate::piece::{ALIGNMENT, PackId, PieceId, Place};
use crate::{Error, Result};
use std::collections::HashMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use vramctl_host::system;

/// Most bytes of a pack.
pub const PACK_BYTES: u64 = 4 << 30;

const MAGIC: &[u8; 16] = b"vramctl index 1\0";

/// Most bytes of an index: a pack of the smallest pieces.
pub const MOST_INDEX: u64 = PACK_BYTES / ALIGNMENT as u64 * 48 + 4096;

/// A new pack's name, which no other has.
pub fn new_id() -> Result<PackId> {
    let mut id = [0; 8];
    system::fill_with_random(&mut id).map_err(Error::io("read", Path::new("/dev/urandom")))?;
    Ok(PackId(u64::from_le_bytes(id)))
}

/// The file of a pack's pieces.
pub fn pack_path(packs: &Path, id: PackId) -> PathBuf {
    packs.join(format!("{id}.pack"))
}

/// The file of a pack's index.
pub fn index_path(packs: &Path, id: PackId) -> PathBuf {
    packs.join(format!("{id}.index"))
}

/// What a pack has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Index {
    pub pack: PackId,
    /// The size of the pack's file.
    pub bytes: u64,
    /// The pieces, with their offsets, in ascending order.
    pub pieces: Vec<(PieceId, u64)>,
}

impl Index {
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Encoder::new(MAGIC);
        to.number(self.pack.0);
        to.number(self.bytes);
        to.number(self.pieces.len() as u64);
        for (id, offset) in &self.pieces {
            to.piece(id);
            to.number(*offset);
        }
        to.finish()
    }

    pub fn decode(file: &Path, id: PackId, all: &[u8]) -> Result<Self> {
        let mut from = Decoder::new(file, all, MAGIC)?;
        if from.number()? != id.0 {
            return Err(from.refusal("it is another pack's index"));
        }
        let (bytes, count) = (from.number()?, from.number()?);
        if bytes > PACK_BYTES {
            return Err(from.refusal("the pack would be larger than any"));
        }
        let mut pieces = Vec::with_capacity((count as usize).min(from.left() / 48));
        let mut end = 0;
        for _ in 0..count {
            let (id, offset) = (from.piece()?, from.number()?);
            if offset < end || !offset.is_multiple_of(ALIGNMENT as u64) || offset > bytes || offset + id.stored_bytes() > bytes {
                return Err(from.refusal("a piece lies outside the pack, or on another"));
            }
            end = offset + id.stored_bytes();
            pieces.push((id, offset));
        }
        from.finish()?;
        Ok(Self { pack: id, bytes, pieces })
    }

    /// Reads a pack's index, and looks whether the pack is as long as it says.
    pub fn read(disk: &Disk, packs: &Path, id: PackId) -> Result<Self> {
        let file = index_path(packs, id);
        let index = Self::decode(&file, id, &disk.read_whole(&file, MOST_INDEX)?)?;
        let pack = pack_path(packs, id);
        let found = pack.symlink_metadata().map_err(Error::io("open", &pack))?.len();
        if found != index.bytes {
            return Err(Error::damaged(&pack, format!("it has {found} bytes instead of {}", index.bytes)));
        }
        Ok(index)
    }
}

/// The packs in a store: those with an index, and those without one.
pub fn list(packs: &Path) -> Result<(Vec<PackId>, Vec<PackId>)> {
    let (mut whole, mut all) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(packs).map_err(Error::io("read", packs))? {
        let path = entry.map_err(Error::io("read", packs))?.path();
        let id = path.file_stem().and_then(|name| name.to_str()).filter(|name| name.len() == 16).map(|name| u64::from_str_radix(name, 16));
        let Some(Ok(id)) = id else { continue };
        match path.extension().and_then(|ending| ending.to_str()) {
            Some("index") => whole.push(PackId(id)),
            Some("pack") => all.push(PackId(id)),
            _ => (),
        }
    }
    whole.sort_unstable();
    all.sort_unstable();
    all.retain(|id| whole.binary_search(id).is_err());
    Ok((whole, all))
}

/// Which pieces the store has, and where.
#[derive(Debug, Default)]
pub struct Known {
    pub places: HashMap<PieceId, Place>,
    /// Packs of which the pieces are not known, and why.
    pub damaged: Vec<(PackId, Error)>,
}

impl Known {
    pub fn read(disk: &Disk, packs: &Path) -> Result<Self> {
        let mut known = Self::default();
        for id in list(packs)?.0 {
            match Index::read(disk, packs, id) {
                Ok(index) => known.add(&index),
                Err(error) => known.damaged.push((id, error)),
            }
        }
        Ok(known)
    }

    /// Adds what a pack has. The first of several places of a piece stays.
    pub fn add(&mut self, index: &Index) {
        for (id, offset) in &index.pieces {
            self.places.entry(*id).or_insert(Place { pack: index.pack, offset: *offset });
        }
    }
}

/// A pack that is open to read.
#[derive(Debug, Clone)]
pub struct PackFile {
    /// For messages.
    pub path: PathBuf,
    /// Through the page cache.
    pub cached: Arc<File>,
    /// Past the page cache, where the file system can.
    pub direct: Option<Arc<File>>,
}

impl PackFile {
    pub(crate) fn open(disk: &Disk, packs: &Path, id: PackId) -> Result<Self> {
        let path = pack_path(packs, id);
        let (cached, direct) = (disk.open(&path)?, disk.open(&path)?);
        let direct = disk::set_direct(&direct, true).then(|| Arc::new(direct));
        Ok(Self { path, cached: Arc::new(cached), direct })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index() -> Index {
        let piece = |byte: u8, bytes| PieceId::of(&vec![byte; bytes]);
        Index { pack: PackId(7), bytes: 16384, pieces: vec![(piece(1, 4096), 0), (piece(2, 100), 4096), (piece(3, 8192), 8192)] }
    }

    #[test]
    fn an_index_is_read_as_it_was_written() {
        let all = index().encode();
        assert_eq!(Index::decode(Path::new("i"), PackId(7), &all).unwrap(), index());
        assert!(Index::decode(Path::new("i"), PackId(8), &all).unwrap_err().to_string().contains("another pack's"));
        for at in 0..all.len() {
            let mut flipped = all.clone();
            flipped[at] ^= 1;
            assert!(Index::decode(Path::new("i"), PackId(7), &flipped).is_err(), "byte {at} flipped");
            assert!(Index::decode(Path::new("i"), PackId(7), &all[..at]).is_err(), "cut at {at}");
        }
    }

    #[test]
    fn pieces_on_each_other_are_refused() {
        let wrong = |change: fn(&mut Index)| {
            let mut index = index();
            change(&mut index);
            Index::decode(Path::new("i"), PackId(7), &index.encode()).unwrap_err()
        };
        wrong(|index| index.pieces[1].1 = 0);
        wrong(|index| index.pieces[1].1 = 5000);
        wrong(|index| index.bytes = 12288);
        wrong(|index| index.pieces[2].1 = u64::MAX - 4095);
    }
}
