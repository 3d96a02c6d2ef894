//! A save in progress.

use crate::contents::{self, Contents, Listed};
use crate::manifest::Manifest;
use crate::pack::{self, Index};
use crate::piece::{PackId, Piece};
use crate::root::Root;
use crate::store::Store;
use crate::writer::{Writer, Written};
use crate::{Error, Result, disk, files, name, root};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Mutex;
use vramctl_host::Unpoison;
use vramctl_host::file_lock::Sharing;

/// A save in progress. Dropped before [`Saving::finish`], it leaves nothing, unless a program is kept ([`Saving::keep_for`]).
#[derive(Debug)]
pub struct Saving {
    store: Store,
    name: String,
    image: PathBuf,
    writer: Writer,
    /// Packs that other processes write.
    handed_out: Mutex<Vec<PackId>>,
    is_decided: bool,
    /// Given up last.
    _locks: [File; 2],
}

impl Store {
    /// Begins to save an image. Its name is taken until the result is dropped, and no `gc` runs meanwhile.
    pub fn save(&self, name: &str) -> Result<Saving> {
        Saving::begin(self.clone(), name)
    }
}

impl Saving {
    pub(crate) fn begin(store: Store, name: &str) -> Result<Self> {
        let image = store.image_path(name)?;
        // A load may have its name.
        if image.join(name::MANIFEST).symlink_metadata().is_ok() {
            return Err(Error::Exists(image));
        }
        let locks = [store.lock(Sharing::Shared)?, store.lock_name(name, Sharing::Exclusive)?];
        store.clear(name)?;
        if image.symlink_metadata().is_ok() {
            return Err(Error::Exists(image));
        }
        let known = store.known()?;
        let root = Root::create(store.disk(), &store.roots(), Some(name))?;
        store.disk().make_new_directory(&image)?;
        let writer = Writer::new(store.disk().clone(), store.packs(), root, known);
        let (name, handed_out) = (name.to_owned(), Mutex::default());
        let saving = Self { store, name, image, writer, handed_out, is_decided: false, _locks: locks };
        for folder in [saving.criu_path(), saving.files_path()] {
            saving.store.disk().make_new_directory(&folder)?;
        }
        Ok(saving)
    }

    /// The image's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The directory for CRIU's part.
    pub fn criu_path(&self) -> PathBuf {
        self.image.join(name::CRIU)
    }

    /// The directory for files of the program.
    pub fn files_path(&self) -> PathBuf {
        self.image.join(name::FILES)
    }

    /// Stores a piece: see [`Writer::put`].
    pub fn put(&self, piece: &[u8]) -> Result<Piece> {
        self.writer.put(piece)
    }

    /// The writer of this process.
    pub fn writer(&self) -> &Writer {
        &self.writer
    }

    /// What this process has put so far.
    pub fn written(&self) -> Written {
        self.writer.written()
    }

    /// Has another process write up to so many bytes of pieces, each rounded up to [`crate::ALIGNMENT`]. It makes a [`Writer`] of the
    /// descriptors ([`Writer::from_descriptors`]), puts, and calls its `finish` before [`Saving::finish`] is called here. Several processes may do so
    /// at once. What two of them have in common is then stored twice.
    pub fn hand_out(&self, bytes: u64) -> Result<Vec<OwnedFd>> {
        let (descriptors, packs) = self.writer.hand_out(bytes)?;
        self.handed_out.lock().unpoisoned().extend(packs);
        Ok(descriptors)
    }

    /// From now on, what was put stays where it is as long as a process lives, also if this one is killed or drops the save: the program has its
    /// contents nowhere else. Until [`Saving::release`].
    pub fn keep_for(&self, pid: u32) -> Result<()> {
        self.writer.with_root(|root| root.keep_for(pid))
    }

    /// The program has its contents again, or has ended.
    pub fn release(&self) {
        self.writer.with_root(Root::release);
    }

    /// Makes the image: all is durable, then the manifest gets its name, which is the decision. On an error there is no image, and what was put can
    /// still be read. Nothing is put after this.
    pub fn finish(&mut self, mut manifest: Manifest, contents: &[Contents]) -> Result<()> {
        contents.iter().try_for_each(Contents::check)?;
        self.writer.finish()?;
        self.take_in()?;
        let disk = self.store.disk();
        let pieces: Vec<_> = contents.iter().flat_map(|contents| &contents.pieces).copied().collect();
        let list = self.image.join(name::CONTENTS);
        disk.remove_file(&list)?;
        let file = disk.create(&list)?;
        disk.write(&file, &list, &contents::encode(pieces.iter()), 0)?;
        drop(file);
        files::make_private(&self.image)?;
        let tree = files::Tree::of(&self.image)?;
        files::sync(disk, &self.image, &tree)?;
        manifest.contents = listed(contents);
        manifest.hashes = files::hashes(disk, &self.image, &tree.files)?;
        disk.sync_directory(&self.image)?;
        disk.sync_directory(self.store.images_path())?;
        let path = self.image.join(name::MANIFEST);
        disk.write_whole(&path, &manifest.encode()?)?;
        if let Err(error) = disk.sync_directory(&self.image) {
            // It would be gone after a crash, so it goes now.
            disk.remove_file(&path)?;
            return Err(error);
        }
        self.is_decided = true;
        Ok(())
    }

    /// Takes in the packs that other processes have written: durable, with an index that fits.
    fn take_in(&self) -> Result<()> {
        let (disk, packs) = (self.store.disk(), self.store.packs());
        let mut handed_out = self.handed_out.lock().unpoisoned();
        for id in &*handed_out {
            let (pack, index) = (pack::pack_path(&packs, *id), pack::index_path(&packs, *id));
            let new = disk::new_name(&index);
            let read = disk.read_whole(&new, pack::MOST_INDEX)?;
            let found = Index::decode(&new, *id, &read)?;
            let file = disk.open(&pack)?;
            let bytes = file.metadata().map_err(Error::io("open", &pack))?.len();
            if bytes != found.bytes {
                return Err(Error::damaged(&pack, format!("it has {bytes} bytes instead of {}", found.bytes)));
            }
            if found.pieces.is_empty() {
                disk.remove_file(&new)?;
                disk.remove_file(&pack)?;
                continue;
            }
            disk.sync(&file, &pack)?;
            disk.sync_directory(&packs)?;
            disk.sync(&disk.open(&new)?, &new)?;
            disk.rename(&new, &index)?;
        }
        if !handed_out.is_empty() {
            disk.sync_directory(&packs)?;
        }
        handed_out.clear();
        Ok(())
    }

    /// Removes what this save has made. A pack with an index stays: another save may have found pieces in it.
    fn undo(&self) -> Result<()> {
        root::clear_half(self.store.disk(), self.store.images_path(), &self.name)?;
        if self.writer.with_root(|root| root.is_kept()) {
            return Ok(());
        }
        let handed_out = std::mem::take(&mut *self.handed_out.lock().unpoisoned());
        let new = self.writer.packs().into_iter().chain(handed_out).collect();
        root::remove_unfinished(self.store.disk(), &self.store.packs(), &new)
    }
}

impl Drop for Saving {
    fn drop(&mut self) {
        if !self.is_decided && self.undo().is_err() {
            // The root tells `gc` whose it is.
            self.writer.with_root(Root::keep);
        }
    }
}

fn listed(contents: &[Contents]) -> Vec<Listed> {
    let mut next = 0;
    let list = contents.iter().map(|Contents { of, pieces }| {
        let (first, count) = (next, pieces.len() as u64);
        next += count;
        Listed { of: of.clone(), first, pieces: count, index: contents::hash_of(pieces) }
    });
    list.collect()
}
