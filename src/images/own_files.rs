//! Files that a program writes at any place: the image has copies, and each loaded program writes into one of its own.
//!
//! A loaded program's are in a tmpfs that only its mount namespace has, bound over the files of these names: they go with the program, whatever ends it,
//! and the files themselves stay as they are.

use crate::details::refused;
use crate::namespace::{mount, unmount};
use crate::patch;
use crate::shared::{below, identity};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, Metadata, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Component, Path, PathBuf};
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_store::Remap;

/// Whether the program's file of this name is another than this command's, as a loaded program's own copy is. `root`: the program's.
pub fn is_own(root: &Path, path: &Path) -> bool {
    let of = |path: &Path| fs::symlink_metadata(path).ok().filter(Metadata::is_file).map(|found| identity(&found));
    let its = of(&below(root, path));
    its.is_some() && its != of(path)
}

/// Copies these files of a program that is stopped, each once, whatever its names. `images`: what CRIU has written, which goes on with the sizes of then.
pub fn copy(root: &Path, paths: &BTreeSet<PathBuf>, images: &Path, to: &Path) -> Result<Vec<Remap>, CommandError> {
    if paths.is_empty() {
        return Ok(Vec::new());
    }
    let sizes = fs::read(images.join("files.img")).and_then(|files| patch::sizes(&files)).map_err(refused("read", images))?;
    let (mut copied, mut kept) = (BTreeMap::new(), Vec::new());
    for path in paths {
        let its = below(root, path);
        let metadata = fs::symlink_metadata(&its).map_err(refused("look at", path))?;
        let from = if let Some(known) = copied.get(&identity(&metadata)) {
            String::clone(known)
        } else {
            let from = format!("own-{}", copied.len());
            let bytes = fs::copy(&its, to.join(&from)).map_err(refused("copy", path))?;
            if sizes.get(path).is_some_and(|seen| *seen != bytes) {
                let why = format!("another program writes {}, of which the image gets a copy; try again", path.display());
                return Err(CommandError::new(Exit::Busy, why));
            }
            copied.insert(identity(&metadata), from.clone());
            from
        };
        kept.push(Remap {
            from,
            to: path.to_string_lossy().into_owned(),
            mode: metadata.mode() & 0o7777,
            uid: metadata.uid(),
            gid: metadata.gid(),
        });
    }
    Ok(kept)
}

/// Gives this mount namespace copies of its own. `files`: those of the image. `place`: a new folder, which is gone afterwards.
pub fn put_back(files: &Path, remaps: &[&Remap], place: &Path) -> Result<(), CommandError> {
    if remaps.is_empty() {
        return Ok(());
    }
    let made = fs::create_dir(place).and_then(|()| mount("tmpfs", place, Some("tmpfs"), libc::MS_NOSUID | libc::MS_NODEV));
    made.map_err(refused("make", place))?;
    for remap in remaps {
        put_one_back(files, remap, &place.join(&remap.from)).map_err(refused("give the program its own copy of", Path::new(&remap.to)))?;
    }
    // What is bound stays.
    unmount(place).and_then(|()| fs::remove_dir(place)).map_err(refused("remove", place))
}

/// `own`: where its copy is, or will be.
fn put_one_back(files: &Path, remap: &Remap, own: &Path) -> io::Result<()> {
    let to = Path::new(&remap.to);
    let leads_elsewhere = |path: &Path| path.components().any(|part| part == Component::ParentDir);
    if !to.is_absolute() || leads_elsewhere(to) || Path::new(&remap.from).components().count() != 1 {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    // It may have several names.
    if !own.exists() {
        let (mut from, mut new) = (File::open(files.join(&remap.from))?, File::options().write(true).create_new(true).open(own)?);
        io::copy(&mut from, &mut new)?;
        chown(own, Some(remap.uid), Some(remap.gid))?;
        fs::set_permissions(own, Permissions::from_mode(remap.mode))?;
    }
    mount(own, to, None, libc::MS_BIND)
}
