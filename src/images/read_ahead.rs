//! Reads an image's contents into the page cache while CRIU brings the processes back: the disk has nothing to do meanwhile. Copies that are loaded
//! together read the rest by the cache, too, so that the disk reads each piece once.

use crate::details::failed;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_host::limits;
use vramctl_store::{Image, PIECE_BYTES, PackId, Piece, Source, is_cached};

/// As many read: the kernel reads ahead for each.
const THREADS: usize = 4;

/// The pieces of an image that are in its files.
pub struct ReadAhead {
    source: Arc<Source>,
    pieces: Vec<Piece>,
    /// The first of them, for which the host has room beside the processes.
    with_room: usize,
}

impl ReadAhead {
    /// Looks which pieces there are, and how much room.
    pub fn of(image: &Image) -> Result<Self, CommandError> {
        let listed = image.manifest().contents.iter().map(|listed| image.pieces_of(listed));
        let mut pieces = listed.collect::<Result<Vec<_>, _>>().map_err(failed)?.concat();
        pieces.retain(|piece| piece.place.is_some());
        // As the library reads them, each once.
        pieces.sort_unstable_by_key(|piece| piece.place.map(|place| (place.pack, place.offset)));
        pieces.dedup_by_key(|piece| piece.place);
        let of_processes: u64 = image.manifest().hashes.iter().map(|file| file.bytes).sum();
        let mut room = limits::spare_bytes().saturating_sub(of_processes);
        let fits = |piece: &&Piece| {
            let rest = room.checked_sub(piece.id.bytes.into());
            room = rest.unwrap_or(0);
            rest.is_some()
        };
        let with_room = pieces.iter().take_while(fits).count();
        Ok(Self { source: image.source(&pieces).map_err(failed)?, pieces, with_room })
    }

    /// Whether there is room for all of them.
    pub fn has_room(&self) -> bool {
        self.with_room == self.pieces.len()
    }

    /// Begins to read, until what is returned is dropped. What cannot be read, the library names.
    pub fn begin(self) -> io::Result<Reading> {
        let (packs, files) = self.source.descriptors().map_err(|error| io::Error::other(error.to_string()))?;
        // Of each pack, the first goes by the page cache.
        let files = files.into_iter().step_by(2).map(File::from);
        let files: BTreeMap<PackId, File> = packs.into_iter().zip(files).collect();
        let is_over = Arc::new(AtomicBool::new(false));
        let shared = Arc::new((files, self, AtomicUsize::new(0)));
        let threads = (0..THREADS).map_while(|_| {
            let (shared, is_over) = (shared.clone(), is_over.clone());
            let read = move || {
                let (files, ahead, next) = &*shared;
                let mut buffer = vec![0; PIECE_BYTES];
                while !is_over.load(Ordering::Relaxed)
                    && let Some(piece) = ahead.pieces[..ahead.with_room].get(next.fetch_add(1, Ordering::Relaxed))
                    && let Some(place) = piece.place
                {
                    let bytes = &mut buffer[..piece.id.bytes as usize];
                    let file = files.get(&place.pack).filter(|file| !is_cached(file, place.offset, bytes.len()));
                    let _ = file.map(|file| file.read_exact_at(bytes, place.offset));
                }
            };
            // Fewer are only slower.
            thread::Builder::new().name("read-ahead".into()).spawn(read).ok()
        });
        let threads = threads.collect();
        Ok(Reading { is_over, threads })
    }
}

/// Pieces are being read.
pub struct Reading {
    is_over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| _ = thread.join());
    }
}

/// The same packs, of which whoever gets their descriptors reads by the page cache alone.
pub fn by_cache(source: &Source, image: &str) -> Result<Source, CommandError> {
    let (packs, files) = source.descriptors().map_err(failed)?;
    let twice = |file: OwnedFd| Ok([file.try_clone()?, file]);
    let files: Vec<_> = files.into_iter().step_by(2).map(twice).collect::<io::Result<_>>().map_err(no_descriptor)?;
    Source::from_descriptors(image, &packs, files.into_iter().flatten().collect()).map_err(failed)
}

#[allow(clippy::needless_pass_by_value)] // for `map_err`
fn no_descriptor(error: io::Error) -> CommandError {
    CommandError::new(Exit::Failed, format!("cannot open the image's contents twice: {error}"))
}
