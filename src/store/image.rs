//! An image that is there.

use crate::contents::{self, Listed};
use crate::disk;
use crate::manifest::{self, FileHash, Manifest};
use crate::pack::{Known, PackFile};
use crate::piece::{Buffer, Piece, PieceId};
use crate::reading::{READERS, Source};
use crate::store::{Store, absent};
use crate::{Caller, Error, Result, files, name};
use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::thread;
use vramctl_host::file_lock::Sharing;

/// An image that is there. As long as this is, it is not removed, and its pieces stay where they are.
#[derive(Debug)]
pub struct Image {
    store: Store,
    name: String,
    path: PathBuf,
    manifest: Manifest,
    pieces: OnceLock<Vec<PieceId>>,
    known: OnceLock<Known>,
    _locks: [File; 2],
}

/// What a verification has read.
#[derive(Debug, Default)]
pub struct Verified {
    /// Pieces that are right, in bytes. Each counts once.
    pub bytes: u64,
    /// What is wrong. Empty if the image is whole.
    pub errors: Vec<Error>,
}

impl Store {
    /// Opens an image to look at: its manifest is whole, nothing else is checked yet. It is not removed meanwhile.
    pub fn inspect(&self, name: &str) -> Result<Image> {
        Image::open(self.clone(), name)
    }

    /// Opens an image to run it: the image is whole but for its pieces, each of which is verified when it is read; all of them are there; and
    /// what the image's processes had is the caller's.
    pub fn load(&self, name: &str, caller: &Caller) -> Result<Image> {
        let image = self.inspect(name)?;
        caller.check(image.manifest()).map_err(|error| error.of_image(name))?;
        image.check_files()?;
        image.check_pieces()?;
        Ok(image)
    }
}

impl Image {
    pub(crate) fn open(store: Store, name: &str) -> Result<Self> {
        let path = store.image_path(name)?;
        let locks = [store.lock(Sharing::Shared)?, store.lock_name(name, Sharing::Shared)?];
        disk::check_directory(&path).map_err(|error| absent(error, &path))?;
        let file = path.join(name::MANIFEST);
        let text = store.disk().read_whole(&file, manifest::MOST).map_err(|error| absent(error, &path))?;
        let manifest = Manifest::decode(&file, &text).map_err(|error| error.of_image(name))?;
        let wrong = manifest.hashes.iter().find(|file| !name::stays_inside(Path::new(&file.path)));
        if let Some(wrong) = wrong {
            return Err(Error::damaged(&file, format!("it names {:?}, which is outside the image", wrong.path)).of_image(name));
        }
        let (name, pieces, known) = (name.to_owned(), OnceLock::new(), OnceLock::new());
        Ok(Self { store, name, path, manifest, pieces, known, _locks: locks })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it is.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Its folder, with all of it but its pieces.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// CRIU's part.
    pub fn criu_path(&self) -> PathBuf {
        self.path.join(name::CRIU)
    }

    /// Files of the program.
    pub fn files_path(&self) -> PathBuf {
        self.path.join(name::FILES)
    }

    /// Refuses files that are not what was saved. [`Store::load`] has done so.
    pub fn check_files(&self) -> Result<()> {
        files::check(self.store.disk(), &self.path, &self.manifest.hashes).map_err(|error| error.of_image(&self.name))
    }

    /// Refuses files that are shorter than what was saved. None is read. `folder`: the image's, wherever it is reached.
    pub fn check_sizes(&self, folder: &Path) -> Result<()> {
        let shorter = |file: &&FileHash| folder.join(&file.path).metadata().is_ok_and(|found| found.len() < file.bytes);
        let Some(file) = self.manifest.hashes.iter().find(shorter) else { return Ok(()) };
        Err(Error::damaged(&self.path.join(&file.path), format!("it has become shorter than its {} bytes", file.bytes))
            .of_image(&self.name))
    }

    /// Refuses an image of which a piece is not there. None is read. [`Store::load`] has done so.
    pub fn check_pieces(&self) -> Result<()> {
        self.all_pieces()?.iter().try_for_each(|id| self.find(id).map(drop))
    }

    /// All pieces, in the order of loading.
    pub fn all_pieces(&self) -> Result<&[PieceId]> {
        if let Some(pieces) = self.pieces.get() {
            return Ok(pieces);
        }
        let path = self.path.join(name::CONTENTS);
        let read = self.store.disk().read_whole(&path, contents::MOST).and_then(|all| contents::decode(&path, &all));
        let pieces = read.map_err(|error| error.of_image(&self.name))?;
        self.manifest.contents.iter().try_for_each(|listed| self.check_listed(listed, &pieces, &path))?;
        Ok(self.pieces.get_or_init(|| pieces))
    }

    /// Whether contents' pieces are those of the manifest, and fit their ranges.
    fn check_listed(&self, listed: &Listed, pieces: &[PieceId], path: &Path) -> Result<()> {
        let own = listed.first.checked_add(listed.pieces).and_then(|end| pieces.get(listed.first as usize..end as usize));
        let is_own = own.is_some_and(|own| {
            let places = contents::places(&listed.of.ranges, listed.of.bytes);
            contents::hash_of(own) == listed.index
                && places.is_some_and(|cuts| cuts.map(|(_, bytes)| bytes as u32).eq(own.iter().map(|id| id.bytes)))
        });
        if is_own {
            return Ok(());
        }
        let why = format!("the pieces of tag {} at {:#x} are not those in the manifest", listed.of.tag, listed.of.address);
        Err(Error::damaged(path, why).of_image(&self.name))
    }

    fn known(&self) -> Result<&Known> {
        if let Some(known) = self.known.get() {
            return Ok(known);
        }
        let known = self.store.known()?;
        Ok(self.known.get_or_init(|| known))
    }

    fn find(&self, id: &PieceId) -> Result<Piece> {
        if id.is_zeros() {
            return Ok(Piece { id: *id, place: None });
        }
        let known = self.known()?;
        if let Some(place) = known.places.get(id) {
            return Ok(Piece { id: *id, place: Some(*place) });
        }
        let why = match known.damaged.first() {
            Some((_, error)) => format!("a piece of it cannot be found, and {error}"),
            None => "no pack has a piece of it".into(),
        };
        Err(Error::damaged(&self.store.packs(), why).of_image(&self.name))
    }

    /// The pieces of contents in the manifest, and where they are.
    pub fn pieces_of(&self, listed: &Listed) -> Result<Vec<Piece>> {
        let all = self.all_pieces()?;
        let own = listed.first as usize..(listed.first + listed.pieces) as usize;
        all[own].iter().map(|id| self.find(id)).collect()
    }

    /// Opens the packs of pieces to read these, here or, by [`Source::descriptors`], in another process.
    pub fn source(&self, pieces: &[Piece]) -> Result<Arc<Source>> {
        let packs: BTreeSet<_> = pieces.iter().filter_map(|piece| piece.place).map(|place| place.pack).collect();
        let open = |id| PackFile::open(self.store.disk(), &self.store.packs(), id).map(|file| (id, file));
        let packs = packs.into_iter().map(open).collect::<Result<Vec<_>>>().map_err(|error| error.of_image(&self.name))?;
        Ok(Arc::new(Source::with_disk(self.store.disk().clone(), &self.name, packs)))
    }

    /// Reads all of it, and tells everything that is wrong.
    pub fn verify(&self) -> Result<Verified> {
        let mut verified = Verified::default();
        verified.errors.extend(self.check_files().err());
        let ids: BTreeSet<_> = match self.all_pieces() {
            Ok(pieces) => pieces.iter().filter(|id| !id.is_zeros()).copied().collect(),
            Err(error) => {
                verified.errors.push(error);
                return Ok(verified);
            }
        };
        let mut pieces = Vec::new();
        for id in ids {
            match self.find(&id) {
                Ok(piece) => pieces.push(piece),
                Err(error) => verified.errors.push(error),
            }
        }
        pieces.sort_unstable_by_key(|piece| piece.place.map(|place| (place.pack, place.offset)));
        let source = self.source(&pieces)?;
        let mut left = pieces.as_slice();
        while !left.is_empty() {
            let (read, error) = read_all(&source, left);
            verified.bytes += left[..read].iter().map(|piece| u64::from(piece.id.bytes)).sum::<u64>();
            verified.errors.extend(error);
            // The bad one is passed over.
            left = left.get(read + 1..).unwrap_or_default();
        }
        Ok(verified)
    }

    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.path
    }
}

/// Reads pieces up to the first bad one. Returns how many are right.
fn read_all(source: &Arc<Source>, pieces: &[Piece]) -> (usize, Option<Error>) {
    let buffers = (0..2 * READERS.min(pieces.len())).map(|_| Buffer::for_piece()).collect();
    thread::scope(|scope| {
        let mut reading = source.read_ahead(scope, pieces.to_vec(), buffers);
        loop {
            match reading.take() {
                Ok(Some(loaded)) => loaded.buffer.into_iter().for_each(|buffer| reading.give_back(buffer)),
                Ok(None) => return (reading.handed_out().end, None),
                Err(error) => return (reading.handed_out().end, Some(error)),
            }
        }
    })
}
