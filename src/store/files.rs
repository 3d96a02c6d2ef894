//! The files of an image: which there are, and their hashes.

use crate::disk::{self, Disk};
use crate::hash::{self, CHUNK, Hash, Subtree};
use crate::manifest::FileHash;
use crate::owner::{self, Wanted};
use crate::{Error, Result, name};
use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use vramctl_host::{Unpoison, worker};

/// Most threads that hash.
const THREADS: usize = 8;

/// What an image has beside its manifest.
#[derive(Debug, Default)]
pub struct Tree {
    /// Its files, by their paths in the image, with their sizes.
    pub files: BTreeMap<String, u64>,
    /// Its directories, below the image's own.
    pub directories: Vec<PathBuf>,
}

impl Tree {
    /// Looks at all. Links, devices and what others may change is refused.
    pub fn of(image: &Path) -> Result<Self> {
        let mut tree = Self::default();
        tree.walk(image, Path::new(""))?;
        Ok(tree)
    }

    fn walk(&mut self, image: &Path, folder: &Path) -> Result<()> {
        let path = image.join(folder);
        for entry in fs::read_dir(&path).map_err(Error::io("read", &path))? {
            let entry = entry.map_err(Error::io("read", &path))?;
            let (inside, path) = (folder.join(entry.file_name()), entry.path());
            if inside == Path::new(name::MANIFEST) || inside == disk::new_name(Path::new(name::MANIFEST)) {
                continue;
            }
            if !name::stays_inside(&inside) {
                return Err(Error::damaged(&path, "it is no part of an image"));
            }
            let found = path.symlink_metadata().map_err(Error::io("open", &path))?;
            if found.is_dir() {
                owner::check_own(&path, &found, Wanted::Directory)?;
                self.directories.push(inside.clone());
                self.walk(image, &inside)?;
                continue;
            }
            owner::check_own(&path, &found, Wanted::File)?;
            let text = inside.to_str().ok_or_else(|| Error::Invalid(format!("the name of {} is no UTF-8", path.display())))?;
            self.files.insert(text.to_owned(), found.len());
        }
        Ok(())
    }
}

/// Takes all rights on what is in an image from others, before [`Tree::of`] looks.
pub fn make_private(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder).map_err(Error::io("read", folder))? {
        let path = entry.map_err(Error::io("read", folder))?.path();
        let found = path.symlink_metadata().map_err(Error::io("open", &path))?;
        let mode = if found.is_dir() { 0o700 } else { 0o600 };
        if (found.is_dir() || found.is_file()) && found.permissions().mode() & 0o7777 != mode {
            fs::set_permissions(&path, Permissions::from_mode(mode)).map_err(Error::io("change the rights of", &path))?;
        }
        if found.is_dir() {
            make_private(&path)?;
        }
    }
    Ok(())
}

/// Makes all files and directories of an image durable, but for the image's own directory.
pub fn sync(disk: &Disk, image: &Path, tree: &Tree) -> Result<()> {
    for path in tree.files.keys().map(|path| image.join(path)) {
        disk.sync(&disk.open(&path)?, &path)?;
    }
    tree.directories.iter().rev().try_for_each(|path| disk.sync_directory(&image.join(path)))
}

/// The hashes of files, by several threads.
pub fn hashes(disk: &Disk, image: &Path, files: &BTreeMap<String, u64>) -> Result<Vec<FileHash>> {
    let files: Vec<_> = files.iter().collect();
    let chunks = |bytes: u64| bytes.div_ceil(CHUNK).max(1);
    let work: Vec<_> =
        files.iter().enumerate().flat_map(|(file, (_, bytes))| (0..chunks(**bytes)).map(move |chunk| (file, chunk))).collect();
    let (next, done) = (AtomicUsize::new(0), Mutex::new(vec![None; work.len()]));
    let hash_some = || -> Result<()> {
        let mut buffer = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some((file, chunk)) = work.get(at) else { return Ok(()) };
            let (path, bytes) = files[*file];
            let path = image.join(path);
            let length = (*bytes - chunk * CHUNK).min(CHUNK);
            buffer.resize(length as usize, 0);
            disk.read(&disk.open(&path)?, &path, &mut buffer, chunk * CHUNK)?;
            let hashed = if *bytes <= CHUNK { Part::Whole(Hash::of(&buffer)) } else { Part::Chunk(hash::subtree(&buffer, chunk * CHUNK)) };
            done.lock().unpoisoned()[at] = Some(hashed);
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(THREADS).min(work.len());
    thread::scope(|scope| {
        // Fewer threads are only slower.
        let others: Vec<_> = (1..threads).filter_map(|_| worker::spawn_scoped(scope, "vramctl-hash", hash_some).ok()).collect();
        let own = hash_some();
        others.into_iter().map(|other| other.join().expect("a thread that does not panic")).fold(own, Result::and)
    })?;
    let mut parts = done.into_inner().unpoisoned().into_iter().map(|part| part.expect("each was hashed"));
    let hashes = files.into_iter().map(|(path, bytes)| {
        let parts: Vec<_> = parts.by_ref().take(chunks(*bytes) as usize).collect();
        FileHash { path: path.clone(), bytes: *bytes, hash: joined(&parts, *bytes) }
    });
    Ok(hashes.collect())
}

/// The hash of a file, or of a part of it.
#[derive(Clone, Copy)]
enum Part {
    Whole(Hash),
    Chunk(Subtree),
}

fn joined(parts: &[Part], bytes: u64) -> Hash {
    let subtrees = parts.iter().map(|part| match part {
        Part::Whole(_) => None,
        Part::Chunk(subtree) => Some(*subtree),
    });
    match (subtrees.collect::<Option<Vec<_>>>(), parts) {
        (Some(subtrees), _) => hash::whole(&subtrees, bytes),
        (None, [Part::Whole(hash), ..]) => *hash,
        (None, _) => unreachable!("one chunk, or several"),
    }
}

/// Refuses an image of which a file is not what its manifest says, or of which there are more or fewer files.
pub fn check(disk: &Disk, image: &Path, wanted: &[FileHash]) -> Result<()> {
    let tree = Tree::of(image)?;
    for file in wanted {
        let path = image.join(&file.path);
        match tree.files.get(&file.path) {
            None => return Err(Error::damaged(&path, "it is not there")),
            Some(bytes) if *bytes != file.bytes => {
                return Err(Error::damaged(&path, format!("it has {bytes} bytes instead of {}", file.bytes)));
            }
            Some(_) => (),
        }
    }
    let by_path: BTreeMap<_, _> = wanted.iter().map(|file| (&file.path, file.hash)).collect();
    if let Some(path) = tree.files.keys().find(|path| !by_path.contains_key(path)) {
        return Err(Error::damaged(&image.join(path), "the manifest does not know it"));
    }
    match hashes(disk, image, &tree.files)?.into_iter().find(|found| by_path[&found.path] != found.hash) {
        Some(found) => Err(Error::damaged(&image.join(found.path), "its hash is not that in the manifest")),
        None => Ok(()),
    }
}
