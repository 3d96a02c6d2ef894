//! Shared memory with a name: the program's files in `/dev/shm`, which are in the image and come back in a folder of the program's own.
//!
//! A file that was opened by one name and now has others alone, as a semaphore of `sem_open` is from the start, CRIU links once more beside its old name:
//! `link_remap.NUMBER`. It leaves these to the load, with the same numbers for every program. Here they are in the image, and the folder is as before.

use crate::details::refused;
use crate::look;
use crate::patch::{self, Link};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, Metadata, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Component, Path, PathBuf};
use vramctl_coordinator::failure::CommandError;
use vramctl_store::Remap;

/// Where it is.
const FOLDER: &str = "/dev/shm";

/// What to do about control sockets that are there.
pub const SOCKETS_ELSEWHERE: &str = "start programs that are to be saved with VRAMCTL_DIR in another place";

/// How the names begin that CRIU gives.
const LINK: &str = "link_remap.";

/// Which file it is, whatever its name.
pub fn identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// A path in a process's root.
pub fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// The names that CRIU has given, by what it has written.
pub fn links_in(images: &Path) -> io::Result<Vec<Link>> {
    let remaps = images.join("remap-fpath.img");
    if remaps.exists() { patch::links(&fs::read(images.join("files.img"))?, &fs::read(remaps)?) } else { Ok(Vec::new()) }
}

/// Whether it comes with the image.
pub fn is_here(path: &Path) -> bool {
    path.starts_with(FOLDER)
}

/// Why a loaded program cannot do with this: it would not see it. `what`: its name, with a verb. `remedy`: what to do.
pub fn hidden(what: &str, path: &Path, remedy: &str) -> Option<String> {
    let whole = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let is_hidden = is_here(path) || is_here(&whole);
    is_hidden.then(|| format!("{what} {}, and a loaded program has a {FOLDER} of its own: {remedy}", path.display()))
}

/// Removes such names.
pub fn unlink(root: &Path, links: &[Link]) {
    for link in links {
        let _ = fs::remove_file(below(root, &link.name));
    }
}

/// The files of a process that it has by a name that was removed, while they have others, and the folder of that name.
fn by_removed_names(pid: u32) -> impl Iterator<Item = (PathBuf, Metadata)> {
    look::opened(pid).into_iter().filter(|(_, metadata)| metadata.nlink() > 0).filter_map(|(path, metadata)| {
        let was = Path::new(path.to_str()?.strip_suffix(" (deleted)")?);
        Some((was.parent()?.to_owned(), metadata))
    })
}

/// Whether CRIU will have to give names to files that these processes have here.
pub fn has_other_names(pids: &[u32]) -> bool {
    pids.iter().any(|pid| by_removed_names(*pid).any(|(folder, _)| is_here(&folder)))
}

/// Removes the names of files of these processes that a CRIU has left that was killed.
pub fn unlink_what_is_left(pids: &BTreeSet<u32>) {
    for pid in pids {
        let root = PathBuf::from(format!("/proc/{pid}/root"));
        for (folder, metadata) in by_removed_names(*pid) {
            let is_left = |path: &&PathBuf| {
                path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(LINK))
                    && fs::symlink_metadata(path).is_ok_and(|found| identity(&found) == identity(&metadata))
            };
            files_below(&below(&root, &folder), false).iter().filter(is_left).for_each(|path| _ = fs::remove_file(path));
        }
    }
}

/// Whether CRIU has failed because a name that it would give is there.
pub fn are_names_taken(errors: &str) -> bool {
    errors.lines().any(|line| line.contains("Can't link remap") && line.contains("File exists"))
}

/// Such names, as many as say what they are.
pub fn names_taken(root: &Path) -> Vec<String> {
    const SAY: usize = 3;
    let names = files_below(&below(root, Path::new(FOLDER)), false).into_iter();
    let names = names.filter_map(|path| path.file_name()?.to_str().filter(|name| name.starts_with(LINK)).map(str::to_owned));
    names.take(SAY).map(|name| format!("{FOLDER}/{name}")).collect()
}

/// Keeps others from saving programs here while CRIU gives its names. `None` while another does that.
pub fn lock(root: &Path) -> io::Result<Option<File>> {
    let folder = File::open(below(root, Path::new(FOLDER)))?;
    // SAFETY: touches no memory. The lock goes with the file.
    if unsafe { libc::flock(folder.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
        return Ok(Some(folder));
    }
    let error = io::Error::last_os_error();
    if error.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(error) }
}

/// The plain files of a folder, with those of the folders in it if that is asked for.
fn files_below(folder: &Path, with_folders: bool) -> Vec<PathBuf> {
    let (mut found, mut due) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(folder) = due.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_file() => found.push(entry.path()),
                Ok(kind) if kind.is_dir() && with_folders => due.push(entry.path()),
                _ => (),
            }
        }
    }
    found
}

/// Copies the files that these processes have open or mapped, each once, and lists all of their names: another process may open it by one that none has
/// used. `links`: those that CRIU has given.
pub fn copy(pids: &[u32], root: &Path, links: &[Link], to: &Path) -> Result<Vec<Remap>, CommandError> {
    let opened = pids.iter().flat_map(|pid| look::opened(*pid)).filter(|(path, _)| is_here(path));
    let opened: BTreeSet<_> = opened.map(|(_, metadata)| identity(&metadata)).collect();
    let mut names = BTreeMap::<(u64, u64), Vec<(PathBuf, Metadata)>>::new();
    for file in files_below(&below(root, Path::new(FOLDER)), true) {
        let path = Path::new("/").join(file.strip_prefix(root).unwrap_or(&file));
        let metadata = fs::symlink_metadata(&file).map_err(refused("look at", &path))?;
        // Whoever had it open may have ended since CRIU has seen it.
        if opened.contains(&identity(&metadata)) || links.iter().any(|link| link.name == path) {
            names.entry(identity(&metadata)).or_default().push((path, metadata));
        }
    }
    let mut kept = Vec::new();
    for (number, names) in names.into_values().enumerate() {
        let from = number.to_string();
        let (first, _) = &names[0];
        fs::copy(below(root, first), to.join(&from)).map_err(refused("copy", first))?;
        kept.extend(names.iter().map(|(path, metadata)| Remap {
            from: from.clone(),
            to: path.to_string_lossy().into_owned(),
            mode: metadata.mode() & 0o7777,
            uid: metadata.uid(),
            gid: metadata.gid(),
        }));
    }
    Ok(kept)
}

/// Puts them back, from the files of an image.
pub fn put_back(files: &Path, remaps: &[&Remap]) -> Result<(), CommandError> {
    let mut there = BTreeMap::new();
    for remap in remaps {
        let to = Path::new(&remap.to);
        let first = *there.entry(&remap.from).or_insert(to);
        put_one_back(files, remap, first).map_err(refused("put back", to))?;
    }
    Ok(())
}

/// `first`: the first name of the file.
fn put_one_back(files: &Path, remap: &Remap, first: &Path) -> io::Result<()> {
    let to = Path::new(&remap.to);
    let leads_elsewhere = |path: &Path| path.components().any(|part| part == Component::ParentDir);
    if !is_here(to) || leads_elsewhere(to) || leads_elsewhere(Path::new(&remap.from)) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    to.parent().map_or(Ok(()), fs::create_dir_all)?;
    if first != to {
        return fs::hard_link(first, to);
    }
    let (mut from, mut new) = (File::open(files.join(&remap.from))?, File::options().write(true).create_new(true).open(to)?);
    io::copy(&mut from, &mut new)?;
    chown(to, Some(remap.uid), Some(remap.gid))?;
    fs::set_permissions(to, Permissions::from_mode(remap.mode))
}
