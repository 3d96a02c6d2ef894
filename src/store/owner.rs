//! Who could have changed what is on the way to an image: an image has memory and credentials, and runs.

use crate::{Error, Result};
use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use vramctl_host::system::user;

/// Refuses a directory if somebody but the caller and root could replace it or anything in it: each directory and link on the way must be the
/// caller's or root's and writable by nobody else, but a shared one of root's in which nobody replaces what others have (`/tmp`). Returns the way
/// without links.
pub fn check_way(path: &Path) -> Result<PathBuf> {
    walk(path, false)
}

/// Refuses a directory in which somebody else could replace what the caller makes there.
pub fn check_parent(path: &Path) -> Result<PathBuf> {
    walk(path, true)
}

fn walk(path: &Path, may_be_shared: bool) -> Result<PathBuf> {
    const MOST_LINKS: usize = 40;
    let whole = std::path::absolute(path).map_err(Error::io("find", path))?;
    let mut left: VecDeque<OsString> = whole.components().map(|part| part.as_os_str().to_owned()).collect();
    let (mut way, mut links) = (PathBuf::from("/"), 0);
    while let Some(part) = left.pop_front() {
        match Path::new(&part).components().next() {
            Some(Component::RootDir) => way = PathBuf::from("/"),
            Some(Component::ParentDir) => {
                way.pop();
            }
            Some(Component::Normal(_)) => {
                let next = way.join(&part);
                let found = next.symlink_metadata().map_err(Error::io("open", &next))?;
                if found.is_symlink() {
                    links += 1;
                    if links > MOST_LINKS {
                        return Err(refused(path, "too many links are on the way to it"));
                    }
                    check_owner(&next, &found)?;
                    let target = fs::read_link(&next).map_err(Error::io("read", &next))?;
                    let parts: Vec<_> = target.components().map(|part| part.as_os_str().to_owned()).collect();
                    parts.into_iter().rev().for_each(|part| left.push_front(part));
                    continue;
                }
                way = next;
            }
            _ => continue,
        }
        let found = way.symlink_metadata().map_err(Error::io("open", &way))?;
        check_directory(&way, &found, may_be_shared || !left.is_empty())?;
    }
    Ok(way)
}

fn check_directory(path: &Path, found: &Metadata, may_be_shared: bool) -> Result<()> {
    check_owner(path, found)?;
    if !found.is_dir() {
        return Err(refused(path, "it is no directory"));
    }
    let is_shared = found.mode() & libc::S_ISVTX != 0 && found.uid() == 0;
    if found.mode() & 0o022 != 0 && !(may_be_shared && is_shared) {
        return Err(refused(path, &format!("others may write to it (mode {:04o}); run chmod go-w on it", found.mode() & 0o7777)));
    }
    Ok(())
}

/// Refuses a file or directory in the store that is a link, or that somebody else may change.
pub fn check_own(path: &Path, found: &Metadata, wanted: Wanted) -> Result<()> {
    check_owner(path, found)?;
    let why = match wanted {
        _ if found.is_symlink() => "it is a symbolic link".into(),
        Wanted::Directory if !found.is_dir() => "it is no directory".into(),
        Wanted::File if !found.is_file() => "it is no regular file".into(),
        _ if found.mode() & 0o022 != 0 => format!("others may write to it (mode {:04o})", found.mode() & 0o7777),
        _ => return Ok(()),
    };
    Err(refused(path, &why))
}

/// What something should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// A directory.
    Directory,
    /// A regular file.
    File,
}

fn check_owner(path: &Path, found: &Metadata) -> Result<()> {
    let is_safe = [0, user()].contains(&found.uid());
    if is_safe { Ok(()) } else { Err(refused(path, &format!("it belongs to user {}", found.uid()))) }
}

fn refused(path: &Path, why: &str) -> Error {
    Error::Unsafe { path: path.to_owned(), why: why.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    fn why(path: &Path) -> String {
        check_way(path).map_or_else(|error| error.to_string(), |_| String::new())
    }

    #[test]
    fn a_way_that_others_may_change_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let [one, two] = ["one", "one/two"].map(|name| folder.path().join(name));
        fs::create_dir_all(&two).unwrap();
        assert_eq!(check_way(&two).unwrap(), two.canonicalize().unwrap());
        for open in [0o720, 0o702, 0o1777] {
            fs::set_permissions(&two, Permissions::from_mode(open)).unwrap();
            assert!(why(&two).contains("others may write"), "{open:o}");
        }
        if user() == 0 {
            assert!(check_parent(&two).is_ok(), "as in /tmp, nobody replaces there what others have");
        }
        fs::set_permissions(&two, Permissions::from_mode(0o700)).unwrap();
        fs::set_permissions(&one, Permissions::from_mode(0o770)).unwrap();
        assert!(why(&two).contains("others may write"));
        fs::set_permissions(&one, Permissions::from_mode(0o755)).unwrap();
        let link = folder.path().join("link");
        symlink("one/../one/./two", &link).unwrap();
        assert_eq!(check_way(&link).unwrap(), two.canonicalize().unwrap());
        symlink("circle", folder.path().join("circle")).unwrap();
        assert!(why(&folder.path().join("circle")).contains("too many links"));
        if user() != 0 {
            return;
        }
        // Another user's directory, and another user's link.
        chown(&one, Some(65_534), None).unwrap();
        assert!(why(&two).contains("belongs to user 65534") && why(&link).contains("belongs to user 65534"));
        chown(&one, Some(0), None).unwrap();
        std::os::unix::fs::lchown(&link, Some(65_534), None).unwrap();
        assert!(why(&link).contains("belongs to user 65534"));
    }
}
