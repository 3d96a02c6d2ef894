//! Regions: the tag and backup policy of the calling thread's allocations.
//!
//! Regions nest per thread, and the innermost applies. Beneath them lies the thread's default, which applies outside any
//! region: by default the process's tag, unless the thread overrides it. Settings of a region end with it; settings of the
//! default stay.

use super::{Memory, Placement};
use std::cell::RefCell;
use std::sync::Arc;
use vramctl_config::{Config, CpuBackupBackend};
use vramctl_model::{DEFAULT_TAG, Error, Policy, checked_tag};

/// The settings of one region or of a thread's default; `None` if unset.
#[derive(Debug, Clone, Default)]
struct Settings {
    /// Whether allocations are managed instead of left to CUDA.
    managed: Option<bool>,
    tag: Option<Arc<str>>,
    backup: Option<Policy>,
}

#[derive(Debug)]
struct Regions {
    thread_default: Settings,
    nested: Vec<Settings>,
    /// Applies to the whole thread.
    backend: Option<CpuBackupBackend>,
}

thread_local! {
    static REGIONS: RefCell<Regions> =
        const { RefCell::new(Regions { thread_default: Settings { managed: None, tag: None, backup: None }, nested: Vec::new(), backend: None }) };
}

/// Begins a region on this thread, nested in the current one. Without a tag, its allocations are left to CUDA. Without a
/// backup, `VRAMCTL_BACKUP` decides, and defaults to `host`.
pub fn begin(tag: Option<&str>, backup: Option<Policy>) -> Result<(), Error> {
    let tag = tag.map(checked_tag).transpose()?;
    with_regions(|regions| regions.nested.push(Settings { managed: Some(tag.is_some()), tag, backup }))
}

/// Ends this thread's innermost region.
pub fn end() -> Result<(), Error> {
    with_regions(|regions| regions.nested.pop())?.map(drop).ok_or_else(|| Error::Invalid("this thread is in no region".into()))
}

/// What this thread's allocations are recorded under now; `None` if they are left to CUDA.
pub fn current() -> Option<Placement> {
    let (said, is_thread_default) = innermost();
    let process_tag = if is_thread_default || said.tag.is_none() || said.managed.is_none() { Memory::get().process_tag() } else { None };
    said.managed.unwrap_or(process_tag.is_some()).then(|| policy(said, is_thread_default, process_tag))
}

/// What a library's own memory is recorded under: the program's regions are not for it. Its contents are always kept.
pub fn of_library(tag: &str) -> Placement {
    Placement { tag: tag.into(), backup: Policy::Host, backend: CpuBackupBackend::Pinned }
}

/// What they are recorded under when managed, whether or not they are now.
pub fn prospective() -> Placement {
    let (said, is_thread_default) = innermost();
    policy(said, is_thread_default, Memory::get().process_tag())
}

/// Sets whether allocations in this thread's current region (or the thread's default) are managed. The tag and backup stay, for when
/// it is managed again.
pub fn set_managed(managed: bool) -> Result<(), Error> {
    change(|said| said.managed = Some(managed))
}

/// Sets the tag of this thread's current region (or the thread's default), without changing whether it is managed.
pub fn set_tag(tag: &str) -> Result<(), Error> {
    let tag = checked_tag(tag)?;
    change(|said| said.tag = Some(tag))
}

/// Sets the backup of this thread's current region (or the thread's default).
pub fn set_backup(backup: Policy) -> Result<(), Error> {
    change(|said| said.backup = Some(backup))
}

/// The kind of host memory for this thread's allocations, inside and outside regions.
pub fn backend() -> CpuBackupBackend {
    with_regions(|regions| regions.backend).ok().flatten().unwrap_or(Config::get().cpu_backup_backend)
}

/// Sets the kind of host memory for this thread's allocations.
pub fn set_backend(backend: CpuBackupBackend) -> Result<(), Error> {
    with_regions(|regions| regions.backend = Some(backend))
}

/// The settings in effect on this thread, and whether they are the thread's default.
fn innermost() -> (Settings, bool) {
    with_regions(|regions| regions.nested.last().map_or_else(|| (regions.thread_default.clone(), true), |said| (said.clone(), false)))
        .unwrap_or_default()
}

/// Fills in unset values from the process and the environment.
fn policy(said: Settings, is_thread_default: bool, process_tag: Option<Arc<str>>) -> Placement {
    let config = Config::get();
    // Without a process tag, only torch_memory_saver's functions manage without a region, and they drop contents by default.
    let unsaid = if !is_thread_default || process_tag.is_some() { Policy::Host } else { Policy::Discard };
    let tag = said.tag.or(process_tag).unwrap_or_else(|| DEFAULT_TAG.into());
    let environments = || if is_thread_default { config.thread_default_backup } else { None };
    let backup = said.backup.or_else(|| config.backup_of(&tag)).or_else(environments).unwrap_or(unsaid);
    Placement { tag, backup, backend: backend() }
}

fn change(change: impl FnOnce(&mut Settings)) -> Result<(), Error> {
    with_regions(|regions| change(regions.nested.last_mut().unwrap_or(&mut regions.thread_default)))
}

/// Fails if the thread is exiting and its thread-locals are destroyed.
fn with_regions<R>(work: impl FnOnce(&mut Regions) -> R) -> Result<R, Error> {
    let done = REGIONS.try_with(|regions| regions.try_borrow_mut().ok().map(|mut regions| work(&mut regions)));
    done.ok().flatten().ok_or_else(|| Error::Invalid("the thread is exiting".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tag() -> Option<String> {
        current().map(|policy| policy.tag.to_string())
    }

    #[test]
    fn regions_nest_and_belong_to_their_thread() {
        begin(Some("outer"), Some(Policy::Discard)).unwrap();
        begin(Some("inner"), None).unwrap();
        assert_eq!(tag().as_deref(), Some("inner"));
        assert_eq!(current().unwrap().backup, Policy::Host);
        std::thread::spawn(|| assert_eq!(tag(), None)).join().unwrap();
        begin(None, None).unwrap();
        assert_eq!(tag(), None, "a region without a tag leaves allocations to CUDA");
        end().unwrap();
        end().unwrap();
        assert_eq!(current().unwrap().backup, Policy::Discard);
        end().unwrap();
        assert!(end().is_err());
    }

    /// `torch_memory_saver`'s settings stay in effect until changed or, inside a region, until it ends.
    #[test]
    fn settings_of_the_ground_stay_and_those_of_a_region_end_with_it() {
        std::thread::spawn(|| {
            set_tag("mine").unwrap();
            assert_eq!(tag(), None, "a tag alone does not manage anything");
            assert_eq!((&*prospective().tag, prospective().backup), ("mine", Policy::Discard));
            set_managed(true).unwrap();
            set_backup(Policy::Host).unwrap();
            let placement = |tag: &str, backup| Some(Placement { tag: tag.into(), backup, backend: CpuBackupBackend::Pinned });
            assert_eq!(current(), placement("mine", Policy::Host));

            begin(Some("inner"), Some(Policy::Discard)).unwrap();
            set_managed(false).unwrap();
            assert_eq!(tag(), None);
            set_managed(true).unwrap();
            assert_eq!(tag().as_deref(), Some("inner"), "the tag was not forgotten");
            set_tag("other").unwrap();
            set_backup(Policy::Disk).unwrap();
            assert_eq!(current(), placement("other", Policy::Disk));
            end().unwrap();
            assert_eq!(current(), placement("mine", Policy::Host), "the thread's default is as it was");

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
