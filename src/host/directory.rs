//! A directory that processes of one user share, perhaps under a name in a shared `/tmp`, where somebody else may have put anything.

use crate::system::user;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Why a directory is not used.
#[derive(Debug)]
pub enum Unsafe {
    /// The name is a symbolic link.
    Link,
    /// It is no directory.
    NotDirectory,
    /// It belongs to this user.
    OwnedBy(u32),
    /// Others have access, by its mode.
    Open(u32),
    /// It could not be opened.
    Failed(io::Error),
}

/// Opens a directory if it is one, the user's own, and nobody else's to enter. Nothing is followed, or waited for. `anybodys`: it may belong
/// to another user. Returns the owner, too.
pub fn open_private(path: &Path, anybodys: bool) -> Result<(File, u32), Unsafe> {
    let open = OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW).open(path);
    let directory = match open.map_err(|error| (path.symlink_metadata(), error)) {
        Ok(directory) => directory,
        // The kernel reports "not a directory", which confuses users.
        Err((Ok(there), _)) if there.is_symlink() => return Err(Unsafe::Link),
        Err((Ok(there), _)) if !there.is_dir() => return Err(Unsafe::NotDirectory),
        Err((Ok(there), _)) if there.uid() != user() => return Err(Unsafe::OwnedBy(there.uid())),
        Err((_, error)) => return Err(Unsafe::Failed(error)),
    };
    let found = directory.metadata().map_err(Unsafe::Failed)?;
    if found.uid() != user() && !anybodys {
        return Err(Unsafe::OwnedBy(found.uid()));
    }
    if found.mode() & 0o077 != 0 {
        return Err(Unsafe::Open(found.mode() & 0o777));
    }
    Ok((directory, found.uid()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;
    use std::fs::{self, Permissions};
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::{PermissionsExt, symlink};

    /// Somebody else may have put these where the directory should be.
    #[test]
    fn only_a_directory_of_the_users_own_is_opened() {
        let folder = tempfile::tempdir().unwrap();
        let [directory, link, pipe, none] = ["directory", "link", "pipe", "none"].map(|name| folder.path().join(name));
        fs::create_dir(&directory).unwrap();
        symlink(&directory, &link).unwrap();
        let name = CString::new(pipe.as_os_str().as_bytes()).unwrap();
        // SAFETY: the name ends with NUL.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        // Otherwise, to open it would wait for a writer.
        let _writer = OpenOptions::new().read(true).write(true).open(&pipe).unwrap();
        fs::set_permissions(&directory, Permissions::from_mode(0o701)).unwrap();
        assert!(matches!(open_private(&directory, false), Err(Unsafe::Open(0o701))), "others may enter it");
        fs::set_permissions(&directory, Permissions::from_mode(0o700)).unwrap();
        assert_eq!(open_private(&directory, false).unwrap().1, user());
        assert!(matches!(open_private(&link, false), Err(Unsafe::Link)));
        assert!(matches!(open_private(&pipe, false), Err(Unsafe::NotDirectory)));
        assert!(matches!(open_private(&none, false), Err(Unsafe::Failed(error)) if error.kind() == io::ErrorKind::NotFound));
    }
}
