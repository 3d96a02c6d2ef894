//! Contents in an image (`vramctl_store`): in pieces, each of which is verified before the device gets it.

use super::{Backup, Item, Meter, OnProgress};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::{slice, thread};
use vramctl_driver::{CUdeviceptr, Context, Current, Direction, Lane, Mark, PinnedBuffer, RelaxedCapture};
use vramctl_host::{PerProcess, Unpoison, worker};
use vramctl_model::{Error, Stage};
use vramctl_store::{Buffer, PIECE_BYTES, PackId, Piece, PieceId, Place, Source, Store, Writer, cut};

/// Threads that hash and write. More gain nothing on the drives that there are.
const MOST_THREADS: usize = 8;
/// Buffers between the files and the devices: enough for all readers, and for as many copies in flight.
const BUFFERS: usize = 2 * vramctl_store::READERS;

/// An allocation's contents in an image.
#[derive(Debug)]
pub struct Stored {
    /// Where each begins in the allocation, in order.
    pieces: Vec<(usize, Piece)>,
    /// The parts of the allocation that are kept.
    live: Vec<Range<usize>>,
}

impl Stored {
    /// Bytes kept.
    pub fn kept_bytes(&self) -> u64 {
        self.pieces.iter().map(|(_, piece)| u64::from(piece.id.bytes)).sum()
    }

    /// The parts of the allocation that are kept.
    pub fn live(&self) -> &[Range<usize>] {
        &self.live
    }

    /// The files that have its pieces.
    pub fn packs(&self) -> Vec<PackId> {
        self.pieces.iter().filter_map(|(_, piece)| piece.place).map(|place| place.pack).collect()
    }

    /// The parts of the allocation that are zeros, each as long as it can be.
    fn zeros(&self) -> Vec<Range<usize>> {
        let mut found = Vec::<Range<usize>>::new();
        for (at, piece) in self.pieces.iter().filter(|(_, piece)| piece.id.is_zeros()) {
            let end = at + piece.id.bytes as usize;
            match found.last_mut() {
                Some(last) if last.end == *at => last.end = end,
                _ => found.push(*at..end),
            }
        }
        found
    }

    /// The pieces, in order.
    pub fn ids(&self) -> Vec<PieceId> {
        self.pieces.iter().map(|(_, piece)| piece.id).collect()
    }
}

/// Where contents are read back from.
#[derive(Debug, Clone, Default)]
pub struct Origin {
    /// The directory of images.
    pub directory: PathBuf,
    /// The image's name.
    pub image: String,
    /// The files, and where they have the pieces, if others have opened them. Otherwise they are opened when they are needed, and have each piece
    /// where it was put.
    pub opened: Option<(Arc<Source>, HashMap<PieceId, Place>)>,
}

static ORIGIN: PerProcess<Mutex<Option<Origin>>> = PerProcess::new(Mutex::default);

/// Sets from where contents are read back.
pub fn set_origin(origin: Origin) {
    *ORIGIN.get().lock().unpoisoned() = Some(origin);
}

/// Closes the files that others have opened.
pub fn close_origin() {
    if let Some(origin) = ORIGIN.existing() {
        origin.lock().unpoisoned().iter_mut().for_each(|origin| origin.opened = None);
    }
}

/// A piece to put: of which backup, and where it is in the allocation.
struct Job<'a> {
    of: usize,
    at: usize,
    bytes: usize,
    backup: &'a Backup,
}

impl Job<'_> {
    fn run(&self, buffer: &mut Buffer, writer: &Writer) -> Result<Piece, Error> {
        let contents = match self.backup {
            Backup::Host(saved) => saved.kept_from(self.at).and_then(|kept| kept.get(..self.bytes)),
            Backup::Disk(saved) => {
                let contents = &mut buffer[..self.bytes];
                saved.read(self.at as u64, contents)?;
                Some(&*contents)
            }
            Backup::Stored(_) => None,
        };
        let contents = contents.ok_or_else(|| Error::Internal("contents to store are gone".into()))?;
        writer.put(contents).map_err(failed)
    }
}

/// An error of the store.
#[allow(clippy::needless_pass_by_value)] // for `map_err`
fn failed(error: vramctl_store::Error) -> Error {
    Error::Disk(error.to_string())
}

/// Puts these contents into the store. Returns for each where it is now. On error, the contents are still where they were.
pub fn store(saved: &[Arc<Backup>], writer: &Writer) -> Result<Vec<Arc<Backup>>, Error> {
    if saved.iter().any(|backup| matches!(**backup, Backup::Stored(_))) {
        return Err(Error::Invalid("some contents are in an image already; resume the process first".into()));
    }
    let live_of = |backup: &'_ Arc<Backup>| match &**backup {
        Backup::Host(saved) => saved.live().to_vec(),
        Backup::Disk(_) | Backup::Stored(_) => vec![Range { start: 0, end: backup.kept_bytes() as usize }],
    };
    let live: Vec<_> = saved.iter().map(live_of).collect();
    let pieces_of = |of: usize| live[of].iter().flat_map(|range| cut(range.start as u64, range.len() as u64)).map(move |piece| (of, piece));
    let job = |(of, (at, bytes))| Job { of, at: at as usize, bytes, backup: &saved[of] };
    let jobs: Vec<_> = (0..saved.len()).flat_map(pieces_of).map(job).collect();
    let mut done: Vec<_> = live.into_iter().map(|live| Stored { pieces: Vec::new(), live }).collect();
    in_threads(
        jobs.len(),
        |next, give| {
            let mut buffer = Buffer::for_piece();
            while let Some(job) = next().map(|number| &jobs[number]) {
                let _ = give.send((job.of, job.at, job.run(&mut buffer, writer)?));
            }
            Ok(())
        },
        &mut |(of, at, piece): (usize, usize, Piece)| done[of].pieces.push((at, piece)),
    )?;
    for stored in &mut done {
        stored.pieces.sort_unstable_by_key(|(at, _)| *at);
    }
    Ok(done.into_iter().map(|stored| Arc::new(Backup::Stored(stored))).collect())
}

/// Runs `work` in several threads, which each take numbers below `count` until there are no more. What they give is `taken` here.
fn in_threads<T: Send>(
    count: usize,
    work: impl Fn(&dyn Fn() -> Option<usize>, mpsc::Sender<T>) -> Result<(), Error> + Sync,
    taken: &mut dyn FnMut(T),
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
        let spawn = || {
            let (give, run) = (give.clone(), &run);
            worker::spawn_scoped(scope, "vramctl-store", move || run(give))
        };
        // Fewer are only slower.
        let workers: Vec<_> = (0..threads).map_while(|_| spawn().ok()).collect();
        if workers.is_empty() {
            return Err(Error::NoThread("no thread for the contents of an image".into()));
        }
        drop(give);
        given.into_iter().for_each(taken);
        let worked = workers.into_iter().map(|worker| worker.join().unwrap_or_else(|_| Err(Error::Internal("a thread panicked".into()))));
        worked.fold(Ok(()), Result::and)
    })
}

/// A piece, and where it goes.
#[derive(Clone, Copy)]
struct Wanted {
    context: Context,
    device: CUdeviceptr,
    piece: Piece,
}

/// Reads contents back into mapped memory, of which nothing is known. Nothing of a bad piece gets there.
pub fn restore(items: &[Item], progress: &mut OnProgress<'_>) -> Result<(), Error> {
    let stored =
        || items.iter().filter_map(|(extent, saved)| if let Backup::Stored(stored) = &**saved { Some((extent, stored)) } else { None });
    let _relaxed = RelaxedCapture::enter();
    let mut copies = Copies::default();
    // The files do not have them. The device sets them while it gets the rest.
    for (extent, stored) in stored() {
        for zeros in stored.zeros() {
            copies.lane.queue_zeros(extent.context, extent.address + zeros.start as u64, zeros.len())?;
        }
    }
    let wanted = stored().flat_map(|(extent, stored)| {
        let others = stored.pieces.iter().filter(|(_, piece)| !piece.id.is_zeros());
        others.map(|(at, piece)| Wanted { context: extent.context, device: extent.address + *at as u64, piece: *piece })
    });
    read_back(wanted.collect(), &mut copies, progress)?;
    Ok(copies.lane.finish()?)
}

/// Reads pieces from the files.
fn read_back(mut wanted: Vec<Wanted>, copies: &mut Copies, progress: &mut OnProgress<'_>) -> Result<(), Error> {
    let Some(first) = wanted.first().copied() else { return Ok(()) };
    let origin = ORIGIN.get().lock().unpoisoned().clone().ok_or_else(|| Error::Internal("nobody has said where the image is".into()))?;
    let source = if let Some((source, places)) = origin.opened {
        for Wanted { piece, .. } in &mut wanted {
            piece.place = places.get(&piece.id).copied().or(piece.place);
        }
        source
    } else {
        let packs: BTreeSet<_> = wanted.iter().filter_map(|wanted| wanted.piece.place).map(|place| place.pack).collect();
        let opened = Store::open(&origin.directory).and_then(|store| store.open_packs(&packs.into_iter().collect::<Vec<_>>()));
        Arc::new(Source::new(&origin.image, opened.map_err(failed)?))
    };
    // As they lie in the files.
    wanted.sort_unstable_by_key(|wanted| wanted.piece.place.map(|place| (place.pack, place.offset)));
    let mut meter = Meter::new(Stage::Restore, wanted.iter().map(|wanted| wanted.piece.id.bytes as usize).sum(), progress);
    let buffers = buffers(first.context, wanted.len().min(BUFFERS))?;
    thread::scope(|scope| {
        let pieces = wanted.iter().map(|wanted| wanted.piece).collect();
        let mut reading = source.read_ahead(scope, pieces, buffers);
        for wanted in &wanted {
            // The readers need some of the buffers.
            while copies.in_flight.len() > BUFFERS / 2 || copies.is_first_past()? {
                copies.finish_first(&mut |buffer| reading.give_back(buffer))?;
            }
            let read = reading.take().map_err(failed)?.and_then(|read| read.buffer);
            let buffer = read.ok_or_else(|| Error::Internal("a piece was not read".into()))?;
            copies.begin(wanted, buffer)?;
            meter.add(wanted.piece.id.bytes as usize)?;
        }
        while !copies.in_flight.is_empty() {
            copies.finish_first(&mut drop)?;
        }
        Ok(())
    })
}

/// Memory that the copy engines reach.
struct Pinned(PinnedBuffer);

impl AsMut<[u8]> for Pinned {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: the buffer's own bytes, initialised by the driver. No copy of it is in flight: those in flight are owned by `Copies`.
        unsafe { slice::from_raw_parts_mut(self.0.address(), self.0.bytes()) }
    }
}

fn buffers(context: Context, count: usize) -> Result<Vec<Pinned>, Error> {
    let current = Current::push(context)?;
    (0..count).map(|_| Ok(Pinned(PinnedBuffer::new(PIECE_BYTES, &current)?))).collect()
}

/// Copies in flight, in order. Dropped, none is.
#[derive(Default)]
struct Copies {
    // Dropped first, which waits.
    lane: Lane,
    in_flight: VecDeque<(Mark, Pinned)>,
}

impl Copies {
    fn begin(&mut self, wanted: &Wanted, buffer: Pinned) -> Result<(), Error> {
        let Wanted { context, device, piece } = wanted;
        // SAFETY: the buffer stays as it is until this copy is past.
        unsafe { self.lane.queue(Direction::ToDevice, *context, *device, buffer.0.address(), piece.id.bytes as usize)? };
        match self.lane.mark_in(*context) {
            Ok(mark) => self.in_flight.push_back((mark, buffer)),
            Err(failure) => {
                self.lane.finish()?;
                return Err(failure.into());
            }
        }
        Ok(())
    }

    fn is_first_past(&self) -> Result<bool, Error> {
        Ok(self.in_flight.front().map_or(Ok(false), |(mark, _)| mark.is_past())?)
    }

    fn finish_first(&mut self, done_with: &mut dyn FnMut(Pinned)) -> Result<(), Error> {
        if let Some((mark, _)) = self.in_flight.front() {
            mark.wait()?;
        }
        if let Some((_, buffer)) = self.in_flight.pop_front() {
            done_with(buffer);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_that_follow_each_other_are_one_run() {
        const PIECE: usize = PIECE_BYTES;
        const ODD: usize = 3 * PIECE + 512;
        // Ranges are pairs of begin and end.
        let zeros_of = |live: &[(usize, usize)], others: &[usize]| {
            let all = live.iter().flat_map(|(start, end)| cut(*start as u64, (end - start) as u64));
            let piece = |(at, bytes)| {
                let id = PieceId::of(&vec![u8::from(others.contains(&(at as usize))); bytes]);
                (at as usize, Piece { id, place: None })
            };
            let stored = Stored { pieces: all.map(piece).collect(), live: Vec::new() };
            stored.zeros().iter().map(|run| (run.start, run.end)).collect::<Vec<_>>()
        };
        assert_eq!(zeros_of(&[(0, ODD)], &[]), [(0, ODD)]);
        assert_eq!(zeros_of(&[(0, ODD)], &[0, PIECE, 2 * PIECE, 3 * PIECE]), []);
        assert_eq!(zeros_of(&[(0, ODD)], &[PIECE]), [(0, PIECE), (2 * PIECE, ODD)]);
        assert_eq!(zeros_of(&[(0, ODD)], &[0, 3 * PIECE]), [(PIECE, 3 * PIECE)]);
        // What is not kept is left alone, also within a piece.
        let kept = [(7, PIECE + 1), (PIECE + 9, ODD)];
        assert_eq!(zeros_of(&kept, &[2 * PIECE]), [(7, PIECE + 1), (PIECE + 9, 2 * PIECE), (3 * PIECE, ODD)]);
    }
}
