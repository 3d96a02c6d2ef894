//! Writes pieces into new packs, in this process or for another that has the descriptors.

use crate::disk::{self, Disk};
use crate::listing::{Decoder, Encoder};
use crate::pack::{self, Index, Known, PACK_BYTES};
use crate::piece::{ALIGNMENT, Buffer, PIECE_BYTES, PackId, Piece, PieceId, Place};
use crate::root::Root;
use crate::{Error, Result};
use std::collections::{HashSet, VecDeque};
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use vramctl_host::{Unpoison, system};

const MAGIC: &[u8; 16] = b"vramctl hand 1\0\0";

/// Most disk space that is reserved at once. It is as much as the pack has, so that a small one takes little.
const RESERVED: u64 = 64 << 20;

/// Most packs that are written at once: a write to a file waits for others to the same file.
const LANES: usize = 8;

/// After how many bytes there is another one. So a small image has few files.
const BYTES_OF_LANE: u64 = 64 << 20;

/// What has been put so far, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Written {
    /// All.
    pub bytes: u64,
    /// Of these, in pieces of zeros, which are not stored.
    pub zeros: u64,
    /// Of these, in pieces that the store had already.
    pub known: u64,
}

impl Written {
    /// Bytes that were written.
    pub fn stored(&self) -> u64 {
        self.bytes - self.zeros - self.known
    }
}

/// Writes pieces. Several threads may put at once.
#[derive(Debug)]
pub struct Writer {
    disk: Disk,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    root: Root,
    known: Known,
    pinned: HashSet<PackId>,
    supply: Supply,
    packs: Vec<Pack>,
    /// Those that have room, by their places in `packs`, and which of them is next.
    lanes: Vec<usize>,
    next_lane: usize,
    written: Written,
    /// Why a put has failed. What was put before is not whole either.
    failed: Option<String>,
}

/// Where new packs come from.
#[derive(Debug)]
enum Supply {
    /// They are created in this directory.
    Directory(PathBuf),
    /// Another process has created them.
    Given(VecDeque<Pack>),
}

#[derive(Debug)]
struct Pack {
    id: PackId,
    path: PathBuf,
    file: Arc<File>,
    /// The file of the index, if another process has created it.
    index: Option<File>,
    pieces: Vec<(PieceId, u64)>,
    next: u64,
    reserved: u64,
}

impl Pack {
    fn new(id: PackId, path: PathBuf, file: File, index: Option<File>) -> Self {
        disk::set_direct(&file, true);
        Self { id, path, file: Arc::new(file), index, pieces: Vec::new(), next: 0, reserved: 0 }
    }

    /// Room for a piece, if there is any.
    fn take(&mut self, id: PieceId, most: u64) -> Option<Place> {
        let (offset, end) = (self.next, self.next + id.stored_bytes());
        if end > most {
            return None;
        }
        if end > self.reserved {
            let until = (2 * self.reserved).clamp(end, self.reserved.max(end) + RESERVED).min(most);
            disk::reserve(&self.file, self.reserved, until - self.reserved);
            self.reserved = until;
        }
        self.next = end;
        self.pieces.push((id, offset));
        Some(Place { pack: self.id, offset })
    }

    fn index(&self) -> Index {
        Index { pack: self.id, bytes: self.next, pieces: self.pieces.clone() }
    }
}

impl Writer {
    pub(crate) fn new(disk: Disk, packs: PathBuf, root: Root, known: Known) -> Self {
        Self::of(disk, root, known, Supply::Directory(packs))
    }

    fn of(disk: Disk, root: Root, known: Known, supply: Supply) -> Self {
        let (pinned, packs, lanes) = (HashSet::new(), Vec::new(), Vec::new());
        let state = State { root, known, pinned, supply, packs, lanes, next_lane: 0, written: Written::default(), failed: None };
        Self { disk, state: Mutex::new(state) }
    }

    /// A writer of what [`crate::Saving::hand_out`] has made in another process.
    pub fn from_descriptors(descriptors: Vec<OwnedFd>) -> Result<Self> {
        let disk = Disk::default();
        let mut descriptors = descriptors.into_iter();
        let (Some(root), Some(list)) = (descriptors.next(), descriptors.next()) else {
            return Err(Error::Invalid("descriptors of the store are missing".into()));
        };
        let (path, list) = (Path::new("the list of pieces"), File::from(list));
        let mut all = vec![0; list.metadata().map_err(Error::io("read", path))?.len() as usize];
        disk.read(&list, path, &mut all, 0)?;
        let mut from = Decoder::new(path, &all, MAGIC)?;
        let mut given = VecDeque::new();
        for _ in 0..from.number()? {
            let (Some(pack), Some(index)) = (descriptors.next(), descriptors.next()) else {
                return Err(Error::Invalid("descriptors of packs are missing".into()));
            };
            let id = PackId(from.number()?);
            given.push_back(Pack::new(id, format!("pack {id}").into(), pack.into(), Some(index.into())));
        }
        let mut known = Known::default();
        for _ in 0..from.number()? {
            let (id, pack, offset) = (from.piece()?, from.number()?, from.number()?);
            known.places.insert(id, Place { pack: PackId(pack), offset });
        }
        from.finish()?;
        Ok(Self::of(disk, Root::from_descriptor(root), known, Supply::Given(given)))
    }

    /// Makes packs for another process, and what that needs to know. Returns the descriptors and the packs.
    pub(crate) fn hand_out(&self, bytes: u64) -> Result<(Vec<OwnedFd>, Vec<PackId>)> {
        let mut state = self.lock();
        let state = &mut *state;
        let Supply::Directory(directory) = &state.supply else {
            return Err(Error::Invalid("only the process that saves hands out packs".into()));
        };
        // More for those that are written at once, and one for the room that small pieces waste.
        let count = bytes.div_ceil(PACK_BYTES - PIECE_BYTES as u64) + lanes_for(bytes) as u64;
        let mut to = Encoder::new(MAGIC);
        to.number(count);
        let (mut descriptors, mut packs) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let id = create(&state.root, &self.disk, directory, &mut descriptors)?;
            to.number(id.0);
            packs.push(id);
        }
        to.number(state.known.places.len() as u64);
        for (id, place) in &state.known.places {
            to.piece(id);
            to.number(place.pack.0);
            to.number(place.offset);
        }
        let list = memory_file().and_then(|file| io::Write::write_all(&mut &file, &to.finish()).map(|()| file));
        let list = list.map_err(Error::io("write", Path::new("the list of pieces")))?;
        descriptors.splice(0..0, [state.root.descriptor()?, list.into()]);
        Ok((descriptors, packs))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unpoisoned()
    }

    /// Stores a piece, at most [`PIECE_BYTES`] bytes, and returns when it is written. Its contents must not change meanwhile. If they begin at a
    /// multiple of [`ALIGNMENT`] and have a multiple of its length, they are written from where they are.
    pub fn put(&self, piece: &[u8]) -> Result<Piece> {
        if piece.is_empty() || piece.len() > PIECE_BYTES {
            return Err(Error::Invalid(format!("a piece has 1 to {PIECE_BYTES} bytes, not {}", piece.len())));
        }
        let put = self.try_put(piece);
        if let Err(error) = &put {
            self.lock().failed.get_or_insert_with(|| error.to_string());
        }
        put
    }

    fn try_put(&self, piece: &[u8]) -> Result<Piece> {
        let id = PieceId::of(piece);
        let (place, file, path) = {
            let mut state = self.lock();
            if let Some(why) = &state.failed {
                return Err(Error::Invalid(format!("a piece cannot be stored any more: {why}")));
            }
            state.written.bytes += piece.len() as u64;
            if id.is_zeros() {
                state.written.zeros += piece.len() as u64;
                return Ok(Piece { id, place: None });
            }
            if let Some(place) = state.known.places.get(&id).copied() {
                state.written.known += piece.len() as u64;
                if state.pinned.insert(place.pack) {
                    state.root.pin(place.pack)?;
                }
                return Ok(Piece { id, place: Some(place) });
            }
            let (place, pack) = state.take(&self.disk, id)?;
            state.known.places.insert(id, place);
            let pack = &state.packs[pack];
            (place, pack.file.clone(), pack.path.clone())
        };
        let is_aligned = piece.as_ptr().addr().is_multiple_of(ALIGNMENT) && piece.len().is_multiple_of(ALIGNMENT);
        if is_aligned {
            self.disk.write(&file, &path, piece, place.offset)?;
        } else {
            let mut copy = Buffer::new(id.stored_bytes() as usize);
            copy[..piece.len()].copy_from_slice(piece);
            self.disk.write(&file, &path, &copy, place.offset)?;
        }
        Ok(Piece { id, place: Some(place) })
    }

    /// What has been put so far.
    pub fn written(&self) -> Written {
        self.lock().written
    }

    /// Makes all that was put durable, and writes the indexes: packs first, then their directory, then the indexes. Nothing is put after this.
    pub fn finish(&self) -> Result<()> {
        let mut state = self.lock();
        if let Some(why) = &state.failed {
            return Err(Error::Invalid(format!("a piece was not stored: {why}")));
        }
        for pack in &state.packs {
            self.disk.set_length(&pack.file, &pack.path, pack.next)?;
            self.disk.sync(&pack.file, &pack.path)?;
        }
        match &mut state.supply {
            Supply::Directory(_) => (),
            // The process that has made them expects an index of each.
            Supply::Given(left) => {
                let left = std::mem::take(left);
                state.packs.extend(left);
            }
        }
        if let Supply::Directory(packs) = &state.supply
            && !state.packs.is_empty()
        {
            self.disk.sync_directory(packs)?;
            for pack in &state.packs {
                self.disk.write_whole(&pack::index_path(packs, pack.id), &pack.index().encode())?;
            }
            self.disk.sync_directory(packs)?;
        } else {
            for pack in &state.packs {
                let index = pack.index.as_ref().expect("an index for each pack that was given");
                self.disk.write(index, &pack.path, &pack.index().encode(), 0)?;
                self.disk.sync(index, &pack.path)?;
            }
        }
        // A later put would not be in the index.
        state.failed = Some("the writer has finished".into());
        Ok(())
    }

    /// The packs that this has made so far.
    pub(crate) fn packs(&self) -> Vec<PackId> {
        self.lock().packs.iter().map(|pack| pack.id).collect()
    }

    pub(crate) fn with_root<R>(&self, then: impl FnOnce(&mut Root) -> R) -> R {
        then(&mut self.lock().root)
    }
}

impl State {
    /// Room for a piece in one of the packs, or in a new one. Returns which.
    fn take(&mut self, disk: &Disk, id: PieceId) -> Result<(Place, usize)> {
        // Beyond this limit, the kernel ends the program.
        let most = system::resource_limit(libc::RLIMIT_FSIZE).unwrap_or(PACK_BYTES).min(PACK_BYTES);
        let lane = self.next_lane % lanes_for(self.written.stored());
        self.next_lane = lane + 1;
        if let Some(at) = self.lanes.get(lane).copied()
            && let Some(place) = self.packs[at].take(id, most)
        {
            return Ok((place, at));
        }
        let mut pack = match &mut self.supply {
            Supply::Directory(packs) => {
                let (id, file, path) = create_pack(&self.root, disk, packs)?;
                Pack::new(id, path, file, None)
            }
            Supply::Given(left) => {
                left.pop_front().ok_or_else(|| Error::Invalid("there is more than was said when packs were made".into()))?
            }
        };
        self.pinned.insert(pack.id);
        let (place, path, at) = (pack.take(id, most), pack.path.clone(), self.packs.len());
        self.packs.push(pack);
        match self.lanes.get_mut(lane) {
            Some(full) => *full = at,
            None => self.lanes.push(at),
        }
        place.map(|place| (place, at)).ok_or_else(|| Error::io("write", &path)(io::Error::from_raw_os_error(libc::EFBIG)))
    }
}

/// How many packs are written at once when so many bytes have been.
fn lanes_for(bytes: u64) -> usize {
    usize::try_from(bytes / BYTES_OF_LANE).unwrap_or(LANES).saturating_add(1).min(LANES)
}

/// Creates a pack, pinned before anybody could take it for a leftover.
fn create_pack(root: &Root, disk: &Disk, packs: &Path) -> Result<(PackId, File, PathBuf)> {
    let id = pack::new_id()?;
    root.pin_new(id)?;
    let path = pack::pack_path(packs, id);
    Ok((id, disk.create(&path)?, path))
}

fn create(root: &Root, disk: &Disk, packs: &Path, descriptors: &mut Vec<OwnedFd>) -> Result<PackId> {
    let (id, pack, _) = create_pack(root, disk, packs)?;
    let index = disk.create(&disk::new_name(&pack::index_path(packs, id)))?;
    descriptors.extend([pack.into(), index.into()]);
    Ok(id)
}

fn memory_file() -> io::Result<File> {
    let name = CString::new("vramctl-store").expect("a name without NUL");
    // SAFETY: the name ends with NUL.
    let descriptor = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just opened, and nobody else's.
    Ok(unsafe { File::from_raw_fd(descriptor) })
}
