//! The directory of the sockets, and files beside them.
//!
//! All access goes through the directory's descriptor (`/proc/thread-self/fd/N/…`). So nobody can swap the directory after the
//! checks, and a long path fits into `sockaddr_un`.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use vramctl_config as config;
use vramctl_host::directory::{Unsafe, open_private};
use vramctl_host::system::{own_folder, user};

/// The directory, open and checked: not a symbolic link, owned by the user, closed to others.
#[derive(Debug, Clone)]
pub struct Folder {
    path: PathBuf,
    owner: u32,
    open: Arc<File>,
}

impl Folder {
    /// Opens the user's directory. `Ok(None)` if there is none yet, so no process has managed memory. Root may open anybody's.
    pub fn open() -> io::Result<Option<Self>> {
        match Self::check(config::socket_directory(), user() == 0) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            answer => answer.map(Some),
        }
    }

    pub(crate) fn create(how: &fs::DirBuilder) -> io::Result<Self> {
        let path = config::socket_directory();
        match how.create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(naming(path, &error)),
            _ => Self::check(path, false),
        }
    }

    fn check(path: &Path, anybodys: bool) -> io::Result<Self> {
        let refused = match open_private(path, anybodys) {
            Ok((open, owner)) => return Ok(Self { path: path.to_owned(), owner, open: Arc::new(open) }),
            Err(refused) => refused,
        };
        let why = match refused {
            Unsafe::Failed(error) => return Err(naming(path, &error)),
            Unsafe::Link => "a symbolic link; set VRAMCTL_DIR to the directory itself".into(),
            Unsafe::NotDirectory => "not a directory; set VRAMCTL_DIR to one".into(),
            Unsafe::OwnedBy(owner) => format!("owned by user {owner}, not by you; set VRAMCTL_DIR to a directory of yours"),
            Unsafe::Open(mode) => format!(
                "open to other users (mode {mode:o}); chmod 700 it if only you use it, else set VRAMCTL_DIR to a directory of your own"
            ),
        };
        Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("{}: {why}", path.display())))
    }

    /// The user who owns it: only that one, and root, can have put anything there.
    pub fn owner(&self) -> u32 {
        self.owner
    }

    /// Its path, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The directory by its descriptor, in this process.
    pub fn within_process(&self) -> PathBuf {
        own_folder().join(format!("fd/{}", self.open.as_raw_fd()))
    }

    /// This directory, for tests.
    pub fn at(path: &Path) -> io::Result<Self> {
        fs::set_permissions(path, fs::Permissions::from_mode(0o700))?;
        Self::check(path, false)
    }

    /// Its descriptor.
    pub(crate) fn opened(&self) -> &File {
        &self.open
    }

    /// Taken for another user's, in tests.
    #[cfg(test)]
    pub(crate) fn of_another(self, owner: u32) -> Self {
        Self { owner, ..self }
    }

    /// Opens a file beside the sockets, and creates it if `options` say so. The directory may be another user's, who could have put
    /// anything there, and nothing of it may be followed, or waited for: only a plain file of the directory's owner or of this user,
    /// without another name, is opened.
    pub fn file(&self, name: &str, options: &mut OpenOptions) -> io::Result<File> {
        let file = options.mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(self.within_process().join(name))?;
        let found = file.metadata()?;
        // Zero links: it has just been removed.
        if !found.is_file() || found.nlink() > 1 || ![self.owner, user()].contains(&found.uid()) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        // The directory's owner must be able to open what root creates.
        if found.uid() != self.owner && found.nlink() == 1 {
            fchown(&file, Some(self.owner), None)?;
        }
        Ok(file)
    }

    pub(crate) fn within(&self, file: &str) -> PathBuf {
        self.within_process().join(file)
    }
}

/// An error, with the path in its text.
pub(crate) fn naming(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;
    use std::os::unix::ffi::OsStringExt;
    use std::os::unix::fs::symlink;

    /// A command that root runs must not touch what the directory's owner points it to, nor wait for it.
    #[test]
    #[cfg_attr(miri, ignore = "opens a directory")]
    fn only_a_plain_file_without_another_name_is_opened() {
        let folder = tempfile::tempdir().unwrap();
        let directory = Folder::at(folder.path()).unwrap();
        let elsewhere = folder.path().join("elsewhere");
        fs::write(&elsewhere, "contents").unwrap();
        symlink(&elsewhere, folder.path().join("linked")).unwrap();
        fs::hard_link(&elsewhere, folder.path().join("also")).unwrap();
        fs::create_dir(folder.path().join("folder")).unwrap();
        let pipe = CString::new(folder.path().join("pipe").into_os_string().into_vec()).unwrap();
        // SAFETY: the name ends with NUL.
        assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
        for name in ["linked", "also", "folder", "pipe"] {
            assert!(directory.file(name, File::options().read(true)).is_err(), "{name}");
            assert!(directory.file(name, File::options().read(true).write(true).create(true).truncate(false)).is_err(), "{name}");
        }
        assert!(directory.file("new", File::options().write(true).create_new(true)).is_ok());
        assert_eq!(fs::read(&elsewhere).unwrap(), b"contents");
    }
}
