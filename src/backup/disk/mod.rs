//! Backups on disk: a file, written and read past the page cache. It is unnamed, or its name is removed with it (`names`).
//!
//! A [`Spill`] is the file. [`Spill::write`] and [`Spill::read`] move its contents through the caller's staging memory with
//! many requests in flight: the calling thread copies between the device and staging memory (`fill`, `drain`) while the
//! drive works. `engine` runs the requests and ends with each call; `file` creates the file.

mod engine;
#[cfg(test)]
mod faults;
mod file;
mod names;
// Miri cannot ask a file system for its free space.
#[cfg(all(test, not(miri)))]
mod tests;

pub use file::{check_room, set_available};
pub use names::remove_stale;

use engine::{FileRequest, Flight, Operation, Queue};
use std::collections::VecDeque;
use std::fs::File;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::{fmt, io, slice, thread};
use vramctl_host::Held;
use vramctl_model::Bytes;

/// Required alignment of addresses, offsets and lengths for direct I/O, in bytes: the largest block size of any drive.
pub const ALIGNMENT: usize = 4096;

/// A file whose space is allocated in advance if the file system supports it.
///
/// It is unnamed unless created with a name, and forked children close their copies of the descriptor ([`Held`]), so nothing
/// outlives the process. Dropping it frees the space. That takes a moment for a large file, so do not do it on the path of a
/// resume. Dropping a forked child's copy does not affect the parent's file.
///
/// Threads may use it concurrently, each on its own range.
#[derive(Debug)]
pub struct Spill {
    held: Held,
    /// Whether requests bypass the page cache. If the file system refuses, they go through it and drop their pages.
    direct: bool,
    directory: PathBuf,
    name: Option<String>,
    bytes: u64,
    #[cfg(test)]
    faults: faults::Faults,
}

/// A piece of staging memory: the unit in which the file is written and read.
///
/// Eight pieces of 8 MiB saturate today's drives. A request of several MiB has no overhead on the drive (the kernel splits
/// it and submits the parts together) and too little on the CPU to measure, and it is near the size at which the device link
/// is fastest. Eight keep 64 MiB in flight, a millisecond's worth for drives of 50 GB/s in total.
#[derive(Debug)]
pub struct StagingPiece<'a> {
    address: NonNull<u8>,
    bytes: usize,
    lent: PhantomData<&'a mut [u8]>,
}

// SAFETY: it stands for a `&mut [u8]`.
unsafe impl Send for StagingPiece<'_> {}

/// Fills staging memory with the contents that belong at a file offset.
pub type Fill<'a, E> = dyn FnMut(u64, &mut [u8]) -> Result<(), E> + 'a;

/// Takes the contents read at a file offset from staging memory.
pub type Drain<'a, E> = dyn FnMut(u64, &[u8]) -> Result<(), E> + 'a;

/// Why a transfer failed. No request is in flight in any case.
#[derive(Debug)]
pub enum SpillError<E> {
    /// A file error. The text says which file, where in it and why; the kind is the operating system's.
    Io(io::Error),
    /// An error from `fill` or `drain`.
    Copy(E),
}

impl StagingPiece<'_> {
    /// Lends `bytes` bytes at `address`, both multiples of [`ALIGNMENT`].
    ///
    /// # Safety
    /// The memory is initialized, readable and writable, and nobody else touches it for `'a`. Forked children must not
    /// inherit it (`MADV_DONTFORK`), since older kernels could then deliver the drive's data to the wrong process.
    pub unsafe fn new(address: NonNull<u8>, bytes: usize) -> Self {
        Self { address, bytes, lent: PhantomData }
    }

    fn slice(&mut self, bytes: usize) -> &mut [u8] {
        // SAFETY: as promised to `new`; no request on this memory is in flight when this is called.
        unsafe { slice::from_raw_parts_mut(self.address.as_ptr(), bytes.min(self.bytes)) }
    }
}

impl Spill {
    /// Creates a file of `bytes` bytes in `directory`. Allocates all its space now if the file system supports that, so that
    /// a full disk shows before anything depends on the file.
    ///
    /// Errors name the directory. A full disk is [`StorageFull`](io::ErrorKind::StorageFull), with the bytes needed and
    /// available; a size beyond the process's file size limit is [`FileTooLarge`](io::ErrorKind::FileTooLarge).
    pub fn create(directory: &Path, bytes: u64) -> io::Result<Self> {
        Self::make(directory, None, bytes)
    }

    /// The same, with a name that contains `number` and lasts as long as the value.
    pub fn create_named(directory: &Path, number: u64, bytes: u64) -> io::Result<Self> {
        Self::make(directory, Some(names::of(number)), bytes)
    }

    fn make(directory: &Path, name: Option<String>, bytes: u64) -> io::Result<Self> {
        let (held, direct) = file::create(directory, name.as_deref(), bytes)?;
        Ok(Self {
            held,
            direct,
            directory: directory.to_owned(),
            name,
            bytes,
            #[cfg(test)]
            faults: faults::Faults::default(),
        })
    }

    /// Writes `bytes` bytes at `offset`, both multiples of [`ALIGNMENT`]. Calls `fill` on the calling thread for each piece,
    /// with its file offset.
    ///
    /// The data is in the file on return. On error, the range's contents are undefined, and the rest of the file is
    /// unchanged.
    pub fn write<E>(&self, staging: &mut [StagingPiece], offset: u64, bytes: u64, fill: &mut Fill<E>) -> Result<(), SpillError<E>> {
        self.fly(Operation::Write, staging, offset, bytes, |flight, staging| {
            let mut free: Vec<_> = (0..staging.len()).collect();
            let (mut at, end) = (offset, offset + bytes);
            while at < end {
                // Check completed jobs first, so that an error ends the call soon.
                let slot = match flight.landed_already()? {
                    Some(slot) => slot,
                    None => match free.pop() {
                        Some(slot) => slot,
                        None => flight.next_completed()?,
                    },
                };
                let piece = staging[slot].slice(usize::try_from(end - at).unwrap_or(usize::MAX));
                fill(at, piece).map_err(SpillError::Copy)?;
                let length = piece.len();
                flight.submit(FileRequest::new(slot, piece, at));
                at += length as u64;
            }
            while flight.any() {
                flight.next_completed()?;
            }
            Ok(())
        })
    }

    /// Reads `bytes` bytes at `offset`, both multiples of [`ALIGNMENT`]. Calls `drain` on the calling thread for each piece
    /// in order, with its file offset, while later pieces are being read.
    pub fn read<E>(&self, staging: &mut [StagingPiece], offset: u64, bytes: u64, drain: &mut Drain<E>) -> Result<(), SpillError<E>> {
        self.fly(Operation::Read, staging, offset, bytes, |flight, staging| {
            let mut completed = vec![false; staging.len()];
            let mut ahead = VecDeque::with_capacity(staging.len());
            let mut free: VecDeque<_> = (0..staging.len()).collect();
            let (mut next, mut at, end) = (offset, offset, offset + bytes);
            while at < end {
                while next < end
                    && let Some(slot) = free.pop_front()
                {
                    let piece = staging[slot].slice(usize::try_from(end - next).unwrap_or(usize::MAX));
                    next += piece.len() as u64;
                    ahead.push_back((slot, piece.len()));
                    flight.submit(FileRequest::new(slot, piece, next - piece.len() as u64));
                }
                let Some((slot, length)) = ahead.pop_front() else { break };
                while !completed[slot] {
                    completed[flight.next_completed()?] = true;
                }
                drain(at, staging[slot].slice(length)).map_err(SpillError::Copy)?;
                completed[slot] = false;
                free.push_back(slot);
                at += length as u64;
            }
            Ok(())
        })
    }

    /// Reads a part of it, on the calling thread. Everything is a multiple of [`ALIGNMENT`].
    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.file()?.read_exact_at(buffer, offset)
    }

    /// Runs `work` with the engine, and returns once the engine has stopped.
    fn fly<E>(
        &self,
        operation: Operation,
        staging: &mut [StagingPiece],
        offset: u64,
        bytes: u64,
        work: impl FnOnce(&mut Flight, &mut [StagingPiece]) -> Result<(), SpillError<E>>,
    ) -> Result<(), SpillError<E>> {
        let run = || {
            self.check(staging, offset, bytes)?;
            let queue = Queue::new(self, operation);
            let result = thread::scope(|scope| work(&mut Flight::start(scope, &queue, staging.len()), staging));
            // Even with direct I/O: some file systems accept the flag and use the page cache anyway.
            file::leave_no_cache(&*self.file()?, offset, bytes)?;
            result
        };
        run().map_err(|error| match error {
            SpillError::Io(error) => {
                let verb = if operation == Operation::Write { "write" } else { "read" };
                let text = format!("cannot {verb} the backup file in {}: {error}", self.directory.display());
                SpillError::Io(io::Error::new(error.kind(), text))
            }
            copy @ SpillError::Copy(_) => copy,
        })
    }

    /// Removes its name, if any; the contents stay.
    pub fn unlink(&mut self) {
        // In a forked child, the name is the parent's.
        if let Some(name) = self.name.take().filter(|_| self.held.is_ours()) {
            names::remove(&self.directory.join(name));
        }
    }

    /// The file, for one call.
    fn file(&self) -> io::Result<ManuallyDrop<File>> {
        self.held.as_type()
    }

    fn check(&self, staging: &[StagingPiece], offset: u64, bytes: u64) -> io::Result<()> {
        let aligned = |number: u64| number.is_multiple_of(ALIGNMENT as u64);
        if staging.is_empty()
            || !staging
                .iter()
                .all(|piece: &StagingPiece| piece.bytes > 0 && aligned(piece.bytes as u64) && aligned(piece.address.as_ptr() as u64))
        {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "staging memory is missing or not aligned for direct I/O"));
        }
        if !aligned(offset) || !aligned(bytes) || offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            let text = format!("{} at offset {offset} is not a page-aligned range of a file of {}", Bytes(bytes), Bytes(self.bytes));
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        Ok(())
    }
}

impl Drop for Spill {
    fn drop(&mut self) {
        self.unlink();
        // Others may hold a descriptor of the file but must not keep its space. Best effort: on failure, the last descriptor
        // frees the space. There is no file in a forked child, or if the program has closed it.
        if let Ok(file) = self.file() {
            drop(file.set_len(0));
        }
    }
}

impl<E> From<io::Error> for SpillError<E> {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl<E: fmt::Display> fmt::Display for SpillError<E> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => error.fmt(out),
            Self::Copy(error) => error.fmt(out),
        }
    }
}

impl<E: fmt::Debug + fmt::Display> std::error::Error for SpillError<E> {}
