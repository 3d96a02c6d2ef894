//! Contents in the file of an image: in pieces, each with its hash, which is compared before the device gets the piece.

use super::{Backup, Item, Meter, OnProgress};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::{slice, thread};
use vramctl_driver::{CUdeviceptr, Context, Current, Direction, Lane, Mark, PinnedBuffer, RelaxedCapture};
use vramctl_host::{PerProcess, Unpoison, worker};
use vramctl_model::{Error, Stage};

/// Most bytes of a piece.
const PIECE: usize = 2 << 20;
/// Pieces begin at multiples of this in the file.
const ALIGNMENT: usize = 4096;
/// Most threads that hash and write, or read and compare.
const MOST_THREADS: usize = 8;

/// An allocation's contents in the file.
#[derive(Debug)]
pub struct Stored {
    pieces: Vec<Piece>,
}

#[derive(Debug, Clone, Copy)]
struct Piece {
    /// The first byte in the allocation.
    at: usize,
    bytes: usize,
    hash: [u8; 32],
    /// The first byte in the file. `None` if all is zero, as new memory is.
    place: Option<u64>,
}

impl Stored {
    /// Bytes kept.
    pub fn kept_bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.bytes as u64).sum()
    }
}

/// The file's name.
static SOURCE: PerProcess<Mutex<Option<PathBuf>>> = PerProcess::new(Mutex::default);

/// Sets the file that contents are read back from.
pub fn set_source(path: &Path) {
    *SOURCE.get().lock().unpoisoned() = Some(path.to_owned());
}

/// A file on its way: a buffer aligned for direct I/O.
#[repr(C, align(4096))]
#[derive(Clone)]
struct Page([u8; ALIGNMENT]);

struct Buffer(Vec<Page>);

impl Buffer {
    fn new() -> Self {
        Self(vec![Page([0; ALIGNMENT]); PIECE / ALIGNMENT])
    }

    fn first(&mut self, bytes: usize) -> &mut [u8] {
        // SAFETY: plain bytes, and as many as there are.
        unsafe { slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), bytes.min(PIECE)) }
    }
}

/// A piece to write: of which backup, and where it is in the allocation.
struct Job<'a> {
    of: usize,
    at: usize,
    bytes: usize,
    backup: &'a Backup,
}

impl Job<'_> {
    /// Writes the piece, unless it is zero.
    fn run(&self, buffer: &mut Buffer, file: &File, end: &AtomicU64) -> Result<Piece, Error> {
        let contents = match self.backup {
            Backup::Host(saved) => saved.kept_from(self.at).and_then(|kept| kept.get(..self.bytes)),
            Backup::Disk(saved) => {
                let contents = buffer.first(self.bytes);
                saved.read(self.at as u64, contents)?;
                Some(&*contents)
            }
            Backup::Stored(_) => None,
        };
        let contents = contents.ok_or_else(|| Error::Internal("contents to store are gone".into()))?;
        let (at, bytes) = (self.at, self.bytes);
        if is_zero(contents) {
            return Ok(Piece { at, bytes, hash: [0; 32], place: None });
        }
        let place = end.fetch_add(bytes.next_multiple_of(ALIGNMENT) as u64, Ordering::Relaxed);
        file.write_all_at(contents, place).map_err(|error| Error::Disk(format!("cannot write contents to the image: {error}")))?;
        Ok(Piece { at, bytes, hash: hash(contents), place: Some(place) })
    }
}

fn hash(bytes: &[u8]) -> [u8; 32] {
    *blake3::hash(bytes).as_bytes()
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.first().is_none_or(|first| *first == 0 && bytes[1..] == bytes[..bytes.len() - 1])
}

/// The pieces of a range of an allocation.
fn cut(start: usize, end: usize) -> impl Iterator<Item = (usize, usize)> {
    let next = move |at: usize| end.min((at / PIECE + 1) * PIECE);
    std::iter::successors((start < end).then_some(start), move |at| Some(next(*at)).filter(|at| *at < end))
        .map(move |at| (at, next(at) - at))
}

/// Writes these contents to the file. Returns for each where it is now, and the bytes written. On error, the contents are still where they were.
pub fn store(saved: &[Arc<Backup>], file: &File) -> Result<(Vec<Arc<Backup>>, u64), Error> {
    let pieces_of = |(of, backup): (usize, &'_ Arc<Backup>)| -> Vec<(usize, usize, usize)> {
        let ranges = match &**backup {
            Backup::Host(saved) => saved.live().iter().map(|live| (live.start, live.end)).collect(),
            Backup::Disk(saved) => vec![(0, saved.kept_bytes() as usize)],
            Backup::Stored(_) => Vec::new(),
        };
        ranges.into_iter().flat_map(|(start, end)| cut(start, end)).map(|(at, bytes)| (of, at, bytes)).collect()
    };
    let pieces: Vec<_> = saved.iter().enumerate().flat_map(pieces_of).collect();
    let jobs: Vec<_> = pieces.into_iter().map(|(of, at, bytes)| Job { of, at, bytes, backup: &saved[of] }).collect();
    if saved.iter().any(|backup| matches!(**backup, Backup::Stored(_))) {
        return Err(Error::Invalid("some contents are in an image already; resume the process first".into()));
    }
    let (end, written) = (AtomicU64::new(0), AtomicU64::new(0));
    let mut done: Vec<_> = saved.iter().map(|_| Vec::new()).collect();
    let stored = in_threads(
        jobs.len(),
        |next, give: mpsc::Sender<(usize, Piece)>| {
            let mut buffer = Buffer::new();
            while let Some(job) = next().map(|number| &jobs[number]) {
                let piece = job.run(&mut buffer, file, &end)?;
                if piece.place.is_some() {
                    written.fetch_add(piece.bytes as u64, Ordering::Relaxed);
                }
                let _ = give.send((job.of, piece));
            }
            Ok(())
        },
        &mut |(of, piece): (usize, Piece)| {
            done[of].push(piece);
            Ok(())
        },
    );
    stored?;
    for pieces in &mut done {
        pieces.sort_unstable_by_key(|piece| piece.at);
    }
    Ok((done.into_iter().map(|pieces| Arc::new(Backup::Stored(Stored { pieces }))).collect(), written.into_inner()))
}

/// Runs `work` in several threads, which each take numbers below `count` until there are no more. What they give is `taken` here.
fn in_threads<T: Send>(
    count: usize,
    work: impl Fn(&dyn Fn() -> Option<usize>, mpsc::Sender<T>) -> Result<(), Error> + Sync,
    taken: &mut dyn FnMut(T) -> Result<(), Error>,
) -> Result<(), Error> {
    let (next, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let next = || (!is_over.load(Ordering::Relaxed)).then(|| next.fetch_add(1, Ordering::Relaxed)).filter(|number| *number < count);
    let run = |give| {
        let worked = work(&next, give);
        is_over.fetch_or(worked.is_err(), Ordering::Relaxed);
        worked
    };
    let (give, given) = mpsc::channel();
    thread::scope(|scope| {
        let threads = thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS).min(count.max(1));
        let spawn = |_| {
            let (give, run) = (give.clone(), &run);
            worker::spawn_scoped(scope, "vramctl-store", move || run(give))
        };
        let workers: Vec<_> = (0..threads).map_while(|number| spawn(number).ok()).collect();
        if workers.is_empty() {
            return Err(Error::NoThread("no thread for the contents of an image".into()));
        }
        drop(give);
        let mut all = Ok(());
        for one in given {
            if let Err(error) = taken(one) {
                is_over.store(true, Ordering::Relaxed);
                all = Err(error);
            }
        }
        let worked = workers.into_iter().map(|worker| worker.join().unwrap_or_else(|_| Err(Error::Internal("a thread panicked".into()))));
        worked.fold(all, Result::and)
    })
}

/// Reads contents back into mapped memory, which is new and so zero. Nothing is copied of a piece that is not what was stored.
pub fn restore(items: &[Item], progress: &mut OnProgress<'_>) -> Result<(), Error> {
    let pieces_of = |(extent, saved): &Item| match &**saved {
        Backup::Stored(stored) => {
            let piece = |piece: &Piece| Some((extent.context, extent.address + piece.at as u64, *piece, piece.place?));
            stored.pieces.iter().filter_map(piece).collect()
        }
        Backup::Host(_) | Backup::Disk(_) => Vec::new(),
    };
    let mut wanted: Vec<_> = items.iter().flat_map(pieces_of).collect();
    if wanted.is_empty() {
        return Ok(());
    }
    // As they lie in the file.
    wanted.sort_unstable_by_key(|(_, _, _, place)| *place);
    let path = SOURCE.get().lock().unpoisoned().clone().ok_or_else(|| Error::Disk("nobody has said where the image is".into()))?;
    let open = File::open(&path).map_err(|error| Error::Disk(format!("cannot read {}: {error}", path.display())));
    let file = open?;
    let mut meter = Meter::new(Stage::Restore, wanted.iter().map(|(_, _, piece, _)| piece.bytes).sum(), progress);
    in_threads(
        wanted.len(),
        |next, give: mpsc::Sender<usize>| {
            let _relaxed = RelaxedCapture::enter();
            let mut copier = Copier::default();
            while let Some((context, address, piece, place)) = next().map(|number| wanted[number]) {
                copier.copy(context, address, &mut |buffer| {
                    read(&file, &path, piece, place, buffer)?;
                    Ok(piece.bytes)
                })?;
                let _ = give.send(piece.bytes);
            }
            copier.finish()
        },
        &mut |bytes| meter.add(bytes),
    )
}

/// Reads a piece, and fails if it is not what was stored.
fn read(file: &File, path: &Path, piece: Piece, place: u64, buffer: &mut [u8]) -> Result<(), Error> {
    let contents = buffer.get_mut(..piece.bytes).ok_or_else(|| Error::Internal("a piece is too large".into()))?;
    file.read_exact_at(contents, place).map_err(|error| Error::Disk(format!("cannot read {}: {error}", path.display())))?;
    if hash(contents) == piece.hash {
        return Ok(());
    }
    Err(Error::Disk(format!("{} is damaged: what is at byte {place} is not what was written there", path.display())))
}

/// Copies pieces to devices through two buffers, of which one is filled while the other is copied.
#[derive(Default)]
struct Copier {
    lane: Lane,
    buffers: [Option<(PinnedBuffer, Option<Mark>)>; 2],
    next: usize,
}

impl Copier {
    /// `fill` fills the buffer, and says how much of it.
    fn copy(
        &mut self,
        context: Context,
        address: CUdeviceptr,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<usize, Error>,
    ) -> Result<(), Error> {
        let Self { lane, buffers, next } = self;
        let slot = &mut buffers[*next];
        *next = 1 - *next;
        if slot.is_none() {
            let current = Current::push(context)?;
            *slot = Some((PinnedBuffer::new(PIECE, &current)?, None));
        }
        let Some((buffer, in_flight)) = slot else { return Ok(()) };
        if let Some(mark) = in_flight.take() {
            mark.wait()?;
        }
        // SAFETY: the buffer's own bytes, of which no copy is in flight.
        let bytes = fill(unsafe { slice::from_raw_parts_mut(buffer.address(), buffer.bytes()) })?;
        // SAFETY: the buffer stays as it is until this copy is past.
        unsafe { lane.queue(Direction::ToDevice, context, address, buffer.address(), bytes)? };
        *in_flight = Some(lane.mark_in(context)?);
        Ok(())
    }

    fn finish(&self) -> Result<(), Error> {
        Ok(self.lane.finish()?)
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        // Before the buffers go.
        let _ = self.lane.finish();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_end_at_multiples_of_their_size_in_the_allocation() {
        assert_eq!(cut(0, 0).count(), 0);
        assert_eq!(cut(5, PIECE).collect::<Vec<_>>(), [(5, PIECE - 5)]);
        assert_eq!(cut(PIECE - 1, 2 * PIECE + 3).collect::<Vec<_>>(), [(PIECE - 1, 1), (PIECE, PIECE), (2 * PIECE, 3)]);
    }
}
