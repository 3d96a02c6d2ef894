//! All steps on the file system, one function each, so that tests can have any of them fail.

use crate::owner::{self, Wanted};
use crate::piece::ALIGNMENT;
use crate::{Error, Result};
use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A step on the file system, before which the hook is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// A directory is made.
    MakeDirectory,
    /// A file is created.
    Create,
    /// A file is opened.
    Open,
    /// Bytes are written.
    Write,
    /// Bytes are read.
    Read,
    /// A file is made durable.
    Sync,
    /// A directory's entries are made durable.
    SyncDirectory,
    /// A file or directory gets another name. The hook is told the new one.
    Rename,
    /// A file, or a directory with all in it, is removed.
    Remove,
}

/// What tests do before a step: let it happen, or fail with the system's answer.
pub type Hook = dyn Fn(Step, &Path) -> io::Result<()> + Send + Sync;

/// The file system.
#[derive(Clone, Default)]
pub struct Disk {
    hook: Option<Arc<Hook>>,
}

impl fmt::Debug for Disk {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Disk")
    }
}

impl Disk {
    #[cfg(feature = "test-support")]
    pub fn with_hook(hook: Arc<Hook>) -> Self {
        Self { hook: Some(hook) }
    }

    fn before(&self, step: Step, path: &Path) -> io::Result<()> {
        self.hook.as_ref().map_or(Ok(()), |hook| hook(step, path))
    }

    /// Makes a directory that is the user's alone, if there is none.
    pub fn make_directory(&self, path: &Path) -> Result<()> {
        let made = self.before(Step::MakeDirectory, path).and_then(|()| DirBuilder::new().mode(0o700).create(path));
        match made {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => check_directory(path),
            other => other.map_err(Error::io("make the directory", path)),
        }
    }

    /// Makes a directory that is new.
    pub fn make_new_directory(&self, path: &Path) -> Result<()> {
        let made = self.before(Step::MakeDirectory, path).and_then(|()| DirBuilder::new().mode(0o700).create(path));
        made.map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists => Error::Exists(path.to_owned()),
            _ => Error::io("make the directory", path)(error),
        })
    }

    /// Creates a file that is new, for the user alone.
    pub fn create(&self, path: &Path) -> Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        self.before(Step::Create, path).and_then(|()| options.open(path)).map_err(Error::io("create", path))
    }

    /// Opens a file that the user and root alone may have changed. No link is followed, and nothing waited for.
    pub fn open(&self, path: &Path) -> Result<File> {
        self.open_with(path, OpenOptions::new().read(true))
    }

    /// The same, to add to its end or to lock it.
    pub fn open_to_write(&self, path: &Path) -> Result<File> {
        self.open_with(path, OpenOptions::new().read(true).write(true))
    }

    fn open_with(&self, path: &Path, options: &mut OpenOptions) -> Result<File> {
        let opened = self.before(Step::Open, path).and_then(|()| options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path));
        let file = opened.map_err(|error| match path.symlink_metadata() {
            Ok(found) if !found.is_file() => owner::check_own(path, &found, Wanted::File).unwrap_err(),
            _ => Error::io("open", path)(error),
        })?;
        let found = file.metadata().map_err(Error::io("open", path))?;
        owner::check_own(path, &found, Wanted::File)?;
        Ok(file)
    }

    /// Reads a small file.
    pub fn read_whole(&self, path: &Path, most: u64) -> Result<Vec<u8>> {
        let file = self.open(path)?;
        let bytes = file.metadata().map_err(Error::io("read", path))?.len();
        if bytes > most {
            return Err(Error::damaged(path, format!("it has {bytes} bytes, and {most} are the most")));
        }
        let mut all = vec![0; bytes as usize];
        self.read(&file, path, &mut all, 0)?;
        Ok(all)
    }

    /// Fills a buffer from an offset. A file that ends before is damaged.
    pub fn read(&self, file: &File, path: &Path, into: &mut [u8], at: u64) -> Result<()> {
        self.before(Step::Read, path).and_then(|()| file.read_exact_at(into, at)).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => Error::Damaged {
                image: None,
                file: path.to_owned(),
                offset: Some(at),
                why: format!("it ends before the {} bytes that should be here", into.len()),
            },
            _ => Error::io("read", path)(error),
        })
    }

    /// Writes all bytes at an offset.
    pub fn write(&self, file: &File, path: &Path, bytes: &[u8], at: u64) -> Result<()> {
        let mut written = self.before(Step::Write, path).and_then(|()| file.write_all_at(bytes, at));
        if let Err(error) = &written
            && error.raw_os_error() == Some(libc::EINVAL)
            && is_direct(file)
        {
            // A file system that takes the flag but not the request.
            set_direct(file, false);
            written = file.write_all_at(bytes, at);
        }
        written.map_err(Error::io("write", path))
    }

    /// Cuts a file off.
    pub fn set_length(&self, file: &File, path: &Path, bytes: u64) -> Result<()> {
        self.before(Step::Write, path).and_then(|()| file.set_len(bytes)).map_err(Error::io("write", path))
    }

    /// Makes a file durable.
    pub fn sync(&self, file: &File, path: &Path) -> Result<()> {
        self.before(Step::Sync, path).and_then(|()| file.sync_all()).map_err(Error::io("make durable", path))
    }

    /// Makes a directory's entries durable.
    pub fn sync_directory(&self, path: &Path) -> Result<()> {
        let synced = self.before(Step::SyncDirectory, path).and_then(|()| File::open(path)).and_then(|file| file.sync_all());
        synced.map_err(Error::io("make durable", path))
    }

    /// Gives a file or directory another name.
    pub fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.before(Step::Rename, to).and_then(|()| fs::rename(from, to)).map_err(Error::io("rename a file to", to))
    }

    /// Removes a file, if it is there.
    pub fn remove_file(&self, path: &Path) -> Result<()> {
        unless_absent(self.before(Step::Remove, path).and_then(|()| fs::remove_file(path))).map_err(Error::io("remove", path))
    }

    /// Removes a directory with all in it, if it is there. Follows no link.
    pub fn remove_tree(&self, path: &Path) -> Result<()> {
        unless_absent(self.before(Step::Remove, path).and_then(|()| fs::remove_dir_all(path))).map_err(Error::io("remove", path))
    }

    /// Writes a file so that it is whole or absent, and durable once its directory is. Whatever had its name is replaced.
    pub fn write_whole(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let new = new_name(path);
        self.remove_file(&new)?;
        let written = self.create(&new).and_then(|file| {
            self.write(&file, &new, bytes, 0)?;
            self.sync(&file, &new)
        });
        written.and_then(|()| self.rename(&new, path)).inspect_err(|_| drop(self.remove_file(&new)))
    }
}

/// What a file is called until it is whole.
pub fn new_name(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    name.into()
}

/// Refuses a directory of the store that is a link, or that somebody else may change.
pub fn check_directory(path: &Path) -> Result<()> {
    let found = path.symlink_metadata().map_err(Error::io("open", path))?;
    owner::check_own(path, &found, Wanted::Directory)
}

fn unless_absent(result: io::Result<()>) -> io::Result<()> {
    result.or_else(|error| if error.kind() == ErrorKind::NotFound { Ok(()) } else { Err(error) })
}

/// Has a file's requests go past the page cache, or through it. `false` if the file system does not support that.
pub fn set_direct(file: &File, direct: bool) -> bool {
    // SAFETY: touches no memory.
    unsafe {
        let flags = libc::fcntl(file.as_raw_fd(), libc::F_GETFL);
        let wanted = if direct { flags | libc::O_DIRECT } else { flags & !libc::O_DIRECT };
        flags >= 0 && libc::fcntl(file.as_raw_fd(), libc::F_SETFL, wanted) == 0
    }
}

/// Whether a file's requests go past the page cache.
pub fn is_direct(file: &File) -> bool {
    // SAFETY: touches no memory.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) & libc::O_DIRECT != 0 }
}

/// Reserves disk space, where the file system can: direct writes beside each other wait for each other where a file grows.
pub fn reserve(file: &File, at: u64, bytes: u64) {
    // SAFETY: touches no memory. A failure shows in the writes.
    unsafe { libc::fallocate(file.as_raw_fd(), 0, at as libc::off_t, bytes as libc::off_t) };
}

/// Whether the page cache has all of a range of a file.
pub fn is_cached(file: &File, at: u64, bytes: usize) -> bool {
    let pages = bytes.div_ceil(ALIGNMENT);
    let mut held = [0_u8; 1024];
    debug_assert!(pages <= held.len() && at.is_multiple_of(ALIGNMENT as u64));
    // SAFETY: a mapping of our own, which nothing reads from and which ends here, and a vector with a byte for each of its pages.
    let answer = unsafe {
        let mapped = libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), at as libc::off_t);
        if mapped == libc::MAP_FAILED {
            return false;
        }
        let answer = libc::mincore(mapped, bytes, held.as_mut_ptr());
        libc::munmap(mapped, bytes);
        answer
    };
    answer == 0 && held[..pages].iter().all(|page| page & 1 == 1)
}
