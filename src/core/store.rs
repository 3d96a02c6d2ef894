//! Puts the contents of paused memory into an image, and gets them back.

use crate::connection::Lines;
use crate::memory::{Allocation, Memory};
use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use vramctl_backup::{self as backup, Backup, Origin};
use vramctl_control::descriptors::{self, Passed};
use vramctl_control::protocol::ImageName;
use vramctl_host::Held;
use vramctl_model::Error;
use vramctl_store::{Contents, PackId, Piece, Source, Writer};

impl Memory {
    /// Puts what is kept of paused memory into an image. The host memory goes back to the system. All or nothing. The last of the files gets the list
    /// of the contents, and of the packs. Returns the bytes of contents, and how many of them are written.
    pub fn store(&self, mut files: Vec<OwnedFd>, image: ImageName) -> Result<(u64, u64), Error> {
        let _exclusive = self.exclude_unless_quiesced()?;
        let list = files.pop().ok_or_else(|| Error::Invalid("descriptors are missing".into()))?;
        let all = self.registry.snapshot();
        if all.iter().any(|allocation| allocation.contents().state.is_active()) {
            return Err(Error::Invalid("not all memory is paused, so its contents cannot be stored".into()));
        }
        let saved_of = |allocation: &Arc<Allocation>| allocation.contents().state.saved().cloned();
        let (kept, saved): (Vec<_>, Vec<_>) = all.iter().filter_map(|allocation| Some((allocation, saved_of(allocation)?))).unzip();
        let writer = Writer::from_descriptors(files).map_err(failed)?;
        let stored = backup::store(&saved, &writer)?;
        let bytes = stored.iter().map(|stored| stored.kept_bytes()).sum();
        let of_kept = kept.iter().zip(&stored).map(|(allocation, stored)| describe(allocation, Some(&**stored)));
        // They need room, too.
        let of_dropped = all.iter().filter(|allocation| saved_of(allocation).is_none()).map(|allocation| describe(allocation, None));
        let described: Vec<_> = of_kept.chain(of_dropped).collect();
        let packs: BTreeSet<_> = stored.iter().flat_map(|stored| packs_of(stored)).collect();
        let written = serde_json::to_writer(File::from(list), &(described, packs));
        written.map_err(|error| Error::Disk(error.to_string()))?;
        writer.finish().map_err(failed)?;
        backup::set_origin(Origin { directory: image.directory.into(), image: image.name, opened: None });
        // An image has all of the process's memory in it, so what is not needed must be gone.
        let _unpooled = backup::stop_pooling()?;
        for (allocation, now) in kept.iter().zip(stored) {
            // Freed with the last of these.
            let _before = allocation.contents().state.replace_saved(now);
        }
        drop(saved);
        Ok((bytes, writer.written().stored()))
    }

    /// Reads stored contents back from these files from now on: the first has where each piece is, and two of each pack follow.
    pub fn set_origin(files: Vec<OwnedFd>, image: ImageName, packs: &[u64]) -> Result<(), Error> {
        let mut files = files.into_iter();
        let missing = || Error::Invalid("descriptors are missing".into());
        let mut text = Vec::new();
        File::from(files.next().ok_or_else(missing)?).read_to_end(&mut text).map_err(|error| Error::Disk(error.to_string()))?;
        let pieces: Vec<Piece> = serde_json::from_slice(&text).map_err(|error| Error::Invalid(error.to_string()))?;
        let places: HashMap<_, _> = pieces.into_iter().filter_map(|piece| Some((piece.id, piece.place?))).collect();
        let packs: Vec<_> = packs.iter().copied().map(PackId).collect();
        let source = Source::from_descriptors(&image.name, &packs, files.collect()).map_err(failed)?;
        backup::set_origin(Origin {
            directory: PathBuf::from(image.directory),
            image: image.name,
            opened: Some((Arc::new(source), places)),
        });
        Ok(())
    }

    /// Closes the files of stored contents once nothing is stored any more.
    pub(crate) fn close_origin(&self) {
        let is_stored =
            |allocation: &Arc<Allocation>| matches!(allocation.contents().state.saved().map(|saved| &**saved), Some(Backup::Stored(_)));
        if !self.registry.all().iter().any(is_stored) {
            backup::close_origin();
        }
    }
}

#[allow(clippy::needless_pass_by_value)] // for `map_err`
fn failed(error: vramctl_store::Error) -> Error {
    Error::Disk(error.to_string())
}

fn packs_of(stored: &Backup) -> Vec<PackId> {
    if let Backup::Stored(stored) = stored { stored.packs() } else { Vec::new() }
}

/// `stored`: what is kept of it, if anything is.
fn describe(allocation: &Allocation, stored: Option<&Backup>) -> Contents {
    let (ranges, pieces) = match stored {
        Some(Backup::Stored(stored)) => (stored.live().iter().map(|live| (live.start as u64, live.len() as u64)).collect(), stored.ids()),
        Some(Backup::Host(_) | Backup::Disk(_)) | None => (Vec::new(), Vec::new()),
    };
    let of = vramctl_store::Allocation {
        process: 0,
        tag: allocation.tag.to_string(),
        gpu: allocation.on_device().map_or(0, i32::cast_unsigned),
        address: allocation.address().unwrap_or_default(),
        bytes: allocation.bytes() as u64,
        ranges,
    };
    Contents { of, pieces }
}

/// The descriptors that a client sends through the socket whose descriptor its request carries.
pub fn received(lines: &mut Lines<'_>) -> Result<Vec<OwnedFd>, Error> {
    let socket =
        lines.take_file().ok_or_else(|| Error::Invalid("the request needs a descriptor of a socket, through which others come".into()))?;
    let stream = socket.as_type::<UnixStream>().map_err(|error| Error::Invalid(error.to_string()))?;
    let mut passed = Passed::default();
    descriptors::receive(&stream, &mut [0], &mut passed).map_err(|error| Error::Invalid(error.to_string()))?;
    if passed.lacks_some {
        return Err(Error::Invalid(
            "not all descriptors have arrived: this process has reached its limit of open files (ulimit -n)".into(),
        ));
    }

    let copy = |file: &Held| file.get().and_then(|file| file.try_clone_to_owned());
    passed.files.iter().map(copy).collect::<io::Result<_>>().map_err(|error| Error::Invalid(error.to_string()))
}
