//! Contents in a file, copied through a small pinned buffer and using no other host memory.

use super::arena::{Arena, Range};
use super::disk::{self, Spill, SpillError, StagingPiece};
use super::{Backup, Item, Meter, OnProgress, Wanted, settings, transfer};
use std::ops;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use vramctl_config::DiskDirectory;
use vramctl_driver::{Context, Direction, Extent, Lane};
use vramctl_host::{system, worker};
use vramctl_model::{Error, Stage};

/// An allocation's contents in a file, which others paused with it may share.
#[derive(Debug)]
pub struct OnDisk {
    file: Arc<File>,
    offset: u64,
    bytes: u64,
}

impl OnDisk {
    /// Bytes kept: the whole allocation.
    pub fn kept_bytes(&self) -> u64 {
        self.bytes
    }

    /// Reads a part of it, from this byte of the allocation on. The buffer and the byte are aligned for direct I/O.
    pub fn read(&self, byte: u64, buffer: &mut [u8]) -> Result<(), Error> {
        let spill = self.file.spill.as_ref().ok_or_else(|| Error::Internal("a file is gone".into()))?;
        spill.read_at(self.offset + byte, buffer).map_err(|error| Error::Disk(error.to_string()))
    }
}

/// A file and its staging memory, kept so that a resume does not depend on free host memory. Dropping it removes the name at
/// once and frees the space in the background, because that takes a moment and a resume must not wait.
#[derive(Debug)]
struct File {
    spill: Option<Spill>,
    staging: Arc<Range>,
}

impl Drop for File {
    fn drop(&mut self) {
        let Some(mut spill) = self.spill.take() else { return };
        spill.unlink();
        // If no thread starts, the file is dropped here.
        let _ = worker::spawn("vramctl-release", move || drop(spill));
    }
}

/// Writes active allocations' contents to files in the [`disk_directory`](settings::disk_directory): one for all, or one
/// each if files have names. Leaves no file on error.
pub fn save(wanted: &[Wanted], progress: &mut OnProgress<'_>) -> Result<Vec<Item>, Error> {
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    let directory = settings::disk_directory();
    let extents: Vec<_> = wanted.iter().map(|wanted| wanted.extent).collect();
    if directory.named {
        disk::remove_stale(&directory.path);
    }
    let mut meter = Meter::new(Stage::Save, bytes_of(&extents), progress);
    let staging = Arc::new(staging_memory(wanted)?);
    let mut items = Vec::new();
    for extents in in_files(&extents, &directory) {
        items.extend(save_in_file(extents, &directory, &staging, &mut meter)?);
    }
    Ok(items)
}

/// Whether there is space for these contents in the directory.
pub fn check_room(wanted: &[&Wanted]) -> Result<(), Error> {
    let directory = settings::disk_directory();
    let extents: Vec<_> = wanted.iter().map(|wanted| wanted.extent).collect();
    let files: Vec<_> = in_files(&extents, &directory).into_iter().map(|file| bytes_of(file) as u64).collect();
    if files.is_empty() { Ok(()) } else { disk::check_room(&directory.path, &files).map_err(|error| Error::Disk(error.to_string())) }
}

fn bytes_of(extents: &[Extent]) -> usize {
    extents.iter().map(|extent| extent.bytes).sum()
}

/// The allocations in each file.
fn in_files<'a>(extents: &'a [Extent], directory: &DiskDirectory) -> Vec<&'a [Extent]> {
    match extents {
        [] => Vec::new(),
        all if directory.named => apart(all),
        all => vec![all],
    }
}

/// A file for each, but at most a quarter of the descriptors that the program may have; the last file takes the rest.
fn apart(extents: &[Extent]) -> Vec<&[Extent]> {
    let files = system::resource_limit(libc::RLIMIT_NOFILE).map_or(usize::MAX, |limit| (limit as usize / 4).max(1));
    let (single, rest) = extents.split_at(if extents.len() <= files { extents.len() } else { files - 1 });
    single.chunks(1).chain(Some(rest).filter(|rest| !rest.is_empty())).collect()
}

/// The number in a file's name: the address of its allocation. A file of several may outlive the first one's pause, so it gets
/// an odd number, which no address is.
fn number_of(extents: &[Extent], first: &Extent) -> u64 {
    static SHARED: AtomicU64 = AtomicU64::new(0);
    if extents.len() == 1 { first.address } else { 2 * SHARED.fetch_add(1, Ordering::Relaxed) + 1 }
}

fn save_in_file(extents: &[Extent], directory: &DiskDirectory, staging: &Arc<Range>, meter: &mut Meter) -> Result<Vec<Item>, Error> {
    let Some(first) = extents.first() else { return Ok(Vec::new()) };
    let bytes = bytes_of(extents) as u64;
    let layout = layout(0, extents.iter().copied());
    let made = if directory.named {
        Spill::create_named(&directory.path, number_of(extents, first), bytes)
    } else {
        Spill::create(&directory.path, bytes)
    };
    let spill = made.map_err(|error| Error::Disk(error.to_string()))?;
    through_staging(staging, first.context, |staging| {
        spill.write(staging, 0, bytes, &mut |offset, piece| {
            copy(Direction::FromDevice, &layout, offset, piece.as_mut_ptr(), piece.len())?;
            meter.add(piece.len())
        })
    })?;
    let file = Arc::new(File { spill: Some(spill), staging: Arc::clone(staging) });
    let saved = |(place, extent): (ops::Range<u64>, Extent)| {
        let contents = OnDisk { file: Arc::clone(&file), offset: place.start, bytes: extent.bytes as u64 };
        (extent, Arc::new(Backup::Disk(contents)))
    };
    Ok(layout.into_iter().map(saved).collect())
}

/// Reads contents back from their files into mapped memory.
pub fn restore(items: &[Item], progress: &mut OnProgress<'_>) -> Result<(), Error> {
    let on_disk = |(extent, saved): &Item| match &**saved {
        Backup::Disk(OnDisk { file, offset, .. }) => Some((Arc::clone(file), *offset, *extent)),
        Backup::Host(_) | Backup::Stored(_) => None,
    };
    let mut wanted: Vec<_> = items.iter().filter_map(on_disk).collect();
    if wanted.is_empty() {
        return Ok(());
    }
    wanted.sort_by_key(|(file, offset, _)| (Arc::as_ptr(file), *offset));
    let mut meter = Meter::new(Stage::Restore, wanted.iter().map(|(_, _, extent)| extent.bytes).sum(), progress);
    // Adjacent contents are read in one go.
    let neighbours = |a: &(Arc<File>, u64, Extent), b: &(Arc<File>, u64, Extent)| Arc::ptr_eq(&a.0, &b.0) && a.1 + a.2.bytes as u64 == b.1;
    for run in wanted.chunk_by(neighbours) {
        let Some((file, start, extent)) = run.first() else { continue };
        let Some(spill) = &file.spill else { continue };
        through_staging(&file.staging, extent.context, |staging| {
            let layout = layout(*start, run.iter().map(|(_, _, extent)| *extent));
            let bytes = layout.last().map_or(0, |(bytes, _)| bytes.end - start);
            spill.read(staging, *start, bytes, &mut |offset, piece| {
                copy(Direction::ToDevice, &layout, offset, piece.as_ptr().cast_mut(), piece.len())?;
                meter.add(piece.len())
            })
        })?;
    }
    Ok(())
}

/// Allocations back to back in the file.
type Layout = Vec<(ops::Range<u64>, Extent)>;

fn layout(start: u64, extents: impl Iterator<Item = Extent>) -> Layout {
    let mut end = start;
    let place = |extent: Extent| {
        let begin = end;
        end += extent.bytes as u64;
        (begin..end, extent)
    };
    extents.map(place).collect()
}

/// Copies between staging memory at a file offset and the device memory that belongs there, and waits for it.
fn copy(direction: Direction, layout: &[(ops::Range<u64>, Extent)], offset: u64, host: *mut u8, bytes: usize) -> Result<(), Error> {
    let arena = Arena::get()?;
    let staging =
        arena.offset_of(host.expose_provenance() as u64).ok_or_else(|| Error::Internal("staging memory outside of the arena".into()))?;
    let (mut lane, end) = (Lane::default(), offset + bytes as u64);
    let first = layout.partition_point(|(place, _)| place.end <= offset);
    for (place, extent) in layout[first..].iter().take_while(|(place, _)| place.start < end) {
        let (from, to) = (place.start.max(offset), place.end.min(end));
        let at = staging + (from - offset) as usize;
        for part in transfer::parts(extent.context, extent.address + (from - place.start), at, (to - from) as usize) {
            // SAFETY: inside the staging memory, which only this call uses until the lane has finished.
            unsafe { lane.queue(direction, part.context, part.device, arena.at(part.offset), part.bytes)? };
        }
    }
    Ok(lane.finish()?)
}

/// Limits on staging memory (`disk` has the reasons).
const STAGING_PIECES: usize = 8;
const STAGING_PIECE: usize = 8 << 20;

/// Bytes of staging memory for these contents; `None` if no file is needed.
pub fn size_of_staging(wanted: &[&Wanted]) -> Option<usize> {
    let extents: Vec<_> = wanted.iter().map(|wanted| wanted.extent).collect();
    let largest = in_files(&extents, &settings::disk_directory()).into_iter().map(bytes_of).max()?;
    Some(largest.div_ceil(STAGING_PIECE).clamp(1, STAGING_PIECES) * STAGING_PIECE)
}

/// Staging memory from the arena.
fn staging_memory(wanted: &[Wanted]) -> Result<Range, Error> {
    let size = size_of_staging(&wanted.iter().collect::<Vec<_>>()).unwrap_or_default();
    Arena::get()?.take(&[size])?.pop().ok_or_else(|| Error::Internal("no staging memory".into()))
}

/// Prepares staging memory and lends it to the file's reader or writer. One user at a time: the transition lock is held.
fn through_staging(
    memory: &Range,
    context: Context,
    work: impl FnOnce(&mut [StagingPiece]) -> Result<(), SpillError<Error>>,
) -> Result<(), Error> {
    let arena = Arena::get()?;
    Arena::pieces_of(memory).try_for_each(|piece| arena.prepare(piece, context, None).map(drop))?;
    let piece = |number: usize| {
        let address = NonNull::new(memory.address().wrapping_add(number * STAGING_PIECE))?;
        // SAFETY: part of a prepared range that nobody else uses and forked children do not get.
        Some(unsafe { StagingPiece::new(address, STAGING_PIECE) })
    };
    let mut staging: Vec<_> = (0..memory.bytes() / STAGING_PIECE).filter_map(piece).collect();
    work(&mut staging).map_err(|error| match error {
        SpillError::Io(error) => Error::Disk(error.to_string()),
        SpillError::Copy(error) => error,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(named: bool) -> DiskDirectory {
        DiskDirectory { path: "/somewhere".into(), named }
    }

    /// What is in no file is lost.
    #[test]
    #[cfg_attr(miri, ignore = "sets the limit of descriptors")]
    fn every_allocation_is_in_one_file_and_most_descriptors_are_left() {
        const DESCRIPTORS: usize = 1 << 10;
        let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: writable.
        unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut before) };
        let lower = libc::rlimit { rlim_cur: DESCRIPTORS as u64, ..before };
        // SAFETY: readable. The tests need far fewer.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const lower) }, 0);
        // SAFETY: never given to the driver.
        let context: Context = unsafe { std::mem::zeroed() };
        let extents: Vec<_> = (0..2 * DESCRIPTORS as u64).map(|address| Extent { context, device: 0, address, bytes: 1 }).collect();
        for (count, files) in [(0, 0), (1, 1), (3, 3), (DESCRIPTORS / 4, DESCRIPTORS / 4), (2 * DESCRIPTORS, DESCRIPTORS / 4)] {
            let extents = &extents[..count];
            let addresses = |files: &[&[Extent]]| files.concat().iter().map(|extent| extent.address).collect::<Vec<_>>();
            let apart = in_files(extents, &directory(true));
            assert_eq!((apart.len(), addresses(&apart)), (files, (0..count as u64).collect()), "{count} allocations");
            assert!(apart.iter().rev().skip(1).all(|file| file.len() == 1) && apart.iter().all(|file| !file.is_empty()));
            let together = in_files(extents, &directory(false));
            assert_eq!((together.len(), addresses(&together)), (count.min(1), (0..count as u64).collect()), "{count} allocations");
        }
        // SAFETY: readable.
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const before) };

        // Two files with one number would have one name.
        assert_eq!(number_of(&extents[6..7], &extents[6]), 6);
        let shared = [(); 3].map(|()| number_of(&extents[..2], &extents[0]));
        assert!(shared.iter().all(|number| number % 2 == 1) && shared.is_sorted_by(|one, next| one < next), "{shared:?}");
    }
}
