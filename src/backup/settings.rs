//! Run-time settings for backups, which override the environment.

use super::disk;
use std::collections::BTreeMap;
use std::sync::{Arc, RwLock, RwLockWriteGuard};
use std::time::Duration;
use vramctl_config::{self as config, Config, DiskDirectory};
use vramctl_host::{PerProcess, Unpoison, limits};

/// What copies contents back to the device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CopyBy {
    /// The copy engines, or the kernel while they are slower.
    #[default]
    Auto,
    /// The copy engines. For tests and measurements.
    Engines,
    /// The kernel, if it can be loaded. For tests and measurements.
    Kernel,
}

/// Settings made since the process started.
#[derive(Debug, Default)]
struct Settings {
    /// For every tag not in `retain`.
    retain_others: Option<bool>,
    retain: BTreeMap<Arc<str>, bool>,
    directory: Option<DiskDirectory>,
    copy_by: CopyBy,
    kernel_from: Option<usize>,
    host_keep: Option<Duration>,
}

static SETTINGS: PerProcess<RwLock<Settings>> = PerProcess::new(RwLock::default);

fn read<R>(look: impl FnOnce(&Settings) -> R) -> R {
    look(&SETTINGS.get().read().unpoisoned())
}

fn change() -> RwLockWriteGuard<'static, Settings> {
    SETTINGS.get().write().unpoisoned()
}

/// Whether a tag's backups stay in host memory after a resume: the tag's setting, else the setting for all tags, else
/// `VRAMCTL_RETAIN`.
pub fn retains(tag: &str) -> bool {
    read(|said| said.retain.get(tag).copied().or(said.retain_others)).unwrap_or_else(|| Config::get().retains(tag))
}

/// Whether a tag's backups of what a scheduler has taken stay after a resume as long as the contents do not change: unless somebody has said
/// otherwise.
pub fn retains_unchanged(tag: &str) -> bool {
    read(|said| said.retain.get(tag).copied().or(said.retain_others)).unwrap_or_else(|| {
        let config = Config::get();
        config.retains_unchanged || config.retains(tag)
    })
}

/// Whether backups of a tag without its own setting stay in host memory.
pub fn retains_by_default() -> bool {
    read(|said| said.retain_others).unwrap_or_else(|| Config::get().retains_every_tag())
}

/// Sets retention for a tag, or for every tag without its own setting. `None` removes the setting.
pub fn set_retain(tag: Option<Arc<str>>, keep: Option<bool>) {
    let mut settings = change();
    match (tag, keep) {
        (None, keep) => settings.retain_others = keep,
        (Some(tag), Some(keep)) => drop(settings.retain.insert(tag, keep)),
        (Some(tag), None) => drop(settings.retain.remove(&tag)),
    }
}

/// Where the policy `disk` keeps contents.
pub fn disk_directory() -> DiskDirectory {
    read(|said| said.directory.clone()).unwrap_or_else(config::disk_directory)
}

/// Sets the directory for future pauses; `None` restores `VRAMCTL_DISK_DIR`.
pub fn set_disk_directory(directory: Option<DiskDirectory>) {
    if let Some(DiskDirectory { path, named: true }) = &directory {
        disk::remove_stale(path);
    }
    change().directory = directory;
}

/// What copies contents back.
pub fn copy_by() -> CopyBy {
    read(|said| said.copy_by)
}

/// Minimum bytes that make loading a copy kernel worthwhile, unless it is forced; `None` for the default.
pub fn kernel_from() -> Option<usize> {
    read(|said| said.kernel_from)
}

/// Sets what copies in resumes of future pauses, and the minimum bytes for loading a kernel; `None` restores the default. For tests and
/// measurements.
pub fn set_copy_by(copy_by: CopyBy, kernel_from: Option<usize>) {
    let mut settings = change();
    (settings.copy_by, settings.kernel_from) = (copy_by, kernel_from);
}

/// How long unused host memory stays ready after a resume.
pub fn host_keep() -> Duration {
    read(|said| said.host_keep).unwrap_or_else(|| Config::get().host_keep)
}

/// Sets how long host memory stays ready after future resumes, and how much is available; `None` restores
/// `VRAMCTL_HOST_KEEP` and the system's figure. For tests and measurements.
pub fn set_host_keep(keep: Option<Duration>, available: Option<u64>) {
    let mut settings = change();
    settings.host_keep = keep;
    limits::set_available(available);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test, because the settings are process-wide.
    #[test]
    fn the_most_specific_setting_applies_and_can_be_removed() {
        let tag = || Some(Arc::from("settings-tag"));
        assert!(!retains("settings-tag") && !retains_by_default(), "the environment says nothing");
        set_retain(None, Some(true));
        assert!(retains("settings-tag") && retains("any") && retains_by_default());
        set_retain(tag(), Some(false));
        assert!(!retains("settings-tag") && retains("any") && retains_by_default());
        set_retain(None, Some(false));
        set_retain(tag(), Some(true));
        assert!(retains("settings-tag") && !retains("any") && !retains_by_default());
        set_retain(tag(), None);
        assert!(!retains("settings-tag"));
        set_retain(None, None);

        let before = disk_directory();
        let elsewhere = DiskDirectory { path: "/elsewhere".into(), named: false };
        set_disk_directory(Some(elsewhere.clone()));
        assert_eq!(disk_directory(), elsewhere);
        set_disk_directory(None);
        assert_eq!(disk_directory(), before);
    }
}
