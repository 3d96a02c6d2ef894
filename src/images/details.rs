//! What an image says of its process beside what every image says.

use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_model::GpuUse;
use vramctl_store::{Error, Gpu, Manifest};

/// The name of these in a manifest.
const NAME: &str = "process";

/// A lock on a file that a process of the program has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lock {
    /// The file.
    pub path: PathBuf,
    /// Whether it is one of the whole file by `flock`, rather than one of a range.
    pub is_of_file: bool,
    /// Whether nobody else may have one.
    pub is_exclusive: bool,
    /// The first byte of the range.
    pub start: i64,
    /// Its length; 0 up to the end, wherever that is.
    pub bytes: i64,
}

/// What belongs to an image of one process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Details {
    /// Its command line.
    pub program: String,
    /// The directory of its control socket.
    pub sockets: PathBuf,
    /// The GPUs that it sees, and the memory that the driver's restore needs there.
    pub gpus: Vec<GpuUse>,
    /// The memory that the allocations need on each GPU.
    #[serde(default)]
    pub contents: Vec<GpuUse>,
    /// All GPUs of the machine, in the order of their indices.
    #[serde(default)]
    pub machine: Vec<Gpu>,
    /// The newest CUDA version that the driver supports.
    pub cuda: String,
    /// Whether it has TCP connections to itself.
    pub has_connections: bool,
    /// The folders that it has open or works in.
    #[serde(default)]
    pub folders: Vec<PathBuf>,
    /// Its locks on files that it goes on with.
    #[serde(default)]
    pub locks: Vec<Lock>,
}

impl Details {
    /// Puts them into a manifest.
    pub fn put(&self, manifest: &mut Manifest) {
        manifest.more.insert(NAME.into(), serde_json::to_value(self).unwrap_or_default());
    }

    /// Those of a manifest.
    pub fn of(manifest: &Manifest) -> Result<Self, CommandError> {
        let unknown = || CommandError::new(Exit::Failed, "this is an image of another kind, which this vramctl does not load");
        manifest.more.get(NAME).and_then(|details| serde_json::from_value(details.clone()).ok()).ok_or_else(unknown)
    }
}

/// The directory of images that an image is in, and its name there.
pub fn split(image: &Path) -> Result<(&Path, &str), CommandError> {
    let name = image.file_name().and_then(|name| name.to_str());
    let no_name = || CommandError::new(Exit::Usage, format!("{} is no name for an image", image.display()));
    let directory = image.parent().filter(|directory| !directory.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok((directory, name.ok_or_else(no_name)?))
}

/// A failure of the store's.
#[allow(clippy::needless_pass_by_value)] // for `map_err`
pub fn failed(error: Error) -> CommandError {
    let exit = match &error {
        Error::Busy(_) => Exit::Busy,
        Error::Name(_) => Exit::Usage,
        _ => Exit::Failed,
    };
    CommandError::new(exit, error.to_string())
}

/// A failure with a file.
pub fn refused(what: &str, path: &Path) -> impl FnOnce(io::Error) -> CommandError {
    let text = format!("cannot {what} {}", path.display());
    move |error| CommandError::new(Exit::Failed, format!("{text}: {error}"))
}

/// So many of something. `more`: what its name ends in if that is not one.
pub fn counted(count: usize, name: &str, more: &str) -> String {
    format!("{count} {name}{}", if count == 1 { "" } else { more })
}
