//! Names of images and of files in them.

use crate::{Error, Result};
use std::path::{Component, Path};

/// Longest name of an image.
const MOST: usize = 128;

/// Refuses a name that is no plain file name: an image could lie outside its directory, or be taken for the store's own files.
pub fn check(name: &str) -> Result<()> {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "._-+@:=,".contains(letter);
    let why = match name {
        "" => "it is empty".into(),
        _ if name.starts_with(['.', '-']) => format!("it begins with {:?}", &name[..1]),
        _ if name.len() > MOST => format!("it has {} letters, and {MOST} are the most", name.len()),
        _ => match name.chars().find(|letter| !is_plain(*letter)) {
            Some(letter) => format!("it has {letter:?} in it"),
            None => return Ok(()),
        },
    };
    Err(Error::Name(format!("{name:?} is no name for an image: {why}. Letters, digits and ._-+@:=, may be in one")))
}

/// Whether a path in an image stays in it: `criu/…`, `files/…` or `contents`, without a step up.
pub fn stays_inside(path: &Path) -> bool {
    let first = path.components().next();
    let is_placed = [CRIU, FILES, CONTENTS].iter().any(|name| first == Some(Component::Normal(name.as_ref())));
    is_placed && path.components().all(|part| matches!(part, Component::Normal(_)))
}

/// The folder of an image that has CRIU's part.
pub const CRIU: &str = "criu";
/// The folder of an image that has files of the program.
pub const FILES: &str = "files";
/// The file of an image that lists its pieces.
pub const CONTENTS: &str = "contents";
/// The file of an image that makes it one.
pub const MANIFEST: &str = "manifest.json";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_nowhere_else() {
        for name in ["llama", "llama-3:8b", "a.b", "x", &"n".repeat(MOST)] {
            check(name).unwrap();
        }
        for name in ["", ".", "..", ".store", "a/b", "/a", "../a", "a\0", "a\nb", "-rf", "a b", "ä", &"n".repeat(MOST + 1)] {
            assert!(matches!(check(name), Err(Error::Name(_))), "{name:?}");
        }
    }

    #[test]
    fn paths_stay_inside() {
        for path in ["criu/core-1.img", "files/dev/shm/x", "contents"] {
            assert!(stays_inside(Path::new(path)), "{path}");
        }
        for path in ["", "/criu/x", "criu/../x", "..", "manifest.json", "other/x", "./criu/x"] {
            assert!(!stays_inside(Path::new(path)), "{path}");
        }
    }
}
