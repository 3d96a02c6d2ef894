//! The list of images, and what each of them takes.

use crate::manifest::Manifest;
use crate::piece::PieceId;
use crate::store::Store;
use crate::{Error, Result};
use std::collections::{HashMap, HashSet};

/// An image in a list.
#[derive(Debug)]
pub struct Summary {
    /// Its name.
    pub name: String,
    /// What it is, or why that cannot be read.
    pub manifest: Result<Manifest>,
    /// Bytes of CRIU's part and of files.
    pub files: u64,
    /// Bytes of the contents, zeros included.
    pub contents: u64,
    /// Bytes of its pieces in the store.
    pub stored: u64,
    /// Of these, in pieces that other images have, too.
    pub shared: u64,
}

impl Store {
    /// All images, sorted by name, and what each of them takes.
    pub fn images(&self) -> Result<Vec<Summary>> {
        let mut all = Vec::new();
        let mut users = HashMap::<_, u32>::new();
        for name in self.names()? {
            let read = self.inspect(&name).map(|image| (image.manifest().clone(), image.all_pieces().map(<[_]>::to_vec)));
            let (manifest, pieces) = match read {
                Ok((manifest, pieces)) => (Ok(manifest), pieces.unwrap_or_default()),
                Err(Error::NoImage(_)) => continue,
                Err(error) => (Err(error), Vec::new()),
            };
            let own: HashSet<_> = pieces.into_iter().filter(|piece| !piece.is_zeros()).collect();
            for piece in &own {
                *users.entry(*piece).or_default() += 1;
            }
            all.push((name, manifest, own));
        }
        let summary = |(name, manifest, own): (String, Result<Manifest>, HashSet<PieceId>)| {
            let bytes = |only_shared: bool| own.iter().filter(|id| !only_shared || users[id] > 1).map(|id| u64::from(id.bytes)).sum();
            let (files, contents) = manifest.as_ref().map_or((0, 0), |manifest| {
                let files = manifest.hashes.iter().map(|file| file.bytes).sum();
                (files, manifest.contents.iter().flat_map(|contents| &contents.of.ranges).map(|(_, bytes)| bytes).sum())
            });
            Summary { files, contents, stored: bytes(false), shared: bytes(true), name, manifest }
        };
        Ok(all.into_iter().map(summary).collect())
    }
}
