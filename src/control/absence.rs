//! Processes that live and do not listen, and why not.
//!
//! A process that is saved gives up its socket, and the process of an image has none yet. So whoever saves or loads it leaves a file that says so,
//! `ADDRESS.saving` or `ADDRESS.loading`, and has it locked until the process may listen. The process removes the file once it does.

use crate::address::{Address, namespace_of};
use crate::folder::Folder;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};
use vramctl_host::file_lock::{Sharing, lock_within, try_lock};
use vramctl_host::system::own_folder;

/// More than a file says.
const LONGEST: u64 = 64 << 10;

/// Why a process that lives does not listen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Absence {
    /// Somebody has deleted its socket.
    Deleted,
    /// Somebody saves it.
    Saved,
    /// Somebody loads it.
    Loaded,
    /// Its save has ended.
    Returning,
}

impl fmt::Display for Absence {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Deleted => "it lives, but somebody has deleted its socket, and it creates no other; is it stopped?",
            Self::Saved => "it is being saved",
            Self::Loaded => "it is being loaded",
            Self::Returning => "its save has ended, but it does not listen again; is it stopped?",
        })
    }
}

/// A process that lives and does not listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Absent {
    /// Its pid here.
    pub pid: u32,
    /// Its name, if whoever saves or loads it has said so.
    pub name: Option<String>,
    /// Why it does not listen.
    pub why: Absence,
}

/// Which of the two files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    /// Of a process that is saved.
    Saving,
    /// Of a process that is loaded.
    Loading,
}

/// What a file says.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Says {
    /// What the process is called, from now on if it is loaded.
    pub name: Option<String>,
}

impl Mark {
    const BOTH: [Self; 2] = [Self::Saving, Self::Loading];

    fn ending(self) -> &'static str {
        match self {
            Self::Saving => "saving",
            Self::Loading => "loading",
        }
    }

    fn file(self, address: &Address) -> String {
        format!("{address}.{}", self.ending())
    }

    fn of_file(name: &str) -> Option<(Self, Address)> {
        let (address, ending) = name.rsplit_once('.')?;
        let mark = Self::BOTH.into_iter().find(|mark| mark.ending() == ending)?;
        Address::parse(address).filter(|address| address.namespace.is_some()).map(|address| (mark, address))
    }
}

/// A file and its lock. Dropped, it leaves the file, which the process removes.
#[derive(Debug)]
pub struct Marked {
    directory: Folder,
    name: String,
    /// `None` once the process may listen.
    lock: Option<File>,
}

impl Marked {
    /// Keeps a process from listening, or tells one that does not listen yet what it is called. `None`: somebody else does.
    pub fn new(directory: Folder, mark: Mark, address: &Address, says: &Says) -> io::Result<Option<Self>> {
        /// Whoever looks has it locked for a moment.
        const PATIENCE: Duration = Duration::from_secs(1);
        const LOOK_EVERY: Duration = Duration::from_millis(2);
        let (name, deadline) = (mark.file(address), Instant::now() + PATIENCE);
        let mut file = loop {
            let file = directory.file(&name, File::options().read(true).write(true).create(true).truncate(false))?;
            if !lock_within(&file, Sharing::Exclusive, deadline, LOOK_EVERY)? {
                return Ok(None);
            }
            // Somebody may have taken it for what a dead one has left.
            if file.metadata()?.nlink() > 0 {
                break file;
            }
        };
        file.set_len(0)?;
        file.rewind()?;
        file.write_all(&serde_json::to_vec(says)?)?;
        Ok(Some(Self { directory, name, lock: Some(file) }))
    }

    /// The file's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The lock, which lasts as long as anybody has this file open.
    pub fn lock(&self) -> Option<BorrowedFd<'_>> {
        self.lock.as_ref().map(File::as_fd)
    }

    /// Lets the process listen.
    pub fn let_go(&mut self) {
        self.lock = None;
    }

    /// Removes the file of a process that has ended, or listens.
    pub fn remove(self) {
        let _ = fs::remove_file(self.directory.within_process().join(&self.name));
    }
}

/// A process of which there is a file.
#[derive(Debug)]
pub(crate) struct Found {
    pub address: Address,
    /// Its pid here, if it can be seen.
    pub seen: Option<u32>,
    pub name: Option<String>,
    pub why: Absence,
}

/// The processes of which there is a file. Removes what dead ones have left.
pub(crate) fn marked(directory: &Folder) -> io::Result<Vec<Found>> {
    let (mut found, own) = (Vec::new(), namespace_of(own_folder()));
    for entry in fs::read_dir(directory.within_process())? {
        let file = entry?.file_name();
        let Some((name, (mark, address))) = file.to_str().and_then(|name| Some((name, Mark::of_file(name)?))) else { continue };
        let Ok(opened) = directory.file(name, File::options().read(true)) else { continue };
        let is_locked = try_lock(&opened, Sharing::Shared).is_ok_and(|is_free| !is_free);
        let seen = address.seen_here(own);
        let why = match (mark, is_locked) {
            (Mark::Saving, true) => Absence::Saved,
            (Mark::Loading, true) => Absence::Loaded,
            (Mark::Saving, false) if seen.is_some() => Absence::Returning,
            _ => {
                // A loaded process does not outlive whoever has this lock.
                if mark == Mark::Loading || address.namespace == own {
                    let _ = fs::remove_file(directory.within_process().join(name));
                }
                continue;
            }
        };
        let name = read(opened).and_then(|says| says.name);
        found.push(Found { address, seen, name, why });
    }
    Ok(found)
}

fn read(file: File) -> Option<Says> {
    let mut text = String::new();
    file.take(LONGEST).read_to_string(&mut text).ok()?;
    serde_json::from_str(&text).ok()
}

/// Whether somebody keeps this process from listening.
pub fn is_kept_away() -> bool {
    let [_, own] = Address::own();
    let open = || Folder::open()?.map(|directory| directory.file(&Mark::Saving.file(&own), File::options().read(true))).transpose();
    match open() {
        Ok(Some(file)) => !try_lock(&file, Sharing::Shared).unwrap_or(true),
        // Without a descriptor it cannot be seen, and no socket can be made either.
        Err(error) => matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)),
        Ok(None) => false,
    }
}

/// What this process, which goes on from an image, is told.
pub fn told() -> Option<Says> {
    let [_, own] = Address::own();
    let directory = Folder::open().ok()??;
    read(directory.file(&Mark::Loading.file(&own), File::options().read(true)).ok()?)
}

/// Removes the files of this process, which listens.
pub(crate) fn remove_own(directory: &Folder) {
    let [_, own] = Address::own();
    // A save may be about to begin.
    let marks = Mark::BOTH.into_iter().filter(|mark| *mark == Mark::Loading || !is_kept_away());
    marks.for_each(|mark| _ = fs::remove_file(directory.within_process().join(mark.file(&own))));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process;

    /// Whoever looks for a process finds it, and learns why it does not listen, at each moment of a save.
    #[test]
    #[cfg_attr(miri, ignore = "opens a directory")]
    fn a_process_is_known_until_it_listens_or_has_ended() {
        let folder = tempfile::tempdir().unwrap();
        let directory = Folder::at(folder.path()).unwrap();
        let [_, own] = Address::own();
        let found = || {
            let found = marked(&directory).unwrap().into_iter();
            found.map(|found| (found.seen, found.name.unwrap_or_default(), found.why)).collect::<Vec<_>>()
        };
        let says = |name: &str| Says { name: Some(name.to_owned()) };
        let mut saved = Marked::new(directory.clone(), Mark::Saving, &own, &says("engine")).unwrap().unwrap();
        assert_eq!(found(), [(Some(process::id()), "engine".to_owned(), Absence::Saved)]);
        assert!(Marked::new(directory.clone(), Mark::Saving, &own, &says("other")).unwrap().is_none(), "one saves it");
        saved.let_go();
        assert_eq!(found(), [(Some(process::id()), "engine".to_owned(), Absence::Returning)]);
        saved.remove();
        assert_eq!(found(), []);
        // What dead ones leave is gone: a process that was saved, and whoever has loaded one.
        let dead = Address { pid: u32::MAX >> 1, ..own.clone() };
        drop(Marked::new(directory.clone(), Mark::Saving, &dead, &says("dead")).unwrap());
        let elsewhere = Address { namespace: Some(1), ..own };
        let loads = Marked::new(directory.clone(), Mark::Loading, &elsewhere, &says("e1")).unwrap();
        assert_eq!(found(), [(None, "e1".to_owned(), Absence::Loaded)]);
        drop(loads);
        assert_eq!(found(), []);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
