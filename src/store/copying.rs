//! Images from one directory to another: an exported image is a directory of images with one, and can be loaded as it is.

use crate::contents::Contents;
use crate::image::Image;
use crate::store::Store;
use crate::writer::Written;
use crate::{Error, Result, files, gc};
use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::path::Path;

impl Image {
    /// Saves this image elsewhere, verified on the way. Pieces that are there already are not written.
    pub fn copy_to(&self, to: &Store, name: &str) -> Result<Written> {
        self.check_files()?;
        let mut saving = to.save(name)?;
        let tree = files::Tree::of(self.directory())?;
        let target = to.image_path(name)?;
        for folder in tree.directories {
            to.disk().make_directory(&target.join(folder))?;
        }
        for path in tree.files.keys().filter(|path| *path != crate::name::CONTENTS) {
            let (from, to_path) = (self.directory().join(path), target.join(path));
            copy_file(&self.store().disk().open(&from)?, &to.disk().create(&to_path)?).map_err(Error::io("write", &to_path))?;
        }
        let mut seen = HashSet::new();
        let mut pieces = Vec::new();
        let mut contents = Vec::new();
        for listed in &self.manifest().contents {
            let own = self.pieces_of(listed)?;
            contents.push(Contents { of: listed.of.clone(), pieces: own.iter().map(|piece| piece.id).collect() });
            pieces.extend(own.into_iter().filter(|piece| piece.place.is_some() && seen.insert(piece.id)));
        }
        gc::copy(&self.source(&pieces)?, &pieces, saving.writer())?;
        let written = saving.written();
        saving.finish(self.manifest().clone(), &contents)?;
        Ok(written)
    }
}

fn copy_file(mut from: &File, mut to: &File) -> io::Result<u64> {
    io::copy(&mut from, &mut to)
}

impl Store {
    /// Makes a directory of images with one image alone, of which `tar` makes one file.
    pub fn export(&self, name: &str, directory: &Path) -> Result<Written> {
        let image = self.inspect(name)?;
        if directory.symlink_metadata().is_ok() {
            return Err(Error::Exists(directory.to_owned()));
        }
        image.copy_to(&Self::create(directory)?, name)
    }

    /// Takes in an image that was exported, or is in another directory of images.
    pub fn import(&self, directory: &Path, from: &str, name: &str) -> Result<Written> {
        Self::open(directory)?.inspect(from)?.copy_to(self, name)
    }
}
