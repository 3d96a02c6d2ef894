//! Regions: under which tag, and with which backup, the calling thread allocates.
//!
//! A thread's regions nest, and the innermost counts. Beneath them lies its ground: what counts where it is in no region.
//! That is the process's tag, until the thread says something else of itself. What is said of a region goes with it; what
//! is said of the ground stays.

use super::Memory;
use std::cell::RefCell;
use std::sync::Arc;
use vramctl_config::{Config, CpuBackupBackend};
use vramctl_model::{Backup, DEFAULT_TAG, Error, checked_tag};

/// What an allocation is to be recorded under.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// The name under which it is paused and resumed.
    pub tag: Arc<str>,
    /// What becomes of its contents while it is paused.
    pub backup: Backup,
    /// Whether host memory for them may stay after a resume (`pinned`), or is gone when it returns (`mmap`).
    pub backend: CpuBackupBackend,
}

/// What was said of one region, or of a thread's ground. `None`: nothing was.
#[derive(Debug, Clone, Default)]
struct Said {
    /// Whether allocations are managed, and not left to CUDA.
    managed: Option<bool>,
    tag: Option<Arc<str>>,
    backup: Option<Backup>,
}

#[derive(Debug)]
struct Regions {
    ground: Said,
    nested: Vec<Said>,
    /// Of all of them.
    backend: Option<CpuBackupBackend>,
}

thread_local! {
    static REGIONS: RefCell<Regions> =
        const { RefCell::new(Regions { ground: Said { managed: None, tag: None, backup: None }, nested: Vec::new(), backend: None }) };
}

/// Begins a region of this thread, inside the one it may be in. Without a tag, allocations in it are left to CUDA.
/// Without a backup, `VRAMCTL_BACKUP` decides, and `host` where that is silent.
pub fn begin(tag: Option<&str>, backup: Option<Backup>) -> Result<(), Error> {
    let tag = tag.map(checked_tag).transpose()?;
    with_regions(|regions| regions.nested.push(Said { managed: Some(tag.is_some()), tag, backup }))
}

/// Ends this thread's innermost region.
pub fn end() -> Result<(), Error> {
    with_regions(|regions| regions.nested.pop())?.map(drop).ok_or_else(|| Error::Invalid("this thread is in no region".into()))
}

/// What this thread's allocations are recorded under now; `None`: they are left to CUDA.
pub fn current() -> Option<Placement> {
    let (said, on_ground) = innermost();
    let process_tag = if on_ground || said.tag.is_none() || said.managed.is_none() { Memory::get().process_tag() } else { None };
    said.managed.unwrap_or(process_tag.is_some()).then(|| policy(said, on_ground, process_tag))
}

/// What they would be recorded under if they are managed, whether or not they are.
pub fn prospective() -> Placement {
    let (said, on_ground) = innermost();
    policy(said, on_ground, Memory::get().process_tag())
}

/// Says whether this thread's allocations are managed, of the region that it is in or of its ground. The tag and the
/// backup stay as they are, for the next time that it is said.
pub fn set_managed(managed: bool) -> Result<(), Error> {
    change(|said| said.managed = Some(managed))
}

/// Gives the region that this thread is in, or its ground, another tag. Whether it is managed stays as it is.
pub fn set_tag(tag: &str) -> Result<(), Error> {
    let tag = checked_tag(tag)?;
    change(|said| said.tag = Some(tag))
}

/// Gives the region that this thread is in, or its ground, another backup.
pub fn set_backup(backup: Backup) -> Result<(), Error> {
    change(|said| said.backup = Some(backup))
}

/// The kind of host memory for what this thread allocates, in its regions and outside of them.
pub fn backend() -> CpuBackupBackend {
    with_regions(|regions| regions.backend).ok().flatten().unwrap_or(Config::get().cpu_backup_backend)
}

/// Sets it.
pub fn set_backend(backend: CpuBackupBackend) -> Result<(), Error> {
    with_regions(|regions| regions.backend = Some(backend))
}

/// What counts for this thread now, and whether that is its ground.
fn innermost() -> (Said, bool) {
    with_regions(|regions| regions.nested.last().map_or_else(|| (regions.ground.clone(), true), |said| (said.clone(), false)))
        .unwrap_or_default()
}

/// What was said, and where nothing was, what the process and the environment say.
fn policy(said: Said, on_ground: bool, process_tag: Option<Arc<str>>) -> Placement {
    let config = Config::get();
    // Only torch_memory_saver's functions manage a ground in a process without a tag, and its contents are dropped unless
    // told otherwise.
    let unsaid = if !on_ground || process_tag.is_some() { Backup::Host } else { Backup::Discard };
    let tag = said.tag.or(process_tag).unwrap_or_else(|| DEFAULT_TAG.into());
    let environments = || if on_ground { config.ground_backup } else { None };
    let backup = said.backup.or_else(|| config.backup_of(&tag)).or_else(environments).unwrap_or(unsaid);
    Placement { tag, backup, backend: backend() }
}

fn change(change: impl FnOnce(&mut Said)) -> Result<(), Error> {
    with_regions(|regions| change(regions.nested.last_mut().unwrap_or(&mut regions.ground)))
}

/// Fails where the thread is so far gone that it has no thread-locals any more.
fn with_regions<R>(work: impl FnOnce(&mut Regions) -> R) -> Result<R, Error> {
    let done = REGIONS.try_with(|regions| regions.try_borrow_mut().ok().map(|mut regions| work(&mut regions)));
    done.ok().flatten().ok_or_else(|| Error::Invalid("the thread is ending".into()))
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

    /// What `torch_memory_saver`'s functions say holds until they say something else, and inside a region for that region.
    #[test]
    fn what_is_said_of_the_ground_stays_and_of_a_region_goes_with_it() {
        std::thread::spawn(|| {
            set_tag("mine").unwrap();
            assert_eq!(tag(), None, "a tag alone does not have anything managed");
            assert_eq!((&*prospective().tag, prospective().backup), ("mine", Backup::Discard));
            set_managed(true).unwrap();
            set_backup(Backup::Host).unwrap();
            let placement = |tag: &str, backup| Some(Placement { tag: tag.into(), backup, backend: CpuBackupBackend::Pinned });
            assert_eq!(current(), placement("mine", Backup::Host));

            begin(Some("inner"), Some(Backup::Discard)).unwrap();
            set_managed(false).unwrap();
            assert_eq!(tag(), None);
            set_managed(true).unwrap();
            assert_eq!(tag().as_deref(), Some("inner"), "the tag was not forgotten");
            set_tag("other").unwrap();
            set_backup(Backup::Disk).unwrap();
            assert_eq!(current(), placement("other", Backup::Disk));
            end().unwrap();
            assert_eq!(current(), placement("mine", Backup::Host), "the ground is as it was");

            begin(None, None).unwrap();
            assert_eq!(tag(), None);
            set_managed(true).unwrap();
            assert_eq!(tag().as_deref(), Some(DEFAULT_TAG));
            end().unwrap();
            std::thread::spawn(|| assert_eq!(tag(), None)).join().unwrap();
        })
        .join()
        .unwrap();
    }
}
