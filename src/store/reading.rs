//! Reads pieces ahead, by several threads. Each is verified before it is handed out.

use crate::disk::{self, Disk};
use crate::hash::Hash;
use crate::pack::PackFile;
use crate::piece::{ALIGNMENT, PackId, Piece, PieceId};
use crate::{Error, Result};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::Scope;
use vramctl_host::{Unpoison, worker};

/// As many threads keep fast drives busy, and hash as fast as memory gives. More change nothing.
pub const READERS: usize = 16;

/// Packs that are open to read.
#[derive(Debug)]
pub struct Source {
    disk: Disk,
    image: String,
    packs: HashMap<PackId, PackFile>,
}

impl Source {
    /// Packs to read an image from, whose name is for messages.
    pub fn new(image: &str, packs: impl IntoIterator<Item = (PackId, PackFile)>) -> Self {
        Self::with_disk(Disk::default(), image, packs)
    }

    pub(crate) fn with_disk(disk: Disk, image: &str, packs: impl IntoIterator<Item = (PackId, PackFile)>) -> Self {
        Self { disk, image: image.to_owned(), packs: packs.into_iter().collect() }
    }

    /// The packs, and two descriptors of each, for another process.
    pub fn descriptors(&self) -> Result<(Vec<PackId>, Vec<OwnedFd>)> {
        let mut descriptors = Vec::new();
        for pack in self.packs.values() {
            for file in [&pack.cached, pack.direct.as_ref().unwrap_or(&pack.cached)] {
                descriptors.push(file.try_clone().map_err(Error::io("open", &pack.path))?.into());
            }
        }
        Ok((self.packs.keys().copied().collect(), descriptors))
    }

    /// What [`Source::descriptors`] was in another process.
    pub fn from_descriptors(image: &str, packs: &[PackId], descriptors: Vec<OwnedFd>) -> Result<Self> {
        if descriptors.len() != 2 * packs.len() {
            return Err(Error::Invalid("descriptors of packs are missing".into()));
        }
        let mut files = descriptors.into_iter().map(File::from);
        let packs = packs.iter().map(|id| {
            let (cached, direct) = (files.next().expect("counted"), files.next().expect("counted"));
            let direct = disk::is_direct(&direct).then(|| Arc::new(direct));
            (*id, PackFile { path: PathBuf::from(format!("pack {id}")), cached: Arc::new(cached), direct })
        });
        let packs = packs.collect();
        Ok(Self { disk: Disk::default(), image: image.to_owned(), packs })
    }

    /// Reads a piece that is not zeros to the beginning of a buffer, and verifies it.
    fn read(&self, piece: &Piece, buffer: &mut [u8]) -> Result<()> {
        let Some(place) = piece.place else { return Ok(()) };
        let Some(pack) = self.packs.get(&place.pack) else {
            return Err(Error::Invalid(format!("pack {} is not open", place.pack)));
        };
        let (bytes, stored) = (piece.id.bytes as usize, piece.id.stored_bytes() as usize);
        let length = buffer.len();
        let Some(into) = buffer.get_mut(..bytes) else {
            return Err(Error::Invalid(format!("a buffer has {length} bytes, and a piece {bytes}")));
        };
        let direct = pack.direct.as_ref().filter(|_| length >= stored && into.as_ptr().addr().is_multiple_of(ALIGNMENT));
        let read = match direct.filter(|_| !disk::is_cached(&pack.cached, place.offset, stored)) {
            Some(direct) => match self.disk.read(direct, &pack.path, &mut buffer[..stored], place.offset) {
                // A file system that takes the flag but not the request.
                Err(Error::Io { error, .. }) if error.raw_os_error() == Some(libc::EINVAL) => {
                    self.disk.read(&pack.cached, &pack.path, &mut buffer[..bytes], place.offset)
                }
                other => other,
            },
            None => self.disk.read(&pack.cached, &pack.path, into, place.offset),
        };
        read.map_err(|error| error.of_image(&self.image))?;
        if Hash::of(&buffer[..bytes]) == piece.id.hash {
            return Ok(());
        }
        let (image, file) = (Some(self.image.clone()), pack.path.clone());
        Err(Error::Damaged { image, file, offset: Some(place.offset), why: format!("a piece of {bytes} bytes is not what was stored") })
    }

    /// Begins to read pieces, in their order, into buffers: at a multiple of [`ALIGNMENT`] and as long as a piece and its rest to a multiple of
    /// that, or the page cache is used. As many threads read ahead as there are buffers, at most [`READERS`].
    pub fn read_ahead<'scope, B: AsMut<[u8]> + Send + 'scope>(
        self: &Arc<Self>,
        scope: &'scope Scope<'scope, '_>,
        pieces: Vec<Piece>,
        buffers: Vec<B>,
    ) -> Reading<B> {
        let threads = buffers.len().min(READERS).min(pieces.len());
        let state = State { free: buffers, claimed: 0, reading: 0, read: BTreeMap::new(), is_closed: false };
        let shared = Arc::new(Shared { source: self.clone(), pieces, state: Mutex::new(state), changed: Condvar::new() });
        let mut reading = Reading { shared, next: 0, has_threads: false };
        for _ in 0..threads {
            let shared = reading.shared.clone();
            // Fewer threads are only slower.
            if worker::spawn_scoped(scope, "vramctl-read", move || while shared.read_one(true) {}).is_err() {
                break;
            }
            reading.has_threads = true;
        }
        reading
    }
}

/// A piece that was read.
#[derive(Debug)]
pub struct Loaded<B> {
    /// Its place in the list of pieces.
    pub index: usize,
    /// What it is.
    pub id: PieceId,
    /// The buffer, which begins with it. `None` for zeros.
    pub buffer: Option<B>,
}

/// Pieces that are being read ahead. Dropping it ends that.
#[derive(Debug)]
pub struct Reading<B> {
    shared: Arc<Shared<B>>,
    next: usize,
    has_threads: bool,
}

#[derive(Debug)]
struct Shared<B> {
    source: Arc<Source>,
    pieces: Vec<Piece>,
    state: Mutex<State<B>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<B> {
    /// Buffers with nothing in them.
    free: Vec<B>,
    /// Pieces before this one are being read or were.
    claimed: usize,
    /// How many are being read.
    reading: usize,
    /// What was read and is not handed out yet.
    read: BTreeMap<usize, Result<Option<B>>>,
    is_closed: bool,
}

impl<B: AsMut<[u8]>> Shared<B> {
    fn lock(&self) -> MutexGuard<'_, State<B>> {
        self.state.lock().unpoisoned()
    }

    /// Whether the next piece can be read now.
    fn is_ready(&self, state: &State<B>) -> bool {
        self.pieces.get(state.claimed).is_some_and(|piece| piece.place.is_none() || !state.free.is_empty())
    }

    /// Reads the next piece; may wait for a buffer. `false` if there is none to read.
    fn read_one(&self, waits: bool) -> bool {
        let mut state = self.lock();
        if waits {
            let idle = |state: &mut State<B>| !state.is_closed && state.claimed < self.pieces.len() && !self.is_ready(state);
            state = self.changed.wait_while(state, idle).unpoisoned();
        }
        if state.is_closed || !self.is_ready(&state) {
            return false;
        }
        let index = state.claimed;
        state.claimed += 1;
        let piece = &self.pieces[index];
        let buffer = piece.place.and_then(|_| state.free.pop());
        state.reading += 1;
        drop(state);
        let read = match buffer {
            None => Ok(None),
            Some(mut buffer) => self.source.read(piece, buffer.as_mut()).map(|()| Some(buffer)),
        };
        let mut state = self.lock();
        state.reading -= 1;
        state.read.insert(index, read);
        self.changed.notify_all();
        true
    }
}

impl<B: AsMut<[u8]>> Reading<B> {
    /// Waits for the next piece. `None` after the last. After an error, nothing more is read.
    pub fn take(&mut self) -> Result<Option<Loaded<B>>> {
        let shared = &self.shared;
        let Some(piece) = shared.pieces.get(self.next) else { return Ok(None) };
        while !self.has_threads && !shared.lock().read.contains_key(&self.next) && shared.read_one(false) {}
        // All buffers may be with the caller.
        let cannot_come = |state: &State<B>| state.is_closed || state.reading == 0 && !shared.is_ready(state);
        let waits = |state: &mut State<B>| !state.read.contains_key(&self.next) && !cannot_come(state);
        let mut state = shared.changed.wait_while(shared.lock(), waits).unpoisoned();
        let index = self.next;
        match state.read.remove(&index) {
            Some(Ok(buffer)) => {
                self.next += 1;
                Ok(Some(Loaded { index, id: piece.id, buffer }))
            }
            Some(Err(error)) => {
                state.is_closed = true;
                shared.changed.notify_all();
                Err(error)
            }
            None if state.is_closed => Err(Error::Invalid("reading has failed before".into())),
            None => Err(Error::Invalid("all buffers are with the caller, who must give one back before the next piece".into())),
        }
    }

    /// Gives a buffer back, or a further one, for pieces to come.
    pub fn give_back(&self, buffer: B) {
        self.shared.lock().free.push(buffer);
        self.shared.changed.notify_all();
    }

    /// Pieces that were handed out.
    pub fn handed_out(&self) -> Range<usize> {
        0..self.next
    }
}

impl<B> Drop for Reading<B> {
    fn drop(&mut self) {
        self.shared.state.lock().unpoisoned().is_closed = true;
        self.shared.changed.notify_all();
    }
}
