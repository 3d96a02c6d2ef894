//! Why something with images failed.

use std::path::{Path, PathBuf};
use std::{error, fmt, io};

/// What functions of this crate return.
pub type Result<T> = std::result::Result<T, Error>;

/// Why something with images failed. Each displays as a sentence for people.
#[derive(Debug)]
pub enum Error {
    /// The system refused a step.
    Io {
        /// The step, as in "cannot write".
        doing: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's answer.
        error: io::Error,
    },
    /// A file is not what was written: torn, truncated, swapped or flipped.
    Damaged {
        /// The image that needs the file, if one image does.
        image: Option<String>,
        /// The file.
        file: PathBuf,
        /// Where the damage is, if that is known.
        offset: Option<u64>,
        /// What is wrong.
        why: String,
    },
    /// Somebody else could have put a file or directory there, or could change it.
    Unsafe {
        /// The file or directory.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// The program in the image is not the caller's to run; the text says why.
    NotTheCallers(String),
    /// No name for an image; the text says why.
    Name(String),
    /// There is no image of this name.
    NoImage(PathBuf),
    /// There is an image or something else of this name already.
    Exists(PathBuf),
    /// Somebody else works with the image or the store; the text says what.
    Busy(String),
    /// The directory has no store of images.
    NoStore(PathBuf),
    /// The store or an image is of a format that this version does not know.
    Format {
        /// The file that names the format.
        file: PathBuf,
        /// What the file names.
        found: String,
    },
    /// The caller made a mistake; the text says which.
    Invalid(String),
}

impl Error {
    pub(crate) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |error| Self::Io { doing, path, error }
    }

    pub(crate) fn damaged(file: &Path, why: impl Into<String>) -> Self {
        Self::Damaged { image: None, file: file.to_owned(), offset: None, why: why.into() }
    }

    /// The same, with the image that needs the file.
    #[must_use]
    pub(crate) fn of_image(self, name: &str) -> Self {
        match self {
            Self::Damaged { image: None, file, offset, why } => Self::Damaged { image: Some(name.to_owned()), file, offset, why },
            other => other,
        }
    }

    /// The kind of the system's error, if the system refused.
    pub fn io_kind(&self) -> Option<io::ErrorKind> {
        match self {
            Self::Io { error, .. } => Some(error.kind()),
            _ => None,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io { doing, path, error } => write!(out, "cannot {doing} {}: {error}", path.display()),
            Self::Damaged { image, file, offset, why } => {
                if let Some(image) = image {
                    write!(out, "image {image} is damaged: ")?;
                }
                write!(out, "{}", file.display())?;
                if let Some(offset) = offset {
                    write!(out, ", at byte {offset}")?;
                }
                write!(out, ": {why}")
            }
            Self::Unsafe { path, why } => write!(out, "{} is not safe to use: {why}", path.display()),
            Self::NotTheCallers(why) | Self::Name(why) | Self::Busy(why) | Self::Invalid(why) => out.write_str(why),
            Self::NoImage(path) => write!(out, "there is no image {}", path.display()),
            Self::Exists(path) => write!(out, "{} exists already; remove it, or choose another name", path.display()),
            Self::NoStore(path) => write!(out, "{} is no directory of images: it has no .store", path.display()),
            Self::Format { file, found } => {
                write!(out, "{} names the format {found:?}, which this version of vramctl does not know", file.display())
            }
        }
    }
}

impl error::Error for Error {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match self {
            Self::Io { error, .. } => Some(error),
            _ => None,
        }
    }
}
