//! The folder of an image.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use vramctl_coordinator::failure::{CommandError, Exit};

/// What CRIU has written.
pub const CRIU: &str = "criu";
/// Files of the program that are gone when it is.
pub const FILES: &str = "files";
/// The contents of the GPU memory.
pub const CONTENTS: &str = "contents";
/// What makes it an image.
pub const MANIFEST: &str = "manifest.json";

/// A file of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stored {
    /// Its size.
    pub bytes: u64,
    /// Its hash.
    pub blake3: String,
}

/// Names a file in a message.
pub fn failed(what: &str, path: &Path) -> impl FnOnce(io::Error) -> CommandError {
    let text = format!("cannot {what} {}", path.display());
    move |error| CommandError::new(Exit::Failed, format!("{text}: {error}"))
}

/// Makes a folder that only this user can use.
pub fn make(path: &Path) -> Result<(), CommandError> {
    DirBuilder::new().mode(0o700).create(path).map_err(failed("make", path))
}

/// Creates a file that is new.
pub fn create(path: &Path) -> Result<File, CommandError> {
    File::options().write(true).read(true).create_new(true).mode(0o600).open(path).map_err(failed("create", path))
}

/// All plain files below, by their names from `top` on.
pub fn files(top: &Path, below: &str) -> io::Result<Vec<PathBuf>> {
    let (mut folders, mut found) = (vec![top.join(below)], Vec::new());
    while let Some(folder) = folders.pop() {
        let entries = match fs::read_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                folders.push(entry.path());
            } else {
                found.push(entry.path().strip_prefix(top).unwrap_or(&entry.path()).to_owned());
            }
        }
    }
    found.sort();
    Ok(found)
}

/// The size and hash of a file.
pub fn describe(path: &Path) -> io::Result<Stored> {
    let mut file = File::options().read(true).custom_flags(libc::O_NOFOLLOW).open(path)?;
    let mut hasher = blake3::Hasher::new();
    let (mut buffer, mut bytes) = (vec![0; 1 << 20], 0);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(Stored { bytes, blake3: hasher.finalize().to_hex().to_string() }),
            count => {
                hasher.update(&buffer[..count]);
                bytes += count as u64;
            }
        }
    }
}

/// Makes files and their folders durable.
pub fn sync(top: &Path, files: &BTreeMap<PathBuf, Stored>) -> io::Result<()> {
    let mut folders = std::collections::BTreeSet::from([top.to_owned()]);
    for file in files.keys() {
        File::open(top.join(file))?.sync_all()?;
        folders.extend(top.join(file).ancestors().skip(1).take_while(|folder| *folder != top).map(Path::to_owned));
    }
    folders.iter().try_for_each(|folder| File::open(folder)?.sync_all())
}

/// Refuses an image that another user could have made or changed: it has memory in it, and what is in it is run.
pub fn check_owner(folder: &Path) -> Result<(), CommandError> {
    // SAFETY: touches no memory.
    let own = unsafe { libc::geteuid() };
    let full = fs::canonicalize(folder).map_err(failed("open", folder))?;
    for (above, path) in full.ancestors().enumerate() {
        let found = fs::symlink_metadata(path).map_err(failed("look at", path))?;
        // In a folder with the sticky bit, as `/tmp`, others cannot replace what is not theirs.
        let is_open = found.mode() & 0o022 != 0 && !(above > 0 && found.mode() & libc::S_ISVTX != 0);
        if ![own, 0].contains(&found.uid()) || is_open {
            let text = format!(
                "{}: another user could have changed it, so nothing of it is run; it must be yours or root's alone",
                path.display()
            );
            return Err(CommandError::new(Exit::Failed, text));
        }
    }
    Ok(())
}
