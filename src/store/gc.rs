//! Removes what no image needs: leftovers of dead saves, packs with nothing in use, and what is not in use of packs that have little.

use crate::contents;
use crate::disk;
use crate::pack::{self, Index, Known, PACK_BYTES, PackFile};
use crate::piece::{Buffer, PackId, Piece, PieceId, Place};
use crate::reading::{READERS, Source};
use crate::root::{self, Root};
use crate::store::Store;
use crate::writer::Writer;
use crate::{Error, Result, name};
use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use vramctl_host::file_lock::Sharing;

/// A pack is written anew without the rest if at least one part of so many is not in use.
const PART: u64 = 4;

/// What a [`Store::gc`] has done.
#[derive(Debug, Default)]
pub struct Cleaned {
    /// Bytes that are free now.
    pub freed: u64,
    /// Packs that are gone.
    pub packs: usize,
    /// What was left as it is, and why.
    pub left: Vec<Error>,
}

/// A pack, and what of it is in use.
struct Used {
    id: PackId,
    bytes: u64,
    pieces: Vec<Piece>,
}

impl Used {
    fn bytes_in_use(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.id.stored_bytes()).sum()
    }
}

impl Store {
    /// Removes what no image needs. Waits up to a limit until nobody saves or loads. Killed at any moment, it loses nothing.
    pub fn gc(&self, limit: Duration) -> Result<Cleaned> {
        let _alone = self.lock_within(Sharing::Exclusive, limit)?;
        let pinned = self.clear_roots()?;
        let live = self.live_pieces()?;
        let mut root = Root::create(self.disk(), &self.roots(), None)?;
        root.keep();
        let mut cleaned = Cleaned::default();
        let (whole, without_index) = pack::list(&self.packs())?;
        let lost = without_index.iter().filter(|id| !pinned.contains(id)).map(|id| pack::pack_path(&self.packs(), *id));
        cleaned.left.extend(lost.map(|path| Error::damaged(&path, "its index is not there")));
        self.remove_unfinished(&pinned)?;
        let mut few = Vec::new();
        for pack in self.in_use(whole, &pinned, live, &mut cleaned) {
            match pack.bytes_in_use() {
                0 => self.remove_pack(&root, pack.id, &mut cleaned)?,
                used if (pack.bytes - used) * PART >= pack.bytes => few.push(pack),
                _ => (),
            }
        }
        self.compact(&root, few, &mut cleaned)?;
        self.disk().sync_directory(&self.packs())?;
        root.release();
        Ok(cleaned)
    }

    /// Clears what dead saves and removals have left. Returns the packs of those that live.
    fn clear_roots(&self) -> Result<BTreeSet<PackId>> {
        let mut pinned = BTreeSet::new();
        for found in root::list(self.disk(), &self.roots())? {
            match found.damage {
                Some(damage) => return Err(damage),
                None if found.is_alive => pinned.extend(found.packs),
                None => root::clear(self.disk(), self.images_path(), &self.packs(), &found)?,
            }
        }
        for entry in fs::read_dir(self.roots()).map_err(Error::io("read", &self.roots()))? {
            let path = entry.map_err(Error::io("read", &self.roots()))?.path();
            if path.extension().is_some_and(|ending| ending == "removed") {
                self.disk().remove_tree(&path)?;
            }
        }
        Ok(pinned)
    }

    /// The pieces of all images. If those of one image cannot be known, nothing is removed.
    fn live_pieces(&self) -> Result<HashSet<PieceId>> {
        let mut live = HashSet::new();
        for entry in fs::read_dir(self.images_path()).map_err(Error::io("read", self.images_path()))? {
            let path = entry.map_err(Error::io("read", self.images_path()))?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let [manifest, list] = [name::MANIFEST, name::CONTENTS].map(|file| path.join(file));
            let is_image = name::check(name).is_ok() && [&manifest, &list].iter().any(|path| path.symlink_metadata().is_ok());
            if !is_image {
                continue;
            }
            let all = self.disk().read_whole(&list, contents::MOST).and_then(|all| contents::decode(&list, &all));
            live.extend(all.map_err(|error| error.of_image(name))?);
        }
        Ok(live)
    }

    /// What of each pack is in use. Of several places of a piece, one is. A pack that cannot be known or is pinned is not in the list.
    fn in_use(&self, packs: Vec<PackId>, pinned: &BTreeSet<PackId>, mut live: HashSet<PieceId>, cleaned: &mut Cleaned) -> Vec<Used> {
        let mut used = Vec::new();
        // Pieces that stay in a pinned pack need no second place.
        let (first, then): (Vec<_>, Vec<_>) = packs.into_iter().partition(|id| pinned.contains(id));
        for id in first.into_iter().chain(then) {
            match Index::read(self.disk(), &self.packs(), id) {
                Err(error) => cleaned.left.push(error),
                Ok(index) => {
                    let own = index.pieces.iter().filter(|(piece, _)| live.remove(piece));
                    let own = own.map(|(piece, offset)| Piece { id: *piece, place: Some(Place { pack: id, offset: *offset }) }).collect();
                    used.push(Used { id, bytes: index.bytes, pieces: own });
                }
            }
        }
        used.retain(|pack| !pinned.contains(&pack.id));
        used
    }

    /// The index goes first. Then the root tells that the pack was not meant to stay.
    fn remove_pack(&self, root: &Root, id: PackId, cleaned: &mut Cleaned) -> Result<()> {
        let (packs, pack) = (self.packs(), pack::pack_path(&self.packs(), id));
        root.pin_new(id)?;
        let bytes = pack.symlink_metadata().map_or(0, |found| found.len());
        self.disk().remove_file(&pack::index_path(&packs, id))?;
        self.disk().sync_directory(&packs)?;
        self.disk().remove_file(&pack)?;
        cleaned.packs += 1;
        cleaned.freed += bytes;
        Ok(())
    }

    /// Removes indexes that were never finished.
    fn remove_unfinished(&self, pinned: &BTreeSet<PackId>) -> Result<()> {
        for entry in fs::read_dir(self.packs()).map_err(Error::io("read", &self.packs()))? {
            let path = entry.map_err(Error::io("read", &self.packs()))?.path();
            let is_new = path.extension().is_some_and(|ending| ending == "new");
            if is_new && !pinned.iter().any(|id| disk::new_name(&pack::index_path(&self.packs(), *id)) == path) {
                self.disk().remove_file(&path)?;
            }
        }
        Ok(())
    }

    /// Writes what is in use of packs into new ones, a pack's worth at a time.
    fn compact(&self, root: &Root, packs: Vec<Used>, cleaned: &mut Cleaned) -> Result<()> {
        let mut batch = Vec::new();
        for pack in packs {
            let bytes: u64 = batch.iter().map(Used::bytes_in_use).sum();
            if bytes + pack.bytes_in_use() > PACK_BYTES {
                self.compact_batch(root, std::mem::take(&mut batch), cleaned)?;
            }
            batch.push(pack);
        }
        self.compact_batch(root, batch, cleaned)
    }

    fn compact_batch(&self, root: &Root, packs: Vec<Used>, cleaned: &mut Cleaned) -> Result<()> {
        if packs.is_empty() {
            return Ok(());
        }
        let own = Root::create(self.disk(), &self.roots(), None)?;
        let writer = Writer::new(self.disk().clone(), self.packs(), own, Known::default());
        let mut moved = Vec::new();
        for pack in packs {
            match self.move_pieces(&pack, &writer) {
                Ok(()) => moved.push(pack.id),
                // It may have the last good copy of the others.
                Err(error) => cleaned.left.push(error),
            }
        }
        if let Err(error) = writer.finish() {
            for id in writer.packs() {
                self.remove_pack(root, id, &mut Cleaned::default())?;
            }
            cleaned.left.push(error);
            return Ok(());
        }
        moved.iter().try_for_each(|id| self.remove_pack(root, *id, cleaned))?;
        cleaned.freed = cleaned.freed.saturating_sub(writer.written().stored());
        Ok(())
    }

    fn move_pieces(&self, pack: &Used, writer: &Writer) -> Result<()> {
        let file = PackFile::open(self.disk(), &self.packs(), pack.id)?;
        let source = Arc::new(Source::with_disk(self.disk().clone(), "", [(pack.id, file)]));
        copy(&source, &pack.pieces, writer)
    }
}

/// Puts pieces elsewhere, in their order, each verified.
pub(crate) fn copy(source: &Arc<Source>, pieces: &[Piece], writer: &Writer) -> Result<()> {
    let buffers = (0..2 * READERS.min(pieces.len())).map(|_| Buffer::for_piece()).collect();
    thread::scope(|scope| {
        let mut reading = source.read_ahead(scope, pieces.to_vec(), buffers);
        while let Some(loaded) = reading.take()? {
            if let Some(buffer) = loaded.buffer {
                writer.put(&buffer[..loaded.id.bytes as usize])?;
                reading.give_back(buffer);
            }
        }
        Ok(())
    })
}
