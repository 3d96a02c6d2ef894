//! The free memory of a GPU, in a file in the socket directory: one process per GPU asks the driver and writes it, the others read it.
//!
//! The process that holds the file's lock asks. The lock is released when its holder dies, and the next process that checks takes over. The
//! file is read, not mapped: truncating it must not kill the program.

use crate::discovery::Directory;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::Duration;
use vramctl_host::Held;
use vramctl_host::file_lock::{Sharing, try_lock_byte};
use vramctl_host::system::now;

/// The file of one GPU.
#[derive(Debug)]
pub struct Gauge(Held);

/// Free bytes, the time, and a check word of both, which detects a torn value.
const WORDS: usize = 3;
const MIX: u64 = 0x7672_616d_6374_6c21;

impl Gauge {
    /// Opens the file for the GPU with this UUID.
    pub fn open(uuid: &str) -> io::Result<Self> {
        Self::within(&Directory::open_or_create()?, uuid)
    }

    fn within(directory: &Directory, uuid: &str) -> io::Result<Self> {
        let name: String = uuid.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
        let file = directory.file(&format!("free-{name}"), File::options().read(true).write(true).create(true).truncate(false))?;
        Held::new(file).map(Self)
    }

    /// Whether this process asks the driver. Takes over if nobody else does.
    pub fn is_ours(&self) -> bool {
        // The lock belongs to the open file, so taking it twice is fine.
        self.0.as_type::<File>().is_ok_and(|file| try_lock_byte(&file, 0, Sharing::Exclusive).unwrap_or(false))
    }

    /// For the others.
    pub fn write(&self, free: u64) -> io::Result<()> {
        let (now, mut bytes) = (now(), [0; WORDS * 8]);
        for (place, word) in bytes.chunks_exact_mut(8).zip([free, now, free ^ now ^ MIX]) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        self.0.as_type::<File>()?.write_all_at(&bytes, 0)
    }

    /// The last value, unless it is older than this.
    pub fn read(&self, within: Duration) -> Option<u64> {
        let mut bytes = [0; WORDS * 8];
        self.0.as_type::<File>().ok()?.read_exact_at(&mut bytes, 0).ok()?;
        let mut words = bytes.chunks_exact(8).filter_map(|word| Some(u64::from_ne_bytes(word.try_into().ok()?)));
        let (free, then, mixed) = (words.next()?, words.next()?, words.next()?);
        let is_fresh = now().checked_sub(then).is_some_and(|age| u128::from(age) <= within.as_nanos());
        (mixed == free ^ then ^ MIX && is_fresh).then_some(free)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, iter, thread};

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    #[cfg_attr(miri, ignore = "opens a directory")]
    fn one_asks_the_others_read_and_the_next_takes_over() {
        let folder = tempfile::tempdir().unwrap();
        let directory = Directory::at(folder.path()).unwrap();
        let gauge = || Gauge::within(&directory, "GPU-1/../..").unwrap();
        let (one, other) = (gauge(), gauge());
        assert_eq!(other.read(LONG), None, "nobody has written anything");
        assert!(one.is_ours() && one.is_ours() && !other.is_ours());
        for free in [0, u64::MAX, 5 << 30] {
            one.write(free).unwrap();
            assert_eq!(other.read(LONG), Some(free));
        }
        assert_eq!(other.read(Duration::ZERO), None, "too old");
        drop(one);
        // A child that another test starts has the file, too, for a moment.
        assert!(iter::repeat_with(|| thread::sleep(Duration::from_millis(1))).take(10_000).any(|()| other.is_ours()));
        assert!(!gauge().is_ours());
        let file = folder.path().join("free-GPU-1");
        for garbage in [&b""[..], b"short", &[7; 24], &[0; 100]] {
            fs::write(&file, garbage).unwrap();
            assert_eq!(other.read(LONG), None, "{garbage:?}");
        }
    }

    /// The directory may be one that others can write to.
    #[test]
    #[cfg_attr(miri, ignore = "opens a directory")]
    fn a_link_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let directory = Directory::at(folder.path()).unwrap();
        let elsewhere = folder.path().join("elsewhere");
        fs::write(&elsewhere, "contents").unwrap();
        std::os::unix::fs::symlink(&elsewhere, folder.path().join("free-GPU-1")).unwrap();
        assert!(Gauge::within(&directory, "GPU-1").is_err());
        assert_eq!(fs::read(&elsewhere).unwrap(), b"contents");
    }
}
