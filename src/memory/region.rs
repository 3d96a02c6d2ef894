//! Regions: under which tag, and with which backup, the calling thread allocates.

use super::{Backup, Memory};
use crate::config::Config;
use crate::error::Error;
use std::cell::RefCell;
use std::sync::Arc;

/// What an allocation is to be recorded under.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// The name under which it is paused and resumed.
    pub tag: Arc<str>,
    /// What becomes of its contents while it is paused.
    pub backup: Backup,
}

#[derive(Debug)]
struct Region {
    /// No tag: allocations in it are left to CUDA.
    tag: Option<Arc<str>>,
    backup: Option<Backup>,
}

thread_local! {
    static REGIONS: RefCell<Vec<Region>> = const { RefCell::new(Vec::new()) };
}

/// The longest tag, in bytes.
pub const LONGEST_TAG: usize = 128;

/// A tag that can be written on a command line and in `VRAMCTL_BACKUP`.
pub fn checked_tag(tag: &str) -> Result<Arc<str>, Error> {
    let wrong = if tag.is_empty() {
        "is empty"
    } else if tag.len() > LONGEST_TAG {
        "is longer than 128 bytes"
    } else if tag.contains(|c: char| c.is_control() || c == ',' || c == '=') {
        "has a comma, an equals sign or a control character in it"
    } else {
        return Ok(tag.into());
    };
    Err(Error::Invalid(format!("the tag '{}' {wrong}", tag.escape_debug().take(LONGEST_TAG).collect::<String>())))
}

/// Begins a region of this thread, inside the one it may be in. Without a tag, allocations in it are left to CUDA.
/// Without a backup, `VRAMCTL_BACKUP` decides, and `host` where that is silent.
pub fn begin(tag: Option<&str>, backup: Option<Backup>) -> Result<(), Error> {
    let tag = tag.map(checked_tag).transpose()?;
    with_regions(|regions| regions.push(Region { tag, backup })).ok_or_else(|| Error::Invalid("the thread is ending".into()))
}

/// Ends this thread's innermost region.
pub fn end() -> Result<(), Error> {
    match with_regions(Vec::pop) {
        Some(Some(_)) => Ok(()),
        _ => Err(Error::Invalid("this thread is in no region".into())),
    }
}

/// What this thread's allocations are recorded under now; `None`: they are left to CUDA.
pub fn current() -> Option<Policy> {
    let innermost = with_regions(|regions| regions.last().map(|region| (region.tag.clone(), region.backup))).flatten();
    let (tag, explicit) = match innermost {
        Some((tag, backup)) => (tag?, backup),
        None => (Memory::get().process_tag()?, None),
    };
    let backup = explicit.or_else(|| Config::get().backup_of(&tag)).unwrap_or(Backup::Host);
    Some(Policy { tag, backup })
}

/// `None` where the thread is so far gone that it has no thread-locals any more.
fn with_regions<R>(work: impl FnOnce(&mut Vec<Region>) -> R) -> Option<R> {
    REGIONS.try_with(|regions| regions.try_borrow_mut().ok().map(|mut regions| work(&mut regions))).ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tag() -> Option<String> {
        current().map(|policy| policy.tag.to_string())
    }

    #[test]
    fn regions_nest_and_belong_to_their_thread() {
        begin(Some("outer"), Some(Backup::Discard)).unwrap();
        begin(Some("inner"), None).unwrap();
        assert_eq!(tag().as_deref(), Some("inner"));
        assert_eq!(current().unwrap().backup, Backup::Host);
        std::thread::spawn(|| assert_eq!(tag(), None)).join().unwrap();
        begin(None, None).unwrap();
        assert_eq!(tag(), None, "a region without a tag leaves allocations to CUDA");
        end().unwrap();
        end().unwrap();
        assert_eq!(current().unwrap().backup, Backup::Discard);
        end().unwrap();
        assert!(end().is_err());
    }

    #[test]
    fn tags_must_be_writable_on_a_command_line() {
        for wrong in ["", "a,b", "a=b", "a\nb", &"x".repeat(129)] {
            assert!(checked_tag(wrong).is_err(), "{wrong:?}");
        }
        assert!(checked_tag("kv_cache/0 ü").is_ok());
    }
}
