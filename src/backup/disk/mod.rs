//! Backups on disk: a file, written and read past the page cache. It has no name, or one that goes with it ([`names`]).
//!
//! A [`Spill`] is the file. [`Spill::write`] and [`Spill::read`] move its contents through staging memory of the caller,
//! many requests at a time: the calling thread copies between the device and the staging memory (`fill`, `drain`), and
//! the drive works meanwhile. What keeps the drive busy lives in `engine` and ends with each call; how the file comes
//! about is in `file`.

mod engine;
#[cfg(test)]
mod faults;
mod file;
mod names;
#[cfg(test)]
mod tests;

pub use names::remove_stale;

use engine::{Flight, Job, Operation, Queue};
use std::collections::VecDeque;
use std::fs::File;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::{fmt, io, slice, thread};
use vramctl_host::Held;
use vramctl_model::Bytes;

/// What direct I/O wants addresses, offsets and lengths to be multiples of, in bytes: the largest block of any drive.
pub const ALIGNMENT: usize = 4096;

/// Bytes outside memory: a file as large as was asked for, whose space the file system has set aside.
///
/// It has no name unless it was made with one, and forked children close their copies of the descriptor ([`Held`]), so nothing outlives the process. Dropping it gives
/// the space back, which takes a moment for a large file: not on the path of a resume. Dropping a child's copy of the value
/// leaves the parent's contents alone.
///
/// Threads may use it at the same time, each on its own range.
#[derive(Debug)]
pub struct Spill {
    held: Held,
    /// Whether requests go past the page cache. Where the file system refuses that, they go through it and leave nothing there.
    direct: bool,
    directory: PathBuf,
    name: Option<String>,
    bytes: u64,
    #[cfg(test)]
    faults: faults::Faults,
}

/// A piece of memory that requests go through: the unit in which the file is written and read.
///
/// Eight of 8 MiB are enough for the drives of today. A request of several MiB costs the drive no more than its bytes (the
/// kernel splits it and hands the parts over together), is near the size at which the link to the device is at its
/// fastest, and makes what a request costs the processor too small to measure. Eight of them keep 64 MiB in
/// flight, a millisecond's worth for a drive, or several together, of 50 GB/s.
#[derive(Debug)]
pub struct StagingPiece<'a> {
    address: NonNull<u8>,
    bytes: usize,
    lent: PhantomData<&'a mut [u8]>,
}

// SAFETY: it stands for a `&mut [u8]`.
unsafe impl Send for StagingPiece<'_> {}

/// Puts what belongs at an offset of the file into a piece of staging memory.
pub type Fill<'a, E> = dyn FnMut(u64, &mut [u8]) -> Result<(), E> + 'a;

/// Takes what was read at an offset of the file from a piece of staging memory.
pub type Drain<'a, E> = dyn FnMut(u64, &[u8]) -> Result<(), E> + 'a;

/// Why contents were not written or read. Whatever it is, no request is outstanding any more.
#[derive(Debug)]
pub enum SpillError<E> {
    /// The file: the text says which one, where in it and why; the kind is the operating system's.
    Io(io::Error),
    /// What `fill` or `drain` said.
    Copy(E),
}

impl StagingPiece<'_> {
    /// Lends `bytes` bytes at `address`, both multiples of [`ALIGNMENT`].
    ///
    /// # Safety
    /// The memory is initialised, readable and writable, and nobody else touches it for `'a`. A child forked meanwhile must
    /// not get a copy of it (`MADV_DONTFORK`), since older kernels could then hand the drive's data to the wrong process.
    pub unsafe fn new(address: NonNull<u8>, bytes: usize) -> Self {
        Self { address, bytes, lent: PhantomData }
    }

    /// How many bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn slice(&mut self, bytes: usize) -> &mut [u8] {
        // SAFETY: as promised to `new`; no request on this memory is in flight when the engine's callers come here.
        unsafe { slice::from_raw_parts_mut(self.address.as_ptr(), bytes.min(self.bytes)) }
    }
}

impl Spill {
    /// A file of `bytes` bytes in `directory`. All of its space is set aside now where the file system can do that, so
    /// that a full disk is known before anything depends on it.
    ///
    /// Errors name the directory. A full disk is a [`StorageFull`](io::ErrorKind::StorageFull) with the bytes needed and
    /// available, a size beyond the process's limit of file sizes a [`FileTooLarge`](io::ErrorKind::FileTooLarge).
    pub fn create(directory: &Path, bytes: u64) -> io::Result<Self> {
        Self::make(directory, None, bytes)
    }

    /// The same under a name in which `number` is, for as long as it lives.
    pub fn create_named(directory: &Path, number: u64, bytes: u64) -> io::Result<Self> {
        Self::make(directory, Some(names::of(number)), bytes)
    }

    fn make(directory: &Path, name: Option<String>, bytes: u64) -> io::Result<Self> {
        let (file, direct) = file::create(directory, name.as_deref(), bytes)?;
        Ok(Self {
            held: Held::new(file)?,
            direct,
            directory: directory.to_owned(),
            name,
            bytes,
            #[cfg(test)]
            faults: faults::Faults::default(),
        })
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Writes `bytes` bytes at `offset`, both multiples of [`ALIGNMENT`]. The contents come from `fill`, which the
    /// calling thread calls for one piece of staging memory after the other with the piece's offset in the file.
    ///
    /// All is in the file when it returns. After an error the range holds anything, and the rest of the file what it did.
    pub fn write<E>(&self, staging: &mut [StagingPiece], offset: u64, bytes: u64, fill: &mut Fill<E>) -> Result<(), SpillError<E>> {
        self.fly(Operation::Write, staging, offset, bytes, |flight, staging| {
            let mut free: Vec<_> = (0..staging.len()).collect();
            let (mut at, end) = (offset, offset + bytes);
            while at < end {
                // What has come back is looked at first, so that an error ends the call soon.
                let slot = match flight.landed_already()? {
                    Some(slot) => slot,
                    None => match free.pop() {
                        Some(slot) => slot,
                        None => flight.landed()?,
                    },
                };
                let piece = staging[slot].slice(usize::try_from(end - at).unwrap_or(usize::MAX));
                fill(at, piece).map_err(SpillError::Copy)?;
                let length = piece.len();
                flight.submit(Job::new(slot, piece, at));
                at += length as u64;
            }
            while flight.any() {
                flight.landed()?;
            }
            Ok(())
        })
    }

    /// Reads `bytes` bytes at `offset`, both multiples of [`ALIGNMENT`], and hands them to `drain` piece after piece, in
    /// order, with their offset in the file. The calling thread calls `drain`, while the pieces ahead are being read.
    pub fn read<E>(&self, staging: &mut [StagingPiece], offset: u64, bytes: u64, drain: &mut Drain<E>) -> Result<(), SpillError<E>> {
        self.fly(Operation::Read, staging, offset, bytes, |flight, staging| {
            let mut landed = vec![false; staging.len()];
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
                    flight.submit(Job::new(slot, piece, next - piece.len() as u64));
                }
                let Some((slot, length)) = ahead.pop_front() else { break };
                while !landed[slot] {
                    landed[flight.landed()?] = true;
                }
                drain(at, staging[slot].slice(length)).map_err(SpillError::Copy)?;
                landed[slot] = false;
                free.push_back(slot);
                at += length as u64;
            }
            Ok(())
        })
    }

    /// Runs `work` with an engine under it, and returns when the engine has ended.
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
            let result = thread::scope(|scope| work(&mut Flight::start(scope, &queue, staging.len())?, staging));
            // Also where requests were direct: some file systems say so and then use the page cache.
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

    /// Takes its name away, where it has one; its contents stay.
    pub fn unlink(&mut self) {
        // In a forked child it is the parent's.
        if let Some(name) = self.name.take().filter(|_| self.held.is_ours()) {
            names::remove(&self.directory.join(name));
        }
    }

    /// The file, for a call that begins now.
    fn file(&self) -> io::Result<ManuallyDrop<File>> {
        self.held.as_type()
    }

    fn check(&self, staging: &[StagingPiece], offset: u64, bytes: u64) -> io::Result<()> {
        let aligned = |number: u64| number.is_multiple_of(ALIGNMENT as u64);
        let fits = |piece: &StagingPiece| piece.bytes > 0 && aligned(piece.bytes as u64) && aligned(piece.address.as_ptr() as u64);
        if staging.is_empty() || !staging.iter().all(fits) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "no staging memory, or none that direct I/O can use"));
        }
        if !aligned(offset) || !aligned(bytes) || offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            let text = format!("{} at {offset} is not a range of whole pages in its {}", Bytes(bytes), Bytes(self.bytes));
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        Ok(())
    }
}

impl Drop for Spill {
    fn drop(&mut self) {
        self.unlink();
        // Whoever else has a descriptor of the file is not to keep the space. What fails here leaves the file as it is, to be
        // freed with its last descriptor. In a forked child, and where the program has closed it, it is not there.
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
