//! What an image says of itself. A folder without it is none.

use crate::folder::{self, MANIFEST, Stored};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_model::GpuUse;

/// The form of the manifest and of the files beside it.
pub const FORMAT: u32 = 1;

/// An image.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: u32,
    /// The version of vramctl.
    pub vramctl: String,
    /// The version of CRIU.
    pub criu: String,
    /// The kernel's release.
    pub kernel: String,
    /// The newest CUDA version that the driver supports.
    pub cuda: String,
    /// When it was made, in seconds since 1970.
    pub made_s: u64,
    /// The process.
    pub process: SavedProcess,
    /// Its contents, in bytes.
    pub contents_bytes: u64,
    /// Files of the program that are gone when it is.
    #[serde(default)]
    pub kept: Vec<KeptFile>,
    /// All files of the image but the contents and this one, by their names.
    pub files: BTreeMap<PathBuf, Stored>,
    /// Whether the process has TCP connections to itself.
    #[serde(default)]
    pub has_connections: bool,
    /// The size of the file of contents, whose pieces have their hashes in the process.
    pub contents_file_bytes: u64,
}

/// A process in an image.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SavedProcess {
    /// Its id in its own PID namespace, which it has again.
    pub pid: u32,
    /// Its name.
    pub name: String,
    /// Its command line.
    pub program: String,
    /// Its user and group.
    pub user: u32,
    /// Its group.
    pub group: u32,
    /// The directory of its control socket.
    pub sockets: PathBuf,
    /// The GPUs that it sees, and the memory that the driver's restore needs there.
    pub gpus: Vec<GpuUse>,
    /// What CRIU calls its standard streams, where others replace them.
    pub streams: [Option<String>; 3],
}

/// A file of the program that is gone when it is, such as one in `/dev/shm`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct KeptFile {
    /// Its name for the program.
    pub path: PathBuf,
    /// Its name in the image.
    pub file: PathBuf,
    /// Its permissions.
    pub mode: u32,
    /// Its user.
    pub user: u32,
    /// Its group.
    pub group: u32,
}

impl Manifest {
    /// Puts it in its place, durably. From then on, the folder is an image.
    pub fn write(&self, folder: &Path) -> Result<(), CommandError> {
        let (new, place) = (folder.join("manifest.new"), folder.join(MANIFEST));
        let write = || {
            let mut file = File::create(&new)?;
            file.write_all(&serde_json::to_vec_pretty(self)?)?;
            file.sync_all()?;
            fs::rename(&new, &place)?;
            File::open(folder)?.sync_all()
        };
        write().map_err(folder::failed("write", &place))
    }

    /// Reads it.
    pub fn read(image: &Path) -> Result<Self, CommandError> {
        let path = image.join(MANIFEST);
        let text = fs::read(&path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => {
                CommandError::new(Exit::Failed, format!("{} is no image, or one that was never completed", image.display()))
            }
            _ => folder::failed("read", &path)(error),
        })?;
        let damaged = |why: String| CommandError::new(Exit::Failed, format!("{} is damaged: {why}", path.display()));
        let manifest: Self = serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
        if manifest.format != FORMAT {
            let text = format!("{} has format {}, and this vramctl reads {FORMAT}", path.display(), manifest.format);
            return Err(CommandError::new(Exit::Failed, text));
        }
        let stays_inside = |path: &PathBuf| path.components().all(|part| matches!(part, std::path::Component::Normal(_)));
        if !manifest.files.keys().chain(manifest.kept.iter().map(|kept| &kept.file)).all(stays_inside) {
            return Err(damaged("a file lies outside of the image".into()));
        }
        Ok(manifest)
    }

    /// Fails if a file beside it is missing, or not as it was.
    pub fn check_files(&self, image: &Path) -> Result<(), CommandError> {
        let damaged = |path: &Path, why: &str| {
            CommandError::new(Exit::Failed, format!("the image is damaged, and nothing of it was started: {} {why}", path.display()))
        };
        for (name, expected) in &self.files {
            let path = image.join(name);
            let found = folder::describe(&path).map_err(|error| damaged(&path, &format!("cannot be read: {error}")))?;
            if found != *expected {
                return Err(damaged(&path, "is not as it was written"));
            }
        }
        let contents = image.join(folder::CONTENTS);
        let bytes = fs::metadata(&contents).map(|found| found.len()).unwrap_or_default();
        if bytes != self.contents_file_bytes {
            return Err(damaged(&contents, "has another size than was written"));
        }
        let here = folder::files(image, folder::CRIU).map_err(folder::failed("look at", image))?;
        here.iter().find(|file| !self.files.contains_key(*file)).map_or(Ok(()), |more| Err(damaged(more, "does not belong to it")))
    }
}
